"""Estimate the time of a step, MFU and cost from what a step needs and what a data sheet promises."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, final

from trainer_kit.core.arguments import check_fields
from trainer_kit.core.device_table import Device
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.planning.records import Candidate, Measured, Traffic

__all__ = ["Assumptions", "Estimate", "estimate_step", "inner_ranks", "step_samples"]

_INNER: Final = re.compile(r"(?:tp|pp|cp)(\d+)")
_HYBRID: Final = re.compile(r"hsdp(\d+)")
_HIDDEN: Final = ("data", "world")
"""Axes whose collectives overlap with computation; others wait for what they exchange."""
_PASSES: Final = {
    "all_reduce": 2.0,
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
    "all_to_all": 1.0,
}
"""How often the bytes of a collective cross a link of a ring, times (n - 1) / n; of others: once."""


@final
@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What an estimate assumes beyond the data sheet.

    Attributes:
        efficiency: the share of the device's peak that the model's matmuls reach.
        bandwidth: the share of memory, link and network bandwidths that is reached.
        latency: seconds that each collective takes beside its bytes.
        launch: seconds from the launch of one operator to that of the next, in Python and the driver. A step takes no
            less than this for all its operators, which decides the speed of small models.
        price: of a device for an hour, in any currency; None: no cost.
        tokens: tokens of a sample; None: cost and speed are per sample.
    """

    efficiency: float = 0.5
    bandwidth: float = 0.8
    latency: float = 2e-5
    launch: float = 5e-6
    price: float | None = None
    tokens: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not (0 < self.efficiency <= 1 and 0 < self.bandwidth <= 1):
            raise ConfigurationError(
                "efficiency and bandwidth must be fractions of a peak",
                found=f"efficiency={self.efficiency}, bandwidth={self.bandwidth}",
                fix="pass numbers above 0 and at most 1",
            )
        price = self.price or 0.0
        # A comparison with NaN is false: it is refused too.
        if not (self.latency >= 0 and self.launch >= 0 and price >= 0):
            raise ConfigurationError(
                "latency, launch and price must not be negative",
                found=f"latency={self.latency}, launch={self.launch}, price={self.price}",
            )


@final
@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimated time of one optimizer step, and what follows from it.

    Attributes:
        seconds: of a step: the largest of ``compute``, ``hidden`` and ``launching``, plus all other parts.
        compute: of matmuls, with the bubble of a pipeline.
        launching: of launching every operator.
        hidden: of collectives that overlap with computation.
        exposed: of collectives that computation waits for.
        update: of the optimizer, which reads and writes its tensors once; with offload, their transfer.
        samples_per_second: of all ranks.
        tokens_per_second: likewise; None where tokens are not counted.
        mfu: the model's FLOPs, without those of recomputed activations, in ``seconds`` at the device's peak.
        cost: of a million tokens, or of a million samples where tokens are not counted; None without a price.
    """

    seconds: float
    compute: float
    launching: float
    hidden: float
    exposed: float
    update: float
    samples_per_second: float
    tokens_per_second: float | None
    mfu: float
    cost: float | None


def inner_ranks(candidate: Candidate) -> int:
    """The number of ranks that work on the same samples.

    Example:
        >>> inner_ranks(Candidate(strategy="tp2", precision="32-true", world=8, micro_batch=1))
        2
    """
    match = _INNER.fullmatch(candidate.strategy)
    if match is None:
        return 1
    return int(match[1])


def step_samples(candidate: Candidate) -> int:
    """The samples of a step of all ranks.

    Example:
        >>> step_samples(Candidate(strategy="tp2", precision="32-true", world=8, micro_batch=3, accumulate=2))
        24
    """
    return candidate.micro_batch * candidate.accumulate * _data_ranks(candidate)


def estimate_step(
    measured: Measured,
    device: Device,
    assumptions: Assumptions,
    *,
    peak: float,
    model_flops: float | None = None,
) -> Estimate:
    """Estimate one optimizer step.

    Args:
        measured: what the step needs.
        device: the row of the data sheet.
        assumptions: the assumed shares, and the price.
        peak: FLOP/s of the device in the candidate's precision.
        model_flops: FLOPs of a rank without recomputed activations; None: those of ``measured``.

    Example:
        >>> from trainer_kit.core.device_table import find_device
        >>> candidate = Candidate(strategy="single_device", precision="bf16-mixed", world=1, micro_batch=8)
        >>> needs = Measured(candidate=candidate, memory=({"parameters": 4},), host=0, traffic=(), flops=10**15,
        ...                  exact=True, notes=())
        >>> estimate = estimate_step(needs, find_device("h200"), Assumptions(), peak=1e15)
        >>> round(estimate.seconds, 3), round(estimate.mfu, 2), round(estimate.samples_per_second, 1), estimate.cost
        (2.0, 0.5, 4.0, None)
    """
    candidate = measured.candidate
    compute = measured.flops / (peak * assumptions.efficiency) * _bubble(candidate)
    launching = measured.operators * assumptions.launch
    hidden = 0.0
    exposed = 0.0
    for traffic in measured.traffic:
        transfer = _transfer_seconds(traffic, candidate, device)
        latency = traffic.count * assumptions.latency
        seconds = transfer / assumptions.bandwidth + latency
        if traffic.axis in _HIDDEN:
            hidden += seconds
        else:
            exposed += seconds
    update = _update_seconds(measured, device) / assumptions.bandwidth
    # Work that overlaps takes as long as the longest of it; the rest comes after.
    seconds = max(compute, hidden, launching) + exposed + update
    if model_flops is None:
        model_flops = measured.flops
    samples_per_second = 0.0
    mfu = 0.0
    # A step without a matmul, for example of a module that only returns its input, has no time to divide by.
    if seconds:
        samples_per_second = step_samples(candidate) / seconds
        mfu = model_flops / (seconds * peak)
    tokens_per_second = None
    rate = samples_per_second
    if assumptions.tokens is not None:
        rate = tokens_per_second = samples_per_second * assumptions.tokens
    cost = None
    if assumptions.price is not None and rate:
        cost = assumptions.price * candidate.world / 3600 / rate * 1e6
    return Estimate(
        seconds=seconds,
        compute=compute,
        launching=launching,
        hidden=hidden,
        exposed=exposed,
        update=update,
        samples_per_second=samples_per_second,
        tokens_per_second=tokens_per_second,
        mfu=mfu,
        cost=cost,
    )


def _data_ranks(candidate: Candidate) -> int:
    return candidate.world // inner_ranks(candidate)


def _bubble(candidate: Candidate) -> float:
    """How much longer a pipeline computes: its first and last micro-batches leave stages idle."""
    if not candidate.strategy.startswith("pp"):
        return 1.0
    stages = inner_ranks(candidate)
    return (candidate.accumulate + stages - 1) / candidate.accumulate


def _transfer_seconds(traffic: Traffic, candidate: Candidate, device: Device) -> float:
    """The time of the bytes in a ring over the slowest link between the ranks of the axis."""
    ranks, span = _ring(traffic, candidate)
    # The slowest link decides: one pair of neighbors on different machines is enough.
    bandwidth = device.network
    if span <= device.group:
        bandwidth = device.link
    crossed: float = traffic.bytes
    if traffic.kind in _PASSES:
        crossed = traffic.bytes * _PASSES[traffic.kind] * (ranks - 1) / max(1, ranks)
    return crossed / (bandwidth * 1e9)


def _ring(traffic: Traffic, candidate: Candidate) -> tuple[int, int]:
    """The number of ranks that exchange, and the number of neighboring ranks among which they lie."""
    inner = inner_ranks(candidate)
    if traffic.axis in _HIDDEN:
        ranks = candidate.world // inner
        span = candidate.world
    else:
        # At least two: an axis with traffic has them, also where the word does not show its size.
        ranks = max(inner, 2)
        span = inner
    hybrid = _HYBRID.fullmatch(candidate.strategy)
    if hybrid is None:
        return ranks, span
    shards = int(hybrid[1])
    # Gradients of the shards are reduced between machines; all else stays inside one.
    if traffic.kind == "all_reduce":
        return candidate.world // shards, span
    return shards, shards


def _update_seconds(measured: Measured, device: Device) -> float:
    """Reads parameters, gradients and optimizer state, and writes all but the gradients."""
    # The first stage is taken for all: they hold about equal parts.
    memory = measured.memory[0]
    written = memory.get("parameters", 0) + memory.get("optimizer", 0)
    read = written + memory.get("gradients", 0)
    seconds = (read + written) / (device.bandwidth * 1e9)
    # Twice: gradients travel to the host, and weights back.
    return seconds + 2 * measured.host / (device.host * 1e9)
