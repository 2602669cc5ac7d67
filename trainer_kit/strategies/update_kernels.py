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
    has_list_functions,
    move_each,
    negatives,
    square_roots,
    sums,
)

__all__ = ["FUSED_KERNELS", "LIST_KERNELS", "Group", "Kernel", "StateLists"]

Group: TypeAlias = dict[str, Any]
"""A parameter group of an optimizer."""
StateLists: TypeAlias = dict[str, list[Tensor]]
"""By name of a state: that of each parameter."""
Kernel: TypeAlias = Callable[
    [Group, list[nn.Parameter], list[Tensor], StateLists], None
]
"""Updates parameters, by their gradients and states."""

# -- fused kernels -------------------------------------------------------------------------------------------------


def _update_sgd(
    group: Group,
    parameters: list[nn.Parameter],
    gradients: list[Tensor],
    states: StateLists,
) -> None:
    buffers: list[Tensor] = []
    if group["momentum"]:
        buffers = states["momentum_buffer"]
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
    states: StateLists,
) -> None:
    steps = states["step"]
    maxima: list[Tensor] = []
    if group["amsgrad"]:
        maxima = states["max_exp_avg_sq"]
    beta1, beta2 = group["betas"]
    kernel = fused_adam
    if group["decoupled_weight_decay"]:
        kernel = fused_adamw
    add_to_each(steps, 1)
    kernel(
        parameters,
        gradients,
        states["exp_avg"],
        states["exp_avg_sq"],
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
    states: StateLists,
) -> None:
    if group["maximize"]:
        gradients = negatives(gradients)
    if group["weight_decay"]:
        gradients = sums(gradients, parameters, alpha=group["weight_decay"])
    momentum = group["momentum"]
    if momentum:
        buffers = states["momentum_buffer"]
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
    states: StateLists,
) -> None:
    learning_rate, weight_decay = group["lr"], group["weight_decay"]
    beta1, beta2 = group["betas"]
    steps = states["step"]
    averages, squares = states["exp_avg"], states["exp_avg_sq"]
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
LIST_KERNELS: Final[dict[type[Optimizer], Kernel]] = {}
"""Of those without, on the CPU; without ``amsgrad``. Empty where this torch lacks a function of lists."""
if has_list_functions:
    LIST_KERNELS[torch.optim.SGD] = _update_sgd_lists
    LIST_KERNELS[torch.optim.Adam] = _update_adam_lists
    LIST_KERNELS[torch.optim.AdamW] = _update_adam_lists
