"""Blocks in torch's checkpoint wrapper have the names of `state_dict()` in checkpoints and in averages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)

import trainer_kit as tk
from trainer_kit.callbacks import EMAWeightAveraging

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Block(nn.Linear):
    """Has a buffer."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("count", torch.zeros(1))


class Blocks(tk.TrainModule):
    """The first block is frozen until the second epoch."""

    def __init__(self, wraps: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [Block() for _ in range(2)]
        self.blocks = nn.Sequential(
            *(checkpoint_wrapper(block) if wraps else block for block in blocks)
        )
        self.blocks[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.blocks[0].requires_grad_(True)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for block in self.blocks:
            block.count += 1
        return self.blocks(batch).square().mean() + self.blocks(batch)[:, 0].mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_checkpoint_of_wrapped_blocks_resumes_with_and_without_the_wrapper(
    tmp_path: Path,
) -> None:
    batches = list(torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0)))

    def fit(
        wraps: bool, epochs: int, path: Path | None = None
    ) -> tuple[tk.Trainer, Blocks]:
        averages = EMAWeightAveraging(decay=0.5, use_buffers=True)
        trainer = tk.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            devices=1,
            callbacks=[averages],
            default_root_dir=tmp_path,
            **QUIET,
        )
        trainer.fit(module := Blocks(wraps), batches, ckpt_path=path)
        return trainer, module

    expected = fit(False, 4)[1].state_dict()
    fit(True, 2)[0].save_checkpoint(tmp_path / "saved")
    for wraps in (True, False):
        _, module = fit(wraps, 4, tmp_path / "saved")
        assert all(parameter.requires_grad for parameter in module.parameters())
        found = module.state_dict()
        assert list(found) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, rtol=0, atol=0, msg=f"{wraps}: {name}"
            )
