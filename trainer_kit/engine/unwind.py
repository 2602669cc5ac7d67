"""The end of a verb, whatever happened: exceptions arrive unchanged, every cleanup runs."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, final

from trainer_kit.core.errors import add_note

__all__ = ["Unwinding"]


@final
class Unwinding:
    """A context that tells everybody about an exception, then cleans up.

    What goes wrong meanwhile is attached to the user's exception as a note, never raised instead of it; without one,
    the first problem of the cleanup is raised, with the others as its notes.

    Attributes:
        failed: is called with the exception.
        cleanup: are called one after the other, also after an exception; each is given the exception or None.
    """

    def __init__(self) -> None:
        self.failed: list[Callable[[BaseException], Any]] = []
        self.cleanup: list[Callable[[BaseException | None], Any]] = []

    def __enter__(self) -> Unwinding:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        first = error
        calls: list[Callable[[], Any]] = []
        if error is not None:
            calls += [_with(call, error) for call in self.failed]
        calls += [_with(call, error) for call in self.cleanup]
        for call in calls:
            try:
                call()
            except BaseException as problem:
                if first is None:
                    first = problem
                elif problem is not first:
                    add_note(first, f"while ending: {type(problem).__name__}: {problem}")
        if error is None and first is not None:
            raise first


def _with(call: Callable[[Any], Any], error: BaseException | None) -> Callable[[], Any]:
    return lambda: call(error)
