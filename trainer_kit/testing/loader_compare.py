"""Compare what `check_loader` has read: batches rank by rank, and the samples over all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import TypeVar, final

import numpy as np
from torch import Tensor

from trainer_kit.core.display import plural
from trainer_kit.core.tensors import children
from trainer_kit.core.types import Batch, Nested
from trainer_kit.data.division import fingerprint
from trainer_kit.data.sizes import batch_size_of
from trainer_kit.testing.loader_ranks import RankPass

__all__ = [
    "Outcome",
    "compare_batches",
    "compare_samples",
    "first_line",
    "identify_rows",
    "spread",
]

_Position = TypeVar("_Position")


@final
class Outcome(Exception):
    """Ends a check early.

    Args:
        status: of the `LoaderCheck`.
        text: of the `LoaderCheck`.
    """

    def __init__(
        self,
        status: str,
        text: str,
    ) -> None:
        self.status = status
        self.text = text
        super().__init__(status, text)


def compare_batches(
    passes: list[RankPass], expected: list[list[int]], name: str, position: int
) -> None:
    """Raise `Outcome` at the first batch of a rank that differs, from number ``position`` on."""
    for rank, rank_pass in enumerate(passes):
        batches = rank_pass.batches
        pairs = zip(
            batches,
            expected[rank],
            strict=False,
        )
        for number, (batch, expected_batch) in enumerate(pairs, position):
            if batch != expected_batch:
                text = f"{name}: batch {number} differs on rank {rank}"
                raise Outcome("fails", text)
        if len(batches) != len(expected[rank]):
            text = f"{name}: {plural(len(batches), 'batch')} in place of {len(expected[rank])} on rank {rank}"
            raise Outcome("fails", text)


def compare_samples(
    samples: Counter[Hashable], expected: Counter[Hashable], name: str
) -> None:
    """Raise `Outcome` if samples are missing or come too often."""
    repeated = sum((samples - expected).values())
    missing = sum((expected - samples).values())
    if repeated or missing:
        text = f"{name}: {plural(missing, 'sample')} missing, {repeated} too many"
        raise Outcome("fails", text)


def identify_rows(batch: Batch) -> list[Hashable]:
    """Return a number for the content of each sample: of each row in all tensors, arrays and lists of a batch."""
    count = batch_size_of(batch)
    rows: list[list[object]] = [[] for _ in range(count)]
    for leaf in _leaves(batch):
        # A value without one entry for each sample belongs to all of them.
        if len(leaf) == count:
            for row, entry in zip(
                rows,
                leaf,
                strict=True,
            ):
                row.append(entry)
    return [fingerprint(row) for row in rows]


def _leaves(node: Nested) -> Iterator[Tensor | np.ndarray | list[str]]:
    if isinstance(node, (Tensor, np.ndarray)):
        if node.ndim:
            yield node
    elif isinstance(node, list) and all(isinstance(entry, str) for entry in node):
        yield node
    else:
        for _, child in children(node):
            yield from _leaves(child)


def spread(positions: Sequence[_Position], limit: int | None) -> list[_Position]:
    """Return at most ``limit`` positions, with the first and the last.

    Example:
        >>> spread([1, 2, 3, 4], None), spread(range(1, 101), 3)
        ([1, 2, 3, 4], [1, 50, 100])
    """
    if limit is None or len(positions) <= limit:
        return list(positions)
    indices = np.linspace(
        0,
        len(positions) - 1,
        limit,
    )
    return [positions[int(index)] for index in indices]


def first_line(error: Exception) -> str:
    """Return the class of an error and the first line of its message."""
    message = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {message}"
