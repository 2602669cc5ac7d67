"""Where the reading of a loader is, so that another process can go on from there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, final

from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.seed import preserved_rng, restore_rng, rng_state
from trainer_kit.data.generators import generator_states, restore_generators
from trainer_kit.data.order import MISSING
from trainer_kit.data.place import Source, kind_of

__all__ = ["Track"]


@final
class Track:
    """Reads a source, and keeps its state after each of the last batches.

    Reading may be ahead of training, so the state that a checkpoint needs is not that of the moment. A source that
    has none (`Source.stateful`) is read as it is.

    A checkpoint has the state ahead of the last batch, which is read once more and thrown away: only so is a loader in
    the condition in which it was, at the end of its data too, and whether it starts again with each epoch or goes on.
    Nothing that this reads draws from the global generators.

    Args:
        source: is read.
        size: data ranks.
    """

    def __init__(self, source: Source, size: int) -> None:
        self._source, self._size = source, size
        self._states: dict[int, Any] = {}
        self._epoch, self._at, self._ended = -1, 0, False
        self._opened: tuple[int, int] | None = None
        self._before: dict[str, Any] | None = None
        self._rng: dict[str, Any] | None = None
        self._kind = [kind_of(source), len(source.workers), *(unit for unit, _ in source.stride)]

    def epoch(self, epoch: int, start: int) -> Iterator[Any]:
        """The batches of an epoch from ``start`` on; see `Feed.epoch`."""
        source = self._source
        drains = not source.indexed and not source.stateful
        if drains and not start and not (source.once and self._rng):
            self._rng = rng_state()  # a stream that is read again draws its order as it did
        unread, before = self._opened is None, self.state_dict(epoch, start)
        if unread and before is not None:
            with preserved_rng():
                iterator = self._go_on(before, epoch, start)
        else:
            iterator = source.epoch(epoch, start)
        self._before, self._opened = before, (epoch, start)
        self._epoch, self._at, self._ended = epoch, start, False
        if not source.stateful:
            return iterator
        self._states = {}
        if unread and before is None and not start:
            self._states[0] = None  # a new loader is the same
        elif unread and before is not None and before["epoch"] == epoch and not before["divided"]:
            self._states[before["batch"]] = before["state"]
            if before["skip"]:
                self._states[start] = source.state()
        return self._noted(iterator, start)

    def _noted(self, batches: Iterator[Any], at: int) -> Iterator[Any]:
        state, states = self._source.state, self._states
        for batch in batches:
            at += 1
            if batch is not MISSING:  # its loader may have ended, so the state before it is kept
                states[at] = state()
            self._at = at
            yield batch
        self._ended = True

    def forget(self, first: int) -> None:
        """A window that begins with batch ``first`` was loaded: what is older is not asked for any more."""
        states = self._states
        keep = min(first, max(states, default=0)) - 1
        for at in [at for at in states if at < keep]:
            del states[at]

    def state_dict(self, epoch: int | None = None, batch: int = 0, read: int = 0) -> dict[str, Any] | None:
        """What a checkpoint keeps besides these numbers; None for nothing.

        Args:
            epoch: completed epochs; None between two of them.
            batch: completed micro-batches of the running epoch.
            read: completed micro-batches of the whole run.
        """
        source = self._source
        if self._opened is None or self._opened == (epoch, batch):
            return self._before
        inside = epoch == self._epoch
        if not source.stateful and not source.indexed and (inside or source.once):
            passed = read - batch if source.once else 0
            return {**self._record(batch, source.state()), "epoch": epoch, "passed": passed, "rng": self._rng}
        if not source.stateful and not source.generators:
            return None
        if not source.stateful and inside:
            return self._record(batch, source.state())
        record = self._record(0, None)
        if inside or source.rolls:
            last = min(batch, self._at) if inside else self._at
            # Of an epoch of one batch there is no state ahead of it.
            ahead = max((at for at in self._states if at < last), default=last)
            record = self._record(ahead, self._states.get(ahead))
            # Where this rank's data ended before the others' it is the end that is gone on from.
            record.update(skip=last - ahead, ended=self._ended and (not inside or batch > last))
        if not inside:
            record["generators"] = generator_states(source.generators)
        return record

    def _record(self, batch: int, state: Any) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "batch": batch,
            "state": state,
            "skip": 0,
            "ended": False,
            "passed": 0,
            "generators": None,
            "rng": None,
            "divided": False,
            "kind": self._kind,
            "workers": self._source.workers,
        }

    def load_state_dict(self, ranks: Sequence[Mapping[str, Any] | None], rank: int) -> None:
        """Begin where a checkpoint says.

        Args:
            ranks: what `state_dict` gave on each rank.
            rank: this one.

        Raises:
            CheckpointError: the loader cannot begin with that.
        """
        saved = ranks[rank] if len(ranks) == self._size else self._divided_anew(ranks[-1], len(ranks))
        if saved is None or list(saved["kind"]) != self._kind:
            return  # of another loader, so that only the position holds
        then, now = list(saved["workers"]), self._source.workers
        if then != now and (saved["state"] is not None or saved["skip"]):
            raise CheckpointError(
                "loaders",
                "workers",
                f"where the data are is known for {_named(then)} worker processes, and there are {_named(now)}",
                fix=f"resume with num_workers={_named(then)}",
            )
        self._before = dict(saved)

    def _divided_anew(self, last: Mapping[str, Any] | None, ranks: int) -> dict[str, Any] | None:
        """The last rank has read all that the others have: for any number of ranks it is there that they go on."""
        if last is None or not self._source.stateful:
            return None if last is None else dict(last)
        saved = dict(last)
        if saved["generators"] is not None and saved["ended"]:  # the next pass begins at the beginning
            return {**saved, "state": None, "skip": 0, "ended": False}
        if saved["state"] is not None or saved["skip"]:
            saved["state"] = self._source.divided_anew(saved["state"], saved["skip"] * ranks)
        return {**saved, "skip": 0, "divided": True}

    def _go_on(self, saved: Mapping[str, Any], epoch: int, start: int) -> Iterator[Any]:
        source = self._source
        if saved["rng"] is not None:
            self._rng = saved["rng"]
            restore_rng(self._rng)
        if saved["epoch"] == epoch and saved["passed"]:
            return source.epoch(epoch, start + saved["passed"])
        if saved["epoch"] == epoch:
            iterator = source.epoch(epoch, saved["batch"] if source.stateful else start, 0, saved["state"])
            _pass(iterator, saved)
            return iterator
        if saved["state"] is not None or saved["skip"]:
            _pass(source.epoch(saved["epoch"], saved["batch"], 0, saved["state"]), saved)
        restore_generators(source.generators, saved["generators"] or ())
        return source.epoch(epoch, start)


def _named(workers: Sequence[int]) -> str:
    return ", ".join(map(str, workers))


def _pass(batches: Iterator[Any], saved: Mapping[str, Any]) -> None:
    for _ in islice(batches, saved["skip"]):
        pass
    if saved["ended"]:
        for _ in batches:
            pass
