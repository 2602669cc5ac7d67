"""``Trainer(activation_checkpointing=...)``: the same bits with less memory, on several strategies."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

from tests.callbacks.fits import trainer
from trainer_kit import ContextPlan, ParallelPlan, TrainModule
from trainer_kit.core.errors import ConfigurationError, StrategyError
from trainer_kit.strategies import (
    MegatronStrategy,
    MeshStrategy,
    SingleDeviceStrategy,
    XLAStrategy,
)
from trainer_kit.strategies.transforms import blocks


class Block(nn.Module):
    calls = 0

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 8)
        )

    def forward(self, x):
        Block.calls += 1  # FSDP gives the instance a class of its own
        return x + self.inner(x)


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.blocks, self.head = (
            nn.Sequential(Block(), Block(), Block()),
            nn.Linear(8, 1),
        )

    def training_step(self, batch, batch_idx):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append(t.numel()) or t, lambda t: t
        ):
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


@pytest.mark.parametrize(
    "policy", [True, "Block", Block, lambda part: isinstance(part, Block)]
)
def test_it_trains_to_the_same_bits_with_less_memory(policy):
    plain, weights = trained()
    assert Block.calls == 3 * (8 + 2)
    module, ours = trained(activation_checkpointing=policy)
    assert Block.calls == 3 * (8 * 2 + 2), (
        "each block runs twice a step, and once in validation"
    )
    assert module.kept < 0.5 * plain.kept
    for name, value in weights.items():
        assert torch.equal(ours[name], value), name
    assert not any("forward" in part.__dict__ for part in module.modules()), (
        "nothing is left on the module"
    )


def test_it_is_taken_back_after_a_failure():
    class Fails(Net):
        def on_train_start(self):
            assert "forward" in self.blocks[0].__dict__
            raise ValueError("stop here")

    module = Fails()
    with pytest.raises(ValueError, match="stop here"):
        trainer(max_epochs=1, activation_checkpointing=True).fit(module, BATCHES)
    assert "forward" not in module.blocks[0].__dict__


def test_a_selection_without_modules_is_refused():
    class Single(Net):
        def __init__(self):
            super().__init__()
            self.blocks = Block().inner[0]

    with pytest.raises(ConfigurationError, match="matches no block"):
        trainer(max_epochs=1, activation_checkpointing=True).fit(Single(), BATCHES)
    with pytest.raises(StrategyError, match="did you mean 'Block'"):
        trainer(max_epochs=1, activation_checkpointing="Blok").fit(Net(), BATCHES)


def test_an_engine_without_checkpointing_is_refused_before_the_first_step():
    class Engine(SingleDeviceStrategy):
        why_not_recomputed = "the engine does that"

    with pytest.raises(ConfigurationError, match="the engine does that"):
        trained(strategy=Engine("cpu"), activation_checkpointing=True)
    assert "recompute_granularity" in MegatronStrategy.why_not_recomputed
    assert "torch_xla" in XLAStrategy.why_not_recomputed


class Sequences(Net):
    """Its batches have a sequence, which a context axis divides."""

    def __init__(self):
        super().__init__()
        self.blocks, self.head = (
            nn.Sequential(*(Rows() for _ in range(4))),
            nn.Linear(8, 1),
        )

    def training_step(self, batch, batch_idx):
        return self.head(self.blocks(batch)).pow(2).mean()

    def configure_parallel(self, mesh):
        tensor = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
        return ParallelPlan(tensor=tensor, context=ContextPlan(dims=1))


class Rows(nn.Module):
    calls = 0

    def __init__(self):
        super().__init__()
        self.up, self.drop, self.down = (
            nn.Linear(8, 32),
            nn.Dropout(0.3),
            nn.Linear(32, 8),
        )

    def forward(self, x):
        Rows.calls += 1
        heads = x[
            :, None
        ]  # attention sees the whole sequence, also when backward runs it again
        x = (
            x
            + nn.functional.scaled_dot_product_attention(
                heads, heads, heads, is_causal=True
            )[:, 0]
        )
        return x + self.down(self.drop(nn.functional.gelu(self.up(x))))


class Stages(Sequences):
    def __init__(self):
        super().__init__()
        del self.head

    def training_step(self, batch, batch_idx):
        return self.blocks(batch).pow(2).mean()


def whole(strategy, kind, **options):
    module, Rows.calls = kind(), 0
    made = trainer(
        max_epochs=1, strategy=strategy, accumulate_grad_batches=2, **options
    )
    torch.manual_seed(3)
    made.fit(
        module,
        list(torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(2))),
    )
    state = made.strategy.module_state(module)
    return {
        n: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone()
        for n, t in state.items()
    }, Rows.calls


def check_same_bits(devices, **strategies):
    for name, make in strategies.items():
        kind = Stages if name.startswith("pp") else Sequences
        plain, once = whole(make(), kind, devices=devices)
        ours, calls = whole(
            make(), kind, devices=devices, activation_checkpointing=True
        )
        assert calls >= 2 * once - 2, (
            name,
            once,
            calls,
        )  # a pipeline first runs its stage for the shapes
        assert all(torch.equal(ours[key], value) for key, value in plain.items()), name


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_the_same_bits_on_each_axis_of_a_mesh():
    check_same_bits(
        2,
        **{
            name: partial(MeshStrategy, dp_shard=1, **{name: 2})
            for name in ("tp", "pp", "cp")
        },
    )


@pytest.mark.long
@pytest.mark.world_size(2)
def test_the_same_bits_under_deepspeed():
    check_same_bits(
        2,
        **{
            f"stage_{stage}": partial(str, f"deepspeed_stage_{stage}")
            for stage in (1, 3)
        },
    )


@pytest.mark.long
@pytest.mark.world_size(4)
def test_the_same_bits_on_two_axes():
    check_same_bits(
        4,
        tp=partial(MeshStrategy, dp_shard=2, tp=2),
        pp=partial(MeshStrategy, dp_shard=2, pp=2),
    )


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
        a, b = (
            t.full_tensor() if hasattr(t, "full_tensor") else t
            for t in (ours[name], value)
        )
        assert torch.equal(a, b), name


def test_inputs_are_offloaded_until_backward(monkeypatch):
    """What goes to the host is the input of each block, and gradients are the same bits."""
    found = {}
    for offload in (False, True):
        packed = []

        class Host(save_on_cpu):
            def __init__(self, pin_memory, packed=packed):
                super().__init__(pin_memory=pin_memory)
                pack = self.pack_hook
                self.pack_hook = lambda tensor: (
                    packed.append(tuple(tensor.shape)) or pack(tensor)
                )

        monkeypatch.setattr(blocks, "save_on_cpu", Host)
        net = Net()
        blocks.ActivationCheckpointing("Block", offload).apply(net)
        torch.manual_seed(3)
        net.training_step(BATCHES[0], 0).backward()
        found[offload] = [parameter.grad for parameter in net.parameters()]
        assert packed == ([(6, 8)] * 3 if offload else [])
    assert all(map(torch.equal, found[False], found[True]))
