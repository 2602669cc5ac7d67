"""``trainer-kit config`` and ``env``: the wizard in a pseudo-terminal and without one, and what it writes."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from trainer_kit.commands.main import main
from trainer_kit.launch.configuration import read_configuration

ROOT = Path(__file__).parents[2]
WRITTEN = Path("trainer_kit/config.yaml")
DOWN, UP = "\x1b[B", "\x1b[A"


def environ(**more: str) -> dict[str, str]:
    here = os.getcwd()
    own = {name: value for name, value in os.environ.items() if name != "HF_HOME"}
    return {
        **own,
        "PYTHONPATH": str(ROOT),
        "XDG_CONFIG_HOME": here,
        "XDG_CACHE_HOME": here,
        **more,
    }


def call(*words: str, text: str | None = None, **more: str) -> tuple[int, str]:
    result = CliRunner(env=environ(**more)).invoke(main, words, input=text)
    return result.exit_code, result.output


class Terminal:
    """A person before a terminal: waits for a question, then types."""

    def __init__(self, *words: str, term: str = "xterm") -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trainer_kit", *words],
            stdin=slave, stdout=slave, stderr=slave, env=environ(TERM=term), start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.seen = ""

    def read(self, wait: float) -> bool:
        ready, _, _ = select.select([self.master], [], [], wait)
        try:
            data = os.read(self.master, 4096) if ready else b""
        except OSError:  # the other side is closed
            data = b""
        self.seen += data.decode()
        return bool(data)

    def answer(self, question: str, keys: str) -> None:
        deadline = time.monotonic() + 60
        while question not in self.seen:
            assert time.monotonic() < deadline, (
                f"{question!r} is not asked: {self.seen!r}"
            )
            self.read(0.1)
        self.seen = self.seen.partition(question)[2]
        os.write(self.master, keys.encode())

    def close(self) -> tuple[int, str]:
        deadline = time.monotonic() + 60
        while self.process.poll() is None or self.read(0):
            assert time.monotonic() < deadline, self.seen
            self.read(0.1)
        self.modes = termios.tcgetattr(self.master)[3]
        os.close(self.master)
        return self.process.wait(), self.seen


@pytest.mark.slow
def test_the_wizard_with_arrow_keys() -> None:
    person = Terminal("config")
    person.answer("Where will it run?", "\r")
    person.answer("On what?", "1" + DOWN + DOWN + UP + "\r")
    person.answer("How many machines?", "2\r")
    person.answer("Which of them", "1\r")
    person.answer("Address of machine 0?", "10.0.0.7\r")
    person.answer("Port there?", "70000\r")
    person.answer("Error: it is a port, 0 to 65535", "29511\r")
    person.answer("How many processes", "4\r")
    person.answer("Mixed precision?", "j\r")
    person.answer("Compile models", "2\r")
    person.answer("Check the data of collectives", "\x1bOB\r")
    code, seen = person.close()
    assert code == 0
    assert "written: " in seen
    assert yaml.safe_load(WRITTEN.read_text()) == {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_CPU",
        "use_cpu": True,
        "num_machines": 2,
        "machine_rank": 1,
        "main_process_ip": "10.0.0.7",
        "main_process_port": 29511,
        "num_processes": 4,
        "mixed_precision": "bf16",
        "dynamo_config": {"dynamo_backend": "INDUCTOR"},
        "debug": True,
    }


@pytest.mark.slow
def test_an_interrupted_wizard_restores_the_terminal() -> None:
    person = Terminal("config")
    person.answer("Where will it run?", DOWN)
    person.answer("➔ Amazon", "\x04")
    code, seen = person.close()
    assert code == 1
    assert "Aborted!" in seen
    assert "Traceback" not in seen
    assert person.modes & termios.ICANON
    assert person.modes & termios.ECHO
    assert not WRITTEN.exists()


@pytest.mark.slow
def test_a_terminal_without_arrow_keys_has_numbers() -> None:
    person = Terminal("config", term="dumb")
    for question in (
        "Where will it run?",
        "On what?",
        "Mixed precision?",
        "Compile models",
        "Check the data",
    ):
        person.answer(question, "\r")
    code, _ = person.close()
    assert code == 0
    assert yaml.safe_load(WRITTEN.read_text())["num_processes"] >= 1


def test_without_a_terminal_questions_are_plain() -> None:
    code, output = call("config", text="1\n2\n1\nmany\n2\n1\n1\n1\n")
    assert code == 0
    assert "Error: it is an integer" in output
    assert re.search(
        r"  2  several processes on the CPU\n(  .*\n)+number \[\d\]: 2\n", output
    )
    found = read_configuration(WRITTEN).values
    assert found["distributed_type"] == "MULTI_CPU"
    assert (found["use_cpu"], found["num_processes"], found["mixed_precision"]) == (
        True,
        2,
        "no",
    )
    assert not list(WRITTEN.parent.glob(".*"))
    code, output = call("config", text="1\n1\n1\n1\n1\n2\n")
    assert (code, output.splitlines()[-1]) == (0, "nothing was written")
    assert read_configuration(WRITTEN).values == found


def test_incomplete_answers_write_nothing() -> None:
    code, output = call("config", text="1\n2\n")
    assert code == 1
    assert "Aborted!" in output
    assert not WRITTEN.exists()


@pytest.mark.parametrize(
    ("number", "kind", "key", "value"),
    [
        (2, "FSDP", "fsdp_state_dict_type", "SHARDED_STATE_DICT"),
        (3, "DEEPSPEED", "zero_stage", 2),
        (4, "MEGATRON_LM", "megatron_lm_tp_degree", 1),
    ],
)
def test_engines_can_be_configured(
    number: int, kind: str, key: str, value: object
) -> None:
    code, output = call(
        "config",
        "--config_file",
        "other.yaml",
        text=f"1\n3\n1\n8\n{number}\n" + "\n" * 12,
    )
    assert code == 0, output
    found = read_configuration(Path("other.yaml")).values
    assert (found["distributed_type"], found["num_processes"], found[key]) == (
        kind,
        8,
        value,
    )
    assert "--config_file other.yaml" in output
    code, output = call("launch", "--config_file", "other.yaml", "train.py")
    assert code == 2
    assert "the script does not exist" in output


def test_default_and_show() -> None:
    code, output = call("config", "show")
    assert code == 2
    assert "no configuration file was found" in output
    assert call("config", "default", "--mixed-precision", "bf16")[0] == 0
    assert read_configuration(WRITTEN).values["mixed_precision"] == "bf16"
    code, output = call("config", "default")
    assert code == 1
    assert "exists and was not overwritten" in output
    assert read_configuration(WRITTEN).values["mixed_precision"] == "bf16"
    assert call("config", "default", "--force")[0] == 0
    assert read_configuration(WRITTEN).values["mixed_precision"] == "no"
    assert call("config", "default", "--force", "--mixed_precision", "fp8")[0] == 0
    assert read_configuration(WRITTEN).values["mixed_precision"] == "fp8"
    assert call("config", "default", "--force")[0] == 0
    code, output = call("config", "show")
    assert code == 0
    assert output.splitlines()[0] == str(WRITTEN.absolute())
    assert "mixed_precision: no" in output
    WRITTEN.write_text("num_proceses: 1\n")
    code, output = call("config", "show")
    assert code == 2
    assert (
        output
        == f"Error: {WRITTEN.absolute()}:1: num_proceses: unknown key, did you mean 'num_processes'?\n"
    )


def test_env_masks_secrets() -> None:
    WRITTEN.parent.mkdir()
    WRITTEN.write_text("additional_args: {api_key: hush2}\nmixed_precision: bf16\n")
    code, output = call("env", WANDB_API_KEY="hush1", TRAINER_KIT_DEBUG="1")
    assert code == 0
    assert "hush" not in output
    for line in (
        "trainer_kit: ",
        "torch: ",
        "accelerator: ",
        "$TRAINER_KIT_DEBUG: 1",
        "$WANDB_API_KEY: ***",
    ):
        assert line in output
    assert f"configuration: {WRITTEN.absolute()}\n" in output
    assert "  mixed_precision: bf16\n" in output
    WRITTEN.write_text("[")
    code, output = call("env")
    assert code == 0
    assert "unreadable" in output
