"""What a captured step depends on of its module: attributes, tensors, hooks, and which parameters are trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias, final

from torch import Tensor, nn

from trainer_kit.core.torch_private import (
    direct_buffers,
    direct_parameters,
    direct_submodules,
)
from trainer_kit.core.types import Function
from trainer_kit.step.torch_private import has_gradient_hooks, hook_tables

__all__ = ["ModuleState", "find_hook", "state_tensors"]

# A dict, list or set with a method `copy`.
_Container: TypeAlias = Any
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
        self._copies = [container.copy() for container in self._containers]
        for container in self._containers:
            if not isinstance(container, Mapping):
                continue
            for key, value in container.items():
                if isinstance(value, Tensor) and value.numel() == 1:
                    self._single.append((container, key, value))
        self._trained = [
            (parameter, parameter.requires_grad) for parameter in module.parameters()
        ]

    def is_current(self) -> bool:
        """Whether everything is as it was."""
        try:
            is_same = self._containers == self._copies
        # Whether two arrays are equal has no single answer: the attribute has another value now.
        except (RuntimeError, ValueError):
            return False
        if not is_same or any(self._hooks):
            return False
        for container, key, tensor in self._single:
            if container.get(key) is not tensor:
                return False
        return all(
            parameter.requires_grad is is_trained
            for parameter, is_trained in self._trained
        )

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
    for name, value in attributes.items():
        is_users = name not in _OF_EVERY_MODULE
        if is_users and isinstance(value, (dict, list, set)):
            yield value


def _are_equal(value: object, other: object) -> bool:
    try:
        return bool(value == other)
    except (RuntimeError, ValueError):
        return value is other


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
