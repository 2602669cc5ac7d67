"""A model of blocks, and a module around it that says how it may be split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trainer_kit as tk
from trainer_kit.core.parallel import ParallelPlan, PipelinePlan
from trainer_kit.strategies import MeshStrategy

WORDS, LENGTH = 11, 6


class Block(nn.Module):
    """Takes more than the hidden state, and returns more."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, None]:
        return x + self.down(torch.tanh(self.up(x))) * scale, None


class Rotations(nn.Module):
    """Nothing to train, nothing to save: a table."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "table",
            torch.linspace(0.5, 1.0, LENGTH).double()[:, None],
            persistent=False,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.table[: x.shape[1]].to(x.dtype)  # type: ignore[no-any-return]


class Words(nn.Module):
    """An embedding, blocks, a norm and a head, as language models have them."""

    def __init__(self, blocks: int = 8, width: int = 8, tied: str = "") -> None:
        super().__init__()
        self.rotations = Rotations()
        self.embedding = nn.Embedding(WORDS, width)
        self.positions = nn.Parameter(torch.randn(LENGTH, width))
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS)
        if "ends" in tied:
            self.head.weight = self.embedding.weight
        if "blocks" in tied:  # which one stage has
            self.layers[-1].up.weight = self.layers[-2].up.weight

    def forward(self, words: Tensor, *, half: bool = False) -> dict[str, Tensor]:
        x = self.embedding(words)
        scale = self.rotations(x)
        x = x + self.positions[: words.shape[1]]
        for layer in self.layers:
            x = layer(x, scale)[0]
        return {"logits": self.head(self.norm(x)), "scale": scale}


class Writer(tk.TrainModule):
    """Predicts the next word."""

    def __init__(
        self,
        net: nn.Module | None = None,
        plan: PipelinePlan | None = None,
        lr: float = 0.1,
    ) -> None:
        super().__init__()
        self.net, self.plan, self.lr = net or words(), plan, lr
        self.heard: list[Any] = []

    def configure_parallel(self, mesh: Any) -> ParallelPlan | None:
        return ParallelPlan(
            pipeline=self.plan,
            tensor={"net.layers.*.up": "colwise", "net.layers.*.down": "rowwise"},
        )

    def loss(self, batch: Tensor) -> Tensor:
        logits = self.net(batch)["logits"]
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("before", float(batch_idx), on_step=True, on_epoch=True)
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return {"loss": loss, "index": batch_idx}

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch)["logits"]  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.heard.append(("start", batch_idx))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.heard.append(("end", batch_idx, len(batch)))


def words(seed: int = 0, **options: Any) -> Words:
    torch.manual_seed(seed)
    return Words(**options).double()


def texts(sizes: Sequence[int], seed: int = 1) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(WORDS, (size, LENGTH), generator=draw) for size in sizes]


def stages(schedule: str = "1F1B", **sizes: int) -> MeshStrategy:
    """All ranks that no other axis takes are stages."""
    return MeshStrategy(**{"dp_shard": 1, "pp": -1, **sizes}, pp_schedule=schedule)  # type: ignore[arg-type]
