"""Where tensors live and who talks to whom: one file an engine, the protocol is ``core.protocols.Strategy``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trainer_kit.strategies.single import SingleDeviceStrategy

if TYPE_CHECKING:
    from trainer_kit.strategies.ddp import DDPStrategy
    from trainer_kit.strategies.deepspeed import DeepSpeedStrategy
    from trainer_kit.strategies.fsdp import FSDPStrategy
    from trainer_kit.strategies.local_sgd import PostLocalSGD
    from trainer_kit.strategies.megatron import MegatronStrategy
    from trainer_kit.strategies.mesh import MeshStrategy
    from trainer_kit.strategies.xla import XLAStrategy

__all__ = [
    "DDPStrategy",
    "DeepSpeedStrategy",
    "FSDPStrategy",
    "MegatronStrategy",
    "MeshStrategy",
    "PostLocalSGD",
    "SingleDeviceStrategy",
    "XLAStrategy",
]

_LAZY = {
    "DDPStrategy": "ddp",
    "DeepSpeedStrategy": "deepspeed",
    "FSDPStrategy": "fsdp",
    "MegatronStrategy": "megatron",
    "MeshStrategy": "mesh",
    "PostLocalSGD": "local_sgd",
    "XLAStrategy": "xla",
}  # torch.distributed is only needed by those who use it


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
