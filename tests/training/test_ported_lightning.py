"""A module, a datamodule, callbacks and a logger as people write them for Lightning; only the imports differ.

The same source, with Lightning's imports, was run on Lightning 2.6.6: the values below are what it gives, except where
a comment says ``ours``.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainer_kit as L
from trainer_kit.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
)
from trainer_kit.checkpoint.read import read_checkpoint
from trainer_kit.core import seed as seeds
from trainer_kit.loggers import Logger

# ---- the user's file ---------------------------------------------------------------------------------------------


class Data(L.LightningDataModule):
    def __init__(self, size=24, batch_size=4):
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self):
        pass

    def setup(self, stage=None):
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(self.hparams.size, 4, generator=generator)
        self.full = TensorDataset(x, x.sum(1, keepdim=True))

    def train_dataloader(self):
        return DataLoader(self.full, batch_size=self.hparams.batch_size)

    def val_dataloader(self):
        return DataLoader(self.full, batch_size=self.hparams["batch_size"])

    def test_dataloader(self):
        return [
            DataLoader(self.full, batch_size=8),
            DataLoader(self.full, batch_size=12),
        ]

    def predict_dataloader(self):
        return DataLoader(self.full, batch_size=8)

    def state_dict(self):
        return {"seen": 5}

    def load_state_dict(self, state_dict):
        self.loaded = state_dict["seen"]

    def teardown(self, stage):
        pass


class Net(L.LightningModule):
    def __init__(self, width=8, lr=0.05, **kwargs):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
        self.example_input_array = torch.zeros(1, 4)
        self.validation_outputs = []
        self.notes = {}

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log(
            "train_loss",
            loss,
            prog_bar=True,
            on_step=True,
            on_epoch=True,
            batch_size=x.size(0),
        )
        self.log_dict(
            {"a": batch_idx, "b": torch.tensor(2.0)}, on_step=False, on_epoch=True
        )
        return {"loss": loss, "log": {"n": batch_idx}}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("val_loss", loss, prog_bar=True)
        self.validation_outputs.append(loss)
        return loss

    def on_validation_epoch_end(self):
        self.log("val_max", torch.stack(self.validation_outputs).max())
        self.validation_outputs.clear()

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        self.log("test_loss", nn.functional.mse_loss(self(x), y))

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self(batch[0])

    def configure_optimizers(self):
        steps = self.notes["steps"] = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda s: 1 - s / (2 * steps)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": scheduler,
                "interval": "step",
                "frequency": 1,
                "name": "rate",
            },
        }

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)

    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val, gradient_clip_algorithm
    ):
        self.clip_gradients(
            optimizer,
            gradient_clip_val=gradient_clip_val,
            gradient_clip_algorithm=gradient_clip_algorithm,
        )

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()

    def on_validation_model_zero_grad(self):
        super().on_validation_model_zero_grad()

    def on_validation_model_eval(self):
        super().on_validation_model_eval()
        self.notes["eval"] = self.net.training

    def on_validation_model_train(self):
        super().on_validation_model_train()
        self.notes["train"] = self.net.training

    def on_save_checkpoint(self, checkpoint):
        checkpoint["extra"] = {
            "epoch_seen": self.current_epoch,
            "keys": sorted(checkpoint["state_dict"])[:1],
        }

    def on_load_checkpoint(self, checkpoint):
        self.notes["extra"] = checkpoint["extra"]


class Printer(Callback):
    def __init__(self):
        self.calls = []
        self.counted = 0
        self.restored = {}

    def setup(self, trainer, pl_module, stage):
        self.calls.append(("setup", stage))

    def on_fit_start(self, trainer, pl_module):
        assert pl_module is trainer.lightning_module
        config = trainer.lr_scheduler_configs[0]
        self.calls.append(
            (
                type(trainer.optimizers[0]).__name__,
                config.interval,
                config.frequency,
                config.name,
            )
        )
        self.calls.append(
            (
                trainer.global_rank,
                trainer.world_size,
                trainer.is_global_zero,
                trainer.max_epochs,
            )
        )
        self.calls.append(
            (trainer.num_training_batches, trainer.current_epoch, trainer.global_step)
        )
        self.calls.append(
            (
                type(trainer.datamodule).__name__,
                type(trainer.checkpoint_callback).__name__,
            )
        )
        self.calls.append(
            (
                trainer.logger is trainer.loggers[0],
                trainer.log_dir is not None,
                trainer.sanity_checking,
            )
        )

    def on_sanity_check_start(self, trainer, pl_module):
        self.calls.append(("sanity", trainer.sanity_checking))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.counted += 1

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.is_last_batch:
            self.calls.append(
                (
                    "last",
                    batch_idx,
                    trainer.global_step,
                    sorted(outputs),
                    outputs["log"],
                )
            )

    def on_validation_epoch_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            pl_module.log("from_callback", float(trainer.current_epoch))

    def on_train_epoch_end(self, trainer, pl_module):
        metrics = trainer.callback_metrics
        self.calls.append(
            ("epoch", sorted(metrics), metrics["val_loss"].item(), metrics["b"].item())
        )

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["mine"] = self.counted

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        self.restored["mine"] = checkpoint["mine"]

    def state_dict(self):
        return {"counted": self.counted}

    def load_state_dict(self, state_dict):
        self.restored["counted"] = state_dict["counted"]

    def teardown(self, trainer, pl_module, stage):
        self.calls.append(("teardown", stage))


class Memory(Logger):
    def __init__(self):
        super().__init__()
        self.metrics, self.hparams, self.status = [], {}, None

    @property
    def name(self):
        return "memory"

    @property
    def version(self):
        return "0"

    @property
    def experiment(self):
        return self

    @rank_zero_only
    def log_metrics(self, metrics, step=None):
        self.metrics.append((step, dict(metrics)))

    @rank_zero_only
    def log_hyperparams(self, params, *args, **kwargs):
        self.hparams.update(params)

    @rank_zero_only
    def finalize(self, status):
        self.status = status


class GAN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.g = nn.Linear(3, 4)
        self.d = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        opt_g, opt_d = self.optimizers()
        sch_g, sch_d = self.lr_schedulers()
        bce = nn.functional.binary_cross_entropy_with_logits
        z = x[:, :3]

        self.toggle_optimizer(opt_g)
        g_loss = bce(self.d(self.g(z)), torch.ones(len(x), 1))
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        self.clip_gradients(
            opt_g, gradient_clip_val=0.5, gradient_clip_algorithm="norm"
        )
        opt_g.step()
        self.untoggle_optimizer(opt_g)

        self.toggle_optimizer(opt_d)
        d_loss = (
            bce(self.d(x), torch.ones(len(x), 1))
            + bce(self.d(self.g(z).detach()), torch.zeros(len(x), 1))
        ) / 2
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        self.untoggle_optimizer(opt_d)

        self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, prog_bar=True)
        if self.trainer.is_last_batch:
            sch_g.step()
            sch_d.step()

    def configure_optimizers(self):
        opt_g = torch.optim.Adam(self.g.parameters(), lr=0.02, betas=(0.5, 0.999))
        opt_d = torch.optim.Adam(self.d.parameters(), lr=0.02, betas=(0.5, 0.999))
        return [opt_g, opt_d], [
            torch.optim.lr_scheduler.ExponentialLR(opt_g, 0.5),
            torch.optim.lr_scheduler.ExponentialLR(opt_d, 0.9),
        ]


# ---- what becomes of it ------------------------------------------------------------------------------------------

QUIET = {"enable_progress_bar": False, "enable_model_summary": False}
CPU = {"accelerator": "cpu", "devices": 1}


@pytest.fixture(autouse=True)
def _no_seed_stays():
    before = seeds._last_seed
    yield
    seeds._last_seed = before


@pytest.fixture
def fitted(tmp_path):
    L.seed_everything(11)
    model, data, logger, printer = (
        Net(width=6, lr=0.02, note="hello"),
        Data(),
        Memory(),
        Printer(),
    )
    best = ModelCheckpoint(
        dirpath=tmp_path / "ck",
        monitor="val_loss",
        mode="min",
        save_top_k=1,
        filename="{epoch}-{val_loss:.2f}",
    )
    trainer = L.Trainer(
        max_epochs=2,
        logger=logger,
        callbacks=[
            printer,
            best,
            EarlyStopping("val_loss", patience=5),
            LearningRateMonitor("step"),
        ],
        log_every_n_steps=2,
        gradient_clip_val=0.5,
        gradient_clip_algorithm="norm",
        default_root_dir=tmp_path,
        num_sanity_val_steps=1,
        **CPU,
        **QUIET,
    )
    trainer.fit(model, datamodule=data)
    return SimpleNamespace(
        trainer=trainer,
        model=model,
        data=data,
        logger=logger,
        printer=printer,
        best=best,
    )


def test_hooks_can_read_the_attributes_of_the_trainer(fitted):
    setup, *facts, sanity, last1, epoch1, last2, epoch2, teardown = fitted.printer.calls
    assert (setup, teardown) == (("setup", "fit"), ("teardown", "fit"))
    assert facts == [
        ("AdamW", "step", 1, "rate"),
        (0, 1, True, 2),
        (6, 0, 0),
        ("Data", "ModelCheckpoint"),
        (True, True, False),
    ]
    assert sanity == ("sanity", True)
    assert last1 == ("last", 5, 6, ["log", "loss"], {"n": 5})
    assert last2 == ("last", 5, 12, ["log", "loss"], {"n": 5})
    names = {
        "a",
        "b",
        "from_callback",
        "train_loss",
        "train_loss_epoch",
        "train_loss_step",
        "val_loss",
        "val_max",
    }
    for (word, known, val_loss, b), expected in ((epoch1, 2.25733), (epoch2, 1.92889)):
        assert word == "epoch"
        assert names <= set(known)
        assert val_loss == pytest.approx(expected, rel=1e-4)
        assert b == 2.0
    assert fitted.model.notes == {"steps": 12, "eval": False, "train": True}


def test_weights_and_best_checkpoint_are_lightnings(fitted, tmp_path):
    sums = [parameter.sum().item() for parameter in fitted.model.parameters()]
    assert sums == pytest.approx([0.787612, -0.186377, 0.058597, 0.371418], abs=1e-4)
    assert (fitted.trainer.current_epoch, fitted.trainer.global_step) == (2, 12)
    assert fitted.best.best_model_path == str(
        tmp_path / "ck" / "epoch=1-val_loss=1.93"
    )  # ours: a directory, no .ckpt
    assert fitted.best.best_model_score.item() == pytest.approx(1.92889, rel=1e-4)


def test_the_logger_is_given_lightnings_values(fitted):
    logged = {}
    for step, values in fitted.logger.metrics:
        for name, value in values.items():
            if name not in ("epoch", "rate"):
                logged.setdefault(name, {})[step] = value
    # Ours: a value stands at the number of completed steps, where Lightning counts from 0.
    expected = {
        "train_loss_step": {
            2: 5.78322,
            4: 0.97110,
            6: 0.63221,
            8: 4.75954,
            10: 0.65740,
            12: 0.51846,
        },
        "train_loss_epoch": {6: 2.60957, 12: 2.09121},
        "val_loss": {6: 2.25733, 12: 1.92889},
        "val_max": {6: 5.71083, 12: 4.77563},
        "from_callback": {6: 0.0, 12: 1.0},
        "a": {6: 2.5, 12: 2.5},
        "b": {6: 2.0, 12: 2.0},
    }
    assert logged.keys() == expected.keys()
    for name, values in expected.items():
        assert logged[name] == pytest.approx(values, rel=1e-4), name
    assert fitted.logger.hparams == {
        "batch_size": 4,
        "lr": 0.02,
        "note": "hello",
        "size": 24,
        "width": 6,
    }
    assert fitted.logger.status == "success"


def test_evaluation_returns_lightnings_values(fitted):
    trainer, model, data = fitted.trainer, fitted.model, fitted.data
    fitted.printer.calls.clear()
    (validated,) = trainer.validate(model, datamodule=data, verbose=False)
    assert validated == pytest.approx(
        {"from_callback": 2.0, "val_loss": 1.92889, "val_max": 4.77563}, rel=1e-4
    )
    first, second = trainer.test(
        model, datamodule=data, ckpt_path="best", verbose=False
    )
    assert first == pytest.approx({"test_loss/dataloader_idx_0": 1.92889}, rel=1e-4)
    assert second == pytest.approx({"test_loss/dataloader_idx_1": 1.92889}, rel=1e-4)
    assert [tuple(p.shape) for p in trainer.predict(model, datamodule=data)] == [
        (8, 1)
    ] * 3
    stages = ("validate", "test", "predict")
    assert fitted.printer.calls == [
        (word, stage) for stage in stages for word in ("setup", "teardown")
    ]


def test_a_checkpoint_has_lightnings_keys_and_the_users(fitted):
    state = read_checkpoint(fitted.best.best_model_path)
    assert state["extra"] == {
        "epoch_seen": 2,
        "keys": ["net.0.bias"],
    }  # ours: taken when the epoch is over
    assert state["mine"] == 12
    assert state["hyper_parameters"] == {"width": 6, "lr": 0.02, "note": "hello"}
    assert (state["epoch"], state["global_step"]) == (2, 12)
    assert {"optimizer_states", "lr_schedulers", "callbacks"} <= state.keys()
    again = Net.load_from_checkpoint(fitted.best.best_model_path)
    assert dict(again.hparams) == {"width": 6, "lr": 0.02, "note": "hello"}
    assert all(
        torch.equal(a, b)
        for a, b in zip(again.parameters(), fitted.model.parameters(), strict=True)
    )
    assert (
        Net.load_from_checkpoint(fitted.best.best_model_path, lr=0.5).hparams.lr == 0.5
    )


def test_a_run_continues_from_a_checkpoint(fitted, tmp_path):
    model, data, printer = Net(width=6, lr=0.02, note="hello"), Data(), Printer()
    options = {
        "logger": Memory(),
        "default_root_dir": tmp_path,
        "gradient_clip_val": 0.5,
        **CPU,
        **QUIET,
    }
    trainer = L.Trainer(max_epochs=3, callbacks=[printer], **options)
    trainer.fit(model, datamodule=data, ckpt_path=fitted.best.best_model_path)
    assert model.notes["extra"]["keys"] == ["net.0.bias"]
    assert printer.restored == {"mine": 12, "counted": 12}
    assert (
        data.loaded,
        printer.counted,
        trainer.current_epoch,
        trainer.global_step,
    ) == (
        5,
        6,
        3,
        18,
    )


def test_a_gan_in_manual_optimization_ends_with_lightnings_weights(tmp_path):
    L.seed_everything(5)
    gan = GAN()
    trainer = L.Trainer(
        max_epochs=2, logger=False, enable_checkpointing=False, **CPU, **QUIET
    )
    trainer.fit(gan, Data())
    sums = [parameter.sum().item() for parameter in gan.parameters()]
    assert sums == pytest.approx([1.2229, 0.37523, 0.553986, 0.075667], abs=1e-4)
    assert [
        optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers
    ] == pytest.approx([0.005, 0.0162])
    assert sorted(trainer.callback_metrics) == ["d_loss", "g_loss"]
    assert (
        trainer.global_step == 12
    )  # ours: turns, where Lightning counts 24 calls of step


# ---- names -------------------------------------------------------------------------------------------------------

BATCH = ("train", "validation", "test", "predict")
CALLBACK_HOOKS = [
    *(
        "setup",
        "teardown",
        "on_fit_start",
        "on_fit_end",
        "on_sanity_check_start",
        "on_sanity_check_end",
    ),
    *(
        f"on_{kind}_{moment}"
        for kind in BATCH
        for moment in ("start", "end", "epoch_start", "epoch_end")
    ),
    *(
        f"on_{kind}_{moment}"
        for kind in BATCH
        for moment in ("batch_start", "batch_end")
    ),
    *(
        "on_exception",
        "state_dict",
        "load_state_dict",
        "state_key",
        "on_save_checkpoint",
        "on_load_checkpoint",
    ),
    *(
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_before_zero_grad",
    ),
]
MODULE_NAMES = [
    *(
        name
        for name in CALLBACK_HOOKS
        if "sanity" not in name and name not in ("state_key", "on_exception")
    ),
    *(
        "on_validation_model_zero_grad",
        "on_validation_model_eval",
        "on_validation_model_train",
    ),
    *(
        "on_test_model_eval",
        "on_test_model_train",
        "on_predict_model_eval",
        "configure_model",
        "prepare_data",
    ),
    *(
        "train_dataloader",
        "val_dataloader",
        "test_dataloader",
        "predict_dataloader",
        "transfer_batch_to_device",
    ),
    *(
        "on_before_batch_transfer",
        "on_after_batch_transfer",
        "optimizers",
        "lr_schedulers",
        "example_input_array",
    ),
    *(
        "current_epoch",
        "global_step",
        "global_rank",
        "local_rank",
        "automatic_optimization",
        "strict_loading",
    ),
    *(
        "logger",
        "loggers",
        "print",
        "log",
        "log_dict",
        "all_gather",
        "forward",
        "training_step",
        "validation_step",
    ),
    *(
        "test_step",
        "predict_step",
        "configure_callbacks",
        "configure_optimizers",
        "manual_backward",
        "backward",
    ),
    *(
        "toggle_optimizer",
        "untoggle_optimizer",
        "toggled_optimizer",
        "clip_gradients",
        "configure_gradient_clipping",
    ),
    *(
        "lr_scheduler_step",
        "optimizer_step",
        "optimizer_zero_grad",
        "freeze",
        "unfreeze",
        "to_onnx",
    ),
    *("load_from_checkpoint", "save_hyperparameters", "hparams", "device", "dtype"),
]
TRAINER_NAMES = [
    *(
        "fit",
        "validate",
        "test",
        "predict",
        "print",
        "strategy",
        "precision_plugin",
        "precision",
        "save_checkpoint",
    ),
    *(
        "global_rank",
        "local_rank",
        "node_rank",
        "world_size",
        "num_devices",
        "lightning_module",
        "model",
    ),
    *(
        "optimizers",
        "lr_scheduler_configs",
        "log_dir",
        "is_global_zero",
        "default_root_dir",
        "is_last_batch",
    ),
    *(
        "early_stopping_callback",
        "checkpoint_callback",
        "checkpoint_callbacks",
        "progress_bar_callback",
        "callbacks",
    ),
    *(
        "training",
        "testing",
        "predicting",
        "validating",
        "evaluating",
        "sanity_checking",
        "should_stop",
    ),
    *(
        "global_step",
        "current_epoch",
        "max_epochs",
        "min_epochs",
        "max_steps",
        "min_steps",
        "datamodule",
    ),
    *(
        "train_dataloader",
        "val_dataloaders",
        "test_dataloaders",
        "predict_dataloaders",
        "num_training_batches",
    ),
    *(
        "num_sanity_val_batches",
        "num_val_batches",
        "num_test_batches",
        "num_predict_batches",
        "logger",
        "loggers",
    ),
    *(
        "callback_metrics",
        "logged_metrics",
        "progress_bar_metrics",
        "estimated_stepping_batches",
    ),
    *("log_every_n_steps", "accumulate_grad_batches", "fast_dev_run"),
]


def test_every_name_of_lightning_is_there():
    trainer = L.Trainer(logger=False, **CPU, **QUIET)
    data = [
        *(name for name in vars(Data) if not name.startswith("_")),
        "on_exception",
        "from_datasets",
        "hparams",
    ]
    checks = [
        (L.Callback(), CALLBACK_HOOKS),
        (Net(), MODULE_NAMES),
        (trainer, TRAINER_NAMES),
    ]
    for owner, names in [*checks, (Data(), data)]:
        missing = [
            name
            for name in names
            if not hasattr(type(owner), name) and not hasattr(owner, name)
        ]
        assert missing == [], type(owner).__name__


def test_lightnings_names_are_aliases():
    assert L.LightningModule is L.TrainModule
    assert L.LightningDataModule is L.DataModule


def test_steps_and_hooks_may_leave_out_or_add_parameters():
    heard = []

    class Short(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def training_step(self, batch):
            return self.layer(batch).sum()

        def validation_step(self, batch, batch_idx, dataloader_idx):
            heard.append(("validation_step", batch_idx, dataloader_idx))

        def test_step(self, batch):
            heard.append("test_step")

        def on_train_batch_start(self, batch, batch_idx, unused=0):
            heard.append("start")

        def on_train_batch_end(self, outputs, batch, batch_idx, unused=0):
            heard.append("end")

        def configure_optimizers(self):
            return [torch.optim.SGD(self.parameters(), lr=0.1)]

    data = [torch.ones(1, 2)]
    trainer = L.Trainer(
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        **QUIET,
    )
    trainer.fit(Short(), data, data)
    trainer.test(dataloaders=data, verbose=False)
    assert heard == ["start", "end", ("validation_step", 0, 0), "test_step"]


def test_automatic_optimization_may_be_a_property():
    class Manual(GAN):
        def __init__(self):
            L.LightningModule.__init__(self)
            self.g = nn.Linear(3, 4)
            self.d = nn.Linear(4, 1)

        @property
        def automatic_optimization(self):
            return False

    trainer = L.Trainer(max_steps=2, logger=False, enable_checkpointing=False, **QUIET)
    trainer.fit(Manual(), datamodule=Data())
    assert trainer.global_step == 2


def test_validating_is_true_inside_fit_but_not_in_the_sanity_check():
    seen = []

    class Looks(Net):
        def on_validation_start(self):
            seen.append(
                (
                    self.trainer.sanity_checking,
                    self.trainer.validating,
                    self.trainer.training,
                )
            )

        def on_train_start(self):
            seen.append(
                (
                    self.trainer.sanity_checking,
                    self.trainer.validating,
                    self.trainer.training,
                )
            )

    trainer = L.Trainer(
        max_epochs=1,
        limit_val_batches=1,
        logger=False,
        enable_checkpointing=False,
        **QUIET,
    )
    trainer.fit(Looks(), datamodule=Data())
    trainer.validate(datamodule=Data(), verbose=False)
    assert seen == [
        (True, False, False),
        (False, False, True),
        (False, True, False),
        (False, True, False),
    ]
