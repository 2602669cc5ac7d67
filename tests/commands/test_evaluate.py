"""``trainer-kit evaluate``: checkpoints are validated in another process, which is killed, while the run trains."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner

from trainer_kit.commands.main import main
from trainer_kit.loggers import JSONLLogger, read_journal

RUN = """
import os, pathlib, shutil, signal, sys, time
import torch
import trainer_kit as tk
from trainer_kit.commands.main import main
from trainer_kit.loggers import JSONLLogger
from trainer_kit.testing import TinyModule

class Net(TinyModule):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(32)

    def forward(self, x):
        return super().forward(self.norm(x))

    def setup(self, stage):
        mishap = os.environ.get("MISHAP")
        if os.environ.get("ROLE") != "captured" or mishap is None:
            return
        # Between the look for checkpoints and the load of the first one.
        del os.environ["MISHAP"]
        first, last = (next(pathlib.Path("checkpoints").glob(f"*{step:08}")) for step in (3, 12))
        if mishap == "fails":
            raise OSError("the data is gone\\nwhat follows is not shown")
        shutil.rmtree(first)
        if mishap == "replaced before":
            shutil.copytree(last, first)

    def training_step(self, batch, batch_idx):
        time.sleep(float(os.environ.get("SLOW", "0")))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        kills = pathlib.Path("kills")
        # Each number is a batch of validation, counted over all processes, at which this one is killed.
        if kills.exists() and os.environ.get("ROLE") == "captured":
            batches, *left = map(int, kills.read_text().split())
            kills.write_text(" ".join(map(str, [batches + 1, *[n for n in left if n != batches]])))
            if batches in left:
                os.kill(os.getpid(), signal.SIGKILL)
        loss = self(batch).mean()
        self.log("val_loss", loss)
        self.log_dict({"val_low": batch.min(), "val_high": batch.max()}, reduce_fx="max")

def train(validates):
    torch.manual_seed(1)
    module = Net()
    data = [torch.randn(4, 32, generator=torch.Generator().manual_seed(i)) for i in range(12)]
    trainer = tk.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, val_check_interval=3, limit_val_batches=1.0 if validates else 0,
        logger=JSONLLogger("run", "", ""), enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
        callbacks=tk.callbacks.ModelCheckpoint("checkpoints", every_n_train_steps=3, save_top_k=-1),
    )
    trainer.fit(module, data, data[:5])

if os.environ.get("ROLE") == "evaluate":
    while not pathlib.Path("run/run.json").exists():
        time.sleep(0.02)
    os.environ["ROLE"] = "captured"  # the command runs this script again, up to its fit
    main(["evaluate", "run", "--follow", "--every", "0.1", "--", "beside"])
else:
    train(sys.argv[1] == "blocking")
"""
NAMES = ("val_loss", "val_low", "val_high")


def validations(directory: Path) -> list[tuple[int, dict[str, float]]]:
    """The steps and values of validations in a journal, in the order of their steps."""
    rows = [
        (record["step"], {name: record[name] for name in NAMES})
        for record in read_journal(directory / "run" / "journal.jsonl")
        if "val_loss" in record
    ]
    return sorted(rows, key=lambda row: row[0])


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "run.py"
    file.write_text(RUN)
    return file


def train(programs, monkeypatch, directory: Path, script: Path, how: str) -> None:
    directory.mkdir()
    monkeypatch.chdir(directory)
    trained = programs.run(script, how)
    assert trained.returncode == 0, trained.stderr


def test_values_are_those_of_a_blocking_validation(
    programs, tmp_path, script, monkeypatch
):
    """Also where the evaluating process is killed before, in the middle of and after each evaluation."""
    train(programs, monkeypatch, tmp_path / "blocking", script, "blocking")
    expected = validations(tmp_path / "blocking")
    assert [step for step, _ in expected] == [3, 6, 9, 12]
    train(programs, monkeypatch, tmp_path / "beside", script, "beside")
    assert validations(tmp_path / "beside") == []
    Path("kills").write_text("0 0 2 9 11 12")
    evaluating = {**os.environ, "ROLE": "evaluate"}
    for _ in range(5):
        killed = programs.run(script, environment=evaluating)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    finished = programs.run(script, environment=evaluating)
    assert finished.returncode == 0, finished.stderr
    assert validations(tmp_path / "beside") == expected
    assert not Path("run/evaluation").exists()
    # Nothing is evaluated again.
    again = programs.run(script, environment=evaluating)
    assert again.stdout == "4 checkpoints evaluated in run\n"
    assert validations(tmp_path / "beside") == expected
    # Over samples and tokens the values stand where the checkpoints do.
    counts = [
        record["counts"]["samples"]
        for record in read_journal("run/journal.jsonl")
        if "val_loss" in record
    ]
    assert counts == [12, 24, 36, 48]


def test_a_run_is_followed_until_it_has_finished(
    programs, tmp_path, script, monkeypatch
):
    train(programs, monkeypatch, tmp_path / "blocking", script, "blocking")
    (tmp_path / "beside").mkdir()
    monkeypatch.chdir(tmp_path / "beside")
    roles = [
        {**os.environ, "ROLE": "train", "SLOW": "0.1"},
        {**os.environ, "ROLE": "evaluate"},
    ]
    trained, evaluated = programs.run_together(roles, script, "beside")
    assert trained.returncode == 0, trained.stderr
    assert evaluated.returncode == 0, evaluated.stderr
    assert validations(tmp_path / "beside") == validations(tmp_path / "blocking")
    # Both have written to the journal: each line is whole.
    steps = [
        record["step"]
        for record in read_journal("run/journal.jsonl")
        if "train_loss" in record
    ]
    assert steps == list(range(1, 13))


@pytest.mark.parametrize(
    ("mishap", "line", "total"),
    [
        (
            "deleted before",
            "step 3: deleted by the run before it was evaluated",
            "2 checkpoints evaluated in run, 1 deleted before, 1 failed",
        ),
        (
            "replaced before",
            "step 3: replaced by the run before it was evaluated",
            "2 checkpoints evaluated in run, 1 replaced before, 1 failed",
        ),
        (
            "fails",
            "step 3: not evaluated: the data is gone",
            "2 checkpoints evaluated in run, 2 failed",
        ),
    ],
    ids=["deleted", "replaced", "fails"],
)
def test_a_checkpoint_that_cannot_be_evaluated_costs_its_own_values(
    programs, tmp_path, script, monkeypatch, mishap, line, total
):
    train(programs, monkeypatch, tmp_path / "blocking", script, "blocking")
    train(programs, monkeypatch, tmp_path / "beside", script, "beside")
    (damaged,) = Path("checkpoints").glob("*00000006")
    weights = bytearray((damaged / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (damaged / "model.safetensors").write_bytes(weights)
    roles = {**os.environ, "ROLE": "evaluate", "MISHAP": mishap}
    evaluated = programs.run(script, environment=roles)
    assert evaluated.returncode == 1, evaluated.stderr
    lines = evaluated.stdout.splitlines()
    assert lines[0] == line
    assert lines[1].startswith("step 6: not evaluated: ")
    assert "model.safetensors" in lines[1]
    assert lines[-1] == total
    # Each of the others, and the copy of the last one, has the values of its own weights.
    expected = validations(tmp_path / "blocking")
    assert validations(tmp_path / "beside") == expected[2:]


TWO_FITS = """
import os, pathlib, sys, time
import torch
import trainer_kit as tk
from trainer_kit.commands.main import main
from trainer_kit.loggers import JSONLLogger
from trainer_kit.testing import TinyModule

def wait_for(pattern):
    while not list(pathlib.Path().glob(pattern)):
        time.sleep(0.02)

class Net(TinyModule):
    def training_step(self, batch, batch_idx):
        if batch_idx == 4:
            wait_for("evaluating")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        # The second fit has ended before the first checkpoint of the first one is evaluated.
        pathlib.Path("evaluating").touch()
        wait_for("checkpoints1/*00000008")
        self.log("val_data", batch.mean())

if os.environ["ROLE"] == "evaluate":
    wait_for("checkpoints0/*00000004")
    os.environ["ROLE"] = "captured"
    main(["evaluate", "run", "--follow", "--every", "0.1"])
else:
    for fit in range(2):
        trainer = tk.Trainer(
            max_steps=8, accelerator="cpu", devices=1, limit_val_batches=0, logger=JSONLLogger("run", "", ""),
            enable_progress_bar=False, enable_model_summary=False,
            callbacks=tk.callbacks.ModelCheckpoint(f"checkpoints{fit}", every_n_train_steps=4, save_top_k=-1),
        )
        trainer.fit(Net(), [torch.zeros(2, 32)] * 8, [torch.full((2, 32), fit + 1.0)])
"""


def test_checkpoints_of_a_second_fit_are_not_evaluated_with_the_first_ones_module(
    programs, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "two.py"
    script.write_text(TWO_FITS)
    roles = [{**os.environ, "ROLE": role} for role in ("train", "evaluate")]
    trained, evaluated = programs.run_together(roles, script)
    assert trained.returncode == 0, trained.stderr
    assert evaluated.returncode == 0, evaluated.stderr
    assert evaluated.stdout.splitlines() == [
        "step 4: val_data 1",
        "step 8: val_data 1",
        "a later fit has begun: its checkpoints are not evaluated",
        "2 checkpoints evaluated in run",
    ]
    values = [
        (record["step"], record["val_data"])
        for record in read_journal("run/journal.jsonl")
        if "val_data" in record
    ]
    assert values == [(4, 1.0), (8, 1.0)]


def test_masked_arguments_are_not_passed_to_the_script(
    programs, tmp_path, script, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    trained = programs.run(script, "beside", "--api-key", "abc")
    assert trained.returncode == 0, trained.stderr
    message = call("run")
    assert "beside --api-key ***" in message
    assert "trainer-kit evaluate run -- ARGUMENTS" in message


def test_a_line_of_another_process_does_not_move_those_of_this_one(
    tmp_path, monkeypatch
):
    logger = JSONLLogger(tmp_path, "", "")
    logger.log_metrics({"loss": 1.0}, step=1)
    other = JSONLLogger(tmp_path, "", "")
    append = os.write

    def write(file: int, line: bytes) -> int:
        # Between the look at the file's size and the write of the line.
        monkeypatch.setattr(os, "write", append)
        other.log_metrics({"val_loss": 9.0}, step=1)
        return append(file, line)

    monkeypatch.setattr(os, "write", write)
    logger.log_metrics({"loss": 2.0}, step=2)
    assert logger.read_values(logger.line)[:2] == ({"loss": 2.0}, 2)


def call(*words: str) -> str:
    result = CliRunner().invoke(main, ["evaluate", *words])
    assert result.exit_code == 2, result.output
    return result.output


def test_mistakes(tmp_path):
    assert "not the directory of a run" in call(str(tmp_path))
    assert "no such option" in call(str(tmp_path), "--fellow").lower()
    assert "--every needs --follow" in call(str(tmp_path), "--every", "1")
