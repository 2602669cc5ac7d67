"""`token_budget`: batches of samples of different lengths that cost about the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias, final

import numpy as np
from torch.utils.data import Sampler

from trainer_kit.core.arguments import typed_function
from trainer_kit.core.display import plural
from trainer_kit.core.errors import DataError
from trainer_kit.data.order import (
    derive_seed,
    length_of,
)
from trainer_kit.data.source import kind_of
from trainer_kit.data.streams import (
    Indexed,
    Sample,
)

__all__ = ["TokenBudget", "token_budget"]

_Lengths: TypeAlias = Sequence[int] | np.ndarray
_POOL: Final = 100
"""Batches whose samples are sorted by length together: more of them need less padding, and mix fewer lengths."""


@typed_function
def token_budget(
    dataset: Indexed,
    tokens: int,
    length: _Lengths | Callable[[Sample], int] = len,
    *,
    padded: bool = True,
    shuffle: bool = True,
    seed: int = 0,
) -> TokenBudget:
    """Return a batch sampler whose batches have as many samples as fit into a number of tokens.

    With ``shuffle`` samples of similar length share a batch, so that little is padded, and batches come in random
    order: a function of the seed and the epoch. Every sample comes once in an epoch. On several ranks each step takes
    consecutive batches, which cost about the same; a step is the mean over its samples, whatever their number, or over
    its tokens with ``loss_weight``.

    Args:
        dataset: map-style, or a list of samples.
        tokens: the most tokens of a batch (``max_tokens`` elsewhere).
        length: the length of each sample, or a function that returns it for a sample, called once for each.
        padded: count the longest sample of a batch for each of its samples, as a ``collate_fn`` that pads needs; False:
            the sum of lengths.
        shuffle: False: in the order of the dataset, for evaluation.
        seed: of the order.

    Returns:
        For ``DataLoader(dataset, batch_sampler=...)``.

    Raises:
        DataError: a sample that is longer than the budget, a wrong number of lengths, or a stream.

    Example:
        >>> dataset = ["a" * length for length in (5, 1, 4, 2, 2, 6)]
        >>> batches = token_budget(dataset, tokens=8, shuffle=False)
        >>> list(batches), batches.costs()
        ([[0], [1, 2], [3, 4], [5]], [5, 8, 4, 6])
    """
    count = length_of(dataset)
    if count is None:
        raise DataError(
            "a token budget needs the length of every sample",
            found=f"{kind_of(dataset)} without __len__",
            fix="pass a map-style dataset; a stream of documents is packed by trainer_kit.data.pack",
        )
    if callable(length):
        measured = _measure(
            dataset,
            count,
            length,
        )
    else:
        measured = np.asarray(length)
    lengths = _as_counts(measured)
    if lengths.shape != (count,):
        raise DataError(
            "a token budget needs one length for each sample",
            found=f"{plural(count, 'sample')}, lengths of shape {lengths.shape}",
        )
    longest = int(lengths.max(initial=0))
    if longest > tokens:
        index = int(lengths.argmax())
        raise DataError(
            "a sample is longer than the token budget of a batch",
            found=f"sample {index} with {plural(longest, 'token')}, tokens={tokens}",
            fix="cut the sample in the dataset, or raise tokens=",
        )
    return TokenBudget(
        lengths,
        tokens,
        padded=padded,
        shuffle=shuffle,
        seed=seed,
    )


def _measure(
    dataset: Indexed, count: int, length: Callable[[Sample], int]
) -> np.ndarray:
    lengths = []
    for index in range(count):
        sample = dataset[index]
        # Their number of entries is no number of tokens.
        if length is len and isinstance(sample, (dict, tuple)):
            raise DataError(
                "a token budget does not know the tokens of these samples",
                found=f"a {kind_of(sample)} of {len(sample)}",
                fix='pass length=, such as lambda sample: len(sample["input_ids"])',
            )
        lengths.append(length(sample))
    return np.array(lengths)


def _as_counts(lengths: np.ndarray) -> np.ndarray:
    """The lengths as int64.

    Raises:
        DataError: they are not whole, or below 0: a batch would have more tokens than the budget.
    """
    is_whole = lengths.dtype.kind in "iu" or not lengths.size
    if not is_whole or lengths.min(initial=0) < 0:
        raise DataError(
            "the lengths of samples are integers ≥ 0",
            found=f"{lengths.dtype} from {lengths.min(initial=0)}",
            fix="count the tokens of each sample",
        )
    return lengths.astype(np.int64)


@final
class TokenBudget(Sampler[list[int]]):
    """The result of `token_budget`.

    Args:
        lengths: int64, shape (samples,).
        tokens: the most tokens of a batch.
        padded: whether a batch costs its longest sample for each of its samples.
        shuffle: whether samples are sorted by length in parts, and batches shuffled.
        seed: of the order.

    Example:
        >>> batches = token_budget(["aaa", "b", "cc", "dd"], tokens=4, shuffle=False)
        >>> type(batches).__name__, list(batches)
        ('TokenBudget', [[0], [1, 2], [3]])
    """

    def __init__(
        self,
        lengths: np.ndarray,
        tokens: int,
        *,
        padded: bool,
        shuffle: bool,
        seed: int,
    ) -> None:
        self.lengths = lengths
        self.tokens = tokens
        self.padded = padded
        self.shuffle = shuffle
        self.seed = seed
        self._epoch = 0
        self._batches: list[list[int]] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the order; a Trainer does so.

        Args:
            epoch: the number of the epoch, from 0; each has another order if ``shuffle`` is True.
        """
        if epoch != self._epoch:
            self._batches = None
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._read_batches())

    def __len__(self) -> int:
        return len(self._read_batches())

    def costs(self) -> list[int]:
        """Return the tokens of each batch of this epoch, with padding if that counts."""
        costs = []
        for batch in self._read_batches():
            lengths = self.lengths[batch]
            if self.padded:
                costs.append(int(lengths.max()) * len(batch))
            else:
                costs.append(int(lengths.sum()))
        return costs

    def _read_batches(self) -> list[list[int]]:
        # A loader asks for the length and for the batches: both are of one order.
        if self._batches is None:
            if self.shuffle:
                self._batches = self._shuffled_batches()
            else:
                self._batches = list(self._fill(np.arange(len(self.lengths))))
        return self._batches

    def _shuffled_batches(self) -> list[list[int]]:
        draw = np.random.default_rng(derive_seed(self.seed, self._epoch))
        order = draw.permutation(len(self.lengths))
        total = max(int(self.lengths.sum()), 1)
        # As many samples as fill the batches of a pool on average.
        pool_size = _POOL * self.tokens * len(order) // total + 1
        batches: list[list[int]] = []
        waiting: list[int] = []
        for first in range(
            0,
            len(order),
            pool_size,
        ):
            pool = np.concatenate([waiting, order[first : first + pool_size]])
            pool = pool.astype(np.int64)
            by_length = np.argsort(
                self.lengths[pool],
                kind="stable",
            )
            filled = list(self._fill(pool[by_length]))
            # The last batch is not full: its samples go to the next pool.
            waiting = filled.pop()
            batches += [filled[index] for index in draw.permutation(len(filled))]
        if waiting:
            # It has the longest samples, which would otherwise end every epoch.
            index = int(draw.integers(len(batches) + 1))
            batches.insert(index, waiting)
        return batches

    def _fill(self, order: np.ndarray) -> Iterator[list[int]]:
        """Yield batches of consecutive samples, each as large as the budget allows."""
        batch: list[int] = []
        longest = 0
        total = 0
        lengths = self.lengths[order].tolist()
        for index, length in zip(
            order.tolist(),
            lengths,
            strict=True,
        ):
            longest = max(longest, length)
            total += length
            cost = total
            if self.padded:
                cost = longest * (len(batch) + 1)
            if batch and cost > self.tokens:
                yield batch
                batch = []
                longest = length
                total = length
            batch.append(index)
        if batch:
            yield batch
