"""Module paths of earlier versions of this library, and where each of their names is defined now."""

from __future__ import annotations

from typing import Final

from trainer_kit.core.lazy import locate_names

__all__ = ["PATHS"]


PATHS: Final = {
    "accelerator.parallel_ranks": locate_names(
        {"accelerator.processes": "ParallelRanks"}
    ),
    "callbacks.auto_micro_batch": locate_names(
        {"callbacks.repeated_steps": "AutoMicroBatch"}
    ),
    "callbacks.learning_rate_monitor": locate_names(
        {"callbacks.monitors": "LearningRateMonitor"}
    ),
    "callbacks.nan_guard": locate_names({"callbacks.bad_steps": "NaNGuard"}),
    "callbacks.replay_check": locate_names({"callbacks.repeated_steps": "ReplayCheck"}),
    "callbacks.spike_detection": locate_names(
        {"callbacks.bad_steps": "SpikeDetection"}
    ),
    "compat._plateau": locate_names({"commands._plateau": "ReduceLROnPlateau"}),
    "compat.deepspeed": locate_names(
        {"options.deepspeed": "DeepSpeedPlugin DummyOptim DummyScheduler"}
    ),
    "compat.fp8": locate_names(
        {
            "options.fp8": (
                "AORecipeKwargs FP8Recipe FP8RecipeKwargs MSAMPRecipeKwargs TERecipeKwargs"
            )
        }
    ),
    "compat.megatron": locate_names({"options.megatron": "MegatronLMPlugin"}),
    "compat.options": locate_names(
        {
            "options.records": (
                "AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DistributedDataParallelKwargs "
                "FullyShardedDataParallelPlugin GradScalerKwargs GradientAccumulationPlugin InitProcessGroupKwargs "
                "KwargsHandler ProfileKwargs ProjectConfiguration TorchDynamoPlugin"
            )
        }
    ),
    "compat.parallelism": locate_names(
        {
            "options.parallelism": (
                "ParallelismConfig TorchContextParallelConfig TorchTensorParallelConfig TorchTensorParallelPlugin"
            )
        }
    ),
    "planning.local_ranks": locate_names({"verify.local_ranks": "run_local"}),
    "planning.script": locate_names(
        {"commands.script": "CapturedFit captured_fit failed_script"}
    ),
    "planning.verify": locate_names(
        {"verify.result": "Check Verification", "verify.verify": "verify"}
    ),
    "planning.verify_compare": locate_names({"verify.compare": "Finding Point"}),
    "planning.verify_page": locate_names({"verify.page": "write_page"}),
    "planning.verify_result": locate_names(
        {"verify.result": "Check CheckList Verification"}
    ),
    "planning.verify_runs": locate_names({"verify.runs": "Runs locked_directory"}),
    "testing.hooks": locate_names({"testing.tiny": "record_hooks"}),
    "training.loop_views": locate_names({"training.loops": "FitLoop PredictLoop"}),
}
"""By former path and name: the module and the name now."""
