"""The plugin of Accelerate that describes an engine which was given as ``Accelerator(strategy=...)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, TypeAlias

from trainer_kit.accelerator.composition import Options
from trainer_kit.core.parallel import ParallelPlan
from trainer_kit.options.deepspeed import DeepSpeedPlugin
from trainer_kit.options.megatron import MegatronLMPlugin
from trainer_kit.options.parallelism import TorchTensorParallelPlugin
from trainer_kit.options.records import FullyShardedDataParallelPlugin
from trainer_kit.strategies.process_group import ProcessGroup
from trainer_kit.strategies.strategy import Strategy

__all__ = ["describe_engine"]

_Options: TypeAlias = dict[str, Any]


class _ShardedEngine(Protocol):
    options: _Options


class _MeshEngine(Protocol):
    world: ProcessGroup
    losses: ProcessGroup
    fsdp_options: _Options
    plan: ParallelPlan | None

    def places(self, processes: int) -> dict[str, int]: ...


class _DeepSpeedEngine(Protocol):
    config: _Options


class _MegatronEngine(Protocol):
    tensor_parallel: int
    sequence_parallel: bool
    distributed_optimizer: bool
    gradient_clipping: float


def describe_engine(argument: Strategy | None, strategy: Strategy) -> Options:
    """Return, by class, the plugins that would have made ``strategy=``; an engine that users add has none.

    Args:
        argument: ``strategy=`` of the Accelerator; without it there is nothing to describe.
        strategy: the one that was started, so that the sizes of a mesh are known.
    """
    describe = _BY_NAME.get(strategy.name)
    if argument is None or describe is None:
        return {}
    return {type(plugin): plugin for plugin in describe(strategy)}


def _describe_fsdp(strategy: _ShardedEngine) -> list[object]:
    return [_make_fsdp_plugin(strategy.options)]


def _describe_mesh(strategy: _MeshEngine) -> list[object]:
    plugins: list[object] = []
    if strategy.losses.size > 1:
        plugins.append(_make_fsdp_plugin(strategy.fsdp_options))
    sizes = strategy.places(strategy.world.size)
    if sizes["tp"] > 1:
        plugins.append(TorchTensorParallelPlugin(sizes["tp"], plan=strategy.plan))
    return plugins


def _describe_deepspeed(strategy: _DeepSpeedEngine) -> list[object]:
    return [_make_deepspeed_plugin(strategy.config)]


def _describe_megatron(strategy: _MegatronEngine) -> list[object]:
    from trainer_kit.strategies.megatron.config import KEYS

    # Each option has a value, so that no variable of the launcher stands in for one.
    options: _Options = {key.removeprefix("megatron_lm_"): False for key in KEYS}
    options.update(
        tp_degree=strategy.tensor_parallel,
        sequence_parallelism=strategy.sequence_parallel,
        use_distributed_optimizer=strategy.distributed_optimizer,
        gradient_clipping=strategy.gradient_clipping,
    )
    return [MegatronLMPlugin(**options)]


def _make_fsdp_plugin(options: _Options) -> FullyShardedDataParallelPlugin:
    recomputes = options.get("activation_checkpointing_policy", False) is not False
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        sharding_strategy=options.get("sharding_strategy", "FULL_SHARD").upper(),
        reshard_after_forward=options.get("reshard_after_forward"),
        mixed_precision_policy=options.get("mixed_precision"),
        cpu_offload=options.get("cpu_offload", False),
        ignored_modules=options.get("ignored_modules") or None,
        activation_checkpointing=recomputes,
        activation_checkpointing_offload=options.get("offload_activations", False),
        **_read_wrap_policy(options.get("auto_wrap_policy")),
    )


def _read_wrap_policy(policy: Any) -> _Options:
    """Return the plugin's options for the units of FSDP."""
    if policy is None:
        return {}
    if isinstance(policy, int):
        return {"auto_wrap_policy": "size_based_wrap", "min_num_params": policy}
    if callable(policy) and not isinstance(policy, type):
        return {"auto_wrap_policy": policy}
    if isinstance(policy, (str, type)):
        policy = [policy]
    names = [getattr(kind, "__name__", kind) for kind in policy]
    if not names:
        return {"auto_wrap_policy": "no_wrap"}
    return {
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": names,
    }


def _make_deepspeed_plugin(config: _Options) -> DeepSpeedPlugin:
    zero = config["zero_optimization"]
    devices = {}
    for name in ("offload_optimizer", "offload_param"):
        section = zero.get(name) or {}
        devices[f"{name}_device"] = section.get("device", "none")
    # Each option has a value, so that no variable of the launcher stands in for one.
    plugin = DeepSpeedPlugin(
        config,
        gradient_accumulation_steps=config.get("gradient_accumulation_steps", "auto"),
        gradient_clipping=config.get("gradient_clipping", "auto"),
        zero_stage=zero["stage"],
        zero3_init_flag=False,
        **devices,
    )
    plugin.show_running(config)
    return plugin


# Engines are known by name: their modules may need packages that are not installed.
_BY_NAME: Final[Mapping[str, Callable[[Any], list[object]]]] = {
    "fsdp": _describe_fsdp,
    "mesh": _describe_mesh,
    "deepspeed": _describe_deepspeed,
    "megatron": _describe_megatron,
}
