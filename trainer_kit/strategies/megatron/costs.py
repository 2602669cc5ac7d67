"""What a rank of Megatron holds and sends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainer_kit.core.costs import Costs, Exchange
from trainer_kit.strategies.costs import ring

__all__ = ["megatron_costs"]


def megatron_costs(
    module: nn.Module, precision: str, data_ranks: int, tensor_ranks: int, distributed: bool = False
) -> Costs:
    """Of one rank, which built its part of the layers by itself.

    Args:
        module: before its wrapper takes it, or after.
        precision: the run's, by name.
        data_ranks: that average gradients.
        tensor_ranks: that compute each layer together.
        distributed: whether data ranks have a part of the optimizer's state each.
    """
    low = 2 if precision.startswith(("bf16", "16")) else None
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    gradients = 4 * trained  # its buffers, whatever the weights are

    def stepped(group: Sequence[nn.Parameter]) -> list[Tensor]:
        if not distributed:
            return [torch.empty(p.shape, device="meta", requires_grad=p.requires_grad) for p in group]
        count = sum(p.numel() for p in group if p.requires_grad)
        return [torch.empty(-(-count // data_ranks), device="meta", requires_grad=True)]

    layout = f"{data_ranks} data ranks, each with everything"
    over = f"over {data_ranks} data ranks"
    sent = [Exchange(what=f"gradients: all-reduce {over}", sent=ring(2, data_ranks, gradients))]
    if distributed:
        layout = f"{data_ranks} data ranks, each with all weights and a part of the optimizer's state"
        weights = sum(p.numel() * (low or p.element_size()) for p in module.parameters() if p.requires_grad)
        sent = [
            Exchange(what=f"gradients: reduce-scatter {over}", sent=ring(1, data_ranks, gradients)),
            Exchange(what=f"stepped parameters: all-gather {over}", sent=ring(1, data_ranks, weights)),
        ]
    if tensor_ranks > 1:
        part = " and of the optimizer's state" if distributed else ""
        layout = f"{data_ranks} data ranks; each of {tensor_ranks} tensor ranks holds a part of every layer{part}"
        what = f"activations: all-reduce over {tensor_ranks} tensor ranks, forward and backward"
        sent.append(Exchange(what=what, sent=None, each_batch=True))
    return Costs(
        layout=layout,
        parameters=sum(p.numel() * (low or p.element_size()) for p in module.parameters()),
        gradients=gradients,
        stepped=stepped,
        masters=0 if low is None else gradients // (data_ranks if distributed else 1),
        exchanges=[exchange for exchange in sent if exchange.sent != 0],
    )
