"""Accumulation under every use: the gradient of a step is the weighted mean over its window and all processes."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from trainer_kit import (
    Accelerator,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
)
from trainer_kit.accelerator.accumulation import Accumulation
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.strategies.single import Alone

N = 23
X = torch.randn(N, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randn(N, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
mse = nn.functional.mse_loss


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def weights(*models):
    return [p.detach().clone() for model in models for p in model.parameters()]


def assert_close(one, other):
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b)


def plain(groups, clip=None):
    """One step for each group of samples."""
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for at in groups:
        sgd.zero_grad()
        mse(model(X[at]), Y[at]).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        sgd.step()
    return weights(model)


def groups_of(size, order=None):
    order = list(range(N)) if order is None else order
    return [order[start : start + size] for start in range(0, len(order), size)]


def make(steps=1, loader=None, **options):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, **options)
    model = net()
    model, optimizer = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    data = accelerator.prepare(
        DataLoader(TensorDataset(X, Y), batch_size=4) if loader is None else loader
    )
    return accelerator, model, optimizer, data


def test_two_models_accumulate_together():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    one, two = net(), net()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, two)]
    one, two, *optimizers, data = accelerator.prepare(
        one, two, *optimizers, DataLoader(TensorDataset(X, Y), batch_size=4)
    )
    for x, y in data:
        with accelerator.accumulate(one, two):
            accelerator.backward(mse(one(x), y))
            accelerator.backward(mse(two(x), y))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    expected = plain(groups_of(8))
    assert_close(weights(one), expected)
    assert_close(weights(two), expected)


def test_an_evaluation_inside_a_window_changes_nothing():
    accelerator, model, optimizer, data = make(2)
    other = accelerator.prepare(DataLoader(TensorDataset(X[:7]), batch_size=2))
    for x, y in data:
        with accelerator.accumulate(model):
            accelerator.backward(mse(model(x), y))
            seen = torch.cat(
                [accelerator.gather_for_metrics(part) for (part,) in other]
            )
            assert torch.equal(seen, X[:7])
            for _ in other:
                break  # left early
            optimizer.step()
            optimizer.zero_grad()
    assert_close(weights(model), plain(groups_of(8)))


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_zero_grad_before_each_backward_does_not_drop_gradients(steps):
    accelerator, model, optimizer, data = make(steps)
    for _ in range(2):
        for x, y in data:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(mse(model(x), y))
                optimizer.step()
    assert_close(weights(model), plain(groups_of(4 * steps) * 2))


@pytest.mark.parametrize("ahead", [False, True])
def test_a_window_may_be_given_up_in_its_last_batch(ahead):
    accelerator, model, optimizer, data = make(2)
    for number, (x, y) in enumerate(data):
        with accelerator.accumulate(model):
            if ahead:
                optimizer.zero_grad()
            loss = mse(model(x), y)
            if number == 1:
                optimizer.zero_grad()
                continue
            accelerator.backward(loss)
            optimizer.step()
            if not ahead:
                optimizer.zero_grad()
    assert_close(weights(model), plain(groups_of(8)[1:]))


def test_loaders_that_are_read_side_by_side_are_all_left_in_the_end():
    accelerator, *_, data = make()
    lengths = ((8, 8), (8, 12), (12, 8))
    for one, two in lengths:
        loaders = accelerator.prepare(
            *(DataLoader(TensorDataset(X[:n]), batch_size=4) for n in (one, two))
        )
        for _ in zip(*loaders, strict=False):
            assert accelerator.gradient_state.active_dataloader is loaders[1]
        assert accelerator.gradient_state.active_dataloader is None
    for _ in data:
        list(zip(*loaders, strict=False))
        assert accelerator.gradient_state.active_dataloader is data


@pytest.mark.parametrize("after", [False, True])
def test_optimizers_can_step_after_the_context(after):
    accelerator, model, optimizer, data = make(2)
    for x, y in data:
        with accelerator.accumulate(model):
            accelerator.backward(mse(model(x), y))
            if not after:
                optimizer.step()
                optimizer.zero_grad()
        if after:
            optimizer.step()
            optimizer.zero_grad()
    assert_close(weights(model), plain(groups_of(8)))


def test_a_loop_with_its_own_step_count_accumulates():
    accelerator, model, optimizer, data = make()
    for index, (x, y) in enumerate(data):
        accelerator.backward(mse(model(x), y) / 2)
        if (index + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    own = net()
    sgd = torch.optim.SGD(own.parameters(), lr=0.1)
    batches = groups_of(4)
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        sgd.zero_grad()
        ((mse(own(X[first]), Y[first]) + mse(own(X[second]), Y[second])) / 2).backward()
        sgd.step()
    assert_close(weights(model), weights(own))


def test_windows_over_the_end_of_a_loader():
    """``sync_with_dataloader=False``: the last two batches of the first epoch wait for the first two of the next."""
    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = accelerator.prepare(
        model, sgd, DataLoader(TensorDataset(X, Y), batch_size=4)
    )
    for _ in range(2):
        for x, y in data:
            with accelerator.accumulate(model):
                accelerator.backward(mse(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    order = list(range(N))
    assert_close(weights(model), plain([order[:16], order[16:] + order[:8], order[8:]]))


def test_the_number_of_steps_changes_in_the_middle():
    accelerator, model, optimizer, data = make(4)
    for index, (x, y) in enumerate(data):
        if index == 1:
            accelerator.gradient_accumulation_steps = (
                2  # the window that is under way ends here
            )
        with accelerator.accumulate(model):
            accelerator.backward(mse(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    assert_close(weights(model), plain(groups_of(8)))


def test_an_exception_leaves_a_batch_out():
    accelerator, model, optimizer, data = make(2)
    for index, (x, y) in enumerate(data):
        try:
            with accelerator.accumulate(model):
                if index == 2:
                    raise KeyError("this batch is bad")
                accelerator.backward(mse(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        except KeyError:
            continue
    assert accelerator.sync_gradients
    order = list(range(N))
    assert_close(weights(model), plain([order[:8], order[12:16], order[16:]]))


def test_two_losses_of_a_batch_add_up():
    def train(backward, model, optimizer, data, scale):
        for x, y in data:
            optimizer.zero_grad()
            out = model(x)
            backward(mse(out, y), retain_graph=True)
            backward(0.1 * out.abs().mean())
            optimizer.step()
        return weights(model)

    accelerator, model, optimizer, data = make()
    found = train(accelerator.backward, model, optimizer, data, 1)
    own = net()
    sgd = torch.optim.SGD(own.parameters(), lr=0.1)
    batches = list(zip(X.split(4), Y.split(4), strict=True))
    expected = train(torch.Tensor.backward, own, sgd, batches, 1)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_weights_without_a_context():
    """Sums outside of `accumulate`: two losses of one batch, clipped, two optimizers; each gradient is divided once."""
    accelerator = Accelerator(cpu=True)
    one, two = net(), net()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, two)]
    one, two, first, second = accelerator.prepare(one, two, *optimizers)
    for at in groups_of(4):
        first.zero_grad()
        second.zero_grad()
        accelerator.backward((one(X[at]) - Y[at]).square().sum(), weight=len(at))
        accelerator.clip_grad_norm_(one.parameters(), 0.5)
        accelerator.backward((two(X[at]) - Y[at]).square().sum(), weight=len(at))
        first.step()
        second.step()
    assert_close(weights(one), plain(groups_of(4), clip=0.5))
    assert_close(weights(two), plain(groups_of(4)))
    accelerator.backward(one(X[:3]).sum(), weight=3)
    with pytest.raises(ConfigurationError, match="have different weights") as problem:
        accelerator.backward(one(X[:4]).sum(), weight=4)
    assert "accumulate" in str(problem.value.fix)
    with pytest.raises(ConfigurationError, match="this loss has no weight"):
        accelerator.backward(one(X[:4]).mean())


def test_overflow_in_a_window_with_clipping():
    """fp16: the window whose gradients overflowed is left out, the others are as if it had not been there."""

    def run(bad):
        accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=2, mixed_precision="fp16"
        )
        model = net().float()
        model, optimizer = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1)
        )
        scales = []
        for window in range(3):
            if window == 1 and not bad:
                continue
            for half in range(2):
                at = slice(window * 8 + half * 4, window * 8 + half * 4 + 4)
                with accelerator.accumulate(model):
                    loss = mse(model(X[at].float()), Y[at].float())
                    accelerator.backward(loss * (1e30 if window == 1 else 1.0))
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.3)
                    optimizer.step()
                    optimizer.zero_grad()
            scales.append(accelerator.optimizer_step_was_skipped)
        return weights(model), scales

    (with_it, skipped), (without, _) = run(True), run(False)
    assert skipped == [False, True, False]
    # The scale is a power of two: another one changes no bit.
    assert all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))


@pytest.mark.parametrize("emptied", ["optimizer", "model"])
def test_a_step_that_is_not_taken_after_clipping_leaves_the_next_one_right(emptied):
    def train(precision, skipped=(1,)):
        handler = GradScalerKwargs(init_scale=1024.0, growth_interval=100)
        accelerator = Accelerator(
            cpu=True, mixed_precision=precision, kwargs_handlers=[handler]
        )
        torch.manual_seed(2)
        one, two = nn.Linear(5, 1), nn.Linear(5, 1)
        one, two, *optimizers = accelerator.prepare(
            one,
            two,
            *(torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, two)),
        )
        for step in range(4):
            accelerator.backward(
                one(X[:4].float()).square().mean()
                * (float("inf") if step in skipped else 1)
            )
            accelerator.unscale_gradients()  # of both, one of which has none
            norm = accelerator.clip_grad_norm_(one.parameters(), 50.0)
            assert norm.isfinite() == (step not in skipped)
            if step not in skipped:
                optimizers[0].step()
            for thing in optimizers if emptied == "optimizer" else (one, two):
                thing.zero_grad()
        return accelerator, weights(one)

    accelerator, found = train("fp16")
    assert accelerator.scaler.get_scale() == 512.0, (
        "what was not stepped had overflowed"
    )
    for mine, plain in zip(found, train("no")[1], strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-2, atol=1e-3)


def test_dropped_gradients_are_reduced_again():
    completed = []
    window = Accumulation(
        1,
        Alone(),
        Alone(),
        complete=lambda optimizer: completed.append(optimizer) or [],
    )
    ours, others = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer, other = (torch.optim.SGD([p], lr=0.1) for p in (ours, others))
    for expected in (
        [optimizer],
        [optimizer, optimizer, other],
        [optimizer, optimizer, other, optimizer],
    ):
        window.scale(ours.sum(), None).backward()
        window.correct(optimizer)  # as clipping does
        if len(expected) == 3:
            window.scale(
                others.sum(), None
            ).backward()  # of another model, ahead of the step
            window.correct(other)
            window.correct(optimizer)
        assert completed == expected
        ours.grad = others.grad = (
            None  # as model.zero_grad() does, and no step is taken
        )


@pytest.mark.parametrize("asks_again", [False, True])
def test_a_closure_under_scaled_gradients(asks_again: bool) -> None:
    """First-order optimizers step with unscaled gradients; one that computes the loss again is refused."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model, own = net().float(), net().float()
    kind = torch.optim.LBFGS if asks_again else torch.optim.SGD
    model, optimizer = accelerator.prepare(model, kind(model.parameters(), lr=0.1))
    x = X[:4].float()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        accelerator.backward(loss)
        return loss

    if asks_again:
        with pytest.raises(
            ConfigurationError,
            match=r"(?s)LBFGS evaluates the loss again.*scaled gradients",
        ):
            optimizer.step(closure)
        return
    returned = optimizer.step(closure)
    with torch.autocast("cpu", torch.float16):
        loss = own(x).pow(2).mean()
    loss.backward()
    torch.optim.SGD(own.parameters(), lr=0.1).step()
    torch.testing.assert_close(returned, loss, check_dtype=False)
    for mine, theirs in zip(model.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_lbfgs_calls_its_closure_again():
    accelerator = Accelerator(cpu=True)
    model = net()
    model, optimizer = accelerator.prepare(
        model, torch.optim.LBFGS(model.parameters(), max_iter=4)
    )
    own = net()
    lbfgs = torch.optim.LBFGS(own.parameters(), max_iter=4)

    def closure(model, optimizer, backward):
        optimizer.zero_grad()
        loss = mse(model(X), Y)
        backward(loss)
        return loss

    ours = optimizer.step(lambda: closure(model, optimizer, accelerator.backward))
    theirs = lbfgs.step(lambda: closure(own, lbfgs, torch.Tensor.backward))
    assert torch.equal(ours, theirs)
    assert all(
        torch.equal(a, b) for a, b in zip(weights(model), weights(own), strict=True)
    )


@pytest.mark.world_size(2)
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_uneven_last_batches_over_processes(steps, each):
    """23 samples, 8 a step, nothing repeated (7 in the last: 4 and 3): the mean over what is there."""
    plugin = GradientAccumulationPlugin(num_steps=steps, sync_each_batch=each)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_plugin=plugin,
        dataloader_config=DataLoaderConfiguration(even_batches=False),
    )
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = accelerator.prepare(
        model, sgd, DataLoader(TensorDataset(X, Y), batch_size=4)
    )
    for x, y in data:
        with accelerator.accumulate(model):
            accelerator.backward(mse(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert_close(weights(model), plain(groups_of(8 * steps), clip=0.5))


class Uneven(IterableDataset):
    """Batches of other sizes on each process: only asking tells what a step weighs."""

    def __iter__(self):
        start = 0
        for size in (3, 1, 2, 5, 4, 4, 2, 2):
            yield X[start : start + size], Y[start : start + size]
            start += size


@pytest.mark.world_size(2)
@pytest.mark.parametrize("steps", [1, 2])
def test_sizes_that_only_the_other_process_knows(steps):
    accelerator, model, optimizer, data = make(
        steps, DataLoader(Uneven(), batch_size=None)
    )
    for x, y in data:
        with accelerator.accumulate(model):
            accelerator.backward(mse(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    order = list(range(N))
    pairs = [order[:4], order[4:11], order[11:19], order[19:]]
    expected = pairs if steps == 1 else [pairs[0] + pairs[1], pairs[2] + pairs[3]]
    assert_close(weights(model), plain(expected))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("steps", [1, 2])
def test_a_loop_with_its_own_step_count_averages_its_batches(steps):
    """Each is the mean over all processes, whatever sizes they have; the next one does not rescale it."""
    accelerator, model, optimizer, data = make(
        steps, DataLoader(Uneven(), batch_size=None)
    )
    for number, (x, y) in enumerate(data, start=1):
        for part in (x, x.flip(1)):
            accelerator.backward(
                mse(model(part), y) * steps / 2
            )  # it divides by its own steps
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    alone = net()
    sgd = torch.optim.SGD(alone.parameters(), lr=0.1)
    for window in ((slice(0, 4), slice(4, 11)), (slice(11, 19), slice(19, 23))):
        for at in window:
            (
                mse(alone(X[at]), Y[at]) / 2 + mse(alone(X[at].flip(1)), Y[at]) / 2
            ).backward()
        sgd.step()
        sgd.zero_grad()
    assert_close(weights(model), weights(alone))


MASK = Y > -0.5
"""The elements that count as tokens."""


def token_loss(model, x, y):
    return ((model(x) - y).square() * (y > -0.5)).sum()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("way", ["accumulate", "no_sync", "weight"])
def test_a_mean_over_the_tokens_of_a_window(way):
    """Transformers' recipe, with windows of 3 and 1 batches: ``loss * steps * processes / tokens of the window``."""
    plugin = GradientAccumulationPlugin(num_steps=3, fixed_divisor=way != "weight")
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = accelerator.prepare(
        model, sgd, DataLoader(Uneven(), batch_size=None)
    )
    windows = [slice(0, 19), slice(19, 23)]
    counts = [int(MASK[at].sum()) for at in windows]
    if way == "no_sync":
        batches = iter(data)
        for size, count in zip((3, 1), counts, strict=True):
            window = [next(batches) for _ in range(size)]
            local = torch.tensor(sum(int((y > -0.5).sum()) for _, y in window))
            assert accelerator.gather(local).sum() == count
            for i, (x, y) in enumerate(window):
                with accelerator.no_sync(model) if i < size - 1 else nullcontext():
                    accelerator.backward(token_loss(model, x, y) * 3 * 2 / count)
            optimizer.step()
            optimizer.zero_grad()
    else:
        for i, (x, y) in enumerate(data):
            with accelerator.accumulate(model):
                loss = token_loss(model, x, y)
                if way == "weight":
                    accelerator.backward(loss, weight=int((y > -0.5).sum()))
                else:
                    accelerator.backward(loss * 3 * 2 / counts[i // 3])
                optimizer.step()
                optimizer.zero_grad()
    alone = net()
    sgd = torch.optim.SGD(alone.parameters(), lr=0.1)
    for at, count in zip(windows, counts, strict=True):
        (token_loss(alone, X[at], Y[at]) / count).backward()
        sgd.step()
        sgd.zero_grad()
    assert_close(weights(model), weights(alone))


@pytest.mark.parametrize("samples", [20, 14])
def test_a_fixed_divisor_is_the_rule_of_accelerate(samples):
    """Windows of two batches of 4; of 20 samples the last window has one, of 14 its last batch has two samples."""
    plugin = GradientAccumulationPlugin(num_steps=2, fixed_divisor=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(TensorDataset(X[:samples], Y[:samples]), batch_size=4)
    model, optimizer, data = accelerator.prepare(model, sgd, data)
    for x, y in data:
        with accelerator.accumulate(model):
            accelerator.backward(mse(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    alone = net()
    sgd = torch.optim.SGD(alone.parameters(), lr=0.1)
    batches = groups_of(4, list(range(samples)))
    for i, at in enumerate(batches, start=1):
        (mse(alone(X[at]), Y[at]) / 2).backward()
        if i % 2 == 0 or i == len(batches):
            sgd.step()
            sgd.zero_grad()
    assert_close(weights(model), weights(alone))


def test_a_weight_and_a_fixed_divisor_are_refused_together():
    plugin = GradientAccumulationPlugin(num_steps=2, fixed_divisor=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model = accelerator.prepare(net())
    with (
        accelerator.accumulate(model),
        pytest.raises(ConfigurationError, match="no loss has a weight"),
    ):
        accelerator.backward(model(X).sum(), weight=N)


@pytest.mark.world_size(2)
def test_a_dispatched_last_batch_is_weighted_by_its_samples():
    """23 in batches of 4, read by one process: the last 7 make 4 for each process, the first of them twice."""
    for count in (23, 21, 17):
        config = DataLoaderConfiguration(dispatch_batches=True)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        model = net()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        data = DataLoader(TensorDataset(X[:count], Y[:count]), batch_size=4)
        model, optimizer, data = accelerator.prepare(model, sgd, data)
        for x, y in data:
            optimizer.zero_grad()
            accelerator.backward(mse(model(x), y))
            optimizer.step()
        order = list(range(count))
        expected = groups_of(8, order)
        expected[-1] = expected[-1] + expected[-1][: len(expected[-1]) % 2]
        assert_close(weights(model), plain(expected))


@pytest.mark.world_size(2)
def test_weights_and_leaving_processes_are_refused_together():
    accelerator, model, _, _ = make()
    with (
        accelerator.join_uneven_inputs([model]),
        pytest.raises(ConfigurationError, match="no batch left"),
    ):
        accelerator.backward(model(X).sum(), weight=N)


@pytest.mark.world_size(2)
def test_a_sync_is_triggered_for_a_forward_without():
    accelerator, model, optimizer, _ = make()
    rank = accelerator.process_index
    with accelerator.no_sync(model):
        loss = mse(model(X[rank * 4 : rank * 4 + 4]), Y[rank * 4 : rank * 4 + 4])
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(loss)
    optimizer.step()
    assert_close(weights(model), plain([list(range(8))]))


def test_a_state_saved_inside_a_window_reports_missing_gradients(tmp_path, capsys):
    """What is loaded there goes on with a shorter window, of which the mean is taken."""
    accelerator, model, optimizer, data = make(2)
    for number, (x, y) in enumerate(data):
        with accelerator.accumulate(model):
            accelerator.backward(mse(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state(tmp_path / f"state-{number}")
        said = "gradients so far are not saved" in capsys.readouterr().out
        assert said != accelerator.sync_gradients
        if number == 2:
            break
    accelerator, model, optimizer, data = make(2)
    accelerator.load_state(tmp_path / "state-2")
    for x, y in data:
        with accelerator.accumulate(model):
            accelerator.backward(mse(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    order = list(range(N))
    assert_close(weights(model), plain([order[:8], order[12:16], order[16:]]))
