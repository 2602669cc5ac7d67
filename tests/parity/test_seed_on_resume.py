"""A resumed run reads its data in the order of its checkpoint, unless the Trainer is told another."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from trainer_kit import Trainer, TrainModule, seed_everything


class Ids(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []

    def training_step(self, batch, batch_idx):
        self.seen += batch[0].long().flatten().tolist()
        return self.layer(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def seen(path, max_steps, **options):
    module = Ids()
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = Trainer(
        max_steps=max_steps,
        **{key: value for key, value in options.items() if key == "seed"},
        **quiet,
    )
    data = DataLoader(
        TensorDataset(torch.arange(12.0).unsqueeze(1)), batch_size=2, shuffle=True
    )
    trainer.fit(module, data, ckpt_path=options.get("ckpt_path"))
    if "ckpt_path" not in options:
        trainer.save_checkpoint(path)
    return module.seen


@pytest.mark.parametrize(("options", "as_before"), [({}, True), ({"seed": 99}, False)])
def test_the_order_of_the_data_continues(tmp_path, options, as_before):
    seed_everything(1)
    whole = seen(tmp_path / "whole", 6)
    seed_everything(1)
    first = seen(tmp_path / "part", 2)
    seed_everything(2)
    rest = seen(None, 6, ckpt_path=tmp_path / "part", **options)
    assert (first + rest == whole) is as_before
