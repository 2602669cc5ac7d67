"""What a rank of a mesh holds and sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trainer_kit.core.costs import Costs, Exchange
from trainer_kit.precision.precision import Precision
from trainer_kit.strategies.axes import axes_in_words
from trainer_kit.strategies.fsdp import FSDPStrategy
from trainer_kit.strategies.holding import parameters_held
from trainer_kit.strategies.transforms.split import StandIn

__all__ = ["mesh_costs"]


def mesh_costs(
    sizes: Mapping[str, int],
    mesh: DeviceMesh | None,
    options: Mapping[str, Any],
    module: nn.Module,
    precision: Precision,
    elsewhere: int = 0,
) -> Costs:
    """The data axes' costs, of what the other axes leave.

    Args:
        sizes: of all axes.
        mesh: of the data axes; None: the processes are not there yet.
        options: of `FSDPStrategy` for them.
        module: which the other axes divide when a verb begins; how far is known then.
        precision: the run's.
        elsewhere: parameters that only other ranks' stages have.
    """
    copies, shards = sizes["dp_replicate"], sizes["dp_shard"] * sizes["cp"]
    shape = mesh or ((copies, shards) if copies > 1 else (shards,))
    along_data = FSDPStrategy(device_mesh=shape, **options).costs(module, precision, copies * shards)
    held, sent = _model_axes(sizes)
    layout = "; ".join([axes_in_words(sizes), *held, *([along_data.layout] if copies * shards > 1 else [])])
    divided = any(hasattr(p, "placements") for p in module.parameters())
    divided = divided or any(isinstance(part, StandIn) for part in module.modules())
    if sizes["tp"] * sizes["pp"] > 1 and not divided:
        layout += "; how much is known when a verb has divided the module"
        return replace(along_data, layout=layout, parameters=None, gradients=None, exchanges=sent)
    if divided:
        layout += f"; {parameters_held([module], elsewhere)}"
    return replace(along_data, layout=layout, exchanges=[*sent, *along_data.exchanges])


def _model_axes(sizes: Mapping[str, int]) -> tuple[list[str], list[Exchange]]:
    """Who holds what, and what is sent, along the axes that divide a model or a sequence."""
    held, sent = [], []
    if sizes["pp"] > 1:
        held.append(f"each of {sizes['pp']} pipeline ranks holds its stages")
        sent.append(Exchange(what="activations to the next stage, their gradients back", sent=None, each_batch=True))
    if sizes["tp"] > 1:
        held.append(f"each of {sizes['tp']} tensor ranks a part of every layer in the plan")
        what = f"activations of divided layers: all-reduce over {sizes['tp']} tensor ranks, forward and backward"
        sent.append(Exchange(what=what, sent=None, each_batch=True))
    if sizes["cp"] > 1:
        held.append(f"each of {sizes['cp']} context ranks computes a part of every sequence")
        what = f"keys and values, or heads: among {sizes['cp']} context ranks, forward and backward"
        sent.append(Exchange(what=what, sent=None, each_batch=True))
    return held, sent
