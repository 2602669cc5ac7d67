"""``trainer-kit checkpoint``: what it prints, and the codes it leaves with."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner

from trainer_kit.checkpoint import checkpoints, write_checkpoint, write_sharded
from trainer_kit.checkpoint.lock import DirectoryLock
from trainer_kit.checkpoint.store import lookup, mark
from trainer_kit.commands.main import main


def call(*arguments):
    result = CliRunner().invoke(main, ["checkpoint", *map(str, arguments)])
    return result.exit_code, result.output


@pytest.fixture
def kept(tmp_path):
    for step in (3, 6, 9):
        state = {
            "model": {"w": torch.full((2, 2), float(step))},
            "progress": {"step": step},
        }
        write_checkpoint(
            tmp_path / f"step-{step}", state, info={"step": step, "epoch": step // 4}
        )
    mark(tmp_path, last=tmp_path / "step-9", best=tmp_path / "step-6")
    return tmp_path


def damage(path):
    (path / "state.json").write_bytes(b"{}")


def test_ls(kept):
    damage(kept / "step-3")
    code, said = call("ls", kept)
    assert code == 0
    header, six, nine = said.splitlines()
    assert header.split() == [
        "CHECKPOINT",
        "STEP",
        "EPOCH",
        "SIZE",
        "SAVED",
        "(UTC)",
        "NAMES",
    ]
    assert re.fullmatch(
        r"step-6 +6 +1 +\S+ k?B +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  best", six
    )
    assert re.fullmatch(
        r"step-9 +9 +2 +\S+ k?B +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  last", nine
    )


def test_sharded_checkpoints_are_verified_compared_listed_and_exported(kept):
    state = {"model": {"w": torch.full((2, 2), 9.0)}, "progress": {"step": 9}}
    path = write_sharded(kept / "step-12", state, info={"step": 9, "epoch": 2})
    assert call("verify", path) == (0, f"{path}: ok\n")
    assert call("diff", kept / "step-9", path) == (0, "")
    assert re.search(r"^step-12 +9 +2 +\S+ k?B ", call("ls", kept)[1], re.MULTILINE)
    assert call("export", path, kept / "w.safetensors") == (
        0,
        f"{kept}/w.safetensors\n",
    )
    assert (
        safetensors.torch.load_file(kept / "w.safetensors")["w"].tolist()
        == [[9.0, 9.0]] * 2
    )
    (path / "model-00001-of-00001.safetensors").unlink()
    said = f"{path}: damaged: model-00001-of-00001.safetensors: step-12 lacks shard 1 of 1\n"
    assert call("verify", path) == (1, said)


def test_ls_of_nothing(tmp_path):
    assert call("ls", tmp_path) == (0, f"no checkpoints in {tmp_path}\n")
    assert call("ls") == (0, "no checkpoints in .\n")


def test_verify(kept):
    assert call("verify", kept / "step-3", kept / "step-6") == (
        0,
        f"{kept}/step-3: ok\n{kept}/step-6: ok\n",
    )
    damage(kept / "step-6")
    code, said = call("verify", kept)
    assert code == 1
    assert said.splitlines()[::2] == [f"{kept}/step-3: ok", f"{kept}/step-9: ok"]
    assert re.fullmatch(
        r".*/step-6: damaged: state\.json: 2 bytes, but \d+ were written",
        said.splitlines()[1],
    )


def test_verify_skips_what_is_not_a_checkpoint(kept):
    """As ``verify DIR/*`` names them: the index, and files of the user."""
    (kept / "notes.txt").write_text("x")
    (kept / "plots").mkdir()
    code, said = call("verify", *sorted(kept.iterdir()))
    assert code == 0
    assert said.splitlines() == [
        f"{kept}/index.json: not a checkpoint, skipped",
        f"{kept}/notes.txt: not a checkpoint, skipped",
        f"{kept}/plots: not a checkpoint, skipped",
        *(f"{kept}/step-{step}: ok" for step in (3, 6, 9)),
    ]


def test_verify_of_nothing_is_no_success(tmp_path):
    (tmp_path / "file").write_text("x")
    code, said = call("verify", tmp_path, tmp_path / "file")
    assert code == 1
    assert said.splitlines() == [
        f"{tmp_path}: not a checkpoint, skipped",
        f"{tmp_path}/file: not a checkpoint, skipped",
        "no checkpoint was verified",
    ]


def test_verify_names_what_is_left_of_a_checkpoint(kept):
    for name in ("manifest.json", "state.json"):
        (kept / "step-6" / name).unlink()
    code, said = call("verify", *sorted(kept.iterdir()))
    assert code == 1
    assert f"{kept}/step-6: damaged: not a checkpoint: it has no manifest.json" in said


@pytest.mark.parametrize(
    "place", ["version_0/checkpoints", "checkpoints", "lightning/version_0/checkpoints"]
)
def test_the_checkpoints_of_a_run_are_found_below_its_directory(
    kept, tmp_path_factory, place
):
    run = tmp_path_factory.mktemp("run")
    (run / place).parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(kept, run / place)
    (run / "report.html").write_text("x")
    code, said = call("ls", run)
    assert code == 0
    first, _, three, *_ = said.splitlines()
    assert first == f"{run / place}:"
    assert three.startswith("step-3 ")
    assert call("verify", run) == (
        0,
        "".join(f"{run / place}/step-{step}: ok\n" for step in (3, 6, 9)),
    )


def test_diff(kept):
    assert call("diff", kept / "step-3", kept / "step-3", "--exit-code") == (0, "")
    code, said = call("diff", kept / "step-3", kept / "step-9")
    assert code == 0
    assert said.splitlines() == [
        "info: step: value 3 != 9",
        "info: epoch: value 0 != 2",
        "model: w: values differ by up to 6 (float32 [2, 2])",
        "progress: step: value 3 != 9",
    ]
    assert call("diff", kept / "step-3", kept / "step-9", "--exit-code") == (1, said)
    damage(kept / "step-9")
    code, said = call("diff", kept / "step-3", kept / "step-9")
    assert code == 1
    assert said.startswith(f"Error: {kept}/step-9/state.json: 2 bytes, but ")


def test_export(kept):
    target = kept / "out.safetensors"
    assert call("export", kept / "step-3", target) == (0, f"{target}\n")
    assert torch.equal(
        safetensors.torch.load_file(target)["w"], torch.full((2, 2), 3.0)
    )
    assert call("export", kept / "step-3", kept / "x.y", "--format", "torch") == (
        0,
        f"{kept}/x.y\n",
    )
    assert torch.load(kept / "x.y", weights_only=True)["w"].shape == (2, 2)
    assert (
        call("export", kept / "step-3", kept / "hub", "--max-shard-size", "1KB")[0] == 0
    )
    assert os.listdir(kept / "hub") == ["model.safetensors"]
    code, said = call("export", kept / "step-3", target)
    assert code == 1
    assert "it exists already" in said


def test_repair(kept):
    damage(kept / "step-9")
    code, said = call("repair", kept)
    assert code == 0
    first, second = said.splitlines()
    assert first.startswith("set aside as step-9.damaged: state.json: 2 bytes, but ")
    assert second == "2 sound, the newest is step-6"
    assert [record.step for record in checkpoints(kept)] == [3, 6]
    assert lookup(kept, "last") == kept / "step-6"
    assert call("repair", kept) == (0, "2 sound, the newest is step-6\n")


def test_repair_of_a_directory_that_a_run_holds(kept):
    lock = DirectoryLock(kept)
    code, said = call("repair", kept)
    lock.release()
    assert code == 1
    assert f"locked by pid {os.getpid()}" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["checkpoint", "verify"],
        ["checkpoint", "verify", "absent"],
        ["checkpoint", "ls", "absent"],
        ["checkpoint", "diff", "."],
        ["checkpoint", "export", ".", "x.pt", "--format", "onnx"],
        ["checkpoint", "export", ".", "x.onnx"],
        ["checkpoint", "export", ".", "hub", "--max-shard-size", "lots"],
        ["checkpoint", "burn"],
        ["chekpoint"],
        ["--wrong"],
    ],
)
def test_a_wrong_call_leaves_with_2(arguments, tmp_path):
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "Error: " in result.output
    assert "Traceback" not in result.output
    assert os.listdir(tmp_path) == []


COMMANDS = {
    (): [
        "checkpoint",
        "config",
        "doctor",
        "env",
        "estimate-memory",
        "evaluate",
        "explain",
        "launch",
        "merge-weights",
        "migrate",
        "plan",
        "report",
        "test",
        "to-fsdp2",
        "tpu-config",
        "verify",
    ],
    ("checkpoint",): ["diff", "export", "import", "ls", "repair", "verify"],
}


@pytest.mark.parametrize("path", COMMANDS)
def test_the_commands_are_these(path):
    result = CliRunner().invoke(main, [*path, "--help"])
    assert result.exit_code == 0
    listed = result.output.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in listed] == COMMANDS[path]


@pytest.mark.parametrize("name", COMMANDS["checkpoint",])
def test_help_is_short(name):
    result = CliRunner().invoke(main, ["checkpoint", name, "-h"])
    assert result.exit_code == 0
    assert len(result.output.splitlines()) < 20


@pytest.mark.slow
def test_the_module_is_the_command(kept):
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": "1",
    }
    damage(kept / "step-9")
    done = subprocess.run(
        [sys.executable, "-m", "trainer_kit", "checkpoint", "verify", "step-6", "step-9"],
        capture_output=True, text=True, cwd=kept, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout.splitlines()[0] == "step-6: ok"
    code = "import sys, trainer_kit.commands.main; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert done.stdout == "False\n", "--help does not wait for torch"
