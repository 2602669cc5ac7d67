"""Saving what was asked for. Rank 0 writes, the others wait; a storage that fails is reported and training goes on."""

from __future__ import annotations

import warnings
from contextlib import suppress
from pathlib import Path

from trainer_kit.checkpoint.commit import write_checkpoint
from trainer_kit.checkpoint.store import checkpoints, mark
from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.protocols import CheckpointRequest
from trainer_kit.engine.finite import check_finite
from trainer_kit.engine.run import Fit

__all__ = ["save_requested", "save_to"]


def save_requested(run: Fit, last: bool = False) -> bool:
    """One state for everybody who asked at this step.

    Where the storage fails (full, read-only, an I/O error) one line says so: there is no such checkpoint, nobody is
    told ``saved``, so nothing gives way to it, and the next one is tried when it is due.

    Args:
        run: the fit.
        last: nothing is trained after this.

    Returns:
        Whether all of it is durable; the same on every rank.

    Raises:
        CheckpointError: what was asked for cannot be saved on any disk.
    """
    asked = run.requests.checkpoints
    if not asked:
        return True
    check_finite(run)
    plans = [(str(_path(run, request)), bool(request and request.weights_only)) for _, request in asked]
    plans = run.strategy.world.broadcast(plans)
    states: dict[bool, dict[str, object]] = {}
    failures: dict[str, CheckpointError] = {}
    for path, weights_only in dict(plans).items():
        if weights_only not in states:
            states[weights_only] = run.collect(weights_only)
        failure = _write(run, Path(path), states[weights_only])
        if failure is None:
            run.announce(Path(path))
        else:
            failures[path] = failure
    requests = [request for _, request in asked]
    asked.clear()
    for path, failure in failures.items():
        _report(run, Path(path), failure, [r for r in requests if r is None or str(r.path) == path], last)
    for request in requests:
        if request is None:
            _mark_last(run, failures)
        elif str(request.path) in failures:
            getattr(request, "failed", _nobody)(Path(request.path))
        elif str(request.path) in dict(plans):
            request.saved(Path(request.path))
    return not failures


def save_to(run: Fit, path: Path, state: dict[str, object]) -> None:
    """Write one checkpoint; every rank learns whether it worked.

    Raises:
        CheckpointError: it did not.
    """
    failure = _write(run, path, state)
    if failure is not None:
        raise failure


def _write(run: Fit, path: Path, state: dict[str, object]) -> CheckpointError | None:
    """What the storage had against it; everything else is raised. The same on every rank."""
    world = run.strategy.world
    failure: CheckpointError | None = None
    if world.rank == 0:
        info = {"epoch": run.progress.epoch, "step": run.progress.step, "world_size": world.size}
        try:
            parts = {"model" if name == "state_dict" else name: part for name, part in state.items()}
            write_checkpoint(path, parts, info=info, overwrite=True)
        except CheckpointError as error:
            failure = error
    of_storage = failure is not None and isinstance(failure.__cause__, OSError)  # a cause does not travel
    failure, of_storage = world.broadcast((failure, of_storage))
    if failure is not None and not of_storage:
        raise failure
    return failure


def _path(run: Fit, request: CheckpointRequest | None) -> Path:
    if request is not None:
        return Path(request.path)
    return run.directory() / f"step-{run.progress.step:08d}"


def _mark_last(run: Fit, failures: dict[str, CheckpointError]) -> None:
    """Whoever goes on from ``last`` goes on from here: of what no callback keeps nobody else says so."""
    path = _path(run, None)
    if run.strategy.world.rank != 0 or str(path) in failures:
        return
    try:
        mark(path.parent, last=path)
    except CheckpointError as error:
        warnings.warn(f"after saving {path}: {error}", stacklevel=2)


def _report(
    run: Fit, path: Path, failure: CheckpointError, requests: list[CheckpointRequest | None], last: bool
) -> None:
    if run.strategy.world.rank != 0:
        return
    steps = []
    with suppress(OSError):
        steps = [record.step for record in checkpoints(path.parent) if record.step is not None]
    kept = f"kept step {max(steps)}" if steps else "no checkpoint is there yet"
    next_try = next((found for request in requests if (found := getattr(request, "next_try", ""))), "")
    if last or run.requests.signal or run.schedule.finished(run.progress) is not None:
        outlook = "this run ends without it"
    else:
        outlook = f"training goes on, next try at {next_try or 'the next one that is due'}"
    run.say(f"save of step {run.progress.step} failed: {failure.file}: {failure.reason}; {kept}; {outlook}")


def _nobody(path: Path) -> None:
    """Nobody wants to know that a save failed."""
