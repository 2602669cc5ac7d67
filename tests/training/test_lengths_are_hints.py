"""The length that a loader claims is a hint: the data decide where an epoch ends, in every entry point."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import trainer_kit as tk
from trainer_kit.core.errors import DataError

OPTIONS: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "num_sanity_val_steps": 0,
}


class Claims(IterableDataset[Any]):
    """Yields 0 to ``count`` - 1, divided among workers, and claims to have ``claimed`` samples."""

    def __init__(self, count: int, claimed: int | None = None) -> None:
        self.count = count
        self.claimed = count if claimed is None else claimed

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        yield from torch.arange(first, self.count, step).float().unsqueeze(1)

    def __len__(self) -> int:
        return self.claimed


class ClaimsBatches:
    """A batch sampler whose length is an estimate, as of those that fill batches by tokens."""

    def __init__(self, count: int, claimed: int) -> None:
        self.count = count
        self.claimed = claimed

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[2 * i, 2 * i + 1] for i in range(self.count)])

    def __len__(self) -> int:
        return self.claimed


class Counts(tk.TrainModule):
    """Counts the samples that each of its steps gets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.samples = dict.fromkeys(("fit", "validate", "test", "predict"), 0)
        self.validated_after: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.samples["fit"] += len(batch)
        return self.layer(batch / 10).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.samples["validate"] += len(batch)
        self.log("val", batch.mean(), batch_size=len(batch))

    def on_validation_start(self) -> None:
        self.validated_after.append(self.trainer.progress.epoch_batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.samples["test"] += len(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.samples["predict"] += len(batch)
        return batch

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(count: int, claimed: int | None = None, workers: int = 0) -> DataLoader[Any]:
    return DataLoader(Claims(count, claimed), batch_size=2, num_workers=workers)


def sampled(count: int, claimed: int) -> DataLoader[Any]:
    """``count`` batches of two samples, from a batch sampler that claims to have ``claimed`` batches."""
    data = torch.arange(2.0 * count).unsqueeze(1)
    return DataLoader(data, batch_sampler=ClaimsBatches(count, claimed))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "data",
    [
        loader(8, claimed=4),
        loader(8, claimed=0),
        loader(8, claimed=40),
        sampled(4, 2),
        sampled(4, 9),
    ],
)
def test_every_entry_point_reads_all_of_the_data(data: Any) -> None:
    module = Counts()
    trainer = tk.Trainer(**OPTIONS, max_epochs=2)
    trainer.fit(module, data, data)
    assert float(trainer.callback_metrics["val"]) == 3.5
    trainer.test(module, data, verbose=False)
    assert len(trainer.predict(module, data)) == 4
    assert module.samples == {"fit": 16, "validate": 16, "test": 8, "predict": 8}
    assert (trainer.current_epoch, trainer.global_step) == (2, 8)


@pytest.mark.slow
def test_workers_that_each_end_with_a_short_batch() -> None:
    data = DataLoader(Claims(6), batch_size=6, num_workers=2)
    assert len(data) == 1
    module = Counts()
    tk.Trainer(**OPTIONS, max_epochs=1).fit(module, data, data)
    assert (module.samples["fit"], module.samples["validate"]) == (6, 6)


def test_a_limit_of_batches_is_not_capped_by_a_claimed_length() -> None:
    module = Counts()
    trainer = tk.Trainer(
        **OPTIONS, max_epochs=1, limit_train_batches=3, limit_val_batches=3
    )
    trainer.fit(module, loader(8, claimed=2), loader(8, claimed=2))
    assert (module.samples["fit"], module.samples["validate"]) == (6, 6)


def test_a_fraction_is_taken_of_the_claimed_length() -> None:
    module = Counts()
    trainer = tk.Trainer(
        **OPTIONS, max_epochs=1, val_check_interval=0.5, limit_val_batches=0.5
    )
    trainer.fit(module, loader(12, claimed=8), loader(8, claimed=8))
    assert module.validated_after == [2, 4, 6]
    assert module.samples == {"fit": 12, "validate": 12, "test": 0, "predict": 0}


def test_the_last_window_ends_with_the_data() -> None:
    module = Counts()
    trainer = tk.Trainer(**OPTIONS, max_epochs=1, accumulate_grad_batches=3)
    trainer.fit(module, loader(10, claimed=4))
    assert (module.samples["fit"], trainer.global_step) == (10, 2)


@pytest.mark.parametrize("claimed", [4, 8, 2, 40])
def test_a_run_that_ends_at_the_claimed_length(claimed: int) -> None:
    """After two of four batches: only the data know whether the epoch is over."""
    trainer = tk.Trainer(**OPTIONS, max_steps=2)
    trainer.fit(Counts(), loader(8, claimed=claimed))
    assert (trainer.progress.epoch, trainer.progress.epoch_batch) == (0, 2)


def test_a_run_that_ends_with_the_data_completes_its_epoch() -> None:
    module = Counts()
    trainer = tk.Trainer(**OPTIONS, max_steps=4)
    trainer.fit(module, loader(8), loader(2))
    assert (trainer.progress.epoch, module.samples["validate"]) == (1, 2)


def test_saving_and_stopping_beyond_the_claimed_length(tmp_path: Path) -> None:
    """They must not wait for the end of the epoch once the length has proved wrong."""

    class Stops(tk.Callback):
        def on_train_step_end(self, trainer: Any, module: Any) -> None:
            if trainer.global_step == 3:
                trainer.stop("enough")

    options = {**OPTIONS, "enable_checkpointing": True}
    trainer = tk.Trainer(
        **options,
        max_epochs=1,
        default_root_dir=tmp_path,
        callbacks=[Stops(), tk.callbacks.ModelCheckpoint(every_n_train_steps=3)],
    )
    trainer.fit(Counts(), loader(12, claimed=4))
    assert (trainer.global_step, trainer.progress.epoch_batch) == (3, 3)
    assert "step-00000003" in str(trainer.checkpoint_callback.best_model_path)


def test_a_resumed_run_reads_what_the_length_did_not_announce(tmp_path: Path) -> None:
    path = tmp_path / "state"
    first = tk.Trainer(**OPTIONS, max_steps=3)
    first.fit(Counts(), loader(8, claimed=4))
    first.save_checkpoint(path)
    module = Counts()
    with pytest.warns(UserWarning, match="3 batches were read and discarded"):
        tk.Trainer(**OPTIONS, max_epochs=1).fit(
            module, loader(8, claimed=4), ckpt_path=path
        )
    assert module.samples["fit"] == 2


def test_an_empty_stream_that_claims_to_have_data() -> None:
    with pytest.raises(DataError, match="returned no batch"):
        tk.Trainer(**OPTIONS, max_epochs=1).fit(Counts(), loader(0, claimed=8))


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "data", [loader(10, claimed=4), loader(10, claimed=40), sampled(5, 2)]
)
def test_two_ranks_end_together(data: Any) -> None:
    module = Counts()
    trainer = tk.Trainer(**{**OPTIONS, "devices": 2}, strategy="ddp", max_epochs=2)
    trainer.fit(module, data, data)
    seen = trainer.strategy.world.all_gather_object(module.samples)
    assert [sum(samples[name] for samples in seen) for name in ("fit", "validate")] == [
        20,
        20,
    ]
    assert (trainer.global_step, trainer.current_epoch) == (6, 2)


@pytest.mark.parametrize("claimed", [2, 9, 5])
def test_the_accelerator_knows_the_last_batch(claimed: int) -> None:
    accelerator = tk.Accelerator(cpu=True)
    for data in (sampled(5, claimed), loader(10, claimed=2 * claimed)):
        batches = accelerator.prepare(data)
        ends = [accelerator.gradient_state.end_of_dataloader for _ in batches]
        assert ends == [False] * 4 + [True]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("claimed", [2, 9])
def test_gathering_with_the_accelerator_ends_with_the_data(claimed: int) -> None:
    accelerator = tk.Accelerator(cpu=True)
    for data in (sampled(5, claimed), loader(10, claimed=2 * claimed)):
        batches = accelerator.prepare(data)
        gathered = torch.cat(
            [accelerator.gather_for_metrics(batch) for batch in batches]
        )
        assert sorted(gathered.flatten().tolist()) == [float(i) for i in range(10)]


def test_estimates_use_the_claimed_length() -> None:
    trainer = tk.Trainer(**OPTIONS, max_epochs=2)
    trainer.fit(Counts(), loader(8, claimed=4))
    assert trainer.num_training_batches == 2
    trainer.fit(Counts(), loader(8, claimed=0), loader(8, claimed=0))
    assert trainer.num_training_batches == math.inf
    assert trainer.num_val_batches == [math.inf]
