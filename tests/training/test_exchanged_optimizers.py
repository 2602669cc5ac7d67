"""`trainer.optimizers = [...]` in a hook: the loop steps other optimizers from there on."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainer_kit as tk


def points(count: int = 16) -> TensorDataset:
    drawn = torch.randn(count, 3, generator=torch.Generator().manual_seed(0))
    return TensorDataset(drawn, drawn.sum(1, keepdim=True))


class Net(tk.TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.last(self.first(x).tanh())

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Exchange(tk.Callback):
    """Other optimizers from an epoch on."""

    def __init__(self, make) -> None:
        self.make = make

    def on_train_epoch_start(self, trainer, pl_module):
        made = self.make(pl_module, trainer.current_epoch)
        if made is not None:
            trainer.optimizers = [made]


def fitted(make, module=None, **options):
    module = module or Net()
    trainer = tk.Trainer(
        **{
            "max_epochs": 3,
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_checkpointing": False,
            **options,
        },
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Exchange(make)],
    )
    trainer.fit(module, DataLoader(points(), batch_size=4))
    return module, trainer


def by_hand(make, clip=None):
    net = Net()
    optimizer = net.configure_optimizers()
    for epoch in range(3):
        optimizer = make(net, epoch) or optimizer
        for x, y in DataLoader(points(), batch_size=4):
            net.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip)
            optimizer.step()
    return net


def momentum_later(net, epoch):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) if epoch == 1 else None


def stages(net, epoch):
    """The last layer alone, then all layers with new state."""
    parts = {0: net.last.parameters(), 1: net.parameters()}
    return torch.optim.Adam(parts[epoch], lr=0.05) if epoch in parts else None


@pytest.mark.parametrize("make", [momentum_later, stages])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_the_run_continues_with_the_new_optimizer(make, clip):
    module, trainer = fitted(make, gradient_clip_val=clip)
    expected = by_hand(make, clip)
    for name, weight in expected.state_dict().items():
        assert torch.equal(module.state_dict()[name], weight), name
    assert isinstance(trainer.optimizers[0], torch.optim.SGD if make is momentum_later else torch.optim.Adam)


@pytest.mark.slow
@pytest.mark.world_size(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_several_ranks(strategy):
    module, _ = fitted(momentum_later, strategy=strategy, devices="auto", global_batch_size=4)
    weights = {name: value.full_tensor() if hasattr(value, "full_tensor") else value
               for name, value in module.state_dict().items()}  # fmt: skip
    torch.testing.assert_close(weights, dict(by_hand(momentum_later).state_dict()), rtol=1e-4, atol=1e-5)


def test_schedulers_of_the_replaced_optimizer_are_named(capsys):
    class Scheduled(Net):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)]

    module, _ = fitted(momentum_later, Scheduled())
    assert "1 schedulers change optimizers" in capsys.readouterr().out
    assert torch.equal(by_hand(momentum_later).last.weight, module.last.weight)


class Named(Net):
    def training_step(self, batch, batch_idx):
        return {"one": super().training_step(batch, batch_idx)}

    def configure_optimizers(self):
        return {"one": super().configure_optimizers()}


class ByHand(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@pytest.mark.parametrize(
    ("module", "make", "match"),
    [
        (Named, momentum_later, "the optimizers have names"),
        (ByHand, momentum_later, "in manual optimization"),
        (Net, lambda net, epoch: torch.optim.LBFGS(net.parameters()), "LBFGS evaluates the loss again"),
        (Net, lambda net, epoch: torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1), "parameters that are not Net's"),
    ],
)
def test_what_cannot_be_exchanged(module, make, match):
    with pytest.raises(tk.ConfigurationError, match=match):
        fitted(make, module())


def test_another_number_and_no_run():
    class Two(Exchange):
        def on_train_epoch_start(self, trainer, pl_module):
            trainer.optimizers = [torch.optim.SGD(pl_module.parameters(), lr=0.1)] * 2

    trainer = tk.Trainer(max_epochs=1, accelerator="cpu", barebones=True, callbacks=[Two(None)])
    with pytest.raises(tk.ConfigurationError, match="2 in the place of 1"):
        trainer.fit(Net(), DataLoader(points(), batch_size=4))
    trainer = tk.Trainer(max_epochs=1, accelerator="cpu", barebones=True)
    with pytest.raises(tk.ConfigurationError, match=r"(?s)no fit is running.*in a hook"):
        trainer.optimizers = []
    with pytest.raises(tk.StrategyError, match=r"trainer\.optimizers = "):
        trainer.strategy.optimizers = []
