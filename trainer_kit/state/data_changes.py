"""Reports data that are not those of the checkpoint that a run continues."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from trainer_kit.core.display import plural
from trainer_kit.core.types import JsonObject
from trainer_kit.step.run import Fit

__all__ = ["compare_data", "describe_changes"]


def compare_data(run: Fit, saved: Sequence[JsonObject] | None) -> None:
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
    saved: Sequence[JsonObject] | None,
    now: Sequence[JsonObject],
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
    consequence = f"the rest of epoch {epoch} may repeat samples or leave some out"
    lines: list[str] = []
    for facts_before, facts_now in zip(saved, now, strict=True):
        changes = _changes(facts_before, facts_now)
        lines += [f"{change}: {consequence}" for change in changes]
        mixture_changes = _mixture_changes(facts_before, facts_now)
        lines += [f"{change}, and {consequence}" for change in mixture_changes]
    return lines


def _changes(before: JsonObject, now: JsonObject) -> list[str]:
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


def _mixture_changes(before: JsonObject, now: JsonObject) -> list[str]:
    """Return what has changed in the mixtures of a loader, each with what continues and what begins."""
    # In the order of the streams: with another number of mixtures no pair belongs together.
    mixtures_before = before.get("mixtures") or []
    mixtures = now.get("mixtures") or []
    if len(mixtures_before) != len(mixtures):
        return []
    position = "the mixture is read again from the start of the epoch"
    if now.get("continues"):
        position = "each source continues from its saved position"
    changes: list[str] = []
    for mixture_before, mixture in zip(mixtures_before, mixtures, strict=True):
        # Other sources are refused where the mixture opens.
        if mixture["sizes"].keys() == mixture_before["sizes"].keys():
            changes += _weight_changes(mixture_before, mixture, position)
            changes += _size_changes(mixture_before, mixture, position)
    return changes


def _weight_changes(before: JsonObject, now: JsonObject, position: str) -> list[str]:
    shares, shares_before = now["shares"], before["shares"]
    if _are_equal(shares, shares_before):
        return []
    text, text_before = _weights_text(shares), _weights_text(shares_before)
    return [
        f"the weights of the mixture are {text}, and were {text_before} in the checkpoint:"
        f" {position}, the new weights hold from there on"
    ]


def _size_changes(before: JsonObject, now: JsonObject, position: str) -> list[str]:
    changes = []
    for name, size in now["sizes"].items():
        size_before = before["sizes"][name]
        if None in (size, size_before) or size == size_before:
            continue
        changes.append(
            f"the source {name} of the mixture has {plural(size, 'sample')}, and had {size_before} in the checkpoint:"
            f" {position}, the next pass over {name} begins with its new size"
        )
    return changes


_Shares: TypeAlias = Mapping[str, float] | str
"""The share of each source, or the name of a function that returns weights."""


def _are_equal(shares: _Shares, others: _Shares) -> bool:
    if isinstance(shares, str) or isinstance(others, str):
        return shares == others
    # Weights of one ratio may differ by rounding after the division by their sum.
    return all(math.isclose(share, others[name]) for name, share in shares.items())


def _weights_text(shares: _Shares) -> str:
    if isinstance(shares, str):
        return f"those of {shares}"
    return ", ".join(f"{name} {share:.4g}" for name, share in shares.items())
