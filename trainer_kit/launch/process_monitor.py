"""A thread of the agent that notices at once when a rank ends, and ends the others when they do not follow."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, final

from trainer_kit.launch.failure import read_reports

__all__ = ["Watch"]

_PERIOD: Final = 0.02
_EXIT_TIME: Final = 30.0


@final
class Watch(threading.Thread):
    """Watches the ranks beside torch's agent, which waits 30 s for a rank that does not react.

    Args:
        pids: the process of each rank; empty before they are started. Each leads a process group of its own.
        reports: where ranks leave their error files.
        peer_grace: seconds that the others have once a rank has failed.
        signal_grace: seconds that all have once the agent was told to stop.

    Attributes:
        deaths: when each rank was seen to have ended, in nanoseconds of the clock.
        killed: the ranks that did not end by themselves.
        stop_signal: what the agent was told to stop with.
        forwarded: the signals that were only passed on.
    """

    def __init__(
        self, pids: Callable[[], Mapping[int, int]], reports: Path, *, peer_grace: float, signal_grace: float
    ) -> None:
        super().__init__(name="trainer_kit-watch", daemon=True)
        self.deaths: dict[int, int] = {}
        self.killed: set[int] = set()
        self.stop_signal: int | None = None
        self.forwarded: set[int] = set()
        self._pids, self._reports = pids, reports
        self._peer_grace, self._signal_grace = peer_grace, signal_grace
        self._deadline: float | None = None
        self._handles: dict[int, int] = {}
        self._over = threading.Event()

    def run(self) -> None:
        next_look = 0.0
        try:
            while not self._over.is_set():
                self._wait()
                for rank, pid in self._pids().items():
                    if rank not in self.deaths and (code := self._ended(rank, pid)) is not None:
                        self.deaths[rank] = time.time_ns()
                        if code != 0:
                            self._set_deadline(self._peer_grace)
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + 1.0
                    self._look_for_stuck()
                if self._deadline is not None and time.monotonic() >= self._deadline:
                    self.kill()
        finally:
            for handle in self._handles.values():
                os.close(handle)

    def _wait(self) -> None:
        """Until a rank ends, or for one period."""
        open_process = getattr(os, "pidfd_open", None)
        if open_process is None:
            self._over.wait(_PERIOD)
            return
        poll = select.poll()
        for rank, pid in self._pids().items():
            if rank in self.deaths:
                continue
            if rank not in self._handles:
                with contextlib.suppress(OSError):
                    self._handles[rank] = open_process(pid)
            if rank in self._handles:
                poll.register(self._handles[rank], select.POLLIN)
        poll.poll(_PERIOD * 1000)

    def _ended(self, rank: int, pid: int) -> int | None:
        """The exit code of a rank that has ended (negative for a signal); it is left to torch's agent to collect."""
        try:
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # that agent was faster, which is rare: an exception still shows
            return 1 if rank in read_reports(self._reports) else 0
        if end is None:
            return None
        return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status

    def _look_for_stuck(self) -> None:
        """A rank has reported its exception but hangs on its way out: its exit is what everybody waits for."""
        if any(self._reports.rglob("error.json")):
            self._set_deadline(_EXIT_TIME)

    def _set_deadline(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        if self.stop_signal is None and (self._deadline is None or deadline < self._deadline):
            self._deadline = deadline

    def note_signal(self, number: int) -> None:
        """The agent was told to stop, and tells the ranks: they have the longer grace from now on."""
        self._deadline, self.stop_signal = time.monotonic() + self._signal_grace, number

    def forward(self, number: int) -> None:
        """Send a signal to every rank that lives."""
        self.forwarded.add(number)
        for rank, pid in self._pids().items():
            if rank not in self.deaths:
                _send(os.kill, pid, number)

    def kill(self) -> None:
        """End every rank that lives, with what it started."""
        for rank, pid in self._pids().items():
            if rank not in self.deaths:
                self.killed.add(rank)
                _send(os.killpg, pid, signal.SIGKILL)

    def stop(self, sweep: bool) -> None:
        """End the watch.

        Args:
            sweep: also end what the ranks started and left behind.
        """
        self._over.set()
        self.join()
        if sweep:
            for pid in self._pids().values():
                _send(os.killpg, pid, signal.SIGKILL)


def _send(how: Callable[[int, int], None], pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        how(pid, number)
