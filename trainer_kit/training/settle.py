"""Settles requests between two steps: flush, validate, save, stop. Callbacks make requests; the loop acts here.

Every rank settles at the same step.
"""

from __future__ import annotations

import signal
import time

from trainer_kit.core.errors import ConfigurationError, DataError, RankError
from trainer_kit.core.seed import preserved_rng
from trainer_kit.metrics.entry import Reduced
from trainer_kit.state.saving import check_finite, save_requested, settle_save
from trainer_kit.step.evaluate import evaluate
from trainer_kit.step.requests import ended_by, requeue_once
from trainer_kit.step.run import Fit
from trainer_kit.step.schedule import LONGEST

__all__ = [
    "check_trained",
    "continues",
    "epoch_is_over",
    "next_due",
    "settle_end",
    "settle_epoch",
    "settle_resume",
    "settle_rewind",
    "settle_step",
    "settle_stop",
    "validate",
]


def settle_step(run: Fit) -> bool:
    """Carry out the actions that are due after this step. Returns whether to leave the epoch."""
    progress, schedule, requests = run.progress, run.schedule, run.requests
    _pass_time(run)
    agrees = schedule.agrees(progress)
    listens = agrees or progress.step >= run.listen_at
    if agrees:
        _unite(run)
    elif listens:
        _listen(run)
    if run.guard is not None and (
        agrees or schedule.flushes(progress) or schedule.owes_validation(progress)
    ):
        check_finite(run)  # before values of a step that may be skipped are published
    if schedule.flushes(progress):
        run.publish(
            run.metrics.flush_step(run.micro.batch is not None).logger, progress.step
        )
        check_finite(run)
    elif (
        agrees and progress.step - run.finite >= LONGEST
    ):  # bounds the number of stored losses
        check_finite(run)
    asked = agrees and requests.validation is not None and run.validation is not None
    if schedule.validation_due(progress) or asked:
        validate(run)
        _unite(run)
        agrees = True
    _advance_waiting(run)
    if schedule.intervals:
        _act(run, listens)
    over = schedule.epoch_is_over(progress)
    # At the end of an epoch a stop waits until the epoch is counted: it may be the last one of `min_epochs`.
    leaves = schedule.finished(progress) is not None or (
        agrees and not over and _stops(run)
    )
    # A request with a path depends on progress alone, so every rank has it at this step without an agreement.
    # At the end of an epoch the checkpoint waits for the hooks and schedulers of that step. A run that leaves the epoch
    # early saves here: leaving reduces and resets the running sums that a resumed run needs.
    if (agrees or requests.named) and not over:
        save_requested(run)
    run.due = next_due(
        run
    )  # before the check for signals: the next signal sets it to 0
    if over and not schedule.length.certain:
        run.due = (
            progress.step + 1
        )  # if the epoch goes on, what was put off until its end is settled there
    if run.saver.ended and run.strategy.world.size == 1:
        run.wake()  # it ended after the check above
    if run.guard is not None and run.finite == progress.step and not (over or leaves):
        run.guard.hold(run)
    if listens:
        _leave_on_signal(run)
    return leaves


def epoch_is_over(run: Fit) -> bool:
    """Whether the epoch that is left after this step has no batch left. Every rank must call it."""
    if not run.schedule.epoch_is_over(run.progress):
        return False
    return run.schedule.length.certain or not run.windows.has_more()


def _act(run: Fit, together: bool) -> None:
    """Call the interval actions that are due; their time is not training time."""
    due = run.schedule.intervals_due(run.progress, together)
    for interval in due:
        interval.act()
    if due:
        _pass_time(run, count=False)


def _advance_waiting(run: Fit) -> None:
    """Advance the schedulers that wait for values of this step, unless a validation at the end of the epoch follows.

    In an epoch of unknown length it may follow any step: there they advance at the end, or before the next step.
    """
    schedule, progress = run.schedule, run.progress
    may_be_last = not schedule.length.certain or schedule.epoch_is_over(progress)
    if run.stepper.waiting and not (
        may_be_last and schedule.validates_at_epoch_end(progress)
    ):
        run.stepper.advance_waiting()


def settle_rewind(run: Fit) -> None:
    """Restore a state that the guard of this run holds. Every rank must call it."""
    assert run.guard is not None
    settle_save(run)
    run.guard.rewind(run)


def settle_resume(run: Fit) -> bool:
    """Run a validation that was still due when the checkpoint was saved. Returns whether to leave the epoch."""
    if not run.owes_validation or run.validation is None:
        _advance_waiting(run)
        return False
    run.owes_validation = False
    validate(run)
    _unite(run)
    _advance_waiting(run)
    if run.schedule.epoch_is_over(run.progress):
        return False
    leaves = _stops(run)
    save_requested(run)
    return leaves


def settle_epoch(run: Fit, completed: bool) -> bool:
    """Carry out the actions that are due when an epoch, or the run, ends. Returns whether to train another epoch."""
    progress, schedule, bus = run.progress, run.schedule, run.bus
    run.whole = completed
    run.metrics.leave_batch()
    _pass_time(run)
    check_finite(run)
    if (
        completed
        and schedule.validates_at_epoch_end(progress)
        and run.validated != progress.step
    ):
        validate(run)
    ran = run.micro.index >= 0
    empty = (
        completed and not ran and progress.epoch_batch == 0
    )  # every later epoch would be empty too
    run.metrics.suspend()
    reduced = run.metrics.flush_epoch(
        ran
    )  # before the hooks, which read it; what they log is reduced below
    for listeners in (bus.on_train_epoch_end, bus.on_train_epoch_end_late):
        for hook in listeners:
            hook()
        if (
            listeners or run.strategy.reports.size > 1
        ):  # listeners may differ between ranks
            reduced.add(run.metrics.flush_epoch(ran))
        run.publish(reduced.logger, progress.step)
        reduced = Reduced()
    if ran and run.micro.loss is None and run.micro.skipped:
        run.say(
            "nothing was trained: no training_step of this epoch returned a loss (is `return loss` missing?)"
        )
    check_trained(run, over=False)
    run.stepper.advance_waiting()
    if completed:
        run.stepper.end_epoch(progress.epoch + 1)
        progress.epoch += 1
        progress.epoch_batch = 0
    run.metrics.end_epoch(completed)
    _unite(run)
    if run.requests.validation is not None:  # requested by a hook of the epoch
        if run.validation is not None and run.validated != progress.step:
            validate(run)
            _unite(run)
        run.requests.validation = None
    save_requested(run)
    _leave_on_signal(run)
    if empty and progress.batch == 0:
        raise _no_batch(run)
    if empty:
        run.say("the training loader returned no batch: training ends here")
    return schedule.finished(progress) is None and not _stops(run) and not empty


def settle_stop(run: Fit) -> None:
    """Print the stop request that ended training; drop a request whose minimum was not reached."""
    requests = run.requests
    if not run.schedule.may_stop(run.progress):
        requests.stop = None  # a limit came first
    if requests.stop is not None:
        run.say(f"stopped after step {run.progress.step}: {requests.stop}")


def check_trained(run: Fit, over: bool) -> None:
    """Raise `ConfigurationError` if no step has had a gradient on any rank. Every rank must call it.

    Args:
        run: the fit.
        over: whether training has ended; until then, a resumed or partial epoch may have returned no loss yet.
    """
    if run.trained or not run.stepper.made.optimizers:
        return
    trained, skipped = run.stepper.trained, run.micro.skipped
    rows = run.strategy.world.agree([trained is True, trained is not None, skipped])
    had, stepped, without = (max(column) for column in zip(*rows, strict=True))
    run.trained = bool(had)
    if had:
        return
    if stepped:
        names = ", ".join(
            type(optimizer).__name__ for optimizer in run.stepper.made.optimizers
        )
        raise ConfigurationError(
            "nothing was trained: no parameter received a gradient",
            found=f"{run.progress.step} steps, and no parameter of {names} has ever had a gradient",
            fix="compute the loss from parameters of the optimizer; an overridden backward or optimizer_step must"
            " not drop gradients before the step",
        )
    if without and (over or (run.whole and not run.resumed)):
        raise ConfigurationError(
            "nothing was trained: no training_step returned a loss",
            found=f"{int(without)} times None",
            fix="return the loss, or set automatic_optimization = False if the module steps the optimizers; without"
            " anything to step, return None from configure_optimizers",
        )


def settle_end(run: Fit) -> None:
    """Save the checkpoints that the last hooks of any rank requested."""
    _unite(run)
    save_requested(run, last=True)


def next_due(run: Fit) -> int:
    """The next step at which `settle_step` has something to do."""
    schedule, progress = run.schedule, run.progress
    due = min(
        schedule.due(progress, run.windows.length),
        max(run.listen_at, progress.step + 1),
    )
    if (
        run.requests.stop is not None and progress.step < schedule.min_steps
    ):  # the request waits until that step
        return min(due, schedule.min_steps)
    return due


def continues(run: Fit) -> bool:
    """Whether training starts: no limit is reached, and no stop request is granted before the first step."""
    _unite(run)
    reached = run.schedule.finished(run.progress)
    empty = run.windows.feed.length == 0 and run.schedule.length.expected == 0
    if reached is not None and empty and run.progress.batch == 0:
        raise _no_batch(run)
    if reached is not None:
        run.say(f"nothing to train: {reached}")
    return reached is None and not _stops(run)


def _no_batch(run: Fit) -> DataError:
    return DataError(
        "the training loader returned no batch",
        found=run.windows.feed.describe(),
        fix="pass a loader with data; drop_last=True drops the only batch of a dataset that is smaller than a batch",
    )


def validate(run: Fit) -> None:
    """Run validation, without an effect on the training that follows."""
    assert run.validation is not None
    run.requests.validation = None
    run.validated = run.progress.step
    run.module.on_validation_model_zero_grad()
    try:
        with (
            preserved_rng(run.strategy.device),
            run.strategy.shared_buffers(run.module),
        ):
            reduced = evaluate(run.validation, run.progress.epoch)
    except BaseException:
        run.owes_validation = True  # a run that resumes from here has no values of it
        raise
    run.publish(reduced.logger, run.progress.step)
    _pass_time(run, count=False)


def _pass_time(run: Fit, count: bool = True) -> None:
    now = time.monotonic()
    if count:
        run.elapsed += now - run.since
        if run.strategy.world.size == 1:
            _count_time(run, run.elapsed)
    run.since = now


def _count_time(run: Fit, seconds: float) -> None:
    run.progress.seconds += seconds
    run.elapsed = 0.0


def _unite(run: Fit) -> None:
    """Exchange requests and elapsed time, so that every rank has the requests of all and the same time."""
    world, requests = run.strategy.world, run.requests
    if world.size == 1:
        if run.saver.ended:
            settle_save(run)
        return
    micro = run.micro
    rows = world.agree(
        [
            *requests.pending,
            micro.skipped,
            micro.padded,
            run.saver.ended,
            run.elapsed,
            _pace(run),
        ]
    )
    stops, validations, signals, saves, skipped, padding, saved, elapsed, _ = map(
        list, zip(*rows, strict=True)
    )
    run.listen_at = run.progress.step + int(rows[0][-1])
    _count_time(run, max(elapsed))
    # A rank that ran a padding batch may count it as skipped.
    if max(skipped) > min(map(sum, zip(skipped, padding, strict=True))):
        raise RankError(
            "training_step returned None on some ranks only",
            found=", ".join(
                f"rank {rank}: {int(n)} times" for rank, n in enumerate(skipped)
            ),
            fix="return None on all ranks or on none; a loss of zero has the same effect",
        )
    # Signals that arrive after this wait for the next agreement.
    requests.leaving = int(max(signals))
    if any(stops) or any(validations):
        reasons = world.all_gather_object((requests.stop, requests.validation))
        requests.stop = next((stop for stop, _ in reasons if stop), None)
        requests.validation = next(
            (validation for _, validation in reasons if validation), None
        )
    if any(saved):
        settle_save(run)
    if any(saves) and not requests.checkpoints:
        requests.checkpoints.append(("requested by another rank", None))


def _listen(run: Fit) -> None:
    """Exchange signals and elapsed time between two agreements, which may be far apart if steps are slow."""
    rows = run.strategy.world.agree([run.requests.signal, run.elapsed, _pace(run)])
    run.requests.leaving = int(max(row[0] for row in rows))
    _count_time(run, max(row[1] for row in rows))
    run.listen_at = run.progress.step + int(rows[0][2])


def _pace(run: Fit) -> int:
    """Steps per second, at least 1 and at most the interval of agreements; rank 0's value is used."""
    now, step = time.monotonic(), run.progress.step
    steps, seconds = step - run.paced[0], now - run.paced[1]
    run.paced = (step, now)
    return max(1, min(run.schedule.agree_every, int(steps / max(seconds, 1e-6))))


def _stops(run: Fit) -> bool:
    """Whether a stop request is granted; before ``min_epochs`` and ``min_steps`` it waits."""
    reason, schedule = run.requests.stop, run.schedule
    if reason is None:
        return False
    if schedule.may_stop(run.progress):
        return True
    if not run.deferred:
        run.deferred = True
        minimums = {"min_epochs": schedule.min_epochs, "min_steps": schedule.min_steps}
        minimum = " and ".join(
            f"{name}={value}" for name, value in minimums.items() if value
        )
        run.say(
            f"stop requested at step {run.progress.step}: {reason}; training continues until {minimum}"
        )
    return False


def _leave_on_signal(run: Fit) -> None:
    """Save and end the run after a signal; with several ranks, once they have agreed on it."""
    number, step = (
        run.requests.signal if run.strategy.world.size == 1 else run.requests.leaving,
        run.progress.step,
    )
    if not number:
        return
    name = signal.Signals(number).name
    run.requests.signal = number
    saved = "nothing to save"
    if run.checkpoints:
        began = time.monotonic()
        run.requests.ask_checkpoint(name, None)
        done = save_requested(run, last=True)
        seconds = time.monotonic() - began
        saved = (
            f"saved step {step} in {seconds:.1f} s"
            if done
            else f"step {step} could not be saved"
        )
        if run.strategy.world.rank == 0:
            saved = ", ".join(filter(None, [saved, requeue_once(run.requests)]))
        run.strategy.world.barrier()  # every rank waits until SLURM has answered rank 0
    leaving = (
        "KeyboardInterrupt" if number == signal.SIGINT else f"exiting {128 + number}"
    )
    run.say(f"{name}: {saved}, {leaving}")
    raise ended_by(number)
