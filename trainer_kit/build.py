"""Creates strategy, precision, loggers and callbacks from the user's arguments, for Trainer and Accelerator.

No other module interprets these arguments, or inspects the type of such an object.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

import torch

from trainer_kit import callbacks
from trainer_kit.core.arguments import as_list
from trainer_kit.core.configuration_sources import (
    Chosen,
    choose,
    is_true,
    steps_of,
    variable,
)
from trainer_kit.core.display import plural
from trainer_kit.core.environment import Environment, count_devices, pick_device
from trainer_kit.core.errors import ConfigurationError, PrecisionError, StrategyError
from trainer_kit.core.hooks import Callback
from trainer_kit.core.location import is_url
from trainer_kit.core.progress import Duration
from trainer_kit.core.protocols import Logger, SetsAccumulation
from trainer_kit.core.registry import LOGGERS, PRECISIONS, STRATEGIES
from trainer_kit.core.signatures import check_overrides
from trainer_kit.core.types import Function, Keywords, LoggerLike
from trainer_kit.core.wings import has_wing, need_wing
from trainer_kit.loggers.table import LOGGER_ROWS
from trainer_kit.precision.aliases import WORDS, make_precision
from trainer_kit.precision.precision import Precision
from trainer_kit.strategies.single import SingleDeviceStrategy
from trainer_kit.strategies.strategy import Strategy

if TYPE_CHECKING:
    from trainer_kit.compat.accelerators import LightningAccelerator

__all__ = [
    "STRATEGY_REGISTRY",
    "StrategyRegistry",
    "accelerator_word",
    "adapt_callbacks",
    "added_callbacks",
    "choose_loggers",
    "choose_precision",
    "choose_strategy",
    "launched_on_xla",
    "make_strategy",
    "refuse_checkpoint_io",
    "sharded_alternative",
    "with_launchers",
    "writes_checkpoints",
]

_Devices: TypeAlias = int | str | Sequence[int]
"""The number of devices on each node, their indices, or a word for them."""
_DDP = "trainer_kit.strategies.ddp:DDPStrategy"
_FSDP = "trainer_kit.strategies.fsdp:FSDPStrategy"
_DEEPSPEED = "trainer_kit.strategies.deepspeed.strategy:DeepSpeedStrategy"
_MESH = "trainer_kit.strategies.mesh:MeshStrategy"
_OPTIONS: dict[str, Keywords] = {
    **{f"deepspeed_stage_{stage}": {"stage": stage} for stage in (0, 1, 2, 3)},
    "deepspeed_stage_2_offload": {"stage": 2, "offload_optimizer": True},
    "deepspeed_stage_3_offload": {
        "stage": 3,
        "offload_optimizer": True,
        "offload_parameters": True,
    },
    "ddp_find_unused_parameters_true": {"find_unused_parameters": True},
    "ddp_find_unused_parameters_false": {"find_unused_parameters": False},
    "ddp_static_graph": {"static_graph": True},
    "hsdp": {"sharding_strategy": "HYBRID_SHARD"},
    "fsdp_shard_grad_op": {"sharding_strategy": "SHARD_GRAD_OP"},
    "fsdp_cpu_offload": {"cpu_offload": True},
    "tp": {"dp_shard": 1, "tp": -1},
    "tensor_parallel": {"dp_shard": 1, "tp": -1},
    "pp": {"dp_shard": 1, "pp": -1},
    "pipeline_parallel": {"dp_shard": 1, "pp": -1},
    "cp": {"dp_shard": 1, "cp": -1},
    "context_parallel": {"dp_shard": 1, "cp": -1},
}
"""For each word, the options of its strategy."""
# Keys are the first part of a word: "ddp_static_graph" is DDP. A word without an entry here is a mesh.
_CLASSES = {"ddp": _DDP, "deepspeed": _DEEPSPEED, "fsdp": _FSDP, "hsdp": _FSDP}
_FORKED = ("ddp_notebook", "ddp_fork", "ddp_spawn")
# Import paths instead of classes: a strategy's module is imported when its word is used, and DeepSpeed's takes seconds.
for _word in ("ddp", *_FORKED, "deepspeed", "fsdp", "fsdp_full_shard", *_OPTIONS):
    STRATEGIES.supply(_word, _CLASSES.get(_word.split("_")[0], _MESH))
_XLA = ("xla", "tpu", "xla_fsdp")
for _word in _XLA:
    STRATEGIES.supply(_word, "trainer_kit.strategies.xla.strategy:XLAStrategy")
STRATEGIES.supply("mesh", _MESH)
STRATEGIES.supply(
    "megatron", "trainer_kit.strategies.megatron.strategy:MegatronStrategy"
)
STRATEGIES.supply("single_device", "trainer_kit.strategies.single:SingleDeviceStrategy")
for _row in LOGGER_ROWS:
    for _word in _row.names:
        LOGGERS.supply(_word, f"trainer_kit.loggers:{_row.class_name}")


def with_launchers(
    accelerator: str,
    precision: Any,
    accumulation: Any,
    user_callbacks: Sequence[object],
) -> tuple[str, Any, Any, dict[str, Chosen]]:
    """Fill in three arguments of the Trainer from the launcher or the environment; return them and their origins.

    Args:
        accelerator: the user's argument, or ``"auto"``.
        precision: the user's argument, or None.
        accumulation: the user's argument, or None.
        user_callbacks: one that sets the accumulation counts as an argument.
    """
    argument = accumulation
    # A callback counts as an argument: otherwise the launcher's value would add a second accumulation beside it.
    for callback in user_callbacks:
        if argument is None and isinstance(callback, SetsAccumulation):
            argument = callback
    origins = {
        "accelerator": _choose_accelerator(accelerator),
        "precision": choose("mixed_precision", precision, None),
        "accumulate_grad_batches": choose("gradient_accumulation_steps", argument, 1),
    }
    steps = origins["accumulate_grad_batches"]
    if steps.origin != "argument":
        accumulation = steps_of(steps)
    elif accumulation is None:
        # A callback sets it.
        accumulation = 1
    accelerator_word = str(origins["accelerator"].value)
    return accelerator_word, origins["precision"].value, accumulation, origins


def _choose_accelerator(accelerator: str) -> Chosen:
    on_cpu = choose("use_cpu", None, False)
    if accelerator != "auto":
        return Chosen(accelerator, "argument")
    if is_true(on_cpu.value):
        return Chosen("cpu", on_cpu.origin)
    return Chosen("auto", "default")


def choose_strategy(
    strategy: object,
    accelerator: str,
    devices: _Devices,
    num_nodes: int,
    environment: Environment,
) -> tuple[Strategy, int, str | None]:
    """Choose the strategy, the number of processes on this node, and how to start them.

    Args:
        strategy: a registered word, a strategy object, or ``"auto"``: data parallel if there are several processes.
        accelerator: ``"auto"``, ``"cpu"``, ``"gpu"``, or a device type of torch.
        devices: the number of devices on each node, or their indices.
        num_nodes: the number of machines.
        environment: the environment of this process.

    Returns:
        The strategy; processes on this node; and None (run here), ``"agent"`` or ``"fork"``.
    """
    # Before devices are counted: torch does not list those of torch_xla.
    xla_strategy = _strategy_of_xla(strategy, accelerator)
    if xla_strategy is not None:
        return xla_strategy, 1, None
    processes = _count_processes(devices, accelerator, num_nodes, environment)
    _check_single_device(strategy, processes.world_size)
    device = pick_device(accelerator, environment.local_rank, devices)
    training_strategy = _resolve_strategy(strategy, processes.world_size, device)
    # Ranks of a launcher are other processes even where each of them has a world of one.
    may_be_alone = processes.train_alone or not environment.launched
    if strategy != "auto" and training_strategy.needs_processes and may_be_alone:
        # A single process needs no communication.
        if processes.world_size == 1:
            training_strategy = make_strategy("single_device", device)
    # A strategy object was created before this process knew its rank, so its device is only a default.
    training_strategy.use_device(device)
    launch = _choose_launch(strategy, processes.on_node, environment)
    return training_strategy, processes.on_node, launch


@final
@dataclass(frozen=True)
class _Processes:
    """The processes of a run.

    Attributes:
        on_node: how many on this node.
        world_size: how many take part in one training.
        train_alone: whether a launcher has started several, each of which trains on one device by itself.
    """

    on_node: int
    world_size: int
    train_alone: bool


def _count_processes(
    devices: _Devices, accelerator: str, num_nodes: int, environment: Environment
) -> _Processes:
    """Count the processes; raises for a number that the launcher has not started."""
    on_node = count_devices(devices, accelerator)
    requested = on_node * num_nodes
    if not environment.launched:
        if num_nodes > 1:
            raise StrategyError(
                "a run on several machines needs a launcher on each of them",
                found=f"num_nodes={num_nodes} in a process without a rank",
                fix=f"torchrun --nnodes {num_nodes} --nproc-per-node {on_node} ... train.py",
            )
        return _Processes(on_node, requested, train_alone=False)
    # With devices="auto" the launcher's number counts. One device in each of several launched processes is a run of its
    # own in each.
    # -1 and "-1" are Lightning's words for all devices.
    is_explicit = devices not in ("auto", -1, "-1")
    if is_explicit and on_node == 1 and environment.local_world_size > 1:
        return _Processes(on_node, requested, train_alone=True)
    if is_explicit and requested != environment.world_size:
        raise StrategyError(
            "the number of launched processes is not the requested number",
            found=f"{environment.world_size} ({environment.source}), devices={devices!r}, num_nodes={num_nodes}",
            fix=f"pass devices={environment.world_size // max(1, num_nodes)}, or leave devices out",
        )
    return _Processes(on_node, environment.world_size, train_alone=False)


def _check_single_device(strategy: object, world_size: int) -> None:
    """Raise for sizes that do not fit, before any process is started."""
    # Words take their sizes from the world; only an object can have sizes that contradict it.
    if isinstance(strategy, Strategy):
        strategy.places(world_size)
    is_single = isinstance(strategy, SingleDeviceStrategy)
    is_single = is_single or strategy == "single_device"
    if is_single and world_size > 1:
        raise StrategyError(
            "one device cannot hold several processes",
            found=plural(world_size, "process"),
            fix='use strategy="ddp"',
        )


def _resolve_strategy(
    strategy: object, world_size: int, device: torch.device
) -> Strategy:
    """The strategy of a word or an object."""
    resolved: object = strategy
    if strategy == "auto":
        resolved = _make_auto(world_size, device)
    elif isinstance(strategy, str):
        resolved = make_strategy(strategy, device)
    if not isinstance(resolved, Strategy):
        raise StrategyError(
            "this is not a strategy",
            found=f"strategy={strategy!r}",
            fix="pass a string such as 'ddp', or an object of a subclass of trainer_kit.strategies.Strategy",
        )
    # Otherwise a misspelled hook of a user's strategy would never be called, without an error.
    check_overrides(type(resolved), Strategy)
    return resolved


def _make_auto(world_size: int, device: torch.device) -> Strategy:
    """The launcher's engine, else data parallel if there are several processes."""
    engine = variable("distributed_type")
    name = ""
    if engine is not None:
        name = str(engine.value)
    launched = _strategy_of_launcher(name, world_size, device)
    if launched is not None:
        return launched
    if world_size > 1:
        return make_strategy("ddp", device)
    return make_strategy("single_device", device)


def _choose_launch(
    strategy: object, processes: int, environment: Environment
) -> str | None:
    """How this process starts the ranks; None: it is one."""
    if environment.launched:
        return None
    # Lightning's words for notebooks: a fork has the classes of the notebook's cells, which no new process can import.
    if isinstance(strategy, str) and strategy in _FORKED:
        return "fork"
    if processes > 1:
        return "agent"
    return None


def sharded_alternative(word: object, strategy: Strategy) -> Strategy | None:
    """What replaces ``strategy`` for ``"auto"`` if the model does not fit; None: it is final."""
    # An engine that the launcher has selected stays, whatever fits.
    if word != "auto" or strategy.engine != "ddp":
        return None
    return make_strategy("fsdp", strategy.device)


def _strategy_of_xla(strategy: object, accelerator: str) -> Strategy | None:
    """The strategy, if it finds its own devices, which torch does not list as an accelerator; else None."""
    if strategy == "auto" and accelerator == "auto" and launched_on_xla():
        accelerator = "tpu"
    # A torch that lists the TPU drives it as any other accelerator.
    if strategy == "auto" and accelerator == "tpu" and _torch_lists_tpu():
        return None
    xla_strategy: Strategy | None = None
    if isinstance(strategy, str) and strategy in _XLA:
        xla_strategy = STRATEGIES.get(strategy)(shard_parameters=strategy == "xla_fsdp")
    elif strategy == "auto" and accelerator.lower() in _XLA:
        xla_strategy = STRATEGIES.get("xla")()
    elif isinstance(strategy, Strategy) and strategy.finds_devices:
        xla_strategy = strategy
    # Refused here with a fix; the strategy would fail with a bare ModuleNotFoundError once it imports torch_xla.
    if xla_strategy is not None and importlib.util.find_spec("torch_xla") is None:
        raise StrategyError(
            "torch_xla is not installed",
            found=f"strategy={strategy!r}, accelerator={accelerator!r}",
            fix="pip install torch_xla, in the version that matches this torch",
        )
    return xla_strategy


def _torch_lists_tpu() -> bool:
    device = torch.accelerator.current_accelerator()
    return device is not None and device.type == "tpu"


def launched_on_xla() -> bool:
    """Whether the launcher names XLA, or torch_xla started this process."""
    engine = variable("distributed_type")
    named = engine is not None and str(engine.value).lower() in _XLA
    # torch_xla's own launcher (`torch_xla.launch`) sets this variable and none of the variables of this library.
    return named or "PJRT_LOCAL_PROCESS_RANK" in os.environ


def _strategy_of_launcher(
    engine: str, world_size: int, device: torch.device
) -> Strategy | None:
    """The strategy of the engine that the launcher selects, with the launcher's options; None: it selects none."""
    from trainer_kit.strategies import launcher_options

    # The engines read options of their own; a mesh is selected by its sizes alone.
    if engine == "MEGATRON_LM":
        from trainer_kit.strategies.megatron import config as megatron_config

        options = megatron_config.from_launcher(_launcher_options(megatron_config.KEYS))
        return _registered("megatron", device, options)
    fsdp = None
    if engine == "FSDP":
        fsdp = launcher_options.fsdp_from_launcher(
            _launcher_options(launcher_options.FSDP_KEYS)
        )
    mesh = launcher_options.mesh_from_launcher(
        _launcher_options(launcher_options.MESH_KEYS), fsdp
    )
    if mesh:
        return _registered("mesh", device, mesh)
    if engine == "DEEPSPEED":
        from trainer_kit.strategies.deepspeed import config as deepspeed_config

        options = deepspeed_config.from_launcher(
            _launcher_options(deepspeed_config.KEYS)
        )
        return _registered("deepspeed", device, options)
    # A configuration file made for several GPUs may start one process, which has nothing to shard.
    if fsdp is not None and world_size > 1:
        return _registered("fsdp", device, fsdp)
    return None


def _registered(
    word: str, device: torch.device | str, options: Mapping[str, object]
) -> Strategy:
    strategy: Strategy = STRATEGIES.get(word)(device, **options)
    return strategy


def _launcher_options(names: Iterable[str]) -> dict[str, str]:
    """The launcher's values of these options."""
    options = {}
    for name in names:
        choice = variable(name)
        if choice is not None:
            options[name] = str(choice.value)
    return options


@final
class StrategyRegistry:
    """Lightning's registry of strategies: the words of ``Trainer(strategy=...)``.

    Example:
        >>> "fsdp" in STRATEGY_REGISTRY, STRATEGY_REGISTRY.get("ddp_find_unused_parameters_true").name
        (True, 'ddp')
    """

    def __contains__(self, name: object) -> bool:
        return name in STRATEGIES.names()

    def available_strategies(self) -> list[str]:
        """All words, sorted."""
        return STRATEGIES.names()

    def get(self, name: str, default: Any = None) -> Any:
        """A strategy of this word.

        Raises:
            KeyError: there is none, and no default.
        """
        if name in self:
            # The device is a placeholder: the Trainer moves each strategy object to this process's device.
            return make_strategy(name, "cpu")
        if default is not None:
            return default
        raise KeyError(
            f"no strategy is called {name!r}; available: {', '.join(self.available_strategies())}"
        )

    def register(
        self,
        name: str,
        strategy: Function | None = None,
        description: str = "",
        override: bool = False,
        **init_params: object,
    ) -> Function:
        """Register a subclass of `Strategy` under a word; without a class, return a decorator that does.

        Args:
            name: the word.
            strategy: the class, whose first argument is the device.
            description: accepted for compatibility with Lightning.
            override: replace an existing word.
            init_params: further arguments of the class.

        Raises:
            RegistryError: the word is taken.
        """

        def decorate(cls: Function) -> Function:
            factory = cls
            if init_params:
                factory = partial(cls, **init_params)
            STRATEGIES.register(name, factory, overwrite=override)
            return cls

        if strategy is None:
            return decorate
        return decorate(strategy)


STRATEGY_REGISTRY: Final = StrategyRegistry()


def make_strategy(word: str, device: torch.device | str) -> Strategy:
    """The strategy of a registered word, with the options of that word."""
    return _registered(word, device, _OPTIONS.get(word, {}))


def choose_precision(
    precision: object, plugins: object, strategy: Strategy
) -> Precision:
    """Create the precision for a word of Lightning or Accelerate, a registered name, or an object.

    Args:
        precision: one of those, or None for float32.
        plugins: a precision object, or several, in place of ``precision``.
        strategy: the strategy that it must work with.

    Raises:
        PrecisionError: the word is unknown, or the precision does not work with the strategy.
    """
    for plugin in as_list(plugins):
        if not isinstance(plugin, Precision):
            raise ConfigurationError(
                "this plugin is not a precision",
                found=type(plugin).__name__,
                fix="plugins= takes precision objects; everything else has its own argument",
            )
        if precision is not None:
            raise ConfigurationError(
                "precision is set twice",
                found=f"precision={precision!r} and plugins=...",
            )
        precision = plugin
    if precision is None:
        precision = "32-true"
    plugin = _make_precision(precision, strategy.device.type)
    strategy.check_precision(plugin)
    return plugin


def _make_precision(precision: object, device_type: str) -> Precision:
    if isinstance(precision, Precision):
        return precision
    if not isinstance(precision, (str, int)):
        raise PrecisionError(
            "this is not a precision",
            found=f"precision={precision!r}",
            fix='pass a string such as "bf16-mixed", or an object such as TruePrecision(torch.bfloat16)',
        )
    # The library's words first: a package cannot give them another meaning.
    if str(precision).lower() not in WORDS and precision in PRECISIONS.names():
        registered: Precision = PRECISIONS.get(str(precision))()
        return registered
    return make_precision(precision, device_type)


def choose_loggers(logger: object, root: str) -> list[LoggerLike]:
    """Create the loggers for True, False, None, words and objects.

    Args:
        logger: None or True for TensorBoard, False for none, or one or several words or objects.
        root: the directory of the loggers that this function creates.
    """
    if logger is False:
        return []
    # Objects may write anywhere; only what is created here would write below the root.
    if is_url(root) and (logger in (None, True) or isinstance(logger, str)):
        raise ConfigurationError(
            "loggers write to local directories only",
            found=f"default_root_dir={root!r}",
            fix='pass logger=TensorBoardLogger("logs") or logger=False; checkpoints still go to the URL',
        )
    if logger in (None, True):
        return [LOGGERS.get("tensorboard")(root)]
    loggers = []
    for item in as_list(logger, Logger):
        if isinstance(item, str):
            item = _make_logger(item, root)
        loggers.append(item)
    for item in loggers:
        _check_logger(item)
    return loggers


def _check_logger(logger: object) -> None:
    from trainer_kit.loggers.layout import DirectoryLogger

    if isinstance(logger, type):
        raise ConfigurationError(
            "this is not a logger",
            found=logger.__name__,
            fix="pass a logger, not its class",
        )
    if not isinstance(logger, Logger):
        raise ConfigurationError(
            "this is not a logger",
            found=getattr(logger, "__name__", type(logger).__name__),
            fix="define a method log_metrics(metrics, step)",
        )
    check_overrides(type(logger), DirectoryLogger)


def _make_logger(word: str, root: str) -> LoggerLike:
    from trainer_kit.loggers.run_logger import RunLogger
    from trainer_kit.loggers.wandb import WandbLogger

    factory = LOGGERS.get(word)
    # The first argument of these classes is a name, not a directory, as in Lightning.
    is_class = isinstance(factory, type)
    has_name_first = is_class and issubclass(factory, (RunLogger, WandbLogger))
    if has_name_first:
        return factory(save_dir=root)
    return factory(root)


def added_callbacks(
    user_callbacks: Sequence[object],
    accumulation: Any,
    time: str | timedelta | Mapping[str, float] | Duration | None,
    bar: bool,
    summary: bool,
    checkpoints: bool,
    profiler: Any,
) -> list[Callback]:
    """Create the callbacks for the Trainer's arguments, unless the user has passed one of the same kind.

    Args:
        user_callbacks: those that the user has passed.
        accumulation: ``accumulate_grad_batches``.
        time: ``max_time``, or None.
        bar: whether a progress bar is wanted.
        summary: whether a model summary is wanted.
        checkpoints: whether checkpoints are wanted.
        profiler: a word or a callback, or None.
    """

    def has(kind: type) -> bool:
        return any(isinstance(callback, kind) for callback in user_callbacks)

    added: list[Callback] = []
    # 1 is the default: without a callback a step has one micro-batch, and pays nothing for accumulation.
    if accumulation != 1:
        if has(callbacks.GradientAccumulation):
            raise ConfigurationError(
                "accumulation is set twice",
                found="accumulate_grad_batches and a callback",
            )
        added.append(callbacks.GradientAccumulation(accumulation))
    if time is not None:
        # Both timers apply, so their states need different keys.
        state_key = "Timer"
        if has(callbacks.Timer):
            state_key = "Timer(max_time)"
        added.append(callbacks.Timer(time, state_key=state_key))
    if bar and not has(callbacks.ProgressBar):
        added.append(callbacks.TQDMProgressBar())
    if summary and not has(callbacks.ModelSummary):
        added.append(callbacks.ModelSummary())
    if checkpoints and not has(callbacks.ModelCheckpoint):
        added.append(callbacks.ModelCheckpoint())
    if profiler is not None:
        from trainer_kit.callbacks.profilers import make_profiler

        added.append(make_profiler(profiler))
    return added


# -- objects of other libraries, which the room `compat` understands -------------------------------------------------


def accelerator_word(accelerator: str | LightningAccelerator) -> str:
    """The word for an argument ``accelerator=`` that may be an object of Lightning.

    Raises:
        ConfigurationError: it is an accelerator class of the user.
    """
    if isinstance(accelerator, str):
        return accelerator
    # Without that room nothing here can tell such an object from a mistake.
    need_wing("compat", "an accelerator that is an object")
    from trainer_kit.compat import accelerators

    return accelerators.accelerator_word(accelerator)


def refuse_checkpoint_io(plugins: object) -> None:
    """Refuse Lightning's ``CheckpointIO`` among the plugins of a Trainer or a Fabric.

    Raises:
        ConfigurationError: there is one; the message says what to write instead.
    """
    # An iterator can be read once.
    listed = as_list(plugins)
    if not listed or not has_wing("compat"):
        return
    from trainer_kit.compat import checkpoint_io

    checkpoint_io.refuse_checkpoint_io(listed)


def adapt_callbacks(callbacks: Iterable[object]) -> list[Any]:
    """Wrap callbacks that subclass Lightning's class; all other objects stay as they are.

    Raises:
        ConfigurationError: a callback drives Lightning's own loop, or its base class is missing because Lightning is
            not installed.
    """
    listed = list(callbacks)
    if not _has_foreign_callback(listed):
        return listed
    from trainer_kit.compat import callback_adapters

    return callback_adapters.adapt_callbacks(listed)


def writes_checkpoints(callbacks: Sequence[object]) -> bool:
    """Whether a callback extends Lightning's ``Checkpoint``, so that the Trainer adds no `ModelCheckpoint`."""
    if not _has_foreign_callback(callbacks):
        return False
    from trainer_kit.compat import callback_adapters

    return callback_adapters.writes_checkpoints(callbacks)


def _has_foreign_callback(callbacks: Sequence[object]) -> bool:
    """Whether an object is no callback of this library, and there is a room that knows those of Lightning."""
    if all(isinstance(callback, Callback) for callback in callbacks):
        return False
    return has_wing("compat")
