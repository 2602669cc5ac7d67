"""What counts as one micro-batch: several models on one batch, `accelerator.step`, and the window's position."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import trainer_kit as tk
from trainer_kit import Accelerator

ROWS = torch.arange(32.0).view(32, 1) / 32


def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Linear(1, 2).double(), nn.Linear(2, 1).double()


def batches(rank: int | None = None) -> Iterator[Tensor]:
    """Global micro-batches of 4; of a rank its 2 rows."""
    for rows in ROWS.double().split(4):
        yield rows if rank is None else rows[2 * rank : 2 * rank + 2]


def loss_of(a: nn.Module, b: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    return a(x).square().mean(), (b(torch.cat([x, x], 1)) - 1).square().mean()


def plain(steps: int) -> tuple[nn.Module, nn.Module]:
    """Two models that are trained on each batch, with the mean gradient of ``steps`` batches."""
    a, b = networks()
    optimizers = [
        torch.optim.SGD(a.parameters(), 0.1),
        torch.optim.SGD(b.parameters(), 0.1),
    ]
    for number, x in enumerate(batches(), 1):
        for loss in loss_of(a, b, x):
            (loss / steps).backward()
        if number % steps == 0:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return a, b


def nested(
    accelerator: Accelerator, a: Any, b: Any, oa: Any, ob: Any, x: Tensor
) -> None:
    with accelerator.accumulate(a), accelerator.accumulate(b):
        accelerator.backward(sum(loss_of(a, b, x)))
        for optimizer in (oa, ob):
            optimizer.step()
            optimizer.zero_grad()


def together(
    accelerator: Accelerator, a: Any, b: Any, oa: Any, ob: Any, x: Tensor
) -> None:
    with accelerator.accumulate(a, b):
        accelerator.backward(sum(loss_of(a, b, x)))
        for optimizer in (oa, ob):
            optimizer.step()
            optimizer.zero_grad()


def successive(
    accelerator: Accelerator, a: Any, b: Any, oa: Any, ob: Any, x: Tensor
) -> None:
    with accelerator.accumulate(a):
        accelerator.backward(loss_of(a, b, x)[0])
        oa.step()
        oa.zero_grad()
    with accelerator.accumulate(b):
        accelerator.backward(loss_of(a, b, x)[1])
        ob.step()
        ob.zero_grad()


def cleared_first(
    accelerator: Accelerator, a: Any, b: Any, oa: Any, ob: Any, x: Tensor
) -> None:
    with accelerator.accumulate(b):
        ob.zero_grad()
        accelerator.backward(loss_of(a, b, x)[1])
        ob.step()
    with accelerator.accumulate(a):
        oa.zero_grad()
        accelerator.backward(loss_of(a, b, x)[0])
        oa.step()


LOOPS = [nested, together, successive, cleared_first]


def check(loop: Any, prepares_loader: bool) -> None:
    expected = plain(2)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    a, b = networks()
    things = accelerator.prepare(
        a, b, torch.optim.SGD(a.parameters(), 0.1), torch.optim.SGD(b.parameters(), 0.1)
    )
    size = 4 // accelerator.num_processes
    data: Any = DataLoader(ROWS.double(), batch_size=size)
    if prepares_loader:
        data = accelerator.prepare(data)
    else:
        data = list(
            batches(
                accelerator.process_index if accelerator.num_processes > 1 else None
            )
        )
    for x in data:
        loop(accelerator, *things, x)
    for model, right in zip((a, b), expected, strict=True):
        for name, weight in right.named_parameters():
            torch.testing.assert_close(
                model.get_parameter(name), weight, rtol=1e-12, atol=1e-14
            )


@pytest.mark.parametrize("prepares_loader", [True, False])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_batch_is_one_micro_batch_for_several_models(
    loop: Any, prepares_loader: bool
) -> None:
    check(loop, prepares_loader)


@pytest.mark.world_size(2)
def test_ranks_agree_where_several_models_ask() -> None:
    for loop in LOOPS:
        for prepares_loader in (True, False):
            check(loop, prepares_loader)


def gan(accelerator: Accelerator | None, steps: int) -> tuple[nn.Module, nn.Module]:
    """A generator and a discriminator, as a plain loop or under an Accelerator."""
    torch.manual_seed(1)
    generator, critic = nn.Linear(1, 1).double(), nn.Linear(1, 1).double()
    og, oc = (
        torch.optim.SGD(generator.parameters(), 0.1),
        torch.optim.SGD(critic.parameters(), 0.1),
    )
    g: Any = generator
    c: Any = critic
    data: Any = list(batches())
    if accelerator is not None:
        size = 4 // accelerator.num_processes
        loader = DataLoader(ROWS.double(), batch_size=size)
        g, c, og, oc, data = accelerator.prepare(generator, critic, og, oc, loader)  # type: ignore[assignment]
    for number, x in enumerate(data, 1):
        real = c(x + 1).mean()
        fake = c(g(x).detach()).mean()
        if accelerator is None:
            ((fake - real) / steps).backward()
            if number % steps == 0:
                oc.step()
                oc.zero_grad()
            critic.requires_grad_(False)
            (-c(g(x)).mean() / steps).backward()
            if number % steps == 0:
                og.step()
                og.zero_grad()
            critic.requires_grad_(True)
            continue
        with accelerator.accumulate(c):
            accelerator.backward(fake - real)
            oc.step()
            oc.zero_grad()
        with accelerator.accumulate(g):
            accelerator.backward(
                -nn.functional.linear(
                    g(x), critic.weight.detach(), critic.bias.detach()
                ).mean()
            )
            og.step()
            og.zero_grad()
    return generator, critic


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_gan_is_trained_as_in_a_plain_loop(steps: int) -> None:
    found = gan(Accelerator(cpu=True, gradient_accumulation_steps=steps), steps)
    for model, right in zip(found, gan(None, steps), strict=True):
        torch.testing.assert_close(
            model.state_dict(), right.state_dict(), rtol=1e-12, atol=1e-14
        )


def test_a_loop_that_divides_a_batch_itself_counts_each_part() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(1, 1)
    model, data = accelerator.prepare(model, DataLoader(ROWS, batch_size=16))
    syncs = []
    for batch in data:
        for part in batch.split(4):
            with accelerator.accumulate(model):
                accelerator.backward(model(part).mean())
                syncs.append(accelerator.sync_gradients)
    assert (
        syncs == [False, True, False, True] + [True] * 4
    )  # a window ends with the last batch


def steps_of(
    accelerator: Any, samples: int = 10, **options: Any
) -> list[tuple[Any, ...]]:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(torch.zeros(samples, 1), batch_size=2, **options)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = []
    for _ in range(2):
        for batch in loader:
            before = accelerator.step
            with accelerator.accumulate(model):
                state = accelerator.gradient_state
                ends = state.end_of_dataloader
                seen.append(
                    (
                        before,
                        accelerator.step,
                        accelerator.sync_gradients,
                        ends,
                        state.remainder,
                    )
                )
                accelerator.backward(model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
    return [*seen, (accelerator.step, accelerator.gradient_state.remainder)]


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("samples", [10, 9])
@pytest.mark.parametrize("synced", [True, False])
def test_steps_and_remainders_are_those_of_accelerate(
    steps: int, samples: int, synced: bool
) -> None:
    accelerate = pytest.importorskip("accelerate")
    options = {"num_steps": steps, "sync_with_dataloader": synced}
    theirs = accelerate.utils.GradientAccumulationPlugin(**options)
    expected = steps_of(
        accelerate.Accelerator(cpu=True, gradient_accumulation_plugin=theirs), samples
    )
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    mine = tk.GradientAccumulationPlugin(**options)
    assert (
        steps_of(Accelerator(cpu=True, gradient_accumulation_plugin=mine), samples)
        == expected
    )


def test_setting_the_step_moves_the_window() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = nn.Linear(1, 1)
    accelerator.step = 2
    ends = []
    for _ in range(5):
        with accelerator.accumulate(model):
            ends.append((accelerator.step, accelerator.sync_gradients))
    assert ends == [(3, True), (4, False), (5, False), (6, True), (7, False)]
    accelerator.step = 0
    with accelerator.accumulate(model):
        assert (accelerator.step, accelerator.sync_gradients) == (1, False)
    accelerator.free_memory()
    assert accelerator.step == 0


def test_a_state_keeps_the_step(tmp_path: Any) -> None:
    first, second = (
        Accelerator(cpu=True, gradient_accumulation_steps=2),
        Accelerator(cpu=True, gradient_accumulation_steps=2),
    )
    model = first.prepare(nn.Linear(1, 1))
    for _ in range(4):
        with first.accumulate(model):
            first.backward(model(torch.ones(1, 1)).sum())
    first.save_state(tmp_path / "state")
    again = second.prepare(copy.deepcopy(nn.Linear(1, 1)))
    second.load_state(tmp_path / "state")
    assert second.step == 4
    with second.accumulate(again):
        assert (second.step, second.sync_gradients) == (5, False)
