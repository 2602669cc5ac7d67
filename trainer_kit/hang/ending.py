"""End a run that hangs: all ranks write their stacks and reports first, then the rank that hangs exits first."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, final

from trainer_kit.hang.stacks import end_process, read_stacks, start_time, write_stacks
from trainer_kit.hang.verdict import Report, ranks_named
from trainer_kit.launch.bootstrap import write_report

__all__ = ["Verdict", "end_rank", "print_line"]

_KIND: Final = "trainer_kit.core.errors.RankError"
_MEETING: Final = 10.0  # seconds for all ranks to write, before the first one exits
_NOTING: Final = 5.0  # seconds for the run's report to record the end
_BEFORE_WAITING_RANKS: Final = 0.7  # seconds by which the rank that hangs exits first: launchers poll
_FIX: Final = (
    "look at the stacks; if nothing hangs, give it more time with hang_timeout= (False switches the watchdog off)"
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
    me: Report, size: int, verdict: Verdict, silent: Collection[Report], store: Any, note: Callable[[str, str], Any]
) -> NoReturn:
    """Write this rank's stacks, report the failure to the launcher, and exit when all ranks have done so.

    Args:
        me: the report of this rank.
        size: the number of ranks.
        verdict: the decision of one of the ranks.
        silent: the reports on ranks that do not answer; only for the rank that decided.
        store: the store for a barrier of the ranks; None if it does not answer.
        note: called with the text and the directory of the stacks, on the rank that decided; it has 5 seconds.
    """
    directory = Path(verdict.directory) if verdict.directory else None
    if directory is not None:
        with suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
        write_stacks(directory / f"rank-{me.rank}.txt")
    hangs = me.rank in verdict.culprits
    waited = not hangs and verdict.culprits
    _write_report(me, f"waited for {ranks_named(verdict.culprits)}" if waited else verdict.problem, verdict, not hangs)
    here = [one for one in silent if _is_here(one, me)]  # these can neither write nor exit by themselves
    for one in here:
        if directory is not None:
            with suppress(OSError):
                (directory / f"rank-{one.rank}.txt").write_text(read_stacks(one.pid, one.stacks))
        one.at = me.at  # its own last report may be older
        _write_report(one, verdict.problem, verdict, False)
    if verdict.by == me.rank:  # the main thread may hold locks that it needs
        noting = threading.Thread(target=note, args=(verdict.text, verdict.directory), daemon=True)
        noting.start()
        noting.join(_NOTING)
    if store is not None:
        with suppress(RuntimeError):  # the store may end with its process
            _meet(store, size - len({*verdict.silent, *verdict.ended}))
    for one in here:
        end_process(one.pid, one.started)
    if not hangs and size > 1:
        time.sleep(_BEFORE_WAITING_RANKS)
    flushing = threading.Thread(target=_flush, daemon=True)  # the main thread may hold a stream's lock
    flushing.start()
    flushing.join(0.5)
    os._exit(verdict.code)


def _meet(store: Any, count: int) -> None:
    """Wait for the other ranks: as soon as one exits, the collectives of waiting ranks raise."""
    until = time.monotonic() + _MEETING
    arrived = store.add("arrived", 1)
    while arrived < count and time.monotonic() < until:
        time.sleep(0.05)
        arrived = store.add("arrived", 0)


def _is_here(one: Report, me: Report) -> bool:
    return (one.host, one.boot) == (me.host, me.boot) and start_time(one.pid) == one.started


def _write_report(one: Report, text: str, verdict: Verdict, waited: bool) -> None:
    if one.error_file:
        # torchrun prints only the stack; our agent also prints the message before it.
        end = [] if "TRAINER_KIT_AGENT_PID" in os.environ else [verdict.problem]
        stack = "\n".join([*verdict.details, f"fix: {_FIX}", *end])
        delay = 2 if waited else 0
        write_report(one.error_file, one.rank, _KIND, text, stack, one.at, verdict.code, one.pid, delay)


def _flush() -> None:
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()


def print_line(text: str) -> None:
    """Write a line to standard error, even while the main thread holds the stream's lock."""
    with suppress(OSError):
        os.write(2, f"{text}\n".encode())
