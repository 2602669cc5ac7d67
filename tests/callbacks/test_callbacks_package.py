import ast
import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning_utilities.core.overrides import is_overridden
from trainer_kit.demos.boring_classes import BoringModel

import trainer_kit as tk
import trainer_kit.callbacks as callbacks
from trainer_kit.core.hooks import Callback
from trainer_kit.core.protocols import TrainerLike


def test_every_name_is_a_callback():
    assert callbacks.__all__ == sorted(callbacks.__all__) == sorted(dir(callbacks))
    for name in callbacks.__all__:
        assert issubclass(getattr(callbacks, name), Callback)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = callbacks.Nothing


@pytest.mark.parametrize(
    ("looks", "rests"),
    [
        (callbacks.ModelCheckpoint(every_n_train_steps=2), callbacks.ModelCheckpoint()),
        (
            callbacks.ModelCheckpoint(every_n_epochs="2ba"),
            callbacks.ModelCheckpoint(every_n_epochs=2),
        ),
        (callbacks.GradientAccumulation("8sp"), callbacks.GradientAccumulation(8)),
        (callbacks.LearningRateMonitor(), callbacks.LearningRateMonitor("epoch")),
        (callbacks.Timer("2h"), callbacks.Timer("2h", interval="epoch")),
        (callbacks.Timer("2h"), callbacks.Timer()),
    ],
)
def test_a_step_calls_only_the_callbacks_that_override_its_hooks(looks, rests):
    assert is_overridden("on_train_step_end", looks, Callback)
    assert not is_overridden("on_train_step_end", rests, Callback)
    assert not is_overridden("on_train_step_end", copy.deepcopy(rests), Callback)


ARGUMENTS = {
    "FunctionCallback": ("on_train_end", print),
    "GradientAccumulation": (1,),
    "GradientAccumulationScheduler": ({0: 1},),
    "LayerWiseUnfreezing": (["layer"],),
    "ModelPruning": ("l1_unstructured",),
    "OnExceptionCheckpoint": ("kept",),
    "PredictionWriter": ("written",),
    "Preemption": (["/nothing", "http://127.0.0.1:9/", "SIGUSR2"],),
    "EarlyStopping": ("loss",),
    "StochasticWeightAveraging": (0.1,),
}


@pytest.mark.parametrize("name", callbacks.__all__)
def test_a_trainer_with_any_callback_can_be_pickled(name):
    """Processes that are spawned receive the Trainer in this way."""
    callback = getattr(callbacks, name)(*ARGUMENTS.get(name, ()))
    trainer = tk.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=callback
    )
    again = pickle.loads(pickle.dumps(trainer))
    assert type(callback).__name__ in {type(one).__name__ for one in again.callbacks}


@pytest.mark.parametrize(
    "make",
    [
        lambda: callbacks.Preemption("/nothing", every=3.0),
        lambda: callbacks.EMAWeightAveraging(decay=0.5),
        lambda: callbacks.StochasticWeightAveraging(0.1, swa_epoch_start=1),
        lambda: callbacks.WeightAveraging(),
    ],
)
def test_a_callback_can_be_pickled_after_a_fit_and_trains_alike(make):
    def fit(callback):
        module = BoringModel()
        with torch.no_grad():
            module.layer.weight.fill_(0.5)
            module.layer.bias.zero_()
        data = [torch.full((2, 32), float(i)) for i in range(3)]
        trainer = tk.Trainer(
            accelerator="cpu", barebones=True, max_epochs=2, callbacks=callback
        )
        trainer.fit(module, data)
        return trainer, [value.tolist() for value in module.state_dict().values()]

    trainer, weights = fit(make())
    (again,) = pickle.loads(pickle.dumps(trainer)).callbacks
    assert getattr(again, "every", None) == getattr(trainer.callbacks[0], "every", None)
    assert getattr(again, "decay", None) == getattr(trainer.callbacks[0], "decay", None)
    assert fit(again)[1] == weights


@pytest.mark.slow
def test_importing_it_imports_no_callback_and_nothing_heavy():
    code = """if True:
        import sys, torch
        before = set(sys.modules)
        import trainer_kit.callbacks as room
        loaded = {name for name in sys.modules if name.startswith("trainer_kit.callbacks.")}
        assert not loaded, loaded
        for name in room.__all__:
            getattr(room, name)
        room.TQDMProgressBar(), room.RichProgressBar(), room.ModelSummary(), room.ModelCheckpoint()
        heavy = {"tqdm", "rich", "torch.utils.flop_counter", "tensorboard", "trainer_kit.checkpoint"}
        heavy &= set(sys.modules) - before
        assert not heavy, heavy
    """
    root = str(Path(callbacks.__file__).parents[2])
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": root},
    )


@pytest.mark.parametrize("name", ["Checkpoint"])
def test_a_missing_lightning_callback_names_its_replacement(name):
    with pytest.raises(
        ImportError,
        match=rf"(?s)'trainer_kit.callbacks' has no attribute '{name}'\n.*fix:   [A-Za-z]",
    ):
        exec(f"from trainer_kit.callbacks import {name}")
    with pytest.raises(
        ImportError,
        match=r"has no attribute 'NoSuchCallback'\n.*did you mean 'Callback'",
    ):
        exec("from trainer_kit.callbacks import NoSuchCallback")


def test_no_test_of_callbacks_builds_a_fake_trainer():
    """A fake Trainer hid that `ModelCheckpoint` deleted the best checkpoint: tests of callbacks run real fits."""
    members = {name for name in vars(TrainerLike) if not name.startswith("_")}
    found = []
    for path in sorted(Path(__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not any(
                ast.unparse(base).endswith("Trainer") for base in node.bases
            ):
                own = {
                    part.name for part in node.body if isinstance(part, ast.FunctionDef)
                }
                fake = len(own & members) > 1
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
                ("SimpleNamespace", "Mock")
            ):
                fake = any(keyword.arg in members for keyword in node.keywords)
            else:
                continue
            if fake:
                found.append(f"{path.name}:{node.lineno}")
    assert not found, found
