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
        plain = {as_plain(key): as_plain(item) for key, item in value.items()}
        # torch allows this class too; every other mapping becomes a dict.
        if type(value) is OrderedDict:
            return OrderedDict(plain)
        return plain
    if isinstance(value, list):
        return [as_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(as_plain(item) for item in value)
    if isinstance(value, (set, frozenset)):
        return {as_plain(item) for item in value}
    if isinstance(value, np.ndarray):
        # torch has no dtypes for text and dates.
        if value.dtype.kind in "biufc":
            return torch.from_numpy(value)
        return value.tolist()
    return _object_as_plain(value)


def _object_as_plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return as_plain(value.item())
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, ObjectRecord):
        return {"class_path": value.kind, "state": as_plain(value.state)}
    if isinstance(value, nn.Module):
        class_path = type_name(type(value))
        return {"class_path": class_path, "state_dict": dict(value.state_dict())}
    if isinstance(value, partial):
        class_path = as_plain(value.func)
        return {"class_path": class_path, "init_args": as_plain(value.keywords)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return as_plain(attributes_of(value))
    codec = codec_of(value)
    if codec is not None:
        return as_plain(codec.to_plain(value))
    # Last, since objects of many classes can be called.
    name = None
    if callable(value):
        name = import_path(value)
    return name or repr(value)
