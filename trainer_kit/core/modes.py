"""Training and evaluation mode of every submodule, kept over an evaluation."""

from __future__ import annotations

from typing import Any

__all__ = ["forget_modes", "keep_modes", "restore_modes"]


def keep_modes(module: Any) -> None:
    """Remember which mode each submodule is in."""
    module.__dict__["_modes"] = [(part, part.training) for part in module.modules()]


def restore_modes(module: Any) -> None:
    """Put each submodule back into the mode that `keep_modes` saw."""
    for part, training in module.__dict__.get("_modes", ()):
        # nn.Module's own attribute write is 20 times slower, and train() would wake what the user froze.
        part.__dict__["training"] = training


def forget_modes(module: Any) -> None:
    """The evaluation is over."""
    module.__dict__.pop("_modes", None)
