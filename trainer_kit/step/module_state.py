"""What a captured step depends on of its module: attributes, tensors, hooks, and which parameters are trained."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Final, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn

from trainer_kit.core.torch_private import (
    direct_buffers,
    direct_parameters,
    direct_submodules,
)
from trainer_kit.core.types import Function
from trainer_kit.step.batch_kinds import CaptureRefused
from trainer_kit.step.torch_private import (
    has_gradient_hooks,
    have_gradient_hooks,
    hook_tables,
)

__all__ = ["ModuleState", "find_hook", "state_tensors"]

# A dict, list or set with a method `copy`.
_Container: TypeAlias = Any
_GENERATORS: Final = (
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    torch.Generator,
)
_PLAIN: Final = (int, float, str, bytes, Tensor)
"""Values that hold nothing else; most items are of these."""
_MOST_VALUES: Final = 10_000
"""Values of attributes that are compared in each step."""
_NEEDS_GRADIENT: Final = attrgetter("requires_grad")
_OF_EVERY_MODULE: Final = frozenset(vars(nn.Module()))
"""Attributes of torch's own."""


@final
class ModuleState:
    """The attributes of a module and its submodules as they are now, to notice when one of them changes.

    Comparing costs little: Python finds that two dicts hold the same objects without looking into these.

    Args:
        module: whose step is captured.
    """

    def __init__(self, module: nn.Module) -> None:
        self._containers: list[_Container] = []
        self._names: list[str] = []
        self._hooks: list[dict[int, Function]] = []
        # Tensors of one element: two of them may be equal, and yet two.
        self._single: list[tuple[_Container, str, Tensor]] = []
        for name, submodule in module.named_modules():
            for container in _containers_of(submodule):
                self._containers.append(container)
                self._names.append(name)
            self._hooks += hook_tables(submodule)
        if sum(map(len, self._containers)) > _MOST_VALUES:
            raise CaptureRefused(
                f"attributes of the module hold more than {_MOST_VALUES} values"
            )
        self._copies = [container.copy() for container in self._containers]
        for container in self._containers:
            if not isinstance(container, Mapping):
                continue
            for key, value in container.items():
                if isinstance(value, Tensor) and value.numel() == 1:
                    self._single.append((container, key, value))
        self._parameters = list(module.parameters())
        self._tensors = [*self._parameters, *state_tensors(module)]
        self._trained = list(map(_NEEDS_GRADIENT, self._tensors))

    def is_current(self) -> bool:
        """Whether everything is as it was."""
        try:
            is_same = self._containers == self._copies
        # Whether two arrays are equal has no single answer, and classes of users raise what they like: the attribute
        # has another value now.
        except Exception:
            return False
        if not is_same or any(self._hooks) or have_gradient_hooks(self._parameters):
            return False
        for container, key, tensor in self._single:
            if container.get(key) is not tensor:
                return False
        # In C: a generator would be a Python call for each parameter, in every step.
        return list(map(_NEEDS_GRADIENT, self._tensors)) == self._trained

    def restore(self) -> None:
        """Put the attributes of the module and the items of its containers back."""
        for container, copy in zip(self._containers, self._copies, strict=True):
            if isinstance(container, list):
                container[:] = copy
            elif isinstance(container, set):
                container.clear()
                container.update(copy)
            else:
                for key in [key for key in container if key not in copy]:
                    del container[key]
                for key, value in copy.items():
                    if container.get(key) is not value:
                        container[key] = value

    def find_change(self) -> str | None:
        """The name of an attribute that has changed; None if there is none."""
        for name, container, copy in zip(
            self._names, self._containers, self._copies, strict=True
        ):
            if not isinstance(container, Mapping):
                if not _are_equal(container, copy):
                    return f"a {type(container).__name__} of {name or 'the module'}"
                continue
            for key in {*container, *copy}:
                if not _are_equal(container.get(key), copy.get(key)):
                    return f"{name}.{key}".lstrip(".")
        return None


def _containers_of(module: nn.Module) -> Iterator[_Container]:
    """The dicts of one module, and its attributes that are containers."""
    attributes = vars(module)
    yield attributes
    yield direct_parameters(module)
    yield direct_buffers(module)
    yield direct_submodules(module)
    seen: set[int] = set()
    for name, value in attributes.items():
        # The Trainer changes in each step, and no graph reads it.
        if name not in _OF_EVERY_MODULE and name != "_trainer":
            yield from _nested_containers(value, seen)


def _nested_containers(value: object, seen: set[int]) -> Iterator[_Container]:
    """The dicts, lists and sets in a value, and the attributes of objects that are plain records."""
    if isinstance(value, _GENERATORS):
        raise CaptureRefused(
            f"an attribute has its own random number generator ({type(value).__name__})"
        )
    if id(value) in seen:
        return
    items: Iterable[object] = ()
    if isinstance(value, (dict, list, set)):
        seen.add(id(value))
        yield value
        items = value.values() if isinstance(value, dict) else value
    elif isinstance(value, tuple):
        items = value
    elif isinstance(value, SimpleNamespace) or is_dataclass(value):
        if not isinstance(value, type) and hasattr(value, "__dict__"):
            seen.add(id(value))
            yield vars(value)
            items = vars(value).values()
    for item in items:
        if not isinstance(item, _PLAIN):
            yield from _nested_containers(item, seen)


def _are_equal(value: object, other: object) -> bool:
    if value is other:
        return True
    try:
        return bool(value == other)
    except Exception:
        return False


def state_tensors(module: nn.Module) -> list[Tensor]:
    """The buffers of a module, and other tensors in its attributes, each once; without parameters."""
    tensors: dict[int, Tensor] = {}
    for submodule in module.modules():
        for container in _containers_of(submodule):
            values: Iterable[object] = container
            if isinstance(container, Mapping):
                values = container.values()
            for value in values:
                if isinstance(value, nn.Parameter):
                    continue
                if isinstance(value, Tensor):
                    tensors[id(value)] = value
    return list(tensors.values())


def find_hook(module: nn.Module) -> str | None:
    """What listens to a forward or to a gradient inside of the module; None if nothing does."""
    for name, submodule in module.named_modules():
        if any(hook_tables(submodule)):
            return f"a hook of {name or type(module).__name__}"
    for name, parameter in module.named_parameters():
        if has_gradient_hooks(parameter):
            return f"a hook of the gradient of {name}"
    return None
