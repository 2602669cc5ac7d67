"""Losses that are not finite, and steps that have none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import trainer_kit as tk
from tests.parity.plain import (
    Batch,
    Classifier,
    assert_close,
    assert_same,
    doubled,
    make_batches,
    make_net,
    merged,
    plain_loop,
    sgd,
    train,
)
from trainer_kit.core.errors import NonFiniteError
from trainer_kit.data import Feed
from trainer_kit.testing import TinyModule

QUIET = {
    "barebones": False,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Spoiled(Classifier):
    """The loss of one batch is something else."""

    def __init__(self, at: int, by: float, configure: Any = sgd) -> None:
        super().__init__(make_net(), configure)
        self.at, self.by, self.calls = at, by, 0

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.calls += 1
        loss = super().training_step(batch, batch_idx)
        return loss * self.by if self.calls - 1 == self.at else loss


@pytest.mark.parametrize("by", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("at", "every", "last"), [(3, 1, 4), (3, 5, 5), (6, 5, 7), (13, 50, 14), (4, 50, 7)]
)
def test_the_run_stops_at_the_flush_and_names_the_step(
    by: float, at: int, every: int, last: int
) -> None:
    # Losses are read at every flush and at the end of an epoch, here of 7 steps.
    module = Spoiled(at, by)
    with pytest.raises(
        NonFiniteError,
        match=rf"(?s)not finite at step {at + 1}\n.*{by} in batch {at % 7} of epoch {at // 7}",
    ):
        train(module, make_batches(7), max_epochs=3, log_every_n_steps=every)
    assert module.calls == last


def test_no_checkpoint_holds_the_non_finite_weights(tmp_path: Path) -> None:
    saving = tk.callbacks.ModelCheckpoint(
        tmp_path,
        every_n_train_steps=2,
        save_top_k=-1,
        save_last=True,
        save_on_exception=True,
    )
    module = Spoiled(5, float("nan"))
    with pytest.raises(NonFiniteError, match="not finite at step 6"):
        train(
            module, make_batches(20), callbacks=[saving], log_every_n_steps=50, **QUIET
        )
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [
        "step-00000002",
        "step-00000004",
    ]
    assert module.calls == 6


@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize("hook", ["on_after_backward", "on_train_batch_end"])
def test_a_loss_whose_memory_is_reused_keeps_its_returned_value(
    hook: str, as_dict: bool
) -> None:
    """As a compiled step does with its outputs, and a user who scales or clears a loss in place."""

    class Reusing(Spoiled):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            self.kept = super().training_step(batch, batch_idx)
            return {"loss": self.kept} if as_dict else self.kept

        def on_after_backward(self) -> None:
            if hook == "on_after_backward":
                self.kept.detach().zero_()

        def on_train_batch_end(
            self, outputs: Any, batch: Batch, batch_idx: int
        ) -> None:
            if hook == "on_train_batch_end":
                outputs["loss"].zero_()

    with pytest.raises(
        NonFiniteError, match=r"(?s)not finite at step 3\n.*nan in batch 2 of epoch 0"
    ):
        train(Reusing(2, float("nan")), make_batches(7), log_every_n_steps=5)


@pytest.mark.parametrize("at", [2, 3])
def test_losses_of_several_classes_and_shapes_are_checked_together(at: int) -> None:
    """A plain loss on the CPU is kept as a number, one of a subclass as a tensor."""

    class Own(torch.Tensor):
        pass

    class Mixed(Spoiled):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss.as_subclass(Own) if batch_idx % 2 else loss.reshape(1)

    with pytest.raises(
        NonFiniteError,
        match=rf"(?s)not finite at step {at + 1}\n.*nan in batch {at} of epoch 0",
    ):
        train(Mixed(at, float("nan")), make_batches(7), log_every_n_steps=5)


def test_losses_of_manual_optimization_are_checked_too() -> None:
    class Manual(Classifier):
        automatic_optimization = False

        def training_step(self, batch: Batch, batch_idx: int) -> None:
            self.manual_backward(
                super().training_step(batch, batch_idx)
                * (float("nan") if batch_idx == 2 else 1.0)
            )
            self.optimizers().step()

    with pytest.raises(NonFiniteError, match="not finite at step 3"):
        train(Manual(make_net()), make_batches(5), log_every_n_steps=1)


@pytest.mark.parametrize("k", [1, 2])
def test_the_samples_of_the_batch_are_named(k: int) -> None:
    x = torch.randn(24, 8)
    x[17] = float("nan")
    loader = DataLoader(
        TensorDataset(x, torch.zeros(24, dtype=torch.long)), batch_size=4, shuffle=True
    )
    with pytest.raises(NonFiniteError) as raised:
        train(
            Classifier(make_net()),
            loader,
            seed=5,
            max_epochs=1,
            accumulate_grad_batches=k,
        )
    feed = Feed(DataLoader(range(24), batch_size=4, shuffle=True), seed=5)  # type: ignore[arg-type]
    batches = [batch.tolist() for batch, _ in feed.sized_epoch(0)]
    at = next(i for i, batch in enumerate(batches) if 17 in batch)
    assert f"at step {at // k + 1}\n" in str(raised.value)
    assert (
        f"nan in batch {at} of epoch 0 (samples {', '.join(map(str, batches[at]))} of the dataset)"
        in str(raised.value)
    )


def test_gradient_scaling_gives_up_on_a_loss_that_is_never_finite() -> None:
    class Never(Classifier):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * float("inf")

    net = make_net()
    with pytest.raises(NonFiniteError, match="not finite at step 1"):
        train(Never(net), make_batches(60), precision="16-mixed", log_every_n_steps=1)
    assert_same(net, make_net())


class Skipping(Classifier):
    """Returns None for some batches."""

    def __init__(self, net: Any, skipped: set[int], configure: Any = sgd) -> None:
        super().__init__(net, configure)
        self.skipped = skipped

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return (
            None
            if batch_idx in self.skipped
            else super().training_step(batch, batch_idx)
        )


def by_steps(net: Any) -> Any:
    optimizer = sgd(net)
    return [optimizer], [
        {"scheduler": lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}
    ]


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("skipped", [{0}, {2, 3}, {5}])
def test_none_skips_the_step_and_its_scheduler(
    skipped: set[int], precision: str
) -> None:
    batches, net, mine = make_batches(6), make_net(), make_net()
    (optimizer,), (config,) = by_steps(net)
    left = [batch for i, batch in enumerate(batches) if i not in skipped]
    mixed = (
        {"autocast": torch.float16, "scaler": torch.amp.GradScaler("cpu")}
        if precision == "16-mixed"
        else {}
    )
    plain_loop(net, [left] * 2, optimizer, by_step=config["scheduler"], **mixed)
    trainer = train(
        Skipping(mine, skipped, by_steps), batches, max_epochs=2, precision=precision
    )
    assert_same(mine, net)
    assert trainer.global_step == 12, "a skipped turn is a step"


def test_all_of_a_window_is_skipped() -> None:
    batches, net, mine = (
        doubled(make_batches(6)),
        make_net().double(),
        make_net().double(),
    )
    plain_loop(net, [[merged(batches[:2]), merged(batches[4:])]], sgd(net))
    train(Skipping(mine, {2, 3}), batches, accumulate_grad_batches=2)
    assert_close(mine, net)


@pytest.mark.parametrize("skipped", [{0}, {1}, {2}])
def test_skipped_micro_batches_keep_their_weight(skipped: set[int]) -> None:
    sizes = (4, 2, 6)
    batches = [doubled(make_batches(1, size=size, seed=size))[0] for size in sizes]
    net, mine = make_net().double(), make_net().double()
    optimizer = sgd(net)
    for _ in range(2):
        optimizer.zero_grad()
        for i, (x, y) in enumerate(batches):
            if i not in skipped:
                (F.cross_entropy(net(x), y) * len(y) / 12).backward()
        optimizer.step()
    train(Skipping(mine, skipped), batches, max_epochs=2, accumulate_grad_batches=3)
    assert_close(mine, net)


def test_a_dict_with_a_loss_counts_as_one() -> None:
    class Dict(Classifier):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            return {
                "loss": super().training_step(batch, batch_idx),
                "size": len(batch[1]),
            }

    seen: list[Any] = []

    class Look(tk.Callback):
        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            seen.append((outputs["size"], outputs["loss"].requires_grad))

    batches, net, mine = make_batches(3, last=2), make_net(), make_net()
    plain_loop(net, [batches], sgd(net))
    train(Dict(mine), batches, callbacks=[Look()])
    assert_same(mine, net)
    assert seen == [(6, False), (6, False), (2, False)]


def test_the_message_has_the_first_samples_of_a_large_batch() -> None:
    class Diverges(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * float("nan")

    data = torch.randn(64, 32)
    trainer = tk.Trainer(max_epochs=1, barebones=True)
    with pytest.raises(
        NonFiniteError,
        match=r"\(samples 0, 1, 2, 3, 4, 5, 6, 7 and 56 more of the dataset\)",
    ):
        trainer.fit(Diverges(), DataLoader(data, batch_size=64))  # type: ignore[arg-type]
