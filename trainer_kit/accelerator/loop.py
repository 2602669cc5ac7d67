"""The steps of a loop of the user's own: accumulate, backward, clip."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.accelerator.loader import skip_first_batches
from trainer_kit.accelerator.preparing import Preparing
from trainer_kit.accelerator.wrapping import without_exchange
from trainer_kit.compat.options import (
    AutocastKwargs,
    micro_batches,
)
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.precision.overflow import has_gradients

__all__ = ["Loop"]


class Loop(Preparing):
    """What `Accelerator` does in a step."""

    autocast_handler: AutocastKwargs | None

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch ends its window: gradients are complete, optimizers step."""
        return self.window.sync

    @sync_gradients.setter
    def sync_gradients(self, sync: bool) -> None:
        if sync not in (True, False):
            raise ConfigurationError("sync_gradients is True or False", found=f"sync_gradients={sync!r}")
        self.window.sync = bool(sync)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of an optimizer step."""
        return self.window.steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.window.steps = micro_batches(steps, "accelerator.gradient_accumulation_steps")

    @property
    def mixed_precision(self) -> str:
        """The precision, by Accelerate's word where it has one."""
        words = {"32-true": "no", "16-mixed": "fp16", "bf16-mixed": "bf16"}
        return words.get(self.precision.name, self.precision.name)

    @property
    def scaler(self) -> Any:
        """The gradient scaler of fp16, or None."""
        return self.precision.scaler

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an optimizer's last step was left out because gradients overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

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
            options: of ``Tensor.backward``; an engine with a backward of its own takes ``retain_graph`` only.
        """
        if self._watch is not None:
            self._look()
        scaled = self.precision.scale_loss(self.window.scale(loss, weight))
        if self._own_backward is None:
            scaled.backward(**options)  # type: ignore[no-untyped-call]
        else:
            self._own_backward(scaled, **options)

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
        if self.precision.scales and not self.window.began and has_gradients(optimizer):
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
        return self.strategy.clip_gradients(ready, max_norm, "norm", float(norm_type))

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each element; only at the end of a window."""
        if self.window.sync:
            self.strategy.clip_gradients(self._ready(parameters), clip_value, "value")

    def _ready(self, parameters: Any) -> list[Any]:
        """Their gradients as optimizers will see them: unscaled, and weighed; those of other optimizers are left."""
        several = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self._owns_step:  # its optimizer steps parameters of the engine's own
            self.unscale_gradients()
            return several
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
            even_batches: what loaders do meanwhile, those over an ``IterableDataset`` too; False: none of them repeats
                samples.

        Raises:
            ConfigurationError: the strategy needs every process in a step, so that nobody can be left behind.
        """
        together = self.strategy.lockstep or self.strategy.completes_gradients
        if together and self.strategy.data.size > 1:
            raise ConfigurationError(
                "a step needs every process, so that all of them need equally many batches",
                found=f"join_uneven_inputs under {self.strategy.name!r}",
                fix="leave it out and prepare() the loader: every process gets as many batches; or use DDP",
            )
        from torch.distributed.algorithms.join import Join, Joinable

        before = [(loader, loader.even) for loader in self._dataloaders]
        self.window.joining = self.strategy.data.size > 1
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
