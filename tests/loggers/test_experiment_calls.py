"""Calls of `logger.experiment` as modules and callbacks of other packages make them, in fits, read back."""

from __future__ import annotations

import csv
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainer_kit as tk
from tests.loggers.test_tensorboard import events
from tests.loggers.test_wandb import run
from trainer_kit.loggers import CSVLogger, DummyLogger, TensorBoardLogger


class Talkative(tk.LightningModule):
    """Writes to the first logger itself, and to each TensorBoard logger in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.example_input_array = torch.ones(1, 2)

    def forward(self, x):
        return self.layer(x)

    def on_fit_start(self):
        for logger in self.trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("start", "of the fit", 0)
                logger.log_graph(self)

    def training_step(self, batch, batch_idx):
        loss = self(batch[0]).square().mean()
        tensorboard = self.logger.experiment
        tensorboard.add_scalar("own/loss", loss, self.global_step)
        tensorboard.add_scalars(
            "both", {"one": loss.item(), "two": 2.0}, self.global_step
        )
        tensorboard.add_histogram("weights", self.layer.weight, self.current_epoch)
        self.log("loss", loss)
        return loss

    def on_train_epoch_end(self):
        tensorboard = self.logger.experiment
        tensorboard.add_image("image", torch.rand(3, 4, 4), self.current_epoch)
        tensorboard.add_images("images", torch.rand(2, 3, 4, 4), self.current_epoch)
        tensorboard.add_pr_curve(
            "curve", torch.tensor([0, 1]), torch.tensor([0.2, 0.7]), 0
        )
        tensorboard.add_text("end", "of an epoch", self.current_epoch)
        self.logger.log_metrics({"direct": 1.5}, step=self.global_step)
        self.logger.log_hyperparams({"late": 3})
        tensorboard.flush()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Pictures(tk.Callback):
    def on_train_end(self, trainer, module):
        figure = pytest.importorskip("matplotlib.figure").Figure()
        figure.subplots().plot([1, 2])
        trainer.logger.experiment.add_figure("figure", figure, trainer.global_step)


def fit(place: Path, **options) -> tk.Trainer:
    loggers = [
        TensorBoardLogger(place / "tb", log_graph=True),
        CSVLogger(place / "csv"),
    ]
    trainer = tk.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=loggers,
        log_every_n_steps=1,
        enable_progress_bar=False,
        **options,
    )
    trainer.logger.experiment.add_text("before", "the fit", 0)
    trainer.logger.log_hyperparams({"lr": 0.1})
    trainer.fit(Talkative(), DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2))
    return trainer


def test_a_fit_writes_what_other_packages_write(tmp_path: Path) -> None:
    trainer = fit(tmp_path, callbacks=[Pictures()])
    read = events(trainer.loggers[0].log_dir)
    tags = read.Tags()
    assert [path.name for path in (tmp_path / "tb" / "trainer_kit_logs").iterdir()] == [
        "version_0"
    ]
    assert {"own/loss", "direct", "loss"} <= {*tags["scalars"]}
    assert [event.step for event in read.Scalars("own/loss")] == [0, 1, 2, 3]
    assert [event.value for event in read.Scalars("direct")] == [1.5]
    assert tags["histograms"] == ["weights"]
    assert {"image", "figure", "images"} <= {*tags["images"]}
    assert {
        "before/text_summary",
        "start/text_summary",
        "end/text_summary",
        "curve",
    } <= {*tags["tensors"]}
    assert tags["graph"]
    both = Path(trainer.loggers[0].log_dir) / "both_two"
    assert [event.value for event in events(both).Scalars("both")] == [2.0] * 4
    with open(
        Path(trainer.loggers[1].log_dir) / "metrics.csv", newline=""
    ) as file:  # the second logger has its own
        rows = list(csv.DictReader(file))
    assert "loss" in rows[0]
    assert "own/loss" not in rows[0]
    assert trainer.loggers[0].hparams == {"lr": 0.1, "late": 3}


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_only_rank_zero_writes() -> None:
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box)
    trainer = fit(Path(box[0]), devices=2)
    assert isinstance(
        trainer.logger, TensorBoardLogger if dist.get_rank() == 0 else DummyLogger
    )
    dist.barrier()
    if dist.get_rank() == 0:
        found = events(trainer.logger.log_dir)
        assert [event.step for event in found.Scalars("own/loss")] == [
            0,
            1,
        ]  # half of the batches each
        assert (
            len(list(Path(box[0]).rglob("events.out*"))) == 3
        )  # the run's own, and one for each line of add_scalars
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(box[0])


@pytest.mark.slow
def test_weights_and_biases_gets_what_other_packages_log(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    (log,), answer = run(
        tmp_path,
        """
        import numpy, torch
        warnings.simplefilter("ignore")
        import trainer_kit as tk, wandb
        from trainer_kit.loggers import CSVLogger

        class Net(tk.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(2, 1)

            def training_step(self, batch, batch_idx):
                loss = self.layer(batch[0]).square().mean()
                self.logger.experiment.log({"custom": float(batch_idx), "trainer/global_step": self.global_step})
                return loss

            def on_train_epoch_end(self):
                for logger in self.trainer.loggers:
                    if isinstance(logger, WandbLogger):
                        logger.experiment.log({"picture": wandb.Image(numpy.zeros((2, 2, 3), "uint8"))})
                        logger.log_image("pictures", [numpy.zeros((2, 2, 3), "uint8")])
                        logger.experiment.summary["best"] = 0.5
                        artifact = wandb.Artifact("notes", type="text")
                        artifact.add_file(str(root / "notes.txt"))
                        logger.experiment.log_artifact(artifact)

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        (root / "notes.txt").write_text("a note")
        logger = WandbLogger("one", root, offline=True, project="p")
        logger.experiment.config.update({"before": "the fit"})
        trainer = tk.Trainer(
            max_epochs=1, accelerator="cpu", devices=1, logger=[logger, CSVLogger(root)], enable_progress_bar=False
        )
        trainer.fit(Net(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch_size=2))
        """,
    )
    rows = [row for row in log.history if "custom" in row]
    assert [row["custom"] for row in rows] == [0, 1, 2, 3]
    assert log.config["before"] == "the fit"
    assert log.summary["best"] == 0.5
    assert {"picture", "pictures"} <= {
        name.split(".")[0] for row in log.history for name in row
    }
    assert "notes" in {artifact.name for artifact in log.artifacts}
    assert answer == {}
