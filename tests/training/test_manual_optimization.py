"""Manual optimization: the user's own order of backward and step, through the same precision and strategy."""

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


class Pair(TrainModule):
    """A generator and a discriminator that train by turns."""

    def __init__(self, clip=None):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(7)
        self.generator = nn.Linear(3, 2)
        self.discriminator = nn.Linear(2, 1)
        self.clip = clip

    def losses(self, batch):
        noise, real = batch[:, :3], batch[:, 3:]
        fake = self.generator(noise)
        wins = nn.functional.binary_cross_entropy_with_logits
        ones = torch.ones(len(batch), 1)

        def generator():
            return wins(self.discriminator(fake), ones)

        def discriminator():
            return (
                wins(self.discriminator(real), ones)
                + wins(self.discriminator(fake.detach()), torch.zeros_like(ones))
            ) / 2

        return generator, discriminator

    def training_step(self, batch, batch_idx):
        generator, discriminator = self.optimizers()
        generator_loss, discriminator_loss = self.losses(batch)
        for optimizer, loss_of in (
            (generator, generator_loss),
            (discriminator, discriminator_loss),
        ):
            self.toggle_optimizer(optimizer)
            loss = loss_of()
            optimizer.zero_grad()
            self.manual_backward(loss)
            if self.clip is not None:
                self.clip_gradients(
                    optimizer,
                    gradient_clip_val=self.clip,
                    gradient_clip_algorithm="norm",
                )
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [
            torch.optim.Adam(self.generator.parameters(), lr=0.01),
            torch.optim.SGD(self.discriminator.parameters(), lr=0.1, momentum=0.9),
        ]


def batches(count=6):
    return list(torch.randn(count, 4, 5, generator=torch.Generator().manual_seed(1)))


def by_hand(module, data, clip=None):
    """The same training, written out."""
    optimizers = module.configure_optimizers()
    parts = (module.generator, module.discriminator)
    for batch in data:
        for optimizer, part, loss_of in zip(
            optimizers, parts, module.losses(batch), strict=True
        ):
            loss = loss_of()
            optimizer.zero_grad()
            gradients = torch.autograd.grad(loss, list(part.parameters()))
            for parameter, gradient in zip(part.parameters(), gradients, strict=True):
                parameter.grad = gradient
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(part.parameters(), clip)
            optimizer.step()


def same(one, other):
    return all(
        torch.equal(a, b)
        for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )


@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_gan_equals_the_loop_written_by_hand_in_every_bit(clip):
    module, reference = Pair(clip), Pair()
    trainer = Trainer(max_epochs=2, **QUIET)
    trainer.fit(module, batches())
    by_hand(reference, batches() * 2, clip)
    assert same(module, reference)
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_one_batch_is_one_turn_regardless_of_optimizer_steps():
    class Lazy(Pair):
        def training_step(self, batch, batch_idx):
            if batch_idx % 2:
                super().training_step(batch, batch_idx)

    module = Lazy()
    trainer = Trainer(max_steps=4, **QUIET)
    trainer.fit(module, batches())
    assert (trainer.global_step, trainer.progress.batch, module.global_step) == (
        4,
        4,
        4,
    )
    reference = Pair()
    by_hand(reference, batches()[1:4:2])
    assert same(module, reference)


def test_hooks_of_each_step_are_called_in_order():
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
            heard.append(("end", outputs))

    Trainer(max_steps=1, callbacks=Hears(), **QUIET).fit(Pair(), batches())
    turn = [
        [("zero", name), "backward", "after", ("step", name)]
        for name in ("Adam", "SGD")
    ]
    assert heard == [*turn[0], *turn[1], ("end", None)]


def test_optimizers_look_like_optimizers():
    class Looks(Pair):
        def training_step(self, batch, batch_idx):
            wrapped, raw = self.optimizers(), self.optimizers(use_pl_optimizer=False)
            assert (
                [optimizer.optimizer for optimizer in wrapped]
                == raw
                == self.trainer.optimizers
            )
            for ours, theirs in zip(wrapped, raw, strict=True):
                assert isinstance(ours, torch.optim.Optimizer)
                assert ours.param_groups is theirs.param_groups
                assert ours.state is theirs.state
                assert ours.state_dict() == theirs.state_dict()
                assert repr(ours) == repr(theirs)
            assert self.lr_schedulers() is None
            seen.append(batch_idx)

    seen = []
    Trainer(max_steps=1, **QUIET).fit(Looks(), batches())
    assert seen == [0]


def test_one_optimizer_and_one_scheduler_come_without_a_list():
    class Single(Pair):
        def training_step(self, batch, batch_idx):
            optimizer, scheduler = self.optimizers(), self.lr_schedulers()
            optimizer.zero_grad()
            self.manual_backward(self.losses(batch)[0]())
            optimizer.step()
            rates.append(scheduler.get_last_lr()[0])
            if batch_idx % 2:
                scheduler.step()

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.generator.parameters(), lr=1.0)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
            }

    rates = []
    Trainer(max_epochs=1, **QUIET).fit(Single(), batches(4))
    assert rates == [1.0, 1.0, 0.5, 0.5]  # nobody but the user advances it


@pytest.mark.parametrize("built", ["on_fit_start", "training_step"])
def test_schedulers_of_torch_accept_the_returned_optimizers(built):
    kinds = torch.optim.lr_scheduler

    class Schedules(Pair):
        def build(self):
            first, second = self.optimizers()
            self.schedulers = [
                kinds.StepLR(first, 1, gamma=0.5),
                kinds.ReduceLROnPlateau(second, patience=0, factor=0.1),
            ]

        def on_fit_start(self):
            if built == "on_fit_start":
                self.build()

        def training_step(self, batch, batch_idx):
            if built == "training_step" and batch_idx == 0:
                self.build()
            super().training_step(batch, batch_idx)
            self.schedulers[0].step()
            self.schedulers[1].step(float(batch_idx))
            rates.append(
                [
                    group["lr"]
                    for optimizer in self.trainer.optimizers
                    for group in optimizer.param_groups
                ]
            )

    rates = []
    Trainer(max_epochs=1, **QUIET).fit(Schedules(), batches(3))
    assert [first for first, _ in rates] == pytest.approx([0.005, 0.0025, 0.00125])
    assert [second for _, second in rates] == pytest.approx([0.1, 0.01, 0.001])


def test_toggled_optimizer_leaves_only_its_own_parameters_trainable():
    class Toggles(Pair):
        def trainable(self):
            return [name for name, p in self.named_parameters() if p.requires_grad]

        def training_step(self, batch, batch_idx):
            generator, discriminator = self.optimizers()
            with self.toggled_optimizer(generator):
                seen.append(self.trainable())
            with discriminator.toggle_model():
                seen.append(self.trainable())
            seen.append(self.trainable())

    seen = []
    module = Toggles()
    module.discriminator.bias.requires_grad_(False)
    Trainer(max_steps=1, **QUIET).fit(module, batches())
    generator = ["generator.weight", "generator.bias"]
    assert seen == [
        generator,
        ["discriminator.weight"],
        [*generator, "discriminator.weight"],
    ]


def test_toggling_a_parameter_of_both_optimizers():
    class Shares(Pair):
        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                with self.toggled_optimizer(optimizer):
                    seen.append(
                        [name for name, p in self.named_parameters() if p.requires_grad]
                    )

        def configure_optimizers(self):
            own = list(self.generator.parameters())
            return [
                torch.optim.SGD([*own, self.discriminator.bias], lr=0.1),
                torch.optim.SGD([own[1]], lr=0.1),
            ]

    seen = []
    Trainer(max_steps=1, **QUIET).fit(Shares(), batches())
    # What no optimizer has is left as it is.
    assert seen[0] == [
        "generator.weight",
        "generator.bias",
        "discriminator.weight",
        "discriminator.bias",
    ]
    assert seen[1] == ["generator.bias", "discriminator.weight"]


def scaler():
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_scaled_gradients_equal_the_loop_written_by_hand(clip):
    """Lightning's way: unscale, clip, step and update for each optimizer on its own."""
    module, reference = Pair(clip), Pair()
    precision = MixedPrecision(torch.float16, "cpu", scaler())
    Trainer(max_epochs=2, plugins=precision, **QUIET).fit(module, batches())

    theirs = scaler()
    optimizers = reference.configure_optimizers()
    parts = (reference.generator, reference.discriminator)
    for batch in batches() * 2:
        with torch.autocast("cpu", dtype=torch.float16):
            losses = reference.losses(batch)
        for optimizer, part, loss_of in zip(optimizers, parts, losses, strict=True):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_of()
            optimizer.zero_grad()
            theirs.scale(loss).backward(inputs=list(part.parameters()))
            theirs.unscale_(optimizer)
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(part.parameters(), clip)
            theirs.step(optimizer)
            theirs.update()
    assert same(module, reference)
    assert precision.scaler.get_scale() == theirs.get_scale() > 1024.0


def test_an_overflow_skips_only_the_optimizer_it_hits():
    class Overflows(Pair):
        def training_step(self, batch, batch_idx):
            generator, discriminator = self.optimizers()
            for optimizer, part in (
                (generator, self.generator),
                (discriminator, self.discriminator),
            ):
                optimizer.zero_grad()
                self.manual_backward(
                    part.weight.sum()
                    * (float("inf") if part is self.generator else 1.0)
                )
                optimizer.step()

    module = Overflows()
    before = {name: p.clone() for name, p in module.named_parameters()}
    precision = MixedPrecision(torch.float16, "cpu", scaler())
    trainer = Trainer(max_steps=1, plugins=precision, **QUIET)
    trainer.fit(module, batches())
    assert torch.equal(module.generator.weight, before["generator.weight"])
    assert torch.allclose(
        module.discriminator.weight, before["discriminator.weight"] - 0.1
    )
    assert precision.scaler.get_scale() == 512.0
    assert trainer.global_step == 1


@pytest.mark.parametrize(
    "precision", ["16-mixed", "bf16-mixed", "64-true", "bf16-true"]
)
def test_every_precision_trains(precision):
    module = Pair(clip=1.0)
    before = [parameter.clone() for parameter in module.parameters()]
    options = {"precision": precision}
    if precision == "16-mixed":
        options = {"plugins": MixedPrecision(torch.float16, "cpu", scaler())}
    Trainer(max_steps=3, **options, **QUIET).fit(
        module,
        [
            batch.to({"64-true": torch.float64}.get(precision, torch.float32))
            for batch in batches()
        ],
    )
    for old, new in zip(before, module.parameters(), strict=True):
        assert not torch.equal(old.to(new.dtype), new)
        assert new.isfinite().all()


def test_accumulating_by_hand():
    class Accumulates(Pair):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            self.manual_backward(self.losses(batch)[0]() / 2)
            if batch_idx % 2:
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self):
            return torch.optim.SGD(self.generator.parameters(), lr=0.1)

    module, reference = Accumulates(), Accumulates()
    Trainer(max_epochs=1, **QUIET).fit(module, batches(4))
    optimizer = reference.configure_optimizers()
    for first, second in (batches(4)[:2], batches(4)[2:]):
        optimizer.zero_grad()
        for batch in (first, second):
            (reference.losses(batch)[0]() / 2).backward(
                inputs=list(reference.generator.parameters())
            )
        optimizer.step()
    assert same(module, reference)


def test_a_closure_is_handed_to_the_optimizer():
    class Closes(Pair):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()

            def closure():
                optimizer.zero_grad()
                loss = (self.generator.weight - 3).pow(2).sum()
                self.manual_backward(loss)
                calls.append(loss.item())
                return loss

            returned.append(optimizer.step(closure).item())

        def configure_optimizers(self):
            return torch.optim.LBFGS([self.generator.weight], lr=0.5, max_iter=4)

    calls, returned = [], []
    Trainer(max_steps=2, **QUIET).fit(Closes(), batches())
    assert len(calls) > 2
    assert returned[0] == calls[0] > calls[-1]


def test_resume_restores_each_optimizer(tmp_path):
    whole, first, second = Pair(), Pair(), Pair()
    Trainer(max_epochs=2, **QUIET).fit(whole, batches())
    trainer = Trainer(max_epochs=1, **QUIET)
    trainer.fit(first, batches())
    trainer.save_checkpoint(tmp_path / "half")
    trainer = Trainer(max_epochs=2, **QUIET)
    trainer.fit(second, batches(), ckpt_path=tmp_path / "half")
    assert trainer.global_step == 12
    assert same(whole, second)


@pytest.mark.parametrize(
    "options", [{"gradient_clip_val": 1.0}, {"accumulate_grad_batches": 2}]
)
def test_arguments_that_manual_optimization_replaces_are_refused(options):
    with pytest.raises(ConfigurationError, match="manual optimization"):
        Trainer(max_steps=1, **options, **QUIET).fit(Pair(), batches())


def test_manual_backward_in_automatic_mode_is_refused():
    class Automatic(Pair):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = True

        def training_step(self, batch, batch_idx):
            self.manual_backward(self.losses(batch)[0]())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(ConfigurationError, match="automatic_optimization = False"):
        Trainer(max_steps=1, **QUIET).fit(Automatic(), batches())


def test_toggling_twice_is_refused():
    class Twice(Pair):
        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                self.toggle_optimizer(optimizer)

    with pytest.raises(ConfigurationError, match="already toggled"):
        Trainer(max_steps=1, **QUIET).fit(Twice(), batches())


def test_outputs_of_the_step_reach_the_hooks():
    class Returns(Pair):
        def training_step(self, batch, batch_idx):
            return {"loss": self.losses(batch)[0](), "extra": 3}

    seen = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            seen.append(outputs)

    Trainer(max_steps=1, callbacks=Looks(), **QUIET).fit(Returns(), batches())
    assert seen[0]["extra"] == 3


def test_gradients_that_the_user_left_stay():
    class Leaves(Pair):
        def training_step(self, batch, batch_idx):
            self.manual_backward(self.generator.weight.sum())
            norms.append(self.generator.weight.grad.mean().item())

    norms = []
    Trainer(max_steps=3, **QUIET).fit(Leaves(), batches())
    assert norms == [1.0, 2.0, 3.0]


def test_reduce_lr_on_plateau_needs_no_monitor():
    """The module steps it, with a metric of its own choice."""

    class Plateau(Pair):
        def training_step(self, batch, batch_idx):
            optimizer, scheduler = self.optimizers(), self.lr_schedulers()
            optimizer.zero_grad()
            self.manual_backward(self.losses(batch)[0]())
            optimizer.step()
            scheduler.step(1.0)
            rates.append(optimizer.param_groups[0]["lr"])

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.generator.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, factor=0.5, patience=0
            )
            return [optimizer], [scheduler]

    rates = []
    Trainer(max_steps=3, **QUIET).fit(Plateau(), batches())
    assert rates == [0.1, 0.05, 0.025]
