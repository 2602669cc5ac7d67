"""Accumulation windows: k micro-batches of the feed and their weights, equally many on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, cast, final

from trainer_kit.core.errors import DataError
from trainer_kit.core.progress import Progress
from trainer_kit.core.protocols import Group
from trainer_kit.core.seed import preserved_rng
from trainer_kit.data import EMPTY, MISSING, Feed
from trainer_kit.step.micro_batch import MicroBatches

__all__ = ["WindowLoader"]

_OVER: Final = object()


@final
class WindowLoader:
    """Loads windows into a `MicroBatches`.

    The gradient of a step is ``sum(w_i g_i) / sum(w_i)`` over the micro-batches of the window and all data ranks; an
    engine that divides by ``divisor`` gets each loss times ``w_i * divisor / sum(w_i)``. Nothing is multiplied where
    that is 1 by construction, and nothing is exchanged where the weights of all ranks are known beforehand.

    Args:
        feed: this rank's batches.
        micro: the object that windows are loaded into.
        group: the ranks whose losses are weighted together.
        parts: how many of these ranks share a batch; ``loss_weight`` then weighs this rank's part.
        divisor: the number by which the engine divides the sum over the ranks.
        loss_weight: the user's function, or None to weight by the number of samples.
        weighting: False for an unweighted mean over micro-batches and ranks.
        ahead: wraps an iterator so that batches are copied to the device early, or None.

    Attributes:
        length: micro-batches per window, from the next window on.
        limit: micro-batches per epoch, or None if unknown.
        provide: called for a window in which a rank may lack a micro-batch; None if no padding batch is needed.
        budget: the micro-batches left in the run; None for no limit.
        left_out: the steps whose windows are read and counted, but not trained on.
        measure: called once with the samples and the weight of the next micro-batch over all ranks, before its window
            is complete; it sets ``length``. None: ``length`` is known.
    """

    def __init__(
        self,
        feed: Feed,
        micro: MicroBatches,
        group: Group,
        divisor: int,
        *,
        parts: int = 1,
        loss_weight: Callable[[Any], Any] | None = None,
        weighting: bool = True,
        limit: int | None = None,
        ahead: Callable[[Iterable[Any]], Iterator[Any]] | None = None,
    ) -> None:
        self.feed, self.micro, self.group, self.divisor, self.parts = (
            feed,
            micro,
            group,
            divisor,
            parts,
        )
        self.loss_weight, self.weighting, self.limit, self.ahead = (
            loss_weight,
            weighting,
            limit,
            ahead,
        )
        self.length = 1
        self.left_out: set[int] = set()
        self._by_samples = False
        self.provide: Callable[[], None] | None = None
        self.budget: int | None = None
        self.measure: Callable[[float, float], None] | None = None
        self._source: Iterator[Any] | None = (
            None  # more batches, while `measure` is to be called
        )
        self._batches: Iterator[Any] = iter(())
        # A weight matters only in relation to other batches.
        self._asks = weighting and loss_weight is None

    def epoch(self, progress: Progress) -> Iterator[MicroBatches]:
        """The windows of the running epoch, from the position in ``progress``."""
        start = progress.epoch_batch
        batches: Iterator[Any] = iter(self.feed.sized_epoch(progress.epoch, start))
        if self.limit is not None:
            batches = islice(
                batches, max(0, self.limit - start)
            )  # a resumed run may be beyond its limit
        if self.ahead is not None:
            batches = self._ahead(self._weighed(*pair) for pair in batches)
        self._batches = batches
        if self.group.size > 1:
            windows = self._together(batches, start)
        elif self.ahead is not None or self.loss_weight is not None:
            windows = self._weighed_windows(batches, start)
        else:
            windows = self._alone(batches, start)
        if self.left_out:
            windows = self._without(windows, progress)
        return self._tracked(windows) if self.feed.stateful else windows

    def has_more(self) -> bool:
        """Whether the epoch that is being left has another batch on any rank, which this call reads and discards.

        Every rank must call it. It draws nothing from the global generators.
        """
        with preserved_rng():
            more = next(self._batches, _OVER) is not _OVER
        if self.group.size == 1:
            return more
        return any(row[0] for row in self.group.agree([more]))

    def release(self) -> None:
        """Release the batches of an epoch that an error ended."""
        self._batches = iter(())

    def _without(
        self, windows: Iterator[MicroBatches], progress: Progress
    ) -> Iterator[MicroBatches]:
        """Replace the windows of steps in ``left_out`` by windows without micro-batches: nothing is trained on them."""
        for micro in windows:
            if micro.started + 1 in self.left_out:
                progress.batch += micro.count
                progress.epoch_batch += micro.count
                micro.count, micro.batch = 0, None
            yield micro

    def _tracked(self, windows: Iterator[MicroBatches]) -> Iterator[MicroBatches]:
        for micro in windows:
            self.feed.loader_state.forget(micro.first)
            yield micro

    def _alone(self, batches: Iterator[Any], start: int) -> Iterator[MicroBatches]:
        """One rank, weights by samples: no communication, and no factor for a window of one micro-batch."""
        micro, one, sizes = self.micro, [None], [0]
        for batch, size in batches:
            if self.length == 1 and self.measure is None:
                one[0], sizes[0] = batch, size
                (
                    micro.batches,
                    micro.sizes,
                    micro.weights,
                    micro.factors,
                    micro.count,
                ) = (
                    one,
                    sizes,
                    sizes,
                    None,
                    1,
                )
            else:
                if self.measure is not None:
                    self._measured([size], [size])
                window = [(batch, size), *islice(batches, self.length - 1)]
                self._load([pair[0] for pair in window], [pair[1] for pair in window])
            micro.first, micro.started = start, micro.progress.step
            micro.fresh, micro.contributed = True, False
            start += micro.count
            yield micro

    def _load(
        self,
        batches: list[Any],
        sizes: list[int],
        weights: Sequence[float] | None = None,
    ) -> None:
        micro = self.micro
        micro.batches, micro.sizes, micro.count = batches, sizes, len(batches)
        micro.weights = sizes if weights is None else weights
        self._weigh_window(micro.weights, sum(micro.weights))
        if self._asks and len(batches) > 1:
            self._ask()

    def _weighed_windows(
        self, batches: Iterator[Any], start: int
    ) -> Iterator[MicroBatches]:
        """One rank, with the user's weights or with batches that were copied early."""
        micro = self.micro
        # Not map(): a StopIteration from the user's loss_weight would look like the end of the batches.
        items = (
            batches
            if self.ahead is not None
            else (self._weighed(*pair) for pair in batches)
        )
        while window := list(islice(items, self.length)):
            if self.measure is not None:
                self._measured([window[0][0]], [window[0][1]])
                window += islice(items, self.length - len(window))
            self._load(
                [item[2] for item in window],
                [item[0] for item in window],
                [item[1] for item in window],
            )
            micro.first, micro.started = start, micro.progress.step
            micro.fresh, micro.contributed = True, False
            start += micro.count
            yield micro

    def _together(self, batches: Iterator[Any], start: int) -> Iterator[MicroBatches]:
        """Several ranks: windows have the same length on all of them."""
        micro = self.micro
        self._by_samples = self.feed.even and self.loss_weight is None
        length = self.feed.length
        last = -1 if length is None else length - 1
        load = (
            self._load_one
            if self._by_samples and self.ahead is None
            else self._load_together
        )
        self._source = batches if self.measure is not None else None
        while load(list(islice(batches, self.length)), start):
            if self._by_samples:  # else it was agreed
                micro.uneven = start + micro.count > last
            if micro.uneven and self.provide is not None:
                self.provide()
            if self._asks:
                self._ask()
            micro.first, micro.started = start, micro.progress.step
            micro.fresh, micro.contributed = True, False
            start += micro.count
            yield micro

    def _ask(self) -> None:
        self._asks = False
        self.feed.ask_for_sizes("define loss_weight(self, batch) on the module")

    def _ahead(self, items: Iterator[Any]) -> Iterator[Any]:
        """Copy batches while the device computes; read no batch beyond the end of the run."""
        assert self.ahead is not None
        for part in (
            (islice(items, self.budget), items) if self.budget is not None else (items,)
        ):
            yield from self.ahead(part)

    def _load_together(self, window: list[Any], start: int) -> bool:
        """Load this rank's micro-batches; False once no rank has any left. Windows are equally long on every rank."""
        micro = self.micro
        sizes, weights, batches = self._columns(window)
        if self.measure is not None and self._source is not None:
            source, self._source = self._source, None
            self._measured(sizes, weights)
            rest = self._columns(list(islice(source, self.length - 1)))
            sizes, weights, batches = (
                old + new
                for old, new in zip((sizes, weights, batches), rest, strict=True)
            )
        known = (
            [self.feed.samples(start + i) for i in range(len(batches))]
            if self._by_samples
            else [None]
        )
        if None not in known:
            if not batches:
                return False
            micro.sizes = cast("list[int]", known)
            total: float = sum(micro.sizes) * self.parts
        else:
            there = sum(batch is not None for batch in batches)
            rows = self.group.agree(
                [len(batches), sum(weights), sum(sizes), there]
            )  # one small exchange on the CPU
            micro.uneven = len({row[3] for row in rows}) > 1
            longest, total = (
                int(max(row[0] for row in rows)),
                sum(row[1] for row in rows),
            )
            if longest == 0:
                return False
            missing = longest - len(batches)
            batches, weights = batches + [None] * missing, [*weights, *[0.0] * missing]
            samples = round(sum(row[2] for row in rows)) // self.parts
            micro.sizes = [samples // longest] * longest
            micro.sizes[-1] += samples % longest
        micro.count, micro.batches, micro.weights = len(batches), batches, weights
        self._weigh_window(weights, total)
        return True

    def _columns(self, window: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """The sizes, weights and batches of a window."""
        if self.ahead is not None:
            return (
                [item[0] for item in window],
                [item[1] for item in window],
                [item[2] for item in window],
            )
        batches = [None if batch is EMPTY else batch for batch, _ in window]
        weights = sizes = [size for _, size in window]
        if self.loss_weight is not None:
            weights = [
                0.0 if b is None else self._weigh(b, n)
                for b, n in zip(batches, sizes, strict=True)
            ]
        return sizes, weights, batches

    def _measured(self, sizes: Sequence[float], weights: Sequence[float]) -> None:
        """Set the length of the window from its first micro-batch; every rank calls it."""
        measure, self.measure = self.measure, None
        assert measure is not None
        mine = [sum(sizes), sum(weights)]
        rows = self.group.agree(mine) if self.group.size > 1 else [mine]
        measure(sum(row[0] for row in rows) / self.parts, sum(row[1] for row in rows))

    def _load_one(self, window: list[Any], start: int) -> bool:
        """A faster `_load_together` for a window of one batch with a known number of samples."""
        samples = (
            self.feed.samples(start)
            if len(window) == 1 and window[0] is not MISSING
            else None
        )
        if samples is None or self.measure is not None:
            return self._load_together(window, start)
        micro, (batch, size) = self.micro, window[0]
        micro.batches, micro.sizes, micro.weights, micro.count = (
            [batch],
            [samples],
            [size],
            1,
        )
        factor = size * self.divisor / (samples * self.parts) if self.weighting else 1.0
        micro.factors = None if factor == 1.0 else [factor]
        return True

    def _weigh_window(self, weights: Sequence[float], total: float) -> None:
        self.micro.factors = self._factors(weights, total)
        if self.loss_weight is not None:
            self.micro.tokens = round(total)

    def _factors(self, weights: Sequence[float], total: float) -> list[float] | None:
        if not self.weighting:
            return None if len(weights) == 1 else [1 / len(weights)] * len(weights)
        if total <= 0:
            raise DataError(
                "the weights of an accumulation window sum to zero or less",
                found=f"weights {weights}",
                fix="return a positive number from loss_weight",
            )
        factors = [weight * self.divisor / total for weight in weights]
        return None if all(factor == 1.0 for factor in factors) else factors

    def _weighed(self, batch: Any, size: int) -> tuple[int, float, Any]:
        if batch is EMPTY:
            return 0, 0.0, None
        return size, self._weigh(batch, size), batch

    def _weigh(self, batch: Any, size: int) -> float:
        # On the host, before the copy: reading a tensor here does not wait for the device.
        return float(
            size if self.loss_weight is None else self.loss_weight(batch)
        )  # no sync point
