"""A strategy of the user's own: nothing is decided by its name, and its costs are its own."""

from __future__ import annotations

import pytest
import torch

import trainer_kit as tk
from trainer_kit.core.costs import Costs
from trainer_kit.strategies import SingleDeviceStrategy, Strategy
from trainer_kit.testing import TinyModule


class Delegates(Strategy):
    """Wraps another strategy, as a user's own does."""

    def __init__(self, name, costs=None):
        self.name, self._inner, self._costs = name, SingleDeviceStrategy(), costs

    def start(self):
        self._inner.device = self.device
        self._inner.start()
        self.world = self.data = self.losses = self.reports = self._inner.world

    def describe(self):
        return f"{self.name} around {self._inner.describe()}"

    def costs(self, module, precision, ranks):
        return self._costs


NAMES = [
    "_pp",
    "pp",
    "tp_mine",
    "_cp",
    "fsdp2",
    "deepspeed_mine",
    "xla_like",
    "megatron_x",
    "ppo_engine",
    "ddp",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_name_decides_nothing(name, precision, tmp_path):
    losses = []
    for strategy in (Delegates(name), "auto"):
        torch.manual_seed(0)
        trainer = tk.Trainer(
            accelerator="cpu",
            strategy=strategy,
            precision=precision,
            max_epochs=1,
            barebones=True,
        )
        module = TinyModule()
        trainer.fit(module, [torch.ones(2, 32)] * 2)
        trainer.save_checkpoint(tmp_path / "saved")
        losses.append(trainer.validate(module, [torch.ones(2, 32)], verbose=False))
    assert losses[0] == losses[1]


def test_explain_shows_the_costs_that_the_strategy_declares(capsys):
    module = TinyModule()
    unknown = tk.Trainer(
        accelerator="cpu", strategy=Delegates("_pp"), barebones=True
    ).explain(module)
    assert "_pp around" in unknown
    plain = tk.Trainer(accelerator="cpu", barebones=True).explain(module)
    own = Costs(layout="mine alone", parameters=7, gradients=7, stepped=list)
    known = tk.Trainer(
        accelerator="cpu", strategy=Delegates("_pp", own), barebones=True
    ).explain(module)
    assert "mine alone" in known
    whole = [line for line in plain.splitlines() if line.startswith("layout")]
    assert whole
    assert not any(line in unknown or line in known for line in whole)
