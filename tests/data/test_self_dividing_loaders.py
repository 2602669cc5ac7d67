"""Loaders that divide the data among ranks themselves are not divided again."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, Sampler

import trainer_kit as tk
from trainer_kit.core.errors import ConfigurationError, DataError
from trainer_kit.data import CombinedLoader
from trainer_kit.data.division import divide_by_itself, fingerprint

OPTIONS: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 2,
    "strategy": "ddp",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "num_sanity_val_steps": 0,
}


class Whole(IterableDataset[Any]):
    """Yields all samples on every rank."""

    def __init__(self, count: int = 20) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        yield from torch.arange(self.count).float().unsqueeze(1)


class Asks(Whole):
    """Asks torch for its rank while it is read: no attribute tells that it divides the data."""

    def __iter__(self) -> Iterator[Any]:
        yield from (
            torch.arange(dist.get_rank(), self.count, dist.get_world_size())
            .float()
            .unsqueeze(1)
        )


class Knows(Asks):
    """Holds its rank where litdata (``distributed_env``) and Hugging Face (``_distributed``) have it."""

    def __init__(self, name: str, count: int = 20) -> None:
        super().__init__(count)
        ranks = SimpleNamespace(
            world_size=dist.get_world_size(),
            rank=dist.get_rank(),
            global_rank=dist.get_rank(),
        )
        setattr(self, name, ranks)


class Resumable(Asks):
    """With torchdata's state."""

    def __init__(self, count: int = 20) -> None:
        super().__init__(count)
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at * dist.get_world_size() + dist.get_rank() < self.count:
            self.at += 1
            yield torch.tensor(
                [(self.at - 1.0) * dist.get_world_size() + dist.get_rank()]
            )
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class OwnSampler(Sampler[int]):
    """As mmengine's: no ``num_replicas``."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, self.count, self.world_size))

    def __len__(self) -> int:
        return len(range(self.rank, self.count, self.world_size))


class Sees(tk.TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.trained: list[float] = []
        self.validated: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trained += batch.flatten().tolist()
        return self.layer(batch / 20).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += batch.flatten().tolist()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def everywhere(values: list[float]) -> list[float]:
    """The sorted values of all ranks."""
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, values)
    return sorted(value for row in rows for value in row)


def batches(dataset: Any, workers: int = 0) -> DataLoader[Any]:
    warnings.filterwarnings("ignore", message="the first batch|.* cannot skip by index")
    return DataLoader(dataset, batch_size=2, num_workers=workers)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "name",
    [
        "asks",
        "distributed_env",
        "_distributed",
        "whole",
        "sampler",
        "iterator",
        "uneven",
    ],
)
def test_every_sample_is_read_once_an_epoch(name: str) -> None:
    loader: Any = {
        "asks": lambda: batches(Asks()),
        "distributed_env": lambda: batches(Knows("distributed_env")),
        "_distributed": lambda: batches(Knows("_distributed")),
        "whole": lambda: batches(Whole()),
        "sampler": lambda: DataLoader(
            torch.arange(20.0).unsqueeze(1), batch_size=2, sampler=OwnSampler(20)
        ),
        "iterator": lambda: (batch for batch in batches(Whole(40))),
        "uneven": lambda: batches(Asks(17)),
    }[name]()
    expected = [
        float(i)
        for i in range(17 if name == "uneven" else 40 if name == "iterator" else 20)
    ]
    module = Sees()
    trainer = tk.Trainer(**OPTIONS, max_epochs=1 if name == "iterator" else 2)
    with warnings.catch_warnings(record=True) as lines:
        warnings.simplefilter("always")
        trainer.fit(module, loader, None if name == "iterator" else loader)
    epochs = trainer.current_epoch
    assert everywhere(module.trained) == sorted(expected * epochs)
    if name != "iterator":
        assert sorted(set(everywhere(module.validated))) == expected
        assert len(everywhere(module.validated)) == 2 * len(expected)
        trainer.predict(module, loader)
    told = ["differs from rank to rank" in str(line.message) for line in lines]
    assert any(told) == (name in ("asks", "uneven") and dist.get_rank() == 0)


@pytest.mark.world_size(2)
def test_every_sample_of_a_window_is_counted() -> None:
    """Four samples on one rank and three on the other are seven, in two micro-batches of one step."""
    trainer = tk.Trainer(**OPTIONS, max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(Sees(), batches(Knows("distributed_env", 7)))
    assert (trainer.global_step, trainer.progress.samples) == (1, 7)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "mode", ["min_size", "max_size_cycle", "max_size", "sequential"]
)
def test_several_loaders_that_end_at_different_times(mode: Any) -> None:
    class Both(Sees):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            parts = (
                [batch]
                if isinstance(batch, torch.Tensor)
                else [part for part in batch if part is not None]
            )
            return super().training_step(torch.cat(parts), batch_idx)

    module = Both()
    loader = CombinedLoader([batches(Asks(5)), batches(Whole(12))], mode)
    trainer = tk.Trainer(**OPTIONS, max_epochs=2)
    trainer.fit(module, loader)
    assert trainer.current_epoch == 2
    if mode == "sequential":
        assert everywhere(module.trained) == sorted(
            [*map(float, range(5)), *map(float, range(12))] * 2
        )


@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", [Asks, Resumable, Whole])
def test_a_resume_reads_the_rest(kind: Any, tmp_path: Path) -> None:
    path = tmp_path / "state"
    first = tk.Trainer(**OPTIONS, max_steps=2)
    begun = Sees()
    first.fit(begun, batches(kind()))
    first.save_checkpoint(path)
    module = Sees()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tk.Trainer(**OPTIONS, max_epochs=2).fit(module, batches(kind()), ckpt_path=path)
    expected = [float(i) for i in range(20)]
    assert everywhere(begun.trained + module.trained) == sorted(expected * 2)


@pytest.mark.world_size(2)
def test_a_loader_for_other_ranks_is_refused() -> None:
    dataset = Whole()
    dataset.distributed_env = SimpleNamespace(world_size=4, global_rank=dist.get_rank())  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="shards the data differently"):
        tk.Trainer(**OPTIONS, max_epochs=1).fit(Sees(), batches(dataset))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["asks", "knows", "whole", "uneven", "few"])
def test_the_accelerator_leaves_them_alone(name: str) -> None:
    accelerator = tk.Accelerator(cpu=True)
    dataset: Any = {
        "asks": lambda: Asks(),
        "knows": lambda: Knows("distributed_env"),
        "whole": lambda: Whole(),
        "uneven": lambda: Asks(17),
        "few": lambda: Asks(5),
    }[name]()
    loader = accelerator.prepare(batches(dataset))
    for _ in range(2):
        gathered: list[float] = []
        ends = []
        for batch in loader:
            gathered += accelerator.gather_for_metrics(batch).flatten().tolist()
            ends.append(accelerator.gradient_state.end_of_dataloader)
        assert sorted(gathered) == [float(i) for i in range(dataset.count)]
        assert ends == [False] * (len(ends) - 1) + [True]


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "mode", ["min_size", "max_size_cycle", "max_size", "sequential"]
)
@pytest.mark.parametrize("name", ["asks", "knows", "both", "indexed", "sampler"])
def test_the_accelerator_searches_the_leaves_of_a_combined_loader(
    name: str, mode: Any
) -> None:
    """Each sample of each leaf is read once, whichever of them divides the data."""
    accelerator = tk.Accelerator(cpu=True)
    rows = torch.arange(20.0, 40.0).unsqueeze(1)
    leaves: Any = {
        "asks": lambda: [batches(Asks()), batches(rows)],
        "knows": lambda: [batches(Knows("distributed_env")), batches(Whole())],
        "both": lambda: [batches(Asks()), batches(Knows("_distributed"))],
        "indexed": lambda: [batches(Knows("_distributed")), batches(rows)],
        "sampler": lambda: [
            DataLoader(rows, batch_size=2, sampler=OwnSampler(20)),
            batches(Asks()),
        ],
    }[name]()
    loader = accelerator.prepare(CombinedLoader(leaves, mode))
    for _ in range(2):
        seen: list[float] = []
        firsts: list[float] = []
        ends = []
        for batch in loader:
            parts = [batch] if mode == "sequential" else list(batch)
            firsts += parts[0].flatten().tolist()
            seen += [value for part in parts for value in part.flatten().tolist()]
            ends.append(accelerator.gradient_state.end_of_dataloader)
        expected = [float(i) for i in range(20)]
        others = (
            [i + 20.0 for i in expected]
            if name in ("asks", "indexed", "sampler")
            else expected
        )
        assert everywhere(seen) == sorted(expected + others)
        if mode != "sequential":
            assert everywhere(firsts) == (others if name == "sampler" else expected)
        assert ends == [False] * (len(ends) - 1) + [True]


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "mode", ["min_size", "max_size_cycle", "max_size", "sequential"]
)
def test_leaves_that_end_at_different_times_under_the_accelerator(mode: Any) -> None:
    accelerator = tk.Accelerator(cpu=True)
    loader = accelerator.prepare(
        CombinedLoader([batches(Asks(5)), batches(Whole(12))], mode)
    )
    counts = [sum(1 for _ in loader) for _ in range(2)]
    assert len(set(everywhere([float(count) for count in counts]))) == 1


@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", [Asks, Resumable])
def test_a_combined_loader_resumes_under_the_accelerator(
    kind: Any, tmp_path: Path
) -> None:
    def combined() -> CombinedLoader:
        return CombinedLoader(
            [batches(kind()), batches(torch.arange(20.0).unsqueeze(1))]
        )

    def read(loader: Any, seen: list[float]) -> int:
        for index, parts in enumerate(loader):
            seen += [value for part in parts for value in part.flatten().tolist()]
            if index == 1 and not resumed:
                accelerator.save_state(tmp_path / "state")
                return index
        return -1

    seen: list[float] = []
    for resumed in (False, True):
        accelerator = tk.Accelerator(cpu=True)
        loader = accelerator.prepare(combined())
        if resumed:
            accelerator.load_state(tmp_path / "state")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read(loader, seen)
    assert everywhere(seen) == sorted([float(i) for i in range(20)] * 2)


def test_a_combined_loader_of_prepared_loaders_is_not_divided_again() -> None:
    accelerator = tk.Accelerator(cpu=True)
    leaf = accelerator.prepare(batches(Whole()))
    combined = CombinedLoader([leaf, leaf])
    assert accelerator.prepare(combined) is combined
    with pytest.raises(ConfigurationError, match="1 of 2 prepared"):
        accelerator.prepare(CombinedLoader([leaf, batches(Whole())]))


@pytest.mark.world_size(2)
def test_the_accelerator_refuses_to_dispatch_a_part() -> None:
    options = tk.DataLoaderConfiguration(dispatch_batches=True)
    accelerator = tk.Accelerator(cpu=True, dataloader_config=options)
    with pytest.raises(ConfigurationError, match="only that process's part"):
        accelerator.prepare(batches(Knows("distributed_env")))


@pytest.mark.world_size(2)
def test_the_accelerator_resumes_them(tmp_path: Path) -> None:
    accelerator = tk.Accelerator(cpu=True)
    loader = accelerator.prepare(batches(Asks()))
    seen: list[float] = []
    states = []
    for index, batch in enumerate(loader):
        seen += batch.flatten().tolist()
        if index == 1:
            states.append(loader.state_dict())
            break
    again = accelerator.prepare(batches(Asks()))
    again.load_state_dict(states[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen += [value for batch in again for value in batch.flatten().tolist()]
    assert everywhere(seen) == [float(i) for i in range(20)]


def test_what_divides_for_one_rank_divides_nothing() -> None:
    dataset = Whole()
    dataset.distributed_env = SimpleNamespace(world_size=1, global_rank=0)  # type: ignore[attr-defined]
    assert divide_by_itself(batches(dataset)) is None


@pytest.mark.parametrize(
    ("batch", "other"),
    [
        ({"a": torch.ones(2)}, {"a": torch.zeros(2)}),
        ({"a": [1, "x"]}, {"a": [1, "y"]}),
        ([torch.ones(2, dtype=torch.bfloat16)], [torch.zeros(2, dtype=torch.bfloat16)]),
        (torch.ones(()), torch.zeros(())),
    ],
)
def test_a_fingerprint_tells_batches_apart(batch: Any, other: Any) -> None:
    assert fingerprint(batch) == fingerprint(batch) != fingerprint(other)
