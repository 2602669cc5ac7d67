"""One batch through all stages, one after the other, without gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from trainer_kit.core.seed import preserved_rng
from trainer_kit.strategies.transforms.split import Stage, Turn

__all__ = ["Relay"]


@final
class Relay:
    """Passes activations from stage to stage; their shapes go ahead of them.

    Args:
        stages: of this rank.
        ranks: in the group, of every stage.
        group: of the ranks that share one model.
        device: where this rank computes.

    Attributes:
        known: by the shapes of a batch, what this rank's stages take and return, without storage, by stage: the
            arguments of stage ``i`` at ``i``, what it returns at ``i + 1``.
    """

    def __init__(
        self, stages: Sequence[Stage], ranks: Sequence[int], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.stages = {stage.index: stage for stage in stages}
        self.ranks, self.group, self.device = ranks, group, device
        self.known: dict[Any, dict[int, tuple[Tensor, ...]]] = {}

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The output of the last stage, on every rank."""
        output, _ = self._pass(Turn(args, kwargs))
        return self.share(output, self.ranks[-1])

    def follow(self, inputs: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> list[Any]:
        """The outputs of several batches, which are under way together, on the rank of the last stage."""
        return [self._pass(Turn(args, kwargs))[0] for args, kwargs in inputs]

    def output(self, key: Any, turn: Turn) -> Any:
        """The output of the last stage, on every rank; of all else only the shapes are remembered, under ``key``."""
        with self._leaving_no_trace():
            output, self.known[key] = self._pass(turn)
        return self.share(output, self.ranks[-1])

    def learn(self, key: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Remember the shapes between the stages under ``key``; nothing else is changed."""
        with self._leaving_no_trace():
            _, self.known[key] = self._pass(Turn(args, kwargs), to_end=False)

    @contextmanager
    def _leaving_no_trace(self) -> Iterator[None]:
        with torch.no_grad(), preserved_rng(self.device):
            before = [(b, b.detach().clone()) for stage in self.stages.values() for b in stage.buffers()]
            yield
            for buffer, value in before:
                buffer.detach().copy_(value)
            self.reshard()

    def reshard(self) -> None:
        """Divide again what FSDP has gathered: gradients belong to the parts, and optimizers step them."""
        for part in (part for stage in self.stages.values() for part in stage.modules()):
            if isinstance(part, FSDPModule):
                part.reshard()

    def _pass(self, turn: Turn, to_end: bool = True) -> tuple[Any, dict[int, tuple[Tensor, ...]]]:
        shapes: dict[int, tuple[Tensor, ...]] = {}
        handed: Any = ()
        me = dist.get_rank(self.group)
        for index, rank in enumerate(self.ranks):
            if rank != me:
                continue
            if index and self.ranks[index - 1] != me:
                handed = self._receive(self.ranks[index - 1])
            shapes[index] = tuple(map(_without_storage, handed))
            last = index == len(self.ranks) - 1
            if last and not to_end:
                break
            stage = self.stages[index]
            stage.turns = iter([turn])
            handed = stage(*handed)
            if not last:
                shapes[index + 1] = tuple(map(_without_storage, handed))
                if self.ranks[index + 1] != me:
                    self._send(handed, self.ranks[index + 1])
        return handed, shapes

    def _send(self, tensors: Sequence[Tensor], rank: int) -> None:
        told = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        to = dist.get_global_rank(self.group, rank)
        dist.send_object_list([told], to, group=self.group, device=self.device)
        for tensor in tensors:
            dist.send(tensor.detach().contiguous(), to, group=self.group)

    def _receive(self, rank: int) -> tuple[Tensor, ...]:
        told: list[Any] = [None]
        source = dist.get_global_rank(self.group, rank)
        dist.recv_object_list(told, source, group=self.group, device=self.device)
        tensors = tuple(torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in told[0])
        for tensor in tensors:
            dist.recv(tensor, source, group=self.group)
        return tensors

    def share(self, output: Any, owner: int) -> Any:
        """What a rank of the group has, on every rank: what it is made of, then its tensors."""
        source, mine = dist.get_global_rank(self.group, owner), dist.get_rank(self.group) == owner
        box: list[Any] = [apply_to_collection(output, Tensor, _without_storage) if mine else None]
        dist.broadcast_object_list(box, source, group=self.group, device=self.device)
        if mine:
            apply_to_collection(
                output, Tensor, lambda tensor: dist.broadcast(tensor.detach().contiguous(), source, group=self.group)
            )
            return output

        def receive(tensor: Tensor) -> Tensor:
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            dist.broadcast(made, source, group=self.group)
            return made

        return apply_to_collection(box[0], Tensor, receive)


def _without_storage(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor.detach(), device="meta").contiguous().requires_grad_(tensor.is_floating_point())
