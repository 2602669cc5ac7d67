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

import torch
from torch import Tensor, nn

from trainer_kit.checkpoint.commit import clean_incomplete
from trainer_kit.checkpoint.commit import versions as library_versions
from trainer_kit.checkpoint.lock import DirectoryLock
from trainer_kit.checkpoint.manifest import read_manifest
from trainer_kit.checkpoint.store import CheckpointRecord, checkpoints
from trainer_kit.core.atomic_files import discard_torn
from trainer_kit.core.collective_errors import on_rank_zero
from trainer_kit.core.display import mask_secrets
from trainer_kit.core.errors import CheckpointError, ConfigurationError
from trainer_kit.core.location import Location, absolute, is_url, locate
from trainer_kit.core.progress import Progress
from trainer_kit.core.protocols import Group
from trainer_kit.core.seed import order_seed
from trainer_kit.core.types import JsonObject
from trainer_kit.launch.program import (
    HANDED_OVER,
    arguments,
    handed_over,
    launches,
    script,
)
from trainer_kit.loggers.bounded import BoundedCalls
from trainer_kit.loggers.delivery import Deliveries
from trainer_kit.loggers.journal import JSONLLogger
from trainer_kit.loggers.layout import (
    DEFAULT_NAME,
    DirectoryLogger,
    claim_versions,
)
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

Cleanup = list[Callable[[BaseException | None], object]]
"""What an entry point calls at its end, each with the exception or None."""
_STEP: Final = re.compile(r"\bstep[-=](\d+)")
_DIRECTORY_NAME: Final = re.compile(r"[\w-][\w. -]*")
"""Names of loggers that are used as the name of a directory."""


class KeepsCheckpoints(Protocol):
    """A callback that keeps checkpoints: `ModelCheckpoint`, or any other with ``best_model_path``."""

    @property
    def dirpath(self) -> str | None:
        """Where it keeps them; None for the directory of the run."""

    @property
    def best_model_path(self) -> str: ...

    @property
    def best_model_score(self) -> Tensor | None: ...

    @property
    def monitor(self) -> str | None: ...


def keep_checkpoints(callbacks: Iterable[Any]) -> list[KeepsCheckpoints]:
    """The callbacks that keep checkpoints."""
    return [callback for callback in callbacks if hasattr(callback, "best_model_path")]


@final
class _Execution:
    """This process's execution of its script.

    Attributes:
        id: the same for all fits of one execution, also when they are resumed.
        fits: how many fits it has begun.
        resumes: whether a fit was resumed, or could have been: the next fits belong to the same execution.
        records: of its runs, by id, as they were last written.
        pid: of the process that wrote them; 0 before the first.
    """

    def __init__(self) -> None:
        self.id = secrets.token_hex(8)
        self.fits = 0
        self.resumes = False
        self.records: dict[str, RunRecord] = {}
        self.pid = 0

    def count_fit(self) -> None:
        self.fits += 1

    def join(self, execution: str) -> None:
        """Continue the execution with this id."""
        self.id = execution

    def note_resume(self) -> None:
        self.resumes = True

    def note(self, record: RunRecord) -> None:
        """Keep a record of this process as it was last written."""
        if not self.pid:
            self.pid = os.getpid()
            atexit.register(self.mark_ended)
        self.records[record.id] = record

    def mark_ended(self) -> None:
        """Mark the runs of this script as ended, unless an exception or a signal ended it: they are not continued."""
        # A forked process inherits the function; Python keeps an unhandled exception as sys.last_value.
        if os.getpid() != self.pid or hasattr(sys, "last_value"):
            return
        records = list(self.records.values())
        if any(record.status != "finished" for record in records):
            return
        # The first fit's record last: after a kill in between, the next start still continues the execution by it.
        for record in reversed(records):
            with suppress(CheckpointError):
                write_record(replace(record, ended=True))


_EXECUTION: Final = _Execution()


def count_fit() -> None:
    """Count one more fit of this process."""
    _EXECUTION.count_fit()


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
        self.loggers = list(loggers)
        self.root = root
        self.seed = seed
        self.resume = resume
        self.records = records
        self.say = say
        self.record: RunRecord | None = None
        self.continued: RunRecord | None = None
        self.journal: JSONLLogger | None = None
        self.deliveries = Deliveries(say)
        self._calls = BoundedCalls(say)
        self._directory: str | None = None
        self._numbering = self._number_directory()
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
        name = self._calls.name(self.loggers[0])
        if not _DIRECTORY_NAME.fullmatch(name):
            name = DEFAULT_NAME
        return JSONLLogger(self._local_root, name)

    @property
    def _local_root(self) -> str:
        # Records and files of loggers are local, also where checkpoints go to a URL.
        return os.getcwd() if is_url(self.root) else self.root

    def _logged_directories(self) -> list[str]:
        return self._calls.directories(self.loggers)

    def _logger_directory(self) -> str:
        if self._numbering is not None:
            return self._numbering.log_dir
        return next(iter(self._logged_directories()), self._local_root)

    @property
    def _directory_loggers(self) -> list[Any]:
        """The loggers, and what numbers the directory: their states say which run is continued, and where."""
        if self._numbering is None:
            return list(self.loggers)
        return [*self.loggers, self._numbering]

    @property
    def checkpoint_dir(self) -> Location:
        """Where checkpoints go by default; a URL where the root directory is one."""
        root = locate(self.root) if is_url(self.root) else self.directory
        return root / "checkpoints"

    def checkpoint_directories(
        self,
        callbacks: Sequence[KeepsCheckpoints],
    ) -> list[Location]:
        """The directories of the checkpoint callbacks, in their order, else the run's own."""
        return named_directories(callbacks) or [self.checkpoint_dir]

    def recorded_directories(
        self,
        callbacks: Sequence[KeepsCheckpoints],
    ) -> list[Location]:
        """Where the continued run keeps checkpoints, by its record.

        Only directories inside the root or the run's own, those of today's callbacks, and those that hold a checkpoint
        of this run: a record may have been edited.
        """
        if self.continued is None:
            return []
        named = {_real_path(directory) for directory in named_directories(callbacks)}
        parents = [
            os.path.realpath(parent) for parent in (self.root, self.continued.directory)
        ]
        prefixes = tuple(parent + os.sep for parent in parents)
        directories = []
        for directory in self.continued.checkpoint_directories:
            path = _real_path(directory)
            is_expected = path in named or path.startswith(prefixes)
            if is_expected or _holds_run(directory, self.continued.id):
                directories.append(locate(directory))
        return directories

    def run_directories(self) -> list[Path]:
        """This run's directory and its siblings that the same logger made: with a record, or with checkpoints."""
        directory = Path(os.path.abspath(self.directory))
        directories = {directory}
        base = self._logger_root(directory)
        if base is not None and base in directory.parents:
            # The name below the logger's root differs from run to run: a version, or the name of an experiment.
            below_name = directory.relative_to(base).parts[1:]
            for name in (RUN, "checkpoints"):
                pattern = "/".join(["*", *below_name, name])
                directories.update(file.parent for file in base.glob(pattern))
        return sorted(directories)

    def _logger_root(self, directory: Path) -> Path | None:
        """Where the logger that numbers ``directory`` keeps those of all its runs; None if all runs share the root."""
        if not self.loggers or directory == Path(os.path.abspath(self.root)):
            return None
        logger = self.loggers[0] if self._numbering is None else self._numbering
        root = self._calls.root(logger)
        if not root:
            return directory.parent
        return Path(os.path.abspath(str(root)))

    # -- the run -----------------------------------------------------------------------------------------------------

    def read_seed(self) -> None:
        """Take the seed of the data order from the argument, else from the script; resuming may replace the latter."""
        self.data_seed = order_seed() if self.seed is None else self.seed

    def continue_seed(self, state: Mapping[str, Any]) -> None:
        """Take the seed of the data order from a checkpoint, unless the argument gives one."""
        if self.seed is None:
            self.data_seed = state.get("seed", self.data_seed)

    def agree_on_run(self, world: Group, fits: bool, keeps_seed: bool) -> None:
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
            record, continued = on_rank_zero(world, self.choose_run)
            self.record = record if fits else None
            self.continued = continued if fits else None
            if self.records and world.rank == 0:
                for line in claim_versions(self._directory_loggers):
                    self.say(line)
        # Evaluations and fast_dev_run are no fits: they do not shift the number of those that follow.
        if fits and self.records:
            count_fit()
        if world.size > 1:
            self._share_directory(world)
        if self.loggers and world.rank == 0:
            self._open_journal()

    def release_versions(self) -> None:
        """Remove the empty directories that this run has made: it is refused before anything is written."""
        for logger in self._directory_loggers:
            if isinstance(logger, DirectoryLogger):
                logger.release_version()

    def _share_directory(self, world: Group) -> None:
        """Give rank 0's directory, states of loggers and seed to every rank."""
        directory = ""
        states: list[dict[str, Any]] = []
        if world.rank == 0:
            directory = str(self.directory)
            states = self._calls.states(self._directory_loggers)
        # Loggers of other ranks may have chosen another version: names with the time in them, for example.
        shared = (directory, states, self.data_seed)
        self._directory, states, self.data_seed = world.broadcast(shared)
        # Names and directories of loggers are read on every rank.
        if world.rank:
            self._calls.load(self._directory_loggers, states)

    def _open_journal(self) -> None:
        """Deliver values to the loggers, and to a journal: the user's logger if it writes that file."""
        journal = self.journal or JSONLLogger(str(self.directory), "", "")
        for logger in self.loggers:
            if isinstance(logger, JSONLLogger) and logger.path == journal.path:
                self.deliveries.open(self.loggers, logger)
                return
        self.journal = journal
        self.deliveries.open(self.loggers, journal)

    def choose_run(self) -> tuple[RunRecord | None, RunRecord | None]:
        """The record of the next fit, and that of the run that it continues, if any: then the loggers continue there.

        A restart continues what it restarts; ``resume="auto"`` the newest unfinished run of the same key. A finished
        fit counts as unfinished until its script is: it is loaded, not trained again.
        """
        if not self.records:
            return None, None
        launch_kinds = launches()
        records = self._existing_records()
        handed: JsonObject = {}
        # Only the first: a later fit of this script gets an id, a seed and loggers of its own.
        if _EXECUTION.fits == 0:
            handed = handed_over()
        record = self._new_record(launch_kinds, records, handed.get("id"))
        attempts = [earlier for earlier in records if earlier.is_attempt_of(record)]
        # A restart continues its run also without `resume="auto"`, so it is looked for first.
        continued = _restarted_run(attempts, record, launch_kinds)
        if continued is None and self.resume == "auto":
            continued = _unfinished_run(attempts, record)
        states, seed = handed.get("loggers", []), handed.get("seed")
        if continued is not None:
            states, seed = continued.loggers, continued.seed
        # Their states say in which directory they write, so the directory is asked for again.
        self._calls.load(self._directory_loggers, states)
        self._forget_directory()
        if seed is not None and self.seed is None:
            # Data is read in the same order, so that positions in it mean the same samples.
            self.data_seed = seed
        states = self._calls.states(self._directory_loggers)
        record = replace(record, seed=self.data_seed, loggers=states)
        if continued is not None:
            # The next fits of this script belong to the execution that it continues.
            _EXECUTION.join(continued.execution)
            record = replace(
                record,
                id=continued.id,
                number=continued.number,
                execution=continued.execution,
                started=continued.started,
            )
        return record, continued

    def _existing_records(self) -> list[RunRecord]:
        """The records of the run directories, the newest first."""
        records: list[RunRecord] = []
        for directory in self.run_directories():
            records += _sound_records(directory / RUN)
        return sorted(records, key=lambda record: record.number, reverse=True)

    def _new_record(
        self,
        launch_kinds: Mapping[str, bool],
        records: Sequence[RunRecord],
        run_id: str | None,
    ) -> RunRecord:
        path = script()
        name = ""
        if self.loggers:
            name = self._calls.name(self.loggers[0])
        fit = _EXECUTION.fits
        # Cells run in any order, any number of times: there the newest fit is meant, whatever its position.
        if path is None:
            fit = 0
        return RunRecord(
            id=run_id or secrets.token_hex(8),
            # Not the time: clocks jump, and the newest record is continued.
            number=1 + max((record.number for record in records), default=0),
            root=str(absolute(self.root)),
            script=path or "",
            fit=fit,
            name=name,
            execution=_EXECUTION.id,
            launches=list(launch_kinds),
            args=arguments(),
            seed=self.data_seed,
            loggers=[],
            started=_now(),
            libraries={"python": sys.version.split()[0], **library_versions()},
            checkpoints=[],
        )

    def forget_run(self) -> None:
        """Neither record this fit nor continue another one."""
        self.record = None
        self.continued = None

    def replace_loggers(self, loggers: Sequence[Any]) -> None:
        """Log with these from the next entry point on."""
        self.loggers = list(loggers)
        self._numbering = self._number_directory()
        # The former loggers get nothing more.
        self.deliveries.open([], None)
        self._forget_directory()

    def _forget_directory(self) -> None:
        """Ask the loggers for their directory again: they may continue in another one."""
        if (
            self.journal is not None
            and self.journal.save_dir != self._logger_directory()
        ):
            # Its file lies in the directory of another run.
            self.journal.finalize("interrupted")
            self.journal = None
        self._directory = None

    def hand_over(self) -> dict[str, str]:
        """The variable by which ranks and restarts get the id, the seed and the loggers that are drawn here."""
        self.read_seed()
        handed = {
            "id": secrets.token_hex(8),
            "seed": self.data_seed,
            "loggers": self._calls.states(self._directory_loggers),
        }
        return {HANDED_OVER: json.dumps(handed)}

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
        record = replace(
            self.record,
            directory=os.path.abspath(self.directory),
            checkpoints=list(map(str, directories)),
        )
        self.record = record
        # From here on the fits of this script share an execution: the next ones follow the run that is continued.
        if self.continued is not None or self.resume == "auto":
            _EXECUTION.note_resume()
        file = self.directory / RUN
        # A process that was killed while it wrote the record leaves a hidden file.
        discard_torn(file)
        if not write_record(record):
            self.say(
                f'{file} was not written by trainer_kit: resume="auto" will not find this run'
            )
            return
        # Without a script of this process, no script's end will mark the run as ended.
        has_script = bool(record.script) and multiprocessing.parent_process() is None

        def close_record(error: BaseException | None) -> None:
            closed = replace(
                record,
                status=_final_status(error, requests),
                step=progress.step,
                stopped=requests.stop if error is None else None,
                finished=_now(),
                ended=error is None and not has_script,
            )
            # If it cannot be written, the run counts as unfinished, and the next start finds nothing left to do.
            with suppress(CheckpointError):
                write_record(closed)
            if has_script:
                _EXECUTION.note(closed)

        cleanup.append(close_record)
        if has_script:
            _EXECUTION.note(record)

    # -- loggers -----------------------------------------------------------------------------------------------------

    def logging_state(self, first: bool) -> dict[str, Any]:
        """What a checkpoint keeps of the loggers, and of the directory in which they write; ``first`` on rank 0."""
        entries = []
        if first:
            # A tracker knows the id of its run only when the run has begun.
            self.deliveries.wait_for_runs()
            states = self._calls.states(self.loggers)
            for logger, state in zip(self.loggers, states, strict=True):
                kind = type(logger).__name__
                entries.append({"logger": kind, "state": state})
        directory = self._masked_directory()
        return {"run_dir": directory, "each": entries}

    def continue_logging(self, state: Mapping[str, Any]) -> None:
        """Let loggers continue the runs of a `logging_state` of this directory, unless configured otherwise."""
        if not self._continues_in(state.get("run_dir")):
            return
        for logger, saved in zip(self.loggers, state["each"], strict=False):
            if type(logger).__name__ == saved["logger"] and saved["state"]:
                self._calls.load_state(logger, saved["state"])

    def log_graph(
        self, logger: object, module: nn.Module, device: torch.device
    ) -> None:
        """Let a logger log the graph of the module; one that blocks is left out."""
        self._calls.log_graph(logger, module, device)

    def _continues_in(self, saved: object) -> bool:
        """Whether a run with this directory is continued: it is this one, or its tracker's run continues from here."""
        directory = self._masked_directory()
        if saved == directory:
            return True
        if self._numbering is None or not isinstance(saved, str):
            return False
        return os.path.dirname(saved) == os.path.dirname(str(directory))

    def _masked_directory(self) -> object:
        return mask_secrets(os.path.abspath(self.directory))


def call_optional(logger: object, method: str, *arguments: object) -> Any:
    """Call a method that a `Logger` need not have; None where it has none."""
    function = getattr(logger, method, None)
    if function is None:
        return None
    return function(*arguments)


def _restarted_run(
    attempts: Sequence[RunRecord],
    record: RunRecord,
    launch_kinds: Mapping[str, bool],
) -> RunRecord | None:
    """The run that a launcher has restarted: started by the same launcher with the same arguments."""
    restarts = [name for name, is_restart in launch_kinds.items() if is_restart]
    for attempt in attempts:
        same_launcher = any(name in attempt.launches for name in restarts)
        if same_launcher and attempt.args == record.args:
            return attempt
    return None


def _unfinished_run(
    attempts: Sequence[RunRecord],
    record: RunRecord,
) -> RunRecord | None:
    """The run that ``resume="auto"`` continues."""
    if _EXECUTION.resumes and record.script:
        # A later fit of a resumed script continues what that script has trained.
        for attempt in attempts:
            if attempt.execution == _EXECUTION.id:
                return attempt
        return None
    # Also a finished fit: its script was killed later, and would otherwise train it again.
    if attempts and not attempts[0].ended:
        return attempts[0]
    for attempt in attempts:
        if attempt.status != "finished":
            return attempt
    return None


def _final_status(error: BaseException | None, requests: Requests) -> str:
    if error is None:
        return "finished"
    if isinstance(error, KeyboardInterrupt) or requests.signal:
        return "interrupted"
    return "failed"


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(" ", "seconds")


def _sound_records(file: Path) -> list[RunRecord]:
    if record_problem(file):
        return []
    return read_records(file) or []


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
    is_restart = any(launches().values())
    if not files.records or not callbacks or not (is_restart or files.resume == "auto"):
        return
    run_directories = files.run_directories()
    records, problems = _check_run_directories(files, run_directories)
    if files.resume != "auto" and not problems:
        return
    run_ids = {record.id for record in records}
    recorded: set[str] = set()
    for record in records:
        recorded.update(map(_real_path, record.checkpoint_directories))
    directories = [*named_directories(callbacks), absolute(files.checkpoint_dir)]
    directories += [
        absolute(directory / "checkpoints") for directory in run_directories
    ]
    for directory in dict.fromkeys(directories):
        entries = [entry for entry in checkpoints(directory) if _is_resumable(entry)]
        unknown = [entry for entry in entries if entry.info["run"] not in run_ids]
        if not unknown:
            continue
        # A later run of the same directory has replaced the record, so sound records need not list all of them.
        is_recorded = len(unknown) < len(entries) or _real_path(directory) in recorded
        if is_recorded and not problems:
            continue
        problem = problems.get(Path(str(directory)).parent)
        if problem is None:
            problem = next(iter(problems.values()), f"no {RUN} knows their run")
        newest = unknown[-1]
        files.release_versions()
        raise ConfigurationError(
            f"the checkpoints in {directory} belong to an unknown run",
            found=f"{problem}; the newest checkpoint there is of step {newest.step}",
            fix=f"to continue from it, call fit(..., ckpt_path={str(newest.path)!r}); to start a new run, move"
            " these files away or choose another default_root_dir=",
        )


def _check_run_directories(
    files: RunFiles,
    directories: Sequence[Path],
) -> tuple[list[RunRecord], dict[Path, str]]:
    """The records of these directories that can be relied on, and by directory what is wrong with the others."""
    problems: dict[Path, str] = {}
    for directory in directories:
        problem = record_problem(directory / RUN)
        if problem:
            problems[directory] = f"{directory / RUN} {problem}"
    # A run that is continued was found by its record, so nothing is missing.
    new_record = None
    if files.continued is None:
        new_record = files.record
    records = []
    for directory in directories:
        for record in _sound_records(directory / RUN):
            problem = ""
            if new_record is not None:
                problem = _missing_path_problem(new_record, record)
            if problem:
                problems[Path(record.directory)] = problem
            else:
                records.append(record)
    return records, problems


def _is_resumable(checkpoint: CheckpointRecord) -> bool:
    """Whether a run wrote this checkpoint, and it holds more than weights."""
    if not checkpoint.info.get("run"):
        return False
    return "progress" in read_manifest(checkpoint.path)["parts"]


def distinct(directories: Iterable[Location]) -> list[Location]:
    """Each directory once, under the first of its paths."""
    by_path: dict[str, Location] = {}
    for directory in directories:
        by_path.setdefault(_real_path(directory), directory)
    return list(by_path.values())


def _real_path(directory: str | os.PathLike[str]) -> str:
    return str(directory) if is_url(directory) else os.path.realpath(directory)


def _holds_run(directory: str, run_id: str) -> bool:
    """Whether a directory holds a checkpoint of this run."""
    return any(
        checkpoint.info.get("run") == run_id for checkpoint in checkpoints(directory)
    )


def _missing_path_problem(new: RunRecord, record: RunRecord) -> str:
    """Why an unfinished run cannot be found again: its script or root no longer exists at the recorded path."""
    if record.is_attempt_of(new) or (record.status == "finished" and record.ended):
        return ""
    if (record.fit, record.name, record.program) != (new.fit, new.name, new.program):
        return ""
    paths = (("script", record.script, new.script), ("root", record.root, new.root))
    for role, recorded, today in paths:
        if not recorded or is_url(recorded) or os.path.exists(recorded):
            continue
        if not record.means_path(recorded, today):
            return (
                f"{record.directory} holds an unfinished run whose {role} was {recorded}, "
                f"which no longer exists"
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
        files.forget_run()
        return []

    # The order: lock a directory, clean it, and once all are locked write the record. What is deleted before the lock
    # is held may be another run's save, and a record without the locks would name directories of another run.
    def take() -> list[str]:
        discarded_names: list[str] = []
        directories = [
            absolute(path) for path in files.checkpoint_directories(callbacks)
        ]
        recorded = files.recorded_directories(callbacks)
        # Those that do not exist any more need no lock: nothing is written there.
        existing = [directory for directory in recorded if directory.is_dir()]
        releases: Cleanup = []
        try:
            for directory in distinct([*directories, *existing]):
                releases.append(_releasing(DirectoryLock(directory)))
                names = clean_directory(directory)
                discarded_names += names
                if names and files.continued is None:
                    files.say(f"{discarded(names)} in {directory}")
            files.begin(directories, requests, progress, cleanup)
        finally:
            # Also after an error: the locks that were taken are released.
            cleanup.extend(releases)
        return discarded_names

    return on_rank_zero(world, take)


def _releasing(lock: DirectoryLock) -> Callable[[BaseException | None], None]:
    return lambda error: lock.release()


def clean_directory(directory: Location) -> list[str]:
    """Discard the incomplete saves of dead runs; returns their names."""
    # What stays after an error is hidden, and no reader takes it for a checkpoint.
    with suppress(OSError):
        return clean_incomplete(directory)
    return []


def discarded(names: list[str]) -> str:
    """A line for users about discarded saves.

    Example:
        >>> discarded(["step-00000130"]), discarded([".lock", "step-00000120-v1", "epoch=3"])
        ('discarded 1 incomplete save (step 130)', 'discarded 3 incomplete saves (.lock, step 120, epoch=3)')
    """
    steps = []
    for name in names:
        match = _STEP.search(name)
        if match:
            name = f"step {int(match[1])}"
        steps.append(name)
    return f"discarded {len(names)} incomplete save{'s' * (len(names) > 1)} ({', '.join(steps)})"
