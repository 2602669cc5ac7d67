"""A `TrainModule` inside another shares its Trainer: epoch, step, loggers, and values under the names that it gives."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainer_kit as tk
from trainer_kit.core.errors import ConfigurationError

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
}


class Encoder(tk.TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.seen: list[tuple[int, int]] = []

    def forward(self, x: Tensor) -> Any:
        out = self.layer(x)
        if self.training:
            self.seen.append((self.current_epoch, self.global_step))
        self.log("norm", out.norm(), on_step=False, on_epoch=True)
        return out

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self(batch).pow(2).mean()
        self.log("inner_loss", loss, on_step=False, on_epoch=True)
        return loss


class Holder(nn.Module):
    """Is no `TrainModule` itself."""

    def __init__(self, inner: Encoder) -> None:
        super().__init__()
        self.inner = inner


class Outer(tk.TrainModule):
    def __init__(self, builds: bool = False) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Holder(Encoder())])
        self.builds, self.late = builds, None

    def configure_model(self) -> None:
        if self.builds and self.late is None:
            self.late = Encoder()

    @property
    def encoder(self) -> Encoder:
        return self.late or self.parts[0].inner  # type: ignore[return-value]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.encoder.training_step(batch, batch_idx)
        self.log("outer_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_norm", self.encoder(batch).norm())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(3, 4, generator=draw) for _ in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("builds", [False, True])
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # torch.compile, behind a break of the graph
@pytest.mark.parametrize("compiled", [False, True])
def test_it_knows_epoch_and_step_and_logs_under_its_own_names(
    tmp_path: Path, builds: bool, compiled: bool
) -> None:
    module = Outer(builds)
    logger = tk.loggers.CSVLogger(tmp_path)
    options = {
        **QUIET,
        "logger": logger,
        "compile": {"backend": "eager"} if compiled else False,
    }
    trainer = tk.Trainer(max_epochs=2, num_sanity_val_steps=0, **options)
    trainer.fit(module, batches(), batches())
    assert module.encoder.seen == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert module.encoder.trainer is module.trainer is trainer
    assert module.encoder.logger is logger
    values = trainer.callback_metrics
    assert values.keys() == {"norm", "inner_loss", "outer_loss", "val_norm"}
    assert torch.equal(values["inner_loss"], values["outer_loss"])
    text = (Path(logger.log_dir) / "metrics.csv").read_text()
    assert "inner_loss" in text.splitlines()[0]
    assert "log" not in vars(module.encoder)


def test_a_copy_of_it_and_one_outside_of_a_fit_have_no_trainer() -> None:
    module = Outer()
    with pytest.raises(
        ConfigurationError, match="Encoder is not attached to a Trainer"
    ):
        _ = module.encoder.trainer
    tk.Trainer(max_epochs=1, **QUIET).fit(module, batches())
    with pytest.raises(ConfigurationError, match="Encoder is not attached"):
        _ = copy.deepcopy(module).encoder.trainer


@pytest.mark.world_size(2)
def test_values_of_an_inner_module_are_means_over_ranks() -> None:
    class Ranks(Outer):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.encoder.log(
                "rank", float(self.encoder.global_rank), on_step=False, on_epoch=True
            )
            return super().training_step(batch, batch_idx)

    trainer = tk.Trainer(max_epochs=1, strategy="ddp", devices=2, **QUIET)
    trainer.fit(Ranks(), batches())
    assert trainer.callback_metrics["rank"] == 0.5


@pytest.mark.world_size(2)
def test_a_padding_batch_does_not_change_the_state_of_an_inner_module() -> None:
    """Two ranks with three batches under FSDP: the one that has none runs an earlier batch, which nothing may count."""
    torch.manual_seed(0)
    module = Outer()
    trainer = tk.Trainer(
        max_epochs=1, devices=2, strategy="fsdp", enable_progress_bar=False, **QUIET
    )
    trainer.fit(
        module,
        [
            torch.randn(4, 4, generator=torch.Generator().manual_seed(i))
            for i in range(3)
        ],
    )
    assert trainer.progress.step == 2
    assert [
        len(found)
        for found in trainer.strategy.world.all_gather_object(module.encoder.seen)
    ] == [2, 1]
