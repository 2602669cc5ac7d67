"""Ranks as child processes of this one: for notebooks, interactive sessions and tests, which cannot be run again."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import random
import shutil
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, final

import torch
import torch.distributed as dist

from trainer_kit.core.environment import Environment, usable_cores
from trainer_kit.core.errors import LaunchError, RankError, add_note
from trainer_kit.launch.bootstrap import (
    die_with_parent,
    position_of_rank,
    qualified_name,
    write_report,
)
from trainer_kit.launch.failure import (
    AGENT_DIRECTORY,
    RankFailure,
    describe,
    note_end,
    root_first,
    share_failures,
    with_early_ends,
)

__all__ = [
    "Ranks",
    "local_environment",
    "no_garbage_in_forks",
    "run_beside",
    "run_forked",
]

_EXIT_TIME: Final = 5.0
"""Seconds that a process has to end after it has sent its result."""

_Result = TypeVar("_Result")
_StartMethod = Literal["auto", "fork", "forkserver", "spawn"]


def local_environment(nproc: int) -> dict[str, str]:
    """The variables that ranks of one machine share; their rendezvous is a free port of the loopback interface."""
    # Another process may take the port before rank 0 listens there: then rank 0 raises.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if sys.platform == "linux":
        shared["GLOO_SOCKET_IFNAME"] = "lo"
    return shared


def run_forked(
    fn: Callable[[int], _Result],
    nproc: int,
    start_method: _StartMethod = "auto",
    *,
    directory: Path | None = None,
    failed: Callable[[BaseException, Sequence[RankFailure]], BaseException]
    | None = None,
) -> _Result:
    """Run ``fn(rank)`` on ``nproc`` processes of this machine, with the rank environment set, and wait for them.

    Forked ranks see everything of this process, closures and notebook cells included, and compute with one thread:
    the OpenMP threads of this process do not survive a fork, and waiting for them would hang.

    Args:
        fn: called on every rank; the result of rank 0 must be picklable.
        nproc: number of ranks.
        start_method: ``auto`` forks. ``spawn`` and ``forkserver`` start new interpreters and need a picklable ``fn``.
        directory: where the ranks report, in a directory that is removed at the end; default: that of temporary files.
        failed: returns what to raise instead of a failed rank's exception, from it and the ends of all failed ranks.

    Returns:
        The result of rank 0.

    Raises:
        LaunchError: when a fork cannot work because an accelerator is in use here or this process is in a process
            group, or ``fn`` cannot be pickled.
        RankError: when a rank died.
        BaseException: of the rank that failed first, with that rank's traceback as a note.

    Example:
        >>> factor = 20
        >>> run_forked(lambda rank: factor + rank, 2)
        20
    """
    environment = Environment.detect()
    if environment.launched:
        raise LaunchError(
            "a rank cannot start ranks",
            found=f"rank {environment.rank} of {environment.world_size} ({environment.source})",
        )
    if nproc < 1:
        raise LaunchError("at least one rank is needed", found=f"nproc={nproc}")
    method = start_method
    if start_method == "auto":
        method = "fork"
    if method not in multiprocessing.get_all_start_methods():
        raise LaunchError(
            f"this system cannot start processes by {method}",
            fix="move the code into a script: python train.py",
        )
    if method == "fork":
        _check_fork()
    else:
        _check_picklable(fn, method)
    with warnings.catch_warnings():
        # Python 3.12 and later warn of a fork in a process with threads; one thread per rank avoids that problem.
        warnings.filterwarnings(
            "ignore", message=".*fork.*", category=DeprecationWarning
        )
        target = _Target(fn, method == "fork")
        ranks = Ranks(
            multiprocessing.get_context(method),
            nproc,
            target,
            local_environment(nproc),
            directory=directory,
        )
    try:
        ranks.wait()
        # The result went through a pickle.
        return ranks.results()[0]  # type: ignore[no-any-return]
    except BaseException as error:
        if failed is None or not ranks.failures:
            raise
        raise failed(error, ranks.failures) from None
    finally:
        ranks.close()


def run_beside(functions: Sequence[Callable[[], _Result]]) -> list[_Result]:
    """Call independent functions at the same time, on as many cores: the first one here, the others in forks.

    A function is called here, too, where a fork is not possible, or has not returned a result. So an exception is
    always that of a call here. What a function changes in a fork is lost.

    Args:
        functions: whose results can be pickled.

    Returns:
        Their results, in order.

    Example:
        >>> run_beside([lambda: 1 + 1, lambda: "a" * 3])
        [2, 'aaa']
    """
    forks: list[tuple[Any, Connection[Any, Any]]] = []
    has_fork = "fork" in multiprocessing.get_all_start_methods()
    # multiprocessing does not let a daemon have children.
    is_daemon = multiprocessing.current_process().daemon
    can_fork = has_fork and not is_daemon
    if can_fork and usable_cores() > 1 and _device_in_use() is None:
        with no_garbage_in_forks(), warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=".*fork.*", category=DeprecationWarning
            )
            context = multiprocessing.get_context("fork")
            for function in functions[1 : usable_cores()]:
                reader, writer = context.Pipe(duplex=False)
                process = context.Process(target=_send_result, args=(function, writer))
                process.start()
                # The pipe must end when the fork ends, not when this process does.
                writer.close()
                forks.append((process, reader))
    try:
        results = [functions[0]()]
        for function, (_, reader) in zip(functions[1:], forks, strict=False):
            try:
                results.append(pickle.loads(reader.recv_bytes()))
            except Exception:
                # It failed there, or its result cannot be read here: the call here has the exception.
                results.append(function())
        not_forked = functions[1 + len(forks) :]
        return results + [function() for function in not_forked]
    finally:
        for process, reader in forks:
            reader.close()
            process.kill()
            process.join()


def _send_result(function: Callable[[], Any], writer: Connection[Any, Any]) -> None:
    if sys.platform == "linux":
        die_with_parent()
    torch.set_num_threads(1)
    try:
        writer.send_bytes(pickle.dumps(function()))
    except BaseException:
        # Without exit handlers, which are the parent's; the parent calls the function again, and has its exception.
        os._exit(1)


@final
class _Target:
    """Calls ``fn`` in a rank's process."""

    def __init__(self, fn: Callable[[int], Any], forked: bool) -> None:
        self.fn = fn
        self.forked = forked
        self.random_state = None
        if forked:
            self.random_state = random.getstate()

    def __call__(self, rank: int) -> Any:
        if self.forked:
            os.environ["OMP_NUM_THREADS"] = "1"
            torch.set_num_threads(1)
        # Python seeds its generator again in each fork; torch and NumPy do not.
        if self.random_state is not None:
            random.setstate(self.random_state)
        result = self.fn(rank)
        # Only the result of rank 0 is returned, so only that one must be picklable.
        if rank != 0:
            return None
        return result


def _device_in_use() -> str | None:
    """The type of an accelerator that this process has used, which does not survive a fork."""
    device = torch.accelerator.current_accelerator()
    if device is None:
        return None
    # A device that is present and was not used has no context that a fork could break.
    is_initialized = getattr(torch.get_device_module(device), "is_initialized", None)
    if is_initialized is None or not is_initialized():
        return None
    return device.type


def _check_fork() -> None:
    used = _device_in_use()
    if used is not None:
        raise LaunchError(
            "ranks can no longer be forked",
            found=f"this process has used the {used} device, which does not survive a fork",
            fix="restart the notebook's kernel and start training before anything else touches the device",
        )
    if dist.is_available() and dist.is_initialized():
        raise LaunchError(
            "ranks can no longer be forked",
            found=f"a process group (world size {dist.get_world_size()}), whose threads do not survive a fork",
            fix="call torch.distributed.destroy_process_group() first, or restart the notebook's kernel",
        )


def _check_picklable(fn: Callable[[int], Any], method: str) -> None:
    try:
        pickle.dumps(fn)
    except Exception as error:
        raise LaunchError(
            f"the function cannot be pickled for a process started by {method}",
            found=f"{type(error).__name__}: {error}",
            fix='define it at the top of a module, or use start_method="fork"',
        ) from None


_is_frozen = False
"""Whether a `no_garbage_in_forks` of this process is open."""


@contextmanager
def no_garbage_in_forks() -> Iterator[None]:
    """Collect garbage before the fork: a torch store that the child collects may wait for a thread of the parent.

    Inside another one, or where the program itself froze its objects, they stay frozen: the next collection is fast.
    """
    global _is_frozen
    # Counting what is frozen takes a tenth of a second in a large program, so it is not done inside another one.
    stays_frozen = _is_frozen or gc.get_freeze_count() > 0
    was_frozen = _is_frozen
    _is_frozen = True
    gc.collect()
    # The child never collects what is frozen.
    gc.freeze()
    try:
        yield
    finally:
        _is_frozen = was_frozen
        if not stays_frozen:
            gc.unfreeze()


@final
class Ranks:
    """``nproc`` processes that run one function.

    Args:
        context: a multiprocessing context.
        nproc: number of ranks.
        target: called as ``target(rank)``; must be picklable unless the context forks.
        environ: variables for all ranks; ``RANK`` and ``LOCAL_RANK`` are added.
        peer_grace: seconds that the others have after a rank has failed.
        directory: where the directory of the ranks' reports is created; None: where temporary files are.
    """

    def __init__(
        self,
        context: Any,
        nproc: int,
        target: Callable[[int], Any],
        environ: Mapping[str, str],
        peer_grace: float = 3.0,
        directory: Path | None = None,
    ) -> None:
        self.nproc = nproc
        self.peer_grace = peer_grace
        self._results: dict[int, Any] = {}
        # Of ranks that returned, which may have left the others too early.
        self._ends: dict[int, RankFailure] = {}
        self._errors: dict[int, BaseException | None] = {}
        self._failures: dict[int, RankFailure] = {}
        # Monotonic seconds; set by the first failure.
        self._peer_deadline: float | None = None
        self._readers: list[Connection[Any, Any]] = []
        self._processes: list[Any] = []
        # Ranks read there why their connection broke: their pages and journals name the first failure.
        self._reports = Path(tempfile.mkdtemp(prefix=AGENT_DIRECTORY, dir=directory))
        try:
            with no_garbage_in_forks():
                for rank in range(nproc):
                    self._start(
                        context,
                        rank,
                        target,
                        {**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    )
        except BaseException:
            self.close()
            raise

    def _start(
        self,
        context: Any,
        rank: int,
        target: Callable[[int], Any],
        environ: Mapping[str, str],
    ) -> None:
        reader, writer = context.Pipe(duplex=False)
        self._readers.append(reader)
        (self._reports / str(rank)).mkdir()
        process = context.Process(
            target=_work,
            args=(rank, target, environ, writer, self._reports),
            name=f"rank-{rank}",
        )
        try:
            process.start()
        finally:
            # The pipe ends when the process ends: this is how its death is noticed.
            writer.close()
        self._processes.append(process)

    @property
    def running(self) -> dict[int, int]:
        """The processes of the ranks that are neither done nor failed."""
        ended = self._results.keys() | self._failures.keys()
        return {
            rank: process.pid
            for rank, process in enumerate(self._processes)
            if rank not in ended
        }

    @property
    def failures(self) -> list[RankFailure]:
        """How each rank that failed has ended, the cause first."""
        return root_first(
            with_early_ends(list(self._failures.values()), self._ends.values())
        )

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all ranks are done, or one has failed and the others have ended or were killed.

        Args:
            timeout: seconds; None waits without a limit.

        Returns:
            False at the timeout.
        """
        deadline = None
        if timeout is not None:
            deadline = time.monotonic() + timeout
        while self.running:
            now = time.monotonic()
            # The first failure that is seen may be only a lost connection: its cause arrives in the grace period.
            if self._failures and self._peer_deadline is None:
                self._peer_deadline = now + self.peer_grace
            if self._peer_deadline is not None and now >= self._peer_deadline:
                self._stop_peers()
                break
            if deadline is not None and now >= deadline:
                return False
            deadlines = [
                limit for limit in (deadline, self._peer_deadline) if limit is not None
            ]
            remaining = None
            if deadlines:
                remaining = min(deadlines) - now
            self._collect_messages(remaining)
        return True

    def _collect_messages(self, timeout: float | None) -> None:
        waiting = {self._readers[rank]: rank for rank in self.running}
        for reader in connection.wait(list(waiting), timeout):
            rank = waiting[reader]  # type: ignore[index]
            try:
                message = pickle.loads(self._readers[rank].recv_bytes())
            except (EOFError, OSError):
                # The pipe ended without a message: the process has died, and its exit code says how.
                process = self._processes[rank]
                process.join(_EXIT_TIME)
                failure = RankFailure(
                    rank,
                    process.exitcode,
                    time.time_ns(),
                    host=socket.gethostname(),
                    pid=process.pid,
                )
                self._failures[rank] = failure
                _report(self._reports, failure)
                continue
            if "result" in message:
                self._results[rank] = pickle.loads(message["result"])
                self._ends[rank] = RankFailure(
                    rank,
                    0,
                    time.time_ns(),
                    host=socket.gethostname(),
                    pid=self._processes[rank].pid,
                )
                note_end(self._reports, self._ends[rank])
            else:
                pickled = message["error"]
                self._errors[rank] = None
                if pickled:
                    self._errors[rank] = pickle.loads(pickled)
                self._failures[rank] = message["failure"]

    def _stop_peers(self) -> None:
        for rank, pid in self.running.items():
            self._processes[rank].kill()
            self._failures[rank] = RankFailure(
                rank, None, time.time_ns(), pid=pid, stopped=True
            )

    def results(self) -> list[Any]:
        """The result of each rank.

        Raises:
            BaseException: the exception of the rank that failed first, with its traceback and the failures of the
                others as a note.
            RankError: for a rank that died, or whose exception cannot be pickled.
        """
        if not self._failures:
            return [self._results[rank] for rank in range(self.nproc)]
        message = describe(self.failures, self.nproc)
        error = self._errors.get(self.failures[0].rank)
        if error is None:
            raise RankError(message, disagree=False)
        add_note(error, message)
        raise error

    def close(self) -> None:
        """End the processes that still run."""
        limit = time.monotonic()
        # Ranks that have sent their result are about to end; the others would not end by themselves.
        if not self.running:
            limit += _EXIT_TIME
        for process in self._processes:
            process.join(max(0.0, limit - time.monotonic()))
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        for reader in self._readers:
            reader.close()
        shutil.rmtree(self._reports, ignore_errors=True)


def _work(
    rank: int,
    target: Callable[[int], Any],
    environ: Mapping[str, str],
    writer: Connection[Any, Any],
    reports: Path,
) -> None:
    """Run ``target`` in a rank's process, and send its result to the parent."""
    if sys.platform == "linux":
        die_with_parent()
    os.environ.update(environ)
    share_failures(reports)
    try:
        message: dict[str, Any] = {"result": pickle.dumps(_result(target, rank))}
    except BaseException as error:
        failure = _failure(rank, error)
        _report(reports, failure)
        message = {"error": _packed(error), "failure": failure}
    try:
        writer.send_bytes(pickle.dumps(message))
    except BrokenPipeError:
        # The parent is gone, and nothing waits for the result.
        return
    writer.close()


def _report(directory: Path, failure: RankFailure) -> None:
    """Write a failure where the other ranks read it."""
    write_report(
        str(directory / str(failure.rank) / "error.json"),
        failure.rank,
        failure.type,
        failure.message,
        failure.traceback,
        failure.where,
        failure.exit_code or 0,
        failure.pid,
    )


def _result(target: Callable[[int], Any], rank: int) -> Any:
    try:
        return target(rank)
    except SystemExit as exit_:
        if exit_.code:
            raise
        return None


def _packed(error: BaseException) -> bytes | None:
    """Pickle an exception; None if that fails, and for SystemExit, which would end the parent."""
    if isinstance(error, SystemExit):
        return None
    # Many exceptions can be pickled, but not be read again: their constructor takes other arguments than their text.
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
    except Exception:
        return None
    return packed


def _failure(rank: int, error: BaseException) -> RankFailure:
    trace = error.__traceback__
    # The frames of this file come first, and the user has not called them.
    while (
        trace is not None
        and trace.tb_next is not None
        and trace.tb_frame.f_code.co_filename == __file__
    ):
        trace = trace.tb_next
    lines = "".join(traceback.format_exception(type(error), error, trace))
    return RankFailure(
        rank,
        1,
        time.time_ns(),
        qualified_name(error),
        str(error),
        lines,
        host=socket.gethostname(),
        pid=os.getpid(),
        where=position_of_rank(),
    )
