"""The fit loop. One iteration is one optimizer step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from trainer_kit.core.seed import preserved_rng
from trainer_kit.state.saving import settle_save
from trainer_kit.step.micro_batch import EarlyEpochExit
from trainer_kit.step.run import Fit, Rewind
from trainer_kit.training.settle import (
    check_trained,
    continues,
    epoch_is_over,
    next_due,
    settle_end,
    settle_epoch,
    settle_resume,
    settle_rewind,
    settle_step,
    settle_stop,
)

__all__ = ["fit"]


def fit(run: Fit) -> None:
    """Train until a limit is reached or a stop request is granted."""
    bus, progress, micro, stepper, forward_backward = (
        run.bus,
        run.progress,
        run.micro,
        run.stepper,
        run.forward_backward,
    )
    with _repeated(run) if run.resumed else nullcontext():
        for hook in bus.on_train_start:
            hook()
    goes_on = continues(run)
    while goes_on:
        try:
            _begin_epoch(run)
            with (
                _repeated(run) if progress.epoch_batch else nullcontext()
            ):  # a resumed run is inside its epoch
                for hook in bus.on_train_epoch_start:
                    hook()
            completed = not settle_resume(run)
            try:
                for _ in (
                    run.windows.epoch(progress) if completed else ()
                ):  # k micro-batches
                    if stepper.waiting:  # the last step was not the end of an epoch whose length is unknown
                        stepper.advance_waiting()
                    forward_backward(
                        micro
                    )  # begin, training_step, backward, end of each
                    stepper.step()  # gradients are complete: hooks, clip, optimizers, schedulers
                    progress.step += 1
                    if micro.batch is not None:
                        for hook in bus.on_train_batch_end:
                            hook(micro.outputs, micro.batch, micro.index)
                    for hook in bus.on_train_step_end:
                        hook()
                    if progress.step >= run.due and settle_step(run):
                        completed = epoch_is_over(run)
                        break
            except EarlyEpochExit:
                micro.started = -1  # no window is open
            goes_on = settle_epoch(run, completed)
        except Rewind:
            settle_rewind(run)  # the loop continues from an earlier state
    settle_stop(run)
    check_trained(run, over=True)
    settle_save(run)  # every requested checkpoint exists before on_train_end
    for hook in bus.on_train_end:
        hook()
    settle_end(run)
    run.strategy.finish(run.module)


@contextmanager
def _repeated(run: Fit) -> Iterator[None]:
    """Call start hooks again in a resumed run, without effect on random state and logs: the checkpoint has theirs."""
    with preserved_rng(run.strategy.device), run.metrics.discarding_logs():
        yield


def _begin_epoch(run: Fit) -> None:
    if run.reload is not None:
        run.reload()
    run.micro.index = -1
    run.metrics.proceed()
    run.since = time.monotonic()
    run.schedule.start_epoch(run.progress)
    steps = run.schedule.steps_left(run.progress)
    run.windows.budget = None if steps is None else steps * run.windows.length
    # Requests made between the epochs are settled after the first step.
    run.due = 0 if any(run.requests.pending) else next_due(run)
    if run.guard is not None:
        run.guard.hold(run)
