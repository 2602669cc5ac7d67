"""Averages under every way to divide a module are those of one process, divided as its weights are."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import trainer_kit as tk
from tests.parity.plain import case
from tests.strategies.pipelines import Writer, stages, texts, words
from trainer_kit.callbacks import EMAWeightAveraging
from trainer_kit.checkpoint.manifest import read_manifest
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.strategies import DDPStrategy, FSDPStrategy, MeshStrategy, PostLocalSGD
from trainer_kit.testing.conformance import (
    _Adaptive,
    _ByHand,
    _samples,
    assert_same,
    fit,
    whole,
)

SPLIT = tk.ParallelPlan(
    tensor={"*.blocks.*.up": "colwise", "*.blocks.*.down": "rowwise"}
)
STRATEGIES = {
    "one": lambda: "auto",
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "tp": partial(MeshStrategy, dp_shard=1, tp=2, plan=SPLIT),
    "pp": stages,
}


class Evaluated(_Adaptive):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx))

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(
            _samples(24), batch_size=12 // self.trainer.strategy.data.size
        )


class Counts(Evaluated):
    """A buffer of each rank's own."""

    def configure_model(self) -> None:
        super().configure_model()
        if not hasattr(self, "seen"):
            self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))
            self.shown: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.trainer.evaluating:
            self.seen += 1 + self.trainer.strategy.data.rank
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.shown.append(float(self.seen[0]))
        super().validation_step(batch, batch_idx)


def shared_directory() -> Path:
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box, 0)
    return Path(box[0])


def local(tensor: Any) -> Any:
    return tensor.to_local()


def averaged(strategy: Any, make: Any, devices: int, steps: int, **options: Any) -> Any:
    ema = EMAWeightAveraging(
        decay=0.7, update_every_n_steps=2, update_starting_at_epoch=0
    )
    settings = {
        "max_steps": steps,
        "max_epochs": 1,
        "global_batch_size": 12,
        "callbacks": ema,
        "val_check_interval": 2,
    }
    trainer, found = fit(
        strategy, make, 72, 12, devices, num_sanity_val_steps=0, **settings, **options
    )
    assert ema._averages is not None
    live = dict(ema._averages.lent_weights())
    return trainer, found, live, ema


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_as_in_one_process_and_from_any_into_any_other() -> None:
    rank, directory = dist.get_rank(), shared_directory()
    alone, expected, live, _ = averaged("auto", Evaluated, 1, 6)
    loss = float(alone.callback_metrics["val"])
    assert not torch.equal(live["net.first.weight"], expected["net.first.weight"])
    for name, strategy in STRATEGIES.items():
        with case(writer=name):
            if name != "one" or rank == 0:
                averaged(
                    strategy(),
                    Evaluated,
                    1 if name == "one" else 2,
                    3,
                    save=str(directory / name),
                )
        dist.barrier()
    assert read_manifest(directory / "fsdp")["shards"] == 2
    names = list(STRATEGIES)
    for number, (name, strategy) in enumerate(STRATEGIES.items()):
        writer = names[number - 1]
        with case(reader=name, writer=writer):
            path = str(directory / writer)
            trainer, found, mine, ema = averaged(
                strategy(), Evaluated, 1 if name == "one" else 2, 6, ckpt_path=path
            )
            assert_same(found, expected, 1e-9)
            assert float(trainer.callback_metrics["val"]) == pytest.approx(
                loss, rel=1e-7
            )
            assert_same(whole(mine), {key: live[key] for key in mine}, 1e-9)
            kept, weights = ema._averages._tensors, ema._averages._live
            for key, average in kept.items():
                assert getattr(average, "placements", None) == getattr(
                    weights[key], "placements", None
                )
            if name == "fsdp":
                here, everywhere = (
                    sum(v.numel() for v in of)
                    for of in (map(local, kept.values()), live.values())
                )
                assert here < 0.6 * everywhere


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_averages_of_rank_local_and_gathered_weights_and_refused_cases() -> None:
    check_own_buffers(shared_directory())
    check_what_a_step_leaves_gathered()
    check_tied_weights_of_sixteen_bits(shared_directory())
    check_refused()


class LooksAgain(_ByHand):
    """Its step ends with a forward that nothing follows."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        with torch.no_grad():
            self.right(self.left(batch[0]))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.losses(batch)["left"])

    val_dataloader = Evaluated.val_dataloader


def check_what_a_step_leaves_gathered() -> None:
    values = []
    for name, devices in (("auto", 1), ("fsdp", 2)):
        options: dict[str, Any] = {
            "max_epochs": 1,
            "callbacks": EMAWeightAveraging(decay=0.5),
        }
        trainer, _ = fit(
            name,
            LooksAgain,
            24,
            6 // devices,
            devices,
            num_sanity_val_steps=0,
            **options,
        )
        values.append(float(trainer.callback_metrics["val"]))
    assert values[0] == pytest.approx(values[1], rel=1e-9)


class LooksAt(tk.Callback):
    def __init__(self, ema: EMAWeightAveraging) -> None:
        self.ema, self.kept = ema, {}

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        averages = self.ema._averages
        self.kept = (
            {name: value.clone() for name, value in averages._tensors.items()}
            if averages
            else {}
        )


def check_tied_weights_of_sixteen_bits(directory: Path) -> None:
    """A checkpoint has their average once, and a stage may know it by another name; their weights are it, rounded."""
    path, kept = str(directory / f"tied-{dist.get_rank()}"), []
    quiet: dict[str, Any] = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
    }
    for strategy, devices, more in (
        ("auto", 1, {}),
        (stages(), 2, {"ckpt_path": path}),
    ):
        ema = EMAWeightAveraging(decay=0.999)
        looks = LooksAt(ema)
        trainer = tk.Trainer(
            accelerator="cpu", strategy=strategy, devices=devices, precision="bf16-true", max_steps=4 + len(more),
            callbacks=[ema, looks], enable_checkpointing=False, **quiet,
        )  # fmt: skip
        trainer.fit(Writer(words(tied="ends")), texts((4,) * 6), **more)
        if not more:
            trainer.save_checkpoint(path)
            assert ema._averages is not None
            kept.append(dict(ema._averages._tensors))
        kept.append(looks.kept)
    named = {
        name.replace("head.weight", "embedding.weight"): value
        for name, value in kept[-1].items()
    }
    assert 0 < len(named) < len(kept[0])
    assert_same(named, {name: kept[0][name] for name in named}, 0.0)
    tied = kept[0]["net.embedding.weight"]
    assert not torch.equal(tied, tied.bfloat16().float())


def check_own_buffers(directory: Path) -> None:
    """Those of rank 0 count in an evaluation; each rank goes on with its own, and in the same bits."""
    for name in ("ddp", "fsdp"):
        made = (
            partial(DDPStrategy, broadcast_buffers=False)
            if name == "ddp"
            else FSDPStrategy
        )
        with case(buffers_of=name):
            seen: list[Any] = []

            def make(into: Any = seen) -> Any:
                into.append(Counts())
                return into[-1]

            _, whole_run, live, _ = averaged(made(), make, 2, 6)
            assert seen[0].shown == pytest.approx(
                [1.0] * 2 + [0.7 + 0.3 * 3] * 2 + [0.7 * 1.6 + 0.3 * 5] * 2
            )
            averaged(made(), make, 2, 3, save=str(directory / f"own-{name}"))
            _, again, mine, _ = averaged(
                made(), make, 2, 6, ckpt_path=str(directory / f"own-{name}")
            )
            if dist.get_rank() > 0:
                del again["seen"], whole_run["seen"]  # its average is nobody's
            assert_same(again, whole_run, 0.0)
            assert_same(whole(mine), whole(live), 0.0)
            assert float(mine["seen"][0]) == 6.0 * (1 + dist.get_rank())


def check_refused() -> None:
    for strategy, says in (
        (DDPStrategy(local_sgd=PostLocalSGD(2)), "local SGD"),
        ("deepspeed", "flat copies"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            averaged(strategy, Evaluated, 2, 1, precision="32-true")
