"""For tests of code that trains: a tiny module, recorded hooks, a function on several ranks, checks of strategies."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer_kit.testing.conformance import check_strategy
    from trainer_kit.testing.distributed import run_distributed
    from trainer_kit.testing.hooks import record_hooks
    from trainer_kit.testing.tiny import TinyModule

__all__ = ["TinyModule", "check_strategy", "record_hooks", "run_distributed"]

_LAZY = {
    "TinyModule": "tiny",
    "check_strategy": "conformance",
    "record_hooks": "hooks",
    "run_distributed": "distributed",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"trainer_kit.testing.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
