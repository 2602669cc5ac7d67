"""Try the configurations of a run that make sense, and rank those that fit into a device's memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, final

from lightning_utilities.core.overrides import is_overridden
from torch import nn

from trainer_kit.core.device_table import Device
from trainer_kit.core.display import in_units, plural
from trainer_kit.core.errors import TrainerKitError
from trainer_kit.core.module import TrainModule
from trainer_kit.launch.processes import no_garbage_in_forks, run_beside
from trainer_kit.planning.estimate import (
    Assumptions,
    Estimate,
    estimate_step,
    inner_ranks,
)
from trainer_kit.planning.records import CALCULATED, Candidate, Measured, Traffic
from trainer_kit.training.running import nothing

__all__ = ["Question", "Row", "describe", "search"]

_STATE: Final = ("parameters", "gradients", "optimizer")
_OFFLOADS: Final = {"fsdp": "fsdp_cpu_offload"}
"""Strategies that can keep their state in host memory, with the words of those that do."""
_MEASURED_WINDOW: Final = 2
"""Micro-batches that are run of a longer accumulation window: the second one adds to the gradients of the first."""


@final
@dataclass(frozen=True, kw_only=True)
class Question:
    """What is searched.

    Attributes:
        device: the device of each rank.
        worlds: the numbers of ranks.
        global_batch: samples of an optimizer step of all ranks; accumulation follows from it.
        limit: bytes that a rank may use.
        strategies: words; empty: those that make sense for the module and each world.
        precisions: words.
        assumptions: of the estimates.
    """

    device: Device
    worlds: tuple[int, ...]
    global_batch: int
    limit: int
    strategies: tuple[str, ...] = ()
    precisions: tuple[str, ...]
    assumptions: Assumptions


@final
@dataclass(frozen=True, kw_only=True)
class Row:
    """One configuration, with its largest micro-batch that fits.

    Attributes:
        candidate: the configuration.
        measured: what a step needs; None if it could not be measured, or is not needed.
        estimate: of its speed; None if it does not fit.
        reason: why it is not among the ranked ones; empty if it is.
    """

    candidate: Candidate
    measured: Measured | None
    estimate: Estimate | None
    reason: str = ""


_Measure = Callable[[Candidate], Measured]


def search(
    question: Question,
    module: nn.Module,
    measure: _Measure,
    say: Callable[[str], None] = nothing,
    *,
    several: bool = False,
) -> list[Row]:
    """Measure the configurations of a question; for each world, rows that fit come first, from fast to slow.

    Of each strategy and precision the largest micro-batch that fits is found. Activation checkpointing is tried where
    the whole batch of a rank does not fit without it, unless the state alone is too large; offload where nothing fits
    without it: where they are not needed, they only slow a step down.

    Args:
        question: what is searched.
        module: the module, which may lack its weights.
        measure: measures one configuration, or raises an error, whose text becomes the reason of its row.
        say: is called with a line for each measured configuration.
        several: search each precision in a process of its own.
    """
    strategies_by_world = {
        world: question.strategies or tuple(_strategies(module, world, question.device))
        for world in question.worlds
    }

    def search_precision(precision: str) -> dict[tuple[int, str], list[Row]]:
        # A new search: no precision uses what another one has measured.
        precision_search = _Search(question, measure, say)
        rows: dict[tuple[int, str], list[Row]] = {}
        for world, strategies in strategies_by_world.items():
            for strategy in strategies:
                rows[world, strategy] = list(
                    precision_search.rows(strategy, precision, world)
                )
        return rows

    searches = [
        partial(search_precision, precision) for precision in question.precisions
    ]
    if several:
        # A pipeline collects garbage at each stage, and would look at all of the imports.
        with no_garbage_in_forks():
            tables = run_beside(searches)
    else:
        tables = [run_search() for run_search in searches]
    ranked: list[Row] = []
    # In the order of the question, whichever fork has finished first.
    for world, strategies in strategies_by_world.items():
        rows: list[Row] = []
        for strategy in strategies:
            for table in tables:
                rows += table[world, strategy]
        rows.sort(key=partial(_rank, question.precisions))
        ranked += rows
    return ranked


def _rank(precisions: Sequence[str], row: Row) -> tuple[bool, float, int, int]:
    """Fast ones first; of equally fast ones the script's precision, then that which needs less memory."""
    # All alike: the sort is stable, and leaves them in the order in which they were tried.
    if row.estimate is None or row.measured is None:
        return True, 0.0, 0, 0
    # Differences beyond three digits are smaller than the error of an estimate.
    speed = float(f"{row.estimate.samples_per_second:.3g}")
    return False, -speed, precisions.index(row.candidate.precision), row.measured.peak


def _strategies(module: nn.Module, world: int, device: Device) -> Iterator[str]:
    """The strategies that make sense for a module on these ranks."""
    if world == 1:
        yield "single_device"
        return
    yield from ("ddp", "fsdp")
    # With one machine hybrid sharding is FSDP.
    if world > device.group and world % device.group == 0:
        yield f"hsdp{device.group}"
    # Only the module knows how its layers are split; without a plan these two would be refused.
    if not is_overridden("configure_parallel", module, TrainModule):
        return
    # Within a machine: these axes exchange in each layer, and links between machines are several times slower.
    sizes = [size for size in (2, 4, 8) if size <= device.group and world % size == 0]
    for axis in ("tp", "pp"):
        for size in sizes:
            yield f"{axis}{size}"


@final
class _Search:
    def __init__(
        self, question: Question, measure: _Measure, say: Callable[[str], None]
    ) -> None:
        self.question = question
        self._measure = measure
        self._say = say
        self._results: dict[Candidate, Measured] = {}
        # FLOPs of a sample, by strategy, precision and world
        self._flops: dict[tuple[str, str, int], float] = {}
        # bytes that one more sample needs, by precision, checkpointing and ranks with the same samples
        self._slopes: dict[tuple[str, bool, int], float] = {}

    def rows(self, strategy: str, precision: str, world: int) -> Iterator[Row]:
        """The configurations of a strategy and a precision on these ranks."""
        offload = False
        for plain_name, offload_name in _OFFLOADS.items():
            if strategy == offload_name:
                strategy = plain_name
                offload = True
        candidate = Candidate(
            strategy=strategy,
            precision=precision,
            world=world,
            micro_batch=1,
            offload=offload,
        )
        if self._peak(candidate) is None:
            reason = f"the peak rate of {precision} matmuls is unknown for this device"
            yield _unranked_row(candidate, None, reason)
            return
        row = self._row(candidate)
        yield row
        # Checkpointing and offload save what is not known of such a step.
        if row.measured is None or not row.measured.ran:
            return
        fits = row.estimate is not None
        # Where the whole batch fits, or the state alone does not, checkpointing saves
        # nothing that is needed.
        fits_whole = fits and row.candidate.accumulate == 1
        if not fits_whole and self._state(row.measured) <= self.question.limit:
            checkpointing_row = self._row(
                replace(candidate, activation_checkpointing=True)
            )
            yield checkpointing_row
            fits = fits or checkpointing_row.estimate is not None
        # With checkpointing, since offload alone moves no activations: what is on the device must be as small as it
        # can.
        if strategy in _OFFLOADS and not offload and not fits:
            yield self._row(
                replace(candidate, activation_checkpointing=True, offload=True)
            )

    def _row(self, single_sample: Candidate) -> Row:
        """The row of the largest micro-batch that fits."""
        try:
            measured = self._largest(single_sample, self._sizes(single_sample))
            # A window that does not fit is not ranked, so nothing of it is extrapolated.
            if measured.peak <= self.question.limit:
                measured = self._scaled(measured)
        except Exception as error:
            # Of the user's module too, which may raise anything.
            reason = f"cannot be built: {_text(error)}"
            return _unranked_row(single_sample, None, reason)
        candidate = measured.candidate
        if measured.peak > self.question.limit:
            return _unranked_row(candidate, measured, self._why_not(measured))
        if not measured.ran:
            state = in_units(measured.peak)
            notes = "; ".join(measured.notes).removeprefix(CALCULATED)
            reason = f"weights, gradients and optimizer state need {state}; the rest is unknown: {notes}"
            return _unranked_row(candidate, measured, reason)
        # MFU does not count recomputed activations: the row without checkpointing, which is
        # measured first, knows the FLOPs of the model.
        if not candidate.activation_checkpointing:
            samples = candidate.micro_batch * candidate.accumulate
            self._flops[_flops_key(candidate)] = measured.flops / samples
        estimate = self._estimate(candidate, measured)
        return Row(candidate=candidate, measured=measured, estimate=estimate)

    def _estimate(self, candidate: Candidate, measured: Measured) -> Estimate:
        peak = self._peak(candidate)
        assert peak is not None  # or `rows` has left it out
        model_flops = self._flops.get(_flops_key(candidate))
        if model_flops is not None:
            model_flops *= candidate.micro_batch * candidate.accumulate
        return estimate_step(
            measured,
            self.question.device,
            self.question.assumptions,
            peak=peak,
            model_flops=model_flops,
        )

    def _peak(self, candidate: Candidate) -> float | None:
        return self.question.device.flops(candidate.precision)

    def _sizes(self, candidate: Candidate) -> list[int]:
        """The micro-batches that divide a rank's batch, from small to large: single samples, and halves of halves."""
        inner = inner_ranks(candidate)
        data_ranks = max(1, candidate.world // inner)
        # At least one sample: with more ranks than samples the global batch grows, and a note of the plan says so.
        batch = max(1, self.question.global_batch // data_ranks)
        sizes = {1, batch}
        half = batch
        # Halves only: a micro-batch must divide the batch of a rank, and each size costs a measurement.
        while half % 2 == 0:
            half //= 2
            sizes.add(half)
        # A pipeline needs a micro-batch for each stage.
        stages = 1
        if candidate.strategy.startswith("pp"):
            stages = inner
        return sorted(size for size in sizes if size == 1 or batch // size >= stages)

    def _largest(self, single_sample: Candidate, sizes: Sequence[int]) -> Measured:
        """Measure the largest micro-batch that fits, or the smallest; each sample adds the same memory."""
        limit = self.question.limit
        # The whole batch first: where it fits, which is the usual case, nothing else is measured.
        largest = self._run(single_sample, sizes[-1], sizes)
        if largest.peak <= limit or len(sizes) == 1 or not largest.ran:
            return largest
        guess = self._guess(single_sample, sizes, largest)
        if guess is not None:
            return guess
        index, smallest = self._smallest(single_sample, sizes, largest)
        samples = sizes[-1] - sizes[index]
        slope = (largest.peak - smallest.peak) / max(1, samples)
        # The first strategy's is kept: it is only a guess for the others, and `_guess` checks it.
        self._slopes.setdefault(_slope_key(single_sample), slope)
        if smallest.peak > limit:
            return smallest
        # Measured too, and not only predicted: every ranked row is a measured one.
        for size in reversed(sizes[index + 1 : -1]):
            if smallest.peak + slope * (size - sizes[index]) <= limit:
                measured = self._run(single_sample, size, sizes)
                if measured.peak <= limit:
                    return measured
        return smallest

    def _smallest(
        self, single_sample: Candidate, sizes: Sequence[int], largest: Measured
    ) -> tuple[int, Measured]:
        """The smallest micro-batch that runs, with its index in ``sizes``; the last one has been measured."""
        for index, size in enumerate(sizes[:-1]):
            smallest = self._run(single_sample, size, sizes)
            # A batch norm refuses a single sample.
            if smallest.ran:
                return index, smallest
        return len(sizes) - 1, largest

    def _guess(
        self, single_sample: Candidate, sizes: Sequence[int], largest: Measured
    ) -> Measured | None:
        """The largest size that fits by what a sample needs under another strategy, if that is true of this one."""
        limit = self.question.limit
        slope = self._slopes.get(_slope_key(single_sample))
        if slope is None:
            return None
        fitting = [
            size
            for size in sizes[1:-1]
            if largest.peak - slope * (sizes[-1] - size) <= limit
        ]
        if not fitting:
            return None
        size = fitting[-1]
        measured = self._run(single_sample, size, sizes)
        if not measured.ran or measured.peak > limit:
            return None
        measured_slope = (largest.peak - measured.peak) / (sizes[-1] - size)
        next_size = sizes[sizes.index(size) + 1]
        # A larger one may fit.
        if measured.peak + measured_slope * (next_size - size) <= limit:
            return None
        return measured

    def _run(
        self, single_sample: Candidate, size: int, sizes: Sequence[int]
    ) -> Measured:
        """Measure a micro-batch, with at most two of its window."""
        window = sizes[-1] // size
        candidate = replace(
            single_sample, micro_batch=size, accumulate=min(window, _MEASURED_WINDOW)
        )
        measured = self._measure_once(candidate)
        # The row names the real window; `_scaled` adds what its other micro-batches need.
        return replace(measured, candidate=replace(candidate, accumulate=window))

    @staticmethod
    def _key(candidate: Candidate) -> Candidate:
        """Full replicas need and exchange the same in every world of more than one rank."""
        if candidate.strategy == "ddp":
            return replace(candidate, world=2)
        return candidate

    def _measure_once(self, candidate: Candidate) -> Measured:
        key = self._key(candidate)
        if key not in self._results:
            began = time.monotonic()
            measured = self._measure(candidate)
            self._results[key] = measured
            seconds = time.monotonic() - began
            self._say(
                f"{describe(candidate)}: {in_units(measured.peak)} ({seconds:.1f} s)"
            )
        return replace(self._results[key], candidate=candidate)

    def _scaled(self, measured: Measured) -> Measured:
        """Scale a window from two measured micro-batches: each further one adds as much as the second."""
        # Memory is not scaled: the second micro-batch already adds to existing gradients.
        further = measured.candidate.accumulate - _MEASURED_WINDOW
        if further <= 0:
            return measured
        single = self._single_micro_batch(measured)
        single_traffic = _traffic_by_key(single)

        def extrapolate(traffic: Traffic) -> Traffic:
            added_count = traffic.count
            added_bytes = traffic.bytes
            # Two micro-batches less one are what each further one adds: what is sent once a step cancels out.
            before = single_traffic.get((traffic.kind, traffic.axis))
            if before is not None:
                added_count -= before.count
                added_bytes -= before.bytes
            return replace(
                traffic,
                count=traffic.count + further * added_count,
                bytes=traffic.bytes + further * added_bytes,
            )

        added_flops = measured.flops - single.flops
        added_operators = measured.operators - single.operators
        return replace(
            measured,
            flops=measured.flops + further * added_flops,
            operators=measured.operators + further * added_operators,
            traffic=tuple(map(extrapolate, measured.traffic)),
        )

    def _single_micro_batch(self, measured: Measured) -> Measured:
        """The step of a single micro-batch, of which two were run.

        It need not be run where the step of the whole batch, which was, shows that collectives do not depend on the
        size of a micro-batch, and matmuls on nothing else.
        """
        candidate = measured.candidate
        single = replace(candidate, accumulate=1)
        samples = candidate.micro_batch * candidate.accumulate
        whole_batch = self._results.get(self._key(replace(single, micro_batch=samples)))
        if whole_batch is None or not whole_batch.ran:
            return self._measure_once(single)
        # FLOPs in proportion to samples: otherwise something depends on the batch in another way.
        if whole_batch.flops * 2 * candidate.micro_batch != measured.flops * samples:
            return self._measure_once(single)
        if not _same_bytes_each(whole_batch, measured):
            return self._measure_once(single)
        return replace(whole_batch, candidate=single, flops=measured.flops // 2)

    @staticmethod
    def _state(measured: Measured) -> int:
        """Of the rank with the most: what checkpointing cannot save."""
        sizes = []
        for role in measured.memory:
            sizes.append(sum(role.get(category, 0) for category in _STATE))
        return max(sizes)

    def _why_not(self, measured: Measured) -> str:
        role = max(measured.memory, key=lambda memory: sum(memory.values()))
        name, size = max(role.items(), key=lambda item: item[1])
        state = self._state(measured)
        text = f"needs {in_units(measured.peak)}"
        # Then no smaller batch helps, which is what the reader would try next.
        if measured.candidate.micro_batch == 1:
            text += " with one sample"
        if state > self.question.limit:
            return f"{text}, of which weights, gradients and optimizer state are {in_units(state)}"
        return f"{text}, most of it {name}: {in_units(size)}"


def _unranked_row(candidate: Candidate, measured: Measured | None, reason: str) -> Row:
    return Row(candidate=candidate, measured=measured, estimate=None, reason=reason)


def _traffic_by_key(measured: Measured) -> dict[tuple[str, str], Traffic]:
    return {(traffic.kind, traffic.axis): traffic for traffic in measured.traffic}


def _same_bytes_each(whole: Measured, measured: Measured) -> bool:
    """Whether two steps have the same collectives, of which each sends as many bytes."""
    whole_traffic = _traffic_by_key(whole)
    traffic = _traffic_by_key(measured)
    if whole_traffic.keys() != traffic.keys():
        return False
    for key, exchanged in traffic.items():
        expected = whole_traffic[key]
        if exchanged.bytes * expected.count != expected.bytes * exchanged.count:
            return False
    return True


def _flops_key(candidate: Candidate) -> tuple[str, str, int]:
    return candidate.strategy, candidate.precision, candidate.world


def _slope_key(candidate: Candidate) -> tuple[str, bool, int]:
    """Equal for candidates of which one sample needs about the same memory."""
    return (
        candidate.precision,
        candidate.activation_checkpointing,
        inner_ranks(candidate),
    )


def _text(error: Exception) -> str:
    """What went wrong, in one line."""
    # The first line: torch's errors continue with C++ frames.
    if not isinstance(error, TrainerKitError):
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0]}"
    text = error.problem
    if error.found is not None:
        text += f" ({error.found})"
    if error.fix is not None:
        text += f": {error.fix}"
    return text


def describe(candidate: Candidate) -> str:
    """A configuration in a few words.

    Example:
        >>> describe(Candidate(strategy="fsdp", precision="bf16-mixed", world=8, micro_batch=4, offload=True))
        'fsdp, bf16-mixed, 8 ranks, micro-batch 4, offload'
    """
    properties = [
        candidate.strategy,
        candidate.precision,
        plural(candidate.world, "rank"),
        f"micro-batch {candidate.micro_batch}",
    ]
    if candidate.activation_checkpointing:
        properties.append("checkpointing")
    if candidate.offload:
        properties.append("offload")
    return ", ".join(properties)
