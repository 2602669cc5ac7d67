"""``Trainer(activation_checkpointing=...)``: the same bits with less memory, on several strategies."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.callbacks.fits import trainer
from trainer_kit import TrainModule
from trainer_kit.core.errors import ConfigurationError, StrategyError


class Block(nn.Module):
    calls = 0

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 8))

    def forward(self, x):
        Block.calls += 1  # FSDP gives the instance a class of its own
        return x + self.inner(x)


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.blocks, self.head = nn.Sequential(Block(), Block(), Block()), nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
            loss = self.head(self.blocks(batch)).pow(2).mean()
        self.kept = sum(kept)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.head(self.blocks(batch)).mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


BATCHES = list(torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(2)))


def trained(**options):
    module, Block.calls = Net(), 0
    made = trainer(max_epochs=2, **options)
    torch.manual_seed(3)
    made.fit(module, BATCHES, BATCHES[:1])
    return module, made.strategy.module_state(module)


@pytest.mark.parametrize("policy", [True, "Block", Block, lambda part: isinstance(part, Block)])
def test_it_trains_to_the_same_bits_with_less_memory(policy):
    plain, weights = trained()
    assert Block.calls == 3 * (8 + 2)
    module, ours = trained(activation_checkpointing=policy)
    assert Block.calls == 3 * (8 * 2 + 2), "each block runs twice a step, and once in validation"
    assert module.kept < 0.5 * plain.kept
    for name, value in weights.items():
        assert torch.equal(ours[name], value), name
    assert not any("forward" in part.__dict__ for part in module.modules()), "nothing is left on the module"


def test_it_is_taken_back_after_a_failure():
    class Fails(Net):
        def on_train_start(self):
            assert "forward" in self.blocks[0].__dict__
            raise ValueError("stop here")

    module = Fails()
    with pytest.raises(ValueError, match="stop here"):
        trainer(max_epochs=1, activation_checkpointing=True).fit(module, BATCHES)
    assert "forward" not in module.blocks[0].__dict__


def test_what_selects_nothing_is_refused():
    class Single(Net):
        def __init__(self):
            super().__init__()
            self.blocks = Block().inner[0]

    with pytest.raises(ConfigurationError, match="selects no block"):
        trainer(max_epochs=1, activation_checkpointing=True).fit(Single(), BATCHES)
    with pytest.raises(StrategyError, match="did you mean 'Block'"):
        trainer(max_epochs=1, activation_checkpointing="Blok").fit(Net(), BATCHES)


@pytest.mark.slow
@pytest.mark.world_size(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_on_two_ranks(strategy):
    """Validation has one batch: with a list, a rank without one failed under FSDP."""
    options = {"devices": 2, "strategy": strategy, "accumulate_grad_batches": 2}
    _, weights = trained(**options)
    _, ours = trained(activation_checkpointing=True, **options)
    assert Block.calls >= 3 * 4 * 2, "three blocks, four micro-batches, twice"
    for name, value in weights.items():
        a, b = (t.full_tensor() if hasattr(t, "full_tensor") else t for t in (ours[name], value))
        assert torch.equal(a, b), name
