"""``trainer-kit plan``: from a script to the lines that start it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from trainer_kit.commands.main import main

SCRIPT = """
import argparse, torch, trainer_kit as tk
from torch.utils.data import DataLoader

class Net(tk.TrainModule):
    def __init__(self, width):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
    def training_step(self, batch, batch_idx):
        return self.layers(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=64)
width = parser.parse_args().width
print("the script begins")
trainer = tk.Trainer(accelerator="gpu", devices=8, num_nodes=2, precision="bf16-mixed", logger="wandb")
trainer.fit(Net(width), DataLoader(torch.randn(64, width), batch_size=4))
raise SystemExit("the fit must not run")
"""


@pytest.fixture(autouse=True)
def script(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT, encoding="utf-8")


def run(*words):
    return CliRunner().invoke(main, ["plan", "train.py", *words])


def test_a_script_becomes_a_table_a_page_and_json():
    done = run(
        "--world",
        "16",
        "--device",
        "h200",
        "--html",
        "plan.html",
        "--",
        "--width",
        "128",
    )
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(
        "H200: 64 samples a step, at most 127 GB for a rank\n\n16 ranks\n"
    )
    assert "the script begins" in done.stderr, (
        "the script's output is not part of the result"
    )
    assert (
        'devices=8, num_nodes=2, precision="bf16-mixed", global_batch_size=64)'
        in done.stdout
    )
    assert (
        "--machine_rank RANK --main_process_ip HOST train.py --width 128\n"
        in done.stdout
    )
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "<title>Plan for H200</title>" in Path("plan.html").read_text(
        encoding="utf-8"
    )
    made = json.loads(
        run("--world", "16", "--device", "h200", "--strategy", "fsdp", "--json").stdout
    )
    assert {row["strategy"] for row in made["rows"]} == {"fsdp"}
    assert made["rows"][0]["traffic"][0]["bytes"] > 0


def test_memory_depends_on_the_scripts_arguments_and_nothing_fits_exits_with_1():
    words = ("--world", "1", "--device", "h200", "--max-memory", "1MB")
    assert run(*words).exit_code == 0
    done = run(*words, "--", "--width", "512")
    assert done.exit_code == 1
    assert "no configuration is known to fit" in done.stdout
    assert "single_device, bf16-mixed: needs" in done.stdout


def test_a_step_that_reads_a_value_is_planned_too():
    """A value for a log ended the plan: only weights and Adam's state, and exit code 1."""
    source = SCRIPT.replace(
        "        return self.layers(batch).square().mean()\n",
        "        loss = self.layers(batch).square().mean()\n"
        "        self.log('value', loss.item())\n"
        "        return loss\n",
    )
    assert "loss.item()" in source
    Path("train.py").write_text(source, encoding="utf-8")
    done = run("--world", "1", "--device", "h200")
    assert done.exit_code == 0, done.output
    assert "- not exact: the step cannot run without data (DataDependent" in done.stdout
    assert "a step ran for real on the CPU with 2 and 4 samples" in " ".join(
        done.stdout.split()
    )


def test_wrong_calls_exit_with_2():
    for words, text in (
        (("--world", "many", "--device", "h200"), "numbers of ranks, such as 8,64"),
        (("--world", "2", "--device", "h900"), "this device has no known data sheet"),
        (
            ("--world", "2", "--device", "h200", "--max-memory", "lots"),
            "--max-memory must be a number of bytes",
        ),
        (
            ("--world", "2", "--device", "h200", "--", "--height", "1"),
            "calls no Trainer.fit",
        ),
        (
            ("--world", "2", "--device", "h200", "--html", "none/plan.html"),
            "is not a writable directory",
        ),
        (
            ("--world", "2", "--device", "h200", "--strategy", "dpp"),
            "no strategy is called 'dpp'",
        ),
        (("--device", "h200"), "Missing option '--world'"),
    ):
        done = run(*words)
        assert done.exit_code == 2, done.output
        assert text in done.output


def test_errors_of_the_scripts_data_are_answered_in_three_lines():
    """A missing key of the dataset ended with the frames of click and of this library."""
    broken = (
        "class Broken(torch.utils.data.Dataset):\n"
        "    __len__ = lambda self: 8\n"
        "    def __getitem__(self, index):\n"
    )
    source = SCRIPT.replace(
        "parser =", f"{broken}        raise KeyError('pixels')\nparser =", 1
    )
    source = source.replace("torch.randn(64, width)", "Broken()")
    Path("train.py").write_text(source, encoding="utf-8")
    done = run("--world", "2", "--device", "h200")
    assert done.exit_code == 2, done.output
    assert (
        "train.py failed while the plan read the first batch of the training data (line 17)"
        in done.output
    )
    assert "found: KeyError: 'pixels'\n  fix:   run it first: " in done.output
    assert "Traceback" not in done.output


def test_a_wrong_argument_of_the_scripts_trainer_keeps_its_own_words():
    Path("train.py").write_text(
        SCRIPT.replace("num_nodes=2", "num_node=2"), encoding="utf-8"
    )
    done = run("--world", "2", "--device", "h200")
    assert (
        "failed before its Trainer.fit (line 18): Trainer has no argument 'num_node'"
        in done.output
    )
    assert done.output.count("found:") == done.output.count("fix:") == 1
    assert "did you mean 'num_nodes'?" in done.output
