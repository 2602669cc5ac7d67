"""`Accelerator`: strategy, precision, loaders and checkpoints of a Trainer, for a raw loop."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, final
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from trainer_kit.accelerator.accumulation import GradientState
from trainer_kit.accelerator.batch_size import release_memory
from trainer_kit.accelerator.checkpoints import Checkpoints
from trainer_kit.accelerator.composition import (
    chosen_sizes,
    made_accumulation,
    made_precision,
    named_dynamo,
    named_loaders,
    named_options,
    named_project,
    named_trackers,
    plugins,
    started_strategy,
    started_watchdog,
)
from trainer_kit.accelerator.loader import PreparedLoader, skip_first_batches
from trainer_kit.accelerator.optimizer import AcceleratedOptimizer, AcceleratedScheduler
from trainer_kit.accelerator.parallel_ranks import ParallelRanks
from trainer_kit.accelerator.prepared import Prepared
from trainer_kit.accelerator.processes import AcceleratorProcesses, DistributedType
from trainer_kit.accelerator.trackers import Trackers
from trainer_kit.accelerator.wrapping import spans_devices, unwrap, with_exchange, without_exchange
from trainer_kit.compat.deepspeed import DeepSpeedPlugin, named_plugins, selected_plugin
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
from trainer_kit.compat.parallelism import ParallelismConfig
from trainer_kit.compat.refusals import refused
from trainer_kit.core.configuration_sources import describe_origins
from trainer_kit.core.display import Text
from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.protocols import Group

__all__ = ["Accelerator", "forget_newest", "newest"]

_F = TypeVar("_F", bound=Callable[..., Any])
_NEWEST: list[ReferenceType[Accelerator]] = []
_ACCELERATES_WORDS = {"32-true": "no", "16-mixed": "fp16", "bf16-mixed": "bf16"}


def _list_of(part: str, name: str) -> Any:
    """A list of a part under a second name; assigning to it replaces the content of the list."""

    def get(accelerator: Accelerator) -> list[Any]:
        found: list[Any] = getattr(getattr(accelerator, part), name)
        return found

    def put(accelerator: Accelerator, values: Sequence[Any]) -> None:
        get(accelerator)[:] = values

    return property(get, put)


def newest() -> Accelerator | None:
    """The Accelerator that was made last, while the script keeps it: functions of Accelerate ask for no Accelerator."""
    return _NEWEST[0]() if _NEWEST else None


def forget_newest(reset_partial_state: bool = False) -> None:
    """Let `newest` find none, until the next one is made; a `PartialState` has nothing to forget."""
    _NEWEST.clear()


@final
class Accelerator:
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
        log_with: trackers, by name (`LoggerType` has them) or as objects.
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
        hang_timeout: seconds (or a duration such as ``"5min"``) that processes may wait for one without progress,
            before the run ends with exit code 75 and names the one that hangs; None: ten times the slowest ordinary
            step, at least 60 s, and half an hour outside of steps; False: processes that wait are only reported. By
            default what ``TRAINER_KIT_HANG_TIMEOUT`` says.
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

    # Names of Accelerate that have one answer here.
    initialized = True
    fork_launched = False
    is_fsdp2 = False
    has_lomo_optimizer = False
    should_save_model = True
    use_seedable_sampler = True  # the order of the data is always a function of seed and epoch
    use_stateful_dataloader = True  # positions of loaders are always part of a saved state
    fsdp_plugin = None
    megatron_lm_plugin = None
    torch_tp_plugin = None
    flag_tensor = None
    _reset_state = staticmethod(forget_newest)  # of Accelerate's state, which scripts call between two Accelerators
    # Lists of the parts, which scripts for Accelerate read, and may replace.
    log_with = _list_of("tracking", "log_with")
    trackers = _list_of("tracking", "started")
    _models = _list_of("prepared", "models")
    _optimizers = _list_of("prepared", "optimizers")
    _schedulers = _list_of("prepared", "schedulers")
    _dataloaders = _list_of("prepared", "loaders")

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
        hang_timeout: Any = None,
        **engines: Any,
    ) -> None:
        check_arguments(locals())
        self.environment = Environment.detect()
        self.deepspeed_plugins = named_plugins(engines)
        known = inspect.signature(type(self)).parameters
        options = {**plugins(engines, self.deepspeed_plugins, known), **by_kind(kwargs_handlers)}
        plugin, steps = gradient_accumulation_plugin, gradient_accumulation_steps
        self.origins = named_options(options, cpu, mixed_precision, steps, plugin, debug)
        on_cpu, word, chosen_steps, debugging = (chosen.value for chosen in self.origins.values())
        self.origins |= chosen_sizes(options)
        self.strategy = started_strategy(options, bool(on_cpu), self.environment)
        self.precision = made_precision(word, self.strategy, options)
        self.dataloader_config = named_loaders(dataloader_config, split_batches)
        self.dynamo_plugin = dynamo_plugin or named_dynamo(dynamo_backend)
        self._project = named_project(project_config, project_dir)
        self.rng_types = rng_types
        self.profile_handler: ProfileKwargs = options.get(ProfileKwargs) or ProfileKwargs()
        self.autocast_handler: AutocastKwargs | None = options.get(AutocastKwargs)
        self.scaler_handler: GradScalerKwargs | None = options.get(GradScalerKwargs)
        self.ddp_handler: DistributedDataParallelKwargs | None = options.get(DistributedDataParallelKwargs)
        self.init_handler: InitProcessGroupKwargs | None = options.get(InitProcessGroupKwargs)
        self.accumulation = made_accumulation(plugin, steps, chosen_steps, self.strategy, self.precision.name)
        self.processes = AcceleratorProcesses(self.environment, self.strategy, debugging)
        self.prepared = Prepared(
            self.processes,
            self.strategy,
            self.precision,
            self.accumulation,
            loaders=self.dataloader_config,
            dynamo=self.dynamo_plugin,
            deepspeed_plugins=self.deepspeed_plugins,
            device_placement=device_placement,
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            scheduler_steps_per_process=scheduler_steps_per_process,
            data_seed=self.dataloader_config.data_seed if seed is None else seed,
        )
        self._compose(named_trackers(log_with), hang_timeout)

    def _compose(self, log_with: list[Any], hang_timeout: Any) -> None:
        """Make the parts that need the others."""
        project = self._project
        self.collectives = self.processes.collectives
        self.parallel_ranks = ParallelRanks(self.strategy)
        self.checkpoints = Checkpoints(
            self.processes, self.strategy, self.precision, self.accumulation, self.prepared, project
        )
        self.tracking = Trackers(log_with, self.processes, project)
        self._watchdog = started_watchdog(
            hang_timeout, self.processes, self.accumulation, project, self.tracking.end_by_hang
        )
        _NEWEST[:] = [ref(self)]

    # -- preparing -------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process is watched by no thread of this one."""
        return {**self.__dict__, "_watchdog": None}

    def prepare(self, *objects: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers, in any mix and order, for this number of processes.

        Args:
            objects: anything else is returned as it is; an object that is prepared already, too.
            device_placement: for each object whether it is moved; by default as the Accelerator's.

        Returns:
            The prepared objects, in the same order; one object alone is not in a tuple.

        Raises:
            ConfigurationError: an optimizer is prepared whose model is not.
        """
        found = self.prepared.prepare(objects, device_placement)
        if self.debug:
            self.processes.print_everywhere(self.explain())
        return found[0] if len(found) == 1 else found

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """The model on its device, in the precision, and wrapped for several processes.

        Args:
            model: is changed in place, and wrapped where there are several processes.
            device_placement: whether it is moved.
            evaluation_mode: it is not trained, so gradients need no exchange.
        """
        return self.prepared.prepare_model(model, device_placement, evaluation_mode)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """An optimizer that steps where gradients are complete."""
        return self.prepared.prepare_optimizer(optimizer)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> PreparedLoader:
        """A loader divided among the processes; see `PreparedLoader`. Every process calls it.

        Its order follows the seed of the Accelerator, else the seed that the main process has set by now.
        """
        return self.prepared.prepare_loader(data_loader, device_placement)

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """A scheduler that advances with its optimizer, by default once for each process in an optimizer step.

        Accelerate does the same, and the scripts written for it multiply the length of their schedules by the number of
        processes. ``split_batches=True`` and ``Accelerator(scheduler_steps_per_process=False)``: once in a step, as
        ``ReduceLROnPlateau``, whose patience counts values, and DeepSpeed's own schedules always do.
        """
        return self.prepared.prepare_scheduler(scheduler)

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = False) -> Any:
        """The user's own model.

        Args:
            model: prepared or not.
            keep_fp32_wrapper: its forward stays in the precision that it was prepared for.
            keep_torch_compile: a compiled model stays compiled.
        """
        return self.prepared.unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """A loader whose iterations begin with batch ``num_batches``."""
        return skip_first_batches(dataloader, num_batches)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether the layers of a model were placed on several devices; such a model is not trained here."""
        return spans_devices(model)

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget what was prepared; assign the result to the names that still refer to it."""
        self.prepared.clear()
        return release_memory(*objects)

    def clear(self, *objects: Any) -> list[None]:
        """As `free_memory`."""
        return self.free_memory(*objects)

    @property
    def device_placement(self) -> bool:
        """Whether models and batches move to the device."""
        return self.prepared.device_placement

    @device_placement.setter
    def device_placement(self, moves: bool) -> None:
        self.prepared.device_placement = moves

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether schedulers advance where optimizers step."""
        return self.prepared.step_scheduler_with_optimizer

    @step_scheduler_with_optimizer.setter
    def step_scheduler_with_optimizer(self, with_optimizer: bool) -> None:
        self.prepared.step_scheduler_with_optimizer = with_optimizer

    @property
    def scheduler_steps_per_process(self) -> bool:
        """Whether an optimizer step advances schedulers once for each process."""
        return self.prepared.scheduler_steps_per_process

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch size is that of all processes together."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the main process reads, and sends the others their batches."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether last batches are filled up from the start of the data."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        replace(self.dataloader_config, even_batches=even)  # checks the value
        self.dataloader_config.even_batches = even

    @property
    def non_blocking(self) -> bool:
        """Whether copies to an accelerator do not wait."""
        return self.dataloader_config.non_blocking

    # -- the steps of a loop ---------------------------------------------------------------------------------------

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """One micro-batch: gradients are exchanged, and optimizers step, at the end of a window only.

        Args:
            models: those that are trained in it.
        """
        self.accumulation.models = models
        return self.accumulation

    def backward(self, loss: Tensor, weight: float | None = None, **options: Any) -> None:
        """Backward, in place of ``loss.backward()``.

        Args:
            loss: a scalar: the mean over the batch; with ``weight`` a sum.
            weight: how many things ``loss`` sums over: ``backward(token_losses.sum(), weight=tokens)`` gives the exact
                mean over all tokens of the window and of all processes.
            options: of ``Tensor.backward``; an engine that runs backward itself takes ``retain_graph`` only.
        """
        prepared = self.prepared
        if prepared.checks.active:
            prepared.check_backward()
        scaled = self.precision.scale_loss(self.accumulation.scale(loss, weight))
        if prepared.backward is None:
            scaled.backward(**options)  # type: ignore[no-untyped-call]
        else:
            prepared.backward(scaled, **options)

    def lomo_backward(self, loss: Tensor, learning_rate: float) -> None:
        """Refused.

        Raises:
            ConfigurationError: always.
        """
        raise refused("lomo_backward")

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Remove fp16's scale from gradients, and weigh them for their window; by default of all optimizers."""
        self.prepared.unscale_gradients(optimizer)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor | None:
        """Clip by the norm of all gradients of ``parameters`` together; only at the end of a window.

        Returns:
            The norm before; None inside a window.
        """
        if not self.accumulation.sync:
            return None
        complete = self.prepared.complete_gradients(parameters)
        return self.strategy.clip_gradients(complete, max_norm, "norm", float(norm_type))

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each element; only at the end of a window."""
        if self.accumulation.sync:
            self.strategy.clip_gradients(self.prepared.complete_gradients(parameters), clip_value, "value")

    @contextmanager
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        """Inside, computations outside of a prepared model are in the precision, too."""
        chosen = autocast_handler or self.autocast_handler
        context: Any = self.precision.forward_context()
        if chosen is not None and isinstance(context, torch.autocast):
            context = torch.autocast(
                self.device.type, context.fast_dtype, enabled=chosen.enabled, cache_enabled=chosen.cache_enabled
            )
        with context or nullcontext():
            yield

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, gradients of ``model`` stay on their process."""
        return without_exchange(model) if self.use_distributed else nullcontext()

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, the next backward exchanges gradients, also where its forward ran under `no_sync`."""
        return with_exchange(model)

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Inside, a process that has no batches left takes part in the exchanges of the others.

        Args:
            joinables: prepared models.
            even_batches: whether loaders repeat samples meanwhile, those over an ``IterableDataset``, too; by default
                as they are configured.

        Raises:
            ConfigurationError: the strategy needs every process in a step.
        """
        return self.prepared.join_uneven_inputs(joinables, even_batches)

    def maybe_context_parallel(
        self,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Collection[Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """One step on sequences that `ParallelismConfig(cp_size=...)` divides; without it this does nothing.

        Inside, each buffer is this process's part of it, in place; attention is over the whole sequence, and the mean
        of a cross entropy over the targets of all of it. Forward, loss and backward belong inside; targets are shifted
        before. Positions that a model counts itself begin at 0 on each part: pass them as a buffer.

        Args:
            buffers: tensors that have the sequence: inputs, targets, positions.
            buffer_seq_dims: which dimension of each is the sequence.
            no_restore_buffers: those that are not needed whole afterwards.

        Raises:
            StrategyError: a sequence that cannot be divided, or no attention was called.
        """
        return self.parallel_ranks.divided_sequences(buffers or (), buffer_seq_dims or (), no_restore_buffers or ())

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch ends its window: gradients are complete, optimizers step."""
        return self.accumulation.sync

    @sync_gradients.setter
    def sync_gradients(self, sync: bool) -> None:
        if sync not in (True, False):
            raise ConfigurationError("sync_gradients is True or False", found=f"sync_gradients={sync!r}")
        self.accumulation.sync = bool(sync)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of an optimizer step."""
        return self.accumulation.steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.accumulation.steps = micro_batches(steps, "accelerator.gradient_accumulation_steps")

    @property
    def gradient_state(self) -> GradientState:
        """The state of the accumulation."""
        return GradientState(self.accumulation)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an optimizer's last step was skipped because gradients overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self.prepared.optimizers)

    # -- what processes exchange: every process makes these calls --------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Nested tensors of all processes one after the other, along the first dimension."""
        return self.collectives.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Results of the current batch of all processes, without those of repeated samples.

        Of processes that get the same batches one counts.

        Args:
            input_data: nested tensors of one entry a sample along the first dimension, or other objects. A scalar is
                gathered from each process.
            use_gather_object: also for tensors: they may then differ in shape.
        """
        return self.collectives.gather_for_metrics(input_data, use_gather_object, self.accumulation.batches)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Nested tensors reduced over the processes: "sum", "mean", "max", "min" or "none"."""
        return self.collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Nested tensors made as long along ``dim`` as the longest of all processes."""
        return self.collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Set the trigger that every process finds at its next `check_trigger`."""
        self.collectives.set_trigger()

    def check_trigger(self) -> bool:
        """Whether any process has called `set_trigger` since; every process asks at the same place."""
        return self.collectives.check_trigger()

    # -- the processes ---------------------------------------------------------------------------------------------

    def wait_for_everyone(self) -> None:
        """Wait until every process makes this call."""
        self.processes.wait_for_everyone()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Inside, the main process goes first and all others follow."""
        return self.processes.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Inside, the first process of each machine goes first and the others follow."""
        return self.processes.local_main_process_first()

    def on_main_process(self, function: _F) -> _F:
        """Decorator: only the main process calls ``function``; the others get None."""
        return self.processes.on_main_process(function)

    def on_local_main_process(self, function: _F) -> _F:
        """Decorator: only the first process of each machine calls ``function``."""
        return self.processes.on_local_main_process(function)

    def on_last_process(self, function: _F) -> _F:
        """Decorator: only the last process calls ``function``."""
        return self.processes.on_last_process(function)

    def on_process(self, function: _F | None = None, process_index: int | None = None) -> Any:
        """Decorator: only process ``process_index`` calls ``function``."""
        return self.processes.on_process(function, process_index)

    def on_local_process(self, function: _F | None = None, local_process_index: int | None = None) -> Any:
        """Decorator: only process ``local_process_index`` of each machine calls ``function``."""
        return self.processes.on_local_process(function, local_process_index)

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """This process's part of a list, a tuple, a tensor, or a dict of them; the first processes get one more.

        Args:
            inputs: is divided; the members of a dict are equally long.
            apply_padding: repeat the last element so that every process gets equally many.

        Raises:
            ConfigurationError: the members of a dict differ in length.
        """
        return self.processes.split_between_processes(inputs, apply_padding)

    def print(self, *values: Any, **options: Any) -> None:
        """Print once on each machine."""
        self.processes.print(*values, **options)

    def set_device(self) -> None:
        """Accepted: the device was chosen when the process began."""

    def destroy_process_group(self, group: Any = None) -> None:
        """Leave a process group; by default that of all processes."""
        self.processes.destroy_process_group(group)

    @property
    def state(self) -> Accelerator:
        """The Accelerator itself: Accelerate keeps the identity of processes in another object."""
        return self

    @property
    def world(self) -> Group:
        """All processes."""
        return self.processes.world

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.strategy.device

    @property
    def default_device(self) -> torch.device:
        """The device of this process."""
        return self.device

    @property
    def num_processes(self) -> int:
        """How many processes work together."""
        return self.processes.num_processes

    @property
    def process_index(self) -> int:
        """The number of this process, from 0."""
        return self.processes.process_index

    @property
    def local_process_index(self) -> int:
        """The number of this process among those of its machine, from 0."""
        return self.processes.local_process_index

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first of all processes."""
        return self.processes.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.processes.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last of all processes."""
        return self.processes.is_last_process

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.processes.use_distributed

    @property
    def multi_device(self) -> bool:
        """Whether there are several processes."""
        return self.processes.use_distributed

    @property
    def distributed_type(self) -> DistributedType:
        """The engine, where Accelerate has a word for it; else the kind of processes that work together."""
        return self.processes.distributed_type

    @property
    def backend(self) -> str | None:
        """The backend of the process group: "gloo", "nccl", …; None for a single process."""
        return self.processes.backend

    @property
    def debug(self) -> bool:
        """Whether processes compare their collectives first."""
        return self.collectives.debug

    @debug.setter
    def debug(self, debug: bool) -> None:
        self.collectives.debug = debug

    # -- how processes divide the work -----------------------------------------------------------------------------

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """How many processes divide what; None where they divide only data."""
        return self.parallel_ranks.config

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The processes, an axis for each way in which they divide the work; None where there are no axes."""
        return self.strategy.mesh

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """As `torch_device_mesh`."""
        return self.strategy.mesh

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether parameters are divided by FSDP2."""
        return self.strategy.mesh is not None

    @property
    def data_parallel_rank(self) -> int:
        """Which part of the data is read here; on a mesh, by `parallelism_config`, which copy is trained."""
        return self.parallel_ranks.data_rank

    @property
    def data_parallel_shard_rank(self) -> int:
        """Which part of the parameters is here."""
        return self.parallel_ranks.rank("dp_shard")

    @property
    def tensor_parallel_rank(self) -> int:
        """Which part of each layer is here."""
        return self.parallel_ranks.rank("tp")

    @property
    def context_parallel_rank(self) -> int:
        """Which part of each sequence is here."""
        return self.parallel_ranks.rank("cp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """Which stage of the pipeline is here."""
        return self.parallel_ranks.rank("pp")

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The plugin in use."""
        return selected_plugin(self.deepspeed_plugins)

    def get_deepspeed_plugin(self, name: str) -> DeepSpeedPlugin:
        """One of ``Accelerator(deepspeed_plugins={name: plugin})``."""
        if name not in self.deepspeed_plugins:
            known = ", ".join(self.deepspeed_plugins) or "none"
            raise ConfigurationError(f"there is no DeepSpeed plugin {name!r}", found=known)
        return self.deepspeed_plugins[name]

    def select_deepspeed_plugin(self, name: str) -> None:
        """Train under another one of the plugins; before a model is prepared."""
        chosen = self.get_deepspeed_plugin(name)
        self.strategy.use(chosen.deepspeed_config)  # type: ignore[attr-defined]
        for plugin in self.deepspeed_plugins.values():
            plugin.selected = plugin is chosen

    # -- the precision ---------------------------------------------------------------------------------------------

    @property
    def mixed_precision(self) -> str:
        """The precision, by Accelerate's word where it has one."""
        return _ACCELERATES_WORDS.get(self.precision.name, self.precision.name)

    @property
    def scaler(self) -> Any:
        """The gradient scaler of fp16, or None."""
        return self.precision.scaler

    @property
    def native_amp(self) -> bool:
        """Whether forwards run under torch's autocast."""
        return self.mixed_precision in ("fp16", "bf16")

    @property
    def fp8_enabled(self) -> bool:
        """Whether products are in fp8."""
        return self.fp8_backend != "NO"

    @property
    def has_fp8_handler(self) -> bool:
        """Whether Transformer Engine computes them."""
        return self.fp8_backend == "TE"

    @property
    def fp8_backend(self) -> str:
        """Whose fp8 it is, in Accelerate's words."""
        return {"fp8": "AO", "transformer-engine": "TE"}.get(self.precision.name, "NO")

    # -- states and weights ----------------------------------------------------------------------------------------

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Where trackers log and states are saved; change its attributes, not the object."""
        return self._project

    @property
    def project_dir(self) -> str | None:
        """The directory of the project."""
        return self.project_configuration.project_path

    @property
    def logging_dir(self) -> str | None:
        """The directory of trackers."""
        return self.project_configuration.logging_path

    @property
    def save_iteration(self) -> int:
        """The number of the next automatically named checkpoint."""
        return self.project_configuration.iteration

    @property
    def step(self) -> int:
        """A number that saved states keep for the user."""
        return self.checkpoints.step

    @step.setter
    def step(self, step: int) -> None:
        self.checkpoints.step = step

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Keep further objects in saved states, by ``state_dict`` and ``load_state_dict``.

        Their states hold plain data, tensors and arrays; anything else is refused at save time, naming the key.

        Raises:
            ConfigurationError: an object has no such methods.
        """
        self.checkpoints.register(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, weights, directory)`` before each save.

        ``weights`` holds a state dict for each model; what the hook takes out of it is not saved. What the hook writes
        into ``directory`` becomes part of the checkpoint: it is a work directory until the state is complete, and gets
        the checkpoint's name then.
        """
        return self.checkpoints.register_save_hook(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, directory)`` before each load; a model that it takes out of the list is not loaded.

        ``directory`` is the checkpoint; the files that hooks wrote into it have been verified.
        """
        return self.checkpoints.register_load_hook(hook)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Save models, optimizers, schedulers, loaders, generators and registered objects; every process calls it.

        The directory is complete or absent, at every instant; one that is there is replaced.

        Args:
            output_dir: where; without it, and with automatic naming,
                ``<project_dir>/checkpoints/checkpoint_<iteration>``. The main process's counts.
            safe_serialization: False is refused: nothing is pickled.
            save_model_func_kwargs: accepted for Accelerate's sake.

        Returns:
            The path.

        Raises:
            CheckpointError: a value that cannot be saved, by key, or a storage that fails.
        """
        with self.collectives.during("save_state"):
            return self.checkpoints.save_state(output_dir, safe_serialization)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Any = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Continue where `save_state` was called: prepare everything first, in the same order; every process calls it.

        Of a directory that DeepSpeed wrote (without ZeRO, or what ``ds_to_universal`` made) weights, moments and the
        schedule are taken; random numbers, the position in the data and a loss scale are not in it.

        Args:
            input_dir: what `save_state` or DeepSpeed wrote; by default the project's newest one that is whole.
                The main process's counts.
            load_kwargs: accepted for Accelerate's sake.
            load_model_func_kwargs: of ``load_state_dict`` of the models: ``strict``, ``assign``.

        Raises:
            CheckpointError: there is none, it is damaged, or does not fit what was prepared.
        """
        with self.collectives.during("load_state"):
            self.checkpoints.load_state(input_dir, load_model_func_kwargs)
        self.tracking.continues = True

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The weights of a prepared model, whole, by the user's names.

        Where they are divided (FSDP, DeepSpeed, a mesh) every process calls it, and the main process gets them, on the
        CPU; the others get an empty dict: a device never holds more than one whole weight at a time.
        """
        return self.checkpoints.get_state_dict(model, unwrap)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights as Hugging Face libraries load them: ``model.safetensors``, or shards and an index.

        A tied weight is written once, under its first name.

        Args:
            model: prepared or not.
            save_directory: other files in it are not changed.
            max_shard_size: of a file, in bytes or as ``"5GB"``.
            safe_serialization: False writes ``pytorch_model.bin``, a pickle.
        """
        self.checkpoints.save_model(model, save_directory, max_shard_size, safe_serialization)

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """``torch.save`` on the main process; with ``safe_serialization`` a dict of tensors as safetensors.

        A file that is there is replaced when the new one is whole.

        Raises:
            ConfigurationError: ``safe_serialization``, and something is not a tensor.
        """
        self.checkpoints.save(obj, f, safe_serialization)

    # -- trackers --------------------------------------------------------------------------------------------------

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start the trackers of ``log_with``; every process calls it, the main process logs.

        With a ``project_dir`` or ``logging_dir``, ``<directory>/<project_name>`` gets a journal and a ``report.html``.

        Args:
            project_name: W&B's project; for trackers that write files, a directory below ``logging_dir``.
            config: hyperparameters.
            init_kwargs: constructor arguments, by the tracker's name.
        """
        self.tracking.start(project_name, config, init_kwargs, self._report_facts)

    def _report_facts(self) -> dict[str, Any]:
        rows = [["Accelerator", name, str(one.value), one.origin] for name, one in self.origins.items()]
        return {"explain": str(self.explain()), "configuration": rows}

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Log values with every tracker, on the main process.

        Args:
            values: by name; a tensor of one element is read here, which waits for the device.
            step: of the values; by default one more than the last.
            log_kwargs: by the tracker's name, options of its ``log``.
        """
        self.tracking.log(values, step, log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by name; ``unwrap``: the object that it writes with (W&B's run, TensorBoard's writer).

        On the other processes every call of it does nothing.

        Raises:
            ConfigurationError: there is none of this name.
        """
        return self.tracking.get(name, unwrap)

    def end_training(self) -> None:
        """Close every tracker, write the report, and wait for every process."""
        self.tracking.finish()
        self.wait_for_everyone()

    # -- what this process is made of ------------------------------------------------------------------------------

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

    def explain(self) -> Text:
        """The parts of this process, a line each: group, device, wrapping, loaders; and the origins of its options."""
        lines = [
            f"process {self.process_index} of {self.num_processes}, pid {os.getpid()} ({self.environment.source})",
            f"strategy: {self.strategy.describe()}",
            f"group: {self.backend or 'none'}, device {self.device}",
            f"precision: {self.precision.name}",
            f"accumulation: {self.accumulation.steps} micro-batches a step",
            *(f"model: {_wrapping(model)}" for model in self.prepared.models),
            *(f"loader: {loader.describe()}" for loader in self.prepared.loaders),
            *(f"scheduler: {scheduler.describe()}" for scheduler in self.prepared.schedulers),
            *describe_origins(self.origins.items()),
        ]
        return Text("\n".join(lines))

    def __repr__(self) -> str:
        """The text that Accelerate prints of its state; `explain` says more."""
        plugin = self.deepspeed_plugin
        config = "" if plugin is None else f"ds_config: {plugin.deepspeed_config}\n"
        return f"{self.processes!r}\nMixed precision type: {self.mixed_precision}\n{config}"


def _wrapping(model: nn.Module) -> str:
    inner = unwrap(model)
    return type(model).__name__ + (f" of {type(inner).__name__}" if inner is not model else "")
