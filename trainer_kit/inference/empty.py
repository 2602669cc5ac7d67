"""Models whose parameters take no memory until their weights are loaded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["init_empty_weights", "init_on_device"]


@contextmanager
def init_empty_weights(include_buffers: bool = False) -> Iterator[None]:
    """Modules that are made inside have their parameters on the ``meta`` device: shapes and dtypes without memory.

    Parameters that two modules share stay shared. Other threads are not affected.

    Args:
        include_buffers: buffers too. By default they are real: most are computed, and stand in no checkpoint.

    Example:
        >>> with init_empty_weights():
        ...     layer = nn.Linear(20_000, 20_000)  # 1.6 GB
        >>> layer.weight.device.type, nn.Linear(2, 2).weight.device.type
        ('meta', 'cpu')
    """
    with init_on_device(torch.device("meta"), include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool = False) -> Iterator[None]:
    """Modules that are made inside have their parameters on ``device``, each moved there as soon as it is made.

    Args:
        device: where to.
        include_buffers: buffers too; then everything that is made inside is made there in the first place.

    Example:
        >>> with init_on_device("meta", include_buffers=True):
        ...     norm = nn.BatchNorm1d(3)
        >>> norm.running_mean.device.type
        'meta'
    """
    device = torch.device(device)
    thread = threading.get_ident()
    moved: Any = WeakIdKeyDictionary()  # what was registered once and is registered again is shared

    def move_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.device == device or threading.get_ident() != thread or is_lazy(parameter):
            return None
        if parameter not in moved:
            made = type(parameter)(parameter.detach().to(device), requires_grad=parameter.requires_grad)
            made.__dict__.update(parameter.__dict__)
            moved[parameter] = made
        found: nn.Parameter = moved[parameter]
        return found

    def move_buffer(module: nn.Module, name: str, buffer: Tensor | None) -> Tensor | None:
        if buffer is None or buffer.device == device or threading.get_ident() != thread:
            return None
        if buffer not in moved:
            moved[buffer] = buffer.to(device)
        found: Tensor = moved[buffer]
        return found

    with ExitStack() as stack:
        hook = register_module_parameter_registration_hook(move_parameter)  # type: ignore[arg-type]
        stack.callback(hook.remove)
        if include_buffers:
            hook = register_module_buffer_registration_hook(move_buffer)  # type: ignore[arg-type]
            stack.callback(hook.remove)
            stack.enter_context(device)
        yield
