"""Calls loggers off the training thread: each logger has its own bounded queue and thread."""

from __future__ import annotations

import inspect
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, final

from trainer_kit.core.errors import TrainerKitError
from trainer_kit.loggers.journal import JSONLLogger

__all__ = ["Deliveries", "Delivery", "JournalIndex"]

_KEPT: Final = 1000
"""The most calls to keep in memory for one logger; further values are read back from the journal."""
_PATIENCE: Final = 10.0
"""The most seconds that a start, a close or the sync of a checkpoint's journal waits for all loggers together."""
_GRACE: Final = 60.0
"""The most seconds, from its beginning, that a close waits for a logger's first call that computes: it may create a
database."""
_WORKING: Final = 0.02
"""The share of CPU time above which a first call counts as computing. One that hangs sleeps, or polls."""
_SHORT: Final = 1.0
"""The most seconds that a checkpoint waits for loggers other than the journal."""
_QUIET: Final = 60.0
"""Seconds between two warnings about a logger."""
_IDLE: Final = 1.0
"""Seconds after which the thread of a logger without calls ends; the next call starts another one."""
_NAP: Final = 0.1
"""The most seconds that logged values wait for an idle thread. Waking it for each would interrupt the training thread,
which shares the interpreter: that cost 17 µs a step in a loop of 140 µs a step that logs every 10 steps."""
_DELAYS: Final = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds to wait before each retry of a failed call."""
_LAST: Final = 2.0
"""Seconds for which failing calls are retried at the end."""
_LAST_DELAY: Final = 0.25
_MISTAKES: Final = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    ImportError,
)
"""Errors that point to a bug rather than to a failing service: such a call is retried fewer times."""
_PUBLISHING: Final = threading.Lock()


@final
@dataclass(slots=True)
class _Call:
    """One call of a logger; ``number`` counts logged values, -1 for every other call."""

    method: str
    arguments: tuple[Any, ...]
    number: int = -1
    ticket: int = 0


@final
@dataclass(slots=True)
class _Gap:
    """Values ``first`` to ``end`` (exclusive) that only the journal has."""

    index: JournalIndex
    first: int
    end: int
    ticket: int


def _takes_time(logger: Any) -> bool:
    """Whether ``log_metrics(metrics, step, at)`` takes when the values were logged: earlier than it is called."""
    try:
        parameters = list(inspect.signature(logger.log_metrics).parameters)
    except (AttributeError, TypeError, ValueError):
        return False
    return parameters[2:3] == ["at"]


@final
class JournalIndex:
    """The byte offset in the journal of each value that this process logs.

    Args:
        journal: the logger that writes every value to the file.
    """

    def __init__(self, journal: JSONLLogger) -> None:
        self.journal = journal
        self.count = 0  # values so far, written or not
        self._offsets = array("q")
        self._written = threading.Condition()

    def note(self, number: int, offset: int) -> None:
        """Record the offset of value ``number``; earlier values without an offset are lost."""
        with self._written:
            self._offsets.extend([-1] * (number - len(self._offsets)))
            self._offsets.append(offset)
            self._written.notify_all()

    def read(self, first: int, end: int, timed: bool) -> tuple[list[_Call], int]:
        """Return the calls that log these values again, and the number after the last one examined.

        Values that the journal does not have are left out.

        Args:
            first: the number of the first value.
            end: the number after the last one.
            timed: whether the logger takes the time of the values too.

        Raises:
            TimeoutError: the journal has not written the first of them yet.
            OSError: the file cannot be read.
        """
        with self._written:
            if not self._written.wait_for(lambda: len(self._offsets) > first, _SHORT):
                raise TimeoutError(
                    f"{self.journal.path} does not have these values yet"
                )
            offsets = list(enumerate(self._offsets[first:end], first))
        written = [(number, offset) for number, offset in offsets if offset >= 0]
        count = 3 if timed else 2
        calls = [
            _Call("log_metrics", self.journal.read_values(offset)[:count], number)
            for number, offset in written
        ]
        return calls, first + len(offsets)


@final
class Delivery:
    """Makes one logger's calls in order on a separate thread; its errors and delays do not reach the caller.

    A call that raises is retried until it succeeds, and later calls wait. A call that the logger refuses (an error of
    this library; a programming error, if the next call succeeds) is dropped. At most 1,000 calls wait in memory; the
    others are read back from the journal.

    Args:
        logger: the logger to call.
        say: prints a line.
        index: the journal's index; None without a journal.
        journals: whether the logger is that journal.
        name: the logger's name in messages.
    """

    def __init__(
        self,
        logger: Any,
        say: Callable[[str], None],
        index: JournalIndex | None,
        journals: bool,
        name: str,
    ) -> None:
        self.logger, self.say, self.index, self.journals, self.name = (
            logger,
            say,
            index,
            journals,
            name,
        )
        self.timed = _takes_time(logger)
        self._first = -1  # the ticket of a call whose refusal `started` raises
        self._refusal: TrainerKitError | None = None
        self._kept = 10 * _KEPT if journals or index is None else _KEPT
        self._many = max(
            1, self._kept // 10
        )  # calls that wake the thread, whatever they are
        self._queue: deque[_Call | _Gap] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._put = self._done = self._lost = 0
        self._busy: tuple[str, float] | None = (
            None  # the current call, and when it began
        )
        self._failing: float | None = None  # when the logger began to fail
        self._attempts = 0
        self._closing: float | None = (
            None  # when to give up on a failing logger; None while the run continues
        )
        self._late = False
        self._begun: float | None = (
            None  # when the first call began; None once a call has succeeded
        )
        self._starting = not journals
        self._seen = (
            0.0,
            0.0,
        )  # when the thread's CPU time was read last, and the CPU time
        self._warned = -_QUIET
        self._refused: set[type[BaseException]] = set()

    @property
    def pending(self) -> int:
        """The number of logged values that the logger has not taken yet."""
        with self._changed:
            return self._pending()

    def _pending(self) -> int:
        return sum(
            item.end - item.first if isinstance(item, _Gap) else item.number >= 0
            for item in self._queue
        )

    def put(
        self, method: str, *arguments: Any, number: int = -1, first: bool = False
    ) -> int:
        """Queue a call; returns the ticket for `wait`. Never waits for the logger.

        Args:
            method: the method's name; skipped if the logger lacks it.
            arguments: the arguments of the call.
            number: the number of a logged value.
            first: whether `started` is called next.
        """
        with self._changed:
            self._closing = None
            self._put += 1
            if first:
                self._first, self._refusal = self._put, None
            if len(self._queue) < self._kept:
                self._queue.append(_Call(method, arguments, number, self._put))
            elif number >= 0 and self.index is not None and not self.journals:
                self._extend_gap(self.index, number)
            elif method != "save":
                if len(self._queue) < 2 * self._kept and number < 0:
                    self._queue.append(_Call(method, arguments, number, self._put))
                else:
                    self._lost += 1
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"logger {self.name}", daemon=True
                )
                self._thread.start()
            if number < 0 or len(self._queue) == self._many:
                self._changed.notify_all()
            ticket = self._put
        self._watch()
        return ticket

    def _extend_gap(self, index: JournalIndex, number: int) -> None:
        last = self._queue[-1]
        if isinstance(last, _Gap) and last.index is index and last.end == number:
            last.end, last.ticket = number + 1, self._put
        else:
            self._queue.append(_Gap(index, number, number + 1, self._put))

    def wait(self, ticket: int, deadline: float, stalled: bool = False) -> bool:
        """Wait for a call, until ``deadline`` (monotonic seconds) or until the logger fails.

        Args:
            ticket: the ticket of the call.
            deadline: the end of the wait.
            stalled: also wait for a logger that was too slow in an earlier wait.

        Returns:
            Whether the call is done.
        """
        with self._changed:
            if self._late and not stalled:
                return self._done >= ticket
            self._late = not self._wait_for(ticket, deadline)
        self._watch()
        return not self._late

    def started(self, deadline: float) -> bool:
        """Wait, as `wait` does, for the call queued as ``first``, even if the logger was too slow before.

        Raises:
            TrainerKitError: the logger refuses the call.
        """
        done = self.wait(self._first, deadline, stalled=True)
        with self._changed:
            refusal, self._refusal, self._first = self._refusal, None, -1
        if refusal is not None:
            raise refusal
        return done

    def catch_up(self, deadline: float) -> None:
        """Wait for every call so far, until ``deadline`` or until the logger fails; never marks the logger as slow."""
        with self._changed:
            self._wait_for(self._put, deadline)

    def _wait_for(self, ticket: int, deadline: float) -> bool:
        left = max(0.0, deadline - time.monotonic())
        self._changed.notify_all()
        self._changed.wait_for(
            lambda: self._done >= ticket or self._failing is not None, left
        )
        return self._done >= ticket

    def close(self, status: str | None) -> None:
        """Queue ``finalize``, and end the thread when it is done; failing calls are retried for 2 more seconds."""
        if status is not None:
            self.put("finalize", status)
        with self._changed:
            self._closing = time.monotonic() + _LAST
            self._computes()
            self._changed.notify_all()

    def wait_closed(self, deadline: float, grace: bool = True) -> bool:
        """Wait until the thread has ended; return whether every call is done. One line reports the calls left.

        Args:
            deadline: the end of the wait.
            grace: wait longer for a logger that computes in its first call: up to 60 seconds from its beginning.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._thread is None, max(0.0, deadline - time.monotonic())
            )
            starts = grace and self._is_starting()
        if starts:
            self._wait_for_start()
        with self._changed:
            left, busy, done = (
                self._pending(),
                self._busy,
                not self._queue and self._thread is None,
            )
        if done and self._lost:
            self._say(f"{self.name}: it did not receive every call{self._where()}")
            self._lost = 0
        if not done:
            state = (
                f"{busy[0]} has not returned for {time.monotonic() - busy[1]:.0f} s"
                if busy
                else "it fails"
            )
            self._say(
                f"{self.name}: {state}; {_counted(left)} not logged there{self._where()}"
            )
        return done

    def _is_starting(self) -> bool:
        """Whether the first call is under way, has time left, and has computed since the last look at it."""
        begun = self._begun
        return (
            begun is not None and time.monotonic() < begun + _GRACE and self._computes()
        )

    def _computes(self) -> bool:
        """Whether the thread has used CPU time since the last call of this method."""
        (before, spent), self._seen = (
            self._seen,
            (time.monotonic(), _cpu_seconds(self._thread)),
        )
        return self._seen[1] - spent > _WORKING * (self._seen[0] - before)

    def _wait_for_start(self) -> None:
        """Wait for the first call while it computes, then as long as any close does for the calls after it."""
        self._warn(
            "its first call has not returned yet, but is computing; waiting for it"
        )
        starting = True
        with self._changed:
            while starting and self._begun is not None:
                left = min(_PATIENCE, self._begun + _GRACE - time.monotonic())
                self._changed.wait_for(
                    lambda: self._thread is None or self._begun is None, max(0.0, left)
                )
                starting = self._is_starting()
            if self._begun is None:
                self._changed.wait_for(lambda: self._thread is None, _PATIENCE)

    # -- on the logger's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._next():
                    self._thread = None
                    self._changed.notify_all()
                    return
                item = self._queue[0]
            error = self._expand(item) if isinstance(item, _Gap) else self._call(item)
            if error is None:
                if isinstance(item, _Call):
                    self._leave()
            elif not self._handle(item, error):
                return

    def _next(self) -> bool:
        """Wait for a call; return whether there is one. Values wake nothing: the thread looks for them itself."""
        end = time.monotonic() + _IDLE
        while not self._queue:
            left = end - time.monotonic()
            if self._closing is not None or left <= 0:
                return False
            self._changed.wait(min(left, _NAP))
        return True

    def _call(self, call: _Call) -> BaseException | None:
        method = getattr(self.logger, call.method, None) if call.method else None
        if method is None:
            return None
        self._busy = call.method, time.monotonic()
        if self._starting:
            self._starting, self._begun = False, time.monotonic()
        arguments = tuple(
            dict(one) if isinstance(one, dict) else one for one in call.arguments
        )  # it may change them
        try:
            method(*arguments)
        except BaseException as error:
            return error
        finally:
            self._busy = None
        if self.journals and self.index is not None and call.number >= 0:
            self.index.note(call.number, self.logger.line)
        return None

    def _expand(self, gap: _Gap) -> BaseException | None:
        """Replace the first part of the gap at the head of the queue by calls read from the journal."""
        problem: Exception | None = None
        calls: list[_Call] = []
        end = min(gap.first + 100, gap.end)
        try:
            calls, end = gap.index.read(gap.first, end, self.timed)
        except TimeoutError as error:
            return error
        except Exception as error:  # the file was moved, deleted or changed
            problem = error
        with self._changed:
            self._lost += end - gap.first - len(calls)
            gap.first = end
            if gap.first == gap.end:
                self._queue.popleft()
                calls.append(
                    _Call("", (), ticket=gap.ticket)
                )  # marks the end of the gap for `wait`
            self._queue.extendleft(reversed(calls))
        if problem is not None:
            self._warn(f"values cannot be read back: {_text(problem)}")
        return None

    def _leave(self, position: int = 0) -> None:
        """Remove a finished call from the queue, and record that the logger responds."""
        with self._changed:
            call = self._queue[position]
            del self._queue[position]
            self._done = max(self._done, call.ticket)
            answers, self._failing, self._attempts, self._begun = (
                self._failing is not None,
                None,
                0,
                None,
            )
            self._late = self._late and bool(self._queue)
            self._changed.notify_all()
        if answers:
            self._say(f"{self.name} answers again")

    def _handle(self, item: _Call | _Gap, error: BaseException) -> bool:
        """Drop the call, or wait before its retry; return whether the thread continues."""
        if isinstance(item, _Call) and isinstance(error, TrainerKitError):
            self._leave_out(item, error)
            return True
        with self._changed:
            now = time.monotonic()
            self._failing = now if self._failing is None else self._failing
            self._attempts += 1
        if isinstance(item, _Call) and self._is_refusal(error, now - self._failing):
            self._leave_out(item, error)
            return True
        self._warn(
            f"{_text(error)}; training continues, {_counted(self.pending)} not logged there"
        )
        with self._changed:
            self._changed.notify_all()
            if self._closing is None:
                delay = _DELAYS[min(self._attempts, len(_DELAYS)) - 1]
                self._changed.wait_for(lambda: self._closing is not None, delay)
                return True
            if time.monotonic() < self._closing:
                self._changed.wait(_LAST_DELAY)
                return True
        self._give_up()
        return False

    def _leave_out(self, call: _Call, error: BaseException) -> None:
        """Drop a refused call: the start of an entry point raises its error; any other is reported in one line."""
        with self._changed:
            self._failing = None
            if raised := call.ticket == self._first and isinstance(
                error, TrainerKitError
            ):
                self._refusal = error
        self._leave()
        if not raised:
            at = f" of step {call.arguments[1]}" if call.number >= 0 else ""
            self._warn(
                f"it refused {call.method}{at}: {_text(error)}; training continues"
            )

    def _is_refusal(self, error: BaseException, failing: float) -> bool:
        """Whether the logger responds but refuses this call; may find out by making the next call."""
        if type(error) in self._refused:
            return True
        mistake = isinstance(error, _MISTAKES) and not isinstance(error, OSError)
        if (
            not (
                failing > _QUIET
                or (mistake and (self._attempts > 3 or self._closing is not None))
            )
            or len(self._queue) < 2
        ):
            return False
        following = self._queue[1]
        if not isinstance(following, _Call) or self._call(following) is not None:
            return False
        self._failing = None
        self._leave(1)
        self._refused.add(type(error))
        return True

    def _give_up(self) -> None:
        """End the thread of a logger that fails while closing; its calls stay queued for the next entry point."""
        last = self._queue[-1]
        if finalizes := isinstance(last, _Call) and last.method == "finalize":
            self._call(last)  # it may still close its files
        with self._changed:
            if finalizes and self._queue[-1] is last:
                self._queue.pop()
            self._thread = None
            self._changed.notify_all()

    # -- what is printed -------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        busy = self._busy
        if busy is not None and (spent := time.monotonic() - busy[1]) > _PATIENCE:
            self._warn(
                f"{busy[0]} has not returned for {spent:.0f} s; training continues"
            )

    def _warn(self, problem: str) -> None:
        """Print a warning, unless one was printed in the last minute."""
        now = time.monotonic()
        if now - self._warned >= _QUIET:
            self._warned = now
            self._say(f"{self.name}: {problem}{self._where()}")

    def _where(self) -> str:
        lost = f"; {self._lost:,} calls were dropped" if self._lost else ""
        kept = (
            ""
            if self.journals or self.index is None
            else f"; all values are in {self.index.journal.path}"
        )
        return kept + lost

    def _say(self, line: str) -> None:
        with suppress(Exception):  # a closed standard output
            self.say(line)


@final
class Deliveries:
    """The deliveries of all loggers of a run. They exist from the first call until every call is done.

    Args:
        say: prints a line.
        name: returns a logger's name for messages; by default its class name.
    """

    def __init__(
        self, say: Callable[[str], None], name: Callable[[Any], str] | None = None
    ) -> None:
        self.say, self._name = say, name or _class_name
        self._loggers: list[Any] = []
        self._each: dict[int, Delivery] = {}  # by the logger's identity
        self._index: JournalIndex | None = None
        self._logged = self._waited = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process has the same loggers and its own threads."""
        return {**self.__dict__, "_each": {}, "_index": None}

    def open(self, loggers: Iterable[Any], journal: JSONLLogger | None) -> None:
        """Set the loggers that receive the next calls.

        Args:
            loggers: the loggers in the user's order; one of them may be ``journal``.
            journal: gets every value first; other loggers catch up from it.
        """
        self._loggers = [
            *([] if journal is None else [journal]),
            *(one for one in loggers if one is not journal),
        ]
        if journal is None or self._index is None or self._index.journal is not journal:
            self._index = None if journal is None else JournalIndex(journal)
        for known in self._each.values():
            known.index = self._index

    def each(self) -> list[Delivery]:
        """The delivery of each logger; the journal's is the first."""
        index = self._index
        for one in self._loggers:
            if id(one) not in self._each:
                journals = index is not None and one is index.journal
                name = str(one.path) if journals else self._name(one)
                self._each[id(one)] = Delivery(one, self.say, index, journals, name)
        return [self._each[id(one)] for one in self._loggers]

    def log(
        self, values: Mapping[str, Any], step: int, counts: Mapping[str, int]
    ) -> None:
        """Queue the values of a step for every logger; a journal also gets the time, the samples and the tokens."""
        now = time.time()
        with _PUBLISHING:  # the same order in every queue
            self._logged = True
            number = -1
            if self._index is not None:
                number, self._index.count = self._index.count, self._index.count + 1
            for one in self.each():
                more: tuple[Any, ...] = (now,) if one.timed else ()
                if isinstance(one.logger, JSONLLogger):
                    more = (counts, now)
                one.put("log_metrics", values, step, *more, number=max(number, 0))

    def call(self, method: str, *arguments: Any) -> list[tuple[Delivery, int]]:
        """Queue another call for every logger that has this method; return the ticket of each."""
        return [(one, one.put(method, *arguments)) for one in self.each()]

    def start(self, method: str, *arguments: Any) -> list[Any]:
        """Make an entry point's first call of every logger, and wait up to 10 seconds for all of them.

        A later refusal is reported in a line, as any other failure of a logger is.

        Returns:
            The loggers that have not answered.

        Raises:
            TrainerKitError: a logger refuses the arguments.
        """
        deadline = time.monotonic() + _PATIENCE
        starting = self.each()
        for one in starting:
            one.put(method, *arguments, first=True)
        return [one.logger for one in starting if not one.started(deadline)]

    def save(self) -> Callable[[], None]:
        """Queue ``save`` for every logger; return a function that waits for the journal and all responding loggers."""
        waiting = self.call("save")

        def wait() -> None:
            begun = time.monotonic()
            for one, ticket in waiting:
                one.wait(ticket, begun + (_PATIENCE if one.journals else _SHORT))

        return wait

    def wait_for_runs(self) -> None:
        """Wait once, up to 1 second, for the first values to arrive: some loggers choose their run only then."""
        if self._logged and not self._waited:
            self._waited = True
            deadline = time.monotonic() + _SHORT
            for one in self._each.values():
                one.catch_up(deadline)

    def wait(self) -> None:
        """Wait up to 10 seconds until every responding logger has taken the queued calls."""
        deadline = time.monotonic() + _PATIENCE
        for one in list(self._each.values()):
            one.wait(one.put("", ()), deadline)

    def close(self, status: str | None, at_once: bool = False) -> None:
        """Finalize every logger, and wait for all of them together.

        Args:
            status: ``"success"``, ``"failed"`` or ``"interrupted"``; None to wait only.
            at_once: wait 1 second instead of 10; a slower logger gets the rest of its calls later. Otherwise a logger
                that computes in its first call gets up to 60 seconds from the beginning of that call, unless a signal
                ends the run: the sender may kill it after 30 seconds.
        """
        deadline = time.monotonic() + (_SHORT if at_once else _PATIENCE)
        closing = self.each()
        for one in closing:
            one.close(status)
        for one in closing:
            if one.wait_closed(deadline, grace=not at_once and status != "interrupted"):
                del self._each[id(one.logger)]


def _cpu_seconds(thread: threading.Thread | None) -> float:
    """The CPU time that a running thread has used; that of this process where the system does not tell."""
    if (
        thread is None or thread.ident is None or not thread.is_alive()
    ):  # a fork has no threads of its parent
        return 0.0
    if sys.platform == "linux":
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return time.process_time()


def _class_name(logger: Any) -> str:
    return type(logger).__name__


def _counted(values: int) -> str:
    return "1 value is" if values == 1 else f"{values:,} values are"


def _text(error: BaseException) -> str:
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # the exception's own __str__ fails
        lines = []
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
