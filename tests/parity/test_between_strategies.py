"""A checkpoint of any strategy and number of ranks is gone on with by any other, as if it were one training."""

from __future__ import annotations

import gc
import importlib.util
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import trainer_kit as tk
from tests.strategies.pipelines import stages
from trainer_kit.checkpoint.manifest import read_manifest
from trainer_kit.core.errors import CheckpointError
from trainer_kit.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    MeshStrategy,
)
from trainer_kit.testing import conformance, run_distributed
from trainer_kit.testing.conformance import Classifier, assert_same, continues, whole

HYBRID = partial(FSDPStrategy, sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2))

SPLIT = tk.ParallelPlan(
    tensor={"*.blocks.*.up": "colwise", "*.blocks.*.down": "rowwise"}
)
TENSOR = partial(MeshStrategy, dp_shard=1, tp=2, plan=SPLIT)


def four_ranks(directory: str, found: list[str]) -> None:
    continues({"fsdp4": FSDPStrategy, "hsdp": HYBRID}, directory, found)


def two_ranks(directory: str, found: list[str]) -> None:
    made = {
        "one": lambda: "auto",
        "ddp2": DDPStrategy,
        "fsdp2": FSDPStrategy,
        "pp2": stages,
        "tp2": TENSOR,
    }
    continues(made, directory, found)


def staged(stage: int) -> DeepSpeedStrategy:
    gc.freeze()  # the engine collects garbage when it is made: seconds, for all that was imported
    return DeepSpeedStrategy(stage=stage)


def deepspeed_on_four(directory: str, found: list[str]) -> None:
    made: dict[str, Any] = {
        "deepspeed2 of 4": partial(staged, 2),
        "deepspeed3 of 4": partial(staged, 3),
    }
    if found:
        made |= {"fsdp4": FSDPStrategy, "hsdp": HYBRID}
    continues(made, directory, found, "32-true", about="deepspeed")


def deepspeed_on_two(directory: str, found: list[str]) -> None:
    made: dict[str, Any] = {
        f"deepspeed{stage}": partial(staged, stage) for stage in (1, 2, 3)
    }
    made |= {
        "one": lambda: "auto",
        "ddp2": DDPStrategy,
        "fsdp2": FSDPStrategy,
        "pp2": stages,
        "tp2": TENSOR,
    }
    continues(made, directory, found, "32-true", about="deepspeed")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)
def test_deepspeed_into_any_other(tmp_path: Path) -> None:
    run_distributed(deepspeed_on_four, 4, str(tmp_path), [], timeout=120)
    run_distributed(
        deepspeed_on_two,
        2,
        str(tmp_path),
        ["deepspeed2 of 4", "deepspeed3 of 4"],
        timeout=120,
    )
    names = [f"deepspeed{stage}" for stage in (1, 2, 3)]
    run_distributed(
        deepspeed_on_four, 4, str(tmp_path), [*names, "pp2", "tp2"], timeout=120
    )


@pytest.mark.slow
def test_any_into_any_other(tmp_path: Path) -> None:
    run_distributed(four_ranks, 4, str(tmp_path), [], timeout=120)
    run_distributed(two_ranks, 2, str(tmp_path), ["fsdp4", "hsdp"], timeout=120)
    run_distributed(
        four_ranks,
        4,
        str(tmp_path),
        ["one", "ddp2", "fsdp2", "pp2", "tp2"],
        timeout=120,
    )
    for name, ranks in (
        ("one", 1),
        ("ddp2", 1),
        ("fsdp2", 2),
        ("pp2", 2),
        ("tp2", 2),
        ("hsdp", 4),
        ("fsdp4", 4),
    ):
        assert read_manifest(tmp_path / name).get("shards", 1) == ranks
    # What each rank of a hybrid holds alike is written by one of them.
    sizes = {
        name: sum(file.stat().st_size for file in (tmp_path / name).glob("model*"))
        for name in ("hsdp", "one")
    }
    assert sizes["hsdp"] < 1.5 * sizes["one"]


class Logs(Classifier):
    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_model(self) -> None:
        super().configure_model()
        if not hasattr(self, "seen"):
            self.register_buffer("seen", torch.zeros(3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.seen += (
            1 + torch.distributed.get_rank()
            if torch.distributed.is_initialized()
            else 1
        )
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", super().training_step(batch, batch_idx))


def kept(root: Path, hears: Any = (), **options: Any) -> tuple[tk.Trainer, Logs]:
    torch.manual_seed(3)
    module = Logs()
    keeper = tk.callbacks.ModelCheckpoint(
        root / "kept",
        every_n_train_steps=1,
        save_top_k=2,
        monitor="loss",
        save_last=True,
    )
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
    }
    trainer = tk.Trainer(
        accelerator="cpu",
        callbacks=[keeper, *hears],
        default_root_dir=root,
        **{**quiet, **options},
    )
    data = DataLoader(conformance._samples(48), batch_size=4)
    trainer.fit(
        module,
        data,
        data,
        ckpt_path="last" if options.get("max_steps", 0) > 3 else None,
    )
    return trainer, module


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_kept_in_the_background_read_by_everybody_and_damaged(tmp_path: Path) -> None:
    rank = torch.distributed.get_rank()
    together: dict[str, Any] = {"strategy": "fsdp", "devices": 2}
    trainer, module = kept(tmp_path, max_steps=3, **together)
    world = trainer.strategy.world
    names = sorted(
        name for name in os.listdir(tmp_path / "kept") if name.startswith("step-")
    )
    assert len(names) in (2, 3), names  # two of the best, and the last
    weights = whole(trainer.strategy.module_state(module))
    last = tmp_path / "kept" / "step-00000003"

    # Weights: into one process, and into evaluation on ranks that are divided already, or not yet.
    loaded = Logs.load_from_checkpoint(last, map_location="cpu")
    loaded_state = dict(loaded.state_dict())
    assert (
        loaded_state.pop("seen").tolist() == [3.0] * 3
    )  # those of rank 0, whoever wrote them
    assert_same(
        loaded_state,
        {name: value for name, value in weights.items() if name != "seen"},
        0.0,
    )
    data = DataLoader(conformance._samples(48), batch_size=4)
    (there,) = trainer.validate(module, data, ckpt_path=last, verbose=False)
    (fresh,) = tk.Trainer(accelerator="cpu", barebones=True, **together).validate(
        Logs(), data, ckpt_path=last
    )
    alone = tk.Trainer(accelerator="cpu", barebones=True, devices=1).validate(
        loaded, data, verbose=False
    )[0]
    assert there["val"] == pytest.approx(alone["val"], rel=1e-6)
    assert fresh["val"] == pytest.approx(alone["val"], rel=1e-6)

    # Weights alone; what is none of a run's is refused as such.
    trainer.save_checkpoint(tmp_path / "weights", weights_only=True)
    assert_same(
        whole(Logs.load_from_checkpoint(tmp_path / "weights").state_dict()),
        {**loaded_state, "seen": loaded.seen},
        0.0,
    )
    with pytest.raises(CheckpointError, match="weights_only"):
        tk.Trainer(accelerator="cpu", barebones=True, **together).fit(
            Logs(), data, ckpt_path=tmp_path / "weights"
        )
    started = Logs()
    starter = tk.Trainer(accelerator="cpu", barebones=True, max_steps=0, **together)
    starter.fit(started, data, ckpt_path=tmp_path / "weights", load_weights_only=True)
    assert_same(
        whole(starter.strategy.module_state(started)),
        {**loaded_state, "seen": loaded.seen},
        0.0,
    )

    # A shard of the newest is damaged: the run goes on from the one before, on both ranks.
    if rank == 0:
        shard = next(iter(sorted(last.glob("model-00002*"))))
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
    world.barrier()
    again, module = kept(tmp_path, max_steps=5, **together)
    assert again.global_step == 5
    assert (tmp_path / "kept" / "step-00000003.damaged").exists()
    check_divided_in_another_way(tmp_path / "other", world)


def check_divided_in_another_way(root: Path, world: Any) -> None:
    """Two data ranks draw each for itself; as tensor ranks they go on with the same draws, and again as such."""
    at_start: list[Any] = []

    class Draws(tk.Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            if trainer.global_step == 0:
                torch.manual_seed(world.rank)

        def on_train_start(self, trainer: Any, module: Any) -> None:
            at_start.append(torch.get_rng_state())

    for steps, strategy in ((3, "fsdp"), (5, TENSOR()), (7, TENSOR())):
        trainer, _ = kept(
            root, [Draws()], max_steps=steps, strategy=strategy, devices=2
        )
        assert trainer.global_step == steps
        one, other = world.all_gather(at_start[-1])
        assert torch.equal(one, other) is (steps > 3)
