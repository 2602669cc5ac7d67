"""The fit loop. One iteration is one optimizer step.

A step runs a window, steps the optimizers, counts, and then calls the hooks of its end: they see the updated weights
and the new count, as in Lightning. What is not of every step (logs, validation, checkpoints, a stop, signals) is done
in `Settler.settle_step`, at a step that is known beforehand: the loop compares one integer. So an unused feature costs
a step nothing, and the state is complete whenever anything reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainer_kit.core.seed import preserved_rng
from trainer_kit.state.saving import settle_save
from trainer_kit.step.early_exit import EarlyEpochExit
from trainer_kit.step.run import Fit, Rewind
from trainer_kit.training.settle import Settler

__all__ = ["fit"]


def fit(
    run: Fit, settler: Settler, reload_loaders: Callable[[], None] | None = None
) -> None:
    """Train until a limit is reached or a stop request is granted.

    Args:
        run: the composed fit.
        settler: carries out what is due between two steps.
        reload_loaders: called before each epoch; gets the loaders from the user again where they are due.
    """
    # Bound once: the loop below looks nothing up that does not change.
    bus, progress = run.bus, run.progress
    windows, stepper = run.windows, run.stepper
    forward_backward, step = run.forward_backward, run.step
    with _repeated_hooks(run, settler.resumed):
        for hook in bus.on_train_start:
            hook()
    continues = settler.starts_training()
    while continues:
        try:
            if reload_loaders is not None:
                reload_loaders()
            _begin_epoch(run, settler)
            # A resumed run is inside its epoch.
            with _repeated_hooks(run, progress.epoch_batch > 0):
                for hook in bus.on_train_epoch_start:
                    hook()
            enters_epoch = not settler.settle_resume()
            # Unless a step leaves it early, the loop below runs until the epoch has no batch left.
            is_complete = enters_epoch
            try:
                for window in windows.epoch(progress) if enters_epoch else ():
                    # The last step did not end an epoch of unknown length.
                    if stepper.waiting:
                        stepper.advance_waiting()
                    # Of each micro-batch: begin, training_step, backward, end.
                    forward_backward(window)
                    # Gradients are complete: hooks, clip, optimizers.
                    step(window)
                    progress.step += 1
                    # Schedulers, which see the new step.
                    if stepper.due_schedulers:
                        stepper.advance_due()
                    if window.batch is not None:
                        for hook in bus.on_train_batch_end:
                            hook(window.outputs, window.batch, window.index)
                    for hook in bus.on_train_step_end:
                        hook()
                    if progress.step >= settler.next_settle and settler.settle_step():
                        is_complete = settler.find_epoch_end()
                        break
            # A hook has left the epoch before its batch was trained on.
            except EarlyEpochExit:
                windows.window.abandon()
                is_complete = True
            continues = settler.settle_epoch(is_complete)
        # Around the epoch, because its end may find a bad loss, too. The loop continues from an earlier state.
        except Rewind:
            settler.settle_rewind()
    settler.settle_stop()
    settler.check_trained(over=True)
    # Every requested checkpoint exists before `on_train_end`, whose hooks may read it.
    settle_save(run)
    for hook in bus.on_train_end:
        hook()
    settler.settle_end()
    run.strategy.finish(run.module)


@contextmanager
def _repeated_hooks(run: Fit, resumed: bool) -> Iterator[None]:
    """Call start hooks again in a resumed run, without effect on random state and logs: the checkpoint has theirs."""
    if not resumed:
        yield
        return
    with preserved_rng(run.strategy.device), run.metrics.discarding_logs():
        yield


def _begin_epoch(run: Fit, settler: Settler) -> None:
    # The settler comes last: when something is due next follows from the intervals that the schedule has begun.
    run.metrics.proceed()
    run.schedule.start_epoch(run.progress)
    run.windows.start_epoch(run.schedule.steps_left(run.progress))
    settler.begin_epoch()
