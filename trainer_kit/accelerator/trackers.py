"""Trackers: a Trainer's loggers and the user's own trackers, with Accelerate's methods."""

from __future__ import annotations

import atexit
import functools
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, final

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
from trainer_kit.core.arguments import word_of
from trainer_kit.core.display import mask_secrets
from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.protocols import Logger
from trainer_kit.core.registry import LOGGERS
from trainer_kit.core.types import (
    Function,
    HyperParameters,
    JsonObject,
    Keywords,
    Nested,
    StateDict,
)
from trainer_kit.loggers.bounded import BoundedCalls
from trainer_kit.loggers.delivery import Deliveries
from trainer_kit.loggers.journal import JSONLLogger
from trainer_kit.loggers.layout import DirectoryLogger, flatten, params_dict, plain
from trainer_kit.loggers.run_logger import RunLogger
from trainer_kit.loggers.table import find_row
from trainer_kit.options.records import ProjectConfiguration
from trainer_kit.report.events import read_events
from trainer_kit.report.running import RunReport

__all__ = [
    "GeneralTracker",
    "LoggedValues",
    "LoggerTracker",
    "LoggerType",
    "Tracker",
    "Trackers",
    "on_main_process",
    "register_tracker_class",
]

Tracker: TypeAlias = "GeneralTracker | Logger"
"""A tracker of the user, or a logger of a Trainer."""
LoggedValues: TypeAlias = Mapping[str, Any]
"""Logged values by name: numbers, tensors of one element, texts, pictures and nested dicts of these."""
_Facts: TypeAlias = Callable[[], JsonObject]
"""Returns what the report says about the process."""

_F = TypeVar("_F", bound=Function)
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
    def call(self: object, *arguments: object, **options: object) -> object:
        # At each call: when the class is created, processes may not be forked yet.
        if getattr(self, "main_process_only", True) and Environment.detect().rank:
            return None
        return function(self, *arguments, **options)

    # `wraps` keeps the signature, which the type of the closure does not show.
    return call  # type: ignore[return-value]


class GeneralTracker:
    """The base class of user-defined trackers: a subclass defines ``name``, ``tracker`` and ``log``.

    Attributes:
        name: the name for `Accelerator.get_tracker`.
        requires_logging_directory: whether ``logging_dir`` must be set; a class that is chosen by name gets it as its
            second argument, after the project's name.
        main_process_only: False: every process has its own tracker.
        tracker: the object through which it writes.

    Example:
        >>> from trainer_kit import Accelerator, GeneralTracker
        >>> class ListTracker(GeneralTracker):
        ...     name = "list"
        ...     def __init__(self):
        ...         self.tracker = []
        ...     def log(self, values, step=None, **options):
        ...         self.tracker.append((step, values))
        >>> accelerator = Accelerator(cpu=True, log_with=ListTracker())
        >>> accelerator.init_trackers("digits")
        >>> accelerator.log({"loss": 0.5}, step=3)
        >>> accelerator.get_tracker("list", unwrap=True)
        [(3, {'loss': 0.5})]
        >>> accelerator.end_training()
    """

    name: str
    requires_logging_directory: bool = False
    main_process_only: bool = True

    def start(self) -> None:
        """Start the tracker; called once, before all other methods."""

    def store_init_configuration(self, values: StateDict) -> None:
        """Store the hyperparameters of the run.

        Args:
            values: the ``config`` of `Accelerator.init_trackers`, as a dict.
        """

    def log(self, values: dict[str, Any], step: int | None, **options: Any) -> None:
        """Log the values of a step.

        Args:
            values: what was passed to `Accelerator.log`, by name.
            step: the step of the values; None: the script gave none.
            options: this tracker's entry in the ``log_kwargs`` of `Accelerator.log`.
        """

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
    # Any class may be registered, and the type of a class has no `name`.
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

    def store_init_configuration(self, values: StateDict) -> None:
        """Store the hyperparameters of the run."""
        if hasattr(self.logger, "log_hyperparams"):
            self.logger.log_hyperparams(values)

    def log(
        self, values: LoggedValues, step: int | None = None, **options: Any
    ) -> None:
        """Log the values of a step. Numbers in nested dicts get the name ``outer/inner``.

        Args:
            values: by name. Reading a tensor of one element synchronizes with the device. Text goes to all trackers
                except those that write tables of numbers, other values only to W&B.
            step: the step of the values; by default one more than the last.
            options: accepted, without effect.
        """
        self.log_at(values, step, None)

    def log_at(self, values: LoggedValues, step: int | None, at: float | None) -> None:
        """Log the values of a step as `log` does; a journal records ``at``, the time of the step, instead of now."""
        self._step = self._step + 1 if step is None else step
        numbers, other_values = _split_numbers(values)
        if self.name == "wandb":
            self.logger.log_metrics({**numbers, **other_values}, self._step)
            return
        # The report computes speeds from the times in the journal; a thread that writes later would make peaks of them.
        if numbers and isinstance(self.logger, JSONLLogger):
            self.logger.log_metrics(numbers, self._step, at=at)
        elif numbers:
            self.logger.log_metrics(numbers, self._step)
        self._log_texts(other_values)

    def _log_texts(self, values: LoggedValues) -> None:
        if isinstance(self.logger, RunLogger):
            for name, value in values.items():
                self.logger.log_text(name, str(value), self._step)
            return
        if not hasattr(self.tracker, "add_text"):
            return
        for name, value in values.items():
            if isinstance(value, str):
                self.tracker.add_text(name, mask_secrets(value, name), self._step)

    def log_images(
        self, values: LoggedValues, step: int | None = None, **options: Any
    ) -> None:
        """Log images.

        Args:
            values: by name: for TensorBoard arrays ``(n, 3, height, width)``, for other trackers lists of images.
            step: the step of the images.
            options: of ``SummaryWriter.add_images``: ``dataformats="NHWC"`` for arrays ``(n, height, width, 3)``.
        """
        if self.name == "wandb" or isinstance(self.logger, RunLogger):
            for name, images in values.items():
                self.logger.log_image(name, list(images), step)
            return
        if not hasattr(self.tracker, "add_images"):
            return
        for name, images in values.items():
            self.tracker.add_images(name, images, step, **options)

    def finish(self) -> None:
        """Close the tracker at the end of the run."""
        if hasattr(self.logger, "finalize"):
            self.logger.finalize("success")


@final
class _NoTracker(GeneralTracker):
    """A tracker of which every call does nothing: on a process that does not log, and while a constructor blocks.

    Args:
        name: the name for `Accelerator.get_tracker`.
        late: the tracker, or the error of its constructor, once there is one; logged values wait for it.
    """

    tracker: Any = None

    def __init__(self, name: str, late: Future[GeneralTracker] | None = None) -> None:
        self.name = name
        self.late = late
        # A late tracker is made where it is to write.
        self.main_process_only = late is None

    def __reduce__(self) -> tuple[object, ...]:
        """A copy in another process has no thread that would make a late tracker."""
        return _NoTracker, (self.name,)

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling look for methods with such names, and must not find them.
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **options: None


def _label(queued: _Queued) -> str:
    return f"tracker {queued.tracker.name!r}"


def _call_label(logger: object) -> str:
    if isinstance(logger, _NoTracker):
        return f"tracker {logger.name!r}"
    return type(logger).__name__


@final
class _Queued:
    """A tracker with the interface of a logger for `Deliveries`."""

    def __init__(self, tracker: GeneralTracker) -> None:
        self.tracker = tracker

    def start(self, config: HyperParameters | None) -> None:
        # On a thread of this tracker, which may wait for a constructor that blocks.
        if isinstance(self.tracker, _NoTracker) and self.tracker.late is not None:
            self.tracker = self.tracker.late.result()
        self.tracker.start()
        if config is not None:
            self.tracker.store_init_configuration(dict(config))

    def log_metrics(
        self,
        values: dict[str, Any],
        step: int | None,
        options: Keywords,
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


def _copy(value: Nested) -> Nested:
    """Copy a value: the caller may change tensors, arrays and containers before a tracker reads them."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {name: _copy(item) for name, item in value.items()}
    kind = type(value)
    # Exactly these classes: others, such as named tuples, are not made from an iterable.
    if kind is list or kind is tuple:
        return kind(map(_copy, value))
    if kind.__module__ == "numpy":
        return value.copy()
    return value


def _split_numbers(
    values: LoggedValues, prefix: str = ""
) -> tuple[dict[str, float], dict[str, object]]:
    """Return the numbers among nested values, and all other values, by full name."""
    numbers: dict[str, float] = {}
    other_values: dict[str, object] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, (int, float)):
            numbers[name] = float(value)
        elif isinstance(value, Tensor) and value.numel() == 1:
            # Sync point: the user logs.
            numbers[name] = float(value.detach())
        elif isinstance(value, Mapping):
            inner_numbers, inner_values = _split_numbers(value, f"{name}/")
            numbers.update(inner_numbers)
            other_values.update(inner_values)
        elif getattr(value, "size", None) == 1 and hasattr(value, "item"):
            # Sync point: a NumPy scalar, on the host.
            numbers[name] = float(value.item())
        else:
            other_values[name] = value
    return numbers, other_values


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
        self,
        log_with: list[str | Tracker],
        processes: Processes,
        project: ProjectConfiguration,
    ) -> None:
        for tracker in log_with:
            if not isinstance(tracker, (str, GeneralTracker, Logger)):
                raise ConfigurationError(
                    "log_with= takes names of trackers, trackers and loggers",
                    found=repr(tracker),
                    fix='pass log_with="tensorboard", or an object with log_metrics(metrics, step)',
                )
        self.log_with = log_with
        self.started: list[GeneralTracker] = []
        self.continues = False
        self.version = ""
        # The directory of the run whose state was loaded.
        self._continued: str | None = None
        # The directory of the project, with those of its runs.
        self._runs: Path | None = None
        self._report: RunReport | None = None
        # None once the report has begun.
        self._facts: _Facts | None = None
        self._step = -1
        self._warned = False
        self._processes = processes
        self._project = project
        # Loggers that write into the directory of this run.
        self._versioned: list[Any] = []
        self._journal: JSONLLogger | None = None
        self._deliveries = Deliveries(self._processes.print, _label)
        self._calls = BoundedCalls(self._processes.print, _call_label)

    def __getstate__(self) -> StateDict:
        """Leave out the report: a copy in another process must not write it."""
        return {**self.__dict__, "_report": None, "_facts": None}

    def start(
        self,
        project_name: str,
        config: HyperParameters | None,
        init_kwargs: Mapping[str, LoggedValues] | None,
        facts: _Facts,
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
        # A second call in one script begins another run.
        self._end_report("finished")
        options = {}
        for name, arguments in (init_kwargs or {}).items():
            # Keys may be members of `LoggerType`.
            options[word_of(name)] = dict(arguments)
        # Loggers of other libraries have methods under this decorator, which raises an error until it knows the rank.
        # The rank is an attribute of a function, which its type does not have.
        rank_zero_only.rank = self._processes.process_index  # type: ignore[attr-defined]
        self.started.clear()
        self._deliveries.open([], None)
        self._choose_directory(project_name)
        for tracker in self.log_with:
            self._start_tracker(tracker, project_name, options)
        journal = self._open_report(project_name, config, facts)
        writing = filter(self._writes, [*journal, *self.started])
        self._deliveries.open([_Queued(tracker) for tracker in writing], None)
        self._deliveries.start("start", config)
        # For a script that does not call end_training.
        atexit.register(self._leave)

    def _start_tracker(
        self, tracker: str | Tracker, project: str, options: Mapping[str, Keywords]
    ) -> None:
        """Make a tracker; until its constructor returns, which may connect to a service, calls of it do nothing."""
        name = tracker if isinstance(tracker, str) else type(tracker).__name__
        late: Future[GeneralTracker] = Future()
        substitute = _NoTracker(name, late)
        self.started.append(substitute)

        def construct() -> None:
            try:
                instance = self.make_tracker(tracker, project, options.get(name, {}))
            except BaseException as error:
                late.set_exception(error)
                raise
            # Another `start` may have replaced all trackers meanwhile.
            if substitute in self.started:
                self.started[self.started.index(substitute)] = instance
            late.set_result(instance)

        self._calls.call(substitute, "its constructor", construct, None)

    def _choose_directory(self, project: str) -> None:
        path = self._project.logging_path
        self._runs = None
        if path is None:
            return
        self._runs = Path(path).expanduser() / project
        if self._continued is not None and (self._runs / self._continued).is_dir():
            self.version = self._continued
        elif self._processes.is_main_process and self.log_with:
            self.version = claim_version(self._runs)
        else:
            # Other processes do not claim a directory: each would make one.
            self.version = free_version(self._runs)

    def continue_run(self, version: object) -> None:
        """Write into the directory of the run whose state was loaded, unless this run has logged already.

        Args:
            version: as the state has it; an older state has none, and belongs to the first run of the project.
        """
        self.continues = True
        self._continued = str(version) if is_version(version) else ""
        if not self._can_change_directory():
            return
        assert self._runs is not None
        unused = self._runs / self.version
        continued = self._runs / self._continued
        if self._continued == self.version or not continued.is_dir():
            return
        # Threads of loggers may still write into the unused directory.
        self._deliveries.wait()
        self.version = self._continued
        for logger in self._versioned:
            # With a time limit: a logger that blocks must not keep the run from resuming.
            continues = functools.partial(self._write_into_run_directory, logger)
            self._calls.call(logger, "load_state_dict", continues, None)
        remove_unused(unused, continued)
        self._report = self._new_report()

    def _can_change_directory(self) -> bool:
        """Whether this process writes into the directory of a run, and has logged nothing yet."""
        has_logged = self._report is None or self._facts is None
        if has_logged or self._runs is None:
            return False
        return self._processes.is_main_process

    def _open_report(
        self,
        project: str,
        config: HyperParameters | None,
        facts: _Facts,
    ) -> list[GeneralTracker]:
        """Create the report if there are trackers and a directory; return the tracker that writes its journal."""
        loggers = [
            tracker.logger
            for tracker in self.started
            if isinstance(tracker, LoggerTracker)
        ]
        self._versioned = [logger for logger in loggers if self._is_versioned(logger)]
        user_journals = [log for log in loggers if isinstance(log, JSONLLogger)]
        path = self._project.logging_path
        if not self.started or (not user_journals and path is None):
            return []
        trackers: list[GeneralTracker] = []
        # One journal is enough: the report reads the user's.
        if user_journals:
            self._journal = user_journals[0]
        else:
            self._journal = JSONLLogger(str(path), project)
            self._write_into_run_directory(self._journal)
            self._versioned.append(self._journal)
            trackers.append(LoggerTracker("journal", self._journal))

        def describe_run() -> JsonObject:
            process_facts = facts()
            hyperparameters = flatten(plain(params_dict(config or {})))
            rows = [
                ["config", name, value, "init_trackers"]
                for name, value in hyperparameters.items()
            ]
            return {
                **process_facts,
                "title": project,
                "configuration": rows + process_facts["configuration"],
            }

        self._facts = describe_run
        self._step = -1
        self._report = self._new_report()
        return trackers

    def _write_into_run_directory(self, logger: Any) -> None:
        """Let a logger write into the directory of this run, unless the caller chose a version."""
        logger.load_state_dict({"name": logger.name, "version": self.version})

    def _is_versioned(self, logger: object) -> bool:
        """Whether a logger writes into the directory of this run."""
        if self._runs is None or not isinstance(logger, DirectoryLogger):
            return False
        return Path(logger.log_dir) == self._runs / self.version

    def _new_report(self) -> RunReport:
        assert self._journal is not None
        return self._report_in(Path(self._journal.log_dir))

    def _report_in(self, directory: Path) -> RunReport:
        return RunReport(directory, lambda: max(self._step, 0), self._processes.print)

    def _begin_report(self, step: int) -> None:
        """Begin the report at the first log, when everything is prepared and a state to resume has been loaded."""
        if self._report is None or self._facts is None:
            return
        describe_run = self._facts
        self._facts = None
        if not self._processes.is_main_process:
            return
        earlier_runs = [
            event.get("run")
            for event in read_events(self._report.directory)
            if event["event"] == "start"
        ]
        run_id: object = secrets.token_hex(8)
        completed_steps = 0
        if self.continues and earlier_runs:
            # The report lists runs by id: a run that continues an earlier one has its id.
            run_id = earlier_runs[-1]
            completed_steps = step - 1
        # Describing the user's objects may fail, which does not end the run.
        try:
            facts = describe_run()
        except Exception as error:
            facts = {"explain": f"not available: {type(error).__name__}: {error}"}
        self._report.begin(
            "fit",
            {**facts, "run": run_id},
            self._processes.num_processes,
            completed_steps,
        )

    def _end_report(self, status: str, error: BaseException | None = None) -> None:
        self._begin_report(0)
        report = self._report
        self._report = None
        if report is not None and self._processes.is_main_process:
            report.end(status, error)

    def _leave(self) -> None:
        # Some loggers write many rows together.
        self._deliveries.call("save")
        self._deliveries.close(None)
        # The exception that ended the script; a SystemExit is not stored there.
        error = getattr(sys, "last_value", None)
        if error is None:
            self._end_report("exited")
        elif isinstance(error, KeyboardInterrupt):
            self._end_report("interrupted")
        else:
            self._end_report("failed", error)

    def end_by_hang(self, text: str, stacks: str) -> None:
        """Record that the watchdog ends the run; its thread calls this, on any process."""
        report = self._report
        if report is None:
            return
        if self._runs is not None and not self._processes.is_main_process:
            # The main process has chosen the directory.
            directory = self._runs / newest_version(self._runs)
            report = self._report_in(directory)
        report.end_by_hang(text, stacks)

    def _writes(self, tracker: GeneralTracker) -> bool:
        return self._processes.is_main_process or not tracker.main_process_only

    def make_tracker(
        self, tracker: str | Tracker, project: str, options: Keywords
    ) -> GeneralTracker:
        """Return the tracker for an entry of ``log_with``; one that does nothing if this process does not log.

        Args:
            tracker: a name or an object.
            project: the name of the project.
            options: constructor arguments.
        """
        if not isinstance(tracker, str):
            return self._tracker_of_object(tracker)
        kind = LOGGERS.get(tracker)
        is_custom = isinstance(kind, type) and issubclass(kind, GeneralTracker)
        everywhere = is_custom and not kind.main_process_only
        if not self._processes.is_main_process and not everywhere:
            return _NoTracker(tracker)
        if not is_custom:
            logger = self._make_logger(tracker, kind, project, options)
            return LoggerTracker(tracker, logger)
        directory = []
        if kind.requires_logging_directory:
            directory.append(self._directory(tracker))
        custom = kind(project, *directory, **options)
        assert isinstance(custom, GeneralTracker)
        return custom

    def _tracker_of_object(self, obj: Tracker) -> GeneralTracker:
        name = getattr(obj, "name", None)
        if not isinstance(obj, GeneralTracker):
            wrapper = LoggerTracker(str(name or type(obj).__name__), obj)
            return wrapper if self._writes(wrapper) else _NoTracker(wrapper.name)
        if not self._writes(obj):
            return _NoTracker(obj.name)
        # On the class: reading a property could start the tracker.
        has_tracker = hasattr(type(obj), "tracker") or "tracker" in vars(obj)
        if not isinstance(name, str) or not has_tracker:
            raise ConfigurationError(
                "a tracker needs the attributes name and tracker",
                found=f"{type(obj).__name__} without one of them",
            )
        return obj

    def _make_logger(
        self,
        name: str,
        kind: Function,
        project: str,
        options: Keywords,
    ) -> Any:
        row = find_row(name)
        if row is None:
            return kind(**options)
        if row.project:
            save_dir = self._project.logging_path or "."
            return kind(**{row.project: project, "save_dir": save_dir, **options})
        if row.holds_one_run and "version" not in options:
            logger = kind(self._directory(name), **{"name": project, **options})
            self._write_into_run_directory(logger)
            return logger
        if row.in_directory:
            arguments = {"name": project, "version": "", **options}
            return kind(self._directory(name), **arguments)
        return kind(**options)

    def _directory(self, tracker: str) -> str:
        directory = self._project.logging_path
        if directory is None:
            raise ConfigurationError(
                f"{tracker} needs a directory",
                fix="Accelerator(project_dir=...), or ProjectConfiguration(logging_dir=...)",
            )
        return directory

    def log(
        self,
        values: LoggedValues,
        step: int | None,
        log_kwargs: LoggedValues | None,
    ) -> None:
        """Log values with every tracker, on the main process.

        Args:
            values: by name; reading a tensor of one element synchronizes with the device.
            step: the step of the values; by default one more than the last.
            log_kwargs: options of the trackers' ``log`` by tracker name.
        """
        if self.log_with and not self.started and not self._warned:
            self._warned = True
            self._processes.print(
                "log() before init_trackers(): no tracker writes these values"
            )
        self._step = self._step + 1 if step is None else step
        # `_begin_report` makes the same check; this one saves a call in every log but the first.
        if self._facts is not None:
            self._begin_report(self._step)
        # Once for all trackers, before this call returns: their threads read the values later.
        values = _copy(values)
        # The time of the call, not that at which a thread delivers the values.
        logged_at = time.time()
        for delivery in self._deliveries.each():
            options = (log_kwargs or {}).get(delivery.logger.tracker.name, {})
            delivery.put("log_metrics", values, step, options, logged_at, number=0)

    def get(self, name: str | LoggerType, unwrap: bool) -> Any:
        """Return a tracker by name, after it has received all logged values; ``unwrap``: the object that it wraps.

        Raises:
            ConfigurationError: no tracker has this name.
        """
        # The caller writes without the queue, so logged values come first.
        self._deliveries.wait()
        for tracker in self.started:
            if tracker.name != word_of(name):
                continue
            if not unwrap or isinstance(tracker, _NoTracker):
                return tracker
            # Not an attribute of the base class: a user's class may define it as a property.
            unwrapped: Any = tracker
            return unwrapped.tracker
        names = ", ".join(tracker.name for tracker in self.started)
        raise ConfigurationError(
            f"unknown tracker {name!r}",
            found=names or "none is started",
            fix=f"Accelerator(log_with={name!r}), and init_trackers(...) first",
        )

    def finish(self) -> None:
        """Close every tracker."""
        self._deliveries.close("success")
        self._end_report("finished")
        atexit.unregister(self._leave)
