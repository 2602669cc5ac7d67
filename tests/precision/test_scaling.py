"""float16 gradients: scaled, unscaled once, skipped for each optimizer where they overflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trainer_kit as tk
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.precision import MixedPrecision

START = 65536.0


def batch(seed: int = 1, times: float = 1.0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return times * torch.randn(6, 8, generator=draw), torch.randint(
        4, (6,), generator=draw
    )


def scaling(**options: Any) -> MixedPrecision:
    return MixedPrecision(torch.float16, "cpu", torch.amp.GradScaler("cpu", **options))


def fit(
    module: Any, batches: Any, precision: Any = "16-mixed", **options: Any
) -> tk.Trainer:
    options = {"max_epochs": 1, "barebones": True, **options}
    trainer = tk.Trainer(accelerator="cpu", devices=1, precision=precision, **options)
    trainer.fit(module, batches)
    return trainer


class Net(tk.TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 4)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.second(torch.tanh(self.first(batch[0]))), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Norms(tk.Callback):
    """Gradients as ``on_before_optimizer_step`` sees them, and after the step."""

    def __init__(self) -> None:
        self.before: list[float] = []
        self.after: list[float] = []

    @staticmethod
    def of(module: Any) -> float:
        return float(torch.stack([p.grad.norm() for p in module.parameters()]).norm())

    def on_before_optimizer_step(
        self, trainer: Any, module: Any, optimizer: Any
    ) -> None:
        self.before.append(self.of(module))

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        self.after.append(self.of(module))


def test_hooks_see_unscaled_gradients_and_clipping_is_of_those() -> None:
    expected = Net()
    with torch.autocast("cpu", torch.float16):
        loss = expected.loss(batch())
    loss.backward()
    seen = Norms()
    fit(Net(), [batch()], callbacks=[seen], gradient_clip_val=0.05)
    assert seen.before == pytest.approx([Norms.of(expected)], rel=1e-2)
    assert seen.after == pytest.approx([0.05], rel=1e-4)


def test_a_scaler_of_ones_own() -> None:
    precision = scaling(init_scale=8.0, growth_interval=2, growth_factor=4.0)
    fit(Net(), [batch(i) for i in range(5)], precision)
    assert precision.scaler.get_scale() == 8.0 * 4 * 4


def test_a_disabled_scaler_scales_nothing() -> None:
    plain, mine = Net(), Net()
    optimizer = plain.configure_optimizers()
    for i in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = plain.loss(batch(i))
        loss.backward()
        optimizer.step()
    fit(mine, [batch(i) for i in range(3)], scaling(enabled=False))
    for one, other in zip(mine.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_state_comes_back_from_a_checkpoint(tmp_path: Path) -> None:
    batches = [batch(i, 1e6 if i == 1 else 1.0) for i in range(6)]
    options = {
        "barebones": False,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    saving = tk.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=4)
    whole = fit(
        Net(), batches, scaling(growth_interval=3), callbacks=[saving], **options
    ).precision_plugin
    again = scaling(growth_interval=3)
    trainer = tk.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, precision=again, barebones=True
    )
    trainer.fit(Net(), batches, ckpt_path=tmp_path / "step-00000004")
    assert again.state_dict() == whole.state_dict()
    assert again.scaler.get_scale() == START  # halved once, then three good steps


def test_state_dicts() -> None:
    one, other = scaling(init_scale=4.0), scaling()
    other.load_state_dict(one.state_dict())
    assert other.scaler.get_scale() == 4.0
    other.load_state_dict({})
    assert other.scaler.get_scale() == 4.0
    assert MixedPrecision(torch.bfloat16, "cpu").state_dict() == {}


class Named(Net):
    """Two losses; the batch says which of them overflows."""

    def training_step(self, given: Any, batch_idx: int) -> Any:
        data, which = given
        hidden = self.first(data[0])
        losses = {
            "first": hidden.float().pow(2).mean(),
            "second": F.cross_entropy(self.second(hidden.detach()).float(), data[1]),
        }
        return {
            name: loss * (1e38 if name in which else 1.0)
            for name, loss in losses.items()
        }

    def configure_optimizers(self) -> Any:
        return {
            "first": torch.optim.SGD(self.first.parameters(), lr=0.1),
            "second": torch.optim.SGD(self.second.parameters(), lr=0.1),
        }


@pytest.mark.parametrize("which", ["", "first", "second", "first second"])
def test_an_overflow_skips_its_own_optimizer_only(which: str) -> None:
    module, start = Named(), Named()
    trainer = fit(module, [(batch(), which)])
    for name in ("first", "second"):
        moved = not torch.equal(
            getattr(module, name).weight, getattr(start, name).weight
        )
        assert moved is (name not in which), name
    assert trainer.precision_plugin.scaler.get_scale() == (
        START / 2 if which else START
    )
    assert trainer.global_step == 1


def test_each_optimizers_scheduler_waits_for_its_own_steps() -> None:
    class Scheduled(Named):
        def configure_optimizers(self) -> Any:
            made = {}
            for name, optimizer in super().configure_optimizers().items():
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
                made[name] = {
                    "optimizer": optimizer,
                    "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
                }
            return made

    trainer = fit(Scheduled(), [(batch(), ""), (batch(), "second"), (batch(), "")])
    rates = [optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers]
    assert rates == [0.1 * 0.5**3, 0.1 * 0.5**2]


class Manual(Named):
    automatic_optimization = False

    def training_step(self, given: Any, batch_idx: int) -> None:
        losses = super().training_step(given, batch_idx)
        for (name, loss), optimizer in zip(
            losses.items(), self.optimizers(), strict=True
        ):
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.1)
            norm = torch.stack(
                [p.grad.norm() for p in getattr(self, name).parameters()]
            ).norm()
            assert name in given[1] or norm < 0.101
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return list(super().configure_optimizers().values())


def by_hand(module: Named, batches: Any) -> torch.amp.GradScaler:
    """torch's own recipe for several optimizers, each with its own backward and step."""
    optimizers = list(Named.configure_optimizers(module).values())
    scaler = torch.amp.GradScaler("cpu")
    for given in batches:
        with torch.autocast("cpu", torch.float16):
            losses = Named.training_step(module, given, 0)
        for (name, loss), optimizer in zip(losses.items(), optimizers, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(getattr(module, name).parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
    return scaler


def test_manual_optimization_is_torchs_own_recipe() -> None:
    batches = [
        (batch(1), ""),
        (batch(2), "first"),
        (batch(3), ""),
        (batch(4), "second"),
        (batch(5), ""),
    ]
    plain, mine = Named(), Manual()
    scaler = by_hand(plain, batches)
    trainer = fit(mine, batches)
    for one, other in zip(mine.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
    assert trainer.precision_plugin.state_dict() == scaler.state_dict()


def test_a_step_that_is_not_taken_after_clipping() -> None:
    class Skips(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization, self.norms = False, []

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(
                optimizer, gradient_clip_val=50.0, gradient_clip_algorithm="norm"
            )
            self.norms.append(Norms.of(self))
            if batch_idx:
                optimizer.step()

    module = Skips()
    fit(module, [batch()] * 3)
    assert module.norms[0] == pytest.approx(module.norms[1], rel=1e-6)


def test_scaling_continues_after_an_error_in_a_step() -> None:
    class Failing(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.trainer.global_step == 1:
                raise KeyError("not this time")

    precision = scaling()
    with pytest.raises(KeyError):
        fit(Failing(), [batch(i) for i in range(3)], precision)
    module = Net()
    trainer = fit(module, [batch(i) for i in range(3)], precision)
    assert trainer.global_step == 3
    assert not torch.equal(module.first.weight, Net().first.weight)


def test_a_step_function_of_the_users_own_is_skipped_too() -> None:
    calls = []

    class Own(Net):
        def optimizer_step(
            self,
            epoch: int,
            batch_idx: int,
            optimizer: Any,
            optimizer_closure: Any = None,
        ) -> None:
            calls.append(batch_idx)
            optimizer.step(closure=optimizer_closure)

    fit(Own(), [batch(0), batch(1, 1e6), batch(2)])
    assert calls == [0, 2]


def test_optimizers_that_ask_for_the_loss_again_are_refused() -> None:
    class Again(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ConfigurationError, match="cannot run with scaled gradients"):
        fit(Again(), [batch()])


def test_groups_that_are_empty_here_or_come_later_are_unscaled() -> None:
    # Stages of a pipeline may hold nothing of a group; whole parameters and parts of a mesh are looked at apart.
    precision, whole, part = (
        scaling(),
        nn.Parameter(torch.ones(3)),
        nn.Parameter(torch.ones(3)),
    )
    optimizer = torch.optim.SGD([{"params": []}, {"params": [whole]}], lr=1.0)
    part.device_mesh = "of its own"  # type: ignore[attr-defined]
    for group in (
        [],
        [{"params": [part]}],
        [{"params": [nn.Parameter(torch.ones(3))]}],
    ):
        for one in group:
            optimizer.add_param_group(one)
        parameters = [p for one in optimizer.param_groups for p in one["params"]]
        before = [p.detach().clone() for p in parameters]
        for p in parameters:
            p.grad = torch.full((3,), START)
        assert precision.optimizer_step(optimizer, optimizer.step)
        precision.end_step()
        for p, was in zip(parameters, before, strict=True):
            assert torch.equal(p.detach(), was - 1)
