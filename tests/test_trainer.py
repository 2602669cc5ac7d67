"""Every argument and method of `Trainer`: it works, shown by what happens, or it is refused by name."""

from __future__ import annotations

import math
import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from trainer_kit import Callback, DataModule, Trainer, TrainModule, seed_everything
from trainer_kit.callbacks import GradientAccumulation, ModelCheckpoint, Timer
from trainer_kit.core import seed as seeds
from trainer_kit.core.errors import (
    CheckpointError,
    ConfigurationError,
    DataError,
    StrategyError,
    TrainerKitError,
)
from trainer_kit.loggers import CSVLogger

OFF = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"),
    False,
)


class Net(TrainModule):
    """Notes every batch it is given, by step."""

    def __init__(self, lr=0.001):
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(2, 1)
        self.seen = {"train": [], "val": [], "test": []}

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, batch_idx):
        self.seen["train"].append(batch)
        loss = self(batch).pow(2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.seen["val"].append(batch)
        self.log("val_loss", self(batch).pow(2).mean())

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.seen["test"].append(batch)
        self.log("test_loss", self(batch).pow(2).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

    @property
    def counts(self):
        return {name: len(batches) for name, batches in self.seen.items()}


class Samples(Dataset):
    """Counts what is read from it."""

    def __init__(self, count=20):
        self.count, self.reads = count, 0

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index >= self.count:
            raise IndexError(index)
        self.reads += 1
        return torch.tensor([float(index), 1.0])


class Stream(IterableDataset):
    """``claimed`` is its length for whoever asks; None for none."""

    def __init__(self, count, claimed=None):
        self.count, self.claimed = count, claimed

    def __iter__(self):
        return iter(torch.ones(self.count, 2))

    def __len__(self):
        if self.claimed is None:
            raise TypeError("no length")
        return self.claimed


class Order(Callback):
    """Notes (hook, step) of a few hooks."""

    def __init__(self):
        self.calls = []

    def on_train_epoch_start(self, trainer, module):
        self.calls.append(("epoch_start", trainer.global_step))

    def on_train_epoch_end(self, trainer, module):
        self.calls.append(("epoch_end", trainer.global_step))

    def on_validation_start(self, trainer, module):
        self.calls.append(
            ("sanity" if trainer.sanity_checking else "validation", trainer.global_step)
        )

    def on_train_end(self, trainer, module):
        self.calls.append(("end", trainer.global_step))

    def of(self, name):
        return [step for hook, step in self.calls if hook == name]


def loader(count=20, batch_size=2, **options):
    return DataLoader(Samples(count), batch_size=batch_size, **options)


def make(**options):
    return Trainer(accelerator="cpu", **{**OFF, **options})


def fit(module=None, train=None, val=None, **options):
    """10 batches of 2 samples, unless told otherwise."""
    order = Order()
    callbacks = [order, *options.pop("callbacks", [])]
    trainer = make(callbacks=callbacks, **{"max_epochs": 2, **options})
    trainer.fit(
        Net() if module is None else module, loader() if train is None else train, val
    )
    trainer.order = order
    return trainer


def progress(trainer):
    p = trainer.progress
    return p.epoch, p.batch, p.step


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def files(directory):
    return sorted(
        str(path.relative_to(directory))
        for path in Path(directory).rglob("*")
        if path.is_file()
    )


# -- how long ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_epochs": 2}, (2, 20, 20)),
        ({"max_epochs": 0}, (0, 0, 0)),
        ({"max_epochs": 5, "max_steps": 13}, (1, 13, 13)),
        ({"max_epochs": -1, "max_steps": 13}, (1, 13, 13)),
        ({"max_epochs": None, "max_steps": 13}, (1, 13, 13)),
        ({"max_epochs": None, "max_steps": 0}, (0, 0, 0)),
        ({"max_epochs": None, "max_steps": 20}, (2, 20, 20)),
        ({"max_epochs": None, "max_duration": "3ep"}, (3, 30, 30)),
        ({"max_epochs": None, "max_duration": "13ba"}, (1, 13, 13)),
        ({"max_epochs": None, "max_duration": "13st"}, (1, 13, 13)),
        ({"max_epochs": None, "max_duration": "25sp"}, (1, 13, 13)),
        (
            {"max_epochs": None, "max_duration": "13ba", "accumulate_grad_batches": 2},
            (1, 14, 7),
        ),
        (
            {"max_epochs": None, "max_steps": 3, "accumulate_grad_batches": 4},
            (1, 10, 3),
        ),
        ({"max_epochs": None, "max_duration": timedelta(0)}, (0, 0, 0)),
        ({"max_epochs": None, "max_duration": timedelta(microseconds=1)}, (0, 1, 1)),
        ({"max_epochs": None, "max_time": timedelta(microseconds=1)}, (0, 1, 1)),
        ({"max_epochs": None, "max_time": {"microseconds": 1}}, (0, 1, 1)),
        ({"max_epochs": 1, "max_time": "00:01:00:00"}, (1, 10, 10)),
        ({"max_epochs": 1, "max_duration": "1h"}, (1, 10, 10)),
    ],
)
def test_a_run_ends_at_the_first_limit(options, expected):
    assert progress(fit(**options)) == expected


def test_a_run_in_tokens_ends_when_so_many_were_seen():
    class Tokens(Net):
        def loss_weight(self, batch):
            return 7 * len(batch)

    trainer = fit(Tokens(), max_epochs=None, max_duration="100tok")
    assert (trainer.progress.tokens, trainer.progress.step) == (112, 8)


@pytest.mark.parametrize("argument", ["max_duration", "val_check_interval"])
def test_a_limit_in_tokens_without_a_count_is_refused_before_the_first_step(argument):
    module = Net()
    with pytest.raises(ConfigurationError, match=r"(?s)tokens.*loss_weight"):
        fit(module, val=loader(4), **{"max_epochs": 1, argument: "100tok"})
    assert module.counts["train"] == 0


@pytest.mark.parametrize(
    "options",
    [{"min_epochs": 2}, {"min_steps": 15}, {"min_epochs": 1, "min_steps": 15}],
)
def test_a_stop_is_put_off_until_the_minimum_and_then_asked_again(options):
    class Stops(Callback):
        def on_train_step_end(self, trainer, module):
            if trainer.global_step >= 3:
                trainer.stop("enough")

    trainer = fit(callbacks=[Stops()], max_epochs=5, **options)
    assert trainer.global_step == (
        20 if "min_epochs" in options and options["min_epochs"] == 2 else 15
    )


def test_a_stop_that_is_not_asked_again_waits_for_the_minimum():
    class StopsOnce(Callback):
        def on_train_step_end(self, trainer, module):
            if trainer.global_step == 3:
                trainer.should_stop = True

    assert progress(fit(callbacks=[StopsOnce()], min_steps=5)) == (0, 5, 5)


def test_the_end_inside_an_epoch_still_ends_the_epoch_for_its_hooks():
    trainer = fit(max_epochs=None, max_steps=13)
    assert trainer.order.calls == [
        ("epoch_start", 0),
        ("epoch_end", 10),
        ("epoch_start", 10),
        ("epoch_end", 13),
        ("end", 13),
    ]


@pytest.mark.parametrize(
    "limit", [{"max_steps": 13}, {"max_duration": "13ba"}, {"limit_train_batches": 3}]
)
def test_nothing_is_read_and_thrown_away(limit):
    data = Samples()
    trainer = fit(train=DataLoader(data, batch_size=2), max_epochs=2, **limit)
    assert data.reads == trainer.progress.samples


def test_an_iterator_is_not_asked_for_more_than_is_used():
    class Counts:
        asked = 0

        def __iter__(self):
            for _ in range(100):
                type(self).asked += 1
                yield torch.ones(2, 2)

    fit(train=Counts(), max_epochs=None, max_steps=5, accumulate_grad_batches=2)
    assert Counts.asked == 10


def test_a_second_fit_starts_from_scratch():
    trainer = make(max_epochs=2)
    first, second = Net(), Net()
    trainer.fit(first, loader())
    trainer.fit(second, loader())
    assert (first.counts["train"], second.counts["train"]) == (20, 20)
    assert progress(trainer) == (2, 20, 20)
    trainer.fit(second, loader())
    assert second.counts["train"] == 40


# -- how much of the data ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(3, 3), (0.25, 2), (1.0, 10), (100, 10), (0, 0), (0.0, 0), (1, 1)],
)
def test_limits_in_batches_and_fractions(limit, expected):
    module = Net()
    names = ("train", "val", "test", "predict")
    trainer = fit(
        module,
        val=loader(),
        max_epochs=1,
        **{f"limit_{name}_batches": limit for name in names},
    )
    assert trainer.num_training_batches == expected
    if expected:
        assert module.counts == {
            "train": expected,
            "val": expected + min(2, expected),
            "test": 0,
        }
        assert trainer.num_val_batches == [expected]
        trainer.test(module, loader(), verbose=False)
        assert module.counts["test"] == expected
        assert len(trainer.predict(module, loader())) == expected
    else:
        assert module.counts == {"train": 0, "val": 0, "test": 0}


def test_limits_hold_for_each_loader():
    module = Net()
    trainer = make(limit_test_batches=0.5)
    trainer.test(module, [loader(20), loader(8)], verbose=False)
    assert trainer.num_test_batches == [5, 2]
    assert module.counts["test"] == 7


def test_a_fraction_of_an_unknown_length_is_refused_by_name():
    with pytest.raises(DataError, match="limit_train_batches"):
        fit(train=DataLoader(Stream(5)), limit_train_batches=0.5)


def test_a_fraction_that_is_less_than_a_batch_is_refused_by_name():
    with pytest.raises(DataError, match="limit_train_batches"):
        fit(limit_train_batches=0.01)


def test_overfitting_sees_the_same_few_batches_unshuffled_again_and_again():
    module = Net()
    data = Samples()
    fit(
        module,
        DataLoader(data, batch_size=2, shuffle=True),
        loader(),
        overfit_batches=3,
        num_sanity_val_steps=0,
    )
    assert [batch[:, 0].tolist() for batch in module.seen["train"]] == [
        [0, 1],
        [2, 3],
        [4, 5],
    ] * 2
    assert module.counts["val"] == 6


def test_overfitting_on_a_fraction():
    assert fit(max_epochs=1, overfit_batches=0.2).num_training_batches == 2


def test_accumulation():
    trainer = fit(max_epochs=1, accumulate_grad_batches=4)
    assert progress(trainer) == (1, 10, 3)
    assert trainer.accumulate_grad_batches == 4


def test_accumulation_by_epoch_and_as_a_callback():
    assert progress(fit(accumulate_grad_batches={0: 1, 1: 5})) == (2, 20, 12)
    assert progress(fit(callbacks=[GradientAccumulation(5)])) == (2, 20, 4)
    with pytest.raises(ConfigurationError, match="accumulation is set twice"):
        make(accumulate_grad_batches=2, callbacks=[GradientAccumulation(5)])
    with pytest.raises(ConfigurationError, match="accumulation"):
        make(accumulate_grad_batches=0)


def test_a_global_batch_is_divided_over_the_window():
    module = Net()
    trainer = fit(module, max_epochs=1, global_batch_size=8, accumulate_grad_batches=2)
    assert {len(batch) for batch in module.seen["train"]} == {4}
    assert progress(trainer) == (1, 5, 3)
    with pytest.raises(DataError, match=r"(?s)global_batch_size=9.*multiple of 2"):
        fit(global_batch_size=9, accumulate_grad_batches=2)


@pytest.mark.parametrize("weighting", [True, False])
def test_weighting_decides_the_mean_of_a_ragged_window(weighting):
    """Samples 0 1 and 2: the mean over samples, or the mean of the two batches' means."""

    class Mean(Net):
        def training_step(self, batch, batch_idx):
            return self.layer.weight[0, 0] * batch[:, 0].mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    module = Mean()
    before = module.layer.weight[0, 0].item()
    fit(
        module,
        loader(3),
        max_epochs=1,
        accumulate_grad_batches=2,
        loss_weighting=weighting,
    )
    gradient = 1.0 if weighting else (0.5 + 2.0) / 2
    assert module.layer.weight[0, 0].item() == pytest.approx(before - gradient)


# -- validation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [10, 20]),
        ({"val_check_interval": 1.0}, [10, 20]),
        ({"val_check_interval": 0.5}, [5, 10, 15, 20]),
        ({"val_check_interval": 0.3}, [3, 6, 9, 13, 16, 19]),
        ({"val_check_interval": 4}, [4, 8, 14, 18]),
        ({"val_check_interval": "4ba"}, [4, 8, 14, 18]),
        ({"val_check_interval": "4st"}, [4, 8, 12, 16, 20]),
        ({"val_check_interval": "12sp"}, [6, 12, 18]),
        ({"check_val_every_n_epoch": 2}, [20]),
        ({"check_val_every_n_epoch": 3}, []),
        ({"check_val_every_n_epoch": 2, "val_check_interval": 5}, [15, 20]),
        ({"check_val_every_n_epoch": None, "val_check_interval": 7}, [7, 14]),
        ({"check_val_every_n_epoch": None, "val_check_interval": 15}, [15]),
        ({"limit_val_batches": 0}, []),
        ({"max_steps": 13}, [10]),
        ({"val_check_interval": 5, "accumulate_grad_batches": 2}, [3, 5, 8, 10]),
    ],
)
def test_validation_runs_when_it_is_due(options, expected):
    trainer = fit(val=loader(4), num_sanity_val_steps=0, **options)
    assert trainer.order.of("validation") == expected


def test_an_interval_that_is_never_reached_is_refused():
    with pytest.raises(
        ConfigurationError,
        match=r"(?s)validation would never run.*val_check_interval=11",
    ):
        fit(val=loader(4), val_check_interval=11)


def test_an_interval_above_a_length_that_is_a_hint_is_refused():
    """As in Lightning: the data's ``len`` is the best that is known before step 1."""

    class Hint(Stream):
        def __len__(self):
            return 10

    problem = (
        r"(?s)would never run.*10 batches an epoch, as the data's own len\(\) says"
    )
    with pytest.raises(ConfigurationError, match=problem):
        fit(train=DataLoader(Hint(20)), val=loader(4), val_check_interval=11)
    across = {"val_check_interval": 11, "check_val_every_n_epoch": None}
    fit(train=DataLoader(Hint(20)), val=loader(4), **across)


def test_a_fraction_of_an_unknown_epoch_is_refused():
    with pytest.raises(
        ConfigurationError,
        match=r"(?s)length of the epoch is unknown.*val_check_interval=0.5",
    ):
        fit(train=DataLoader(Stream(5)), val=loader(4), val_check_interval=0.5)


@pytest.mark.parametrize(
    ("steps", "batches"), [(None, 2), (0, 0), (1, 1), (3, 3), (-1, 5), (9, 5)]
)
def test_the_sanity_check_tries_so_many_batches(steps, batches):
    module = Net()
    trainer = fit(module, val=loader(10), num_sanity_val_steps=steps, max_steps=1)
    assert module.counts["val"] == batches
    assert trainer.order.of("sanity") == [0] * bool(batches)
    assert not trainer.sanity_checking


def test_validation_can_be_asked_for():
    class Asks(Callback):
        def on_train_step_end(self, trainer, module):
            if trainer.global_step == 3:
                trainer.request_validation("a look")

    assert fit(val=loader(4), callbacks=[Asks()], max_epochs=1).order.of(
        "validation"
    ) == [3, 10]


def test_without_a_validation_step_nothing_validates():
    class Only(Net):
        validation_step = TrainModule.validation_step

    assert fit(Only(), val=loader(4)).order.of("validation") == []


def test_inference_mode_is_torch_s_unless_switched_off_and_never_inside_a_fit():
    seen = []

    class Looks(Net):
        def validation_step(self, batch, batch_idx):
            seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    for mode in (True, False):
        trainer = make(max_epochs=1, num_sanity_val_steps=0, inference_mode=mode)
        trainer.fit(Looks(), loader(2), loader(2))
        trainer.validate(Looks(), loader(2), verbose=False)
    assert seen == [(False, False), (True, False), (False, False), (False, False)]


# -- data ----------------------------------------------------------------------------------------------------------


def test_an_iterable_that_is_shorter_than_its_length_ends_its_epochs():
    module = Net()
    trainer = fit(
        module,
        DataLoader(Stream(6, claimed=20), batch_size=2),
        loader(4),
        num_sanity_val_steps=0,
    )
    assert progress(trainer) == (2, 6, 6)
    assert trainer.order.of("epoch_end") == trainer.order.of("validation") == [3, 6]


def test_an_iterable_without_a_length():
    trainer = fit(
        train=DataLoader(Stream(6), batch_size=2), val=loader(4), num_sanity_val_steps=0
    )
    assert progress(trainer) == (2, 6, 6)
    assert trainer.num_training_batches == math.inf
    assert trainer.order.of("validation") == [3, 6]


@pytest.mark.parametrize(
    "make_empty",
    [
        list,
        lambda: DataLoader(Stream(0)),
        lambda: DataLoader(Stream(0, claimed=4)),
        lambda: iter(()),
    ],
)
@pytest.mark.parametrize(
    "limit", [{"max_epochs": 3}, {"max_epochs": None, "max_steps": 3}]
)
def test_an_empty_loader_is_an_error(make_empty, limit):
    """Also where only steps are counted, of which there will never be any."""

    class Patience(Callback):
        epochs = 0

        def on_train_epoch_start(self, trainer, module):
            self.epochs += 1
            assert self.epochs < 10, "it never ends"

    module = Net()
    with pytest.raises(DataError, match="the training loader returned no batch"):
        fit(module, make_empty(), callbacks=[Patience()], **limit)
    assert module.counts["train"] == 0


def test_any_tree_of_loaders():
    class Pairs(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["a"] + batch["b"][0], batch_idx)

    trainer = fit(Pairs(), {"a": loader(8), "b": [loader(8)]}, max_epochs=1)
    assert progress(trainer) == (1, 4, 4)


def test_batches_that_are_tuples_and_dicts():
    class Takes(Net):
        def training_step(self, batch, batch_idx):
            x = batch["x"] if isinstance(batch, dict) else batch[0]
            return super().training_step(x, batch_idx)

    fit(
        Takes(),
        DataLoader(TensorDataset(torch.ones(4, 2), torch.ones(4)), batch_size=2),
        max_epochs=1,
    )
    fit(Takes(), [{"x": torch.ones(2, 2), "name": "first"}], max_epochs=1)


@pytest.mark.parametrize("wrong", [5, torch.ones(4, 2), Samples(), lambda: loader()])
def test_an_object_that_is_not_a_loader_is_refused(wrong):
    with pytest.raises(DataError, match="not a loader"):
        fit(train=wrong)


def test_missing_data_is_an_error_that_names_its_possible_sources():
    with pytest.raises(
        DataError, match=r"(?s)fit needs training data.*train_dataloader"
    ):
        make(max_epochs=1).fit(Net())
    with pytest.raises(DataError, match=r"(?s)test needs data.*test_dataloader"):
        make().test(Net())


def test_the_order_is_a_function_of_the_seed(monkeypatch):
    monkeypatch.setattr(seeds, "_last_seed", None)

    def order(**options):
        module = Net()
        fit(module, loader(20, shuffle=True), **options)
        return torch.cat(module.seen["train"])[:, 0].tolist()

    first = order(seed=1)
    torch.manual_seed(99)
    assert order(seed=1) == first
    assert order(seed=2) != first
    assert sorted(first[:20]) == sorted(first[20:]) == list(map(float, range(20)))
    assert first[:20] != first[20:]
    with seeds.preserved_rng():
        seed_everything(1)
        assert order() == first
        assert order(seed=2) != first


def test_modules_bring_their_own_loaders():
    class Brings(Net):
        def train_dataloader(self):
            return loader(4)

        def val_dataloader(self):
            return [loader(2), loader(2)]

        def test_dataloader(self):
            return loader(6)

        def predict_dataloader(self):
            return loader(8)

    module = Brings()
    trainer = make(max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(module)
    trainer.test(module, verbose=False)
    assert module.counts == {"train": 2, "val": 2, "test": 3}
    assert len(trainer.predict(module)) == 4


class Data(DataModule):
    def __init__(self, batch_size=2):
        super().__init__()
        self.save_hyperparameters()
        self.stages, self.epochs = [], 0

    def setup(self, stage):
        self.stages.append(stage)
        self.samples = Samples()

    def train_dataloader(self):
        return DataLoader(self.samples, batch_size=self.hparams.batch_size)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    def state_dict(self):
        return {"epochs": self.trainer.current_epoch}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]


def test_a_datamodule_brings_everything_by_either_name():
    data, module = Data(), Net()
    trainer = make(max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(module, datamodule=data)
    trainer.fit(module, data)
    trainer.validate(module, data, verbose=False)
    trainer.test(module, datamodule=data, verbose=False)
    trainer.predict(module, data)
    assert data.stages == ["fit", "fit", "validate", "test", "predict"]
    assert module.counts == {"train": 20, "val": 30, "test": 10}
    assert trainer.datamodule is data


def test_a_datamodule_of_ready_datasets():
    data = DataModule.from_datasets(
        Samples(6), Samples(4), Samples(2), Samples(8), batch_size=2
    )
    module = Net()
    trainer = make(max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    assert module.counts == {"train": 3, "val": 2, "test": 1}
    assert len(trainer.predict(module, datamodule=data)) == 4


def test_a_datamodule_that_is_given_twice_is_refused():
    with pytest.raises(ConfigurationError, match="datamodule is set twice"):
        make(max_epochs=1).fit(Net(), Data(), datamodule=Data())


def test_passed_loaders_win_over_the_datamodule():
    module = Net()
    make(max_epochs=1).fit(module, loader(4), datamodule=Data())
    assert module.counts["train"] == 2


# -- switches ------------------------------------------------------------------------------------------------------


class Switches(Callback):
    """torch's switches as they are in each verb."""

    def __init__(self):
        self.seen = []

    def look(self, *_):
        self.seen.append(
            (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
                torch.backends.cudnn.benchmark,
                torch.is_anomaly_enabled(),
            )
        )

    on_train_start = on_test_start = on_predict_start = look


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (False, False, False, False)),
        ({"deterministic": True}, (True, False, False, False)),
        ({"deterministic": "warn"}, (True, True, False, False)),
        ({"benchmark": True}, (False, False, True, False)),
        ({"detect_anomaly": True}, (False, False, False, True)),
    ],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_switches_hold_during_each_verb_and_not_after_it(options, expected):
    switches = Switches()
    trainer = make(max_epochs=1, callbacks=[switches], **options)
    for verb in ("fit", "test", "predict"):
        getattr(trainer, verb)(Net(), loader(2))
        switches.look()
    assert switches.seen == [expected, (False,) * 4] * 3


def test_switches_are_put_back_after_an_exception():
    with pytest.raises(DataError):
        fit(train=5, deterministic=True)
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_anomaly_names_the_operation():
    class Nan(Net):
        def training_step(self, batch, batch_idx):
            return (self.layer.weight.sum() * 0).sqrt() * 0

    with (
        pytest.warns(UserWarning, match="Error detected in SqrtBackward"),
        pytest.raises(RuntimeError, match="nan"),
    ):
        fit(Nan(), detect_anomaly=True)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch's own, at a graph break
def test_compiling_gives_the_same_weights():
    torch.manual_seed(0)
    plain = Net()
    compiled = Net()
    compiled.load_state_dict(plain.state_dict())
    fit(plain)
    fit(compiled, compile={"backend": "eager"})
    assert torch.equal(weights(plain), weights(compiled))
    assert "log" not in vars(compiled)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch's own, where it looks at a block's input
def test_one_graph_serves_all_blocks_of_a_class():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return self.layer(x).tanh()

    class Deep(Net):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(2, 2)
            self.blocks = nn.Sequential(*[Block() for _ in range(3)])

        def training_step(self, batch, batch_idx):
            return self.blocks(self.first(batch)).pow(2).mean()

    graphs = []

    def backend(graph, examples):
        graphs.append(graph)
        return graph.forward

    plain, compiled = Deep(), Deep()
    compiled.load_state_dict(plain.state_dict())
    fit(plain)
    fit(compiled, compile={"regional": True, "backend": backend})
    fit(compiled, compile={"regional": True, "backend": backend})
    fit(plain)
    assert len(graphs) == 1
    assert torch.equal(weights(plain), weights(compiled))
    with pytest.raises(StrategyError, match="no blocks to compile separately"):
        fit(Net(), compile={"regional": True})


@pytest.mark.parametrize(
    ("algorithm", "value"), [("norm", 0.01), (None, 0.01), ("value", 0.001)]
)
def test_gradients_are_clipped(algorithm, value):
    norms = []

    class Watches(Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, closure=None):
            norms.append(
                (
                    float(self.layer.weight.grad.abs().max()),
                    float(nn.utils.get_total_norm([p.grad for p in self.parameters()])),
                )
            )
            optimizer.step(closure)

    fit(
        Watches(),
        max_steps=3,
        gradient_clip_val=value,
        gradient_clip_algorithm=algorithm,
    )
    largest, norm = zip(*norms, strict=True)
    if algorithm == "value":
        assert max(largest) == pytest.approx(value)
    else:
        assert max(norm) == pytest.approx(value, rel=1e-3)


def test_precision_by_word_and_by_plugin():
    from trainer_kit.precision import make_precision

    for options in (
        {"precision": "64-true"},
        {"precision": 64},
        {"plugins": [make_precision("64-true", "cpu")]},
    ):
        module = Net()
        fit(module, [torch.ones(2, 2)], max_epochs=1, **options)
        assert module.layer.weight.dtype == torch.float64


# -- files ---------------------------------------------------------------------------------------------------------


def test_a_fast_run_never_writes_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    class Asks(Callback):
        def on_train_step_end(self, trainer, module):
            trainer.request_checkpoint("now")

    module = Net()
    trainer = Trainer(
        accelerator="cpu",
        fast_dev_run=2,
        logger=True,
        max_epochs=9,
        default_root_dir=tmp_path / "runs",
        callbacks=[
            ModelCheckpoint(
                dirpath=tmp_path / "c", every_n_train_steps=1, save_last=True
            ),
            Asks(),
        ],
    )
    trainer.fit(module, loader(), loader())
    trainer.test(module, loader(), verbose=False)
    trainer.predict(module, loader())
    assert module.counts == {"train": 2, "val": 2, "test": 2}
    assert list(tmp_path.iterdir()) == []
    assert trainer.fast_dev_run


def test_by_default_a_run_is_logged_and_its_last_state_kept_below_the_root(tmp_path):
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), loader())
    written = files(tmp_path)
    assert any("events.out.tfevents" in name for name in written)
    assert any(name.endswith("manifest.json") for name in written)
    assert Path(trainer.log_dir).is_relative_to(tmp_path)
    assert Path(trainer.checkpoint_callback.best_model_path).is_relative_to(tmp_path)


def test_the_root_is_the_working_directory_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = make()
    assert os.path.samefile(trainer.default_root_dir, tmp_path)
    assert os.path.samefile(trainer.log_dir, tmp_path)


def test_switched_off_nothing_is_written(tmp_path):
    fit(default_root_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_bare_bones(tmp_path, capsys):
    module = Net()
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, barebones=True, default_root_dir=tmp_path
    )
    trainer.fit(module, loader(), loader())
    assert (trainer.loggers, trainer.callbacks) == ([], [])
    assert module.counts["val"] == 10
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["enable_checkpointing", "enable_model_summary"])
def test_bare_bones_with_flesh_is_refused(name):
    with pytest.raises(ConfigurationError, match=name):
        Trainer(accelerator="cpu", barebones=True, **{name: True})


def test_default_callbacks_give_way_to_the_users_callbacks():
    trainer = Trainer(accelerator="cpu", logger=False, max_time="00:00:01:00")
    kinds = [type(callback).__name__ for callback in trainer.callbacks]
    assert sorted(kinds) == [
        "ModelCheckpoint",
        "ModelSummary",
        "TQDMProgressBar",
        "Timer",
    ]
    own = ModelCheckpoint(save_last=True)
    trainer = Trainer(accelerator="cpu", logger=False, callbacks=own)
    assert trainer.checkpoint_callbacks == [own]


def test_a_resumed_run_continues_at_the_step_of_its_checkpoint(tmp_path):
    """The second half from the checkpoint equals the second half of the whole."""

    def module():
        torch.manual_seed(0)
        return Net()

    whole = module()
    options = {"seed": 3, "max_epochs": 2}
    fit(whole, loader(shuffle=True), **options)
    half = make(**{**options, "max_epochs": 1})
    half.fit(module(), loader(shuffle=True))
    half.save_checkpoint(tmp_path / "half")
    rest = module()
    trainer = make(**options)
    trainer.fit(rest, loader(shuffle=True), ckpt_path=tmp_path / "half")
    assert progress(trainer) == (2, 20, 20)
    assert rest.counts["train"] == 10
    assert torch.equal(weights(rest), weights(whole))
    assert torch.equal(
        torch.cat(rest.seen["train"]), torch.cat(whole.seen["train"][10:])
    )


def test_a_run_that_is_over_does_nothing_more(tmp_path):
    first = fit(max_epochs=1)
    first.save_checkpoint(tmp_path / "c")
    module = Net()
    trainer = make(max_epochs=1)
    trainer.fit(module, loader(), ckpt_path=str(tmp_path / "c"))
    assert module.counts["train"] == 0
    assert torch.equal(weights(module), weights(first.module))


def test_weights_alone_start_a_new_run(tmp_path):
    first = fit(max_epochs=1)
    first.save_checkpoint(tmp_path / "w", weights_only=True)
    first.save_checkpoint(tmp_path / "c")
    for name in ("w", "c"):
        module = Net()
        trainer = make(max_epochs=0)
        trainer.fit(module, loader(), ckpt_path=tmp_path / name, load_weights_only=True)
        assert torch.equal(weights(module), weights(first.module))
        assert trainer.global_step == 0
    with pytest.raises(TrainerKitError, match="weights"):
        make(max_epochs=2).fit(Net(), loader(), ckpt_path=tmp_path / "w")


def test_the_state_of_a_datamodule_goes_with_it(tmp_path):
    trainer = make(max_epochs=3)
    trainer.fit(Net(), datamodule=Data())
    trainer.save_checkpoint(tmp_path / "c")
    data = Data()
    make(max_epochs=4).fit(Net(), datamodule=data, ckpt_path=tmp_path / "c")
    assert data.epochs == 3


def test_there_is_nothing_to_save_before_a_fit(tmp_path):
    with pytest.raises(ConfigurationError, match="nothing to save"):
        make().save_checkpoint(tmp_path / "c")


def test_a_path_that_is_not_there_is_an_error_with_the_path(tmp_path):
    for verb in ("fit", "validate", "test", "predict"):
        with pytest.raises(CheckpointError, match="missing"):
            getattr(make(max_epochs=1), verb)(
                Net(), loader(), ckpt_path=tmp_path / "missing"
            )


def test_last_and_best_without_any_are_errors(tmp_path):
    for name in ("last", "best"):
        with pytest.raises(CheckpointError, match=name):
            make(max_epochs=1, default_root_dir=tmp_path).test(
                Net(), loader(), ckpt_path=name
            )


class Rising(Net):
    """Validation gets worse: the first epoch is the best."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", float(self.current_epoch))


@pytest.fixture
def trained(tmp_path):
    """A trainer after three epochs, and the weights of the first and of the last."""
    seen = []

    class Notes(Callback):
        def on_train_epoch_end(self, trainer, module):
            seen.append(weights(module).clone())

    keeps = ModelCheckpoint(dirpath=tmp_path / "c", monitor="val_loss", save_last=True)
    trainer = make(max_epochs=3, callbacks=[keeps, Notes()], default_root_dir=tmp_path)
    trainer.fit(Rising(), loader(), loader(4))
    return trainer, seen[0], seen[-1]


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_without_a_module_the_best_weights_of_the_fit_are_taken(trained, verb):
    trainer, best, last = trained
    assert torch.equal(weights(trainer.module), last)
    getattr(trainer, verb)(dataloaders=loader(4))
    assert torch.equal(weights(trainer.module), best)


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_a_module_that_is_passed_keeps_its_weights(trained, verb):
    trainer, _best, last = trained
    getattr(trainer, verb)(trainer.module, loader(4))
    assert torch.equal(weights(trainer.module), last)


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_best_last_and_paths(trained, verb):
    trainer, best, last = trained
    path = trainer.checkpoint_callback.best_model_path
    for name, expected in (
        ("best", best),
        ("last", last),
        (path, best),
        (Path(path), best),
    ):
        module = Rising()
        getattr(trainer, verb)(module, loader(4), ckpt_path=name)
        assert torch.equal(weights(module), expected)


def test_a_new_trainer_finds_the_last_checkpoint_below_its_root(trained, tmp_path):
    _trainer, _, _last = trained
    module = Rising()
    keeps = ModelCheckpoint(dirpath=tmp_path / "c", monitor="val_loss", save_last=True)
    again = make(max_epochs=4, callbacks=[keeps], default_root_dir=tmp_path)
    again.fit(module, loader(), loader(4), ckpt_path="last")
    assert (module.counts["train"], again.current_epoch) == (10, 4)


@pytest.mark.parametrize(
    "apart", [False, True], ids=["one directory", "two directories"]
)
def test_last_ignores_checkpoints_with_only_weights(tmp_path, apart):
    """Weights of the same step, and here of a later one, are no run."""

    def keepers():
        whole = ModelCheckpoint(dirpath=tmp_path / "a", every_n_train_steps=2)
        place = tmp_path / ("b" if apart else "a")
        return [
            whole,
            ModelCheckpoint(
                dirpath=place,
                filename="w-{step}",
                every_n_train_steps=1,
                save_weights_only=True,
            ),
        ]

    make(max_steps=5, callbacks=keepers(), default_root_dir=tmp_path).fit(
        Net(), loader(9)
    )
    trainer = make(max_steps=7, callbacks=keepers(), default_root_dir=tmp_path)
    steps = []
    trainer.on("train_start")(lambda trainer, module: steps.append(trainer.global_step))
    trainer.fit(Net(), loader(9), ckpt_path="last")
    assert (steps, trainer.global_step) == ([4], 7)


def test_last_is_refused_where_only_weights_exist(tmp_path):
    def fit(steps, **options):
        keeper = ModelCheckpoint(
            dirpath=tmp_path / "a", every_n_train_steps=1, save_weights_only=True
        )
        make(max_steps=steps, callbacks=[keeper], default_root_dir=tmp_path).fit(
            Net(), loader(4), **options
        )

    fit(2)
    with pytest.raises(
        CheckpointError, match="holds only weights, and cannot be resumed"
    ):
        fit(3, ckpt_path="last")


# -- hyperparameters -----------------------------------------------------------------------------------------------


class Params:
    def __init__(self):
        self.params = []

    def log_metrics(self, metrics, step): ...

    def log_hyperparams(self, params):
        self.params.append(dict(params))


def test_hyperparameters_of_module_and_datamodule_are_logged():
    params = Params()
    trainer = make(max_epochs=1, logger=params)
    trainer.fit(Net(lr=0.002), datamodule=Data(batch_size=4))
    assert params.params == [{"lr": 0.002, "batch_size": 4}]


def test_hyperparameters_that_are_not_for_loggers_are_not_logged():
    class Secret(Net):
        def __init__(self, lr=0.001):
            super().__init__(lr)
            self.save_hyperparameters(logger=False)

    params = Params()
    make(max_epochs=1, logger=params).fit(Secret(), loader(4))
    assert params.params == []


def test_hyperparameters_come_back_with_a_checkpoint(tmp_path):
    trainer = fit(Net(lr=0.002), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "c")
    assert Net.load_from_checkpoint(tmp_path / "c").hparams == {"lr": 0.002}


def test_hyperparameters_that_cannot_be_stored_are_named_once_and_asked_for(
    tmp_path, capsys
):
    class Takes(Net):
        def __init__(self, activation, lr=0.001):
            super().__init__(lr)
            self.activation = activation

    trainer = make(
        max_epochs=3, callbacks=[ModelCheckpoint(dirpath=tmp_path, save_top_k=-1)]
    )
    trainer.fit(Takes(lambda x: x), loader(4))
    said = capsys.readouterr().out
    assert said.count("activation") == 1
    assert "repr" in said
    path = trainer.checkpoint_callback.best_model_path
    with pytest.raises(TrainerKitError, match=r"(?s)activation"):
        Takes.load_from_checkpoint(path)
    again = Takes.load_from_checkpoint(path, activation=torch.tanh)
    assert again.activation is torch.tanh
    assert again.hparams.lr == 0.001


# -- evaluation ----------------------------------------------------------------------------------------------------


def test_validate_and_test_return_one_dict_of_logged_values_for_each_loader(capsys):
    trainer = make()
    one = trainer.validate(Net(), loader(4))
    assert [sorted(part) for part in one] == [["val_loss"]]
    assert "val_loss" in capsys.readouterr().out
    two = trainer.test(Net(), [loader(4), loader(2)], verbose=False)
    assert [sorted(part) for part in two] == [
        ["test_loss/dataloader_idx_0"],
        ["test_loss/dataloader_idx_1"],
    ]
    assert capsys.readouterr().out == ""
    assert all(type(value) is float for part in two for value in part.values())


def test_an_evaluation_neither_trains_nor_configures_optimizers():
    class Strict(Net):
        def configure_optimizers(self):
            raise AssertionError("an evaluation has no optimizer")

    module = Strict()
    before = weights(module).clone()
    trainer = make()
    for verb in ("validate", "test", "predict"):
        getattr(trainer, verb)(module, loader(4))
    assert torch.equal(weights(module), before)
    assert module.training
    assert trainer.global_step == 0


def test_predictions_come_in_the_order_of_the_data():
    module = Net()
    outputs = make().predict(module, loader(5))
    expected = module(torch.stack([Samples()[i] for i in range(5)]))
    assert [len(out) for out in outputs] == [2, 2, 1]
    assert torch.equal(torch.cat(outputs), expected)


def test_predictions_of_several_loaders_are_lists_and_know_which():
    class Which(Net):
        def predict_step(self, batch, batch_idx, dataloader_idx=0):
            return dataloader_idx, batch_idx, len(batch)

    outputs = make().predict(Which(), [loader(3), loader(2)])
    assert outputs == [[(0, 0, 2), (0, 1, 1)], [(1, 0, 2)]]
    assert make().predict(Which(), loader(3)) == [(0, 0, 2), (0, 1, 1)]
    assert make().predict(Which(), [loader(3)]) == [(0, 0, 2), (0, 1, 1)]


def test_predictions_that_are_not_returned_are_not_kept():
    kept = []

    class Keeps(Callback):
        def on_predict_batch_end(
            self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0
        ):
            kept.append(outputs)

    assert (
        make(callbacks=Keeps()).predict(Net(), loader(4), return_predictions=False)
        is None
    )
    assert len(kept) == 2


def test_without_any_module_there_is_an_error():
    with pytest.raises(ConfigurationError, match="test needs a module"):
        make().test(dataloaders=loader())


# -- what hooks read -----------------------------------------------------------------------------------------------


def test_a_module_that_reads_the_length_of_the_run_to_configure_itself():
    seen = []

    class Reads(Net):
        def configure_optimizers(self):
            seen.append(
                (
                    self.trainer.estimated_stepping_batches,
                    self.trainer.num_training_batches,
                )
            )
            return super().configure_optimizers()

    fit(Reads())
    fit(Reads(), accumulate_grad_batches=4)
    fit(Reads(), max_steps=7)
    fit(Reads(), max_steps=70)
    fit(Reads(), limit_train_batches=3)
    fit(Reads(), accumulate_grad_batches={0: 1, 1: 5})
    fit(Reads(), max_epochs=None, max_duration="7st")
    fit(Reads(), max_epochs=None, max_duration="7ba", accumulate_grad_batches=2)
    fit(Reads(), DataLoader(Stream(4)), max_epochs=1)
    fit(Reads(), DataLoader(Stream(4)), max_steps=2)
    assert seen == [
        (20, 10),
        (6, 10),
        (7, 10),
        (20, 10),
        (6, 3),
        (12, 10),
        (7, 10),
        (4, 10),
        (math.inf, math.inf),
        (2, math.inf),
    ]


def test_the_length_of_the_run_is_known_to_setup_and_the_loaders_are_made_once():
    seen, made = [], []

    class Data(DataModule):
        def setup(self, stage):
            self.batches = 10

        def train_dataloader(self):
            made.append(self.batches)
            return loader(self.batches)

    class Reads(Net):
        def setup(self, stage):
            seen.append(
                (
                    self.trainer.estimated_stepping_batches,
                    self.trainer.num_training_batches,
                )
            )

        def configure_optimizers(self):
            seen.append(
                (
                    self.trainer.estimated_stepping_batches,
                    self.trainer.num_training_batches,
                )
            )
            return super().configure_optimizers()

    trainer = Trainer(barebones=True, max_epochs=2, limit_train_batches=3)
    for _ in range(2):  # nothing of the first fit is left over in the second
        trainer.fit(Reads(), datamodule=Data())
    assert (seen, made) == ([(6, 3)] * 4, [10, 10])


def test_a_limit_in_batches_of_an_epoch_of_unknown_length_is_known_in_steps():
    seen = []

    class Reads(Net):
        def configure_optimizers(self):
            seen.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    fit(
        Reads(),
        DataLoader(Stream(4)),
        max_epochs=None,
        max_duration="9ba",
        accumulate_grad_batches=2,
    )
    assert seen == [5]


def test_a_global_batch_is_divided_by_the_accumulation_that_the_module_brings():
    sizes = []

    class Brings(Net):
        def configure_callbacks(self):
            return [GradientAccumulation(4)]

        def training_step(self, batch, batch_idx):
            sizes.append(len(batch))
            return super().training_step(batch, batch_idx)

    Trainer(barebones=True, max_epochs=1, global_batch_size=4).fit(Brings(), loader())
    assert set(sizes) == {1}


def test_states_are_known_to_hooks():
    seen = []

    class Looks(Callback):
        def look(self, trainer, *_):
            verbs = (
                "training",
                "validating",
                "testing",
                "predicting",
                "sanity_checking",
                "evaluating",
            )
            seen.append({name for name in verbs if getattr(trainer, name)})

        on_train_batch_end = on_validation_batch_end = on_test_batch_end = (
            on_predict_batch_end
        ) = look
        on_sanity_check_start = on_sanity_check_end = look

    trainer = make(max_epochs=1, callbacks=Looks(), num_sanity_val_steps=1)
    trainer.fit(Net(), loader(2), loader(2))
    for verb in ("validate", "test", "predict"):
        getattr(trainer, verb)(Net(), loader(2))
    assert seen == [
        {"sanity_checking", "evaluating"},
        {"sanity_checking", "evaluating"},
        {"sanity_checking", "evaluating"},
        {"training"},
        {"validating", "evaluating"},
        {"validating", "evaluating"},
        {"testing", "evaluating"},
        {"predicting"},
    ]


def test_parts_by_lightning_s_names():
    module = Net()
    trainer = fit(module)
    assert trainer.model is trainer.lightning_module is trainer.module is module
    assert (
        trainer.global_rank,
        trainer.local_rank,
        trainer.node_rank,
        trainer.world_size,
    ) == (
        0,
        0,
        0,
        1,
    )
    assert (trainer.is_global_zero, trainer.num_devices) == (True, 1)
    assert isinstance(trainer.optimizers[0], torch.optim.SGD)
    assert (trainer.logger, trainer.loggers, trainer.log_dir) == (
        None,
        [],
        trainer.default_root_dir,
    )
    assert (trainer.max_epochs, trainer.max_steps, trainer.log_every_n_steps) == (
        2,
        -1,
        50,
    )
    assert trainer.current_epoch == 2
    assert trainer.precision == "32-true"
    assert trainer.num_sanity_val_batches == []


def test_functions_are_called_as_callbacks_are():
    trainer = make(max_epochs=2)
    calls = []

    @trainer.on("train_epoch_end")
    def first(trainer, module):
        calls.append(("epoch", trainer.current_epoch))

    @trainer.on("on_train_step_end", every="5st")
    def second(trainer, module):
        calls.append(("step", trainer.global_step))

    trainer.fit(Net(), loader())
    assert calls == [
        ("step", 5),
        ("step", 10),
        ("epoch", 0),
        ("step", 15),
        ("step", 20),
        ("epoch", 1),
    ]


def test_callbacks_cannot_change_while_an_entry_point_runs():
    class Adds(Callback):
        def on_train_start(self, trainer, module):
            trainer.on("train_end")(lambda trainer, module: None)

    with pytest.raises(ConfigurationError, match="while an entry point runs"):
        fit(callbacks=[Adds()])


def test_a_verb_inside_a_verb_is_refused():
    class Nests(Callback):
        def on_train_start(self, trainer, module):
            trainer.validate(module, loader())

    with pytest.raises(ConfigurationError, match="validate inside fit"):
        fit(callbacks=[Nests()])


# -- refused by name -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"profiler": "simpel"}, r"(?s)profiler.*did you mean 'simple'"),
        (
            {"resume": "latest"},
            r"(?s)resume must be \"auto\" or None.*found: resume='latest'.*ckpt_path",
        ),
        ({"resume": "Auto"}, "did you mean 'auto'"),
        ({"resume": True}, "found: resume=True"),
        (
            {"reload_dataloaders_every_n_epochs": True},
            "reload_dataloaders_every_n_epochs=True",
        ),
        (
            {"reload_dataloaders_every_n_epochs": -1},
            "reload_dataloaders_every_n_epochs=-1",
        ),
        ({"devices": 0}, "devices"),
        ({"devices": -3}, "devices"),
        ({"devices": 1.5}, "devices"),
        ({"devices": "two"}, "devices"),
        ({"devices": []}, "devices"),
        ({"accelerator": "gpux"}, "accelerator"),
        ({"num_nodes": 2}, r"(?s)num_nodes=2.*torchrun"),
        ({"num_nodes": 0}, "num_nodes"),
        ({"strategy": "dpp"}, r"(?s)'dpp'.*did you mean 'ddp'"),
        ({"strategy": 5}, "strategy"),
        ({"precision": "16-mixd"}, r"(?s)'16-mixd'.*did you mean '16-mixed'"),
        ({"precision": 17}, "17"),
        ({"plugins": [object()]}, "plugin"),
        ({"callbacks": [object()]}, "callback"),
        ({"callbacks": "early_stopping"}, "callback"),
        ({"callbacks": [Order]}, "callback"),
        ({"logger": object()}, "logger"),
        ({"logger": "tensorbord"}, r"(?s)'tensorbord'.*did you mean 'tensorboard'"),
        ({"logger": [5]}, "logger"),
        ({"deterministic": "always"}, "deterministic"),
        ({"compile": "fast"}, "compile"),
        ({"seed": -1}, "seed"),
        ({"seed": "one"}, "seed"),
        ({"global_batch_size": 0}, "global_batch_size"),
        ({"accumulate_grad_batches": -1}, "accumulation"),
        ({"max_time": "soon"}, "duration"),
        ({"max_duration": "5"}, "duration"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_runs(options, said):
    with pytest.raises(ConfigurationError, match=said):
        Trainer(**{"accelerator": "cpu", **OFF, **options})


def test_an_unknown_argument_is_refused_with_the_nearest():
    with pytest.raises(
        ConfigurationError,
        match=r"no argument 'max_epoch'(.|\n)*did you mean 'max_epochs'",
    ):
        Trainer(max_epoch=3)


def test_two_precisions_are_refused():
    from trainer_kit.precision import make_precision

    with pytest.raises(ConfigurationError, match="set twice"):
        make(precision="64-true", plugins=[make_precision("64-true", "cpu")])


def test_a_plain_module_is_refused_with_a_fix():
    with pytest.raises(
        ConfigurationError, match=r"(?s)not a TrainModule.*Linear.*subclass"
    ):
        make().fit(nn.Linear(2, 1), loader())


@pytest.mark.parametrize(
    ("verb", "missing"),
    [("fit", "training_step"), ("validate", "validation_step"), ("test", "test_step")],
)
def test_a_missing_step_is_named(verb, missing):
    class Bare(TrainModule):
        pass

    with pytest.raises(ConfigurationError, match=rf"Bare has no {missing}"):
        getattr(make(), verb)(Bare(), loader())


def test_a_missing_optimizer_is_named():
    class Bare(TrainModule):
        def training_step(self, batch, batch_idx): ...

    with pytest.raises(
        ConfigurationError, match=r"(?s)Bare has no optimizer.*configure_optimizers"
    ):
        make(max_epochs=1).fit(Bare(), loader())


def test_a_training_step_that_returns_no_loss_is_named():
    class Wrong(Net):
        def training_step(self, batch, batch_idx):
            return "done"

    with pytest.raises(
        ConfigurationError, match=r"(?s)training_step returned no loss.*str"
    ):
        fit(Wrong())


def test_after_a_refusal_the_trainer_still_works():
    trainer = make(max_epochs=1)
    with pytest.raises(DataError):
        trainer.fit(Net())
    trainer.fit(Net(), loader())
    assert trainer.global_step == 10


def test_callbacks_and_loggers_are_set_as_their_arguments_are_given(tmp_path):
    """None, one object and any iterable are accepted; anything else is refused with a fix."""
    trainer = Trainer(accelerator="cpu", barebones=True)
    timer, logger = Timer(), CSVLogger(tmp_path)
    for given, expected in (
        (timer, [timer]),
        (iter([timer]), [timer]),
        (None, []),
        ((), []),
    ):
        trainer.callbacks = given
        assert trainer.callbacks == expected
    for given, expected in (
        (logger, [logger]),
        (iter([logger]), [logger]),
        (None, []),
        ((), []),
    ):
        trainer.loggers = given
        assert trainer.loggers == expected
    with pytest.raises(ConfigurationError, match=r"not a callback\n  found: 3"):
        trainer.callbacks = 3
    with pytest.raises(ConfigurationError, match=r"not a logger\n  found: 3"):
        trainer.loggers = 3
