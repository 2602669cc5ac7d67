"""What depends on the other samples of a batch: one process with the batches of all ranks as one differs there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from trainer_kit.planning.verify_compare import Finding, Judge, same_bits
from trainer_kit.planning.verify_norms import Shares, rows_of_shares
from trainer_kit.planning.verify_recorder import Record

__all__ = ["depends", "named", "same_samples", "shares_of"]

_IGNORED: Final = -100
"""The class that torch's and transformers' losses leave out of their mean."""


def shares_of(run: Sequence[Record]) -> Shares:
    """The samples of each rank, ranks that share samples once."""
    found: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(dict)
    for record in run:
        for at, micro in record.micros.items():
            if micro.ids is not None:
                found[at].setdefault(record.place, micro.ids)
    return {
        at: [places[place] for place in sorted(places)] for at, places in found.items()
    }


def same_samples(alone: Record, exact: Record, shares: Shares, step: int) -> bool:
    """Whether one process has the tensors of the ranks as the rows of its batches.

    Args:
        alone: one process.
        exact: the plain loop, which has a batch for each rank.
        shares: of the ranks.
        step: that is compared.
    """
    for (at, index), micro in alone.micros.items():
        rows = (
            None
            if micro.ids is None
            else rows_of_shares(micro.ids, shares.get((at, index), []))
        )
        if at != step or rows is None:
            continue
        for place, share in enumerate(rows):
            other = exact.micros.get((step, index * len(rows) + place))
            for mine, theirs in zip(
                micro.batch, [] if other is None else other.batch, strict=False
            ):
                if not mine.ndim or len(mine) != len(micro.ids or ()):
                    continue
                if mine[share].shape != theirs.shape or not same_bits(
                    mine[share], theirs.to(mine.dtype)
                ):
                    return False
    return True


def depends(alone: Record, judge: Judge, shares: Shares, step: int) -> Finding:
    """Name what depends on the other samples of a batch: the first module, or else the loss.

    Args:
        alone: one process, with the outputs of modules at this step.
        judge: of the plain loop, with them too.
        shares: of the ranks.
        step: the first that differs.
    """
    for (at, index), mine in sorted(alone.micros.items()):
        rows = (
            None
            if mine.ids is None
            else rows_of_shares(mine.ids, shares.get((at, index), []))
        )
        if at != step or rows is None or mine.watched is None:
            continue
        for key, found in mine.watched.outputs.items():
            for place, share in enumerate(rows):
                one = judge.exact.micros.get((step, index * len(rows) + place))
                other = judge.rounded.micros.get((step, index * len(rows) + place))
                exact = (
                    None
                    if one is None or one.watched is None
                    else one.watched.outputs.get(key)
                )
                rounded = (
                    None
                    if other is None or other.watched is None
                    else other.watched.outputs.get(key)
                )
                if (
                    exact is None
                    or rounded is None
                    or not found.ndim
                    or len(found) != sum(map(len, rows))
                ):
                    continue
                if (
                    exact.shape == found[share].shape
                    and judge.excess(found[share], exact, rounded) > 1
                ):
                    return Finding(
                        kind="layout",
                        step=step,
                        where=key[0],
                        text="the output for a sample depends on the other samples of its batch",
                        hint="each rank computes it from its own samples only",
                    )
    return Finding(
        kind="layout",
        step=step,
        where="",
        text=f"the loss of one batch is not the mean of the losses of the ranks{_losses(alone, judge.exact, step)}",
        hint=_hint(alone),
    )


def _losses(alone: Record, exact: Record, step: int) -> str:
    one = next(
        (micro.loss for at, micro in alone.micros.items() if at == (step, 0)), {}
    )
    ranks = [
        micro.loss
        for (at, index), micro in exact.micros.items()
        if at == step and index < exact.places
    ]
    name = next(iter(one), None)
    if name is None or any(name not in loss for loss in ranks):
        return ""
    return f": {float(one[name]):.6g} in one process, {', '.join(f'{float(loss[name]):.6g}' for loss in ranks)} on them"


def _hint(alone: Record) -> str:
    tokens = "a mean over tokens needs loss_weight, which returns their number"
    pairs = "a loss over pairs of samples needs those of all ranks: torch.distributed.nn.functional.all_gather"
    masked = any(
        bool((value == _IGNORED).any())
        for micro in alone.micros.values()
        for value in micro.batch
    )
    return tokens if masked else f"{pairs}; {tokens}"


def named(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more.

    Example:
        >>> named(["a", "b", "c", "d", "e"])
        'a, b, c and 2 more'
    """
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
