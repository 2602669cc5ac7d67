"""Count collective calls, and explain the error of a call in which a process is missing."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Final, final

from torch import distributed as dist

from trainer_kit.core.display import plural
from trainer_kit.core.errors import add_note

__all__ = ["ADVICE", "JointCalls"]

_TORCH: Final = str(Path(dist.__file__).resolve().parents[1])
ADVICE: Final = (
    "every process must make this call: is it under `if accelerator.is_main_process`?"
)


@final
class JointCalls:
    """The context of every collective call.

    Args:
        size: the number of processes.

    Attributes:
        count: the number of calls that have begun; the hang watchdog reads it.
    """

    def __init__(self, size: int) -> None:
        self.count = 0
        self._size = size
        self._call = ""

    def __call__(self, call: str) -> JointCalls:
        """Return the context for the call of this name."""
        self._call = call
        return self

    def __enter__(self) -> None:
        self.count += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # gloo raises it when another process has ended.
        if isinstance(error, RuntimeError) and _raised_by_torch(traceback):
            add_note(
                error,
                f"in {self._call}, with {plural(self._size, 'process')}: {ADVICE}",
            )


def _raised_by_torch(traceback: TracebackType | None) -> bool:
    """Whether an error was raised in a collective, not in user code around it."""
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return False
    return traceback.tb_frame.f_code.co_filename.startswith(_TORCH)
