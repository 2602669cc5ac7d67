"""The axes of a mesh, their sizes, and the process groups over them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer_kit.core.display import plural
from trainer_kit.core.errors import StrategyError
from trainer_kit.core.tensors import local
from trainer_kit.strategies.process_group import ProcessGroup, inherit_timeout
from trainer_kit.strategies.torch_private import concatenate_meshes, flatten_mesh

__all__ = [
    "AXES",
    "MeshGroups",
    "check_options",
    "check_sizes",
    "data_mesh",
    "describe_equal_batches",
    "describe_shard",
    "format_axes",
    "resolve_sizes",
]


AXES: Final = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""From outermost to innermost. The last axis communicates most, and its ranks are on one machine."""


def resolve_sizes(sizes: Mapping[str, int], processes: int) -> dict[str, int]:
    """The size of each axis, with -1 resolved.

    Args:
        sizes: the user's size of each axis.
        processes: the number of processes.

    Raises:
        StrategyError: the sizes do not match the number of processes.

    Example:
        >>> resolve_sizes({"dp_shard": -1, "tp": 2}, 8)
        {'dp_shard': 4, 'tp': 2}
    """
    # What the sizes without -1 leave of the processes is the size of the open axis; without one nothing may be left.
    fixed_sizes = [size for size in sizes.values() if size != -1]
    ranks = math.prod(fixed_sizes)
    has_open_axis = len(fixed_sizes) < len(sizes)
    open_size, remainder = divmod(processes, ranks)
    if remainder or (open_size != 1 and not has_open_axis):
        raise _wrong_number(sizes, processes, ranks, has_open_axis)
    resolved = dict(sizes)
    for axis, size in sizes.items():
        if size == -1:
            resolved[axis] = open_size
    return resolved


def _wrong_number(
    sizes: Mapping[str, int], processes: int, ranks: int, has_open_axis: bool
) -> StrategyError:
    """The error that the number of processes does not fit a mesh of ``ranks``, or of a multiple of it."""
    axes = " × ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1)
    mesh_text = f"{axes or '1 in every axis'} in MeshStrategy(...)"
    launched = f"{plural(processes, 'process was', 'processes were')} launched"
    if not has_open_axis:
        fix = f"launch {plural(ranks, 'process')}, or leave one axis at -1"
        return StrategyError(
            f"the mesh needs {plural(ranks, 'rank')}, but {launched}",
            found=mesh_text,
            fix=fix,
        )
    nearest = ranks * max(1, round(processes / ranks))
    return StrategyError(
        f"the mesh needs {plural(ranks, 'rank')} or a multiple, but {launched}",
        found=mesh_text,
        fix=f"launch {plural(nearest, 'process')}",
    )


def check_sizes(sizes: Mapping[str, int]) -> None:
    """Raise `StrategyError` for sizes that are invalid with any number of processes.

    Raises:
        StrategyError: a size is below 1, or more than one is -1.
    """
    for axis, size in sizes.items():
        is_whole = isinstance(size, int) and not isinstance(size, bool)
        if not is_whole or (size < 1 and size != -1):
            raise StrategyError(
                "the size of a mesh axis must be an integer ≥ 1",
                found=f"{axis}={size!r}",
            )
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise StrategyError(
            "at most one axis can be -1", found=f"-1 for {', '.join(open_axes)}"
        )


def format_axes(sizes: Mapping[str, int]) -> str:
    """Format the axes with a size above 1.

    Example:
        >>> format_axes({"dp_shard": 2, "cp": 1, "tp": 2})
        'dp_shard=2 × tp=2'
    """
    axes = " × ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1)
    return axes or "of one process"


def check_options(sizes: Mapping[str, int], fsdp: Mapping[str, object]) -> None:
    """Refuse options of `FSDPStrategy` that have no effect in a mesh of these sizes, or would make training wrong.

    Args:
        sizes: the size of each axis.
        fsdp: the options.

    Raises:
        StrategyError: there is such an option.
    """
    if fsdp and sizes["dp_replicate"] * sizes["dp_shard"] * sizes["cp"] == 1:
        raise StrategyError(
            "fsdp= needs more than one rank on the data and context axes",
            found=f"fsdp with {', '.join(fsdp)}, {format_axes(sizes)}",
            fix="leave fsdp= out, or launch more processes",
        )
    for option, axes, fix in _REFUSED_OPTIONS:
        if fsdp.get(option) and any(sizes[axis] > 1 for axis in axes):
            raise StrategyError(
                f"{option} is not supported by this mesh",
                found=f"fsdp={{{option!r}: ...}}, {format_axes(sizes)}",
                fix=fix,
            )


_REFUSED_OPTIONS: Final = (
    (
        "ignored_modules",
        ("tp", "pp"),
        "leave it out, or use tp=1 and pp=1: nothing averages these gradients",
    ),
    (
        "activation_checkpointing_policy",
        ("pp",),
        "give activation_checkpointing_policy to MeshStrategy itself",
    ),
)
"""Options of `FSDPStrategy`, the axes with which each is refused, and what to do instead."""


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh over which gradients are averaged: replicas, and shards, which include the context ranks."""
    replicas = mesh["dp_replicate"]
    shards = mesh["dp_shard"]
    # Context ranks have the same parameters, and gradients of different tokens: FSDP shards over them, too.
    if mesh["cp"].size() > 1:
        shards = inherit_timeout(flatten_mesh(mesh["dp_shard", "cp"], "dp_shard_cp"))
    # With two axes FSDP also all-reduces over the replicas, of which there is one.
    if replicas.size() == 1:
        return shards
    return concatenate_meshes([replicas, shards])


@final
class MeshGroups:
    """The mesh of all processes, and its process groups. Creating it is a collective call.

    Args:
        device: the device of this rank.
        sizes: the size of each axis.

    Attributes:
        mesh: the mesh, with the axes `AXES`.
        data_mesh: the ranks over which gradients are averaged, see `data_mesh`.
        data: the ranks over which a global batch is split.
        losses: the data ranks and the context ranks.
        reports: the loss ranks and the pipeline stages.
        same: by axis, the group of ranks that get the same batches.
        stage_group: the ranks of one pipeline.
    """

    def __init__(self, device: torch.device, sizes: Mapping[str, int]) -> None:
        # All ranks create these groups in this order: torch matches them by their position.
        self._device = device
        shape = tuple(sizes[axis] for axis in AXES)
        self.mesh: DeviceMesh = inherit_timeout(
            init_device_mesh(device.type, shape, mesh_dim_names=AXES)
        )
        data_axes = ["dp_replicate", "dp_shard"]
        loss_axes = list(data_axes)
        self.data = self._group_over(data_axes)
        self.losses = self.data
        if sizes["cp"] > 1:
            loss_axes.append("cp")
            self.losses = self._group_over(loss_axes)
        self.data_mesh = data_mesh(self.mesh)
        # `StagedStrategy` leaves the stages out where each draws its own random numbers.
        model_axes = [axis for axis in ("tp", "cp", "pp") if sizes[axis] > 1]
        self.same = {axis: self._group_along(axis) for axis in model_axes}
        # Also where it has one rank: groups are created by all processes, in the same order.
        self.stage_group = self._group_along("pp")
        self.reports = self.losses
        if sizes["pp"] > 1:
            self.reports = self._group_over(["pp", *loss_axes])

    def _group_along(self, axis: str) -> ProcessGroup:
        """The ranks of one axis."""
        return ProcessGroup(self._device, self.mesh[axis].get_group())

    def _group_over(self, axes: Sequence[str]) -> ProcessGroup:
        """The ranks of several axes together, as one group."""
        submesh = self.mesh[tuple(axes)]
        flat = inherit_timeout(flatten_mesh(submesh, "_".join(axes) + "_flat"))
        return ProcessGroup(self._device, flat.get_group())


_SHOWN = 4
"""The number of groups of ranks that a description names."""


def describe_equal_batches(mesh: DeviceMesh) -> str:
    """Describe which ranks get the same batches; empty if none do.

    Args:
        mesh: a mesh with the axes ``dp_replicate`` and ``dp_shard``.
    """
    names = mesh.mesh_dim_names or ()
    data_axes = [names.index("dp_replicate"), names.index("dp_shard")]
    model_axes = [axis for axis in range(mesh.ndim) if axis not in data_axes]
    data_ranks = math.prod(mesh.shape[axis] for axis in data_axes)
    # One row for each data rank, with the ranks that get its batches.
    groups = mesh.mesh.permute(*data_axes, *model_axes).reshape(data_ranks, -1)
    if groups.shape[1] == 1:
        return ""
    rows = groups[:_SHOWN].tolist()  # no sync point: on the host
    shown = [" ".join(map(str, ranks)) for ranks in rows]
    if len(groups) > _SHOWN:
        shown.append("…")
    return f"the same batches on ranks {', '.join(shown)}"


def describe_shard(modules: Sequence[nn.Module], elsewhere: int = 0) -> str:
    """Describe how many parameters this rank holds.

    Args:
        modules: the modules as they are on this rank.
        elsewhere: the number of parameters that only stages of other ranks have.
    """
    total = elsewhere
    on_this_rank = 0
    for module in modules:
        for parameter in module.parameters():
            total += parameter.numel()
            on_this_rank += local(parameter).numel()
    return f"this rank holds {on_this_rank:,} of {plural(total, 'parameter', spec=',')}"
