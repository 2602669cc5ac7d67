# Written by docs/generate_stubs.py from the table in __init__.py; edit that, then `make docs`.
from trainer_kit.core.lazy import NameLookup
from trainer_kit.strategies.ddp import DDPStrategy
from trainer_kit.strategies.deepspeed.strategy import DeepSpeedStrategy
from trainer_kit.strategies.fsdp import FSDPStrategy
from trainer_kit.strategies.local_sgd import PostLocalSGD
from trainer_kit.strategies.megatron.strategy import MegatronStrategy
from trainer_kit.strategies.mesh import MeshStrategy
from trainer_kit.strategies.model_parallel import ModelParallelStrategy
from trainer_kit.strategies.single import SingleDeviceStrategy
from trainer_kit.strategies.strategy import Strategy
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

__getattr__: NameLookup
