"""Validation, test and prediction: what steps are given, modes, gradients, and nothing left behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from trainer_kit import Callback, Trainer, TrainModule


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.norm = nn.BatchNorm1d(1)
        self.dropout = nn.Dropout(0.5)
        self.calls = []

    def forward(self, x):
        return self.dropout(self.norm(self.layer(x)))

    def training_step(self, batch, batch_idx):
        return self(batch).pow(2).mean()

    def evaluation_step(self, batch, batch_idx, dataloader_idx=None):
        self.calls.append((batch_idx, dataloader_idx, len(batch)))
        return self(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Plain(Net):
    validation_step = test_step = predict_step = Net.evaluation_step


VERBS = ("validate", "test", "predict")


def loader(count=5, batch_size=2, shuffle=False):
    return DataLoader(
        torch.arange(float(count)).unsqueeze(1), batch_size=batch_size, shuffle=shuffle
    )


def trainer(**options):
    return Trainer(accelerator="cpu", **{"barebones": True, "max_epochs": 1, **options})


def evaluate(module, loaders=None, **options):
    made = trainer(**options)
    for verb in VERBS:
        getattr(made, verb)(module, loader() if loaders is None else loaders)
    return made


def state(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(first, second):
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def test_one_loader_gives_no_index():
    module = Plain()
    evaluate(module)
    assert module.calls == [(0, None, 2), (1, None, 2), (2, None, 1)] * 3


def test_several_loaders_give_theirs():
    module = Plain()
    evaluate(module, [loader(3), loader(1)])
    assert module.calls == [(0, 0, 2), (1, 0, 1), (0, 1, 1)] * 3


def test_loaders_by_name_are_several():
    module = Plain()
    evaluate(module, {"a": loader(1), "b": loader(2)})
    assert module.calls == [(0, 0, 1), (0, 1, 2)] * 3


def test_a_step_that_takes_fewer_arguments_is_given_fewer():
    seen = []

    class Two(Net):
        def validation_step(self, batch, batch_idx):
            seen.append(batch_idx)

    class One(Net):
        def validation_step(self, batch):
            seen.append(len(batch))

    trainer().validate(Two(), [loader(3), loader(1)])
    trainer().validate(One(), loader(3))
    assert seen == [0, 1, 0, 2, 1]


def test_hooks_are_given_outputs_and_loader():
    seen = []

    class Looks(Callback):
        def on_validation_batch_end(
            self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0
        ):
            seen.append((tuple(outputs.shape), batch_idx, dataloader_idx))

    trainer(callbacks=Looks()).validate(Plain(), [loader(3), loader(1)])
    assert seen == [((2, 1), 0, 0), ((1, 1), 1, 0), ((1, 1), 0, 1)]


@pytest.mark.parametrize("mode", [True, False])
def test_evaluation_sets_modes_and_gradients_and_restores_them(mode):
    seen = []

    class Looks(Plain):
        def evaluation_step(self, batch, batch_idx, dataloader_idx=None):
            out = self(batch)
            seen.append(
                (
                    self.training,
                    self.norm.training,
                    self.dropout.training,
                    out.requires_grad,
                    out.is_inference(),
                )
            )
            return out

        validation_step = test_step = predict_step = evaluation_step

    module = Looks()
    module.dropout.eval()
    evaluate(module, loader(1), inference_mode=mode)
    assert seen == [(False, False, False, False, mode)] * 3
    assert (module.training, module.norm.training, module.dropout.training) == (
        True,
        True,
        False,
    )
    assert torch.is_grad_enabled()


def test_a_module_that_was_in_evaluation_mode_stays_there():
    module = Plain().eval()
    evaluate(module)
    assert not any(part.training for part in module.modules())


def test_nothing_of_the_module_changes():
    module = Plain()
    before = state(module)
    evaluate(module)
    assert same(before, state(module))


def test_validation_inside_a_fit_changes_neither_weights_nor_random_state():
    """Also where it draws random numbers itself, and where its loader is shuffled."""

    class Draws(Net):
        def validation_step(self, batch, batch_idx):
            torch.rand(3)

    def fit(val):
        torch.manual_seed(0)
        module = Draws()
        made = trainer(max_epochs=2, seed=1, num_sanity_val_steps=2)
        made.fit(module, loader(6, shuffle=True), val)
        return state(module), torch.rand(1)

    (without, drawn), (with_it, drawn_too) = fit(None), fit(loader(4, shuffle=True))
    assert same(without, with_it)
    assert torch.equal(drawn, drawn_too)


def test_validation_takes_place_at_the_weights_of_now():
    seen = []

    class Looks(Net):
        def validation_step(self, batch, batch_idx):
            seen.append(self.layer.weight.detach().clone())

        def on_train_epoch_end(self):
            seen.append(self.layer.weight.detach().clone())

    trainer(max_epochs=2).fit(Looks(), loader(2), loader(1))
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[2], seen[3])
    assert not torch.equal(seen[0], seen[2])


def test_gradients_survive_validation_in_the_middle_of_an_epoch():
    """Lightning keeps them, and `on_train_batch_end` of the next step may look at them."""
    made = trainer(max_epochs=1, val_check_interval=1)
    seen = []

    class Validates(Net):
        def validation_step(self, batch, batch_idx): ...

        def on_before_optimizer_step(self, optimizer):
            seen.append(self.layer.weight.grad is not None)

    made.fit(Validates(), loader(6), loader(1))
    assert seen == [True] * 3


def test_an_exception_restores_modes_and_gradients():
    class Fails(Net):
        def validation_step(self, batch, batch_idx):
            raise KeyError("mine")

    module = Fails()
    made = trainer()
    with pytest.raises(KeyError, match="mine"):
        made.validate(module, loader())
    assert all(part.training for part in module.modules())
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert not made.evaluating


def test_every_sample_is_seen_once():
    seen = []

    class Looks(Net):
        def test_step(self, batch, batch_idx):
            seen.extend(batch.flatten().tolist())

    trainer().test(Looks(), loader(7, 3))
    assert seen == list(range(7))


def test_a_shuffled_loader_is_obeyed():
    outputs = trainer(seed=3).predict(Echo(), loader(20, 4, shuffle=True))
    order = torch.cat(outputs).flatten().tolist()
    assert sorted(order) == list(range(20))
    assert order != sorted(order)


class Echo(Net):
    def predict_step(self, batch, batch_idx):
        return batch


def test_predictions_may_be_anything():
    class Things(Net):
        def predict_step(self, batch, batch_idx):
            return {"index": batch_idx, "text": str(len(batch))} if batch_idx else None

    assert trainer().predict(Things(), loader(3)) == [None, {"index": 1, "text": "1"}]


def test_a_prediction_is_forward_by_default():
    module = Net().eval()
    outputs = trainer().predict(module, loader(3))
    assert torch.equal(torch.cat(outputs), module(torch.arange(3.0).unsqueeze(1)))


def test_predictions_of_nothing_are_an_empty_list():
    assert trainer(limit_predict_batches=0).predict(Echo(), loader(3)) == []


def test_an_evaluation_that_logs_nothing_returns_empty_dicts():
    assert trainer().test(Plain(), [loader(1), loader(1)]) == [{}, {}]


def test_the_learning_state_of_a_fit_survives_an_evaluation_between_two_fits():
    made = trainer()
    module = Plain()
    made.fit(module, loader(4))
    step = made.global_step
    made.test(module, loader(4))
    assert made.global_step == step


@pytest.mark.world_size(2)
@pytest.mark.parametrize("count", [1, 5, 8])
def test_predictions_of_two_ranks_come_in_the_order_of_the_data(count):
    made = Trainer(accelerator="cpu", strategy="ddp", devices=2, barebones=True)
    outputs = made.predict(Echo(), loader(count))
    assert torch.cat(outputs).flatten().tolist() == list(range(count))


@pytest.mark.world_size(2)
def test_two_ranks_see_every_sample_once():
    class Counts(Net):
        def test_step(self, batch, batch_idx):
            self.log("count", float(len(batch)), reduce_fx="sum")
            self.log("sum", batch.sum(), reduce_fx="sum")

    made = Trainer(accelerator="cpu", strategy="ddp", devices=2, barebones=True)
    assert made.test(Counts(), loader(7), verbose=False) == [
        {"count": 7.0, "sum": 21.0}
    ]
