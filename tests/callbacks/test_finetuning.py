"""What is frozen, what is trained from when on, with which learning rate; equal to a plain loop, and after a resume."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, SequentialLR, StepLR

from tests.callbacks.fits import trainer
from trainer_kit import TrainModule
from trainer_kit.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    Callback,
    LayerWiseUnfreezing,
    ModelCheckpoint,
)
from trainer_kit.core.errors import ConfigurationError

BATCHES = list(torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(3)))


class Net(TrainModule):
    def __init__(self, schedule=None):
        super().__init__()
        torch.manual_seed(1)
        self.backbone = nn.Sequential(
            nn.Linear(4, 8),
            nn.BatchNorm1d(8),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(8, 8),
        )
        self.head = nn.Linear(8, 1)
        self.schedule = schedule

    def training_step(self, batch, batch_idx):
        return (self.head(self.backbone(batch)) - 1).pow(2).mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(
            [p for p in self.parameters() if p.requires_grad], lr=0.01
        )
        if self.schedule is None:
            return optimizer
        return [optimizer], [
            {"scheduler": self.schedule(optimizer), "interval": "step"}
        ]


class Notes(Callback):
    """The learning rates of all groups, and what is trained, at each step."""

    def __init__(self):
        self.rates, self.trained = [], []

    def on_train_step_end(self, trainer, module):
        self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])
        self.trained.append(
            {
                n.rpartition(".")[0]
                for n, p in module.named_parameters()
                if p.requires_grad
            }
        )


def fitted(*callbacks, module=None, epochs=5, ckpt_path=None, **options):
    module = module or Net()
    made = trainer(*callbacks, max_epochs=epochs, **options)
    torch.manual_seed(7)
    made.fit(module, BATCHES, ckpt_path=ckpt_path)
    return made, module


def test_it_trains_as_a_plain_loop_does():
    notes = Notes()
    _, module = fitted(BackboneFinetuning(2, train_bn=False), notes)
    plain = Net()
    plain.backbone.requires_grad_(False)
    plain.backbone[1].track_running_stats = False
    optimizer = torch.optim.AdamW(plain.head.parameters(), lr=0.01)
    torch.manual_seed(7)
    rate = 0.001
    for epoch in range(5):
        if epoch == 2:
            plain.backbone.requires_grad_(True)
            plain.backbone[1].track_running_stats = True
            late = [
                p
                for layer in (plain.backbone[0], plain.backbone[4])
                for p in layer.parameters()
            ]
            optimizer.add_param_group({"params": late, "lr": rate})
        elif epoch > 2:
            rate = min(2 * rate, 0.01)
            optimizer.param_groups[1]["lr"] = rate
        for batch in BATCHES:
            optimizer.zero_grad()
            plain.training_step(batch, 0).backward()
            optimizer.step()
    for (name, ours), (_, theirs) in zip(
        module.state_dict().items(), plain.state_dict().items(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    assert [rates[1:] for rates in notes.rates[::3]] == [
        [],
        [],
        [0.001],
        [0.002],
        [0.004],
    ]


SCHEDULES = {
    "none": None,
    "step": lambda optimizer: StepLR(optimizer, 2, 0.5),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "sequence": lambda optimizer: SequentialLR(
        optimizer,
        [
            LambdaLR(optimizer, lambda step: 0.1 + step / 10),
            LambdaLR(optimizer, lambda step: 0.5),
        ],
        [5],
    ),
}


@pytest.mark.filterwarnings("ignore:ModelCheckpoint now writes to")
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_resumed_run_is_the_same(schedule, tmp_path):
    def run(path, ckpt_path=None):
        callback = BackboneFinetuning(
            1, train_bn=False, should_align=False, lambda_func=lambda epoch: 1.5
        )
        keeper = ModelCheckpoint(path, every_n_train_steps=1, save_top_k=-1)
        return fitted(
            callback,
            keeper,
            notes := Notes(),
            module=Net(schedule),
            ckpt_path=ckpt_path,
        ), notes

    (done, module), notes = run(tmp_path / "whole")
    assert {len(rates) for rates in notes.rates[3:]} == {2}
    for step in (
        2,
        3,
        4,
        11,
    ):  # before the epoch of the change, at its start, inside, and after
        (again, resumed), rest = run(
            tmp_path / f"from-{step}", tmp_path / "whole" / f"step-{step:08d}"
        )
        assert rest.rates == notes.rates[step:]
        assert rest.trained == notes.trained[step:]
        for (name, a), (_, b) in zip(
            resumed.state_dict().items(), module.state_dict().items(), strict=True
        ):
            assert torch.equal(a, b), (step, name)
        assert again.global_step == done.global_step == 15


def test_an_added_group_follows_the_schedule():
    notes = Notes()
    fitted(BackboneFinetuning(2), notes, module=Net(SCHEDULES["lambda"]), epochs=3)
    for step, rates in enumerate(notes.rates, 1):
        expected = 0.01 / (1 + step)
        assert rates == pytest.approx(
            [expected] if step < 7 else [expected, expected / 10]
        )


def test_layers_are_trained_one_after_the_other():
    notes = Notes()
    layers = ["backbone.4", "backbone.0"]
    fitted(
        LayerWiseUnfreezing(
            layers, unfreeze_at_epoch=1, every_n_epochs=2, lr_factor=0.5
        ),
        notes,
    )
    always = {"head", "backbone.1"}  # batch norms are trained from the start
    expected = [
        always,
        always | {"backbone.4"},
        always | {"backbone.4"},
        always | {"backbone.4", "backbone.0"},
    ]
    assert notes.trained[::3] == [*expected, expected[-1]]
    assert notes.rates[-1] == pytest.approx([0.01, 0.005, 0.0025])


def test_a_finetuning_of_ones_own():
    class Own(BaseFinetuning):
        seen = ()

        def freeze_before_training(self, pl_module):
            self.freeze(
                [pl_module.backbone[0], [pl_module.backbone[4]]], train_bn=False
            )

        def finetune_function(self, pl_module, epoch, optimizer):
            self.seen += (epoch,)
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.backbone[4], optimizer)

    notes = Notes()
    fitted(own := Own(), notes, epochs=3)
    assert own.seen == (0, 1, 2)
    assert notes.rates[-1] == [0.01, 0.001]
    assert notes.trained[-1] == {"backbone.1", "backbone.4", "head"}
    for missing in ("freeze_before_training", "finetune_function"):
        kind = type("Half", (Own,), {missing: getattr(BaseFinetuning, missing)})
        with pytest.raises(NotImplementedError, match=missing):
            fitted(kind(), epochs=1)


def test_mistakes_are_refused_before_the_first_step():
    with pytest.raises(ConfigurationError, match="has no submodule of this name"):
        fitted(
            BackboneFinetuning(),
            module=type(
                "Plain", (Net,), {"__init__": lambda self: TrainModule.__init__(self)}
            )(),
        )
    with pytest.raises(ConfigurationError, match=r"no submodule 'backbone\.9'"):
        fitted(LayerWiseUnfreezing(["backbone.9"]))
    with pytest.raises(ConfigurationError, match="every_n_epochs=0"):
        LayerWiseUnfreezing(["backbone.0"], every_n_epochs=0)


def test_parameters_that_the_optimizer_already_has_are_reported():
    class Whole(Net):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    notes = Notes()
    with pytest.warns(
        UserWarning, match="4 frozen parameters are in the optimizer already"
    ):
        fitted(BackboneFinetuning(1), notes, module=Whole(), epochs=2)
    assert notes.rates[-1] == [0.01]
    assert notes.trained[-1] == {"backbone.0", "backbone.1", "backbone.4", "head"}

    class Two(Net):
        def configure_optimizers(self):
            parts = {"head": self.head, "norm": self.backbone[1]}
            return {
                name: torch.optim.SGD(part.parameters(), lr=0.01)
                for name, part in parts.items()
            }

    for callback in (BackboneFinetuning(1), LayerWiseUnfreezing(["backbone.0"])):
        with pytest.raises(
            ConfigurationError, match="adds parameters to one optimizer"
        ):
            fitted(callback, module=Two())


@pytest.mark.slow
@pytest.mark.world_size(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_train_as_one(strategy):
    class Plain(Net):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))

    def run(**options):
        torch.manual_seed(5)
        loader = torch.utils.data.DataLoader(
            torch.randn(16, 4), batch_size=options.pop("batch_size")
        )
        module = Plain()
        made = trainer(BackboneFinetuning(1), max_epochs=3, **options)
        made.fit(module, loader)
        return made.strategy.module_state(module)

    two = run(devices=2, strategy=strategy, batch_size=4, accumulate_grad_batches=2)
    one = run(batch_size=8, accumulate_grad_batches=2)
    for name, value in one.items():
        ours = two[name]
        ours = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
        torch.testing.assert_close(ours, value, msg=name)
