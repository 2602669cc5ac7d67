"""Records a fit of the Trainer for `verify`: samples, losses, gradients, weights, outputs of modules."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import final

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainer_kit.core.hooks import Callback
from trainer_kit.core.module import TrainModule
from trainer_kit.core.states import names_validation
from trainer_kit.core.tensors import tensors_of
from trainer_kit.core.torch_private import current_backward
from trainer_kit.core.types import Loaders, MetricValue
from trainer_kit.data import Feed
from trainer_kit.data.order import derive_seed
from trainer_kit.step.optimizers import LRSchedulerConfig
from trainer_kit.training.session import Session
from trainer_kit.verify.loaders import retarget_samplers
from trainer_kit.verify.norms import (
    DividedNorms,
    Shares,
    batch_norms,
    canonical,
    rows_of_shares,
    synced_norms,
)
from trainer_kit.verify.operations import trace
from trainer_kit.verify.torch_private import compiled_frames

__all__ = [
    "Micro",
    "OutputKey",
    "Record",
    "Recorder",
    "Watched",
    "losses_of",
    "makes_batches",
    "names_of",
    "reseed",
    "tied_names",
    "watch",
    "whole",
    "without_validation",
]

OutputKey = tuple[str, int, int]
"""An output: the canonical name of its module, the call in this micro-batch, the place among the module's outputs."""


@dataclass
class Watched:
    """What modules computed in one micro-batch, each in the order of computation."""

    outputs: dict[OutputKey, Tensor] = field(default_factory=dict)
    """Outputs of modules, in host memory."""
    flows: dict[OutputKey, Tensor] = field(default_factory=dict)
    """Gradients of the outputs."""
    calls: Counter[str] = field(default_factory=Counter)
    """How often each module was called."""


@dataclass
class Micro:
    """One micro-batch of one rank."""

    batch: list[Tensor]
    """The tensors of the batch, as ``training_step`` got them."""
    ids: list[int] | None
    """The dataset's indices; None where the loader does not draw them."""
    loss: dict[str, Tensor] = field(default_factory=dict)
    watched: Watched | None = None
    operations: list[str] = field(default_factory=list)
    """The operations of the traced module, a line each."""
    changed: bool = False
    """Whether the step has changed its batch in place."""

    def end(self, outputs: object, batch: object) -> None:
        """Record the losses, and whether the step has changed its batch in place.

        Args:
            outputs: what ``training_step`` returned.
            batch: after the step.
        """
        self.loss = losses_of(outputs)
        self.note_changes(batch)

    def note_changes(self, batch: object) -> None:
        """Compare the batch with what the step got."""
        values = list(tensors_of(batch))
        if len(values) != len(self.batch):
            # The step has added or removed entries; whether it has also changed tensors
            # cannot be seen, and `changed` only words a difference that is found elsewhere.
            self.changed = False
            return
        self.changed = not all(
            torch.equal(whole(value), before)
            for value, before in zip(values, self.batch, strict=True)
        )


@final
class Record:
    """A run of several steps on one rank. Keys of ``micros`` are (step, micro-batch of the step), both from 0.

    Args:
        data_ranks: number of ranks that divide the data.
        seed: the seed of the data order.
        tied: names of one and the same parameter, before training.
        plan: the dataset's indices in the order of one process.
        orders: the indices of the first two epochs; None: not known.
        divides: whether a sampler divides the data.

    Attributes:
        data_rank: this rank's number among those ranks.
        divisor: by what the engine divides the sum of the ranks' gradients.
        own_buffers: whether no rank sends its buffers.
        own_batches: whether the loader creates its batches itself, so that one process cannot read them as one.
        gradients: by step and parameter: complete, before clipping.
        weights: by step and name: complete, after the step; parameters and buffers.
        local: by step and name: parameters and buffers of which this rank has a whole copy; -1: before training.
        attributes: by step and name: plain attributes of the module and its parts before the step, as text.
        untrained: of the plain loop, by step: buffers and frozen parameters of each data rank; -1: before training.
        logged: by step and name.
        draws: whether a step draws random numbers.
        even: whether each data rank has a batch in every micro-batch, every window is complete, and no epoch ends.
        rank: this rank's number among all ranks.
        compiled: whether torch compiled code while it trained.
        buffers: the names of buffers.
        retargeted: samplers that were created for other ranks, in words.
        norms: the names of batch norms that normalize with the statistics of a rank's batch.
        synced: the names of those that normalize with the statistics of all ranks.
        waiting: the schedulers that wait for a validation, in words.
        whole: the names of batch norms that could not be divided by the ``shares`` of a `Recorder`.
    """

    def __init__(
        self,
        data_ranks: int = 1,
        seed: int = 0,
        *,
        tied: Sequence[tuple[str, ...]] = (),
        plan: list[int] | None = None,
        orders: Sequence[list[int] | None] = (),
        divides: bool = False,
    ) -> None:
        self.data_rank = 0
        self.data_ranks = data_ranks
        self.rank = 0
        self.divisor = 1
        self.seed = seed
        self.own_buffers = False
        self.own_batches = False
        self.draws = False
        self.even = True
        self.compiled = False
        self.micros: dict[tuple[int, int], Micro] = {}
        self.gradients: dict[int, dict[str, Tensor]] = {}
        self.weights: dict[int, dict[str, Tensor]] = {}
        self.local: dict[int, dict[str, Tensor]] = {}
        self.attributes: dict[int, dict[str, str]] = {}
        self.untrained: dict[int, list[dict[str, Tensor]]] = {}
        self.logged: dict[int, dict[str, float]] = {}
        self.tied = list(tied)
        self.plan = plan
        self.orders = list(orders)
        self.divides = divides
        self.buffers: set[str] = set()
        self.retargeted: list[str] = []
        self.norms: list[str] = []
        self.synced: list[str] = []
        self.waiting: list[str] = []
        self.whole: set[str] = set()

    def describe_run(self, trainer: Session, module: TrainModule, feed: Feed) -> None:
        """Record how a run divides its data and its gradients, and the layers and schedulers that need care."""
        self.own_batches = makes_batches(feed)
        strategy = trainer.strategy
        self.data_rank = strategy.data.rank
        self.data_ranks = strategy.data.size
        self.rank = strategy.world.rank
        self.divisor = strategy.gradient_divisor
        self.own_buffers = strategy.own_buffers
        self.seed = trainer.data_seed
        self.norms = batch_norms(module)
        self.synced = synced_norms(module)
        self.waiting = []
        # In manual optimization the module steps its schedulers itself.
        if module.automatic_optimization:
            self.waiting = without_validation(trainer.lr_scheduler_configs)
        self.buffers = {canonical(name) for name, _ in module.named_buffers()}

    def divide_norms(
        self, module: TrainModule, rows: Callable[[], list[Tensor] | None]
    ) -> None:
        """Let batch norms normalize the rows of each rank by themselves; `whole` gets the names of the others."""
        self.whole = DividedNorms(module, rows).whole

    def retarget(
        self, loaders: Loaders, rank: int, data_ranks: int, world: int
    ) -> None:
        """Let passed samplers divide the data as under a launcher, and record which were changed."""
        self.retargeted = retarget_samplers(loaders, rank, data_ranks, world)

    def note_compiled(self, compiled: bool) -> None:
        """Record whether torch compiled code while it trained."""
        self.compiled = compiled

    def note_draws(self) -> None:
        """Record that a step draws random numbers."""
        self.draws = True

    def note_uneven(self) -> None:
        """Record that a window is incomplete, a data rank has no batch, or an epoch ends."""
        self.even = False


def reseed(*parts: int) -> None:
    """Seed every global generator: random layers then draw the same numbers in each of the compared runs."""
    seed = derive_seed(*parts)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def whole(tensor: Tensor) -> Tensor:
    """A copy in host memory, of all shards; collective for sharded tensors."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    # A copy on the CPU too: optimizers and batch norms change their tensors in place.
    return tensor.to("cpu", copy=True)


def makes_batches(feed: Feed) -> bool:
    """Whether a loader creates its batches itself, as with a batch sampler: their size cannot be set.

    Example:
        >>> data = torch.utils.data
        >>> makes_batches(Feed(data.DataLoader(range(8), batch_size=2)))
        False
        >>> sampler = data.BatchSampler(range(8), 2, drop_last=False)
        >>> makes_batches(Feed(data.DataLoader(range(8), batch_sampler=sampler)))
        True
    """
    return any(unit == "batches" for unit, _ in feed.stride)


def names_of(module: nn.Module) -> dict[int, str]:
    """The canonical name of each parameter, by its id."""
    return {
        id(parameter): canonical(name) for name, parameter in module.named_parameters()
    }


def tied_names(module: nn.Module) -> list[tuple[str, ...]]:
    """The groups of names that belong to one parameter."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(canonical(name))
    return [tuple(names) for names in groups.values() if len(names) > 1]


def watch(
    module: nn.Module, current: Callable[[], Micro | None], traced: str = ""
) -> Iterator[RemovableHandle]:
    """Register hooks that record outputs and their gradients; yields the handles.

    Args:
        module: its submodules are watched; the module itself is not called.
        current: returns the micro-batch that runs.
        traced: the name of a module whose operations are recorded.
    """

    def record_outputs(
        name: str, submodule: nn.Module, inputs: object, output: object
    ) -> None:
        micro = current()
        if micro is None or micro.watched is None:
            return
        if current_backward() != -1:
            # Backward runs: activation checkpointing computes this output a second time.
            return
        watched = micro.watched
        call = watched.calls[name]
        watched.calls[name] += 1
        for index, value in enumerate(tensors_of(output)):
            key = (name, call, index)
            if not value.is_floating_point() or key in watched.outputs:
                continue
            watched.outputs[key] = whole(value)
            if value.requires_grad:
                # The hook holds `watched` itself: when it runs, another micro-batch of the
                # plain loop may be current.
                hook = partial(record_flow, watched, key)
                value.register_hook(hook)  # type: ignore[no-untyped-call]  # of torch

    def record_flow(watched: Watched, key: OutputKey, gradient: Tensor) -> None:
        watched.flows[key] = whole(gradient)

    def current_operations() -> list[str] | None:
        micro = current()
        if micro is None or micro.watched is None:
            return None
        return micro.operations

    for name, submodule in module.named_modules():
        # The root has no output to record: the Trainer calls `training_step`, not the module.
        if name:
            hook = partial(record_outputs, canonical(name))
            yield submodule.register_forward_hook(hook)
        if traced and canonical(name) == traced:
            yield from trace(submodule, current_operations)


@final
class Recorder(Callback):
    """Fills a `Record` while the Trainer fits, and ends the fit.

    Args:
        steps: optimizer steps after which the fit ends; modules see the limits that the user has set.
        reseeds: the seed of every micro-batch's random numbers; None: the run draws as it does without this callback.
        watched: the steps whose module outputs are recorded.
        traced: the name of a module whose operations are recorded at those steps; empty: none.
        saves: the step after which a checkpoint is saved, and its path; None: no checkpoint.
        shares: batch norms normalize these parts of each batch by themselves, as ranks do; None: the whole batch.
        threads: whether ranks are threads; then no thread of its own writes the checkpoint, which has no rank.
        loaders: the loaders that the user has passed.
        describe: returns the plain attributes of the module.
    """

    order = "early"

    def __init__(
        self,
        steps: int,
        *,
        reseeds: int | None = None,
        watched: frozenset[int] = frozenset(),
        traced: str = "",
        saves: tuple[int, str] | None = None,
        shares: Shares | None = None,
        threads: bool = False,
        loaders: Loaders = None,
        describe: Callable[[nn.Module], dict[str, str]],
    ) -> None:
        self.record = Record()
        self.steps = steps
        self.reseeds = reseeds
        self.watched = watched
        self.traced = traced
        self.saves = saves
        self.shares = shares
        self.threads = threads
        self.loaders = loaders
        self._describe = describe
        self._key = (-1, -1)
        self._micro: Micro | None = None
        self._names: dict[int, str] = {}
        self._handles: list[RemovableHandle] = []
        self._feed: Feed | None = None
        self._compiled = 0

    def setup(self, trainer: Session, pl_module: TrainModule, stage: str) -> None:
        """Let passed samplers divide the data as under a launcher."""
        # Before the loaders are read for the first time: they then start with their rank.
        data = trainer.strategy.data
        world = trainer.strategy.world
        self.record.retarget(self.loaders, data.rank, data.size, world.size)

    def on_train_start(self, trainer: Session, pl_module: TrainModule) -> None:
        """Set the end of the fit, note how it divides its data, and register the hooks on modules."""
        record = self.record
        assert trainer.run is not None
        # Here and not by settings: what the module reads from them while it is set up
        # (schedules of learning rates count steps) must be what the user has set.
        trainer.run.schedule.limit_to_steps(self.steps)
        feed = trainer.run.windows.feed
        feed.record_indices()
        self._feed = feed
        record.describe_run(trainer, pl_module, feed)
        if self.shares is not None:
            record.divide_norms(pl_module, self._rows)
        if self.threads:
            trainer.run.saver.write_in_training_thread()
        # Optimizers hold parameters without their names.
        self._names = names_of(pl_module)
        record.local[-1] = _local_tensors(pl_module)
        self._compiled = compiled_frames()
        if self.watched:
            self._handles = list(watch(pl_module, lambda: self._micro, self.traced))

    def on_train_batch_start(
        self, trainer: Session, pl_module: TrainModule, batch: object, batch_idx: int
    ) -> None:
        """Record the batch."""
        step = trainer.progress.step
        last_step, last_index = self._key
        index = 0
        if step == last_step:
            index = last_index + 1
        self._key = step, index
        if index == 0:
            self.record.attributes[step] = self._describe(pl_module)
        watched = None
        if step in self.watched:
            watched = Watched()
        assert self._feed is not None
        ids = self._feed.next_indices()
        tensors = [whole(value) for value in tensors_of(batch)]
        micro = Micro(tensors, ids, watched=watched)
        self._micro = micro
        self.record.micros[step, index] = micro
        if self.reseeds is not None:
            # The plain loop seeds by the same number, so that its dropout masks are those
            # of this rank.
            batch_of_world = index * self.record.data_ranks + self.record.data_rank
            reseed(self.reseeds, step, batch_of_world)

    def _rows(self) -> list[Tensor] | None:
        """The rows of the batch that runs, by rank; None: not known."""
        if self._micro is None or self._micro.ids is None or self.shares is None:
            return None
        return rows_of_shares(self._micro.ids, self.shares.get(self._key, []))

    def on_train_batch_end(
        self,
        trainer: Session,
        pl_module: TrainModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Record the losses."""
        if self._micro is not None:
            self._micro.end(outputs, batch)
        self._micro = None

    def on_before_optimizer_step(
        self, trainer: Session, pl_module: TrainModule, optimizer: Optimizer
    ) -> None:
        """Record the gradients."""
        gradients = self.record.gradients.setdefault(trainer.progress.step, {})
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self._names.get(id(parameter))
                if name is not None and parameter.grad is not None:
                    gradients[name] = whole(parameter.grad)

    def on_train_step_end(self, trainer: Session, pl_module: TrainModule) -> None:
        """Record the weights; save a checkpoint where it is due."""
        # The step is counted already.
        step = trainer.progress.step - 1
        state = trainer.strategy.module_state(pl_module)
        weights: dict[str, Tensor] = {}
        for name, value in state.items():
            if isinstance(value, Tensor):
                weights[canonical(name)] = whole(value)
        self.record.weights[step] = weights
        self.record.local[step] = _local_tensors(pl_module)
        if self.saves is None:
            return
        save_step, path = self.saves
        if save_step == step:
            trainer.save_checkpoint(path)

    def on_train_end(self, trainer: Session, pl_module: TrainModule) -> None:
        """Remove the hooks from modules; note whether anything was compiled."""
        self.record.note_compiled(compiled_frames() > self._compiled)
        for handle in self._handles:
            handle.remove()

    def take_logs(self, trainer: Session) -> None:
        """Record the values that would go to the loggers."""
        # A patch of this trial alone, which has no loggers: `log_metrics` gets exactly the
        # values that they would get.
        vars(trainer)["log_metrics"] = partial(self._log, trainer)

    def _log(
        self,
        trainer: Session,
        metrics: Mapping[str, MetricValue],
        step: int | None = None,
    ) -> None:
        """Record values; logged without a step, they belong to the one that has just ended."""
        if step is None:
            step = trainer.progress.step
        values = self.record.logged.setdefault(step - 1, {})
        for name, value in metrics.items():
            values[name] = float(value)


def _local_tensors(module: TrainModule) -> dict[str, Tensor]:
    """Parameters and buffers of which this rank has a whole copy."""
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(),
    ]
    return {
        canonical(name): whole(tensor)
        for name, tensor in tensors
        if not isinstance(tensor, DTensor)
    }


def without_validation(schedulers: Iterable[LRSchedulerConfig]) -> list[str]:
    """Let schedulers wait for a value that is not there; returns the names of those that monitor a validation.

    The compared runs have no validation, and the one that has must not differ from them.
    """
    names = []
    for config in schedulers:
        if not config.reduce_on_plateau or config.monitor is None:
            continue
        config.allow_missing_metric()
        if names_validation(str(config.monitor)):
            config.never_advance()
            scheduler = type(config.scheduler).__name__
            names.append(f"{scheduler} monitors {config.monitor!r}")
    return names


def losses_of(outputs: object) -> dict[str, Tensor]:
    """The losses in what ``training_step`` returned, by name."""
    values: Mapping[object, object] = {"loss": outputs}
    if isinstance(outputs, Mapping):
        values = outputs
    # Other entries of the mapping, such as predictions, are no losses.
    return {
        str(name): whole(value)
        for name, value in values.items()
        if isinstance(value, Tensor) and value.numel() == 1
    }
