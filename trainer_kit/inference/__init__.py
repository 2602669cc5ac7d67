"""Models larger than memory: created without weights, distributed over devices, offloaded to the host or to disk."""

from __future__ import annotations

from trainer_kit.core.lazy import other_names

__all__: list[str] = []

__getattr__ = other_names(__name__)  # Accelerate has a module of this name
