"""Modules that compute in another dtype than the rest, or are not converted with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, TypeAlias, final

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from trainer_kit.core.errors import PrecisionError, did_you_mean

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

DTYPES: Final = {"64": torch.float64, "32": torch.float32, "bf16": torch.bfloat16, "16": torch.float16}


@final
@dataclass(frozen=True)
class ModulePrecision:
    """In what dtype one module computes, whatever the rest does.

    Attributes:
        dtype: of the inputs that it is given, and of its parameters where whole models are cast.
        output_dtype: of what it returns; None: what the rest computes in where whole models are cast, else what comes
            out. ``ModulePrecision(torch.float32, torch.float32)`` on a head hands float32 logits to the loss.
    """

    dtype: torch.dtype
    output_dtype: torch.dtype | None = None


Exceptions: TypeAlias = "Mapping[str, ModulePrecision | torch.dtype | str] | Iterable[str]"
"""Patterns, and what the modules that they name compute in.

A pattern (as in `fnmatch`) is held against a module's name in its parent (``"encoder.layers.0.norm"``) and against the
name of its class (``"LayerNorm"``); what is inside a module that matches belongs to it. A dtype may be written as
``"64"``, ``"32"``, ``"bf16"`` or ``"16"``. Patterns without dtypes leave modules out: of a cast to float32, of autocast
to float32, of fp8 and of quantisation to what the rest computes in.
"""


def except_modules(exceptions: Exceptions) -> dict[str, ModulePrecision | None]:
    """By pattern, what was given in any form.

    Raises:
        PrecisionError: for a dtype that is none.

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
                raise PrecisionError(f"unknown dtype {given!r} for {pattern!r}", fix=did_you_mean(given, DTYPES))
            given = DTYPES[given]
        made[pattern] = ModulePrecision(given) if isinstance(given, torch.dtype) else given
    return made


def excepted(
    module: nn.Module, exceptions: Mapping[str, ModulePrecision | None]
) -> Iterator[tuple[str, nn.Module, ModulePrecision | None]]:
    """The outermost modules that a pattern names, each with the first pattern's answer.

    Raises:
        PrecisionError: where a pattern names no module.
    """
    unused = set(exceptions)
    inside: list[str] = []
    for name, part in module.named_modules():
        if not name:
            continue
        matching = [p for p in exceptions if fnmatchcase(name, p) or fnmatchcase(type(part).__name__, p)]
        unused.difference_update(matching)
        if matching and not any(name.startswith(f"{outer}.") for outer in inside):
            inside.append(name)
            yield name, part, exceptions[matching[0]]
    if unused:
        names = [name for name, _ in module.named_modules() if name]
        raise PrecisionError(
            f"no module is called {sorted(unused)[0]!r}",
            found=f"exceptions={sorted(exceptions)}; modules: {', '.join(names[:8])}{', …' if len(names) > 8 else ''}",
            fix="write a name as named_modules() has it, a class name, or a pattern such as '*norm*'",
        )


def is_excepted(name: str, names: Iterable[str]) -> bool:
    """Whether the module of this name is one of those, or inside of one."""
    return any(name == outer or name.startswith(f"{outer}.") for outer in names)


def refuse_ties(module: nn.Module, names: Sequence[str]) -> None:
    """Raise a PrecisionError where an exception shares a weight with another module: it cannot have two dtypes."""
    if not names:
        return
    owners: dict[int, str] = {}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        other = owners.setdefault(id(parameter), path)
        if is_excepted(path, names) != is_excepted(other, names):
            raise PrecisionError(
                "a weight that two modules share cannot have two dtypes",
                found=f"{other} and {path}",
                fix="make both exceptions, or neither",
            )


def apply_exceptions(
    module: nn.Module,
    modules: Iterable[tuple[nn.Module, torch.dtype, torch.dtype | None]],
    context: Callable[[torch.dtype], AbstractContextManager[Any]],
) -> None:
    """Let these modules compute in a dtype of their own from now on, and no others.

    Args:
        module: all of it; exceptions of an earlier precision end.
        modules: each with its dtype and the dtype of its outputs (None: as they come out).
        context: of a forward in this dtype.
    """
    for part in module.modules():
        if isinstance(part.__dict__.get("forward"), _ForwardIn):
            del part.__dict__["forward"]
        for key in [key for key, hook in part._forward_pre_hooks.items() if hook is _nothing]:
            del part._forward_pre_hooks[key]
    for part, dtype, output_dtype in modules:
        # On the instance, so that wrappers and hooks around the module stay where they are.
        part.__dict__["forward"] = _ForwardIn(part.forward, context(dtype), dtype, output_dtype)
    call_layers(module, lambda part: isinstance(part.__dict__.get("forward"), _ForwardIn))


def call_layers(module: nn.Module, which: Callable[[nn.Module], bool]) -> None:
    """Evaluate transformer layers that hold such parts by calling their parts, as in training.

    torch's fast path of evaluation takes the weights and passes by the layers, but not where somebody listens.
    """
    for part in module.modules():
        if not isinstance(part, nn.TransformerEncoderLayer) or part._forward_pre_hooks:
            continue
        if any(which(inner) for inner in part.modules() if inner is not part):
            part.register_forward_pre_hook(_nothing)


def _nothing(module: nn.Module, given: Any) -> None:
    pass


@final
class _ForwardIn:
    """A forward in a dtype of its own."""

    def __init__(
        self,
        forward: Callable[..., Any],
        context: AbstractContextManager[Any],
        dtype: torch.dtype,
        output_dtype: torch.dtype | None,
    ) -> None:
        self.forward, self.context, self.dtype, self.output_dtype = forward, context, dtype, output_dtype

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        with self.context:
            outputs = self.forward(*_cast(arguments, self.dtype), **_cast(options, self.dtype))
        return outputs if self.output_dtype is None else _cast(outputs, self.output_dtype)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return apply_to_collection(values, Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t)
