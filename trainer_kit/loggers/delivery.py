"""Calls loggers off the training thread: each logger has its own bounded queue and thread."""

from __future__ import annotations

import inspect
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, TypeAlias, final

from trainer_kit.core.display import plural
from trainer_kit.core.errors import TrainerKitError
from trainer_kit.core.types import StateDict
from trainer_kit.loggers.bounded import WORKING, cpu_seconds
from trainer_kit.loggers.journal import JSONLLogger

__all__ = ["Deliveries", "Delivery", "JournalIndex"]

_Target: TypeAlias = Any
"""A logger of a Trainer, or a queue of an Accelerator's tracker: methods are called by name, if it has them."""

_MAX_CALLS: Final = 1000
"""The most calls to keep in memory for one logger; further values are read back from the journal."""
_PATIENCE: Final = 10.0
"""The most seconds that a start, a close or the sync of a checkpoint's journal waits for all loggers together."""
_GRACE: Final = 60.0
"""The most seconds, from its beginning, that a close waits for a logger's first call that computes: it may create a
database."""
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
"""Held while one step's values are put into all queues."""


@final
@dataclass(slots=True)
class _Call:
    """One call of a logger; ``number`` counts logged values, -1 for every other call."""

    method: str
    arguments: tuple[object, ...]
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

    def extend(self, ticket: int) -> None:
        """Add the next value."""
        self.end += 1
        self.ticket = ticket

    def skip_to(self, number: int) -> None:
        """Remove the values before ``number``."""
        self.first = number


def _takes_time(logger: _Target) -> bool:
    """Whether ``log_metrics(metrics, step, at)`` takes when the values were logged: earlier than it is called."""
    try:
        parameters = list(inspect.signature(logger.log_metrics).parameters)
    except (AttributeError, TypeError, ValueError):
        # Functions written in C may have no signature.
        return False
    # By name, not by count: a third parameter of a user's logger may be anything.
    return parameters[2:3] == ["at"]


@final
class JournalIndex:
    """The byte offset in the journal of each value that this process logs.

    Args:
        journal: the logger that writes every value to the file.
    """

    def __init__(self, journal: JSONLLogger) -> None:
        self.journal = journal
        # the numbers of the values, written or not
        self.numbers = count()
        # An array, not a list: 8 bytes for each value of a run that may log for weeks.
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
        argument_count = 3 if timed else 2
        calls = []
        for number, offset in offsets:
            if offset >= 0:
                arguments = self.journal.read_values(offset)[:argument_count]
                calls.append(_Call("log_metrics", arguments, number))
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
        logger: _Target,
        say: Callable[[str], None],
        index: JournalIndex | None,
        journals: bool,
        name: str,
    ) -> None:
        self.logger = logger
        self.say = say
        self.index = index
        self.journals = journals
        self.name = name
        self.timed = _takes_time(logger)
        # the ticket of a call whose refusal `started` raises
        self._first = -1
        self._refusal: TrainerKitError | None = None
        # Without a journal to read from, more is worth keeping.
        self._capacity = _MAX_CALLS
        if journals or index is None:
            self._capacity = 10 * _MAX_CALLS
        # the length of the queue that wakes the thread, whatever the calls are
        self._wake_length = max(1, self._capacity // 10)
        self._queue: deque[_Call | _Gap] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        # the ticket of the last call, and of the last finished one
        self._put = 0
        self._done = 0
        # the number of calls that were dropped since the last line about them
        self._lost = 0
        # the current call, and when it began
        self._busy: tuple[str, float] | None = None
        # when the logger began to fail; None while it responds
        self._failing: float | None = None
        self._attempts = 0
        # when to give up on a failing logger; None while the run continues
        self._closing: float | None = None
        # whether a wait ended at its deadline: later waits skip this logger until its queue is empty
        self._late = False
        # when the first call began; None once a call has succeeded
        self._begun: float | None = None
        self._starting = not journals
        # when the thread's CPU time was read last, and the CPU time
        self._cpu_reading = (0.0, 0.0)
        # when the last warning was printed; the clock may be near 0 after a boot, and the first one must pass
        self._warned = -_QUIET
        # errors of calls that were dropped while the next call succeeded: such a call is not retried again
        self._refused: set[type[BaseException]] = set()

    def use_index(self, index: JournalIndex | None) -> None:
        """Read missing values from another journal from now on."""
        self.index = index

    @property
    def pending(self) -> int:
        """The number of logged values that the logger has not taken yet."""
        with self._changed:
            return self._pending()

    def _pending(self) -> int:
        values = 0
        for item in self._queue:
            if isinstance(item, _Gap):
                values += item.end - item.first
            elif item.number >= 0:
                values += 1
        return values

    def put(
        self, method: str, *arguments: object, number: int = -1, first: bool = False
    ) -> int:
        """Queue a call; returns the ticket for `wait`. Never waits for the logger.

        Args:
            method: the method's name; skipped if the logger lacks it.
            arguments: the arguments of the call.
            number: the number of a logged value.
            first: whether `started` is called next.
        """
        with self._changed:
            # A new call belongs to a run that continues, also after a close that did not finish.
            self._closing = None
            self._put += 1
            if first:
                self._first = self._put
                self._refusal = None
            call = _Call(method, arguments, number, self._put)
            if len(self._queue) < self._capacity:
                self._queue.append(call)
            elif number >= 0 and self.index is not None and not self.journals:
                self._extend_gap(self.index, number)
            # A `save` may be dropped: a later checkpoint saves again.
            elif method != "save":
                # Hyperparameters and `finalize` are not read back from the journal: they get more room than values.
                if len(self._queue) < 2 * self._capacity and number < 0:
                    self._queue.append(call)
                else:
                    self._lost += 1
            # Daemon: a logger that hangs must not keep the process from ending.
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"logger {self.name}", daemon=True
                )
                self._thread.start()
            if number < 0 or len(self._queue) == self._wake_length:
                self._changed.notify_all()
            ticket = self._put
        self._watch()
        return ticket

    def _extend_gap(self, index: JournalIndex, number: int) -> None:
        last = self._queue[-1]
        if isinstance(last, _Gap) and last.index is index and last.end == number:
            last.extend(self._put)
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
            # Once a logger was too slow, each checkpoint would wait for it again.
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
            refusal = self._refusal
            self._refusal = None
            self._first = -1
        if refusal is not None:
            raise refusal
        return done

    def catch_up(self, deadline: float) -> None:
        """Wait for every call so far, until ``deadline`` or until the logger fails; never marks the logger as slow."""
        with self._changed:
            self._wait_for(self._put, deadline)

    def _wait_for(self, ticket: int, deadline: float) -> bool:
        # Values do not wake the thread, so a wait does.
        self._changed.notify_all()
        self._changed.wait_for(
            lambda: self._done >= ticket or self._failing is not None,
            _seconds_until(deadline),
        )
        return self._done >= ticket

    def close(self, status: str | None) -> None:
        """Queue ``finalize``, and end the thread when it is done; failing calls are retried for 2 more seconds."""
        if status is not None:
            self.put("finalize", status)
        with self._changed:
            self._closing = time.monotonic() + _LAST
            # Begins the interval that `_is_starting` looks at.
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
                lambda: self._thread is None, _seconds_until(deadline)
            )
            starts = grace and self._is_starting()
        if starts:
            self._wait_for_start()
        with self._changed:
            pending = self._pending()
            busy = self._busy
            done = not self._queue and self._thread is None
        if done:
            if self._lost:
                self._say(f"{self.name}: it did not receive every call{self._notes()}")
                self._lost = 0
            return True
        state = "it fails"
        if busy is not None:
            method, begun = busy
            spent = time.monotonic() - begun
            state = f"{method} has not returned for {spent:.0f} s"
        self._say(
            f"{self.name}: {state}; {_counted(pending)} not logged there{self._notes()}"
        )
        return False

    def _is_starting(self) -> bool:
        """Whether the first call is under way, has time left, and has computed since the last look at it."""
        begun = self._begun
        if begun is None or time.monotonic() >= begun + _GRACE:
            return False
        return self._computes()

    def _computes(self) -> bool:
        """Whether the thread has used CPU time since the last call of this method."""
        last_time, last_cpu = self._cpu_reading
        now = time.monotonic()
        cpu = cpu_seconds(self._thread)
        self._cpu_reading = (now, cpu)
        return cpu - last_cpu > WORKING * (now - last_time)

    def _wait_for_start(self) -> None:
        """Wait for the first call while it computes, then as long as any close does for the calls after it."""
        self._warn(
            "its first call has not returned yet, but is computing; waiting for it"
        )
        starting = True
        with self._changed:
            while starting and self._begun is not None:
                # In intervals: a call that stops computing gets no more than one of them.
                patience = min(_PATIENCE, _seconds_until(self._begun + _GRACE))
                self._changed.wait_for(
                    lambda: self._thread is None or self._begun is None, patience
                )
                starting = self._is_starting()
            if self._begun is None:
                self._changed.wait_for(lambda: self._thread is None, _PATIENCE)

    # -- on the logger's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._wait_for_call():
                    self._thread = None
                    self._changed.notify_all()
                    return
                item = self._queue[0]
            if isinstance(item, _Gap):
                error = self._expand(item)
            else:
                error = self._call(item)
                if error is None:
                    self._finish()
            if error is not None and not self._handle(item, error):
                return

    def _wait_for_call(self) -> bool:
        """Wait for a call; return whether there is one. Values wake nothing: the thread looks for them itself."""
        deadline = time.monotonic() + _IDLE
        while not self._queue:
            idle = _seconds_until(deadline)
            if self._closing is not None or not idle:
                return False
            self._changed.wait(min(idle, _NAP))
        return True

    def _call(self, call: _Call) -> BaseException | None:
        method = getattr(self.logger, call.method, None) if call.method else None
        if method is None:
            return None
        self._busy = (call.method, time.monotonic())
        # Only the very first call may take long: it creates a database, or connects.
        if self._starting:
            self._starting = False
            self._begun = time.monotonic()
        # Copies of the dicts, which all loggers share: a logger may change its arguments.
        arguments: list[object] = []
        for argument in call.arguments:
            if isinstance(argument, dict):
                argument = dict(argument)
            arguments.append(argument)
        # Also SystemExit and KeyboardInterrupt: they would end this thread, and the queue would never be emptied.
        try:
            method(*arguments)
        except BaseException as error:
            return error
        finally:
            self._busy = None
        if self.journals and self.index is not None and call.number >= 0:
            self.index.note(call.number, self.index.journal.line)
        return None

    def _expand(self, gap: _Gap) -> BaseException | None:
        """Replace the first values of the gap at the head of the queue by calls read from the journal."""
        problem: Exception | None = None
        calls: list[_Call] = []
        # A hundred at a time: all of a gap would again be in memory at once.
        next_index = min(gap.first + 100, gap.end)
        try:
            calls, next_index = gap.index.read(gap.first, next_index, self.timed)
        except TimeoutError as error:
            return error
        except Exception as error:
            # The file was moved, deleted or changed: no retry brings these values back.
            problem = error
        with self._changed:
            self._lost += next_index - gap.first - len(calls)
            gap.skip_to(next_index)
            if gap.first == gap.end:
                self._queue.popleft()
                # A call of nothing, which marks the end of the gap for `wait`.
                calls.append(_Call("", (), ticket=gap.ticket))
            self._queue.extendleft(reversed(calls))
        if problem is not None:
            self._warn(f"values cannot be read back: {_text(problem)}")
        return None

    def _finish(self, position: int = 0) -> None:
        """Remove a finished call from the queue, and record that the logger responds."""
        with self._changed:
            call = self._queue[position]
            del self._queue[position]
            self._done = max(self._done, call.ticket)
            answers = self._failing is not None
            self._failing = None
            self._attempts = 0
            self._begun = None
            self._late = self._late and bool(self._queue)
            self._changed.notify_all()
        if answers:
            self._say(f"{self.name} answers again")

    def _handle(self, item: _Call | _Gap, error: BaseException) -> bool:
        """Drop the call, or wait before its retry; return whether the thread continues."""
        # An error of this library is about the arguments: a retry would fail with it too.
        if isinstance(item, _Call) and isinstance(error, TrainerKitError):
            self._drop(item, error)
            return True
        with self._changed:
            now = time.monotonic()
            if self._failing is None:
                self._failing = now
            failing_time = now - self._failing
            self._attempts += 1
        if isinstance(item, _Call) and self._is_refusal(error, failing_time):
            self._drop(item, error)
            return True
        self._warn(
            f"{_text(error)}; training continues, {_counted(self.pending)} not logged there"
        )
        with self._changed:
            # A thread that waits for this logger stops: it fails, and may do so for hours.
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

    def _drop(self, call: _Call, error: BaseException) -> None:
        """Drop a refused call: the start of an entry point raises its error; any other is reported in one line."""
        with self._changed:
            self._failing = None
            raised = False
            # Only while the start waits: after its 10 seconds no thread would receive the error.
            if call.ticket == self._first and isinstance(error, TrainerKitError):
                self._refusal = error
                raised = True
        self._finish()
        if raised:
            return
        refused = call.method
        if call.number >= 0:
            refused += f" of step {call.arguments[1]}"
        self._warn(f"it refused {refused}: {_text(error)}; training continues")

    def _is_refusal(self, error: BaseException, failing_time: float) -> bool:
        """Whether the logger responds but refuses this call; may find out by making the next call."""
        if type(error) in self._refused:
            return True
        mistake = isinstance(error, _MISTAKES) and not isinstance(error, OSError)
        few_retries = self._attempts <= 3 and self._closing is None
        # A service may be down for a while; a bug of a call does not go away.
        patient = few_retries or not mistake
        if patient and failing_time <= _QUIET:
            return False
        # A service that is down refuses every call; one that takes the next call refuses only this one.
        if len(self._queue) < 2:
            return False
        next_call = self._queue[1]
        if not isinstance(next_call, _Call) or self._call(next_call) is not None:
            return False
        self._failing = None
        self._finish(1)
        self._refused.add(type(error))
        return True

    def _give_up(self) -> None:
        """End the thread of a logger that fails while closing; its calls stay queued for the next entry point."""
        last = self._queue[-1]
        finalizes = isinstance(last, _Call) and last.method == "finalize"
        # Out of order, and once: it may still close its files.
        if isinstance(last, _Call) and finalizes:
            self._call(last)
        with self._changed:
            if finalizes and self._queue[-1] is last:
                self._queue.pop()
            self._thread = None
            self._changed.notify_all()

    # -- what is printed -------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Warn if the current call takes long. The caller's thread does this: the logger's own may hang."""
        busy = self._busy
        if busy is None:
            return
        method, begun = busy
        spent = time.monotonic() - begun
        if spent > _PATIENCE:
            self._warn(
                f"{method} has not returned for {spent:.0f} s; training continues"
            )

    def _warn(self, problem: str) -> None:
        """Print a warning, unless one was printed in the last minute."""
        now = time.monotonic()
        if now - self._warned >= _QUIET:
            self._warned = now
            self._say(f"{self.name}: {problem}{self._notes()}")

    def _notes(self) -> str:
        """Say where the values are, and how many calls were dropped."""
        notes = ""
        if self.index is not None and not self.journals:
            notes += f"; all values are in {self.index.journal.path}"
        if self._lost:
            notes += (
                f"; {plural(self._lost, 'call was', 'calls were', spec=',')} dropped"
            )
        return notes

    def _say(self, line: str) -> None:
        # Standard output may be closed.
        with suppress(Exception):
            self.say(line)


@final
class Deliveries:
    """The deliveries of all loggers of a run. They exist from the first call until every call is done.

    Args:
        say: prints a line.
        name: returns a logger's name for messages; by default its class name.
    """

    def __init__(
        self, say: Callable[[str], None], name: Callable[[_Target], str] | None = None
    ) -> None:
        self.say = say
        self._name = name or _class_name
        self._loggers: list[_Target] = []
        # by the logger's identity: a user's logger may not be hashable
        self._deliveries: dict[int, Delivery] = {}
        self._index: JournalIndex | None = None
        # whether values were logged, and whether `wait_for_runs` has waited for them
        self._logged = False
        self._waited = False

    def __getstate__(self) -> StateDict:
        """A copy in another process has the same loggers and its own threads."""
        return {**self.__dict__, "_deliveries": {}, "_index": None}

    def open(self, loggers: Iterable[_Target], journal: JSONLLogger | None) -> None:
        """Set the loggers that receive the next calls.

        Args:
            loggers: the loggers in the user's order; one of them may be ``journal``.
            journal: gets every value first; other loggers catch up from it.
        """
        self._loggers = [logger for logger in loggers if logger is not journal]
        if journal is None:
            self._index = None
        else:
            # First: other loggers read values back from it, and a checkpoint waits for it longest.
            self._loggers.insert(0, journal)
            # The index of the same journal stays: calls in the queues refer to its numbers.
            if self._index is None or self._index.journal is not journal:
                self._index = JournalIndex(journal)
        for delivery in self._deliveries.values():
            delivery.use_index(self._index)

    def each(self) -> list[Delivery]:
        """The delivery of each logger; the journal's is the first."""
        for logger in self._loggers:
            if id(logger) not in self._deliveries:
                self._deliveries[id(logger)] = self._start_delivery(logger)
        return [self._deliveries[id(logger)] for logger in self._loggers]

    def _start_delivery(self, logger: _Target) -> Delivery:
        index = self._index
        if index is not None and logger is index.journal:
            path = str(index.journal.path)
            return Delivery(logger, self.say, index, journals=True, name=path)
        name = self._name(logger)
        return Delivery(logger, self.say, index, journals=False, name=name)

    def log(
        self, values: Mapping[str, object], step: int, counts: Mapping[str, int]
    ) -> None:
        """Queue the values of a step for every logger; a journal also gets the time, the samples and the tokens."""
        # Here, not on the loggers' threads: they may be seconds behind the step.
        now = time.time()
        # Two threads that log keep the same order in every queue, and in the journal's numbers.
        with _PUBLISHING:
            self._logged = True
            number = 0
            if self._index is not None:
                number = next(self._index.numbers)
            for delivery in self.each():
                arguments: list[object] = [values, step]
                if isinstance(delivery.logger, JSONLLogger):
                    arguments += [counts, now]
                elif delivery.timed:
                    arguments.append(now)
                delivery.put("log_metrics", *arguments, number=number)

    def call(self, method: str, *arguments: object) -> list[tuple[Delivery, int]]:
        """Queue another call for every logger that has this method; return the ticket of each."""
        tickets = []
        for delivery in self.each():
            ticket = delivery.put(method, *arguments)
            tickets.append((delivery, ticket))
        return tickets

    def start(self, method: str, *arguments: object) -> list[_Target]:
        """Make an entry point's first call of every logger, and wait up to 10 seconds for all of them.

        A later refusal is reported in a line, as any other failure of a logger is.

        Returns:
            The loggers that have not answered.

        Raises:
            TrainerKitError: a logger refuses the arguments.
        """
        deadline = time.monotonic() + _PATIENCE
        deliveries = self.each()
        # All begin before any is waited for.
        for delivery in deliveries:
            delivery.put(method, *arguments, first=True)
        return [
            delivery.logger for delivery in deliveries if not delivery.started(deadline)
        ]

    def save(self) -> Callable[[], None]:
        """Queue ``save`` for every logger; return a function that waits for the journal and all responding loggers."""
        tickets = self.call("save")

        def wait() -> None:
            begun = time.monotonic()
            for delivery, ticket in tickets:
                # The journal resumes with the checkpoint; the other loggers can be filled from it.
                patience = _SHORT
                if delivery.journals:
                    patience = _PATIENCE
                delivery.wait(ticket, begun + patience)

        return wait

    def wait_for_runs(self) -> None:
        """Wait once, up to 1 second, for the first values to arrive: some loggers choose their run only then."""
        if self._logged and not self._waited:
            self._waited = True
            deadline = time.monotonic() + _SHORT
            for delivery in self._deliveries.values():
                delivery.catch_up(deadline)

    def wait(self) -> None:
        """Wait up to 10 seconds until every responding logger has taken the queued calls."""
        deadline = time.monotonic() + _PATIENCE
        for delivery in list(self._deliveries.values()):
            # A call of nothing, behind all others.
            ticket = delivery.put("", ())
            delivery.wait(ticket, deadline)

    def close(self, status: str | None, at_once: bool = False) -> None:
        """Finalize every logger, and wait for all of them together.

        Args:
            status: ``"success"``, ``"failed"`` or ``"interrupted"``; None to wait only.
            at_once: wait 1 second instead of 10; a slower logger gets the rest of its calls later. Otherwise a logger
                that computes in its first call gets up to 60 seconds from the beginning of that call, unless a signal
                ends the run: the sender may kill it after 30 seconds.
        """
        patience = _SHORT if at_once else _PATIENCE
        deadline = time.monotonic() + patience
        grace = not at_once and status != "interrupted"
        deliveries = self.each()
        # All are closed before any is waited for, so that they share the ten seconds.
        for delivery in deliveries:
            delivery.close(status)
        for delivery in deliveries:
            # One with calls left stays: the next entry point continues its queue.
            if delivery.wait_closed(deadline, grace=grace):
                del self._deliveries[id(delivery.logger)]


def _seconds_until(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _class_name(logger: _Target) -> str:
    return type(logger).__name__


def _counted(values: int) -> str:
    return plural(values, "value is", "values are", spec=",")


def _text(error: BaseException) -> str:
    try:
        lines = str(error).strip().splitlines()
    except Exception:
        # The exception's own __str__ fails.
        lines = []
    name = type(error).__name__
    if not lines:
        return name
    return f"{name}: {lines[0]}"
