"""`verify` with batch norms over the samples of all ranks: on the CPU a stand-in for SyncBatchNorm does it."""

from __future__ import annotations

import pytest
import torch

import trainer_kit as tk
from tests.verify import verified
from tests.verify.test_verify import status, verify
from trainer_kit.strategies import DDPStrategy

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def ddp_takes_them_on_the_cpu(monkeypatch):
    """DDP refuses torch's SyncBatchNorm on the CPU, and with it the stand-in."""
    monkeypatch.setattr(
        torch.nn.parallel.DistributedDataParallel,
        "_passing_sync_batchnorm_handle",
        lambda *_: None,
    )


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("ddp", {}),
        pytest.param("ddp", {"accumulate_grad_batches": 2}, marks=pytest.mark.long),
        pytest.param("fsdp", {}, marks=pytest.mark.long),
    ],
)
def test_batch_norms_of_all_ranks(strategy, options):
    """The plain loop normalized each rank's samples by themselves: a false alarm."""
    found = verify(
        verified.SyncedResNet(), strategy=strategy, max_epochs=30, steps=2, **options
    )
    assert found.ok, str(found)
    assert status(found)["training"] == status(found)["other world"] == "ok"
    notes = [check.text for check in found.checks if check.name == "batch norms"]
    assert len(notes) == 1
    assert notes[0].startswith("net.4.norm: each rank normalizes its own samples")


class Changed(DDPStrategy):
    """Plants a fault on the ranks, behind `plant`."""

    def prepare_module(self, module, manual, precision):
        self.plant(module)
        super().prepare_module(module, manual, precision)


class OtherEps(Changed):
    def plant(self, module):
        module.net[5].norm.eps = 1e-1


class NotTogether(Changed):
    def plant(self, module):
        module.net[5].norm.together = False


@pytest.mark.long
@pytest.mark.parametrize("strategy", [OtherEps, NotTogether])
def test_a_fault_in_one_of_them_is_named(strategy):
    first = verify(
        verified.SyncedResNet(), strategy=strategy(), max_epochs=30, steps=2
    ).first
    assert (first.kind, first.step, first.where) == ("forward", 0, "net.5.norm")


@pytest.mark.long
def test_gradients_that_are_not_exchanged_beside_them():
    first = verify(
        verified.SyncedResNet(), strategy=verified.NoExchange(), max_epochs=30, steps=2
    ).first
    assert (first.kind, first.step) == ("gradients", 0)
    assert "not synchronized" in first.hint


def test_manual_optimization_with_them_is_refused():
    module = verified.GAN()
    module.generator[1] = verified.SyncedNorm(16)
    with pytest.raises(
        tk.ConfigurationError,
        match="manual optimization with batch norms that normalize",
    ):
        verify(module, steps=2)


def test_inputs_of_different_lengths_are_normalized_together():
    from trainer_kit.verify.norms import joined

    draw = torch.Generator().manual_seed(0)
    values = [
        torch.randn(2, 3, length, generator=draw, dtype=torch.float64)
        for length in (4, 7)
    ]
    norm = torch.nn.BatchNorm1d(3, dtype=torch.float64)
    rows = torch.cat([value.movedim(1, -1).reshape(-1, 3) for value in values])
    outputs = joined(values, norm)
    found = torch.cat([value.movedim(1, -1).reshape(-1, 3) for value in outputs])
    expected = torch.nn.functional.batch_norm(rows, None, None, training=True)
    assert [value.shape for value in outputs] == [value.shape for value in values]
    torch.testing.assert_close(found, expected)
