"""What is pruned, that it stays zero, and that training equals torch's own pruning and goes on after a resume."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from tests.callbacks.fits import trainer
from trainer_kit import TrainModule
from trainer_kit.callbacks import Callback, ModelCheckpoint, ModelPruning
from trainer_kit.core.errors import ConfigurationError

BATCHES = list(torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(4)))


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 5))

    def training_step(self, batch, batch_idx):
        return (self.net(batch) - 1).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)

    @property
    def weights(self):
        return self.net[0].weight, self.net[2].weight

    @property
    def zeros(self):
        return sum(int((w == 0).sum()) for w in self.weights)


class Zeros(Callback):
    order = "late"

    def __init__(self):
        self.seen = []

    def on_train_step_end(self, trainer, module):
        self.seen.append(module.zeros)


def fitted(*callbacks, epochs=3, ckpt_path=None, **options):
    module = Net()
    made = trainer(*callbacks, max_epochs=epochs, **options)
    torch.manual_seed(5)
    made.fit(module, BATCHES, ckpt_path=ckpt_path)
    return module


def test_it_trains_as_with_torchs_own_hooks():
    pruning = ModelPruning(
        "l1_unstructured", amount=0.5, use_lottery_ticket_hypothesis=False
    )
    module = fitted(pruning, zeros := Zeros(), gradient_clip_val=0.1)
    plain = Net()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.02)
    for _ in range(3):
        for batch in BATCHES:
            optimizer.zero_grad()
            plain.training_step(batch, 0).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            optimizer.step()
        plain.net(
            BATCHES[0]
        )  # torch's hooks renew the masked weights, which it compares, in a forward
        prune.global_unstructured(
            [(plain.net[0], "weight"), (plain.net[2], "weight")],
            prune.L1Unstructured,
            amount=0.5,
        )
    for ours, theirs in zip(module.weights, plain.weights, strict=True):
        torch.testing.assert_close(ours, theirs)
    total = 110
    assert zeros.seen == [0] * 4 + [total // 2] * 4 + [total // 2 + 28] * 4
    assert pruning.sparsity == pytest.approx(module.zeros / total)
    assert set(module.state_dict()) == {
        f"net.{i}.{n}" for i in (0, 2) for n in ("weight", "bias")
    }


def test_weights_go_back_to_their_first_values():
    module = fitted(ModelPruning("l1_unstructured", amount=10), epochs=1)
    first = Net()
    for ours, before in zip(module.weights, first.weights, strict=True):
        kept = ours != 0
        assert torch.equal(ours[kept], before[kept])
    assert module.zeros == 10


@pytest.mark.parametrize(
    ("fn", "norm"), [("ln_structured", 1), ("random_structured", None)]
)
def test_whole_slices(fn, norm):
    options = {
        "pruning_dim": 0,
        "pruning_norm": norm,
        "amount": 2,
        "use_lottery_ticket_hypothesis": False,
    }
    module = fitted(ModelPruning(fn, parameter_names=["weight"], **options), epochs=2)
    for weight in module.weights:
        assert int((weight == 0).all(1).sum()) == 4


def test_functions_of_the_epoch_and_chosen_parameters():
    module = Net()
    pruning = ModelPruning(
        "random_unstructured",
        parameters_to_prune=[(module.net[2], "weight")],
        use_global_unstructured=False,
        amount=lambda epoch: 3 + epoch,
        apply_pruning=lambda epoch: epoch != 1,
        use_lottery_ticket_hypothesis=lambda epoch: False,
        verbose=True,
    )
    made = trainer(pruning, max_epochs=3)
    made.fit(module, BATCHES)
    assert int((module.net[0].weight == 0).sum()) == 0
    assert int((module.net[2].weight == 0).sum()) == 3 + 5
    assert made.printed == [
        f"pruned {n / 50:.1%} of 1 parameter after epoch {e}"
        for e, n in ((0, 3), (2, 8))
    ]


@pytest.mark.filterwarnings("ignore:ModelCheckpoint now writes to")
def test_a_resumed_run_is_the_same(tmp_path):
    def run(path, ckpt_path=None):
        keeper = ModelCheckpoint(path, every_n_train_steps=1, save_top_k=-1)
        return fitted(
            ModelPruning("random_unstructured", amount=0.3), keeper, ckpt_path=ckpt_path
        )

    whole = run(tmp_path / "whole")
    for step in (3, 4, 5, 9):
        again = run(tmp_path / f"from-{step}", tmp_path / "whole" / f"step-{step:08d}")
        for ours, theirs in zip(again.parameters(), whole.parameters(), strict=True):
            assert torch.equal(ours, theirs), step


def test_mistakes_are_refused():
    with pytest.raises(ConfigurationError, match="did you mean 'l1_unstructured'"):
        ModelPruning("l1_unstructured_")
    with pytest.raises(ConfigurationError, match="pruning_dim=None"):
        ModelPruning("ln_structured", pruning_norm=2)
    with pytest.raises(ConfigurationError, match="no parameter called kernel"):
        fitted(ModelPruning("l1_unstructured", parameter_names=["kernel"]))


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_ranks_have_the_same_masks():
    callback = ModelPruning("random_unstructured", amount=0.5)
    module = fitted(callback, zeros := Zeros(), devices=2, strategy="ddp")
    for weight in module.weights:
        both = [torch.empty_like(weight) for _ in range(2)]
        torch.distributed.all_gather(both, weight.detach())
        assert torch.equal(*both)
    assert zeros.seen[-1] == 55 + 28
    with pytest.raises(ConfigurationError, match="shards or copies them"):
        fitted(ModelPruning("l1_unstructured"), devices=2, strategy="fsdp")
