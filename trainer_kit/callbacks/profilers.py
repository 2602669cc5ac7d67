"""Profilers: a table of hooks and parts of training, cProfile, and torch's profiler with a trace."""

from __future__ import annotations

import cProfile
import inspect
import io
import pstats
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, Final, Literal, final

import torch

from trainer_kit.callbacks.monitors import SectionTimes
from trainer_kit.callbacks.torch_private import record_memory, save_memory_snapshot
from trainer_kit.core.errors import ConfigurationError, did_you_mean
from trainer_kit.core.hooks import Callback
from trainer_kit.core.protocols import ModuleLike, TrainerLike
from trainer_kit.core.types import Function

__all__ = ["AdvancedProfiler", "PyTorchProfiler", "SimpleProfiler", "make_profiler"]

_HAS_SNAPSHOTS: Final = "cuda"
"""The type of device whose allocations torch records."""


@final
class _Timed:
    """A hook whose calls and seconds are added to a row."""

    __slots__ = ("func", "row")

    def __init__(self, func: Function, row: list[float]) -> None:
        self.func = func
        self.row = row

    def __call__(self, *arguments: Any) -> Any:
        began = perf_counter()
        # `finally`: a hook that raises, to end the run for example, has taken its time too.
        try:
            return self.func(*arguments)
        finally:
            self.row[0] += 1
            self.row[1] += perf_counter() - began


class _Report:
    """Where a profiler writes its text: a file for each rank, or rank 0's output."""

    def __init__(self, dirpath: str | Path | None, filename: str | None) -> None:
        self.dirpath = dirpath
        self.filename = filename

    def path(self, trainer: TrainerLike, suffix: str) -> Path:
        """The file of this rank."""
        directory = trainer.run_dir
        if self.dirpath is not None:
            directory = Path(self.dirpath)
        directory.mkdir(parents=True, exist_ok=True)
        start = self.filename or "profile"
        # The rank is in every name: ranks of one machine share the directory.
        return directory / f"{start}-rank{trainer.global_rank}{suffix}"

    def write(self, trainer: TrainerLike, text: str) -> None:
        """Write ``text`` to the file; without one print it, on rank 0."""
        if self.filename is None and self.dirpath is None:
            trainer.print(text)
        else:
            self.path(trainer, ".txt").write_text(text + "\n")


@final
class SimpleProfiler(SectionTimes):
    """A table of the time of a fit: its parts, and each hook of each callback and of the module, when it ends.

    The parts are those of `ThroughputMonitor`, and leave no gap; the hooks are called inside them.

    Args:
        dirpath: where the table is written, one file a rank; None and no ``filename``: it is printed, on rank 0.
        filename: the beginning of the file's name.

    Example:
        >>> SimpleProfiler().state_key
        'SimpleProfiler'
    """

    def __init__(
        self, dirpath: str | Path | None = None, filename: str | None = None
    ) -> None:
        super().__init__()
        self._report = _Report(dirpath, filename)
        self._rows: dict[tuple[str, str], list[float]] = {}

    def wrap_hook(self, hook: str, owner: str, call: Function) -> Function:
        # Its own hooks measure the parts: a row for them would count their time twice.
        if owner == type(self).__name__:
            return call
        return _Timed(call, self._rows.setdefault((owner, hook), [0.0, 0.0]))

    def setup(self, trainer: TrainerLike, pl_module: ModuleLike, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        # In place: the wrapped hooks of the bus hold these very lists.
        for row in self._rows.values():
            row[:] = 0.0, 0.0

    def on_fit_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        split = self.time_split()
        total = sum(split.values())
        lines = [f"{'part':<60} {'calls':>8} {'total s':>10} {'mean ms':>10} {'%':>6}"]
        for name, seconds in split.items():
            lines.append(_format_row(name, None, seconds, total))
        lines.append(_format_row("all of training", None, total, total))
        lines.append("")
        # The hooks that took longest first.
        rows = sorted(self._rows.items(), key=lambda row: -row[1][1])
        for (owner, hook), (calls, seconds) in rows:
            if calls:
                name = f"{owner}.{hook}"
                lines.append(_format_row(name, int(calls), seconds, total))
        self._report.write(trainer, "\n".join(lines))


def _format_row(name: str, calls: int | None, seconds: float, total: float) -> str:
    count = "" if calls is None else calls
    mean = ""
    if calls:
        mean = f"{1000 * seconds / calls:.3f}"
    # A fit of no steps has a total of zero.
    share = 100 * seconds / max(total, 1e-9)
    return f"{name:<60} {count:>8} {seconds:>10.3f} {mean:>10} {share:>6.1f}"


@final
class AdvancedProfiler(Callback):
    """Python's cProfile over training: which functions take the time.

    Writes ``profile-rank0.prof`` for ``snakeviz`` or ``pstats`` into ``dirpath`` (default: the run's directory), and
    prints the functions with the largest own time, on rank 0.

    Args:
        dirpath: where the profile is written.
        filename: the beginning of the file's name, in place of ``profile``.
        line_count_restriction: functions in the printed text: a number, or as a float a fraction of all.

    Example:
        >>> AdvancedProfiler(line_count_restriction=10).line_count_restriction
        10
    """

    order: ClassVar[Literal["early", "normal", "late"]] = "early"

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        line_count_restriction: int | float = 20,
    ) -> None:
        self.line_count_restriction = line_count_restriction
        self._report = _Report(dirpath, filename)
        self._profile: cProfile.Profile | None = None

    def on_train_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self._profile = cProfile.Profile()
        self._profile.enable()

    def on_fit_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        profile = self._stop()
        if profile is None:
            return
        path = self._report.path(trainer, ".prof")
        profile.dump_stats(path)
        output = io.StringIO()
        statistics = pstats.Stats(profile, stream=output)
        statistics.sort_stats("tottime")
        statistics.print_stats(self.line_count_restriction)
        trainer.print(f"{output.getvalue().strip()}\nwritten to {path}")

    def teardown(self, trainer: TrainerLike, pl_module: ModuleLike, stage: str) -> None:
        # After an exception `on_fit_end` is not called, and cProfile would stay on for the rest of the process.
        self._stop()

    def _stop(self) -> cProfile.Profile | None:
        profile = self._profile
        self._profile = None
        if profile is not None:
            profile.disable()
        return profile


@final
class PyTorchProfiler(SectionTimes):
    """torch's profiler over a few steps of training, with a trace for https://ui.perfetto.dev for each rank.

    The trace has a range for each part of training, by the names of `ThroughputMonitor`. After the recorded steps the
    profiler is off: the rest of training costs what it costs without.

    Args:
        dirpath: where ``profile-rank0.json`` is written (default: the run's directory).
        filename: the beginning of the file's name, in place of ``profile``.
        wait: steps that are skipped at first.
        warmup: steps that are run under the profiler and not recorded.
        active: steps that are recorded.
        row_limit: operators in the table that rank 0 prints; 0 prints none.
        sort_by_key: column by which it is sorted; None: by the time on the device.
        memory_snapshot: on CUDA, also write ``profile-rank0.pickle`` of the allocations in the recorded steps, for
            https://pytorch.org/memory_viz.
        profiler_kwargs: other arguments of ``torch.profiler.profile``, such as ``record_shapes=True``.

    Raises:
        ConfigurationError: for a number of steps below zero, or none to record; for an argument that
            ``torch.profiler.profile`` does not have, and for ``schedule``.

    Example:
        >>> PyTorchProfiler(wait=10, active=5, record_shapes=True).active
        5
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        *,
        wait: int = 1,
        warmup: int = 1,
        active: int = 3,
        row_limit: int = 20,
        sort_by_key: str | None = None,
        memory_snapshot: bool = False,
        **profiler_kwargs: Any,
    ) -> None:
        if min(wait, warmup) < 0 or active < 1:
            raise ConfigurationError(
                "a profile needs steps to record",
                found=f"wait={wait}, warmup={warmup}, active={active}",
            )
        _check_options(profiler_kwargs)
        super().__init__()
        self.wait = wait
        self.warmup = warmup
        self.active = active
        self.row_limit = row_limit
        self.sort_by_key = sort_by_key
        self.memory_snapshot = memory_snapshot
        self._kwargs = profiler_kwargs
        self._report = _Report(dirpath, filename)
        self._profile: Any = None
        # The range of the present part in the trace.
        self._range: Any = None
        self._remaining_steps = 0
        self._records_memory = False

    def enter(self, section: str) -> None:
        # Ranges of parts do not nest: one ends where the next begins.
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        super().enter(section)
        if section and self._profile is not None:
            self._range = torch.profiler.record_function(section)
            self._range.__enter__()

    def on_train_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self._remaining_steps = self.wait + self.warmup + self.active
        schedule = torch.profiler.schedule(
            wait=self.wait, warmup=self.warmup, active=self.active, repeat=1
        )
        self._profile = torch.profiler.profile(schedule=schedule, **self._kwargs)
        self._profile.__enter__()
        if self.memory_snapshot and trainer.strategy.device.type != _HAS_SNAPSHOTS:
            trainer.print(
                f"memory_snapshot=True has no effect on {trainer.strategy.device}: torch records CUDA's memory"
            )
        self._begin_snapshot(trainer)
        super().on_train_start(trainer, pl_module)

    def on_train_step_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        super().on_train_step_end(trainer, pl_module)
        if self._profile is None:
            return
        self._remaining_steps -= 1
        self._begin_snapshot(trainer)
        if self._remaining_steps:
            self._profile.step()
        else:
            self._finish(trainer)

    def on_train_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        super().on_train_end(trainer, pl_module)
        # Training ended while steps were recorded: a shorter trace is better than none.
        if self._remaining_steps < self.active:
            self._finish(trainer)
        elif self._profile is not None:
            trainer.print(
                f"PyTorchProfiler recorded nothing: training ended before step {self.wait + self.warmup + 1}, at which"
                " recording begins; lower wait= and warmup="
            )

    def teardown(self, trainer: TrainerLike, pl_module: ModuleLike, stage: str) -> None:
        self._stop()

    def _begin_snapshot(self, trainer: TrainerLike) -> None:
        if not self.memory_snapshot or self._remaining_steps != self.active:
            return
        if trainer.strategy.device.type == _HAS_SNAPSHOTS:
            record_memory()
            self._records_memory = True

    def _stop(self, snapshot: Path | None = None) -> Any:
        # Cleared first: this is called again in `teardown`, and each profiler ends once.
        profile = self._profile
        self._profile = None
        if self._records_memory:
            if snapshot is not None:
                save_memory_snapshot(str(snapshot))
            # Recording costs time and memory at every allocation, so it ends with the recorded steps.
            record_memory(enabled=None)
            self._records_memory = False
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if profile is not None:
            profile.__exit__(None, None, None)
        return profile

    def _finish(self, trainer: TrainerLike) -> None:
        path = self._report.path(trainer, ".json")
        profile = self._stop(path.with_suffix(".pickle"))
        if profile is None:
            return
        profile.export_chrome_trace(str(path))
        if self.row_limit:
            device = trainer.strategy.device.type
            sort_key = self.sort_by_key or f"self_{device}_time_total"
            averages = profile.key_averages()
            table = averages.table(sort_by=sort_key, row_limit=self.row_limit)
            trainer.print(table)
        trainer.print(f"trace written to {path}: open it at https://ui.perfetto.dev")


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse what ``torch.profiler.profile`` does not take, before the first step."""
    parameters = inspect.signature(torch.profiler.profile).parameters
    # The schedule is made of wait, warmup and active, which also say when the profiler ends.
    accepted = parameters.keys() - {"schedule"}
    for name in options:
        if name in accepted:
            continue
        fix = did_you_mean(name, accepted)
        if name == "schedule":
            fix = "use wait=, warmup= and active="
        raise ConfigurationError(
            "torch.profiler.profile does not have this argument",
            found=name,
            fix=fix,
        )


_PROFILERS: Final[Mapping[str, Callable[[], Callback]]] = {
    "simple": SimpleProfiler,
    "advanced": AdvancedProfiler,
    "pytorch": PyTorchProfiler,
}


def make_profiler(profiler: object) -> Callback:
    """The callback for ``Trainer(profiler=...)``: a word, or one of the profilers.

    Raises:
        ConfigurationError: for anything else.

    Example:
        >>> type(make_profiler("simple")).__name__
        'SimpleProfiler'
    """
    if isinstance(profiler, str) and profiler in _PROFILERS:
        return _PROFILERS[profiler]()
    if isinstance(profiler, Callback):
        return profiler
    suggestion = did_you_mean(str(profiler), _PROFILERS)
    raise ConfigurationError(
        "profiler= must be a name or a callback",
        found=f"profiler={profiler!r}",
        fix=f"{suggestion}; or PyTorchProfiler(...) of trainer_kit.callbacks",
    )
