"""What loggers are handed, as plain data: numbers for metrics, dicts for hyperparameters."""

from __future__ import annotations

import dataclasses
import enum
import math
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from trainer_kit.core.display import mask_secrets
from trainer_kit.core.errors import LogError

__all__ = ["flatten", "numbers", "params_dict", "plain"]


def numbers(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, int | float]:
    """The values as Python numbers, their names with ``prefix-`` in front where there is a prefix.

    Args:
        metrics: numbers, or tensors and arrays of one element.
        prefix: what names start with.

    Raises:
        LogError: a value is not one number.

    Example:
        >>> import torch
        >>> numbers({"loss": torch.tensor(0.5)}, prefix="a")
        {'a-loss': 0.5}
    """
    return {f"{prefix}-{name}" if prefix else name: _number(name, value) for name, value in metrics.items()}


def _number(name: str, value: Any) -> int | float:
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, bool) else value
    try:
        number = value.item()
    except (AttributeError, RuntimeError, ValueError):
        number = None
    if not isinstance(number, (int, float)):
        raise LogError(
            f"the metric {name!r} is not one number",
            found=f"a {type(value).__name__}{_shape(value)}",
            fix="log a number or a tensor of one element; pictures and text go through the logger's `experiment`",
        )
    return int(number) if isinstance(number, bool) else number


def params_dict(params: Any) -> dict[str, Any]:
    """Hyperparameters as a dict with text for keys, passwords and keys masked; None is an empty one.

    Args:
        params: a mapping, an ``argparse.Namespace`` or a dataclass instance; nested ones become dicts too.

    Raises:
        LogError: ``params`` is something else.

    Example:
        >>> params_dict(Namespace(lr=0.1, optim={"name": "sgd"}, api_key="k"))
        {'lr': 0.1, 'optim': {'name': 'sgd'}, 'api_key': '***'}
    """
    if params is None:
        return {}
    found = _nested(params)
    if not isinstance(found, dict):
        raise LogError(
            "hyperparameters are a dict, a Namespace or a dataclass", found=f"a {type(params).__name__}: {params!r}"
        )
    masked: dict[str, Any] = mask_secrets(found)
    return masked


def _nested(value: Any) -> Any:
    if isinstance(value, Namespace):
        value = vars(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _nested(item) for key, item in value.items()}
    return value


def flatten(params: Mapping[str, Any], delimiter: str = "/") -> dict[str, Any]:
    """One level, nested names joined; an empty mapping stays as a value.

    Example:
        >>> flatten({"optim": {"lr": 0.1, "decay": {"by": 2}}, "data": {}})
        {'optim/lr': 0.1, 'optim/decay/by': 2, 'data': {}}
    """
    flat: dict[str, Any] = {}
    for key, value in params.items():
        if isinstance(value, Mapping) and value:
            flat.update({f"{key}{delimiter}{name}": item for name, item in flatten(value, delimiter).items()})
        else:
            flat[key] = value
    return flat


def plain(value: Any) -> Any:
    """``value`` as strict JSON can hold it: NaN and infinities are text, what has no JSON form is described in text.

    Example:
        >>> import torch
        >>> plain({"betas": (0.9, 0.99), "limit": float("inf"), "dtype": torch.float16, "act": torch.relu})
        {'betas': [0.9, 0.99], 'limit': 'Infinity', 'dtype': 'torch.float16', 'act': 'relu'}
    """
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=repr)
    if _shape(value):  # tensors and arrays: a value where there is one, else only what it is
        return plain(value.item()) if math.prod(value.shape) == 1 else f"{type(value).__name__}{_shape(value)}"
    if callable(value):
        return str(getattr(value, "__name__", type(value).__name__))
    return str(value)


def _shape(value: Any) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return "" if shape is None or dtype is None else f" of shape {tuple(shape)}, {dtype}"
