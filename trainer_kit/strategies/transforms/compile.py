"""Some parts are compiled, each by itself: one graph serves all blocks of a class; sharding happens between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import nn

from trainer_kit.core.errors import StrategyError
from trainer_kit.strategies.transforms.units import Policy, units

__all__ = ["Compile"]


@final
class Compile:
    """``torch.compile`` of each block instead of the whole step (regional compilation).

    Blocks of one class share their code, so the compiler runs once for all of them: a deep model starts about as many
    times sooner as it has blocks. Names of parameters stay what they are. It comes before data sharding: what gathers a
    block's parameters runs around its graph.
    Source: https://docs.pytorch.org/tutorials/recipes/regional_compilation.html.

    Args:
        policy: which parts, see `units`.
        options: of ``torch.compile``.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> Compile(options={"backend": "eager"}).apply(net)
        >>> with torch.no_grad():
        ...     net(torch.ones(1, 2)).shape, list(net.state_dict())
        (torch.Size([1, 2]), ['0.weight', '0.bias', '1.weight', '1.bias'])
    """

    def __init__(self, policy: Policy = None, options: Mapping[str, Any] | None = None) -> None:
        self.policy, self.options = policy, dict(options or {})

    def apply(self, module: nn.Module, mesh: Any = None) -> None:
        """Change the parts in place; done twice, it is there once.

        Raises:
            StrategyError: there are no such parts.
        """
        parts = units(module, self.policy).values()
        if not parts:
            raise StrategyError(
                "there are no blocks to compile each by itself",
                found=f"no list or sequence in {type(module).__name__} repeats a class that has parameters",
                fix="compile the whole: compile=True, or TorchDynamoPlugin(use_regional_compilation=False)",
            )
        for part in parts:
            if part._compiled_call_impl is None:
                part._compiled_call_impl = torch.compile(_through(part), **self.options)


def _through(part: nn.Module) -> Callable[..., Any]:
    """Its call in a frame of ours: ``part.compile()`` leaves out classes of torch's own, whose code it skips."""
    call: Callable[..., Any] = part._call_impl

    def block(*arguments: Any, **options: Any) -> Any:
        return call(*arguments, **options)

    return block
