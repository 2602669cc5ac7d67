"""A user's script runs, unchanged, up to its first ``trainer.fit``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import trainer_kit as tk
from trainer_kit import Trainer
from trainer_kit.commands.script import captured_fit
from trainer_kit.core.errors import ConfigurationError

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def the_main_program(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)


def captured(source, *words, **options):
    Path("train.py").write_text(
        f"import sys, torch, trainer_kit as tk\n{source}", encoding="utf-8"
    )
    return captured_fit("train.py", words, trainer_class=Trainer, **options)


def refused(source, *words, **options):
    with pytest.raises(ConfigurationError) as raised:
        captured(source, *words, **options)
    return str(raised.value)


FIT = "from trainer_kit.testing import TinyModule\ntk.Trainer().fit(TinyModule(), [torch.randn(4, 32)])\n"


@pytest.mark.parametrize(
    "script",
    [
        "lm",
        "digits",
        "char_transformer",
        "custom_callback",
        "custom_logger",
        "gan_manual",
        "gan_named",
    ],
)
def test_examples_are_captured_with_and_without_weights(script, monkeypatch):
    for empty, device in ((False, "cpu"), (True, "meta")):
        fit = captured_fit(
            str(EXAMPLES / f"{script}.py"), trainer_class=Trainer, empty_weights=empty
        )
        assert isinstance(fit.module, tk.TrainModule)
        assert {parameter.device.type for parameter in fit.module.parameters()} == {
            device
        }
        assert fit.trainer.global_step == 0
        assert (fit.datamodule is not None) == (script == "digits")
        assert (
            type(fit.module) is vars(sys.modules["__main__"])[type(fit.module).__name__]
        )
    assert not list(Path().iterdir()), "a captured fit writes nothing"


def test_arguments_reach_the_script_and_the_trainer_is_made_without_its_devices():
    source = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int)
width = parser.parse_args().width
if __name__ == "__main__":
    module = torch.nn.Linear(width, 1)
    strategy = tk.strategies.FSDPStrategy()
    trainer = tk.Trainer(accelerator="gpu", devices=8, num_nodes=32, strategy=strategy, precision="bf16-mixed",
                         logger="wandb", accumulate_grad_batches=4)
    class Data(tk.DataModule):
        def train_dataloader(self):
            return [torch.ones(2)]
    trainer.fit(module, Data())
"""
    fit = captured(source, "--width", "7")
    assert fit.module.weight.shape == (1, 7)
    assert fit.datamodule.train_dataloader()[0].tolist() == [1, 1]
    assert fit.train_dataloaders is None
    assert fit.trainer.world_size == 1
    assert fit.trainer.accumulate_grad_batches == 4
    given = dict(fit.arguments)
    assert type(given.pop("strategy")).__name__ == "FSDPStrategy"
    assert given == {
        "accelerator": "gpu",
        "devices": 8,
        "num_nodes": 32,
        "precision": "bf16-mixed",
        "logger": "wandb",
        "accumulate_grad_batches": 4,
    }


def test_the_first_of_two_fits_is_captured_even_by_a_script_that_catches_everything():
    source = """
for steps in (1, 2):
    try:
        tk.Trainer(max_steps=steps).fit(torch.nn.Linear(steps, 1))
    except BaseException:
        pass
print(undefined)
"""
    fit = captured(source)
    assert fit.trainer.max_steps == 1
    assert fit.module.weight.shape == (1, 1)


def test_the_trainer_is_itself_again_after_a_capture():
    fit, construct = Trainer.fit, Trainer.__init__
    captured(FIT)
    refused("1 / 0")
    assert (Trainer.fit, Trainer.__init__) == (fit, construct)


def test_a_lightning_cli_is_captured():
    source = """
from trainer_kit.cli import LightningCLI
from trainer_kit.testing import TinyModule
class Net(TinyModule):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.width = width
class Data(tk.LightningDataModule):
    def train_dataloader(self):
        return [torch.ones(2, 32)]
LightningCLI(Net, Data)
"""
    fit = captured(
        source,
        "fit",
        "--model.width",
        "5",
        "--trainer.devices",
        "64",
        empty_weights=True,
    )
    assert fit.module.width == 5
    assert fit.arguments["devices"] == 64
    assert fit.datamodule.train_dataloader()[0].shape == (2, 32)


def test_a_subclass_of_the_trainer_is_captured():
    source = f"""
class Own(tk.Trainer):
    def __init__(self, **given):
        super().__init__(max_steps=3, **given)
{FIT.replace("tk.Trainer()", "Own(devices=2)")}
"""
    assert captured(source).arguments == {"max_steps": 3, "devices": 2}


def test_billions_of_parameters_take_no_memory_and_tied_ones_stay_tied():
    source = """
class Big(tk.TrainModule):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(50_000, 4_096)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4_096, 16_384) for _ in range(64))
        self.head = torch.nn.Linear(4_096, 50_000, bias=False)
        self.head.weight = self.embed.weight
    def training_step(self, batch, batch_idx): ...
    def configure_optimizers(self): ...
tk.Trainer().fit(Big(), [])
"""
    module = captured(source, empty_weights=True).module
    assert sum(parameter.numel() for parameter in module.parameters()) > 4.3e9
    assert module.head.weight is module.embed.weight
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    assert torch.nn.Linear(1, 1).weight.device.type == "cpu"


def test_scripts_without_a_fit_are_refused_in_words():
    with pytest.raises(
        ConfigurationError, match=r"the script does not exist\n  found: none\.py"
    ):
        captured_fit("none.py", trainer_class=Trainer)
    assert "calls no Trainer.fit\n  found: it ran to its end" in refused(
        "print('done')"
    )
    assert "pass the script's arguments after --" in refused("sys.exit('usage')")
    assert "it exited with 'usage', with the arguments --x" in refused(
        "sys.exit('usage')", "--x"
    )
    text = refused("\n\nraise OSError('no data')\n")
    assert (
        "train.py failed before its Trainer.fit (line 4)\n  found: OSError: no data"
        in text
    )
    assert "reads weights before the fit" not in text
    text = refused(
        "layer = torch.nn.Linear(2, 2)\nprint(layer(torch.ones(2)).tolist())",
        empty_weights=True,
    )
    assert "reads weights before the fit: call trainer.plan(...) there" in text


def test_a_loop_over_an_accelerator_is_refused_in_words():
    text = refused("accelerator = tk.Accelerator(cpu=True)")
    assert "a custom training loop with an Accelerator cannot be captured" in text
