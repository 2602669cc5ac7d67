"""The training data of a script, read in several layouts: what ``trainer-kit verify --data`` checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final, TypeAlias, final

from torch.utils.data import DataLoader

from trainer_kit.core.datamodule import DataModule
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.module import TrainModule
from trainer_kit.core.seed import preserved_rng, restore_rng, rng_state
from trainer_kit.core.types import Batch, Loaders
from trainer_kit.data import CombinedLoader, Feed, read_together
from trainer_kit.data.order import seed_globals
from trainer_kit.training.explain import prepare
from trainer_kit.training.loaders import find_loaders
from trainer_kit.training.session import Session
from trainer_kit.verify.loaders import (
    DataRank,
    Division,
    copy_loaders,
    feed_of_rank,
    retarget_samplers,
)
from trainer_kit.verify.runs import Runs

__all__ = ["TrainingData"]

_Agree: TypeAlias = Callable[[list[float]], list[list[float]]]
_WORKERS: Final = 2
"""Workers of a loader that the script gives none."""
_PREFETCH: Final = 2
"""torch's default of ``prefetch_factor``."""
_OWN_CLASSES: Final = ("torch", "torchdata")
"""Packages whose loaders derive nothing from their number of workers before they are read."""


@final
class TrainingData:
    """The training loaders of a fit, as each rank of a run opens them in a new process.

    Loaders that the fit gets from ``train_dataloader`` are made for each rank, with its environment; passed ones are
    those of the script. Each feed reads a copy, so that none begins where another one has ended.

    Args:
        trainer: has the options of reading, such as ``global_batch_size``; it is not changed.
        module: the module of the fit.
        loaders: the loaders that the fit was given; None: those of the datamodule or the module.
        datamodule: the datamodule of the fit, or None.

    Raises:
        ConfigurationError: the fit has no training loader.
    """

    def __init__(
        self,
        trainer: Session,
        module: TrainModule,
        loaders: Loaders,
        datamodule: DataModule | None,
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._passed = loaders
        self._datamodule = datamodule
        # Every rank of a run executes the script with the same seed, so it makes the same random data.
        self._generators = rng_state()
        prepare(trainer, module, datamodule)
        # Only its loaders are asked for: nothing is trained, and no file is written.
        self._runs = Runs(
            trainer,
            module,
            loaders,
            None,
            datamodule,
            steps=1,
            directory=Path(),
        )
        # By number of ranks and rank; never read.
        self._originals: dict[tuple[int, int], Loaders] = {}
        if self._original(0, 1) is None:
            raise ConfigurationError(
                "the fit has no training loader",
                found="neither trainer.fit(module, loader) nor train_dataloader()",
                fix="pass a loader to fit, or define train_dataloader",
            )

    @property
    def workers(self) -> list[int]:
        """The numbers of workers to compare: 0 and the script's, or 2 if that is 0.

        A loader of a class that may depend on its number of workers keeps the script's.
        """
        loaders = list(_data_loaders(self._original(0, 1)))
        numbers = [loader.num_workers for loader in loaders]
        if any(map(_may_change_workers, loaders)):
            return [0, max(numbers) or _WORKERS]
        return [max(numbers, default=0)]

    @property
    def uses_workers(self) -> bool:
        """Whether a loader of the script has workers."""
        loaders = _data_loaders(self._original(0, 1))
        return any(loader.num_workers for loader in loaders)

    def open_feed(self, workers: int, rank: int, size: int, agree: _Agree) -> Feed:
        """Return the feed of a rank over a new copy of its loaders.

        Args:
            workers: number of workers of each loader.
            rank: the data rank.
            size: number of data ranks.
            agree: exchanges a few numbers of every rank.

        Raises:
            ConfigurationError: a loader that cannot be copied.
        """
        loaders = _copy(self._original(rank, size))
        for loader in _data_loaders(loaders):
            if _may_change_workers(loader):
                _set_workers(loader, workers)
        data_rank = DataRank(rank, size)
        feed, _ = feed_of_rank(
            self._trainer, loaders, data_rank, self._trainer.data_seed, agree
        )
        return feed

    def describe(self) -> str:
        """Return one line about the data, on one rank."""
        return self._open_alone().describe()

    def limit(self, batches: int) -> int | None:
        """Return the number of batches after which an epoch is cut; None: it has at most so many on one rank.

        Args:
            batches: the largest number of batches that a check reads of an epoch.

        Raises:
            ConfigurationError: the script trains on fewer than two batches of an epoch.
        """
        settings = self._trainer.settings
        trained = settings.train_limit()
        # The script's own limit cuts the epoch too; a fraction depends on the number of ranks.
        if isinstance(trained, int):
            if trained < 2:
                raise _no_position(trained, bool(settings.overfit))
            batches = min(batches, trained)
        feed = self._open_alone()
        with preserved_rng():
            seed_globals(self._trainer.data_seed)
            read = sum(1 for _ in islice(feed.epoch(0), batches + 1))
        feed.close()
        if read > batches:
            return batches
        return None

    def _open_alone(self) -> Feed:
        return self.open_feed(self.workers[0], 0, 1, lambda numbers: [numbers])

    def _original(self, rank: int, size: int) -> Loaders:
        layout = (size, rank)
        if layout not in self._originals:
            with preserved_rng():
                self._originals[layout] = self._make(rank, size)
        return self._originals[layout]

    def _make(self, rank: int, size: int) -> Loaders:
        if self._passed is None and size == 1:
            return find_loaders("fit", None, self._module, self._datamodule)
        if self._passed is None:
            restore_rng(self._generators)
            division = Division(size, self._trainer.data_seed, 0, world=size)
            return self._runs.make_loaders(division, rank)
        loaders = _copy(self._passed)
        # The script has made them in a process without a launcher.
        retarget_samplers(loaders, rank, size, size)
        return loaders


def _no_position(batches: int, overfits: bool) -> ConfigurationError:
    name = "limit_train_batches"
    if overfits:
        name = "overfit_batches"
    return ConfigurationError(
        "an epoch of fewer than two batches has no position at which it can be resumed",
        found=f"{name}={batches}",
        fix=f"check the data without {name}, or with at least 2",
    )


def _copy(loaders: Loaders) -> Loaders:
    try:
        return copy_loaders(loaders)
    except Exception as error:
        # Of any class: user code decides how a copy is made.
        raise ConfigurationError(
            "the loaders of the script cannot be copied, so they can be read only once",
            found=f"{type(error).__name__}: {error}",
            fix="call trainer_kit.testing.check_loader with a function that makes a new loader",
        ) from error


def _data_loaders(loaders: Loaders) -> Iterator[DataLoader[Batch]]:
    loaders = read_together(loaders)
    if isinstance(loaders, CombinedLoader):
        for loader in loaders.flattened:
            yield from _data_loaders(loader)
    elif isinstance(loaders, DataLoader):
        yield loaders


def _may_change_workers(loader: DataLoader[Batch]) -> bool:
    return type(loader).__module__.partition(".")[0] in _OWN_CLASSES


def _set_workers(loader: DataLoader[Batch], workers: int) -> None:
    """Give a loader, which was not read yet, another number of workers."""
    # The constructor derives the other two from the number. Not by assignment, which a loader may refuse.
    attributes = loader.__dict__
    attributes["num_workers"] = workers
    if workers:
        attributes["prefetch_factor"] = loader.prefetch_factor or _PREFETCH
    else:
        attributes.update(prefetch_factor=None, timeout=0)
