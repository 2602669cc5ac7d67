"""What DDP's gradient exchange may be put in smaller numbers with: hooks by name, or the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from trainer_kit.core.errors import StrategyError

__all__ = ["check_comm_hook", "register_comm_hook"]

_HOOKS: Final = ("fp16", "bf16", "powersgd")


def check_comm_hook(hook: Any, state: Any, wrapper: Any) -> None:
    """Refuse what cannot exchange gradients.

    Raises:
        StrategyError: an unknown name, a wrapper without a hook, or arguments for a hook that takes none.
    """
    if isinstance(hook, str) and hook not in _HOOKS:
        raise StrategyError("unknown communication hook", found=repr(hook), fix=f"use {', '.join(map(repr, _HOOKS))}")
    if isinstance(wrapper, str) and wrapper not in ("fp16", "bf16"):
        raise StrategyError("unknown wrapper of a communication hook", found=repr(wrapper), fix="use 'fp16', 'bf16'")
    if wrapper is not None and hook is None:
        raise StrategyError("a wrapper needs a communication hook", found=f"ddp_comm_wrapper={wrapper!r}")
    if isinstance(state, Mapping) and hook != "powersgd":
        raise StrategyError(
            "only PowerSGD has a state with arguments", found=f"{dict(state)} for {hook!r}", fix='hook "powersgd"'
        )


def register_comm_hook(
    ddp: DistributedDataParallel, hook: str | Callable[..., Any], state: Any, wrapper: Any = None
) -> None:
    """Exchange gradients by this hook.

    Args:
        ddp: the wrapped module.
        hook: one of the names, or a function as torch takes it.
        state: of the hook, or arguments of PowerSGD's.
        wrapper: ``"fp16"``, ``"bf16"``, or a function of the hook.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    chosen: Callable[..., Any]
    if hook == "powersgd" and (state is None or isinstance(state, Mapping)):
        state = powerSGD_hook.PowerSGDState(None, **(state or {}))
    if callable(hook):
        chosen = hook
    else:
        named: dict[str, Callable[..., Any]] = {
            "fp16": default_hooks.fp16_compress_hook,
            "bf16": _bf16_hook,
            "powersgd": powerSGD_hook.powerSGD_hook,
        }
        chosen = named[hook]
    if wrapper is not None:
        wrappers: dict[Any, Callable[..., Any]] = {
            "fp16": default_hooks.fp16_compress_wrapper,
            "bf16": default_hooks.bf16_compress_wrapper,
        }
        chosen = wrappers.get(wrapper, wrapper)(chosen)

    def unannotated(state, bucket):  # type: ignore[no-untyped-def]
        # torch compares annotations by identity, so those of `from __future__ import annotations` are refused.
        return chosen(state, bucket)

    ddp.register_comm_hook(state, unannotated)


def _bf16_hook(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    """Exchange in bfloat16 on any backend; torch's own hook of this name asks for NCCL although gloo can do it."""
    buffer = bucket.buffer()
    compressed = buffer.to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(compressed, async_op=True).get_future()

    def decompress(done: torch.futures.Future[Any]) -> Tensor:
        averaged: Tensor = buffer.copy_(done.value()[0])
        return averaged

    exchanged: torch.futures.Future[Tensor] = future.then(decompress)
    return exchanged
