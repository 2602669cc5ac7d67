"""A verb on processes that are forked here, as in a notebook: what it made is here afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from trainer_kit import Trainer
from trainer_kit.testing import TinyModule


class Counts(TinyModule):
    count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        return super().training_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("tested", 1.0)

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@pytest.mark.slow
def test_weights_extra_state_and_the_values_of_the_last_verb_come_back() -> None:
    module, loader = Counts(), DataLoader(torch.randn(16, 32), batch_size=4)
    trainer = Trainer(
        max_epochs=1,
        barebones=True,
        devices=2,
        accelerator="cpu",
        strategy="ddp_notebook",
    )
    before = module.state_dict()["layer.weight"].clone()
    trainer.fit(module, loader)
    assert (module.count, trainer.global_step, sorted(trainer.callback_metrics)) == (
        2,
        2,
        ["train_loss"],
    )
    assert not torch.equal(module.state_dict()["layer.weight"], before)
    trainer.test(module, loader, verbose=False)
    assert sorted(trainer.callback_metrics) == ["tested"]
