# Written by docs/generate_stubs.py from the table in __init__.py; edit that, then `make docs`.
from trainer_kit.core.lazy import NameLookup
from trainer_kit.testing.conformance import check_strategy
from trainer_kit.testing.distributed import run_distributed
from trainer_kit.testing.loader_report import LoaderCheck, LoaderReport
from trainer_kit.testing.loaders import check_loader
from trainer_kit.testing.tiny import TinyModule, record_hooks

__all__ = [
    "LoaderCheck",
    "LoaderReport",
    "TinyModule",
    "check_loader",
    "check_strategy",
    "record_hooks",
    "run_distributed",
]

__getattr__: NameLookup
