"""Every hook of module, datamodule and callback may be called through super(), with what it was called with."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainer_kit import Callback, DataModule, Trainer, TrainModule
from trainer_kit.callbacks import ModelCheckpoint
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hooks import DataHooks, ModuleHooks

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 2,
}


class Plain(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0]).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self(batch[0]).pow(2).mean())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self(batch[0]).pow(2).mean())

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def train_dataloader(self) -> DataLoader[Any]:
        torch.manual_seed(1)
        return DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class Data(DataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return Plain.train_dataloader(self)  # type: ignore[arg-type]

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def through_super(base: type, names: list[str]) -> tuple[type, set[str]]:
    """A subclass that overrides each hook and calls it through super(); the names of those that were called."""
    called: set[str] = set()

    def override(name: str) -> Any:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return getattr(super(made, self), name)(*args, **kwargs)

        return hook

    made = type(
        f"Super{base.__name__}", (base,), {name: override(name) for name in names}
    )
    return made, called


def run(module: Any, data: Any, callbacks: list[Any], path: Any) -> tuple[Any, ...]:
    keeper = ModelCheckpoint(path, save_last=True)
    trainer = Trainer(
        callbacks=[*callbacks, keeper],
        gradient_clip_val=1.0,
        default_root_dir=path,
        **QUIET,
    )
    trainer.fit(module, datamodule=data)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    tested = trainer.validate(module, datamodule=data, verbose=False) + trainer.test(
        module, datamodule=data, verbose=False
    )
    again = Trainer(
        callbacks=callbacks, enable_checkpointing=False, **{**QUIET, "max_epochs": 3}
    )
    predicted = trainer.predict(module, datamodule=data)
    again.fit(module, datamodule=data, ckpt_path=keeper.last_model_path)
    return weights, tested, torch.cat(predicted), module.state_dict()


def hooks(*bases: type) -> list[str]:
    return [
        n
        for b in bases
        for n, f in vars(b).items()
        if not n.startswith("_") and callable(f)
    ]


MODULE = [
    *hooks(ModuleHooks, DataHooks),
    *(
        "training_step",
        "validation_step",
        "test_step",
        "predict_step",
        "configure_optimizers",
        "configure_model",
    ),
    *(
        "configure_callbacks",
        "configure_gradient_clipping",
        "backward",
        "optimizer_step",
        "optimizer_zero_grad",
    ),
    *("lr_scheduler_step", "forward", "state_dict", "load_state_dict"),
]
DATA = [*hooks(DataHooks), "state_dict", "load_state_dict"]
CALLBACK = [
    name for name in hooks(Callback) if name not in ("log", "log_dict")
]  # methods that a hook calls


def test_every_hook_forwards_to_its_default(tmp_path: Any) -> None:
    expected = run(Plain(), Data(), [], tmp_path / "plain")
    module, module_called = through_super(Plain, MODULE)
    data, data_called = through_super(Data, DATA)
    callback, callback_called = through_super(Callback, CALLBACK)
    found = run(module(), data(), [callback()], tmp_path / "super")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    # The data hooks of the datamodule come before those of the module, and nothing raised.
    own = {"on_exception", *hooks(DataHooks)} - {"prepare_data", "setup", "teardown"}
    assert module_called == set(MODULE) - own
    assert data_called == set(DATA) - {"on_exception", "load_state_dict"}
    assert callback_called == set(CALLBACK) - {"on_exception", "load_state_dict"}
    bare, bare_called = through_super(Plain, MODULE)
    torch.testing.assert_close(
        run(bare(), None, [], tmp_path / "bare"), expected, rtol=0, atol=0
    )
    assert bare_called == set(MODULE) - {"on_exception"}


@pytest.mark.parametrize("owner", ["module", "datamodule"])
def test_the_default_transfer_moves_the_tensors_that_the_override_does_not(
    owner: str,
) -> None:
    """Lightning's documented pattern: one kind of batch by hand, all others through super()."""
    moved = []

    class Pattern:
        def transfer_batch_to_device(
            self, batch: Any, device: torch.device, dataloader_idx: int
        ) -> Any:
            if isinstance(batch, str):
                return batch
            moved.append(
                super().transfer_batch_to_device(
                    batch, torch.device("meta"), dataloader_idx
                )
            )
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

    module = (
        type("Module", (Pattern if owner == "module" else object, Plain), {})()
        if owner == "module"
        else Plain()
    )
    data = (
        type("Datamodule", (Pattern, Data), {})() if owner == "datamodule" else Data()
    )
    Trainer(barebones=True, accelerator="cpu", max_epochs=1).fit(
        module, datamodule=data
    )
    assert [batch[0].device.type for batch in moved] == ["meta"] * len(moved) != []


@pytest.mark.parametrize("arguments", [(0,), (0, 1), ()])
def test_the_default_prediction_takes_a_loader_index(
    arguments: tuple[int, ...],
) -> None:
    class Passes(Plain):
        def predict_step(
            self, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> Any:
            return super(Plain, self).predict_step(batch[0], *arguments)

    trainer = Trainer(barebones=True, accelerator="cpu")
    first, second = trainer.predict(
        Passes(), [Data().train_dataloader(), Data().train_dataloader()]
    )
    torch.testing.assert_close(first, second)
    assert Passes().predict_step(batch=[torch.ones(1, 4)], batch_idx=0).shape == (1, 2)


def test_a_step_without_a_default_warns() -> None:
    module = TrainModule()
    with pytest.warns(UserWarning, match="training_step has no default"):
        assert module.training_step(None, 0) is None
    with pytest.warns(UserWarning, match="configure_optimizers has no default"):
        assert module.configure_optimizers() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert module.validation_step(None, 0, 1) is None
        assert module.test_step(None, 0) is None
    for owner in (module, DataModule()):
        for name in (
            "train_dataloader",
            "val_dataloader",
            "test_dataloader",
            "predict_dataloader",
        ):
            with pytest.raises(
                NotImplementedError,
                match=rf"{type(owner).__name__} has no {name}: define",
            ):
                getattr(owner, name)()
    with pytest.raises(ConfigurationError, match="loss_weight has no default"):
        module.loss_weight(None)


def test_the_documented_state_key_of_a_callback() -> None:
    class Counts(Callback):
        @property
        def state_key(self) -> str:
            return self._generate_state_key(what="epochs")

    assert Counts().state_key.endswith("Counts{'what': 'epochs'}")


def test_freeze_and_unfreeze_return_the_module() -> None:
    module = Plain()
    assert module.freeze() is module
    assert not module.training
    assert module.unfreeze() is module
    assert module.training
