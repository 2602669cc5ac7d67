"""Creates the windows of an epoch: k micro-batches of the feed and their weights, equally many on every rank.

What every rank knows without asking: the length of a window in micro-batches, and the numbers of steps and batches
before it. Of map-style data also the samples of each global batch, so that the weights of all ranks follow from the
position alone (``Feed.even``). Where the weights depend on what is in a batch, or a stream may end at any batch, the
ranks make one small exchange on the CPU when the window is loaded: micro-batches, weights, samples.

A window is loaded whole before its first forward. Its total weight must be known by then, because each loss is
multiplied by its share of it: gradients are never divided afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from time import perf_counter
from typing import Any, Final, Protocol, TypeAlias, cast, final

from trainer_kit.core.errors import DataError
from trainer_kit.core.progress import Progress
from trainer_kit.core.protocols import Group
from trainer_kit.core.seed import preserved_rng
from trainer_kit.data import EMPTY, MISSING, Feed
from trainer_kit.step.time_account import DataWait
from trainer_kit.step.window import Window, WindowRunner

__all__ = ["WindowLoader"]

_NO_BATCH: Final = object()
# Whatever the user's loader yields.
_Batch: TypeAlias = Any
# Batches of the feed, each with its size; those that are copied early have their weight, too.
_Items: TypeAlias = Iterator[Any]
_Prefetch: TypeAlias = Callable[[Iterable[Any]], _Items]


class _Padding(Protocol):
    def provide(self, batches: Sequence[_Batch]) -> _Batch: ...


@final
class WindowLoader:
    """Creates the windows of a fit, each complete.

    The gradient of a step is ``sum(w_i g_i) / sum(w_i)`` over the micro-batches of the window and all data ranks; an
    engine that divides by ``divisor`` gets each loss times ``w_i * divisor / sum(w_i)``. Nothing is multiplied where
    that is 1 by construction, and nothing is exchanged where the weights of all ranks are known beforehand.

    Args:
        feed: this rank's batches.
        runner: what windows run with.
        group: the ranks whose losses are weighted together.
        divisor: the number by which the engine divides the sum over the ranks.
        parts: how many of these ranks share a batch; ``loss_weight`` then weighs this rank's part.
        loss_weight: the user's function, or None to weight by the number of samples.
        weighting: False for an unweighted mean over micro-batches and ranks.
        limit: micro-batches per epoch, or None if unknown.
        ahead: wraps an iterator so that batches are copied to the device early, or None.
        length: micro-batches per window.
        padding: provides a batch for a rank that never had one; None if no padding batch is needed.

    Attributes:
        window: the one that was created last; before the first of an epoch, one without micro-batches.
        data_wait: how long steps have waited for their windows.
    """

    def __init__(
        self,
        feed: Feed,
        runner: WindowRunner,
        group: Group,
        divisor: int,
        *,
        parts: int = 1,
        loss_weight: Callable[[_Batch], Any] | None = None,
        weighting: bool = True,
        limit: int | None = None,
        ahead: _Prefetch | None = None,
        length: int = 1,
        padding: _Padding | None = None,
    ) -> None:
        self.feed = feed
        self.runner = runner
        self.group = group
        self.divisor = divisor
        self.parts = parts
        self.loss_weight = loss_weight
        self.weighting = weighting
        self.limit = limit
        self.ahead = ahead
        self.length = length
        self.padding = padding
        self._left_out: set[int] = set()
        self.window = self._closed_window()
        # One tuple, so that another thread never reads parts of two.
        self.data_wait: DataWait = (0.0, 0.0, False)
        self._measure: Callable[[float, float], None] | None = None
        # Micro-batches left in the run: a batch that is read beyond them and not used would be lost on a resume.
        self._budget: int | None = None
        # Whether the weights of all ranks are known beforehand.
        self._by_samples = False
        # Micro-batches before this one exist on every rank; only later ones may need a padding batch.
        self._last_even = -1
        # More batches, while the length of a window is not known before its first one is read.
        self._source: _Items | None = None
        self._batches: _Items = iter(())
        # A weight matters only in relation to other batches.
        self._asks_for_sizes = weighting and loss_weight is None

    # -- settings ----------------------------------------------------------------------------------------------

    def set_length(self, length: int) -> None:
        """Set the micro-batches per window, from the next window on."""
        self.length = length

    def measure_with(self, measure: Callable[[float, float], None] | None) -> None:
        """Have the length of the next window set by its first micro-batch.

        Args:
            measure: called once with the samples and the weight of that micro-batch over all ranks, before its window
                is complete; it sets the length. None: the length is known.
        """
        self._measure = measure

    def read_from(self, feed: Feed, limit: int | None, ahead: _Prefetch | None) -> None:
        """Read other batches from the next epoch on; those of before are closed."""
        self.feed.close()
        self.feed = feed
        self.limit = limit
        self.ahead = ahead

    def leave_out(self, steps: Iterable[int]) -> None:
        """Read and count the windows of these steps, but do not train on them."""
        self._left_out.update(steps)

    def weigh_by_samples(self) -> None:
        """Do without the user's ``loss_weight``: batches have no values."""
        self.loss_weight = None

    # -- epochs ------------------------------------------------------------------------------------------------

    def start_epoch(self, steps_left: int | None) -> None:
        """Get ready for an epoch; ``steps_left`` steps are left in the run, None for no limit."""
        self._budget = None
        if steps_left is not None:
            self._budget = steps_left * self.length
        # A rank that lacks a batch later runs the last one of an earlier epoch as padding.
        self.window = self._closed_window(self.window.batch, self.window.earlier)

    def epoch(self, progress: Progress) -> Iterator[Window]:
        """The windows of the running epoch, from the position in ``progress``."""
        start = progress.epoch_batch
        batches: _Items = iter(self.feed.sized_epoch(progress.epoch, start))
        if self.limit is not None:
            # A resumed run may be beyond its limit.
            batches = islice(batches, max(0, self.limit - start))
        if self.ahead is not None:
            batches = self._read_ahead(self._weighed(batches), self.ahead)
        self._batches = batches
        if self.group.size > 1:
            windows = self._windows_of_ranks(batches, start)
        elif self.ahead is not None:
            windows = self._weighed_windows(batches, start)
        elif self.loss_weight is not None:
            windows = self._weighed_windows(self._weighed(batches), start)
        else:
            windows = self._sized_windows(batches, start)
        # Generators are wrapped around the windows only where they have work: each one is a call in every step.
        if self._left_out:
            windows = self._without_left_out(windows)
        if self.feed.stateful:
            windows = self._noting_position(windows)
        return windows

    def has_more(self) -> bool:
        """Whether the epoch that is being left has another batch on any rank, which this call reads and discards.

        Every rank must call it. It draws nothing from the global generators.
        """
        # Reading may draw (a loader without workers): a run that asks must go on like one that does not.
        with preserved_rng():
            has_more = next(self._batches, _NO_BATCH) is not _NO_BATCH
        if self.group.size == 1:
            return has_more
        return any(row[0] for row in self.group.agree([has_more]))

    def release(self) -> None:
        """Release the batches of a run that is over, or of an epoch that an error ended."""
        self._batches = iter(())
        self.window.release()

    def _without_left_out(self, windows: Iterator[Window]) -> Iterator[Window]:
        """Empty the windows of the steps that are left out: nothing is trained on them."""
        for window in windows:
            if window.started + 1 in self._left_out:
                window.skip()
            yield window

    def _noting_position(self, windows: Iterator[Window]) -> Iterator[Window]:
        """Drop the states of the loader before each window that begins."""
        for window in windows:
            # A checkpoint inside this window resumes at its first batch, so that state is kept.
            self.feed.loader_state.forget(window.first)
            yield window

    def _read_ahead(self, items: _Items, ahead: _Prefetch) -> _Items:
        """Copy batches while the device computes; read no batch beyond the end of the run."""
        if self._budget is not None:
            yield from ahead(islice(items, self._budget))
        # The budget is used up before the run is over where a callback has raised the limit or has made windows longer
        # since the epoch began. Where the data have ended before, nothing is left to yield.
        yield from ahead(items)

    # -- one rank ----------------------------------------------------------------------------------------------

    def _sized_windows(self, batches: _Items, start: int) -> Iterator[Window]:
        """One rank, weights by samples: no communication, and no factor for a window of one micro-batch."""
        runner = self.runner
        waited = self.data_wait[0]
        wait_start = perf_counter()
        self.data_wait = (waited, wait_start, True)
        for batch, size in batches:
            sizes = [size]
            if self._measure is not None:
                self._measure_window(sizes, sizes)
            if self.length == 1:
                # The usual case. Made here, not in `_window`: that is a Python call less in every step.
                self.window = Window(
                    runner=runner,
                    batches=[batch],
                    sizes=sizes,
                    weights=sizes,
                    factors=None,
                    count=1,
                    first=start,
                    started=runner.progress.step,
                    index=self.window.index,
                )
            else:
                loaded = [batch]
                for next_batch, next_size in islice(batches, self.length - 1):
                    loaded.append(next_batch)
                    sizes.append(next_size)
                self.window = self._window(loaded, sizes, sizes, sum(sizes), start)
                if self._asks_for_sizes and len(loaded) > 1:
                    self._ask_for_sizes()
            start += self.window.count
            now = perf_counter()
            self.data_wait = (waited + now - wait_start, now, False)
            yield self.window
            waited = self.data_wait[0]
            wait_start = perf_counter()
            self.data_wait = (waited, wait_start, True)

    def _weighed_windows(self, items: _Items, start: int) -> Iterator[Window]:
        """One rank, with the user's weights or with batches that were copied early."""
        while True:
            waited = self.data_wait[0]
            wait_start = perf_counter()
            self.data_wait = (waited, wait_start, True)
            loaded = list(islice(items, self.length))
            if not loaded:
                return
            if self._measure is not None:
                size, weight, _ = loaded[0]
                self._measure_window([size], [weight])
                loaded += islice(items, self.length - len(loaded))
            sizes = [size for size, _, _ in loaded]
            weights = [weight for _, weight, _ in loaded]
            batches = [batch for _, _, batch in loaded]
            self.window = self._window(batches, sizes, weights, sum(weights), start)
            if self._asks_for_sizes and len(batches) > 1:
                self._ask_for_sizes()
            start += self.window.count
            now = perf_counter()
            self.data_wait = (waited + now - wait_start, now, False)
            yield self.window

    # -- several ranks -----------------------------------------------------------------------------------------

    def _windows_of_ranks(self, batches: _Items, start: int) -> Iterator[Window]:
        """Several ranks: windows have the same length on all of them."""
        self._by_samples = self.feed.even and self.loss_weight is None
        # The last batch of an epoch may be missing on some ranks; of an unknown length, any may be. So an exchange for
        # padding is made at the last window only, or at each one, on every rank alike.
        self._last_even = -1
        if self.feed.length is not None:
            self._last_even = self.feed.length - 1
        self._source = None
        if self._measure is not None:
            self._source = batches
        load = self._load_together
        if self._by_samples and self.ahead is None:
            load = self._load_one
        while True:
            waited = self.data_wait[0]
            wait_start = perf_counter()
            self.data_wait = (waited, wait_start, True)
            window = load(list(islice(batches, self.length)), start)
            if window is None:
                return
            self.window = window
            if self._asks_for_sizes:
                self._ask_for_sizes()
            start += window.count
            now = perf_counter()
            self.data_wait = (waited + now - wait_start, now, False)
            yield window

    def _load_one(self, items: list[Any], start: int) -> Window | None:
        """A faster `_load_together` for a window of one batch with a known number of samples."""
        # The usual case of a step without accumulation, which pays for none of its arithmetic.
        if len(items) != 1 or items[0] is MISSING or self._measure is not None:
            return self._load_together(items, start)
        samples = self.feed.samples(start)
        if samples is None:
            return self._load_together(items, start)
        batch, size = items[0]
        factor = 1.0
        if self.weighting:
            factor = size * self.divisor / (samples * self.parts)
        uneven = start >= self._last_even
        before = self.window
        earlier = before.earlier
        if uneven:
            earlier = self._earlier_batch([batch])
        return Window(
            runner=self.runner,
            batches=[batch],
            sizes=[samples],
            weights=[size],
            # None: the window then multiplies no loss, which would cost a kernel.
            factors=None if factor == 1.0 else [factor],
            count=1,
            first=start,
            started=self.runner.progress.step,
            uneven=uneven,
            batch=before.batch,
            index=before.index,
            earlier=earlier,
        )

    def _load_together(self, items: list[Any], start: int) -> Window | None:
        """This rank's micro-batches; None once no rank has any left. Windows are equally long on every rank."""
        sizes, weights, batches = self._columns(items)
        # The first window of a run whose length follows from its first micro-batch over all ranks: the length that was
        # read with was 1, and is another one now.
        if self._measure is not None and self._source is not None:
            source, self._source = self._source, None
            self._measure_window(sizes, weights)
            later_items = list(islice(source, self.length - 1))
            more_sizes, more_weights, more_batches = self._columns(later_items)
            sizes = sizes + more_sizes
            weights = weights + more_weights
            batches = batches + more_batches
        samples = self._known_samples(len(batches), start)
        if samples is not None:
            if not batches:
                return None
            # Ranks that share a batch each weigh their part by all of its samples.
            total = float(sum(samples) * self.parts)  # no sync point: numbers
            uneven = start + len(batches) > self._last_even
            return self._window(batches, samples, weights, total, start, uneven)
        present = sum(batch is not None for batch in batches)
        # The one exchange of a step, a few numbers on the CPU: on the device it would be a sync point.
        rows = self.group.agree([len(batches), sum(weights), sum(sizes), present])
        longest = int(max(row[0] for row in rows))
        # The epoch ends for all ranks at once, when the longest one is through: no sample is left out.
        if longest == 0:
            return None
        missing = longest - len(batches)
        samples = _distribute(round(sum(row[2] for row in rows)) // self.parts, longest)
        total = sum(row[1] for row in rows)
        uneven = len({row[3] for row in rows}) > 1
        if self._by_samples:
            uneven = start + longest > self._last_even
        return self._window(
            batches + [None] * missing,
            samples,
            weights + [0.0] * missing,
            total,
            start,
            uneven,
        )

    def _known_samples(self, count: int, start: int) -> list[int] | None:
        """The samples of each micro-batch over all ranks; None where only an exchange can tell."""
        if not self._by_samples:
            return None
        samples = [self.feed.samples(start + index) for index in range(count)]
        if None in samples:
            return None
        return cast("list[int]", samples)

    def _columns(self, items: list[Any]) -> tuple[list[int], list[float], list[_Batch]]:
        """The sizes, weights and batches of a window."""
        if self.ahead is not None:
            sizes = [size for size, _, _ in items]
            weights = [weight for _, weight, _ in items]
            batches = [batch for _, _, batch in items]
            return sizes, weights, batches
        sizes = [size for _, size in items]
        # EMPTY marks this rank's share of a batch with fewer samples than ranks.
        batches = []
        for batch, _ in items:
            if batch is EMPTY:
                batch = None
            batches.append(batch)
        if self.loss_weight is None:
            return sizes, list(sizes), batches
        # The user's function gets no batch that does not exist.
        weights = [0.0] * len(batches)
        for index, batch in enumerate(batches):
            if batch is not None:
                weights[index] = self._weigh(batch, sizes[index])
        return sizes, weights, batches

    def _earlier_batch(self, batches: list[_Batch]) -> _Batch:
        """The batch that this rank runs as padding."""
        before = self.window
        if self.padding is None:
            return before.earlier
        provided = self.padding.provide([*batches, before.batch, before.earlier])
        if provided is None:
            return before.earlier
        return provided

    # -- one window --------------------------------------------------------------------------------------------

    def _closed_window(self, batch: _Batch = None, earlier: _Batch = None) -> Window:
        """A window without micro-batches, for the time before the first one of an epoch."""
        return Window(
            runner=self.runner,
            batches=[],
            sizes=[],
            weights=[],
            factors=None,
            count=0,
            first=0,
            started=-1,
            batch=batch,
            earlier=earlier,
        )

    def _window(
        self,
        batches: list[_Batch],
        sizes: list[int],
        weights: Sequence[float],
        total: float,
        start: int,
        uneven: bool = False,
    ) -> Window:
        """The window of these micro-batches; ``total`` is the weight of all ranks."""
        before = self.window
        tokens = 0
        if self.loss_weight is not None:
            tokens = round(total)
        # A padding batch is looked for together, by all ranks, where any of them may need it.
        earlier = before.earlier
        if uneven:
            earlier = self._earlier_batch(batches)
        return Window(
            runner=self.runner,
            batches=batches,
            sizes=sizes,
            weights=weights,
            factors=self._factors(weights, total),
            count=len(batches),
            first=start,
            started=self.runner.progress.step,
            tokens=tokens,
            uneven=uneven,
            # A window without a batch of this rank still has the last one that ran.
            batch=before.batch,
            index=before.index,
            earlier=earlier,
        )

    def _factors(self, weights: Sequence[float], total: float) -> list[float] | None:
        """What each loss is multiplied by; None where that is 1, so that nothing is multiplied."""
        if not self.weighting:
            count = len(weights)
            if count == 1:
                return None
            return [1 / count] * count
        if total <= 0:
            raise DataError(
                "the weights of an accumulation window sum to zero or less",
                found=f"weights {weights}",
                fix="return a positive number from loss_weight",
            )
        factors = [weight * self.divisor / total for weight in weights]
        if factors.count(1.0) == len(factors):
            return None
        return factors

    def _measure_window(self, sizes: Sequence[float], weights: Sequence[float]) -> None:
        """Set the length of the window from its first micro-batch; every rank calls it."""
        # It returns no length: it is the user's function of `set_accumulation`, and sets the length there, as it may at
        # any other time. Taken first, because that call replaces it.
        measure, self._measure = self._measure, None
        assert measure is not None
        # Over all ranks, so that all of them compute the same length: windows have as many micro-batches everywhere.
        sums = [sum(sizes), sum(weights)]
        if self.group.size > 1:
            rows = self.group.agree(sums)
            sums = [sum(column) for column in zip(*rows, strict=True)]
        samples, weight = sums
        # Ranks that share a batch count its samples each.
        measure(samples / self.parts, weight)

    def _ask_for_sizes(self) -> None:
        """Ask once for what the feed cannot tell: the number of samples of a batch of the user's own kind."""
        self._asks_for_sizes = False
        self.feed.ask_for_sizes("define loss_weight(self, batch) on the module")

    def _weighed(self, batches: _Items) -> Iterator[tuple[int, float, _Batch]]:
        # Not map(): a StopIteration from the user's loss_weight would look like the end of the batches.
        return (
            (0, 0.0, None)
            if batch is EMPTY
            else (size, self._weigh(batch, size), batch)
            for batch, size in batches
        )

    def _weigh(self, batch: _Batch, size: int) -> float:
        if self.loss_weight is None:
            return float(size)  # no sync point: a number
        # On the host, before the copy: reading a tensor here does not wait for the device.
        return float(self.loss_weight(batch))  # no sync point


def _distribute(samples: int, count: int) -> list[int]:
    """About equally many samples for each of ``count`` micro-batches; the last one has the remainder."""
    sizes = [samples // count] * count
    sizes[-1] += samples % count
    return sizes
