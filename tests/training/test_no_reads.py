"""No step waits for its device: the whole loop on one that has no values, where to look at one is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import trainer_kit as tk
from trainer_kit.training import compose

META = torch.device("meta")


class NoWait(TorchFunctionMode):
    """Copies to the device do not wait. Those from it are torch's own errors: there is nothing to copy."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result, options = func(*args, **(kwargs or {})), kwargs or {}
        if (
            isinstance(result, Tensor)
            and result.device == META
            and not options.get("non_blocking")
        ):
            on_host = not isinstance(args[0], Tensor) or args[0].device != META
            if on_host and func in (torch.tensor, torch.as_tensor, Tensor.to):
                raise AssertionError(
                    f"{func.__name__} of host values waits for the device"
                )
        return result


class Net(tk.TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_epoch=True)
        self.log("half", 0.5, on_epoch=True)
        self.log("mixed", 0.5 if batch_idx % 2 else loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Enough(Exception):
    pass


class Watches(tk.Callback):
    def __init__(self, steps: int) -> None:
        self.steps, self.mode = steps, NoWait()

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.mode.__enter__()

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == self.steps:
            raise Enough

    def on_exception(self, trainer: Any, module: Any, error: BaseException) -> None:
        self.mode.__exit__(None, None, None)


@pytest.mark.parametrize(
    "precision", ["32-true", pytest.param("bf16-true", marks=pytest.mark.long)]
)
def test_the_loop_reads_nothing(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[Any] = []

    def ahead(iterator: Any, move: Any, device: Any = None) -> Any:
        devices.append(device)
        return made(iterator, move, device)

    made = compose.Ahead
    monkeypatch.setattr(compose, "Ahead", ahead)
    monkeypatch.setattr("trainer_kit.build.pick_device", lambda *_: META)
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = tk.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        precision=precision,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        log_every_n_steps=10_000,
        enable_checkpointing=False,
        callbacks=[Watches(150)],
        **quiet,
    )
    batches = [
        (torch.zeros(6 - i % 2, 8), torch.zeros(6 - i % 2, dtype=torch.long))
        for i in range(310)
    ]
    with pytest.raises(Enough):
        trainer.fit(Net(), batches)
    assert (
        trainer.global_step == 150
    )  # 300 values of each name: more than are kept apart
    assert devices == [
        META
    ]  # so that batches are pinned and copied beside the steps, where the device can
