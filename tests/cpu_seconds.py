"""A pytest plugin that prints the CPU seconds of tests, with all processes that they start: by file, and the largest.

``python -m pytest -p tests.cpu_seconds -m "not long" tests/parity``, without ``-n``. Unlike ``--durations`` it says the
same on a busy machine, and shows what a test costs that starts many processes. It reads ``/proc``.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SECONDS: Counter[str] = Counter()
TICKS = os.sysconf("SC_CLK_TCK")


def tree_seconds(root: int) -> float:
    """User and system time of a process, of its living descendants, and of those that have been waited for."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        parents[int(directory.name)] = int(fields[1])
        ticks[int(directory.name)] = sum(map(int, fields[11:15]))
    found, before = {root}, 0
    while len(found) > before:
        before = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return sum(ticks.get(pid, 0) for pid in found) / TICKS


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Measure one test with its fixtures; what a session has once is counted by the first test that needs it."""
    before = tree_seconds(os.getpid())
    try:
        return (yield)
    finally:
        SECONDS[item.nodeid] += tree_seconds(os.getpid()) - before


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the sum, each file, and the twenty most expensive tests."""
    files: Counter[str] = Counter()
    for name, seconds in SECONDS.items():
        files[name.partition("::")[0]] += seconds
    terminalreporter.section(f"CPU seconds: {sum(SECONDS.values()):.0f}")
    for name, seconds in [*files.most_common(), *SECONDS.most_common(20)]:
        terminalreporter.write_line(f"{seconds:8.1f}  {name}")
