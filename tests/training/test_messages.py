"""Lines that a run prints: why it was stopped, and that there was no checkpoint to continue from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_kit import DataModule, Trainer
from trainer_kit.callbacks import ModelCheckpoint, TQDMProgressBar
from trainer_kit.core.errors import CheckpointError, DataError
from trainer_kit.testing import TinyModule

BATCHES = [torch.ones(2, 32)] * 3


def quiet(**settings: Any) -> Trainer:
    return Trainer(accelerator="cpu", barebones=True, **settings)


def test_the_reason_of_a_stop_is_printed_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer = quiet(max_epochs=5)

    @trainer.on("train_step_end")
    def stop(trainer: Any, module: Any) -> None:
        if trainer.global_step >= 2:
            trainer.stop("it is good enough")

    trainer.fit(TinyModule(), BATCHES)
    assert capsys.readouterr().out == "stopped after step 2: it is good enough\n"


def test_a_reached_limit_prints_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    quiet(max_epochs=1).fit(TinyModule(), BATCHES)
    assert capsys.readouterr().out == ""


def test_last_without_a_checkpoint_starts_a_new_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = quiet(max_epochs=1, default_root_dir=tmp_path)
    trainer.fit(TinyModule(), BATCHES, ckpt_path="last")
    assert trainer.global_step == 3
    assert (
        capsys.readouterr().out
        == f"no checkpoint is in {tmp_path}/checkpoints yet: this run starts from the beginning\n"
    )


def test_testing_last_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint is in"):
        quiet(default_root_dir=tmp_path).test(TinyModule(), BATCHES, ckpt_path="last")


def test_a_log_without_a_trainer_warns_at_the_calling_line() -> None:
    with pytest.warns(UserWarning, match=r"log\('x'\) outside a Trainer") as caught:
        TinyModule().log("x", 1.0)
    assert caught[0].filename == __file__


def test_loaders_that_can_be_read_once_are_reported_before_the_first_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fit(count: int = 3, **options: Any) -> str:
        data = (torch.randn(2, 32) for _ in range(count))
        Trainer(accelerator="cpu", barebones=True, **options).fit(TinyModule(), data)
        return capsys.readouterr().out

    with pytest.raises(DataError, match="no batches left for another pass"):
        fit(max_epochs=3)
    assert (
        "a generator can be read once: after its end, the next of 3 epochs is an error"
        in capsys.readouterr().out
    )
    assert (
        fit(max_epochs=1)
        == fit(max_steps=3)
        == fit(count=6, max_epochs=3, limit_train_batches=2)
        == ""
    )


def test_messages_do_not_depend_on_the_progress_bar(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Talks(DataModule):
        def setup(self, stage: str) -> None:
            self.trainer.print("in setup, ahead of the bar's own")

        def train_dataloader(self) -> Any:
            return BATCHES

    for bar in (TQDMProgressBar(), TQDMProgressBar(refresh_rate=0)):
        trainer = Trainer(
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            callbacks=bar,
        )
        trainer.on("train_start")(lambda trainer, module: trainer.print("in training"))
        trainer.fit(TinyModule(), datamodule=Talks())
        lines = capsys.readouterr().out.splitlines()
        assert lines[:2] == ["in setup, ahead of the bar's own", "in training"]
        assert [line.split(":")[0] for line in lines[2:]] == (
            ["fit"] if bar.is_enabled else []
        )  # the bar's summary


def test_a_second_fit_starts_at_step_zero_and_prints_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer = quiet(max_epochs=2)
    line = "this fit starts at step 0 with new optimizers; the last one ended at step 6"
    module, trained = TinyModule(), []
    trainer.on("train_step_end")(
        lambda trainer, module: trained.append(trainer.global_step)
    )
    assert "begins" not in trainer.explain(module, BATCHES)
    capsys.readouterr()
    trainer.validate(module, BATCHES, verbose=False)  # no fit
    trainer.fit(module, BATCHES)
    assert capsys.readouterr().out == ""
    assert (
        "begins       at step 0, with new optimizers (the last fit ended at step 6)"
        in trainer.explain(module)
    )
    capsys.readouterr()
    for again in (module, TinyModule()):
        trainer.fit(again, BATCHES)
        assert capsys.readouterr().out.startswith(line)
    assert trained == [1, 2, 3, 4, 5, 6] * 3


def test_a_fit_from_a_checkpoint_prints_its_start_and_not_that_it_is_new(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, module = quiet(max_epochs=1), TinyModule()
    first.fit(module, BATCHES)
    first.save_checkpoint(tmp_path / "saved")
    second = quiet(max_epochs=2)
    second.fit(module, BATCHES, ckpt_path=tmp_path / "saved")
    second.fit(module, BATCHES, ckpt_path=tmp_path / "saved")
    out = capsys.readouterr().out
    assert out.count("resuming from step 3") == 2
    assert "starts at step 0" not in out
    assert second.global_step == 6


@pytest.mark.parametrize("monitor", ["val_loss", None])
def test_an_evaluation_prints_which_weights_it_loads(
    monitor: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keeper = ModelCheckpoint(tmp_path, monitor=monitor, save_last=True)
    options = {
        "logger": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
    }
    trainer, module = (
        Trainer(accelerator="cpu", max_epochs=2, callbacks=keeper, **options),
        TinyModule(),
    )
    trainer.fit(module, BATCHES, BATCHES)
    best = (
        "the best checkpoint of the last fit, val_loss = "
        if monitor
        else "the newest checkpoint of the last fit;"
    )
    for verb in ("validate", "test", "predict"):
        capsys.readouterr()
        getattr(trainer, verb)(dataloaders=BATCHES)
        said = capsys.readouterr().out
        assert said.startswith(f"{verb}: weights of {keeper.best_model_path}: {best}")
        assert "pass the module to use its own, or ckpt_path=" in said
        getattr(trainer, verb)(module, BATCHES)
        assert "weights of" not in capsys.readouterr().out
        for chosen, path in (
            ("best", keeper.best_model_path),
            (keeper.best_model_path, keeper.best_model_path),
        ):
            getattr(trainer, verb)(module, BATCHES, ckpt_path=chosen)
            assert capsys.readouterr().out.startswith(f"{verb}: weights of {path}\n")
        getattr(trainer, verb)(dataloaders=BATCHES, ckpt_path="last")
        assert capsys.readouterr().out.startswith(f"{verb}: weights of {tmp_path}")
