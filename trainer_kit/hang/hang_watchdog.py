"""A thread that detects when training makes no progress, finds the rank that hangs, and ends the run."""

from __future__ import annotations

import atexit
import itertools
import json
import math
import os
import select
import signal
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn, final

from trainer_kit.core.thread_frames import thread_frames
from trainer_kit.hang.collectives import issued_collectives
from trainer_kit.hang.end_rank import Verdict, end_rank, print_line
from trainer_kit.hang.hang_timeout import PATIENT, ProgressClock
from trainer_kit.hang.position import OUTSIDE, awaited_worker, find_position
from trainer_kit.hang.stacks import (
    answering_file,
    boot_id,
    is_stopped,
    read_stacks,
    start_time,
)
from trainer_kit.hang.torch_private import COMPILERS, Store, connect_to_store
from trainer_kit.hang.verdict import Finding, Report, find_culprits, name_silent
from trainer_kit.launch.startup_timeout import patience

__all__ = ["EXIT_CODE", "HangWatchdog", "hang_watchdog", "stop_at_exit"]

EXIT_CODE: Final = 75
"""The exit code of a run that hangs: EX_TEMPFAIL, which makes batch systems restart a job."""
_FAST_INTERVAL: Final = 0.25
"""Seconds between two checks when a hang is near."""
_GUARD_INTERVAL: Final = 2.0
"""Seconds between two checks of the thread that queries the store."""
_MAX_GUARD_CHECKS: Final = 5
"""The number of such checks after which a store without an answer counts as dead."""
_STORE_TIMEOUT: Final = timedelta(seconds=10)
"""The limit for one request. The guard finds a store without an answer in this time too."""
_MAX_PAUSE: Final = 2.0
"""Seconds between two checks above which this process was stopped, or its interpreter locked."""
_NUMBERS: Final = itertools.count(1)
"""Number the watchdogs of this process, as all ranks make them in the same order."""


@final
@dataclass(frozen=True)
class _Question:
    """A request for the position of every rank.

    Attributes:
        number: of the request, counted over all ranks.
        time: of the request, by this rank's monotonic clock in seconds.
        ends: whether its answers may end the run.
    """

    number: int
    time: float
    ends: bool


@final
@dataclass(frozen=True)
class _Signal:
    """A signal that this process has got: its number, and when, by the monotonic clock in seconds."""

    number: int
    time: float


@final
class HangWatchdog:
    """Finds the rank that hangs, and ends the run with exit code 75.

    Its thread reads existing counters of the loop and the main thread's frames, so it adds no cost to a step. Each rank
    writes heartbeats to the rendezvous store. A rank without progress asks all ranks for their position; the others
    describe a rank that cannot answer (because it is stopped, or its interpreter is locked).

    Args:
        rank: the rank of this process.
        size: the number of processes.
        timeout: seconds without progress; None: ten times the slowest ordinary step, at least 60 s. Infinite: only
            report a rank that waits for others.
        progress: called by the thread; returns the completed steps, and a value that changes with each progress.
        directory: called at a hang; returns the directory for the stacks, or None.
        say: prints a line; called when this process has waited for others for ``TRAINER_KIT_PATIENCE`` seconds.
        advice: the end of that line.
        unit: the unit that ``progress`` counts.
        signals: detect SIGTERM and Ctrl-C, after which a step that hangs has 15 s. Main thread only.
        note: called with the verdict's text and the directory of the stacks, on one rank, before the run ends.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        timeout: float | None,
        progress: Callable[[], tuple[int, object]],
        directory: Callable[[], Path | None],
        say: Callable[[str], None],
        *,
        advice: str = "",
        unit: str = "step",
        signals: bool = False,
        note: Callable[[str, str], object] = lambda text, stacks: None,
    ) -> None:
        self.rank = rank
        self.size = size
        self._unit = unit
        self._note = note
        self._progress = progress
        self._directory = directory
        self._say = say
        self._advice = advice
        self._main_thread = threading.get_ident()
        self._clock = ProgressClock(timeout, time.monotonic(), progress()[0])
        self._last_check = time.monotonic()
        self._slept = 0.0
        self._patience = patience()
        self._warned = False
        self._signal: _Signal | None = None
        self._question: _Question | None = None
        self._next_question_at = 0.0
        self._answered = 0
        # The thread that will end this process.
        self._ending: threading.Thread | None = None
        # For each stopped rank the time at which this rank first saw that.
        self._stopped: dict[int, float] = {}
        self._report = Report(
            rank=rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=start_time(os.getpid()),
            boot=boot_id(),
            error_file=os.environ.get("TORCHELASTIC_ERROR_FILE", ""),
            stacks=answering_file() if size > 1 else "",
        )
        self._store: Store | None = self._connect() if size > 1 else None
        # The report of rank 0, which may serve the store.
        self._server: Report | None = None
        self.asking: float | None = None
        """The start time of a request that the store has not answered yet."""
        self._done = threading.Event()
        # The pipe wakes the thread from its sleep: a signal of Python cannot, while the main thread is stuck.
        reads, self._writes = os.pipe()
        os.set_blocking(self._writes, False)
        # Closing the pipe ends the thread.
        self._close = weakref.finalize(self, os.close, self._writes)
        self._wakeup = _wake_by_signals(self._writes) if signals else None
        # The guard ends with the watchdog, not at its next check.
        weakref.finalize(self, self._done.set)
        # Weak: a watchdog that its run has lost ends its threads, which do not keep it alive.
        watchdog = weakref.ref(self)
        self._thread = _start_thread("hang watchdog", _run, watchdog, reads)
        if size > 1:
            _start_thread("hang watchdog's guard", _guard, watchdog, self._done)

    def _connect(self) -> Store:
        """Connect to the store of the ranks, apart from the main thread's connection, which may be blocked."""
        prefix = f"trainer_kit/hang/{next(_NUMBERS)}"
        store = connect_to_store(prefix, _STORE_TIMEOUT)
        store.set(f"beat/{self.rank}", self._report.dumped())
        return store

    @property
    def every(self) -> float:
        """The seconds until the next check."""
        interval = min(self._clock.every, self._patience / 4)
        is_asked = self._question is not None or self._signal is not None
        if is_asked or 2 * self.seconds > self._clock.limit:
            return min(interval, _FAST_INTERVAL)
        return interval

    @property
    def seconds(self) -> float:
        """The seconds since the last progress."""
        return time.monotonic() - self._clock.since

    def stop(self) -> None:
        """End the threads; the other ranks learn that this rank no longer answers."""
        self._done.set()
        if self._wakeup is not None:
            self._wakeup()
            self._wakeup = None
        if self._thread.is_alive():
            with suppress(OSError):
                os.write(self._writes, b"\0")
            if threading.current_thread() is not self._thread:
                self._thread.join(2.0)
                # The end of another rank may have brought the main thread here.
                if self._ending is not None:
                    self._ending.join()
        self._close()

    def note_signals(self, numbers: bytes) -> None:
        """Record the numbers of received signals."""
        for number in numbers:
            if number in (signal.SIGTERM, signal.SIGINT) and self._signal is None:
                self._signal = _Signal(number, time.monotonic())

    def slept(self, seconds: float) -> None:
        """Record how long the thread waited before this check."""
        self._slept = seconds

    def look(self) -> None:
        """Check once; the thread calls this."""
        now = time.monotonic()
        # What is left of the time after the sleep is time in which this process did not run.
        pause = now - self._last_check - self._slept
        if pause <= _MAX_PAUSE:
            pause = 0.0
        self._last_check = now
        progressed = self._measure(now, pause)
        if progressed and pause == 0.0:
            self._warned = False
            self._question = None
        if self.size == 1:
            code = self._exit_code(now)
            if code is not None:
                answers = {0: self._update_report(full=True)}
                self._end(find_culprits(answers, {}, 1), code, answers, {})
            return
        if self._store is None:
            self.look_alone(0.0)
            return
        self.asking = now
        try:
            self._exchange(now)
        except RuntimeError:
            # The store's process or machine has ended.
            self._store = None
        finally:
            self.asking = None

    def look_alone(self, gap: float) -> None:
        """Check once without the store, whose process is stopped or has ended.

        Args:
            gap: seconds for which this process did not run.
        """
        now = time.monotonic()
        self._measure(now, gap)
        position = self._clock.position
        code = self._exit_code(now)
        if code is None or position is None:
            return
        # In the script's own code this rank waits for none: rank 0, with the store, may rightly have ended.
        if position.phase == OUTSIDE and not position.call:
            return
        self._store = None
        server = Report(rank=0)
        if self._server is not None:
            server = self._server
            self._examine(server, now)
        answers = {self.rank: self._update_report(full=True)}
        if server.reason:
            finding = name_silent([0], answers, {0: server})
        else:
            problem = (
                "the store of the ranks does not answer (rank 0 or the launcher serves it); "
                f"rank {self.rank} waits {self.seconds:.0f} s"
            )
            stack = tuple(answers[self.rank].stack)
            finding = Finding((), problem, stack, certain=True)
        self._end(finding, code, answers, {0: server})

    def _measure(self, now: float, pause: float) -> bool:
        """Whether there was progress since the last check."""
        before = self._clock.since
        step, token = self._progress()
        position = find_position(self._main_frames())
        self._clock.look(position, step, token, now, pause)
        return self._clock.since > before

    def _main_frames(self) -> list[FrameType]:
        return thread_frames(self._main_thread)

    def _seconds_after_signal(self, now: float) -> float:
        """The seconds since the signal, or since the last progress after it."""
        assert self._signal is not None
        return now - max(self._signal.time, self._clock.since)

    def _exit_code(self, now: float) -> int | None:
        """Return the exit code if this rank has made no progress for too long."""
        if self._signal is not None:
            if self._seconds_after_signal(now) >= self._clock.grace:
                return 128 + self._signal.number
        if self.seconds >= self._clock.limit:
            return EXIT_CODE
        return None

    def _update_report(self, full: bool) -> Report:
        """Write the present position into this rank's report; ``full``: stack and collectives too."""
        clock = self._clock
        report = self._report
        assert clock.position is not None
        seconds_left = min(clock.limit - self.seconds, 1e9)
        if self._signal is not None:
            grace_left = clock.grace - self._seconds_after_signal(time.monotonic())
            seconds_left = min(seconds_left, grace_left)
        report.set_progress(clock.step, f"{self._unit} {clock.step}")
        report.set_position(clock.position, self.seconds, seconds_left)
        if full:
            frames = self._main_frames()
            report.set_stack(_format_stack(frames), awaited_worker(frames))
            if self.size > 1:
                report.set_collectives(*issued_collectives())
        return report

    def _exchange(self, now: float) -> None:
        """Exchange positions with the other ranks through the store."""
        store = self._store
        assert store is not None
        rank = self.rank
        if self._server is None and rank:
            self._server = _read_report(store, "beat/0")
        store.set(f"beat/{rank}", self._update_report(full=False).dumped())
        # A verdict comes first: the rank that decided waits for all to write their stacks.
        if store.check(["verdict"]):
            self._obey(Verdict(**json.loads(store.get("verdict"))))
            return
        self._answer_questions(store)
        if self._question is None:
            self._ask(store, now)
            return
        question = self._question
        answers = self._read_answers(store, question.number)
        # A rank answers at its next check, and ranks check at different times.
        patience = max(1.0, 2 * self._clock.every)
        if len(answers) < self.size and now - question.time <= patience:
            return
        self._question = None
        if question.ends:
            self._decide(store, answers, now)
        else:
            self._warn(answers)

    def _answer_questions(self, store: Store) -> None:
        """Write this rank's position for each new question of any rank."""
        # An addition of nothing reads the counter: `get` would wait for the first question.
        number = store.add("asked", 0)
        if number <= self._answered:
            return
        text = self._update_report(full=True).dumped()
        for question in range(self._answered + 1, number + 1):
            store.set(f"at/{question}/{self.rank}", text)
        self._answered = number

    def _ask(self, store: Store, now: float) -> None:
        """Ask every rank for its position, if this one makes no progress or waits for long."""
        overdue = self._exit_code(now) is not None
        overdue = overdue and now >= self._next_question_at
        position = self._clock.position
        warns = position is not None and bool(position.call) and not self._warned
        warns = warns and self.seconds >= self._patience
        if overdue or warns:
            number = store.add("asked", 1)
            self._question = _Question(number, now, overdue)

    def _read_answers(self, store: Store, question: int) -> dict[int, Report]:
        answers = {}
        for rank in range(self.size):
            answer = _read_report(store, f"at/{question}/{rank}")
            # A rank that has left its loop answers no more; it left its last report instead.
            if answer is None:
                answer = _read_report(store, f"ended/{rank}")
            if answer is not None:
                answers[rank] = answer
        return answers

    def _warn(self, answers: dict[int, Report]) -> None:
        """Print where each rank is; the first of the ranks that wait at this line does it for all of them."""
        self._warned = True
        line = answers[self.rank].line
        waiting = [rank for rank in sorted(answers) if answers[rank].line == line]
        if waiting[0] != self.rank:
            return
        elsewhere = []
        for rank in range(self.size):
            if rank in waiting:
                continue
            state = "silent: it has ended or does not answer"
            if rank in answers:
                state = answers[rank].line or state
            elsewhere.append(f"process {rank} is {state}")
        processes = ", ".join(map(str, waiting))
        self._say(
            f"waiting for more than {self._patience:g} s {line} (process {processes}); "
            f"{'; '.join(elsewhere)}{self._advice}"
        )

    def _decide(self, store: Store, answers: dict[int, Report], now: float) -> None:
        """End the run, or ask again after a while, if a rank that hangs may still go on."""
        # The user has switched the limit off: such a rank reports where others are, and ends none.
        if math.isinf(self._clock.limit) and self._signal is None:
            return
        last_words = {}
        for rank in sorted(set(range(self.size)) - set(answers)):
            report = _read_report(store, f"beat/{rank}")
            if report is not None:
                self._examine(report, now)
                last_words[rank] = report
        # A rank that answers again, as after SIGCONT, has its full time the next time that it is stopped.
        self._stopped = {
            rank: since for rank, since in self._stopped.items() if rank in last_words
        }
        finding = find_culprits(answers, last_words, self.size)
        code = self._exit_code(now)
        reports = {**last_words, **answers}
        seconds_left = self._seconds_until_certain(finding, reports, code)
        may_go_on = (
            code == EXIT_CODE
            and not finding.certain
            and max(seconds_left, default=0.0) > 0
        )
        if code is None or may_go_on:
            pause = min(10.0, self._clock.limit, max(seconds_left, default=1.0))
            self._next_question_at = now + pause
            return
        self._end(finding, code, answers, last_words)

    def _seconds_until_certain(
        self, finding: Finding, reports: Mapping[int, Report], code: int | None
    ) -> list[float]:
        """Return the seconds for which each rank of a finding may go on without progress."""
        seconds_left = [
            reports[rank].seconds_left for rank in finding.culprits if rank in reports
        ]
        # A slow exchange looks like a dead connection, except that it ends.
        if not finding.culprits:
            timeout = self._clock.timeout or PATIENT
            seconds_left.append(timeout - self.seconds)
        all_outside = all(
            report.phase == OUTSIDE and not report.call for report in reports.values()
        )
        # All ranks of a script may be in one long call.
        if code == EXIT_CODE and all_outside:
            seconds_left.append(PATIENT)
        return seconds_left

    def _examine(self, report: Report, now: float) -> None:
        """Complete the report on a rank that does not answer, from what this rank can see of its process."""
        compiles = report.phase == "compilation"
        patient = compiles or (report.patient and self._clock.timeout is None)
        seconds_left = -self.seconds
        if patient:
            seconds_left += PATIENT
        local = (report.host, report.boot) == (self._report.host, self._report.boot)
        # Nothing can be seen of a process on another machine.
        if not local or not report.started:
            report.set_silence("", seconds_left)
            return
        if start_time(report.pid) != report.started:
            report.set_silence("its process has ended", 0.0)
        elif is_stopped(report.pid):
            # It may have been stopped just now.
            since = self._stopped.setdefault(report.rank, now)
            seconds_left = 0.0
            if patient:
                seconds_left = self._clock.limit - (now - since)
            reason = "its process is stopped (SIGSTOP, or a debugger)"
            report.set_silence(reason, seconds_left)
        else:
            stack = read_stacks(report.pid, report.stacks).splitlines()
            # It has left the phase of its last report.
            if stack and compiles and not _is_compiling(stack):
                seconds_left = -self.seconds
            report.set_stack(stack, "")
            reason = ""
            if stack:
                reason = "its interpreter is locked by C code"
            report.set_silence(reason, seconds_left)

    def _end(
        self,
        finding: Finding,
        code: int,
        answers: Mapping[int, Report],
        last_words: Mapping[int, Report],
    ) -> None:
        """Write the verdict to the store; the first rank that does so decides for all."""
        # The last report of a silent rank may be older than its hang.
        steps = [answers[rank].step for rank in finding.culprits if rank in answers]
        step = min(steps, default=self._clock.step)
        root = self._directory()
        directory = ""
        if root is not None:
            directory = str(root / f"hang-{step}")
        problem = finding.problem
        if code > 128:
            name = signal.Signals(code - 128).name
            problem = f"{name} came, and the step does not end: {problem}"
        details = list(finding.details)
        if directory:
            details.append(f"stacks of all ranks: {directory}")
        verdict = Verdict(
            problem=problem,
            details=details,
            culprits=list(finding.culprits),
            silent=sorted(set(range(self.size)) - set(answers)),
            ended=[rank for rank, report in answers.items() if report.ended],
            code=code,
            directory=directory,
            by=self.rank,
        )
        # Several ranks may decide at the same time: the store lets one of them win, and all obey it.
        if self._store is not None:
            text = json.dumps(asdict(verdict))
            agreed = self._store.compare_set("verdict", "", text)
            verdict = Verdict(**json.loads(agreed))
        if verdict.by != self.rank:
            self._obey(verdict)
        # Our agent prints the verdict itself, once for all ranks.
        if "TRAINER_KIT_AGENT_PID" not in os.environ:
            print_line(verdict.text)
        self._obey(verdict, last_words.values())

    def _obey(self, verdict: Verdict, silent: Collection[Report] = ()) -> NoReturn:
        self._ending = threading.current_thread()
        end_rank(self._report, self.size, verdict, silent, self._store, self._note)

    def leave(self) -> None:
        """Tell the other ranks that this one has left its loop; the thread's last call."""
        if self._store is not None and self._clock.position is not None:
            report = self._update_report(full=False)
            report.set_ended()
            self._store.set(f"ended/{self.rank}", report.dumped())


def _format_stack(frames: list[FrameType]) -> list[str]:
    """Format the stack of a thread, as `traceback.format_stack` does, from its outermost frame."""
    lines = [(caller, caller.f_lineno) for caller in reversed(frames)]
    return traceback.StackSummary.extract(iter(lines)).format()


def _is_compiling(stack: list[str]) -> bool:
    text = "".join(stack)
    return any(directory in text for directory in COMPILERS)


def _read_report(store: Store, key: str) -> Report | None:
    if not store.check([key]):
        return None
    return Report(**json.loads(store.get(key)))


def _start_thread(
    name: str, function: Callable[..., None], *arguments: object
) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, name=name, daemon=True)
    thread.start()
    return thread


def _run(watchdog_ref: weakref.ref[HangWatchdog], pipe: int) -> None:
    """Check at intervals, until the pipe gets a zero or is closed at its other end."""
    try:
        pause = 0.1
        while True:
            start = time.monotonic()
            readable = bool(select.select([pipe], [], [], pause)[0])
            signals = b""
            if readable:
                signals = os.read(pipe, 64)
            watchdog = watchdog_ref()
            # A closed pipe is readable, and has nothing to read.
            closed = readable and not signals
            if watchdog is None or closed:
                return
            if b"\0" in signals:
                # The store may have ended with its process.
                with suppress(RuntimeError):
                    watchdog.leave()
                return
            watchdog.note_signals(signals)
            watchdog.slept(min(time.monotonic() - start, pause))
            watchdog.look()
            pause = watchdog.every
            # The watchdog must not live because its thread sleeps.
            del watchdog
    finally:
        os.close(pipe)


def _guard(watchdog_ref: weakref.ref[HangWatchdog], done: threading.Event) -> None:
    """Check while the other thread is blocked: the store of a stopped process never answers a request."""
    previous: float | None = None
    checks = 0
    while True:
        start = time.monotonic()
        if done.wait(_GUARD_INTERVAL):
            return
        watchdog = watchdog_ref()
        if watchdog is None:
            return
        asking = watchdog.asking
        # The same request as at the last check: the thread is blocked in it.
        blocked = asking is not None and asking == previous
        if blocked:
            checks += 1
        else:
            checks = 0
        previous = asking
        if checks >= _MAX_GUARD_CHECKS:
            watchdog.look_alone(time.monotonic() - start - _GUARD_INTERVAL)
        # As in `_run`: a guard that sleeps must not keep the watchdog.
        del watchdog


def _wake_by_signals(file: int) -> Callable[[], None] | None:
    """Make Python's C code write the number of each signal to ``file``, even while the main thread is stuck.

    Returns:
        A function that ends this; None if other code uses this mechanism, or outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    previous = signal.set_wakeup_fd(file, warn_on_full_buffer=False)
    # Python has one such file per process, and another one, such as of an event loop, is read by its owner.
    if previous != -1:
        signal.set_wakeup_fd(previous)
        return None

    def end() -> None:
        signal.set_wakeup_fd(-1)

    return end


@contextmanager
def hang_watchdog(
    rank: int,
    size: int,
    timeout: float | None,
    progress: Callable[[], tuple[int, object]],
    directory: Callable[[], Path | None],
    *,
    unit: str = "step",
    note: Callable[[str, str], object] = lambda text, stacks: None,
) -> Iterator[None]:
    """Run a `HangWatchdog` in this context; the arguments are the same."""
    if timeout is not None and math.isinf(timeout):
        yield
        return
    watchdog = HangWatchdog(
        rank,
        size,
        timeout,
        progress,
        directory,
        lambda text: print_line(f"[rank {rank}] {text}"),
        unit=unit,
        signals=True,
        note=note,
    )
    try:
        yield
    finally:
        watchdog.stop()


def stop_at_exit(watchdog: HangWatchdog) -> None:
    """Stop a watchdog when the interpreter exits, without keeping it alive until then."""
    watchdog_ref = weakref.ref(watchdog)

    def stop() -> None:
        watchdog = watchdog_ref()
        if watchdog is not None:
            watchdog.stop()

    atexit.register(stop)
