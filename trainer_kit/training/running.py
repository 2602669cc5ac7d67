"""The entry point that a Trainer runs, and what the last one has left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, final

from trainer_kit.core.states import RunningStage, TrainerFn, TrainerState, TrainerStatus
from trainer_kit.core.types import Loaders
from trainer_kit.state.resume import Source
from trainer_kit.step.evaluate import Evaluation
from trainer_kit.step.run import Fit
from trainer_kit.training.settle import Settler

__all__ = ["Running", "nothing"]

_Step: TypeAlias = Callable[..., Any]
_Compiler: TypeAlias = Callable[[_Step], _Step]


def nothing(*arguments: object) -> None:
    """Do nothing; the default of optional callables."""


@final
class Running:
    """The entry point that runs, or ran last; it changes in these methods alone.

    Attributes:
        stage: fit, validate, test or predict; empty between entry points.
        last_stage: the same, also between entry points.
        status: of that entry point.
        restored_from: the checkpoint that it has loaded, or None.
        sanity_checking: whether a few validation batches run before training.
        compiler: compiles ``training_step`` as the user has compiled the module, or None.
        find_train_loaders: finds the training loaders of the fit that is being set up.
        fit: the running or last fit, when it is composed.
        settler: of that fit.
        evaluation: the running validation, test or prediction, when it is composed.
    """

    def __init__(self) -> None:
        self.stage = ""
        self.last_stage = ""
        self.status = TrainerStatus.INITIALIZING
        self.restored_from: str | None = None
        self.sanity_checking = False
        self.compiler: _Compiler | None = None
        self.find_train_loaders: Callable[[], Loaders | None] = nothing
        self.fit: Fit | None = None
        self.settler: Settler | None = None
        self.evaluation: Evaluation | None = None

    def without_objects(self) -> Running:
        """A copy for another process: without the objects of a fit."""
        # A fit holds process groups, threads and buffers of this process, which another one cannot use.
        copied = Running()
        copied.last_stage, copied.status = self.last_stage, self.status
        copied.restored_from = self.restored_from
        copied.compiler = self.compiler
        return copied

    def begin(self, stage: str) -> None:
        """Begin an entry point."""
        self.stage = stage
        self.last_stage = stage
        self.status = TrainerStatus.RUNNING
        self.restored_from = None

    def end(self, error: BaseException | None) -> None:
        """End it; ``error`` ended it early."""
        # The fit stays: scripts read its counts, optimizers and callbacks after it, and the next one may continue it.
        self.stage = ""
        self.evaluation = None
        self.sanity_checking = False
        self.find_train_loaders = nothing
        if error is None:
            self.status = TrainerStatus.FINISHED

    def interrupt(self) -> None:
        """It ends by an exception."""
        self.status = TrainerStatus.INTERRUPTED

    def begin_elsewhere(self, stage: str) -> None:
        """Other processes run an entry point; it counts as interrupted until `take_result`."""
        self.last_stage = stage
        self.status = TrainerStatus.INTERRUPTED

    def take_result(self, restored_from: str | None) -> None:
        """Take over what other processes have finished."""
        self.status = TrainerStatus.FINISHED
        self.restored_from = restored_from

    def compile_with(self, compiler: _Compiler | None) -> None:
        """Compile ``training_step`` in this way."""
        self.compiler = compiler

    def load_train_with(self, find_loaders: Callable[[], Loaders | None]) -> None:
        """Get the training loaders of the fit from this function."""
        self.find_train_loaders = find_loaders

    def restore_from(self, source: Source | None) -> None:
        """Remember the checkpoint that is loaded."""
        self.restored_from = None
        if source is not None:
            self.restored_from = str(source.path)

    def run_fit(self, fit: Fit, settler: Settler) -> None:
        """The fit is composed."""
        self.fit = fit
        self.settler = settler

    def run_evaluation(self, evaluation: Evaluation) -> None:
        """The validation, test or prediction is composed."""
        self.evaluation = evaluation

    @property
    def epoch_is_whole(self) -> bool:
        """Whether the epoch that ended last is complete."""
        return self.settler is not None and self.settler.epoch_is_whole

    def seconds_of_run(self) -> dict[str, float]:
        """Seconds of the running or last fit by part, over its restarts; empty before the first fit."""
        if self.fit is None:
            return {}
        return self.fit.account.seconds_of_run()

    def trainer_state(self, evaluating: bool) -> TrainerState:
        """What the Trainer is doing, as Lightning's record; ``evaluating``: whether an evaluation loop runs."""
        function = None
        if self.last_stage:
            function = TrainerFn(self.last_stage)
        return TrainerState(self.status, function, self._running_stage(evaluating))

    def _running_stage(self, evaluating: bool) -> RunningStage | None:
        if not self.stage:
            return None
        if self.sanity_checking:
            return RunningStage.SANITY_CHECKING
        if self.stage != "fit":
            return RunningStage(self.stage)
        if evaluating:
            return RunningStage.VALIDATING
        return RunningStage.TRAINING

    @contextmanager
    def checking_sanity(self) -> Iterator[None]:
        """A context in which a few validation batches run before training."""
        self.sanity_checking = True
        # No `finally`: after an exception `end` resets it.
        yield
        self.sanity_checking = False
