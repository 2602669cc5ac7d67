"""Which checkpoints of one callback are kept, and which are deleted once their replacement is durable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Final, final

__all__ = ["Retention"]

_LOCK: Final = Lock()
"""One lock for all, held for microseconds: a lock per object could not be copied with its callback."""


@final
@dataclass
class _Snapshot:
    """The state of a `Retention` at one time; its attributes are those of that class."""

    kept: dict[str, float]
    newest: str
    displaced: dict[str, tuple[str, float | None]]
    yielding: list[str]
    spare: str


@final
class Retention:
    """Which checkpoints to keep: the best ``keep`` by score, the newest, and a fallback in case one is damaged.

    The kept set follows from the *requests*, so it does not depend on when a save finished. Deletion follows from
    durability: a checkpoint is deleted only once its replacement is durable. A failed save is undone: the state
    becomes that of the remaining requests. `confirm` and `taint` may be called from another thread.

    If the best checkpoint is also the newest, the last replaced one is kept as a fallback, so that at least two exist
    once there were two. The last replaced one with finite weights is kept until another one with finite weights is
    durable. Neither counts towards ``keep``.

    Args:
        keep: how many of the best; -1 for all, 0 for the newest only.
        better: whether its first score is strictly better than its second.

    Attributes:
        better: the argument.
        kept: path → score of the best.
        newest: the last requested one, or "".
        displaced: path → (its replacement, its score or None), until it is deleted.
        yielding: those that the newest replaces once it is durable, whether deleted or not.
        late: those whose deletion failed after the last durable one.
        spare: the fallback checkpoint, or "".
        tainted: existing checkpoints whose weights are not finite.

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
        self.keep = keep
        self.better = better
        self.kept: dict[str, float] = {}
        self.newest = ""
        self.displaced: dict[str, tuple[str, float | None]] = {}
        self.yielding: list[str] = []
        self.late: list[str] = []
        self.spare = ""
        self.tainted: set[str] = set()
        # Scores of the requests that are not durable yet, in order.
        self._requests: dict[str, float | None] = {}
        # The state before the first of these requests.
        self._base = self._snapshot()

    @property
    def pending(self) -> list[str]:
        """Requested and not yet durable, in order."""
        return list(self._requests)

    @property
    def best(self) -> str:
        """The kept checkpoint with the best score (the older of equals), or ""."""
        return self._best_path(self.kept)

    @property
    def worst(self) -> str:
        """The kept checkpoint that is replaced next (the older of equals), or "" while there is room."""
        if self.keep == -1 or len(self.kept) < self.keep:
            return ""
        worst = ""
        for path, score in self.kept.items():
            if not worst or self.better(self.kept[worst], score):
                worst = path
        return worst

    def admits(self, score: float) -> bool:
        """Whether a checkpoint with this score would be among the best."""
        if self.keep == -1 or len(self.kept) < self.keep:
            return True
        return self.keep > 0 and self.better(score, self.kept[self.worst])

    @property
    def durable_best(self) -> str:
        """The best durable checkpoint, kept or not yet deleted, or ""."""
        scores = {}
        # The lock: the writer thread changes `displaced` when a save finishes.
        with _LOCK:
            for path, (_, score) in self.displaced.items():
                if score is not None:
                    scores[path] = score
            scores |= self.kept
        # A request that is not durable yet may still fail.
        for path in self._requests:
            scores.pop(path, None)
        return self._best_path(scores)

    def holds(self, path: str) -> bool:
        """Whether this callback keeps ``path``, has requested it, or will delete it."""
        if path == self.newest or path in self.kept:
            return True
        return path in self._requests or path in self.displaced

    @property
    def live(self) -> set[str]:
        """Paths in use: kept, newest, fallback, and those that the newest replaces."""
        paths = {*self.kept, *self.yielding, self.newest, self.spare}
        return paths - {""}

    def age(self) -> None:
        """Restart the scores from 0 upwards: rank everything kept as older than all later requests."""
        # Requests of an interrupted fit: whether these saves succeeded is unknown.
        if self._requests:
            self._requests = {}
            self._replay()
        highest = max(self.kept.values(), default=0.0)
        self.kept = {path: score - highest - 1.0 for path, score in self.kept.items()}

    def ask(self, path: str, score: float | None) -> None:
        """Record the request of a checkpoint; a score of None keeps it only as the newest."""
        with _LOCK:
            if not self._requests:
                self._base = self._snapshot()
            # A path that is requested again moves to the end of the order.
            self._requests.pop(path, None)
            self._requests[path] = score
            self.tainted.discard(path)
            self._apply(path, score)

    def rate(self, path: str, score: float) -> None:
        """Give the newest, which was requested without a score, the score that its step logged later."""
        with _LOCK:
            if path in self._requests:
                self._requests[path] = score
                self._replay()
            else:
                self._apply(path, score)
                # Delete them once the next checkpoint is durable.
                self.late = [*self.late, *self.yielding]

    def _apply(self, path: str, score: float | None) -> None:
        previous = self.newest
        self.newest = path
        self.kept.pop(path, None)
        self.displaced.pop(path, None)
        # What an earlier request kept as a fallback waits for this one now.
        self.yielding = []
        for fallback in (self._last_finite(), self.spare):
            if fallback in self.displaced and fallback not in self.yielding:
                self.yielding.append(fallback)
        for fallback in self.yielding:
            _, fallback_score = self.displaced[fallback]
            self.displaced[fallback] = path, fallback_score
        if score is not None:
            self._make_room(path)
            self.kept[path] = score
        if previous and previous not in (path, *self.kept, *self.yielding):
            self.yielding.append(previous)
            self.displaced[previous] = path, None
        # With no other kept checkpoint, the last replaced one stays as the fallback.
        self.spare = ""
        if self.yielding and not self.kept.keys() - {path}:
            self.spare = self.yielding.pop()

    def _make_room(self, path: str) -> None:
        """Displace the worst kept checkpoint by ``path``, if all places are taken."""
        worst = self.worst
        if worst:
            self.yielding.append(worst)
            self.displaced[worst] = path, self.kept.pop(worst)

    def confirm(self, path: str) -> list[str]:
        """Record ``path`` as durable; returns the paths to delete now, and removes them from the state."""
        # From the writer's thread, while the training thread may request the next one.
        with _LOCK:
            if path in self._requests:
                self._settle(path)
            fallbacks = path, self.spare, self._last_finite()
            replaced = []
            for checkpoint, (replacement, _) in self.displaced.items():
                if replacement not in self._requests and checkpoint not in fallbacks:
                    replaced.append(checkpoint)
            for checkpoint in replaced:
                del self.displaced[checkpoint]
                # From the base too: a replay must not bring it back.
                self._base.displaced.pop(checkpoint, None)
            self.late = []
            self.tainted.difference_update(replaced)
            return replaced

    def _settle(self, path: str) -> None:
        """Make the state after ``path`` the base, without earlier requests: saves finish in order, so they failed."""
        paths = list(self._requests)
        later_paths = paths[paths.index(path) + 1 :]
        later = {later_path: self._requests[later_path] for later_path in later_paths}
        self._requests = {path: self._requests[path]}
        self._replay()
        self._requests = later
        self._base = self._snapshot()
        self._replay()

    def taint(self, path: str) -> None:
        """Record that the weights of ``path`` are not finite; call it before `confirm`."""
        with _LOCK:
            self.tainted.add(path)

    def _last_finite(self) -> str:
        """The last replaced checkpoint with finite weights, if all kept ones are tainted; or ""."""
        durable = {*self.kept, self.newest, self.spare} - {"", *self._requests}
        if not durable <= self.tainted:
            return ""
        for path in reversed(self.displaced):
            if path not in self.tainted:
                return path
        return ""

    def fail(self, path: str) -> None:
        """Undo the request of ``path``, whose save failed: it replaces nothing."""
        with _LOCK:
            if path in self._requests:
                del self._requests[path]
                self._replay()

    def _snapshot(self) -> _Snapshot:
        # Copies: the state goes on changing.
        return _Snapshot(
            kept=dict(self.kept),
            newest=self.newest,
            displaced=dict(self.displaced),
            yielding=list(self.yielding),
            spare=self.spare,
        )

    def _replay(self) -> None:
        """Recompute the state from the requests that did not fail."""
        self.kept = dict(self._base.kept)
        self.newest = self._base.newest
        self.displaced = dict(self._base.displaced)
        self.yielding = list(self._base.yielding)
        self.spare = self._base.spare
        for path, score in self._requests.items():
            self._apply(path, score)

    def put_off(self, path: str, remaining: list[str]) -> None:
        """Retry the deletion of ``remaining``, which failed after ``path`` became durable, after the next save."""
        displacement = path, None
        with _LOCK:
            for displaced in (self.displaced, self._base.displaced):
                displaced.update(dict.fromkeys(remaining, displacement))
            self.late = remaining

    def forget(self, path: str) -> None:
        """Drop ``path``, whose directory is gone; no save is in progress."""
        self.kept.pop(path, None)
        # A fallback that is gone must not keep the next replaced checkpoint from becoming it.
        if path == self.spare:
            self.spare = ""

    def restore(
        self,
        kept: Mapping[str, float],
        newest: str,
        yielding: list[str],
        spare: str,
        tainted: Iterable[str],
    ) -> None:
        """Restore the state from a checkpoint; no save is in progress then."""
        self.kept = dict(kept)
        self.newest = newest
        self.yielding = list(yielding)
        self.spare = spare
        # They wait for no request: the next durable checkpoint deletes them.
        self.displaced = dict.fromkeys(yielding, ("", None))
        if spare:
            self.displaced[spare] = "", None
        self.tainted = set(tainted)
        self._requests = {}

    def _best_path(self, scores: Mapping[str, float]) -> str:
        # In the order of the requests, and strictly better: of equal scores the older checkpoint stays the best.
        best = ""
        for path, score in scores.items():
            if not best or self.better(score, scores[best]):
                best = path
        return best
