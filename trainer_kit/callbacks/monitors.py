"""`DeviceStatsMonitor` and `ThroughputMonitor`: memory, samples and tokens a second, FLOP/s, and where time goes."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median_low
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, final

import torch
from torch.optim import Optimizer

from trainer_kit.callbacks.conditions import following
from trainer_kit.core.device_table import device_peak
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hooks import Callback
from trainer_kit.core.protocols import ModuleLike, TrainerLike
from trainer_kit.core.signatures import leave_out
from trainer_kit.core.types import ParamGroup, SavedState, StateDict

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

__all__ = [
    "SECTIONS",
    "DeviceStatsMonitor",
    "LearningRateMonitor",
    "SectionTimes",
    "ThroughputMonitor",
    "find_straggler",
]


@final
class DeviceStatsMonitor(Callback):
    """Log memory and use of the devices with the other values, every ``log_every_n_steps`` steps.

    On an accelerator ``device/memory_allocated``, ``device/memory_reserved`` and ``device/memory_peak`` (since the last
    time), in bytes; of several ranks the largest, which is the one that runs out. Nothing is read in other steps.

    Args:
        cpu_stats: also log ``cpu/percent`` (of one core, of all threads of this process), and ``cpu/memory`` and
            ``cpu/memory_peak`` in bytes, of the largest rank; None: where training runs on the CPU.

    Example:
        >>> DeviceStatsMonitor(cpu_stats=True).cpu_stats
        True
    """

    order: ClassVar[Literal["early", "normal", "late"]] = "late"

    def __init__(self, cpu_stats: bool | None = None) -> None:
        self.cpu_stats = cpu_stats
        self._next: float = math.inf
        self._cpu_since = (0.0, 0.0)

    def on_train_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self._next = _next_logging_step(trainer)
        self._cpu_since = perf_counter(), process_time()

    def on_train_step_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        step = trainer.progress.step
        if step < self._next:
            return
        self._next = following(step, trainer.log_every_n_steps)
        device: torch.device = trainer.strategy.device
        # The sampling is on every rank, since the exchange below is collective.
        reads_process = self.cpu_stats
        if reads_process is None:
            reads_process = device.type == "cpu"
        values = _read_device_memory(device)
        if reads_process:
            values.update(self._read_process())
        # The largest rank counts: it is the one that runs out of memory.
        rows = trainer.strategy.world.agree(list(values.values()))
        largest = [max(column) for column in zip(*rows, strict=True)]
        trainer.log_metrics(dict(zip(values, largest, strict=True)), step)

    def _read_process(self) -> dict[str, float]:
        wall_before, cpu_before = self._cpu_since
        wall = perf_counter()
        cpu = process_time()
        self._cpu_since = wall, cpu
        usage = (cpu - cpu_before) / max(wall - wall_before, 1e-9)
        values = {"cpu/percent": 100 * usage}
        if sys.platform == "linux":
            with open("/proc/self/status") as file:
                status = dict(line.split(":", 1) for line in file)
            values["cpu/memory"] = _kilobytes_in_bytes(status["VmRSS"])
            values["cpu/memory_peak"] = _kilobytes_in_bytes(status["VmHWM"])
        return values


def _next_logging_step(trainer: TrainerLike) -> float:
    """The next step at which the trainer logs, or infinity if it logs at none."""
    every = trainer.log_every_n_steps
    if not every:
        return math.inf
    return following(trainer.progress.step, every)


def _kilobytes_in_bytes(field: str) -> float:
    """Convert a field of ``/proc/self/status`` such as ``  1234 kB``."""
    return 1024.0 * int(field.split()[0])


_MEMORY_FUNCTIONS: Final = {
    "device/memory_allocated": "memory_allocated",
    "device/memory_reserved": "memory_reserved",
    "device/memory_peak": "max_memory_allocated",
}
"""Logged name → function of the device's module in torch."""


def _read_device_memory(device: torch.device) -> dict[str, float]:
    if device.type == "cpu":
        return {}
    backend = torch.get_device_module(device)
    values = {}
    # Not every backend has all of these functions.
    for name, function in _MEMORY_FUNCTIONS.items():
        if hasattr(backend, function):
            read_bytes = getattr(backend, function)
            values[name] = float(read_bytes(device))
    # So that the next peak is that of the steps since this one.
    if hasattr(backend, "reset_peak_memory_stats"):
        backend.reset_peak_memory_stats(device)
    return values


SECTIONS: Final = (
    "data",
    "forward",
    "backward",
    "communication",
    "step",
    "callbacks",
    "validation",
    "checkpoint",
)
"""Where the time of a fit goes, in the order of a step."""
_TRAINING: Final = ("forward", "backward", "communication", "step")
_AFTER_AN_EXCHANGE: Final = (
    *SECTIONS[SECTIONS.index("step") :],
    *SECTIONS[: SECTIONS.index("step")],
)
"""The parts from one exchange of gradients to the next."""
_BY_CHANCE: Final = 0.05
"""Seconds by which a rank may be late between two logging steps without being the cause."""


def find_straggler(rows: Sequence[Sequence[float]]) -> tuple[int, str, float] | None:
    """The rank that the others wait for: rank, part of the time, and how many times the median of the ranks it takes.

    A part counts from 1.5 times the median, a tenth of the whole time, and 50 ms on: a shorter difference is what one
    turn of another process, or a collection of garbage, costs a rank by chance. A rank that waits is slow, too, later
    in the step: of large differences the first one after an exchange of gradients is the cause.

    Args:
        rows: for each rank, the seconds of each part of `SECTIONS`.

    Example:
        >>> find_straggler([[0.5, 1, 5, 0, 0, 0, 0, 0], [4.0, 1, 1, 0, 0, 0, 0, 0]])
        (1, 'data', 8.0)
        >>> find_straggler([[0.1, 1, 1, 0, 0, 0, 0, 0], [0.2, 1, 1, 0, 0, 0, 0, 0]])
    """
    total = max(sum(row) for row in rows)
    shortest_excess = max(0.1 * total, _BY_CHANCE)
    candidates: dict[str, tuple[float, int, float]] = {}
    columns = zip(*rows, strict=True)
    for section, seconds in zip(SECTIONS, columns, strict=True):
        slowest = max(seconds)
        median = median_low(seconds)
        excess = slowest - median
        if slowest > 1.5 * median and excess > shortest_excess:
            rank = seconds.index(slowest)
            ratio = slowest / max(median, 1e-9)
            candidates[section] = excess, rank, ratio
    if not candidates:
        return None
    # Ranks wait for each other in an exchange, so what comes first after one is the cause, and the rest its effect.
    largest_excess = max(excess for excess, _, _ in candidates.values())
    for section in _AFTER_AN_EXCHANGE:
        if section not in candidates:
            continue
        excess, rank, ratio = candidates[section]
        if excess >= 0.5 * largest_excess:
            return rank, section, ratio
    return None


class SectionTimes(Callback):
    """The time that each part of training takes, by the hooks at its borders; the parts leave no gap.

    Args:
        synchronize: wait for the device at each border.
    """

    order: ClassVar[Literal["early", "normal", "late"]] = "late"

    def __init__(self, synchronize: bool = False) -> None:
        self.synchronize = synchronize
        self._seconds = dict.fromkeys(SECTIONS, 0.0)
        # The present part ("" outside of training), and the time at which it began.
        self._section = ""
        self._section_start = 0.0
        self._synchronize_device: Callable[[], object] | None = None

    def time_split(self) -> dict[str, float]:
        """Seconds of each part of `SECTIONS` so far."""
        return dict(self._seconds)

    def enter(self, section: str) -> None:
        """The present part ends, and this one begins; ``""``: training is over. Nothing happens outside of training."""
        if not self._section:
            return
        if self._synchronize_device is not None:
            # sync point: asked for by the user
            self._synchronize_device()
        # One reading ends a part and begins the next, so that no time is lost between them.
        border = perf_counter()
        self._seconds[self._section] += border - self._section_start
        self._section = section
        self._section_start = border

    def setup(self, trainer: TrainerLike, pl_module: ModuleLike, stage: str) -> None:
        if stage == "fit":
            self._seconds = dict.fromkeys(SECTIONS, 0.0)
            self._section = ""

    def on_train_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        device = trainer.strategy.device
        if self.synchronize and device.type != "cpu":
            self._synchronize_device = torch.get_device_module(device).synchronize
        self._section = "callbacks"
        self._section_start = perf_counter()

    def on_train_epoch_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self.enter("data")

    def on_train_batch_start(
        self,
        trainer: TrainerLike,
        pl_module: ModuleLike,
        batch: object,
        batch_idx: int,
    ) -> None:
        self.enter("forward")

    def on_before_backward(
        self, trainer: TrainerLike, pl_module: ModuleLike, loss: torch.Tensor
    ) -> None:
        self.enter("backward")

    def on_after_backward(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self.enter("communication")

    def on_before_optimizer_step(
        self,
        trainer: TrainerLike,
        pl_module: ModuleLike,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.enter("step")

    def on_train_batch_end(
        self,
        trainer: TrainerLike,
        pl_module: ModuleLike,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        self.enter("callbacks")

    def on_train_step_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self.enter("data")

    def on_validation_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self.enter("validation")

    def on_validation_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self.enter("callbacks")

    def on_save_checkpoint(
        self, trainer: TrainerLike, pl_module: ModuleLike, checkpoint: StateDict
    ) -> None:
        self.enter("checkpoint")

    def on_train_epoch_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self.enter("callbacks")

    def on_train_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self.enter("")


@final
class ThroughputMonitor(SectionTimes):
    """Log samples and tokens a second, FLOP/s, model FLOPs utilization, and the parts of the time of training.

    Every ``log_every_n_steps`` steps it logs, for the steps since the last time, without validations:
    ``train/global/samples_per_sec``, ``…/batches_per_sec`` and, where ``loss_weight`` counts tokens,
    ``…/tokens_per_sec``, over all ranks; the same under ``train/device`` for one device, with ``flops_per_sec`` and
    ``mfu``. FLOPs are counted once, in the second step, by torch's ``FlopCounterMode``. ``torch.compile`` hides them,
    and what activation checkpointing computes again counts twice: pass ``flops_per_batch`` there.

    ``train/time/…`` are the parts of all time since training began, restarts included; they add up to 1. They are times
    of rank 0. *data* is the wait for the next batch, with its move and ``on_train_batch_start``. *communication* is
    what follows the last backward until the optimizer steps; DDP and FSDP exchange most inside *backward*. *step* is
    clipping, the optimizer and ``on_train_batch_end``; *callbacks* is ``on_train_step_end`` and the hooks of epochs;
    *checkpoint* is the wait for a save, until the next batch begins. ``train/goodput`` is the sum of forward, backward,
    communication and step. On an accelerator work runs on after a call returns, and its time appears where the host
    waits; ``synchronize`` measures exactly, and slows training down.

    ``run/goodput`` is the part of the run's whole life, from its first start and over all its restarts, in which steps
    were trained for the first time: `Trainer.seconds_of_run` has the rest.

    Where one rank takes much longer for a part than the others since the last time, a line names it: ``straggler: rank
    3, data: 4.1 s, 8.2 times the median of the ranks``; once an epoch for each rank and part. See `find_straggler`.

    Args:
        batch_size_fn: the number of samples of a batch on this rank; None: what the loader says.
        length_fn: the number of items (tokens, frames) of a batch on this rank, for ``…/items_per_sec``.
        flops_per_batch: of one micro-batch on one device, forward and backward; None: counted.
        peak_flops: of one device, for ``mfu``; None: by its name, see `device_peak`.
        synchronize: wait for the device at each border of two parts.

    Raises:
        ConfigurationError: for a number that is not positive.

    Example:
        >>> ThroughputMonitor(peak_flops=989e12).time_split()["data"]
        0.0
    """

    def __init__(
        self,
        batch_size_fn: Callable[[Any], int] | None = None,
        length_fn: Callable[[Any], int] | None = None,
        *,
        flops_per_batch: float | None = None,
        peak_flops: float | None = None,
        synchronize: bool = False,
    ) -> None:
        for flops in (flops_per_batch, peak_flops):
            if flops is not None and flops <= 0:
                raise ConfigurationError(
                    "FLOPs are positive",
                    found=f"flops_per_batch={flops_per_batch}, peak_flops={peak_flops}",
                )
        super().__init__(synchronize)
        self.batch_size_fn = batch_size_fn
        self.length_fn = length_fn
        self.flops_per_batch = flops_per_batch
        self.peak_flops = peak_flops
        self._next: float = math.inf
        self._first_step = 0
        # Of this rank, by the user's functions.
        self._rank_samples = 0.0
        self._rank_items = 0.0
        # Counts and times at the last logging step.
        self._counts_before: dict[str, float] = {}
        self._split_before = self.time_split()
        # Epoch, rank and part of the stragglers that were printed.
        self._reported: set[tuple[int, int, str]] = set()
        self._flops = flops_per_batch
        self._counter: FlopCounterMode | None = None
        # All micro-batches of a pipeline begin before its first backward.
        self._counted_batches = 0

    def state_dict(self) -> SavedState:
        return {"seconds": self.time_split()}

    def load_state_dict(self, state_dict: SavedState) -> None:
        self._seconds.update(state_dict["seconds"])

    def setup(self, trainer: TrainerLike, pl_module: ModuleLike, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._flops = self.flops_per_batch
            self._reported = set()

    def teardown(self, trainer: TrainerLike, pl_module: ModuleLike, stage: str) -> None:
        self._stop_counter()

    def on_train_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        super().on_train_start(trainer, pl_module)
        self._first_step = trainer.progress.step
        self._next = _next_logging_step(trainer)
        self._counts_before = self._count_progress(trainer)
        self._split_before = self.time_split()

    def on_train_batch_start(
        self,
        trainer: TrainerLike,
        pl_module: ModuleLike,
        batch: object,
        batch_idx: int,
    ) -> None:
        if self.batch_size_fn is not None:
            self._rank_samples += self.batch_size_fn(batch)
        if self.length_fn is not None:
            self._rank_items += self.length_fn(batch)
        # Not the first step, in which kernels are tuned and modules compiled: counting slows one step down.
        is_second_step = trainer.progress.step == self._first_step + 1
        if self._flops is None and is_second_step and self._counter is None:
            self._start_counter()
        self._counted_batches += 1
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def _start_counter(self) -> None:
        # Imported here: a run whose FLOPs are given does not need it.
        from torch.utils.flop_counter import FlopCounterMode

        counter = FlopCounterMode(display=False)
        counter.__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._counter = counter
        self._counted_batches = 0

    def on_after_backward(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        super().on_after_backward(trainer, pl_module)
        # A step may have several backward passes; the last one leaves the total.
        if self._counter is not None:
            # 0 if the module is compiled.
            total = self._counter.get_total_flops()
            self._flops = total / self._counted_batches

    def on_train_batch_end(
        self,
        trainer: TrainerLike,
        pl_module: ModuleLike,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._stop_counter()

    def on_train_step_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        step = trainer.progress.step
        if step >= self._next:
            self._next = following(step, trainer.log_every_n_steps)
            self._log_rates(trainer)
        super().on_train_step_end(trainer, pl_module)

    def _stop_counter(self) -> None:
        counter = self._counter
        self._counter = None
        if counter is not None:
            counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            # 0 instead of None: a step without a backward is not counted again.
            self._flops = self._flops or 0.0

    def _count_progress(self, trainer: TrainerLike) -> dict[str, float]:
        """Count up to this step, over all ranks; what the user's functions count is of this rank."""
        progress = trainer.progress
        samples: float = progress.samples
        if self.batch_size_fn is not None:
            samples = self._rank_samples
        return {
            "seconds": sum(self._seconds.values()) - self._seconds["validation"],
            "batches": progress.batch,
            "samples": samples,
            "tokens": progress.tokens,
            "items": self._rank_items,
        }

    def _log_rates(self, trainer: TrainerLike) -> None:
        # Adds the time of the present part so far, so that the parts cover all of the interval.
        self.enter(self._section)
        strategy = trainer.strategy
        counts = self._take_counts(trainer)
        section_seconds = self._take_section_seconds()
        identity = [strategy.data.rank, counts["samples"], counts["items"]]
        rows = strategy.world.agree(identity + section_seconds)
        # Ranks that compute parts of one batch have one data rank, and count it once.
        rows_by_data_rank = {row[0]: row for row in rows}
        data_rows = rows_by_data_rank.values()
        if self.batch_size_fn is not None:
            counts["samples"] = sum(row[1] for row in data_rows)
        counts["items"] = sum(row[2] for row in data_rows)
        self._report_straggler(trainer, [row[3:] for row in rows])
        seconds = max(counts.pop("seconds"), 1e-9)
        device_batches = counts["batches"]
        counts["batches"] = device_batches * strategy.data.size
        values = _rates_of_counts(counts, seconds, trainer.world_size)
        values.update(self._flop_rates(trainer, device_batches / seconds))
        values.update(self._time_shares())
        values["run/goodput"] = _goodput(trainer)
        trainer.log_metrics(values, trainer.progress.step)

    def _take_counts(self, trainer: TrainerLike) -> dict[str, float]:
        """Count the steps since the last call."""
        totals = self._count_progress(trainer)
        before = self._counts_before
        self._counts_before = totals
        return {name: total - before[name] for name, total in totals.items()}

    def _take_section_seconds(self) -> list[float]:
        """The seconds of each part of `SECTIONS` since the last call."""
        split = self.time_split()
        before = self._split_before
        self._split_before = split
        return [split[name] - before[name] for name in SECTIONS]

    def _flop_rates(
        self, trainer: TrainerLike, batches_per_second: float
    ) -> dict[str, float]:
        if not self._flops:
            return {}
        rate = self._flops * batches_per_second
        values = {"train/device/flops_per_sec": rate}
        peak = self.peak_flops or _peak_flops(trainer)
        if peak is not None:
            values["train/device/mfu"] = rate / peak
        return values

    def _time_shares(self) -> dict[str, float]:
        total = max(sum(self._seconds.values()), 1e-9)
        shares = {}
        for name, seconds in self._seconds.items():
            shares[f"train/time/{name}"] = seconds / total
        training_seconds = sum(self._seconds[name] for name in _TRAINING)
        shares["train/goodput"] = training_seconds / total
        return shares

    def _report_straggler(
        self, trainer: TrainerLike, rows: Sequence[Sequence[float]]
    ) -> None:
        straggler = find_straggler(rows)
        if straggler is None:
            return
        rank, section, ratio = straggler
        seconds = rows[rank][SECTIONS.index(section)]
        # Once an epoch: a machine that is slow stays so, and a line each time would hide the others.
        report = trainer.current_epoch, rank, section
        if report not in self._reported:
            self._reported.add(report)
            trainer.print(
                f"straggler: rank {rank}, {section}: {seconds:.3g} s, {ratio:.1f} times the median of the ranks"
            )


def _goodput(trainer: TrainerLike) -> float:
    seconds = trainer.seconds_of_run()
    return seconds["useful"] / max(sum(seconds.values()), 1e-9)


def _rates_of_counts(
    counts: Mapping[str, float], seconds: float, world_size: int
) -> dict[str, float]:
    rates = {}
    for name, count in counts.items():
        # Tokens and items that nothing counts are not logged.
        if count or name in ("batches", "samples"):
            rate = count / seconds
            rates[f"train/global/{name}_per_sec"] = rate
            rates[f"train/device/{name}_per_sec"] = rate / world_size
    return rates


def _peak_flops(trainer: TrainerLike) -> float | None:
    device = trainer.strategy.device
    if device.type != "cuda":
        return None
    device_name = torch.cuda.get_device_name(device)
    return device_peak(device_name, trainer.precision_plugin.name)


@final
class LearningRateMonitor(Callback):
    """Log the learning rate of each parameter group.

    The value at step n is the one after n completed steps, which step n + 1 uses. Names are ``lr-Adam``; for several
    groups ``lr-Adam/pg1`` (or the ``"name"`` of the group); for a second Adam ``lr-Adam-1``; the ``name`` of a
    scheduler replaces ``lr-Adam``. ``-momentum`` and ``-weight_decay`` are appended for these values.

    ``trainer.callback_metrics`` holds the values too, so that they can be monitored.

    Args:
        logging_interval: ``"step"`` (steps at which the trainer logs), ``"epoch"`` (at its start), or None for the
            ``interval`` of each scheduler.
        log_momentum: log momentum, or Adam's first beta.
        log_weight_decay: log weight decay.

    Attributes:
        lrs: name → learning rates logged in this run.

    Raises:
        ConfigurationError: for another interval; at the start of training, for two groups with the same name.

    Example:
        >>> LearningRateMonitor(logging_interval="step").logging_interval
        'step'
    """

    never_called: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            "_extract_stats",
            "_remap_keys",
            "_find_names_from_schedulers",
            "_add_prefix",
            "_add_suffix",
        ),
        "write a callback that reads trainer.lr_scheduler_configs and calls trainer.log_metrics",
    )

    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        if logging_interval not in (None, "step", "epoch"):
            raise ConfigurationError(
                "LearningRateMonitor logs at steps or epochs",
                found=f"logging_interval={logging_interval!r}",
                fix="use 'step', 'epoch' or None",
            )
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.lrs: dict[str, list[float]] = {}
        self._next: int | float = math.inf
        if logging_interval == "epoch":
            # The bus leaves out a hook that is the base class's own: steps pay only for what looks at them.
            leave_out(self, "on_train_step_end", LearningRateMonitor)

    def on_train_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self.lrs = {name: [] for _, name in self._name_groups(trainer, None)}
        self._next = math.inf
        if self.logging_interval == "epoch" or not trainer.log_every_n_steps:
            return
        self._next = _next_logging_step(trainer)
        # The rate of the first step; a resumed run has logged that of its step.
        if trainer.progress.step == 0:
            self._log_rates(trainer, "step")

    def on_train_step_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        step = trainer.progress.step
        if step >= self._next:
            self._next = following(step, trainer.log_every_n_steps)
            self._log_rates(trainer, "step")

    def on_train_epoch_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        # A run that resumes inside an epoch has logged the rate of the epoch already.
        if self.logging_interval != "step" and not trainer.progress.epoch_batch:
            self._log_rates(trainer, "epoch")

    def _log_rates(self, trainer: TrainerLike, interval: str) -> None:
        values: dict[str, float] = {}
        # With an interval of its own, this callback logs all schedulers at it.
        scheduler_interval = None
        if self.logging_interval is None:
            scheduler_interval = interval
        for group, name in self._name_groups(trainer, scheduler_interval):
            # sync point where it is a tensor
            rate = float(group["lr"])
            self.lrs.setdefault(name, []).append(rate)
            values[name] = rate
            if self.log_momentum:
                values[f"{name}-momentum"] = _momentum(group)
            if self.log_weight_decay:
                values[f"{name}-weight_decay"] = float(group.get("weight_decay", 0.0))
        if not values:
            return
        trainer.log_metrics(values, step=trainer.global_step)
        # On every rank: a callback that monitors a rate needs it on all ranks.
        for name, value in values.items():
            trainer.callback_metrics[name] = torch.tensor(value)

    def _name_groups(
        self, trainer: TrainerLike, interval: str | None
    ) -> Iterator[tuple[dict[str, Any], str]]:
        """Yield each parameter group with its name; with ``interval``, without those of other intervals."""
        uses: Counter[str] = Counter()
        for optimizer, base, optimizer_interval in _name_optimizers(trainer):
            name = base
            if uses[base]:
                name = f"{base}-{uses[base]}"
            # Optimizers of other intervals count too, so that a name does not depend on the interval.
            uses[base] += 1
            if interval is not None and optimizer_interval not in (None, interval):
                continue
            suffixes = _group_suffixes(optimizer, name)
            for group, suffix in zip(optimizer.param_groups, suffixes, strict=True):
                yield group, name + suffix


def _momentum(group: ParamGroup) -> float:
    if "betas" in group:
        return float(group["betas"][0])
    return float(group.get("momentum", 0.0))


def _name_optimizers(
    trainer: TrainerLike,
) -> Iterator[tuple[Optimizer, str, str | None]]:
    """Yield each optimizer, its name, and the interval of its scheduler (None without one)."""
    scheduled: list[Optimizer] = []
    for config in trainer.lr_scheduler_configs:
        # A scheduler needs only `step`; `optimizer` is optional.
        optimizer = getattr(config.scheduler, "optimizer", None)
        if optimizer is None:
            continue
        scheduled.append(optimizer)
        name = config.name
        if name is None:
            name = _default_name(optimizer)
        yield optimizer, name, config.interval
    for optimizer in trainer.optimizers:
        # By identity: an optimizer of a user may define equality.
        if not any(optimizer is other for other in scheduled):
            yield optimizer, _default_name(optimizer), None


def _default_name(optimizer: Optimizer) -> str:
    return f"lr-{type(optimizer).__name__}"


def _group_suffixes(optimizer: Optimizer, name: str) -> list[str]:
    groups = optimizer.param_groups
    names = []
    for index, group in enumerate(groups, start=1):
        default = ""
        if len(groups) > 1:
            default = f"pg{index}"
        names.append(group.get("name", default))
    if len(set(names)) < len(names):
        raise ConfigurationError(
            f"two parameter groups of {name} have the same name",
            found=", ".join(names),
            fix='give them different names: "name"',
        )
    return [f"/{group_name}" if group_name else "" for group_name in names]
