"""What a rank of DeepSpeed's ZeRO holds and sends (Rajbhandari et al., SC 2020, chapters 5 and 7)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle

import torch
from torch import Tensor, nn

from trainer_kit.core.costs import Costs, Exchange
from trainer_kit.strategies.costs import ring
from trainer_kit.strategies.deepspeed.state import shape_of

__all__ = ["deepspeed_costs"]

_HELD = (
    "nothing is divided",
    "optimizer state and masters are divided",
    "gradients, optimizer state and masters are divided",
    "everything is divided, small parameters are whole besides",
)
_ALIGNED = 2  # the engine rounds a flat group up to a multiple of so many elements a rank


def deepspeed_costs(
    stage: int, module: nn.Module, ranks: int, precision: str, groups: Iterable[Sequence[nn.Parameter]] = ()
) -> Costs:
    """Of one rank.

    Args:
        stage: of ZeRO.
        module: before its engine takes it, or after.
        ranks: among which it is divided.
        precision: the run's, by name.
        groups: of the optimizer: at stage 3 the engine hands it their masters only while it steps.
    """
    low = {"bf16": torch.bfloat16, "16-m": torch.float16, "16-t": torch.float16}.get(precision[:4])
    parameters = list(module.parameters())
    sizes = {p: shape_of(p).numel() for p in parameters}
    width = {p: (low or p.dtype).itemsize for p in parameters}
    trained = [p for p in parameters if p.requires_grad]
    taken = cycle(groups)

    def part(count: int) -> int:
        return -(-count // ranks)

    def stepped(group: Sequence[nn.Parameter]) -> list[Tensor]:
        if any(p not in sizes for p in group):
            return list(group)  # the engine's own masters
        group = group or next(taken, [])
        counts = [sizes[p] for p in group if p.requires_grad]
        if 1 <= stage <= 2:
            counts = [_ALIGNED * part(-(-sum(counts) // _ALIGNED))]
        elif stage == 3:
            counts = [sum(map(part, counts))]
        return [torch.empty(count, device="meta", requires_grad=True) for count in counts]

    weights = sum(sizes[p] * width[p] for p in parameters)
    gradients = sum(sizes[p] * width[p] for p in trained)
    return Costs(
        layout=f"ZeRO stage {stage} over {ranks} ranks: {_HELD[stage]}",
        parameters=sum(part(sizes[p]) * width[p] for p in parameters) if stage == 3 else weights,
        gradients=sum(part(sizes[p]) * width[p] for p in trained) if stage >= 2 else gradients,
        stepped=stepped,
        masters=0 if stage == 0 and low is None else sum(t.numel() * 4 for t in stepped(trained)),
        exchanges=[exchange for exchange in _exchanges(stage, ranks, weights, gradients) if exchange.sent],
    )


def _exchanges(stage: int, ranks: int, weights: int, gradients: int) -> list[Exchange]:
    over = f"over {ranks} ranks"
    if stage == 0:
        return [Exchange(what=f"gradients: all-reduce {over}", sent=ring(2, ranks, gradients))]
    reduced = Exchange(
        what=f"gradients: reduce {over}, to who steps them", sent=ring(1, ranks, gradients), each_batch=stage >= 2
    )
    gathered = ring(1, ranks, weights)
    if stage < 3:
        return [reduced, Exchange(what=f"stepped parameters: all-gather {over}", sent=ring(1, ranks, gradients))]
    return [
        Exchange(what=f"parameters: all-gather {over} for forward", sent=gathered, each_batch=True),
        Exchange(what=f"parameters: all-gather {over} for backward", sent=gathered, each_batch=True),
        reduced,
    ]
