"""Where tensors live, and which processes exchange what: one file an engine; `Strategy` is their contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_kit.core.lazy import alias_package, lazy_names
from trainer_kit.strategies.single import SingleDeviceStrategy
from trainer_kit.strategies.strategy import Strategy

if (
    __name__ != "trainer_kit.strategies"
):  # imported through the link at the top of a checkout
    alias_package(__name__, "trainer_kit.strategies")

if TYPE_CHECKING:
    from trainer_kit.strategies.ddp import DDPStrategy
    from trainer_kit.strategies.deepspeed.strategy import DeepSpeedStrategy
    from trainer_kit.strategies.fsdp import FSDPStrategy
    from trainer_kit.strategies.local_sgd import PostLocalSGD
    from trainer_kit.strategies.megatron.strategy import MegatronStrategy
    from trainer_kit.strategies.mesh import MeshStrategy
    from trainer_kit.strategies.model_parallel import ModelParallelStrategy
    from trainer_kit.strategies.xla.strategy import XLAStrategy

__all__ = [
    "DDPStrategy",
    "DeepSpeedStrategy",
    "FSDPStrategy",
    "MegatronStrategy",
    "MeshStrategy",
    "ModelParallelStrategy",
    "PostLocalSGD",
    "SingleDeviceStrategy",
    "Strategy",
    "XLAStrategy",
]

_HOME = {
    "DDPStrategy": "ddp",
    "DeepSpeedStrategy": "deepspeed.strategy",
    "FSDPStrategy": "fsdp",
    "MegatronStrategy": "megatron.strategy",
    "MeshStrategy": "mesh",
    "ModelParallelStrategy": "model_parallel",
    "PostLocalSGD": "local_sgd",
    "XLAStrategy": "xla.strategy",
}  # torch.distributed is only needed by those who use it
__getattr__, __dir__ = lazy_names(__name__, _HOME)
