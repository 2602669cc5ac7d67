"""Layers in parts train as whole ones do, alone and together with the other axes of a mesh."""

from __future__ import annotations

import random
import shutil
import tempfile
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import trainer_kit as tk
from tests.parity.language import (
    Counting,
    Speaker,
    assert_alike,
    make_language,
    make_texts,
)
from tests.parity.plain import case, train
from trainer_kit.checkpoint.read import read_checkpoint
from trainer_kit.core.errors import CheckpointError, RankError, StrategyError
from trainer_kit.core.parallel import ContextPlan, ParallelPlan
from trainer_kit.strategies import FSDPStrategy, MeshStrategy

pytestmark = pytest.mark.slow
LIMITS: dict[str, Any] = {
    "accumulate_grad_batches": 2,
    "gradient_clip_val": 0.5,
    "max_epochs": 2,
}


def texts(count: int, seed: int = 1) -> list[Any]:
    """Padded, so that batches weigh differently."""
    ((tokens, targets),) = make_texts([count], padded=True, seed=seed)
    return list(zip(tokens, targets, strict=True))


def compare(
    axes: dict[str, int],
    flags: dict[str, bool],
    kind: type[Speaker] = Counting,
    **options: Any,
) -> None:
    """Training, evaluation and prediction on these ranks and in this process alone.

    Of the last batches, in training and in evaluation, some data ranks have nothing.
    """
    ranks = axes.get("dp_replicate", 1) * axes.get("dp_shard", 1)
    plan = ParallelPlan(tensor="llama", context=ContextPlan(), **flags)
    one, mine = (
        kind(make_language(**options)),
        kind(make_language(seed=dist.get_rank(), **options), plan),
    )
    trainers, logged, predicted = [], [], []
    for module, size, how in (
        (one, 4, {"strategy": "single_device"}),
        (
            mine,
            4 // ranks,
            {
                "strategy": MeshStrategy(**{"dp_shard": 1, **axes}),
                "devices": dist.get_world_size(),
            },
        ),
    ):
        train_data, val_data = (
            DataLoader(texts(*part), batch_size=size) for part in ((22, 1), (6, 2))
        )
        trainers.append(train(module, train_data, val_data, **LIMITS, **how))
        logged.append(dict(trainers[-1].callback_metrics))
        outputs = trainers[-1].predict(module, val_data)
        assert {type(output) for output in outputs} == {
            Tensor
        }  # no collective is under way
        predicted.append(torch.cat(outputs))
    assert_alike(mine, one)
    assert torch.cat([p.detach().flatten() for p in one.parameters()]).isfinite().all()
    alone, together = trainers
    for name in ("train_loss", "val_loss"):
        assert logged[1][name].item() == pytest.approx(
            logged[0][name].item(), abs=1e-9
        ), name
    for name in ("step", "batch", "samples", "tokens"):
        assert getattr(together.progress, name) == getattr(alone.progress, name), name
    torch.testing.assert_close(predicted[1], predicted[0], rtol=0, atol=1e-10)


@pytest.mark.world_size(2, timeout=240)
def test_two_tensor_ranks() -> None:
    flags = ("sequence_parallel", "loss_parallel")
    for one, other in product([False, True], repeat=2):
        with case(sequence=one, loss=other):
            compare(
                {"tp": 2},
                dict(zip(flags, (one, other), strict=True)),
                tied=one == other,
                normed=one != other,
            )
    compare({"tp": 2}, {}, Speaker)
    check_optimizers()
    check_dropout()
    check_a_forgotten_norm()
    check_that_resumes_draw_the_same()
    check_metric_objects()
    check_presets()
    check_half_precision()
    check_that_activations_are_kept_again()
    check_what_is_refused()
    check_that_states_fail_together()


def check_optimizers() -> None:
    """Those that handle many parameters at once meet split and whole ones."""

    class Adam(Speaker):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, **self.options)

    def fit(plan: Any, **options: Any) -> Speaker:
        module = Adam(make_language(), plan)
        module.options = options
        how = (
            {"strategy": "single_device"}
            if plan is None
            else {"strategy": "tp", "devices": 2}
        )
        train(module, make_texts([4] * 4), gradient_clip_val=0.5, **how)
        return module

    for options in ({}, {"foreach": True}, {"fused": True}, {"foreach": False}):
        # On an accelerator torch itself chooses foreach.
        with (
            case(**options),
            mock.patch(
                "torch.optim.optimizer._get_foreach_kernels_supported_devices",
                return_value=["cpu"],
            ),
        ):
            assert_alike(
                fit(ParallelPlan(tensor="llama"), **options), fit(None, **options)
            )


def check_dropout() -> None:
    """Whole activations are dropped alike on ranks that started from other random numbers, or whole weights differ."""

    class DrawsOnOne(Speaker):
        def on_train_epoch_end(self) -> None:
            if dist.get_rank() == 0:
                torch.rand(())

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if dist.get_rank() == 0 and batch_idx in (2, 3):
                random.random(), torch.rand(())

    torch.manual_seed(100 + dist.get_rank())
    module = DrawsOnOne(make_language(dropout=0.5), ParallelPlan(tensor="llama"))
    torch.manual_seed(200 + dist.get_rank())
    trainer = train(module, make_texts([4] * 6), strategy="tp", devices=2, max_epochs=2)
    for name, parameter in module.named_parameters():
        if "norm" in name:
            theirs = trainer.strategy.world.all_gather(parameter.detach())
            assert torch.equal(theirs[0], theirs[1]), name


def check_a_forgotten_norm() -> None:
    """A whole parameter between split layers has another gradient on each rank: told before the first step."""
    net = make_language(normed=True)
    plan = {f"net.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"}
    module = Speaker(
        net, ParallelPlan(tensor={**plan, "net.layers.*.self_attn.o_proj": "rowwise"})
    )
    before = net.lm_head.weight.detach().clone()
    with pytest.raises(
        StrategyError, match=r"different gradients(.|\n)*q_norm(.|\n)*grad_allreduce"
    ):
        train(module, make_texts([4] * 2), strategy="tp", devices=2)
    assert torch.equal(net.lm_head.weight, before)


def check_that_resumes_draw_the_same() -> None:
    def fit(steps: int, path: str | None = None) -> tuple[Any, Speaker]:
        torch.manual_seed(3 + steps)  # what is drawn after a resume is the checkpoint's
        module = Speaker(make_language(dropout=0.3), ParallelPlan(tensor="llama"))
        trainer = tk.Trainer(
            strategy="tp",
            devices=2,
            accelerator="cpu",
            barebones=True,
            max_epochs=1,
            max_steps=steps,
            seed=0,
        )
        torch.manual_seed(9)
        trainer.fit(module, make_texts([4] * 6), ckpt_path=path)
        return trainer, module

    box = [tempfile.mkdtemp()]
    dist.broadcast_object_list(box, 0)
    fit(3)[0].save_checkpoint(f"{box[0]}/three")
    whole, resumed = fit(6)[1], fit(6, f"{box[0]}/three")[1]
    assert_alike(resumed, whole, 0.0)
    dist.barrier()
    shutil.rmtree(box[0], ignore_errors=True)


class Heads(nn.Module):
    """Attention as GPT's code has it: one projection for all three, or one each."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.c_proj = nn.Linear(8, 8)
        if fused:
            self.c_attn = nn.Linear(8, 24)
        else:
            self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        parts = (
            self.c_attn(x).split(8, -1)
            if hasattr(self, "c_attn")
            else (self.q(x), self.k(x), self.v(x))
        )
        q, k, v = (part.unflatten(-1, (-1, 2)).transpose(1, 2) for part in parts)
        return self.c_proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


def gpt(fused: bool) -> nn.Module:
    block = nn.ModuleDict(
        {
            "ln_1": nn.LayerNorm(8),
            "attn": Heads(fused),
            "ln_2": nn.LayerNorm(8),
            "mlp": Deep(),
        }
    )
    parts = {
        "wte": nn.Embedding(16, 8),
        "h": nn.ModuleList([block]),
        "lm_head": nn.Linear(8, 16, bias=False),
    }
    return nn.ModuleDict(parts)


class Generator(Speaker):
    def _loss(self, batch: Any) -> Tensor:
        x = self.net["wte"](batch[0])
        for block in self.net["h"]:
            x = x + block["attn"](block["ln_1"](x))
            x = x + block["mlp"](block["ln_2"](x))
        return F.cross_entropy(self.net["lm_head"](x).flatten(0, 1), batch[1].flatten())


class Regression(Speaker):
    def _loss(self, batch: Any) -> Tensor:
        return self.net(batch[0].double()).pow(2).mean()


def perceptron() -> nn.Module:
    hidden = [
        nn.Linear(8, 16),
        nn.ReLU(),
        nn.Linear(16, 8),
        nn.LayerNorm(8),
        nn.Linear(8, 4),
        nn.Tanh(),
    ]
    return nn.Sequential(*hidden, nn.Linear(4, 6), nn.Linear(6, 1))


def check_presets() -> None:
    for preset, kind, make, split in (
        ("gpt", Generator, partial(gpt, True), 6),
        ("gpt", Generator, partial(gpt, False), 8),
        ("mlp", Regression, perceptron, 4),
    ):
        with case(preset=preset, split=split):
            modules = []
            for plan, how in (
                (None, {"strategy": "single_device"}),
                (ParallelPlan(tensor=preset), {"strategy": "tp", "devices": 2}),
            ):
                torch.manual_seed(0)
                modules.append(kind(make().double(), plan, lr=0.05))
                train(modules[-1], make_texts([4, 4, 3]), **how)
            assert_alike(*modules)
            weights = [
                p
                for name, p in modules[1].named_parameters()
                if name.endswith("weight")
            ]
            assert sum(hasattr(weight, "placements") for weight in weights) == split


def check_metric_objects() -> None:
    """What both ranks of a batch count is counted once."""
    torchmetrics = pytest.importorskip("torchmetrics")

    class Counts(Speaker):
        def __init__(self, net: nn.Module, plan: Any = None) -> None:
            super().__init__(net, plan)
            self.seen = torchmetrics.SumMetric()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.seen.update(batch[0].numel())
            self.log("seen", self.seen)

    module = Counts(make_language(), ParallelPlan(tensor="llama"))
    trainer = train(
        module, make_texts([4]), make_texts([4, 3]), strategy="tp", devices=2
    )
    assert trainer.callback_metrics["seen"] == 7 * 8


def check_that_activations_are_kept_again() -> None:
    module = Speaker(make_language(), ParallelPlan(tensor="llama"))
    calls = []
    module.net.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    for policy, expected in (("Block", 4), (False, 2)):
        calls.clear()
        strategy = MeshStrategy(
            dp_shard=1, tp=2, activation_checkpointing_policy=policy
        )
        train(module, make_texts([4] * 2), strategy=strategy, devices=2)
        assert len(calls) == expected, policy


class Unlucky(Speaker):
    """Its state is there on the first rank only."""

    unlucky = "nothing"

    def __init__(self, net: nn.Module, plan: Any = None) -> None:
        super().__init__(net, plan)
        self.register_buffer("rank", torch.tensor(0))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.buffers = checkpoint.get("buffers")

    def state_dict(self, *args: Any, **options: Any) -> Any:
        self._perhaps("saving")
        return super().state_dict(*args, **options)

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        self._perhaps("loading")
        return super().load_state_dict(*args, **options)

    def _perhaps(self, what: str) -> None:
        if self.unlucky == what and dist.get_rank() == 1:
            raise ValueError(what)


def check_that_states_fail_together() -> None:
    """Or the other rank would wait for this one in its next exchange."""
    box = [tempfile.mkdtemp()]
    dist.broadcast_object_list(box, 0)
    mine = ValueError if dist.get_rank() == 1 else RankError
    module = Unlucky(make_language(), ParallelPlan(tensor="llama"))
    trainer = train(module, make_texts([4] * 2), strategy="tp", devices=2)
    module.unlucky = "saving"
    with pytest.raises(mine, match="saving"):
        trainer.save_checkpoint(f"{box[0]}/one")
    module.unlucky = "nothing"
    module.rank.fill_(dist.get_rank())
    trainer.save_checkpoint(f"{box[0]}/one")
    assert (module.buffers is None) == (
        dist.get_rank() == 1
    )  # who writes them has them
    assert read_checkpoint(f"{box[0]}/one")["buffers"][1]["rank"] == 1
    module.unlucky = "loading"
    again = tk.Trainer(
        strategy="tp", devices=2, accelerator="cpu", barebones=True, max_steps=4
    )
    with pytest.raises(CheckpointError, match="loading"):
        again.fit(module, make_texts([4] * 2), ckpt_path=f"{box[0]}/one")
    dist.barrier()
    shutil.rmtree(box[0], ignore_errors=True)


def check_what_is_refused() -> None:
    """Options for the data axes that would do nothing, or leave ranks with other weights."""
    for axes, options, told in (
        ({"tp": 2}, {"cpu_offload": True}, "more than one rank on"),
        (
            {"tp": 2, "dp_shard": 1},
            {"ignored_modules": "norm"},
            "more than one rank on",
        ),
    ):
        strategy = MeshStrategy(**axes, fsdp=options)
        with pytest.raises(StrategyError, match=told):
            train(
                Speaker(make_language(), ParallelPlan(tensor="llama")),
                make_texts([4]),
                strategy=strategy,
                devices=2,
            )


class Overflows(Speaker):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (
            float("inf") if batch_idx == 2 else 1.0
        )


def check_half_precision() -> None:
    """The scaler meets gradients that are whole, and others in parts; a step that overflows is nobody's."""
    for precision, kind, sequence in (
        ("16-mixed", Overflows, False),
        ("16-mixed", Overflows, True),
        ("bf16-mixed", Speaker, False),
    ):
        with case(precision=precision, sequence=sequence):
            one, mine = kind(make_language().float()), kind(make_language().float())
            mine.plan = ParallelPlan(
                tensor="llama", sequence_parallel=sequence, loss_parallel=sequence
            )
            train(
                one, make_texts([4] * 6), precision=precision, strategy="single_device"
            )
            train(
                mine, make_texts([4] * 6), precision=precision, strategy="tp", devices=2
            )
            assert_alike(mine, one, 2e-3)


@pytest.mark.world_size(4, timeout=240)
def test_four_ranks() -> None:
    for axes, flags, options in (
        (
            {"dp_shard": 2, "tp": 2},
            {"sequence_parallel": True, "loss_parallel": True},
            {"tied": True},
        ),
        ({"dp_replicate": 2, "tp": 2}, {}, {"normed": True}),
        ({"dp_shard": 2, "cp": 2}, {}, {}),
        ({"dp_replicate": 2, "cp": 2}, {}, {"heads": 1}),
        ({"cp": 2, "tp": 2}, {}, {}),
        ({"tp": 4}, {"sequence_parallel": True}, {}),
    ):
        with case(**axes):
            compare(axes, flags, **options)
    check_that_groups_are_made_once()


def check_that_groups_are_made_once() -> None:
    """Each is threads and sockets until its process ends."""
    world = dist.distributed_c10d._world
    for make in (
        lambda: MeshStrategy(dp_replicate=2, dp_shard=1, cp=2),
        lambda: MeshStrategy(pp=2, tp=2),
        lambda: FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2)),
    ):
        make().start()
        before = len(world.pg_map)
        make().start()
        assert len(world.pg_map) == before


@pytest.mark.world_size(8, timeout=240)
def test_replicas_shards_and_tensor_ranks() -> None:
    compare({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, {"sequence_parallel": True})
    check_what_a_mesh_says_of_itself()


def check_what_a_mesh_says_of_itself() -> None:
    told: list[str] = []

    class Told(Speaker):
        def on_train_start(self) -> None:
            told.append(self.trainer.strategy.describe())

    strategy = MeshStrategy(dp_shard=4, tp=2)
    train(
        Told(make_language(), ParallelPlan(tensor="llama")),
        make_texts([4] * 4),
        strategy=strategy,
        devices=8,
    )
    places = "the same batches on ranks 0 1, 2 3, 4 5, 6 7"
    assert told == [
        f"mesh dp_shard=4 × tp=2 on cpu; {places}; this rank holds 218 of 1,672 parameters"
    ], told
