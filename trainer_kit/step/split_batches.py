"""Runs windows twice: in smaller parts where memory ran out, or unchanged, to compare the gradients bit for bit."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from trainer_kit.checkpoint.files import same_bits
from trainer_kit.core.devices import ran_out_of_memory
from trainer_kit.core.errors import RankError, TrainerKitError
from trainer_kit.core.protocols import DoublesParts
from trainer_kit.core.seed import restore_rng, rng_state
from trainer_kit.core.tensors import local, map_leaves, sequence_like
from trainer_kit.data.sizes import batch_size_of
from trainer_kit.metrics.metrics import Metrics
from trainer_kit.step.optimizers import drop_gradients
from trainer_kit.step.side_effects import remember_effects
from trainer_kit.step.window import Window
from trainer_kit.strategies.strategy import Strategy

__all__ = ["ReplayedSteps", "SplitBatches", "split"]

# A packed sequence is a tuple.
_DIVIDED = (Tensor, np.ndarray, list, tuple)
# Whatever the user's loader yields.
_Batch: TypeAlias = Any
_Context: TypeAlias = Callable[[], AbstractContextManager[object]]


def split(batch: _Batch, parts: int) -> list[tuple[_Batch, int]]:
    """Divide a batch into at most ``parts`` parts of equal size, each with its number of samples.

    Every tensor, array and list with as many rows as the batch has samples is divided, and so are packed sequences and
    tuples of texts, as torch's ``default_collate`` makes them. Anything else goes to each part.

    Example:
        >>> split({"x": torch.zeros(5, 2), "names": ["a", "b", "c", "d", "e"], "scale": 2.0}, 2)[1][0]["names"]
        ['d', 'e']
    """
    size = batch_size_of(batch)
    # Rounded up: fewer parts rather than more.
    part_size = -(-size // parts)
    slices = [
        slice(low, min(low + part_size, size)) for low in range(0, size, part_size)
    ]
    return [(_cut(batch, rows, size), rows.stop - rows.start) for rows in slices]


def _cut(batch: _Batch, rows: slice, size: int) -> _Batch:
    """The rows of a batch of ``size`` samples; what has another number of rows is left as it is."""

    def cut(value: Any) -> Any:
        if isinstance(value, PackedSequence):
            return pack_sequence(unpack_sequence(value)[rows], enforce_sorted=False)
        if isinstance(value, (Tensor, np.ndarray)):
            has_samples = value.ndim and len(value) == size
            if has_samples:
                return value[rows]
            return value
        if len(value) == size and _holds_samples(value):
            return value[rows]
        return sequence_like(value, [map_leaves(item, cut, _DIVIDED) for item in value])

    return map_leaves(batch, cut, _DIVIDED)


def _holds_samples(items: Sequence[object]) -> bool:
    """Whether the items are values of samples: of a tuple only texts, for numbers may be anything else."""
    if isinstance(items, tuple):
        return all(isinstance(item, (str, bytes)) for item in items)
    return not isinstance(items[0], (Tensor, list, tuple, dict))


@final
class SplitBatches:
    """Replaces ``strategy.forward_backward``: see `callbacks.AutoMicroBatch`.

    Ranks run a window without an exchange, agree on whether any of them ran out of memory, and then exchange gradients.

    Args:
        strategy: under which each rank can run a window without an exchange.
        without_exchange: the context in which nothing is exchanged.
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
        without_exchange: _Context,
        module: nn.Module,
        callbacks: Sequence[object],
        metrics: Metrics,
        loss_weight: Callable[[_Batch], Any] | None,
        state: DoublesParts,
        say: Callable[[str], None],
    ) -> None:
        self._strategy = strategy
        self._without_exchange = without_exchange
        self._module = module
        self._callbacks = callbacks
        self._metrics = metrics
        self._loss_weight = loss_weight
        self._state = state
        self._say = say
        self._largest_batch = 0  # samples

    def __call__(self, window: Window) -> None:
        """Forward and backward of one window; every rank must call it."""
        world = self._strategy.world
        # Each attempt exchanges nothing but the votes below: a rank that failed in the middle of a window would leave
        # the others in an exchange of gradients.
        while True:
            undo = self._remember(window)
            problem = self._attempt(window)
            rows = world.agree([problem is not None, self._largest_batch])
            failed_ranks = [rank for rank, row in enumerate(rows) if row[0]]
            if not failed_ranks:
                break
            undo()
            # What the failed attempt allocated must be free before the next one.
            gc.collect()
            if torch.accelerator.is_available():
                torch.accelerator.empty_cache()
            # The largest batch of any rank, so that all of them raise: parts of one sample cannot be divided.
            if self._state.parts >= max(row[1] for row in rows):
                raise problem or RankError(
                    f"rank {failed_ranks[0]} is out of memory with a single sample in a batch",
                    fix="use more ranks, or a smaller model",
                    disagree=False,
                )
            self._state.double_parts()
            self._say(
                f"out of memory at step {window.started + 1}: the step is repeated, and each batch is split into"
                f" {self._state.parts} parts from here on"
            )
        self._strategy.exchange_gradients()

    def _attempt(self, window: Window) -> Exception | None:
        """Run the window; returns the error of a rank that ran out of memory."""
        agreement = window.runner.agree_on_exit
        rounds = 0
        if agreement is not None:
            rounds = agreement.rounds
        try:
            with self._without_exchange():
                for index in range(window.count):
                    window.begin(index)
                    window.run_parts(index, self._parts(window.batch))
                    window.end(index)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            # The frames of the traceback hold activations.
            problem = error.with_traceback(None)
        else:
            return None
        # The other ranks agree before each of their micro-batches whether to leave the epoch.
        if agreement is not None:
            agreement.catch_up(rounds + window.count)
        return problem

    def _parts(self, batch: _Batch) -> list[tuple[_Batch, float]]:
        """The parts of a batch, each with its share of the weight."""
        if batch is None:
            return [(None, 1.0)]
        self._largest_batch = max(self._largest_batch, batch_size_of(batch))
        if self._state.parts == 1:
            return [(batch, 1.0)]
        parts = split(batch, self._state.parts)
        weights = [self._weigh(micro_batch, size) for micro_batch, size in parts]
        total = sum(weights)
        if not total:
            # The window gives it no weight, but a rank without a backward would keep its gradients of the last step.
            return [(parts[0][0], 1.0)]
        weighted_parts = zip(parts, weights, strict=True)
        return [
            (micro_batch, weight / total)
            for (micro_batch, _), weight in weighted_parts
            if weight
        ]

    def _weigh(self, part: _Batch, size: int) -> float:
        if self._loss_weight is None:
            return float(size)  # no sync point: a number
        return float(self._loss_weight(part))  # sync point: where asked for

    def _remember(self, window: Window) -> Callable[[], None]:
        """Return a function that undoes everything that the window changes."""
        device = self._strategy.device
        random_state = rng_state(device)
        undo_logs = self._metrics.undo()
        undo_effects = remember_effects(self._module, self._callbacks, attributes=False)
        undo_window = window.remember()

        def undo() -> None:
            restore_rng(random_state, device)
            undo_logs()
            undo_effects()
            undo_window()
            # Those of the part that fitted into memory.
            drop_gradients(self._module.parameters())

        return undo


@final
class ReplayedSteps:
    """Replaces ``strategy.forward_backward``: see `callbacks.ReplayCheck`.

    Args:
        strategy: under which the window runs.
        without_exchange: the context in which nothing is exchanged; None: every run exchanges.
        module: whose gradients are compared.
        every: steps between two comparisons.
    """

    def __init__(
        self,
        strategy: Strategy,
        without_exchange: _Context | None,
        module: nn.Module,
        every: int,
    ) -> None:
        self._strategy = strategy
        self._without_exchange = without_exchange
        self._module = module
        self._every = every

    def __call__(self, window: Window) -> None:
        """Forward and backward of one window; every rank must call it."""
        if (window.started + 1) % self._every:
            self._strategy.forward_backward(window)
            return
        return_to_start = self._remember()
        self._run(window)
        gradients, losses = _gradients(self._module), window.runner.losses
        return_to_end, noted_losses = self._remember(), len(losses)
        # The second run must see the same weights, buffers and random numbers.
        return_to_start()
        with window.repeated() as repeated:
            self._run(repeated)
        # Losses are noted for the repeated run, too, and it has drawn: the fit goes on from the end of the first run.
        losses.drop_after(noted_losses)
        return_to_end()
        differing = _differing(gradients, _gradients(self._module))
        self._compare(window.started + 1, differing, [window.loss, repeated.loss])
        if self._without_exchange is not None:
            self._strategy.exchange_gradients()

    def _remember(self) -> Callable[[], None]:
        """Return a function that restores generators, buffers and metric objects as they are now."""
        device = self._strategy.device
        random_state = rng_state(device)
        undo_effects = remember_effects(self._module, attributes=False)

        def restore() -> None:
            restore_rng(random_state, device)
            undo_effects()

        return restore

    def _run(self, window: Window) -> None:
        if self._without_exchange is None:
            self._strategy.forward_backward(window)
            return
        # The plain order of micro-batches: the strategy's would exchange gradients after the last one.
        with self._without_exchange():
            Strategy.forward_backward(self._strategy, window)

    def _compare(
        self, step: int, differing: list[str], losses: list[Tensor | float | None]
    ) -> None:
        """Raise on every rank where gradients or losses of any rank differ."""
        world, device = self._strategy.world, self._strategy.device
        values = [_as_tensor(loss) for loss in losses if loss is not None]
        loss_differs = len(values) == 2 and not same_bits(*values)
        rows = world.agree([len(differing), loss_differs])
        ranks = [rank for rank, row in enumerate(rows) if any(row)]
        if not ranks:
            return
        loss_text = ""
        if loss_differs:
            loss_text = "the loss and "
        description = (
            f"{device}: {loss_text}{len(differing)} gradients, first {differing[:1]}"
        )
        descriptions = world.all_gather_object(description)
        raise TrainerKitError(
            f"step {step} gave different results when it was repeated on rank {', '.join(map(str, ranks))}",
            found="; ".join(f"rank {rank} on {descriptions[rank]}" for rank in ranks),
            fix="test that device, which may be damaged; to exclude non-deterministic kernels, set deterministic=True",
        )


def _as_tensor(loss: Tensor | float) -> Tensor:
    if isinstance(loss, Tensor):
        return torch.as_tensor(local(loss))
    return torch.as_tensor(loss, dtype=torch.float64)


def _gradients(module: nn.Module) -> dict[str, Tensor]:
    """This rank's part of each, dense."""
    gradients: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            shard = local(parameter.grad.detach())
            gradients[name] = shard.to_dense().clone()
    return gradients


def _differing(
    gradients: Mapping[str, Tensor], repeated: Mapping[str, Tensor]
) -> list[str]:
    """The names of the gradients that the second run did not repeat in every bit."""
    return [
        name
        for name, gradient in gradients.items()
        if name not in repeated or not same_bits(gradient, repeated[name])
    ]
