"""A run goes on in the middle of an epoch on another number of ranks: no sample twice, none left out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

import trainer_kit as tk
from trainer_kit import Trainer, TrainModule
from trainer_kit.core.errors import CheckpointError
from trainer_kit.testing import run_distributed


class Ids(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += batch[0].long().flatten().tolist()
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stream(IterableDataset[Any]):
    """24 samples, without a place."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        start, self.at = self.at, 0
        for i in range(start, 24):
            self.at = i + 1
            yield (torch.tensor([float(i)]),)


class Placed(Stream):
    """With a place that can be saved."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def loader(kind: str) -> Any:
    data = TensorDataset(torch.arange(24.0).unsqueeze(1))
    if kind == "list":
        return [[batch.unsqueeze(1)] for batch in torch.arange(24.0).split(2)]
    if kind == "in turn":
        return tk.CombinedLoader([loader("map-style"), loader("list")], "sequential")
    if kind == "batch sampler":
        return DataLoader(
            data, batch_sampler=BatchSampler(RandomSampler(data), 2, False)
        )
    if kind == "generator":
        return DataLoader(
            data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(4)
        )
    if kind == "stream":
        return DataLoader(Stream(), batch_size=2)
    if kind == "stream with a state":
        return DataLoader(Placed(), batch_size=2)
    return DataLoader(data, batch_size=2, shuffle=True)


OTHERS = ["list", "batch sampler", "generator", "stream"]
KINDS = [
    "map-style",
    "stream with a state",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS),
]


def train(
    directory: str, ranks: int, batches: int, resume: bool, kind: str = "map-style"
) -> list[int]:
    module = Ids()
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        seed=1,
        max_epochs=1,
        limit_train_batches=1.0,
        max_steps=batches,
        barebones=True,
    )
    data = loader(kind)
    path = Path(directory) / "cut"
    trainer.fit(module, data, ckpt_path=path if resume else None)
    if not resume:
        trainer.save_checkpoint(path)
    return module.seen


@pytest.mark.filterwarnings("ignore:DataLoader cannot skip by index")
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_then_one(tmp_path: Path, kind: str) -> None:
    before = run_distributed(train, 2, str(tmp_path), 2, 3, False, kind)
    after = train(str(tmp_path), 1, -1, True, kind)
    assert len(before[0] + before[1]) == len(after) == 12
    assert sorted(before[0] + before[1] + after) == list(range(24))


@pytest.mark.filterwarnings("ignore:DataLoader cannot skip by index")
@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_then_two(tmp_path: Path, kind: str) -> None:
    before = train(str(tmp_path), 1, 4, False, kind)
    after = run_distributed(train, 2, str(tmp_path), 2, -1, True, kind)
    assert sorted(before + after[0] + after[1]) == list(range(24))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:DataLoader cannot skip by index")
@pytest.mark.parametrize(
    "kind",
    [*KINDS[:2], *(pytest.param(kind, marks=pytest.mark.long) for kind in OTHERS)],
)
def test_two_ranks_then_two(tmp_path: Path, kind: str) -> None:
    whole = run_distributed(train, 2, str(tmp_path / "whole"), 2, -1, False, kind)
    before = run_distributed(train, 2, str(tmp_path), 2, 2, False, kind)
    after = run_distributed(train, 2, str(tmp_path), 2, -1, True, kind)
    assert [one + other for one, other in zip(before, after, strict=True)] == whole


def test_no_whole_number_of_batches_is_refused(tmp_path: Path) -> None:
    train(str(tmp_path), 1, 3, False)
    with pytest.raises(CheckpointError, match="do not fill whole batches"):
        run_distributed(train, 2, str(tmp_path), 2, -1, True)


# -- the same steps on any number of ranks -----------------------------------------------------------------------------


class Values:
    """A logger: losses over all ranks, by step."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def log_metrics(self, metrics: Any, step: int) -> None:
        if "loss" in metrics:
            self.losses[step] = metrics["loss"]


class Regression(TrainModule):
    """Remembers which samples each step was made of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(5, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1)
        )
        self.ids: dict[int, list[int]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, ids = batch
        self.ids.setdefault(self.global_step + 1, []).extend(ids.tolist())
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def regression(
    directory: str, ranks: int, until: int, resume: bool, options: dict[str, Any]
) -> tuple[dict[int, float], dict[int, list[int]]]:
    module, values = Regression(), Values()
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        precision="64-true",
        seed=1,
        max_epochs=3,
        max_steps=until,
        log_every_n_steps=1,
        logger=values,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    draw = torch.Generator().manual_seed(3)
    x, y = (
        torch.randn(48, 5, generator=draw).double(),
        torch.randn(48, 1, generator=draw).double(),
    )
    data = DataLoader(TensorDataset(x, y, torch.arange(48)), batch_size=1, shuffle=True)
    path = Path(directory) / "cut"
    trainer.fit(module, data, ckpt_path=path if resume else None)
    trainer.save_checkpoint(path)
    return values.losses, module.ids


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"global_batch_size": 8}, {"global_batch_size": 16, "accumulate_grad_batches": 2}],
)
@pytest.mark.parametrize(
    "chain", [(1, 2, 4, 1), pytest.param((4, 2, 1, 4), marks=pytest.mark.long)]
)
def test_steps_samples_and_losses_are_those_of_one_process(
    tmp_path: Path, chain: Any, options: Any
) -> None:
    """Cut three times, each time inside an epoch, and taken up on another number of ranks."""
    steps = 3 * 48 // options["global_batch_size"]
    cuts = [steps // 4 + 1, steps // 2 + 1, 3 * steps // 4 + 1, steps]
    expected, samples = regression(str(tmp_path / "whole"), 1, -1, False, options)
    losses: dict[int, float] = {}
    for i, (ranks, until) in enumerate(zip(chain, cuts, strict=True)):
        given = (str(tmp_path), ranks, until, i > 0, options)
        found = (
            [regression(*given)]
            if ranks == 1
            else run_distributed(regression, ranks, *given)
        )
        losses.update(found[0][0])
        for step in found[0][1]:
            together = [sample for _, ids in found for sample in ids[step]]
            assert sorted(together) == sorted(samples[step]), step
    assert sorted(losses) == list(range(1, steps + 1))
    assert losses == pytest.approx(expected, rel=1e-6)


def test_changed_batches_are_printed(tmp_path: Path, capsys: Any) -> None:
    run_distributed(regression, 2, str(tmp_path), 2, 2, False, {"global_batch_size": 8})
    regression(str(tmp_path), 1, 3, True, {"global_batch_size": 8})
    printed = capsys.readouterr().out
    assert (
        "global_batch_size=8 stays: a batch is 8 samples on each rank, of 1 now and 2 before"
        in printed
    )
    run_distributed(regression, 2, str(tmp_path), 2, 3, False, {})
    regression(str(tmp_path), 1, 4, True, {})
    printed = capsys.readouterr().out
    assert (
        "continuing at batch 6 of the epoch: 3 batches of 2 samples were trained on, batches have 1 sample now"
        in printed
    )
    assert "global_batch_size= keeps" in printed


def test_several_loaders_in_turn_stay_on_as_many_ranks(tmp_path: Path) -> None:
    run_distributed(train, 2, str(tmp_path), 2, 4, False, "in turn")
    with pytest.raises(
        CheckpointError, match=r"a position in batches of 4 samples of a sequential"
    ):
        train(str(tmp_path), 1, -1, True, "in turn")
