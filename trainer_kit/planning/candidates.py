"""The strategy that a candidate names, as a Trainer would make it, and the axes of its ranks."""

from __future__ import annotations

import re
from typing import Final

import torch.distributed as dist

from trainer_kit.build import choose_strategy
from trainer_kit.core.display import plural
from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import StrategyError
from trainer_kit.core.registry import STRATEGIES
from trainer_kit.planning.records import Candidate
from trainer_kit.strategies.strategy import Strategy

__all__ = ["axes_of", "check_strategy_name", "model_parallel", "strategy_for"]

_OFFLOADS: Final = {
    "fsdp": "fsdp_cpu_offload",
    "deepspeed_stage_2": "deepspeed_stage_2_offload",
    "deepspeed_stage_3": "deepspeed_stage_3_offload",
}
"""For each strategy, the name of the same one with state in host memory."""
_SIZED: Final = re.compile(r"(tp|pp|cp|hsdp)(\d+)")
_AXES: Final = {"pp": "pipeline", "tp": "tensor", "cp": "context"}
"""The names of a mesh's axes; all others are ``"data"``."""


def strategy_for(candidate: Candidate) -> Strategy:
    """Create the strategy of a candidate; ``"tp2"`` is a mesh with ``tp=2``, whose other ranks shard data and weights.

    ``"hsdp8"`` shards over 8 ranks, and replicates these shards.

    Raises:
        StrategyError: an unknown word, sizes that do not divide the ranks, or offload where the strategy has none.

    Example:
        >>> strategy_for(Candidate(strategy="tp2", precision="32-true", world=8, micro_batch=1)).places(8)["dp_shard"]
        4
    """
    name = candidate.strategy
    if candidate.offload:
        name = _name_with_offload(name)
    choice: str | Strategy = name
    sized = _SIZED.fullmatch(name)
    if sized is not None:
        choice = _make_sized(sized[1], int(sized[2]), candidate)
    # On the CPU and without a launcher's environment: a plan on a cluster's node must not join its job.
    strategy, _, _ = choose_strategy(choice, "cpu", candidate.world, 1, Environment())
    return strategy


def _name_with_offload(name: str) -> str:
    """The name of the same strategy with state in host memory."""
    if name in _OFFLOADS.values():
        return name
    if name not in _OFFLOADS:
        raise StrategyError(
            f"strategy={name!r} does not support offload to host memory",
            found="offload=True",
            fix=f"pass offload=False, or use one of {', '.join(_OFFLOADS)}",
        )
    return _OFFLOADS[name]


def _make_sized(axis: str, size: int, candidate: Candidate) -> Strategy:
    """Create a strategy whose name ends with the size of its axis."""
    strategy: Strategy
    if axis != "hsdp":
        # The ranks that the axis leaves shard data and weights: mixing axes with full copies needs more memory and is
        # rarely faster.
        strategy = STRATEGIES.get("mesh")("cpu", dp_shard=-1, **{axis: size})
        return strategy
    # Here, since a mesh of torch would fail with an error about shapes.
    if candidate.world % size:
        raise StrategyError(
            "the shards do not divide the number of ranks",
            found=f"{axis}{size}, {plural(candidate.world, 'rank')}",
        )
    strategy = STRATEGIES.get("hsdp")(
        "cpu",
        sharding_strategy="HYBRID_SHARD",
        device_mesh=(candidate.world // size, size),
    )
    return strategy


def check_strategy_name(name: str) -> None:
    """Refuse a name of no strategy, before any is tried.

    Raises:
        RegistryError: no strategy has this name.
    """
    if _SIZED.fullmatch(name) is None:
        STRATEGIES.get(name)


def axes_of(strategy: Strategy) -> dict[tuple[int, ...], str]:
    """The name of the axis by the ranks of its group, for a strategy that has started."""
    axes: dict[tuple[int, ...], str] = {}
    size = strategy.world.size
    if size > 1:
        # The whole world, for strategies without a mesh; the axes of a mesh replace it below.
        axes[tuple(range(size))] = "data"
    mesh = strategy.mesh
    if mesh is None:
        return axes
    # FSDP reduces over data and context ranks together, which is no axis of the mesh.
    if strategy.losses.size > 1:
        axes[_ranks_of_group(strategy.losses.group)] = "data"
    names = mesh.mesh_dim_names or ()
    for name, length in zip(names, mesh.shape, strict=False):
        if length > 1:
            ranks = _ranks_of_group(mesh.get_group(name))
            axes[ranks] = _AXES.get(name, "data")
    return axes


def _ranks_of_group(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def model_parallel(strategy: Strategy, world: int) -> int:
    """Among how many ranks a strategy splits each layer or the layers of a model."""
    sizes = strategy.places(world)
    return sizes.get("tp", 1) * sizes.get("pp", 1)
