"""Batches of any class, and metrics in the module, where whole models are cast."""

import collections
import dataclasses
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader

import trainer_kit as tk


@dataclasses.dataclass(frozen=True)
class Batch:
    x: Any
    names: list[str]


def collated(rows: list[torch.Tensor]) -> Batch:
    return Batch(torch.stack(rows), [str(row) for row in rows])


def loader() -> DataLoader[Any]:
    return DataLoader(torch.arange(8.0).view(4, 2), batch_size=2, collate_fn=collated)


class Regressor(tk.TrainModule):
    def __init__(self, largest: int | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.largest = largest
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.largest is not None and len(batch.x) > self.largest:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.seen.append((type(batch), batch.x.dtype, len(batch.x), len(batch.names)))
        return self.layer(batch.x).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def trainer(**options: Any) -> tk.Trainer:
    return tk.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, barebones=True, **options
    )


DTYPES = {
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
    "64-true": torch.float64,
    "32-true": torch.float32,
}


@pytest.mark.parametrize("word", DTYPES)
@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_frozen_dataclasses_are_cast(word: str, strategy: str) -> None:
    module = Regressor()
    trainer(precision=word, strategy=strategy).fit(module, loader())
    assert module.seen == [(Batch, DTYPES[word], 2, 2)] * 2


def test_modules_with_their_own_dtype_take_frozen_dataclasses() -> None:
    class Taking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, batch: Batch) -> Any:
            return self.layer(batch.x)

    class Net(Regressor):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Taking()  # type: ignore[assignment]

        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            return self.layer(batch).square().mean()

    module = Net()
    before = {
        name: weight.detach().clone() for name, weight in module.named_parameters()
    }
    trainer(
        precision=tk.precision.TruePrecision(torch.bfloat16, exceptions=["layer"])
    ).fit(module, loader())
    assert all(weight.dtype == torch.float32 for weight in module.parameters())
    assert any(
        not torch.equal(weight, before[name])
        for name, weight in module.named_parameters()
    )


def test_frozen_dataclasses_are_split_where_memory_runs_out() -> None:
    whole, split = Regressor(), Regressor(largest=1)
    split.load_state_dict(whole.state_dict())
    trainer().fit(whole, loader())
    tk.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        callbacks=tk.callbacks.AutoMicroBatch(), enable_progress_bar=False, enable_model_summary=False,
    ).fit(split, loader())  # fmt: skip
    assert split.seen == [(Batch, torch.float32, 1, 1)] * 4
    for name, weight in whole.named_parameters():
        torch.testing.assert_close(split.get_parameter(name), weight)


class WithMetrics(tk.TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 4)
        self.error = torchmetrics.MeanSquaredError()
        self.scores = torchmetrics.MetricCollection({
            "accuracy": torchmetrics.Accuracy("multiclass", num_classes=4),
            "auroc": torchmetrics.AUROC("multiclass", num_classes=4, thresholds=3),
        })  # fmt: skip

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.layer(batch)
        self.scores(logits.softmax(-1), torch.zeros(len(batch), dtype=torch.long))
        self.error(
            torch.full((100,), 3.0, dtype=logits.dtype),
            torch.zeros(100, dtype=logits.dtype),
        )
        self.log("error", self.error)
        return logits.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("word", ["bf16-true", "16-true", "64-true"])
def test_metrics_keep_the_dtype_of_their_states(word: str) -> None:
    module = WithMetrics()
    run = tk.Trainer(
        max_steps=8, accelerator="cpu", precision=word, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    run.fit(module, [torch.randn(2, 2)] * 8)
    assert module.layer.weight.dtype == DTYPES[word]
    # 8 batches with a squared error of 900 each: bfloat16 would hold 7200 as 7200 +- 32.
    assert run.callback_metrics["error"] == 9.0
    assert module.error.sum_squared_error.dtype == torch.float32
    assert module.scores["auroc"].thresholds.dtype == DTYPES[word]


def test_metrics_are_cast_where_they_are_named() -> None:
    module = WithMetrics()
    exceptions = {"error": torch.float64}
    trainer(
        precision=tk.precision.TruePrecision(torch.bfloat16, exceptions=exceptions)
    ).fit(module, [torch.randn(2, 2)])
    assert module.error.sum_squared_error.dtype == torch.float64


def test_a_module_that_overrides_apply_as_in_older_torch_is_cast() -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.table = torch.ones(2)

        def _apply(self, fn: Any) -> Any:  # type: ignore[override]
            super()._apply(fn)
            self.table = fn(self.table)
            return self

        def forward(self, x: Any) -> Any:
            return self.inner(x) * self.table

    module = Regressor()
    module.layer = nn.Sequential(Rotary(), nn.Linear(2, 1))  # type: ignore[assignment]
    trainer(precision="bf16-true").fit(module, loader())
    assert (
        module.layer[0].table.dtype
        == module.layer[0].inner.weight.dtype
        == torch.bfloat16
    )  # type: ignore[index]
    excepted = Regressor()
    excepted.layer = nn.Sequential(Rotary(), nn.Linear(2, 1))  # type: ignore[assignment]
    precision = tk.precision.TruePrecision(torch.bfloat16, exceptions=["layer.0.inner"])
    trainer(precision=precision).fit(excepted, loader())
    assert excepted.layer[0].inner.weight.dtype == torch.float32  # type: ignore[index]


def test_verify_measures_a_module_with_a_metric() -> None:
    pages = tk.Trainer(max_steps=2, accelerator="cpu", logger=False).verify(
        WithMetrics(), [torch.randn(2, 2)] * 2
    )
    assert "all equal" in str(pages)


def test_a_batch_of_an_accelerator_keeps_its_class() -> None:
    accelerator = tk.Accelerator(cpu=True, mixed_precision="bf16-true")

    class Taking(nn.Linear):
        def forward(self, batch: Any) -> Any:  # type: ignore[override]
            kinds.append((type(batch), batch["x"].dtype))
            return super().forward(batch["x"])

    kinds: list[Any] = []
    model = accelerator.prepare(Taking(2, 1))
    assert model(collections.UserDict(x=torch.ones(1, 2))).dtype == torch.float32
    assert kinds == [(collections.UserDict, torch.bfloat16)]
