"""Makes errors collective: an error on one rank is raised on all, and tensors are compared before an exchange."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

from torch import Tensor

from trainer_kit.core.errors import RankError, TrainerKitError
from trainer_kit.core.protocols import Group
from trainer_kit.core.tensors import children
from trainer_kit.core.types import Nested

__all__ = [
    "compare",
    "fail_together",
    "on_every_rank",
    "on_rank_zero",
    "same_everywhere",
    "shape_of",
    "shared_error",
    "signature",
]

_T = TypeVar("_T")


def on_rank_zero(world: Group, act: Callable[[], _T]) -> _T:
    """Call ``act`` on rank 0 and return its result on every rank.

    Raises:
        Exception: the error of ``act``; on the other ranks a `RankError` if it is not an error of this library.
    """
    result: _T | None = None
    problem: Exception | None = None
    shared: Exception | None = None
    if world.rank == 0:
        try:
            result = act()
        except Exception as error:
            # Whatever it is: the other ranks wait in the broadcast below.
            problem = error
            shared = shared_error(error, 0)
    result, shared = world.broadcast((result, shared))
    # Rank 0 raises the error itself, with its traceback.
    if problem is not None:
        raise problem
    if shared is not None:
        raise shared
    return cast(_T, result)


def on_every_rank(world: Group, act: Callable[[], _T]) -> list[_T]:
    """Call ``act`` on every rank and return the results of all ranks, in rank order; they should be small.

    Raises:
        Exception: the error of ``act`` on this rank, else that of the first rank on which it failed, as a
            `RankError` if it is not an error of this library.
    """
    return world.all_gather_object(fail_together(world, act))


def fail_together(world: Group, act: Callable[[], _T]) -> _T:
    """Call ``act`` on every rank and return this rank's result; an error on one rank is raised on all.

    Raises:
        Exception: as in `on_every_rank`.
    """
    result: _T | None = None
    problem: Exception | None = None
    try:
        result = act()
    except Exception as error:
        # Whatever it is: the other ranks wait in the exchange below.
        problem = error
    # A number first: errors are sent only if there are any.
    if not any(row[0] for row in world.agree([problem is not None])):
        return cast(_T, result)
    shared = None
    if problem is not None:
        shared = shared_error(problem, world.rank)
    errors = world.all_gather_object(shared)
    if problem is not None:
        raise problem
    raise next(error for error in errors if error is not None)


def shared_error(error: Exception, rank: int) -> TrainerKitError:
    """Convert ``error`` for the other ranks: a `RankError` unless it is ours, for it may not be picklable."""
    if isinstance(error, TrainerKitError):
        return error
    return RankError(
        f"rank {rank}: {type(error).__name__}: {error}",
        fix=f"see what rank {rank} printed",
        disagree=False,
    )


def shape_of(tensor: Tensor) -> str:
    """The shape and dtype of a tensor as text.

    Example:
        >>> import torch
        >>> shape_of(torch.zeros(2, 3))
        '(2, 3) torch.float32'
    """
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def signature(data: Nested, describe: Callable[[Tensor], str] = shape_of) -> str:
    """The structure of ``data`` as text: ``describe`` of each tensor, and the type of every other leaf.

    Example:
        >>> import torch
        >>> signature({"a": (torch.zeros(2), 1.5)})
        "{'a': [(2,) torch.float32, float]}"
    """
    if isinstance(data, Tensor):
        return describe(data)
    members = {name: signature(child, describe) for (_, name), child in children(data)}
    if isinstance(data, (list, tuple)):
        return f"[{', '.join(members.values())}]"
    if isinstance(data, Mapping):
        items = ", ".join(f"{key!r}: {text}" for key, text in members.items())
        return f"{{{items}}}"
    name = type(data).__name__
    if not members:
        return name
    fields = ", ".join(f"{field}={text}" for field, text in members.items())
    return f"{name}({fields})"


def same_everywhere(group: Group, call: str, data: Nested) -> None:
    """Compare the data that the ranks are about to exchange. Every rank must call it.

    Args:
        group: the ranks.
        call: the name of the collective, with whatever else must be equal.
        data: nested tensors.

    Raises:
        RankError: on every rank, if shapes, dtypes or structure differ.
    """
    if group.size > 1:
        compare(group, f"{call}({signature(data)})")


def compare(
    group: Group, call: str, numbers: tuple[float, float, float] = (0.0, 0.0, 0.0)
) -> list[list[float]]:
    """Compare ``call`` over the ranks, and exchange a few numbers, in one CPU collective of fixed size.

    Args:
        group: the ranks.
        call: a text that must be equal on all ranks.
        numbers: any numbers.

    Returns:
        The numbers of every rank, one row per rank.

    Raises:
        RankError: on every rank, if ``call`` differs; the message has the text of each.
    """
    # Six bytes, which a float64 holds exactly.
    digest = hashlib.blake2b(call.encode(), digest_size=6).digest()
    rows = group.agree([int.from_bytes(digest, "little"), *numbers])
    if all(row[0] == rows[0][0] for row in rows):
        return [row[1:] for row in rows]
    # Every rank has the same rows, so all reach this second exchange; only an error needs the texts.
    ranks_by_call: dict[str, list[str]] = {}
    for rank, text in enumerate(group.all_gather_object(call)):
        ranks_by_call.setdefault(text, []).append(str(rank))
    calls = []
    for text, ranks in ranks_by_call.items():
        calls.append(f"process {', '.join(ranks)}: {text}")
    raise RankError(
        f"the processes pass different tensors to {call.partition('(')[0]}",
        found="; ".join(calls),
        fix="pass the same structure, shapes and dtypes on every process: pad or cut tensors that differ in length"
        " (an Accelerator has pad_across_processes), and leave out no process",
    )
