"""The context in which a module is built on the device and in the dtype of its run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeAlias

import torch

from trainer_kit.core.empty_init import EmptyInit
from trainer_kit.precision.precision import Precision
from trainer_kit.strategies.strategy import Strategy

__all__ = ["build_context"]

_Context: TypeAlias = AbstractContextManager[object]


@contextmanager
def build_context(
    strategy: Strategy, precision: Precision, rank: int, empty_init: bool | None
) -> Iterator[None]:
    """A context that builds modules where and as the run needs them; in host memory if the run shards them.

    Args:
        strategy: of the run.
        precision: of the run.
        rank: of this process.
        empty_init: whether layers are left uninitialized, for weights that a checkpoint replaces.
    """
    device: _Context = strategy.device
    if strategy.sharded:
        # The whole module may not fit on the device.
        device = nullcontext()
    initialization: _Context = nullcontext()
    if empty_init and not strategy.sharded:
        initialization = EmptyInit()
    elif empty_init and strategy.values_on_rank_zero and rank > 0:
        # They get their parts of the first rank's values.
        device = torch.device("meta")
    with precision.init_context(), device, initialization:
        yield
