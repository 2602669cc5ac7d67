"""The faults that `verify` names are named too in a model with batch norms, and in manual optimization with `local`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.verify import verified
from tests.verify.test_local import verify as verify_local
from tests.verify.test_verify import status, verify
from trainer_kit.strategies import DDPStrategy

pytestmark = [pytest.mark.slow, pytest.mark.long]


class OtherEps(DDPStrategy):
    def prepare_module(self, module, manual, precision):
        module.net[4].norm.eps = 1e-1
        super().prepare_module(module, manual, precision)


class AveragedTwice(verified.SmallResNet):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss / 2 if verified.ranked() else loss


class RunningMean(verified.SmallResNet):
    def __init__(self):
        super().__init__()
        self.net[7] = nn.Sequential(
            nn.Linear(32, 16), verified.Running(), nn.Linear(16, 4)
        )


FAULTS = {
    "eps": (verified.SmallResNet, {"strategy": OtherEps()}, ("forward", "net.4.norm")),
    "no all-reduce": (
        verified.SmallResNet,
        {"strategy": verified.NoExchange()},
        ("gradients", "net.1.weight"),
    ),
    "wrong factor": (
        verified.SmallResNet,
        {"strategy": verified.WrongDivisor(), "accumulate_grad_batches": 3},
        ("gradients", "net.1.weight"),
    ),
    "buffer": (
        RunningMean,
        {"strategy": DDPStrategy(broadcast_buffers=False)},
        ("buffers", "net.7.1.mean"),
    ),
    "averaged twice": (AveragedTwice, {}, ("loss", "")),
}
HINTS = {
    "no all-reduce": "not synchronized",
    "wrong factor": "3 micro-batches of accumulation",
    "averaged twice": "averaged over the 2 ranks twice",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_beside_batch_norms_is_named(fault):
    module, options, expected = FAULTS[fault]
    first = verify(module(), max_epochs=30, steps=2, **options).first
    assert first is not None
    assert (first.step, first.kind, first.where) == (0, *expected)
    assert HINTS.get(fault, "") in first.hint


def test_a_sampler_that_repeats_beside_batch_norms():
    loader = verified.loader(sampler=verified.Repeating(), shuffle=None)
    found = verify(
        verified.SmallResNet(),
        loader,
        max_epochs=30,
        steps=2,
        use_distributed_sampler=False,
    )
    assert (found.first.kind, found.first.step, found.first.where) == (
        "samples",
        0,
        "sample 0",
    )


@pytest.mark.parametrize(
    ("devices", "strategy"), [(1, "auto"), (2, "ddp"), (2, "fsdp")]
)
def test_manual_optimization_on_ranks_that_are_threads(devices, strategy):
    found = verify_local(verified.GAN(), devices=devices, strategy=strategy, steps=3)
    assert found.ok, str(found)
    assert status(found)["our loop"] == status(found)["training"] == "ok"
    assert "bit-identical to the plain loop" in str(found)
    assert torch.get_default_dtype() == torch.float32
