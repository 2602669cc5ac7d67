"""Makes the Session of a trial: a fit without side effects, on copies of the parts of a Trainer."""

from __future__ import annotations

import copy
from dataclasses import replace

from trainer_kit.precision.precision import Precision
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.training.composition_options import CompositionOptions
from trainer_kit.training.session import Session
from trainer_kit.training.settings import Settings

__all__ = ["trial_session"]


def trial_session(
    trainer: Session,
    settings: Settings,
    *,
    strategy: Strategy | None = None,
    precision: Precision | None = None,
    options: CompositionOptions | None = None,
    root: str | None = None,
) -> Session:
    """Return a silent Session of the Trainer's class, with no loggers, records, callbacks or counts.

    It prints nothing: neither messages of this library nor what user code passes to ``trainer.print``.

    Args:
        trainer: not changed.
        settings: the limits and intervals of the trial.
        strategy: by default a copy of the Trainer's, which uses the same processes, and its sharded alternative.
        precision: by default a copy of the Trainer's.
        options: by default the Trainer's.
        root: where a trial that writes checkpoints writes them; by default where the Trainer writes.
    """
    # A strategy and a precision hold the state of their fit (wrappers, scales), so a trial gets its own. The strategy's
    # copy is shallow: process groups cannot be copied.
    sharded_alternative = None
    if strategy is None:
        strategy = copy.copy(trainer.strategy)
        sharded_alternative = trainer.sharded_alternative
    if precision is None:
        precision = copy.deepcopy(trainer.precision_plugin)
    trial = object.__new__(type(trainer))
    # A subclass has attributes of its own. `copy.copy` would call `__getstate__`, which drops the running fit.
    vars(trial).update(vars(trainer))
    # This creates everything that the trial may change; what remains of the update is the subclass's.
    Session.__init__(
        trial,
        settings=settings,
        options=replace(options or trainer.options, is_silent=True),
        environment=trainer.environment,
        strategy=strategy,
        sharded_alternative=sharded_alternative,
        precision=precision,
        loggers=[],
        root=root or trainer.files.root,
        seed=trainer.files.seed,
        start=None,
        processes=trainer.processes,
        resume=None,
    )
    return trial
