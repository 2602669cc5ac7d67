"""`scale_batch_size` and `BatchSizeFinder`: what fits, on every rank, and what is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, default_collate

import trainer_kit as tk
from tests.tuner.searched import Net, Samples, generators, left_behind, trainer
from trainer_kit.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
from trainer_kit.tuner import Tuner, scale_batch_size


def full_above(size: int, rank: int | None = None) -> Any:
    """Memory is over where a batch has more samples, on one rank or on all."""

    def look(module: Any, batch: Any) -> None:
        if len(batch[0]) > size and rank in (None, module.trainer.global_rank):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    return look


@pytest.mark.parametrize(
    ("mode", "init_val", "found"),
    [("power", 2, 16), ("binsearch", 2, 21), ("power", 40, 20), ("binsearch", 64, 21)],
)
def test_the_largest_size_that_fits(mode: str, init_val: int, found: int) -> None:
    tk.seed_everything(3)
    module = Net(in_step=full_above(21))
    before = generators()
    assert (
        Tuner(trainer()).scale_batch_size(
            module, mode=mode, init_val=init_val, margin=0
        )
        == found
        == module.batch_size
    )
    assert (generators(), module.seen) == (before, [])


def test_a_margin_below_the_size_and_a_largest_size(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Lightning's defaults: 5 % below what binsearch finds, and no size above 8192."""
    for mode, margin, found in [
        ("binsearch", 0.05, 19),
        ("binsearch", 0.5, 10),
        ("power", 0.5, 16),
    ]:
        module = Net(in_step=full_above(21))
        size = scale_batch_size(trainer(), module, mode=mode, margin=margin)
        assert size == found == module.batch_size
    module = Net(in_step=full_above(21))
    assert scale_batch_size(trainer(), module, mode="binsearch") == 19
    for mode in ("power", "binsearch"):
        module = Net(in_step=full_above(21))
        assert (
            scale_batch_size(trainer(), module, mode=mode, max_val=12, margin=0) == 12
        )
        assert "(max_val=12)" in capsys.readouterr().out
    finder = BatchSizeFinder(mode="binsearch", margin=0.5, max_val=12)
    trainer(finder).fit(Net(in_step=full_above(21)))
    assert finder.optimal_batch_size == 6
    for wrong in ({"margin": 1.0}, {"margin": -0.1}, {"max_val": 1}):
        with pytest.raises(
            tk.ConfigurationError, match="a limit of the batch size search"
        ):
            BatchSizeFinder(**wrong)


def test_a_fit_after_it_is_a_fit_with_that_size() -> None:
    def run(size: int, search: bool, *callbacks: Any) -> dict[str, Any]:
        tk.seed_everything(3)
        module, made = Net(batch_size=size, in_step=full_above(8)), trainer(*callbacks)
        if search:
            scale_batch_size(made, module, mode="binsearch", margin=0)
        made.fit(module)
        assert module.batch_size == 8
        return left_behind(made, module)

    assert run(4, True) == run(8, False) == run(4, False, BatchSizeFinder())


@pytest.mark.slow
def test_no_size_that_was_not_tried_with_full_batches() -> None:
    data = Samples(10)
    loader = DataLoader(data, batch_size=3)
    assert scale_batch_size(trainer(), Net(), loader) == 8 == loader.batch_size
    assert (
        scale_batch_size(trainer(), Net(), loader, mode="binsearch", margin=0)
        == 10
        == loader.batch_sampler.batch_size
    )
    assert (
        scale_batch_size(
            trainer(),
            Net(),
            DataLoader(data, 3, drop_last=True),
            mode="binsearch",
            margin=0,
        )
        == 10
    )
    assert scale_batch_size(trainer(), Net(), loader, max_trials=2) == 4


def test_a_datamodule_and_a_resumed_fit() -> None:
    class Data(tk.DataModule):
        torn = 0

        def __init__(self) -> None:
            self.save_hyperparameters({"size": 2})

        def setup(self, stage: str) -> None:
            self.samples = Samples(own=False)

        def teardown(self, stage: str) -> None:
            Data.torn += 1
            del self.samples

        def train_dataloader(self) -> Any:
            return DataLoader(self.samples, batch_size=self.hparams.size, shuffle=True)

    def fit(steps: int, path: Any = None) -> tuple[Any, dict[str, Any]]:
        tk.seed_everything(3)
        module, data = Net(in_step=full_above(8)), Data()
        finders = (
            BatchSizeFinder(batch_arg_name="size"),
            LearningRateFinder(num_training_steps=20),
        )
        made = trainer(*finders, ModelCheckpoint("kept", every_n_train_steps=5, save_top_k=-1), max_steps=steps,
                       enable_checkpointing=True)  # fmt: skip
        made.fit(module, datamodule=data, ckpt_path=path)
        assert data.hparams.size == 8
        return finders[1].optimal_lr, left_behind(made, module)

    curve, whole = fit(10)
    assert Data.torn == 1
    fit(5)
    again, resumed = fit(10, "kept/step-00000005")
    assert curve is not None
    assert again is None
    assert {**resumed, "seen": []} == {**whole, "seen": []}


class Collating(Net):
    def train_dataloader(self) -> Any:
        def collate(samples: list[Any]) -> Any:
            if len(samples) > 8 and self.trainer.global_rank == 1:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return default_collate(samples)

        return DataLoader(Samples(), batch_size=self.batch_size, collate_fn=collate)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_two_ranks_agree_when_one_is_out_of_memory() -> None:
    tk.seed_everything(1 + dist.get_rank())
    for rank, mode, found in [
        (None, "power", 8),
        (1, "binsearch", 13),
        (0, "power", 8),
    ]:
        module = Net(in_step=full_above(13, rank))
        made, before = (
            trainer(strategy="ddp", devices=2, accumulate_grad_batches=2),
            generators(),
        )
        size = scale_batch_size(made, module, mode=mode, init_val=4, margin=0)
        assert size == found == module.batch_size
        assert generators() == before
    module = Collating()
    assert (
        scale_batch_size(trainer(strategy="ddp", devices=2), module) == 8
    )  # rank 1 cannot make the batch
    with pytest.raises(tk.ConfigurationError, match="on several ranks"):
        scale_batch_size(trainer(strategy="fsdp", devices=2), Net())


def test_mistakes() -> None:
    class Fixed(Net):
        def train_dataloader(self) -> Any:
            return DataLoader(Samples(), batch_size=4)

    module = Fixed()
    with pytest.raises(
        tk.ConfigurationError, match="does not determine the batch size"
    ):
        scale_batch_size(trainer(), module)
    assert module.batch_size == 4
    with pytest.raises(
        tk.ConfigurationError, match="no attribute holds the batch size"
    ):
        scale_batch_size(trainer(), module, [torch.ones(2, 8)])
    with pytest.raises(tk.ConfigurationError, match="no batch size fits"):
        scale_batch_size(trainer(), Net(in_step=full_above(0)))
    with pytest.raises(
        tk.ConfigurationError, match="an argument of the batch size search is wrong"
    ):
        scale_batch_size(trainer(), Net(), mode="half")
    with pytest.raises(ValueError, match="user code"):
        scale_batch_size(trainer(), Net(in_step=_fail))


def _fail(module: Any, batch: Any) -> None:
    raise ValueError("user code")
