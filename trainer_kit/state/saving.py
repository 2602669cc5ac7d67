"""Saves requested checkpoints: the training thread copies the state, a background thread writes it.

Rank 0 writes; with a sharded engine every rank writes its part, and rank 0 commits.

The order for one save, all of it between two steps unless another thread is named:

1. Settle the previous save, whose host buffers are used again. One save is under way at a time.
2. Collect the state on all ranks, and copy it on those that write.
3. In the background thread: wait until the loggers have saved, write the files, commit (the checkpoint is durable from
   here on), and let the requests move ``last`` and delete the checkpoints that it replaces.
4. At a later step, or before the next save, settle it: all ranks learn the outcome, and hooks and loggers are notified.

Where the storage fails, a line reports it, the checkpoint does not exist, and training continues.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from trainer_kit.checkpoint.background import Background, HostBuffers
from trainer_kit.checkpoint.commit import Snapshot, take_snapshot, write_snapshot
from trainer_kit.checkpoint.store import checkpoints, mark
from trainer_kit.core.collective_errors import fail_together, shared_error
from trainer_kit.core.errors import CheckpointError, ConfigurationError, RankError
from trainer_kit.core.location import Location, locate
from trainer_kit.core.protocols import CheckpointRequest
from trainer_kit.core.state_names import state_name
from trainer_kit.core.tensors import are_finite
from trainer_kit.state.collect import State, weights_to_write
from trainer_kit.state.runs import call_optional
from trainer_kit.step.run import Fit, Outcome, Save, Saver, StepGuard

if TYPE_CHECKING:
    from trainer_kit.checkpoint.sharded import ShardedSnapshot

__all__ = [
    "abandon_save",
    "check_named_requests",
    "save_requested",
    "save_to",
    "settle_save",
    "unnamed_checkpoint",
]

_SLOW: Final = 60.0
"""Seconds after which a line reports that a save is still under way."""
_PATIENCE: Final = 2.0
"""Seconds that training waits for a save before a line reports it."""
_GrantedRequests = list[tuple[str, CheckpointRequest | None]]
"""Each with the path of its checkpoint, as in `step.run.Save`."""


def save_requested(
    run: Fit,
    last: bool = False,
    guard: StepGuard | None = None,
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
        RankError: only some ranks have requested a checkpoint with a path.
    """
    pending = run.requests.checkpoints
    if not pending:
        if last:
            return settle_save(run)
        return True
    # Its host buffers are free only when it is written, and an earlier save must not replace a later one.
    settle_save(run)
    save = _next_save(run, last)
    paths = save.paths
    # Before the state is collected: a hook may request the next checkpoint while it adds to this one.
    run.requests.drop_checkpoints([request for _, request in save.requests])
    if guard is not None:
        guard.note_checkpoints(run.progress.step, paths)
    with run.account.during("checkpoint"):
        # Every rank collects the same states in the same order: collecting is collective.
        kinds = sorted(set(paths.values()))
        states = {weights_only: run.collect(weights_only) for weights_only in kinds}
        _begin(run, save, states)
    # It is settled at a later step, or before the next save.
    if run.saver.background and not last:
        return True
    return settle_save(run)


def check_named_requests(counts: Sequence[float]) -> None:
    """Refuse requests with a path that only some ranks have made.

    Args:
        counts: of each rank, how many such requests are pending.

    Raises:
        RankError: they differ; on every rank.
    """
    if len(set(counts)) == 1:
        return
    raise RankError(
        "checkpoints with a path were requested on some ranks only",
        found=", ".join(
            f"rank {rank}: {int(count)}" for rank, count in enumerate(counts)
        ),
        fix="call request_checkpoint(reason, request) on every rank at the same step; without a request, one rank may"
        " call it",
    )


def _next_save(run: Fit, last: bool) -> Save:
    """The save of the requests that are pending at this step: rank 0 chooses the paths for all ranks."""
    requests = [request for _, request in run.requests.checkpoints]
    targets = _agree_on_targets(run, requests)
    paths: dict[str, bool] = {}
    for target in targets:
        # A path that is also requested with the whole state gets the whole state.
        weights_only = paths.get(target.path, True)
        paths[target.path] = weights_only and target.weights_only
    granted = _grant(requests, targets)
    step = run.progress.step
    return Save(step, granted, paths, last=last)


def _grant(
    requests: Sequence[CheckpointRequest | None], targets: Sequence[_Target]
) -> _GrantedRequests:
    """The requests of this rank that a save grants, each with the path of its checkpoint."""
    granted: _GrantedRequests = []
    named_targets = [target for target in targets if target.is_named]
    named_requests = [request for request in requests if request is not None]
    # Every rank makes its requests with a path in the same order, so they belong to rank 0's in that order.
    for target, request in zip(named_targets, named_requests, strict=True):
        granted.append((target.path, request))
    if None in requests:
        for target in targets:
            if not target.is_named:
                granted.append((target.path, None))
    return granted


def _agree_on_targets(
    run: Fit, requests: Sequence[CheckpointRequest | None]
) -> list[_Target]:
    """What rank 0 saves, in the order of its requests; every rank has as many requests with a path.

    A request without a path that rank 0 does not know of yet is not among them: it stays pending on its rank.
    """
    world = run.strategy.world
    named_count = sum(request is not None for request in requests)
    rows = world.agree([named_count])
    check_named_requests([count for (count,) in rows])
    targets = [_target(run, request) for request in requests]
    # Names may hold values of metrics or the time, which differ between ranks.
    targets_of_rank_zero: list[_Target] = world.broadcast(targets)
    return targets_of_rank_zero


class _Target(NamedTuple):
    """What rank 0 tells the other ranks about a request.

    Attributes:
        path: of its checkpoint.
        weights_only: whether it asks for the weights alone.
        is_named: whether the request brings this path.
    """

    path: str
    weights_only: bool
    is_named: bool


def _target(run: Fit, request: CheckpointRequest | None) -> _Target:
    if request is not None:
        return _Target(str(locate(request.path)), bool(request.weights_only), True)
    path = unnamed_checkpoint(run)
    return _Target(str(path), weights_only=False, is_named=False)


def unnamed_checkpoint(run: Fit) -> Location:
    """The path of the checkpoint of this step where a request names none."""
    return run.directory() / f"step-{run.progress.step:08d}"


def save_to(run: Fit | None, path: Location, weights_only: bool) -> None:
    """Write one checkpoint of the current state; it is durable on every rank when this returns.

    Raises:
        ConfigurationError: there is no fit yet.
        CheckpointError: it could not be written.
    """
    if run is None:
        raise ConfigurationError(
            "the Trainer has nothing to save yet",
            fix="call save_checkpoint during or after fit()",
        )
    settle_save(run)
    name = str(path)
    # As if it were the last: the caller may read the file as soon as this returns.
    save = Save(run.progress.step, [], {name: weights_only}, last=True)
    with run.account.during("checkpoint"):
        state = run.collect(weights_only)
        _begin(run, save, {weights_only: state})
        failure = _wait_for_outcome(run, save)[name]
    for line in save.messages:
        run.say(line)
    if failure is not None:
        raise failure
    _announce(run, path)


def _announce(run: Fit, path: Location) -> None:
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
    with run.account.during("checkpoint"):
        outcome = _wait_for_outcome(run, save)
    for path, failure in outcome.items():
        if failure is None:
            _announce(run, locate(path))
        else:
            _report_failure(run, save, locate(path), failure)
    for line in save.messages:
        run.say(line)
    for path, request in save.requests:
        if request is None or path not in outcome:
            continue
        if outcome[path] is None:
            request.saved(locate(path))
        else:
            call_optional(request, "failed", locate(path))
    return not any(outcome.values())


def abandon_save(run: Fit) -> None:
    """End the save of a run that ends by an exception: this process finishes its files, without any other rank.

    After a second signal it does not wait: the next start discards the incomplete save.
    """
    save = run.saver.save
    if save is None:
        return
    if run.requests.at_once:
        run.saver.end()
        # Its thread may still commit, but then deletes no other checkpoint.
        save.abandon()
        return
    if run.strategy.world.size == 1:
        settle_save(run)
        return
    # Other ranks may be gone or wait elsewhere, so there is no agreement about the outcome as in `settle_save`.
    run.saver.end()
    if save.writing is None:
        return
    try:
        outcome = save.writing.result()
    except Exception as error:
        # Ranks that write together fail together: the cause may be that another rank has ended.
        if not run.strategy.sharded:
            raise
        run.say(
            f"save of step {save.step} ended, as another rank failed: {type(error).__name__}"
        )
        return
    timed_out = _timed_out(outcome)
    for path, failure in outcome.items():
        if failure is None:
            continue
        if timed_out:
            run.say(
                f"save of step {save.step} ended, as another rank failed: {failure.reason}"
            )
        else:
            _report_failure(run, save, locate(path), failure)


def _timed_out(outcome: Outcome) -> bool:
    causes = [failure.__cause__ for failure in outcome.values() if failure is not None]
    return any(isinstance(cause, TimeoutError) for cause in causes)


def _begin(run: Fit, save: Save, states: dict[bool, State]) -> None:
    """Copy the states on the ranks that write, and start writing; an error is raised on every rank."""
    world, saver = run.strategy.world, run.saver
    # Without a thread beside training nothing changes until the state is written, so it is not copied.
    copies = saver.background and not save.last
    # The threads of ranks that write together meet in collective calls: none may start unless all could.
    all_began: Future[bool] = Future()
    together = run.strategy.sharded
    group = None
    if together:
        # Not training's group: its collective calls and those of the thread would mix.
        group = world.side_group()

    def begin() -> None:
        # The other ranks only take part in the agreement whether it began.
        if world.rank != 0 and not together:
            return
        snapshots = {}
        for weights_only, state in states.items():
            buffers = None
            if copies:
                buffers = saver.buffers[weights_only]
            snapshots[weights_only] = _take_snapshot(run, state, group, buffers)
        names = frozenset(state_name(name) for name, _ in run.module.named_parameters())
        writer = _Writer(group, together, world.rank == 0, names)
        # Asked for here, in training's thread; the thread that writes waits for it.
        wait_for_logs = run.save_logs()
        write = partial(
            _write, saver, save, snapshots, writer, all_began, wait_for_logs
        )
        save.begin_writing(_start_thread(run, save, write))

    try:
        # One rank may lack memory or threads: then no rank writes.
        fail_together(world, begin)
    except BaseException:
        # A thread that was started waits for this, and ends without writing.
        all_began.set_result(False)
        raise
    all_began.set_result(True)
    # On every rank, also while only rank 0 writes: all ranks settle it together.
    saver.begin(save)


def _start_thread(
    run: Fit,
    save: Save,
    write: Callable[[], Outcome],
) -> Background[Outcome]:
    # A thread of its own: neither training nor the save can look at the clock meanwhile.
    slow = threading.Timer(_SLOW, _say_slow, (run, save))
    slow.daemon = True
    slow.start()

    def done() -> None:
        slow.cancel()
        # Several ranks settle it together, at their next agreement; a single rank settles it at the next step.
        if run.strategy.world.size == 1:
            run.requests.wake()

    try:
        return Background(write, done=done, thread=run.saver.in_thread)
    except BaseException:
        slow.cancel()
        raise


def _take_snapshot(
    run: Fit,
    state: State,
    group: Any,
    buffers: HostBuffers | None,
) -> Snapshot | ShardedSnapshot:
    info = {
        "epoch": run.progress.epoch,
        "step": run.progress.step,
        "world_size": run.strategy.world.size,
        "run": run.id,
    }
    parts = {
        "model" if name == "state_dict" else name: value
        for name, value in state.items()
    }
    if not run.strategy.sharded:
        return take_snapshot(
            parts, info=info, copy=False if buffers is None else buffers
        )
    # torch's planner takes half a second to import.
    from trainer_kit.checkpoint.sharded import take_sharded_snapshot

    parts["model"] = weights_to_write(run.strategy, run.module, parts["model"])
    return take_sharded_snapshot(parts, info=info, group=group, copy=buffers)


@final
@dataclass(frozen=True)
class _Writer:
    """How a save is written: by this rank alone, or by all ranks of ``group`` together.

    Attributes:
        group: the side group of ranks that write together.
        together: whether all ranks write.
        commits: whether this rank commits, and notifies the requests.
        parameter_names: of the module.
    """

    group: Any
    together: bool
    commits: bool
    parameter_names: frozenset[str]

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
        """Whether the saved parameters are finite, the same on every rank; buffers may hold infinities on purpose."""
        if not self.together:
            return self._has_finite_parameters(snapshot)
        from trainer_kit.checkpoint.collective import Collective

        is_finite = self._has_finite_shards(snapshot)
        return bool(Collective(self.group).reduce(lambda: is_finite, all))

    def _has_finite_parameters(self, snapshot: Snapshot) -> bool:
        for part_name in ("model", "current_model_state"):
            weights = snapshot.tensors.get(part_name, {})
            names = [name for name in self.parameter_names if name in weights]
            if not are_finite(weights[name] for name in names):
                return False
        return True

    def _has_finite_shards(self, snapshot: ShardedSnapshot) -> bool:
        for shard in snapshot.shards.values():
            # The key of a shard is the name of its tensor, "#", and its number.
            keys = [
                key for key in shard if key.partition("#")[0] in self.parameter_names
            ]
            if not are_finite(shard[key] for key in keys):
                return False
        return True


def _write(
    saver: Saver,
    save: Save,
    snapshots: Mapping[bool, Any],
    writer: _Writer,
    all_began: Future[bool],
    wait_for_logs: Callable[[], None],
) -> Outcome:
    """Runs in the background and touches only files. Requests delete here the checkpoints that this one replaces."""
    outcome: Outcome = {}
    if not all_began.result():
        return outcome
    # Before the commit: a run that resumes from this checkpoint does not log these steps again.
    wait_for_logs()
    for path, weights_only in save.paths.items():
        snapshot = snapshots[weights_only]
        try:
            writer.write(path, snapshot)
        except CheckpointError as error:
            # Other paths may be on a storage that works.
            outcome[path] = error
            continue
        # The commit is done: from here on the checkpoint is durable, and older ones may be deleted.
        outcome[path] = None
        is_finite = writer.is_finite(snapshot)
        # Only this rank knows: all collective calls come before this line.
        if save.abandoned:
            continue
        if saver.finite and not is_finite:
            save.messages.append(
                f"the weights in {path} are not finite: the last checkpoint with finite weights stays"
            )
        saver.note_finite(is_finite)
        # On one rank alone: `last` and the deletions are changes of shared files.
        if writer.commits:
            _notify_requests(save, path, is_finite)
    return outcome


def _notify_requests(save: Save, path: str, is_finite: bool) -> None:
    for request in save.requests_of(path):
        # First, so that `committed` spares the last checkpoint with finite weights.
        if not is_finite:
            call_optional(request, "not_finite")
        if request is None:
            problem = _mark_last(path)
        else:
            problem = call_optional(request, "committed", locate(path))
        if problem:
            save.messages.append(problem)


def _wait_for_outcome(run: Fit, save: Save) -> Outcome:
    """Wait for a save; returns the storage's error for each path, and raises every other error. Equal on every rank.

    The save is then no longer under way, unless an exception (of a second signal) ends the wait.
    """
    world = run.strategy.world
    outcome: Outcome = {}
    problem: BaseException | None = None
    if save.writing is not None:
        if not save.writing.wait(_PATIENCE):
            save.note_wait()
            run.say(f"waiting for the save of step {save.step}")
        # Raised only after the broadcast below, in which the other ranks wait.
        try:
            outcome = save.writing.result()
        except BaseException as error:
            problem = error
    if problem is None:
        problem = _error_besides_storage(outcome)
    if world.size > 1:
        shared = problem
        if isinstance(problem, Exception):
            shared = shared_error(problem, 0)
        # Rank 0's outcome counts: it commits, and without a sharded engine no other rank writes.
        outcome, shared, timed_out = world.broadcast(
            (outcome, shared, _timed_out(outcome))
        )
        problem = problem or shared
        # After a timeout the ranks are at different collective calls of the group: it is of no use any more.
        if timed_out and run.strategy.sharded:
            world.side_group(recreate=True)
    # A second signal may have ended the wait before the thread is done.
    if save.writing is None or save.writing.wait(0):
        run.saver.end()
    if problem is not None:
        raise problem
    return outcome


def _error_besides_storage(outcome: Outcome) -> CheckpointError | None:
    """An error that no other storage would help against. Errors lose their cause on the way to other ranks."""
    for failure in outcome.values():
        if failure is not None and not isinstance(failure.__cause__, OSError):
            return failure
    return None


def _mark_last(name: str) -> str | None:
    """Point ``last`` here; no callback owns this checkpoint. Returns the problem, if any."""
    path = locate(name)
    try:
        mark(path.parent, last=path)
    except CheckpointError as error:
        return f"after saving {path}: {error}"
    return None


def _report_failure(
    run: Fit,
    save: Save,
    path: Location,
    failure: CheckpointError,
) -> None:
    # Only rank 0 prints, and listing a directory may be slow where the storage has a problem.
    if run.strategy.world.rank != 0:
        return
    steps = []
    with suppress(CheckpointError, OSError):
        steps = [
            record.step
            for record in checkpoints(path.parent)
            if record.step is not None
        ]
    newest = "no checkpoint is there yet"
    if steps:
        newest = f"kept step {steps[-1]}"
    if (
        save.last
        or run.requests.signal
        or run.schedule.finished(run.progress) is not None
    ):
        outlook = "this run ends without it"
    else:
        outlook = f"training continues, next try at {_next_try(save, path)}"
    run.say(
        f"save of step {save.step} failed: {failure.file}: {failure.reason}; {newest}; {outlook}"
    )


def _next_try(save: Save, path: Location) -> str:
    """When the next save is due, as far as one of the requests of ``path`` knows."""
    for request in save.requests_of(str(path)):
        next_try = getattr(request, "next_try", "")
        if next_try:
            return str(next_try)
    return "the next one that is due"


def _say_slow(run: Fit, save: Save) -> None:
    outlook = "training continues"
    if save.awaited:
        outlook = "training waits for it"
    run.say(
        f"save of step {save.step} has taken {_SLOW:.0f} s ({', '.join(save.paths)}); {outlook}"
    )
