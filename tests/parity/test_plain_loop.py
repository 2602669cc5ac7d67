"""The weights after a fit are, bit for bit, those of the loop that one writes by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import trainer_kit as tk
from tests.parity.plain import (
    Batch,
    Classifier,
    adamw,
    assert_changed,
    assert_same,
    copy_of,
    doubled,
    make_batches,
    make_net,
    merged,
    plain_loop,
    sgd,
    train,
)

ADAPTIVE = {
    "sgd": sgd,
    "adamw": adamw,
    "adam_amsgrad": lambda net: torch.optim.Adam(
        net.parameters(), lr=0.01, amsgrad=True
    ),
    "nesterov": lambda net: torch.optim.SGD(
        net.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "two_groups": lambda net: torch.optim.AdamW(
        [{"params": net[0].parameters()}, {"params": net[-1].parameters(), "lr": 0.1}]
    ),
}


@pytest.mark.parametrize("configure", ADAPTIVE.values(), ids=ADAPTIVE)
def test_optimizers(configure: Any) -> None:
    batches, net, mine = make_batches(7, last=2), make_net(), make_net()
    plain_loop(net, [batches] * 3, configure(net))
    trainer = train(Classifier(mine, configure), batches, max_epochs=3)
    assert_same(mine, net)
    assert_changed(mine, make_net())
    assert (trainer.global_step, trainer.current_epoch) == (21, 3)


def test_scheduler_by_step() -> None:
    def configure(net: nn.Module) -> Any:
        optimizer = adamw(net)
        scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=21)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    batches, net, mine = make_batches(7), make_net(), make_net()
    made = configure(net)
    plain_loop(
        net, [batches] * 3, made["optimizer"], by_step=made["lr_scheduler"]["scheduler"]
    )
    train(Classifier(mine, configure), batches, max_epochs=3)
    assert_same(mine, net)


def test_scheduler_by_epoch() -> None:
    batches, net, mine = make_batches(5), make_net(), make_net()
    optimizer = adamw(net)
    plain_loop(
        net,
        [batches] * 4,
        optimizer,
        by_epoch=lr_scheduler.ExponentialLR(optimizer, 0.5).step,
    )

    def configure(net: nn.Module) -> Any:
        optimizer = adamw(net)
        return [optimizer], [lr_scheduler.ExponentialLR(optimizer, 0.5)]

    trainer = train(Classifier(mine, configure), batches, max_epochs=4)
    assert_same(mine, net)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * 0.5**4)


def test_scheduler_frequency_counts_over_epochs() -> None:
    batches, net, mine = make_batches(5), make_net(), make_net()
    optimizer = sgd(net)
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    plain_loop(net, [batches[:3]], optimizer)
    scheduler.step()
    plain_loop(net, [batches[3:] + batches[:1]], optimizer)
    scheduler.step()
    plain_loop(net, [batches[1:4]], optimizer)
    scheduler.step()
    plain_loop(net, [batches[4:]], optimizer)

    def configure(net: nn.Module) -> Any:
        optimizer = sgd(net)
        scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [
            {"scheduler": scheduler, "interval": "step", "frequency": 3}
        ]

    train(Classifier(mine, configure), batches, max_epochs=2)
    assert_same(mine, net)


class Validated(Classifier):
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y))


def test_reduce_on_plateau_sees_the_validation_of_its_epoch() -> None:
    batches, val, net, mine = (
        make_batches(4),
        make_batches(2, seed=9),
        make_net(),
        make_net(),
    )
    options = {"factor": 0.5, "patience": 0, "threshold": 0.02, "cooldown": 1}
    optimizer = sgd(net)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, **options)
    rates = []

    def by_epoch() -> None:
        with torch.no_grad():
            losses = [F.cross_entropy(net(x), y) for x, y in val]
        scheduler.step(torch.stack(losses).mean())
        rates.append(optimizer.param_groups[0]["lr"])

    plain_loop(net, [batches] * 8, optimizer, by_epoch=by_epoch)

    def configure(net: nn.Module) -> Any:
        optimizer = sgd(net)
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer, **options)
        return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val_loss"}

    trainer = train(Validated(mine, configure), batches, val, max_epochs=8)
    assert len(set(rates)) > 2, "the plateau must be reached for this to say anything"
    assert trainer.optimizers[0].param_groups[0]["lr"] == rates[-1]
    assert_same(mine, net)


CLIPS = {"norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_}


@pytest.mark.parametrize("algorithm", CLIPS)
def test_clipping(algorithm: str) -> None:
    limit = {"norm": 0.3, "value": 0.02}[algorithm]
    batches, net, mine, free = make_batches(6), make_net(), make_net(), make_net()
    plain_loop(
        net,
        [batches] * 2,
        sgd(net),
        clip=lambda parameters: CLIPS[algorithm](parameters, limit),
    )
    train(
        Classifier(mine),
        batches,
        max_epochs=2,
        gradient_clip_val=limit,
        gradient_clip_algorithm=algorithm,
    )
    assert_same(mine, net)
    train(Classifier(free), batches, max_epochs=2)
    assert not torch.equal(free[0].weight, mine[0].weight), "the limit must be felt"


def test_bf16_mixed() -> None:
    batches, net, mine = make_batches(6), make_net(), make_net()
    plain_loop(net, [batches] * 2, adamw(net), autocast=torch.bfloat16)
    train(Classifier(mine, adamw), batches, max_epochs=2, precision="bf16-mixed")
    assert_same(mine, net)
    assert mine[0].weight.dtype == torch.float32


@pytest.mark.parametrize("clip", [None, 0.3])
def test_16_mixed_with_a_gradient_scaler(clip: float | None) -> None:
    batches, net, mine = make_batches(6), make_net(), make_net()
    clipping = (
        None
        if clip is None
        else (lambda parameters: nn.utils.clip_grad_norm_(parameters, clip))
    )
    scaler = torch.amp.GradScaler("cpu")
    plain_loop(
        net,
        [batches] * 2,
        adamw(net),
        autocast=torch.float16,
        scaler=scaler,
        clip=clipping,
    )
    trainer = train(
        Classifier(mine, adamw),
        batches,
        max_epochs=2,
        precision="16-mixed",
        gradient_clip_val=clip,
    )
    assert_same(mine, net)
    assert trainer.precision_plugin.scaler.get_scale() == scaler.get_scale()


def with_overflow() -> list[Batch]:
    """The third batch is too large for float16."""
    batches = make_batches(6)
    batches[2] = (batches[2][0] * 1e6, batches[2][1])
    return batches


@pytest.mark.parametrize("log_every", [1, 50])
def test_16_mixed_overflow_skips_the_optimizer_and_its_scheduler(
    log_every: int,
) -> None:
    def configure(net: nn.Module) -> Any:
        optimizer = adamw(net)
        return [optimizer], [
            {"scheduler": lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}
        ]

    batches, net, mine = with_overflow(), make_net(), make_net()
    (optimizer,), (config,) = configure(net)
    scaler = torch.amp.GradScaler("cpu")
    by_step = config["scheduler"]
    skipped = plain_loop(
        net,
        [batches] * 2,
        optimizer,
        autocast=torch.float16,
        scaler=scaler,
        by_step=by_step,
    )
    assert skipped == 2
    options = {"max_epochs": 2, "precision": "16-mixed", "log_every_n_steps": log_every}
    trainer = train(Classifier(mine, configure), batches, **options)
    assert_same(mine, net)
    assert trainer.global_step == 12, "a skipped turn is a step"
    assert trainer.precision_plugin.state_dict() == scaler.state_dict()
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 10


def test_64_true() -> None:
    batches, net, mine = make_batches(5), make_net().double(), make_net()
    plain_loop(net, [doubled(batches)] * 2, adamw(net))
    train(Classifier(mine, adamw), batches, max_epochs=2, precision="64-true")
    assert mine[0].weight.dtype == torch.float64
    assert_same(mine, net)


def test_bf16_true() -> None:
    batches, net, mine = make_batches(5), make_net().bfloat16(), make_net()
    plain_loop(net, [[(x.bfloat16(), y) for x, y in batches]] * 2, adamw(net))
    train(Classifier(mine, adamw), batches, max_epochs=2, precision="bf16-true")
    assert mine[0].weight.dtype == torch.bfloat16
    assert_same(mine, net)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("together", [1, 2])
def test_lbfgs_evaluates_the_window_again(search: str | None, together: int) -> None:
    def configure(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(
            net.parameters(), lr=0.5, max_iter=4, line_search_fn=search
        )

    batches, net, mine = (
        doubled(make_batches(4)),
        make_net().double(),
        make_net().double(),
    )
    optimizer = configure(net)
    for at in range(0, 4, together):
        window = batches[at : at + together]

        def closure(window: list[Batch] = window) -> torch.Tensor:
            optimizer.zero_grad()
            total = torch.zeros((), dtype=torch.float64)
            for x, y in window:
                loss = F.cross_entropy(net(x), y) / len(window)
                loss.backward()
                total += loss.detach()
            return total

        optimizer.step(closure)
    train(Classifier(mine, configure), batches, accumulate_grad_batches=together)
    assert_same(mine, net)


def test_lbfgs_draws_the_same_dropout_at_every_evaluation() -> None:
    seen = []

    class Seen(Classifier):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            seen.append(torch.rand(()).item())
            return super().training_step(batch, batch_idx)

    net = make_net(dropout=0.3)
    train(
        Seen(net, lambda net: torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)),
        make_batches(2),
    )
    assert len(seen) > 2
    assert len(set(seen)) == 2, "one draw a batch, however often it is evaluated"


def test_dropout_consumes_the_same_random_numbers() -> None:
    batches, net, mine = make_batches(6), make_net(dropout=0.4), make_net(dropout=0.4)
    torch.manual_seed(5)
    plain_loop(net, [batches] * 3, adamw(net))
    left = torch.get_rng_state()
    torch.manual_seed(5)
    train(Classifier(mine, adamw), batches, max_epochs=3)
    assert_same(mine, net)
    assert torch.equal(torch.get_rng_state(), left)


class Marked(Classifier):
    """Writes down which samples a step sees; a sample's number is its first feature."""

    def __init__(self, net: nn.Module, configure: Any = sgd) -> None:
        super().__init__(net, configure)
        self.seen: list[list[int]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.seen.append([round(float(value)) for value in batch[0][:, 0]])
        return super().training_step(batch, batch_idx)


def numbered(count: int) -> TensorDataset:
    x, y = merged(make_batches(1, size=count))
    x[:, 0] = torch.arange(count)
    return TensorDataset(x, y)


def flat(epoch: list[list[int]]) -> list[int]:
    return [number for batch in epoch for number in batch]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_shuffled_loader(num_workers: int) -> None:
    data, net = numbered(22), make_net(dropout=0.2)
    start = copy_of(net)
    module = Marked(net, adamw)
    torch.manual_seed(5)
    train(
        module,
        DataLoader(data, batch_size=4, shuffle=True, num_workers=num_workers),
        max_epochs=2,
        seed=3,
    )
    first, second = module.seen[:6], module.seen[6:]
    for epoch in (first, second):
        assert sorted(flat(epoch)) == list(range(22))
        assert [len(batch) for batch in epoch] == [4, 4, 4, 4, 4, 2]
    assert first != second
    assert flat(first) != list(range(22))
    torch.manual_seed(5)
    plain_loop(
        start, [[data[ids] for ids in epoch] for epoch in (first, second)], adamw(start)
    )
    assert_same(net, start)


def test_the_order_depends_on_the_seed_and_not_on_the_workers() -> None:
    def order(seed: int, num_workers: int = 0) -> list[list[int]]:
        module = Marked(make_net())
        loader = DataLoader(
            numbered(12), batch_size=3, shuffle=True, num_workers=num_workers
        )
        train(module, loader, max_epochs=2, seed=seed)
        return module.seen

    assert order(3) == order(3)
    assert order(3) == order(3, num_workers=2)
    assert order(3) != order(4)


@pytest.mark.parametrize("of", ["loader", "sampler"])
@pytest.mark.parametrize("by", ["trainer", "accelerator"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_order_of_a_plain_loop(of: str, by: str, num_workers: int) -> None:
    """With a generator of the user's own, order, dropout and weights are those of the loop without this library."""
    data, mine = numbered(22), make_net(dropout=0.2)
    theirs = copy_of(mine)

    def loader() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(9)
        if of == "loader":
            return DataLoader(
                data,
                batch_size=4,
                shuffle=True,
                num_workers=num_workers,
                generator=generator,
            )
        sampler = RandomSampler(data, generator=generator)
        return DataLoader(
            data,
            batch_size=4,
            sampler=sampler,
            num_workers=num_workers,
            generator=generator,
        )

    made = loader()
    torch.manual_seed(5)
    plain_loop(theirs, [made, made], adamw(theirs))
    torch.manual_seed(5)
    if by == "trainer":
        train(Classifier(mine, adamw), loader(), max_epochs=2)
    else:
        accelerator = tk.Accelerator(cpu=True)
        net, optimizer, prepared = accelerator.prepare(mine, adamw(mine), loader())
        for _ in range(2):
            for x, y in prepared:
                optimizer.zero_grad()
                accelerator.backward(F.cross_entropy(net(x), y))
                optimizer.step()
    assert_same(mine, theirs)


@pytest.mark.parametrize("way", ["one", "named", "manual", "bound"])
def test_a_group_that_is_added_meanwhile(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradual unfreezing: dropped, clipped and stepped from the next step on, also by what is bound to parameters."""
    batches, net, mine = make_batches(6), make_net(), make_net()
    thawed_at, head = 3, {"lr": 0.1, "momentum": 0.9}

    def frozen(net: nn.Module) -> torch.optim.Optimizer:
        net[0].requires_grad_(False)
        return torch.optim.SGD(net[-1].parameters(), **head)

    def thaw(net: nn.Module, optimizer: Any) -> None:
        net[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(net[0].parameters()), "lr": 0.05})

    class Thaws(Classifier):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if way != "manual":
                return {"all": loss} if way == "named" else loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.05)
            optimizer.step()
            return loss

        def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
            if batch_idx == thawed_at:
                thaw(self.net, self.optimizers())

        def configure_optimizers(self) -> Any:
            return {"all": frozen(self.net)} if way == "named" else frozen(self.net)

    def bound(_: Any, optimizer: torch.optim.Optimizer) -> Any:
        groups = [list(group["params"]) for group in optimizer.param_groups]

        def step(*arguments: Any) -> None:
            for group, known in zip(optimizer.param_groups, groups, strict=False):
                group["params"] = known
            optimizer.param_groups, added = (
                optimizer.param_groups[: len(groups)],
                optimizer.param_groups[len(groups) :],
            )
            optimizer.step(*arguments)
            optimizer.param_groups += added

        return step

    if way in ("bound", "manual"):
        monkeypatch.setattr(
            "trainer_kit.strategies.single.SingleDeviceStrategy.bind_step", bound
        )
    optimizer = frozen(net)
    for index, (x, y) in enumerate(batches):
        if index == thawed_at:
            thaw(net, optimizer)
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        nn.utils.clip_grad_norm_(
            [p for group in optimizer.param_groups for p in group["params"]], 0.05
        )
        optimizer.step()
    module = Thaws(mine)
    module.automatic_optimization = way != "manual"
    trainer = train(
        module, batches, **({} if way == "manual" else {"gradient_clip_val": 0.05})
    )
    assert_same(mine, net)
    assert_changed(mine[0], make_net()[0])
    assert "add_param_group" not in vars(trainer.optimizers[0])
