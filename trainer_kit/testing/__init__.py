"""For tests of code that trains: a function on several ranks, and a pytest mark for it."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["run_distributed"]

_LAZY = {"run_distributed": "distributed"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"trainer_kit.testing.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
