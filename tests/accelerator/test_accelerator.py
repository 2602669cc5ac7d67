"""`Accelerator` in loops of the user's own: equal to plain loops, on one process and on two."""

from __future__ import annotations

import warnings

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from trainer_kit import (
    Accelerator,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    LocalSGD,
    PartialState,
    ProfileKwargs,
    ProjectConfiguration,
    set_seed,
    skip_first_batches,
)
from trainer_kit.checkpoint import verify_checkpoint
from trainer_kit.core.errors import (
    CheckpointError,
    ConfigurationError,
    PrecisionError,
    RankError,
)

X = torch.randn(22, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randn(22, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


class Epochs:
    """Counts epochs, in saved states."""

    def __init__(self):
        self.done = 0

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


def net(dtype=torch.float64, dropout=0.0):
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1)
    ).to(dtype)


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def loader(batch_size=4, **options):
    return DataLoader(
        TensorDataset(torch.arange(len(X)), X, Y), batch_size=batch_size, **options
    )


def assert_close(one, other, **options):
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, **options)


def test_a_plain_loop_is_the_same_to_the_bit():
    def train(accelerator=None):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        data = loader()
        if accelerator is not None:
            model, optimizer, data, scheduler = accelerator.prepare(
                model, optimizer, data, scheduler
            )
        for _ in range(2):
            for _, x, y in data:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward() if accelerator is None else accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
        return weights(model), scheduler.get_last_lr()

    plain, rate = train()
    ours, our_rate = train(Accelerator(cpu=True))
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    assert rate == our_rate


def big_batches(steps, size, clip=None):
    """The loop that accumulation stands for: one batch as big as a window."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for start in range(0, len(X), steps * size):
            optimizer.zero_grad()
            nn.functional.mse_loss(
                model(X[start : start + steps * size]), Y[start : start + steps * size]
            ).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return weights(model)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_accumulation_is_one_big_batch(steps, clip):
    """22 samples in batches of 4: the last window is short, and the last batch in it too."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = accelerator.prepare(model, optimizer, loader())
    updates = 0
    for _ in range(2):
        for _, x, y in data:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                if accelerator.sync_gradients:
                    updates += 1
                    if clip is not None:
                        accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    assert_close(weights(model), big_batches(steps, 4, clip))
    assert updates == 2 * -(-6 // steps)


def test_equal_weights_give_the_mean_over_batches():
    """``backward(mean, weight=1)``: a short last batch counts as much as a full one."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader = (
        net(),
        None,
        DataLoader(TensorDataset(X, Y), batch_size=16),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward((model(x) - y).square().mean(), weight=1)
            optimizer.step()
            optimizer.zero_grad()
    plain = net()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    sum(
        (plain(x) - y).square().mean() / 2
        for x, y in ((X[:16], Y[:16]), (X[16:22], Y[16:22]))
    ).backward()
    sgd.step()
    assert len(X) == 22
    assert_close(weights(model), weights(plain))


def test_tokens_weigh():
    """``backward(sum, weight=tokens)``: the mean over all tokens of the window."""
    counts = [1, 5, 2, 6, 3, 4, 1]
    parts = torch.split(X, counts), torch.split(Y, counts)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = accelerator.prepare(net())
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for i, (x, y) in enumerate(zip(*parts, strict=True)):
        with accelerator.accumulate(model):
            if i == 6:
                accelerator.sync_gradients = (
                    True  # the user knows that this is the last
                )
            loss = (model(x) - y).square().sum()
            accelerator.backward(loss, weight=len(x))
            optimizer.step()
            optimizer.zero_grad()
    plain = net()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    for first, last in ((0, 8), (8, 21), (21, 22)):
        sgd.zero_grad()
        (
            (plain(X[first:last]) - Y[first:last]).square().sum() / (last - first)
        ).backward()
        sgd.step()
    assert_close(weights(model), weights(plain))


def test_a_mixture_of_weights_is_refused():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(net())
    with accelerator.accumulate(model):
        accelerator.backward(model(X).sum(), weight=22)
        with pytest.raises(ConfigurationError, match="this loss has no weight"):
            accelerator.backward(model(X).mean())
        with pytest.raises(ConfigurationError, match="have different weights"):
            accelerator.backward(model(X).sum(), weight=3)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_mixed_precision_is_that_of_a_plain_loop(precision):
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]

    def plain():
        model = net(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
        for _, x, y in loader():
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                out = model(x.float())
            loss = nn.functional.mse_loss(out.float(), y.float())
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        return weights(model)

    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    assert accelerator.mixed_precision == precision
    model = net(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = accelerator.prepare(model, optimizer, loader())
    for _, x, y in data:
        optimizer.zero_grad()
        out = model(x.float())
        assert out.dtype is torch.float32
        accelerator.backward(nn.functional.mse_loss(out, y.float()))
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(weights(model), plain(), strict=True))


def test_an_overflow_skips_the_step_and_the_scheduler():
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = accelerator.prepare(net(torch.float32))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer, scheduler = accelerator.prepare(
        sgd, torch.optim.lr_scheduler.StepLR(sgd, 1, 0.5)
    )
    before = weights(model)
    accelerator.backward(model(X.float()).mean() * 1e30)
    optimizer.step()
    scheduler.step()
    assert optimizer.step_was_skipped
    assert accelerator.optimizer_step_was_skipped
    assert scheduler.get_last_lr() == [0.1]
    assert all(torch.equal(a, b) for a, b in zip(weights(model), before, strict=True))


def test_two_models_with_an_optimizer_each():
    """A GAN's loop: the second backward reaches the first model too, and its optimizer does not see that."""

    def train(accelerator=None):
        generator, critic = net(), net()
        critic[0] = nn.Linear(1, 8, dtype=torch.float64)
        torch.manual_seed(5)
        nn.init.normal_(critic[0].weight)
        optimizers = [
            torch.optim.SGD(m.parameters(), lr=0.05) for m in (generator, critic)
        ]
        data = loader()
        if accelerator is not None:
            generator, critic, *optimizers, data = accelerator.prepare(
                generator, critic, *optimizers, data
            )
        backward = (
            torch.Tensor.backward if accelerator is None else accelerator.backward
        )
        for _, x, y in data:
            optimizers[1].zero_grad()
            backward(critic(generator(x).detach()).mean() - critic(y).mean())
            optimizers[1].step()
            optimizers[0].zero_grad()
            backward(-critic(generator(x)).mean())
            optimizers[0].step()
        return weights(generator) + weights(critic)

    assert all(
        torch.equal(a, b)
        for a, b in zip(train(), train(Accelerator(cpu=True)), strict=True)
    )


def test_instances_do_not_see_each_other():
    one = Accelerator(cpu=True, gradient_accumulation_steps=4, mixed_precision="bf16")
    two = Accelerator(cpu=True)
    model = one.prepare(net(torch.float32))
    with one.accumulate(model):
        assert not one.sync_gradients
        assert two.sync_gradients
    assert two.gradient_accumulation_steps == 1
    assert two.mixed_precision == "no"


def test_the_argument_beats_the_environment(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert Accelerator(cpu=True).mixed_precision == "bf16"
    assert Accelerator(cpu=True).gradient_accumulation_steps == 4
    assert (
        Accelerator(
            cpu=True, mixed_precision="no", gradient_accumulation_steps=2
        ).mixed_precision
        == "no"
    )
    assert (
        Accelerator(cpu=True, gradient_accumulation_steps=2).gradient_accumulation_steps
        == 2
    )


def test_prepared_twice_is_prepared_once():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = net(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    once = accelerator.prepare(model, optimizer, loader())
    twice = accelerator.prepare(*once)
    assert all(a is b for a, b in zip(once, twice, strict=True))
    assert (
        accelerator.unwrap_model(once[0], keep_fp32_wrapper=False).forward.__self__
        is model
    )


class Stream(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(torch.arange(float(self.count)))


def ids(data):
    return [int(i) for batch in data for i in batch[0]]


def test_epochs_have_orders_of_their_own_and_leaving_disturbs_nothing():
    set_seed(7)
    data = Accelerator(cpu=True).prepare(loader(shuffle=True))
    epochs = [ids(data) for _ in range(3)]
    assert sorted(epochs[0]) == list(range(22))
    assert epochs[0] != epochs[1]
    again = Accelerator(cpu=True, seed=7).prepare(loader(shuffle=True))
    assert ids(again) == epochs[0]
    for number, _ in enumerate(again):
        if number == 2:
            break
    assert ids(again) == epochs[2], "an epoch that was left early is over"
    fresh = Accelerator(cpu=True, seed=7).prepare(loader(shuffle=True))
    assert ids(skip_first_batches(fresh, 2)) == epochs[0][8:]
    assert ids(fresh) == epochs[1]


def test_skipping_reads_nothing_before(monkeypatch):
    read = []

    class Counts(TensorDataset):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    accelerator = Accelerator(cpu=True)
    data = accelerator.prepare(DataLoader(Counts(torch.arange(12)), batch_size=2))
    later = accelerator.skip_first_batches(data, 4)
    assert len(later) == 2
    assert ids(later) == [8, 9, 10, 11]
    assert read == [8, 9, 10, 11]
    assert ids(data) == list(range(12)), "once"


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}])
def test_a_state_saved_inside_an_epoch_resumes_exactly(tmp_path, options):
    def run(saves=None, resumes=False, stop=None):
        set_seed(11)
        accelerator = Accelerator(
            cpu=True,
            project_config=ProjectConfiguration(
                tmp_path, automatic_checkpoint_naming=True, total_limit=2
            ),
            gradient_accumulation_steps=2,
        )
        model = net(dropout=0.3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        data = loader(shuffle=True, **options)
        model, optimizer, data, scheduler = accelerator.prepare(
            model, optimizer, data, scheduler
        )
        epochs = Epochs()
        accelerator.register_for_checkpointing(epochs)
        seen, first = [], 0
        if resumes:
            torch.manual_seed(12345)
            accelerator.load_state()
            first = epochs.done
        for _ in range(first, 3):
            for index, x, y in data:
                seen.append(index.tolist())
                with accelerator.accumulate(model):
                    accelerator.backward(nn.functional.mse_loss(model(x), y))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if saves is not None and accelerator.sync_gradients:
                    accelerator.save_state()
                if stop is not None and len(seen) == stop:
                    return seen, None
            epochs.done += 1
        return seen, weights(model)

    whole, expected = run()
    before, _ = run(saves=True, stop=9)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["checkpoint_2", "checkpoint_3"], "total_limit"
    after, found = run(resumes=True)
    assert whole == before[:8] + after
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    for name in names:
        verify_checkpoint(tmp_path / "checkpoints" / name)


@pytest.mark.parametrize("overflows", [(), (3,)])
def test_a_loss_scale_saved_after_a_step_is_restored(tmp_path, overflows):
    def prepared():
        handler = GradScalerKwargs(init_scale=8.0, growth_interval=2)
        accelerator = Accelerator(
            cpu=True, mixed_precision="fp16", kwargs_handlers=[handler]
        )
        model = net(torch.float32)
        return accelerator, *accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1)
        )

    def train(accelerator, model, optimizer, steps):
        found = []
        for step in steps:
            loss = model(X.float()).square().mean()
            accelerator.backward(loss * float("inf") if step in overflows else loss)
            found.append(accelerator.scaler.get_scale())
            optimizer.step()
            optimizer.zero_grad()
        return [*found, *weights(model)] if steps.stop == 8 else found

    whole, broken = prepared(), prepared()
    expected = train(*whole, range(8))
    first = train(*broken, range(4))
    broken[0].save_state(tmp_path / "state")
    resumed = prepared()
    resumed[0].load_state(tmp_path / "state")
    train(*broken, range(4, 6))
    broken[0].load_state(tmp_path / "state")  # in a process that has stepped since
    for one in (resumed, broken):
        found = [*first, *train(*one, range(4, 8))]
        assert found[:8] == expected[:8]
        assert all(
            torch.equal(a, b) for a, b in zip(found[8:], expected[8:], strict=True)
        )


def test_numbering_continues_after_a_resume(tmp_path):
    def make():
        config = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True)
        accelerator = Accelerator(cpu=True, project_config=config)
        accelerator.prepare(net())
        return accelerator

    first = make()
    first.save_state()
    first.save_state()
    second = make()
    second.load_state()
    assert second.save_state().endswith("checkpoint_2")
    assert make().save_state().endswith("checkpoint_3"), "never over what is there"


def test_a_newly_configured_rate_stays_when_its_scheduler_is_restored(tmp_path):
    def made(rate):
        accelerator, model = Accelerator(cpu=True), net()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 1 / (1 + step)
        )
        # Not what they depend on first.
        scheduler, optimizer, model = [
            accelerator.prepare(one) for one in (scheduler, optimizer, model)
        ]
        assert scheduler.optimizers == [optimizer]
        return accelerator, model, optimizer, scheduler

    def step(accelerator, model, optimizer, scheduler):
        accelerator.backward(model(torch.ones(1, 6).double()).sum())
        optimizer.step()
        scheduler.step()
        return optimizer.param_groups[0]["lr"]

    first = made(0.1)
    assert step(*first) == pytest.approx(0.05)
    first[0].save_state(tmp_path / "state")
    for rate, then in ((0.1, 0.1 / 3), (0.01, 0.01 / 3)):
        again = made(rate)
        again[0].load_state(tmp_path / "state")
        assert step(*again) == pytest.approx(then)


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_a_rollback_in_the_saving_process_equals_one_in_a_new_process(
    tmp_path, capsys, rate
):
    def made():
        accelerator, model = Accelerator(cpu=True), net()
        kind = torch.optim.Adam if isinstance(rate, torch.Tensor) else torch.optim.SGD
        optimizer = kind(
            model.parameters(),
            lr=rate.clone() if isinstance(rate, torch.Tensor) else rate,
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return (accelerator, *accelerator.prepare(model, optimizer, scheduler))

    def step(accelerator, model, optimizer, scheduler):
        accelerator.backward(model(torch.ones(1, 6).double()).sum())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        return float(optimizer.param_groups[0]["lr"])

    first = made()
    assert step(*first) == pytest.approx(0.05)
    first[0].save_state(tmp_path / "state")
    rates = [step(*first) for _ in range(3)]
    weights = [parameter.detach().clone() for parameter in first[1].parameters()]
    for which in (first, made()):
        which[0].load_state(tmp_path / "state")
        assert float(which[2].param_groups[0]["lr"]) == pytest.approx(0.05)
        assert (
            [step(*which) for _ in range(3)]
            == rates
            == pytest.approx([0.025, 0.0125, 0.00625])
        )
        assert all(map(torch.equal, which[1].parameters(), weights))
    assert "configured" not in capsys.readouterr().out


def test_registered_objects_are_saved_or_refused(tmp_path):
    class Counter:
        def __init__(self):
            self.count = torch.zeros(())

        def state_dict(self):
            return {"count": self.count, "names": ["a"]}

        def load_state_dict(self, state):
            self.count = state["count"]

    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigurationError, match="needs state_dict"):
        accelerator.register_for_checkpointing(object())
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    counter.count += 3
    accelerator.save_state(tmp_path / "state")
    counter.count += 1
    accelerator.load_state(tmp_path / "state")
    assert counter.count == 3
    counter.state_dict = lambda: {"bad": object()}
    with pytest.raises(CheckpointError, match=r"objects\.0\.bad"):
        accelerator.save_state(tmp_path / "other")
    assert not (tmp_path / "other").exists()
    other = Accelerator(cpu=True)
    with pytest.raises(CheckpointError, match="objects: 1 saved, 0 prepared"):
        other.load_state(tmp_path / "state")


def test_save_hooks_can_replace_weights_and_add_files(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(net())
    called = []

    def before_save(models, weights, directory):
        called.append(("save", len(models), len(weights)))
        torch.save(weights.pop(), f"{directory}/mine.pt")

    def before_load(models, directory):
        called.append(("load", len(models)))
        models.pop().load_state_dict(
            torch.load(f"{directory}/mine.pt", weights_only=True)
        )

    accelerator.register_save_state_pre_hook(before_save)
    handle = accelerator.register_load_state_pre_hook(before_load)
    before = weights(model)
    accelerator.save_state(tmp_path / "state")
    verify_checkpoint(tmp_path / "state")
    with torch.no_grad():
        model[0].weight.zero_()
    accelerator.load_state(tmp_path / "state")
    assert all(torch.equal(a, b) for a, b in zip(weights(model), before, strict=True))
    assert called == [("save", 1, 1), ("load", 1)]
    handle.remove()


def test_a_url_is_refused_with_an_explanation():
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(net())
    for call in (accelerator.save_state, accelerator.load_state):
        with pytest.raises(ConfigurationError, match="saves to local directories only"):
            call("memory://bucket/state")


def test_weights_for_hugging_face(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(net())
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "config.json").write_text("{}")
    accelerator.save_model(model, tmp_path / "hub")
    loaded = load_file(tmp_path / "hub" / "model.safetensors")
    assert all(
        torch.equal(loaded[name], value) for name, value in model.state_dict().items()
    )
    accelerator.save_model(model, tmp_path / "hub", max_shard_size=300)
    names = sorted(path.name for path in (tmp_path / "hub").iterdir())
    assert names[0] == "config.json"
    assert "model.safetensors" not in names
    assert "model.safetensors.index.json" in names


def test_weights_that_cannot_be_written_leave_those_before(tmp_path, monkeypatch):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(net())

    class Unwritten:
        def __reduce__(self):
            raise OSError("of a user's")

    before = {"a": torch.ones(2)}
    accelerator.save(before, tmp_path / "a.pt")
    accelerator.save(before, tmp_path / "a.safetensors", safe_serialization=True)
    accelerator.save_model(model, tmp_path)
    with pytest.raises(OSError, match="of a user's"):
        accelerator.save({"a": torch.zeros(2), "b": Unwritten()}, tmp_path / "a.pt")
    with pytest.raises(
        ConfigurationError, match="safetensors hold tensors by name\n  found: b: int"
    ):
        accelerator.save(
            {"a": torch.zeros(2), "b": 1},
            tmp_path / "a.safetensors",
            safe_serialization=True,
        )
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["a.pt", "a.safetensors", "model.safetensors"]
    saved = load_file(tmp_path / "model.safetensors")
    monkeypatch.setattr("os.replace", lambda *paths: Unwritten().__reduce__())
    with pytest.raises(OSError, match="of a user's"):
        accelerator.save_model(net(), tmp_path)
    for found in (torch.load(tmp_path / "a.pt"), load_file(tmp_path / "a.safetensors")):
        assert torch.equal(found["a"], before["a"])
    assert all(
        torch.equal(value, saved[name])
        for name, value in load_file(tmp_path / "model.safetensors").items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.world_size(2)
def test_two_processes_train_as_one(steps):
    """22 samples in batches of 4 over 2 processes: the last batch is filled up from the start of the data."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = net()
    model, optimizer, data = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loader()
    )
    seen = []
    for index, x, y in data:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        seen.append(accelerator.gather_for_metrics(index))
    assert torch.cat(seen).tolist() == list(range(22)), "each sample once"
    plain = net()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    order = [*range(22), 0, 1]
    for start in range(0, 24, 8 * steps):
        at = order[start : start + 8 * steps]
        sgd.zero_grad()
        nn.functional.mse_loss(plain(X[at]), Y[at]).backward()
        sgd.step()
    assert_close(weights(model), weights(plain))


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_tokens_weigh_over_processes():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = net()
    model, optimizer = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    pieces = {0: [(0, 3), (3, 4)], 1: [(4, 11), (11, 16)]}[accelerator.process_index]
    for first, last in pieces:
        with accelerator.accumulate(model):
            loss = (model(X[first:last]) - Y[first:last]).square().sum()
            accelerator.backward(loss, weight=last - first)
            optimizer.step()
            optimizer.zero_grad()
    plain = net()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    ((plain(X[:16]) - Y[:16]).square().sum() / 16).backward()
    sgd.step()
    assert_close(weights(model), weights(plain))


@pytest.mark.world_size(2)
def test_loaders_of_every_kind_give_each_sample_once():
    def gathered(data, **config):
        accelerator = Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(**config)
        )
        prepared = accelerator.prepare(data)
        found, ends = [], []
        for batch in prepared:
            batch = batch[0] if isinstance(batch, (list, tuple)) else batch
            found += accelerator.gather_for_metrics(batch).tolist()
            ends.append(prepared.end_of_dataloader)
        assert ends == [False] * (len(ends) - 1) + [True]
        return [int(i) for i in found], len(ends)

    everything = list(range(22))
    assert gathered(loader()) == (everything, 3)
    assert gathered(loader(batch_size=2), split_batches=True) == (everything, 11)
    assert gathered(loader(drop_last=True)) == (everything[:16], 2)
    assert gathered(DataLoader(Stream(22), batch_size=4)) == (everything, 3)
    assert gathered(DataLoader(Stream(22), batch_size=4), dispatch_batches=True) == (
        everything,
        3,
    )
    assert gathered(loader(), dispatch_batches=True) == (everything, 3)
    assert gathered(DataLoader(Stream(17), batch_size=4)) == (everything[:17], 3)
    shuffled, count = gathered(loader(shuffle=True))
    assert (sorted(shuffled), count) == (everything, 3)


@pytest.mark.world_size(2)
def test_uneven_inputs_finish():
    accelerator = Accelerator(cpu=True)
    model = net()
    data = DataLoader(TensorDataset(torch.arange(5), X[:5], Y[:5]), batch_size=1)
    model, optimizer, data = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), data
    )
    seen = 0
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for _, x, y in data:
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            seen += 1
    assert accelerator.reduce(torch.tensor(seen)).item() == 5
    first, *others = accelerator.gather(model.module[0].weight.detach().unsqueeze(0))
    assert all(torch.equal(first, other) for other in others)
    assert data.even


@pytest.mark.world_size(2)
def test_uneven_inputs_of_a_stream_warn():
    """Accelerate leaves a stream as it is, so the same call reads other samples here."""
    accelerator = Accelerator(cpu=True)
    data = accelerator.prepare(DataLoader(Stream(5), batch_size=1))
    kept = accelerator.prepare(DataLoader(TensorDataset(torch.arange(5)), batch_size=1))
    warned = pytest.warns(
        UserWarning, match="1 prepared loader.*only supported for map-style datasets"
    )
    with warned as told, accelerator.join_uneven_inputs([], even_batches=False):
        count = len(list(data))
    assert told[0].filename == __file__
    assert accelerator.reduce(torch.tensor(count)).item() == 5
    assert data.even
    assert kept.even
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with (
            accelerator.join_uneven_inputs([]),
            accelerator.join_uneven_inputs([], even_batches=True),
        ):
            pass


@pytest.mark.world_size(2)
def test_collectives():
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    mine = torch.tensor([rank, 10])
    assert accelerator.gather({"a": mine, "b": torch.tensor(rank)})["a"].tolist() == [
        0,
        10,
        1,
        10,
    ]
    assert accelerator.gather(torch.tensor(rank)).tolist() == [0, 1]
    assert accelerator.reduce(mine, "sum").tolist() == [1, 20]
    assert accelerator.reduce(mine, "mean").tolist() == [0.5, 10.0], "whole numbers too"
    assert accelerator.reduce(mine, "max").tolist() == [1, 10]
    assert accelerator.reduce(mine, "none").tolist() == [rank, 10]
    with pytest.raises(ConfigurationError, match="unknown reduction"):
        accelerator.reduce(mine, "median")
    padded = accelerator.pad_across_processes(
        torch.ones(rank + 1, 2), dim=0, pad_index=-1
    )
    assert padded.shape == (2, 2)
    assert accelerator.gather_for_metrics([f"{rank}a"], use_gather_object=True) == [
        "0a",
        "1a",
    ]
    if accelerator.is_last_process:
        accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()
    with accelerator.split_between_processes(
        ["a", "b", "c"], apply_padding=True
    ) as part:
        assert part == [["a", "b"], ["c", "c"]][rank]
    order = []
    with accelerator.main_process_first():
        order.append(rank)
    assert PartialState(cpu=True).num_processes == 2
    accelerator.debug = True
    with pytest.raises(
        RankError,
        match=r"process 0: gather\(\(1,\) float32\) at test_accelerator.py:\d+; process 1: gather\(\(2,",
    ):
        accelerator.gather(torch.ones(rank + 1))


def test_wrong_arguments_are_refused():
    with pytest.raises(ConfigurationError, match="expected a DeepSpeedPlugin"):
        Accelerator(cpu=True, deepspeed_plugin=object())
    with pytest.raises(
        TypeError, match=r"unexpected argument 'mixed': use one of: .*mixed_precision"
    ):
        Accelerator(cpu=True, mixed="fp16")
    with pytest.raises(
        ConfigurationError, match="unknown communication hook\n  found: 'fp8'"
    ):
        DistributedDataParallelKwargs(comm_hook="fp8")
    with pytest.raises(ConfigurationError, match="accumulation is set twice"):
        Accelerator(
            cpu=True,
            gradient_accumulation_steps=2,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3),
        )
    with pytest.raises(
        ConfigurationError, match="a step needs at least one micro-batch"
    ):
        Accelerator(
            cpu=True,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=0),
        )
    with pytest.raises(ConfigurationError, match="split_batches is set twice"):
        Accelerator(
            cpu=True,
            split_batches=True,
            dataloader_config=DataLoaderConfiguration(even_batches=False),
        )
    assert Accelerator(
        cpu=True, kwargs_handlers=ProfileKwargs(with_flops=True)
    ).profile_handler.with_flops
    with pytest.raises(
        ConfigurationError, match="expected a kwargs handler\n  found: <class"
    ):
        Accelerator(cpu=True, kwargs_handlers=[ProfileKwargs])
    with pytest.raises(
        ConfigurationError, match="the launcher sets the rendezvous address"
    ):
        InitProcessGroupKwargs(init_method="tcp://10.0.0.1:2345")


@pytest.mark.world_size(2)
def test_local_sgd_does_not_change_integer_parameters():
    """An integer parameter, such as a quantized weight, has no mean."""
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    model.steps = torch.nn.Parameter(torch.tensor([4, 2]), requires_grad=False)
    with torch.no_grad():
        model.weight.fill_(float(accelerator.process_index))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    with torch.no_grad():  # DDP has made the weights one
        accelerator.unwrap_model(model).weight.fill_(float(accelerator.process_index))
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=1) as local_sgd:
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        local_sgd.step()
    plain = accelerator.unwrap_model(model)
    assert plain.steps.tolist() == [4, 2]
    assert plain.weight.tolist() == [[0.5, 0.5]]


def test_the_lists_that_scripts_replace_are_those_of_the_parts(tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.trackers = []
    accelerator.log_with = ["jsonl"]
    accelerator.project_configuration.set_directories(str(tmp_path))
    accelerator.init_trackers("run")
    assert [tracker.name for tracker in accelerator.trackers] == ["jsonl"]
    accelerator.end_training()


def test_the_word_fp8_in_any_case_takes_the_recipe_of_the_launcher(monkeypatch):
    monkeypatch.setenv("TRAINER_KIT_FP8_BACKEND", "TE")
    for word in ("fp8", "FP8"):
        with pytest.raises(PrecisionError, match="Transformer Engine"):
            Accelerator(cpu=True, mixed_precision=word)
