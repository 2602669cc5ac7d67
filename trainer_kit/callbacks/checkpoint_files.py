"""One callback's checkpoints in one directory: their names, asking for them, deleting what gave way."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

from trainer_kit.callbacks.checkpoint_name import CheckpointName
from trainer_kit.callbacks.retention import Retention
from trainer_kit.core.errors import CheckpointError, ConfigurationError
from trainer_kit.core.location import Location, absolute, is_url, locate
from trainer_kit.core.protocols import TrainerLike

__all__ = ["Shelf"]


@final
@dataclass
class _Request:
    """What the loop is handed."""

    reason: str
    path: Location
    weights_only: bool
    shelf: Shelf
    done: bool = False

    @property
    def next_try(self) -> str:
        return self.shelf.next_try()

    def not_finite(self) -> None:
        self.shelf.retention.taint(str(self.path))

    def committed(self, path: Location) -> str | None:
        self.done = True
        return self.shelf._saved(str(self.path))

    def saved(self, path: Location) -> None:
        problem = None if self.done else self.shelf._saved(str(self.path))
        if problem is not None:
            warnings.warn(problem, stacklevel=2)

    def failed(self, path: Location) -> None:
        self.shelf.retention.fail(str(self.path))


@final
class Shelf:
    """Names, asks for, keeps and deletes checkpoints.

    Args:
        dirpath: the directory, absolute, or its URL; None until the run's own is known.
        name: makes a name from values.
        retention: decides what stays.
        weights_only: what is asked for.
        versions: append ``-v1``, … to a name in use, instead of overwriting.
        ranked: scores are a monitored value, so the best one may be called ``best``.

    Attributes:
        next_try: says when the next checkpoint is due; its owner's business.
        name_of: makes a path from values and a version; likewise.
        first_version: the first number of the version counter.
        alias: another name of the newest checkpoint in the index, or "".
    """

    def __init__(
        self,
        dirpath: str | None,
        name: CheckpointName,
        retention: Retention,
        *,
        weights_only: bool,
        versions: bool,
        ranked: bool,
    ) -> None:
        self.dirpath, self.name, self.retention = dirpath, name, retention
        self.weights_only, self.versions, self.ranked = weights_only, versions, ranked
        self.next_try: Callable[[], str] = str
        self.name_of: Callable[..., str] = name
        self.first_version, self.alias = 1, ""
        self.asked_step = 0
        self._unrated = ""  # what was asked for at `asked_step` without a score
        self._default = dirpath is None
        self._before: tuple[str, float | None] = ("", None)  # the best in the directory of before a resume
        self._taken: list[str] = []  # there before this run began, so not ours to overwrite
        self._others: list[Shelf] = []
        self._is_zero = False

    @property
    def best(self) -> tuple[str, float | None]:
        """The best one asked for, here or in the directory of before a resume, and its score; ``("", None)``."""
        path, (before, value) = self.retention.best, self._before
        score = self.retention.kept.get(path)
        if before and (score is None or (value is not None and not self.retention.better(score, value))):
            return self._before
        return path, score

    def open(self, trainer: TrainerLike, others: Iterable[Shelf]) -> None:
        """At ``setup``, before anything is restored."""
        if self._default:
            self.dirpath = str(absolute(trainer.checkpoint_dir))
        self._others = list(others)
        self._is_zero = trainer.is_global_zero

    def start(self, trainer: TrainerLike, restored: bool) -> None:
        """At the start of a fit, once everything is restored; rank 0 looks at the disk for all.

        Args:
            trainer: that fits.
            restored: this directory's own state was taken over.
        """
        self.asked_step = trainer.global_step  # no step was made since
        assert self.dirpath is not None
        from trainer_kit.core.collective_errors import on_rank_zero

        kept, newest, before = self.retention.kept, self.retention.newest, self._before[0]
        gone, there, cut_short = on_rank_zero(trainer.strategy.world, lambda: self._look(restored))
        # Deleted by the sitting that this one goes back behind, or by hand.
        for path in gone:
            kept.pop(path, None)
            if path == self.retention.spare:
                self.retention.spare = ""
        if before in gone:
            self._before = ("", None)
        if not restored:
            self._unrated = ""
        if not restored and not self.ranked:
            self.retention.age()  # steps begin anew with this fit
            kept = self.retention.kept
        if not restored:
            mine = {os.path.basename(path) for path in self.retention.live}
            self._taken = [name for name in there if name not in mine]
        if cut_short:
            # Whoever saved it may have died before deleting what gave way to it, and no save may follow.
            problem = self._make_way(newest, self.retention.confirm(newest), {})
            if problem is not None:
                warnings.warn(problem, stacklevel=2)

    def _look(self, restored: bool) -> tuple[list[str], list[str], bool]:
        """Which of its checkpoints are gone; names in the directory; whether what gave way to the newest may stand."""
        from trainer_kit.checkpoint.store import entries, lookup

        assert self.dirpath is not None
        held, before = self.retention, self._before[0]
        own = (*held.kept, held.spare) if restored else ()
        gone = [path for path in (*own, before) if path and not locate(path).is_dir()]
        if restored:
            return gone, [], lookup(self.dirpath, "last") == locate(held.newest)
        return gone, sorted(entry.name for entry in entries(locate(self.dirpath))), False

    def ask(self, trainer: TrainerLike, reason: str, score: float | None, together: bool = True) -> str:
        """Ask for a checkpoint of this step; a score of None keeps it only as the newest.

        Args:
            reason: why, for logs and reports.
            score: by which it is compared.
            together: every rank asks, so that rank 0 may name it for all.

        Returns:
            Its path.
        """
        path = ""
        if trainer.is_global_zero or not together:
            metrics = trainer.callback_metrics
            epoch, step = metrics.get("epoch", trainer.current_epoch), metrics.get("step", trainer.global_step)
            path = self._free({**metrics, "epoch": int(epoch), "step": int(step)}, trainer.global_step)
        if together and trainer.world_size > 1:
            path = trainer.strategy.world.broadcast(path)
        self.asked_step, self._unrated = trainer.global_step, "" if score is not None else path
        self.retention.ask(path, score)
        trainer.request_checkpoint(reason, _Request(reason, locate(path), self.weights_only, self))
        return path

    def rate(self, score: float) -> None:
        """Compare the checkpoint that was asked for at this step by ``score``, which was not known then."""
        if self._unrated:
            self.retention.rate(self._unrated, score)
            self._unrated = ""

    def _free(self, values: Mapping[str, Any], step: int) -> str:
        path, version = self._named(values), self.first_version
        while self.versions and self._used(path, step):
            path, version = self._named(values, ver=version), version + 1
        return path

    def _named(self, values: Mapping[str, Any], **version: int) -> str:
        assert self.dirpath is not None
        path = self.name_of(dict(values), **version)
        name = os.path.basename(path)
        if os.path.dirname(path) not in ("", self.dirpath) or not name or name.startswith("."):
            raise ConfigurationError(
                "format_checkpoint_name names one directory in dirpath",
                found=path,
                fix=f"return a path directly in {self.dirpath}, and put another folder into dirpath=",
            )
        return str(locate(self.dirpath) / name)

    def _used(self, path: str, step: int) -> bool:
        if os.path.basename(path) in self._taken or path in self.retention.live:
            return True
        for other in self._others:
            shared = other.asked_step == step and other.weights_only == self.weights_only
            if path in other.retention.live and not (shared and path == other.retention.newest):
                return True
        return False

    def _saved(self, path: str) -> str | None:
        ready = self.retention.confirm(path)
        best = self.retention.durable_best if self.ranked else ""
        return self._make_way(
            path,
            ready,
            {name: value for name, value in (("last", path), (self.alias, path), ("best", best)) if name and value},
        )

    def _make_way(self, path: str, ready: list[str], names: Mapping[str, str]) -> str | None:
        """Delete what gave way to ``path``, which is durable, once no name in the directory means it any more.

        Returns:
            What went wrong: the checkpoint itself is safe, its bookkeeping is no reason to end a run.
        """
        if not self._is_zero:
            return None
        from trainer_kit.checkpoint.commit import remove_checkpoint
        from trainer_kit.checkpoint.store import mark

        assert self.dirpath is not None
        try:
            if names:
                mark(self.dirpath, **names)
            for old in ready:
                if locate(old).exists() and not any(other.retention.holds(old) for other in self._others):
                    remove_checkpoint(old)
        except (CheckpointError, OSError) as error:
            self.retention.put_off(path, [old for old in ready if _may_be_there(old)])
            return f"after saving {path}: {error}"
        return None

    def state_dict(self) -> dict[str, Any]:
        """Follows from what was asked for alone, never from when a save was done."""
        held, (best, score) = self.retention, self.best
        return {
            "dirpath": self.dirpath,
            "best": best,
            "best_score": score,
            "kept": dict(held.kept),
            "newest": held.newest,
            # What gave way earlier is deleted by the time this is durable, unless that failed.
            "yielding": list(dict.fromkeys([*held.yielding, *held.late])),
            "spare": held.spare,
            "not_finite": sorted(held.tainted & held.live),
            "taken": list(self._taken),
            "unrated": self._unrated,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Take over ``state``; False, with only its best one taken, when it is about another directory."""
        place = state["dirpath"]
        if self.dirpath is not None and place != self.dirpath and _has_moved(place, self.dirpath, state["newest"]):
            state, place = _moved(state, self.dirpath), self.dirpath
        best, kept = state["best"], state["kept"]
        here = self.dirpath is None or place == self.dirpath
        self._before = ("", None) if here and best in kept else (best, state.get("best_score", kept.get(best)))
        if not here:
            if self._is_zero and not self._default:
                warnings.warn(
                    f"ModelCheckpoint now writes to {self.dirpath}, no longer to {place}: "
                    "it takes over the best checkpoint alone",
                    stacklevel=2,
                )
            return False
        held = self.retention
        # A checkpoint may have been written by anybody: what it names elsewhere is not this shelf's to delete.
        newest, spare = state["newest"], state.get("spare", "")
        held.restore(
            kept={path: score for path, score in kept.items() if os.path.dirname(path) == place},
            newest=newest if os.path.dirname(newest) == place else "",
            yielding=[path for path in state["yielding"] if os.path.dirname(path) == place],
            spare=spare if os.path.dirname(spare) == place else "",
            tainted=state.get("not_finite", ()),
        )
        self._unrated = state.get("unrated", "") if held.newest else ""
        self._taken = list(state["taken"])
        return True


def _has_moved(old: str, new: str, newest: str) -> bool:
    """Whether ``new`` is the directory that was ``old``: by another path, or moved there with what is in it."""
    if is_url(old) or is_url(new):
        return False
    if os.path.realpath(old) == os.path.realpath(new):
        return True
    return not os.path.exists(old) and os.path.isdir(os.path.join(new, os.path.basename(newest) or os.curdir))


def _moved(state: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The state as it is once its directory is ``place``."""
    old = state["dirpath"]

    def there(path: str) -> str:
        return os.path.join(place, os.path.basename(path)) if os.path.dirname(path) == old else path

    return {
        **state,
        "dirpath": place,
        "kept": {there(path): score for path, score in state["kept"].items()},
        **{name: there(state.get(name, "")) for name in ("best", "newest", "spare", "unrated")},
        **{name: [there(path) for path in state.get(name, ())] for name in ("yielding", "not_finite")},
    }


def _may_be_there(path: str) -> bool:
    try:
        return locate(path).exists()
    except OSError:  # the storage does not say
        return True
