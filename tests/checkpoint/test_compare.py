"""What two checkpoints differ in."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from trainer_kit.checkpoint import diff, write_checkpoint
from trainer_kit.core.errors import CheckpointError

NAN = float("nan")


@pytest.fixture
def compare(tmp_path):
    def compare(a, b, *infos):
        names = [f"{len(list(tmp_path.iterdir()))}-{name}" for name in "ab"]
        pair = [
            write_checkpoint(tmp_path / name, state, info=info)
            for name, state, info in zip(
                names, (a, b), infos or (None, None), strict=True
            )
        ]
        return diff(*pair)

    return compare


def test_equal_states_do_not_differ(compare, make_state):
    assert compare(make_state(), make_state()) == []


def test_a_state_of_another_seed_differs_in_its_tensors(compare, make_state):
    found = compare(make_state(0), make_state(1))
    assert {(d.part, d.kind) for d in found} == {
        ("model", "value"),
        ("optimizers", "value"),
        ("rng", "value"),
    }
    assert "0.weight" in {d.key for d in found}
    assert "0.state.0.exp_avg" in {d.key for d in found}


@pytest.mark.parametrize(
    ("a", "b", "line"),
    [
        (torch.ones(2), torch.tensor([1.0, -3.0]), "p: w: values differ by up to 4 (float32 [2])"),
        (torch.ones(2), torch.ones(3), "p: w: shape [2] != [3]"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), "p: w: dtype float32 != float64"),
        (torch.tensor([NAN, 1.0]), torch.tensor([1.0, 1.0]), "p: w: values differ by up to nan (float32 [2])"),
        (torch.tensor([NAN, 1.0]), torch.tensor([NAN, 2.0]), "p: w: values differ by up to 1 (float32 [2])"),
        (torch.tensor(math.inf), torch.tensor(-math.inf), "p: w: values differ by up to inf (float32 [])"),
        (torch.tensor(-0.0), torch.tensor(0.0), "p: w: values differ by up to 0 (float32 [])"),
        (torch.tensor([True]), torch.tensor([False]), "p: w: values differ by up to 1 (bool [1])"),
        (torch.tensor([2j]), torch.tensor([0j]), "p: w: values differ by up to 2 (complex64 [1])"),
        (torch.ones(1).byte() * 200, torch.ones(1).byte(), "p: w: values differ by up to 199 (uint8 [1])"),
        (np.array([1, 2]), np.array([1, 4]), "p: w: values differ by up to 2 (int64 [2])"),
        (np.array(["a"]), np.array(["b"]), "p: w: value array(['a'], dtype='<U1') != array(['b'], dtype='<U1')"),
        (1, 1.0, "p: w: type 1 != 1.0"),
        ((1, 2), [1, 2], "p: w: type (1, 2) != [1, 2]"),
        ([1, 2], [1], "p: w.1: only in the first"),
        ({"a": {}}, {"b": 1}, "p: w.a: only in the first"),
        ({1: "x"}, {1: "y"}, "p: w.1: value 'x' != 'y'"),
        ({3, 4}, {4, 5}, "p: w: value [3, 4] != [4, 5]"),
        (0.1, 0.1, None),
        (0.1, 0.1 + 2e-17, "p: w: value 0.1 != 0.10000000000000002"),
        (NAN, NAN, None),
        ("x" * 100, "y", f"p: w: value '{'x' * 58}… != 'y'"),
    ],
)  # fmt: skip
def test_each_difference_is_one_line(compare, a, b, line):
    found = compare({"p": {"w": a}}, {"p": {"w": b}})
    assert [str(d) for d in found][:1] == ([] if line is None else [line])
    assert compare({"p": {"w": a}}, {"p": {"w": a}}) == []


def test_parts_and_info(compare):
    found = compare(
        {"a": {}, "b": {}}, {"b": {}, "c": {"k": 1}}, {"step": 3}, {"step": 4}
    )
    assert [str(d) for d in found] == [
        "info: step: value 3 != 4",
        "a: only in the first",
        "c: only in the second",
    ]


def test_a_damaged_one_is_not_compared(saved, tmp_path):
    other = write_checkpoint(tmp_path / "other", {})
    (saved / "model.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        diff(other, saved)
