"""Megatron: the strategy, its configuration, state and costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_kit.core.lazy import lazy_names

if TYPE_CHECKING:
    from trainer_kit.strategies.megatron.strategy import MegatronStrategy

__all__ = ["MegatronStrategy"]

__getattr__, __dir__ = lazy_names(__name__, dict.fromkeys(__all__, "strategy"))
