"""The runs that `verify` compares: each in processes of its own, or on copies in this one, from the same state."""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from copy import copy, deepcopy
from dataclasses import replace
from functools import partial
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
from trainer_kit.core.progress import Progress
from trainer_kit.core.protocols import SetsAccumulation
from trainer_kit.core.seed import preserved_rng
from trainer_kit.data import Feed
from trainer_kit.launch.processes import run_forked
from trainer_kit.planning.local_ranks import run_local
from trainer_kit.planning.verify_loaders import (
    Division,
    divides_itself,
    feeds_of,
    place_loaders,
    rows_of,
)
from trainer_kit.planning.verify_norms import Shares
from trainer_kit.planning.verify_recorder import Record, Recorder, makes_batches
from trainer_kit.planning.verify_reference import plain_loop
from trainer_kit.planning.verify_state import plain_attributes
from trainer_kit.planning.verify_trainer import NeedsJoinError, PlainTrainer
from trainer_kit.planning.verify_waits import WaitWatch, raise_verdict
from trainer_kit.precision.precision import Precision
from trainer_kit.state.runs import RunFiles
from trainer_kit.strategies.single import SingleDeviceStrategy
from trainer_kit.training.loaders import find_loaders
from trainer_kit.training.session import Session

__all__ = ["Runs", "locked_directory"]

_PREFIX: Final = "trainer_kit-verify-"
_START: Final = "start"
_NO_GROUP: Final = "process group has not been initialized"
"""In the error of torch where code asks for its rank without a process group."""
_EPOCH_BATCHES: Final = 16
"""Batches of an epoch whose order is compared with the next epoch's."""
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
        with tempfile.TemporaryDirectory(
            prefix=_PREFIX, ignore_cleanup_errors=True
        ) as only:
            yield Path(only)
        return
    parent = Path(tempfile.gettempdir())
    for other in parent.glob(f"{_PREFIX}*"):
        with (
            suppress(OSError),
            _opened(other) as descriptor,
        ):  # locked, of another user, or already removed
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(other, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix="trainer_kit-new-"))
    with _opened(made) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        directory = made.rename(
            parent / made.name.replace("trainer_kit-new-", _PREFIX)
        )  # only now others look at it
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
        self.trainer, self.module, self.datamodule, self.local = (
            trainer,
            module,
            datamodule,
            local,
        )
        self.loaders, self.val_loaders, self.steps, self.directory = (
            loaders,
            val_loaders,
            steps,
            directory,
        )
        self._count = 0
        self._grouped = self._joined = self._eager = False
        self._built = is_overridden("configure_model", module, TrainModule)

    @property
    def validates(self) -> bool:
        """Whether there is a loader of validation."""
        owners = [
            owner for owner in (self.datamodule, self.module) if owner is not None
        ]
        return self.val_loaders is not None or any(
            is_overridden("val_dataloader", one, DataHooks) for one in owners
        )

    def run_without_compiler(self) -> None:
        """Run compiled code as it is written from now on: compiled random layers draw other numbers."""
        self._eager = True

    @staticmethod
    def needs_launcher(error: BaseException) -> bool:
        """Whether an error says that an environment variable or a process group of a launcher is missing."""
        return any(name in str(error) for name in (*_RANK, _NO_GROUP))

    def start(self) -> None:
        """Write the weights that every run starts from, where the module builds its layers in ``configure_model``."""
        importlib.import_module(
            "torch._dynamo"
        )  # optimizers import it: once here, not in every process

        if not self._built:
            return

        def build(own: Runs, rank: int) -> None:
            own._attach(PlainTrainer(own.trainer, Progress(), self.trainer.processes))
            own._prepare_data()
            build_once(own.module)
            state = {
                name: value
                for name, value in own.module.state_dict().items()
                if isinstance(value, Tensor)
            }
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
        one_batch: bool = False,
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
            one_batch: without gradient accumulation.
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
                loaders=own.loaders,
                describe=plain_attributes,
            )
            compiled = not (watched or self._eager)
            trainer = own._trial(
                validates, reseeds is not None, alone, alone is not None, compiled
            )
            counting: list[Any] = [] if one_batch else own._counting()
            trainer.set_callbacks([*counting, recorder])
            if precision is not None:
                trainer.precision_plugin = deepcopy(precision)
            recorder.take_logs(trainer)
            start = str(self.directory / _START) if self._built else None
            with _without_compiler() if self._eager else nullcontext():
                trainer.fit(  # type: ignore[attr-defined]
                    own.module,
                    own.loaders,
                    own.val_loaders if validates else None,
                    own.datamodule,
                    ckpt_path=resumes or start,
                    load_weights_only=resumes is None and start is not None,
                )
            torch.save(recorder.record, directory / str(rank))

        return self._records(
            rank, 1 if alone is not None else self.trainer.processes, directory
        )

    def _trial(
        self,
        validates: bool,
        reproducible: bool,
        batch_size: int | None,
        alone: bool,
        compiled: bool,
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
        trainer.strategy.device = pick_device(
            given.strategy.device.type, trainer.environment.local_rank
        )
        if alone:
            trainer.strategy, trainer.sharded_alternative = (
                SingleDeviceStrategy(trainer.strategy.device),
                None,
            )
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
        return trainer

    def plain(
        self,
        precision: Precision,
        division: Division,
        watched: frozenset[int] = frozenset(),
        traced: str = "",
    ) -> Record:
        """The plain loop."""

        def loop(own: Runs, division: Division, directory: Path) -> None:
            loaders = own._place_loaders(division)
            build_once(own.module)
            if self._built:
                from trainer_kit.checkpoint.read import read_checkpoint

                own.module.load_state_dict(
                    read_checkpoint(self.directory / _START)["model"]
                )
            with _without_compiler() if self._eager else nullcontext():
                record = plain_loop(
                    own.trainer,
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

        return self._single(loop, division)

    def order(self, division: Division) -> list[int] | None:
        """The dataset's indices in the order in which one process reads them; None where they are not known."""

        def read(own: Runs, division: Division, directory: Path) -> None:
            trainer, window = own.trainer, own.trainer.accumulation
            loaders = own._place_loaders(division)
            feeds, length = feeds_of(trainer, loaders, division)
            size, many = feeds[0].per_rank_batch_size, 1
            record = Record()
            if divides_itself(
                loaders[0]
            ):  # together the places read what one process would
                record.plan = _read_places(feeds, self.steps * window, length.limit)
                torch.save(record, directory / "0")
                return
            if makes_batches(feeds[0]):
                many = division.places
            elif size is not None:
                whole = size * division.places * window
                trainer.settings = replace(trainer.settings, global_batch_size=whole)
            alone, _ = feeds_of(trainer, loaders[:1], replace(division, places=1))
            record.plan = _read(
                alone[0],
                self.steps * window * many,
                length.limit and length.limit * many,
            )
            torch.save(record, directory / "0")

        return self._single(read, division).plan

    def epochs(self, division: Division) -> Record:
        """The orders of the first two epochs at the first place."""

        def read(own: Runs, division: Division, directory: Path) -> None:
            loaders = own._place_loaders(division)
            feeds, length = feeds_of(own.trainer, loaders, division)
            record = Record()
            record.orders = [
                _read_epoch(feeds[0], epoch, length.limit) for epoch in range(2)
            ]
            record.divides = divides_itself(loaders[0])
            torch.save(record, directory / "0")

        return self._single(read, division)

    def _single(
        self, run: Callable[[Runs, Division, Path], None], division: Division
    ) -> Record:
        """Call ``run`` in one process, again where the module turns out to need other ranks."""
        directory = self._next()
        division = replace(division, grouped=self._grouped, joined=self._joined)

        def call(own: Runs, rank: int) -> None:
            own.trainer.settings = replace(own.trainer.settings, reproducible=True)
            run(own, division, directory)

        try:
            return self._records(call, 1, directory)[0]
        except NeedsJoinError:
            if self._joined:
                raise
            self._joined = True
        except (RuntimeError, ValueError) as error:
            if self._grouped or division.world == 1 or _NO_GROUP not in str(error):
                raise
            self._grouped = True
        return self._single(run, division)

    def _place_loaders(self, division: Division) -> list[Any]:
        """Set module and data up as the first rank does, and return the loaders of each place."""
        with division.as_rank(0) as rank:
            self._attach(PlainTrainer(self.trainer, Progress(), division.world, rank))
            self._prepare_data()
            loaders = find_loaders("fit", self.loaders, self.module, self.datamodule)
        make = None if self.loaders is not None else partial(self._loaders_of, division)
        return place_loaders(loaders, division, self.trainer.settings.shard, make)

    def _loaders_of(self, division: Division, place: int) -> Any:
        """The loaders of another place, from a copy of module and data that is set up as its rank."""
        memo = {id(vars(self.module).get("_trainer")): None}
        other = copy(self)
        with suppress(Exception):  # of any class: user code decides how a copy is made
            other.module, other.datamodule = deepcopy(
                (self.module, self.datamodule), memo
            )
        with preserved_rng(), division.as_rank(place) as rank:
            other._attach(PlainTrainer(self.trainer, Progress(), division.world, rank))
            if other.module is not self.module:
                other._prepare_data()
            return find_loaders("fit", None, other.module, other.datamodule)

    def _attach(self, trainer: PlainTrainer) -> None:
        """Let module and data read ``self.trainer``, as in the hooks of a fit."""
        self.module.trainer = trainer
        self.trainer.module, self.trainer.datamodule = self.module, self.datamodule
        if self.datamodule is not None:
            self.datamodule.trainer = trainer

    def _counting(self) -> list[Any]:
        return [
            one for one in self.trainer.callbacks if isinstance(one, SetsAccumulation)
        ]

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

    def _records(
        self, fn: Callable[[Runs, int], None], ranks: int, directory: Path
    ) -> list[Record]:
        if ranks == 1 or self.local:  # threads are named by those who give them turns
            self._run(fn, ranks)
        else:
            self._run_watched(fn, ranks, directory)
        return [
            torch.load(directory / str(rank), weights_only=False)
            for rank in range(ranks)
        ]

    def _run_watched(
        self, fn: Callable[[Runs, int], None], ranks: int, directory: Path
    ) -> None:
        """Run processes, and name what they wait for where they do not meet."""

        def watched(own: Runs, rank: int) -> None:
            watch = WaitWatch(directory, rank, ranks)
            try:
                fn(own, rank)
            finally:
                watch.stop()

        try:
            self._run(watched, ranks)
        except Exception as error:
            raise_verdict(directory, error)
            raise

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
        counting = self._counting()
        memo: dict[int, Any] = {
            id(vars(self.module).get("_trainer")): None,
            id(given): own.trainer,
        }
        try:
            (
                own.module,
                own.loaders,
                own.val_loaders,
                own.datamodule,
                strategies,
                callbacks,
            ) = deepcopy(
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
        for _ in islice(
            feed.epoch(epoch), batches if limit is None else min(batches, limit)
        ):
            ids = feed.next_indices()
            if ids is None:
                return None
            found += ids
            batches -= 1
        epoch += 1
        if batches == before:
            return found
    return found


def _read_places(
    feeds: Sequence[Feed], batches: int, limit: int | None
) -> list[int] | None:
    """The indices that all places read, a batch of each in turn."""
    order: list[int] = []
    epoch = 0
    while batches > 0:
        before = batches
        for row in islice(
            rows_of(list(feeds), epoch),
            batches if limit is None else min(batches, limit),
        ):
            for _, _, ids in row:
                if ids is None:
                    return None
                order += ids
            batches -= 1
        epoch += 1
        if batches == before:
            break
    return order


def _read_epoch(feed: Feed, epoch: int, limit: int | None) -> list[int] | None:
    """The first indices of an epoch."""
    feed.record_indices()
    order: list[int] = []
    for _ in islice(
        feed.epoch(epoch),
        _EPOCH_BATCHES if limit is None else min(limit, _EPOCH_BATCHES),
    ):
        ids = feed.next_indices()
        if ids is None:
            return None
        order += ids
    return order


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Inside, compiled functions and modules run as they are written."""
    with torch.compiler.set_stance("force_eager"):
        yield
