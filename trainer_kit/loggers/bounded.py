"""Calls of loggers whose answer the training thread needs, each with a limit of time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar, final

__all__ = ["BoundedCalls"]

_PATIENCE: Final = 10.0
"""The most seconds to wait for one call."""

_Answer = TypeVar("_Answer")


@final
class BoundedCalls:
    """Asks loggers which run they write, and lets them continue one: a logger that blocks is left out after 10 seconds.

    Each call runs on a thread of its own, and its error is raised in the caller. While a call has not returned, the
    same logger is not called again.

    Args:
        say: prints a line about a logger that blocks.

    Example:
        >>> calls = BoundedCalls(print)
        >>> calls.call("text", "upper", lambda: "text".upper(), default="")
        'TEXT'
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        # The threads of calls that have not returned, by the logger's identity.
        self._blocked: dict[int, threading.Thread] = {}

    def __getstate__(self) -> dict[str, object]:
        """A copy in another process has no threads."""
        return {**self.__dict__, "_blocked": {}}

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
    ) -> _Answer:
        """Return what ``function`` returns, or ``default`` where it does not return in time.

        Args:
            logger: the logger that is called.
            name: what is called, in the message.
            function: makes the call.
            default: the answer of a logger that blocks.
        """
        blocked = self._blocked.get(id(logger))
        if blocked is not None and blocked.is_alive():
            return default
        answers: list[_Answer] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                answers.append(function())
            except BaseException as error:
                errors.append(error)

        label = type(logger).__name__
        thread = threading.Thread(target=run, name=f"{label}.{name}", daemon=True)
        thread.start()
        thread.join(_PATIENCE)
        if errors:
            raise errors[0]
        if answers:
            return answers[0]
        self._blocked[id(logger)] = thread
        with suppress(Exception):  # a closed standard output
            self._say(
                f"{label}: {name} has not returned for {_PATIENCE:.0f} s; the run goes on without it"
            )
        return default


def _call_optional(logger: object, method: str, *arguments: object) -> Any:
    function = getattr(logger, method, None)
    return None if function is None else function(*arguments)


def _read_directory(logger: object) -> object:
    return getattr(logger, "log_dir", None)
