"""What validation and prediction cost, exactly: Python calls for each batch over a hand-written loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.calls import python_calls
from trainer_kit import Callback, Trainer, TrainModule


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Linear(4, 3)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y)

    def predict_step(self, batch, batch_idx):
        return self.model(batch[0])


class Mean(Net):
    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.log("loss", loss)
        return loss


def batches_of(kind, count):
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(2 * count, 4, generator=generator)
    y = torch.randint(3, (2 * count,), generator=generator)
    if kind == "loader":
        return DataLoader(TensorDataset(x, y), batch_size=2)
    return list(zip(x.split(2), y.split(2), strict=True))


def per_batch(run, kind):
    """The difference between a long and a short run, so that whatever comes once cancels out."""
    long, short = batches_of(kind, 70), batches_of(kind, 20)
    for _ in range(3):  # imports, and caches, such as those of abstract classes
        run(short)
    calls = python_calls(lambda: run(long)) - python_calls(lambda: run(short))
    # A whole number for each batch; a few calls more or less come from caches of Python.
    return round(calls / 50)


def evaluate(module, verb="validate", **options):
    """A function that evaluates a loader."""

    def run(batches):
        trainer = Trainer(
            accelerator="cpu", barebones=not options, logger=False, **options
        )
        if verb == "predict":
            return trainer.predict(module, batches)
        return trainer.validate(module, batches, verbose=False)

    return run


def hand_written(model, predict=False, mean=False):
    """The same without a library."""

    def run(batches):
        total, samples, outputs = torch.zeros(()), 0, []
        with torch.inference_mode():
            for x, y in batches:
                if predict:
                    outputs.append(model(x))
                    continue
                loss = nn.functional.cross_entropy(model(x), y)
                if mean:
                    total += loss * len(x)
                    samples += len(x)
        if mean:
            return float(total / samples)
        return outputs

    return run


# The step, and `self.model` in it; a list of batches does not know their sizes; a logged value takes two calls, and
# `len` of a tensor in the hand-written loop does as well; indices of predictions are recorded, and read.
@pytest.mark.parametrize(
    ("module", "kind", "most"),
    [(Net, "list", 3), (Net, "loader", 2), (Mean, "list", 3), (Mean, "loader", 2)],
)
def test_a_validated_batch_takes_few_calls_more_than_by_hand(module, kind, most):
    net = module()
    plain = hand_written(net.model, mean=module is Mean)
    assert per_batch(evaluate(net), kind) - per_batch(plain, kind) <= most


@pytest.mark.parametrize(("kind", "most"), [("list", 4), ("loader", 3)])
def test_a_predicted_batch_takes_few_calls_more_than_by_hand(kind, most):
    net = Net()
    plain = hand_written(net.model, predict=True)
    assert per_batch(evaluate(net, "predict"), kind) - per_batch(plain, kind) <= most


def test_callbacks_that_listen_elsewhere_add_no_call():
    class Elsewhere(Callback):
        def on_train_batch_end(self, trainer, module, *arguments): ...
        def on_validation_epoch_end(self, trainer, module): ...
        def on_test_batch_end(self, trainer, module, *arguments): ...

    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    listening = evaluate(Net(), callbacks=[Elsewhere() for _ in range(20)], **quiet)
    silent = evaluate(Net(), callbacks=[], **quiet)
    assert per_batch(listening, "list") == per_batch(silent, "list")


@pytest.mark.parametrize("kind", ["list", "loader"])
def test_predictions_are_those_of_a_hand_written_loop(kind):
    net = Net()
    batches = batches_of(kind, 9)
    predictions = evaluate(net, "predict")(batches)
    expected = hand_written(net.model, predict=True)(batches)
    assert all(map(torch.equal, predictions, expected))
    assert len(predictions) == len(expected) == 9


@pytest.mark.parametrize("kind", ["list", "loader"])
def test_a_mean_is_that_of_a_hand_written_loop(kind):
    net = Mean()
    batches = batches_of(kind, 9)
    (values,) = evaluate(net)(batches)
    assert values["loss"] == pytest.approx(hand_written(net.model, mean=True)(batches))


def test_several_loaders_have_their_index_under_autocast():
    seen = []

    class Indexed(Net):
        def validation_step(self, batch, batch_idx, dataloader_idx):
            seen.append((batch_idx, dataloader_idx, self.model(batch[0]).dtype))

    loaders = [batches_of("list", 2), batches_of("loader", 1)]
    trainer = Trainer(accelerator="cpu", barebones=True, precision="bf16-mixed")
    trainer.validate(Indexed(), loaders, verbose=False)
    wide = torch.bfloat16
    assert seen == [(0, 0, wide), (1, 0, wide), (0, 1, wide)]
