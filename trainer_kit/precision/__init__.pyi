# Written by docs/generate_stubs.py from the table in __init__.py; edit that, then `make docs`.
from trainer_kit.core.lazy import NameLookup
from trainer_kit.precision.aliases import make_precision
from trainer_kit.precision.bitsandbytes import BitsandbytesPrecision
from trainer_kit.precision.exceptions import Exceptions, ModulePrecision
from trainer_kit.precision.native import MixedPrecision, TruePrecision
from trainer_kit.precision.optimizers import make_optimizer
from trainer_kit.precision.torchao import Float8Precision, QATPrecision
from trainer_kit.precision.transformer_engine import TransformerEnginePrecision

__all__ = [
    "BitsandbytesPrecision",
    "Exceptions",
    "Float8Precision",
    "MixedPrecision",
    "ModulePrecision",
    "QATPrecision",
    "TransformerEnginePrecision",
    "TruePrecision",
    "make_optimizer",
    "make_precision",
]

__getattr__: NameLookup
