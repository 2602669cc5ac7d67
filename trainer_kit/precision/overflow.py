"""Steps that overflows leave out: optimizers as ``torch.amp.GradScaler`` looks at them, and engines that step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["EngineSteps", "SeenOptimizer", "has_gradients", "make_scaler", "seen_optimizers", "state_of_next"]


class EngineSteps(Protocol):
    """Of an engine that steps by itself; its state is that of its loss scale, empty where it has none."""

    skipped: bool
    """Whether its last step was left out, because gradients were not finite."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class SeenOptimizer:
    """An optimizer as GradScaler sees it, whose ``step`` says that it ran: the sign of a skip that costs no read.

    Args:
        optimizer: the user's.
        only: those of its parameters that are looked at; None for all.

    Attributes:
        groups: how many it had when this was made.
    """

    def __init__(self, optimizer: Optimizer, only: set[Tensor] | None = None) -> None:
        self.optimizer, self.only, self.groups = optimizer, only, len(optimizer.param_groups)
        self.run: Callable[[], Any] = optimizer.step if only is None else _nothing

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups, only = self.optimizer.param_groups, self.only
        return groups if only is None else [{"params": [p for p in g["params"] if p in only]} for g in groups]

    def step(self) -> bool:
        self.run()
        return True


def seen_optimizers(optimizer: Optimizer) -> list[SeenOptimizer]:
    """One; or one for each way in which parameters are divided, for torch looks for overflows in one way at a time."""
    kinds: dict[Any, set[Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            whole = tuple(placement.is_replicate() for placement in getattr(parameter, "placements", ()))
            kinds.setdefault((getattr(parameter, "device_mesh", None), whole), set()).add(parameter)
    return [SeenOptimizer(optimizer, kind if len(kinds) > 1 else None) for kind in kinds.values()]


def _nothing() -> None:
    """The step itself comes when all of its parameters have been looked at."""


def has_gradients(optimizer: Optimizer | SeenOptimizer) -> bool:
    """Whether any of its parameters has a gradient."""
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def make_scaler(device_type: str, **options: Any) -> torch.amp.GradScaler:
    """torch's gradient scaler; processes can still be forked afterwards.

    Where it is made for CUDA it counts the devices through the runtime, after which no forked process can use them.

    Args:
        device_type: of the gradients.
        options: of ``torch.amp.GradScaler``.

    Example:
        >>> make_scaler("cuda", init_scale=8.0).is_enabled()
        True
    """
    made = torch.amp.GradScaler("cpu", **options)
    made._device = device_type
    return made


def state_of_next(scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """The state that the next loss finds, once the scale has adapted; this one's stays: others may yet step with it."""
    before, looked = scaler.state_dict(), scaler._per_optimizer_states
    scaler.update()
    adapted = scaler.state_dict()
    scaler.load_state_dict(before)
    scaler._per_optimizer_states = looked
    return adapted
