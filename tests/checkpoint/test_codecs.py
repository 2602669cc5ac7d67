"""Objects in a checkpoint: they come back as they were, and no file can have code run or a module imported."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import sys
from collections import defaultdict, deque, namedtuple
from datetime import datetime, timezone
from decimal import Decimal
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.mutation_guard import install_generation_tagging_init

import trainer_kit as tk
from trainer_kit.checkpoint.codecs import ObjectRecord
from trainer_kit.checkpoint.encoding import decode, encode
from trainer_kit.core.errors import CheckpointError, ConfigurationError
from trainer_kit.core.hparams import HParams

Point = namedtuple("Point", "x y")


class Mode(enum.Enum):
    FAST = 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float
    weight: torch.Tensor


@dataclasses.dataclass(slots=True)
class Slotted:
    mode: Mode


class Scaler:
    def __init__(self, mean):
        self.mean = mean


class Lists(list):
    pass


def scale(x):
    return 2 * x


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(2)
        self.lstm = nn.LSTM(2, 2)
        self.activation, self.options = torch.tanh, {"mode": Mode.FAST}

    def forward(self, x):
        return self.lstm(self.norm(self.activation(self.second(self.first(x)))))[0]


def through(value):
    tensors = {}
    tree = json.loads(json.dumps(encode({"value": value}, tensors)))
    return decode(tree, tensors)["value"]


def test_a_module_comes_back_with_its_weights_buffers_ties_and_attributes():
    module = Tied()
    module(torch.randn(4, 2))
    module.eval()
    again = through(module)
    assert type(again) is Tied
    batch = torch.randn(3, 2)
    assert torch.equal(again(batch), module(batch))
    assert again.second.weight is again.first.weight
    assert [p.requires_grad for p in again.parameters()] == [
        p.requires_grad for p in module.parameters()
    ]
    assert not again.training
    assert again.options == {"mode": Mode.FAST}
    assert list(again.state_dict()) == list(module.state_dict())


def test_a_compiled_module_is_stored_as_the_module(monkeypatch):
    monkeypatch.setattr(
        nn.Module, "__setstate__", nn.Module.__setstate__
    )  # undoes what the next line replaces
    monkeypatch.setattr(nn.Module, "__init__", nn.Module.__init__)
    install_generation_tagging_init()  # as a compilation does
    module = nn.Linear(2, 1)
    again = through(torch.compile(module, backend="eager"))
    assert type(again) is nn.Linear
    assert torch.equal(again.weight, module.weight)


@pytest.mark.parametrize(
    "value",
    [
        Point(1, "a"),
        Slotted(Mode.FAST),
        datetime(2024, 2, 3, 4, 5, 6, 7, timezone.utc),
        Decimal("0.1"),
        Fraction(1, 3),
        range(1, 9, 2),
        deque([1, 2], maxlen=3),
        defaultdict(list, a=[1]),
        argparse.Namespace(lr=0.1),
        HParams(lr=0.1),
        nn.ReLU,
        Mode,
        torch.optim.AdamW,
        int,
        torch.relu,
        nn.functional.gelu,
        nn.functional.relu,
        np.tanh,
        scale,
        Scaler,
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_values_that_have_a_name(value):
    again = through(value)
    assert again == value
    assert type(again) is type(value)


def test_a_dataclass_and_a_partial():
    again = through(Frozen(2.0, torch.ones(2)))
    assert type(again) is Frozen
    assert torch.equal(again.weight, torch.ones(2))
    make = through(partial(torch.optim.SGD, lr=0.5))
    assert make([nn.Parameter(torch.ones(1))]).defaults["lr"] == 0.5


def test_a_registered_class_is_stored_by_its_functions_or_by_its_attributes():
    with pytest.raises(
        CheckpointError, match=r"(?s)test_codecs\.Scaler.*tk\.checkpoint\.codec"
    ):
        encode(Scaler(1.0), {})
    registered = tk.checkpoint.codec(
        Scaler, lambda scaler: [scaler.mean], lambda parts: Scaler(*parts)
    )
    assert registered is Scaler
    assert through(Scaler(np.ones(2))).mean.tolist() == [1, 1]

    @tk.checkpoint.codec
    class Local:
        __slots__ = ("low",)

    value = Local()
    value.low = torch.ones(1)
    assert torch.equal(through(value).low, torch.ones(1))
    with pytest.raises(ConfigurationError, match="to_plain and from_plain"):
        tk.checkpoint.codec(Scaler, to_plain=vars)
    with pytest.raises(ConfigurationError, match="a class or a function"):
        tk.checkpoint.codec(Scaler(1))


@pytest.mark.parametrize(
    "value", [lambda x: x, eval, torch.load, Lists([1]), object(), sys]
)
def test_what_has_no_name_is_refused(value):
    with pytest.raises(CheckpointError, match=r"cannot be (saved|named)"):
        encode({"x": value}, {})


@pytest.mark.parametrize(
    "name",
    [
        *(
            "os.system",
            "posix.system",
            "eval",
            "builtins.eval",
            "subprocess.Popen",
            "importlib.import_module",
        ),
        *(
            "torch.load",
            "torch.serialization.load",
            "torch.from_file",
            "torch.hub.load",
            "numpy.load",
            "numpy.memmap",
        ),
        *(
            "trainer_kit.checkpoint.commit.remove_checkpoint",
            f"{__name__}.json.loads",
            f"{__name__}.sys",
        ),
        *(
            "shutil.rmtree",
            "",
            ".",
            "os.",
            "a" * 999,
            "torch.nn.functional.torch.load",
            "antigravity.fly",
        ),
    ],
)
def test_a_file_cannot_name_what_it_likes(name):
    modules = set(sys.modules)
    assert decode({"$": "name", "v": name}, {}) == ObjectRecord(name)
    for tag in ("object", "dataclass", "namedtuple", "module"):
        record = decode({"$": tag, "v": [name, []]}, {})
        assert type(record) is ObjectRecord
    call = {"$": "partial", "v": [{"$": "name", "v": name}, ["x"], {}]}
    assert decode(call, {}) == ObjectRecord(
        "functools.partial", [ObjectRecord(name), ["x"], {}]
    )
    assert set(sys.modules) == modules


@pytest.mark.parametrize(
    "tree",
    [
        {"$": "dataclass", "v": [f"{__name__}.Frozen", {"__class__": 1}]},
        {"$": "namedtuple", "v": [f"{__name__}.Point", [1]]},
        {
            "$": "module",
            "v": [
                "torch.nn.modules.linear.Linear",
                {"attributes": {}, "parameters": {"weight": [1, True]}},
            ],
        },
        {"$": "module", "v": ["torch.nn.modules.linear.Linear", []]},
        {"$": "object", "v": ["fractions.Fraction", ["1e999999999"]]},
        {"$": "object", "v": ["range", 3]},
        {"$": "name", "v": 3},
    ],
)
def test_a_damaged_record_is_refused(tree):
    with pytest.raises(CheckpointError, match="damaged record"):
        decode(tree, {})


def test_a_partial_of_a_function_of_the_program_is_not_made():
    record = decode(
        {"$": "partial", "v": [{"$": "name", "v": f"{__name__}.scale"}, [1], {}]}, {}
    )
    assert record == ObjectRecord("functools.partial", [scale, [1], {}])


@pytest.mark.parametrize(
    ("value", "module", "former_module"),
    [
        (tk.utils.GradientAccumulationPlugin(4), "options.records", "compat.options"),
        (
            tk.utils.DDPCommunicationHookType.FP16,
            "options.records",
            "compat.options",
        ),
        (
            tk.utils.TorchTensorParallelPlugin(2),
            "options.parallelism",
            "compat.parallelism",
        ),
    ],
)
def test_a_class_of_this_library_that_has_moved_is_found(value, module, former_module):
    """As in a checkpoint of 0.2.0, whose records name the module of that version."""
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode({"value": value}, tensors))
    assert f"trainer_kit.{module}." in text
    former = text.replace(f"trainer_kit.{module}.", f"trainer_kit.{former_module}.")
    assert decode(json.loads(former), tensors)["value"] == value
