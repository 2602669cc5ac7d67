"""What differs between the ranks in a state: collected from all of them, and restored on the same ones.

The states of a Trainer and of an Accelerator have different content. Their random generators, the positions of their
loaders, and the buffers that only one rank has are collected and restored here for both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, final

from torch import Tensor, nn

from trainer_kit.core.collective_errors import fail_together
from trainer_kit.core.display import plural
from trainer_kit.core.protocols import Group
from trainer_kit.core.seed import restore_rng, rng_state
from trainer_kit.core.state_names import names_in, plain_state, state_name
from trainer_kit.core.types import SavedState
from trainer_kit.state.checkpoint_errors import checkpoint_errors
from trainer_kit.strategies.strategy import Strategy

__all__ = [
    "RankBuffers",
    "RankStates",
    "by_rank",
    "collect_rank_states",
    "describe_rank_change",
    "restore_rank_buffers",
    "restore_rank_rng",
]

RankBuffers = list[dict[str, Tensor]]
"""The buffers of one rank that rank 0's weights do not have, for each module."""
_Content = TypeVar("_Content")


@final
@dataclass(frozen=True)
class _RankEntry(Generic[_Content]):
    """What a rank contributes.

    Attributes:
        content: what its user's objects hold.
        data_rank: its rank among those that get different batches.
        rng: the state of its random generators.
        buffers: its own; empty for a state that each rank holds in memory.
    """

    content: _Content
    data_rank: int
    rng: dict[str, object]
    buffers: RankBuffers


@final
@dataclass(frozen=True)
class RankStates(Generic[_Content]):
    """What was collected from all ranks, by rank.

    Attributes:
        contents: what each rank's objects hold.
        data_ranks: the rank of each among those that get different batches.
        rng: the states of each rank's random generators.
        buffers: each rank's; None on all ranks but the one that writes, and where no rank has any.
    """

    contents: list[_Content]
    data_ranks: list[int]
    rng: list[dict[str, object]]
    buffers: list[RankBuffers] | None


def collect_rank_states(
    world: Group,
    strategy: Strategy,
    modules: Sequence[nn.Module],
    collect_content: Callable[[], _Content],
    lent_weights: Mapping[str, Tensor] | None = None,
    *,
    everywhere: bool = False,
) -> RankStates[_Content] | None:
    """Collect what each rank has of its own on rank 0, which writes it. Every rank must call it.

    An object of the user may raise on one rank: then every rank raises, instead of waiting in the next exchange.

    Args:
        world: the ranks.
        strategy: under which the modules are trained.
        modules: whose buffers are collected.
        collect_content: returns the state of the user's objects on this rank.
        lent_weights: by name, live tensors that are currently swapped out of the module (for example for EMA).
        everywhere: collect it on every rank, except buffers: for a state that each rank holds in memory.

    Returns:
        None on the ranks that do not get it.
    """

    def collect_entry() -> _RankEntry[_Content]:
        buffers: RankBuffers = []
        if not everywhere:
            buffers = [_rank_buffers(strategy, m, lent_weights) for m in modules]
        content = collect_content()
        # Last: the user's objects may have drawn numbers for their states.
        rng = rng_state(strategy.device)
        return _RankEntry(content, strategy.data.rank, rng, buffers)

    entry = fail_together(world, collect_entry)
    entries: list[_RankEntry[_Content]] | None
    if everywhere:
        entries = world.all_gather_object(entry)
    else:
        # Large, and one for each rank: what only rank 0 writes is not sent to all others.
        entries = world.gather_object(entry)
    if entries is None:
        return None
    buffers = None
    if any(any(entry.buffers) for entry in entries):
        buffers = [entry.buffers for entry in entries]
    return RankStates(
        contents=[entry.content for entry in entries],
        data_ranks=[entry.data_rank for entry in entries],
        # By rank: resuming on another number of ranks is recognized by the length of this list.
        rng=[entry.rng for entry in entries],
        buffers=buffers,
    )


def by_rank(numbered: Sequence[tuple[int, _Content]]) -> list[_Content]:
    """One value for each rank number, the last one given for it, in the order of the numbers.

    Example:
        >>> by_rank([(1, "b"), (0, "a"), (1, "b")])
        ['a', 'b']
    """
    values = dict(numbered)
    return [values[rank] for rank in sorted(values)]


def _rank_buffers(
    strategy: Strategy,
    module: nn.Module,
    lent_weights: Mapping[str, Tensor] | None,
) -> dict[str, Tensor]:
    """The buffers of this rank that rank 0's ``state_dict`` does not have, on the CPU, to be sent.

    Args:
        strategy: under which the module is trained.
        module: whose buffers.
        lent_weights: by name, live tensors that are currently swapped out of the module (for example for EMA).
    """
    # Rank 0's buffers are in its state_dict; without buffers of their own all ranks hold the same.
    if strategy.world.rank == 0 or not strategy.own_buffers:
        return {}
    persistent = plain_state(module)
    lent_weights = lent_weights or {}
    buffers: dict[str, Tensor] = {}
    for module_name, buffer in module.named_buffers(remove_duplicate=False):
        name = state_name(module_name)
        if name in persistent:
            tensor = lent_weights.get(name, buffer)
            buffers[name] = tensor.detach().cpu()  # sync point: a checkpoint
    return buffers


def describe_rank_change(strategy: Strategy, state: SavedState) -> str | None:
    """How the ranks differ from those that saved; None where each rank's generators and buffers still match."""
    world = strategy.world
    saved_ranks = len(state.get("rng", ()))
    # An imported checkpoint of another library has none.
    if not saved_ranks:
        return "without random states"
    if saved_ranks != world.size:
        return f"{plural(saved_ranks, 'rank')} on {world.size}"
    # Ranks that get the same batch have agreed on what they draw.
    data_ranks = [int(row[0]) for row in world.agree([strategy.data.rank])]
    # Older checkpoints lack this entry.
    if state.get("data_ranks", data_ranks) == data_ranks:
        return None
    return f"{plural(saved_ranks, 'rank')} that now share batches among them in another way"


def restore_rank_rng(
    strategy: Strategy,
    state: SavedState,
    rank_change: str | None,
    say: Callable[[str], None],
) -> None:
    """Restore this rank's random generators; with other ranks than those that saved, say that they differ.

    Args:
        strategy: under which the modules are trained.
        state: the state.
        rank_change: from `describe_rank_change`.
        say: prints a line.
    """
    with checkpoint_errors("rng"):
        if rank_change is None:
            restore_rng(state["rng"][strategy.world.rank], strategy.device)
        else:
            say(f"resuming {rank_change}: random layers draw different numbers")


def restore_rank_buffers(
    modules: Sequence[nn.Module], buffers: Sequence[Mapping[str, object]]
) -> None:
    """Restore a rank's buffers: the weights in a state have the running statistics of rank 0 only.

    Args:
        modules: in the order in which their buffers were collected.
        buffers: those of this rank, for each module.
    """
    with checkpoint_errors("buffers"):
        for module, module_buffers in zip(modules, buffers, strict=False):
            module.load_state_dict(names_in(module, module_buffers), strict=False)
