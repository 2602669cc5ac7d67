"""Estimates follow the data sheet: more work, slower links or smaller shares never make a step faster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainer_kit.core.device_table import find_device
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.planning.estimate import Assumptions, estimate_step
from trainer_kit.planning.records import Candidate, Measured, Traffic

H200 = find_device("h200")
PEAK = H200.flops("bf16-mixed")
RIGHT = Assumptions(efficiency=1.0, bandwidth=1.0, latency=0.0)


def needs(
    strategy="fsdp",
    world=8,
    micro_batch=4,
    accumulate=2,
    flops=10**15,
    traffic=(),
    memory=None,
    host=0,
):
    return Measured(
        candidate=Candidate(
            strategy=strategy,
            precision="bf16-mixed",
            world=world,
            micro_batch=micro_batch,
            accumulate=accumulate,
        ),
        memory=(memory or {"parameters": 0},),
        host=host,
        traffic=traffic,
        flops=flops,
        exact=True,
        notes=(),
    )


def seconds(assumptions=RIGHT, device=H200, **given):
    return estimate_step(needs(**given), device, assumptions, peak=PEAK).seconds


def traffic(kind, size, axis="data", count=1):
    return (Traffic(kind=kind, axis=axis, count=count, bytes=size),)


def test_each_part_is_what_the_data_sheet_promises():
    assert seconds() == pytest.approx(1e15 / 989e12)
    assert seconds(
        flops=0, traffic=traffic("all_gather", 450 * 10**9)
    ) == pytest.approx(7 / 8)
    assert seconds(
        flops=0, traffic=traffic("reduce_scatter", 450 * 10**9)
    ) == pytest.approx(7 / 8)
    assert seconds(
        flops=0, traffic=traffic("all_reduce", 450 * 10**9)
    ) == pytest.approx(14 / 8)
    assert seconds(
        flops=0, traffic=traffic("send", 450 * 10**9, axis="pipeline")
    ) == pytest.approx(1)
    assert seconds(
        flops=0, traffic=traffic("all_reduce", 50 * 10**9), world=16
    ) == pytest.approx(30 / 16), "a network"
    state = {
        "parameters": 480 * 10**9,
        "gradients": 480 * 10**9,
        "optimizer": 960 * 10**9,
    }
    assert seconds(flops=0, memory=state) == pytest.approx(0.1 * (1 + 1 + 2 + 1 + 2))
    assert seconds(flops=0, host=64 * 10**9) == pytest.approx(2), "to the host and back"


def test_hybrid_sharding_gathers_inside_a_machine_and_reduces_between_machines():
    given = {"flops": 0, "strategy": "hsdp8", "world": 32}
    assert seconds(
        traffic=traffic("all_gather", 450 * 10**9), **given
    ) == pytest.approx(7 / 8)
    assert seconds(traffic=traffic("all_reduce", 50 * 10**9), **given) == pytest.approx(
        6 / 4
    )


def test_data_collectives_hide_behind_products_and_others_do_not():
    size = 45 * 10**9
    assert seconds(traffic=traffic("all_gather", size)) == seconds()
    assert seconds(
        traffic=traffic("all_reduce", size, axis="tensor"), strategy="tp2"
    ) == pytest.approx(1e15 / PEAK + 0.1)
    assert seconds(flops=10, traffic=traffic("all_gather", size)) == pytest.approx(
        0.1 * 7 / 8
    )


def test_a_pipeline_has_a_bubble_that_more_micro_batches_shrink():
    short, long = (seconds(strategy="pp4", accumulate=window) for window in (4, 32))
    assert short == pytest.approx(seconds() * 7 / 4)
    assert long == pytest.approx(seconds() * 35 / 32)


def test_more_work_and_smaller_shares_are_never_faster():
    all_of_it = {
        "traffic": (
            *traffic("all_reduce", 10**10, axis="tensor"),
            *traffic("all_gather", 10**12),
        ),
        "memory": {"parameters": 10**10, "gradients": 10**10, "optimizer": 2 * 10**10},
        "strategy": "tp2",
    }
    before = 0.0
    for flops in (0, 10**14, 10**15, 10**16):
        now = seconds(Assumptions(), flops=flops, **all_of_it)
        assert now >= before
        before = now
    for field in ("efficiency", "bandwidth"):
        times = [
            seconds(replace(Assumptions(), **{field: share}), **all_of_it)
            for share in (1.0, 0.7, 0.4, 0.1)
        ]
        assert times == sorted(times)
    slow = replace(H200, link=100.0, bandwidth=1000.0, network=10.0)
    assert seconds(Assumptions(), device=slow, **all_of_it) > seconds(
        Assumptions(), **all_of_it
    )
    assert seconds(replace(Assumptions(), latency=1e-3), **all_of_it) > seconds(
        Assumptions(), **all_of_it
    )


def test_speed_mfu_and_cost():
    found = estimate_step(
        needs(),
        H200,
        replace(RIGHT, price=2.0, tokens=100),
        peak=PEAK,
        model_flops=0.75e15,
    )
    assert found.mfu == pytest.approx(0.75), "recomputed activations are no useful work"
    assert found.samples_per_second == pytest.approx(8 * 4 * 2 / found.seconds)
    assert found.tokens_per_second == pytest.approx(100 * found.samples_per_second)
    assert found.cost == pytest.approx(2.0 * 8 / 3600 / found.tokens_per_second * 1e6)
    by_sample = estimate_step(
        needs(strategy="tp4"), H200, replace(RIGHT, price=2.0), peak=PEAK
    )
    assert by_sample.samples_per_second == pytest.approx(
        2 * 4 * 2 / by_sample.seconds
    ), "4 ranks share their samples"
    assert by_sample.cost == pytest.approx(
        2.0 * 8 / 3600 / by_sample.samples_per_second * 1e6
    )
    assert estimate_step(needs(), H200, RIGHT, peak=PEAK).cost is None


@pytest.mark.parametrize(
    "wrong",
    [{"efficiency": 0.0}, {"bandwidth": 1.5}, {"price": -1.0}, {"latency": -1.0}],
)
def test_impossible_assumptions_are_refused(wrong):
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        Assumptions(**wrong)
