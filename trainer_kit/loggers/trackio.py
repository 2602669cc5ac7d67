"""Trackio."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, final

from trainer_kit.loggers.run_logger import RunLogger

__all__ = ["TrackioLogger"]


@final
class TrackioLogger(RunLogger):
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
    """

    requires, module, extra = "trackio>=0.30", "trackio", "trackio"

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        save_dir: str | os.PathLike[str] = ".",
        resume: bool = False,
        prefix: str = "",
        log_model: Literal["all"] | bool = False,
        run: Any = None,
        **kwargs: Any,
    ) -> None:
        id = run.name if run is not None else name if resume else None
        super().__init__(
            name=project,
            save_dir=save_dir,
            id=id,
            prefix=prefix,
            log_model=log_model,
            run=run,
        )
        self._run_name, self._init = name, kwargs
        self._config: dict[str, Any] = {}
        self._wrote = False

    def _begin(self, id: str | None) -> tuple[Any, str]:
        import trackio

        self._wrote = False
        name, resume = (self._run_name, "never") if id is None else (id, "allow")
        run = trackio.init(
            project=self._name,
            name=name,
            config=dict(self._config),
            resume=resume,
            **self._init,
        )
        return run, str(run.name)

    def _end(self, run: Any, status: str) -> None:
        run.finish()

    def _write_metrics(self, run: Any, values: Mapping[str, float], step: int) -> None:
        self._log(run, dict(values), step)

    def _write_params(self, run: Any, params: Mapping[str, Any]) -> None:
        # Trackio reserves names with a leading underscore.
        self._config.update(
            {name.lstrip("_") or "_": value for name, value in params.items()}
        )
        if self._wrote and self._owned:
            self._close(
                "success"
            )  # Trackio keeps the configuration with the first values after its `init`
        else:
            run.config.update(self._config)

    def _write_file(self, run: Any, path: Path, name: str) -> None:
        run.log_artifact(path, name=re.sub(r"[^A-Za-z0-9._-]", "-", name))

    def _write_image(
        self, run: Any, key: str, image: Any, step: int, index: int, caption: str | None
    ) -> None:
        import trackio

        self._log(
            run,
            {f"{key}/{index}" if index else key: trackio.Image(image, caption=caption)},
            step,
        )

    def _write_text(self, run: Any, key: str, text: str, step: int) -> None:
        import trackio

        self._log(run, {key: trackio.Markdown(text)}, step)

    def _write_histogram(
        self, run: Any, key: str, values: Any, bins: int, step: int
    ) -> None:
        import trackio

        self._log(run, {key: trackio.Histogram(values, num_bins=bins)}, step)

    def _write_table(
        self, run: Any, key: str, columns: list[str], rows: list[list[Any]], step: int
    ) -> None:
        import trackio

        self._log(run, {key: trackio.Table(columns=columns, data=rows)}, step)

    def _log(self, run: Any, values: dict[str, Any], step: int) -> None:
        self._wrote = True
        run.log(values, step=step)
