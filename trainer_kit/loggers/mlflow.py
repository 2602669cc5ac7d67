"""MLflow."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Protocol, final

from trainer_kit.core.types import Keywords
from trainer_kit.loggers.layout import DEFAULT_NAME, Json, flatten
from trainer_kit.loggers.run_logger import RunLogger

__all__ = ["MLFlowClient", "MLFlowLogger"]

_STATUS: Final = {"success": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
# MLflow's limits; a server refuses the whole call above one of them.
_MAX_PARAMS: Final = 100
"""The most hyperparameters in one call."""
_MAX_METRICS: Final = 1000
"""The most metrics in one call."""
_MAX_LENGTH: Final = 6000
"""The most characters of a hyperparameter's value."""


class _RunInfo(Protocol):
    run_id: str
    experiment_id: str


class _RunData(Protocol):
    params: Mapping[str, str]


class _MLFlowRun(Protocol):
    """The part of ``mlflow.entities.Run`` that `MLFlowLogger` reads."""

    info: _RunInfo
    data: _RunData


class _MLFlowExperiment(Protocol):
    experiment_id: str


class MLFlowClient(Protocol):
    """The part of ``mlflow.MlflowClient`` that `MLFlowLogger` calls."""

    def get_experiment_by_name(self, name: str) -> _MLFlowExperiment | None: ...

    def create_experiment(self, name: str, artifact_location: str | None) -> str: ...

    def create_run(
        self, experiment_id: str, *, tags: object, run_name: str | None
    ) -> _MLFlowRun: ...

    def get_run(self, run_id: str) -> _MLFlowRun: ...

    def update_run(self, run_id: str, status: str) -> object: ...

    def set_terminated(self, run_id: str, status: str) -> object: ...

    def log_batch(
        self,
        run_id: str,
        *,
        metrics: Sequence[object] = (),
        params: Sequence[object] = (),
        synchronous: bool | None = None,
    ) -> object: ...

    def log_artifact(
        self, run_id: str, local_path: str, artifact_path: str | None
    ) -> object: ...

    def log_artifacts(
        self, run_id: str, local_dir: str, artifact_path: str
    ) -> object: ...


@final
class MLFlowLogger(RunLogger[MLFlowClient]):
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
        >>> from trainer_kit.loggers import MLFlowLogger
        >>> logger = MLFlowLogger("digits", tracking_uri="http://127.0.0.1:5000")
        >>> trainer = Trainer(logger=logger, max_epochs=3)
        >>> logger.name, logger.version
        ('digits', None)
    """

    requires = "mlflow>=2.8"
    module = "mlflow"
    extra = "mlflow"

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
        self._run_name = run_name
        self._tags = dict(tags or {})
        self._artifacts = artifact_location
        self._checkpoint_prefix = checkpoint_path_prefix
        # Passed only if the user chose; otherwise MLflow's own setting decides.
        self._options: Keywords = {}
        if synchronous is not None:
            self._options["synchronous"] = synchronous
        # names that a warning was printed for
        self._renamed: set[str] = set()

    @property
    def run_id(self) -> str:
        """The id of the run; the first access begins it."""
        self._client()
        return str(self._id)

    @property
    def experiment_id(self) -> str:
        """The id of the experiment; the first access begins the run."""
        client = self._client()
        return str(client.get_run(str(self._id)).info.experiment_id)

    def _client(self) -> MLFlowClient:
        """The client of the run, which has begun."""
        client: MLFlowClient = self.experiment
        return client

    def _begin(self, id: str | None) -> tuple[MLFlowClient, str]:
        from mlflow import MlflowClient
        from mlflow.tracking.context.registry import resolve_tags

        artifacts = self._artifacts
        uri = self._uri
        if uri is None:
            # Absolute: a program that changes its working directory keeps writing to the same file.
            directory = Path(self._save_dir).absolute()
            directory.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{directory / 'mlflow.db'}"
            artifacts = artifacts or (directory / "mlartifacts").as_uri()
        # A client with its own address: `mlflow.set_tracking_uri` would change that of the user's other calls too.
        client: MLFlowClient = MlflowClient(tracking_uri=uri)
        if id is not None:
            client.update_run(id, status="RUNNING")
            return client, id
        existing = client.get_experiment_by_name(self._name)
        if existing is None:
            experiment_id = client.create_experiment(self._name, artifacts)
        else:
            experiment_id = existing.experiment_id
        # The client does not add the tags of Git and of the source file, which `mlflow.start_run` does.
        tags = resolve_tags(self._tags)
        run = client.create_run(experiment_id, tags=tags, run_name=self._run_name)
        return client, str(run.info.run_id)

    def _end(self, run: MLFlowClient, status: str) -> None:
        run.set_terminated(str(self._id), _STATUS.get(status, "FAILED"))

    def _write_metrics(
        self, run: MLFlowClient, values: Mapping[str, float], step: int
    ) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        rows = [
            Metric(self._allowed(name), value, now, step)
            for name, value in values.items()
        ]
        for start in range(0, len(rows), _MAX_METRICS):
            batch = rows[start : start + _MAX_METRICS]
            run.log_batch(str(self._id), metrics=batch, **self._options)

    def _write_params(self, run: MLFlowClient, params: Mapping[str, Json]) -> None:
        from mlflow.entities import Param

        # MLflow refuses the whole batch if one value differs from that of a resumed run, so those are left out.
        old = run.get_run(str(self._id)).data.params
        new = {
            self._allowed(name): str(value)[:_MAX_LENGTH]
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
        for start in range(0, len(rows), _MAX_PARAMS):
            batch = rows[start : start + _MAX_PARAMS]
            # Without `_options`: the next call reads these back from the server.
            run.log_batch(str(self._id), params=batch)

    def _write_file(self, run: MLFlowClient, path: Path, name: str) -> None:
        id = str(self._id)
        if name.startswith("checkpoints/") and self._checkpoint_prefix:
            name = f"{self._checkpoint_prefix.rstrip('/')}/{name}"
        parent, _, last = name.rpartition("/")
        if path.is_dir():
            run.log_artifacts(id, str(path), artifact_path=name)
        elif path.name == last:
            run.log_artifact(id, str(path), artifact_path=parent or None)
        else:
            # MLflow keeps a file's own name, so another name needs a copy.
            with tempfile.TemporaryDirectory() as directory:
                copy = shutil.copy(path, Path(directory) / last)
                run.log_artifact(id, str(copy), artifact_path=parent or None)

    def _allowed(self, name: str) -> str:
        """The name with an underscore for each character that MLflow refuses; warns once for each name."""
        allowed = re.sub(r"[^A-Za-z0-9_/. \-]", "_", name)
        if allowed != name and name not in self._renamed:
            self._renamed.add(name)
            warnings.warn(
                f"MLflow does not allow the name {name!r}: it is logged as {allowed!r}",
                stacklevel=2,
            )
        return allowed
