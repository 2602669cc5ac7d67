"""The words for precisions; a vendor's module is imported when its word is used."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from trainer_kit.core.errors import PrecisionError, did_you_mean
from trainer_kit.precision.native import NAMES, native_precision
from trainer_kit.precision.precision import Precision

__all__ = ["WORDS", "make_precision"]


def _float8(word: str) -> Precision:
    from trainer_kit.precision.torchao import Float8Precision

    return Float8Precision()


def _transformer_engine(word: str) -> Precision:
    from trainer_kit.precision.transformer_engine import TransformerEnginePrecision

    return TransformerEnginePrecision(
        "16-true" if word.endswith("float16") else "bf16-true"
    )


def _bitsandbytes(word: str) -> Precision:
    from trainer_kit.precision.bitsandbytes import BitsandbytesPrecision

    return BitsandbytesPrecision(word)  # type: ignore[arg-type]  # one of its modes


_VENDORS: Final[dict[str, Callable[[str], Precision]]] = {
    "fp8": _float8,
    "transformer-engine": _transformer_engine,
    "transformer-engine-float16": _transformer_engine,
    **dict.fromkeys(
        ("nf4", "nf4-dq", "fp4", "fp4-dq", "int8", "int8-training"), _bitsandbytes
    ),
}
WORDS: Final = (*NAMES, *_VENDORS)
"""Lightning's words and Accelerate's."""


def make_precision(name: str | int, device_type: str | None = None) -> Precision:
    """Create the precision of a word of Lightning or Accelerate.

    Args:
        name: one of `WORDS`.
        device_type: where it will run; by default where the Trainer runs.

    Raises:
        PrecisionError: for an unknown word, or one whose library is not installed.

    Example:
        >>> make_precision("bf16", "cpu").name
        'bf16-mixed'
    """
    alias = str(name).lower()
    if alias in NAMES:
        return native_precision(alias, device_type)
    if alias not in _VENDORS:
        # Lightning's words have no letters before 16 and 32; by spelling alone "fp16-mixed" is closest to "bf16-mixed".
        spelling = alias.replace("bfloat", "bf").replace("_", "-")
        closest = re.sub(r"^(fp|float|f)(?=16|32|64)", "", spelling)
        fix = did_you_mean(alias, WORDS)
        if closest in NAMES:
            fix = f"did you mean {closest!r}?"
        raise PrecisionError(f"unknown precision {str(name)!r}", fix=fix)
    return _VENDORS[alias](alias)
