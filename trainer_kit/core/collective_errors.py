"""What ranks do together: where it fails on one of them it fails on all, so that nobody waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from trainer_kit.core.errors import RankError, TrainerKitError
from trainer_kit.core.protocols import Group

__all__ = ["on_every_rank", "on_rank_zero", "together", "told"]

_T = TypeVar("_T")


def on_rank_zero(world: Group, act: Callable[[], _T]) -> _T:
    """What ``act`` returns, on every rank; only rank 0 calls it.

    Raises:
        Exception: what ``act`` raised; where it is none of this library's, a `RankError` on the other ranks.
    """
    done: _T | None = None
    problem: Exception | None = None
    others: Exception | None = None
    if world.rank == 0:
        try:
            done = act()
        except Exception as error:  # whatever it is, the others wait to hear of it
            problem, others = error, told(error, 0)
    done, others = world.broadcast((done, others))
    problem = problem or others
    if problem is not None:
        raise problem
    return cast(_T, done)


def on_every_rank(world: Group, act: Callable[[], _T]) -> list[_T]:
    """What ``act`` returns on each rank, in rank order; every rank calls it, and small values are what it returns.

    Raises:
        Exception: what ``act`` raised here; else what it raised on the first rank where it did. Where that is none of
            this library's, a `RankError`.
    """
    done: _T | None = None
    problem: Exception | None = None
    try:
        done = act()
    except Exception as error:  # whatever it is, the others wait for this rank
        problem = error
    everyone = world.all_gather_object((done, problem and told(problem, world.rank)))
    problem = problem or next((other for _, other in everyone if other is not None), None)
    if problem is not None:
        raise problem
    return [cast(_T, one) for one, _ in everyone]


def together(world: Group, act: Callable[[], _T]) -> _T:
    """What ``act`` returns here; every rank calls it, and where it fails on one of them it fails on all.

    Raises:
        Exception: as `on_every_rank`.
    """
    done: list[_T] = []
    on_every_rank(world, lambda: done.append(act()))
    return done[0]


def told(error: Exception, rank: int) -> TrainerKitError:
    """What the other ranks hear of it: another's error may not be what can travel."""
    if isinstance(error, TrainerKitError):
        return error
    return RankError(f"rank {rank}: {type(error).__name__}: {error}", fix=f"see what rank {rank} printed")
