"""Data that can only be read in order, on several processes: read by the main process, and whole on each of them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
)

import trainer_kit as tk
from trainer_kit.accelerator.uneven_batches import evened
from trainer_kit.core.errors import RankError

pytestmark = pytest.mark.world_size(2)


class Shuffles(IterableDataset):
    """Shuffles by itself, from the process's own generators."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        order = (
            torch.randperm(self.count).tolist()
            if info is None
            else range(info.id, self.count, info.num_workers)
        )
        yield from order


class Place(Shuffles):
    """The same order in each process, and a state: torchdata's protocol."""

    at = 0

    def __iter__(self):
        while self.at < self.count:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Fails(Shuffles):
    def __iter__(self):
        yield from range(4)
        raise KeyError("the reader of the main process")


def made(loader, **options):
    accelerator = tk.Accelerator(
        cpu=True, dataloader_config=tk.DataLoaderConfiguration(**options)
    )
    return accelerator, accelerator.prepare(loader)


def epoch(accelerator, data):
    """What metrics see, of an epoch in which every process has equally many samples in each batch."""
    seen = []
    for batch in data:
        assert accelerator.gather(batch).numel() == batch.numel() * 2
        seen += accelerator.gather_for_metrics(batch).tolist()
    assert data.end_of_dataloader
    return seen


@pytest.mark.parametrize("workers", [0, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_each_sample_comes_once_and_the_last_batch_is_filled_up(workers):
    """Workers have a last batch each, so that one before the last is short, too."""
    for count, batches in (
        ((15, 4), (13, 4), (12, 3), (1, 1)) if not workers else ((9, 3), (11, 3))
    ):
        accelerator, data = made(
            DataLoader(Shuffles(count), batch_size=2, num_workers=workers)
        )
        torch.manual_seed(accelerator.process_index)
        for _ in range(2):
            assert sorted(epoch(accelerator, data)) == list(range(count))
            assert len(list(data)) == batches


def test_the_last_batch_is_filled_up_when_each_process_reads_the_whole_stream():
    accelerator, data = made(
        DataLoader(Place(15), batch_size=2), dispatch_batches=False
    )
    assert epoch(accelerator, data) == epoch(accelerator, data) == list(range(15))
    assert "every process reads all of it" in accelerator.explain()


def test_no_batch_is_filled_up_without_even_batches():
    for dispatch in (None, False):
        accelerator, data = made(
            DataLoader(Place(13), batch_size=2),
            dispatch_batches=dispatch,
            even_batches=False,
        )
        mine = [batch.tolist() for batch in data]
        expected = [[[0, 1], [4, 5], [8, 9], [12]], [[2, 3], [6, 7], [10, 11]]]
        assert mine == expected[accelerator.process_index]


@pytest.mark.parametrize("data", [Place(13), TensorDataset(torch.arange(13))])
def test_drop_last_drops_the_samples_that_do_not_fill_a_batch_for_each_process(data):
    loader = made(
        DataLoader(data, batch_size=2, drop_last=True), dispatch_batches=True
    )[1]
    read = [batch[0] if isinstance(batch, list) else batch for batch in loader]
    assert [len(batch) for batch in read] == [2, 2, 2]
    assert loader.end_of_dataloader
    if isinstance(data, TensorDataset):
        assert len(loader) == 3


@pytest.mark.parametrize("kind", [Place, Shuffles])
@pytest.mark.parametrize("dispatch", [None, False])
@pytest.mark.filterwarnings("ignore:.*batch(es were| was) read:UserWarning")
def test_a_resumed_epoch_ends_as_the_whole_one(kind, dispatch, tmp_path):
    """With the samples that fill the last batch up."""

    def start():
        torch.manual_seed(3)
        return made(DataLoader(kind(15), batch_size=2), dispatch_batches=dispatch)

    accelerator, data = start()
    whole = [accelerator.gather(batch).tolist() for batch in data]
    for stop in range(1, 4):
        accelerator, data = start()
        for number, _ in enumerate(data, 1):
            if number == stop:
                accelerator.save_state(tmp_path / "state")
                break
        accelerator, data = start()
        accelerator.load_state(tmp_path / "state")
        assert [accelerator.gather(batch).tolist() for batch in data] == whole[stop:]


def test_an_error_of_the_reader_is_one_on_every_process():
    accelerator, data = made(DataLoader(Fails(0), batch_size=1))
    with pytest.raises(
        KeyError if accelerator.is_main_process else RankError,
        match="the reader of the main process",
    ):
        list(data)
    assert accelerator.gather(torch.ones(1)).shape == (2,)


def test_processes_that_share_a_batch_get_it_from_one_reader():
    accelerator = tk.Accelerator(
        cpu=True, parallelism_config=tk.ParallelismConfig(tp_size=2)
    )
    torch.manual_seed(accelerator.process_index)
    data = accelerator.prepare(DataLoader(Shuffles(5), batch_size=2))
    for batch in data:
        both = accelerator.gather(batch).tensor_split(2)
        assert torch.equal(*both)
        assert accelerator.gather_for_metrics(batch).tolist() == batch.tolist()
    assert data.end_of_dataloader


def test_a_window_ends_with_the_stream():
    accelerator = tk.Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, data = accelerator.prepare(
        torch.nn.Linear(1, 1), DataLoader(Shuffles(15), batch_size=2)
    )
    syncs, remainders = [], []
    for batch in data:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch[:, None].float()).mean())
            syncs.append(accelerator.sync_gradients)
            remainders.append(accelerator.gradient_state.remainder)
    assert syncs == [False, False, True, True]
    assert remainders == [-1, -1, -1, 3]


def test_sequences_of_different_lengths_are_filled_up():
    def padded(samples):
        return {
            "ids": pad_sequence(
                [torch.full((1 + i,), i) for i in samples], batch_first=True
            ),
            "names": samples,
        }

    accelerator, data = made(DataLoader(Place(7), batch_size=2, collate_fn=padded))
    rows = []
    for batch in data:
        assert len(batch["ids"]) == len(batch["names"]) == 2
        ids = accelerator.pad_across_processes(batch["ids"], dim=1)
        rows += accelerator.gather_for_metrics(ids)[:, 0].tolist()
    assert rows == list(range(7))


def test_turns_of_every_kind():
    """No process needs another for this: what becomes of the batches of a short turn."""
    pair = [torch.arange(4).view(2, 2), torch.arange(2)]
    one = [torch.full((1, 2), 9), torch.tensor([9])]
    parts, counts = evened([(pair, 2), (one, 1)], 2, True)
    assert [(x[0].tolist(), x[1].tolist(), n) for x, n in parts] == [
        ([[0, 1], [2, 3]], [0, 1], 2),
        ([[9, 9], [0, 1]], [9, 0], 2),
    ]
    assert counts == [2, 1]
    parts, counts = evened(
        [({"x": torch.arange(3), "name": ["a", "b", "c"], "of": "all"}, 3)], 2, True
    )
    assert [(p["x"].tolist(), p["name"], p["of"], n) for p, n in parts] == [
        ([0, 1], ["a", "b"], "all", 2),
        ([2, 0], ["c", "a"], "all", 2),
    ]
    assert counts == [2, 1]
    images = [torch.zeros(3, 4, 4)] * 3
    thing = object()
    for batch in (images, thing, {"table": torch.zeros(7), "x": torch.zeros(3)}):
        parts, counts = evened([(batch, 3)], 2, False)
        assert all(part is batch and n == 3 for part, n in parts), (
            "what cannot be cut stays whole"
        )
        assert counts == [3, 0]


def test_batches_of_a_batch_sampler_are_filled_up_too():
    data = TensorDataset(torch.arange(22))
    loader = DataLoader(
        data, batch_sampler=BatchSampler(RandomSampler(data), 4, drop_last=False)
    )
    accelerator, prepared = made(loader)
    seen = []
    for (batch,) in prepared:
        assert len(accelerator.gather(batch)) == 8
        seen += accelerator.gather_for_metrics(batch).tolist()
    assert sorted(seen) == list(range(22))
    loader = DataLoader(
        TensorDataset(torch.arange(9)),
        batch_sampler=BatchSampler(range(9), 4, drop_last=False),
    )
    accelerator, prepared = made(loader)
    assert [len(accelerator.gather(batch)) for (batch,) in prepared] == [8, 8]


def test_a_sampler_without_a_length():
    class Unsized(Sampler):
        def __iter__(self):
            return iter(range(7))

    accelerator, data = made(
        DataLoader(TensorDataset(torch.arange(7)), batch_size=2, sampler=Unsized())
    )
    seen = list(
        itertools.chain.from_iterable(
            accelerator.gather_for_metrics(batch).tolist() for (batch,) in data
        )
    )
    assert seen == list(range(7))
    assert data.end_of_dataloader
