"""`check_loader` finds loaders that are not exact, and has a verdict for each check of each layout."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.data.streaming import Endless, Rewinding, Sharded
from trainer_kit.testing import LoaderReport, check_loader
from trainer_kit.testing.loader_ranks import RankReader
from trainer_kit.testing.loader_report import LoaderCheck

# Found again when torchdata's loader starts.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def statuses(report: LoaderReport, **layout: int) -> dict[str, str]:
    return {
        check.name: check.status
        for check in report.checks
        if all(getattr(check, name) == value for name, value in layout.items())
    }


def shuffled(workers: int) -> Any:
    return DataLoader(range(12), batch_size=2, shuffle=True, num_workers=workers)


def test_map_style_data_are_exact_on_one_and_two_ranks() -> None:
    report = check_loader(shuffled, workers=[0], positions=None)
    report.raise_if_failed()
    assert len(report.checks) == 15
    assert set(statuses(report).values()) == {"ok"}


@pytest.mark.slow
def test_the_matrix_of_workers_and_ranks() -> None:
    report = check_loader(shuffled, positions=2)
    report.raise_if_failed()
    assert {(check.workers, check.ranks) for check in report.checks} == {
        (0, 1),
        (0, 2),
        (2, 1),
        (2, 2),
    }
    assert statuses(report, workers=2, ranks=2) == dict.fromkeys(
        [
            "order",
            "samples",
            "state",
            "first resume",
            "second resume",
            "early end",
            "new epoch",
            "other workers",
            "other ranks",
        ],
        "ok",
    )


@pytest.mark.slow
def test_a_stream_of_another_number_of_workers_is_refused_in_words() -> None:
    report = check_loader(
        lambda workers: DataLoader(Sharded(), batch_size=3, num_workers=workers),
        ranks=[1],
        positions=2,
    )
    report.raise_if_failed()
    assert statuses(report)["other workers"] == "refused"
    assert "num_workers=0" in report.checks[-1].text


class LosesItsBuffer(Rewinding):
    """Reads two batches ahead, and its state does not hold them."""

    def __iter__(self) -> Iterator[Any]:
        waiting = []
        for batch in super().__iter__():
            waiting.append(batch)
            if len(waiting) == 3:
                yield waiting.pop(0)
        yield from waiting


class CountsRequests(Rewinding):
    """Each request for its state changes the next one."""

    requests = 0

    def state_dict(self) -> dict[str, Any]:
        self.requests += 1
        return {"i": self.i, "requests": self.requests}


class SkipsOnRequest(Rewinding):
    """A request for the state consumes a batch."""

    def __iter__(self) -> Iterator[Any]:
        self.i = 0
        while self.i < self.count:
            self.i += 1
            yield torch.tensor([self.i])

    def state_dict(self) -> dict[str, Any]:
        self.i += 1
        return {"i": self.i}


class Unseeded(Rewinding):
    """Another order in each run."""

    def __iter__(self) -> Iterator[Any]:
        order = list(range(self.count))
        random.SystemRandom().shuffle(order)
        return (torch.tensor([index]) for index in order)


class ReadsTwiceOnTwoRanks:
    """Divides its data by the environment of its rank, and reads the first batch on every rank."""

    def __init__(self) -> None:
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.rank = int(os.environ.get("RANK", 0))

    def __iter__(self) -> Iterator[Any]:
        yield torch.tensor([0])
        for index in range(1 + self.rank, 7, self.world_size):
            yield torch.tensor([index])


@pytest.mark.parametrize(
    ("kind", "failing", "text"),
    [
        (LosesItsBuffer, "first resume", "epoch 0, resumed at 2: batch 2 differs"),
        (LosesItsBuffer, "second resume", "resumed at 1 and at 2: batch 2 differs"),
        (CountsRequests, "state", "two requests after batch 1"),
        (SkipsOnRequest, "state", "differs on rank 0"),
        (Unseeded, "order", "epoch 0, in a second run"),
        (ReadsTwiceOnTwoRanks, "samples", "0 samples missing, 1 too many"),
    ],
)
def test_what_is_not_exact_is_named(kind: Any, failing: str, text: str) -> None:
    report = check_loader(lambda workers: kind(), workers=[0])
    failure = next(check for check in report.failures if check.name == failing)
    assert text in failure.text
    assert not report.ok
    assert report.exit_code == 1
    with pytest.raises(
        AssertionError, match=r"this loader is not exact\n(.*\n)*not exact: "
    ):
        report.raise_if_failed()


def test_an_error_of_the_loader_is_a_verdict() -> None:
    class Broken:
        def __iter__(self) -> Iterator[Any]:
            raise OSError("the disk is full\nsecond line")

    report = check_loader(lambda workers: Broken(), workers=[0])
    (check,) = report.checks
    assert (check.status, check.text) == ("fails", "OSError: the disk is full")


def test_an_endless_stream_needs_a_limit() -> None:
    report = check_loader(lambda workers: Endless(), workers=[0], ranks=[1], limit=3)
    report.raise_if_failed()
    assert statuses(report)["samples"] == "not checked"


class Augmented(Dataset[Any]):
    """What it draws without workers comes from the generators of the process."""

    def __getitem__(self, index: int) -> Any:
        return {"index": index, "x": torch.rand(2)}

    def __len__(self) -> int:
        return 8


def test_augmentation_without_workers_resumes_with_the_generators() -> None:
    def make_loader(workers: int) -> Any:
        return DataLoader(Augmented(), batch_size=2, num_workers=workers)

    report = check_loader(
        make_loader,
        workers=[0],
        ranks=[1],
        identify=lambda batch: batch["index"].tolist(),
    )
    report.raise_if_failed()
    assert "8 different" in report.checks[1].text


def test_the_environment_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    check_loader(shuffled, workers=[0], positions=1)
    assert os.environ["RANK"] == "5"
    assert "WORLD_SIZE" not in os.environ


@pytest.mark.slow
def test_ranks_as_processes_have_the_same_verdicts() -> None:
    local = check_loader(shuffled, workers=[0], positions=1)
    assert check_loader(shuffled, workers=[0], positions=1, processes=True) == local


@pytest.mark.parametrize("options", [{"epochs": 1}, {"workers": []}, {"ranks": []}])
def test_nothing_to_compare_is_an_error(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="at least 2 epochs"):
        check_loader(shuffled, **options)


def test_plain_data() -> None:
    report = check_loader(shuffled, workers=[0], ranks=[1], positions=1)
    plain = report.to_dict()
    assert plain["ok"] is True
    assert plain["checks"][0]["name"] == "order"


def test_nothing_checked_is_no_success() -> None:
    """An empty loader was exact."""
    report = check_loader(lambda workers: DataLoader([]), workers=[0])
    assert not report.ok
    assert report.checks[0].text == "an epoch without a batch"
    unchecked = LoaderCheck(
        "samples", 0, 1, "not checked", "limited to 3 batches of an epoch"
    )
    for empty in (LoaderReport([]), LoaderReport([unchecked])):
        assert not empty.ok
        assert str(empty).splitlines()[-1].startswith("nothing was checked")


def test_only_the_states_of_resumed_positions_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One for every batch filled the memory."""
    kept = []
    read = RankReader.read

    def counted(self: RankReader, *args: Any, **options: Any) -> Any:
        result = read(self, *args, **options)
        kept.append(len(result.positions))
        return result

    monkeypatch.setattr(RankReader, "read", counted)
    loader = DataLoader(range(200), batch_size=2)
    check_loader(lambda workers: loader, workers=[0], positions=2).raise_if_failed()
    assert 0 < max(kept) <= 4
