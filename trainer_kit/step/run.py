"""One fit, composed: everything the loop and its settling touch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainer_kit.core.location import Location
from trainer_kit.core.progress import Progress
from trainer_kit.metrics.metrics import Metrics
from trainer_kit.precision.precision import Precision
from trainer_kit.step.accumulation_window import WindowLoader
from trainer_kit.step.bus import Bus
from trainer_kit.step.evaluate import Evaluation
from trainer_kit.step.manual import ManualStepper
from trainer_kit.step.micro_batch import MicroBatches
from trainer_kit.step.optimize import Stepper
from trainer_kit.step.requests import Requests
from trainer_kit.step.saver import Saver
from trainer_kit.step.schedule import Schedule
from trainer_kit.strategies.strategy import Strategy

__all__ = ["Fit"]


@dataclass(slots=True)
class Fit:
    """What the loop works on.

    Attributes:
        due: the step at which `settle_step` has something to do; the loop compares one integer.
        publish: hands values to the loggers, with the step they belong to.
        collect: the whole state of the run, or of the weights alone.
        directory: where checkpoints go that nobody gave a path; asked for when one is due.
        checkpoints: whether this run writes checkpoints at all.
        about: what every checkpoint says of this run, besides its state.
        announce: tells the loggers of a checkpoint.
        say: prints.
        saver: the save under way.
        listen_at: the step at which several ranks look for signals and the time; chosen by pace, so for nothing else.
        paced: step and monotonic seconds of the last such look.
        validated: the step at which validation ran last.
        owes_validation: whether the checkpoint was taken ahead of the validation of its step.
        since: monotonic seconds up to which time was taken.
        elapsed: seconds taken that are not in ``progress.seconds`` yet: several ranks count only what they agreed on.
        finite: step up to which losses were looked at.
        resumed: whether it goes on from a checkpoint.
        frozen: names of the parameters that were not trained when the run was composed.
        whole: whether the epoch that ended last was left because its batches were over.
        deferred: whether the line about a stop request ahead of the minimum was printed.
        trained: whether a step is known to have had a gradient on any rank.
        id: in the info of its checkpoints; "" where the run has no record.
    """

    module: Any
    bus: Bus
    metrics: Metrics
    progress: Progress
    strategy: Strategy
    precision: Precision
    micro: MicroBatches
    windows: WindowLoader
    stepper: Stepper | ManualStepper
    schedule: Schedule
    requests: Requests
    validation: Evaluation | None
    publish: Callable[[Mapping[str, float], int], None]
    collect: Callable[[bool], dict[str, Any]]
    directory: Callable[[], Location]
    checkpoints: bool
    about: Callable[[], dict[str, Any]]
    announce: Callable[[Location], None]
    say: Callable[[str], None]
    saver: Saver
    due: int = 0
    listen_at: int = 2**62
    paced: tuple[int, float] = (0, 0.0)
    validated: int = -1
    owes_validation: bool = False
    since: float = 0.0
    elapsed: float = 0.0
    finite: int = 0
    resumed: bool = False
    frozen: frozenset[str] = frozenset()
    whole: bool = False
    deferred: bool = False
    trained: bool = False
    id: str = ""

    def wake(self) -> None:
        """Settle at the end of this step."""
        self.due = 0
