"""The reference of `verify`: a plain loop in one process over the micro-batches of all ranks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
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
from trainer_kit.core.hooks import ModuleHooks
from trainer_kit.core.module import TrainModule
from trainer_kit.core.progress import Progress
from trainer_kit.core.signatures import takes
from trainer_kit.core.tensors import map_tensors, tensors_of
from trainer_kit.data import EMPTY, Feed
from trainer_kit.planning.verify_compare import same_bits
from trainer_kit.planning.verify_loaders import Division, Row, feeds_of, rows_of
from trainer_kit.planning.verify_manual import (
    PlainOptimizer,
    Turns,
    add_gradients,
    copied,
)
from trainer_kit.planning.verify_norms import canonical, join_norms, joined
from trainer_kit.planning.verify_recorder import (
    Micro,
    Record,
    Watched,
    losses_of,
    names_of,
    reseed,
    tied_names,
    watch,
    whole,
    without_validation,
)
from trainer_kit.planning.verify_trainer import NeedsJoinError, PlainTrainer
from trainer_kit.precision.precision import Precision
from trainer_kit.step.closures import requires_closure
from trainer_kit.step.optimizers import Optimizers, configure_optimizers, parameters_of
from trainer_kit.strategies.single import SingleDeviceStrategy
from trainer_kit.training.loaders import mover
from trainer_kit.training.session import Session

__all__ = ["plain_loop"]

_Ended = tuple[Any, Any, int]
"""The arguments of ``on_train_batch_end``."""
_Ran = tuple[list[_Ended], list[tuple[str, float, float]]]
"""Of each rank: what has ended, and name, value and weight of what was logged."""


@final
class _Rank:
    """A module in the plain loop, with its optimizers; in manual optimization each rank has one.

    Args:
        loop: its Trainer.
        module: it is trained.
        move: how a batch gets onto the device; None: it stays as it is.
        before: called before each step of an optimizer in manual optimization.
    """

    def __init__(
        self,
        loop: PlainTrainer,
        module: TrainModule,
        move: Callable[..., Any] | None,
        before: Callable[[_Rank, Optimizer], None],
    ) -> None:
        self.module, self.loop, self.move = module, loop, move
        module.trainer = loop
        self.made: Optimizers = configure_optimizers(module)
        _check(self.made)
        made = [] if module.automatic_optimization else self.made.optimizers
        loop.take(
            self.made,
            [PlainOptimizer(one, partial(before, self), module) for one in made],
        )
        without_validation(self.made.schedulers)
        self._numbered = takes(module.training_step, 2)
        self.now: Micro | None = None

    def step(self, batch: Any, number: int) -> Any:
        """Call ``training_step``, which may take no number."""
        return (
            self.module.training_step(batch, number)
            if self._numbered
            else self.module.training_step(batch)
        )

    def running(self) -> Micro | None:
        """The micro-batch that runs."""
        return self.now

    def owns(self, name: str) -> bool:
        """Whether the module overrides a method of `TrainModule`."""
        return is_overridden(name, self.module, TrainModule)

    def hook(self, name: str, *arguments: Any) -> None:
        """Call a hook of the module, where it has one."""
        if is_overridden(name, self.module, ModuleHooks):
            getattr(self.module, name)(*arguments)


@final
class _Plain:
    """One run of the plain loop.

    Args:
        trainer: has settings and seed; it does not run.
        module: it is trained.
        datamodule: or None.
        precision: of the computation.
        steps: optimizer steps.
        division: of the data.
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
        self.module, self.settings, self.division, self.watched = (
            module,
            trainer.settings,
            division,
            watched,
        )
        self.automatic, self.progress = module.automatic_optimization, Progress()
        strategy = SingleDeviceStrategy(pick_device(trainer.strategy.device.type, 0))
        strategy.start()
        precision.convert_module(module)
        module.to(strategy.device)
        copies = (
            []
            if self.automatic
            else [copied(module) for _ in range(division.places - 1)]
        )
        self.ranks = [
            _Rank(
                PlainTrainer(trainer, self.progress, division.world),
                one,
                mover(one, datamodule, strategy, precision)[0],
                self.before_step,
            )
            for one in [module, *copies]
        ]
        self.first = self.ranks[0]
        self.made = self.first.made
        self.context = precision.forward_context
        self.names, self.steps = names_of(module), steps
        self.record = Record(division.places, division.seed)
        self.record.tied = tied_names(module)
        self.window, self.total = 1, 1.0
        self.buffers: list[dict[str, Tensor]] = []
        self.earlier: dict[int, list[Tensor | None]] = {}
        self.losses: list[Tensor] = []
        self.own_weight = is_overridden("loss_weight", module, TrainModule)
        self.turns: Turns | None = None
        self.place, self.inputs, self.outputs = 0, list[Any](), list[Any]()
        self.scaled: list[list[tuple[list[nn.Parameter] | None, Tensor]]] = []
        self.joins = (
            division.places > 1
            and self.automatic
            and (bool(division.synced) or division.joined)
        )
        if division.synced and division.places > 1:
            self.join()
        if division.places == division.world:
            for rank in self.ranks:
                rank.loop.gather = self.gather
        for rank in self.ranks if watched else ():
            list(watch(rank.module, rank.running, traced))

    def join(self) -> None:
        """Let batch norms normalise the samples of all ranks together."""
        if not self.automatic:
            raise ConfigurationError(
                "verify cannot compare manual optimization with batch norms that normalise the samples of all ranks",
                found=f"SyncBatchNorm: {self.division.synced[0]}",
                fix="verify with devices=1, or without sync_batchnorm",
            )
        join_norms(self.module, self.division.synced, self.meet)

    def hook(self, name: str, *arguments: Any) -> None:
        """Call a hook of each rank's module."""
        for rank in self.ranks:
            rank.hook(name, *arguments)

    def run(self, feeds: list[Feed], limit: int | None, window: int) -> Record:
        """Train; returns what was recorded."""
        progress, self.window = self.progress, window
        self.hook("on_fit_start")
        self.hook("on_train_start")
        self.share_buffers()
        self.record.untrained[-1] = self.untrained_values()
        while progress.step < self.steps:
            before = progress.step
            self.hook("on_train_epoch_start")
            rows = islice(rows_of(feeds, progress.epoch), limit)
            self.record.even = self.record.even and progress.epoch == 0
            while progress.step < self.steps and (rest := list(islice(rows, window))):
                self.step(rest)
            self.hook("on_train_epoch_end")
            progress.epoch += 1
            sums = self.first.loop.metrics.epoch
            means = {
                name: total / weight for name, (total, weight) in sums.items() if weight
            }
            self.schedule(
                "epoch",
                progress.epoch,
                {**self.record.logged.get(progress.step - 1, {}), **means},
            )
            sums.clear()
            progress.epoch_batch = 0
            if progress.step == before:
                raise DataError(
                    "the training loader has no batches",
                    fix="pass a loader with samples",
                )
        return self.record

    def step(self, rows: list[Row]) -> None:
        """One optimizer step over the micro-batches of all ranks: the gradient is sum(w g) / sum(w)."""
        progress, step = self.progress, self.progress.step
        weights = [[self.weight(batch, size) for batch, size, _ in row] for row in rows]
        total = self.total = sum(map(sum, weights)) or 1.0
        if len(rows) < self.window or any(
            batch is EMPTY for row in rows for batch, _, _ in row
        ):
            self.record.even = False
        if self.automatic:
            self.zero()
        self.share_buffers()
        logs: dict[str, tuple[float, float]] = {}
        now: dict[str, float] = {}
        for index, (row, shares) in enumerate(zip(rows, weights, strict=True)):
            run = (
                self.manually
                if not self.automatic
                else self.jointly
                if self.joins
                else self.automatically
            )
            ended, found = run(
                row, (step, index), [weight / total for weight in shares]
            )
            logs = {}
            for name, value, weight in found:
                one, other = logs.get(name, (0.0, 0.0))
                logs[name] = (one + value * weight, other + weight)
            now = {
                name.removesuffix("_step"): value for name, value, _ in reversed(found)
            }  # of the first rank
            progress.batch += 1
            progress.epoch_batch += 1
            with self.equal_buffers():
                if index + 1 < len(
                    rows
                ):  # that of the last micro-batch follows the optimizer step
                    self.end(ended)
                    continue
                self.optimize(step, now)
                progress.step += 1
                self.end(ended)
        self.record.weights[step] = {
            canonical(n): whole(v)
            for n, v in self.module.state_dict().items()
            if isinstance(v, Tensor)
        }
        self.record.untrained[step] = self.untrained_values()
        self.record.logged[step] = {
            name: value / weight for name, (value, weight) in logs.items() if weight
        }

    def zero(self) -> None:
        """Drop the gradients of the last step, and its losses."""
        self.losses = []
        for optimizer in self.made.optimizers:
            self.hook("on_before_zero_grad", optimizer)
            if self.first.owns("optimizer_zero_grad"):
                self.module.optimizer_zero_grad(
                    self.progress.epoch, self.progress.epoch_batch, optimizer
                )
            else:
                optimizer.zero_grad()

    def optimize(self, step: int, now: dict[str, float]) -> None:
        """Step optimizers and schedulers, unless the module does."""
        found = self.record.gradients.setdefault(step, {})
        if not self.automatic:
            return
        found |= {
            self.names[id(p)]: whole(p.grad)
            for p in self.module.parameters()
            if p.grad is not None
        }
        module, clip = self.module, self.settings.clip
        for optimizer in self.made.optimizers:
            self.hook("on_before_optimizer_step", optimizer)
            if self.first.owns("configure_gradient_clipping"):
                module.configure_gradient_clipping(optimizer, *(clip or (None, None)))
            else:
                self.first.loop.clip_gradients(optimizer, None, None)
            if self.first.owns("optimizer_step"):
                loss = sum(self.losses) if self.losses else None
                batch = self.progress.epoch_batch - 1
                closure = partial(_identity, loss)
                module.optimizer_step(self.progress.epoch, batch, optimizer, closure)
            else:
                optimizer.step()
        self.schedule("step", step + 1, now)

    def schedule(self, interval: str, completed: int, known: dict[str, float]) -> None:
        """Advance the schedulers that count steps, or epochs."""
        for config in self.made.schedulers if self.automatic else ():
            if config.interval != interval or completed % config.frequency:
                continue
            waits = config.monitor is not None and config.reduce_on_plateau
            metric = known.get(str(config.monitor)) if waits else None
            if waits and metric is None:
                continue
            if self.first.owns("lr_scheduler_step"):
                self.module.lr_scheduler_step(config.scheduler, metric)
            else:
                config.scheduler.step(*([] if metric is None else [metric]))

    def end(self, ended: list[_Ended]) -> None:
        """Call ``on_train_batch_end`` of each rank's module, with its own batch; of a shared one as the first rank."""
        for rank, arguments in zip(self.ranks, ended, strict=False):
            rank.hook("on_train_batch_end", *arguments)

    def automatically(self, row: Row, at: tuple[int, int], shares: list[float]) -> _Ran:
        """Forward and backward of one micro-batch of each rank, one after the other through one module."""
        ended: list[_Ended] = []
        logged: list[tuple[str, float, float]] = []
        for place, (batch, _, ids) in enumerate(row):
            if batch is EMPTY:
                continue
            self.load_buffers(self.buffers[place])
            ended.append(
                self.micro(self.first, batch, ids, (*at, place), shares[place])
            )
            self.buffers[place] = self.read_buffers()
            logged += [
                (name, *found[-1])
                for name, found in self.first.loop.metrics.found.items()
            ]
        return ended, logged

    def jointly(self, row: Row, at: tuple[int, int], shares: list[float]) -> _Ran:
        """As `automatically`, but ranks wait for each other in batch norms, and one backward follows for all."""
        places = [
            place for place, (batch, _, _) in enumerate(row) if batch is not EMPTY
        ]
        layers = "its SyncBatchNorm layers" if self.division.synced else "all_gather"
        self.turns, self.scaled = Turns(len(places), layers), []
        ended: list[_Ended] = []
        logged: list[tuple[str, float, float]] = []

        def work(turn: int) -> None:
            self.place = place = places[turn]
            batch, _, ids = row[place]
            self.load_buffers(self.buffers[place])
            ended.append(
                self.micro(self.first, batch, ids, (*at, place), shares[place])
            )
            self.buffers[place] = self.read_buffers()
            logged.extend(
                (name, *found[-1])
                for name, found in self.first.loop.metrics.found.items()
            )

        self.turns.run(work)
        self.turns = None
        for parts in zip(*self.scaled, strict=True):
            total = torch.stack([loss for _, loss in parts]).sum()
            self.hook("on_before_backward", total)
            self.backward(total, parts[0][0])
            self.hook("on_after_backward")
        return ended, logged

    def meet(self, value: Tensor, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """The output of a batch norm for one rank: waits for the inputs of all ranks, which are normalised together."""
        if self.turns is None:
            return forward(value)
        turn = len(self.inputs)
        self.inputs.append(value)

        def act() -> None:
            with self.equal_buffers():
                self.outputs, self.inputs = joined(self.inputs, forward), []

        self.wait(turn, act)
        return self.outputs[turn]  # type: ignore[no-any-return]

    def wait(self, turn: int, act: Callable[[], None]) -> None:
        """Wait until every rank is here; the last one calls ``act``."""
        assert self.turns is not None
        if not self.automatic:  # each rank has a module of its own
            self.turns.meet(turn, act)
            return
        place, micro, logs = self.place, self.first.now, self.first.loop.metrics
        weight, found = logs.weight, logs.found
        self.buffers[place] = self.read_buffers()
        self.turns.meet(turn, act)
        self.place, self.first.now = place, micro
        logs.weight, logs.found = weight, found
        self.load_buffers(self.buffers[place])

    def gather(self, data: Any, sync_grads: bool) -> Any:
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
        tensors: list[Tensor] = []
        tensors.extend(tensors_of(data))
        turn = len(self.inputs)
        self.inputs.append(tensors)

        def act() -> None:
            self.outputs, self.inputs = (
                [torch.stack(parts) for parts in zip(*self.inputs, strict=True)],
                [],
            )

        self.wait(turn, act)
        stacked = iter(
            self.outputs if sync_grads else [output.detach() for output in self.outputs]
        )
        return map_tensors(data, lambda tensor: next(stacked))

    def manually(self, row: Row, at: tuple[int, int], shares: list[float]) -> _Ran:
        """Each rank's ``training_step``: its ``manual_backward`` waits for those of the others."""
        ended: dict[int, _Ended] = {}
        turns = self.turns = Turns(len(row), "manual_backward or all_gather")
        self.earlier = {}
        batch_of_others = next(batch for batch, _, _ in row if batch is not EMPTY)

        def work(place: int) -> None:
            rank, (batch, _, ids) = self.ranks[place], row[place]
            rank.loop.backward = partial(
                self.backward_by_hand, turns, place, shares[place]
            )
            if (
                batch is EMPTY
            ):  # it has no part in the step, which it makes all the same
                rank.step(batch_of_others, self.progress.epoch_batch)
            else:
                ended[place] = self.micro(rank, batch, ids, (*at, place), shares[place])

        turns.run(work)
        self.turns = None
        found = [
            (name, *value[-1])
            for rank in self.ranks
            for name, value in rank.loop.metrics.found.items()
        ]
        return [ended[place] for place in sorted(ended)], found

    def micro(
        self, rank: _Rank, batch: Any, ids: Any, at: tuple[int, int, int], share: float
    ) -> _Ended:
        """One micro-batch of one rank; returns the arguments of ``on_train_batch_end``."""
        step, index, place = at
        number = step if self.division.counts_windows else self.progress.epoch_batch
        batch = batch if rank.move is None else rank.move(batch)
        rank.loop.metrics.weight, rank.loop.metrics.found = share * self.total, {}
        now = rank.now = Micro([whole(value) for value in tensors_of(batch)], ids)
        now.watched = Watched() if step in self.watched else None
        self.record.micros[step, index * self.division.places + place] = now
        rank.hook("on_train_batch_start", batch, number)
        reseed(self.division.reseeds, step, index * self.division.places + place)
        before = _draws()
        with self.context() or nullcontext():
            output = rank.step(batch, number)
        self.record.draws = self.record.draws or before != _draws()
        now.note_changes(batch)
        if output is not None:
            now.loss = losses_of(output)
            parts = (
                [(parameters, loss * share) for parameters, loss in self.parts(output)]
                if self.automatic
                else []
            )
            self.losses += [scaled.detach() for _, scaled in parts]
            if self.joins:
                self.scaled.append(parts)
                parts = []
            for parameters, scaled in parts:
                self.hook("on_before_backward", scaled)
                self.backward(scaled, parameters)
                self.hook("on_after_backward")
            if not isinstance(output, dict):
                output = {"loss": output.detach()}
        rank.now = None
        return output, batch, number

    def parts(self, output: Any) -> list[tuple[list[nn.Parameter] | None, Tensor]]:
        """Each loss, with the parameters that it trains; None: all."""
        names = self.made.names
        if (
            names is not None
            and isinstance(output, dict)
            and set(names) <= output.keys()
        ):
            return [
                (parameters_of(optimizer), output[name])
                for name, optimizer in zip(names, self.made.optimizers, strict=True)
                if output[name] is not None
            ]
        return [(None, output["loss"] if isinstance(output, dict) else output)]

    def backward(self, loss: Tensor, parameters: list[nn.Parameter] | None) -> None:
        """Add the gradients of one loss."""
        if parameters is None:
            self.module.backward(loss)
        else:
            loss.backward(inputs=parameters, retain_graph=True)  # type: ignore[no-untyped-call]

    def backward_by_hand(
        self,
        turns: Turns,
        place: int,
        share: float,
        loss: Tensor,
        *rest: Any,
        **options: Any,
    ) -> None:
        """Manual optimization: add the gradients that all ranks get from this backward to those from before."""
        rank, several = self.ranks[place], len(self.ranks) > 1
        parameters = list(rank.module.parameters())
        if several:
            self.earlier[place] = [parameter.grad for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None
            loss = loss * share
        rank.hook("on_before_backward", loss)
        rank.module.backward(loss, *rest, **options)
        if several:
            modules = [each.module for each in self.ranks]
            turns.meet(
                place,
                lambda: add_gradients(
                    modules, [self.earlier[one] for one in range(len(modules))]
                ),
            )
        rank.hook("on_after_backward")

    def before_step(self, rank: _Rank, optimizer: Optimizer) -> None:
        """Manual optimization: record the gradients of a step."""
        if len(self.ranks) > 1 and not self.earlier:
            raise ConfigurationError(
                "training_step steps an optimizer without manual_backward: ranks keep their own gradients",
                fix="self.manual_backward(loss) in place of loss.backward()",
            )
        rank.hook("on_before_optimizer_step", optimizer)
        if rank is self.first:
            found = self.record.gradients.setdefault(self.progress.step, {})
            held = [
                parameter
                for parameter in parameters_of(optimizer)
                if parameter.grad is not None
            ]
            found |= {
                self.names[id(parameter)]: whole(parameter.grad) for parameter in held
            }

    def read_buffers(self) -> dict[str, Tensor]:
        """What a module that several ranks share has of each: buffers, and parameters that no optimizer trains."""
        if self.division.places == 1 or not self.automatic:
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
        """Give every place the buffers of the first one, where ranks send them; frozen parameters are never sent."""
        values = self.read_buffers()
        if not self.buffers:
            self.buffers = [values] * self.division.places
        elif not self.division.own_buffers:
            sent = {
                name: values[name]
                for name, _ in self.module.named_buffers()
                if name in values
            }
            self.buffers = [{**held, **sent} for held in self.buffers]

    def untrained_values(self) -> list[dict[str, Tensor]]:
        """The untrained values of each place, by canonical name."""
        if not self.automatic:
            return [
                {
                    canonical(name): whole(value)
                    for name, value in rank.module.named_buffers()
                }
                for rank in self.ranks
            ]
        if self.division.places == 1:
            return [{canonical(name): whole(value) for name, value in self.untrained()}]
        return [
            {canonical(name): value for name, value in values.items()}
            for values in self.buffers
        ]

    def load_buffers(self, values: dict[str, Tensor]) -> None:
        """Give the module a rank's buffers."""
        for name, buffer in self.untrained():
            if name in values and values[name].shape == buffer.shape:
                buffer.data.copy_(
                    values[name]
                )  # also after a forward: backward uses no running statistics

    @contextmanager
    def equal_buffers(self) -> Iterator[None]:
        """What changes inside is changed on every rank; the module has the buffers of the first."""
        self.load_buffers(self.buffers[0])
        yield
        for name, value in self.read_buffers().items():
            if name not in self.buffers[0] or not same_bits(
                value, self.buffers[0][name]
            ):
                self.buffers = [{**held, name: value} for held in self.buffers]

    def weight(self, batch: Any, size: int) -> float:
        """The weight of a micro-batch in its step."""
        if batch is EMPTY:
            return 0.0
        if not self.settings.loss_weighting:
            return 1.0
        return float(self.module.loss_weight(batch)) if self.own_weight else float(size)


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


def _check(made: Optimizers) -> None:
    repeats = [
        optimizer for optimizer in made.optimizers if requires_closure(optimizer)
    ]
    if repeats:
        raise ConfigurationError(
            "verify cannot train this module with a plain loop",
            found=f"{type(repeats[0]).__name__} computes the loss several times in a step",
            fix="compare with trainer_kit.testing.check_strategy, or verify the module with another optimizer",
        )


def plain_loop(
    trainer: Session,
    module: TrainModule,
    loaders: list[Any],
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
        module: it is trained.
        loaders: of the training data, for each place.
        datamodule: or None.
        precision: of the computation.
        steps: optimizer steps.
        division: of the data.
        watched: steps whose module outputs are recorded.
        traced: the name of a module whose operations are recorded at these steps.

    Raises:
        ConfigurationError: an optimizer computes the loss several times, or steps by hand do not exchange gradients.
    """
    window = trainer.accumulation
    feeds, length = feeds_of(trainer, loaders, division)
    trainer.num_training_batches = (
        math.inf if length.expected is None else length.expected
    )
    plain = _Plain(
        trainer, module, datamodule, precision, steps, division, watched, traced
    )
    return plain.run(feeds, length.limit, window)
