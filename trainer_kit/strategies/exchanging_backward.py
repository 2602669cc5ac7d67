"""The backward of an engine that has parameters gathered while it runs, and exchanges gradients in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

from torch import Tensor, nn

__all__ = ["ExchangingBackward"]


@final
class ExchangingBackward:
    """A backward that exchanges gradients, and may be told to leave those of other parameters alone.

    Args:
        parameters: all that it might reach, as the module has them.
        run: the user's own; None: autograd's.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], run: Callable[..., None] | None) -> None:
        self.parameters, self.run = parameters, run or _autograd

    def __call__(self, loss: Tensor, *arguments: Any, inputs: Any = None, **options: Any) -> None:
        """Run it; ``inputs``: the parameters whose gradients it adds to."""
        if inputs is None:
            self.run(loss, *arguments, **options)
            return
        # autograd knows the gathered parameters only, so it cannot be told to reach those of which this rank has parts.
        reached = {id(parameter) for parameter in inputs}
        others = [(p, p.grad) for p in self.parameters if id(p) not in reached]
        for parameter, _ in others:
            parameter.grad = None
        self.run(loss, *arguments, **options)
        for parameter, gradient in others:
            parameter.grad = gradient


def _autograd(loss: Tensor, **options: Any) -> None:
    loss.backward(**options)  # type: ignore[no-untyped-call]
