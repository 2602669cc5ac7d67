"""Streams resume too: by their own state, in this process and in workers, over epochs, and with generators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

import trainer_kit as tk
from tests.parity.plain import (
    Batch,
    Classifier,
    adamw,
    assert_same,
    make_batches,
    make_net,
)
from trainer_kit.core.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Samples(IterableDataset[Batch]):
    """Each worker its share; goes on where a loaded state says."""

    def __init__(self, count: int = 22) -> None:
        self.x, self.y = make_batches(1, size=count)[0]
        self.i, self.loaded, self.read = 0, False, 0

    def __iter__(self) -> Iterator[Batch]:
        if not self.loaded:
            self.i = 0
        self.loaded = False
        return self._share()

    def _share(self) -> Iterator[Batch]:
        worker = get_worker_info()
        parts, part = (worker.num_workers, worker.id) if worker else (1, 0)
        while self.i < len(self.y):
            self.i += 1
            if (self.i - 1) % parts == part:
                self.read += 1
                yield self.x[self.i - 1], self.y[self.i - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"i": self.i}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.i, self.loaded = state["i"], True


class Rolling:
    """Batches without an end, given directly."""

    def __init__(self) -> None:
        self.i, self.batches = 0, make_batches(7, size=3)

    def __iter__(self) -> Rolling:
        return self

    def __next__(self) -> Batch:
        self.i += 1
        return self.batches[self.i % 7]

    def state_dict(self) -> dict[str, Any]:
        return {"i": self.i}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.i = state["i"]


def shuffled() -> Any:
    x, y = make_batches(1, size=20)[0]
    return DataLoader(
        TensorDataset(x, y), 3, shuffle=True, generator=torch.Generator().manual_seed(5)
    )


def together() -> Any:
    return tk.CombinedLoader(
        {"a": DataLoader(Samples(7), 2), "b": shuffled()}, "max_size_cycle"
    )


class Model(Classifier):
    """Dropout, and a record of what it was given."""

    def __init__(self) -> None:
        super().__init__(make_net(dropout=0.3), adamw)
        self.given: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if isinstance(batch, dict):
            batch = tuple(
                torch.cat(parts) for parts in zip(batch["a"], batch["b"], strict=True)
            )
        self.given.append(batch[0][:, 0].tolist())
        return super().training_step(batch, batch_idx)


def fit(
    directory: Path,
    data: Any,
    ckpt: Any = None,
    start: int = 1,
    save: bool = True,
    **options: Any,
) -> Model:
    torch.manual_seed(start)
    module = Model()
    torch.manual_seed(start)
    saving = tk.callbacks.ModelCheckpoint(
        directory, every_n_train_steps=1, save_top_k=-1
    )
    trainer = tk.Trainer(
        accelerator="cpu",
        devices=1,
        seed=3,
        callbacks=[saving] if save else [],
        enable_checkpointing=save,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        **{"max_epochs": 3, **options},
    )
    trainer.fit(module, data, ckpt_path=ckpt)
    return module


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any], Any]] = {
    "a dataset": (lambda: DataLoader(Samples(), batch_size=3), {}, range(1, 24, 3)),
    "accumulation": (
        lambda: DataLoader(Samples(), batch_size=3),
        {"accumulate_grad_batches": 3},
        range(1, 9),
    ),
    "over epochs": (Rolling, {"limit_train_batches": 5}, (1, 4, 5, 6, 10, 12)),
    "a generator": (shuffled, {}, (1, 6, 7, 8, 14, 17)),
    "several": (together, {}, (1, 3, 4, 6, 7, 8, 13, 16)),
    "a generator in workers": (
        lambda: DataLoader(Samples(), batch_size=3, num_workers=2),
        {},
        (3, 8, 9),
    ),
}


@pytest.mark.parametrize(("make", "options", "cuts"), CASES.values(), ids=CASES)
@pytest.mark.slow
def test_a_resumed_run_ends_as_the_one_that_was_not(
    tmp_path: Path, make: Any, options: Any, cuts: Any
) -> None:
    module = fit(tmp_path / "whole", make(), **options)
    steps = len(list((tmp_path / "whole").glob("step-*")))
    per_step = options.get("accumulate_grad_batches", 1)
    for cut in cuts:
        assert cut <= steps
        again = fit(
            tmp_path,
            make(),
            ckpt=tmp_path / "whole" / f"step-{cut:08d}",
            start=9,
            save=False,
            **options,
        )
        assert_same(again, module)
        assert again.given == module.given[len(module.given) - len(again.given) :]
        if per_step == 1:
            assert len(again.given) == len(module.given) - cut


def test_batches_read_before_a_resume_are_not_read_again(tmp_path: Path) -> None:
    data = DataLoader(Samples(), batch_size=2)
    fit(tmp_path, data, max_steps=6)
    again = DataLoader(Samples(), batch_size=2)
    fit(tmp_path, again, ckpt="last", max_steps=8)
    assert again.dataset.read == 2 * (1 + 2)  # type: ignore[attr-defined]  # the last batch, and two new ones


def test_a_state_that_no_checkpoint_holds_is_reported_before_the_first_step(
    tmp_path: Path,
) -> None:
    class Odd(Samples):
        def state_dict(self) -> dict[str, Any]:
            return {"i": self.i, "file": object()}

    with pytest.raises(CheckpointError, match=r"(?s)object.*loaders"):
        fit(tmp_path, DataLoader(Odd(), batch_size=3))
    assert not list(tmp_path.glob("step-*"))


def test_a_failure_inside_a_window_keeps_the_window(tmp_path: Path) -> None:
    class Fails(tk.Callback):
        def on_train_batch_start(
            self, trainer: Any, module: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 5:  # the second of the third window
                raise RuntimeError("power")

    def run(module: Any, *callbacks: Any, ckpt: Any = None) -> None:
        saving = tk.callbacks.ModelCheckpoint(
            tmp_path, save_on_exception=True, every_n_train_steps=100
        )
        trainer = tk.Trainer(
            accelerator="cpu", max_epochs=1, accumulate_grad_batches=2, logger=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[saving, *callbacks], seed=3,
        )  # fmt: skip
        trainer.fit(module, DataLoader(Samples(), batch_size=2), ckpt_path=ckpt)

    module, cut, again = Model(), Model(), Model()
    run(module)
    with pytest.raises(RuntimeError, match="power"):
        run(cut, Fails())
    run(again, ckpt="last")
    assert again.given == module.given[4:]


def test_the_generator_of_a_validation_loader_is_restored_too(tmp_path: Path) -> None:
    class Validated(Model):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.seen.append(batch[0][:, 0].tolist())

    def run(ckpt: Any = None) -> list[Any]:
        module = Validated()
        saving = tk.callbacks.ModelCheckpoint(
            tmp_path, every_n_train_steps=1, save_top_k=-1
        )
        trainer = tk.Trainer(
            accelerator="cpu", max_epochs=4, logger=False, enable_progress_bar=False, limit_val_batches=1,
            num_sanity_val_steps=0, enable_model_summary=False, callbacks=[saving] if ckpt is None else [], seed=3,
            enable_checkpointing=ckpt is None,
        )  # fmt: skip
        trainer.fit(
            module, DataLoader(Samples(6), batch_size=3), shuffled(), ckpt_path=ckpt
        )
        return module.seen

    whole = run()
    assert len({str(batch) for batch in whole}) == 4
    assert run(tmp_path / "step-00000003") == whole[1:]
    assert run(tmp_path / "step-00000005") == whole[2:]
