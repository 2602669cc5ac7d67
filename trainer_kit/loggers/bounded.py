"""Calls of loggers whose answer the training thread needs, each with a limit of time."""

from __future__ import annotations

import contextvars
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Final, TypeVar, final

import torch

from trainer_kit.core.devices import make_current
from trainer_kit.loggers.modes import preserved_modes

__all__ = ["WORKING", "BoundedCalls", "cpu_seconds"]

_PATIENCE: Final = 10.0
"""The most seconds to wait for one call."""
WORKING: Final = 0.02
"""The share of CPU time above which a call counts as computing. One that hangs sleeps, or polls."""

_Answer = TypeVar("_Answer")


@final
class _LoggerThread:
    """A daemon thread that makes all calls of one logger; it ends when this object or the process does.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._calls = calls
        # The thread must not refer to this object, which would then never be collected.
        self.thread = threading.Thread(
            target=_make_calls, args=(calls,), name=name, daemon=True
        )
        self.thread.start()

    # No `weakref.finalize`: it would end the thread before handlers of the user that log at the end of the process.
    def __del__(self) -> None:
        self._calls.put(None)

    def start(self, call: Callable[[], object]) -> threading.Thread:
        """Make a call after the earlier ones, and return the thread without waiting."""
        self._calls.put(call)
        return self.thread


def _make_calls(calls: queue.SimpleQueue[Callable[[], object] | None]) -> None:
    call = calls.get()
    while call is not None:
        call()
        # The logger may be collected while this thread waits for the next call.
        del call
        call = calls.get()


@final
class BoundedCalls:
    """Calls of loggers that the training thread waits for: a logger that blocks is left out after 10 seconds.

    The error of a call is raised in the caller. While a call has not returned, the same logger is not called again.

    Args:
        say: prints a line about a logger that blocks.
        label: returns a logger's name for messages; by default its class name.
        one_thread: all calls of a logger run on the same thread, as loggers need that keep a connection or another
            state of a thread; it ends when the logger, or this object, is collected. False: each call has its own.

    Example:
        >>> calls = BoundedCalls(print)
        >>> calls.call("text", "upper", lambda: "text".upper(), default="")
        'TEXT'
    """

    def __init__(
        self,
        say: Callable[[str], None],
        label: Callable[[object], str] | None = None,
        one_thread: bool = False,
    ) -> None:
        self._say = say
        self._label = label or _class_name
        self._one_thread = one_thread
        # By the logger's identity: the thread of its last call and when that returns, if that was not in time.
        self._blocked: dict[int, tuple[threading.Thread, threading.Event]] = {}
        # By the logger's identity, with a reference that removes the entry when the logger is collected.
        self._threads: dict[int, tuple[_LoggerThread, object]] = {}

    def __getstate__(self) -> dict[str, object]:
        """A copy in another process has no threads."""
        return {**self.__dict__, "_blocked": {}, "_threads": {}}

    def states(self, loggers: Iterable[object]) -> list[dict[str, Any]]:
        """Which of its runs each logger writes: its ``state_dict``, or an empty one."""
        states: list[dict[str, Any]] = []
        for logger in loggers:
            read_state = partial(_call_optional, logger, "state_dict")
            state = self.call(logger, "state_dict", read_state, None)
            states.append(dict(state or {}))
        return states

    def load(self, loggers: Iterable[object], states: Iterable[object]) -> None:
        """Let loggers continue the runs that these `states` belong to."""
        for logger, state in zip(loggers, states, strict=False):
            if not isinstance(state, dict) or not state:
                continue
            # A KeyError: the state of another logger, since the script was changed.
            with suppress(KeyError):
                self.load_state(logger, state)

    def load_state(self, logger: object, state: object) -> None:
        """Let one logger continue the run that ``state`` belongs to."""
        load = partial(_call_optional, logger, "load_state_dict", state)
        self.call(logger, "load_state_dict", load, None)

    def name(self, logger: object) -> str:
        """A logger's name; empty where it has none, or no text."""
        name = self.call(logger, "name", lambda: getattr(logger, "name", ""), "")
        return name if isinstance(name, str) else ""

    def root(self, logger: object) -> object:
        """The directory of all runs of a logger; None where it has none."""
        read_root = partial(_read_root, logger)
        return self.call(logger, "root_dir", read_root, None)

    def log_graph(
        self, logger: object, module: torch.nn.Module, device: torch.device
    ) -> None:
        """Let a logger log the graph of a module, which it may run for that.

        Args:
            logger: the logger.
            module: its modes are as before when this returns.
            device: the device of the run.
        """
        default_device = torch.get_default_device()

        def log_graph() -> None:
            # Both belong to a thread, and the forward of a user creates tensors on them.
            make_current(device)
            with ExitStack() as stack:
                if default_device.type != "cpu":
                    stack.enter_context(default_device)
                _call_optional(logger, "log_graph", module)

        # Two threads in one module would change each other's modes and random numbers: one that runs it has no limit.
        with preserved_modes(module):
            self.call(logger, "log_graph", log_graph, None, may_compute=True)

    def directories(self, loggers: Iterable[object]) -> list[str]:
        """The ``log_dir`` of each logger that has one."""
        directories = []
        for logger in loggers:
            read_directory = partial(_read_directory, logger)
            directory = self.call(logger, "log_dir", read_directory, None)
            if directory:
                directories.append(str(directory))
        return directories

    def call(
        self,
        logger: object,
        name: str,
        function: Callable[[], _Answer],
        default: _Answer,
        may_compute: bool = False,
    ) -> _Answer:
        """Return what ``function`` returns, or ``default`` where it does not return in time.

        Args:
            logger: the logger that is called.
            name: what is called, in the message.
            function: makes the call.
            default: the answer of a logger that blocks.
            may_compute: whether to wait longer, as long as the call uses CPU time.
        """
        lasting_thread = self._lasting_thread(logger)
        if lasting_thread is threading.current_thread():
            # The logger makes it inside another of its calls, which would wait for itself.
            return function()
        if self._is_blocked(logger):
            return default
        seconds_before = 0.0
        if may_compute:
            seconds_before = cpu_seconds(lasting_thread)
        answers: list[_Answer] = []
        errors: list[BaseException] = []
        returned = threading.Event()

        def run() -> None:
            try:
                answers.append(function())
            except BaseException as error:
                errors.append(error)
            finally:
                returned.set()

        label = self._label(logger)
        # The module that runs, for example, is a variable of the context.
        context = contextvars.copy_context()
        thread = self._start(logger, f"{label}.{name}", partial(context.run, run))
        returned.wait(_PATIENCE)
        if may_compute:
            _wait_while_computing(thread, returned, seconds_before)
        if errors:
            raise errors[0]
        if answers:
            return answers[0]
        self._blocked[id(logger)] = (thread, returned)
        with suppress(Exception):  # a closed standard output
            self._say(
                f"{label}: {name} has not returned for {_PATIENCE:.0f} s; the run goes on without it"
            )
        return default

    def _is_blocked(self, logger: object) -> bool:
        """Whether an earlier call of a logger has not returned."""
        if id(logger) not in self._blocked:
            return False
        thread, returned = self._blocked[id(logger)]
        # A fork has no threads of its parent: that call never returns there.
        return thread.is_alive() and not returned.is_set()

    def _lasting_thread(self, logger: object) -> threading.Thread | None:
        """The thread that makes all calls of a logger; None where it has none yet, or each call has its own."""
        if id(logger) not in self._threads:
            return None
        logger_thread, _ = self._threads[id(logger)]
        return logger_thread.thread

    def _start(
        self, logger: object, name: str, call: Callable[[], object]
    ) -> threading.Thread:
        """Start a call of a logger, and return the thread that makes it."""
        if not self._one_thread:
            thread = threading.Thread(target=call, name=name, daemon=True)
            thread.start()
            return thread
        entry = self._threads.get(id(logger))
        # A fork has no threads of its parent.
        if entry is None or not entry[0].thread.is_alive():
            logger_thread = _LoggerThread(name)
            reference = self._reference(logger)
            entry = (logger_thread, reference)
            self._threads[id(logger)] = entry
        logger_thread, _ = entry
        return logger_thread.start(call)

    def _reference(self, logger: object) -> object:
        """Return what removes the thread of a logger when that is collected."""
        threads = self._threads
        key = id(logger)
        try:
            return weakref.ref(logger, lambda _: threads.pop(key, None))
        except TypeError:
            # A class with slots. Its object is kept, so that no other one gets its identity.
            return logger


def _class_name(logger: object) -> str:
    return type(logger).__name__


def _wait_while_computing(
    thread: threading.Thread, returned: threading.Event, seconds_before: float
) -> None:
    last = seconds_before
    seconds = cpu_seconds(thread)
    while not returned.is_set() and seconds - last > WORKING * _PATIENCE:
        last = seconds
        returned.wait(_PATIENCE)
        seconds = cpu_seconds(thread)


def cpu_seconds(thread: threading.Thread | None) -> float:
    """The CPU time that a running thread has used; that of this process where the system does not tell.

    Args:
        thread: a thread of this process; None has used none.

    Example:
        >>> cpu_seconds(threading.current_thread()) > 0
        True
    """
    # A fork has no threads of its parent, and the clock of a thread that has ended raises.
    if thread is None or thread.ident is None or not thread.is_alive():
        return 0.0
    if sys.platform == "linux":
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return time.process_time()


def _call_optional(logger: object, method: str, *arguments: object) -> Any:
    function = getattr(logger, method, None)
    return None if function is None else function(*arguments)


def _read_directory(logger: object) -> object:
    return getattr(logger, "log_dir", None)


def _read_root(logger: object) -> object:
    return getattr(logger, "root_dir", None)
