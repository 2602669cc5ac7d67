"""Walks over batches: every container keeps its class, and is returned itself where nothing changes."""

import collections
import dataclasses
import types
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import trainer_kit
from trainer_kit.core.tensors import (
    children,
    map_leaves,
    map_tensors,
    move_to_device,
    tensors_of,
)


class Pair(NamedTuple):
    x: Any
    name: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    name: Any = "a"


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    x: Any
    name: Any = "a"


@dataclasses.dataclass
class Derived:
    x: Any
    later: Any = dataclasses.field(init=False)
    unset: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.later = self.x * 2


class Immutable(collections.abc.Mapping):
    def __init__(self, items: Any) -> None:
        self._items = dict(items)

    def __getitem__(self, key: Any) -> Any:
        return self._items[key]

    def __iter__(self) -> Any:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Words(collections.abc.Sequence):
    def __init__(self, items: Any) -> None:
        self._items = list(items)

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)


def containers() -> dict[str, Any]:
    """One object of every kind that holds the tensor [1., 1.] among other things."""
    x = torch.ones(2)
    return {
        "dict": {"x": x, "name": "a"},
        "list": [x, "a"],
        "tuple": (x, None, 3),
        "named tuple": Pair(x, "a"),
        "frozen dataclass": Frozen(x),
        "frozen dataclass with slots": FrozenSlots(x),
        "dataclass with derived fields": Derived(x),
        "nested": Frozen({"deep": [Pair(FrozenSlots(x), "a")]}),
        "UserDict": collections.UserDict(x=x, name="a"),
        "defaultdict": collections.defaultdict(list, x=x),
        "OrderedDict": collections.OrderedDict(x=x),
        "mapping proxy": types.MappingProxyType({"x": x}),
        "immutable mapping": Immutable({"x": x}),
        "immutable sequence": Words([x, "a"]),
        "deque": collections.deque([x, "a"]),
        "UserList": collections.UserList([x, "a"]),
        "packed sequence": pack_sequence([x]),
    }


KINDS = [*containers(), "BatchEncoding", "model output"]


def container(kind: str) -> Any:
    """One of `containers`, or of transformers, which an environment with the oldest or newest torch does not have."""
    x = torch.ones(2)
    if kind == "BatchEncoding":
        encoding = pytest.importorskip("transformers").BatchEncoding
        return encoding({"x": x, "name": ["a", "b"]})
    if kind == "model output":
        outputs = pytest.importorskip("transformers.modeling_outputs")
        return outputs.BaseModelOutput(last_hidden_state=x)
    return containers()[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_containers_keep_their_class_and_are_not_changed(kind: str) -> None:
    batch = container(kind)
    halved = map_tensors(
        batch, lambda tensor: tensor.half() if tensor.is_floating_point() else tensor
    )
    assert type(halved) is type(batch)
    assert halved is not batch
    floats = [tensor for tensor in tensors_of(halved) if tensor.is_floating_point()]
    assert floats
    assert all(tensor.dtype == torch.float16 for tensor in floats)
    assert all(
        tensor.dtype in (torch.float32, torch.int64) for tensor in tensors_of(batch)
    )
    assert [way for way, _ in children(halved)] == [way for way, _ in children(batch)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_container_without_changes_is_returned_itself(kind: str) -> None:
    batch = container(kind)
    assert map_tensors(batch, lambda tensor: tensor) is batch
    assert move_to_device(batch, "cpu") is batch


def test_what_classes_know_beside_their_items_stays() -> None:
    batch = map_tensors(containers()["defaultdict"], torch.Tensor.half)
    assert batch.default_factory is list
    assert batch["new"] == []
    derived = map_tensors(
        containers()["dataclass with derived fields"], torch.Tensor.half
    )
    assert derived.later.dtype == torch.float16
    assert not hasattr(derived, "unset")
    packed = map_tensors(
        pack_sequence([torch.ones(2), torch.ones(1)]), torch.Tensor.double
    )
    assert isinstance(packed, PackedSequence)
    assert packed.data.dtype == torch.float64


def test_an_output_of_transformers_has_its_items_as_attributes() -> None:
    output = map_tensors(container("model output"), torch.Tensor.half)
    assert output.last_hidden_state is output["last_hidden_state"]


def test_nothing_else_in_the_package_walks_batches() -> None:
    package = Path(trainer_kit.__file__).parent
    other = {
        file.parent.name
        for file in package.rglob("*.py")
        if "apply_to_collection(" in file.read_text()
    }
    assert other <= {"compat"}  # a name that programs for Lightning import


def test_other_leaves_are_passed_to_a_function_of_their_own() -> None:
    names: list[Any] = []
    map_leaves(
        {"x": torch.ones(1), "pair": ("a", None)},
        lambda tensor: tensor,
        torch.Tensor,
        names.append,
    )
    assert names == ["a", None]
