"""The axes of a mesh, their sizes, and the process groups over them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer_kit.core.errors import StrategyError
from trainer_kit.core.tensors import local
from trainer_kit.strategies.process_group import ProcessGroup, inherit_timeout

__all__ = [
    "AXES",
    "MeshGroups",
    "axes_in_words",
    "check_options",
    "check_sizes",
    "data_mesh",
    "parameters_held",
    "places",
    "same_batches",
]


AXES: Final = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""From outermost to innermost. The last axis communicates most, and its ranks are on one machine."""


def places(sizes: Mapping[str, int], processes: int) -> dict[str, int]:
    """The size of each axis, with -1 resolved.

    Args:
        sizes: the user's size of each axis.
        processes: the number of processes.

    Raises:
        StrategyError: the sizes do not match the number of processes.

    Example:
        >>> places({"dp_shard": -1, "tp": 2}, 8)
        {'dp_shard': 4, 'tp': 2}
    """
    count = math.prod(size for size in sizes.values() if size != -1)
    free = -1 in sizes.values()
    if processes % count if free else processes != count:
        given = " × ".join(
            f"{axis}={size}" for axis, size in sizes.items() if size != 1
        )
        launched = (
            "1 process was launched"
            if processes == 1
            else f"{processes} processes were launched"
        )
        raise StrategyError(
            f"the mesh has {count} places{' or a multiple' if free else ''} but {launched}",
            found=f"{given or '1 in every axis'} in MeshStrategy(...)",
            fix=f"launch {count * max(1, round(processes / count)) if free else count} processes"
            + ("" if free else ", or leave one axis at -1"),
        )
    return {
        axis: processes // count if size == -1 else size for axis, size in sizes.items()
    }


def check_sizes(sizes: Mapping[str, int]) -> None:
    """Raise `StrategyError` for sizes that are invalid with any number of processes.

    Raises:
        StrategyError: a size is below 1, or more than one is -1.
    """
    for axis, size in sizes.items():
        if (
            not isinstance(size, int)
            or isinstance(size, bool)
            or (size < 1 and size != -1)
        ):
            raise StrategyError(
                "the size of a mesh axis is a whole number that is at least 1",
                found=f"{axis}={size!r}",
            )
    if list(sizes.values()).count(-1) > 1:
        found = ", ".join(axis for axis, size in sizes.items() if size == -1)
        raise StrategyError("at most one axis can be -1", found=f"-1 for {found}")


def axes_in_words(sizes: Mapping[str, int]) -> str:
    """Format the axes with a size above 1.

    Example:
        >>> axes_in_words({"dp_shard": 2, "cp": 1, "tp": 2})
        'dp_shard=2 × tp=2'
    """
    return (
        " × ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1)
        or "of one process"
    )


def check_options(sizes: Mapping[str, int], fsdp: Mapping[str, Any]) -> None:
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
            found=f"fsdp with {', '.join(fsdp)}, {axes_in_words(sizes)}",
            fix="leave fsdp= out, or launch more processes",
        )
    for option, axes, fix in (
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
    ):
        if fsdp.get(option) and any(sizes[axis] > 1 for axis in axes):
            found = f"fsdp={{{option!r}: ...}}, {axes_in_words(sizes)}"
            raise StrategyError(
                f"{option} is not supported by this mesh", found=found, fix=fix
            )


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh over which gradients are averaged: replicas, and shards, which include the context ranks."""
    replicas, shards = mesh["dp_replicate"], mesh["dp_shard"]
    if mesh["cp"].size() > 1:
        shards = inherit_timeout(mesh["dp_shard", "cp"]._flatten("dp_shard_cp"))
    return (
        shards if replicas.size() == 1 else DeviceMesh._concatenate([replicas, shards])
    )


@final
class MeshGroups:
    """The mesh of all processes, and its process groups. Creating it is a collective call.

    Args:
        device: the device of this rank.
        sizes: the size of each axis.

    Attributes:
        mesh: the mesh, with the axes `AXES`.
        data_mesh: the ranks over which gradients are averaged, see `data_mesh`.
        data: the ranks over which a global batch is divided.
        losses: the data ranks and the context ranks.
        reports: the loss ranks and the pipeline stages.
        same: by axis, the group of ranks that get the same batches.
        stages: the ranks of one pipeline.
    """

    def __init__(self, device: torch.device, sizes: Mapping[str, int]) -> None:
        self._device = device
        self.mesh: DeviceMesh = inherit_timeout(
            init_device_mesh(
                device.type, tuple(sizes[axis] for axis in AXES), mesh_dim_names=AXES
            )
        )
        context = ["cp"] if sizes["cp"] > 1 else []
        self.data = self._over("dp_replicate", "dp_shard")
        self.losses = (
            self._over("dp_replicate", "dp_shard", *context) if context else self.data
        )
        self.data_mesh = data_mesh(self.mesh)
        self.same = {
            axis: self._along(axis) for axis in ("tp", "cp", "pp") if sizes[axis] > 1
        }
        self.reports, self.stages = self.losses, self._along("pp")
        if sizes["pp"] > 1:
            self.reports = self._over("pp", "dp_replicate", "dp_shard", *context)

    def _along(self, axis: str) -> ProcessGroup:
        return ProcessGroup(self._device, self.mesh[axis].get_group())

    def _over(self, *axes: str) -> ProcessGroup:
        flat = inherit_timeout(self.mesh[axes]._flatten("_".join(axes) + "_flat"))
        return ProcessGroup(self._device, flat.get_group())


_SHOWN = 4


def same_batches(mesh: DeviceMesh) -> str:
    """Describe which ranks get the same batches; empty if none do.

    Args:
        mesh: a mesh with the axes ``dp_replicate`` and ``dp_shard``.
    """
    names = mesh.mesh_dim_names or ()
    data = [names.index("dp_replicate"), names.index("dp_shard")]
    others = [axis for axis in range(mesh.ndim) if axis not in data]
    places = mesh.mesh.permute(*data, *others).reshape(
        mesh.shape[data[0]] * mesh.shape[data[1]], -1
    )
    if places.shape[1] == 1:
        return ""
    shown = [
        " ".join(map(str, ranks)) for ranks in places[:_SHOWN].tolist()
    ]  # no sync point: on the host
    more = ", …" if len(places) > _SHOWN else ""
    return f"the same batches on ranks {', '.join(shown)}{more}"


def parameters_held(modules: Sequence[nn.Module], elsewhere: int = 0) -> str:
    """Describe how many parameters this rank holds.

    Args:
        modules: the modules as they are on this rank.
        elsewhere: the number of parameters that only stages of other ranks have.
    """
    whole, held = elsewhere, 0
    for parameter in (
        parameter for module in modules for parameter in module.parameters()
    ):
        whole += parameter.numel()
        held += local(parameter).numel()
    return f"this rank holds {held:,} of {whole:,} parameters"
