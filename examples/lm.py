"""Train one language model with every strategy: the losses are the same however the model is sharded.

    python examples/lm.py
    python examples/lm.py --strategy fsdp --devices 2
    python examples/lm.py --strategy 3d --devices 8

A step is 4 micro-batches of 8 texts on any number of processes. ``configure_parallel`` of the module
defines how it can be sharded; ``--strategy`` selects the mesh axes.
"""

# %% [markdown]
# ![Losses of one language model, once for each strategy: the curves coincide](../pictures/curves.svg)
#
# Each curve is a run of this script on a CPU, with one to eight processes. XLA is not included: it needs a separate
# environment, which `make test-xla` uses.
#
# ## Data and strategies
#
# The text is the documentation bundled with Python. Most strategies are one string; combinations with sizes need an
# object.

# %%
from __future__ import annotations

import argparse
import pydoc_data.topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import trainer_kit as tk
from trainer_kit.strategies import MeshStrategy

TEXT = "\n".join(pydoc_data.topics.topics.values())
LETTERS = sorted(set(TEXT))
NUMBER = {letter: number for number, letter in enumerate(LETTERS)}
LENGTH = 64

STRATEGIES: dict[str, Any] = {
    "pp": lambda: MeshStrategy(dp_shard=1, pp=-1),
    "fsdp_tp": lambda: MeshStrategy(dp_shard=-1, tp=2),
    "3d": lambda: MeshStrategy(dp_shard=-1, tp=2, pp=2),
}
"""More than a word says."""


# %% [markdown]
# ## The model
#
# The model is plain PyTorch, and only one line takes sharding into account: the attention infers the number of heads
# from its input, because under tensor parallelism each rank has only some of the heads.


# %%
class Attention(nn.Module):
    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # Infer the number of heads from the layers' output: under tensor parallelism each rank has only some of them.
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        return self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )


class Block(nn.Module):
    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, head)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Transformer(nn.Module):
    def __init__(self, width: int, layers: int, head: int) -> None:
        super().__init__()
        self.letters, self.places = (
            nn.Embedding(len(LETTERS), width),
            nn.Embedding(LENGTH, width),
        )
        self.blocks = nn.ModuleList(Block(width, head) for _ in range(layers))
        self.norm, self.logits = (
            nn.LayerNorm(width),
            nn.Linear(width, len(LETTERS), bias=False),
        )

    def forward(self, text: Tensor, places: Tensor) -> Tensor:
        x = self.letters(text) + self.places(places)
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))


# %% [markdown]
# ## The module, and how to shard it
#
# `configure_parallel` defines *how* the module can be sharded: which layers by columns and which by rows (tensor
# parallel), that sequences can be split (context parallel), and where its blocks are (pipeline parallel). The strategy
# defines the number of shards. `ddp`, `fsdp` and DeepSpeed work without this method.


# %%
class LanguageModel(tk.TrainModule):
    def __init__(
        self, width: int = 64, layers: int = 4, head: int = 16, lr: float = 0.1
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = Transformer(width, layers, head)

    def training_step(
        self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int
    ) -> Tensor:
        text, places, following = batch
        loss = F.cross_entropy(
            self.net(text, places).flatten(0, 1), following.flatten()
        )
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            self.parameters(), lr=self.hparams.lr, momentum=0.9, nesterov=True
        )

    def configure_parallel(self, mesh: Any) -> tk.ParallelPlan:
        return tk.ParallelPlan(
            tensor={
                "net.blocks.*.attention.q": "colwise",
                "net.blocks.*.attention.k": "colwise",
                "net.blocks.*.attention.v": "colwise",
                "net.blocks.*.attention.out": "rowwise",
                "net.blocks.*.up": "colwise",
                "net.blocks.*.down": "rowwise",
            },
            context=tk.ContextPlan(),
            pipeline=tk.PipelinePlan(model="net"),
        )


# %% [markdown]
# ## Training
#
# A two-line logger prints the losses. A step has 32 texts on any number of processes: `global_batch_size=8` in 4
# micro-batches, so that a pipeline can keep its stages busy.


# %%
class Curve:
    """A logger is anything with this method; it is called on rank 0."""

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        if "loss" in metrics:
            print(f"step {step:4d}  loss {metrics['loss']:.6f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--strategy",
        default="auto",
        help=f"a word of the Trainer's, or {', '.join(STRATEGIES)}",
    )
    parser.add_argument(
        "--devices", default="auto", help="how many; on a CPU: processes"
    )
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--every", type=int, default=10, help="print the loss each so many steps"
    )
    parser.add_argument("--root", default="runs", help="where runs are written")
    args = parser.parse_args()

    tk.seed_everything(1)
    numbers = torch.tensor([NUMBER[letter] for letter in TEXT])
    texts = numbers[: (len(numbers) - 1) // LENGTH * LENGTH]
    following = numbers[1 : len(texts) + 1]
    # Positions are part of the batch: a process that gets a part of each text also gets its positions.
    places = torch.arange(LENGTH).expand(len(texts) // LENGTH, LENGTH)
    data = TensorDataset(texts.view(-1, LENGTH), places, following.view(-1, LENGTH))
    trainer = tk.Trainer(
        strategy=STRATEGIES.get(args.strategy, lambda: args.strategy)(),
        devices=args.devices,
        precision=args.precision,
        max_steps=args.steps,
        accumulate_grad_batches=4,
        global_batch_size=8,
        gradient_clip_val=1.0,
        log_every_n_steps=args.every,
        logger=Curve(),
        enable_progress_bar=False,
        default_root_dir=args.root,
    )
    trainer.fit(
        LanguageModel(), DataLoader(data, batch_size=8, shuffle=True, drop_last=True)
    )


if __name__ == "__main__":
    main()

# %% [markdown]
# *Which strategy should I use?* `ddp` if the model, its gradients and its optimizer state fit on one device, `fsdp` if
# they do not; the others if a single layer or the batch is too large ([all of
# them](../guide/distributed.md#strategies)). `trainer.explain(module)` shows the memory and communication of each rank.
#
# *Can I change the strategy mid-run?* Yes: checkpoints of each strategy load under every other strategy, on any number
# of processes.
#
# *Why are the losses equal?* Samples, weights and random numbers do not depend on the number of processes
# ([what does not change](../guide/distributed.md#what-does-not-change)).
