"""Where to go on from: paths, ``"last"`` and ``"best"``, and reading what is there."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from trainer_kit.checkpoint.lock import is_free
from trainer_kit.checkpoint.manifest import MANIFEST, read_manifest
from trainer_kit.checkpoint.read import is_complete, read_checkpoint, read_info, step_of
from trainer_kit.checkpoint.store import candidates, newest_verified, set_aside
from trainer_kit.checkpoint.weights import read_module
from trainer_kit.core.collective_errors import on_rank_zero, together
from trainer_kit.core.errors import CheckpointError, ConfigurationError
from trainer_kit.core.location import Location, absolute, is_url, locate
from trainer_kit.state.collect import OF_A_RUN, fitting, own_part
from trainer_kit.state.records import RUN, read_records
from trainer_kit.state.runs import distinct, recorded_places
from trainer_kit.step.bus import Bus
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.training.directories import clean_directory, discarded
from trainer_kit.training.session import Session

__all__ = [
    "find_checkpoint",
    "find_start",
    "held_of",
    "holds_weights",
    "load_weights",
    "read_rest",
    "read_start",
    "read_state",
]


def find_start(
    trainer: Session, ckpt_path: Any, weights_only: bool, removed: list[str]
) -> tuple[Location | None, bool, str]:
    """Where a fit begins: at the newest checkpoint of the run that it goes on with, else where the user says.

    Args:
        trainer: that fits.
        ckpt_path: as the user gave it; for a run that has no checkpoint of its own yet.
        weights_only: likewise.
        removed: names of incomplete saves that were discarded.

    Returns:
        A checkpoint or None; whether only its weights count; and, where one is to be said, a line with room for the
        step. One that needs no step is said already.
    """
    taken, keepers = trainer.taken, trainer.checkpoint_callbacks
    if taken is None:
        if trainer.resume == "auto" and not trainer.settings.fast:
            trainer.print(f'resume="auto": {_why_new(trainer)}: starting anew')
        path = find_checkpoint(trainer, ckpt_path, keepers, whole_first=not weights_only)
        return path, weights_only, _told(path, weights_only)
    same = trainer.record is None or trainer.record.args == taken.args
    again = "" if same else f"; it was started with: {' '.join(taken.args) or 'nothing'}"
    end = f"{again}{f'; {discarded(removed)}' if removed else ''}"
    path = on_rank_zero(
        trainer.strategy.world,
        lambda: _choose(trainer, distinct([*recorded_places(trainer), *_own(trainer, keepers)]), taken.id),
    )
    if path is None:
        trainer.print(f"run {taken.directory} has no checkpoint yet: starting it from the beginning{end}")
        path = find_checkpoint(trainer, ckpt_path, keepers, whole_first=not weights_only)
        return path, weights_only, _told(path, weights_only)
    done = ", which has finished" if taken.status == "finished" else ""
    return path, False, f"resuming from step {{step}} (verified) of run {taken.directory}{done}{end}"


def _told(path: Location | None, weights_only: bool) -> str:
    return f"starting from the weights in {path}" if weights_only else f"resuming from step {{step}} ({path})"


def _why_new(trainer: Session) -> str:
    if trainer.record is None:
        return "this run keeps no checkpoints"
    return f"no unfinished run of {trainer.record.program} in {trainer.record.root}"


def find_checkpoint(
    trainer: Session, ckpt_path: Any, keepers: Sequence[Any], whole_first: bool = False
) -> Location | None:
    """The path behind ``ckpt_path``; None for None, and for ``"last"`` ahead of the first checkpoint of a fit.

    Args:
        trainer: its directories are searched. For ``"last"`` damaged checkpoints are passed by, and named.
        ckpt_path: as the user gave it.
        keepers: the callbacks that keep checkpoints.
        whole_first: for ``"last"``, what holds weights alone is taken only where there is nothing else.
    """
    if ckpt_path is None:
        return None
    if ckpt_path == "best":
        for callback in keepers:
            if callback.best_model_path:
                return locate(callback.best_model_path)
        raise CheckpointError("best", None, "no checkpoint callback of this Trainer has a best checkpoint yet")
    if ckpt_path == "last":
        newest = on_rank_zero(trainer.strategy.world, lambda: _newest(trainer, keepers, whole_first))
        if newest is None and trainer.state_verb != "fit":
            raise CheckpointError("last", None, f"no checkpoint below {trainer.default_root_dir}")
        if newest is None:  # the same command starts a run and goes on with it
            trainer.print(f"no checkpoint below {trainer.default_root_dir} yet: this run starts from the beginning")
        return newest
    if not isinstance(ckpt_path, (str, os.PathLike)):
        raise ConfigurationError('ckpt_path is a path, a URL, "last" or "best"', found=repr(ckpt_path))
    path = locate(ckpt_path)

    def look() -> None:
        try:
            there = path.exists()
            several = path.is_dir() and not (path / MANIFEST).exists() and candidates(path)
        except OSError as error:
            raise CheckpointError(path, None, f"cannot be reached: {error}") from error
        if not there:
            raise CheckpointError(path, None, "does not exist", fix=_instead(trainer, path, keepers))
        if several:
            raise CheckpointError(path, None, "a directory of checkpoints, not one of them", fix=f"pass {several[0]}")

    together(trainer.strategy.world, look)
    return path


def _instead(trainer: Session, path: Location, keepers: Sequence[Any]) -> str | None:
    """What to pass instead of a path that is not there: a word that was meant, or a name like it beside it."""
    word = re.sub(r"(-v\d+)?(\.ckpt)?$", "", path.name).lower()
    if word in ("last", "best"):
        return f'pass "{word}": it is a name in the index of a directory, not a file'
    places = [path.parent, *_own(trainer, keepers)]
    names = {one.name: str(place / one.name) for place in reversed(places) for one in candidates(place)}
    close = difflib.get_close_matches(path.name.removesuffix(".ckpt"), names, n=1)
    if close:
        return f"did you mean {names[close[0]]}?"
    return f'pass "last", or one of: {", ".join(list(names.values())[:5])}' if names else None


def _newest(trainer: Session, keepers: Sequence[Any], whole_first: bool) -> Location | None:
    """The newest checkpoint that verifies: of this Trainer's directories, else of the newest run before it."""
    found = _choose(trainer, _own(trainer, keepers), whole_first=whole_first)
    if found is not None:
        return found
    if is_url(trainer.default_root_dir):
        return None  # every run of it writes to the same directory
    # A new process has a new run directory: look at the runs before it.
    earlier = [d for d in Path(trainer.default_root_dir).glob("**/checkpoints") if candidates(d)]
    if not earlier:
        return None
    newest = max(earlier, key=_changed)
    # Of runs beside each other their records say which is the newest; clocks jump.
    beside = [place for place in earlier if place.parent.parent == newest.parent.parent]
    newest = max(beside, key=lambda place: (_number(place), _changed(place)))
    return _choose(trainer, [newest], whole_first=whole_first)


def _own(trainer: Session, keepers: Sequence[Any]) -> list[Location]:
    named = [absolute(callback.dirpath) for callback in keepers if callback.dirpath]
    return list(dict.fromkeys([*named, absolute(trainer.checkpoint_dir)]))


def _choose(
    trainer: Session, places: list[Location], run: str | None = None, whole_first: bool = False
) -> Location | None:
    """The newest sound one of these directories; damaged ones ahead of it are named, and set aside by a fit.

    Args:
        trainer: that looks for it.
        places: the directories.
        run: look only at what this run can be continued from.
        whole_first: as for `find_checkpoint`.
    """
    sound: list[tuple[bool, int, Location]] = []
    rejected: list[tuple[Location, CheckpointError]] = []
    for place in places:
        if trainer.state_verb == "fit" and is_free(place):
            found = clean_directory(place)
            if found:
                trainer.print(f"{discarded(found)} in {place}")
        path, damaged = newest_verified(place, run, whole_first)
        rejected += damaged
        if path is not None:
            step = step_of(read_info(path))
            whole = not whole_first or "progress" in read_manifest(path)["parts"]
            sound.append((whole, -1 if step is None else step, path))
    if rejected and not sound:
        path, problem = rejected[0]
        raise CheckpointError(
            problem.file,
            problem.key,
            f"{problem.reason}; there is no sound checkpoint in {path.parent}",
            fix="pass the ckpt_path of another one, or leave ckpt_path out to start anew",
        )
    chosen = max(sound, key=lambda item: item[:2], default=(False, 0, None))[2]
    for path, problem in rejected:
        where = f"; it is now {set_aside(path).name}" if trainer.state_verb == "fit" and is_free(path.parent) else ""
        trainer.print(
            f"checkpoint {path.name} rejected: {Path(problem.file).name}: {problem.reason}; "
            f"falling back to {chosen and chosen.name}{where}"
        )
    return chosen


def _number(directory: Path) -> int:
    return max((record.number for record in read_records(directory.parent / RUN) or ()), default=0)


def _changed(directory: Path) -> int:
    return max(
        (path / MANIFEST if (path / MANIFEST).exists() else path).stat().st_mtime_ns for path in candidates(directory)
    )


def read_state(path: Location, weights_only: bool) -> dict[str, Any]:
    """The whole state; or the weights of anything that holds weights, with what is in no resumed run's state alone."""
    if path.is_dir() and is_complete(path):
        return _with_weights(path, read_checkpoint(path, parts=_parts(path, weights_only)))
    if not path.is_dir() and not weights_only:
        raise holds_weights(path)
    found = read_module(path, whole=True)
    return {name: value for name, value in found.items() if name not in OF_A_RUN and not name.startswith(own_part(""))}


def _parts(path: Location, weights_only: bool) -> list[str]:
    """What is read of a checkpoint: for its weights also what ``on_save_checkpoint`` hooks have added."""
    known = [part for part in read_manifest(path)["parts"] if not part.startswith(own_part(""))]
    return [part for part in known if part not in OF_A_RUN] if weights_only else known


def read_start(path: Location, weights_only: bool, strategy: Strategy) -> dict[str, Any]:
    """`read_state`; where ranks hold parts, what a fit is composed with, and None for what `read_rest` reads."""

    def read() -> dict[str, Any]:
        if not strategy.sharded:
            return read_state(path, weights_only)
        if weights_only or not (path.is_dir() and is_complete(path)):
            return {}
        known = read_manifest(path)["parts"]
        return {**dict.fromkeys(known), **read_checkpoint(path, parts=[part for part in ("seed",) if part in known])}

    return together(strategy.world, read)


def held_of(strategy: Strategy, module: Any) -> tuple[dict[str, Any], Collection[str]]:
    """What this rank holds of a module, by the names that checkpoints have for it, and those of what it does not."""
    like = strategy.module_state(module)
    others = {first: like[name] for name, first in strategy.shared_names(module).items() if name in like}
    return {**like, **others}, strategy.held_elsewhere(module)


def read_rest(
    state: dict[str, Any], path: Location, weights_only: bool, strategy: Strategy, module: Any
) -> dict[str, Any]:
    """The whole state, after `read_start`: each rank has of a divided module's tensors what it holds."""
    if not strategy.sharded:
        return state
    if not (path.is_dir() and is_complete(path)):
        return together(strategy.world, lambda: read_state(path, weights_only))
    from trainer_kit.checkpoint.sharded import read_divided  # torch.distributed's planner

    known, parts = read_manifest(path)["parts"], _parts(path, weights_only)
    like, absent = together(strategy.world, lambda: held_of(strategy, module))
    elsewhere = dict.fromkeys(("model", "current_model_state", "optimizer_states"), absent)
    state = read_divided(path, like, parts=parts, elsewhere=elsewhere, group=strategy.world.apart())
    mine = own_part(strategy.world.rank)
    if strategy.per_rank_state and mine in known and not weights_only:
        state.update(read_checkpoint(path, parts=[mine]))
    return _with_weights(path, state)


def _with_weights(path: Location, state: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(state.get("model"), dict):
        raise CheckpointError(path, "model", "there are no weights in this checkpoint")
    state["state_dict"] = state.pop("model")
    return state


def holds_weights(path: Location | None) -> CheckpointError:
    """The error for a run that is to go on from weights alone."""
    return CheckpointError(
        path, None, "holds weights, not a run", fix="pass weights_only=True to start a new run from them"
    )


def load_weights(module: Any, path: Location, bus: Bus, strategy: Strategy) -> None:
    """Put the weights of a checkpoint into a module."""
    alone = not (path.is_dir() and is_complete(path))
    if strategy.sharded:
        state = read_rest({}, path, alone, strategy, module)
    else:
        state = together(strategy.world, lambda: read_state(path, weights_only=alone))
    for hook in bus.on_load_checkpoint:
        hook(state)

    def load() -> None:
        with fitting("state_dict", RuntimeError):
            strategy.load_module_state(module, state["state_dict"], module.strict_loading)

    together(strategy.world, load)
