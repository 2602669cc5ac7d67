"""What ranks bring to a collective, compared first: torch aborts the process, or hangs, where shapes differ."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from trainer_kit.core.errors import RankError
from trainer_kit.core.protocols import Group

__all__ = ["compare", "same_everywhere", "shape_of", "signature"]


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
