"""The conformance suite: every strategy trains, evaluates and saves as one process does (`testing.check_strategy`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest

from tests.parity.plain import case
from trainer_kit import ParallelPlan, PipelinePlan
from trainer_kit.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    MeshStrategy,
)
from trainer_kit.testing.conformance import CHECKS, run_checks

pytestmark = pytest.mark.slow

PLAN = ParallelPlan(
    tensor={"*.blocks.*.up": "colwise", "*.blocks.*.down": "rowwise"},
    pipeline=PipelinePlan(model="net", last=["last"]),
)
SEVERAL = {
    "named_losses",
    "manual_optimization",
    "uneven_named_losses",
    "uneven_by_hand",
}
# Both take one loss a step and refuse the rest before the first one. DeepSpeed clips by norm.
PIPELINE = [name for name in CHECKS if name not in SEVERAL]
DEEPSPEED = [
    name for name in PIPELINE if name not in ("clipping_by_value", "checkpoints")
]
OTHERS = ("32-true", "bf16-mixed", "bf16-true", "16-true")
FEW = ["accumulation_and_clipping", "token_weights"]
"""In the other precisions; float16 with a scale is where overflows are tested: it skips by the size of a part."""


def mesh(**axes: int) -> MeshStrategy:
    return MeshStrategy(**{"dp_shard": 1, **axes}, plan=PLAN)


def check(
    cases: dict[str, tuple[Callable[[], Any], Iterable[str]]],
    precision: str = "64-true",
) -> None:
    for name, (strategy, only) in cases.items():
        with case(strategy=name, precision=precision):
            run_checks(strategy, only, precision)


def check_others(**strategies: Callable[[], Any]) -> None:
    for precision in OTHERS:
        check(
            {name: (strategy, FEW) for name, strategy in strategies.items()}, precision
        )


TWO_RANKS: dict[str, tuple[Callable[[], Any], Iterable[str]]] = {
    "ddp": (DDPStrategy, CHECKS),
    "fsdp": (FSDPStrategy, CHECKS),
    "tp": (partial(mesh, tp=2), CHECKS),
    "pp": (partial(mesh, pp=2), PIPELINE),
}


@pytest.mark.world_size(2, timeout=110)
@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks(name: str) -> None:
    strategy, checks = TWO_RANKS[name]
    run_checks(strategy, checks, "64-true")


@pytest.mark.long
@pytest.mark.world_size(2, timeout=110)
def test_other_precisions() -> None:
    check_others(ddp=DDPStrategy, fsdp=FSDPStrategy)


@pytest.mark.long
@pytest.mark.world_size(2, timeout=110)
def test_other_precisions_of_ranks_that_share_a_batch() -> None:
    check_others(tp=partial(mesh, tp=2), pp=partial(mesh, pp=2))


@pytest.mark.world_size(2, timeout=110)
@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed(stage: int) -> None:
    run_checks(partial(DeepSpeedStrategy, stage=stage), DEEPSPEED, "32-true")


@pytest.mark.long
@pytest.mark.world_size(2, timeout=110)
def test_other_stages_and_precisions_of_deepspeed() -> None:
    check(
        {
            f"stage {stage}": (partial(DeepSpeedStrategy, stage=stage), DEEPSPEED)
            for stage in (0, 2)
        },
        "32-true",
    )
    check(
        {
            f"stage {stage}": (partial(DeepSpeedStrategy, stage=stage), FEW)
            for stage in (1, 3)
        },
        "bf16-mixed",
    )


@pytest.mark.long
@pytest.mark.world_size(4, timeout=110)
def test_four_ranks() -> None:
    hybrid = partial(FSDPStrategy, sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2))
    few = ["named_losses", "manual_optimization", "evaluation", "checkpoints"]
    check(
        {
            "hybrid": (hybrid, CHECKS),
            "fsdp and tp": (partial(mesh, dp_shard=2, tp=2), few),
        }
    )
    check({"fsdp and tp": (partial(mesh, dp_shard=2, tp=2), FEW)}, "bf16-mixed")


@pytest.mark.long
@pytest.mark.world_size(8, timeout=110)
def test_eight_ranks() -> None:
    check(
        {
            "replicas, shards and tp": (
                partial(mesh, dp_replicate=2, dp_shard=2, tp=2),
                ["accumulation_and_clipping"],
            ),
            "3d": (
                partial(mesh, dp_shard=2, tp=2, pp=2),
                ["accumulation_and_clipping", "checkpoints"],
            ),
        }
    )
