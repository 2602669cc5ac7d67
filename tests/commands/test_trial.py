"""`trainer-kit test`: says OK where training works, and what is wrong where it does not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from trainer_kit.checkpoint import write_checkpoint
from trainer_kit.commands import trial as command
from trainer_kit.commands.main import main
from trainer_kit.commands.trial_run import STEPS, TrialModule, plain_weights

pytestmark = pytest.mark.slow  # programs are started

ROOT = Path(__file__).resolve().parents[2]


def call(tmp_path, *words, prelude=""):
    (tmp_path / "sitecustomize.py").write_text(prelude)
    paths = f"{tmp_path}{os.pathsep}{ROOT}"
    return subprocess.run(
        [sys.executable, "-m", "trainer_kit", "test", *words],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": paths,
            "XDG_CONFIG_HOME": str(tmp_path),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def levels(done):
    return [line.split("  ")[0] for line in done.stdout.splitlines() if line[:1] != " "]


@pytest.mark.slow
def test_one_process(tmp_path):
    done = call(tmp_path, "--accelerator=cpu")
    assert (done.returncode, levels(done)) == (0, ["OK"] * 4), done.stdout
    assert "trained on 1 x cpu, single_device, 32-true" in done.stdout
    assert "resumed in new processes, with the same bits" in done.stdout
    assert sorted(
        path.name for path in tmp_path.iterdir() if path.name != "__pycache__"
    ) == ["sitecustomize.py"]


@pytest.mark.slow
def test_two_processes_in_half_precision(tmp_path):
    done = call(tmp_path, "--accelerator=cpu", "--devices=2", "--precision=16-mixed")
    assert (done.returncode, levels(done)) == (0, ["OK"] * 4), done.stdout
    assert "trained on 2 x cpu, ddp, 16-mixed" in done.stdout


TWO = "distributed_type: MULTI_CPU\nnum_processes: 2\nmixed_precision: bf16\n"


@pytest.mark.slow
def test_the_default_configuration_file_is_used(tmp_path):
    file = tmp_path / "trainer_kit" / "config.yaml"
    file.parent.mkdir()
    file.write_text(TWO)
    done = call(tmp_path)
    assert (done.returncode, levels(done)) == (0, ["OK"] * 4), done.stdout
    assert f"using {file}" in done.stdout
    assert "trained on 2 x cpu, ddp, bf16-mixed" in done.stdout


def test_a_file_and_options_are_a_wrong_call(tmp_path):
    (tmp_path / "two.yaml").write_text("num_processes: 2\n")
    done = call(tmp_path, "--config_file=two.yaml", "--devices=1")
    assert done.returncode == 2
    assert "cannot be combined" in done.stderr


@pytest.mark.slow
def test_a_rank_that_computes_wrongly_is_reported(tmp_path):
    prelude = """
import os
if os.environ.get("LOCAL_RANK") == "1":
    import torch
    right = torch.nn.functional.mse_loss
    torch.nn.functional.mse_loss = lambda x, y: right(x, -5 * y)
"""
    (tmp_path / "two.yaml").write_text(TWO)
    done = call(tmp_path, "--config_file=two.yaml", prelude=prelude)
    assert done.returncode == 1, done.stdout
    assert levels(done) == ["OK", "OK", "WRONG"]
    assert "using two.yaml" in done.stdout
    assert "trained on 2 x cpu, ddp, bf16-mixed" in done.stdout
    assert "training comes out differently from a plain loop" in done.stdout


def test_an_unknown_word(tmp_path):
    done = call(tmp_path, "--strategy=dpd")
    assert done.returncode == 1
    assert "no strategy is called 'dpd'" in done.stdout
    assert "did you mean 'ddp'?" in done.stdout
    assert "Traceback" not in done.stdout


def test_a_run_that_does_not_end_is_terminated(tmp_path):
    began = time.monotonic()
    done = call(
        tmp_path,
        "--timeout=2",
        "--accelerator=cpu",
        prelude="import sys, time\n'test' in sys.argv or time.sleep(90)\n",
    )
    assert done.returncode == 124
    assert done.stdout.startswith(
        "TIMEOUT  the run that was started did not finish within the 2 s for all runs"
    )
    assert "try --timeout=6" in done.stdout
    assert "WRONG" not in done.stdout, (
        "running out of time says nothing about the result"
    )
    assert time.monotonic() - began < 60


def left(directory, weights):
    for step in (STEPS // 2, STEPS):
        write_checkpoint(
            directory / "checkpoints" / f"step-{step}",
            {"model": weights},
            info={"step": step},
        )
    return directory


def check(capsys, function, *arguments):
    try:
        function(*arguments)
    except SystemExit as leaving:
        return leaving.code, capsys.readouterr().out
    return 0, capsys.readouterr().out


def test_weights_that_differ_from_a_plain_loop_are_reported(tmp_path, capsys):
    about = {"world_size": 1, "device": "cpu", "precision": "32-true"}
    before, after = plain_weights(1)
    code, said = check(
        capsys, command._check_weights, left(tmp_path / "right", after), about
    )
    assert (code, said.count("OK")) == (0, 2)
    off = {name: tensor + 1e-3 for name, tensor in after.items()}
    code, said = check(
        capsys, command._check_weights, left(tmp_path / "off", off), about
    )
    assert (code, "WRONG  training comes out differently" in said) == (1, True)
    still = {name: tensor.clone() for name, tensor in before.items()}
    assert (
        check(capsys, command._check_weights, left(tmp_path / "still", still), about)[0]
        == 1
    )
    nan = {
        name: torch.full_like(tensor, float("nan")) for name, tensor in after.items()
    }
    assert (
        check(capsys, command._check_weights, left(tmp_path / "nan", nan), about)[0]
        == 1
    )
    (tmp_path / "right/checkpoints/step-6/model.safetensors").write_bytes(b"x")
    code, said = check(capsys, command._check_weights, tmp_path / "right", about)
    assert (code, "WRONG" in said) == (1, True)


def test_a_resume_with_other_bits(tmp_path, capsys):
    about = {"world_size": 1, "device": "cpu", "precision": "32-true"}
    weights = {
        name: tensor.clone() for name, tensor in TrialModule().state_dict().items()
    }
    one, same = left(tmp_path / "one", weights), left(tmp_path / "same", weights)
    assert check(capsys, command._check_resume, one, same, about)[0] == 0
    weights["layers.0.bias"][3] += 1e-7
    code, said = check(
        capsys, command._check_resume, one, left(tmp_path / "other", weights), about
    )
    assert (code, "WRONG  a resumed run ends with other weights" in said) == (1, True)


def test_completion_and_help(tmp_path):
    script = tmp_path / "trainer-kit"
    script.write_text("from trainer_kit.commands.main import main\nmain()\n")
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}

    def ask(**variables):
        done = subprocess.run(
            [sys.executable, str(script)],
            env={**environ, **variables},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    asked = {
        "_TRAINER_KIT_COMPLETE": "bash_complete",
        "COMP_WORDS": "trainer-kit mer",
        "COMP_CWORD": "1",
    }
    assert ask(**asked) == "plain,merge-weights\n"
    asked |= {"COMP_WORDS": "trainer-kit test --pre", "COMP_CWORD": "2"}
    assert ask(**asked) == "plain,--precision\n"
    assert "complete -o nosort -F _trainer_kit_completion trainer-kit" in ask(
        _TRAINER_KIT_COMPLETE="bash_source"
    )
    helped = CliRunner().invoke(main, ["--help"]).output
    assert len(helped.splitlines()) < 30
