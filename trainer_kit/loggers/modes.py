"""The training and evaluation modes of modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["preserved_modes"]


@contextmanager
def preserved_modes(module: nn.Module) -> Iterator[None]:
    """Restore on exit whether each submodule is in training mode.

    Args:
        module: the module; its parts may be in different modes.

    Example:
        >>> layers = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
        >>> with preserved_modes(layers):
        ...     layers = layers.eval()
        >>> [layer.training for layer in layers]
        [True, False]
    """
    # By module: parts of a model may be in evaluation mode while the rest trains.
    modes = {submodule: submodule.training for submodule in module.modules()}
    try:
        yield
    finally:
        for submodule, training in modes.items():
            submodule.training = training
