"""Usual mistakes of a loop of the user's own, looked for in its first steps only."""

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

from trainer_kit.core.errors import ConfigurationError, RankError
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.strategies.transforms.dry_run import tensors_of

__all__ = ["Watch"]

_LOOKS: Final = 3  # steps that are looked at, and forwards without gradients
_OPTIMIZER: Final = Optimizer.__init__.__code__.co_filename
_LATE: Final[list[RemovableHandle]] = []
"""Hooks of objects that are gone, to be taken off at the next occasion."""


@final
class Watch:
    """Looks at the first forward of each model, the first backwards, and the first steps of optimizers.

    Args:
        strategy: who the processes are, and which of them get batches of their own.
        say: prints one line, once on each machine.
        models: that are prepared.
    """

    def __init__(self, strategy: Strategy, say: Callable[[str], None], models: Sequence[nn.Module]) -> None:
        self._world, self._data, self._say, self._models = strategy.world, strategy.data, say, models
        self._prepared: set[int] = set()  # parameters, once their optimizer steps
        self._steps: weakref.finalize[..., Watch] | None = None  # ends the look at every optimizer's steps
        self._looks = 0
        self._sample: float | None = None

    def model(self, model: nn.Module) -> None:
        """Look at what the model is called with first, and first in training."""
        look = _Look(self)
        look.handle = model.register_forward_pre_hook(look, with_kwargs=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_steps": None}  # a hook of this process

    def forward(self, called: nn.Module, given: Any, more: bool) -> bool:
        """A prepared model is called, with ``given``.

        Args:
            called: the model.
            given: its arguments.
            more: whether a call without gradients may be followed by another look.

        Returns:
            Whether to be called at the next one too.
        """
        self._compare_devices(called, given)
        trains = torch.is_grad_enabled()
        if trains and self._data.size > 1 and self._sample is None:
            self._sample = _fingerprint(given)
        return not trains and self._data.size > 1 and more

    @staticmethod
    def _compare_devices(model: nn.Module, given: Any) -> None:
        # Parts that FSDP has offloaded come to where the model computes.
        places = {parameter.device for parameter in model.parameters() if not hasattr(parameter, "device_mesh")}
        found = {tensor.device for tensor in tensors_of(given) if tensor.ndim}
        # Lengths of sequences belong on the CPU: only a call with nothing in the right place is a mistake.
        if len(places) == 1 and found and not places & found:
            raise ConfigurationError(
                "the batch is on another device than the model",
                found=f"a batch on {', '.join(map(str, found))}, {type(model).__name__} on {places.pop()}",
                fix="prepare the loader, or move the batch: batch.to(accelerator.device)",
            )

    def backward(self, harm: str | None, any_loader: bool, steps: int) -> bool:
        """A backward begins.

        Args:
            harm: what goes wrong when an optimizer steps that is not prepared, or None.
            any_loader: whether a prepared loader is there.
            steps: micro-batches of a window.

        Returns:
            Whether to be called at the next one too.
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
        if self._looks < _LOOKS * steps:
            return True
        self._end_look()
        return False

    def _look_at_steps(self, harm: str) -> None:
        """Whoever steps a prepared model without being prepared is stopped before the weights change.

        torch calls this for every optimizer of the process, so it goes after the first steps, and with this object.
        """
        watch = weakref.ref(self)

        def look(optimizer: Optimizer, arguments: Any, options: Any) -> None:
            mine = watch()
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
        for model in self._models:
            for name, parameter in model.named_parameters():
                if id(parameter) in stepped:
                    self._end_look()
                    raise ConfigurationError(
                        "an optimizer that is not prepared steps a prepared model",
                        found=f"{type(optimizer).__name__} steps {type(model).__name__}.{name}, and {harm}",
                        fix="optimizer = accelerator.prepare(optimizer), and step what that returns",
                    )

    def know(self, optimizer: Optimizer) -> None:
        """This optimizer is prepared, and an engine that checks it by itself will step its parameters."""
        self._prepared |= {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}

    def step(self, optimizer: Optimizer) -> None:
        """A prepared optimizer steps for the first time.

        Raises:
            RankError: none of its parameters belongs to a prepared model, so each process would train on its own.
        """
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self._prepared |= mine
        if self._world.size == 1:
            return
        if not any(id(parameter) in mine for model in self._models for parameter in model.parameters()):
            raise RankError(
                "an optimizer was prepared, and its model was not: every process would train its own",
                found=f"{type(optimizer).__name__} on {self._world.size} processes",
                fix="model, optimizer = accelerator.prepare(model, optimizer)",
            )


@final
class _Look:
    """The hook of a model, until its first forward in training; an object, because closures do not pickle."""

    handle: RemovableHandle

    def __init__(self, watch: Watch) -> None:
        self.watch, self.left = watch, _LOOKS

    def __call__(self, called: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if not self.watch.forward(called, (arguments, options), self.left > 0):
            self.handle.remove()
        self.left -= 1


def _remove(handle: RemovableHandle) -> None:
    """Take a hook off, unless torch is going through the hooks right now: collectors run at any moment."""
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
