# Written by docs/generate_stubs.py from the table in __init__.py; edit that, then `make docs`.
from trainer_kit.core.lazy import NameLookup
from trainer_kit.strategies.deepspeed.strategy import DeepSpeedStrategy

__all__ = [
    "DeepSpeedStrategy",
]

__getattr__: NameLookup
