"""A `Group` of processes over torch.distributed."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import pickle
import re
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous
from torch.utils.hooks import RemovableHandle

from trainer_kit.core.devices import make_current
from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import ConfigurationError, StrategyError
from trainer_kit.core.protocols import MANY_RANKS, Group
from trainer_kit.launch.startup_timeout import (
    meet_without_agent,
    named_while_connecting,
    wait_for_all,
)
from trainer_kit.strategies.torch_private import (
    default_group_timeout,
    set_group_timeout,
)

__all__ = [
    "ProcessGroup",
    "average",
    "average_gradients",
    "average_in_backward",
    "borrowed_buffers",
    "broadcast_buffers",
    "inherit_timeout",
    "join_world",
    "once_per_world",
    "swap_world_cache",
]


_STORAGE_TIMEOUT: Final = timedelta(days=1)
"""How long ranks wait for the slowest storage; training waits only where it needs the next checkpoint."""
_WORLD_CACHE: dict[Hashable, Any] = {}
"""The results of `once_per_world`, by key."""
_WORLD: Final = "world"
"""The key of the world that all other entries belong to."""
_INHERITED_CACHES: Final[list[dict[Hashable, object]]] = []
"""The cache of the parent of this forked process; never released."""
_T = TypeVar("_T")


def join_world(
    device: torch.device,
    backend: str | None = None,
    timeout: timedelta = timedelta(minutes=30),
    alone: bool = False,
) -> ProcessGroup:
    """Join the process group of the environment (torchrun's variables, SLURM's or MPI's), or reuse it.

    Args:
        device: where this rank computes.
        backend: torch's name; by default what torch takes for this device. The CPU has gloo beside it.
        timeout: how long a collective may take.
        alone: whether a process without a launcher creates a group of one rank.
    """
    _wait_for_gloo_at_exit()
    make_current(device)  # first: everything after it uses the current device
    if not dist.is_initialized():
        if backend is None and device.type == "cpu":
            backend = "gloo"
        elif (
            backend not in (None, "gloo")
            and device.type != "cpu"
            and ":" not in backend
        ):
            # Parts that are offloaded are exchanged on the host.
            backend = f"cpu:gloo,{device.type}:{backend}"
        environment = Environment.detect()
        try:
            if environment.launched:
                store = meet_without_agent(environment, timeout)
                if store is None:
                    store = next(rendezvous("env://", timeout=timeout))[0]
                wait_for_all(store, environment, timeout)
                with named_while_connecting(store, environment):
                    dist.init_process_group(
                        backend,
                        timeout=timeout,
                        store=store,
                        rank=environment.rank,
                        world_size=environment.world_size,
                    )
            elif alone:
                store = dist.HashStore()  # type: ignore[attr-defined]
                dist.init_process_group(
                    backend, timeout=timeout, store=store, rank=0, world_size=1
                )
            else:
                dist.init_process_group(backend, timeout=timeout)
        except ValueError as error:
            raise StrategyError(
                "this process has no rank: the process group cannot be joined",
                found=str(error).splitlines()[0],
                fix="start the script with torchrun, or pass Trainer(devices=n), which starts the ranks",
            ) from error
        # The process destroys the group when it exits: a later Trainer in this rank reuses it.
        atexit.register(_leave_world)
    return ProcessGroup(device, timeout=timeout)


def _leave_world() -> None:
    # A reducer that outlives its group aborts the process on its way out ("terminate called without an active
    # exception", exit code 134): collect reference cycles first.
    gc.collect()
    # Ranks of our agent end without C++'s exit.
    if not dist.is_initialized() or "TRAINER_KIT_AGENT_PID" in os.environ:
        return
    # A custom training loop may hold a wrapped model to the end. Groups that have gloo only need no teardown.
    backends = re.findall(r":(\w+)", str(dist.get_backend_config()))
    if any(backend != "gloo" for backend in backends):
        dist.destroy_process_group()


@functools.cache
def _wait_for_gloo_at_exit() -> None:
    atexit.register(_wait_for_gloo_threads)


def _wait_for_gloo_threads() -> None:
    """Return when no thread of gloo is busy, or after a second.

    gloo's thread releases what a backward gave to a collective, maybe after the collective has ended, and needs the
    interpreter for it. An interpreter that is shutting down ends the thread, and with it the process ("terminate called
    without an active exception"): CPython up to 3.13.
    """
    threads = Path("/proc/self/task")
    if not threads.is_dir():
        return
    gloo_threads = [
        t for t in threads.iterdir() if "gloo_runloop" in _read_file(t / "comm")
    ]
    idle_checks = 0
    deadline = time.monotonic() + 1
    while gloo_threads and idle_checks < 3 and time.monotonic() < deadline:
        # Releases the interpreter's lock: a thread that waits for it sleeps, too.
        time.sleep(0.001)
        # One idle moment proves nothing: the thread may be between two tasks.
        idle_checks += 1
        if not all(_is_idle(thread) for thread in gloo_threads):
            idle_checks = 0


def _is_idle(thread: Path) -> bool:
    """Whether a thread of this process sleeps or has ended."""
    state = _read_file(thread / "stat")
    return not state or ") S " in state


def _read_file(file: Path) -> str:
    """The text of a thread's file; empty if the thread has ended."""
    try:
        return file.read_text()
    except OSError:
        return ""


_REDUCE_OPS: Final = {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
"""torch's operation for each reduction that is not computed from a sum."""


@final
class ProcessGroup:
    """All processes of a group, with a gloo group for the CPU if the group itself has no CPU backend.

    Args:
        device: where this rank's tensors live.
        group: torch's, as the axis of a mesh has it; None for the default one. Where it has no CPU side every process
            of the world creates its `ProcessGroup` at the same time, each for its own group.
        timeout: how long a collective of the group beside it may take; None: torch's default.
    """

    def __init__(
        self,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.device = device
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        # torch's fake backend sends nothing: one process measures a run of many, whose ranks all have its values.
        self._is_fake = dist.get_backend(group) == "fake"
        self._cpu = group
        if self._is_fake or "gloo" in str(dist.get_backend_config(group)):
            return
        # One side group serves the whole world. For other groups, this rank cannot know whether all ranks have one.
        create = partial(_create_side_group, group, timeout)
        self._cpu = (
            once_per_world(("cpu", timeout), create) if group is None else create()
        )

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce over the ranks, in place; ``op`` is sum, mean, min or max."""
        if op not in ("sum", "mean", "avg", "min", "max"):
            raise ConfigurationError(
                f"unknown reduction {op!r}", fix="use one of: sum, mean, min, max"
            )
        reduce_op = _REDUCE_OPS.get(op, dist.ReduceOp.SUM)
        # gloo reduces wrongly when ranks differ in their stride layout; a rank without data may have zeros on the host
        reduced = tensor.to(self.device).contiguous()
        dist.all_reduce(reduced, reduce_op, group=self.group)
        if op in ("mean", "avg"):
            reduced = reduced / self.size
        if reduced is not tensor and reduced.dtype == tensor.dtype:
            return tensor.copy_(reduced)
        return reduced.to(tensor.device)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack over the ranks: shape (size, *tensor.shape)."""
        # Contiguous for gloo, as in all_reduce.
        sent = tensor.detach().to(self.device).contiguous()
        received = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(received, sent, group=self.group)
        return torch.stack(received).to(tensor.device)

    def all_gather_object(self, value: object) -> list[Any]:
        """One small picklable value from every rank, in rank order."""
        if self._is_fake:
            return [value] * self.size
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._cpu)
        return values

    def gather_object(self, value: object) -> list[Any] | None:
        """One picklable value from every rank, in rank order, on the first; None on the others."""
        if self._is_fake:
            if self.rank != 0:
                return None
            return [value] * self.size
        # torch's gather_object sends the lengths from each rank to each other one.
        message = _pickled(value)
        rows = self.agree([len(message)])
        longest = int(max(row[0] for row in rows))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(message)] = message
        messages: list[Tensor] = []
        if self.rank == 0:
            messages = [torch.empty_like(padded) for _ in range(self.size)]
        dist.gather(padded, messages or None, group=self._cpu, group_dst=0)
        if self.rank != 0:
            return None
        return list(map(_unpickled, messages))

    def broadcast(self, value: object, source: int = 0) -> Any:
        """A tensor (in place), or one small picklable value, from the group's rank ``source``."""
        if isinstance(value, Tensor):
            sent = value.contiguous()
            dist.broadcast(sent, group=self.group, group_src=source)
            if sent is value:
                return value
            return value.copy_(sent)
        if self._is_fake:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self._cpu, group_src=source)
        return box[0]

    def barrier(self) -> None:
        """Wait for every rank."""
        if not self._is_fake:
            dist.barrier(group=self._cpu)

    def agree(self, values: list[float]) -> list[list[float]]:
        """A few numbers of every rank, one row a rank, on the CPU."""
        if self._is_fake:
            return [values] * self.size
        row = torch.tensor(values, dtype=torch.float64)
        table = torch.empty(self.size, len(values), dtype=torch.float64)
        # Views: what arrives is written into the table.
        rows = list(table)
        if self.size < MANY_RANKS:
            dist.all_gather(rows, row, group=self._cpu)
        else:
            dist.gather(
                row, rows if self.rank == 0 else None, group=self._cpu, group_dst=0
            )
            dist.broadcast(table, group=self._cpu, group_src=0)
        numbers: list[list[float]] = table.tolist()  # no sync point: on the host
        return numbers

    def side_group(self, recreate: bool = False) -> dist.ProcessGroup:
        """A gloo group of the same processes for control traffic; the first call creates it.

        Its timeout is a day, however short that of training's group is: its ranks wait for storage.
        ``recreate``, on every rank: create a new one after a timeout.
        """
        # By its ranks: two groups of the same processes share one.
        key = "side_group", *dist.get_process_group_ranks(self.group)
        if recreate:
            _WORLD_CACHE.pop(key, None)
        return once_per_world(
            key, lambda: _create_side_group(self.group, _STORAGE_TIMEOUT)
        )


def _pickled(value: object) -> Tensor:
    content = bytearray(pickle.dumps(value))
    return torch.frombuffer(content, dtype=torch.uint8)


def _unpickled(message: Tensor) -> object:
    # What follows the end of a pickle is not read.
    content = message.numpy().tobytes()  # no sync point: on the host
    return pickle.loads(content)


def once_per_world(key: Hashable, create: Callable[[], _T]) -> _T:
    """Return what ``create`` returned at the first call with this key in this world; a collective call.

    Process groups keep threads and sockets, so a new fit reuses those of an earlier fit.

    Args:
        key: identifies the result, the same on every rank.
        create: called once.
    """
    # Another world: groups of the earlier one cannot communicate any more.
    world = dist.group.WORLD
    if _WORLD_CACHE.get(_WORLD) is not world:
        _WORLD_CACHE.clear()
        _WORLD_CACHE[_WORLD] = world
    if key not in _WORLD_CACHE:
        _WORLD_CACHE[key] = create()
    cached: _T = _WORLD_CACHE[key]
    return cached


def _keep_inherited_groups() -> None:
    """Keep the parent's groups referenced in a forked child: their destructors join threads that do not exist there."""
    _INHERITED_CACHES.append(dict(_WORLD_CACHE))
    _WORLD_CACHE.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_keep_inherited_groups)


def swap_world_cache(cache: dict[Hashable, object]) -> dict[Hashable, object]:
    """Replace the cache of `once_per_world`, and return the earlier one: for ranks that take turns in one process."""
    before = dict(_WORLD_CACHE)
    _WORLD_CACHE.clear()
    _WORLD_CACHE.update(cache)
    return before


def _create_side_group(
    group: dist.ProcessGroup | None, timeout: timedelta | None
) -> dist.ProcessGroup:
    """Create a gloo group of the same processes. All processes create all such groups, in the same order."""
    timeout = timeout or default_group_timeout()
    if group is None:
        everyone = list(range(dist.get_world_size()))
        side_group: dist.ProcessGroup = dist.new_group(
            everyone, timeout, backend="gloo"
        )
        return side_group
    ranks = tuple(dist.get_process_group_ranks(group))
    ranks_of_processes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks_of_processes, ranks)
    # torch requires every process to create every group, also those that it is not a member of.
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {
        members: dist.new_group(list(members), timeout, backend="gloo")
        for members in sorted(set(ranks_of_processes))
    }
    return groups[ranks]


def inherit_timeout(mesh: DeviceMesh) -> DeviceMesh:
    """Give the collectives of all axes the timeout of the world; torch gives them half an hour."""
    timeout = default_group_timeout()
    for group in mesh.get_all_groups():
        if timeout is not None and group is not dist.group.WORLD:
            set_group_timeout(timeout, group)
    return mesh


def average_gradients(parameters: Iterable[nn.Parameter], group: ProcessGroup) -> None:
    """Average full gradients over the ranks in one exchange for each dtype.

    A parameter that has a gradient on some ranks only counts as zero on the others; one that has none on any rank
    gets none.
    """
    # Every rank must reduce the same gradients, also of parameters that only another rank has used.
    trained = [p for p in parameters if p.requires_grad]
    has_gradient = torch.tensor(
        [p.grad is not None for p in trained], dtype=torch.float32, device=group.device
    )
    most = group.all_reduce(has_gradient, "max")
    used = most.tolist()  # sync point: ranks differ in what they use
    gradients = []
    for parameter, is_used in zip(trained, used, strict=True):
        if not is_used:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    average(gradients, group)


def average_in_backward(
    parameters: Iterable[nn.Parameter], group: Group
) -> list[RemovableHandle]:
    """Average each gradient over the ranks when a backward has added to it, also of parameters unfrozen later.

    Returns:
        The hooks.
    """
    handles = []
    for parameter in parameters:
        if not parameter.is_floating_point():
            continue
        frozen = not parameter.requires_grad
        # torch registers no hook while it is frozen.
        parameter.requires_grad_()
        hook = partial(_average_gradient, group)
        handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]  # torch's
        parameter.requires_grad_(not frozen)
    return handles


def _average_gradient(group: Group, parameter: Tensor) -> None:
    assert parameter.grad is not None
    group.all_reduce(parameter.grad, "mean")


def average(tensors: Iterable[Tensor], group: Group) -> None:
    """Average full tensors over the ranks, in place, in one exchange for each dtype.

    Integers and bools, such as steps and quantized weights, have no mean and stay as they are.
    """
    averaged = (t for t in tensors if t.is_floating_point() or t.is_complex())
    _exchange_flat(averaged, lambda flat: group.all_reduce(flat).div_(group.size))


def broadcast_buffers(module: nn.Module, group: ProcessGroup) -> None:
    """Give every rank the buffers of rank 0, in one exchange for each dtype."""
    _exchange_flat(module.buffers(), group.broadcast)


def _exchange_flat(
    tensors: Iterable[Tensor], exchange: Callable[[Tensor], Tensor]
) -> None:
    """Concatenate the tensors of each dtype and device, exchange the result, and copy it back into them."""
    buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        key = (tensor.dtype, tensor.device)
        bucket = buckets.setdefault(key, [])
        bucket.append(tensor.detach())
    # All ranks have the same tensors in the same order, so they make the same exchanges.
    for bucket in buckets.values():
        rows = [tensor.reshape(-1) for tensor in bucket]
        lengths = [row.numel() for row in rows]
        flat = torch.cat(rows)
        exchanged = exchange(flat)
        pieces = torch.split(exchanged, lengths)
        for tensor, values in zip(bucket, pieces, strict=True):
            tensor.copy_(values.view_as(tensor))


@contextmanager
def borrowed_buffers(module: nn.Module, group: ProcessGroup) -> Iterator[None]:
    """Give every rank rank 0's buffers inside the context; restore its own after it, except those written inside."""
    # Only buffers that differ are put back, and only if an evaluation has not written them: that is meant to last.
    copies = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    broadcast_buffers(module, group)
    replaced = [
        (buffer, before, buffer.detach().clone())
        for buffer, before in copies
        if not torch.equal(buffer.detach(), before)  # sync point: an evaluation begins
    ]
    try:
        yield
    finally:
        for buffer, before, borrowed in replaced:
            if torch.equal(buffer.detach(), borrowed):  # sync point: an evaluation ends
                buffer.detach().copy_(before)
