"""A character-level transformer on the help texts that ship with Python, and a sample of its output.

    python examples/char_transformer.py
    python examples/char_transformer.py --devices 2 --precision bf16-mixed --steps 500

Each sample is one paragraph, padded to the longest of its batch. The loss is a mean over characters, so ``loss_weight``
returns their number: the loss of a step is the mean over all characters of all micro-batches and ranks.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import trainer_kit as tk

PAD, LONGEST = 0, 128
PARAGRAPHS = [
    text
    for topic in pydoc_data.topics.topics.values()
    for text in topic.split("\n\n")
    if len(text) > 40
]
LETTERS = sorted(set("".join(PARAGRAPHS)))
NUMBER = {letter: number for number, letter in enumerate(LETTERS, start=PAD + 1)}


def collate(texts: list[str]) -> Tensor:
    """Letter indices, shape (texts, characters), padded at the end."""
    rows = [
        torch.tensor([NUMBER[letter] for letter in text[:LONGEST]]) for text in texts
    ]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


class CharTransformer(tk.TrainModule):
    def __init__(
        self, width: int = 64, layers: int = 2, heads: int = 4, lr: float = 4e-3
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.letters = nn.Embedding(len(LETTERS) + 1, width, padding_idx=PAD)
        self.places = nn.Embedding(LONGEST, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(LETTERS) + 1)

    def forward(self, text: Tensor) -> Tensor:
        """Logits of the next letter, shape (texts, characters, letters)."""
        length = text.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(
            length, device=text.device
        )
        hidden = self.letters(text) + self.places(
            torch.arange(length, device=text.device)
        )
        return self.head(self.blocks(hidden, mask=mask, is_causal=True))

    def loss_weight(self, batch: Tensor) -> Tensor:
        return (batch[:, 1:] != PAD).sum()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log(
            "val_loss",
            self.loss(batch),
            batch_size=int(self.loss_weight(batch)),
            prog_bar=True,
        )

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(
            self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), ignore_index=PAD
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)

    @torch.no_grad()
    def write(self, start: str, length: int) -> str:
        text = torch.tensor([[NUMBER[letter] for letter in start]], device=self.device)
        for _ in range(length):
            logits = self(text[:, -LONGEST:])[:, -1].float()
            logits[:, PAD] = -torch.inf
            text = torch.cat([text, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        return "".join(LETTERS[number - 1] for number in text[0].tolist())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--devices", default="auto", help="how many; on a CPU: processes"
    )
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--letters", type=int, default=200, help="length of the sample")
    parser.add_argument("--root", default="runs", help="where runs are written")
    args = parser.parse_args()

    tk.seed_everything(1)
    trainer = tk.Trainer(
        devices=args.devices,
        precision=args.precision,
        max_steps=args.steps,
        val_check_interval=max(
            1, args.steps // 3
        ),  # in batches, counted across epochs:
        check_val_every_n_epoch=None,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        default_root_dir=args.root,
    )
    module = CharTransformer(args.width)
    held_out = len(PARAGRAPHS) // 10
    trainer.fit(
        module,
        DataLoader(
            PARAGRAPHS[held_out:], batch_size=16, shuffle=True, collate_fn=collate
        ),
        DataLoader(PARAGRAPHS[:held_out], batch_size=16, collate_fn=collate),
    )
    trainer.print(f"characters seen: {trainer.progress.tokens}")
    trainer.print(
        f"validation loss: {trainer.callback_metrics['val_loss']:.3f} nats a character"
    )
    trainer.print(f"a sample:\n{module.write('The ', args.letters)}")


if __name__ == "__main__":
    main()
