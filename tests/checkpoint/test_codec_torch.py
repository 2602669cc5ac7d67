"""Tensors, arrays, and the states of torch's own optimizers, schedulers and generators go through the codec."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from torch import nn

from trainer_kit.checkpoint.encoding import decode, encode
from trainer_kit.checkpoint.files import TENSOR_DTYPES

ALL_DTYPES = [
    *TENSOR_DTYPES,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 5)], ids=str)
def test_tensors_of_every_dtype_and_shape(dtype, shape, tmp_path, same, through):
    size = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(
        0, 2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8
    )
    tensor = raw.view(dtype).reshape(shape)
    assert same(through({"x": tensor}, tmp_path), {"x": tensor})


@pytest.mark.parametrize(
    "dtype",
    [
        "?",
        "i1",
        "u2",
        "<i8",
        ">i4",
        ">f8",
        "f2",
        "f4",
        "g",
        "c8",
        "c16",
        ">c8",
        "U3",
        "S2",
        "M8[s]",
        "m8[ns]",
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)], ids=str)
def test_arrays_of_every_dtype_and_shape(dtype, shape, tmp_path, same, through):
    array = np.ones(shape, "i8").astype(dtype)
    back = through({"x": array}, tmp_path)
    assert same(back, {"x": array})
    assert back["x"].flags.writeable


def test_awkward_layouts(tmp_path, same, through):
    base = torch.arange(24.0).reshape(4, 6)
    tied = torch.randn(3, requires_grad=True)
    fortran = np.asfortranarray(np.arange(6).reshape(2, 3))
    locked = np.arange(5)
    locked.flags.writeable = False
    state = {
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "row": base[1],
        "single": base[1:2, ::6],
        "single_complex": torch.ones(4, dtype=torch.complex128)[::4],
        "expanded": torch.ones(1).expand(3, 4),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "fortran": fortran,
        "backwards": np.arange(5)[::-1],
        "locked": locked,
    }
    assert same(through(state, tmp_path), state)
    assert same(through(state), state)
    state = {
        "a": tied,
        "b": tied,
        "p": nn.Parameter(torch.ones(2)),
        "alias": base[0],
        "whole": base,
    }
    back = through(state, tmp_path)
    assert type(back["p"]) is torch.Tensor
    assert not any(tensor.requires_grad for tensor in back.values())
    assert all(torch.equal(back[name], state[name]) for name in state)
    back["whole"].zero_()
    assert torch.equal(back["alias"], base[0])


def test_copies_do_not_follow_the_live_tensors():
    tensor, array, tensors = torch.zeros(3), np.zeros(3), {}
    tree = encode({"t": tensor, "a": array}, tensors)
    tensor.fill_(1)
    array.fill(1)
    back = decode(tree, tensors)
    assert back["t"].tolist() == back["a"].tolist() == [0, 0, 0]
    tensors = {}
    encode({"t": tensor}, tensors, copy=False)
    assert tensors["t"].data_ptr() == tensor.data_ptr()


def test_names_come_from_key_paths_and_never_collide(same):
    tensors = {}
    state = {
        "a.b": torch.tensor(1),
        "a": {"b": torch.tensor(2)},
        "__metadata__": torch.tensor(3),
        "a.b#2": torch.tensor(4),
        "\ud800": torch.tensor(5),
        "list": [torch.tensor(6)],
        1: torch.tensor(7),
        "1": torch.tensor(8),
        "": torch.tensor(9),
    }
    tree = encode(state, tensors)
    assert len(tensors) == 9
    assert {"a.b", "a.b#2", "list.0", "1", "1#2"} <= set(tensors)
    assert "__metadata__" not in tensors
    assert same(decode(tree, tensors), state)
    tensors = {}
    encode(torch.ones(1), tensors)
    assert list(tensors) == ["value"]


def test_module_versions_survive(same, through):
    state = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict()
    back = through(state)
    assert same(back, state)
    assert back._metadata == state._metadata


OPTIMIZERS = {
    name: cls
    for name, cls in sorted(vars(torch.optim).items())
    if isinstance(cls, type)
    and issubclass(cls, torch.optim.Optimizer)
    and cls is not torch.optim.Optimizer
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_torch_optimizer(name, tmp_path, same, through):
    cls = OPTIMIZERS[name]
    model = (
        nn.Embedding(3, 2, sparse=name == "SparseAdam")
        if name != "Muon"
        else nn.Linear(2, 2)
    )
    parameters = [p for p in model.parameters() if p.dim() == 2]
    options = {"lr": 0.1, "momentum": 0.9} if name == "SGD" else {"lr": 0.1}
    optimizer = cls(parameters, **options)

    def loss():
        optimizer.zero_grad()
        out = (
            model(
                torch.tensor([0, 1])
                if isinstance(model, nn.Embedding)
                else torch.ones(1, 2)
            )
            .square()
            .sum()
        )
        out.backward()
        return out

    for _ in range(2):
        optimizer.step(loss)
    state = optimizer.state_dict()
    assert state["state"]
    back = through(state, tmp_path)
    assert same(back, state)
    cls(parameters, **options).load_state_dict(back)


def schedulers():
    s = torch.optim.lr_scheduler
    return {
        "step": lambda o: s.StepLR(o, 2),
        "multi_step": lambda o: s.MultiStepLR(o, [2, 4, 4]),
        "lambda": lambda o: s.LambdaLR(o, lambda step: 0.5),
        "multiplicative": lambda o: s.MultiplicativeLR(o, lambda step: 0.5),
        "cosine": lambda o: s.CosineAnnealingLR(o, 5),
        "restarts": lambda o: s.CosineAnnealingWarmRestarts(o, 5),
        "one_cycle": lambda o: s.OneCycleLR(o, 0.1, 10),
        "cyclic": lambda o: s.CyclicLR(o, 0.1, 0.2),
        "plateau": lambda o: s.ReduceLROnPlateau(o),
        "sequential": lambda o: s.SequentialLR(
            o, [s.ConstantLR(o), s.ExponentialLR(o, 0.9)], [2]
        ),
        "chained": lambda o: s.ChainedScheduler([s.LinearLR(o), s.PolynomialLR(o)]),
    }


@pytest.mark.parametrize("name", schedulers())
def test_every_kind_of_torch_scheduler(name, tmp_path, same, through):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    scheduler = schedulers()[name](optimizer)
    for _ in range(3):
        optimizer.step()
        scheduler.step(*([0.5] if name == "plateau" else []))
    state = scheduler.state_dict()
    assert same(through(state, tmp_path), state)


def test_generator_states(same, through):
    state = {
        "python": random.Random(3).getstate(),
        "numpy": np.random.RandomState(3).get_state(),
        "numpy_new": np.random.default_rng(3).bit_generator.state,
        "torch": torch.Generator().manual_seed(3).get_state(),
    }
    back = through(state)
    assert same(back, state)
    random.Random().setstate(back["python"])
    np.random.RandomState().set_state(back["numpy"])
    np.random.default_rng().bit_generator.state = back["numpy_new"]
    torch.Generator().set_state(back["torch"])
