"""Optimizers by name: torch's, bitsandbytes' with 8-bit states, torchao's with low-bit states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer

from trainer_kit.core.errors import ConfigurationError, RegistryError
from trainer_kit.core.registry import OPTIMIZERS

__all__ = ["from_parts", "make_optimizer", "to_parts", "why_not_divided"]

for _name in (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "LBFGS",
    "NAdam",
    "RAdam",
    "RMSprop",
    "SGD",
):
    OPTIMIZERS.supply(_name.lower(), f"torch.optim:{_name}")
for _name in (
    "Adagrad",
    "Adam",
    "AdamW",
    "AdEMAMix",
    "LAMB",
    "LARS",
    "Lion",
    "RMSprop",
    "SGD",
):
    OPTIMIZERS.supply(f"{_name.lower()}8bit", f"bitsandbytes.optim:{_name}8bit")
for _name in ("Adam", "AdamW", "AdEMAMix", "Lion"):
    OPTIMIZERS.supply(
        f"paged{_name.lower()}8bit", f"bitsandbytes.optim:Paged{_name}8bit"
    )
for _name in ("Adam", "AdamW"):
    for _bits in ("8bit", "4bit", "Fp8"):
        OPTIMIZERS.supply(
            f"{_name.lower()}torch{_bits.lower()}", f"torchao.optim:{_name}{_bits}"
        )
OPTIMIZERS.supply("adamwtorch", "torch.optim:AdamW")
OPTIMIZERS.supply("adamwbnb8bit", "bitsandbytes.optim:AdamW8bit")

_LOW_BIT: Final = {
    "OptimState8bit": "torchao.optim.subclass_8bit",
    "OptimState4bit": "torchao.optim.subclass_4bit",
    "OptimStateFp8": "torchao.optim.subclass_fp8",
}
_KIND: Final = "low_bit"


def make_optimizer(name: str, params: Iterable[Any], **options: Any) -> Optimizer:
    """An optimizer by its name, without importing its library at the top of a script.

    Args:
        name: a class of ``torch.optim``, of bitsandbytes (``"AdamW8bit"``, ``"PagedAdamW8bit"``, ``"Lion8bit"``, …), or
            with ``torch`` in it one of torchao (``"adamw_torch_8bit"``, ``"adamw_torch_4bit"``, ``"adamw_torch_fp8"``);
            case, ``_`` and ``-`` do not count. Also a name registered in ``trainer_kit.core.registry.OPTIMIZERS``.
        params: parameters, or groups of them.
        options: of its class, such as ``lr=``.

    Raises:
        RegistryError: the name is not registered, or its library is not installed.
        ConfigurationError: it takes no such option.

    Example:
        >>> from torch import nn
        >>> type(make_optimizer("adamw", nn.Linear(2, 1).parameters(), lr=0.1)).__name__
        'AdamW'
    """
    word = (
        name
        if name in OPTIMIZERS.names()
        else name.lower().replace("_", "").replace("-", "")
    )
    try:
        kind = OPTIMIZERS.get(word)
    except RegistryError as error:
        library = next(
            (
                one
                for one in ("bitsandbytes", "torchao")
                if f"{one}." in str(error.found)
            ),
            None,
        )
        if library is None:
            raise
        raise RegistryError(
            error.problem,
            found=error.found,
            fix=f"pip install 'trainer-kit[{library}]'",
        ) from error
    try:
        made: Optimizer = kind(params, **options)
    except TypeError as error:
        raise ConfigurationError(
            f"optimizer {name!r} cannot be made", found=str(error)
        ) from error
    return made


def to_parts(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a parameter, with each low-bit tensor as the plain tensors that it consists of.

    Example:
        >>> to_parts({"step": 3})
        {'step': 3}
    """
    return {
        name: _parts(value) if type(value).__name__ in _LOW_BIT else value
        for name, value in state.items()
    }


def from_parts(state: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `to_parts`."""
    return {
        name: _whole(value)
        if isinstance(value, Mapping) and value.get(_KIND) in _LOW_BIT
        else value
        for name, value in state.items()
    }


def why_not_divided(optimizer: Optimizer) -> str | None:
    """The reason why an optimizer needs whole parameters; None where it does not.

    Example:
        >>> from torch import nn
        >>> why_not_divided(make_optimizer("sgd", nn.Linear(2, 1).parameters()))
    """
    kind = type(optimizer)
    if kind.__module__.startswith("bitsandbytes."):
        return "bitsandbytes' kernels take whole tensors"
    if kind.__module__.startswith("torchao.optim") and not kind.__name__.startswith(
        "_"
    ):
        return "torchao's low-bit states of a part cannot be saved exactly"
    return None


def _parts(value: Any) -> dict[str, Any]:
    names, attributes = value.__tensor_flatten__()
    parts: dict[str, Tensor] = {name: getattr(value, name) for name in names}
    return {_KIND: type(value).__name__, "attributes": list(attributes), **parts}


def _whole(parts: Mapping[str, Any]) -> Tensor:
    # The class comes from the table: no name in a file is imported.
    kind: Any = getattr(import_module(_LOW_BIT[parts[_KIND]]), parts[_KIND])
    tensors = {
        name: value.clone()
        for name, value in parts.items()
        if isinstance(value, Tensor)
    }
    made: Tensor = kind.__tensor_unflatten__(tensors, parts["attributes"])
    return made
