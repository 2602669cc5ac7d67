"""What a mesh refuses before any step, and what plans become."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import trainer_kit as tk
from tests.parity.language import Speaker, make_language
from trainer_kit.core.errors import StrategyError
from trainer_kit.core.parallel import ContextPlan, ParallelPlan
from trainer_kit.strategies import MeshStrategy
from trainer_kit.strategies.mesh_layout import check_options
from trainer_kit.strategies.rank_sync import digest
from trainer_kit.strategies.state import step_by_kind
from trainer_kit.strategies.transforms.blocks import ActivationCheckpointing
from trainer_kit.strategies.transforms.context import ContextParallel
from trainer_kit.strategies.transforms.tensor import TensorParallel
from trainer_kit.testing import TinyModule


class Axis:
    """As much of a mesh's axis as is looked at before anything is split."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def split(module: nn.Module, plan: Any, size: int = 2, **flags: bool) -> None:
    TensorParallel(ParallelPlan(tensor=plan, **flags)).apply(module, Axis(size))  # type: ignore[arg-type]


def test_ranks_of_a_mesh_are_counted_before_anything_starts() -> None:
    assert MeshStrategy(tp=2).places(8) == {
        "pp": 1,
        "dp_replicate": 1,
        "dp_shard": 4,
        "cp": 1,
        "tp": 2,
    }
    assert MeshStrategy(dp_replicate=-1, dp_shard=1).places(3)["dp_replicate"] == 3
    with pytest.raises(StrategyError) as told:
        MeshStrategy(dp_shard=2, tp=2).places(8)
    assert str(told.value) == (
        "the mesh needs 4 ranks, but 8 processes were launched\n"
        "  found: dp_shard=2 × tp=2 in MeshStrategy(...)\n"
        "  fix:   launch 4 processes, or leave one axis at -1"
    )
    with pytest.raises(
        StrategyError, match=r"3 ranks or a multiple, but 8 (.|\n)*launch 9 processes$"
    ):
        MeshStrategy(tp=3).places(8)
    with pytest.raises(StrategyError, match="2 ranks, but 1 process was launched"):
        tk.Trainer(
            devices=1,
            accelerator="cpu",
            strategy=MeshStrategy(dp_shard=1, tp=2),
            barebones=True,
        )
    with pytest.raises(StrategyError, match="-1 for dp_shard, tp"):
        MeshStrategy(tp=-1)
    with pytest.raises(StrategyError, match="must be an integer ≥ 1\n  found: cp=0"):
        MeshStrategy(cp=0)


def test_options_of_the_data_axes_that_a_mesh_has_no_place_for() -> None:
    sizes = {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1}
    ignored, recomputed = (
        {"ignored_modules": "norm"},
        {"activation_checkpointing_policy": True},
    )
    check_options(sizes, {**ignored, **recomputed})
    check_options({**sizes, "tp": 2}, recomputed)
    for changed, options, told in (
        (
            {"tp": 2},
            ignored,
            "ignored_modules is not supported(.|\n)*dp_shard=2 × tp=2",
        ),
        ({"pp": 2}, ignored, "ignored_modules is not supported"),
        (
            {"pp": 2},
            recomputed,
            "give activation_checkpointing_policy to MeshStrategy itself",
        ),
        (
            {"dp_shard": 1, "tp": 2},
            {"cpu_offload": True},
            "fsdp with cpu_offload, tp=2",
        ),
    ):
        with pytest.raises(StrategyError, match=told):
            check_options({**sizes, **changed}, options)


def test_alone_a_mesh_is_a_device() -> None:
    for strategy in (MeshStrategy(), "tp", "tensor_parallel", "cp", "context_parallel"):
        trainer = tk.Trainer(
            devices=1, accelerator="cpu", strategy=strategy, barebones=True
        )
        assert trainer.strategy.name == "single_device"


class CountsCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(inputs).relu()


class Stacked(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(CountsCalls(), CountsCalls())

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.blocks(batch).sum()


@pytest.mark.world_size(1, process_group=False)
def test_alone_a_mesh_recomputes_activations() -> None:
    module = Stacked()
    strategy = MeshStrategy(dp_shard=1, activation_checkpointing_policy=True)
    trainer = tk.Trainer(
        max_steps=1, devices=1, accelerator="cpu", strategy=strategy, barebones=True
    )
    trainer.fit(module, [torch.randn(2, 32)])
    assert [block.calls for block in module.blocks] == [2, 2]


def test_plans_that_do_not_fit_the_module() -> None:
    net = make_language()
    for plan, told in (
        (
            {"layers.*.mlp.up": "colwise"},
            "'layers.*.mlp.up'\n  fix:   did you mean 'layers",
        ),
        ({"lm_head": "colwize"}, "'colwize'\n  fix:   did you mean 'colwise'?"),
        ({"lm_head": 3}, "found: 3\n  fix:   pass a name, or a ParallelStyle of torch"),
        ({"norm": "colwise"}, "found: norm is a RMSNorm"),
        ("lama", "did you mean 'llama'?"),
        ("mlp", "the preset 'mlp' matches no layer of this module"),
        (None, "Language has no plan for tensor parallelism"),
    ):
        with pytest.raises(StrategyError) as error:
            split(net, plan)
        assert told in str(error.value)
    with pytest.raises(
        StrategyError, match="does not support sequence or loss parallelism"
    ):
        split(net, "gpt", sequence_parallel=True)
    with pytest.raises(
        StrategyError,
        match=r"lm_head.out_features = 16, tp=3(.|\n)*use tp=2, or pad it to",
    ):
        split(net, {"lm_head": "colwise"}, 3)
    with pytest.raises(
        StrategyError,
        match=r"embed_tokens.num_embeddings = 16, tp=5\n  fix:   use tp=4, or pad",
    ):
        split(net, {"embed_tokens": "rowwise_rep"}, 5)
    with pytest.raises(
        StrategyError,
        match=r"all layers that share a parameter, or none(.|\n)*add 'embed_tokens' to the plan",
    ):
        split(make_language(tied=True), {"lm_head": "colwise_rep"})
    net.__dict__["config"] = type(
        "Config", (), {"num_attention_heads": 4, "num_key_value_heads": 2}
    )
    with pytest.raises(
        StrategyError, match="num_key_value_heads = 2, tp=4\n  fix:   use tp=2"
    ):
        split(net, "llama", 4)


def test_presets_find_layers_by_name() -> None:
    speaker = Speaker(make_language(normed=True))
    styles = TensorParallel(ParallelPlan(tensor="llama")).styles(speaker)
    assert len(styles) == 2 * 8 + 2
    assert "net.layers.1.self_attn.q_norm" in styles
    assert "net.norm" not in styles
    assert "net.norm" in TensorParallel(
        ParallelPlan(tensor="llama", sequence_parallel=True)
    ).styles(speaker)
    parts = [
        nn.Linear(4, 8),
        nn.ReLU(),
        nn.Linear(8, 4),
        nn.LayerNorm(4),
        nn.Linear(4, 8),
        nn.LayerNorm(8),
    ]
    styles = TensorParallel(ParallelPlan(tensor="mlp")).styles(
        nn.Sequential(*parts, nn.Linear(8, 1))
    )
    assert [(name, type(style).__name__) for name, style in styles.items()] == [
        ("0", "ColwiseParallel"),
        ("2", "RowwiseParallel"),
    ]


class Brought(nn.Module):
    """As Hugging Face's models bring their plans along: on the instance, whole; on parts of it once more."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.lm_head = make_language(), nn.Linear(8, 16)
        self._tp_plan = {
            "lm_head": "colwise_gather_output",
            "model.layers.*.mlp.up_proj": "colwise",
            "gone": "colwise",
        }
        self.model._tp_plan = {"layers.*.mlp.up_proj": "colwise"}


def test_a_model_brings_its_plan() -> None:
    module = nn.ModuleDict({"net": Brought()})
    names = list(TensorParallel(ParallelPlan()).styles(module))
    assert names == [
        "net.lm_head",
        "net.model.layers.0.mlp.up_proj",
        "net.model.layers.1.mlp.up_proj",
    ]


def context(size: int = 2, rank: int = 1, **options: Any) -> ContextParallel:
    made = ContextParallel(ContextPlan(**options), weighed=True)
    made.size, made.rank = size, rank
    return made


def test_a_rank_gets_its_part_of_a_sequence() -> None:
    tokens, weights = torch.arange(12).reshape(2, 6), torch.ones(2)
    pair = context().shard_batch((tokens, weights))
    assert pair[0].tolist() == [[3, 4, 5], [9, 10, 11]]
    assert pair[1] is weights
    named = context(dims={"ids": 1}, positions="at").shard_batch(
        {"ids": tokens, "features": tokens}
    )
    assert {name: value.tolist() for name, value in named.items()} == {
        "ids": pair[0].tolist(),
        "features": tokens.tolist(),
        "at": [[3, 4, 5]],
    }
    given = UserDict(ids=tokens)  # as a tokenizer's batch
    assert type(context(dims={"ids": 1}, positions="at").shard_batch(given)) is UserDict
    assert list(given) == ["ids"]
    assert given["ids"] is tokens
    given = {"ids": tokens, "at": tokens}
    assert context(positions="at").shard_batch(given)["at"].tolist() == pair[0].tolist()
    assert context(dims={1: 0}).shard_batch([tokens, torch.arange(4)])[1].tolist() == [
        2,
        3,
    ]
    with pytest.raises(
        StrategyError,
        match="length 6 in dimension 1, cp=4\n  fix:   pad sequences to a multiple of 4",
    ):
        context(4).shard_batch((tokens, weights))


def test_all_attention_has_to_be_seen() -> None:
    own, torchs = context(), F.scaled_dot_product_attention
    x = torch.randn(1, 1, 2, 2)
    for attend, told in (
        (lambda: torchs(x, x, x), "under another name"),
        (lambda: None, "no call of scaled_dot_product_attention"),
    ):
        with pytest.raises(StrategyError, match=told), own.attending(checked=True):
            attend()
        assert F.scaled_dot_product_attention is torchs
    with own.attending():
        pass  # only a first step is looked at
    told = r"cover all keys(.|\n)*\(2, 2\) for 2 keys on each of 2 ranks"
    with pytest.raises(StrategyError, match=told), own.attending():
        F.scaled_dot_product_attention(
            x, x, x, attn_mask=torch.ones(2, 2, dtype=torch.bool)
        )


def test_the_mean_over_no_targets_is_zero() -> None:
    logits = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    none, some = torch.full((4,), -100), torch.tensor([0, -100, 2, 1])
    weight = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    for options in (
        {},
        {"weight": weight},
        {"label_smoothing": 0.1},
        {"reduction": "sum"},
        {"reduction": "none"},
    ):
        expected = F.cross_entropy(logits, some, **options)
        with context().attending():
            torch.testing.assert_close(
                F.cross_entropy(logits, some, **options), expected
            )
            F.cross_entropy(logits, none, **options).sum().backward()
        assert logits.grad is not None
        assert logits.grad.abs().sum() == 0


def test_an_optimizer_of_one_kind_is_stepped_as_it_is() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), foreach=True)
    step = optimizer.step
    assert step_by_kind(optimizer, step) is step


def test_processes_that_draw_alike_find_it_out_by_one_number() -> None:
    state: dict[str, Any] = {
        "python": (3, (1, 2, 3), None),
        "numpy": ("MT19937", np.arange(4, dtype=np.uint32), 4, 0, 0.0),
        "torch": torch.arange(4, dtype=torch.uint8),
    }
    assert digest(state) == 3815203509, (
        "another number in another process: whole states would be sent in every step"
    )
    assert (
        len(
            {
                digest({**state, "python": (3, (1, 2, 3), gauss)})
                for gauss in (None, 0.0, 0.5)
            }
        )
        == 3
    )


def test_a_transform_changes_only_the_methods_it_overrides() -> None:
    """The defaults of the contract: `ActivationCheckpointing` divides no batch and wraps no step."""
    transform, net = (
        ActivationCheckpointing(),
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)),
    )
    transform.apply(net)
    assert "forward" in net[0].__dict__
    batch = [torch.ones(2)]
    assert transform.shard_batch(batch) is batch
    assert not transform.divides_batch
    assert transform.bind(net.forward) == net.forward
    assert transform.bind_evaluation(net.forward, False) == net.forward
    with transform.computing(first=True):
        pass
    transform.undo(net)
    assert "forward" not in net[0].__dict__
