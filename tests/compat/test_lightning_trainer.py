"""Attributes of Lightning's Trainer, as callbacks and scripts read and set them."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import shutil
import signal

import pytest
import torch
from torch.utils.data import DataLoader

import trainer_kit as tk
from trainer_kit.core.states import RunningStage, TrainerFn, TrainerState, TrainerStatus
from trainer_kit.testing import TinyModule

QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}
DATA = [
    torch.randn(4, 32, generator=torch.Generator().manual_seed(number))
    for number in range(3)
]


class Watch(tk.Callback):
    """Keeps the state of the Trainer at each hook."""

    def __init__(self):
        self.seen = []

    def note(self, trainer):
        state = trainer.state
        entry = (state.status, state.fn, state.stage)
        if not self.seen or self.seen[-1] != entry:
            self.seen.append(entry)

    def on_fit_start(self, trainer, module):
        self.note(trainer)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.note(trainer)

    def on_validation_batch_start(
        self, trainer, module, batch, batch_idx, dataloader_idx=0
    ):
        self.note(trainer)

    def on_test_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        self.note(trainer)

    def on_predict_batch_start(
        self, trainer, module, batch, batch_idx, dataloader_idx=0
    ):
        self.note(trainer)

    def on_exception(self, trainer, module, exception):
        self.note(trainer)


class Validates(TinyModule):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch).mean())


def test_the_state_follows_the_entry_points():
    watch, module = Watch(), Validates()
    trainer = tk.Trainer(**QUIET, max_epochs=1, callbacks=[watch])
    assert (trainer.state.status, trainer.state.fn, trainer.state.stage) == (
        "initializing",
        None,
        None,
    )
    trainer.fit(module, DATA, DATA)
    running, fitting = TrainerStatus.RUNNING, TrainerFn.FITTING
    assert watch.seen == [
        (running, fitting, RunningStage.TRAINING),
        (running, fitting, RunningStage.SANITY_CHECKING),
        (running, fitting, RunningStage.TRAINING),
        (running, fitting, RunningStage.VALIDATING),
    ]
    assert trainer.state.finished
    assert (trainer.state.fn, trainer.state.stage, trainer.interrupted) == (
        "fit",
        None,
        False,
    )
    watch.seen.clear()
    trainer.validate(module, DATA, verbose=False)
    trainer.test(module, DATA, verbose=False)
    trainer.predict(module, DATA)
    assert [(fn, stage) for _, fn, stage in watch.seen] == [
        (TrainerFn.VALIDATING, RunningStage.VALIDATING),
        (TrainerFn.TESTING, RunningStage.TESTING),
        (TrainerFn.PREDICTING, RunningStage.PREDICTING),
    ]


def test_an_exception_interrupts():
    class Fails(TinyModule):
        def training_step(self, batch, batch_idx):
            raise ArithmeticError

    watch = Watch()
    trainer = tk.Trainer(**QUIET, max_epochs=1, callbacks=[watch])
    with pytest.raises(ArithmeticError):
        trainer.fit(Fails(), DATA)
    assert watch.seen[-1][0] == TrainerStatus.INTERRUPTED
    assert trainer.interrupted
    assert trainer.state.stopped
    trainer.fit(TinyModule(), DATA)
    assert not trainer.interrupted


def test_sigterm_is_seen_by_hooks():
    seen = []

    class Ends(tk.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            os.kill(os.getpid(), signal.SIGTERM)
            seen.append(trainer.received_sigterm)

    trainer = tk.Trainer(**QUIET, max_epochs=1, callbacks=[Ends()])
    with pytest.raises(SystemExit, match="143"):
        trainer.fit(TinyModule(), DATA)
    assert seen == [True]
    assert trainer.interrupted


def test_a_refused_inner_fit_does_not_interrupt_the_outer_one():
    seen = []

    class Nests(tk.Callback):
        def on_train_start(self, trainer, module):
            with pytest.raises(tk.ConfigurationError, match="fit inside fit"):
                trainer.fit(module, DATA)
            seen.append(trainer.status)

    trainer = tk.Trainer(**QUIET, max_epochs=1, callbacks=[Nests()])
    trainer.fit(TinyModule(), DATA)
    assert (seen, trainer.status) == ([TrainerStatus.RUNNING], TrainerStatus.FINISHED)


def test_an_error_of_a_teardown_counts_as_an_interruption():
    class Fails(tk.Callback):
        def teardown(self, trainer, module, stage):
            raise ArithmeticError

    trainer = tk.Trainer(**QUIET, max_epochs=1, callbacks=[Fails()])
    with pytest.raises(ArithmeticError):
        trainer.fit(TinyModule(), DATA)
    assert trainer.interrupted


def test_every_argument_is_an_attribute():
    given = {
        "limit_train_batches": 2,
        "limit_val_batches": 0.5,
        "val_check_interval": 0.5,
        "gradient_clip_val": 0.5,
        "deterministic": "warn",
        "detect_anomaly": True,
        "max_time": "00:01:00:00",
        "inference_mode": False,
        "global_batch_size": 8,
        "log_every_n_steps": 7,
        "reproducible_workers": True,
    }
    trainer = tk.Trainer(**QUIET, max_epochs=3, **given)
    for name, value in {
        **given,
        "max_epochs": 3,
        "num_nodes": 1,
        "devices": 1,
        "device_ids": [0],
    }.items():
        assert getattr(trainer, name) == value, name
    elsewhere = {"profiler", "plugins"}  # an error that names the attribute
    parameters = set(inspect.signature(tk.Trainer).parameters)
    assert {name for name in parameters if not hasattr(trainer, name)} == elsewhere
    with pytest.raises(AttributeError, match="pass it to a new Trainer"):
        trainer.inference_mode = True


def test_a_larger_limit_continues_the_fit():
    """As in Lightning: counts go on, optimizers are new, the module is as it was left."""

    class Counts(Validates):
        def __init__(self):
            super().__init__()
            self.epochs, self.made, self.validated = [], 0, []

        def configure_optimizers(self):
            self.made += 1
            return super().configure_optimizers()

        def on_train_epoch_start(self):
            self.epochs.append((self.current_epoch, self.global_step))

        def on_validation_end(self):
            if not self.trainer.sanity_checking:
                self.validated.append(self.global_step)

    module, trainer = Counts(), tk.Trainer(**QUIET, max_epochs=2)
    trainer.fit(module, DATA, DATA)
    weight = module.layer.weight.detach().clone()
    trainer.fit_loop.max_epochs = 4
    assert trainer.max_epochs == trainer.fit_loop.max_epochs == 4
    trainer.fit(module, DATA, DATA)
    assert module.epochs == [(0, 0), (1, 3), (2, 6), (3, 9)]
    assert module.validated == [3, 6, 9, 12]
    assert (trainer.current_epoch, trainer.global_step, module.made) == (4, 12, 2)
    assert not torch.equal(weight, module.layer.weight)
    trainer.fit(module, DATA, DATA)  # nothing was set: a fit of its own
    assert module.epochs[4:] == [(0, 0), (1, 3), (2, 6), (3, 9)]


def test_a_continued_fit_has_the_weights_of_one_that_was_not_split():
    def ended(*limits):
        tk.seed_everything(1)
        module = TinyModule()
        trainer = tk.Trainer(**QUIET, max_steps=limits[0], max_epochs=-1)
        loader = DataLoader(torch.randn(24, 32), batch_size=4, shuffle=True)
        trainer.fit(module, loader)
        for limit in limits[1:]:
            trainer.fit_loop.epoch_loop.max_steps = limit
            trainer.fit(module, loader)
        assert trainer.global_step == limits[-1]
        return module.layer.weight

    assert torch.equal(
        ended(10), ended(4, 6, 10)
    )  # inside an epoch, and at the end of one; SGD has no state


class Reads(TinyModule):
    """Keeps the first value of each batch that a step has begun with."""

    def __init__(self, fails_at=None):
        super().__init__()
        self.read, self.fails_at = [], fails_at

    def training_step(self, batch, batch_idx):
        if batch_idx == self.fails_at:
            self.fails_at = None
            raise ArithmeticError
        self.read.append(batch[0, 0].item())
        return super().training_step(batch, batch_idx)


def _numbered():
    return DataLoader(
        torch.arange(24.0)[:, None].expand(24, 32) / 1000, batch_size=2, shuffle=True
    )


@pytest.mark.parametrize("resumed", [False, True])
def test_a_continued_fit_keeps_the_order_of_the_data(tmp_path, resumed):
    tk.seed_everything(1)
    trainer, module = tk.Trainer(**QUIET, max_steps=3), Reads()
    trainer.fit(module, _numbered())
    trainer.save_checkpoint(tmp_path / "saved")
    tk.seed_everything(2)
    if resumed:  # it has the order of its checkpoint
        trainer = tk.Trainer(**QUIET, max_steps=6)
        trainer.fit(module, _numbered(), ckpt_path=tmp_path / "saved")
    trainer.fit_loop.max_steps = 12
    trainer.fit(module, _numbered())
    assert (len(module.read), len(set(module.read))) == (12, 12)


def test_a_continued_fit_repeats_a_window_that_an_exception_has_left():
    trainer, module = (
        tk.Trainer(**QUIET, max_epochs=1, accumulate_grad_batches=2),
        Reads(fails_at=3),
    )
    with pytest.raises(ArithmeticError):
        trainer.fit(module, _numbered())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, _numbered())
    assert module.read[3] == module.read[2]  # the gradient of that batch was lost
    assert len(set(module.read[3:13])) == 10
    assert (trainer.global_step, len(module.read)) == (12, 25)


def test_weights_of_a_checkpoint_start_a_separate_fit(tmp_path):
    trainer, module = tk.Trainer(**QUIET, max_epochs=2), Reads()
    trainer.fit(module, DATA)
    trainer.save_checkpoint(tmp_path / "saved")
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, DATA, ckpt_path=tmp_path / "saved", load_weights_only=True)
    assert (trainer.global_step, len(module.read)) == (12, 6 + 12)


def test_a_limit_that_is_lowered_ends_the_fit_at_once():
    class Shorter(tk.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.global_step == 1:
                trainer.fit_loop.max_steps = 2

    trainer = tk.Trainer(**QUIET, max_epochs=2, callbacks=[Shorter()])
    trainer.fit(TinyModule(), DATA)
    assert trainer.global_step == 2


def test_a_limit_may_change_during_the_fit():
    class Longer(tk.Callback):
        def on_train_epoch_end(self, trainer, module):
            trainer.fit_loop.max_epochs = 3

    trainer = tk.Trainer(**QUIET, max_epochs=2, callbacks=[Longer()])
    trainer.fit(TinyModule(), DATA)
    assert trainer.current_epoch == 3
    assert not trainer.continues


def test_a_resumed_fit_with_a_larger_limit(tmp_path):
    module = TinyModule()
    trainer = tk.Trainer(
        **QUIET | {"enable_checkpointing": True},
        max_epochs=2,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, DATA)
    assert trainer.ckpt_path is None
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, DATA, ckpt_path="last")
    assert trainer.ckpt_path.endswith("step-00000006")
    assert trainer.global_step == 9
    trainer.validate(Validates(), DATA, verbose=False)
    assert trainer.ckpt_path is None


def test_wrong_limits_and_other_attributes_of_loops_are_refused():
    trainer = tk.Trainer(**QUIET, max_epochs=2)
    with pytest.raises(
        tk.ConfigurationError,
        match=r"(?s)max_epochs must be an integer.*fit_loop.max_epochs = 2.5",
    ):
        trainer.fit_loop.max_epochs = 2.5
    with pytest.raises(AttributeError, match="FitLoop has no batch_progress"):
        _ = trainer.fit_loop.batch_progress
    with pytest.raises(AttributeError, match="PredictLoop has no predictions"):
        trainer.predict_loop.predictions = []


def test_a_writer_reads_the_indices_of_the_batch():
    seen = []

    class Reads(tk.Callback):
        def on_predict_batch_end(
            self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0
        ):
            seen.append(trainer.predict_loop.current_batch_indices)

    trainer = tk.Trainer(**QUIET, callbacks=[Reads()])
    trainer.predict(TinyModule(), DataLoader(torch.randn(5, 32), batch_size=2))
    assert seen == [[0, 1], [2, 3], [4]]
    assert trainer.predict_loop.current_batch_indices == []


def test_setters(tmp_path):
    stop = tk.callbacks.EarlyStopping("val_loss")
    trainer = tk.Trainer(**QUIET, max_epochs=1, default_root_dir=tmp_path)
    trainer.callbacks = [stop]
    assert trainer.early_stopping_callbacks == trainer.callbacks == [stop]
    logger = tk.loggers.CSVLogger(tmp_path)
    trainer.logger = logger
    trainer.fit(Validates(), DATA, DATA)
    assert (trainer.logger, trainer.loggers) == (logger, [logger])
    assert "val_loss" in "".join(
        path.read_text() for path in tmp_path.rglob("metrics.csv")
    )
    trainer.logger = None
    assert trainer.loggers == []
    with pytest.raises(tk.ConfigurationError, match="configure_optimizers"):
        trainer.optimizers = []

    class Sets(tk.Callback):
        def on_train_start(self, trainer, module):
            trainer.logger = logger

    trainer.callbacks = [Sets()]
    with pytest.raises(tk.ConfigurationError, match="while an entry point runs"):
        trainer.fit(TinyModule(), DATA)


def test_a_logger_that_was_taken_away_gets_nothing_more(tmp_path):
    trainer = tk.Trainer(
        **QUIET | {"logger": "csv"},
        max_epochs=1,
        default_root_dir=tmp_path,
        log_every_n_steps=1,
    )
    module = Validates()
    trainer.fit(module, DATA, DATA)
    written = {
        path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
    }
    assert any(path.name == "metrics.csv" for path in written)
    trainer.logger = None
    trainer.validate(module, DATA, verbose=False)
    trainer.fit(module, DATA, DATA)
    trainer.log_metrics({"late": 1.0}, step=9)
    assert {
        path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
    } == written


def test_a_logger_that_is_set_writes_nothing_in_a_fast_dev_run(tmp_path):
    options = {name: value for name, value in QUIET.items() if name != "logger"}
    trainer = tk.Trainer(**options, fast_dev_run=True, default_root_dir=tmp_path)
    trainer.logger = tk.loggers.CSVLogger(tmp_path)
    trainer.fit(Validates(), DATA, DATA)
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize("given", [True, "csv", object(), tk.loggers.CSVLogger])
def test_an_object_that_is_not_a_logger_is_refused(given):
    trainer = tk.Trainer(**QUIET)
    with pytest.raises(tk.ConfigurationError, match="this is not a logger"):
        trainer.logger = given
    assert trainer.loggers == []


def test_hyperparameters_are_kept_from_loggers_on_request(tmp_path):
    class Named(TinyModule):
        def __init__(self, width=3):
            super().__init__()
            self.save_hyperparameters()

    for logged in (True, False):
        logger = tk.loggers.CSVLogger(tmp_path, name=str(logged))
        trainer = tk.Trainer(
            **QUIET | {"logger": logger}, max_epochs=1, enable_autolog_hparams=logged
        )
        trainer.fit(Named(), DATA)
        text = "".join(
            path.read_text() for path in (tmp_path / str(logged)).rglob("hparams.json")
        )
        assert ("width" in text) is logged


def test_logged_metrics_are_tensors():
    class Logs(TinyModule):
        def training_step(self, batch, batch_idx):
            self.log("seen", 2.5)
            return super().training_step(batch, batch_idx)

    trainer = tk.Trainer(**QUIET, max_epochs=1, log_every_n_steps=1)
    trainer.fit(Logs(), DATA)
    assert trainer.logged_metrics["seen"].item() == 2.5


def test_a_trainer_can_be_pickled_before_and_after_a_fit():
    trainer = tk.Trainer(**QUIET, max_epochs=1, callbacks=[Watch()])
    twin = pickle.loads(pickle.dumps(trainer))
    twin.fit(TinyModule(), DATA)
    assert (twin.global_step, trainer.global_step) == (3, 0)
    again = pickle.loads(pickle.dumps(twin))
    assert (again.global_step, again.state.status) == (3, TrainerStatus.FINISHED)
    assert again.max_epochs == 1
    copy.deepcopy(trainer).fit(TinyModule(), DATA)


def test_a_shallow_copy_of_a_trainer_is_refused():
    """Both would have one list of callbacks, and one progress."""
    trainer = tk.Trainer(**QUIET, max_epochs=1, callbacks=[Watch()])
    with pytest.raises(tk.ConfigurationError, match=r"copy.deepcopy\(trainer\)"):
        copy.copy(trainer)


def test_a_trainer_with_a_logger_and_checkpoints_can_be_pickled_after_a_fit(tmp_path):
    options = QUIET | {
        "logger": "csv",
        "enable_checkpointing": True,
        "enable_progress_bar": True,
    }
    trainer = tk.Trainer(**options, max_epochs=1, default_root_dir=tmp_path)
    trainer.fit(TinyModule(), DATA)
    twin = pickle.loads(pickle.dumps(trainer))
    twin.fit_loop.max_epochs = 2
    twin.fit(TinyModule(), DATA)
    assert twin.global_step == 6


def test_modules_are_built_in_the_dtype_of_the_run():
    trainer = tk.Trainer(**QUIET, precision="64-true")
    with trainer.init_module():
        layer = torch.nn.Linear(2, 1)
    assert layer.weight.dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32
    state = torch.get_rng_state()
    with trainer.init_module(empty_init=True):
        torch.nn.Linear(2, 1)
    assert torch.equal(state, torch.get_rng_state())


def test_the_strategy_reduces_and_broadcasts():
    trainer = tk.Trainer(**QUIET, max_epochs=1)
    trainer.fit(TinyModule(), DATA)
    strategy, given = trainer.strategy, torch.tensor([1, 3])
    assert (strategy.root_device.type, strategy.global_rank, strategy.world_size) == (
        "cpu",
        0,
        1,
    )
    assert strategy.reduce(given).tolist() == [1.0, 3.0]
    assert strategy.reduce(given, reduce_op="sum") is not given
    assert strategy.broadcast("a") == "a"
    with pytest.raises(tk.StrategyError, match="reduce_op='product'"):
        strategy.reduce(given, reduce_op="product")
    with pytest.raises(tk.StrategyError, match="leave group out"):
        strategy.reduce(given, group=object())


class Reduces(TinyModule):
    def on_train_start(self):
        strategy = self.trainer.strategy
        mean = strategy.reduce(torch.tensor(strategy.global_rank))
        total = strategy.reduce(strategy.global_rank + 1, reduce_op="sum")
        self.register_buffer(
            "seen",
            torch.stack(
                [mean, total.float(), torch.tensor(float(strategy.world_size))]
            ),
        )


@pytest.mark.slow
def test_two_spawned_processes_reduce():
    module = Reduces()
    module.register_buffer("seen", torch.zeros(3))
    trainer = tk.Trainer(
        barebones=True, accelerator="cpu", devices=2, strategy="ddp_spawn", max_epochs=1
    )
    trainer.fit(module, DATA[:2])
    assert module.seen.tolist() == [0.5, 3.0, 2.0]
    assert trainer.device_ids == [0, 1]
    assert trainer.state == TrainerState(
        TrainerStatus.FINISHED, TrainerFn.FITTING, None
    )
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, DATA[:2])
    assert (trainer.global_step, trainer.continues) == (
        2,
        False,
    )  # the next fit is one of its own


class Reloads(Validates):
    """Has other data in each epoch, and an epoch more batches than the one before."""

    def __init__(self, last=None):
        super().__init__()
        self.asked, self.read, self.validated, self.last = [], [], [], last

    def train_dataloader(self):
        self.asked.append(self.current_epoch)
        rows = torch.full(
            (4 * (self.current_epoch + 2), 32), float(self.current_epoch + 1)
        )
        return DataLoader(rows, batch_size=4)

    def val_dataloader(self):
        return DataLoader(
            torch.full((4, 32), float(self.current_epoch + 1)), batch_size=4
        )

    def training_step(self, batch, batch_idx):
        self.read.append(batch[0, 0].item())
        if self.last is not None and self.global_step == self.last:
            raise ArithmeticError
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.validated.append(batch[0, 0].item())


@pytest.mark.parametrize(
    ("every", "asked", "read", "validated"),
    [
        (0, [0], [1, 1] * 4, [1] * 4),
        (1, [0, 1, 2, 3], [1] * 2 + [2] * 3 + [3] * 4 + [4] * 5, [1, 2, 3, 4]),
        (2, [0, 2], [1] * 4 + [3] * 8, [1, 1, 3, 3]),
    ],
)
def test_loaders_are_made_again_every_n_epochs(every, asked, read, validated):
    module = Reloads()
    options = QUIET | {
        "num_sanity_val_steps": 0,
        "reload_dataloaders_every_n_epochs": every,
    }
    trainer = tk.Trainer(**options, max_epochs=4)
    trainer.fit(module)
    assert module.asked == asked
    assert module.read == read
    assert module.validated == validated
    assert trainer.num_training_batches == read.count(read[-1]) // (
        2 if every == 2 else 4 if not every else 1
    )
    assert trainer.global_step == len(read)


@pytest.mark.parametrize(
    "none", [lambda: None, list, lambda: DataLoader(torch.zeros(0, 32), batch_size=4)]
)
@pytest.mark.parametrize(("given", "validated"), [((0, 3), [1, 4]), ((1, 2), [2, 3])])
def test_validation_stops_and_begins_with_its_loaders(none, given, validated, capsys):
    class Sometimes(Reloads):
        def val_dataloader(self):
            return super().val_dataloader() if self.current_epoch in given else none()

    options = QUIET | {
        "num_sanity_val_steps": 0,
        "reload_dataloaders_every_n_epochs": 1,
    }
    module = Sometimes()
    trainer = tk.Trainer(**options, max_epochs=4)
    trainer.fit(module)
    assert module.validated == validated
    assert trainer.num_val_batches == ([1] if 3 in given else [])
    lines = [
        line
        for line in capsys.readouterr().out.splitlines()
        if "validation from epoch" in line
    ]
    changes = ["no validation from epoch 1", "validation from epoch 3"]
    if given == (1, 2):
        changes = ["validation from epoch 1", "no validation from epoch 3"]
    assert [line.split(" on:")[0] for line in lines] == changes


def test_intervals_without_a_validation_loader_are_not_due_when_there_is_one():
    class Later(Reloads):
        def val_dataloader(self):
            return super().val_dataloader() if self.current_epoch > 1 else None

        def on_validation_start(self):
            steps.append(self.global_step)

    steps: list[int] = []
    options = QUIET | {
        "num_sanity_val_steps": 0,
        "reload_dataloaders_every_n_epochs": 1,
        "log_every_n_steps": 1,
    }
    tk.Trainer(
        **options, max_epochs=4, val_check_interval=4, check_val_every_n_epoch=None
    ).fit(Later())
    assert steps == [8, 12]


def test_a_run_resumes_in_an_epoch_without_validation(tmp_path):
    class Sometimes(Reloads):
        def val_dataloader(self):
            return super().val_dataloader() if self.current_epoch in (0, 3) else None

    options = QUIET | {
        "reload_dataloaders_every_n_epochs": 1,
        "max_epochs": 4,
        "default_root_dir": tmp_path,
    }
    options |= {"num_sanity_val_steps": 0}
    whole = Sometimes()
    tk.Trainer(**options).fit(whole)
    first, then = Sometimes(last=6), Sometimes()
    keeps = tk.callbacks.ModelCheckpoint(
        tmp_path, every_n_train_steps=4, save_top_k=-1
    )  # in the middle of epoch 1
    with pytest.raises(ArithmeticError):
        tk.Trainer(**options | {"enable_checkpointing": True}, callbacks=[keeps]).fit(
            first
        )
    tk.Trainer(**options).fit(then, ckpt_path=tmp_path / "step-00000004")
    assert then.read == whole.read[4:]
    assert first.validated + then.validated == whole.validated == [1, 4]


def test_a_fraction_of_an_epoch_follows_its_new_length():
    module = Reloads()
    options = QUIET | {
        "num_sanity_val_steps": 0,
        "val_check_interval": 0.5,
        "reload_dataloaders_every_n_epochs": 2,
    }
    tk.Trainer(**options, max_epochs=4).fit(module)
    assert module.validated == [1, 1, 1, 1, 3, 3, 3, 3]


@pytest.mark.parametrize(
    "last", [5, 7]
)  # at the start of the third epoch, and inside it
def test_a_resumed_run_has_the_loaders_of_its_epoch(tmp_path, last):
    options = QUIET | {
        "reload_dataloaders_every_n_epochs": 1,
        "max_epochs": 4,
        "default_root_dir": tmp_path,
    }

    def trained(module, **fit):
        keeps = tk.callbacks.ModelCheckpoint(
            tmp_path / "kept", every_n_train_steps=1, save_top_k=-1
        )
        trainer = tk.Trainer(**options, callbacks=[keeps])
        trainer.fit(module, **fit)
        return module

    tk.seed_everything(3)
    whole = trained(Reloads())
    tk.seed_everything(3)
    with pytest.raises(ArithmeticError):
        trained(Reloads(last))
    resumed = trained(Reloads(), ckpt_path=tmp_path / "kept" / f"step-{last:08d}")
    assert resumed.asked[0] == 2
    assert resumed.read == whole.read[last:]
    assert torch.equal(whole.layer.weight, resumed.layer.weight)


@pytest.mark.parametrize(
    "last", [2, 3, 4]
)  # where an epoch begins and inside it, with new loaders and without
def test_a_resumed_run_makes_loaders_in_the_same_epochs(tmp_path, last):
    class Draws(Reads):
        def __init__(self, fails_after=None):
            super().__init__()
            self.asked, self.fails_after = [], fails_after

        def train_dataloader(self):
            self.asked.append(self.current_epoch)
            rows = torch.rand(8, 32) if self.current_epoch else torch.zeros(8, 32)
            return DataLoader(rows, batch_size=4)

        def training_step(self, batch, batch_idx):
            if self.global_step == self.fails_after:
                raise ArithmeticError
            return super().training_step(batch, batch_idx)

    def trained(module, **fit):
        tk.seed_everything(3)
        keeps = tk.callbacks.ModelCheckpoint(
            tmp_path / "kept", every_n_train_steps=1, save_top_k=-1
        )
        options = QUIET | {"enable_checkpointing": True, "default_root_dir": tmp_path}
        tk.Trainer(
            **options,
            reload_dataloaders_every_n_epochs=2,
            max_epochs=4,
            callbacks=[keeps],
        ).fit(module, **fit)
        return module

    whole = trained(Draws())
    shutil.rmtree(tmp_path / "kept")
    with pytest.raises(ArithmeticError):
        trained(Draws(last))
    resumed = trained(Draws(), ckpt_path=tmp_path / "kept" / f"step-{last:08d}")
    assert set(resumed.asked) <= {0, 2}
    assert resumed.read == whole.read[last:]


def test_a_continued_fit_makes_loaders_in_the_same_epochs():
    module = Reloads()
    trainer = tk.Trainer(**QUIET, reload_dataloaders_every_n_epochs=2, max_epochs=1)
    trainer.fit(module)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module)
    assert (module.asked, module.read) == ([0, 0, 2], [1] * 4 + [3] * 8)


def test_validation_loaders_are_made_again_beside_training_loaders_that_were_passed():
    module = Reloads()
    options = QUIET | {
        "num_sanity_val_steps": 0,
        "reload_dataloaders_every_n_epochs": 1,
    }
    tk.Trainer(**options, max_epochs=3).fit(module, DATA)
    assert (module.asked, module.validated) == ([], [1, 2, 3])


def test_loaders_that_were_passed_stay():
    module = Reloads()
    tk.Trainer(**QUIET, reload_dataloaders_every_n_epochs=1, max_epochs=2).fit(
        module, DATA
    )
    assert (module.asked, len(module.read)) == ([], 6)


def test_a_new_loader_may_be_of_another_kind():
    class Changes(Reloads):
        def train_dataloader(self):
            if self.current_epoch == 1:
                return DATA
            return DataLoader(
                torch.randn(8, 32), batch_size=4, num_workers=self.current_epoch // 2
            )

    trainer = tk.Trainer(**QUIET, reload_dataloaders_every_n_epochs=1, max_epochs=3)
    trainer.fit(Changes())
    assert trainer.global_step == 2 + 3 + 2


def test_a_guard_cannot_go_back_to_other_loaders():
    trainer = tk.Trainer(
        **QUIET,
        reload_dataloaders_every_n_epochs=1,
        max_epochs=2,
        callbacks=[tk.callbacks.NaNGuard()],
    )
    with pytest.raises(
        tk.ConfigurationError, match=r"(?s)NaNGuard cannot undo.*loaders that change"
    ):
        trainer.fit(Reloads())


@pytest.mark.slow
def test_two_processes_divide_each_new_loader():
    options = {
        "barebones": True,
        "accelerator": "cpu",
        "devices": 2,
        "strategy": "ddp_spawn",
    }
    trainer = tk.Trainer(**options, reload_dataloaders_every_n_epochs=1, max_epochs=4)
    trainer.fit(Reloads())
    assert (
        trainer.global_step == 1 + 2 + 2 + 3
    )  # 8, 12, 16 and 20 samples in batches of 4 on each rank


def test_weights_only_has_the_meaning_of_lightning(tmp_path):
    trainer = tk.Trainer(**QUIET, max_epochs=1)
    module = Validates()
    trainer.fit(module, DATA, weights_only=False)
    trainer.save_checkpoint(tmp_path / "saved")
    again = tk.Trainer(**QUIET, max_epochs=1)
    with pytest.raises(
        tk.ConfigurationError,
        match=r"(?s)never unpickled.*found: weights_only=True.*load_weights_only=True",
    ):
        again.fit(module, DATA, ckpt_path=tmp_path / "saved", weights_only=True)
    again.fit(module, DATA, ckpt_path=tmp_path / "saved", load_weights_only=True)
    assert again.global_step == 3
    path = tmp_path / "saved"
    assert again.validate(
        module, DATA, ckpt_path=path, weights_only=True
    ) == again.validate(module, DATA, path)
    assert len(again.predict(module, DATA, ckpt_path=path, weights_only=False)) == 3
