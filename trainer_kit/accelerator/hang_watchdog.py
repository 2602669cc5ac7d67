"""Reports a collective call in which a process waits long for the others, and where each process is."""

from __future__ import annotations

import atexit
import os
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, final

from torch import distributed as dist

from trainer_kit.core.errors import add_note
from trainer_kit.launch.startup_timeout import patience

__all__ = ["HangWatchdog"]

_HERE: Final = str(Path(__file__).resolve().parents[1])
_TORCH: Final = str(Path(dist.__file__).resolve().parents[1])  # not always in this environment's own directories
_NOT_OURS: Final = (
    *(_HERE, _TORCH, "<frozen"),
    *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")),
)
_ASKED, _AT = "trainer_kit/asked", "trainer_kit/at"
_ADVICE: Final = "every process must make this call: is it under `if accelerator.is_main_process`?"


@final
class HangWatchdog:
    """The context of every call that all processes make together; it exchanges nothing while no process waits.

    A thread samples the main thread's stack. After ``TRAINER_KIT_PATIENCE`` seconds (30) in one call it
    asks the others, whose threads answer from wherever their process is.

    Args:
        rank: of this process.
        size: number of processes.
        say: prints a line.
    """

    def __init__(self, rank: int, size: int, say: Callable[[str], None]) -> None:
        self.rank = rank
        self.size = size
        self.calls = 0
        self._say = say
        self._call = ""
        self._main = threading.get_ident()
        self._patience = patience()
        self._every = min(5.0, self._patience / 4)
        self._seen: Any = None
        self._since = 0.0
        self._asked_at = float("inf")
        self._reported = False
        self._number = 0  # of the question that this process asked
        self._answered = 0  # the number of the last question that it answered
        store = dist.distributed_c10d._get_default_store()
        if hasattr(store, "clone"):  # another connection: the main thread's may be blocked; not in older torch
            over = threading.Event()
            arguments = (weakref.ref(self), store.clone(), over, self._every)
            thread = threading.Thread(target=_look, args=arguments, name="hang watchdog", daemon=True)
            thread.start()
            atexit.register(_end, over, thread)
            weakref.finalize(self, over.set)

    def __call__(self, call: str) -> HangWatchdog:
        """For the call of this name."""
        self._call = call
        return self

    def __enter__(self) -> None:
        self.calls += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, RuntimeError) and _raised_by_torch(traceback):  # gloo: another process has gone
            add_note(error, f"in {self._call}, with {self.size} processes: {_ADVICE}")

    def spot(self) -> Any:
        """The call that the main thread waits in, or None."""
        frame = sys._current_frames().get(self._main)
        if frame is None or not frame.f_code.co_filename.endswith("distributed_c10d.py"):
            return None
        inner = frame
        while frame is not None and not frame.f_code.co_filename.startswith(str(Path(_HERE) / "accelerator")):
            frame = frame.f_back
        return None if frame is None else (self.calls, id(inner), inner.f_lasti)

    def where(self) -> str:
        """The line of user code that the main thread is in, and the function that it calls there."""
        frame: FrameType | None = sys._current_frames().get(self._main)
        does = ""
        while frame is not None and frame.f_code.co_filename.startswith(_NOT_OURS):
            does = frame.f_code.co_name
            frame = frame.f_back
        if frame is None:
            return f"in {does}" if does else "at its end"
        return f"at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" + (f" in {does}" if does else "")

    def look(self, store: Any) -> None:
        """Sample once; the thread calls it."""
        now, spot = time.monotonic(), self.spot()
        if spot is None or spot != self._seen:
            self._seen = spot
            self._since = now
            self._asked_at = float("inf")
            self._reported = False
        elif self._asked_at > now and not self._reported and now - self._since >= self._patience:
            self._number = store.add(_ASKED, 1)
            self._asked_at = now
        number = store.add(_ASKED, 0)
        for question in range(self._answered + 1, number + 1):
            store.set(f"{_AT}/{question}/{self.rank}", self.where())
        self._answered = number
        if now - self._asked_at > 2 * self._every:
            self._asked_at = float("inf")
            self._reported = True
            self._report(store, self._number)

    def _report(self, store: Any, number: int) -> None:
        at = []
        for rank in range(self.size):
            key = f"{_AT}/{number}/{rank}"
            at.append(store.get(key).decode() if store.check([key]) else "silent: it has ended or does not answer")
        waiting = [rank for rank, place in enumerate(at) if place == at[self.rank]]
        if waiting[0] != self.rank:
            return  # one line is enough
        others = "; ".join(f"process {rank} is {place}" for rank, place in enumerate(at) if rank not in waiting)
        who = ", ".join(map(str, waiting))
        self._say(f"waiting for more than {self._patience:g} s {at[self.rank]} (process {who}); {others}; {_ADVICE}")


def _raised_by_torch(traceback: TracebackType | None) -> bool:
    """Whether an error was raised in a collective, not in user code that is called around one."""
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(_TORCH)


def _look(of: weakref.ref[HangWatchdog], store: Any, over: threading.Event, every: float) -> None:
    while not over.wait(every):
        waiting = of()
        if waiting is None:
            return
        try:
            waiting.look(store)
        except RuntimeError:  # the store has gone with its process
            return
        del waiting


def _end(over: threading.Event, thread: threading.Thread) -> None:
    over.set()
    thread.join(1.0)
