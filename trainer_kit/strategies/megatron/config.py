"""Megatron's options: from the launcher's ``megatron_lm_config``, from the model and from torch's optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from trainer_kit.core.display import plural
from trainer_kit.core.errors import ConfigurationError, StrategyError
from trainer_kit.core.types import Keywords

__all__ = [
    "KEYS",
    "check_model",
    "from_launcher",
    "megatron_model",
    "optimizer_options",
]

_SUPPORTED: Final = (
    "megatron_lm_tp_degree",
    "megatron_lm_sequence_parallelism",
    "megatron_lm_use_distributed_optimizer",
    "megatron_lm_gradient_clipping",
)
_IN_THE_MODEL: Final = (
    "set it in the TransformerConfig that configure_model builds with"
)
_REFUSED: Final = {
    "megatron_lm_context_parallel_size": "use MeshStrategy(cp=)",
    "megatron_lm_expert_model_parallel_size": "experts are not supported yet",
    "megatron_lm_expert_tensor_parallel_size": "experts are not supported yet",
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
    "megatron_lm_no_load_optim": "ckpt_path= with load_weights_only=True",
    "megatron_lm_no_save_optim": "ModelCheckpoint(save_weights_only=True)",
    "megatron_lm_overlap_cpu_optimizer_d2h_h2d": "use FSDPStrategy(cpu_offload=True)",
}  # fmt: skip
# The loop always weights losses.
_HARMLESS: Final = {"megatron_lm_calculate_per_token_loss"}
KEYS: Final = (*_SUPPORTED, *_REFUSED, *_HARMLESS)
"""Options of the launcher's ``megatron_lm_config``."""
_ON: Final = {"1", "true", "yes"}
_OFF: Final = {"", "0", "1", "false", "no", "none", "unfused"}


def from_launcher(options: Mapping[str, str]) -> Keywords:
    """Arguments of the strategy from the launcher's ``megatron_lm_config``.

    Args:
        options: the launcher's, as texts, by the names in `KEYS`.

    Raises:
        ConfigurationError: for an option that is set elsewhere, or not supported; the error says where.

    Example:
        >>> from_launcher({"megatron_lm_tp_degree": "2", "megatron_lm_pp_degree": "1"})
        {'tensor_parallel': 2, 'sequence_parallel': False, 'distributed_optimizer': False, 'gradient_clipping': 1.0}
    """
    for key, instead in _REFUSED.items():
        if options.get(key, "").lower() not in _OFF:
            raise ConfigurationError(
                f"{key} is not an option of MegatronStrategy",
                found=f"{key}: {options[key]}",
                fix=instead,
            )
    sequence = options.get("megatron_lm_sequence_parallelism", "")
    distributed = options.get("megatron_lm_use_distributed_optimizer", "")
    # 1 is Accelerate's default. A Trainer has an argument for it.
    clipping = options.get("megatron_lm_gradient_clipping", 1.0)
    return {
        "tensor_parallel": int(options.get("megatron_lm_tp_degree", 1)),
        "sequence_parallel": sequence.lower() in _ON,
        "distributed_optimizer": distributed.lower() in _ON,
        "gradient_clipping": float(clipping),  # no sync point: a text
    }


def megatron_model(module: nn.Module) -> nn.Module:
    """Find Megatron's model in a module.

    Raises:
        StrategyError: there is none, or parameters outside it are trained.
    """
    candidates = list(module.children())
    if hasattr(module, "set_input_tensor"):
        candidates = [module]
    models = [model for model in candidates if hasattr(model, "set_input_tensor")]
    if len(models) != 1:
        raise _not_one_model(f"{len(models)} in {type(module).__name__}")
    model_parameters = {id(parameter) for parameter in models[0].parameters()}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and id(parameter) not in model_parameters:
            raise _not_one_model(f"{name} is outside it")
    return models[0]


def _not_one_model(found: str) -> StrategyError:
    return StrategyError(
        "Megatron trains a single model made of Megatron layers",
        found=found,
        fix="create it in configure_model: self.net = megatron.core.models.gpt.GPTModel(...)",
    )


def check_model(config: Any, sizes: Mapping[str, int], precision: str) -> None:
    """Check that a model was built for this strategy and precision.

    Args:
        config: the model's ``TransformerConfig``.
        sizes: the strategy's, by the names of the configuration's fields.
        precision: the run's, by name.

    Raises:
        StrategyError: the model was built for another one, or has layers that are not supported.
    """
    wanted: dict[str, int] = dict(sizes)
    wanted["bf16"] = precision.startswith("bf16")
    wanted["fp16"] = precision.startswith("16")
    for name, value in wanted.items():
        built_with = getattr(config, name)
        if built_with != value:
            raise StrategyError(
                "the model was built for another strategy or precision",
                found=f"{name}={built_with!r}, but this run needs {value!r}",
                fix=f"use TransformerConfig(..., {name}={value!r}) in configure_model",
            )
    for name, reason in _UNSUPPORTED_LAYERS.items():
        refused = getattr(config, name, None)
        if refused:
            raise StrategyError(
                f"{name} is not supported yet", found=f"{name}={refused!r}: {reason}"
            )
    is_gated = getattr(config, "gated_linear_unit", False)
    if is_gated and sizes["tensor_model_parallel_size"] > 1:
        raise StrategyError(
            "gated layers cannot be gathered from tensor-parallel ranks yet",
            found="gated_linear_unit=True: each rank holds a part of the gate and a part of the rest in one tensor",
            fix="use tensor_parallel=1, or MeshStrategy(tp=)",
        )


_UNSUPPORTED_LAYERS: Final = {
    "num_moe_experts": "Megatron weights the losses that balance experts by tokens",
    "mtp_num_layers": "Megatron weights the losses of further predicted tokens by tokens",
}
"""Fields of a ``TransformerConfig`` that are refused, each with the reason."""


def optimizer_options(optimizer: Optimizer, distributed: bool = False) -> Keywords:
    """Fields of Megatron's ``OptimizerConfig`` with which it steps as torch's optimizer does.

    Args:
        optimizer: of torch.
        distributed: whether for the distributed optimizer, which has Adam only.

    Raises:
        StrategyError: Megatron does not support this optimizer.

    Example:
        >>> weights = [nn.Parameter(torch.zeros(2))]
        >>> optimizer_options(torch.optim.SGD(weights, lr=0.1, momentum=0.9))
        {'lr': 0.1, 'weight_decay': 0, 'optimizer': 'sgd', 'sgd_momentum': 0.9}
    """
    if len(optimizer.param_groups) != 1:
        raise StrategyError(
            "Megatron steps a single parameter group",
            found=plural(len(optimizer.param_groups), "group"),
            fix="use one lr and weight_decay for all parameters, or MeshStrategy(tp=)",
        )
    group = optimizer.param_groups[0]
    options = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
    refused = [
        key
        for key in ("amsgrad", "maximize", "nesterov", "dampening")
        if group.get(key)
    ]
    # By exact type: a subclass may step in another way.
    if type(optimizer) is torch.optim.SGD and distributed:
        raise StrategyError(
            "Megatron's distributed optimizer does not support SGD",
            fix="use AdamW or Adam, or distributed_optimizer=False",
        )
    if type(optimizer) is torch.optim.SGD and not refused:
        return {**options, "optimizer": "sgd", "sgd_momentum": group["momentum"]}
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not refused:
        decoupled = bool(group.get("decoupled_weight_decay"))
        first, second = group["betas"]
        return {
            **options,
            "optimizer": "adam",
            # An option of torch's Adam; AdamW always decays in this way.
            "decoupled_weight_decay": type(optimizer) is torch.optim.AdamW or decoupled,
            "adam_beta1": first,
            "adam_beta2": second,
            "adam_eps": group["eps"],
        }
    name = type(optimizer).__name__
    if refused:
        name += f" with {refused[0]}"
    raise StrategyError(
        "Megatron does not support this optimizer",
        found=name,
        fix="use torch.optim.AdamW, Adam, or SGD with plain momentum",
    )
