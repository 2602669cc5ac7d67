"""Steps that all ranks of a group take together: a failure on one rank raises on all ranks."""

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

    Ranks exchange JSON in byte tensors: torch's object collectives unpickle what they receive.

    Args:
        group: all its ranks must take the same steps. None: the default group, if there is one.

    Attributes:
        rank: the rank of this process in the group.
        size: the number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        joined = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if joined else 0
        self.size = dist.get_world_size(group) if joined else 1

    def each(self, do: Callable[[], _T]) -> _T:
        """Call ``do`` on every rank; return this rank's result when all ranks are done.

        Raises:
            CheckpointError: saving or loading failed on a rank, which is named.
            RankError: another error on a rank, which is named.
        """
        done: list[_T] = []
        self.reduce(lambda: done.append(do()), lambda _: None)
        return done[0]

    def reduce(
        self, give: Callable[[], Any], combine: Callable[[list[Any]], Any]
    ) -> Any:
        """Call ``give`` on each rank, and ``combine`` on the first rank with all results; return its result everywhere.

        Both functions return JSON values.

        Raises:
            CheckpointError: on every rank, if a call failed while saving or loading; a rank whose ``give`` failed is
                named.
            RankError: likewise, for any other error.
        """
        own, message = self._attempt(give, self.rank)
        messages = self._gather(message)
        if self.rank == 0:
            failures = [one for one in messages if "error" in one]
            if failures:
                message = failures[0]
            else:
                own, message = self._attempt(
                    lambda: combine([one["value"] for one in messages]), None
                )
        message = self._broadcast(message)
        if "error" in message:
            self._raise(message["error"], own)
        return message["value"]

    def _attempt(
        self, call: Callable[[], Any], rank: int | None
    ) -> tuple[BaseException | None, dict[str, Any]]:
        """Call a function; return its error, and a message for the other ranks: its value or the error."""
        try:
            return None, {"value": call()}
        except BaseException as error:
            return error, {"error": {"rank": rank, **_describe(error)}}

    def _raise(self, error: dict[str, Any], own: BaseException | None) -> None:
        shared = (
            isinstance(own, (CheckpointError, OSError))
            and self.size > 1
            and error["rank"] is not None
        )
        if own is not None and not shared:
            raise own
        where = "" if error["rank"] is None else f"rank {error['rank']}: "
        # Callers check the cause for an OSError; the original cause exists only on its rank.
        cause = (
            None if error["errno"] is None else OSError(error["errno"], error["text"])
        )
        if "reason" in error:
            raise CheckpointError(
                error["file"], error["key"], where + error["reason"], fix=error["fix"]
            ) from cause
        raise RankError(
            f"{where}{error['text']}", fix="see what that rank printed"
        ) from cause

    def _gather(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        own = _to_tensor(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([own.numel()]), group=self._group)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: own.numel()] = own
        parts = (
            [torch.empty_like(padded) for _ in range(self.size)]
            if self.rank == 0
            else None
        )
        dist.gather(padded, parts, dst=self._first(), group=self._group)
        return [
            _from_tensor(part[: int(size)])
            for part, size in zip(parts or (), sizes, strict=False)
        ]

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
    return torch.frombuffer(
        bytearray(json.dumps(value, allow_nan=False).encode()), dtype=torch.uint8
    )


def _from_tensor(tensor: Tensor) -> Any:
    return json.loads(tensor.numpy().tobytes())


def _describe(error: BaseException) -> dict[str, Any]:
    cause = error if isinstance(error, OSError) else error.__cause__
    number = (cause.errno or errno.EIO) if isinstance(cause, OSError) else None
    text = str(cause) if number is not None else f"{type(error).__name__}: {error}"
    found: dict[str, Any] = {"text": text, "errno": number}
    if isinstance(error, CheckpointError):
        return {
            **found,
            "file": error.file,
            "key": error.key,
            "reason": error.reason,
            "fix": error.fix,
        }
    if isinstance(error, OSError):
        file = str(error.filename or "the checkpoint")
        return {
            **found,
            "file": file,
            "key": None,
            "reason": error.strerror or text,
            "fix": None,
        }
    return found
