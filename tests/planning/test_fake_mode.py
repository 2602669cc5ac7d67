"""The faster fake mode of plans has the results of torch's own."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)

from tests.planning.workloads import made
from trainer_kit.planning.fake_mode import FastFakeMode
from trainer_kit.planning.measure import measure
from trainer_kit.planning.memory_tracker import StepTracker
from trainer_kit.planning.records import Candidate

aten = torch.ops.aten
CALLS = {
    "add": lambda x: aten.add.Tensor(x, x, alpha=2),
    "add a whole number": lambda x: aten.add.Tensor(x.int(), 1),
    "add a bool": lambda x: aten.add.Tensor(x.int(), True),
    "add a float": lambda x: aten.add.Tensor(x.int(), 1.0),
    "in place": lambda x: aten.mul_.Tensor(x, 2),
    "a view": lambda x: aten.view.default(x, [8, 3]),
    "a view of a part": lambda x: aten.slice.Tensor(aten.t.default(x), 0, 1, 3),
    "a transposed copy": lambda x: aten.clone.default(
        aten.t.default(x), memory_format=torch.preserve_format
    ),
    "several results": lambda x: aten.native_layer_norm.default(
        x, [6], None, None, 1e-5
    ),
    "a result that is None": lambda x: aten.native_layer_norm_backward.default(
        x, x, [6], x.new_ones(4, 1), x.new_ones(4, 1), None, None, [True, False, False]
    ),
    "several views": lambda x: aten.split.Tensor(x, 2),
    "a list": lambda x: aten._foreach_sqrt.default([x, x]),
    "a list in place": lambda x: aten._foreach_add_.Scalar([x], 1.0),
    "where to write": lambda x: aten.add.out(x, x, out=aten.empty_like.default(x)),
    "a new tensor": lambda x: aten.zeros.default(
        [3], dtype=torch.int64, device=x.device
    ),
    "a number": lambda x: aten._local_scalar_dense.default(torch.tensor(2.5)),
    "an index": lambda x: aten.embedding.default(x, aten.argmax.default(x, 1)),
    "conjugated": lambda x: aten._conj.default(x.to(torch.complex64)),
}


def facts(value, source):
    """All that can be seen of a result, and whether it has the storage of ``source``."""
    if isinstance(value, (list, tuple)):
        return type(value), [facts(one, source) for one in value]
    if not isinstance(value, torch.Tensor):
        return value
    where = value.untyped_storage()
    return (
        *(
            type(value),
            value.shape,
            value.stride(),
            value.storage_offset(),
            value.dtype,
            value.device,
        ),
        *(
            value.requires_grad,
            value.is_conj(),
            where.nbytes(),
            where._cdata == source.untyped_storage()._cdata,
        ),
        *(
            value is source,
            {key: one for key, one in vars(value).items() if key != "fake_mode"},
        ),
    )


def observed(call, tracked):
    mode = (
        FastFakeMode()
        if tracked is not None
        else FakeTensorMode(allow_non_fake_inputs=True)
    )
    found = []
    with mode:
        for rows in (4, 4, 4, 8, 4):
            source = torch.empty(rows, 6).narrow(0, 0, 4)
            if tracked:
                with StepTracker(mode, lambda *_: None):
                    found.append(facts(call(source), source))
            else:
                found.append(facts(call(source), source))
    return found


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_repeated_results_are_those_of_torch(name, tracked):
    """The first calls compute a result, the later ones repeat it; another size of the storage is another call."""
    assert observed(CALLS[name], tracked) == observed(CALLS[name], None)


def test_a_repeated_result_is_not_computed(monkeypatch):
    """Otherwise the comparisons above would compare torch's mode with itself."""
    computed = []
    plain = FakeTensorMode.dispatch

    def dispatch(mode, func, *rest):
        computed.append(func)
        return plain(mode, func, *rest)

    monkeypatch.setattr(FakeTensorMode, "dispatch", dispatch)
    mode = FastFakeMode()
    with mode, StepTracker(mode, lambda *_: None):
        x, y = torch.empty(5, 7), torch.empty(7, 5)
        for _ in range(3):
            torch.mm(x, y).mul_(2).t()
        torch.mm(x.to(torch.float64), y.to(torch.float64))
    assert [
        computed.count(func)
        for func in (aten.mm.default, aten.mul_.Tensor, aten.t.default)
    ] == [2, 1, 1]


def test_real_tensors_stay_real_inside_a_tracker():
    """A mesh is made of numbers, also while a step is tracked."""
    mode = FastFakeMode()
    with mode, StepTracker(mode, lambda *_: None):
        for _ in range(3):
            assert type(torch.arange(4)) is FakeTensor
        with unset_fake_temporarily():
            real = torch.arange(4)
    assert type(real) is torch.Tensor
    assert real.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", ["gpt", "resnet", "recommender"])
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_step_measures_as_under_the_mode_of_torch(
    name, precision, recomputes, monkeypatch
):
    tried = Candidate(
        strategy="fsdp",
        world=4,
        micro_batch=2,
        precision=precision,
        activation_checkpointing=recomputes,
    )
    # The second one finds what the first one has computed.
    found = [measure(*made(name, 2), tried, accelerator="cpu") for _ in range(2)]
    monkeypatch.setattr(FastFakeMode, "_key", lambda *_: None)
    expected = measure(*made(name, 2), tried, accelerator="cpu")
    assert expected.exact
    assert found == [expected] * 2
