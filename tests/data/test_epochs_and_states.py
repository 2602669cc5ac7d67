"""Epochs reach copies of a data set in workers, and a loader is not asked for its state before that is restored."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

import trainer_kit as tk
from tests.parity.language import Speaker, make_language
from trainer_kit.accelerator.script_names import prepare_data_loader
from trainer_kit.core.errors import CheckpointError
from trainer_kit.data import CombinedLoader, Feed, warn_if_inexact
from trainer_kit.strategies import MeshStrategy

OPTIONS: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


class HasEpoch:
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Shuffled(HasEpoch, IterableDataset[Any]):
    """Another order in each epoch."""

    def __iter__(self) -> Iterator[Any]:
        order = list(range(12))
        random.Random(self.epoch).shuffle(order)
        yield from torch.tensor(order).float().unsqueeze(1)


class Grows(HasEpoch, Dataset[Any]):
    """A map-style data set, each sample of which shows the epoch of this copy."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(self.epoch)])


class Collates(HasEpoch):
    def __call__(self, samples: list[Any]) -> Any:
        return torch.stack(samples) * 0 + self.epoch


class Sees(tk.TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += batch.flatten().tolist()
        return self.layer(batch / 20).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(
    loader: Any, path: Any = None, **options: Any
) -> tuple[tk.Trainer, list[float]]:
    module = Sees()
    trainer = tk.Trainer(**OPTIONS, **options)
    trainer.fit(module, loader, ckpt_path=path)
    return trainer, module.seen


STARTS_AGAIN = "ignore:the persistent workers of this DataLoader start again"


@pytest.mark.filterwarnings(STARTS_AGAIN)
@pytest.mark.slow
def test_persistent_workers_read_each_epoch_in_its_own_order(tmp_path: Path) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(
            Shuffled(), batch_size=2, num_workers=1, persistent_workers=True
        )

    _, seen = fitted(loader(), max_epochs=2)
    orders = [list(range(12)), list(range(12))]
    for epoch, order in enumerate(orders):
        random.Random(epoch).shuffle(order)
    assert seen == [float(i) for order in orders for i in order]
    trainer, _ = fitted(loader(), max_steps=8)
    trainer.save_checkpoint(tmp_path / "state")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, rest = fitted(loader(), tmp_path / "state", max_epochs=2)
    assert rest == seen[16:]


@pytest.mark.filterwarnings(STARTS_AGAIN)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["data set", "inside", "collate_fn"])
def test_persistent_workers_of_a_map_style_data_set(name: str) -> None:
    data: Any = Subset(Grows(), range(4)) if name == "inside" else Grows()
    options: dict[str, Any] = {"collate_fn": Collates()} if name == "collate_fn" else {}
    loader = DataLoader(
        data, batch_size=2, num_workers=1, persistent_workers=True, **options
    )
    _, seen = fitted(loader, max_epochs=3)
    assert seen == [float(epoch) for epoch in range(3) for _ in range(4)]


@pytest.mark.filterwarnings(STARTS_AGAIN)
@pytest.mark.slow
def test_persistent_workers_with_the_accelerator() -> None:
    loader = tk.Accelerator(cpu=True).prepare(
        DataLoader(Shuffled(), num_workers=1, persistent_workers=True)
    )
    first, second = ([float(batch) for batch in loader] for _ in range(2))
    assert first != second
    assert sorted(first) == sorted(second)


def test_other_persistent_workers_stay() -> None:
    from trainer_kit.data.source import copied

    plain: Any = DataLoader(range(4), num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
    moves: Any = DataLoader(Shuffled(), num_workers=1, persistent_workers=True)
    assert copied(plain, warns=True)[0].persistent_workers
    assert not copied(moves, warns=False)[0].persistent_workers
    assert moves.persistent_workers  # the user's loader does not change


def test_workers_that_start_again_get_one_line() -> None:
    loader: Any = DataLoader(
        Shuffled(), batch_size=2, num_workers=1, persistent_workers=True
    )
    line = (
        "workers of this DataLoader start again for each epoch: set_epoch of Shuffled"
    )
    with pytest.warns(UserWarning, match=line) as lines:
        fitted(loader, max_epochs=2)
    assert len(lines) == 1


class Begins:
    """As ``torchdata.nodes.Loader``: asked for its state it begins to read, and takes no other state afterwards."""

    def __init__(self, count: int = 6) -> None:
        self.count = count
        self.at: int | None = None
        self.loaded: int | None = None

    def __iter__(self) -> Iterator[Any]:
        if self.at is None or self.at >= self.count:
            self.at = 0 if self.loaded is None else self.loaded
            self.loaded = None
        while self.at < self.count:
            self.at += 1
            yield torch.tensor([[float(self.at - 1)]])

    def state_dict(self) -> dict[str, Any]:
        self.at = 0 if self.at is None else self.at
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["at"]


def test_a_state_is_not_asked_for_before_it_is_restored(tmp_path: Path) -> None:
    _, seen = fitted(Begins(), max_epochs=2)
    trainer, _ = fitted(Begins(), max_steps=2)
    trainer.save_checkpoint(tmp_path / "state")
    options = {
        **OPTIONS,
        "enable_checkpointing": True,
    }  # the state is tried before the first step
    module = Sees()
    tk.Trainer(**options, max_epochs=2, default_root_dir=tmp_path).fit(
        module, Begins(), ckpt_path=tmp_path / "state"
    )
    assert module.seen == seen[2:]


def test_torchdata_nodes_resume(tmp_path: Path) -> None:
    nodes = pytest.importorskip("torchdata.nodes")

    def loader() -> Any:
        order = torch.utils.data.RandomSampler(
            range(12), generator=torch.Generator().manual_seed(3)
        )
        batch = nodes.Batcher(nodes.SamplerWrapper(order), 2)
        return nodes.Loader(
            nodes.Mapper(batch, lambda ids: torch.tensor(ids).float().unsqueeze(1))
        )

    _, seen = fitted(loader(), max_epochs=2)
    trainer, _ = fitted(loader(), max_steps=2)
    trainer.save_checkpoint(tmp_path / "state")
    options = {**OPTIONS, "enable_checkpointing": True}
    module = Sees()
    tk.Trainer(**options, max_epochs=2, default_root_dir=tmp_path).fit(
        module, loader(), ckpt_path=tmp_path / "state"
    )
    assert module.seen == seen[4:]
    assert sorted(seen[12:]) == sorted(seen[:12])


def test_a_state_that_cannot_be_saved_is_refused_before_the_first_step(
    tmp_path: Path,
) -> None:
    class Unsaveable(Begins):
        def state_dict(self) -> dict[str, Any]:
            return {"at": object()}

    module = Sees()
    options = {**OPTIONS, "enable_checkpointing": True}
    with pytest.raises(CheckpointError, match="object"):
        tk.Trainer(**options, max_epochs=1, default_root_dir=tmp_path).fit(
            module, Unsaveable()
        )
    assert module.seen == []


class BufferShuffledExamplesIterable:
    """Named as that of Hugging Face datasets."""

    def __init__(self, size: int) -> None:
        self.buffer_size = size


class Buffered(IterableDataset[Any]):
    def __init__(self, size: int) -> None:
        self._ex_iterable = SimpleNamespace(
            ex_iterable=BufferShuffledExamplesIterable(size)
        )
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < 4:
            self.at += 1
            yield torch.tensor([self.at - 1.0])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def warnings_of(run: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as lines:
        warnings.simplefilter("always")
        run()
    return [str(line.message) for line in lines if "is not exact" in str(line.message)]


def test_a_shuffle_buffer_is_named_before_the_first_step_and_at_a_resume(
    tmp_path: Path,
) -> None:
    """Only a resume told it, when the samples were lost already."""

    def run(size: int = 16) -> None:
        trainer, _ = fitted(DataLoader(Buffered(size)), max_steps=2)
        trainer.save_checkpoint(tmp_path / f"state-{size}")

    def resume() -> None:
        fitted(DataLoader(Buffered(16)), tmp_path / "state-16", max_epochs=2)

    for each in (run, resume):
        (line,) = warnings_of(each)
        assert (
            "resuming this DataLoader from a saved state is not exact: the data set"
            " shuffles in a buffer of 16"
        ) in line
        assert "use tk.data.shuffle" in line
    assert warnings_of(lambda: run(1)) == []


def test_the_reason_comes_before_the_first_batch() -> None:
    class Unread(Buffered):
        def __iter__(self) -> Iterator[Any]:
            raise AssertionError("it was read")

    def run() -> None:
        with pytest.raises(AssertionError, match="it was read"):
            fitted(DataLoader(Unread(16)), max_steps=1)

    assert len(warnings_of(run)) == 1


class RandomlyCyclingMultiSourcesExamplesIterable:
    """Named as that of Hugging Face datasets."""


class Interleaved(Buffered):
    def __init__(self) -> None:
        super().__init__(1)
        self._ex_iterable = SimpleNamespace(
            ex_iterable=RandomlyCyclingMultiSourcesExamplesIterable()
        )


def joined_streams(kind: str) -> Buffered:
    """Two streams, the second one shuffled in a buffer, behind many operations on the whole."""
    inputs = [SimpleNamespace(ex_iterable=None), BufferShuffledExamplesIterable(9)]
    operation = type(kind, (SimpleNamespace,), {})(ex_iterables=inputs)
    for _ in range(40):
        operation = SimpleNamespace(ex_iterable=operation)
    stream = Buffered(1)
    stream._ex_iterable = operation
    return stream


@pytest.mark.parametrize(
    "kind",
    [
        "CyclingMultiSourcesExamplesIterable",
        "VerticallyConcatenatedMultiSourcesExamplesIterable",
        "HorizontallyConcatenatedMultiSourcesExamplesIterable",
    ],
)
def test_a_shuffle_buffer_in_one_of_several_streams_is_named(kind: str) -> None:
    """Only the chain of one stream was searched, and 16 operations of it."""
    loader = DataLoader(joined_streams(kind))
    (line,) = warnings_of(lambda: fitted(loader, max_steps=1))
    assert "a buffer of 9 examples" in line


def test_operations_that_contain_each_other_are_searched_once() -> None:
    stream = Buffered(1)
    stream._ex_iterable.ex_iterable = stream._ex_iterable
    assert warnings_of(lambda: fitted(DataLoader(stream), max_steps=1)) == []


def streaming_loader(package: str, workers: int) -> Any:
    members = {
        "__module__": f"{package}.loader",
        "state_dict": lambda self: {},
        "load_state_dict": lambda self, state: None,
    }
    base = type("StreamingDataLoader", (DataLoader,), members)
    # A user's own class.
    derived = type("Mine", (base,), {"__module__": "train"})
    return derived(Stateless(1), num_workers=workers)


class Stateless(IterableDataset[Any]):
    """A stream without a state: a resume reads it again up to its position."""

    def __init__(self, size: int) -> None:
        self._ex_iterable = BufferShuffledExamplesIterable(size)

    def __iter__(self) -> Iterator[Any]:
        yield from torch.arange(6.0).unsqueeze(1)


def with_own_state(stream: Any) -> Any:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    return torchdata.StatefulDataLoader(stream)


class Wraps(Stateless):
    """A user's own stream without a state, over one that has a state."""

    def __init__(self) -> None:
        self.dataset = Buffered(9)


def test_a_stream_that_is_read_again_is_exact_and_not_warned_of(tmp_path: Path) -> None:
    """Its shuffle buffer is filled again, too."""

    def run(steps: int, state: Path | None = None) -> list[Any]:
        trainer, seen = fitted(DataLoader(Stateless(9)), state, max_steps=steps)
        trainer.save_checkpoint(tmp_path / f"{steps}")
        return seen

    all_seen: list[Any] = []
    assert warnings_of(lambda: all_seen.extend(run(5))) == []
    first_seen = run(2)
    with pytest.warns(UserWarning, match="cannot skip by index"):
        last_seen = run(5, tmp_path / "2")
    assert first_seen + last_seen == all_seen


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (lambda: DataLoader(Interleaved(), num_workers=1), "use tk.data.mix"),
        (lambda: DataLoader(Interleaved()), None),
        (lambda: streaming_loader("litdata", 0), "after a second resume"),
        (lambda: streaming_loader("streaming", 1), "use num_workers=0"),
        (lambda: streaming_loader("streaming", 0), None),
        (lambda: streaming_loader("another", 1), None),
        (lambda: DataLoader(range(4), num_workers=1, in_order=False), "in_order=False"),
        (lambda: DataLoader(range(4), in_order=False), None),
        (lambda: DataLoader(Stateless(9), num_workers=1, in_order=False), "in_order"),
        (lambda: DataLoader(Stateless(9), num_workers=1), None),
        (lambda: DataLoader(Wraps()), None),
        (lambda: with_own_state(Stateless(9)), None),
        (lambda: with_own_state(Buffered(9)), "a buffer of 9"),
        # Its position is recorded, but not by a state of the stream.
        (lambda: [DataLoader(Stateless(9)), DataLoader(range(4))], None),
        (lambda: [DataLoader(Stateless(9)), DataLoader(Buffered(7))], "a buffer of 7"),
        (lambda: {"a": [1], "b": DataLoader(Buffered(9))}, "a buffer of 9"),
        (lambda: CombinedLoader([DataLoader(Buffered(9))]), "a buffer of 9"),
        (lambda: DataLoader(tk.data.shuffle(range(4))), None),
    ],
)
def test_what_is_known_not_to_resume_exactly(loader: Any, reason: str | None) -> None:
    lines = warnings_of(lambda: warn_if_inexact(Feed(loader())))
    assert len(lines) == int(reason is not None)
    if reason is not None:
        assert reason in lines[0]


def test_accelerator_and_validation() -> None:
    """An Accelerator names each reason once: it also prepares loaders that are never resumed."""

    def prepare() -> None:
        accelerator = tk.Accelerator(cpu=True)
        accelerator.prepare(DataLoader(Buffered(16)), DataLoader(Buffered(16)))
        # Of a validation, for example.
        accelerator.prepare(DataLoader(Buffered(16)))
        accelerator.prepare(DataLoader(Buffered(9)))

    class Validates(Sees):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

    def prepare_alone() -> None:
        prepare_data_loader(DataLoader(Buffered(16)))

    def validate() -> None:
        tk.Trainer(**OPTIONS).validate(Validates(), DataLoader(Buffered(16)))

    lines = warnings_of(prepare)
    assert len(lines) == 2
    assert "a buffer of 16" in lines[0]
    assert "a buffer of 9" in lines[1]
    assert len(warnings_of(prepare_alone)) == 1
    assert warnings_of(validate) == []


class Texts(Buffered):
    def __iter__(self) -> Iterator[Any]:
        for _ in super().__iter__():
            yield torch.ones(8, dtype=torch.long), torch.ones(8, dtype=torch.long)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("how", ["fit", "prepare", "setup"])
def test_one_rank_names_the_reason(how: str) -> None:
    """Every rank of tensor parallelism is rank 0 of the data, and so is a process that reads its own loader."""

    def fit() -> None:
        plan = tk.ParallelPlan(tensor="llama")
        options = {**OPTIONS, "devices": 2, "max_steps": 1}
        trainer = tk.Trainer(**options, strategy=MeshStrategy(tp=2))
        loader = DataLoader(Texts(16), batch_size=2)
        trainer.fit(Speaker(make_language(), plan), loader)

    def prepare() -> None:
        sizes = tk.ParallelismConfig(tp_size=2)
        accelerator = tk.Accelerator(cpu=True, parallelism_config=sizes)
        accelerator.prepare(DataLoader(Texts(16)))

    def setup() -> None:
        fabric = tk.Fabric(accelerator="cpu", devices=2)
        fabric.launch()
        loader = DataLoader(Texts(16))
        fabric.setup_dataloaders(loader, use_distributed_sampler=False)

    runs = {"fit": fit, "prepare": prepare, "setup": setup}
    expected = int(dist.get_rank() == 0)
    assert len(warnings_of(runs[how])) == expected
