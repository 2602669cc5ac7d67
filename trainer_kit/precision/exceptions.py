"""Modules that compute in another dtype than the rest, or are not converted with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, TypeAlias, final

import torch
from torch import Tensor, nn

from trainer_kit.core.errors import PrecisionError, did_you_mean
from trainer_kit.core.tensors import map_tensors
from trainer_kit.core.torch_private import forward_pre_hooks
from trainer_kit.core.types import Nested

__all__ = [
    "DTYPES",
    "Exceptions",
    "ModulePrecision",
    "apply_exceptions",
    "call_layers",
    "except_modules",
    "excepted",
    "is_excepted",
    "refuse_ties",
]

DTYPES: Final = {
    "64": torch.float64,
    "32": torch.float32,
    "bf16": torch.bfloat16,
    "16": torch.float16,
}


@final
@dataclass(frozen=True)
class ModulePrecision:
    """The dtype in which one module computes, independent of the rest.

    Attributes:
        dtype: of its inputs, and of its parameters where whole models are cast.
        output_dtype: of its outputs; None: the dtype of the rest where whole models are cast, else they are not cast.
            ``ModulePrecision(torch.float32, torch.float32)`` on a head passes float32 logits to the loss.

    Example:
        >>> from trainer_kit.precision import TruePrecision
        >>> head = ModulePrecision(torch.float32, output_dtype=torch.float32)
        >>> precision = TruePrecision(torch.bfloat16, exceptions={"head": head})
        >>> precision.exceptions["head"].output_dtype
        torch.float32
    """

    dtype: torch.dtype
    output_dtype: torch.dtype | None = None


Exceptions: TypeAlias = (
    "Mapping[str, ModulePrecision | torch.dtype | str] | Iterable[str]"
)
"""Patterns of modules, each with the dtype in which those modules compute.

A pattern (as in `fnmatch`) matches a module's name (``"encoder.layers.0.norm"``) or the name of its class
(``"LayerNorm"``), and includes the modules inside. A dtype may be a word: ``"64"``, ``"32"``, ``"bf16"`` or ``"16"``.
Patterns without dtypes exclude modules: casts and autocast leave them in float32, fp8 and quantization in the dtype of
the rest.
"""


def except_modules(exceptions: Exceptions) -> dict[str, ModulePrecision | None]:
    """The exceptions as a mapping of patterns; None: no dtype was given.

    Raises:
        PrecisionError: for an unknown dtype.

    Example:
        >>> except_modules({"*norm*": "32"})
        {'*norm*': ModulePrecision(dtype=torch.float32, output_dtype=None)}
        >>> except_modules(["head"])
        {'head': None}
    """
    if isinstance(exceptions, str):
        exceptions = [exceptions]
    if not isinstance(exceptions, Mapping):
        return dict.fromkeys(exceptions)
    precisions: dict[str, ModulePrecision | None] = {}
    for pattern, precision in exceptions.items():
        if isinstance(precision, str):
            if precision not in DTYPES:
                raise PrecisionError(
                    f"unknown dtype {precision!r} for {pattern!r}",
                    fix=did_you_mean(precision, DTYPES),
                )
            precision = DTYPES[precision]
        if isinstance(precision, torch.dtype):
            precision = ModulePrecision(precision)
        precisions[pattern] = precision
    return precisions


def excepted(
    module: nn.Module, exceptions: Mapping[str, ModulePrecision | None]
) -> Iterator[tuple[str, nn.Module, ModulePrecision | None]]:
    """The outermost modules that a pattern matches, each with the dtype of the first pattern that does.

    Raises:
        PrecisionError: a pattern matches no module.
    """
    unused = set(exceptions)
    # `named_modules` yields a module before those inside it, so the outermost match comes first.
    outer_names: list[str] = []
    for name, submodule in module.named_modules():
        if not name:
            continue
        names = (name, type(submodule).__name__)
        matching = [p for p in exceptions if any(fnmatchcase(n, p) for n in names)]
        unused.difference_update(matching)
        # Also patterns that match only inside of another exception are used.
        if matching and not is_excepted(name, outer_names):
            outer_names.append(name)
            yield name, submodule, exceptions[matching[0]]
    if unused:
        raise _unused_pattern(module, exceptions, min(unused))


def _unused_pattern(
    module: nn.Module, exceptions: Mapping[str, object], pattern: str
) -> PrecisionError:
    names = [name for name, _ in module.named_modules() if name]
    listed = ", ".join(names[:8])
    if len(names) > 8:
        listed += ", …"
    return PrecisionError(
        f"the model has no module named {pattern!r}",
        found=f"exceptions={sorted(exceptions)}; modules: {listed}",
        fix="use a name from named_modules(), a class name, or a pattern such as '*norm*'",
    )


def is_excepted(name: str, names: Iterable[str]) -> bool:
    """Whether the module of this name is one of ``names``, or inside one."""
    return any(name == outer or name.startswith(f"{outer}.") for outer in names)


def refuse_ties(module: nn.Module, names: Sequence[str]) -> None:
    """Raise a PrecisionError where an exception shares a weight with another module: one weight has one dtype."""
    if not names:
        return
    owners: dict[int, str] = {}
    # With duplicates: each name of a shared weight says which module uses it.
    for path, parameter in module.named_parameters(remove_duplicate=False):
        first_path = owners.setdefault(id(parameter), path)
        if is_excepted(path, names) != is_excepted(first_path, names):
            raise PrecisionError(
                "a weight shared by two modules cannot have two dtypes",
                found=f"{first_path} and {path}",
                fix="list both modules as exceptions, or neither",
            )


def apply_exceptions(
    module: nn.Module,
    modules: Iterable[tuple[nn.Module, torch.dtype, torch.dtype | None]],
    context: Callable[[torch.dtype], AbstractContextManager[object]],
) -> None:
    """Make exactly these modules compute in another dtype.

    Args:
        module: the whole module; exceptions of an earlier precision are removed.
        modules: each with its dtype and the dtype of its outputs (None: they are not cast).
        context: creates the context of a forward in a dtype.
    """
    # A module may have been converted by an earlier run with other exceptions.
    for submodule in module.modules():
        if _has_exception(submodule):
            del submodule.__dict__["forward"]
        hooks = forward_pre_hooks(submodule)
        for key in [key for key, hook in hooks.items() if hook is _do_nothing]:
            del hooks[key]
    for submodule, dtype, output_dtype in modules:
        # On the user's module, so that wrappers and hooks around it stay; torch has no hook around ``forward`` itself.
        submodule.__dict__["forward"] = _ForwardInDtype(
            submodule.forward, context(dtype), dtype, output_dtype
        )
    call_layers(module, _has_exception)


def _has_exception(module: nn.Module) -> bool:
    return isinstance(module.__dict__.get("forward"), _ForwardInDtype)


def call_layers(module: nn.Module, is_changed: Callable[[nn.Module], bool]) -> None:
    """Make transformer layers that have a changed module inside call it in evaluation, too.

    torch's fast path for evaluation reads the weights without calling the layers, unless a hook is registered.
    """
    for layer in module.modules():
        if not isinstance(layer, nn.TransformerEncoderLayer):
            continue
        # Any hook switches the fast path off, one of the user's too.
        if forward_pre_hooks(layer):
            continue
        if any(is_changed(inner) for inner in layer.modules() if inner is not layer):
            layer.register_forward_pre_hook(_do_nothing)


def _do_nothing(module: nn.Module, args: object) -> None:
    pass


@final
class _ForwardInDtype:
    """A forward in another dtype than the rest."""

    def __init__(
        self,
        forward: Callable[..., object],
        context: AbstractContextManager[object],
        dtype: torch.dtype,
        output_dtype: torch.dtype | None,
    ) -> None:
        self.forward = forward
        self.context = context
        self.dtype = dtype
        self.output_dtype = output_dtype

    @property
    def __wrapped__(self) -> Callable[..., object]:
        """Gives this object the signature of the module's forward, which libraries inspect."""
        return self.forward

    def __call__(self, *arguments: object, **options: object) -> object:
        with self.context:
            arguments = _cast_tensors(arguments, self.dtype)
            options = _cast_tensors(options, self.dtype)
            outputs = self.forward(*arguments, **options)
        if self.output_dtype is None:
            return outputs
        return _cast_tensors(outputs, self.output_dtype)


def _cast_tensors(values: Nested, dtype: torch.dtype) -> Nested:
    """Cast the floating-point tensors of a batch or an output."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(values, cast)
