"""Closures for optimizers that compute the loss themselves, such as SAM, LBFGS and line searches.

The loop computes the loss and gradients of a window before the step. A closure therefore returns this loss while
weights and gradients are unchanged, and runs the window again after they have changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.protocols import Group
from trainer_kit.core.tensors import local
from trainer_kit.precision.precision import Precision
from trainer_kit.strategies.strategy import Strategy

__all__ = ["Closures", "calls_once", "refusal", "refusal_of_scaling", "requires_closure"]

_GRADIENT: Final = attrgetter("grad")
_VERSION: Final = attrgetter("_version")
_FIRST_ORDER: Final = ("torch.", "torchao.", "bitsandbytes.")
"""Libraries whose optimizers call an optional closure once, before they change weights."""


def requires_closure(optimizer: Optimizer) -> bool:
    """Whether ``step`` requires a closure."""
    closure = _parameters_of_step(optimizer).get("closure")
    return closure is not None and closure.default is closure.empty


def calls_once(optimizer: Optimizer) -> bool:
    """Whether a closure is known to be called at most once, so that the present gradients are all that counts.

    Example:
        >>> calls_once(torch.optim.SGD(nn.Linear(2, 1).parameters()))
        True
        >>> calls_once(torch.optim.LBFGS(nn.Linear(2, 1).parameters()))
        False
    """
    parameters = _parameters_of_step(optimizer)
    if "closure" not in parameters and all(
        p.kind is not p.VAR_KEYWORD for p in parameters.values()
    ):
        return True
    module = inspect.unwrap(optimizer.step).__module__
    return module.startswith(_FIRST_ORDER) and not requires_closure(optimizer)


def _parameters_of_step(optimizer: Optimizer) -> Any:
    return inspect.signature(optimizer.step).parameters


def refusal(
    optimizer: Optimizer, strategy: Strategy, precision: Precision
) -> ConfigurationError | None:
    """The error for an optimizer that runs a window again, if that is not possible here; else None."""
    if precision.scales:
        return refusal_of_scaling(optimizer)
    why = strategy.why_not_again
    return None if why is None else _refusal(optimizer, why, "train with DDP or FSDP")


def refusal_of_scaling(optimizer: Optimizer) -> ConfigurationError:
    """The error for an optimizer that recomputes gradients inside its step, where they would be scaled."""
    return _refusal(
        optimizer, "it cannot run with scaled gradients", "use bf16 mixed precision, or float32"
    )


def _refusal(optimizer: Optimizer, why: str, fix: str) -> ConfigurationError:
    return ConfigurationError(
        f"{type(optimizer).__name__} evaluates the loss again inside its step: {why}", fix=fix
    )


@final
class Closures:
    """Makes the closure for each step of one optimizer.

    Args:
        parameters: a change of their values or gradients makes the window run again; read at each step.
        world: all ranks; either all of them run a window again or none.
        loss: returns the loss of the window that ran last.
        again: runs the window again, and returns its loss.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        world: Group,
        loss: Callable[[], Any],
        again: Callable[[], Any],
    ) -> None:
        self._parameters, self._world, self._loss, self._again = parameters, world, loss, again
        self._checked = self._unversioned = False

    def make(self) -> Callable[[], Any]:
        """Make the closure of this step; gradients are complete."""
        gradients = list(map(_GRADIENT, self._parameters))
        versions = self._versions(gradients)
        norms = None if self._checked else self._norms(gradients)
        called = False

        def closure() -> Any:
            nonlocal called
            first, called = not called, True
            return (
                self._loss()
                if first and self._unchanged(gradients, versions, norms)
                else self._again()
            )

        return closure

    def _versions(self, gradients: Sequence[Tensor | None]) -> list[int]:
        present = [gradient for gradient in gradients if gradient is not None]
        return list(map(_VERSION, chain(self._parameters, present)))

    def _unchanged(
        self, gradients: Sequence[Tensor | None], versions: list[int], norms: list[Tensor] | None
    ) -> bool:
        kept = all(map(is_, gradients, map(_GRADIENT, self._parameters)))
        if self._unversioned or not kept or versions != self._versions(gradients):
            return False
        if norms is None:
            return True
        # Writes through `.data` do not change the version counter: check once whether this optimizer does that.
        self._checked = True
        differ = not all(map(torch.equal, norms, self._norms(gradients)))  # sync point: once a fit
        self._unversioned = any(row[0] for row in self._world.agree([differ]))
        return not self._unversioned

    def _norms(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        every = [*self._parameters, *(gradient for gradient in gradients if gradient is not None)]
        return [
            torch.linalg.vector_norm(
                local(t.detach()), dtype=torch.promote_types(t.dtype, torch.float32)
            )
            for t in every
        ]
