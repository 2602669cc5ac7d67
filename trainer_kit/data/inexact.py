"""Loaders of which it is known that a resume within an epoch reads other samples: why, and what to use instead.

No library is imported for it: classes of others are recognized by their names. `make test-data` measures them.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from torch.utils.data import DataLoader

from trainer_kit.data.division import loader_parts
from trainer_kit.data.feed import Feed

__all__ = ["warn_if_inexact", "why_inexact"]

_MOST_OPERATIONS: Final = 10_000
"""Operations on the Hugging Face streams of a loader that are searched."""
_INTERLEAVED: Final = (
    "CyclingMultiSourcesExamplesIterable",
    "RandomlyCyclingMultiSourcesExamplesIterable",
)
"""What ``interleave_datasets`` of Hugging Face makes."""


def why_inexact(feed: Feed) -> str | None:
    """Return why a resume within an epoch reads other samples, with what to use instead; None: nothing is known.

    Example:
        >>> why_inexact(Feed(DataLoader(range(4), num_workers=2))) is None
        True
        >>> why_inexact(Feed(DataLoader(range(4), num_workers=2, in_order=False)))
        'in_order=False yields batches as its workers complete them; leave in_order=False out'
    """
    # A stream without a state is read again up to its position.
    for loader in feed.stateful_loaders:
        for find_reason in _REASONS_OF_STATES:
            reason = find_reason(loader)
            if reason is not None:
                return reason
    return _out_of_order(feed.loader)


def warn_if_inexact(feed: Feed) -> None:
    """Warn before the first batch of a run that a resume will not be exact."""
    reason = why_inexact(feed)
    if reason is not None:
        warnings.warn(
            f"resuming this {type(feed.loader).__name__} from a saved state is not exact: {reason}",
            stacklevel=3,
        )


def _shuffle_buffer(loader: object) -> str | None:
    for operation in _operations(loader):
        if type(operation).__name__ != "BufferShuffledExamplesIterable":
            continue
        size = _attribute(operation, "buffer_size")
        if isinstance(size, int) and size > 1:
            return (
                f"the data set shuffles in a buffer of {size} examples, whose content its state does not hold, so some"
                " of them are not read after a resume; use tk.data.shuffle(stream, buffer=...), or shuffle before the"
                " stream (Dataset.shuffle, then to_iterable_dataset)"
            )
    return None


def _interleaved(loader: object) -> str | None:
    if not _workers(loader):
        return None
    names = (type(operation).__name__ for operation in _operations(loader))
    if any(name in _INTERLEAVED for name in names):
        fix = "use tk.data.mix({name: stream, ...}), or num_workers=0"
        return f"interleave_datasets loses its position in workers; {fix}"
    return None


def _litdata(loader: object) -> str | None:
    if any(_is_streaming_loader(member, "litdata") for member in _loaders(loader)):
        return (
            "litdata's state ends an epoch early after a second resume; read the samples by a DataLoader over a"
            " map-style dataset, or resume from the end of the first epoch only"
        )
    return None


def _mosaic(loader: object) -> str | None:
    for member in _loaders(loader):
        if member.num_workers and _is_streaming_loader(member, "streaming"):
            return "with workers a resume between two epochs begins the first one again; use num_workers=0"
    return None


def _out_of_order(loader: object) -> str | None:
    for member in _loaders(loader):
        # Older versions of torch have no such option.
        if member.num_workers and not getattr(member, "in_order", True):
            return "in_order=False yields batches as its workers complete them; leave in_order=False out"
    return None


_REASONS_OF_STATES: Final[tuple[Callable[[object], str | None], ...]] = (
    _shuffle_buffer,
    _interleaved,
    _litdata,
    _mosaic,
)
"""Each tells why the state of a loader does not hold its position."""


def _loaders(loader: object) -> list[DataLoader[object]]:
    return [member for member in loader_parts(loader) if isinstance(member, DataLoader)]


def _workers(loader: object) -> int:
    return max((member.num_workers for member in _loaders(loader)), default=0)


def _is_streaming_loader(loader: DataLoader[object], package: str) -> bool:
    # A user's class that derives from the library's behaves like it.
    for base in type(loader).__mro__:
        in_package = base.__module__.partition(".")[0] == package
        if in_package and base.__name__ == "StreamingDataLoader":
            return True
    return False


def _operations(loader: object) -> Iterator[object]:
    """Yield the operations of the Hugging Face streams inside a loader, each once, the last ones first."""
    pending = deque(
        _attribute(member, "_ex_iterable")
        for member in loader_parts(loader)
        # Whatever the loader's state is: one without a state is read again up to its position.
        if hasattr(type(member), "state_dict")
    )
    visited: set[int] = set()
    while pending and len(visited) < _MOST_OPERATIONS:
        operation = pending.popleft()
        if operation is None or id(operation) in visited:
            continue
        visited.add(id(operation))
        yield operation
        pending.append(_attribute(operation, "ex_iterable"))
        # What interleaves or concatenates streams has several inputs.
        inputs = _attribute(operation, "ex_iterables")
        if isinstance(inputs, (list, tuple)):
            pending.extend(inputs)


def _attribute(owner: object, name: str) -> object:
    # ``__dict__``, not getattr: a user's ``__getattr__`` may compute, or raise.
    return getattr(owner, "__dict__", {}).get(name)
