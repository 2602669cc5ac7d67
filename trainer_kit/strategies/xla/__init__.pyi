# Written by docs/generate_stubs.py from the table in __init__.py; edit that, then `make docs`.
from trainer_kit.core.lazy import NameLookup
from trainer_kit.strategies.xla.strategy import XLAStrategy

__all__ = [
    "XLAStrategy",
]

__getattr__: NameLookup
