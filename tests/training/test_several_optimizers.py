"""Named optimizers in automatic mode: one loss for each name, all backwards, then all steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer_kit import Callback, Trainer, TrainModule
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.precision import MixedPrecision

QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


class Gan(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.generator = nn.Linear(3, 2)
        self.discriminator = nn.Linear(2, 1)

    def losses(self, batch):
        noise, real = batch[:, :3], batch[:, 3:]
        fake = self.generator(noise)
        wins = nn.functional.binary_cross_entropy_with_logits
        ones = torch.ones(len(batch), 1)
        right = wins(self.discriminator(real), ones) + wins(
            self.discriminator(fake.detach()), torch.zeros_like(ones)
        )
        return {
            "generator": wins(self.discriminator(fake), ones),
            "discriminator": right / 2,
        }

    def training_step(self, batch, batch_idx):
        return self.losses(batch)

    def configure_optimizers(self):
        return {
            "generator": torch.optim.Adam(self.generator.parameters(), lr=0.01),
            "discriminator": torch.optim.SGD(
                self.discriminator.parameters(), lr=0.1, momentum=0.9
            ),
        }


def batches(count=6, size=4):
    return list(torch.randn(count, size, 5, generator=torch.Generator().manual_seed(1)))


def by_hand(module, windows, clip=None):
    """All gradients at the old weights, then all steps. A window is a list of (weight, batch)."""
    optimizers = module.configure_optimizers()
    for window in windows:
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        for weight, batch in window:
            losses = module.losses(batch)
            for name in optimizers:
                loss = losses[name] if weight == 1 else losses[name] * weight
                loss.backward(
                    inputs=list(getattr(module, name).parameters()), retain_graph=True
                )
        for name, optimizer in optimizers.items():
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(getattr(module, name).parameters(), clip)
            optimizer.step()


def same(one, other):
    return all(
        torch.equal(a, b)
        for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )


@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_gan_equals_the_loop_written_by_hand_in_every_bit(clip):
    module, reference = Gan(), Gan()
    trainer = Trainer(max_epochs=2, gradient_clip_val=clip, **QUIET)
    trainer.fit(module, batches())
    by_hand(reference, [[(1, batch)] for batch in batches() * 2], clip)
    assert same(module, reference)
    assert trainer.global_step == 12  # steps, not optimizers


def test_accumulation_with_a_ragged_last_window():
    module, reference = Gan(), Gan()
    trainer = Trainer(max_epochs=1, accumulate_grad_batches=2, **QUIET)
    trainer.fit(module, batches(5))
    data = batches(5)
    by_hand(
        reference,
        [
            [(0.5, data[0]), (0.5, data[1])],
            [(0.5, data[2]), (0.5, data[3])],
            [(1, data[4])],
        ],
    )
    assert same(module, reference)
    assert trainer.global_step == 3


def test_scaled_gradients_equal_the_loop_written_by_hand():
    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)

    module, reference, theirs = Gan(), Gan(), scaler()
    precision = MixedPrecision(torch.float16, "cpu", scaler())
    Trainer(max_epochs=2, plugins=precision, **QUIET).fit(module, batches())
    optimizers = reference.configure_optimizers()
    for batch in batches() * 2:
        with torch.autocast("cpu", dtype=torch.float16):
            losses = reference.losses(batch)
        for name, optimizer in optimizers.items():
            optimizer.zero_grad()
            parameters = list(getattr(reference, name).parameters())
            theirs.scale(losses[name]).backward(inputs=parameters, retain_graph=True)
        for optimizer in optimizers.values():
            theirs.step(optimizer)
        theirs.update()
    assert same(module, reference)
    assert precision.scaler.get_scale() == theirs.get_scale() == 8192.0


def test_hooks_are_called_for_each_loss_and_each_optimizer():
    heard = []

    class Hears(Callback):
        def on_before_zero_grad(self, trainer, module, optimizer):
            heard.append(("zero", type(optimizer).__name__))

        def on_before_backward(self, trainer, module, loss):
            heard.append("backward")

        def on_after_backward(self, trainer, module):
            heard.append("after")

        def on_before_optimizer_step(self, trainer, module, optimizer):
            heard.append(("step", type(optimizer).__name__))

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            heard.append(sorted(outputs))
            assert not outputs["generator"].requires_grad

    Trainer(max_steps=1, callbacks=Hears(), **QUIET).fit(Gan(), batches())
    assert heard == [
        *[("zero", "Adam"), ("zero", "SGD")],
        *["backward", "after"] * 2,
        *[("step", "Adam"), ("step", "SGD")],
        ["discriminator", "generator"],
    ]


def test_each_loss_reaches_only_its_own_parameters():
    class Crosses(Gan):
        """Each loss depends on everything."""

        def losses(self, batch):
            everything = self.discriminator(self.generator(batch[:, :3])).sum()
            return {"generator": everything, "discriminator": -2 * everything}

    module, reference = Crosses(), Crosses()
    Trainer(max_steps=1, **QUIET).fit(module, batches())
    gradients = torch.autograd.grad(
        -2 * reference.losses(batches()[0])["generator"], reference.discriminator.weight
    )
    assert torch.equal(module.discriminator.weight.grad, gradients[0])


def test_a_loss_of_none_skips_the_step_of_its_optimizer():
    class Turns(Gan):
        def training_step(self, batch, batch_idx):
            losses = self.losses(batch)
            losses["discriminator" if batch_idx % 2 == 0 else "generator"] = None
            return losses

    module = Turns()
    before = {name: p.clone() for name, p in module.named_parameters()}
    Trainer(max_steps=1, **QUIET).fit(module, batches())
    assert torch.equal(module.discriminator.weight, before["discriminator.weight"])
    assert not torch.equal(module.generator.weight, before["generator.weight"])


def test_none_for_everything_skips_the_batch():
    class Skips(Gan):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    module, reference = Skips(), Gan()
    trainer = Trainer(max_epochs=1, **QUIET)
    trainer.fit(module, batches(3))
    data = batches(3)
    by_hand(reference, [[(1, data[0])], [(1, data[2])]])
    assert same(module, reference)


def test_a_frozen_parameter_of_an_optimizer_stays():
    module = Gan()
    module.generator.bias.requires_grad_(False)
    before = module.generator.bias.clone()
    weight = module.generator.weight.clone()
    Trainer(max_steps=2, **QUIET).fit(module, batches())
    assert torch.equal(module.generator.bias, before)
    assert not torch.equal(module.generator.weight, weight)


def test_other_keys_come_along():
    seen = []

    class Extra(Gan):
        def training_step(self, batch, batch_idx):
            return {
                **self.losses(batch),
                "fakes": self.generator(batch[:, :3]),
                "note": "hello",
            }

        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append((outputs["note"], outputs["fakes"].requires_grad))

    Trainer(max_steps=1, **QUIET).fit(Extra(), batches())
    assert seen == [("hello", False)]


def test_each_name_may_have_its_scheduler():
    class Scheduled(Gan):
        def configure_optimizers(self):
            made = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.StepLR(made["generator"], 1, gamma=0.5)
            config = {"scheduler": scheduler, "interval": "step", "frequency": 2}
            return {
                "generator": {"optimizer": made["generator"], "lr_scheduler": config},
                **_without(made),
            }

    def _without(made):
        return {"discriminator": made["discriminator"]}

    trainer = Trainer(max_epochs=1, **QUIET)
    trainer.fit(Scheduled(), batches(6))
    assert [optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers] == [
        0.01 / 8,
        0.1,
    ]
    assert trainer.lr_scheduler_configs[0].optimizer is trainer.optimizers[0]


def test_overrides_are_called_for_each_optimizer():
    heard = []

    class Overrides(Gan):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            heard.append((epoch, batch_idx, type(optimizer).__name__))
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

        def configure_gradient_clipping(
            self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
        ):
            heard.append(
                (type(optimizer).__name__, gradient_clip_val, gradient_clip_algorithm)
            )
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    module, reference = Overrides(), Gan()
    Trainer(max_steps=1, gradient_clip_val=0.05, **QUIET).fit(module, batches())
    by_hand(reference, [[(1, batches()[0])]], 0.05)
    assert heard == [
        ("Adam", 0.05, "norm"),
        (0, 0, "Adam"),
        ("SGD", 0.05, "norm"),
        (0, 0, "SGD"),
    ]
    assert same(module, reference)


def test_resume_restores_each_optimizer(tmp_path):
    whole, first, second = Gan(), Gan(), Gan()
    Trainer(max_epochs=2, **QUIET).fit(whole, batches())
    trainer = Trainer(max_epochs=1, **QUIET)
    trainer.fit(first, batches())
    trainer.save_checkpoint(tmp_path / "half")
    Trainer(max_epochs=2, **QUIET).fit(second, batches(), ckpt_path=tmp_path / "half")
    assert same(whole, second)


def refused(module, match):
    with pytest.raises(ConfigurationError, match=match) as caught:
        Trainer(max_steps=1, **QUIET).fit(module, batches())
    return caught.value


def test_optimizers_that_share_a_parameter_are_refused():
    class Shares(Gan):
        def configure_optimizers(self):
            everything = torch.optim.SGD(self.parameters(), lr=0.1)
            return {**super().configure_optimizers(), "everything": everything}

    error = refused(Shares(), "share a parameter")
    assert error.found == "'generator' and 'everything'"


def test_a_list_without_names_is_refused_with_both_ways_out():
    class Unnamed(Gan):
        def configure_optimizers(self):
            return list(super().configure_optimizers().values())

    error = refused(Unnamed(), "need names")
    assert "automatic_optimization = False" in error.fix
    assert '"generator"' in error.fix


@pytest.mark.parametrize(
    "returned",
    [
        lambda losses: losses["generator"],
        lambda losses: {"generator": losses["generator"]},
    ],
)
def test_a_step_that_returns_no_loss_for_a_name_is_refused(returned):
    class Lacks(Gan):
        def training_step(self, batch, batch_idx):
            return returned(self.losses(batch))

    error = refused(Lacks(), "returned no loss")
    assert "generator, discriminator" in error.fix


def test_one_named_optimizer_takes_its_loss_by_name():
    class One(Gan):
        def configure_optimizers(self):
            return {"generator": torch.optim.SGD(self.generator.parameters(), lr=0.1)}

    module = One()
    before = {name: p.clone() for name, p in module.named_parameters()}
    Trainer(max_steps=1, **QUIET).fit(module, batches())
    assert not torch.equal(module.generator.weight, before["generator.weight"])
    assert torch.equal(module.discriminator.weight, before["discriminator.weight"])
