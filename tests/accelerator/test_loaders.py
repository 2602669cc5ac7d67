"""Prepared loaders under every use: order, length, position, and states that other processes go on from."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from trainer_kit import (
    Accelerator,
    DataLoaderConfiguration,
    PartialState,
    gather_object,
    skip_first_batches,
)
from trainer_kit.accelerator.samplers import BatchSamplerShard, SeedableRandomSampler
from trainer_kit.accelerator.script_names import prepare_data_loader
from trainer_kit.core.errors import CheckpointError, ConfigurationError

N = 22
DATA = TensorDataset(torch.arange(N))


class Stream(IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        first, every = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, N, every))


class Stateful:
    """torchdata's protocol."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 6:
            self.at += 1
            yield torch.arange(4 * self.at - 4, min(N, 4 * self.at))
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


KINDS = {
    "shuffled": lambda: DataLoader(DATA, batch_size=4, shuffle=True),
    "workers": lambda: DataLoader(DATA, batch_size=4, shuffle=True, num_workers=2),
    "stream": lambda: DataLoader(Stream(), batch_size=4),
    "batch sampler": lambda: DataLoader(
        DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 4, drop_last=False)
    ),
    "own generator": lambda: DataLoader(
        DATA, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "dispatched": lambda: DataLoader(DATA, batch_size=4, shuffle=True),
}


def make(kind, **options):
    config = DataLoaderConfiguration(dispatch_batches=kind == "dispatched", **options)
    accelerator = Accelerator(cpu=True, seed=3, dataloader_config=config)
    return accelerator, accelerator.prepare(KINDS[kind]())


def ids(batch):
    return [int(i) for i in (batch[0] if isinstance(batch, (list, tuple)) else batch)]


def read(accelerator, data):
    return [
        ids(
            (
                accelerator.gather_for_metrics(
                    batch[0] if isinstance(batch, list) else batch
                ),
            )
        )
        for batch in data
    ]


def check_resume(kind, directory):
    """Save after each batch of the second epoch; a new loader goes on, and the epoch after that is the same too."""
    accelerator, data = make(kind)
    first, whole, third = (read(accelerator, data) for _ in range(3))
    assert sorted(itertools.chain(*first)) == list(range(N))
    assert sorted(itertools.chain(*whole)) == list(range(N))
    for stop in range(1, len(whole) + 1):
        accelerator, data = make(kind)
        list(data)
        for number, _ in enumerate(data, 1):
            if number == stop:
                accelerator.save_state(directory)
                break
        accelerator, data = make(kind)
        accelerator.load_state(directory)
        assert read(accelerator, data) == whole[stop:]
        assert read(accelerator, data) == third
        accelerator, data = make(kind)
        accelerator.load_state(directory)
        assert read(accelerator, skip_first_batches(data, stop)) == whole[stop:], (
            "as Accelerate's scripts resume"
        )
        assert read(accelerator, data) == third


@pytest.mark.filterwarnings("ignore:.*is read from its start:UserWarning")
@pytest.mark.filterwarnings("ignore:.*cannot skip by index:UserWarning")
@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=pytest.mark.slow) if k == "workers" else k for k in KINDS],
)
def test_a_state_inside_an_epoch(kind, tmp_path):
    check_resume(kind, tmp_path / "state")


@pytest.mark.slow
@pytest.mark.world_size(2)
@pytest.mark.filterwarnings("ignore:.*cannot skip by index:UserWarning")
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_state_inside_an_epoch_on_two_processes(kind, tmp_path):
    check_resume(kind, tmp_path / "state")


def test_a_loader_with_its_own_state(tmp_path):
    accelerator = Accelerator(cpu=True)
    data = accelerator.prepare_data_loader(Stateful())
    for number, _ in enumerate(data, 1):
        if number == 2:
            accelerator.save_state(tmp_path / "state")
            break
    accelerator = Accelerator(cpu=True)
    data = accelerator.prepare_data_loader(Stateful())
    accelerator.load_state(tmp_path / "state")
    assert [int(batch[0]) for batch in data] == [8, 12, 16, 20]
    assert [int(batch[0]) for batch in data] == [0, 4, 8, 12, 16, 20]


@pytest.mark.filterwarnings("ignore:.*batch(es were| was) read:UserWarning")
def test_a_one_pass_iterator_continues_after_the_batches_read(tmp_path):
    def made():
        accelerator = Accelerator(cpu=True)
        return accelerator, accelerator.prepare_data_loader(
            iter([torch.tensor([i]) for i in range(8)])
        )

    accelerator, data = made()
    for number, _ in enumerate(data, 1):
        if number == 3:
            accelerator.save_state(tmp_path / "state")
    accelerator, data = made()
    accelerator.load_state(tmp_path / "state")
    assert [int(batch) for batch in data] == [3, 4, 5, 6, 7]


def test_states_of_a_loader_do_not_pile_up():
    accelerator = Accelerator(cpu=True)

    class Long(Stateful):
        def __iter__(self):
            for self.at in range(50):
                yield torch.zeros(1)

    data = accelerator.prepare_data_loader(Long())
    most = max(len(data.feed.loader_state._states) for _ in data)
    assert most <= 4


@pytest.mark.slow
def test_one_process_resumes_a_state_of_two(tmp_path):
    from trainer_kit.testing import run_distributed

    run_distributed(_two_save, 2, str(tmp_path / "state"))
    accelerator = Accelerator(cpu=True, seed=3)
    data = accelerator.prepare(DataLoader(DATA, batch_size=4, shuffle=True))
    accelerator.load_state(tmp_path / "state")
    whole = Accelerator(cpu=True, seed=3).prepare(
        DataLoader(DATA, batch_size=4, shuffle=True)
    )
    list(whole)
    assert [ids(batch) for batch in data] == [ids(batch) for batch in whole][2:], (
        "two batches of four, on each of two"
    )


def _two_save(path):
    config = DataLoaderConfiguration(split_batches=False)
    accelerator = Accelerator(cpu=True, seed=3, dataloader_config=config)
    data = accelerator.prepare(DataLoader(DATA, batch_size=4, shuffle=True))
    list(data)
    for _ in data:
        accelerator.save_state(path)
        break


def test_two_readers_at_once_get_an_epoch_each():
    _, data = make("shuffled")
    again = make("shuffled")[1]
    expected = [ids(batch) for batch in again], [ids(batch) for batch in again]
    both = list(zip(data, data, strict=True))
    assert [ids(a) for a, _ in both] == expected[0]
    assert [ids(b) for _, b in both] == expected[1]


def test_a_prepared_loader_forwards_the_attributes_of_the_users_loader():
    accelerator, data = make("shuffled")
    assert len(data) == 6
    assert data.dataset is DATA
    assert data.batch_size == 4
    assert data.total_batch_size == 4
    assert data.total_dataset_length == N
    first = [ids(batch) for batch in data]
    data.set_epoch(0)
    assert [ids(batch) for batch in data] == first
    later = accelerator.skip_first_batches(data, 5)
    assert len(later) == 1
    assert len(accelerator.skip_first_batches(data, 9)) == 0
    with pytest.raises(TypeError, match="no len"):
        len(make("stream")[1])


def test_an_epoch_that_is_set_is_not_the_one_to_go_on_with(tmp_path):
    accelerator, data = make("shuffled")
    for _ in data:
        accelerator.save_state(tmp_path / "state")
        break
    for epoch, length in ((0, 5), (1, 6)):
        accelerator, data = make("shuffled")
        accelerator.load_state(tmp_path / "state")
        data.set_epoch(epoch)
        assert len(list(data)) == length


def test_split_batches_needs_a_size_that_can_be_split():
    accelerator = Accelerator(cpu=True, split_batches=True)
    assert accelerator.split_batches
    with pytest.raises(ConfigurationError, match="split_batches needs"):
        accelerator.prepare(DataLoader(DATA, batch_size=None))


def test_even_batches_may_be_set_later():
    accelerator = Accelerator(cpu=True)
    accelerator.even_batches = False
    assert not accelerator.prepare(DataLoader(DATA)).even


class OfOwnSizes(BatchSampler):
    """Has no batch size."""

    def __init__(self):
        pass

    def __iter__(self):
        return iter([[0], [1, 2], [3, 4, 5], [6], [7, 8]])

    def __len__(self):
        return 5


@pytest.mark.world_size(2)
def test_the_batch_sampler_of_a_prepared_loader_is_that_of_the_process():
    accelerator = Accelerator(cpu=True)
    data = accelerator.prepare(DataLoader(TensorDataset(torch.arange(7)), batch_size=2))
    batches = data.batch_sampler
    assert isinstance(batches, BatchSamplerShard)
    assert (batches.batch_size, batches.num_processes, batches.process_index) == (
        2,
        2,
        accelerator.process_index,
    )
    assert isinstance(batches.sampler, SequentialSampler)
    assert list(batches) == [batch[0].tolist() for batch in data]
    with accelerator.join_uneven_inputs([], even_batches=False):
        assert not data.batch_sampler.even_batches
        assert list(batches) == [batch[0].tolist() for batch in data]
    assert batches.even_batches
    batches.even_batches = False
    assert sorted(
        gather_object([int(one) for (batch,) in data for one in batch])
    ) == list(range(7))
    split = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True)
    )
    data = split.prepare(DataLoader(TensorDataset(torch.arange(7)), batch_size=4))
    assert list(data.batch_sampler) == [batch[0].tolist() for batch in data]
    stream = accelerator.prepare(DataLoader(Stream(), batch_size=2))
    assert not isinstance(stream.batch_sampler, BatchSamplerShard)
    for count, even in (
        (19, True),
        (19, False),
        (17, False),
    ):  # a short last batch is divided
        data = accelerator.prepare(
            DataLoader(TensorDataset(torch.arange(count)), batch_size=4)
        )
        data.batch_sampler.even_batches = even
        assert list(data.batch_sampler) == [batch[0].tolist() for batch in data]
        assert len(data.batch_sampler) == len(data)
    data = accelerator.prepare(
        DataLoader(TensorDataset(torch.arange(9)), batch_sampler=OfOwnSizes())
    )
    assert list(data.batch_sampler) == [batch[0].tolist() for batch in data]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("dispatch", [False, True])
def test_the_batch_sampler_of_a_shuffled_loader_has_the_order_of_the_next_epoch(
    dispatch,
):
    config = DataLoaderConfiguration(dispatch_batches=dispatch, data_seed=3)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    given = DataLoader(TensorDataset(torch.arange(8)), batch_size=2, shuffle=True)
    data = accelerator.prepare(given)
    whole = data.batch_sampler if dispatch else data.batch_sampler.batch_sampler
    assert isinstance(whole.sampler, SeedableRandomSampler)
    assert type(given.batch_sampler.sampler) is RandomSampler
    orders = []
    for epoch in (0, 1):
        torch.manual_seed(
            accelerator.process_index
        )  # the global generators have no effect, and stay as they are
        state = torch.get_rng_state()
        order, own = list(whole.sampler), list(data.batch_sampler)
        assert torch.equal(state, torch.get_rng_state())
        assert (whole.sampler.epoch, whole.sampler.initial_seed) == (epoch, 3)
        assert order == [index for batch in whole for index in batch]
        read = [batch.tolist() for (batch,) in data]
        assert dispatch or own == read
        assert sorted(order) == list(range(8))
        assert order == [
            i
            for turn in zip(*gather_object([read]), strict=True)
            for part in turn
            for i in part
        ]
        orders.append(order)
    whole.sampler.set_epoch(0)
    assert list(whole.sampler) == orders[0] != orders[1]
    assert data.iteration == 0
    with_generator = DataLoader(
        TensorDataset(torch.arange(8)), shuffle=True, generator=torch.Generator()
    )
    inner = accelerator.prepare(with_generator).batch_sampler.sampler
    assert inner is with_generator.sampler


@pytest.mark.world_size(2)
def test_metrics_are_exact_for_every_gathered_structure():
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    data = accelerator.prepare(
        DataLoader(TensorDataset(torch.arange(21)), batch_size=4)
    )
    for view, expected in (
        (data, list(range(21))),
        (accelerator.skip_first_batches(data, 1), list(range(8, 21))),
    ):
        tensors, dicts, objects, scalars, rows = [], [], [], [], []
        for (index,) in view:
            tensors += accelerator.gather_for_metrics(index).tolist()
            nested = accelerator.gather_for_metrics(
                {"a": (index, index.double()[:, None])}
            )
            dicts += nested["a"][1][:, 0].tolist()
            objects += accelerator.gather_for_metrics([str(int(i)) for i in index])
            scalars.append(
                accelerator.gather_for_metrics(torch.tensor(float(rank))).tolist()
            )
            rows.append(
                accelerator.gather_for_metrics(torch.tensor([float(rank)])).tolist()
            )
        assert tensors == dicts == [int(text) for text in objects] == expected
        assert scalars == rows == [[0.0, 1.0]] * len(view), (
            "one value of each process is never dropped"
        )
    assert accelerator.gather_for_metrics(torch.ones(3)).shape == (6,), (
        "outside of a loader there is nothing twice"
    )


@pytest.mark.world_size(2)
def test_metrics_are_exact_without_repeated_samples():
    config = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    data = accelerator.prepare(
        DataLoader(TensorDataset(torch.arange(19)), batch_size=4)
    )
    found, sizes = [], []
    for (index,) in data:
        found += accelerator.gather_for_metrics(index).tolist()
        sizes.append(len(index))
    assert found == list(range(19))
    assert sizes == [4, 4, 2 - accelerator.process_index]


@pytest.mark.filterwarnings("ignore:.*cannot skip by index:UserWarning")
@pytest.mark.parametrize("kind", ["shuffled", "stream"])
def test_a_reading_that_failed_does_not_disturb_the_next(kind, tmp_path):
    accelerator, data = make(kind)
    try:
        for _ in data:
            raise KeyError("the traceback keeps the loop alive")
    except KeyError as error:
        kept = error
    seen = []
    for number, batch in enumerate(data, 1):
        seen.append(ids(batch))
        if number == 3:
            accelerator.save_state(tmp_path / "state")
    assert kept.__traceback__ is not None
    accelerator, data = make(kind)
    accelerator.load_state(tmp_path / "state")
    assert read(accelerator, data) == seen[3:]


@pytest.mark.parametrize(("size", "batch"), [(4, 1), (4, 2), (3, 4), (6, 1)])
def test_a_position_is_counted_in_samples(tmp_path, size, batch):
    """Batches of another size go on behind what was read before, or say that they cannot."""

    def made(size):
        accelerator = Accelerator(cpu=True, seed=0)
        return accelerator, accelerator.prepare(
            DataLoader(TensorDataset(torch.arange(10)), batch_size=size)
        )

    accelerator, loader = made(size)
    for number, _ in enumerate(loader, 1):
        if number == batch:
            accelerator.save_state(tmp_path / "state")
    for other in (1, 2, 5):
        accelerator, loader = made(other)
        if size * batch % other and size * batch < 10:
            with pytest.raises(
                CheckpointError,
                match=f"{size * batch} samples do not fill whole batches",
            ):
                accelerator.load_state(tmp_path / "state")
            continue
        accelerator.load_state(tmp_path / "state")
        found = torch.cat(
            [torch.empty(0, dtype=torch.long), *(x for (x,) in loader)]
        ).tolist()
        assert found == list(range(min(10, size * batch), 10))


def drawn(data):
    """One random number per batch, drawn inside the loop."""
    return [torch.rand(1).item() for _ in data]


@pytest.mark.slow
@pytest.mark.world_size(2)
@pytest.mark.parametrize("made_by", ["accelerator", "function"])
def test_rng_types_are_copied_from_the_main_process_at_each_epoch(made_by):
    def prepared(rng_types):
        loader = DataLoader(TensorDataset(torch.arange(16)), batch_size=4)
        if made_by == "function":
            return prepare_data_loader(loader, rng_types=rng_types)
        return Accelerator(cpu=True, rng_types=rng_types).prepare(loader)

    for rng_types, equal in ((["torch"], True), (["generator"], False), (None, False)):
        data = prepared(rng_types)
        rank = PartialState().process_index
        torch.manual_seed(rank)
        for _ in range(2):
            numbers = gather_object([drawn(data)])
            assert (numbers[0] == numbers[1]) is equal
            torch.rand(1 + rank)  # the processes draw differently between the epochs
        assert numbers[0][0] != numbers[0][1]


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_a_resumed_epoch_keeps_the_random_states_of_each_process(tmp_path):
    def run(stop):
        accelerator = Accelerator(cpu=True, rng_types=["torch"])
        data = accelerator.prepare(
            DataLoader(TensorDataset(torch.arange(16)), batch_size=4)
        )
        if not stop:
            accelerator.load_state(tmp_path / "state")
        found = []
        for number, _ in enumerate(data, 1):
            found.append(torch.rand(1 + accelerator.process_index).sum().item())
            if stop and number == 1:
                accelerator.save_state(tmp_path / "state")
        return found

    whole = run(stop=True)
    assert run(stop=False) == whole[1:]


def test_what_a_prepared_loader_cannot_do_is_refused():
    loader = DataLoader(TensorDataset(torch.arange(16)), batch_size=4)
    accelerator = Accelerator(cpu=True)
    for call in (accelerator.prepare_data_loader, prepare_data_loader):
        with pytest.raises(ConfigurationError, match="slices none"):
            call(loader, slice_fn_for_dispatch=lambda batch, part, **_: batch)
        with pytest.raises(ConfigurationError, match="did you mean 'torch'"):
            Accelerator(cpu=True, rng_types=["torhc"]).prepare(loader)
    with pytest.raises(ConfigurationError, match="use_stateful_dataloader"):
        prepare_data_loader(loader, use_stateful_dataloader="yes")
