"""Lightning's module paths, its names, and what an import of a missing name says."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import trainer_kit as tk
from trainer_kit.compat.lightning_names import ELSEWHERE, PATHS
from trainer_kit.testing import TinyModule


@pytest.mark.parametrize("path", PATHS)
def test_every_path_is_a_module_with_its_names(path):
    module = importlib.import_module(f"trainer_kit.{path}")
    assert module.__name__ == f"trainer_kit.{path}"
    for name in PATHS[path]:
        assert callable(module) if name == "__call__" else hasattr(module, name), name


def test_names_and_paths_are_not_missing_and_present():
    assert [path for path in ELSEWHERE if path in PATHS] == []
    here = (
        {name for names in PATHS.values() for name in names}
        | set(tk.__all__)
        | set(tk.callbacks.__all__)
    )
    assert sorted(here & set(ELSEWHERE)) == []
    assert list(ELSEWHERE) == sorted(ELSEWHERE)


def test_imports_in_the_form_of_lightning():
    """Lines of real projects after ``s/lightning.pytorch/trainer_kit/``."""
    from trainer_kit.callbacks.lr_monitor import LearningRateMonitor
    from trainer_kit.callbacks.progress import TQDMProgressBar
    from trainer_kit.callbacks.progress.rich_progress import (
        RichProgressBar,
        RichProgressBarTheme,
    )
    from trainer_kit.loggers.logger import Logger, rank_zero_experiment
    from trainer_kit.plugins import MixedPrecision
    from trainer_kit.profilers import SimpleProfiler
    from trainer_kit.pytorch.callbacks import ModelCheckpoint as BehindPytorch
    from trainer_kit.pytorch.utilities.types import STEP_OUTPUT as TypeBehindPytorch
    from trainer_kit.trainer.states import RunningStage, TrainerFn
    from trainer_kit.trainer.trainer import Trainer as OfTrainer
    from trainer_kit.tuner.tuning import Tuner
    from trainer_kit.utilities import CombinedLoader, rank_zero_info, rank_zero_only
    from trainer_kit.utilities.exceptions import MisconfigurationException
    from trainer_kit.utilities.model_summary import ModelSummary, summarize
    from trainer_kit.utilities.seed import isolate_rng
    from trainer_kit.utilities.types import (
        EVAL_DATALOADERS,
        STEP_OUTPUT,
        OptimizerLRScheduler,
    )

    from trainer_kit import (
        LightningDataModule,
        LightningModule,
        Trainer,
        seed_everything,
    )
    from trainer_kit.callbacks import Callback, ModelCheckpoint
    from trainer_kit.callbacks.early_stopping import EarlyStopping
    from trainer_kit.core import LightningModule as OfCore
    from trainer_kit.core.datamodule import LightningDataModule as OfDataModule
    from trainer_kit.core.hooks import DataHooks, ModelHooks
    from trainer_kit.core.module import LightningModule as OfModule
    from trainer_kit.loggers.csv_logs import CSVLogger
    from trainer_kit.strategies.ddp import DDPStrategy

    assert LightningModule is OfCore is OfModule is tk.TrainModule
    assert LightningDataModule is OfDataModule is tk.DataModule
    assert Trainer is OfTrainer is tk.Trainer
    assert Tuner is tk.tuner.Tuner
    assert issubclass(tk.TrainModule, (DataHooks, ModelHooks))
    assert ModelCheckpoint is BehindPytorch is tk.callbacks.ModelCheckpoint
    assert (
        EarlyStopping,
        LearningRateMonitor,
        TQDMProgressBar,
        RichProgressBar,
        Callback,
    ) == (
        tk.callbacks.EarlyStopping,
        tk.callbacks.LearningRateMonitor,
        tk.callbacks.TQDMProgressBar,
        tk.callbacks.RichProgressBar,
        tk.callbacks.Callback,
    )
    assert (CSVLogger, Logger, DDPStrategy) == (
        tk.loggers.CSVLogger,
        tk.loggers.Logger,
        tk.strategies.DDPStrategy,
    )
    assert SimpleProfiler is tk.callbacks.SimpleProfiler
    assert MixedPrecision is tk.precision.MixedPrecision
    assert CombinedLoader is tk.CombinedLoader
    assert TypeBehindPytorch is STEP_OUTPUT
    assert issubclass(MisconfigurationException, ValueError)
    assert summarize is ModelSummary
    assert TrainerFn.FITTING == "fit"
    assert RunningStage.SANITY_CHECKING.evaluating
    for helper in (
        seed_everything,
        rank_zero_experiment,
        rank_zero_info,
        rank_zero_only,
        isolate_rng,
        RichProgressBarTheme,
    ):
        assert callable(helper)
    for kind in (EVAL_DATALOADERS, OptimizerLRScheduler):
        assert kind is not None


@pytest.mark.slow
def test_attributes_below_the_package():
    """``import lightning as L`` and ``import lightning.pytorch as pl`` reach modules as attributes."""
    code = """
import trainer_kit as L
assert L.pytorch is L
assert L.pytorch.callbacks.ModelCheckpoint is L.callbacks.ModelCheckpoint
assert L.utilities.rank_zero.rank_zero_only is L.utilities.rank_zero_only
def step() -> L.utilities.types.STEP_OUTPUT: ...
assert L.core.LightningModule is L.LightningModule
assert L.trainer.Trainer is L.Trainer and L.trainer.states.TrainerFn.TESTING == "test"
assert not hasattr(L, "no_such_name")
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=100)


_WALK = """
import sys
from pathlib import Path
import trainer_kit
from trainer_kit.compat.lightning_names import PATHS
for path in filter(None, PATHS):
    value = trainer_kit
    for part in path.split("."):
        value = getattr(value, part)
    assert "__call__" in PATHS[path] or value.__name__ == f"trainer_kit.{path}", path
for module in %r:
    value = trainer_kit
    for part in module.split("."):
        value = getattr(value, part)
    assert sys.modules[f"trainer_kit.{module}"] is value, module
"""
_FILES = [
    "callbacks.early_stopping",
    "callbacks.finetuning",
    "callbacks.model_checkpoint",
    "callbacks.model_summary",
    "callbacks.prediction_writer",
    "callbacks.pruning",
    "callbacks.timer",
    "callbacks.weight_averaging",
    "core.datamodule",
    "core.hooks",
    "loggers.comet",
    "loggers.csv_logs",
    "loggers.mlflow",
    "loggers.tensorboard",
    "loggers.wandb",
    "strategies.ddp",
    "strategies.deepspeed",
    "strategies.fsdp",
    "strategies.strategy",
    "tuner.tuning",
]


def test_every_module_is_an_attribute_without_an_import():
    subprocess.run(
        [sys.executable, "-W", "error", "-c", _WALK % _FILES], check=True, timeout=100
    )


@pytest.mark.slow
def test_a_function_with_the_name_of_a_module_can_be_called_before_and_after():
    code = """
import trainer_kit as tk
before = tk.cli
import trainer_kit.cli
from trainer_kit import cli
for one in (before, tk.cli, cli):
    try:
        one(args=["no-such-command"])
    except SystemExit as error:
        assert error.code == 2
    else:
        raise AssertionError(one)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("from trainer_kit.callbacks import Checkpoint", "subclass Callback"),
        (
            "from trainer_kit.callbacks.checkpoint import Checkpoint",
            "subclass Callback",
        ),
        (
            "from trainer_kit.plugins.environments import SLURMEnvironment",
            "torchrun, SLURM and MPI are found",
        ),
        (
            "from trainer_kit.plugins.environments.slurm import SLURMEnvironment",
            "torchrun, SLURM and MPI are found",
        ),
        (
            "from trainer_kit.plugins.io import AsyncCheckpointIO",
            r"Trainer\(async_save=False\)",
        ),
        ("import trainer_kit.loops.fit_loop", "Trainer arguments and callback hooks"),
        ("from trainer_kit import LightningLite", r"trainer_kit\.Fabric"),
        (
            "from trainer_kit.strategies import DDPSpawnStrategy",
            r'Trainer\(strategy="ddp"\)',
        ),
        (
            "from trainer_kit.utilities.parsing import lightning_getattr",
            "module.hparams",
        ),
    ],
)
def test_an_import_of_a_missing_name_says_what_to_use(line, fix):
    with pytest.raises(
        ImportError,
        match=rf"has no attribute '\w+'\n  found: a name of Lightning\n  fix:   .*{fix}",
    ):
        exec(line)


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("from trainer_kit import Trainr", "did you mean 'Trainer'?"),
        (
            "from trainer_kit.callbacks import EarlyStoping",
            "did you mean 'EarlyStopping'?",
        ),
        (
            "from trainer_kit.utilities.types import STEP_OUTPUTS",
            "did you mean 'STEP_OUTPUT'?",
        ),
        (
            "from trainer_kit.callbacks import rank_zero_only",
            "from trainer_kit.utilities import rank_zero_only",
        ),
        (
            "from trainer_kit.strategies import Trainer",
            "from trainer_kit import Trainer",
        ),
        (
            "from trainer_kit.utilities import zzz",
            r"dir(trainer_kit.utilities) lists its names",
        ),
        ("import trainer_kit.callbaks", "did you mean 'callbacks'?"),
    ],
)
def test_an_import_of_an_unknown_name_names_a_near_one(line, fix):
    with pytest.raises(ImportError) as caught:
        exec(line)
    assert str(caught.value).endswith(f"\n  fix:   {fix}")
    assert "found" not in str(caught.value)


def test_a_missing_attribute_is_an_attribute_error():
    assert not hasattr(tk.callbacks, "Checkpoint")
    with pytest.raises(AttributeError, match="subclass Callback"):
        _ = tk.callbacks.Checkpoint


@pytest.mark.slow
def test_the_table_is_not_read_by_imports_that_succeed():
    code = """
import sys, trainer_kit
from trainer_kit import Trainer, TrainModule, callbacks, loggers, strategies, tuner
from trainer_kit.callbacks import ModelCheckpoint
print([name for name in sys.modules if name.startswith("trainer_kit.compat.lightning_")])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert done.stdout.strip() == "[]"


def test_the_boring_model_trains_validates_tests_and_predicts():
    from trainer_kit.demos.boring_classes import (
        BoringDataModule,
        BoringModel,
        ManualOptimBoringModel,
    )

    model, quiet = (
        BoringModel(),
        {"barebones": True, "accelerator": "cpu", "devices": 1},
    )
    before = model.layer.weight.detach().clone()
    trainer = tk.Trainer(max_epochs=2, **quiet)
    trainer.fit(model)
    assert trainer.global_step == 128
    assert not torch.equal(before, model.layer.weight)
    assert len(trainer.predict(model)) == 64
    trainer.test(model)
    trainer.validate(model, datamodule=BoringDataModule())
    manual = ManualOptimBoringModel()
    tk.Trainer(max_steps=3, **quiet).fit(manual, datamodule=BoringDataModule())


def test_the_demo_model_trains():
    from trainer_kit.demos import DemoModel
    from trainer_kit.demos.boring_classes import (
        RandomDictDataset,
        RandomIterableDatasetWithLen,
    )

    rows = RandomIterableDatasetWithLen(32, 8)
    trainer = tk.Trainer(max_epochs=1, barebones=True, accelerator="cpu", devices=1)
    trainer.fit(DemoModel(), torch.utils.data.DataLoader(rows, batch_size=4))
    assert trainer.global_step == 2
    both = RandomDictDataset(3, 2)[1]
    torch.testing.assert_close(both["b"], both["a"] + 2)


def test_a_wrong_call_is_a_misconfiguration_exception():
    from trainer_kit.utilities.exceptions import MisconfigurationException

    with pytest.raises(MisconfigurationException, match="max_epochs"):
        tk.Trainer(max_epochs=-5)


def test_helpers(monkeypatch):
    from trainer_kit.demos.boring_classes import BoringModel
    from trainer_kit.loggers.logger import rank_zero_experiment
    from trainer_kit.utilities import AttributeDict, grad_norm
    from trainer_kit.utilities.cloud_io import get_filesystem
    from trainer_kit.utilities.model_helpers import is_overridden
    from trainer_kit.utilities.model_summary import ModelSummary
    from trainer_kit.utilities.rank_zero import rank_zero_only
    from trainer_kit.utilities.seed import isolate_rng

    model = BoringModel()
    model.step(torch.ones(4, 32)).backward()
    norms = grad_norm(model, 2)
    parts = torch.stack([parameter.grad.norm() for parameter in model.parameters()])
    assert norms["grad_2.0_norm/layer.bias"] == pytest.approx(
        model.layer.bias.grad.norm().item()
    )
    assert norms["grad_2.0_norm_total"] == pytest.approx(parts.norm().item())
    with pytest.raises(tk.ConfigurationError, match="must be positive"):
        grad_norm(model, 0)
    assert is_overridden("training_step", model)
    assert not is_overridden("on_train_start", model)
    assert not is_overridden("on_train_start", None)
    with pytest.raises(tk.ConfigurationError, match="pass parent="):
        is_overridden("forward", torch.nn.Linear(1, 1))
    assert "66" in str(ModelSummary(model, max_depth=-1))
    assert AttributeDict(lr=0.1).lr == 0.1
    assert get_filesystem("file:///tmp").protocol[0] == "file"
    state = torch.get_rng_state()
    with isolate_rng():
        torch.rand(3)
    assert torch.equal(state, torch.get_rng_state())

    class Mine:
        made = 0

        @property
        @rank_zero_experiment
        def experiment(self):
            self.made += 1
            return "run"

    mine = Mine()
    assert mine.experiment == "run"
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    mine.experiment.add_scalar("loss", 1.0)
    assert mine.made == 1


def words(path):
    path.mkdir(exist_ok=True)
    (path / "wikitext-2.txt").write_text("the cat sat\non the mat on the cat\n" * 40)
    return path


def test_the_demo_of_words(tmp_path):
    from trainer_kit.demos import LightningTransformer, Transformer, WikiText2

    data = WikiText2(words(tmp_path / "data"), block_size=5)
    assert data.vocab_size == 6  # five words and the end of a line
    inputs, target = data[0]
    assert inputs.tolist() == [0, 1, 2, 3, 4]
    assert target.tolist() == [1, 2, 3, 4, 0]
    assert len(data) == 440 // 5 - 1
    model = Transformer(data.vocab_size, ninp=8, nhid=8).eval()
    out = model(inputs[None], target[None])
    assert out.shape == (5, 6)
    torch.testing.assert_close(out.exp().sum(1), torch.ones(5))
    module = LightningTransformer(data.vocab_size)
    before = module.model.decoder.weight.detach().clone()
    tk.Trainer(max_steps=2, barebones=True, accelerator="cpu").fit(
        module, DataLoader(data)
    )
    assert not torch.equal(module.model.decoder.weight, before)


def test_names_that_need_torchvision_name_it_in_the_error(monkeypatch):
    from trainer_kit.demos.mnist_datamodule import MNIST
    from trainer_kit.utilities.model_helpers import get_torchvision_model

    monkeypatch.setitem(sys.modules, "torchvision", None)
    for call in (lambda: MNIST("data"), lambda: get_torchvision_model("resnet18")):
        with pytest.raises(tk.ConfigurationError, match="pip install torchvision"):
            call()


def test_the_data_module_of_digits(monkeypatch):
    from trainer_kit.demos.mnist_datamodule import MNISTDataModule

    class Digits(TensorDataset):
        def __init__(self, root, train, download, transform=None):
            count = 40 if train else 10
            super().__init__(torch.arange(float(count))[:, None], torch.zeros(count))
            loaded.append((root, train, download))

    loaded = []
    steps = SimpleNamespace(
        ToTensor=object, Normalize=lambda **options: options, Compose=list
    )
    monkeypatch.setitem(
        sys.modules,
        "torchvision",
        SimpleNamespace(datasets=SimpleNamespace(MNIST=Digits), transforms=steps),
    )
    data = MNISTDataModule(
        "here", val_split=8, num_workers=0, batch_size=4, normalize=True
    )
    data.prepare_data()
    data.setup("fit")
    assert loaded == [
        ("here", True, True),
        ("here", False, True),
        ("here", True, False),
    ]
    seen = [
        x
        for loader in (data.train_dataloader(), data.val_dataloader())
        for batch, _ in loader
        for x in batch
    ]
    assert sorted(int(x) for x in seen) == [*range(40)]
    assert len(data.test_dataloader()) == 2
    assert data.default_transforms[1] == {"mean": (0.5,), "std": (0.5,)}


def served(answer, **changes):
    from trainer_kit.serve import ServableModule

    class Answers(TinyModule, ServableModule):
        def configure_payload(self):
            return {"body": {"x": [1.0, 2.0], "scale": 2}}

        def configure_serialization(self):
            return {"x": torch.tensor}, {"sum": torch.Tensor.item}

        def serve_step(self, x, scale):
            assert not self.training
            return {"sum": x.sum() * scale}

        def configure_response(self):
            return answer

    return Answers(**changes)


def test_a_servable_module_answers_its_own_example():
    from trainer_kit.serve import ServableModule, ServableModuleValidator

    def fit(module, **options):
        validator = ServableModuleValidator(**options)
        trainer = tk.Trainer(
            max_steps=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            callbacks=[validator],
        )
        trainer.fit(module, DataLoader(torch.randn(8, 32)))
        return validator

    right = fit(served({"sum": 6.0}))
    assert (right.successful, right.resp) == (True, {"sum": 6.0})
    assert fit(served(None), server="fastapi", port=8080).successful
    assert fit(served({"sum": 7.0}), exit_on_failure=False).successful is False
    with pytest.raises(
        tk.ConfigurationError, match=r"(?s)its example request.*'sum': 6.0.*'sum': 7.0"
    ):
        fit(served({"sum": 7.0}))
    with pytest.raises(tk.ConfigurationError, match="needs a ServableModule"):
        fit(TinyModule())
    with pytest.raises(
        tk.ConfigurationError, match="ServableModule without configure_payload"
    ):
        ServableModule().configure_payload()


def test_a_parallel_strategy_answers_isinstance():
    from trainer_kit.strategies import ParallelStrategy

    seen = []

    class Asks(TinyModule):
        def setup(self, stage):
            seen.append(isinstance(self.trainer.strategy, ParallelStrategy))

    tk.Trainer(max_steps=1, barebones=True, accelerator="cpu").fit(
        Asks(), DataLoader(torch.randn(8, 32))
    )
    assert seen == [False]
    with pytest.raises(
        tk.ConfigurationError, match=r"trainer_kit\.strategies\.Strategy"
    ):
        type("Mine", (ParallelStrategy,), {})


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_a_parallel_strategy_on_two_processes():
    from trainer_kit.strategies import ParallelStrategy

    trainer = tk.Trainer(max_steps=1, barebones=True, accelerator="cpu", strategy="ddp")
    trainer.fit(TinyModule(), DataLoader(torch.randn(8, 32)))
    assert isinstance(trainer.strategy, ParallelStrategy)


# Modules of this library with these paths: Python itself writes the error of an import of a name from a module.
WITHOUT_A_FIX = {
    "callbacks.prediction_writer.WriteInterval",
    "callbacks.timer.Interval",
    "core.hooks.CheckpointHooks",
    "loggers.csv_logs.ExperimentWriter",
}


def test_every_public_name_of_lightning_is_here_or_answered_with_what_to_write():
    path = Path(__file__).with_name("lightning_public_names.json")
    modules = json.loads(path.read_text())["names"]
    unanswered = set()
    for module, names in modules.items():
        own_path = module.removeprefix("pytorch.").removeprefix("pytorch")
        for name in names.split() or [""]:
            try:
                imported = importlib.import_module(
                    f"trainer_kit.{own_path}".rstrip(".")
                )
                if name:
                    exec(f"from {imported.__name__} import {name}", {})
            except ImportError as error:
                if not re.search(r"\n  fix:   (?!dir\()", str(error)):
                    unanswered.add(f"{own_path}.{name}")
    assert unanswered == WITHOUT_A_FIX
