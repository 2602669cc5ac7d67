"""What a graph could get wrong without a word: each trains with the same bits, by a graph or without one."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from tests.training.test_captured_steps import Module, compare


class Decaying(Module):
    """Changes a parameter past the count of its versions."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.layer.weight.data.mul_(0.9)
        return self.loss(batch)


class Private(Module):
    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._calls = getattr(self, "_calls", 0) + 1
        return self.loss(batch) / self._calls


class KeepsIndex(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._index = batch_idx
        return self.loss(batch)

    def on_train_batch_end(self, *arguments: Any) -> None:
        assert self._index >= 0


class Packed(Module):
    """The lengths differ from batch to batch; their sum does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 3, batch_first=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        packed = pack_padded_sequence(batch["x"], batch["lengths"], batch_first=True)
        return self.layer(packed)[1][0].pow(2).mean()

    def batches(self, count: int) -> list[Any]:
        lengths = [[4, 2], [4, 2], [3, 3], [5, 1], [4, 2], [3, 3], [4, 2]]
        return [
            {"x": torch.randn(2, 5, 4), "lengths": torch.tensor(each)}
            for each in lengths[:count]
        ]


class Split(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = torch.tensor_split(batch["x"], batch["where"])
        return self.loss(first) + 2 * self.loss(second)

    def batches(self, count: int) -> list[Any]:
        return [
            {"x": torch.randn(5, 4), "where": torch.tensor([1 + number % 3])}
            for number in range(count)
        ]


class OwnRandom(Module):
    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.random.random() < 0.5:
            batch = batch.flip(-1)
        return self.loss(batch)


class Latent(Module):
    """A tensor that is trained, and is no parameter of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.latent = torch.zeros(4, requires_grad=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch + self.latent)
        self.log("latent", self.latent.abs().sum())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.latent, *self.parameters()], 0.1)


class Averaging(Module):
    """An average that a hook between forward and backward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(2))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.average.lerp_(self.layer.bias.detach(), 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.layer(batch) - self.average).pow(2).mean()


class LateLog(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        loss += 0.1 * self.layer.weight.abs().sum()
        return loss


class Sparse(Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", torch.eye(4).to_sparse(), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss((self.adjacency @ batch.T).T)


class SparseBatch(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch.to_dense())

    def batches(self, count: int) -> list[Any]:
        return [torch.eye(4).mul(1 + number).to_sparse() for number in range(count)]


class Halving(Module):
    """Writes into its batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch.mul_(0.5)
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.log("size", batch.abs().mean())


REFUSED = [
    (Decaying, "training_step changes a parameter"),
    (Private, "training_step changes _calls"),
    (KeepsIndex, "training_step changes _index"),
    (Packed, "training_step reads a value out of a tensor"),
    (Averaging, "the graph of training_step gives different buffers"),
    (Split, "training_step splits a tensor where another says"),
    (OwnRandom, "an attribute has its own random number generator"),
    (Latent, "a tensor that needs a gradient is an attribute"),
    (LateLog, "training_step changes a tensor that it has logged"),
    (Sparse, "a buffer is sparse or nested"),
    (SparseBatch, "the batch holds a sparse or nested tensor"),
    (Halving, "training_step changes its batch"),
]


@pytest.mark.parametrize(("kind", "reason"), REFUSED)
def test_what_a_graph_could_not_repeat_trains_without_one(
    kind: type[Module], reason: str
) -> None:
    assert f"not captured: {reason}" in compare(kind)


class Pairs(Module):
    """The first batches hold one tensor twice."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = batch
        return (self.layer(first) - second[:, :2]).pow(2).mean()

    def batches(self, count: int) -> list[Any]:
        tensors = [torch.randn(5, 4) for _ in range(count + 1)]
        pairs = [(tensor, tensor) for tensor in tensors[:3]]
        return [*pairs, *itertools.pairwise(tensors[3:])]


def test_one_tensor_in_two_places_of_a_batch() -> None:
    compare(Pairs)


def test_a_value_deep_in_a_configuration_is_noticed() -> None:
    class Configured(Module):
        def __init__(self) -> None:
            super().__init__()
            self.options = {"loss": {"weight": 1.0}}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * self.options["loss"]["weight"]

        def on_train_epoch_start(self) -> None:
            self.options["loss"]["weight"] = 0.5**self.current_epoch

    assert "graphs (" in compare(Configured, epochs=3)


def test_a_hook_of_a_gradient_that_comes_later_is_noticed() -> None:
    class Late(Module):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.layer.weight.register_hook(lambda gradient: gradient * 0)

    assert "a hook of the gradient of layer.weight" in compare(Late, epochs=3)
