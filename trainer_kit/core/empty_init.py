"""A context that leaves the weights of new layers uninitialized, for weights that a checkpoint replaces."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from inspect import isfunction
from typing import Any, Final, final

import torch
from torch.nn import init
from torch.overrides import TorchFunctionMode

from trainer_kit.core.types import Function, Keywords

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
        self,
        func: Function,
        types: object,
        args: Sequence[Any] = (),
        kwargs: Keywords | None = None,
    ) -> object:
        """Leave out the functions of ``torch.nn.init``, and the random ones that those call."""
        kwargs = kwargs or {}
        if func in _INITIALIZERS:
            if "tensor" in kwargs:
                return kwargs["tensor"]
            return args[0]
        # Some functions of ``torch.nn.init`` do not pass themselves on to modes; their random calls arrive here. The
        # calling frame tells them from the user's own random numbers, which must be drawn as usual.
        if sys._getframe(1).f_globals is vars(init):
            if func.__name__ in _RANDOM:
                return args[0]
            if func is torch.randperm:
                # A permutation is used as an index: fresh memory would hold invalid ones.
                return torch.arange(*args)
        return func(*args, **kwargs)
