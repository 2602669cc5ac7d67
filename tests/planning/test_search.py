"""The search, over a memory that is known: which configurations it measures, and in which order it puts them."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from torch import nn

import trainer_kit as tk
from trainer_kit.core.device_table import find_device
from trainer_kit.core.errors import StrategyError
from trainer_kit.planning.estimate import Assumptions
from trainer_kit.planning.plan import Plan
from trainer_kit.planning.records import CATEGORIES, Measured, Traffic
from trainer_kit.planning.search import Question, search

GB = 10**9


class Divisible(tk.TrainModule):
    def configure_parallel(self, mesh):
        raise NotImplementedError


class Memory:
    """A stand-in for measured steps: 40 GB of state, and activations of 4 GB a sample, 1 GB with checkpointing."""

    def __init__(self, state=40 * GB, sample=4 * GB):
        self.state, self.sample = state, sample
        self.measured = []

    def __call__(self, candidate):
        self.measured.append(candidate)
        if candidate.strategy.startswith("pp"):
            raise StrategyError("no blocks", found="Linear")
        saved = 4 if candidate.activation_checkpointing else 1
        parts = 1 if candidate.strategy in ("ddp", "single_device") else candidate.world
        state = self.state // parts
        memory = dict.fromkeys(CATEGORIES, 0)
        memory["optimizer"] = 0 if candidate.offload else state
        memory["activations"] = self.sample * candidate.micro_batch // saved
        gathers = 2 * candidate.accumulate if candidate.strategy == "fsdp" else 0
        return Measured(
            candidate=candidate,
            memory=(memory,),
            host=state if candidate.offload else 0,
            traffic=(
                Traffic(kind="all_reduce", axis="data", count=1, bytes=GB),
                Traffic(
                    kind="all_gather", axis="data", count=gathers, bytes=gathers * GB
                ),
            ),
            flops=10**13
            * candidate.micro_batch
            * candidate.accumulate
            * (4 if candidate.activation_checkpointing else 3),
            exact=True,
            notes=(),
        )


def question(**given):
    values = {
        "device": find_device("h200"),
        "worlds": (8,),
        "global_batch": 64,
        "limit": 50 * GB,
        "precisions": ("bf16-mixed",),
        "assumptions": Assumptions(),
    }
    return Question(**{**values, **given})


def found(module=None, memory=None, **given):
    memory = memory or Memory()
    return search(question(**given), module or nn.Linear(1, 1), memory), memory


def words(row):
    candidate = row.candidate
    return (
        candidate.strategy,
        candidate.micro_batch,
        candidate.accumulate,
        candidate.activation_checkpointing,
    )


def test_the_largest_micro_batch_that_fits_is_found_and_the_global_batch_stays():
    rows, _ = found()
    assert [words(row) for row in rows] == [
        ("fsdp", 8, 1, False),  # 5 + 32 GB
        ("ddp", 2, 4, False),  # 40 + 8 GB
        ("ddp", 8, 1, True),  # 40 + 8 GB, and a third more products
    ]
    for row in rows:
        candidate = row.candidate
        assert candidate.micro_batch * candidate.accumulate * 8 == 64
        assert row.measured.peak <= 50 * GB
    speeds = [row.estimate.samples_per_second for row in rows]
    assert speeds == sorted(speeds, reverse=True)


def test_what_fits_whole_is_measured_once_and_needs_no_checkpointing():
    rows, memory = found(limit=120 * GB)
    assert [words(row) for row in rows] == [
        ("fsdp", 8, 1, False),
        ("ddp", 8, 1, False),
    ], "fsdp updates an eighth"
    assert len(memory.measured) == 2
    assert not any(candidate.activation_checkpointing for candidate in memory.measured)


def test_a_long_window_is_measured_in_two_parts_and_counted_whole():
    rows, memory = found(global_batch=8 * 64, strategies=("fsdp",), limit=14 * GB)
    row = next(row for row in rows if not row.candidate.activation_checkpointing)
    assert (row.candidate.micro_batch, row.candidate.accumulate) == (2, 32)
    assert max(candidate.accumulate for candidate in memory.measured) == 2
    assert row.measured.flops == 3 * 10**13 * 64
    by_kind = {one.kind: (one.count, one.bytes) for one in row.measured.traffic}
    assert by_kind == {"all_reduce": (1, GB), "all_gather": (64, 64 * GB)}


def test_offload_is_tried_where_nothing_else_fits():
    rows, _ = found(strategies=("fsdp",), limit=4 * GB)
    assert [(row.candidate.offload, row.estimate is not None) for row in rows] == [
        (True, True),
        (False, False),
    ]
    assert rows[0].measured.host == 5 * GB
    assert all("needs" in row.reason for row in rows[1:])


def test_reasons_name_what_takes_the_memory():
    rows, _ = found(strategies=("ddp",), limit=30 * GB)
    assert {row.reason for row in rows} == {
        "needs 44 GB with one sample, of which weights, gradients and optimizer state are 40 GB"
    }, "checkpointing saves no state"
    rows, _ = found(
        strategies=("ddp",),
        limit=30 * GB,
        memory=Memory(state=10 * GB, sample=200 * GB),
    )
    assert {row.reason for row in rows} == {
        "needs 210 GB with one sample, most of it activations: 200 GB",
        "needs 60 GB with one sample, most of it activations: 50 GB",
    }


def test_what_cannot_be_measured_is_not_ranked():
    whole = Memory()

    def calculated(candidate):
        return replace(
            whole(candidate),
            exact=False,
            ran=False,
            flops=0,
            traffic=(),
            notes=("the step reads values",),
        )

    rows = search(question(strategies=("fsdp", "ddp")), nn.Linear(1, 1), calculated)
    assert all(row.estimate is None for row in rows)
    reason = "weights, gradients and optimizer state need 37 GB; the rest is unknown: the step reads values"
    assert [row.reason for row in rows][:1] == [reason]
    assert len(rows) == 2, "neither checkpointing nor offload makes it known"


def test_strategies_follow_from_the_world_and_the_module():
    rows, _ = found(worlds=(1, 8), limit=500 * GB)
    assert [row.candidate.strategy for row in rows if row.candidate.world == 1] == [
        "single_device"
    ]
    rows, _ = found(Divisible(), limit=500 * GB)
    assert {row.candidate.strategy for row in rows} == {
        "ddp",
        "fsdp",
        "tp2",
        "tp4",
        "tp8",
        "pp2",
        "pp4",
        "pp8",
    }
    refused = {row.reason for row in rows if row.candidate.strategy == "pp2"}
    assert refused == {"cannot be built: no blocks (Linear)"}
    assert [row.estimate is None for row in rows] == sorted(
        row.estimate is None for row in rows
    )


def test_whole_copies_are_measured_once_for_all_worlds():
    rows, memory = found(
        worlds=(8, 64), strategies=("ddp",), limit=100 * GB, global_batch=64
    )
    assert [(row.candidate.world, row.candidate.micro_batch) for row in rows] == [
        (8, 8),
        (64, 1),
    ]
    rows, memory = found(worlds=(8, 16), strategies=("ddp",), global_batch=128)
    assert [
        words(row)[1:] for row in rows if not row.candidate.activation_checkpointing
    ] == [
        (2, 8, False),
        (2, 4, False),
    ]
    plain = [
        (each.micro_batch, each.accumulate)
        for each in memory.measured
        if not each.activation_checkpointing
    ]
    assert sorted(plain) == [(1, 2), (2, 2), (8, 1), (16, 1)]


def test_a_sample_of_another_strategy_predicts_the_size():
    """The smallest micro-batch of FSDP need not be measured: DDP's samples have shown what one needs."""
    rows, memory = found(strategies=("ddp", "fsdp"), global_batch=512, limit=60 * GB)
    sizes = {
        word: [each.micro_batch for each in memory.measured if each.strategy == word]
        for word in ("ddp", "fsdp")
    }
    plain = {
        word: measured[: 3 if word == "ddp" else 2] for word, measured in sizes.items()
    }
    assert plain == {"ddp": [64, 1, 4], "fsdp": [64, 8]}
    assert {
        words(row)[:2] for row in rows if not row.candidate.activation_checkpointing
    } == {
        ("ddp", 4),
        ("fsdp", 8),
    }


@pytest.mark.parametrize("wrong", [0.25, 3])
def test_a_wrong_prediction_changes_no_row(wrong):
    """Samples that need more or less than under the other strategy: the largest size that fits is still found."""
    plain, other = Memory(), Memory(sample=int(4 * GB * wrong))

    def measure(candidate):
        return (other if candidate.strategy == "fsdp" else plain)(candidate)

    rows = search(
        question(strategies=("ddp", "fsdp"), global_batch=512), nn.Linear(1, 1), measure
    )
    alone = search(
        question(strategies=("fsdp",), global_batch=512), nn.Linear(1, 1), measure
    )
    assert [row for row in rows if row.candidate.strategy == "fsdp"] == alone
    assert alone[0].estimate is not None


def test_products_of_an_optimizer_and_collectives_of_activations_are_measured_with_one_micro_batch():
    """Such a step does not grow in proportion to its samples, so the whole batch says nothing about it."""
    memory = Memory()

    def with_an_optimizer(candidate):
        plain = memory(candidate)
        return replace(plain, flops=plain.flops + 7 * 10**12)

    def with_activations(candidate):
        plain = memory(candidate)
        size = candidate.micro_batch * candidate.accumulate
        return replace(
            plain,
            traffic=(
                Traffic(kind="all_gather", axis="data", count=2, bytes=GB + size),
            ),
        )

    for measure, flops, sent in (
        (
            with_an_optimizer,
            3 * 10**13 * 64 + 7 * 10**12,
            {"all_reduce": GB, "all_gather": 64 * GB},
        ),
        (with_activations, 3 * 10**13 * 64, {"all_gather": GB + 64}),
    ):
        del memory.measured[:]
        asked = question(strategies=("fsdp",), global_batch=512, limit=14 * GB)
        rows = search(asked, nn.Linear(1, 1), measure)
        row = next(row for row in rows if not row.candidate.activation_checkpointing)
        assert words(row) == ("fsdp", 2, 32, False)
        assert (2, 1) in [
            (each.micro_batch, each.accumulate) for each in memory.measured
        ]
        assert row.measured.flops == flops
        assert {one.kind: one.bytes for one in row.measured.traffic} == sent


def test_a_precision_without_products_is_left_out_with_a_reason():
    rows, memory = found(
        device=find_device("t4"), precisions=("bf16-mixed",), strategies=("ddp",)
    )
    assert [(row.measured, row.reason) for row in rows] == [
        (None, "the peak rate of bf16-mixed matmuls is unknown for this device")
    ]
    assert not memory.measured


def test_a_strategy_that_offloads_by_its_name_is_measured_with_its_state_in_host_memory():
    """It was measured like the strategy without offload."""
    rows, memory = found(strategies=("fsdp_cpu_offload",))
    assert [(each.strategy, each.offload) for each in memory.measured] == [
        ("fsdp", True)
    ]
    assert rows[0].measured.host == 5 * GB


def test_a_module_that_refuses_a_single_sample():
    """As a batch norm does: of one sample only the state is calculated, and it was taken for the smallest size."""
    memory = Memory()

    def measure(candidate):
        one = candidate.micro_batch == 1
        return replace(
            memory(candidate),
            exact=not one,
            ran=not one,
            notes=("it is one sample",) * one,
        )

    one = {"worlds": (1,), "strategies": ("ddp",)}
    first = search(question(limit=50 * GB, **one), nn.Linear(1, 1), measure)[0]
    assert (first.candidate.micro_batch, first.candidate.accumulate) == (2, 32)
    assert first.estimate is not None
    rows = search(question(limit=45 * GB, **one), nn.Linear(1, 1), measure)
    assert (
        next(row.reason for row in rows if row.estimate is None)
        == "needs 48 GB, most of it optimizer: 40 GB"
    )


def test_more_tensor_parallel_ranks_than_ranks_are_answered_by_the_strategy():
    def measure(candidate):
        raise StrategyError("sizes do not divide the ranks")

    rows = search(question(worlds=(4,), strategies=("tp8",)), Divisible(), measure)
    assert [row.reason for row in rows] == [
        "cannot be built: sizes do not divide the ranks"
    ]


def test_more_ranks_than_samples_take_one_sample_each():
    rows, _ = found(worlds=(512,), strategies=("fsdp",))
    assert words(rows[0]) == ("fsdp", 1, 1, False)


@pytest.fixture
def plan():
    rows, _ = found(
        Divisible(),
        worlds=(1, 8, 64),
        precisions=("32-true", "bf16-mixed"),
        limit=50 * GB,
    )
    return Plan(
        question=question(worlds=(1, 8, 64)),
        rows=rows,
        device="H200",
        script="train.py --lr <0.1>",
        notes=[
            "a note about what was assumed that is so long that it does not fit into one line of the table at all"
        ],
        seconds=1.5,
    )


def test_a_plan_is_a_table_of_at_most_100_columns(plan):
    text = str(plan)
    assert max(map(len, text.splitlines())) <= 100
    assert re.search(
        r"8 ranks\n +strategy +precision +batch +ckpt +offload +memory +step +MFU +samples/s\n +1\. ",
        text,
    )
    assert '  Trainer(strategy="' in text
    assert "python train.py --lr <0.1>" in text
    assert (
        "--num_machines 8 --num_processes 64 \\\n      --machine_rank RANK --main_process_ip HOST train.py"
        in text
    )
    assert (
        "pp2, 32-true and bf16-mixed: cannot be built: no blocks (Linear)"
        in text.replace("\n     ", " ")
    )
    assert "fragmentation" in text
    assert repr(plan) == text


def test_the_lines_of_a_row_can_be_executed(plan):
    from trainer_kit.strategies import MeshStrategy

    for row in plan.rows:
        if row.estimate is not None:
            line = plan.trainer_line(row)
            taken = eval(
                line, {"Trainer": lambda **given: given, "MeshStrategy": MeshStrategy}
            )
            candidate = row.candidate
            assert taken["devices"] * taken.get("num_nodes", 1) == candidate.world
            assert taken["precision"] == candidate.precision
            ranks = (
                8
                if candidate.strategy == "tp8"
                else 4
                if candidate.strategy == "tp4"
                else 2
            )
            ranks = ranks if candidate.strategy.startswith("tp") else 1
            batch = (
                candidate.micro_batch * candidate.accumulate * candidate.world // ranks
            )
            assert taken["global_batch_size"] == batch
            assert taken.get("accumulate_grad_batches", 1) == candidate.accumulate
    assert plan.best(64).candidate.world == 64
    assert plan.best().candidate.world == 1


def test_json_and_page_hold_the_same(plan, tmp_path):
    made = json.loads(plan.to_json())
    assert len(made["rows"]) == len(plan.rows)
    first = made["rows"][0]
    assert first["fits"] is True
    assert first["peak"] == sum(first["memory"][0].values())
    assert first["trainer"] == plan.trainer_line(plan.rows[0])
    page = plan.to_html(tmp_path / "plan.html")
    assert (tmp_path / "plan.html").read_text(encoding="utf-8") == page
    assert "train.py --lr &lt;0.1&gt;" in page
    assert page.count('class="bar"') == sum(
        row.measured is not None for row in plan.rows
    )
    assert "<script" not in page
    assert "prefers-color-scheme: dark" in page


def test_precisions_that_are_searched_in_processes_of_their_own_give_the_same_rows():
    asked = question(worlds=(8, 16), precisions=("bf16-mixed", "32-true", "16-mixed"))
    rows = [
        search(asked, nn.Linear(1, 1), Memory(), several=several)
        for several in (False, True)
    ]
    assert rows[0] == rows[1]
    assert {row.candidate.precision for row in rows[0]} == set(asked.precisions)
