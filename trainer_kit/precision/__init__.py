"""In what dtype each computation runs. A vendor's library is imported when its precision is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainer_kit.precision.exceptions import Exceptions, ModulePrecision
from trainer_kit.precision.native import MixedPrecision, TruePrecision
from trainer_kit.precision.words import make_precision

if TYPE_CHECKING:
    from trainer_kit.precision.bitsandbytes import BitsandbytesPrecision
    from trainer_kit.precision.float8 import Float8Precision
    from trainer_kit.precision.optimizers import make_optimizer
    from trainer_kit.precision.qat import QATPrecision
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

_LAZY = {
    "BitsandbytesPrecision": "bitsandbytes",
    "Float8Precision": "float8",
    "QATPrecision": "qat",
    "TransformerEnginePrecision": "transformer_engine",
    "make_optimizer": "optimizers",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
