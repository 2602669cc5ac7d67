"""Every run has a directory of its own below the root, whatever loggers it has, and shares no journal and no report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer_kit as tk
from trainer_kit.loggers import CSVLogger, JSONLLogger, read_journal
from trainer_kit.testing import TinyModule

BATCHES = [torch.ones(2, 32)] * 2


class Tracker:
    """A logger without a directory, as trackers are."""

    name = "my tracker"

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None: ...


class Unnamed:
    name = "../../etc"

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None: ...


class Logs(TinyModule):
    def __init__(self, value: float, fails: bool = False) -> None:
        super().__init__()
        self.value, self.fails = value, fails

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.log("value", self.value, on_step=True)
        if self.fails and self.global_step == 3:
            raise RuntimeError("failed on purpose")
        return super().training_step(batch, batch_idx)


def fitted(
    root: Path, logger: Any, module: Logs, epochs: int = 1, **options: Any
) -> tk.Trainer:
    trainer = tk.Trainer(
        max_epochs=epochs,
        default_root_dir=root,
        logger=logger,
        log_every_n_steps=1,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"devices": 1, **options},
    )
    trainer.fit(module, BATCHES)
    return trainer


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda root: [Tracker()], "my tracker"),
        (lambda root: [Unnamed()], "trainer_kit_logs"),
        (lambda root: [Tracker(), Unnamed()], "my tracker"),
        (lambda root: [CSVLogger(root, name=None)], "."),
        (lambda root: [Tracker(), CSVLogger(root, name="csv")], "csv"),
        (lambda root: [JSONLLogger(root), Tracker()], "trainer_kit_logs"),
    ],
)
def test_two_runs_have_two_directories(tmp_path: Path, make: Any, place: str) -> None:
    root = tmp_path / "runs"
    for number in (0, 1):
        trainer = fitted(root, make(root), Logs(float(number)))
        directory = (root / place / f"version_{number}").resolve()
        assert Path(str(trainer.log_dir)) == directory
        assert (
            Path(trainer.checkpoint_callback.best_model_path).parent
            == directory / "checkpoints"
        )
        assert [
            record["value"]
            for record in read_journal(directory / "journal.jsonl")
            if "value" in record
        ] == [float(number)] * 2
        assert {"report.html", "events.jsonl", "run.json"} <= {
            file.name for file in directory.iterdir()
        }
    assert not (root / "journal.jsonl").exists()


def test_evaluations_write_where_their_fit_has_written(tmp_path: Path) -> None:
    trainer = fitted(tmp_path, Tracker(), Logs(1.0))
    before = trainer.log_dir
    trainer.test(Logs(1.0), BATCHES, verbose=False)
    trainer.fit(Logs(1.0), BATCHES)
    assert trainer.log_dir == before
    assert len(list(tmp_path.glob("**/journal.jsonl"))) == 1


def test_a_resumed_run_continues_its_directory(tmp_path: Path) -> None:
    def run(fails: bool) -> tk.Trainer:
        keeper = tk.callbacks.ModelCheckpoint(every_n_train_steps=1)
        return fitted(
            tmp_path, Tracker(), Logs(1.0, fails), 3, resume="auto", callbacks=keeper
        )

    with pytest.raises(RuntimeError, match="on purpose"):
        run(fails=True)
    trainer = run(fails=False)
    assert trainer.global_step == 6
    [journal] = tmp_path.glob("**/journal.jsonl")
    assert journal.parent == Path(str(trainer.log_dir))
    steps = [record["step"] for record in read_journal(journal) if "value" in record]
    assert sorted(set(steps)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.world_size(2)
def test_two_ranks_share_the_directory_of_their_run(tmp_path: Path) -> None:
    for number in (0, 1):
        trainer = fitted(tmp_path, Tracker(), Logs(1.0), devices=2, strategy="ddp")
        assert trainer.log_dir == str(tmp_path / "my tracker" / f"version_{number}")
    trainer.strategy.world.barrier()
    assert len(list(tmp_path.glob("**/journal.jsonl"))) == 2
