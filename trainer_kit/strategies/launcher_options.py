"""Options of Accelerate's configuration file, as arguments of `FSDPStrategy` and `MeshStrategy`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from trainer_kit.core.configuration_sources import is_true
from trainer_kit.core.errors import ConfigurationError, StrategyError
from trainer_kit.core.types import Keywords

__all__ = ["FSDP_KEYS", "MESH_KEYS", "fsdp_from_launcher", "mesh_from_launcher"]


FSDP_KEYS: Final = (
    "fsdp_sharding_strategy",
    "fsdp_reshard_after_forward",
    "fsdp_offload_params",
    "fsdp_min_num_params",
    "fsdp_auto_wrap_policy",
    "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_activation_checkpointing",
    "fsdp_activation_checkpointing_offload",
    "fsdp_ignored_modules",
)
"""Those that say something. FSDP2 does by itself, or has no longer, what the others ask for."""


def fsdp_from_launcher(options: Mapping[str, str]) -> Keywords:
    """Arguments of the strategy.

    Args:
        given: the values that the launcher has, by key.

    Example:
        >>> fsdp_from_launcher({"fsdp_reshard_after_forward": "SHARD_GRAD_OP", "fsdp_offload_params": "1"})
        {'cpu_offload': True, 'sharding_strategy': 'SHARD_GRAD_OP'}
        >>> fsdp_from_launcher({"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        ...                "fsdp_transformer_layer_cls_to_wrap": "Block, Head"})
        {'auto_wrap_policy': ['Block', 'Head']}
    """
    arguments: Keywords = {}
    if is_true(options.get("fsdp_offload_params")):
        arguments["cpu_offload"] = True
    if "fsdp_sharding_strategy" in options:
        arguments["sharding_strategy"] = options["fsdp_sharding_strategy"]
    reshards = options.get("fsdp_reshard_after_forward", "")
    # In version 1 of FSDP this key had the name of a strategy.
    if reshards.upper().endswith(("SHARD", "_OP", "ZERO2")):
        arguments["sharding_strategy"] = reshards
    elif reshards:
        arguments["reshard_after_forward"] = is_true(reshards)
    if is_true(options.get("fsdp_activation_checkpointing_offload")):
        arguments["offload_activations"] = True
    if is_true(options.get("fsdp_activation_checkpointing")):
        arguments["activation_checkpointing_policy"] = True
    if "fsdp_ignored_modules" in options:
        arguments["ignored_modules"] = options["fsdp_ignored_modules"]
    layer_classes = options.get("fsdp_transformer_layer_cls_to_wrap", "")
    names = [name.strip() for name in layer_classes.split(",") if name.strip()]
    policy = options.get("fsdp_auto_wrap_policy", "").upper()
    if policy == "NO_WRAP":
        arguments["auto_wrap_policy"] = []
    elif policy == "SIZE_BASED_WRAP":
        arguments["auto_wrap_policy"] = int(
            options.get("fsdp_min_num_params", "100000000")
        )
    elif names:
        arguments["auto_wrap_policy"] = names
    return arguments


_LAUNCHER_AXES: Final = ("dp_replicate", "dp_shard", "cp", "tp")
MESH_KEYS: Final = tuple(f"parallelism_config_{axis}_size" for axis in _LAUNCHER_AXES)
"""Those that say something. How sequences are exchanged is decided by the number of heads."""


def mesh_from_launcher(
    options: Mapping[str, str], fsdp: Mapping[str, object] | None
) -> Keywords:
    """Arguments of the strategy; none where a mesh would do nothing that DDP or FSDP does not do alone.

    Args:
        given: the values that the launcher has, by key.
        fsdp: arguments of `FSDPStrategy`, where the launcher asks for it.

    Raises:
        ConfigurationError: a size is not a number.
        StrategyError: activations are offloaded without FSDP.

    Example:
        >>> mesh_from_launcher({"parallelism_config_tp_size": "2"}, None)
        {'dp_replicate': 1, 'dp_shard': 1, 'cp': 1, 'tp': 2}
        >>> mesh_from_launcher({"parallelism_config_dp_replicate_size": "2", "parallelism_config_tp_size": "1"}, None)
        {}
    """
    try:
        sizes = {
            axis: int(options.get(key, 1))
            for axis, key in zip(_LAUNCHER_AXES, MESH_KEYS, strict=True)
        }
    except ValueError:
        raise ConfigurationError(
            "sizes of parallelism_config must be integers",
            found=str(dict(options)),
        ) from None
    # An axis of one rank does nothing. Replicas alone are what DDP does without one.
    active = [axis for axis, size in sizes.items() if size != 1]
    if not active or (active == ["dp_replicate"] and fsdp is None):
        return {}
    fsdp_options = dict(fsdp or {})
    if active == ["tp"] and fsdp_options.get("offload_activations"):
        raise StrategyError(
            "activations are offloaded where FSDP shards parameters",
            found="fsdp_activation_checkpointing_offload, and parallelism_config with tp alone",
        )
    arguments: Keywords = dict(sizes)
    policy = "activation_checkpointing_policy"
    if policy in fsdp_options:
        arguments[policy] = fsdp_options.pop(policy)
    if fsdp_options and active != ["tp"]:
        arguments["fsdp"] = fsdp_options
    return arguments
