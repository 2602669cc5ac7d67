"""Compares the samples of `verify`'s runs: which ones, in which order, and with which contents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from trainer_kit.planning.verify_compare import Finding, same_bits
from trainer_kit.planning.verify_recorder import Record

__all__ = ["order", "samples"]


def order(run: Sequence[Record], plan: list[int] | None, steps: int) -> Finding | None:
    """Compare the samples of each step with those that one process reads; each step may have them in any order.

    Args:
        run: one record for each rank.
        plan: the dataset's indices as one process reads them; None: not known.
        steps: of the run.
    """
    done = 0
    for step in range(steps):
        found: dict[tuple[int, int], list[int]] = {}
        for record in run:
            for (at, index), micro in record.micros.items():
                if at == step and micro.ids is not None:
                    found[index, record.place] = micro.ids
        ids = [one for key in sorted(found) for one in found[key]]
        expected = None if plan is None else plan[done : done + len(ids)]
        done += len(ids)
        if expected is None or not ids or Counter(expected) == Counter(ids):
            continue
        twice = [one for one, count in Counter(ids).items() if count > 1 and Counter(expected)[one] <= 1]
        if twice:
            places = sorted({place for (_, place), values in found.items() if twice[0] in values})
            where = f"ranks {', '.join(map(str, places))}" if len(places) > 1 else f"rank {places[0]}"
            text = f"read {Counter(ids)[twice[0]]} times in this step, by {where}"
            more = f", and {len(twice) - 1} other samples" if len(twice) > 1 else ""
            hint = "the sampler does not divide the data among the ranks, or repeats samples"
            return Finding(kind="samples", step=step, where=f"sample {twice[0]}", text=text + more, hint=hint)
        other = next(iter((Counter(ids) - Counter(expected)).elements()), None)
        return Finding(
            kind="samples",
            step=step,
            where="" if other is None else f"sample {other}",
            text="a single process does not read it in this step",
            hint="the order of the data depends on the number of ranks",
        )
    return None


def samples(run: Sequence[Record], exact: Record) -> Finding | None:
    """Compare the tensors of each batch with those that the plain loop reads."""
    found = [(at, record.place, record) for record in run for at in record.micros]
    for (step, index), place, record in sorted(found, key=lambda each: each[:2]):
        micro = record.micros[step, index]
        pair = exact.micros.get((step, index * record.places + place))
        if pair is None or pair.ids != micro.ids or len(pair.batch) != len(micro.batch):
            continue
        for mine, other in zip(micro.batch, pair.batch, strict=True):
            if mine.shape != other.shape or same_bits(mine, other.to(mine.dtype)):
                continue
            rows = range(len(mine)) if mine.ndim else ()
            row = next((i for i in rows if not same_bits(mine[i], other[i].to(mine.dtype))), 0)
            ids = micro.ids if micro.ids is not None and len(rows) == len(micro.ids) else None
            return Finding(
                kind="data",
                step=step,
                where=f"batch {index}" if ids is None else f"sample {ids[row]}",
                text=f"has different contents on rank {place} than in one process",
                hint="the dataset, an augmentation or collate_fn keeps state between samples",
            )
    return None
