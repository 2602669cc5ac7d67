"""The reference of `verify`: a plain loop in one process over the micro-batches of all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, final

import torch
from lightning_utilities.core.overrides import is_overridden
from torch import Tensor, nn

from trainer_kit.core.datamodule import DataModule
from trainer_kit.core.environment import pick_device
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hooks import ModuleHooks
from trainer_kit.core.module import TrainModule
from trainer_kit.core.progress import Progress
from trainer_kit.core.tensors import tensors_of
from trainer_kit.data import EMPTY, Feed
from trainer_kit.planning.verify_norms import canonical
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
)
from trainer_kit.precision.precision import Precision
from trainer_kit.step.optimizers import Optimizers, configure_optimizers
from trainer_kit.strategies.single import SingleDeviceStrategy
from trainer_kit.training.loaders import mover, training_feed
from trainer_kit.training.session import Session

__all__ = ["Division", "feeds_of", "plain_loop", "rows_of"]

_Ended = tuple[Any, Any, int]
"""The arguments of ``on_train_batch_end``."""


@final
@dataclass(frozen=True)
class Division:
    """How the compared run divides its data.

    Attributes:
        places: ranks that divide it.
        seed: of the order.
        reseeds: of random layers.
    """

    places: int
    seed: int
    reseeds: int


@final
@dataclass
class _Place:
    rank: int
    size: int


@final
class _Logs:
    """Takes ``self.log`` of the module; keeps weighted means of values that belong to steps."""

    def __init__(self) -> None:
        self.weight = 1.0
        self.found: dict[str, list[tuple[float, float]]] = {}

    def log(self, name: str, value: Any, *options: Any) -> None:
        """See `TrainModule.log`: (prog_bar, logger, on_step, on_epoch, reduce_fx, sync, add, batch_size, rank_zero)."""
        _, logger, on_step, on_epoch, reduce_fx, sync, _, batch_size, rank_zero = options
        plain = isinstance(value, (int, float, Tensor))
        if logger is False or on_step is False or reduce_fx != "mean" or not sync or rank_zero or not plain:
            return
        weight = self.weight if batch_size is None else float(batch_size)
        self.found.setdefault(f"{name}_step" if on_epoch else name, []).append((float(value), weight))


@final
class _Loop:
    """The module's Trainer in the plain loop: attributes of the real one, and the position of this loop."""

    def __init__(self, trainer: Session) -> None:
        self._trainer = trainer
        self.progress, self.metrics = Progress(), _Logs()
        self.training, self.evaluating, self.is_global_zero = True, False, True

    def take(self, made: Optimizers) -> None:
        """Answer the module's ``optimizers()`` and ``lr_schedulers()``."""
        self.optimizers = self.manual_optimizers = made.optimizers
        self.lr_scheduler_configs = made.schedulers

    @property
    def current_epoch(self) -> int:
        """Completed epochs."""
        return self.progress.epoch

    @property
    def global_step(self) -> int:
        """Completed steps."""
        return self.progress.step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


@final
class _Plain:
    """One run of the plain loop.

    Args:
        trainer: has settings and seed; it does not run.
        module: it is trained.
        datamodule: or None.
        precision: of the computation.
        made: the module's optimizers.
        division: of the data.
        watched: steps whose module outputs are recorded.
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
        self.module, self.settings, self.division, self.watched = module, trainer.settings, division, watched
        self.loop = _Loop(trainer)
        module.trainer = self.loop
        strategy = SingleDeviceStrategy(pick_device(trainer.strategy.device.type, 0))
        strategy.start()
        precision.convert_module(module)
        module.to(strategy.device)
        self.made: Optimizers = configure_optimizers(module)
        self.loop.take(self.made)
        _check(module, self.made)
        self.context = precision.forward_context()
        self.move, _ = mover(module, datamodule, strategy, precision)
        self.names, self.steps = names_of(module), steps
        self.record = Record(division.places, division.seed)
        self.record.tied = tied_names(module)
        self.now: Micro | None = None
        self.window = 1
        self.own_weight = is_overridden("loss_weight", module, TrainModule)
        if watched:
            list(watch(module, lambda: self.now, traced))

    def hook(self, name: str, *arguments: Any) -> None:
        """Call a hook of the module, where it has one."""
        if is_overridden(name, self.module, ModuleHooks):
            getattr(self.module, name)(*arguments)

    def run(self, feeds: list[Feed], limit: int | None, window: int) -> Record:
        """Train; returns what was recorded."""
        progress, self.window = self.loop.progress, window
        self.hook("on_fit_start")
        self.hook("on_train_start")
        while progress.step < self.steps:
            before = progress.step
            self.hook("on_train_epoch_start")
            rows = islice(rows_of(feeds, progress.epoch), limit)
            self.record.even = self.record.even and progress.epoch == 0
            while progress.step < self.steps and (rest := list(islice(rows, window))):
                self.step(rest)
            self.hook("on_train_epoch_end")
            progress.epoch += 1
            for config in self.made.schedulers:
                if config.interval == "epoch" and progress.epoch % config.frequency == 0:
                    config.scheduler.step()
            progress.epoch_batch = 0
            if progress.step == before:
                raise ConfigurationError("the training loader returned no batch", fix="pass a loader with samples")
        return self.record

    def step(self, rows: list[list[tuple[Any, int, list[int] | None]]]) -> None:
        """One optimizer step over the micro-batches of all ranks: the gradient is sum(w g) / sum(w)."""
        progress, module, step = self.loop.progress, self.module, self.loop.progress.step
        weights = [[self.weight(batch, size) for batch, size, _ in row] for row in rows]
        total = sum(map(sum, weights))
        if len(rows) < self.window or any(batch is EMPTY for row in rows for batch, _, _ in row):
            self.record.even = False
        for optimizer in self.made.optimizers:
            optimizer.zero_grad()
        logs: dict[str, tuple[float, float]] = {}
        ended: list[_Ended] = []
        for index, row in enumerate(rows):
            logs, ended = {}, []
            for place, (batch, _, ids) in enumerate(row):
                if batch is EMPTY:
                    continue
                ended.append(self.micro(batch, ids, (step, index, place), weights[index][place], total))
                for name, found in self.loop.metrics.found.items():
                    value, weight = found[-1]
                    one, other = logs.get(name, (0.0, 0.0))
                    logs[name] = (one + value * weight, other + weight)
            progress.batch += 1
            progress.epoch_batch += 1
            if index + 1 < len(rows):  # that of the last micro-batch follows the optimizer step
                self.end(ended)
        self.record.gradients[step] = {
            self.names[id(p)]: whole(p.grad) for p in module.parameters() if p.grad is not None
        }
        for optimizer in self.made.optimizers:
            self.hook("on_before_optimizer_step", optimizer)
            self.clip([p for group in optimizer.param_groups for p in group["params"]])
            optimizer.step()
        for config in self.made.schedulers:
            if config.interval == "step" and (step + 1) % config.frequency == 0:
                config.scheduler.step()
        progress.step += 1
        self.end(ended)
        self.record.weights[step] = {
            canonical(n): whole(v) for n, v in module.state_dict().items() if isinstance(v, Tensor)
        }
        self.record.logged[step] = {name: value / weight for name, (value, weight) in logs.items() if weight}

    def end(self, ended: list[_Ended]) -> None:
        """Call ``on_train_batch_end`` as the first rank does: a rank calls it once, and its module may keep a state."""
        if ended:
            self.hook("on_train_batch_end", *ended[0])

    def micro(self, batch: Any, ids: Any, at: tuple[int, int, int], weight: float, total: float) -> _Ended:
        """Forward and backward of one micro-batch of one rank; returns the arguments of ``on_train_batch_end``."""
        step, index, place = at
        number, module = self.loop.progress.epoch_batch, self.module
        batch = batch if self.move is None else self.move(batch)
        self.loop.metrics.weight, self.loop.metrics.found = weight, {}
        now = self.now = Micro([whole(value) for value in tensors_of(batch)], ids)
        now.watched = Watched() if step in self.watched else None
        self.record.micros[step, index * self.division.places + place] = now
        self.hook("on_train_batch_start", batch, number)
        reseed(self.division.reseeds, step, index * self.division.places + place)
        before = torch.get_rng_state()
        with self.context or nullcontext():
            output = module.training_step(batch, number)
        self.record.draws = self.record.draws or not torch.equal(before, torch.get_rng_state())
        if output is None:
            self.now = None
            return None, batch, number
        now.loss = losses_of(output)
        for loss in self.losses(output):
            scaled = loss[1] * (weight / total)
            self.hook("on_before_backward", scaled)
            self.backward(scaled, loss[0])
            self.hook("on_after_backward")
        self.now = None
        return output if isinstance(output, dict) else {"loss": output.detach()}, batch, number

    def losses(self, output: Any) -> list[tuple[list[nn.Parameter] | None, Tensor]]:
        """Each loss, with the parameters that it trains; None: all."""
        names = self.made.names
        if names is not None and isinstance(output, dict) and set(names) <= output.keys():
            return [
                ([p for group in optimizer.param_groups for p in group["params"]], output[name])
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

    def clip(self, parameters: list[nn.Parameter]) -> None:
        """Clip the gradients as the Trainer's settings say."""
        if self.settings.clip is None:
            return
        value, algorithm = self.settings.clip
        if algorithm == "norm":
            torch.nn.utils.clip_grad_norm_(parameters, value)
        else:
            torch.nn.utils.clip_grad_value_(parameters, value)

    def weight(self, batch: Any, size: int) -> float:
        """The weight of a micro-batch in its step."""
        if batch is EMPTY:
            return 0.0
        if not self.settings.loss_weighting:
            return 1.0
        return float(self.module.loss_weight(batch)) if self.own_weight else float(size)


def rows_of(feeds: list[Feed], epoch: int) -> Iterator[list[tuple[Any, int, list[int] | None]]]:
    """The batches of an epoch: a row has one of each place."""
    for feed in feeds:
        feed.record_indices()
    iterators = [feed.sized_epoch(epoch) for feed in feeds]
    while True:
        row: list[tuple[Any, int, list[int] | None]] = []
        for feed, iterator in zip(feeds, iterators, strict=True):
            batch, size = next(iterator, (EMPTY, 0))
            row.append((batch, size, None if batch is EMPTY else feed.next_indices()))
        if all(batch is EMPTY for batch, _, _ in row):
            return
        yield row


def _check(module: TrainModule, made: Optimizers) -> None:
    refused = (
        "manual optimization: the module has its own loop"
        if not module.automatic_optimization
        else "a scheduler that monitors a logged value"
        if any(config.reduce_on_plateau for config in made.schedulers)
        else next((f"{name} is overridden" for name in _OWN if is_overridden(name, module, TrainModule)), None)
    )
    if refused is not None:
        raise ConfigurationError(
            "verify cannot train this module with a plain loop",
            found=refused,
            fix="compare with trainer_kit.testing.check_strategy, or verify a module without it",
        )


_OWN = ("optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "configure_gradient_clipping")


def plain_loop(
    trainer: Session,
    module: TrainModule,
    loaders: Any,
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
        loaders: of the training data.
        datamodule: or None.
        precision: of the computation.
        steps: optimizer steps.
        division: of the data.
        watched: steps whose module outputs are recorded.
        traced: the name of a module whose operations are recorded at these steps.

    Raises:
        ConfigurationError: the module has its own loop.
    """
    window = trainer.accumulation
    feeds, limit = feeds_of(trainer, loaders, division)
    trainer.num_training_batches = math.inf if limit is None else limit
    plain = _Plain(trainer, module, datamodule, precision, steps, division, watched, traced)
    return plain.run(feeds, limit, window)


def feeds_of(trainer: Session, loaders: Any, division: Division) -> tuple[list[Feed], int | None]:
    """The data of each place, and the micro-batches of an epoch."""
    made = [
        training_feed(
            loaders,
            trainer.settings,
            _Place(rank, division.places),  # type: ignore[arg-type]
            division.seed,
            trainer.accumulation,
        )
        for rank in range(division.places)
    ]
    return [feed for feed, _ in made], made[0][1]
