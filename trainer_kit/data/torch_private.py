"""The private names of torch's DataLoader, checked with torch 2.13 and 2.14; no other module here names one.

`core.torch_private` has the names that other rooms use too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from operator import attrgetter
from typing import Final, Protocol, TypeGuard

from torch.utils.data import DataLoader, dataloader
from torch.utils.data._utils import worker

from trainer_kit.core.types import Batch, Function

__all__ = [
    "FETCH_FILE",
    "ITERATOR",
    "MULTIPROCESSING_CONTEXT",
    "WORKER_ITERATOR",
    "batches_read",
    "drop_iterator",
    "forget_length_warning",
    "has_workers",
    "iterator_method",
    "kept_iterator",
    "replace_worker_info",
    "shut_down_workers",
]

ITERATOR: Final = "_iterator"
"""The attribute in which a loader keeps its iterator, with persistent workers. There is no public way to end them."""
kept_iterator: Final[Callable[[DataLoader[Batch]], object]] = attrgetter(ITERATOR)

WORKER_ITERATOR: Final = "_MultiProcessingDataLoaderIter"
"""The class of an iterator with workers. Without it workers end when their iterator is collected, seconds later."""
_WorkerIterator: Final = getattr(dataloader, WORKER_ITERATOR, None)

MULTIPROCESSING_CONTEXT: Final = "_DataLoader__multiprocessing_context"
"""Where a loader keeps its multiprocessing context. Without it a copied loader copies the context too."""

# The method that makes an iterator; read from a class, to see whether it is torch's. There is no fallback: without it
# a loader of a subclass could drop, repeat or merge batches unnoticed.
iterator_method: Final[Callable[[type], Function]] = attrgetter("_get_iterator")

FETCH_FILE: Final = os.path.join("torch", "utils", "data", "_utils", "fetch.py")
"""Where torch loops over the indices of a batch. Without it no sample is named when a worker hangs."""


def drop_iterator(loader: DataLoader[Batch]) -> None:
    """Let a loader forget its iterator; its workers continue until they are shut down, or collected."""
    loader.__dict__[ITERATOR] = None


class _Workers(Protocol):
    def _shutdown_workers(self) -> None: ...


def has_workers(iterator: object) -> TypeGuard[_Workers]:
    """Whether an iterator is torch's own with workers."""
    return _WorkerIterator is not None and isinstance(iterator, _WorkerIterator)


def shut_down_workers(iterator: _Workers) -> None:
    """End the workers of an iterator that `has_workers`."""
    iterator._shutdown_workers()


def batches_read(iterator: object) -> int | None:
    """The number of batches that an iterator has yielded; None if it does not count them: only torch's do.

    Without it a StopIteration from a dataset ends an epoch unnoticed.
    """
    count: int | None = getattr(iterator, "_num_yielded", None)
    return count


def replace_worker_info(info: object) -> None:
    """Set what ``get_worker_info()`` returns in this process.

    Without it a source that divides itself among workers would read only a worker's part inside of one.
    """
    vars(worker)["_worker_info"] = info


def forget_length_warning(loader: DataLoader[Batch]) -> None:
    """Let a loader not warn about each batch beyond the length that its dataset claims to have.

    Without it torch warns.
    """
    loader.__dict__["_IterableDataset_len_called"] = None
