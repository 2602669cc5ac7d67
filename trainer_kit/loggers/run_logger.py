"""`RunLogger`: the base class of loggers that write to a run of an experiment tracker."""

from __future__ import annotations

import atexit
import functools
import json
import multiprocessing
import os
import re
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Literal, TypeVar

from trainer_kit.core.arguments import with_typed_arguments
from trainer_kit.core.copyable_lock import Lock
from trainer_kit.core.display import plural
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.location import Location, RemotePath
from trainer_kit.core.types import JsonObject, SavedState, StateDict
from trainer_kit.loggers.bounded import BoundedCalls
from trainer_kit.loggers.layout import (
    DEFAULT_NAME,
    Json,
    LoggedValues,
    numbers,
    params_dict,
    plain,
    with_lock,
)
from trainer_kit.loggers.media import (
    DataFrame,
    Figure,
    TableRows,
    Values,
    as_table,
    csv_text,
    flat_values,
    histogram,
    path_part,
    picture,
    rendered,
)
from trainer_kit.loggers.uploads import CheckpointUploads

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["RunLogger", "copied"]

_Run = TypeVar("_Run")


class RunLogger(ABC, Generic[_Run]):
    """A logger that writes to one run of an experiment tracker.

    ``_Run`` is the tracker's own class of a run: a Protocol of the methods that the subclass calls.

    The run begins at the first write. ``fit``, ``validate``, ``test`` and ``predict`` share it, and so does a run that
    is resumed from a checkpoint. Values that a tracker does not support are written as files: pictures as PNG, text as
    TXT, tables as CSV, histograms as JSON; if it takes no files, they go to ``save_dir/name/<id of the run>``.

    A subclass implements beginning and ending a run and writing numbers and hyperparameters; the methods for pictures,
    text, tables, histograms and files have defaults.

    Args:
        name: the project or the experiment.
        save_dir: the directory of local files.
        id: the id of a run to continue, or of a new one; None lets the tracker choose.
        prefix: the start of metric names, followed by ``-``.
        log_model: upload checkpoints: ``"all"`` when they are saved, True those that still exist at the end of an entry
            point that succeeded.
        run: the tracker's own object of a run to log to; the caller ends it.

    Raises:
        ConfigurationError: the tracker's package is not installed.

    Example:
        >>> class ListLogger(RunLogger[list[object]]):
        ...     requires = module = "torch"
        ...     extra = "examples"
        ...     def _begin(self, id):
        ...         return [], id or "run-1"
        ...     def _end(self, run, status):
        ...         run.append(status)
        ...     def _write_metrics(self, run, values, step):
        ...         run.append((step, dict(values)))
        ...     def _write_params(self, run, params):
        ...         run.append(dict(params))
        >>> logger = ListLogger(name="digits")
        >>> run = logger.experiment
        >>> logger.log_hyperparams({"lr": 0.1})
        >>> logger.log_metrics({"loss": 0.5}, step=3)
        >>> logger.finalize("success")
        >>> run
        [{'lr': 0.1}, (3, {'loss': 0.5}), 'success']
    """

    requires: ClassVar[str]
    """The tracker's package and its lowest version, as pip reads it."""
    module: ClassVar[str]
    """The module to import."""
    extra: ClassVar[str]
    """The extra of trainer-kit that installs the package."""
    stays_open: ClassVar[bool] = False
    """Whether the run stays open between entry points, and ends with the process."""

    writes_alone: Final = True
    # by class, the logger whose run is open between two entry points
    _idle: ClassVar[dict[type, RunLogger[Any]]] = {}

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        with_typed_arguments(cls)

    def __init__(
        self,
        *,
        name: str | None,
        save_dir: str | os.PathLike[str] = ".",
        id: str | None = None,
        prefix: str | None = "",
        log_model: Literal["all"] | bool = False,
        run: _Run | None = None,
    ) -> None:
        from lightning_utilities.core.imports import RequirementCache

        requirement = RequirementCache(self.requires, self.module)
        if not requirement:
            raise ConfigurationError(
                f"{type(self).__name__} needs {self.module}",
                found=str(requirement),
                fix=f"pip install 'trainer-kit[{self.extra}]'",
            )
        self._name = name or DEFAULT_NAME
        self._save_dir = os.path.expanduser(os.fspath(save_dir))
        self._id = id
        self._prefix = prefix or ""
        self._uploads = CheckpointUploads(log_model)
        self._run = run
        # The caller ends a run that it passed; only a run that began here may be ended here.
        self._owned = run is None
        # None in a call means the step of the previous one.
        self._step = 0
        # Metrics and pictures may come from two threads; both begin the run.
        self.lock = Lock()
        self.hparams: JsonObject = {}

    # -- what a tracker does -----------------------------------------------------------------------------------------

    @abstractmethod
    def _begin(self, id: str | None) -> tuple[_Run, str]:
        """Begin a run, or continue the run ``id``; returns the tracker's object and the id."""

    @abstractmethod
    def _end(self, run: _Run, status: str) -> None:
        """End the run: ``"success"``, ``"failed"`` or ``"interrupted"``."""

    @abstractmethod
    def _write_metrics(self, run: _Run, values: Mapping[str, float], step: int) -> None:
        """Write numbers."""

    @abstractmethod
    def _write_params(self, run: _Run, params: Mapping[str, Json]) -> None:
        """Write nested hyperparameters, as strict JSON; those of earlier calls stay."""

    def _flush(self, run: _Run) -> None:
        """Send all buffered values to the tracker."""

    def _write_file(self, run: _Run, path: Path, name: str) -> None:
        """Keep a copy of a file or directory under ``name``, a relative path."""
        copied(path, Path(self._save_dir) / self._name / str(self._id) / name)

    def _write_image(
        self,
        run: _Run,
        key: str,
        image: Image,
        step: int,
        index: int,
        caption: str | None,
    ) -> None:
        """Write a PIL image, number ``index`` of those under ``key``."""
        name = f"images/{path_part(key)}/{step:08d}-{index}.png"
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "image.png"
            image.save(path)
            self._write_file(run, path, name)

    def _write_text(self, run: _Run, key: str, text: str, step: int) -> None:
        """Write text."""
        self._write_as_file(run, f"text/{path_part(key)}/{step:08d}.txt", text)

    def _write_histogram(
        self, run: _Run, key: str, values: Values, bins: int, step: int
    ) -> None:
        """Write the distribution of finite ``values``, an array of one dimension."""
        counts, edges = histogram(values, bins)
        text = json.dumps({"step": step, "counts": counts, "edges": edges})
        self._write_as_file(run, f"histograms/{path_part(key)}/{step:08d}.json", text)

    def _write_table(
        self, run: _Run, key: str, columns: list[str], rows: TableRows, step: int
    ) -> None:
        """Write a table."""
        name = f"tables/{path_part(key)}/{step:08d}.csv"
        self._write_as_file(run, name, csv_text(columns, rows))

    def _write_as_file(self, run: _Run, name: str, text: str) -> None:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / Path(name).name
            path.write_text(text, encoding="utf-8")
            self._write_file(run, path, name)

    # -- the run -----------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The project or the experiment."""
        return self._name

    @property
    def version(self) -> str | None:
        """The id of the run; None until a run without a given id has begun."""
        return self._id

    @property
    def save_dir(self) -> str:
        """The directory of local files."""
        return self._save_dir

    @property
    def log_dir(self) -> None:
        """None: all runs share ``save_dir``. A Trainer makes a directory for its run below ``default_root_dir``."""

    @property
    @with_lock
    def experiment(self) -> Any:
        """The tracker's own object of the run; the first access begins the run."""
        # Any: users call all methods of their tracker's run, the loggers only those of `_Run`.
        if self._run is None:
            # Before `_begin`: of these trackers a process has one open run.
            idle = RunLogger._idle.pop(type(self), None)
            if idle is not None and idle is not self:
                idle._close("success")
            self._run, self._id = self._begin(self._id)
            if self.stays_open:
                # Registered last, so called first: the run ends before the tracker's own exit handler.
                # Comet's exit handler writes an empty archive if the run did not begin on the main thread.
                atexit.register(self._leave)
        elif RunLogger._idle.get(type(self)) is self:
            # In use again: another logger that begins must not end it.
            del RunLogger._idle[type(self)]
        return self._run

    def state_dict(self) -> StateDict:
        """The run's id, once it has begun."""
        if self._id is None:
            return {}
        return {"id": self._id}

    def load_state_dict(self, state: SavedState) -> None:
        """Continue the run of ``state``, unless a run has begun here or was given.

        Args:
            state: what ``state_dict`` returned: ``{"id": the id of the run}``, or an empty dict.

        Raises:
            ConfigurationError: the id is invalid; a record or a checkpoint was edited.
        """
        if self._id is not None or self._run is not None or "id" not in state:
            return
        id = str(state["id"])
        # It becomes part of file names; a record that was edited must not lead to another directory.
        if not re.fullmatch(r"[\w.\-]+", id):
            raise ConfigurationError(
                "the run to continue has an id that no tracker creates",
                found=repr(state["id"]),
                fix="pass its id",
            )
        self._id = id

    def save(self) -> None:
        """Send all buffered values to the tracker."""
        if self._run is not None:
            self._flush(self._run)

    def finalize(self, status: str) -> None:
        """Upload the checkpoints that ``log_model=True`` keeps, and end the run; a later write continues it.

        Args:
            status: ``"success"``, ``"failed"`` or ``"interrupted"``.
        """
        # Before the lock: an upload takes long, and user code may log meanwhile.
        self._uploads.ended(status, self._upload)
        with self.lock:
            if self._run is None:
                return
            self._flush(self._run)
            if not self._owned:
                return
            stays_open = self.stays_open and status == "success"
            # multiprocessing ends its processes without running the exit handlers that would end the run.
            if stays_open and multiprocessing.parent_process() is None:
                RunLogger._idle[type(self)] = self
            else:
                self._close(status)

    @with_lock
    def _close(self, status: str) -> None:
        if RunLogger._idle.get(type(self)) is self:
            del RunLogger._idle[type(self)]
        run = self._run
        # Cleared first: if `_end` raises, a later write begins the run again instead of using a closed one.
        self._run = None
        atexit.unregister(self._leave)
        if run is not None:
            self._end(run, status)

    def _leave(self) -> None:
        """End the run when the process exits; one that blocks there keeps the process for 10 seconds."""
        # A run that is not idle was in the middle of an entry point.
        is_idle = RunLogger._idle.get(type(self)) is self
        status = "success" if is_idle else "interrupted"
        close = functools.partial(self._close, status)
        BoundedCalls(print).call(self, "the end of its run", close, None)

    def __getstate__(self) -> StateDict:
        state = dict(vars(self))
        # A copy in another process begins or continues its run itself: connections and threads do not travel.
        if self._owned:
            state["_run"] = None
        return state

    # -- values ------------------------------------------------------------------------------------------------------

    def log_metrics(self, metrics: LoggedValues, step: int | None = None) -> None:
        """Log numbers.

        Args:
            metrics: numbers, or tensors of one element.
            step: the step of the values; None for that of the previous call.

        Raises:
            LogError: a value is not one number.
        """
        values = numbers(metrics, self._prefix)
        if values:
            self._write_metrics(self.experiment, values, self._resolve_step(step))

    def log_hyperparams(
        self, params: object, metrics: LoggedValues | None = None
    ) -> None:
        """Log hyperparameters, and ``metrics`` at step 0.

        Args:
            params: a mapping, a Namespace or a dataclass.
            metrics: values for comparing runs.
        """
        # Every entry point logs them again; a tracker gets only what it does not have yet.
        new = {
            name: value
            for name, value in plain(params_dict(params)).items()
            if name not in self.hparams or self.hparams[name] != value
        }
        if new:
            self._write_params(self.experiment, new)
            self.hparams.update(new)
        if metrics:
            self.log_metrics(metrics, 0)

    def log_image(
        self,
        key: str,
        images: object,
        step: int | None = None,
        caption: Sequence[str] | None = None,
    ) -> None:
        """Log pictures.

        Args:
            key: their name.
            images: one or a list of: tensors (channels, height, width), arrays (height, width[, channels]), PIL images,
                paths. Floats are in 0…1.
            step: None for that of the previous call.
            caption: one text for each.

        Raises:
            LogError: one of them is not an image.
            ConfigurationError: the number of captions differs from the number of pictures.
        """
        # Only lists and tuples hold several: an array or a tensor is one picture, and iterates over its rows.
        items: Sequence[object] = [images]
        if isinstance(images, (list, tuple)):
            items = images
        captions: Sequence[str | None] = [None] * len(items)
        if caption is not None:
            captions = list(caption)
        if len(captions) != len(items):
            raise ConfigurationError(
                f"caption needs one value for each of the {len(items)} pictures",
                found=plural(len(captions), "value"),
            )
        for index, item in enumerate(items):
            image = picture(item)
            number = self._resolve_step(step)
            self._write_image(
                self.experiment, key, image, number, index, captions[index]
            )

    def log_figure(self, key: str, figure: Figure, step: int | None = None) -> None:
        """Log a matplotlib figure, as a picture.

        Args:
            key: its name.
            figure: a ``matplotlib.figure.Figure``, or anything else with its ``savefig``.
            step: None for that of the previous call.
        """
        image = rendered(figure)
        self._write_image(
            self.experiment, key, image, self._resolve_step(step), 0, None
        )

    def log_text(self, key: str, text: str, step: int | None = None) -> None:
        """Log text.

        Args:
            key: its name.
            text: the text; other objects are converted by ``str``.
            step: None for that of the previous call.
        """
        self._write_text(self.experiment, key, str(text), self._resolve_step(step))

    def log_histogram(
        self, key: str, values: object, step: int | None = None, bins: int = 64
    ) -> None:
        """Log the distribution of numbers; NaN and infinities are left out.

        Args:
            key: its name.
            values: a tensor or an array of any shape, or numbers.
            step: None for that of the previous call.
            bins: number of intervals.
        """
        self._write_histogram(
            self.experiment, key, flat_values(values), bins, self._resolve_step(step)
        )

    def log_table(
        self,
        key: str,
        columns: Sequence[object] | None = None,
        data: Sequence[Sequence[object]] | None = None,
        dataframe: DataFrame | None = None,
        step: int | None = None,
    ) -> None:
        """Log a table, from ``columns`` and the rows ``data`` or from a data frame.

        Args:
            key: its name.
            columns: the names of the columns; None: their numbers, from 0.
            data: the rows, each with one value per column.
            dataframe: a pandas data frame, in place of ``columns`` and ``data``.
            step: None for that of the previous call.

        Raises:
            LogError: a row's number of values differs from the number of columns.
        """
        names, rows = as_table(columns, data, dataframe)
        self._write_table(self.experiment, key, names, rows, self._resolve_step(step))

    def log_artifact(
        self, path: str | os.PathLike[str], name: str | None = None
    ) -> None:
        """Keep a copy of a file or directory with the run.

        Args:
            path: a local path.
            name: a relative path; None for its own name.

        Raises:
            FileNotFoundError: the path does not exist.
        """
        local_path = Path(os.path.expanduser(path))
        if not local_path.exists():
            raise FileNotFoundError(
                f"{local_path}: this file or directory does not exist"
            )
        if name is None:
            name = local_path.name
        self._write_file(self.experiment, local_path, path_part(name))

    def after_save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Upload a checkpoint now, at the end, or not at all, depending on ``log_model``.

        Args:
            path: the checkpoint, a directory or a file.

        Raises:
            LogError: the checkpoint was deleted before the upload was complete.
        """
        self._uploads.saved(path, self._upload)

    def _upload(self, path: Location) -> None:
        name = f"checkpoints/{path.name}"
        if isinstance(path, RemotePath):
            # The files stay in remote storage; the tracker gets their address.
            self._write_text(self.experiment, name, str(path), self._step)
        else:
            self._write_file(self.experiment, path, name)

    def _resolve_step(self, step: int | None) -> int:
        if step is not None:
            self._step = int(step)
        return self._step


def copied(path: Path, target: Path) -> None:
    """Copy a file or directory, with its permissions, and make the directories above it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.copytree(path, target, dirs_exist_ok=True)
    else:
        shutil.copy(path, target)
