"""Lightning's `ReduceLROnPlateau`, which has the name of the value that it looks at.

The module's name is private, so that ``--lr_scheduler=ReduceLROnPlateau`` means torch's class: jsonargparse refuses a
short name that two public classes have.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau as TorchReduceLROnPlateau

__all__ = ["ReduceLROnPlateau"]


class ReduceLROnPlateau(TorchReduceLROnPlateau):
    """torch's scheduler, with the name of the logged value that it looks at.

    Args:
        optimizer: the optimizer.
        monitor: the logged value.
        args: torch's arguments.
        kwargs: torch's arguments by name.
    """

    def __init__(
        self, optimizer: Optimizer, monitor: str, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(optimizer, *args, **kwargs)
        self.monitor = monitor
