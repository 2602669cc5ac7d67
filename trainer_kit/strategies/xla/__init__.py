"""XLA devices (TPU): the strategy and its process group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_kit.core.lazy import lazy_names

if TYPE_CHECKING:
    from trainer_kit.strategies.xla.strategy import XLAStrategy

__all__ = ["XLAStrategy"]

__getattr__, __dir__ = lazy_names(__name__, dict.fromkeys(__all__, "strategy"))
