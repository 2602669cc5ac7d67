"""Trackers: a Trainer's loggers and the user's own trackers, with Accelerate's methods."""

from __future__ import annotations

import atexit
import functools
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final, TypeVar, final

from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor

from trainer_kit.accelerator.processes import Processes
from trainer_kit.accelerator.run_directory import (
    claim_version,
    free_version,
    is_version,
    newest_version,
    remove_unused,
)
from trainer_kit.compat.options import ProjectConfiguration
from trainer_kit.core.arguments import word_of
from trainer_kit.core.display import mask_secrets
from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.protocols import Logger
from trainer_kit.core.registry import LOGGERS
from trainer_kit.loggers.delivery import Deliveries
from trainer_kit.loggers.journal import JSONLLogger
from trainer_kit.loggers.layout import DirectoryLogger, flatten, params_dict, plain
from trainer_kit.loggers.run_logger import RunLogger
from trainer_kit.report.events import read_events
from trainer_kit.report.running import RunReport

__all__ = [
    "GeneralTracker",
    "LoggerTracker",
    "LoggerType",
    "Trackers",
    "on_main_process",
    "register_tracker_class",
]

_IN_DIRECTORY: Final = ("tensorboard", "csv", "jsonl")
_ONE_RUN: Final = ("csv", "jsonl")
"""Trackers whose file holds one run; TensorBoard writes another file for each, into the directory of the project."""
_PROJECT: Final = {
    "aim": "experiment",
    "clearml": "project_name",
    "comet": "project",
    "comet_ml": "project",
    "dvclive": "run_name",
    "mlflow": "experiment_name",
    "swanlab": "project",
    "trackio": "project",
    "wandb": "project",
}
"""The argument of a tracker's logger that takes the name of the project."""

_F = TypeVar("_F", bound=Callable[..., Any])
_C = TypeVar("_C", bound=type)


class LoggerType(str, Enum):
    """The trackers' names in Hugging Face Accelerate; plain strings work too.

    Example:
        >>> LoggerType.TENSORBOARD == "tensorboard"
        True
    """

    ALL = "all"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"
    COMETML = "comet_ml"
    CLEARML = "clearml"
    AIM = "aim"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"
    TRACKIO = "trackio"
    CSV = "csv"
    JSONL = "jsonl"


def on_main_process(function: _F) -> _F:
    """Decorator for a tracker's methods: only the main process calls them, unless its ``main_process_only`` is False.

    Args:
        function: a method of a `GeneralTracker`; on other processes it returns None.

    Example:
        >>> class Prints(GeneralTracker):
        ...     name, requires_logging_directory, tracker = "prints", False, None
        ...
        ...     @on_main_process
        ...     def log(self, values, step=None):
        ...         print(step, values)
        >>> Prints().log({"loss": 1.0}, step=3)
        3 {'loss': 1.0}
    """

    @functools.wraps(function)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        if getattr(self, "main_process_only", True) and Environment.detect().rank:
            return None
        return function(self, *arguments, **options)

    return call  # type: ignore[return-value]


class GeneralTracker:
    """The base class of user-defined trackers: a subclass defines ``name``, ``tracker`` and ``log``.

    Attributes:
        name: the name for `Accelerator.get_tracker`.
        requires_logging_directory: whether ``logging_dir`` must be set; a class that is chosen by name gets it as its
            second argument, after the project's name.
        main_process_only: False: every process has its own tracker.
        tracker: the object through which it writes.
    """

    name: str
    requires_logging_directory: bool = False
    main_process_only: bool = True

    def start(self) -> None:
        """Start the tracker; called once, before all other methods."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the hyperparameters of the run."""

    def log(self, values: dict[str, Any], step: int | None, **options: Any) -> None:
        """Log the values of a step."""

    def finish(self) -> None:
        """Close the tracker at the end of the run."""


def register_tracker_class(tracker: _C) -> _C:
    """Register a `GeneralTracker` subclass for ``Accelerator(log_with=<its name>)``; also a decorator.

    Args:
        tracker: the class; a class that was registered under its ``name`` before is replaced.

    Example:
        >>> @register_tracker_class
        ... class Mine(GeneralTracker):
        ...     name = "doctest_tracker"
        >>> from trainer_kit.core.registry import LOGGERS
        >>> LOGGERS.get("doctest_tracker").__name__
        'Mine'
    """
    LOGGERS.register(str(tracker.name), tracker, overwrite=True)  # type: ignore[attr-defined]
    return tracker


@final
class LoggerTracker(GeneralTracker):
    """A Trainer's logger with the methods of a tracker.

    Args:
        name: the name for `Accelerator.get_tracker`.
        logger: takes the values.
    """

    def __init__(self, name: str, logger: Any) -> None:
        self.name = name
        self.logger = logger
        self._step = -1

    @property
    def tracker(self) -> Any:
        """The object through which it writes: the tracker's own run, TensorBoard's writer; else the logger itself."""
        return getattr(self.logger, "experiment", self.logger)

    writer = run = tracker

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the hyperparameters of the run."""
        if hasattr(self.logger, "log_hyperparams"):
            self.logger.log_hyperparams(values)

    def log(
        self, values: Mapping[str, Any], step: int | None = None, **options: Any
    ) -> None:
        """Log the values of a step. Numbers in nested dicts get the name ``outer/inner``.

        Args:
            values: by name. Reading a tensor of one element synchronises with the device. Text goes to all trackers
                except those that write tables of numbers, other values only to W&B.
            step: the step of the values; by default one more than the last.
            options: accepted, without effect.
        """
        self.log_at(values, step, None)

    def log_at(
        self, values: Mapping[str, Any], step: int | None, at: float | None
    ) -> None:
        """Log the values of a step as `log` does; a journal records ``at``, the time of the step, instead of now."""
        self._step = self._step + 1 if step is None else step
        numbers, others = _divided(values)
        if self.name == "wandb":
            self.logger.log_metrics({**numbers, **others}, self._step)
            return
        if numbers and isinstance(self.logger, JSONLLogger):
            self.logger.log_metrics(numbers, self._step, at=at)
        elif numbers:
            self.logger.log_metrics(numbers, self._step)
        if isinstance(self.logger, RunLogger):
            for name, value in others.items():
                self.logger.log_text(name, str(value), self._step)
        elif hasattr(self.tracker, "add_text"):
            for name, value in others.items():
                if isinstance(value, str):
                    self.tracker.add_text(name, mask_secrets(value, name), self._step)

    def log_images(
        self, values: Mapping[str, Any], step: int | None = None, **options: Any
    ) -> None:
        """Log images.

        Args:
            values: by name: for TensorBoard arrays ``(n, 3, height, width)``, for other trackers lists of images.
            step: the step of the images.
            options: of ``SummaryWriter.add_images``: ``dataformats="NHWC"`` for arrays ``(n, height, width, 3)``.
        """
        if self.name == "wandb" or isinstance(self.logger, RunLogger):
            for name, pictures in values.items():
                self.logger.log_image(name, list(pictures), step)
        elif hasattr(self.tracker, "add_images"):
            for name, pictures in values.items():
                self.tracker.add_images(name, pictures, step, **options)

    def finish(self) -> None:
        """Close the tracker at the end of the run."""
        if hasattr(self.logger, "finalize"):
            self.logger.finalize("success")


@final
class _NoTracker(GeneralTracker):
    """The tracker of a process that does not log: every call does nothing."""

    tracker: Any = None

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **options: None


def _label(queued: _Queued) -> str:
    return f"tracker {queued.tracker.name!r}"


@final
class _Queued:
    """A tracker with the interface of a logger for `Deliveries`."""

    def __init__(self, tracker: GeneralTracker) -> None:
        self.tracker = tracker

    def start(self, config: dict[str, Any] | None) -> None:
        self.tracker.start()
        if config is not None:
            self.tracker.store_init_configuration(dict(config))

    def log_metrics(
        self,
        values: dict[str, Any],
        step: int | None,
        options: Mapping[str, Any],
        at: float,
    ) -> None:
        if isinstance(self.tracker, LoggerTracker):
            self.tracker.log_at(values, step, at)
        else:
            self.tracker.log(values, step=step, **options)

    def save(self) -> None:
        if isinstance(self.tracker, LoggerTracker) and hasattr(
            self.tracker.logger, "save"
        ):
            self.tracker.logger.save()

    def finalize(self, status: str) -> None:
        self.tracker.finish()


def _copied(value: Any) -> Any:
    """Copy a value: the caller may change tensors, arrays and containers before a tracker reads them."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {name: _copied(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return value.copy() if type(value).__module__ == "numpy" else value


def _divided(
    values: Mapping[str, Any], outer: str = ""
) -> tuple[dict[str, float], dict[str, Any]]:
    numbers: dict[str, float] = {}
    others: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{outer}{key}"
        if isinstance(value, (int, float)) or (
            isinstance(value, Tensor) and value.numel() == 1
        ):
            numbers[name] = float(
                value.detach() if isinstance(value, Tensor) else value
            )  # sync point: the user logs
        elif isinstance(value, Mapping):
            inner, rest = _divided(value, f"{name}/")
            numbers.update(inner)
            others.update(rest)
        elif getattr(value, "size", None) == 1 and hasattr(value, "item"):
            numbers[name] = float(
                value.item()
            )  # sync point: a NumPy scalar, on the host
        else:
            others[name] = value
    return numbers, others


@final
class Trackers:
    """The trackers of an Accelerator.

    Args:
        log_with: trackers, by name or as objects.
        processes: the processes; the main process has the trackers.
        project: the configuration of the project's directories.

    Attributes:
        log_with: see above.
        started: the trackers that `start` made.
        continues: whether a saved state was loaded, so that the step count of an earlier run continues.
        version: the directory of this run below that of the project, on the main process; "" for the first run there.
    """

    def __init__(
        self, log_with: list[Any], processes: Processes, project: ProjectConfiguration
    ) -> None:
        for one in log_with:
            if not isinstance(one, (str, GeneralTracker, Logger)):
                raise ConfigurationError(
                    "log_with= takes names of trackers, trackers and loggers",
                    found=repr(one),
                    fix='pass log_with="tensorboard", or an object with log_metrics(metrics, step)',
                )
        self.log_with = log_with
        self.started: list[Any] = []
        self.continues = False
        self.version = ""
        self._continued: str | None = (
            None  # the directory of the run whose state was loaded
        )
        self._runs: Path | None = (
            None  # the directory of the project, with those of its runs
        )
        self._report: RunReport | None = None
        self._facts: Callable[[], dict[str, Any]] | None = (
            None  # None once the report has begun
        )
        self._step, self._warned = -1, False
        self._processes = processes
        self._project = project
        self._versioned: list[
            Any
        ] = []  # loggers that write into the directory of this run
        self._journal: JSONLLogger | None = None
        self._deliveries = Deliveries(self._processes.print, _label)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the report: a copy in another process must not write it."""
        return {**self.__dict__, "_report": None, "_facts": None}

    def start(
        self,
        project_name: str,
        config: dict[str, Any] | None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None,
        facts: Callable[[], dict[str, Any]],
    ) -> None:
        """Start the trackers of ``log_with``; every process makes this call, and the main process logs.

        With a directory, a journal and a report are written too, for each run into a directory of its own.

        Args:
            project_name: the tracker's project or experiment; for trackers that write files, a directory below
                ``logging_dir``.
            config: hyperparameters.
            init_kwargs: constructor arguments by tracker name.
            facts: returns the report's facts about the process; called at the first log.
        """
        self._end_report("finished")
        options = {
            word_of(name): dict(given) for name, given in (init_kwargs or {}).items()
        }
        rank_zero_only.rank = self._processes.process_index  # type: ignore[attr-defined]
        self.started.clear()
        self._deliveries.open([], None)
        self._choose_directory(project_name)
        for one in self.log_with:
            tracker = self.make(
                one, project_name, options.get(str(getattr(one, "name", one)), {})
            )
            self.started.append(tracker)
        journal = self._open_report(project_name, config, facts)
        writing = [
            tracker for tracker in [*journal, *self.started] if self._writes(tracker)
        ]
        self._deliveries.open([_Queued(tracker) for tracker in writing], None)
        self._deliveries.start("start", config)
        atexit.register(self._leave)  # for a script that does not call end_training

    def _choose_directory(self, project: str) -> None:
        path = self._project.logging_path
        self._runs = None if path is None else Path(path).expanduser() / project
        if self._runs is not None:
            continued = (
                self._continued is not None and (self._runs / self._continued).is_dir()
            )
            writes = self._processes.is_main_process and bool(self.log_with)
            new_version = claim_version if writes else free_version
            self.version = (
                str(self._continued) if continued else new_version(self._runs)
            )

    def continue_run(self, version: object) -> None:
        """Write into the directory of the run whose state was loaded, unless this run has logged already.

        Args:
            version: as the state has it; an older state has none, and belongs to the first run of the project.
        """
        self.continues = True
        self._continued = str(version) if is_version(version) else ""
        begun = self._report is None or self._facts is None
        if (
            begun
            or self._runs is None
            or self._continued == self.version
            or not self._processes.is_main_process
        ):
            return
        if not (self._runs / self._continued).is_dir():
            return
        self._deliveries.wait()
        before, self.version = self._runs / self.version, self._continued
        for logger in self._versioned:
            logger.load_state_dict({"name": logger.name, "version": self.version})
        remove_unused(before, self._runs / self.version)
        self._report = self._new_report()

    def _open_report(
        self,
        project: str,
        config: dict[str, Any] | None,
        facts: Callable[[], dict[str, Any]],
    ) -> list[GeneralTracker]:
        """Create the report if there are trackers and a directory; return the tracker that writes its journal."""
        loggers = [
            tracker.logger
            for tracker in self.started
            if isinstance(tracker, LoggerTracker)
        ]
        own = next(
            (logger for logger in loggers if isinstance(logger, JSONLLogger)), None
        )
        path = self._project.logging_path
        self._versioned = [logger for logger in loggers if self._is_versioned(logger)]
        if not self.started or (own is None and path is None):
            return []
        journal = own or self._in_run_directory(JSONLLogger(str(path), project))
        if own is None:
            self._versioned.append(journal)
        self._journal = journal

        def described() -> dict[str, Any]:
            found = facts()
            rows = [
                ["config", *item, "init_trackers"]
                for item in flatten(plain(params_dict(config or {}))).items()
            ]
            return {
                **found,
                "title": project,
                "configuration": rows + found["configuration"],
            }

        self._facts, self._step = described, -1
        self._report = self._new_report()
        return [] if own else [LoggerTracker("journal", journal)]

    def _in_run_directory(self, logger: Any) -> Any:
        """Let a new logger write into the directory of this run, unless the caller chose a version."""
        logger.load_state_dict({"name": logger.name, "version": self.version})
        return logger

    def _is_versioned(self, logger: Any) -> bool:
        """Whether a logger writes into the directory of this run."""
        if self._runs is None or not isinstance(logger, DirectoryLogger):
            return False
        return Path(logger.log_dir) == self._runs / self.version

    def _new_report(self) -> RunReport:
        assert self._journal is not None
        directory = Path(self._journal.log_dir)
        return RunReport(directory, lambda: max(self._step, 0), self._processes.print)

    def _begin_report(self, step: int) -> None:
        """Begin the report at the first log, when everything is prepared and a state to resume has been loaded."""
        if self._report is None or self._facts is None:
            return
        facts, self._facts = self._facts, None
        if not self._processes.is_main_process:
            return
        earlier = [
            event.get("run")
            for event in read_events(self._report.directory)
            if event["event"] == "start"
        ]
        continues = self.continues and bool(earlier)
        run = earlier[-1] if continues else secrets.token_hex(8)
        try:
            found = {**facts(), "run": run}
        except Exception as error:  # describing the user's objects may fail
            found = {
                "run": run,
                "explain": f"not available: {type(error).__name__}: {error}",
            }
        self._report.begin(
            "fit", found, self._processes.num_processes, step - 1 if continues else 0
        )

    def _end_report(self, status: str, error: BaseException | None = None) -> None:
        self._begin_report(0)
        report, self._report = self._report, None
        if report is not None and self._processes.is_main_process:
            report.end(status, error)

    def _leave(self) -> None:
        self._deliveries.call("save")  # some loggers write many rows together
        self._deliveries.close(None)
        error = getattr(
            sys, "last_value", None
        )  # the exception that ended the script; a SystemExit is not kept there
        if error is None:
            self._end_report("exited")
        elif isinstance(error, KeyboardInterrupt):
            self._end_report("interrupted")
        else:
            self._end_report("failed", error)

    def end_by_hang(self, text: str, stacks: str) -> None:
        """Record that the watchdog ends the run; its thread calls this, on any process."""
        report = self._report
        if (
            report is not None
            and self._runs is not None
            and not self._processes.is_main_process
        ):
            directory = self._runs / newest_version(
                self._runs
            )  # the main process has chosen it
            report = RunReport(
                directory, lambda: max(self._step, 0), self._processes.print
            )
        if report is not None:
            report.end_by_hang(text, stacks)

    def _writes(self, tracker: GeneralTracker) -> bool:
        return self._processes.is_main_process or not tracker.main_process_only

    def make(self, one: Any, project: str, options: dict[str, Any]) -> GeneralTracker:
        if not isinstance(one, str):
            name = getattr(one, "name", None)
            made = (
                one
                if isinstance(one, GeneralTracker)
                else LoggerTracker(str(name or type(one).__name__), one)
            )
            complete = isinstance(name, str) and (
                hasattr(type(one), "tracker") or "tracker" in vars(one)
            )
            if made is one and self._writes(made) and not complete:
                raise ConfigurationError(
                    "a tracker has a name and a tracker",
                    found=f"{type(one).__name__} without one of them",
                )
            return made if self._writes(made) else _NoTracker(made.name)
        kind = LOGGERS.get(one)
        custom = isinstance(kind, type) and issubclass(kind, GeneralTracker)
        if not self._processes.is_main_process and (
            not custom or kind.main_process_only
        ):
            return _NoTracker(one)
        if custom:
            directory = (
                (self._directory(one),) if kind.requires_logging_directory else ()
            )
            made = kind(project, *directory, **options)
            assert isinstance(made, GeneralTracker)
            return made
        if one in _PROJECT:
            save_dir = self._project.logging_path or "."
            return LoggerTracker(
                one, kind(**{_PROJECT[one]: project, "save_dir": save_dir, **options})
            )
        if one in _ONE_RUN and "version" not in options:
            return LoggerTracker(
                one,
                self._in_run_directory(
                    kind(self._directory(one), **{"name": project, **options})
                ),
            )
        if one in _IN_DIRECTORY:
            return LoggerTracker(
                one,
                kind(
                    self._directory(one), **{"name": project, "version": "", **options}
                ),
            )
        return LoggerTracker(one, kind(**options))

    def _directory(self, word: str) -> str:
        directory = self._project.logging_path
        if directory is None:
            raise ConfigurationError(
                f"{word} needs a directory",
                fix="Accelerator(project_dir=...), or ProjectConfiguration(logging_dir=...)",
            )
        return directory

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None,
        log_kwargs: Mapping[str, Any] | None,
    ) -> None:
        """Log values with every tracker, on the main process.

        Args:
            values: by name; reading a tensor of one element synchronises with the device.
            step: the step of the values; by default one more than the last.
            log_kwargs: options of the trackers' ``log`` by tracker name.
        """
        if self.log_with and not self.started and not self._warned:
            self._warned = True
            self._processes.print(
                "log() before init_trackers(): no tracker writes these values"
            )
        self._step = self._step + 1 if step is None else step
        if self._facts is not None:
            self._begin_report(self._step)
        given, now = _copied(values), time.time()
        for one in self._deliveries.each():
            options = (log_kwargs or {}).get(one.logger.tracker.name, {})
            one.put("log_metrics", given, step, options, now, number=0)

    def get(self, name: Any, unwrap: bool) -> Any:
        """Return a tracker by name, after it has received all logged values; ``unwrap``: the object that it wraps.

        Raises:
            ConfigurationError: no tracker has this name.
        """
        self._deliveries.wait()
        for tracker in self.started:
            if tracker.name == word_of(name):
                return (
                    tracker.tracker
                    if unwrap and not isinstance(tracker, _NoTracker)
                    else tracker
                )
        raise ConfigurationError(
            f"unknown tracker {name!r}",
            found=", ".join(tracker.name for tracker in self.started)
            or "none is started",
            fix=f"Accelerator(log_with={name!r}), and init_trackers(...) first",
        )

    def finish(self) -> None:
        """Close every tracker."""
        self._deliveries.close("success")
        self._end_report("finished")
        atexit.unregister(self._leave)
