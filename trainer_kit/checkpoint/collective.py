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
from trainer_kit.core.protocols import MANY_RANKS

__all__ = ["Collective"]

_T = TypeVar("_T")
_Json = object
"""A value that JSON can hold."""
_Message = dict[str, Any]
_Combine = Callable[[list[Any]], _Json]


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
        self.rank = 0
        self.size = 1
        if dist.is_available() and dist.is_initialized():
            self.rank = dist.get_rank(group)
            self.size = dist.get_world_size(group)

    def each(self, do: Callable[[], _T]) -> _T:
        """Call ``do`` on every rank; return this rank's result when all ranks are done.

        Raises:
            CheckpointError: saving or loading failed on a rank, which is named.
            RankError: another error on a rank, which is named.
        """
        results: list[_T] = []
        self.reduce(lambda: results.append(do()), lambda _: None)
        return results[0]

    def reduce(
        self,
        give: Callable[[], _Json],
        combine: _Combine,
    ) -> Any:
        """Call ``give`` on each rank, and ``combine`` on the first rank with all results; return its result everywhere.

        Both functions return JSON values.

        Raises:
            CheckpointError: on every rank, if a call failed while saving or loading; a rank whose ``give`` failed is
                named.
            RankError: likewise, for any other error.
        """
        return self._exchange(give, combine, self._broadcast)

    def divide(
        self,
        give: Callable[[], _Json],
        combine: Callable[[list[Any]], list[_Json]],
    ) -> Any:
        """As `reduce`, but ``combine`` returns a value for each rank, and each rank gets its own only."""
        return self._exchange(give, combine, self._scatter)

    def _exchange(
        self,
        give: Callable[[], _Json],
        combine: _Combine,
        send: Callable[[_Message], _Message],
    ) -> Any:
        # The error is sent before it is raised: the other ranks wait for a message of this one.
        local_error, message = self._attempt(give, self.rank)
        messages = self._gather(message)
        if self.rank == 0:
            failures = [sent for sent in messages if "error" in sent]
            # One error is enough: the first rank that failed is named.
            if failures:
                message = failures[0]
            else:
                values = [sent["value"] for sent in messages]
                local_error, message = self._attempt(lambda: combine(values), None)
        message = send(message)
        if "error" in message:
            self._raise(message["error"], local_error)
        return message["value"]

    def _attempt(
        self,
        call: Callable[[], _Json],
        rank: int | None,
    ) -> tuple[BaseException | None, _Message]:
        """Call a function; return its error, and a message for the other ranks: its value or the error."""
        try:
            return None, {"value": call()}
        except BaseException as error:
            return error, {"error": {"rank": rank, **_describe(error)}}

    def _raise(self, error: _Message, local_error: BaseException | None) -> None:
        """Raise the error of a rank here: as it is where it arose, unless it must be the same on all ranks."""
        rank = error["rank"]
        is_named = rank is not None and self.size > 1
        if local_error is not None:
            # A storage error must have the same type and text everywhere: callers decide by it whether to go on.
            is_storage_error = isinstance(local_error, (CheckpointError, OSError))
            # An error that is no storage's keeps its type and its traceback on the rank where it arose.
            if not is_named or not is_storage_error:
                raise local_error
        prefix = ""
        if rank is not None:
            prefix = f"rank {rank}: "
        # Callers check the cause for an OSError; the original cause exists only on its rank.
        cause = None
        if error["errno"] is not None:
            cause = OSError(error["errno"], error["text"])
        if "reason" in error:
            raise CheckpointError(
                error["file"], error["key"], prefix + error["reason"], fix=error["fix"]
            ) from cause
        raise RankError(
            f"{prefix}{error['text']}",
            fix="see what that rank printed",
            disagree=False,
        ) from cause

    def _gather(self, value: _Json) -> list[Any]:
        """The values of all ranks on the first rank; on the others nothing."""
        if self.size == 1:
            return [value]
        message = _to_tensor(value)
        # Receivers must allocate memory before a message arrives, and the messages of all ranks must have one length to
        # be gathered: so the lengths are sent first.
        longest = self._longest(message.numel())
        messages = self._gather_tensors(_padded(message, longest))
        return list(map(_from_tensor, messages))

    def _longest(self, length: int) -> int:
        """The greatest of the lengths of all ranks, on every rank."""
        tensor = torch.tensor([length])
        if self.size < MANY_RANKS:
            lengths = [torch.empty_like(tensor) for _ in range(self.size)]
            dist.all_gather(lengths, tensor, group=self._group)
            return int(max(lengths))
        lengths = self._gather_tensors(tensor)
        # Only rank 0 has them.
        longest = int(max(lengths, default=0))
        return self._broadcast_length(longest)

    def _gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks on the first rank; on the others nothing."""
        tensors = []
        if self.rank == 0:
            tensors = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.gather(tensor, tensors or None, dst=self._first(), group=self._group)
        return tensors

    def _broadcast(self, value: _Message) -> _Message:
        if self.size == 1:
            return value
        message = _to_tensor(value)
        length = self._broadcast_length(message.numel())
        if self.rank != 0:
            message = torch.empty(length, dtype=torch.uint8)
        dist.broadcast(message, self._first(), group=self._group)
        return _from_tensor(message)

    def _broadcast_length(self, length: int) -> int:
        """The number of the first rank."""
        tensor = torch.tensor([length])
        dist.broadcast(tensor, self._first(), group=self._group)
        return int(tensor)

    def _scatter(self, message: _Message) -> _Message:
        """Each rank's part of the first rank's values, or its error."""
        parts: list[_Message] = []
        if self.rank == 0:
            parts = [message] * self.size
            if "error" not in message:
                parts = [{"value": value} for value in message["value"]]
        if self.size == 1:
            return parts[0]
        texts = list(map(_to_tensor, parts))
        # As in `_gather`, all messages have one length.
        longest = self._broadcast_length(max(map(len, texts), default=0))
        padded = [_padded(text, longest) for text in texts]
        received = torch.empty(longest, dtype=torch.uint8)
        dist.scatter(received, padded or None, src=self._first(), group=self._group)
        return _from_tensor(received)

    def _first(self) -> int:
        # torch's collectives name ranks by their number among all processes, also within a group.
        if self._group is None:
            return 0
        return dist.get_global_rank(self._group, 0)


def _to_tensor(value: _Json) -> Tensor:
    text = json.dumps(value, allow_nan=False)
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _padded(message: Tensor, length: int) -> Tensor:
    """The message with spaces behind it, which JSON ignores."""
    padded = torch.full((length,), ord(" "), dtype=torch.uint8)
    padded[: message.numel()] = message
    return padded


def _from_tensor(tensor: Tensor) -> _Message:
    message: _Message = json.loads(tensor.numpy().tobytes())
    return message


def _describe(error: BaseException) -> _Message:
    """An error as JSON, from which `Collective._raise` makes one on every rank."""
    # Some errors of checkpoints are both: their own number counts before that of a cause.
    cause: BaseException | None = error
    if not isinstance(error, OSError):
        cause = error.__cause__
    text = f"{type(error).__name__}: {error}"
    number = None
    if isinstance(cause, OSError):
        text = str(cause)
        # Without a number it would not be recognized as a storage's on the other ranks.
        number = cause.errno or errno.EIO
    description: _Message = {"text": text, "errno": number}
    if isinstance(error, CheckpointError):
        description["file"] = error.file
        description["key"] = error.key
        description["reason"] = error.reason
        description["fix"] = error.fix
    elif isinstance(error, OSError):
        description["file"] = str(error.filename or "the checkpoint")
        description["key"] = None
        description["reason"] = error.strerror or text
        description["fix"] = None
    return description
