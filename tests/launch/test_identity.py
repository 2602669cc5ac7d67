"""Which program this is, and who started it: read from the process and from variables."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_kit.launch.program import arguments, handed_over, launches, script

ROOT = Path(__file__).parents[2]
SHOW = "from trainer_kit.launch.program import arguments, script; print(script(), arguments())"


def run(directory, *command):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_a_script_a_module_and_typed_in_code(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(SHOW)
    file = tmp_path / "package" / "train.py"
    assert (
        run(tmp_path, "package/train.py", "--token", "abc")
        == f"{file} ['--token', '***']"
    )
    assert run(tmp_path, "-m", "package.train", "--lr=1") == f"{file} ['--lr=1']"
    assert run(tmp_path, "-c", SHOW).startswith("None")


def test_a_test_is_not_a_script():
    assert script() is None


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["--api_key", "abc", "--lr", "1"], ["--api_key", "***", "--lr", "1"]),
        (
            ["password=abc", "model.hf_token=abc"],
            ["password=***", "model.hf_token=***"],
        ),
        (["--verbose", "name"], ["--verbose", "name"]),
        (
            ["--max-tokens", "128", "--pad-token=<pad>"],
            ["--max-tokens", "128", "--pad-token=<pad>"],
        ),
        (["--secret", "-x1", "--lr", "1"], ["--secret", "***", "--lr", "1"]),
        (["postgres://me:pw@host/db"], ["postgres://me:***@host/db"]),
        ([], []),
    ],
)
def test_secrets_of_the_command_line_are_masked(words, kept):
    assert arguments(words) == kept


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, {}),
        ({"SLURM_JOB_ID": "7"}, {"slurm 7": False}),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, {"slurm 7": True}),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "many"}, {"slurm 7": False}),
        (
            {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1"},
            {"torchrun a": True},
        ),
        (
            {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"},
            {f"torchrun {os.getppid()} on {socket.gethostname()}": False},
        ),
        # Our agent's ranks have torch's variables too; it restarts them itself.
        (
            {
                "TRAINER_KIT_AGENT_PID": "5",
                "TRAINER_KIT_RESTART_COUNT": "1",
                "TORCHELASTIC_RUN_ID": "x",
            },
            {f"agent 5 on {socket.gethostname()}": True},
        ),
        (
            {
                "TRAINER_KIT_AGENT_PID": "5",
                "TRAINER_KIT_RUN": json.dumps({"id": "f00"}),
                "SLURM_JOB_ID": "7",
            },
            {"slurm 7": False, "agent f00": False},
        ),
    ],
)
def test_the_launcher_is_recognized_by_its_variables(variables, found):
    assert launches(variables) == found


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_a_malformed_run_variable_is_ignored(text):
    assert handed_over({"TRAINER_KIT_RUN": text}) == {}
