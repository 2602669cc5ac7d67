"""The sizes of ``parallelism_config`` in a configuration file of Accelerate's, as arguments of `MeshStrategy`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from trainer_kit.core.errors import ConfigurationError

__all__ = ["KEYS", "from_launcher"]

_AXES: Final = ("dp_replicate", "dp_shard", "cp", "tp")
KEYS: Final = tuple(f"parallelism_config_{axis}_size" for axis in _AXES)
"""Those that say something. How sequences are exchanged is decided by the number of heads."""


def from_launcher(told: Mapping[str, str], fsdp: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments of the strategy; none where a mesh would do nothing that DDP or FSDP does not do alone.

    Args:
        told: the texts of what the launcher was given, by key.
        fsdp: arguments of `FSDPStrategy`, where the launcher asks for it.

    Raises:
        ConfigurationError: a size that is no number.

    Example:
        >>> from_launcher({"parallelism_config_tp_size": "2"}, None)
        {'dp_replicate': 1, 'dp_shard': 1, 'cp': 1, 'tp': 2}
        >>> from_launcher({"parallelism_config_dp_replicate_size": "2", "parallelism_config_tp_size": "1"}, None)
        {}
    """
    try:
        sizes = {axis: int(told.get(key, 1)) for axis, key in zip(_AXES, KEYS, strict=True)}
    except ValueError:
        raise ConfigurationError("sizes of parallelism_config are whole numbers", found=str(dict(told))) from None
    active = [axis for axis, size in sizes.items() if size != 1]
    if not active or (active == ["dp_replicate"] and fsdp is None):
        return {}
    more = dict(fsdp or {})
    found: dict[str, Any] = dict(sizes)
    if "activation_checkpointing_policy" in more:
        found["activation_checkpointing_policy"] = more.pop("activation_checkpointing_policy")
    return {**found, "fsdp": more} if more and active != ["tp"] else found
