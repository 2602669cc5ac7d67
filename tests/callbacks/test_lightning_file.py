"""`ModelCheckpoint(also="lightning")`: a file that `torch.load` reads beside each checkpoint, for as long as it."""

from __future__ import annotations

import enum
from pathlib import Path

import pytest
import torch
from torch import nn

import trainer_kit as tk
from trainer_kit.callbacks import ModelCheckpoint
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.testing import TinyModule

BATCHES = [torch.ones(2, 32)] * 4


class Mode(enum.Enum):
    FAST = "fast"


class Net(TinyModule):
    def __init__(self, root=None, act=nn.ReLU, mode=Mode.FAST):
        super().__init__()
        self.save_hyperparameters()

    def on_save_checkpoint(self, checkpoint):
        checkpoint["loss"] = nn.CrossEntropyLoss(weight=torch.ones(2))


def fit(keeper, steps, ckpt_path=None, **options):
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    module = Net(Path("data"))
    trainer = tk.Trainer(
        **{**quiet, "devices": 1, "max_steps": steps, "callbacks": [keeper], **options}
    )
    trainer.fit(module, BATCHES, ckpt_path=ckpt_path)
    return trainer, module


def keeper(directory, **options):
    return ModelCheckpoint(
        directory, every_n_train_steps=1, also="lightning", **options
    )


@pytest.mark.parametrize("async_save", [True, False])
def test_a_file_beside_each_checkpoint_is_pruned_with_it(tmp_path, async_save):
    trainer, module = fit(keeper(tmp_path), 4, async_save=async_save)
    checkpoints = {Path(record.path).name for record in tk.checkpoints(tmp_path)}
    files = {path.name.removesuffix(".ckpt") for path in tmp_path.glob("*.ckpt")}
    assert files == checkpoints
    best = trainer.checkpoint_callback.best_model_path
    content = torch.load(f"{best}.ckpt", weights_only=True)
    for name, weight in module.state_dict().items():
        assert torch.equal(content["state_dict"][name], weight)
    assert content["global_step"] == 4
    assert (
        content["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["completed"]
        == 4
    )
    act = "torch.nn.modules.activation.ReLU"
    assert content["hyper_parameters"] == {
        "lr": 0.1,
        "root": "data",
        "act": act,
        "mode": "fast",
    }
    assert content["loss"]["state_dict"]["weight"].tolist() == [1.0, 1.0]


def test_a_resumed_run_and_an_overwritten_name(tmp_path):
    fit(keeper(tmp_path), 2)
    fit(keeper(tmp_path), 4, ckpt_path="last")
    assert not (tmp_path / "step-00000001.ckpt").exists()
    assert (tmp_path / "step-00000004.ckpt").exists()
    options = {"filename": "only", "enable_version_counter": False}
    fit(keeper(tmp_path / "more", **options), 3)
    assert (
        torch.load(tmp_path / "more" / "only.ckpt", weights_only=True)["global_step"]
        == 3
    )


@pytest.mark.world_size(2)
def test_a_sharded_run_writes_one_file(tmp_path):
    trainer, _ = fit(keeper(tmp_path), 2, strategy="fsdp", devices=2)
    trainer.strategy.world.broadcast(None)
    if trainer.is_global_zero:
        content = torch.load(tmp_path / "step-00000002.ckpt", weights_only=True)
        assert sorted(content["state_dict"]) == sorted(TinyModule().state_dict())
        assert content["optimizer_states"][0]["param_groups"][0]["params"] == [0, 1]


def test_other_words_and_urls_are_refused():
    with pytest.raises(ConfigurationError, match="also="):
        ModelCheckpoint(also="torch")
    with pytest.raises(ConfigurationError, match="local directories only"):
        fit(keeper("memory://lightning-files"), 1)
