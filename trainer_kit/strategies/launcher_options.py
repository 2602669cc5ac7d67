"""Options of Accelerate's configuration file, as arguments of `FSDPStrategy` and `MeshStrategy`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from trainer_kit.core.configuration_sources import is_true
from trainer_kit.core.errors import ConfigurationError, StrategyError

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


def fsdp_from_launcher(given: Mapping[str, str]) -> dict[str, Any]:
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
    found: dict[str, Any] = {}
    if is_true(given.get("fsdp_offload_params")):
        found["cpu_offload"] = True
    if "fsdp_sharding_strategy" in given:
        found["sharding_strategy"] = given["fsdp_sharding_strategy"]
    reshards = given.get("fsdp_reshard_after_forward", "")
    if reshards.upper().endswith(
        ("SHARD", "_OP", "ZERO2")
    ):  # in version 1 this was the strategy
        found["sharding_strategy"] = reshards
    elif reshards:
        found["reshard_after_forward"] = is_true(reshards)
    if is_true(given.get("fsdp_activation_checkpointing_offload")):
        found["offload_activations"] = True
    if is_true(given.get("fsdp_activation_checkpointing")):
        found["activation_checkpointing_policy"] = True
    if "fsdp_ignored_modules" in given:
        found["ignored_modules"] = given["fsdp_ignored_modules"]
    names = [
        name.strip()
        for name in given.get("fsdp_transformer_layer_cls_to_wrap", "").split(",")
        if name.strip()
    ]
    policy = given.get("fsdp_auto_wrap_policy", "").upper()
    if policy == "NO_WRAP":
        found["auto_wrap_policy"] = []
    elif policy == "SIZE_BASED_WRAP":
        found["auto_wrap_policy"] = int(given.get("fsdp_min_num_params", "100000000"))
    elif names:
        found["auto_wrap_policy"] = names
    return found


_LAUNCHER_AXES: Final = ("dp_replicate", "dp_shard", "cp", "tp")
MESH_KEYS: Final = tuple(f"parallelism_config_{axis}_size" for axis in _LAUNCHER_AXES)
"""Those that say something. How sequences are exchanged is decided by the number of heads."""


def mesh_from_launcher(
    given: Mapping[str, str], fsdp: Mapping[str, Any] | None
) -> dict[str, Any]:
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
            axis: int(given.get(key, 1))
            for axis, key in zip(_LAUNCHER_AXES, MESH_KEYS, strict=True)
        }
    except ValueError:
        raise ConfigurationError(
            "sizes of parallelism_config are whole numbers", found=str(dict(given))
        ) from None
    active = [axis for axis, size in sizes.items() if size != 1]
    if not active or (active == ["dp_replicate"] and fsdp is None):
        return {}
    more = dict(fsdp or {})
    if active == ["tp"] and more.get("offload_activations"):
        found_at = "fsdp_activation_checkpointing_offload, and parallelism_config with tp alone"
        raise StrategyError(
            "activations are offloaded where FSDP shards parameters", found=found_at
        )
    found: dict[str, Any] = dict(sizes)
    if "activation_checkpointing_policy" in more:
        found["activation_checkpointing_policy"] = more.pop(
            "activation_checkpointing_policy"
        )
    return {**found, "fsdp": more} if more and active != ["tp"] else found
