"""Module paths of earlier versions of this library, and where each of their names is defined now."""

from __future__ import annotations

from typing import Final

__all__ = ["PATHS"]


def _from(module: str, names: str) -> dict[str, str]:
    return {name: f"{module}:{name}" for name in names.split()}


PATHS: Final = {
    "compat._plateau": _from("commands._plateau", "ReduceLROnPlateau"),
    "compat.deepspeed": _from(
        "options.deepspeed", "DeepSpeedPlugin DummyOptim DummyScheduler"
    ),
    "compat.fp8": _from(
        "options.fp8",
        "AORecipeKwargs FP8RecipeKwargs MSAMPRecipeKwargs TERecipeKwargs",
    ),
    "compat.megatron": _from("options.megatron", "MegatronLMPlugin"),
    "compat.options": _from(
        "options.records",
        "AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DistributedDataParallelKwargs "
        "FullyShardedDataParallelPlugin GradScalerKwargs GradientAccumulationPlugin InitProcessGroupKwargs "
        "KwargsHandler ProfileKwargs ProjectConfiguration TorchDynamoPlugin",
    ),
    "compat.parallelism": _from(
        "options.parallelism",
        "ParallelismConfig TorchContextParallelConfig TorchTensorParallelConfig TorchTensorParallelPlugin",
    ),
    "planning.verify": {
        **_from("verify.result", "Check Verification"),
        **_from("verify.verify", "verify"),
    },
    "planning.verify_compare": _from("verify.compare", "Finding Point"),
}
"""By former path and name: the module and the name now."""
