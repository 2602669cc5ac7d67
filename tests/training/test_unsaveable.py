"""Objects that users put into checkpoints: stored and restored, or named before the first step, or left out."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import trainer_kit as tk
from trainer_kit.callbacks import ModelCheckpoint
from trainer_kit.checkpoint import read_checkpoint
from trainer_kit.core.errors import CheckpointError, ConfigurationError
from trainer_kit.testing import TinyModule

BATCHES = [torch.ones(2, 32)] * 2


class Scaler:
    def __init__(self, mean=3.0):
        self.mean = mean


@dataclasses.dataclass
class Settings:
    horizon: int
    loss: nn.Module


class Stores(TinyModule):
    """Keeps what `on_save_checkpoint` is to store in an attribute."""

    def __init__(self, value=None):
        super().__init__()
        self.value, self.calls, self.loaded = value, 0, None

    def on_save_checkpoint(self, checkpoint):
        self.calls += 1
        checkpoint["value"] = self.value

    def on_load_checkpoint(self, checkpoint):
        self.loaded = checkpoint.get("value")


class Late(TinyModule):
    """Its source does not show before a save what is stored."""

    def on_save_checkpoint(self, checkpoint):
        for name in ("fine", "scaler"):
            checkpoint[name] = 1 if name == "fine" else Scaler()


class New(TinyModule):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["scaler"] = Scaler()


class HasState(tk.Callback):
    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return {"count": 1, "nested": {"scaler": self.value, "plain": 2}}


class HookOfCallback(tk.Callback):
    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["extra"] = {"scaler": Scaler(), "plain": 1}


class PositionalHook(tk.Callback):
    """With its parameters as the base class declares them."""

    def on_save_checkpoint(self, trainer, pl_module, checkpoint, /):
        checkpoint["scaler"] = Scaler()


class Data(tk.DataModule):
    def train_dataloader(self):
        return BATCHES

    def state_dict(self):
        return {"scaler": Scaler(), "seen": 4}


def fit(
    directory, module, *callbacks, data=None, ckpt_path=None, max_steps=2, **options
):
    keeper = ModelCheckpoint(directory, every_n_train_steps=2)
    options = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **options,
    }
    trainer = tk.Trainer(
        max_steps=max_steps,
        callbacks=[keeper, *callbacks],
        accelerator="cpu",
        devices=1,
        **options,
    )
    loaders = BATCHES if data is None else None
    try:
        trainer.fit(module, loaders, datamodule=data, ckpt_path=ckpt_path)
    finally:
        steps.append(trainer.global_step)
    return directory / "step-00000002"


steps: list[int] = []


def test_a_module_a_dataclass_and_named_things_come_back(tmp_path):
    settings = Settings(4, nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0])))
    path = fit(tmp_path, Stores([settings, nn.MSELoss(), nn.ReLU]))
    loaded = Stores()
    fit(tmp_path, loaded, ckpt_path=path, max_steps=4)
    again, loss, kind = loaded.loaded
    assert type(again) is Settings
    assert again.horizon == 4
    assert again.loss.weight.tolist() == [1.0, 3.0]
    assert type(loss) is nn.MSELoss
    assert kind is nn.ReLU
    assert Stores.load_from_checkpoint(path).loaded[0].horizon == 4


@pytest.mark.parametrize(
    ("module", "callbacks", "data", "key"),
    [
        (Stores(Scaler()), [], None, "Stores.on_save_checkpoint.value"),
        (New(), [], None, "New.on_save_checkpoint.scaler"),
        (
            TinyModule(),
            [HookOfCallback()],
            None,
            "HookOfCallback.on_save_checkpoint.extra.scaler",
        ),
        (
            TinyModule(),
            [PositionalHook()],
            None,
            "PositionalHook.on_save_checkpoint.scaler",
        ),
        (TinyModule(), [HasState(Scaler())], None, "callbacks.HasState.nested.scaler"),
        (TinyModule(), [], Data(), "datamodule.scaler"),
    ],
    ids=[
        "attribute",
        "new object",
        "callback's hook",
        "positional parameters",
        "callback's state",
        "datamodule",
    ],
)
def test_what_cannot_be_saved_is_an_error_before_the_first_step_or_a_line(
    module, callbacks, data, key, tmp_path, capsys
):
    with pytest.raises(
        CheckpointError, match=r"(?s)Scaler cannot be saved.*codec.*drop"
    ) as caught:
        fit(tmp_path / "raise", module, *callbacks, data=data)
    assert caught.value.key == key
    assert steps[-1] == 0
    assert isinstance(module, Stores) <= (getattr(module, "calls", 0) == 0)
    capsys.readouterr()
    path = fit(tmp_path / "drop", module, *callbacks, data=data, on_unsaveable="drop")
    said = capsys.readouterr().out
    saved_key = key.partition("on_save_checkpoint.")[2] or key
    assert said.count("checkpoints are saved without ") == 1
    assert f"checkpoints are saved without {saved_key}: " in said
    state = read_checkpoint(path)
    assert '"scaler"' not in (path / "state.json").read_text()
    if data is not None:
        assert state["datamodule"] == {"seen": 4}
    if callbacks and isinstance(callbacks[0], HasState):
        assert state["callbacks"]["HasState"] == {"count": 1, "nested": {"plain": 2}}


def test_what_only_a_save_sees_is_left_out_and_training_goes_on(tmp_path, capsys):
    path = fit(tmp_path, Late())
    assert steps[-1] == 2
    assert read_checkpoint(path)["fine"] == 1
    assert (
        "checkpoints are saved without scaler: a value of type"
        in capsys.readouterr().out
    )


def test_a_codec_stores_it(tmp_path, monkeypatch):
    class Registered(Scaler):
        pass

    tk.checkpoint.codec(Registered, lambda scaler: scaler.mean, Registered)
    path = fit(tmp_path, Stores(Registered(5.0)), HasState(Registered(6.0)))
    loaded = Stores.load_from_checkpoint(path).loaded
    assert type(loaded) is Registered
    assert loaded.mean == 5.0
    assert (
        read_checkpoint(path)["callbacks"]["HasState"]["nested"]["scaler"].mean == 6.0
    )


class Takes(TinyModule):
    def __init__(self, loss, activation=nn.ReLU, function=torch.tanh, optimizer=None):
        super().__init__()
        self.save_hyperparameters()


def own_function(x):
    return x


def test_modules_classes_and_functions_among_hyperparameters_come_back(
    tmp_path, capsys
):
    path = fit(tmp_path, Takes(nn.HuberLoss(delta=0.5), nn.GELU, own_function))
    assert "repr" not in capsys.readouterr().out
    again = Takes.load_from_checkpoint(path).hparams
    assert again.loss.delta == 0.5
    assert again.activation is nn.GELU
    assert again.function is own_function


def test_a_hyperparameter_whose_function_is_not_imported_is_asked_for(
    tmp_path, monkeypatch
):
    path = fit(tmp_path, Takes(nn.MSELoss(), function=own_function))
    monkeypatch.delattr(f"{__name__}.own_function")
    with pytest.raises(
        ConfigurationError, match=r"(?s)only the repr.*function.*own_function"
    ):
        Takes.load_from_checkpoint(path)
    assert (
        Takes.load_from_checkpoint(path, function=torch.tanh).hparams.function
        is torch.tanh
    )


def test_secrets_inside_a_dataclass_are_masked(tmp_path):
    path = fit(tmp_path, Takes(Secret("abc")))
    assert "abc" not in (path / "state.json").read_text()


@dataclasses.dataclass
class Secret:
    api_key: str


def test_an_unknown_word_is_refused():
    with pytest.raises(ConfigurationError, match='"raise" or "drop"'):
        tk.Trainer(on_unsaveable="ignore")
