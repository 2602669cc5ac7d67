"""`strategy="auto"` on several processes: whole copies where they fit, parts where they do not."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainer_kit.core.memory import device_memory, in_units
from trainer_kit.training.session import Session

__all__ = ["build_module", "training_bytes", "weigh"]

_SHARE: Final = 0.8
"""Of a device's memory; the rest is for activations."""
_MOMENTS: Final = 2
"""Adam's. The optimizer is not known before the module is wrapped."""
_WIDTHS: Final = {"16-true": 2, "bf16-true": 2, "64-true": 8}


def build_module(trainer: Session, module: Any, stage: str) -> None:
    """Call ``configure_model``, and take the other strategy where ``"auto"`` finds that what it built does not fit."""
    strategy, precision = trainer.strategy, trainer.precision_plugin
    strategy.configure(precision=precision.name)
    # What may have to be divided is built in host memory.
    with precision.init_context(), strategy.init_context() if trainer.roomier is None else torch.device("cpu"):
        module.configure_model()
    if trainer.roomier is None:
        return
    taken, why = weigh(trainer, module, stage, strategy.world)
    if taken is strategy:
        return
    precision.check(taken.device, taken.engine)
    taken.start()
    trainer.strategy, trainer.roomier = taken, None  # for good: what is divided stays divided
    trainer.metrics.heard_on(taken, module)
    trainer.print(f'strategy="auto": {why}')


def weigh(trainer: Session, module: nn.Module, stage: str, world: Any = None) -> tuple[Any, str]:
    """The strategy that ``"auto"`` stands for with this module, and why.

    Args:
        trainer: whose strategy, and whose other one.
        module: with its layers.
        stage: fit, or an evaluation, which needs weights alone.
        world: all ranks, which decide alike; None: they are not there yet.
    """
    strategy, other = trainer.strategy, trainer.roomier
    local = max(1, trainer.environment.local_world_size if world is not None else trainer.processes)
    memory = device_memory(strategy.device, local) or 0
    if world is not None:
        memory = int(min(row[0] for row in world.agree([memory])))
    needed = training_bytes(module, trainer.precision_plugin.name, stage == "fit")
    what = "training state (as with Adam)" if stage == "fit" else "weights"
    numbers = f"{in_units(needed)} of {what}, and a rank has {in_units(memory or None)} of memory"
    if other is None or not memory or needed <= _SHARE * memory:
        return strategy, f"{strategy.name}: whole copies fit, {numbers}"
    other.device = strategy.device
    return other, f"{other.name}: whole copies do not fit, {numbers} ({1 - _SHARE:.0%} of it for activations)"


def training_bytes(module: nn.Module, precision: str, trains: bool) -> int:
    """Weights, and for what is trained gradients and two moments.

    Example:
        >>> training_bytes(nn.Linear(9, 10), "32-true", True), training_bytes(nn.Linear(9, 10), "bf16-true", False)
        (1600, 200)
    """
    known = [p for p in module.parameters() if not is_lazy(p)]
    copies = 1 + _MOMENTS if trains else 0
    width = _WIDTHS.get(precision, 0)
    return sum(p.numel() * (width or p.element_size()) * (1 + copies * p.requires_grad) for p in known)
