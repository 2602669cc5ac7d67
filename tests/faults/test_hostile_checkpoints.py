"""A checkpoint that somebody made to do harm is refused, and nothing else happens, whichever way it is read."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from trainer_kit import Trainer
from trainer_kit.callbacks import ModelCheckpoint
from trainer_kit.checkpoint.commit import write_checkpoint
from trainer_kit.checkpoint.read import read_checkpoint, verify_checkpoint
from trainer_kit.core.errors import CheckpointError
from trainer_kit.testing import TinyModule

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="memory is bounded by RLIMIT_AS, links by /proc"
)

PROGRAM = Path(__file__).with_name("hostile.py")
HOSTILE, WAYS = (
    int(os.environ.get("HOSTILE", "1000")),
    99 if "HOSTILE" in os.environ else 4,
)
PROCESSES = 2
SECONDS = 200
"""CPU seconds that each process may take for its share of the cases. A reading that waits is ended after 20 s."""
MEMORY = 600_000_000
"""Bytes that reading any of them may take: a state.json of 10 MB that is all lists is the hungriest of them."""
QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}


@pytest.mark.timeout(
    0
)  # a busy machine is no fault of a reading: the programs bound their CPU time
def test_nothing_is_executed_and_all_of_it_is_refused_or_read(tmp_path):
    share = -(-HOSTILE // PROCESSES)
    environment = {
        **os.environ,
        "PYTHONPATH": str(PROGRAM.parents[2]),
        "OMP_NUM_THREADS": "1",
    }
    programs = []
    for number in range(PROCESSES):
        (directory := tmp_path / str(number)).mkdir()
        command = [
            sys.executable,
            str(PROGRAM),
            str(directory),
            "hostile",
            *map(str, (number * share, share, WAYS)),
        ]
        # Into files: a pipe that is read after the other's would fill, and its program wait.
        told = open(tmp_path / f"told-{number}", "w+")  # noqa: SIM115
        said = open(tmp_path / f"said-{number}", "w+")  # noqa: SIM115
        program = subprocess.Popen(
            command, stdout=told, stderr=said, text=True, env=environment
        )
        if "HOSTILE" not in os.environ:
            resource.prlimit(program.pid, resource.RLIMIT_CPU, (SECONDS, SECONDS))
        programs.append((program, told, said))
    cases = []
    for program, told, said in programs:
        code = program.wait()
        for file in (told, said):
            file.seek(0)
        cases += [json.loads(line) for line in told]
        error = said.read()
        told.close()
        said.close()
        assert code == 0, f"after case {cases[-1] if cases else None}:\n{error[-3000:]}"
    assert len(cases) == share * PROCESSES
    for case in cases:
        assert not case["done"], case
        assert set(case["endings"].values()) <= {"ok", "refused"}, case
        assert case["grown"] < MEMORY, case
    assert not list(tmp_path.glob("*/canary"))
    endings = Counter(ending for case in cases for ending in case["endings"].values())
    assert min(endings["ok"], endings["refused"]) > sum(endings.values()) / 5, (
        f"a draw that tests little: {endings}"
    )


def fit(directory, steps, ckpt_path=None):
    keeper = ModelCheckpoint(directory, every_n_train_steps=1)
    trainer = Trainer(max_steps=steps, callbacks=keeper, **QUIET)
    trainer.fit(TinyModule(), [torch.ones(2, 32)] * 8, ckpt_path=ckpt_path)


def test_a_checkpoint_cannot_have_others_deleted(tmp_path):
    other = write_checkpoint(tmp_path / "other", {})
    fit(tmp_path / "kept", 2)
    path = tmp_path / "kept" / "step-00000002"
    state = read_checkpoint(path)
    [shelf] = state["callbacks"].values()
    shelf["yielding"], shelf["kept"] = [str(other)], {**shelf["kept"], str(other): -1.0}
    write_checkpoint(path, state, info={"step": 2}, overwrite=True)
    fit(tmp_path / "kept", 4, ckpt_path=path)
    verify_checkpoint(other)


@pytest.mark.parametrize("name", ["index.json", ".lock"])
@pytest.mark.parametrize("what", ["pipe", "link to a device", "too large"])
def test_a_pipe_a_device_or_a_huge_file_in_place_of_a_file_does_not_block(
    tmp_path, name, what
):
    fit(tmp_path, 2)
    (tmp_path / name).unlink(missing_ok=True)
    if what == "pipe":
        os.mkfifo(tmp_path / name)
    elif what == "link to a device":
        (tmp_path / name).symlink_to("/dev/zero")
    else:
        (tmp_path / name).write_bytes(b"")
        os.truncate(tmp_path / name, 1 << 40)
    if name == "index.json":
        fit(tmp_path, 3, ckpt_path="last")
        assert json.loads((tmp_path / name).read_bytes())["names"] == {
            "last": "step-00000003"
        }
    else:
        with pytest.raises(CheckpointError, match="no checkpoint can be written here"):
            fit(tmp_path, 3, ckpt_path="last")
