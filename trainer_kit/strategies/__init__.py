"""Where tensors live, and which processes exchange what: one file an engine; `Strategy` is their contract."""

from __future__ import annotations

from typing import Final

from trainer_kit.core.lazy import alias_package, lazy_names, locate_names

# Imported through the link at the top of a checkout.
if __name__ != "trainer_kit.strategies":
    alias_package(__name__, "trainer_kit.strategies")

_HOMES: Final = {
    "ddp": "DDPStrategy",
    "deepspeed.strategy": "DeepSpeedStrategy",
    "fsdp": "FSDPStrategy",
    "local_sgd": "PostLocalSGD",
    "megatron.strategy": "MegatronStrategy",
    "mesh": "MeshStrategy",
    "model_parallel": "ModelParallelStrategy",
    "single": "SingleDeviceStrategy",
    "strategy": "Strategy",
    "xla.strategy": "XLAStrategy",
}
__all__ = sorted(locate_names(_HOMES))
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
