"""``ckpt_path="last"``: the newest checkpoint of this Trainer's own directories, never that of another run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer_kit as tk
from trainer_kit.callbacks import ModelCheckpoint
from trainer_kit.checkpoint import checkpoints
from trainer_kit.core.errors import MissingCheckpointError
from trainer_kit.testing import TinyModule

BATCHES = [torch.ones(2, 32)] * 2


class Marked(TinyModule):
    """A module whose weights say which run trained it; `starts` is the mark and the step at which a fit began."""

    def __init__(self, mark: float) -> None:
        super().__init__()
        self.register_buffer("mark", torch.tensor(mark))
        self.starts: list[tuple[float, int]] = []

    def on_train_start(self) -> None:
        self.starts.append((float(self.mark), self.trainer.global_step))


def trainer(
    root: Path, *keepers: ModelCheckpoint, epochs: int = 1, **options: Any
) -> tk.Trainer:
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    quiet["devices"] = 1
    return tk.Trainer(
        max_epochs=epochs,
        default_root_dir=root,
        callbacks=list(keepers),
        **{**quiet, **options},
    )


def start_of(mark: float, made: tk.Trainer) -> tuple[float, int]:
    module = Marked(mark)
    made.fit(module, BATCHES, ckpt_path="last")
    return module.starts[0]


def test_a_run_with_its_own_directory_takes_nothing_from_that_of_another(
    tmp_path: Path,
) -> None:
    trainer(tmp_path, epochs=3).fit(
        Marked(1.0), BATCHES
    )  # 6 steps, in tmp_path/checkpoints
    assert start_of(2.0, trainer(tmp_path, ModelCheckpoint(tmp_path / "keep"))) == (
        2.0,
        0,
    )
    assert start_of(
        3.0, trainer(tmp_path, ModelCheckpoint(tmp_path / "keep"), epochs=2)
    ) == (
        2.0,
        2,
    )


def test_a_new_directory_of_a_logger_takes_nothing_from_the_one_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = trainer(tmp_path, logger="csv", epochs=2)
    first.fit(Marked(1.0), BATCHES)
    assert start_of(2.0, trainer(tmp_path, logger="csv", epochs=3)) == (2.0, 0)
    newest = first.checkpoint_callback.last_model_path
    assert (
        f'to continue another run, name its checkpoint: ckpt_path="{newest}"'
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("index", [True, False], ids=["index", "no index"])
def test_a_later_run_with_fewer_steps_in_the_same_directory_is_the_newest(
    tmp_path: Path, index: bool
) -> None:
    trainer(tmp_path, ModelCheckpoint(tmp_path / "same", save_top_k=-1), epochs=3).fit(
        Marked(1.0), BATCHES
    )
    trainer(tmp_path, ModelCheckpoint(tmp_path / "same", save_top_k=-1)).fit(
        Marked(2.0), BATCHES
    )
    for seconds, record in enumerate(
        reversed(checkpoints(tmp_path / "same"))
    ):  # a copy does not keep times
        os.utime(record.path / "manifest.json", (seconds, seconds))
    if not index:
        (tmp_path / "same" / "index.json").unlink()
    keeper = ModelCheckpoint(tmp_path / "same", save_top_k=-1)
    assert start_of(3.0, trainer(tmp_path, keeper, epochs=2)) == (2.0, 2)


def test_of_two_directories_the_newest_commit_counts_not_the_highest_step(
    tmp_path: Path,
) -> None:
    trainer(tmp_path, ModelCheckpoint(tmp_path / "a"), epochs=3).fit(
        Marked(1.0), BATCHES
    )
    trainer(tmp_path, ModelCheckpoint(tmp_path / "b")).fit(Marked(2.0), BATCHES)
    both = [
        ModelCheckpoint(tmp_path / "a", filename="{epoch}"),
        ModelCheckpoint(tmp_path / "b"),
    ]
    assert start_of(3.0, trainer(tmp_path, *both, epochs=4)) == (2.0, 2)


@pytest.mark.parametrize("kind", [FileNotFoundError, ValueError])
@pytest.mark.parametrize("word", ["last", "best"])
def test_an_evaluation_names_what_it_does_not_take(
    tmp_path: Path, word: str, kind: type[Exception]
) -> None:
    other = trainer(tmp_path)
    other.fit(Marked(1.0), BATCHES)
    made = trainer(tmp_path, ModelCheckpoint(tmp_path / "keep"))
    with pytest.raises(kind) as error:
        made.test(Marked(2.0), BATCHES, ckpt_path=word)
    assert isinstance(error.value, MissingCheckpointError)
    assert (
        word == "best"
        or f'ckpt_path="{other.checkpoint_callback.last_model_path}"'
        in str(error.value)
    )


@pytest.mark.world_size(2)
def test_two_ranks_start_at_the_same_checkpoint_of_their_own_directory(
    tmp_path: Path,
) -> None:
    trainer(tmp_path, epochs=3, devices=2, strategy="ddp").fit(Marked(1.0), BATCHES)
    for mark, epochs, start in ((2.0, 1, (2.0, 0)), (3.0, 2, (2.0, 1))):
        keeper = ModelCheckpoint(tmp_path / "keep")
        assert (
            start_of(
                mark,
                trainer(tmp_path, keeper, epochs=epochs, devices=2, strategy="ddp"),
            )
            == start
        )
