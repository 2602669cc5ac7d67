"""Closures for optimizers that compute the loss themselves, such as SAM, LBFGS and line searches.

The loop computes the loss and gradients of a window before the step. A closure therefore returns this loss while
weights and gradients are unchanged, and runs the window again after they have changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Final, Generic, TypeVar, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.protocols import Group
from trainer_kit.core.tensors import local
from trainer_kit.core.torch_private import version_of
from trainer_kit.precision.precision import Precision
from trainer_kit.strategies.strategy import Strategy

__all__ = [
    "Closures",
    "calls_once",
    "refusal",
    "refusal_of_scaling",
    "requires_closure",
]

_Loss = TypeVar("_Loss")
_GRADIENT: Final = attrgetter("grad")
_CALL_CLOSURE_ONCE: Final = ("torch.", "torchao.", "bitsandbytes.")
"""Libraries whose optimizers call an optional closure once, before they change weights."""


def requires_closure(optimizer: Optimizer) -> bool:
    """Whether ``step`` requires a closure."""
    closure = _step_arguments(optimizer).get("closure")
    return closure is not None and closure.default is closure.empty


def calls_once(optimizer: Optimizer) -> bool:
    """Whether a closure is known to be called at most once, so that the present gradients are all that counts.

    Example:
        >>> calls_once(torch.optim.SGD(nn.Linear(2, 1).parameters()))
        True
        >>> calls_once(torch.optim.LBFGS(nn.Linear(2, 1).parameters()))
        False
    """
    arguments = _step_arguments(optimizer)
    takes_any_name = any(
        argument.kind is argument.VAR_KEYWORD for argument in arguments.values()
    )
    if "closure" not in arguments and not takes_any_name:
        return True
    module = inspect.unwrap(optimizer.step).__module__
    return module.startswith(_CALL_CLOSURE_ONCE) and not requires_closure(optimizer)


def _step_arguments(optimizer: Optimizer) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(optimizer.step).parameters


def refusal(
    optimizer: Optimizer, strategy: Strategy, precision: Precision
) -> ConfigurationError | None:
    """The error for an optimizer that runs a window again, if that is not possible here; else None."""
    if precision.scales:
        return refusal_of_scaling(optimizer)
    reason = strategy.why_not_again
    if reason is None:
        return None
    return _refusal(optimizer, reason, fix="train with DDP or FSDP")


def refusal_of_scaling(optimizer: Optimizer) -> ConfigurationError:
    """The error for an optimizer that recomputes gradients inside its step, where they would be scaled."""
    return _refusal(
        optimizer,
        "it cannot run with scaled gradients",
        fix="use bf16 mixed precision, or float32",
    )


def _refusal(optimizer: Optimizer, reason: str, fix: str) -> ConfigurationError:
    return ConfigurationError(
        f"{type(optimizer).__name__} evaluates the loss again inside its step: {reason}",
        fix=fix,
    )


@final
class Closures(Generic[_Loss]):
    """Creates the closure for each step of one optimizer.

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
        loss: Callable[[], _Loss],
        again: Callable[[], _Loss],
    ) -> None:
        self._parameters = parameters
        self._world = world
        self._loss = loss
        self._again = again
        # Whether it is known how this optimizer writes, and whether it does so without changing version counters.
        self._writes_checked = False
        self._unversioned = False

    def make(self) -> Callable[[], _Loss]:
        """Create the closure of this step; gradients are complete."""
        # By identity and version counter: comparing values would be a sync point in every step.
        gradients = list(map(_GRADIENT, self._parameters))
        versions = self._versions(gradients)
        norms = None
        if not self._writes_checked:
            norms = self._norms(gradients)
        called = False

        def closure() -> _Loss:
            nonlocal called
            is_first_call = not called
            called = True
            # Only the first call can find the weights of the window: an optimizer moves them between two calls.
            if is_first_call and self._is_unchanged(gradients, versions, norms):
                return self._loss()
            return self._again()

        return closure

    def _versions(self, gradients: Sequence[Tensor | None]) -> list[int]:
        present = [gradient for gradient in gradients if gradient is not None]
        return list(map(version_of, chain(self._parameters, present)))

    def _is_unchanged(
        self,
        gradients: Sequence[Tensor | None],
        versions: list[int],
        norms: list[Tensor] | None,
    ) -> bool:
        """Whether weights and gradients are those from which the loss was computed."""
        if self._unversioned:
            return False
        if not all(map(is_, gradients, map(_GRADIENT, self._parameters))):
            return False
        if versions != self._versions(gradients):
            return False
        if norms is None:
            return True
        # Writes through `.data` do not change the version counter: check once whether this optimizer does that.
        self._writes_checked = True
        # A sync point, once a fit.
        pairs = zip(norms, self._norms(gradients), strict=True)
        differ = not all(torch.equal(before, now) for before, now in pairs)
        self._unversioned = any(row[0] for row in self._world.agree([differ]))
        # All ranks run a window again, or none: it runs collectives.
        return not self._unversioned

    def _norms(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        present = [gradient for gradient in gradients if gradient is not None]
        return [_norm(tensor) for tensor in chain(self._parameters, present)]


def _norm(tensor: Tensor) -> Tensor:
    """The norm of this rank's shard, in float32 or wider."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(local(tensor.detach()), dtype=wide)
    return norm
