"""A small language model and its batches, for what splits layers or sequences; float64: sums are reordered."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trainer_kit as tk

WORDS, WIDTH = 16, 8


class Attention(nn.Module):
    def __init__(self, normed: bool, heads: int) -> None:
        super().__init__()
        self.width = WIDTH // heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.q_norm = nn.RMSNorm(self.width) if normed else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, -1, self.width).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
        )
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, normed: bool, heads: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(WIDTH),
            nn.LayerNorm(WIDTH),
        )
        self.self_attn, self.mlp = Attention(normed, heads), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Language(nn.Module):
    """Layers named as in Llama's code; the head shares the embedding's weight where it is tied."""

    def __init__(
        self,
        tied: bool = False,
        normed: bool = False,
        dropout: float = 0.0,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(WORDS, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.ModuleList([Block(normed, heads) for _ in range(2)])
        self.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embed_tokens(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def make_language(seed: int = 0, **options: Any) -> Language:
    torch.manual_seed(seed)
    return Language(**options).double()


def make_texts(
    sizes: list[int], length: int = 8, padded: bool = False, seed: int = 1
) -> list[tuple[Tensor, Tensor]]:
    """Batches of tokens and the tokens that follow; where padded, -100 stands behind the end of each text."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for size in sizes:
        text = torch.randint(WORDS, (size, length + 1), generator=draw)
        targets = text[:, 1:].clone()
        if padded:
            ends = torch.randint(1, length + 1, (size, 1), generator=draw)
            targets[torch.arange(length) >= ends] = -100
        made.append((text[:, :-1].contiguous(), targets))
    return made


class Speaker(tk.TrainModule):
    """The language model, its loss a mean over tokens that count; ``plan`` is what ``configure_parallel`` returns."""

    def __init__(
        self, net: nn.Module, plan: Any = None, lr: float = 0.3, **options: Any
    ) -> None:
        super().__init__()
        self.net, self.plan, self.options = (
            net,
            plan,
            {"lr": lr, "momentum": 0.9, **options},
        )

    def configure_parallel(self, mesh: Any) -> Any:
        return self.plan

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(self.net(tokens).flatten(0, 1), targets.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), **self.options)


class Counting(Speaker):
    """A batch weighs its tokens that count."""

    def loss_weight(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (batch[1] != -100).sum()


def whole(module: nn.Module) -> dict[str, Tensor]:
    """Every value of a module's state, put together; every rank calls it."""
    state = module.state_dict()
    return {
        name: (v.full_tensor() if hasattr(v, "full_tensor") else v).detach()
        for name, v in state.items()
    }


def assert_alike(one: nn.Module, other: nn.Module, tolerance: float = 1e-10) -> None:
    mine, theirs = whole(one), whole(other)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(
            value,
            theirs[name],
            rtol=0,
            atol=tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )
