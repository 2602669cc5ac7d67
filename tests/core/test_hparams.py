"""Hyperparameters: what constructors were called with."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import pytest
import torch

import trainer_kit as tk
from trainer_kit import DataModule, TrainModule
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hparams import HParams, HParamsMixin


def test_keys_are_attributes():
    hparams = HParams(lr=0.1)
    hparams.width = 3
    assert (hparams.lr, hparams["lr"], hparams["width"], dict(hparams)) == (
        0.1,
        0.1,
        3,
        {"lr": 0.1, "width": 3},
    )


def test_a_missing_one_is_an_attribute_error_that_lists_the_others():
    with pytest.raises(AttributeError, match=r"'rate'; there are: lr"):
        _ = HParams(lr=0.1).rate
    assert not hasattr(HParams(), "rate")


def test_all_arguments_are_kept_with_their_defaults():
    class Net(TrainModule):
        def __init__(self, width, depth=2, *, lr=0.1, **rest):
            super().__init__()
            self.save_hyperparameters()

    assert Net(8, lr=0.5, act="relu").hparams == {
        "width": 8,
        "depth": 2,
        "lr": 0.5,
        "act": "relu",
    }


def test_some_arguments_by_name():
    class Net(TrainModule):
        def __init__(self, width, depth=2):
            super().__init__()
            self.save_hyperparameters("depth")

    assert Net(8).hparams == {"depth": 2}


@pytest.mark.parametrize("ignore", ["backbone", ["backbone"]])
def test_some_arguments_are_left_out(ignore):
    class Net(TrainModule):
        def __init__(self, backbone, lr=0.1):
            super().__init__()
            self.save_hyperparameters(ignore=ignore)

    assert Net(object()).hparams == {"lr": 0.1}


def test_a_subclass_keeps_the_arguments_of_its_call():
    class Base(TrainModule):
        def __init__(self, lr=0.1):
            super().__init__()
            self.save_hyperparameters()

    class Net(Base):
        def __init__(self, width, lr=0.2):
            super().__init__(lr * 10)

    assert Net(4).hparams == {"width": 4, "lr": 0.2}


def test_a_mapping_is_kept_as_it_is():
    class Net(TrainModule):
        def __init__(self, config):
            super().__init__()
            self.save_hyperparameters(config)

    assert Net({"lr": 0.1, "width": 2}).hparams == {"lr": 0.1, "width": 2}


def test_the_fields_of_an_object_are_kept():
    @dataclass
    class Config:
        lr: float = 0.1

    class Net(TrainModule):
        def __init__(self, config):
            super().__init__()
            self.save_hyperparameters(config)

    assert Net(Config()).hparams == {"lr": 0.1}


def test_a_second_call_adds():
    class Net(TrainModule):
        def __init__(self, lr):
            super().__init__()
            self.save_hyperparameters()
            self.save_hyperparameters({"width": 3})

    assert Net(0.1).hparams == {"lr": 0.1, "width": 3}


def test_another_object_under_construction_around_it_is_not_collected():
    class Net(TrainModule):
        def __init__(self, lr=0.1):
            super().__init__()
            self.save_hyperparameters()

    class Experiment:
        def __init__(self, name):
            self.net = Net()

    assert Experiment("first").net.hparams == {"lr": 0.1}


def test_an_unknown_name_is_an_error_that_names_it():
    class Net(TrainModule):
        def __init__(self, lr=0.1):
            super().__init__()
            self.save_hyperparameters("rate")

    with pytest.raises((KeyError, ValueError), match="rate"):
        Net()


def test_without_a_call_there_are_none():
    assert TrainModule().hparams == {}


def test_two_modules_do_not_share_them():
    first, second = TrainModule(), TrainModule()
    first.hparams["lr"] = 1
    assert second.hparams == {}


def test_datamodules_have_them_too():
    class Data(DataModule):
        def __init__(self, batch_size=4):
            super().__init__()
            self.save_hyperparameters()

    assert Data(8).hparams.batch_size == 8


def test_they_are_not_parameters_of_the_module():
    class Net(TrainModule):
        def __init__(self, lr=0.1):
            super().__init__()
            self.save_hyperparameters()

    assert list(Net().state_dict()) == []


def test_a_name_that_is_not_an_argument_is_named():
    class Owner(HParamsMixin):
        def __init__(self, name, rate=0.1, ignore=()):
            self.save_hyperparameters(name, ignore=ignore)

    with pytest.raises(ConfigurationError, match=r"(?s)'rat'.*did you mean 'rate'"):
        Owner("rat")
    with pytest.raises(ConfigurationError, match="'rate'"):
        Owner("rate", ignore="rate")


class SavesAll(HParamsMixin):
    def __init__(self, net=None, lr=0.1, key="k"):
        self.save_hyperparameters()


class IgnoresNet(SavesAll):
    def __init__(self, net=None, lr=0.1, key="k"):
        super().__init__(net, lr, key)
        self.save_hyperparameters(ignore="net")


class IgnoresKeyToo(IgnoresNet):
    def __init__(self, net=None, lr=0.1, key="k", extra=1):
        super().__init__(net, lr, key)
        self.save_hyperparameters(ignore=["key"])


class SavesAgain(IgnoresNet):
    def __init__(self, net=None, lr=0.1, key="k"):
        super().__init__(net, lr, key)
        self.save_hyperparameters()


class NamesIt(IgnoresNet):
    def __init__(self, net=None, lr=0.1, key="k"):
        super().__init__(net, lr, key)
        self.save_hyperparameters("net")


class Mixin:
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.save_hyperparameters(ignore=["lr"])


class Mixed(Mixin, IgnoresNet):
    pass


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (IgnoresNet, {"lr", "key"}),
        (IgnoresKeyToo, {"lr", "extra"}),
        (SavesAgain, {"lr", "key"}),
        (NamesIt, {"net", "lr", "key"}),
    ],
)
def test_what_any_class_ignores_is_left_out_unless_it_is_named(kind, names):
    owner = kind("net")
    assert set(owner.hparams) == names
    assert set(owner.hparams_initial) == names


def test_a_mixin_ignores_what_a_base_class_saves():
    assert "lr" not in Mixed("net").hparams
    assert "net" not in Mixed("net").hparams


def test_omegaconf_comes_back_as_omegaconf_and_its_interpolations_are_not_called(
    tmp_path,
):
    omegaconf = pytest.importorskip("omegaconf")
    from trainer_kit.checkpoint.encoding import decode, encode

    config = omegaconf.OmegaConf.create(
        {"lr": 0.1, "sizes": [1, 2], "twice": "${lr}", "net": {"width": "${sizes[1]}"}}
    )
    again = decode(
        encode({"cfg": config, "net": config.net, "sizes": config.sizes}, {}), {}
    )
    assert type(again["cfg"]) is omegaconf.DictConfig
    assert again["cfg"].twice == 0.1
    assert again["net"].width == 2
    assert type(again["sizes"]) is omegaconf.ListConfig
    called = []
    omegaconf.OmegaConf.register_new_resolver("call", called.append)
    hostile = decode(
        {
            "$": "object",
            "v": ["omegaconf", {"a": "${call:1}", "b": [{"c": "${oc.env:HOME}"}]}],
        },
        {},
    )
    assert hostile.a == "${call:1}"
    assert hostile.b[0].c == "${oc.env:HOME}"
    assert called == []


class TakesConfig(tk.TrainModule):
    def __init__(self, cfg):
        super().__init__()
        self.save_hyperparameters(cfg)
        self.layer = torch.nn.Linear(cfg.width, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ConfiguredData(tk.DataModule):
    def __init__(self, options):
        super().__init__()
        self.save_hyperparameters(options)
        self.rows = options["rows"]

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(self.rows, 3))


class Widths(dict):
    """As a configuration of another library: keys are attributes."""

    __getattr__ = dict.__getitem__


@pytest.mark.parametrize("kind", [argparse.Namespace, Widths])
@pytest.mark.parametrize("file", ["directory", "lightning"])
def test_the_content_of_one_argument_comes_back_as_that_argument(kind, file, tmp_path):
    """As in Lightning: ``save_hyperparameters(cfg)`` in ``__init__(self, cfg)``."""
    module, data = TakesConfig(kind(width=3, depth=1)), ConfiguredData({"rows": 2})
    trainer = tk.Trainer(
        max_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        devices=1,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, datamodule=data)
    path = tmp_path / "state"
    trainer.save_checkpoint(path)
    if file == "lightning":
        tk.checkpoint.export(path, tmp_path / "state.ckpt", "lightning")
        path = tmp_path / "state.ckpt"
    loaded = TakesConfig.load_from_checkpoint(path)
    assert loaded.hparams == {"width": 3, "depth": 1}
    assert torch.equal(loaded.layer.weight, module.layer.weight)
    assert ConfiguredData.load_from_checkpoint(path).rows == 2
    assert TakesConfig.load_from_checkpoint(path, cfg=kind(width=3)).hparams == {
        "width": 3
    }
