"""Every example runs as a user would run it, from another directory, warnings as errors, and says what it should."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.conftest import Run

ROOT = Path(__file__).resolve().parents[2]


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found is not None, text
    return float(found[1])


def accuracy(text: str) -> float:
    return number(r"test accuracy ([\d.]+)", text)


@pytest.mark.parametrize("flags", [(), ("--devices", "2")])
def test_digits_prints_the_paths_of_its_results(
    flags: tuple[str, ...], tmp_path: Path, run: Run
) -> None:
    said = run("digits", "--fast", "--accelerator", "cpu", *flags)
    assert 0.0 <= accuracy(said) <= 1.0
    checkpoint, logs = re.findall(r"(?:best checkpoint: |--logdir )(.+)", said)
    (report,) = re.findall("^report: (.+)", said, re.MULTILINE)
    assert (tmp_path / report).is_file()
    assert (tmp_path / checkpoint / "model.safetensors").is_file()
    assert list((tmp_path / logs).glob("events.out.tfevents.*"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["runs"]


@pytest.mark.slow
def test_digits_are_learned_alike_on_one_and_on_two_processes(run: Run) -> None:
    alone, together = (
        accuracy(run("digits", "--accelerator", "cpu", "--devices", n)) for n in "12"
    )
    assert alone >= 0.97
    assert together == pytest.approx(
        alone, abs=2 / 270
    )  # two of the 270 test images: AdamW in float32


@pytest.mark.parametrize(
    "flags",
    [
        (),
        pytest.param(
            ("--devices", "2", "--precision", "bf16-mixed"), marks=pytest.mark.slow
        ),
    ],
)
def test_char_transformer_trains_and_writes(flags: tuple[str, ...], run: Run) -> None:
    said = run(
        "char_transformer", "--steps", "3", "--width", "16", "--letters", "40", *flags
    )
    assert number(r"characters seen: (\d+)", said) > 3 * 16 * 40
    assert 3 < number(r"validation loss: ([\d.]+)", said) < 6
    assert len(said.partition("a sample:\n")[2].removesuffix("\n")) == len("The ") + 40


@pytest.mark.slow
def test_char_transformer_learns(run: Run) -> None:
    assert (
        number(r"validation loss: ([\d.]+)", run("char_transformer", "--steps", "300"))
        < 2.45
    )


@pytest.mark.slow
def test_qlora_learns(run: Run) -> None:
    said = run("qlora", "--steps", "100")
    assert number(r"a frozen weight: (\d+) bits", said) == 4
    assert (
        number(r"tuned ([\d.]+)", said) < number(r"shouted text: ([\d.]+)", said) - 1.5
    )


@pytest.mark.parametrize(
    "flags", [(), pytest.param(("--devices", "2"), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("example", ["gan_named", "gan_manual"])
def test_gan_runs(example: str, flags: tuple[str, ...], run: Run) -> None:
    assert (
        0
        <= number(r"centers reached: (\d) of 8", run(example, "--steps", "20", *flags))
        <= 8
    )


@pytest.mark.slow
@pytest.mark.parametrize("example", ["gan_named", "gan_manual"])
def test_gan_learns_the_ring(example: str, run: Run) -> None:
    said = run(example)
    assert number(r"centers reached: (\d) of 8", said) == 8
    assert number(r"nearest: ([\d.]+)", said) < 0.4


def test_custom_callback_averages_weights(run: Run) -> None:
    said = run("custom_callback", "--epochs", "5")
    assert re.findall(r"^step (\d+)$", said, re.M) == ["200", "400"]
    averaged, last = re.findall(r"(?:averaged weights|last ones) ([\d.]+)", said)
    assert float(averaged) < float(last)


def test_custom_callback_stops_the_run(run: Run) -> None:
    said = run("custom_callback", "--good-enough", "100")
    assert "stopped after step 96: val_loss" in said
    assert not re.findall(r"^step \d+$", said, re.M)


def test_custom_logger_has_every_value(run: Run) -> None:
    said = run("custom_logger", "--epochs", "2", "--database", "here.sqlite")
    assert 'run 1: success, {"lr": 0.5}' in said
    assert number(r"loss: (\d+) rows", said) == 2 * 16 / 4
    assert number(r"accuracy: 2 rows, ([\d.]+) at step 32", said) > 0.5


@pytest.mark.slow
def test_raw_loop_resumes_at_its_position(tmp_path: Path, run: Run) -> None:
    whole = run("raw_loop", "--epochs", "3", "--root", "whole")
    run("raw_loop", "--epochs", "3", "--root", "parts", "--stop-after", "1")
    resumed = run("raw_loop", "--epochs", "3", "--root", "parts", "--resume")
    assert whole.splitlines()[1:] == resumed.splitlines()
    assert accuracy(whole) > 0.75
    names = sorted(path.name for path in (tmp_path / "whole" / "checkpoints").iterdir())
    assert names == ["checkpoint_1", "checkpoint_2"]
    assert (tmp_path / "whole" / "model" / "model.safetensors").is_file()
    assert (tmp_path / "whole" / "digits" / "metrics.csv").read_text().count("\n") == 4


@pytest.mark.slow
def test_raw_loop_under_torchrun(run: Run) -> None:
    flags = ("--epochs", "3", "--batch-size", "16")
    launcher = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        str(ROOT / "examples" / "raw_loop.py"),
        *flags,
    ]
    ran = subprocess.run(
        [sys.executable, *launcher],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TRAINER_KIT_USE_CPU": "1",
        },
        capture_output=True,
        text=True,
        timeout=115,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert accuracy(ran.stdout) == pytest.approx(
        accuracy(run("raw_loop", "--epochs", "3", "--root", "one")), abs=0.05
    )
    assert ran.stdout.count("test accuracy") == 1


def test_raw_gan_runs(run: Run) -> None:
    assert (
        0 <= number(r"centers reached: (\d) of 8", run("raw_gan", "--steps", "20")) <= 8
    )


@pytest.mark.slow
def test_raw_gan_learns_the_ring(run: Run) -> None:
    assert number(r"centers reached: (\d) of 8", run("raw_gan", "--steps", "2000")) == 8


def test_no_example_is_forgotten() -> None:
    tested = {"lm", "qlora", "raw_gan", "raw_loop"}
    tested |= {
        "char_transformer",
        "custom_callback",
        "custom_logger",
        "digits",
        "gan_manual",
        "gan_named",
    }
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == tested
