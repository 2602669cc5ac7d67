"""Who talks to whom on a mesh: its axes, and the groups that several axes make together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer_kit.strategies.axes import AXES, data_mesh
from trainer_kit.strategies.process_group import ProcessGroup, inherit_timeout, once_a_world

__all__ = ["MeshGroups", "mesh_groups"]


@final
class MeshGroups:
    """One mesh of all processes, and its groups. Every process makes it at the same time.

    Args:
        device: where this rank computes.
        sizes: of each axis.

    Attributes:
        mesh: with the axes `AXES`.
        data_mesh: what gradients are averaged over: copies, and those who divide parameters among them, context ranks
            too.
        data: among whom a global batch is divided.
        losses: those, and the context ranks.
        reports: those, and the stages of a pipeline.
        same: for each axis whose ranks get the same batches.
        stages: the ranks of one pipeline.
    """

    def __init__(self, device: torch.device, sizes: Mapping[str, int]) -> None:
        self._device = device
        self.mesh: DeviceMesh = inherit_timeout(
            init_device_mesh(device.type, tuple(sizes[axis] for axis in AXES), mesh_dim_names=AXES)
        )
        context = ["cp"] if sizes["cp"] > 1 else []
        self.data = self._over("dp_replicate", "dp_shard")
        self.losses = self._over("dp_replicate", "dp_shard", *context) if context else self.data
        self.data_mesh = data_mesh(self.mesh)
        self.same = {axis: self._along(axis) for axis in ("tp", "cp", "pp") if sizes[axis] > 1}
        self.reports, self.stages = self.losses, self._along("pp")
        if sizes["pp"] > 1:
            self.reports = self._over("pp", "dp_replicate", "dp_shard", *context)

    def _along(self, axis: str) -> ProcessGroup:
        return ProcessGroup(self._device, self.mesh[axis].get_group())

    def _over(self, *axes: str) -> ProcessGroup:
        flat = inherit_timeout(self.mesh[axes]._flatten("_".join(axes) + "_flat"))
        return ProcessGroup(self._device, flat.get_group())


def mesh_groups(device: torch.device, sizes: Mapping[str, int]) -> MeshGroups:
    """The same ones for every strategy of the same sizes: a group is threads and sockets until its process ends.

    Args:
        device: where this rank computes.
        sizes: of each axis.
    """
    return once_a_world((str(device), *sizes.items()), lambda: MeshGroups(device, sizes))
