"""Parameter groups that are added while a fit goes on, as gradual unfreezing does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from trainer_kit.engine.run import Fit
from trainer_kit.engine.state import configured

__all__ = ["watch_groups"]


def watch_groups(run: Fit) -> Callable[[Any], None]:
    """From the next backward on, whatever an optimizer is given is trained like what it had.

    Args:
        run: whose optimizers' ``add_param_group`` is heard of; a look at the groups in each step would cost every run.

    Returns:
        What ends it, whatever it is called with.
    """
    optimizers = run.stepper.made.optimizers

    def watch(optimizer: Optimizer) -> None:
        add = optimizer.add_param_group

        def add_param_group(param_group: dict[str, Any]) -> None:
            add(param_group)
            started: list[dict[str, Any]] = vars(optimizer)["_configured_options"]
            started += configured(optimizer)[len(started) :]
            run.stepper.read_groups()

        vars(optimizer)["add_param_group"] = add_param_group

    def end(_: Any = None) -> None:
        for optimizer in optimizers:
            vars(optimizer).pop("add_param_group", None)

    for optimizer in optimizers:
        watch(optimizer)
    return end
