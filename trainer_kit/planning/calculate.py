"""Weights, gradients and optimizer state by calculation, for steps that cannot run without data."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

from torch import nn

from trainer_kit.core.costs import optimizer_bytes, part_bytes
from trainer_kit.core.module import build_once
from trainer_kit.planning.candidates import model_parallel
from trainer_kit.planning.fake_world import fake_mode, fake_module
from trainer_kit.planning.records import CATEGORIES, Candidate, Measured
from trainer_kit.precision.precision import Precision
from trainer_kit.step.optimizers import configure_optimizers
from trainer_kit.strategies.strategy import Strategy

__all__ = ["calculated"]

_ADAM: Final = 2
"""The states of Adam, where the optimizer is not known."""


def calculated(
    module: nn.Module, candidate: Candidate, strategy: Strategy, precision: Precision, reason: str
) -> Measured:
    """Calculate what a rank holds between two steps, from what the strategy declares.

    Args:
        module: the module; a copy without values is built.
        candidate: the configuration.
        strategy: its strategy, which need not have started.
        precision: its precision.
        reason: why the step is not run.
    """
    mode = fake_mode()
    copied = fake_module(module, mode)
    with mode, precision.init_context():
        build_once(copied)
        precision.convert_module(copied)
    notes = [f"only weights, gradients and optimizer state, calculated: {reason}"]
    trained = [parameter for parameter in copied.parameters() if parameter.requires_grad]
    parts = model_parallel(strategy, candidate.world)
    costs = strategy.costs(copied, precision, candidate.world)
    weights, gradients = part_bytes(copied.parameters()) // parts, part_bytes(trained) // parts
    state: int | None = None
    if costs is None:
        notes.append(f"{type(strategy).__name__} declares no costs: a rank is taken to hold everything")
    elif costs.parameters is not None and costs.gradients is not None:
        weights, gradients = costs.parameters, costs.gradients
        optimizers: list[Any] = []
        with suppress(Exception), mode:  # user code; it may need a running fit
            optimizers = configure_optimizers(copied).optimizers
        state = optimizer_bytes(optimizers, costs) if optimizers else None
    else:
        notes.append(f"each of {parts} ranks is taken to hold an equal part of the model")
    if state is None:
        state = _ADAM * gradients
        notes.append("the optimizer is taken to be Adam")
    masters = 0 if costs is None else costs.masters
    buffers = part_bytes(copied.buffers())
    held = {"parameters": weights + buffers, "gradients": gradients, "optimizer": state + masters}
    on_host = {"optimizer", "parameters"} if candidate.strategy.endswith("stage_3_offload") else {"optimizer"}
    away = on_host if candidate.offload or candidate.strategy.endswith("offload") else set()
    return Measured(
        candidate=candidate,
        memory=({category: 0 if category in away else held.get(category, 0) for category in CATEGORIES},),
        host=sum(held[category] for category in away),
        traffic=(),
        flops=0,
        exact=False,
        notes=tuple(notes),
    )
