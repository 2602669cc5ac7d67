"""A pipelined model in a loop of the user's own: called as a whole, and trained when a window ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from trainer_kit.core.errors import StrategyError
from trainer_kit.core.protocols import Group
from trainer_kit.strategies.transforms.activation_exchange import Relay
from trainer_kit.strategies.transforms.dry_run import drawing, shapes_of, tensors_of
from trainer_kit.strategies.transforms.schedules import Schedules
from trainer_kit.strategies.transforms.split import Turn

__all__ = ["Calls"]


@final
@dataclass
class _Call:
    """One call: what it was given, what it drew, and the gradients that have arrived at its output."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    noise: Any
    gradients: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = [tensor for tensor in tensors_of((self.args, self.kwargs)) if not tensor.is_inference()]
        self._given = [(tensor, tensor._version) for tensor in given]

    def turn(self) -> Turn:
        """What a schedule computes once more."""
        for tensor, version in self._given:
            if tensor._version != version:
                raise StrategyError(
                    "what a pipelined model was called with was written into before the window ended",
                    found=f"a tensor of shape {tuple(tensor.shape)} was changed in place",
                    fix="make a new one (x = x * 10): the call is computed once more at the end of the window",
                )
        return Turn(self.args, self.kwargs, self._loss, self.noise)

    def _loss(self, output: Any) -> Tensor:
        """Something whose gradients at the output are those that have arrived."""
        found = [
            (tensor * self.gradients[index]).sum()
            for index, tensor in enumerate(_floats(output))
            if index in self.gradients and tensor.requires_grad
        ]
        return torch.stack(found).sum()


@final
class Calls:
    """A call passes through all stages without gradients, and every rank gets its output, as a leaf of its graph.

    Gradients that arrive there are kept. When a window ends, its calls go through a schedule, where each is computed
    once more and its gradients go on from there: from the same numbers, for each call draws from a seed of its own.

    Args:
        relay: passes activations on.
        schedules: of the stages.
        world: all processes.
        device: where this rank computes.
    """

    def __init__(self, relay: Relay, schedules: Schedules, world: Group, device: torch.device) -> None:
        self.relay, self.schedules, self.world, self.device = relay, schedules, world, device
        self._number = 0
        self._pending: dict[int, _Call] = {}

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The output of the last stage, on every rank."""
        if any(tensor.requires_grad for tensor in tensors_of((args, kwargs))):
            raise StrategyError(
                "gradients do not leave a pipeline through the inputs of its model",
                found="an input that requires gradients",
                fix="make what computes it a part of the model, or detach() it",
            )
        # Stages drop different activations, each the same ones whenever it computes this call.
        seed = int(torch.randint(2**31, (), device="cpu")) + dist.get_rank(self.relay.group)
        call = _Call(args, kwargs, partial(drawing, seed, self.device))
        self._number += 1
        number, count = self._number, iter(range(1 << 30))

        def arrived(index: int, leaf: Tensor) -> None:
            assert leaf.grad is not None
            call.gradients[index] = leaf.grad
            self._pending[number] = call

        def handed(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            leaf = tensor.detach().requires_grad_()
            leaf.register_post_accumulate_grad_hook(partial(arrived, next(count)))  # type: ignore[no-untyped-call]
            return leaf.clone()  # which the loop may write into

        output = self.relay.output(shapes_of((args, kwargs)), Turn(args, kwargs, noise=call.noise))
        return apply_to_collection(output, Tensor, handed)

    def forget(self) -> None:
        """Drop the gradients that have arrived."""
        self._pending.clear()

    def run(self) -> bool:
        """Bring the gradients that have arrived to the parameters; whether there were any."""
        calls = [self._pending[number] for number in sorted(self._pending)]
        self._pending = {}
        if not calls:
            return False
        keys = [shapes_of((call.args, call.kwargs)) for call in calls]
        # All data ranks take part in one schedule's exchanges, so they run the same ones.
        rows = self.world.agree([index == 0 or keys[index] != keys[index - 1] for index in range(len(keys))])
        starts = [index for index in range(len(keys)) if any(row[index] for row in rows)]
        every = [call.turn() for call in calls]
        with torch.enable_grad():
            for start, end in zip(starts, [*starts[1:], len(calls)], strict=True):
                self.schedules.run(keys[start], self.relay.known[keys[start]], every[start:end])
        return True


def _floats(output: Any) -> list[Tensor]:
    found: list[Tensor] = []
    apply_to_collection(output, Tensor, lambda tensor: found.append(tensor) if tensor.is_floating_point() else None)
    return found
