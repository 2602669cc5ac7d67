"""`log` and `log_dict` of callbacks record values as those of the module do in the same hook."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from trainer_kit import Callback, ConfigurationError, LogError, Trainer
from trainer_kit.testing import TinyModule


class _Module(TinyModule):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass


def _fit(*callbacks: Callback) -> Trainer:
    trainer = Trainer(
        max_epochs=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(_Module(), [torch.ones(2, 32)] * 4, [torch.ones(2, 32)] * 2)
    return trainer


class _Logging(Callback):
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.log("batch", float(batch_idx), on_step=True, on_epoch=True)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.log("epoch", 1.0)
        self.log_dict({"first": 2.0, "second": torch.tensor(3.0)}, prog_bar=True)

    def on_validation_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self.log("validated", float(batch_idx))


def test_values_of_callbacks_are_reduced_like_those_of_the_module() -> None:
    trainer = _fit(_Logging())
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    expected = {
        "batch_epoch": 1.5,
        "epoch": 1.0,
        "first": 2.0,
        "second": 3.0,
        "validated": 0.5,
    }
    assert values == {**values, **expected}
    assert float(values["batch_step"]) == 3.0
    assert {"first", "second"} <= trainer.progress_bar_metrics.keys()


@pytest.mark.parametrize(
    ("hook", "options", "problem"),
    [
        ("on_train_end", {}, "cannot be logged in on_train_end"),
        ("on_fit_start", {}, "cannot be logged in on_fit_start"),
        ("on_train_epoch_end", {"on_step": True}, "has no steps in on_train_epoch_end"),
        (
            "on_train_batch_start",
            {"on_step": False, "on_epoch": False},
            "would never be shown",
        ),
    ],
)
def test_the_hook_is_checked_as_in_the_module(
    hook: str, options: dict[str, bool], problem: str
) -> None:
    def log(self: Any, trainer: Any, pl_module: Any, *arguments: Any) -> None:
        self.log("value", 1.0, **options)

    callback = type("Wrong", (Callback,), {hook: log})()
    with pytest.raises(LogError, match=problem):
        _fit(callback)


def test_a_value_outside_of_a_run_is_refused() -> None:
    callback = _Logging()
    _fit(callback)
    with pytest.raises(ConfigurationError, match="outside of a Trainer"):
        callback.log("late", 1.0)


def test_the_value_goes_to_the_module_of_the_innermost_run() -> None:
    """A callback may run another Trainer; afterwards its own values go to the outer run again."""
    inner: list[Trainer] = []

    class Nested(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            inner.append(_fit(_Logging()))
            self.log("outer", 5.0)

    outer = _fit(Nested())
    assert float(outer.callback_metrics["outer"]) == 5.0
    assert "epoch" not in outer.callback_metrics
    assert float(inner[0].callback_metrics["epoch"]) == 1.0


def test_a_callback_may_use_the_names_for_something_else() -> None:
    lines: list[str] = []

    class Own(Callback):
        def log(self, message: str) -> None:  # type: ignore[override]
            lines.append(message)

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.log("start")

    _fit(Own())
    assert lines == ["start"]
