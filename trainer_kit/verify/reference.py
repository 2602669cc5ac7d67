"""The reference of `verify`: a plain loop in one process over the micro-batches of all ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any, final

import numpy as np
import torch
from lightning_utilities.core.overrides import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.datamodule import DataModule
from trainer_kit.core.environment import pick_device
from trainer_kit.core.errors import ConfigurationError, DataError
from trainer_kit.core.module import TrainModule
from trainer_kit.core.progress import Progress
from trainer_kit.core.tensors import map_tensors, tensors_of
from trainer_kit.core.types import Batch, Loaders, Nested, StepOutput
from trainer_kit.data import EMPTY, Feed
from trainer_kit.precision.precision import Precision
from trainer_kit.step.optimizers import parameters_of
from trainer_kit.strategies.single import SingleDeviceStrategy
from trainer_kit.training.loaders import mover
from trainer_kit.training.session import Session
from trainer_kit.verify.compare import same_bits
from trainer_kit.verify.loaders import Division, Row, feeds_of, rows_of
from trainer_kit.verify.manual import (
    Turns,
    add_gradients,
    copied,
)
from trainer_kit.verify.norms import canonical, join_norms, joined
from trainer_kit.verify.rank import (
    Logged,
    Rank,
    logged_by,
    values_of_first_rank,
    weighted_means,
)
from trainer_kit.verify.recorder import (
    Micro,
    Record,
    Watched,
    names_of,
    reseed,
    tied_names,
    watch,
    whole,
)
from trainer_kit.verify.trainer import NeedsJoinError, PlainTrainer

__all__ = ["plain_loop"]

_BatchEnd = tuple[StepOutput, Batch, int]
"""The arguments of ``on_train_batch_end``."""
_RowResult = tuple[list[_BatchEnd], list[Logged]]
"""The ends of the micro-batches of all ranks, and what the ranks have logged in them."""


@final
class _Plain:
    """One run of the plain loop.

    Args:
        trainer: has settings and seed; it does not run.
        module: the module that is trained.
        datamodule: the user's datamodule, or None.
        precision: the dtypes of the computation.
        steps: number of optimizer steps.
        division: how the compared run divides its data.
        watched: steps whose module outputs are recorded.
        traced: the name of a module whose operations are recorded at these steps.
    """

    def __init__(
        self,
        trainer: Session,
        module: TrainModule,
        datamodule: DataModule | None,
        precision: Precision,
        steps: int,
        division: Division,
        watched: frozenset[int],
        traced: str,
    ) -> None:
        self.module = module
        self.settings = trainer.settings
        self.division = division
        self.watched = watched
        self.steps = steps
        self.automatic = module.automatic_optimization
        self.progress = Progress()
        strategy = SingleDeviceStrategy(pick_device(trainer.strategy.device.type, 0))
        strategy.start()
        precision.convert_module(module)
        module.to(strategy.device)
        modules = [module]
        # In manual optimization ranks step inside `training_step`, where they meet: each
        # needs weights of its own. Otherwise one module runs the micro-batches of all.
        if not self.automatic:
            modules += [copied(module) for _ in range(division.data_ranks - 1)]
        gather = None
        if division.data_ranks == division.world:
            gather = self.gather
        self.ranks: list[Rank] = []
        for rank_module in modules:
            loop = PlainTrainer(trainer, self.progress, division.world, gather=gather)
            move, _ = mover(rank_module, datamodule, strategy, precision)
            self.ranks.append(Rank(loop, rank_module, move, self.before_step))
        self.first = self.ranks[0]
        self.configured = self.first.configured
        self.context = precision.forward_context
        self.names = names_of(module)
        self.record = Record(
            division.data_ranks, division.seed, tied=tied_names(module)
        )
        self.window = 1
        self.total = 1.0
        self.buffers: list[dict[str, Tensor]] = []
        self.earlier: dict[int, list[Tensor | None]] = {}
        self.losses: list[Tensor] = []
        self.has_loss_weight = is_overridden("loss_weight", module, TrainModule)
        self.turns: Turns | None = None
        self.data_rank = 0
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.scaled: list[list[tuple[list[nn.Parameter] | None, Tensor]]] = []
        waits = bool(division.synced) or division.joined
        self.joins = division.data_ranks > 1 and self.automatic and waits
        if division.synced and division.data_ranks > 1:
            self.join()
        if watched:
            for rank in self.ranks:
                list(watch(rank.module, rank.running, traced))

    def join(self) -> None:
        """Let batch norms normalize the samples of all ranks together."""
        if not self.automatic:
            raise ConfigurationError(
                "verify cannot compare manual optimization with batch norms that normalize the samples of all ranks",
                found=f"SyncBatchNorm: {self.division.synced[0]}",
                fix="verify with devices=1, or without sync_batchnorm",
            )
        join_norms(self.module, self.division.synced, self.meet)

    def hook(self, name: str, *arguments: object) -> None:
        """Call a hook of each rank's module."""
        for rank in self.ranks:
            rank.hook(name, *arguments)

    def run(self, feeds: list[Feed], limit: int | None, window: int) -> Record:
        """Train; returns what was recorded."""
        progress = self.progress
        self.window = window
        self.hook("on_fit_start")
        self.hook("on_train_start")
        self.share_buffers()
        # The state before the first step has the number -1.
        self.record.untrained[-1] = self.untrained_values()
        while progress.step < self.steps:
            step_before = progress.step
            self.hook("on_train_epoch_start")
            rows = islice(rows_of(feeds, progress.epoch), limit)
            if progress.epoch > 0:
                self.record.note_uneven()
            while progress.step < self.steps:
                window_rows = list(islice(rows, window))
                if not window_rows:
                    break
                self.step(window_rows)
            self.end_epoch()
            # Without this an empty loader would start epoch after epoch forever.
            if progress.step == step_before:
                raise DataError(
                    "the training loader has no batches",
                    fix="pass a loader with samples",
                )
        return self.record

    def end_epoch(self) -> None:
        """End an epoch: its hook, its means, and the schedulers that count epochs."""
        progress = self.progress
        self.hook("on_train_epoch_end")
        progress.epoch += 1
        # A scheduler may monitor a value of the last step, or the mean of the epoch, which
        # takes precedence.
        metrics = dict(self.record.logged.get(progress.step - 1, {}))
        sums = self.first.loop.metrics.epoch
        for name, (total, weight) in sums.items():
            if weight:
                metrics[name] = total / weight
        self.schedule("epoch", progress.epoch, metrics)
        sums.clear()
        progress.epoch_batch = 0

    def step(self, rows: list[Row]) -> None:
        """One optimizer step over the micro-batches of all ranks: the gradient is sum(w g) / sum(w)."""
        progress = self.progress
        step = progress.step
        weights = [self.row_weights(row) for row in rows]
        # All weights are 0 where no sample has a valid target: the gradient is then 0 too.
        self.total = sum(map(sum, weights)) or 1.0
        if len(rows) < self.window or any(map(_has_empty_batch, rows)):
            self.record.note_uneven()
        if self.automatic:
            self.zero()
        self.share_buffers()
        logged: list[Logged] = []
        for index, (row, row_weights) in enumerate(zip(rows, weights, strict=True)):
            shares = [weight / self.total for weight in row_weights]
            batch_ends, logged = self.run_row(row, (step, index), shares)
            progress.pass_batches(1)
            # What optimizers and hooks change is changed by every rank in the run, and
            # only once here.
            with self.equal_buffers():
                # The end of the last micro-batch follows the optimizer step.
                if index + 1 == len(rows):
                    self.optimize(step, values_of_first_rank(logged))
                    progress.step += 1
                self.end(batch_ends)
        self.record.weights[step] = {
            canonical(name): whole(value)
            for name, value in self.module.state_dict().items()
            if isinstance(value, Tensor)
        }
        self.record.untrained[step] = self.untrained_values()
        self.record.logged[step] = weighted_means(logged)

    def run_row(
        self, row: Row, key: tuple[int, int], shares: list[float]
    ) -> _RowResult:
        """Forward and backward of one micro-batch of each rank."""
        if not self.automatic:
            return self.manually(row, key, shares)
        if self.joins:
            return self.jointly(row, key, shares)
        return self.automatically(row, key, shares)

    def zero(self) -> None:
        """Drop the gradients of the last step, and its losses."""
        self.losses = []
        for optimizer in self.configured.optimizers:
            self.hook("on_before_zero_grad", optimizer)
            if self.first.owns("optimizer_zero_grad"):
                self.module.optimizer_zero_grad(
                    self.progress.epoch, self.progress.epoch_batch, optimizer
                )
            else:
                optimizer.zero_grad()

    def optimize(self, step: int, metrics: dict[str, float]) -> None:
        """Step optimizers and schedulers, unless the module does."""
        # In manual optimization `before_step` fills it; the entry exists in both cases, for
        # a step that no optimizer makes.
        gradients = self.record.gradients.setdefault(step, {})
        if not self.automatic:
            return
        # Before clipping, as in the run.
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                gradients[self.names[id(parameter)]] = whole(parameter.grad)
        for optimizer in self.configured.optimizers:
            self.step_optimizer(optimizer)
        self.schedule("step", step + 1, metrics)

    def step_optimizer(self, optimizer: Optimizer) -> None:
        """Clip the gradients of an optimizer and step it, as the module does."""
        self.hook("on_before_optimizer_step", optimizer)
        if self.first.owns("configure_gradient_clipping"):
            clip = self.settings.clip or (None, None)
            self.module.configure_gradient_clipping(optimizer, *clip)
        else:
            self.first.loop.clip_gradients(optimizer, None, None)
        if self.first.owns("optimizer_step"):
            loss = None
            if self.losses:
                loss = sum(self.losses)
            # The batch that has ended is counted already.
            batch = self.progress.epoch_batch - 1
            # Forward and backward have run: the closure only returns their loss.
            closure = partial(_identity, loss)
            self.module.optimizer_step(self.progress.epoch, batch, optimizer, closure)
        else:
            optimizer.step()

    def schedule(
        self, interval: str, completed: int, metrics: dict[str, float]
    ) -> None:
        """Advance the schedulers that count steps, or epochs."""
        if not self.automatic:
            return
        for config in self.configured.schedulers:
            if config.interval != interval or completed % config.frequency:
                continue
            metric = None
            if config.monitor is not None and config.reduce_on_plateau:
                metric = metrics.get(str(config.monitor))
                # It waits for its metric, as in the run.
                if metric is None:
                    continue
            if self.first.owns("lr_scheduler_step"):
                self.module.lr_scheduler_step(config.scheduler, metric)
            elif metric is None:
                config.scheduler.step()
            else:
                config.scheduler.step(metric)

    def end(self, batch_ends: list[_BatchEnd]) -> None:
        """Call ``on_train_batch_end`` of each rank's module, with its own batch; of a shared one as the first rank."""
        for rank, arguments in zip(self.ranks, batch_ends, strict=False):
            rank.hook("on_train_batch_end", *arguments)

    def automatically(
        self, row: Row, key: tuple[int, int], shares: list[float]
    ) -> _RowResult:
        """Forward and backward of one micro-batch of each rank, one after the other through one module."""
        batch_ends: list[_BatchEnd] = []
        logged: list[Logged] = []
        for data_rank, (batch, _, ids) in enumerate(row):
            if batch is EMPTY:
                continue
            self.load_buffers(self.buffers[data_rank])
            micro_key = (*key, data_rank)
            share = shares[data_rank]
            batch_ends.append(self.micro(self.first, batch, ids, micro_key, share))
            self.buffers[data_rank] = self.read_buffers()
            logged += logged_by(self.first)
        return batch_ends, logged

    def jointly(
        self, row: Row, key: tuple[int, int], shares: list[float]
    ) -> _RowResult:
        """As `automatically`, but ranks wait for each other in batch norms, and one backward follows for all."""
        data_ranks = [
            data_rank
            for data_rank, (batch, _, _) in enumerate(row)
            if batch is not EMPTY
        ]
        meeting = "all_gather"
        if self.division.synced:
            meeting = "its SyncBatchNorm layers"
        self.turns = Turns(len(data_ranks), meeting)
        self.scaled = []
        batch_ends: list[_BatchEnd] = []
        logged: list[Logged] = []

        def run_rank(turn: int) -> None:
            data_rank = data_ranks[turn]
            self.data_rank = data_rank
            batch, _, ids = row[data_rank]
            self.load_buffers(self.buffers[data_rank])
            micro_key = (*key, data_rank)
            share = shares[data_rank]
            batch_ends.append(self.micro(self.first, batch, ids, micro_key, share))
            self.buffers[data_rank] = self.read_buffers()
            logged.extend(logged_by(self.first))

        self.turns.run(run_rank)
        self.turns = None
        # The graphs of the ranks are connected by the layers in which they met: a backward
        # of one rank's loss would free the parts that the next one needs.
        for losses in zip(*self.scaled, strict=True):
            total = torch.stack([loss for _, loss in losses]).sum()
            parameters = losses[0][0]
            self.hook("on_before_backward", total)
            self.backward(total, parameters)
            self.hook("on_after_backward")
        return batch_ends, logged

    def meet(self, value: Tensor, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """The output of a batch norm for one rank: waits for the inputs of all ranks, which are normalized together."""
        # Outside a step, such as in a hook, no other rank is there to wait for.
        if self.turns is None:
            return forward(value)
        turn = len(self.inputs)
        self.inputs.append(value)

        def normalize() -> None:
            with self.equal_buffers():
                self.outputs = list(joined(self.inputs, forward))
                self.inputs = []

        self.wait(turn, normalize)
        output: Tensor = self.outputs[turn]
        return output

    def wait(self, turn: int, exchange: Callable[[], None]) -> None:
        """Wait until every rank is here; the last one calls ``exchange``."""
        assert self.turns is not None
        # In manual optimization each rank has a module of its own: nothing to swap.
        if not self.automatic:
            self.turns.meet(turn, exchange)
            return
        # Other ranks run through the same module until this one goes on.
        data_rank = self.data_rank
        micro = self.first.running()
        logs = self.first.loop.metrics
        weight = logs.weight
        values = logs.values
        self.buffers[data_rank] = self.read_buffers()
        self.turns.meet(turn, exchange)
        self.data_rank = data_rank
        self.first.run(micro)
        logs.begin(weight, values)
        self.load_buffers(self.buffers[data_rank])

    def gather(self, data: Nested, sync_grads: bool) -> Nested:
        """Stack the tensors of all ranks, as `TrainModule.all_gather` does in the run."""
        if self.turns is None:
            raise NeedsJoinError(
                "training_step gathers values of all ranks", found="all_gather"
            )
        if sync_grads and not self.automatic:
            raise ConfigurationError(
                "verify cannot compare manual optimization whose gradients cross ranks",
                found="all_gather(sync_grads=True)",
                fix="verify with devices=1",
            )
        turn = len(self.inputs)
        self.inputs.append(list(tensors_of(data)))

        def stack() -> None:
            columns = zip(*self.inputs, strict=True)
            self.outputs = [torch.stack(tensors) for tensors in columns]
            self.inputs = []

        self.wait(turn, stack)
        outputs = self.outputs
        if not sync_grads:
            outputs = [output.detach() for output in outputs]
        # `tensors_of` and `map_tensors` walk a structure in the same order.
        remaining = iter(outputs)
        return map_tensors(data, lambda tensor: next(remaining))

    def manually(
        self, row: Row, key: tuple[int, int], shares: list[float]
    ) -> _RowResult:
        """Each rank's ``training_step``: its ``manual_backward`` waits for those of the others."""
        batch_ends: dict[int, _BatchEnd] = {}
        turns = Turns(len(row), "manual_backward or all_gather")
        self.turns = turns
        self.earlier = {}
        any_batch = next(batch for batch, _, _ in row if batch is not EMPTY)

        def run_rank(data_rank: int) -> None:
            rank = self.ranks[data_rank]
            batch, _, ids = row[data_rank]
            share = shares[data_rank]
            rank.loop.run_backward_with(
                partial(self.backward_by_hand, turns, data_rank, share)
            )
            if batch is EMPTY:
                # It has no part in the step (its share is 0), which it makes all the same:
                # the other ranks wait for its backward.
                rank.step(any_batch, self.progress.epoch_batch)
                return
            micro_key = (*key, data_rank)
            batch_ends[data_rank] = self.micro(rank, batch, ids, micro_key, share)

        turns.run(run_rank)
        self.turns = None
        logged: list[Logged] = []
        for rank in self.ranks:
            logged += logged_by(rank)
        return [batch_ends[data_rank] for data_rank in sorted(batch_ends)], logged

    def micro(
        self,
        rank: Rank,
        batch: Batch,
        ids: list[int] | None,
        key: tuple[int, int, int],
        share: float,
    ) -> _BatchEnd:
        """One micro-batch of one rank; returns the arguments of ``on_train_batch_end``."""
        step, index, data_rank = key
        number = self.progress.epoch_batch
        if self.division.counts_windows:
            number = step
        if rank.move is not None:
            batch = rank.move(batch)
        rank.loop.metrics.begin(share * self.total)
        watched = None
        if step in self.watched:
            watched = Watched()
        # Copied before the hook and the step, which may change the batch in place.
        tensors = [whole(value) for value in tensors_of(batch)]
        micro = Micro(tensors, ids, watched=watched)
        rank.run(micro)
        batch_of_world = index * self.division.data_ranks + data_rank
        self.record.micros[step, batch_of_world] = micro
        rank.hook("on_train_batch_start", batch, number)
        # The run seeds by the same number: see `Recorder.on_train_batch_start`.
        reseed(self.division.reseeds, step, batch_of_world)
        generators = _draws()
        with self.context() or nullcontext():
            output = rank.step(batch, number)
        if generators != _draws():
            self.record.note_draws()
        micro.end(output, batch)
        if output is not None:
            if self.automatic:
                self.backward_losses(output, share)
            if not isinstance(output, dict):
                output = {"loss": output.detach()}
        rank.run(None)
        return output, batch, number

    def backward_losses(self, output: StepOutput, share: float) -> None:
        """Add the gradients of each loss of a step, or keep the losses where one backward follows for all ranks."""
        scaled_losses = [
            (parameters, loss * share)
            for parameters, loss in self.losses_by_optimizer(output)
        ]
        self.losses += [loss.detach() for _, loss in scaled_losses]
        if self.joins:
            self.scaled.append(scaled_losses)
            return
        for parameters, loss in scaled_losses:
            self.hook("on_before_backward", loss)
            self.backward(loss, parameters)
            self.hook("on_after_backward")

    def losses_by_optimizer(
        self, output: StepOutput
    ) -> list[tuple[list[nn.Parameter] | None, Tensor]]:
        """Each loss, with the parameters that it trains; None: all."""
        if not isinstance(output, dict):
            return [(None, output)]
        names = self.configured.names
        if names is None or not set(names) <= output.keys():
            return [(None, output["loss"])]
        return [
            (parameters_of(optimizer), output[name])
            for name, optimizer in zip(names, self.configured.optimizers, strict=True)
            if output[name] is not None
        ]

    def backward(self, loss: Tensor, parameters: list[nn.Parameter] | None) -> None:
        """Add the gradients of one loss."""
        if parameters is None:
            self.module.backward(loss)
        else:
            # Losses of several optimizers share a graph.
            loss.backward(  # type: ignore[no-untyped-call]  # of torch
                inputs=parameters, retain_graph=True
            )

    def backward_by_hand(
        self,
        turns: Turns,
        data_rank: int,
        share: float,
        loss: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Manual optimization: add the gradients that all ranks get from this backward to those from before."""
        rank = self.ranks[data_rank]
        if len(self.ranks) == 1:
            rank.hook("on_before_backward", loss)
            rank.module.backward(loss, *args, **kwargs)
            rank.hook("on_after_backward")
            return
        # The new gradients must stand alone until all ranks have theirs: a sum with the
        # earlier ones could not be separated from them.
        parameters = list(rank.module.parameters())
        self.earlier[data_rank] = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        scaled = loss * share
        rank.hook("on_before_backward", scaled)
        rank.module.backward(scaled, *args, **kwargs)

        def add_all() -> None:
            modules = [each_rank.module for each_rank in self.ranks]
            earlier = [self.earlier[index] for index in range(len(modules))]
            add_gradients(modules, earlier)

        turns.meet(data_rank, add_all)
        rank.hook("on_after_backward")

    def before_step(self, rank: Rank, optimizer: Optimizer) -> None:
        """Manual optimization: record the gradients of a step."""
        if len(self.ranks) > 1 and not self.earlier:
            raise ConfigurationError(
                "training_step steps an optimizer without manual_backward: ranks keep their own gradients",
                fix="self.manual_backward(loss) in place of loss.backward()",
            )
        rank.hook("on_before_optimizer_step", optimizer)
        if rank is not self.first:
            return
        gradients = self.record.gradients.setdefault(self.progress.step, {})
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                gradients[self.names[id(parameter)]] = whole(parameter.grad)

    def read_buffers(self) -> dict[str, Tensor]:
        """What a module that several ranks share has of each: buffers, and parameters that no optimizer trains."""
        # Nothing is shared: copies would only cost time in each micro-batch.
        if self.division.data_ranks == 1 or not self.automatic:
            return {}
        return {name: value.detach().clone() for name, value in self.untrained()}

    def untrained(self) -> list[tuple[str, Tensor]]:
        """Buffers, and parameters without gradients, such as those of a teacher, with their names."""
        frozen = [
            (name, value)
            for name, value in self.module.named_parameters()
            if not value.requires_grad
        ]
        return [*self.module.named_buffers(), *frozen]

    def share_buffers(self) -> None:
        """Give data ranks the buffers of the first one, where the run sends them; frozen parameters are never sent."""
        values = self.read_buffers()
        if not self.buffers:
            self.buffers = [values] * self.division.data_ranks
            return
        if self.division.own_buffers:
            return
        sent = {
            name: values[name]
            for name, _ in self.module.named_buffers()
            if name in values
        }
        # New dictionaries: data ranks may share one.
        self.buffers = [{**buffers, **sent} for buffers in self.buffers]

    def untrained_values(self) -> list[dict[str, Tensor]]:
        """The untrained values of each data rank, by canonical name."""
        if not self.automatic:
            return [_whole_values(rank.module.named_buffers()) for rank in self.ranks]
        if self.division.data_ranks == 1:
            return [_whole_values(self.untrained())]
        # `read_buffers` has copied these.
        return [_canonical_names(values) for values in self.buffers]

    def load_buffers(self, values: dict[str, Tensor]) -> None:
        """Give the module a rank's buffers."""
        for name, buffer in self.untrained():
            # A buffer may have got another shape in a step: it stays as it is.
            if name in values and values[name].shape == buffer.shape:
                # ``data`` hides the change from autograd, which would refuse a backward
                # through this forward; backward uses no running statistics.
                buffer.data.copy_(values[name])

    @contextmanager
    def equal_buffers(self) -> Iterator[None]:
        """What changes inside is changed on every rank; the module has the buffers of the first."""
        self.load_buffers(self.buffers[0])
        yield
        for name, value in self.read_buffers().items():
            before = self.buffers[0].get(name)
            if before is None or not same_bits(value, before):
                self.buffers = [{**buffers, name: value} for buffers in self.buffers]

    def row_weights(self, row: Row) -> list[float]:
        """The weight of each rank's micro-batch in its step."""
        return [self.weight(batch, size) for batch, size, _ in row]

    def weight(self, batch: Batch, size: int) -> float:
        """The weight of a micro-batch in its step."""
        if batch is EMPTY:
            return 0.0
        if not self.settings.loss_weighting:
            return 1.0
        if self.has_loss_weight:
            return float(self.module.loss_weight(batch))
        return float(size)


def _draws() -> tuple[object, ...]:
    """The state of every global generator, as values that compare."""
    _, keys, position, *_ = np.random.get_state(legacy=True)
    return (
        random.getstate(),
        np.asarray(keys).tobytes(),
        position,
        torch.get_rng_state().numpy().tobytes(),
    )


def _identity(loss: object) -> object:
    return loss


def _whole_values(named_tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copies of tensors in host memory, by canonical name."""
    return {canonical(name): whole(value) for name, value in named_tensors}


def _canonical_names(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The values by the canonical names of their keys."""
    return {canonical(name): value for name, value in values.items()}


def _has_empty_batch(row: Row) -> bool:
    return any(batch is EMPTY for batch, _, _ in row)


def plain_loop(
    trainer: Session,
    module: TrainModule,
    loaders: list[Loaders],
    datamodule: DataModule | None,
    *,
    precision: Precision,
    steps: int,
    division: Division,
    watched: frozenset[int] = frozenset(),
    traced: str = "",
) -> Record:
    """Train a module with a plain loop, and record each step.

    Each rank's share is one micro-batch, so that a forward sees the samples that it sees on a rank.

    Args:
        trainer: has settings and seed; it does not run.
        module: the module that is trained.
        loaders: the training loaders of each data rank.
        datamodule: the user's datamodule, or None.
        precision: the dtypes of the computation.
        steps: number of optimizer steps.
        division: how the compared run divides its data.
        watched: steps whose module outputs are recorded.
        traced: the name of a module whose operations are recorded at these steps.

    Raises:
        ConfigurationError: an optimizer computes the loss several times, or steps by hand do not exchange gradients.
    """
    window = trainer.accumulation
    feeds, length = feeds_of(trainer, loaders, division)
    # Before the loop is composed: `configure_optimizers` may read how many batches an epoch
    # has, for the length of its schedule.
    trainer.training_loaders.count(length)
    plain = _Plain(
        trainer, module, datamodule, precision, steps, division, watched, traced
    )
    return plain.run(feeds, length.limit, window)
