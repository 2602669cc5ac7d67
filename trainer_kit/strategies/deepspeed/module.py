"""What DeepSpeed takes over: modules and optimizers, and which of them it cannot have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from lightning_utilities.core.overrides import is_overridden
from torch import nn
from torch.optim import Optimizer

from trainer_kit.core.errors import StrategyError
from trainer_kit.core.module import TrainModule

__all__ = [
    "Step",
    "check_clipped",
    "check_module",
    "check_optimizer",
    "check_raw",
    "hidden_size",
    "nothing",
    "refuse_group",
]


@final
class Step(nn.Module):
    """What the engine wraps: the module, with the method that is called where the engine looks for ``forward``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def check_module(module: nn.Module, manual: bool) -> None:
    """Refuse a module that wants to step by itself."""
    if manual:
        raise StrategyError(
            "DeepSpeed's engine steps by itself, which manual optimization does not allow",
            fix="automatic_optimization = True, or another strategy",
        )
    if isinstance(module, TrainModule) and is_overridden("optimizer_step", module, TrainModule):
        raise StrategyError(
            "DeepSpeed's engine steps by itself", found=f"{type(module).__name__}.optimizer_step", fix="remove it"
        )


def check_raw(module: nn.Module, known: nn.Module | None, divisor: int, ranks: int) -> None:
    """Refuse a second module of a loop of the user's own, and sums of gradients where averages are wanted.

    Args:
        module: the new one.
        known: the one that is trained.
        divisor: what the engine divides gradients by.
        ranks: what a loop of the user's own has them divided by.
    """
    if known is not None:
        raise StrategyError(
            "DeepSpeed trains one model",
            found=f"{type(known).__name__}, and now {type(module).__name__}",
            fix="prepare_model(model, evaluation_mode=True) for one that is not trained; else another Accelerator",
        )
    if divisor != ranks:
        raise StrategyError(
            "a loop of your own has averaged gradients",
            found='gradient_allreduce_op is "sum"',
            fix="take it out of DeepSpeed's JSON",
        )


def check_optimizer(optimizer: Optimizer, known: Optimizer | None, step: Step) -> None:
    """Refuse a second optimizer, one of another model, and one that has been stepped."""
    if known is not None:
        raise StrategyError("DeepSpeed steps one optimizer", fix="one optimizer, with a group for each part")
    own = set(step.parameters())
    if not any(parameter in own for group in optimizer.param_groups for parameter in group["params"]):
        raise StrategyError(
            "none of this optimizer's parameters belong to the model that DeepSpeed trains",
            found=type(optimizer).__name__,
            fix="model, optimizer = accelerator.prepare(model, optimizer)",
        )
    if optimizer.state:
        raise StrategyError("this optimizer has been stepped already", found=type(optimizer).__name__)


def check_clipped(parameters: Sequence[nn.Parameter], groups: Sequence[Sequence[nn.Parameter]]) -> None:
    """Refuse to clip some parameters only."""
    missing = {parameter for group in groups for parameter in group}.difference(parameters)
    if missing:
        raise StrategyError(
            "DeepSpeed clips all gradients together",
            found=f"{len(missing)} of the parameters that the optimizer steps are left out",
            fix="clip_grad_norm_(model.parameters(), ...)",
        )


def refuse_group(param_group: Any) -> None:
    """In place of ``add_param_group``.

    Raises:
        StrategyError: always.
    """
    raise StrategyError(
        "DeepSpeed divides parameters once: a group that is added later would not be trained",
        found="add_param_group",
        fix="put all parameters into the optimizer from the start, those that wait with lr=0; or use DDP or FSDP",
    )


def nothing(set_to_none: bool = True) -> None:
    """In place of ``zero_grad``: the engine drops gradients by itself."""


def hidden_size(module: nn.Module) -> int | None:
    """Of the first part that says so, as Hugging Face's models do."""
    for part in module.modules():
        config = getattr(part, "config", None)
        size = getattr(config, "hidden_size", None)
        several = getattr(config, "hidden_sizes", None)
        if size is None and isinstance(several, (list, tuple)):
            size = max(several)
        if isinstance(size, int):
            return size
    return None
