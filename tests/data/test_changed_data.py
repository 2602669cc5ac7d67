"""A checkpoint inside an epoch of other data: the next epoch, or a line that says what has changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import trainer_kit as tk

OPTIONS: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


class Sees(tk.TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[tuple[int, list[float]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append((self.trainer.current_epoch, batch.flatten().tolist()))
        return self.layer(batch / 20).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stream(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        yield from torch.arange(self.count).float().unsqueeze(1)

    def __len__(self) -> int:
        return self.count


def data(count: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(float(count)).unsqueeze(1), batch_size=2, **options)  # type: ignore[arg-type]


def resumed(first: Any, second: Any, path: Path, **options: Any) -> list[tuple[int, list[float]]]:
    """The batches of a run of two epochs that continues after two batches of ``first``."""
    trainer = tk.Trainer(**OPTIONS, max_steps=2)
    trainer.fit(Sees(), first)
    trainer.save_checkpoint(path)
    module = Sees()
    tk.Trainer(**OPTIONS, max_epochs=2, **options).fit(module, second, ckpt_path=path)
    return module.seen


@pytest.mark.parametrize("name", ["fewer", "as many as were read", "a limit", "a list"])
def test_an_epoch_that_is_over_now_counts_as_complete(
    name: str, tmp_path: Path, capsys: Any
) -> None:
    first: Any = data(8)
    second: Any = data(8)
    options: dict[str, Any] = {}
    if name == "fewer":
        second = data(2)
    elif name == "as many as were read":
        second = data(4)
    elif name == "a limit":
        options = {"limit_train_batches": 1}
    else:
        first, second = list(data(8)), list(data(2))
    seen = resumed(first, second, tmp_path / "state", **options)
    assert {epoch for epoch, _ in seen} == {1}
    assert seen[0][1] == [0.0, 1.0]
    assert "training continues with epoch 1" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*cannot skip by index")
def test_a_stream_that_is_over_now(tmp_path: Path) -> None:
    seen = resumed(
        DataLoader(Stream(8), batch_size=2), DataLoader(Stream(2), batch_size=2), tmp_path / "state"
    )
    assert seen == [(1, [0.0, 1.0])]


@pytest.mark.filterwarnings("ignore:.*cannot skip by index")
@pytest.mark.parametrize(
    ("first", "second", "line"),
    [
        (data(8), data(12), "the training data have 12 samples, and had 8"),
        (
            data(8),
            data(8, shuffle=True),
            "in the order of RandomSampler, and were in that of SequentialSampler",
        ),
        (
            DataLoader(Stream(8), batch_size=2),
            DataLoader(Stream(12), batch_size=2),
            "the training data have 12 samples, and had 8",
        ),
    ],
)
def test_a_change_inside_an_epoch_gets_a_line(
    first: Any, second: Any, line: str, tmp_path: Path, capsys: Any
) -> None:
    seen = resumed(first, second, tmp_path / "state")
    assert seen[0][0] == 0
    output = capsys.readouterr().out
    assert line in output
    assert output.count("may repeat samples or leave some out") == 1


def test_the_same_data_get_no_line(tmp_path: Path, capsys: Any) -> None:
    seen = resumed(data(8, shuffle=True), data(8, shuffle=True), tmp_path / "state")
    assert len(seen) == 6
    output = capsys.readouterr().out
    assert "may repeat" not in output
    assert "continues with epoch" not in output


def test_a_checkpoint_without_these_facts_is_read(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    from trainer_kit.data import Feed

    monkeypatch.setattr(Feed, "facts", None)
    assert len(resumed(data(8), data(8), tmp_path / "state")) == 6
