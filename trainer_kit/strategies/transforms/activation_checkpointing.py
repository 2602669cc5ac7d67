"""Activations of some parts are computed again in backward instead of being kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer_kit.strategies.transforms.units import Policy, units

__all__ = ["ActivationCheckpointing", "keep_activations"]


@final
class ActivationCheckpointing:
    """Less memory for more computing (Chen et al., 2016): torch's ``checkpoint`` around the forward of some parts.

    No part is wrapped, so names of parameters stay what they are. Random layers draw the same again.

    Args:
        policy: which parts, see `units`.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> ActivationCheckpointing().apply(net)
        >>> net(torch.ones(1, 2)).sum().backward()
        >>> list(net.state_dict())
        ['0.weight', '0.bias', '1.weight', '1.bias']
    """

    def __init__(self, policy: Policy = None) -> None:
        self.policy = policy

    def apply(self, module: nn.Module, mesh: Any = None) -> None:
        """Change the parts in place; done twice, it is there once."""
        for part in units(module, self.policy).values():
            if not isinstance(part.__dict__.get("forward"), _Recomputed):
                # On the instance: the class, and other models of it, are left alone.
                part.__dict__["forward"] = _Recomputed(part.forward, "forward" in part.__dict__)


def keep_activations(module: Any) -> None:
    """Take it off again, wherever in the module it is."""
    for part in module.modules():
        recomputed = part.__dict__.get("forward")
        if isinstance(recomputed, _Recomputed):
            del part.__dict__["forward"]
            if recomputed.own:
                part.__dict__["forward"] = recomputed.forward


@final
class _Recomputed:
    """A forward whose activations are not kept."""

    def __init__(self, forward: Callable[..., Any], own: bool) -> None:
        self.forward, self.own = forward, own

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return checkpoint(self.forward, *arguments, use_reentrant=False, **options)
