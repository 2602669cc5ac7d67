"""Parameters that several pipeline stages share: this rank's copies, and the exchange of their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.errors import StrategyError
from trainer_kit.core.tensors import local
from trainer_kit.strategies.process_group import ProcessGroup

__all__ = ["Ties"]

_Aliases: TypeAlias = Sequence[tuple[str, int]]
"""All names of one parameter in the module, with the stage of each."""

# What the copies of a tied parameter are on one rank. Bits, so that those of several copies or ranks can be united.
_FROZEN: Final = 1
_TRAINED: Final = 2


@final
class Ties:
    """Parameters that are tied across stages: this rank's copies, and the exchange of their gradients.

    Args:
        shared: for each tied parameter, its names in the module, with the stage of each.
        ranks: the group rank of every stage.
        group: the ranks that hold the stages of one model.

    Attributes:
        names: for each name of a copy on this rank, the name that checkpoints use: the first of all its names.
        repeated: copies on this rank that an earlier stage holds too: norms count their gradients once.
    """

    def __init__(
        self, shared: Sequence[_Aliases], ranks: Sequence[int], group: ProcessGroup
    ) -> None:
        self._shared = shared
        self._ranks = ranks
        self._group = group
        self._copies: list[list[nn.Parameter]] = []
        self._is_trained: list[bool] = [False] * len(shared)
        self.names: dict[str, str] = {}
        self.repeated: set[nn.Parameter] = set()

    def find_copies(self, module: nn.Module) -> None:
        """Look up the copies in a module whose parameters are already sharded.

        Raises:
            StrategyError: on every rank, if copies are sharded differently.
        """
        self._copies = []
        self.names = {}
        self.repeated = set()
        for aliases in self._shared:
            names_here = [name for name, stage in aliases if self._is_here(stage)]
            # Two names of one stage may be one parameter.
            copies = list(dict.fromkeys(map(module.get_parameter, names_here)))
            self._copies.append(copies)
            first_name, first_stage = aliases[0]
            self.names.update(
                (name, first_name) for name in names_here if name != first_name
            )
            self.repeated.update(copies[1:] if self._is_here(first_stage) else copies)
        # Gradients of copies are added element by element.
        layouts = [
            [_describe_layout(copy) for copy in copies] for copies in self._copies
        ]
        for aliases, differing in self._compare(layouts):
            raise StrategyError(
                "stages that share a parameter split it differently",
                found=f"{_join_names(aliases)}: {', '.join(differing)}",
                fix="use 'embedding_rowwise' and 'colwise_rep', which split an embedding and a head in the same way",
            )

    def check_groups(self, optimizer: Optimizer) -> None:
        """Check that the optimizer has the same options for all copies of a parameter.

        Raises:
            StrategyError: on every rank.
        """
        if not self._shared:
            return
        options: dict[int, str] = {}
        for group in optimizer.param_groups:
            text = repr({key: value for key, value in group.items() if key != "params"})
            options.update((id(parameter), text) for parameter in group["params"])
        options_of_copies = [
            [options.get(id(copy), "not trained") for copy in copies]
            for copies in self._copies
        ]
        for aliases, differing in self._compare(options_of_copies):
            raise StrategyError(
                f"{_join_names(aliases)} are one parameter, but would be trained with different options",
                found="; ".join(differing),
                fix="put both names into groups with the same options: each stage has the parameter under one name",
            )

    def training_flags(self) -> list[int]:
        """For each tied parameter, whether this rank's copies are frozen (1), trained (2), both (3) or absent (0)."""
        flags = []
        for copies in self._copies:
            flag = 0
            for copy in copies:
                flag |= _TRAINED if copy.requires_grad else _FROZEN
            flags.append(flag)
        return flags

    def agree_on_trained(self, flags_of_ranks: Sequence[Sequence[float]]) -> None:
        """Take from the `training_flags` of all ranks which tied parameters the next window trains.

        Raises:
            StrategyError: on every rank, if a parameter is frozen under one name and trained under another.
        """
        for index, aliases in enumerate(self._shared):
            flag = 0
            for flags in flags_of_ranks:
                flag |= int(flags[index])
            # In one process the last assignment counts, but no rank sees those that another rank has made.
            if flag == _FROZEN | _TRAINED:
                names = [name for name, _ in aliases]
                raise StrategyError(
                    f"{_join_names(aliases)} are one parameter, which is frozen under one name and trained under"
                    " another",
                    found="each stage has the parameter under one name, and requires_grad was set on some stages only",
                    fix=f"set requires_grad under all names: {', '.join(names)}",
                )
            self._is_trained[index] = flag == _TRAINED

    def add_gradients(self) -> None:
        """Set the gradient of every copy to the sum over all stages, where `agree_on_trained` found it trained."""
        # The flags that all ranks know, not those of this moment: a rank that left out an exchange would block others.
        for aliases, copies, is_trained in zip(
            self._shared, self._copies, self._is_trained, strict=True
        ):
            if not copies or not is_trained:
                continue
            for parameter in copies:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            # This rank may have several stages, and so several copies.
            gradients = [local(p.grad) for p in copies if p.grad is not None]
            sum_here = gradients[0]
            if len(gradients) > 1:
                sum_here = torch.stack(gradients).sum(0)
            total = self._sum_over(
                sum_here, sorted({self._ranks[stage] for _, stage in aliases})
            )
            for gradient in gradients:
                gradient.copy_(total)

    def _is_here(self, stage: int) -> bool:
        return self._ranks[stage] == self._group.rank

    def _compare(self, texts: list[list[str]]) -> Iterator[tuple[_Aliases, list[str]]]:
        """Yield the tied parameters for which the texts of the ranks differ, with the different texts.

        Args:
            texts: for each tied parameter, a text for each of this rank's copies.
        """
        if not self._shared:  # the same on all ranks, so none waits for the others
            return
        texts_of_ranks = self._group.all_gather_object(texts)
        for index, aliases in enumerate(self._shared):
            distinct: set[str] = set()
            for rank_texts in texts_of_ranks:
                distinct.update(rank_texts[index])
            if len(distinct) > 1:
                yield aliases, sorted(distinct)

    def _sum_over(self, tensor: Tensor, ranks: Sequence[int]) -> Tensor:
        """The sum over these ranks of the group, added in rank order so that the bits are the same on each."""
        if len(ranks) == 1:
            return tensor
        # Point to point: these ranks have no process group of their own, and creating one is a call of all ranks.
        tensor = tensor.contiguous()
        addends: dict[int, Tensor] = {}
        transfers = []
        group = self._group.group
        # All transfers are posted before any is awaited: two ranks that wait for each other would hang.
        for rank in ranks:
            addends[rank] = tensor
            if rank != self._group.rank:
                addends[rank] = torch.empty_like(tensor)
                transfers.append(
                    dist.P2POp(dist.isend, tensor, group=group, group_peer=rank)
                )
                transfers.append(
                    dist.P2POp(dist.irecv, addends[rank], group=group, group_peer=rank)
                )
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
        total = addends[ranks[0]].clone()
        for rank in ranks[1:]:
            total += addends[rank]
        return total


def _join_names(aliases: _Aliases) -> str:
    return " and ".join(name for name, _ in aliases)


def _describe_layout(parameter: nn.Parameter) -> str:
    return f"{getattr(parameter, 'placements', 'whole')} {list(local(parameter).shape)}"
