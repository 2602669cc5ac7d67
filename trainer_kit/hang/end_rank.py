"""The verdict on a run that hangs, and how each rank ends by it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn, final

from trainer_kit.hang.stacks import end_process, read_stacks, start_time, write_stacks
from trainer_kit.hang.torch_private import Store
from trainer_kit.hang.verdict import Report, ranks_named
from trainer_kit.launch.bootstrap import write_report

__all__ = ["Verdict", "end_rank", "print_line"]

_KIND: Final = "trainer_kit.core.errors.RankError"
_BARRIER_TIMEOUT: Final = 10.0
"""Seconds for all ranks to write, before the first one exits."""
_NOTE_TIMEOUT: Final = 5.0
"""Seconds for the run's report to record the end."""
_HEAD_START: Final = 0.7
"""Seconds by which the rank that hangs exits first: launchers poll."""
_WAIT_OF_OTHERS: Final = 2
"""Seconds by which reports of waiting ranks follow that of the rank that hangs."""
_FIX: Final = (
    "look at the stacks; if nothing hangs, "
    "give it more time with hang_timeout= (False turns the watchdog off)"
)


@final
@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The decision of one rank, which all ranks follow.

    Attributes:
        problem: the headline.
        details: lines below it.
        culprits: the ranks that hang.
        silent: the ranks that do not answer.
        ended: the ranks that have left the loop.
        code: the exit code of all ranks.
        directory: the directory for stacks, "" for none.
        by: the rank that decided.
    """

    problem: str
    details: list[str]
    culprits: list[int]
    silent: list[int]
    ended: list[int]
    code: int
    directory: str
    by: int

    @property
    def text(self) -> str:
        """Return the message to the user."""
        lines = "\n  ".join([self.problem, *self.details])
        return f"{lines}\n  fix: {_FIX}\nexiting {self.code}"


def end_rank(
    report: Report,
    size: int,
    verdict: Verdict,
    silent: Collection[Report],
    store: Store | None,
    note: Callable[[str, str], object],
) -> NoReturn:
    """Write this rank's stacks, report the failure to the launcher, and exit when all ranks have done so.

    Args:
        report: the report of this rank.
        size: the number of ranks.
        verdict: the decision of one of the ranks.
        silent: the reports on ranks that do not answer; only for the rank that decided.
        store: the store for a barrier of the ranks; None if it does not answer.
        note: called with the text and the directory of the stacks, on the rank that decided; it has 5 seconds.
    """
    directory: Path | None = None
    if verdict.directory:
        directory = Path(verdict.directory)
        # Without a directory, as on a full disk, the run still has to end.
        with suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
        write_stacks(directory / f"rank-{report.rank}.txt")
    hangs = report.rank in verdict.culprits
    headline = verdict.problem
    if verdict.culprits and not hangs:
        headline = f"waited for {ranks_named(verdict.culprits)}"
    _report_failure(report, headline, verdict, waited=not hangs)
    # Stopped or locked ranks can neither write nor exit by themselves. A process on
    # another machine is out of reach.
    local_silent = [other for other in silent if _is_local(other, report)]
    for other in local_silent:
        if directory is not None:
            stacks = read_stacks(other.pid, other.stacks)
            with suppress(OSError):
                (directory / f"rank-{other.rank}.txt").write_text(stacks)
        # The last report of that rank may be older than its hang.
        other.set_progress(report.step, report.progress)
        _report_failure(other, verdict.problem, verdict, waited=False)
    if verdict.by == report.rank:
        # In a thread: the main thread may hold locks that the report needs.
        _run_within(_NOTE_TIMEOUT, lambda: note(verdict.text, verdict.directory))
    # All ranks write before the first one exits: then the launcher ends the others, also in the middle of a file.
    if store is not None:
        # The store may end with its process.
        with suppress(RuntimeError):
            _wait_for_ranks(store, size - len({*verdict.silent, *verdict.ended}))
    for other in local_silent:
        end_process(other.pid, other.started)
    # The launcher reports the first rank that exits: it shall be the one that hangs.
    if not hangs and size > 1:
        time.sleep(_HEAD_START)
    # In a thread: the main thread may hold a stream's lock.
    _run_within(0.5, _flush)
    # Not sys.exit: this is not the main thread, which hangs, and no handler may wait for a collective now.
    os._exit(verdict.code)


def _run_within(seconds: float, call: Callable[[], object]) -> None:
    """Run ``call`` in a thread, and wait for it for ``seconds`` at most."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)


def _wait_for_ranks(store: Store, count: int) -> None:
    """Wait for the other ranks: as soon as one exits, the collectives of waiting ranks raise."""
    deadline = time.monotonic() + _BARRIER_TIMEOUT
    arrived = store.add("arrived", 1)
    while arrived < count and time.monotonic() < deadline:
        time.sleep(0.05)
        arrived = store.add("arrived", 0)


def _is_local(report: Report, local: Report) -> bool:
    """Whether the process of a report runs on this machine."""
    if (report.host, report.boot) != (local.host, local.boot):
        return False
    return start_time(report.pid) == report.started


def _report_failure(
    report: Report, headline: str, verdict: Verdict, waited: bool
) -> None:
    """Write what has happened into the file that the launcher of a rank reads."""
    if not report.error_file:
        return
    stack = [*verdict.details, f"fix: {_FIX}"]
    if "TRAINER_KIT_AGENT_PID" not in os.environ:
        # torchrun prints only the stack; our agent also prints the message before it.
        stack.append(verdict.problem)
    seconds_later = 0
    if waited:
        seconds_later = _WAIT_OF_OTHERS
    write_report(
        report.error_file,
        report.rank,
        _KIND,
        headline,
        "\n".join(stack),
        report.progress,
        verdict.code,
        report.pid,
        seconds_later,
    )


def _flush() -> None:
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()


def print_line(text: str) -> None:
    """Write a line to standard error, even while the main thread holds the stream's lock."""
    with suppress(OSError):
        os.write(2, f"{text}\n".encode())
