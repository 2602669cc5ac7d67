"""A step that runs out of memory: what the error says, and `AutoMicroBatch`, which repeats it in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import trainer_kit as tk
from tests.parity.plain import (
    QUIET,
    Batch,
    Classifier,
    assert_close,
    case,
    ddp,
    doubled,
    make_batches,
    make_net,
    merged,
    plain_loop,
    sgd,
    train,
)
from trainer_kit.callbacks import AutoMicroBatch
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.step.split_batches import split


class Full(nn.Module):
    """Stands in for an accelerator with room for ``rows`` rows, in the forward or in the backward."""

    def __init__(
        self, inner: nn.Module, rows: int, where: str, rank: int | None = None
    ) -> None:
        super().__init__()
        self.inner, self.rows, self.where, self.rank, self.calls = (
            inner,
            rows,
            where,
            rank,
            0,
        )

    def forward(self, x: Any) -> Any:
        self.calls += 1
        here = self.rank is None or dist.get_rank() == self.rank
        full = (
            here and len(x) > self.rows and self.calls > 2
        )  # the first steps have room
        if full and self.where == "forward":
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB"
            )
        out = self.inner(x)
        if full:
            out.register_hook(_raise)
        return out


def _raise(gradient: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Logging(Classifier):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss


def net(
    rows: int = 99, where: str = "forward", rank: int | None = None, norm: bool = False
) -> Logging:
    return Logging(Full(make_net(norm=norm).double(), rows, where, rank), sgd)


def test_the_error_names_step_peak_and_fix() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as raised:
        train(net(3), doubled(make_batches(4)))
    notes = "\n".join(raised.value.__notes__)
    assert "out of memory at step 3: peak " in notes
    assert "AutoMicroBatch()" in notes


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(("rows", "parts"), [(3, 2), (2, 4), (1, 8)])
@pytest.mark.parametrize("k", [1, 2])
def test_the_step_is_repeated_with_the_same_result(
    where: str, rows: int, parts: int, k: int
) -> None:
    batches, seen = doubled(make_batches(6, last=3)), []

    class Look(tk.Callback):
        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            seen.append((batch_idx, float(outputs["loss"])))

    options = {
        **QUIET,
        "enable_checkpointing": False,
        "max_epochs": 2,
        "accumulate_grad_batches": k,
    }
    plain, module, auto = net(), net(rows, where), AutoMicroBatch()
    before = train(plain, batches, callbacks=[Look()], **options)
    wanted = dict(seen[-6:])
    trainer = train(module, batches, callbacks=[Look(), auto], **options)
    assert_close(module.net.inner, plain.net.inner)
    assert auto.parts == parts
    assert trainer.progress.state_dict().keys() == before.progress.state_dict().keys()
    for name in ("batch", "samples", "step", "epoch"):
        assert getattr(trainer.progress, name) == getattr(before.progress, name)
    assert dict(seen[-6:]) == pytest.approx(wanted)
    assert float(trainer.callback_metrics["loss"]) == pytest.approx(
        float(before.callback_metrics["loss"])
    )


def test_the_loss_of_parts_is_the_one_that_was_returned() -> None:
    class Reusing(Logging):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            self.kept = super().training_step(batch, batch_idx)
            return self.kept

        def on_after_backward(self) -> None:
            self.kept.detach().zero_()  # as a compiled step does that reuses its memory

    losses: list[float] = []

    class Look(tk.Callback):
        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            losses.append(float(outputs["loss"]))

    batches, options = (
        doubled(make_batches(4)),
        {**QUIET, "enable_checkpointing": False},
    )
    train(net(), batches, callbacks=[Look()], **options)
    module = Reusing(Full(make_net().double(), 3, "forward"), sgd)
    train(module, batches, callbacks=[Look(), AutoMicroBatch()], **options)
    assert losses[6:] == pytest.approx(losses[2:4])


def test_one_row_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        train(
            net(0),
            doubled(make_batches(4)),
            callbacks=[AutoMicroBatch()],
            barebones=False,
            **_quiet(),
        )


def test_another_error_is_not_caught() -> None:
    class Wrong(Logging):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        train(
            Wrong(make_net(), sgd),
            make_batches(2),
            callbacks=[AutoMicroBatch()],
            barebones=False,
            **_quiet(),
        )


def _quiet() -> dict[str, Any]:
    return {name: value for name, value in QUIET.items() if name != "barebones"} | {
        "enable_checkpointing": False
    }


def test_the_number_of_parts_is_remembered(tmp_path: Path) -> None:
    batches, saving = (
        doubled(make_batches(6)),
        tk.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=4),
    )
    train(net(3), batches, callbacks=[saving, AutoMicroBatch()], max_steps=4, **QUIET)
    again, auto = net(3), AutoMicroBatch()
    trainer = tk.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[auto],
        enable_checkpointing=False,
        **QUIET,
    )
    trainer.fit(again, batches, ckpt_path=tmp_path / "step-00000004")
    plain = net()
    train(plain, batches)
    assert auto.parts == 2
    assert again.net.calls == 4, "no step was repeated"
    assert_close(again.net.inner, plain.net.inner)


def test_batches_are_divided_by_rows() -> None:
    parts = split(
        [
            torch.arange(5),
            {
                "y": torch.arange(10).view(5, 2),
                "scale": torch.tensor(2.0),
                "n": list("abcde"),
            },
        ],
        2,
    )
    assert [size for _, size in parts] == [3, 2]
    (x, rest), _ = parts[1]
    assert x.tolist() == [3, 4]
    assert rest["y"].tolist() == [[6, 7], [8, 9]]
    assert float(rest["scale"]) == 2.0
    assert rest["n"] == ["d", "e"]


def test_steps_that_cannot_be_repeated_are_refused() -> None:
    class Manual(Logging):
        automatic_optimization = False

    with pytest.raises(ConfigurationError, match="manual optimization"):
        train(
            Manual(make_net(), sgd),
            make_batches(2),
            callbacks=[AutoMicroBatch()],
            barebones=False,
            **_quiet(),
        )
    with pytest.raises(ConfigurationError, match="parts must be at least 1"):
        AutoMicroBatch(parts=0)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_every_rank_repeats_the_step_that_fails_on_one() -> None:
    batches = doubled(make_batches(9, last=3))
    for where in ("forward", "backward"):
        for k in (1, 2):
            with case(where=where, k=k):
                options = {
                    **QUIET,
                    "enable_checkpointing": False,
                    "max_epochs": 2,
                    "accumulate_grad_batches": k,
                }
                plain, module, auto = net(), net(2, where, rank=1), AutoMicroBatch()
                train(plain, batches, strategy="ddp", devices=2, **options)
                trainer = train(
                    module,
                    batches,
                    strategy="ddp",
                    devices=2,
                    callbacks=[auto],
                    **options,
                )
                assert auto.parts == 4
                assert_close(module.net.inner, plain.net.inner)
                theirs = trainer.strategy.world.all_gather_object(
                    [p.tolist() for p in module.parameters()]
                )
                assert theirs[0] == theirs[1]
    with case(
        hook="on_train_batch_start"
    ):  # which the ranks agree on before each micro-batch

        class Starts(tk.Callback):
            def on_train_batch_start(
                self, trainer: Any, module: Any, batch: Any, batch_idx: int
            ) -> None:
                pass

        module = net(2, "forward", rank=1)
        train(
            module,
            batches,
            strategy="ddp",
            devices=2,
            callbacks=[AutoMicroBatch(), Starts()],
            **options,
        )
        assert_close(module.net.inner, plain.net.inner)
    with pytest.raises(ConfigurationError, match="cannot repeat a step of this run"):
        train(
            net(),
            batches,
            strategy="fsdp",
            devices=2,
            callbacks=[AutoMicroBatch()],
            **options,
        )


class Weighted(Classifier):
    """Rows whose first feature is 0 have no weight."""

    def loss_weight(self, batch: Batch) -> Any:
        x, _ = batch
        return (x[:, 0] != 0).sum()


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_a_split_batch_without_weight_changes_nothing() -> None:
    batches = doubled(make_batches(12))
    # The batch of rank 1 at step 5; its third forward, at step 3, is out of memory.
    batches[9][0][:, 0] = 0.0
    steps = [merged(batches[first : first + 2]) for first in range(0, 12, 2)]
    steps[4] = batches[8]
    plain = make_net().double()
    plain_loop(plain, [steps], sgd(plain))
    inner = make_net().double()
    module, auto = Weighted(Full(inner, 2, "forward", rank=1), sgd), AutoMicroBatch()
    options = {**QUIET, "enable_checkpointing": False}
    # All ranks end with the same weights: `ddp` compares them.
    ddp(module, batches, callbacks=[auto], **options)
    assert auto.parts == 4
    assert_close(inner, plain)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_memory_that_is_full_before_the_forward_of_one_rank() -> None:
    class Moves(Logging):
        def __init__(self, full: bool) -> None:
            super().__init__(make_net().double(), sgd)
            self.register_buffer(
                "seen", torch.zeros((), dtype=torch.float64)
            )  # the wrapper sends rank 0's
            self.full, self.moved = full, 0

        def transfer_batch_to_device(
            self, batch: Any, device: Any, dataloader_idx: int
        ) -> Any:
            self.moved += 1
            if self.full and dist.get_rank() == 1 and self.moved == 3:
                _raise(None)
            return batch

        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            self.seen += len(batch[1])
            return super().training_step(batch, batch_idx)

    batches = doubled(make_batches(8))
    for k in (1, 2):
        with case(k=k):
            options = {
                **QUIET,
                "enable_checkpointing": False,
                "max_epochs": 1,
                "accumulate_grad_batches": k,
            }
            plain, module, auto = Moves(False), Moves(True), AutoMicroBatch()
            train(plain, batches, strategy="ddp", devices=2, **options)
            train(
                module, batches, strategy="ddp", devices=2, callbacks=[auto], **options
            )
            assert auto.parts == 2
            assert_close(module.net, plain.net)
            assert module.seen == plain.seen


@pytest.mark.world_size(2)
def test_a_forward_that_needs_every_rank_cannot_be_repeated_on_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # torch refuses these layers on a CPU, where accelerators come as far as the question of AutoMicroBatch
    monkeypatch.setattr(
        nn.parallel.DistributedDataParallel,
        "_passing_sync_batchnorm_handle",
        lambda *_: None,
    )

    class Normed(Classifier):
        def __init__(self) -> None:
            super().__init__(nn.Sequential(make_net(), nn.SyncBatchNorm(3)))

    with pytest.raises(
        ConfigurationError, match="SyncBatchNorm, whose forward needs every rank"
    ):
        train(
            Normed(),
            make_batches(2),
            strategy="ddp",
            devices=2,
            callbacks=[AutoMicroBatch()],
            **QUIET,
        )


class SplitsAsInVersion02(tk.Callback):
    """What the loop asked of such a callback then."""

    def __init__(self) -> None:
        self.parts = 1

    @property
    def splits_batches(self) -> bool:
        return True


def test_a_callback_of_version_02_that_splits_batches_is_refused_not_ignored() -> None:
    with pytest.raises(
        ConfigurationError, match=r"SplitsAsInVersion02(.|\n)*def double_parts"
    ):
        train(
            Classifier(make_net()), make_batches(2), callbacks=[SplitsAsInVersion02()]
        )
