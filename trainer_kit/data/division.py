"""Loaders that divide the data among ranks by themselves: recognized by attributes, or by their first batch.

No library is imported for it: a part of a loader that divides the data holds the number of ranks and its own rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer_kit.core.display import plural
from trainer_kit.core.errors import CheckpointError, DataError
from trainer_kit.core.types import Batch

__all__ = [
    "Division",
    "check_division",
    "divide_by_itself",
    "divided_for_other_ranks",
    "fingerprint",
    "loader_parts",
    "worker_parts",
]

_PARTS: Final = (
    "dataset",
    "datasets",
    "_datasets",
    "sampler",
    "batch_sampler",
    "base_sampler",
    "collate_fn",
    "source",
    "root",
    "pipeline",
    "flattened",
)
"""Attributes that hold a part of a loader, in torch, torchdata, litdata, MosaicML streaming, webdataset and
`CombinedLoader`."""

_WORKER_PARTS: Final = (
    "dataset",
    "datasets",
    "_datasets",
    "collate_fn",
    "source",
    "pipeline",
)
"""The same, for what worker processes copy."""

_ENVIRONMENTS: Final = ("distributed_env", "_distributed", "_parallel_rank_world")
"""Attributes of data sets that hold the ranks: litdata, Hugging Face ``split_dataset_by_node``, MosaicML streaming."""

_RANKS: Final = (
    ("num_replicas", "rank"),
    ("world_size", "rank"),
    ("world_size", "global_rank"),
    ("_world_size", "_rank"),
    ("num_ranks", "rank"),
    ("num_processes", "process_index"),
    ("data_parallel_size", "data_parallel_rank"),
)
"""Attributes for the number of ranks and this rank."""

_DEEPEST: Final = 6
"""Levels of parts that are searched."""
_MEMBERS: Final = 16
"""Members of a list or mapping of parts that are searched."""
_PLAIN: Final = (
    Tensor,
    np.ndarray,
    np.generic,
    bytes,
    str,
    int,
    float,
    complex,
    type(None),
)


class Division(NamedTuple):
    """How a part of a loader divides the data."""

    part: object
    """The sampler or data set that divides."""
    ranks: int
    """The number of ranks that it divides for."""
    rank: int
    """The rank whose data it yields here."""


def loader_parts(loader: object, names: tuple[str, ...] = _PARTS) -> Iterator[object]:
    """Yield a loader and the parts inside it, each once, the outer ones first.

    Example:
        >>> from torch.utils.data import DataLoader, SequentialSampler
        >>> any(isinstance(part, SequentialSampler) for part in loader_parts(DataLoader(range(3))))
        True
    """
    # By identity, since loaders may contain themselves, and equal parts are not the same.
    yielded: set[int] = set()
    level = [loader]
    for _ in range(_DEEPEST):
        next_level: list[object] = []
        for member in level:
            if id(member) in yielded:
                continue
            yielded.add(id(member))
            yield member
            next_level += _members(member, names)
        level = next_level


def _members(owner: object, names: tuple[str, ...]) -> list[object]:
    # The first members suffice: a list may be the data itself.
    if isinstance(owner, Mapping):
        return list(islice(owner.values(), _MEMBERS))
    if isinstance(owner, (list, tuple)):
        return list(owner[:_MEMBERS])
    attributes = getattr(owner, "__dict__", {})
    return [attributes[name] for name in names if attributes.get(name) is not None]


def worker_parts(loader: object) -> list[object]:
    """Return the parts of a loader that its worker processes copy, the outer ones first.

    Example:
        >>> from torch.utils.data import DataLoader, Subset
        >>> data = Subset(range(3), [0])
        >>> data in worker_parts(DataLoader(data))
        True
    """
    return list(loader_parts(loader, _WORKER_PARTS))[1:]


def _read_division(member: object) -> Division | None:
    # ``__dict__``, not getattr: properties of user classes may compute, or raise.
    attributes = getattr(member, "__dict__", {})
    environments = [attributes.get(name) for name in _ENVIRONMENTS]
    for owner in (member, *environments):
        owner_attributes = getattr(owner, "__dict__", {})
        for size_name, rank_name in _RANKS:
            size = owner_attributes.get(size_name)
            rank = owner_attributes.get(rank_name)
            if isinstance(size, int) and isinstance(rank, int):
                return Division(member, size, rank)
    return None


def divide_by_itself(
    loader: object, names: tuple[str, ...] = _PARTS
) -> Division | None:
    """Return how a loader divides the data among ranks, as far as its attributes tell; None if they do not.

    A part that was created for one rank divides nothing.

    Example:
        >>> from torch.utils.data import DataLoader, DistributedSampler
        >>> data = range(4)
        >>> division = divide_by_itself(DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=1)))
        >>> division.ranks, division.rank
        (2, 1)
    """
    for member in loader_parts(loader, names):
        division = _read_division(member)
        if division is not None and division.ranks > 1:
            return division
    return None


def check_division(division: Division, rank: int, size: int) -> None:
    """Raise `DataError` if the loader divides the data for other ranks than those of the run."""
    if (division.ranks, division.rank) != (size, rank):
        raise DataError(
            f"this {type(division.part).__name__} shards the data differently from the strategy",
            found=f"{plural(division.ranks, 'rank')}, rank {division.rank} on data rank {rank} of {size}",
            fix="let it shard the data over the data ranks, or pass use_distributed_sampler=False to leave it alone",
        )


def divided_for_other_ranks() -> CheckpointError:
    """Return the error for a position in data that a loader divides among another number of ranks."""
    return CheckpointError(
        "loaders",
        None,
        "the loader shards the data across ranks itself, so its position is valid only for the same number of ranks",
        fix="resume with the same number of ranks, or from the end of an epoch",
    )


def fingerprint(batch: Batch) -> int:
    """Return a number for the content of a batch, the same in every process, that a float64 can hold.

    Example:
        >>> import torch
        >>> fingerprint({"x": torch.ones(2)}) == fingerprint({"x": torch.ones(2)}) != fingerprint({"x": torch.zeros(2)})
        True
    """
    return _crc(batch, 0)


def _crc(value: object, crc: int, depth: int = 0) -> int:
    if isinstance(value, Mapping):
        for key, item in value.items():
            crc = _crc(key, crc, depth)
            crc = _crc(item, crc, depth)
        return crc
    if isinstance(value, (list, tuple)):
        for item in value:
            crc = _crc(item, crc, depth)
        return crc
    type_name = type(value).__qualname__.encode()
    if not isinstance(value, _PLAIN):
        # A repr may hold an address, which differs from rank to rank.
        crc = zlib.crc32(type_name, crc)
        attributes = getattr(value, "__dict__", None)
        if depth == _DEEPEST or not isinstance(attributes, dict):
            return crc
        return _crc(attributes, crc, depth + 1)
    try:
        content = _content(value)
    except Exception:
        # A tensor whose values cannot be read here, such as one on the meta device: its type counts.
        content = type_name
    return zlib.crc32(content, crc)


def _content(value: object) -> bytes:
    if isinstance(value, Tensor):
        # sync point: once in a run
        host = value.detach().cpu().contiguous()
        # As bytes, since NumPy lacks bfloat16 and other dtypes of torch.
        return host.flatten().view(torch.uint8).numpy().tobytes()
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tobytes()
    if isinstance(value, bytes):
        return value
    return repr(value).encode()
