"""Megatron: the strategy, its configuration, state and costs."""

from __future__ import annotations

from typing import Final

from trainer_kit.core.lazy import lazy_names, locate_names

_HOMES: Final = {
    "strategy": "MegatronStrategy",
}
__all__ = sorted(locate_names(_HOMES))
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
