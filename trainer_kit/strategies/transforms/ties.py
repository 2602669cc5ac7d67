"""Parameters that several stages of a pipeline share: each has a copy, and all copies are trained alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.errors import StrategyError
from trainer_kit.strategies.gradients import local

__all__ = ["Ties"]


@final
class Ties:
    """The copies on this rank, and the way of their gradients to the others.

    Args:
        shared: of each parameter, the names that it has in the module, with the stage of each.
        ranks: in the group, of every stage.
        group: of the ranks that share one model.

    Attributes:
        names: of copies here, by name, the first of all its names: what checkpoints call it.
        repeated: copies here of which an earlier stage has another: gradients are counted once.
    """

    def __init__(
        self, shared: Sequence[Sequence[tuple[str, int]]], ranks: Sequence[int], group: dist.ProcessGroup
    ) -> None:
        self._shared, self._ranks, self._group = shared, ranks, group
        self._me = dist.get_rank(group)
        self._copies: list[list[nn.Parameter]] = []
        self.names: dict[str, str] = {}
        self.repeated: set[nn.Parameter] = set()

    def find(self, module: nn.Module) -> None:
        """Look up the copies of a module that is divided by now.

        Raises:
            StrategyError: on every rank, for copies that are divided in different ways.
        """
        self._copies, self.names, self.repeated = [], {}, set()
        for places in self._shared:
            own = [name for name, stage in places if self._ranks[stage] == self._me]
            copies = list({id(p): p for p in map(module.get_parameter, own)}.values())
            first = self._ranks[places[0][1]] == self._me
            self._copies.append(copies)
            self.names.update({name: places[0][0] for name in own if name != places[0][0]})
            self.repeated.update(copies[1:] if first else copies)
        told = [[_layout(copy) for copy in copies] for copies in self._copies]
        for places, layouts in self._compared(told):
            raise StrategyError(
                "stages that share a parameter divide it in different ways",
                found=f"{' and '.join(name for name, _ in places)}: {', '.join(layouts)}",
                fix="'embedding_rowwise' and 'colwise_rep' split an embedding and a head alike",
            )

    def check_groups(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that would train the copies in different ways.

        Raises:
            StrategyError: on every rank.
        """
        if not self._shared:
            return
        options = {
            id(p): repr({k: v for k, v in group.items() if k != "params"})
            for group in optimizer.param_groups
            for p in group["params"]
        }
        told = [[options.get(id(copy), "not trained") for copy in copies] for copies in self._copies]
        for places, found in self._compared(told):
            raise StrategyError(
                f"{' and '.join(name for name, _ in places)} are one parameter, and would be trained in two ways",
                found="; ".join(found),
                fix="put both names into groups with the same options: each stage knows it by one of them",
            )

    def _compared(self, told: list[list[str]]) -> list[tuple[Sequence[tuple[str, int]], list[str]]]:
        """Parameters of which copies differ in what their ranks have told, with what they did."""
        if not self._shared:
            return []
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, told, group=self._group)
        by_parameter = [sorted({one for copies in theirs for one in copies}) for theirs in zip(*everyone, strict=True)]
        return [(places, found) for places, found in zip(self._shared, by_parameter, strict=True) if len(found) > 1]

    def add_gradients(self) -> None:
        """Give every copy the sum of what all stages have found."""
        for places, copies in zip(self._shared, self._copies, strict=True):
            if not copies or not copies[0].requires_grad:
                continue
            for copy in copies:
                if copy.grad is None:
                    copy.grad = torch.zeros_like(copy)
            parts = [local(copy.grad) for copy in copies if copy.grad is not None]
            mine = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
            whole = self._summed(mine, sorted({self._ranks[stage] for _, stage in places}))
            for part in parts:
                part.copy_(whole)

    def _summed(self, mine: Tensor, ranks: Sequence[int]) -> Tensor:
        """Over these ranks of the group; added in their order, so that all have the same bits."""
        if len(ranks) == 1:
            return mine
        mine = mine.contiguous()
        parts = {rank: mine if rank == self._me else torch.empty_like(mine) for rank in ranks}
        ways = []
        for rank in ranks:
            if rank != self._me:
                peer = dist.get_global_rank(self._group, rank)
                ways += [
                    dist.P2POp(dist.isend, mine, peer, self._group),
                    dist.P2POp(dist.irecv, parts[rank], peer, self._group),
                ]
        for work in dist.batch_isend_irecv(ways):
            work.wait()
        whole = parts[ranks[0]].clone()
        for rank in ranks[1:]:
            whole += parts[rank]
        return whole


def _layout(parameter: nn.Parameter) -> str:
    return f"{getattr(parameter, 'placements', 'whole')} {list(local(parameter).shape)}"
