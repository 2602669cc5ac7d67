"""Where the loaders of a run are: in a checkpoint, and back, on as many ranks or on others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer_kit.core.errors import CheckpointError
from trainer_kit.step.run import Fit

__all__ = ["reading_state", "restore_reading"]


def reading_state(run: Fit, done: Mapping[str, Any]) -> dict[str, Any] | None:
    """What this rank's loaders need to go on, besides the numbers in ``done``; None for nothing.

    Args:
        run: the fit.
        done: progress up to the last finished window.
    """
    train = run.windows.feed.track.state_dict(done["epoch"], done["epoch_batch"], done["batch"])
    feeds = [] if run.validation is None else run.validation.feeds
    validation = [feed.track.state_dict() for feed in feeds]
    if train is None and not any(validation):
        return None
    return {"train": train, "validation": validation}


def restore_reading(run: Fit, state: Mapping[str, Any], global_batch_size: int | None) -> None:
    """Let every loader begin where the checkpoint says; ``run.progress`` is restored already.

    Raises:
        CheckpointError: on these ranks, or with this loader, there is no such place.
    """
    data = run.strategy.data
    ranks = len(state.get("loaders") or state["rng"])
    feed, rank = run.windows.feed, data.rank
    if ranks != data.size and global_batch_size is not None:
        run.say(
            f"global_batch_size={global_batch_size} stays: a batch is {feed.per_rank_batch_size} samples on each rank,"
            f" of {data.size} now and {ranks} before"
        )
    _divide_anew(run, state.get("stride"), global_batch_size)
    saved = state.get("loaders")
    if saved is None:
        return
    feed.track.load_state_dict([own and own["train"] for own in saved], rank)
    for i, validation in enumerate(run.validation.feeds if run.validation is not None else ()):
        parts = [own["validation"][i] if own and i < len(own["validation"]) else None for own in saved]
        validation.track.load_state_dict(parts, rank)


def _divide_anew(run: Fit, then: Sequence[Sequence[Any]] | None, global_batch_size: int | None) -> None:
    """A position inside an epoch counts micro-batches: of another size, it is another number of them."""
    now, progress = run.windows.feed.stride, run.progress
    was = [(unit, number) for unit, number in then or ()]
    if was == now or then is None or not progress.epoch_batch:
        return
    batches, rest = divmod(progress.epoch_batch * was[0][1], now[0][1]) if was and now else (0, 1)
    ratios = {(old[1] * now[0][1], new[1] * was[0][1]) for old, new in zip(was, now, strict=False)}
    units = [unit for unit, _ in now]
    alike = [unit for unit, _ in was] == units and set(units) <= {"samples", "batches"}
    if not alike or any(left != right for left, right in ratios):
        raise CheckpointError(
            "progress",
            "epoch_batch",
            f"a place inside an epoch of batches of {_named(was)} is none of batches of {_named(now)}",
            fix="resume with as many ranks and samples a batch, or from an epoch's end",
        )
    if rest:
        raise CheckpointError(
            "progress",
            "epoch_batch",
            f"{progress.epoch_batch} batches of {_named(was)} are no whole number of batches of {_named(now)}",
            fix="resume with as many ranks and samples a batch, from an epoch's end, or use global_batch_size",
        )
    keeps = "" if global_batch_size or units[0] != "samples" else "; global_batch_size= keeps what a step is made of"
    run.say(
        f"going on at batch {batches} of the epoch: {progress.epoch_batch} batches of {_named(was)} were trained on,"
        f" they are of {_named(now)} now{keeps}"
    )
    progress.epoch_batch = batches


def _named(stride: Sequence[Sequence[Any]]) -> str:
    return " and ".join(dict.fromkeys(f"{number} {unit}" for unit, number in stride))
