"""The headline of `verify` names the fault: the cause before its consequences, with a place and a size."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trainer_kit as tk
from tests.verify import verified
from tests.verify.test_local import verify
from trainer_kit.launch.processes import run_forked
from trainer_kit.verify.compare import percent

pytestmark = pytest.mark.slow


class Stored(Dataset):
    """Returns its stored tensors, not copies."""

    def __init__(self):
        self.rows = list(verified.data())

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.rows[index]


def first_sample(samples):
    return samples[0]


class InPlace(verified.Classifier):
    def training_step(self, batch, batch_idx):
        batch[0].mul_(0.5)
        return super().training_step((batch[0][None], batch[1][None]), batch_idx)


def test_a_batch_that_the_step_changes_in_place_is_not_blamed_on_the_dataset():
    loader = DataLoader(Stored(), batch_size=1, collate_fn=first_sample)
    first = verify(InPlace(), loader, steps=6).first
    assert first.kind == "data"
    assert "training_step changes its batch in place" in first.text


class Moved(verified.Classifier):
    """Validation in training mode moves running statistics."""

    def __init__(self):
        super().__init__()
        self.net[1] = nn.BatchNorm1d(16)

    def validation_step(self, batch, batch_idx):
        self.train()
        super().validation_step(batch, batch_idx)


def test_statistics_that_validation_moves_are_named():
    first = verify(Moved(), val=verified.loader(8), devices=1, strategy="auto").first
    assert (first.kind, first.step, first.where) == (
        "validation",
        1,
        "net.1.running_mean",
    )


def test_an_attribute_that_validation_changes_is_named():
    first = verify(
        verified.CountsValidation(), val=verified.loader(8), devices=1, strategy="auto"
    ).first
    assert (first.kind, first.where) == ("validation", "scale")


class Forgets(verified.Classifier):
    def __init__(self):
        super().__init__()
        self.seen = 0

    def training_step(self, batch, batch_idx):
        self.seen += 1
        return super().training_step(batch, batch_idx) * self.seen


def test_an_attribute_that_a_resume_forgets_is_named():
    found = verify(Forgets(), devices=1, strategy="auto")
    assert [(each.kind, each.step, each.where) for each in found.findings] == [
        ("resume", 1, "seen")
    ]
    assert "it differs in seen" in found.first.hint


def test_the_check_that_located_the_module_is_the_headline():
    """The check of our own loop comes earlier, and named no module."""

    class Noisy(verified.Classifier):
        def on_train_start(self):
            if not self.trainer.training or verified.ranked():
                self.net[1].eps = 1e-1

    first = verify(Noisy()).first
    assert (first.kind, first.where) == ("forward", "net.1")


def test_a_small_difference_has_digits():
    assert percent(1e-8) == "1e-06%"
    assert percent(0.5) == "50%"


def test_forked_ranks_have_the_random_state_of_python():
    """Python seeds its generator again in each fork: `random.seed` in the program had no effect on the ranks."""
    random.seed(3)
    state = random.getstate()
    expected = random.random()
    random.setstate(state)
    assert run_forked(lambda rank: random.random(), 1) == expected


class Averages(tk.callbacks.EMAWeightAveraging):
    pass


def test_callbacks_that_were_left_out_are_named_in_the_verdict():
    found = verify(
        verified.Classifier(), devices=1, strategy="auto", callbacks=[Averages()]
    )
    assert str(found).endswith(
        "all equal, as far as checked; not checked: callbacks (Averages)"
    )
    plain = verify(
        verified.Classifier(),
        devices=1,
        strategy="auto",
        callbacks=[tk.callbacks.ModelCheckpoint()],
    )
    assert str(plain).endswith("all equal, as far as checked")
    assert torch.is_grad_enabled()
