"""Optimizers that compute the loss themselves, in their step: the closure that they are given, and what it costs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trainer_kit as tk
from tests.parity.plain import (
    Batch,
    Classifier,
    assert_same,
    ddp,
    make_batches,
    make_net,
    merged,
    train,
)
from trainer_kit.core.errors import ConfigurationError


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization (Foret et al., ICLR 2021); the closure computes both gradients."""

    def __init__(self, params: Any, lr: float = 0.1, rho: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is not None
        with torch.enable_grad():
            loss = closure()
        before = self.climb()
        with torch.enable_grad():
            closure()
        self.descend(before)
        return loss

    def climb(self) -> dict[nn.Parameter, Tensor]:
        mine = [
            p
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        norm = torch.stack([p.grad.pow(2).sum() for p in mine]).sum().sqrt()
        before = {p: p.detach().clone() for p in mine}
        for p in mine:
            p.add_(p.grad * (self.param_groups[0]["rho"] / norm))
        self.zero_grad()
        return before

    def descend(self, before: dict[nn.Parameter, Tensor]) -> None:
        for p, value in before.items():
            p.copy_(value)
            p.add_(p.grad, alpha=-self.param_groups[0]["lr"])


class Ahead(SAM):
    """Takes the gradients that are there, and calls the closure once: at the other weights."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is not None
        before = self.climb()
        loss = torch.enable_grad()(closure)()
        self.descend(before)
        return loss


class ThroughData(SAM):
    """The same through ``.data``, which autograd does not see, with gradients left in place."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is not None
        mine = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.pow(2).sum() for p in mine]).sum().sqrt()
        before = {p: p.detach().clone() for p in mine}
        for p in mine:
            p.data.add_(p.grad * (self.param_groups[0]["rho"] / norm))
        loss = torch.enable_grad()(closure)()
        for p, value in before.items():
            p.data = value
            p.add_(p.grad, alpha=-self.param_groups[0]["lr"])
        return loss


class Once(torch.optim.SGD):
    """Of the user's own, and first-order: it calls its closure once."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return super().step(closure)


class ByHand(Classifier):
    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer.step(closure=optimizer_closure)


class Counts(Classifier):
    computed = 0

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.computed += 1
        return super().training_step(batch, batch_idx)


def plain_sam(
    net: nn.Module, windows: list[list[Batch]], clip: float | None = None
) -> nn.Module:
    """The loop that people write."""
    optimizer = SAM(net.parameters())
    for window in windows:
        total = sum(len(x) for x, _ in window)

        def closure(window: list[Batch] = window, total: int = total) -> Tensor:
            optimizer.zero_grad()
            loss = sum(F.cross_entropy(net(x), y) * (len(x) / total) for x, y in window)
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            return loss

        optimizer.step(closure)
    return net


def sam(net: nn.Module) -> SAM:
    return SAM(net.parameters())


@pytest.mark.parametrize("kind", [SAM, Ahead, ThroughData])
@pytest.mark.parametrize("module", [Classifier, ByHand])
def test_a_closure_computes_gradients_at_the_weights_of_its_call(
    kind: type[SAM], module: type[Classifier]
) -> None:
    batches, net = make_batches(4), make_net()
    train(module(net, lambda net: kind(net.parameters())), batches)
    assert_same(net, plain_sam(make_net(), [[batch] for batch in batches]))


@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_closure_repeats_the_whole_window_with_the_same_clipping(
    clip: float | None,
) -> None:
    batches, net = make_batches(5, last=2), make_net()
    train(
        Classifier(net, sam), batches, accumulate_grad_batches=2, gradient_clip_val=clip
    )
    assert_same(
        net, plain_sam(make_net(), [batches[:2], batches[2:4], batches[4:]], clip)
    )


def test_a_closure_that_is_called_once_costs_no_second_forward() -> None:
    for module in (
        Counts(make_net(), lambda net: Once(net.parameters(), lr=0.1)),
        type("Own", (ByHand, Counts), {})(make_net()),
    ):
        trainer = train(module, make_batches(4))
        assert module.computed == trainer.global_step == 4


def test_progress_logs_and_hooks_of_batches_see_a_window_once() -> None:
    seen: list[Any] = []

    class Listens(Classifier):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            seen.append(("loss", loss.item()))
            self.log("loss", loss, on_step=False, on_epoch=True)
            return loss

        def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
            seen.append("start")

        def on_after_backward(self) -> None:
            seen.append("backward")

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen.append("before step")

        def on_train_batch_end(
            self, outputs: Any, batch: Batch, batch_idx: int
        ) -> None:
            seen.append(("end", outputs["loss"].item()))

    trainer = train(Listens(make_net(), sam), make_batches(1))
    assert (
        trainer.progress.step,
        trainer.progress.batch,
        trainer.progress.samples,
    ) == (1, 1, 6)
    first, second = (
        value
        for name, value in (item for item in seen if isinstance(item, tuple))
        if name == "loss"
    )
    assert first != second
    names = [item if isinstance(item, str) else item[0] for item in seen]
    # Whoever changes gradients changes those of each evaluation.
    assert names == [
        "start",
        "loss",
        "backward",
        "before step",
        "loss",
        "backward",
        "before step",
        "end",
    ]
    assert seen[-1] == ("end", first)
    assert float(trainer.callback_metrics["loss"]) == pytest.approx(first)


def test_named_optimizers_keep_the_gradients_of_each_other() -> None:
    class Two(Classifier):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return {"first": loss, "second": loss * 2}

    def configure(first: Any) -> Callable[[nn.Module], Any]:
        def make(net: nn.Module) -> Any:
            return {
                "first": first(net[0].parameters()),
                "second": torch.optim.SGD(net[3].parameters(), 0.1),
            }

        return make

    batch, one, other = make_batches(1), make_net(), make_net()
    train(Two(one, configure(SAM)), batch)
    train(Two(other, configure(lambda p: torch.optim.SGD(p, 0.1))), batch)
    assert_same(one[3], other[3])
    assert not torch.equal(one[0].weight, other[0].weight)


def test_dropout_draws_the_same_at_both_points() -> None:
    drawn = []

    class Draws(Classifier):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            drawn.append(torch.rand(()).item())
            return super().training_step(batch, batch_idx)

    train(Draws(make_net(dropout=0.3), sam), make_batches(3))
    assert len(drawn) == 6
    assert len(set(drawn)) == 3


@pytest.mark.parametrize("module", [Classifier, ByHand])
def test_scaled_gradients_cannot_be_computed_again(module: type[Classifier]) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"(?s)SAM evaluates the loss again.*scaled gradients.*bf16",
    ):
        train(module(make_net(), sam), make_batches(2), precision="16-mixed")
    own = module(make_net(), lambda net: Once(net.parameters(), lr=0.1))
    assert train(own, make_batches(2), precision="16-mixed").global_step == 2


def whole(batches: list[Batch]) -> list[Batch]:
    """The batches of two ranks as those of one."""
    return [merged(batches[at : at + 2]) for at in range(0, len(batches), 2)]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_climb_and_descend_as_one(strategy: str) -> None:
    batches = make_batches(6, last=3)
    module = (
        ByHand(make_net(), sam) if strategy == "ddp" else Classifier(make_net(), sam)
    )
    train(module, batches, accumulate_grad_batches=2, strategy=strategy, devices=2)
    expected = plain_sam(make_net(), [batches[:4], batches[4:]])
    found = module.net.state_dict()
    for name, value in expected.state_dict().items():
        mine = (
            found[name].full_tensor()
            if hasattr(found[name], "full_tensor")
            else found[name]
        )
        torch.testing.assert_close(mine, value, rtol=1e-5, atol=1e-6)


@pytest.mark.world_size(2)
def test_ranks_search_along_the_line_by_the_loss_of_all() -> None:
    def configure(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(
            net.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe"
        )

    batches, mine, alone = make_batches(4), make_net().double(), make_net().double()
    doubles = [(x.double(), y) for x, y in batches]
    ddp(Classifier(mine, configure), doubles)
    train(Classifier(alone, configure), whole(doubles))
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(mine.state_dict()[name], value, rtol=1e-9, atol=1e-9)


def test_a_manual_step_cannot_compute_scaled_gradients_again() -> None:
    class Manual(Classifier):
        automatic_optimization = False

        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            optimizer = self.optimizers()

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = Classifier.training_step(self, batch, batch_idx)
                self.manual_backward(loss)
                return loss

            optimizer.step(closure)

    with pytest.raises(
        ConfigurationError, match=r"(?s)SAM evaluates the loss again.*scaled gradients"
    ):
        train(Manual(make_net(), sam), make_batches(2), precision="16-mixed")
    batches, net = make_batches(2), make_net()
    train(Manual(net, sam), batches)
    assert_same(net, plain_sam(make_net(), [[batch] for batch in batches]))


# -- runs that train nothing ---------------------------------------------------------------------------------------


class Loses(Classifier):
    """Its backward drops what it has computed."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()
        self.zero_grad()


def test_a_run_without_a_gradient_is_an_error() -> None:
    with pytest.raises(
        ConfigurationError, match=r"(?s)no parameter received a gradient.*2 steps.*SGD"
    ):
        train(Loses(make_net()), make_batches(2), max_epochs=5)


class Silent(Classifier):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


def test_a_run_without_a_loss_is_an_error_once_an_epoch_is_over() -> None:
    class Late(Silent):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            return (
                Classifier.training_step(self, batch, batch_idx) if batch_idx else None
            )

    with pytest.raises(
        ConfigurationError,
        match=r"(?s)no training_step returned a loss.*2 times None.*return the loss",
    ):
        train(Silent(make_net()), make_batches(2), max_epochs=2)
    assert train(Late(make_net()), make_batches(2), max_epochs=2).global_step == 4


@pytest.mark.world_size(2)
def test_ranks_that_train_nothing_fail_together() -> None:
    with pytest.raises(ConfigurationError, match="no training_step returned a loss"):
        ddp(Silent(make_net()), make_batches(4))


def test_manual_steps_without_a_gradient_are_an_error() -> None:
    class Manual(Classifier):
        automatic_optimization = False

        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            super().training_step(batch, batch_idx)
            self.optimizers().step()

    with pytest.raises(ConfigurationError, match="no parameter received a gradient"):
        train(Manual(make_net()), make_batches(2))


class Drops(torch.optim.SGD):
    """Its step ends without gradients, as that of published SAMs does."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.zero_grad()
        return loss


@pytest.mark.parametrize("by_closure", [False, True])
def test_manual_steps_of_an_optimizer_that_drops_gradients_itself_train(
    by_closure: bool,
) -> None:
    class Manual(Classifier):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return Drops(self.parameters(), lr=0.1)

        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            def closure() -> Any:
                loss = super(Manual, self).training_step(batch, batch_idx)
                self.manual_backward(loss)
                return loss

            if by_closure:
                self.optimizers().step(closure=closure)
            else:
                closure()
                self.optimizers().step()

    net = make_net()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    train(Manual(net), make_batches(2))
    assert all(
        not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    ("configure", "said"),
    [
        (
            lambda net: torch.optim.SGD([], lr=0.1),
            r"(?s)Classifier.configure_optimizers received no parameters.*4 parameters",
        ),
        (
            lambda net: torch.optim.SGD([{"params": []}], lr=0.1),
            "SGD of Classifier.configure_optimizers received no parameters",
        ),
        (
            lambda net: torch.optim.SGD(copy.deepcopy(net).parameters(), lr=0.1),
            r"(?s)SGD updates parameters that do not belong to Classifier.*self\.parameters\(\)",
        ),
    ],
)
def test_an_optimizer_that_steps_nothing_of_the_module_is_refused_before_the_first_step(
    configure: Any, said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        train(Classifier(make_net(), configure), make_batches(2))


def test_an_optimizer_with_foreign_parameters_warns_that_they_are_not_saved(
    capsys: pytest.CaptureFixture[str],
) -> None:
    scale = nn.Parameter(torch.ones(()))
    trainer = tk.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False
    )
    trainer.fit(
        Classifier(
            make_net(), lambda net: torch.optim.SGD([*net.parameters(), scale], lr=0.1)
        ),
        make_batches(1),
    )
    assert (
        "1 of 5 parameters of SGD are not Classifier's: checkpoints do not hold their values"
        in capsys.readouterr().out
    )
