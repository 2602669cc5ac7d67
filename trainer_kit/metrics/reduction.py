"""From what was recorded to one value on the host: over time, and over the ranks in one packed exchange."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from trainer_kit.core.errors import LogError
from trainer_kit.core.protocols import Group
from trainer_kit.metrics.entry import Entry
from trainer_kit.metrics.objects import place_of

__all__ = ["agreed", "reduced"]


def agreed(
    entries: list[Entry],
    group: Group,
    ran: bool,
    absent: Collection[int | None] = (),
    module: nn.Module | None = None,
) -> list[Entry]:
    """The same entries on every rank; what a rank ran no batch of, it takes from the others.

    Args:
        entries: this rank's, sorted alike on every rank.
        group: the ranks.
        ran: whether this rank ran any batch.
        absent: of several loaders those that this rank has no batch of.
        module: whose metric objects take part, empty, where this rank ran no batch.
    """
    names = [f"{e.hook}:{e.name}:{e.reduce if isinstance(e.reduce, str) else 'function'}" for e in entries]
    digest = zlib.crc32("\n".join(names).encode())
    rows = group.agree([ran, len(names), digest])
    if all(row == rows[0] for row in rows):
        return entries
    told_here = [(e.hook, e.base, e.loader, e.options, _place(e.metric, module)) for e in entries]
    everyone: list[_Told] = group.all_gather_object((ran, list(absent), told_here))
    whole: list[_Name] = []
    for loader in sorted({name[2] for _, _, told in everyone for name in told}, key=_loader_first):
        told = [[n for n in names if n[2] == loader] for ran_, lacks, names in everyone if ran_ and loader not in lacks]
        if any(names != told[0] for names in told):
            raise _different(everyone)
        whole += told[0] if told else []
    # What was restored with a checkpoint counts, although this rank ran no batch since.
    known = {(e.hook, e.base, e.loader): e for e in entries if (ran or e.restored) and e.loader not in absent}
    return [_entry(name, known.get(name[:3]), module) for name in whole]


def _entry(name: _Name, known: Entry | None, module: nn.Module | None) -> Entry:
    hook, base, loader, options, place = name
    if known is not None and not (known.restored and known.options != options):
        return known
    made = Entry(hook, base, loader, options)
    if known is not None:
        made.adopt(known)
    if place is not None and module is not None:
        made.metric, made.borrowed = module.get_submodule(place), True
    return made


def _place(metric: Any, module: nn.Module | None) -> str | None:
    """Where another rank finds the same metric object; it computes together with all of them."""
    if metric is None:
        return None
    place = place_of(metric, module)
    if place is None:
        raise LogError(
            "a metric object that only some ranks have a batch for must be found on the others",
            found=f"a {type(metric).__name__} that is no submodule of the module",
            fix="keep it as an attribute of the module (self.metric = ...)",
        )
    return place


_Name = tuple[str, str, int | None, Any, "str | None"]
_Told = tuple[bool, list[int | None], list[_Name]]


def _loader_first(loader: int | None) -> int:
    return -1 if loader is None else loader


def _different(everyone: list[_Told]) -> LogError:
    lines = "; ".join(
        f"rank {rank}: {', '.join(name[1] for name in names) or 'nothing'}"
        for rank, (_, _, names) in enumerate(everyone)
    )
    return LogError(
        "the ranks logged different names",
        found=lines,
        fix="log the same names on every rank, or pass rank_zero_only=True or sync_dist=False",
    )


def reduced(entries: list[Entry], step: bool, group: Group | None) -> list[float]:
    """One value for each entry: one packed exchange for all of them, and one read."""
    alone = group is None or group.size == 1
    values: dict[int, float] = {}
    packed: list[tuple[int, Entry]] = []
    if alone and step:
        return _latest(entries)
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


def _latest(entries: list[Entry]) -> list[float]:
    """Nobody to ask, and one value each: what was recorded last."""
    found = [_computed(entry, True) if entry.metric is not None else entry.last for entry in entries]
    away = [value for value in found if isinstance(value, torch.Tensor) and value.device.type != "cpu"]
    if away:  # one read for all of them
        wide = torch.float32 if away[0].device.type == "mps" else torch.float64
        read = iter(torch.stack([value.to(wide) for value in away]).tolist())  # sync point: the flush
        found = [next(read) if isinstance(v, torch.Tensor) and v.device.type != "cpu" else v for v in found]
    return [float(value) for value in found]  # no sync point: on the host


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
    if not entry.borrowed:
        return float(metric.compute())  # sync point: the flush; torchmetrics reduces over the ranks by itself
    metric.reset()  # a stage of a pipeline may have counted what another rank reports
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it was never updated
        value = float(metric.compute())  # sync point: the flush
    metric.reset()  # it remembers what it computed
    return value
