"""The engine that an `Accelerator`'s plugins ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.registry import STRATEGIES
from trainer_kit.raw.options import (
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
)

__all__ = ["chosen_strategy", "plugins"]

_PLUGINS: Final = {"fsdp_plugin": FullyShardedDataParallelPlugin}
_NOT_HERE: Final = {
    "deepspeed_plugin": ("DeepSpeed", 'Trainer(strategy="deepspeed_stage_2")'),
    "deepspeed_plugins": ("DeepSpeed", 'Trainer(strategy="deepspeed_stage_2")'),
    "megatron_lm_plugin": ("Megatron-LM", None),
    "torch_tp_plugin": ("tensor parallelism", 'Trainer(strategy="tp")'),
    "parallelism_config": ("mesh of several dimensions", "Trainer(strategy=MeshStrategy(...))"),
}


def plugins(given: Mapping[str, Any]) -> dict[type, Any]:
    """The plugins of engines among an Accelerator's arguments, by their class.

    Raises:
        ConfigurationError: for an engine that an Accelerator does not have.
        TypeError: for an argument that it does not have.
    """
    found: dict[type, Any] = {}
    for name, value in given.items():
        if name not in _PLUGINS and name not in _NOT_HERE:
            raise TypeError(f"Accelerator got an unexpected argument {name!r}")
        if value is None:
            continue
        if name in _NOT_HERE:
            what, elsewhere = _NOT_HERE[name]
            fix = elsewhere and f"a Trainer has it: {elsewhere}"
            raise ConfigurationError(f"an Accelerator has no {what} yet", found=f"{name}={value!r}", fix=fix)
        found[_PLUGINS[name]] = value
    return found


def chosen_strategy(options: Mapping[type, Any], environment: Environment) -> Any:
    """What the user's options ask for: a strategy object where there are any, else ``"auto"``."""
    engine = next((options[kind] for kind in _PLUGINS.values() if kind in options), None)
    wrapper, group = options.get(DistributedDataParallelKwargs), options.get(InitProcessGroupKwargs)
    if (wrapper is None and group is None and engine is None) or not environment.launched:
        return "auto"
    chosen: dict[str, Any] = {}
    if wrapper is not None and engine is None:
        for name in (
            "broadcast_buffers",
            "bucket_cap_mb",
            "find_unused_parameters",
            "gradient_as_bucket_view",
            "static_graph",
        ):
            chosen[name] = getattr(wrapper, name)
        hook = str(getattr(wrapper.comm_hook, "value", wrapper.comm_hook)).lower()
        chosen["ddp_comm_hook"] = None if hook == "no" else hook
    if group is not None:
        chosen["process_group_backend"] = group.backend
        if group.timeout is not None:
            chosen["timeout"] = group.timeout
    if engine is not None:
        return engine.make_strategy(**chosen)
    return STRATEGIES.get("ddp")(**chosen)
