"""From what was recorded to one value on the host: over time, and over the ranks in one packed exchange."""

from __future__ import annotations

import math
import zlib
from typing import Any

import torch

from trainer_kit.core.errors import LogError
from trainer_kit.core.protocols import Group
from trainer_kit.engine.entry import Entry

__all__ = ["agreed", "reduced"]


def agreed(entries: list[Entry], group: Group, ran: bool, step: bool) -> list[Entry]:
    """The same entries on every rank; a rank that ran no batch takes the others' names."""
    names = [f"{e.hook}:{e.name}:{e.reduce if isinstance(e.reduce, str) else 'function'}" for e in entries]
    digest = zlib.crc32("\n".join(names).encode())
    rows = group.agree([ran, len(names), digest])
    if all(row == rows[0] for row in rows):
        return entries
    everyone = group.all_gather_object([(e.hook, e.base, e.loader, e.options) for e in entries])
    told = [names for names, row in zip(everyone, rows, strict=True) if row[0]] or [[]]
    if any(names != told[0] for names in told):
        lines = "; ".join(
            f"rank {r}: {', '.join(n[1] for n in names) or 'nothing'}" for r, names in enumerate(everyone)
        )
        raise LogError(
            "the ranks logged different names",
            found=lines,
            fix="log the same names on every rank, or pass rank_zero_only=True or sync_dist=False",
        )
    return entries if ran else [Entry(*part) for part in told[0]]


def reduced(entries: list[Entry], step: bool, group: Group | None) -> list[float]:
    """One value for each entry: one packed exchange for all of them, and one read."""
    alone = group is None or group.size == 1
    values: dict[int, float] = {}
    packed: list[tuple[int, Entry]] = []
    for index, entry in enumerate(entries):
        if entry.metric is not None:
            values[index] = _computed(entry, step)
        elif callable(entry.reduce) and not step:
            lists = [[float(v) for v in entry.values]]  # sync point: a function of all values
            if not alone and group is not None:
                lists = group.all_gather_object(lists[0])
            everyone = torch.tensor([v for part in lists for v in part])
            values[index] = float(entry.reduce(everyone))  # no sync point: on the host already
        else:
            packed.append((index, entry))
    if packed:
        rows = _rows([e for _, e in packed], step, group)
        for column, (index, entry) in enumerate(packed):
            pairs = [(row[2 * column], row[2 * column + 1]) for row in rows]
            values[index] = _over_ranks(entry.reduce, [pair for pair in pairs if pair[1]])
    return [values[index] for index in range(len(entries))]


def _rows(entries: list[Entry], step: bool, group: Group | None) -> list[list[float]]:
    pairs = []
    for entry in entries:
        if step and entry.last is not None:
            pairs.append(entry.step_pair())
        else:
            entry.fold()
            pairs.append(torch.zeros(2, dtype=torch.float64) if entry.sums is None else entry.sums)
    device = next((p.device for p in pairs if p.device.type != "cpu"), pairs[0].device)
    flat = torch.cat([p.to(device) for p in pairs])
    if group is None or group.size == 1:
        return [flat.tolist()]  # sync point: the flush
    rows: list[list[float]] = group.all_gather(flat).tolist()  # sync point: the flush
    return rows


def _over_ranks(kind: Any, pairs: list[tuple[float, float]]) -> float:
    if not pairs:
        return math.nan
    if kind == "sum":
        return math.fsum(value for value, _ in pairs)
    if kind in ("min", "max"):
        return (min if kind == "min" else max)(value for value, _ in pairs)
    return math.fsum(value for value, _ in pairs) / math.fsum(weight for _, weight in pairs)


def _computed(entry: Entry, step: bool) -> float:
    metric = entry.metric
    if step:
        cached = getattr(metric, "_forward_cache", None)
        return math.nan if cached is None else float(cached)  # sync point: the flush
    return float(metric.compute())  # sync point: the flush; torchmetrics reduces over the ranks by itself
