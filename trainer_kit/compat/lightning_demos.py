"""The small models and datasets of Lightning's `demos`, under the same names."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.request import urlretrieve

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, random_split

from trainer_kit.compat.lightning_utilities import torchvision
from trainer_kit.core.datamodule import DataModule
from trainer_kit.core.module import TrainModule
from trainer_kit.core.types import Batch, Keywords, Loaders, StepOutput

__all__ = [
    "MNIST",
    "BoringDataModule",
    "BoringModel",
    "DemoModel",
    "LightningTransformer",
    "MNISTDataModule",
    "ManualOptimBoringModel",
    "RandomDataset",
    "RandomDictDataset",
    "RandomIterableDataset",
    "RandomIterableDatasetWithLen",
    "Transformer",
    "WikiText2",
]


class RandomDataset(Dataset[Tensor]):
    """Rows of a fixed random table, shape (size,)."""

    def __init__(self, size: int, length: int) -> None:
        self.len = length
        # Drawn once: an index has the same row in each epoch, so that tests may compare losses.
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]

    def __len__(self) -> int:
        return self.len


class RandomDictDataset(Dataset[dict[str, Tensor]]):
    """The same rows under ``"a"``, and plus 2 under ``"b"``."""

    def __init__(self, size: int, length: int) -> None:
        self.rows = RandomDataset(size, length)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"a": self.rows[index], "b": self.rows[index] + 2}

    def __len__(self) -> int:
        return len(self.rows)


class RandomIterableDataset(IterableDataset[Tensor]):
    """A stream of random rows without a length."""

    def __init__(self, size: int, count: int) -> None:
        self.count = count
        self.size = size

    def __iter__(self) -> Iterator[Tensor]:
        # Drawn in each pass, as in Lightning's class: two passes differ.
        return (torch.randn(self.size) for _ in range(self.count))


class RandomIterableDatasetWithLen(RandomIterableDataset):
    """A stream of random rows with a length."""

    def __len__(self) -> int:
        return self.count


class BoringModel(TrainModule):
    """One linear layer, with all steps and loaders; made to be subclassed in tests."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]

    def loss(self, preds: Tensor, labels: Tensor | None = None) -> Tensor:
        """The mean squared error; labels default to ones."""
        if labels is None:
            labels = torch.ones_like(preds)
        return nn.functional.mse_loss(preds, labels)

    def step(self, batch: Batch) -> Tensor:
        """The loss of a batch."""
        return self.loss(self(batch))

    def training_step(self, batch: Batch, batch_idx: int) -> StepOutput:
        return {"loss": self.step(batch)}

    def validation_step(self, batch: Batch, batch_idx: int) -> StepOutput:
        return {"x": self.step(batch)}

    def test_step(self, batch: Batch, batch_idx: int) -> StepOutput:
        return {"y": self.step(batch)}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]

    def train_dataloader(self) -> Loaders:
        return DataLoader(RandomDataset(32, 64))

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class ManualOptimBoringModel(BoringModel):
    """`BoringModel` with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> StepOutput:
        optimizer = self.optimizers()
        loss = self.step(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class BoringDataModule(DataModule):
    """64 random rows for each stage."""

    def __init__(self) -> None:
        super().__init__()
        # In the constructor: all stages share the rows, whichever is set up first.
        self.random_full = RandomDataset(32, 256)

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.random_train = Subset(self.random_full, range(64))
        if stage in ("fit", "validate"):
            self.random_val = Subset(self.random_full, range(64, 128))
        if stage == "test":
            self.random_test = Subset(self.random_full, range(128, 192))
        if stage == "predict":
            self.random_predict = Subset(self.random_full, range(192, 256))

    def train_dataloader(self) -> Loaders:
        return DataLoader(self.random_train)

    def val_dataloader(self) -> Loaders:
        return DataLoader(self.random_val)

    def test_dataloader(self) -> Loaders:
        return DataLoader(self.random_test)

    def predict_dataloader(self) -> Loaders:
        return DataLoader(self.random_predict)


class DemoModel(TrainModule):
    """One linear layer and a ReLU."""

    def __init__(self, out_dim: int = 10, learning_rate: float = 0.02) -> None:
        super().__init__()
        self.l1 = nn.Linear(32, out_dim)
        self.learning_rate = learning_rate

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.l1(x.view(x.size(0), -1)))

    def training_step(self, batch: Batch, batch_idx: int) -> StepOutput:
        return self(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


# -- words ------------------------------------------------------------------------------------------------------------


class Transformer(nn.Module):
    """An encoder and decoder over words, with one fixed position for a whole sequence, as in Lightning's demo."""

    def __init__(
        self,
        vocab_size: int = 33278,
        ninp: int = 200,
        nhead: int = 2,
        nhid: int = 200,
        nlayers: int = 2,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.pos_encoder = _Position(ninp, dropout)
        self.embedding = nn.Embedding(vocab_size, ninp)
        self.transformer = nn.Transformer(
            ninp, nhead, nlayers, nlayers, nhid, dropout, batch_first=True
        )
        self.decoder = nn.Linear(ninp, vocab_size)
        self.ninp = ninp
        self.vocab_size = vocab_size

    def forward(
        self, inputs: Tensor, target: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Word numbers of shape (samples, length), twice; returns log probabilities (samples × length, words)."""
        if mask is None:
            mask = nn.Transformer.generate_square_subsequent_mask(
                inputs.size(1), device=inputs.device
            )
        scale = self.ninp**0.5
        source = self.pos_encoder(self.embedding(inputs) * scale)
        target = self.pos_encoder(self.embedding(target) * scale)
        logits = self.decoder(self.transformer(source, target, tgt_mask=mask))
        return nn.functional.log_softmax(logits, dim=-1).view(-1, self.vocab_size)


class _Position(nn.Module):
    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        # The position is the length of the sequence, the same for all words, as in Lightning's demo.
        even = torch.arange(0, self.dim, 2, device=x.device).float()
        angles = x.size(1) * torch.exp(even * (-math.log(10000.0) / self.dim))
        encoding = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten()
        return self.dropout(x + encoding.to(x.dtype))  # type: ignore[no-any-return]


class WikiText2(Dataset[tuple[Tensor, Tensor]]):
    """Blocks of ``wikitext-2.txt`` in a directory as word numbers, and the same blocks one word later."""

    def __init__(
        self,
        data_dir: Path = Path("./data"),
        block_size: int = 35,
        download: bool = True,
    ) -> None:
        self.path = Path(data_dir) / "wikitext-2.txt"
        if download and not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Only where the file is missing: each call of `train_dataloader` creates such a dataset.
            urlretrieve(_WORDS, self.path)
        tokens: list[str] = []
        for line in self.path.read_text("utf8").splitlines():
            tokens += [*line.split(), "<eos>"]
        vocabulary = enumerate(dict.fromkeys(tokens))
        self.dictionary = {token: number for number, token in vocabulary}
        self.data = torch.tensor([self.dictionary[token] for token in tokens])
        self.block_size = block_size

    @property
    def vocab_size(self) -> int:
        """The number of different words."""
        return len(self.dictionary)

    def __len__(self) -> int:
        # One block less: the target of the last block lies one word beyond it.
        return len(self.data) // self.block_size - 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.block_size
        stop = start + self.block_size
        return self.data[start:stop], self.data[start + 1 : stop + 1]


_WORDS: Final = "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2/train.txt"


class LightningTransformer(TrainModule):
    """`Transformer` on `WikiText2`."""

    def __init__(self, vocab_size: int = 33278) -> None:
        super().__init__()
        self.model = Transformer(vocab_size=vocab_size)

    def forward(self, inputs: Tensor, target: Tensor) -> Tensor:
        return self.model(inputs, target)  # type: ignore[no-any-return]

    def training_step(self, batch: Batch, batch_idx: int) -> StepOutput:
        inputs, target = batch
        return nn.functional.nll_loss(self(inputs, target), target.view(-1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def prepare_data(self) -> None:
        # On one process of a machine; `train_dataloader` then finds the file.
        WikiText2(download=True)

    def train_dataloader(self) -> Loaders:
        return DataLoader(WikiText2())


# -- digits -----------------------------------------------------------------------------------------------------------


# A function, since torchvision is optional: a subclass would import it with this module.
def MNIST(*args: object, **kwargs: object) -> Any:
    """torchvision's dataset of digits."""
    return torchvision().datasets.MNIST(*args, **kwargs)


class MNISTDataModule(DataModule):
    """Loaders of MNIST; the last ``val_split`` training images, in a fixed random order, are for validation."""

    name = "mnist"
    num_classes = 10

    def __init__(
        self,
        data_dir: str = "./data",
        val_split: int = 5000,
        num_workers: int = 16,
        normalize: bool = False,
        seed: int = 42,
        batch_size: int = 32,
    ) -> None:
        super().__init__()
        self.data_dir = data_dir
        self.val_split = val_split
        self.num_workers = num_workers
        self.normalize = normalize
        self.seed = seed
        self.batch_size = batch_size

    def prepare_data(self) -> None:
        # On one process of a machine; setup, on all of them, only reads.
        for train in (True, False):
            MNIST(self.data_dir, train=train, download=True)

    def setup(self, stage: str) -> None:
        images = MNIST(
            self.data_dir, train=True, download=False, transform=self.default_transforms
        )
        sizes = [len(images) - self.val_split, self.val_split]
        # Fixed, as in Lightning's module, whose `seed` has no effect: all processes and runs have the same division.
        generator = torch.Generator().manual_seed(42)
        splits = random_split(images, sizes, generator=generator)
        self.dataset_train, self.dataset_val = splits

    def train_dataloader(self) -> Loaders:
        return self._loader(self.dataset_train, shuffle=True)

    def val_dataloader(self) -> Loaders:
        return self._loader(self.dataset_val)

    def test_dataloader(self) -> Loaders:
        images = MNIST(
            self.data_dir,
            train=False,
            download=False,
            transform=self.default_transforms,
        )
        return self._loader(images)

    @property
    def default_transforms(self) -> Any:
        """To a tensor, and with ``normalize`` to [-1, 1]."""
        transforms = torchvision().transforms
        to_tensor = transforms.ToTensor()
        if not self.normalize:
            return to_tensor
        normalize = transforms.Normalize(mean=(0.5,), std=(0.5,))
        return transforms.Compose([to_tensor, normalize])

    def _loader(self, images: Dataset[object], shuffle: bool = False) -> Loaders:
        options: Keywords = {
            "num_workers": self.num_workers,
            # As in Lightning's module, for all three stages.
            "drop_last": True,
            "pin_memory": torch.cuda.is_available(),
        }
        return DataLoader(images, self.batch_size, shuffle=shuffle, **options)
