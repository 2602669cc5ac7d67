"""Move the code of a project from Lightning or Accelerate to this library, and report what does not move."""

from __future__ import annotations

__all__: list[str] = []
