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
from trainer_kit.core.types import StateDict
from trainer_kit.step.optimizers import OptimizerProxy

__all__ = ["PlainOptimizer", "Turns", "add_gradients", "copied"]


class _StoppedError(Exception):
    """Another rank has raised."""


@final
class Turns:
    """Runs one function for each rank, each in a thread, one at a time; every rank has random numbers of its own.

    Args:
        ranks: number of ranks.
        meeting: the name of what every rank must call equally often, for the error.

    Example:
        >>> turns, events = Turns(2), []
        >>> def work(rank):
        ...     events.append(f"{rank} begins")
        ...     turns.meet(rank, lambda: events.append("all are here"))
        ...     events.append(f"{rank} ends")
        >>> turns.run(work)
        >>> events
        ['0 begins', '1 begins', 'all are here', '0 ends', '1 ends']
    """

    def __init__(self, ranks: int, meeting: str = "manual_backward") -> None:
        self.ranks = ranks
        self.meeting = meeting
        self._changed = threading.Condition()
        self._turn = 0
        # The state of the random generators of each rank while another one runs.
        self._random: list[StateDict] = []
        # How often each rank has met the others.
        self._met = [0] * ranks
        self._ended: set[int] = set()
        self._error: BaseException | None = None

    def run(self, work: Callable[[int], None]) -> None:
        """Call ``work(rank)`` for each rank, and wait; raises what the first of them raises.

        Raises:
            ConfigurationError: the ranks meet a different number of times.
        """
        # Every rank starts from the state of the caller, as forked ranks do.
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
        # A rank that has ended will not come to this meeting: waiting would never end.
        if any(self._met[ended] < self._met[rank] for ended in self._ended):
            raise _uneven(self.meeting)
        # Turns go round in the order of ranks, so the last rank is the last to come.
        if rank == self.ranks - 1:
            act()
        self._pass(rank)
        self._wait(rank)

    def _work_in_turns(self, work: Callable[[int], None], rank: int) -> None:
        try:
            self._wait(rank)
            work(rank)
            if max(self._met) > self._met[rank]:
                raise _uneven(self.meeting)
        except _StoppedError:
            pass
        except BaseException as error:
            # Raised again by `run`: in a thread it would only be printed.
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
        following_ranks = (*range(rank + 1, self.ranks), *range(rank + 1))
        running = [other for other in following_ranks if other not in self._ended]
        with self._changed:
            if running:
                self._turn = running[0]
            else:
                self._turn = rank
            self._changed.notify_all()


def _uneven(meeting: str) -> ConfigurationError:
    return ConfigurationError(
        f"training_step does not call {meeting} equally often on each rank",
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
    module_parameters = [list(module.parameters()) for module in modules]
    for index, parameters in enumerate(zip(*module_parameters, strict=True)):
        gradients = [
            parameter.grad for parameter in parameters if parameter.grad is not None
        ]
        total = None
        if gradients:
            total = torch.stack(gradients).sum(0)
        earlier_gradients = [gradients_before[index] for gradients_before in before]
        for parameter, earlier in zip(parameters, earlier_gradients, strict=True):
            parameter.grad = _add(earlier, total)


def _add(earlier: Tensor | None, total: Tensor | None) -> Tensor | None:
    """The sum of two gradients, in a tensor that no other rank has."""
    if total is None:
        return earlier
    if earlier is None:
        # Every rank clips and drops its gradient in place.
        return total.clone()
    return earlier + total


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
        # Of any class: user code decides how a copy is made.
        raise ConfigurationError(
            "verify trains a copy of a module with manual optimization for each rank, and it cannot be copied",
            found=f"{type(error).__name__}: {error}",
            fix="make what cannot be copied in setup(), or verify with devices=1",
        ) from error


@final
class PlainOptimizer(OptimizerProxy):
    """An optimizer in manual optimization, without a strategy.

    Args:
        optimizer: the user's optimizer.
        before: called with the optimizer before each step.
        module: the module whose parameters `toggle_model` toggles.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        before: Callable[[Optimizer], None],
        module: TrainModule,
    ) -> None:
        super().__init__(optimizer)
        self._before = before
        self._module = module

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step the optimizer."""
        self._before(self.optimizer)
        # An optimizer of the user may have a `step` without a closure.
        if closure is None:
            return self.optimizer.step(**kwargs)
        return self.optimizer.step(closure=closure, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop this optimizer's gradients."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Only this optimizer's parameters require gradients."""
        with self._module.toggled_optimizer(self):
            yield
