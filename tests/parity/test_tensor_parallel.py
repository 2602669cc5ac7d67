"""Layers in parts train as whole ones do, alone and together with the other axes of a mesh."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.parity.language import Counting, Speaker, assert_alike, make_language, make_texts
from tests.parity.plain import case, train
from trainer_kit.core.errors import StrategyError
from trainer_kit.core.parallel import ContextPlan, ParallelPlan
from trainer_kit.strategies import MeshStrategy
from trainer_kit.testing.conformance import run_checks

pytestmark = pytest.mark.slow
LIMITS: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "max_epochs": 2}


def texts(count: int, seed: int = 1) -> list[Any]:
    """Padded, so that batches weigh differently."""
    ((tokens, targets),) = make_texts([count], padded=True, seed=seed)
    return list(zip(tokens, targets, strict=True))


def compare(axes: dict[str, int], flags: dict[str, bool], kind: type[Speaker] = Counting, **options: Any) -> None:
    """Training, evaluation and prediction on these ranks and in this process alone."""
    ranks = axes.get("dp_replicate", 1) * axes.get("dp_shard", 1)
    extra = ranks > 2  # no rank without a text
    plan = ParallelPlan(tensor="llama", context=ContextPlan(), **flags)
    one, mine = kind(make_language(**options)), kind(make_language(seed=dist.get_rank(), **options), plan)
    trainers, logged, predicted = [], [], []
    for module, size, how in (
        (one, 4, {"strategy": "single_device"}),
        (mine, 4 // ranks, {"strategy": MeshStrategy(**{"dp_shard": 1, **axes}), "devices": dist.get_world_size()}),
    ):
        train_data, val_data = (DataLoader(texts(*part), batch_size=size) for part in ((23 + extra, 1), (7 + extra, 2)))
        trainers.append(train(module, train_data, val_data, **LIMITS, **how))
        logged.append(dict(trainers[-1].callback_metrics))
        predicted.append(torch.cat(trainers[-1].predict(module, val_data)))
    assert_alike(mine, one)
    assert torch.cat([p.detach().flatten() for p in one.parameters()]).isfinite().all()
    alone, together = trainers
    for name in ("train_loss", "val_loss"):
        assert logged[1][name].item() == pytest.approx(logged[0][name].item(), abs=1e-9), name
    for name in ("step", "batch", "samples", "tokens"):
        assert getattr(together.progress, name) == getattr(alone.progress, name), name
    torch.testing.assert_close(predicted[1], predicted[0], rtol=0, atol=1e-10)


@pytest.mark.world_size(2, timeout=240)
def test_two_tensor_ranks() -> None:
    flags = ("sequence_parallel", "loss_parallel")
    for one, other in product([False, True], repeat=2):
        with case(sequence=one, loss=other):
            compare({"tp": 2}, dict(zip(flags, (one, other), strict=True)), tied=one == other, normed=one != other)
    compare({"tp": 2}, {}, Speaker)
    check_optimizers()
    check_dropout()
    check_a_forgotten_norm()


def check_optimizers() -> None:
    """Those that handle many parameters at once meet split and whole ones."""

    class Adam(Speaker):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, **self.options)

    def fit(plan: Any, **options: Any) -> Speaker:
        module = Adam(make_language(), plan)
        module.options = options
        how = {"strategy": "single_device"} if plan is None else {"strategy": "tp", "devices": 2}
        train(module, make_texts([4] * 4), gradient_clip_val=0.5, **how)
        return module

    for options in ({}, {"foreach": True}, {"fused": True}, {"foreach": False}):
        with case(**options):
            assert_alike(fit(ParallelPlan(tensor="llama"), **options), fit(None, **options))


def check_dropout() -> None:
    """Whole activations are dropped alike on ranks that started from other random numbers, or whole weights differ."""
    torch.manual_seed(100 + dist.get_rank())
    module = Speaker(make_language(dropout=0.5), ParallelPlan(tensor="llama"))
    torch.manual_seed(200 + dist.get_rank())
    trainer = train(module, make_texts([4] * 6), strategy="tp", devices=2)
    for name, parameter in module.named_parameters():
        if "norm" in name:
            theirs = trainer.strategy.world.all_gather(parameter.detach())
            assert torch.equal(theirs[0], theirs[1]), name


def check_a_forgotten_norm() -> None:
    """A whole parameter between split layers has another gradient on each rank: told before the first step."""
    net = make_language(normed=True)
    plan = {f"net.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"}
    module = Speaker(net, ParallelPlan(tensor={**plan, "net.layers.*.self_attn.o_proj": "rowwise"}))
    before = net.lm_head.weight.detach().clone()
    with pytest.raises(StrategyError, match=r"different gradients(.|\n)*q_norm(.|\n)*grad_allreduce"):
        train(module, make_texts([4] * 2), strategy="tp", devices=2)
    assert torch.equal(net.lm_head.weight, before)


SPLIT = {"*.blocks.*.up": "colwise", "*.blocks.*.down": "rowwise"}


def mesh(**axes: int) -> MeshStrategy:
    return MeshStrategy(**{"dp_shard": 1, **axes}, plan=ParallelPlan(tensor=SPLIT))


@pytest.mark.world_size(2, timeout=120)
def test_what_any_strategy_does() -> None:
    run_checks(partial(mesh, tp=2))


@pytest.mark.world_size(4, timeout=240)
def test_four_ranks() -> None:
    for axes, flags, options in (
        ({"dp_shard": 2, "tp": 2}, {"sequence_parallel": True, "loss_parallel": True}, {"tied": True}),
        ({"dp_replicate": 2, "tp": 2}, {}, {"normed": True}),
        ({"dp_shard": 2, "cp": 2}, {}, {}),
        ({"dp_replicate": 2, "cp": 2}, {}, {"heads": 1}),
        ({"cp": 2, "tp": 2}, {}, {}),
        ({"tp": 4}, {"sequence_parallel": True}, {}),
    ):
        with case(**axes):
            compare(axes, flags, **options)
    run_checks(partial(mesh, dp_shard=2, tp=2))


@pytest.mark.world_size(8, timeout=240)
def test_replicas_shards_and_tensor_ranks() -> None:
    compare({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, {"sequence_parallel": True})


@pytest.mark.world_size(2, timeout=120)
def test_a_model_of_hugging_face_brings_its_plan() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}

    class Causal(Speaker):
        def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            logits = self.net(input_ids=batch[0]).logits
            return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    def build(tied: bool) -> nn.Module:
        torch.manual_seed(0)
        config = transformers.Qwen3Config(**sizes, **heads, tie_word_embeddings=tied)
        return transformers.Qwen3ForCausalLM(config).double()

    for tied in (False, True):
        with case(tied=tied):
            one, mine = Causal(build(tied)), Causal(build(tied))
            train(one, make_texts([4, 4, 3]), strategy="single_device")
            train(mine, make_texts([4, 4, 3]), strategy="tp", devices=2)
            assert_alike(mine, one)
            assert mine.net.model.layers[0].self_attn.q_proj.weight.to_local().shape == (8, 16)
