"""`OptimizerProxy`: an optimizer that steps in another way and shares everything else with the one it wraps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

__all__ = ["OptimizerProxy"]


class OptimizerProxy(Optimizer):
    """Base of optimizers that override ``step`` and ``zero_grad`` of another one.

    Groups, state and defaults are those of ``optimizer``, so torch's schedulers take the proxy in its place.

    Args:
        optimizer: the user's.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        # Optimizer.__init__ would make groups and state of its own.
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # while it is being copied or unpickled
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        # torch's schedulers put a closure in the place of `step`; torch's optimizers leave it behind, too.
        return {name: value for name, value in vars(self).items() if name != "step"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)  # torch's own would profile `step` of this class from then on

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Let it step further parameters."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """That of the optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Into the optimizer."""
        self.optimizer.load_state_dict(dict(state_dict))

    def train(self) -> Any:
        """For optimizers that have modes (schedule-free ones)."""
        return self.optimizer.train() if hasattr(self.optimizer, "train") else None

    def eval(self) -> Any:
        """For optimizers that have modes (schedule-free ones)."""
        return self.optimizer.eval() if hasattr(self.optimizer, "eval") else None

    def __repr__(self) -> str:
        return repr(self.optimizer)
