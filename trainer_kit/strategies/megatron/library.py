"""megatron-core, imported when it is needed: its groups, its wrapper, its optimizer and how they are asked for."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer_kit.core.errors import StrategyError
from trainer_kit.strategies.megatron.config import optimizer_options

__all__ = ["finalize", "make_groups", "make_optimizer", "unwrapped", "weighed", "wrap"]


def make_groups(tensor_parallel: int, timeout: timedelta, seed: int) -> Any:
    """Megatron's groups of all ranks; returns what knows them.

    Args:
        tensor_parallel: ranks that compute each layer together.
        timeout: how long a collective may take.
        seed: the same on all ranks; it makes of it what differs among tensor ranks.
    """
    from megatron.core import parallel_state
    from megatron.core import tensor_parallel as layers

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel,
        pipeline_model_parallel_size=1,
        distributed_timeout_minutes=int(timeout.total_seconds() // 60),
    )
    layers.model_parallel_cuda_manual_seed(seed)
    return parallel_state


def wrap(model: Any, half: str, added_up: bool, distributed: bool) -> Any:
    """Megatron's wrapper around a model, with the weights of the first data rank on all of them.

    Args:
        model: on its device.
        half: ``"bf16"`` or ``"fp16"``, else empty.
        added_up: gradients are added up over the ranks, not averaged.
        distributed: each data rank gets its part of them only.
    """
    from megatron.core import tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    config = model.config
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    config.calculate_per_token_loss = added_up
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
    chunk = DistributedDataParallel(config, settings, Float16Module(config, model) if half else model)
    chunk.broadcast_params()
    return chunk


def make_optimizer(chunk: Any, optimizer: Optimizer, half: str, distributed: bool) -> Any:
    """Megatron's optimizer that steps as this one does.

    Args:
        chunk: what `wrap` returned.
        optimizer: of torch.
        half: as there.
        distributed: each data rank steps its part, and has the state of that only.

    Raises:
        StrategyError: it has no such optimizer, or would step other parameters.
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    options = optimizer_options(optimizer, distributed)
    trained = {id(p) for p in chunk.parameters() if p.requires_grad}
    if {id(p) for p in optimizer.param_groups[0]["params"]} != trained:
        raise StrategyError(
            "Megatron steps all that requires a gradient", fix="freeze the rest: parameter.requires_grad_(False)"
        )
    said = {half: True} if half else {}
    config = OptimizerConfig(clip_grad=0.0, use_distributed_optimizer=distributed, **said, **options)
    # No overrides: by default it would not decay vectors, which torch's optimizer does.
    made = get_megatron_optimizer(config, [chunk], config_overrides={})
    if half == "fp16":
        chunk.config.grad_scale_func = made.scale_loss
    return made


def finalize(model: list[Any], num_tokens: Any = None, **options: Any) -> None:
    """Its own, without the division by the number of tokens: the loop's weights have done that."""
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads(model, None, **options)


def weighed(loss: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The loss is weighed already; the number of tokens is not looked at."""
    return loss, torch.ones((), dtype=torch.int, device=loss.device), {}


def unwrapped(chunk: Any) -> Any:
    """The model inside of Megatron's wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk
