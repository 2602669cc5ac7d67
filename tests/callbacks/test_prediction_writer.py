"""Predictions read back from disk, each with the index of its sample."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from tests.callbacks.fits import trainer
from trainer_kit import TrainModule
from trainer_kit.callbacks import BasePredictionWriter, PredictionWriter
from trainer_kit.core.errors import ConfigurationError, DataError


class Net(TrainModule):
    """Predicts twice the value; ``how`` says in which form."""

    def __init__(self, how=lambda batch: batch * 2):
        super().__init__()
        self.layer, self.how = torch.nn.Linear(1, 1), how

    def predict_step(self, batch, batch_idx):
        return self.how(batch)


DATA = torch.arange(7.0) * 10


def named(batch):
    return {
        "twice": batch * 2,
        "pair": torch.stack([batch, batch], 1),
        "text": [f"<{int(v)}>" for v in batch],
    }


def predicted(writer, loaders, how=lambda batch: batch * 2, **options):
    made = trainer(writer, **options)
    return made.predict(Net(how), loaders, return_predictions=False)


def test_parquet_in_the_order_of_the_dataset(tmp_path):
    import pyarrow.parquet

    loader = DataLoader(DATA, batch_size=2, sampler=RandomSampler(DATA))
    assert predicted(PredictionWriter(tmp_path), loader, named) is None
    (file,) = tmp_path.iterdir()
    assert file.name == "predictions.parquet"
    assert pyarrow.parquet.read_table(file).to_pydict() == {
        "index": list(range(7)),
        "twice": [20.0 * i for i in range(7)],
        "pair": [[10.0 * i] * 2 for i in range(7)],
        "text": [f"<{10 * i}>" for i in range(7)],
    }


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_npy_and_safetensors_for_each_batch(tmp_path, workers):
    options = {
        "num_workers": workers,
        "multiprocessing_context": "fork" if workers else None,
    }
    loader = DataLoader(DATA, batch_size=3, sampler=[6, 5, 4, 3, 2, 1, 0], **options)
    predicted(PredictionWriter(tmp_path / "npy", "batch", format="npy"), loader)
    predicted(
        PredictionWriter(tmp_path / "safe", "batch", format="safetensors"),
        loader,
        lambda b: (b, b + 1),
    )
    for number, indices in enumerate([[6, 5, 4], [3, 2, 1], [0]]):
        name = f"predictions-0-rank0-{number:05d}"
        assert np.load(tmp_path / "npy" / f"{name}.index.npy").tolist() == indices
        assert np.load(tmp_path / "npy" / f"{name}.prediction.npy").tolist() == [
            20.0 * i for i in indices
        ]
        read = load_file(tmp_path / "safe" / f"{name}.safetensors")
        assert {key: value.tolist() for key, value in read.items()} == {
            "index": indices,
            "0": [10.0 * i for i in indices],
            "1": [10.0 * i + 1 for i in indices],
        }


def test_several_loaders_and_loaders_without_indices(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(DATA)

    predicted(
        PredictionWriter(tmp_path, format="npy"),
        [DataLoader(DATA, batch_size=4), DataLoader(Stream(), batch_size=4)],
    )
    for loader in (0, 1):
        assert np.load(tmp_path / f"predictions-{loader}.index.npy").tolist() == list(
            range(7)
        )
        assert (
            np.load(tmp_path / f"predictions-{loader}.prediction.npy").tolist()
            == (DATA * 2).tolist()
        )


@pytest.mark.parametrize(
    ("how", "format", "found"),
    [
        (lambda batch: batch.sum(), "npy", "prediction: a single value"),
        (lambda batch: batch[:1], "npy", "index: 7, prediction: 1"),
        (lambda batch: {"a": batch, "text": ["x"] * 7}, "safetensors", "text: str"),
    ],
)
def test_unsupported_predictions_are_refused(tmp_path, how, format, found):
    with pytest.raises(DataError, match=found):
        predicted(
            PredictionWriter(tmp_path, format=format),
            DataLoader(DATA, batch_size=7),
            how,
        )
    assert list(tmp_path.iterdir()) == []


def test_mistakes(monkeypatch):
    with pytest.raises(ConfigurationError, match="did you mean 'batch'"):
        BasePredictionWriter("batches")
    with pytest.raises(ConfigurationError, match="did you mean 'npy'"):
        PredictionWriter(".", format="npyy")
    with pytest.raises(
        ConfigurationError, match="s3://bucket/out"
    ):  # it became a directory called s3:
        PredictionWriter("s3://bucket/out", format="npy")
    with pytest.raises(NotImplementedError, match="write_on_epoch_end"):
        predicted(BasePredictionWriter("epoch"), DataLoader(DATA))
    monkeypatch.setattr(
        "lightning_utilities.core.imports.RequirementCache.__bool__", lambda self: False
    )
    with pytest.raises(ConfigurationError, match=r"trainer-kit\[parquet\]"):
        PredictionWriter(".")


def test_a_writer_of_ones_own():
    class Own(BasePredictionWriter):
        def __init__(self):
            super().__init__("batch_and_epoch")
            self.batches, self.whole = [], None

        def write_on_batch_end(
            self,
            trainer,
            pl_module,
            prediction,
            batch_indices,
            batch,
            batch_idx,
            dataloader_idx,
        ):
            self.batches.append(
                (prediction.tolist(), batch_indices, batch_idx, dataloader_idx)
            )

        def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
            self.whole = [p.tolist() for p in predictions], batch_indices

    predicted(own := Own(), DataLoader(DATA[:3], batch_size=2))
    assert own.batches == [([0.0, 20.0], [0, 1], 0, 0), ([40.0], [2], 1, 0)]
    assert own.whole == ([[0.0, 20.0], [40.0]], [[[0, 1], [2]]])
    own = Own()
    predicted(own, [torch.ones(2)])
    assert own.batches == [([2.0, 2.0], None, 0, 0)]


@pytest.mark.slow
@pytest.mark.world_size(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("count", [7, 1])
def test_two_ranks_write_each_sample_once(tmp_path, strategy, count):
    loader = DataLoader(DATA[:count], batch_size=2)
    options = {"devices": 2, "strategy": strategy}
    predicted(PredictionWriter(tmp_path / "epoch", format="npy"), loader, **options)
    predicted(
        PredictionWriter(tmp_path / "batch", "batch", format="npy"), loader, **options
    )
    torch.distributed.barrier()
    assert np.load(tmp_path / "epoch" / "predictions.index.npy").tolist() == list(
        range(count)
    )
    assert np.load(tmp_path / "epoch" / "predictions.prediction.npy").tolist() == [
        20.0 * i for i in range(count)
    ]
    parts = [
        np.load(path).tolist()
        for path in sorted((tmp_path / "batch").glob("*.index.npy"))
    ]
    assert sorted(index for part in parts for index in part) == list(range(count))
