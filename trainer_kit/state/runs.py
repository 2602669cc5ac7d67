"""Which run is it: what a fit goes on with, and what the next start will be told of it."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final, final

from trainer_kit.checkpoint.commit import versions as library_versions
from trainer_kit.checkpoint.manifest import read_manifest
from trainer_kit.checkpoint.store import checkpoints
from trainer_kit.core.atomic_files import discard_torn
from trainer_kit.core.errors import CheckpointError, ConfigurationError
from trainer_kit.core.location import Location, absolute, is_url, locate
from trainer_kit.launch.identity import HANDED_OVER, arguments, handed_over, launches, script
from trainer_kit.state.records import RUN, RunRecord, read_records, record_problem, write_record

__all__ = [
    "begin_run",
    "check_records",
    "choose_run",
    "count_fit",
    "distinct",
    "follow",
    "hand_over",
    "logger_states",
    "recorded_places",
]


@final
class _Execution:
    """This process's run of its script."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(8)
        self.fits = 0
        self.chosen = False  # a fit was resumed, or might have been: the next ones belong to the same execution
        self.begun: dict[str, RunRecord] = {}
        self.pid = 0

    def at_exit(self) -> None:
        """The script is over; unless an exception or a signal ended it, nothing of it is to be taken up again."""
        failed = hasattr(sys, "last_value") or any(record.status != "finished" for record in self.begun.values())
        if failed or os.getpid() != self.pid:
            return
        for record in reversed(self.begun.values()):  # the first decides what becomes of the others
            with suppress(CheckpointError):
                write_record(replace(record, ended=True))

    def note(self, record: RunRecord) -> None:
        """A record of this process, as it was written last."""
        if not self.pid:
            self.pid = os.getpid()
            atexit.register(self.at_exit)
        self.begun[record.id] = record


_EXECUTION: Final = _Execution()


def count_fit() -> None:
    """One more fit of this process has begun."""
    _EXECUTION.fits += 1


def choose_run(trainer: Any) -> tuple[RunRecord | None, RunRecord | None]:
    """The record of the next fit, and the one that it goes on with, if any: then the loggers go on there.

    On rank 0. A restart goes on with what it restarts; ``resume="auto"`` with the newest unfinished run of the same
    key. A finished fit counts as unfinished until its script is: it is loaded, not trained again.
    """
    if trainer.settings.fast:
        return None, None
    path, again, words = script(), launches(), arguments()
    restarted = [name for name, is_restart in again.items() if is_restart]
    known = (record for directory in _run_directories(trainer) for record in _sound(directory / RUN))
    found = sorted(known, key=lambda record: record.number, reverse=True)
    given = handed_over() if _EXECUTION.fits == 0 else {}
    new = RunRecord(
        id=given.get("id") or secrets.token_hex(8),
        number=1 + max((record.number for record in found), default=0),
        root=str(absolute(trainer.default_root_dir)),
        script=path or "",
        # Cells are run in any order, any number of times: there the newest one is meant, whatever its place.
        fit=0 if path is None else _EXECUTION.fits,
        name=_name(trainer),
        execution=_EXECUTION.id,
        launches=list(again),
        args=words,
        seed=trainer.data_seed,
        loggers=[],
        started=_now(),
        libraries={"python": sys.version.split()[0], **library_versions()},
        checkpoints=[],
    )
    same = [record for record in found if record.is_attempt_of(new)]
    taken = next((r for r in same if r.args == words and any(name in r.launches for name in restarted)), None)
    if taken is None and trainer.resume == "auto":
        if _EXECUTION.chosen and path is not None:
            taken = next((record for record in same if record.execution == _EXECUTION.id), None)
        else:
            taken = next((r for i, r in enumerate(same) if r.status != "finished" or (i == 0 and not r.ended)), None)
    if taken is None:
        follow(trainer.loggers, given.get("loggers", []))
        trainer.forget_directory()
        if "seed" in given and trainer.seed is None:
            trainer.data_seed = given["seed"]
        return replace(new, seed=trainer.data_seed, loggers=logger_states(trainer.loggers)), None
    _EXECUTION.id = taken.execution
    follow(trainer.loggers, taken.loggers)
    trainer.forget_directory()
    if trainer.seed is None:
        trainer.data_seed = taken.seed
    keeps = {name: getattr(taken, name) for name in ("id", "number", "execution", "started")}
    return replace(new, seed=trainer.data_seed, loggers=logger_states(trainer.loggers), **keeps), taken


def hand_over(trainer: Any) -> dict[str, str]:
    """The variable by which ranks and restarts get the run that is drawn here."""
    trainer.read_seed()
    drawn = {"id": secrets.token_hex(8), "seed": trainer.data_seed, "loggers": logger_states(trainer.loggers)}
    return {HANDED_OVER: json.dumps(drawn)}


def begin_run(trainer: Any, directories: list[Location], cleanup: list[Callable[[BaseException | None], Any]]) -> None:
    """Write the record, and see to it that it tells how the fit ended. On rank 0, once the directories are its own.

    Args:
        trainer: whose run.
        directories: where checkpoints go.
        cleanup: is given what closes the record.

    Raises:
        CheckpointError: it cannot be written.
    """
    trainer.record = record = replace(
        trainer.record,
        directory=os.path.abspath(trainer.run_dir),
        checkpoints=[str(directory) for directory in directories],
    )
    _EXECUTION.chosen = _EXECUTION.chosen or trainer.taken is not None or trainer.resume == "auto"
    discard_torn(trainer.run_dir / RUN)
    if not write_record(record):
        trainer.print(f'{trainer.run_dir / RUN} is not ours: resume="auto" will not know of this run')
        return
    typed_in = not record.script or multiprocessing.parent_process() is not None

    def end(error: BaseException | None) -> None:
        interrupted = isinstance(error, KeyboardInterrupt) or trainer.requests.signal
        status = "finished" if error is None else "interrupted" if interrupted else "failed"
        last = replace(
            record,
            status=status,
            step=trainer.progress.step,
            stopped=trainer.requests.stop if error is None else None,
            finished=_now(),
            ended=error is None and typed_in,  # no script will end
        )
        with suppress(CheckpointError):  # then it counts as unfinished, and the next start finds nothing left to do
            write_record(last)
        if not typed_in:
            _EXECUTION.note(last)

    cleanup.append(end)
    if not typed_in:
        _EXECUTION.note(record)


def follow(loggers: Sequence[Any], states: Sequence[Any]) -> None:
    """Let loggers be those of the run that these `logger_states` are of."""
    for logger, state in zip(loggers, states, strict=False):
        if isinstance(state, dict) and state and hasattr(logger, "load_state_dict"):
            with suppress(KeyError):  # of another logger, since the script was changed
                logger.load_state_dict(state)


def logger_states(loggers: Sequence[Any]) -> list[dict[str, Any]]:
    """Which run each of them writes."""
    return [dict(one.state_dict()) if hasattr(one, "state_dict") else {} for one in loggers]


def _name(trainer: Any) -> str:
    name = getattr(trainer.loggers[0], "name", "") if trainer.loggers else ""
    return name if isinstance(name, str) else ""


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(" ", "seconds")


def _run_directories(trainer: Any) -> list[Path]:
    """This run's directory and those beside it, which the same logger made: with a record, or with checkpoints."""
    here = Path(os.path.abspath(trainer.run_dir))
    found = {here}
    if trainer.loggers and here != Path(os.path.abspath(trainer.default_root_dir)):
        base = Path(os.path.abspath(getattr(trainer.loggers[0], "root_dir", None) or here.parent))
        if base in here.parents:
            for name in (RUN, "checkpoints"):
                files = base.glob("/".join(["*", *here.relative_to(base).parts[1:], name]))
                found.update(file.parent for file in files)
    return sorted(found)


def _sound(file: Path) -> list[RunRecord]:
    return [] if record_problem(file) else read_records(file) or []


def check_records(trainer: Any) -> None:
    """Refuse to start a new run where the records cannot say which run the checkpoints that are there belong to.

    On rank 0, before anything is written. After a restart by a launcher without ``resume="auto"`` only records that
    cannot be relied on are refused.

    Raises:
        ConfigurationError: naming what is wrong, the newest checkpoint, and both ways on.
    """
    restarted = any(launches().values())
    if trainer.settings.fast or trainer.checkpoint_callback is None or not (restarted or trainer.resume == "auto"):
        return
    directories = _run_directories(trainer)
    problems = {
        directory: f"{directory / RUN} {why}" for directory in directories if (why := record_problem(directory / RUN))
    }
    records = []
    for record in (record for directory in directories for record in _sound(directory / RUN)):
        lost = "" if trainer.taken is not None else _lost(trainer.record, record)
        if lost:
            problems[Path(record.directory)] = lost
        else:
            records.append(record)
    if trainer.resume != "auto" and not problems:
        return
    ids = {record.id for record in records}
    listed = {_real(place) for record in records for place in record.places}
    own = [keeper.dirpath for keeper in trainer.checkpoint_callbacks if keeper.dirpath]
    beside = [directory / "checkpoints" for directory in directories]
    for place in dict.fromkeys(map(absolute, [*own, trainer.checkpoint_dir, *beside])):
        there = [one for one in checkpoints(place) if one.info.get("run") and _is_whole(one.path)]
        unknown = [one for one in there if one.info["run"] not in ids]
        # A later run of the same directory has taken the record's place, so sound records need not know all of them.
        explained = not problems and (len(unknown) < len(there) or _real(place) in listed)
        if not unknown or explained:
            continue
        newest = max(unknown, key=lambda one: one.created)
        why = problems.get(Path(str(place)).parent) or next(iter(problems.values()), f"no {RUN} knows their run")
        raise ConfigurationError(
            f"it is not known which run the checkpoints in {place} belong to",
            found=f"{why}; the newest checkpoint there is of step {newest.step}",
            fix=f"to continue from it, call fit(..., ckpt_path={str(newest.path)!r}); to start a new run, move"
            " these files away or choose another default_root_dir=",
        )


def _is_whole(path: Location) -> bool:
    return "progress" in read_manifest(path)["parts"]


def distinct(places: Iterable[Location]) -> list[Location]:
    """Each directory once, by whichever path it is named first."""
    found: dict[str, Location] = {}
    for place in places:
        found.setdefault(_real(place), place)
    return list(found.values())


def _real(place: str | os.PathLike[str]) -> str:
    return str(place) if is_url(place) else os.path.realpath(place)


def _lost(new: RunRecord, record: RunRecord) -> str:
    """What keeps an unfinished run from being found again: its script or root is no longer where it was."""
    if record.is_attempt_of(new) or (record.status == "finished" and record.ended):
        return ""
    if (record.fit, record.name, record.program) != (new.fit, new.name, new.program):
        return ""
    for what, recorded, today in (("script", record.script, new.script), ("root", record.root, new.root)):
        gone = recorded and not is_url(recorded) and not os.path.exists(recorded)
        if gone and not record.is_at(recorded, today):
            return (
                f"{record.directory} holds an unfinished run whose {what} was {recorded}, which is not there any more"
            )
    return ""


def recorded_places(trainer: Any) -> list[Location]:
    """Where the run that is continued keeps checkpoints, by its record.

    Only directories inside the root or the run's own, those of today's callbacks, and those that hold a checkpoint of
    this run: a record may have been edited.
    """
    taken = trainer.taken
    if taken is None:
        return []
    today = {_real(keeper.dirpath) for keeper in trainer.checkpoint_callbacks if keeper.dirpath}
    inside = [os.path.realpath(place) + os.sep for place in (trainer.default_root_dir, taken.directory)]
    found = []
    for place in taken.places:
        own = _real(place) in today or _real(place).startswith(tuple(inside))
        if own or any(one.info.get("run") == taken.id for one in checkpoints(place)):
            found.append(locate(place))
    return found
