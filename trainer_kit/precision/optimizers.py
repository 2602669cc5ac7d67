"""Optimizers by name: torch's, bitsandbytes' with 8-bit states, torchao's with low-bit states."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from trainer_kit.core.errors import ConfigurationError, RegistryError
from trainer_kit.core.registry import OPTIMIZERS
from trainer_kit.core.types import SavedState, StateDict

__all__ = [
    "NEED_MATRICES",
    "NEED_WHOLE_ROWS",
    "from_plain_tensors",
    "make_optimizer",
    "to_plain_tensors",
    "why_not_shardable",
]

# By name and not by class: nothing is imported before a word is used, and no vendor need be installed.
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
# Names that transformers' TrainingArguments use for these two.
OPTIMIZERS.supply("adamwtorch", "torch.optim:AdamW")
OPTIMIZERS.supply("adamwbnb8bit", "bitsandbytes.optim:AdamW8bit")

_LOW_BIT: Final = {
    "OptimState8bit": "torchao.optim.subclass_8bit",
    "OptimState4bit": "torchao.optim.subclass_4bit",
    "OptimStateFp8": "torchao.optim.subclass_fp8",
}
_KIND: Final = "low_bit"


def make_optimizer(name: str, params: ParamsT, **options: object) -> Optimizer:
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
    key = name
    # A user's name is taken as it is registered; only ours have one spelling for many.
    if name not in OPTIMIZERS.names():
        key = name.lower().replace("_", "").replace("-", "")
    try:
        optimizer_class = OPTIMIZERS.get(key)
    except RegistryError as error:
        for library in ("bitsandbytes", "torchao"):
            if f"{library}." in str(error.found):
                raise RegistryError(
                    error.problem,
                    found=error.found,
                    fix=f"pip install 'trainer-kit[{library}]'",
                ) from error
        raise
    try:
        optimizer: Optimizer = optimizer_class(params, **options)
    except TypeError as error:
        raise ConfigurationError(
            f"optimizer {name!r} cannot be made", found=str(error)
        ) from error
    return optimizer


def to_plain_tensors(state: SavedState) -> StateDict:
    """The state of a parameter, with each low-bit tensor as the plain tensors that it consists of.

    Example:
        >>> to_plain_tensors({"step": 3})
        {'step': 3}
    """
    return {
        name: _flatten(value) if type(value).__name__ in _LOW_BIT else value
        for name, value in state.items()
    }


def from_plain_tensors(state: SavedState) -> StateDict:
    """The inverse of `to_plain_tensors`."""
    tensors = dict(state)
    for name, value in state.items():
        if isinstance(value, Mapping) and value.get(_KIND) in _LOW_BIT:
            tensors[name] = _unflatten(value)
    return tensors


NEED_WHOLE_ROWS: Final = ("Adafactor",)
"""Names of optimizers, of torch, transformers and others, whose operators torch does not have for shards."""
NEED_MATRICES: Final = (*NEED_WHOLE_ROWS, "Muon")
"""Names of optimizers that would train another model, or fail, on flat masters."""


def why_not_shardable(
    optimizer: Optimizer, refused_names: Collection[str] = NEED_WHOLE_ROWS
) -> str | None:
    """The reason why an optimizer needs whole parameters; None where it does not.

    Args:
        optimizer: as it will be stepped.
        refused_names: classes that cannot step these parts of parameters; their subclasses neither.

    Example:
        >>> from torch import nn
        >>> why_not_shardable(make_optimizer("sgd", nn.Linear(2, 1).parameters()))
    """
    library = type(optimizer).__module__
    if library.startswith("bitsandbytes."):
        return "bitsandbytes' kernels take whole tensors"
    # torchao's optimizers without low-bit states have private names.
    is_private = type(optimizer).__name__.startswith("_")
    if library.startswith("torchao.optim") and not is_private:
        return "torchao's low-bit states of a part cannot be saved exactly"
    for base in type(optimizer).__mro__:
        if base.__name__ in refused_names:
            return "it updates a matrix as a whole, by its rows and columns"
    return None


def _flatten(value: Any) -> StateDict:
    # torch's protocol of tensor subclasses. Checkpoints then hold plain tensors, which load without torchao's classes.
    names, attributes = value.__tensor_flatten__()
    parts: dict[str, Tensor] = {name: getattr(value, name) for name in names}
    return {_KIND: type(value).__name__, "attributes": list(attributes), **parts}


def _unflatten(parts: SavedState) -> Tensor:
    # The class comes from the table: no name in a file is imported.
    kind: Any = getattr(import_module(_LOW_BIT[parts[_KIND]]), parts[_KIND])
    tensors = {
        name: value.clone()
        for name, value in parts.items()
        if isinstance(value, Tensor)
    }
    low_bit: Tensor = kind.__tensor_unflatten__(tensors, parts["attributes"])
    return low_bit
