"""``trainer-kit verify --data``: the training loaders of a script, read and resumed in several layouts."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import trainer_kit as tk
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.data import Feed
from trainer_kit.testing import LoaderReport, TinyModule
from trainer_kit.testing.loaders import check_feeds
from trainer_kit.verify.training_data import TrainingData

SCRIPT = """
import sys
import torch
import trainer_kit as tk
from trainer_kit.testing import TinyModule

class Buffered:
    def __init__(self):
        self.i = 0

    def __iter__(self):
        waiting = []
        while self.i < 10:
            waiting.append(torch.full((2, 32), float(self.i)))
            self.i += 1
            if len(waiting) > 2:
                yield waiting.pop(0)
        yield from waiting
        self.i = 0

    def state_dict(self):
        return {"i": self.i}

    def load_state_dict(self, state):
        self.i = state["i"]

class Undivided(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.ones(6, 32))

batches = [torch.full((2, 32), float(i)) for i in range(10)]
undivided = {
    f"{workers} workers": torch.utils.data.DataLoader(Undivided(), batch_size=2, num_workers=workers)
    for workers in (0, 2)
}
loaders = {**undivided, "list": batches, "state": Buffered(), "generator": (batch for batch in batches)}
print("hello")
tk.Trainer(max_epochs=2, strategy="fsdp", devices=64, accelerator="cuda").fit(TinyModule(), loaders[sys.argv[1]])
print("trained")
"""


@pytest.fixture
def verify(tmp_path, programs):
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT), encoding="utf-8")

    def call(*words: str) -> Any:
        return programs.run_command("verify", "--data", "train.py", *words)

    return call


@pytest.mark.slow
def test_a_script_with_exact_data(verify):
    ran = verify("--json", "--", "list")
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert result["ok"]
    assert result["data"].startswith("data: list")
    names = [check["name"] for check in result["checks"] if check["ranks"] == 2]
    assert names[:4] == ["order", "samples", "state", "first resume"]
    assert names[-1] == "other ranks"
    assert "hello" in ran.stderr
    assert "trained" not in ran.stderr


@pytest.mark.slow
def test_only_workers_that_the_script_uses_can_fail(verify):
    ran = verify("--", "0 workers")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "advice      workers=2 ranks=1" in ran.stdout
    ran = verify("--", "2 workers")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "fails       workers=2 ranks=1" in ran.stdout


@pytest.mark.slow
def test_a_script_whose_loader_loses_its_buffer(verify):
    ran = verify("--batches", "6", "--", "state")
    assert ran.returncode == 1, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0].endswith("; the first 6 batches of each epoch")
    failed = [line for line in lines if line.startswith("fails")]
    assert "resumed at 2: batch 2 differs on rank 0" in failed[0]
    assert "ranks=2" in failed[-1]
    assert lines[-1].startswith("not exact: ")


@pytest.mark.slow
def test_loaders_that_cannot_be_checked(verify):
    ran = verify("--", "generator")
    assert ran.returncode == 2
    assert "cannot pickle 'generator' object" in ran.stderr
    assert "trainer_kit.testing.check_loader" in ran.stderr
    ran = verify("--steps", "3")
    assert ran.returncode == 2
    assert "--data reads loaders only: leave --steps out" in ran.stderr


def trainer(**options: Any) -> tk.Trainer:
    return tk.Trainer(accelerator="cpu", logger=False, max_epochs=1, **options)


def batches_of(feed: Feed) -> list[Any]:
    batches = [batch.flatten().tolist() for batch in islice(feed.epoch(0), 4)]
    feed.close()
    return batches


def agree(numbers: list[float]) -> list[list[float]]:
    return [numbers, numbers]


def check(data: TrainingData, **options: Any) -> LoaderReport:
    return check_feeds(data.open_feed, workers=[0], ranks=[1, 2], **options)


def test_each_feed_reads_a_copy_from_its_start() -> None:
    loader = DataLoader(
        torch.arange(12.0), batch_size=2, shuffle=True, timeout=30, num_workers=1
    )
    data = TrainingData(trainer(), TinyModule(), loader, None)
    assert data.workers == [0, 1]
    first, second, with_worker = (
        batches_of(data.open_feed(workers, 0, 1, agree)) for workers in (0, 0, 1)
    )
    assert first == second == with_worker
    assert (loader.num_workers, loader.timeout) == (1, 30)


def test_a_loader_without_workers_is_also_read_with_two() -> None:
    loader = DataLoader(torch.arange(12.0), batch_size=2)
    data = TrainingData(trainer(), TinyModule(), loader, None)
    assert data.workers == [0, 2]
    assert batches_of(data.open_feed(2, 0, 1, agree))[0] == [0.0, 1.0]

    class Special(DataLoader):
        """May derive something from its number of workers."""

    special = Special(torch.arange(12.0), batch_size=2)
    assert TrainingData(trainer(), TinyModule(), special, None).workers == [0]


def test_the_options_of_the_trainer_are_those_of_the_fit() -> None:
    loader = DataLoader(torch.arange(12.0), batch_size=1)
    data = TrainingData(trainer(global_batch_size=4), TinyModule(), loader, None)
    assert batches_of(data.open_feed(0, 1, 2, agree))[0] == [2.0, 3.0]
    check(data).raise_if_failed()
    odd = TrainingData(trainer(global_batch_size=3), TinyModule(), loader, None)
    report = check(odd)
    report.raise_if_failed()
    last = report.checks[-1]
    assert (last.name, last.ranks, last.status) == ("order", 2, "refused")
    assert "the global batch cannot be split evenly" in last.text


def test_passed_samplers_divide_for_the_ranks_that_are_checked() -> None:
    sampler = DistributedSampler(range(12), 1, 0, shuffle=False)
    loader = DataLoader(torch.arange(12.0), batch_size=2, sampler=sampler)
    data = TrainingData(trainer(), TinyModule(), loader, None)
    assert batches_of(data.open_feed(0, 1, 2, agree))[0] == [1.0, 3.0]
    assert batches_of(data.open_feed(0, 0, 1, agree))[0] == [0.0, 1.0]


class MakesItsData(TinyModule):
    """Draws its data in ``setup``, from the seed of the script."""

    def setup(self, stage: str) -> None:
        self.rows = torch.randn(8)

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, batch_size=2, shuffle=True)


def test_loaders_of_hooks_are_made_for_each_rank_from_the_same_seed() -> None:
    data = TrainingData(trainer(), MakesItsData(), None, None)
    check(data).raise_if_failed()


def test_an_epoch_is_cut_where_it_is_long() -> None:
    loader = DataLoader(torch.arange(12.0), batch_size=2)
    data = TrainingData(trainer(), TinyModule(), loader, None)
    assert data.limit(6) is None
    assert data.limit(5) == 5
    limited = trainer(limit_train_batches=3)
    assert TrainingData(limited, TinyModule(), loader, None).limit(6) == 3
    report = check(data, limit=5)
    report.raise_if_failed()
    assert report.checks[1].text == "limited to 5 batches of an epoch"


def test_a_limit_of_one_batch_is_named() -> None:
    loader = DataLoader(torch.arange(12.0), batch_size=2)
    report = check_feeds(
        TrainingData(trainer(), TinyModule(), loader, None).open_feed,
        workers=[0],
        ranks=[1],
        limit=1,
    )
    assert report.checks[1].text == "limited to 1 batch of an epoch"


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"limit_train_batches": 1}, "limit_train_batches=1"),
        ({"limit_train_batches": 0}, "limit_train_batches=0"),
        ({"overfit_batches": 1}, "overfit_batches=1"),
    ],
)
def test_an_epoch_without_a_position_to_resume_cannot_be_checked(
    options: dict[str, Any], name: str
) -> None:
    loader = DataLoader(torch.arange(12.0), batch_size=2)
    data = TrainingData(trainer(**options), TinyModule(), loader, None)
    with pytest.raises(ConfigurationError, match=f"found: {name}"):
        data.limit(6)


def test_a_fraction_of_an_epoch_does_not_limit_the_check() -> None:
    loader = DataLoader(torch.arange(12.0), batch_size=2)
    for fraction in (0.5, 1.0):
        limited = trainer(limit_train_batches=fraction)
        data = TrainingData(limited, TinyModule(), loader, None)
        assert data.limit(6) is None


class Undivided(IterableDataset):
    """Each worker reads all of it."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(8.0))


def test_workers_that_the_script_does_not_use_are_advice() -> None:
    loader = DataLoader(Undivided(), batch_size=2)
    data = TrainingData(trainer(), TinyModule(), loader, None)
    assert not data.uses_workers
    report = check_feeds(data.open_feed, workers=data.workers, ranks=[1])
    assert report.exit_code == 1
    report = report.with_workers_as_advice()
    report.raise_if_failed()
    advice = [check for check in report.checks if check.status == "advice"]
    assert {check.workers for check in advice} == {2}
    assert advice[0].text.startswith("with workers, which the script does not use: ")
    assert "epoch 0" in advice[0].text
    used = DataLoader(Undivided(), batch_size=2, num_workers=2)
    assert TrainingData(trainer(), TinyModule(), used, None).uses_workers


def test_a_fit_without_a_training_loader() -> None:
    with pytest.raises(ConfigurationError, match="the fit has no training loader"):
        TrainingData(trainer(), TinyModule(), None, None)
