"""Checks of a custom training loop in its first steps, for common mistakes."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Final, final

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from trainer_kit.accelerator.accumulation import Accumulation
from trainer_kit.core.display import plural
from trainer_kit.core.errors import ConfigurationError, RankError
from trainer_kit.core.tensors import tensors_of
from trainer_kit.core.types import SavedState, StateDict
from trainer_kit.precision.native import has_gradients
from trainer_kit.strategies.strategy import Strategy

__all__ = ["LoopChecks", "parameter_ids"]

_CHECKED_STEPS: Final = 3
_MAX_CALLS: Final = 10_000
"""Calls of any modules for which the first call of a prepared model is awaited."""
_OPTIMIZER_SOURCE: Final = Optimizer.__init__.__code__.co_filename
_HOOKS_TO_REMOVE: Final[list[RemovableHandle]] = []
"""Hooks of deleted objects, still to be removed."""


@final
class LoopChecks:
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
        # Ids of parameters in prepared optimizers that have stepped.
        self._prepared: set[int] = set()
        # Removes the global hook on optimizer steps.
        self._step_hook: weakref.finalize[..., LoopChecks] | None = None
        self._backwards = 0
        # Prepared models before their first call.
        self._uncalled: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        # Removes the global hook on calls of modules.
        self._call_hook: weakref.finalize[..., LoopChecks] | None = None
        self._calls_left = _MAX_CALLS

    def __getstate__(self) -> StateDict:
        # The hooks belong to this process.
        return {
            **vars(self),
            "_step_hook": None,
            "_call_hook": None,
            "_uncalled": None,
            "active": False,
        }

    def __setstate__(self, state: SavedState) -> None:
        vars(self).update(state)
        self._uncalled = weakref.WeakSet()

    # -- the first call of a model ---------------------------------------------------------------------------------

    def expect_call(self, model: nn.Module) -> None:
        """Check the arguments of the model's first call.

        The hook is torch's global one, and not the model's: a model can be copied, saved and exported at any time.
        """
        self._uncalled.add(model)
        if self._call_hook is not None:
            return
        # A strong reference in a global hook would keep this object and all models alive.
        reference = weakref.ref(self)

        def check_call(called: nn.Module, arguments: tuple[object, ...]) -> None:
            checks = reference()
            if checks is not None and checks._uncalled:
                checks.check_call(called, arguments)

        handle = register_module_forward_pre_hook(check_call)
        self._call_hook = weakref.finalize(self, _remove, handle)

    def check_call(self, called: nn.Module, arguments: tuple[object, ...]) -> None:
        """Check the first call of a prepared model; stop if all of them were called, or one is not for long."""
        self._calls_left -= 1
        if called in self._uncalled:
            self._uncalled.discard(called)
            _compare_devices(called, arguments)
        if not self._uncalled or self._calls_left == 0:
            self.end_calls()

    def end_calls(self) -> None:
        """Check no further first calls."""
        self._uncalled.clear()
        hook = self._call_hook
        self._call_hook = None
        self._calls_left = _MAX_CALLS
        _remove_at_once(hook)

    # -- the first backwards ---------------------------------------------------------------------------------------

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
        if harm is not None and self._step_hook is None:
            self._watch_steps(harm)
        if self._backwards == 0 and self._data.size > 1 and not any_loader:
            self._compare_losses(loss)
        self._backwards += 1
        if self._backwards >= _CHECKED_STEPS * steps:
            self.active = False
            _remove_at_once(self._step_hook)
            self.end_calls()

    def _compare_losses(self, loss: Tensor) -> None:
        # Sync point: before the first step, once.
        rows = self._data.agree([float(loss.detach().double().sum())])
        if all(row == rows[0] for row in rows):
            self._say(
                "every process trains on the same batch: prepare the loader too, "
                "accelerator.prepare(model, optimizer, loader)"
            )

    # -- the first steps -------------------------------------------------------------------------------------------

    def _watch_steps(self, harm: str) -> None:
        """Raise an error before an unprepared optimizer steps a prepared model.

        torch calls the hook for every optimizer of the process, so it is removed after the first steps, and when this
        object is deleted.
        """
        reference = weakref.ref(self)

        def check_step(
            optimizer: Optimizer, arguments: object, options: object
        ) -> None:
            checks = reference()
            if checks is not None:
                checks._refuse_unprepared(optimizer, harm)

        while _HOOKS_TO_REMOVE:
            _HOOKS_TO_REMOVE.pop().remove()
        handle = register_optimizer_step_pre_hook(check_step)
        self._step_hook = weakref.finalize(self, _remove, handle)

    def _refuse_unprepared(self, optimizer: Optimizer, harm: str) -> None:
        unprepared_parameters = parameter_ids(optimizer) - self._prepared
        window = self._window
        models = list(self._models)
        # A loop may count on its own for models that are not prepared, as long as it does not step inside the window.
        if not window.sync:
            models += window.models
        for model in models:
            for name, parameter in model.named_parameters():
                if id(parameter) not in unprepared_parameters:
                    continue
                _remove_at_once(self._step_hook)
                trained = f"{type(model).__name__}.{name}"
                raise self._unprepared_optimizer(optimizer, model, trained, harm)

    def _unprepared_optimizer(
        self, optimizer: Optimizer, model: nn.Module, trained: str, harm: str
    ) -> ConfigurationError:
        kind = "a model inside a window"
        missing = "model, optimizer"
        if any(model is prepared for prepared in self._models):
            kind = "a prepared model"
            missing = "optimizer"
        return ConfigurationError(
            f"an unprepared optimizer updates {kind}",
            found=f"{type(optimizer).__name__} steps {trained}, and {harm}",
            fix=f"{missing} = accelerator.prepare({missing}), and step what that returns",
        )

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Record the parameters of a prepared optimizer whose steps the engine takes and checks itself."""
        self._prepared |= parameter_ids(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Check a prepared optimizer at its first step.

        Args:
            optimizer: the user's own.

        Raises:
            RankError: none of its parameters belongs to a prepared model, so each process would train its own weights.
        """
        stepped = parameter_ids(optimizer)
        self._prepared |= stepped
        self._check_average(optimizer)
        if self._world.size == 1:
            return
        for model in self._models:
            if any(id(parameter) in stepped for parameter in model.parameters()):
                return
        raise RankError(
            "an optimizer was prepared without its model: every process would train a separate copy",
            found=f"{type(optimizer).__name__} on {plural(self._world.size, 'process')}",
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
            return
        if window.divides and 0 < self._backwards < window.steps:
            self._say(
                f"gradient_accumulation_steps={window.steps} divides each loss, and an optimizer steps after "
                f"{self._backwards}: wrap the loop's body in `with accelerator.accumulate(model):`, or step after "
                f"{plural(window.steps, 'micro-batch')}"
            )


def parameter_ids(optimizer: Optimizer) -> set[int]:
    """Return the ids of an optimizer's parameters."""
    ids: set[int] = set()
    for group in optimizer.param_groups:
        ids.update(map(id, group["params"]))
    return ids


def _compare_devices(model: nn.Module, arguments: tuple[object, ...]) -> None:
    # FSDP moves offloaded shards to the computing device, so their current device does not count.
    model_devices = {
        parameter.device
        for parameter in model.parameters()
        if not hasattr(parameter, "device_mesh")
    }
    batch_devices = {tensor.device for tensor in tensors_of(arguments) if tensor.ndim}
    if len(model_devices) != 1 or not batch_devices:
        return
    # Some inputs, such as sequence lengths, belong on the CPU: only a call with no tensor on the device is wrong.
    if model_devices & batch_devices:
        return
    batch = ", ".join(map(str, batch_devices))
    raise ConfigurationError(
        "the batch is on another device than the model",
        found=f"a batch on {batch}, {type(model).__name__} on {model_devices.pop()}",
        fix="prepare the loader, or move the batch: batch.to(accelerator.device)",
    )


def _remove_at_once(finalizer: weakref.finalize[..., LoopChecks] | None) -> None:
    """Remove the hook of a finalizer, which then does nothing when its object is deleted."""
    detached = None if finalizer is None else finalizer.detach()
    if detached is None:
        return
    _, _, arguments, _ = detached
    handle: RemovableHandle = arguments[0]
    handle.remove()


def _remove(handle: RemovableHandle) -> None:
    """Remove a hook, unless torch is iterating over the hooks: the garbage collector may call this at any time."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename == _OPTIMIZER_SOURCE:
            _HOOKS_TO_REMOVE.append(handle)
            return
    handle.remove()
