"""Validation, test and prediction: one loop over each loader, without gradients."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, TypeAlias, final

import torch
from lightning_utilities.core.overrides import is_overridden
from torch import Tensor

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
from trainer_kit.step.padding_batches import (
    padded_to_longest,
    shared_batch,
    without_side_effects,
)
from trainer_kit.step.teardown import Teardown
from trainer_kit.strategies.strategy import Strategy

__all__ = ["Evaluation", "evaluate", "part_weight", "predict"]

# Whatever the user's loader yields, and whatever a step returns.
_Batch: TypeAlias = Any
_Outputs: TypeAlias = list[Any]
_Step: TypeAlias = Callable[..., Any]
_Weigh: TypeAlias = Callable[[_Batch], Any]

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
        whole_batches: whether ranks that share a batch each run all of it.
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
    move: Callable[[_Batch, int], _Batch] | None
    whole_batches: bool
    inference_mode: bool
    publish: Callable[[Reduced, int], None]
    seen: dict[int, int] = field(default_factory=dict)
    batches: int = 0
    indices: list[Any] | None = None

    @property
    def counts(self) -> list[int | float]:
        """The number of batches per loader, infinite if unknown; a hint for a loader that only claims to have it."""
        return [math.inf if batches is None else batches for batches in self.expected]

    @property
    def step_name(self) -> str:
        """The method of the module that runs a batch."""
        return f"{_HOOKS[self.stage]}_step"

    def listeners(self, moment: str) -> Listeners:
        """The listeners of ``on_<stage>_<moment>``."""
        listeners: Listeners = getattr(self.bus, f"on_{_HOOKS[self.stage]}_{moment}")
        return listeners

    def call_hooks(self, *moments: str) -> None:
        """Call ``on_<stage>_<moment>`` for each of these moments."""
        for moment in moments:
            for hook in self.listeners(moment):
                hook()

    def replace_loaders(
        self,
        feeds: Sequence[Feed],
        limits: Sequence[int | None],
        expected: Sequence[int | None],
    ) -> None:
        """Read other loaders from the next round on, or none; those of before are closed."""
        for feed in self.feeds:
            feed.close()
        if not self.feeds or not feeds:  # validation begins or ends
            self.seen.clear()
        self.feeds = feeds
        self.limits = limits
        self.expected = expected

    @contextmanager
    def limited_to(self, batches: int | None) -> Iterator[None]:
        """A context in which at most this many batches of each loader run, and do not count; None: all of them."""
        limits, expected = self.limits, self.expected
        if batches is not None:
            self.limits = [_smaller(limit, batches) for limit in limits]
            self.expected = [_smaller(length, batches) for length in expected]
        yield  # after an exception no evaluation follows
        self.limits = limits
        self.expected = expected
        self.seen.clear()

    def run_loader(self, loader: int, epoch: int, outputs: _Outputs | None) -> bool:
        """Run one loader; return whether this rank had a batch.

        Args:
            loader: its index.
            epoch: which sampling of its data is read.
            outputs: what the step returns is appended here, and `EMPTY` for a padding batch; None: it is dropped.
        """
        step = self._bound_step(loader)
        starts, ends = self.listeners("batch_start"), self.listeners("batch_end")
        metrics, move = self.metrics, self.move
        # Ranks run collectives in the step, so a rank without a batch takes part with a padding batch.
        lockstep = self.strategy.lockstep
        step_name = self.step_name
        feed, predicts = self.feeds[loader], self.stage == "predict"
        weigh = None
        if not self.whole_batches:
            weigh = part_weight(self.module, self.strategy)
        if predicts:
            feed.record_indices()
        metrics.use_sizes_of(feed if weigh is None else None)
        earlier: _Batch = None
        ran = False
        batches = islice(feed.sized_epoch(epoch), self.limits[loader])
        for index, (batch, size) in enumerate(
            padded_to_longest(feed, batches, self.strategy)
        ):
            self.batches += 1
            if lockstep and index == 0:
                earlier = self._shared_first_batch(batch, loader)
            # The other ranks have more samples. `_in_dataset_order` needs an output in each place, on every rank.
            if batch is EMPTY:
                if outputs is not None:
                    outputs.append(EMPTY)
                if lockstep:
                    self._run_padding(partial(step, earlier, index))
                continue
            ran = True
            if predicts:
                self.indices = feed.next_indices()
            # Weight and hook are stored from here: methods would be Python calls in every batch.
            if weigh is None:
                metrics.weight = size
            else:
                metrics.weight = None
                metrics.weigh = partial(_weight, weigh, batch)
            if move is not None:
                batch = move(batch, loader)
            for hook in starts:
                hook(batch, index, loader)
            metrics.hook = step_name
            output = step(batch, index)
            # The padding batch of this rank, should the others have more.
            if lockstep:
                earlier = batch
            for hook in ends:
                hook(output, batch, index, loader)
            if outputs is not None:
                outputs.append(output)
            if metrics.by_batch:
                self.seen[loader] = self.seen.get(loader, 0) + 1
                self.publish(metrics.flush_evaluation_step(), self.seen[loader])
        return ran

    def _bound_step(self, loader: int) -> _Step:
        """The step under strategy and precision, as a function of batch and index."""
        step: _Step = getattr(self.module, self.step_name)
        # As in Lightning, `dataloader_idx` is passed only where there are several loaders.
        extra = (loader,) if len(self.feeds) > 1 else ()
        if not takes(step, 2 + len(extra)):
            step = _first_arguments(step, extra)
            extra = ()
        step = self.strategy.bind_evaluation(step, whole=self.whole_batches)
        if extra:
            step = _with_arguments(step, extra)
        context = self.precision.forward_context()
        if context is not None:
            step = _inside_context(step, context)
        return step

    def _shared_first_batch(self, batch: _Batch, loader: int) -> _Batch:
        """A batch that ranks without one can run as padding; None where none is needed. Every data rank calls it."""
        if self._all_have_first_batch(loader):
            return None
        present = None if batch is EMPTY else batch
        shared = shared_batch(present, self.strategy.data)
        if self.move is None:
            return shared
        return self.move(shared, loader)

    def _all_have_first_batch(self, loader: int) -> bool:
        """Whether every data rank is known to have a share of the first batch."""
        feed = self.feeds[loader]
        samples = feed.samples(0)
        if samples is None or samples < self.strategy.data.size:
            return False
        # Full batches go to the ranks in turn, so a single batch belongs to one rank.
        return all(unit == "samples" for unit, _ in feed.stride)

    def _run_padding(self, step: Callable[[], object]) -> None:
        """Run a padding batch for the collectives of the other ranks, without hooks and without logging."""
        effects = without_side_effects(self.module, self.strategy.device)
        with self.metrics.unrecorded(self.step_name), effects:
            step()


def _smaller(batches: int | None, limit: int) -> int:
    if batches is None:
        return limit
    return min(batches, limit)


def evaluate(evaluation: Evaluation, epoch: int = 0) -> Reduced:
    """Run every loader once and return the reduced values of all ranks."""
    metrics, loaders = evaluation.metrics, len(evaluation.feeds)
    with _Evaluating(evaluation):
        evaluation.call_hooks("start", "epoch_start")
        ran = False
        for index in range(loaders):
            metrics.enter_loader(index if loaders > 1 else None)
            if evaluation.run_loader(index, epoch, outputs=None):
                ran = True
            else:
                metrics.note_absent_loader()
        metrics.enter_loader(None)
        metrics.leave_batch()
        # Hooks of the epoch's end see the reduced values; what they log is added to them. With several ranks the second
        # flush is made in any case: it is an exchange, and which hooks are overridden may differ from rank to rank.
        reduced = metrics.flush_epoch(ran)
        evaluation.call_hooks("epoch_end")
        if evaluation.listeners("epoch_end") or evaluation.strategy.reports.size > 1:
            reduced.add(metrics.flush_epoch(ran))
        evaluation.call_hooks("end")
        # Only now: `compute` in one of these hooks must not read an empty object.
        metrics.reset_objects()
    return reduced


def predict(evaluation: Evaluation, keep: bool = True) -> list[_Outputs]:
    """Run every loader once and return what ``predict_step`` returned: a list for each loader, in dataset order."""
    predictions: list[_Outputs] = []
    with _Evaluating(evaluation):
        evaluation.call_hooks("start", "epoch_start")
        for index in range(len(evaluation.feeds)):
            outputs: _Outputs = []
            evaluation.run_loader(index, 0, outputs if keep else None)
            predictions.append(
                _in_dataset_order(outputs, evaluation.strategy.data, keep)
            )
        evaluation.call_hooks("epoch_end", "end")
    return predictions


def _weight(weigh: _Weigh, batch: _Batch) -> float:
    """A batch has the same weight in the loss and in the mean of logged values."""
    return float(weigh(batch))  # no sync point: the batch is on the host


def _first_arguments(step: _Step, extra: tuple[int, ...]) -> _Step:
    """Adapt a step that does not take all of (batch, batch_idx, dataloader_idx)."""
    if takes(step, 2):
        return step
    if takes(step, 1):
        return lambda batch, index: step(batch)
    return lambda batch, index: step(batch, index, *(extra or (0,)))


def _with_arguments(step: _Step, extra: tuple[int, ...]) -> _Step:
    return lambda batch, index: step(batch, index, *extra)


def _inside_context(step: _Step, context: AbstractContextManager[object]) -> _Step:
    def step_in_context(batch: _Batch, index: int) -> object:
        with context:
            return step(batch, index)

    return step_in_context


def _in_dataset_order(outputs: _Outputs, group: Group, keep: bool) -> _Outputs:
    """The outputs of all ranks in dataset order: a global batch is the concatenation of the ranks' blocks."""
    if group.size == 1 or not keep:
        return outputs
    indexed = [
        (index, output) for index, output in enumerate(outputs) if output is not EMPTY
    ]
    # Ranks have different devices, and a pickled tensor keeps its device.
    on_host = map_tensors(indexed, _to_host)
    outputs_of_ranks = [dict(pairs) for pairs in group.all_gather_object(on_host)]
    last = max(max(by_index, default=-1) for by_index in outputs_of_ranks)
    ordered: _Outputs = []
    for index in range(last + 1):
        ordered += [
            by_index[index] for by_index in outputs_of_ranks if index in by_index
        ]
    return ordered


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.cpu()  # sync point: predictions leave the device


@final
class _Evaluating:
    """Enter evaluation mode without gradients and with a separate table of logged values; restore both on exit.

    A class and not a generator: contextlib turns a user's StopIteration into a RuntimeError.
    """

    def __init__(self, evaluation: Evaluation) -> None:
        self._module = evaluation.module
        self._metrics = evaluation.metrics
        self._stage = evaluation.stage
        # A fit validates under `no_grad`: tensors of inference mode cannot be used in training afterwards.
        self._without_gradients = (
            torch.inference_mode() if evaluation.inference_mode else torch.no_grad()
        )
        self._teardown = Teardown()

    def __enter__(self) -> None:
        module, teardown = self._module, self._teardown
        hooks = _HOOKS[self._stage]
        # Evaluation may change the mode of single layers, and a user may have set some.
        keep_modes(module)
        # If a hook of the user fails, the modes are restored and the exception of the evaluation is kept.
        teardown.failed.append(lambda error: restore_modes(module))
        teardown.cleanup.extend(
            (
                lambda error: self._without_gradients.__exit__(None, None, None),
                lambda error: self._metrics.leave(completed=error is None),
                lambda error: getattr(module, f"on_{hooks}_model_train")(),
                lambda error: forget_modes(module),
            )
        )
        self._metrics.enter()
        self._without_gradients.__enter__()
        try:
            getattr(module, f"on_{hooks}_model_eval")()
        except BaseException:
            teardown.__exit__(*sys.exc_info())
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._teardown.__exit__(kind, error, traceback)


def part_weight(module: TrainModule, strategy: Strategy) -> _Weigh | None:
    """The weight of this rank's part of a batch by the user's ``loss_weight``; None to weight by samples."""
    if not is_overridden("loss_weight", module, TrainModule):
        return None
    weigh: _Weigh = module.loss_weight
    shard_batch = strategy.shard_batch
    if shard_batch is None or strategy.losses.size == strategy.data.size:
        return weigh
    return lambda batch: weigh(shard_batch(batch))
