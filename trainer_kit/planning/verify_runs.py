"""The runs that `verify` compares: each in processes of its own, or on copies in this one, from the same state."""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy, deepcopy
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, final

import torch
from lightning_utilities.core.overrides import is_overridden
from torch import Tensor

from trainer_kit.checkpoint.commit import write_checkpoint
from trainer_kit.core.datamodule import DataModule
from trainer_kit.core.environment import Environment, pick_device
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hooks import DataHooks
from trainer_kit.core.module import TrainModule, build_once
from trainer_kit.core.protocols import SetsAccumulation
from trainer_kit.data import Feed
from trainer_kit.launch.processes import run_forked
from trainer_kit.planning.local_ranks import run_local
from trainer_kit.planning.verify_norms import Shares
from trainer_kit.planning.verify_recorder import Record, Recorder, makes_batches
from trainer_kit.planning.verify_reference import Division, feeds_of, plain_loop
from trainer_kit.precision.precision import Precision
from trainer_kit.state.runs import RunFiles
from trainer_kit.strategies.single import SingleDeviceStrategy
from trainer_kit.training.loaders import find_loaders
from trainer_kit.training.session import Session

__all__ = ["Runs", "locked_directory"]

_PREFIX: Final = "trainer_kit-verify-"
_START: Final = "start"
_RANK: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@contextmanager
def locked_directory() -> Iterator[Path]:
    """A temporary directory of this process; first removes those of processes that were killed.

    The kernel releases the lock of a killed process, in every container that shares the directory.

    Example:
        >>> with locked_directory() as directory:
        ...     directory.is_dir()
        True
    """
    try:
        import fcntl
    except ImportError:  # Windows, where a directory that is in use cannot be removed
        with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as only:
            yield Path(only)
        return
    parent = Path(tempfile.gettempdir())
    for other in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError), _opened(other) as descriptor:  # locked, of another user, or already removed
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(other, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix="trainer_kit-new-"))
    with _opened(made) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        directory = made.rename(parent / made.name.replace("trainer_kit-new-", _PREFIX))  # only now others look at it
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@final
class Runs:
    """Makes the runs.

    Args:
        trainer: the configuration that is verified; it is not changed.
        module: never trained in this process.
        loaders: of the training data.
        val_loaders: of validation, or None.
        datamodule: or None.
        steps: optimizer steps of each run.
        directory: for what the runs return.
        local: ranks are threads of this process, and train copies.
    """

    def __init__(
        self,
        trainer: Session,
        module: TrainModule,
        loaders: Any,
        val_loaders: Any,
        datamodule: DataModule | None,
        steps: int,
        directory: Path,
        local: bool = False,
    ) -> None:
        self.trainer, self.module, self.datamodule, self.local = trainer, module, datamodule, local
        self.loaders, self.val_loaders, self.steps, self.directory = loaders, val_loaders, steps, directory
        self._count = 0
        self._built = is_overridden("configure_model", module, TrainModule)

    @property
    def validates(self) -> bool:
        """Whether there is a loader of validation."""
        owners = [owner for owner in (self.datamodule, self.module) if owner is not None]
        return self.val_loaders is not None or any(is_overridden("val_dataloader", one, DataHooks) for one in owners)

    def start(self) -> None:
        """Write the weights that every run starts from, where the module builds its layers in ``configure_model``."""
        importlib.import_module("torch._dynamo")  # optimizers import it: once here, not in every process

        if not self._built:
            return

        def build(own: Runs, rank: int) -> None:
            own._prepare_data()
            build_once(own.module)
            state = {name: value for name, value in own.module.state_dict().items() if isinstance(value, Tensor)}
            write_checkpoint(self.directory / _START, {"model": state})

        self._run(build, 1)

    def chosen(
        self,
        *,
        reseeds: int | None = None,
        watched: frozenset[int] = frozenset(),
        traced: str = "",
        saves: tuple[int, str] | None = None,
        resumes: str | None = None,
        validates: bool = False,
        alone: int | None = None,
        precision: Precision | None = None,
        shares: Shares | None = None,
    ) -> list[Record]:
        """The verified configuration, in real processes; one record for each rank.

        Args:
            reseeds: the seed of the random numbers of each micro-batch; None: the run's own.
            watched: steps whose module outputs are recorded.
            traced: the name of a module whose operations are recorded at these steps.
            saves: the step after which a checkpoint is saved, and its path.
            resumes: the checkpoint to resume from.
            validates: after each step.
            alone: the global batch size with which one process runs it instead; 0: the Trainer's.
            precision: instead of the Trainer's.
            shares: batch norms normalise these parts of each batch by themselves, as ranks do; None: the whole batch.
        """
        directory = self._next()

        def rank(own: Runs, rank: int) -> None:
            recorder = Recorder(
                self.steps,
                reseeds=reseeds,
                watched=watched,
                traced=traced,
                saves=saves,
                shares=shares,
                threads=self.local,
            )
            trainer = own._trial(validates, reseeds is not None, alone, alone is not None, compiled=not watched)
            counting: list[Any] = [one for one in own.trainer.callbacks if isinstance(one, SetsAccumulation)]
            trainer.set_callbacks([*counting, recorder])
            if precision is not None:
                trainer.precision_plugin = deepcopy(precision)
            recorder.take_logs(trainer)
            start = str(self.directory / _START) if self._built else None
            trainer.fit(  # type: ignore[attr-defined]
                own.module,
                own.loaders,
                own.val_loaders if validates else None,
                own.datamodule,
                ckpt_path=resumes or start,
                load_weights_only=resumes is None and start is not None,
            )
            torch.save(recorder.record, directory / str(rank))

        return self._records(rank, 1 if alone is not None else self.trainer.processes, directory)

    def _trial(
        self, validates: bool, reproducible: bool, batch_size: int | None, alone: bool, compiled: bool
    ) -> Session:
        """A Trainer of this rank that writes nothing and runs only these steps."""
        given = self.trainer
        every: dict[str, Any] = {"validate_every": 1, "validate_epochs": None}
        settings = replace(
            given.settings,
            sanity_steps=0,
            log_every=1,
            fast=0,
            reproducible=given.settings.reproducible or reproducible,
            global_batch_size=batch_size or given.settings.global_batch_size,
            **(every if validates else {"limits": {**given.settings.limits, "val": 0}}),
        )
        trainer = given.for_trial(settings)
        trainer.environment = Environment.detect()
        trainer.processes = trainer.environment.local_world_size
        trainer.strategy.device = pick_device(given.strategy.device.type, trainer.environment.local_rank)
        if alone:
            trainer.strategy, trainer.sharded_alternative = SingleDeviceStrategy(trainer.strategy.device), None
        if not compiled:
            trainer.compile_options = None
        trainer.files = RunFiles(
            loggers=[],
            root=str(self.directory),
            seed=given.files.seed,
            resume=None,
            records=False,
            say=lambda line: None,
        )
        vars(trainer)["say"] = lambda line: None
        return trainer

    def plain(
        self, precision: Precision, division: Division, watched: frozenset[int] = frozenset(), traced: str = ""
    ) -> Record:
        """The plain loop."""
        directory = self._next()

        def one(own: Runs, rank: int) -> None:
            own._prepare_data()
            build_once(own.module)
            if self._built:
                from trainer_kit.checkpoint.read import read_checkpoint

                own.module.load_state_dict(read_checkpoint(self.directory / _START)["model"])
            loaders = find_loaders("fit", own.loaders, own.module, own.datamodule)
            trainer = own.trainer
            trainer.settings = replace(trainer.settings, reproducible=True)
            record = plain_loop(
                trainer,
                own.module,
                loaders,
                own.datamodule,
                precision=deepcopy(precision),
                steps=self.steps,
                division=division,
                watched=watched,
                traced=traced,
            )
            torch.save(record, directory / "0")

        return self._records(one, 1, directory)[0]

    def order(self, division: Division) -> list[int] | None:
        """The dataset's indices in the order in which one process reads them; None where they are not known."""
        directory = self._next()

        def one(own: Runs, rank: int) -> None:
            own._prepare_data()
            trainer, window = own.trainer, own.trainer.accumulation
            trainer.settings = replace(trainer.settings, reproducible=True)
            loaders = find_loaders("fit", own.loaders, own.module, own.datamodule)
            feeds, length = feeds_of(trainer, loaders, division)
            size, many = feeds[0].per_rank_batch_size, 1
            if makes_batches(feeds[0]):
                many = division.places
            elif size is not None:
                whole = size * division.places * window
                trainer.settings = replace(trainer.settings, global_batch_size=whole)
            alone, _ = feeds_of(trainer, loaders, replace(division, places=1))
            record = Record()
            record.plan = _read(alone[0], self.steps * window * many, length.limit and length.limit * many)
            torch.save(record, directory / "0")

        return self._records(one, 1, directory)[0].plan

    def _prepare_data(self) -> None:
        for owner in (self.datamodule, self.module):
            if owner is not None and is_overridden("prepare_data", owner, DataHooks):
                owner.prepare_data()
        for owner in (self.datamodule, self.module):
            if owner is not None and is_overridden("setup", owner, DataHooks):
                owner.setup("fit")

    def _next(self) -> Path:
        self._count += 1
        directory = self.directory / f"run-{self._count}"
        directory.mkdir()
        return directory

    def _records(self, fn: Callable[[Runs, int], None], ranks: int, directory: Path) -> list[Record]:
        self._run(fn, ranks)
        return [torch.load(directory / str(rank), weights_only=False) for rank in range(ranks)]

    def _run(self, fn: Callable[[Runs, int], None], ranks: int) -> None:
        """Call ``fn`` on every rank, with what it may change: a forked process has all of it, a thread gets copies."""

        def forked(rank: int) -> None:
            if ranks == 1:  # one process, as it starts without a launcher
                for name in _RANK:
                    os.environ.pop(name, None)
            fn(self, rank)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run itself shows them
            if self.local:
                run_local(lambda rank: fn(self._copied(), rank), ranks)
            else:
                run_forked(forked, ranks)

    def _copied(self) -> Runs:
        """These runs, over copies of everything that a run changes."""
        own = copy(self)
        given = self.trainer
        own.trainer = given.for_trial(given.settings)
        counting = [one for one in given.callbacks if isinstance(one, SetsAccumulation)]
        memo: dict[int, Any] = {id(vars(self.module).get("trainer")): None, id(given): own.trainer}
        try:
            own.module, own.loaders, own.val_loaders, own.datamodule, strategies, callbacks = deepcopy(
                (
                    self.module,
                    self.loaders,
                    self.val_loaders,
                    self.datamodule,
                    (given.strategy, given.sharded_alternative),
                    counting,
                ),
                memo,
            )
        except Exception as error:  # of any class: user code decides how a copy is made
            raise ConfigurationError(
                "runs in this process train copies of the module, the loaders and the strategy; one cannot be copied",
                found=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
                fix="let ranks be processes, which need no copies: verify without local",
            ) from error
        own.trainer.strategy, own.trainer.sharded_alternative = strategies
        own.trainer.set_callbacks(callbacks)
        return own


def _read(feed: Feed, batches: int, limit: int | None) -> list[int] | None:
    found: list[int] = []
    epoch = 0
    while batches > 0:
        feed.record_indices()
        before = batches
        for _ in islice(feed.epoch(epoch), batches if limit is None else min(batches, limit)):
            ids = feed.next_indices()
            if ids is None:
                return None
            found += ids
            batches -= 1
        epoch += 1
        if batches == before:
            return found
    return found
