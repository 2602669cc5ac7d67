"""The operations inside one module, by torch's `DebugMode`: a private API, so without it nothing is recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from trainer_kit.verify.torch_private import debug_mode

__all__ = ["first_other", "trace"]


def trace(
    submodule: nn.Module, sink: Callable[[], list[str] | None]
) -> list[RemovableHandle]:
    """Register hooks that record the operations of a module's forward, each as a line; returns the handles.

    Args:
        submodule: the module.
        sink: returns the lines of the current micro-batch; None: they are not recorded.
    """
    mode_class = debug_mode()
    if mode_class is None:
        return []
    # The modes of the calls that run; a module may call itself.
    running: list[Any] = []

    def begin(module: nn.Module, inputs: object) -> None:
        if sink() is not None:
            mode = mode_class(record_torchfunction=False, record_profiler_context=False)
            # Entered here and left in `end`: a forward hook cannot wrap the call.
            mode.__enter__()
            running.append(mode)

    def end(module: nn.Module, inputs: object, output: object) -> None:
        if not running:
            return
        mode = running.pop()
        mode.__exit__(None, None, None)
        lines = sink()
        if lines is not None:
            # Without results, whose numbering depends on what ran before.
            lines += [
                line.partition("  ->")[0].strip()
                for line in mode.debug_string().splitlines()
            ]

    return [
        submodule.register_forward_pre_hook(begin),
        submodule.register_forward_hook(end),
    ]


def first_other(run: Sequence[str], plain: Sequence[str]) -> str:
    """Describe the first operation that differs; empty where none does, or nothing was recorded.

    Example:
        >>> first_other(["aten::add(t, 1)", "aten::mul(t, 3)"], ["aten::add(t, 1)", "aten::mul(t, 2)"])
        'aten::mul(t, 3) in the run, aten::mul(t, 2) in the plain loop'
    """
    if not run or not plain:
        return ""
    for operation, plain_operation in zip_longest(run, plain, fillvalue="nothing"):
        if operation != plain_operation:
            return f"{operation} in the run, {plain_operation} in the plain loop"
    return ""
