"""The models, optimizers, loaders and schedulers that an `Accelerator` has prepared."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, final

from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.hooks import RemovableHandle

from trainer_kit.accelerator.accumulation import Accumulation
from trainer_kit.accelerator.generators import each_epoch, generator_kinds
from trainer_kit.accelerator.loader import PreparedLoader, prepare_loader
from trainer_kit.accelerator.optimizer import AcceleratedOptimizer, AcceleratedScheduler
from trainer_kit.accelerator.processes import Processes
from trainer_kit.accelerator.wrapping import (
    apply_precision,
    compile_options,
    compiled,
    uncompiled,
    unwrap,
)
from trainer_kit.compat.deepspeed import (
    DeepSpeedPlugin,
    DummyOptim,
    DummyScheduler,
    made_optimizer,
    made_scheduler,
    selected_plugin,
)
from trainer_kit.compat.options import DataLoaderConfiguration, TorchDynamoPlugin
from trainer_kit.core.errors import ConfigurationError, RankError
from trainer_kit.core.seed import order_seed
from trainer_kit.core.tensors import tensors_of
from trainer_kit.data.combined import CombinedLoader
from trainer_kit.precision.native import has_gradients
from trainer_kit.precision.precision import Precision
from trainer_kit.state.optimizer_states import note_configured
from trainer_kit.step.optimizers import OptimizerProxy
from trainer_kit.strategies.single import Alone
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.strategies.transforms.blocks import Compile

__all__ = ["Prepared"]

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
        rng_types: Sequence[Any] | None,
    ) -> None:
        self.models: list[nn.Module] = []
        self.optimizers: list[AcceleratedOptimizer] = []
        self.schedulers: list[AcceleratedScheduler] = []
        self.loaders: list[PreparedLoader] = []
        self.backward: Callable[..., None] | None = None
        self.checks = _LoopChecks(strategy, processes.print, self.models, accumulation)
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

    def prepare(
        self, objects: Sequence[Any], device_placement: Sequence[bool | None] | None
    ) -> tuple[Any, ...]:
        """Prepare models, optimizers, loaders and schedulers, in any mix and order.

        Args:
            objects: objects of other types are returned unchanged.
            device_placement: one value per object: whether it is moved to the device.

        Raises:
            ConfigurationError: ``device_placement`` does not have one value per object.
        """
        places = list(device_placement or [None] * len(objects))
        if len(places) != len(objects):
            raise ConfigurationError(
                "device_placement says for each object whether it is moved",
                found=f"{len(places)} values for {len(objects)} objects",
            )
        done: dict[int, Any] = {}
        # Models first: preparing one may replace its parameters, which optimizers hold. Schedulers need optimizers.
        for kind in (0, 1, 2):
            for index, (thing, place) in enumerate(zip(objects, places, strict=True)):
                if (
                    index not in done
                    and (made := self._prepare_one(thing, place, kind)) is not None
                ):
                    done[index] = made
        return tuple(done.get(index, thing) for index, thing in enumerate(objects))

    def _prepare_one(self, thing: Any, place: bool | None, kind: int) -> Any:
        if isinstance(thing, type) and issubclass(
            thing, (nn.Module, Optimizer, DataLoader)
        ):
            raise ConfigurationError(
                "prepare got a class, not an object",
                found=thing.__name__,
                fix=f"create one: {thing.__name__}(...)",
            )
        if kind == 0 and isinstance(thing, nn.Module):
            return self.prepare_model(thing, place, False)
        if kind == 0 and isinstance(thing, (DataLoader, PreparedLoader)):
            return self.prepare_loader(thing, place)
        if kind == 0 and isinstance(thing, CombinedLoader) and not _is_prepared(thing):
            return self.prepare_loader(thing, place)
        if kind == 1 and isinstance(thing, (Optimizer, DummyOptim)):
            return self.prepare_optimizer(thing)
        if kind == 2 and isinstance(thing, _SCHEDULERS):
            return self.prepare_scheduler(thing)
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
        for known in self.models:
            if model is known or model is unwrap(
                known
            ):  # a second wrapper would exchange gradients twice
                return known
        plugin = self._dynamo
        compiles = plugin.backend.lower() != "no"
        places = self._places(device_placement)
        if (
            self.checks.active and not evaluation_mode and not compiles
        ):  # a hook would break the compiled graph
            self.checks.expect_call(model)
        self._precision.convert_module(model)
        apply_precision(model, self._precision)
        if compiles and plugin.use_regional_compilation:  # before it is sharded
            Compile(options=compile_options(plugin)).apply(model)
        made = model
        if evaluation_mode:
            made = model.to(self._strategy.device) if places else model
        elif places or self._processes.use_distributed:
            made = self._strategy.wrap_module(model, self._precision)
            self.backward = self._strategy.bind_backward(None)
            self._rebind_optimizers()
        if compiles and not plugin.use_regional_compilation:
            made = compiled(made, plugin)
        if not evaluation_mode:
            self.models.append(made)
        return made

    def prepare_optimizer(
        self, optimizer: Optimizer | DummyOptim
    ) -> AcceleratedOptimizer:
        """Wrap an optimizer, so that it steps only when gradients are complete."""
        if isinstance(optimizer, AcceleratedOptimizer):
            return optimizer
        optimizer = made_optimizer(self._strategy, optimizer)
        owns_step = self._strategy.owns_step
        if owns_step:  # before the engine replaces the parameters with its own
            self.checks.know(optimizer)
            self._configure_engine()
        self._strategy.prepare_optimizer(optimizer)
        note_configured(
            optimizer, again=False
        )  # a loaded state is compared with these options
        first = None if owns_step else self._before_first_step
        after = self._adapt_scale if self._precision.scales else None
        step = self._bound_step(optimizer)
        made = AcceleratedOptimizer(
            optimizer, self._accumulation, self._precision, first, step, after
        )
        self.optimizers.append(made)
        for (
            scheduler
        ) in self.schedulers:  # a scheduler may be prepared before its optimizer
            if getattr(scheduler.scheduler, "optimizer", None) is optimizer:
                scheduler.optimizers = [made]
        return made

    def _before_first_step(self, optimizer: Optimizer) -> None:
        if (
            self._precision.scales
            and not self._accumulation.began
            and has_gradients(optimizer)
        ):
            raise ConfigurationError(
                "the optimizer steps with gradients that were not scaled for float16",
                found="loss.backward()",
                fix="accelerator.backward(loss)",
            )
        self.checks.step(optimizer)

    def _adapt_scale(self) -> None:
        self._precision.adapt_scale([one.optimizer for one in self.optimizers])

    def _bound_step(self, optimizer: Optimizer) -> Callable[..., Any] | None:
        bound = self._strategy.bind_step(optimizer)
        # None for the optimizer's own step: other code may wrap that one later.
        return None if bound == optimizer.step else bound

    def _rebind_optimizers(self) -> None:
        """Update optimizers that were prepared before their model to its new parameters."""
        for one in self.optimizers if not self._strategy.owns_step else ():
            self._strategy.prepare_optimizer(one.optimizer)
            one.rebind(self._bound_step(one.optimizer))

    def _configure_engine(self) -> None:
        known = (loader.feed.per_rank_batch_size for loader in self.loaders)
        sizes = {size for size in known if size is not None}
        plugin = selected_plugin(self._deepspeed_plugins)
        size = plugin.batch_size(sorted(sizes)) if plugin is not None else None
        self._strategy.configure(accumulation=self._accumulation.steps, batch_size=size)

    def prepare_loader(
        self, loader: Any, device_placement: bool | None, shard: bool = True
    ) -> PreparedLoader:
        """Shard a loader over the processes; collective call.

        The data order depends on ``data_seed``; without one, on the main process's seed at the time of this call.

        Args:
            loader: a loader, or a prepared one, which is returned unchanged.
            device_placement: whether batches are moved; None: as for the Accelerator.
            shard: False: each process reads its own loader, which is sharded already.
        """
        if isinstance(loader, PreparedLoader):
            return loader
        with self._processes.collectives.during("prepare"):
            seed = self._processes.world.broadcast(
                order_seed() if self.data_seed is None else self.data_seed
            )
        strategy = self._strategy
        made = prepare_loader(
            loader,
            strategy.data if shard else Alone(),
            strategy.world if shard else Alone(),
            strategy.device if self._places(device_placement) else None,
            self._accumulation,
            self._loader_options,
            seed
            + len(
                self.loaders
            ),  # one seed per loader: two loaders over one data set need different orders
            strategy.shard_batch,
            strategy.end_batch,
            each_epoch(strategy.world, self._rng_types, strategy.device),
        )
        self.loaders.append(made)
        return made

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Wrap a scheduler, so that an optimizer step advances it, by default once for each process."""
        if isinstance(scheduler, AcceleratedScheduler):
            return scheduler
        latest = self.optimizers[-1].optimizer if self.optimizers else None
        times = self._scheduler_steps
        by_engine = isinstance(scheduler, DummyScheduler)
        scheduler = made_scheduler(self._strategy, scheduler, latest, times)
        plateau = isinstance(scheduler, ReduceLROnPlateau)
        once = (
            plateau or by_engine or type(scheduler).__module__.startswith("deepspeed.")
        )
        mine = [
            one
            for one in self.optimizers
            if getattr(scheduler, "optimizer", None) in (one, one.optimizer)
        ]
        made = AcceleratedScheduler(
            scheduler,
            mine or self.optimizers,
            self._accumulation,
            with_optimizer=self.step_scheduler_with_optimizer,
            times=1 if once else times,
            adjust=self._accumulation.adjust_scheduler
            and not plateau,  # ReduceLROnPlateau does not count its calls
        )
        if made.times > 1 and not any(one.times > 1 for one in self.schedulers):
            made.before_first_step = self._print_scheduler_steps
        self.schedulers.append(made)
        return made

    def _print_scheduler_steps(self) -> None:
        first = next(one for one in self.schedulers if one.times > 1)
        self._processes.print(
            f"{first.describe()}, as under Accelerate; once with Accelerator(scheduler_steps_per_process=False)"
        )

    @property
    def _scheduler_steps(self) -> int:
        """The number of scheduler steps per optimizer step."""
        if not (
            self.scheduler_steps_per_process and self.step_scheduler_with_optimizer
        ):
            return 1
        return (
            1 if self._loader_options.split_batches else self._processes.num_processes
        )

    def _places(self, given: bool | None) -> bool:
        return self.device_placement if given is None else given

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
        own = unwrap(model, keep_fp32_wrapper)
        if keep_torch_compile and (inner := uncompiled(model)) is not model:
            return model if inner is own else compiled(own, self._dynamo)
        return own

    def check_backward(self, loss: Tensor) -> None:
        """Check the first backwards for common mistakes."""
        if not isinstance(loss, Tensor):
            raise ConfigurationError(
                "backward takes a loss, which is a tensor",
                found=f"a {type(loss).__name__}",
                fix="accelerator.backward(output.loss) for the output of a model of Transformers",
            )
        steps = self._accumulation.steps
        harm = None
        if steps > 1:
            harm = f"{steps} micro-batches make a step"
        elif self._precision.scales:
            harm = "gradients are scaled for float16"
        self.checks.backward(loss, harm, bool(self.loaders), steps)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale complete gradients, and correct them for the weights of their accumulation window.

        Args:
            optimizer: one optimizer or several; None: all.
        """
        if not self._accumulation.sync:
            return
        given = self.optimizers if optimizer is None else optimizer
        for one in given if isinstance(given, (list, tuple)) else [given]:
            raw = OptimizerProxy.unwrapped(one)
            self._accumulation.correct(raw)
            self._precision.unscale_gradients(raw)

    def complete_gradients(self, parameters: Any) -> list[Any]:
        """Unscale and correct the gradients of the optimizers that hold ``parameters``; return these as a list."""
        try:
            several = (
                [parameters] if isinstance(parameters, Tensor) else list(parameters)
            )
        except TypeError:
            if isinstance(parameters, Iterable):
                raise  # by the user's own iterator
            raise _no_parameters(parameters) from None
        if several and not isinstance(several[0], Tensor):
            raise _no_parameters(parameters)
        if self._strategy.owns_step:  # its optimizer holds the engine's own parameters
            self.unscale_gradients()
            return several
        wanted = {id(parameter) for parameter in several}
        for one in self.optimizers:
            if any(
                id(parameter) in wanted
                for group in one.param_groups
                for parameter in group["params"]
            ):
                self.unscale_gradients(one)
        return several

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None
    ) -> Iterator[None]:
        """Let a process that has no batches left take part in the gradient exchanges of the others.

        Args:
            joinables: prepared models.
            even_batches: whether loaders fill up the last batch inside the context; None: as configured.

        Raises:
            ConfigurationError: the strategy needs every process in each step.
        """
        strategy = self._strategy
        several = strategy.data.size > 1
        if several and (strategy.lockstep or strategy.completes_gradients):
            raise ConfigurationError(
                "every step needs all processes, so all of them need the same number of batches",
                found=f"join_uneven_inputs under {strategy.name!r}",
                fix="leave it out and prepare() the loader: every process gets the same number of batches; or use DDP",
            )
        before = [(loader, loader.even) for loader in self.loaders]
        streams = [
            loader
            for loader in self.loaders
            if isinstance(loader.dataset, IterableDataset)
        ]
        if (
            several
            and even_batches is not None
            and any(loader.even != even_batches for loader in streams)
        ):
            warnings.warn(
                f"join_uneven_inputs(even_batches={even_batches}) also changes {len(streams)} prepared loader(s) over "
                "an IterableDataset. In Accelerate this is only supported for map-style datasets; these stay unchanged",
                stacklevel=3,  # the line of the user's `with`
            )
        self._accumulation.joining = several
        if even_batches is not None:
            for loader in self.loaders:
                loader.set_even(even_batches)
        with ExitStack() as stack:
            models = [one for one in joinables if isinstance(one, Joinable)]
            if models and self._processes.use_distributed:
                stack.enter_context(Join(models))
            try:
                yield
            finally:
                self._accumulation.joining = False
                for loader, even in before:
                    loader.set_even(even)

    def clear(self) -> None:
        """Release all prepared objects."""
        self.models.clear()
        self.optimizers.clear()
        self.schedulers.clear()
        self.loaders.clear()
        self._strategy.stop()
        self._precision.abandon_step()  # the gradient scaler keeps state per optimizer
        self.checks.end_calls()
        self.checks = _LoopChecks(
            self._strategy, self._processes.print, self.models, self._accumulation
        )
        self._accumulation.reset()


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


def _no_parameters(given: Any) -> ConfigurationError:
    return ConfigurationError(
        "clip_grad_norm_ needs the parameters whose gradients it clips",
        found=f"a {type(given).__name__}",
        fix="call accelerator.clip_grad_norm_(model.parameters(), max_norm), with parentheses",
    )


_LOOKS: Final = 3  # steps that are checked
_CALLS: Final = 10_000  # calls of any modules for which the first call of a prepared model is awaited
_OPTIMIZER: Final = Optimizer.__init__.__code__.co_filename
_LATE: Final[list[RemovableHandle]] = []
"""Hooks of deleted objects, still to be removed."""


@final
class _LoopChecks:
    """Checks the first forward of each model, the first backwards, and the first steps of optimizers.

    Args:
        strategy: the strategy, with the groups of its processes.
        say: prints one line, once on each machine.
        models: the prepared models.
        window: knows the models that are trained, and when a window ends.

    Attributes:
        active: whether the loop must still call `backward`; False in a copy, whose parameters are copies too.
    """

    def __init__(
        self,
        strategy: Strategy,
        say: Callable[[str], None],
        models: Sequence[nn.Module],
        window: Accumulation,
    ) -> None:
        self.active = True
        self._world = strategy.world
        self._data = strategy.data
        self._say = say
        self._models = models
        self._window = window
        self._prepared: set[int] = (
            set()
        )  # ids of parameters in prepared optimizers that have stepped
        self._steps: weakref.finalize[..., _LoopChecks] | None = (
            None  # removes the global hook on optimizer steps
        )
        self._looks = 0
        self._uncalled: weakref.WeakSet[nn.Module] = (
            weakref.WeakSet()
        )  # prepared models before their first call
        self._calls: weakref.finalize[..., _LoopChecks] | None = (
            None  # removes the global hook on calls of modules
        )
        self._calls_left = _CALLS

    def expect_call(self, model: nn.Module) -> None:
        """Check the arguments of the model's first call.

        The hook is torch's global one, and not the model's: a model can be copied, saved and exported at any time.
        """
        self._uncalled.add(model)
        if self._calls is not None:
            return
        checks = weakref.ref(self)

        def look(called: nn.Module, arguments: Any) -> None:
            expecting = checks()
            if expecting is not None and expecting._uncalled:
                expecting.check_call(called, arguments)

        self._calls = weakref.finalize(
            self, _remove, register_module_forward_pre_hook(look)
        )

    def check_call(self, called: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Check the first call of a prepared model; stop if all of them were called, or one is not for long."""
        self._calls_left -= 1
        if called in self._uncalled:
            self._uncalled.discard(called)
            self._compare_devices(called, arguments)
        if not self._uncalled or self._calls_left == 0:
            self.end_calls()

    def end_calls(self) -> None:
        """Check no further first calls."""
        self._uncalled.clear()
        registered = None if self._calls is None else self._calls.detach()
        self._calls = None
        self._calls_left = _CALLS
        if registered is not None:
            registered[2][0].remove()

    def __getstate__(self) -> dict[str, Any]:
        # The hooks belong to this process.
        return {
            **vars(self),
            "_steps": None,
            "_calls": None,
            "_uncalled": None,
            "active": False,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._uncalled = weakref.WeakSet()

    @staticmethod
    def _compare_devices(model: nn.Module, given: Any) -> None:
        # FSDP moves offloaded shards to the computing device, so their current device does not count.
        places = {
            parameter.device
            for parameter in model.parameters()
            if not hasattr(parameter, "device_mesh")
        }
        found = {tensor.device for tensor in tensors_of(given) if tensor.ndim}
        # Some inputs, such as sequence lengths, belong on the CPU: only a call with no tensor on the device is wrong.
        if len(places) == 1 and found and not places & found:
            raise ConfigurationError(
                "the batch is on another device than the model",
                found=f"a batch on {', '.join(map(str, found))}, {type(model).__name__} on {places.pop()}",
                fix="prepare the loader, or move the batch: batch.to(accelerator.device)",
            )

    def backward(
        self, loss: Tensor, harm: str | None, any_loader: bool, steps: int
    ) -> None:
        """Check the loop at the start of a backward.

        Args:
            loss: the loss; equal losses on all processes come from equal batches.
            harm: the reason why an unprepared optimizer must not step, or None.
            any_loader: whether a loader was prepared.
            steps: the number of micro-batches in a window.
        """
        if harm is not None and self._steps is None:
            self._look_at_steps(harm)
        if self._looks == 0 and self._data.size > 1 and not any_loader:
            rows = self._data.agree(
                [float(loss.detach().double().sum())]
            )  # sync point: before the first step, once
            if all(row == rows[0] for row in rows):
                self._say(
                    "every process trains on the same batch: prepare the loader too, "
                    "accelerator.prepare(model, optimizer, loader)"
                )
        self._looks += 1
        if self._looks >= _LOOKS * steps:
            self.active = False
            self._end_look()
            self.end_calls()

    def _look_at_steps(self, harm: str) -> None:
        """Raise an error before an unprepared optimizer steps a prepared model.

        torch calls the hook for every optimizer of the process, so it is removed after the first steps, and when this
        object is deleted.
        """
        checks = weakref.ref(self)

        def look(optimizer: Optimizer, arguments: Any, options: Any) -> None:
            mine = checks()
            if mine is not None:
                mine._compare(optimizer, harm)

        while _LATE:
            _LATE.pop().remove()
        self._steps = weakref.finalize(
            self, _remove, register_optimizer_step_pre_hook(look)
        )

    def _end_look(self) -> None:
        found = None if self._steps is None else self._steps.detach()
        if found is not None:
            found[2][0].remove()

    def _compare(self, optimizer: Optimizer, harm: str) -> None:
        stepped = {
            id(parameter)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        stepped -= self._prepared
        window = self._window
        # A loop may count on its own for models that are not prepared, as long as it does not step inside the window.
        unprepared = () if window.sync else window.models
        for model in (*self._models, *unprepared):
            for name, parameter in model.named_parameters():
                if id(parameter) in stepped:
                    self._end_look()
                    known = any(model is one for one in self._models)
                    both = "optimizer" if known else "model, optimizer"
                    raise ConfigurationError(
                        f"an unprepared optimizer updates {'a prepared model' if known else 'a model inside a window'}",
                        found=f"{type(optimizer).__name__} steps {type(model).__name__}.{name}, and {harm}",
                        fix=f"{both} = accelerator.prepare({both}), and step what that returns",
                    )

    def know(self, optimizer: Optimizer) -> None:
        """Record the parameters of a prepared optimizer whose steps the engine takes and checks itself."""
        self._prepared |= {
            id(parameter)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def step(self, optimizer: Optimizer) -> None:
        """Check a prepared optimizer at its first step.

        Args:
            optimizer: the user's own.

        Raises:
            RankError: none of its parameters belongs to a prepared model, so each process would train its own weights.
        """
        mine = {
            id(parameter)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        self._prepared |= mine
        self._check_average(optimizer)
        if self._world.size == 1:
            return
        if not any(
            id(parameter) in mine
            for model in self._models
            for parameter in model.parameters()
        ):
            raise RankError(
                "an optimizer was prepared without its model: every process would train a separate copy",
                found=f"{type(optimizer).__name__} on {self._world.size} processes",
                fix="model, optimizer = accelerator.prepare(model, optimizer)",
            )

    def _check_average(self, optimizer: Optimizer) -> None:
        """Print a line if the gradients of the first step are not the mean of its micro-batches."""
        window = self._window
        if window.turn:
            if not window.began and window.count > 1 and has_gradients(optimizer):
                self._say(
                    f"the gradients of {window.count} micro-batches are summed, not averaged: loss.backward() was "
                    "called in place of accelerator.backward(loss)"
                )
        elif window.divides and 0 < self._looks < window.steps:
            self._say(
                f"gradient_accumulation_steps={window.steps} divides each loss, and an optimizer steps after "
                f"{self._looks}: wrap the loop's body in `with accelerator.accumulate(model):`, or step after "
                f"{window.steps} micro-batches"
            )


def _remove(handle: RemovableHandle) -> None:
    """Remove a hook, unless torch is iterating over the hooks: the garbage collector may call this at any time."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename == _OPTIMIZER:
            _LATE.append(handle)
            return
    handle.remove()
