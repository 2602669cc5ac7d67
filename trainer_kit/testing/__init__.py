"""Helpers for tests: a tiny module, recorded hooks, a function on several ranks, checks of strategies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_kit.core.lazy import lazy_names

if TYPE_CHECKING:
    from trainer_kit.testing.conformance import check_strategy
    from trainer_kit.testing.distributed import run_distributed
    from trainer_kit.testing.tiny import TinyModule, record_hooks

__all__ = ["TinyModule", "check_strategy", "record_hooks", "run_distributed"]

_HOME = {
    "TinyModule": "tiny",
    "check_strategy": "conformance",
    "record_hooks": "tiny",
    "run_distributed": "distributed",
}
__getattr__, __dir__ = lazy_names(__name__, _HOME)
