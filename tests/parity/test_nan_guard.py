"""Steps that are not finite: found exactly by running them again, and left out as if they were not in the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import trainer_kit as tk
from tests.parity.plain import (
    Batch,
    Classifier,
    adamw,
    assert_close,
    assert_same,
    case,
    make_net,
    train,
)
from trainer_kit.callbacks import NaNGuard
from trainer_kit.core.errors import ConfigurationError, NonFiniteError
from trainer_kit.state import rewind


class _Poisoned(torch.autograd.Function):
    """Passes a value on; its gradient is NaN."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * float("nan")


class Marked(Classifier):
    """A sample whose first feature is above 900 makes a loss NaN; above 800 a finite loss with a NaN gradient."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        x, y = batch
        worst = x[:, 0].max()
        x = x.clamp(-5, 5)
        hidden = self.net[:-1](x)
        if 800 < worst < 900:
            hidden = _Poisoned.apply(hidden)
        loss = F.cross_entropy(self.net[-1](hidden), y)
        self.log("loss", loss)
        return loss * float("nan") if worst > 900 else loss


def samples(count: int = 48, **marks: float) -> TensorDataset:
    draw = torch.Generator().manual_seed(3)
    x, y = (
        torch.randn(count, 8, generator=draw),
        torch.randint(4, (count,), generator=draw),
    )
    for name, value in marks.items():
        x[int(name[1:]), 0] = value
    return TensorDataset(x, y)


def loader(data: TensorDataset, size: int = 4) -> DataLoader[Any]:
    return DataLoader(data, batch_size=size)


QUIET = {
    "barebones": False,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
RUN = {**QUIET, "enable_checkpointing": False}


def by_hand(
    net: Any,
    data: TensorDataset,
    left_out: set[int],
    epochs: int = 1,
    k: int = 1,
    size: int = 4,
) -> None:
    """The plain loop over every window but those of the steps that are left out."""
    optimizer, step = adamw(net), 0
    schedule = lr_scheduler.StepLR(optimizer, 3, 0.7)
    for _ in range(epochs):
        for x, y in zip(*(part.split(size * k) for part in data.tensors), strict=True):
            step += 1
            if step in left_out:
                continue
            optimizer.zero_grad()
            if k == 1:
                F.cross_entropy(net(x.clamp(-5, 5)), y).backward()
            else:
                for part, target in zip(x.split(size), y.split(size), strict=True):
                    (
                        F.cross_entropy(net(part.clamp(-5, 5)), target)
                        * (len(part) / len(x))
                    ).backward()
            optimizer.step()
            schedule.step()


def scheduled(net: Any) -> Any:
    optimizer = adamw(net)
    return [optimizer], [
        {"scheduler": lr_scheduler.StepLR(optimizer, 3, 0.7), "interval": "step"}
    ]


def marked(**options: Any) -> Marked:
    return Marked(make_net(**options), scheduled)


@pytest.mark.parametrize(
    ("marks", "said"),
    [
        (
            {"s21": 950.0},
            r"the loss is not finite at step 6\n.*nan in batch 5 of epoch 0 \(samples 20, 21, 22, 23 of",
        ),
        (
            {"s22": 850.0},
            r"the gradient of net.0.bias is not finite at step 6\n.*2 gradients are not; in batch 5 .*20,",
        ),
    ],
)
@pytest.mark.parametrize("every", [1, 5, 50])
def test_the_loss_or_the_first_parameter_is_named(
    marks: dict[str, float], said: str, every: int
) -> None:
    with pytest.raises(NonFiniteError, match=f"(?s){said}"):
        train(
            marked(),
            loader(samples(**marks)),
            callbacks=[NaNGuard()],
            log_every_n_steps=every,
            **RUN,
        )


def test_losses_of_shape_one_and_of_no_shape_are_looked_at_together() -> None:
    class Shapes(Marked):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss.reshape(1) if batch_idx % 2 else loss

    with pytest.raises(
        NonFiniteError,
        match=r"the loss is not finite at step 6\n.*nan in batch 5 of epoch 0",
    ):
        train(
            Shapes(make_net(), scheduled),
            loader(samples(s21=950.0)),
            log_every_n_steps=50,
            **RUN,
        )


def test_a_batch_that_holds_nan_itself_is_named() -> None:
    data = samples()
    data.tensors[0][9, 3] = float("nan")
    with pytest.raises(
        NonFiniteError,
        match=r"at step 3\n.*samples 8, 9, 10, 11 of the dataset\), which holds NaN",
    ):
        train(marked(), loader(data), callbacks=[NaNGuard()], **RUN)


@pytest.mark.parametrize("every", [1, 4, 50])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(
    "marks", [{"s21": 950.0}, {"s21": 850.0}, {"s2": 950.0, "s21": 850.0, "s47": 950.0}]
)
def test_skip_trains_as_if_the_batches_were_not_there(
    marks: dict[str, float], dropout: float, every: int
) -> None:
    bad = {int(name[1:]) // 4 + 1 for name in marks}
    net, module, guard = (
        make_net(dropout=dropout),
        marked(dropout=dropout),
        NaNGuard("skip"),
    )
    data = samples(**marks)
    torch.manual_seed(7)
    by_hand(net, data, bad | {step + 12 for step in bad}, epochs=2)
    torch.manual_seed(7)
    trainer = train(
        module,
        loader(data),
        max_epochs=2,
        callbacks=[guard],
        log_every_n_steps=every,
        **RUN,
    )
    assert_same(module.net, net)
    assert guard.skipped_steps == sorted([*bad, *(step + 12 for step in bad)])
    assert trainer.global_step == 24
    assert trainer.progress.samples == 4 * (
        24 - len(guard.skipped_steps)
    )  # those that were trained on


def test_a_search_begins_at_the_newest_state_before_the_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rewind, "_SHARE", 0)  # a state at each look at the losses
    train(
        marked(),
        loader(samples(s21=950.0)),
        callbacks=[NaNGuard("skip")],
        log_every_n_steps=1,
        **RUN,
    )
    assert "rolling back from step 6 to step 5" in capsys.readouterr().out


def test_rollback_leaves_out_the_steps_before_too() -> None:
    net, module = make_net(), marked()
    data = samples(s33=950.0)
    by_hand(net, data, {6, 7, 8, 9})
    train(
        module,
        loader(data),
        callbacks=[NaNGuard("rollback", n=3)],
        log_every_n_steps=1,
        **RUN,
    )
    assert_same(module.net, net)


def test_sparse_gradients() -> None:
    class Rows(tk.TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(8, 2, sparse=True)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            rows = self.rows(batch)
            return (_Poisoned.apply(rows) if batch_idx == 3 else rows).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    guard = NaNGuard("skip")
    train(
        Rows(),
        [torch.tensor([i, i + 1]) for i in range(6)],
        callbacks=[guard],
        log_every_n_steps=2,
        **RUN,
    )
    assert guard.skipped_steps == [4]


def test_windows_of_several_batches() -> None:
    net, module = make_net().double(), Marked(make_net().double(), scheduled)
    data = samples(s21=850.0)
    data = TensorDataset(data.tensors[0].double(), data.tensors[1])
    by_hand(net, data, {3}, k=2)
    guard = NaNGuard("skip")
    train(module, loader(data), callbacks=[guard], accumulate_grad_batches=2, **RUN)
    assert guard.skipped_steps == [3]
    assert_close(module.net, net)


def test_too_many_bad_steps_are_an_error() -> None:
    data = samples(s2=950.0, s21=950.0, s33=950.0)
    with pytest.raises(
        NonFiniteError, match=r"(?s)at step 9\n.*steps 1, 6 were left out before"
    ):
        train(marked(), loader(data), callbacks=[NaNGuard("skip", max_skips=2)], **RUN)


def test_a_resumed_run_leaves_out_the_same(tmp_path: Path) -> None:
    data, whole = samples(s9=950.0, s33=850.0), marked(dropout=0.3)
    torch.manual_seed(5)
    train(
        whole,
        loader(data),
        max_epochs=2,
        callbacks=[NaNGuard("skip")],
        log_every_n_steps=4,
        **RUN,
    )

    def part(steps: int, **options: Any) -> tuple[Marked, NaNGuard]:
        module, guard = marked(dropout=0.3), NaNGuard("skip")
        torch.manual_seed(5)
        saving = tk.callbacks.ModelCheckpoint(
            tmp_path, every_n_train_steps=6, save_top_k=-1
        )
        limits = {"max_epochs": 2, "max_steps": steps, "log_every_n_steps": 4}
        trainer = tk.Trainer(
            accelerator="cpu",
            devices=1,
            callbacks=[saving, guard],
            **limits,
            **{**QUIET, "barebones": False},
        )
        trainer.fit(module, loader(data), **options)
        return module, guard

    _, guard = part(8)
    assert guard.skipped_steps == [3]
    module, guard = part(-1, ckpt_path=tmp_path / "step-00000006")
    assert guard.skipped_steps == [3, 9, 15, 21]
    assert_same(module.net, whole.net)
    names = sorted(path.name for path in tmp_path.glob("step-*"))
    assert names == [f"step-{step:08d}" for step in (6, 12, 18, 24)]


def test_values_of_left_out_steps_are_not_published() -> None:
    rows: list[tuple[int, float]] = []

    class Rows:
        def log_metrics(self, metrics: Any, step: int) -> None:
            if "loss" in metrics:
                rows.append((step, metrics["loss"]))

    options = {**RUN, "logger": Rows(), "log_every_n_steps": 2}
    train(marked(), loader(samples(s21=950.0)), callbacks=[NaNGuard("skip")], **options)
    assert [step for step, _ in rows] == [2, 4, 8, 10, 12]
    assert all(value == value for _, value in rows)


def test_engines_that_cannot_undo_a_step_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="loss scaling"):
        train(
            marked(),
            loader(samples()),
            callbacks=[NaNGuard()],
            precision="16-mixed",
            **RUN,
        )
    with pytest.raises(ConfigurationError, match="read only once"):
        train(marked(), iter(loader(samples())), callbacks=[NaNGuard()], **RUN)
    for wrong in (
        {"policy": "skipp"},
        {"policy": "skip", "n": 3},
        {"policy": "rollback"},
    ):
        with pytest.raises(ConfigurationError, match="policy"):
            NaNGuard(**wrong)


@pytest.mark.slow
@pytest.mark.world_size(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks(strategy: str) -> None:
    for mark in (950.0, 850.0):
        with case(mark=mark):
            data = samples(s22=mark)  # of rank 1
            data = TensorDataset(data.tensors[0].double(), data.tensors[1])
            net, module = make_net().double(), Marked(make_net().double(), scheduled)
            by_hand(net, data, {6}, size=2, k=2)
            guard = NaNGuard("skip")
            trainer = train(
                module,
                loader(data, 2),
                strategy=strategy,
                devices=2,
                callbacks=[guard],
                **RUN,
            )
            assert guard.skipped_steps == [6]
            weights = trainer.strategy.module_state(module)
            whole = {
                n.removeprefix("net."): w.full_tensor()
                if hasattr(w, "full_tensor")
                else w
                for n, w in weights.items()
            }
            torch.testing.assert_close(
                whole, dict(net.state_dict()), rtol=1e-10, atol=1e-12
            )
            again = Marked(make_net().double(), scheduled)
            with pytest.raises(
                NonFiniteError,
                match=r"(?s)at step 6\n.*samples 22, 23 of the dataset\).*",
            ):
                train(
                    again,
                    loader(data, 2),
                    strategy=strategy,
                    devices=2,
                    callbacks=[NaNGuard()],
                    **RUN,
                )
            dist.barrier()


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
import trainer_kit as tk
from tests.parity.test_nan_guard import QUIET, loader, marked, samples

class Killed(tk.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)

module = marked()
saving = tk.callbacks.ModelCheckpoint("kept", every_n_train_steps=7, save_top_k=-1)
guard = tk.callbacks.NaNGuard("rollback", n=3)
trainer = tk.Trainer(
    accelerator="cpu", devices=1, max_epochs=1, log_every_n_steps=3, logger=False, enable_progress_bar=False,
    enable_model_summary=False, callbacks=[saving, guard, Killed()], async_save=False,
)
trainer.fit(module, loader(samples(s33=950.0)), ckpt_path="kept/step-00000007" if sys.argv[1] == "-1" else None)
torch.save(module.net.state_dict(), "weights")
Path("skipped").write_text(str(guard.skipped_steps))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("killed", "left_out"), [(11, {6, 7, 8, 9}), (7, {8, 9})])
def test_a_kill_inside_the_window_of_a_rollback(
    programs: Any, tmp_path: Path, killed: int, left_out: set[int]
) -> None:
    """Step 9 is bad; the newest checkpoint is of step 7. Killed after step 11 it was written again without steps 6, 7.

    Killed before the bad step the resumed run has no state from before the window, and says so.
    """
    assert programs.run_code(KILLED, str(killed)).returncode == -9
    assert [path.name for path in sorted(tmp_path.glob("kept/step-*"))] == [
        "step-00000007"
    ]
    done = programs.run_code(KILLED, "-1")
    assert done.returncode == 0, done.stderr
    net = make_net()
    by_hand(net, samples(s33=950.0), left_out)
    module = marked()
    module.net.load_state_dict(torch.load("weights"))
    assert_same(module.net, net)
    assert ("rolling back" in done.stdout) == (killed == 7), (
        "the other checkpoint knows the bad step"
    )
    assert (tmp_path / "skipped").read_text() == "[9]"
    fewer = "steps 8 to 9 are left out, but not from step 6 on: no state before step 7 was kept"
    assert (fewer in done.stdout) == (killed == 7)


def test_gradients_that_no_optimizer_has_are_not_searched_again() -> None:
    """They stay NaN until something drops them: each step of the search found them, and was left out."""

    class Head(Marked):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net[-1].parameters(), lr=0.1)

    guard, data = NaNGuard("skip"), samples(_9=999.0)
    train(module := Head(make_net(), adamw), loader(data), callbacks=[guard], **RUN)
    assert guard.skipped_steps == [3]
    net = make_net()
    optimizer = torch.optim.SGD(net[-1].parameters(), lr=0.1)
    for step, (x, y) in enumerate(
        zip(*(part.split(4) for part in data.tensors), strict=True), 1
    ):
        if step != 3:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
    assert_same(module.net, net)


def finite_again(bad_step: int) -> Marked:
    """A module with a loss that is NaN the first time only, as on a device that is not reliable."""
    # Outside of the module, whose attributes go back with the run.
    bad_steps = {bad_step}

    class FiniteAgain(Marked):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if self.global_step + 1 in bad_steps:
                bad_steps.clear()
                return loss * float("nan")
            return loss

    return FiniteAgain(make_net(), adamw)


@pytest.mark.parametrize("bad_step", [5, 12])
def test_steps_that_are_finite_when_they_run_again(
    bad_step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also at the last step, 12, after which no state is held."""
    module = finite_again(bad_step)
    train(module, loader(samples()), callbacks=[NaNGuard("skip")], **RUN)
    printed = capsys.readouterr().out
    assert printed.count("a kernel or the hardware is not reliable") == 1
    net = make_net()
    by_hand_without_schedule(net)
    assert_same(module.net, net)
    with pytest.raises(NonFiniteError, match="the hardware is not reliable"):
        train(finite_again(bad_step), loader(samples()), callbacks=[NaNGuard()], **RUN)


def by_hand_without_schedule(net: Any) -> None:
    optimizer = adamw(net)
    for x, y in loader(samples()):
        optimizer.zero_grad()
        F.cross_entropy(net(x.clamp(-5, 5)), y).backward()
        optimizer.step()


class Unfreezing(Marked):
    """Adds a parameter group after 12 steps; the loss of step 15 is not finite."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[-1].parameters(), lr=0.1)

    def on_train_epoch_start(self) -> None:
        optimizer = self.optimizers()
        # The hook is called again where the run goes back into its epoch.
        if self.current_epoch == 1 and len(optimizer.param_groups) == 1:
            group = {"params": list(self.net[0].parameters())}
            optimizer.add_param_group(group)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.global_step == 14 else loss


def test_a_parameter_group_that_was_added_before_the_newest_state_is_no_obstacle(
    capsys: pytest.CaptureFixture[str],
) -> None:
    guard = NaNGuard("rollback", n=20)
    train(
        Unfreezing(make_net(), adamw),
        loader(samples()),
        max_epochs=2,
        callbacks=[guard],
        log_every_n_steps=1,
        **RUN,
    )
    assert guard.skipped_steps == [15]
    assert "no state before step 13 was kept" in capsys.readouterr().out


def test_no_way_back_over_the_addition_of_a_parameter_group(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(NonFiniteError, match="the loss is not finite at step 15"):
        train(
            Unfreezing(make_net(), adamw),
            loader(samples()),
            max_epochs=2,
            callbacks=[NaNGuard("skip")],
            **RUN,
        )
    assert "the number of parameter groups has changed" in capsys.readouterr().out
