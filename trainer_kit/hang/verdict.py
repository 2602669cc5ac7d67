"""Decide from the reports of all ranks which rank hangs, and write the message about it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, final

__all__ = ["Finding", "Report", "find_culprits", "name_silent", "ranks_named"]

_SHOWN: Final = 12  # stack lines in a message


@final
@dataclass(kw_only=True)
class Report:
    """The report of a rank about itself.

    Attributes:
        rank: the rank.
        host: its machine.
        pid: its process id.
        started: the start time of the process, which identifies it together with ``boot`` and ``pid``; 0 if unknown.
        boot: the id of its running kernel.
        error_file: the file in which its launcher expects its error.
        stacks: the local file to which it writes its stacks on a signal; "" for none.
        step: its progress.
        at: its progress in words: ``"step 25"``.
        phase: its current phase.
        place: the line of user code.
        call: the current exchange, "" for none.
        patient: whether this phase may take long.
        seconds: the seconds since its last progress.
        left: the seconds until it counts as hanging.
        ended: whether it has left the loop.
        stack: the formatted stack of the main thread.
        groups: the last collectives by process group; each with ``"ranks"``, and ``"calls"``: number, name, amount.
        last: the group and number of the last collective.
        reason: for what its data loader waits, or why it does not answer; "" if unknown.
    """

    rank: int
    host: str = ""
    pid: int = 0
    started: int = 0
    boot: str = ""
    error_file: str = ""
    stacks: str = ""
    step: int = 0
    at: str = "its start"
    phase: str = ""
    place: str = ""
    call: str = ""
    patient: bool = False
    seconds: float = 0.0
    left: float = 0.0
    ended: bool = False
    stack: list[str] = field(default_factory=list)
    groups: dict[str, Any] = field(default_factory=dict)
    last: list[Any] | None = None
    reason: str = ""

    def dumped(self) -> str:
        """Return the report as text for the other ranks."""
        return json.dumps(asdict(self))

    @property
    def who(self) -> str:
        """Return rank, host and process as text."""
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    @property
    def issued(self) -> tuple[str, str] | None:
        """The name and the amount of data of the last collective."""
        if self.last is None:
            return None
        found = next(
            (
                one
                for one in self.groups[self.last[0]]["calls"]
                if one[0] == self.last[1]
            ),
            None,
        )
        return None if found is None else (found[1], found[2])

    @property
    def call_named(self) -> str:
        """Return the last collective with its size and number, or the current exchange."""
        if self.issued is None or self.last is None:
            return self.call or "a collective"
        gradients = "backward" in self.call
        bucket = f" (a bucket of gradients, {self.issued[1]})" if gradients else ""
        return f"{self.issued[0]} #{self.last[1]}{bucket}"


@final
@dataclass(frozen=True)
class Finding:
    """The result of a search for ranks that hang.

    Attributes:
        culprits: the ranks that hang; empty if all ranks are in the same exchange.
        problem: a sentence about them.
        details: further lines: the stack of the first culprit.
        certain: whether waiting longer cannot help.
    """

    culprits: tuple[int, ...]
    problem: str
    details: tuple[str, ...]
    certain: bool


def ranks_named(ranks: list[int]) -> str:
    """Return a list of ranks as text.

    Example:
        >>> ranks_named([0, 2]), ranks_named([1])
        ('ranks 0, 2', 'rank 1')
    """
    listed = ", ".join(map(str, ranks[:8])) + (
        f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    )
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


def find_culprits(
    answers: Mapping[int, Report], last_words: Mapping[int, Report], size: int
) -> Finding:
    """Find the ranks that hang; a rank that only waits for another is never one of them.

    Args:
        answers: the reports of the ranks that answer.
        last_words: the last reports of the other ranks, if there are any.
        size: the number of ranks.
    """
    silent = [rank for rank in range(size) if rank not in answers]
    if silent:
        return name_silent(silent, answers, last_words)
    ended = [rank for rank, one in answers.items() if one.ended]
    if ended and len(ended) < size:
        inside = [one for one in answers.values() if not one.ended]
        where = f"at {inside[0].at} in {inside[0].call_named}"
        problem = (
            f"{ranks_named(ended)} left the training loop, but {_wait(inside)} {where}"
        )
        return Finding(tuple(ended), problem, (), certain=False)
    if (found := _mismatch(answers)) is not None:
        return found
    blocked = {rank: _waits_for(rank, answers) for rank in answers}
    awaited = {other for others in blocked.values() for other in others}
    behind = sorted(rank for rank in awaited if not blocked[rank])
    if not behind and awaited:  # each of them waits for another
        lines = tuple(
            f"{one.who} is in {one.call_named}, {one.place}" for one in answers.values()
        )
        return Finding(
            tuple(sorted(awaited)),
            "ranks wait for each other in different collectives",
            lines,
            True,
        )
    busy = behind or [rank for rank, one in answers.items() if not one.call]
    if not busy or len(busy) == size > 1:
        first = max(answers.values(), key=lambda one: one.seconds)
        if busy:
            return Finding(
                (first.rank,),
                f"{first.who} hangs {_doing(first)}",
                _stack(first),
                False,
            )
        together = f"all ranks wait in {first.call_named} at {first.at}: a connection between them is dead"
        return Finding((), together, _stack(first), False)
    first = answers[busy[0]]
    waiting = [one for rank, one in answers.items() if rank not in busy]
    entered = f" and has not entered {waiting[0].call_named}; " if waiting else ""
    problem = f"{first.who} hangs {_doing(first)}{entered}{_wait(waiting)}"
    if len(busy) > 1:
        problem += f"; {ranks_named(busy[1:])} likewise"
    return Finding(tuple(busy), problem, _stack(first), False)


def name_silent(
    silent: list[int], answers: Mapping[int, Report], last_words: Mapping[int, Report]
) -> Finding:
    """Return a finding about ranks that do not answer; the arguments are those of `find_culprits`."""
    first = last_words.get(silent[0], Report(rank=silent[0]))
    host = f" ({first.host}, pid {first.pid})" if first.pid else ""
    known = f": {first.reason}" if first.reason else ""
    last = (
        f"; last seen at {first.at} in {first.phase}, {first.place}"
        if first.phase
        else ""
    )
    waiting = [one for one in answers.values() if one.call]
    entered = f" and has not entered {waiting[0].call_named}; " if waiting else "; "
    problem = (
        f"rank {silent[0]}{host} does not answer{known}{entered}{_wait(waiting)}".removesuffix(
            "; "
        )
        + last
    )
    if len(silent) > 1:
        problem += f"; neither do {ranks_named(silent[1:])}"
    return Finding(tuple(silent), problem, _stack(first), False)


def _doing(one: Report) -> str:
    reason = f": {one.reason}" if one.reason else ""
    return f"at {one.at} in {one.phase}, {one.place}{reason}"


def _wait(waiting: list[Report]) -> str:
    if not waiting:
        return ""
    verb = "wait" if len(waiting) > 1 else "waits"
    return f"{ranks_named([one.rank for one in waiting])} {verb} {max(one.seconds for one in waiting):.0f} s"


def _stack(one: Report) -> tuple[str, ...]:
    """Return a rank's innermost frames; faulthandler writes these in reverse order, after other threads."""
    lines = [line for text in one.stack for line in text.rstrip().splitlines()]
    starts = [i for i, line in enumerate(lines) if "most recent call first" in line]
    return tuple(lines[starts[-1] :][: _SHOWN + 1] if starts else lines[-_SHOWN:])


def _waits_for(rank: int, answers: Mapping[int, Report]) -> list[int]:
    """Return the ranks that have not issued the last collective of ``rank`` yet."""
    mine = answers[rank]
    if mine.last is None:
        return []
    group, number = mine.last
    return [
        other
        for other in mine.groups[group]["ranks"]
        if other in answers
        and other != rank
        and _reached(answers[other], group) < number
    ]


def _reached(one: Report, group: str) -> int:
    calls = one.groups.get(group, {}).get("calls", [])
    return int(calls[-1][0]) if calls else 0


def _mismatch(answers: Mapping[int, Report]) -> Finding | None:
    """Find ranks whose collectives of one group differ at the same number; the first such number is used."""
    for rank, mine in answers.items():
        if mine.last is None or mine.issued is None:
            continue
        group, number = mine.last
        for other in mine.groups[group]["ranks"]:
            theirs = answers.get(other)
            if theirs is None or other == rank or not theirs.groups.get(group):
                continue
            found = next(
                (call for call in theirs.groups[group]["calls"] if call[0] == number),
                None,
            )
            if found is not None and not _alike(mine.issued[0], found[1]):
                now = (
                    theirs.place if theirs.last == mine.last else f"now {theirs.place}"
                )
                at = f"#{number} at {mine.at}"
                problem = (
                    f"{theirs.who} issued {found[1]} as collective {at}, "
                    f"where rank {rank} issued {mine.issued[0]}"
                )
                lines = (
                    f"rank {other}: {found[1]} {now}",
                    f"rank {rank}: {mine.issued[0]} {mine.place}",
                )
                return Finding((other,), problem, lines, certain=True)
    return None


def _alike(one: str, other: str) -> bool:
    """Whether two calls may belong to one collective: a gather or scatter has different inputs on its ranks."""
    name, _, size = one.partition("[")
    same, _, their_size = other.partition("[")
    same_size = size == their_size or name not in (
        "all_reduce",
        "all_gather",
        "allgather",
        "broadcast",
        "barrier",
    )
    return name == same and same_size
