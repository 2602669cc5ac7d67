"""What DDP's gradient exchange may be put in smaller numbers with: hooks by name, or the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

__all__ = ["register_comm_hook"]


def register_comm_hook(ddp: DistributedDataParallel, hook: str | Callable[..., Any], state: Any) -> None:
    """Exchange gradients by this hook.

    Args:
        ddp: the wrapper.
        hook: ``"fp16"``, ``"bf16"``, ``"powersgd"``, or a function as torch takes it.
        state: of the hook.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    chosen: Callable[..., Any]
    if hook == "powersgd":
        state = state or powerSGD_hook.PowerSGDState(None)
    if callable(hook):
        chosen = hook
    else:
        named: dict[str, Callable[..., Any]] = {
            "fp16": default_hooks.fp16_compress_hook,
            "bf16": _bf16_hook,
            "powersgd": powerSGD_hook.powerSGD_hook,
        }
        chosen = named[hook]

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
