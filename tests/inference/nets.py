"""Models with what makes offloading hard: shared weights, buffers of both kinds, layers that use others' weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Hard", "tokens"]


class Block(nn.Module):
    """Attention and a scale of its own, which `F.linear` uses with a weight of a layer that is not called."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.full((width,), 0.9))
        self.register_buffer("shift", torch.full((width,), 0.1))
        self.register_buffer("mask", torch.ones(width), persistent=False)

    def forward(self, x: Tensor, *, cache: dict[str, Tensor] | None = None) -> Tensor:
        h = (
            self.norm(x + self.attention(x, x, x, need_weights=False)[0]) * self.scale
            + self.shift * self.mask
        )
        if cache is not None:
            cache["h"] = h
        return h


class Lookup(nn.Module):
    """Uses its layer's weight without calling the layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dense.weight, self.dense.bias)


class Hard(nn.Module):
    """A small language model."""

    def __init__(self, width: int = 8, words: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.recurrent = nn.LSTM(width, width, batch_first=True)
        self.lookup = Lookup(width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(
        self, ids: Tensor, *, cache: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, cache=cache)
        x = self.lookup(self.recurrent(x)[0])
        return {
            "logits": self.head(self.norm(x.transpose(1, 2)).transpose(1, 2)),
            "x": x,
        }


def tokens() -> Tensor:
    return torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(1))
