"""Validation, test and prediction: one loop over each loader, without gradients."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, final

import torch
from lightning_utilities.core.overrides import is_overridden

from trainer_kit.core.hooks import forget_modes, keep_modes, restore_modes
from trainer_kit.core.module import TrainModule
from trainer_kit.core.protocols import Group
from trainer_kit.core.signatures import takes
from trainer_kit.core.tensors import map_tensors
from trainer_kit.data import EMPTY, Feed
from trainer_kit.metrics.entry import Reduced
from trainer_kit.metrics.metrics import Metrics
from trainer_kit.precision.precision import Precision
from trainer_kit.step.bus import Bus, Listeners
from trainer_kit.step.padding_batches import padded_to_longest, shared_batch, without_side_effects
from trainer_kit.step.teardown import Teardown
from trainer_kit.strategies.strategy import Strategy

__all__ = ["Evaluation", "evaluate", "part_weight", "predict"]

_HOOKS = {"validate": "validation", "test": "test", "predict": "predict"}


@dataclass(kw_only=True)
class Evaluation:
    """Everything that one kind of evaluation needs, composed once.

    Attributes:
        stage: validate, test or predict.
        feeds: one for each loader.
        limits: where reading of each loader stops, None at the end of its data.
        expected: the number of batches per loader, as far as it is known before reading; None if unknown.
        strategy: splits loaders over its data ranks, and binds the step.
        move: copies a batch to the device; None if that is not needed.
        whole: whether ranks that share a batch each run all of it.
        inference_mode: torch's, instead of ``no_grad``.
        publish: called with the ``on_step`` values of a batch and the number of that loader's batches before it.
        seen: the batches of each loader so far, over all rounds.
        batches: the batches begun so far, over all loaders and rounds.
        indices: in prediction, the dataset's indices of the batch that runs; None if they are unknown.
    """

    stage: str
    module: Any
    feeds: Sequence[Feed]
    limits: Sequence[int | None]
    expected: Sequence[int | None]
    bus: Bus
    metrics: Metrics
    precision: Precision
    strategy: Strategy
    move: Callable[[Any, int], Any] | None
    whole: bool
    inference_mode: bool
    publish: Callable[[Reduced, int], None]
    seen: dict[int, int] = field(default_factory=dict)
    batches: int = 0
    indices: list[Any] | None = None

    @property
    def counts(self) -> list[int | float]:
        """The number of batches per loader, infinite if unknown; a hint for a loader that only claims to have it."""
        return [math.inf if batches is None else batches for batches in self.expected]

    def listeners(self, moment: str) -> Listeners:
        """The listeners of ``on_<stage>_<moment>``."""
        found: Listeners = getattr(self.bus, f"on_{_HOOKS[self.stage]}_{moment}")
        return found


def evaluate(run: Evaluation, epoch: int = 0) -> Reduced:
    """Run every loader once and return the reduced values of all ranks."""
    with _Evaluating(run):
        _call(run, "start", "epoch_start")
        ran = False
        for index in range(len(run.feeds)):
            run.metrics.loader = index if len(run.feeds) > 1 else None
            if _batches(run, index, epoch, None):
                ran = True
            else:
                run.metrics.absent.add(run.metrics.loader)
        run.metrics.loader = None
        run.metrics.leave_batch()
        reduced = run.metrics.flush_epoch(ran)  # hooks see the reduced values,
        _call(run, "epoch_end")
        if (
            run.listeners("epoch_end") or run.strategy.reports.size > 1
        ):  # who listens may differ from rank to rank
            reduced.add(run.metrics.flush_epoch(ran))  # and what they log belongs to them
        _call(run, "end")
        run.metrics.reset_objects()
    return reduced


def predict(run: Evaluation, keep: bool = True) -> list[list[Any]]:
    """Run every loader once and return what ``predict_step`` returned: a list for each loader, in dataset order."""
    outputs: list[list[Any]] = []
    with _Evaluating(run):
        _call(run, "start", "epoch_start")
        for index in range(len(run.feeds)):
            mine: list[Any] = []
            _batches(run, index, 0, mine if keep else None)
            outputs.append(_in_order(mine, run.strategy.data) if keep else [])
        _call(run, "epoch_end", "end")
    return outputs


def _call(run: Evaluation, *moments: str) -> None:
    for moment in moments:
        for hook in run.listeners(moment):
            hook()


def _batches(run: Evaluation, loader: int, epoch: int, kept: list[Any] | None) -> bool:
    """Run one loader; return whether this rank had a batch."""
    name = f"{_HOOKS[run.stage]}_step"
    step = getattr(run.module, name)
    extra = (loader,) if len(run.feeds) > 1 else ()
    if not takes(step, 2 + len(extra)):
        step, extra = _first_arguments(step, extra), ()
    step = run.strategy.bind_evaluation(step, whole=run.whole)
    metrics, context, move = run.metrics, run.precision.forward_context(), run.move
    starts, ends = run.listeners("batch_start"), run.listeners("batch_end")
    weigh = None if run.whole else part_weight(run.module, run.strategy)
    feed, lockstep, earlier, ran = run.feeds[loader], run.strategy.lockstep, None, False
    names = run.stage == "predict"
    if names:
        feed.record_indices()
    metrics.feed = feed if weigh is None else None
    mine = padded_to_longest(
        feed, islice(feed.sized_epoch(epoch), run.limits[loader]), run.strategy
    )
    for index, (batch, size) in enumerate(mine):
        run.batches += 1
        if lockstep and index == 0 and not _all_have(run, loader):
            earlier = shared_batch(None if batch is EMPTY else batch, run.strategy.data)
            earlier = earlier if move is None else move(earlier, loader)
        if batch is EMPTY:  # the other ranks have more samples
            if kept is not None:
                kept.append(EMPTY)
            if lockstep:
                _run_padding(run, partial(step, earlier, index, *extra))
            continue
        ran = True
        if names:
            run.indices = feed.next_indices()
        if weigh is not None:
            metrics.weight, metrics.weigh = None, partial(_weight, weigh, batch)
        else:
            metrics.weight = size
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
        if lockstep:
            earlier = batch
        for hook in ends:
            hook(output, batch, index, loader)
        if kept is not None:
            kept.append(output)
        if metrics.by_batch:
            seen = run.seen[loader] = run.seen.get(loader, 0) + 1
            run.publish(metrics.flush_evaluation_step(), seen)
    return ran


def _all_have(run: Evaluation, loader: int) -> bool:
    """Whether every data rank is known to have a share of the first batch."""
    feed, ranks = run.feeds[loader], run.strategy.data.size
    samples = feed.samples(0)
    # Full batches go to the ranks in turn, so a single batch belongs to one rank.
    return (
        samples is not None
        and samples >= ranks
        and all(unit == "samples" for unit, _ in feed.stride)
    )


def _run_padding(run: Evaluation, step: Callable[[], Any]) -> None:
    """Run a padding batch for the collectives of the other ranks, without hooks and without logging."""
    metrics = run.metrics
    kept, metrics.table, metrics.hook = (
        (metrics.table, metrics.by_batch),
        {},
        f"{_HOOKS[run.stage]}_step",
    )
    try:
        with (
            without_side_effects(run.module, run.strategy.device),
            run.precision.forward_context() or nullcontext(),
        ):
            step()
    finally:
        metrics.table, metrics.by_batch = kept


def _weight(weigh: Callable[[Any], Any], batch: Any) -> float:
    """A batch has the same weight in the loss and in the mean of logged values."""
    return float(weigh(batch))  # no sync point: the batch is on the host


def _first_arguments(step: Callable[..., Any], extra: tuple[int, ...]) -> Callable[..., Any]:
    """Adapt a step that does not take all of (batch, batch_idx, dataloader_idx)."""
    if takes(step, 2):
        return step
    if takes(step, 1):
        return lambda batch, index: step(batch)
    return lambda batch, index: step(batch, index, *(extra or (0,)))


def _in_order(mine: list[Any], group: Group) -> list[Any]:
    """The outputs of all ranks in dataset order: a global batch is the concatenation of the ranks' blocks."""
    if group.size == 1:
        return mine
    on_host = map_tensors(
        [(i, out) for i, out in enumerate(mine) if out is not EMPTY],
        lambda t: t.cpu(),  # sync point: predictions leave the device
    )
    everyone = [dict(part) for part in group.all_gather_object(on_host)]
    count = max((max(part, default=-1) for part in everyone), default=-1) + 1
    return [part[index] for index in range(count) for part in everyone if index in part]


@final
class _Evaluating:
    """Enter evaluation mode without gradients and with a separate table of logged values; restore both on exit.

    A class and not a generator: contextlib turns a user's StopIteration into a RuntimeError.
    """

    def __init__(self, run: Evaluation) -> None:
        self._run, self._kind = run, _HOOKS[run.stage]
        self._gradients = torch.inference_mode() if run.inference_mode else torch.no_grad()
        self._ending = Teardown()

    def __enter__(self) -> None:
        module, metrics, ending = self._run.module, self._run.metrics, self._ending
        before = metrics.hook, metrics.weight, metrics.feed
        keep_modes(module)
        # If a hook of the user fails, the modes are restored and the exception of the evaluation is kept.
        ending.failed.append(lambda error: restore_modes(module))
        ending.cleanup += [
            lambda error: self._gradients.__exit__(None, None, None),
            lambda error: self._leave_table(error is None, *before),
            lambda error: getattr(module, f"on_{self._kind}_model_train")(),
            lambda error: forget_modes(module),
        ]
        metrics.enter(self._run.stage)
        self._gradients.__enter__()
        try:
            getattr(module, f"on_{self._kind}_model_eval")()
        except BaseException:
            ending.__exit__(*sys.exc_info())
            raise

    def _leave_table(
        self, completed: bool, hook: str, weight: float | None, feed: Feed | None
    ) -> None:
        metrics = self._run.metrics
        metrics.leave(completed)
        metrics.hook, metrics.weight, metrics.feed = hook, weight, feed

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ending.__exit__(kind, error, traceback)


def part_weight(module: TrainModule, strategy: Strategy) -> Callable[[Any], Any] | None:
    """The weight of this rank's part of a batch by the user's ``loss_weight``; None to weight by samples."""
    if not is_overridden("loss_weight", module, TrainModule):
        return None
    weigh: Callable[[Any], Any] = module.loss_weight
    part = strategy.shard_batch
    if part is None or strategy.losses.size == strategy.data.size:
        return weigh
    return lambda batch: weigh(part(batch))
