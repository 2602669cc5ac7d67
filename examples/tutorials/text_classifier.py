"""Classify the sentiment of short reviews with a small BERT built from scratch, without downloads or network access.

    python examples/tutorials/text_classifier.py

It needs `pip install transformers scikit-learn`. On two CPU cores it takes about half a minute.
"""

# %% [markdown]
# ## The data
#
# The reviews are generated from templates. Every word in the second half of a sentence can be negated, so no single
# word determines the label: *"the plot was not dull"* is positive, *"the plot was not moving"* is negative. The
# noun-adjective pairs of the test set do not occur in the training set: the model has to learn the grammar, not
# memorize pairs.

# %%
from __future__ import annotations

import itertools
import random
import sys

import torch
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
)

import trainer_kit as tk
from trainer_kit.callbacks import EarlyStopping, ModelCheckpoint

SMALL = "--small" in sys.argv  # what the tests run: shorter reviews

NOUNS = [
    "plot",
    "story",
    "acting",
    "music",
    "script",
    "ending",
    "cast",
    "film",
    "dialogue",
    "direction",
    "pacing",
    "finale",
]
GOOD = [
    "moving",
    "brilliant",
    "clever",
    "warm",
    "charming",
    "gripping",
    "funny",
    "fresh",
]
BAD = ["dull", "clumsy", "slow", "cold", "tedious", "messy", "shallow", "stale"]
VERBS = {
    "was": False,
    "seemed": False,
    "was really": False,
    "was not": True,
    "was never": True,
    "was hardly": True,
}
ENDINGS = [
    "",
    "to me",
    "from the first minute",
    "as far as I can tell",
    "and I have seen many",
    "this time",
]
ENDINGS = ENDINGS[:2] if SMALL else ENDINGS


def reviews() -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """(text, 1 for positive) for training, and for testing with pairs of noun and adjective that are new."""
    parts: tuple[list[tuple[str, int]], list[tuple[str, int]]] = ([], [])
    for (n, noun), (a, adjective) in itertools.product(
        enumerate(NOUNS), enumerate(GOOD + BAD)
    ):
        for (verb, negated), ending in itertools.product(VERBS.items(), ENDINGS):
            label = int((adjective in GOOD) != negated)
            parts[(n + a) % 4 == 0].append(
                (f"the {noun} {verb} {adjective} {ending}".strip(), label)
            )
    return parts


known, new = reviews()
random.Random(0).shuffle(known)
train, val = known[: len(known) * 9 // 10], known[len(known) * 9 // 10 :]
print(
    f"{len(train)} reviews to train on, {len(val)} to validate, {len(new)} to test; one: {train[0]}"
)

# %% [markdown]
# ## The tokenizer
#
# A word-level tokenizer is enough for this vocabulary. For real text, train one in the same way with `models.BPE`, or
# load the one that belongs to the weights: `AutoTokenizer.from_pretrained(...)`.

# %%
words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
words.train_from_iterator(
    (text for text, _ in train),
    trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"]),
)
words.post_processor = processors.TemplateProcessing(
    single="[CLS] $A [SEP]",
    special_tokens=[(name, words.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]"
)


def collate(batch: list[tuple[str, int]]) -> dict[str, Tensor]:
    """Token ids padded to the longest review of the batch, and the labels."""
    texts, labels = zip(*batch, strict=True)
    return {
        **tokenizer(list(texts), padding=True, return_tensors="pt"),
        "labels": torch.tensor(labels),
    }


def loader(part: list[tuple[str, int]], shuffle: bool = False) -> DataLoader:
    return DataLoader(part, batch_size=64, shuffle=shuffle, collate_fn=collate)


# %% [markdown]
# The batches are dicts. The Trainer moves nested dicts, lists and tuples to the device, so nothing here calls
# `.to(device)` or `.cuda()`: the same file runs on a GPU.
#
# ## The module
#
# A Hugging Face model computes its own loss when the batch has `labels`. `configure_optimizers` applies no weight decay
# to biases and norms, as is usual for BERT.
#
# *Why `self.log` and not `print`?* The value stays on the device until it is needed. It is averaged over the epoch,
# weighted by batch size, and over all processes. Then it is sent to the loggers, to the progress bar and to
# `trainer.callback_metrics`, where `EarlyStopping` and `ModelCheckpoint` read it.


# %%
class Classifier(tk.TrainModule):
    def __init__(self, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        config = BertConfig(
            vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=128, max_position_embeddings=32, num_labels=2,
        )  # fmt: skip
        self.bert = BertForSequenceClassification(config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.bert(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        output = self.bert(**batch)
        self.log("val_loss", output.loss)
        self.log(
            "val_acc",
            (output.logits.argmax(1) == batch["labels"]).float().mean(),
            prog_bar=True,
        )

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log(
            "test_acc",
            (self.bert(**batch).logits.argmax(1) == batch["labels"]).float().mean(),
        )

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.bert(**batch).logits.softmax(1)[
            :, 1
        ]  # the probability of "positive"

    def configure_optimizers(self) -> dict:
        decayed = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": 0.01},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=self.hparams.lr,
        )
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.hparams.lr, total_steps=steps
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


# %% [markdown]
# ## Training
#
# `ModelCheckpoint` keeps the checkpoint with the best validation accuracy, and `EarlyStopping` ends the run when the
# validation loss stops falling. `gradient_clip_val` clips the gradient norm before each step.

# %%
tk.seed_everything(0)
trainer = tk.Trainer(
    max_epochs=8 if SMALL else 4,
    gradient_clip_val=1.0,
    callbacks=[
        EarlyStopping("val_loss", patience=3),
        ModelCheckpoint(monitor="val_acc", mode="max"),
    ],
    default_root_dir="runs",
    log_every_n_steps=5,
)
trainer.fit(Classifier(), loader(train, shuffle=True), loader(val))

# %% [markdown]
# *How do I see the curves?* Open `report.html` in the run directory: it is one file with every logged value.
# TensorBoard files are there too.

# %%
trainer.print(
    f"curves: {trainer.log_dir}/report.html, or tensorboard --logdir {trainer.log_dir}"
)

# %% [markdown]
# ## Testing
#
# Without a module, `test` loads the best checkpoint. A bag of words has a weight for each word, but none for
# *"not dull"*, so it cannot do better than guess on these sentences.

# %%
(results,) = trainer.test(dataloaders=loader(new), verbose=False)
vectorizer = CountVectorizer()
bag = LogisticRegression(max_iter=1000).fit(
    vectorizer.fit_transform(t for t, _ in train), [y for _, y in train]
)
baseline = bag.score(vectorizer.transform(t for t, _ in new), [y for _, y in new])
trainer.print(
    f"test accuracy {results['test_acc']:.3f}, of a bag of words {baseline:.3f}"
)

# %% [markdown]
# ## Prediction
#
# `predict` returns the outputs of `predict_step` in dataset order, on any number of processes.

# %%
sentences = [
    "the music was never tedious",
    "the music was never funny",
    "the cast seemed gripping to me",
]
probabilities = torch.cat(
    trainer.predict(dataloaders=loader([(text, 0) for text in sentences]))
)
for text, probability in zip(sentences, probabilities, strict=True):
    trainer.print(f"{probability:5.3f}  {text}")

# %% [markdown]
# The weights are in Hugging Face format: `module.bert.save_pretrained("directory")` writes them for
# `BertForSequenceClassification.from_pretrained("directory")`.
#
# *How do I train a larger model?* Replace `BertForSequenceClassification(config)` with `.from_pretrained(...)`, and add
# `precision="bf16-mixed"` and `devices=2` to the Trainer. For a model that does not fit on one device, add
# `strategy="fsdp"`; nothing else in this file changes. For a classifier on a frozen backbone, use `BackboneFinetuning`
# ([callbacks](../guide/callbacks.md)) or [adapters](qlora.md).
