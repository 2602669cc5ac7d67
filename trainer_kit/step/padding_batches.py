"""Padding batches: what a rank without data runs while the other ranks need it in their collectives.

A padding batch is an earlier batch with weight 0. It has no side effects: no hook of batches or of backward is called
for it, and its values are not logged. The hook before gradients are dropped is called all the same: it belongs to the
window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor, nn

from trainer_kit.core.errors import DataError
from trainer_kit.core.protocols import Group
from trainer_kit.core.seed import preserved_rng
from trainer_kit.core.tensors import map_tensors
from trainer_kit.data import MISSING, Feed
from trainer_kit.step.side_effects import remember_effects
from trainer_kit.step.window import Window
from trainer_kit.strategies.strategy import Strategy

__all__ = [
    "PaddingBatches",
    "padded_to_longest",
    "shared_batch",
    "without_side_effects",
]

_NO_BATCH: Final = object()
# Whatever the user's loader yields.
_Batch: TypeAlias = Any


@final
class PaddingBatches:
    """The padding batches of training.

    Args:
        module: the user's.
        strategy: under which it is trained.
        move: how a batch gets onto the device, or None.
        names: of the losses, where there are several.
    """

    def __init__(
        self,
        module: nn.Module,
        strategy: Strategy,
        move: Callable[[_Batch], _Batch] | None,
        names: Sequence[str] | None,
    ) -> None:
        self._module = module
        self._strategy = strategy
        self._move = move
        self._names = names
        self._every_rank_has_one = False

    def provide(self, batches: Sequence[_Batch]) -> _Batch:
        """On a rank that never had a batch, return one of another rank's; every rank calls it, until all have one.

        Args:
            batches: those that this rank has had or is about to run, None for each that it lacks.
        """
        # Set on all ranks at the same call, so that they stop exchanging together.
        if self._every_rank_has_one:
            return None
        batch = next((batch for batch in batches if batch is not None), None)
        shared = shared_batch(batch, self._strategy.data)
        self._every_rank_has_one = True
        if batch is not None or shared is None:
            return None
        if self._move is None:
            return shared
        return self._move(shared)

    def run(self, window: Window) -> Any:
        """Run the step on a padding batch; returns the losses for its backward, all zero; None in manual mode.

        Raises:
            DataError: no rank has had a batch.
        """
        if window.earlier is None:
            raise DataError(
                "the loader is empty on all ranks",
                fix="pass a loader that has at least one batch",
            )
        effects = without_side_effects(self._module, self._strategy.device)
        # Only around the forward: backward changes gradients alone, and those are multiplied by zero.
        with window.as_padding(), effects:
            output = window.dry_run(window.earlier, window.first)
        if window.runner.manual or output is None:
            return None
        if self._names is not None:
            return {
                name: output[name] * 0.0
                for name in self._names
                if output[name] is not None
            }
        loss = output
        if isinstance(output, Mapping):
            loss = output["loss"]
        # Zero, and not no loss: backward runs the collectives of the other ranks.
        return loss * 0.0


def shared_batch(batch: _Batch, group: Group) -> _Batch:
    """A batch for each rank: its own, or a copy on the host of the batch of the first rank that has one.

    Args:
        batch: of this rank, or None.
        group: every rank of it calls this.
    """
    has_batch = [bool(row[0]) for row in group.agree([batch is not None])]
    # Nothing is sent where no rank needs it: a batch may be large.
    if all(has_batch) or not any(has_batch):
        return batch
    source = has_batch.index(True)
    on_host: _Batch = None
    if group.rank == source:
        # In a tuple, for a batch may be a bare tensor.
        (on_host,) = map_tensors((batch,), _to_host)
    (shared,) = group.broadcast((on_host,), source)
    if batch is None:
        return shared
    return batch


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.cpu()  # sync point: once in a run


def padded_to_longest(
    feed: Feed, batches: Iterator[Any], strategy: Strategy
) -> Iterator[Any]:
    """Equally many batches on every data rank: `MISSING` where this one has none, and others have.

    Args:
        feed: knows whether the numbers are equal already.
        batches: of this rank, each with its number of samples.
        strategy: its data ranks agree at each batch where the number of batches is unknown.
    """
    # Not a generator here: that would be a call for each batch.
    if not strategy.lockstep or feed.even:
        return batches
    return _agreed_batches(batches, strategy.data)


def _agreed_batches(batches: Iterator[Any], group: Group) -> Iterator[Any]:
    while True:
        batch = next(batches, _NO_BATCH)
        rows = group.agree([batch is not _NO_BATCH])
        if not any(row[0] for row in rows):
            return
        yield MISSING if batch is _NO_BATCH else batch


@contextmanager
def without_side_effects(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Undo what a step does to generators, buffers, metrics and attributes of the user's modules."""
    # The padding batch is one that has run before: it must not count twice.
    undo = remember_effects(module)
    with preserved_rng(device):
        try:
            yield
        finally:
            undo()
