"""Modules that compute in another dtype than the rest, or are not converted with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, TypeAlias, final

import torch
from torch import nn

from trainer_kit.core.errors import PrecisionError, did_you_mean
from trainer_kit.core.tensors import map_tensors

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
    """

    dtype: torch.dtype
    output_dtype: torch.dtype | None = None


Exceptions: TypeAlias = (
    "Mapping[str, ModulePrecision | torch.dtype | str] | Iterable[str]"
)
"""Patterns of modules, each with the dtype in which those modules compute.

A pattern (as in `fnmatch`) matches a module's name (``"encoder.layers.0.norm"``) or the name of its class
(``"LayerNorm"``), and includes the modules inside. A dtype may be a word: ``"64"``, ``"32"``, ``"bf16"`` or ``"16"``.
Patterns without dtypes exclude modules: casts and autocast leave them in float32, fp8 and quantisation in the dtype of
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
    made: dict[str, ModulePrecision | None] = {}
    for pattern, given in exceptions.items():
        if isinstance(given, str):
            if given not in DTYPES:
                raise PrecisionError(
                    f"unknown dtype {given!r} for {pattern!r}",
                    fix=did_you_mean(given, DTYPES),
                )
            given = DTYPES[given]
        made[pattern] = (
            ModulePrecision(given) if isinstance(given, torch.dtype) else given
        )
    return made


def excepted(
    module: nn.Module, exceptions: Mapping[str, ModulePrecision | None]
) -> Iterator[tuple[str, nn.Module, ModulePrecision | None]]:
    """The outermost modules that a pattern matches, each with the dtype of the first pattern that does.

    Raises:
        PrecisionError: a pattern matches no module.
    """
    unused = set(exceptions)
    inside: list[str] = []
    for name, part in module.named_modules():
        if not name:
            continue
        matching = [
            p
            for p in exceptions
            if fnmatchcase(name, p) or fnmatchcase(type(part).__name__, p)
        ]
        unused.difference_update(matching)
        if matching and not any(name.startswith(f"{outer}.") for outer in inside):
            inside.append(name)
            yield name, part, exceptions[matching[0]]
    if unused:
        names = [name for name, _ in module.named_modules() if name]
        raise PrecisionError(
            f"the model has no module named {sorted(unused)[0]!r}",
            found=f"exceptions={sorted(exceptions)}; modules: {', '.join(names[:8])}{', …' if len(names) > 8 else ''}",
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
    for path, parameter in module.named_parameters(remove_duplicate=False):
        other = owners.setdefault(id(parameter), path)
        if is_excepted(path, names) != is_excepted(other, names):
            raise PrecisionError(
                "a weight shared by two modules cannot have two dtypes",
                found=f"{other} and {path}",
                fix="list both modules as exceptions, or neither",
            )


def apply_exceptions(
    module: nn.Module,
    modules: Iterable[tuple[nn.Module, torch.dtype, torch.dtype | None]],
    context: Callable[[torch.dtype], AbstractContextManager[Any]],
) -> None:
    """Make exactly these modules compute in another dtype.

    Args:
        module: the whole module; exceptions of an earlier precision are removed.
        modules: each with its dtype and the dtype of its outputs (None: they are not cast).
        context: makes the context of a forward in a dtype.
    """
    for part in module.modules():
        if isinstance(part.__dict__.get("forward"), _ForwardIn):
            del part.__dict__["forward"]
        for key in [
            key for key, hook in part._forward_pre_hooks.items() if hook is _no_change
        ]:
            del part._forward_pre_hooks[key]
    for part, dtype, output_dtype in modules:
        # On the user's module, so that wrappers and hooks around it stay; torch has no hook around ``forward`` itself.
        part.__dict__["forward"] = _ForwardIn(
            part.forward, context(dtype), dtype, output_dtype
        )
    call_layers(
        module, lambda part: isinstance(part.__dict__.get("forward"), _ForwardIn)
    )


def call_layers(module: nn.Module, which: Callable[[nn.Module], bool]) -> None:
    """Make transformer layers with such parts call these in evaluation, too.

    torch's fast path for evaluation reads the weights without calling the layers, unless a hook is registered.
    """
    for part in module.modules():
        if not isinstance(part, nn.TransformerEncoderLayer) or part._forward_pre_hooks:
            continue
        if any(which(inner) for inner in part.modules() if inner is not part):
            part.register_forward_pre_hook(_no_change)


def _no_change(module: nn.Module, given: Any) -> None:
    pass


@final
class _ForwardIn:
    """A forward in another dtype than the rest."""

    def __init__(
        self,
        forward: Callable[..., Any],
        context: AbstractContextManager[Any],
        dtype: torch.dtype,
        output_dtype: torch.dtype | None,
    ) -> None:
        self.forward = forward
        self.context = context
        self.dtype = dtype
        self.output_dtype = output_dtype

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        with self.context:
            outputs = self.forward(
                *_cast(arguments, self.dtype), **_cast(options, self.dtype)
            )
        return (
            outputs if self.output_dtype is None else _cast(outputs, self.output_dtype)
        )


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return map_tensors(values, lambda t: t.to(dtype) if t.is_floating_point() else t)
