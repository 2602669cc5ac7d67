"""A PyTorch trainer: structure where you want it, your own loop where you do not."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# With an underscore: a name imported here is an attribute of the package, and tests/test_public_names.py allows none
# beside those of `__all__`.
from trainer_kit.core.lazy import alias_package as _alias_package
from trainer_kit.core.lazy import find_names as _find_names
from trainer_kit.core.lazy import other_names as _other_names
from trainer_kit.core.registry import READERS as _READERS

# For editors and type checkers, which cannot follow `__getattr__` below.
if TYPE_CHECKING:
    from trainer_kit import (
        callbacks,
        checkpoint,
        data,
        loggers,
        precision,
        strategies,
        tuner,
    )
    from trainer_kit.accelerator import (
        Accelerator,
        PartialState,
        broadcast,
        broadcast_object_list,
        gather,
        gather_object,
        pad_across_processes,
        reduce,
        synchronize_rng_states,
    )
    from trainer_kit.accelerator.batch_size import (
        find_executable_batch_size,
        release_memory,
    )
    from trainer_kit.accelerator.fabric import Fabric
    from trainer_kit.accelerator.generators import set_seed
    from trainer_kit.accelerator.launchers import debug_launcher, notebook_launcher
    from trainer_kit.accelerator.loader import skip_first_batches
    from trainer_kit.accelerator.local_sgd import LocalSGD
    from trainer_kit.accelerator.logs import get_logger
    from trainer_kit.accelerator.processes import DistributedType
    from trainer_kit.accelerator.trackers import (
        GeneralTracker,
        LoggerType,
        on_main_process,
        register_tracker_class,
    )
    from trainer_kit.checkpoint.read import verify_checkpoint
    from trainer_kit.checkpoint.store import checkpoints
    from trainer_kit.commands.cli import cli
    from trainer_kit.commands.lightning_cli import LightningCLI
    from trainer_kit.compat.accelerate_utilities import send_to_device
    from trainer_kit.core.datamodule import DataModule
    from trainer_kit.core.datamodule import DataModule as LightningDataModule
    from trainer_kit.core.errors import (
        CheckpointError,
        ConfigurationError,
        DataError,
        DurationError,
        HookError,
        LaunchError,
        LogError,
        MissingCheckpointError,
        NonFiniteError,
        PrecisionError,
        RankError,
        RegistryError,
        StrategyError,
        TrainerKitError,
    )
    from trainer_kit.core.hooks import Callback
    from trainer_kit.core.module import TrainModule
    from trainer_kit.core.module import TrainModule as LightningModule
    from trainer_kit.core.parallel import ContextPlan, ParallelPlan, PipelinePlan
    from trainer_kit.core.progress import Duration, Progress
    from trainer_kit.core.seed import seed_everything
    from trainer_kit.data import CombinedLoader
    from trainer_kit.inference.device_map import (
        compute_module_sizes,
        get_balanced_memory,
        get_max_memory,
        infer_auto_device_map,
    )
    from trainer_kit.inference.dispatch import (
        cpu_offload,
        cpu_offload_with_hook,
        disk_offload,
        dispatch_model,
    )
    from trainer_kit.inference.loading import (
        init_empty_weights,
        init_on_device,
        load_checkpoint_and_dispatch,
        load_checkpoint_in_model,
    )
    from trainer_kit.inference.pipeline import prepare_pippy
    from trainer_kit.inference.quantization import (
        BnbQuantizationConfig,
        load_and_quantize_model,
    )
    from trainer_kit.options.deepspeed import (
        DeepSpeedPlugin,
        DummyOptim,
        DummyScheduler,
    )
    from trainer_kit.options.fp8 import (
        AORecipeKwargs,
        MSAMPRecipeKwargs,
        TERecipeKwargs,
    )
    from trainer_kit.options.megatron import MegatronLMPlugin
    from trainer_kit.options.parallelism import (
        ParallelismConfig,
        TorchContextParallelConfig,
        TorchTensorParallelConfig,
        TorchTensorParallelPlugin,
    )
    from trainer_kit.options.records import (
        AutocastKwargs,
        DataLoaderConfiguration,
        DDPCommunicationHookType,
        DistributedDataParallelKwargs,
        FullyShardedDataParallelPlugin,
        GradientAccumulationPlugin,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        ProfileKwargs,
        ProjectConfiguration,
        TorchDynamoPlugin,
    )
    from trainer_kit.precision.optimizers import make_optimizer as optimizer
    from trainer_kit.trainer import Trainer

__version__ = "0.2.0"
__all__ = [
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

_HOME = {
    "AORecipeKwargs": "options.fp8:AORecipeKwargs",
    "Accelerator": "accelerator:Accelerator",
    "AutocastKwargs": "options.records:AutocastKwargs",
    "BnbQuantizationConfig": "inference.quantization:BnbQuantizationConfig",
    "Callback": "core.hooks:Callback",
    "CheckpointError": "core.errors:CheckpointError",
    "CombinedLoader": "data:CombinedLoader",
    "ConfigurationError": "core.errors:ConfigurationError",
    "ContextPlan": "core.parallel:ContextPlan",
    "DataError": "core.errors:DataError",
    "DataLoaderConfiguration": "options.records:DataLoaderConfiguration",
    "DataModule": "core.datamodule:DataModule",
    "DeepSpeedPlugin": "options.deepspeed:DeepSpeedPlugin",
    "DDPCommunicationHookType": "options.records:DDPCommunicationHookType",
    "DistributedDataParallelKwargs": "options.records:DistributedDataParallelKwargs",
    "DistributedType": "accelerator.processes:DistributedType",
    "DummyOptim": "options.deepspeed:DummyOptim",
    "DummyScheduler": "options.deepspeed:DummyScheduler",
    "Duration": "core.progress:Duration",
    "DurationError": "core.errors:DurationError",
    "Fabric": "accelerator.fabric:Fabric",
    "FullyShardedDataParallelPlugin": "options.records:FullyShardedDataParallelPlugin",
    "GeneralTracker": "accelerator.trackers:GeneralTracker",
    "GradScalerKwargs": "options.records:GradScalerKwargs",
    "GradientAccumulationPlugin": "options.records:GradientAccumulationPlugin",
    "HookError": "core.errors:HookError",
    "InitProcessGroupKwargs": "options.records:InitProcessGroupKwargs",
    "LaunchError": "core.errors:LaunchError",
    "LightningCLI": "commands.lightning_cli:LightningCLI",
    "LightningDataModule": "core.datamodule:DataModule",
    "LightningModule": "core.module:TrainModule",
    "LocalSGD": "accelerator.local_sgd:LocalSGD",
    "LogError": "core.errors:LogError",
    "LoggerType": "accelerator.trackers:LoggerType",
    "MSAMPRecipeKwargs": "options.fp8:MSAMPRecipeKwargs",
    "MegatronLMPlugin": "options.megatron:MegatronLMPlugin",
    "MissingCheckpointError": "core.errors:MissingCheckpointError",
    "NonFiniteError": "core.errors:NonFiniteError",
    "ParallelPlan": "core.parallel:ParallelPlan",
    "ParallelismConfig": "options.parallelism:ParallelismConfig",
    "PartialState": "accelerator:PartialState",
    "PipelinePlan": "core.parallel:PipelinePlan",
    "PrecisionError": "core.errors:PrecisionError",
    "ProfileKwargs": "options.records:ProfileKwargs",
    "Progress": "core.progress:Progress",
    "ProjectConfiguration": "options.records:ProjectConfiguration",
    "RankError": "core.errors:RankError",
    "RegistryError": "core.errors:RegistryError",
    "StrategyError": "core.errors:StrategyError",
    "TERecipeKwargs": "options.fp8:TERecipeKwargs",
    "TorchContextParallelConfig": "options.parallelism:TorchContextParallelConfig",
    "TorchDynamoPlugin": "options.records:TorchDynamoPlugin",
    "TorchTensorParallelConfig": "options.parallelism:TorchTensorParallelConfig",
    "TorchTensorParallelPlugin": "options.parallelism:TorchTensorParallelPlugin",
    "TrainModule": "core.module:TrainModule",
    "Trainer": "trainer:Trainer",
    "TrainerKitError": "core.errors:TrainerKitError",
    "broadcast": "accelerator:broadcast",
    "broadcast_object_list": "accelerator:broadcast_object_list",
    "checkpoints": "checkpoint.store:checkpoints",
    "cli": "commands.cli:cli",
    "compute_module_sizes": "inference.device_map:compute_module_sizes",
    "cpu_offload": "inference.dispatch:cpu_offload",
    "cpu_offload_with_hook": "inference.dispatch:cpu_offload_with_hook",
    "debug_launcher": "accelerator.launchers:debug_launcher",
    "disk_offload": "inference.dispatch:disk_offload",
    "dispatch_model": "inference.dispatch:dispatch_model",
    "find_executable_batch_size": "accelerator.batch_size:find_executable_batch_size",
    "gather": "accelerator:gather",
    "gather_object": "accelerator:gather_object",
    "get_balanced_memory": "inference.device_map:get_balanced_memory",
    "get_logger": "accelerator.logs:get_logger",
    "get_max_memory": "inference.device_map:get_max_memory",
    "infer_auto_device_map": "inference.device_map:infer_auto_device_map",
    "init_empty_weights": "inference.loading:init_empty_weights",
    "init_on_device": "inference.loading:init_on_device",
    "load_and_quantize_model": "inference.quantization:load_and_quantize_model",
    "load_checkpoint_and_dispatch": "inference.loading:load_checkpoint_and_dispatch",
    "load_checkpoint_in_model": "inference.loading:load_checkpoint_in_model",
    "notebook_launcher": "accelerator.launchers:notebook_launcher",
    "on_main_process": "accelerator.trackers:on_main_process",
    "optimizer": "precision.optimizers:make_optimizer",
    "pad_across_processes": "accelerator:pad_across_processes",
    "prepare_pippy": "inference.pipeline:prepare_pippy",
    "reduce": "accelerator:reduce",
    "register_tracker_class": "accelerator.trackers:register_tracker_class",
    "release_memory": "accelerator.batch_size:release_memory",
    "seed_everything": "core.seed:seed_everything",
    "send_to_device": "compat.accelerate_utilities:send_to_device",
    "set_seed": "accelerator.generators:set_seed",
    "skip_first_batches": "accelerator.loader:skip_first_batches",
    "synchronize_rng_states": "accelerator:synchronize_rng_states",
    "verify_checkpoint": "checkpoint.read:verify_checkpoint",
}
# `TrainModule.load_from_checkpoint` is in core, which imports no room above it. Python imports this file before any
# module of the package, so the reader is known whichever module is imported first.
_READERS.supply("module", "trainer_kit.checkpoint.weights:read_module")
_find_names(
    __name__,
    ["compat.lightning_names", "compat.accelerate_names", "compat.transformers"],
    former="compat.former_paths",
)
# `lightning.pytorch` is a module of `lightning`.
_alias_package(f"{__name__}.pytorch", __name__)
_other = _other_names(__name__)
_ROOMS = (
    "callbacks",
    "checkpoint",
    "data",
    "loggers",
    "precision",
    "strategies",
    "tuner",
)


def __getattr__(name: str) -> Any:
    # Everything is found when it is first asked for: importing the package costs next to nothing.
    if name in _HOME:
        module, attribute = _HOME[name].split(":")
        value = getattr(importlib.import_module(f"trainer_kit.{module}"), attribute)
    elif name in _ROOMS:
        value = importlib.import_module(f"trainer_kit.{name}")
    else:
        return _other(name)
    # Python calls `__getattr__` for missing names only, so this call is the last one for this name.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
