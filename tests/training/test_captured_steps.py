"""`Trainer(compile="step")` trains bit for bit as without it, and says what it does not capture."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import trainer_kit as tk
from trainer_kit.callbacks import ReplayCheck

Captured = pytest.CaptureFixture[str]


def sgd(weights: Any) -> Optimizer:
    return torch.optim.SGD(weights, lr=0.05, momentum=0.9)


class Module(tk.TrainModule):
    """A linear layer on batches of 5 rows; subclasses replace what a test looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.optimizer_of: Callable[[Any], Optimizer] = sgd

    def loss(self, x: Tensor) -> Tensor:
        return self.layer(x).pow(2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def batches(self, count: int) -> list[Any]:
        return [torch.randn(5, 4) for _ in range(count)]

    def configure_optimizers(self) -> Any:
        return self.optimizer_of(self.parameters())


class Perceptron(Module):
    """Running statistics, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU()]
        self.layer = nn.Sequential(*layers, nn.Dropout(0.3), nn.Linear(16, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.layer(x), y)
        self.log("loss", loss)
        self.log("rows", float(len(x)))
        return loss

    def batches(self, count: int) -> list[Any]:
        return [(torch.randn(6, 8), torch.randint(0, 3, (6,))) for _ in range(count)]


class Convolutions(Module):
    """The step returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        first = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()]
        last = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]
        self.layer = nn.Sequential(*first, nn.MaxPool2d(2), nn.GroupNorm(2, 4), *last)
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        output = self.layer(x)
        accuracy = (output.argmax(-1) == y).float().mean()
        self.log("accuracy", accuracy)
        return {"loss": F.cross_entropy(output, y), "output": output, "rows": 4}

    def batches(self, count: int) -> list[Any]:
        labels = torch.randint(0, 3, (count, 4))
        return [(torch.randn(4, 3, 8, 8), label) for label in labels]


class Recurrent(Module):
    """Batches are dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 6, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(6, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output, _ = self.rnn(batch["x"])
        return F.mse_loss(self.head(output[:, -1]), batch["y"])

    def batches(self, count: int) -> list[Any]:
        return [
            {"x": torch.randn(3, 5, 4), "y": torch.randn(3, 2)} for _ in range(count)
        ]


class Transformer(Module):
    """A buffer, and a tensor that is a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, padding_idx=0)
        block = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 1)
        self.head = nn.Linear(8, 11)
        mask = nn.Transformer.generate_square_subsequent_mask(6)
        self.register_buffer("mask", mask, persistent=False)
        self.weights = torch.ones(11)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens = batch["tokens"]
        hidden = self.blocks(self.embedding(tokens), mask=self.mask, is_causal=True)
        logits = self.head(hidden)[:, :-1].flatten(0, 1)
        return F.cross_entropy(logits, tokens[:, 1:].flatten(), weight=self.weights)

    def batches(self, count: int) -> list[Any]:
        return [
            {"tokens": torch.randint(0, 11, (3, 6)), "names": ["a", None, 1]}
            for _ in range(count)
        ]


class Tied(Module):
    """One weight in two places, two with one gradient, one without any, and one that is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layer = nn.Linear(8, 11, bias=False)
        self.layer.weight = self.embedding.weight
        self.first, self.second = (nn.Parameter(torch.zeros(8)) for _ in range(2))
        self.unused = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.embedding(batch) + (self.first + self.second)
        loss = F.cross_entropy(self.layer(hidden).flatten(0, 1), batch.flatten())
        return loss + self.scale

    def batches(self, count: int) -> list[Any]:
        return [torch.randint(0, 11, (3, 6)) for _ in range(count)]


class Penalty(Module):
    """A gradient inside of the loss."""

    def loss(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        output = self.layer(x).tanh().sum()
        (gradient,) = torch.autograd.grad(output, x, create_graph=True)
        return (gradient.norm(2, dim=1) - 1).pow(2).mean() + output.pow(2)


class Average(Module):
    """The step writes into a buffer and into a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(2))
        self.steps = torch.zeros(())

    def loss(self, x: Tensor) -> Tensor:
        output = self.layer(x)
        with torch.no_grad():
            self.average.mul_(0.9).add_(output.mean(0), alpha=0.1)
            self.steps += 1
        return (output - self.average).pow(2).mean() * torch.tensor(2.0)


CAPTURED = [
    Perceptron,
    Convolutions,
    Recurrent,
    Transformer,
    Tied,
    Penalty,
    Average,
]
QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


def fit(
    module: Module,
    epochs: int = 2,
    path: Any = None,
    ckpt_path: Any = None,
    **options: Any,
) -> tuple[tk.Trainer, Any]:
    """Train from ``ckpt_path``, save at ``path``; returns everything that a fit changes."""
    tk.seed_everything(3)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    trainer = tk.Trainer(max_epochs=epochs, **{**QUIET, **options})
    trainer.fit(module, module.batches(7), ckpt_path=ckpt_path)
    if path is not None:
        trainer.save_checkpoint(path)
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    weights = {name: each.clone() for name, each in module.state_dict().items()}
    return trainer, (weights, values, torch.rand(2))


def assert_same(results: Sequence[Any]) -> None:
    """Weights, logged values, and the state of the generator."""
    (weights, values, drawn), (other, other_values, other_drawn) = results
    assert values == other_values
    assert torch.equal(drawn, other_drawn)
    assert list(weights) == list(other)
    for name, weight in weights.items():
        assert torch.equal(weight, other[name]), name


def line_of_step(trainer: tk.Trainer, module: Module) -> str:
    lines = str(trainer.explain(module)).splitlines()
    return next(line for line in lines if line.strip().startswith("training_step"))


def compare(kind: type[Module], **options: Any) -> str:
    """Train with and without graphs; returns what `explain` says of the step."""
    _, expected = fit(kind(), **options)
    module = kind()
    trainer, captured = fit(module, compile="step", **options)
    assert_same([expected, captured])
    return line_of_step(trainer, module)


ACCUMULATED = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}


@pytest.mark.parametrize("options", [{}, ACCUMULATED], ids=["each", "accumulated"])
@pytest.mark.parametrize("kind", CAPTURED)
def test_a_captured_step_trains_as_without(
    kind: type[Module], options: dict[str, Any], capsys: Captured
) -> None:
    line = compare(kind, **options)
    assert "1 graph (" in line
    assert "not captured" not in line
    assert "compile=" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop"])
def test_any_optimizer_steps_on_what_a_graph_gives(name: str) -> None:
    class Optimized(Perceptron):
        def configure_optimizers(self) -> Any:
            optimizer = getattr(torch.optim, name)(self.parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            config = {"scheduler": schedule, "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": config}

    assert "1 graph (" in compare(Optimized)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_casts_are_in_the_graph(precision: str) -> None:
    assert "1 graph (" in compare(Perceptron, precision=precision)


def test_each_kind_of_batch_that_comes_again_has_a_graph() -> None:
    class Shapes(Perceptron):
        def batches(self, count: int) -> list[Any]:
            rows = [6, 6, 2, 2, 2, 6, 3]
            return [(torch.randn(n, 8), torch.randint(0, 3, (n,))) for n in rows]

    assert "3 graphs (" in compare(Shapes)


def test_a_kind_of_batch_that_comes_once_has_none() -> None:
    class Once(Perceptron):
        def batches(self, count: int) -> list[Any]:
            rows = range(2, 2 + count)
            return [(torch.randn(n, 8), torch.randint(0, 3, (n,))) for n in rows]

    assert "at the second batch of each shape" in compare(Once, epochs=1)


def test_graphs_are_limited_in_number(capsys: Captured) -> None:
    class Many(Perceptron):
        def batches(self, count: int) -> list[Any]:
            rows = range(2, 14)
            return [(torch.randn(n, 8), torch.randint(0, 3, (n,))) for n in rows]

    line = compare(Many, epochs=3)
    assert "8 graphs (" in line
    reason = "there are 8 graphs already, and batches are of more kinds"
    assert reason in line
    assert capsys.readouterr().out.count(reason) == 1


def test_attributes_that_hooks_change_are_noticed() -> None:
    class Changing(Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = 1.0
            self.factors = [1.0]

        def loss(self, x: Tensor) -> Tensor:
            return super().loss(x) * self.factor * self.factors[0]

        def on_train_epoch_start(self) -> None:
            self.factor = 1.0 / (1 + self.current_epoch % 2)
            self.factors[0] = 1.0 + self.current_epoch // 2

    assert "5 graphs (" in compare(Changing, epochs=5)


def test_an_attribute_that_always_changes_is_named() -> None:
    class Changing(Module):
        factor = 1.0

        def loss(self, x: Tensor) -> Tensor:
            return super().loss(x) * self.factor

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.factor = 1.0 + self.global_step

    assert "factor changes too often" in compare(Changing)


@pytest.mark.parametrize("change", ["freeze", "mode", "replace", "buffer"])
def test_changes_of_the_module_are_noticed(change: str) -> None:
    class Changing(Perceptron):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(()))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * self.scale

        def on_train_epoch_start(self) -> None:
            trained = self.current_epoch % 2 == 0
            layer = self.layer[0]
            if change == "freeze":
                layer.requires_grad_(trained)
            elif change == "mode":
                self.layer[1].train(trained)
            elif change == "replace":
                bias = layer.bias.detach()
                layer.bias = nn.Parameter(bias.clone(), requires_grad=False)
            else:
                # Equal, and yet another tensor: the next step writes into this one.
                self.scale = torch.ones(())

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if change == "buffer":
                self.scale.mul_(0.9)

    line = compare(Changing, epochs=3)
    assert "not captured" not in line
    assert "graphs (" in line


def test_hooks_see_what_they_see_without_a_graph() -> None:
    calls: list[tuple[str, Any]] = []

    class Watched(Convolutions):
        def seen_gradients(self) -> list[Tensor | None]:
            gradients = [parameter.grad for parameter in self.parameters()]
            return [each if each is None else each.clone() for each in gradients]

        def note(self, name: str, value: Any) -> None:
            calls.append((name, value))

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.note("start", self.seen_gradients())

        def on_before_zero_grad(self, optimizer: Optimizer) -> None:
            self.note("zero", self.seen_gradients())

        def on_before_backward(self, loss: Tensor) -> None:
            self.note("before", (loss.detach().clone(), self.seen_gradients()))

        def on_after_backward(self) -> None:
            self.note("after", self.seen_gradients())
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)

        def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
            self.note("step", self.seen_gradients())

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            self.note("end", {**outputs, "output": outputs["output"].detach()})

    _, expected = fit(Watched(), **ACCUMULATED)
    calls_without, calls[:] = list(calls), []
    module = Watched()
    trainer, captured = fit(module, compile="step", **ACCUMULATED)
    assert "1 graph (" in line_of_step(trainer, module)
    assert_same([expected, captured])
    assert_equal_values(calls, calls_without)


def assert_equal_values(value: Any, expected: Any) -> None:
    """Nested values, tensors in them bit for bit."""
    assert type(value) is type(expected)
    if isinstance(value, Tensor):
        assert torch.equal(value, expected)
    elif isinstance(value, dict):
        assert_equal_values(list(value.items()), list(expected.items()))
    elif isinstance(value, (list, tuple)):
        assert len(value) == len(expected)
        for item, other in zip(value, expected, strict=True):
            assert_equal_values(item, other)
    else:
        assert value == expected


def test_a_resumed_run_continues_with_the_same_bits(tmp_path: Any) -> None:
    _, expected = fit(Perceptron(), epochs=3)
    path = tmp_path / "checkpoint"
    fit(Perceptron(), epochs=3, path=path, max_steps=10, compile="step")
    module = Perceptron()
    resumed, captured = fit(module, epochs=3, ckpt_path=path, compile="step")
    assert "1 graph (" in line_of_step(resumed, module)
    assert_same([expected, captured])


# -- what is not captured ------------------------------------------------------------------------------------------


class Counting(Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def loss(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().loss(x) * self.count


class Collecting(Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def loss(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        return super().loss(x)


class Rebinding(Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(2))

    def loss(self, x: Tensor) -> Tensor:
        output = self.layer(x)
        self.average = 0.9 * self.average + 0.1 * output.detach().mean(0)
        return (output - self.average).pow(2).mean()


class Item(Module):
    def loss(self, x: Tensor) -> Tensor:
        return super().loss(x) * (1 + abs(x.sum().item()))


class Branch(Module):
    def loss(self, x: Tensor) -> Tensor:
        loss = super().loss(x)
        return loss * 2 if x.sum() > 0 else loss


class Numbers(Module):
    def loss(self, x: Tensor) -> Tensor:
        return super().loss(x) * sum(x[0].tolist())


class Array(Module):
    def loss(self, x: Tensor) -> Tensor:
        return super().loss(x) * float(x.numpy().sum())


class Mask(Module):
    def loss(self, x: Tensor) -> Tensor:
        output = self.layer(x)
        return output[output > 0].pow(2).sum() + output.pow(2).mean()


class NumpyRandom(Module):
    def loss(self, x: Tensor) -> Tensor:
        return super().loss(x) * float(np.random.rand())


class PythonRandom(Module):
    def loss(self, x: Tensor) -> Tensor:
        return super().loss(x) * random.random()


class ByIndex(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * (1 + batch_idx % 2)


class ByStep(Module):
    def loss(self, x: Tensor) -> Tensor:
        return super().loss(x) * (1 + self.global_step % 2)


class ByEpoch(Module):
    def loss(self, x: Tensor) -> Tensor:
        try:
            epoch = self.trainer.current_epoch
        except Exception:
            epoch = 5
        return super().loss(x) * (1 + epoch)


class Hooked(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer.register_forward_hook(lambda layer, inputs, output: output * 2)


class HookedWeight(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer.weight.register_hook(lambda gradient: gradient * 2)


class Sparse(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Embedding(5, 3, sparse=True)
        self.optimizer_of = lambda weights: torch.optim.SGD(weights, lr=0.1)

    def batches(self, count: int) -> list[Any]:
        return [torch.randint(0, 5, (4,)) for _ in range(count)]


class Clamping(Module):
    def loss(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layer.weight.clamp_(-0.1, 0.1)
        return super().loss(x)


OUTSIDE = torch.ones(())


class Outside(Module):
    def loss(self, x: Tensor) -> Tensor:
        return super().loss(x) * OUTSIDE


class Popping(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch.pop("x"))

    def batches(self, count: int) -> Any:
        class Loader:
            def __init__(self, tensors: list[Tensor]) -> None:
                self.tensors = tensors

            def __iter__(self) -> Iterator[dict[str, Tensor]]:
                return iter([{"x": x, "y": x.clone()} for x in self.tensors])

            def __len__(self) -> int:
                return len(self.tensors)

        return Loader(super().batches(count))


class Arrays(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        return self.loss(x)

    def batches(self, count: int) -> list[Any]:
        return [(x, np.zeros(2)) for x in super().batches(count)]


class Skipping(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 2 else self.loss(batch)


REFUSED = [
    (Counting, "training_step changes count"),
    (Collecting, "training_step changes a list of the module"),
    (Rebinding, "training_step changes average"),
    (Item, "training_step reads a value out of a tensor"),
    (Branch, "training_step reads a value out of a tensor"),
    (Numbers, "training_step calls tolist of a tensor"),
    (Array, "training_step calls numpy of a tensor"),
    (Mask, "the shape of the result of aten.index.Tensor depends on values"),
    (NumpyRandom, "the graph of training_step draws different random numbers"),
    (PythonRandom, "the graph of training_step draws different random numbers"),
    (ByIndex, "training_step uses batch_idx"),
    (ByStep, "training_step reads progress of the Trainer"),
    (ByEpoch, "training_step reads current_epoch of the Trainer"),
    (Hooked, "each step calls a hook of layer"),
    (HookedWeight, "each step calls a hook of the gradient of layer.weight"),
    (Sparse, "a gradient is sparse"),
    (Clamping, "training_step changes a parameter"),
    (Outside, "uses a tensor that is neither in the batch nor an attribute"),
    (Popping, "training_step changes its batch"),
    (Arrays, "the batch holds a ndarray"),
    (Skipping, "training_step returned no loss"),
]


@pytest.mark.parametrize(("kind", "reason"), REFUSED)
def test_what_would_not_repeat_itself_runs_without_a_graph(
    kind: type[Module], reason: str, capsys: Captured
) -> None:
    line = compare(kind)
    assert f"not captured: {reason}" in line or reason in line
    assert "graph (" not in line
    assert capsys.readouterr().out.count(reason) == 1


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class OwnBackward(Module):
    def backward(self, loss: Tensor) -> None:
        (loss * 2).backward()


class TwoLosses(Module):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"a": self.loss(batch), "b": self.other(batch).pow(2).mean()}

    def configure_optimizers(self) -> Any:
        return {"a": sgd(self.layer.parameters()), "b": sgd(self.other.parameters())}


WHOLE_FITS = [
    (Manual, {}, "the module steps its optimizers itself"),
    (OwnBackward, {}, "backward is overridden"),
    (TwoLosses, {}, "each optimizer has a loss of its own"),
    (Module, {"detect_anomaly": True}, "detect_anomaly=True"),
    (Module, {"precision": "16-mixed"}, "the precision scales the loss"),
]


@pytest.mark.parametrize(("kind", "options", "reason"), WHOLE_FITS)
def test_some_fits_have_no_graph(
    kind: type[Module], options: dict[str, Any], reason: str, capsys: Captured
) -> None:
    compare(kind, **options)
    assert capsys.readouterr().out.count(reason) == 1


def test_a_callback_that_repeats_steps_has_them_without_a_graph(
    capsys: Captured,
) -> None:
    fit(Module(), compile="step", callbacks=[ReplayCheck(2)])
    assert "a callback runs steps again" in capsys.readouterr().out


def test_explain_says_beforehand_that_nothing_can_be_captured() -> None:
    trainer = tk.Trainer(compile="step", **QUIET)
    assert "not captured: the module steps its optimizers" in line_of_step(
        trainer, Manual()
    )
    assert "at the second batch of each shape" in line_of_step(trainer, Module())
    distributed = tk.Trainer(
        compile="step", **{**QUIET, "devices": 2, "strategy": "ddp"}
    )
    line = line_of_step(distributed, Module())
    assert "not captured: under ddp its forward and backward exchange data" in line


def test_another_word_is_refused() -> None:
    with pytest.raises(tk.ConfigurationError, match='True, False, "step" or arguments'):
        tk.Trainer(compile="steps", **QUIET)
