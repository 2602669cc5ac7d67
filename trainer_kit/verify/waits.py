"""Ranks of `verify` that wait for each other in different collectives: they are named within seconds."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, final

from trainer_kit.core.atomic_files import replace_file
from trainer_kit.core.errors import RankError
from trainer_kit.core.thread_frames import thread_frames
from trainer_kit.core.types import JsonObject
from trainer_kit.hang.position import find_position

__all__ = ["WaitWatch", "raise_verdict"]

_INTERVAL: Final = 0.5
"""Seconds between two looks at the main thread."""
_PATIENCE: Final = 4.0
"""Seconds that all ranks wait, each in the same place, before they are stuck: a collective here sends no bytes far."""
_VERDICT: Final = "stuck.json"
_EXIT_CODE: Final = 75


@final
class WaitWatch:
    """Watches the main thread of a rank; ends the rank when every rank waits, and not all in one collective.

    Args:
        directory: where the ranks write what they wait for.
        rank: the rank of this process.
        ranks: number of ranks.
    """

    def __init__(self, directory: Path, rank: int, ranks: int) -> None:
        self.directory = directory
        self.rank = rank
        self.ranks = ranks
        self._ended = threading.Event()
        # The frames of the main thread, and since when they are the same.
        self._frames: tuple[int, ...] = ()
        self._since = 0.0
        threading.Thread(target=self._watch, name="wait-watch", daemon=True).start()

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(_INTERVAL):
            # The file of another rank may be missing, or from an earlier run.
            with suppress(OSError, ValueError):
                self._look()

    def _look(self) -> None:
        # The clock of the machine: ranks compare times that others have written.
        now = time.time()
        position = find_position(thread_frames(threading.main_thread().ident))
        # Only a wait for other ranks counts, and not a thread that a debugger holds.
        if position.frames != self._frames or not position.call or position.debugged:
            self._frames = position.frames
            self._since = now
        waits = {
            "call": position.call,
            "place": position.line,
            "seconds": now - self._since,
            "at": now,
        }
        replace_file(self._file(self.rank), json.dumps(waits).encode())
        if now - self._since < _PATIENCE:
            return
        rank_waits: list[JsonObject] = []
        for rank in range(self.ranks):
            rank_waits.append(json.loads(self._file(rank).read_text()))
        # All of them in one place wait for something else, such as a slow disk.
        positions = {(each["call"], each["place"]) for each in rank_waits}
        stuck = all(_is_stuck(each, now) for each in rank_waits)
        if stuck and len(positions) > 1:
            replace_file(self.directory / _VERDICT, json.dumps(rank_waits).encode())
            # The main thread hangs in C++ and runs no exception handler.
            os._exit(_EXIT_CODE)

    def _file(self, rank: int) -> Path:
        return self.directory / f"waits-{rank}.json"


def _is_stuck(waits: JsonObject, now: float) -> bool:
    """Whether a rank has waited long enough; ranks look at different times, up to an interval apart."""
    seconds: float = waits["seconds"]
    age: float = now - waits["at"]
    return age < _PATIENCE and seconds >= _PATIENCE - _INTERVAL


def raise_verdict(directory: Path, error: BaseException) -> None:
    """Raise what the ranks wait for, where they were stuck.

    Args:
        directory: the directory to which the ranks have written.
        error: the error with which the run has ended.

    Raises:
        RankError: the ranks do not call the same collectives.
    """
    file = directory / _VERDICT
    if not file.exists():
        return
    waits: list[JsonObject] = json.loads(file.read_text())
    lines = [
        f"rank {rank} waits in {each['call']} {each['place']}"
        for rank, each in enumerate(waits)
    ]
    raise RankError(
        "the ranks do not call the same collectives",
        found="; ".join(lines),
        fix="call the same collectives in the same order on every rank; verify with local=True stops in one of them",
    ) from error
