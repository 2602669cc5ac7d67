"""Settles requests between two steps: flush, validate, save, stop. Callbacks make requests; the loop acts here.

Every rank enters the same exchanges in the same order. Whether it does is decided by three kinds of facts:

- What progress alone says (`trainer_kit.step.schedule`): limits, validations, flushes of logged values, the ends of
  epochs of a known length, and the steps at which ranks agree. Every rank knows these without asking.
- What the last agreement has brought (``_exchange_requests``, every 50 steps, and after each validation and epoch):
  requests of hooks, a save that has ended, seconds of training, skipped steps.
- What the last look at signals has brought (``_exchange_signals``, about once a second in between): signals, seconds.
  They may end a run at any step, and a run with slow steps must not answer a batch system only after 50 of them.

A request or a signal of one rank wakes that rank alone (`Settler.wake`): it may enter `Settler.settle_step` where no
other rank does. What it knows alone decides nothing there, so it enters no exchange.

The order within a step follows from what reads what. A validation comes before the schedulers and checkpoints that read
its values. Everything that changes the state comes before the save. A signal comes last, because it ends the run with a
checkpoint of a complete step.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

from trainer_kit.core.display import plural
from trainer_kit.core.errors import (
    ConfigurationError,
    DataError,
    NonFiniteError,
    RankError,
)
from trainer_kit.core.progress import Progress
from trainer_kit.core.seed import preserved_rng
from trainer_kit.metrics.entry import Reduced
from trainer_kit.state.saving import (
    check_named_requests,
    save_requested,
    settle_save,
    unnamed_checkpoint,
)
from trainer_kit.step.evaluate import evaluate
from trainer_kit.step.requests import ended_by, requeue_once
from trainer_kit.step.run import Fit, StepGuard
from trainer_kit.step.schedule import LONGEST

__all__ = ["Settler"]

_NEVER: Final = 2**62
"""A step that no run reaches."""
_MAX_OVERFLOWS: Final = 20
"""Steps without one finite loss after which a run with gradient scaling ends, too."""
_ALL_FINITE: Final = (math.inf, math.inf, 0.0)
"""In the place of step, batch and value of a bad loss: there is none."""


@final
class _TrainingClock:
    """Measures the seconds of training that are not in ``progress.seconds`` yet.

    Several ranks count only time that they agreed on, so that limits in time end the run at the same step.
    """

    def __init__(self, progress: Progress, alone: bool) -> None:
        self._progress, self._alone = progress, alone
        self._read_at = 0.0
        self.uncounted = 0.0

    def start(self) -> None:
        """Measure from now on."""
        self._read_at = time.monotonic()

    def stop(self) -> None:
        """Measure up to now; one process counts it at once."""
        now = time.monotonic()
        self.uncounted += now - self._read_at
        self._read_at = now
        if self._alone:
            self.count(self.uncounted)

    def count(self, seconds: float) -> None:
        """Add the seconds that the ranks agreed on to the progress."""
        self._progress.seconds += seconds
        self.uncounted = 0.0


@final
class _Pace:
    """Measures how many steps pass in a second."""

    def __init__(self) -> None:
        self._step, self._time = 0, 0.0

    def steps_per_second(self, step: int) -> float:
        """The pace since the last call."""
        now = time.monotonic()
        steps, seconds = step - self._step, now - self._time
        self._step, self._time = step, now
        # Two looks may fall into one tick of the clock.
        return steps / max(seconds, 1e-6)


@final
class Settler:
    """Carries out what is due between two steps of a fit.

    Every rank must call each method at the same step, but for `wake` and the `settle_step` that follows it.

    Args:
        run: the fit.
        guard: finds and leaves out steps whose loss is not finite; None: such a step is an error.

    Attributes:
        next_settle: the step at which `settle_step` has something to do; the loop compares one integer.
        resumed: whether the run continues from a checkpoint.
        epoch_is_whole: whether the epoch that ended last was left because its batches were over.
    """

    def __init__(self, run: Fit, guard: StepGuard | None = None) -> None:
        self.run, self.guard = run, guard
        self.next_settle = 0
        self.resumed = False
        # A validation that the checkpoint owed, or that an exception has ended: the schedule does not know of it.
        self._lacks_validation = False
        self.epoch_is_whole = False
        self._clock = _TrainingClock(run.progress, run.strategy.world.size == 1)
        self._pace = _Pace()
        # Of several ranks, the step of the next look at signals, which rank 0's pace decides for all of them.
        self._exchanges_signals_at = _NEVER
        # Of several ranks, what the last exchange brought. Later requests of one rank must wait for the next exchange.
        self._agreed_stop: str | None = None
        self._agreed_validation = False
        self._agreed_save = False
        # A step is validated once, although an interval, a request and the end of the epoch may all ask for it.
        self._validated_at = -1
        # The losses up to this step were looked at.
        self._checked_until = 0
        # A stop request that waits for a minimum is printed once.
        self._stop_is_deferred = False
        # Whether a step is known to have had a gradient on any rank.
        self._has_trained = False

    # -- what the rest of the fit calls ------------------------------------------------------------------------

    def wake(self) -> None:
        """Settle at the end of this step."""
        # Called by signal handlers and other threads, too: one assignment, which nothing can interrupt half-way.
        self.next_settle = 0

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Take over what a restored state says about its step; a state of weights alone says nothing."""
        if "optimizer_states" not in state:
            return
        self._checked_until = self.run.progress.step
        self.resumed = True
        self._lacks_validation = state.get("owes_validation") is True

    @property
    def owes_validation(self) -> bool:
        """Whether a run that resumes from the state of this step must validate before it trains."""
        return self._lacks_validation or self.run.schedule.validation_is_due(
            self.run.progress
        )

    def release_guard(self) -> None:
        """A step that is not finite is an error from here on: the run ends, and goes back to no earlier state."""
        self.guard = None

    # -- the loop ------------------------------------------------------------------------------------------------

    def starts_training(self) -> bool:
        """Whether training starts: no limit is reached, and no stop request is granted before the first step."""
        run = self.run
        # Hooks of the start may have requested a stop, on some ranks only.
        self._exchange_requests()
        limit = run.schedule.finished(run.progress)
        if limit is None:
            run.account.begin_training()
            return not self._grants_stop()
        is_empty = run.windows.feed.length == 0 and run.schedule.length.expected == 0
        if is_empty and run.progress.batch == 0:
            raise _no_batch(run)
        run.say(f"nothing to train: {limit}")
        return False

    def begin_epoch(self) -> None:
        """Start the clock, and look for the first step at which something is due."""
        self._clock.start()
        # Requests made between the epochs are settled after the first step.
        self.next_settle = self._find_next_settle()
        if any(self.run.requests.pending.values()):
            self.wake()
        if self.guard is not None:
            self.guard.hold(self.run, self.owes_validation)

    def settle_resume(self) -> bool:
        """Run a validation that was still due when the checkpoint was saved. Returns whether to leave the epoch."""
        run = self.run
        # In the order of `settle_step`: validation, schedulers, stop, checkpoint.
        if not self._lacks_validation or not run.validation.feeds:
            # Without data for it this run owes none, and neither do its checkpoints.
            self._lacks_validation = False
            self._advance_waiting()
            return False
        self._lacks_validation = False
        self._validate()
        self._exchange_requests()
        self._advance_waiting()
        # `settle_epoch` follows at once, and grants a stop when the epoch is counted.
        if run.schedule.epoch_is_over(run.progress):
            return False
        leaves = self._grants_stop()
        self.save_requested()
        return leaves

    def settle_step(self) -> bool:
        """Carry out the actions that are due after this step. Returns whether to leave the epoch."""
        run = self.run
        progress, schedule = run.progress, run.schedule
        self._clock.stop()
        run.account.mark()
        # Every rank computes this from progress alone, so all of them enter the same exchanges below. What one rank
        # alone knows (its signal, its request) counts only after an exchange.
        agrees = schedule.agrees(progress)
        exchanges_signals = agrees or progress.step >= self._exchanges_signals_at
        if agrees:
            self._exchange_requests()
        elif exchanges_signals:
            self._exchange_signals()
        self._flush_step(agrees)
        is_requested = agrees and self._validation_is_requested()
        if schedule.take_due_validation(progress) or (
            is_requested and run.validation.feeds
        ):
            self._validate()
            # Hooks of the validation may request a stop or a checkpoint of this very step.
            self._exchange_requests()
            agrees = True
        if run.stepper.waiting:
            self._advance_waiting()
        if schedule.intervals:
            self._run_intervals(exchanges_signals)
        is_last = schedule.epoch_is_over(progress)
        leaves = schedule.finished(progress) is not None
        # At the end of an epoch a stop waits until the epoch is counted: it may be the last one of `min_epochs`.
        if not leaves and agrees and not is_last:
            leaves = self._grants_stop()
        # Before the save and the check for signals below: a request or a signal that arrives in between sets it to 0,
        # which must not be lost.
        self.next_settle = self._find_next_settle()
        if is_last and not schedule.length.certain:
            # If the epoch goes on, what was put off until its end is settled at the next step; of several ranks a stop
            # and a checkpoint without a path wait for their next agreement.
            self.next_settle = progress.step + 1
        # Every rank makes a request with a path at the same step (the contract of `CheckpointRequest`), so all of them
        # have it here without an agreement.
        # At the end of an epoch the checkpoint waits for the hooks and schedulers of that step. A run that leaves the
        # epoch early saves here: leaving reduces and resets the running sums that a resumed run needs.
        if run.requests.checkpoints and (agrees or run.requests.named) and not is_last:
            self.save_requested()
        # The save in flight ended after the check above; its thread has woken the loop before `next_settle` was set.
        if run.saver.ended and run.strategy.world.size == 1:
            self.wake()
        # Only a state whose losses are known to be finite is worth going back to.
        is_checked = self._checked_until == progress.step
        if self.guard is not None and is_checked and not is_last and not leaves:
            self.guard.hold(run, self.owes_validation)
        # Not where a validation has set `agrees`: a signal that its exchange has brought acts at the next look. That is
        # near, because steps seem slow after a validation.
        if exchanges_signals:
            self._leave_on_signal()
        return leaves

    def find_epoch_end(self) -> bool:
        """Whether the epoch that is left after this step has no batch left.

        Every rank must call it: in an epoch of unknown length it reads one more batch, and the ranks agree.
        """
        run = self.run
        if not run.schedule.epoch_is_over(run.progress):
            return False
        return run.schedule.length.certain or not run.windows.has_more()

    def settle_rewind(self) -> None:
        """Restore a state that the guard of this run holds."""
        assert self.guard is not None
        settle_save(self.run)
        state = self.guard.rewind(self.run)
        self._validated_at = -1
        self.continue_from(state)

    def settle_epoch(self, completed: bool) -> bool:
        """Carry out what is due when an epoch, or the run, ends. Returns whether to train another epoch."""
        run = self.run
        progress, schedule = run.progress, run.schedule
        self.epoch_is_whole = completed
        run.metrics.leave_batch()
        self._clock.stop()
        # A validation, and the checkpoint that follows it, must not be of weights that a bad loss has spoiled.
        self.check_finite()
        # At an epoch that a limit or a stop has left early, the next run validates when the epoch is complete.
        validates = completed and schedule.validates_at_epoch_end(progress)
        if validates and self._validated_at != progress.step:
            self._validate()
        has_run = run.windows.window.index >= 0
        is_empty = completed and not has_run and progress.epoch_batch == 0
        self._end_epoch_hooks(has_run)
        runner = run.runner
        if has_run and runner.skipped and not runner.losses.has_returned_a_loss:
            run.say(
                "nothing was trained: no training_step of this epoch returned a loss (is `return loss` missing?)"
            )
        self.check_trained(over=False)
        # Schedulers that monitor a value have it now: the validation and the hooks of the epoch are over.
        run.stepper.advance_waiting()
        # An epoch that was left early is not counted: a run that resumes goes on inside it, with its sums.
        if completed:
            run.stepper.end_epoch(progress.epoch + 1)
            progress.epoch += 1
            progress.epoch_batch = 0
        run.metrics.end_epoch(completed)
        # Only now, when the epoch is counted: a checkpoint that is saved here resumes in the next epoch.
        self._exchange_requests()
        self._validate_on_request()
        self.save_requested()
        self._leave_on_signal()
        # Every later epoch would be empty too.
        if is_empty:
            if progress.batch == 0:
                raise _no_batch(run)
            run.say("the training loader returned no batch: training ends here")
            return False
        return schedule.finished(progress) is None and not self._grants_stop()

    def settle_stop(self) -> None:
        """Print the stop request that ended training; drop a request whose minimum was not reached."""
        run, requests = self.run, self.run.requests
        run.account.end_training()
        # A limit came first: the record of the run must not name a request that was not granted.
        if not run.schedule.may_stop(run.progress):
            requests.drop_stop()
        if requests.stop is not None:
            run.say(f"stopped after step {run.progress.step}: {requests.stop}")
        if self.guard is not None:
            # No state is held at the last step, where a search otherwise ends.
            self.guard.end_search(run)

    def settle_end(self) -> None:
        """Save the checkpoints that the last hooks of any rank requested."""
        self._exchange_requests()
        self.save_requested(last=True)

    def save_requested(self, last: bool = False) -> bool:
        """Save one state for all checkpoint requests of this step; see `trainer_kit.state.saving.save_requested`."""
        run, requests = self.run, self.run.requests
        is_agreed = self._agreed_save or run.strategy.world.size == 1
        if requests.named or (is_agreed and requests.unnamed):
            # A run that went to NaN must not overwrite its last good checkpoint.
            self.check_finite()
            return save_requested(run, last, self.guard)
        if last:
            return settle_save(run)
        return True

    # -- checks --------------------------------------------------------------------------------------------------

    def check_finite(self) -> None:
        """Check the losses since the last check, on all ranks; raise where one is NaN or infinite."""
        run, world = self.run, self.run.strategy.world
        # Steps up to here are equal on every rank, so that all enter the agreement below or none does.
        step, checked = run.progress.step, self._checked_until
        if step == checked:
            return
        # The scaler skips overflowed steps and adapts the scale: too early to judge.
        if run.precision.scales and step - checked < _MAX_OVERFLOWS:
            return
        self._checked_until = step
        rows = [list(run.runner.losses.take_first_bad() or _ALL_FINITE)]
        if world.size > 1:
            rows = world.agree(rows[0])
        first = min(rows)
        bad_step, bad_batch, value = first
        if bad_step == _ALL_FINITE[0]:
            return
        # Only the rank whose loss it is can name the batch.
        batch = run.windows.feed.name_batch(run.progress.epoch, int(bad_batch))
        bad_loss = f"{value} in {batch}"
        if world.size > 1:
            rank = rows.index(first)
            bad_loss = world.broadcast(f"{bad_loss}, on rank {rank}", rank)
        error = NonFiniteError(
            f"the loss is not finite at step {int(bad_step)}",
            found=bad_loss,
            fix="lower the learning rate or clip gradients; detect_anomaly=True names the operation,"
            " callbacks=[NaNGuard()] the parameter",
        )
        if self.guard is not None:
            # With a guard values are published right after a check (`_flush_step`), so none is later than it.
            self.guard.search(run, error, published=checked)
        raise error

    def check_trained(self, over: bool) -> None:
        """Raise `ConfigurationError` if no step has had a gradient on any rank.

        Args:
            over: whether training has ended; until then, a resumed or partial epoch may have returned no loss yet.
        """
        run = self.run
        optimizers = run.stepper.configured.optimizers
        if self._has_trained or not optimizers:
            return
        had_gradient, skipped = run.stepper.trained, run.runner.skipped
        # Of three kinds, because a rank without data may never have taken a step of its own.
        votes: list[float] = [had_gradient is True, had_gradient is not None, skipped]
        rows = run.strategy.world.agree(votes)
        any_gradient, any_step, most_skipped = (
            max(column) for column in zip(*rows, strict=True)
        )
        self._has_trained = bool(any_gradient)
        if self._has_trained:
            return
        if any_step:
            names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
            raise ConfigurationError(
                "nothing was trained: no parameter received a gradient",
                found=f"{plural(run.progress.step, 'step')}, and no parameter of {names} has ever had a gradient",
                fix="compute the loss from parameters of the optimizer; an overridden backward or optimizer_step must"
                " not drop gradients before the step",
            )
        if most_skipped and (over or (self.epoch_is_whole and not self.resumed)):
            raise ConfigurationError(
                "nothing was trained: no training_step returned a loss",
                found=f"{int(most_skipped)} times None",
                fix="return the loss, or set automatic_optimization = False if the module steps the optimizers; without"
                " anything to step, return None from configure_optimizers",
            )

    # -- actions -------------------------------------------------------------------------------------------------

    def _find_next_settle(self) -> int:
        """The next step at which `settle_step` has something to do."""
        run = self.run
        step, schedule = run.progress.step, run.schedule
        # The schedule looks ahead as far as the counts allow; signals need a look about once a second.
        next_look = max(self._exchanges_signals_at, step + 1)
        next_due = schedule.next_step_due(run.progress, run.windows.length)
        next_settle = min(next_due, next_look, run.account.next_border())
        if run.requests.stop is not None and step < schedule.min_steps:
            return min(
                next_settle, schedule.min_steps
            )  # the request waits until that step
        return next_settle

    def _publish(self, reduced: Reduced) -> None:
        """Hand values to the loggers, unless these steps run again and the loggers have their values."""
        step = self.run.progress.step
        if self.guard is None or self.guard.publishes(step):
            self.run.publish(reduced.logger, step)

    def _flush_step(self, agrees: bool) -> None:
        """Reduce and publish the logged values of this step, and check the losses, where they are due."""
        run, schedule = self.run, self.run.schedule
        flushes = schedule.flushes(run.progress)
        # With a guard before the values are published: it may leave this step out.
        if self.guard is not None and (
            agrees or flushes or schedule.validation_is_due(run.progress)
        ):
            self.check_finite()
        # Without one afterwards: the flush has waited for the device, so that reading the losses costs no other wait.
        # Where nothing is flushed, often enough to bound the number of stored losses.
        if flushes:
            self._publish(run.metrics.flush_step(run.windows.window.batch is not None))
            self.check_finite()
        elif agrees and run.progress.step - self._checked_until >= LONGEST:
            self.check_finite()

    def _validate(self) -> None:
        """Run validation, without an effect on the training that follows."""
        run = self.run
        run.requests.drop_validation()
        self._validated_at = run.progress.step
        run.module.on_validation_model_zero_grad()
        try:
            # Training draws the same numbers with and without a validation, and all ranks validate with one set of
            # buffers, of which batch norms otherwise have one for each rank.
            with (
                run.account.during("evaluation"),
                preserved_rng(run.strategy.device),
                run.strategy.shared_buffers(run.module),
            ):
                reduced = evaluate(run.validation, run.progress.epoch)
        except BaseException:
            # A run that resumes from a checkpoint of this step has no values of the validation.
            self._lacks_validation = True
            raise
        self._lacks_validation = False
        self._publish(reduced)
        # Validation is not training time. A wait for a checkpoint is: training itself needs it, and it is short where
        # checkpoints are written in the background.
        self._clock.start()

    def _validate_on_request(self) -> None:
        """Run the validation that a hook of the epoch requested."""
        run = self.run
        if not self._validation_is_requested():
            return
        if run.validation.feeds and self._validated_at != run.progress.step:
            self._validate()
            self._exchange_requests()
        run.requests.drop_validation()

    def _end_epoch_hooks(self, has_run: bool) -> None:
        """Call the hooks of the end of an epoch, and publish its values."""
        run = self.run
        run.metrics.suspend()
        # Before the hooks, which read the values. What hooks log is added; late listeners, which come after the others
        # have been added, see all of it.
        reduced = run.metrics.flush_epoch(has_run)
        for listeners in (run.bus.on_train_epoch_end, run.bus.on_train_epoch_end_late):
            for hook in listeners:
                hook()
            # Listeners may differ between ranks, and the flush is an exchange in which all take part.
            if listeners or run.strategy.reports.size > 1:
                reduced.add(run.metrics.flush_epoch(has_run))
            self._publish(reduced)
            reduced = Reduced()

    def _run_intervals(self, together: bool) -> None:
        """Call the interval actions that are due; their time is not training time."""
        due = self.run.schedule.intervals_due(self.run.progress, together)
        for interval in due:
            interval.act()
        if due:
            self._clock.start()

    def _advance_waiting(self) -> None:
        """Advance the schedulers that wait for values of this step, unless the epoch's validation follows.

        In an epoch of unknown length it may follow any step: there they advance at the end, or before the next step.
        """
        stepper, schedule = self.run.stepper, self.run.schedule
        progress = self.run.progress
        if not stepper.waiting:
            return
        may_be_last = not schedule.length.certain or schedule.epoch_is_over(progress)
        if may_be_last and schedule.validates_at_epoch_end(progress):
            return
        stepper.advance_waiting()

    # -- agreement of ranks --------------------------------------------------------------------------------------

    def _exchange_requests(self) -> None:
        """Let every rank know what the others know. Every rank must call it at the same step.

        The ranks agree on the requests of all of them, on a signal, on the elapsed time (the slowest rank's), and on
        the step of the next look at signals (rank 0's). They check that all of them skipped as many steps, and
        requested as many checkpoints with a path. A save that has ended on any of them is settled; one process does
        that alone.
        """
        run = self.run
        world, requests = run.strategy.world, run.requests
        runner = run.runner
        if world.size == 1:
            if run.saver.ended:
                settle_save(run)
            return
        # One exchange carries everything that ranks must know of each other, so that a step pays for one at most.
        row = {
            **requests.pending,
            "skipped": runner.skipped,
            "padded": runner.padded,
            "save_ended": run.saver.ended,
            "seconds": self._clock.uncounted,
            "steps_until_look": self._steps_until_look(),
        }
        rows = world.agree(list(row.values()))
        # By name, the numbers of all ranks.
        columns = dict(zip(row, zip(*rows, strict=True), strict=True))
        next_look = int(columns["steps_until_look"][0])
        self._exchanges_signals_at = run.progress.step + next_look
        # The slowest rank counts, so that a limit in time ends all ranks at this step.
        self._clock.count(max(columns["seconds"]))
        _check_skipped(columns["skipped"], columns["padded"])
        # Signals that arrive after this wait for the next agreement.
        requests.leave_on(int(max(columns["signal"])))
        if any(columns["stop"]) or any(columns["validation"]):
            # A second exchange, for text of any length, only where there is a request. Of several ranks the reason of
            # the first one counts, so that logs and reports of all ranks name the same.
            reasons = world.all_gather_object((requests.stop, requests.validation))
            stop = next((reason for reason, _ in reasons if reason), None)
            validation = next((reason for _, reason in reasons if reason), None)
            requests.take_of_all_ranks(stop, validation)
        # Before a save is settled: its hooks may request something on one rank alone.
        self._agreed_stop = requests.stop
        self._agreed_validation = requests.validation is not None
        self._agreed_save = any(columns["unnamed"])
        if any(columns["save_ended"]):
            settle_save(run)
        # Every rank takes part in a save, also those that did not request it.
        check_named_requests(columns["named"])
        if any(columns["unnamed"]) and not requests.unnamed:
            requests.checkpoints.append(("requested by another rank", None))

    def _exchange_signals(self) -> None:
        """Exchange signals and elapsed time between two agreements, which may be far apart if steps are slow."""
        run = self.run
        votes = [run.requests.signal, self._clock.uncounted, self._steps_until_look()]
        signals, seconds, looks = zip(*run.strategy.world.agree(votes), strict=True)
        run.requests.leave_on(int(max(signals)))
        self._clock.count(max(seconds))
        self._exchanges_signals_at = run.progress.step + int(looks[0])

    def _steps_until_look(self) -> int:
        """Steps of about a second, at most the interval of agreements; rank 0's number is used."""
        # Each rank measures its own pace; only a number that all use keeps their exchanges at the same step.
        steps = int(self._pace.steps_per_second(self.run.progress.step))
        return max(1, min(self.run.schedule.agree_every, steps))

    def _validation_is_requested(self) -> bool:
        """Whether to validate at this step; of several ranks, by their last exchange."""
        if self.run.strategy.world.size == 1:
            return self.run.requests.validation is not None
        return self._agreed_validation

    def _grants_stop(self) -> bool:
        """Whether a stop request is granted; before ``min_epochs`` and ``min_steps`` it waits."""
        run, schedule = self.run, self.run.schedule
        reason = self._agreed_stop
        if run.strategy.world.size == 1:
            reason = run.requests.stop
        if reason is None:
            return False
        if schedule.may_stop(run.progress):
            return True
        if not self._stop_is_deferred:
            self._stop_is_deferred = True
            minimums = {
                "min_epochs": schedule.min_epochs,
                "min_steps": schedule.min_steps,
            }
            minimum = " and ".join(
                f"{name}={value}" for name, value in minimums.items() if value
            )
            run.say(
                f"stop requested at step {run.progress.step}: {reason}; training continues until {minimum}"
            )
        return False

    def _leave_on_signal(self) -> None:
        """Save and end the run after a signal; with several ranks, once they have agreed on it."""
        run, requests = self.run, self.run.requests
        alone = run.strategy.world.size == 1
        number = requests.leaving
        if alone:
            number = requests.signal
        if not number:
            return
        # On every rank, also on those that got no signal: all of them end with the same exit code.
        requests.set_signal(number)
        name = signal.Signals(number).name
        outcome = "nothing to save"
        if run.writes_checkpoints:
            outcome = self._save_on_signal(name)
        # As a shell reports a process that a signal has ended.
        exit_code = f"exiting {128 + number}"
        if number == signal.SIGINT:
            exit_code = "KeyboardInterrupt"
        run.say(f"{name}: {outcome}, {exit_code}")
        if number == signal.SIGINT and run.writes_checkpoints:
            run.say(
                f'newest checkpoint: {unnamed_checkpoint(run)}; continue with fit(..., ckpt_path="last"), or run again'
                ' with Trainer(resume="auto")'
            )
        raise ended_by(number)

    def _save_on_signal(self, signal_name: str) -> str:
        """Save a checkpoint before the run ends; returns what to print."""
        run = self.run
        began = time.monotonic()
        # Saved as the last one: the process ends, so nothing may be left to a thread.
        run.requests.ask_checkpoint(signal_name, None)
        # Every rank requests it here: the ranks have agreed on the signal.
        self._agreed_save = True
        is_saved = self.save_requested(last=True)
        seconds = time.monotonic() - began
        outcome = f"step {run.progress.step} could not be saved"
        if is_saved:
            outcome = f"saved step {run.progress.step} in {seconds:.1f} s"
        if run.strategy.world.rank == 0:
            outcome = ", ".join(filter(None, [outcome, requeue_once(run.requests)]))
        run.strategy.world.barrier()  # every rank waits until SLURM has answered rank 0
        return outcome


def _check_skipped(skipped: Sequence[float], padded: Sequence[float]) -> None:
    """Raise `RankError` if a rank skipped more steps than another one can have skipped.

    A rank that lacked a micro-batch does not know whether the others skipped it: each one that it lacked may be one.

    Args:
        skipped: of each rank, how often ``training_step`` returned None.
        padded: of each rank, how many micro-batches it did not have.
    """
    possible = [
        skipped_steps + unknown_steps
        for skipped_steps, unknown_steps in zip(skipped, padded, strict=True)
    ]
    if max(skipped) <= min(possible):
        return
    raise RankError(
        "training_step returned None on some ranks only",
        found=", ".join(
            f"rank {rank}: {int(count)} times" for rank, count in enumerate(skipped)
        ),
        fix="return None on all ranks or on none; a loss of zero has the same effect",
    )


def _no_batch(run: Fit) -> DataError:
    return DataError(
        "the training loader returned no batch",
        found=run.windows.feed.describe(),
        fix="pass a loader with data; drop_last=True drops the only batch of a dataset that is smaller than a batch",
    )
