"""Check a configuration: a few of its steps beside a plain loop in one process."""

from __future__ import annotations

__all__: list[str] = []
