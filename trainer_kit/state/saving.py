"""Saves requested checkpoints: the training thread copies the state, a background thread writes it.

Rank 0 writes; with a sharded engine every rank writes its part, and rank 0 commits.

One save is under way at a time. Where the storage fails, a line reports it, the checkpoint does not exist, and training
continues.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

from torch import Tensor

from trainer_kit.checkpoint.background import Background, HostBuffers
from trainer_kit.checkpoint.commit import Snapshot, take_snapshot, write_snapshot
from trainer_kit.checkpoint.store import checkpoints, mark
from trainer_kit.core.collective_errors import fail_together, shared_error
from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.location import Location, locate
from trainer_kit.core.protocols import CheckpointRequest
from trainer_kit.core.state_names import state_name
from trainer_kit.core.tensors import are_finite
from trainer_kit.state.collect import without_own_buffers
from trainer_kit.state.runs import call_optional
from trainer_kit.step.run import Fit, Outcome, Save, Saver, StepGuard

if TYPE_CHECKING:
    from trainer_kit.checkpoint.sharded import ShardedSnapshot

__all__ = ["abandon_save", "save_requested", "save_to", "settle_save"]

_SLOW: Final = 60.0
"""Seconds after which a line reports that a save is still under way."""
_PATIENCE: Final = 2.0
"""Seconds that training waits for a save before a line reports it."""


def save_requested(
    run: Fit, last: bool = False, guard: StepGuard | None = None
) -> bool:
    """Save one state for all checkpoint requests of this step. Every rank must call it at the same step.

    Where the storage fails (full, read-only, an I/O error) one line reports it: the checkpoint does not exist, no
    request gets ``saved``, so no older checkpoint is deleted, and the next save is tried when it is due.

    Args:
        run: the fit.
        last: no step follows, so the checkpoint must be durable when this returns.
        guard: notes which checkpoints are written, to request them again after it has left out steps.

    Returns:
        Whether every checkpoint is durable or under way; the same on every rank.

    Raises:
        CheckpointError: the state cannot be saved on any storage.
    """
    asked = run.requests.checkpoints
    if not asked:
        return settle_save(run) if last else True
    settle_save(run)
    paths = {
        str(_path(run, request)): bool(request and request.weights_only)
        for _, request in asked
    }
    paths = run.strategy.world.broadcast(paths)
    save = Save(run.progress.step, [request for _, request in asked], paths, last=last)
    asked.clear()
    if guard is not None:
        guard.wrote(run.progress.step, paths)
    states = {
        weights_only: run.collect(weights_only)
        for weights_only in sorted(set(paths.values()))
    }
    _begin(run, save, states)
    return True if run.saver.background and not last else settle_save(run)


def save_to(run: Fit, path: Location, weights_only: bool) -> None:
    """Write one checkpoint of the current state; it is durable on every rank when this returns.

    Raises:
        CheckpointError: it could not be written.
    """
    settle_save(run)
    save = Save(run.progress.step, [], {str(path): weights_only}, last=True)
    _begin(run, save, {weights_only: run.collect(weights_only)})
    failure = _outcome(run, save)[str(path)]
    if failure is not None:
        raise failure
    _committed(run, path)


def _committed(run: Fit, path: Location) -> None:
    run.announce(path)
    for hook in run.bus.on_checkpoint_committed:
        hook(path)


def settle_save(run: Fit) -> bool:
    """Wait for the save under way and notify its requests and the loggers. Every rank must call it at the same step.

    Returns:
        Whether it is durable; True where none was under way.
    """
    save = run.saver.save
    if save is None:
        return True
    outcome = _outcome(run, save)
    for path, failure in outcome.items():
        if failure is None:
            _committed(run, locate(path))
        else:
            _report(run, save, locate(path), failure)
    for line in save.messages:
        run.say(line)
    for request in save.requests:
        if request is None or str(request.path) not in outcome:
            continue
        if outcome[str(request.path)] is None:
            request.saved(locate(request.path))
        else:
            call_optional(request, "failed", locate(request.path))
    return not any(outcome.values())


def abandon_save(run: Fit) -> None:
    """End the save of a run that ends by an exception: this process finishes its files, without any other rank.

    After a second signal it does not wait: the next start discards the incomplete save.
    """
    save = run.saver.save
    if save is None:
        return
    if run.requests.at_once:
        run.saver.save, save.abandoned = None, True
        return
    if run.strategy.world.size == 1:
        settle_save(run)
        return
    run.saver.save = None
    if save.writing is None:
        return
    try:
        outcome = save.writing.result()
    except Exception as error:
        if not run.strategy.sharded:
            raise
        run.say(
            f"save of step {save.step} ended with another rank: {type(error).__name__}"
        )
        return
    for path, failure in outcome.items():
        if failure is not None and _timed_out(outcome):
            run.say(
                f"save of step {save.step} ended with another rank: {failure.reason}"
            )
        elif failure is not None:
            _report(run, save, locate(path), failure)


def _timed_out(outcome: Outcome) -> bool:
    return any(
        one is not None and isinstance(one.__cause__, TimeoutError)
        for one in outcome.values()
    )


def _begin(run: Fit, save: Save, states: dict[bool, dict[str, Any]]) -> None:
    """Copy the states on the ranks that write, and start writing; an error is raised on every rank."""
    world, progress, saver = run.strategy.world, run.progress, run.saver
    copies = (
        saver.background and not save.last
    )  # else nothing changes until it is written
    all_began: Future[bool] = Future()  # ranks that write together wait for each other
    shared = run.strategy.sharded
    group = world.side_group() if shared else None

    def begin() -> None:
        if world.rank != 0 and not shared:
            return
        info = {
            "epoch": progress.epoch,
            "step": progress.step,
            "world_size": world.size,
            "run": run.id,
        }
        snapshots = {}
        for weights_only, state in states.items():
            copy = saver.buffers[weights_only] if copies else None
            snapshots[weights_only] = _take(run, state, info, group, copy)
        names = frozenset(state_name(name) for name, _ in run.module.named_parameters())
        writes = _Writing(group, shared, world.rank == 0, names)
        logged = run.save_logs()
        slow = threading.Timer(_SLOW, _say_slow, (run, save))
        slow.daemon = True
        slow.start()
        try:
            write = partial(_write, saver, save, snapshots, writes, all_began, logged)
            save.writing = Background(
                write, done=partial(_written, run, slow), thread=saver.in_thread
            )
        except BaseException:
            slow.cancel()
            raise

    try:
        fail_together(world, begin)  # one rank may lack memory or threads
    except BaseException:
        all_began.set_result(False)
        raise
    all_began.set_result(True)
    saver.save = save


def _take(
    run: Fit,
    state: dict[str, Any],
    info: dict[str, Any],
    group: Any,
    copy: HostBuffers | None,
) -> Snapshot | ShardedSnapshot:
    parts = {
        "model" if name == "state_dict" else name: part for name, part in state.items()
    }
    if not run.strategy.sharded:
        return take_snapshot(parts, info=info, copy=False if copy is None else copy)
    from trainer_kit.checkpoint.sharded import (
        take_sharded_snapshot,
    )  # torch's planner: half a second

    parts["model"] = without_own_buffers(run.strategy, run.module, parts["model"])
    return take_sharded_snapshot(parts, info=info, group=group, copy=copy)


def _are_finite(weights: Mapping[str, Tensor], names: Iterable[str]) -> bool:
    """Whether the parameters ``names`` among saved weights are finite; buffers may hold infinities on purpose."""
    return are_finite(weights[name] for name in names if name in weights)


@final
@dataclass(frozen=True)
class _Writing:
    """How a save is written: by this rank alone, or by all ranks of ``group`` together.

    Attributes:
        group: the side group of ranks that write together.
        together: whether all ranks write.
        first: whether this rank commits, and notifies the requests.
        names: of the parameters.
    """

    group: Any
    together: bool
    first: bool
    names: frozenset[str]

    def write(self, path: str, snapshot: Any) -> None:
        if not self.together:
            write_snapshot(path, snapshot, overwrite=True)
            return
        from trainer_kit.checkpoint.sharded import write_sharded_snapshot

        try:
            write_sharded_snapshot(path, snapshot, group=self.group, overwrite=True)
        except RuntimeError as error:
            if "gloo" not in str(error):
                raise
            # A rank was too slow, or died: then the next collective call of training raises.
            late = TimeoutError(errno.ETIMEDOUT, str(error))
            raise CheckpointError(
                path, None, "a rank did not answer in time; its storage may be slow"
            ) from late

    def is_finite(self, snapshot: Any) -> bool:
        if not self.together:
            parts = (
                snapshot.tensors.get(part, {})
                for part in ("model", "current_model_state")
            )
            return all(_are_finite(weights, self.names) for weights in parts)
        from trainer_kit.checkpoint.collective import Collective

        mine = all(
            _are_finite(
                shard, [key for key in shard if key.partition("#")[0] in self.names]
            )
            for shard in snapshot.shards.values()
        )
        return bool(Collective(self.group).reduce(lambda: mine, all))


def _write(
    saver: Saver,
    save: Save,
    snapshots: Mapping[bool, Any],
    writing: _Writing,
    all_began: Future[bool],
    logged: Callable[[], None],
) -> Outcome:
    """Runs in the background and touches only files. Requests delete here the checkpoints that this one replaces."""
    outcome: Outcome = {}
    if not all_began.result():
        return outcome
    logged()  # a run that resumes from this checkpoint does not log these steps again
    for path, weights_only in save.paths.items():
        try:
            writing.write(path, snapshots[weights_only])
        except CheckpointError as error:
            outcome[path] = error
            continue
        outcome[path] = None
        finite = writing.is_finite(snapshots[weights_only])
        if (
            save.abandoned
        ):  # only this rank knows: all collective calls come before this line
            continue
        if saver.finite and not finite:
            save.messages.append(
                f"the weights in {path} are not finite: the last checkpoint with finite weights stays"
            )
        saver.finite = finite
        for request in save.requests_of(path) if writing.first else ():
            if not finite:
                call_optional(request, "not_finite")
            problem = (
                _mark_last(path)
                if request is None
                else call_optional(request, "committed", locate(path))
            )
            if problem:
                save.messages.append(problem)
    return outcome


def _written(run: Fit, slow: threading.Timer) -> None:
    slow.cancel()
    if run.strategy.world.size == 1:
        run.requests.wake()  # several ranks settle it together, at their next agreement


def _outcome(run: Fit, save: Save) -> Outcome:
    """Wait for a save; returns the storage's error for each path, and raises every other error. Equal on every rank.

    The save is then no longer under way, unless an exception (of a second signal) ends the wait.
    """
    outcome: Outcome = {}
    problem: BaseException | None = None
    if save.writing is not None:
        if not save.writing.wait(_PATIENCE):
            save.awaited = True
            run.say(f"waiting for the save of step {save.step}")
        try:
            outcome = save.writing.result()
        except BaseException as error:
            problem = error
    # Errors lose their cause on the way to other ranks: look at it here.
    problem = problem or next(
        (
            one
            for one in outcome.values()
            if one and not isinstance(one.__cause__, OSError)
        ),
        None,
    )
    if run.strategy.world.size > 1:
        others = shared_error(problem, 0) if isinstance(problem, Exception) else problem
        outcome, others, timed_out = run.strategy.world.broadcast(
            (outcome, others, _timed_out(outcome))
        )
        problem = problem or others
        if timed_out and run.strategy.sharded:
            run.strategy.world.side_group(recreate=True)
    if save.writing is None or save.writing.wait(0):
        run.saver.save = None
    if problem is not None:
        raise problem
    return outcome


def _path(run: Fit, request: CheckpointRequest | None) -> Location:
    if request is not None:
        return locate(request.path)
    return run.directory() / f"step-{run.progress.step:08d}"


def _mark_last(name: str) -> str | None:
    """Point ``last`` here; no callback owns this checkpoint. Returns the problem, if any."""
    path = locate(name)
    try:
        mark(path.parent, last=path)
    except CheckpointError as error:
        return f"after saving {path}: {error}"
    return None


def _report(run: Fit, save: Save, path: Location, failure: CheckpointError) -> None:
    if run.strategy.world.rank != 0:
        return
    steps = []
    with suppress(CheckpointError, OSError):
        steps = [
            record.step
            for record in checkpoints(path.parent)
            if record.step is not None
        ]
    kept = f"kept step {steps[-1]}" if steps else "no checkpoint is there yet"
    next_try = next(
        (
            found
            for request in save.requests_of(str(path))
            if (found := getattr(request, "next_try", ""))
        ),
        "",
    )
    if (
        save.last
        or run.requests.signal
        or run.schedule.finished(run.progress) is not None
    ):
        outlook = "this run ends without it"
    else:
        outlook = (
            f"training continues, next try at {next_try or 'the next one that is due'}"
        )
    run.say(
        f"save of step {save.step} failed: {failure.file}: {failure.reason}; {kept}; {outlook}"
    )


def _say_slow(run: Fit, save: Save) -> None:
    outlook = "training waits for it" if save.awaited else "training continues"
    run.say(
        f"save of step {save.step} has taken {_SLOW:.0f} s ({', '.join(save.paths)}); {outlook}"
    )
