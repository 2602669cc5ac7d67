"""Logged names: options, values since the last flush, and their reduction over time and over ranks."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import repeat
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from trainer_kit.core.errors import LogError
from trainer_kit.core.protocols import Group
from trainer_kit.core.tensors import move_to_device
from trainer_kit.metrics.objects import place_of

__all__ = ["BATCH_HOOKS", "CLOSED_HOOKS", "Entry", "Reduced", "agreed", "reduced"]

BATCH_HOOKS: Final = frozenset(
    {
        "training_step",
        "on_train_batch_start",
        "on_train_batch_end",
        "on_train_step_end",
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
    }
)
CLOSED_HOOKS: Final = frozenset(
    {
        "",
        "on_fit_start",
        "on_fit_end",
        "on_train_end",
        "on_sanity_check_start",
        "on_sanity_check_end",
        "on_validation_end",
        "on_test_end",
        "on_exception",
        "on_save_checkpoint",
        "on_load_checkpoint",
        "predict_step",
        "on_predict_start",
        "on_predict_end",
        "on_predict_epoch_start",
        "on_predict_epoch_end",
        "on_predict_batch_start",
        "on_predict_batch_end",
    }
)


@final
class Entry:
    """One logged name in one hook: its options, and what was recorded since the last flush."""

    def __init__(
        self, hook: str, name: str, loader: int | None, options: tuple[Any, ...]
    ) -> None:
        prog_bar, logger, on_step, on_epoch, reduce_fx, sync, add_loader, rank_zero = (
            options
        )
        self.hook, self.loader = hook, loader
        self.options = options
        self.restored = False  # sums of an interrupted epoch, from a checkpoint
        self.base, self.place = (
            name,
            "" if loader is None or not add_loader else f"/dataloader_idx_{loader}",
        )
        self.name = name + self.place
        by_batch = hook in BATCH_HOOKS
        self.on_step: bool = by_batch if on_step is None else on_step
        self.on_epoch: bool = not by_batch if on_epoch is None else on_epoch
        of_batch = by_batch or hook.endswith(("_step", "_batch_start", "_batch_end"))
        if on_step and not of_batch:
            raise LogError(
                f"{name!r} has no steps in {hook}",
                found="on_step=True",
                fix="log it with on_epoch=True",
            )
        if not self.on_step and not self.on_epoch:
            raise LogError(
                f"{name!r} would never be shown or logged",
                found=f"neither on_step nor on_epoch in {hook}",
                fix="pass on_step=True or on_epoch=True",
            )
        self.prog_bar: bool = prog_bar
        self.to_logger: bool = logger is not False
        self.reduce = _reduction(name, reduce_fx)
        self.averages = (
            of_batch and self.on_epoch and self.reduce == "mean"
        )  # over batches, by their weights
        self.sync, self.rank_zero = sync, rank_zero
        self.values: list[Any] = []
        self.weights: list[float] = []
        self.sums: Tensor | None = (
            None  # (reduced value, weight), float64 where the device has it
        )
        self.metric: Any = None
        self.borrowed = False  # the metric belongs to a rank without a batch
        self.last: Any = None
        self.last_weight = 1.0
        self.turn = -1

    def copied(self) -> Entry:
        """A copy; values logged into either one do not reach the other."""
        other = copy(self)
        other.values, other.weights = list(self.values), list(self.weights)
        other.sums = None if self.sums is None else self.sums.clone()
        return other

    @property
    def recorded(self) -> bool:
        """Whether anything was logged since the last `clear`."""
        return bool(self.values) or self.sums is not None or self.metric is not None

    def forked(self, kind: str) -> str:
        """The logged name of the value per ``"step"`` or per ``"epoch"``."""
        return (
            f"{self.base}_{kind}{self.place}"
            if self.on_step and self.on_epoch
            else self.name
        )

    def now(self) -> dict[str, Tensor]:
        """The value between two flushes: the latest one, or the reduction so far."""
        if self.on_step:
            last = (
                self.last
                if self.metric is None
                else getattr(self.metric, "_forward_cache", None)
            )
            if last is None:
                return {}
            # Of a number, which may have been a float32 tensor: float32 or more, whatever dtype the model has.
            exact = (
                torch.promote_types(torch.get_default_dtype(), torch.float32)
                if isinstance(last, float)
                else None
            )
            value = torch.as_tensor(last, dtype=exact)
            return {self.name: value, self.forked("step"): value}
        if self.metric is not None or callable(self.reduce):
            return {}
        self.fold()
        assert self.sums is not None
        value = self.sums[0] / self.sums[1] if self.reduce == "mean" else self.sums[0]
        return {self.name: value.to(torch.get_default_dtype())}

    def fold(self) -> None:
        """Reduce the recorded values into the running sums."""
        if not self.values or callable(self.reduce):
            return
        pair = _pair(self.reduce, _stacked(self.values), self.weights)
        self.values.clear()
        self.weights.clear()
        if self.sums is None:
            self.sums = pair
            return
        before = self.sums.to(pair)  # what a checkpoint held is on the host
        if self.reduce in ("mean", "sum"):
            self.sums = before + pair
        else:
            best = torch.minimum if self.reduce == "min" else torch.maximum
            self.sums = torch.stack([best(before[0], pair[0]), before[1] + pair[1]])

    def step_pair(self) -> Tensor:
        """The latest value and its weight, in the form that ``fold`` makes."""
        kind = "mean" if callable(self.reduce) else self.reduce
        return _pair(kind, _stacked([self.last]), [self.last_weight])

    def state(self, place: str | None) -> list[Any]:
        """The recorded values in a form for checkpoints; a custom reduction function is set again by the next `log`.

        Args:
            place: the name of the logged metric object in the module.
        """
        self.fold()
        values = [
            float(v) for v in self.values
        ]  # sync point: a checkpoint is being taken
        options = list(self.options)
        options[4] = self.reduce if isinstance(self.reduce, str) else "function"
        latest = {
            "value": self.last,
            "weight": self.last_weight,
            "turn": self.turn,
            "metric": place,
        }
        return [
            self.hook,
            self.base,
            self.loader,
            self.sums,
            values,
            list(self.weights),
            options,
            latest,
        ]

    @staticmethod
    def of_state(state: Sequence[Any], modules: Mapping[str, Any]) -> Entry:
        """Make an entry from a `state`; a metric object is looked up in ``modules`` by its place."""
        hook, name, loader, sums, values, weights, *rest = state
        options = (
            list(rest[0])
            if rest
            else [False, None, False, True, "mean", True, True, False]
        )
        if options[4] == "function":
            options[4] = partial(_unknown, name)
        entry = Entry(hook, name, loader, tuple(options))
        entry.sums, entry.values, entry.weights = sums, list(values), list(weights)
        entry.restored = True
        if len(rest) > 1:
            entry.last, entry.last_weight, entry.turn = (
                rest[1][key] for key in ("value", "weight", "turn")
            )
            entry.metric = modules.get(rest[1]["metric"])
        return entry

    def adopt(self, restored: Entry) -> None:
        """Take over the values of a checkpoint."""
        self.sums, self.values, self.weights = (
            restored.sums,
            restored.values,
            restored.weights,
        )
        self.last, self.last_weight, self.turn = (
            restored.last,
            restored.last_weight,
            restored.turn,
        )
        self.metric = restored.metric

    def clear(self) -> None:
        """Drop the recorded values; a metric object keeps its state, which hooks of the epoch's end may read."""
        self.values.clear()
        self.weights.clear()
        self.sums = self.last = self.metric = None
        self.turn = -1


def _unknown(name: str, values: Tensor) -> float:
    warnings.warn(
        f"{name!r} is NaN for this epoch: its reduce_fx is a function, which no checkpoint holds, and it has not been"
        ' logged since the run was resumed; "mean", "sum", "min" and "max" are kept',
        stacklevel=2,
    )
    return math.nan


_NAMED: Final[dict[Any, str]] = {
    "avg": "mean",
    torch.mean: "mean",
    sum: "sum",
    min: "min",
    max: "max",
    torch.sum: "sum",
    torch.min: "min",
    torch.max: "max",
}


def _reduction(name: str, given: Any) -> Any:
    """``"mean"``, ``"sum"``, ``"min"`` or ``"max"``, in any case or as torch's function; or the user's function."""
    if not isinstance(given, str) and not callable(given):
        raise LogError(
            f"unknown reduce_fx for {name!r}",
            found=repr(given),
            fix="use mean, sum, min, max or a function",
        )
    known = given.lower() if isinstance(given, str) else given
    found = _NAMED.get(known, known)
    if isinstance(found, str) and found not in ("mean", "sum", "min", "max"):
        raise LogError(
            f"unknown reduce_fx for {name!r}",
            found=repr(given),
            fix="use mean, sum, min or max",
        )
    return found


class Reduced(dict[str, float]):
    """Values on the host after a flush: all by name, and those for the loggers and the progress bar."""

    def __init__(self) -> None:
        super().__init__()
        self.logger: dict[str, float] = {}
        self.progress_bar: dict[str, float] = {}
        self.by_loader: dict[int | None, dict[str, float]] = {}

    def add(self, later: Reduced) -> None:
        """Add the values of a later flush of the same round."""
        self.update(later)
        self.logger.update(later.logger)
        self.progress_bar.update(later.progress_bar)
        for loader, values in later.by_loader.items():
            self.by_loader.setdefault(loader, {}).update(values)


def _stacked(values: Sequence[Any]) -> Tensor:
    if all(
        map(isinstance, values, repeat((int, float)))
    ):  # no Python call for each value
        return torch.tensor(values, dtype=torch.float64)
    device = next(v.device for v in values if isinstance(v, Tensor))
    wide = torch.float32 if device.type == "mps" else torch.float64
    away = [
        v if isinstance(v, Tensor) else torch.as_tensor(v, dtype=wide) for v in values
    ]
    # A copy that waits would be a sync in a step.
    tensors: list[Tensor] = [
        v if v.device == device else move_to_device(v, device) for v in away
    ]
    if len({t.dtype for t in tensors}) == 1:
        return torch.stack(tensors).to(wide)
    return torch.stack([t.to(wide) for t in tensors])


def _pair(kind: str, values: Tensor, weights: Iterable[float]) -> Tensor:
    weight = move_to_device(
        torch.tensor(list(weights), dtype=values.dtype), values.device
    )
    if kind == "mean":
        return torch.stack([(values * weight).sum(), weight.sum()])
    count = torch.ones((), dtype=values.dtype, device=values.device) * len(values)
    return torch.stack(
        [getattr(values, {"sum": "sum", "min": "amin", "max": "amax"}[kind])(), count]
    )


def agreed(
    entries: list[Entry],
    group: Group,
    ran: bool,
    absent: Collection[int | None] = (),
    module: nn.Module | None = None,
) -> list[Entry]:
    """The same entries on every rank; a rank without a batch takes the names that it lacks from the others.

    Args:
        entries: this rank's, sorted alike on every rank.
        group: the ranks.
        ran: whether this rank has run a batch.
        absent: the loaders of which this rank has no batch.
        module: the module; its metric objects take part, empty, if this rank has run no batch.
    """
    names = [
        f"{e.hook}:{e.name}:{e.reduce if isinstance(e.reduce, str) else 'function'}"
        for e in entries
    ]
    digest = zlib.crc32("\n".join(names).encode())
    rows = group.agree([ran, len(names), digest])
    if all(row == rows[0] for row in rows):
        return entries
    here = [
        (e.hook, e.base, e.loader, e.options, _place(e.metric, module)) for e in entries
    ]
    everyone: list[_Logged] = group.all_gather_object((ran, list(absent), here))
    whole: list[_Name] = []
    for loader in sorted(
        {name[2] for _, _, logged in everyone for name in logged}, key=_loader_first
    ):
        present = [
            [n for n in names if n[2] == loader]
            for ran_, lacks, names in everyone
            if ran_ and loader not in lacks
        ]
        if any(names != present[0] for names in present):
            raise _different(everyone)
        whole += present[0] if present else []
    # What was restored with a checkpoint counts, although this rank ran no batch since.
    known = {
        (e.hook, e.base, e.loader): e
        for e in entries
        if (ran or e.restored) and e.loader not in absent
    }
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
    """The name by which another rank finds the same metric object; all ranks compute it together."""
    if metric is None:
        return None
    place = place_of(metric, module)
    if place is None:
        raise LogError(
            "a metric object was logged on some ranks only, and the others cannot find it",
            found=f"a {type(metric).__name__} that is not a submodule of the module",
            fix="keep it as an attribute of the module (self.metric = ...)",
        )
    return place


_Name = tuple[str, str, int | None, Any, "str | None"]
_Logged = tuple[bool, list[int | None], list[_Name]]


def _loader_first(loader: int | None) -> int:
    return -1 if loader is None else loader


def _different(everyone: list[_Logged]) -> LogError:
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
            lists = [
                [float(v) for v in entry.values]
            ]  # sync point: a function of all values
            if not alone and group is not None:
                lists = group.all_gather_object(lists[0])
            everyone = torch.tensor([v for part in lists for v in part])
            values[index] = float(
                entry.reduce(everyone)
            )  # no sync point: on the host already
        else:
            packed.append((index, entry))
    if packed:
        rows = _rows([e for _, e in packed], step, group)
        for column, (index, entry) in enumerate(packed):
            pairs = [(row[2 * column], row[2 * column + 1]) for row in rows]
            values[index] = _over_ranks(
                entry.reduce, [pair for pair in pairs if pair[1]]
            )
    return [values[index] for index in range(len(entries))]


def _latest(entries: list[Entry]) -> list[float]:
    """The last recorded value of each entry, for one rank."""
    found = [
        _computed(entry, True) if entry.metric is not None else entry.last
        for entry in entries
    ]
    away = [
        value
        for value in found
        if isinstance(value, torch.Tensor) and value.device.type != "cpu"
    ]
    if away:  # one read for all of them
        wide = torch.float32 if away[0].device.type == "mps" else torch.float64
        read = iter(
            torch.stack([value.to(wide) for value in away]).tolist()
        )  # sync point: the flush
        found = [
            next(read) if isinstance(v, torch.Tensor) and v.device.type != "cpu" else v
            for v in found
        ]
    return [float(value) for value in found]  # no sync point: on the host


def _rows(entries: list[Entry], step: bool, group: Group | None) -> list[list[float]]:
    pairs = []
    for entry in entries:
        if step and entry.last is not None:
            pairs.append(entry.step_pair())
        else:
            entry.fold()
            pairs.append(
                torch.zeros(2, dtype=torch.float64)
                if entry.sums is None
                else entry.sums
            )
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
    return math.fsum(value for value, _ in pairs) / math.fsum(
        weight for _, weight in pairs
    )


def _computed(entry: Entry, step: bool) -> float:
    metric = entry.metric
    if step:
        cached = getattr(metric, "_forward_cache", None)
        return math.nan if cached is None else float(cached)  # sync point: the flush
    if not entry.borrowed:
        return float(
            metric.compute()
        )  # sync point: the flush; torchmetrics reduces over the ranks by itself
    metric.reset()  # a stage of a pipeline may have counted what another rank reports
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it was never updated
        # It remembers the value, as on the other ranks: a hook that reads it starts no exchange on this rank alone.
        return float(metric.compute())  # sync point: the flush
