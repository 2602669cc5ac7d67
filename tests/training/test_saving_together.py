"""Ranks that write a checkpoint together: what fails on one of them ends on all, and buffers are each rank's own."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer_kit import Callback, Trainer, TrainModule
from trainer_kit.checkpoint import sharded
from trainer_kit.checkpoint.read import read_checkpoint, verify_checkpoint
from trainer_kit.core.errors import RankError
from trainer_kit.state import saving
from trainer_kit.state.resume import read_start, resolve_source
from trainer_kit.step.run import Save, Saver
from trainer_kit.strategies import process_group

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
BATCHES = [
    torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(8)
]


class Net(TrainModule):
    """One module of running statistics under two names; its inputs differ from rank to rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(8)
        self.again = self.norm
        self.layer = nn.Linear(8, 4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(self.again(batch + dist.get_rank())).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Asks(Callback):
    """For a checkpoint of each step."""

    reason, weights_only = "test", False

    def __init__(self, directory: Path) -> None:
        self.directory, self.told = directory, list[str]()

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        trainer.request_checkpoint(
            "each step", Request(self.directory / str(trainer.global_step), self.told)
        )


class Request:
    reason, weights_only = "test", False

    def __init__(self, path: Path, told: list[str]) -> None:
        self.path, self.told = path, told

    def saved(self, path: Path) -> None:
        self.told.append(f"saved {path.name}")

    def failed(self, path: Path) -> None:
        self.told.append(f"failed {path.name}")


def fit(
    *callbacks: Callback, strategy: str = "fsdp", steps: int = 2, **options: Any
) -> tuple[Trainer, Net]:
    trainer = Trainer(
        max_steps=steps,
        strategy=strategy,
        devices=2,
        accelerator="cpu",
        callbacks=list(callbacks),
        enable_checkpointing=False,
        **QUIET,
    )
    module = Net()
    trainer.fit(module, BATCHES, **options)
    return trainer, module


def statistics_are_each_rank_s_own(path: Path) -> None:
    asks = Asks(path)
    trainer, module = fit(asks)
    own = trainer.strategy.world.all_gather_object(module.norm.running_mean)
    assert not torch.equal(*own)
    saved = read_checkpoint(path / "2")
    for name in ("norm", "again"):
        assert torch.equal(saved["model"][f"{name}.running_mean"], own[0]), name
    assert torch.equal(saved["buffers"][1]["norm.running_mean"], own[1])
    _, module = fit(ckpt_path=path / "2")
    assert torch.equal(module.norm.running_mean, own[dist.get_rank()])
    # Weights alone say nothing about the data.
    assert "seed" in read_start(resolve_source(path / "2"), False, trainer.strategy)
    assert read_start(resolve_source(path / "2"), True, trainer.strategy) == {}


class Raises(Callback):
    def __init__(self, hook: str) -> None:
        if dist.get_rank() == 1:
            setattr(self, hook, self._fail)

    def _fail(self, *given: Any) -> Any:
        raise ValueError("of a user")


def what_a_user_raises_on_one_rank_ends_all(path: Path) -> None:
    kind, said = (
        (ValueError, "of a user")
        if dist.get_rank()
        else (RankError, "rank 1: ValueError: of a user")
    )
    for strategy, hook in (("ddp", "state_dict"), ("fsdp", "on_save_checkpoint")):
        with pytest.raises(kind, match=said):
            fit(Asks(path / strategy), Raises(hook), strategy=strategy)


def a_thread_that_one_rank_cannot_start(path: Path) -> None:
    def fails(*given: Any, **options: Any) -> Any:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(saving, "Background", fails)
        expected = (
            (RuntimeError, "^can't")
            if dist.get_rank() == 1
            else (RankError, "^rank 1: RuntimeError: can't")
        )
        with pytest.raises(expected[0], match=f"{expected[1]} start new thread"):
            fit(Asks(path))
    asks = Asks(path)
    fit(asks)
    assert asks.told == ["saved 1", "saved 2"]


def a_rank_that_is_not_heard_of_in_time(path: Path) -> None:
    group = process_group.join_world(torch.device("cpu"))
    real, slept = sharded.write_file, list[float]()

    def write(file: Any, buffers: Any) -> Any:
        if not slept and dist.get_rank() == 1:
            slept.append(3.0)
            time.sleep(3.0)
        return real(file, buffers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_group, "_STORAGE_TIMEOUT", timedelta(seconds=1))
        patch.setattr(sharded, "write_file", write)
        group.side_group(recreate=True)
        asks = Asks(path)
        fit(asks)
    assert asks.told == ["failed 1", "saved 2"]
    group.barrier()
    assert [name for name in sorted(os.listdir(path)) if not name.startswith(".")] == [
        "2"
    ]
    verify_checkpoint(path / "2")


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_on_two_ranks(tmp_path: Path) -> None:
    assert timedelta(hours=12) <= process_group._STORAGE_TIMEOUT
    statistics_are_each_rank_s_own(tmp_path / "own")
    what_a_user_raises_on_one_rank_ends_all(tmp_path / "users")
    a_thread_that_one_rank_cannot_start(tmp_path / "thread")
    a_rank_that_is_not_heard_of_in_time(tmp_path / "late")


def test_an_abandoned_rank_takes_part_in_the_remaining_collectives(
    tmp_path: Path,
) -> None:
    """A second signal reaches one rank; the others wait for it wherever they do something together."""
    did, told = list[str](), list[str]()

    class Together:
        commits = True

        def write(self, path: str, snapshot: Any) -> None:
            did.append(f"write {path}")

        def is_finite(self, snapshot: Any) -> bool:
            did.append("finite")
            return True

    class Listens(Request):
        def committed(self, path: Any) -> None:
            told.append(str(path))

    paths = [tmp_path / "a", tmp_path / "b"]
    save = Save(
        1,
        [(str(path), Listens(path, [])) for path in paths],
        {str(path): False for path in paths},
    )
    save.abandoned = True
    began: Any = saving.Future()
    began.set_result(True)
    outcome = saving._write(
        Saver(), save, {False: None}, Together(), began, lambda: did.append("logs")
    )  # type: ignore[arg-type]
    assert outcome == {str(path): None for path in paths}
    assert did == ["logs", f"write {paths[0]}", "finite", f"write {paths[1]}", "finite"]
    assert told == []
