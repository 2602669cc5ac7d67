"""`LossLog`: which of the losses since the last look was not finite."""

from __future__ import annotations

import math

import pytest
import torch

from trainer_kit.step.losses import LossLog

NAN, INF = math.nan, math.inf


def log(*losses, scaled=False):
    """Losses of the steps from 1 on, each of the batch with ten times that number."""
    losses_so_far = LossLog(scaled)
    for completed_steps, loss in enumerate(losses):
        losses_so_far.append((loss, completed_steps, 10 * completed_steps + 10))
    return losses_so_far


def tensors(*losses):
    """As a device has them: a step may return a loss of shape () or (1,)."""
    return [
        torch.tensor([loss] if index % 2 else loss) for index, loss in enumerate(losses)
    ]


@pytest.mark.parametrize("losses", [[1.0, INF, NAN], tensors(1.0, INF, NAN)])
def test_the_first_bad_loss_is_named_with_its_step_and_batch(losses):
    assert log(*losses).take_first_bad() == (2, 20, INF)


@pytest.mark.parametrize("losses", [[1.0, 2.0], tensors(1.0, 2.0), []])
def test_finite_losses_are_fine(losses):
    assert log(*losses).take_first_bad() is None


@pytest.mark.parametrize("make", [list, lambda losses: tensors(*losses)])
def test_scaled_losses_are_bad_only_if_none_is_finite(make):
    assert log(*make([INF, 1.0]), scaled=True).take_first_bad() is None
    assert log(*make([INF, INF]), scaled=True).take_first_bad() == (1, 10, INF)


def test_a_look_drops_what_it_has_read():
    losses = log(NAN)
    assert losses.take_first_bad() is not None
    assert losses.take_first_bad() is None
    assert losses.has_returned_a_loss


def test_the_losses_of_a_repeated_window_are_dropped():
    losses = log(1.0, NAN)
    losses.drop_after(1)
    assert [loss for loss, _, _ in losses.take()] == [1.0]
    assert not losses
    assert losses.has_returned_a_loss
    assert not log().has_returned_a_loss
