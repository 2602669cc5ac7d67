"""Comet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Protocol, final

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.loggers.layout import Json
from trainer_kit.loggers.media import Values, numbered_key
from trainer_kit.loggers.run_logger import RunLogger

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["CometExperiment", "CometLogger"]

_FORMER: Final = {
    "project_name": "project=",
    "experiment_name": "name=",
    "offline": "online=False",
    "rest_api_key": "api_key=",
}
"""Arguments of Lightning's former `CometLogger`, with their replacements."""


class CometExperiment(Protocol):
    """The part of ``comet_ml.CometExperiment`` that `CometLogger` calls."""

    def get_key(self) -> str:
        """The id of the experiment."""

    def log_metrics(self, dic: dict[str, float], *, step: int) -> object:
        """Write numbers."""

    def log_parameters(
        self, parameters: dict[str, Json], *, nested_support: bool
    ) -> object:
        """Write hyperparameters; with ``nested_support`` nested names are joined."""

    def log_other(self, key: str, value: str) -> object:
        """Write a text about the run."""

    def log_asset(self, file_data: str, file_name: str) -> object:
        """Upload a file."""

    def log_image(
        self,
        image_data: Image,
        name: str,
        *,
        step: int,
        metadata: dict[str, int | str],
    ) -> object:
        """Write a picture."""

    def log_text(self, text: str, *, step: int, metadata: dict[str, str]) -> object:
        """Write text."""

    def log_histogram_3d(self, values: Values, name: str, step: int) -> object:
        """Write the distribution of numbers."""

    def flush(self) -> object:
        """Send all buffered values."""

    def end(self) -> object:
        """End the experiment; blocks until everything is sent."""


@final
class CometLogger(RunLogger[CometExperiment]):
    """Log to Comet, or to an archive for ``comet upload`` with ``online=False``.

    The experiment stays open between ``fit``, ``validate`` and ``test``, and ends with the process. An offline
    experiment that is resumed in another process writes a second archive with the same key.

    Args:
        api_key: None for ``COMET_API_KEY`` or ``~/.comet.config``.
        workspace: None for the default one.
        project: None for Comet's "Uncategorized".
        experiment_key: the key of an experiment to continue, or of a new one: 32 to 50 letters and digits.
        mode: ``"get_or_create"``, ``"get"`` or ``"create"``, as in ``comet_ml.start``.
        online: False writes an archive to ``offline_directory``.
        prefix: the start of metric names, followed by ``-``.
        save_dir: where archives and other local files go.
        log_model: upload checkpoints: ``"all"`` when they are saved, True those that still exist at the end.
        experiment: a Comet experiment to log to; the caller ends it.
        **kwargs: for ``comet_ml.ExperimentConfig``: ``name``, ``tags``, ``offline_directory``, ``log_code``, ….

    Raises:
        ConfigurationError: comet_ml is not installed, or an argument has been renamed.

    Example:
        >>> from trainer_kit import Trainer
        >>> from trainer_kit.loggers import CometLogger
        >>> logger = CometLogger(project="digits", online=False, tags=["baseline"])
        >>> trainer = Trainer(logger=logger, max_epochs=3)
        >>> logger.name, logger.version
        ('digits', None)
    """

    requires = "comet-ml>=3.44.4"
    module = "comet_ml"
    extra = "comet"
    stays_open = True

    def __init__(
        self,
        *,
        api_key: str | None = None,
        workspace: str | None = None,
        project: str | None = None,
        experiment_key: str | None = None,
        mode: Literal["get_or_create", "get", "create"] | None = None,
        online: bool | None = None,
        prefix: str | None = None,
        save_dir: str | os.PathLike[str] = ".",
        log_model: Literal["all"] | bool = False,
        experiment: CometExperiment | None = None,
        **kwargs: object,
    ) -> None:
        for name in _FORMER.keys() & kwargs.keys():
            raise ConfigurationError(
                f"CometLogger has no argument {name}",
                found=f"{name}={kwargs[name]!r}",
                fix=f"pass {_FORMER[name]}",
            )
        id = experiment_key
        if experiment is not None:
            id = experiment.get_key()
        super().__init__(
            name=project,
            save_dir=save_dir,
            id=id,
            prefix=prefix,
            log_model=log_model,
            run=experiment,
        )
        # `comet_ml.start` looks these up itself where they are None: in the environment and in the configuration file.
        self._options = {
            "api_key": api_key,
            "workspace": workspace,
            "project_name": project,
            "online": online,
        }
        self._mode = mode
        # Archives go beside the user's other files, not to Comet's own default.
        self._config = {"offline_directory": self._save_dir, **kwargs}

    def _begin(self, id: str | None) -> tuple[CometExperiment, str]:
        from comet_ml import ExperimentConfig, start

        config = ExperimentConfig(**self._config)
        run: CometExperiment = start(
            experiment_key=id,
            mode=self._mode,
            experiment_config=config,
            **self._options,
        )
        return run, str(run.get_key())

    def _end(self, run: CometExperiment, status: str) -> None:
        run.log_other("status", status)
        run.end()

    def _flush(self, run: CometExperiment) -> None:
        run.flush()

    def _write_metrics(
        self, run: CometExperiment, values: Mapping[str, float], step: int
    ) -> None:
        run.log_metrics(dict(values), step=step)

    def _write_params(self, run: CometExperiment, params: Mapping[str, Json]) -> None:
        run.log_parameters(dict(params), nested_support=True)

    def _write_file(self, run: CometExperiment, path: Path, name: str) -> None:
        if not path.is_dir():
            run.log_asset(str(path), file_name=name)
            return
        # File by file, so that each keeps its path below `name`.
        for file in sorted(path.rglob("*")):
            if file.is_file():
                relative = file.relative_to(path).as_posix()
                run.log_asset(str(file), file_name=f"{name}/{relative}")

    def _write_image(
        self,
        run: CometExperiment,
        key: str,
        image: Image,
        step: int,
        index: int,
        caption: str | None,
    ) -> None:
        metadata: dict[str, int | str] = {"index": index}
        if caption is not None:
            metadata["caption"] = caption
        name = numbered_key(key, index, separator="-")
        run.log_image(image, name=name, step=step, metadata=metadata)

    def _write_text(self, run: CometExperiment, key: str, text: str, step: int) -> None:
        run.log_text(text, step=step, metadata={"key": key})

    def _write_histogram(
        self, run: CometExperiment, key: str, values: Values, bins: int, step: int
    ) -> None:
        run.log_histogram_3d(values, name=key, step=step)
