"""megatron-core, imported when it is used: its groups, its wrapper, its optimizer and its loss scale."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer_kit.core.errors import StrategyError
from trainer_kit.strategies.megatron.config import optimizer_options

__all__ = ["MegatronScaler", "finalize", "keep_weighted", "make_groups", "make_optimizer", "unwrapped", "wrap"]


def make_groups(tensor_parallel: int, timeout: timedelta, seed: int) -> Any:
    """Make Megatron's process groups; returns its module ``parallel_state``, which holds them.

    Args:
        tensor_parallel: ranks that compute each layer together.
        timeout: how long a collective may take.
        seed: the same on all ranks; Megatron derives one for each tensor rank.
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


def wrap(model: Any, half: str, summed: bool, distributed: bool) -> Any:
    """Put Megatron's wrapper around a model, and give every data rank the weights of the first.

    Args:
        model: on its device.
        half: ``"bf16"`` or ``"fp16"``, else empty.
        summed: gradients are summed over the ranks, not averaged.
        distributed: each data rank gets only its part of the gradients.
    """
    from megatron.core import tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    config = model.config
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    config.calculate_per_token_loss = summed
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
    chunk = DistributedDataParallel(config, settings, Float16Module(config, model) if half else model)
    chunk.broadcast_params()
    return chunk


def make_optimizer(chunk: Any, optimizer: Optimizer, half: str, distributed: bool) -> Any:
    """Make the optimizer of Megatron that steps as this one of torch does.

    Args:
        chunk: the wrapper that `wrap` returned.
        optimizer: of torch.
        half: as for `wrap`.
        distributed: each data rank steps its part, and holds only the state of that part.

    Raises:
        StrategyError: Megatron has no such optimizer, or would step other parameters.
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    options = optimizer_options(optimizer, distributed)
    trained = {id(p) for p in chunk.parameters() if p.requires_grad}
    if {id(p) for p in optimizer.param_groups[0]["params"]} != trained:
        raise StrategyError(
            "Megatron steps all parameters with requires_grad",
            fix="freeze the rest: parameter.requires_grad_(False)",
        )
    if half:
        options[half] = True
    config = OptimizerConfig(clip_grad=0.0, use_distributed_optimizer=distributed, **options)
    # No overrides: Megatron's defaults do not decay vectors, torch's optimizer does.
    made = get_megatron_optimizer(config, [chunk], config_overrides={})
    if half == "fp16":
        chunk.config.grad_scale_func = made.scale_loss
    return made


def finalize(model: list[Any], num_tokens: Any = None, **options: Any) -> None:
    """Reduce gradients as Megatron does, but without dividing by the number of tokens: losses are weighted already."""
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads(model, None, **options)


def keep_weighted(loss: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """What Megatron's schedule asks of a loss: the loss, which is weighted already, and a number of tokens (unused)."""
    return loss, torch.ones((), dtype=torch.int, device=loss.device), {}


def unwrapped(chunk: Any) -> Any:
    """The model inside of Megatron's wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


@final
class MegatronScaler:
    """The loss scale of the current optimizer in float16; its state has the keys of ``torch.amp.GradScaler``.

    Attributes:
        skipped: whether the last step was skipped because gradients overflowed.
    """

    def __init__(self) -> None:
        self.skipped = False
        self._numbers: Any = None

    def follow(self, stepper: Any) -> None:
        """Read the loss scale of this optimizer from now on."""
        self.skipped = False
        self._numbers = getattr(stepper, "grad_scaler", None)

    def state_dict(self) -> dict[str, Any]:
        """The scale and its counters under GradScaler's keys, for any other engine, and Megatron's own counter."""
        scaler = self._numbers
        if scaler is None:
            return {}
        return {
            "scale": float(scaler.scale),  # sync point: a checkpoint
            "growth_factor": 2.0,  # fixed in Megatron, as is the next one
            "backoff_factor": 0.5,
            "growth_interval": scaler.growth_interval,
            "_growth_tracker": scaler._growth_tracker,
            "megatron": {"hysteresis_tracker": scaler._hysteresis_tracker},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`, or the state of a GradScaler.

        Args:
            state: empty where nothing was scaled.
        """
        scaler = self._numbers
        if scaler is None or not state:
            return
        own = state.get("megatron", {"hysteresis_tracker": scaler.hysteresis})
        tracker = int(state["_growth_tracker"]) % int(scaler.growth_interval)
        scaler.load_state_dict({"scale": torch.tensor([state["scale"]]), "growth_tracker": tracker, **own})
