"""`Accelerator`: the strategy, precision, loaders and checkpoints of a Trainer, for a custom training loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Final, NoReturn, TypeVar, final
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainer_kit.accelerator.accumulation import GradientState
from trainer_kit.accelerator.batch_size import release_memory
from trainer_kit.accelerator.checkpoints import Checkpoints
from trainer_kit.accelerator.composition import (
    HangTimeout,
    Options,
    chosen_sizes,
    engine_arguments,
    find_option,
    named_dynamo,
    named_loaders,
    named_options,
    named_project,
    named_trackers,
    plugins,
    resolve_accumulation,
    resolve_precision,
    started_strategy,
    started_watchdog,
)
from trainer_kit.accelerator.engine_plugins import describe_engine
from trainer_kit.accelerator.loader import (
    LaterLoader,
    PreparedLoader,
    skip_first_batches,
)
from trainer_kit.accelerator.model_weights import ModelWeights, write_object
from trainer_kit.accelerator.optimizer import AcceleratedOptimizer, AcceleratedScheduler
from trainer_kit.accelerator.prepared import Optimizers, Parameters, Prepared
from trainer_kit.accelerator.processes import (
    AcceleratorProcesses,
    DistributedType,
    ParallelRanks,
)
from trainer_kit.accelerator.profiling import profiling
from trainer_kit.accelerator.trackers import LoggedValues, Tracker, Trackers
from trainer_kit.accelerator.wrapping import (
    in_precision,
    spans_devices,
    with_exchange,
    without_exchange,
)
from trainer_kit.core.arguments import known_arguments
from trainer_kit.core.configuration_sources import describe_origins
from trainer_kit.core.display import Text, plural
from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.protocols import Group
from trainer_kit.core.types import (
    Batch,
    Function,
    HyperParameters,
    JsonObject,
    Keywords,
    Loaders,
    LRSchedulerLike,
    Nested,
    StateDict,
    Stateful,
)
from trainer_kit.options.accelerate_records import takes_accelerate_records
from trainer_kit.options.deepspeed import (
    DeepSpeedPlugin,
    DummyOptim,
    DummyScheduler,
    active_plugin,
    named_plugins,
)
from trainer_kit.options.fp8 import AORecipeKwargs, TERecipeKwargs
from trainer_kit.options.megatron import MegatronLMPlugin
from trainer_kit.options.parallelism import ParallelismConfig, TorchTensorParallelPlugin
from trainer_kit.options.records import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
    by_kind,
    micro_batches,
)
from trainer_kit.options.refusals import refused
from trainer_kit.precision.precision import Precision
from trainer_kit.strategies.strategy import Strategy

__all__ = ["Accelerator", "forget_newest", "newest"]

_F = TypeVar("_F", bound=Function)
# Weak: an Accelerator ends with the script's last reference to it, and functions without one then find none.
_NEWEST: list[ReferenceType[Accelerator]] = []
_ACCELERATE_PRECISIONS = {"32-true": "no", "16-mixed": "fp16", "bf16-mixed": "bf16"}


def _list_property(owner: str, name: str) -> Any:
    """A property for the list ``name`` of the attribute ``owner``; assigning to it replaces the list's content."""

    def get_list(accelerator: Accelerator) -> list[Any]:
        values: list[Any] = getattr(getattr(accelerator, owner), name)
        return values

    def replace_content(accelerator: Accelerator, values: Sequence[Any]) -> None:
        get_list(accelerator)[:] = values

    return property(get_list, replace_content)


def newest() -> Accelerator | None:
    """Return the newest Accelerator, if the script still holds it, for functions without an Accelerator argument."""
    return _NEWEST[0]() if _NEWEST else None


def forget_newest(reset_partial_state: bool = False) -> None:
    """Make `newest` return None until the next Accelerator is made; a `PartialState` keeps no state to reset."""
    _NEWEST.clear()


_UNNAMED: Final = dict.fromkeys(
    (
        "model",
        "optimizer",
        "dataloader",
        "scheduler",
        "train_dataloader",
        "lr_scheduler",
    ),
    "pass objects without names: model, optimizer = accelerator.prepare(model, optimizer)",
)


@final
class Accelerator:
    """The features of a Trainer without its loop, under Hugging Face Accelerate's names.

    To run an Accelerate script, replace ``from accelerate import`` with ``from trainer_kit import``. Two Accelerators
    in one process are independent.

    Args:
        device_placement: move models and batches to the device.
        split_batches: as for `DataLoaderConfiguration`.
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"``, ``"fp8"`` (`AORecipeKwargs` or `TERecipeKwargs` set its
            options), or a name or object for the Trainer's ``precision``; by default the value of
            ``TRAINER_KIT_MIXED_PRECISION`` or ``ACCELERATE_MIXED_PRECISION``, else ``"no"``.
        gradient_accumulation_steps: micro-batches per optimizer step; environment variables may set this too.
        cpu: compute on the CPU even if the machine has an accelerator.
        dataloader_config: how loaders are sharded.
        rng_types: random generators whose states every epoch copies from the main process: "torch", "cuda", "python",
            "numpy"; "generator", the data order, is the same on every process without it.
        log_with: trackers, by name (see `LoggerType`) or as objects.
        project_dir: the directory for checkpoints and logs.
        project_config: further options of the project.
        gradient_accumulation_plugin: further options of accumulation.
        step_scheduler_with_optimizer: schedulers advance only when optimizers step; False: at each call.
        scheduler_steps_per_process: an optimizer step advances schedulers once for each process, as under Accelerate,
            unless ``split_batches``; False: once.
        kwargs_handlers: option objects, such as `DistributedDataParallelKwargs`.
        dynamo_backend: the backend of ``torch.compile`` for prepared models.
        dynamo_plugin: further options of ``torch.compile``.
        seed: the seed of the data order; by default the seed that the main process last passed to ``set_seed`` or
            ``torch.manual_seed`` before it prepares a loader.
        fsdp_plugin: train under FSDP; by default as set by the launcher.
        megatron_lm_plugin: train under Megatron; likewise.
        parallelism_config: combine several kinds of parallelism; by default as set by the launcher.
        torch_tp_plugin: use tensor parallelism alone.
        deepspeed_plugin: train under DeepSpeed; likewise.
        strategy: a strategy object, in place of the plugins.
        deepspeed_plugins: several by name; the first is active until `select_deepspeed_plugin`.
        hang_timeout: seconds (or a duration such as ``"5min"``) without progress, after which the run ends with exit
            code 75 and names the process that hangs; None: ten times the slowest ordinary step, at least 60 s, and
            half an hour outside steps; False: only report processes that wait. ``TRAINER_KIT_HANG_TIMEOUT`` sets the
            default.
        debug: every process prints its configuration, and collectives first compare shapes; ``TRAINER_KIT_DEBUG=1``.
        **unknown: not accepted.

    Raises:
        ConfigurationError: an argument is invalid, or does not work with the others or on this machine.
        TypeError: an argument is unknown; the message suggests a name.

    Example:
        >>> from torch import nn
        >>> accelerator = Accelerator(cpu=True)
        >>> model = accelerator.prepare(nn.Linear(2, 1))
        >>> optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> accelerator.backward(model(torch.ones(4, 2)).mean())
        >>> optimizer.step()
    """

    # Attributes of Accelerate with a constant value here.
    initialized = True
    # LOMO optimizers are refused.
    has_lomo_optimizer = False
    # Transformer Engine's layers enter its context.
    delayed_fp8_autocast = False
    # FP8RecipeKwargs makes the record of its backend; MS-AMP is refused.
    fp8_recipe_handler = None
    msamp_recipe_handler = None
    # The data order is always a function of seed and epoch.
    use_seedable_sampler = True
    # Positions of loaders are always part of a saved state.
    use_stateful_dataloader = True
    # Accelerate scripts call it between two Accelerators.
    _reset_state = staticmethod(forget_newest)
    # Accelerate scripts read these lists, and may replace them.
    log_with = _list_property("tracking", "log_with")
    trackers = _list_property("tracking", "started")
    _models = _list_property("prepared", "models")
    _optimizers = _list_property("prepared", "optimizers")
    _schedulers = _list_property("prepared", "schedulers")
    _dataloaders = _list_property("prepared", "loaders")

    @takes_accelerate_records
    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: str | Precision | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        *,
        rng_types: Iterable[object] | None = None,
        log_with: object = None,
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
        hang_timeout: HangTimeout = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        megatron_lm_plugin: MegatronLMPlugin | None = None,
        parallelism_config: ParallelismConfig | None = None,
        torch_tp_plugin: TorchTensorParallelPlugin | None = None,
        strategy: Strategy | None = None,
        deepspeed_plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None,
        deepspeed_plugins: Mapping[str, DeepSpeedPlugin] | None = None,
        **unknown: NoReturn,  # so that a type checker refuses each
    ) -> None:
        # First, while no other local name exists: it reads arguments by name.
        engines = engine_arguments(locals())
        self.environment = Environment.detect()
        self.deepspeed_plugins = named_plugins(engines)
        options = {
            **plugins(engines, self.deepspeed_plugins),
            **by_kind(kwargs_handlers),
        }
        plugin = gradient_accumulation_plugin
        steps = gradient_accumulation_steps
        self.origins = named_options(
            options, cpu, mixed_precision, steps, plugin, debug
        )
        on_cpu = bool(self.origins["use_cpu"].value)
        precision_name = self.origins["mixed_precision"].value
        default_steps = self.origins["gradient_accumulation_steps"].value
        debugging = self.origins["debug"].value
        self.origins |= chosen_sizes(options)
        self.strategy = started_strategy(options, on_cpu, self.environment)
        self._engine_options = {**options, **describe_engine(strategy, self.strategy)}
        # A strategy object or the launcher may have chosen tensor parallelism too; Accelerate shows it under this name.
        split_layers = find_option(self._engine_options, TorchTensorParallelPlugin)
        self.torch_tp_plugin = torch_tp_plugin or split_layers
        self.precision = resolve_precision(precision_name, self.strategy, options)
        self.dataloader_config = named_loaders(dataloader_config, split_batches)
        self.dynamo_plugin = dynamo_plugin or named_dynamo(dynamo_backend)
        self._project = named_project(project_config, project_dir)
        self.rng_types = rng_types
        self.accumulation = resolve_accumulation(
            plugin, steps, default_steps, self.strategy, self.precision.name
        )
        self.processes = AcceleratorProcesses(
            self.environment, self.strategy, debugging
        )
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
            # `seed=` of this Accelerator has priority over Accelerate's option.
            data_seed=self.dataloader_config.data_seed if seed is None else seed,
            rng_types=rng_types,
        )
        self._compose(options, named_trackers(log_with), hang_timeout)

    def _compose(
        self, options: Options, log_with: list[str | Tracker], hang_timeout: HangTimeout
    ) -> None:
        """Create the objects that depend on those of the constructor."""
        self.profile_handler = find_option(options, ProfileKwargs) or ProfileKwargs()
        self.autocast_handler = find_option(options, AutocastKwargs)
        self.scaler_handler = find_option(options, GradScalerKwargs)
        self.ddp_handler = find_option(options, DistributedDataParallelKwargs)
        self.init_handler = find_option(options, InitProcessGroupKwargs)
        project = self._project
        self.collectives = self.processes.collectives
        self.parallel_ranks = ParallelRanks(self.strategy)
        self.checkpoints = Checkpoints(
            self.processes,
            self.strategy,
            self.precision,
            self.accumulation,
            self.prepared,
            project,
        )
        self._model_weights = ModelWeights(self.processes, self.strategy)
        self.tracking = Trackers(log_with, self.processes, project)
        self._watchdog = started_watchdog(
            hang_timeout,
            self.processes,
            self.accumulation,
            project,
            self.tracking.end_by_hang,
        )
        # Weakly: functions such as `gather` find the newest Accelerator, but do not keep it alive.
        _NEWEST[:] = [ref(self)]

    # -- preparing -------------------------------------------------------------------------------------------------

    def __getstate__(self) -> StateDict:
        """Leave out the watchdog: its thread belongs to this process."""
        return {**self.__dict__, "_watchdog": None}

    @known_arguments(_UNNAMED)
    def prepare(
        self, *objects: Any, device_placement: Sequence[bool | None] | None = None
    ) -> Any:
        """Prepare models, optimizers, loaders and schedulers, in any mix and order, for this number of processes.

        Args:
            objects: objects of other types, and prepared ones, are returned unchanged.
            device_placement: one value per object: whether it is moved; by default the Accelerator's setting.

        Returns:
            The prepared objects in the same order; a single object without a tuple.

        Raises:
            ConfigurationError: the model of an optimizer is not prepared.
        """
        prepared = self.prepared.prepare(objects, device_placement)
        if self.debug:
            self.processes.print_everywhere(self.explain())
        if len(prepared) == 1:
            return prepared[0]
        return prepared

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Move a model to its device, apply the precision, and wrap it for several processes.

        Args:
            model: changed in place, and wrapped if there are several processes.
            device_placement: whether the model is moved to the device.
            evaluation_mode: the model is not trained, so it needs no gradient exchange.
        """
        return self.prepared.prepare_model(model, device_placement, evaluation_mode)

    def prepare_optimizer(
        self, optimizer: Optimizer | DummyOptim, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Wrap an optimizer, so that it steps only when gradients are complete.

        Args:
            optimizer: an optimizer of a prepared model's parameters, or a `DummyOptim` under DeepSpeed.
            device_placement: accepted, without effect: an optimizer's state is created where its parameters are.
        """
        return self.prepared.prepare_optimizer(optimizer)

    def prepare_data_loader(
        self,
        data_loader: Loaders,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: object = None,
    ) -> PreparedLoader:
        """Shard a loader over the processes; see `PreparedLoader`. Collective call.

        The data order depends on the Accelerator's ``seed``, else on the main process's seed at the time of this call.

        Args:
            data_loader: any iterable of batches; a prepared loader is returned unchanged.
            device_placement: whether batches are moved to the device; None: the Accelerator's setting.
            slice_fn_for_dispatch: refused.

        Raises:
            ConfigurationError: ``slice_fn_for_dispatch`` is given.
        """
        if slice_fn_for_dispatch is not None:
            raise refused("slice_fn_for_dispatch", "slice_fn_for_dispatch=...")
        return self.prepared.prepare_loader(data_loader, device_placement)

    def prepare_scheduler(
        self, scheduler: LRSchedulerLike | DummyScheduler
    ) -> AcceleratedScheduler:
        """Wrap a scheduler, so that an optimizer step advances it, by default once for each process.

        Accelerate does the same, and its scripts multiply the length of schedules by the number of processes. With
        ``split_batches=True`` or ``Accelerator(scheduler_steps_per_process=False)`` a scheduler advances once per step;
        ``ReduceLROnPlateau``, whose patience counts values, and DeepSpeed's own schedules always do.

        Args:
            scheduler: a scheduler of a prepared optimizer, or a `DummyScheduler` under DeepSpeed.
        """
        return self.prepared.prepare_scheduler(scheduler)

    def unwrap_model(
        self,
        model: nn.Module,
        keep_fp32_wrapper: bool = True,
        keep_torch_compile: bool = False,
    ) -> Any:
        """Return the user's model, without the wrappers of `prepare`.

        Args:
            model: a prepared model, or any other.
            keep_fp32_wrapper: keep the precision of the model's forward.
            keep_torch_compile: keep a compiled model compiled.
        """
        return self.prepared.unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def skip_first_batches(
        self, dataloader: Iterable[Batch], num_batches: int = 0
    ) -> LaterLoader:
        """Return a view of a loader that begins with batch ``num_batches``; a prepared loader does not read the others.

        Args:
            dataloader: a loader, prepared or not, or any iterable; it does not change.
            num_batches: the number of batches that every iteration leaves out.
        """
        return skip_first_batches(dataloader, num_batches)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether the layers of a model are on several devices; training of such a model is not supported.

        Args:
            model: a model; one that `dispatch_model` placed has a device map.
        """
        return spans_devices(model)

    def free_memory(self, *objects: object) -> list[None]:
        """Release all prepared objects, collect garbage, and empty the cache of the accelerator.

        Args:
            objects: any objects.

        Returns:
            None for each object: ``model, optimizer = accelerator.free_memory(model, optimizer)``.
        """
        self.prepared.clear()
        return release_memory(*objects)

    def clear(self, *objects: object) -> list[None]:
        """An alias of `free_memory`.

        Args:
            objects: any objects.

        Returns:
            None for each object.
        """
        return self.free_memory(*objects)

    @property
    def device_placement(self) -> bool:
        """Whether models and batches are moved to the device."""
        return self.prepared.device_placement

    @device_placement.setter
    def device_placement(self, moves: bool) -> None:
        self.prepared.device_placement = moves

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether schedulers advance only when optimizers step."""
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
        """Whether a loader's batch size is the total over all processes."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the main process reads all batches, and sends the others theirs."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether last batches are filled up from the start of the data."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        # A copy, which checks the value.
        replace(self.dataloader_config, even_batches=even)
        self.dataloader_config.even_batches = even

    @property
    def non_blocking(self) -> bool:
        """Whether copies to an accelerator are asynchronous."""
        return self.dataloader_config.non_blocking

    # -- the steps of a loop ---------------------------------------------------------------------------------------

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Run one micro-batch: gradients are exchanged, and optimizers step, only at the end of a window.

        A batch counts once, however many models are trained on it: ``accumulate(a)`` and ``accumulate(b)`` on one
        batch, nested or one after the other, belong to one micro-batch. Asking again for the same models begins the
        next one.

        Args:
            models: the models that are trained in it.
        """
        self.accumulation.models = models
        return self.accumulation

    def backward(
        self, loss: Tensor, weight: float | None = None, **options: Any
    ) -> None:
        """Run the backward pass; use this in place of ``loss.backward()``.

        Args:
            loss: a scalar: the mean over the batch; with ``weight`` a sum.
            weight: the number of terms in the sum: ``backward(token_losses.sum(), weight=tokens)`` gives the exact mean
                over all tokens of the window on all processes.
            options: arguments of ``Tensor.backward``; an engine with its own backward accepts only ``retain_graph``.
        """
        prepared = self.prepared
        if prepared.checks.active:
            prepared.check_backward(loss)
        scaled = self.precision.scale_loss(self.accumulation.scale(loss, weight))
        if prepared.backward is None:
            scaled.backward(**options)  # type: ignore[no-untyped-call]
        else:
            prepared.backward(scaled, **options)

    def lomo_backward(self, loss: Tensor, learning_rate: float) -> None:
        """Refuse the call: LOMO optimizers are not supported.

        Args:
            loss: not used.
            learning_rate: not used.

        Raises:
            ConfigurationError: always.
        """
        raise refused("lomo_backward")

    def unscale_gradients(self, optimizer: Optimizers | None = None) -> None:
        """Unscale fp16 gradients, and correct them for the weights of their window; inside a window this does nothing.

        `clip_grad_norm_` and `clip_grad_value_` do this for the parameters that they clip.

        Args:
            optimizer: one prepared optimizer or several; None: all of them.
        """
        self.prepared.unscale_gradients(optimizer)

    def clip_grad_norm_(
        self, parameters: Parameters, max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Clip gradients by their total norm over ``parameters``, at the end of a window only.

        Args:
            parameters: a parameter, or an iterable of them: ``model.parameters()``.
            max_norm: the largest total norm.
            norm_type: the order of the norm; ``inf`` for the largest element.

        Returns:
            The norm before clipping, a scalar on the device; None inside a window.

        Raises:
            ConfigurationError: ``parameters`` is a module, a method or something else.
        """
        if not self.accumulation.sync:
            return None
        complete = self.prepared.unscale_gradients_of(parameters)
        return self.strategy.clip_gradients(
            complete, max_norm, "norm", float(norm_type)
        )

    def clip_grad_value_(self, parameters: Parameters, clip_value: float) -> None:
        """Clip each element of the gradients, at the end of a window only.

        Args:
            parameters: as for `clip_grad_norm_`.
            clip_value: the largest absolute value of an element.
        """
        if self.accumulation.sync:
            complete = self.prepared.unscale_gradients_of(parameters)
            self.strategy.clip_gradients(complete, clip_value, "value")

    def autocast(
        self, autocast_handler: AutocastKwargs | None = None
    ) -> AbstractContextManager[None]:
        """Apply the precision to computations in this context that are outside a prepared model.

        Args:
            autocast_handler: options that change the precision's autocast; by default those of the Accelerator's
                ``kwargs_handlers``. A precision without autocast ignores them.
        """
        handler = autocast_handler or self.autocast_handler
        return in_precision(self.precision, handler, self.device)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Skip the gradient exchange of ``model`` in this context.

        Args:
            model: a prepared model. The first backward outside the context exchanges the gradients of all
                micro-batches.
        """
        if not self.use_distributed:
            return nullcontext()
        return without_exchange(model)

    def trigger_sync_in_backward(
        self, model: nn.Module
    ) -> AbstractContextManager[None]:
        """Exchange gradients in the next backward of this context, even if its forward ran under `no_sync`.

        Args:
            model: a prepared model; only DDP needs this, other models are not affected.
        """
        return with_exchange(model)

    def join_uneven_inputs(
        self, joinables: Sequence[object], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Let a process that has no batches left take part in the gradient exchanges of the others.

        Args:
            joinables: prepared models.
            even_batches: whether loaders, also those over an ``IterableDataset``, repeat samples inside the context; by
                default as configured.

        Raises:
            ConfigurationError: the strategy needs every process in each step.
        """
        return self.prepared.join_uneven_inputs(joinables, even_batches)

    def maybe_context_parallel(
        self,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Collection[Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Run one step on sequences that `ParallelismConfig(cp_size=...)` shards; without it this does nothing.

        Inside the context each buffer is replaced in place with this process's shard. Attention and the mean of a cross
        entropy cover the full sequence. Forward, loss and backward belong inside; shift targets before. If a model
        counts positions itself, they begin at 0 on each shard: pass positions as a buffer.

        Args:
            buffers: tensors with a sequence dimension: inputs, targets, positions.
            buffer_seq_dims: the sequence dimension of each buffer.
            no_restore_buffers: buffers that are not needed in full afterwards.

        Raises:
            StrategyError: a sequence cannot be sharded evenly, or no attention was called.
        """
        return self.parallel_ranks.divided_sequences(
            buffers or (), buffer_seq_dims or (), no_restore_buffers or ()
        )

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch ends its window, so that gradients are complete and optimizers step."""
        return self.accumulation.sync

    @sync_gradients.setter
    def sync_gradients(self, sync: bool) -> None:
        if sync not in (True, False):
            raise ConfigurationError(
                "sync_gradients is True or False", found=f"sync_gradients={sync!r}"
            )
        self.accumulation.set_sync(bool(sync))

    @property
    def gradient_accumulation_steps(self) -> int:
        """The number of micro-batches per optimizer step."""
        return self.accumulation.steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.accumulation.steps = micro_batches(
            steps, "accelerator.gradient_accumulation_steps"
        )

    @property
    def gradient_state(self) -> GradientState:
        """The state of gradient accumulation."""
        return GradientState(self.accumulation)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an optimizer's last step was skipped because gradients overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self.prepared.optimizers)

    # -- collective calls ------------------------------------------------------------------------------------------

    def gather(self, tensor: Nested) -> Nested:
        """Concatenate the nested tensors of all processes along the first dimension, in rank order; collective call.

        Args:
            tensor: nested tensors, of equal shape and dtype on every process; see `pad_across_processes`.

        Returns:
            The same nesting; tensors of shape ``(n, ...)`` become ``(processes * n, ...)``, and scalars become vectors.

        Raises:
            RankError: on every process, if shapes, dtypes or the nesting differ.
        """
        return self.collectives.gather(tensor)

    def gather_for_metrics(
        self, input_data: Nested, use_gather_object: bool = False
    ) -> Nested:
        """Gather the results of the current batch from all processes, without those of repeated samples.

        Of processes with the same batches, only one contributes.

        Args:
            input_data: nested tensors with one entry per sample along the first dimension, or other objects: a list
                holds one entry per sample, and a tuple, mapping or dataclass holds several such values, for example
                ``(predictions, references)``. A scalar is gathered from each process.
            use_gather_object: gather tensors as objects: their shapes may then differ.

        Returns:
            Tensors in the same nesting. Objects in one list: lists and tuples of the processes are joined, as
            `gather_object` joins them, and other values are collected in rank order.

        Raises:
            ConfigurationError: on every process, if the batch has repeated samples and a value has no entry per sample.
        """
        return self.collectives.gather_for_metrics(
            input_data, use_gather_object, self.accumulation.batches
        )

    def reduce(
        self, tensor: Nested, reduction: str = "sum", scale: float = 1.0
    ) -> Nested:
        """Reduce nested tensors over the processes; the arguments do not change.

        Args:
            tensor: nested tensors, of equal shape and dtype on every process.
            reduction: ``"sum"`` (that of `trainer_kit.reduce` is ``"mean"``), ``"mean"`` (the mean of integers is a
                float), ``"max"``, ``"min"``, or ``"none"``: return the tensors unchanged.
            scale: a factor for the result.

        Raises:
            ConfigurationError: an unknown reduction.
            RankError: on every process, if shapes, dtypes or the nesting differ.
        """
        return self.collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(
        self,
        tensor: Nested,
        dim: int = 0,
        pad_index: float = 0,
        pad_first: bool = False,
    ) -> Nested:
        """Pad nested tensors along ``dim`` to the largest length on any process, so that they can be gathered.

        Args:
            tensor: nested tensors; processes may differ in the length of ``dim``.
            dim: the dimension; tensors without this dimension do not change.
            pad_index: the value of the padding.
            pad_first: pad at the beginning.

        Raises:
            RankError: on every process, if the nesting or numbers of dimensions differ.
        """
        return self.collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Set the trigger; on every process the next `check_trigger` returns True."""
        self.collectives.set_trigger()

    def check_trigger(self) -> bool:
        """Whether any process has called `set_trigger` since the last check; collective call."""
        return self.collectives.check_trigger()

    @property
    def flag_tensor(self) -> Tensor:
        """1 where this process has called `set_trigger` since the last check, else 0."""
        return torch.tensor(int(self.collectives.triggered), device=self.device)

    # -- the processes ---------------------------------------------------------------------------------------------

    def wait_for_everyone(self) -> None:
        """Wait until every process makes this call."""
        self.processes.wait_for_everyone()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Run the block on the main process first, then on all others."""
        return self.processes.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Run the block on the first process of each machine first, then on the others."""
        return self.processes.local_main_process_first()

    def on_main_process(self, function: _F) -> _F:
        """Decorator: only the main process calls ``function``.

        Args:
            function: the function to decorate; a process that does not call it gets None in place of its result.
        """
        return self.processes.on_main_process(function)

    def on_local_main_process(self, function: _F) -> _F:
        """Decorator: only the first process of each machine calls ``function``.

        Args:
            function: the function to decorate; a process that does not call it gets None in place of its result.
        """
        return self.processes.on_local_main_process(function)

    def on_last_process(self, function: _F) -> _F:
        """Decorator: only the last process calls ``function``.

        Args:
            function: the function to decorate; a process that does not call it gets None in place of its result.
        """
        return self.processes.on_last_process(function)

    def on_process(
        self, function: _F | None = None, process_index: int | None = None
    ) -> Any:
        """Decorator: only process ``process_index`` calls ``function``.

        Args:
            function: the function to decorate; a process that does not call it gets None in place of its result.
                None returns the decorator: ``@accelerator.on_process(process_index=1)``.
            process_index: the rank of the process, from 0; None: no process.
        """
        return self.processes.on_process(function, process_index)

    def on_local_process(
        self, function: _F | None = None, local_process_index: int | None = None
    ) -> Any:
        """Decorator: only process ``local_process_index`` of each machine calls ``function``.

        Args:
            function: the function to decorate; a process that does not call it gets None in place of its result.
                None returns the decorator: ``@accelerator.on_local_process(local_process_index=1)``.
            local_process_index: the rank of the process on its machine, from 0; None: no process.
        """
        return self.processes.on_local_process(function, local_process_index)

    def split_between_processes(
        self, inputs: Nested, apply_padding: bool = False
    ) -> AbstractContextManager[Nested]:
        """Yield this process's part of a list, a tuple, a tensor, or a dict of these; the first processes get one more.

        Args:
            inputs: the data to divide; the values of a dict have equal lengths.
            apply_padding: repeat the last element, so that all parts have equal lengths.

        Raises:
            ConfigurationError: the values of a dict differ in length.
        """
        return self.processes.split_between_processes(inputs, apply_padding)

    def print(self, *values: object, **options: Any) -> None:
        """Print once on each machine.

        Args:
            values: the objects to print.
            options: of ``print``: ``sep``, ``end``, ``file``, ``flush``.
        """
        self.processes.print(*values, **options)

    def set_device(self) -> None:
        """Accepted, without effect: the device is chosen when the process starts."""

    def destroy_process_group(self, group: ProcessGroup | None = None) -> None:
        """Leave a process group; without process groups this does nothing.

        Args:
            group: a group of ``torch.distributed``; None: the group of all processes.
        """
        self.processes.destroy_process_group(group)

    @property
    def state(self) -> Accelerator:
        """The Accelerator itself: Accelerate stores ranks and device in a separate object."""
        return self

    @property
    def world(self) -> Group:
        """The group of all processes."""
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
        """The number of processes."""
        return self.processes.num_processes

    @property
    def process_index(self) -> int:
        """The rank of this process."""
        return self.processes.process_index

    @property
    def local_process_index(self) -> int:
        """The rank of this process on its machine."""
        return self.processes.local_process_index

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first process."""
        return self.processes.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.processes.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last process."""
        return self.processes.is_last_process

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.processes.use_distributed

    @property
    def multi_device(self) -> bool:
        """Whether there are several processes, each on an accelerator."""
        return self.processes.use_distributed and self.device.type != "cpu"

    @property
    def fork_launched(self) -> bool:
        """Whether a launcher of notebooks has forked this process."""
        return self.processes.fork_launched

    @property
    def should_save_model(self) -> bool:
        """Whether this process writes weights by itself: the first of its machine, and all of a mesh."""
        return self.is_local_main_process or self.parallelism_config is not None

    @property
    def distributed_type(self) -> DistributedType:
        """The engine, if Accelerate has a name for it; else the kind of distributed run."""
        return self.processes.distributed_type

    @property
    def backend(self) -> str | None:
        """The backend of the process group: "gloo", "nccl", …; None for a single process."""
        return self.processes.backend

    @property
    def debug(self) -> bool:
        """Whether processes compare collectives before the exchange."""
        return self.collectives.debug

    @debug.setter
    def debug(self, debug: bool) -> None:
        self.collectives.debug = debug

    # -- parallelism -----------------------------------------------------------------------------------------------

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The sizes of the mesh axes; None for data parallelism alone."""
        return self.parallel_ranks.config

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The device mesh, with one axis per kind of parallelism; None without a mesh."""
        return self.strategy.mesh

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """An alias of `torch_device_mesh`."""
        return self.strategy.mesh

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether the parameters are sharded on a mesh."""
        return self.strategy.mesh is not None

    @property
    def is_fsdp2(self) -> bool:
        """Whether FSDP shards the parameters, alone or on a mesh: always as FSDP2, also for ``fsdp_version=1``."""
        return self.distributed_type == DistributedType.FSDP or bool(self.fsdp_plugin)

    @property
    def fsdp_plugin(self) -> FullyShardedDataParallelPlugin | None:
        """The options of FSDP, from the argument or the launcher, if it runs; those of a ``strategy=`` object too."""
        runs_fsdp = self.distributed_type == DistributedType.FSDP
        if not runs_fsdp and self.strategy.mesh is None:
            return None
        return find_option(self._engine_options, FullyShardedDataParallelPlugin)

    @property
    def megatron_lm_plugin(self) -> MegatronLMPlugin | None:
        """The options of Megatron, from the argument or the launcher, if it runs."""
        if self.distributed_type != DistributedType.MEGATRON_LM:
            return None
        return find_option(self._engine_options, MegatronLMPlugin)

    @property
    def data_parallel_rank(self) -> int:
        """The data shard of this process; on a mesh of `parallelism_config` the index of its model replica."""
        return self.parallel_ranks.data_rank

    @property
    def data_parallel_shard_rank(self) -> int:
        """The index of this process's parameter shard."""
        return self.parallel_ranks.rank("dp_shard")

    @property
    def tensor_parallel_rank(self) -> int:
        """The tensor-parallel rank: the index of this process's part of each layer."""
        return self.parallel_ranks.rank("tp")

    @property
    def context_parallel_rank(self) -> int:
        """The context-parallel rank: the index of this process's part of each sequence."""
        return self.parallel_ranks.rank("cp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """The index of this process's pipeline stage."""
        return self.parallel_ranks.rank("pp")

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The active DeepSpeed plugin, or that of a ``strategy=`` object; None under other engines."""
        plugin = active_plugin(self.deepspeed_plugins)
        return plugin or find_option(self._engine_options, DeepSpeedPlugin)

    def get_deepspeed_plugin(self, name: str) -> DeepSpeedPlugin:
        """Return a plugin of ``Accelerator(deepspeed_plugins={name: plugin})``.

        Args:
            name: its key in that mapping.

        Raises:
            ConfigurationError: no plugin has this name.
        """
        if name not in self.deepspeed_plugins:
            names = ", ".join(self.deepspeed_plugins) or "none"
            raise ConfigurationError(f"unknown DeepSpeed plugin {name!r}", found=names)
        return self.deepspeed_plugins[name]

    def select_deepspeed_plugin(self, name: str) -> None:
        """Make another plugin active; call this before a model is prepared.

        Args:
            name: its key in ``Accelerator(deepspeed_plugins=...)``.

        Raises:
            ConfigurationError: no plugin has this name.
        """
        selected = self.get_deepspeed_plugin(name)
        # DeepSpeed plugins exist only under its strategy, which has this method.
        self.strategy.use(selected.deepspeed_config)  # type: ignore[attr-defined]
        for plugin in self.deepspeed_plugins.values():
            plugin.selected = plugin is selected

    # -- the precision ---------------------------------------------------------------------------------------------

    @property
    def mixed_precision(self) -> str:
        """The precision, by Accelerate's name if it has one."""
        return _ACCELERATE_PRECISIONS.get(self.precision.name, self.precision.name)

    @property
    def scaler(self) -> Any:
        """The gradient scaler of fp16, or None."""
        return self.precision.scaler

    @property
    def native_amp(self) -> bool:
        """Whether forwards run under torch's autocast."""
        return self.mixed_precision in ("fp16", "bf16")

    @native_amp.setter
    def native_amp(self, on: bool) -> None:
        if on == self.native_amp:
            return
        fix = 'Accelerator(mixed_precision="no")'
        if on:
            fix = 'Accelerator(mixed_precision="fp16" or "bf16")'
        raise ConfigurationError(
            "the precision of an Accelerator cannot change",
            found=f"native_amp={on} with mixed_precision={self.mixed_precision!r}",
            fix=fix,
        )

    @property
    def fp8_enabled(self) -> bool:
        """Whether matmuls are computed in fp8."""
        return self.fp8_backend != "NO"

    @property
    def has_fp8_handler(self) -> bool:
        """Whether Transformer Engine computes matmuls in fp8."""
        return self.fp8_backend == "TE"

    @property
    def ao_recipe_handler(self) -> AORecipeKwargs | None:
        """The options of torchao's fp8, as given."""
        return find_option(self._engine_options, AORecipeKwargs)

    @property
    def te_recipe_handler(self) -> TERecipeKwargs | None:
        """The options of Transformer Engine's fp8, as given."""
        return find_option(self._engine_options, TERecipeKwargs)

    @property
    def fp8_backend(self) -> str:
        """The implementation of fp8, by Accelerate's name."""
        return {"fp8": "AO", "transformer-engine": "TE"}.get(self.precision.name, "NO")

    # -- states and weights ----------------------------------------------------------------------------------------

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """The directories of trackers and states; change its attributes instead of replacing the object."""
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
        """The number of micro-batches in `accumulate` since the last end of a prepared loader; 0 at that end.

        Saved states contain it. Setting it moves the window: it ends when the number is a multiple of
        `gradient_accumulation_steps`.
        """
        return self.accumulation.step

    @step.setter
    def step(self, step: int) -> None:
        self.accumulation.place(step)

    def register_for_checkpointing(self, *objects: Stateful) -> None:
        """Include further objects in saved states, through ``state_dict`` and ``load_state_dict``.

        Their states may hold plain data, tensors and arrays; saving anything else raises an error with the key.

        Args:
            objects: objects with ``state_dict()`` and ``load_state_dict(state)``; `load_state` needs them in the same
                order.

        Raises:
            ConfigurationError: an object lacks these methods.
        """
        self.checkpoints.register(objects)

    def register_save_state_pre_hook(
        self, hook: Callable[..., None]
    ) -> RemovableHandle:
        """Call ``hook(models, weights, directory)`` before each save.

        ``weights`` holds a state dict for each model; entries that the hook removes are not saved. Files that the hook
        writes into ``directory`` become part of the checkpoint: it is a temporary directory, which is renamed when the
        state is complete.

        Args:
            hook: a function of three arguments: the list of models, the list of their weights, and the path of the
                directory.

        Returns:
            A handle, whose ``remove()`` unregisters the hook.
        """
        return self.checkpoints.register_save_hook(hook)

    def register_load_state_pre_hook(
        self, hook: Callable[..., None]
    ) -> RemovableHandle:
        """Call ``hook(models, directory)`` before each load; models that the hook removes from the list are not loaded.

        ``directory`` is the checkpoint; the files of hooks in it have been verified.

        Args:
            hook: a function of two arguments: the list of models, and the path of the directory.

        Returns:
            A handle, whose ``remove()`` unregisters the hook.
        """
        return self.checkpoints.register_load_hook(hook)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: object,
    ) -> str:
        """Save models, optimizers, schedulers, loaders, generators and registered objects; collective call.

        The save is atomic: at any time the directory is complete or absent. An existing directory is replaced.

        Args:
            output_dir: the directory, taken from the main process; None, or automatic naming:
                ``<project_dir>/checkpoints/checkpoint_<iteration>``.
            safe_serialization: False is refused: states contain no pickles.
            save_model_func_kwargs: accepted, without effect.

        Returns:
            The path.

        Raises:
            CheckpointError: a value cannot be saved (the message has its key), or the storage fails.
        """
        with self.collectives.during("save_state"):
            return self.checkpoints.save_state(
                output_dir, safe_serialization, self.tracking.version
            )

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: object = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Restore a state of `save_state`; collective call. Prepare all objects first, in the same order.

        From a DeepSpeed directory (without ZeRO, or from ``ds_to_universal``) this loads weights, moments and the
        schedule; it does not contain random states, the data position or a loss scale.

        Args:
            input_dir: a directory of `save_state` or DeepSpeed, taken from the main process; by default the project's
                newest intact checkpoint.
            load_kwargs: accepted, without effect.
            load_model_func_kwargs: arguments of the models' ``load_state_dict``: ``strict``, ``assign``.

        Raises:
            CheckpointError: the checkpoint is missing, is damaged, or does not match the prepared objects.
        """
        with self.collectives.during("load_state"):
            version = self.checkpoints.load_state(input_dir, load_model_func_kwargs)
        self.tracking.continue_run(version)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> StateDict:
        """Return the full weights of a prepared model under the user's names.

        For sharded weights (FSDP, DeepSpeed, a mesh) this is a collective call: the main process gets the weights on
        the CPU, and the others get an empty dict, so a device never holds more than one full weight at a time.

        Args:
            model: a prepared model, or any other.
            unwrap: False keeps the names of the wrappers, such as ``module.weight``.

        Returns:
            Weights by name.
        """
        return self._model_weights.collect(model, unwrap)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights in Hugging Face's layout: ``model.safetensors``, or shards and an index.

        A tied weight is written once, under its first name.

        Args:
            model: a prepared model, or any other.
            save_directory: the directory; its other files do not change.
            max_shard_size: the largest file size, in bytes or as ``"5GB"``.
            safe_serialization: False writes ``pytorch_model.bin``, a pickle.
        """
        self._model_weights.write(
            model, save_directory, max_shard_size, safe_serialization
        )

    def save(
        self, obj: object, f: str | os.PathLike[str], safe_serialization: bool = False
    ) -> None:
        """Write an object to a file on the main process.

        An existing file is replaced when the new one is complete.

        Args:
            obj: anything that can be pickled; with ``safe_serialization`` a dict of tensors.
            f: the path of the file, in an existing local directory.
            safe_serialization: True writes safetensors, False a pickle of ``torch.save``.

        Raises:
            ConfigurationError: ``f`` is a URL, or ``safe_serialization`` is set and a value is not a tensor.
        """
        if self.is_main_process:
            write_object(obj, f, safe_serialization)

    # -- trackers --------------------------------------------------------------------------------------------------

    def init_trackers(
        self,
        project_name: str,
        config: HyperParameters | None = None,
        init_kwargs: Mapping[str, HyperParameters] | None = None,
    ) -> None:
        """Start the trackers of ``log_with``; every process makes this call, and the main process logs.

        With a ``project_dir`` or ``logging_dir``, a journal and ``report.html`` go to ``<directory>/<project_name>``.

        Args:
            project_name: W&B's project; for trackers that write files, a directory below ``logging_dir``.
            config: hyperparameters.
            init_kwargs: constructor arguments by tracker name.
        """
        self.tracking.start(project_name, config, init_kwargs, self._report_facts)

    def _report_facts(self) -> JsonObject:
        rows = [
            ["Accelerator", name, str(option.value), option.origin]
            for name, option in self.origins.items()
        ]
        return {"explain": str(self.explain()), "configuration": rows}

    def log(
        self,
        values: LoggedValues,
        step: int | None = None,
        log_kwargs: Mapping[str, Keywords] | None = None,
    ) -> None:
        """Log values with every tracker, on the main process.

        Args:
            values: by name; reading a tensor of one element synchronizes with the device.
            step: the step of the values; by default one more than the last.
            log_kwargs: options of the trackers' ``log`` by tracker name.
        """
        self.tracking.log(values, step, log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by name, after it has received all logged values.

        On other processes than the main one its methods do nothing.

        Args:
            name: ``"wandb"``, ``"tensorboard"``, … (see `LoggerType`), or the ``name`` of a `GeneralTracker`.
            unwrap: True returns the object through which the tracker writes: W&B's run, TensorBoard's writer.

        Raises:
            ConfigurationError: no tracker has this name.
        """
        return self.tracking.get(name, unwrap)

    def end_training(self) -> None:
        """Close every tracker, write the report, and wait for every process."""
        self.tracking.finish()
        self.wait_for_everyone()

    # -- inspection ------------------------------------------------------------------------------------------------

    def profile(
        self, profile_handler: ProfileKwargs | None = None
    ) -> AbstractContextManager[Any]:
        """Profile the block: ``with accelerator.profile() as profiler`` gives a ``torch.profiler.profile``.

        With ``output_trace_dir`` each process writes its trace there, as ``profile_<rank>.json``, unless the block
        raises.

        Args:
            profile_handler: the options of the profile; by default those of the Accelerator's ``kwargs_handlers``.
        """
        handler = profile_handler or self.profile_handler
        return profiling(handler, self.process_index)

    def explain(self) -> Text:
        """Describe this process, one line per part: group, device, wrapping, loaders; and the origins of options."""
        lines = [
            f"process {self.process_index} of {self.num_processes}, pid {os.getpid()} ({self.environment.source})",
            f"strategy: {self.strategy.describe()}",
            f"group: {self.backend or 'none'}, device {self.device}",
            f"precision: {self.precision.name}",
            f"accumulation: {plural(self.accumulation.steps, 'micro-batch')} a step",
            *self.prepared.describe(),
            *describe_origins(self.origins.items()),
        ]
        return Text("\n".join(lines))

    def __repr__(self) -> str:
        """Return the text that Accelerate prints for its state; `explain` shows more."""
        plugin = self.deepspeed_plugin
        config = ""
        if plugin is not None:
            config = f"ds_config: {plugin.deepspeed_config}\n"
        return f"{self.processes!r}\nMixed precision type: {self.mixed_precision}\n{config}"
