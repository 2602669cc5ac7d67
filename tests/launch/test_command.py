"""Reading back how this program was started."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path

import pytest

from trainer_kit.core.errors import LaunchError
from trainer_kit.launch import rerun_command, run_agent, run_forked
from trainer_kit.launch.program import split_command


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        (["python", "a.py", "-m", "x"], [], ["a.py", "-m", "x"]),
        (["python", "-i", "a.py"], [], ["a.py"]),
        (["python", "-iu", "-Wd", "a.py"], ["-u", "-Wd"], ["a.py"]),
        (
            ["python", "-X", "dev", "-Xutf8", "-OO", "a.py"],
            ["-X", "dev", "-Xutf8", "-OO"],
            ["a.py"],
        ),
        (
            ["python", "-bW", "error", "-m", "p.q", "-c"],
            ["-bW", "error"],
            ["-m", "p.q", "-c"],
        ),
        (["python", "-mp.q", "1"], [], ["-m", "p.q", "1"]),
        (["python", "-Bc", "pass"], ["-B"], ["-c", "pass"]),
        (
            ["python", "--check-hash-based-pycs", "never", "a.py"],
            ["--check-hash-based-pycs", "never"],
            ["a.py"],
        ),
        (["python", "-"], [], ["-"]),
        (["python"], [], []),
    ],
)
def test_split(command: list[str], options: list[str], words: list[str]) -> None:
    assert split_command(command) == (options, words)


def test_a_test_is_not_run_again() -> None:
    with pytest.raises(LaunchError, match="a test under pytest") as caught:
        run_agent(2)
    assert caught.value.fix is not None
    assert "ddp_notebook" in caught.value.fix


@pytest.mark.parametrize("command", [["python"], ["python", "-q", "-"]])
def test_an_interactive_session_is_not_run_again(
    monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.delitem(sys.modules, "_pytest")
    monkeypatch.setattr(sys, "orig_argv", command)
    with pytest.raises(
        LaunchError, match="an interactive session or code from standard input"
    ):
        rerun_command()


def test_a_notebook_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "_pytest")
    monkeypatch.setattr(builtins, "get_ipython", lambda: None, raising=False)
    with pytest.raises(LaunchError, match="a notebook or an IPython session"):
        rerun_command()


def test_a_child_process_is_not_run_again() -> None:
    with pytest.raises(LaunchError, match="a child process of multiprocessing"):
        run_forked(lambda rank: rerun_command(), 1)


def test_a_script_is_found_from_another_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "_pytest")
    script = tmp_path / "train.py"
    script.touch()
    monkeypatch.setattr(sys, "orig_argv", ["python", "-u", str(script), "--lr", "1"])
    monkeypatch.setattr(
        sys, "argv", ["train.py"]
    )  # the script has read and dropped its arguments
    assert rerun_command() == (["-u"], [str(script), "--lr", "1"])
    script.unlink()
    with pytest.raises(LaunchError, match="does not exist any more"):
        rerun_command()


def test_a_rank_starts_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match="rank 1 of 2"):
        run_agent(2)
