"""Who holds what on a mesh, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainer_kit.strategies.axes import axes_in_words

__all__ = ["mesh_in_words", "parameters_held", "same_batches"]

_SHOWN = 4


def mesh_in_words(
    mesh: DeviceMesh | None,
    sizes: Mapping[str, int],
    device: torch.device,
    modules: Sequence[nn.Module],
    schedule: str,
    elsewhere: int,
) -> str:
    """One line about a mesh.

    Args:
        mesh: None: it is not there yet.
        sizes: of its axes, as they were asked for.
        device: where its ranks compute.
        modules: that it divides.
        schedule: of its pipeline.
        elsewhere: parameters that only other ranks' stages have.
    """
    if mesh is not None:
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    staged = f" ({schedule})" if sizes["pp"] != 1 else ""
    told = [f"mesh {axes_in_words(sizes)} on {device.type}{staged}"]
    told += [same_batches(mesh)] if mesh is not None else []
    told += [parameters_held(modules, elsewhere)] if modules else []
    return "; ".join(filter(None, told))


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


def parameters_held(modules: Sequence[nn.Module], elsewhere: int = 0) -> str:
    """How much of the parameters this rank holds.

    Args:
        modules: as they are here.
        elsewhere: parameters that only other ranks' stages have.
    """
    whole, held = elsewhere, 0
    for parameter in (parameter for module in modules for parameter in module.parameters()):
        whole += parameter.numel()
        held += parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()
    return f"this rank holds {held:,} of {whole:,} parameters"
