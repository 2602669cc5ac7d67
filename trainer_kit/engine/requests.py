"""What callbacks, users and signals ask for, until the loop settles it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

from trainer_kit.core.protocols import CheckpointRequest

__all__ = ["Requests", "ended_by", "listening", "terminable"]


@final
class Requests:
    """Asked, not yet done.

    Attributes:
        stop: why training should stop, or None.
        validation: why validation should run now, or None.
        checkpoints: (reason, request); a request of None means the run's own directory and name.
        signal: the number of a signal that asked this process for a graceful end, or 0.
        leaving: of a signal that every rank of several has heard of, or 0: they leave together.
        wake: called at each request, so that the loop looks at the end of the running step.
    """

    def __init__(self) -> None:
        self.stop: str | None = None
        self.validation: str | None = None
        self.checkpoints: list[tuple[str, CheckpointRequest | None]] = []
        self.signal = self.leaving = 0
        self.wake: Callable[[], None] = _nobody

    def clear(self) -> None:
        """A new run."""
        self.stop = self.validation = None
        self.checkpoints.clear()
        self.signal = self.leaving = 0
        self.wake = _nobody

    def ask_stop(self, reason: str) -> None:
        """Stop at the end of this step; the first reason stays."""
        self.stop = self.stop or reason
        self.wake()

    def ask_checkpoint(self, reason: str, request: CheckpointRequest | None) -> None:
        """Take a checkpoint once everything of this step is done."""
        self.checkpoints.append((reason, request))
        self.wake()

    def ask_validation(self, reason: str) -> None:
        """Validate at the end of this step."""
        self.validation = self.validation or reason
        self.wake()

    @property
    def named(self) -> bool:
        """Whether a checkpoint is asked for that brings its own path."""
        return any(request is not None for _, request in self.checkpoints)

    @property
    def pending(self) -> list[float]:
        """One number for each kind of request, for a vote."""
        return [
            float(self.stop is not None),
            float(self.validation is not None),
            self.signal,
            len(self.checkpoints),
        ]


def _nobody() -> None:
    """Nobody is waiting."""


@contextmanager
def listening(requests: Requests) -> Iterator[None]:
    """SIGTERM and Ctrl-C end the run gracefully at the next step; the second one at once. Main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, frame: Any) -> None:
        if requests.signal:  # asked twice
            signal.signal(number, before[number])
            raise ended_by(number)
        requests.signal = number
        requests.wake()

    before: dict[int, Any] = {}
    for number in (int(signal.SIGTERM), int(signal.SIGINT)):
        # A handler that was not installed from Python (None) cannot be put back: leave it alone.
        if signal.getsignal(number) is not None:
            before[number] = signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if requests.signal:  # it came after the last step
        raise ended_by(requests.signal)


def terminable(requests: Requests) -> Callable[[BaseException | None], None]:
    """From here on SIGTERM ends a verb also where no step is running, but not without its teardown.

    Returns:
        What ends this. A handler of the user's own is left alone.
    """
    mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

    def on_signal(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)  # the second one kills
        requests.signal = number
        raise ended_by(number)

    def end(error: BaseException | None) -> None:
        if mine:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    if mine:
        signal.signal(signal.SIGTERM, on_signal)
    return end


def ended_by(number: int) -> BaseException:
    """The exception that a signal becomes: KeyboardInterrupt for Ctrl-C, else exit code 128 + number."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
