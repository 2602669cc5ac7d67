"""Helpers for tests: a tiny module, recorded hooks, a function on several ranks, checks of strategies and loaders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_kit.core.lazy import lazy_names

if TYPE_CHECKING:
    from trainer_kit.testing.conformance import check_strategy
    from trainer_kit.testing.distributed import run_distributed
    from trainer_kit.testing.loader_report import LoaderCheck, LoaderReport
    from trainer_kit.testing.loaders import check_loader
    from trainer_kit.testing.tiny import TinyModule, record_hooks

__all__ = [
    "LoaderCheck",
    "LoaderReport",
    "TinyModule",
    "check_loader",
    "check_strategy",
    "record_hooks",
    "run_distributed",
]

_HOME = {
    "LoaderCheck": "loader_report",
    "LoaderReport": "loader_report",
    "TinyModule": "tiny",
    "check_loader": "loaders",
    "check_strategy": "conformance",
    "record_hooks": "tiny",
    "run_distributed": "distributed",
}
__getattr__, __dir__ = lazy_names(__name__, _HOME)
