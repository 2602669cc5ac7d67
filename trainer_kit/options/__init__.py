"""Records of options that Trainer, Accelerator and Fabric take, checked where they are created."""

from __future__ import annotations

__all__: list[str] = []
