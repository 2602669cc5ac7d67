"""``Trainer(optimizer_kernel=...)``: which of torch's kernels update the weights.

torch has three for most of its optimizers: a loop over the parameters, one that updates many at once (``foreach``), and
one that does the whole update of many (``fused``). All compute the same update; sums may round differently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch.optim import Optimizer

from trainer_kit.core.errors import ConfigurationError, did_you_mean
from trainer_kit.strategies.strategy import Strategy

__all__ = ["check_optimizer_kernel", "set_optimizer_kernel"]

_KERNELS: Final = ("fused", "foreach", "auto")
_FUSED_ON_SHARDS: Final = (torch.optim.Adam, torch.optim.AdamW)
"""Their fused kernels have a sharding strategy in torch 2.13; those of SGD and Adagrad have none."""
_FUSED_DEVICES: Final = ("cpu", "cuda", "mps", "xpu", "hpu")
"""Devices of which torch 2.13 says that optimizers have fused kernels there."""


def check_optimizer_kernel(kernel: object) -> None:
    """Raise `ConfigurationError` for a word that is none of the three; None leaves optimizers as they are."""
    if kernel is None or kernel in _KERNELS:
        return
    raise ConfigurationError(
        "optimizer_kernel is None or one of " + ", ".join(map(repr, _KERNELS)),
        found=f"optimizer_kernel={kernel!r}",
        fix=did_you_mean(str(kernel), _KERNELS),
    )


def set_optimizer_kernel(
    optimizer: Optimizer, kernel: str, strategy: Strategy, say: Callable[[str], None]
) -> None:
    """Let an optimizer that has not stepped use a kernel.

    Args:
        optimizer: as the user made it; its parameters are those that are trained.
        kernel: ``"fused"``, ``"foreach"``, or ``"auto"``: fused where torch has it for these parameters, else the
            optimizer's own choice.
        strategy: an engine that steps an optimizer of its own has its own kernels.
        say: prints which kernel was chosen by ``"auto"``.

    Raises:
        ConfigurationError: there is no such kernel for this optimizer or its parameters.
    """
    name = type(optimizer).__name__
    if kernel == "auto":
        _use_fused_if_possible(optimizer, strategy, say)
        return
    reason = _reason_against(optimizer, kernel, strategy)
    if reason is not None:
        raise ConfigurationError(
            f"optimizer_kernel={kernel!r} cannot be used with {name}",
            found=reason,
            fix='optimizer_kernel="auto", which uses a fused kernel where there is one',
        )
    _set_options(optimizer, kernel)


def _use_fused_if_possible(
    optimizer: Optimizer, strategy: Strategy, say: Callable[[str], None]
) -> None:
    name = type(optimizer).__name__
    reason = _reason_against(optimizer, "fused", strategy)
    if reason is not None:
        say(f'optimizer_kernel="auto": {name} uses {name}\'s default ({reason})')
        return
    _set_options(optimizer, "fused")
    say(f'optimizer_kernel="auto": {name} uses fused')


def _reason_against(
    optimizer: Optimizer, kernel: str, strategy: Strategy
) -> str | None:
    """Why the optimizer cannot use the kernel; None if it can."""
    if strategy.owns_step:
        return f"with strategy {strategy.name} the engine performs the step"
    kind = type(optimizer)
    # A subclass may update in another way than the class whose kernels it would get.
    if (
        not kind.__module__.startswith("torch.optim.")
        or kernel not in optimizer.defaults
    ):
        return f"{kind.__module__}.{kind.__qualname__} has no {kernel} kernel"
    if optimizer.defaults.get("differentiable"):
        return "a differentiable step is computed one operation at a time"
    if kernel == "fused":
        return _reason_against_fused(optimizer, strategy)
    return None


def _reason_against_fused(optimizer: Optimizer, strategy: Strategy) -> str | None:
    """As `_reason_against`. torch would find out in the first step."""
    kind = type(optimizer)
    if strategy.sharded and kind not in _FUSED_ON_SHARDS:
        return f"torch's fused {kind.__name__} has no rule for sharded parameters"
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not parameter.is_floating_point():
                return f"a parameter is {parameter.dtype}, and fused kernels take floating-point numbers"
            device = parameter.device.type
            if device not in _FUSED_DEVICES:
                return (
                    f"a parameter is on {device}, for which torch has no fused kernels"
                )
    return None


def _set_options(optimizer: Optimizer, kernel: str) -> None:
    """As the constructor notes them; the other kernel is switched off, since torch refuses both."""
    options: dict[str, bool | None] = {}
    for name in ("fused", "foreach"):
        if name in optimizer.defaults:
            options[name] = None
    options[kernel] = True
    optimizer.defaults.update(options)
    for group in optimizer.param_groups:
        group.update(options)
