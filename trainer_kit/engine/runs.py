"""Which run is it: what a fit goes on with, and what the next start will be told of it."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final, final

from trainer_kit.checkpoint.commit import versions as library_versions
from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.hidden import discard_torn
from trainer_kit.core.location import Location, absolute
from trainer_kit.engine.records import RUN, RunRecord, read_records, write_record
from trainer_kit.launch.identity import HANDED_OVER, arguments, handed_over, launches, script

__all__ = ["begin_run", "choose_run", "count_fit", "follow", "hand_over", "logger_states"]


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
    found = sorted(_visible(trainer), key=lambda record: record.number, reverse=True)
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
    same = [record for record in found if record.key == new.key]
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


def _visible(trainer: Any) -> Iterator[RunRecord]:
    """The records of this run's directory and of those beside it, which the same logger made."""
    here = Path(os.path.abspath(trainer.run_dir))
    files = {here / RUN}
    if trainer.loggers and here != Path(os.path.abspath(trainer.default_root_dir)):
        base = Path(os.path.abspath(getattr(trainer.loggers[0], "root_dir", None) or here.parent))
        if base in here.parents:
            files.update(base.glob("/".join(["*", *here.relative_to(base).parts[1:], RUN])))
    for file in sorted(files):
        yield from read_records(file) or ()
