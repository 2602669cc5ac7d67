"""The axes of a mesh, and how many places each has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from torch.distributed.device_mesh import DeviceMesh

from trainer_kit.core.errors import StrategyError
from trainer_kit.strategies.process_group import inherit_timeout

__all__ = ["AXES", "axes_in_words", "check_options", "check_sizes", "data_mesh", "places", "refuse_by_hand"]

AXES: Final = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""From the outermost: neighbours in the last axis exchange most, and are neighbours on a machine."""


def places(sizes: Mapping[str, int], processes: int) -> dict[str, int]:
    """The size of each axis, with -1 filled in.

    Args:
        sizes: by axis, as the user gave them.
        processes: how many there are.

    Raises:
        StrategyError: another number of places.

    Example:
        >>> places({"dp_shard": -1, "tp": 2}, 8)
        {'dp_shard': 4, 'tp': 2}
    """
    count = math.prod(size for size in sizes.values() if size != -1)
    free = -1 in sizes.values()
    if processes % count if free else processes != count:
        told = " × ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1)
        launched = "1 process was launched" if processes == 1 else f"{processes} processes were launched"
        raise StrategyError(
            f"the mesh has {count} places{' or a multiple' if free else ''} but {launched}",
            found=f"{told or '1 in every axis'} in MeshStrategy(...)",
            fix=f"launch {count * max(1, round(processes / count)) if free else count} processes"
            + ("" if free else ", or leave one axis at -1"),
        )
    return {axis: processes // count if size == -1 else size for axis, size in sizes.items()}


def check_sizes(sizes: Mapping[str, int]) -> None:
    """Refuse sizes that no number of processes could fill.

    Raises:
        StrategyError: an axis without a place, or two that take what the others leave.
    """
    for axis, size in sizes.items():
        if size < 1 and size != -1:
            raise StrategyError("an axis of a mesh has at least one place", found=f"{axis}={size}")
    if list(sizes.values()).count(-1) > 1:
        found = ", ".join(axis for axis, size in sizes.items() if size == -1)
        raise StrategyError("one axis at most takes what the others leave", found=f"-1 for {found}")


def axes_in_words(sizes: Mapping[str, int]) -> str:
    """The axes that have more than one place.

    Example:
        >>> axes_in_words({"dp_shard": 2, "cp": 1, "tp": 2})
        'dp_shard=2 × tp=2'
    """
    return " × ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "of one process"


def check_options(sizes: Mapping[str, int], fsdp: Mapping[str, Any]) -> None:
    """Options of `FSDPStrategy` that a mesh of these sizes has no use for, or would train wrongly with.

    Args:
        sizes: of each axis.
        fsdp: the options.

    Raises:
        StrategyError: there are some.
    """
    if fsdp and sizes["dp_replicate"] * sizes["dp_shard"] * sizes["cp"] == 1:
        raise StrategyError(
            "fsdp= is for the data and context axes, and there is one rank along them",
            found=f"fsdp with {', '.join(fsdp)}, {axes_in_words(sizes)}",
            fix="leave fsdp= out, or launch more processes",
        )
    for option, axes, fix in (
        ("ignored_modules", ("tp", "pp"), "leave it out, or use tp=1 and pp=1: nothing averages these gradients"),
        ("activation_checkpointing_policy", ("pp",), "give activation_checkpointing_policy to MeshStrategy itself"),
    ):
        if fsdp.get(option) and any(sizes[axis] > 1 for axis in axes):
            found = f"fsdp={{{option!r}: ...}}, {axes_in_words(sizes)}"
            raise StrategyError(f"{option} has no place in this mesh", found=found, fix=fix)


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """What gradients are averaged over: copies, and those who divide parameters among them, context ranks too."""
    replicas, shards = mesh["dp_replicate"], mesh["dp_shard"]
    if mesh["cp"].size() > 1:
        shards = inherit_timeout(mesh["dp_shard", "cp"]._flatten("dp_shard_cp"))
    return shards if replicas.size() == 1 else DeviceMesh._concatenate([replicas, shards])


def refuse_by_hand(mesh: DeviceMesh, loss_parallel: bool, several: bool) -> None:
    """What a loop of the user's own cannot have, for it is done around a whole step.

    Args:
        mesh: with its axes.
        loss_parallel: whether the plan divides losses.
        several: whether there is a model already.

    Raises:
        StrategyError: it is asked for.
    """
    pp, cp = mesh["pp"].size(), mesh["cp"].size()
    if loss_parallel or (pp > 1 and (cp > 1 or several)):
        raise StrategyError(
            "a loop of your own has no whole steps, around which this would be done",
            found=f"pp={pp}, cp={cp}, loss_parallel={loss_parallel}, {'several models' if several else 'one model'}",
            fix="use loss_parallel=False, and pp > 1 without cp and for one model; or a Trainer",
        )
