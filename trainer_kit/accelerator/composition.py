"""Resolve the arguments of an `Accelerator`: strategy, precision, accumulation, options, and their origins."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final

from torch import distributed as dist

from trainer_kit.accelerator.accumulation import Accumulation
from trainer_kit.accelerator.joint_calls import ADVICE
from trainer_kit.accelerator.processes import AcceleratorProcesses
from trainer_kit.accelerator.wrapping import without_exchange
from trainer_kit.build import choose_precision, choose_strategy
from trainer_kit.compat.deepspeed import DeepSpeedPlugin
from trainer_kit.compat.fp8 import AORecipeKwargs, FP8Recipe, launched_recipe
from trainer_kit.compat.megatron import MegatronLMPlugin
from trainer_kit.compat.options import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
    check_arguments,
    check_kind,
    micro_batches,
)
from trainer_kit.compat.parallelism import ParallelismConfig, TorchTensorParallelPlugin
from trainer_kit.compat.torch_collective import TorchCollective
from trainer_kit.core.arguments import as_list, word_of
from trainer_kit.core.configuration_sources import (
    Chosen,
    choose,
    is_true,
    steps_of,
    variable,
)
from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import ConfigurationError, did_you_mean
from trainer_kit.core.registry import STRATEGIES
from trainer_kit.hang.hang_timeout import chosen_timeout
from trainer_kit.hang.hang_watchdog import HangWatchdog, stop_at_exit
from trainer_kit.precision.converted import ConvertedPrecision
from trainer_kit.precision.native import make_scaler
from trainer_kit.precision.precision import Precision
from trainer_kit.strategies.launcher_options import MESH_KEYS
from trainer_kit.strategies.mesh_layout import resolve_sizes
from trainer_kit.strategies.strategy import Strategy

__all__ = [
    "chosen_sizes",
    "chosen_strategy",
    "engine_arguments",
    "made_accumulation",
    "made_precision",
    "named_dynamo",
    "named_loaders",
    "named_options",
    "named_project",
    "named_trackers",
    "plugins",
    "started_strategy",
    "started_watchdog",
]

_PLUGINS: Final[dict[str, type]] = {
    "fsdp_plugin": FullyShardedDataParallelPlugin,
    "megatron_lm_plugin": MegatronLMPlugin,
    "parallelism_config": ParallelismConfig,
    "torch_tp_plugin": TorchTensorParallelPlugin,
    "deepspeed_plugin": DeepSpeedPlugin,
    "strategy": Strategy,
}

_EVERYWHERE: Final = ("tensorboard", "csv", "jsonl")  # the trackers of log_with="all"
_IF_INSTALLED: Final = (
    "wandb",
    "mlflow",
    "comet_ml",
    "clearml",
    "aim",
    "dvclive",
    "swanlab",
    "trackio",
)

# Plugins by the launcher's names; DeepSpeed's plugin is passed with the other DeepSpeed plugins.
_LAUNCHED: Final[dict[str, type]] = {
    "FSDP": FullyShardedDataParallelPlugin,
    "MEGATRON_LM": MegatronLMPlugin,
}


def engine_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check an Accelerator's arguments, and return those for engines, by name.

    Args:
        given: all arguments; ``unknown`` has those that no Accelerator takes.

    Raises:
        ConfigurationError: a value has the wrong type.
        TypeError: an argument is unknown.
    """
    check_arguments(given)
    for name in given["unknown"]:
        fix = did_you_mean(
            name, [known for known in given if known not in ("self", "unknown")]
        )
        raise TypeError(f"Accelerator got an unexpected argument {name!r}: {fix}")
    return {name: given[name] for name in (*_PLUGINS, "deepspeed_plugins")}


def plugins(given: Mapping[str, Any], deepspeed: Mapping[str, Any]) -> dict[type, Any]:
    """Return the engine plugins by class: from an Accelerator's arguments, else from its launcher.

    Args:
        given: arguments by name.
        deepspeed: DeepSpeed plugins by name, with the launcher's; the first one is used.

    Raises:
        ConfigurationError: an option is given twice, or is none of its kind.
    """
    found: dict[type, Any] = {}
    given = {
        **given,
        "deepspeed_plugin": next(iter(deepspeed.values()), None),
        "deepspeed_plugins": None,
    }
    for name, value in given.items():
        if value is not None:
            check_kind(name, value, _PLUGINS[name])
            found[_PLUGINS[name]] = value
    if TorchTensorParallelPlugin in found:
        if ParallelismConfig in found:
            raise ConfigurationError(
                "tensor parallelism is given twice",
                found="torch_tp_plugin, parallelism_config",
            )
        found[ParallelismConfig] = found.pop(TorchTensorParallelPlugin).as_config()
    launched = variable("distributed_type")
    kind = None if launched is None else _LAUNCHED.get(str(launched.value))
    if kind is not None and _asked_engine(found) is None:
        found[kind] = kind()
    if (
        ParallelismConfig not in found
        and (mesh := ParallelismConfig()).active_mesh_dims
    ):
        found[ParallelismConfig] = mesh
    return found


def _asked_engine(options: Mapping[type, Any]) -> Any:
    """Return the plugin of the engine that the options select, or None."""
    engines = (
        options[kind]
        for kind in _PLUGINS.values()
        if kind in options and kind is not ParallelismConfig
    )
    return next(engines, None)


def chosen_strategy(options: Mapping[type, Any], environment: Environment) -> Any:
    """Return the strategy that the user's options select; ``"auto"`` without options."""
    made = options.get(Strategy)
    others = [
        kind.__name__
        for kind in _PLUGINS.values()
        if kind in options and kind is not Strategy
    ]
    if made is not None and others:
        raise ConfigurationError(
            "the engine is given twice", found=f"strategy= and {', '.join(others)}"
        )
    if made is not None:
        return made
    engine = _asked_engine(options)
    mesh = _mesh(options.get(ParallelismConfig), engine, environment)
    wrapper = options.get(DistributedDataParallelKwargs)
    group = options.get(InitProcessGroupKwargs)
    given = any(one is not None for one in (wrapper, group, engine))
    serves_alone = engine is not None and engine.serves_alone
    if mesh is None and not (given and (environment.launched or serves_alone)):
        return "auto"
    chosen: dict[str, Any] = {}
    if wrapper is not None and engine is None and mesh is None:
        chosen.update(wrapper.arguments())
    if group is not None:
        chosen["process_group_backend"] = group.backend
        if group.timeout is not None:
            chosen["timeout"] = group.timeout
    if mesh is not None:
        return mesh.make_strategy(engine, **chosen)
    if engine is not None:
        return engine.make_strategy(**chosen)
    return STRATEGIES.get("ddp")(**chosen)


def _mesh(
    config: ParallelismConfig | None, engine: Any, environment: Environment
) -> ParallelismConfig | None:
    """Return the configuration of a mesh; None for data parallelism alone."""
    dims = [] if config is None else config.active_mesh_dims
    if config is None or not dims:
        return None
    if engine is not None and not isinstance(engine, FullyShardedDataParallelPlugin):
        raise ConfigurationError(
            "only FSDP divides parameters on a mesh",
            found=f"parallelism_config={config.sizes} and {type(engine).__name__}",
            fix="leave one out; FSDP (dp_shard_size=) divides what the other axes leave",
        )
    resolve_sizes(config.sizes, environment.world_size)
    return None if dims == ["dp_replicate"] and engine is None else config


def chosen_sizes(options: Mapping[type, Any]) -> dict[str, Chosen]:
    """Return the mesh sizes that are not 1, with their origins."""
    config = options.get(ParallelismConfig)
    found: dict[str, Chosen] = {}
    for key in (*MESH_KEYS, "parallelism_config_pp_size"):
        chosen = variable(key)
        size = getattr(config, key.removeprefix("parallelism_config_"), None)
        if size is not None and (chosen is None or str(chosen.value) != str(size)):
            chosen = Chosen(size, "argument")
        if chosen is not None and str(chosen.value) != "1":
            found[key] = chosen
    return found


def named_options(
    options: Mapping[type, Any],
    cpu: bool,
    precision: Any,
    steps: int | None,
    plugin: GradientAccumulationPlugin | None,
    debug: bool | None,
) -> dict[str, Chosen]:
    """Return the options that environment variables may set, with their origins.

    Args:
        options: the user's options by class: DeepSpeed's configuration may set precision and accumulation.
        cpu: an argument of the Accelerator, like those that follow.
        precision: ``mixed_precision``.
        steps: ``gradient_accumulation_steps``.
        plugin: ``gradient_accumulation_plugin``.
        debug: ``debug``.
    """
    engine = _asked_engine(options)
    written = (
        engine.accelerator_arguments() if isinstance(engine, DeepSpeedPlugin) else {}
    )
    precision = written.get("mixed_precision") if precision is None else precision
    steps = written.get("gradient_accumulation_steps") if steps is None else steps
    on_cpu = choose("use_cpu", cpu or None, False)
    debugging = choose("debug", debug, False)
    accumulation = choose(
        "gradient_accumulation_steps", steps if plugin is None else plugin.num_steps, 1
    )
    return {
        "use_cpu": Chosen(is_true(on_cpu.value), on_cpu.origin),
        "mixed_precision": choose("mixed_precision", precision, "no"),
        "gradient_accumulation_steps": Chosen(
            steps_of(accumulation), accumulation.origin
        ),
        "debug": Chosen(is_true(debugging.value), debugging.origin),
    }


def started_strategy(
    options: Mapping[type, Any], on_cpu: bool, environment: Environment
) -> Strategy:
    """Start the strategy that the user's options select, and return it."""
    asked = chosen_strategy(options, environment)
    made = choose_strategy(asked, "cpu" if on_cpu else "auto", "auto", 1, environment)[
        0
    ]
    made.start()
    return made


def made_precision(
    word: Any, strategy: Strategy, options: Mapping[type, Any]
) -> Precision:
    """Return the precision for a name or an object, with the gradient scaler of the user's options."""
    if not isinstance(word, Precision):
        word = word_of(word)
    if isinstance(word, str) and word.lower() == "fp8":
        recipes = [one for kind, one in options.items() if issubclass(kind, FP8Recipe)]
        word = (
            recipes[0] if recipes else launched_recipe() or AORecipeKwargs()
        ).make_precision()
    made = choose_precision(word, None, strategy)
    scaler = options.get(GradScalerKwargs)
    if scaler is not None and made.scales:
        native: Any = made.base if isinstance(made, ConvertedPrecision) else made
        native.scaler = make_scaler(strategy.device.type, **scaler.to_kwargs())
    return made


def made_accumulation(
    plugin: GradientAccumulationPlugin | None,
    steps: int | None,
    chosen: int,
    strategy: Strategy,
    precision: str,
) -> Accumulation:
    """Return the accumulation window that the arguments describe.

    Args:
        plugin: ``gradient_accumulation_plugin`` of the Accelerator.
        steps: ``gradient_accumulation_steps`` of the Accelerator.
        chosen: the number of micro-batches if no plugin sets one.
        strategy: exchanges the gradients.
        precision: the name of the precision.

    Raises:
        ConfigurationError: the arguments contradict each other, or the engine's own configuration.
    """
    if plugin is not None and steps not in (None, 1, plugin.num_steps):
        raise ConfigurationError(
            "accumulation is given twice",
            found=f"gradient_accumulation_steps={steps} and num_steps={plugin.num_steps}",
        )
    if plugin is None:
        plugin = GradientAccumulationPlugin(
            num_steps=micro_batches(chosen, "gradient_accumulation_steps")
        )
    strategy.configure(
        precision=precision, accumulation=plugin.num_steps
    )  # raises an error for contradictions now
    return Accumulation(
        plugin.num_steps,
        strategy.data,
        strategy.losses,
        sync_with_dataloader=plugin.sync_with_dataloader,
        adjust_scheduler=plugin.adjust_scheduler,
        fixed_divisor=plugin.fixed_divisor,
        quiet=without_exchange
        if strategy.world.size > 1 and not plugin.sync_each_batch
        else None,
        complete=strategy.complete_gradients if strategy.completes_gradients else None,
    )


def named_dynamo(backend: str | None) -> TorchDynamoPlugin:
    """Return the options of ``torch.compile`` for a backend; without a backend those of the launcher."""
    if backend is not None:
        return TorchDynamoPlugin(backend=backend)
    names = (
        "backend",
        "mode",
        "use_fullgraph",
        "use_dynamic",
        "use_regional_compilation",
    )
    found = {
        name: chosen.value
        for name in names
        if (chosen := variable(f"dynamo_{name}")) is not None
    }
    return TorchDynamoPlugin(
        backend=str(found.get("backend", "no")).lower(),
        mode=found.get("mode"),
        fullgraph=is_true(found.get("use_fullgraph")),
        dynamic=is_true(found["use_dynamic"]) if "use_dynamic" in found else None,
        use_regional_compilation=is_true(found.get("use_regional_compilation")),
    )


def named_loaders(
    config: DataLoaderConfiguration | None, split_batches: bool
) -> DataLoaderConfiguration:
    """Return the configuration of loaders.

    Raises:
        ConfigurationError: the arguments contradict each other.
    """
    if config is not None and split_batches and not config.split_batches:
        raise ConfigurationError(
            "split_batches is given twice",
            found="split_batches=True, and a dataloader_config without it",
            fix="pass DataLoaderConfiguration(split_batches=True) only",
        )
    return config or DataLoaderConfiguration(split_batches=split_batches)


def named_trackers(given: Any) -> list[Any]:
    """Return the trackers of ``log_with``, as names and objects; ``"all"`` becomes the names of installed trackers."""
    words = [
        word_of(one) if isinstance(one, (str, Enum)) else one for one in as_list(given)
    ]
    if "all" not in words:
        return words
    objects = [one for one in words if not isinstance(one, str)]
    installed = [
        name for name in _IF_INSTALLED if importlib.util.find_spec(name) is not None
    ]
    named = (word for word in words if isinstance(word, str) and word != "all")
    return [*objects, *dict.fromkeys([*named, *_EVERYWHERE, *installed])]


def named_project(
    configuration: ProjectConfiguration | None, directory: str | os.PathLike[str] | None
) -> ProjectConfiguration:
    """Return the configuration of the project's directories."""
    project = configuration or ProjectConfiguration(project_dir=directory)
    if directory is not None and project.project_dir is None:
        project.set_directories(directory)
    return project


def started_watchdog(
    timeout: Any,
    processes: AcceleratorProcesses,
    accumulation: Accumulation,
    project: ProjectConfiguration,
    note: Callable[[str, str], Any],
) -> HangWatchdog | None:
    """Start the hang watchdog; return None for a single process, without a store, or if processes have other tasks."""
    seconds, calls = chosen_timeout(timeout), processes.calls
    if not processes.use_distributed or not dist.is_initialized():
        return None
    if TorchCollective.manages_default_group or not processes.spans_world:
        return None

    def progress() -> tuple[int, Any]:
        return accumulation.taken, (accumulation.turn, calls.count)

    rank, size, say = (
        processes.process_index,
        processes.num_processes,
        processes.print_everywhere,
    )
    watchdog = HangWatchdog(
        *(rank, size, seconds, progress, lambda: Path(project.project_dir or "."), say),
        advice=f"; {ADVICE}",
        note=note,
    )
    stop_at_exit(watchdog)
    return watchdog
