"""Which of the checkpoints that were asked for stay, and from when on the others may be deleted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from threading import Lock
from typing import Final, final

__all__ = ["Retention"]

_LOCK: Final = Lock()
"""Held for microseconds, so one for all: callbacks stay things that can be copied."""


@final
class Retention:
    """The best ``keep`` checkpoints by score, the newest, and what stays in case that one of them is damaged.

    What is kept follows from what was *asked for*, so it does not depend on when a save was done. What may be deleted
    follows from what is durable: a checkpoint goes only once the one that took its place is there. A save that fails
    leaves no trace: the state becomes what the other requests alone make of it. `confirm` and `taint` may be called
    from another thread.

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
        self.displaced: dict[str, tuple[str, float | None]] = {}
        self.yielding: list[str] = []
        self.late: list[str] = []
        self.spare = ""
        self.tainted: set[str] = set()
        self._asked: dict[str, float | None] = {}  # scores of those that are not durable yet, in order
        self._base = self._snapshot()  # the state before the first of them was asked for

    @property
    def pending(self) -> list[str]:
        """Asked for and not yet durable, in order."""
        return list(self._asked)

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
        return self._best({path: score for path, score in scores.items() if path not in self._asked})

    def holds(self, path: str) -> bool:
        """Whether ``path`` is kept, asked for, or for this callback to delete."""
        return path in self.kept or path in self._asked or path in self.displaced or path == self.newest

    @property
    def live(self) -> set[str]:
        """Names in use: kept, newest, the spare, and what gives way to the newest."""
        return {*self.kept, *self.yielding, *filter(None, [self.newest, self.spare])}

    def age(self) -> None:
        """Scores count anew from 0, upwards: what is kept is older than all that is asked for from now on."""
        if self._asked:  # of a fit that was broken off: nothing is known of them
            self._asked = {}
            self._replay()
        highest = max(self.kept.values(), default=0.0)
        self.kept = {path: score - highest - 1.0 for path, score in self.kept.items()}

    def ask(self, path: str, score: float | None) -> None:
        """Count a checkpoint as asked for; a score of None keeps it only as the newest."""
        with _LOCK:
            if not self._asked:
                self._base = self._snapshot()
            self._asked.pop(path, None)
            self._asked[path] = score
            self.tainted.discard(path)
            self._apply(path, score)

    def rate(self, path: str, score: float) -> None:
        """Give the newest, which was asked for without a score, the score that became known at its step."""
        with _LOCK:
            if path in self._asked:
                self._asked[path] = score
                self._replay()
            else:
                self._apply(path, score)
                self.late = [*self.late, *self.yielding]  # deleted once the next one is durable

    def _apply(self, path: str, score: float | None) -> None:
        previous, self.newest = self.newest, path
        self.kept.pop(path, None)
        self.displaced.pop(path, None)
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
            if path in self._asked:
                # Saves are done in order: those that were asked for before this one, and are not durable, have failed.
                while (first := next(iter(self._asked))) != path:
                    del self._asked[first]
                later = dict(self._asked)
                self._asked = {path: later.pop(path)}
                self._replay()
                self._asked, self._base = later, self._snapshot()
                self._replay()
            stays = (path, self.spare, self._last_finite())
            ready = [other for other, (by, _) in self.displaced.items() if by not in self._asked and other not in stays]
            for other in ready:
                del self.displaced[other]
                self._base[2].pop(other, None)
            self.late = []
            self.tainted.difference_update(ready)
            return ready

    def taint(self, path: str) -> None:
        """The weights of ``path`` are not finite; to be called before `confirm`."""
        with _LOCK:
            self.tainted.add(path)

    def _last_finite(self) -> str:
        """What must not go, for all that is there and stays is tainted; or ""."""
        there = {*self.kept, self.newest, self.spare} - {"", *self._asked}
        if not there <= self.tainted:
            return ""
        return next((path for path in reversed(self.displaced) if path not in self.tainted), "")

    def fail(self, path: str) -> None:
        """The save of ``path`` failed: it gives its place back, and nothing is deleted for it."""
        with _LOCK:
            if path in self._asked:
                del self._asked[path]
                self._replay()

    def _snapshot(self) -> tuple[dict[str, float], str, dict[str, tuple[str, float | None]], list[str], str]:
        return dict(self.kept), self.newest, dict(self.displaced), list(self.yielding), self.spare

    def _replay(self) -> None:
        """Make the state from the requests that did not fail."""
        kept, self.newest, displaced, yielding, self.spare = self._base
        self.kept, self.displaced, self.yielding = dict(kept), dict(displaced), list(yielding)
        for path, score in self._asked.items():
            self._apply(path, score)

    def put_off(self, path: str, left: list[str]) -> None:
        """What could not be deleted after ``path`` became durable is deleted after the next one."""
        with _LOCK:
            for displaced in (self.displaced, self._base[2]):
                displaced.update(dict.fromkeys(left, (path, None)))
            self.late = left

    def restore(
        self,
        kept: Mapping[str, float],
        newest: str,
        yielding: list[str],
        spare: str,
        tainted: Iterable[str],
    ) -> None:
        """Take over the state of a checkpoint, in which nothing is under way."""
        self.kept, self.newest, self.yielding, self.spare = dict(kept), newest, list(yielding), spare
        self.displaced = dict.fromkeys([*yielding, *filter(None, [spare])], ("", None))
        self.tainted = set(tainted)
        self._asked = {}

    def _best(self, scores: Mapping[str, float]) -> str:
        found = ""
        for path, score in scores.items():
            if not found or self.better(score, scores[found]):
                found = path
        return found
