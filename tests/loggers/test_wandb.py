"""Weights & Biases, offline, in a process of its own: what the files hold is read back."""

from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import trainer_kit
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.loggers import WandbLogger

pytest.importorskip("wandb")


class Log:
    """What one ``.wandb`` file holds: 7 bytes of header, then records in LevelDB's log format, blocks of 32 KiB."""

    def __init__(self, path: Path) -> None:
        from wandb.proto import wandb_internal_pb2

        self.config: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.metrics: list[Any] = []
        self.artifacts: list[Any] = []
        self.exit_code: int | None = None
        self.run: Any = None
        for data in self._records(path.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                self.run = record.run
                self._update(self.config, record.run.config.update)
            elif kind == "config":
                self._update(self.config, record.config.update)
            elif kind == "summary":
                self._update(self.summary, record.summary.update)
            elif kind == "history":
                self._update(row := {}, record.history.item)
                self.history.append(
                    {
                        name: value
                        for name, value in row.items()
                        if not name.startswith("_")
                    }
                )
            elif kind == "metric":
                self.metrics.append(record.metric)
            elif kind == "artifact":
                self.artifacts.append(record.artifact)
            elif (
                kind == "request"
                and record.request.WhichOneof("request_type") == "log_artifact"
            ):
                self.artifacts.append(record.request.log_artifact.artifact)
            elif kind == "exit":
                self.exit_code = record.exit.exit_code

    @staticmethod
    def _records(data: bytes):
        position, part = 7, b""
        while position + 7 <= len(data):
            left = 32768 - position % 32768
            if left < 7:
                position += left
                continue
            _, length, kind = struct.unpack_from("<IHB", data, position)
            body = data[position + 7 : position + 7 + length]
            position += 7 + length
            part = part + body if kind in (3, 4) else body
            if kind in (1, 4) and part:
                yield part

    @staticmethod
    def _update(into: dict[str, Any], items: Any) -> None:
        for item in items:
            into[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)


def run(tmp_path: Path, code: str) -> tuple[list[Log], dict[str, Any]]:
    """Run ``code``, which sets ``answer``, and read every file of wandb in the order of their runs."""
    program = textwrap.dedent(
        """
        import os, sys, json, warnings
        from pathlib import Path
        root = Path(sys.argv[1])
        warnings.simplefilter("error")
        environment = dict(os.environ)
        from trainer_kit.loggers import WandbLogger
        answer = {}
        """
    )
    program += textwrap.dedent(code)
    program += textwrap.dedent(
        """
        import wandb
        wandb.teardown()  # as wandb does at the end of a process
        warnings.simplefilter("ignore")
        assert dict(os.environ) == environment
        (root / "answer.json").write_text(json.dumps(answer))
        """
    )
    home = tmp_path / "home"
    home.mkdir()
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("WANDB_")
    }
    nowhere = dict.fromkeys(
        ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"
    )
    environment = {
        **clean,
        **nowhere,
        "HOME": str(home),
        "TMPDIR": str(home),
        "WANDB_SILENT": "true",
    }
    environment["PYTHONPATH"] = str(Path(trainer_kit.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
        cwd=home,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    logs = [
        Log(path)
        for path in sorted(
            tmp_path.rglob("*.wandb"), key=lambda path: path.stat().st_mtime_ns
        )
    ]
    return logs, json.loads((tmp_path / "answer.json").read_text())


def test_values_config_and_axis_come_back_from_the_file(tmp_path):
    logs, answer = run(
        tmp_path,
        """
        import torch
        logger = WandbLogger("first try", root / "made" / "here", offline=True, project="p", prefix="x", tags=["t"])
        assert not (root / "made").exists() and logger.version is None
        logger.log_hyperparams({"optim": {"lr": 0.5, "betas": (0.5, float("inf"))}, "act": torch.relu, "api_key": "k"})
        logger.log_hyperparams({"batch": 2}, {"score": 0.75})
        for step in (0, 10):
            logger.log_metrics({"loss": torch.tensor(1 / (step + 1)), "acc": 1}, step)
        logger.log_metrics({"free": 3.0})
        answer.update(version=logger.version, name=logger.name, save_dir=logger.save_dir)
        logger.save()
        logger.finalize("success")
        """,
    )
    (log,) = logs
    assert answer == {
        "version": log.run.run_id,
        "name": "p",
        "save_dir": str(tmp_path / "made" / "here"),
    }
    assert (log.run.display_name, log.run.project, list(log.run.tags)) == (
        "first try",
        "p",
        ["t"],
    )
    config = {name: value for name, value in log.config.items() if name != "_wandb"}
    expected = {
        "optim": {"lr": 0.5, "betas": [0.5, "Infinity"]},
        "act": "relu",
        "api_key": "***",
        "batch": 2,
    }
    assert config == expected
    assert log.history == [
        {"x-loss": 1.0, "x-acc": 1, "trainer/global_step": 0},
        {"x-loss": pytest.approx(1 / 11), "x-acc": 1, "trainer/global_step": 10},
        {"x-free": 3.0, "trainer/global_step": 10},
    ]
    assert log.summary["score"] == 0.75
    assert ("trainer/global_step", "") in {
        (metric.name, metric.step_metric) for metric in log.metrics
    }
    assert ("*", "trainer/global_step") in {
        (metric.glob_name, metric.step_metric) for metric in log.metrics
    }
    assert log.exit_code == 0


def test_logging_after_the_end_resumes_the_run(tmp_path):
    logs, answer = run(
        tmp_path,
        """
        logger = WandbLogger(save_dir=root, offline=True, id="mine")
        assert logger.version == "mine"
        logger.log_hyperparams({"lr": 0.5})
        logger.log_metrics({"loss": 1.0}, 0)
        logger.finalize("failed")
        logger.finalize("failed")
        logger.log_metrics({"val": 2.0}, 0)
        logger.finalize("interrupted")
        answer["version"] = logger.version
        """,
    )
    assert (
        [log.run.run_id for log in logs] == ["mine", "mine"] == [answer["version"]] * 2
    )
    assert [log.exit_code for log in logs] == [1, 255]
    assert [log.config["lr"] for log in logs] == [0.5, 0.5]
    assert [log.history[0].get("val") for log in logs] == [None, 2.0]


def test_a_run_that_was_handed_in_or_is_in_progress_is_not_ended(tmp_path):
    logs, answer = run(
        tmp_path,
        """
        import wandb
        mine = wandb.init(mode="offline", dir=root, project="p")
        given = WandbLogger(experiment=mine)
        given.log_metrics({"a": 1.0}, 0)
        given.finalize("success")
        adopting = WandbLogger(save_dir=root, offline=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            adopting.log_metrics({"b": 2.0}, 1)
        answer["warned"] = [str(w.message) for w in caught if "in progress" in str(w.message)]
        adopting.finalize("success")
        assert adopting.experiment is mine and wandb.run is mine
        mine.log({"c": 3.0})
        mine.finish()
        """,
    )
    (log,) = logs
    assert [row.get(name) for row, name in zip(log.history, "abc", strict=True)] == [
        1.0,
        2.0,
        3.0,
    ]
    assert len(answer["warned"]) == 1


@pytest.mark.slow
def test_fit_validate_and_test_are_one_run_and_another_logger_has_its_own(tmp_path):
    logs, _ = run(
        tmp_path,
        """
        import torch, wandb
        import trainer_kit as tk
        from trainer_kit.testing import TinyModule

        def train(**options):
            logger = WandbLogger(save_dir=root, offline=True, **options)
            trainer = tk.Trainer(max_epochs=1, log_every_n_steps=1, logger=logger, enable_checkpointing=False,
                                 enable_progress_bar=False, enable_model_summary=False)
            trainer.fit(TinyModule(), data, data)
            return logger, trainer

        data = [torch.randn(4, 32)] * 2
        logger, trainer = train(id="one")
        trainer.validate(trainer.module, data, verbose=False)
        trainer.test(trainer.module, data, verbose=False)
        logger.experiment.summary["note"] = 7.0
        other, trainer = train(id="two")
        wandb.finish()
        trainer.test(trainer.module, data, verbose=False)
        try:
            trainer.validate(trainer.module, [torch.randn(4, 7)])
        except RuntimeError:
            assert wandb.run is None, "a failure ends the run"
        for variables in (os.environ, environment):
            variables.pop("TORCHINDUCTOR_CACHE_DIR", None)  # torch sets it when it is imported
        """,
    )
    names = {log.run.run_id: [] for log in logs}
    for log in logs:
        names[log.run.run_id].append({name for row in log.history for name in row})
    assert len(names["one"]) == 1, "one run, in one directory"
    assert {"train_loss", "val_loss", "test_loss"} <= names["one"][0]
    (one,) = (log for log in logs if log.run.run_id == "one")
    assert one.exit_code == 0
    assert one.summary["note"] == 7.0
    assert {"train_loss", "val_loss"} <= names["two"][0], (
        "another logger begins a run of its own"
    )
    assert any("test_loss" in after for after in names["two"][1:]), (
        "logging after wandb.finish() resumes the run"
    )
    assert [log.exit_code for log in logs if log.run.run_id == "two"][-1] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("log_model", "expected"), [("all", 2), (True, 1), (False, 0)])
def test_checkpoints_become_artifacts_as_log_model_says(tmp_path, log_model, expected):
    logs, _ = run(
        tmp_path,
        f"""
        import shutil
        logger = WandbLogger(save_dir=root, offline=True, log_model={log_model!r}, checkpoint_name="ckpt")
        for step in (1, 2):
            path = root / f"step-{{step}}"
            path.mkdir()
            (path / "weights").write_text(f"weights {{step}}")
            logger.log_metrics({{"loss": 1.0}}, step)
            logger.after_save_checkpoint(path)
        shutil.rmtree(root / "step-1")
        logger.finalize("success")
        """,
    )
    artifacts = [artifact for log in logs for artifact in log.artifacts]
    assert [
        (artifact.name, artifact.type, list(artifact.aliases)) for artifact in artifacts
    ] == ([("ckpt", "model", ["latest"])] * expected)
    assert [
        json.loads(artifact.metadata)["original_name"] for artifact in artifacts
    ] == (["step-1", "step-2"][2 - expected :] if expected else [])


@pytest.mark.slow
def test_a_checkpoint_at_a_url_becomes_a_reference(tmp_path):
    logs, _ = run(
        tmp_path,
        """
        from trainer_kit.checkpoint.commit import remove_checkpoint, write_checkpoint

        logger = WandbLogger(save_dir=root, offline=True, log_model=True, checkpoint_name="ckpt")
        path = write_checkpoint("memory://kept/step-2", {"model": {}})
        logger.after_save_checkpoint(write_checkpoint("memory://kept/step-1", {}))
        logger.after_save_checkpoint(path)
        remove_checkpoint("memory://kept/step-1")
        logger.finalize("success")
        """,
    )
    artifacts = [artifact for log in logs for artifact in log.artifacts]
    assert [
        entry.ref for artifact in artifacts for entry in artifact.manifest.contents
    ] == ["memory://kept/step-2"]


@pytest.mark.slow
def test_tables_images_and_watched_modules(tmp_path):
    logs, _ = run(
        tmp_path,
        """
        import numpy, torch
        warnings.simplefilter("ignore")
        logger = WandbLogger(save_dir=root, offline=True)
        net = torch.nn.Linear(2, 1)
        logger.watch(net, log_freq=1, log_graph=False)
        net(torch.ones(1, 2)).sum().backward()
        logger.log_table("table", columns=["a", "b"], data=[[1, 2]], step=1)
        logger.log_text("text", columns=["t"], data=[["hello"]], step=1)
        logger.log_image("image", [numpy.zeros((2, 2, 3), dtype=numpy.uint8)], step=2, caption=["black"])
        logger.unwatch(net)
        try:
            logger.log_image("image", [1, 2], caption=["one"])
        except ValueError as error:
            assert "one value for each of the 2 items" in str(error), error
        else:
            raise AssertionError
        logger.finalize("success")
        """,
    )
    (log,) = logs
    rows = {name: value for row in log.history for name, value in row.items()}
    assert (rows["table.nrows"], rows["table.ncols"], rows["text.ncols"]) == (1, 2, 1)
    assert (rows["image.captions"], rows["image.count"]) == (["black"], 1)
    assert rows["gradients/weight.values"] == [2]


def test_a_missing_wandb_is_named_when_the_logger_is_made(monkeypatch, tmp_path):
    from lightning_utilities.core import imports

    class Missing(imports.RequirementCache):
        def __init__(self, requirement: str) -> None:
            super().__init__(
                requirement.replace("wandb", "wandb-that-is-not-installed")
            )

    monkeypatch.setattr(imports, "RequirementCache", Missing)
    with pytest.raises(ConfigurationError, match="WandbLogger needs wandb") as caught:
        WandbLogger(save_dir=tmp_path)
    assert "pip install" in caught.value.found


def test_a_new_logger_writes_nothing_and_imports_nothing(tmp_path):
    logger = WandbLogger(save_dir=tmp_path / "x", project="p", offline=True)
    assert (logger.version, logger.name, logger.log_dir) == (None, "p", None)
    logger.finalize("success")
    assert list(tmp_path.iterdir()) == []


def test_lightnings_other_name_of_the_directory(tmp_path):
    assert WandbLogger(dir=tmp_path / "y", anonymous=True).save_dir == str(
        tmp_path / "y"
    )
    with pytest.raises(
        ConfigurationError, match=r"(?s)'add_file_policy'.*copies the files"
    ):
        WandbLogger(add_file_policy="immutable")
    assert WandbLogger(add_file_policy="mutable", save_dir=tmp_path).save_dir == str(
        tmp_path
    )


def test_the_project_comes_from_the_environment_where_none_is_given(monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "from-environment")
    assert WandbLogger().name == "from-environment"
    assert WandbLogger(project="given").name == "given"
    monkeypatch.delenv("WANDB_PROJECT")
    assert WandbLogger().name == "trainer_kit_logs"


def test_a_resumed_run_keeps_its_id_unless_another_is_given(tmp_path):
    before = WandbLogger(save_dir=tmp_path, id="first", offline=True)
    drawn, given = (
        WandbLogger(save_dir=tmp_path, offline=True),
        WandbLogger(save_dir=tmp_path, id="mine", offline=True),
    )
    assert (before.state_dict(), drawn.state_dict()) == ({"id": "first"}, {})
    for logger in (drawn, given):
        logger.load_state_dict(before.state_dict())
    assert (drawn.version, given.version) == ("first", "mine")
    assert (
        pickle.loads(pickle.dumps(drawn)).version == "first"
    )  # a copy in a process that is spawned
