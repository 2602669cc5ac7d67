"""Lightning's module paths, where each name is defined here, and the names that are missing."""

from __future__ import annotations

from typing import Final

from trainer_kit.compat.lightning_arguments import ARGUMENTS

__all__ = ["ARGUMENTS", "ELSEWHERE", "LIBRARY", "PATHS"]

LIBRARY: Final = "Lightning"


def _locate(module: str, *names: str, **renamed: str) -> dict[str, str]:
    """The names that one module defines; keywords map Lightning's name to a different name there."""
    locations = {name: f"{module}:{name}" for name in names}
    for lightning_name, name in renamed.items():
        locations[lightning_name] = f"{module}:{name}"
    return locations


def _utilities(*names: str, **renamed: str) -> dict[str, str]:
    return _locate("compat.lightning_utilities", *names, **renamed)


_MODULE = _locate("core.module", LightningModule="TrainModule")
_DATA_MODULE = _locate("core.datamodule", LightningDataModule="DataModule")
_CALLBACK = _locate("core.hooks", "Callback")
_SEED = _locate("core.seed", "reset_seed", "seed_everything")
_STATES = _locate(
    "core.states", "RunningStage", "TrainerFn", "TrainerState", "TrainerStatus"
)
_LOADER = _locate("data", "CombinedLoader")
_MOVE = _locate("core.tensors", move_data_to_device="move_to_device")
_PRECISIONS = {
    **_locate("precision.native", "MixedPrecision"),
    **_locate("precision.precision", "Precision"),
    **_locate("precision.bitsandbytes", "BitsandbytesPrecision"),
    **_locate("precision.transformer_engine", "TransformerEnginePrecision"),
}
_PROFILERS = _locate(
    "callbacks.profilers", "AdvancedProfiler", "PyTorchProfiler", "SimpleProfiler"
)
_RANK_ZERO = _utilities(
    "LightningDeprecationWarning",
    "WarningCache",
    "rank_prefixed_message",
    "rank_zero_debug",
    "rank_zero_deprecation",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
)
_SUMMARY = _locate(
    "callbacks.model_summary",
    "summarize",
    LayerSummary="SummaryRow",
    ModelSummary="summarize",
)
_TYPES = {
    **_utilities(
        "DistributedDataParallel",
        "EVAL_DATALOADERS",
        "LRSchedulerConfigType",
        "LRSchedulerPLType",
        "LRSchedulerType",
        "LRSchedulerTypeTuple",
        "LRSchedulerTypeUnion",
        "OptimizerLRScheduler",
        "STEP_OUTPUT",
        "TRAIN_DATALOADERS",
        "_EVALUATE_OUTPUT",
        "_MAP_LOCATION_TYPE",
        "_METRIC",
        "_PATH",
        "_PREDICT_OUTPUT",
        OptimizerConfig="LRSchedulerConfigType",
        OptimizerLRSchedulerConfig="LRSchedulerConfigType",
    ),
    **_locate("step.optimizers", "LRSchedulerConfig"),
}
_UTILITIES = {
    **_LOADER,
    **_MOVE,
    **_RANK_ZERO,
    **_utilities(
        "AttributeDict",
        "FLOAT16_EPSILON",
        "FLOAT32_EPSILON",
        "FLOAT64_EPSILON",
        "GradClipAlgorithmType",
        "LightningEnum",
        "grad_norm",
    ),
}
_ACCELERATORS = _locate(
    "compat.accelerators",
    "CPUAccelerator",
    "CUDAAccelerator",
    "MPSAccelerator",
    "XLAAccelerator",
    "find_usable_cuda_devices",
    ACCELERATOR_REGISTRY="ACCELERATORS",
    Accelerator="LightningAccelerator",
    AcceleratorRegistry="ACCELERATORS",
)
_CHECKPOINT_IOS = _locate("compat.checkpoint_io", "CheckpointIO", "TorchCheckpointIO")
_PARSING = _locate(
    "compat.lightning_parsing",
    "clean_namespace",
    "collect_init_args",
    "get_init_args",
    "is_picklable",
    "parse_class_init_keys",
)
_REGISTRY = _locate(
    "build", STRATEGY_REGISTRY="STRATEGY_REGISTRY", StrategyRegistry="STRATEGY_REGISTRY"
)
_TQDM = _locate("compat.lightning_tqdm", "Tqdm")
_ZERO = _locate("compat.fabric_names", "convert_zero_checkpoint_to_fp32_state_dict")
_WORDS = _locate(
    "compat.lightning_demos", "LightningTransformer", "Transformer", "WikiText2"
)
_DEMOS = _locate(
    "compat.lightning_demos", "BoringDataModule", "BoringModel", "DemoModel"
)
_SERVED = _locate("compat.lightning_serve", "ServableModule", "ServableModuleValidator")

PATHS: Final[dict[str, dict[str, str]]] = {
    "": _utilities("cli_lightning_logo"),
    "accelerators": _ACCELERATORS,
    **{
        f"accelerators.{name}": _ACCELERATORS
        for name in ("accelerator", "cpu", "cuda", "mps", "xla")
    },
    "callbacks.base": _CALLBACK,
    "callbacks.batch_size_finder": _locate("callbacks.tuning", "BatchSizeFinder"),
    "callbacks.callback": _CALLBACK,
    "callbacks.device_stats_monitor": _locate(
        "callbacks.monitors", "DeviceStatsMonitor"
    ),
    "callbacks.gradient_accumulation_scheduler": _locate(
        "callbacks.gradient_accumulation", "GradientAccumulationScheduler"
    ),
    "callbacks.lambda_function": _locate("callbacks.lambda_callback", "LambdaCallback"),
    "callbacks.lr_finder": _locate("callbacks.tuning", "LearningRateFinder"),
    "callbacks.lr_monitor": _locate("callbacks.monitors", "LearningRateMonitor"),
    "callbacks.on_exception_checkpoint": _locate(
        "callbacks.leaving", "OnExceptionCheckpoint"
    ),
    "callbacks.progress": {
        **_locate("callbacks.progress_bar", "ProgressBar", "TQDMProgressBar"),
        **_TQDM,
        **_locate("callbacks.rich_displays", "RichProgressBar"),
    },
    "callbacks.progress.base": _locate("callbacks.progress_bar", "ProgressBar"),
    "callbacks.progress.progress_bar": _locate("callbacks.progress_bar", "ProgressBar"),
    "callbacks.progress.rich_progress": _locate(
        "callbacks.rich_displays", "RichProgressBar", "RichProgressBarTheme"
    ),
    "callbacks.progress.tqdm_progress": _locate(
        "callbacks.progress_bar", "TQDMProgressBar"
    )
    | _TQDM,
    "callbacks.rich_model_summary": _locate(
        "callbacks.rich_displays", "RichModelSummary"
    ),
    "callbacks.spike": _locate("callbacks.bad_steps", "SpikeDetection"),
    "callbacks.stochastic_weight_avg": _locate(
        "callbacks.weight_averaging", "StochasticWeightAveraging"
    ),
    "callbacks.throughput_monitor": _locate("callbacks.monitors", "ThroughputMonitor"),
    "cli": {
        "__call__": "commands.cli:cli",
        **_locate("commands.cli", "SaveConfigCallback"),
        **_locate(
            "commands.lightning_cli",
            "ArgsType",
            "LightningArgumentParser",
            "LightningCLI",
            "instantiate_class",
        ),
        **_utilities(
            "LRSchedulerCallable",
            "LRSchedulerTypeTuple",
            "LRSchedulerTypeUnion",
            "OptimizerCallable",
        ),
        **_locate("commands._plateau", "ReduceLROnPlateau"),
    },
    "core": {**_MODULE, **_DATA_MODULE},
    "core.datamodule": _DATA_MODULE,
    "core.hooks": _locate("core.hooks", ModelHooks="ModuleHooks"),
    "core.lightning": _MODULE,
    "core.mixins": _locate("core.hparams", HyperparametersMixin="HParamsMixin"),
    "core.mixins.hparams_mixin": _locate(
        "core.hparams", HyperparametersMixin="HParamsMixin"
    ),
    "core.module": _MODULE,
    "core.optimizer": _locate("step.optimizers", LightningOptimizer="OptimizerProxy"),
    "demos": _DEMOS | _WORDS,
    "demos.boring_classes": {
        **_DEMOS,
        **_locate(
            "compat.lightning_demos",
            "ManualOptimBoringModel",
            "RandomDataset",
            "RandomDictDataset",
            "RandomIterableDataset",
            "RandomIterableDatasetWithLen",
        ),
    },
    "demos.mnist_datamodule": _locate(
        "compat.lightning_demos", "MNIST", "MNISTDataModule"
    ),
    "demos.transformer": _WORDS,
    "loggers.base": _utilities("rank_zero_experiment")
    | _locate("core.protocols", "Logger", LightningLoggerBase="Logger"),
    "loggers.logger": {
        **_locate("core.protocols", "Logger"),
        **_locate("loggers.layout", "DummyLogger"),
        **_utilities("rank_zero_experiment"),
    },
    "plugins": _PRECISIONS | _CHECKPOINT_IOS,
    **{
        f"plugins.io{name}": _CHECKPOINT_IOS
        for name in ("", ".checkpoint_plugin", ".torch_plugin")
    },
    "plugins.precision": _PRECISIONS,
    "plugins.precision.amp": _locate("precision.native", "MixedPrecision"),
    "plugins.precision.bitsandbytes": _locate(
        "precision.bitsandbytes", "BitsandbytesPrecision"
    ),
    "plugins.precision.precision": _locate("precision.precision", "Precision"),
    "plugins.precision.transformer_engine": _locate(
        "precision.transformer_engine", "TransformerEnginePrecision"
    ),
    "profiler": _PROFILERS,
    "profilers": _PROFILERS,
    "profilers.advanced": _locate("callbacks.profilers", "AdvancedProfiler"),
    "profilers.pytorch": _locate("callbacks.profilers", "PyTorchProfiler"),
    "profilers.simple": _locate("callbacks.profilers", "SimpleProfiler"),
    "serve": _SERVED,
    "serve.servable_module": _locate("compat.lightning_serve", "ServableModule"),
    "serve.servable_module_validator": _locate(
        "compat.lightning_serve", "ServableModuleValidator"
    ),
    "strategies": _utilities("ParallelStrategy") | _REGISTRY,
    "strategies.parallel": _utilities("ParallelStrategy"),
    "strategies.model_parallel": _locate(
        "strategies.model_parallel", "ModelParallelStrategy"
    ),
    "strategies.single_device": _locate("strategies.single", "SingleDeviceStrategy"),
    "trainer": {**_SEED, **_STATES},
    "trainer.states": _STATES,
    "trainer.supporters": _LOADER,
    "trainer.trainer": _locate("trainer", "Trainer"),
    "tuner.lr_finder": _locate("tuner.learning_rate", "lr_find"),
    "tuner.tuning": _locate("tuner", "Tuner"),
    "utilities": _UTILITIES,
    "utilities.apply_func": _MOVE | _utilities("apply_to_collection"),
    "utilities.cloud_io": _utilities("get_filesystem"),
    "utilities.combined_loader": _LOADER,
    "utilities.data": _utilities(
        "AttributeDict",
        "PossibleUserWarning",
        "extract_batch_size",
        "has_iterable_dataset",
    ),
    "utilities.distributed": _RANK_ZERO,
    "utilities.enums": _utilities("GradClipAlgorithmType", "LightningEnum"),
    "utilities.exceptions": _utilities("MisconfigurationException"),
    "utilities.grads": _utilities("grad_norm"),
    "utilities.imports": _utilities("_RICH_AVAILABLE", "_TORCHVISION_AVAILABLE"),
    "utilities.memory": {
        **_locate("accelerator.batch_size", garbage_collection_cuda="release_memory"),
        **_utilities("is_oom_error"),
    },
    "utilities.model_helpers": _utilities("get_torchvision_model", "is_overridden"),
    "utilities.model_summary": _SUMMARY,
    "utilities.model_summary.model_summary": _SUMMARY,
    "utilities.deepspeed": _ZERO,
    "utilities.parsing": _utilities("AttributeDict") | _PARSING,
    "utilities.rank_zero": _RANK_ZERO,
    "utilities.seed": _SEED | _utilities("isolate_rng"),
    "utilities.types": _TYPES,
    "utilities.warnings": _RANK_ZERO | _utilities("PossibleUserWarning"),
}
"""By module path, its names and where they are defined; an existing module has priority."""

_FABRIC = (
    "apply_func",
    "cloud_io",
    "data",
    "distributed",
    "exceptions",
    "rank_zero",
    "seed",
    "types",
    "warnings",
)
# Fabric has modules of the same names below its own package.
PATHS.update(
    {f"fabric.utilities.{path}": PATHS[f"utilities.{path}"] for path in _FABRIC}
)
_FABRIC_CLASS = _locate("accelerator.fabric", "Fabric")
PATHS.update(
    {"fabric.utilities": _UTILITIES, "fabric.plugins": _PRECISIONS | _CHECKPOINT_IOS}
)
PATHS.update({"fabric": {**_FABRIC_CLASS, **_SEED}, "fabric.fabric": _FABRIC_CLASS})
PATHS["fabric.utilities.cloud_io"] = PATHS["utilities.cloud_io"] | _locate(
    "compat.fabric_names", _load="load_file"
)
PATHS["fabric.utilities.data"] = {
    **PATHS["utilities.data"],
    **_locate(
        "compat.fabric_names", "has_len", "sized_len", "suggested_max_num_workers"
    ),
}
PATHS["fabric.utilities.distributed"] = {
    **_RANK_ZERO,
    **_locate(
        "compat.fabric_names", _distributed_is_initialized="distributed_is_initialized"
    ),
}
_FABRIC_STRATEGIES = {
    **_REGISTRY,
    **_locate("strategies", "DeepSpeedStrategy"),
    **_locate("strategies.ddp", "DDPStrategy"),
    **_locate("strategies.fsdp", "FSDPStrategy"),
    **_locate("strategies.single", "SingleDeviceStrategy"),
    **_locate("strategies.strategy", "Strategy"),
    **_utilities("ParallelStrategy", ModelParallelStrategy="fabric_model_parallel"),
}
PATHS.update(
    {
        "fabric.loggers": {
            **_locate("core.protocols", "Logger"),
            **_utilities(
                CSVLogger="fabric_csv_logger",
                TensorBoardLogger="fabric_tensorboard_logger",
            ),
        },
        "fabric.loggers.csv_logs": _utilities(CSVLogger="fabric_csv_logger"),
        "fabric.loggers.logger": _locate("core.protocols", "Logger")
        | _utilities("rank_zero_experiment"),
        "fabric.loggers.tensorboard": _utilities(
            TensorBoardLogger="fabric_tensorboard_logger"
        ),
        **{
            f"fabric.{path}": PATHS[path]
            for path in PATHS
            if path.startswith(("accelerators", "plugins."))
        },
        "fabric.accelerators.registry": _ACCELERATORS,
        "fabric.plugins.io.checkpoint_io": _CHECKPOINT_IOS,
        "fabric.plugins.io.torch_io": _CHECKPOINT_IOS,
        "fabric.strategies.deepspeed": _locate("strategies", "DeepSpeedStrategy"),
        "fabric.strategies.registry": _REGISTRY,
        "fabric.utilities.enums": PATHS["utilities.enums"],
        "fabric.utilities.init": _locate(
            "compat.fabric_names", _materialize_meta_tensors="materialize_meta_tensors"
        ),
        "fabric.utilities.load": _locate("compat.fabric_names", _lazy_load="lazy_load"),
        "fabric.utilities.throughput": _locate(
            "compat.throughput",
            "Throughput",
            "ThroughputMonitor",
            "get_available_flops",
            "measure_flops",
        ),
        "fabric.utilities.imports": _utilities("_IS_WINDOWS"),
        "fabric.strategies": _FABRIC_STRATEGIES,
        "fabric.strategies.ddp": _locate("strategies.ddp", "DDPStrategy"),
        "fabric.strategies.fsdp": _locate("strategies.fsdp", "FSDPStrategy"),
        "fabric.strategies.model_parallel": _utilities(
            ModelParallelStrategy="fabric_model_parallel"
        ),
        "fabric.strategies.parallel": _utilities("ParallelStrategy"),
        "fabric.strategies.single_device": _locate(
            "strategies.single", "SingleDeviceStrategy"
        ),
        "fabric.strategies.strategy": _locate("strategies.strategy", "Strategy"),
        "fabric.wrappers": {
            **_locate(
                "accelerator.fabric_module",
                "is_wrapped",
                _FabricModule="FabricModule",
                _unwrap_objects="unwrap_objects",
            ),
        },
    }
)
_GROUPS = _locate("compat.torch_collective", "CollectibleGroup")
PATHS["fabric.utilities.types"] = {
    **_TYPES,
    **_utilities(LRScheduler="LRScheduler", Optimizable="Optimizer"),
    **_GROUPS,
    **_locate("compat.torch_collective", "RedOpType", "ReduceOp"),
}
_COLLECTIVES = _locate("compat.torch_collective", "Collective", "TorchCollective")
PATHS["fabric.plugins.collectives"] = _COLLECTIVES
PATHS["fabric.plugins.collectives.collective"] = PATHS[
    "fabric.plugins.collectives.torch_collective"
] = {
    **_COLLECTIVES,
    **_GROUPS,
}
_ENVIRONMENTS = (
    "",
    ".cluster_environment",
    ".kubeflow",
    ".lightning",
    ".lsf",
    ".mpi",
    ".slurm",
    ".torchelastic",
    ".xla",
)
# Modules with no name that exists here: importing one works, and each name in it says what to use instead.
_ONLY_ELSEWHERE = (
    *("fabric.utilities.device_parser", "fabric.utilities.registry"),
    "callbacks.checkpoint",
    "core.saving",
    "loggers.neptune",
    *("plugins.io.async_plugin", "plugins.io.wrapper", "plugins.io.xla_plugin"),
    "plugins.layer_sync",
    "plugins.precision.deepspeed",
    "plugins.precision.double",
    "plugins.precision.fsdp",
    "plugins.precision.half",
    "plugins.precision.xla",
    "profilers.base",
    "profilers.profiler",
    "profilers.xla",
    "strategies.single_xla",
    "utilities.argparse",
    "utilities.cli",
    "utilities.compile",
    "utilities.parameter_tying",
    "utilities.signature_utils",
    *(
        f"fabric.plugins.precision.{name}"
        for name in ("deepspeed", "double", "fsdp", "half", "utils", "xla")
    ),
    *(
        "fabric.plugins.io.xla",
        "fabric.strategies.dp",
        "fabric.strategies.single_xla",
        "fabric.strategies.xla",
    ),
    "fabric.strategies.xla_fsdp",
    *(f"plugins.environments{name}" for name in _ENVIRONMENTS),
    *(f"fabric.plugins.environments{name}" for name in _ENVIRONMENTS),
)
PATHS.update({path: {} for path in _ONLY_ELSEWHERE})

_CHECKPOINT_IO = "leave it out: checkpoints are directories written in the background; Trainer(async_save=False) waits"
_ENVIRONMENT = (
    "leave it out: torchrun, SLURM and MPI are found by their variables; "
    "trainer_kit.core.environment reads them"
)
_HARDWARE = 'Trainer(accelerator="cpu"), "gpu" or what torch calls the device; trainer.strategy.device is its device'
_LOOP = "this library has no loop objects; Trainer arguments and callback hooks change what the loop does"
_COLUMNS = "RichProgressBar(theme=RichProgressBarTheme(...)); for other columns subclass ProgressBar"
_COPY = "copy it into your project: it needs nothing else of Lightning"
_NOT_NEEDED = "leave it out, or copy it into your project: nothing here needs it"

# Found by the name alone, at whichever path it is imported.
ELSEWHERE: Final[dict[str, str]] = {
    "AbstractClosure": _LOOP,
    "AsyncCheckpointIO": _CHECKPOINT_IO,
    "BatchesProcessedColumn": _COLUMNS,
    "BoringDataModuleNoLen": "a DataModule over RandomIterableDataset",
    "Checkpoint": "subclass Callback",
    "CheckpointHooks": "TrainModule and DataModule have its hooks: on_save_checkpoint, on_load_checkpoint",
    "ClusterEnvironment": _ENVIRONMENT,
    "CustomBarColumn": _COLUMNS,
    "CustomInfiniteTask": _COLUMNS,
    "CustomProgress": _COLUMNS,
    "CustomTimeColumn": _COLUMNS,
    "DDPFullyShardedNativeStrategy": 'trainer_kit.strategies.FSDPStrategy, or Trainer(strategy="fsdp")',
    "DDPFullyShardedStrategy": 'trainer_kit.strategies.FSDPStrategy, or Trainer(strategy="fsdp")',
    "DDPPlugin": 'trainer_kit.strategies.DDPStrategy(find_unused_parameters=...), or Trainer(strategy="ddp")',
    "DDPShardedPlugin": 'Trainer(strategy="fsdp")',
    "DDPShardedStrategy": 'Trainer(strategy="fsdp")',
    "DDPSpawnPlugin": 'Trainer(strategy="ddp"): it starts the processes',
    "DDPSpawnStrategy": 'Trainer(strategy="ddp"): it starts the processes',
    "DataParallelStrategy": 'Trainer(strategy="ddp"): one process for each device',
    "DeepSpeedLayerSummary": "ModelSummary: it counts parameters that are sharded over processes",
    "DeepSpeedPrecision": 'Trainer(strategy="deepspeed_stage_2", precision="bf16-mixed")',
    "DeepSpeedSummary": "ModelSummary: it counts parameters that are sharded over processes",
    "Dictionary": _COPY,
    "DistributedSamplerWrapper": "leave it out: loaders are divided among processes whatever their sampler is",
    "DoublePrecision": 'Trainer(precision="64-true")',
    "EPOCH_OUTPUT": "list[STEP_OUTPUT]; on_validation_epoch_end has no outputs: keep them in a list on self",
    "FSDPPrecision": 'Trainer(strategy="fsdp", precision="bf16-mixed")',
    "GPUAccelerator": _HARDWARE,
    "GPUStatsMonitor": "from trainer_kit.callbacks import DeviceStatsMonitor",
    "HalfPrecision": 'Trainer(precision="bf16-true") or "16-true"',
    "KubeflowEnvironment": _ENVIRONMENT,
    "LIGHTNING_LOGO": _NOT_NEEDED,
    "LSFEnvironment": _ENVIRONMENT,
    "LayerSync": "Trainer(sync_batchnorm=True)",
    "LightningDoublePrecisionModule": 'Trainer(precision="64-true")',
    "LightningEnvironment": _ENVIRONMENT,
    "LightningLSTM": "examples/lm.py has a language model",
    "LightningLite": "trainer_kit.Fabric: setup, backward and your own loop",
    "LitLogger": "WandbLogger, MLFlowLogger or CometLogger; or an object with log_metrics(metrics, step)",
    "LoggerCollection": "trainer.loggers is the list of loggers",
    "Loop": _LOOP,
    "MODEL_REGISTRY": "leave it out: trainer_kit.cli finds subclasses by their class_path",
    "MODULE_OPTIMIZERS": "torch.optim.Optimizer | list[torch.optim.Optimizer]",
    "MPIEnvironment": _ENVIRONMENT,
    "MetricsTextColumn": _COLUMNS,
    "NativeMixedPrecisionPlugin": "trainer_kit.precision.MixedPrecision",
    "NeptuneLogger": "Neptune ended its service in 2026; use another logger, such as MLFlowLogger",
    "PassThroughProfiler": "leave it out: a Trainer without a profiler measures nothing",
    "PositionalEncoding": _COPY,
    "ProcessGroup": "torch.distributed.ProcessGroup",
    "ProcessingSpeedColumn": _COLUMNS,
    "Profiler": "subclass Callback: wrap_hook sees every hook; SimpleProfiler and AdvancedProfiler are such callbacks",
    "ProgressBarBase": "from trainer_kit.callbacks import ProgressBar",
    "RegisterRecordFunction": "torch.profiler.record_function names a part of your own code",
    "SIGTERMException": "SystemExit: SIGTERM saves a checkpoint and ends the process with exit code 143",
    "SLURMEnvironment": _ENVIRONMENT,
    "ScheduleWrapper": "torch.profiler.schedule",
    "SequenceSampler": _COPY,
    "SimpleLSTM": "examples/lm.py has a language model",
    "SingleDeviceCollective": "leave it out: TorchCollective works on one process, too",
    "SingleDeviceXLAStrategy": "trainer_kit.strategies.XLAStrategy",
    "SingleTPUStrategy": "trainer_kit.strategies.XLAStrategy",
    "Steppable": "torch.optim.Optimizer",
    "TPUAccelerator": _HARDWARE,
    "TestTubeLogger": "trainer_kit.loggers.CSVLogger or TensorBoardLogger",
    "TorchElasticEnvironment": _ENVIRONMENT,
    "TorchSyncBatchNorm": "Trainer(sync_batchnorm=True)",
    "TrainingSpikeException": "TrainerKitError, which SpikeDetection raises",
    "UnrepeatedDistributedSampler": "leave it out: each sample counts once, on any number of processes",
    "XLACheckpointIO": _CHECKPOINT_IO,
    "XLAEnvironment": _ENVIRONMENT,
    "XLAFSDPStrategy": "trainer_kit.strategies.XLAStrategy(shard_parameters=True)",
    "XLAPrecision": 'Trainer(strategy="xla", precision="bf16-true")',
    "XLAProfiler": "torch_xla.debug.profiler",
    "XLAStatsMonitor": "from trainer_kit.callbacks import DeviceStatsMonitor",
    "auto_move_data": "self.transfer_batch_to_device(batch, self.device, 0) in forward, or trainer.predict",
    "batch_size_scaling": "from trainer_kit.tuner import scale_batch_size",
    "call_register_accelerators": _NOT_NEEDED,
    "configuration_validator": _NOT_NEEDED,
    "connectors": "attributes of the Trainer: strategy, precision_plugin, accelerator, loggers, callback_metrics",
    "consolidate_checkpoint": "trainer-kit checkpoint export: a checkpoint has the whole weights",
    "convert_inf": _COPY,
    "convert_tensors_to_scalars": "utilities.apply_func.apply_to_collection(values, torch.Tensor, torch.Tensor.item)",
    "convert_to_tensors": "utilities.apply_func.apply_to_collection(values, (bool, int, float), torch.tensor)",
    "core.saving.convert": "ast.literal_eval",
    "deepspeed_param_size": "parameter.ds_numel",
    "demos.boring_classes.Net": _COPY,
    "demos.lstm": "examples/lm.py has a language model",
    "demos.transformer.tokenize": _COPY,
    "device_dtype_mixin": "next(module.parameters()).device and .dtype",
    "disable_possible_user_warnings": "leave it out: this library issues no such warning",
    "do_nothing_closure": "lambda: None",
    "ds_checkpoint_dir": "convert_zero_checkpoint_to_fp32_state_dict(directory, file) finds it",
    "fabric.connector": "attributes of Fabric: strategy, device, world_size, global_rank",
    "fabric.plugins.collectives.single_device": "leave it out: TorchCollective works on one process, too",
    "fabric.utilities.logger": _COPY,
    "fabric.utilities.spike": "from trainer_kit.callbacks import SpikeDetection",
    "fabric.utilities.testing": "pytest.mark.skipif(not torch.cuda.is_available(), reason=...)",
    "find_free_network_port": "leave it out: a free port is chosen where processes are started",
    "find_shared_parameters": "leave it out: tied weights stay tied on every device",
    "from_compiled": "Trainer(compile=True) compiles training_step and does not change the module",
    "get_cpu_stats": "callbacks=[DeviceStatsMonitor()], or the package psutil",
    "get_device_stats": "callbacks=[DeviceStatsMonitor()]",
    "get_formatted_model_size": "trainer_kit.callbacks.model_summary.summarize(module).megabytes",
    "get_human_readable_count": 'f"{count:,}"',
    "get_nvidia_gpu_stats": "callbacks=[DeviceStatsMonitor()], or torch.cuda.memory_stats()",
    "get_standard_metrics": "ProgressBar.get_metrics(trainer, module)",
    "has_len_all_ranks": "fabric.utilities.data.has_len: ranks may have different lengths",
    "is_cuda_out_of_memory": "utilities.memory.is_oom_error",
    "is_cudnn_snafu": "utilities.memory.is_oom_error",
    "is_out_of_cpu_memory": "utilities.memory.is_oom_error",
    "is_param_in_hook_signature": "inspect.signature(hook).parameters",
    "is_shared_filesystem": "leave it out: every rank reads a checkpoint from its path",
    "launchers": "Trainer(devices=2) starts processes, torchrun or trainer-kit launch do too",
    "lightning_getattr": "getattr(module, name), or module.hparams[name]",
    "lightning_hasattr": "hasattr(module, name), or name in module.hparams",
    "lightning_setattr": "setattr(module, name, value), or module.hparams[name] = value",
    "lite": "trainer_kit.Fabric: setup, backward and your own loop",
    "load_hparams_from_tags_csv": "csv.DictReader",
    "load_hparams_from_yaml": "yaml.safe_load",
    "loggers.utilities": "upload checkpoints in a callback or a logger's after_save_checkpoint",
    "loops": _LOOP,
    "merge_dicts": _NOT_NEEDED,
    "metrics": "the package torchmetrics",
    "model_summary_deepspeed": "ModelSummary: it counts parameters that are sharded over processes",
    "module_available": "importlib.util.find_spec(name) is not None",
    "overrides": "leave it out: each sample counts once, on any number of processes",
    "parse_batch_shape": "tuple(batch.shape)",
    "pl_worker_init_function": "leave it out: loader workers are always seeded from seed and epoch",
    "recursive_detach": "utilities.apply_func.apply_to_collection(values, torch.Tensor, torch.Tensor.detach)",
    "remove_module_hooks": _NOT_NEEDED,
    "save_hparams_to_tags_csv": "yaml.safe_dump(dict(module.hparams))",
    "save_hparams_to_yaml": "yaml.safe_dump(dict(module.hparams))",
    "set_shared_parameters": "leave it out: tied weights stay tied on every device",
    "to_uncompiled": "Trainer(compile=True) compiles training_step and does not change the module",
    "trainer.call": "leave it out: the Trainer calls the hooks; Fabric.call(name) does in a custom loop",
    "trainer.setup": _NOT_NEEDED,
    "update_hparams": "module.hparams.update(values)",
    "utilities.migration": "load_from_checkpoint reads the weights of a .ckpt file of any version",
    "utilities.model_registry": "upload checkpoints in a callback or a logger's after_save_checkpoint",
    "utilities.parsing.save_hyperparameters": "self.save_hyperparameters() in __init__",
    "utilities.testing": "pytest.mark.skipif(not torch.cuda.is_available(), reason=...)",
    "utilities.upgrade_checkpoint": "load_from_checkpoint reads the weights of a .ckpt file of any version",
    "warning_cache": "trainer_kit.utilities.rank_zero.WarningCache()",
}
"""Missing names and paths, with what to use; ``path.name`` for a name that is missing only at that path."""
