"""Logged values: kept on the device when they are logged, and reduced at a flush."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, TypeAlias, final

import torch
from torch import Tensor, nn

from trainer_kit.core.errors import LogError, printable
from trainer_kit.core.progress import Progress
from trainer_kit.core.protocols import Group
from trainer_kit.core.types import SavedState, StateDict
from trainer_kit.data import Feed
from trainer_kit.metrics.entry import (
    BATCH_HOOKS,
    CLOSED_HOOKS,
    Entry,
    Options,
    Reduced,
    ReduceFx,
    Value,
    agreed,
    reduced,
)
from trainer_kit.metrics.objects import (
    MetricObject,
    name_in_module,
    on_host,
    remember_metrics,
    restore_running,
    running_states,
)
from trainer_kit.strategies.strategy import Strategy

__all__ = ["Metrics"]

_FOLD: Final = 256
"""The values of an entry after which they are folded into its sums."""
_Table: TypeAlias = dict[tuple[str, str, int | None], Entry]
"""Entries by hook, name and loader."""


@final
class Metrics:
    """The values of `TrainModule.log`.

    Args:
        progress: the counts that decide whether a value belongs to the step being finished.

    Attributes:
        hook: the hook being called, to which logged values belong.
        loader: the index of the evaluation loader, if there are several.
        absent: the loaders of which this rank has no batch.
        weight: the weight of the current batch in a mean; None until a value needs it and calls ``weigh``.
        weigh: computes that weight with the user's ``loss_weight``; called only for values without a batch size.
        feed: gives the batches whose sizes are the weights, until the first value needs one; None if sizes are known.
        module: the module that owns the logged metric objects.
        by_batch: whether a value of this evaluation was logged with ``on_step``.
        counts: whether this rank's values are counted; otherwise another rank reports the same values.
        shares_all: whether each rank has only a share of every value.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.hook = ""
        self.loader: int | None = None
        self.absent: set[int | None] = set()
        self.weight: float | None = 1.0
        self.weigh: Callable[[], float] = _default_weight
        self.feed: Feed | None = None
        self.by_batch = False
        # The step of the last flush: at the end of an epoch its values are not reduced again.
        self._flushed_at = -1
        self.group: Group | None = None
        self.counts = True
        self.shares_all = False
        # Whether only one pipeline stage knows a value.
        self._is_staged = False
        self.module: nn.Module | None = None
        self._training_table: _Table = {}
        self.table = self._training_table
        # What `callback_metrics` returned: callbacks may have added values.
        self._callback_metrics: dict[str, Tensor] = {}
        # The ids of metric objects that are no attributes of the module, each warned of once.
        self._unplaced_objects: set[int] = set()
        # The step that a value of an evaluation or of a finished epoch describes, by its name.
        self._steps_of_values: dict[str, int] = {}
        # Metric objects of an epoch whose last hook may still read them.
        self._reduced_objects: list[MetricObject] = []
        self._suspended: StateDict | None = None  # see `suspend`
        self._restore_objects: Callable[[], None] = _nothing
        # Of the training that an evaluation interrupts: hook, weight and feed.
        self._interrupted: tuple[str, float | None, Feed | None] | None = None
        self.callback: dict[str, float] = {}
        self.logged: dict[str, float] = {}
        self.progress_bar: dict[str, float] = {}

    def __getstate__(self) -> StateDict:
        # A copy has the values; what is under way belongs to the run.
        return {
            name: getattr(self, name)
            for name in ("progress", "callback", "logged", "progress_bar")
        }

    def __setstate__(self, state: StateDict) -> None:
        Metrics.__init__(self, state["progress"])
        vars(self).update(state)

    def log(
        self,
        name: str,
        value: Value,
        prog_bar: bool,
        logger: bool | None,
        on_step: bool | None,
        on_epoch: bool | None,
        reduce_fx: ReduceFx,
        sync_dist: bool,
        add_dataloader_idx: bool,
        batch_size: int | None,
        rank_zero_only: bool,
    ) -> None:
        """Record one value; see `TrainModule.log`."""
        options = (
            prog_bar,
            logger,
            on_step,
            on_epoch,
            reduce_fx,
            sync_dist,
            add_dataloader_idx,
            rank_zero_only,
        )
        entry = self.table.get((self.hook, name, self.loader))
        if entry is None:
            entry = self._new_entry(name, options)
        elif entry.options != options:
            entry = self._replace_restored(entry, name, options)
        if value.__class__ is not Tensor and hasattr(value, "full_tensor"):
            # Of a loss that is sharded over ranks, all of which log it.
            value = value.full_tensor()
        is_float32 = value.__class__ is Tensor and value.dtype is torch.float32
        if is_float32 and value.is_cpu and not value.dim():
            # A copy on the CPU takes ten times as long.
            value = value.item()  # no sync point: on the CPU
        elif isinstance(value, Tensor):
            # It may change in place before the flush.
            value = value.detach().clone()
            if value.dim():
                if value.numel() != 1:
                    raise LogError(
                        f"{name!r} is not a single number",
                        found=f"shape {tuple(value.shape)}",
                        fix="log its .mean()",
                    )
                value = value.reshape(())
        elif not isinstance(value, (int, float)):
            # A metric object keeps its own values: the entry only remembers that it was logged.
            if hasattr(value, "compute"):
                entry.metric = value
                entry.turn = self.progress.step
                return
            value = _host_number(name, value)
        if batch_size is None:
            weight = self.weight
            if weight is None:
                weight = self.weight = self.weigh()
            if entry.averages and self.feed is not None:
                self._ask_for_sizes(self.feed)
        else:
            weight = batch_size
        # Stored from here: a method of the entry would be one more Python call for every value.
        entry.last = value
        entry.last_weight = weight
        entry.turn = self.progress.step
        entry.values.append(value)
        entry.weights.append(weight)
        # A long epoch must not keep a tensor for each value.
        if len(entry.values) >= _FOLD:
            entry.fold()

    def _ask_for_sizes(self, feed: Feed) -> None:
        """Ask once for the sizes of batches that the feed cannot tell."""
        feed.ask_for_sizes(
            "pass batch_size= to self.log, or define loss_weight(self, batch) on the module"
        )
        self.feed = None

    def _new_entry(self, name: str, options: Options) -> Entry:
        # Nothing flushes after these hooks: the value would be lost without an error.
        if self.hook in CLOSED_HOOKS:
            position = "outside a hook"
            if self.hook:
                position = f"in {self.hook}"
            raise LogError(
                f"{name!r} cannot be logged {position}",
                fix="log it in a step or epoch hook, or pass it to trainer.log_metrics(...)",
            )
        if not isinstance(name, str):
            raise LogError(
                "the name of a metric must be a string",
                found=repr(name),
                fix="pass the name first: self.log(name, value)",
            )
        entry = Entry(self.hook, name, self.loader, options)
        if self.loader is not None and not entry.suffix:
            self._check_name_of_loader(entry)
        self.table[entry.key] = entry
        self.by_batch = self.by_batch or entry.on_step
        return entry

    def _check_name_of_loader(self, entry: Entry) -> None:
        """Refuse a name that another loader has, too, if names do not have the index of the loader."""
        for other in self.table.values():
            is_same = (other.hook, other.name) == (entry.hook, entry.name)
            if is_same and other.loader != entry.loader:
                raise LogError(
                    f"{entry.name!r} comes from several loaders",
                    found=f"add_dataloader_idx=False for loaders {other.loader} and {entry.loader}",
                    fix="leave add_dataloader_idx out, or use another name for each loader",
                )

    def _replace_restored(self, restored: Entry, name: str, options: Options) -> Entry:
        """Give the values of a checkpoint to an entry with other options."""
        # A resumed run may have edited its code; two calls of one run would not know which options hold.
        if not restored.restored:
            raise LogError(
                f"{name!r} is logged twice in {self.hook} with different options",
                found=f"{restored.options} and {options}",
                fix="use the same options, or another name",
            )
        entry = self._new_entry(name, options)
        entry.adopt(restored)
        return entry

    def attach(self, strategy: Strategy, module: nn.Module) -> None:
        """Record values of this module, on the ranks of this strategy, from now on."""
        self.group = strategy.reports
        self.module = module
        world = strategy.world
        self.counts = strategy.reporter == world.rank
        self.shares_all = strategy.reports.size > strategy.data.size
        self._is_staged = False
        # All ranks decide this together: `_running_values` must give all of them the same names.
        if self.shares_all:
            rows = world.agree([not self.counts])
            self._is_staged = any(row[0] for row in rows)

    def enter(self) -> None:
        """Record values of an evaluation from now on, apart from those of training."""
        self._interrupted = self.hook, self.weight, self.feed
        if self.module is not None:
            self._restore_objects = remember_metrics([self.module])
        self.table = {}
        self.loader = None
        self.by_batch = False
        self.leave_batch()

    def leave_batch(self) -> None:
        """Values logged from now on belong to no batch: each rank counts once in a mean."""
        self.weight = 1.0

    @property
    def evaluating(self) -> bool:
        """Whether logged values belong to an evaluation."""
        return self.table is not self._training_table

    def leave(self, completed: bool = True) -> None:
        """Return from an evaluation to training; one that was not completed leaves no trace in metric objects."""
        if not completed:
            # A run that goes on, or a checkpoint, must not have half of an evaluation in its metric objects.
            self._reduced_objects.clear()
            self._restore_objects()
        self._restore_objects = _nothing
        self.table = self._training_table
        self.loader = None
        self.absent.clear()
        if self._interrupted is not None:
            self.hook, self.weight, self.feed = self._interrupted
            self._interrupted = None

    def enter_loader(self, index: int | None) -> None:
        """Values logged from now on belong to this evaluation loader; None: to none, or to the only one."""
        self.loader = index

    def note_absent_loader(self) -> None:
        """Note that this rank had no batch of the loader."""
        self.absent.add(self.loader)

    def use_weight(self, weight: float | None) -> None:
        """Weigh values without a batch size by this from now on."""
        self.weight = weight

    def use_sizes_of(self, feed: Feed | None) -> None:
        """Weigh values by the sizes of this feed's batches; None: weights are set before each batch."""
        self.feed = feed

    @contextmanager
    def unrecorded(self, hook: str) -> Iterator[None]:
        """Drop the values that are logged inside this context; they may be logged as in ``hook``."""
        table = self.table
        by_batch = self.by_batch
        outer_hook = self.hook
        self.table = {}
        self.hook = hook
        try:
            yield
        finally:
            self.table = table
            self.by_batch = by_batch
            self.hook = outer_hook

    @contextmanager
    def discarding_logs(self) -> Iterator[None]:
        """Drop the training values that are logged inside this context."""
        table = self.table
        # Copies, so that hooks may log names that the checkpoint holds.
        copies = {key: entry.copied() for key, entry in table.items()}
        self._record_training_in(copies)
        try:
            yield
        finally:
            self._record_training_in(table)

    def _record_training_in(self, table: _Table) -> None:
        self._training_table = table
        self.table = table

    def forget(self, suspended: bool = True) -> None:
        """Drop all recorded and reduced values, before a new run.

        Args:
            suspended: whether those that `suspend` holds are dropped, too.
        """
        if suspended:
            self._suspended = None
        # A run that was interrupted has left values in its metric objects.
        self._reduced_objects += _objects_of(self._training_table.values())
        self.reset_objects()
        self._record_training_in({})
        self.hook = ""
        self.feed = None
        self.leave_batch()
        self._callback_metrics = {}
        self._steps_of_values.clear()
        self.callback.clear()
        self.logged.clear()
        self.progress_bar.clear()

    def undo(self) -> Callable[[], None]:
        """Return a function that drops all values logged in steps after this call; `remember_metrics` has objects."""
        table = self.table
        copies = {key: entry.copied() for key, entry in table.items()}

        def restore() -> None:
            table.clear()
            table.update(copies)

        return restore

    def flush_step(self, ran: bool = True) -> Reduced:
        """Reduce the values of the finished step over all ranks. One sync point."""
        self._flushed_at = self.progress.step
        # The count has gone up since: values of the step were logged before, those of its last hooks after that.
        finished_step = self.progress.step - 1
        entries = [
            entry
            for entry in self.table.values()
            if entry.on_step
            and entry.turn >= finished_step
            and entry.hook in BATCH_HOOKS
        ]
        return self._publish(entries, step=True, ran=ran)

    def flush_evaluation_step(self) -> Reduced:
        """The ``on_step`` values of one evaluation batch on this rank."""
        result = Reduced()
        for entry in self.table.values():
            if not entry.on_step or entry.turn < 0:
                continue
            for value in entry.present_values(delivers=True).values():
                number = float(value)  # sync point: every batch was asked for
                result.put(entry, number, step=True)
        self._remember_values(result, step=True)
        return result

    def flush_epoch(self, ran: bool = True) -> Reduced:
        """Reduce the epoch values logged since the last epoch flush over all ranks. One sync point."""
        entries = [entry for entry in self.table.values() if entry.recorded]
        if not self.evaluating and self._flushed_at != self.progress.step:
            # Values of steps between two flushes: callbacks that monitor them read them now.
            of_steps = [entry for entry in entries if entry.on_step]
            self._publish(of_steps, step=True, ran=ran, log=False)
        # One exchange for all of them, and one read.
        of_epoch = [entry for entry in entries if entry.on_epoch]
        result = self._publish(of_epoch, step=False, ran=ran)
        # Not reset yet: hooks of the epoch's end may compute them.
        self._reduced_objects += _objects_of(entries)
        for entry in entries:
            entry.clear()
        return result

    def reset_objects(self) -> None:
        """Reset the metric objects that were logged in an epoch which is over: its last hook has read them."""
        for metric in self._reduced_objects:
            metric.reset()
        self._reduced_objects.clear()

    def suspend(self) -> None:
        """Hold the values of the training epoch as they are now, for checkpoints that are taken from here on.

        At the end of an epoch they are reduced, and hooks may reset metric objects; but a run that ends inside its
        epoch is continued there, and a test that follows has values of its own.
        """
        if self._suspended is None:
            self._suspended = self._present_state()

    def proceed(self) -> None:
        """Continue the epoch whose values `suspend` holds, if there is one."""
        # As from a checkpoint, so that a fit that goes on and a resumed one have the same values.
        if self._suspended is not None:
            state = self.state_dict()
            self._training_table.clear()
            self.load_state_dict(state)

    def end_epoch(self, completed: bool) -> None:
        """Reset the metric objects of a training epoch; a completed one is not continued."""
        self.reset_objects()
        if completed:
            self._suspended = None

    def _publish(
        self, entries: list[Entry], step: bool, ran: bool, log: bool = True
    ) -> Reduced:
        """Reduce these entries, and remember what came out.

        Args:
            entries: what was recorded.
            step: whether the values of the latest step are reduced; else those since the last flush.
            ran: whether this rank has run a batch.
            log: whether the values go to the loggers.
        """
        group = self.group
        result = Reduced()
        if group is None or group.size == 1:
            # Here a value of this rank alone is a value of all ranks.
            shared = entries
            local: list[Entry] = []
        else:
            shared = self._entries_of_all_ranks(entries, ran, group)
            local = [e for e in entries if e.rank_zero or not e.sync]
            if self.shares_all:
                local = []
        for entry, value in zip(shared, reduced(shared, step, group), strict=True):
            result.put(entry, value, step)
        if local:
            for entry, value in zip(local, reduced(local, step, None), strict=True):
                result.put(entry, value, step)
        self._remember_values(result, step, log)
        return result

    def _entries_of_all_ranks(
        self, entries: list[Entry], ran: bool, group: Group
    ) -> list[Entry]:
        """The entries that are reduced over the ranks, in the same order on each of them."""
        shared: list[Entry] = []
        # A rank that repeats another one's batches takes part in the exchange, with no values.
        if self.counts:
            shared = [
                entry
                for entry in entries
                if self.shares_all or (entry.sync and not entry.rank_zero)
            ]
            shared.sort(key=_by_name)
        shared = agreed(shared, group, ran and self.counts, self.absent, self.module)
        self._reduced_objects += [e.metric for e in shared if e.borrowed]
        return shared

    def _remember_values(self, result: Reduced, step: bool, log: bool = True) -> None:
        """Make reduced values the latest ones for callbacks, loggers and the progress bar."""
        self.callback.update(result)
        # Values of training steps always describe the present step, so no step is kept for them.
        if step and not self.evaluating:
            for name in result:
                self._steps_of_values.pop(name, None)
        else:
            steps = dict.fromkeys(result, self.progress.step)
            self._steps_of_values.update(steps)
        if log:
            self.logged.update(result.logger)
        self.progress_bar.update(result.progress_bar)

    def callback_metrics(self) -> dict[str, Tensor]:
        """The latest value of every name: reduced values, then newer ones of this rank, then those of callbacks.

        It is the same dict during a run: a callback may add values to it without logging them.
        """
        values = self._callback_metrics
        values.update(
            (name, torch.tensor(value)) for name, value in self.callback.items()
        )
        values.update(self._running_values())
        return values

    def _running_values(self) -> dict[str, Tensor]:
        """The values logged since the last flush that cleared them."""
        values: dict[str, Tensor] = {}
        if self._is_staged:
            # A value that only one pipeline stage knows would let the ranks decide differently.
            return values
        entries = list(self._training_table.values())
        if self.evaluating:
            entries += self.table.values()
        for entry in entries:
            if entry.recorded:
                values.update(entry.present_values())
        return values

    def logged_at(self, name: str) -> int:
        """The step whose weights the latest value of ``name`` describes.

        That is an earlier step for a value of its validation, or of an epoch that ended there. A value that is logged
        in training steps counts as the present step's, as does one that a callback put into `callback_metrics`.
        """
        present_step = self.progress.step
        if name in self._running_values():
            return present_step
        return self._steps_of_values.get(name, present_step)

    def state_dict(self) -> StateDict:
        """Partial sums of the running epoch, the latest values, and the values of the last reduction."""
        if self._suspended is None:
            state = self._present_state()
        else:
            state = dict(self._suspended)
        entries: list[Entry] = state["running"]
        state["running"] = [entry.state(self._metric_name(entry)) for entry in entries]
        state["objects"] = on_host(state["objects"])
        return state

    def _present_state(self) -> StateDict:
        """What `state_dict` returns, on the device and with entries."""
        recorded = [
            entry.copied() for entry in self._training_table.values() if entry.recorded
        ]
        logged_names = set(self.callback)
        for entry in recorded:
            logged_names.update(entry.present_values())
        # Only what callbacks have stored there themselves: logged values come back with their entries.
        put_in_by_callbacks = {
            name: value
            for name, value in self._callback_metrics.items()
            if name not in logged_names and isinstance(value, (Tensor, int, float))
        }
        return {
            "running": recorded,
            "objects": self._running_objects(),
            "callback": dict(self.callback),
            "logged": dict(self.logged),
            "progress_bar": dict(self.progress_bar),
            "others": put_in_by_callbacks,
            "flushed": self._flushed_at,
            "settled": dict(self._steps_of_values),
        }

    def _running_objects(self) -> StateDict:
        """The states of the metric objects, without those that are reset at the end of a running evaluation."""
        if self.module is None:
            return {}
        reset_objects = list(self._reduced_objects)
        if self.evaluating:
            reset_objects += _objects_of(self.table.values())
        ids = set(map(id, reset_objects))
        states = running_states(self.module)
        for name, submodule in self.module.named_modules():
            if id(submodule) in ids:
                states.pop(name, None)
        return states

    def _metric_name(self, entry: Entry) -> str | None:
        """The name of an entry's metric object in the module; warns once if it has none."""
        if entry.metric is None:
            return None
        name = name_in_module(entry.metric, self.module)
        if name is None and id(entry.metric) not in self._unplaced_objects:
            self._unplaced_objects.add(id(entry.metric))
            warnings.warn(
                f"the counts of {entry.name!r} are not saved in checkpoints inside an epoch: keep its"
                f" {type(entry.metric).__name__} as an attribute of the module",
                stacklevel=2,
            )
        return name

    def load_state_dict(self, state: SavedState) -> None:
        """Restore ``state_dict``; the next `log` of a name may change its options."""
        self._suspended = None
        # Older checkpoints lack some of these.
        self.callback.update(state.get("callback", {}))
        self.logged.update(state.get("logged", {}))
        self.progress_bar.update(state.get("progress_bar", {}))
        self._callback_metrics.update(state.get("others", {}))
        self._flushed_at = state.get("flushed", -1)
        self._steps_of_values.update(state.get("settled", {}))
        # Entries name the metric objects that were logged.
        modules: dict[str, nn.Module] = {}
        if self.module is not None:
            restore_running(self.module, state.get("objects", {}))
            modules = dict(self.module.named_modules())
        # Another rank reports the same values.
        if not self.counts:
            return
        for entry_state in state.get("running", []):
            entry = Entry.from_state(entry_state, modules)
            if entry.recorded:
                self._training_table[entry.key] = entry


def _host_number(name: str, value: Value) -> float:
    """A host number, such as a NumPy scalar, as a float; not a sync point."""
    fix = "log one number per name, or use log_dict"
    # float() would read some of these.
    if isinstance(value, (str, bytes)):
        fix = "log one number per name; use self.print(...) or a logger's own methods for text"
    else:
        try:
            return float(value)  # no sync point: tensors have been dealt with
        except (TypeError, ValueError):
            pass
    raise LogError(
        f"{name!r} is not a number",
        found=f"{type(value).__name__}: {printable(repr(value), 80)}",
        fix=fix,
    )


def _objects_of(entries: Iterable[Entry]) -> list[MetricObject]:
    """The metric objects among what was logged."""
    return [entry.metric for entry in entries if entry.metric is not None]


def _by_name(entry: Entry) -> tuple[str, str, int]:
    # Ranks may log the same names in another order.
    loader = entry.loader
    if loader is None:
        loader = -1
    return entry.hook, entry.base, loader


def _default_weight() -> float:
    return 1.0


def _nothing() -> None:
    """Do nothing: no evaluation runs."""
