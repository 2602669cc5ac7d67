"""Decide from the reports of all ranks which rank hangs, and write the message about it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Final, final

from trainer_kit.hang.collectives import GroupCalls, LastCall
from trainer_kit.hang.position import Position

__all__ = ["Finding", "Report", "find_culprits", "name_silent", "ranks_named"]

_STACK_LINES: Final = 12
"""Stack lines in a message."""
_EQUAL_SIZES: Final = ("all_reduce", "all_gather", "allgather", "broadcast", "barrier")
"""Collectives whose inputs have the same size on every rank."""


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
        step: its completed steps, or other units of progress.
        progress: the same in words: ``"step 25"``.
        phase: its current phase.
        line: the line of user code.
        call: the current exchange, "" for none.
        patient: whether this phase may take long.
        seconds: the seconds since its last progress.
        seconds_left: the seconds until it counts as hanging.
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
    progress: str = "its start"
    phase: str = ""
    line: str = ""
    call: str = ""
    patient: bool = False
    seconds: float = 0.0
    seconds_left: float = 0.0
    ended: bool = False
    stack: list[str] = field(default_factory=list)
    groups: dict[str, GroupCalls] = field(default_factory=dict)
    last: LastCall | None = None
    reason: str = ""

    def set_progress(self, step: int, text: str) -> None:
        """Set the number of completed steps, and the same in words."""
        self.step = step
        self.progress = text

    def set_position(
        self, position: Position, seconds: float, seconds_left: float
    ) -> None:
        """Set the position of the main thread.

        Args:
            position: where it is.
            seconds: since its last progress.
            seconds_left: until it counts as hanging.
        """
        self.phase = position.phase
        self.line = position.line
        self.call = position.call
        self.patient = position.patient
        self.seconds = seconds
        self.seconds_left = seconds_left

    def set_stack(self, stack: list[str], reason: str) -> None:
        """Set the formatted stack of the main thread, and for what its data loader waits."""
        self.stack = stack
        self.reason = reason

    def set_collectives(
        self, groups: dict[str, GroupCalls], last: LastCall | None
    ) -> None:
        """Set the last collectives by process group, and the group and number of the last one."""
        self.groups = groups
        self.last = last

    def set_silence(self, reason: str, seconds_left: float) -> None:
        """Set why the rank does not answer ("" if unknown), and the seconds until it counts as hanging."""
        self.reason = reason or self.reason
        self.seconds_left = seconds_left

    def set_ended(self) -> None:
        """Note that the rank has left the loop."""
        self.ended = True

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
        group, number = self.last
        return self.issued_as(group, number)

    def issued_as(self, group: str, number: int) -> tuple[str, str] | None:
        """Return the name and the amount of data of a collective.

        Args:
            group: the name of its process group.
            number: its number in the group.
        """
        if group not in self.groups:
            return None
        # The recorder keeps the last calls only: an older one is not found.
        for call_number, name, amount in self.groups[group]["calls"]:
            if call_number == number:
                return name, amount
        return None

    @property
    def call_named(self) -> str:
        """Return the last collective with its size and number, or the current exchange."""
        issued = self.issued
        if issued is None or self.last is None:
            return self.call or "a collective"
        name, amount = issued
        _, number = self.last
        if "backward" in self.call:
            return f"{name} #{number} (a bucket of gradients, {amount})"
        return f"{name} #{number}"


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
    listed = ", ".join(map(str, ranks[:8]))
    if len(ranks) > 8:
        listed += f" and {len(ranks) - 8} more"
    if len(ranks) > 1:
        return f"ranks {listed}"
    return f"rank {listed}"


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
    # First: nothing else is known of a rank that does not answer, and the others may all wait for it.
    if silent:
        return name_silent(silent, answers, last_words)
    # The most certain causes come first: a rank that has left, or one in another collective, waits for nothing.
    finding = _name_ended(answers) or _name_mismatch(answers)
    if finding is not None:
        return finding
    awaited: dict[int, list[int]] = {}
    for rank in answers:
        awaited[rank] = _ranks_awaited_by(rank, answers)
    all_awaited: set[int] = set()
    for ranks in awaited.values():
        all_awaited.update(ranks)
    # Of the awaited ranks those that wait for none themselves are the cause; the others are its victims.
    behind = sorted(rank for rank in all_awaited if not awaited[rank])
    if all_awaited and not behind:
        # Each of them waits for another one, so none of them is the first cause.
        return _name_deadlock(sorted(all_awaited), answers)
    # Without a flight recorder nothing is known of collectives: then a rank in no exchange is the one.
    busy = behind or [rank for rank, report in answers.items() if not report.call]
    if busy and (len(busy) < size or size == 1):
        return _name_busy(busy, answers)
    longest = max(answers.values(), key=lambda report: report.seconds)
    # Every rank is busy: name the one that has made no progress for longest.
    if busy:
        problem = f"{longest.who} hangs {_activity(longest)}"
        return Finding((longest.rank,), problem, _innermost(longest), certain=False)
    problem = (
        f"all ranks wait in {longest.call_named} at {longest.progress}: "
        "a connection between them is dead"
    )
    return Finding((), problem, _innermost(longest), certain=False)


def _name_ended(answers: Mapping[int, Report]) -> Finding | None:
    """Name ranks that have left the loop while others are in it."""
    ended = [rank for rank, report in answers.items() if report.ended]
    running = [report for report in answers.values() if not report.ended]
    # At the end of a run all ranks leave, within seconds of each other.
    if not ended or not running:
        return None
    call = f"at {running[0].progress} in {running[0].call_named}"
    problem = (
        f"{ranks_named(ended)} left the training loop, but {_waiting(running)} {call}"
    )
    return Finding(tuple(ended), problem, (), certain=False)


def _name_deadlock(ranks: list[int], answers: Mapping[int, Report]) -> Finding:
    """Name ranks of which each waits for another."""
    lines = [
        f"{report.who} is in {report.call_named}, {report.line}"
        for report in answers.values()
    ]
    problem = "ranks wait for each other in different collectives"
    return Finding(tuple(ranks), problem, tuple(lines), certain=True)


def _name_busy(busy: list[int], answers: Mapping[int, Report]) -> Finding:
    """Name ranks for which the others wait."""
    first = answers[busy[0]]
    waiting = [report for rank, report in answers.items() if rank not in busy]
    problem = f"{first.who} hangs {_activity(first)}"
    if waiting:
        problem += f" and has not entered {waiting[0].call_named}; {_waiting(waiting)}"
    if len(busy) > 1:
        problem += f"; {ranks_named(busy[1:])} likewise"
    return Finding(tuple(busy), problem, _innermost(first), certain=False)


def name_silent(
    silent: list[int], answers: Mapping[int, Report], last_words: Mapping[int, Report]
) -> Finding:
    """Return a finding about ranks that do not answer; the arguments are those of `find_culprits`."""
    first = last_words.get(silent[0], Report(rank=silent[0]))
    problem = f"rank {silent[0]}"
    if first.pid:
        problem += f" ({first.host}, pid {first.pid})"
    problem += " does not answer"
    if first.reason:
        problem += f": {first.reason}"
    waiting = [report for report in answers.values() if report.call]
    if waiting:
        problem += f" and has not entered {waiting[0].call_named}; {_waiting(waiting)}"
    if first.phase:
        problem += f"; last seen at {first.progress} in {first.phase}, {first.line}"
    if len(silent) > 1:
        problem += f"; neither do {ranks_named(silent[1:])}"
    return Finding(tuple(silent), problem, _innermost(first), certain=False)


def _activity(report: Report) -> str:
    activity = f"at {report.progress} in {report.phase}, {report.line}"
    if report.reason:
        activity += f": {report.reason}"
    return activity


def _waiting(reports: list[Report]) -> str:
    if not reports:
        return ""
    ranks = ranks_named([report.rank for report in reports])
    longest = max(report.seconds for report in reports)
    if len(reports) > 1:
        return f"{ranks} wait {longest:.0f} s"
    return f"{ranks} waits {longest:.0f} s"


def _innermost(report: Report) -> tuple[str, ...]:
    """Return a rank's innermost frames; faulthandler writes these in reverse order, after other threads."""
    lines: list[str] = []
    for text in report.stack:
        lines += text.rstrip().splitlines()
    starts = [i for i, line in enumerate(lines) if "most recent call first" in line]
    if starts:
        return tuple(lines[starts[-1] :][: _STACK_LINES + 1])
    return tuple(lines[-_STACK_LINES:])


def _ranks_awaited_by(rank: int, answers: Mapping[int, Report]) -> list[int]:
    """Return the ranks that have not issued the last collective of ``rank`` yet."""
    report = answers[rank]
    if report.last is None:
        return []
    group, number = report.last
    awaited = []
    # Only members of the group take part in its collectives.
    for other in report.groups[group]["ranks"]:
        if other == rank or other not in answers:
            continue
        # Numbers count the collectives of one group, in which all ranks call the same ones.
        if _last_number(answers[other], group) < number:
            awaited.append(other)
    return awaited


def _last_number(report: Report, group: str) -> int:
    if group not in report.groups:
        return 0
    calls = report.groups[group]["calls"]
    return calls[-1][0] if calls else 0


def _name_mismatch(answers: Mapping[int, Report]) -> Finding | None:
    """Name a rank whose collective differs from that of another with the same number in the same group."""
    for rank, report in answers.items():
        if report.last is None:
            continue
        for other in report.groups[report.last[0]]["ranks"]:
            if other == rank or other not in answers:
                continue
            finding = _compare_calls(report, answers[other])
            if finding is not None:
                return finding
    return None


def _compare_calls(report: Report, other: Report) -> Finding | None:
    """Name ``other`` if its call differs from the last one of ``report``."""
    assert report.last is not None
    group, number = report.last
    call, other_call = report.issued, other.issued_as(group, number)
    if call is None or other_call is None or _alike(call[0], other_call[0]):
        return None
    problem = (
        f"{other.who} issued {other_call[0]} as collective #{number} at {report.progress}, "
        f"where rank {report.rank} issued {call[0]}"
    )
    # The other rank may have gone on since: collectives on an accelerator do not wait for each other.
    line = other.line
    if other.last != report.last:
        line = f"now {line}"
    details = (
        f"rank {other.rank}: {other_call[0]} {line}",
        f"rank {report.rank}: {call[0]} {report.line}",
    )
    return Finding((other.rank,), problem, details, certain=True)


def _alike(call: str, other: str) -> bool:
    """Whether two calls may belong to one collective: a gather or scatter has different inputs on its ranks."""
    name, _, size = call.partition("[")
    other_name, _, other_size = other.partition("[")
    if name != other_name:
        return False
    return size == other_size or name not in _EQUAL_SIZES
