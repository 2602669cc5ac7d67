"""Ranks of `verify` that wait for each other in different collectives: they are named within seconds."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, final

from trainer_kit.core.atomic_files import replace_file
from trainer_kit.core.errors import RankError
from trainer_kit.core.thread_frames import thread_frames
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
        rank: of this process.
        ranks: how many.
    """

    def __init__(self, directory: Path, rank: int, ranks: int) -> None:
        self.directory, self.rank, self.ranks = directory, rank, ranks
        self._ended = threading.Event()
        self._frames: tuple[int, ...] = ()
        self._since = 0.0
        threading.Thread(target=self._watch, name="wait-watch", daemon=True).start()

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(_INTERVAL):
            with suppress(OSError, ValueError):
                self._look()

    def _look(self) -> None:
        now = time.time()
        position = find_position(thread_frames(threading.main_thread().ident))
        if position.frames != self._frames or not position.call or position.debugged:
            self._frames, self._since = position.frames, now
        waits = {
            "call": position.call,
            "place": position.line,
            "seconds": now - self._since,
            "at": now,
        }
        replace_file(self._file(self.rank), json.dumps(waits).encode())
        if now - self._since < _PATIENCE:
            return
        other_ranks = [
            json.loads(self._file(rank).read_text()) for rank in range(self.ranks)
        ]
        stuck = all(
            each["seconds"] >= _PATIENCE - _INTERVAL and now - each["at"] < _PATIENCE
            for each in other_ranks
        )
        if stuck and len({(each["call"], each["place"]) for each in other_ranks}) > 1:
            replace_file(self.directory / _VERDICT, json.dumps(other_ranks).encode())
            os._exit(_EXIT_CODE)

    def _file(self, rank: int) -> Path:
        return self.directory / f"waits-{rank}.json"


def raise_verdict(directory: Path, error: BaseException) -> None:
    """Raise what the ranks wait for, where they were stuck.

    Args:
        directory: of the ranks.
        error: with which the run has ended.

    Raises:
        RankError: the ranks do not call the same collectives.
    """
    file = directory / _VERDICT
    if not file.exists():
        return
    waits: list[dict[str, Any]] = json.loads(file.read_text())
    lines = [
        f"rank {rank} waits in {each['call']} {each['place']}"
        for rank, each in enumerate(waits)
    ]
    raise RankError(
        "the ranks do not call the same collectives",
        found="; ".join(lines),
        fix="call the same collectives in the same order on every rank; verify with local=True stops in one of them",
    ) from error
