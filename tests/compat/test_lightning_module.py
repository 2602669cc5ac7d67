"""What modules and datamodules of Lightning have: hyperparameters, loading, exports."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import trainer_kit as tk
from trainer_kit.compat.lightning_demos import BoringModel

QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


class Wide(tk.LightningModule):
    def __init__(self, width=2, options=None):
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Sequential(
            nn.Linear(3, width), nn.Dropout(0.5), nn.Linear(width, 1)
        )
        self.example_input_array = torch.ones(1, 3)

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, batch_idx):
        return self(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Rows(tk.LightningDataModule):
    def __init__(self, size=4, batch_size=2):
        super().__init__()
        self.save_hyperparameters()
        self.served = 0

    def train_dataloader(self):
        self.served += 1
        return DataLoader(
            torch.randn(self.hparams.size, 3), batch_size=self.hparams.batch_size
        )

    def state_dict(self):
        return {"served": self.served}

    def load_state_dict(self, state_dict):
        self.served = state_dict["served"]


def saved(tmp_path, module, data=None):
    """A checkpoint of the module after one step."""
    trainer = tk.Trainer(**QUIET, max_steps=1)
    trainer.fit(module, datamodule=data or Rows())
    trainer.save_checkpoint(tmp_path / "saved")
    return tmp_path / "saved"


def test_initial_hyperparameters_do_not_follow_changes():
    module = Wide(3, options={"depth": [1, 2]})
    module.hparams.width = 7
    module.hparams.options["depth"].append(3)
    assert module.hparams_initial == {"width": 3, "options": {"depth": [1, 2]}}
    module.hparams_initial.options["depth"].clear()
    assert module.hparams_initial.options == {"depth": [1, 2]}
    assert BoringModel().hparams_initial == {}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hparams.yaml", "width: 5\noptions: {depth: 2}\n"),
        ("hparams.json", json.dumps({"width": 5, "options": {"depth": 2}})),
        ("hparams.csv", "key,value\nwidth,5\noptions,{'depth': 2}\n"),
    ],
)
def test_hyperparameters_come_from_a_file_on_request(tmp_path, name, text):
    weights = Wide(5).state_dict()
    torch.save({"state_dict": weights}, tmp_path / "old.ckpt")
    (tmp_path / name).write_text(text)
    module = Wide.load_from_checkpoint(
        tmp_path / "old.ckpt", hparams_file=tmp_path / name, weights_only=False
    )
    assert module.hparams == {"width": 5, "options": {"depth": 2}}
    assert torch.equal(module.layer[0].weight, weights["layer.0.weight"])
    given = Wide.load_from_checkpoint(
        tmp_path / "old.ckpt", None, str(tmp_path / name), options=None
    )
    assert given.hparams.options is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- 1\n", "holds no mapping"),
        (
            "a: !!python/object/apply:os.getcwd []\n",
            r"(?s)must be YAML of plain values.*keyword arguments",
        ),
        ("a: [\n", "must be YAML of plain values"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_holds_no_plain_hyperparameters_is_refused(tmp_path, text, problem):
    torch.save({"state_dict": Wide().state_dict()}, tmp_path / "old.ckpt")
    if text is not None:
        (tmp_path / "h.yaml").write_text(text)
    with pytest.raises(tk.ConfigurationError, match=problem):
        Wide.load_from_checkpoint(
            tmp_path / "old.ckpt", hparams_file=tmp_path / "h.yaml"
        )


def test_a_datamodule_is_loaded_from_a_checkpoint(tmp_path):
    path = saved(tmp_path, Wide(), Rows(size=6, batch_size=3))
    loaded = Rows.load_from_checkpoint(path)
    assert (loaded.hparams, loaded.served) == ({"size": 6, "batch_size": 3}, 1)
    assert Rows.load_from_checkpoint(path, batch_size=1).hparams == {
        "size": 6,
        "batch_size": 1,
    }
    theirs = {
        "state_dict": {},
        "datamodule_hyper_parameters": {"size": 8},
        "Rows": {"served": 4},
    }
    torch.save(theirs, tmp_path / "old.ckpt")
    old = Rows.load_from_checkpoint(tmp_path / "old.ckpt")
    assert (old.hparams.size, old.served) == (8, 4)


def test_from_datasets_passes_its_options_to_the_constructor():
    data = Rows.from_datasets(torch.arange(6.0), batch_size=3, size=9)
    assert data.hparams == {"size": 9, "batch_size": 3}
    assert [len(batch) for batch in data.train_dataloader()] == [3, 3]

    class Anything(tk.LightningDataModule):
        def __init__(self, **options):
            super().__init__()
            self.options = options

    assert Anything.from_datasets(batch_size=5, num_workers=1, a=2).options == {
        "batch_size": 5,
        "num_workers": 1,
        "a": 2,
    }
    assert type(tk.LightningDataModule.from_datasets(batch_size=4)) is tk.DataModule


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("method", ["script", "trace"])
def test_torchscript_of_a_trained_module(tmp_path, method):
    module = Wide(4)
    tk.Trainer(**QUIET, max_steps=1).fit(module, datamodule=Rows())
    module.train()
    module.layer[1].eval()
    made = module.to_torchscript(tmp_path / "module.pt", method)
    assert (module.training, module.layer[1].training, module.layer[0].training) == (
        True,
        False,
        True,
    )
    assert module.trainer.global_step == 1
    given = torch.randn(5, 3)
    module.eval()
    expected = module(given)
    assert torch.equal(made(given), expected)
    assert torch.equal(torch.jit.load(tmp_path / "module.pt")(given), expected)


def test_wrong_calls_of_to_torchscript_are_refused():
    module = Wide()
    with pytest.raises(tk.ConfigurationError, match="method='onnx'"):
        module.to_torchscript(method="onnx")
    module.example_input_array = None
    with pytest.raises(
        tk.ConfigurationError, match="pass example_inputs or set example_input_array"
    ):
        module.to_torchscript(method="trace")


def test_freeze_returns_the_module_and_one_process_has_no_mesh():
    module = Wide()
    assert module.freeze() is module
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert module.device_mesh is None
    tk.Trainer(**QUIET, max_steps=1).fit(module.unfreeze(), datamodule=Rows())
    assert module.device_mesh is None


def test_the_keys_of_hyperparameters_in_a_checkpoint(tmp_path):
    """Lightning's names: a callback reads ``checkpoint[pl_module.CHECKPOINT_HYPER_PARAMS_KEY]``."""

    class Sized(BoringModel):
        def __init__(self, width=3):
            super().__init__()
            self.save_hyperparameters()

    class Data(tk.LightningDataModule):
        def __init__(self, size=5):
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self):
            return [torch.ones(2, 32)]

    class Reads(tk.Callback):
        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            seen.append(dict(checkpoint[pl_module.CHECKPOINT_HYPER_PARAMS_KEY]))
            seen.append(
                dict(checkpoint[trainer.datamodule.CHECKPOINT_HYPER_PARAMS_KEY])
            )

    seen = []
    trainer = tk.Trainer(
        max_steps=1, barebones=True, accelerator="cpu", devices=1, callbacks=[Reads()]
    )
    trainer.fit(Sized(), datamodule=Data())
    trainer.save_checkpoint(tmp_path / "saved")
    assert seen == [{"width": 3}, {"size": 5}]
    module, data = tk.LightningModule, tk.LightningDataModule
    assert module.CHECKPOINT_HYPER_PARAMS_NAME == "hparams_name"
    assert module.CHECKPOINT_HYPER_PARAMS_TYPE == "hparams_type"
    assert data.CHECKPOINT_HYPER_PARAMS_NAME == "datamodule_hparams_name"
    assert data.CHECKPOINT_HYPER_PARAMS_TYPE == "datamodule_hparams_type"
