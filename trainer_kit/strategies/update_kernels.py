"""What SGD, Adam and AdamW do to the parameters of a group, given their gradients and states as lists.

Each function takes the options of a group in every call: schedulers change them. All parameters have a gradient, and
their states are there. Options are numbers; see `gathered_step` for what else is left to torch's own step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.torch_private import add_to_each, multiply_each
from trainer_kit.strategies.torch_private import (
    add_quotient_to_each,
    add_square_to_each,
    divide_each,
    fused_adam,
    fused_adamw,
    fused_sgd,
    move_each,
    negatives,
    square_roots,
    sums,
)

__all__ = ["FUSED_KERNELS", "LIST_KERNELS", "Group", "Kernel", "State"]

Group: TypeAlias = dict[str, Any]
"""A parameter group of an optimizer."""
State: TypeAlias = dict[str, Tensor]
"""The state of one parameter."""
Kernel: TypeAlias = Callable[
    [Group, list[nn.Parameter], list[Tensor], list[State]], None
]
"""Updates parameters, by their gradients and states."""

# -- fused kernels -------------------------------------------------------------------------------------------------


def _update_sgd(
    group: Group,
    parameters: list[nn.Parameter],
    gradients: list[Tensor],
    states: list[State],
) -> None:
    buffers: list[Tensor] = []
    if group["momentum"]:
        buffers = [state["momentum_buffer"] for state in states]
    fused_sgd(
        parameters,
        gradients,
        buffers,
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=False,
        grad_scale=None,
        found_inf=None,
    )


def _update_adam(
    group: Group,
    parameters: list[nn.Parameter],
    gradients: list[Tensor],
    states: list[State],
) -> None:
    # Read from the states in each step: other code may have put other tensors there.
    steps = [state["step"] for state in states]
    maxima: list[Tensor] = []
    if group["amsgrad"]:
        maxima = [state["max_exp_avg_sq"] for state in states]
    beta1, beta2 = group["betas"]
    kernel = fused_adam
    if group["decoupled_weight_decay"]:
        kernel = fused_adamw
    add_to_each(steps, 1)
    kernel(
        parameters,
        gradients,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        maxima,
        steps,
        amsgrad=group["amsgrad"],
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        grad_scale=None,
        found_inf=None,
    )


# -- lists on the CPU ----------------------------------------------------------------------------------------------
# There torch's functions of lists run the operator of each tensor in turn. The operators of one parameter come in the
# order of torch's loop over parameters, which is its default there, and with the same numbers: weights are bit-equal.


def _update_sgd_lists(
    group: Group,
    parameters: list[nn.Parameter],
    gradients: list[Tensor],
    states: list[State],
) -> None:
    if group["maximize"]:
        gradients = negatives(gradients)
    if group["weight_decay"]:
        gradients = sums(gradients, parameters, alpha=group["weight_decay"])
    momentum = group["momentum"]
    if momentum:
        buffers = [state["momentum_buffer"] for state in states]
        multiply_each(buffers, momentum)
        add_to_each(buffers, gradients, alpha=1 - group["dampening"])
        if group["nesterov"]:
            gradients = sums(gradients, buffers, alpha=momentum)
        else:
            gradients = buffers
    add_to_each(parameters, gradients, alpha=-group["lr"])


def _update_adam_lists(
    group: Group,
    parameters: list[nn.Parameter],
    gradients: list[Tensor],
    states: list[State],
) -> None:
    learning_rate, weight_decay = group["lr"], group["weight_decay"]
    beta1, beta2 = group["betas"]
    steps = [state["step"] for state in states]
    averages = [state["exp_avg"] for state in states]
    squares = [state["exp_avg_sq"] for state in states]
    if group["maximize"]:
        gradients = negatives(gradients)
    add_to_each(steps, 1)
    if weight_decay and group["decoupled_weight_decay"]:
        multiply_each(parameters, 1 - learning_rate * weight_decay)
    elif weight_decay:
        gradients = sums(gradients, parameters, alpha=weight_decay)
    move_each(averages, gradients, 1 - beta1)
    multiply_each(squares, beta2)
    add_square_to_each(squares, gradients, gradients, 1 - beta2)
    sizes, scales = [], []
    for step in steps:
        count = step.item()  # no sync point: on the CPU
        sizes.append(-(learning_rate / (1 - beta1**count)))
        scales.append((1 - beta2**count) ** 0.5)
    denominators = square_roots(squares)
    divide_each(denominators, scales)
    add_to_each(denominators, group["eps"])
    add_quotient_to_each(parameters, averages, denominators, sizes)


FUSED_KERNELS: Final[dict[type[Optimizer], Kernel]] = {
    torch.optim.SGD: _update_sgd,
    torch.optim.Adam: _update_adam,
    torch.optim.AdamW: _update_adam,
}
"""Of optimizers with ``fused=True``."""
LIST_KERNELS: Final[dict[type[Optimizer], Kernel]] = {
    torch.optim.SGD: _update_sgd_lists,
    torch.optim.Adam: _update_adam_lists,
    torch.optim.AdamW: _update_adam_lists,
}
"""Of those without, on the CPU; without ``amsgrad``."""
