"""What is done to gradients on one device, by every strategy that keeps them whole."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from trainer_kit.core.errors import ConfigurationError

__all__ = ["clip_gradients"]


def clip_gradients(parameters: Sequence[nn.Parameter], value: float, algorithm: str) -> None:
    """Clip whole gradients.

    Args:
        parameters: whose gradients; those without one are left out.
        value: the largest norm of all gradients together, or the largest absolute value of each element.
        algorithm: ``"norm"`` (Pascanu et al., 2013) or ``"value"``.
    """
    if algorithm == "norm":
        nn.utils.clip_grad_norm_(parameters, value)
    elif algorithm == "value":
        nn.utils.clip_grad_value_(parameters, value)
    else:
        raise ConfigurationError("unknown way to clip gradients", found=repr(algorithm), fix='use "norm" or "value"')
