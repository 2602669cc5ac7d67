"""Batches on their way to the device."""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from trainer_kit.core.tensors import move_to_device
from trainer_kit.data import EMPTY, Ahead, feed

Pair = namedtuple("Pair", "x name")


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str


@dataclass
class Open:
    parts: list[torch.Tensor]
    count: int = 0


class Own:
    """A batch type with a `to` of its own."""

    def __init__(self, device: str = "cpu", returns: bool = True) -> None:
        self.device, self.returns = device, returns

    def to(self, device: torch.device) -> Own | None:
        if self.returns:
            return Own(device.type)
        self.device = device.type
        return None


def zeros() -> torch.Tensor:
    return torch.zeros(2)


def test_nothing_to_move_is_the_same_object() -> None:
    batches: list[Any] = [
        zeros(),
        {"x": [zeros(), (zeros(), "a")]},
        Pair(zeros(), "a"),
        Frozen(zeros(), "a"),
        Open([zeros()]),
        pack_sequence([zeros(), torch.zeros(1)]),
        ["a", "b"],
        "text",
        None,
        3,
        EMPTY,
        zeros,
    ]
    for batch in batches:
        assert move_to_device(batch, "cpu") is batch


def test_containers_are_copied_and_keep_their_type() -> None:
    tensor = zeros()
    batch = {
        "ordered": OrderedDict(x=tensor),
        "user": UserDict(x=tensor),
        "list": UserList([tensor]),
        "pair": Pair(tensor, "a"),
        "tuple": (tensor, 1),
        "frozen": Frozen(tensor, "a"),
        "open": Open([tensor], 3),
        "kept": ["a", {"b": None}],
    }
    moved = move_to_device(batch, torch.device("meta"))
    found = [
        moved["ordered"]["x"],
        moved["user"]["x"],
        moved["list"][0],
        moved["pair"].x,
        moved["tuple"][0],
        moved["frozen"].x,
        moved["open"].parts[0],
    ]
    assert {tensor.device.type for tensor in found} == {"meta"}
    assert [type(moved[key]) for key in batch] == [
        type(value) for value in batch.values()
    ]
    assert moved["pair"].name == moved["frozen"].name == "a"
    assert moved["open"].count == 3
    assert moved["kept"] is batch["kept"]
    # the user's batch is as it was
    assert (
        batch["ordered"]["x"]
        is batch["user"]["x"]
        is batch["list"][0]
        is batch["frozen"].x
        is tensor
    )  # type: ignore[index, attr-defined]


def test_objects_with_to() -> None:
    assert move_to_device([Own()], "meta")[0].device == "meta"
    in_place = Own(returns=False)
    assert move_to_device({"x": in_place}, "meta")["x"] is in_place
    assert in_place.device == "meta"
    assert move_to_device(Own, "meta") is Own  # a class is not a batch


def test_prefetch_moves_the_next_batch_before_this_one_is_used() -> None:
    log: list[str] = []

    def source() -> Any:
        for number in range(3):
            log.append(f"read {number}")
            yield number

    def move(number: int) -> int:
        log.append(f"move {number}")
        return number * 10

    ahead = Ahead(source(), move)
    assert log == []  # nothing is read before the first batch is wanted
    log.extend(f"use {batch}" for batch in ahead)
    assert log == [
        *("read 0", "move 0", "read 1", "move 1", "use 0"),
        *("read 2", "move 2", "use 10"),
        "use 20",
    ]
    assert next(ahead, "end") == "end"


def test_prefetch_of_an_empty_loader_is_empty() -> None:
    assert list(Ahead(iter([1, EMPTY, 2]), lambda number: number * 10)) == [
        10,
        EMPTY,
        20,
    ]


@pytest.mark.parametrize("fails", ["read", "move"])
def test_an_error_arrives_at_its_own_batch(fails: str) -> None:
    def source() -> Any:
        yield 1
        if fails == "read":
            raise OSError("disk")
        yield 2

    def move(number: int) -> int:
        if number == 2:
            raise OSError("disk")
        return number

    ahead = Ahead(source(), move)
    assert next(ahead) == 1
    with pytest.raises(OSError, match="disk"):
        next(ahead)
    assert list(ahead) == []


class Stream:
    """A stand-in for a stream of a device, which notes what is asked of it."""

    def __init__(
        self, device: torch.device, log: list[str], name: str = "side"
    ) -> None:
        self.device, self.log, self.name = device, log, name

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.log.append("record")
        return "copy"

    def __enter__(self) -> None:
        self.log.append("enter")

    def __exit__(self, *error: object) -> None:
        self.log.append("exit")


def test_epochs_share_one_stream_whose_copies_wait_for_queued_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    made: list[Stream] = []
    device = torch.device("cuda", 0)

    def stream(device: torch.device) -> Stream:
        made.append(Stream(device, log))
        return made[-1]

    monkeypatch.setattr(torch, "Stream", stream)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda: torch.device("cuda")
    )
    monkeypatch.setattr(
        torch.accelerator, "current_stream", lambda device: Stream(device, log, "main")
    )
    feed._side_stream.cache_clear()
    try:
        for _ in range(3):
            log.clear()
            assert list(Ahead(iter([1, 2]), lambda number: number * 10, device)) == [
                10,
                20,
            ]
            moved = ["side waits for main", "enter", "record", "exit"]
            assert log == [*moved, "main waits for copy", *moved, "main waits for copy"]
        # Each stream has memory of its own, which no other one gets: one an epoch would be batches an epoch.
        assert [one.device for one in made] == [device]
        assert list(
            Ahead(iter([1]), lambda number: number, torch.device("xla", 0))
        ) == [1]  # torch has no stream there
        assert len(made) == 1
    finally:
        feed._side_stream.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_prefetch_copies_on_an_accelerator() -> None:
    device = torch.device("cuda", 0)
    size = 1 << 20

    def source() -> Any:
        for number in range(20):
            yield {"x": torch.full((size,), float(number)), "name": str(number)}

    sums = []
    for batch in Ahead(source(), lambda batch: move_to_device(batch, device), device):
        assert batch["x"].device == device
        product = batch["x"]
        for _ in range(50):
            product = product * 1.0
        sums.append(product.sum())
        del batch, product
    assert [value.item() / size for value in sums] == list(range(20))
