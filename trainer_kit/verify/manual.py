"""Manual optimization in the plain loop: ranks take turns inside ``training_step``, and add their gradients by hand."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.module import TrainModule
from trainer_kit.core.seed import restore_rng, rng_state
from trainer_kit.step.optimizers import OptimizerProxy

__all__ = ["PlainOptimizer", "Turns", "add_gradients", "copied"]


class _StoppedError(Exception):
    """Another rank has raised."""


@final
class Turns:
    """Runs one function for each rank, each in a thread, one at a time; every rank has random numbers of its own.

    Args:
        ranks: how many.
        what: each calls equally often, in words.

    Example:
        >>> turns, found = Turns(2), []
        >>> def work(rank):
        ...     found.append(f"{rank} begins")
        ...     turns.meet(rank, lambda: found.append("all are here"))
        ...     found.append(f"{rank} ends")
        >>> turns.run(work)
        >>> found
        ['0 begins', '1 begins', 'all are here', '0 ends', '1 ends']
    """

    def __init__(self, ranks: int, what: str = "manual_backward") -> None:
        self.ranks, self.what = ranks, what
        self._changed = threading.Condition()
        self._turn = 0
        self._random: list[dict[str, Any]] = []
        self._met = [0] * ranks
        self._ended: set[int] = set()
        self._error: BaseException | None = None

    def run(self, work: Callable[[int], None]) -> None:
        """Call ``work(rank)`` for each rank, and wait; raises what the first of them raises.

        Raises:
            ConfigurationError: the ranks meet a different number of times.
        """
        self._random = [rng_state() for _ in range(self.ranks)]
        threads = [
            threading.Thread(target=self._work_in_turns, args=(work, rank), daemon=True)
            for rank in range(self.ranks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def meet(self, rank: int, act: Callable[[], None]) -> None:
        """Wait until every rank is here; the last one calls ``act``."""
        self._met[rank] += 1
        if any(self._met[ended] < self._met[rank] for ended in self._ended):
            raise _uneven(self.what)
        if rank == self.ranks - 1:
            act()
        self._pass(rank)
        self._wait(rank)

    def _work_in_turns(self, work: Callable[[int], None], rank: int) -> None:
        try:
            self._wait(rank)
            work(rank)
            if max(self._met) > self._met[rank]:
                raise _uneven(self.what)
        except _StoppedError:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._ended.add(rank)
            self._pass(rank)

    def _wait(self, rank: int) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._turn == rank or self._error is not None
            )
        if self._error is not None:
            raise _StoppedError
        restore_rng(self._random[rank])

    def _pass(self, rank: int) -> None:
        self._random[rank] = rng_state()
        other_ranks = [(rank + 1 + after) % self.ranks for after in range(self.ranks)]
        with self._changed:
            self._turn = next(
                (one for one in other_ranks if one not in self._ended), rank
            )
            self._changed.notify_all()


def _uneven(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"training_step does not call {what} equally often on each rank",
        fix="decide by batch_idx or global_step, which are equal on all ranks, and not by values of a batch",
    )


def add_gradients(
    modules: Sequence[nn.Module], before: Sequence[Sequence[Tensor | None]]
) -> None:
    """Add the gradients of all ranks to those that each had before.

    Args:
        modules: one for each rank, with the new gradients.
        before: the earlier gradients of each rank, in the order of its parameters.
    """
    for index, parameters in enumerate(
        zip(*(module.parameters() for module in modules), strict=True)
    ):
        gradients = [
            parameter.grad for parameter in parameters if parameter.grad is not None
        ]
        total = torch.stack(gradients).sum(0) if gradients else None
        for parameter, earlier in zip(
            parameters, (one[index] for one in before), strict=True
        ):
            if total is None:
                parameter.grad = earlier
            else:
                parameter.grad = total.clone() if earlier is None else earlier + total


def copied(module: TrainModule) -> TrainModule:
    """A copy for another rank; data sets that the module holds are shared.

    Raises:
        ConfigurationError: it cannot be copied.
    """
    shared = {
        id(value): value
        for value in vars(module).values()
        if isinstance(value, (Dataset, DataLoader))
    }
    try:
        return copy.deepcopy(module, shared)
    except Exception as error:
        raise ConfigurationError(
            "verify trains a copy of a module with manual optimization for each rank, and it cannot be copied",
            found=f"{type(error).__name__}: {error}",
            fix="make what cannot be copied in setup(), or verify with devices=1",
        ) from error


@final
class PlainOptimizer(OptimizerProxy):
    """An optimizer in manual optimization, without a strategy.

    Args:
        optimizer: the user's.
        before: called with it before each step.
        module: whose parameters `toggle_model` toggles.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        before: Callable[[Optimizer], None],
        module: TrainModule,
    ) -> None:
        super().__init__(optimizer)
        self._before, self._module = before, module

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step the optimizer."""
        self._before(self.optimizer)
        return (
            self.optimizer.step(**kwargs)
            if closure is None
            else self.optimizer.step(closure=closure, **kwargs)
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop this optimizer's gradients."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Only this optimizer's parameters require gradients."""
        with self._module.toggled_optimizer(self):
            yield
