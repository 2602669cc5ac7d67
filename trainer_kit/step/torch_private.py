"""The private names of torch that captured steps use, checked with torch 2.13 and 2.14; no other module here names one.

`core.torch_private` has the names that other rooms use too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor, nn

from trainer_kit.core.torch_private import ITEM, find_private, forward_pre_hooks
from trainer_kit.core.types import Function

__all__ = [
    "below_autograd",
    "has_gradient_hooks",
    "have_gradient_hooks",
    "hook_tables",
    "is_operator",
    "kernel_of",
    "reads_lengths",
    "reads_value",
    "trace_operators",
]

_HOOKS: Final[Callable[[nn.Module], tuple[dict[int, Callable[..., object]], ...]]] = (
    attrgetter("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
)
_GRADIENT_HOOKS: Final[Callable[[Tensor], tuple[object, object]]] = attrgetter(
    "_backward_hooks", "_post_accumulate_grad_hooks"
)

# Inside, operators go past autograd. Without it a step is not captured.
below_autograd: Final[Callable[[], AbstractContextManager[object]]] = find_private(
    "torch._C._AutoDispatchBelowAutograd", 'compile="step"'
)


def is_operator(target: object) -> bool:
    """Whether a node of a graph calls one operator."""
    return isinstance(target, torch._ops.OpOverload)


def kernel_of(target: Any) -> Function:
    """The function in C++ of an operator, which is a Python call less. Without the name nothing is captured."""
    kernel: Function = target
    if is_operator(target):
        kernel = target._op
    return kernel


def trace_operators(
    function: Callable[..., object], tensors: Sequence[Tensor]
) -> torch.fx.Graph:
    """Call a function once; returns the operators that it runs, as a graph whose inputs are these tensors.

    Args:
        function: takes the tensors; returns a list of tensors.
        tensors: the objects themselves reach the function, so that what it holds besides is recognized.
    """
    # Imported here: it takes seconds, and few runs capture. Without the module nothing is captured.
    from torch.fx.experimental.proxy_tensor import make_fx

    graph: torch.fx.Graph = make_fx(function, tracing_mode="real")(*tensors).graph
    return graph


def reads_value(error: Exception) -> bool:
    """Whether a trace has failed because a value was taken out of a tensor."""
    return str(ITEM) in str(error)


def hook_tables(module: nn.Module) -> list[dict[int, Callable[..., object]]]:
    """The hooks of a module's forward and backward. Without a name nothing is captured."""
    return [forward_pre_hooks(module), *_HOOKS(module)]


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether something listens to the gradient of a parameter. Without a name nothing is captured."""
    return any(_GRADIENT_HOOKS(parameter))


def have_gradient_hooks(parameters: Iterable[Tensor]) -> bool:
    """Whether something listens to the gradient of any parameter; one Python call, as it is asked in every step."""
    return any(map(any, map(_GRADIENT_HOOKS, parameters)))


def reads_lengths(graph: torch.fx.Graph) -> bool:
    """Whether a graph holds lengths of packed sequences as constants: their operators read them past the trace."""
    packs = torch.ops.aten._pack_padded_sequence
    return any(
        node.op == "call_function" and node.target in (packs, packs.default)
        for node in graph.nodes
    )
