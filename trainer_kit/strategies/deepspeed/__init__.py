"""DeepSpeed: the strategy, its configuration, state and costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_kit.core.lazy import lazy_names

if TYPE_CHECKING:
    from trainer_kit.strategies.deepspeed.strategy import DeepSpeedStrategy

__all__ = ["DeepSpeedStrategy"]

__getattr__, __dir__ = lazy_names(__name__, dict.fromkeys(__all__, "strategy"))
