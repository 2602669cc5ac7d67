"""Steps that all ranks of a group do together, so that what fails on one of them fails on all."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from trainer_kit.core.errors import CheckpointError, RankError

__all__ = ["Collective"]

_T = TypeVar("_T")


@final
class Collective:
    """The ranks of a group that takes CPU tensors; without a process group, this process alone.

    What they tell each other is JSON in byte tensors: torch's own collectives for objects unpickle what they receive.

    Args:
        group: its ranks must all take the same steps. None: the default group, where there is one.

    Attributes:
        rank: of this process in the group.
        size: how many they are.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        joined = dist.is_available() and dist.is_initialized()
        self.rank, self.size = (dist.get_rank(group), dist.get_world_size(group)) if joined else (0, 1)

    def each(self, do: Callable[[], _T]) -> _T:
        """Do something on every rank, and return when all have done it.

        Raises:
            CheckpointError: it failed on a rank, which is named.
            RankError: the same, for what is no failure of the storage.
        """
        done: list[_T] = []
        self.reduce(lambda: done.append(do()), lambda _: None)
        return done[0]

    def reduce(self, give: Callable[[], Any], combine: Callable[[list[Any]], Any]) -> Any:
        """What ``combine``, on the first rank, makes of what ``give`` returns on each; both return JSON.

        Raises:
            CheckpointError: one of them failed; every rank raises it, naming the rank whose ``give`` it was.
            RankError: the same, for what is no failure of the storage.
        """
        own: BaseException | None = None
        told: dict[str, Any] = {}
        try:
            told = {"value": give()}
        except BaseException as error:
            own, told = error, {"error": {"rank": self.rank, **_describe(error)}}
        everyone = self._gather(told)
        if self.rank == 0:
            failures = [one["error"] for one in everyone if "error" in one]
            if failures:
                told = {"error": failures[0]}
            else:
                try:
                    told = {"value": combine([one["value"] for one in everyone])}
                except BaseException as error:
                    own, told = error, {"error": {"rank": None, **_describe(error)}}
        told = self._broadcast(told)
        if "error" in told:
            self._raise(told["error"], own)
        return told["value"]

    def _raise(self, told: dict[str, Any], own: BaseException | None) -> None:
        shared = isinstance(own, (CheckpointError, OSError)) and self.size > 1 and told["rank"] is not None
        if own is not None and not shared:
            raise own
        where = "" if told["rank"] is None else f"rank {told['rank']}: "
        # Who catches it asks its cause whether the storage failed; the cause itself stays on its rank.
        cause = None if told["errno"] is None else OSError(told["errno"], told["text"])
        if "reason" in told:
            raise CheckpointError(told["file"], told["key"], where + told["reason"], fix=told["fix"]) from cause
        raise RankError(f"{where}{told['text']}", fix="see what that rank printed") from cause

    def _gather(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        own = _to_tensor(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([own.numel()]), group=self._group)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: own.numel()] = own
        parts = [torch.empty_like(padded) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(padded, parts, dst=self._first(), group=self._group)
        return [_from_tensor(part[: int(size)]) for part, size in zip(parts or (), sizes, strict=False)]

    def _broadcast(self, value: Any) -> Any:
        if self.size == 1:
            return value
        own = _to_tensor(value)
        size = torch.tensor([own.numel()])
        dist.broadcast(size, self._first(), group=self._group)
        buffer = own if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(buffer, self._first(), group=self._group)
        return _from_tensor(buffer)

    def _first(self) -> int:
        return 0 if self._group is None else dist.get_global_rank(self._group, 0)


def _to_tensor(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value, allow_nan=False).encode()), dtype=torch.uint8)


def _from_tensor(tensor: Tensor) -> Any:
    return json.loads(tensor.numpy().tobytes())


def _describe(error: BaseException) -> dict[str, Any]:
    cause = error if isinstance(error, OSError) else error.__cause__
    number = (cause.errno or errno.EIO) if isinstance(cause, OSError) else None
    text = str(cause) if number is not None else f"{type(error).__name__}: {error}"
    told: dict[str, Any] = {"text": text, "errno": number}
    if isinstance(error, CheckpointError):
        return {**told, "file": error.file, "key": error.key, "reason": error.reason, "fix": error.fix}
    if isinstance(error, OSError):
        file = str(error.filename or "the checkpoint")
        return {**told, "file": file, "key": None, "reason": error.strerror or text, "fix": None}
    return told
