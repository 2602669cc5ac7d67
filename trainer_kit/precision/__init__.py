"""The dtype of each computation. A vendor's library is imported when its precision is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_kit.core.lazy import lazy_names
from trainer_kit.precision.aliases import make_precision
from trainer_kit.precision.exceptions import Exceptions, ModulePrecision
from trainer_kit.precision.native import MixedPrecision, TruePrecision

if TYPE_CHECKING:
    from trainer_kit.precision.bitsandbytes import BitsandbytesPrecision
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

_HOME = {
    "BitsandbytesPrecision": "bitsandbytes",
    "Float8Precision": "torchao",
    "QATPrecision": "torchao",
    "TransformerEnginePrecision": "transformer_engine",
    "make_optimizer": "optimizers",
}
__getattr__, __dir__ = lazy_names(__name__, _HOME)
