"""Check a raw loop for common mistakes, in its first steps only."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from trainer_kit.accelerator.accumulation import Accumulation
from trainer_kit.core.errors import ConfigurationError, RankError
from trainer_kit.core.tensors import tensors_of
from trainer_kit.precision.native import has_gradients
from trainer_kit.strategies.strategy import Strategy

__all__ = ["LoopChecks"]

_LOOKS: Final = 3  # steps, and forwards without gradients, that are checked
_OPTIMIZER: Final = Optimizer.__init__.__code__.co_filename
_LATE: Final[list[RemovableHandle]] = []
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
        self, strategy: Strategy, say: Callable[[str], None], models: Sequence[nn.Module], window: Accumulation
    ) -> None:
        self.active = True
        self._world = strategy.world
        self._data = strategy.data
        self._say = say
        self._models = models
        self._window = window
        self._prepared: set[int] = set()  # ids of parameters in prepared optimizers that have stepped
        self._steps: weakref.finalize[..., LoopChecks] | None = None  # removes the global hook on optimizer steps
        self._looks = 0
        self._sample: float | None = None

    def model(self, model: nn.Module) -> None:
        """Check the arguments of the model's first call, and of its first call in training."""
        hook = _ForwardHook(self)
        hook.handle = model.register_forward_pre_hook(hook, with_kwargs=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_steps": None, "active": False}  # the hook belongs to this process

    def forward(self, called: nn.Module, given: Any, more: bool) -> bool:
        """Check a call of a prepared model.

        Args:
            called: the model.
            given: its arguments.
            more: whether another call may be checked after a call without gradients.

        Returns:
            Whether to check the next call too.
        """
        self._compare_devices(called, given)
        trains = torch.is_grad_enabled()
        if trains and self._data.size > 1 and self._sample is None:
            self._sample = _fingerprint(given)
        return not trains and self._data.size > 1 and more

    @staticmethod
    def _compare_devices(model: nn.Module, given: Any) -> None:
        # FSDP moves offloaded shards to the computing device, so their current device does not count.
        places = {parameter.device for parameter in model.parameters() if not hasattr(parameter, "device_mesh")}
        found = {tensor.device for tensor in tensors_of(given) if tensor.ndim}
        # Some inputs, such as sequence lengths, belong on the CPU: only a call with no tensor on the device is wrong.
        if len(places) == 1 and found and not places & found:
            raise ConfigurationError(
                "the batch is on another device than the model",
                found=f"a batch on {', '.join(map(str, found))}, {type(model).__name__} on {places.pop()}",
                fix="prepare the loader, or move the batch: batch.to(accelerator.device)",
            )

    def backward(self, harm: str | None, any_loader: bool, steps: int) -> None:
        """Check the loop at the start of a backward.

        Args:
            harm: the reason why an unprepared optimizer must not step, or None.
            any_loader: whether a loader was prepared.
            steps: the number of micro-batches in a window.
        """
        if harm is not None and self._steps is None:
            self._look_at_steps(harm)
        if self._looks == 0 and self._data.size > 1 and not any_loader and self._sample is not None:
            rows = self._data.agree([self._sample])
            if all(row == rows[0] for row in rows):
                self._say(
                    "every process trains on the same batch: prepare the loader too, "
                    "accelerator.prepare(model, optimizer, loader)"
                )
        self._looks += 1
        if self._looks >= _LOOKS * steps:
            self.active = False
            self._end_look()

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
        self._steps = weakref.finalize(self, _remove, register_optimizer_step_pre_hook(look))

    def _end_look(self) -> None:
        found = None if self._steps is None else self._steps.detach()
        if found is not None:
            found[2][0].remove()

    def _compare(self, optimizer: Optimizer, harm: str) -> None:
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
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
        self._prepared |= {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}

    def step(self, optimizer: Optimizer) -> None:
        """Check a prepared optimizer at its first step.

        Args:
            optimizer: the user's own.

        Raises:
            RankError: none of its parameters belongs to a prepared model, so each process would train its own weights.
        """
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self._prepared |= mine
        self._check_average(optimizer)
        if self._world.size == 1:
            return
        if not any(id(parameter) in mine for model in self._models for parameter in model.parameters()):
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


@final
class _ForwardHook:
    """The hook of a model until its first forward in training; a class, because closures cannot be pickled."""

    handle: RemovableHandle

    def __init__(self, checks: LoopChecks) -> None:
        self.checks = checks
        self.left = _LOOKS

    def __call__(self, called: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if not self.checks.forward(called, (arguments, options), self.left > 0):
            self.handle.remove()
        self.left -= 1


def _remove(handle: RemovableHandle) -> None:
    """Remove a hook, unless torch is iterating over the hooks: the garbage collector may call this at any time."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename == _OPTIMIZER:
            _LATE.append(handle)
            return
    handle.remove()


def _fingerprint(data: Any) -> float | None:
    numbers = [tensor.detach().double().sum() for tensor in tensors_of(data) if tensor.ndim and not tensor.is_complex()]
    return float(torch.stack(numbers).sum()) if numbers else None  # sync point: before the first step, once
