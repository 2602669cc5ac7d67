"""Every word for a precision and what it stands for; a vendor's file is imported when its word is used."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Final

from trainer_kit.core.errors import PrecisionError, did_you_mean
from trainer_kit.precision.native import NAMES, native_precision
from trainer_kit.precision.precision import Precision

__all__ = ["WORDS", "make_precision"]

_FLOAT8, _TRANSFORMER_ENGINE, _BITSANDBYTES = "float8", "transformer_engine", "bitsandbytes"
_VENDORS: Final[dict[str, tuple[str, str, tuple[str, ...]]]] = {
    "fp8": (_FLOAT8, "Float8Precision", ()),
    "transformer-engine": (_TRANSFORMER_ENGINE, "TransformerEnginePrecision", ("bf16-true",)),
    "transformer-engine-float16": (_TRANSFORMER_ENGINE, "TransformerEnginePrecision", ("16-true",)),
    **{
        mode: (_BITSANDBYTES, "BitsandbytesPrecision", (mode,))
        for mode in ("nf4", "nf4-dq", "fp4", "fp4-dq", "int8", "int8-training")
    },
}
WORDS: Final = (*NAMES, *_VENDORS)
"""Lightning's words and Accelerate's."""


def make_precision(name: str | int, device_type: str | None = None) -> Precision:
    """The precision behind Lightning's or Accelerate's word for it.

    Args:
        name: one of `WORDS`.
        device_type: where it will run; by default where the Trainer runs.

    Raises:
        PrecisionError: for an unknown word, or one whose library is not installed.

    Example:
        >>> make_precision("bf16", "cpu").name
        'bf16-mixed'
    """
    word = str(name).lower()
    if word in NAMES:
        return native_precision(word, device_type)
    if word not in _VENDORS:
        # Lightning's words have no letters ahead of 16 and 32: "fp16-mixed" is nearer to "bf16-mixed" only in spelling.
        meant = re.sub(r"^(fp|float|f)(?=16|32|64)", "", word.replace("bfloat", "bf").replace("_", "-"))
        fix = f"did you mean {meant!r}?" if meant in NAMES else did_you_mean(word, WORDS)
        raise PrecisionError(f"unknown precision {str(name)!r}", fix=fix)
    file, kind, arguments = _VENDORS[word]
    made: Precision = getattr(import_module(f"{__package__}.{file}"), kind)(*arguments)
    return made
