"""The runs that `verify` compares: each in processes of its own, or on copies in this one, from the same state."""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final, final

import torch
from lightning_utilities.core.overrides import is_overridden
from torch import Tensor

from trainer_kit.checkpoint.commit import write_checkpoint
from trainer_kit.checkpoint.read import read_checkpoint
from trainer_kit.core.datamodule import DataModule
from trainer_kit.core.environment import Environment, pick_device
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hooks import Callback, DataHooks
from trainer_kit.core.module import TrainModule, build_once
from trainer_kit.core.progress import Progress
from trainer_kit.core.protocols import SetsAccumulation
from trainer_kit.core.seed import preserved_rng
from trainer_kit.core.torch_private import COMPILER
from trainer_kit.core.types import Keywords, Loaders
from trainer_kit.data import Feed
from trainer_kit.launch.processes import run_forked
from trainer_kit.precision.precision import Precision
from trainer_kit.strategies.single import SingleDeviceStrategy
from trainer_kit.training.loaders import find_loaders
from trainer_kit.training.session import Session
from trainer_kit.training.trial_session import trial_session
from trainer_kit.verify.loaders import (
    Division,
    divides_itself,
    feeds_of,
    loaders_by_rank,
    rows_of,
)
from trainer_kit.verify.local_ranks import run_local
from trainer_kit.verify.norms import Shares
from trainer_kit.verify.recorder import Record, Recorder, makes_batches
from trainer_kit.verify.reference import plain_loop
from trainer_kit.verify.state import plain_attributes
from trainer_kit.verify.trainer import NeedsJoinError, PlainTrainer
from trainer_kit.verify.waits import WaitWatch, raise_verdict

__all__ = ["Runs", "locked_directory"]

_PREFIX: Final = "trainer_kit-verify-"
_UNLOCKED_PREFIX: Final = "trainer_kit-new-"
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

    Yields:
        The directory, which is removed at the end.

    Example:
        >>> with locked_directory() as directory:
        ...     directory.is_dir()
        True
    """
    try:
        import fcntl
    except ImportError:
        # Windows has no fcntl; there a directory that is in use cannot be removed.
        with tempfile.TemporaryDirectory(
            prefix=_PREFIX, ignore_cleanup_errors=True
        ) as name:
            yield Path(name)
        return
    parent = Path(tempfile.gettempdir())
    for abandoned in parent.glob(f"{_PREFIX}*"):
        # An OSError means that the directory is locked by a running process, belongs to
        # another user, or is already removed. In all three cases it is left alone.
        with suppress(OSError), _opened(abandoned) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(abandoned, ignore_errors=True)
    # Between mkdtemp and flock the directory is not locked, and another process that
    # cleans up would remove it. So it is created under a prefix that no process looks at.
    unlocked = Path(tempfile.mkdtemp(prefix=_UNLOCKED_PREFIX))
    with _opened(unlocked) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        name = unlocked.name.replace(_UNLOCKED_PREFIX, _PREFIX)
        directory = unlocked.rename(parent / name)
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
    """Performs the runs.

    Args:
        trainer: the configuration that is verified; it is not changed.
        module: never trained in this process.
        loaders: the training loaders.
        val_loaders: the validation loaders, or None.
        datamodule: the user's datamodule, or None.
        steps: optimizer steps of each run.
        directory: where each rank writes its record.
        local: ranks are threads of this process, and train copies.
    """

    def __init__(
        self,
        trainer: Session,
        module: TrainModule,
        loaders: Loaders,
        val_loaders: Loaders,
        datamodule: DataModule | None,
        steps: int,
        directory: Path,
        local: bool = False,
    ) -> None:
        self.trainer = trainer
        self.module = module
        self.loaders = loaders
        self.val_loaders = val_loaders
        self.datamodule = datamodule
        self.steps = steps
        self.directory = directory
        self.local = local
        self._count = 0
        # What the first runs have shown about the module; every later run starts with it,
        # so that a run is repeated at most once for each of the two.
        self._grouped = False
        self._joined = False
        self._eager = False
        self._builds_layers = is_overridden("configure_model", module, TrainModule)

    @property
    def validates(self) -> bool:
        """Whether there is a loader of validation."""
        if self.val_loaders is not None:
            return True
        for owner in (self.datamodule, self.module):
            if owner is not None and is_overridden("val_dataloader", owner, DataHooks):
                return True
        return False

    def run_without_compiler(self) -> None:
        """Run compiled code as it is written from now on: compiled random layers draw other numbers."""
        self._eager = True

    @staticmethod
    def needs_launcher(error: BaseException) -> bool:
        """Whether an error says that an environment variable or a process group of a launcher is missing."""
        return any(name in str(error) for name in (*_RANK, _NO_GROUP))

    def start(self) -> None:
        """Write the weights that every run starts from, where the module builds its layers in ``configure_model``."""
        # Optimizers import it. Imported here, every forked rank has it already.
        importlib.import_module(COMPILER)
        if not self._builds_layers:
            return
        # Layers that ``configure_model`` builds have random weights, which differ in each
        # process. Other modules have their weights already, and a fork inherits them.

        def build(runs: Runs, rank: int) -> None:
            trainer = PlainTrainer(runs.trainer, Progress(), self.trainer.processes)
            runs._attach(trainer)
            runs._prepare_data()
            build_once(runs.module)
            state = {
                name: value
                for name, value in runs.module.state_dict().items()
                if isinstance(value, Tensor)
            }
            write_checkpoint(self.directory / _START, {"model": state})

        self._run(build, 1)

    def train(
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
        """Train with the verified configuration, in real processes; one record for each rank.

        Args:
            reseeds: the seed of the random numbers of each micro-batch; None: the run's own.
            watched: steps whose module outputs are recorded.
            traced: the name of a module whose operations are recorded at these steps.
            saves: the step after which a checkpoint is saved, and its path.
            resumes: the checkpoint to resume from.
            validates: whether a validation runs after each step.
            alone: the global batch size with which one process runs it instead; 0: the Trainer's.
            precision: instead of the Trainer's.
            shares: batch norms normalize these parts of each batch by themselves, as ranks do; None: the whole batch.
            one_batch: whether the callbacks that set gradient accumulation are left out.
        """
        directory = self._new_directory()
        start = None
        if self._builds_layers:
            start = str(self.directory / _START)

        def train_rank(runs: Runs, rank: int) -> None:
            recorder = Recorder(
                self.steps,
                reseeds=reseeds,
                watched=watched,
                traced=traced,
                saves=saves,
                shares=shares,
                threads=self.local,
                loaders=runs.loaders,
                describe=plain_attributes,
            )
            trainer = runs._trial_trainer(
                validates=validates,
                reproducible=reseeds is not None,
                batch_size=alone,
                precision=precision,
                # The hooks that record outputs must run in Python at every call.
                compiled=not (watched or self._eager),
            )
            callbacks: list[Callback] = [recorder]
            if not one_batch:
                # Accumulation is a part of what is verified; other callbacks are left out,
                # because the plain loop has none.
                callbacks = [*runs._accumulation_callbacks(), recorder]
            trainer.set_callbacks(callbacks)
            recorder.take_logs(trainer)
            val_loaders = None
            if validates:
                val_loaders = runs.val_loaders
            with self._compiler():
                trainer.fit(  # type: ignore[attr-defined]  # a trial is of the Trainer's class
                    runs.module,
                    runs.loaders,
                    val_loaders,
                    runs.datamodule,
                    ckpt_path=resumes or start,
                    load_weights_only=resumes is None and start is not None,
                )
            torch.save(recorder.record, directory / str(rank))

        ranks = self.trainer.processes
        if alone is not None:
            ranks = 1
        return self._records(train_rank, ranks, directory)

    def _trial_trainer(
        self,
        *,
        validates: bool,
        reproducible: bool,
        batch_size: int | None,
        precision: Precision | None,
        compiled: bool,
    ) -> Session:
        """A Trainer of this rank that records nothing and runs only these steps.

        Args:
            validates: whether a validation runs after each step.
            reproducible: whether workers of loaders draw the same numbers in every run.
            batch_size: of a single process, which trains without the Trainer's strategy; None: train with it.
            precision: instead of the Trainer's.
            compiled: whether the Trainer's ``torch.compile`` is active.
        """
        configured = self.trainer
        settings = replace(
            configured.settings,
            sanity_steps=0,
            log_every=1,
            fast=0,
            reproducible=configured.settings.reproducible or reproducible,
            global_batch_size=batch_size or configured.settings.global_batch_size,
        )
        if validates:
            settings = replace(settings, validate_every=1, validate_epochs=None)
        else:
            settings = replace(settings, limits={**settings.limits, "val": 0})
        # Read here, in the rank: the caller's process is not a rank.
        environment = Environment.detect()
        device = pick_device(configured.strategy.device.type, environment.local_rank)
        strategy = None
        if batch_size is not None:
            strategy = SingleDeviceStrategy(device)
        options = configured.options
        if not compiled:
            options = replace(
                options,
                compile_options=None,
                compile_regional=False,
                captures_steps=False,
            )
        trainer = trial_session(
            configured,
            settings,
            strategy=strategy,
            precision=deepcopy(precision),
            options=options,
            root=str(self.directory),
        )
        trainer.become_rank(environment, device, environment.local_world_size)
        return trainer

    def _compiler(self) -> AbstractContextManager[object]:
        """Inside, compiled functions and modules run as they are written, if random layers are compiled."""
        if not self._eager:
            return nullcontext()
        # The user may compile a module or a function itself, which no option of the
        # Trainer turns off.
        eager: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
        return eager

    def plain(
        self,
        precision: Precision,
        division: Division,
        watched: frozenset[int] = frozenset(),
        traced: str = "",
    ) -> Record:
        """The plain loop."""

        def run_loop(runs: Runs, division: Division, directory: Path) -> None:
            loaders = runs._set_up_loaders(division)
            build_once(runs.module)
            if self._builds_layers:
                # Ranks load the same file as a checkpoint: see `start`.
                start = read_checkpoint(self.directory / _START)
                runs.module.load_state_dict(start["model"])
            with self._compiler():
                record = plain_loop(
                    runs.trainer,
                    runs.module,
                    loaders,
                    runs.datamodule,
                    precision=deepcopy(precision),
                    steps=self.steps,
                    division=division,
                    watched=watched,
                    traced=traced,
                )
            torch.save(record, directory / "0")

        return self._run_single(run_loop, division)

    def order(self, division: Division) -> list[int] | None:
        """The dataset's indices in the order in which one process reads them; None where they are not known."""

        def read(runs: Runs, division: Division, directory: Path) -> None:
            record = Record(plan=runs._read_plan(division))
            torch.save(record, directory / "0")

        return self._run_single(read, division).plan

    def _read_plan(self, division: Division) -> list[int] | None:
        trainer = self.trainer
        batches = self.steps * trainer.accumulation
        loaders = self._set_up_loaders(division)
        feeds, length = feeds_of(trainer, loaders, division)
        if divides_itself(loaders[0]):
            # Together the data ranks read what one process would. A sampler that divides
            # the data cannot be asked for the order of a single process.
            return _read_order(feeds, batches, length.limit)
        limit = length.limit
        size = feeds[0].per_rank_batch_size
        if makes_batches(feeds[0]):
            # One process reads the batches of all data ranks one after the other: their
            # size is fixed by the loader, so it has as many more batches.
            batches *= division.data_ranks
            limit = limit and limit * division.data_ranks
        elif size is not None:
            # The batch of one process has the samples of all data ranks.
            samples = size * division.data_ranks * trainer.accumulation
            settings = replace(trainer.settings, global_batch_size=samples)
            trainer.use_settings(settings)
        single_division = replace(division, data_ranks=1)
        single_feeds, _ = feeds_of(trainer, loaders[:1], single_division)
        return _read_order(single_feeds, batches, limit)

    def epochs(self, division: Division) -> Record:
        """The orders of the first two epochs at the first data rank."""

        def read(runs: Runs, division: Division, directory: Path) -> None:
            loaders = runs._set_up_loaders(division)
            feeds, length = feeds_of(runs.trainer, loaders, division)
            first_feed = feeds[0]
            orders = []
            for epoch in range(2):
                orders.append(_read_epoch(first_feed, epoch, length.limit))
            divides = divides_itself(loaders[0])
            record = Record(orders=orders, divides=divides)
            torch.save(record, directory / "0")

        return self._run_single(read, division)

    def _run_single(
        self, run: Callable[[Runs, Division, Path], None], division: Division
    ) -> Record:
        """Call ``run`` in one process, again where the module turns out to need other ranks."""
        directory = self._new_directory()
        division = replace(division, grouped=self._grouped, joined=self._joined)

        def call(runs: Runs, rank: int) -> None:
            # The order of the samples then depends on the seed alone, as in `train`.
            settings = replace(runs.trainer.settings, reproducible=True)
            runs.trainer.use_settings(settings)
            run(runs, division, directory)

        try:
            return self._records(call, 1, directory)[0]
        except NeedsJoinError:
            # The step gathers values of all ranks: let the ranks of the loop run together.
            if self._joined:
                raise
            self._joined = True
        except (RuntimeError, ValueError) as error:
            # ``setup`` or the loaders ask for a process group: they get one that sends
            # nothing. Steps still have none, so that a fault in them shows.
            if self._grouped or division.world == 1 or _NO_GROUP not in str(error):
                raise
            self._grouped = True
        return self._run_single(run, division)

    def _set_up_loaders(self, division: Division) -> list[Loaders]:
        """Set module and data up as the first rank does, and return the loaders of each data rank."""
        with division.as_rank(0) as rank:
            self._attach_plain(division, rank)
            self._prepare_data()
            loaders = find_loaders("fit", self.loaders, self.module, self.datamodule)
        make = None
        if self.loaders is None:
            make = partial(self.make_loaders, division)
        return loaders_by_rank(loaders, division, self.trainer.settings.shard, make)

    def make_loaders(self, division: Division, data_rank: int) -> Loaders:
        """Return the loaders of a data rank, from a copy of module and data that is set up as its rank."""
        # The Trainer is not copied with the module: it is attached below.
        memo = {id(vars(self.module).get("_trainer")): None}
        module = self.module
        datamodule = self.datamodule
        # Of any class: user code decides how a copy is made. Without a copy the loaders
        # come from the module itself, which is not set up a second time.
        with suppress(Exception):
            module, datamodule = deepcopy((self.module, self.datamodule), memo)
        runs = self._with(self.trainer, module, None, None, datamodule)
        # A rank of the run makes its own loaders only. What another rank's draw here must
        # not change the random numbers of this one.
        with preserved_rng(), division.as_rank(data_rank) as rank:
            runs._attach_plain(division, rank)
            if module is not self.module:
                runs._prepare_data()
            return find_loaders("fit", None, module, datamodule)

    def _with(
        self,
        trainer: Session,
        module: TrainModule,
        loaders: Loaders,
        val_loaders: Loaders,
        datamodule: DataModule | None,
    ) -> Runs:
        """Runs of other objects, with these steps and this directory."""
        return Runs(
            trainer,
            module,
            loaders,
            val_loaders,
            datamodule,
            self.steps,
            self.directory,
            self.local,
        )

    def _attach_plain(self, division: Division, rank: int) -> None:
        """Let module and data see a Trainer of this rank."""
        trainer = PlainTrainer(self.trainer, Progress(), division.world, rank)
        self._attach(trainer)

    def _attach(self, trainer: PlainTrainer) -> None:
        """Let module and data read ``self.trainer``, as in the hooks of a fit."""
        self.module.trainer = trainer
        self.trainer.show_module(self.module)
        self.trainer.show_datamodule(self.datamodule)
        if self.datamodule is not None:
            self.datamodule.trainer = trainer

    def _accumulation_callbacks(self) -> list[Callback]:
        return [
            callback
            for callback in self.trainer.callbacks
            if isinstance(callback, SetsAccumulation)
        ]

    def _prepare_data(self) -> None:
        # In the order of a fit: all of `prepare_data`, then all of `setup`, and the
        # datamodule first, whose attributes the module may read.
        for owner in (self.datamodule, self.module):
            if owner is not None and is_overridden("prepare_data", owner, DataHooks):
                owner.prepare_data()
        for owner in (self.datamodule, self.module):
            if owner is not None and is_overridden("setup", owner, DataHooks):
                owner.setup("fit")

    def _new_directory(self) -> Path:
        self._count += 1
        directory = self.directory / f"run-{self._count}"
        directory.mkdir()
        return directory

    def _records(
        self, function: Callable[[Runs, int], None], ranks: int, directory: Path
    ) -> list[Record]:
        """Call ``function`` on every rank, and load the record that each has written."""
        if ranks == 1 or self.local:
            # Threads need no watch: their turns show at once that all of them wait.
            self._run(function, ranks)
        else:
            self._run_watched(function, ranks, directory)
        records = []
        for rank in range(ranks):
            # A record is an object of this library, in a file that a rank has just
            # written to a directory of this user.
            records.append(torch.load(directory / str(rank), weights_only=False))
        return records

    def _run_watched(
        self, function: Callable[[Runs, int], None], ranks: int, directory: Path
    ) -> None:
        """Run processes, and name what they wait for where they do not meet."""

        def watched(runs: Runs, rank: int) -> None:
            watch = WaitWatch(directory, rank, ranks)
            try:
                function(runs, rank)
            finally:
                watch.stop()

        try:
            self._run(watched, ranks)
        except Exception as error:
            # A rank that ends itself leaves only its exit code in the error; the file
            # with the verdict says why.
            raise_verdict(directory, error)
            raise

    def _run(self, function: Callable[[Runs, int], None], ranks: int) -> None:
        """Call a function on every rank, with what it changes: a forked process has all of it, a thread gets copies."""

        def run_forked_rank(rank: int) -> None:
            if ranks == 1:
                # One process has no launcher, and so none of its variables.
                for name in _RANK:
                    os.environ.pop(name, None)
            function(self, rank)

        with warnings.catch_warnings():
            # A fit outside `verify` shows them; here each run would repeat them.
            warnings.simplefilter("ignore")
            if self.local:
                run_local(lambda rank: function(self._copy(), rank), ranks)
            else:
                # In the directory of these runs: the next verify removes it where this process was killed.
                run_forked(run_forked_rank, ranks, directory=self.directory)

    def _copy(self) -> Runs:
        """These runs, over copies of everything that a run changes."""
        trainer = trial_session(self.trainer, self.trainer.settings)
        # A callback or loader that refers to the Trainer gets the trial.
        memo: dict[int, object] = {
            id(vars(self.module).get("_trainer")): None,
            id(self.trainer): trainer,
        }
        # One deep copy of all: two of them may share an object, which must stay one, such
        # as the dataset of both loaders.
        originals = {
            "module": self.module,
            "loaders": self.loaders,
            "val_loaders": self.val_loaders,
            "datamodule": self.datamodule,
            "strategy": self.trainer.strategy,
            "alternative": self.trainer.sharded_alternative,
            "callbacks": self._accumulation_callbacks(),
        }
        try:
            copies: Keywords = deepcopy(originals, memo)
        except Exception as error:
            # Of any class: user code decides how a copy is made.
            raise ConfigurationError(
                "runs in this process train copies of the module, the loaders and the strategy; one cannot be copied",
                found=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
                fix="use processes as ranks, which need no copies: verify without local",
            ) from error
        trainer.use_strategy(copies["strategy"], copies["alternative"])
        trainer.set_callbacks(copies["callbacks"])
        return self._with(
            trainer,
            copies["module"],
            copies["loaders"],
            copies["val_loaders"],
            copies["datamodule"],
        )


def _smaller(batches: int, limit: int | None) -> int:
    if limit is None:
        return batches
    return min(batches, limit)


def _read_order(
    feeds: Sequence[Feed], batches: int, limit: int | None
) -> list[int] | None:
    """The indices of so many batches of each feed, a batch of each in turn; None where they are not known.

    Args:
        feeds: of the data ranks, or of one process.
        batches: of each; they are read over as many epochs as they take.
        limit: the batches of an epoch, where it ends early.
    """
    order: list[int] = []
    epoch = 0
    while batches > 0:
        remaining = batches
        for row in islice(rows_of(list(feeds), epoch), _smaller(batches, limit)):
            for _, _, ids in row:
                if ids is None:
                    return None
                order += ids
            batches -= 1
        epoch += 1
        if batches == remaining:
            # The loaders have no batch: another epoch would have none either.
            break
    return order


def _read_epoch(feed: Feed, epoch: int, limit: int | None) -> list[int] | None:
    """The first indices of an epoch."""
    feed.record_indices()
    order: list[int] = []
    for _ in islice(feed.epoch(epoch), _smaller(_EPOCH_BATCHES, limit)):
        ids = feed.next_indices()
        if ids is None:
            return None
        order += ids
    return order
