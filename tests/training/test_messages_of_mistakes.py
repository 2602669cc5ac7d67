"""A run that trains nothing, or does not validate, prints a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from trainer_kit import Trainer
from trainer_kit.callbacks import EarlyStopping
from trainer_kit.core.errors import CheckpointError, ConfigurationError, DataError
from trainer_kit.loggers import CSVLogger
from trainer_kit.testing import TinyModule

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class NoReturn(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


class NoOptimizer(TinyModule):
    def configure_optimizers(self) -> Any:
        return None


def test_a_forgotten_return(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"(?s)no training_step returned a loss.*2 times None.*return the loss",
    ):
        Trainer(max_epochs=1, **QUIET).fit(NoReturn(), [torch.randn(4, 32)] * 2)
    assert (
        "nothing was trained: no training_step of this epoch returned a loss"
        in capsys.readouterr().out
    )


def test_a_forgotten_return_is_found_when_the_first_epoch_ends() -> None:
    module, trainer = NoReturn(), Trainer(max_epochs=3, **QUIET)
    with pytest.raises(
        ConfigurationError, match=r"(?s)no training_step returned a loss.*2 times None"
    ):
        trainer.fit(module, [torch.randn(4, 32)] * 2)
    assert trainer.global_step == 2


class Empty(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    "loader",
    [
        [],
        DataLoader(torch.randn(3, 32), batch_size=4, drop_last=True),
        DataLoader(Empty()),
    ],  # type: ignore[arg-type]
)
def test_a_loader_without_a_batch_is_an_error(loader: Any) -> None:
    with pytest.raises(DataError, match="the training loader returned no batch"):
        Trainer(max_epochs=1, **QUIET).fit(TinyModule(), loader)
    Trainer(max_epochs=1, limit_train_batches=0, **QUIET).fit(
        TinyModule(), [torch.randn(4, 32)]
    )


def test_no_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    Trainer(max_epochs=1, **QUIET).fit(NoOptimizer(), [torch.randn(4, 32)] * 2)
    assert "no optimizer: configure_optimizers returned None" in capsys.readouterr().out


def test_loaders_without_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    from trainer_kit import TrainModule

    class Trains(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(32, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    Trainer(max_epochs=1, **QUIET).fit(
        Trains(), [torch.randn(4, 32)], [torch.randn(4, 32)]
    )
    assert "no validation: Trains has no validation_step" in capsys.readouterr().out


class NoInit(TinyModule):
    def __init__(self) -> None:
        self.rate = 0.1


@pytest.mark.parametrize(
    ("module", "options", "fit", "said"),
    [
        (NoInit, {}, {}, "NoInit.__init__ does not call super"),
        (
            lambda: TinyModule,
            {},
            {},
            r"(?s)a class, not a module object.*TinyModule\(\.\.\.\)",
        ),
        (
            TinyModule,
            {"callbacks": [EarlyStopping]},
            {},
            r"(?s)not a callback.*make one: EarlyStopping\(\.\.\.\)",
        ),
        (TinyModule, {"logger": CSVLogger}, {}, "(?s)not a logger.*not its class"),
        (TinyModule, {"max_time": 5}, {}, '(?s)needs a unit.*"5s"'),
        (
            TinyModule,
            {"accumulate_grad_batches": "4"},
            {},
            "accumulation must be a number of micro-batches",
        ),
        (TinyModule, {}, {"ckpt_path": True}, "ckpt_path must be a path"),
    ],
)
def test_mistakes_that_have_a_name(
    module: Any, options: Any, fit: Any, said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Trainer(**{**QUIET, "max_steps": 1, **options}).fit(
            module(), [torch.randn(4, 32)], **fit
        )


def test_a_later_loss_of_several_numbers_gets_a_note() -> None:
    class Rows(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.layer(batch)
            return loss.mean() if batch_idx == 0 else loss[:, 0]

    with pytest.raises(RuntimeError) as caught:
        Trainer(max_epochs=1, **QUIET).fit(Rows(), [torch.randn(4, 32)] * 2)
    assert "is one number: use its .mean()" in "\n".join(caught.value.__notes__)


def test_a_directory_of_checkpoints_is_none_of_them(tmp_path: Path) -> None:
    Trainer(
        **{**QUIET, "enable_checkpointing": True},
        max_epochs=1,
        default_root_dir=tmp_path,
    ).fit(TinyModule(), [torch.randn(4, 32)])
    with pytest.raises(
        CheckpointError, match=r"(?s)not one of them.*pass .*step-00000001"
    ):
        Trainer(**QUIET, max_epochs=2).fit(
            TinyModule(), [torch.randn(4, 32)], ckpt_path=tmp_path / "checkpoints"
        )


def test_a_missing_lightning_attribute_names_its_replacement():
    trainer = Trainer(barebones=True)
    with pytest.raises(AttributeError, match=r"no scaler: trainer\.precision_plugin"):
        trainer.scaler = None
    with pytest.raises(AttributeError, match=r"no scaler: trainer\.precision_plugin"):
        _ = trainer.scaler
    assert not hasattr(trainer, "profiler")
    assert trainer.num_nodes == 1
    assert trainer.strategy.device is not None
