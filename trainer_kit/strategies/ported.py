"""Two verbs that ported code calls on a strategy, not on its world."""

from __future__ import annotations

from typing import Any

from trainer_kit.core.protocols import Group

__all__ = ["Ported"]


class Ported:
    """Lightning's ``trainer.strategy.barrier()`` and ``broadcast(value)``; our own code asks ``strategy.world``."""

    world: Group

    def barrier(self, name: str | None = None) -> None:
        """Wait for every rank."""
        self.world.barrier()

    def broadcast(self, value: Any, src: int = 0) -> Any:
        """A value of rank ``src`` for everyone."""
        return self.world.broadcast(value, src)
