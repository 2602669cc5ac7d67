"""Trackio."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, final

from trainer_kit.loggers.layout import Json
from trainer_kit.loggers.media import TableRows, Values, numbered_key
from trainer_kit.loggers.run_logger import RunLogger

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["TrackioLogger", "TrackioRun"]


class TrackioRun(Protocol):
    """The part of ``trackio.Run`` that `TrackioLogger` calls."""

    @property
    def name(self) -> str:
        """The name of the run, which is its id."""

    @property
    def config(self) -> dict[str, Json]:
        """The hyperparameters."""

    def log(self, metrics: dict[str, object], step: int) -> object:
        """Write numbers, and Trackio's own objects of media."""

    def log_artifact(self, artifact_or_path: Path, name: str) -> object:
        """Upload a file or a directory."""

    def finish(self) -> object:
        """End the run; blocks until everything is sent."""


@final
class TrackioLogger(RunLogger[TrackioRun]):
    """Log to Trackio: a local database, a Space or your own server.

    Trackio keeps its local database in the environment's ``TRACKIO_DIR``, else in the cache of Hugging Face. A process
    has one open run: beginning a second one finishes the first.

    Args:
        project: None for ``trainer_kit_logs``.
        name: the run's name, which is also its id; None lets Trackio choose one.
        save_dir: where local files go.
        resume: continue the run ``name`` if it exists.
        prefix: the start of metric names, followed by ``-``.
        log_model: upload checkpoints: ``"all"`` when they are saved, True those that still exist at the end.
        run: a ``trackio.Run`` to log to; the caller finishes it.
        **kwargs: for ``trackio.init``: ``space_id``, ``dataset_id``, ``server_url``, ``group``, ``auto_log_cpu``, ….

    Raises:
        ConfigurationError: trackio is not installed.

    Example:
        >>> from trainer_kit import Trainer
        >>> from trainer_kit.loggers import TrackioLogger
        >>> logger = TrackioLogger(project="digits", name="baseline")
        >>> trainer = Trainer(logger=logger, max_epochs=3)
        >>> logger.name, logger.version
        ('digits', None)
    """

    requires = "trackio>=0.30"
    module = "trackio"
    extra = "trackio"

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        save_dir: str | os.PathLike[str] = ".",
        resume: bool = False,
        prefix: str = "",
        log_model: Literal["all"] | bool = False,
        run: TrackioRun | None = None,
        **kwargs: object,
    ) -> None:
        # Without `resume` a name is no id: the run of that name must be a new one.
        id = name if resume else None
        if run is not None:
            id = run.name
        super().__init__(
            name=project,
            save_dir=save_dir,
            id=id,
            prefix=prefix,
            log_model=log_model,
            run=run,
        )
        self._run_name = name
        self._options = kwargs
        self._config: dict[str, Json] = {}
        # whether Trackio has values of this run, and with them its configuration
        self._wrote = False

    def _begin(self, id: str | None) -> tuple[TrackioRun, str]:
        import trackio

        self._wrote = False
        name = self._run_name
        resume = "never"
        if id is not None:
            name = id
            resume = "allow"
        run: TrackioRun = trackio.init(
            project=self._name,
            name=name,
            config=dict(self._config),
            resume=resume,
            **self._options,
        )
        return run, str(run.name)

    def _end(self, run: TrackioRun, status: str) -> None:
        run.finish()

    def _write_metrics(
        self, run: TrackioRun, values: Mapping[str, float], step: int
    ) -> None:
        self._log(run, dict(values), step)

    def _write_params(self, run: TrackioRun, params: Mapping[str, Json]) -> None:
        # Trackio reserves names with a leading underscore.
        for name, value in params.items():
            self._config[name.lstrip("_") or "_"] = value
        # Trackio keeps the configuration with the first values after its `init`: the next write calls `init` again.
        if self._wrote and self._owned:
            self._close("success")
        else:
            run.config.update(self._config)

    def _write_file(self, run: TrackioRun, path: Path, name: str) -> None:
        # Trackio refuses every other character in the name of an artifact.
        artifact_name = re.sub(r"[^A-Za-z0-9._-]", "-", name)
        run.log_artifact(path, name=artifact_name)

    def _write_image(
        self,
        run: TrackioRun,
        key: str,
        image: Image,
        step: int,
        index: int,
        caption: str | None,
    ) -> None:
        import trackio

        picture = trackio.Image(image, caption=caption)
        self._log(run, {numbered_key(key, index): picture}, step)

    def _write_text(self, run: TrackioRun, key: str, text: str, step: int) -> None:
        import trackio

        self._log(run, {key: trackio.Markdown(text)}, step)

    def _write_histogram(
        self, run: TrackioRun, key: str, values: Values, bins: int, step: int
    ) -> None:
        import trackio

        self._log(run, {key: trackio.Histogram(values, num_bins=bins)}, step)

    def _write_table(
        self, run: TrackioRun, key: str, columns: list[str], rows: TableRows, step: int
    ) -> None:
        import trackio

        self._log(run, {key: trackio.Table(columns=columns, data=rows)}, step)

    def _log(self, run: TrackioRun, values: dict[str, object], step: int) -> None:
        self._wrote = True
        run.log(values, step=step)
