"""Callbacks that subclass Lightning's own class, such as those of installed packages, in this library's Trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Final

from lightning_utilities.core.overrides import is_overridden

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hooks import Callback
from trainer_kit.core.types import Function

__all__ = [
    "NEEDS_LOOP",
    "LightningCallback",
    "adapt_callbacks",
    "lightning_base",
    "writes_checkpoints",
]

_PACKAGES: Final = ("lightning.pytorch", "pytorch_lightning")
# Lightning calls `on_train_epoch_end` of these after the hooks of all others, and after the values are reduced; its
# Trainer has attributes that list them.
_CALLED_LATE: Final = ("Checkpoint", "EarlyStopping")
NEEDS_LOOP: Final = (
    "BasePredictionWriter",
    "BatchSizeFinder",
    "GradientAccumulationScheduler",
    "LearningRateFinder",
    "ModelCheckpoint",
    "ModelSummary",
    "OnExceptionCheckpoint",
    "ProgressBar",
    "StochasticWeightAveraging",
    "Timer",
    "WeightAveraging",
)
"""Callbacks of Lightning that drive its loops by private attributes; the same names are here."""


def lightning_base(cls: type, name: str = "Callback") -> type | None:
    """The class of this name in Lightning that ``cls`` extends, or None.

    Args:
        cls: any class.
        name: of the class in Lightning.
    """
    # By name and module: Lightning may be missing, and importing it to compare classes takes seconds.
    for base in cls.__mro__:
        if base.__name__ == name and base.__module__.startswith(_PACKAGES):
            return base
    return None


def adapt_callbacks(callbacks: Iterable[Any]) -> list[Any]:
    """Wrap callbacks that subclass Lightning's class; all other objects stay as they are.

    Args:
        callbacks: what a user passes to the Trainer.

    Raises:
        ConfigurationError: a callback drives Lightning's own loop, or its base class is missing because Lightning is
            not installed.
    """
    return [_adapted(callback) for callback in callbacks]


def writes_checkpoints(callbacks: Iterable[Any]) -> bool:
    """Whether a callback extends Lightning's ``Checkpoint``, so that the Trainer adds no `ModelCheckpoint`."""
    return any(
        lightning_base(type(callback), "Checkpoint") is not None
        for callback in callbacks
    )


def _adapted(callback: Any) -> Any:
    # A class instead of an object gets the Trainer's own error.
    if isinstance(callback, (Callback, type)):
        return callback
    cls: type = type(callback)
    if lightning_base(cls) is not None:
        _refuse_part_of_loop(cls)
        return _make_adapter_class(cls)(callback)
    # Packages define their class with `object` as the base where Lightning is missing. A class of the user's script
    # may look the same, and gets the error of the Trainer instead.
    hooks = [
        name for name in dir(cls) if name.startswith("on_") and hasattr(Callback, name)
    ]
    if hooks and cls.__bases__ == (object,) and cls.__module__ != "__main__":
        raise ConfigurationError(
            f"{cls.__name__} has callback hooks, but is not a Callback",
            found=f"{cls.__module__}.{cls.__name__}.{hooks[0]}",
            fix="if it is Lightning's callback of another package, install lightning: that package defines its class "
            "without a base as long as Lightning is missing; a custom class subclasses trainer_kit.Callback",
        )
    return callback


def _refuse_part_of_loop(cls: type) -> None:
    bases = [name for name in NEEDS_LOOP if lightning_base(cls, name) is not None]
    if not bases:
        return
    name = bases[0]
    # A class of Lightning itself has the replacement's name; a subclass needs another base.
    if cls.__module__.startswith(_PACKAGES):
        problem = f"Lightning's {cls.__name__} drives Lightning's own loop"
        fix = f"from trainer_kit.callbacks import {cls.__name__}"
    else:
        problem = f"{cls.__name__} extends Lightning's {name}, which drives Lightning's own loop"
        fix = f"from trainer_kit.callbacks import {name}, and subclass that"
    raise ConfigurationError(
        problem, found=f"{cls.__module__}.{cls.__qualname__}", fix=fix
    )


class LightningCallback(Callback):
    """Adapter of a callback of Lightning for this library's Trainer, which calls the overridden hooks directly.

    The Trainer wraps every callback that subclasses Lightning's class, in an adapter class for each class.

    Args:
        callback: the user's object, which gets every call.

    Attributes:
        callback: the same.
    """

    extended_names: tuple[str, ...] = ()

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        base = lightning_base(type(callback))
        assert base is not None
        # Bound methods of the callback itself: the bus calls them without a frame in between, and finds Lightning's
        # empty ones not overridden here.
        for name in _METHODS:
            if hasattr(base, name) and is_overridden(name, callback, base):
                setattr(self, name, getattr(callback, name))

    def __reduce__(self) -> tuple[Function, tuple[object]]:
        # The adapter class is made at run time, so that pickle cannot find it by its name.
        return _adapted, (self.callback,)

    @property
    def state_key(self) -> str:
        """The key of the callback itself."""
        return str(self.callback.state_key)


_METHODS: Final = (
    "setup",
    "teardown",
    "state_dict",
    "load_state_dict",
    *(name for name in vars(Callback) if name.startswith("on_")),
)


@cache
def _make_adapter_class(cls: type) -> type[LightningCallback]:
    """Make the adapter class of a class, once for each class."""
    # One class for each, and not one for all: a module's callback replaces the Trainer's callback of its class.
    extended = [name for name in _CALLED_LATE if lightning_base(cls, name) is not None]
    order = "normal"
    if extended:
        order = "late"
    members: Mapping[str, object] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": LightningCallback.__doc__,
        "order": order,
        "extended_names": tuple(extended),
    }
    return type(cls.__name__, (LightningCallback,), dict(members))
