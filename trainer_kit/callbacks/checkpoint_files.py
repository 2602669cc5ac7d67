"""The checkpoints of one callback in one directory: their names, which of them are kept, and deleting the rest."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from string import Formatter
from threading import Lock
from typing import Any, Final, final

from trainer_kit.callbacks.lightning_files import (
    remove_lightning_file,
    write_lightning_file,
)
from trainer_kit.core.errors import CheckpointError, ConfigurationError, did_you_mean
from trainer_kit.core.location import Location, absolute, is_url, locate
from trainer_kit.core.protocols import TrainerLike

__all__ = ["CheckpointFiles", "CheckpointName", "Retention"]

_DEFAULT: Final = "step-{step:08d}"


@final
class CheckpointName:
    """A template of ``{value}`` and ``{value:format}`` fields, read once.

    Args:
        template: None for ``step-00001200``.
        insert_names: write ``{epoch}`` as ``epoch=3``.

    Raises:
        ConfigurationError: for a template that cannot be read, or that is more than one directory.

    Example:
        >>> CheckpointName("{epoch}-{val/loss:.2f}")({"epoch": 3, "val/loss": 0.1234})
        'epoch=3-val_loss=0.12'
        >>> CheckpointName(None)({"step": 1200})
        'step-00001200'
    """

    def __init__(self, template: str | None, insert_names: bool = True) -> None:
        self._insert = insert_names and template is not None
        self.template = _DEFAULT if template is None else template
        self._warned: set[str] = set()
        try:
            self._parts = list(self._read(self.template))
        except ValueError as error:
            raise ConfigurationError(
                "this checkpoint filename is not a valid template",
                found=f"{self.template!r}: {error}",
                fix="{name} or {name:.2f}",
            ) from error
        literal = "".join(text for text, _, _ in self._parts)
        if (
            "/" in literal
            or "\\" in literal
            or literal.startswith(".")
            or not self.template
        ):
            raise ConfigurationError(
                "a checkpoint filename must name a single directory",
                found=repr(self.template),
                fix="pass the parent folder as dirpath=, and start the filename with a letter or a field",
            )

    @staticmethod
    def _read(template: str) -> Iterator[tuple[str, str | None, str]]:
        for text, field, spec, conversion in Formatter().parse(template):
            if field == "" or conversion:
                raise ValueError("a field is a name and perhaps a format")
            if field is not None:
                format(
                    1
                    if field in ("epoch", "step") or (spec or "").endswith("d")
                    else 1.0,
                    spec or "",
                )
            yield text, field, spec or ""

    def __call__(self, values: Mapping[str, Any], equals: str = "=") -> str:
        """Fill in ``values`` (numbers or scalar tensors: a sync point). A missing value is 0, with a warning."""
        written = []
        for text, field, spec in self._parts:
            written.append(text)
            if field is not None:
                written.append(self._field(field, spec, values, equals))
        return "".join(written)

    def _field(
        self, name: str, spec: str, values: Mapping[str, Any], equals: str
    ) -> str:
        if name not in values and name not in self._warned:
            self._warned.add(name)
            warnings.warn(
                f"the checkpoint filename {self.template!r} uses {name!r}, which was not logged, so it is 0; "
                + did_you_mean(name, values),
                stacklevel=2,
            )
        value = values.get(name, 0)
        number = value if isinstance(value, int) else float(value)
        if spec.endswith("d"):
            number, spec = (
                (round(number), spec) if math.isfinite(number) else (number, "")
            )
        shown = format(number, spec)
        return f"{name.replace('/', '_')}{equals}{shown}" if self._insert else shown


_LOCK: Final = Lock()
"""One lock for all, held for microseconds: a lock per object could not be copied with its callback."""


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
        self.keep, self.better = keep, better
        self.kept: dict[str, float] = {}
        self.newest = ""
        self.displaced: dict[str, tuple[str, float | None]] = {}
        self.yielding: list[str] = []
        self.late: list[str] = []
        self.spare = ""
        self.tainted: set[str] = set()
        self._asked: dict[
            str, float | None
        ] = {}  # scores of the requests that are not durable yet, in order
        self._base = self._snapshot()  # the state before the first of these requests

    @property
    def pending(self) -> list[str]:
        """Requested and not yet durable, in order."""
        return list(self._asked)

    @property
    def best(self) -> str:
        """The kept checkpoint with the best score (the older of equals), or ""."""
        return self._best(self.kept)

    @property
    def worst(self) -> str:
        """The kept checkpoint that is replaced next (the older of equals), or "" while there is room."""
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
        """The best durable checkpoint, kept or not yet deleted, or ""."""
        with _LOCK:
            scores = {
                path: score
                for path, (_, score) in self.displaced.items()
                if score is not None
            } | self.kept
        return self._best(
            {path: score for path, score in scores.items() if path not in self._asked}
        )

    def holds(self, path: str) -> bool:
        """Whether this callback keeps ``path``, has requested it, or will delete it."""
        return (
            path in self.kept
            or path in self._asked
            or path in self.displaced
            or path == self.newest
        )

    @property
    def live(self) -> set[str]:
        """Paths in use: kept, newest, fallback, and those that the newest replaces."""
        return {*self.kept, *self.yielding, *filter(None, [self.newest, self.spare])}

    def age(self) -> None:
        """Restart the scores from 0 upwards: rank everything kept as older than all later requests."""
        if (
            self._asked
        ):  # of an interrupted fit: whether these saves succeeded is unknown
            self._asked = {}
            self._replay()
        highest = max(self.kept.values(), default=0.0)
        self.kept = {path: score - highest - 1.0 for path, score in self.kept.items()}

    def ask(self, path: str, score: float | None) -> None:
        """Record the request of a checkpoint; a score of None keeps it only as the newest."""
        with _LOCK:
            if not self._asked:
                self._base = self._snapshot()
            self._asked.pop(path, None)
            self._asked[path] = score
            self.tainted.discard(path)
            self._apply(path, score)

    def rate(self, path: str, score: float) -> None:
        """Give the newest, which was requested without a score, the score that its step logged later."""
        with _LOCK:
            if path in self._asked:
                self._asked[path] = score
                self._replay()
            else:
                self._apply(path, score)
                self.late = [
                    *self.late,
                    *self.yielding,
                ]  # delete them once the next checkpoint is durable

    def _apply(self, path: str, score: float | None) -> None:
        previous, self.newest = self.newest, path
        self.kept.pop(path, None)
        self.displaced.pop(path, None)
        self.yielding = [
            old for old in (self._last_finite(), self.spare) if old in self.displaced
        ]
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
        self.spare = (
            self.yielding.pop()
            if self.yielding and not self.kept.keys() - {path}
            else ""
        )

    def confirm(self, path: str) -> list[str]:
        """Record ``path`` as durable; returns the paths to delete now, and removes them from the state."""
        with _LOCK:
            if path in self._asked:
                # Saves finish in order: earlier requests that are not durable have failed.
                while (first := next(iter(self._asked))) != path:
                    del self._asked[first]
                later = dict(self._asked)
                self._asked = {path: later.pop(path)}
                self._replay()
                self._asked, self._base = later, self._snapshot()
                self._replay()
            stays = (path, self.spare, self._last_finite())
            ready = [
                other
                for other, (by, _) in self.displaced.items()
                if by not in self._asked and other not in stays
            ]
            for other in ready:
                del self.displaced[other]
                self._base[2].pop(other, None)
            self.late = []
            self.tainted.difference_update(ready)
            return ready

    def taint(self, path: str) -> None:
        """Record that the weights of ``path`` are not finite; call it before `confirm`."""
        with _LOCK:
            self.tainted.add(path)

    def _last_finite(self) -> str:
        """The last replaced checkpoint with finite weights, if all kept ones are tainted; or ""."""
        there = {*self.kept, self.newest, self.spare} - {"", *self._asked}
        if not there <= self.tainted:
            return ""
        return next(
            (path for path in reversed(self.displaced) if path not in self.tainted), ""
        )

    def fail(self, path: str) -> None:
        """Undo the request of ``path``, whose save failed: it replaces nothing."""
        with _LOCK:
            if path in self._asked:
                del self._asked[path]
                self._replay()

    def _snapshot(
        self,
    ) -> tuple[
        dict[str, float], str, dict[str, tuple[str, float | None]], list[str], str
    ]:
        return (
            dict(self.kept),
            self.newest,
            dict(self.displaced),
            list(self.yielding),
            self.spare,
        )

    def _replay(self) -> None:
        """Recompute the state from the requests that did not fail."""
        kept, self.newest, displaced, yielding, self.spare = self._base
        self.kept, self.displaced, self.yielding = (
            dict(kept),
            dict(displaced),
            list(yielding),
        )
        for path, score in self._asked.items():
            self._apply(path, score)

    def put_off(self, path: str, left: list[str]) -> None:
        """Retry the deletion of ``left``, which failed after ``path`` became durable, after the next save."""
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
        """Restore the state from a checkpoint; no save is in progress then."""
        self.kept, self.newest, self.yielding, self.spare = (
            dict(kept),
            newest,
            list(yielding),
            spare,
        )
        self.displaced = dict.fromkeys([*yielding, *filter(None, [spare])], ("", None))
        self.tainted = set(tainted)
        self._asked = {}

    def _best(self, scores: Mapping[str, float]) -> str:
        found = ""
        for path, score in scores.items():
            if not found or self.better(score, scores[found]):
                found = path
        return found


@final
@dataclass
class _Request:
    """The checkpoint request that the loop carries out."""

    reason: str
    path: Location
    weights_only: bool
    files: CheckpointFiles
    done: bool = False

    @property
    def next_try(self) -> str:
        return self.files.next_try()

    def not_finite(self) -> None:
        self.files.retention.taint(str(self.path))

    def committed(self, path: Location) -> str | None:
        self.done = True
        return self.files._saved(str(self.path))

    def saved(self, path: Location) -> None:
        problem = None if self.done else self.files._saved(str(self.path))
        if problem is not None:
            warnings.warn(problem, stacklevel=2)

    def failed(self, path: Location) -> None:
        self.files.retention.fail(str(self.path))


@final
class CheckpointFiles:
    """Names, requests, keeps and deletes the checkpoints of one callback.

    Args:
        dirpath: the absolute directory, or its URL; None until the directory of the run is known.
        name: makes a name from values.
        retention: decides which checkpoints are kept.
        weights_only: request checkpoints of the weights only.
        versions: append ``-v1``, … to a name in use, instead of overwriting.
        ranked: scores are a monitored value, so the index names the best one ``best``.

    Attributes:
        next_try: describes when the next checkpoint is due; set by the callback.
        name_of: makes a path from values and a version; set by the callback.
        first_version: the first number of the version counter.
        alias: makes another name of the newest checkpoint in the index, or None.
        also_lightning: whether a file that Lightning reads is written beside each checkpoint.
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
        self.first_version = 1
        self.also_lightning = False
        self.alias: CheckpointName | None = None
        self._aliases: dict[str, str] = {}  # by path, until it is durable
        self._marked = ""
        self.asked_step = 0
        self._unrated = ""  # the checkpoint requested at `asked_step` without a score
        self._default = dirpath is None
        self._before: tuple[str, float | None] = (
            "",
            None,
        )  # the best in the directory that the run used before the resume
        self._taken: list[
            str
        ] = []  # names that existed before this run, which it must not overwrite
        self._others: list[CheckpointFiles] = []
        self._is_zero = False

    @property
    def best(self) -> tuple[str, float | None]:
        """The best requested checkpoint and its score, here or in the directory before the resume; ``("", None)``."""
        path, (before, value) = self.retention.best, self._before
        score = self.retention.kept.get(path)
        if before and (
            score is None
            or (value is not None and not self.retention.better(score, value))
        ):
            return self._before
        return path, score

    def open(self, trainer: TrainerLike, others: Iterable[CheckpointFiles]) -> None:
        """Prepare for an entry point, in ``setup``, before state is restored."""
        if self._default:
            self.dirpath = str(absolute(trainer.checkpoint_dir))
        self._others = list(others)
        self._is_zero = trainer.is_global_zero

    def start(self, trainer: TrainerLike, restored: bool) -> None:
        """Begin a fit, after state is restored; rank 0 reads the disk for all ranks.

        Args:
            trainer: the Trainer of the fit.
            restored: the state of this directory was restored.
        """
        self.asked_step = trainer.global_step  # no step has run since
        assert self.dirpath is not None
        from trainer_kit.core.collective_errors import on_rank_zero

        kept, newest, before = (
            self.retention.kept,
            self.retention.newest,
            self._before[0],
        )
        gone, there, cut_short = on_rank_zero(
            trainer.strategy.world, lambda: self._read_directory(restored)
        )
        # Deleted by the user, or by a later part of the run before it was resumed from here.
        for path in gone:
            kept.pop(path, None)
            if path == self.retention.spare:
                self.retention.spare = ""
        if before in gone:
            self._before = ("", None)
        if not restored:
            self._unrated = ""
        if not restored and not self.ranked:
            self.retention.age()  # the steps of this fit restart at 0
            kept = self.retention.kept
        if not restored:
            mine = {os.path.basename(path) for path in self.retention.live}
            self._taken = [name for name in there if name not in mine]
        if cut_short:
            # The process that saved it may have died before it deleted the replaced ones, and no save may follow.
            problem = self._delete_replaced(newest, self.retention.confirm(newest), {})
            if problem is not None:
                warnings.warn(problem, stacklevel=2)

    def _read_directory(self, restored: bool) -> tuple[list[str], list[str], bool]:
        """Missing checkpoints; names in the directory; whether replaced checkpoints may still exist."""
        from trainer_kit.checkpoint.store import entries, lookup

        assert self.dirpath is not None
        held, before = self.retention, self._before[0]
        own = (*held.kept, held.spare) if restored else ()
        gone = [path for path in (*own, before) if path and not locate(path).is_dir()]
        if restored:
            return gone, [], lookup(self.dirpath, "last") == locate(held.newest)
        return (
            gone,
            sorted(entry.name for entry in entries(locate(self.dirpath))),
            False,
        )

    def ask(
        self,
        trainer: TrainerLike,
        reason: str,
        score: float | None,
        together: bool = True,
    ) -> str:
        """Request a checkpoint of this step; a score of None keeps it only as the newest.

        Args:
            trainer: the Trainer of the fit.
            reason: for logs and reports.
            score: the value to compare by.
            together: every rank makes this request, so that rank 0 chooses the name for all.

        Returns:
            The path of the checkpoint.
        """
        path = ""
        if trainer.is_global_zero or not together:
            metrics = trainer.callback_metrics
            epoch, step = (
                metrics.get("epoch", trainer.current_epoch),
                metrics.get("step", trainer.global_step),
            )
            values = {**metrics, "epoch": int(epoch), "step": int(step)}
            path = self._free(values, trainer.global_step)
            self._aliases[path] = self.alias(values) if self.alias is not None else ""
        if together and trainer.world_size > 1:
            path = trainer.strategy.world.broadcast(path)
        self.asked_step, self._unrated = (
            trainer.global_step,
            "" if score is not None else path,
        )
        self.retention.ask(path, score)
        trainer.request_checkpoint(
            reason, _Request(reason, locate(path), self.weights_only, self)
        )
        return path

    def rate(self, score: float) -> None:
        """Set the score of the checkpoint requested at this step, which was not known at the request."""
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
        if (
            os.path.dirname(path) not in ("", self.dirpath)
            or not name
            or name.startswith(".")
        ):
            raise ConfigurationError(
                "format_checkpoint_name must return a directory directly in dirpath",
                found=path,
                fix=f"return a path directly in {self.dirpath}, and put another folder into dirpath=",
            )
        return str(locate(self.dirpath) / name)

    def _used(self, path: str, step: int) -> bool:
        if os.path.basename(path) in self._taken or path in self.retention.live:
            return True
        for other in self._others:
            shared = (
                other.asked_step == step and other.weights_only == self.weights_only
            )
            if path in other.retention.live and not (
                shared and path == other.retention.newest
            ):
                return True
        return False

    def _saved(self, path: str) -> str | None:
        ready = self.retention.confirm(path)
        best = self.retention.durable_best if self.ranked else ""
        alias, before = self._aliases.pop(path, ""), self._marked
        self._marked = alias
        names: dict[str, str | None] = {before: None} if before else {}
        names |= {
            name: value
            for name, value in ((alias, path), ("last", path), ("best", best))
            if name and value
        }
        problem = (
            write_lightning_file(path)
            if self.also_lightning and self._is_zero
            else None
        )
        return self._delete_replaced(path, ready, names) or problem

    def _delete_replaced(
        self, path: str, ready: list[str], names: Mapping[str, str | None]
    ) -> str | None:
        """Point ``names`` of the index at checkpoints, then delete those that the durable ``path`` replaced.

        Returns:
            The problem, if any: the checkpoint itself is safe, so the run continues.
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
                if locate(old).exists() and not any(
                    other.retention.holds(old) for other in self._others
                ):
                    remove_checkpoint(old)
                    if any(files.also_lightning for files in (self, *self._others)):
                        remove_lightning_file(old)
        except (CheckpointError, OSError) as error:
            self.retention.put_off(path, [old for old in ready if _may_exist(old)])
            return f"after saving {path}: {error}"
        return None

    def state_dict(self) -> dict[str, Any]:
        """The state; it depends only on the requests, never on when a save finished."""
        held, (best, score) = self.retention, self.best
        return {
            "dirpath": self.dirpath,
            "best": best,
            "best_score": score,
            "kept": dict(held.kept),
            "newest": held.newest,
            # Those replaced earlier are deleted before this is durable, unless the deletion failed.
            "yielding": list(dict.fromkeys([*held.yielding, *held.late])),
            "spare": held.spare,
            "not_finite": sorted(held.tainted & held.live),
            "taken": list(self._taken),
            "unrated": self._unrated,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore ``state``; False, with only the best restored, if it describes another directory."""
        place = state["dirpath"]
        if (
            self.dirpath is not None
            and place != self.dirpath
            and _has_moved(place, self.dirpath, state["newest"])
        ):
            state, place = _moved(state, self.dirpath), self.dirpath
        best, kept = state["best"], state["kept"]
        here = self.dirpath is None or place == self.dirpath
        self._before = (
            ("", None)
            if here and best in kept
            else (best, state.get("best_score", kept.get(best)))
        )
        if not here:
            if self._is_zero and not self._default:
                warnings.warn(
                    f"ModelCheckpoint now writes to {self.dirpath}, no longer to {place}: "
                    "it restores only the best checkpoint",
                    stacklevel=2,
                )
            return False
        held = self.retention
        # A checkpoint may be untrusted: ignore its paths outside the directory, so that they are never deleted.
        newest, spare = state["newest"], state.get("spare", "")
        held.restore(
            kept={
                path: score
                for path, score in kept.items()
                if os.path.dirname(path) == place
            },
            newest=newest if os.path.dirname(newest) == place else "",
            yielding=[
                path for path in state["yielding"] if os.path.dirname(path) == place
            ],
            spare=spare if os.path.dirname(spare) == place else "",
            tainted=state.get("not_finite", ()),
        )
        self._unrated = state.get("unrated", "") if held.newest else ""
        self._taken = list(state["taken"])
        return True


def _has_moved(old: str, new: str, newest: str) -> bool:
    """Whether ``new`` is the directory ``old`` under another path, or moved with its content."""
    if is_url(old) or is_url(new):
        return False
    if os.path.realpath(old) == os.path.realpath(new):
        return True
    return not os.path.exists(old) and os.path.isdir(
        os.path.join(new, os.path.basename(newest) or os.curdir)
    )


def _moved(state: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The state with its paths in ``place``."""
    old = state["dirpath"]

    def there(path: str) -> str:
        return (
            os.path.join(place, os.path.basename(path))
            if os.path.dirname(path) == old
            else path
        )

    return {
        **state,
        "dirpath": place,
        "kept": {there(path): score for path, score in state["kept"].items()},
        **{
            name: there(state.get(name, ""))
            for name in ("best", "newest", "spare", "unrated")
        },
        **{
            name: [there(path) for path in state.get(name, ())]
            for name in ("yielding", "not_finite")
        },
    }


def _may_exist(path: str) -> bool:
    try:
        return locate(path).exists()
    except OSError:  # the storage does not answer
        return True
