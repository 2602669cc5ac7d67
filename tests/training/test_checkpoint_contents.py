"""What a checkpoint holds besides the state of the training, read back from its files."""

from __future__ import annotations

import json
import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer_kit import Callback, DataModule, Trainer, TrainModule
from trainer_kit.callbacks import EarlyStopping, ModelCheckpoint
from trainer_kit.checkpoint.manifest import read_manifest
from trainer_kit.checkpoint.read import read_checkpoint, verify_checkpoint
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.loggers import CSVLogger, JSONLLogger, TensorBoardLogger
from trainer_kit.testing import TinyModule, run_distributed
from trainer_kit.training.settings import plain_arguments

BATCHES = [torch.ones(2, 32)] * 4


class Keyed(TrainModule):
    def __init__(self, lr: float = 0.1, api_key: str = "", store: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(32, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.rand(1), random.random(), np.random.rand()
        loss = self.layer(batch).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("sum", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Data(DataModule):
    def __init__(self, size: int, password: str) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return BATCHES


class Drawn(Callback):
    """The generators of each rank, as they stand when the checkpoint is taken."""

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        self.at = [
            random.getstate()[1][:3],
            np.random.get_state()[1][:3].tolist(),
            torch.get_rng_state().tolist(),
        ]


def fit_on_ranks(root: str) -> tuple[int, list[Any]]:
    drawn = Drawn()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=2,
        barebones=True,
        callbacks=drawn,
        min_steps=1,
    )
    (
        random.seed(trainer.environment.rank),
        torch.manual_seed(5 + trainer.environment.rank),
    )
    np.random.seed(trainer.environment.rank)
    trainer.fit(Keyed(lr=0.5), BATCHES * 2)
    trainer.save_checkpoint(Path(root) / "c")
    return trainer.global_rank, drawn.at


def test_every_generator_of_every_rank_sums_values_and_configuration(
    tmp_path: Path,
) -> None:
    ranks = run_distributed(fit_on_ranks, 2, str(tmp_path))
    state = read_checkpoint(tmp_path / "c")
    for rank, drawn in ranks:
        held = state["rng"][rank]
        assert [
            held["python"][1][:3],
            held["numpy"][1][:3].tolist(),
            held["torch"].tolist(),
        ] == drawn
    assert ranks[0][1] != ranks[1][1]
    for own in state["metrics"]:
        running = {
            name: sums.tolist()
            for _, name, _, sums, *_ in own["running"]
            if sums is not None
        }
        assert running == {} or running["sum"] == [2.0, 2.0]
        assert {"loss", "sum"} <= set(own["callback"]) | set(running)
    assert state["progress"]["step"] == 2
    assert state["hyper_parameters"] == {"lr": 0.5, "api_key": "", "store": None}
    assert verify_checkpoint(tmp_path / "c")["versions"].keys() == {
        "trainer_kit",
        "torch",
    }
    about = state["configuration"]
    assert (about["world_size"], about["module"], about["precision"]) == (
        2,
        "Keyed",
        "32-true",
    )
    assert (
        about["trainer"]["max_steps"],
        about["trainer"]["min_steps"],
        about["trainer"]["devices"],
    ) == (2, 1, 2)
    assert about["trainer"]["callbacks"] == "Drawn"
    assert "DistributedDataParallel" in about["strategy"]


def test_a_restored_state_never_overrides_the_current_configuration(
    tmp_path: Path,
) -> None:
    Trainer(max_steps=2, barebones=True, accelerator="cpu", gradient_clip_val=0.5).fit(
        module := Keyed(), BATCHES
    )
    module.trainer.save_checkpoint(tmp_path / "c")
    again = Trainer(max_steps=3, barebones=True, accelerator="cpu")
    again.fit(Keyed(), BATCHES, ckpt_path=tmp_path / "c")
    assert (again.settings.clip, again.global_step) == (None, 3)


def test_secrets_are_masked_and_asked_for(tmp_path: Path) -> None:
    module = Keyed(api_key="hush-1", store={"url": "s3://me:hush-2@host", "size": 3})
    options = {"max_steps": 1, "barebones": True, "accelerator": "cpu"}
    trainer = Trainer(**options)
    trainer.fit(module, datamodule=Data(3, password="hush-4"))
    trainer.save_checkpoint(tmp_path / "c")
    for file in (tmp_path / "c").iterdir():
        assert b"hush" not in file.read_bytes(), file
    assert read_checkpoint(tmp_path / "c")["datamodule_hyper_parameters"]["size"] == 3
    with pytest.raises(
        ConfigurationError,
        match="only the repr of these hyperparameters: api_key, store",
    ):
        Keyed.load_from_checkpoint(tmp_path / "c")
    assert (
        Keyed.load_from_checkpoint(tmp_path / "c", api_key="new", store=None).hparams.lr
        == 0.1
    )


def test_arguments_are_plain_and_name_no_address() -> None:
    class Own:
        pass

    given = {
        "self": None,
        "callbacks": [EarlyStopping("val_loss"), Own(), Drawn],
        "max_time": timedelta(hours=1),
        "default_root_dir": Path("a/b"),
        "plugins": torch.float16,
        "profiler": len,
        "logger": {"x": (1, 2.5, None)},
    }
    plain = plain_arguments(given)
    assert json.loads(json.dumps(plain)) == plain
    assert "0x" not in str(plain)
    assert plain == {
        "callbacks": [
            "EarlyStopping(monitor='val_loss', mode='min')",
            Own.__qualname__,
            "Drawn",
        ],
        "max_time": "1:00:00",
        "default_root_dir": "a/b",
        "plugins": "torch.float16",
        "profiler": "len",
        "logger": {"x": [1, 2.5, None]},
    }


def test_equal_states_give_equal_bytes(tmp_path: Path) -> None:
    trainer = Trainer(
        max_steps=2, barebones=True, accelerator="cpu", callbacks=[Drawn()]
    )
    trainer.fit(TinyModule(), BATCHES)
    for name in ("a", "b"):
        trainer.save_checkpoint(tmp_path / name)
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert files == sorted(file.name for file in (tmp_path / "b").iterdir())
    for name in files:
        if name != "manifest.json":
            assert (tmp_path / "a" / name).read_bytes() == (
                tmp_path / "b" / name
            ).read_bytes(), name
    first, second = (read_manifest(tmp_path / name) for name in ("a", "b"))
    assert first.pop("committed") < second.pop("committed")
    assert first == second


class Tracker:
    """A logger of the user's: a tracker that draws its run's id."""

    def __init__(self, directory: Path, run: str | None = None) -> None:
        self.log_dir, self.run = str(directory), run

    def log_metrics(self, metrics: Any, step: int) -> None:
        self.run = self.run or f"drawn-{random.SystemRandom().random()}"

    def state_dict(self) -> dict[str, Any]:
        return {"run": self.run}

    def load_state_dict(self, state: Any) -> None:
        self.run = self.run or state["run"]


@pytest.mark.parametrize(("same", "given"), [(True, None), (True, 7), (False, None)])
def test_loggers_go_on_with_their_runs_in_the_same_directory(
    tmp_path: Path, same: bool, given: int | None
) -> None:
    def fit(directory: Path, version: int | None = None, ckpt: Any = None) -> list[Any]:
        loggers = [
            Tracker(directory),
            CSVLogger(tmp_path / "tables", version=version),
            TensorBoardLogger(tmp_path / "boards", version=version),
            JSONLLogger(tmp_path / "lines", version=version),
        ]
        keeper = ModelCheckpoint(
            tmp_path / f"kept-{directory.name}", every_n_train_steps=1, save_top_k=-1
        )
        options = {
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "accelerator": "cpu",
        }
        options["log_every_n_steps"] = 1
        trainer = Trainer(
            max_steps=1 if ckpt is None else 2,
            logger=loggers,
            callbacks=keeper,
            **options,
        )
        if ckpt is not None:
            keeper.load_state_dict = lambda state: None  # type: ignore[method-assign]
        trainer.fit(Keyed(), BATCHES, ckpt_path=ckpt)
        return loggers

    before = fit(tmp_path / "run")
    after = fit(
        tmp_path / ("run" if same else "other"),
        given,
        tmp_path / "kept-run" / "step-00000001",
    )
    assert (after[0].run == before[0].run) is same
    assert [logger.version for logger in after[1:]] == [
        given if given else 0 if same else 1
    ] * 3
