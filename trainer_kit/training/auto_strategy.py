"""Resolves ``strategy="auto"`` on several processes: DDP if a full replica of the model fits on a device, else FSDP."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainer_kit.core.devices import device_memory
from trainer_kit.core.display import in_units
from trainer_kit.core.module import TrainModule, build_once
from trainer_kit.core.protocols import Group
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.training.session import Session

__all__ = ["build_module", "choose_by_memory", "training_bytes", "whole_copies_fit"]

_STATE_SHARE: Final = 0.8
"""Fraction of device memory for the training state; the remainder is left for activations."""
_MOMENTS: Final = 2
"""Moments per parameter, as in Adam: the optimizer is created only after the strategy is chosen."""
_BYTES_PER_VALUE: Final = {"16-true": 2, "bf16-true": 2, "64-true": 8}
"""Of weights in precisions that convert them."""


def build_module(trainer: Session, module: TrainModule, stage: str) -> None:
    """Call ``configure_model``; with ``"auto"``, switch to the sharded strategy if the model does not fit."""
    strategy, precision = trainer.strategy, trainer.precision_plugin
    strategy.configure(precision=precision.name)
    is_final = trainer.sharded_alternative is None
    # In host memory if the model may have to be sharded: it would not fit on the device then.
    device: AbstractContextManager[object] = torch.device("cpu")
    if is_final:
        device = strategy.building(module)
    with precision.init_context(), device:
        build_once(module)
    if is_final:
        return
    choice, reason = choose_by_memory(trainer, module, stage, strategy.world)
    if choice is strategy:
        return
    choice.check_precision(precision)
    choice.start()
    trainer.use_strategy(choice)
    trainer.metrics.attach(choice, module)
    trainer.say(f'strategy="auto": {reason}')


def choose_by_memory(
    trainer: Session, module: nn.Module, stage: str, world: Group | None = None
) -> tuple[Strategy, str]:
    """Resolve ``"auto"`` for this module; returns the strategy and the reason.

    Args:
        trainer: has the strategy and its sharded alternative.
        module: the module, with its layers built.
        stage: fit, or an evaluation, which needs memory for weights only.
        world: the group of all ranks, which agree on the smallest memory; None before they are started.
    """
    strategy, alternative = trainer.strategy, trainer.sharded_alternative
    trains = stage == "fit"
    memory = _rank_memory(trainer, world)
    needed = training_bytes(module, trainer.precision_plugin.name, trains)
    contents = "weights"
    if trains:
        contents = "training state (as with Adam)"
    sizes = f"{in_units(needed)} of {contents}, and a rank has {in_units(memory or None)} of memory"
    if alternative is None or not memory or whole_copies_fit(needed, memory):
        return strategy, f"{strategy.name}: replicas fit, {sizes}"
    alternative.use_device(strategy.device)
    activations = f"{1 - _STATE_SHARE:.0%} of it for activations"
    return (
        alternative,
        f"{alternative.name}: replicas do not fit, {sizes} ({activations})",
    )


def _rank_memory(trainer: Session, world: Group | None) -> int:
    """Bytes of device memory of the rank that has least; 0 if that is unknown."""
    if world is None:
        return device_memory(trainer.strategy.device, max(1, trainer.processes)) or 0
    ranks_here = max(1, trainer.environment.local_world_size)
    memory = device_memory(trainer.strategy.device, ranks_here) or 0
    # The smallest, so that every rank chooses the same strategy; 0, an unknown one, chooses replicas for all.
    return int(min(row[0] for row in world.agree([memory])))


def whole_copies_fit(needed: int, memory: int) -> bool:
    """Whether weights, gradients and optimizer state leave enough of a rank's memory for activations.

    Example:
        >>> whole_copies_fit(800, 1000), whole_copies_fit(801, 1000)
        (True, False)
    """
    return needed <= _STATE_SHARE * memory


def training_bytes(module: nn.Module, precision: str, trains: bool) -> int:
    """Bytes of all weights and buffers, plus gradients and two moments of each trainable parameter.

    Example:
        >>> training_bytes(nn.Linear(9, 10), "32-true", True), training_bytes(nn.Linear(9, 10), "bf16-true", False)
        (1600, 200)
    """
    total = 0
    for parameter in module.parameters():
        # Its shape is unknown.
        if is_lazy(parameter):
            continue
        width = _BYTES_PER_VALUE.get(precision, 0) or parameter.element_size()
        # The weight itself; with a gradient also that, and the optimizer's moments.
        copies = 1
        if trains and parameter.requires_grad:
            copies = 2 + _MOMENTS
        total += parameter.numel() * width * copies
    for buffer in module.buffers():
        if not is_lazy(buffer):
            total += buffer.numel() * buffer.element_size()
    return total
