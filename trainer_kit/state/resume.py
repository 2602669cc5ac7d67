"""Where an entry point starts: paths, ``"last"`` and ``"best"``, and the state that is read from there."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from torch import nn

from trainer_kit.checkpoint.lock import is_free
from trainer_kit.checkpoint.manifest import MANIFEST, read_manifest
from trainer_kit.checkpoint.read import (
    OF_A_RUN,
    describe_existing,
    is_complete,
    missing_checkpoint,
    read_checkpoint,
)
from trainer_kit.checkpoint.store import (
    candidates,
    checkpoints,
    commit_order,
    newest_verified,
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
from trainer_kit.state.collect import fitting, own_part, plain_hparams
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
    "compare_hparams",
    "held_of",
    "holds_weights",
    "load_weights",
    "read_rest",
    "read_start",
    "read_state",
]


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
    ) -> tuple[Location | None, bool, str]:
        """Where a fit begins: at the newest checkpoint of the run that it continues, else where the user says.

        Args:
            ckpt_path: as the user gave it; for a run without a checkpoint so far.
            weights_only: likewise.
            removed: names of incomplete saves that were discarded.

        Returns:
            A checkpoint or None; whether only its weights count; and the line to print once the step is known, which
            replaces ``{step}`` in it. A line that needs no step is printed here.
        """
        files, old = self.files, self.files.continued
        end = ""
        if old is not None:
            same = files.record is None or files.record.args == old.args
            again = (
                ""
                if same
                else f"; it was started with: {' '.join(old.args) or 'nothing'}"
            )
            end = f"{again}{f'; {discarded(removed)}' if removed else ''}"
            path = on_rank_zero(self.world, lambda: self._newest_of(old.id))
            if path is not None:
                done = ", which has finished" if old.status == "finished" else ""
                return (
                    path,
                    False,
                    f"resuming from step {{step}} (verified) of run {old.directory}{done}{end}",
                )
            files.say(
                f"run {old.directory} has no checkpoint yet: starting it from the beginning{end}"
            )
        elif files.resume == "auto" and files.records:
            earlier = files.record is not None and files.record.number > 1
            newest = (
                on_rank_zero(self.world, self._newest_of_other_runs)
                if earlier
                else None
            )
            hint = (
                ""
                if newest is None
                else f'; fit(ckpt_path="{newest}") continues from the newest checkpoint there'
            )
            files.say(f'resume="auto": {self._why_new()}: starting a new run{hint}')
        path = self.find(ckpt_path, whole_first=not weights_only)
        found = (
            f"starting from the weights in {path}"
            if weights_only
            else f"resuming from step {{step}} ({path})"
        )
        return path, weights_only, found

    def _newest_of(self, run: str) -> Location | None:
        recorded = self.files.recorded_directories(self.callbacks)
        return self._newest_verified(distinct([*recorded, *self._directories()]), run)

    def _why_new(self) -> str:
        record = self.files.record
        if record is None:
            return "this run keeps no checkpoints"
        return f"no unfinished run of {record.program} in {record.root}"

    def find(
        self, ckpt_path: str | os.PathLike[str] | None, whole_first: bool = False
    ) -> Location | None:
        """The path that ``ckpt_path`` means; None for None, and for ``"last"`` before the first checkpoint of a fit.

        Args:
            ckpt_path: as the user gave it. For ``"last"`` damaged checkpoints are skipped, and named.
            whole_first: for ``"last"``, a checkpoint of weights alone is taken only where there is nothing else.

        Raises:
            MissingCheckpointError: there is no such checkpoint; the message says which ones exist.
        """
        if ckpt_path is None:
            return None
        if ckpt_path == "best":
            return self._best()
        if ckpt_path == "last":
            return self._last(whole_first)
        if not isinstance(ckpt_path, (str, os.PathLike)):
            raise ConfigurationError(
                'ckpt_path must be a path, a URL, "last" or "best"',
                found=repr(ckpt_path),
                fix='ckpt_path="last" takes the newest checkpoint'
                if ckpt_path is True
                else None,
            )
        path = locate(ckpt_path)
        fail_together(self.world, lambda: self._check_path(path))
        return path

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

    def _last(self, whole_first: bool) -> Location | None:
        directories = self._directories()
        newest = on_rank_zero(
            self.world,
            lambda: self._newest_verified(directories, whole_first=whole_first),
        )
        if newest is not None:
            return newest
        shown = ", ".join(map(str, directories))
        other = on_rank_zero(self.world, self._newest_of_other_runs)
        if not self.fits:
            found = (
                f"{other}, of another run"
                if other is not None
                else "none of another run beside it either"
            )
            fix = None if other is None else f'to take it, name it: ckpt_path="{other}"'
            raise MissingCheckpointError(
                "last", f"no checkpoint is in {shown} yet", found=found, fix=fix
            )
        # The same command starts a run and continues it.
        hint = (
            ""
            if other is None
            else f'; to continue another run, name its checkpoint: ckpt_path="{other}"'
        )
        self.files.say(
            f"no checkpoint is in {shown} yet: this run starts from the beginning{hint}"
        )
        return None

    def _newest_of_other_runs(self) -> Location | None:
        """The newest checkpoint of runs in the directories beside this one's, for a message: it is never taken."""
        root = absolute(self.files.root)
        places = [
            absolute(directory / "checkpoints")
            for directory in self.files.run_directories()
        ]
        paths = [
            record.path
            for place in distinct([*places, root / "checkpoints"])
            for record in checkpoints(place)
        ]
        return max(paths, key=commit_order, default=None)

    def _check_path(self, path: Location) -> None:
        try:
            there = path.exists()
            several = (
                path.is_dir() and not (path / MANIFEST).exists() and candidates(path)
            )
        except OSError as error:
            raise CheckpointError(path, None, f"cannot be reached: {error}") from error
        if not there:
            directories = self._directories()
            fix = similar(path, directories, '"last"')
            raise missing_checkpoint(path, "does not exist", directories, fix=fix)
        if several:
            raise CheckpointError(
                path,
                None,
                "a directory of checkpoints, not one of them",
                fix=f"pass {several[0]}",
            )

    def _directories(self) -> list[Location]:
        """Where this Trainer writes checkpoints: the directories of its callbacks; without one the run's own."""
        named = named_directories(self.callbacks)
        unnamed = [callback for callback in self.callbacks if not callback.dirpath]
        if unnamed or not named:
            named.append(absolute(self.files.checkpoint_dir))
        return list(dict.fromkeys(named))

    def _newest_verified(
        self,
        directories: list[Location],
        run: str | None = None,
        whole_first: bool = False,
    ) -> Location | None:
        """The newest sound checkpoint of these directories. Damaged newer checkpoints are named; a fit sets them aside.

        Args:
            directories: where to look.
            run: look only at what this run can be continued from.
            whole_first: as for `find`.
        """
        sound: list[tuple[bool, Location]] = []
        rejected: list[tuple[Location, CheckpointError]] = []
        for directory in directories:
            if self.fits and is_free(directory):
                found = clean_directory(directory)
                if found:
                    self.files.say(f"{discarded(found)} in {directory}")
            path, damaged = newest_verified(directory, run, whole_first)
            rejected += damaged
            if path is not None:
                whole = not whole_first or "progress" in read_manifest(path)["parts"]
                sound.append((whole, path))
        if rejected and not sound:
            path, problem = rejected[0]
            raise CheckpointError(
                problem.file,
                problem.key,
                f"{problem.reason}; {path.parent} contains no intact checkpoint",
                fix="pass another ckpt_path, or leave it out to start a new run",
            )
        newest_first = sorted(
            sound, key=lambda item: (item[0], commit_order(item[1])), reverse=True
        )
        chosen = newest_first[0][1] if newest_first else None
        for path, problem in rejected:
            where = (
                f"; it is now {set_aside(path).name}"
                if self.fits and is_free(path.parent)
                else ""
            )
            self.files.say(
                f"checkpoint {path.name} rejected: {Path(problem.file).name}: {problem.reason}; "
                f"falling back to {chosen and chosen.name}{where}"
            )
        return chosen


def read_state(path: Location, weights_only: bool) -> dict[str, Any]:
    """The whole state of a run; or weights, from anything that holds them, without the parts for resuming."""
    if path.is_dir() and is_complete(path):
        return _with_weights(
            path, read_checkpoint(path, parts=_parts(path, weights_only))
        )
    if not path.is_dir() and not weights_only:
        raise holds_weights(path)
    found = read_module(path, whole=True)
    return {
        name: value
        for name, value in found.items()
        if name not in OF_A_RUN and not name.startswith(own_part(""))
    }


def _parts(path: Location, weights_only: bool) -> list[str]:
    """The parts to read: the weights, and the entries that ``on_save_checkpoint`` hooks have added."""
    known = [
        part
        for part in read_manifest(path)["parts"]
        if not part.startswith(own_part(""))
    ]
    return [part for part in known if part not in OF_A_RUN] if weights_only else known


def read_start(
    path: Location, weights_only: bool, strategy: Strategy
) -> dict[str, Any]:
    """`read_state`; for a sharded engine only what composition needs, and None for each part that `read_rest` reads."""

    def read() -> dict[str, Any]:
        if not strategy.sharded:
            return read_state(path, weights_only)
        if weights_only or not (path.is_dir() and is_complete(path)):
            return {}
        known = read_manifest(path)["parts"]
        return {
            **dict.fromkeys(known),
            **read_checkpoint(
                path,
                parts=[
                    part for part in ("callbacks", "progress", "seed") if part in known
                ],
            ),
        }

    return fail_together(strategy.world, read)


def held_of(
    strategy: Strategy, module: nn.Module
) -> tuple[dict[str, Any], Collection[str]]:
    """The tensors of a module that this rank holds, by their names in checkpoints, and the names that others hold."""
    like = strategy.module_state(module)
    others = {
        first: like[name]
        for name, first in strategy.shared_names(module).items()
        if name in like
    }
    return {**like, **others}, strategy.held_elsewhere(module)


def read_rest(
    state: dict[str, Any],
    path: Location,
    weights_only: bool,
    strategy: Strategy,
    module: nn.Module,
) -> dict[str, Any]:
    """The whole state, after `read_start`; for a sharded engine each rank gets the parts of tensors that it holds."""
    if not strategy.sharded:
        return state
    if not (path.is_dir() and is_complete(path)):
        return fail_together(strategy.world, lambda: read_state(path, weights_only))
    from trainer_kit.checkpoint.sharded import (
        read_divided,
    )  # torch.distributed's planner

    known, parts = read_manifest(path)["parts"], _parts(path, weights_only)
    like, absent = fail_together(strategy.world, lambda: held_of(strategy, module))
    elsewhere = dict.fromkeys(
        ("model", "current_model_state", "optimizer_states"), absent
    )
    state = read_divided(
        path, like, parts=parts, elsewhere=elsewhere, group=strategy.world.side_group()
    )
    mine = own_part(strategy.world.rank)
    if strategy.per_rank_state and mine in known and not weights_only:
        state.update(read_checkpoint(path, parts=[mine]))
    return _with_weights(path, state)


def _with_weights(path: Location, state: dict[str, Any]) -> dict[str, Any]:
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
    module: TrainModule, path: Location, bus: Bus, strategy: Strategy
) -> str | None:
    """Put the weights of a checkpoint into a module; returns a line if its hyperparameters differ."""
    alone = not (path.is_dir() and is_complete(path))
    if strategy.sharded:
        state = read_rest({}, path, alone, strategy, module)
    else:
        state = fail_together(
            strategy.world, lambda: read_state(path, weights_only=alone)
        )
    for hook in bus.on_load_checkpoint:
        hook(state)

    def load() -> None:
        with fitting("state_dict", RuntimeError):
            strategy.load_module_state(
                module, state["state_dict"], module.strict_loading
            )

    fail_together(strategy.world, load)
    return compare_hparams(module.hparams, state)


_MOST_NAMES: Final = 5


def compare_hparams(hparams: Mapping[str, Any], state: Mapping[str, Any]) -> str | None:
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
    shown = [
        mask_secrets({name: values[name] for name in names})
        for values in (current, saved)
    ]
    listed = [
        f"{name}={shown[0][name]!r} (checkpoint: {shown[1][name]!r})"
        for name in names[:_MOST_NAMES]
    ]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"hyperparameters of the module differ from the checkpoint's: {', '.join(listed)}{more}"


def _differ(value: Any, saved: Any) -> bool:
    """Whether two plain values differ; other objects are not compared."""
    plain = (bool, int, float, str, type(None))
    if isinstance(value, (list, tuple)) and isinstance(saved, (list, tuple)):
        pairs = zip(value, saved, strict=False)
        return len(value) != len(saved) or any(
            _differ(one, other) for one, other in pairs
        )
    if isinstance(value, Mapping) and isinstance(saved, Mapping):
        if {"repr"} in (value.keys(), saved.keys()):
            return False
        return value.keys() != saved.keys() or any(
            _differ(value[key], saved[key]) for key in value
        )
    if isinstance(value, plain) and isinstance(saved, plain):
        return value != saved and not (value != value and saved != saved)
    return False
