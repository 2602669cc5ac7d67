"""Where an entry point starts: paths, ``"last"`` and ``"best"``, and the state that is read from there.

Which checkpoint is the newest is decided in three stages, all on rank 0:

1. The directories: of the continued run by its record, and of the checkpoint callbacks, else of the run itself.
2. In each directory the first sound one of `candidates` (`newest_verified`): its index's ``last``, then the others by
   order of commit. The index's ``last`` is usually the newest commit, and counts also where it is not.
3. Among those of several directories the one that was committed last (`commit_order`): the numbers of commits are times
   in microseconds, so they compare between directories.

Neither names, steps nor times of files take part, with two exceptions: checkpoints of versions that had no commit
numbers, and those whose manifest cannot be read, which the time of their directory places among the others.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from torch import nn

from trainer_kit.checkpoint.lock import is_free
from trainer_kit.checkpoint.manifest import read_manifest
from trainer_kit.checkpoint.read import (
    RUN_PARTS,
    ResolvedCheckpoint,
    describe_existing,
    missing_checkpoint,
    read_parts,
    resolve_checkpoint,
)
from trainer_kit.checkpoint.store import (
    checkpoints,
    commit_order,
    newest_verified,
    refuse_directory_of_checkpoints,
    set_aside,
    similar,
)
from trainer_kit.checkpoint.weights import read_module
from trainer_kit.core.collective_errors import fail_together, on_rank_zero
from trainer_kit.core.display import mask_secrets
from trainer_kit.core.errors import (
    CheckpointError,
    ConfigurationError,
    MissingCheckpointError,
)
from trainer_kit.core.location import Location, absolute, locate
from trainer_kit.core.module import TrainModule
from trainer_kit.core.protocols import Group
from trainer_kit.state.checkpoint_errors import checkpoint_errors
from trainer_kit.state.collect import (
    State,
    plain_hparams,
    rank_part_name,
)
from trainer_kit.state.records import RunRecord
from trainer_kit.state.runs import (
    KeepsCheckpoints,
    RunFiles,
    clean_directory,
    discarded,
    distinct,
    named_directories,
)
from trainer_kit.step.bus import Bus
from trainer_kit.strategies.strategy import Strategy

__all__ = [
    "Search",
    "Source",
    "StartingPoint",
    "compare_hparams",
    "holds_weights",
    "load_weights",
    "local_tensors",
    "read_remaining",
    "read_start",
    "read_state",
    "resolve_source",
]


@final
@dataclass(frozen=True)
class Source:
    """Where the state of an entry point is read from; resolved and checked once, on the way in.

    Attributes:
        path: as messages name it.
        checkpoint: the checkpoint there; None: weights in another format.
    """

    path: Location
    checkpoint: ResolvedCheckpoint | None


def resolve_source(path: Location) -> Source:
    """Resolve a path; what is not a complete checkpoint may hold weights."""
    if not path.is_dir():
        return Source(path, None)
    try:
        return Source(path, resolve_checkpoint(path))
    except CheckpointError:  # reading its weights says what is wrong
        return Source(path, None)


@final
@dataclass(frozen=True)
class StartingPoint:
    """Where a fit begins.

    Attributes:
        source: the checkpoint; None: the fit starts without one.
        weights_only: whether only its weights count.
        line: what to print once it is restored, with ``{step}`` for its step.
    """

    source: Source | None
    weights_only: bool
    line: str = ""

    @property
    def resumes(self) -> bool:
        """Whether the fit continues at the step of the checkpoint."""
        return self.source is not None and not self.weights_only

    def line_at(self, step: int) -> str:
        """The line, with the step of the restored state."""
        return self.line.replace("{step}", str(step), 1)


@final
@dataclass(frozen=True)
class Search:
    """Finds the checkpoint at which an entry point starts.

    Attributes:
        files: of the run.
        callbacks: that keep checkpoints.
        world: all ranks; each method must be called by all of them.
        fits: whether the entry point is `fit`, which may discard incomplete saves and set damaged checkpoints aside.
    """

    files: RunFiles
    callbacks: Sequence[KeepsCheckpoints]
    world: Group
    fits: bool

    def start(
        self,
        ckpt_path: str | os.PathLike[str] | None,
        weights_only: bool,
        removed: list[str],
    ) -> StartingPoint:
        """Where a fit begins: at the newest checkpoint of the run that it continues, else where the user says.

        Args:
            ckpt_path: as the user gave it; for a run without a checkpoint so far.
            weights_only: likewise.
            removed: names of incomplete saves that were discarded.

        A line for a fit without a checkpoint is printed here.
        """
        files = self.files
        # The run's own checkpoints count more than `ckpt_path`, which the same command passed when it started the run.
        if files.continued is not None:
            resumed = self._resume_run(files.continued, removed)
            if resumed is not None:
                path, line = resumed
                return StartingPoint(self._resolve(path), False, line)
        elif files.resume == "auto" and files.records:
            self._report_new_run()
        start = self.find(ckpt_path, resumable_first=not weights_only)
        if start is None:
            return StartingPoint(None, weights_only)
        if weights_only:
            line = f"starting from the weights in {start.path}"
        else:
            line = f"resuming from step {{step}} ({start.path})"
        return StartingPoint(start, weights_only, line)

    def _resolve(self, path: Location) -> Source:
        return fail_together(self.world, lambda: resolve_source(path))

    def _resume_run(
        self,
        run: RunRecord,
        removed: list[str],
    ) -> tuple[Location, str] | None:
        """The newest checkpoint of this run and the line about it; None, after a line, if it has none yet."""
        details = ""
        record = self.files.record
        if record is not None and record.args != run.args:
            details += f"; it was started with: {' '.join(run.args) or 'nothing'}"
        if removed:
            details += f"; {discarded(removed)}"
        # Rank 0 alone looks: file systems may show other ranks another state.
        path = on_rank_zero(self.world, lambda: self._newest_of_run(run.id))
        if path is None:
            self.files.say(
                f"run {run.directory} has no checkpoint yet: starting it from the beginning{details}"
            )
            return None
        if run.status == "finished":
            details = f", which has finished{details}"
        return (
            path,
            f"resuming from step {{step}} (verified) of run {run.directory}{details}",
        )

    def _report_new_run(self) -> None:
        files = self.files
        newest = None
        if files.record is not None and files.record.number > 1:
            newest = on_rank_zero(self.world, self._newest_of_other_runs)
        hint = ""
        if newest is not None:
            hint = f'; fit(ckpt_path="{newest}") continues from the newest checkpoint there'
        files.say(f'resume="auto": {self._new_run_reason()}: starting a new run{hint}')

    def _newest_of_run(self, run_id: str) -> Location | None:
        recorded = self.files.recorded_directories(self.callbacks)
        return self._take_newest_sound(
            distinct([*recorded, *self._directories()]), run_id
        )

    def _new_run_reason(self) -> str:
        record = self.files.record
        if record is None:
            return "this run keeps no checkpoints"
        return f"no unfinished run of {record.program} in {record.root}"

    def find(
        self,
        ckpt_path: str | os.PathLike[str] | None,
        resumable_first: bool = False,
    ) -> Source | None:
        """What ``ckpt_path`` means; None for None, and for ``"last"`` before the first checkpoint of a fit.

        Args:
            ckpt_path: as the user gave it. For ``"last"`` damaged checkpoints are skipped, and named.
            resumable_first: for ``"last"``, a checkpoint of weights alone is taken only where there is nothing else.

        Raises:
            MissingCheckpointError: there is no such checkpoint; the message says which ones exist.
        """
        if ckpt_path is None:
            return None
        if ckpt_path == "best":
            return self._resolve(self._best())
        if ckpt_path == "last":
            newest = self._last(resumable_first)
            if newest is None:
                return None
            return self._resolve(newest)
        if not isinstance(ckpt_path, (str, os.PathLike)):
            fix = None
            if ckpt_path is True:
                fix = 'ckpt_path="last" takes the newest checkpoint'
            raise ConfigurationError(
                'ckpt_path must be a path, a URL, "last" or "best"',
                found=repr(ckpt_path),
                fix=fix,
            )
        path = locate(ckpt_path)
        return fail_together(self.world, lambda: self._check_path(path))

    def _best(self) -> Location:
        for callback in self.callbacks:
            if callback.best_model_path:
                return locate(callback.best_model_path)
        exists = on_rank_zero(
            self.world, lambda: describe_existing(self._directories())
        )
        raise MissingCheckpointError(
            "best",
            "no checkpoint callback of this Trainer has a best checkpoint yet",
            found=exists,
            fix='"best" is known after a fit of this Trainer with a ModelCheckpoint; pass a path, or "last" for the'
            " newest checkpoint in its directory",
        )

    def _last(self, resumable_first: bool) -> Location | None:
        directories = self._directories()
        newest = on_rank_zero(
            self.world,
            lambda: self._take_newest_sound(
                directories, resumable_first=resumable_first
            ),
        )
        if newest is not None:
            return newest
        shown = ", ".join(map(str, directories))
        of_another_run = on_rank_zero(self.world, self._newest_of_other_runs)
        if not self.fits:
            raise _no_checkpoint(shown, of_another_run)
        # The same command starts a run and continues it.
        hint = ""
        if of_another_run is not None:
            hint = f'; to continue another run, name its checkpoint: ckpt_path="{of_another_run}"'
        self.files.say(
            f"no checkpoint is in {shown} yet: this run starts from the beginning{hint}"
        )
        return None

    def _newest_of_other_runs(self) -> Location | None:
        """The newest checkpoint of runs in the directories beside this one's, for a message: it is never taken."""
        run_directories = self.files.run_directories()
        directories = [
            absolute(directory / "checkpoints") for directory in run_directories
        ]
        directories.append(absolute(self.files.root) / "checkpoints")
        paths: list[Location] = []
        for directory in distinct(directories):
            paths += [checkpoint.path for checkpoint in checkpoints(directory)]
        return max(paths, key=commit_order, default=None)

    def _check_path(self, path: Location) -> Source:
        try:
            exists = path.exists()
            refuse_directory_of_checkpoints(path)
        except OSError as error:
            raise CheckpointError(path, None, f"cannot be reached: {error}") from error
        if not exists:
            directories = self._directories()
            fix = similar(path, directories, '"last"')
            raise missing_checkpoint(path, "does not exist", directories, fix=fix)
        return resolve_source(path)

    def _directories(self) -> list[Location]:
        """Where this Trainer writes checkpoints: the directories of its callbacks; without one the run's own."""
        named = named_directories(self.callbacks)
        unnamed = [callback for callback in self.callbacks if not callback.dirpath]
        if unnamed or not named:
            # A callback without a directory keeps its checkpoints with the run.
            named.append(absolute(self.files.checkpoint_dir))
        return list(dict.fromkeys(named))

    def _take_newest_sound(
        self,
        directories: list[Location],
        run_id: str | None = None,
        resumable_first: bool = False,
    ) -> Location | None:
        """Choose the newest sound checkpoint of these directories, and print which newer ones are damaged.

        A fit also discards incomplete saves there, and sets the damaged checkpoints aside.

        Args:
            directories: where to look.
            run_id: look only at what this run can be continued from.
            resumable_first: as for `find`.
        """
        sound: list[Location] = []
        rejected: list[tuple[Location, CheckpointError]] = []
        for directory in directories:
            # An evaluation may run beside the training that writes there, and must not touch its files.
            if self.fits and is_free(directory):
                removed = clean_directory(directory)
                if removed:
                    self.files.say(f"{discarded(removed)} in {directory}")
            path, damaged = newest_verified(directory, run_id, resumable_first)
            rejected += damaged
            if path is not None:
                sound.append(path)
        # Starting again because all checkpoints are damaged would hide a loss: the user must decide.
        if rejected and not sound:
            path, problem = rejected[0]
            raise CheckpointError(
                problem.file,
                problem.key,
                f"{problem.reason}; {path.parent} contains no intact checkpoint",
                fix="pass another ckpt_path, or leave it out to start a new run",
            )
        newest = _newest(sound, resumable_first)
        # Only now: with nothing sound to fall back to, the damaged ones stay where they are for the user.
        for path, problem in rejected:
            renamed = ""
            if self.fits and is_free(path.parent):
                # So that the next start does not verify it again.
                renamed = f"; it is now {set_aside(path).name}"
            self.files.say(
                f"checkpoint {path.name} rejected: {Path(problem.file).name}: {problem.reason}; "
                f"falling back to {newest and newest.name}{renamed}"
            )
        return newest


def _newest(paths: Sequence[Location], resumable_first: bool) -> Location | None:
    """The checkpoint that was committed last; with ``resumable_first`` among those with more than weights, if any."""
    newest_first = sorted(paths, key=commit_order, reverse=True)
    if resumable_first:
        for path in newest_first:
            if "progress" in read_manifest(path)["parts"]:
                return path
    return next(iter(newest_first), None)


def _no_checkpoint(
    directories: str,
    of_another_run: Location | None,
) -> MissingCheckpointError:
    problem = f"no checkpoint is in {directories} yet"
    if of_another_run is None:
        return MissingCheckpointError(
            "last", problem, found="none of another run in its parent directory either"
        )
    return MissingCheckpointError(
        "last",
        problem,
        found=f"{of_another_run}, of another run",
        fix=f'to take it, name it: ckpt_path="{of_another_run}"',
    )


def read_state(source: Source, weights_only: bool) -> State:
    """The whole state of a run; or weights, from anything that holds them, without the parts for resuming."""
    path, checkpoint = source.path, source.checkpoint
    if checkpoint is not None:
        parts = _parts_to_read(checkpoint, weights_only)
        return _rename_weights(path, read_parts(checkpoint, parts))
    # A single file, of torch, safetensors or Lightning.
    if not path.is_dir() and not weights_only:
        raise holds_weights(path)
    # A file of another library may hold parts for resuming under the names of ours.
    module_state = read_module(path, whole=True)
    return {
        name: value for name, value in module_state.items() if not _is_run_part(name)
    }


def _is_run_part(name: str) -> bool:
    """Whether a part of a checkpoint serves only to resume its run."""
    return name in RUN_PARTS or name.startswith(rank_part_name(""))


def _parts_to_read(checkpoint: ResolvedCheckpoint, weights_only: bool) -> list[str]:
    """The shared parts; of weights alone also the entries that ``on_save_checkpoint`` hooks have added."""
    parts = checkpoint.parts
    if weights_only:
        return [part_name for part_name in parts if not _is_run_part(part_name)]
    # Each rank reads its own part of those, in `read_remaining`: they are as large as the model.
    return [
        part_name for part_name in parts if not part_name.startswith(rank_part_name(""))
    ]


def read_start(source: Source, weights_only: bool, strategy: Strategy) -> State:
    """`read_state`; for a sharded engine what composition needs, and None for each part that `read_remaining` reads."""

    def read() -> State:
        if not strategy.sharded:
            return read_state(source, weights_only)
        # Tensors are read once the module is sharded: before, each rank would need memory for the whole model.
        checkpoint = source.checkpoint
        if weights_only or checkpoint is None:
            return {}
        parts = checkpoint.parts
        needed = [
            part_name
            for part_name in ("callbacks", "progress", "seed")
            if part_name in parts
        ]
        # Names without values tell composition which parts there are.
        return {**dict.fromkeys(parts), **read_parts(checkpoint, needed)}

    return fail_together(strategy.world, read)


def local_tensors(
    strategy: Strategy,
    module: nn.Module,
) -> tuple[State, Collection[str]]:
    """The tensors of a module that this rank holds, by their names in checkpoints, and the names that others hold."""
    state = strategy.module_state(module)
    tensors = dict(state)
    for name, name_in_checkpoint in strategy.shared_names(module).items():
        # Only one of the ranks that share a parameter may hold it.
        if name in state:
            tensors[name_in_checkpoint] = state[name]
    return tensors, strategy.held_elsewhere(module)


def read_remaining(
    state: State,
    source: Source,
    weights_only: bool,
    strategy: Strategy,
    module: nn.Module,
) -> State:
    """The whole state, after `read_start`; for a sharded engine each rank gets the parts of tensors that it holds."""
    world = strategy.world
    if not strategy.sharded:
        return state
    path, checkpoint = source.path, source.checkpoint
    if checkpoint is None:
        return fail_together(world, lambda: read_state(source, weights_only))
    # torch's planner takes half a second to import.
    from trainer_kit.checkpoint.sharded import read_divided

    tensors, absent = fail_together(world, lambda: local_tensors(strategy, module))
    # Collective; it raises on all ranks or on none, so it needs no `fail_together`.
    state = read_divided(
        path,
        tensors,
        parts=_parts_to_read(checkpoint, weights_only),
        elsewhere=dict.fromkeys(
            ("model", "current_model_state", "optimizer_states"), absent
        ),
        group=world.side_group(),
    )
    part_name = rank_part_name(world.rank)
    has_rank_part = part_name in checkpoint.parts
    if strategy.per_rank_state and not weights_only and has_rank_part:
        state.update(read_parts(checkpoint, [part_name]))
    return _rename_weights(path, state)


def _rename_weights(path: Location, state: State) -> State:
    """The state with its weights under the name that `collect` gives them."""
    if not isinstance(state.get("model"), dict):
        raise CheckpointError(path, "model", "this checkpoint holds no weights")
    state["state_dict"] = state.pop("model")
    return state


def holds_weights(path: Location | None) -> CheckpointError:
    """The error for a run that cannot continue because the checkpoint holds weights alone."""
    fix = "pass load_weights_only=True to start a new run from them"
    if path is not None and path.name.endswith(".ckpt") and not path.is_dir():
        target = str(path).removesuffix(".ckpt")
        fix = f'if Lightning wrote it: trainer-kit checkpoint import {path}, and ckpt_path="{target}"; or {fix}'
        return CheckpointError(
            path,
            None,
            "a file of weights cannot be resumed; pass a checkpoint directory",
            fix=fix,
        )
    return CheckpointError(
        path, None, "holds only weights, and cannot be resumed", fix=fix
    )


def load_weights(
    module: TrainModule,
    source: Source,
    bus: Bus,
    strategy: Strategy,
) -> str | None:
    """Put the weights of a checkpoint into a module; returns a line if its hyperparameters differ."""
    # Files of other libraries are read for their weights.
    weights_only = source.checkpoint is None
    if strategy.sharded:
        state = read_remaining({}, source, weights_only, strategy, module)
    else:
        state = fail_together(strategy.world, lambda: read_state(source, weights_only))
    # Hooks may rename weights: before they are loaded.
    for hook in bus.on_load_checkpoint:
        hook(state)

    def load() -> None:
        with checkpoint_errors("state_dict", RuntimeError):
            strategy.load_module_state(
                module, state["state_dict"], module.strict_loading
            )

    fail_together(strategy.world, load)
    return compare_hparams(module.hparams, state)


_MOST_NAMES: Final = 5


def compare_hparams(
    hparams: Mapping[str, object],
    state: Mapping[str, object],
) -> str | None:
    """A line that names the hyperparameters of a module that a checkpoint has with another value; None without any."""
    saved = state.get("hyper_parameters")
    if not isinstance(saved, Mapping):
        return None
    current, _ = plain_hparams(hparams)
    names = [
        name
        for name in current
        if name in saved and _differ(current[name], saved[name])
    ]
    if not names:
        return None
    masked = mask_secrets({name: current[name] for name in names})
    masked_saved = mask_secrets({name: saved[name] for name in names})
    differences = ", ".join(
        f"{name}={masked[name]!r} (checkpoint: {masked_saved[name]!r})"
        for name in names[:_MOST_NAMES]
    )
    if len(names) > _MOST_NAMES:
        differences += f" and {len(names) - _MOST_NAMES} more"
    return f"hyperparameters of the module differ from the checkpoint's: {differences}"


_PLAIN: Final = (bool, int, float, str, type(None))


def _differ(value: object, saved: object) -> bool:
    """Whether two plain values differ; other objects are not compared."""
    if isinstance(value, (list, tuple)) and isinstance(saved, (list, tuple)):
        if len(value) != len(saved):
            return True
        return any(map(_differ, value, saved))
    if isinstance(value, Mapping) and isinstance(saved, Mapping):
        names, saved_names = value.keys(), saved.keys()
        # A value that a checkpoint holds by its repr only cannot be compared.
        if {"repr"} in (names, saved_names):
            return False
        if names != saved_names:
            return True
        return any(_differ(value[name], saved[name]) for name in names)
    if not isinstance(value, _PLAIN) or not isinstance(saved, _PLAIN):
        return False
    # NaN differs from itself, but an unchanged NaN is no change.
    both_nan = value != value and saved != saved
    return value != saved and not both_nan
