"""A loss far above those of the steps before, and a step that gives another result when it runs again."""

from __future__ import annotations

import json
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
    assert_same,
    make_batches,
    make_net,
    sgd,
    train,
)
from trainer_kit.callbacks import ModelCheckpoint, NaNGuard, ReplayCheck, SpikeDetection
from trainer_kit.core.errors import ConfigurationError, TrainerKitError

RUN = {**QUIET, "enable_checkpointing": False}


class Spiking(Classifier):
    def __init__(self, at: int, by: float = 20.0, rank: int | None = None) -> None:
        super().__init__(
            make_net(), lambda net: torch.optim.SGD(net.parameters(), lr=1e-4)
        )
        self.at, self.by, self.rank = at, by, rank

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        here = self.rank is None or dist.get_rank() == self.rank
        return loss * self.by if batch_idx == self.at and here else loss


@pytest.mark.parametrize("every", [1, 4, 50])
@pytest.mark.parametrize("k", [1, 2])
def test_the_step_of_a_spike_is_named(every: int, k: int) -> None:
    options = {**RUN, "log_every_n_steps": every, "accumulate_grad_batches": k}
    with pytest.raises(
        TrainerKitError,
        match=rf"the loss jumped to .* at step {9 // k + 1}\n.*mean of the",
    ):
        train(Spiking(9), make_batches(20), callbacks=[SpikeDetection()], **options)
    train(Spiking(9, by=1.5), make_batches(20), callbacks=[SpikeDetection()], **options)


@pytest.mark.parametrize("every", [1, 50])
@pytest.mark.parametrize(("k", "batches"), [(1, [8, 9]), (2, [6, 7, 8, 9])])
def test_the_batches_of_a_spike_are_written(
    every: int, k: int, batches: list[int], tmp_path: Path
) -> None:
    """As Lightning's: the batches of the spike and of the step before it, for one accumulated batch both."""
    options = {**RUN, "log_every_n_steps": every, "accumulate_grad_batches": k}
    for path, file in [
        ("runs", "runs/skip_batches.json"),
        ("skipped.json", "skipped.json"),
    ]:
        spikes = SpikeDetection(exclude_batches_path=tmp_path / path)
        with pytest.raises(TrainerKitError, match="the loss jumped"):
            train(Spiking(9), make_batches(20), callbacks=[spikes], **options)
        assert (
            json.loads((tmp_path / file).read_text()) == batches == spikes.bad_batches
        )
    warned = SpikeDetection(action="warn")
    train(
        Spiking(9), make_batches(20), callbacks=[warned], **{**options, "max_epochs": 2}
    )
    assert warned.bad_batches == batches * 2


def test_stop_saves_and_warn_continues(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, every_n_epochs=1)
    stopping, warning = SpikeDetection(action="stop"), SpikeDetection(action="warn")
    trainer = train(
        Spiking(9),
        make_batches(20),
        callbacks=[stopping, saving],
        log_every_n_steps=1,
        **QUIET,
    )
    assert trainer.global_step == 10
    plain, module = Spiking(9), Spiking(9)
    train(plain, make_batches(20))
    trainer = train(module, make_batches(20), callbacks=[warning], **RUN)
    assert trainer.global_step == 20
    assert list(warning.spikes) == list(stopping.spikes) == [10]
    assert_same(module, plain)


def test_a_resumed_run_remembers_the_mean(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=8)
    train(
        Spiking(9),
        make_batches(20),
        callbacks=[saving, SpikeDetection()],
        max_steps=8,
        **QUIET,
    )
    detection = SpikeDetection(warmup=9, action="warn")
    trainer = tk.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, callbacks=[detection], **RUN
    )
    trainer.fit(Spiking(9), make_batches(20), ckpt_path=tmp_path / "step-00000008")
    assert list(detection.spikes) == [10], "nine steps were judged before"


def test_reused_memory_of_a_loss_is_not_a_spike() -> None:
    class Reusing(Spiking):
        kept: Any = None

        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            if self.kept is not None:
                self.kept.detach().zero_()  # as a compiled step does with its outputs
            self.kept = super().training_step(batch, batch_idx)
            return self.kept

    detection = SpikeDetection()
    train(
        Reusing(-1), make_batches(16), callbacks=[detection], log_every_n_steps=4, **RUN
    )
    assert detection.spikes == {}


def test_a_second_fit_forgets_the_first() -> None:
    detection, guard = SpikeDetection(action="warn"), NaNGuard("skip", max_skips=1)
    for at, by in ((6, 20.0), (4, float("nan")), (5, float("nan"))):
        module = Spiking(at, by)
        train(
            module,
            make_batches(12),
            callbacks=[detection, guard],
            log_every_n_steps=4,
            **RUN,
        )
        assert list(detection.spikes) == ([at + 1] if by == 20.0 else [])
        assert guard.skipped_steps == ([] if by == 20.0 else [at + 1])


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("by", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_left_to_the_guard(k: int, by: float) -> None:
    detection, guard = SpikeDetection(), NaNGuard("skip")
    options = {**RUN, "accumulate_grad_batches": k, "log_every_n_steps": 4}
    train(Spiking(6, by), make_batches(16), callbacks=[detection, guard], **options)
    assert (guard.skipped_steps, detection.spikes) == ([6 // k + 1], {})


def test_wrong_arguments() -> None:
    for wrong in ({"mode": "mni"}, {"action": "halt"}, {"window": 0}):
        with pytest.raises(ConfigurationError):
            SpikeDetection(**wrong)
    for every in (0, "2ep"):
        with pytest.raises(ConfigurationError):
            ReplayCheck(every)


class Corrupt(Classifier):
    """Its ``at``-th call computes one value a little wrong."""

    def __init__(self, at: int = 10**9, rank: int | None = None, **net: Any) -> None:
        super().__init__(make_net(**net), sgd)
        self.at, self.rank, self.calls = at, rank, 0

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.calls += 1
        wrong = self.calls == self.at and (
            self.rank is None or dist.get_rank() == self.rank
        )
        return super().training_step(batch, batch_idx) * (1 + 1e-6 * wrong)


@pytest.mark.parametrize("k", [1, 2])
def test_a_replayed_step_changes_nothing(k: int) -> None:
    hooks: list[int] = []

    class Count(tk.Callback):
        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            hooks.append(batch_idx)

    plain, module = Corrupt(dropout=0.4, norm=True), Corrupt(dropout=0.4, norm=True)
    options = {**RUN, "max_epochs": 2, "accumulate_grad_batches": k}
    torch.manual_seed(2)
    train(plain, make_batches(6), **options)
    torch.manual_seed(2)
    trainer = train(
        module, make_batches(6), callbacks=[ReplayCheck(every=3), Count()], **options
    )
    assert_same(module, plain)
    assert module.calls == 12 + 12 // 3
    assert trainer.progress.batch == 12
    assert hooks == [*range(6), *range(6)]


@pytest.mark.parametrize("at", [3, 4])
def test_a_wrong_result_is_an_error_before_the_step(at: int) -> None:
    module = Corrupt(at)
    with pytest.raises(
        TrainerKitError,
        match=r"(?s)step 3 gave different results.*on rank 0\n.*cpu: the loss and 4 grad",
    ):
        train(module, make_batches(6), callbacks=[ReplayCheck(every=3)], **RUN)
    plain = Corrupt()
    train(plain, make_batches(2))
    assert_same(module, plain)


class Rows(tk.TrainModule):
    """The loss of call ``at`` is multiplied by ``by``; the others are 0, and so are their gradients."""

    def __init__(self, at: int = -1, by: float = 0.0, sparse: bool = False) -> None:
        super().__init__()
        self.rows, self.weight = (
            nn.Embedding(8, 2, sparse=sparse),
            nn.Parameter(torch.ones(2)),
        )
        self.at, self.by, self.calls = at, by, 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        return (self.rows(batch).sum() + self.weight.sum()) * (
            self.by if self.calls == self.at else 0.0
        ) + 1.0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(("by", "sparse"), [(-0.0, False), (1.0, True)])
def test_the_sign_of_a_zero_counts_and_sparse_gradients_are_compared(
    by: float, sparse: bool
) -> None:
    batches, options = (
        [torch.tensor([1, 5, 5])] * 4,
        {**RUN, "callbacks": [ReplayCheck(every=2)]},
    )
    train(Rows(sparse=sparse), batches, **options)
    with pytest.raises(
        TrainerKitError,
        match="step 2 gave different results when it was repeated on rank 0",
    ):
        train(Rows(3, by, sparse), batches, **options)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_the_rank_is_named() -> None:
    options = {**RUN, "strategy": "ddp", "devices": 2}
    plain, module = Corrupt(), Corrupt()
    train(plain, make_batches(8), **options)
    train(module, make_batches(8), callbacks=[ReplayCheck(every=2)], **options)
    torch.testing.assert_close(module.state_dict(), plain.state_dict())
    with pytest.raises(
        TrainerKitError,
        match=r"step 2 gave different results when it was repeated on rank 1\n",
    ):
        train(
            Corrupt(3, rank=1),
            make_batches(8),
            callbacks=[ReplayCheck(every=2)],
            **options,
        )
    with pytest.raises(TrainerKitError, match=r"step 2 gave different results"):
        train(
            Corrupt(3, rank=1),
            make_batches(8),
            callbacks=[ReplayCheck(every=2)],
            **{**options, "strategy": "fsdp"},
        )
    with pytest.raises(TrainerKitError, match=r"at step 3\n"):
        train(
            Spiking(2, rank=1),
            make_batches(16),
            callbacks=[SpikeDetection()],
            **options,
        )


class Drifting(Classifier):
    """Its forward reads a buffer that moves apart on the ranks unless the wrapper sends that of rank 0."""

    def __init__(self) -> None:
        super().__init__(make_net(), sgd)
        self.register_buffer("scale", torch.ones(()))

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx) * self.scale.clone()
        self.scale += 0.25 * (1 + dist.get_rank())
        return loss


@pytest.mark.slow
@pytest.mark.world_size(2)
@pytest.mark.parametrize("k", [1, 2])
def test_the_step_after_a_check_begins_with_the_buffers_of_rank_0(k: int) -> None:
    options = {**RUN, "strategy": "ddp", "devices": 2, "accumulate_grad_batches": k}
    plain, module = Drifting(), Drifting()
    train(plain, make_batches(16), **options)
    train(module, make_batches(16), callbacks=[ReplayCheck(every=2)], **options)
    torch.testing.assert_close(module.net.state_dict(), plain.net.state_dict())
