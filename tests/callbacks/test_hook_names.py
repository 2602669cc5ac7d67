"""Hooks have Lightning's parameter names, so that overrides and calls by keyword from Lightning programs work."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from trainer_kit import Callback, DataModule, LightningModule, Trainer
from trainer_kit import callbacks as library
from trainer_kit.callbacks import EarlyStopping
from trainer_kit.testing import TinyModule

_BOTH = ("trainer", "pl_module")
_BATCH = ("batch", "batch_idx")
_EVALUATION = (*_BATCH, "dataloader_idx")
# The parameters of Lightning 2.6's hooks.
CALLBACK = {
    **{
        f"on_{stage}_{when}": _BOTH
        for stage in ("train", "validation", "test", "predict")
        for when in ("start", "end")
    },
    **{
        f"on_{stage}_epoch_{when}": _BOTH
        for stage in ("train", "validation", "test", "predict")
        for when in ("start", "end")
    },
    **{
        f"on_{stage}_batch_start": (*_BOTH, *_EVALUATION)
        for stage in ("validation", "test", "predict")
    },
    **{
        f"on_{stage}_batch_end": (*_BOTH, "outputs", *_EVALUATION)
        for stage in ("validation", "test", "predict")
    },
    "setup": (*_BOTH, "stage"),
    "teardown": (*_BOTH, "stage"),
    "on_fit_start": _BOTH,
    "on_fit_end": _BOTH,
    "on_sanity_check_start": _BOTH,
    "on_sanity_check_end": _BOTH,
    "on_train_batch_start": (*_BOTH, *_BATCH),
    "on_train_batch_end": (*_BOTH, "outputs", *_BATCH),
    "on_exception": (*_BOTH, "exception"),
    "on_save_checkpoint": (*_BOTH, "checkpoint"),
    "on_load_checkpoint": (*_BOTH, "checkpoint"),
    "on_before_backward": (*_BOTH, "loss"),
    "on_after_backward": _BOTH,
    "on_before_optimizer_step": (*_BOTH, "optimizer"),
    "on_before_zero_grad": (*_BOTH, "optimizer"),
    "state_dict": (),
    "load_state_dict": ("state_dict",),
}
_MODULE_ONLY = {
    "training_step": ("args", "kwargs"),
    "backward": ("loss", "args", "kwargs"),
    "optimizer_step": ("epoch", "batch_idx", "optimizer", "optimizer_closure"),
    "optimizer_zero_grad": ("epoch", "batch_idx", "optimizer"),
    "lr_scheduler_step": ("scheduler", "metric"),
    "configure_gradient_clipping": (
        "optimizer",
        "gradient_clip_val",
        "gradient_clip_algorithm",
    ),
    "manual_backward": ("loss", "args", "kwargs"),
    "all_gather": ("data", "group", "sync_grads"),
    "toggle_optimizer": ("optimizer",),
    "clip_gradients": ("optimizer", "gradient_clip_val", "gradient_clip_algorithm"),
}
_DATA = {
    "prepare_data": (),
    "setup": ("stage",),
    "teardown": ("stage",),
    "train_dataloader": (),
    "on_before_batch_transfer": ("batch", "dataloader_idx"),
    "transfer_batch_to_device": ("batch", "device", "dataloader_idx"),
    "on_after_batch_transfer": ("batch", "dataloader_idx"),
}
_NOT_IN_MODULES = (
    "setup",
    "teardown",
    "state_dict",
    "load_state_dict",
    "on_sanity_check_start",
    "on_sanity_check_end",
)
MODULE = {
    **{
        name: names[2:]
        for name, names in CALLBACK.items()
        if name not in _NOT_IN_MODULES and name != "on_exception"
    },
    **_MODULE_ONLY,
    **_DATA,
}


def _parameters(function: Any) -> tuple[str, ...]:
    return tuple(
        name for name in inspect.signature(function).parameters if name != "self"
    )


@pytest.mark.parametrize(
    ("cls", "table"),
    [(Callback, CALLBACK), (LightningModule, MODULE), (DataModule, _DATA)],
    ids=lambda x: str(x)[:20],
)
def test_hooks_have_lightnings_parameter_names(
    cls: type, table: dict[str, tuple[str, ...]]
) -> None:
    assert {name: _parameters(getattr(cls, name)) for name in table} == table


def test_every_callback_of_the_library_overrides_hooks_with_the_same_names() -> None:
    hooks = [
        name
        for name in vars(Callback)
        if name.startswith("on_") or name in ("setup", "teardown")
    ]
    classes = [getattr(library, name) for name in library.__all__]
    callbacks = [
        cls for cls in classes if isinstance(cls, type) and issubclass(cls, Callback)
    ]
    assert len(callbacks) > 20
    for cls in callbacks:
        for hook in hooks:
            override = inspect.getattr_static(cls, hook)
            assert _parameters(override) == _parameters(vars(Callback)[hook]), (
                cls,
                hook,
            )


class _Validated(TinyModule):
    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("v", self.layer(batch).mean())


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
    trainer.fit(_Validated(), [torch.randn(2, 32)] * 2, [torch.randn(2, 32)])
    return trainer


def test_overrides_call_super_by_keyword() -> None:
    class Stopping(EarlyStopping):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            super().on_validation_end(trainer=trainer, pl_module=pl_module)

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            super().on_train_epoch_end(trainer=trainer, pl_module=pl_module)

    stopping = Stopping("v")
    trainer = _fit(stopping)
    assert stopping.best_score == trainer.callback_metrics["v"]


def test_overrides_call_the_base_class_by_keyword() -> None:
    """For type checkers these parameters are positional only; in a run they are not."""
    stages: list[str] = []

    class Own(Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            hook: Any = super().setup
            hook(trainer=trainer, pl_module=pl_module, stage=stage)
            stages.append(stage)

    _fit(Own())
    assert stages == ["fit"]


def test_an_override_may_use_other_parameter_names() -> None:
    names: list[str] = []

    class Own(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            names.append(type(module).__name__)

    _fit(Own())
    assert names == ["_Validated"]
