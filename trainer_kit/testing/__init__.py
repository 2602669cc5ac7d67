"""Helpers for tests: a tiny module, recorded hooks, a function on several ranks, checks of strategies and loaders."""

from __future__ import annotations

from typing import Final

from trainer_kit.core.lazy import lazy_names, locate_names

_HOMES: Final = {
    "conformance": "check_strategy",
    "distributed": "run_distributed",
    "loader_report": "LoaderCheck LoaderReport",
    "loaders": "check_loader",
    "tiny": "TinyModule record_hooks",
}
__all__ = sorted(locate_names(_HOMES))
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
