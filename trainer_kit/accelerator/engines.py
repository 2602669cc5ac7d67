"""The engine that an `Accelerator`'s plugins ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from trainer_kit.compat.deepspeed import DeepSpeedPlugin
from trainer_kit.compat.megatron import MegatronLMPlugin
from trainer_kit.compat.options import (
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    check_kind,
)
from trainer_kit.compat.parallelism import ParallelismConfig, TorchTensorParallelPlugin
from trainer_kit.core.configuration_sources import Chosen, variable
from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.registry import STRATEGIES
from trainer_kit.strategies.axes import places
from trainer_kit.strategies.mesh_config import KEYS

__all__ = ["asked_engine", "chosen_sizes", "chosen_strategy", "engine_says", "plugins"]

_PLUGINS: Final[dict[str, type]] = {
    "fsdp_plugin": FullyShardedDataParallelPlugin,
    "megatron_lm_plugin": MegatronLMPlugin,
    "parallelism_config": ParallelismConfig,
    "torch_tp_plugin": TorchTensorParallelPlugin,
    "deepspeed_plugin": DeepSpeedPlugin,
}

# By the launcher's word; DeepSpeed's is among its plugins already.
_LAUNCHED: Final[dict[str, type]] = {"FSDP": FullyShardedDataParallelPlugin, "MEGATRON_LM": MegatronLMPlugin}


def plugins(given: Mapping[str, Any], deepspeed: Mapping[str, Any]) -> dict[type, Any]:
    """The plugins of engines by their class: an Accelerator's arguments, else what its launcher names.

    Args:
        given: arguments, by name.
        deepspeed: DeepSpeed's plugins by name, the launcher's too; the first counts.

    Raises:
        ConfigurationError: for what is given twice.
        TypeError: for an argument that it does not have.
    """
    found: dict[type, Any] = {}
    given = {**given, "deepspeed_plugin": next(iter(deepspeed.values()), None), "deepspeed_plugins": None}
    for name, value in given.items():
        if name not in _PLUGINS and name != "deepspeed_plugins":
            raise TypeError(f"Accelerator got an unexpected argument {name!r}")
        if value is not None:
            check_kind(name, value, _PLUGINS[name])
            found[_PLUGINS[name]] = value
    if TorchTensorParallelPlugin in found:
        if ParallelismConfig in found:
            raise ConfigurationError("tensor parallelism is given twice", found="torch_tp_plugin, parallelism_config")
        found[ParallelismConfig] = found.pop(TorchTensorParallelPlugin).as_config()
    told = variable("distributed_type")
    if told is not None and asked_engine(found) is None and (kind := _LAUNCHED.get(str(told.value))) is not None:
        found[kind] = kind()
    if ParallelismConfig not in found and (mesh := ParallelismConfig()).active_mesh_dims:
        found[ParallelismConfig] = mesh
    return found


def asked_engine(options: Mapping[type, Any]) -> Any:
    """The plugin of the engine that is asked for, or None."""
    engines = (options[kind] for kind in _PLUGINS.values() if kind in options and kind is not ParallelismConfig)
    return next(engines, None)


def engine_says(engine: Any, precision: Any, accumulation: int | None) -> tuple[Any, int | None]:
    """Precision and accumulation: the arguments of an Accelerator, or what its engine's configuration says of them."""
    said = engine.said() if hasattr(engine, "said") else {}
    return (
        said.get("mixed_precision") if precision is None else precision,
        said.get("gradient_accumulation_steps") if accumulation is None else accumulation,
    )


def chosen_strategy(options: Mapping[type, Any], environment: Environment) -> Any:
    """What the user's options ask for: a strategy object where there are any, else ``"auto"``."""
    engine = asked_engine(options)
    mesh = _mesh(options.get(ParallelismConfig), engine, environment)
    wrapper, group = options.get(DistributedDataParallelKwargs), options.get(InitProcessGroupKwargs)
    given = any(one is not None for one in (wrapper, group, engine))
    if mesh is None and not (given and (environment.launched or getattr(engine, "serves_alone", False))):
        return "auto"
    chosen: dict[str, Any] = {}
    if wrapper is not None and engine is None and mesh is None:
        for name in (
            "broadcast_buffers",
            "bucket_cap_mb",
            "find_unused_parameters",
            "gradient_as_bucket_view",
            "static_graph",
        ):
            chosen[name] = getattr(wrapper, name)
        chosen.update(wrapper.exchange())
    if group is not None:
        chosen["process_group_backend"] = group.backend
        if group.timeout is not None:
            chosen["timeout"] = group.timeout
    if mesh is not None:
        return mesh.make_strategy(engine, **chosen)
    if engine is not None:
        return engine.make_strategy(**chosen)
    return STRATEGIES.get("ddp")(**chosen)


def _mesh(config: ParallelismConfig | None, engine: Any, environment: Environment) -> ParallelismConfig | None:
    """What makes a mesh of it; None where there is nothing to divide but data."""
    dims = [] if config is None else config.active_mesh_dims
    if config is None or not dims:
        return None
    if engine is not None and not isinstance(engine, FullyShardedDataParallelPlugin):
        raise ConfigurationError(
            "an engine of its own cannot divide a mesh",
            found=f"parallelism_config={config.sizes} and {type(engine).__name__}",
            fix="leave one out; FSDP (dp_shard_size=) divides what the other axes leave",
        )
    places(config.sizes, environment.world_size)
    return None if dims == ["dp_replicate"] and engine is None else config


def chosen_sizes(options: Mapping[type, Any]) -> dict[str, Chosen]:
    """The sizes of a mesh that are not 1, with their origins."""
    config = options.get(ParallelismConfig)
    found: dict[str, Chosen] = {}
    for key in (*KEYS, "parallelism_config_pp_size"):
        told = variable(key)
        size = getattr(config, key.removeprefix("parallelism_config_"), None)
        if size is not None and (told is None or str(told.value) != str(size)):
            told = Chosen(size, "argument")
        if told is not None and str(told.value) != "1":
            found[key] = told
    return found
