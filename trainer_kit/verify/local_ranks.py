"""Ranks as threads of this process that take turns: for a debugger, for coverage, and where no process can fork.

Only one rank runs at a time. It hands over where it waits for others, in a collective, and at its end; its random
numbers, environment variables and switches of torch are put back before it continues. So every rank computes what it
computes as a process, in bits: the collectives are those of gloo. This is the only file that replaces private parts of
torch.distributed; torch tests its own strategies on threads in this way, with collectives in Python.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import device_mesh
from torch.nn import functional as F

from trainer_kit.core.errors import LaunchError, RankError, add_note
from trainer_kit.core.seed import restore_rng, rng_state, swap_last_seed
from trainer_kit.core.tensors import tensors_of
from trainer_kit.core.types import Function
from trainer_kit.launch.processes import local_environment
from trainer_kit.strategies.fake_world import forget_layouts
from trainer_kit.strategies.process_group import swap_world_cache
from trainer_kit.verify.torch_private import (
    BARRIER,
    NEW_GROUP,
    OPERATIONS_ALIKE,
    WORLD,
    isolate_threads,
    new_group_function,
    worlds_of_threads,
)

__all__ = ["run_local"]

_C10D: Any = dist.distributed_c10d
# These modules have names that torch's types do not declare.
_MESHES: Any = device_mesh
_T = TypeVar("_T")
_RANK: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_GLOO_TIME: Final = timedelta(minutes=1)
"""For one collective, which begins when all its ranks have come."""
_ALIKE: Final = frozenset({
    "allreduce", "broadcast", "all_gather_single", "reduce_scatter_single", *OPERATIONS_ALIKE,
})  # fmt: skip
"""Collectives whose tensors have the same shapes on every rank."""
_DIFFERENT: Final = frozenset({
    "all_gather_single_coalesced", "all_to_all_single", "allgather", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "gather",
    "monitored_barrier", "reduce", "reduce_scatter", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced", "scatter",
})  # fmt: skip
"""Collectives whose tensors may have different shapes on the ranks."""


@final
class _PeerFailed(BaseException):
    """Ends a rank after another one has failed; no ``except Exception`` of a user's code stops it."""


@final
class _State:
    """The global state of this process that belongs to the rank that runs."""

    # Autograd and autocast keep their state per thread: it needs no swap.
    def __init__(self) -> None:
        self.random = rng_state()
        self.environ = dict(os.environ)
        self.seed = swap_last_seed(None)
        self.world_cache = swap_world_cache({})
        self.dtype = torch.get_default_dtype()
        self.anomaly = torch.is_anomaly_enabled()
        self.deterministic = torch.are_deterministic_algorithms_enabled()
        self.warns = torch.is_deterministic_algorithms_warn_only_enabled()
        self.attention = F.scaled_dot_product_attention
        self.cross_entropy = F.cross_entropy
        self.fast = torch.backends.mha.get_fastpath_enabled()

    def restore(self) -> None:
        """Make it the state of the process."""
        restore_rng(self.random)
        # In place: other code holds ``os.environ`` itself.
        for name in os.environ.keys() - self.environ.keys():
            del os.environ[name]
        for name, value in self.environ.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        swap_last_seed(self.seed)
        swap_world_cache(self.world_cache)
        torch.set_default_dtype(self.dtype)
        torch.autograd.set_detect_anomaly(self.anomaly)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warns)
        F.scaled_dot_product_attention = self.attention
        F.cross_entropy = self.cross_entropy
        torch.backends.mha.set_fastpath_enabled(self.fast)


@final
@dataclass(frozen=True)
class _Wait:
    """What a rank waits for.

    Attributes:
        name: the name of what is waited for.
        is_over: returns whether it has happened.
    """

    name: str
    is_over: Callable[[], bool]


@final
class _Turns:
    """Gives one rank at a time the turn to run.

    A rank is in one of four states: it has the turn, is ready for it, waits for other ranks, or is in a collective,
    with all of its ranks and without the turn.

    Args:
        ranks: number of ranks.
        state: the state that each rank begins with.

    Attributes:
        error: the error of the rank that failed first.
        failed: the number of that rank; -1: none, or all wait for each other.
        arrived: the description that each rank gave of a collective that is not complete, by the collective's key.
        posted: how many sends and receives have begun on each route.
    """

    def __init__(self, ranks: int, state: _State) -> None:
        self.error: BaseException | None = None
        self.failed = -1
        self.arrived: dict[object, dict[int, str]] = {}
        self.posted: Counter[tuple[_Route, str]] = Counter()
        self._states = [state] * ranks
        # Each rank is in exactly one of these four, under `_lock`.
        self._turn: int | None = 0
        others = range(1, ranks)
        self._ready = set(others)
        self._waits: dict[int, _Wait] = {}
        self._inside: set[int] = set()
        # The rank that gets the error of a deadlock, instead of the end of a peer.
        self._blamed: dict[int, BaseException] = {}
        # The rank of each thread, by the thread's identifier.
        self._ranks: dict[int, int] = {}
        self._lock = threading.Condition()

    @property
    def rank(self) -> int:
        """The rank of this thread."""
        rank = self._ranks.get(threading.get_ident())
        if rank is None:
            raise RankError(
                "a thread that is not a rank uses torch.distributed",
                found=threading.current_thread().name,
                fix="use processes as ranks: verify without local",
                disagree=False,
            )
        return rank

    def begin(self, rank: int) -> None:
        """Wait for the first turn of this thread, which becomes a rank."""
        with self._lock:
            self._ranks[threading.get_ident()] = rank
            self._take(rank)

    def end(self, rank: int, error: BaseException | None) -> None:
        """End a rank, and give its turn to the next one."""
        with self._lock:
            self._ranks.pop(threading.get_ident(), None)
            self._ready.discard(rank)
            if error is not None:
                self._fail(rank, error)
            self._pass_on()

    def call_together(
        self, name: str, is_over: Callable[[], bool], call: Callable[[], _T]
    ) -> _T:
        """Give the turn away until other ranks have done their part; then call, without the turn, and take it again.

        Args:
            name: the name of what is waited for.
            is_over: returns whether the others have done their part.
            call: the exchange, which waits for no rank any more.

        Returns:
            The result of ``call``.

        Raises:
            _PeerFailed: another rank has failed.
        """
        rank = self.rank
        with self._lock:
            if self.error is not None:
                raise self._blamed.pop(rank, None) or _PeerFailed
            self._states[rank] = _State()
            self._waits[rank] = _Wait(name, is_over)
            self._pass_on()
            self._until(rank, lambda: rank in self._inside or self.error is not None)
            if rank not in self._inside:
                # With the turn: the code that handles the exception reads the rank's state.
                self._take(rank)
                raise self._blamed.pop(rank, None) or _PeerFailed
        # All ranks of the exchange call at the same time, and not under the lock: gloo
        # waits inside the call until each of them has come.
        try:
            return call()
        finally:
            with self._lock:
                self._inside.discard(rank)
                self._ready.add(rank)
                self._choose()
                self._take(rank)

    def _take(self, rank: int) -> None:
        self._until(rank, lambda: self._turn == rank)
        self._states[rank].restore()

    def _until(self, rank: int, is_over: Callable[[], bool]) -> None:
        """Wait until something has happened; an interrupt ends all ranks."""
        try:
            # With a timeout: a signal that comes just before a wait is handled after it.
            while not self._lock.wait_for(is_over, timeout=1.0):
                pass
        except BaseException as error:
            # A second Ctrl-C reaches the main thread, also where another rank runs.
            self._inside.discard(rank)
            self._fail(rank, error)
            # The rank that has the turn does not wait: only an exception in its thread
            # stops it.
            if self._turn not in (None, rank):
                self._ready.add(rank)
                self._interrupt(self._turn)
            self._choose()
            self._lock.wait_for(lambda: self._turn == rank)
            self._states[rank].restore()
            raise

    def _interrupt(self, rank: int | None) -> None:
        """Raise an exception in the thread of a rank."""
        for thread, thread_rank in self._ranks.items():
            if thread_rank != rank:
                continue
            thread_id = ctypes.c_ulong(thread)
            exception = ctypes.py_object(_PeerFailed)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread_id, exception)
            return

    def _fail(self, rank: int, error: BaseException) -> None:
        # The first error is the cause; later ones are ranks that end because of it.
        if self.error is None:
            self.error = error
            self.failed = rank
        # Nothing that they wait for will happen. Each gets a turn, to end.
        self._ready |= self._waits.keys() - {rank}
        self._waits.clear()

    def _pass_on(self) -> None:
        self._turn = None
        self._choose()

    def _choose(self) -> None:
        """Give the turn to the first rank that is ready, once no collective runs: the order is always the same."""
        # While a collective runs no rank gets the turn: which of its ranks is the first to
        # be ready again would depend on which thread is faster.
        if self._turn is None and not self._inside:
            self._inside = {
                rank for rank, wait in self._waits.items() if wait.is_over()
            }
            for rank in self._inside:
                del self._waits[rank]
            # All remaining ranks wait, each for another one: processes would hang here.
            if not self._inside and not self._ready and self._waits:
                first = min(self._waits)
                error = self._stuck()
                self._blamed[first] = error
                self._fail(-1, error)
            if not self._inside and self._ready:
                self._turn = min(self._ready)
                self._ready.discard(self._turn)
        self._lock.notify_all()

    def _stuck(self) -> BaseException:
        positions = []
        for rank in range(len(self._states)):
            if rank in self._waits:
                positions.append(f"rank {rank} waits in {self._waits[rank].name}")
            else:
                positions.append(f"rank {rank} has ended")
        return RankError(
            "the ranks do not call the same collectives",
            found="; ".join(positions),
            fix="call the same collectives in the same order on every rank",
        )

    def meet(
        self,
        key: object,
        members: int,
        name: str,
        call: Callable[[], _T],
        detail: str = "",
    ) -> _T:
        """A collective: call together with all members.

        Args:
            key: equal on the members, and used once.
            members: number of ranks that take part.
            name: the name of the collective.
            call: the call of gloo.
            detail: what must be equal on the members, such as shapes.

        Returns:
            The result of ``call``.

        Raises:
            RankError: the members call different collectives.
        """
        description = name + detail
        arrived = self.arrived.setdefault(key, {})
        arrived[self.rank] = description
        # The last one compares, before gloo would wait for bytes that never come.
        if len(arrived) == members:
            del self.arrived[key]
            for rank, other_description in arrived.items():
                if other_description == description:
                    continue
                raise RankError(
                    "the ranks do not call the same collective",
                    found=f"rank {rank}: {other_description}; rank {self.rank}: {description}",
                    fix="call the same collectives, with the same shapes, on every rank",
                )
        return self.call_together(description, lambda: len(arrived) == members, call)


_current_turns: _Turns | None = None
"""The turns of the ranks of this process; None outside `run_local`."""


def _turns() -> _Turns:
    assert _current_turns is not None, "the ranks have ended"
    return _current_turns


_Plain: Any = dist.ProcessGroup


@final
class _Group(_Plain):  # type: ignore[misc]  # its methods differ between versions of torch
    """torch's process group over gloo whose ranks are threads.

    Args:
        store: holds the keys of the group.
        rank: the rank of this thread.
        size: number of ranks.
    """

    def __init__(self, store: object, rank: int, size: int) -> None:
        super().__init__(rank, size)
        # The group of gloo that exchanges the tensors; this one only waits for the ranks.
        self._inner: Any = _Plain(store, rank, size)
        self._calls = 0

    def _register_backend(self, *arguments: object) -> None:
        super()._register_backend(*arguments)
        self._inner._register_backend(*arguments)

    def _set_default_backend(self, kind: object) -> None:
        super()._set_default_backend(kind)
        self._inner._set_default_backend(kind)

    def send(self, tensors: list[Tensor], target: int, tag: int) -> _Transfer:
        """Start to send; the work waits for the receiver."""
        work = self._inner.send(tensors, target, tag)
        route = (self.group_name, self.rank(), target, tag)
        return _Transfer(work, route, "send", "recv")

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> _Transfer:
        """Start to receive; the work waits for the sender."""
        work = self._inner.recv(tensors, source, tag)
        route = (self.group_name, source, self.rank(), tag)
        return _Transfer(work, route, "recv", "send")

    def recv_anysource(self, *arguments: object) -> _Transfer:
        """Refused: whose turn it is would decide who sends."""
        raise RankError(
            "threads as ranks cannot receive from any rank",
            fix="dist.recv(tensor, src=rank)",
            disagree=False,
        )


def _collective(name: str) -> Function:
    """A method of a process group that calls a collective of gloo once all ranks have come."""

    def call(self: _Group, *arguments: object, **options: object) -> dist.Work | None:
        def run() -> dist.Work | None:
            work: dist.Work | None = getattr(self._inner, name)(*arguments, **options)
            # Also of an asynchronous call: no exchange may run on while ranks take turns.
            if work is not None:
                work.wait()
            return work

        self._calls += 1
        detail = ""
        if name in _ALIKE:
            shapes = [
                f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"
                for tensor in tensors_of(arguments[:2])
            ]
            detail = f"({', '.join(shapes)})"
        # The number of the call in this group: ranks that call different collectives
        # arrive under the same key, and are distinguished by name.
        key = self.group_name, self._calls
        return _turns().meet(key, self.size(), name, run, detail)

    return call


for _name in _ALIKE | _DIFFERENT:
    # torch 2.13 has renamed some.
    if hasattr(_Plain, _name):
        setattr(_Group, _name, _collective(_name))


_Route = tuple[str, int, int, int]
"""Group, sender, receiver and tag."""


@final
class _Transfer(dist.Work):
    """A tensor on its way from one rank to another.

    Args:
        work: the work of gloo.
        route: group, sender, receiver and tag.
        operation: what this rank does.
        counterpart: what the other one does.
    """

    def __init__(
        self, work: dist.Work, route: _Route, operation: str, counterpart: str
    ) -> None:
        super().__init__()
        posted = _turns().posted
        posted[route, operation] += 1
        # The n-th receive of a route takes the n-th send.
        count = posted[route, operation]
        self._work = work
        self._name = f"{operation} from rank {route[1]} to rank {route[2]}"
        self._is_over = lambda: posted[route, counterpart] >= count

    def wait(self, timeout: object = None) -> bool:
        """Wait for the other rank."""
        return bool(_turns().call_together(self._name, self._is_over, self._work.wait))


@contextmanager
def _threads_as_ranks(turns: _Turns) -> Iterator[None]:
    """Inside, groups that torch makes have threads as ranks."""
    base: Any = worlds_of_threads()

    class Worlds(base):  # type: ignore[misc]  # a class that torch does not type
        """The world of each rank; other threads have none, and would silently count as one process."""

        def _get_world(self) -> Any:
            # Raises in a thread that is not a rank.
            _ = turns.rank
            return super()._get_world()

    global _current_turns
    new_group = new_group_function()
    backend_of: Callable[[dist.ProcessGroup], str] = _MESHES.get_backend

    def make_group(
        size: int,
        rank: int,
        members: list[int],
        backend: object,
        store: object,
        group_name: object,
        **options: object,
    ) -> object:
        # The timeout of the user is meant for ranks that come late: here all of them have
        # come when gloo begins.
        options["timeout"] = _GLOO_TIME
        arguments = (size, rank, members, backend, store, group_name)
        call = partial(new_group, *arguments, **options)
        # A rank outside the group gets a placeholder at once, and waits for no rank.
        if members and turns.rank not in members:
            return call()
        key = ("new", group_name, tuple(members))
        return turns.meet(key, len(members) or size, "new_group", call)

    def arrive(
        rank: int, store: object, name: object, count: int, *_: object, **__: object
    ) -> None:
        # torch's barrier polls the store, while no other rank could take its turn.
        turns.meet(("made", name), count, "new_group", lambda: None)

    def get_backend(group: dist.ProcessGroup | None = None) -> str:
        if group is None:
            return "threaded"
        return backend_of(group)

    # torch replaces the hook when a process group starts.
    excepthook = sys.excepthook
    _current_turns = turns
    # Each thread then has a registry of group names of its own.
    isolate_threads(True)
    try:
        with (
            _replaced(
                _C10D,
                {
                    NEW_GROUP: make_group,
                    BARRIER: arrive,
                    WORLD: Worlds(),
                    "ProcessGroup": _Group,
                },
            ),
            # Meshes of different threads then differ, and no cache gives a rank the part
            # of another one.
            _replaced(_MESHES, {"get_backend": get_backend}),
        ):
            yield
    finally:
        isolate_threads(False)
        sys.excepthook = excepthook
        # A later thread may have the number of one of these.
        forget_layouts()
        _current_turns = None


@contextmanager
def _replaced(owner: object, values: Mapping[str, object]) -> Iterator[None]:
    """Inside, attributes of a module of torch have other values."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def run_local(fn: Callable[[int], object], ranks: int) -> None:
    """Run ``fn(rank)`` on ranks that are threads of this process; rank 0 is this thread.

    One rank runs at a time, and each has random numbers, environment variables and switches of torch of its own, which
    begin as those of this process and leave it unchanged. Other global state, such as variables of a user's module, is
    shared. With one rank there is no thread and no process group.

    Args:
        fn: called on every rank.
        ranks: number of ranks.

    Raises:
        LaunchError: this process has ranks already.
        RankError: the ranks do not call the same collectives, which would hang processes.
        BaseException: the error of the rank that failed first, with its traceback; the others end where they wait.

    Example:
        >>> worlds = []
        >>> run_local(lambda rank: worlds.append((rank, dist.get_world_size(), os.environ["RANK"])), 2)
        >>> worlds
        [(0, 2, '0'), (1, 2, '1')]
    """
    if _current_turns is not None:
        raise LaunchError(
            "a rank cannot start ranks", found=f"rank {_turns().rank} of threads"
        )
    # `_State` takes the seed and the cache of worlds out of their globals: `restore` puts
    # them back for the ranks to start with.
    before = _State()
    threads = torch.get_num_threads()
    before.restore()
    try:
        if ranks == 1:
            # One process has no launcher, and so none of its variables.
            for name in _RANK:
                os.environ.pop(name, None)
            torch.set_num_threads(1)
            fn(0)
        else:
            _run(fn, ranks, _Turns(ranks, before))
    finally:
        before.restore()
        torch.set_num_threads(threads)
        # Groups of gloo have threads, which end with the reducers that use them.
        gc.collect()


def _run(fn: Callable[[int], object], ranks: int, turns: _Turns) -> None:
    shared = local_environment(ranks)
    # A store in memory: threads need no port.
    store = dist.HashStore()  # type: ignore[attr-defined]  # not in torch's stubs

    def run(rank: int) -> None:
        error: BaseException | None = None
        try:
            turns.begin(rank)
            os.environ.update({**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            # As forked ranks: with more threads a sum has another order.
            torch.set_num_threads(1)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
            try:
                fn(rank)
            finally:
                dist.destroy_process_group()
        except SystemExit as exit_:
            # ``sys.exit(0)`` of a script ends a rank without an error.
            if exit_.code:
                error = RankError(
                    "a rank has ended the program",
                    found=f"sys.exit({exit_.code!r})",
                    disagree=False,
                )
                error.__cause__ = exit_
        except BaseException as caught:
            error = caught
        # In every case: the other ranks wait for this turn.
        turns.end(rank, error)

    # Rank 0 is this thread: signals, notebooks and debuggers expect it there.
    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank-{rank}", daemon=True)
        for rank in range(1, ranks)
    ]
    with _threads_as_ranks(turns):
        for thread in threads:
            thread.start()
        run(0)
        for thread in threads:
            thread.join()
    if turns.error is not None:
        if turns.failed >= 0:
            add_note(
                turns.error,
                f"raised on rank {turns.failed} of {ranks}, a thread of this process",
            )
        raise turns.error
