"""Padding batches: what a rank without data runs while the other ranks need it in their collectives.

A padding batch is an earlier batch with weight 0. It has no side effects: no hook is called for it, and its values are
not logged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from trainer_kit.core.errors import DataError
from trainer_kit.core.protocols import Group
from trainer_kit.core.seed import preserved_rng
from trainer_kit.core.tensors import map_tensors
from trainer_kit.data import MISSING, Feed
from trainer_kit.step.micro_batch import MicroBatches
from trainer_kit.step.side_effects import remember_effects
from trainer_kit.strategies.strategy import Strategy

__all__ = [
    "PaddingBatches",
    "padded_to_longest",
    "shared_batch",
    "without_side_effects",
]

_OVER: Final = object()


@final
class PaddingBatches:
    """The padding batches of training.

    Args:
        micro: whose step they run.
        module: the user's.
        strategy: under which it is trained.
        move: how a batch gets onto the device, or None.
        names: of the losses, where there are several.
    """

    def __init__(
        self,
        micro: MicroBatches,
        module: nn.Module,
        strategy: Strategy,
        move: Callable[[Any], Any] | None,
        names: Sequence[str] | None,
    ) -> None:
        self._micro, self._module, self._strategy, self._move, self._names = (
            micro,
            module,
            strategy,
            move,
            names,
        )
        self._provided = False  # every rank has had a batch

    def provide(self) -> None:
        """A rank that never had a batch gets one of another rank's; every rank calls it, until all have one."""
        if self._provided:
            return
        micro = self._micro
        mine = next((batch for batch in micro.batches if batch is not None), None)
        known = next(
            (
                batch
                for batch in (mine, micro.batch, micro.earlier)
                if batch is not None
            ),
            None,
        )
        given = shared_batch(known, self._strategy.data)
        if known is None:
            micro.earlier = (
                given if self._move is None or given is None else self._move(given)
            )
        self._provided = True

    def run(self) -> Any:
        """Run the step on a padding batch; returns the losses for its backward, all zero; None in manual mode.

        Raises:
            DataError: no rank has had a batch.
        """
        micro = self._micro
        if micro.earlier is None:
            raise DataError(
                "the loader is empty on all ranks",
                fix="pass a loader that has at least one batch",
            )
        kept = micro.factors, micro.loss, micro.losses
        micro.factors, micro.losses = [0.0], []
        try:
            with without_side_effects(self._module, self._strategy.device):
                output = micro.dry_run(micro.earlier, micro.first)
        finally:
            micro.factors, micro.loss, micro.losses = kept
        if micro.manual or output is None:
            return None
        if self._names is not None:
            return {
                name: output[name] * 0.0
                for name in self._names
                if output[name] is not None
            }
        return (output["loss"] if isinstance(output, Mapping) else output) * 0.0


def shared_batch(mine: Any, group: Group) -> Any:
    """A batch for each rank: its own, or a copy on the host of the batch of the first rank that has one.

    Args:
        mine: of this rank, or None.
        group: every rank of it calls this.
    """
    has = [bool(row[0]) for row in group.agree([mine is not None])]
    if all(has) or not any(has):
        return mine
    source = has.index(True)
    on_host = map_tensors((mine,), _to_host) if group.rank == source else (None,)
    (given,) = group.broadcast(on_host, source)
    return given if mine is None else mine


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
    if not strategy.lockstep or feed.even:
        yield from batches
        return
    while True:
        batch = next(batches, _OVER)
        if not any(row[0] for row in strategy.data.agree([batch is not _OVER])):
            return
        yield MISSING if batch is _OVER else batch


@contextmanager
def without_side_effects(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Undo what a step does to generators, buffers, metrics and attributes of the user's modules."""
    undo = remember_effects(module)
    with preserved_rng(device):
        try:
            yield
        finally:
            undo()
