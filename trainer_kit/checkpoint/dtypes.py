"""Dtypes by the names that files give them: found without evaluating or importing anything."""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np
import torch

__all__ = ["CARRIERS", "numpy_dtype", "torch_dtype"]

CARRIERS: Final = {
    getattr(torch, name): carrier
    for name, carrier in {
        "complex32": torch.float16,
        "complex64": torch.float32,
        "complex128": torch.float64,
        "float8_e4m3fnuz": torch.uint8,
        "float8_e5m2fnuz": torch.uint8,
        "float8_e8m0fnu": torch.uint8,
        "float4_e2m1fn_x2": torch.uint8,
    }.items()
    if hasattr(torch, name)
}
"""Dtypes that safetensors does not hold everywhere: flattened and looked at as these."""

_PLAIN_DTYPE: Final = re.compile(r"[<>|=](?:[biufcSU]\d{1,10}|[mM]8(?:\[\d{0,9}[a-zA-Zμ]{1,2}\])?)", re.ASCII)


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of this name; TypeError for anything else in torch."""
    # Not getattr(torch, name): some names there import whole packages.
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is not a dtype")
    return dtype


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype of numbers, strings or dates of this name; TypeError for every other one."""
    if not _PLAIN_DTYPE.fullmatch(name):  # NumPy's other notations are evaluated as Python
        raise TypeError(f"{name!r} is not a plain dtype")
    return np.dtype(name)
