"""The codec gives back what it was given, for every type it takes, and refuses the rest by name."""

from __future__ import annotations

import enum
import math
import random
import sys
from collections import Counter, OrderedDict, namedtuple
from datetime import timedelta
from pathlib import Path, PureWindowsPath

import numpy as np
import pytest
import torch
from torch import nn

from trainer_kit.checkpoint.encoding import EnumRecord, decode, encode
from trainer_kit.core.errors import CheckpointError


class Mode(enum.Enum):
    FAST = 1
    SLOW = (2, "two")


class Level(enum.IntEnum):
    LOW = 1


class Bits(enum.Flag):
    A = 1
    B = 2


LEAVES = [
    None,
    True,
    False,
    0,
    -(2**63),
    2**63,
    -(2**200),
    10**5000,
    0.0,
    -0.0,
    0.1,
    5e-324,
    math.inf,
    -math.inf,
    math.nan,
    "",
    "naïve ✓ \x00 \ud800 \n",
    b"",
    bytes(range(256)),
    bytearray(b"\x80\x02"),
    complex(-0.0, math.inf),
    complex(math.nan, 1e-300),
    torch.float32,
    torch.bfloat16,
    torch.complex128,
    torch.device("cpu"),
    torch.device("cuda:3"),
    torch.Size([2, 0, 3]),
    timedelta(days=-3, microseconds=7),
    Path("a/b c"),
    np.float32(0.1),
    np.float64(math.nan),
    np.int8(-5),
    np.uint64(2**64 - 1),
    np.bool_(True),
    np.complex64(1 - 2j),
    np.str_("x✓"),
    np.str_(""),
    np.bytes_(b"ab"),
    np.datetime64("2024-02-29T01:02:03"),
    np.timedelta64(5, "ms"),
    np.longdouble("1.1"),
]


@pytest.mark.parametrize("value", LEAVES, ids=lambda value: type(value).__name__)
def test_leaves(value, same, through):
    assert same(through(value), value)
    assert same(through({"a": [value, (value,)]}), {"a": [value, (value,)]})


def test_a_key_of_more_digits_than_python_prints(through):
    assert through({10**5000: 1, (10**5000,): 2}) == {10**5000: 1, (10**5000,): 2}


def test_a_path_of_another_system_comes_back_as_a_path(through):
    assert through(PureWindowsPath("a\\b")) == Path("a\\b")


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        (),
        set(),
        frozenset(),
        OrderedDict(),
        Counter(),
        {"$": "tensor"},
        {"$": "tuple", "v": [1]},
        {"a": {"$": {"$": [{"$": 1}]}}},
        {
            1: "int",
            "1": "str",
            1.5: "float",
            None: "none",
            (1, "x"): "tuple",
            b"k": "bytes",
            math.inf: "inf",
        },
        {False: 0, "z": 1, "a": 2, torch.float16: 3, frozenset({1}): 4, Path("p"): 5},
        {3: 1, 1: 2, 2: 3},
        {(1, (2,)): [torch.float16]},
        OrderedDict([("b", 1), ("a", (2,))]),
        OrderedDict([(2, 1), (1, 2)]),
        Counter({30: 1, 10: 2}),
        {1, 2.5, "x", (1, 2), frozenset({b"y"}), None},
        [[[[()]]]],
    ],
    ids=lambda value: (
        "a set" if isinstance(value, set) else repr(value)
    ),  # sets have another order in each process
)
def test_containers(value, same, through):
    assert same(through(value), value)


def test_enums_come_back_as_members_and_as_records_where_their_class_is_not_imported(
    through, monkeypatch
):
    members = (Mode.FAST, Mode.SLOW, Level.LOW, Bits.A, Bits.A | Bits.B)
    for member in members:
        assert through(member) is member
    assert through({Mode.FAST: 1}) == {Mode.FAST: 1}
    for kind in ("Mode", "Level", "Bits"):
        monkeypatch.delattr(sys.modules[__name__], kind)
    for member in members:
        record = through(member)
        assert type(record) is EnumRecord
        assert record.value == member.value
        assert record.as_member(type(member)) is member
        assert through(record) == record
    assert through({members[0]: 1}) == {EnumRecord(f"{__name__}.Mode", "FAST", 1): 1}
    with pytest.raises(ValueError, match="is not a valid"):
        EnumRecord("gone", "GONE", 9).as_member(type(members[0]))


def test_enum_names_outlive_changed_values():
    assert EnumRecord("m.Mode", "SLOW", 17).as_member(Mode) is Mode.SLOW


def test_equal_sets_give_equal_text():
    words = [f"word{i}" for i in range(50)]
    shuffled = random.Random(1).sample(words, 50)
    assert encode(set(words), {}) == encode(set(shuffled), {})


def random_value(rng, depth):
    kind = rng.randrange(14 if depth else 6)
    if kind < 5:
        return rng.choice(LEAVES)
    if kind == 5:
        dtype = rng.choice(
            [torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool]
        )
        tensor = torch.randint(
            0, 2, [rng.randrange(4) for _ in range(rng.randrange(4))]
        ).to(dtype)
        return rng.choice(
            [tensor, tensor.t() if tensor.dim() < 3 else tensor, (tensor != 0).numpy()]
        )
    children = [random_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    keys = rng.sample(
        ["a", "b.c", "", "$", "v", 1, -1.5, None, True, (1, ("x",)), b"k", "é"],
        len(children),
    )
    if kind < 8:
        return children
    if kind < 10:
        return tuple(children)
    if kind < 12:
        return dict(zip(keys, children, strict=True))
    if kind == 12:
        return OrderedDict(zip(keys, children, strict=True))
    return frozenset(keys)


@pytest.mark.parametrize("seed", range(60))
def test_random_states(seed, tmp_path, same, through):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    value = {f"k{i}": random_value(rng, 5) for i in range(6)}
    assert same(through(value, tmp_path), value)


def local_module():
    class Local(nn.Module):
        pass

    return Local()


class Words(str):
    __slots__ = ()


class Shard(torch.Tensor):
    pass


REFUSED = {
    "function": (lambda: None, "function"),
    "class": (random.Random, "random.Random"),
    "module": (local_module(), "Local"),
    "traced": (torch.fx.symbolic_trace(nn.ReLU()), "GraphModule"),
    "object": (object(), "object"),
    "exception": (ValueError("x"), "ValueError"),
    "generator": ((i for i in ()), "generator"),
    "namedtuple": (namedtuple("Point", "x y")(1, 2), "tuple(value)"),
    "str_subclass": (Words("x"), "str(value)"),
    "defaultdict": (__import__("collections").defaultdict(lambda: 0), "function"),
    "object_array": (np.array([object()]), "arrays of object"),
    "structured_array": (np.zeros(2, "i4,f4"), "arrays of"),
    "masked_array": (np.ma.array([1]), "numpy.ma"),
    "sparse": (torch.eye(2).to_sparse(), "torch.sparse_coo"),
    "meta": (torch.empty(2, device="meta"), "meta"),
    "subclass": (torch.ones(2).as_subclass(Shard), "Shard"),
    "enum_value": (enum.Enum("E", {"A": object()}).A, "object"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_everything_else_is_refused_with_path_and_type(name):
    value, said = REFUSED[name]
    with pytest.raises(CheckpointError) as caught:
        encode({"EMA": [{"fn": value}]}, {}, at="callbacks")
    assert caught.value.key.startswith("callbacks.EMA.0.fn")
    assert said in str(caught.value)


def test_cycles_deep_nesting_and_tensor_keys_are_refused(through):
    loop = []
    loop.append({"again": loop})
    with pytest.raises(CheckpointError, match="contains itself") as caught:
        encode({"x": loop}, {})
    assert caught.value.key == "x.0.again"
    shared = [1]
    assert through([shared, shared]) == [[1], [1]]
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(CheckpointError, match="too deeply"):
        encode(deep, {})
    with pytest.raises(CheckpointError, match="key of a saved dict"):
        encode({torch.ones(1): 1}, {})
    while deep:  # freed one level at a time
        deep = deep[0]


@pytest.mark.parametrize(
    "tree",
    [
        {"$": "os.system", "v": "true"},
        {"$": None},
        {"$": ["tuple"], "v": []},
        {"$": "tuple"},
        {"$": "tuple", "v": "abc"},
        {"$": "dict", "v": [[1]]},
        {"$": "dict", "v": [[{"$": "set", "v": []}, 1]]},
        {"$": "set", "v": [[1]]},
        {"$": "dtype", "v": "load"},
        {"$": "dtype", "v": "__class__"},
        {"$": "numpy", "v": "00", "dtype": "O"},
        {"$": "numpy", "v": "00", "dtype": "f8"},
        {"$": "numpy", "v": "zz", "dtype": "i1"},
        {"$": "bytes", "v": "§"},
        {"$": "int", "v": "ten"},
        {"$": "device", "v": "abacus"},
        {"$": "tensor", "v": "absent"},
        {"$": "tensor", "v": "x", "dtype": "complex128", "shape": [7]},
        {"$": "array", "v": "x", "dtype": "O", "shape": [1]},
        {"$": "array", "v": "x", "dtype": "f8", "shape": [1000]},
        {"$": "array", "v": ["x"]},
        {"$": "enum", "v": [1]},
        {"$": "OrderedDict", "v": 3},
    ],
    ids=str,
)
def test_damaged_records_are_refused_with_their_path(tree):
    with pytest.raises(CheckpointError) as caught:
        decode({"a": [tree]}, {"x": torch.ones(2)}, at="part", file="state.json")
    assert caught.value.key.startswith("part.a.0")
    assert caught.value.file == "state.json"
