"""Requests of callbacks, users and signals, until the loop settles them.

A request is noted on the rank that makes it, and nothing happens until the ranks have agreed: a rank that stopped or
saved alone would leave the others in a collective. Signals are noted apart, because they may take effect sooner than
requests; only ``leaving``, which all ranks have agreed on, ends a run of several ranks.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, final
from weakref import WeakSet

from trainer_kit.core.protocols import CheckpointRequest
from trainer_kit.launch.program import requeue

__all__ = ["Requests", "ended_by", "listening", "requeue_once", "terminable"]

_HANDLERS: Final[WeakSet[Any]] = WeakSet()
# Batch systems send it shortly before the time limit. Windows does not have it.
_USR1: Final[int | None] = getattr(signal, "SIGUSR1", None)


@final
class Requests:
    """Pending requests.

    Attributes:
        stop: why training should stop, or None.
        validation: why validation should run now, or None.
        checkpoints: (reason, request); a request of None means the run's own directory and name.
        signal: the number of a signal that asked this process for a graceful end, or 0.
        leaving: the number of a signal that all ranks have agreed on, or 0; they leave together.
        at_once: a second signal came: the run no longer waits for anything.
        requeued: SLURM was asked to run this job again.
    """

    def __init__(self) -> None:
        self._wake: Callable[[], None] = _no_wake
        self.clear()

    def clear(self) -> None:
        """Drop all requests, before a new run."""
        self.stop: str | None = None
        self.validation: str | None = None
        self.checkpoints: list[tuple[str, CheckpointRequest | None]] = []
        self.signal = 0
        self.leaving = 0
        self.at_once = False
        self.requeued = False
        self.end_loop()

    def begin_loop(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` at each request from here on: the loop then settles at the end of the running step."""
        self._wake = wake

    def end_loop(self) -> None:
        """No loop waits for requests."""
        self._wake = _no_wake

    def wake(self) -> None:
        """Let the loop settle at the end of the running step."""
        self._wake()

    def ask_stop(self, reason: str) -> None:
        """Stop at the end of this step; the first reason stays."""
        self.stop = self.stop or reason
        self.wake()

    def withdraw_stop(self, reason: str) -> None:
        """Forget a stop request for this reason."""
        if self.stop == reason:
            self.stop = None

    def drop_stop(self) -> None:
        """Forget the stop request, whatever its reason."""
        self.stop = None

    def restore_stop(self, reason: str | None) -> None:
        """Set the stop request of a run that this one continues."""
        self.stop = reason

    def drop_validation(self) -> None:
        """Forget the request for a validation: it runs now, or there is nothing to validate on."""
        self.validation = None

    def forget_step(self) -> None:
        """Forget the requests of a step that runs again, and makes them again."""
        self.stop = None
        self.validation = None
        self.checkpoints.clear()

    def take_of_all_ranks(self, stop: str | None, validation: str | None) -> None:
        """Set the requests that the ranks have agreed on."""
        self.stop = stop
        self.validation = validation

    def leave_on(self, number: int) -> None:
        """Set the number of the signal that the ranks have agreed on; 0: none."""
        self.leaving = number

    def ask_checkpoint(self, reason: str, request: CheckpointRequest | None) -> None:
        """Take a checkpoint once everything of this step is done."""
        self.checkpoints.append((reason, request))
        self.wake()

    def drop_checkpoints(self, saved: Sequence[CheckpointRequest | None]) -> None:
        """Forget the requests that a save grants; None drops all requests without a path."""
        identities = {id(request) for request in saved}
        self.checkpoints[:] = [
            (reason, request)
            for reason, request in self.checkpoints
            if id(request) not in identities
        ]

    def ask_validation(self, reason: str) -> None:
        """Validate at the end of this step."""
        self.validation = self.validation or reason
        self.wake()

    def take_signal(self, number: int) -> bool:
        """Note a signal that asks for a graceful end; False if one was noted before, so that this one acts at once."""
        if self.signal:
            self.at_once = True
            return False
        self.signal = number
        return True

    def set_signal(self, number: int) -> None:
        """Set the number of the signal that ends this entry point, also on a rank that did not get it."""
        self.signal = number

    def take_requeue(self) -> bool:
        """Whether SLURM is to be asked to run this job again: after SIGUSR1, and once."""
        if self.signal != _USR1 or self.requeued:
            return False
        self.requeued = True
        return True

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """A context whose requests are dropped at its end."""
        stop, validation = self.stop, self.validation
        checkpoints = list(self.checkpoints)
        # No `finally`: after an exception the requests of the context are settled.
        yield
        self.stop, self.validation = stop, validation
        self.checkpoints[:] = checkpoints

    @property
    def named(self) -> bool:
        """Whether a checkpoint is asked for that brings its own path."""
        return any(request is not None for _, request in self.checkpoints)

    @property
    def unnamed(self) -> bool:
        """Whether a checkpoint is asked for in the run's own directory."""
        return any(request is None for _, request in self.checkpoints)

    @property
    def pending(self) -> dict[str, float]:
        """For a vote: stop, validation, the signal's number, checkpoints without a path, checkpoints with one."""
        named = [request for _, request in self.checkpoints if request is not None]
        return {
            "stop": self.stop is not None,
            "validation": self.validation is not None,
            "signal": self.signal,
            "unnamed": len(self.checkpoints) - len(named),
            "named": len(named),
        }


def _no_wake() -> None:
    """Do nothing: no loop is waiting."""


@contextmanager
def listening(requests: Requests) -> Iterator[None]:
    """SIGTERM, Ctrl-C and SIGUSR1 end the run gracefully at the next step; the second one at once. Main thread only.

    A handler of the user is replaced meanwhile, except for SIGUSR1, which keeps the user's meaning.
    """
    # Python lets only the main thread install handlers.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        # The handler only notes the number: it may run inside a collective or half-way through an optimizer step.
        if not requests.take_signal(number):
            signal.signal(number, previous_handlers[number])
            raise ended_by(number)
        requests.wake()

    previous_handlers: dict[int, Any] = {}
    numbers = [int(signal.SIGTERM), int(signal.SIGINT)]
    if _USR1 and _is_free(_USR1):
        numbers.append(int(_USR1))
    for number in numbers:
        # A handler that was not installed from Python (None) cannot be put back: leave it alone.
        if signal.getsignal(number) is not None:
            previous_handlers[number] = signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
    # It came after the last step: no loop was left to settle it.
    if requests.signal:
        raise ended_by(requests.signal)


def terminable(requests: Requests) -> Callable[[BaseException | None], None]:
    """From here on SIGTERM and SIGUSR1 end an entry point also where no step is running, after its teardown.

    Returns:
        A function that ends this. A handler of the user stays.
    """
    # Python lets only the main thread install handlers.
    numbers: list[int] = []
    if threading.current_thread() is threading.main_thread():
        candidates = [number for number in (signal.SIGTERM, _USR1) if number]
        numbers = [n for n in candidates if signal.getsignal(n) == signal.SIG_DFL]

    def on_signal(number: int, frame: FrameType | None) -> None:
        # A second signal kills.
        signal.signal(number, signal.SIG_DFL)
        requests.set_signal(number)
        raise ended_by(number)

    def restore_default_handlers(error: BaseException | None) -> None:
        for number in numbers:
            # A hook may have set a handler of the user's.
            if signal.getsignal(number) is on_signal:
                signal.signal(number, signal.SIG_DFL)

    _HANDLERS.add(on_signal)
    for number in numbers:
        signal.signal(number, on_signal)
    return restore_default_handlers


def _is_free(number: int) -> bool:
    handler = signal.getsignal(number)
    return handler == signal.SIG_DFL or handler in _HANDLERS


def requeue_once(requests: Requests) -> str:
    """After SIGUSR1 inside a SLURM job: request a requeue, and return a line about the result; "" otherwise."""
    if not requests.take_requeue():
        return ""
    return requeue()


def ended_by(number: int) -> BaseException:
    """The exception that a signal becomes: KeyboardInterrupt for Ctrl-C, else exit code 128 + number."""
    if number == signal.SIGINT:
        return KeyboardInterrupt()
    return SystemExit(128 + number)
