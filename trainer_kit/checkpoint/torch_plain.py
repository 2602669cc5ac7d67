"""Values as ``torch.load(weights_only=True)`` reads them: plain data and tensors, for files of other libraries."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping
from datetime import timedelta
from enum import Enum
from functools import partial
from pathlib import PurePath
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from trainer_kit.checkpoint.codecs import (
    ObjectRecord,
    attributes_of,
    codec_of,
    import_path,
    type_name,
)
from trainer_kit.checkpoint.encoding import EnumRecord

__all__ = ["as_plain"]

_ALLOWED: Final = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    Tensor,
    torch.Size,
    torch.dtype,
    torch.device,
    type(None),
)


def as_plain(value: Any) -> Any:
    """A value without classes of other modules: objects become their state, classes and functions their import path.

    Example:
        >>> as_plain({"root": PurePath("data"), "kind": nn.ReLU, "loss": nn.MSELoss()})["kind"]
        'torch.nn.modules.activation.ReLU'
    """
    if type(value) in _ALLOWED or isinstance(value, Tensor):
        return value
    if isinstance(value, (Enum, EnumRecord)):
        return as_plain(value.value)
    if isinstance(value, Mapping):
        items = {as_plain(key): as_plain(item) for key, item in value.items()}
        return OrderedDict(items) if type(value) is OrderedDict else items
    if isinstance(value, (list, tuple)):
        parts = [as_plain(item) for item in value]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, (set, frozenset)):
        return {as_plain(item) for item in value}
    if isinstance(value, np.ndarray):
        return (
            torch.from_numpy(value) if value.dtype.kind in "biufc" else value.tolist()
        )
    return _object_as_plain(value)


def _object_as_plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return as_plain(value.item())
    if isinstance(value, (PurePath, bytearray)):
        return str(value) if isinstance(value, PurePath) else bytes(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, ObjectRecord):
        return {"class_path": value.kind, "state": as_plain(value.state)}
    if isinstance(value, nn.Module):
        return {
            "class_path": type_name(type(value)),
            "state_dict": dict(value.state_dict()),
        }
    if isinstance(value, partial):
        return {
            "class_path": as_plain(value.func),
            "init_args": as_plain(value.keywords),
        }
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return as_plain(attributes_of(value))
    codec = codec_of(value)
    if codec is not None:
        return as_plain(codec.to_plain(value))
    return (import_path(value) if callable(value) else None) or repr(value)
