"""What the user says, in Megatron's words: its optimizer for torch's, and Accelerate's ``megatron_lm_config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from trainer_kit.core.errors import ConfigurationError, StrategyError

__all__ = ["KEYS", "check_model", "from_launcher", "megatron_model", "optimizer_options"]

_READ: Final = {
    "megatron_lm_tp_degree": "tensor_parallel",
    "megatron_lm_sequence_parallelism": "sequence_parallel",
    "megatron_lm_use_distributed_optimizer": "distributed_optimizer",
    "megatron_lm_gradient_clipping": "gradient_clipping",
}
_IN_THE_MODEL: Final = "say it in the TransformerConfig that configure_model builds with"
_REFUSED: Final = {
    "megatron_lm_context_parallel_size": "use MeshStrategy(cp=)",
    "megatron_lm_expert_model_parallel_size": "experts are not here yet",
    "megatron_lm_expert_tensor_parallel_size": "experts are not here yet",
    "megatron_lm_num_micro_batches": "accumulate_grad_batches=, or gradient_accumulation_steps= and accumulate(model)",
    "megatron_lm_optimizer_cpu_offload": "use FSDPStrategy(cpu_offload=True)",
    "megatron_lm_pp_degree": "use MeshStrategy(pp=)",
    "megatron_lm_use_custom_fsdp": "use FSDPStrategy",
    "megatron_lm_use_precision_aware_optimizer": "masters are float32 here",
    **{
        f"megatron_lm_{key}": _IN_THE_MODEL
        for key in (
            "attention_backend", "attention_dropout", "attention_softmax_in_fp32", "decoder_last_pipeline_num_layers",
            "hidden_dropout", "recompute_activations", "recompute_granularity", "recompute_method",
            "recompute_num_layers", "use_rotary_position_embeddings",
        )
    },
    "megatron_lm_eod_mask_loss": "mask it in training_step, and count what is left in loss_weight",
    "megatron_lm_no_load_optim": "ckpt_path= with weights_only=True",
    "megatron_lm_no_save_optim": "ModelCheckpoint(save_weights_only=True)",
    "megatron_lm_overlap_cpu_optimizer_d2h_h2d": "use FSDPStrategy(cpu_offload=True)",
}  # fmt: skip
_HARMLESS: Final = {"megatron_lm_calculate_per_token_loss"}  # losses are weighed by the loop, always
KEYS: Final = (*_READ, *_REFUSED, *_HARMLESS)
"""Of ``megatron_lm_config``."""
_ON: Final = {"1", "true", "yes"}
_OFF: Final = {"", "0", "1", "false", "no", "none", "unfused"}


def from_launcher(told: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of the strategy from ``megatron_lm_config``.

    Args:
        told: the texts of what the launcher was given.

    Raises:
        ConfigurationError: for a key that asks for what is said, or done, elsewhere.

    Example:
        >>> from_launcher({"megatron_lm_tp_degree": "2", "megatron_lm_pp_degree": "1"})
        {'tensor_parallel': 2, 'sequence_parallel': False, 'distributed_optimizer': False, 'gradient_clipping': 1.0}
    """
    for key, instead in _REFUSED.items():
        if told.get(key, "").lower() not in _OFF:
            raise ConfigurationError(f"{key} is said elsewhere here", found=f"{key}: {told[key]}", fix=instead)
    return {
        "tensor_parallel": int(told.get("megatron_lm_tp_degree", 1)),
        "sequence_parallel": told.get("megatron_lm_sequence_parallelism", "").lower() in _ON,
        "distributed_optimizer": told.get("megatron_lm_use_distributed_optimizer", "").lower() in _ON,
        # A Trainer has an argument for it; in other loops 1 is what Accelerate takes where nothing is said.
        "gradient_clipping": float(told.get("megatron_lm_gradient_clipping", 1.0)),  # no sync point: a text
    }


def megatron_model(module: nn.Module) -> nn.Module:
    """The part of a module that is Megatron's.

    Raises:
        StrategyError: there is none, or something is trained outside it.
    """
    several = [module] if hasattr(module, "set_input_tensor") else module.children()
    found = [part for part in several if hasattr(part, "set_input_tensor")]
    inside = {id(p) for part in found for p in part.parameters()}
    outside = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in inside]
    if len(found) != 1 or outside:
        raise StrategyError(
            "Megatron trains one model of its own layers",
            found=f"{outside[0]} is outside it" if len(found) == 1 else f"{len(found)} in {type(module).__name__}",
            fix="make it in configure_model: self.net = megatron.core.models.gpt.GPTModel(...)",
        )
    return found[0]


def check_model(config: Any, sizes: Mapping[str, Any], precision: str) -> None:
    """Whether a model was built for this strategy.

    Args:
        config: the model's ``TransformerConfig``.
        sizes: what the strategy has, by the names that the configuration has.
        precision: the run's.

    Raises:
        StrategyError: it was not.
    """
    half = {"bf16": precision.startswith("bf16"), "fp16": precision.startswith("16")}
    for name, wanted in {**sizes, **half}.items():
        if getattr(config, name) != wanted:
            raise StrategyError(
                "the model was built for another strategy or precision",
                found=f"{name}={getattr(config, name)!r}, where this run has {wanted!r}",
                fix=f"TransformerConfig(..., {name}={wanted!r}) in configure_model",
            )
    for name, why in (
        ("num_moe_experts", "the losses that balance experts are weighed by tokens there"),
        ("mtp_num_layers", "the losses of further predicted tokens are weighed by tokens there"),
    ):
        if getattr(config, name, None):
            raise StrategyError(f"{name} is not here yet", found=f"{name}={getattr(config, name)!r}: {why}")
    if sizes["tensor_model_parallel_size"] > 1 and getattr(config, "gated_linear_unit", False):
        raise StrategyError(
            "gated layers cannot be put together from tensor ranks yet",
            found="gated_linear_unit=True: a rank has a part of the gate and one of the rest in one tensor",
            fix="tensor_parallel=1, or MeshStrategy(tp=)",
        )


def optimizer_options(optimizer: Optimizer, distributed: bool = False) -> dict[str, Any]:
    """Fields of Megatron's ``OptimizerConfig`` that make it step as torch's optimizer does.

    Args:
        optimizer: of torch.
        distributed: whether by the distributed one, which has Adam only.

    Raises:
        StrategyError: Megatron has no such optimizer.

    Example:
        >>> weights = [nn.Parameter(torch.zeros(2))]
        >>> optimizer_options(torch.optim.SGD(weights, lr=0.1, momentum=0.9))
        {'lr': 0.1, 'weight_decay': 0, 'optimizer': 'sgd', 'sgd_momentum': 0.9}
    """
    if len(optimizer.param_groups) != 1:
        raise StrategyError(
            "Megatron steps one group of parameters here",
            found=f"{len(optimizer.param_groups)} groups",
            fix="one lr and weight_decay for all, or MeshStrategy(tp=)",
        )
    group = optimizer.param_groups[0]
    options = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
    beyond = [key for key in ("amsgrad", "maximize", "nesterov", "dampening") if group.get(key)]
    if type(optimizer) is torch.optim.SGD and distributed:
        raise StrategyError(
            "Megatron's distributed optimizer has no SGD", fix="AdamW or Adam, or distributed_optimizer=False"
        )
    if type(optimizer) is torch.optim.SGD and not beyond:
        return {**options, "optimizer": "sgd", "sgd_momentum": group["momentum"]}
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not beyond:
        decoupled = type(optimizer) is torch.optim.AdamW or bool(group.get("decoupled_weight_decay"))
        first, second = group["betas"]
        adam = {"adam_beta1": first, "adam_beta2": second, "adam_eps": group["eps"]}
        return {**options, "optimizer": "adam", "decoupled_weight_decay": decoupled, **adam}
    raise StrategyError(
        "Megatron has no such optimizer",
        found=f"{type(optimizer).__name__}{f' with {beyond[0]}' if beyond else ''}",
        fix="torch.optim.AdamW, Adam, or SGD with plain momentum",
    )
