"""`TrainModule` by itself: its helpers outside a Trainer, freezing, toggling, saving and loading, exporting."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from trainer_kit import LightningModule, Trainer, TrainModule
from trainer_kit.core.errors import ConfigurationError

QUIET = {"accelerator": "cpu", "barebones": True}


class Net(TrainModule):
    def __init__(self, width=2, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(width, 1)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.layer(self.dropout(x))

    def training_step(self, batch, batch_idx):
        return self(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def test_it_goes_by_lightning_s_name_too():
    assert LightningModule is TrainModule


def test_it_is_a_plain_module_without_a_trainer():
    net = Net()
    assert (net.global_step, net.current_epoch, net.global_rank, net.local_rank) == (
        0,
        0,
        0,
        0,
    )
    assert (net.logger, net.loggers) == (None, [])
    assert net.device == torch.device("cpu")
    assert net.dtype == torch.float32
    assert net.double().dtype == torch.float64


def test_a_module_without_tensors_has_a_device_and_a_dtype():
    assert (TrainModule().device, TrainModule().dtype) == (
        torch.device("cpu"),
        torch.float32,
    )


def test_a_missing_trainer_is_an_error_that_names_when_it_exists():
    with pytest.raises(
        ConfigurationError, match=r"(?s)Net is not attached to a Trainer.*fix"
    ):
        _ = Net().trainer


def test_logging_without_a_trainer_warns_and_continues():
    with pytest.warns(UserWarning, match=r"log\('loss'\) outside a Trainer"):
        Net().log("loss", 1.0)


def test_prediction_is_forward_by_default():
    net = Net().eval()
    x = torch.randn(3, 2)
    assert torch.equal(net.predict_step(x, 0), net(x))


def test_freeze_and_unfreeze():
    net = Net()
    net.freeze()
    assert not any(p.requires_grad for p in net.parameters())
    assert not net.training
    assert not net.dropout.training
    net.unfreeze()
    assert all(p.requires_grad for p in net.parameters())
    assert net.dropout.training


def test_a_copy_is_not_attached_to_the_run():
    net = Net()
    trainer = Trainer(**QUIET, max_steps=1)
    trainer.fit(net, [torch.randn(2, 2)])
    assert net.trainer is trainer
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert twin.__dict__["_trainer"] is None
        assert torch.equal(twin.layer.weight, net.layer.weight)
        assert twin.hparams == net.hparams
    assert net.trainer is trainer


def test_the_trainer_is_not_part_of_the_state():
    net = Net()
    Trainer(**QUIET, max_steps=1).fit(net, [torch.randn(2, 2)])
    assert list(net.state_dict()) == ["layer.weight", "layer.bias"]
    assert [name for name, _ in net.named_modules()] == ["", "layer", "dropout"]


def test_toggling_lets_only_one_optimizer_s_parameters_learn():
    class Two(Net):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.other = nn.Linear(2, 1)
            self.other.bias.requires_grad_(False)
            self.seen = []

        def training_step(self, batch, batch_idx):
            first, second = self.optimizers()
            with self.toggled_optimizer(first):
                self.seen.append([p.requires_grad for p in self.parameters()])
                with pytest.raises(ConfigurationError, match="already toggled"):
                    self.toggle_optimizer(second)
            with second.toggle_model():
                self.seen.append([p.requires_grad for p in self.parameters()])
            self.seen.append([p.requires_grad for p in self.parameters()])

        def configure_optimizers(self):
            return [
                torch.optim.SGD(self.layer.parameters(), 0.1),
                torch.optim.SGD(self.other.parameters(), 0.1),
            ]

    net = Two()
    Trainer(**QUIET, max_steps=1).fit(net, [torch.randn(2, 2)])
    assert net.seen == [
        [True, True, False, False],
        [False, False, True, False],
        [True, True, True, False],
    ]


@pytest.mark.slow
def test_it_is_rebuilt_from_its_hyperparameters_and_weights(tmp_path):
    net = Net(width=3, lr=0.5)
    trainer = Trainer(**QUIET, max_steps=1)
    trainer.fit(net, [torch.randn(2, 3)])
    trainer.save_checkpoint(tmp_path / "c")
    again = Net.load_from_checkpoint(tmp_path / "c")
    assert again.hparams == {"width": 3, "lr": 0.5}
    assert torch.equal(again.layer.weight, net.layer.weight)
    assert Net.load_from_checkpoint(tmp_path / "c", lr=0.7).hparams.lr == 0.7
    fresh = """
import sys, torch
from torch import nn
from trainer_kit import TrainModule

class Net(TrainModule):
    def __init__(self, width=2, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(width, 1)

print(Net.load_from_checkpoint(sys.argv[1]).hparams)
"""
    ran = subprocess.run(
        [sys.executable, "-c", fresh, str(tmp_path / "c")],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.stdout.strip() == "{'width': 3, 'lr': 0.5}", ran.stderr


def test_weights_that_do_not_fit_are_refused_unless_asked_for(tmp_path):
    class More(Net):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.extra = nn.Linear(1, 1)

    net = Net()
    trainer = Trainer(**QUIET, max_steps=1)
    trainer.fit(net, [torch.randn(2, 2)])
    trainer.save_checkpoint(tmp_path / "c")
    with pytest.raises(RuntimeError, match=r"extra\.weight"):
        More.load_from_checkpoint(tmp_path / "c")
    with pytest.warns(
        UserWarning,
        match=r"strict=False; not in the checkpoint.*extra\.bias, extra\.weight",
    ):
        loaded = More.load_from_checkpoint(tmp_path / "c", strict=False)
    assert torch.equal(loaded.layer.weight, net.layer.weight)


def test_a_plain_state_dict_is_read_too(tmp_path):
    net = Net()
    torch.save(net.state_dict(), tmp_path / "w.pt")
    again = Net.load_from_checkpoint(tmp_path / "w.pt", map_location="cpu")
    assert torch.equal(again.layer.weight, net.layer.weight)


def test_layers_that_are_built_late_are_built_before_loading(tmp_path):
    class Late(Net):
        def __init__(self):
            super().__init__()
            self.late = None

        def configure_model(self):
            if self.late is None:
                self.late = nn.Linear(1, 1)

    net = Late()
    trainer = Trainer(**QUIET, max_steps=1)
    trainer.fit(net, [torch.randn(2, 2)])
    trainer.save_checkpoint(tmp_path / "c")
    assert torch.equal(
        Late.load_from_checkpoint(tmp_path / "c").late.weight, net.late.weight
    )


def test_an_export_needs_an_input():
    with pytest.raises(ConfigurationError, match="example_input_array"):
        Net().to_onnx(io.BytesIO())


def test_an_export_runs_in_evaluation_mode_and_leaves_the_modes(monkeypatch):
    seen = []
    monkeypatch.setattr(
        torch.onnx,
        "export",
        lambda module, args, path, **kw: seen.append((module.training, args, kw)),
    )
    net = Net()
    net.dropout.eval()
    net.example_input_array = torch.zeros(1, 2)
    net.to_onnx("net.onnx", opset_version=18)
    assert seen[0][0] is False
    assert torch.equal(seen[0][1][0], net.example_input_array)
    assert seen[0][2] == {"opset_version": 18}
    assert (net.training, net.dropout.training) == (True, False)


@pytest.mark.skipif(bool(find_spec("onnxscript")), reason="the package is installed")
def test_an_export_without_its_packages_says_what_to_install():
    with pytest.raises(ConfigurationError, match="pip install onnx onnxscript"):
        Net().to_onnx("net.onnx", torch.zeros(1, 2))


def test_extra_state_comes_with_the_weights(tmp_path):
    class Counts(Net):
        count = 0

        def get_extra_state(self):
            return {"count": self.count}

        def set_extra_state(self, state):
            self.count = state["count"]

    net = Counts()
    net.count = 7
    trainer = Trainer(**QUIET, max_steps=1)
    trainer.fit(net, [torch.randn(2, 2)])
    trainer.save_checkpoint(tmp_path / "c")
    assert Counts.load_from_checkpoint(tmp_path / "c").count == 7
    other = Counts()
    Trainer(**QUIET, max_steps=1).fit(
        other, [torch.randn(2, 2)], ckpt_path=tmp_path / "c", load_weights_only=True
    )
    assert other.count == 7


def test_a_group_of_ones_own_is_not_gathered_from():
    class Gathers(Net):
        def training_step(self, batch, batch_idx):
            self.all_gather(batch, group=object())

    with pytest.raises(ConfigurationError, match="data ranks"):
        Trainer(**QUIET, max_steps=1).fit(Gathers(), [torch.randn(2, 2)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["TrainModule", "DataModule", "Callback", "Trainer", "Accelerator"]
)
def test_functions_under_rank_zero_only_run_before_a_trainer_exists(name):
    code = (
        "from lightning_utilities.core.rank_zero import rank_zero_only\n"
        f"from trainer_kit import {name}\n"
        "print(rank_zero_only.rank)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "RANK": "3"},
    )
    assert (ran.stdout.strip(), ran.stderr) == ("3", "")


def test_on_gpu_says_where_the_module_is():
    module = TrainModule()
    assert module.on_gpu is False
    assert (
        type(module).on_gpu.fget(
            type("There", (), {"device": torch.device("cuda", 0)})()
        )
        is True
    )
