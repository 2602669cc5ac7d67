"""`tk.__all__` is sorted, complete and frozen; importing the package loads nothing heavy."""

from __future__ import annotations

import runpy
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import trainer_kit as tk
from trainer_kit.compat import accelerate_names, lightning_names
from trainer_kit.core.lazy import locate_names

STUBS = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "generate_stubs.py"))
PACKAGES = list(STUBS["packages"]())
NAMES = [
    "AORecipeKwargs",
    "Accelerator",
    "AutocastKwargs",
    "BnbQuantizationConfig",
    "Callback",
    "CheckpointError",
    "CombinedLoader",
    "ConfigurationError",
    "ContextPlan",
    "DDPCommunicationHookType",
    "DataError",
    "DataLoaderConfiguration",
    "DataModule",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DummyOptim",
    "DummyScheduler",
    "Duration",
    "DurationError",
    "Fabric",
    "FullyShardedDataParallelPlugin",
    "GeneralTracker",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "HookError",
    "InitProcessGroupKwargs",
    "LaunchError",
    "LightningCLI",
    "LightningDataModule",
    "LightningModule",
    "LocalSGD",
    "LogError",
    "LoggerType",
    "MSAMPRecipeKwargs",
    "MegatronLMPlugin",
    "MissingCheckpointError",
    "NonFiniteError",
    "ParallelPlan",
    "ParallelismConfig",
    "PartialState",
    "PipelinePlan",
    "PrecisionError",
    "ProfileKwargs",
    "Progress",
    "ProjectConfiguration",
    "RankError",
    "RegistryError",
    "StrategyError",
    "TERecipeKwargs",
    "TorchContextParallelConfig",
    "TorchDynamoPlugin",
    "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin",
    "TrainModule",
    "Trainer",
    "TrainerKitError",
    "broadcast",
    "broadcast_object_list",
    "callbacks",
    "checkpoint",
    "checkpoints",
    "cli",
    "compute_module_sizes",
    "cpu_offload",
    "cpu_offload_with_hook",
    "data",
    "debug_launcher",
    "disk_offload",
    "dispatch_model",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "get_balanced_memory",
    "get_logger",
    "get_max_memory",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_and_quantize_model",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "loggers",
    "notebook_launcher",
    "on_main_process",
    "optimizer",
    "pad_across_processes",
    "precision",
    "prepare_pippy",
    "reduce",
    "register_tracker_class",
    "release_memory",
    "seed_everything",
    "send_to_device",
    "set_seed",
    "skip_first_batches",
    "strategies",
    "synchronize_rng_states",
    "tuner",
    "verify_checkpoint",
]
HEAVY = [
    "asyncio",
    "numpy",
    "sklearn",
    "tensorboard",
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.utils.tensorboard",
    "torchmetrics",
    "tqdm",
    "wandb",
]


def loaded(code):
    """Which heavy modules are there after ``code``, in a process of its own."""
    listing = (
        f"{code}\nimport sys\nprint(*[name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", listing],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    return set(done.stdout.split())


def test_the_names_are_these():
    assert tk.__all__ == NAMES


def test_the_names_are_sorted_and_dir_lists_them():
    assert tk.__all__ == sorted(tk.__all__)
    assert dir(tk) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_there(name):
    assert getattr(tk, name) is not None


def test_nothing_public_is_missing_from_the_names():
    for name in NAMES:
        getattr(tk, name)
    rooms = {
        "accelerator",
        "build",
        "commands",
        "compat",
        "core",
        "hang",
        "health",
        "inference",
        "launch",
        "metrics",
        "migrate",
        "options",
        "planning",
        "report",
        "state",
        "step",
        "testing",
        "trainer",
        "training",
        "verify",
    }
    # A module that was found by another library's path becomes an attribute too.
    paths = {
        path.partition(".")[0]
        for path in (*accelerate_names.PATHS, *lightning_names.PATHS)
    }
    public = {name for name in vars(tk) if not name.startswith("_")} - {
        "annotations",
        "Final",
    }
    assert public - rooms - paths | set(NAMES) & paths == set(NAMES)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'Trainr'"):
        _ = tk.Trainr


@pytest.mark.parametrize("package", PACKAGES)
def test_everything_a_package_lists_is_there(package):
    """Each name is the object that its module defines, and is looked up once."""
    module = import_module(package)
    assert list(module.__all__) == sorted(module.__all__) == dir(module)
    for name, location in locate_names(module._HOMES).items():
        path, _, attribute = location.partition(":")
        # Another test may have imported a module of this name, which Lightning has: `trainer_kit.cli`.
        if path:
            vars(module).pop(name, None)
        value = getattr(module, name)
        assert vars(module)[name] is value is not None
        if path:
            assert value is getattr(import_module(f".{path}", package), attribute)


def test_the_rooms_of_the_public_names_have_tables():
    assert len(PACKAGES) == 13
    assert {
        f"trainer_kit.{room}" for room in ("callbacks", "loggers", "strategies")
    } <= set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_stub_of_a_package_is_current(package):
    """Type checkers and editors read the stub: it has the names of the table, and nothing else."""
    assert STUBS["stub_of"](package).read_text(encoding="utf-8") == STUBS["render"](
        package
    ), "the table of names changed: run `make docs`"


def test_importing_the_package_loads_nothing_heavy():
    assert loaded("import trainer_kit") == set()


def test_importing_the_trainer_loads_nothing_heavy_beyond_torch():
    of_torch = loaded("import torch")
    of_data = loaded("import torch, numpy, torch.utils.data")
    assert (
        loaded("from trainer_kit import Trainer, TrainModule, DataModule, Callback")
        <= of_torch | of_data
    )
