"""Memory and communication of a rank in training: strategies report them, `explain` and the summary show them."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.display import in_units

__all__ = ["Costs", "cost_lines", "held", "optimizer_bytes", "own_part", "part_bytes"]


@final
@dataclass(frozen=True, kw_only=True)
class Costs:
    """Memory and communication of one module under a strategy.

    Attributes:
        layout: the axes among which the work is divided, and who holds what.
        parameters: bytes on this rank; None: known only once the module is divided.
        gradients: bytes on this rank when an optimizer steps.
        stepped: from the parameters of an optimizer's group to what is stepped in their place on this rank; shapes
            and dtypes count, so tensors of the meta device do.
        masters: bytes of copies of the parameters in full precision that an engine keeps beside them.
        exchanges: the communication of a step: what, by which operation, among how many ranks.
    """

    layout: str
    parameters: int | None
    gradients: int | None
    stepped: Callable[[Sequence[nn.Parameter]], Sequence[Tensor]]
    masters: int = 0
    exchanges: Sequence[str] = ()


def part_bytes(tensors: Iterable[Any]) -> int:
    """The bytes of tensors on this rank; a ``DTensor`` counts with its local part.

    Example:
        >>> part_bytes([torch.zeros(3, 4), torch.zeros(2, dtype=torch.bfloat16)])
        52
    """
    parts = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum(part.numel() * part.element_size() for part in parts)


def own_part(tensor: Any, ranks: int = 1, rank: int = 0) -> Tensor:
    """The shape, without storage, of what a rank holds of a tensor that is, or will be, divided along its first dim.

    Example:
        >>> [len(own_part(torch.zeros(5, 2), 3, rank)) for rank in range(3)]
        [2, 2, 1]
    """
    shape = list((tensor.to_local() if hasattr(tensor, "to_local") else tensor).shape)
    if ranks > 1 and shape and not hasattr(tensor, "to_local"):
        rows = -(-shape[0] // ranks)
        shape[0] = max(0, min(rows, shape[0] - rank * rows))
    return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)


def held(
    module: nn.Module, layout: str, exchanges: Sequence[str] = (), part: Callable[[nn.Parameter], Tensor] = own_part
) -> Costs:
    """The costs of a rank that holds, and steps, its part of each parameter.

    Args:
        module: before or after it is divided.
        layout: the axes, and who holds what.
        exchanges: of a step.
        part: this rank's part of a parameter, see `own_part`; default: all that is here.
    """
    parts = {p: part(p) for p in module.parameters()}
    return Costs(
        layout=layout,
        parameters=part_bytes(parts.values()),
        gradients=part_bytes(part for part in parts.values() if part.requires_grad),
        stepped=lambda group: [parts[p] if p in parts else own_part(p) for p in group],
        exchanges=exchanges,
    )


def optimizer_bytes(optimizers: Iterable[Optimizer], costs: Costs) -> int | None:
    """The state that optimizers have on this rank, or will have after their first step; None if unknown.

    One that has not stepped yet tries a step on tensors without storage.

    Example:
        >>> layer = nn.Linear(3, 4)
        >>> alone = Costs(layout="", parameters=64, gradients=64, stepped=list)
        >>> optimizer_bytes([torch.optim.AdamW(layer.parameters())], alone)  # two moments, and the step of each tensor
        136
    """
    found = 0
    for optimizer in optimizers:
        states: Any = optimizer.state.values() or _tried(optimizer, costs)
        if states is None:
            return None
        found += sum(part_bytes(v for v in state.values() if isinstance(v, Tensor)) for state in states)
    return found


def _tried(optimizer: Optimizer, costs: Costs) -> Iterable[Any] | None:
    kind, made = type(optimizer), []
    for group in optimizer.param_groups:
        seen: dict[Any, Any] = {}
        for like in costs.stepped(group["params"]):
            if not like.requires_grad:
                continue
            key = like.shape, like.dtype
            if key not in seen:
                seen[key] = _state_of(kind, optimizer, group, like)
            if seen[key] is None:
                return None
            made.append(seen[key])
    return made


def _state_of(kind: type[Optimizer], optimizer: Optimizer, group: dict[str, Any], like: Tensor) -> Any:
    stand_in = nn.Parameter(torch.empty(like.shape, dtype=like.dtype, device="meta"))
    stand_in.grad = torch.empty_like(stand_in)
    twin: Any = object.__new__(kind)
    options = {name: False for name in ("foreach", "fused", "capturable") if name in group}
    twin.__dict__ = {
        **vars(optimizer),
        "state": defaultdict(dict),
        "param_groups": [{**group, **options, "params": [stand_in]}],
        "_optimizer_step_pre_hooks": OrderedDict(),
        "_optimizer_step_post_hooks": OrderedDict(),
    }
    try:
        kind.step(twin)
    except Exception:  # it looks at values, or needs a closure: then only its first real step shows
        return None
    return twin.state[stand_in]


def cost_lines(costs: Costs, optimizers: Sequence[Optimizer] | None) -> list[str]:
    """The costs as lines of text.

    Args:
        costs: of this rank.
        optimizers: of the module; None where they are not known yet.

    Example:
        >>> layer = nn.Linear(300, 400)
        >>> alone = Costs(layout="everything is here", parameters=481600, gradients=481600, stepped=list)
        >>> print(*cost_lines(alone, [torch.optim.Adam(layer.parameters())]), sep="\\n")
        layout       everything is here
        a rank holds 482 kB of parameters, 482 kB of gradients, 963 kB of optimizer state
        a step sends nothing
    """
    state = None if optimizers is None else optimizer_bytes(optimizers, costs)
    held = [(costs.parameters, "parameters"), (costs.gradients, "gradients"), (state, "optimizer state")]
    if costs.masters:
        held.append((costs.masters, "parameters in full precision"))
    lines = [
        f"layout       {costs.layout}",
        f"a rank holds {', '.join(f'{in_units(number)} of {what}' for number, what in held)}",
    ]
    lines += [f"{'' if index else 'a step sends':<13}{what}" for index, what in enumerate(costs.exchanges)]
    return lines if costs.exchanges else [*lines, "a step sends nothing"]
