"""The save that is under way, and the host memory that saves are copied into."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from trainer_kit.checkpoint.background import Background, HostBuffers
from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.protocols import CheckpointRequest

__all__ = ["Outcome", "Save", "Saver"]

Outcome = dict[str, CheckpointError | None]
"""By path, why there is no checkpoint; None where there is one."""


@final
@dataclass
class Save:
    """One state on its way to disk.

    Attributes:
        step: that it was taken after.
        requests: of that step; None for the run's own directory and name.
        paths: by path, whether it holds the weights alone.
        last: nothing is trained after it.
        awaited: training waits for it.
        abandoned: nobody is told of it any more, so nothing gives way to it.
        writing: on rank 0, what writes it.
        said: by what writes it, for the user.
    """

    step: int
    requests: list[CheckpointRequest | None]
    paths: dict[str, bool]
    last: bool = False
    awaited: bool = False
    abandoned: bool = False
    writing: Background[Outcome] | None = None
    said: list[str] = field(default_factory=list)

    def requests_of(self, path: str) -> list[CheckpointRequest | None]:
        """Who asked for ``path``, and those who left the name to the run."""
        return [request for request in self.requests if request is None or str(request.path) == path]


@final
class Saver:
    """What a fit keeps about saving.

    Args:
        behind: whether training goes on while a checkpoint is written.

    Attributes:
        save: under way, or None; every rank has it, also while only rank 0 writes.
        finite: whether the weights that were saved last are; in the background.
        buffers: for states, by whether they hold the weights alone.
    """

    def __init__(self, behind: bool = True) -> None:
        self.behind = behind
        self.save: Save | None = None
        self.finite = True
        self.buffers = {weights_only: HostBuffers() for weights_only in (False, True)}

    @property
    def ended(self) -> bool:
        """Whether this process has written what is under way, and everybody may be told."""
        return self.save is not None and self.save.writing is not None and self.save.writing.wait(0)
