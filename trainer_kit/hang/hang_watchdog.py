"""A thread that detects when training makes no progress, finds the rank that hangs, and ends the run."""

from __future__ import annotations

import atexit
import json
import math
import os
import select
import signal
import socket
import sys
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
from typing import Any, Final, NoReturn, final

import torch
from torch import distributed as dist

from trainer_kit.data.workers import EndsWithParent
from trainer_kit.hang.hang_timeout import PATIENT, ProgressClock
from trainer_kit.hang.position import COMPILERS, OUTSIDE, find_position
from trainer_kit.hang.stacks import (
    answering_file,
    boot_id,
    end_process,
    is_stopped,
    read_stacks,
    start_time,
    write_stacks,
)
from trainer_kit.hang.verdict import (
    Finding,
    Report,
    find_culprits,
    name_silent,
    ranks_named,
)
from trainer_kit.launch.bootstrap import write_report
from trainer_kit.launch.startup_timeout import patience

__all__ = ["EXIT_CODE", "HangWatchdog", "hang_watchdog", "stop_at_exit"]

EXIT_CODE: Final = 75
"""The exit code of a run that hangs: EX_TEMPFAIL, which makes batch systems restart a job."""
_FAST: Final = 0.25  # seconds between two checks when a hang is near
_GUARDED: Final = 2.0  # seconds between two checks of the thread that queries the store
_DEAD: Final = (
    5  # number of such checks after which a store without an answer counts as dead
)
_NUMBER = [0]  # the number of watchdogs made in this process


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
        progress: Callable[[], tuple[int, Any]],
        directory: Callable[[], Path | None],
        say: Callable[[str], None],
        *,
        advice: str = "",
        unit: str = "step",
        signals: bool = False,
        note: Callable[[str, str], Any] = lambda text, stacks: None,
    ) -> None:
        self._unit, self._note = unit, note
        self.rank, self.size = rank, size
        self._progress, self._directory, self._say, self._advice = (
            progress,
            directory,
            say,
            advice,
        )
        self._main = threading.get_ident()
        self._clock = ProgressClock(timeout, time.monotonic(), progress()[0])
        self._looked = time.monotonic()
        self._slept = 0.0
        self._patience = patience()
        self._warned = False
        self._signal: tuple[int, float] | None = None  # its number, and its time
        self._question: tuple[int, float, bool] | None = (
            None  # its number, its time, and whether it may end the run
        )
        self._not_before = 0.0
        self._answered = 0
        self._ending: threading.Thread | None = (
            None  # the thread that will end this process
        )
        self._stopped: dict[
            int, float
        ] = {}  # stopped ranks, each with the time at which this rank first saw that
        self._me = Report(
            rank=rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=start_time(os.getpid()),
            boot=boot_id(),
            error_file=os.environ.get("TORCHELASTIC_ERROR_FILE", ""),
            stacks=answering_file() if size > 1 else "",
        )
        self._store: Any = None
        self._server: Report | None = (
            None  # the report of rank 0, which may serve the store
        )
        self.asking: float | None = None
        """The start time of a request that the store has not answered yet."""
        self._done = threading.Event()
        if size > 1:
            _NUMBER[0] += 1
            # A separate connection: the main thread's may be blocked.
            own = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
            own.set_timeout(timedelta(seconds=10))
            self._store = dist.PrefixStore(f"trainer_kit/hang/{_NUMBER[0]}", own)  # type: ignore[attr-defined]
            self._store.set(f"beat/{rank}", self._me.dumped())
        reads, self._writes = os.pipe()
        os.set_blocking(self._writes, False)
        self._close = weakref.finalize(
            self, os.close, self._writes
        )  # closing the pipe ends the thread
        self._wakeup = _wake_by_signals(self._writes) if signals else None
        self._thread = threading.Thread(
            target=_run,
            args=(weakref.ref(self), reads),
            name="hang watchdog",
            daemon=True,
        )
        self._thread.start()
        if size > 1:
            threading.Thread(
                target=_guard,
                args=(weakref.ref(self), self._done),
                name="hang watchdog's guard",
                daemon=True,
            ).start()

    @property
    def every(self) -> float:
        """The seconds until the next check."""
        every = min(self._clock.every, self._patience / 4)
        near = self._question is not None or self._signal is not None
        return (
            min(every, _FAST) if near or 2 * self.seconds > self._clock.limit else every
        )

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
                if (
                    self._ending is not None
                ):  # the end of another rank may have brought the main thread here
                    self._ending.join()
        self._close()

    def note_signals(self, numbers: bytes) -> None:
        """Record the numbers of received signals."""
        for number in numbers:
            if number in (signal.SIGTERM, signal.SIGINT) and self._signal is None:
                self._signal = number, time.monotonic()

    def slept(self, seconds: float) -> None:
        """Record how long the thread waited before this check."""
        self._slept = seconds

    def look(self) -> None:
        """Check once; the thread calls this."""
        now = time.monotonic()
        gap = (
            now - self._looked - self._slept
        )  # this process was stopped, or its interpreter was locked
        self._looked = now
        if self._measure(now, gap if gap > 2.0 else 0.0) and gap <= 2.0:
            self._warned, self._question = False, None
        if self.size == 1:
            if (code := self._overdue(now)) is not None:
                answers = {0: self._report(full=True)}
                self._end(find_culprits(answers, {}, 1), code, answers, {})
            return
        if self._store is None:
            self.look_alone(0.0)
            return
        self.asking = now
        try:
            self._exchange(now)
        except RuntimeError:
            self._store = None  # the store's process or machine has ended
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
        code = self._overdue(now)
        if (
            code is None
            or position is None
            or (not position.call and position.phase == OUTSIDE)
        ):
            return
        self._store = None
        server = (
            Report(rank=0)
            if self._server is None
            else self._examined(self._server, now)
        )
        answers = {self.rank: self._report(full=True)}
        if server.reason:
            finding = name_silent([0], answers, {0: server})
        else:
            problem = f"the store of the ranks does not answer (rank 0 or the launcher serves it); rank {self.rank} "
            finding = Finding(
                (),
                problem + f"waits {self.seconds:.0f} s",
                tuple(answers[self.rank].stack),
                True,
            )
        self._end(finding, code, answers, {0: server})

    def _measure(self, now: float, paused: float) -> bool:
        """Whether there was progress since the last check."""
        before = self._clock.since
        step, token = self._progress()
        self._clock.look(
            find_position(sys._current_frames().get(self._main)),
            step,
            token,
            now,
            paused,
        )
        return self._clock.since > before

    def _overdue(self, now: float) -> int | None:
        """Return the exit code if this rank has made no progress for too long."""
        if (
            self._signal is not None
            and now - max(self._signal[1], self._clock.since) >= self._clock.grace
        ):
            return 128 + self._signal[0]
        return EXIT_CODE if self.seconds >= self._clock.limit else None

    def _report(self, full: bool) -> Report:
        clock, me = self._clock, self._me
        position = clock.position
        assert position is not None
        me.step, me.at = clock.step, f"{self._unit} {clock.step}"
        me.phase, me.place = position.phase, position.place
        me.call, me.patient = position.call, position.patient
        me.seconds, me.left = self.seconds, min(clock.limit - self.seconds, 1e9)
        if self._signal is not None:
            me.left = min(
                me.left,
                clock.grace - (time.monotonic() - max(self._signal[1], clock.since)),
            )
        if full:
            frame = sys._current_frames().get(self._main)
            me.stack = traceback.format_stack(frame)
            me.reason = _waiting_for(frame)
            if self.size > 1:
                me.groups, me.last = _issued_calls()
        return me

    def _exchange(self, now: float) -> None:
        store, rank = self._store, self.rank
        if self._server is None and rank and store.check(["beat/0"]):
            self._server = Report(**json.loads(store.get("beat/0")))
        store.set(f"beat/{rank}", self._report(full=False).dumped())
        if store.check(["verdict"]):
            self._obey(_Verdict(**json.loads(store.get("verdict"))))
            return
        number = store.add("asked", 0)
        if number > self._answered:
            text = self._report(full=True).dumped()
            for question in range(self._answered + 1, number + 1):
                store.set(f"at/{question}/{rank}", text)
            self._answered = number
        if self._question is None:
            ends = self._overdue(now) is not None and now >= self._not_before
            waits = self._clock.position is not None and bool(self._clock.position.call)
            if ends or (waits and not self._warned and self.seconds >= self._patience):
                self._question = store.add("asked", 1), now, ends
            return
        question, asked, ends = self._question
        answers = self._answers(question)
        if len(answers) == self.size or now - asked > max(1.0, 2 * self._clock.every):
            self._question = None
            if ends:
                self._decide(answers, now)
            else:
                self._warn(answers)

    def _answers(self, question: int) -> dict[int, Report]:
        found = {}
        for rank in range(self.size):
            for key in (f"at/{question}/{rank}", f"ended/{rank}"):
                if rank not in found and self._store.check([key]):
                    found[rank] = Report(**json.loads(self._store.get(key)))
        return found

    def _warn(self, answers: dict[int, Report]) -> None:
        self._warned = True
        mine = answers[self.rank].place
        at = {
            rank: answers[rank].place if rank in answers else ""
            for rank in range(self.size)
        }
        waiting = [rank for rank, place in at.items() if place == mine]
        if waiting[0] != self.rank:
            return  # one process prints the line
        silent = "silent: it has ended or does not answer"
        others = "; ".join(
            f"process {r} is {place or silent}"
            for r, place in at.items()
            if r not in waiting
        )
        who = ", ".join(map(str, waiting))
        self._say(
            f"waiting for more than {self._patience:g} s {mine} (process {who}); {others}{self._advice}"
        )

    def _decide(self, answers: dict[int, Report], now: float) -> None:
        if math.isinf(self._clock.limit) and self._signal is None:
            return
        last_words = {}
        for rank in set(range(self.size)) - set(answers):
            if self._store.check([f"beat/{rank}"]):
                last_words[rank] = self._examined(
                    Report(**json.loads(self._store.get(f"beat/{rank}"))), now
                )
        finding = find_culprits(answers, last_words, self.size)
        known = {**last_words, **answers}
        left = [known[rank].left for rank in finding.culprits if rank in known]
        if not finding.culprits:
            left.append(
                (self._clock.timeout or PATIENT) - self.seconds
            )  # a slow exchange, or a dead connection
        code = self._overdue(now)
        if code == EXIT_CODE and all(
            one.phase == OUTSIDE and not one.call for one in known.values()
        ):
            left.append(PATIENT)  # the script may be in one long call
        self._stopped = {
            rank: since for rank, since in self._stopped.items() if rank in last_words
        }
        if code is None or (
            code == EXIT_CODE and not finding.certain and max(left, default=0.0) > 0
        ):
            self._not_before = now + min(
                10.0, self._clock.limit, max(left, default=1.0)
            )
            return
        self._end(finding, code, answers, last_words)

    def _examined(self, one: Report, now: float) -> Report:
        """Complete the report on a rank that does not answer, from what this rank can see of its process."""
        compiles = one.phase == "compilation"
        long = compiles or (one.patient and self._clock.timeout is None)
        one.left = (PATIENT if long else 0.0) - self.seconds
        if (one.host, one.boot) != (self._me.host, self._me.boot) or not one.started:
            return one
        if start_time(one.pid) != one.started:
            one.reason, one.left = "its process has ended", 0.0
        elif is_stopped(one.pid):
            one.reason = "its process is stopped (SIGSTOP, or a debugger)"
            since = self._stopped.setdefault(one.rank, now)
            one.left = (
                self._clock.limit - (now - since) if long else 0.0
            )  # it may have been stopped just now
        else:
            one.stack = read_stacks(one.pid, one.stacks).splitlines()
            one.reason = "its interpreter is locked by C code" if one.stack else ""
            if (
                one.stack
                and compiles
                and not any(part in line for line in one.stack for part in COMPILERS)
            ):
                one.left = -self.seconds  # it has left the phase of its last report
        return one

    def _end(
        self,
        finding: Finding,
        code: int,
        answers: Mapping[int, Report],
        last_words: Mapping[int, Report],
    ) -> None:
        """Write the verdict to the store; the first rank that does so decides for all."""
        root = self._directory()
        # The last report of a silent rank may be older than its hang.
        step = min(
            [answers[rank].step for rank in finding.culprits if rank in answers],
            default=self._clock.step,
        )
        place = "" if root is None else str(root / f"hang-{step}")
        reason = (
            f"{signal.Signals(code - 128).name} came, and the step does not end: "
            if code > 128
            else ""
        )
        verdict = _Verdict(
            problem=reason + finding.problem,
            details=[
                *finding.details,
                *([f"stacks of all ranks: {place}"] if place else []),
            ],
            culprits=list(finding.culprits),
            silent=sorted(set(range(self.size)) - set(answers)),
            ended=[rank for rank, one in answers.items() if one.ended],
            code=code,
            directory=place,
            by=self.rank,
        )
        if self._store is not None:
            verdict = _Verdict(
                **json.loads(
                    self._store.compare_set("verdict", "", json.dumps(asdict(verdict)))
                )
            )
        if verdict.by == self.rank and "TRAINER_KIT_AGENT_PID" not in os.environ:
            _print_line(verdict.text)
        self._obey(verdict, last_words.values() if verdict.by == self.rank else ())

    def _obey(self, verdict: _Verdict, silent: Collection[Report] = ()) -> None:
        self._ending = threading.current_thread()
        _end_rank(self._me, self.size, verdict, silent, self._store, self._note)

    def leave(self) -> None:
        """Tell the other ranks that this one has left its loop; the thread's last call."""
        if self._store is not None and self._clock.position is not None:
            me = self._report(full=False)
            me.ended = True
            self._store.set(f"ended/{self.rank}", me.dumped())


def _run(of: weakref.ref[HangWatchdog], reads: int) -> None:
    try:
        pause = 0.1
        while True:
            began = time.monotonic()
            ready = bool(select.select([reads], [], [], pause)[0])
            came = os.read(reads, 64) if ready else b""
            watchdog = of()
            if watchdog is None or (ready and not came):  # the other end is closed
                return
            if b"\0" in came:
                with suppress(
                    RuntimeError
                ):  # the store may have ended with its process
                    watchdog.leave()
                return
            watchdog.note_signals(came)
            watchdog.slept(min(time.monotonic() - began, pause))
            watchdog.look()
            pause = watchdog.every
            del watchdog
    finally:
        os.close(reads)


def _guard(of: weakref.ref[HangWatchdog], done: threading.Event) -> None:
    """Check while the other thread is blocked: the store of a stopped process never answers a request."""
    question, looks = None, 0
    while True:
        began = time.monotonic()
        if done.wait(_GUARDED) or (watchdog := of()) is None:
            return
        asking = watchdog.asking
        looks = looks + 1 if asking is not None and asking == question else 0
        question = asking
        if looks >= _DEAD:
            watchdog.look_alone(time.monotonic() - began - _GUARDED)
        del watchdog


def _wake_by_signals(file: int) -> Callable[[], None] | None:
    """Make Python's C code write the number of each signal to ``file``, even while the main thread is stuck.

    Returns:
        A function that ends this; None if other code uses this mechanism, or outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    other = signal.set_wakeup_fd(file, warn_on_full_buffer=False)
    if other != -1:
        signal.set_wakeup_fd(other)
        return None

    def end() -> None:
        signal.set_wakeup_fd(-1)

    return end


@contextmanager
def hang_watchdog(
    rank: int,
    size: int,
    timeout: float | None,
    progress: Callable[[], tuple[int, Any]],
    directory: Callable[[], Path | None],
    *,
    unit: str = "step",
    note: Callable[[str, str], Any] = lambda text, stacks: None,
) -> Iterator[None]:
    """Run a `HangWatchdog` in this context; the arguments are the same."""
    if timeout is not None and math.isinf(timeout):
        yield
        return
    watchdog = HangWatchdog(
        *(
            rank,
            size,
            timeout,
            progress,
            directory,
            lambda text: _print_line(f"[rank {rank}] {text}"),
        ),
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
    found = weakref.ref(watchdog)

    def stop() -> None:
        left = found()
        if left is not None:
            left.stop()

    atexit.register(stop)


_KEPT: Final = 64  # collectives kept per group
_BYTES: Final = {
    "Float": 4,
    "Double": 8,
    "Half": 2,
    "BFloat16": 2,
    "Long": 8,
    "Int": 4,
    "Byte": 1,
    "Char": 1,
    "Bool": 1,
}


def _issued_calls() -> tuple[dict[str, Any], list[Any] | None]:
    """Return the last collectives of the training threads, by process group.

    Formatting the recorder's stacks takes seconds, so they are omitted: the main thread's stack shows its call.

    Returns:
        For each group name ``"ranks"`` (a list) and ``"calls"``, a list of ``[number, name with size, amount]``; and
        the group and number of the last collective, or None. Without a recorder an empty dict and None.
    """
    entries: list[dict[str, Any]] = []
    for name in (
        "_dump_fr_trace_json",
        "_dump_nccl_trace_json",
    ):  # gloo, NCCL; some torch versions lack one
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None:
            entries += json.loads(dump() or "{}").get("entries", [])
    others = {
        str(thread.ident)
        for thread in threading.enumerate()
        if thread is not threading.main_thread()
    }
    ranks = {
        group.group_name: sorted(found)
        for group, found in dist.distributed_c10d._world.pg_group_ranks.items()
    }
    groups: dict[str, Any] = {}
    last: list[Any] | None = None
    for entry in sorted(entries, key=lambda entry: int(entry["time_created_ns"])):
        group = entry["process_group"][0]
        # Our own threads use separate groups, for checkpoints.
        if (
            entry.get("is_p2p")
            or entry.get("thread_id") in others
            or group not in ranks
        ):
            continue
        calls = groups.setdefault(group, {"ranks": ranks[group], "calls": []})["calls"]
        number = int(entry["collective_seq_id"])
        if not calls or calls[-1][0] != number:
            calls.append([number, *_named(entry)])
            del calls[:-_KEPT]
        last = [group, number]
    return groups, last


def _named(entry: dict[str, Any]) -> tuple[str, str]:
    """Return a collective's name with its input sizes, and the amount of data."""
    name = str(entry["profiling_name"]).rpartition(":")[2]
    sizes = entry.get("input_sizes") or []
    text = ", ".join("x".join(map(str, size)) or "1" for size in sizes[:4]) + (
        ", …" if len(sizes) > 4 else ""
    )
    kinds = entry.get("input_dtypes") or []
    amount = sum(
        math.prod(size) * _BYTES.get(kind, 4)
        for size, kind in zip(sizes, kinds, strict=False)
    )
    return (
        f"{name}[{text}]" if text else name,
        f"{amount / 1e6:.1f} MB" if amount >= 1e5 else f"{amount} bytes",
    )


def _waiting_for(frame: FrameType | None) -> str:
    """Describe the worker for which a thread waits; "" if it waits for none."""
    while frame is not None:
        loader: Any = frame.f_locals.get("self")
        if (
            type(loader).__name__ == "_MultiProcessingDataLoaderIter"
            and frame.f_code.co_name == "_try_get_data"
        ):
            worker = loader._task_info.get(loader._rcvd_idx, (None,))[0]
            if worker is None:
                return ""
            begins = loader._worker_init_fn
            index = begins.reading(worker) if isinstance(begins, EndsWithParent) else ""
            return f"worker {worker} (pid {loader._workers[worker].pid}) of the data loader{index}"
        frame = frame.f_back
    return ""


_KIND: Final = "trainer_kit.core.errors.RankError"
_MEETING: Final = 10.0  # seconds for all ranks to write, before the first one exits
_NOTING: Final = 5.0  # seconds for the run's report to record the end
_BEFORE_WAITING_RANKS: Final = (
    0.7  # seconds by which the rank that hangs exits first: launchers poll
)
_FIX: Final = (
    "look at the stacks; if nothing hangs, "
    "give it more time with hang_timeout= (False switches the watchdog off)"
)


@final
@dataclass(frozen=True, kw_only=True)
class _Verdict:
    """The decision of one rank, which all ranks follow.

    Attributes:
        problem: the headline.
        details: lines below it.
        culprits: the ranks that hang.
        silent: the ranks that do not answer.
        ended: the ranks that have left the loop.
        code: the exit code of all ranks.
        directory: the directory for stacks, "" for none.
        by: the rank that decided.
    """

    problem: str
    details: list[str]
    culprits: list[int]
    silent: list[int]
    ended: list[int]
    code: int
    directory: str
    by: int

    @property
    def text(self) -> str:
        """Return the message to the user."""
        lines = "\n  ".join([self.problem, *self.details])
        return f"{lines}\n  fix: {_FIX}\nexiting {self.code}"


def _end_rank(
    me: Report,
    size: int,
    verdict: _Verdict,
    silent: Collection[Report],
    store: Any,
    note: Callable[[str, str], Any],
) -> NoReturn:
    """Write this rank's stacks, report the failure to the launcher, and exit when all ranks have done so.

    Args:
        me: the report of this rank.
        size: the number of ranks.
        verdict: the decision of one of the ranks.
        silent: the reports on ranks that do not answer; only for the rank that decided.
        store: the store for a barrier of the ranks; None if it does not answer.
        note: called with the text and the directory of the stacks, on the rank that decided; it has 5 seconds.
    """
    directory = Path(verdict.directory) if verdict.directory else None
    if directory is not None:
        with suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
        write_stacks(directory / f"rank-{me.rank}.txt")
    hangs = me.rank in verdict.culprits
    waited = not hangs and verdict.culprits
    _write_report(
        me,
        f"waited for {ranks_named(verdict.culprits)}" if waited else verdict.problem,
        verdict,
        not hangs,
    )
    here = [
        one for one in silent if _is_here(one, me)
    ]  # these can neither write nor exit by themselves
    for one in here:
        if directory is not None:
            with suppress(OSError):
                (directory / f"rank-{one.rank}.txt").write_text(
                    read_stacks(one.pid, one.stacks)
                )
        one.at = me.at  # its own last report may be older
        _write_report(one, verdict.problem, verdict, False)
    if verdict.by == me.rank:  # the main thread may hold locks that it needs
        noting = threading.Thread(
            target=note, args=(verdict.text, verdict.directory), daemon=True
        )
        noting.start()
        noting.join(_NOTING)
    if store is not None:
        with suppress(RuntimeError):  # the store may end with its process
            _meet(store, size - len({*verdict.silent, *verdict.ended}))
    for one in here:
        end_process(one.pid, one.started)
    if not hangs and size > 1:
        time.sleep(_BEFORE_WAITING_RANKS)
    flushing = threading.Thread(
        target=_flush, daemon=True
    )  # the main thread may hold a stream's lock
    flushing.start()
    flushing.join(0.5)
    os._exit(verdict.code)


def _meet(store: Any, count: int) -> None:
    """Wait for the other ranks: as soon as one exits, the collectives of waiting ranks raise."""
    until = time.monotonic() + _MEETING
    arrived = store.add("arrived", 1)
    while arrived < count and time.monotonic() < until:
        time.sleep(0.05)
        arrived = store.add("arrived", 0)


def _is_here(one: Report, me: Report) -> bool:
    return (one.host, one.boot) == (me.host, me.boot) and start_time(
        one.pid
    ) == one.started


def _write_report(one: Report, text: str, verdict: _Verdict, waited: bool) -> None:
    if one.error_file:
        # torchrun prints only the stack; our agent also prints the message before it.
        end = [] if "TRAINER_KIT_AGENT_PID" in os.environ else [verdict.problem]
        stack = "\n".join([*verdict.details, f"fix: {_FIX}", *end])
        delay = 2 if waited else 0
        write_report(
            one.error_file,
            one.rank,
            _KIND,
            text,
            stack,
            one.at,
            verdict.code,
            one.pid,
            delay,
        )


def _flush() -> None:
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()


def _print_line(text: str) -> None:
    """Write a line to standard error, even while the main thread holds the stream's lock."""
    with suppress(OSError):
        os.write(2, f"{text}\n".encode())
