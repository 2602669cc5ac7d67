# Written by docs/generate_stubs.py from the table in __init__.py; edit that, then `make docs`.
from trainer_kit import (
    callbacks,
    checkpoint,
    data,
    loggers,
    precision,
    strategies,
    tuner,
)
from trainer_kit.accelerator.accelerator import Accelerator
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
from trainer_kit.accelerator.processes import (
    DistributedType,
    PartialState,
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    synchronize_rng_states,
)
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
from trainer_kit.core.lazy import NameLookup
from trainer_kit.core.module import TrainModule
from trainer_kit.core.module import TrainModule as LightningModule
from trainer_kit.core.parallel import ContextPlan, ParallelPlan, PipelinePlan
from trainer_kit.core.progress import Duration, Progress
from trainer_kit.core.seed import seed_everything
from trainer_kit.data.combined import CombinedLoader
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
from trainer_kit.options.deepspeed import DeepSpeedPlugin, DummyOptim, DummyScheduler
from trainer_kit.options.fp8 import AORecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
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

__version__: str
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

__getattr__: NameLookup
