"""ClearML."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, final

from trainer_kit.loggers.layout import flatten
from trainer_kit.loggers.media import centers, histogram
from trainer_kit.loggers.run_logger import RunLogger

__all__ = ["ClearMLLogger"]


@final
class ClearMLLogger(RunLogger):
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
    """

    requires, module, extra = "clearml>=1.14", "clearml", "clearml"
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
        task: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            name=project_name or os.environ.get("CLEARML_PROJECT"),
            save_dir=save_dir,
            id=task_id if task is None else task.id,
            prefix=prefix,
            log_model=log_model,
            run=task,
        )
        self._offline = offline
        self._init = {
            "task_name": task_name or os.environ.get("CLEARML_TASK") or "train",
            "reuse_last_task_id": False,
            "auto_connect_frameworks": False,
            **kwargs,
        }

    def _begin(self, id: str | None) -> tuple[Any, str]:
        from clearml import Task
        from clearml.config import config

        if config.get("development.report_use_subprocess", None) is None:
            # By default on Linux ClearML forks its reporter while its search for a repository starts programs. If the
            # reporter inherits the pipe of such a start, the search and the end of the task wait for each other.
            Task._report_subprocess_enabled = False  # type: ignore[assignment]
        if self._offline:
            Task.set_offline(True)
        continues = id is not None and not id.startswith("offline-")
        task: Any = Task.init(
            project_name=self._name,
            **{**self._init, **({"continue_last_task": id} if continues else {})},
        )
        if id is not None and not continues:
            task.set_parameter("General/continues", id)
        return task, str(task.id)

    def _end(self, run: Any, status: str) -> None:
        if status == "failed":
            run.mark_failed(status_reason="the run raised an error")
        elif status == "interrupted":
            run.mark_stopped(status_message="interrupted")
        run.close()

    def _flush(self, run: Any) -> None:
        run.flush(wait_for_uploads=True)

    def _write_metrics(self, run: Any, values: Mapping[str, float], step: int) -> None:
        logger = run.get_logger()
        for name, value in values.items():
            plot, _, series = name.rpartition("/")
            logger.report_scalar(plot or series, series, value, step)

    def _write_params(self, run: Any, params: Mapping[str, Any]) -> None:
        run.update_parameters(
            {f"General/{name}": value for name, value in flatten(params).items()}
        )

    def _write_file(self, run: Any, path: Path, name: str) -> None:
        run.upload_artifact(name, artifact_object=str(path))

    def _write_image(
        self, run: Any, key: str, image: Any, step: int, index: int, caption: str | None
    ) -> None:
        run.get_logger().report_image(key, caption or str(index), step, image=image)

    def _write_text(self, run: Any, key: str, text: str, step: int) -> None:
        run.get_logger().report_text(f"{key}, step {step}: {text}", print_console=False)

    def _write_histogram(
        self, run: Any, key: str, values: Any, bins: int, step: int
    ) -> None:
        counts, edges = histogram(values, bins)
        run.get_logger().report_histogram(
            key, key, counts, step, xlabels=centers(edges)
        )

    def _write_table(
        self, run: Any, key: str, columns: list[str], rows: list[list[Any]], step: int
    ) -> None:
        run.get_logger().report_table(key, key, step, table_plot=[columns, *rows])
