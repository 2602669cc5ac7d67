"""The strategy that a candidate names, as a Trainer would make it, and the axes of its ranks."""

from __future__ import annotations

import math
import re
from typing import Any, Final

import torch.distributed as dist

from trainer_kit.build import choose_strategy
from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import StrategyError
from trainer_kit.core.registry import STRATEGIES
from trainer_kit.planning.records import Candidate
from trainer_kit.strategies.strategy import Strategy

__all__ = ["axes_of", "check_word", "model_parallel", "strategy_for"]

_OFFLOADS: Final = {
    "fsdp": "fsdp_cpu_offload",
    "deepspeed_stage_2": "deepspeed_stage_2_offload",
    "deepspeed_stage_3": "deepspeed_stage_3_offload",
}
"""For each word, that of the same strategy with state in host memory."""
_SIZED: Final = re.compile(r"(tp|pp|cp|hsdp)(\d+)")
_AXES: Final = {"pp": "pipeline", "tp": "tensor", "cp": "context"}
"""The names of a mesh's axes; all others are ``"data"``."""


def strategy_for(candidate: Candidate) -> Strategy:
    """Make the strategy of a candidate; ``"tp2"`` is a mesh with ``tp=2``, whose other ranks shard data and weights.

    ``"hsdp8"`` shards over 8 ranks, and replicates these shards.

    Raises:
        StrategyError: an unknown word, sizes that do not divide the ranks, or offload where the strategy has none.

    Example:
        >>> strategy_for(Candidate(strategy="tp2", precision="32-true", world=8, micro_batch=1)).places(8)["dp_shard"]
        4
    """
    word = candidate.strategy
    if candidate.offload and word not in _OFFLOADS.values():
        if word not in _OFFLOADS:
            raise StrategyError(
                f"strategy={word!r} does not support offload to host memory",
                found="offload=True",
                fix=f"pass offload=False, or use one of {', '.join(_OFFLOADS)}",
            )
        word = _OFFLOADS[word]
    made: Any = word
    sized = _SIZED.fullmatch(word)
    if sized is not None and sized[1] == "hsdp":
        shards = int(sized[2])
        if candidate.world % shards:
            raise StrategyError(
                "the shards do not divide the number of ranks",
                found=f"{word}, {candidate.world} ranks",
            )
        made = STRATEGIES.get("hsdp")(
            "cpu",
            sharding_strategy="HYBRID_SHARD",
            device_mesh=(candidate.world // shards, shards),
        )
    elif sized is not None:
        made = STRATEGIES.get("mesh")("cpu", dp_shard=-1, **{sized[1]: int(sized[2])})
    strategy, _, _ = choose_strategy(made, "cpu", candidate.world, 1, Environment())
    return strategy


def check_word(word: str) -> None:
    """Refuse a word of no strategy, before any is tried.

    Raises:
        RegistryError: no strategy has this name.
    """
    if _SIZED.fullmatch(word) is None:
        STRATEGIES.get(word)


def axes_of(strategy: Strategy) -> dict[tuple[int, ...], str]:
    """The name of the axis by the ranks of its group, for a strategy that has started."""
    found: dict[tuple[int, ...], str] = {}
    size = strategy.world.size
    if size > 1:
        found[tuple(range(size))] = "data"
    mesh = strategy.mesh
    if mesh is None:
        return found
    if strategy.losses.size > 1:
        found[tuple(dist.get_process_group_ranks(strategy.losses.group))] = "data"
    for name, length in zip(mesh.mesh_dim_names or (), mesh.shape, strict=False):
        if length > 1:
            ranks = tuple(dist.get_process_group_ranks(mesh.get_group(name)))
            found[ranks] = _AXES.get(name, "data")
    return found


def model_parallel(strategy: Strategy, world: int) -> int:
    """Among how many ranks a strategy divides each layer or the layers of a model."""
    return math.prod(
        size for axis, size in strategy.places(world).items() if axis in ("tp", "pp")
    )
