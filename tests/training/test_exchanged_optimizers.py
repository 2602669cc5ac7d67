"""`trainer.optimizers = [...]` in a hook: the loop steps other optimizers from there on."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainer_kit as tk
from trainer_kit.callbacks import ModelCheckpoint, NaNGuard


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
                nn.utils.clip_grad_norm_(
                    [p for group in optimizer.param_groups for p in group["params"]],
                    clip,
                )
            optimizer.step()
    return net


def momentum_later(net, epoch):
    return (
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) if epoch == 1 else None
    )


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
    assert isinstance(
        trainer.optimizers[0],
        torch.optim.SGD if make is momentum_later else torch.optim.Adam,
    )


@pytest.mark.slow
@pytest.mark.world_size(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_several_ranks(strategy):
    module, _ = fitted(
        momentum_later, strategy=strategy, devices="auto", global_batch_size=4
    )
    weights = {name: value.full_tensor() if hasattr(value, "full_tensor") else value
               for name, value in module.state_dict().items()}  # fmt: skip
    torch.testing.assert_close(
        weights, dict(by_hand(momentum_later).state_dict()), rtol=1e-4, atol=1e-5
    )


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
        (
            Net,
            lambda net, epoch: torch.optim.LBFGS(net.parameters()),
            "LBFGS evaluates the loss again",
        ),
        (
            Net,
            lambda net, epoch: torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1),
            "that do not belong to Net",
        ),
    ],
)
def test_what_cannot_be_exchanged(module, make, match):
    with pytest.raises(tk.ConfigurationError, match=match):
        fitted(make, module())


def test_only_a_list_of_optimizers_is_accepted():
    one, _ = fitted(momentum_later)
    for wrap in (lambda made: made, lambda made: (made,)):
        module = Net()

        class Other(Exchange):
            def on_train_epoch_start(self, trainer, pl_module):
                if (made := self.make(pl_module, trainer.current_epoch)) is not None:
                    trainer.optimizers = wrap(made)  # noqa: B023

        trainer = tk.Trainer(
            max_epochs=3,
            accelerator="cpu",
            barebones=True,
            callbacks=[Other(momentum_later)],
        )
        trainer.fit(module, DataLoader(points(), batch_size=4))
        assert torch.equal(module.last.weight, one.last.weight)
    with pytest.raises(tk.ConfigurationError, match=r"not an optimizer\n.*'sgd'"):
        fitted(lambda net, epoch: "sgd")
    with pytest.raises(tk.ConfigurationError, match="only while fit runs"):
        trainer.optimizers = trainer.optimizers

    class Item(tk.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            trainer.optimizers[0] = torch.optim.SGD(pl_module.parameters(), lr=0.1)

    trainer = tk.Trainer(
        max_epochs=3, accelerator="cpu", barebones=True, callbacks=[Item()]
    )
    with pytest.raises(tk.ConfigurationError, match=r"must be set together"):
        trainer.fit(Net(), DataLoader(points(), batch_size=4))


def test_a_group_that_is_added_to_the_new_optimizer_is_trained():
    added = []

    def make(net, epoch):
        if epoch == 1:
            added.append(torch.optim.SGD(net.last.parameters(), lr=0.1))
            return added[-1]
        if epoch == 2:
            added[-1].add_param_group(
                {"params": list(net.first.parameters()), "lr": 0.02}
            )
        return None

    module, _ = fitted(make, gradient_clip_val=0.5)
    expected = by_hand(make, 0.5)
    for name, weight in expected.state_dict().items():
        assert torch.equal(module.state_dict()[name], weight), name
    assert "add_param_group" not in vars(added[0])


def test_a_scheduler_without_an_optimizer(capsys):
    class Own:
        def step(self):
            pass

        def state_dict(self):
            return {}

        load_state_dict = None

    class Scheduled(Net):
        def configure_optimizers(self):
            return {"optimizer": super().configure_optimizers(), "lr_scheduler": Own()}

        def lr_scheduler_step(self, scheduler, metric):
            scheduler.step()

    module, _ = fitted(momentum_later, Scheduled())
    assert "1 schedulers change optimizers" in capsys.readouterr().out
    assert torch.equal(by_hand(momentum_later).last.weight, module.last.weight)


def decaying(net, epoch):
    """From epoch 1 on an optimizer over a part, whose learning rate the hook halves in each later epoch."""
    return torch.optim.Adam(net.last.parameters(), lr=0.05) if epoch == 1 else None


class WithTestStep(Net):
    def test_step(self, batch, batch_idx):
        pass


class Halving(Exchange):
    def on_train_epoch_start(self, trainer, pl_module):
        super().on_train_epoch_start(trainer, pl_module)
        if trainer.current_epoch > 1:
            for group in trainer.optimizers[0].param_groups:
                group["lr"] *= 0.5


class Resuming(Halving):
    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        if trainer.training and checkpoint["progress"]["epoch"] > 1:
            trainer.optimizers = [self.make(pl_module, 1)]


def trained(callback, path, epochs, ckpt_path=None):
    saving = ModelCheckpoint(path, every_n_epochs=1, save_top_k=-1)
    trainer = tk.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback, saving],
    )
    module = Net()
    trainer.fit(module, DataLoader(points(), batch_size=4), ckpt_path=ckpt_path)
    return module


@pytest.mark.parametrize("make", [decaying, momentum_later])
def test_a_run_that_resumes_sets_them_when_it_loads(tmp_path, make):
    whole = trained(Halving(make), tmp_path / "whole", 4)
    trained(Halving(make), tmp_path / "first", 3)
    resumed = trained(
        Resuming(make), tmp_path / "first", 4, tmp_path / "first" / "step-00000012"
    )
    for name, weight in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], weight), name
    trainer = tk.Trainer(accelerator="cpu", barebones=True, callbacks=[Resuming(make)])
    trainer.test(
        WithTestStep(),
        DataLoader(points(), batch_size=4),
        ckpt_path=tmp_path / "first" / "step-00000012",
    )
    with pytest.raises(
        tk.CheckpointError, match=r"(?s)had replaced this optimizer.*on_load_checkpoint"
    ):
        trained(
            Halving(make), tmp_path / "first", 4, tmp_path / "first" / "step-00000012"
        )


def test_new_state_of_the_configured_optimizer_resumes_without_a_hook(tmp_path):
    def again(net, epoch):
        return net.configure_optimizers() if epoch == 1 else None

    whole = trained(Exchange(again), tmp_path / "whole", 4)
    trained(Exchange(again), tmp_path / "first", 3)
    resumed = trained(
        Exchange(again), tmp_path / "first", 4, tmp_path / "first" / "step-00000012"
    )
    assert torch.equal(resumed.last.weight, whole.last.weight)


def test_a_restored_state_that_is_dropped_is_named(tmp_path, capsys):
    trained(Exchange(momentum_later), tmp_path / "first", 1)
    assert "drops the state" not in capsys.readouterr().out
    trained(
        Exchange(momentum_later),
        tmp_path / "first",
        2,
        tmp_path / "first" / "step-00000004",
    )
    assert (
        "drops the state of the optimizers that the checkpoint restored"
        in capsys.readouterr().out
    )


def test_a_guard_that_goes_back_refuses():
    trainer = tk.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Exchange(momentum_later), NaNGuard("skip")],
    )
    with pytest.raises(tk.ConfigurationError, match="NaNGuard"):
        trainer.fit(Net(), DataLoader(points(), batch_size=4))


def test_another_number_and_no_run():
    class Two(Exchange):
        def on_train_epoch_start(self, trainer, pl_module):
            trainer.optimizers = [torch.optim.SGD(pl_module.parameters(), lr=0.1)] * 2

    trainer = tk.Trainer(
        max_epochs=1, accelerator="cpu", barebones=True, callbacks=[Two(None)]
    )
    with pytest.raises(tk.ConfigurationError, match="2 in the place of 1"):
        trainer.fit(Net(), DataLoader(points(), batch_size=4))
    trainer = tk.Trainer(max_epochs=1, accelerator="cpu", barebones=True)
    with pytest.raises(
        tk.ConfigurationError,
        match=r"(?s)only while fit runs.*in a hook.*if trainer.training",
    ):
        trainer.optimizers = []
    with pytest.raises(tk.StrategyError, match=r"trainer\.optimizers = "):
        trainer.strategy.optimizers = []
