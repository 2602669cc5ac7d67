"""Logged values: kept on the device when they are logged, and reduced at a flush."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final, final

import torch
from torch import Tensor

from trainer_kit.core.errors import LogError, printable
from trainer_kit.core.progress import Progress
from trainer_kit.core.protocols import Group
from trainer_kit.data import Feed
from trainer_kit.metrics.entry import (
    BATCH_HOOKS,
    CLOSED_HOOKS,
    Entry,
    Reduced,
    agreed,
    reduced,
)
from trainer_kit.metrics.objects import (
    on_host,
    place_of,
    remember_metrics,
    restore_running,
    running_states,
)
from trainer_kit.strategies.strategy import Strategy

__all__ = ["Metrics"]

_FOLD: Final = 256


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
        self.weigh: Callable[[], float] = _one
        self.feed: Feed | None = None
        self.by_batch = False
        self._flushed = -1
        self.group: Group | None = None
        self.counts, self.shares_all, self._staged = True, False, False
        self.module: Any = None
        self._tables: dict[str, dict[tuple[str, str, int | None], Entry]] = {
            "train": {}
        }
        self.table = self._tables["train"]
        self._shown: dict[str, Tensor] = {}
        self._homeless: set[int] = set()
        self._settled: dict[
            str, int
        ] = {}  # name of a value of an evaluation or a finished epoch -> its step
        self._reduced: list[
            Any
        ] = []  # metric objects of an epoch whose last hook may still read them
        self._suspended: dict[str, Any] | None = None  # see `suspend`
        self._restore_objects: Callable[[], None] = _nothing
        # Of the training that an evaluation interrupts: hook, weight and feed.
        self._interrupted: tuple[str, float | None, Feed | None] | None = None
        self.callback: dict[str, float] = {}
        self.logged: dict[str, float] = {}
        self.progress_bar: dict[str, float] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A copy has the values; what is under way belongs to the run.
        return {
            name: getattr(self, name)
            for name in ("progress", "callback", "logged", "progress_bar")
        }

    def __setstate__(self, kept: dict[str, Any]) -> None:
        Metrics.__init__(self, kept["progress"])
        vars(self).update(kept)

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool,
        logger: bool | None,
        on_step: bool | None,
        on_epoch: bool | None,
        reduce_fx: Any,
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
            entry = self._new(name, options)
        elif entry.options != options:
            entry = self._adopt(entry, name, options)
        if value.__class__ is not Tensor and hasattr(value, "full_tensor"):
            value = (
                value.full_tensor()
            )  # of a loss that is divided over ranks, all of which log it
        if (
            value.__class__ is Tensor
            and value.is_cpu
            and value.dtype is torch.float32
            and not value.dim()
        ):
            value = (
                value.item()
            )  # no sync point: on the CPU, where a copy takes ten times as long
        elif isinstance(value, Tensor):
            value = value.detach().clone()  # it may change in place before the flush
            if value.dim():
                if value.numel() != 1:
                    raise LogError(
                        f"{name!r} is not a single number",
                        found=f"shape {tuple(value.shape)}",
                        fix="log its .mean()",
                    )
                value = value.reshape(())
        elif not isinstance(value, (int, float)):
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
                self._ask()
        else:
            weight = batch_size
        entry.last, entry.last_weight, entry.turn = value, weight, self.progress.step
        entry.values.append(value)
        entry.weights.append(weight)
        if len(entry.values) >= _FOLD:
            entry.fold()

    def _ask(self) -> None:
        assert self.feed is not None
        self.feed.ask_for_sizes(
            "pass batch_size= to self.log, or define loss_weight(self, batch) on the module"
        )
        self.feed = None

    def _new(self, name: str, options: tuple[Any, ...]) -> Entry:
        if self.hook in CLOSED_HOOKS:
            raise LogError(
                f"{name!r} cannot be logged {'in ' + self.hook if self.hook else 'outside a hook'}",
                fix="log it in a step or epoch hook, or pass it to trainer.log_metrics(...)",
            )
        if not isinstance(name, str):
            raise LogError(
                "the name of a metric must be a string",
                found=repr(name),
                fix="pass the name first: self.log(name, value)",
            )
        entry = Entry(self.hook, name, self.loader, options)
        if self.loader is not None and not entry.place:
            others = [
                e
                for e in self.table.values()
                if (e.hook, e.name) == (self.hook, name) and e.loader != self.loader
            ]
            if others:
                raise LogError(
                    f"{name!r} comes from several loaders",
                    found=f"add_dataloader_idx=False for loaders {others[0].loader} and {self.loader}",
                    fix="leave add_dataloader_idx out, or use another name for each loader",
                )
        self.table[(self.hook, name, self.loader)] = entry
        self.by_batch = self.by_batch or entry.on_step
        return entry

    def attach(self, strategy: Strategy, module: Any) -> None:
        """Record values of this module, on the ranks of this strategy, from now on."""
        self.group, self.module = strategy.reports, module
        self.counts = strategy.reporter == strategy.world.rank
        self.shares_all = strategy.reports.size > strategy.data.size
        self._staged = self.shares_all and any(
            row[0] for row in strategy.world.agree([not self.counts])
        )

    def enter(self, stage: str) -> None:
        """Record values of ``stage`` from now on; values of its previous round are dropped."""
        self._interrupted = self.hook, self.weight, self.feed
        if self.module is not None:
            self._restore_objects = remember_metrics([self.module])
        self._tables[stage] = self.table = {}
        self.loader, self.by_batch = None, False
        self.leave_batch()

    def leave_batch(self) -> None:
        """Values logged from now on belong to no batch: each rank counts once in a mean."""
        self.weight = 1.0

    @property
    def evaluating(self) -> bool:
        """Whether logged values belong to an evaluation."""
        return self.table is not self._tables["train"]

    def leave(self, completed: bool = True) -> None:
        """Return from an evaluation to training; one that was not completed leaves no trace in metric objects."""
        if not completed:
            self._reduced.clear()
            self._restore_objects()
        self._restore_objects = _nothing
        self.table = self._tables["train"]
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

    def use_sizes_of(self, feed: Feed | None) -> None:
        """Weigh values by the sizes of this feed's batches; None: weights are set before each batch."""
        self.feed = feed

    @contextmanager
    def unrecorded(self, hook: str) -> Iterator[None]:
        """Drop the values that are logged inside this context; they may be logged as in ``hook``."""
        before = self.table, self.by_batch, self.hook
        self.table = {}
        self.hook = hook
        try:
            yield
        finally:
            self.table, self.by_batch, self.hook = before

    @contextmanager
    def discarding_logs(self) -> Iterator[None]:
        """Drop the training values that are logged inside this context."""
        before = self.table
        self._tables["train"] = self.table = {
            key: entry.copied() for key, entry in before.items()
        }
        try:
            yield
        finally:
            self._tables["train"] = self.table = before

    def forget(self, suspended: bool = True) -> None:
        """Drop all recorded and reduced values, before a new run.

        Args:
            suspended: whether those that `suspend` holds are dropped, too.
        """
        if suspended:
            self._suspended = None
        logged = [
            entry.metric
            for entry in self._tables["train"].values()
            if entry.metric is not None
        ]
        self._reduced += logged  # of a run that was interrupted
        self.reset_objects()
        self._tables = {"train": {}}
        self.table = self._tables["train"]
        self.hook, self.feed = "", None
        self.leave_batch()
        self._shown = {}
        self._settled.clear()
        for kept in (self.callback, self.logged, self.progress_bar):
            kept.clear()

    def undo(self) -> Callable[[], None]:
        """Return a function that drops all values logged in steps after this call; `remember_metrics` has objects."""
        table, kept = (
            self.table,
            {key: entry.copied() for key, entry in self.table.items()},
        )

        def forget() -> None:
            table.clear()
            table.update(kept)

        return forget

    def flush_step(self, ran: bool = True) -> Reduced:
        """Reduce the values of the finished step over all ranks. One sync point."""
        latest, self._flushed = self.progress.step - 1, self.progress.step
        entries = [
            e
            for e in self.table.values()
            if e.on_step and e.turn >= latest and e.hook in BATCH_HOOKS
        ]
        return self._publish(entries, step=True, ran=ran)

    def flush_evaluation_step(self) -> Reduced:
        """The ``on_step`` values of one evaluation batch on this rank."""
        result = Reduced()
        for entry in self.table.values():
            if entry.on_step and entry.turn >= 0:
                entry.turn = -1  # delivered
                for value in entry.now().values():
                    self._deliver(
                        result, entry, float(value), step=True
                    )  # sync point: every batch was asked for
        self._keep(result, step=True)
        return result

    def flush_epoch(self, ran: bool = True) -> Reduced:
        """Reduce the epoch values logged since the last epoch flush over all ranks. One sync point."""
        entries = [e for e in self.table.values() if e.recorded]
        if not self.evaluating and self._flushed != self.progress.step:
            # Values of steps between two flushes: callbacks that monitor them read them now.
            self._publish(
                [e for e in entries if e.on_step], step=True, ran=ran, log=False
            )
        result = self._publish([e for e in entries if e.on_epoch], step=False, ran=ran)
        self._reduced += [entry.metric for entry in entries if entry.metric is not None]
        for entry in entries:
            entry.clear()
        return result

    def reset_objects(self) -> None:
        """Reset the metric objects that were logged in an epoch which is over: its last hook has read them."""
        for metric in self._reduced:
            metric.reset()
        self._reduced.clear()

    def suspend(self) -> None:
        """Hold the values of the training epoch as they are now, for checkpoints that are taken from here on.

        At the end of an epoch they are reduced, and hooks may reset metric objects; but a run that ends inside its
        epoch is continued there, and a test that follows has values of its own.
        """
        if self._suspended is None:
            self._suspended = self._present_state()

    def proceed(self) -> None:
        """Continue the epoch whose values `suspend` holds, if there is one."""
        if self._suspended is not None:
            state = self.state_dict()
            self._tables["train"].clear()
            self.load_state_dict(state)

    def end_epoch(self, completed: bool) -> None:
        """Reset the metric objects of a training epoch; a completed one is not continued."""
        self.reset_objects()
        if completed:
            self._suspended = None

    def _publish(
        self, entries: list[Entry], step: bool, ran: bool, log: bool = True
    ) -> Reduced:
        group = self.group
        alone = group is None or group.size == 1
        shared = [
            e
            for e in entries
            if self.shares_all or (not e.rank_zero and (e.sync or alone))
        ]
        if not alone and group is not None:
            shared = sorted(shared, key=_by_name) if self.counts else []
            shared = agreed(
                shared, group, ran and self.counts, self.absent, self.module
            )
            self._reduced += [entry.metric for entry in shared if entry.borrowed]
        result = Reduced()
        for entry, value in zip(shared, reduced(shared, step, group), strict=True):
            self._deliver(result, entry, value, step)
        own = (
            []
            if alone or self.shares_all
            else [e for e in entries if e.rank_zero or not e.sync]
        )
        for entry, value in zip(own, reduced(own, step, None), strict=True):
            self._deliver(result, entry, value, step)
        self._keep(result, step, log)
        return result

    def _keep(self, result: Reduced, step: bool, log: bool = True) -> None:
        self.callback.update(result)
        if step and not self.evaluating:
            for name in result:
                self._settled.pop(name, None)
        else:
            self._settled.update(dict.fromkeys(result, self.progress.step))
        if log:
            self.logged.update(result.logger)
        self.progress_bar.update(result.progress_bar)

    def _deliver(self, result: Reduced, entry: Entry, value: float, step: bool) -> None:
        forked = entry.forked("step" if step else "epoch")
        result[entry.name] = result[forked] = value
        if entry.to_logger:
            result.logger[forked] = value
        if entry.prog_bar:
            result.progress_bar[forked] = value
        result.by_loader.setdefault(entry.loader, {})[forked] = value

    def callback_metrics(self) -> dict[str, Tensor]:
        """The latest value of every name: reduced values, then newer ones of this rank, then those of callbacks.

        It is the same dict during a run: a callback may add values to it without logging them.
        """
        values = self._shown
        values.update(
            (name, torch.tensor(value)) for name, value in self.callback.items()
        )
        values.update(self._running())
        return values

    def _running(self) -> dict[str, Tensor]:
        """The values logged since the last flush that cleared them."""
        tables = (
            [self._tables["train"], self.table] if self.evaluating else [self.table]
        )
        if self._staged:  # a value that only one pipeline stage knows would let the ranks decide differently
            tables = []
        found: dict[str, Tensor] = {}
        for entry in chain.from_iterable(table.values() for table in tables):
            if entry.recorded:
                found.update(entry.now())
        return found

    def logged_at(self, name: str) -> int:
        """The step whose weights the latest value of ``name`` describes.

        That is an earlier step for a value of its validation, or of an epoch that ended there. A value that is logged
        in training steps counts as the present step's, as does one that a callback put into `callback_metrics`.
        """
        present = self.progress.step
        return present if name in self._running() else self._settled.get(name, present)

    def state_dict(self) -> dict[str, Any]:
        """Partial sums of the running epoch, the latest values, and the values of the last reduction."""
        state = (
            self._present_state() if self._suspended is None else dict(self._suspended)
        )
        entries: list[Entry] = state["running"]
        state["running"] = [entry.state(self._place(entry)) for entry in entries]
        state["objects"] = on_host(state["objects"])
        return state

    def _present_state(self) -> dict[str, Any]:
        """What `state_dict` returns, on the device and with entries."""
        recorded = [
            entry.copied() for entry in self._tables["train"].values() if entry.recorded
        ]
        names = {
            *self.callback,
            *chain.from_iterable(entry.now() for entry in recorded),
        }
        return {
            "running": recorded,
            "objects": self._running_objects(),
            "callback": dict(self.callback),
            "logged": dict(self.logged),
            "progress_bar": dict(self.progress_bar),
            "others": {
                name: value  # put in by a callback
                for name, value in self._shown.items()
                if name not in names and isinstance(value, (Tensor, int, float))
            },
            "flushed": self._flushed,
            "settled": dict(self._settled),
        }

    def _running_objects(self) -> dict[str, Any]:
        """The states of the metric objects, without those that are reset at the end of a running evaluation."""
        if self.module is None:
            return {}
        evaluated = self.table.values() if self.evaluating else ()
        left_out = {*map(id, self._reduced), *(id(entry.metric) for entry in evaluated)}
        places = {
            name for name, part in self.module.named_modules() if id(part) in left_out
        }
        return {
            name: state
            for name, state in running_states(self.module).items()
            if name not in places
        }

    def _place(self, entry: Entry) -> str | None:
        if entry.metric is None:
            return None
        place = place_of(entry.metric, self.module)
        if place is None and id(entry.metric) not in self._homeless:
            self._homeless.add(id(entry.metric))
            warnings.warn(
                f"the counts of {entry.name!r} are not saved in checkpoints inside an epoch: keep its"
                f" {type(entry.metric).__name__} as an attribute of the module",
                stacklevel=2,
            )
        return place

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``; the next `log` of a name may change its options."""
        self._suspended = None
        self.callback.update(state.get("callback", {}))
        self.logged.update(state.get("logged", {}))
        self.progress_bar.update(state.get("progress_bar", {}))
        self._shown.update(state.get("others", {}))
        self._flushed = state.get("flushed", -1)
        self._settled.update(state.get("settled", {}))
        modules = {}
        if self.module is not None:
            restore_running(self.module, state.get("objects", {}))
            modules = dict(self.module.named_modules())
        for saved in state.get("running", []) if self.counts else ():
            entry = Entry.of_state(saved, modules)
            if entry.recorded:
                self._tables["train"][(entry.hook, entry.base, entry.loader)] = entry

    def _adopt(self, restored: Entry, name: str, options: tuple[Any, ...]) -> Entry:
        if not restored.restored:
            raise LogError(
                f"{name!r} is logged twice in {self.hook} with different options",
                found=f"{restored.options} and {options}",
                fix="use the same options, or another name",
            )
        entry = self._new(name, options)
        entry.adopt(restored)
        return entry


def _host_number(name: str, value: Any) -> float:
    """A host number, such as a NumPy scalar, as a float; not a sync point."""
    text = isinstance(value, (str, bytes))  # float() would read some
    try:
        if not text:
            return float(value)  # no sync point: tensors have been dealt with
    except (TypeError, ValueError):
        pass
    raise LogError(
        f"{name!r} is not a number",
        found=f"{type(value).__name__}: {printable(repr(value), 80)}",
        fix="log one number per name; use self.print(...) or a logger's own methods for text"
        if text
        else "log one number per name, or use log_dict",
    )


def _by_name(entry: Entry) -> tuple[str, str, int]:
    # Ranks may log the same names in another order.
    return entry.hook, entry.base, -1 if entry.loader is None else entry.loader


def _one() -> float:
    return 1.0


def _nothing() -> None:
    """Do nothing: no evaluation runs."""
