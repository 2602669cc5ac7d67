"""`record_hooks`: the names of the hooks that a run calls, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainer_kit.core.hooks import Callback

__all__ = ["record_hooks"]

_HOOKS = [name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown")]


def record_hooks(callbacks: list[Any]) -> list[str]:
    """Add a callback to ``callbacks`` that records every hook; returns the list of recorded names.

    The callback runs at its place in the list: if it is last, a name is recorded after the callbacks before it ran.

    Args:
        callbacks: the list for the Trainer; one callback is appended.

    Returns:
        A list that grows while the Trainer runs; ``clear()`` empties it.

    Example:
        >>> import torch
        >>> from trainer_kit import Trainer
        >>> from trainer_kit.testing import TinyModule, record_hooks
        >>> names = record_hooks(callbacks := [])
        >>> trainer = Trainer(callbacks=callbacks, max_steps=1, barebones=True)
        >>> trainer.fit(TinyModule(), [torch.randn(4, 32)])
        >>> names[:4]
        ['setup', 'on_fit_start', 'on_train_start', 'on_train_epoch_start']
    """
    names: list[str] = []
    recorder = type("HookRecorder", (Callback,), {name: _recording(name, names) for name in _HOOKS})
    callbacks.append(recorder())
    return names


def _recording(name: str, names: list[str]) -> Callable[..., None]:
    def hook(self: Any, *arguments: Any) -> None:
        names.append(name)

    return hook
