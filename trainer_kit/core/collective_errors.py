"""Collectives fail on all ranks together: an error of one rank reaches the others, and tensors are compared first."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from torch import Tensor

from trainer_kit.core.errors import RankError, TrainerKitError
from trainer_kit.core.protocols import Group

__all__ = ["compare", "on_every_rank", "on_rank_zero", "same_everywhere", "shape_of", "signature", "together", "told"]

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


def shape_of(tensor: Tensor) -> str:
    """Shape and dtype.

    Example:
        >>> import torch
        >>> shape_of(torch.zeros(2, 3))
        '(2, 3) torch.float32'
    """
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def signature(data: Any, describe: Callable[[Tensor], str] = shape_of) -> str:
    """Structure, and what ``describe`` makes of each tensor; other leaves go by their type.

    Example:
        >>> import torch
        >>> signature({"a": (torch.zeros(2), 1.5)})
        "{'a': [(2,) torch.float32, float]}"
    """
    if isinstance(data, Tensor):
        return describe(data)
    if isinstance(data, (list, tuple)):
        return f"[{', '.join(signature(part, describe) for part in data)}]"
    if isinstance(data, Mapping):
        return f"{{{', '.join(f'{key!r}: {signature(part, describe)}' for key, part in data.items())}}}"
    return type(data).__name__


def same_everywhere(group: Group, call: str, data: Any) -> None:
    """Compare what all ranks are about to exchange; every rank calls it.

    Args:
        group: the ranks.
        call: the name of the collective, and what else must be equal.
        data: nested tensors.

    Raises:
        RankError: on every rank, where shapes, dtypes or structure differ.
    """
    if group.size > 1:
        compare(group, f"{call}({signature(data)})")


def compare(group: Group, call: str, numbers: tuple[float, float, float] = (0.0, 0.0, 0.0)) -> list[list[float]]:
    """Exchange a few numbers, and compare ``call`` on the way: one exchange on the CPU, always of the same size.

    Args:
        group: the ranks.
        call: must be equal on all of them.
        numbers: any.

    Returns:
        The numbers of every rank, one row a rank.

    Raises:
        RankError: on every rank, naming who brings what.
    """
    digest = int.from_bytes(hashlib.blake2b(call.encode(), digest_size=6).digest(), "little")  # exact in a float64
    rows = group.agree([digest, *numbers])
    if all(row[0] == rows[0][0] for row in rows):
        return [row[1:] for row in rows]
    ranks: dict[str, list[str]] = {}
    for rank, theirs in enumerate(group.all_gather_object(call)):
        ranks.setdefault(theirs, []).append(str(rank))
    raise RankError(
        f"the processes bring different tensors to {call.partition('(')[0]}",
        found="; ".join(f"process {', '.join(who)}: {theirs}" for theirs, who in ranks.items()),
        fix="bring the same structure, shapes and dtypes on every process: pad or cut tensors that differ in length"
        " (an Accelerator has pad_across_processes), and leave out no process",
    )
