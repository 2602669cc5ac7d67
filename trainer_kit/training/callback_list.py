"""The callbacks of a Trainer, and those that the running module adds to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeGuard, final

from trainer_kit.core.hooks import Callback
from trainer_kit.core.protocols import (
    AdaptsCallback,
    DrawsProgress,
    SetsAccumulation,
    StopsEarly,
)
from trainer_kit.state.runs import KeepsCheckpoints, keep_checkpoints
from trainer_kit.step.bus import sorted_callbacks

__all__ = ["CallbackList"]


@final
class CallbackList:
    """The callbacks of a Trainer in the order in which they are called.

    Args:
        adapt: wraps callbacks of other libraries.

    Attributes:
        active: all callbacks, those of the running module included.
        configured: the callbacks of the Trainer itself.
    """

    def __init__(self, adapt: Callable[[Iterable[object]], list[Callback]]) -> None:
        self._adapt = adapt
        self.configured: list[Callback] = []
        self.active = self.configured

    @property
    def has_module_callbacks(self) -> bool:
        """Whether callbacks of a module are active."""
        return self.active is not self.configured

    @property
    def accumulation(self) -> SetsAccumulation | None:
        """The first callback that decides how many micro-batches a window has, or None."""
        for callback in self.active:
            if isinstance(callback, SetsAccumulation):
                return callback
        return None

    @property
    def progress_bar(self) -> DrawsProgress | None:
        """The first callback that draws progress, or None."""
        for callback in self.active:
            if isinstance(callback, DrawsProgress):
                return callback
        return None

    @property
    def early_stopping(self) -> list[StopsEarly]:
        """All callbacks that stop a run early; of Lightning's, the user's object."""
        stopping: list[StopsEarly] = []
        for callback in self.active:
            if isinstance(callback, StopsEarly):
                stopping.append(callback)
            elif _extends(callback, "EarlyStopping"):
                stopping.append(callback.callback)
        return stopping

    @property
    def checkpoints(self) -> list[KeepsCheckpoints]:
        """All callbacks that write checkpoints; of Lightning's, the user's object, which manages its files alone."""
        writing: list[KeepsCheckpoints] = []
        for callback in self.active:
            writing += keep_checkpoints([callback])
            if _extends(callback, "Checkpoint"):
                writing.append(callback.callback)
        return writing

    def configure(self, callbacks: Iterable[object]) -> None:
        """Replace all callbacks by these."""
        self.configured = sorted_callbacks(self._adapt(callbacks))
        self.active = self.configured

    def add_of_module(self, callbacks: Sequence[object]) -> None:
        """Add callbacks of the running module; each replaces the Trainer's callbacks of its class."""
        # `configured` stays as it is, so that another module does not meet the callbacks of this one.
        adapted = self._adapt(callbacks)
        classes = {type(callback) for callback in adapted}
        remaining = [
            callback for callback in self.configured if type(callback) not in classes
        ]
        self.active = sorted_callbacks([*remaining, *adapted])

    def drop_of_module(self) -> None:
        """Call the Trainer's own callbacks only."""
        self.active = self.configured

    def restore(self, callbacks: list[Callback]) -> None:
        """Call the callbacks that were active before an evaluation: its module may have added some."""
        self.active = callbacks


def _extends(callback: Callback, name: str) -> TypeGuard[AdaptsCallback]:
    """Whether a callback is an adapter of Lightning's class of this name."""
    return isinstance(callback, AdaptsCallback) and name in callback.extended_names
