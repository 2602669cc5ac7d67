"""Which of the checkpoints that were asked for stay, and from when on the others may be deleted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Lock
from typing import Final, final

__all__ = ["Retention"]

_LOCK: Final = Lock()
"""Held for microseconds, so one for all: callbacks stay things that can be copied."""


@final
class Retention:
    """The best ``keep`` checkpoints by score, the newest, and what stays in case that one of them is damaged.

    What is kept follows from what was *asked for*, so it does not depend on when a save was done. What may be deleted
    follows from what is durable: a checkpoint goes only once the one that took its place is there. A save that never
    became durable gives its place back. Whether a save is done may be said from another thread.

    Where the best and the newest are one checkpoint, the one that gave way last stays as a spare, so that there are
    always two once there were two. Of those that gave way, the last one with finite weights stays until another one
    with finite weights is durable. Neither counts among the best.

    Args:
        keep: how many; -1 for all, 0 for none but the newest.
        better: whether its first score is strictly better than its second.

    Attributes:
        better: as given.
        kept: path → score of the best.
        newest: the last one asked for, or "".
        pending: asked for and not yet durable, in order.
        displaced: path → (who took its place, its score or None), until deleted.
        yielding: what goes once the newest is durable, deleted or not.
        late: what could not be deleted behind the last durable one.
        spare: gave way, and stays so that there are two; or "".
        tainted: those that are there with weights that are not finite.

    Example:
        >>> best = Retention(1, better=lambda a, b: a < b)
        >>> best.ask("a", 0.5); best.confirm("a")
        []
        >>> best.admits(0.4)
        True
        >>> best.ask("b", 0.4); best.confirm("b"), best.spare
        ([], 'a')
        >>> best.ask("c", 0.3); best.confirm("c"), best.spare
        (['a'], 'b')
    """

    def __init__(self, keep: int, better: Callable[[float, float], bool]) -> None:
        self.keep, self.better = keep, better
        self.kept: dict[str, float] = {}
        self.newest = ""
        self.pending: list[str] = []
        self.displaced: dict[str, tuple[str, float | None]] = {}
        self.yielding: list[str] = []
        self.late: list[str] = []
        self.spare = ""
        self.tainted: set[str] = set()
        self._before: tuple[dict[str, float], str, dict[str, tuple[str, float | None]], list[str], str] | None = None

    @property
    def best(self) -> str:
        """The kept one with the best score (of equals the older), or ""."""
        return self._best(self.kept)

    @property
    def worst(self) -> str:
        """The kept one that goes next (of equals the older), or "" while there is room."""
        if self.keep == -1 or len(self.kept) < self.keep:
            return ""
        found = ""
        for path, score in self.kept.items():
            if not found or self.better(self.kept[found], score):
                found = path
        return found

    def admits(self, score: float) -> bool:
        """Whether a checkpoint with this score would be among the best."""
        if self.keep == -1 or len(self.kept) < self.keep:
            return True
        return self.keep > 0 and self.better(score, self.kept[self.worst])

    @property
    def durable_best(self) -> str:
        """The best one that is there, kept or about to go, or ""."""
        with _LOCK:
            scores = {path: score for path, (_, score) in self.displaced.items() if score is not None} | self.kept
        return self._best({path: score for path, score in scores.items() if path not in self.pending})

    def holds(self, path: str) -> bool:
        """Whether ``path`` is kept, asked for, or for this callback to delete."""
        return path in self.kept or path in self.pending or path in self.displaced or path == self.newest

    @property
    def live(self) -> set[str]:
        """Names in use: kept, newest, the spare, and what gives way to the newest."""
        return {*self.kept, *self.yielding, *filter(None, [self.newest, self.spare])}

    def age(self) -> None:
        """Scores count anew from 0, upwards: what is kept is older than all that is asked for from now on."""
        highest = max(self.kept.values(), default=0.0)
        self.kept = {path: score - highest - 1.0 for path, score in self.kept.items()}

    def ask(self, path: str, score: float | None) -> None:
        """Count a checkpoint as asked for; a score of None keeps it only as the newest."""
        with _LOCK:
            self._before = dict(self.kept), self.newest, dict(self.displaced), list(self.yielding), self.spare
            previous, self.newest = self.newest, path
            if path in self.pending:
                self.pending.remove(path)
            self.pending.append(path)
            self.kept.pop(path, None)
            self.displaced.pop(path, None)
            self.tainted.discard(path)
            self.yielding = [old for old in (self._last_finite(), self.spare) if old in self.displaced]
            self.yielding = list(dict.fromkeys(self.yielding))
            for old in self.yielding:
                self.displaced[old] = (path, self.displaced[old][1])
            if score is not None:
                if worst := self.worst:
                    self.yielding.append(worst)
                    self.displaced[worst] = (path, self.kept.pop(worst))
                self.kept[path] = score
            if previous and previous not in (path, *self.kept, *self.yielding):
                self.yielding.append(previous)
                self.displaced[previous] = (path, None)
            self.spare = self.yielding.pop() if self.yielding and not self.kept.keys() - {path} else ""

    def confirm(self, path: str) -> list[str]:
        """Count ``path`` as durable; returns what may be deleted now, and forgets it."""
        with _LOCK:
            self._before = None
            if path in self.pending:
                at = self.pending.index(path)
                lost, self.pending = self.pending[:at], self.pending[at + 1 :]
                self._lose(lost)
            stays = (path, self.spare, self._last_finite())
            ready = [
                other for other, (by, _) in self.displaced.items() if by not in self.pending and other not in stays
            ]
            for other in ready:
                del self.displaced[other]
            self.late = []
            self.tainted.difference_update(ready)
            return ready

    def taint(self, path: str) -> None:
        """The weights of ``path`` are not finite; to be called before `confirm`."""
        with _LOCK:
            self.tainted.add(path)

    def _last_finite(self) -> str:
        """What must not go, for all that is there and stays is tainted; or ""."""
        there = {*self.kept, self.newest, self.spare} - {"", *self.pending}
        if not there <= self.tainted:
            return ""
        return next((path for path in reversed(self.displaced) if path not in self.tainted), "")

    def fail(self, path: str) -> None:
        """The save of ``path`` failed: it gives its place back, and nothing is deleted for it."""
        with _LOCK:
            if path not in self.pending:
                return
            self.pending.remove(path)
            if self._before is not None and path == self.newest:
                self.kept, self.newest, self.displaced, self.yielding, self.spare = self._before
                self._before = None
            else:  # others were asked for or confirmed since
                self._lose([path])

    def put_off(self, path: str, left: list[str]) -> None:
        """What could not be deleted behind ``path`` goes behind the next one."""
        with _LOCK:
            self.displaced.update(dict.fromkeys(left, (path, None)))
            self.late = left

    def _lose(self, lost: list[str]) -> None:
        # Saves are done one after the other: one that is passed by a later one has failed.
        for path in lost:
            self.kept.pop(path, None)
            self.displaced.pop(path, None)
        back = {path: score for path, (_, score) in self.displaced.items() if score is not None}
        while lost and back and (self.keep == -1 or len(self.kept) < self.keep):
            best = self._best(back)
            self.kept[best] = back.pop(best)
            del self.displaced[best]
        if self.spare not in self.displaced:
            alone = len({*self.kept, self.newest} - {"", *lost}) < 2
            self.spare = next(reversed(self.displaced), "") if alone else ""

    def _best(self, scores: Mapping[str, float]) -> str:
        found = ""
        for path, score in scores.items():
            if not found or self.better(score, scores[found]):
                found = path
        return found
