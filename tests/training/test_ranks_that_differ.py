"""Ranks that differ in data, callbacks or requests: every exchange is made by all of them or by none."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from trainer_kit import Callback, Trainer
from trainer_kit.callbacks import ModelCheckpoint
from trainer_kit.checkpoint.store import checkpoints
from trainer_kit.core.errors import RankError
from trainer_kit.testing import TinyModule

OPTIONS = {
    "accelerator": "cpu",
    "strategy": "ddp",
    "max_epochs": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
QUIET = {**OPTIONS, "barebones": True}


def rank():
    return int(os.environ["RANK"])


def loader(samples):
    return DataLoader(
        torch.randn(samples, 32, generator=torch.Generator().manual_seed(1)),
        batch_size=2,
    )


class HearsEpochs(Callback):
    def on_train_epoch_end(self, trainer, module):
        pass

    def on_validation_epoch_end(self, trainer, module):
        pass


@pytest.mark.world_size(2)
def test_a_callback_on_rank_0_alone_can_override_any_hook():
    trainer = Trainer(**QUIET, callbacks=[HearsEpochs()] if rank() == 0 else [])
    trainer.fit(TinyModule(), loader(8), loader(8))
    assert trainer.global_step == 2


@pytest.mark.world_size(2)
def test_intervals_hold_for_the_rank_with_most_batches():
    validated = []

    class Module(TinyModule):
        def on_validation_start(self):
            validated.append(self.trainer.global_step)

    trainer = Trainer(**QUIET, use_distributed_sampler=False, val_check_interval=0.5)
    trainer.fit(Module(), loader(8 if rank() == 0 else 16), loader(4))
    assert (validated, trainer.num_training_batches, trainer.progress.samples) == (
        [4, 8],
        8,
        24,
    )


@pytest.mark.world_size(2)
def test_checkpoints_are_taken_beyond_the_end_of_the_shorter_loader(tmp_path):
    keeper = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1)
    trainer = Trainer(**OPTIONS, use_distributed_sampler=False, callbacks=[keeper])
    trainer.fit(TinyModule(), loader(4 if rank() == 0 else 8))
    assert len(list(Path(tmp_path).glob("step-*"))) == 4


@pytest.mark.world_size(2)
@pytest.mark.parametrize("empty", [0, 1])
def test_a_rank_with_an_empty_loader_trains_with_the_others(empty):
    trainer = Trainer(**QUIET, use_distributed_sampler=False)
    trainer.fit(TinyModule(), loader(0 if rank() == empty else 8))
    assert (trainer.global_step, trainer.progress.samples) == (4, 8)


@pytest.mark.world_size(2)
def test_a_rank_without_validation_data_validates_with_the_others():
    trainer = Trainer(**QUIET, use_distributed_sampler=False)
    trainer.fit(TinyModule(), loader(8), [] if rank() == 0 else loader(8))
    assert "val_loss" in trainer.callback_metrics


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("hook", "asks"), [("on_train_end", 0), ("on_fit_end", 1)])
def test_a_checkpoint_that_one_rank_asks_for_at_the_end_is_taken(tmp_path, hook, asks):
    def ask(self, trainer, module):
        if trainer.global_rank == asks:
            trainer.request_checkpoint("the end")

    callback = type("Asks", (Callback,), {hook: ask})()
    trainer = Trainer(
        **OPTIONS,
        default_root_dir=tmp_path,
        callbacks=[callback],
        enable_checkpointing=False,
    )
    trainer.fit(TinyModule(), loader(8))
    assert (Path(tmp_path) / "checkpoints" / "step-00000002").is_dir()


@pytest.mark.world_size(2)
def test_a_checkpoint_callback_on_one_rank_is_an_error():
    trainer = Trainer(
        **OPTIONS,
        enable_checkpointing=False,
        callbacks=[ModelCheckpoint()] if rank() == 0 else [],
    )
    with pytest.raises(
        RankError,
        match=r"(?s)different checkpoint callbacks.*rank 0: ModelCheckpoint; rank 1: none",
    ):
        trainer.fit(TinyModule(), loader(8))


class KillsItself:
    """A logger that is told SIGTERM while the ranks are between an agreement and the end of its step."""

    def log_metrics(self, metrics, step):
        if step == 25:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.world_size(2)
def test_ranks_stop_together_when_a_signal_arrives_after_the_agreement(tmp_path):
    trainer = Trainer(
        **{**OPTIONS, "max_epochs": 100, "logger": KillsItself()},
        log_every_n_steps=25,
        default_root_dir=tmp_path,
    )
    with pytest.raises(SystemExit, match="143"):
        trainer.fit(TinyModule(), loader(400))
    steps = trainer.strategy.world.agree([trainer.global_step])
    assert steps[0] == steps[1]
    assert steps[0][0] > 25
    newest = checkpoints(trainer.checkpoint_callback.dirpath)[-1]
    assert newest.step == trainer.global_step


@pytest.mark.world_size(2)
def test_a_metric_object_is_reduced_on_a_rank_without_a_batch():
    torchmetrics = pytest.importorskip("torchmetrics")

    class Module(TinyModule):
        def __init__(self):
            super().__init__()
            self.mean = torchmetrics.MeanMetric()

        def validation_step(self, batch, batch_idx):
            self.mean(batch)
            self.log("mean", self.mean)

    trainer = Trainer(
        **{**OPTIONS, "max_epochs": 2}, enable_checkpointing=False
    )  # with a sanity check
    trainer.fit(Module(), loader(8), loader(1))
    assert trainer.callback_metrics["mean"].item() == pytest.approx(
        loader(1).dataset.mean().item()
    )


@pytest.mark.world_size(2)
def test_scaled_gradients_of_a_rank_that_never_had_data():
    trainer = Trainer(**QUIET, precision="16-mixed")
    trainer.fit(TinyModule(), loader(1))
    assert trainer.global_step == 1


@pytest.mark.world_size(2)
def test_epoch_values_of_a_resumed_rank_that_has_no_batch_left(tmp_path):
    """9 samples: 4, 4 and 1, which is rank 0's; rank 1's part of the epoch is in the checkpoint alone."""

    class Module(TinyModule):
        def training_step(self, batch, batch_idx):
            self.log("mean", batch.mean(), on_step=False, on_epoch=True)
            self.log("sum", batch.sum(), on_step=False, on_epoch=True, reduce_fx="sum")
            return super().training_step(batch, batch_idx)

    def trainer():
        keeper = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1)
        return Trainer(**OPTIONS, seed=1, callbacks=[keeper])

    whole, resumed = trainer(), trainer()
    whole.fit(Module(), loader(9))
    resumed.fit(Module(), loader(9), ckpt_path=Path(tmp_path) / "step-00000002")
    for name in ("mean", "sum"):
        assert resumed.callback_metrics[name].item() == pytest.approx(
            whole.callback_metrics[name].item()
        )
    assert resumed.callback_metrics["sum"].item() == pytest.approx(
        loader(9).dataset.sum().item(), abs=1e-4
    )


class Leaves(TinyModule):
    """The ranks that are named leave the epoch at its second batch."""

    def __init__(self, ranks):
        super().__init__()
        self.ranks = ranks

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 1 and rank() in self.ranks else None


class Watches(TinyModule):
    """A scheduler that watches what each rank has logged of its own batch, at steps at which nothing is reduced."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("own", float(batch_idx if rank() == 0 else -batch_idx), on_step=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0
        )
        return [optimizer], [
            {"scheduler": plateau, "interval": "step", "monitor": "own"}
        ]


@pytest.mark.world_size(2)
def test_hooks_that_leave_an_epoch_on_some_ranks():
    for ranks, samples, steps in (
        ((0, 1), 8, 1),
        ((0,), 5, 1),
        ((), 8, 2),
    ):  # of 5, rank 1 has no second batch
        trainer = Trainer(**QUIET)
        trainer.fit(Leaves(ranks), loader(samples))
        assert (ranks, trainer.global_step) == (ranks, steps)
    for ranks in ((0,), (1,)):
        with pytest.raises(
            RankError,
            match=f"(?s)returned -1 on some ranks only.*on rank {ranks[0]}, and not on rank",
        ):
            Trainer(**QUIET).fit(Leaves(ranks), loader(8))
    trainer, module = Trainer(**QUIET), Watches()
    trainer.fit(module, loader(24))
    rates = trainer.strategy.world.agree([trainer.optimizers[0].param_groups[0]["lr"]])
    assert rates[0] == rates[1] == [pytest.approx(0.1 * 0.5**5)]


@pytest.mark.world_size(2)
def test_a_logger_writes_on_rank_0_alone_and_is_known_on_all(tmp_path):
    class Asks(TinyModule):
        def training_step(self, batch, batch_idx):
            self.logger.experiment.add_scalar("x", 1.0, batch_idx)
            self.loggers[0].log_metrics({"y": 1.0}, batch_idx)
            return super().training_step(batch, batch_idx)

    module = Asks()
    options = {**OPTIONS, "logger": None, "enable_checkpointing": False}
    Trainer(**options, devices=2, default_root_dir=tmp_path).fit(module, loader(8))
    written = tmp_path / "trainer_kit_logs" / "version_0"
    logger = module.logger
    assert (logger.log_dir, logger.version, logger.name) == (
        str(written),
        0,
        "trainer_kit_logs",
    )
    assert [path.name for path in written.parent.iterdir()] == ["version_0"]
    assert len(list(written.glob("events.out.*"))) == 1


class AsksAlone(Callback):
    """Requests something on rank 0 alone, while the exchange of a step settles a save that has ended."""

    def on_checkpoint_committed(self, trainer, module, path):
        if rank() == 0:
            trainer.stop("enough")
            trainer.request_checkpoint("now")
            trainer.request_validation("now")


@pytest.mark.world_size(2)
def test_a_request_of_one_rank_after_the_votes_waits_for_the_next_exchange(tmp_path):
    keeper = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=4, save_top_k=-1)
    options = {**OPTIONS, "max_epochs": -1, "max_steps": 200}
    trainer = Trainer(**options, val_check_interval=4, callbacks=[keeper, AsksAlone()])
    trainer.fit(TinyModule(), loader(64), loader(4))
    assert trainer.global_step < 200
    assert Path(keeper.last_model_path).is_dir()
