"""`RunLogger`: the base class of loggers that write to a run of an experiment tracker."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import re
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from trainer_kit.core.arguments import with_typed_arguments
from trainer_kit.core.copyable_lock import Lock
from trainer_kit.core.display import plural
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.location import Location, RemotePath
from trainer_kit.loggers.layout import (
    DEFAULT_NAME,
    numbers,
    one_at_a_time,
    params_dict,
    plain,
)
from trainer_kit.loggers.media import (
    as_table,
    csv_text,
    flat_values,
    histogram,
    path_part,
    picture,
    rendered,
)
from trainer_kit.loggers.uploads import CheckpointUploads

__all__ = ["RunLogger", "copied"]


class RunLogger(ABC):
    """A logger that writes to one run of an experiment tracker.

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
    _idle: ClassVar[
        dict[type, RunLogger]
    ] = {}  # by class, the logger whose run is open between two entry points

    def __init_subclass__(cls, **kwargs: Any) -> None:
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
        run: Any = None,
    ) -> None:
        from lightning_utilities.core.imports import RequirementCache

        requirement = RequirementCache(self.requires, self.module)
        if not requirement:
            raise ConfigurationError(
                f"{type(self).__name__} needs {self.module}",
                found=str(requirement),
                fix=f"pip install 'trainer-kit[{self.extra}]'",
            )
        self._name, self._save_dir = (
            name or DEFAULT_NAME,
            os.path.expanduser(os.fspath(save_dir)),
        )
        self._id, self._prefix, self._uploads = (
            id,
            prefix or "",
            CheckpointUploads(log_model),
        )
        self._run, self._owned = run, run is None
        self._step = 0
        self.lock = (
            Lock()
        )  # metrics and pictures may come from two threads; both begin the run
        self.hparams: dict[str, Any] = {}

    # -- what a tracker does -----------------------------------------------------------------------------------------

    @abstractmethod
    def _begin(self, id: str | None) -> tuple[Any, str]:
        """Begin a run, or continue the run ``id``; returns the tracker's object and the id."""

    @abstractmethod
    def _end(self, run: Any, status: str) -> None:
        """End the run: ``"success"``, ``"failed"`` or ``"interrupted"``."""

    @abstractmethod
    def _write_metrics(self, run: Any, values: Mapping[str, float], step: int) -> None:
        """Write numbers."""

    @abstractmethod
    def _write_params(self, run: Any, params: Mapping[str, Any]) -> None:
        """Write nested hyperparameters, as strict JSON; those of earlier calls stay."""

    def _flush(self, run: Any) -> None:
        """Send all buffered values to the tracker."""

    def _write_file(self, run: Any, path: Path, name: str) -> None:
        """Keep a copy of a file or directory under ``name``, a relative path."""
        copied(path, Path(self._save_dir) / self._name / str(self._id) / name)

    def _write_image(
        self, run: Any, key: str, image: Any, step: int, index: int, caption: str | None
    ) -> None:
        """Write a PIL image, number ``index`` of those under ``key``."""
        with tempfile.TemporaryDirectory() as directory:
            image.save(Path(directory) / "image.png")
            self._write_file(
                run,
                Path(directory) / "image.png",
                f"images/{path_part(key)}/{step:08d}-{index}.png",
            )

    def _write_text(self, run: Any, key: str, text: str, step: int) -> None:
        """Write text."""
        self._write_as_file(run, f"text/{path_part(key)}/{step:08d}.txt", text)

    def _write_histogram(
        self, run: Any, key: str, values: Any, bins: int, step: int
    ) -> None:
        """Write the distribution of finite ``values``, an array of one dimension."""
        counts, edges = histogram(values, bins)
        text = json.dumps({"step": step, "counts": counts, "edges": edges})
        self._write_as_file(run, f"histograms/{path_part(key)}/{step:08d}.json", text)

    def _write_table(
        self, run: Any, key: str, columns: list[str], rows: list[list[Any]], step: int
    ) -> None:
        """Write a table."""
        self._write_as_file(
            run, f"tables/{path_part(key)}/{step:08d}.csv", csv_text(columns, rows)
        )

    def _write_as_file(self, run: Any, name: str, text: str) -> None:
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
    @one_at_a_time
    def experiment(self) -> Any:
        """The tracker's own object of the run; the first access begins the run."""
        if self._run is None:
            idle = RunLogger._idle.pop(type(self), None)
            if idle is not None and idle is not self:
                idle._close("success")
            self._run, self._id = self._begin(self._id)
            if self.stays_open:
                # Comet's exit handler writes an empty archive if the run did not begin on the main thread.
                atexit.register(self._leave)
        elif RunLogger._idle.get(type(self)) is self:
            del RunLogger._idle[type(self)]
        return self._run

    def state_dict(self) -> dict[str, Any]:
        """The run's id, once it has begun."""
        return {} if self._id is None else {"id": self._id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run of ``state``, unless a run has begun here or was given.

        Raises:
            ConfigurationError: the id is invalid; a record or a checkpoint was edited.
        """
        if self._id is not None or self._run is not None or "id" not in state:
            return
        if not re.fullmatch(r"[\w.\-]+", str(state["id"])):
            raise ConfigurationError(
                "the run to continue has an id that no tracker creates",
                found=repr(state["id"]),
                fix="pass its id",
            )
        self._id = str(state["id"])

    def save(self) -> None:
        """Send all buffered values to the tracker."""
        if self._run is not None:
            self._flush(self._run)

    def finalize(self, status: str) -> None:
        """Upload the checkpoints that ``log_model=True`` keeps, and end the run; a later write continues it.

        Args:
            status: ``"success"``, ``"failed"`` or ``"interrupted"``.
        """
        self._uploads.ended(status, self._upload)
        with self.lock:
            if self._run is None:
                return
            self._flush(self._run)
            if not self._owned:
                return
            # multiprocessing ends its processes without running the exit handlers that would end the run.
            if (
                self.stays_open
                and status == "success"
                and multiprocessing.parent_process() is None
            ):
                RunLogger._idle[type(self)] = self
            else:
                self._close(status)

    @one_at_a_time
    def _close(self, status: str) -> None:
        if RunLogger._idle.get(type(self)) is self:
            del RunLogger._idle[type(self)]
        run, self._run = self._run, None
        atexit.unregister(self._leave)
        if run is not None:
            self._end(run, status)

    def _leave(self) -> None:
        """End the run when the process exits."""
        self._close(
            "success" if RunLogger._idle.get(type(self)) is self else "interrupted"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_run": None if self._owned else self._run}

    # -- values ------------------------------------------------------------------------------------------------------

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
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
        self, params: Any, metrics: Mapping[str, Any] | None = None
    ) -> None:
        """Log hyperparameters, and ``metrics`` at step 0.

        Args:
            params: a mapping, a Namespace or a dataclass.
            metrics: values for comparing runs.
        """
        hparams = plain(params_dict(params))
        new = {
            name: value
            for name, value in hparams.items()
            if self.hparams.get(name, self) != value
        }
        if new:
            self._write_params(self.experiment, new)
            self.hparams.update(new)
        if metrics:
            self.log_metrics(metrics, 0)

    def log_image(
        self,
        key: str,
        images: Any,
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
            LogError: one of them is not a picture.
            ConfigurationError: the number of captions differs from the number of pictures.
        """
        many = list(images) if isinstance(images, (list, tuple)) else [images]
        captions = [None] * len(many) if caption is None else list(caption)
        if len(captions) != len(many):
            raise ConfigurationError(
                f"caption needs one value for each of the {len(many)} pictures",
                found=plural(len(captions), "value"),
            )
        for index, (image, text) in enumerate(
            zip(map(picture, many), captions, strict=True)
        ):
            self._write_image(
                self.experiment, key, image, self._resolve_step(step), index, text
            )

    def log_figure(self, key: str, figure: Any, step: int | None = None) -> None:
        """Log a matplotlib figure, as a picture.

        Args:
            key: its name.
            figure: a ``matplotlib.figure.Figure``, or anything else with its ``savefig``.
            step: None for that of the previous call.
        """
        self._write_image(
            self.experiment, key, rendered(figure), self._resolve_step(step), 0, None
        )

    def log_text(self, key: str, text: str, step: int | None = None) -> None:
        """Log text under ``key``."""
        self._write_text(self.experiment, key, str(text), self._resolve_step(step))

    def log_histogram(
        self, key: str, values: Any, step: int | None = None, bins: int = 64
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
        columns: Sequence[Any] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Log a table, from ``columns`` and the rows ``data`` or from a data frame.

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
        self._write_file(
            self.experiment,
            local_path,
            path_part(local_path.name if name is None else name),
        )

    def after_save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Upload a checkpoint now, at the end, or not at all, depending on ``log_model``.

        Args:
            path: the checkpoint, a directory or a file.

        Raises:
            LogError: the checkpoint was deleted before the upload was complete.
        """
        self._uploads.saved(path, self._upload)

    def _upload(self, path: Location) -> None:
        if isinstance(path, RemotePath):  # the files stay in remote storage
            self._write_text(
                self.experiment, f"checkpoints/{path.name}", str(path), self._step
            )
        else:
            self._write_file(self.experiment, path, f"checkpoints/{path.name}")

    def _resolve_step(self, step: int | None) -> int:
        self._step = self._step if step is None else int(step)
        return self._step


def copied(path: Path, target: Path) -> None:
    """Copy a file or directory, with its permissions, and make the directories above it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.copytree(path, target, dirs_exist_ok=True)
    else:
        shutil.copy(path, target)
