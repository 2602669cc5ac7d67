"""The forms in which users hand arguments over, and what the Trainer answers when it is asked for them."""

import inspect
from datetime import timedelta

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import trainer_kit as tk
from trainer_kit.callbacks import GradientAccumulation, ModelCheckpoint, Timer
from trainer_kit.commands.main import main
from trainer_kit.compat.lightning import FORMER_ARGUMENTS
from trainer_kit.core.errors import ConfigurationError, DurationError
from trainer_kit.loggers import CSVLogger, JSONLLogger, WandbLogger
from trainer_kit.testing import TinyModule

OFF = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"),
    False,
)
DATA = [torch.randn(4, 32)] * 4
TRACES = tk.ProfileKwargs(activities=["cpu"], output_trace_dir="~/traces")


class Heard(tk.Callback):
    def __init__(self):
        self.steps = 0

    def on_train_step_end(self, trainer, module):
        self.steps += 1


class Listed:
    """As a list of a configuration library: iterable, and neither a list nor a tuple."""

    def __init__(self, *items):
        self.items = items

    def __iter__(self):
        return iter(self.items)

    def __len__(self):
        return len(self.items)


FORMS = {
    "one": lambda one: one,
    "tuple": lambda one: (one,),
    "set": lambda one: {one},
    "values": lambda one: {"name": one}.values(),
    "generator": lambda one: (each for each in [one]),
    "other": lambda one: Listed(one),
}


@pytest.mark.parametrize("form", FORMS)
def test_callbacks_in_any_iterable(form):
    heard = Heard()
    trainer = tk.Trainer(max_epochs=1, callbacks=FORMS[form](heard), **OFF)
    trainer.fit(TinyModule(), DATA)
    assert heard.steps == 4
    assert trainer.callbacks == [heard]


@pytest.mark.parametrize("form", FORMS)
def test_loggers_plugins_and_the_modules_callbacks_in_any_iterable(form, tmp_path):
    class Brings(TinyModule):
        def configure_callbacks(self):
            return FORMS[form](heard)

    heard, logger = Heard(), CSVLogger(tmp_path)
    precision = tk.precision.TruePrecision(torch.float64)
    plugins = FORMS[form](precision)
    trainer = tk.Trainer(
        max_epochs=1, plugins=plugins, **{**OFF, "logger": FORMS[form](logger)}
    )
    trainer.fit(Brings(), [batch.double() for batch in DATA])
    assert heard.steps == 4
    assert trainer.loggers == [logger]
    assert trainer.precision_plugin is precision


def test_an_accumulation_callback_of_a_generator_counts():
    steps = Heard()
    trainer = tk.Trainer(
        max_epochs=1,
        callbacks=(each for each in (GradientAccumulation(2), steps)),
        **OFF,
    )
    trainer.fit(TinyModule(), DATA)
    assert trainer.global_step == 2


def test_a_mapping_of_callbacks_is_refused_with_the_way_out():
    with pytest.raises(ConfigurationError, match=r"values\(\)"):
        tk.Trainer(callbacks={"mine": Heard()}, **OFF)


@pytest.mark.parametrize(
    "length", ["00:00:00:02", {"seconds": 2}, timedelta(seconds=2), "2s"], ids=str
)
def test_every_duration_argument_takes_time_in_every_form(length, tmp_path):
    class Validates(TinyModule):
        validated = 0

        def on_validation_start(self):
            self.validated += 1

    trainer = tk.Trainer(
        max_epochs=1, val_check_interval=length, num_sanity_val_steps=0, **OFF
    )
    assert trainer.val_check_interval.value == 2.0
    module = Validates()
    trainer.fit(module, DATA, DATA)
    assert module.validated == 0, "four batches take less than two seconds"
    keeper = ModelCheckpoint(tmp_path, train_time_interval=length)
    trainer = tk.Trainer(
        max_duration=length,
        max_time=length,
        callbacks=keeper,
        **{**OFF, "enable_checkpointing": True},
    )
    assert str(trainer.settings.max_duration) == "2.0s"
    assert Timer(length).time_remaining() == 2.0


def test_validation_by_the_clock_runs():
    class Validates(TinyModule):
        validated = 0

        def on_validation_start(self):
            self.validated += 1

    trainer = tk.Trainer(
        max_epochs=1,
        val_check_interval={"microseconds": 1},
        num_sanity_val_steps=0,
        **OFF,
    )
    module = Validates()
    trainer.fit(module, DATA, DATA)
    assert module.validated == 4


@pytest.mark.parametrize("wrong", ["00:00:02", {"second": 2}, {"seconds": -2}], ids=str)
def test_time_that_cannot_be_read(wrong):
    with pytest.raises(DurationError):
        tk.Trainer(val_check_interval=wrong)


def test_a_users_timer_and_max_time_keep_their_own_limits(tmp_path):
    def train(max_time, own, epochs, ckpt_path=None):
        trainer = tk.Trainer(
            max_epochs=epochs,
            max_time=max_time,
            callbacks=[own],
            default_root_dir=tmp_path,
            **{**OFF, "logger": "csv"},
        )
        trainer.fit(TinyModule(), DATA, ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / "saved")
        return trainer

    measures = Timer()
    train("1h", measures, 1)
    assert measures.time_elapsed() > 0
    stopped = train({"microseconds": 1}, Timer("1h"), 9)
    assert stopped.current_epoch < 9, "max_time ends the run"
    stopped = train("1h", Timer({"microseconds": 1}), 9)
    assert stopped.current_epoch < 9, "the timer ends the run"
    saved = Timer()
    train("1h", saved, 1)
    resumed = Timer()
    train("1h", resumed, 2, tmp_path / "saved")
    assert resumed.time_elapsed() > saved.time_elapsed() > 0, (
        "both continue from the time of the checkpoint"
    )
    both = tk.Trainer(max_epochs=9, max_time="2h", callbacks=Timer("1h"), **OFF)
    assert "after 9 epochs, or after 3600s, or after 7200s" in str(both.explain())


def test_arguments_are_read_back_as_given():
    trainer = tk.Trainer(accumulate_grad_batches=4, fast_dev_run=3, max_epochs=-1)
    assert trainer.accumulate_grad_batches == 4
    assert trainer.fast_dev_run == 3
    assert tk.Trainer(fast_dev_run=True).fast_dev_run is True
    trainer = tk.Trainer(
        accumulate_grad_batches=2,
        max_epochs=-1,
        max_steps=2,
        limit_train_batches=0.5,
        limit_val_batches=3,
        limit_test_batches=2,
        limit_predict_batches=1,
        val_check_interval=0.5,
        check_val_every_n_epoch=2,
        num_sanity_val_steps=0,
        gradient_clip_val=0.5,
        overfit_batches=2,
        **OFF,
    )
    for _ in range(2):
        assert (
            trainer.max_epochs,
            trainer.max_steps,
            trainer.accumulate_grad_batches,
        ) == (
            -1,
            2,
            2,
        )
        assert (
            trainer.limit_train_batches,
            trainer.limit_val_batches,
            trainer.limit_test_batches,
        ) == (0.5, 3, 2)
        assert (
            trainer.limit_predict_batches,
            trainer.overfit_batches,
            trainer.num_sanity_val_steps,
        ) == (1, 2, 0)
        assert (trainer.val_check_interval, trainer.check_val_every_n_epoch) == (0.5, 2)
        assert (trainer.gradient_clip_val, trainer.gradient_clip_algorithm) == (
            0.5,
            "norm",
        )
        trainer.fit(TinyModule(), DATA)
    assert tk.Trainer(accumulate_grad_batches={0: 3, 4: 1}).accumulate_grad_batches == 3
    with pytest.raises(AttributeError):
        trainer.limit_train_batches = 1.0


def test_a_tilde_is_the_home_directory_in_every_path(monkeypatch, tmp_path):
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir(), here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    keeper = ModelCheckpoint("~/kept", save_last=True)
    loggers = [CSVLogger("~/csv"), JSONLLogger("~/jsonl")]
    on = {**OFF, "enable_checkpointing": True, "logger": loggers}
    trainer = tk.Trainer(
        max_epochs=1, default_root_dir="~/runs", callbacks=keeper, **on
    )
    assert trainer.default_root_dir == str(home / "runs")
    trainer.fit(TinyModule(), DATA)
    trainer.save_checkpoint("~/saved")
    plain = tk.Trainer(
        max_epochs=1, default_root_dir="~/runs", **{**on, "logger": "csv"}
    )
    plain.fit(TinyModule(), DATA, ckpt_path="~/saved")
    tk.verify_checkpoint("~/saved")
    assert len(tk.checkpoints("~/kept")) == 1
    assert isinstance(TinyModule.load_from_checkpoint("~/saved"), TinyModule)

    accelerator = tk.Accelerator(project_dir="~/project", cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    assert (accelerator.project_dir, accelerator.logging_dir) == (
        str(home / "project"),
        str(home / "project"),
    )
    accelerator.save_state("~/state")
    accelerator.load_state("~/state")
    accelerator.save_model(model, "~/model")
    tk.load_checkpoint_in_model(nn.Linear(2, 2), "~/model")
    tk.disk_offload(nn.Linear(2, 2), "~/offloaded", execution_device="cpu")
    with tk.Accelerator(
        cpu=True, kwargs_handlers=(each for each in [TRACES])
    ).profile():
        pass
    found = CliRunner().invoke(main, ["checkpoint", "verify", "~/saved"])
    assert found.exit_code == 0, found.output

    expected = {
        "csv",
        "jsonl",
        "kept",
        "model",
        "offloaded",
        "runs",
        "saved",
        "state",
        "traces",
    }
    assert expected <= {path.name for path in home.iterdir()}
    assert not list(here.iterdir())


def test_a_tilde_in_the_directory_of_weights_and_biases(monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert WandbLogger(save_dir="~/wandb").save_dir == str(tmp_path / "wandb")


# Every argument of Lightning's Trainer from 1.0 to 2.6.
OF_LIGHTNING = """
    accelerator accumulate_grad_batches amp_backend amp_level auto_lr_find auto_scale_batch_size auto_select_gpus
    automatic_optimization barebones benchmark callbacks check_val_every_n_epoch checkpoint_callback default_root_dir
    detect_anomaly deterministic devices distributed_backend enable_autolog_hparams enable_checkpointing
    enable_model_summary enable_progress_bar fast_dev_run flush_logs_every_n_steps gpus gradient_clip_algorithm
    gradient_clip_val inference_mode ipus limit_predict_batches limit_test_batches limit_train_batches
    limit_val_batches log_every_n_steps log_gpu_memory logger max_epochs max_steps max_time min_epochs min_steps
    model_registry move_metrics_to_cpu multiple_trainloader_mode num_nodes num_processes num_sanity_val_steps
    overfit_batches plugins precision prepare_data_per_node process_position profiler progress_bar_refresh_rate
    reload_dataloaders_every_epoch reload_dataloaders_every_n_epochs replace_sampler_ddp resume_from_checkpoint
    stochastic_weight_avg strategy sync_batchnorm terminate_on_nan tpu_cores track_grad_norm truncated_bptt_steps
    use_distributed_sampler val_check_interval weights_save_path weights_summary
"""
TAKEN = list(inspect.signature(tk.Trainer).parameters)


@pytest.mark.parametrize("name", OF_LIGHTNING.split())
def test_every_argument_of_lightning_is_taken_or_refused_with_its_replacement(name):
    assert (name in TAKEN) != (name in FORMER_ARGUMENTS)
    if name in FORMER_ARGUMENTS:
        with pytest.raises(
            ConfigurationError, match=f"Trainer has no argument '{name}'"
        ) as error:
            tk.Trainer(**{name: 3})
        assert error.value.found == f"{name}=3"
        assert error.value.fix == FORMER_ARGUMENTS[name].format(value="3")


def test_replacements_name_arguments_that_exist():
    assert "devices" in TAKEN
    assert not set(FORMER_ARGUMENTS) & set(TAKEN)
    for fix in FORMER_ARGUMENTS.values():
        name = fix.partition("=")[0]
        assert "=" not in fix or not name.isidentifier() or name in TAKEN, fix


def test_a_misspelled_argument():
    with pytest.raises(ConfigurationError) as error:
        tk.Trainer(max_epoch=1)
    assert error.value.problem == "Trainer has no argument 'max_epoch'"
    assert error.value.fix == "did you mean 'max_epochs'?"
    with pytest.raises(ConfigurationError, match=r"devices=2"):
        tk.Trainer(gpus=2)

    class Mine(tk.Trainer):
        def __init__(self, **arguments):
            super().__init__(**arguments)

    with pytest.raises(ConfigurationError, match="did you mean 'max_steps'"):
        Mine(max_step=1)


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        ({"max_epochs": "3ep"}, "max_duration='3ep'"),
        ({"max_steps": "2h"}, "max_duration='2h'"),
        ({"max_epochs": "3"}, "max_epochs=3"),
        ({"min_epochs": "3ep"}, "min_epochs=3"),
        ({"max_epochs": "three"}, None),
    ],
)
def test_a_string_in_place_of_a_number_is_refused(arguments, fix):
    with pytest.raises(ConfigurationError, match="must be an integer") as error:
        tk.Trainer(**arguments)
    assert error.value.fix == fix


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("fp16-mixed", "16-mixed"),
        ("float16_mixed", "16-mixed"),
        ("fp16-true", "16-true"),
        ("bfloat16-mixed", "bf16-mixed"),
        ("float32", "32"),
        ("fp32", "32"),
        ("bf16-mixd", "bf16-mixed"),
    ],
)
def test_a_precision_of_another_spelling(word, meant):
    with pytest.raises(tk.PrecisionError) as error:
        tk.Trainer(precision=word)
    assert error.value.fix == f"did you mean {meant!r}?"
    tk.Trainer(precision=meant)


PARAMETERS = inspect.signature(tk.Trainer).parameters
SWITCHES = [
    name
    for name, each in PARAMETERS.items()
    if each.annotation in ("bool", "bool | None")
]


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_is_true_or_false(name):
    for value in ("false", 2, float("nan"), []):
        with pytest.raises(
            ConfigurationError, match=rf"Trainer\({name}=\) has the wrong type"
        ):
            tk.Trainer(**{name: value})
    assert len(SWITCHES) > 10


@pytest.mark.parametrize(
    "options",
    [
        {"num_nodes": None},
        {"max_steps": None},
        {"val_check_interval": float("nan")},
        {"default_root_dir": 3},
        {"default_root_dir": []},
        {"max_duration": {}},
        {"max_time": {}},
    ],
)
def test_a_value_without_a_meaning_is_refused(options):
    with pytest.raises((ConfigurationError, DurationError)):
        tk.Trainer(**options)


@pytest.mark.parametrize("policy", [float("nan"), 1.5, object(), -1])
def test_blocks_that_nothing_chooses(policy):
    with pytest.raises(tk.TrainerKitError):
        tk.Trainer(**OFF, max_epochs=1, activation_checkpointing=policy).fit(
            TinyModule(), DATA
        )


@pytest.mark.parametrize("value", [None, 3, 1.5, True])
def test_a_word_of_the_wrong_type_is_refused(value):
    with pytest.raises(ConfigurationError, match="use one of"):
        Timer("1h", interval=value)


@pytest.mark.parametrize("size", [1.5, float("nan"), True, None, "2"])
def test_sizes_of_a_mesh_are_whole_numbers(size):
    with pytest.raises(
        tk.TrainerKitError, match=r"must be an integer ≥ 1|tp takes int"
    ):
        tk.strategies.MeshStrategy(tp=size)
    with pytest.raises(tk.TrainerKitError, match="must be an integer ≥ 1"):
        tk.strategies.ModelParallelStrategy(tensor_parallel_size=size)
