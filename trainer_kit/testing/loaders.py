"""`check_loader`: whether a loader resumes exactly, and yields every sample once, on several workers and ranks."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, final

from trainer_kit.core.display import plural
from trainer_kit.core.errors import TrainerKitError
from trainer_kit.core.types import Loaders
from trainer_kit.data import Feed
from trainer_kit.testing.distributed import run_distributed
from trainer_kit.testing.loader_compare import (
    Outcome,
    compare_batches,
    compare_samples,
    first_line,
    identify_rows,
    spread,
)
from trainer_kit.testing.loader_ranks import (
    Agree,
    Identify,
    LocalRanks,
    ProcessRanks,
    RankPass,
    RankReader,
    Ranks,
    SavedPosition,
)
from trainer_kit.testing.loader_report import LoaderCheck, LoaderReport

__all__ = ["check_feeds", "check_loader"]

_LoaderFactory: TypeAlias = Callable[[int], Loaders]
"""Called with the number of workers."""
_FeedFactory: TypeAlias = Callable[[int, int, int, Agree], Feed]
"""Called with the number of workers, the rank, the number of ranks, and what exchanges numbers of the ranks."""


def check_loader(
    make_loader: _LoaderFactory,
    *,
    workers: Sequence[int] = (0, 2),
    ranks: Sequence[int] = (1, 2),
    epochs: int = 2,
    positions: int | None = 6,
    limit: int | None = None,
    identify: Identify | None = None,
    seed: int = 0,
    processes: bool = False,
    timeout: float = 300.0,
) -> LoaderReport:
    """Read a loader as `Trainer.fit` does, interrupt and resume it at several batches, and compare what it yields.

    Each number of workers is combined with each number of ranks. For each pair the report has one line for: two
    uninterrupted runs (``order``), the samples over all ranks (``samples``), reading with a state after every batch
    (``state``), a resume inside an epoch (``first resume``), a resume of that resume (``second resume``), an epoch
    that ends early, as with ``limit_train_batches`` (``early end``), a resume between two epochs (``new epoch``), and
    resumes from the states of other numbers of workers and ranks. States pass through the format of checkpoints.

    Args:
        make_loader: ``make_loader(num_workers)`` returns a new loader, as a script would in a new process.
        workers: numbers of workers. The first one is the reference for the samples.
        ranks: numbers of data ranks. The first one is the reference for the samples.
        epochs: epochs of every run, at least 2.
        positions: number of batches of an epoch after which it is interrupted, spread over the epoch; None: all.
        limit: batches of an epoch, for a loader without an end.
        identify: ``identify(batch)`` returns a value for each sample of a batch, such as its index. By default the
            content of each row: data that are drawn differently in workers (augmentation) need ``identify``.
        seed: the seed of the data order.
        processes: run every rank as a process with a gloo process group. By default the ranks take turns in this
            process, each with the environment variables of its rank. With it, ``make_loader`` and ``identify`` must
            be picklable.
        timeout: seconds for each layout, with ``processes``.

    Returns:
        The verdicts: print them, or call `LoaderReport.raise_if_failed`.

    Raises:
        ValueError: fewer than 2 epochs, or no number of workers or ranks.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> def make_loader(num_workers):
        ...     return DataLoader(range(12), batch_size=2, shuffle=True, num_workers=num_workers)
        >>> report = check_loader(make_loader, workers=[0])
        >>> report.raise_if_failed()
        >>> print(report.checks[3])
        ok          workers=0 ranks=1   first resume   10 positions in 2 epochs
    """
    if epochs < 2 or not workers or not ranks:
        raise ValueError(
            "check_loader compares at least 2 epochs, with at least one number of workers and of ranks\n"
            f"  found: epochs={epochs}, workers={list(workers)}, ranks={list(ranks)}"
        )
    return check_feeds(
        partial(_open_feed, make_loader, seed),
        workers=workers,
        ranks=ranks,
        epochs=epochs,
        positions=positions,
        limit=limit,
        identify=identify,
        seed=seed,
        processes=processes,
        timeout=timeout,
    )


def _open_feed(
    make_loader: _LoaderFactory,
    seed: int,
    workers: int,
    rank: int,
    size: int,
    agree: Agree,
) -> Feed:
    return Feed(
        make_loader(workers),
        rank=rank,
        size=size,
        seed=seed,
        agree=agree,
    )


def check_feeds(
    open_feed: _FeedFactory,
    *,
    workers: Sequence[int],
    ranks: Sequence[int],
    epochs: int = 2,
    positions: int | None = 6,
    limit: int | None = None,
    identify: Identify | None = None,
    seed: int = 0,
    processes: bool = False,
    timeout: float = 300.0,
) -> LoaderReport:
    """Check a loader that is read with options of a Trainer, such as ``global_batch_size``.

    Args:
        open_feed: ``open_feed(num_workers, rank, ranks, agree)`` returns the feed of a rank over a new loader.
        workers: see `check_loader`, as for all other arguments.
        ranks: numbers of data ranks.
        epochs: epochs of every run.
        positions: number of batches of an epoch after which it is interrupted.
        limit: batches of an epoch.
        identify: returns a value for each sample of a batch.
        seed: the seed of the generators of a new run.
        processes: run every rank as a process.
        timeout: seconds for each layout, with ``processes``.
    """
    plan = _Plan(
        open_feed=open_feed,
        epochs=epochs,
        positions=positions,
        limit=limit,
        identify=identify or identify_rows,
        seed=seed,
        rank_multiple=math.lcm(*ranks),
    )
    records: list[_Record] = []
    checks: list[LoaderCheck] = []
    # Workers outside: the layouts that are compared with each other differ in one number only.
    for worker_count in workers:
        for rank_count in ranks:
            layout = _Layout(worker_count, rank_count)
            if processes and rank_count > 1:
                results = run_distributed(
                    _check_process, rank_count, plan, layout, records, timeout=timeout
                )
                # Every rank has gathered the same passes, so all verdicts are equal.
                layout_checks, record = results[0]
            else:
                layout_checks, record = _check_layout(
                    plan, layout, LocalRanks(rank_count), records
                )
            checks += layout_checks
            if record is not None:
                records.append(record)
            elif layout_checks[0].status != "refused":
                # A loader that no second run repeats fails in the same way in other layouts.
                return LoaderReport(checks)
    return LoaderReport(checks)


@final
@dataclass(frozen=True)
class _Layout:
    workers: int
    ranks: int

    def __str__(self) -> str:
        return f"{plural(self.workers, 'worker')} and {plural(self.ranks, 'rank')}"


@final
@dataclass(
    frozen=True,
    kw_only=True,
)
class _Plan:
    """The arguments of `check_loader` that all layouts share."""

    open_feed: _FeedFactory
    epochs: int
    positions: int | None
    limit: int | None
    identify: Identify
    seed: int
    rank_multiple: int
    """The least common multiple of the numbers of ranks."""


@final
@dataclass
class _Record:
    """What a run with a state after every batch has read: other layouts compare with it, and resume from it.

    Attributes:
        layout: of the run.
        strides: for each loader, the samples (or batches) in a micro-batch of all ranks.
        epochs: by epoch, the pass of each rank.
    """

    layout: _Layout
    strides: list[int]
    epochs: list[list[RankPass]]

    def positions(
        self,
        epoch: int,
        batches: int,
    ) -> list[SavedPosition]:
        """Return what each rank has saved after a number of batches of an epoch."""
        return [rank_pass.positions[batches] for rank_pass in self.epochs[epoch]]

    def samples(
        self,
        epoch: int,
        start: int = 0,
    ) -> Counter[Hashable]:
        """Return the samples of an epoch from a batch on, over all ranks."""
        count: Counter[Hashable] = Counter()
        for rank_pass in self.epochs[epoch]:
            # As a multiset: ranks and workers change the order, but no sample may be lost or read twice.
            for samples in rank_pass.samples[start:]:
                count.update(samples)
        return count


def _check_process(
    plan: _Plan, layout: _Layout, records: list[_Record]
) -> tuple[list[LoaderCheck], _Record | None]:
    return _check_layout(
        plan,
        layout,
        ProcessRanks(),
        records,
    )


def _check_layout(
    plan: _Plan, layout: _Layout, ranks: Ranks, records: list[_Record]
) -> tuple[list[LoaderCheck], _Record | None]:
    # Feeds warn of streams that they read again up to a position: the result of that is compared here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checker = _LayoutChecker(
            plan,
            layout,
            ranks,
        )
        checks = checker.check(records)
        return checks, checker.record


@final
class _LayoutChecker:
    """The checks of one number of workers and ranks.

    Attributes:
        record: a run in which the position was saved after every batch; None before it.
    """

    def __init__(
        self,
        plan: _Plan,
        layout: _Layout,
        ranks: Ranks,
    ) -> None:
        self.plan = plan
        self.layout = layout
        self.ranks = ranks
        self.record: _Record | None = None
        self._reference: list[list[RankPass]] = []

    def check(self, records: list[_Record]) -> list[LoaderCheck]:
        """Return the verdicts, with those of resumes from the positions of earlier layouts."""
        first = self._verdict("order", self._check_order)
        # Without two equal runs every further difference would be the loader's own randomness.
        if self.record is None:
            return [first]
        checks = [
            first,
            self._verdict("samples", lambda: self._check_samples(records)),
            self._verdict("state", self._check_states),
            self._verdict("first resume", self._check_first_resume),
            self._verdict("second resume", self._check_second_resume),
            self._verdict("early end", self._check_early_end),
            self._verdict("new epoch", self._check_new_epoch),
        ]
        for record in records:
            if record.layout.workers == self.layout.workers:
                checks.append(self._check_change("other ranks", record))
            elif record.layout.ranks == self.layout.ranks:
                checks.append(self._check_change("other workers", record))
        return checks

    def _verdict(
        self,
        name: str,
        check: Callable[[], str],
    ) -> LoaderCheck:
        try:
            status = "ok"
            text = check()
        except Outcome as outcome:
            status = outcome.status
            text = outcome.text
        except Exception as error:
            # Of any class: user code reads the data.
            status = "fails"
            text = first_line(error)
        return LoaderCheck(
            name,
            self.layout.workers,
            self.layout.ranks,
            status,
            text,
        )

    def _check_order(self) -> str:
        try:
            self.ranks.meet(self._open_feed)
            _close(self._open())
        except TrainerKitError as error:
            # In words, before the first batch: this layout trains on nothing wrong.
            raise Outcome("refused", first_line(error)) from error
        self._reference = self._read_epochs(saves=False)
        # Without saving positions first: a loader may change when it is asked for its state.
        second = self._read_epochs(saves=False)
        for epoch, passes in enumerate(second):
            self._compare(
                passes,
                epoch,
                0,
                "in a second run",
            )
        readers = self._open()
        strides = [stride for _, stride in readers[0].feed.stride]
        epochs = self._read_epochs(saves=True)
        self.record = _Record(
            self.layout,
            strides,
            epochs,
        )
        counts = [self._count(epoch) for epoch in range(self.plan.epochs)]
        if not all(counts):
            raise Outcome("fails", "an epoch without a batch")
        batches = " and ".join(map(str, counts))
        return f"batches by epoch: {batches}"

    def _check_samples(self, records: list[_Record]) -> str:
        assert self.record is not None
        # With a limit the samples that are read depend on the number of ranks.
        if self.plan.limit is not None:
            batches = plural(self.plan.limit, "batch")
            raise Outcome("not checked", f"limited to {batches} of an epoch")
        count = self.record.samples(0)
        total = plural(sum(count.values()), "sample")
        if not records:
            return f"{total} in an epoch, {len(count)} different ones"
        reference = records[0]
        for epoch in range(self.plan.epochs):
            name = f"epoch {epoch}, compared with {reference.layout}"
            expected = reference.samples(epoch)
            compare_samples(
                self.record.samples(epoch),
                expected,
                name,
            )
        return f"{total} in an epoch, as with {reference.layout}"

    def _check_states(self) -> str:
        assert self.record is not None
        for epoch, passes in enumerate(self.record.epochs):
            self._compare(
                passes,
                epoch,
                0,
                "with a state after every batch",
            )
            for rank_pass in passes:
                if rank_pass.unsteady is not None:
                    position = rank_pass.unsteady
                    text = f"epoch {epoch}: two requests after batch {position} return different states"
                    raise Outcome("fails", text)
        return (
            "a state after every batch changes no batch, and a second request no state"
        )

    def _check_first_resume(self) -> str:
        assert self.record is not None
        total = 0
        for epoch in range(self.plan.epochs):
            for position in self._positions(epoch):
                saved = self.record.positions(epoch, position)
                passes = self._resume(
                    saved,
                    epoch,
                    position,
                )
                self._compare(
                    passes,
                    epoch,
                    position,
                    f"resumed at {position}",
                )
                total += 1
        return self._summary(total)

    def _check_second_resume(self) -> str:
        assert self.record is not None
        total = 0
        for epoch in range(self.plan.epochs):
            for position in self._positions(epoch):
                # One batch later: the second state is taken while the loader still works with what the first one
                # restored.
                following = position + 1
                if following >= self._count(epoch):
                    continue
                saved = self.record.positions(epoch, position)
                passes = self._resume(
                    saved,
                    epoch,
                    position,
                    saved_at=[following],
                )
                saved = [rank_pass.positions[following] for rank_pass in passes]
                passes = self._resume(
                    saved,
                    epoch,
                    following,
                )
                action = f"resumed at {position} and at {following}"
                self._compare(
                    passes,
                    epoch,
                    following,
                    action,
                )
                total += 1
        return self._summary(total)

    def _check_early_end(self) -> str:
        positions = self._positions(0)
        for position in positions:
            # Closed only after the next epoch: the workers of the epoch that has ended early are still alive then.
            readers = self._open()
            for reader in readers:
                reader.read(
                    0,
                    stop=position,
                )
            saved = [
                reader.save(
                    1,
                    0,
                    position,
                )
                for reader in readers
            ]
            passes = []
            for reader in readers:
                passes.append(
                    reader.read(
                        1,
                        stop=self.plan.limit,
                        earlier=position,
                    )
                )
            _close(readers)
            expected = self.ranks.gather(passes)
            saved = self.ranks.gather(saved)
            passes = self._resume(
                saved,
                1,
                0,
                earlier=position,
            )
            name = f"epoch 1, resumed after {plural(position, 'batch')} of epoch 0"
            compare_batches(
                passes,
                [each.batches for each in expected],
                name,
                0,
            )
        return self._summary(
            len(positions),
            epochs=1,
        )

    def _check_new_epoch(self) -> str:
        readers = self._open()
        earlier = 0
        for epoch in range(1, self.plan.epochs):
            for reader in readers:
                reader.read(
                    epoch - 1,
                    stop=self.plan.limit,
                    earlier=earlier,
                )
            earlier += self._count(epoch - 1)
            saved = [
                reader.save(
                    epoch,
                    0,
                    earlier,
                )
                for reader in readers
            ]
            passes = self._resume(
                self.ranks.gather(saved),
                epoch,
                0,
            )
            self._compare(
                passes,
                epoch,
                0,
                "resumed at its start",
            )
        _close(readers)
        return plural(self.plan.epochs - 1, "resume")

    def _check_change(
        self,
        name: str,
        record: _Record,
    ) -> LoaderCheck:
        """Resume from the positions of another layout."""
        return self._verdict(name, lambda: self._resume_from(record))

    def _resume_from(self, record: _Record) -> str:
        # The last epoch: a resume that mixes up epochs is found there, and not in the first one.
        assert self.record is not None
        epoch = self.plan.epochs - 1
        total = 0
        for position, start in self._converted_positions(record, epoch):
            saved = record.positions(epoch, position)
            try:
                passes = self._resume(
                    saved,
                    epoch,
                    start,
                )
            except TrainerKitError as error:
                # Before the first batch, in words: nothing is lost in silence.
                text = f"from {record.layout}: {first_line(error)}"
                raise Outcome("refused", text) from error
            resumed = _Record(
                self.layout,
                self.record.strides,
                [passes],
            )
            expected = record.samples(epoch, position)
            name = f"epoch {epoch}, resumed at {position} of {record.layout}"
            # With a limit the rest of an epoch depends on the number of ranks.
            if self.plan.limit is None:
                compare_samples(
                    resumed.samples(0),
                    expected,
                    name,
                )
            total += 1
        if not total:
            text = f"no position of {record.layout} is a whole number of batches here"
            raise Outcome("not checked", text)
        return f"{plural(total, 'position')} of {record.layout}"

    def _converted_positions(
        self, record: _Record, epoch: int
    ) -> list[tuple[int, int]]:
        """Return positions of another layout, each with the same position in this one."""
        assert self.record is not None
        strides = list(
            zip(
                record.strides,
                self.record.strides,
                strict=True,
            )
        )
        positions = []
        for position in sorted(record.epochs[epoch][0].positions):
            # A position counts micro-batches of all ranks, whose size differs between layouts.
            starts = {position * before / now for before, now in strides}
            start = starts.pop()
            # Loaders that are read together may disagree.
            if not starts and start.is_integer():
                positions.append((position, int(start)))
        return spread(positions, self.plan.positions)

    def _compare(
        self, passes: list[RankPass], epoch: int, position: int, action: str
    ) -> None:
        """Compare what was read from a position of an epoch with the uninterrupted run."""
        expected = []
        for rank_pass in self._reference[epoch]:
            expected.append(rank_pass.batches[position:])
        compare_batches(
            passes,
            expected,
            f"epoch {epoch}, {action}",
            position,
        )

    def _count(self, epoch: int) -> int:
        # The longest: ranks with fewer batches run padding at their end.
        return max(len(rank_pass.batches) for rank_pass in self._reference[epoch])

    def _positions(self, epoch: int) -> list[int]:
        return spread(range(1, self._count(epoch)), self.plan.positions)

    def _saved_positions(self, epoch: int) -> set[int]:
        """Return the positions of an epoch from which this layout or another one resumes."""
        positions = set(self._positions(epoch))
        # In another layout a position is a whole number of batches if its number of ranks divides it.
        ranks = self.plan.rank_multiple
        multiples = range(
            ranks,
            self._count(epoch),
            ranks,
        )
        positions.update(spread(multiples, self.plan.positions))
        return positions

    def _summary(
        self,
        total: int,
        epochs: int | None = None,
    ) -> str:
        if not total:
            raise Outcome("not checked", "an epoch has too few batches")
        epochs = epochs or self.plan.epochs
        return f"{plural(total, 'position')} in {plural(epochs, 'epoch')}"

    def _open_feed(
        self,
        rank: int,
        agree: Agree,
    ) -> Feed:
        with self.ranks.as_rank(rank):
            return self.plan.open_feed(
                self.layout.workers,
                rank,
                self.ranks.size,
                agree,
            )

    def _open(self, saved: list[SavedPosition] | None = None) -> list[RankReader]:
        """Return a new reader for each rank of this process, as in a new process."""
        readers = []
        for rank in self.ranks.local:
            feed = self._open_feed(rank, self.ranks.agreement(rank))
            position = None
            if saved is not None:
                states = [rank_position.loader for rank_position in saved]
                feed.loader_state.load_state_dict(states, rank)
                # A rank that the saved run did not have takes the generators of its last one.
                position = saved[min(rank, len(saved) - 1)]
            readers.append(
                RankReader(
                    feed, rank, self.ranks, self.plan.identify, position, self.plan.seed
                )
            )
        return readers

    def _read_epochs(self, saves: bool) -> list[list[RankPass]]:
        readers = self._open()
        epochs = []
        earlier = 0
        for epoch in range(self.plan.epochs):
            passes = []
            saved_at = None
            if saves:
                saved_at = self._saved_positions(epoch)
            for reader in readers:
                passes.append(
                    reader.read(
                        epoch, stop=self.plan.limit, earlier=earlier, saved_at=saved_at
                    )
                )
            earlier += len(passes[0].batches)
            epochs.append(self.ranks.gather(passes))
        _close(readers)
        return epochs

    def _resume(
        self,
        saved: list[SavedPosition],
        epoch: int,
        start: int,
        *,
        earlier: int | None = None,
        saved_at: Container[int] | None = None,
    ) -> list[RankPass]:
        """Return what each rank reads from a position up to the end of its epoch."""
        readers = self._open(saved)
        if earlier is None:
            earlier = sum(map(self._count, range(epoch)))
        passes = []
        for reader in readers:
            passes.append(
                reader.read(
                    epoch,
                    start,
                    self.plan.limit,
                    earlier=earlier,
                    saved_at=saved_at,
                )
            )
        _close(readers)
        return self.ranks.gather(passes)


def _close(readers: list[RankReader]) -> None:
    for reader in readers:
        reader.feed.close()
