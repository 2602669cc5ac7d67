"""DVCLive."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, final

from trainer_kit.loggers.media import path_part
from trainer_kit.loggers.run_logger import RunLogger, copied

__all__ = ["DVCLiveLogger"]


@final
class DVCLiveLogger(RunLogger):
    """Log with DVCLive: plots, parameters and metrics as files, which Git and DVC version.

    As usual with DVCLive, a new run replaces the files of the last one in ``dir``; a resumed run, and ``validate`` and
    ``test`` after a ``fit``, append to them. Pictures and artifacts are files in ``dir``;
    ``logger.experiment.log_artifact`` tracks one of them with DVC.

    Args:
        run_name: the experiment's name for DVC.
        prefix: the start of metric names, followed by ``-``.
        log_model: copy checkpoints to ``dir/artifacts``: ``"all"`` when they are saved, True those that still exist at
            the end.
        experiment: a ``dvclive.Live`` to log to; the caller ends it.
        save_dir: the directory that contains ``dir``.
        **kwargs: for ``Live``: ``dir``, ``resume``, ``report``, ``save_dvc_exp``, ``dvcyaml``, ….

    Raises:
        ConfigurationError: dvclive is not installed.
    """

    requires, module, extra = "dvclive>=3", "dvclive", "dvclive"

    def __init__(
        self,
        run_name: str | None = None,
        prefix: str = "",
        log_model: Literal["all"] | bool = False,
        experiment: Any = None,
        save_dir: str | os.PathLike[str] = ".",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            name=run_name or "dvclive",
            save_dir=save_dir,
            prefix=prefix,
            log_model=log_model,
            run=experiment,
        )
        directory = (
            os.path.join(self._save_dir, "dvclive") if save_dir != "." else "dvclive"
        )
        self._live = {
            "dir": directory,
            **({"exp_name": run_name} if run_name else {}),
            **kwargs,
        }

    def _begin(self, id: str | None) -> tuple[Any, str]:
        from dvclive import Live

        live = Live(**(self._live if id is None else {**self._live, "resume": True}))
        return live, path_part(self._name).replace("/", "-").replace(" ", "-")

    def _end(self, run: Any, status: str) -> None:
        run.end()

    def _flush(self, run: Any) -> None:
        run.sync()

    def _write_metrics(self, run: Any, values: Mapping[str, float], step: int) -> None:
        run.step = step
        for name, value in values.items():
            run.log_metric(name, value)
        run.make_summary()

    def _write_params(self, run: Any, params: Mapping[str, Any]) -> None:
        run.log_params(dict(params))

    def _write_file(self, run: Any, path: Path, name: str) -> None:
        copied(path, Path(run.artifacts_dir) / name)

    def _write_image(
        self, run: Any, key: str, image: Any, step: int, index: int, caption: str | None
    ) -> None:
        run.step = step
        run.log_image(f"{path_part(key)}/{step:08d}-{index}.png", image)
