"""What `Accelerator.prepare` makes of models, optimizers, loaders and schedulers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from trainer_kit.accelerator.batch_size import release_memory
from trainer_kit.accelerator.gathering import Gathering
from trainer_kit.accelerator.loader import PreparedLoader, prepare_loader
from trainer_kit.accelerator.loop_checks import Watch
from trainer_kit.accelerator.optimizer import AcceleratedOptimizer, AcceleratedScheduler
from trainer_kit.accelerator.process import DistributedType
from trainer_kit.accelerator.wrapping import apply_precision, compile_options, compiled, uncompiled, unwrap
from trainer_kit.compat.deepspeed import DeepSpeedPlugin, DummyOptim, DummyScheduler, made_optimizer, made_scheduler
from trainer_kit.compat.options import DataLoaderConfiguration, GradientAccumulationPlugin, TorchDynamoPlugin
from trainer_kit.core.display import Text
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.protocols import Group
from trainer_kit.core.seed import order_seed
from trainer_kit.precision.precision import Precision
from trainer_kit.state.optimizer_states import note_configured
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.strategies.transforms.compile import Compile

__all__ = ["Preparing"]

_BY_ENGINE: Final = {
    "deepspeed": DistributedType.DEEPSPEED,
    "fsdp": DistributedType.FSDP,
    "megatron": DistributedType.MEGATRON_LM,
    "xla": DistributedType.XLA,
}
_SCHEDULERS: Final = (LRScheduler, ReduceLROnPlateau, AcceleratedScheduler, DummyScheduler)


class Preparing(Gathering):
    """What `Accelerator` does before the first step; with which strategy and precision is decided there."""

    strategy: Strategy
    precision: Precision
    dataloader_config: DataLoaderConfiguration
    accumulation: GradientAccumulationPlugin
    dynamo_plugin: TorchDynamoPlugin
    device_placement: bool
    step_scheduler_with_optimizer: bool
    scheduler_steps_per_process: bool
    data_seed: int | None
    _models: list[nn.Module]
    _optimizers: list[AcceleratedOptimizer]
    _schedulers: list[AcceleratedScheduler]
    _dataloaders: list[PreparedLoader]
    _watch: Watch | None  # until the first steps are over
    _first_steps: Watch
    _own_backward: Callable[..., None] | None  # the engine's

    @property
    def world(self) -> Group:
        """All processes."""
        return self.strategy.world

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.strategy.device

    @property
    def num_processes(self) -> int:
        """How many processes work together."""
        return self.world.size

    @property
    def process_index(self) -> int:
        """This process among all, from 0."""
        return self.world.rank

    @property
    def local_process_index(self) -> int:
        """This process among those of its machine, from 0."""
        here = self.environment
        return here.local_rank if here.launched and self.num_processes > 1 else self.process_index

    @property
    def distributed_type(self) -> DistributedType:
        """The engine, where Accelerate has a word for it; else what kind of processes work together."""
        return _BY_ENGINE.get(self.strategy.engine) or super().distributed_type

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The plugin in use."""
        return next((plugin for plugin in self.deepspeed_plugins.values() if plugin.selected), None)

    @abstractmethod
    def explain(self) -> Text:
        """What this process has, line by line."""

    @abstractmethod
    def _before_first_step(self, optimizer: Optimizer) -> None:
        """Gradients of this optimizer are complete for the first time."""

    def prepare(self, *objects: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Models, optimizers, loaders and schedulers, in any mix and order, for this number of processes.

        Args:
            objects: anything else is returned as it is; what was prepared before, too.
            device_placement: for each object whether it is moved; by default as the Accelerator is told.

        Returns:
            What takes their place, in the same order; one object alone is not in a tuple.

        Raises:
            ConfigurationError: an optimizer is prepared whose model is not.
        """
        places = list(device_placement or [None] * len(objects))
        if len(places) != len(objects):
            raise ConfigurationError(
                "device_placement says for each object whether it is moved",
                found=f"{len(places)} values for {len(objects)} objects",
            )
        done: dict[int, Any] = {}
        # Schedulers need their optimizers, and those the parameters that preparing a model leaves.
        for kind in (0, 1, 2):
            for index, (thing, place) in enumerate(zip(objects, places, strict=True)):
                if index not in done and (made := self._prepare_one(thing, place, kind)) is not None:
                    done[index] = made
        found = tuple(done.get(index, thing) for index, thing in enumerate(objects))
        if self.debug:
            self._tell(self.explain())
        return found[0] if len(found) == 1 else found

    def _prepare_one(self, thing: Any, place: bool | None, kind: int) -> Any:
        if kind == 0 and isinstance(thing, nn.Module):
            return self.prepare_model(thing, place)
        if kind == 0 and isinstance(thing, (DataLoader, PreparedLoader)):
            return self.prepare_data_loader(thing, place)
        if kind == 1 and isinstance(thing, (Optimizer, DummyOptim)):
            return self.prepare_optimizer(thing, place)
        if kind == 2 and isinstance(thing, _SCHEDULERS):
            return self.prepare_scheduler(thing)
        return None

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """The model on its device, in the precision, and wrapped for several processes.

        Args:
            model: is changed in place, and wrapped where there are several processes.
            device_placement: whether it is moved.
            evaluation_mode: it is not trained, so gradients need no exchange.
        """
        for known in self._models:
            if model is known or model is unwrap(known):  # a second wrapper would exchange its gradients once more
                return known
        plugin = self.dynamo_plugin
        compiles = plugin.backend.lower() != "no"
        if self._watch is not None and not evaluation_mode and not compiles:  # a hook would break the compiled graph
            self._watch.model(model)
        self.precision.convert_module(model)
        apply_precision(model, self.precision)
        if compiles and plugin.use_regional_compilation:  # before it is sharded
            Compile(options=compile_options(plugin)).apply(model)
        if evaluation_mode:
            made = model.to(self.device) if self._places(device_placement) else model
        elif self._places(device_placement) or self.use_distributed:
            made = self.strategy.wrap_module(model, self.precision)
            self._own_backward = self.strategy.bind_backward(None)
            self._follow()
        else:
            made = model
        if compiles and not plugin.use_regional_compilation:
            made = compiled(made, plugin)
        if not evaluation_mode:
            self._models.append(made)
        return made

    def prepare_optimizer(
        self, optimizer: Optimizer | DummyOptim, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """An optimizer that steps where gradients are complete."""
        if isinstance(optimizer, AcceleratedOptimizer):
            return optimizer
        optimizer = made_optimizer(self.strategy, optimizer)
        if self._owns_step:  # before the engine puts parameters of its own in their place
            self._first_steps.know(optimizer)
            self._tell_engine()
        self.strategy.prepare_optimizer(optimizer)
        if not hasattr(optimizer, "_configured_options"):  # what a state is compared with when it is loaded
            note_configured(optimizer)
        first = None if self._owns_step else self._before_first_step
        after = self._adapt_scale if self.precision.scales else None
        made = AcceleratedOptimizer(optimizer, self.window, self.precision, first, self._bound_step(optimizer), after)
        self._optimizers.append(made)
        for scheduler in self._schedulers:  # that was prepared before
            if getattr(scheduler.scheduler, "optimizer", None) is optimizer:
                scheduler.optimizers = [made]
        return made

    def _adapt_scale(self) -> None:
        self.precision.adapt_scale([one.optimizer for one in self._optimizers])

    def _bound_step(self, optimizer: Optimizer) -> Callable[..., Any] | None:
        bound = self.strategy.bind_step(optimizer)
        # Only where it is more than the optimizer's own, which others may wrap later.
        return None if bound == optimizer.step else bound

    def _follow(self) -> None:
        """Optimizers that were prepared before their model step what became of its parameters."""
        for one in self._optimizers if not self._owns_step else ():
            self.strategy.prepare_optimizer(one.optimizer)
            one.rebind(self._bound_step(one.optimizer))

    @property
    def _owns_step(self) -> bool:
        """Whether an engine runs backward, puts parameters of its own into optimizers, and steps them."""
        return self.strategy.owns_step

    def _tell_engine(self) -> None:
        """What an engine with a configuration of its own is to agree with."""
        known = (loader.feed.per_rank_batch_size for loader in self._dataloaders)
        sizes, plugin = {size for size in known if size is not None}, self.deepspeed_plugin
        size = plugin.batch_size(sorted(sizes)) if plugin is not None else None
        self.strategy.configure(accumulation=self.window.steps, batch_size=size)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> PreparedLoader:
        """A loader divided among the processes; `PreparedLoader` says how. Every process calls it.

        Its order follows the seed of the Accelerator, else what the main process has seeded by now.
        """
        if isinstance(data_loader, PreparedLoader):
            return data_loader
        device = self.device if self._places(device_placement) else None
        with self._together(None, "prepare"):
            seed = self.world.broadcast(order_seed() if self.data_seed is None else self.data_seed)
        # A seed each: two loaders over one data set must not come in the same order.
        seed += len(self._dataloaders)
        strategy, window = self.strategy, self.window
        groups, engine = (strategy.data, strategy.world), (strategy.shard_batch, strategy.end_batch)
        made = prepare_loader(data_loader, *groups, device, window, self.dataloader_config, seed, *engine)
        self._dataloaders.append(made)
        return made

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """A scheduler that advances with its optimizer, by default once for each process in an optimizer step.

        So Accelerate does, and the scripts written for it multiply the length of their schedules by the number of
        processes. ``split_batches=True`` and ``Accelerator(scheduler_steps_per_process=False)``: once in a step. So are
        ``ReduceLROnPlateau``, whose patience counts values, and DeepSpeed's own schedules.
        """
        if isinstance(scheduler, AcceleratedScheduler):
            return scheduler
        latest, several = self._optimizers[-1].optimizer if self._optimizers else None, self._scheduler_steps
        by_engine = isinstance(scheduler, DummyScheduler)
        scheduler = made_scheduler(self.strategy, scheduler, latest, several)
        plateau = isinstance(scheduler, ReduceLROnPlateau)
        once = plateau or by_engine or type(scheduler).__module__.startswith("deepspeed.")
        mine = [o for o in self._optimizers if getattr(scheduler, "optimizer", None) in (o, o.optimizer)]
        made = AcceleratedScheduler(
            scheduler,
            mine or self._optimizers,
            self.window,
            with_optimizer=self.step_scheduler_with_optimizer,
            times=1 if once else several,
            adjust=self.accumulation.adjust_scheduler and not plateau,  # torch's counts no calls
        )
        if made.times > 1 and not any(one.times > 1 for one in self._schedulers):
            made.before_first_step = self._say_scheduler_steps
        self._schedulers.append(made)
        return made

    def _say_scheduler_steps(self) -> None:
        """Before the first one that advances several times does so."""
        first = next(one for one in self._schedulers if one.times > 1)
        self.print(f"{first.describe()}, as under Accelerate; once with Accelerator(scheduler_steps_per_process=False)")

    @property
    def _scheduler_steps(self) -> int:
        """How often a prepared scheduler advances in an optimizer step."""
        if not (self.scheduler_steps_per_process and self.step_scheduler_with_optimizer):
            return 1
        return 1 if self.dataloader_config.split_batches else self.num_processes

    def _places(self, given: bool | None) -> bool:
        return self.device_placement if given is None else given

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = False) -> Any:
        """The user's own model again.

        Args:
            model: prepared or not.
            keep_fp32_wrapper: leave its forward in the precision that it was prepared for.
            keep_torch_compile: a compiled model stays compiled.
        """
        own = unwrap(model, keep_fp32_wrapper)
        if keep_torch_compile and (inner := uncompiled(model)) is not model:
            return model if inner is own else compiled(own, self.dynamo_plugin)
        return own

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget what was prepared; assign the result to the names that still hold it."""
        self._models.clear()
        self._optimizers.clear()
        self._schedulers.clear()
        self._dataloaders.clear()
        self.strategy.stop()
        self.precision.abandon_step()  # what scales losses knows optimizers
        self._watch = self._first_steps = Watch(self.strategy, self.print, self._models)
        self.window.reset()
        return release_memory(*objects)

    def clear(self, *objects: Any) -> list[None]:
        """As `free_memory`."""
        return self.free_memory(*objects)
