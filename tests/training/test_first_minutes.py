"""What newcomers from Lightning, Accelerate, Transformers and plain PyTorch write first, and what answers them."""

import importlib
import inspect
import multiprocessing
import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import trainer_kit as tk
from trainer_kit.callbacks import EarlyStopping, ModelCheckpoint
from trainer_kit.compat.transformers import TRAINER_METHODS, TRAINING_ARGUMENTS
from trainer_kit.core.errors import (
    CheckpointError,
    ConfigurationError,
    DataError,
    LogError,
)
from trainer_kit.core.state_names import load_module_weights
from trainer_kit.testing import TinyModule

BATCHES = [torch.randn(4, 32) for _ in range(2)]
TAKEN = list(inspect.signature(tk.Trainer).parameters)


def trainer(**options):
    return tk.Trainer(**{"max_epochs": 1, "barebones": True, **options})


@pytest.mark.parametrize("name", TRAINING_ARGUMENTS)
def test_an_argument_of_another_library_is_refused_with_its_replacement(name):
    with pytest.raises(
        ConfigurationError, match=f"Trainer has no argument '{name}'"
    ) as error:
        tk.Trainer(**{name: 3})
    assert error.value.fix == TRAINING_ARGUMENTS[name].format(value="3")
    written = error.value.fix.partition("=")[0]
    assert "=" not in error.value.fix or not written.isidentifier() or written in TAKEN


def test_a_long_value_is_named_by_its_class():
    with pytest.raises(ConfigurationError) as error:
        tk.Trainer(model=nn.Sequential(*[nn.Linear(2, 2) for _ in range(9)]))
    assert error.value.found == "model=a Sequential"


@pytest.mark.parametrize("name", TRAINER_METHODS)
def test_a_method_of_another_trainer_is_refused_with_its_replacement(name):
    with pytest.raises(AttributeError) as error:
        getattr(trainer(), name)
    assert TRAINER_METHODS[name] in str(error.value)


def test_weights_of_other_shapes_have_a_note_with_the_usual_cause(tmp_path):
    module = TinyModule()
    fitted = tk.Trainer(
        max_epochs=1, logger=False, default_root_dir=tmp_path, enable_progress_bar=False
    )
    fitted.fit(module, BATCHES)
    path = fitted.checkpoint_callback.best_model_path

    class Other(TinyModule):
        def __init__(self, width=3):
            super().__init__()
            self.layer = nn.Linear(32, width)

    loads = [
        lambda: Other.load_from_checkpoint(path),
        lambda: trainer(max_epochs=2).fit(Other(), BATCHES, ckpt_path=path),
        lambda: trainer().validate(Other(), BATCHES, ckpt_path=path),
    ]
    for load in loads:
        with pytest.raises(
            RuntimeError, match=r"layer.weight: .*\[2, 32\].*\[3, 32\]"
        ) as error:
            load()
        (note,) = error.value.__notes__
        assert (
            "use the saved arguments, as Module.load_from_checkpoint(path) does" in note
        )


def test_the_note_on_other_weights_is_for_no_other_error():
    class OutOfMemory(nn.Linear):
        def load_state_dict(self, *args, **options):
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")

    with pytest.raises(torch.OutOfMemoryError) as error:
        load_module_weights(OutOfMemory(2, 2), {}, strict=True)
    assert not hasattr(error.value, "__notes__")
    # A module that has no load_from_checkpoint.
    with pytest.raises(RuntimeError, match="Missing key") as error:
        load_module_weights(nn.Linear(2, 2), {}, strict=True)
    cause, way_out = error.value.__notes__
    assert cause.endswith("than the one in the checkpoint")
    assert "strict=False" in way_out


def test_load_from_checkpoint_of_a_directory_of_checkpoints_names_them(tmp_path):
    keeper = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=1, save_top_k=-1)
    tk.Trainer(
        max_epochs=1, logger=False, callbacks=keeper, enable_progress_bar=False
    ).fit(TinyModule(), BATCHES)
    with pytest.raises(CheckpointError, match="a directory of checkpoints") as error:
        TinyModule.load_from_checkpoint(tmp_path / "kept")
    assert error.value.found.endswith(
        "kept has step-00000001 and, the newest, step-00000002"
    )
    assert error.value.fix == f"pass {tmp_path / 'kept' / 'step-00000002'}"


def test_load_from_checkpoint_of_an_object_is_refused(tmp_path):
    """It returns a new module; a caller who ignores the result has random weights."""

    class Data(tk.DataModule):
        pass

    for owner in (TinyModule(), Data()):
        with pytest.raises(ConfigurationError, match="creates a new object") as error:
            owner.load_from_checkpoint(tmp_path)
        assert f"{type(owner).__name__}.load_from_checkpoint" in error.value.fix
    assert inspect.ismethod(TinyModule.load_from_checkpoint)


def test_a_checkpoint_without_a_needed_argument(tmp_path):
    class Sized(tk.TrainModule):
        def __init__(self, size, *, depth):
            super().__init__()
            self.layer = nn.Linear(32, size)

        def training_step(self, batch, batch_idx):
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    made = trainer()
    made.fit(Sized(2, depth=2), BATCHES)
    made.save_checkpoint(tmp_path / "here")
    with pytest.raises(
        ConfigurationError, match="no value for these arguments of Sized: size, depth"
    ) as error:
        Sized.load_from_checkpoint(tmp_path / "here")
    assert "save_hyperparameters" in error.value.fix
    assert isinstance(
        Sized.load_from_checkpoint(tmp_path / "here", size=2, depth=2), Sized
    )


@pytest.mark.parametrize(
    ("output", "fix"),
    [(1.0, "without .item()"), ((torch.ones(1), 2), "a dict with 'loss'")],
)
def test_a_step_that_returns_a_number_or_several_values(output, fix):
    class Returns(TinyModule):
        def training_step(self, batch, batch_idx):
            return output

    with pytest.raises(ConfigurationError, match="returned no loss") as error:
        trainer().fit(Returns(), BATCHES)
    assert fix in error.value.fix


def test_a_module_given_to_the_constructor_of_the_trainer():
    with pytest.raises(
        ConfigurationError, match="takes its arguments by name"
    ) as error:
        tk.Trainer(nn.Linear(2, 2))
    assert "trainer.fit(module, loader)" in error.value.fix
    assert error.value.found == "a Linear without a name"
    with pytest.raises(
        ConfigurationError,
        match=r"found: 'gpu' without a name\n  fix:   such as accelerator=",
    ):
        tk.Trainer("gpu", 2)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("TrainingArguments", "max_epochs=3"),
        ("DataCollatorWithPadding", "collate_fn"),
        ("AutoModel", "from transformers"),
        ("EarlyStoppingCallback", "EarlyStopping"),
        (
            "StochasticWeightAveraging",
            "from trainer_kit.callbacks import StochasticWeightAveraging",
        ),
        ("CSVLogger", "from trainer_kit.loggers import CSVLogger"),
    ],
)
def test_a_name_that_is_elsewhere(name, fix):
    (
        importlib.import_module("trainer_kit.callbacks"),
        importlib.import_module("trainer_kit.loggers"),
    )
    with pytest.raises(AttributeError) as error:
        getattr(tk, name)
    assert fix in str(error.value)


def test_the_loss_of_transformers_trainer():
    class Computes(TinyModule):
        training_step = tk.TrainModule.training_step

        def compute_loss(self, model, inputs):
            raise AssertionError

    with pytest.raises(ConfigurationError, match="has no training_step") as error:
        trainer().fit(Computes(), BATCHES)
    assert error.value.found == "compute_loss, which is not called"


def test_a_scheduler_under_another_key():
    class Keys(TinyModule):
        def configure_optimizers(self):
            return {
                "optimizer": torch.optim.SGD(self.parameters(), lr=0.1),
                "scheduler": None,
            }

    with pytest.raises(ConfigurationError, match="unknown key") as error:
        trainer().fit(Keys(), BATCHES)
    assert "lr_scheduler" in error.value.fix


class Classifier(tk.TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return nn.functional.cross_entropy(self.layer(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Unpacked(Classifier):
    def training_step(self, inputs, targets):
        return nn.functional.cross_entropy(self.layer(inputs), targets)


@pytest.mark.parametrize(
    ("make", "inputs", "targets", "note"),
    [
        (Unpacked, torch.float32, torch.int64, "x, y = batch"),
        (Classifier, torch.float64, torch.int64, ".float()"),
        (Classifier, torch.float32, torch.int32, "y.long()"),
    ],
)
def test_data_of_the_wrong_kind(make, inputs, targets, note):
    data = TensorDataset(torch.ones(4, 4, dtype=inputs), torch.ones(4, dtype=targets))
    with pytest.raises((RuntimeError, TypeError)) as error:
        trainer().fit(make(), DataLoader(data, 2))
    assert note in notes(error)


class Rows(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.randn(32)


@pytest.mark.parametrize("data", [Rows(), torch.randn(4, 32)])
def test_data_without_a_loader(data):
    with pytest.raises(DataError, match="not a loader") as error:
        trainer().fit(TinyModule(), data)
    assert "DataLoader(" in error.value.fix
    assert "shuffle=True" in error.value.fix


def test_the_loader_before_the_module():
    with pytest.raises(ConfigurationError, match="not a TrainModule") as error:
        trainer().fit(DataLoader(Rows()), TinyModule())
    assert error.value.fix == "the module comes first: trainer.fit(module, loader)"


def test_a_step_with_another_name():
    class Named(tk.TrainModule):
        def train_step(self, batch, batch_idx):
            pass

    with pytest.raises(ConfigurationError, match="has no training_step") as error:
        trainer().fit(Named(), BATCHES)
    assert error.value.found == "train_step, which is not called"


def test_predictions_of_a_module_without_forward():
    class Steps(tk.TrainModule):
        pass

    with pytest.raises(ConfigurationError, match="has no predict_step"):
        trainer().predict(Steps(), BATCHES)


def test_an_optimizer_and_its_scheduler_without_lists():
    class Pair(TinyModule):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)

    with pytest.raises(ConfigurationError, match="is not an optimizer") as error:
        trainer().fit(Pair(), BATCHES)
    assert error.value.fix == "return [optimizer], [scheduler]"


def test_the_value_before_the_name():
    class Swapped(TinyModule):
        def training_step(self, batch, batch_idx):
            self.log(batch.mean(), "mean")

    with pytest.raises(LogError, match="name of a metric must be a string") as error:
        trainer().fit(Swapped(), BATCHES)
    assert "self.log(name, value)" in error.value.fix


def test_a_checkpoint_that_is_true_or_best_before_a_fit():
    with pytest.raises(ConfigurationError) as error:
        trainer().fit(TinyModule(), BATCHES, ckpt_path=True)
    assert 'ckpt_path="last"' in error.value.fix
    with pytest.raises(CheckpointError, match="no checkpoint callback") as error:
        trainer().test(TinyModule(), BATCHES, ckpt_path="best")
    assert '"last"' in error.value.fix


def notes(error):
    return "\n".join(error.value.__notes__)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_step_that_moves_its_batch_to_a_device_that_is_not_here():
    class Moves(TinyModule):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch.cuda(), batch_idx)

    with pytest.raises((AssertionError, RuntimeError)) as error:
        trainer().fit(Moves(), BATCHES)
    assert "leave out .cuda()" in notes(error)


def test_a_dict_given_to_log():
    class Logs(TinyModule):
        def training_step(self, batch, batch_idx):
            self.log({"loss": 1.0})

    with pytest.raises(TypeError) as error:
        trainer().fit(Logs(), BATCHES)
    assert "self.log_dict(values)" in notes(error)


@pytest.mark.parametrize("make", [torch.randn, lambda length: {"ids": [0] * length}])
def test_samples_of_different_lengths_without_a_collate_fn(make):
    loader = DataLoader([make(length) for length in (1, 2)], batch_size=2)
    with pytest.raises(RuntimeError) as error:
        trainer().fit(TinyModule(), loader)
    assert "collate_fn" in notes(error)


@pytest.mark.parametrize(
    ("verb", "name", "fix"),
    [
        ("fit", "train_dataloader", "train_dataloaders"),
        ("fit", "max_epochs", "Trainer(max_epochs=5)"),
        ("fit", "train_dataset", "trainer.fit(module, DataLoader"),
        ("validate", "dataloader", "dataloaders"),
        ("test", "ckpt", "ckpt_path"),
        ("predict", "return_prediction", "return_predictions"),
    ],
)
def test_an_argument_that_an_entry_point_does_not_have(verb, name, fix):
    with pytest.raises(
        ConfigurationError, match=rf"Trainer\.{verb} has no argument '{name}'"
    ) as error:
        getattr(trainer(), verb)(TinyModule(), **{name: 5})
    assert fix in error.value.fix
    assert error.value.found == f"{name}=5"


VERBS = ["fit", "validate", "test", "predict", "plan", "verify", "explain"]


@pytest.mark.parametrize("name", ["module", "net"])
@pytest.mark.parametrize("verb", VERBS)
def test_the_module_under_another_name(verb, name):
    with pytest.raises(
        ConfigurationError, match=rf"Trainer\.{verb} has no argument '{name}'"
    ) as error:
        getattr(trainer(), verb)(**{name: TinyModule()})
    assert error.value.fix == "model=..."
    assert error.value.found == f"{name}=a TinyModule"


@pytest.mark.parametrize("verb", ["fit", "plan", "verify"])
def test_no_module(verb):
    with pytest.raises(ConfigurationError, match=f"Trainer.{verb} needs model"):
        getattr(trainer(), verb)()


@pytest.mark.parametrize("verb", VERBS)
def test_too_many_arguments_without_a_name(verb):
    with pytest.raises(
        ConfigurationError, match=rf"Trainer\.{verb} takes \d arguments without a name"
    ):
        getattr(trainer(), verb)(*[None] * 10)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("world", value) for value in (None, "8", 1.5, float("nan"))],
        *[("device", value) for value in (3, [])],
        *[
            (name, value)
            for name in ("strategies", "precisions")
            for value in (3, None, "ddp")
        ],
        *[("global_batch_size", value) for value in ("8", 1.5, float("nan"))],
        *[("price", value) for value in ("1", float("nan"))],
    ],
)
def test_an_argument_of_plan_that_is_of_the_wrong_type(name, value):
    with pytest.raises(ConfigurationError) as error:
        trainer().plan(
            TinyModule(), BATCHES, **{"world": 2, "device": "h200", name: value}
        )
    assert f"{name}={value!r}" in error.value.found


@pytest.mark.parametrize("steps", [None, "4", 1.5])
def test_steps_of_verify_that_are_no_number(steps):
    with pytest.raises(
        ConfigurationError, match=r"Trainer.verify\(steps=\) has the wrong type"
    ):
        trainer().verify(TinyModule(), BATCHES, steps=steps)


def test_explain_takes_a_datamodule_as_fit_does():
    with pytest.raises(ConfigurationError, match="is not a DataModule"):
        trainer().explain(TinyModule(), datamodule=3)


@pytest.mark.parametrize("given", [BATCHES, DataLoader(Rows()), 5])
def test_a_third_loader_in_the_place_of_the_datamodule(given):
    with pytest.raises(ConfigurationError, match="is not a DataModule") as error:
        trainer().fit(TinyModule(), BATCHES, BATCHES, given)
    assert "trainer.test(module, loader)" in error.value.fix


def test_hyperparameters_that_were_not_saved():
    class Plain(tk.TrainModule):
        pass

    with pytest.raises(
        AttributeError, match=r"no hyperparameter 'lr'.*self\.save_hyperparameters\(\)"
    ):
        _ = Plain().hparams.lr


def test_torchscript_skips_every_property():
    names = {
        name
        for name in dir(tk.TrainModule)
        if isinstance(inspect.getattr_static(tk.TrainModule, name), property)
    }
    assert names == set(tk.TrainModule.__jit_unused_properties__)


@pytest.mark.parametrize("logs", [False, True])
def test_a_run_that_logs_nothing_says_how_the_loss_is_shown(logs, capsys):
    class Logs(TinyModule):
        def training_step(self, batch, batch_idx):
            loss = self.layer(batch).square().mean()
            if logs:
                self.log("loss", loss)
            return loss

    made = tk.Trainer(
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    made.fit(Logs(), BATCHES)
    assert (
        'self.log("loss", loss, prog_bar=True)' in capsys.readouterr().out
    ) is not logs


@pytest.mark.parametrize(
    ("reads", "interval"), [(True, "epoch"), (True, "step"), (False, "epoch")]
)
def test_a_schedule_in_steps_that_advances_once_an_epoch(reads, interval, capsys):
    """A warm-up over all steps, advanced once an epoch, hardly leaves a learning rate of 0."""

    class Scheduled(TinyModule):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            total = self.trainer.estimated_stepping_batches if reads else 4
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": interval},
            }

    trainer(max_epochs=2).fit(Scheduled(), BATCHES)
    printed = "its schedulers advance once an epoch" in capsys.readouterr().out
    assert printed is (reads and interval == "epoch")


def test_a_new_run_beside_an_earlier_one_says_how_to_continue_it(tmp_path, capsys):
    for epochs in (1, 2):
        made = tk.Trainer(
            max_epochs=epochs,
            default_root_dir=tmp_path,
            logger=False,
            enable_progress_bar=False,
            resume="auto",
        )
        made.fit(TinyModule(), BATCHES)
        printed = capsys.readouterr().out
        newest = made.default_root_dir + "/checkpoints/step-00000002"
        assert (f'fit(ckpt_path="{newest}") continues' in printed) is (epochs == 2)
    made = tk.Trainer(
        max_epochs=3, default_root_dir=tmp_path, logger=False, enable_progress_bar=False
    )
    made.fit(TinyModule(), BATCHES, ckpt_path="last")
    assert made.global_step == 6


def test_values_logged_without_trackers(tmp_path, capsys):
    accelerator = tk.Accelerator(cpu=True, log_with="csv", project_dir=tmp_path)
    accelerator.log({"loss": 1.0})
    accelerator.log({"loss": 2.0})
    assert capsys.readouterr().out.count("log() before init_trackers()") == 1
    accelerator.init_trackers("here")
    accelerator.log({"loss": 3.0})
    accelerator.end_training()
    assert not capsys.readouterr().out
    quiet = tk.Accelerator(cpu=True)
    quiet.log({"loss": 1.0})
    assert not capsys.readouterr().out


@pytest.mark.slow
def test_persistent_workers_end_with_the_run():
    """A collected cycle would wait five seconds for each worker, in any later line of the script."""

    def loader():
        data = TensorDataset(torch.randn(8, 32))
        return DataLoader(
            data, 4, num_workers=1, persistent_workers=True, collate_fn=first
        )

    before = set(multiprocessing.active_children())
    made = tk.Trainer(
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    made.fit(TinyModule(), loader(), loader())
    made.validate(TinyModule(), loader())
    made.fit(Pairs(), [loader(), loader()])
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.parametrize("verb", VERBS)
def test_an_entry_point_of_the_class(verb):
    for owner in (TinyModule(), tk.Trainer):
        with pytest.raises(
            ConfigurationError, match=rf"Trainer\.{verb} was called on the class"
        ) as error:
            getattr(tk.Trainer, verb)(owner, BATCHES)
        assert f"trainer.{verb}(module, ...)" in error.value.fix


class WithoutValidation(TinyModule):
    validation_step = tk.TrainModule.validation_step


class LogsItself(WithoutValidation):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("val_loss", loss)
        return loss


@pytest.mark.parametrize("callback", [EarlyStopping, ModelCheckpoint])
def test_a_monitored_value_of_a_validation_that_is_not_there(
    callback, tmp_path, capsys
):
    """A step may log any name, so the line before the first step is no error; the end of the epoch knows."""

    def made(name):
        watch = callback(monitor=name)
        return tk.Trainer(
            max_epochs=1,
            logger=False,
            enable_progress_bar=False,
            callbacks=watch,
            default_root_dir=tmp_path,
        )

    line = f"{callback.__name__} monitors 'val_loss', and this fit has no validation: define validation_step"
    with pytest.raises(
        ConfigurationError,
        match="monitors 'val_loss', but no value of this name is logged",
    ):
        made("val_loss").fit(WithoutValidation(), BATCHES)
    assert line in capsys.readouterr().out
    made("val_loss").fit(LogsItself(), BATCHES)
    assert line in capsys.readouterr().out
    made("train_loss").fit(WithoutValidation(), BATCHES)
    assert "no validation:" not in capsys.readouterr().out


@pytest.mark.parametrize("validates", [False, True])
def test_a_plateau_of_a_validation_that_is_not_there(validates, capsys):
    class Plateau(LogsItself):
        validation_step = (
            TinyModule.validation_step if validates else tk.TrainModule.validation_step
        )

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"},
            }

    trainer().fit(Plateau(), BATCHES, BATCHES if validates else None)
    line = "ReduceLROnPlateau monitors 'val_loss', and this fit has no validation"
    assert (line in capsys.readouterr().out) is not validates


def test_the_value_of_a_value_function_is_not_a_validation(capsys):
    class Critic(WithoutValidation):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log_dict({"value_loss": loss, "interval": 1.0})
            return loss

    watch = [EarlyStopping("value_loss"), EarlyStopping("interval")]
    made = tk.Trainer(
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=watch,
    )
    made.fit(Critic(), BATCHES)
    assert "no validation" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "callback",
    [
        EarlyStopping("train_loss", check_on_train_epoch_end=False),
        ModelCheckpoint(save_on_train_epoch_end=False),
        ModelCheckpoint(save_on_train_epoch_end=False, every_n_epochs=1),
    ],
)
def test_a_callback_that_acts_after_a_validation_that_is_not_there(callback, tmp_path):
    class Steps(WithoutValidation):
        def training_step(self, batch, batch_idx):
            raise AssertionError("step 1 ran")

    made = tk.Trainer(
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        callbacks=callback,
        default_root_dir=tmp_path,
    )
    with pytest.raises(
        ConfigurationError,
        match="acts after validation only, and this fit has no validation",
    ) as error:
        made.fit(Steps(), BATCHES)
    assert "define validation_step" in error.value.fix


def test_a_checkpoint_of_every_few_steps_needs_no_validation(tmp_path):
    keep = ModelCheckpoint(save_on_train_epoch_end=False, every_n_train_steps=1)
    made = tk.Trainer(
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        callbacks=keep,
        default_root_dir=tmp_path,
    )
    made.fit(WithoutValidation(), BATCHES)
    assert keep.best_model_path


@pytest.mark.parametrize("call", ["clip_grad_norm_", "clip_grad_value_"])
@pytest.mark.parametrize(
    "given",
    [
        lambda model: model,
        lambda model: nn.Sequential(model),
        lambda model: model.parameters,
        lambda model: model.named_parameters(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    ],
)
def test_clipping_something_else_than_parameters(call, given):
    accelerator, model = tk.Accelerator(cpu=True), nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match="needs the parameters") as error:
        getattr(accelerator, call)(given(model), 1.0)
    assert "model.parameters()" in error.value.fix
    accelerator.backward(model(torch.ones(1, 2)).sum())
    accelerator.clip_grad_norm_(nn.ParameterList(model.parameters()), 0.5)
    assert torch.nn.utils.get_total_norm(
        [p.grad for p in model.parameters()]
    ).item() == pytest.approx(0.5, rel=1e-4)


def test_clipping_a_module_in_a_step():
    class Clips(TinyModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward(super().training_step(batch, batch_idx))
            self.clip_gradients(self, 1.0)

    with pytest.raises(ConfigurationError, match="takes the optimizer") as error:
        trainer().fit(Clips(), BATCHES)
    assert "self.optimizers()" in error.value.fix


@pytest.mark.parametrize("waits", [False, True])
def test_neither_model_nor_optimizer_is_prepared_for_accumulation(waits):
    """Accelerate steps in every micro-batch then, without a word."""
    accelerator, model = (
        tk.Accelerator(cpu=True, gradient_accumulation_steps=2),
        nn.Linear(2, 2),
    )
    optimizer, before = (
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.weight.detach().clone(),
    )

    def step():
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            if accelerator.sync_gradients or not waits:
                optimizer.step()

    if waits:
        step(), step()
        assert not torch.equal(before, model.weight)
        return
    with pytest.raises(
        ConfigurationError, match="updates a model inside a window"
    ) as error:
        step()
    assert error.value.fix.startswith(
        "model, optimizer = accelerator.prepare(model, optimizer)"
    )
    assert torch.equal(before, model.weight)


@pytest.mark.parametrize("name", ["model", "model_state_dict", "net"])
def test_load_from_checkpoint_of_a_file_with_more_than_weights(name, tmp_path):
    file, module = tmp_path / "last.pt", TinyModule()
    torch.save({name: module.state_dict(), "epoch": 3}, file)
    with pytest.raises(CheckpointError) as error:
        TinyModule.load_from_checkpoint(file)
    call = re.search(r"module\.load_state_dict\((.+)\), or", error.value.fix)[1]
    assert torch.equal(eval(call)["layer.weight"], module.layer.weight)


def test_load_from_checkpoint_of_a_whole_module(tmp_path):
    torch.save(TinyModule(), tmp_path / "whole.pt")
    with pytest.raises(CheckpointError, match="a class could run code") as error:
        TinyModule.load_from_checkpoint(tmp_path / "whole.pt")
    assert "weights_only=False, and save its state_dict()" in error.value.fix


@pytest.mark.parametrize(
    "given", [lambda module: module, lambda module: module.parameters]
)
def test_an_optimizer_of_something_else_than_parameters(given):
    class Makes(TinyModule):
        def configure_optimizers(self):
            return torch.optim.SGD(given(self), lr=0.1)

    with pytest.raises(TypeError, match="is not iterable") as error:
        trainer().fit(Makes(), BATCHES)
    assert "self.net.parameters(), with parentheses" in notes(error)


class Pairs(TinyModule):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch[0] + batch[1], batch_idx)


def first(samples):
    return torch.stack([sample[0] for sample in samples])
