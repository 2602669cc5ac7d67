"""torch's DistributedDataParallel for modules whose trained parameters change during training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel

from trainer_kit.strategies.torch_private import (
    excluded_from_compilation,
    reduced_parameters,
    replace_reducer,
    set_reduced_parameters,
)

__all__ = ["AdaptiveDDP", "LoopDDP"]

_REQUIRES_GRAD: Final = attrgetter("requires_grad")


@final
class _Registrations:
    """Counts the parameters and layers that modules of this process receive."""

    def __init__(self) -> None:
        self.count = 0
        self._active = False

    def watch(self) -> None:
        """Count from now on; the hooks stay for the process, since they only count."""
        # torch has these hooks for all modules of a process only: one pair serves all wrappers.
        if not self._active:
            self._active = True
            register_module_parameter_registration_hook(self._add)
            register_module_module_registration_hook(self._add)

    def _add(self, *registration: object) -> None:
        self.count += 1


_REGISTRATIONS: Final = _Registrations()


class AdaptiveDDP(DistributedDataParallel):
    """DistributedDataParallel that averages the gradients of the parameters that are trained now.

    torch's class averages those that were trained when it was created: the gradient of a parameter that is unfrozen or
    added later stays each rank's own, and a step waits for the gradient of one that is frozen later. This class can
    compare ``requires_grad`` with what the reducer knows, and create a new one.

    Args:
        module: the module; all of its parameters may be frozen.
        options: the arguments of torch's class.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        parameters = list(module.parameters())
        # torch refuses a module without a trained parameter, which may be unfrozen later.
        with _with_trained_parameter(parameters):
            super().__init__(module, **options)
        _REGISTRATIONS.watch()
        self._registrations = _REGISTRATIONS.count
        self._reduced = list(map(_REQUIRES_GRAD, reduced_parameters(self)))

    def follow_trained(self) -> bool:
        """Create a new reducer if other parameters are trained than it knows; every rank must call it.

        Returns:
            Whether any parameter is trained.
        """
        # Walking all modules in each step would be slow, so it happens only after a registration.
        if self._registrations != _REGISTRATIONS.count:
            self._find_added()
        trained = list(map(_REQUIRES_GRAD, reduced_parameters(self)))
        if trained == self._reduced:
            return True in trained
        # A reducer of torch needs a parameter: the old one stays until one is trained.
        if True not in trained:
            return False
        pairs = zip(trained, self._reduced, strict=True)
        was_unfrozen = any(
            is_trained and not is_reduced for is_trained, is_reduced in pairs
        )
        # A reducer that finds unused parameters skips those that are frozen now.
        if was_unfrozen or not self.find_unused_parameters:
            replace_reducer(self)
            self._reduced = trained
        return True

    def _find_added(self) -> None:
        """Give the parameters that the module received since the last call the values of rank 0."""
        self._registrations = _REGISTRATIONS.count
        was_reduced = dict(zip(reduced_parameters(self), self._reduced, strict=True))
        ignored = self.parameters_to_ignore
        named = self.module.named_parameters()
        parameters = [p for name, p in named if name not in ignored]
        set_reduced_parameters(self, parameters)
        self._reduced = [was_reduced.get(p, False) for p in parameters]
        source = dist.get_global_rank(self.process_group, 0)
        # All ranks have received them in the same order, so they broadcast the same ones.
        for parameter in parameters:
            if parameter not in was_reduced:
                dist.broadcast(parameter.detach(), source, group=self.process_group)


@final
class LoopDDP(AdaptiveDDP):
    """An `AdaptiveDDP` that makes the comparison itself, in each forward that synchronizes: for custom loops."""

    # As in torch's forward: torch.compile takes the module inside.
    @excluded_from_compilation(recursive=False)
    def forward(self, *inputs: object, **options: object) -> Any:
        """Call the module, and prepare the synchronization of its gradients."""
        if (
            torch.is_grad_enabled()
            and self.require_backward_grad_sync
            and not self.follow_trained()
        ):
            with self.no_sync():
                return super().forward(*inputs, **options)  # type: ignore[no-untyped-call]
        return super().forward(*inputs, **options)  # type: ignore[no-untyped-call]


# What programs print and compare; pickle reads __qualname__.
LoopDDP.__name__ = DistributedDataParallel.__name__


@contextmanager
def _with_trained_parameter(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """A context in which at least one parameter is trained, which torch's constructor requires: the smallest."""
    candidates = [
        parameter for parameter in parameters if parameter.is_floating_point()
    ]
    if not candidates or any(parameter.requires_grad for parameter in parameters):
        yield
        return
    smallest = min(candidates, key=torch.Tensor.numel)
    smallest.requires_grad_(True)
    try:
        yield
    finally:
        smallest.requires_grad_(False)
