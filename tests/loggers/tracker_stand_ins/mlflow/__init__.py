"""A stand-in: the part of MLflow's client that the logger calls, with its signatures, in an SQLite file."""

import shutil
import sqlite3
import uuid
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlparse

from mlflow.entities import Metric, Param  # noqa: F401


class MlflowClient:
    def __init__(self, tracking_uri=None, registry_uri=None):
        assert tracking_uri.startswith("sqlite:///")
        self._db = sqlite3.connect(
            tracking_uri.removeprefix("sqlite:///"),
            isolation_level=None,
            check_same_thread=False,
        )
        for table in (
            "experiments(name, place)",
            "runs(run_uuid, experiment_id, name, status)",
            "tags(run_uuid, key, value)",
            "metrics(run_uuid, key, step, value, is_nan)",
            "params(run_uuid, key, value)",
        ):
            self._db.execute(f"CREATE TABLE IF NOT EXISTS {table}")

    def get_experiment_by_name(self, name):
        found = self._db.execute(
            "SELECT rowid, place FROM experiments WHERE name = ?", [name]
        ).fetchone()
        return found and SimpleNamespace(
            experiment_id=str(found[0]), name=name, artifact_location=found[1]
        )

    def create_experiment(self, name, artifact_location=None, tags=None):
        return str(
            self._db.execute(
                "INSERT INTO experiments VALUES (?, ?)", [name, artifact_location]
            ).lastrowid
        )

    def create_run(self, experiment_id, start_time=None, tags=None, run_name=None):
        id = uuid.uuid4().hex
        self._db.execute(
            "INSERT INTO runs VALUES (?, ?, ?, 'RUNNING')",
            [id, experiment_id, run_name],
        )
        for key, value in (tags or {}).items():
            self._db.execute("INSERT INTO tags VALUES (?, ?, ?)", [id, key, value])
        return self.get_run(id)

    def get_run(self, run_id):
        experiment, name, status = self._db.execute(
            "SELECT experiment_id, name, status FROM runs WHERE run_uuid = ?", [run_id]
        ).fetchone()
        params = dict(
            self._db.execute(
                "SELECT key, value FROM params WHERE run_uuid = ?", [run_id]
            )
        )
        info = SimpleNamespace(
            run_id=run_id, experiment_id=experiment, run_name=name, status=status
        )
        return SimpleNamespace(info=info, data=SimpleNamespace(params=params))

    def update_run(self, run_id, status=None, name=None):
        self._db.execute(
            "UPDATE runs SET status = ? WHERE run_uuid = ?", [status, run_id]
        )

    def set_terminated(self, run_id, status=None, end_time=None):
        self.update_run(run_id, status or "FINISHED")

    def log_batch(self, run_id, metrics=(), params=(), tags=(), synchronous=None):
        assert len(metrics) <= 1000
        assert len(params) <= 100
        for one in metrics:
            nan = one.value != one.value
            row = [run_id, one.key, one.step, 0.0 if nan else float(one.value), nan]
            self._db.execute("INSERT INTO metrics VALUES (?, ?, ?, ?, ?)", row)
        old = self.get_run(run_id).data.params
        for one in params:
            assert old.get(one.key, one.value) == one.value, (
                "Changing param values is not allowed."
            )
            self._db.execute(
                "INSERT INTO params VALUES (?, ?, ?)", [run_id, one.key, one.value]
            )

    def _place(self, run_id, artifact_path):
        experiment = self.get_run(run_id).info.experiment_id
        (place,) = self._db.execute(
            "SELECT place FROM experiments WHERE rowid = ?", [experiment]
        ).fetchone()
        return (
            Path(unquote(urlparse(place).path))
            / run_id
            / "artifacts"
            / (artifact_path or "")
        )

    def log_artifact(self, run_id, local_path, artifact_path=None):
        place = self._place(run_id, artifact_path)
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(local_path, place)

    def log_artifacts(self, run_id, local_dir, artifact_path=None):
        shutil.copytree(
            local_dir, self._place(run_id, artifact_path), dirs_exist_ok=True
        )
