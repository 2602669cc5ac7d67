"""Which rank failed first, and the message about it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import textwrap
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, final

from trainer_kit.core.display import mask_secrets

__all__ = [
    "AGENT_DIRECTORY",
    "RankFailure",
    "describe",
    "find_cause",
    "note_end",
    "read_reports",
    "root_first",
    "share_failures",
    "with_early_ends",
]

_COMMUNICATION: Final = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|remote process (has )?(exited|terminated)"
    r"|closed connection|connect(ion)? (to .* )?failed|failed to connect|pair closure|socket(Timeout|Start| closed)"
    r"|ncclRemoteError|recvValue failed|sendBytes failed|store .*(closed|shut ?down)|readv? error|writev? error"
    r"|timed out waiting for .*(recv|send)|peer closed",
    re.IGNORECASE,
)


_REPORTED: Final = (
    "rank",
    "exit_code",
    "time_ns",
    "type",
    "text",
    "py_callstack",
    "host",
    "pid",
    "where",
)
"""What a rank reports (see `trainer_kit.launch.bootstrap`), in the order of the fields of `RankFailure`."""
AGENT_DIRECTORY: Final = "trainer_kit-"
"""How the name of the directory begins in which the ranks of a launch report."""
_ENDED: Final = "ended-"
_RUNNING: Final = "running-"
"""The file that a rank under torchrun leaves beside its reports, for the others of its machine."""
_SHOWN_RANKS: Final = 8
"""Ranks that a line of the message names."""
_CAUSE_TIME: Final = 2.0
"""The most seconds that a rank waits to learn why its connection broke."""
_GRACEFUL: Final = (signal.SIGTERM, signal.SIGINT)
"""On these signals a rank tears down and exits with 128 + n."""


@final
@dataclass(frozen=True)
class RankFailure:
    """How one rank ended.

    Attributes:
        rank: the global rank.
        exit_code: as in ``subprocess``: negative for a signal; None while the process is alive.
        time_ns: the time of the exception if one is known, else of the end of the process.
        type: the exception's class, qualified unless it is a builtin; empty if no exception is known.
        message: the exception's text.
        traceback: the exception's traceback, formatted.
        host: the host of the rank.
        pid: its process ID.
        where: the position in the run that the rank reported, such as ``"step 25"``.
        stopped: whether the agent ended it because of another rank.
    """

    rank: int
    exit_code: int | None
    time_ns: float
    type: str = ""
    message: str = ""
    traceback: str = ""
    host: str = ""
    pid: int = 0
    where: str = ""
    stopped: bool = False

    @property
    def cause(self) -> str:
        """One line: the exception, the signal, or the exit code.

        Example:
            >>> RankFailure(1, -9, 0).cause
            'killed by SIGKILL (the kernel does this when memory runs out)'
            >>> RankFailure(1, 1, 0, "ValueError", "bad label").cause
            'ValueError: bad label'
            >>> RankFailure(1, 143, 0).cause
            'ended by SIGTERM (exit code 143)'
        """
        if self.type and self.type != "SystemExit":
            text = self.message.strip().split("\n", 1)[0]
            if not text:
                return self.type
            return f"{self.type}: {text}"
        if self.exit_code == 0:
            return "with exit code 0, while other ranks train"
        if self.vanished:
            return "its process has ended without an exception, while other ranks train"
        # After its own teardown: a rank that a signal kills has a negative exit code.
        if self.exit_code is not None and self.exit_code - 128 in _GRACEFUL:
            return f"ended by {signal.Signals(self.exit_code - 128).name} (exit code {self.exit_code})"
        if self.exit_code is not None and self.exit_code < 0:
            return _killed_by(-self.exit_code)
        text = ""
        # The message of SystemExit, which is often the code again.
        if self.type and not self.message.isdigit():
            text = f" ({self.message})"
        return f"exited with code {self.exit_code}{text}"

    @property
    def vanished(self) -> bool:
        """Whether all that is known is that the process has ended: no exit code and no exception."""
        return self.exit_code is None and not self.type and not self.stopped

    @property
    def exit_status(self) -> int:
        """The exit status in a shell: 128 + n for signal n."""
        # It has failed, so a launcher must not take the run for a success.
        if self.exit_code is None or self.exit_code == 0:
            return 1
        if self.exit_code < 0:
            return 128 - self.exit_code
        return self.exit_code

    @property
    def followed(self) -> bool:
        """Whether the rank failed only because another rank is gone: its connections broke."""
        # Any exception of a user may have such a text; those of torch's collectives have these classes.
        by_torch = self.type == "RuntimeError" or self.type.startswith("torch.")
        return by_torch and _COMMUNICATION.search(self.message) is not None


def _killed_by(number: int) -> str:
    # Most real-time signals have no names.
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if name == "SIGKILL":
        return "killed by SIGKILL (the kernel does this when memory runs out)"
    return f"killed by {name}"


def root_first(failures: Iterable[RankFailure]) -> list[RankFailure]:
    """Sort failures: causes before consequences, each by time.

    Example:
        >>> echo = RankFailure(0, 1, 1.0, "RuntimeError", "Connection closed by peer [127.0.0.1]")
        >>> [failure.rank for failure in root_first([echo, RankFailure(1, -9, 2.0)])]
        [1, 0]
    """
    # Causes first, then lost connections, then ranks that were stopped. Times alone do not tell them apart: a lost
    # connection may be reported before its cause.
    return sorted(
        failures,
        key=lambda failure: (
            failure.stopped,
            failure.followed and not failure.stopped,
            failure.time_ns,
            failure.rank,
        ),
    )


def with_early_ends(
    failures: Sequence[RankFailure], ends: Iterable[RankFailure]
) -> list[RankFailure]:
    """Add the rank that left first, if every failure is only that a connection broke.

    Args:
        failures: of ranks that failed or were stopped.
        ends: of ranks that ended with exit code 0.
    """
    lost = [failure for failure in failures if failure.followed]
    if not lost:
        return list(failures)
    first = min(lost, key=lambda failure: failure.time_ns)
    located = []
    for failure in failures:
        # A process that ended with exit code 0 without a result does not say where it was.
        if failure.exit_code == 0:
            failure = replace(failure, where=failure.where or first.where)
        located.append(failure)
    early = min(ends, key=lambda end: (end.time_ns, end.rank), default=None)
    has_cause = any(not (failure.followed or failure.stopped) for failure in located)
    if early is None or has_cause:
        return located
    return [replace(early, where=early.where or first.where), *located]


def note_end(directory: Path, end: RankFailure) -> None:
    """Record for the other ranks of this machine that a rank has ended with exit code 0; they may lose it."""
    path = directory / f"{_ENDED}{end.rank}"
    with suppress(OSError):
        path.write_text(
            json.dumps({"time_ns": end.time_ns, "host": end.host, "pid": end.pid}),
            encoding="utf-8",
        )


def _read_ends(directory: Path) -> list[RankFailure]:
    ends = []
    for path in directory.glob(f"{_ENDED}*"):
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            rank = int(path.name.removeprefix(_ENDED))
            ends.append(
                RankFailure(
                    rank, 0, fields["time_ns"], host=fields["host"], pid=fields["pid"]
                )
            )
        except (OSError, ValueError, KeyError):
            # It is being written: the caller looks again.
            continue
    return ends


def find_cause(error: BaseException, error_type: str, where: str) -> RankFailure | None:
    """Return the failure of another rank of this machine, if ``error`` is only that the connection to it broke.

    Waits up to two seconds for it: the other rank or its agent may still be writing.

    Args:
        error: what ends this rank.
        error_type: its qualified class.
        where: the position of this rank in the run.
    """
    rank = int(os.environ.get("RANK", "0"))
    lost = RankFailure(rank, 1, time.time_ns(), error_type, str(error), where=where)
    attempt = _reports_of_attempt()
    if attempt is None or not lost.followed:
        return None
    # The agent notes ends with exit code 0 at the top of its own directory, which torch's agent divides by attempts.
    agent = attempt
    for parent in attempt.parents:
        if parent.name.startswith(AGENT_DIRECTORY):
            agent = parent
            break
    deadline = time.monotonic() + _CAUSE_TIME
    while time.monotonic() < deadline:
        reports = [
            failure
            for failure in read_reports(attempt).values()
            if failure.rank != rank
        ]
        first = root_first(with_early_ends([*reports, lost], _read_ends(agent)))[0]
        if not first.followed:
            return first
        time.sleep(0.05)
    return _vanished_rank(attempt, lost)


@final
class _Peers:
    """Where this rank and its peers report to each other without an agent.

    Attributes:
        directory: has a directory for each rank; None in other processes.
    """

    def __init__(self) -> None:
        self.directory: Path | None = None

    def share(self, directory: Path) -> None:
        self.directory = directory


_PEERS: Final = _Peers()


def share_failures(directory: Path) -> None:
    """Let `find_cause` of this process read the failures of its peers in ``directory``: there is no agent.

    Args:
        directory: of the attempt, inside one that is named as an agent's.
    """
    _PEERS.share(directory)


def _reports_of_attempt() -> Path | None:
    """The directory with a directory for each rank of this machine; None where ranks report nowhere."""
    if _PEERS.directory is not None:
        return _PEERS.directory
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if report is None:
        return None
    # In the directory of the rank, which lies in that of the attempt.
    return Path(report).parent.parent


def _vanished_rank(attempt: Path, lost: RankFailure) -> RankFailure | None:
    """The rank of this machine whose process has ended, under a launcher that does not tell the others; or None."""
    for path in sorted(attempt.glob(f"{_RUNNING}*")):
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            rank = int(path.name.removeprefix(_RUNNING))
            pid, host = int(fields["pid"]), str(fields["host"])
        except (OSError, ValueError, KeyError, TypeError):
            # It is being written.
            continue
        # Processes of another host cannot be looked at.
        if host == socket.gethostname() and rank != lost.rank and _has_ended(pid):
            return RankFailure(
                rank, None, time.time_ns(), host=host, pid=pid, where=lost.where
            )
    return None


def _has_ended(pid: int) -> bool:
    """Whether no process has this id, or one that waits for its parent to read its exit code."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    # Until its parent collects it, a process that has ended keeps its id.
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return stat.rpartition(")")[2].split()[0] in ("Z", "X")
    return False


def describe(failures: Sequence[RankFailure], world_size: int) -> str:
    """The headline, its traceback, and one line for the other ranks that ended.

    Args:
        failures: at least one.
        world_size: number of ranks.
    """
    root, *later = root_first(failures)
    position = ""
    if root.where:
        position = f" at {root.where}"
    host = ""
    if root.host:
        host = f"{root.host}, "
    verb = "failed"
    # Nothing is known that would be a failure of its own.
    if root.exit_code == 0 or root.vanished:
        verb = "ended"
    lines = [
        f"rank {root.rank} of {world_size} {verb}{position} ({host}pid {root.pid}): {root.cause}"
    ]
    if root.traceback and root.type != "SystemExit":
        lines.append(textwrap.indent(root.traceback.rstrip(), "  "))
    groups: dict[str, list[int]] = {}
    for failure in later:
        ending = failure.cause
        if failure.stopped:
            ending = "stopped"
        elif failure.followed:
            ending = "lost the connection"
        groups.setdefault(ending, []).append(failure.rank)
    if groups:
        endings = [f"{_ranks(ranks)} {ending}" for ending, ranks in groups.items()]
        lines.append("after it: " + "; ".join(endings))
    return "\n".join(lines)


def _ranks(ranks: Sequence[int]) -> str:
    names = ", ".join(str(rank) for rank in sorted(ranks)[:_SHOWN_RANKS])
    if len(ranks) == 1:
        return f"rank {names}"
    if len(ranks) > _SHOWN_RANKS:
        names += f" and {len(ranks) - _SHOWN_RANKS} more"
    return f"ranks {names}"


def read_reports(directory: Path) -> dict[int, RankFailure]:
    """The failures that ranks reported in ``directory`` (see `trainer_kit.launch.bootstrap`), by rank."""
    reports: dict[int, RankFailure] = {}
    for path in directory.rglob("error.json"):
        try:
            fields = mask_secrets(
                json.loads(path.read_text(encoding="utf-8"))["message"]["extraInfo"]
            )
            failure = RankFailure(*(fields[name] for name in _REPORTED))
        except (OSError, ValueError, KeyError, TypeError):
            # From another writer, such as a rank under torch's own @record.
            continue
        reports[failure.rank] = failure
    return reports
