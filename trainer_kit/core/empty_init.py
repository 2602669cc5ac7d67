"""A context that leaves the weights of new layers uninitialized, for weights that a checkpoint replaces."""

from __future__ import annotations

import sys
from inspect import isfunction
from typing import Any, Final, final

import torch
from torch.nn import init
from torch.overrides import TorchFunctionMode

__all__ = ["EmptyInit"]

_INITIALIZERS: Final = frozenset(
    function for function in vars(init).values() if isfunction(function)
)
_RANDOM: Final = frozenset(
    ("uniform_", "normal_", "trunc_normal_", "bernoulli_", "exponential_")
)


@final
class EmptyInit(TorchFunctionMode):
    """A context in which ``torch.nn.init`` changes no tensor, so layers are built with the values of fresh memory.

    Random numbers that a program draws itself, outside of ``torch.nn.init``, are drawn as usual.

    Example:
        >>> state = torch.get_rng_state()
        >>> with EmptyInit():
        ...     layer = torch.nn.MultiheadAttention(4, 2)
        >>> torch.equal(state, torch.get_rng_state())
        True
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Leave out the functions of ``torch.nn.init``, and the random ones that those call."""
        kwargs = kwargs or {}
        if func in _INITIALIZERS:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        if sys._getframe(1).f_globals is vars(
            init
        ):  # a function that torch does not pass on to modes
            if func.__name__ in _RANDOM:
                return args[0]
            if func is torch.randperm:
                return torch.arange(*args)
        return func(*args, **kwargs)
