"""Validation, test and prediction: the same loop over each loader, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.overrides import is_overridden
from torch import Tensor

from trainer_kit.core.hooks import ModuleHooks
from trainer_kit.core.protocols import Group, Precision
from trainer_kit.core.signatures import takes
from trainer_kit.data import EMPTY, Feed, size_reader
from trainer_kit.engine.bus import Bus, Listeners
from trainer_kit.engine.entry import Reduced
from trainer_kit.engine.metrics import Metrics
from trainer_kit.engine.unwind import Unwinding

__all__ = ["Evaluation", "evaluate", "predict"]

_HOOKS = {"validate": "validation", "test": "test", "predict": "predict"}


@dataclass
class Evaluation:
    """Everything that one kind of evaluation needs, composed once.

    Attributes:
        stage: validate, test or predict.
        feeds: one for each loader.
        limits: batches of each loader, None for all.
        group: the ranks over which loaders are split.
        move: batch → batch on the device; None where there is nothing to do.
        inference_mode: torch's, instead of ``no_grad``.
        publish: is handed the values of single batches that were asked for, and how many of that loader's came before.
        seen: batches of each loader so far, over all rounds.
    """

    stage: str
    module: Any
    feeds: Sequence[Feed]
    limits: Sequence[int | None]
    bus: Bus
    metrics: Metrics
    precision: Precision
    group: Group
    move: Callable[[Any, int], Any] | None
    inference_mode: bool
    publish: Callable[[Reduced, int], None]
    seen: dict[int, int] = field(default_factory=dict)

    def listeners(self, moment: str) -> Listeners:
        """Who hears ``on_<stage>_<moment>``."""
        found: Listeners = getattr(self.bus, f"on_{_HOOKS[self.stage]}_{moment}")
        return found


def evaluate(run: Evaluation, epoch: int = 0) -> Reduced:
    """Run every loader once and return the reduced values of all ranks."""
    with _evaluating(run):
        for hook in run.listeners("start"):
            hook()
        for hook in run.listeners("epoch_start"):
            hook()
        ran = False
        for index in range(len(run.feeds)):
            run.metrics.loader = index if len(run.feeds) > 1 else None
            ran = _batches(run, index, epoch, None) or ran
        run.metrics.loader = None
        reduced = run.metrics.flush_epoch(ran)  # hooks see the reduced values,
        if run.listeners("epoch_end"):
            for hook in run.listeners("epoch_end"):
                hook()
            reduced.add(run.metrics.flush_epoch(ran))  # and what they log belongs to them
        for hook in run.listeners("end"):
            hook()
    return reduced


def predict(run: Evaluation, keep: bool = True) -> list[list[Any]]:
    """Run every loader once and return what ``predict_step`` returned: a list for each loader, in dataset order."""
    outputs: list[list[Any]] = []
    with _evaluating(run):
        for hook in run.listeners("start"):
            hook()
        for hook in run.listeners("epoch_start"):
            hook()
        for index in range(len(run.feeds)):
            mine: list[Any] = []
            _batches(run, index, 0, mine if keep else None)
            outputs.append(_in_order(mine, run.group) if keep else [])
        for hook in run.listeners("epoch_end"):
            hook()
        for hook in run.listeners("end"):
            hook()
    return outputs


def _batches(run: Evaluation, loader: int, epoch: int, kept: list[Any] | None) -> bool:
    """One loader. Returns whether this rank had any batch."""
    name = f"{_HOOKS[run.stage]}_step"
    step = getattr(run.module, name)
    extra = (loader,) if len(run.feeds) > 1 else ()
    if not takes(step, 2 + len(extra)):
        step, extra = _first_arguments(step, extra), ()
    metrics, context, move = run.metrics, run.precision.forward_context(), run.move
    starts, ends = run.listeners("batch_start"), run.listeners("batch_end")
    size: Callable[[Any], int] | None = None
    for index, batch in enumerate(islice(run.feeds[loader].epoch(epoch), run.limits[loader])):
        if batch is EMPTY:  # the other ranks have more samples
            if kept is not None:
                kept.append(EMPTY)
            continue
        if size is None:
            size = size_reader(batch)
        metrics.weight = size(batch)
        if move is not None:
            batch = move(batch, loader)
        for hook in starts:
            hook(batch, index, loader)
        metrics.hook = name
        if context is None:
            output = step(batch, index, *extra)
        else:
            with context:
                output = step(batch, index, *extra)
        for hook in ends:
            hook(output, batch, index, loader)
        if kept is not None:
            kept.append(output)
        if metrics.by_batch:
            seen = run.seen[loader] = run.seen.get(loader, 0) + 1
            run.publish(metrics.flush_evaluation_step(), seen)
    return size is not None


def _first_arguments(step: Callable[..., Any], extra: tuple[int, ...]) -> Callable[..., Any]:
    """A step that does not take all of (batch, batch_idx, dataloader_idx)."""
    if takes(step, 2):
        return step
    if takes(step, 1):
        return lambda batch, index: step(batch)
    return lambda batch, index: step(batch, index, *(extra or (0,)))


def _in_order(mine: list[Any], group: Group) -> list[Any]:
    """The outputs of all ranks in dataset order: a global batch is the ranks' blocks one after the other."""
    if group.size == 1:
        return mine
    on_host = apply_to_collection(
        [(i, out) for i, out in enumerate(mine) if out is not EMPTY],
        Tensor,
        lambda t: t.cpu(),  # sync point: predictions leave the device
    )
    everyone = [dict(part) for part in group.all_gather_object(on_host)]
    count = max((max(part, default=-1) for part in everyone), default=-1) + 1
    return [part[index] for index in range(count) for part in everyone if index in part]


@contextmanager
def _evaluating(run: Evaluation) -> Iterator[None]:
    """Evaluation mode, no gradients, a table of its own; everything as before afterwards."""
    module, metrics = run.module, run.metrics
    kind = _HOOKS[run.stage]
    modes = [(part, part.training) for part in module.modules()]
    hook, at = metrics.hook, metrics.weight
    ending = Unwinding()
    # A hook of the user's that fails leaves the modes as they were, and hides no exception of the evaluation.
    if is_overridden(f"on_{kind}_model_train", module, ModuleHooks):
        ending.cleanup.append(lambda error: getattr(module, f"on_{kind}_model_train")())
        ending.failed.append(lambda error: _set_modes(modes))
    else:
        ending.cleanup.append(lambda error: _set_modes(modes))
    with ending:
        if is_overridden(f"on_{kind}_model_eval", module, ModuleHooks):
            getattr(module, f"on_{kind}_model_eval")()
        else:
            module.eval()
        metrics.enter(run.stage)
        try:
            with torch.inference_mode() if run.inference_mode else torch.no_grad():
                yield
        finally:
            metrics.leave()
            metrics.hook, metrics.weight = hook, at


def _set_modes(modes: list[tuple[Any, bool]]) -> None:
    for part, training in modes:
        # nn.Module's own attribute write is 20 times slower, and train() would wake what the user froze.
        part.__dict__["training"] = training
