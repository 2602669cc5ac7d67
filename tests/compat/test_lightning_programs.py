"""Programs in the published style of Lightning, moved by `trainer-kit migrate` and run to the end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from trainer_kit.commands.main import main

HEAD = """
import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def images(count=32):
    torch.manual_seed(0)
    return DataLoader(TensorDataset(torch.rand(count, 1, 8, 8), torch.zeros(count)), batch_size=8)
"""

AUTOENCODER = (
    HEAD
    + """
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

class LitAutoEncoder(L.LightningModule):
    def __init__(self, width=16):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 3))
        self.decoder = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 64))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        x = x.view(x.size(0), -1)
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x = batch[0].view(len(batch[0]), -1)
        self.log("val_loss", F.mse_loss(self.decoder(self.encoder(x)), x))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)

def main():
    best = ModelCheckpoint(monitor="val_loss")
    trainer = L.Trainer(OPTIONS, max_epochs=2, callbacks=[best, EarlyStopping("val_loss")], enable_progress_bar=False)
    trainer.fit(LitAutoEncoder(), images(), images())
    again = LitAutoEncoder.load_from_checkpoint(best.best_model_path)
    if trainer.is_global_zero:
        print("END", trainer.global_step, again.hparams.width, trainer.world_size)

if __name__ == "__main__":
    main()
"""
)

GAN = (
    HEAD
    + """
class GAN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = nn.Linear(4, 64), nn.Linear(64, 1)

    def training_step(self, batch):
        real = batch[0].flatten(1)
        opt_g, opt_d = self.optimizers()
        z = torch.randn(len(real), 4).type_as(real)
        self.toggle_optimizer(opt_g)
        g_loss = F.softplus(-self.discriminator(self.generator(z))).mean()
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()
        self.untoggle_optimizer(opt_g)
        self.toggle_optimizer(opt_d)
        fake = self.discriminator(self.generator(z).detach())
        d_loss = F.softplus(-self.discriminator(real)).mean() + F.softplus(fake).mean()
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        self.untoggle_optimizer(opt_d)
        self.log_dict({"d_loss": d_loss, "g_loss": g_loss}, prog_bar=True)

    def configure_optimizers(self):
        return [torch.optim.Adam(net.parameters(), lr=2e-4) for net in (self.generator, self.discriminator)], []

trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=2, enable_progress_bar=False)
trainer.fit(GAN(), images())
print("END", trainer.global_step, sorted(trainer.callback_metrics))
"""
)

CLI = (
    HEAD
    + """
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, DemoModel

class Timed(LightningCLI):
    def add_arguments_to_parser(self, parser):
        parser.add_argument("--width", default=5)
        parser.link_arguments("width", "model.out_dim")

cli = Timed(DemoModel, BoringDataModule, seed_everything_default=1, save_config_kwargs={"overwrite": True}, run=False)
cli.trainer.fit(cli.model, datamodule=cli.datamodule)
print("END", cli.trainer.global_step, cli.model.l1.out_features)
"""
)

FABRIC = (
    HEAD
    + """
from lightning.fabric import Fabric, seed_everything

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 2)

    def forward(self, x):
        return self.layer(x.flatten(1))

def main():
    seed_everything(1)
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    model, optimizer = Net(), None
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(images())
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y.long())
        fabric.backward(loss)
        optimizer.step()
    fabric.save("net", {"model": model})
    fabric.print("END", model.layer.out_features, type(model.module).__name__)

if __name__ == "__main__":
    main()
"""
)

PARALLEL = """
import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.utils.data import DataLoader

def parallelize(model: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
    tensor, data = device_mesh["tensor_parallel"], device_mesh["data_parallel"]
    if tensor.size() > 1:
        for block in model.blocks.values():
            parallelize_module(block, tensor, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        head = ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(model, tensor, {"head": head})
    if data.size() > 1:
        for name, block in model.blocks.items():
            model.blocks[name] = fully_shard(checkpoint_wrapper(block), mesh=data)
        fully_shard(model, mesh=data)
    return model

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleDict()
        for name in ("one", "two"):
            self.blocks[name] = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 4, bias=False)

    def forward(self, x):
        for block in self.blocks.values():
            x = x + block(x)
        return self.head(x)

def rows():
    torch.manual_seed(0)
    return DataLoader([(torch.randn(8), i % 4) for i in range(32)], batch_size=4)
"""

PARALLEL_TRAINER = (
    PARALLEL
    + """
from lightning.pytorch.strategies import ModelParallelStrategy

class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Net()

    def configure_model(self):
        parallelize(self.model, device_mesh=self.device_mesh)

    def training_step(self, batch):
        output = self.model(batch[0])
        with loss_parallel():
            return F.cross_entropy(output, batch[1])

    def backward(self, *args, **kwargs):
        with loss_parallel():
            super().backward(*args, **kwargs)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3, foreach=True)

if __name__ == "__main__":
    strategy = ModelParallelStrategy(SIZES)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, enable_progress_bar=False)
    with trainer.init_module(empty_init=True):
        model = Lit()
    trainer.fit(model, rows())
    trainer.print("END", trainer.global_step)
"""
)

PARALLEL_FABRIC = (
    PARALLEL
    + """
from lightning.fabric.strategies import ModelParallelStrategy

if __name__ == "__main__":
    strategy = ModelParallelStrategy(parallelize_fn=parallelize, SIZES)
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    with fabric.init_module(empty_init=True):
        model = Net()
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True))
    for i, batch in enumerate(fabric.setup_dataloaders(rows())):
        output = model(batch[0])
        with loss_parallel():
            fabric.backward(F.cross_entropy(output, batch[1]))
        optimizer.step()
        optimizer.zero_grad()
    fabric.save(path="checkpoint.pt", state={"model": model, "optimizer": optimizer, "iteration": i})
    fabric.print("END", i)
"""
)

TENSOR, DATA = (
    f"data_parallel_size={size}, tensor_parallel_size={2 // size}" for size in (1, 2)
)

ALONE = 'accelerator="cpu", devices=1'


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "arguments", "end"),
    [
        (AUTOENCODER.replace("OPTIONS, ", f"{ALONE}, "), [], "END 8 16 1"),
        (
            AUTOENCODER.replace(
                "OPTIONS, ", 'accelerator="cpu", devices=2, strategy="ddp", '
            ),
            [],
            "END 4 16 2",
        ),
        (
            AUTOENCODER.replace(
                "OPTIONS, ", 'accelerator="cpu", devices=2, strategy="fsdp", '
            ),
            [],
            "END 4 16 2",
        ),
        (GAN, [], "END 8 ['d_loss', 'g_loss']"),
        (
            CLI,
            [
                "--trainer.max_epochs=1",
                "--trainer.accelerator=cpu",
                "--trainer.devices=1",
            ],
            "END 64 5",
        ),
        (FABRIC, [], "END 2 Net"),
        (PARALLEL_TRAINER.replace("SIZES", TENSOR), [], "END 16"),
        (PARALLEL_TRAINER.replace("SIZES", DATA), [], "END 8"),
        (PARALLEL_FABRIC.replace("SIZES", TENSOR), [], "END 7"),
        (PARALLEL_FABRIC.replace("SIZES", DATA), [], "END 3"),
    ],
    ids=[
        "autoencoder",
        "ddp",
        "fsdp",
        "gan",
        "cli",
        "fabric",
        "tensor",
        "data",
        "fabric tensor",
        "fabric data",
    ],
)
def test_a_program_runs_after_migrate(
    text: str, arguments: list[str], end: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    moved = CliRunner().invoke(main, ["migrate", str(script), "--write"])
    assert (moved.exit_code, moved.output.splitlines()[-1].rpartition("; ")[2]) == (
        0,
        "0 findings",
    ), moved.output
    on_two = (
        'Fabric(accelerator="cpu", devices=2' in text
    )  # the Trainer starts its processes itself
    launched = (
        ["-m", "trainer_kit", "launch", "--num_processes", "2", "--cpu"]
        if on_two
        else []
    )
    made = subprocess.run(
        [sys.executable, *launched, "train.py", *arguments],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    assert end in made.stdout
