"""Goes back to a state that the run holds in memory, to find the step that is not finite and to leave steps out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final, final

from torch import Tensor, nn

from trainer_kit.checkpoint.encoding import decode, encode
from trainer_kit.core.errors import NonFiniteError, TrainerKitError
from trainer_kit.core.location import Location, locate
from trainer_kit.core.protocols import CheckpointRequest
from trainer_kit.core.tensors import are_finite, tensors_of
from trainer_kit.step.run import Fit, Rewind

__all__ = ["Guard"]

_SHARE: Final = 200
"""A state is held at most once in so many times the time that holding one takes: 0.5 % of a run."""


@final
@dataclass(frozen=True)
class _Held:
    step: int
    tree: Any
    tensors: Mapping[str, Tensor]
    undo: Callable[[], None]
    length: int

    def state(self) -> dict[str, Any]:
        """A copy: optimizers keep the tensors that they are given, and change them."""
        state: dict[str, Any] = decode(
            self.tree, {name: tensor.clone() for name, tensor in self.tensors.items()}
        )
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
        most: the error is raised once so many steps were not finite.
        left_out: is filled with the numbers of the steps that were not finite.

    Attributes:
        searching: whether steps run again, each with a look at it.
    """

    def __init__(
        self,
        collect: Callable[[bool], dict[str, Any]],
        restore: Callable[[Mapping[str, Any]], None],
        remember: Callable[[], Callable[[], None]],
        *,
        raises: bool,
        back: int,
        most: int,
        left_out: list[int],
    ) -> None:
        self._collect, self._restore, self._remember = collect, restore, remember
        self._raises, self._back, self._most, self._left_out = (
            raises,
            back,
            most,
            left_out,
        )
        self._states: list[_Held] = []
        self._cost = self._held_at = 0.0
        self._until = self._first = self._published = 0
        self._found: TrainerKitError | None = None
        self._met = False
        self._asked: list[tuple[int, list[tuple[str, CheckpointRequest | None]]]] = []
        self._written: list[tuple[int, Mapping[str, bool]]] = []

    @property
    def searching(self) -> bool:
        return self._found is not None

    def hold(self, run: Fit, owes_validation: bool) -> None:
        """Hold the state after this step, if one is due. The losses up to it are finite. Every rank must call it."""
        step, world = run.progress.step, run.strategy.world
        if self.searching:
            if step < self._until:
                return
            self._end_search(run)
        if self._states and self._states[-1].step == step:
            return
        due = not self._states or monotonic() - self._held_at >= _SHARE * self._cost
        if world.size > 1:
            due = any(row[0] for row in world.agree([due]))
        if not due:
            return
        if (
            not self._states
        ):  # a checkpoint inside such a window knows the bad step that is to come
            for bad in (one for one in self._left_out if one > step):
                run.windows.left_out.update(
                    range(max(step + 1, bad - self._back), bad + 1)
                )
        began = monotonic()
        tensors: dict[str, Tensor] = {}
        state = self._collect(owes_validation)
        state.pop("buffers", None)  # each rank keeps its own
        tree = encode(state, tensors, sharded=run.strategy.sharded)
        tensors = (
            {name: tensor.detach().clone() for name, tensor in tensors.items()}
            if run.strategy.sharded
            else tensors
        )
        self._states.append(
            _Held(step, tree, tensors, self._remember(), run.windows.length)
        )
        while len(self._states) > 1 and self._states[1].step <= step - self._back:
            self._states.pop(0)
        self._written = [one for one in self._written if one[0] > self._states[0].step]
        self._held_at = monotonic()
        self._cost = self._held_at - began

    def wrote(self, step: int, paths: Mapping[str, bool]) -> None:
        """Note the checkpoints of this step: one inside a window that is left out later is written again."""
        self._written.append((step, paths))

    def found(self, run: Fit, error: NonFiniteError, published: int) -> None:
        """Go back to find the step of ``error``; returns only where that was done already.

        Args:
            run: the fit.
            error: about the first loss that is not finite.
            published: the step up to which the loggers have their values.
        """
        if self.searching or not self._states:
            return
        self._found, self._until, self._published, self._met = (
            error,
            run.progress.step,
            published,
            False,
        )
        self._first = run.progress.step
        run.bus.on_before_optimizer_step = (
            lambda optimizer: self._look(run),
            *run.bus.on_before_optimizer_step,
        )
        run.bus.on_train_step_end = (
            *run.bus.on_train_step_end,
            lambda: self._ask_again(run),
        )
        raise Rewind

    def publishes(self, step: int) -> bool:
        """Whether the loggers do not have the values of this step yet: the steps of a search run again."""
        return not self.searching or step > self._published

    def rewind(self, run: Fit) -> Mapping[str, Any]:
        """Put the newest held state before the steps to leave out back, and return it. Every rank must call it."""
        fits = [held for held in self._states if held.step < self._first]
        held = fits[-1] if fits else self._states[0]
        del self._states[self._states.index(held) + 1 :]
        run.say(
            f"going back from step {run.progress.step} to step {held.step}: a loss or a gradient was not finite"
        )
        requests, metrics, seconds = run.requests, run.metrics, run.progress.seconds
        if requests.checkpoints:
            self._asked.append((run.progress.step, list(requests.checkpoints)))
        requests.stop = requests.validation = None
        requests.checkpoints.clear()
        metrics_feed = metrics.feed
        metrics.forget()
        metrics.use_sizes_of(metrics_feed)
        for feed in (run.windows.feed, *run.validation.feeds):
            feed.loader_state.reopen()
        run.windows.length = held.length
        run.micro.losses, run.micro.started = [], -1
        state = held.state()
        self._restore(state)
        held.undo()
        for parameter in run.module.parameters():
            parameter.grad = (
                None  # if no optimizer has it, nothing else drops its gradient
            )
        run.progress.seconds = seconds
        return state

    def _ask_again(self, run: Fit) -> None:
        """Request the checkpoints of this step that were requested before the run went back."""
        for step, asked in self._asked:
            if step == run.progress.step:
                for reason, request in asked:
                    run.requests.ask_checkpoint(reason, request)
        self._asked = [one for one in self._asked if one[0] > run.progress.step]

    def _look(self, run: Fit) -> None:
        """Before an optimizer steps: look at the loss and at the gradients of every rank."""
        micro, world, step = run.micro, run.strategy.world, run.progress.step + 1
        bad = micro.first_bad()
        weights = [
            name for name, p in run.module.named_parameters() if not are_finite([p])
        ]
        names = _not_finite(run.module)
        rows = world.agree([bad is not None, len(names), len(weights)])
        if not any(map(any, rows)):
            return
        rank = next((rank for rank, row in enumerate(rows) if row[2]), None)
        if rank is not None:  # the step before, whose gradients were finite
            what = world.broadcast(weights[0] if weights else "", rank)
            self._judge(
                run,
                step - 1,
                f"{what} is not finite after step {step - 1}",
                "loss and gradients were finite",
            )
        feed, epoch = run.windows.feed, run.progress.epoch
        if bad is not None:
            holds = (
                ""
                if are_finite(tensors_of(micro.batch))
                else ", which holds NaN or infinity itself"
            )
            mine = f"{bad[2]} in {feed.name_batch(epoch, bad[1])}{holds}; every parameter is finite"
        else:
            mine = ", ".join(
                feed.name_batch(epoch, micro.first + i) for i in range(micro.count)
            )
        rank = next((rank for rank, row in enumerate(rows) if row[0]), None)
        if rank is not None:
            what = "the loss"
            mine = (
                mine
                if world.size == 1
                else world.broadcast(f"{mine}, on rank {rank}", rank)
            )
        else:  # gradients of all ranks are summed already: any of their batches may be the cause
            rank = next(rank for rank, row in enumerate(rows) if row[1])
            what = (
                f"the gradient of {world.broadcast(names[-1] if names else '', rank)}"
            )
            if world.size > 1:
                mine = "; ".join(
                    f"rank {i}: {one}"
                    for i, one in enumerate(world.all_gather_object(mine))
                )
            mine = (
                f"the loss is finite, {int(rows[rank][1])} gradients are not; in {mine}"
            )
        self._judge(run, step, f"{what} is not finite at step {step}", mine)

    def _judge(self, run: Fit, step: int, problem: str, found: str) -> None:
        if self._raises or len(self._left_out) >= self._most:
            left = (
                f"; steps {', '.join(map(str, self._left_out))} were left out before"
                if self._left_out
                else ""
            )
            raise NonFiniteError(
                problem,
                found=f"{found}{left}",
                fix="lower the learning rate or clip gradients; detect_anomaly=True names the operation"
                + ("; NaNGuard('skip') leaves such steps out" if self._raises else ""),
            )
        self._met = True
        if step not in self._left_out:
            self._left_out.append(step)
        self._first = max(self._states[0].step + 1, step - self._back)
        run.windows.left_out.update(range(self._first, step + 1))
        self._write_again(run)
        steps = (
            f"step {step} is"
            if self._first == step
            else f"steps {self._first} to {step} are"
        )
        first = max(1, step - self._back)
        kept = (
            ""
            if first == self._first
            else f", but not from step {first} on: no state before step {self._first - 1} was kept"
        )
        run.say(f"{problem}: {found}; {steps} left out{kept}")
        raise Rewind

    def _write_again(self, run: Fit) -> None:
        """Request the checkpoints again that hold steps of the window that is left out, where they still exist."""
        stale = [one for one in self._written if one[0] >= self._first]
        self._written = [one for one in self._written if one[0] < self._first]
        there = run.strategy.world.broadcast(
            [path for _, paths in stale for path in paths if locate(path).exists()]
        )
        for step, paths in stale:
            again: list[tuple[str, CheckpointRequest | None]] = [
                ("left out", _Rewrite(locate(path), weights))
                for path, weights in paths.items()
                if path in there
            ]
            self._asked.append((step, again))

    def _end_search(self, run: Fit) -> None:
        error, self._found = self._found, None
        run.bus.on_before_optimizer_step = run.bus.on_before_optimizer_step[1:]
        run.bus.on_train_step_end = run.bus.on_train_step_end[:-1]
        if self._met:
            return
        assert error is not None
        again = "the same steps, run again from the same state, were finite: a kernel or the hardware is not reliable"
        if self._raises:
            raise NonFiniteError(
                error.problem, found=f"{error.found}; {again}", fix=error.fix
            )
        run.say(f"{error.problem}: {error.found}; {again}; training continues")


def _not_finite(module: nn.Module) -> list[str]:
    """Names of the parameters whose gradients are not finite. NaN moves backward, so the last one had it first."""
    return [
        name
        for name, p in module.named_parameters()
        if p.grad is not None and not are_finite([p.grad])
    ]
