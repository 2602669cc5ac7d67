"""`Accelerator`: strategy, precision, feed and checkpoints of a Trainer, for a loop of the user's own."""

from __future__ import annotations

import importlib.util
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Final, final
from weakref import WeakSet

import torch
from torch import nn

from trainer_kit.accelerator import collectives
from trainer_kit.accelerator.accelerate_names import Answers
from trainer_kit.accelerator.accumulation_window import Window
from trainer_kit.accelerator.collective_debug import meet
from trainer_kit.accelerator.engines import asked_engine, chosen_sizes, chosen_strategy, engine_says, plugins
from trainer_kit.accelerator.generators import synchronize
from trainer_kit.accelerator.hang_watchdog import Waiting
from trainer_kit.accelerator.loop_checks import Watch
from trainer_kit.accelerator.process import Processes
from trainer_kit.accelerator.wrapping import unwrap, without_exchange
from trainer_kit.build import choose_precision, choose_strategy, launched_on_xla
from trainer_kit.compat.deepspeed import named_plugins
from trainer_kit.compat.fp8 import AORecipeKwargs, FP8Recipe, launched_recipe
from trainer_kit.compat.options import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
    by_kind,
    check_arguments,
    micro_batches,
)
from trainer_kit.core.arguments import as_list
from trainer_kit.core.configuration_sources import Chosen, choose, describe_origins, is_true, steps_of, variable
from trainer_kit.core.display import Text
from trainer_kit.core.environment import Environment, pick_device
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.protocols import Group
from trainer_kit.precision.overflow import make_scaler
from trainer_kit.strategies.strategy import Strategy

__all__ = [
    "Accelerator",
    "PartialState",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "pad_across_processes",
    "reduce",
    "synchronize_rng_states",
]

_EVERYWHERE: Final = ("tensorboard", "csv", "jsonl")  # what log_with="all" means, with what else is installed
_IF_INSTALLED: Final = ("wandb",)


_LIVING: Final[WeakSet[Accelerator]] = WeakSet()
"""Where one of them is in debug mode, the functions of this module are, too."""


@final
class PartialState(Processes):
    """This process among those that were started together: a view of its environment, made anew at will.

    Args:
        cpu: compute on the CPU also where there is an accelerator.

    Example:
        >>> state = PartialState(cpu=True)
        >>> state.num_processes, state.is_main_process, state.device
        (1, True, device(type='cpu'))
    """

    _debug: ClassVar[bool | None] = None

    def __init__(self, cpu: bool = False, **options: Any) -> None:
        self.environment = Environment.detect()
        self._accelerator = "cpu" if cpu else "auto"
        self._strategy: Strategy | None = None

    @property
    def debug(self) -> bool:
        """Whether processes compare their collectives first; set, it holds for every `PartialState` of the process."""
        if PartialState._debug is not None:
            return PartialState._debug
        return any(one.debug for one in _LIVING) or is_true(choose("debug", None, False).value)

    @debug.setter
    def debug(self, debug: bool) -> None:
        PartialState._debug = debug

    def _together(self, data: Any, call: str) -> AbstractContextManager[None]:
        world = self.world
        if world.size > 1 and torch.distributed.is_initialized() and self.debug:
            meet(world, data, call)
        return nullcontext()

    @property
    def world(self) -> Group:
        return self._joined().world

    @property
    def device(self) -> torch.device:
        if self._accelerator == "auto" and launched_on_xla():
            return self._joined().device  # torch does not know it
        return pick_device(self._accelerator, self.environment.local_rank)

    def _joined(self) -> Strategy:
        if self._strategy is None:
            self._strategy = choose_strategy("auto", self._accelerator, "auto", 1, self.environment)[0]
            self._strategy.start()
        return self._strategy


@final
class Accelerator(Answers):
    """Everything of a Trainer but the loop, under Hugging Face Accelerate's names.

    A script written for Accelerate runs after ``from accelerate import`` became ``from trainer_kit import``. Two
    Accelerators in one process do not see each other.

    Args:
        device_placement: move models and batches to the device.
        split_batches: as `DataLoaderConfiguration`'s.
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"``, ``"fp8"`` (with `AORecipeKwargs` or `TERecipeKwargs` for
            more about it), a word of the Trainer's ``precision``, or one of its objects; by default what
            ``TRAINER_KIT_MIXED_PRECISION`` or ``ACCELERATE_MIXED_PRECISION`` says, else ``"no"``.
        gradient_accumulation_steps: micro-batches of an optimizer step; from the environment likewise.
        cpu: compute on the CPU also where there is an accelerator.
        dataloader_config: how loaders are divided.
        rng_types: accepted; the order of the data is a function of seed and epoch on every process.
        log_with: trackers, by name (``"tensorboard"``, ``"wandb"``, ``"csv"``, ``"jsonl"``) or as objects.
        project_dir: where the project writes.
        project_config: more about that.
        gradient_accumulation_plugin: more about accumulation.
        step_scheduler_with_optimizer: schedulers advance where optimizers step; False: at each call.
        scheduler_steps_per_process: an optimizer step advances schedulers once for each process, as under Accelerate,
            unless ``split_batches``; False: once.
        kwargs_handlers: options of the parts.
        dynamo_backend: of ``torch.compile``, for prepared models.
        dynamo_plugin: more about that.
        seed: of the order of the data; by default what ``set_seed`` or ``torch.manual_seed`` was last given on the main
            process when a loader is prepared.
        fsdp_plugin: train under FSDP; by default what the launcher says.
        megatron_lm_plugin: train under Megatron, likewise.
        parallelism_config: divide the work along several axes; by default what the launcher says.
        torch_tp_plugin: divide layers alone.
        deepspeed_plugin: train under DeepSpeed; likewise.
        deepspeed_plugins: several by name, of which the first is used until `select_deepspeed_plugin`.
        debug: every process prints what it has, and collectives compare shapes first; ``TRAINER_KIT_DEBUG=1``.

    Raises:
        ConfigurationError: for everything that cannot work here.

    Example:
        >>> from torch import nn
        >>> accelerator = Accelerator(cpu=True)
        >>> model = accelerator.prepare(nn.Linear(2, 1))
        >>> optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> accelerator.backward(model(torch.ones(4, 2)).mean())
        >>> optimizer.step()
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: Any = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        *,
        rng_types: Any = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        scheduler_steps_per_process: bool = True,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        dynamo_backend: str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        seed: int | None = None,
        debug: bool | None = None,
        **engines: Any,
    ) -> None:
        check_arguments(locals())
        self.deepspeed_plugins = named_plugins(engines)
        options = {**plugins(engines, self.deepspeed_plugins), **by_kind(kwargs_handlers)}
        self.environment = Environment.detect()
        told = engine_says(asked_engine(options), mixed_precision, gradient_accumulation_steps)
        self.origins = _origins(cpu, *told, gradient_accumulation_plugin, debug)
        on_cpu, word, micro_batches, debugging = (chosen.value for chosen in self.origins.values())
        self.origins |= chosen_sizes(options)
        self.strategy = _started(options, bool(on_cpu), self.environment)
        self.precision = _precision(word, self.strategy, options)
        self.device_placement = device_placement
        self.dataloader_config = _loaders(dataloader_config, split_batches)
        self.accumulation = _accumulation(gradient_accumulation_plugin, gradient_accumulation_steps, micro_batches)
        self.window = _window(self.strategy, self.accumulation, self.precision.name)
        self.waiting = _waiting(self, self._tell)
        self.dynamo_plugin = dynamo_plugin or _dynamo(dynamo_backend)
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.scheduler_steps_per_process = scheduler_steps_per_process
        self.project_configuration = project_config or ProjectConfiguration(project_dir=project_dir)
        if project_dir is not None and self.project_dir is None:
            self.project_configuration.set_directories(project_dir)
        self.log_with = _several(log_with)
        self.profile_handler = options.get(ProfileKwargs) or ProfileKwargs()
        self.autocast_handler, self.scaler_handler = options.get(AutocastKwargs), options.get(GradScalerKwargs)
        self.ddp_handler, self.init_handler = (
            options.get(DistributedDataParallelKwargs),
            options.get(InitProcessGroupKwargs),
        )
        self.data_seed = self.dataloader_config.data_seed if seed is None else seed
        self.step = 0
        self.trackers, self._models, self._optimizers, self._schedulers = [], [], [], []
        self._dataloaders, self._objects = [], []
        self._watch = self._first_steps = Watch(self.strategy, self.print, self._models)
        self._before_save, self._before_load = OrderedDict(), OrderedDict()
        self._triggered, self.flag_tensor, self._own_backward = False, None, None
        self.rng_types, self.debug = rng_types, debugging
        _LIVING.add(self)

    @property
    def state(self) -> Accelerator:
        """Identity and turn-taking, for scripts that ask for it separately."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """A copy does not look for the mistakes of first steps: it would look at its copies of parameters."""
        return {**vars(self), "_watch": None}

    def __repr__(self) -> str:
        """What Accelerate prints of its state; `explain` says more."""
        plugin = self.deepspeed_plugin
        config = "" if plugin is None else f"ds_config: {plugin.deepspeed_config}\n"
        return f"{super().__repr__()}\nMixed precision type: {self.mixed_precision}\n{config}"

    def explain(self) -> Text:
        """What this process has, a line each: group, device, wrapping, loaders; and where its options come from."""
        lines = [
            f"process {self.process_index} of {self.num_processes}, pid {os.getpid()} ({self.environment.source})",
            f"strategy: {self.strategy.describe()}",
            f"group: {self.backend or 'none'}, device {self.device}",
            f"precision: {self.precision.name}",
            f"accumulation: {self.window.steps} micro-batches a step",
            *(f"model: {_wrapping(model)}" for model in self._models),
            *(f"loader: {loader.describe()}" for loader in self._dataloaders),
            *(f"scheduler: {scheduler.describe()}" for scheduler in self._schedulers),
            *describe_origins(self.origins.items()),
        ]
        return Text("\n".join(lines))

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[Any]:
        """A ``torch.profiler.profile``; with ``output_trace_dir`` each process writes its trace there."""
        from torch import profiler

        chosen = profile_handler or self.profile_handler
        with profiler.profile(
            activities=chosen.torch_activities(),
            schedule=chosen.torch_schedule(),
            on_trace_ready=chosen.on_trace_ready,
            record_shapes=chosen.record_shapes,
            profile_memory=chosen.profile_memory,
            with_stack=chosen.with_stack,
            with_flops=chosen.with_flops,
            with_modules=chosen.with_modules,
        ) as found:
            yield found
        if chosen.output_trace_dir is not None:
            directory = Path(os.path.expanduser(chosen.output_trace_dir))
            directory.mkdir(parents=True, exist_ok=True)
            found.export_chrome_trace(str(directory / f"profile_{self.process_index}.json"))


def _wrapping(model: nn.Module) -> str:
    inner = unwrap(model)
    return type(model).__name__ + (f" of {type(inner).__name__}" if inner is not model else "")


def _started(options: Mapping[type, Any], on_cpu: bool, environment: Environment) -> Strategy:
    asked = chosen_strategy(options, environment)
    made = choose_strategy(asked, "cpu" if on_cpu else "auto", "auto", 1, environment)[0]
    made.start()
    return made


def _origins(
    cpu: bool, precision: Any, steps: int | None, plugin: GradientAccumulationPlugin | None, debug: bool | None
) -> dict[str, Chosen]:
    on_cpu, debugging = choose("use_cpu", cpu or None, False), choose("debug", debug, False)
    micro_batches = choose("gradient_accumulation_steps", steps if plugin is None else plugin.num_steps, 1)
    return {
        "use_cpu": Chosen(is_true(on_cpu.value), on_cpu.origin),
        "mixed_precision": choose("mixed_precision", precision, "no"),
        "gradient_accumulation_steps": Chosen(steps_of(micro_batches), micro_batches.origin),
        "debug": Chosen(is_true(debugging.value), debugging.origin),
    }


def _window(strategy: Strategy, accumulation: GradientAccumulationPlugin, precision: str) -> Window:
    strategy.configure(precision=precision, accumulation=accumulation.num_steps)  # refuses contradictions now
    quiet = without_exchange if strategy.world.size > 1 and not accumulation.sync_each_batch else None
    complete = strategy.complete_gradients if strategy.completes_gradients else None
    groups = strategy.data, strategy.losses
    return Window(accumulation.num_steps, *groups, accumulation.sync_with_dataloader, quiet, complete)


def _waiting(here: Processes, tell: Callable[[str], None]) -> Waiting | None:
    meets = here.use_distributed and torch.distributed.is_initialized()  # torch_xla's processes have no store
    return Waiting(here.process_index, here.num_processes, tell) if meets else None


def _dynamo(backend: str | None) -> TorchDynamoPlugin:
    """What was asked for, else what the launcher says of torch.compile."""
    if backend is not None:
        return TorchDynamoPlugin(backend=backend)
    names = ("backend", "mode", "use_fullgraph", "use_dynamic", "use_regional_compilation")
    said = {name: variable(f"dynamo_{name}") for name in names}
    found = {name: chosen.value for name, chosen in said.items() if chosen is not None}
    return TorchDynamoPlugin(
        backend=str(found.get("backend", "no")).lower(),
        mode=found.get("mode"),
        fullgraph=is_true(found.get("use_fullgraph")),
        dynamic=is_true(found["use_dynamic"]) if "use_dynamic" in found else None,
        use_regional_compilation=is_true(found.get("use_regional_compilation")),
    )


def _precision(word: Any, strategy: Any, options: Mapping[type, Any]) -> Any:
    if not hasattr(word, "forward_context"):
        word = str(getattr(word, "value", word))
    if word == "fp8":
        recipes = [one for kind, one in options.items() if issubclass(kind, FP8Recipe)]
        word = (recipes[0] if recipes else launched_recipe() or AORecipeKwargs()).make_precision()
    made = choose_precision(word, None, strategy)
    scaler = options.get(GradScalerKwargs)
    if scaler is not None and made.scales:
        native: Any = getattr(made, "base", made)
        native.scaler = make_scaler(strategy.device.type, **scaler.to_kwargs())
    return made


def _loaders(config: DataLoaderConfiguration | None, split_batches: bool) -> DataLoaderConfiguration:
    if config is not None and split_batches and not config.split_batches:
        raise ConfigurationError(
            "split_batches is given twice",
            found="split_batches=True, and a dataloader_config without it",
            fix="DataLoaderConfiguration(split_batches=True)",
        )
    return config or DataLoaderConfiguration(split_batches=split_batches)


def _accumulation(
    plugin: GradientAccumulationPlugin | None, steps: int | None, chosen: int
) -> GradientAccumulationPlugin:
    if plugin is not None:
        if steps not in (None, 1, plugin.num_steps):
            raise ConfigurationError(
                "accumulation is given twice",
                found=f"gradient_accumulation_steps={steps} and num_steps={plugin.num_steps}",
            )
        chosen = plugin.num_steps
    return plugin or GradientAccumulationPlugin(num_steps=micro_batches(chosen, "gradient_accumulation_steps"))


def _several(given: Any) -> list[Any]:
    if given is None:
        return []
    several = as_list(given)
    words = [str(getattr(one, "value", one)) if isinstance(one, (str, Enum)) else one for one in several]
    if "all" in words:
        objects = [one for one in words if not isinstance(one, str)]
        installed = [name for name in _IF_INSTALLED if importlib.util.find_spec(name) is not None]
        named = (word for word in words if isinstance(word, str) and word != "all")
        return [*objects, *dict.fromkeys([*named, *_EVERYWHERE, *installed])]
    return words


def _state(data: Any, call: str) -> PartialState:
    """This process; in debug mode, once every process makes this call."""
    state = PartialState()
    with state._together(data, call):
        return state


def gather(tensor: Any) -> Any:
    """Nested tensors of all processes one after the other, along the first dimension."""
    return collectives.gather(_state(tensor, "gather").world, tensor)


def gather_object(object: Any) -> list[Any]:
    """Small picklable values of all processes: lists are joined, anything else makes a list in rank order."""
    return collectives.gather_object(_state(None, "gather_object").world, object)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Nested tensors reduced over the processes: "sum", "mean", "max", "min" or "none"."""
    return collectives.reduce(_state(tensor, "reduce").world, tensor, reduction, scale)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Nested tensors of one process for everyone."""
    return collectives.broadcast(_state(tensor, "broadcast").world, tensor, from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Small picklable values of one process for everyone, in place."""
    return collectives.broadcast_object_list(_state(None, "broadcast_object_list").world, object_list, from_process)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Nested tensors made as long along ``dim`` as the longest of all processes."""
    return collectives.pad_across_processes(
        _state(None, "pad_across_processes").world, tensor, dim, pad_index, pad_first
    )


def synchronize_rng_states(rng_types: Sequence[Any] | None, generator: torch.Generator | None = None) -> None:
    """Give every process the main process's generators: "torch", "cuda", "python", "numpy", "generator"."""
    state = _state(None, "synchronize_rng_states")
    synchronize(state.world, rng_types, generator, state.device)
