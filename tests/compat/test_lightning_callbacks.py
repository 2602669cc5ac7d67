"""Callbacks that subclass Lightning's class: the Trainer takes them as Lightning does.

The classes below stand for Lightning's: the same names and modules, empty hooks. With Lightning 2.6.6 and Optuna
installed, the orders here were recorded from Lightning itself.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import trainer_kit as tk
from trainer_kit import ConfigurationError, Trainer
from trainer_kit.testing import TinyModule, run_distributed

_NAMES = """on_fit_start on_fit_end on_sanity_check_start on_sanity_check_end on_train_start on_train_end
    on_train_epoch_start on_train_epoch_end on_train_batch_start on_train_batch_end on_before_zero_grad
    on_before_backward on_after_backward on_before_optimizer_step on_validation_start on_validation_end
    on_validation_epoch_start on_validation_epoch_end on_validation_batch_start on_validation_batch_end
    on_test_start on_test_end on_predict_start on_predict_end on_exception on_save_checkpoint
    on_load_checkpoint"""
HOOKS = _NAMES.split()
# What Lightning 2.6.6 calls in a fit of one batch.
RECORDED = """setup on_fit_start on_sanity_check_start on_validation_start on_validation_epoch_start
    on_validation_batch_start on_validation_batch_end on_validation_epoch_end on_validation_end on_sanity_check_end
    on_train_start on_train_epoch_start on_train_batch_start on_before_zero_grad on_before_backward
    on_after_backward on_before_optimizer_step on_train_batch_end on_validation_start on_validation_epoch_start
    on_validation_batch_start on_validation_batch_end on_validation_epoch_end on_validation_end on_train_epoch_end
    on_train_end on_fit_end teardown"""
DATA = torch.arange(12 * 32.0).reshape(12, 32) / 384


def _empty(name: str) -> Any:
    def hook(self: Any, trainer: Any, pl_module: Any, *arguments: Any) -> None: ...

    hook.__name__ = name
    return hook


class Callback:
    """In the place of Lightning's class."""

    __module__ = "lightning.pytorch.callbacks.callback"

    @property
    def state_key(self) -> str:
        return type(self).__qualname__

    def _generate_state_key(self, **arguments: Any) -> str:
        return f"{type(self).__qualname__}{arguments!r}"

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None: ...
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None: ...
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


for _name in HOOKS:
    setattr(Callback, _name, _empty(_name))


class Checkpoint(Callback):
    __module__ = "lightning.pytorch.callbacks.checkpoint"


class ModelCheckpoint(Checkpoint):
    __module__ = "lightning.pytorch.callbacks.model_checkpoint"


class EarlyStopping(Callback):
    """The parts of Lightning's class that use the Trainer."""

    __module__ = "lightning.pytorch.callbacks.early_stopping"

    def __init__(self, monitor: str, patience: int = 1) -> None:
        self.monitor, self.patience = monitor, patience
        self.best, self.wait, self.stopped = float("inf"), 0, -1

    @property
    def state_key(self) -> str:
        return self._generate_state_key(monitor=self.monitor)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        value = float(trainer.callback_metrics[self.monitor])
        self.wait = 0 if value < self.best else self.wait + 1
        self.best = min(value, self.best)
        stops = trainer.strategy.reduce_boolean_decision(
            self.wait >= self.patience, all=False
        )
        trainer.should_stop = trainer.should_stop or stops
        if stops:
            self.stopped = trainer.current_epoch

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "wait": self.wait}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.wait = state_dict["best"], state_dict["wait"]


class Pruned(Exception):
    """In the place of Optuna's `TrialPruned`."""


class Pruning(Callback):
    """The calls of Optuna's callback, on a list."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.reports: list[tuple[int, float]] = []
        self.is_distributed: bool | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.is_distributed = trainer._accelerator_connector.is_distributed

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.sanity_checking:
            return
        value = trainer.callback_metrics["val_loss"].item()
        self.reports.append((pl_module.current_epoch, value))
        stops = trainer.strategy.broadcast(value < self.limit)
        if stops and not self.is_distributed:
            raise Pruned
        trainer.should_stop = trainer.should_stop or stops


class Rates(Callback):
    """The attributes that Lightning's monitor of learning rates uses."""

    def __init__(self) -> None:
        self.rates: list[tuple[int, float]] = []

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, index: int
    ) -> None:
        if trainer._logger_connector.should_update_logs:
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            self.rates.append((trainer.fit_loop.epoch_loop._batches_that_stepped, rate))
            trainer.callback_metrics["lr-SGD"] = torch.tensor(rate)


class Keeps(Checkpoint):
    """A checkpoint callback of another package: it keeps what it needs itself."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(sorted(trainer.callback_metrics))


class Net(TinyModule):
    """Its validation loss falls until ``best``, and rises from there."""

    def __init__(self, best: int = 99) -> None:
        super().__init__()
        self.best = best

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", torch.tensor(float(abs(self.best - self.current_epoch))))


def fit(
    *callbacks: Any, module: Any = None, path: Any = None, **options: Any
) -> Trainer:
    trainer = Trainer(
        **{
            "max_epochs": 4,
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": list(callbacks),
            "enable_checkpointing": False,
            **options,
        }
    )
    loaders = DataLoader(DATA, batch_size=4), DataLoader(DATA, batch_size=12)  # type: ignore[arg-type]
    trainer.fit(Net() if module is None else module, *loaders, ckpt_path=path)
    return trainer


def recording(base: type) -> Any:
    """A callback that overrides every hook of ``base`` and lists the calls."""
    calls: list[str] = []

    def hook_of(name: str) -> Any:
        def hook(self: Any, trainer: Any, pl_module: Any, *arguments: Any) -> None:
            assert isinstance(trainer, Trainer)
            assert isinstance(pl_module, Net)
            calls.append(name)

        return hook

    names = [*HOOKS, "setup", "teardown"]
    made: Any = type("Records", (base,), {name: hook_of(name) for name in names})()
    made.calls = calls
    return made


def test_every_hook_is_called_as_lightning_calls_it() -> None:
    theirs, ours = recording(Callback), recording(tk.Callback)
    fit(theirs, ours, max_epochs=1, limit_train_batches=1)
    assert theirs.calls == ours.calls
    assert theirs.calls == RECORDED.split()


def test_only_overridden_hooks_are_called() -> None:
    trainer = fit(Pruning(-1.0), Rates())
    text = str(trainer.explain(Net()))
    assert [
        line.split()[0] for line in text.splitlines() if line.endswith("Rates")
    ] == [
        *("callbacks", "on_train_batch_start"),
    ]
    adapter: Any = trainer.callbacks[0]
    assert vars(adapter).keys() == {"callback", "on_fit_start", "on_validation_end"}
    assert adapter.on_fit_start.__self__ is adapter.callback


def test_early_stopping_stops_in_the_same_epoch_and_continues_from_a_checkpoint(
    tmp_path: Path,
) -> None:
    stopping = EarlyStopping("val_loss")
    trainer = fit(stopping, module=Net(best=1))
    # As in Lightning, the user's object: scripts read its `stopped_epoch`.
    assert trainer.early_stopping_callback is stopping
    assert (trainer.current_epoch, stopping.stopped, stopping.best) == (3, 2, 0.0)
    trainer.save_checkpoint(tmp_path / "saved")
    again = EarlyStopping("val_loss", patience=3)
    trainer = fit(again, module=Net(best=1), max_epochs=9, path=tmp_path / "saved")
    assert (again.best, again.stopped) == (0.0, 4)
    assert [callback.state_key for callback in trainer.callbacks] == [
        "EarlyStopping{'monitor': 'val_loss'}"
    ]
    with pytest.raises(
        ConfigurationError, match="two callbacks have the same state key"
    ):
        fit(stopping, again)


def test_attributes_of_the_trainer_list_callbacks_of_both_libraries_in_order(
    tmp_path: Path,
) -> None:
    class Patient(EarlyStopping):
        """As packages extend Lightning's class."""

    stopping, patient, keeps = EarlyStopping("val_loss"), Patient("val_loss"), Keeps()
    first = tk.callbacks.EarlyStopping("val_loss", mode="min")
    keeper = tk.callbacks.ModelCheckpoint(tmp_path)
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        callbacks=[first, stopping, Rates(), patient, keeps, keeper],
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    assert trainer.early_stopping_callbacks == [first, stopping, patient]
    assert trainer.checkpoint_callbacks == [keeps, keeper]
    trainer.fit(Net(), *[DataLoader(DATA, batch_size=4)] * 2)  # type: ignore[arg-type]
    # Checkpoints are still written into the directory of the callback of this library.
    assert keeper.best_model_path
    assert Path(keeper.best_model_path).parent == tmp_path
    assert trainer.early_stopping_callbacks == [first, stopping, patient]


def test_a_pruned_trial_ends_with_the_exception_of_the_callback() -> None:
    pruning = Pruning(limit=97.5)
    with pytest.raises(Pruned):
        fit(pruning)
    assert pruning.reports == [(0, 99.0), (1, 98.0), (2, 97.0)]
    assert pruning.is_distributed is False


def test_a_monitor_reads_the_steps_that_are_logged() -> None:
    rates = Rates()
    trainer = fit(rates, log_every_n_steps=2, max_epochs=2)
    assert rates.rates == [(1, 0.1), (3, 0.1), (5, 0.1)]
    assert trainer.callback_metrics["lr-SGD"] == pytest.approx(0.1)


def test_a_checkpoint_callback_comes_last_and_sees_the_values_of_the_epoch(
    tmp_path: Path,
) -> None:
    keeps = Keeps()
    trainer = fit(
        *(keeps, Rates()),
        max_epochs=1,
        enable_checkpointing=None,
        default_root_dir=tmp_path,
    )
    assert keeps.seen == [["loss", "loss_epoch", "loss_step", "val_loss"]]
    assert [type(callback).__name__ for callback in trainer.callbacks] == [
        "Rates",
        "Keeps",
    ]
    assert trainer.checkpoint_callbacks == [keeps]
    assert trainer.checkpoint_callback is keeps
    assert not list(
        tmp_path.rglob("checkpoints")
    )  # as in Lightning, no ModelCheckpoint is added


def test_a_callback_of_the_module_replaces_the_one_of_its_class() -> None:
    class Configures(Net):
        def configure_callbacks(self) -> Any:
            return [own]

    own, others = Pruning(-1.0), (Pruning(-1.0), Rates())
    trainer = fit(*others, module=Configures(), max_epochs=1)
    assert own.reports == [(0, 99.0)]
    assert others[0].reports == []
    assert [type(callback).__name__ for callback in trainer.callbacks] == [
        "Rates",
        "Pruning",
    ]


def test_an_adapter_is_copied_and_pickled_with_its_callback() -> None:
    adapter: Any = fit(Rates(), max_epochs=1, log_every_n_steps=1).callbacks[0]
    for again in (copy.deepcopy(adapter), pickle.loads(pickle.dumps(adapter))):
        assert (
            again.on_train_batch_start.__self__
            is again.callback
            is not adapter.callback
        )
        assert again.callback.rates == adapter.callback.rates != []
        assert type(again) is type(adapter)


def check_ranks() -> tuple[int, int, list[tuple[int, float]], bool | None]:
    stopping, pruning = EarlyStopping("val_loss"), Pruning(-1.0)
    options = {"devices": 2, "strategy": "ddp", "max_epochs": 6}
    trainer = fit(stopping, pruning, module=Net(best=1), **options)
    return (
        trainer.current_epoch,
        stopping.stopped,
        pruning.reports,
        pruning.is_distributed,
    )


def test_ranks_stop_together() -> None:
    results = run_distributed(check_ranks, 2)
    assert results == [(3, 2, [(0, 1.0), (1, 0.0), (2, 1.0)], True)] * 2


def check_decisions() -> tuple[bool, ...]:
    trainer = fit(devices=2, strategy="ddp", max_epochs=1)
    strategy, first = trainer.strategy, trainer.global_rank == 0
    return tuple(
        strategy.reduce_boolean_decision(*vote)
        for vote in ((first,), (first, False), (True,), (False, False))
    )


def test_ranks_decide_together() -> None:
    assert run_distributed(check_decisions, 2) == [(False, True, True, False)] * 2


def test_what_drives_lightnings_loop_is_refused_with_what_to_write() -> None:
    with pytest.raises(
        ConfigurationError, match=r"from trainer_kit\.callbacks import ModelCh"
    ) as e:
        fit(ModelCheckpoint())
    assert e.value.problem == "Lightning's ModelCheckpoint drives Lightning's own loop"

    class Uploads(ModelCheckpoint):
        __module__ = "uploads"

    with pytest.raises(
        ConfigurationError, match=r"(?s)Uploads extends .*and subclass that"
    ):
        fit(Uploads())


def test_a_class_whose_package_lacks_lightning_is_refused_with_what_to_do() -> None:
    class WithoutBase:
        __module__ = "optuna_integration.pytorch_lightning"

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None: ...

    with pytest.raises(
        ConfigurationError,
        match=r"(?s)WithoutBase has callback hooks.*install lightning",
    ):
        fit(WithoutBase())


def test_optunas_own_callback_prunes() -> None:
    pytest.importorskip("lightning")
    optuna: Any = pytest.importorskip("optuna")
    integration: Any = pytest.importorskip("optuna_integration")

    def objective(trial: Any) -> float:
        fit(integration.PyTorchLightningPruningCallback(trial, "val_loss"))
        return 0.0

    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(lower=97.5))
    study.optimize(objective, n_trials=1)
    assert study.trials[0].state.name == "PRUNED"
    assert study.trials[0].intermediate_values == {0: 99.0, 1: 98.0, 2: 97.0}
