"""Where tensors live and who talks to whom: one file an engine, the protocol is ``core.protocols.Strategy``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer_kit.strategies.single import SingleDeviceStrategy

if TYPE_CHECKING:
    from trainer_kit.strategies.ddp import DDPStrategy

__all__ = ["DDPStrategy", "SingleDeviceStrategy"]


def __getattr__(name: str) -> Any:
    if name == "DDPStrategy":  # torch.distributed is only needed by those who use it
        from trainer_kit.strategies.ddp import DDPStrategy

        return DDPStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
