"""One composed fit: everything that the loop and its settling use, and the pending save."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, final

from trainer_kit.checkpoint.background import Background, HostBuffers
from trainer_kit.core.errors import CheckpointError, NonFiniteError
from trainer_kit.core.location import Location
from trainer_kit.core.progress import Progress
from trainer_kit.core.protocols import CheckpointRequest
from trainer_kit.metrics.metrics import Metrics
from trainer_kit.precision.precision import Precision
from trainer_kit.step.accumulation_window import WindowLoader
from trainer_kit.step.bus import Bus
from trainer_kit.step.captured_steps import CapturedSteps
from trainer_kit.step.evaluate import Evaluation
from trainer_kit.step.optimize import ManualStepper, Stepper
from trainer_kit.step.requests import Requests
from trainer_kit.step.schedule import Schedule
from trainer_kit.step.time_account import TimeAccount
from trainer_kit.step.window import Window, WindowRunner
from trainer_kit.strategies.strategy import Strategy

__all__ = ["Fit", "Outcome", "Rewind", "Save", "Saver", "StepGuard"]

Outcome = dict[str, CheckpointError | None]
"""By path, why the checkpoint does not exist; None where it exists."""


class Rewind(Exception):
    """Leave the running step: the loop goes back to a state that the guard of the run holds."""


class StepGuard(Protocol):
    """What a step that is not finite leads to; `state.rewind.Guard`. Every rank must call each method."""

    def hold(self, run: Fit, owes_validation: bool) -> None:
        """Hold the state after this step, if one is due; the losses up to it are finite."""

    def search(self, run: Fit, error: NonFiniteError, published: int) -> None:
        """Raise `Rewind` to find the step of ``error``; return where that was done already, or is not possible."""

    def end_search(self, run: Fit) -> None:
        """Tell the result of a search once its steps have run again."""

    def note_checkpoints(self, step: int, paths: Mapping[str, bool]) -> None:
        """Note the checkpoints of this step: by path, whether it holds the weights alone."""

    def publishes(self, step: int) -> bool:
        """Whether the loggers do not have the values of this step yet."""

    def rewind(self, run: Fit) -> Mapping[str, Any]:
        """Put a held state back, and return it."""


@final
@dataclass
class Save:
    """One state on its way to disk.

    Attributes:
        step: that it was taken after.
        requests: of this rank at that step, each with the path of its checkpoint; a request of None is for the run's
            own directory and name.
        paths: by path, whether it holds the weights alone.
        last: nothing is trained after it.
        awaited: training waits for it.
        abandoned: its result is not reported any more, and no other checkpoint is deleted for it.
        writing: on rank 0, what writes it.
        messages: lines for the user from the thread that writes it.
    """

    step: int
    requests: list[tuple[str, CheckpointRequest | None]]
    paths: dict[str, bool]
    last: bool = False
    awaited: bool = False
    abandoned: bool = False
    writing: Background[Outcome] | None = None
    messages: list[str] = field(default_factory=list)

    def requests_of(self, path: str) -> list[CheckpointRequest | None]:
        """The requests that the checkpoint at ``path`` grants."""
        return [
            request for request_path, request in self.requests if request_path == path
        ]

    def begin_writing(self, writing: Background[Outcome] | None) -> None:
        """Set what writes it."""
        self.writing = writing

    def note_wait(self) -> None:
        """Note that training waits for it."""
        self.awaited = True

    def abandon(self) -> None:
        """Report its result no more, and delete no other checkpoint for it."""
        self.abandoned = True


@final
class Saver:
    """The save in flight and the buffers of a fit.

    ============== ============= ======================================================
    ``background`` ``in_thread`` a save
    ============== ============= ======================================================
    True           True          is written by its own thread while training continues
    False          True          is written by its own thread while training waits
    True           False         is written by training's thread, once it must be durable
    False          False         is written by training's thread at once
    ============== ============= ======================================================

    Args:
        background: whether training continues while a checkpoint is written; it waits for the last one of a run.

    Attributes:
        in_thread: whether a thread of its own writes; False: the one that waits for the save.
        save: under way, or None; every rank has it, also while only rank 0 writes.
        finite: whether the weights in the checkpoint that was written last are finite; set by the thread that writes.
        buffers: for states, by whether they hold the weights alone.
    """

    def __init__(self, background: bool = True) -> None:
        self.background = background
        self.in_thread = True
        self.save: Save | None = None
        self.finite = True
        # Kept over saves: a copy into fresh memory takes several times as long.
        self.buffers = {weights_only: HostBuffers() for weights_only in (False, True)}

    @property
    def ended(self) -> bool:
        """Whether this process has finished writing the save in flight."""
        return (
            self.save is not None
            and self.save.writing is not None
            and self.save.writing.wait(0)
        )

    def write_in_training_thread(self) -> None:
        """Write in the thread that waits for the save."""
        self.in_thread = False

    def begin(self, save: Save) -> None:
        """Note that this save is under way."""
        self.save = save

    def end(self) -> None:
        """Note that no save is under way any more."""
        self.save = None

    def note_finite(self, finite: bool) -> None:
        """Note whether the weights that were saved last are finite."""
        self.finite = finite


@dataclass(frozen=True, slots=True)
class Fit:
    """Everything that the loop of one fit works on, composed once.

    Attributes:
        validation: has no feeds where there is nothing to validate on.
        publish: hands values to the loggers, with the step they belong to.
        collect: the whole state of the run, or of the weights alone.
        directory: the default directory of checkpoints, called when one is due.
        writes_checkpoints: whether this run writes checkpoints at all.
        about: what every checkpoint says of this run, besides its state.
        announce: reports a checkpoint to the loggers.
        save_logs: has the loggers save; what it returns waits until they have.
        say: prints.
        saver: the save under way.
        account: where the time goes.
        forward_backward: the strategy's, or what takes its place.
        step: the stepper's, or what takes its place.
        frozen: names of the parameters that were not trained when the run was composed.
        captured: what captures steps, or None.
        id: in the info of its checkpoints; "" where the run has no record.
    """

    module: Any
    bus: Bus
    metrics: Metrics
    progress: Progress
    strategy: Strategy
    precision: Precision
    runner: WindowRunner
    windows: WindowLoader
    stepper: Stepper | ManualStepper
    schedule: Schedule
    requests: Requests
    validation: Evaluation
    publish: Callable[[Mapping[str, float], int], None]
    collect: Callable[[bool], dict[str, Any]]
    directory: Callable[[], Location]
    writes_checkpoints: bool
    about: Callable[[], dict[str, Any]]
    announce: Callable[[Location], Any]
    save_logs: Callable[[], Callable[[], None]]
    say: Callable[[str], None]
    saver: Saver
    account: TimeAccount
    forward_backward: Callable[[Window], None]
    step: Callable[[Window], None]
    frozen: frozenset[str] = frozenset()
    captured: CapturedSteps | None = None
    id: str = ""
