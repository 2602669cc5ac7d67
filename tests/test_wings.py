"""Each wing can be deleted: the rest imports, trains, and says in words what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_architecture import WINGS, imports, modules, room

PACKAGE = Path(__file__).parents[1] / "trainer_kit"
PROGRAM = """
import importlib.util, pkgutil, sys
DELETED = sys.argv[1].split(",")
# An editable installation would look for a missing room in the checkout.
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder)]

import torch
import trainer_kit as tk
from torch import nn
from trainer_kit.testing import TinyModule

NEEDS_EXTRAS = {"trainer_kit.migrate.rewrite", "trainer_kit.testing.pytest_plugin"}

assert not [name for name in DELETED if importlib.util.find_spec(f"trainer_kit.{name}")]
for module in pkgutil.walk_packages(tk.__path__, "trainer_kit."):
    if module.name != "trainer_kit.__main__" and module.name not in NEEDS_EXTRAS:
        importlib.import_module(module.name)

module = TinyModule()
before = module.layer.weight.detach().clone()
trainer = tk.Trainer(max_epochs=1, accelerator="cpu", devices=1, barebones=True)
trainer.fit(module, [torch.randn(4, 32)] * 2)
assert trainer.global_step == 2
assert not torch.equal(before, module.layer.weight)

accelerator = tk.Accelerator(cpu=True)
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(batch).mean())
    optimizer.step()
    optimizer.zero_grad()
assert accelerator.num_processes == 1

for call in (
    lambda: trainer.plan(TinyModule(), [torch.randn(4, 32)], world=2),
    lambda: trainer.verify(TinyModule(), [torch.randn(4, 32)] * 2),
    lambda: trainer.accelerator,
    lambda: tk.Trainer(gpus=2),
    lambda: trainer.evaluate(),
    lambda: tk.EarlyStoping,
):
    try:
        call()
    except (tk.ConfigurationError, AttributeError) as error:
        print(str(error).splitlines()[0])
    else:
        print("done")
"""
GPUS = "Trainer has no argument 'gpus'"
EVALUATE = "the Trainer has no attribute 'evaluate'"
NAME = "module 'trainer_kit' has no attribute 'EarlyStoping'"


def missing(purpose: str, wing: str) -> str:
    return f"{purpose} needs trainer_kit.{wing}, which is not installed"


ANSWERS = {
    "compat": ["done", "done", missing("Trainer.accelerator", "compat")],
    "planning": [missing("Trainer.plan", "planning"), "done", "done"],
    "verify": ["done", missing("Trainer.verify", "verify"), "done"],
    "migrate": ["done", "done", "done"],
}


def with_dependents(wing: str) -> list[str]:
    """A wing, and those above that import it and so are deleted with it."""
    deleted = [wing]
    for other in WINGS[WINGS.index(wing) + 1 :]:
        targets = {
            room(target)
            for source, path in modules().items()
            if room(source) == other
            for target, _ in imports(path)
        }
        if targets.intersection(deleted):
            deleted.append(other)
    return deleted


@pytest.mark.slow
@pytest.mark.parametrize("wing", WINGS)
def test_the_rest_works_without_a_wing(wing, tmp_path):
    deleted = with_dependents(wing)
    rest = tmp_path / "trainer_kit"
    rest.mkdir()
    for entry in PACKAGE.iterdir():
        if entry.name not in {*deleted, "__pycache__"}:
            (rest / entry.name).symlink_to(entry)
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py", ",".join(deleted)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = [
        line
        for line in done.stdout.splitlines()
        if line == "done" or "needs trainer_kit" in line or " has no " in line
    ]
    assert answers == [*ANSWERS[wing], GPUS, EVALUATE, NAME], done.stdout


def test_only_migrate_needs_another_wing():
    assert {wing: with_dependents(wing) for wing in WINGS} == {
        "compat": ["compat", "migrate"],
        "planning": ["planning"],
        "verify": ["verify"],
        "migrate": ["migrate"],
    }
