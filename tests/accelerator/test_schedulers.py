"""Prepared schedulers: how often an optimizer step advances them. The rates are those of Accelerate 1.15."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from trainer_kit import Accelerator, DataLoaderConfiguration, GradScalerKwargs

DATA = TensorDataset(torch.randn(24, 2, generator=torch.Generator().manual_seed(0)))


def prepared(make: Any = None, split: bool = False, **options: Any) -> tuple[Any, ...]:
    loaders = DataLoaderConfiguration(split_batches=split)
    accelerator = Accelerator(cpu=True, dataloader_config=loaders, **options)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = LambdaLR(optimizer, lambda step: step) if make is None else make(optimizer)
    return accelerator, *accelerator.prepare(model, optimizer, DataLoader(DATA, batch_size=4), scheduler)


def rates(parts: tuple[Any, ...], *values: float, skipped: int | None = None) -> list[float]:
    """The learning rate after each batch of an epoch."""
    accelerator, model, optimizer, loader, scheduler = parts
    found = []
    for number, (x,) in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).mean() * (float("inf") if number == skipped else 1))
            optimizer.step()
            scheduler.step(*values)
            optimizer.zero_grad()
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.world_size(2)
def test_two_processes(tmp_path: Path) -> None:
    printed = StringIO()
    with redirect_stdout(printed):
        parts = prepared()
        assert rates(parts) == [2, 4, 6]
        parts[0].save_state(tmp_path / "state")
        assert rates(parts) == [8, 10, 12]
    told = "LambdaLR advances 2 times an optimizer step, once for each process"
    assert printed.getvalue().count(told) == parts[0].is_local_main_process
    assert f"scheduler: {told}" in parts[0].explain()

    assert rates(prepared(gradient_accumulation_steps=2)) == [0, 2, 4]
    half = prepared(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    assert rates(half, skipped=1) == [2, 2, 4]
    assert rates(prepared(split=True)) == [1, 2, 3, 4, 5, 6]
    assert rates(prepared(step_scheduler_with_optimizer=False)) == [1, 2, 3]
    once = prepared(scheduler_steps_per_process=False)
    assert rates(once) == [1, 2, 3]
    assert "scheduler: LambdaLR advances once an optimizer step" in once[0].explain()
    # Its patience counts values, and there is one in a step.
    assert rates(prepared(lambda o: ReduceLROnPlateau(o, factor=0.5, patience=1)), 1.0) == [1, 1, 0.5]

    resumed, other = prepared(), prepared(scheduler_steps_per_process=False)
    printed = StringIO()
    with redirect_stdout(printed):
        resumed[0].load_state(tmp_path / "state")
        assert rates(resumed) == [8, 10, 12]
        assert "optimizer step when this state was saved" not in printed.getvalue()
        other[0].load_state(tmp_path / "state")
    line = "schedulers advanced 2 times an optimizer step when this state was saved, and advance 1 times now"
    assert (line in printed.getvalue()) == other[0].is_local_main_process
    assert rates(other) == [7, 8, 9]


def test_one_process() -> None:
    assert rates(prepared()) == [1, 2, 3, 4, 5, 6]
    assert rates(
        prepared(lambda o: ReduceLROnPlateau(o, factor=0.5, patience=1), gradient_accumulation_steps=2), 1.0
    ) == [
        *[1.0] * 5,
        0.5,
    ]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_one_cycle_reaches_its_end_under_accumulation(steps: int) -> None:
    def make(optimizer: Any) -> OneCycleLR:
        return OneCycleLR(optimizer, max_lr=1.0, total_steps=6 // steps)

    parts = prepared(make, gradient_accumulation_steps=steps)
    for _ in range(2):  # a further epoch stays there
        rates(parts)
        assert parts[-1].scheduler.last_epoch == 6 // steps
