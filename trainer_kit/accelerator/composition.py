"""Resolve the arguments of an `Accelerator`: strategy, precision, accumulation, options, and their origins."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar
from weakref import ref

from torch import distributed as dist

from trainer_kit.accelerator.accumulation import Accumulation
from trainer_kit.accelerator.joint_calls import ADVICE
from trainer_kit.accelerator.processes import AcceleratorProcesses
from trainer_kit.accelerator.trackers import Tracker
from trainer_kit.accelerator.wrapping import without_exchange
from trainer_kit.build import choose_precision, choose_strategy
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
from trainer_kit.core.types import Keywords
from trainer_kit.core.wings import has_wing
from trainer_kit.hang.hang_timeout import chosen_timeout
from trainer_kit.hang.hang_watchdog import HangWatchdog, stop_at_exit
from trainer_kit.launch import report_errors
from trainer_kit.loggers.table import LOGGER_ROWS
from trainer_kit.options.deepspeed import DeepSpeedPlugin
from trainer_kit.options.fp8 import AORecipeKwargs, FP8Recipe, launched_recipe
from trainer_kit.options.megatron import MegatronLMPlugin
from trainer_kit.options.parallelism import ParallelismConfig, TorchTensorParallelPlugin
from trainer_kit.options.records import (
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
from trainer_kit.precision.converted import ConvertedPrecision
from trainer_kit.precision.native import make_scaler
from trainer_kit.precision.precision import Precision
from trainer_kit.strategies.launcher_options import MESH_KEYS
from trainer_kit.strategies.mesh_layout import resolve_sizes
from trainer_kit.strategies.strategy import Strategy

__all__ = [
    "HangTimeout",
    "Options",
    "chosen_sizes",
    "chosen_strategy",
    "engine_arguments",
    "find_option",
    "named_dynamo",
    "named_loaders",
    "named_options",
    "named_project",
    "named_trackers",
    "plugins",
    "resolve_accumulation",
    "resolve_precision",
    "started_strategy",
    "started_watchdog",
]

HangTimeout: TypeAlias = float | str | bool | None
"""Seconds, a duration such as ``"5min"``, False to report only, or None for the default."""
Options: TypeAlias = dict[type, Any]
"""Option records by their class: plugins of engines, and handlers such as `GradScalerKwargs`."""

_T = TypeVar("_T")

# `_selected_engine` returns the first of these that is given.
_PLUGINS: Final[dict[str, type]] = {
    "fsdp_plugin": FullyShardedDataParallelPlugin,
    "megatron_lm_plugin": MegatronLMPlugin,
    "parallelism_config": ParallelismConfig,
    "torch_tp_plugin": TorchTensorParallelPlugin,
    "deepspeed_plugin": DeepSpeedPlugin,
    "strategy": Strategy,
}

# Plugins by the launcher's names; DeepSpeed's plugin is passed with the other DeepSpeed plugins.
_LAUNCHED: Final[dict[str, type]] = {
    "FSDP": FullyShardedDataParallelPlugin,
    "MEGATRON_LM": MegatronLMPlugin,
}


def find_option(options: Options, kind: type[_T]) -> _T | None:
    """Return the record of a class, or None."""
    return options.get(kind)


def engine_arguments(arguments: Mapping[str, Any]) -> Keywords:
    """Check an Accelerator's arguments, and return those for engines, by name.

    Args:
        arguments: all arguments; ``unknown`` has those that no Accelerator takes.

    Raises:
        ConfigurationError: a value has the wrong type.
        TypeError: an argument is unknown.
    """
    check_arguments(arguments)
    names = [name for name in arguments if name not in ("self", "unknown")]
    for name in arguments["unknown"]:
        fix = did_you_mean(name, names)
        raise TypeError(f"Accelerator got an unexpected argument {name!r}: {fix}")
    return {name: arguments[name] for name in (*_PLUGINS, "deepspeed_plugins")}


def plugins(
    arguments: Mapping[str, object], deepspeed: Mapping[str, DeepSpeedPlugin]
) -> Options:
    """Return the engine plugins by class: from an Accelerator's arguments, else from its launcher.

    Args:
        arguments: by name.
        deepspeed: DeepSpeed plugins by name, with the launcher's; the first one is used.

    Raises:
        ConfigurationError: an option is set twice, or is none of its kind.
    """
    arguments = {
        **arguments,
        "deepspeed_plugin": next(iter(deepspeed.values()), None),
        "deepspeed_plugins": None,
    }
    by_class: dict[type, Any] = {}
    for name, value in arguments.items():
        if value is not None:
            check_kind(name, value, _PLUGINS[name])
            by_class[_PLUGINS[name]] = value
    if TorchTensorParallelPlugin in by_class:
        if ParallelismConfig in by_class:
            raise ConfigurationError(
                "tensor parallelism is set twice",
                found="torch_tp_plugin, parallelism_config",
            )
        # From here on only the configuration is read: this plugin is one axis of it.
        tensor_parallel = by_class.pop(TorchTensorParallelPlugin)
        by_class[ParallelismConfig] = tensor_parallel.as_config()
    # The launcher's engine is used only if the script names none.
    launched = variable("distributed_type")
    kind = None if launched is None else _LAUNCHED.get(str(launched.value))
    if kind is not None and _selected_engine(by_class) is None:
        by_class[kind] = kind()
    if ParallelismConfig not in by_class:
        # Without arguments it has the launcher's sizes.
        mesh = ParallelismConfig()
        if mesh.active_mesh_dims:
            by_class[ParallelismConfig] = mesh
    return by_class


def _selected_engine(options: Options) -> Any:
    """Return the plugin of the engine that the options select, or None."""
    for kind in _PLUGINS.values():
        if kind in options and kind is not ParallelismConfig:
            return options[kind]
    return None


def chosen_strategy(options: Options, environment: Environment) -> Any:
    """Return the strategy that the user's options select; ``"auto"`` without options."""
    strategy = options.get(Strategy)
    if strategy is not None:
        _refuse_plugins(options)
        return strategy
    engine = _selected_engine(options)
    mesh = _mesh(options.get(ParallelismConfig), engine, environment)
    wrapper = options.get(DistributedDataParallelKwargs)
    group = options.get(InitProcessGroupKwargs)
    if mesh is None:
        # Options of wrappers and groups have no effect in a single process. DeepSpeed and Megatron (`serves_alone`)
        # change how a single process trains, too.
        if wrapper is None and group is None and engine is None:
            return "auto"
        serves_alone = engine is not None and engine.serves_alone
        if not environment.launched and not serves_alone:
            return "auto"
    arguments: Keywords = {}
    # Engines and meshes do not wrap models in DDP.
    if wrapper is not None and engine is None and mesh is None:
        arguments.update(wrapper.arguments())
    if group is not None:
        arguments["process_group_backend"] = group.backend
        if group.timeout is not None:
            arguments["timeout"] = group.timeout
    if mesh is not None:
        return mesh.make_strategy(engine, **arguments)
    if engine is not None:
        return engine.make_strategy(**arguments)
    return STRATEGIES.get("ddp")(**arguments)


def _refuse_plugins(options: Options) -> None:
    engines = [kind for kind in _PLUGINS.values() if kind is not Strategy]
    names = [kind.__name__ for kind in engines if kind in options]
    if names:
        raise ConfigurationError(
            "the engine is set twice", found=f"strategy= and {', '.join(names)}"
        )


def _mesh(
    config: ParallelismConfig | None, engine: object, environment: Environment
) -> ParallelismConfig | None:
    """Return the configuration of a mesh; None for data parallelism alone."""
    dims = [] if config is None else config.active_mesh_dims
    if config is None or not dims:
        return None
    if engine is not None and not isinstance(engine, FullyShardedDataParallelPlugin):
        raise ConfigurationError(
            "only FSDP shards parameters on a mesh",
            found=f"parallelism_config={config.sizes} and {type(engine).__name__}",
            fix="leave one out; FSDP (dp_shard_size=) shards over the ranks that the other axes leave",
        )
    # Only for its errors: sizes that do not fit the number of processes are refused before the strategy is made.
    resolve_sizes(config.sizes, environment.world_size)
    # A mesh of replicas alone is DDP.
    if dims == ["dp_replicate"] and engine is None:
        return None
    return config


def chosen_sizes(options: Options) -> dict[str, Chosen]:
    """Return the mesh sizes that are not 1, with their origins."""
    config = options.get(ParallelismConfig)
    sizes: dict[str, Chosen] = {}
    for key in (*MESH_KEYS, "parallelism_config_pp_size"):
        launched = variable(key)
        size = getattr(config, key.removeprefix("parallelism_config_"), None)
        option = launched
        # A configuration without arguments has read the launcher's sizes, so an equal size came from the launcher.
        if size is not None and not _has_value(launched, size):
            option = Chosen(size, "argument")
        if option is not None and not _has_value(option, 1):
            sizes[key] = option
    return sizes


def _has_value(option: Chosen | None, value: object) -> bool:
    # As text: variables of the environment are not numbers yet.
    return option is not None and str(option.value) == str(value)


def named_options(
    options: Options,
    cpu: bool,
    precision: str | Precision | None,
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
    engine = _selected_engine(options)
    configured: Keywords = {}
    if isinstance(engine, DeepSpeedPlugin):
        configured = engine.accelerator_arguments()
    if precision is None:
        precision = configured.get("mixed_precision")
    if plugin is not None:
        steps = plugin.num_steps
    elif steps is None:
        steps = configured.get("gradient_accumulation_steps")
    # False is the default of the argument, so it does not override the environment.
    on_cpu = choose("use_cpu", cpu or None, False)
    debugging = choose("debug", debug, False)
    accumulation = choose("gradient_accumulation_steps", steps, 1)
    return {
        "use_cpu": replace(on_cpu, value=is_true(on_cpu.value)),
        "mixed_precision": choose("mixed_precision", precision, "no"),
        "gradient_accumulation_steps": replace(
            accumulation, value=steps_of(accumulation)
        ),
        "debug": replace(debugging, value=is_true(debugging.value)),
    }


def started_strategy(
    options: Options, on_cpu: bool, environment: Environment
) -> Strategy:
    """Start the strategy that the user's options select, and return it."""
    # First: a rank may fail where it joins the others.
    if environment.launched:
        report_errors()
    selected = chosen_strategy(options, environment)
    device = "auto"
    if on_cpu:
        device = "cpu"
    strategy, *_ = choose_strategy(selected, device, "auto", 1, environment)
    strategy.start()
    return strategy


def resolve_precision(
    precision: str | Precision | None, strategy: Strategy, options: Options
) -> Precision:
    """Return the precision for a name or an object, with the gradient scaler of the user's options."""
    if not isinstance(precision, Precision):
        precision = word_of(precision)
    if isinstance(precision, str) and precision.lower() == "fp8":
        precision = _fp8_recipe(options).make_precision()
    composed = choose_precision(precision, None, strategy)
    scaler_options = options.get(GradScalerKwargs)
    if scaler_options is not None and composed.scales:
        native: Any = composed
        # A converted precision (fp8) computes in another one, which scales the loss.
        if isinstance(composed, ConvertedPrecision):
            native = composed.base
        native.scaler = make_scaler(strategy.device.type, **scaler_options.to_kwargs())
    return composed


def _fp8_recipe(options: Options) -> FP8Recipe:
    for kind, option in options.items():
        if issubclass(kind, FP8Recipe):
            recipe: FP8Recipe = option
            return recipe
    return launched_recipe() or AORecipeKwargs()


def resolve_accumulation(
    plugin: GradientAccumulationPlugin | None,
    steps: int | None,
    default_steps: int,
    strategy: Strategy,
    precision: str,
) -> Accumulation:
    """Return the accumulation window that the arguments describe.

    Args:
        plugin: ``gradient_accumulation_plugin`` of the Accelerator.
        steps: ``gradient_accumulation_steps`` of the Accelerator.
        default_steps: the number of micro-batches if no plugin sets one.
        strategy: exchanges the gradients.
        precision: the name of the precision.

    Raises:
        ConfigurationError: the arguments contradict each other, or the engine's own configuration.
    """
    if plugin is not None and steps not in (None, 1, plugin.num_steps):
        raise ConfigurationError(
            "accumulation is set twice",
            found=f"gradient_accumulation_steps={steps} and num_steps={plugin.num_steps}",
        )
    if plugin is None:
        plugin = GradientAccumulationPlugin(
            num_steps=micro_batches(default_steps, "gradient_accumulation_steps")
        )
    # A contradiction with the engine's own configuration is an error here.
    strategy.configure(precision=precision, accumulation=plugin.num_steps)
    complete = None
    # None where the backward itself exchanges gradients: steps then make no call for it.
    if strategy.completes_gradients:
        complete = strategy.complete_gradients
    quiet = None
    # Without it every micro-batch exchanges gradients, as `sync_each_batch` asks for; a single process exchanges none.
    if strategy.world.size > 1 and not plugin.sync_each_batch:
        quiet = without_exchange
    return Accumulation(
        plugin.num_steps,
        strategy.data,
        strategy.losses,
        sync_with_dataloader=plugin.sync_with_dataloader,
        adjust_scheduler=plugin.adjust_scheduler,
        fixed_divisor=plugin.fixed_divisor,
        quiet=quiet,
        complete=complete,
    )


def named_dynamo(backend: str | None) -> TorchDynamoPlugin:
    """Return the options of ``torch.compile`` for a backend; without a backend those of the launcher."""
    if backend is not None:
        return TorchDynamoPlugin(backend=backend)
    backend = _dynamo_variable("backend")
    dynamic = _dynamo_variable("use_dynamic")
    return TorchDynamoPlugin(
        backend="no" if backend is None else str(backend).lower(),
        mode=_dynamo_variable("mode"),
        fullgraph=is_true(_dynamo_variable("use_fullgraph")),
        dynamic=None if dynamic is None else is_true(dynamic),
        use_regional_compilation=is_true(_dynamo_variable("use_regional_compilation")),
    )


def _dynamo_variable(name: str) -> Any:
    option = variable(f"dynamo_{name}")
    return None if option is None else option.value


def named_loaders(
    config: DataLoaderConfiguration | None, split_batches: bool
) -> DataLoaderConfiguration:
    """Return the configuration of loaders.

    Raises:
        ConfigurationError: the arguments contradict each other.
    """
    if config is not None and split_batches and not config.split_batches:
        raise ConfigurationError(
            "split_batches is set twice",
            found="split_batches=True, and a dataloader_config without it",
            fix="pass DataLoaderConfiguration(split_batches=True) only",
        )
    return config or DataLoaderConfiguration(split_batches=split_batches)


def named_trackers(log_with: object) -> list[str | Tracker]:
    """Return the trackers of ``log_with``, as names and objects; ``"all"`` becomes the names of installed trackers."""
    trackers = []
    for tracker in as_list(log_with):
        is_name = isinstance(tracker, (str, Enum))
        trackers.append(word_of(tracker) if is_name else tracker)
    if "all" not in trackers:
        return trackers
    objects = [tracker for tracker in trackers if not isinstance(tracker, str)]
    names = [name for name in trackers if isinstance(name, str) and name != "all"]
    for row in LOGGER_ROWS:
        # Found without being imported, which takes seconds for some trackers.
        is_installed = row.package and importlib.util.find_spec(row.package)
        if row.in_directory or is_installed:
            names.append(row.names[0])
    # A tracker that is named next to "all" is started once.
    return [*objects, *dict.fromkeys(names)]


def named_project(
    configuration: ProjectConfiguration | None, directory: str | os.PathLike[str] | None
) -> ProjectConfiguration:
    """Return the configuration of the project's directories."""
    project = configuration or ProjectConfiguration(project_dir=directory)
    if directory is not None and project.project_dir is None:
        project.set_directories(directory)
    return project


def _have_different_tasks() -> bool:
    """Whether Lightning's collectives joined the world, as in programs whose processes have different tasks."""
    if not has_wing("compat"):
        return False
    from trainer_kit.compat.torch_collective import TorchCollective

    return TorchCollective.manages_default_group


def _report_steps(accumulation: Accumulation, environment: Environment) -> None:
    """Let the report of an exception that ends this rank say in which step it was raised."""
    # Weak, for the reports stay until the process ends, and this object knows the user's models.
    newest = ref(accumulation)

    def position() -> str:
        counts = newest()
        if counts is None:
            return ""
        return f"step {counts.optimizer_steps}"

    if environment.launched:
        report_errors(position)


def started_watchdog(
    timeout: HangTimeout,
    processes: AcceleratorProcesses,
    accumulation: Accumulation,
    project: ProjectConfiguration,
    note: Callable[[str, str], object],
) -> HangWatchdog | None:
    """Watch the steps of this loop: an error says in which one it was raised, and a watchdog finds hangs.

    Returns:
        The watchdog; None for a single process, without a store, or if processes have other tasks.
    """
    _report_steps(accumulation, processes.environment)
    seconds = chosen_timeout(timeout)
    if not processes.use_distributed or not dist.is_initialized():
        return None
    # A process with another task does not run this loop, so its missing progress is no hang.
    if _have_different_tasks() or not processes.spans_world:
        return None
    calls = processes.calls

    def progress() -> tuple[int, tuple[int, int]]:
        return accumulation.optimizer_steps, (accumulation.turn, calls.count)

    # A function, because scripts may set the project's directory later.
    def directory() -> Path:
        return Path(project.project_dir or ".")

    watchdog = HangWatchdog(
        processes.process_index,
        processes.num_processes,
        seconds,
        progress,
        directory,
        processes.print_everywhere,
        advice=f"; {ADVICE}",
        note=note,
    )
    stop_at_exit(watchdog)
    return watchdog
