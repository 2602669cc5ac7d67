"""Logged names: options, values since the last flush, and their reduction over time and over ranks."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import chain, repeat
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor, nn

from trainer_kit.core.errors import LogError
from trainer_kit.core.hooks import hooks_where
from trainer_kit.core.protocols import Group
from trainer_kit.core.tensors import move_to_device
from trainer_kit.core.types import SavedState
from trainer_kit.metrics.objects import LAST_VALUE, MetricObject, name_in_module

__all__ = [
    "BATCH_HOOKS",
    "CLOSED_HOOKS",
    "Entry",
    "Options",
    "ReduceFx",
    "Reduced",
    "Value",
    "agreed",
    "reduced",
]

Value: TypeAlias = Any
"""A number, or a tensor that is read at the flush."""
ReduceFx: TypeAlias = Any
"""The argument ``reduce_fx`` as the user passes it: a name, a function of torch or Python, or one of the user's."""
Options: TypeAlias = tuple[
    bool, bool | None, bool | None, bool | None, ReduceFx, bool, bool, bool
]
"""The arguments of `TrainModule.log`: prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, add_dataloader_idx,
rank_zero_only. A plain tuple, because one is made at every call."""
_Reduction: TypeAlias = str | Callable[[Tensor], float | Tensor]
"""``"mean"``, ``"sum"``, ``"min"``, ``"max"``, or a function of all values."""
_EntryState: TypeAlias = list[Any]
"""An entry as checkpoints hold it: a list, whose order is that of `Entry.state`."""

BATCH_HOOKS: Final = frozenset(
    {
        "training_step",
        *hooks_where(logs="batch"),
    }
)
"""Where a logged value belongs to a batch."""
# Outside of an entry point there is no hook, and a value logged there would go nowhere.
CLOSED_HOOKS: Final = frozenset(
    {
        "",
        "predict_step",
        *hooks_where(logs="never"),
    }
)
"""Where nothing can be logged."""
_REDUCTIONS: Final = ("mean", "sum", "min", "max")
_OPTIONS_OF_OLD_STATES: Final = (False, None, False, True, "mean", True, True, False)
"""Checkpoints without options hold only sums of epochs."""
_REDUCE_FX: Final = 4
"""The place of ``reduce_fx`` among the options."""


@final
class Entry:
    """One logged name in one hook: its options, and what was recorded since the last flush.

    Args:
        hook: in which it is logged.
        name: as the user gives it.
        loader: the index of the evaluation loader, if there are several.
        options: of `TrainModule.log`.

    Attributes:
        name: with the index of the loader.
        reduction_name: the name of the reduction; ``"function"`` for one of the user's.
        averages: whether the values of batches are averaged by the weights of the batches.
        values, weights: what was logged since they were folded into the sums.
        sums: the reduced value and its weight, in float64 where the device has it; None before the first fold.
        metric: the metric object that was logged, or None.
        borrowed: whether that belongs to a name of another rank, and this one had no batch.
        last, last_weight: what was logged last.
        turn: the count of steps when it was logged last; -1 if that was delivered, or nothing was logged.
        restored: whether its sums are those of an interrupted epoch, from a checkpoint.
    """

    def __init__(
        self, hook: str, name: str, loader: int | None, options: Options
    ) -> None:
        (
            prog_bar,
            logger,
            on_step,
            on_epoch,
            reduce_fx,
            sync_dist,
            add_dataloader_idx,
            rank_zero_only,
        ) = options
        self.hook = hook
        self.loader = loader
        self.options = options
        self.restored = False
        self.base = name
        self.suffix = ""
        if loader is not None and add_dataloader_idx:
            self.suffix = f"/dataloader_idx_{loader}"
        self.name = name + self.suffix
        is_batch_hook = hook in BATCH_HOOKS
        if on_step is None:
            on_step = is_batch_hook
        if on_epoch is None:
            on_epoch = not is_batch_hook
        self.on_step = on_step
        self.on_epoch = on_epoch
        # Steps of an evaluation have them too, although it reduces over the epoch by default.
        has_steps = is_batch_hook or hook.endswith(
            ("_step", "_batch_start", "_batch_end")
        )
        if on_step and not has_steps:
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
        self.reduce = _read_reduction(name, reduce_fx)
        self.reduction_name = "function" if callable(self.reduce) else self.reduce
        self.averages = has_steps and self.on_epoch and self.reduce == "mean"
        self.sync: bool = sync_dist
        self.rank_zero: bool = rank_zero_only
        self.values: list[Value] = []
        self.weights: list[float] = []
        self.sums: Tensor | None = None
        self.metric: MetricObject = None
        self.borrowed = False
        self.last: Value = None
        self.last_weight = 1.0
        self.turn = -1

    def copied(self) -> Entry:
        """A copy; values logged into either one do not reach the other."""
        other = copy(self)
        other._unshare()
        return other

    def _unshare(self) -> None:
        """Replace what an attribute-by-attribute copy shares with its original, and what logging changes in place."""
        self.values = list(self.values)
        self.weights = list(self.weights)
        if self.sums is not None:
            self.sums = self.sums.clone()

    @property
    def recorded(self) -> bool:
        """Whether anything was logged since the last `clear`."""
        if self.values or self.metric is not None:
            return True
        return self.sums is not None

    @property
    def key(self) -> tuple[str, str, int | None]:
        """What tells entries of a table apart."""
        return self.hook, self.base, self.loader

    def forked(self, kind: str) -> str:
        """The logged name of the value per ``"step"`` or per ``"epoch"``."""
        if self.on_step and self.on_epoch:
            return f"{self.base}_{kind}{self.suffix}"
        return self.name

    def present_values(self, delivers: bool = False) -> dict[str, Tensor]:
        """The value between two flushes by its names: the latest one, or the reduction so far.

        Args:
            delivers: whether the value of this step is handed on with this call.
        """
        if delivers:
            self.turn = -1
        if self.on_step:
            last = self.last
            if self.metric is not None:
                last = getattr(self.metric, LAST_VALUE, None)
            if last is None:
                return {}
            dtype = None
            if isinstance(last, float):
                # It may have been a float32 tensor: float32 or more, whatever dtype the model has.
                dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
            value = torch.as_tensor(last, dtype=dtype)
            return {self.name: value, self.forked("step"): value}
        if self.metric is not None or callable(self.reduce):
            return {}
        self.fold()
        assert self.sums is not None
        value = self.sums[0]
        if self.reduce == "mean":
            value = value / self.sums[1]
        return {self.name: value.to(torch.get_default_dtype())}

    def fold(self) -> None:
        """Reduce the recorded values into the running sums."""
        if not self.values or callable(self.reduce):
            return
        pair = _reduce_over_time(self.reduce, _stack(self.values), self.weights)
        self.values.clear()
        self.weights.clear()
        if self.sums is None:
            self.sums = pair
            return
        # What a checkpoint held is on the host.
        sums = self.sums.to(pair)
        if self.reduce in ("mean", "sum"):
            self.sums = sums + pair
            return
        if self.reduce == "min":
            value = torch.minimum(sums[0], pair[0])
        else:
            value = torch.maximum(sums[0], pair[0])
        self.sums = torch.stack([value, sums[1] + pair[1]])

    def step_pair(self) -> Tensor:
        """The latest value and its weight, in the form that ``fold`` makes."""
        kind = self.reduce
        # A user's function is of an epoch: a step has one value, whose mean over the ranks is shown.
        if callable(kind):
            kind = "mean"
        return _reduce_over_time(kind, _stack([self.last]), [self.last_weight])

    def state(self, metric_name: str | None) -> _EntryState:
        """The recorded values in a form for checkpoints; a custom reduction function is set again by the next `log`.

        Args:
            metric_name: the name of the logged metric object in the module.
        """
        self.fold()
        values = list(
            map(float, self.values)
        )  # sync point: a checkpoint is being taken
        options: list[object] = list(self.options)
        # A function cannot be loaded safely from a checkpoint: only that it was one is kept.
        options[_REDUCE_FX] = self.reduction_name
        latest = {
            "value": self.last,
            "weight": self.last_weight,
            "turn": self.turn,
            "metric": metric_name,
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
    def from_state(state: _EntryState, modules: Mapping[str, nn.Module]) -> Entry:
        """Create an entry from a `state`; a metric object is looked up in ``modules`` by its name."""
        hook, name, loader, sums, values, weights, *later_fields = state
        # Older checkpoints end here, or after the options.
        options: list[Any] = list(_OPTIONS_OF_OLD_STATES)
        if later_fields:
            options = list(later_fields[0])
        # The value is NaN until the run logs the name again, which replaces this entry by one with the function.
        if options[_REDUCE_FX] == "function":
            options[_REDUCE_FX] = partial(_warn_of_unknown_function, name)
        entry = Entry(hook, name, loader, tuple(options))
        latest = None
        metric = None
        if len(later_fields) > 1:
            latest = later_fields[1]
            metric = modules.get(latest["metric"])
        entry._restore(sums, values, weights, latest, metric)
        return entry

    def _restore(
        self,
        sums: Tensor | None,
        values: Iterable[float],
        weights: Iterable[float],
        latest: SavedState | None,
        metric: MetricObject,
    ) -> None:
        self.restored = True
        self.sums = sums
        self.values = list(values)
        self.weights = list(weights)
        if latest is not None:
            self.last = latest["value"]
            self.last_weight = latest["weight"]
            self.turn = latest["turn"]
            self.metric = metric

    def adopt(self, restored: Entry) -> None:
        """Take over the values of a checkpoint."""
        self.sums = restored.sums
        self.values = restored.values
        self.weights = restored.weights
        self.last = restored.last
        self.last_weight = restored.last_weight
        self.turn = restored.turn
        self.metric = restored.metric

    def borrow(self, metric: MetricObject) -> None:
        """Take part in the exchange of a metric object that only other ranks logged."""
        self.metric = metric
        self.borrowed = True

    def clear(self) -> None:
        """Drop the recorded values; a metric object keeps its state, which hooks of the epoch's end may read."""
        self.values.clear()
        self.weights.clear()
        self.sums = None
        self.last = None
        self.metric = None
        self.turn = -1


def _warn_of_unknown_function(name: str, values: Tensor) -> float:
    """The reduction of an entry from a checkpoint whose function the run has not logged again."""
    warnings.warn(
        f"{name!r} is NaN for this epoch: its reduce_fx is a function, which no checkpoint holds, and it has not been"
        ' logged since the run was resumed; "mean", "sum", "min" and "max" are kept',
        stacklevel=2,
    )
    return math.nan


_NAMES_OF_FUNCTIONS: Final[dict[object, str]] = {
    "avg": "mean",
    torch.mean: "mean",
    sum: "sum",
    min: "min",
    max: "max",
    torch.sum: "sum",
    torch.min: "min",
    torch.max: "max",
}


def _read_reduction(name: str, reduce_fx: ReduceFx) -> _Reduction:
    """``"mean"``, ``"sum"``, ``"min"`` or ``"max"``, in any case or as torch's function; or the user's function."""
    if not isinstance(reduce_fx, str) and not callable(reduce_fx):
        raise LogError(
            f"unknown reduce_fx for {name!r}",
            found=repr(reduce_fx),
            fix="use mean, sum, min, max or a function",
        )
    key: ReduceFx = reduce_fx
    if isinstance(reduce_fx, str):
        key = reduce_fx.lower()
    reduction: _Reduction = key
    if key in _NAMES_OF_FUNCTIONS:
        reduction = _NAMES_OF_FUNCTIONS[key]
    if isinstance(reduction, str) and reduction not in _REDUCTIONS:
        raise LogError(
            f"unknown reduce_fx for {name!r}",
            found=repr(reduce_fx),
            fix="use mean, sum, min or max",
        )
    return reduction


class Reduced(dict[str, float]):
    """Values on the host after a flush: all by name, and those for the loggers and the progress bar."""

    def __init__(self) -> None:
        super().__init__()
        self.logger: dict[str, float] = {}
        self.progress_bar: dict[str, float] = {}
        self.by_loader: dict[int | None, dict[str, float]] = {}

    def put(self, entry: Entry, value: float, step: bool) -> None:
        """Add the value of an entry: of a step, or of an epoch."""
        if step:
            forked = entry.forked("step")
        else:
            forked = entry.forked("epoch")
        self[entry.name] = value
        self[forked] = value
        if entry.to_logger:
            self.logger[forked] = value
        if entry.prog_bar:
            self.progress_bar[forked] = value
        self.by_loader.setdefault(entry.loader, {})[forked] = value

    def add(self, later: Reduced) -> None:
        """Add the values of a later flush of the same round."""
        self.update(later)
        self.logger.update(later.logger)
        self.progress_bar.update(later.progress_bar)
        for loader, values in later.by_loader.items():
            self.by_loader.setdefault(loader, {}).update(values)


def _stack(values: Sequence[Value]) -> Tensor:
    """Numbers and tensors as one tensor, in float64 where the device has it."""
    # No Python call for each value.
    if all(map(isinstance, values, repeat((int, float)))):
        return torch.tensor(values, dtype=torch.float64)
    device = next(value.device for value in values if isinstance(value, Tensor))
    wide = _widest_dtype(device)
    tensors: list[Tensor] = []
    for value in values:
        if not isinstance(value, Tensor):
            value = torch.as_tensor(value, dtype=wide)
        if value.device != device:
            # A copy that waits would be a sync in a step.
            value = move_to_device(value, device)
        tensors.append(value)
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) == 1:
        return torch.stack(tensors).to(wide)
    return torch.stack([tensor.to(wide) for tensor in tensors])


def _widest_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which sums lose the least on this device: Apple's GPUs have no float64."""
    if device.type == "mps":
        return torch.float32
    return torch.float64


def _reduce_over_time(kind: str, values: Tensor, weights: Iterable[float]) -> Tensor:
    """The reduced value and its weight; of a mean the weighted sum, so that means can be added."""
    on_host = torch.tensor(list(weights), dtype=values.dtype)
    weight = move_to_device(on_host, values.device)
    # Sums, not means: those of later values and of other ranks are added to them.
    if kind == "mean":
        weighted = values * weight
        return torch.stack([weighted.sum(), weight.sum()])
    if kind == "sum":
        total = values.sum()
    elif kind == "min":
        total = values.amin()
    else:
        total = values.amax()
    count = values.new_full((), len(values))
    return torch.stack([total, count])


_Name: TypeAlias = tuple[str, str, int | None, Options, "str | None"]
"""Hook, name, loader, options, and the name of the metric object in the module."""
_Logged: TypeAlias = tuple[bool, list[int | None], list[_Name]]
"""Of one rank: whether it has run a batch, the loaders of which it has none, and what it logged."""


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
    # The names themselves are exchanged only where a small number differs: this runs at every flush.
    texts = [f"{e.hook}:{e.name}:{e.reduction_name}" for e in entries]
    digest = zlib.crc32("\n".join(texts).encode())
    rows = group.agree([ran, len(texts), digest])
    if all(row == rows[0] for row in rows):
        return entries
    names = [_name_of_entry(entry, module) for entry in entries]
    logged: list[_Logged] = group.all_gather_object((ran, list(absent), names))
    # What was restored with a checkpoint counts, although this rank ran no batch since.
    counted = {
        entry.key: entry
        for entry in entries
        if (ran or entry.restored) and entry.loader not in absent
    }
    return [
        _entry_of_name(name, counted.get(name[:3]), module)
        for name in _names_of_all_ranks(logged)
    ]


def _names_of_all_ranks(logged: list[_Logged]) -> list[_Name]:
    """The names that are reduced, in one order.

    Raises:
        LogError: two ranks that have batches of a loader logged different names.
    """
    loaders: set[int | None] = set()
    for _, _, names in logged:
        loaders.update(name[2] for name in names)
    agreed_names: list[_Name] = []
    for loader in sorted(loaders, key=_loader_order):
        names_of_ranks: list[list[_Name]] = []
        for ran, absent, names in logged:
            # A rank without a batch of this loader has nothing to agree on.
            if not ran or loader in absent:
                continue
            names_of_loader = [name for name in names if name[2] == loader]
            names_of_ranks.append(names_of_loader)
        if not names_of_ranks:
            continue
        first = names_of_ranks[0]
        if any(names != first for names in names_of_ranks):
            raise _different_names(logged)
        agreed_names += first
    return agreed_names


def _entry_of_name(name: _Name, entry: Entry | None, module: nn.Module | None) -> Entry:
    """This rank's entry, if it may be used; else one without values, but for those of a checkpoint."""
    hook, base, loader, options, metric_name = name
    if entry is not None and (not entry.restored or entry.options == options):
        return entry
    substitute = Entry(hook, base, loader, options)
    if entry is not None:
        substitute.adopt(entry)
    if metric_name is not None and module is not None:
        substitute.borrow(module.get_submodule(metric_name))
    return substitute


def _name_of_entry(entry: Entry, module: nn.Module | None) -> _Name:
    metric_name = _name_on_all_ranks(entry.metric, module)
    return entry.hook, entry.base, entry.loader, entry.options, metric_name


def _name_on_all_ranks(metric: MetricObject, module: nn.Module | None) -> str | None:
    """The name by which another rank finds the same metric object; all ranks compute it together."""
    if metric is None:
        return None
    name = name_in_module(metric, module)
    if name is None:
        raise LogError(
            "a metric object was logged on some ranks only, and the others cannot find it",
            found=f"a {type(metric).__name__} that is not a submodule of the module",
            fix="keep it as an attribute of the module (self.metric = ...)",
        )
    return name


def _loader_order(loader: int | None) -> int:
    """Sort names of no loader, which None cannot be compared with, before those of loaders."""
    if loader is None:
        return -1
    return loader


def _different_names(logged: list[_Logged]) -> LogError:
    """The error that lists what each rank logged, for the same text on all of them."""
    descriptions: list[str] = []
    for rank, (_, _, names) in enumerate(logged):
        bases = ", ".join(name[1] for name in names)
        descriptions.append(f"rank {rank}: {bases or 'nothing'}")
    return LogError(
        "the ranks logged different names",
        found="; ".join(descriptions),
        fix="log the same names on every rank, or pass rank_zero_only=True or sync_dist=False",
    )


def reduced(entries: list[Entry], step: bool, group: Group | None) -> list[float]:
    """One value for each entry: one packed exchange for all of them, and one read."""
    is_alone = group is None or group.size == 1
    if is_alone and step:
        # Values of one rank in one step need no arithmetic: they stay what was logged.
        return _latest(entries)
    values: dict[int, float] = {}
    packed: list[tuple[int, Entry]] = []
    for index, entry in enumerate(entries):
        # A metric object exchanges its own states, and a function needs all values: neither fits into a pair.
        if entry.metric is not None:
            values[index] = _computed(entry, step)
        elif callable(entry.reduce) and not step:
            values[index] = _call_reduction(entry, entry.reduce, group)
        else:
            packed.append((index, entry))
    if packed:
        packed_entries = [entry for _, entry in packed]
        packed_values = _reduce_together(packed_entries, step, group)
        for (index, _), value in zip(packed, packed_values, strict=True):
            values[index] = value
    return [values[index] for index in range(len(entries))]


def _reduce_together(
    entries: list[Entry], step: bool, group: Group | None
) -> list[float]:
    """The values of entries that are pairs of numbers, over the ranks."""
    rows = _exchange_pairs(entries, step, group)
    values: list[float] = []
    for number, entry in enumerate(entries):
        column = 2 * number
        turn_column = 2 * len(entries) + number
        # Without a weight a rank has logged nothing.
        logged = [row for row in rows if row[column + 1]]
        # A rank without a share of the last batch has a value of an earlier step.
        latest = max(
            (row[turn_column] for row in logged),
            default=0.0,
        )
        pairs = []
        for row in logged:
            if row[turn_column] == latest:
                pair = (row[column], row[column + 1])
                pairs.append(pair)
        value = _reduce_over_ranks(entry.reduce, pairs)
        values.append(value)
    return values


def _call_reduction(
    entry: Entry, reduction: Callable[[Tensor], float | Tensor], group: Group | None
) -> float:
    """The user's function of the values of all ranks."""
    numbers = list(map(float, entry.values))  # sync point: a function of all values
    if group is not None and group.size > 1:
        numbers = list(chain.from_iterable(group.all_gather_object(numbers)))
    return float(reduction(torch.tensor(numbers)))  # no sync point: on the host already


def _latest(entries: list[Entry]) -> list[float]:
    """The last recorded value of each entry, for one rank."""
    values: list[Value] = [
        entry.last if entry.metric is None else _computed(entry, step=True)
        for entry in entries
    ]
    on_device = [
        index
        for index, value in enumerate(values)
        if isinstance(value, Tensor) and value.device.type != "cpu"
    ]
    # One read for all of them: each would wait for the device.
    if on_device:
        wide = _widest_dtype(values[on_device[0]].device)
        tensors = [values[index].to(wide) for index in on_device]
        numbers = torch.stack(tensors).tolist()  # sync point: the flush
        for index, number in zip(on_device, numbers, strict=True):
            values[index] = number
    return list(map(float, values))  # no sync point: on the host


def _exchange_pairs(
    entries: list[Entry], step: bool, group: Group | None
) -> list[list[float]]:
    """For each rank the values and weights of these entries, one after the other, and then when each was logged.

    That is the count of steps for values of a step; for sums it has no meaning, and is 0.
    """
    pairs: list[Tensor] = []
    turns: list[float] = []
    for entry in entries:
        if step and entry.last is not None:
            pairs.append(entry.step_pair())
            turns.append(entry.turn)
            continue
        turns.append(0)
        entry.fold()
        if entry.sums is None:
            pairs.append(torch.zeros(2, dtype=torch.float64))
        else:
            pairs.append(entry.sums)
    # Sums of a checkpoint and of a rank without values are on the host, where an accelerator's group cannot send them.
    devices = [pair.device for pair in pairs]
    device = next((each for each in devices if each.type != "cpu"), devices[0])
    # One device for all, so that one exchange and one read are enough.
    # Not of a narrow dtype: steps are counted exactly.
    turn_numbers = torch.tensor(
        turns,
        dtype=pairs[0].dtype,
    )
    pairs.append(turn_numbers)
    flat = torch.cat([pair.to(device) for pair in pairs])
    if group is None or group.size == 1:
        return [flat.tolist()]  # sync point: the flush
    rows: list[list[float]] = group.all_gather(flat).tolist()  # sync point: the flush
    return rows


def _reduce_over_ranks(kind: _Reduction, pairs: list[tuple[float, float]]) -> float:
    """The value over the ranks that logged one."""
    if not pairs:
        return math.nan
    values = [value for value, _ in pairs]
    if kind == "sum":
        return math.fsum(values)
    if kind == "min":
        return min(values)
    if kind == "max":
        return max(values)
    return math.fsum(values) / math.fsum(weight for _, weight in pairs)


def _computed(entry: Entry, step: bool) -> float:
    """The value of a metric object, of its last update or of the epoch."""
    metric = entry.metric
    if step:
        value = getattr(metric, LAST_VALUE, None)
        # Its `update` was called, not the metric itself: then torchmetrics has no value of the batch.
        if value is None:
            return math.nan
        return float(value)  # sync point: the flush
    if not entry.borrowed:
        # torchmetrics reduces over the ranks by itself.
        return float(metric.compute())  # sync point: the flush
    # A stage of a pipeline may have counted what another rank reports.
    metric.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it was never updated
        # It remembers the value, as on the other ranks: a hook that reads it starts no exchange on this rank alone.
        return float(metric.compute())  # sync point: the flush
