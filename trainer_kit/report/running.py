"""`RunReport`: records the events of a run, and writes its ``report.html`` while it runs and when it ends."""

from __future__ import annotations

import os
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, final

from trainer_kit.checkpoint.read import read_info, step_of
from trainer_kit.core.location import is_url
from trainer_kit.launch.program import arguments, script
from trainer_kit.report.collect import JOURNAL, RunDirectory
from trainer_kit.report.environment import describe_environment
from trainer_kit.report.events import append_event, this_process
from trainer_kit.report.page import REPORT, write_report

__all__ = ["RunReport"]

_FIRST = 30.0  # seconds until the first page of a fit
_EVERY: Final = 120.0  # and between two
_SHARE: Final = 0.02  # of the time, at most, goes into pages
_MOST_LINES: Final = 1000  # of warnings and notes of one fit
_LONGEST: Final = 20_000  # characters of a traceback


@final
class RunReport:
    """Writes ``events.jsonl`` and ``report.html`` into the directory of a run.

    The page is written at the end, also by an exception or a hang; of a fit every two minutes too, by a thread that
    pauses between a thousand lines of the journal. No error of it ends a run: it is printed once.

    Args:
        directory: of the run.
        step: returns the completed steps.
        say: prints a line.
    """

    def __init__(self, directory: Path, step: Callable[[], int], say: Callable[[str], Any]) -> None:
        self._run = RunDirectory(directory)
        self._step, self._say = step, say
        self._stage = "fit"
        self._lines = 0
        self._problem = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._outer_show: Any = None

    @property
    def directory(self) -> Path:
        """Of the run."""
        return self._run.directory

    def begin(self, stage: str, facts: Mapping[str, Any], size: int, step: int | None = None) -> None:
        """Record the start.

        Args:
            stage: fit, validate or test.
            facts: title and, of a fit, the run's key, configuration and what it explains.
            size: number of processes.
            step: completed steps; None: as counted.
        """
        self._stage = stage
        try:
            found = {**facts, **(_facts(self.directory, size) if stage == "fit" else {})}
            self._append("start", step, stage=stage, process=this_process(), **found)
        except Exception as error:
            self._failed(error)
        # Python documents that showwarning may be replaced; the one before still shows each warning.
        self._outer_show, warnings.showwarning = warnings.showwarning, self._show_warning
        if stage == "fit":
            self._thread = threading.Thread(target=self._write_now_and_then, name="trainer_kit report", daemon=True)
            self._thread.start()

    def note(self, kind: str, text: str) -> None:
        """Record a line about the run.

        Args:
            kind: note, warning, or checkpoint, whose text is a path.
            text: the line.
        """
        self._lines += 1
        if self._lines > _MOST_LINES:
            return
        try:
            saved = kind == "checkpoint" and not is_url(text)
            self._append(kind, (step_of(read_info(text)) or None) if saved else None, text=text)
        except Exception as error:
            self._failed(error)

    def end(self, status: str, error: BaseException | None = None, seconds: float = 60.0) -> None:
        """Record the end, and write the last page.

        Args:
            status: finished, interrupted or failed.
            error: that ended the run.
            seconds: in which the journal must be read.
        """
        if warnings.showwarning == self._show_warning:
            warnings.showwarning = self._outer_show
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
        self._close(self._run, status, None if error is None else _described(error), seconds)
        if self._problem:
            self._say(f"{self.directory / REPORT} could not be written: {self._problem}")

    def end_by_hang(self, text: str, stacks: str) -> None:
        """Record that the watchdog ends the run, and write the last page; called by its thread, on any rank.

        Args:
            text: what the watchdog prints.
            stacks: their directory, or "".
        """
        found = {"headline": text.partition("\n")[0], "text": text}
        if stacks:
            found["stacks"] = os.path.relpath(stacks, self.directory)
        self._close(RunDirectory(self.directory), "hung", found, 4.0)

    def _close(self, run: RunDirectory, status: str, exception: dict[str, str] | None, seconds: float) -> None:
        try:
            self._append("end", stage=self._stage, status=status, exception=exception)
            run.read(pause=_limit(seconds))
            write_report(run.directory / REPORT, [run])
        except Exception as problem:
            self._failed(problem)

    def _append(self, kind: str, step: int | None = None, **facts: Any) -> None:
        append_event(self.directory, kind, self._step() if step is None else step, **facts)

    def _show_warning(self, message: Any, category: Any, *rest: Any, **options: Any) -> None:
        self.note("warning", f"{category.__name__}: {message}")
        self._outer_show(message, category, *rest, **options)

    def _write_now_and_then(self) -> None:
        """The thread: training never waits for it, and it takes at most a small share of the interpreter."""
        run, wait = self._run, _FIRST
        while not self._stop.wait(wait):
            began = time.thread_time()
            try:
                run.read(pause=lambda: self._stop.wait(0.05))
                write_report(run.directory / REPORT, [run])
            except Exception as error:
                self._failed(error)
            wait = max(_EVERY, (time.thread_time() - began) / _SHARE)

    def _failed(self, error: Exception) -> None:
        self._problem = self._problem or f"{type(error).__name__}: {error}"


def _facts(directory: Path, size: int) -> dict[str, Any]:
    journal = directory / JOURNAL
    return {
        "journal": journal.stat().st_size if journal.exists() else 0,
        "place": f"{size} process{'es' * (size > 1)} on {socket.gethostname()}",
        "environment": [
            ["script", script() or "typed in"],
            ["arguments", " ".join(arguments())],
            *map(list, describe_environment()),
        ],
    }


def _limit(seconds: float) -> Callable[[], None]:
    """A process that was asked to leave does not stay for a long journal."""
    deadline = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the journal is not read within {seconds:g} s: `trainer-kit report` reads all of it")

    return check


def _described(error: BaseException) -> dict[str, str]:
    headline = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return {"headline": headline, "text": text[-_LONGEST:]}
