"""DVCLive."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, final

from trainer_kit.core.types import Keywords
from trainer_kit.loggers.layout import Json
from trainer_kit.loggers.media import path_part
from trainer_kit.loggers.run_logger import RunLogger, copied

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["DVCLive", "DVCLiveLogger"]


class DVCLive(Protocol):
    """The part of ``dvclive.Live`` that `DVCLiveLogger` calls."""

    step: int

    @property
    def artifacts_dir(self) -> str:
        """The directory of copied files."""

    def log_metric(self, name: str, val: float) -> object:
        """Append a number of the current step to its plot."""

    def log_params(self, params: dict[str, Json]) -> object:
        """Write hyperparameters beside those of earlier calls."""

    def log_image(self, name: str, val: Image) -> object:
        """Write a picture to a file."""

    def make_summary(self) -> object:
        """Write the newest value of each metric to a file."""

    def sync(self) -> object:
        """Write all files."""

    def end(self) -> object:
        """Write all files and end the run."""


@final
class DVCLiveLogger(RunLogger[DVCLive]):
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

    Example:
        >>> from trainer_kit import Trainer
        >>> from trainer_kit.loggers import DVCLiveLogger
        >>> logger = DVCLiveLogger(run_name="baseline", dir="metrics", report="md")
        >>> trainer = Trainer(logger=logger, max_epochs=3)
        >>> logger.name
        'baseline'
    """

    requires = "dvclive>=3"
    module = "dvclive"
    extra = "dvclive"

    def __init__(
        self,
        run_name: str | None = None,
        prefix: str = "",
        log_model: Literal["all"] | bool = False,
        experiment: DVCLive | None = None,
        save_dir: str | os.PathLike[str] = ".",
        **kwargs: object,
    ) -> None:
        super().__init__(
            name=run_name or "dvclive",
            save_dir=save_dir,
            prefix=prefix,
            log_model=log_model,
            run=experiment,
        )
        # Without `save_dir`, the directory of DVCLive's own default.
        directory = "dvclive"
        if save_dir != ".":
            directory = os.path.join(self._save_dir, "dvclive")
        self._options: Keywords = {"dir": directory}
        if run_name:
            self._options["exp_name"] = run_name
        self._options.update(kwargs)

    def _begin(self, id: str | None) -> tuple[DVCLive, str]:
        from dvclive import Live

        options = dict(self._options)
        # A new `Live` deletes the files of the last run in its directory.
        if id is not None:
            options["resume"] = True
        live = Live(**options)
        # DVCLive has no ids: any id that a checkpoint brings back means to append.
        return live, path_part(self._name).replace("/", "-").replace(" ", "-")

    def _end(self, run: DVCLive, status: str) -> None:
        run.end()

    def _flush(self, run: DVCLive) -> None:
        run.sync()

    def _write_metrics(
        self, run: DVCLive, values: Mapping[str, float], step: int
    ) -> None:
        # Not `next_step`: it counts by itself, and writes the report at every call.
        run.step = step
        for name, value in values.items():
            run.log_metric(name, value)
        run.make_summary()

    def _write_params(self, run: DVCLive, params: Mapping[str, Json]) -> None:
        run.log_params(dict(params))

    def _write_file(self, run: DVCLive, path: Path, name: str) -> None:
        copied(path, Path(run.artifacts_dir) / name)

    def _write_image(
        self,
        run: DVCLive,
        key: str,
        image: Image,
        step: int,
        index: int,
        caption: str | None,
    ) -> None:
        run.step = step
        run.log_image(f"{path_part(key)}/{step:08d}-{index}.png", image)
