"""`RunReport`: record the events of a run, and write its ``report.html`` during the run and at its end."""

from __future__ import annotations

import os
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TextIO, final

from trainer_kit.checkpoint.read import read_info, step_of
from trainer_kit.core.location import is_url
from trainer_kit.core.types import Function, JsonObject
from trainer_kit.launch.bootstrap import position_of_rank, qualified_name
from trainer_kit.launch.failure import describe, find_cause
from trainer_kit.launch.program import arguments, script
from trainer_kit.report.collect import JOURNAL, RunDirectory
from trainer_kit.report.environment import describe_environment
from trainer_kit.report.events import append_event, this_process
from trainer_kit.report.page import REPORT, write_report
from trainer_kit.report.pulse import Pulse, record_account, take_pulse
from trainer_kit.step.time_account import TimeAccount

__all__ = ["RunReport"]

_FIRST = 30.0
"""Seconds until the first page of a fit."""
_INTERVAL: Final = 120.0
"""Seconds between two pages."""
_TIME_SHARE: Final = 0.02
"""The largest share of time for writing pages."""
_MAX_LINES: Final = 1000
"""The most warnings and notes of one fit."""
_ACCOUNT: Final = "the time account"
"""Name of the account in a message."""
_MAX_TRACEBACK: Final = 20_000
"""The most characters of a traceback."""


@final
class RunReport:
    """Writes ``events.jsonl`` and ``report.html`` into the directory of a run.

    The page is written at the end, also after an exception or a hang; during a fit a thread writes it every two
    minutes, and pauses after every thousand lines of the journal. An error of the report is printed once, and does not
    end the run.

    Args:
        directory: the run's directory.
        step: returns the number of completed steps.
        say: prints a line.
    """

    def __init__(
        self, directory: Path, step: Callable[[], int], say: Callable[[str], object]
    ) -> None:
        self._run = RunDirectory(directory)
        self._step = step
        self._say = say
        self._stage = "fit"
        self._lines = 0
        self._problem = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._pulse: Pulse | None = None
        # the function that showed warnings before `begin`
        self._outer_show: Function = warnings.showwarning

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return self._run.directory

    def begin(
        self,
        stage: str,
        facts: Mapping[str, object],
        size: int,
        step: int | None = None,
    ) -> None:
        """Record the start of a stage.

        Args:
            stage: fit, validate or test.
            facts: the title and, for a fit, the run's key, configuration and ``explain`` text.
            size: the number of processes.
            step: the number of completed steps; None: the current count.
        """
        self._stage = stage
        # Everything here may fail on a full disk, and no failure of the report may end the run.
        try:
            recorded = dict(facts)
            if stage == "fit":
                self._record_last_account()
                recorded.update(_process_facts(self.directory, size))
            self._append("start", step, stage=stage, process=this_process(), **recorded)
        except Exception as error:
            self._failed(error)
        # Python documents that showwarning may be replaced; the previous function still shows each warning.
        self._outer_show = warnings.showwarning
        warnings.showwarning = self._show_warning
        # A validation or test ends soon, and its page is written then.
        if stage == "fit":
            self._thread = threading.Thread(
                target=self._write_now_and_then, name="trainer_kit report", daemon=True
            )
            self._thread.start()

    def _record_last_account(self) -> None:
        """Record what the last process could not record at its end, because it was killed."""
        record = take_pulse(self.directory)
        if record is None:
            return
        try:
            record_account(self.directory, record)
        except Exception as error:
            self._failed(error, _ACCOUNT)

    def keep_account(self, account: TimeAccount, begun: float) -> None:
        """Continue the time account of the run; it is recorded from here until the end.

        Args:
            account: of this start of the fit.
            begun: when this start began, in seconds since 1970.
        """
        try:
            run = RunDirectory(self.directory)
            run.read_events()
            earlier = run.goodputs()[-1]
            earlier_seconds: dict[str, float] = {}
            farthest = 0
            if earlier is not None:
                earlier_seconds = earlier.seconds
                earlier_seconds["down"] += max(0.0, begun - earlier.until)
                begun = max(begun, earlier.until)
                farthest = earlier.farthest
            account.continue_run(time.time() - begun, farthest, earlier_seconds)
            self._pulse = Pulse(self.directory, account, begun)
        except Exception as error:
            self._failed(error, _ACCOUNT)

    def note(self, kind: str, text: str) -> None:
        """Record a line about the run.

        Args:
            kind: note, warning, or checkpoint with a path as its text.
            text: the line.
        """
        self._lines += 1
        # A warning in each step would fill the disk, and a page of millions of lines opens in no browser.
        if self._lines > _MAX_LINES:
            return
        try:
            step = None
            # A checkpoint is announced when it is durable, some steps after the one whose weights it has.
            if kind == "checkpoint" and not is_url(text):
                step = step_of(read_info(text)) or None
            self._append(kind, step, text=text)
        except Exception as error:
            self._failed(error)

    def end(
        self, status: str, error: BaseException | None = None, seconds: float = 60.0
    ) -> None:
        """Record the end of a stage, and write the last page.

        Args:
            status: finished, interrupted, failed, or exited: a script ended without ``end_training``, and without an
                exception that is known.
            error: the error that ended the run.
            seconds: the time limit for reading the journal.
        """
        # Another library may have replaced it since: its function calls ours, and stays.
        if warnings.showwarning == self._show_warning:
            warnings.showwarning = self._outer_show
        # Before the last page: two threads must not read the run's files into one `RunDirectory` at a time.
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
        exception = None
        if error is not None:
            exception = self._describe(error)
        self._end_account()
        self._close(self._run, status, exception, seconds)
        if self._problem:
            self._say(self._problem)

    def _end_account(self) -> None:
        if self._pulse is None:
            return
        try:
            record_account(self.directory, self._pulse.stop())
            if self._pulse.problem is not None:
                raise self._pulse.problem
        except Exception as problem:
            self._failed(problem, _ACCOUNT)

    def end_by_hang(self, text: str, stacks: str) -> None:
        """Record that the watchdog ends the run, and write the last page; its thread calls this, on any rank.

        Args:
            text: the text that the watchdog prints.
            stacks: the directory of the stacks, or "".
        """
        exception = {"headline": text.partition("\n")[0], "text": text}
        if stacks:
            exception["stacks"] = os.path.relpath(stacks, self.directory)
        # With its own `RunDirectory`: the thread of this report may be reading. The watchdog kills the process soon.
        self._close(RunDirectory(self.directory), "hung", exception, 4.0)

    def _close(
        self,
        run: RunDirectory,
        status: str,
        exception: dict[str, str] | None,
        seconds: float,
    ) -> None:
        try:
            self._append("end", stage=self._stage, status=status, exception=exception)
            run.read(pause=_limit(seconds))
            write_report(run.directory / REPORT, [run])
        except Exception as problem:
            self._failed(problem)

    def _describe(self, error: BaseException) -> dict[str, str]:
        """Describe what ended the run: the failure of another rank, if this one only lost its connection to it."""
        description = _describe_error(error)
        # As the exception says it; a custom loop may count the steps that it logs in another way.
        position = position_of_rank() or f"step {self._step()}"
        cause = find_cause(error, qualified_name(error), position)
        if cause is None:
            return description
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        headline = describe([cause], world_size).splitlines()[0]
        text = f"{cause.traceback or headline}\n\nafter it, on this rank:\n{description['text']}"
        return {"headline": headline, "text": text[-_MAX_TRACEBACK:]}

    def _append(self, kind: str, step: int | None = None, **facts: object) -> None:
        if step is None:
            step = self._step()
        append_event(self.directory, kind, step, **facts)

    def _show_warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        self.note("warning", f"{category.__name__}: {message}")
        self._outer_show(message, category, filename, lineno, file, line)

    def _write_now_and_then(self) -> None:
        """Write pages in the thread: training never waits for it, and it uses a small share of interpreter time."""
        run = self._run
        wait = _FIRST
        while not self._stop.wait(wait):
            start = time.thread_time()
            try:
                run.read(pause=lambda: self._stop.wait(0.05))
                write_report(run.directory / REPORT, [run])
            except Exception as error:
                self._failed(error)
            # CPU time of this thread, not wall time: only that is taken from the training thread.
            seconds = time.thread_time() - start
            wait = max(_INTERVAL, seconds / _TIME_SHARE)

    def _failed(self, error: Exception, name: str = "") -> None:
        """Keep what could not be written, and why; without a name it is the page."""
        name = name or str(self.directory / REPORT)
        text = f"{name} could not be written: {type(error).__name__}: {error}"
        # The first one: later ones often follow from it.
        self._problem = self._problem or text


def _process_facts(directory: Path, size: int) -> JsonObject:
    # The length of the journal divides its lines: what follows was logged after this start.
    journal = directory / JOURNAL
    length = 0
    if journal.exists():
        length = journal.stat().st_size
    environment = [
        ["script", script() or "typed in"],
        ["arguments", " ".join(arguments())],
    ]
    environment += map(list, describe_environment())
    return {
        "journal": length,
        "place": f"{size} process{'es' * (size > 1)} on {socket.gethostname()}",
        "environment": environment,
    }


def _limit(seconds: float) -> Callable[[], None]:
    """Return a function that raises TimeoutError after ``seconds``, so that a long journal does not delay the exit."""
    deadline = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"the journal is not read within {seconds:g} s: `trainer-kit report` reads all of it"
            )

    return check


def _describe_error(error: BaseException) -> dict[str, str]:
    # The end of the text is kept: the exception itself stands in its last lines.
    headline = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return {"headline": headline, "text": text[-_MAX_TRACEBACK:]}
