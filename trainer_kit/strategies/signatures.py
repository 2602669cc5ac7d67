"""Types that signatures of strategies and transforms share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = ["StepMethod"]

StepMethod: TypeAlias = Callable[..., Any]
"""A step of a module or an optimizer, or what calls it: its arguments and results are the user's."""
