"""Runs windows twice: in smaller parts where memory ran out, or unchanged, to compare the gradients in bits."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from trainer_kit.checkpoint.files import same_bits
from trainer_kit.core.devices import ran_out_of_memory
from trainer_kit.core.errors import RankError, TrainerKitError
from trainer_kit.core.protocols import SplitsBatches
from trainer_kit.core.seed import restore_rng, rng_state
from trainer_kit.core.tensors import is_tensor, local, map_leaves, sequence_like
from trainer_kit.data.sizes import batch_size_of
from trainer_kit.metrics.metrics import Metrics
from trainer_kit.step.micro_batch import EarlyEpochExit, MicroBatches
from trainer_kit.step.side_effects import remember_effects
from trainer_kit.strategies.strategy import Strategy

__all__ = ["ReplayedSteps", "SplitBatches", "split"]

_DIVIDED = (Tensor, np.ndarray, list, tuple)  # a packed sequence is a tuple
_COUNTS = ("batch", "epoch_batch", "samples", "tokens")
_OF_MICRO = ("skipped", "padded", "contributed", "outputs", "loss", "earlier")


def split(batch: Any, parts: int) -> list[tuple[Any, int]]:
    """Divide a batch into at most ``parts`` parts of equal size, each with its number of samples.

    Every tensor, array and list with as many rows as the batch has samples is divided, and so are packed sequences and
    tuples of texts, as torch's ``default_collate`` makes them. Anything else goes to each part.

    Example:
        >>> split({"x": torch.zeros(5, 2), "names": ["a", "b", "c", "d", "e"], "scale": 2.0}, 2)[1][0]["names"]
        ['d', 'e']
    """
    size = batch_size_of(batch)
    each = -(-size // parts)

    def rows(low: int) -> tuple[Any, int]:
        high = min(low + each, size)

        def cut(part: Any) -> Any:
            if isinstance(part, PackedSequence):
                return pack_sequence(
                    unpack_sequence(part)[low:high], enforce_sorted=False
                )
            if isinstance(part, (Tensor, np.ndarray)):
                return part[low:high] if part.ndim and len(part) == size else part
            if len(part) == size and _holds_samples(part):
                return part[low:high]
            return sequence_like(
                part, [map_leaves(item, cut, _DIVIDED) for item in part]
            )

        return map_leaves(batch, cut, _DIVIDED), high - low

    return [rows(low) for low in range(0, size, each)]


def _holds_samples(part: list[Any] | tuple[Any, ...]) -> bool:
    """Whether the items are values of samples: of a tuple only texts, for numbers may be anything else."""
    if isinstance(part, tuple):
        return all(isinstance(item, (str, bytes)) for item in part)
    return not isinstance(part[0], (Tensor, list, tuple, dict))


@final
class SplitBatches:
    """Takes the place of ``strategy.forward_backward``: see `callbacks.AutoMicroBatch`.

    Ranks run a window without an exchange, agree on whether any of them ran out of memory, and then exchange gradients.

    Args:
        strategy: under which each rank can run a window without an exchange.
        inside: the context in which nothing is exchanged.
        module: whose gradients, buffers and metric objects a failed attempt has changed.
        callbacks: whose metric objects its hooks have updated.
        metrics: where a failed attempt has logged.
        loss_weight: the user's, or None for the number of samples.
        state: has ``parts``, which is kept in checkpoints.
        say: prints a line.
    """

    def __init__(
        self,
        strategy: Strategy,
        inside: Callable[[], AbstractContextManager[Any]],
        module: nn.Module,
        callbacks: Sequence[Any],
        metrics: Metrics,
        loss_weight: Callable[[Any], Any] | None,
        state: SplitsBatches,
        say: Callable[[str], None],
    ) -> None:
        self._strategy, self._inside, self._module, self._callbacks = (
            strategy,
            inside,
            module,
            callbacks,
        )
        self._metrics = metrics
        self._loss_weight, self._state, self._say = loss_weight, state, say
        self._largest = 0

    def __call__(self, micro: MicroBatches) -> None:
        """Forward and backward of one window; every rank must call it."""
        world = self._strategy.world
        while True:
            undo = self._undo(micro)
            problem = self._attempt(micro)
            rows = world.agree([problem is not None, self._largest])
            if not any(row[0] for row in rows):
                break
            undo()
            gc.collect()
            if torch.accelerator.is_available():
                torch.accelerator.empty_cache()
            if self._state.parts >= max(row[1] for row in rows):
                rank = next(rank for rank, row in enumerate(rows) if row[0])
                raise problem or RankError(
                    f"rank {rank} is out of memory with a single sample in a batch",
                    fix="use more ranks, or a smaller model",
                )
            self._state.parts *= 2
            self._say(
                f"out of memory at step {micro.started + 1}: the step is repeated, and each batch is split into"
                f" {self._state.parts} parts from here on"
            )
        self._strategy.exchange_gradients()

    def _attempt(self, micro: MicroBatches) -> Exception | None:
        """Run the window; returns the error of a rank that ran out of memory."""
        agree, agreed = micro.agree_on_exit, 0

        def counted(leaves: bool, has_batch: bool) -> bool:
            nonlocal agreed
            agreed += 1
            return agree is not None and agree(leaves, has_batch)

        micro.agree_on_exit = None if agree is None else counted
        try:
            with self._inside():
                for index in range(micro.count):
                    micro.begin(index)
                    micro.run_parts(index, list(self._parts(micro.batch)))
                    micro.end(index)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            problem = error.with_traceback(None)  # its frames hold activations
        else:
            return None
        finally:
            micro.agree_on_exit = agree
        # The other ranks agree before each of their micro-batches whether to leave the epoch.
        while agree is not None and agreed < micro.count:
            agreed += 1
            if agree(False, False):
                raise EarlyEpochExit
        return problem

    def _parts(self, batch: Any) -> Iterable[tuple[Any, float]]:
        if batch is None:
            return [(None, 1.0)]
        self._largest = max(self._largest, batch_size_of(batch))
        if self._state.parts == 1:
            return [(batch, 1.0)]
        parts = split(batch, self._state.parts)
        weigh = self._loss_weight
        weights = [
            float(size if weigh is None else weigh(part)) for part, size in parts
        ]  # sync point: where asked for
        return [
            (part, weight / sum(weights))
            for (part, _), weight in zip(parts, weights, strict=True)
            if weight
        ]

    def _undo(self, micro: MicroBatches) -> Callable[[], None]:
        """Returns what puts everything back that a window changes."""
        device, progress, module = self._strategy.device, micro.progress, self._module
        noise, logged = rng_state(device), self._metrics.undo()
        effects = remember_effects(module, self._callbacks, attributes=False)
        counts = [(name, getattr(progress, name)) for name in _COUNTS]
        kept = [(name, getattr(micro, name)) for name in _OF_MICRO]
        losses = len(micro.losses)

        def undo() -> None:
            restore_rng(noise, device)
            logged()
            effects()
            for name, count in counts:
                setattr(progress, name, count)
            for name, value in kept:
                setattr(micro, name, value)
            del micro.losses[losses:]
            micro.fresh = True
            for parameter in module.parameters():
                parameter.grad = None

        return undo


@final
class ReplayedSteps:
    """Takes the place of ``strategy.forward_backward``: see `callbacks.ReplayCheck`.

    Args:
        strategy: under which the window runs.
        inside: the context in which nothing is exchanged; None: every run exchanges.
        module: whose gradients are compared.
        every: steps between two comparisons.
    """

    def __init__(
        self,
        strategy: Strategy,
        inside: Callable[[], AbstractContextManager[Any]] | None,
        module: nn.Module,
        every: int,
    ) -> None:
        self._strategy, self._inside, self._module, self._every = (
            strategy,
            inside,
            module,
            every,
        )

    def __call__(self, micro: MicroBatches) -> None:
        """Forward and backward of one window; every rank must call it."""
        if (micro.started + 1) % self._every:
            self._strategy.forward_backward(micro)
            return
        device, module = self._strategy.device, self._module
        noise, to_start = rng_state(device), remember_effects(module, attributes=False)
        self._run(micro)
        first, loss = _gradients(module), micro.loss
        noise_after, to_end = (
            rng_state(device),
            remember_effects(module, attributes=False),
        )
        losses = len(micro.losses)
        restore_rng(noise, device)
        to_start()
        with micro.again():
            self._run(micro)
            loss_again = micro.loss
        del micro.losses[losses:]
        restore_rng(noise_after, device)
        to_end()
        again = _gradients(module)
        differ = [
            name
            for name in first
            if name not in again or not same_bits(first[name], again[name])
        ]
        self._compare(micro.started + 1, differ, [loss, loss_again])
        if self._inside is not None:
            self._strategy.exchange_gradients()

    def _run(self, micro: MicroBatches) -> None:
        if self._inside is None:
            self._strategy.forward_backward(micro)
            return
        with self._inside():
            Strategy.forward_backward(self._strategy, micro)

    def _compare(
        self, step: int, differ: list[str], losses: list[Tensor | float | None]
    ) -> None:
        world = self._strategy.world
        read = [
            torch.as_tensor(local(x), dtype=None if is_tensor(x) else torch.float64)
            for x in losses
            if x is not None
        ]
        loss = len(read) == 2 and not same_bits(*read)
        rows = world.agree([len(differ), loss])
        ranks = [rank for rank, row in enumerate(rows) if any(row)]
        if not ranks:
            return
        mine = f"{self._strategy.device}: {'the loss and ' if loss else ''}{len(differ)} gradients, first {differ[:1]}"
        found = world.all_gather_object(mine)
        raise TrainerKitError(
            f"step {step} gave different results when it was repeated on rank {', '.join(map(str, ranks))}",
            found="; ".join(f"rank {rank} on {found[rank]}" for rank in ranks),
            fix="test that device, which may be damaged; to exclude non-deterministic kernels, set deterministic=True",
        )


def _gradients(module: nn.Module) -> dict[str, Tensor]:
    """This rank's part of each, dense."""
    return {
        name: local(p.grad.detach()).to_dense().clone()
        for name, p in module.named_parameters()
        if p.grad is not None
    }
