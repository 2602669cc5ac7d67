"""`gather_for_metrics` of objects: each sample's result once, however predictions and references are handed over."""

from __future__ import annotations

from collections import OrderedDict, UserDict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from trainer_kit import Accelerator, DataLoaderConfiguration
from trainer_kit.accelerator.repeated_samples import drop_repeats
from trainer_kit.core.errors import ConfigurationError, RankError

pytestmark = [pytest.mark.world_size(2)]


class Pair(NamedTuple):
    p: Any
    r: Any


@dataclass(frozen=True)
class Results:
    p: Any
    r: Any


def of_pairs(gathered: list[Any]) -> tuple[list[Any], list[Any]]:
    """A flat list: predictions and references in turn."""
    return [x for part in gathered[0::2] for x in part], [
        x for part in gathered[1::2] for x in part
    ]


def of_named(gathered: list[Any]) -> tuple[list[Any], list[Any]]:
    values = [vars(part) if isinstance(part, Results) else part for part in gathered]
    return [x for part in values for x in part["p"]], [
        x for part in values for x in part["r"]
    ]


def of_samples(gathered: list[Any]) -> tuple[list[Any], list[Any]]:
    return [one[0] for one in gathered], [one[1] for one in gathered]


FORMS: dict[str, tuple[Any, Any]] = {
    "tuple of lists": (lambda p, r: (p, r), of_pairs),
    "tuple of tuples": (lambda p, r: (tuple(p), tuple(r)), of_pairs),
    "list of lists": (lambda p, r: [p, r], of_pairs),
    "named tuple": (lambda p, r: Pair(p, r), of_pairs),
    "texts and tensors": (
        lambda p, r: (p, torch.tensor([int(x[1:]) for x in r])),
        of_pairs,
    ),
    "list of texts and tensors": (
        lambda p, r: [p, torch.tensor([int(x[1:]) for x in r])],
        of_pairs,
    ),
    "texts and arrays": (lambda p, r: (np.array(p), np.array(r)), of_pairs),
    "dict": (lambda p, r: {"p": p, "r": r}, of_named),
    "OrderedDict": (lambda p, r: OrderedDict(p=p, r=r), of_named),
    "UserDict": (lambda p, r: UserDict(p=p, r=r), of_named),
    "dataclass": (lambda p, r: Results(p, r), of_named),
    "dict with a number": (lambda p, r: {"p": p, "r": r, "loss": 0.5}, of_named),
    "nested": (
        lambda p, r: {"all": ({"p": p}, {"r": deque(r)})},
        lambda g: (
            [x for part in g for x in part["all"][0]["p"]],
            [x for part in g for x in part["all"][1]["r"]],
        ),
    ),
    "dict for each sample": (
        lambda p, r: [{"p": x, "r": y} for x, y in zip(p, r, strict=True)],
        lambda g: ([one["p"] for one in g], [one["r"] for one in g]),
    ),
    "pair for each sample": (lambda p, r: list(zip(p, r, strict=True)), of_samples),
}


def plain(values: list[Any]) -> list[int]:
    return [
        int(str(value).lstrip("pr"))
        if not isinstance(value, torch.Tensor)
        else int(value)
        for value in values
    ]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_result_is_gathered_once(size: int) -> None:
    accelerator = Accelerator(cpu=True)
    # By the number of samples in the last batch of both processes, from 1 to 2 * size.
    for rest in range(1, 2 * size + 1):
        samples = 2 * size + rest
        loader = accelerator.prepare(DataLoader(range(samples), batch_size=size))
        found: dict[str, tuple[list[Any], list[Any]]] = {
            name: ([], []) for name in FORMS
        }
        flat: list[Any] = []
        as_objects: list[Any] = []
        refused = set()
        for batch in loader:
            p, r = [f"p{int(i)}" for i in batch], [f"r{int(i)}" for i in batch]
            flat += accelerator.gather_for_metrics(p)
            as_objects += [
                i
                for part in accelerator.gather_for_metrics(
                    batch, use_gather_object=True
                )
                for i in part
            ]
            for name, (form, read) in FORMS.items():
                try:
                    predictions, references = read(
                        accelerator.gather_for_metrics(form(p, r))
                    )
                except (ConfigurationError, RankError):
                    refused.add(name)
                else:
                    found[name][0].extend(predictions)
                    found[name][1].extend(references)
        expected = list(range(samples))
        assert plain(flat) == plain(as_objects) == expected
        for name, (predictions, references) in found.items():
            if name not in refused:
                assert plain(predictions) == plain(references) == expected, (
                    name,
                    samples,
                )
        # Of two lists of two, nothing tells samples from fields; 1 or 3 of the last samples would be cut from them.
        ambiguous = (
            {"list of lists", "pair for each sample"}
            if size == 2 and rest in (1, 3)
            else set()
        )
        assert refused == ambiguous, samples


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (["a", "b", "c"], "a list of 3"),
        ({"p": ["a"] * 4, "name": "run"}, "a str"),
        ({"p": ["a"] * 4, "ids": {1, 2, 3, 4}}, "a set"),
        ((["a"] * 4, torch.zeros(3)), r"a Tensor of shape \(3,\)"),
        ([[0.5]] * 3, "a list of 3"),
        (torch.zeros(8, 2), r"tensors of \[8, 8\] rows"),
        ([[1, 2, 3, 4]] * 4, "each of 4 items"),
    ],
)
def test_what_has_no_entry_for_each_sample_is_refused_on_every_process(
    value: Any, found: str
) -> None:
    accelerator = Accelerator(cpu=True)
    for _ in accelerator.prepare(DataLoader(range(14), batch_size=4)):
        if not accelerator.gradient_state.end_of_dataloader:
            assert len(accelerator.gather_for_metrics(value)) > 0
            continue
        with pytest.raises(ConfigurationError, match=found):
            accelerator.gather_for_metrics(value)
    assert accelerator.gather_for_metrics([accelerator.process_index]) == [0, 1]


def test_lists_of_one_list_for_each_sample() -> None:
    accelerator = Accelerator(cpu=True)
    tokens: list[Any] = []
    arrays: list[Any] = []
    for batch in accelerator.prepare(DataLoader(range(13), batch_size=4)):
        values = [["x"] * (int(i) % 3 + 1) for i in batch]
        tokens += accelerator.gather_for_metrics(values)
        square = np.array([[int(i)] * 4 for i in batch], dtype=object)
        arrays += [
            row
            for part in accelerator.gather_for_metrics(square)
            for row in part.tolist()
        ]
    assert tokens == [["x"] * (i % 3 + 1) for i in range(13)]
    assert arrays == [[i] * 4 for i in range(13)]


def test_a_scalar_is_a_sample_where_batches_have_one() -> None:
    accelerator = Accelerator(cpu=True)
    tensors: list[Any] = []
    numbers: list[Any] = []
    texts: list[Any] = []
    for batch in accelerator.prepare(DataLoader(range(3), batch_size=1)):
        tensors += accelerator.gather_for_metrics(batch.squeeze()).tolist()
        numbers += accelerator.gather_for_metrics(batch.item())
        texts += accelerator.gather_for_metrics(f"p{batch.item()}")
    assert tensors == numbers == [0, 1, 2]
    assert texts == ["p0", "p1", "p2"]


def test_processes_with_different_lengths() -> None:
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False)
    )
    names: list[Any] = []
    for batch in accelerator.prepare(DataLoader(range(11), batch_size=4)):
        pairs = accelerator.gather_for_metrics(([str(int(i)) for i in batch], batch))
        names += [name for part in pairs[0::2] for name in part]
    assert names == [str(i) for i in range(11)]


def test_tables_are_cut_by_rows() -> None:
    class Table:
        def __init__(self, rows: list[int]) -> None:
            self.rows = rows

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, rows: slice) -> Table:
            return Table(self.rows[rows])

    assert drop_repeats({"table": Table([1, 2, 3])}, 3, 2)["table"].rows == [1, 2]
