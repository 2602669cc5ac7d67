"""Reports data that are not those of the checkpoint that a run continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer_kit.core.display import plural
from trainer_kit.step.run import Fit

__all__ = ["compare_data", "describe_changes"]


def compare_data(run: Fit, saved: Sequence[Mapping[str, Any]] | None) -> None:
    """Print a line for each change that decides what the rest of the epoch is, if the checkpoint lies inside one.

    Args:
        run: the fit; its progress is restored.
        saved: the facts of the training data in the checkpoint; None in an older one.
    """
    progress, length = run.progress, run.schedule.length
    # At the start of an epoch other data are no problem: no position in the former data counts.
    if not progress.epoch_batch:
        return
    if (
        length.certain
        and length.expected is not None
        and progress.epoch_batch >= length.expected
    ):
        run.say(
            f"the checkpoint is at batch {progress.epoch_batch} of epoch {progress.epoch}, which has"
            f" {length.expected} now: it counts as complete, and training continues with epoch {progress.epoch + 1}"
        )
        return
    for line in describe_changes(saved, run.windows.feed.facts, progress.epoch):
        run.say(line)


def describe_changes(
    saved: Sequence[Mapping[str, Any]] | None,
    now: Sequence[Mapping[str, Any]],
    epoch: int,
) -> list[str]:
    """Return a line for each change of the data inside an epoch.

    Args:
        saved: the facts of the data in the checkpoint; None in an older one.
        now: the facts of the data of this run, see `Feed.facts`.
        epoch: the epoch that the checkpoint lies in.

    Example:
        >>> before, now = {"size": 8, "unit": "samples"}, {"size": 9, "unit": "samples"}
        >>> describe_changes([before], [now], epoch=0)[0].partition(":")[0]
        'the training data have 9 samples, and had 8 in the checkpoint'
    """
    # Facts are listed by loader: with another number of loaders no pair belongs together.
    if saved is None or len(saved) != len(now):
        return []
    changes: list[str] = []
    for facts_before, facts_now in zip(saved, now, strict=True):
        changes += _changes(facts_before, facts_now)
    return [
        f"{change}: the rest of epoch {epoch} may repeat samples or leave some out"
        for change in changes
    ]


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    changes = []
    size, size_before = now.get("size"), before.get("size")
    if size is not None and size_before is not None and size != size_before:
        changes.append(
            f"the training data have {size} {now['unit']}, and had {size_before} in the checkpoint"
        )
    order, order_before = now.get("order"), before.get("order")
    if order_before is not None and order != order_before:
        changes.append(
            f"the training data are read in the order of {order}, and were in that of {order_before}"
        )
    workers, workers_before = now.get("workers"), before.get("workers")
    if workers_before is not None and workers is not None and workers != workers_before:
        changes.append(
            f"{plural(workers, 'worker reads', 'workers read')} the stream, and {workers_before} did in the checkpoint"
        )
    return changes
