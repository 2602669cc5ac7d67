"""The checkpoints of one callback in one directory: their names, requests, and deleting those that are replaced."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

from trainer_kit.callbacks.checkpoint_name import CheckpointName
from trainer_kit.callbacks.lightning_files import (
    remove_lightning_file,
    write_lightning_file,
)
from trainer_kit.callbacks.retention import Retention
from trainer_kit.core.errors import CheckpointError, ConfigurationError
from trainer_kit.core.location import Location, absolute, is_url, locate
from trainer_kit.core.protocols import TrainerLike
from trainer_kit.core.types import SavedState, StateDict

__all__ = ["CheckpointFiles"]


@final
@dataclass
class _Request:
    """The checkpoint request that the loop carries out."""

    reason: str
    path: Location
    weights_only: bool
    files: CheckpointFiles
    # Whether the writer thread has finished it (`committed`), so that the loop need not (`saved`).
    done: bool = False

    @property
    def next_try(self) -> str:
        return self.files.describe_next_try()

    def not_finite(self) -> None:
        self.files.retention.taint(str(self.path))

    def committed(self, path: Location) -> str | None:
        self.done = True
        return self.files.finish_save(str(self.path))

    def saved(self, path: Location) -> None:
        if self.done:
            return
        problem = self.files.finish_save(str(self.path))
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
        also_lightning: write a file that Lightning reads beside each checkpoint.

    Attributes:
        asked_step: the step of the last request.
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
        also_lightning: bool,
    ) -> None:
        self.dirpath = dirpath
        self.name = name
        self.retention = retention
        self.weights_only = weights_only
        self.versions = versions
        self.ranked = ranked
        self.also_lightning = also_lightning
        # The callback sets these four in `open`: a subclass may override them after this.
        self.describe_next_try: Callable[[], str] = str
        self._make_path: Callable[..., str] = name
        self._first_version = 1
        self._alias: CheckpointName | None = None
        # Path → its other name in the index, until the checkpoint is durable.
        self._aliases: dict[str, str] = {}
        # The other name that the index has now, or "".
        self._marked_alias = ""
        self.asked_step = 0
        # The checkpoint requested at `asked_step` without a score.
        self._unrated = ""
        self._in_run_directory = dirpath is None
        # The best in the directory that the run used before the resume, and its score.
        self._best_before: tuple[str, float | None] = ("", None)
        # Names that existed before this run, which it must not overwrite.
        self._taken: list[str] = []
        # Those of the other callbacks, which may write to the same directory.
        self._siblings: list[CheckpointFiles] = []
        self._is_zero = False

    @property
    def best(self) -> tuple[str, float | None]:
        """The best requested checkpoint and its score, here or in the directory before the resume; ``("", None)``."""
        # The best before a resume in another directory is not managed here, but stays the best until it is beaten.
        path = self.retention.best
        score = self.retention.kept.get(path)
        path_before, score_before = self._best_before
        if not path_before:
            return path, score
        if score is None:
            return self._best_before
        if score_before is None or self.retention.better(score, score_before):
            return path, score
        return self._best_before

    def open(
        self,
        trainer: TrainerLike,
        siblings: Iterable[CheckpointFiles],
        *,
        describe_next_try: Callable[[], str],
        make_path: Callable[..., str],
        first_version: int,
        alias: CheckpointName | None,
    ) -> None:
        """Prepare for an entry point, in ``setup``, before state is restored.

        Args:
            trainer: the Trainer of the entry point.
            siblings: the files of the other callbacks of this Trainer.
            describe_next_try: describes when the next checkpoint is due.
            make_path: makes a path from values and a version.
            first_version: the first number of the version counter.
            alias: makes another name of the newest checkpoint in the index, or None.
        """
        if self._in_run_directory:
            self.dirpath = str(absolute(trainer.checkpoint_dir))
        self._siblings = list(siblings)
        self._is_zero = trainer.is_global_zero
        self.describe_next_try = describe_next_try
        self._make_path = make_path
        self._first_version = first_version
        self._alias = alias

    def start(self, trainer: TrainerLike, restored: bool) -> None:
        """Begin a fit, after state is restored; rank 0 reads the disk for all ranks.

        Args:
            trainer: the Trainer of the fit.
            restored: the state of this directory was restored.
        """
        # No step has run since: a request at this step would save the same weights again.
        self.asked_step = trainer.global_step
        from trainer_kit.core.collective_errors import on_rank_zero

        newest = self.retention.newest
        missing, names, was_interrupted = on_rank_zero(
            trainer.strategy.world, lambda: self._read_directory(restored)
        )
        # Deleted by the user, or by a later part of the run before it was resumed from here.
        for path in missing:
            self.retention.forget(path)
        if self._best_before[0] in missing:
            self._best_before = ("", None)
        if not restored:
            self._begin_without_state(names)
        if was_interrupted:
            # The process that saved it may have died before it deleted the replaced ones, and no save may follow.
            replaced = self.retention.confirm(newest)
            problem = self._delete_replaced(newest, replaced, {})
            if problem is not None:
                warnings.warn(problem, stacklevel=2)

    def _begin_without_state(self, names: list[str]) -> None:
        """Begin a fit that resumes nothing, in a directory that has ``names``."""
        self._unrated = ""
        # The steps of this fit restart at 0, so its first checkpoint would count as older than those of the last fit.
        if not self.ranked:
            self.retention.age()
        live_names = {os.path.basename(path) for path in self.retention.live}
        self._taken = [name for name in names if name not in live_names]

    def _read_directory(self, restored: bool) -> tuple[list[str], list[str], bool]:
        """Missing checkpoints; names in the directory; whether replaced checkpoints may still exist."""
        from trainer_kit.checkpoint.store import entries, lookup

        assert self.dirpath is not None
        best_before, _ = self._best_before
        paths = [best_before]
        if restored:
            paths += self.retention.kept
            paths.append(self.retention.spare)
        missing = [path for path in paths if path and not locate(path).is_dir()]
        if restored:
            newest = locate(self.retention.newest)
            # `last` names the newest once its save has finished, and deletions follow.
            return missing, [], lookup(self.dirpath, "last") == newest
        names = sorted(entry.name for entry in entries(locate(self.dirpath)))
        return missing, names, False

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
        # Rank 0 chooses for all: names that ranks chose differently would be two checkpoints.
        path = ""
        if trainer.is_global_zero or not together:
            path = self._choose_path(trainer)
        if together and trainer.world_size > 1:
            path = trainer.strategy.world.broadcast(path)
        self.asked_step = trainer.global_step
        self._unrated = ""
        if score is None:
            self._unrated = path
        self.retention.ask(path, score)
        request = _Request(reason, locate(path), self.weights_only, self)
        trainer.request_checkpoint(reason, request)
        return path

    def _choose_path(self, trainer: TrainerLike) -> str:
        metrics = trainer.callback_metrics
        # A module may log values of these names; they take precedence.
        epoch = metrics.get("epoch", trainer.current_epoch)
        step = metrics.get("step", trainer.global_step)
        values = {**metrics, "epoch": int(epoch), "step": int(step)}
        path = self._find_unused_path(values, trainer.global_step)
        self._aliases[path] = ""
        if self._alias is not None:
            self._aliases[path] = self._alias(values)
        return path

    def rate(self, score: float) -> None:
        """Set the score of the checkpoint requested at this step, which was not known at the request."""
        if self._unrated:
            self.retention.rate(self._unrated, score)
            self._unrated = ""

    def _find_unused_path(self, values: Mapping[str, Any], step: int) -> str:
        # The plain name first; a number is added only if it would overwrite something.
        path = self._path_of_values(values)
        version = self._first_version
        while self.versions and self._is_used(path, step):
            path = self._path_of_values(values, ver=version)
            version += 1
        return path

    def _path_of_values(self, values: Mapping[str, Any], **version: int) -> str:
        assert self.dirpath is not None
        path = self._make_path(dict(values), **version)
        directory, name = os.path.split(path)
        # Retention deletes by path: a name that leads elsewhere must never get there.
        is_inside = directory in ("", self.dirpath)
        if not is_inside or not name or name.startswith("."):
            raise ConfigurationError(
                "format_checkpoint_name must return a directory directly in dirpath",
                found=path,
                fix=f"return a path directly in {self.dirpath}, and put another folder into dirpath=",
            )
        return str(locate(self.dirpath) / name)

    def _is_used(self, path: str, step: int) -> bool:
        if os.path.basename(path) in self._taken or path in self.retention.live:
            return True
        return any(
            path in sibling.retention.live and not self._shares(sibling, path, step)
            for sibling in self._siblings
        )

    def _shares(self, sibling: CheckpointFiles, path: str, step: int) -> bool:
        """Whether ``sibling`` requested the same content at ``path``: one checkpoint serves both callbacks."""
        if sibling.asked_step != step or sibling.weights_only != self.weights_only:
            return False
        return path == sibling.retention.newest

    def finish_save(self, path: str) -> str | None:
        """Update the index, and delete what the durable ``path`` replaced; may run in the writer thread.

        Returns:
            The problem, if any.
        """
        replaced = self.retention.confirm(path)
        alias = self._aliases.pop(path, "")
        names: dict[str, str | None] = {}
        if self._marked_alias:
            # None removes it from the index: it named the checkpoint before this one.
            names[self._marked_alias] = None
        self._marked_alias = alias
        if alias and path:
            names[alias] = path
        # `last` is updated before anything is deleted, so that it never names a missing checkpoint.
        if path:
            names["last"] = path
        if self.ranked:
            best = self.retention.durable_best
            if best:
                # Somebody may have deleted it meanwhile: None removes the name, and the other names stay.
                names["best"] = None
                if _may_exist(best):
                    names["best"] = best
        lightning_problem = None
        if self.also_lightning and self._is_zero:
            lightning_problem = write_lightning_file(path)
        problem = self._delete_replaced(path, replaced, names)
        return problem or lightning_problem

    def _delete_replaced(
        self, path: str, replaced: list[str], names: Mapping[str, str | None]
    ) -> str | None:
        """Point ``names`` of the index at checkpoints, then delete those that the durable ``path`` replaced.

        Returns:
            The problem, if any: the checkpoint itself is safe, so the run continues.
        """
        if not self._is_zero:
            return None
        from trainer_kit.checkpoint.store import mark

        assert self.dirpath is not None
        try:
            if names:
                mark(self.dirpath, **names)
            for checkpoint in replaced:
                self._delete_unless_shared(checkpoint)
        except (CheckpointError, OSError) as error:
            remaining = [
                checkpoint for checkpoint in replaced if _may_exist(checkpoint)
            ]
            self.retention.put_off(path, remaining)
            return f"after saving {path}: {error}"
        return None

    def _delete_unless_shared(self, checkpoint: str) -> None:
        from trainer_kit.checkpoint.commit import remove_checkpoint

        if not locate(checkpoint).exists():
            return
        # Another callback keeps the same directory: it deletes it when it no longer needs it.
        if any(sibling.retention.holds(checkpoint) for sibling in self._siblings):
            return
        remove_checkpoint(checkpoint)
        # The callback that wrote Lightning's file may have shared this checkpoint.
        if any(files.also_lightning for files in (self, *self._siblings)):
            remove_lightning_file(checkpoint)

    def state_dict(self) -> StateDict:
        """The state; it depends only on the requests, never on when a save finished."""
        retention = self.retention
        best, score = self.best
        # Those replaced earlier are deleted before this is durable, unless the deletion failed.
        yielding = dict.fromkeys([*retention.yielding, *retention.late])
        return {
            "dirpath": self.dirpath,
            "best": best,
            "best_score": score,
            "kept": dict(retention.kept),
            "newest": retention.newest,
            "yielding": list(yielding),
            "spare": retention.spare,
            "not_finite": sorted(retention.tainted & retention.live),
            "taken": list(self._taken),
            "unrated": self._unrated,
        }

    def load_state_dict(self, state: SavedState) -> bool:
        """Restore ``state``; False, with only the best restored, if it describes another directory."""
        directory = state["dirpath"]
        if self.dirpath is not None and directory != self.dirpath:
            if _has_moved(directory, self.dirpath, state["newest"]):
                state = _move_paths(state, self.dirpath)
                directory = self.dirpath
        is_same_directory = self.dirpath is None or directory == self.dirpath
        best = state["best"]
        scores = state["kept"]
        self._best_before = ("", None)
        if not is_same_directory or best not in scores:
            self._best_before = best, state.get("best_score", scores.get(best))
        if not is_same_directory:
            self._warn_of_new_directory(directory)
            return False
        self._restore_retention(state, directory)
        # Without a newest checkpoint there is none to rate.
        self._unrated = ""
        if self.retention.newest:
            self._unrated = state.get("unrated", "")
        self._taken = list(state["taken"])
        return True

    def _warn_of_new_directory(self, directory: str) -> None:
        # A new run without `dirpath` always has a directory of its own: no reason for a warning.
        if self._is_zero and not self._in_run_directory:
            warnings.warn(
                f"ModelCheckpoint now writes to {self.dirpath}, no longer to {directory}: "
                "it restores only the best checkpoint",
                stacklevel=3,
            )

    def _restore_retention(self, state: SavedState, directory: str) -> None:
        # A checkpoint may be untrusted: ignore its paths outside the directory, so that they are never deleted.
        def is_inside(path: str) -> bool:
            return os.path.dirname(path) == directory

        newest = state["newest"]
        if not is_inside(newest):
            newest = ""
        spare = state.get("spare", "")
        if not is_inside(spare):
            spare = ""
        scores = state["kept"].items()
        self.retention.restore(
            kept={path: score for path, score in scores if is_inside(path)},
            newest=newest,
            yielding=[path for path in state["yielding"] if is_inside(path)],
            spare=spare,
            tainted=state.get("not_finite", ()),
        )


def _has_moved(old_directory: str, new_directory: str, newest: str) -> bool:
    """Whether the new directory is the old one under another path, or moved with its content."""
    if is_url(old_directory) or is_url(new_directory):
        return False
    if os.path.realpath(old_directory) == os.path.realpath(new_directory):
        return True
    # The old one is still there: the new one is a copy or another directory, and its files are not this run's.
    if os.path.exists(old_directory):
        return False
    name = os.path.basename(newest) or os.curdir
    return os.path.isdir(os.path.join(new_directory, name))


def _move_paths(state: SavedState, new_directory: str) -> dict[str, Any]:
    """Return the state with its paths in ``new_directory``."""
    old_directory = state["dirpath"]

    def move(path: str) -> str:
        directory, name = os.path.split(path)
        if directory != old_directory:
            return path
        return os.path.join(new_directory, name)

    moved = {**state, "dirpath": new_directory}
    moved["kept"] = {move(path): score for path, score in state["kept"].items()}
    for key in ("best", "newest", "spare", "unrated"):
        moved[key] = move(state.get(key, ""))
    for key in ("yielding", "not_finite"):
        moved[key] = [move(path) for path in state.get(key, ())]
    return moved


def _may_exist(path: str) -> bool:
    try:
        return locate(path).exists()
    except OSError:
        # The storage does not answer: the deletion is tried again after the next save.
        return True
