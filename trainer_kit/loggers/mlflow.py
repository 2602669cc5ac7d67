"""MLflow."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, final

from trainer_kit.loggers.layout import DEFAULT_NAME, flatten
from trainer_kit.loggers.run_logger import RunLogger

__all__ = ["MLFlowLogger"]

_STATUS: Final = {"success": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
_PARAMS, _METRICS, _LENGTH = (
    100,
    1000,
    6000,
)  # MLflow's limits: values per call, and length of a hyperparameter


@final
class MLFlowLogger(RunLogger):
    """Log to MLflow: a server, or a database file.

    `experiment` is an ``MlflowClient``; its methods take `run_id`. After ``fit`` the run is ``FINISHED``; ``validate``,
    ``test`` and a resumed ``fit`` open the same run again.

    Args:
        experiment_name: the experiment; created if it does not exist.
        run_name: the name of a new run; None lets MLflow choose one.
        tracking_uri: None for the environment's ``MLFLOW_TRACKING_URI``, else ``sqlite:///<save_dir>/mlflow.db``:
            MLflow no longer writes to a bare directory.
        tags: the tags of a new run.
        save_dir: the directory of the database file and of ``mlartifacts``, when no server is given.
        log_model: upload checkpoints: ``"all"`` when they are saved, True those that still exist at the end.
        checkpoint_path_prefix: a directory among the run's artifacts, for checkpoints.
        prefix: the start of metric names, followed by ``-``.
        artifact_location: where a new experiment keeps files.
        run_id: the id of a run to continue.
        synchronous: False: do not wait for the server.

    Raises:
        ConfigurationError: mlflow is not installed.

    Example:
        >>> from trainer_kit import Trainer
        >>> from trainer_kit.loggers import MLFlowLogger  # doctest: +SKIP
        >>> Trainer(logger=MLFlowLogger("digits", tracking_uri="http://127.0.0.1:5000"))  # doctest: +SKIP
    """

    requires, module, extra = "mlflow>=2.8", "mlflow", "mlflow"

    def __init__(
        self,
        experiment_name: str = DEFAULT_NAME,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, Any] | None = None,
        save_dir: str | os.PathLike[str] = ".",
        log_model: Literal["all"] | bool = False,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = None,
        checkpoint_path_prefix: str = "",
    ) -> None:
        super().__init__(
            name=experiment_name,
            save_dir=save_dir,
            id=run_id,
            prefix=prefix,
            log_model=log_model,
        )
        self._uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._run_name, self._tags, self._artifacts = (
            run_name,
            dict(tags or {}),
            artifact_location,
        )
        self._checkpoint_prefix = checkpoint_path_prefix
        self._options = {} if synchronous is None else {"synchronous": synchronous}
        self._renamed: set[str] = set()

    @property
    def run_id(self) -> str:
        """The id of the run; the first access begins it."""
        return str(self.experiment and self._id)

    @property
    def experiment_id(self) -> str:
        """The id of the experiment; the first access begins the run."""
        return str(self.experiment.get_run(self._id).info.experiment_id)

    def _begin(self, id: str | None) -> tuple[Any, str]:
        from mlflow import MlflowClient
        from mlflow.tracking.context.registry import resolve_tags

        artifacts, uri = self._artifacts, self._uri
        if uri is None:
            directory = Path(self._save_dir).absolute()
            directory.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{directory / 'mlflow.db'}"
            artifacts = artifacts or (directory / "mlartifacts").as_uri()
        client = MlflowClient(tracking_uri=uri)
        if id is not None:
            client.update_run(id, status="RUNNING")
            return client, id
        existing = client.get_experiment_by_name(self._name)
        experiment = (
            client.create_experiment(self._name, artifacts)
            if existing is None
            else existing.experiment_id
        )
        run = client.create_run(
            experiment, tags=resolve_tags(self._tags), run_name=self._run_name
        )
        return client, str(run.info.run_id)

    def _end(self, run: Any, status: str) -> None:
        run.set_terminated(self._id, _STATUS.get(status, "FAILED"))

    def _write_metrics(self, run: Any, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        rows = [
            Metric(self._allowed(name), value, now, step)
            for name, value in values.items()
        ]
        for start in range(0, len(rows), _METRICS):
            run.log_batch(
                self._id, metrics=rows[start : start + _METRICS], **self._options
            )

    def _write_params(self, run: Any, params: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        old = run.get_run(self._id).data.params
        new = {
            self._allowed(name): str(value)[:_LENGTH]
            for name, value in flatten(params).items()
        }
        changed = sorted(
            name for name, value in new.items() if old.get(name, value) != value
        )
        if changed:
            warnings.warn(
                f"MLflow keeps the first value of a hyperparameter: {', '.join(changed)} changed in run {self._id}",
                stacklevel=2,
            )
        rows = [Param(name, value) for name, value in new.items() if name not in old]
        for start in range(0, len(rows), _PARAMS):
            run.log_batch(self._id, params=rows[start : start + _PARAMS])

    def _write_file(self, run: Any, path: Path, name: str) -> None:
        if name.startswith("checkpoints/") and self._checkpoint_prefix:
            name = f"{self._checkpoint_prefix.rstrip('/')}/{name}"
        parent, _, last = name.rpartition("/")
        if path.is_dir():
            run.log_artifacts(self._id, str(path), artifact_path=name)
        elif path.name == last:
            run.log_artifact(self._id, str(path), artifact_path=parent or None)
        else:  # MLflow keeps a file's own name
            with tempfile.TemporaryDirectory() as directory:
                copy = shutil.copy(path, Path(directory) / last)
                run.log_artifact(self._id, str(copy), artifact_path=parent or None)

    def _allowed(self, name: str) -> str:
        allowed = re.sub(r"[^A-Za-z0-9_/. \-]", "_", name)
        if allowed != name and name not in self._renamed:
            self._renamed.add(name)
            warnings.warn(
                f"MLflow does not allow the name {name!r}: it is logged as {allowed!r}",
                stacklevel=2,
            )
        return allowed
