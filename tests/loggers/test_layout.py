"""Directories, versions, plain data, and what the room exports."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import subprocess
import sys
from argparse import Namespace
from collections import OrderedDict
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch

import trainer_kit
from trainer_kit import loggers
from trainer_kit.core.atomic_files import replace_file
from trainer_kit.core.errors import ConfigurationError, LogError
from trainer_kit.core.protocols import Logger
from trainer_kit.loggers import CSVLogger, JSONLLogger, TensorBoardLogger
from trainer_kit.loggers.layout import flatten, numbers, params_dict, plain

FILE_LOGGERS = [loggers.CSVLogger, loggers.JSONLLogger, loggers.TensorBoardLogger]


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


@pytest.fixture(params=FILE_LOGGERS)
def make(request):
    """A class of file loggers; those it makes are closed afterwards."""
    made = []

    def build(*args, **kwargs):
        made.append(request.param(*args, **kwargs))
        return made[-1]

    yield build
    for logger in made:
        logger.finalize("success")


def test_nothing_is_made_before_the_first_write(make, tmp_path):
    logger = make(tmp_path)
    assert logger.log_dir == str(tmp_path / "trainer_kit_logs" / "version_0")
    assert logger.root_dir == str(tmp_path / "trainer_kit_logs")
    assert (logger.name, logger.version, logger.save_dir) == (
        "trainer_kit_logs",
        0,
        str(tmp_path),
    )
    logger.log_metrics({}, 0)
    logger.save()
    logger.finalize("success")
    assert files(tmp_path) == set()
    logger.log_metrics({"loss": 1.0}, 0)
    logger.save()
    assert "trainer_kit_logs/version_0" in files(tmp_path)


def test_the_next_version_is_one_above_the_highest_and_stays(make, tmp_path):
    for taken in ("version_0", "version_7", "version_x", "best", "version_9.bak"):
        (tmp_path / "run" / taken).mkdir(parents=True)
    (tmp_path / "run" / "version_11").write_text("a file, not a run", encoding="utf-8")
    logger = make(tmp_path, name="run")
    assert logger.version == 8
    (tmp_path / "run" / "version_8").mkdir()
    assert logger.version == 8
    assert logger.log_dir.endswith("version_8")
    assert make(tmp_path, name="run").version == 9


def test_the_version_is_looked_up_when_it_is_asked_for(make, tmp_path):
    first, second = make(tmp_path), make(tmp_path)
    first.log_metrics({"loss": 1.0}, 0)
    first.save()
    assert (first.version, second.version) == (0, 1)


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [
        ("n", 3, "n/version_3"),
        ("n", "mine", "n/mine"),
        ("", 3, "version_3"),
        (None, "mine", "mine"),
        ("", "", "."),
    ],
)
def test_explicit_places(make, tmp_path, name, version, expected):
    assert (
        Path(make(tmp_path, name=name, version=version).log_dir) == tmp_path / expected
    )


def test_home_and_environment_variables_are_expanded(make, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RUNS", "runs")
    assert make("~/$RUNS", version=0).log_dir == str(
        tmp_path / "runs/trainer_kit_logs/version_0"
    )


def test_a_url_is_refused(make):
    with pytest.raises(ConfigurationError, match="local directories only"):
        make("s3://bucket/logs")


def test_every_logger_fits_the_protocol(make, tmp_path):
    assert isinstance(make(tmp_path), Logger)


def test_values_that_are_not_numbers_are_refused_by_name(make, tmp_path):
    logger = make(tmp_path)
    with pytest.raises(LogError, match="'picture' is not a single number") as caught:
        logger.log_metrics({"picture": torch.zeros(2, 3)}, 0)
    assert caught.value.found == "a Tensor of shape (2, 3), torch.float32"
    assert files(tmp_path) == set()


@pytest.mark.parametrize("cls", [loggers.CSVLogger, loggers.TensorBoardLogger])
def test_hyperparameters_accumulate_in_a_file_only_the_user_can_read(cls, tmp_path):
    logger = cls(tmp_path, version=0)
    logger.log_hyperparams(
        Namespace(lr=0.1, optim={"betas": (0.9, float("nan"))}, act=torch.relu)
    )
    logger.log_hyperparams(
        {"batch_size": 32, "wandb_token": "secret", "url": "postgres://me:pw@host/db"}
    )
    logger.finalize("success")
    path = Path(logger.log_dir) / "hparams.json"
    assert json.loads(path.read_text(encoding="utf-8")) == {
        "lr": 0.1,
        "optim": {"betas": [0.9, "NaN"]},
        "act": "relu",
        "batch_size": 32,
        "wandb_token": "***",
        "url": "postgres://me:***@host/db",
    }
    assert path.stat().st_mode & 0o777 == 0o600
    assert "secret" not in "".join(
        file.read_text("latin-1")
        for file in Path(logger.log_dir).iterdir()
        if file.is_file()
    )


def test_empty_hyperparameters_write_nothing(make, tmp_path):
    logger = make(tmp_path)
    logger.log_hyperparams({})
    logger.log_hyperparams(None)
    assert files(tmp_path) == set()


def test_numbers():
    values = {
        "a": 1,
        "b": 0.5,
        "c": torch.tensor([2.5]),
        "d": np.float32(0.25),
        "e": True,
        "f": torch.tensor(3),
    }
    assert numbers(values) == {"a": 1, "b": 0.5, "c": 2.5, "d": 0.25, "e": 1, "f": 3}
    assert all(
        type(value) in (int, float, np.float32) for value in numbers(values).values()
    )
    assert numbers({"a": 1}, "p") == {"p-a": 1}
    for wrong in (
        "text",
        None,
        torch.tensor([1.0, 2.0]),
        torch.tensor(1j),
        np.zeros(0),
        np.array("x"),
    ):
        with pytest.raises(LogError, match="'wrong' is not a single number"):
            numbers({"wrong": wrong})


def test_params_dict():
    @dataclasses.dataclass
    class Optim:
        lr: float
        inner: Namespace

    given = {"optim": Optim(0.1, Namespace(a=1)), 3: OrderedDict(b=2)}
    assert params_dict(given) == {
        "optim": {"lr": 0.1, "inner": {"a": 1}},
        "3": {"b": 2},
    }
    assert params_dict(Optim(0.1, Namespace())) == {"lr": 0.1, "inner": {}}
    with pytest.raises(LogError, match="a dict, a Namespace or a dataclass"):
        params_dict([1, 2])


def test_flatten_keeps_lists_and_empty_mappings():
    assert flatten({"a": {"b": {"c": 1}, "d": [{"e": 2}]}, "f": {}}) == {
        "a/b/c": 1,
        "a/d": [{"e": 2}],
        "f": {},
    }


def test_plain_is_strict_json():
    class Color(Enum):
        RED = 1

    value = {
        "nan": float("nan"),
        "inf": [float("inf"), float("-inf")],
        "np": np.float64("nan"),
        "int": np.int64(3),
        "one": torch.tensor(2.0),
        "many": torch.zeros(2, 2),
        "path": Path("a/b"),
        "enum": Color.RED,
        "set": {2, 1},
        "cls": torch.nn.Linear,
        "module": torch.nn.ReLU(),
        "function": len,
        "none": None,
        4: True,
    }
    assert json.loads(json.dumps(plain(value), allow_nan=False)) == {
        "nan": "NaN",
        "inf": ["Infinity", "-Infinity"],
        "np": "NaN",
        "int": 3,
        "one": 2.0,
        "many": "Tensor of shape (2, 2), torch.float32",
        "path": "a/b",
        "enum": "RED",
        "set": [1, 2],
        "cls": "Linear",
        "module": "ReLU",
        "function": "len",
        "none": None,
        "4": True,
    }


def test_an_atomic_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path, monkeypatch
):
    path = tmp_path / "file"
    replace_file(path, b"old")

    def fail(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="the disk is full"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert files(tmp_path) == {"file"}


@pytest.mark.slow
def test_the_package_exports_its_names_and_imports_nothing_heavy():
    assert loggers.__all__ == sorted(loggers.__all__)
    assert set(loggers.__all__) <= set(dir(loggers))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        loggers.Nothing  # noqa: B018
    code = (
        "import sys, trainer_kit.loggers as l; [getattr(l, n) for n in l.__all__]; l.TensorBoardLogger('x');"
        "heavy = ('tensorboard', 'torch.utils.tensorboard', 'wandb');"
        "print([m for m in heavy if m in sys.modules])"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(trainer_kit.__file__).parent.parent),
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=environment,
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("kind", [CSVLogger, JSONLLogger, TensorBoardLogger])
def test_reopening_continues_in_the_directory_of_an_earlier_process(tmp_path, kind):
    first = kind(tmp_path)
    first.log_metrics({"loss": 1.0}, step=1)
    first.finalize("interrupted")
    again = kind(tmp_path)
    assert again.version == 1
    again.log_metrics({"early": 1.0}, step=0)
    again.load_state_dict(first.state_dict())
    assert again.log_dir == first.log_dir
    again.log_metrics({"loss": 0.5}, step=2)
    again.finalize("success")
    assert len(list((tmp_path / "trainer_kit_logs" / "version_1").iterdir())) == 1, (
        "what came before stays there"
    )
    if kind is CSVLogger:
        assert again.path.read_text() == "step,loss\n1,1.0\n2,0.5\n"


def test_a_version_that_was_given_stays(tmp_path):
    logger = CSVLogger(tmp_path, version="mine")
    logger.load_state_dict({"name": "trainer_kit_logs", "version": 0})
    assert logger.version == "mine"


def test_a_copy_in_another_process_logs(make, tmp_path):
    logger = make(tmp_path, version=0)
    logger.log_metrics({"loss": 1.0}, 1)
    copy = pickle.loads(pickle.dumps(logger))
    logger.finalize("success")
    copy.log_metrics({"loss": 2.0}, 2)
    copy.finalize("success")
    assert copy.log_dir == logger.log_dir
