"""State of a module that is no parameter and no buffer: plain attributes, which no checkpoint holds."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import torch
from torch import Tensor, nn

from trainer_kit.core.module import TrainModule
from trainer_kit.planning.verify_compare import same_bits
from trainer_kit.planning.verify_recorder import Record

__all__ = ["differing_state", "plain_attributes"]

_MOST: Final = 1000
"""Elements of a container that is compared."""


def plain_attributes(module: nn.Module) -> dict[str, str]:
    """Numbers, texts, tensors and generators that a module and its parts hold as attributes, as comparable text.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> layer.scale = 0.5
        >>> plain_attributes(nn.Sequential(layer))["0.scale"]
        '0.5'
    """
    ignored = {*vars(nn.Module()), *vars(TrainModule()), "log"}
    return {
        f"{name}.{key}" if name else key: text
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if key not in ignored and (text := _text(value)) is not None
    }


def _text(value: Any, depth: int = 3) -> str | None:
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)
    if isinstance(value, torch.Generator):
        return f"a generator in state {hash(value.get_state().numpy().tobytes())}"
    if isinstance(value, Tensor):
        readable = (
            type(value) is Tensor and not value.is_meta and value.numel() <= _MOST
        )
        return repr(value.tolist()) if readable else None
    if isinstance(value, dict):
        value = list(value.items())
    if isinstance(value, (list, tuple, deque)) and len(value) <= _MOST and depth:
        texts = [_text(element, depth - 1) for element in value]
        return (
            None
            if any(text is None for text in texts)
            else f"[{', '.join(map(str, texts))}]"
        )
    return None


def differing_state(run: list[Record], other: list[Record], step: int) -> list[str]:
    """The names of attributes, then of buffers and weights, that two runs have differently after a step."""
    for record, second in zip(run, other, strict=True):
        attributes, others = (
            record.attributes.get(step, {}),
            second.attributes.get(step, {}),
        )
        names = [
            name
            for name in {**attributes, **others}
            if attributes.get(name) != others.get(name)
        ]
        tensors, second_tensors = record.local.get(step, {}), second.local.get(step, {})
        differing = [
            name
            for name, value in tensors.items()
            if name in second_tensors and not same_bits(value, second_tensors[name])
        ]
        buffers = [name for name in differing if name in record.buffers]
        if names or differing:
            return [
                *names,
                *buffers,
                *(name for name in differing if name not in record.buffers),
            ]
    return []
