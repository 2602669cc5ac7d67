"""The models, optimizers, loaders and schedulers that an `Accelerator` has prepared."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, TypeAlias, final
from weakref import WeakSet

from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset

from trainer_kit.accelerator.accumulation import Accumulation
from trainer_kit.accelerator.generators import each_epoch, generator_kinds
from trainer_kit.accelerator.loader import PreparedLoader
from trainer_kit.accelerator.loader_division import prepare_loader
from trainer_kit.accelerator.loop_checks import LoopChecks, parameter_ids
from trainer_kit.accelerator.optimizer import AcceleratedOptimizer, AcceleratedScheduler
from trainer_kit.accelerator.processes import Processes
from trainer_kit.accelerator.wrapping import (
    apply_precision,
    compile_options,
    compiled,
    remove_precision,
    uncompiled,
    unwrap,
)
from trainer_kit.core.display import plural
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.protocols import Group
from trainer_kit.core.seed import order_seed
from trainer_kit.core.types import (
    Function,
    Loaders,
    LRSchedulerLike,
    SavedState,
    StateDict,
)
from trainer_kit.data.combined import CombinedLoader
from trainer_kit.data.inexact import warn_if_inexact, why_inexact
from trainer_kit.options.deepspeed import (
    DeepSpeedPlugin,
    DummyOptim,
    DummyScheduler,
    active_plugin,
    resolve_optimizer,
    resolve_scheduler,
)
from trainer_kit.options.records import DataLoaderConfiguration, TorchDynamoPlugin
from trainer_kit.precision.native import has_gradients
from trainer_kit.precision.precision import Precision
from trainer_kit.state.optimizer_states import note_configured
from trainer_kit.step.optimizers import OptimizerProxy
from trainer_kit.strategies.optimizer_step import direct_step
from trainer_kit.strategies.single import Alone
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.strategies.transforms.blocks import Compile

__all__ = ["Optimizers", "Parameters", "Prepared"]

Optimizers: TypeAlias = Optimizer | list[Optimizer] | tuple[Optimizer, ...]
"""A prepared optimizer, or several."""

Parameters: TypeAlias = Tensor | Iterable[Tensor]
"""A parameter, or an iterable of them, as ``model.parameters()``."""

_SCHEDULERS: Final = (
    LRScheduler,
    ReduceLROnPlateau,
    AcceleratedScheduler,
    DummyScheduler,
)


@final
class Prepared:
    """Prepares objects for an Accelerator, and keeps the prepared ones.

    Args:
        processes: the processes of the run.
        strategy: wraps models.
        precision: the precision of their forwards.
        accumulation: decides when optimizers step.
        loaders: how loaders are sharded.
        dynamo: options of ``torch.compile``.
        deepspeed_plugins: by name; the selected one completes DeepSpeed's configuration.
        device_placement: whether models and batches are moved to the device.
        step_scheduler_with_optimizer: whether schedulers advance only when optimizers step.
        scheduler_steps_per_process: whether an optimizer step advances them once for each process.
        data_seed: the seed of the data order; None: the seed that the main process has set.

    Attributes:
        models: in the order of preparation, like ``optimizers``, ``schedulers`` and ``loaders``.
        backward: the engine's backward; None: ``loss.backward()``.
        checks: detects common mistakes in the first steps.
    """

    def __init__(
        self,
        processes: Processes,
        strategy: Strategy,
        precision: Precision,
        accumulation: Accumulation,
        *,
        loaders: DataLoaderConfiguration,
        dynamo: TorchDynamoPlugin,
        deepspeed_plugins: Mapping[str, DeepSpeedPlugin],
        device_placement: bool,
        step_scheduler_with_optimizer: bool,
        scheduler_steps_per_process: bool,
        data_seed: int | None,
        rng_types: Iterable[object] | None,
    ) -> None:
        self.models: list[nn.Module] = []
        # Of the user, with those for evaluation only and those whose wrapping failed. Weak: they may go earlier.
        self._changed_models: WeakSet[nn.Module] = WeakSet()
        self.optimizers: list[AcceleratedOptimizer] = []
        self.schedulers: list[AcceleratedScheduler] = []
        self.loaders: list[PreparedLoader] = []
        self.backward: Callable[..., None] | None = None
        self.checks = LoopChecks(strategy, processes.print, self.models, accumulation)
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.scheduler_steps_per_process = scheduler_steps_per_process
        self.data_seed = data_seed
        self._rng_types = generator_kinds(rng_types)
        self._processes = processes
        self._strategy = strategy
        self._precision = precision
        self._accumulation = accumulation
        self._loader_options = loaders
        self._dynamo = dynamo
        self._deepspeed_plugins = deepspeed_plugins

    def __getstate__(self) -> StateDict:
        # Weak references cannot be pickled.
        return {**vars(self), "_changed_models": None}

    def __setstate__(self, state: SavedState) -> None:
        vars(self).update(state)
        self._changed_models = WeakSet(map(unwrap, self.models))

    def prepare(
        self,
        objects: Sequence[object],
        device_placement: Sequence[bool | None] | None,
    ) -> tuple[object, ...]:
        """Prepare models, optimizers, loaders and schedulers, in any mix and order.

        Args:
            objects: objects of other types are returned unchanged.
            device_placement: one value per object: whether it is moved to the device.

        Raises:
            ConfigurationError: ``device_placement`` does not have one value per object.
        """
        placements = list(device_placement or [None] * len(objects))
        if len(placements) != len(objects):
            raise ConfigurationError(
                "device_placement has one value per object: whether to move it",
                found=f"{plural(len(placements), 'value')} for {len(objects)} objects",
            )
        results = list(objects)
        unprepared = set(range(len(objects)))
        # Models first: preparing one may replace its parameters, which optimizers hold. Schedulers need optimizers.
        # Loaders come with the models, because DeepSpeed is configured with their batch size when the optimizer is.
        for prepare in (
            self._prepare_model_or_loader,
            self._prepare_if_optimizer,
            self._prepare_if_scheduler,
        ):
            for index in sorted(unprepared):
                prepared = prepare(objects[index], placements[index])
                if prepared is not None:
                    results[index] = prepared
                    unprepared.discard(index)
        return tuple(results)

    def _prepare_model_or_loader(
        self, obj: object, placement: bool | None
    ) -> nn.Module | PreparedLoader | None:
        if isinstance(obj, type) and issubclass(
            obj, (nn.Module, Optimizer, DataLoader)
        ):
            raise ConfigurationError(
                "prepare got a class, not an object",
                found=obj.__name__,
                fix=f"create one: {obj.__name__}(...)",
            )
        if isinstance(obj, nn.Module):
            return self.prepare_model(obj, placement, False)
        if isinstance(obj, (DataLoader, PreparedLoader)):
            return self.prepare_loader(obj, placement)
        if isinstance(obj, CombinedLoader) and not _is_prepared(obj):
            return self.prepare_loader(obj, placement)
        return None

    def _prepare_if_optimizer(
        self, obj: object, placement: bool | None
    ) -> AcceleratedOptimizer | None:
        if isinstance(obj, (Optimizer, DummyOptim)):
            return self.prepare_optimizer(obj)
        return None

    def _prepare_if_scheduler(
        self, obj: object, placement: bool | None
    ) -> AcceleratedScheduler | None:
        if isinstance(obj, _SCHEDULERS):
            return self.prepare_scheduler(obj)
        return None

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None, evaluation_mode: bool
    ) -> nn.Module:
        """Move a model to its device, apply the precision, and wrap it for several processes.

        Args:
            model: changed in place, and wrapped if there are several processes.
            device_placement: whether the model is moved to the device.
            evaluation_mode: the model is not trained, so it needs no gradient exchange.
        """
        if not isinstance(model, nn.Module):
            raise ConfigurationError(
                "prepare_model takes a module", found=f"a {type(model).__name__}"
            )
        for prepared in self.models:
            # A second wrapper would exchange gradients twice.
            if model is prepared or model is unwrap(prepared):
                return prepared
        plugin = self._dynamo
        compiles = plugin.backend.lower() != "no"
        # torch.compile would trace the check of the first call, and break the graph there.
        if self.checks.active and not evaluation_mode and not compiles:
            self.checks.expect_call(model)
        # Conversion before wrapping: wrappers take parameters and their dtypes as they are, and FSDP shards them.
        self._changed_models.add(model)
        self._precision.convert_module(model)
        apply_precision(model, self._precision)
        # Blocks are compiled before the model is sharded, so that FSDP's hooks stay outside of the graphs.
        if compiles and plugin.use_regional_compilation:
            Compile(options=compile_options(plugin)).apply(model)
        wrapped = self._wrap(model, device_placement, evaluation_mode)
        if compiles and not plugin.use_regional_compilation:
            wrapped = compiled(wrapped, plugin)
        # A model for evaluation only (a teacher, a reward model) is not part of saved states.
        if not evaluation_mode:
            self.models.append(wrapped)
        return wrapped

    def _wrap(
        self, model: nn.Module, device_placement: bool | None, evaluation_mode: bool
    ) -> nn.Module:
        """Move a model, and wrap it for training."""
        moves = self._moves(device_placement)
        if evaluation_mode and moves:
            return model.to(self._strategy.device)
        # Alone, wrapping would only move the model.
        if evaluation_mode or (not moves and not self._processes.use_distributed):
            return model
        wrapped = self._strategy.wrap_module(model, self._precision)
        self.backward = self._strategy.bind_backward(None)
        self._rebind_optimizers()
        return wrapped

    def prepare_optimizer(
        self, optimizer: Optimizer | DummyOptim
    ) -> AcceleratedOptimizer:
        """Wrap an optimizer, so that it steps only when gradients are complete."""
        if isinstance(optimizer, AcceleratedOptimizer):
            return optimizer
        optimizer = resolve_optimizer(self._strategy, optimizer)
        before_first_step: Callable[[Optimizer], None] | None = self._before_first_step
        if self._strategy.owns_step:
            # Before the engine replaces the parameters with its own.
            self.checks.add_optimizer(optimizer)
            self._configure_engine()
            before_first_step = None
        self._strategy.prepare_optimizer(optimizer)
        # A loaded state is compared with these options.
        note_configured(optimizer, again=False)
        after_step = None
        if self._precision.scales:
            after_step = self._adapt_scale
        wrapper = AcceleratedOptimizer(
            optimizer,
            self._accumulation,
            self._precision,
            before_first_step=before_first_step,
            step=self._bound_step(optimizer),
            after_step=after_step,
        )
        self.optimizers.append(wrapper)
        # A scheduler may be prepared before its optimizer.
        for scheduler in self.schedulers:
            if getattr(scheduler.scheduler, "optimizer", None) is optimizer:
                scheduler.follow([wrapper])
        return wrapper

    def _before_first_step(self, optimizer: Optimizer) -> None:
        # `accelerator.backward` scales: an optimizer with gradients, in a window that has not begun, proves that it was
        # not called. Such gradients would be divided by the scale in the step.
        scales = self._precision.scales
        if scales and not self._accumulation.began and has_gradients(optimizer):
            raise ConfigurationError(
                "the optimizer steps with gradients that were not scaled for float16",
                found="loss.backward()",
                fix="accelerator.backward(loss)",
            )
        self.checks.step(optimizer)

    def _adapt_scale(self) -> None:
        self._precision.adapt_scale([wrapper.optimizer for wrapper in self.optimizers])

    def _bound_step(self, optimizer: Optimizer) -> Function:
        step = self._strategy.bind_step(optimizer)
        if step == optimizer.step:
            return direct_step(optimizer)
        return step

    def _rebind_optimizers(self) -> None:
        """Update optimizers that were prepared before their model to its new parameters."""
        if self._strategy.owns_step:
            return
        for wrapper in self.optimizers:
            self._strategy.prepare_optimizer(wrapper.optimizer)
            wrapper.rebind(self._bound_step(wrapper.optimizer))

    def _configure_engine(self) -> None:
        # DeepSpeed's JSON may leave the micro-batch size to the loaders ("auto"), but its engine needs a number.
        sizes = {loader.feed.per_rank_batch_size for loader in self.loaders}
        known_sizes = sorted(size for size in sizes if size is not None)
        batch_size = None
        plugin = active_plugin(self._deepspeed_plugins)
        if plugin is not None:
            batch_size = plugin.batch_size(known_sizes)
        self._strategy.configure(
            accumulation=self._accumulation.steps, batch_size=batch_size
        )

    def prepare_loader(
        self,
        loader: Loaders,
        device_placement: bool | None,
        shard: bool = True,
        interleave: bool = False,
    ) -> PreparedLoader:
        """Shard a loader over the processes; collective call.

        The data order depends on ``data_seed``; without one, on the main process's seed at the time of this call.

        Args:
            loader: a loader, or a prepared one, which is returned unchanged.
            device_placement: whether batches are moved; None: as for the Accelerator.
            shard: False: each process reads its own loader, which is sharded already.
            interleave: divide samples as torch's ``DistributedSampler``; see `prepare_loader`.
        """
        if isinstance(loader, PreparedLoader):
            return loader
        with self._processes.collectives.during("prepare"):
            seed = self.data_seed
            if seed is None:
                seed = order_seed()
            # Scripts may seed each process differently; the order must be one.
            seed = self._processes.world.broadcast(seed)
        strategy = self._strategy
        data: Group = strategy.data
        world: Group = strategy.world
        if not shard:
            # The loader is sharded already, so this process reads it as if it were alone.
            data = Alone()
            world = Alone()
        device = None
        if self._moves(device_placement):
            device = strategy.device
        prepared = prepare_loader(
            loader,
            data,
            world,
            device,
            self._accumulation,
            self._loader_options,
            # One seed per loader: two loaders over one data set need different orders.
            seed + len(self.loaders),
            strategy.shard_batch,
            strategy.end_batch,
            each_epoch(strategy.world, self._rng_types, strategy.device),
            interleave=interleave,
        )
        self._warn_if_inexact(prepared)
        self.loaders.append(prepared)
        return prepared

    def _warn_if_inexact(self, loader: PreparedLoader) -> None:
        if not self._processes.is_main_process:
            return
        # A validation loader has the reason of the training loader, which was named.
        reasons = {why_inexact(other.feed) for other in self.loaders}
        if why_inexact(loader.feed) not in reasons:
            warn_if_inexact(loader.feed)

    def prepare_scheduler(
        self, scheduler: LRSchedulerLike | DummyScheduler
    ) -> AcceleratedScheduler:
        """Wrap a scheduler, so that an optimizer step advances it, by default once for each process."""
        if isinstance(scheduler, AcceleratedScheduler):
            return scheduler
        latest = None
        if self.optimizers:
            latest = self.optimizers[-1].optimizer
        times = self._scheduler_steps
        resolved: LRSchedulerLike = resolve_scheduler(
            self._strategy, scheduler, latest, times
        )
        is_dummy = isinstance(scheduler, DummyScheduler)
        is_plateau = isinstance(resolved, ReduceLROnPlateau)
        is_deepspeed = type(resolved).__module__.startswith("deepspeed.")
        # The patience of ReduceLROnPlateau counts values, and a step has one. Schedules of DeepSpeed advance once in
        # its engine too; the length of a dummy was divided by the factor when it was resolved.
        if is_plateau or is_dummy or is_deepspeed:
            times = 1
        # A scheduler skips the steps that its optimizer skips. Chained schedulers do not say which one they belong to:
        # they follow all of them.
        optimizer = getattr(resolved, "optimizer", None)
        followed = [
            wrapper
            for wrapper in self.optimizers
            if optimizer in (wrapper, wrapper.optimizer)
        ]
        # One line for all schedulers.
        before_first_step = None
        if times > 1 and not self._repeated_schedulers:
            before_first_step = self._print_scheduler_steps
        wrapper = AcceleratedScheduler(
            resolved,
            followed or self.optimizers,
            self._accumulation,
            with_optimizer=self.step_scheduler_with_optimizer,
            times=times,
            # ReduceLROnPlateau does not count its calls.
            adjust=self._accumulation.adjust_scheduler and not is_plateau,
            before_first_step=before_first_step,
        )
        self.schedulers.append(wrapper)
        return wrapper

    def _print_scheduler_steps(self) -> None:
        scheduler = self._repeated_schedulers[0]
        self._processes.print(
            f"{scheduler.describe()}, as under Accelerate; once with Accelerator(scheduler_steps_per_process=False)"
        )

    @property
    def _repeated_schedulers(self) -> list[AcceleratedScheduler]:
        """The schedulers that advance several times per optimizer step."""
        return [scheduler for scheduler in self.schedulers if scheduler.times > 1]

    @property
    def _scheduler_steps(self) -> int:
        """The number of scheduler steps per optimizer step."""
        if not self.scheduler_steps_per_process:
            return 1
        if not self.step_scheduler_with_optimizer or self._loader_options.split_batches:
            return 1
        return self._processes.num_processes

    def _moves(self, device_placement: bool | None) -> bool:
        """Whether an object is moved to the device; None: as for the Accelerator."""
        if device_placement is None:
            return self.device_placement
        return device_placement

    def unwrap_model(
        self,
        model: nn.Module,
        keep_fp32_wrapper: bool = True,
        keep_torch_compile: bool = False,
    ) -> Any:
        """See `Accelerator.unwrap_model`."""
        user_model = unwrap(model, keep_fp32_wrapper)
        inner = uncompiled(model)
        is_compiled = inner is not model
        if not keep_torch_compile or not is_compiled:
            return user_model
        # Without a wrapper between them the compiled model is returned itself: another one would compile again.
        if inner is user_model:
            return model
        return compiled(user_model, self._dynamo)

    def check_backward(self, loss: Tensor) -> None:
        """Check the first backwards for common mistakes."""
        if not isinstance(loss, Tensor):
            raise ConfigurationError(
                "backward takes a loss, which is a tensor",
                found=f"a {type(loss).__name__}",
                fix="accelerator.backward(output.loss) for the output of a model of Transformers",
            )
        # An unprepared optimizer does harm only where its steps must wait for a window, or its gradients are scaled;
        # otherwise it trains correctly, and nothing is reported.
        steps = self._accumulation.steps
        harm = None
        if steps > 1:
            harm = f"{plural(steps, 'micro-batch makes', 'micro-batches make')} a step"
        elif self._precision.scales:
            harm = "gradients are scaled for float16"
        self.checks.backward(loss, harm, bool(self.loaders), steps)

    def unscale_gradients(self, optimizer: Optimizers | None = None) -> None:
        """Unscale complete gradients, and correct them for the weights of their accumulation window.

        Args:
            optimizer: one optimizer or several; None: all.
        """
        if not self._accumulation.sync:
            return
        optimizers: Sequence[Optimizer] = self.optimizers
        if isinstance(optimizer, (list, tuple)):
            optimizers = optimizer
        elif optimizer is not None:
            optimizers = [optimizer]
        for wrapper in optimizers:
            user_optimizer = OptimizerProxy.unwrapped(wrapper)
            self._accumulation.correct(user_optimizer)
            self._precision.unscale_gradients(user_optimizer)

    def unscale_gradients_of(self, parameters: Parameters) -> list[nn.Parameter]:
        """Unscale and correct the gradients of the optimizers that hold ``parameters``; return these as a list."""
        # A list, because an iterator such as model.parameters() is read twice: here and when the norm is computed.
        clipped = _as_list(parameters)
        if clipped and not isinstance(clipped[0], Tensor):
            raise _no_parameters(parameters)
        # An engine's optimizer holds the engine's own parameters.
        if self._strategy.owns_step:
            self.unscale_gradients()
            return clipped
        clipped_ids = set(map(id, clipped))
        for wrapper in self.optimizers:
            if not clipped_ids.isdisjoint(parameter_ids(wrapper)):
                self.unscale_gradients(wrapper)
        return clipped

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Sequence[object], even_batches: bool | None
    ) -> Iterator[None]:
        """Let a process that has no batches left take part in the gradient exchanges of the others.

        Args:
            joinables: prepared models.
            even_batches: whether loaders fill up the last batch inside the context; None: as configured.

        Raises:
            ConfigurationError: the strategy needs every process in each step.
        """
        strategy = self._strategy
        is_distributed = strategy.data.size > 1
        if is_distributed and (strategy.lockstep or strategy.completes_gradients):
            raise ConfigurationError(
                "every step needs all processes, so all of them need the same number of batches",
                found=f"join_uneven_inputs under {strategy.name!r}",
                fix="leave it out and prepare() the loader: every process gets the same number of batches; or use DDP",
            )
        # What the context changes, to be restored after it, also after an error.
        evenness = [(loader, loader.even) for loader in self.loaders]
        streams = [
            loader
            for loader in self.loaders
            if isinstance(loader.dataset, IterableDataset)
        ]
        changes_streams = even_batches is not None and any(
            loader.even != even_batches for loader in streams
        )
        if is_distributed and changes_streams:
            warnings.warn(
                f"join_uneven_inputs(even_batches={even_batches}) also changes {len(streams)} prepared loader(s) over "
                "an IterableDataset. In Accelerate this is only supported for map-style datasets; these stay unchanged",
                stacklevel=3,  # the line of the user's `with`
            )
        self._accumulation.set_joining(is_distributed)
        if even_batches is not None:
            for loader in self.loaders:
                loader.set_even(even_batches)
        with ExitStack() as stack:
            # A single process has no wrapper, and thus nothing to join; frozen models stay unwrapped too.
            models = [model for model in joinables if isinstance(model, Joinable)]
            if models and self._processes.use_distributed:
                stack.enter_context(Join(models))
            try:
                yield
            finally:
                self._accumulation.set_joining(False)
                for loader, even in evenness:
                    loader.set_even(even)

    def describe(self) -> list[str]:
        """Return one line for each model, loader and scheduler."""
        lines = [f"model: {_describe_wrapping(model)}" for model in self.models]
        lines += [f"loader: {loader.describe()}" for loader in self.loaders]
        lines += [f"scheduler: {each.describe()}" for each in self.schedulers]
        return lines

    def clear(self) -> None:
        """Release all prepared objects; the users' models have their own forward, and blocks run uncompiled."""
        for model in self._changed_models:
            remove_precision(model)
            Compile().undo(model)
        self._changed_models.clear()
        self.models.clear()
        self.optimizers.clear()
        self.schedulers.clear()
        self.loaders.clear()
        self._strategy.stop()
        # The gradient scaler keeps state per optimizer, and with it the optimizers.
        self._precision.abandon_step()
        # The hook is global: left registered, it would check the models of the next `prepare` twice.
        self.checks.end_calls()
        self.checks = LoopChecks(
            self._strategy, self._processes.print, self.models, self._accumulation
        )
        self._accumulation.reset()


def _describe_wrapping(model: nn.Module) -> str:
    kind = type(model).__name__
    user_model = unwrap(model)
    if user_model is model:
        return kind
    return f"{kind} of {type(user_model).__name__}"


def _is_prepared(combined: CombinedLoader) -> bool:
    """Whether the leaves of a `CombinedLoader` are prepared, so that it is not divided again."""
    prepared = [isinstance(leaf, PreparedLoader) for leaf in combined.flattened]
    if any(prepared) and not all(prepared):
        raise ConfigurationError(
            "prepare got a CombinedLoader of which some loaders are prepared and others are not",
            found=f"{sum(prepared)} of {len(prepared)} prepared",
            fix="prepare the CombinedLoader, and none of the loaders in it",
        )
    return any(prepared)


def _as_list(parameters: Parameters) -> list[Any]:
    if isinstance(parameters, Tensor):
        return [parameters]
    try:
        return list(parameters)
    except TypeError:
        # An error of the user's own iterator is not ours to explain.
        if isinstance(parameters, Iterable):
            raise
        raise _no_parameters(parameters) from None


def _no_parameters(parameters: object) -> ConfigurationError:
    return ConfigurationError(
        "clip_grad_norm_ needs the parameters whose gradients it clips",
        found=f"a {type(parameters).__name__}",
        fix="call accelerator.clip_grad_norm_(model.parameters(), max_norm), with parentheses",
    )
