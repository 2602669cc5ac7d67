"""ClearML."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, final

from trainer_kit.loggers.layout import Json, flatten
from trainer_kit.loggers.media import TableRows, Values, centers, histogram
from trainer_kit.loggers.run_logger import RunLogger

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["ClearMLLogger", "ClearMLTask"]


class _Plots(Protocol):
    """The part of ``clearml.Logger`` that `ClearMLLogger` calls."""

    def report_scalar(
        self, title: str, series: str, value: float, iteration: int
    ) -> object: ...

    def report_image(
        self, title: str, series: str, iteration: int, *, image: Any
    ) -> object: ...

    def report_text(self, msg: str, *, print_console: bool) -> object: ...

    def report_histogram(
        self,
        title: str,
        series: str,
        values: list[int],
        iteration: int,
        *,
        xlabels: list[str],
    ) -> object: ...

    def report_table(
        self, title: str, series: str, iteration: int, *, table_plot: Any
    ) -> object: ...


class ClearMLTask(Protocol):
    """The part of ``clearml.Task`` that `ClearMLLogger` calls."""

    @property
    def id(self) -> str:
        """The id of the task."""

    def get_logger(self) -> _Plots:
        """Return the object that plots are sent to."""

    def set_parameter(self, name: str, value: Any) -> object:
        """Store one hyperparameter."""

    def update_parameters(self, parameters: Any, /) -> object:
        """Store hyperparameters beside those of earlier calls."""

    def upload_artifact(self, name: str, artifact_object: Any) -> object:
        """Upload a file or a directory."""

    def flush(self, wait_for_uploads: bool) -> object:
        """Send all buffered values."""

    def mark_failed(self, *, status_reason: str) -> object:
        """End the task as failed."""

    def mark_stopped(self, *, status_message: str) -> object:
        """End the task as interrupted."""

    def close(self) -> object:
        """End the task; blocks until everything is sent."""


@final
class ClearMLLogger(RunLogger[ClearMLTask]):
    """Log to ClearML, or to an archive for ``Task.import_offline_session`` with ``offline=True``.

    `experiment` is the ``clearml.Task``. A process has one task, which stays open between ``fit``, ``validate`` and
    ``test``; ClearML closes it with the process. A metric ``val/loss`` is the series ``loss`` of the plot ``val``. An
    offline task cannot be continued: a resumed run begins another one, whose hyperparameter ``continues`` names it.

    Args:
        project_name: None for ``CLEARML_PROJECT``, else ``trainer_kit_logs``.
        task_name: the name of a new task.
        save_dir: where local files go.
        task_id: the id of a task to continue.
        offline: write an archive instead of sending data.
        prefix: the start of metric names, followed by ``-``.
        log_model: upload checkpoints: ``"all"`` when they are saved, True those that still exist at the end.
        task: a task to log to; the caller closes it.
        **kwargs: for ``Task.init``: ``tags``, ``task_type``, ``output_uri``, …. ``auto_connect_frameworks`` is False
            here: otherwise ClearML patches ``torch.save`` and TensorBoard, and logs twice.

    Raises:
        ConfigurationError: clearml is not installed.

    Example:
        >>> from trainer_kit import Trainer
        >>> from trainer_kit.loggers import ClearMLLogger
        >>> logger = ClearMLLogger(project_name="digits", task_name="baseline", offline=True)
        >>> trainer = Trainer(logger=logger, max_epochs=3)
        >>> logger.name, logger.version
        ('digits', None)
    """

    requires = "clearml>=1.14"
    module = "clearml"
    extra = "clearml"
    stays_open = True

    def __init__(
        self,
        project_name: str | None = None,
        task_name: str | None = None,
        save_dir: str | os.PathLike[str] = ".",
        task_id: str | None = None,
        offline: bool = False,
        prefix: str = "",
        log_model: Literal["all"] | bool = False,
        task: ClearMLTask | None = None,
        **kwargs: object,
    ) -> None:
        if task is not None:
            task_id = task.id
        super().__init__(
            name=project_name or os.environ.get("CLEARML_PROJECT"),
            save_dir=save_dir,
            id=task_id,
            prefix=prefix,
            log_model=log_model,
            run=task,
        )
        self._offline = offline
        self._init = {
            "task_name": task_name or os.environ.get("CLEARML_TASK") or "train",
            # By default ClearML overwrites the last task of the same name unless it has artifacts.
            "reuse_last_task_id": False,
            "auto_connect_frameworks": False,
            **kwargs,
        }

    def _begin(self, id: str | None) -> tuple[ClearMLTask, str]:
        from clearml import Task
        from clearml.config import config

        if config.get("development.report_use_subprocess", None) is None:
            # By default on Linux ClearML forks its reporter while its search for a repository starts programs. If the
            # reporter inherits the pipe of such a start, the search and the end of the task wait for each other.
            # ClearML declares the attribute as an entry of its configuration.
            Task._report_subprocess_enabled = False  # type: ignore[assignment]
        if self._offline:
            Task.set_offline(True)
        options: dict[str, Any] = dict(self._init)
        is_offline = id is not None and id.startswith("offline-")
        if id is not None and not is_offline:
            options["continue_last_task"] = id
        task: ClearMLTask = Task.init(project_name=self._name, **options)
        if is_offline:
            # The archive of the earlier task is closed, so this one only names it.
            task.set_parameter("General/continues", id)
        return task, str(task.id)

    def _end(self, run: ClearMLTask, status: str) -> None:
        # Before `close`, which marks a task that still runs as completed.
        if status == "failed":
            run.mark_failed(status_reason="the run raised an error")
        elif status == "interrupted":
            run.mark_stopped(status_message="interrupted")
        run.close()

    def _flush(self, run: ClearMLTask) -> None:
        run.flush(wait_for_uploads=True)

    def _write_metrics(
        self, run: ClearMLTask, values: Mapping[str, float], step: int
    ) -> None:
        logger = run.get_logger()
        for name, value in values.items():
            plot, _, series = name.rpartition("/")
            logger.report_scalar(plot or series, series, value, step)

    def _write_params(self, run: ClearMLTask, params: Mapping[str, Json]) -> None:
        flat = flatten(params)
        # ClearML shows parameters by section; `General` is the one that its own `connect` writes to.
        run.update_parameters({f"General/{name}": flat[name] for name in flat})

    def _write_file(self, run: ClearMLTask, path: Path, name: str) -> None:
        run.upload_artifact(name, artifact_object=str(path))

    def _write_image(
        self,
        run: ClearMLTask,
        key: str,
        image: Image,
        step: int,
        index: int,
        caption: str | None,
    ) -> None:
        run.get_logger().report_image(key, caption or str(index), step, image=image)

    def _write_text(self, run: ClearMLTask, key: str, text: str, step: int) -> None:
        run.get_logger().report_text(f"{key}, step {step}: {text}", print_console=False)

    def _write_histogram(
        self, run: ClearMLTask, key: str, values: Values, bins: int, step: int
    ) -> None:
        counts, edges = histogram(values, bins)
        labels = centers(edges)
        run.get_logger().report_histogram(key, key, counts, step, xlabels=labels)

    def _write_table(
        self, run: ClearMLTask, key: str, columns: list[str], rows: TableRows, step: int
    ) -> None:
        run.get_logger().report_table(key, key, step, table_plot=[columns, *rows])
