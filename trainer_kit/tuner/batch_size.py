"""Find the largest batch size whose steps fit into memory, by running some steps with each size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final, final

from torch.utils.data import BatchSampler, DataLoader

from trainer_kit.core.devices import ran_out_of_memory
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.module import TrainModule
from trainer_kit.core.protocols import Group
from trainer_kit.core.types import Batch, DataModuleLike, Loaders
from trainer_kit.step.run import Fit
from trainer_kit.step.window import Window
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.training.on_processes import on_processes
from trainer_kit.training.session import Session
from trainer_kit.tuner.trial import check_call, holders, release_copies, run_trial

__all__ = ["SizeSearch", "scale_batch_size", "set_batch_size"]


_ACTIVE_CALLBACKS: Final = ("get_accumulate_grad_batches",)
"""An attribute of the callbacks that take part in a trial."""


class _TooLarge(Exception):
    """A batch size cannot be used; raised on every rank, with the reason."""


def _holders(
    name: str, module: object, loaders: Loaders, datamodule: DataModuleLike
) -> list[object]:
    """The objects with the batch size: the loader given to ``fit``, else the datamodule and the module."""
    owners = [loaders]
    if loaders is None:
        owners = [owner for owner in (module, datamodule) if owner is not None]
    size_holders = holders(name, *owners)
    sizes = [getattr(holder, name) for holder in size_holders]
    # The exact type: True is no size.
    if not sizes or any(type(size) is not int for size in sizes):
        owner_names = ", ".join(type(owner).__name__ for owner in owners)
        raise ConfigurationError(
            f"no attribute holds the batch size {name}",
            found=f"looked at {owner_names}, and hparams",
            fix=f"set self.{name} in __init__ of the module or datamodule and use it in train_dataloader, or pass"
            " a DataLoader(dataset, batch_size=...); batch_arg_name= takes another name",
        )
    return size_holders


def set_batch_size(
    name: str,
    size: int,
    module: object,
    loaders: Loaders,
    datamodule: DataModuleLike,
) -> None:
    """Set a batch size where `scale_batch_size` looks for it.

    Raises:
        ConfigurationError: no object has that attribute.
    """
    for holder in _holders(name, module, loaders, datamodule):
        if isinstance(holder, DataLoader):
            _set_loader_batch_size(holder, size)
        else:
            setattr(holder, name, size)


def _set_loader_batch_size(loader: DataLoader[Batch], size: int) -> None:
    # Not by its __setattr__, which refuses, for the sampler would not know.
    vars(loader)["batch_size"] = size
    # torch makes a BatchSampler for every loader that has a batch size.
    assert isinstance(loader.batch_sampler, BatchSampler)
    loader.batch_sampler.batch_size = size


@final
class _Attempt:
    """Checks on every rank whether the steps of one batch size fit.

    Args:
        size: samples of a micro-batch on each rank.
        name: the name of the attribute.

    Attributes:
        world: all ranks; None before there is a step to try.
    """

    def __init__(self, size: int, name: str) -> None:
        self.size = size
        self.name = name
        self.world: Group | None = None

    def watch(self, run: Fit) -> Fit:
        """See `run_trial`."""
        feed = run.windows.feed
        # ``drop_last=True`` leaves no batch of a dataset that is smaller than one.
        if feed.length == 0:
            raise _TooLarge("the data have fewer samples")
        if feed.per_rank_batch_size not in (None, self.size):
            raise ConfigurationError(
                f"{self.name} does not determine the batch size of the training loader",
                found=f"{self.name}={self.size}, and batches of {feed.per_rank_batch_size}",
                fix=f"use self.{self.name} in train_dataloader, and leave global_batch_size= out",
            )
        run.bus.add_listener("on_train_step_end", lambda: self._check_full_batch(run))
        self.world = run.strategy.world
        # A single rank may fail anywhere: no other one waits for it.
        if self.world.size == 1:
            return run
        without_exchange = run.strategy.without_exchange()
        if without_exchange is None:
            raise ConfigurationError(
                "the batch size cannot be searched on several ranks with this strategy",
                found=f"{run.strategy.describe()}, where an out-of-memory error on one rank blocks the others",
                fix="search on one device or with plain DDP, and pass the value it finds",
            )

        def run_without_exchange(window: Window) -> None:
            with without_exchange():
                Strategy.forward_backward(run.strategy, window)

        def forward_backward(window: Window) -> None:
            # Every rank must have its batches first: a forward may send buffers.
            self._agree_on_memory(run, lambda: None)
            self._agree_on_memory(run, partial(run_without_exchange, window))
            run.strategy.exchange_gradients()

        # An optimizer's first step makes its state, which may not fit either.
        def step(window: Window) -> None:
            self._agree_on_memory(run, partial(run.step, window))

        return replace(run, forward_backward=forward_backward, step=step)

    def _agree_on_memory(self, run: Fit, compute: Callable[[], None]) -> None:
        """Run a part of a step that has no communication, and agree on whether it fits on every rank."""
        problem: Exception | None = None
        try:
            compute()
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            # Its frames hold activations.
            problem = error.with_traceback(None)
        if any(row[0] for row in run.strategy.world.agree([problem is not None])):
            raise _TooLarge("it ran out of memory") from problem

    def _check_full_batch(self, run: Fit) -> None:
        """After the first step, refuse a batch that is not full: it says nothing about this size."""
        full_batch = self.size * run.strategy.data.size
        if run.progress.step == 1 and run.windows.window.sizes[0] < full_batch:
            raise _TooLarge("the data have fewer samples")


@final
class SizeSearch:
    """Tries batch sizes; see `scale_batch_size`.

    Raises:
        ConfigurationError: for values that cannot work.
    """

    def __init__(
        self,
        mode: str,
        steps_per_trial: int,
        init_val: int,
        max_trials: int,
        name: str,
        margin: float,
        max_val: int,
    ) -> None:
        smallest = min(steps_per_trial, init_val, max_trials)
        if mode not in ("power", "binsearch") or smallest < 1:
            raise ConfigurationError(
                "an argument of the batch size search is wrong",
                found=f"mode={mode!r}, steps_per_trial={steps_per_trial}, init_val={init_val}, max_trials={max_trials}",
                fix='use mode="power" or "binsearch", and integers ≥ 1',
            )
        if not 0 <= margin < 1 or max_val < init_val:
            raise ConfigurationError(
                "a limit of the batch size search is wrong",
                found=f"margin={margin}, max_val={max_val}, init_val={init_val}",
                fix="use a margin from 0 to below 1, and a max_val of at least init_val",
            )
        self.mode = mode
        self.name = name
        self.steps_per_trial = steps_per_trial
        self.max_trials = max_trials
        self.first = init_val
        self.largest = max_val
        self.margin = margin

    def run(
        self,
        trainer: Session,
        module: TrainModule,
        loaders: Loaders,
        datamodule: DataModuleLike,
        is_set_up: bool = False,
    ) -> tuple[int, str]:
        """Return the size and the reason against a larger one, without setting it. Every rank must call it."""
        holders = _holders(self.name, module, loaders, datamodule)
        size_before = getattr(holders[0], self.name)
        # The largest size that works and the smallest that does not; 0: none yet.
        good = 0
        bad = 0
        size = self.first
        reason = f"max_trials={self.max_trials} are over"
        try:
            for _ in range(self.max_trials):
                set_batch_size(self.name, size, module, loaders, datamodule)
                problem = self._try_size(
                    size, trainer, module, loaders, datamodule, is_set_up
                )
                if problem:
                    bad = size
                    reason = f"with {size}, {problem}"
                else:
                    good = size
                # Without a limit a small model on a large device would be tried with ever larger sizes.
                if good == self.largest:
                    reason = f"max_val={self.largest}"
                    break
                if self._is_over(good, bad):
                    break
                size = self._next_size(good, bad)
        finally:
            set_batch_size(self.name, size_before, module, loaders, datamodule)
        if not good:
            raise ConfigurationError(
                "no batch size fits",
                found=reason,
                fix="use a smaller model, or a smaller init_val",
            )
        margin = 0.0
        if self.mode == "binsearch":
            margin = self.margin
        if margin:
            reason = f"{margin:.0%} below {good}; {reason}"
        return max(1, int(good * (1 - margin))), reason

    def _is_over(self, good: int, bad: int) -> bool:
        """Whether no further size is tried."""
        # A single sample does not fit.
        if bad == 1:
            return True
        if not good or not bad:
            return False
        return self.mode == "power" or bad - good == 1

    def _next_size(self, good: int, bad: int) -> int:
        """The size to try after a largest size that works and a smallest that does not; 0: none yet."""
        if good and bad:
            return (good + bad) // 2
        if good:
            return min(good * 2, self.largest)
        return bad // 2

    def _try_size(
        self,
        size: int,
        trainer: Session,
        module: TrainModule,
        loaders: Loaders,
        datamodule: DataModuleLike,
        is_set_up: bool,
    ) -> str:
        """The reason why a size cannot be used; empty if it can."""
        attempt = _Attempt(size, self.name)
        try:
            run_trial(
                trainer,
                module,
                loaders,
                datamodule,
                self.steps_per_trial,
                attempt.watch,
                keeps=_ACTIVE_CALLBACKS,
                is_set_up=is_set_up,
            )
        except _TooLarge as error:
            return str(error)
        except Exception as error:
            if attempt.world is None or not ran_out_of_memory(error):
                raise
            # Outside a step, where batches are made and moved: the other ranks ask before their next step.
            attempt.world.agree([True])
            return "it ran out of memory"
        finally:
            # An exception held them until here.
            release_copies()
        return ""


def scale_batch_size(
    trainer: Session,
    model: TrainModule,
    train_dataloaders: Loaders = None,
    val_dataloaders: Loaders = None,
    dataloaders: Loaders = None,
    datamodule: DataModuleLike = None,
    method: str = "fit",
    mode: str = "power",
    steps_per_trial: int = 3,
    init_val: int = 2,
    max_trials: int = 25,
    batch_arg_name: str = "batch_size",
    margin: float = 0.05,
    max_val: int = 8192,
) -> int:
    """Try batch sizes with a few training steps each, and set the largest that works.

    The size is doubled until memory or data run out; if ``init_val`` does not fit, it is halved. No size is returned
    that is larger than one that was tried with full batches. Each trial trains a copy of the module; nothing but the
    attribute is changed. Of the callbacks, only gradient accumulation is active. Every rank must call this, and gets
    the same result: the batch size on each rank.

    Args:
        trainer: a `Trainer`.
        model: the module.
        train_dataloaders: a DataLoader whose ``batch_size`` is set; by default the datamodule's or the module's own
            loader, made with the attribute.
        val_dataloaders: not used.
        dataloaders: must be None.
        datamodule: as for ``fit``.
        method: ``"fit"``.
        mode: ``"power"``, or ``"binsearch"`` to search on between the last size that works and the first that does not.
        steps_per_trial: optimizer steps of each trial.
        init_val: the first size.
        max_trials: the maximum number of sizes to try.
        batch_arg_name: the attribute of the module, the datamodule, or their ``hparams``.
        margin: with ``"binsearch"``, reduce the size that was found by this fraction, as a reserve of memory.
        max_val: no larger size is tried.

    Returns:
        The batch size.

    Raises:
        ConfigurationError: for values that cannot work, a missing attribute, a loader that does not use it, no size
            that works, and on several ranks another engine than DDP.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader
        >>> from trainer_kit import Trainer
        >>> from trainer_kit.testing import TinyModule
        >>> trainer = Trainer(max_epochs=1, barebones=True, accelerator="cpu", devices=1)
        >>> loader = DataLoader(torch.randn(20, 32))
        >>> scale_batch_size(trainer, TinyModule(), loader), loader.batch_size
        batch size: batch_size = 16 (with 32, the data have fewer samples)
        (16, 16)
    """
    check_call(method, dataloaders)
    search = SizeSearch(
        mode, steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val
    )
    data = model, train_dataloaders, datamodule
    size, reason = on_processes(trainer, lambda rank: search.run(trainer, *data))
    set_batch_size(batch_arg_name, size, *data)
    trainer.say(f"batch size: {batch_arg_name} = {size} ({reason})")
    return int(size)
