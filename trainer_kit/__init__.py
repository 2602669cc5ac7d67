"""A PyTorch trainer: structure where you want it, your own loop where you do not."""

from __future__ import annotations

from typing import Final

# With an underscore: a name imported here is an attribute of the package, and tests/test_public_names.py allows none
# beside those of `__all__`.
from trainer_kit.core.lazy import alias_package as _alias_package
from trainer_kit.core.lazy import find_names as _find_names
from trainer_kit.core.lazy import lazy_names as _lazy_names
from trainer_kit.core.lazy import locate_names as _locate_names
from trainer_kit.core.registry import READERS as _READERS

__version__ = "0.2.0"
_HOMES: Final = {
    "": "callbacks checkpoint data loggers precision strategies tuner",
    "accelerator.accelerator": "Accelerator",
    "accelerator.batch_size": "find_executable_batch_size release_memory",
    "accelerator.fabric": "Fabric",
    "accelerator.generators": "set_seed",
    "accelerator.launchers": "debug_launcher notebook_launcher",
    "accelerator.loader": "skip_first_batches",
    "accelerator.local_sgd": "LocalSGD",
    "accelerator.logs": "get_logger",
    "accelerator.processes": (
        "DistributedType PartialState broadcast broadcast_object_list gather "
        "gather_object pad_across_processes reduce synchronize_rng_states"
    ),
    "accelerator.trackers": (
        "GeneralTracker LoggerType on_main_process register_tracker_class"
    ),
    "checkpoint.read": "verify_checkpoint",
    "checkpoint.store": "checkpoints",
    "commands.cli": "cli",
    "commands.lightning_cli": "LightningCLI",
    "compat.accelerate_utilities": "send_to_device",
    "core.datamodule": "DataModule LightningDataModule=DataModule",
    "core.errors": (
        "CheckpointError ConfigurationError DataError DurationError HookError "
        "LaunchError LogError MissingCheckpointError NonFiniteError PrecisionError "
        "RankError RegistryError StrategyError TrainerKitError"
    ),
    "core.hooks": "Callback",
    "core.module": "LightningModule=TrainModule TrainModule",
    "core.parallel": "ContextPlan ParallelPlan PipelinePlan",
    "core.progress": "Duration Progress",
    "core.seed": "seed_everything",
    "data.combined": "CombinedLoader",
    "inference.device_map": (
        "compute_module_sizes get_balanced_memory get_max_memory infer_auto_device_map"
    ),
    "inference.dispatch": (
        "cpu_offload cpu_offload_with_hook disk_offload dispatch_model"
    ),
    "inference.loading": (
        "init_empty_weights init_on_device load_checkpoint_and_dispatch "
        "load_checkpoint_in_model"
    ),
    "inference.pipeline": "prepare_pippy",
    "inference.quantization": "BnbQuantizationConfig load_and_quantize_model",
    "options.deepspeed": "DeepSpeedPlugin DummyOptim DummyScheduler",
    "options.fp8": "AORecipeKwargs MSAMPRecipeKwargs TERecipeKwargs",
    "options.megatron": "MegatronLMPlugin",
    "options.parallelism": (
        "ParallelismConfig TorchContextParallelConfig TorchTensorParallelConfig "
        "TorchTensorParallelPlugin"
    ),
    "options.records": (
        "AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration "
        "DistributedDataParallelKwargs FullyShardedDataParallelPlugin "
        "GradScalerKwargs GradientAccumulationPlugin InitProcessGroupKwargs "
        "ProfileKwargs ProjectConfiguration TorchDynamoPlugin"
    ),
    "precision.optimizers": "optimizer=make_optimizer",
    "trainer": "Trainer",
}
__all__ = sorted(_locate_names(_HOMES))
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
__getattr__, __dir__ = _lazy_names(__name__, _HOMES)
