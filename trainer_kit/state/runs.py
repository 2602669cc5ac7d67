"""Which run a fit belongs to: its directories, its loggers, its record, and the run that it continues."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final, Protocol, final

from trainer_kit.checkpoint.commit import clean_incomplete
from trainer_kit.checkpoint.commit import versions as library_versions
from trainer_kit.checkpoint.lock import DirectoryLock
from trainer_kit.checkpoint.manifest import read_manifest
from trainer_kit.checkpoint.store import checkpoints
from trainer_kit.core.atomic_files import discard_torn
from trainer_kit.core.collective_errors import on_rank_zero
from trainer_kit.core.display import mask_secrets
from trainer_kit.core.errors import CheckpointError, ConfigurationError
from trainer_kit.core.location import Location, absolute, is_url, locate
from trainer_kit.core.progress import Progress
from trainer_kit.core.protocols import Group
from trainer_kit.core.seed import order_seed
from trainer_kit.launch.program import (
    HANDED_OVER,
    arguments,
    handed_over,
    launches,
    script,
)
from trainer_kit.loggers.delivery import Deliveries
from trainer_kit.loggers.journal import JSONLLogger
from trainer_kit.loggers.layout import DEFAULT_NAME
from trainer_kit.state.records import (
    RUN,
    RunRecord,
    read_records,
    record_problem,
    write_record,
)
from trainer_kit.step.requests import Requests

__all__ = [
    "Cleanup",
    "KeepsCheckpoints",
    "RunFiles",
    "call_optional",
    "check_records",
    "clean_directory",
    "count_fit",
    "discarded",
    "distinct",
    "keep_checkpoints",
    "named_directories",
    "take_directories",
]

Cleanup = list[Callable[[BaseException | None], Any]]
"""What an entry point calls at its end, each with the exception or None."""
_STEP: Final = re.compile(r"\bstep[-=](\d+)")
_DIRECTORY_NAME: Final = re.compile(r"[\w-][\w. -]*")
"""Names of loggers that are used as the name of a directory."""


class KeepsCheckpoints(Protocol):
    """A callback that keeps checkpoints: `ModelCheckpoint`, or any other with ``best_model_path``."""

    dirpath: str | None
    """Where it keeps them; None for the directory of the run."""
    best_model_path: str
    best_model_score: Any
    monitor: str | None


def keep_checkpoints(callbacks: Iterable[Any]) -> list[KeepsCheckpoints]:
    """The callbacks that keep checkpoints."""
    return [callback for callback in callbacks if hasattr(callback, "best_model_path")]


@final
class _Execution:
    """This process's execution of its script."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(8)
        self.fits = 0
        self.chosen = False  # a fit was resumed, or could have been: the next fits belong to the same execution
        self.begun: dict[str, RunRecord] = {}
        self.pid = 0

    def at_exit(self) -> None:
        """Mark the runs of this script as ended, unless an exception or a signal ended it: they are not continued."""
        failed = hasattr(sys, "last_value") or any(
            record.status != "finished" for record in self.begun.values()
        )
        if failed or os.getpid() != self.pid:
            return
        for record in reversed(
            self.begun.values()
        ):  # the first one decides how the others end
            with suppress(CheckpointError):
                write_record(replace(record, ended=True))

    def note(self, record: RunRecord) -> None:
        """Keep a record of this process as it was last written."""
        if not self.pid:
            self.pid = os.getpid()
            atexit.register(self.at_exit)
        self.begun[record.id] = record


_EXECUTION: Final = _Execution()


def count_fit() -> None:
    """Count one more fit of this process."""
    _EXECUTION.fits += 1


@final
class RunFiles:
    """What a run has on disk: its directory, its loggers, its record.

    Args:
        loggers: of the Trainer, in the user's order. Rank 0 alone calls them.
        root: ``default_root_dir``.
        seed: the argument ``seed=``; None for the seed that the script has set.
        resume: ``"auto"`` or None.
        records: whether fits are recorded; False for ``fast_dev_run``, which writes nothing.
        say: prints a line on rank 0.

    Attributes:
        data_seed: of the order of the data.
        record: of the running or last fit, where checkpoints are kept.
        continued: the record of the run that this fit continues, as it was found.
        journal: a file in the run's directory that gets every logged value, also those at which a logger raises.
        deliveries: call the journal and the loggers; empty on other ranks than the first.
    """

    def __init__(
        self,
        *,
        loggers: Sequence[Any],
        root: str,
        seed: int | None,
        resume: str | None,
        records: bool,
        say: Callable[[str], None],
    ) -> None:
        self.loggers, self.root, self.seed, self.resume = (
            list(loggers),
            root,
            seed,
            resume,
        )
        self.records, self.say = records, say
        self.record: RunRecord | None = None
        self.continued: RunRecord | None = None
        self.journal: JSONLLogger | None = None
        self.deliveries = Deliveries(say)
        self._directory: str | None = None
        self._numbered = self._number_directory()
        self.read_seed()

    # -- directories -----------------------------------------------------------------------------------------------

    @property
    def directory(self) -> Path:
        """Where this run writes on this machine; the same on every rank."""
        if self._directory is None:
            self._directory = self._logger_directory()
        return Path(self._directory)

    def _number_directory(self) -> JSONLLogger | None:
        """Number the directories of runs below the root, where no logger makes one for its run: trackers have none."""
        if not self.loggers or self._logged_directories():
            return None
        name = getattr(self.loggers[0], "name", None)
        named = isinstance(name, str) and _DIRECTORY_NAME.fullmatch(name)
        return JSONLLogger(self._local_root, name if named else DEFAULT_NAME)

    @property
    def _local_root(self) -> str:
        return os.getcwd() if is_url(self.root) else self.root

    def _logged_directories(self) -> list[str]:
        directories = (getattr(logger, "log_dir", None) for logger in self.loggers)
        return [str(directory) for directory in directories if directory]

    def _logger_directory(self) -> str:
        if self._numbered is not None:
            return self._numbered.log_dir
        return next(iter(self._logged_directories()), self._local_root)

    @property
    def _of_directory(self) -> list[Any]:
        """The loggers, and what numbers the directory: their states say which run is continued, and where."""
        return [*self.loggers, *([] if self._numbered is None else [self._numbered])]

    @property
    def checkpoint_dir(self) -> Location:
        """Where checkpoints go by default; a URL where the root directory is one."""
        root = locate(self.root) if is_url(self.root) else self.directory
        return root / "checkpoints"

    def checkpoint_directories(
        self, callbacks: Sequence[KeepsCheckpoints]
    ) -> list[Location]:
        """The directories of the checkpoint callbacks, in their order, else the run's own."""
        return named_directories(callbacks) or [self.checkpoint_dir]

    def recorded_directories(
        self, callbacks: Sequence[KeepsCheckpoints]
    ) -> list[Location]:
        """Where the continued run keeps checkpoints, by its record.

        Only directories inside the root or the run's own, those of today's callbacks, and those that hold a checkpoint
        of this run: a record may have been edited.
        """
        if self.continued is None:
            return []
        today = {_real(directory) for directory in named_directories(callbacks)}
        inside = tuple(
            os.path.realpath(parent) + os.sep
            for parent in (self.root, self.continued.directory)
        )
        return [
            locate(place)
            for place in self.continued.places
            if _real(place) in today
            or _real(place).startswith(inside)
            or any(
                one.info.get("run") == self.continued.id for one in checkpoints(place)
            )
        ]

    def run_directories(self) -> list[Path]:
        """This run's directory and its siblings that the same logger made: with a record, or with checkpoints."""
        here = Path(os.path.abspath(self.directory))
        found = {here}
        if self.loggers and here != Path(os.path.abspath(self.root)):
            first = self.loggers[0] if self._numbered is None else self._numbered
            base = Path(
                os.path.abspath(getattr(first, "root_dir", None) or here.parent)
            )
            if base in here.parents:
                for name in (RUN, "checkpoints"):
                    files = base.glob(
                        "/".join(["*", *here.relative_to(base).parts[1:], name])
                    )
                    found.update(file.parent for file in files)
        return sorted(found)

    # -- the run -----------------------------------------------------------------------------------------------------

    def read_seed(self) -> None:
        """Take the seed of the data order from the argument, else from the script; resuming may replace the latter."""
        self.data_seed = order_seed() if self.seed is None else self.seed

    def continue_seed(self, state: Mapping[str, Any]) -> None:
        """Take the seed of the data order from a checkpoint, unless the argument gives one."""
        if self.seed is None:
            self.data_seed = state.get("seed", self.data_seed)

    def agree(self, world: Group, fits: bool, keeps_seed: bool) -> None:
        """Choose the run on rank 0, send its directory and seed to every rank, open the journal. Every rank calls it.

        Args:
            world: all ranks.
            fits: whether the entry point is `fit`.
            keeps_seed: whether the data has the order of the last fit: an evaluation after it, and its continuation.
        """
        if not keeps_seed:
            self.read_seed()
        if fits or self._directory is None:
            # An evaluation before a fit writes into the directory of that fit.
            chosen = on_rank_zero(world, self.choose)
            self.record, self.continued = chosen if fits else (None, None)
        if fits and self.records:
            count_fit()
        if world.size > 1:
            mine = (
                (str(self.directory), _logger_states(self._of_directory))
                if world.rank == 0
                else ("", [])
            )
            (self._directory, states), self.data_seed = world.broadcast(
                (mine, self.data_seed)
            )
            if world.rank:  # names and directories of loggers are read on every rank
                _load_loggers(self._of_directory, states)
        if self.loggers and world.rank == 0:
            journal = self.journal or JSONLLogger(str(self.directory), "", "")
            own = (
                one
                for one in self.loggers
                if isinstance(one, JSONLLogger) and one.path == journal.path
            )
            given = next(own, None)
            if given is None:
                self.journal = journal
            self.deliveries.open(self.loggers, given or journal)

    def choose(self) -> tuple[RunRecord | None, RunRecord | None]:
        """The record of the next fit, and that of the run that it continues, if any: then the loggers continue there.

        A restart continues what it restarts; ``resume="auto"`` the newest unfinished run of the same key. A finished
        fit counts as unfinished until its script is: it is loaded, not trained again.
        """
        if not self.records:
            return None, None
        path, again, words = script(), launches(), arguments()
        restarted = [name for name, is_restart in again.items() if is_restart]
        known = (
            record
            for directory in self.run_directories()
            for record in _sound(directory / RUN)
        )
        found = sorted(known, key=lambda record: record.number, reverse=True)
        given = handed_over() if _EXECUTION.fits == 0 else {}
        name = getattr(self.loggers[0], "name", "") if self.loggers else ""
        new = RunRecord(
            id=given.get("id") or secrets.token_hex(8),
            number=1 + max((record.number for record in found), default=0),
            root=str(absolute(self.root)),
            script=path or "",
            # Cells run in any order, any number of times: there the newest fit is meant, whatever its position.
            fit=0 if path is None else _EXECUTION.fits,
            name=name if isinstance(name, str) else "",
            execution=_EXECUTION.id,
            launches=list(again),
            args=words,
            seed=self.data_seed,
            loggers=[],
            started=_now(),
            libraries={"python": sys.version.split()[0], **library_versions()},
            checkpoints=[],
        )
        same = [record for record in found if record.is_attempt_of(new)]
        old = next(
            (
                r
                for r in same
                if r.args == words and any(name in r.launches for name in restarted)
            ),
            None,
        )
        if old is None and self.resume == "auto":
            if _EXECUTION.chosen and path is not None:
                old = next(
                    (record for record in same if record.execution == _EXECUTION.id),
                    None,
                )
            else:
                old = next(
                    (
                        r
                        for i, r in enumerate(same)
                        if r.status != "finished" or (i == 0 and not r.ended)
                    ),
                    None,
                )
        _load_loggers(
            self._of_directory, given.get("loggers", []) if old is None else old.loggers
        )
        self._forget_directory()
        seed = given.get("seed") if old is None else old.seed
        if seed is not None and self.seed is None:
            self.data_seed = seed
        new = replace(
            new, seed=self.data_seed, loggers=_logger_states(self._of_directory)
        )
        if old is not None:
            _EXECUTION.id = old.execution
            new = replace(
                new,
                id=old.id,
                number=old.number,
                execution=old.execution,
                started=old.started,
            )
        return new, old

    def replace_loggers(self, loggers: Sequence[Any]) -> None:
        """Log with these from the next entry point on."""
        self.loggers = list(loggers)
        self._numbered = self._number_directory()
        self.deliveries.open([], None)  # those before get nothing more
        self._forget_directory()

    def _forget_directory(self) -> None:
        """Ask the loggers for their directory again: they may continue in another one."""
        if (
            self.journal is not None
            and self.journal.save_dir != self._logger_directory()
        ):
            self.journal.finalize("interrupted")
            self.journal = None
        self._directory = None

    def hand_over(self) -> dict[str, str]:
        """The variable by which ranks and restarts get the id, the seed and the loggers that are drawn here."""
        self.read_seed()
        drawn = {
            "id": secrets.token_hex(8),
            "seed": self.data_seed,
            "loggers": _logger_states(self._of_directory),
        }
        return {HANDED_OVER: json.dumps(drawn)}

    def begin(
        self,
        directories: list[Location],
        requests: Requests,
        progress: Progress,
        cleanup: Cleanup,
    ) -> None:
        """Write the record, and have its end written when the fit ends. On rank 0, which holds the directories' locks.

        Args:
            directories: where checkpoints go.
            requests: of the fit; they say what ended it.
            progress: of the fit.
            cleanup: gets what closes the record.

        Raises:
            CheckpointError: it cannot be written.
        """
        assert self.record is not None
        self.record = record = replace(
            self.record,
            directory=os.path.abspath(self.directory),
            checkpoints=list(map(str, directories)),
        )
        _EXECUTION.chosen = (
            _EXECUTION.chosen or self.continued is not None or self.resume == "auto"
        )
        discard_torn(self.directory / RUN)
        if not write_record(record):
            self.say(
                f'{self.directory / RUN} was not written by trainer_kit: resume="auto" will not find this run'
            )
            return
        typed_in = not record.script or multiprocessing.parent_process() is not None

        def end(error: BaseException | None) -> None:
            interrupted = isinstance(error, KeyboardInterrupt) or requests.signal
            last = replace(
                record,
                status="finished"
                if error is None
                else "interrupted"
                if interrupted
                else "failed",
                step=progress.step,
                stopped=requests.stop if error is None else None,
                finished=_now(),
                ended=error is None and typed_in,  # no script will end
            )
            with suppress(
                CheckpointError
            ):  # then it counts as unfinished, and the next start finds nothing left to do
                write_record(last)
            if not typed_in:
                _EXECUTION.note(last)

        cleanup.append(end)
        if not typed_in:
            _EXECUTION.note(record)

    # -- loggers -----------------------------------------------------------------------------------------------------

    def logging_state(self, first: bool) -> dict[str, Any]:
        """What a checkpoint keeps of the loggers, and of the directory in which they write; ``first`` on rank 0."""
        if first:
            self.deliveries.wait_for_runs()
        states = (
            zip(self.loggers, _logger_states(self.loggers), strict=True)
            if first
            else ()
        )
        each = [
            {"logger": type(logger).__name__, "state": state}
            for logger, state in states
        ]
        return {"run_dir": self._masked_directory(), "each": each}

    def continue_logging(self, state: Mapping[str, Any]) -> None:
        """Let loggers continue the runs of a `logging_state` of this directory, unless configured otherwise."""
        if not self._continues_in(state.get("run_dir")):
            return
        for logger, before in zip(self.loggers, state["each"], strict=False):
            if type(logger).__name__ == before["logger"] and before["state"]:
                call_optional(logger, "load_state_dict", before["state"])

    def _continues_in(self, saved: object) -> bool:
        """Whether a run with this directory is continued: it is this one, or its tracker's run goes on from here."""
        here = self._masked_directory()
        beside = isinstance(saved, str) and os.path.dirname(saved) == os.path.dirname(
            str(here)
        )
        return saved == here or (self._numbered is not None and beside)

    def _masked_directory(self) -> object:
        return mask_secrets(os.path.abspath(self.directory))


def call_optional(logger: object, method: str, *arguments: Any) -> Any:
    """Call a method that a `Logger` need not have; None where it has none."""
    called = getattr(logger, method, None)
    return None if called is None else called(*arguments)


def _load_loggers(loggers: Sequence[Any], states: Sequence[Any]) -> None:
    """Let loggers continue the runs that these `_logger_states` belong to."""
    for logger, state in zip(loggers, states, strict=False):
        if isinstance(state, dict) and state:
            with suppress(
                KeyError
            ):  # the state of another logger: the script was changed
                call_optional(logger, "load_state_dict", state)


def _logger_states(loggers: Sequence[Any]) -> list[dict[str, Any]]:
    """Which of its runs each logger writes."""
    return [dict(call_optional(logger, "state_dict") or {}) for logger in loggers]


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(" ", "seconds")


def _sound(file: Path) -> list[RunRecord]:
    return [] if record_problem(file) else read_records(file) or []


def named_directories(callbacks: Sequence[KeepsCheckpoints]) -> list[Location]:
    """The directories that callbacks give for their checkpoints."""
    directories = (getattr(callback, "dirpath", None) for callback in callbacks)
    return list(
        dict.fromkeys(absolute(directory) for directory in directories if directory)
    )


def check_records(files: RunFiles, callbacks: Sequence[KeepsCheckpoints]) -> None:
    """Refuse to start a new run where the records do not say to which run the checkpoints found there belong.

    On rank 0, before anything is written. After a restart by a launcher without ``resume="auto"`` only damaged records
    are refused.

    Args:
        files: of the run.
        callbacks: that keep checkpoints.

    Raises:
        ConfigurationError: naming what is wrong, the newest checkpoint, and both ways on.
    """
    restarted = any(launches().values())
    if not files.records or not callbacks or not (restarted or files.resume == "auto"):
        return
    directories = files.run_directories()
    problems = {
        directory: f"{directory / RUN} {why}"
        for directory in directories
        if (why := record_problem(directory / RUN))
    }
    records = []
    for record in (
        record for directory in directories for record in _sound(directory / RUN)
    ):
        lost = (
            ""
            if files.record is None or files.continued is not None
            else _lost(files.record, record)
        )
        if lost:
            problems[Path(record.directory)] = lost
        else:
            records.append(record)
    if files.resume != "auto" and not problems:
        return
    ids = {record.id for record in records}
    listed = {_real(place) for record in records for place in record.places}
    beside = [absolute(directory / "checkpoints") for directory in directories]
    for place in dict.fromkeys(
        [*named_directories(callbacks), absolute(files.checkpoint_dir), *beside]
    ):
        there = [
            one
            for one in checkpoints(place)
            if one.info.get("run") and _is_whole(one.path)
        ]
        unknown = [one for one in there if one.info["run"] not in ids]
        # A later run of the same directory has replaced the record, so sound records need not list all of them.
        explained = not problems and (
            len(unknown) < len(there) or _real(place) in listed
        )
        if not unknown or explained:
            continue
        newest = unknown[-1]
        why = problems.get(Path(str(place)).parent) or next(
            iter(problems.values()), f"no {RUN} knows their run"
        )
        raise ConfigurationError(
            f"the checkpoints in {place} belong to an unknown run",
            found=f"{why}; the newest checkpoint there is of step {newest.step}",
            fix=f"to continue from it, call fit(..., ckpt_path={str(newest.path)!r}); to start a new run, move"
            " these files away or choose another default_root_dir=",
        )


def _is_whole(path: Location) -> bool:
    return "progress" in read_manifest(path)["parts"]


def distinct(directories: Iterable[Location]) -> list[Location]:
    """Each directory once, under the first of its paths."""
    found: dict[str, Location] = {}
    for directory in directories:
        found.setdefault(_real(directory), directory)
    return list(found.values())


def _real(place: str | os.PathLike[str]) -> str:
    return str(place) if is_url(place) else os.path.realpath(place)


def _lost(new: RunRecord, record: RunRecord) -> str:
    """Why an unfinished run cannot be found again: its script or root no longer exists at the recorded path."""
    if record.is_attempt_of(new) or (record.status == "finished" and record.ended):
        return ""
    if (record.fit, record.name, record.program) != (new.fit, new.name, new.program):
        return ""
    for what, recorded, today in (
        ("script", record.script, new.script),
        ("root", record.root, new.root),
    ):
        gone = recorded and not is_url(recorded) and not os.path.exists(recorded)
        if gone and not record.is_at(recorded, today):
            return (
                f"{record.directory} holds an unfinished run whose {what} was {recorded}, "
                f"which does not exist any more"
            )
    return ""


def take_directories(
    files: RunFiles,
    callbacks: Sequence[KeepsCheckpoints],
    world: Group,
    requests: Requests,
    progress: Progress,
    cleanup: Cleanup,
) -> list[str]:
    """Lock the checkpoint directories, discard incomplete saves there, and record the run. Every rank calls it.

    Args:
        files: of the run.
        callbacks: that keep checkpoints.
        world: all ranks; rank 0 does the work, and an error of it is raised on all of them.
        requests: of the fit.
        progress: of the fit.
        cleanup: gets what closes the record and releases the locks.

    Returns:
        The names of the discarded saves; for a new run they are printed already.

    Raises:
        CheckpointError: another run writes there, or the directories are not writable.
    """
    if not callbacks or not files.records:
        files.record = files.continued = None
        return []

    def take() -> list[str]:
        names: list[str] = []
        today = [
            absolute(directory) for directory in files.checkpoint_directories(callbacks)
        ]
        recorded = [
            directory
            for directory in files.recorded_directories(callbacks)
            if directory.is_dir()
        ]
        locks: Cleanup = []
        try:
            for directory in distinct([*today, *recorded]):
                locks.append(_releasing(DirectoryLock(directory)))
                found = clean_directory(directory)
                names.extend(found)
                if files.continued is None and found:
                    files.say(f"{discarded(found)} in {directory}")
            files.begin(today, requests, progress, cleanup)
        finally:
            cleanup.extend(locks)
        return names

    return on_rank_zero(world, take)


def _releasing(lock: DirectoryLock) -> Callable[[BaseException | None], None]:
    return lambda error: lock.release()


def clean_directory(directory: Location) -> list[str]:
    """Discard the incomplete saves of dead runs; returns their names."""
    with suppress(OSError):  # what stays is hidden and harmless
        return clean_incomplete(directory)
    return []


def discarded(names: list[str]) -> str:
    """A line for users about discarded saves.

    Example:
        >>> discarded(["step-00000130"]), discarded([".lock", "step-00000120-v1", "epoch=3"])
        ('discarded 1 incomplete save (step 130)', 'discarded 3 incomplete saves (.lock, step 120, epoch=3)')
    """
    steps = [
        f"step {int(match[1])}" if (match := _STEP.search(name)) else name
        for name in names
    ]
    return f"discarded {len(names)} incomplete save{'s' * (len(names) > 1)} ({', '.join(steps)})"
