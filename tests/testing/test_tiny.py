"""`TinyModule` does everything a Trainer asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from trainer_kit import Trainer
from trainer_kit.testing import TinyModule

BATCHES = [torch.linspace(-1, 1, 4 * 32).reshape(4, 32) + i for i in range(3)]


def quiet(**settings: Any) -> Trainer:
    return Trainer(accelerator="cpu", barebones=True, **settings)


def test_training_is_the_hand_written_loop() -> None:
    torch.manual_seed(1)
    module = TinyModule(lr=0.05)
    plain = torch.nn.Linear(32, 2)
    plain.load_state_dict(module.layer.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for batch in BATCHES:
        optimizer.zero_grad()
        plain(batch).pow(2).mean().backward()
        optimizer.step()
    quiet(max_epochs=1).fit(module, BATCHES)
    assert torch.equal(module.layer.weight, plain.weight)
    assert torch.equal(module.layer.bias, plain.bias)


@pytest.mark.parametrize(
    ("verb", "name"), [("validate", "val_loss"), ("test", "test_loss")]
)
def test_evaluation_logs_the_mean_squared_output(verb: str, name: str) -> None:
    module = TinyModule()
    values = getattr(quiet(), verb)(module, BATCHES, verbose=False)
    with torch.no_grad():
        expected = (
            torch.stack([module(batch).pow(2).mean() for batch in BATCHES])
            .double()
            .mean()
        )
    assert values == [{name: pytest.approx(float(expected))}]


def test_training_logs_its_loss() -> None:
    trainer = quiet(max_epochs=1)
    trainer.fit(TinyModule(), BATCHES)
    assert set(trainer.callback_metrics) == {"train_loss"}


def test_prediction_is_the_output() -> None:
    module = TinyModule()
    outputs: list[Tensor] = quiet().predict(module, BATCHES)
    assert [tuple(output.shape) for output in outputs] == [(4, 2)] * 3
    with torch.no_grad():
        assert torch.equal(outputs[0], module(BATCHES[0]))


def test_it_is_rebuilt_from_a_checkpoint(tmp_path: Any) -> None:
    module, trainer = TinyModule(lr=0.25), quiet(max_steps=1)
    trainer.fit(module, BATCHES)
    trainer.save_checkpoint(tmp_path / "saved")
    loaded = TinyModule.load_from_checkpoint(tmp_path / "saved")
    assert loaded.lr == 0.25
    assert torch.equal(loaded.layer.weight, module.layer.weight)
