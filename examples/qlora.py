"""QLoRA: train a small transformer, quantize it to 4 bits per weight, and fine-tune it on capitals with adapters.

    python examples/qlora.py
    python examples/qlora.py --precision int8 --steps 400

It needs `pip install bitsandbytes`. On two CPU cores it takes one to two minutes.
The base model is trained in float32. For fine-tuning it is frozen and gets adapters; the precision quantizes the frozen
weights.
Source: Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, NeurIPS 2023.
"""

# %% [markdown]
# ## The model
#
# The base model learns a text of the Python documentation, letter by letter. `Adapted` adds two small matrices to a
# layer. During fine-tuning only these are trained; everything else is frozen, and the precision `nf4` stores it in 4
# bits per weight.

# %%
from __future__ import annotations

import argparse
import pydoc_data.topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import trainer_kit as tk

LENGTH, WIDTH, HEADS = 64, 64, 4
TEXT = "\n".join(pydoc_data.topics.topics.values()).encode("ascii", "replace")


def windows(text: bytes, count: int = 4096) -> list[Tensor]:
    """Pieces of a text, as numbers of letters, shape (LENGTH + 1,)."""
    letters = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return [
        letters[i : i + LENGTH + 1] for i in range(0, (LENGTH + 1) * count, LENGTH + 1)
    ]


class Adapted(nn.Module):
    """``y = W x + B A x``: W is frozen, A and B are small."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = (
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )
        nn.init.zeros_(self.b.weight)  # at first nothing changes

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.qkv(self.norm_1(x))
            .unflatten(-1, (3, HEADS, -1))
            .permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


# %% [markdown]
# ## The module
#
# With `rank=0` the module is the base model, and all weights are trained. `rank=8` freezes the base and adds adapters
# to every block. The optimizer gets only the trainable parameters; `tk.optimizer("adamw8bit", ...)` stores its state in
# 8 bits.


# %%
class Language(tk.TrainModule):
    def __init__(self, lr: float, rank: int = 0) -> None:
        super().__init__()
        self.lr = lr
        self.letters, self.places = (
            nn.Embedding(256, WIDTH),
            nn.Embedding(LENGTH, WIDTH),
        )
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, 256)
        if rank:
            self.requires_grad_(False)
            for block in self.blocks:
                for name in ("qkv", "out", "up", "down"):
                    setattr(block, name, Adapted(getattr(block, name), rank))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.letters(batch[:, :-1]) + self.places(
            torch.arange(LENGTH, device=batch.device)
        )
        return F.cross_entropy(
            self.head(self.blocks(hidden)).flatten(0, 1).float(), batch[:, 1:].flatten()
        )

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [
            parameter for parameter in self.parameters() if parameter.requires_grad
        ]
        return tk.optimizer("adamw8bit", trained, lr=self.lr)


# %% [markdown]
# ## Train the base model, then the adapters
#
# The fine-tuning text is in capitals, which are rare in the base model's text, so its loss on them is high. The last
# lines of the output show the loss before and after fine-tuning, and the bits per frozen weight.


# %%
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--precision", default="nf4", help="nf4, nf4-dq, fp4, fp4-dq or int8"
    )
    parser.add_argument("--steps", type=int, default=120, help="of either training")
    args = parser.parse_args()
    options = {
        "max_steps": args.steps,
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }

    tk.seed_everything(1)
    base = Language(lr=3e-3)
    tk.Trainer(devices=1, **options).fit(
        base, DataLoader(windows(TEXT), batch_size=16, shuffle=True)
    )

    shouted = windows(TEXT.upper())
    tuned = Language(lr=3e-3, rank=8)
    names = {name.replace(".base.", "."): name for name in tuned.state_dict()}
    tuned.load_state_dict(
        {names[name]: value for name, value in base.state_dict().items()}, strict=False
    )
    trainer = tk.Trainer(devices=1, precision=args.precision, **options)
    (before,) = trainer.validate(
        tuned, DataLoader(shouted[-256:], batch_size=64), verbose=False
    )
    trainer.fit(tuned, DataLoader(shouted[:-256], batch_size=16, shuffle=True))
    (after,) = trainer.validate(
        tuned, DataLoader(shouted[-256:], batch_size=64), verbose=False
    )

    weight = tuned.blocks[0].qkv.base.weight
    trainer.print(
        f"a frozen weight: {weight.numel() * weight.element_size() * 8 / (3 * WIDTH * WIDTH):.0f} bits"
    )
    trainer.print(
        f"loss on shouted text: {before['val_loss']:.2f}, tuned {after['val_loss']:.2f} nats a letter"
    )


if __name__ == "__main__":
    main()

# %% [markdown]
# *Does it work with a Hugging Face model?* Yes: `precision="nf4"` quantizes the frozen `nn.Linear` layers of any
# module, and `peft.get_peft_model` can replace `Adapted` ([precision](../guide/precision.md)). *Which precisions are
# available?* `nf4`, `nf4-dq`, `fp4`, `fp4-dq` and `int8`, here with bitsandbytes, on a CPU too.
#
# *What is in a checkpoint?* The adapters, and the quantized base bit for bit. *How do I train on two GPUs?* Use
# `devices=2`. If the base does not fit on one GPU, use `strategy="fsdp"` with `torch.optim.AdamW`: 8-bit optimizers
# need unsharded parameters.
