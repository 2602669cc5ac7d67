"""Each engine is one package: a copy of the library without these packages lacks the engines, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ("deepspeed", "megatron", "xla")
PROGRAM = """
import pathlib

import torch

import trainer_kit as tk
from trainer_kit.core.errors import RegistryError
from trainer_kit.testing import TinyModule

assert pathlib.Path(tk.__file__).is_relative_to(pathlib.Path.cwd()), tk.__file__

model = TinyModule()
trainer = tk.Trainer(max_steps=2, accelerator="cpu", devices=1, default_root_dir="runs", enable_progress_bar=False)
trainer.fit(model, [torch.randn(4, 32)] * 2)
assert trainer.global_step == 2

accelerator = tk.Accelerator(cpu=True)
net = torch.nn.Linear(4, 1)
net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
before = net.weight.detach().clone()
accelerator.backward(net(torch.ones(2, 4)).sum())
optimizer.step()
assert not torch.equal(net.weight, before)

for word in %s:
    try:
        tk.Trainer(strategy=word, accelerator="cpu", devices=1)
    except RegistryError as error:
        print(str(error).splitlines()[0], "|", error.found)
"""


@pytest.mark.slow
def test_a_library_without_the_engines_trains_and_names_the_missing_one(
    tmp_path: Path,
) -> None:
    copy = tmp_path / "trainer_kit"
    shutil.copytree(
        ROOT / "trainer_kit",
        copy,
        ignore=shutil.ignore_patterns("__pycache__", *ENGINES),
    )
    assert not any((copy / "strategies" / engine).exists() for engine in ENGINES)
    words = ("deepspeed", "deepspeed_stage_3_offload", "megatron", "xla")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM % (words,)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = [line for line in done.stdout.splitlines() if "|" in line]
    assert [answer.split(" | ")[0] for answer in answers] == [
        f"strategy {word!r} could not be imported" for word in words
    ]
    for word, answer in zip(words, answers, strict=True):
        assert (
            f"module 'trainer_kit.strategies' has no attribute '{word.split('_')[0]}'"
            in answer
        )
