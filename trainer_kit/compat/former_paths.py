"""Module paths of earlier versions of this library, and where each of their names is defined now."""

from __future__ import annotations

from typing import Final

from trainer_kit.core.lazy import locate_names

__all__ = ["PATHS"]


PATHS: Final = {
    "compat._plateau": locate_names({"commands._plateau": "ReduceLROnPlateau"}),
    "compat.deepspeed": locate_names(
        {"options.deepspeed": "DeepSpeedPlugin DummyOptim DummyScheduler"}
    ),
    "compat.fp8": locate_names(
        {
            "options.fp8": (
                "AORecipeKwargs FP8RecipeKwargs MSAMPRecipeKwargs TERecipeKwargs"
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
    "planning.verify": locate_names(
        {"verify.result": "Check Verification", "verify.verify": "verify"}
    ),
    "planning.verify_compare": locate_names({"verify.compare": "Finding Point"}),
}
"""By former path and name: the module and the name now."""
