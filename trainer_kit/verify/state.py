"""State of a module that is no parameter and no buffer: plain attributes, which no checkpoint holds."""

from __future__ import annotations

from collections import deque
from typing import Final

import torch
from torch import Tensor, nn

from trainer_kit.core.module import TrainModule
from trainer_kit.verify.compare import same_bits
from trainer_kit.verify.recorder import Record

__all__ = ["differing_state", "plain_attributes"]

_MOST: Final = 1000
"""Elements of a container that is compared."""


def plain_attributes(module: nn.Module) -> dict[str, str]:
    """Numbers, texts, tensors and generators that a module and its submodules hold as attributes, as comparable text.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> layer.scale = 0.5
        >>> plain_attributes(nn.Sequential(layer))["0.scale"]
        '0.5'
    """
    # What torch and this library store in every module; `log` is bound to the fit.
    ignored = {*vars(nn.Module()), *vars(TrainModule()), "log"}
    texts: dict[str, str] = {}
    for module_name, submodule in module.named_modules():
        prefix = ""
        if module_name:
            prefix = f"{module_name}."
        for name, value in vars(submodule).items():
            if name in ignored:
                continue
            text = _text(value)
            if text is not None:
                texts[prefix + name] = text
    return texts


def _text(value: object, depth: int = 3) -> str | None:
    """A value as text; None where two equal values may have different texts."""
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)
    if isinstance(value, torch.Generator):
        return f"a generator in state {hash(value.get_state().numpy().tobytes())}"
    if isinstance(value, Tensor):
        return _tensor_text(value)
    if isinstance(value, dict):
        value = list(value.items())
    # The repr of other objects holds their address. Long and deep containers would take a
    # noticeable part of a step, and one that contains itself has no end.
    if not isinstance(value, (list, tuple, deque)) or len(value) > _MOST or not depth:
        return None
    texts: list[str] = []
    for element in value:
        text = _text(element, depth - 1)
        if text is None:
            return None
        texts.append(text)
    return f"[{', '.join(texts)}]"


def _tensor_text(tensor: Tensor) -> str | None:
    # Subclasses, such as shards, may need a collective to show their values.
    if type(tensor) is not Tensor or tensor.is_meta or tensor.numel() > _MOST:
        return None
    return repr(tensor.tolist())


def differing_state(run: list[Record], other_run: list[Record], step: int) -> list[str]:
    """The names of attributes, then of buffers and weights, that two runs have differently after a step."""
    for record, other in zip(run, other_run, strict=True):
        # Weights come last: they differ as a consequence of state, rarely as its cause.
        names = _differing_attributes(record, other, step)
        tensors = _differing_tensors(record, other, step)
        names += [name for name in tensors if name in record.buffers]
        names += [name for name in tensors if name not in record.buffers]
        if names:
            return names
    return []


def _differing_attributes(record: Record, other: Record, step: int) -> list[str]:
    attributes = record.attributes.get(step, {})
    other_attributes = other.attributes.get(step, {})
    return [
        name
        for name in {**attributes, **other_attributes}
        if attributes.get(name) != other_attributes.get(name)
    ]


def _differing_tensors(record: Record, other: Record, step: int) -> list[str]:
    other_tensors = other.local.get(step, {})
    return [
        name
        for name, value in record.local.get(step, {}).items()
        if name in other_tensors and not same_bits(value, other_tensors[name])
    ]
