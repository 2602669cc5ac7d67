"""A `Group` of processes over torch.distributed."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
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
from trainer_kit.core.protocols import Group
from trainer_kit.launch.startup_timeout import (
    meet_without_agent,
    named_while_connecting,
    wait_for_all,
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
    "once_a_world",
    "swap_kept",
]


_FOR_WRITERS: Final = timedelta(days=1)
"""How long ranks wait for the slowest storage; training waits only where it needs the next checkpoint."""
_KEPT: dict[Any, Any] = {}
"""What `once_a_world` has made, by key."""
_WORLD: Final = "world"
"""The key of the world that all other entries belong to."""
_INHERITED: Final[list[Any]] = []
"""What `once_a_world` had made in the parent of this forked process; never released."""
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
        alone: whether a process without a launcher makes a group of one rank.
    """
    _mind_the_exit()
    make_current(device)  # first: everything after it uses the current device
    if not dist.is_initialized():
        if backend is None and device.type == "cpu":
            backend = "gloo"
        elif (
            backend not in (None, "gloo")
            and device.type != "cpu"
            and ":" not in backend
        ):
            backend = f"cpu:gloo,{device.type}:{backend}"  # parts that are offloaded are exchanged on the host
        here = Environment.detect()
        try:
            if here.launched:
                store = meet_without_agent(here, timeout)
                if store is None:
                    store = next(rendezvous("env://", timeout=timeout))[0]
                wait_for_all(store, here, timeout)
                with named_while_connecting(store, here):
                    dist.init_process_group(
                        backend,
                        timeout=timeout,
                        store=store,
                        rank=here.rank,
                        world_size=here.world_size,
                    )
            elif alone:
                mine = dist.HashStore()  # type: ignore[attr-defined]
                dist.init_process_group(
                    backend, timeout=timeout, store=mine, rank=0, world_size=1
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
    if (
        not dist.is_initialized() or "TRAINER_KIT_AGENT_PID" in os.environ
    ):  # our agent's ranks end without C++'s exit
        return
    # A raw loop may hold a wrapped model to the end. Groups that have gloo only need no teardown.
    if any(
        backend != "gloo"
        for backend in re.findall(r":(\w+)", str(dist.get_backend_config()))
    ):
        dist.destroy_process_group()


@functools.cache
def _mind_the_exit() -> None:
    atexit.register(_let_gloo_finish)


def _let_gloo_finish() -> None:
    """Return when no thread of gloo is busy, or after a second.

    gloo's thread releases what a backward gave to a collective, maybe after the collective has ended, and needs the
    interpreter for it. An interpreter that is shutting down ends the thread, and with it the process ("terminate called
    without an active exception"): CPython up to 3.13.
    """
    threads = Path("/proc/self/task")
    if not threads.is_dir():
        return
    states = [
        thread / "stat"
        for thread in threads.iterdir()
        if "gloo_runloop" in _read(thread / "comm")
    ]
    asleep, end = 0, time.monotonic() + 1
    while states and asleep < 3 and time.monotonic() < end:
        time.sleep(
            0.001
        )  # releases the interpreter's lock: a thread that waits for it sleeps, too
        asleep = (
            asleep + 1
            if all(") S " in (text := _read(state)) or not text for state in states)
            else 0
        )


def _read(file: Path) -> str:
    """The text of a thread's file; empty where the thread has ended."""
    try:
        return file.read_text()
    except OSError:
        return ""


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
        self.device, self.group = device, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._cpu = group
        # torch's fake backend sends nothing: one process measures a run of many, whose ranks all have its values.
        self._alike = dist.get_backend(group) == "fake"
        if not self._alike and "gloo" not in str(dist.get_backend_config(group)):
            # One side group serves the whole world. For other groups, this rank cannot know whether all ranks have one.
            made = partial(_beside, group, timeout)
            self._cpu = (
                once_a_world(("beside", timeout), made) if group is None else made()
            )

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce over the ranks, in place; ``op`` is sum, mean, min or max."""
        if op not in ("sum", "mean", "avg", "min", "max"):
            raise ConfigurationError(
                f"unknown reduction {op!r}", fix="use one of: sum, mean, min, max"
            )
        kind = {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}.get(
            op, dist.ReduceOp.SUM
        )
        # gloo reduces wrongly when ranks differ in their stride layout; a rank without data may have zeros on the host
        whole = tensor.to(self.device).contiguous()
        dist.all_reduce(whole, kind, group=self.group)
        if op in ("mean", "avg"):
            whole = whole / self.size
        if whole is not tensor and whole.dtype == tensor.dtype:
            return tensor.copy_(whole)
        return whole.to(tensor.device)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack over the ranks: shape (size, *tensor.shape)."""
        whole = tensor.detach().to(self.device).contiguous()  # see above
        parts = [torch.empty_like(whole) for _ in range(self.size)]
        dist.all_gather(parts, whole, group=self.group)
        return torch.stack(parts).to(tensor.device)

    def all_gather_object(self, value: Any) -> list[Any]:
        """One small picklable value from every rank, in rank order."""
        if self._alike:
            return [value] * self.size
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._cpu)
        return values

    def gather_object(self, value: Any) -> list[Any] | None:
        """One picklable value from every rank, in rank order, on the first; None on the others."""
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, group=self._cpu, group_dst=0)
        return values

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """A tensor (in place), or one small picklable value, from the group's rank ``source``."""
        if isinstance(value, Tensor):
            whole = value.contiguous()
            dist.broadcast(whole, group=self.group, group_src=source)
            return value if whole is value else value.copy_(whole)
        if self._alike:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self._cpu, group_src=source)
        return box[0]

    def barrier(self) -> None:
        """Wait for every rank."""
        if not self._alike:
            dist.barrier(group=self._cpu)

    def agree(self, values: list[float]) -> list[list[float]]:
        """A few numbers of every rank, one row a rank, on the CPU."""
        if self._alike:
            return [values] * self.size
        mine = torch.tensor(values, dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self._cpu)
        return [row.tolist() for row in rows]  # no sync point: on the host

    def side_group(self, recreate: bool = False) -> dist.ProcessGroup:
        """torch's gloo group of the same processes that training does not use; the first call makes it.

        Its ranks wait for each other for a day, however short the others' timeout is: they wait for disks.
        ``recreate``, on every rank: make a new one after a timeout.
        """
        key = "side_group", *dist.get_process_group_ranks(self.group)
        if recreate:
            _KEPT.pop(key, None)
        return once_a_world(key, lambda: _beside(self.group, _FOR_WRITERS))


def once_a_world(key: Any, make: Callable[[], _T]) -> _T:
    """Return what ``make`` returned at the first call with this key in this world; a collective call.

    Process groups keep threads and sockets, so a new fit reuses those of an earlier fit.

    Args:
        key: says what it is.
        make: makes it.
    """
    world = dist.group.WORLD
    if _KEPT.get(_WORLD) is not world:
        _KEPT.clear()
        _KEPT[_WORLD] = world
    if key not in _KEPT:
        _KEPT[key] = make()
    made: _T = _KEPT[key]
    return made


def _inherit_kept() -> None:
    """Keep the parent's groups referenced in a forked child: their destructors join threads that do not exist there."""
    _INHERITED.append(dict(_KEPT))
    _KEPT.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_inherit_kept)


def swap_kept(kept: dict[Any, Any]) -> dict[Any, Any]:
    """Replace what `once_a_world` has made; returns what it was. For ranks that take turns in one process."""
    before = dict(_KEPT)
    _KEPT.clear()
    _KEPT.update(kept)
    return before


def _beside(
    group: dist.ProcessGroup | None, timeout: timedelta | None
) -> dist.ProcessGroup:
    """Make a gloo group of the same processes; all processes make all such groups, in the same order."""
    mine = tuple(
        range(dist.get_world_size())
        if group is None
        else dist.get_process_group_ranks(group)
    )
    everyone: list[Any] = [mine]
    if group is not None:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    made: dict[Any, dist.ProcessGroup] = {
        ranks: dist.new_group(list(ranks), timeout or _timeout(), backend="gloo")
        for ranks in sorted(set(everyone))
    }
    return made[mine]


def inherit_timeout(mesh: DeviceMesh) -> DeviceMesh:
    """Give the collectives of all axes the timeout of the world; torch gives them half an hour."""
    timeout = _timeout()
    for group in mesh.get_all_groups():
        if timeout is not None and group is not dist.group.WORLD:
            dist.distributed_c10d._set_pg_timeout(timeout, group)
    return mesh


def _timeout() -> timedelta | None:
    """Return the timeout of the world, where its backend has one."""
    world = dist.distributed_c10d._get_default_group()
    backends = [world._get_backend(device) for device in world._device_types]
    known = [
        options
        for backend in backends
        if (options := getattr(backend, "options", None)) is not None
    ]
    found: list[timedelta] = [options._timeout for options in known]
    return found[0] if found else None


def average_gradients(parameters: Iterable[nn.Parameter], group: ProcessGroup) -> None:
    """Average whole gradients over the ranks in one exchange for each dtype.

    A parameter that has a gradient on some ranks only counts as zero on the others; one that has none anywhere is
    left without.
    """
    everyone = [p for p in parameters if p.requires_grad]
    present = torch.tensor(
        [p.grad is not None for p in everyone], dtype=torch.float32, device=group.device
    )
    used = group.all_reduce(
        present, "max"
    ).tolist()  # sync point: which gradients exist differs from rank to rank
    gradients = []
    for parameter, is_used in zip(everyone, used, strict=True):
        if is_used:
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
        parameter.requires_grad_()  # torch registers no hook while it is frozen
        average_one = partial(_average_gradient, group)
        handles.append(parameter.register_post_accumulate_grad_hook(average_one))  # type: ignore[no-untyped-call]
        parameter.requires_grad_(not frozen)
    return handles


def _average_gradient(group: Group, parameter: Tensor) -> None:
    assert parameter.grad is not None
    group.all_reduce(parameter.grad, "mean")


def average(tensors: Iterable[Tensor], group: Group) -> None:
    """Average whole tensors over the ranks, in place, in one exchange for each dtype.

    Integers and bools, such as steps and quantized weights, have no mean and stay as they are.
    """
    means = (t for t in tensors if t.is_floating_point() or t.is_complex())
    _exchange(means, lambda flat: group.all_reduce(flat).div_(group.size))


def broadcast_buffers(module: nn.Module, group: ProcessGroup) -> None:
    """Give every rank the buffers of rank 0, in one exchange for each dtype."""
    _exchange(module.buffers(), group.broadcast)


def _exchange(tensors: Iterable[Tensor], exchange: Callable[[Tensor], Tensor]) -> None:
    """Write into tensors what an exchange of all of one dtype and device, laid end to end, returns."""
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for same in alike.values():
        flat = exchange(torch.cat([t.reshape(-1) for t in same]))
        for tensor, part in zip(
            same, torch.split(flat, [t.numel() for t in same]), strict=True
        ):
            tensor.copy_(part.view_as(tensor))


@contextmanager
def borrowed_buffers(module: nn.Module, group: ProcessGroup) -> Iterator[None]:
    """Give every rank rank 0's buffers inside the context; restore its own after it, except those written inside."""
    own = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    broadcast_buffers(module, group)
    lent = [
        (buffer, before, buffer.detach().clone())
        for buffer, before in own
        if not torch.equal(buffer.detach(), before)  # sync point: an evaluation begins
    ]
    try:
        yield
    finally:
        for buffer, before, borrowed in lent:
            if torch.equal(buffer.detach(), borrowed):  # sync point: an evaluation ends
                buffer.detach().copy_(before)
