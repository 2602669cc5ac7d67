"""Parameters that are frozen, unfrozen or added while training: several ranks train as one process does."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import trainer_kit as tk
from tests.parity.plain import (
    Classifier,
    assert_changed,
    assert_close,
    case,
    ddp,
    doubled,
    make_batches,
    train,
)
from trainer_kit.core.errors import StrategyError
from trainer_kit.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    MeshStrategy,
)

STEPS = 6


class Net(nn.Module):
    """A backbone, a head, and a layer that a change may add."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.backbone = nn.Linear(8, 8).double()
        self.head = nn.Linear(8, 4).double()
        self.extra: nn.Module | None = None
        self.seed_by_rank = seed != 0

    def forward(self, x: Tensor) -> Tensor:
        features = torch.tanh(self.backbone(x))
        if self.extra is not None:
            features = features + self.extra(features)
        return self.head(features)


Change = Callable[[Net, torch.optim.Optimizer], None]


def freeze_backbone(net: Net, optimizer: torch.optim.Optimizer) -> None:
    net.backbone.requires_grad_(False)


def train_backbone(net: Net, optimizer: torch.optim.Optimizer) -> None:
    net.backbone.requires_grad_(True)


def freeze_all(net: Net, optimizer: torch.optim.Optimizer) -> None:
    net.requires_grad_(False)


def train_all(net: Net, optimizer: torch.optim.Optimizer) -> None:
    net.requires_grad_(True)


def freeze_head(net: Net, optimizer: torch.optim.Optimizer) -> None:
    net.head.requires_grad_(False)


def swap(net: Net, optimizer: torch.optim.Optimizer) -> None:
    """Train the layer that was frozen, in place of the other one."""
    for layer in (net.backbone, net.head):
        layer.requires_grad_(not layer.weight.requires_grad)


def add_layer(net: Net, optimizer: torch.optim.Optimizer) -> None:
    rank = dist.get_rank() if dist.is_initialized() and net.seed_by_rank else 0
    torch.manual_seed(5 + rank)
    net.extra = nn.Linear(8, 8).double()
    optimizer.add_param_group({"params": list(net.extra.parameters())})


CHANGES: dict[str, dict[int, Change]] = {
    "unfrozen before the first step": {-1: freeze_backbone, 0: train_backbone},
    "unfrozen later": {-1: freeze_backbone, 3: train_backbone},
    "all frozen at first": {-1: freeze_all, 0: train_all},
    "frozen later": {2: freeze_backbone},
    "frozen and unfrozen": {
        -1: freeze_backbone,
        1: train_backbone,
        2: freeze_backbone,
        4: train_backbone,
    },
    "swapped": {-1: freeze_backbone, 1: swap, 2: swap, 3: swap},
    "added": {2: add_layer},
    "added and frozen": {
        -1: freeze_backbone,
        2: add_layer,
        3: freeze_head,
        4: train_all,
    },
}


def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), 0.02)


def batches_of(rank: int | None) -> list[tuple[Tensor, Tensor]]:
    """The batches of one rank; None: those of both."""
    both = doubled(make_batches(STEPS, size=6))
    if rank is None:
        return both
    return [(x[rank::2], y[rank::2]) for x, y in both]


def change(
    changes: dict[int, Change], step: int, net: Net, optimizer: torch.optim.Optimizer
) -> None:
    if step in changes:
        changes[step](net, optimizer)


def train_plain(changes: dict[int, Change]) -> Net:
    net = Net()
    optimizer = make_optimizer(net)
    change(changes, -1, net, optimizer)
    for step, (x, y) in enumerate(batches_of(None)):
        change(changes, step, net, optimizer)
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


def assert_equal_on_ranks(net: nn.Module) -> None:
    for name, parameter in net.named_parameters():
        whole = parameter.detach()
        rows = [torch.empty_like(whole) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, whole)
        assert torch.equal(rows[0], rows[1]), f"{name} differs from rank to rank"


def train_accelerated(
    changes: dict[int, Change], face: str = "accelerator", **options: Any
) -> Net:
    """A custom loop through one of the faces, each rank with its part of every batch."""
    net = Net(seed=dist.get_rank())
    optimizer: Any = make_optimizer(net)
    change(changes, -1, net, optimizer)
    if face == "fabric":
        fabric = tk.Fabric(
            accelerator="cpu", devices=2, strategy=DDPStrategy(**options)
        )
        fabric.launch()
        model, stepped = fabric.setup(net, optimizer)
        backward: Any = fabric.backward
    else:
        accelerator = tk.Accelerator(cpu=True, strategy=DDPStrategy(**options))
        backward = accelerator.backward
        model = accelerator.prepare(net)
        stepped = (
            optimizer
            if face == "unprepared optimizer"
            else accelerator.prepare(optimizer)
        )
    for step, (x, y) in enumerate(batches_of(dist.get_rank())):
        change(changes, step, net, optimizer)
        if face == "prepared again" and step in changes:
            model, stepped = accelerator.prepare(net, stepped)
        backward(F.cross_entropy(model(x), y))
        stepped.step()
        stepped.zero_grad()
    return net


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "face", ["accelerator", "fabric", "prepared again", "unprepared optimizer"]
)
def test_a_custom_loop_averages_what_is_trained_now(face: str) -> None:
    for name, changes in CHANGES.items():
        with case(changes=name):
            plain, net = train_plain(changes), train_accelerated(changes, face)
            assert_equal_on_ranks(net)
            assert_close(net, plain)
            assert_changed(net.backbone, Net().backbone)


@pytest.mark.world_size(2)
def test_accumulation_and_options_average_what_is_trained_now() -> None:
    changes = CHANGES["frozen and unfrozen"]
    plain = train_plain(changes)
    for options in (
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": False, "bucket_cap_mb": 0.0001},
        {"ddp_comm_hook": averaging_hook},
    ):
        with case(options=options):
            assert_close(train_accelerated(changes, **options), plain)


def averaging_hook(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    total = bucket.buffer().div_(dist.get_world_size())
    work = dist.all_reduce(total, async_op=True).get_future()
    return work.then(lambda done: done.value()[0])


class Changing(Classifier):
    def __init__(self, changes: dict[int, Change], manual: bool) -> None:
        super().__init__(Net(seed=dist.get_rank()), make_optimizer)
        self.changes = changes
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        change(self.changes, batch_idx, self.net, self.optimizers())


@pytest.mark.world_size(2)
@pytest.mark.parametrize("manual", [False, True])
def test_a_fit_averages_what_is_trained_now(manual: bool) -> None:
    for name, changes in CHANGES.items():
        with case(changes=name):
            module = Changing(changes, manual)
            change(changes, -1, module.net, None)
            ddp(
                module,
                [
                    half
                    for both in zip(batches_of(0), batches_of(1), strict=True)
                    for half in both
                ],
            )
            assert_close(module.net, train_plain(changes))


@pytest.mark.world_size(2)
def test_alternating_models_and_short_windows_average_what_is_trained_now() -> None:
    """As in a GAN: each of two models is frozen in the steps of the other; a window has two micro-batches."""

    def alternate(nets: list[Net], step: int) -> None:
        for index, net in enumerate(nets):
            net.requires_grad_(step % 2 == index)

    def loss_of(nets: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(nets[0](x) + nets[1](x), y)

    plain = [Net(0), Net(1)]
    optimizers: list[Any] = [make_optimizer(net) for net in plain]
    for step, (x, y) in enumerate(batches_of(None)):
        alternate(plain, step)
        loss_of(plain, x, y).backward()
        optimizers[step % 2].step()
        optimizers[step % 2].zero_grad()

    accelerator = tk.Accelerator(cpu=True, gradient_accumulation_steps=2)
    nets = [Net(0), Net(1)]
    *models, first, second = accelerator.prepare(
        *nets, *(make_optimizer(net) for net in nets)
    )
    optimizers = [first, second]
    for step, (x, y) in enumerate(batches_of(dist.get_rank())):
        alternate(nets, step)
        for part in (slice(0, 1), slice(1, 3)):
            size = part.stop - part.start
            with accelerator.accumulate(*models):
                accelerator.backward(
                    loss_of(models, x[part], y[part]) * size, weight=size
                )
                optimizers[step % 2].step()
                optimizers[step % 2].zero_grad()
    for net, other in zip(nets, plain, strict=True):
        assert_equal_on_ranks(net)
        assert_close(net, other)


@pytest.mark.world_size(2)
def test_parameters_without_a_prepared_module_are_refused() -> None:
    """An optimizer also has a loss with weights of its own, or a model that was prepared for evaluation only."""
    center = nn.Linear(4, 1).double()
    accelerator = tk.Accelerator(cpu=True)
    net = Net()
    model, optimizer = accelerator.prepare(
        net, torch.optim.SGD([*net.parameters(), *center.parameters()], 0.1)
    )
    accelerator.backward(center(model(batches_of(dist.get_rank())[0][0])).mean())
    with pytest.raises(
        StrategyError,
        match="2 of the 6 parameters of SGD, the first of shape \\[1, 4\\]",
    ):
        optimizer.step()

    class Holding(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([*self.net.parameters(), *center.parameters()], 0.1)

    with pytest.raises(StrategyError, match="each rank would train a separate copy"):
        ddp(Holding(Net()), batches_of(None))


def whole_state(strategy: Any, net: nn.Module) -> dict[str, Tensor]:
    state = strategy.module_state(net)
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in state.items()
    }


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_sharded_models_train_what_is_trained_now() -> None:
    for strategy in (FSDPStrategy, hybrid, MeshStrategy):
        for name, changes in CHANGES.items():
            with case(strategy=strategy.__name__, changes=name):
                if "added" in name:
                    with pytest.raises(
                        StrategyError, match="each rank would train a separate copy"
                    ):
                        train_sharded(strategy(), changes)
                else:
                    torch.testing.assert_close(
                        train_sharded(strategy(), changes),
                        train_plain(changes).state_dict(),
                    )


def train_sharded(strategy: Any, changes: dict[int, Change]) -> dict[str, Tensor]:
    net = Net()
    accelerator = tk.Accelerator(cpu=True, strategy=strategy)
    optimizer: Any = make_optimizer(net)
    change(changes, -1, net, optimizer)
    model, optimizer = accelerator.prepare(net, optimizer)
    for step, (x, y) in enumerate(batches_of(dist.get_rank())):
        change(changes, step, net, optimizer)
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return whole_state(accelerator.strategy, net)


def hybrid() -> FSDPStrategy:
    return FSDPStrategy(device_mesh=(2, 1))


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)
@pytest.mark.world_size(2)
def test_deepspeed_refuses_what_it_would_not_train() -> None:
    refused = {
        "unfrozen before the first step": "backbone.weight at stage 2",
        "unfrozen later": "DeepSpeed would not train it",
        "frozen later": "DeepSpeed would still move it, by momentum and weight decay",
        "all frozen at first": "all parameters of this optimizer are frozen",
        "added": "a group that is added later would not be trained",
    }
    for name, text in refused.items():
        with case(changes=name), pytest.raises(StrategyError, match=text):
            train_with_deepspeed(CHANGES[name], 2)
    train_with_deepspeed({-1: freeze_backbone}, 2)
    train_with_deepspeed(
        CHANGES["unfrozen later"], 0
    )  # without ZeRO the optimizer steps the parameters themselves
    module = Changing(CHANGES["unfrozen before the first step"], False)
    module.net.float().backbone.requires_grad_(False)
    with pytest.raises(StrategyError, match=r"net\.backbone\.weight at stage 3"):
        train(
            module,
            [(x.float(), y) for x, y in batches_of(None)],
            devices=2,
            strategy=DeepSpeedStrategy(stage=3),
        )


def train_with_deepspeed(changes: dict[int, Change], stage: int) -> None:
    accelerator = tk.Accelerator(cpu=True, strategy=DeepSpeedStrategy(stage=stage))
    net = Net().float()
    optimizer: Any = make_optimizer(net)
    change(changes, -1, net, optimizer)
    model, optimizer = accelerator.prepare(net, optimizer)
    for step, (x, y) in enumerate(batches_of(dist.get_rank())):
        change(changes, step, net, optimizer)
        accelerator.backward(F.cross_entropy(model(x.float()), y))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.free_memory()
