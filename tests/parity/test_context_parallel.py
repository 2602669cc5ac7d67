"""Sequences in parts train as whole ones do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import trainer_kit as tk
from tests.parity.language import (
    Counting,
    Speaker,
    assert_alike,
    make_language,
    make_texts,
)
from tests.parity.plain import case, train
from tests.parity.test_tensor_parallel import compare
from trainer_kit.core.errors import StrategyError
from trainer_kit.core.parallel import ContextPlan, ParallelPlan
from trainer_kit.strategies import MeshStrategy
from trainer_kit.strategies.transforms.context import (
    ContextParallel,
    has_ring,
    ring_attention,
)

pytestmark = pytest.mark.slow
PLAN = ParallelPlan(context=ContextPlan())


@pytest.mark.world_size(2, timeout=240)
def test_two_context_ranks() -> None:
    # Padded, so that parts weigh differently, and the later part of a batch may have no target at all.
    for heads in (4, 1):  # exchanged for tokens; too few for that
        with case(heads=heads):
            compare({"cp": 2}, {}, heads=heads)
    check_attention()
    check_which_attention_goes_around()
    check_torchs_own_comes_and_goes()
    check_equal_weights()
    check_texts_of_any_length_and_one_without_targets()
    check_positions()
    check_what_is_refused()


def check_attention() -> None:
    """Of any kind: outputs and gradients of this rank's part are those of the whole."""
    context, rank = ContextParallel(ContextPlan(dims=2)), dist.get_rank()
    context.apply(nn.Module(), init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))
    draw = torch.Generator().manual_seed(3)
    mask = torch.rand(6, 6, generator=draw) > 0.4
    mask |= torch.eye(6, dtype=torch.bool)
    for heads, keys, options in (
        (4, 4, {"is_causal": True}),
        (4, 2, {"is_causal": True, "enable_gqa": True}),
        (4, 1, {"enable_gqa": True, "scale": 0.3}),
        (3, 3, {"is_causal": True}),
        (2, 2, {"attn_mask": mask}),
    ):
        with case(heads=heads, keys=keys):
            shapes = [(2, heads, 6, 5), (2, keys, 6, 5), (2, keys, 6, 5)]
            # As projections hand them out: not contiguous.
            made = [
                torch.randn(b, t, h, w, generator=draw, dtype=torch.float64).transpose(
                    1, 2
                )
                for b, h, t, w in shapes
            ]
            whole = [tensor.clone().requires_grad_() for tensor in made]
            parts = [
                context.shard_batch(tensor).clone().requires_grad_() for tensor in made
            ]
            expected = F.scaled_dot_product_attention(*whole, **options)
            expected.pow(2).sum().backward()
            if "attn_mask" in options:
                options = {"attn_mask": mask[rank * 3 : rank * 3 + 3]}
            with context.attending():
                found = F.scaled_dot_product_attention(*parts, **options)
                found.pow(2).sum().backward()
            torch.testing.assert_close(found, context.shard_batch(expected))
            for own, one in zip(parts, whole, strict=True):
                torch.testing.assert_close(own.grad, context.shard_batch(one.grad))


class Around:
    """In place of torch's own, which CPUs lack: remembers what it was called with, and computes it."""

    def __init__(self, context: ContextParallel) -> None:
        self.context, self.calls = context, []

    @contextmanager
    def __call__(self, mesh: Any) -> Iterator[Any]:
        before = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = self.attend
        yield self.attend
        assert F.scaled_dot_product_attention == self.attend  # ours is gone by then
        F.scaled_dot_product_attention = before

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Tensor:
        self.calls.append({**options, "heads": (query.shape[1], key.shape[1])})
        mask = self.context._causal_mask(query, key) if options["is_causal"] else None
        keys, values = self.context._all_gather(key), self.context._all_gather(value)
        return torch.ops.aten.scaled_dot_product_attention(
            query, keys, values, mask, scale=options["scale"]
        )


def check_which_attention_goes_around() -> None:
    """What the device's own takes, but causal attention that heads can balance."""
    context, torchs = (
        ContextParallel(ContextPlan(dims=2)),
        F.scaled_dot_product_attention,
    )
    context.apply(nn.Module(), init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))
    assert context.ring is None
    assert has_ring("cuda")
    around = context.ring = Around(context)
    draw = torch.Generator().manual_seed(3)
    mask = torch.eye(6, dtype=torch.bool)
    for heads, keys, dtype, options, goes in (
        (4, 4, torch.float32, {}, {"is_causal": False, "scale": None, "heads": (4, 4)}),
        (
            4,
            2,
            torch.float32,
            {"enable_gqa": True, "scale": 0.3},
            {"is_causal": False, "scale": 0.3, "heads": (4, 4)},
        ),
        (
            3,
            3,
            torch.float32,
            {"is_causal": True},
            {"is_causal": True, "scale": None, "heads": (3, 3)},
        ),
        (4, 4, torch.float32, {"is_causal": True}, None),
        (4, 4, torch.float64, {}, None),
        (3, 3, torch.float32, {"attn_mask": mask}, None),
        (4, 4, torch.float32, {"dropout_p": 1e-9}, None),
    ):
        with case(heads=heads, keys=keys, dtype=dtype, options=options):
            around.calls.clear()
            whole = [
                torch.randn(2, h, 6, 4, generator=draw, dtype=dtype)
                for h in (heads, keys, keys)
            ]
            expected = torchs(*whole, **options)
            if "attn_mask" in options:
                options = {"attn_mask": context.part(mask, 0)}
            with context.attending():
                found = F.scaled_dot_product_attention(
                    *map(context.shard_batch, whole), **options
                )
            torch.testing.assert_close(found, context.shard_batch(expected))
            assert around.calls == ([] if goes is None else [goes])
            assert F.scaled_dot_product_attention is torchs


def check_torchs_own_comes_and_goes() -> None:
    from torch.distributed.tensor.experimental._attention import _cp_options

    torchs, before = F.scaled_dot_product_attention, _cp_options.enable_load_balance
    for _ in range(2):
        with ring_attention(
            init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        ) as attend:
            assert F.scaled_dot_product_attention is attend
            assert attend is not torchs
            assert not _cp_options.enable_load_balance  # tokens stay in their order
        assert F.scaled_dot_product_attention is torchs
        assert _cp_options.enable_load_balance is before


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.world_size(2, timeout=240, process_group=False)
def test_torchs_own_attention() -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl")
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    context = ContextParallel(ContextPlan(dims=2))
    context.apply(nn.Module(), init_device_mesh("cuda", (2,), mesh_dim_names=("cp",)))
    assert context.ring is ring_attention
    draw = torch.Generator().manual_seed(3)
    for heads, dtype, causal in product(
        (3, 4), (torch.float32, torch.bfloat16), (False, True)
    ):
        with case(heads=heads, dtype=dtype, causal=causal):
            made = [
                torch.randn(2, heads, 128, 64, generator=draw).to(device, dtype)
                for _ in range(3)
            ]
            whole = [tensor.clone().requires_grad_() for tensor in made]
            parts = [
                context.shard_batch(tensor).clone().requires_grad_() for tensor in made
            ]
            expected = F.scaled_dot_product_attention(*whole, is_causal=causal)
            expected.pow(2).sum().backward()
            with context.attending(checked=True):
                found = F.scaled_dot_product_attention(*parts, is_causal=causal)
                found.pow(2).sum().backward()
            near = (
                {"rtol": 2e-2, "atol": 2e-2}
                if dtype is torch.bfloat16
                else {"rtol": 1e-4, "atol": 1e-4}
            )
            torch.testing.assert_close(found, context.shard_batch(expected), **near)
            for own, one in zip(parts, whole, strict=True):
                torch.testing.assert_close(
                    own.grad, context.shard_batch(one.grad), **near
                )
    dist.destroy_process_group()


def pair(one: Speaker, mine: Speaker, batches: Any, **options: Any) -> None:
    """The same fit in this process alone and on both ranks."""
    train(one, batches, strategy="single_device", **options)
    train(mine, batches, strategy="cp", devices=2, **options)
    assert_alike(mine, one)


def check_equal_weights() -> None:
    """Without weights of the user's, parts weigh what they count; a mean of means is one, too."""
    for padded, options in product((False, True), ({}, {"loss_weighting": False})):
        with case(padded=padded, **options):
            batches = make_texts([4, 2, 3], padded=padded)
            if padded:
                batches[1][1][:, 1:] = -100
            pair(
                Speaker(make_language()),
                Speaker(make_language(seed=dist.get_rank()), PLAN),
                batches,
                **options,
            )


def check_texts_of_any_length_and_one_without_targets() -> None:
    batches = [
        batch
        for length in (8, 4, 6)
        for batch in make_texts([3], length, padded=True, seed=length)
    ]
    batches[1][1][:, 1:] = -100
    one, mine = Counting(make_language()), Counting(make_language(), PLAN)
    pair(one, mine, batches, accumulate_grad_batches=2)


class Placed(Speaker):
    """With an embedding of positions, which a part counts from its own first one."""

    def __init__(self, plan: Any = None) -> None:
        super().__init__(make_language(), plan)
        torch.manual_seed(5)
        self.places, self.part = nn.Embedding(8, 16).double(), 0

    def configure_parallel(self, mesh: Any) -> Any:
        self.part = mesh["cp"].get_local_rank()
        return super().configure_parallel(mesh)

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        length = batch[0].shape[1]
        at = torch.arange(self.part * length, (self.part + 1) * length)
        logits = self.net(batch[0]) + self.places(at)
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def check_positions() -> None:
    pair(Placed(), Placed(PLAN), make_texts([4, 4]))


def check_what_is_refused() -> None:
    class ByHand(Speaker):
        def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return self.net.lm_head(self.net.embed_tokens(batch[0])).pow(2).mean()

    for module, batches, told in (
        (
            Speaker(make_language(), PLAN),
            make_texts([4], 7),
            "length 7 in dimension 1, cp=2",
        ),
        (
            Speaker(make_language()),
            make_texts([4]),
            "Speaker does not declare the sequence dimension",
        ),
        (
            ByHand(make_language(), PLAN),
            make_texts([4]),
            "no call of scaled_dot_product_attention",
        ),
    ):
        before = module.net.lm_head.weight.detach().clone()
        with pytest.raises(StrategyError, match=told):
            train(module, batches, strategy="cp", devices=2)
        left = module.net.lm_head.weight
        assert torch.equal(
            left.full_tensor() if hasattr(left, "full_tensor") else left, before
        ), "not a step was made"


@pytest.mark.world_size(2, timeout=120)
def test_a_model_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 16,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}

    class Causal(tk.TrainModule):
        def __init__(self, tied: bool, plan: Any = None) -> None:
            super().__init__()
            torch.manual_seed(0)
            config = transformers.Qwen3Config(
                **sizes, **heads, tie_word_embeddings=tied
            )
            self.net, self.plan = transformers.Qwen3ForCausalLM(config).double(), plan

        def configure_parallel(self, mesh: Any) -> Any:
            return self.plan

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            return F.cross_entropy(
                self.net(**inputs).logits.flatten(0, 1), batch["labels"].flatten()
            )

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.3)

    class Asking(Causal):
        def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return batch["position_ids"]

    named = [
        {"input_ids": tokens, "labels": targets}
        for tokens, targets in make_texts([4, 4, 3])
    ]
    plan = ParallelPlan(context=ContextPlan(positions="position_ids"))
    for tied, word in ((False, "tp"), (True, "tp"), (False, "cp")):
        with case(tied=tied, word=word):
            one, mine = Causal(tied), Causal(tied, plan if word == "cp" else None)
            train(one, named, strategy="single_device")
            train(mine, named, strategy=word, devices=2)
            assert_alike(mine, one)
            for how in (
                ({"strategy": word}, {"strategy": MeshStrategy(cp=1)})
                if word == "cp"
                else ()
            ):
                asked = Asking(tied, plan)
                train_nothing = tk.Trainer(
                    accelerator="cpu", devices=2, barebones=True, **how
                )
                told = train_nothing.predict(asked, named[:2])
                assert [at.tolist() for at in told] == [[list(range(8))]] * len(told)
            if word == "tp":  # by the plan that the model brings
                assert mine.net.model.layers[
                    0
                ].self_attn.q_proj.weight.to_local().shape == (8, 16)
