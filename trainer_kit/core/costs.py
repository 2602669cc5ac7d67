"""Memory and communication of a rank in training. Strategies report them; `explain` and the summary show them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.display import in_units
from trainer_kit.core.tensors import local
from trainer_kit.core.types import ParamGroup

__all__ = [
    "Costs",
    "cost_lines",
    "local_shard",
    "optimizer_bytes",
    "shard_bytes",
    "shard_costs",
]


@final
@dataclass(frozen=True, kw_only=True)
class Costs:
    """Memory and communication of one module under a strategy.

    Attributes:
        layout: the axes over which the work is divided, and what each rank holds.
        parameters: bytes of parameters on this rank; None if unknown until the module is sharded.
        gradients: bytes of gradients on this rank when an optimizer steps.
        stepped: maps the parameters of an optimizer's group to the tensors that this rank steps in their place; meta
            tensors suffice, since only shapes and dtypes are used.
        masters: bytes of the full-precision master copies that an engine keeps of the parameters.
        exchanges: the communication of a step: the data, the operation and the number of ranks.
        during: what a rank holds for a part of a step, in words; empty: nothing but activations and gathered units.
    """

    layout: str
    parameters: int | None
    gradients: int | None
    stepped: Callable[[Sequence[nn.Parameter]], Sequence[Tensor]]
    masters: int = 0
    exchanges: Sequence[str] = ()
    during: str = ""


def shard_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of tensors on this rank; of a ``DTensor`` only the local shard counts.

    Example:
        >>> shard_bytes([torch.zeros(3, 4), torch.zeros(2, dtype=torch.bfloat16)])
        52
    """
    shards = map(local, tensors)
    return sum(shard.numel() * shard.element_size() for shard in shards)


def local_shard(tensor: Tensor, ranks: int = 1, rank: int = 0) -> Tensor:
    """A meta tensor with the shape of a rank's shard of ``tensor``, which is or will be sharded along its first dim.

    Example:
        >>> [len(local_shard(torch.zeros(5, 2), 3, rank)) for rank in range(3)]
        [2, 2, 1]
    """
    shape = list(local(tensor).shape)
    is_sharded = hasattr(tensor, "to_local")
    if ranks > 1 and shape and not is_sharded:
        # As fully_shard divides: every rank has the rows of a full shard, except the last ones, which may have fewer
        # rows or none.
        rows = -(-shape[0] // ranks)
        remaining = max(0, shape[0] - rank * rows)
        shape[0] = min(rows, remaining)
    return torch.empty(
        shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad
    )


def shard_costs(
    module: nn.Module,
    layout: str,
    exchanges: Sequence[str] = (),
    part: Callable[[nn.Parameter], Tensor] = local_shard,
    during: str = "",
) -> Costs:
    """The costs of a rank that holds and steps its own shard of each parameter.

    Args:
        module: the module, before or after sharding.
        layout: the axes, and what each rank holds.
        exchanges: the communication of a step.
        part: returns this rank's shard of a parameter, see `local_shard`; default: the local tensor.
        during: what a rank holds for a part of a step, in words.
    """
    # By the parameter, since `stepped` is asked for the parameters of an optimizer.
    shards = {parameter: part(parameter) for parameter in module.parameters()}
    trained = [shard for shard in shards.values() if shard.requires_grad]

    def stepped(group: Sequence[nn.Parameter]) -> list[Tensor]:
        # A user's optimizer may step parameters that are not of the module.
        return [shards[p] if p in shards else local_shard(p) for p in group]

    return Costs(
        layout=layout,
        parameters=shard_bytes(shards.values()),
        gradients=shard_bytes(trained),
        stepped=stepped,
        exchanges=exchanges,
        during=during,
    )


def optimizer_bytes(optimizers: Iterable[Optimizer], costs: Costs) -> int | None:
    """Bytes of the optimizers' state on this rank, now or after their first step; None if unknown.

    No method of an optimizer is called. Before the first step, the size is derived from the options of torch's own
    classes; for any other class it is unknown.

    Example:
        >>> layer = nn.Linear(3, 4)
        >>> alone = Costs(layout="", parameters=64, gradients=64, stepped=list)
        >>> optimizer_bytes([torch.optim.AdamW(layer.parameters())], alone)  # two moments, and the step of each tensor
        136
    """
    total = 0
    for optimizer in optimizers:
        # The true size, once a step has made it.
        if optimizer.state:
            for state in optimizer.state.values():
                total += shard_bytes(v for v in state.values() if isinstance(v, Tensor))
            continue
        sizes = _SIZES.get(type(optimizer))
        # Of the exact class: a subclass may keep more. Before sharding, the tensors that this rank steps are unknown
        # too.
        if sizes is None or costs.parameters is None:
            return None
        for group in optimizer.param_groups:
            stepped = costs.stepped(group["params"])
            trained = [tensor for tensor in stepped if tensor.requires_grad]
            tensors, numbers = sizes(group)
            total += tensors * shard_bytes(trained)
            total += numbers * len(trained) * _number_bytes(group)
    return total


_Sizes = Callable[[ParamGroup], tuple[int, int]]
_SIZES: Final[Mapping[type[Optimizer], _Sizes]] = {
    torch.optim.SGD: lambda group: (bool(group["momentum"]), 0),
    torch.optim.Adam: lambda group: (2 + group["amsgrad"], 1),
    torch.optim.AdamW: lambda group: (2 + group["amsgrad"], 1),
    torch.optim.Adamax: lambda group: (2, 1),
    torch.optim.NAdam: lambda group: (2, 2),
    torch.optim.RAdam: lambda group: (2, 1),
    torch.optim.Adadelta: lambda group: (2, 1),
    torch.optim.RMSprop: lambda group: (
        1 + bool(group["momentum"]) + group["centered"],
        1,
    ),
    torch.optim.Rprop: lambda group: (2, 1),
    torch.optim.ASGD: lambda group: (1, 3),
}
"""For each class, a function of its options: parameter-shaped tensors, and scalars, that it keeps per parameter."""


def _number_bytes(group: ParamGroup) -> int:
    # torch's optimizers count steps in the default dtype; fused ones always in float32.
    if torch.get_default_dtype() is torch.float64 and not group.get("fused"):
        return 8
    return 4


def _describe_sizes(sizes: Sequence[tuple[int | None, str]]) -> str:
    """The sizes as text; unknown ones are named last."""
    texts = []
    unknown = []
    for number, data in sizes:
        if number is None:
            unknown.append(data)
        else:
            texts.append(f"{in_units(number)} of {data}")
    clauses = []
    if texts:
        clauses.append(", ".join(texts))
    if unknown:
        clauses.append(f"known only during the run: {' and '.join(unknown)}")
    return "; ".join(clauses)


def cost_lines(costs: Costs, optimizers: Sequence[Optimizer] | None) -> list[str]:
    """The costs as lines of text.

    Args:
        costs: the costs of this rank.
        optimizers: the module's optimizers; None if they are not known yet.

    Example:
        >>> layer = nn.Linear(300, 400)
        >>> alone = Costs(layout="everything is here", parameters=481600, gradients=481600, stepped=list)
        >>> print(*cost_lines(alone, [torch.optim.Adam(layer.parameters())]), sep="\\n")
        layout       everything is here
        per rank     482 kB of parameters, 482 kB of gradients, 963 kB of optimizer state
        per step     no communication
    """
    state = None
    if optimizers is not None:
        state = optimizer_bytes(optimizers, costs)
    sizes = [
        (costs.parameters, "parameters"),
        (costs.gradients, "gradients"),
        (state, "optimizer state"),
    ]
    if costs.masters:
        sizes.append((costs.masters, "parameters in full precision"))
    lines = [
        f"layout       {costs.layout}",
        f"per rank     {_describe_sizes(sizes)}",
    ]
    if costs.during:
        lines.append(f"{'':<13}{costs.during}")
    if not costs.exchanges:
        lines.append("per step     no communication")
    label = "per step"
    for exchange in costs.exchanges:
        lines.append(f"{label:<13}{exchange}")
        # Only the first line has it.
        label = ""
    return lines
