"""Comet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, final

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.loggers.run_logger import RunLogger

__all__ = ["CometLogger"]

_FORMER: Final = {
    "project_name": "project=",
    "experiment_name": "name=",
    "offline": "online=False",
    "rest_api_key": "api_key=",
}
"""Arguments of Lightning's former `CometLogger`, with their replacements."""


@final
class CometLogger(RunLogger):
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
    """

    requires, module, extra = "comet-ml>=3.44.4", "comet_ml", "comet"
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
        experiment: Any = None,
        **kwargs: Any,
    ) -> None:
        for name in _FORMER.keys() & kwargs.keys():
            raise ConfigurationError(
                f"CometLogger has no argument {name}",
                found=f"{name}={kwargs[name]!r}",
                fix=f"pass {_FORMER[name]}",
            )
        id = experiment_key if experiment is None else experiment.get_key()
        super().__init__(
            name=project,
            save_dir=save_dir,
            id=id,
            prefix=prefix,
            log_model=log_model,
            run=experiment,
        )
        self._options = {
            "api_key": api_key,
            "workspace": workspace,
            "project_name": project,
            "online": online,
        }
        self._mode, self._config = mode, {"offline_directory": self._save_dir, **kwargs}

    def _begin(self, id: str | None) -> tuple[Any, str]:
        from comet_ml import ExperimentConfig, start

        config = ExperimentConfig(**self._config)
        run = start(
            experiment_key=id,
            mode=self._mode,
            experiment_config=config,
            **self._options,
        )
        return run, str(run.get_key())

    def _end(self, run: Any, status: str) -> None:
        run.log_other("status", status)
        run.end()

    def _flush(self, run: Any) -> None:
        run.flush()

    def _write_metrics(self, run: Any, values: Mapping[str, float], step: int) -> None:
        run.log_metrics(dict(values), step=step)

    def _write_params(self, run: Any, params: Mapping[str, Any]) -> None:
        run.log_parameters(dict(params), nested_support=True)

    def _write_file(self, run: Any, path: Path, name: str) -> None:
        if not path.is_dir():
            run.log_asset(str(path), file_name=name)
            return
        for file in sorted(path.rglob("*")):
            if file.is_file():
                run.log_asset(
                    str(file), file_name=f"{name}/{file.relative_to(path).as_posix()}"
                )

    def _write_image(
        self, run: Any, key: str, image: Any, step: int, index: int, caption: str | None
    ) -> None:
        metadata = (
            {"index": index}
            if caption is None
            else {"index": index, "caption": caption}
        )
        run.log_image(
            image, name=f"{key}-{index}" if index else key, step=step, metadata=metadata
        )

    def _write_text(self, run: Any, key: str, text: str, step: int) -> None:
        run.log_text(text, step=step, metadata={"key": key})

    def _write_histogram(
        self, run: Any, key: str, values: Any, bins: int, step: int
    ) -> None:
        run.log_histogram_3d(values, name=key, step=step)
