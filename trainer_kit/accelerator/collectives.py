"""Collectives over nested tensors and small objects. Every process must make the same calls in the same order."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Final, TypeAlias, TypeVar, final

import torch
from torch import Tensor
from torch import distributed as dist

from trainer_kit.accelerator.accumulation import Batches
from trainer_kit.accelerator.joint_calls import JointCalls
from trainer_kit.accelerator.repeated_samples import NOTHING, drop_repeats, refusal
from trainer_kit.core.collective_errors import (
    compare,
    on_every_rank,
    same_everywhere,
    shape_of,
    signature,
)
from trainer_kit.core.errors import ConfigurationError, RankError, did_you_mean
from trainer_kit.core.protocols import Group
from trainer_kit.core.tensors import map_leaves, map_tensors, require_tensor, tensors_of
from trainer_kit.core.torch_private import default_store
from trainer_kit.core.types import Nested

__all__ = ["Collectives"]

_Record: TypeAlias = dict[str, str]
"""A call, and the line of the user's code that makes it."""

_REDUCTIONS: Final = ("sum", "mean", "max", "min", "none")
_T = TypeVar("_T")

# Shared, because it has no state: a single process creates no object in a call.
_NO_CONTEXT: Final = nullcontext()
_PACKAGE: Final = str(Path(__file__).resolve().parents[1])
_DEBUG_TIMEOUT: Final = 60.0
"""Seconds for which debug mode waits for the other processes."""
_DEBUG_TIMEOUT_AFTER_FIRST: Final = 1.0
"""The same, once one process was missing."""


@final
class Collectives:
    """The collective calls of an Accelerator.

    Args:
        world: all processes.
        data: the processes over which batches are sharded; by default all of them.
        debug: compare the calls of all processes before each exchange.
        calls: counts the calls, and adds an explanation to their errors.

    Attributes:
        triggered: whether this process has called `set_trigger` since the last check.
    """

    def __init__(
        self,
        world: Group,
        data: Group | None = None,
        debug: bool = False,
        calls: JointCalls | None = None,
    ) -> None:
        self.world = world
        self.data = world if data is None else data
        self.debug = debug
        self._calls = calls
        # Processes of torch_xla have no store.
        self._is_distributed = world.size > 1 and dist.is_initialized()
        self.triggered = False

    def during(self, call: str, data: Nested = None) -> AbstractContextManager[None]:
        """Return the context in which a collective call runs.

        Args:
            call: the name of the call in messages.
            data: the exchanged values: debug mode compares the shapes and dtypes of their tensors.
        """
        if not self._is_distributed:
            return _NO_CONTEXT
        if self.debug:
            _compare_calls(self.world, call, data)
        return _NO_CONTEXT if self._calls is None else self._calls(call)

    def barrier(self) -> None:
        """Wait until every process makes this call."""
        with self.during("wait_for_everyone"):
            self.world.barrier()

    def gather(self, data: Nested) -> Nested:
        """Concatenate the tensors of all processes along the first dimension; scalars make a vector.

        Args:
            data: nested tensors, of equal shape on every process.

        Returns:
            The same nesting; each tensor has shape ``(processes * n, ...)``.

        Raises:
            RankError: on every process, if shapes, dtypes or the nesting differ.
        """
        with self.during("gather", data):
            return _gather(self.world, data, "gather")

    def gather_for_metrics(
        self, data: Nested, use_gather_object: bool, batches: Batches | None
    ) -> Nested:
        """Gather the results of a batch without those of repeated samples, once from each data shard.

        Args:
            data: nested tensors or other objects with one entry per sample; see `drop_repeats`.
            use_gather_object: gather tensors as objects: their shapes may then differ.
            batches: the loader of the batch, with its ``size`` and ``counts``; None outside a loader.

        Raises:
            ConfigurationError: on every process, if samples are repeated and a value has no entry per sample.
        """
        # Without the data: objects have no shapes, and the numbers of samples may differ.
        with self.during("gather_for_metrics"):
            # Below, over `data` and not `world`: processes that compute parts of one batch have the same results.
            if use_gather_object or not _only_tensors(data):
                return self._gather_objects_of_batch(data, batches)
            if batches is not None and batches.counts is not None:
                return _gather_rows(self.data, data, batches.size, batches.counts)
            if batches is not None and batches.end_of_dataloader:
                data = _cut_to_batch(data, batches.size, batches.nominal)
            return _gather(self.data, data, "gather_for_metrics")

    def _gather_objects_of_batch(
        self, data: Nested, batches: Batches | None
    ) -> list[object]:
        group = self.data
        # Pickled values have no shapes to compare, so only the call itself is: one process with tensors and another
        # one with objects would take part in different exchanges.
        if group.size > 1:
            compare(group, "gather_for_metrics(objects)")
        if batches is None or batches.counts is None:
            return _gather_object(group, data)
        size = batches.size
        count = batches.counts[group.rank]
        results = on_every_rank(group, lambda: drop_repeats(data, size, count))
        # Copies of NOTHING from other processes are other objects of its class.
        return _concatenate(
            [result for result in results if not isinstance(result, type(NOTHING))]
        )

    def gather_object(self, data: Nested) -> list[object]:
        """Gather small picklable values: lists are concatenated, other values are collected in a list in rank order."""
        with self.during("gather_object"):
            return _gather_object(self.world, data)

    def reduce(self, data: Nested, reduction: str, scale: float) -> Nested:
        """Reduce nested tensors over the processes; the arguments do not change.

        Args:
            data: nested tensors, of equal shape on every process.
            reduction: ``"sum"``, ``"mean"`` (the mean of integers is a float), ``"max"``, ``"min"``, or ``"none"``:
                return the tensors unchanged.
            scale: a factor for the result.

        Raises:
            ConfigurationError: an unknown reduction.
            RankError: on every process, if shapes, dtypes or the nesting differ.
        """
        with self.during("reduce", data):
            if reduction not in _REDUCTIONS:
                fix = did_you_mean(str(reduction), _REDUCTIONS)
                raise ConfigurationError(f"unknown reduction {reduction!r}", fix=fix)
            if reduction == "none":
                return data
            # Before the exchange: with tensors of different shapes it would hang, or mix their elements.
            same_everywhere(self.world, f"reduce by {reduction}", data)
            return map_tensors(
                data, lambda tensor: self._reduce_tensor(tensor, reduction, scale)
            )

    def _reduce_tensor(self, tensor: Tensor, reduction: str, scale: float) -> Tensor:
        # A copy, because the backend reduces in place.
        result = tensor.detach().clone()
        is_integer = not result.is_floating_point() and not result.is_complex()
        if reduction == "mean" and is_integer:
            result = result.to(torch.get_default_dtype())
        result = self.world.all_reduce(result, reduction)
        return result if scale == 1.0 else result * scale

    def broadcast(self, data: Nested, source: int) -> Nested:
        """Send the nested tensors of process ``source`` to every process; shapes and dtypes must be equal everywhere.

        Raises:
            RankError: on every process, if they differ.
        """
        with self.during("broadcast", data):
            same_everywhere(self.world, f"broadcast from process {source}", data)
            return _map_strictly(
                data,
                # A copy, because the backend receives in place.
                lambda tensor: self.world.broadcast(tensor.detach().clone(), source),
            )

    def broadcast_object_list(self, values: list[_T], source: int) -> list[_T]:
        """Replace ``values`` in place with the small picklable values of process ``source``."""
        with self.during("broadcast_object_list"):
            values[:] = self.world.broadcast(list(values), source)
        return values

    def pad_across_processes(
        self, data: Nested, dim: int, pad_index: float, pad_first: bool
    ) -> Nested:
        """Pad nested tensors along ``dim`` to the largest length on any process, so that they can be gathered.

        Args:
            data: nested tensors that differ in length along ``dim`` only.
            dim: the dimension; tensors without this dimension do not change.
            pad_index: the value of the padding.
            pad_first: pad at the beginning.

        Raises:
            RankError: on every process, if the nesting or numbers of dimensions differ.
        """
        with self.during("pad_across_processes"):
            all_lengths, _ = _exchange_lengths(
                self.world, "pad_across_processes", data, dim
            )
            lengths = iter(all_lengths)

            def pad(tensor: Tensor) -> Tensor:
                if not -tensor.ndim <= dim < tensor.ndim:
                    return tensor
                # Tensors without this dimension were also left out of the exchange, so lengths and tensors stay
                # aligned.
                longest = max(next(lengths))
                return _pad(tensor, longest, dim, pad_index, pad_first)

            return _map_strictly(data, pad)

    def set_trigger(self) -> None:
        """Set the trigger; on every process the next `check_trigger` returns True."""
        self.triggered = True

    def check_trigger(self) -> bool:
        """Whether any process has set the trigger since the last check."""
        with self.during("check_trigger"):
            rows = self.world.agree([float(self.triggered)])
        any_triggered = any(row[0] for row in rows)
        if any_triggered:
            self.triggered = False
        return any_triggered


def _map_strictly(data: Nested, change: Callable[[Tensor], Tensor]) -> Nested:
    """Call ``change`` on every tensor; ConfigurationError for any other leaf."""
    return map_leaves(data, change, Tensor, require_tensor)


def _only_tensors(data: Nested) -> bool:
    try:
        _map_strictly(data, lambda tensor: tensor)
    except ConfigurationError:
        return False
    return True


def _gather(group: Group, data: Nested, call: str) -> Nested:
    same_everywhere(group, call, data)
    return _map_strictly(data, lambda tensor: _gather_tensor(group, tensor))


def _gather_tensor(group: Group, tensor: Tensor) -> Tensor:
    rows = tensor if tensor.ndim else tensor.unsqueeze(0)
    # A copy here too: on any number of processes the result does not share memory with the argument.
    if group.size == 1:
        return rows.clone()
    return group.all_gather(rows).flatten(0, 1)


def _gather_object(group: Group, data: Nested) -> list[object]:
    return _concatenate(group.all_gather_object(data))


def _concatenate(values: list[object]) -> list[object]:
    """Join lists and tuples into one list; return other values as they are."""
    items: list[object] = []
    for value in values:
        if not isinstance(value, (list, tuple)):
            return values
        items.extend(value)
    return items


def _cut_to_batch(data: Nested, size: int, nominal: float) -> Nested:
    """Cut tensors with a row for each sample of a full batch to the samples of a short last one.

    Transformers' Trainer repeats the mean loss of a batch as often as a full batch has samples.
    """
    if size >= nominal:
        return data

    def cut(tensor: Tensor) -> Tensor:
        is_full = tensor.ndim > 0 and len(tensor) == nominal
        return tensor[:size] if is_full else tensor

    return map_tensors(data, cut)


def _gather_rows(group: Group, data: Nested, size: int, counts: list[int]) -> Nested:
    """Gather the results of a batch, and omit those of repeated samples.

    Args:
        group: the processes.
        data: nested tensors with one entry per sample, which are cut to ``counts``. A scalar, or a tensor of one row,
            is one value of each process and stays whole, unless the batch has only one sample.
        size: the number of samples in the batch on this process.
        counts: for each process, the number of samples that are not repeated.

    Raises:
        RankError: on every process, if tensors differ in more than their length.
        ConfigurationError: on every process, if a tensor has another length.
    """
    all_lengths, sizes = _exchange_lengths(
        group, "gather_for_metrics", data, 0, size, same_shapes=True
    )
    lengths_by_tensor = iter(all_lengths)
    has_one_sample = max(sizes) == 1

    def gather_rows(tensor: Tensor) -> Tensor:
        # A scalar has no dimension 0, so the exchange has no lengths of it.
        rows = tensor
        lengths = [1] * group.size
        if tensor.ndim:
            lengths = next(lengths_by_tensor)
        else:
            rows = tensor.unsqueeze(0)
        # By default all rows are kept: a value of the process, such as a mean loss, repeats no sample.
        counts_to_keep = lengths
        # One row per sample. In a batch of one sample a scalar counts as its row.
        if lengths == sizes and (tensor.ndim or has_one_sample):
            counts_to_keep = counts
        # Other lengths are gathered in full batches only: nothing says which of their rows are repeats.
        elif counts != sizes and max(lengths) > 1:
            raise refusal(f"tensors of {lengths} rows on the processes", size)
        # Processes may have batches of different sizes, and backends gather equal lengths only.
        gathered = _gather_tensor(group, _pad(rows, max(lengths)))
        shares = gathered.tensor_split(group.size)
        kept_rows = [
            share[:count] for share, count in zip(shares, counts_to_keep, strict=True)
        ]
        return torch.cat(kept_rows)

    return map_tensors(data, gather_rows)


def _exchange_lengths(
    group: Group,
    call: str,
    data: Nested,
    dim: int,
    size: int = 0,
    same_shapes: bool = False,
) -> tuple[list[list[int]], list[int]]:
    """Return, for each tensor that has ``dim``, its length on every process; and the ``size`` of every process.

    This takes one exchange, and a second one only if the tensors of a process differ in length. ``same_shapes``: the
    other dimensions and dtypes must be equal too, not only the number of dimensions.
    """
    lengths: list[int] = []

    def describe(tensor: Tensor) -> str:
        shape = list(map(str, tensor.shape))
        if -tensor.ndim <= dim < tensor.ndim:
            lengths.append(tensor.shape[dim])
            # Not compared, because this length may differ.
            shape[dim] = "*"
        if not same_shapes:
            return f"{tensor.ndim} dimensions"
        return f"({', '.join(shape)}) {tensor.dtype}"

    # The usual case in one exchange: on each process all tensors have the length of its batch.
    text = f"{call}({signature(data, describe)})"
    first_length = lengths[0] if lengths else 0
    one_length = len(set(lengths)) < 2
    rows = compare(group, text, (first_length, float(one_length), size))
    sizes = [int(row[2]) for row in rows]
    if all(row[1] for row in rows):
        lengths_by_rank = [int(row[0]) for row in rows]
        return [lengths_by_rank] * len(lengths), sizes
    length_rows = group.agree(list(map(float, lengths)))
    columns = zip(*length_rows, strict=True)
    return [list(map(int, column)) for column in columns], sizes


def _pad(
    tensor: Tensor, longest: int, dim: int = 0, value: float = 0, first: bool = False
) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] = longest - shape[dim]
    if not shape[dim]:
        return tensor
    padding = tensor.new_full(shape, value)
    if first:
        return torch.cat([padding, tensor], dim)
    return torch.cat([tensor, padding], dim)


def _compare_calls(group: Group, call: str, data: Nested) -> None:
    """Wait until every process is about to make the same call: different calls would hang, or exchange wrong values.

    Each process writes its call to the rendezvous store, so the comparison does not affect a process that does
    something else at the time. ``TRAINER_KIT_DEBUG_TIMEOUT`` sets the seconds for which this process waits for the
    others (60).

    Raises:
        RankError: calls differ, or a process makes none; the message lists the call of each process.
    """
    shapes = [shape_of(tensor).replace("torch.", "") for tensor in tensors_of(data)]
    record = {"call": f"{call}({', '.join(shapes)})", "at": _line_of_user()}
    store = default_store()
    # Each process counts its calls: the n-th one here is compared with the n-th one of every other process.
    number = store.add(f"trainer_kit/calls/{group.rank}", 1)
    store.set(f"trainer_kit/call/{number}/{group.rank}", json.dumps(record))
    # For the error of others, if this process does not make their next call.
    store.set(f"trainer_kit/last/{group.rank}", json.dumps(record))
    records = _read_calls(store, number, group.size)
    if all(other and other["call"] == record["call"] for other in records):
        return
    lines = [
        f"process {rank}: {_describe_call(other, store, rank)}"
        for rank, other in enumerate(records)
    ]
    raise RankError(
        f"the processes make different calls: {call}",
        found="; ".join(lines),
        fix="call it on every process, outside of `if accelerator.is_main_process`, with tensors of one shape and "
        "dtype (pad_across_processes makes lengths equal)",
    )


def _read_calls(
    store: dist.distributed_c10d.Store, number: int, size: int
) -> list[_Record | None]:
    """Wait for the call of each process; None for a process that does not make it in time.

    Args:
        store: the rendezvous store.
        number: the number of the call.
        size: the number of processes.
    """
    seconds = float(os.environ.get("TRAINER_KIT_DEBUG_TIMEOUT", _DEBUG_TIMEOUT))
    records: list[_Record | None] = []
    for rank in range(size):
        key = f"trainer_kit/call/{number}/{rank}"
        try:
            store.wait([key], timedelta(seconds=seconds))
        # torch reports the end of the wait by a `DistStoreError`, which is a RuntimeError.
        except RuntimeError:
            records.append(None)
            # The others have had the time of the first.
            seconds = _DEBUG_TIMEOUT_AFTER_FIRST
        else:
            records.append(json.loads(store.get(key)))
    return records


def _describe_call(
    record: _Record | None, store: dist.distributed_c10d.Store, rank: int
) -> str:
    if record is not None:
        return f"{record['call']} at {record['at']}"
    key = f"trainer_kit/last/{rank}"
    if not store.check([key]):
        return "has made no call"
    last = json.loads(store.get(key))
    return f"has not come; its last call was {last['call']} at {last['at']}"


def _line_of_user() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _is_internal(filename: str) -> bool:
    # The frames of context managers are between the call and the user's line.
    return filename.startswith(_PACKAGE) or "contextlib" in filename
