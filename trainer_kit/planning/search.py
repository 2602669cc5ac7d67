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
from trainer_kit.core.display import in_units
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
    words = {
        world: question.strategies or tuple(_strategies(module, world, question.device))
        for world in question.worlds
    }

    def table(precision: str) -> dict[tuple[int, str], list[Row]]:
        found = _Search(
            question, measure, say
        )  # no precision uses what another one has measured
        return {
            (world, strategy): list(found.rows(strategy, precision, world))
            for world, strategies in words.items()
            for strategy in strategies
        }

    searches = [partial(table, precision) for precision in question.precisions]
    if several:
        with no_garbage_in_forks():  # a pipeline collects garbage at each stage, and would look at all of the imports
            tables = run_beside(searches)
    else:
        tables = [one() for one in searches]
    rows: list[Row] = []
    for world, strategies in words.items():
        own = [
            row
            for strategy in strategies
            for each in tables
            for row in each[world, strategy]
        ]
        own.sort(key=partial(_rank, question.precisions))
        rows += own
    return rows


def _rank(precisions: Sequence[str], row: Row) -> tuple[bool, float, int, int]:
    """Fast ones first; of equally fast ones the script's precision, then that which needs less memory."""
    if row.estimate is None or row.measured is None:
        return True, 0.0, 0, 0  # in the order in which they were tried
    speed = float(f"{row.estimate.samples_per_second:.3g}")
    return False, -speed, precisions.index(row.candidate.precision), row.measured.peak


def _strategies(module: nn.Module, world: int, device: Device) -> Iterator[str]:
    if world == 1:
        yield "single_device"
        return
    yield from ("ddp", "fsdp")
    if world > device.group and world % device.group == 0:
        yield f"hsdp{device.group}"
    if is_overridden("configure_parallel", module, TrainModule):
        for axis in ("tp", "pp"):
            yield from (
                f"{axis}{size}"
                for size in (2, 4, 8)
                if size <= device.group and world % size == 0
            )


@final
class _Search:
    def __init__(
        self, question: Question, measure: _Measure, say: Callable[[str], None]
    ) -> None:
        self.question, self._measure, self._say = question, measure, say
        self._known: dict[Candidate, Measured] = {}
        self._flops: dict[tuple[str, str, int], float] = {}
        self._slopes: dict[tuple[str, bool, int], float] = {}

    def rows(self, strategy: str, precision: str, world: int) -> Iterator[Row]:
        """The configurations of a strategy and a precision on these ranks."""
        offload = strategy in _OFFLOADS.values()
        strategy = next(
            (word for word, other in _OFFLOADS.items() if other == strategy), strategy
        )
        first = Candidate(
            strategy=strategy,
            precision=precision,
            world=world,
            micro_batch=1,
            offload=offload,
        )
        if self._peak(first) is None:
            reason = f"no rate of {precision} products is known for this device"
            yield Row(candidate=first, measured=None, estimate=None, reason=reason)
            return
        plain = self._row(first)
        yield plain
        if plain.measured is None or not plain.measured.ran:
            return
        whole = plain.estimate is not None and plain.candidate.accumulate == 1
        saving = plain
        if not whole and self._state(plain.measured) <= self.question.limit:
            saving = self._row(replace(first, activation_checkpointing=True))
            yield saving
        if (
            strategy in _OFFLOADS
            and not offload
            and plain.estimate is None
            and saving.estimate is None
        ):
            yield self._row(replace(first, activation_checkpointing=True, offload=True))

    def _row(self, first: Candidate) -> Row:
        try:
            found = self._largest(first, self._sizes(first))
            measured = (
                self._scaled(found) if found.peak <= self.question.limit else found
            )
        except Exception as error:  # of the user's module too, which may raise anything
            return Row(
                candidate=first,
                measured=None,
                estimate=None,
                reason=f"cannot be built: {_text(error)}",
            )
        candidate = measured.candidate
        if measured.peak > self.question.limit:
            return Row(
                candidate=candidate,
                measured=measured,
                estimate=None,
                reason=self._why_not(measured),
            )
        if not measured.ran:
            state, notes = (
                in_units(measured.peak),
                "; ".join(measured.notes).removeprefix(CALCULATED),
            )
            reason = f"weights, gradients and optimizer state need {state}; the rest is unknown: {notes}"
            return Row(
                candidate=candidate, measured=measured, estimate=None, reason=reason
            )
        if not candidate.activation_checkpointing:
            key = (candidate.strategy, candidate.precision, candidate.world)
            self._flops[key] = measured.flops / (
                candidate.micro_batch * candidate.accumulate
            )
        return Row(
            candidate=candidate,
            measured=measured,
            estimate=self._estimate(candidate, measured),
        )

    def _estimate(self, candidate: Candidate, measured: Measured) -> Estimate:
        peak = self._peak(candidate)
        assert peak is not None  # or `rows` has left it out
        per_sample = self._flops.get(
            (candidate.strategy, candidate.precision, candidate.world)
        )
        model = (
            None
            if per_sample is None
            else per_sample * candidate.micro_batch * candidate.accumulate
        )
        question = self.question
        return estimate_step(
            measured,
            question.device,
            question.assumptions,
            peak=peak,
            model_flops=model,
        )

    def _peak(self, candidate: Candidate) -> float | None:
        return self.question.device.flops(candidate.precision)

    def _sizes(self, candidate: Candidate) -> list[int]:
        """The micro-batches that divide a rank's batch, from small to large: single samples, and halves of halves."""
        inner = inner_ranks(candidate)
        whole = max(1, self.question.global_batch // max(1, candidate.world // inner))
        stages = inner if candidate.strategy.startswith("pp") else 1
        sizes, rest = {1, whole}, whole
        while rest % 2 == 0:
            rest //= 2
            sizes.add(rest)
        return sorted(size for size in sizes if size == 1 or whole // size >= stages)

    def _largest(self, first: Candidate, sizes: Sequence[int]) -> Measured:
        """Measure the largest micro-batch that fits, or the smallest; each sample adds the same memory."""
        limit, whole = self.question.limit, self._run(first, sizes[-1], sizes)
        if whole.peak <= limit or len(sizes) == 1 or not whole.ran:
            return whole
        guessed = self._guessed(first, sizes, whole)
        if guessed is not None:
            return guessed
        at, least = 0, self._run(first, sizes[0], sizes)
        while not least.ran:  # a batch norm refuses a single sample
            at += 1
            least = (
                whole if sizes[at] == sizes[-1] else self._run(first, sizes[at], sizes)
            )
        slope = (whole.peak - least.peak) / max(1, sizes[-1] - sizes[at])
        self._slopes.setdefault(_like(first), slope)
        if least.peak > limit:
            return least
        for size in reversed(sizes[at + 1 : -1]):
            if least.peak + slope * (size - sizes[at]) <= limit:
                found = self._run(first, size, sizes)
                if found.peak <= limit:
                    return found
        return least

    def _guessed(
        self, first: Candidate, sizes: Sequence[int], whole: Measured
    ) -> Measured | None:
        """The largest size that fits by what a sample needs under another strategy, if that is true of this one."""
        limit, slope = self.question.limit, self._slopes.get(_like(first))
        if slope is None:
            return None
        fitting = [
            size
            for size in sizes[1:-1]
            if whole.peak - slope * (sizes[-1] - size) <= limit
        ]
        if not fitting:
            return None
        found = self._run(first, fitting[-1], sizes)
        own = (whole.peak - found.peak) / (sizes[-1] - fitting[-1])
        larger = sizes[sizes.index(fitting[-1]) + 1]
        fits = found.ran and found.peak <= limit
        return (
            found
            if fits and found.peak + own * (larger - fitting[-1]) > limit
            else None
        )

    def _run(self, first: Candidate, size: int, sizes: Sequence[int]) -> Measured:
        """Measure a micro-batch, with at most two of its window."""
        window = sizes[-1] // size
        candidate = replace(
            first, micro_batch=size, accumulate=min(window, _MEASURED_WINDOW)
        )
        found = self._once(candidate)
        return replace(found, candidate=replace(candidate, accumulate=window))

    @staticmethod
    def _key(candidate: Candidate) -> Candidate:
        """Whole copies are the same in every world of more than one rank, and so is what they exchange."""
        return replace(candidate, world=2) if candidate.strategy == "ddp" else candidate

    def _once(self, candidate: Candidate) -> Measured:
        like = self._key(candidate)
        if like not in self._known:
            began = time.monotonic()
            self._known[like] = self._measure(candidate)
            peak, seconds = in_units(self._known[like].peak), time.monotonic() - began
            self._say(f"{describe(candidate)}: {peak} ({seconds:.1f} s)")
        return replace(self._known[like], candidate=candidate)

    def _scaled(self, measured: Measured) -> Measured:
        """Scale a window from two measured micro-batches: each further one adds as much as the second."""
        candidate = measured.candidate
        more = candidate.accumulate - _MEASURED_WINDOW
        if more <= 0:
            return measured
        one = self._one_of(measured)
        before = {(each.kind, each.axis): each for each in one.traffic}

        def longer(two: Traffic) -> Traffic:
            first = before.get((two.kind, two.axis))
            count, size = (0, 0) if first is None else (first.count, first.bytes)
            return replace(
                two,
                count=two.count + more * (two.count - count),
                bytes=two.bytes + more * (two.bytes - size),
            )

        flops = measured.flops + more * (measured.flops - one.flops)
        operators = measured.operators + more * (measured.operators - one.operators)
        return replace(
            measured,
            flops=flops,
            operators=operators,
            traffic=tuple(map(longer, measured.traffic)),
        )

    def _one_of(self, measured: Measured) -> Measured:
        """The step of a single micro-batch, of which two were run.

        It need not be run where the step of the whole batch, which was, shows that collectives do not depend on the
        size of a micro-batch, and products on nothing else.
        """
        candidate = measured.candidate
        size = candidate.micro_batch * candidate.accumulate
        whole = self._known.get(
            self._key(replace(candidate, micro_batch=size, accumulate=1))
        )
        if (
            whole is None
            or not whole.ran
            or whole.flops * 2 * candidate.micro_batch != measured.flops * size
        ):
            return self._once(replace(candidate, accumulate=1))
        sent = {(one.kind, one.axis): one for one in whole.traffic}
        alike = sent.keys() == {
            (one.kind, one.axis) for one in measured.traffic
        } and all(
            two.bytes * sent[two.kind, two.axis].count
            == sent[two.kind, two.axis].bytes * two.count
            for two in measured.traffic
        )
        if not alike:
            return self._once(replace(candidate, accumulate=1))
        return replace(
            whole, candidate=replace(candidate, accumulate=1), flops=measured.flops // 2
        )

    @staticmethod
    def _state(measured: Measured) -> int:
        """Of the rank with the most: what checkpointing cannot save."""
        return max(
            sum(role.get(each, 0) for each in _STATE) for role in measured.memory
        )

    def _why_not(self, measured: Measured) -> str:
        role = max(measured.memory, key=lambda one: sum(one.values()))
        name, size = max(role.items(), key=lambda item: item[1])
        state = self._state(measured)
        least = "" if measured.candidate.micro_batch > 1 else " with one sample"
        text = f"needs {in_units(measured.peak)}{least}"
        if state > self.question.limit:
            return f"{text}, of which weights, gradients and optimizer state are {in_units(state)}"
        return f"{text}, most of it {name}: {in_units(size)}"


def _like(candidate: Candidate) -> tuple[str, bool, int]:
    """Candidates of which one sample needs about the same memory."""
    return (
        candidate.precision,
        candidate.activation_checkpointing,
        inner_ranks(candidate),
    )


def _text(error: Exception) -> str:
    if isinstance(error, TrainerKitError):
        found, fix = (
            ("" if error.found is None else f" ({error.found})"),
            ("" if error.fix is None else f": {error.fix}"),
        )
        return f"{error.problem}{found}{fix}"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def describe(candidate: Candidate) -> str:
    """A configuration in a few words.

    Example:
        >>> describe(Candidate(strategy="fsdp", precision="bf16-mixed", world=8, micro_batch=4, offload=True))
        'fsdp, bf16-mixed, 8 ranks, micro-batch 4, offload'
    """
    words = [
        candidate.strategy,
        candidate.precision,
        f"{candidate.world} rank{'s' * (candidate.world > 1)}",
    ]
    words.append(f"micro-batch {candidate.micro_batch}")
    words += ["checkpointing"] * candidate.activation_checkpointing + [
        "offload"
    ] * candidate.offload
    return ", ".join(words)
