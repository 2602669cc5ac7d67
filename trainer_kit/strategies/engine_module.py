"""A module as a loop of the user's own calls it, where an engine runs the forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import nn

__all__ = ["EngineModule"]


@final
class EngineModule(nn.Module):
    """The user's module, whose call goes through an engine; everything else is the module's own.

    Args:
        module: the user's.
        run: takes what the module is called with.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.__dict__["forward"] = run

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)
