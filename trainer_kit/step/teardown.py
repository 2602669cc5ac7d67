"""The end of a verb, whatever happened: exceptions arrive unchanged, every cleanup runs."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, final

from trainer_kit.core.errors import add_note

__all__ = ["Teardown"]


@final
class Teardown:
    """A context that tells everybody about an exception, then cleans up.

    What goes wrong meanwhile is attached to the user's exception as a note, never raised instead of it. Without one,
    the first problem of the cleanup is the exception: everybody is told, the rest of the cleanup goes on.

    Attributes:
        failed: is called with the exception.
        cleanup: are called one after the other, also after an exception; each is given the exception or None.
    """

    def __init__(self) -> None:
        self.failed: list[Callable[[BaseException], Any]] = []
        self.cleanup: list[Callable[[BaseException | None], Any]] = []
        self._first: BaseException | None = None

    def __enter__(self) -> Teardown:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._first = error
        if error is not None:
            self._tell(error)
        for clean in self.cleanup:
            told = self._first is not None
            self._attempt(clean, self._first)
            if not told and self._first is not None:
                self._tell(self._first)
        # Its traceback holds every frame of the verb, this object too: kept, all of them stay until gc comes by.
        first, self._first = self._first, None
        if error is None and first is not None:
            try:
                raise first
            finally:
                del first

    def _tell(self, error: BaseException) -> None:
        for hear in self.failed:
            self._attempt(hear, error)

    def _attempt(self, call: Callable[[Any], Any], error: BaseException | None) -> None:
        try:
            call(error)
        except BaseException as problem:
            if self._first is None:
                self._first = problem
            elif problem is not self._first:
                add_note(self._first, f"while ending: {type(problem).__name__}: {problem}")
