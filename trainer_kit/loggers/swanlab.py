"""SwanLab."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, final

from trainer_kit.core.types import Keywords
from trainer_kit.loggers.layout import Json
from trainer_kit.loggers.media import (
    TableRows,
    Values,
    centers,
    histogram,
    numbered_key,
)
from trainer_kit.loggers.run_logger import RunLogger

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["SwanLabLogger", "SwanLabRun"]


class _Config(Protocol):
    def update(self, data: dict[str, Json], /) -> object: ...


class SwanLabRun(Protocol):
    """The part of SwanLab's run that `SwanLabLogger` calls."""

    @property
    def id(self) -> str:
        """The id of the run."""

    @property
    def config(self) -> _Config:
        """The hyperparameters."""

    def log(self, data: dict[str, float], step: int) -> object:
        """Write numbers."""

    def log_text(self, *, key: str, data: str, step: int) -> object:
        """Write text."""

    def log_image(
        self, *, key: str, data: Image, caption: str | None, step: int
    ) -> object:
        """Write a picture."""

    def log_echarts(self, *, key: str, data: object, step: int) -> object:
        """Write a chart of pyecharts."""

    def save(self, glob_str: str, base_path: str, policy: str) -> object:
        """Upload the files of a pattern, with their paths below ``base_path``."""

    def finish(self, state: str = "success", error: str | None = None) -> object:
        """End the run."""


@final
class SwanLabLogger(RunLogger[SwanLabRun]):
    """Log to SwanLab, or to files for ``swanlab sync`` with ``mode="offline"``.

    A process has one run, which stays open between ``fit``, ``validate`` and ``test``; SwanLab ends it with the
    process. Only ``mode="online"`` continues a run in another process: other modes begin a new run, whose
    hyperparameter ``continues`` names the first.

    Args:
        project: None for ``trainer_kit_logs``.
        workspace: None for the user's own.
        experiment_name: the name of the run; None lets SwanLab choose one.
        log_dir: where SwanLab keeps its files; None for ``save_dir/swanlog``.
        mode: ``"online"``, ``"local"``, ``"offline"`` or ``"disabled"``; None for SwanLab's setting.
        save_dir: where local files go.
        id: the id of a run to continue.
        prefix: the start of metric names, followed by ``-``.
        log_model: upload checkpoints: ``"all"`` when they are saved, True those that still exist at the end.
        run: a SwanLab run to log to; the caller finishes it.
        **kwargs: for ``swanlab.init``: ``description``, ``tags``, ``group``, ``job_type``, ``public``, ….

    Raises:
        ConfigurationError: swanlab is not installed.

    Example:
        >>> from trainer_kit import Trainer
        >>> from trainer_kit.loggers import SwanLabLogger
        >>> logger = SwanLabLogger(project="digits", experiment_name="baseline", mode="offline")
        >>> trainer = Trainer(logger=logger, max_epochs=3)
        >>> logger.name, logger.version
        ('digits', None)
    """

    requires = "swanlab>=0.8"
    module = "swanlab"
    extra = "swanlab"
    stays_open = True

    def __init__(
        self,
        project: str | None = None,
        workspace: str | None = None,
        experiment_name: str | None = None,
        log_dir: str | None = None,
        mode: Literal["online", "local", "offline", "disabled"] | None = None,
        save_dir: str | os.PathLike[str] = ".",
        id: str | None = None,
        prefix: str = "",
        log_model: Literal["all"] | bool = False,
        run: SwanLabRun | None = None,
        **kwargs: object,
    ) -> None:
        if run is not None:
            id = run.id
        super().__init__(
            name=project,
            save_dir=save_dir,
            id=id,
            prefix=prefix,
            log_model=log_model,
            run=run,
        )
        arguments = {
            "workspace": workspace,
            "name": experiment_name,
            "mode": mode,
        }
        # None is left out: SwanLab then reads its own setting, such as SWANLAB_MODE.
        self._options: Keywords = {}
        for name, value in arguments.items():
            if value is not None:
                self._options[name] = value
        self._options.update(kwargs)
        self._directory = os.path.join(self._save_dir, "swanlog")
        if log_dir is not None:
            self._directory = os.path.expanduser(log_dir)

    def _begin(self, id: str | None) -> tuple[SwanLabRun, str]:
        import swanlab

        Path(self._directory).mkdir(parents=True, exist_ok=True)
        options = dict(self._options)
        resumes = id is not None and options.get("mode", "online") == "online"
        if resumes:
            options["id"] = id
            options["resume"] = "allow"
        run: SwanLabRun = swanlab.init(
            project=self._name, log_dir=self._directory, **options
        )
        if id is not None and not resumes:
            # Local modes have no server that knows the first run.
            run.config.update({"continues": id})
        return run, str(run.id)

    def _end(self, run: SwanLabRun, status: str) -> None:
        if status == "success":
            run.finish()
        elif status == "interrupted":
            run.finish(state="aborted", error=status)
        else:
            run.finish(state="crashed", error=status)

    def _write_metrics(
        self, run: SwanLabRun, values: Mapping[str, float], step: int
    ) -> None:
        run.log(dict(values), step=step)

    def _write_params(self, run: SwanLabRun, params: Mapping[str, Json]) -> None:
        run.config.update(dict(params))

    def _write_file(self, run: SwanLabRun, path: Path, name: str) -> None:
        # SwanLab names a file by its path below `base_path`, so it gets a copy that lies there under `name`.
        super()._write_file(run, path, name)
        root = Path(self._save_dir) / self._name / str(self._id)
        pattern = root / name
        if pattern.is_dir():
            pattern = pattern / "**"
        run.save(str(pattern), base_path=str(root), policy="now")

    def _write_image(
        self,
        run: SwanLabRun,
        key: str,
        image: Image,
        step: int,
        index: int,
        caption: str | None,
    ) -> None:
        key = numbered_key(key, index)
        run.log_image(key=key, data=image, caption=caption, step=step)

    def _write_text(self, run: SwanLabRun, key: str, text: str, step: int) -> None:
        run.log_text(key=key, data=text, step=step)

    def _write_histogram(
        self, run: SwanLabRun, key: str, values: Values, bins: int, step: int
    ) -> None:
        import swanlab

        # SwanLab has no type for histograms: a chart of bars shows the counts.
        counts, edges = histogram(values, bins)
        bars = swanlab.echarts.Bar()
        bars.add_xaxis(centers(edges))
        bars.add_yaxis(key, counts)
        run.log_echarts(key=key, data=bars, step=step)

    def _write_table(
        self, run: SwanLabRun, key: str, columns: list[str], rows: TableRows, step: int
    ) -> None:
        import swanlab

        table = swanlab.echarts.Table()
        table.add(columns, rows)
        run.log_echarts(key=key, data=table, step=step)
