"""`DeviceStatsMonitor` and `ThroughputMonitor`: memory, samples and tokens a second, FLOP/s, and where time goes."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from statistics import median_low
from time import perf_counter, process_time
from typing import Any, ClassVar, Final, Literal, final

import torch
from torch.optim import Optimizer

from trainer_kit.callbacks.conditions import following
from trainer_kit.core.device_table import device_peak
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hooks import Callback
from trainer_kit.core.protocols import ModuleLike, TrainerLike
from trainer_kit.core.signatures import leave_out

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
        every = trainer.log_every_n_steps
        self._next = following(trainer.progress.step, every) if every else math.inf
        self._cpu_since = perf_counter(), process_time()

    def on_train_step_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        step = trainer.progress.step
        if step < self._next:
            return
        self._next = following(step, trainer.log_every_n_steps)
        device: torch.device = trainer.strategy.device
        values = _memory_of(device)
        if self.cpu_stats or (self.cpu_stats is None and device.type == "cpu"):
            values.update(self._of_process())
        rows = trainer.strategy.world.agree(list(values.values()))
        trainer.log_metrics(
            dict(zip(values, map(max, zip(*rows, strict=True)), strict=True)), step
        )

    def _of_process(self) -> dict[str, float]:
        (since, used), now = self._cpu_since, (perf_counter(), process_time())
        self._cpu_since = now
        found = {"cpu/percent": 100 * (now[1] - used) / max(now[0] - since, 1e-9)}
        if sys.platform == "linux":
            with open("/proc/self/status") as file:
                lines = dict(line.split(":", 1) for line in file)
            for name, key in (("cpu/memory", "VmRSS"), ("cpu/memory_peak", "VmHWM")):
                found[name] = 1024.0 * int(lines[key].split()[0])
        return found


def _memory_of(device: torch.device) -> dict[str, float]:
    if device.type == "cpu":
        return {}
    backend = torch.get_device_module(device)
    names = {
        "allocated": "memory_allocated",
        "reserved": "memory_reserved",
        "peak": "max_memory_allocated",
    }
    found = {
        f"device/memory_{k}": float(getattr(backend, f)(device))
        for k, f in names.items()
        if hasattr(backend, f)
    }
    if hasattr(backend, "reset_peak_memory_stats"):
        backend.reset_peak_memory_stats(device)
    return found


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
    whole, found = max(map(sum, rows)), dict[str, tuple[float, int, float]]()
    for section, seconds in zip(SECTIONS, zip(*rows, strict=True), strict=True):
        slowest, usual = max(seconds), median_low(seconds)
        if slowest > 1.5 * usual and slowest - usual > max(0.1 * whole, _BY_CHANCE):
            found[section] = (
                slowest - usual,
                seconds.index(slowest),
                slowest / max(usual, 1e-9),
            )
    largest = max((excess for excess, _, _ in found.values()), default=0.0)
    for section in _AFTER_AN_EXCHANGE:
        if section in found and found[section][0] >= 0.5 * largest:
            return found[section][1], section, found[section][2]
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
        self._section, self._mark = "", 0.0
        self._wait: Callable[[], Any] | None = None

    def time_split(self) -> dict[str, float]:
        """Seconds of each part of `SECTIONS` so far."""
        return dict(self._seconds)

    def enter(self, section: str) -> None:
        """The present part ends, and this one begins; ``""``: training is over. Nothing happens outside of training."""
        if not self._section:
            return
        if self._wait is not None:
            self._wait()  # sync point: asked for by the user
        now = perf_counter()
        self._seconds[self._section] += now - self._mark
        self._section, self._mark = section, now

    def setup(self, trainer: TrainerLike, pl_module: ModuleLike, stage: str) -> None:
        if stage == "fit":
            self._seconds, self._section = dict.fromkeys(SECTIONS, 0.0), ""

    def on_train_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        device = trainer.strategy.device
        if self.synchronize and device.type != "cpu":
            self._wait = torch.get_device_module(device).synchronize
        self._section, self._mark = "callbacks", perf_counter()

    def on_train_epoch_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self.enter("data")

    def on_train_batch_start(
        self, trainer: TrainerLike, pl_module: ModuleLike, batch: Any, batch_idx: int
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
        outputs: Any,
        batch: Any,
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
        self, trainer: TrainerLike, pl_module: ModuleLike, checkpoint: dict[str, Any]
    ) -> None:
        self.enter("checkpoint")

    def on_train_epoch_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self.enter("callbacks")

    def on_train_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self.enter("")


@final
class ThroughputMonitor(SectionTimes):
    """Log samples and tokens a second, FLOP/s, model FLOPs utilisation, and the parts of the time of training.

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
        if any(
            value is not None and value <= 0 for value in (flops_per_batch, peak_flops)
        ):
            raise ConfigurationError(
                "FLOPs are positive",
                found=f"flops_per_batch={flops_per_batch}, peak_flops={peak_flops}",
            )
        super().__init__(synchronize)
        self.batch_size_fn, self.length_fn = batch_size_fn, length_fn
        self.flops_per_batch, self.peak_flops = flops_per_batch, peak_flops
        self._next: float = math.inf
        self._first_step = 0
        self._own = [
            0.0,
            0.0,
        ]  # samples and items of this rank, by the user's functions
        self._before: dict[str, float] = {}
        self._split_before = self.time_split()
        self._named: set[tuple[int, int, str]] = (
            set()
        )  # epoch, rank and part of stragglers that were printed
        self._flops = flops_per_batch
        self._counter: AbstractContextManager[Any] | None = None
        self._counted = 0  # micro-batches: those of a pipeline begin together

    def state_dict(self) -> Mapping[str, Any]:
        return {"seconds": self.time_split()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._seconds.update(state_dict["seconds"])

    def setup(self, trainer: TrainerLike, pl_module: ModuleLike, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._flops, self._named = self.flops_per_batch, set()

    def teardown(self, trainer: TrainerLike, pl_module: ModuleLike, stage: str) -> None:
        self._end_count()

    def on_train_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        super().on_train_start(trainer, pl_module)
        every, self._first_step = trainer.log_every_n_steps, trainer.progress.step
        self._next = following(self._first_step, every) if every else math.inf
        self._before, self._split_before = self._counts(trainer), self.time_split()

    def on_train_batch_start(
        self, trainer: TrainerLike, pl_module: ModuleLike, batch: Any, batch_idx: int
    ) -> None:
        if self.batch_size_fn is not None:
            self._own[0] += self.batch_size_fn(batch)
        if self.length_fn is not None:
            self._own[1] += self.length_fn(batch)
        if (
            self._flops is None
            and trainer.progress.step == self._first_step + 1
            and self._counter is None
        ):
            from torch.utils.flop_counter import FlopCounterMode

            counter: AbstractContextManager[Any] = FlopCounterMode(display=False)
            counter.__enter__()
            self._counter, self._counted = counter, 0
        self._counted += 1
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_after_backward(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        super().on_after_backward(trainer, pl_module)
        if self._counter is not None:  # a step may have several backward passes
            total = self._counter.get_total_flops()  # type: ignore[attr-defined]  # 0: compiled
            self._flops = total / self._counted

    def on_train_batch_end(
        self,
        trainer: TrainerLike,
        pl_module: ModuleLike,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._end_count()

    def on_train_step_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        step = trainer.progress.step
        if step >= self._next:
            self._next = following(step, trainer.log_every_n_steps)
            self._log(trainer)
        super().on_train_step_end(trainer, pl_module)

    def _end_count(self) -> None:
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.__exit__(None, None, None)
            self._flops = self._flops or 0.0

    def _counts(self, trainer: TrainerLike) -> dict[str, float]:
        """What is counted, up to this step; over all ranks, but for ``own``."""
        progress, seconds = trainer.progress, self._seconds
        samples, items = self._own
        return {
            "seconds": sum(seconds.values()) - seconds["validation"],
            "batches": progress.batch,
            "samples": samples if self.batch_size_fn is not None else progress.samples,
            "tokens": progress.tokens,
            "items": items,
        }

    def _log(self, trainer: TrainerLike) -> None:
        self.enter(self._section)
        strategy, now, split = (
            trainer.strategy,
            self._counts(trainer),
            self.time_split(),
        )
        made = {name: value - self._before[name] for name, value in now.items()}
        spent = [split[name] - self._split_before[name] for name in SECTIONS]
        self._before, self._split_before = now, split
        rows = strategy.world.agree(
            [strategy.data.rank, made["samples"], made["items"], *spent]
        )
        counts = {
            row[0]: row for row in rows
        }.values()  # ranks that compute parts of one batch count it once
        if self.batch_size_fn is not None:
            made["samples"] = sum(row[1] for row in counts)
        made["items"] = sum(row[2] for row in counts)
        self._report_straggler(trainer, [row[3:] for row in rows])
        seconds, values = max(made.pop("seconds"), 1e-9), dict[str, float]()
        batches = made["batches"]
        made["batches"] = batches * strategy.data.size
        for name, count in made.items():
            if count or name in ("batches", "samples"):
                values[f"train/global/{name}_per_sec"] = count / seconds
                values[f"train/device/{name}_per_sec"] = (
                    count / seconds / trainer.world_size
                )
        if self._flops:
            rate = values["train/device/flops_per_sec"] = (
                self._flops * batches / seconds
            )
            peak = self.peak_flops or _peak_of(trainer)
            if peak is not None:
                values["train/device/mfu"] = rate / peak
        whole = max(sum(self._seconds.values()), 1e-9)
        values.update(
            {
                f"train/time/{name}": spent / whole
                for name, spent in self._seconds.items()
            }
        )
        values["train/goodput"] = sum(self._seconds[name] for name in _TRAINING) / whole
        trainer.log_metrics(values, trainer.progress.step)

    def _report_straggler(
        self, trainer: TrainerLike, rows: Sequence[Sequence[float]]
    ) -> None:
        found = find_straggler(rows)
        if found is None:
            return
        rank, section, ratio = found
        seconds = rows[rank][SECTIONS.index(section)]
        if (trainer.current_epoch, rank, section) not in self._named:
            self._named.add((trainer.current_epoch, rank, section))
            trainer.print(
                f"straggler: rank {rank}, {section}: {seconds:.3g} s, {ratio:.1f} times the median of the ranks"
            )


def _peak_of(trainer: TrainerLike) -> float | None:
    device = trainer.strategy.device
    if device.type != "cuda":
        return None
    return device_peak(
        torch.cuda.get_device_name(device), trainer.precision_plugin.name
    )


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
        self.log_momentum, self.log_weight_decay = log_momentum, log_weight_decay
        self.lrs: dict[str, list[float]] = {}
        self._next: int | float = math.inf
        if logging_interval == "epoch":
            # The bus leaves out a hook that is the base class's own: steps pay only for what looks at them.
            leave_out(self, "on_train_step_end", LearningRateMonitor)

    def on_train_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self.lrs = {name: [] for _, name, _ in self._groups(trainer, None)}
        every = trainer.log_every_n_steps
        if self.logging_interval != "epoch" and every:
            step = trainer.progress.step
            self._next = following(step, every)
            if step == 0:
                self._log(trainer, "step")
        else:
            self._next = math.inf

    def on_train_step_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        step = trainer.progress.step
        if step >= self._next:
            self._next = following(step, trainer.log_every_n_steps)
            self._log(trainer, "step")

    def on_train_epoch_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        # A run that resumes inside an epoch has logged the rate of the epoch already.
        if self.logging_interval != "step" and not trainer.progress.epoch_batch:
            self._log(trainer, "epoch")

    def _log(self, trainer: TrainerLike, interval: str) -> None:
        values: dict[str, float] = {}
        for group, name, uses_betas in self._groups(
            trainer, interval if self.logging_interval is None else None
        ):
            rate = float(group["lr"])  # sync point where it is a tensor
            self.lrs.setdefault(name, []).append(rate)
            values[name] = rate
            if self.log_momentum:
                momentum = (
                    group["betas"][0] if uses_betas else group.get("momentum", 0.0)
                )
                values[f"{name}-momentum"] = float(momentum)
            if self.log_weight_decay:
                values[f"{name}-weight_decay"] = float(group.get("weight_decay", 0.0))
        if values:
            trainer.log_metrics(values, step=trainer.global_step)
            # On every rank: a callback that monitors a rate needs it on all ranks.
            trainer.callback_metrics.update(
                (name, torch.tensor(value)) for name, value in values.items()
            )

    @staticmethod
    def _groups(
        trainer: TrainerLike, interval: str | None
    ) -> Iterator[tuple[dict[str, Any], str, bool]]:
        """Each parameter group with its name; with ``interval``, without those of other intervals."""
        seen: Counter[str] = Counter()
        scheduled: list[Optimizer] = []
        chosen: list[tuple[Optimizer, str, bool]] = []
        for config in trainer.lr_scheduler_configs:
            optimizer = getattr(config.scheduler, "optimizer", None)
            if (
                optimizer is None
            ):  # a scheduler needs only `step`; `optimizer` is optional
                continue
            scheduled.append(optimizer)
            base = (
                config.name
                if config.name is not None
                else f"lr-{type(optimizer).__name__}"
            )
            chosen.append((optimizer, base, interval in (None, config.interval)))
        rest = (
            each
            for each in trainer.optimizers
            if not any(each is other for other in scheduled)
        )
        chosen += [
            (optimizer, f"lr-{type(optimizer).__name__}", True) for optimizer in rest
        ]
        for optimizer, base, wanted in chosen:
            name = base if seen[base] == 0 else f"{base}-{seen[base]}"
            seen[base] += 1
            if wanted:
                for group, suffix in zip(
                    optimizer.param_groups, _suffixes(optimizer, name), strict=True
                ):
                    yield group, name + suffix, "betas" in group


def _suffixes(optimizer: Optimizer, name: str) -> list[str]:
    groups = optimizer.param_groups
    names = [
        group.get("name", f"pg{index}" if len(groups) > 1 else "")
        for index, group in enumerate(groups, start=1)
    ]
    if len(set(names)) < len(names):
        raise ConfigurationError(
            f"two parameter groups of {name} have the same name",
            found=", ".join(names),
            fix='give them different names: "name"',
        )
    return [f"/{each}" if each else "" for each in names]
