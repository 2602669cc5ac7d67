"""Processes that pass different tensors to a collective: an error in words on each of them, and no process ends."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import trainer_kit as tk
from trainer_kit.core.errors import ConfigurationError, RankError

pytestmark = pytest.mark.world_size(2)


def calls(accelerator):
    return {
        "gather": accelerator.gather,
        "reduce": accelerator.reduce,
        "gather_for_metrics": accelerator.gather_for_metrics,
        "tk.gather": tk.gather,
        "tk.reduce": tk.reduce,
        "tk.broadcast": tk.broadcast,
    }


def different(rank):
    """What both processes bring, by what is different."""
    return {
        "length": torch.ones(2 + rank),
        "another dimension": torch.ones(2, 3 + rank),
        "number of dimensions": torch.ones((2,) * (1 + rank)),
        "dtype": torch.ones(2, dtype=[torch.float32, torch.float64][rank]),
        "order of keys": {
            ("a", "b")[rank]: torch.ones(2),
            ("b", "a")[rank]: torch.ones(2),
        },
        "number of tensors": [torch.ones(2)] * (1 + rank),
        "one of several": [torch.ones(2), torch.ones(2 + rank)],
    }


def test_different_tensors_are_an_error_on_every_process():
    accelerator = tk.Accelerator(cpu=True)
    rank = accelerator.process_index
    for name, call in calls(accelerator).items():
        for what, mine in different(rank).items():
            with pytest.raises(RankError, match="pass different tensors to") as found:
                call(mine)
            assert "process 0: " in str(found.value), (name, what)
            assert "process 1: " in str(found.value), (name, what)
        assert call({"a": [torch.ones(2)]})["a"][0].shape in ((2,), (4,)), (
            "the next call works"
        )


def test_the_error_names_the_shapes_and_the_way_out():
    accelerator = tk.Accelerator(cpu=True)
    with pytest.raises(RankError) as found:
        accelerator.gather({"loss": torch.ones(2 - accelerator.process_index)})
    text = str(found.value)
    assert (
        "process 0: gather({'loss': (2,) torch.float32}); process 1: gather({'loss': (1,) torch.float32})"
        in text
    )
    assert "pad_across_processes" in text


def test_another_call_is_an_error_too():
    accelerator = tk.Accelerator(cpu=True)
    rank = accelerator.process_index
    for pair in (
        ("gather", "reduce"),
        ("reduce", "gather_for_metrics"),
        ("tk.gather", "tk.broadcast"),
    ):
        with pytest.raises(RankError, match="pass different tensors"):
            calls(accelerator)[pair[rank]](torch.ones(2))
    with pytest.raises(RankError, match="pass different tensors"):
        accelerator.reduce(torch.ones(2), ("sum", "mean")[rank])
    with pytest.raises(RankError, match="pass different tensors"):
        accelerator.gather_for_metrics(torch.ones(2) if rank else ["a", "b"])
    with pytest.raises(RankError, match="pass different tensors"):
        accelerator.pad_across_processes(torch.ones((2,) * (1 + rank)))


def test_loader_batches_that_differ_in_length_are_gathered_and_other_differences_are_errors():
    accelerator = tk.Accelerator(cpu=True)
    rank = accelerator.process_index
    data = accelerator.prepare(
        DataLoader(TensorDataset(torch.arange(21)), batch_size=4)
    )
    for (index,) in data:
        if not data.end_of_dataloader:
            continue
        nested = accelerator.gather_for_metrics(
            [index, torch.ones(1), torch.tensor(1.0)]
        )
        assert [len(part) for part in nested] == [
            len(accelerator.gather_for_metrics(index)),
            2,
            2,
        ]
        with pytest.raises(ConfigurationError, match=r"tensors of \[1, 2\] rows"):
            accelerator.gather_for_metrics(
                torch.ones(1 + rank)
            )  # which of them belong to repeated samples?
        padded = accelerator.pad_across_processes(
            [torch.ones(1 + rank, 2), torch.ones(3, 1 + rank)], dim=1
        )
        assert [tuple(part.shape) for part in padded] == [(1 + rank, 2), (3, 2)]
        with pytest.raises(
            RankError, match=r"process 0: gather_for_metrics\(\(\*, 5\) torch.float32\)"
        ):
            accelerator.gather_for_metrics(torch.ones(len(index), 5 + rank))


def test_all_gather_of_a_module():
    class Gathers(tk.testing.TinyModule):
        def validation_step(self, batch, batch_idx):
            self.gathered = self.all_gather({"x": batch, "n": 1})

    trainer = tk.Trainer(strategy="ddp", barebones=True)
    with pytest.raises(
        RankError,
        match=r"process 0: all_gather\(.*\(2, 32\).*process 1: all_gather\(.*\(1, 32\)",
    ):
        trainer.validate(Gathers(), DataLoader(torch.ones(3, 32), batch_size=4))
    module = Gathers()
    trainer.validate(module, DataLoader(torch.ones(4, 32), batch_size=4))
    assert module.gathered["x"].shape == (2, 2, 32)
    assert module.gathered["n"].tolist() == [1, 1]
