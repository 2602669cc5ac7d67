"""The steps of a loop of the user's own: prepare, accumulate, backward, clip, gather."""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.protocols import Group, Precision, Strategy
from trainer_kit.engine.state import configured
from trainer_kit.raw.gathering import Gathering
from trainer_kit.raw.loader import PreparedLoader, prepare_loader, skip_first_batches
from trainer_kit.raw.optimizer import AcceleratedOptimizer, AcceleratedScheduler
from trainer_kit.raw.options import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    TorchDynamoPlugin,
)
from trainer_kit.raw.watch import Watch
from trainer_kit.raw.wrapping import apply_precision, compile_options, compiled, unwrap, without_exchange
from trainer_kit.strategies.gradients import clip_sharded_gradients
from trainer_kit.strategies.transforms.compile import Compile

__all__ = ["Loop"]


class Loop(Gathering):
    """What `Accelerator` does in a step; which strategy and precision it does it with is decided there."""

    strategy: Strategy
    precision: Precision
    dataloader_config: DataLoaderConfiguration
    accumulation: GradientAccumulationPlugin
    dynamo_plugin: TorchDynamoPlugin
    device_placement: bool
    step_scheduler_with_optimizer: bool
    scheduler_steps_per_process: bool
    autocast_handler: AutocastKwargs | None
    data_seed: int
    _models: list[nn.Module]
    _optimizers: list[AcceleratedOptimizer]
    _schedulers: list[AcceleratedScheduler]
    _dataloaders: list[PreparedLoader]
    _watch: Watch | None  # until the first steps are over
    _first_steps: Watch

    @property
    def world(self) -> Group:
        """All processes."""
        return self.strategy.world

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.strategy.device

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch ends its window: gradients are complete, optimizers step."""
        return self.window.sync

    @sync_gradients.setter
    def sync_gradients(self, sync: bool) -> None:
        self.window.sync = sync

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of an optimizer step."""
        return self.window.steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.window.steps = steps

    @property
    def mixed_precision(self) -> str:
        """The precision, by Accelerate's word where it has one."""
        words = {"32-true": "no", "16-mixed": "fp16", "bf16-mixed": "bf16"}
        return words.get(self.precision.name, self.precision.name)

    @property
    def scaler(self) -> Any:
        """The gradient scaler of fp16, or None."""
        return getattr(self.precision, "scaler", None)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an optimizer's last step was left out because gradients overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    @abstractmethod
    def explain(self) -> str:
        """What this process has, line by line."""

    # -- prepare ---------------------------------------------------------------------------------------------------

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
        if kind == 1 and isinstance(thing, Optimizer):
            return self.prepare_optimizer(thing, place)
        if kind == 2 and isinstance(thing, (LRScheduler, ReduceLROnPlateau, AcceleratedScheduler)):
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
        if any(model is known for known in self._models):
            return model
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
        else:
            made = model
        if compiles and not plugin.use_regional_compilation:
            made = compiled(made, plugin)
        if not evaluation_mode:
            self._models.append(made)
        return made

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """An optimizer that steps where gradients are complete."""
        if isinstance(optimizer, AcceleratedOptimizer):
            return optimizer
        self.strategy.prepare_optimizer(optimizer)
        if not hasattr(optimizer, "_configured_options"):  # what a state is compared with when it is loaded
            optimizer._configured_options = configured(optimizer)  # type: ignore[attr-defined]
        # Only where it is more than the optimizer's own, which others may wrap later.
        step = self.strategy.bind_step(optimizer) if self.strategy.sharded else None
        made = AcceleratedOptimizer(optimizer, self.window, self.precision, self._before_first_step, step)
        self._optimizers.append(made)
        return made

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> PreparedLoader:
        """A loader divided among the processes; `PreparedLoader` says how."""
        if isinstance(data_loader, PreparedLoader):
            return data_loader
        device = self.device if self._places(device_placement) else None
        # A seed each: two loaders over one data set must not come in the same order.
        seed = self.data_seed + len(self._dataloaders)
        made = prepare_loader(data_loader, self.world, device, self.window, self.dataloader_config, seed)
        self._dataloaders.append(made)
        return made

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """A scheduler that advances once an optimizer step."""
        if isinstance(scheduler, AcceleratedScheduler):
            return scheduler
        mine = [o for o in self._optimizers if getattr(scheduler, "optimizer", None) in (o, o.optimizer)]
        made = AcceleratedScheduler(
            scheduler,
            mine or self._optimizers,
            self.window,
            with_optimizer=self.step_scheduler_with_optimizer,
            times=self.num_processes if self.scheduler_steps_per_process else 1,
            adjust=self.accumulation.adjust_scheduler,
        )
        self._schedulers.append(made)
        return made

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
        if keep_torch_compile and isinstance(getattr(model, "_orig_mod", None), nn.Module):
            return model if model._orig_mod is own else compiled(own, self.dynamo_plugin)
        return own

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget what was prepared; assign the result to the names that still hold it."""
        self._models.clear()
        self._optimizers.clear()
        self._schedulers.clear()
        self._dataloaders.clear()
        self.strategy.stop()
        self._watch = self._first_steps = Watch(self.world, self.print, self._models)
        self.window.reset()
        gc.collect()
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()
        return [None] * len(objects)

    def clear(self, *objects: Any) -> list[None]:
        """As `free_memory`."""
        return self.free_memory(*objects)

    # -- a step ----------------------------------------------------------------------------------------------------

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """One micro-batch: gradients are exchanged, and optimizers step, at the end of a window only.

        Args:
            models: those that are trained in it.
        """
        self.window.models = models
        return self.window

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, gradients of ``model`` stay on their process."""
        return without_exchange(model) if self.use_distributed else nullcontext()

    def backward(self, loss: Tensor, weight: float | None = None, **options: Any) -> None:
        """Backward, in place of ``loss.backward()``.

        Args:
            loss: a scalar: the mean over the batch; with ``weight`` a sum.
            weight: of what ``loss`` is the sum: ``backward(token_losses.sum(), weight=tokens)`` gives the exact mean
                over all tokens of the window and of all processes.
            options: of ``Tensor.backward``.
        """
        if self._watch is not None:
            self._look()
        self.precision.scale_loss(self.window.scale(loss, weight)).backward(**options)  # type: ignore[no-untyped-call]

    def _look(self) -> None:
        harm = None
        if self.window.steps > 1:
            harm = f"{self.window.steps} micro-batches make a step"
        elif self.precision.scales:
            harm = "gradients are scaled for float16"
        assert self._watch is not None
        if not self._watch.backward(harm, bool(self._dataloaders), self.window.steps):
            self._watch = None

    def _before_first_step(self, optimizer: Optimizer) -> None:
        if self.precision.scales and not self.window.began and _has_gradients(optimizer):
            raise ConfigurationError(
                "gradients are stepped with that were never scaled for float16",
                found="loss.backward()",
                fix="accelerator.backward(loss)",
            )
        self._first_steps.step(optimizer)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Gradients as they are without fp16's scale, and weighed for their window; by default of all optimizers."""
        if not self.window.sync:
            return
        given = self._optimizers if optimizer is None else optimizer
        for one in given if isinstance(given, (list, tuple)) else [given]:
            raw = getattr(one, "optimizer", one)
            self.window.correct(raw)
            self.precision.unscale_gradients(raw)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor | None:
        """Clip by the norm of all gradients of ``parameters`` together; only at the end of a window.

        Returns:
            The norm before; None inside a window.
        """
        if not self.window.sync:
            return None
        ready = self._ready(parameters)
        if self.strategy.sharded and norm_type == 2:
            return clip_sharded_gradients(ready, max_norm, "norm")
        return nn.utils.clip_grad_norm_(ready, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each element; only at the end of a window."""
        if self.window.sync:
            self.strategy.clip_gradients(self._ready(parameters), clip_value, "value")

    def _ready(self, parameters: Any) -> list[Any]:
        """Their gradients as optimizers will see them: unscaled, and weighed; those of other optimizers are left."""
        several = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        wanted = {id(parameter) for parameter in several}
        for one in self._optimizers:
            if any(id(parameter) in wanted for group in one.param_groups for parameter in group["params"]):
                self.unscale_gradients(one)
        return several

    @contextmanager
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        """Inside, whatever is computed outside of a prepared model is in the precision too."""
        chosen = autocast_handler or self.autocast_handler
        context: Any = self.precision.forward_context()
        if chosen is not None and isinstance(context, torch.autocast):
            context = torch.autocast(
                self.device.type, context.fast_dtype, enabled=chosen.enabled, cache_enabled=chosen.cache_enabled
            )
        with context or nullcontext():
            yield

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Inside, a process that has no batches left takes part in the exchanges of the others.

        Args:
            joinables: prepared models.
            even_batches: what loaders do meanwhile; False: none of them repeats samples.

        Raises:
            ConfigurationError: the strategy needs every process in a forward, so that nobody can be left behind.
        """
        if self.strategy.lockstep and self.use_distributed:
            raise ConfigurationError(
                "a forward needs every process, so that all of them need equally many batches",
                found=f"join_uneven_inputs under {self.strategy.name!r}",
                fix="leave it out and prepare() the loader: every process gets as many batches; or use DDP",
            )
        from torch.distributed.algorithms.join import Join, Joinable

        before, self.window.joining = [(loader, loader.even) for loader in self._dataloaders], self.use_distributed
        if even_batches is not None:
            for loader in self._dataloaders:
                loader.set_even(even_batches)
        with ExitStack() as stack:
            several = [one for one in joinables if isinstance(one, Joinable)]
            if several and self.use_distributed:
                stack.enter_context(Join(several))
            try:
                yield
            finally:
                self.window.joining = False
                for loader, even in before:
                    loader.set_even(even)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """A loader whose iterations begin with batch ``num_batches``."""
        return skip_first_batches(dataloader, num_batches)


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
