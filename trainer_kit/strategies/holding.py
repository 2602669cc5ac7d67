"""Who holds what on a mesh, in words."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

__all__ = ["parameters_held", "same_batches"]

_SHOWN = 4


def same_batches(mesh: DeviceMesh) -> str:
    """Which ranks get the same batches, where any do.

    Args:
        mesh: with the axes ``dp_replicate`` and ``dp_shard``.
    """
    names = mesh.mesh_dim_names or ()
    data = [names.index("dp_replicate"), names.index("dp_shard")]
    others = [axis for axis in range(mesh.ndim) if axis not in data]
    places = mesh.mesh.permute(*data, *others).reshape(mesh.shape[data[0]] * mesh.shape[data[1]], -1)
    if places.shape[1] == 1:
        return ""
    shown = [" ".join(map(str, ranks)) for ranks in places[:_SHOWN].tolist()]  # no sync point: on the host
    more = ", …" if len(places) > _SHOWN else ""
    return f"the same batches on ranks {', '.join(shown)}{more}"


def parameters_held(module: nn.Module, elsewhere: int = 0) -> str:
    """How much of a module's parameters this rank holds.

    Args:
        module: as it is here.
        elsewhere: parameters that only other ranks' stages have.
    """
    whole, held = elsewhere, 0
    for parameter in module.parameters():
        whole += parameter.numel()
        held += parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()
    return f"this rank holds {held:,} of {whole:,} parameters"
