"""Goes back to a state that the run holds in memory, to find the step that is not finite and to leave steps out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Final, final

from torch import Tensor, nn

from trainer_kit.checkpoint.encoding import decode, encode
from trainer_kit.core.errors import NonFiniteError, TrainerKitError
from trainer_kit.core.location import Location, locate
from trainer_kit.core.protocols import CheckpointRequest
from trainer_kit.core.tensors import are_finite, tensors_of
from trainer_kit.state.collect import SavedState, State
from trainer_kit.step.run import Fit, Rewind

__all__ = ["Guard"]

_SHARE: Final = 200
"""A state is held at most once in so many times the time that holding one takes: 0.5 % of a run."""
_Requests = list[tuple[str, CheckpointRequest | None]]
"""Reason and request of each checkpoint, as in `step.requests.Requests`."""


@final
@dataclass(frozen=True)
class _HeldState:
    """A state in memory.

    Attributes:
        step: completed optimizer steps in this state.
        tree: the encoded state without its tensors.
        tensors: of the state, by their names in ``tree``.
        undo: undoes the effects of later steps that no checkpoint holds.
        window_length: micro-batches per window.
        group_counts: how many parameter groups each optimizer has in this state.
    """

    step: int
    tree: object
    tensors: Mapping[str, Tensor]
    undo: Callable[[], None]
    window_length: int
    group_counts: list[int]

    def state(self) -> State:
        """A copy: optimizers keep the tensors that they are given, and change them."""
        tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        state: State = decode(self.tree, tensors)
        return state


@final
@dataclass
class _Rewrite:
    """A request to write a checkpoint again, whose state holds steps that are left out now."""

    path: Location
    weights_only: bool
    reason: str = "steps are left out"

    def saved(self, path: Location) -> None:
        """The callback that asked for it the first time has it in its records."""


@final
class Guard:
    """What a run does about a step that is not finite: see `callbacks.NaNGuard`.

    A good step pays nothing: losses are read where values are read anyway. Once one is not finite, the steps since the
    last held state run again, each with a look at its loss and its gradients.

    Args:
        collect: the state of the run without an effect on it, by whether it owes a validation; every rank must call
            it.
        restore: puts it back.
        remember: returns what undoes the effects of later steps that no checkpoint holds: see `remember_effects`.
        raises: raise at the step that is not finite; otherwise leave it out.
        back: how many steps before it are left out, too.
        max_skips: the error is raised once this many steps were not finite.
        left_out: is filled with the numbers of the steps that were not finite.

    Attributes:
        searching: whether steps run again, each with a look at it.
    """

    def __init__(
        self,
        collect: Callable[[bool], State],
        restore: Callable[[SavedState], None],
        remember: Callable[[], Callable[[], None]],
        *,
        raises: bool,
        back: int,
        max_skips: int,
        left_out: list[int],
    ) -> None:
        self._collect = collect
        self._restore = restore
        self._remember = remember
        self._raises = raises
        self._back = back
        self._max_skips = max_skips
        self._left_out = left_out
        self._states: list[_HeldState] = []
        # Monotonic seconds: what holding the newest state took, and when that was done.
        self._cost = 0.0
        self._held_at = 0.0
        # A search runs steps again up to `_until`, from a state that was held before `_first`.
        self._error: TrainerKitError | None = None
        self._until = 0
        self._first = 0
        self._found_step = False
        self._published = 0
        self._remove_listeners: Sequence[Callable[[], None]] = ()
        # Checkpoint requests and written checkpoints, by the step after which they were taken.
        self._requests: list[tuple[int, _Requests]] = []
        self._written: list[tuple[int, Mapping[str, bool]]] = []

    @property
    def searching(self) -> bool:
        return self._error is not None

    def hold(self, run: Fit, owes_validation: bool) -> None:
        """Hold the state after this step, if one is due. The losses up to it are finite. Every rank must call it."""
        step = run.progress.step
        self.end_search(run)
        if self.searching:
            # Until the search is over, the step to go back to before a bad one is not known.
            return
        # It is called again at the same step, for example after a rewind.
        if self._states and self._states[-1].step == step:
            return
        if not self._is_due(run):
            return
        if not self._states:
            # A checkpoint inside such a window knows the bad step that is to come.
            for bad_step in self._left_out:
                if bad_step > step:
                    first = max(step + 1, bad_step - self._back)
                    run.windows.leave_out(range(first, bad_step + 1))
        began = monotonic()
        self._drop_states_of_other_groups(run)
        self._states.append(self._copy_state(run, owes_validation))
        # One state must be older than all steps that may have to be left out.
        while len(self._states) > 1 and self._states[1].step <= step - self._back:
            self._states.pop(0)
        oldest = self._states[0].step
        self._written = [entry for entry in self._written if entry[0] > oldest]
        self._held_at = monotonic()
        self._cost = self._held_at - began

    def _is_due(self, run: Fit) -> bool:
        """Whether enough time has passed on any rank since the last state was held."""
        world = run.strategy.world
        is_due = (
            not self._states
            or monotonic() - self._held_at >= _SHARE * self._cost
            or self._states[-1].group_counts != _group_counts(run)
        )
        if world.size == 1:
            return is_due
        # Clocks differ between ranks, and collecting a state is collective: they must decide alike.
        return any(row[0] for row in world.agree([is_due]))

    def _drop_states_of_other_groups(self, run: Fit) -> None:
        """After a change of the parameter groups no state before it can be put back: see `search`."""
        group_counts = _group_counts(run)
        if self._states and self._states[-1].group_counts != group_counts:
            self._states.clear()

    def _copy_state(self, run: Fit, owes_validation: bool) -> _HeldState:
        state = self._collect(owes_validation)
        state.pop("buffers", None)  # each rank keeps its own
        is_sharded = run.strategy.sharded
        tensors: dict[str, Tensor] = {}
        tree = encode(state, tensors, sharded=is_sharded)
        # `encode` does not copy sharded tensors, and training changes them in place.
        if is_sharded:
            tensors = {
                name: tensor.detach().clone() for name, tensor in tensors.items()
            }
        return _HeldState(
            run.progress.step,
            tree,
            tensors,
            self._remember(),
            run.windows.length,
            _group_counts(run),
        )

    def note_checkpoints(self, step: int, paths: Mapping[str, bool]) -> None:
        """Note the checkpoints of this step: one inside a window that is left out later is written again."""
        self._written.append((step, paths))

    def search(self, run: Fit, error: NonFiniteError, published: int) -> None:
        """Go back to find the step of ``error``; returns only where that was done already, or is not possible.

        Args:
            run: the fit.
            error: about the first loss that is not finite.
            published: the step up to which the loggers have their values.
        """
        if self.searching or not self._states:
            return
        group_counts = _group_counts(run)
        # All states have the same number: see `hold`.
        if self._states[0].group_counts != group_counts:
            # The hook that has added a group would add it a second time.
            run.say(
                "NaNGuard cannot roll back: the number of parameter groups has changed since the saved state"
            )
            return
        step = run.progress.step
        # Until the bad step is known, `rewind` returns to the newest state: of those before `_first`.
        self._error = error
        self._until = step
        self._first = step
        self._found_step = False
        self._published = published
        # First: a callback that changes gradients would hide the parameter that was not finite.
        remove_check = run.bus.add_listener(
            "on_before_optimizer_step", lambda _: self._check_step(run), first=True
        )
        remove_repetition = run.bus.add_listener(
            "on_train_step_end", lambda: self._repeat_requests(run)
        )
        self._remove_listeners = (remove_check, remove_repetition)
        raise Rewind

    def publishes(self, step: int) -> bool:
        """Whether the loggers do not have the values of this step yet: the steps of a search run again."""
        return not self.searching or step > self._published

    def rewind(self, run: Fit) -> SavedState:
        """Put the newest held state before the steps to leave out back, and return it. Every rank must call it."""
        target = self._newest_before(self._first)
        # Later states hold steps that are left out now.
        del self._states[self._states.index(target) + 1 :]
        progress, requests = run.progress, run.requests
        metrics = run.metrics
        run.say(
            f"rolling back from step {progress.step} to step {target.step}: a loss or a gradient was not finite"
        )
        seconds = progress.seconds
        if requests.checkpoints:
            self._requests.append((progress.step, list(requests.checkpoints)))
        # Callbacks request a stop and a validation again in the steps that run again. Checkpoint callbacks are not
        # reset, so they do not: `_repeat_requests` requests their checkpoints.
        requests.forget_step()
        metrics_feed = metrics.feed
        metrics.forget()
        metrics.use_sizes_of(metrics_feed)
        for feed in (run.windows.feed, *run.validation.feeds):
            # Loaders have read ahead of the state that is restored.
            feed.loader_state.reopen()
        run.windows.set_length(target.window_length)
        run.windows.window.abandon()
        run.runner.losses.take()
        state = target.state()
        self._restore(state)
        target.undo()
        for parameter in run.module.parameters():
            # If no optimizer has it, nothing else drops its gradient.
            parameter.grad = None
        progress.seconds = seconds  # time passes in steps that run again, too
        return state

    def _newest_before(self, step: int) -> _HeldState:
        """The newest state before a step; the oldest one where all are later."""
        for state in reversed(self._states):
            if state.step < step:
                return state
        return self._states[0]

    def _repeat_requests(self, run: Fit) -> None:
        """Request the checkpoints of this step that were requested before the run went back."""
        step = run.progress.step
        for step_of_requests, requests in self._requests:
            if step_of_requests == step:
                for reason, request in requests:
                    run.requests.ask_checkpoint(reason, request)
        self._requests = [entry for entry in self._requests if entry[0] > step]

    def _check_step(self, run: Fit) -> None:
        """Before an optimizer steps: look at the loss and at the gradients of every rank."""
        world, step = run.strategy.world, run.progress.step + 1
        bad_loss = run.runner.losses.take_first_bad()
        bad_weights = [
            name for name, p in run.module.named_parameters() if not are_finite([p])
        ]
        bad_gradients = _bad_gradients(run.module)
        rows = world.agree([bad_loss is not None, len(bad_gradients), len(bad_weights)])
        loss_rank = _first_rank(rows, 0)
        gradient_rank = _first_rank(rows, 1)
        weight_rank = _first_rank(rows, 2)
        # Weights before the loss: with bad weights the loss is bad too, and the step before is the cause.
        if weight_rank is not None:
            bad_weight = next(iter(bad_weights), "")
            name = world.broadcast(bad_weight, weight_rank)
            problem = f"{name} is not finite after step {step - 1}"
            self._leave_out(run, step - 1, problem, "loss and gradients were finite")
        if loss_rank is not None:
            cause = self._describe_batches(run, bad_loss)
            if world.size > 1:
                cause = world.broadcast(f"{cause}, on rank {loss_rank}", loss_rank)
            self._leave_out(run, step, f"the loss is not finite at step {step}", cause)
        if gradient_rank is not None:
            # NaN moves backward through the model, so the last parameter had it first.
            bad_gradient = next(reversed(bad_gradients), "")
            name = world.broadcast(bad_gradient, gradient_rank)
            batches = self._describe_batches(run, None)
            # Gradients are summed already: a batch of any rank may be the cause.
            if world.size > 1:
                by_rank = enumerate(world.all_gather_object(batches))
                batches = "; ".join(f"rank {rank}: {text}" for rank, text in by_rank)
            count = int(rows[gradient_rank][1])
            cause = f"the loss is finite, {count} gradients are not; in {batches}"
            problem = f"the gradient of {name} is not finite at step {step}"
            self._leave_out(run, step, problem, cause)

    def _describe_batches(
        self,
        run: Fit,
        bad_loss: tuple[int, int, float] | None,
    ) -> str:
        """The batch of a loss that is not finite, on the rank that has it; else the batches of this window."""
        window, feed = run.windows.window, run.windows.feed
        epoch = run.progress.epoch
        if bad_loss is None:
            indices = range(window.first, window.first + window.count)
            return ", ".join(feed.name_batch(epoch, index) for index in indices)
        _, index, loss = bad_loss
        cause = ""
        if not are_finite(tensors_of(window.batch)):
            cause = ", which holds NaN or infinity itself"
        return f"{loss} in {feed.name_batch(epoch, index)}{cause}; every parameter is finite"

    def _leave_out(
        self,
        run: Fit,
        step: int,
        problem: str,
        cause: str,
    ) -> None:
        """Leave a step out and go back, or raise the error about it."""
        if self._raises or len(self._left_out) >= self._max_skips:
            raise self._final_error(problem, cause)
        self._found_step = True
        # The step that failed may be the same one again, which counts as one skip.
        if step not in self._left_out:
            self._left_out.append(step)
        # No earlier than the oldest kept state: steps before it can no longer be repeated.
        self._first = max(self._states[0].step + 1, step - self._back)
        run.windows.leave_out(range(self._first, step + 1))
        self._rewrite_checkpoints(run)
        steps = f"steps {self._first} to {step} are"
        if self._first == step:
            steps = f"step {step} is"
        limit = ""
        wanted_first = max(1, step - self._back)
        if wanted_first != self._first:
            limit = f", but not from step {wanted_first} on: no state before step {self._first - 1} was kept"
        run.say(f"{problem}: {cause}; {steps} left out{limit}")
        raise Rewind

    def _final_error(self, problem: str, cause: str) -> NonFiniteError:
        if self._left_out:
            cause += (
                f"; steps {', '.join(map(str, self._left_out))} were left out before"
            )
        fix = "lower the learning rate or clip gradients; detect_anomaly=True names the operation"
        if self._raises:
            fix += "; NaNGuard('skip') leaves such steps out"
        return NonFiniteError(problem, found=cause, fix=fix)

    def _rewrite_checkpoints(self, run: Fit) -> None:
        """Request the checkpoints again that hold steps of the window that is left out, where they still exist."""
        first = self._first
        stale = [entry for entry in self._written if entry[0] >= first]
        self._written = [entry for entry in self._written if entry[0] < first]
        existing: list[str] = []
        for _, paths in stale:
            existing += [path for path in paths if locate(path).exists()]
        # Storage may change in between: every rank must request the same checkpoints.
        existing = run.strategy.world.broadcast(existing)
        for step, paths in stale:
            requests: _Requests = []
            for path, weights_only in paths.items():
                if path in existing:
                    rewrite = _Rewrite(locate(path), weights_only)
                    requests.append(("left out", rewrite))
            self._requests.append((step, requests))

    def end_search(self, run: Fit) -> None:
        """Tell the result of a search once its steps have run again.

        Raises:
            NonFiniteError: the guard raises, and the steps were finite this time.
        """
        error = self._error
        if error is None or run.progress.step < self._until:
            return
        # Before anything may raise: `searching` reads it.
        self._error = None
        for remove in self._remove_listeners:
            remove()
        if self._found_step:
            return
        details = (
            f"{error.found}; the same steps, run again from the same state, were finite:"
            " a kernel or the hardware is not reliable"
        )
        if self._raises:
            raise NonFiniteError(error.problem, found=details, fix=error.fix)
        run.say(f"{error.problem}: {details}")


def _group_counts(run: Fit) -> list[int]:
    """How many parameter groups each optimizer has now."""
    optimizers = run.stepper.configured.optimizers
    return [len(optimizer.param_groups) for optimizer in optimizers]


def _bad_gradients(module: nn.Module) -> list[str]:
    """Names of the parameters whose gradients are not finite, in the order of the module."""
    return [
        name
        for name, parameter in module.named_parameters()
        if parameter.grad is not None and not are_finite([parameter.grad])
    ]


def _first_rank(rows: Sequence[Sequence[float]], column: int) -> int | None:
    """The first rank with a count in this column; None if every rank has 0."""
    for rank, row in enumerate(rows):
        if row[column]:
            return rank
    return None
