"""The dtype of each computation. A vendor's library is imported when its precision is used."""

from __future__ import annotations

from typing import Final

from trainer_kit.core.lazy import lazy_names, locate_names

_HOMES: Final = {
    "aliases": "make_precision",
    "bitsandbytes": "BitsandbytesPrecision",
    "exceptions": "Exceptions ModulePrecision",
    "native": "MixedPrecision TruePrecision",
    "optimizers": "make_optimizer",
    "torchao": "Float8Precision QATPrecision",
    "transformer_engine": "TransformerEnginePrecision",
}
__all__ = sorted(locate_names(_HOMES))
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
