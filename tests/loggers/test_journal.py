"""Every line is there as soon as the call returns."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import trainer_kit
from trainer_kit.core.errors import LogError
from trainer_kit.loggers import JSONLLogger, read_journal
from trainer_kit.report.history import History

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(Path(trainer_kit.__file__).parent.parent),
}


def test_each_logged_line_is_written_at_once(tmp_path):
    logger = JSONLLogger(tmp_path, name="", version="")
    assert logger.path == tmp_path / "journal.jsonl"
    logger.log_hyperparams(
        {"lr": 0.1, "optim": {"api_key": "k", "betas": (0.9, float("inf"))}}
    )
    logger.log_metrics({"loss": torch.tensor(0.5), "epoch": 0}, 3)
    first, second = (
        json.loads(line)
        for line in logger.path.read_text(encoding="utf-8").splitlines()
    )
    assert list(second) == ["step", "time", "loss", "epoch"]
    assert (second["step"], second["loss"], second["epoch"]) == (3, 0.5, 0)
    assert first["hparams"] == {
        "lr": 0.1,
        "optim": {"api_key": "***", "betas": [0.9, "Infinity"]},
    }
    assert first["time"] <= second["time"]
    assert stat.S_IMODE(logger.path.stat().st_mode) == 0o600
    logger.finalize("success")
    logger.log_metrics({"val": 1.0}, 3)
    assert [record.get("step") for record in read_journal(logger.path)] == [None, 3, 3]


def test_numbers_come_back_whatever_they_are(tmp_path):
    logger = JSONLLogger(tmp_path, prefix="p")
    logger.log_metrics(
        {
            "nan": float("nan"),
            "inf": float("inf"),
            "minus": float("-inf"),
            "ü": 1 / 3,
            "n": 10**20,
        },
        0,
    )
    line = logger.path.read_text(encoding="utf-8")
    assert '"p-nan": "NaN", "p-inf": "Infinity", "p-minus": "-Infinity"' in line
    (record,) = read_journal(logger.path)
    assert math.isnan(record["p-nan"])
    assert (record["p-inf"], record["p-minus"]) == (float("inf"), float("-inf"))
    assert (record["p-ü"], record["p-n"]) == (1 / 3, 10**20)


def test_hyperparameters_already_in_the_file_are_not_repeated(tmp_path):
    logger = JSONLLogger(tmp_path)
    logger.log_hyperparams({"lr": float("nan")})
    logger.log_hyperparams({"lr": float("nan")})
    logger.log_hyperparams({"batch": 2}, {"score": 0.5})
    records = read_journal(logger.path)
    assert [record.get("hparams") for record in records] == [
        {"lr": "NaN"},
        {"batch": 2},
        None,
    ]
    assert (records[2]["step"], records[2]["score"]) == (0, 0.5)


@pytest.mark.parametrize("torn", [b'{"step": 1, "ti', b"x" * 200_000])
def test_a_torn_last_line_is_ignored_and_then_ended(tmp_path, torn):
    logger = JSONLLogger(tmp_path, version=0)
    logger.log_metrics({"a": 1.0}, 0)
    with open(logger.path, "ab") as file:
        file.write(torn)
    assert [record["step"] for record in read_journal(logger.path)] == [0]
    JSONLLogger(tmp_path, version=0).log_metrics({"a": 2.0}, 1)
    assert [(record["step"], record["a"]) for record in read_journal(logger.path)] == [
        (0, 1.0),
        (1, 2.0),
    ]
    # Bytes that another process may be writing are never cut.
    assert torn in logger.path.read_bytes()
    assert History.read(logger.log_dir)[1] == {"step": 1, "a": 2.0}


def test_a_file_of_one_torn_line_has_no_records(tmp_path):
    logger = JSONLLogger(tmp_path, name="", version="")
    logger.path.write_bytes(b'{"st')
    assert read_journal(logger.path) == []
    logger.log_metrics({"a": 1.0}, 0)
    assert [record["a"] for record in read_journal(logger.path)] == [1.0]


@pytest.mark.parametrize("broken", ["{", "[1]", "\x00\x00"])
def test_a_broken_line_in_the_middle_is_named(tmp_path, broken):
    path = tmp_path / "journal.jsonl"
    path.write_text(f'{{"step": 0}}\n{broken}\n{{"step": 1}}\n', encoding="utf-8")
    with pytest.raises(LogError, match=r"journal\.jsonl:2: "):
        read_journal(path)


@pytest.mark.parametrize("name", ["step", "time", "hparams"])
def test_a_metric_with_the_name_of_a_field_is_kept_beside_it(tmp_path, name):
    logger = JSONLLogger(tmp_path)
    logger.log_metrics({name: 0.5, "a": 1.0}, 7)
    (record,) = read_journal(logger.path)
    assert (record["step"], record[f"metric/{name}"], record["a"]) == (7, 0.5, 1.0)
    assert record["time"] > 1.0
    logger.finalize("success")


def test_a_full_disk_costs_one_line_and_never_a_torn_one(tmp_path):
    logger = JSONLLogger(tmp_path, name="", version="")
    logger.log_metrics({"a": 1.0}, 0)
    size = logger.path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for room in (10, 0):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, hard))
            with pytest.raises(OSError):  # noqa: PT011 (the kernel's words differ)
                logger.log_metrics({"a": 2.0}, 1)
            assert [record["step"] for record in read_journal(logger.path)] == [0]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    logger.log_metrics({"a": 3.0}, 2)
    assert [(record["step"], record["a"]) for record in read_journal(logger.path)] == [
        (0, 1.0),
        (2, 3.0),
    ]


WRITER = """
import sys
from trainer_kit.loggers import JSONLLogger
logger, name, width = JSONLLogger(sys.argv[1], "", ""), sys.argv[2], int(sys.argv[3])
values = {f"{name}_{number}": 0.5 for number in range(width)}
print("ready", flush=True)
sys.stdin.readline()
for step in range(200):
    logger.log_metrics(values, step)
    assert logger.read_values(logger.line) == (values, step, logger.read_values(logger.line)[2])
"""


@pytest.mark.parametrize("width", [1, 500])
def test_two_processes_append_to_one_file_and_lose_no_line(tmp_path, width):
    writers = []
    for name in ("training", "evaluation"):
        command = [sys.executable, "-c", WRITER, str(tmp_path), name, str(width)]
        writer = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT
        )
        writers.append(writer)
    for writer in writers:
        assert writer.stdout.readline() == b"ready\n"
    for writer in writers:
        writer.stdin.write(b"\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=60)
        assert writer.returncode == 0
    records = read_journal(tmp_path / "journal.jsonl")
    for name in ("training", "evaluation"):
        steps = [record["step"] for record in records if f"{name}_0" in record]
        assert steps == list(range(200))


def test_logged_values_survive_the_process(tmp_path):
    code = (
        "import os, sys; from trainer_kit.loggers import JSONLLogger; logger = JSONLLogger(sys.argv[1], '', '')\n"
        "for step in range(5): logger.log_metrics({'a': step / 2}, step)\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], timeout=60, env=ENVIRONMENT
    )
    assert done.returncode == -signal.SIGKILL
    records = read_journal(tmp_path / "journal.jsonl")
    assert [(record["step"], record["a"]) for record in records] == [
        (step, step / 2) for step in range(5)
    ]
