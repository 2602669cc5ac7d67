"""`--ckpt_path` brings the module's arguments; words and files win; a run says which came from where."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trainer_kit as tk
from trainer_kit import LightningCLI

QUIET = [
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.enable_progress_bar=false",
]
QUIET += ["--trainer.logger=false", "--trainer.enable_model_summary=false"]
BATCHES = [torch.ones(2, 3)] * 2


class Sized(tk.TrainModule):
    def __init__(
        self,
        width: int,
        scale: float = 1.0,
        sizes: tuple[int, int] = (1, 1),
        act: type[nn.Module] = nn.ReLU,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(3, width)

    def training_step(self, batch, batch_idx):
        return self.net(batch).pow(2).mean()

    def test_step(self, batch, batch_idx):
        self.log("width", float(self.hparams.width))

    def forward(self, batch):
        return self.net(batch)

    def train_dataloader(self):
        return BATCHES

    test_dataloader = predict_dataloader = val_dataloader = train_dataloader

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def checkpoint(tmp_path):
    module = Sized(6, 3.0, (4, 5), nn.GELU)
    trainer = tk.Trainer(
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        devices=1,
    )
    trainer.fit(module)
    trainer.save_checkpoint(tmp_path / "c")
    return str(tmp_path / "c")


def run(command, *words, subclass=False):
    return LightningCLI(
        Sized,
        save_config_callback=None,
        subclass_mode_model=subclass,
        args=[command, *words, *QUIET],
    ).model.hparams


@pytest.mark.parametrize("command", ["test", "predict", "fit"])
@pytest.mark.parametrize("subclass", [False, True])
def test_arguments_come_from_the_checkpoint(command, subclass, checkpoint, capsys):
    words = ["--model=Sized"] if subclass else []
    if command == "fit":
        words.append("--trainer.max_epochs=2")
    hparams = run(command, *words, f"--ckpt_path={checkpoint}", subclass=subclass)
    assert (hparams.width, hparams.scale, tuple(hparams.sizes), hparams.act) == (
        6,
        3.0,
        (4, 5),
        nn.GELU,
    )
    said = capsys.readouterr().out
    assert f"hyperparameters of {checkpoint}: width=6, scale=3.0, sizes=(4, 5)" in said
    assert "differ from" not in said


def test_words_and_files_win(checkpoint, tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("model:\n  scale: 1.0\n")
    words = [
        f"--config={tmp_path / 'c.yaml'}",
        "--ckpt_path",
        checkpoint,
        "--model.sizes=[7,8]",
    ]
    hparams = run("test", *words)
    assert (hparams.width, hparams.scale, tuple(hparams.sizes)) == (6, 1.0, (7, 8))
    said = capsys.readouterr().out
    assert "from the command line or a configuration file: scale, sizes" in said
    assert (
        "hyperparameters of the module differ from the checkpoint's: scale=1.0 (checkpoint: 3.0), sizes="
        in said
    )


def test_the_last_of_two_paths_counts(checkpoint, tmp_path):
    """Options that are joined with their value were read before all others, wherever they stood."""
    words = ["--ckpt_path", str(tmp_path / "none"), f"--ckpt_path={checkpoint}"]
    assert run("test", *words).width == 6


def test_the_function_takes_them_too(checkpoint):
    result = tk.cli(Sized, args=["test", f"--ckpt_path={checkpoint}", *QUIET])
    assert result.module.hparams.width == 6


def test_a_missing_checkpoint_is_still_the_error_of_the_entry_point(tmp_path):
    with pytest.raises(tk.CheckpointError, match="does not exist"):
        run("test", f"--ckpt_path={tmp_path / 'none'}", "--model.width=2")


def test_a_module_with_other_hyperparameters_is_named(checkpoint, capsys):
    options = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    trainer = tk.Trainer(**options, devices=1, max_epochs=2)
    trainer.test(Sized(6, 5.0, (4, 5), nn.GELU), ckpt_path=checkpoint, verbose=False)
    line = "hyperparameters of the module differ from the checkpoint's: scale=5.0 (checkpoint: 3.0)"
    assert capsys.readouterr().out.count(line) == 1
    trainer.fit(Sized(6, 5.0, (4, 5), nn.GELU), ckpt_path=checkpoint)
    assert capsys.readouterr().out.count(line) == 1
    trainer.fit(Sized(6, 3.0, (4, 5), nn.ReLU), ckpt_path=checkpoint)
    assert "differ from" not in capsys.readouterr().out
