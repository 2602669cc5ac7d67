"""The demo files of Lightning's wheel, after ``trainer-kit migrate``, beside the same files under Lightning itself.

They need the packages lightning and torchmetrics, which ask for more than constraints.txt has: ``make test-lightning``
puts them into a directory of their own, and the variable LIGHTNING_FILES names it.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from trainer_kit.commands.main import main

SITE = os.environ.get("LIGHTNING_FILES", "")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not SITE, reason="needs Lightning's wheel: make test-lightning"),
]
ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import warnings

import lightning as L
import torch
from files.boring_classes import (
    BoringDataModule, BoringModel, DemoModel, ManualOptimBoringModel, RandomDataset,
)
from files.lstm import LightningLSTM
from files.mnist_datamodule import MNISTDataModule
from files.transformer import LightningTransformer, WikiText2
from torch.utils.data import DataLoader

warnings.simplefilter("ignore")
torch.set_num_threads(1)


def trainer():
    return L.Trainer(
        max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )


def trained(module):
    for part in module.modules():  # Lightning's loaders draw from the generator of dropout
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        elif isinstance(part, (torch.nn.MultiheadAttention, torch.nn.LSTM)):
            part.dropout = 0.0
    trainer().fit(module)  # with its own loader
    return module


def boring(make):
    L.seed_everything(1)
    module, loop = make(), trainer()
    data = BoringDataModule()
    loop.fit(module, data)
    loop.validate(module, data)
    loop.test(module, data)
    assert len(loop.predict(module, data)) > 0
    return module


def demo():
    L.seed_everything(1)
    module = DemoModel(32, 2)
    module.training_step = lambda batch, batch_idx: module(batch).square().mean()
    trainer().fit(module, DataLoader(RandomDataset(32, 16), batch_size=4))
    return module


def transformer():
    L.seed_everything(1)
    module = LightningTransformer(vocab_size=WikiText2(download=False).vocab_size)
    return trained(module)


def lstm():
    L.seed_everything(1)
    module = LightningLSTM(vocab_size=WikiText2(download=False).vocab_size)
    return trained(module)


def mnist():
    L.seed_everything(1)
    data = MNISTDataModule(".", val_split=8, num_workers=0, batch_size=4)
    data.prepare_data()
    data.setup("fit")
    assert (len(data.train_dataloader().dataset), len(data.val_dataloader().dataset)) == (24, 8)
    module = torch.nn.Linear(784, 10)
    x, y = data.train_dataloader().dataset[0]
    torch.nn.functional.cross_entropy(module(x.view(1, -1)), torch.as_tensor([int(y)])).backward()
    return module


made = {
    "boring": boring(BoringModel),
    "manual": boring(ManualOptimBoringModel),
    "demo": demo(),
    "transformer": transformer(),
    "lstm": lstm(),
    "mnist": mnist(),
}
torch.save({name: module.state_dict() for name, module in made.items()}, "end.pt")
"""


def ended(place: Path, moved: bool) -> dict[str, dict[str, torch.Tensor]]:
    """The end weights of each part of the program, before or after the move."""
    theirs = Path(SITE) / "lightning" / "pytorch" / "demos"
    (place / "files").mkdir(parents=True)
    for name in ("boring_classes", "lstm", "mnist_datamodule", "transformer"):
        shutil.copy(theirs / f"{name}.py", place / "files")
    (place / "program.py").write_text(PROGRAM, "utf-8")
    draw = random.Random(0)
    lines = (
        " ".join(draw.choice(("the", "a", "cat", "dog", "sat")) for _ in range(12))
        for _ in range(300)
    )
    (place / "data").mkdir()
    (place / "data" / "wikitext-2.txt").write_text("\n".join(lines), "utf-8")
    stored = place / "MNIST" / "complete"
    stored.mkdir(parents=True)
    drawn = torch.Generator().manual_seed(0)
    images = torch.randint(256, (32, 28, 28), dtype=torch.uint8, generator=drawn)
    for name in ("training.pt", "test.pt"):
        torch.save((images, torch.arange(32) % 10), stored / name)
    if moved:
        result = CliRunner().invoke(main, ["migrate", str(place), "--write"])
        assert "lightning" not in "".join(
            line
            for line in (place / "files" / "boring_classes.py")
            .read_text("utf-8")
            .splitlines()
            if "import" in line
        ).replace("lightning_utilities", ""), result.output
    path = os.pathsep.join([str(ROOT), *([] if moved else [SITE])])
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=place,
        env={
            **os.environ,
            "PYTHONPATH": path,
            "PL_USE_MOCKED_MNIST": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, dict[str, torch.Tensor]] = torch.load(place / "end.pt")
    return found


def test_the_demo_files_of_the_wheel_train_as_under_lightning(tmp_path: Path) -> None:
    theirs, ours = (ended(tmp_path / str(moved), moved) for moved in (False, True))
    assert len(theirs) == 6
    for name, weights in theirs.items():
        torch.testing.assert_close(ours[name], weights, rtol=0, atol=0, msg=name)
