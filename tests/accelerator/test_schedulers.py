"""Prepared schedulers: how often an optimizer step advances them. The rates are those of Accelerate 1.15."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from trainer_kit import Accelerator, DataLoaderConfiguration, GradScalerKwargs

DATA = TensorDataset(torch.randn(24, 2, generator=torch.Generator().manual_seed(0)))


def prepared(make: Any = None, split: bool = False, **options: Any) -> tuple[Any, ...]:
    loaders = DataLoaderConfiguration(split_batches=split)
    accelerator = Accelerator(cpu=True, dataloader_config=loaders, **options)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = (
        LambdaLR(optimizer, lambda step: step) if make is None else make(optimizer)
    )
    return accelerator, *accelerator.prepare(
        model, optimizer, DataLoader(DATA, batch_size=4), scheduler
    )


def rates(
    parts: tuple[Any, ...], *values: float, skipped: int | None = None
) -> list[float]:
    """The learning rate after each batch of an epoch."""
    accelerator, model, optimizer, loader, scheduler = parts
    found = []
    for number, (x,) in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(
                model(x).mean() * (float("inf") if number == skipped else 1)
            )
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
    half = prepared(
        mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)]
    )
    assert rates(half, skipped=1) == [2, 2, 4]
    assert rates(prepared(split=True)) == [1, 2, 3, 4, 5, 6]
    assert rates(prepared(step_scheduler_with_optimizer=False)) == [1, 2, 3]
    once = prepared(scheduler_steps_per_process=False)
    assert rates(once) == [1, 2, 3]
    assert "scheduler: LambdaLR advances once an optimizer step" in once[0].explain()
    # Its patience counts values, and there is one in a step.
    assert rates(
        prepared(lambda o: ReduceLROnPlateau(o, factor=0.5, patience=1)), 1.0
    ) == [
        1,
        1,
        0.5,
    ]

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
        prepared(
            lambda o: ReduceLROnPlateau(o, factor=0.5, patience=1),
            gradient_accumulation_steps=2,
        ),
        1.0,
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


def rates_in_micro_batches(accelerator: Any, make: Any, steps: int = 5) -> list[float]:
    """The learning rate in each micro-batch."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, make(optimizer))
    seen = []
    for _ in range(2 * steps):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            seen.append(optimizer.param_groups[0]["lr"])
    return seen


def warm_up_and_cosine(optimizer: Any) -> Any:
    parts = [
        schedules.LinearLR(optimizer, 0.1, 1.0, 2),
        schedules.CosineAnnealingLR(optimizer, 8),
    ]
    return schedules.SequentialLR(optimizer, parts, [2])


def chained(optimizer: Any) -> Any:
    return schedules.ChainedScheduler(
        [
            schedules.ConstantLR(optimizer, 0.5, 3),
            schedules.ExponentialLR(optimizer, 0.9),
        ]
    )


class Halving(schedules.LRScheduler):
    def get_lr(self) -> list[float]:
        return [base * 0.5**self.last_epoch for base in self.base_lrs]


SCHEDULES = {
    "sequential": warm_up_and_cosine,
    "chained": chained,
    "warm restarts": lambda optimizer: schedules.CosineAnnealingWarmRestarts(
        optimizer, 2
    ),
    "one cycle": lambda optimizer: schedules.OneCycleLR(optimizer, 0.5, total_steps=11),
    "lambda": lambda optimizer: schedules.LambdaLR(optimizer, lambda step: 0.9**step),
    "cosine": lambda optimizer: schedules.CosineAnnealingLR(optimizer, 3),
    "user's own": Halving,
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    "options", [{}, {"split_batches": True}, {"step_scheduler_with_optimizer": False}]
)
def test_rates_under_accumulation_are_those_of_a_plain_loop_and_of_accelerate(
    name: str, options: Any
) -> None:
    make = SCHEDULES[name]
    found = rates_in_micro_batches(
        Accelerator(cpu=True, gradient_accumulation_steps=2, **options), make
    )
    if "step_scheduler_with_optimizer" not in options:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
        scheduler, expected = make(optimizer), []
        for _ in range(5):
            expected.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
            expected.append(optimizer.param_groups[0]["lr"])
        assert found == expected
    if name in ("sequential", "chained"):
        return  # Accelerate ends with an AttributeError
    accelerate = pytest.importorskip("accelerate")
    given = dict(options)
    if given.pop("split_batches", False):
        given["dataloader_config"] = accelerate.DataLoaderConfiguration(
            split_batches=True
        )
    theirs = rates_in_micro_batches(
        accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, **given), make
    )
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    assert found == theirs
