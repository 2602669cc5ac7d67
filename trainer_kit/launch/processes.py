"""A function on several ranks of this machine: started, awaited, and ended together."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any, Final, final

from trainer_kit.core.errors import RankError, add_note
from trainer_kit.launch.failure import RankFailure, describe, root_first

__all__ = ["Ranks", "local_environment"]

_LAST_WORDS: Final = 5.0
"""Seconds that a process has to end after it has handed over its result."""


def local_environment(nproc: int) -> dict[str, str]:
    """The variables that ranks of one machine share; they meet on a free port of the loopback interface."""
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


@final
class Ranks:
    """``nproc`` processes that run one function.

    Args:
        context: a multiprocessing context.
        nproc: number of ranks.
        target: called as ``target(rank)``; must be picklable unless the context forks.
        environ: variables for all ranks; ``RANK`` and ``LOCAL_RANK`` are added.
        peer_grace: seconds that the others have once a rank has failed.
    """

    def __init__(
        self,
        context: Any,
        nproc: int,
        target: Callable[[int], Any],
        environ: Mapping[str, str],
        peer_grace: float = 3.0,
    ) -> None:
        self.nproc, self.peer_grace = nproc, peer_grace
        self._results: dict[int, Any] = {}
        self._errors: dict[int, BaseException | None] = {}
        self._failures: dict[int, RankFailure] = {}
        self._readers: list[Connection[Any, Any]] = []
        self._processes: list[Any] = []
        try:
            for rank in range(nproc):
                self._start(context, rank, target, {**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        except BaseException:
            self.close()
            raise

    def _start(self, context: Any, rank: int, target: Callable[[int], Any], environ: Mapping[str, str]) -> None:
        reader, writer = context.Pipe(duplex=False)
        self._readers.append(reader)
        process = context.Process(target=_work, args=(rank, target, environ, writer), name=f"rank-{rank}")
        try:
            process.start()
        finally:
            writer.close()  # so that the end of the process is the end of the pipe
        self._processes.append(process)

    @property
    def running(self) -> dict[int, int]:
        """The processes of the ranks that are neither done nor failed."""
        told = self._results.keys() | self._failures.keys()
        return {rank: process.pid for rank, process in enumerate(self._processes) if rank not in told}

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all ranks are done, or one has failed and the others have followed or were ended.

        Args:
            timeout: seconds; None for ever.

        Returns:
            False at the timeout.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        peers: float | None = None
        while self.running:
            if self._failures and peers is None:
                peers = time.monotonic() + self.peer_grace
            ends = [end for end in (deadline, peers) if end is not None]
            left = min(ends) - time.monotonic() if ends else None
            if left is not None and left <= 0:
                if peers is None:
                    return False
                self._stop_peers()
                break
            self._collect(left)
        return True

    def _collect(self, timeout: float | None) -> None:
        waiting = {self._readers[rank]: rank for rank in self.running}
        for reader in connection.wait(list(waiting), timeout):
            rank = waiting[reader]  # type: ignore[index]
            try:
                told = pickle.loads(self._readers[rank].recv_bytes())
            except (EOFError, OSError):
                self._died(rank)
                continue
            if "result" in told:
                self._results[rank] = pickle.loads(told["result"])
            else:
                self._errors[rank] = pickle.loads(told["error"]) if told["error"] else None
                self._failures[rank] = RankFailure(exit_code=1, **told["failure"])

    def _died(self, rank: int) -> None:
        process = self._processes[rank]
        process.join(_LAST_WORDS)
        self._failures[rank] = RankFailure(rank, process.exitcode, time.time_ns(), pid=process.pid)

    def _stop_peers(self) -> None:
        for rank, pid in self.running.items():
            self._processes[rank].kill()
            self._failures[rank] = RankFailure(rank, None, time.time_ns(), pid=pid, stopped=True)

    def results(self) -> list[Any]:
        """What each rank returned.

        Raises:
            BaseException: the exception of the rank that failed first, with its traceback and what became of the
                others as a note.
            RankError: for a rank that died, or whose exception cannot travel between processes.
        """
        if not self._failures:
            return [self._results[rank] for rank in range(self.nproc)]
        root = root_first(self._failures.values())[0]
        told = describe(list(self._failures.values()), self.nproc)
        error = self._errors.get(root.rank)
        if error is None:
            raise RankError(told)
        add_note(error, told)
        raise error

    def close(self) -> None:
        """End what still runs."""
        limit = time.monotonic() + (0 if self.running else _LAST_WORDS)
        for process in self._processes:
            process.join(max(0.0, limit - time.monotonic()))
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        for reader in self._readers:
            reader.close()


def _work(rank: int, target: Callable[[int], Any], environ: Mapping[str, str], writer: Connection[Any, Any]) -> None:
    """The body of one process."""
    _tie_to_parent()
    os.environ.update(environ)
    try:
        result = _returned(target, rank)
        told: dict[str, Any] = {"result": pickle.dumps(result)}
    except BaseException as error:
        told = _failure(rank, error)
    try:
        writer.send_bytes(pickle.dumps(told))
    except BrokenPipeError:
        return  # nobody listens any more
    writer.close()


def _returned(target: Callable[[int], Any], rank: int) -> Any:
    try:
        return target(rank)
    except SystemExit as exit_:
        if exit_.code:
            raise
        return None


def _failure(rank: int, error: BaseException) -> dict[str, Any]:
    kind = type(error)
    try:
        packed: bytes | None = pickle.dumps(error)
        pickle.loads(packed or b"")
    except Exception:
        packed = None
    if isinstance(error, SystemExit):
        packed = None  # in the parent it would end the parent
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    failure = {
        "rank": rank,
        "time_ns": time.time_ns(),
        "type": kind.__qualname__
        if kind.__module__ in ("builtins", "__main__")
        else f"{kind.__module__}.{kind.__name__}",
        "message": str(error),
        "traceback": "".join(traceback.format_exception(kind, error, trace)),
        "pid": os.getpid(),
    }
    return {"error": packed, "failure": failure}


def _tie_to_parent() -> None:
    if sys.platform == "linux":
        import ctypes
        import signal

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
