"""`DataModule`: its defaults, and the one that is made from datasets."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from trainer_kit import DataModule, LightningDataModule


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


def test_it_goes_by_lightning_s_name_too():
    assert LightningDataModule is DataModule


def test_an_undefined_loader_is_not_implemented():
    for name in ("train", "val", "test", "predict"):
        with pytest.raises(NotImplementedError):
            getattr(DataModule(), f"{name}_dataloader")()


def test_state_is_empty_unless_defined():
    data = DataModule()
    assert data.state_dict() == {}
    data.load_state_dict({"a": 1})


def test_loaders_for_the_datasets_that_were_given():
    data = DataModule.from_datasets(
        torch.arange(8), val_dataset=torch.arange(4), batch_size=2
    )
    train, val = data.train_dataloader(), data.val_dataloader()
    assert isinstance(train.sampler, RandomSampler)
    assert isinstance(val.sampler, SequentialSampler)
    assert sorted(torch.cat(list(train)).tolist()) == list(range(8))
    assert [batch.tolist() for batch in val] == [[0, 1], [2, 3]]
    with pytest.raises(NotImplementedError):
        data.test_dataloader()


def test_a_stream_is_not_shuffled():
    loader = DataModule.from_datasets(Stream(), batch_size=2).train_dataloader()
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]


def test_several_datasets_give_several_loaders():
    data = DataModule.from_datasets(
        {"a": torch.arange(4), "b": torch.arange(2)},
        val_dataset=[torch.arange(4), torch.arange(2)],
        predict_dataset=TensorDataset(torch.arange(3)),
        batch_size=2,
    )
    train = data.train_dataloader()
    assert {name: len(loader) for name, loader in train.items()} == {"a": 2, "b": 1}
    assert [len(loader) for loader in data.val_dataloader()] == [2, 1]
    assert isinstance(data.predict_dataloader(), DataLoader)


def test_batch_size_and_workers_reach_the_loaders():
    loader = DataModule.from_datasets(
        test_dataset=torch.arange(8), batch_size=4, num_workers=2
    ).test_dataloader()
    assert (loader.batch_size, loader.num_workers) == (4, 2)


def test_other_arguments_reach_the_constructor():
    class Data(DataModule):
        def __init__(self, root):
            super().__init__()
            self.root = root

    assert Data.from_datasets(torch.arange(2), root="here").root == "here"
