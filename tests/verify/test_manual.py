"""The turns of ranks, and their gradients, in the plain loop for manual optimization."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import trainer_kit as tk
from trainer_kit.verify.manual import Turns, add_gradients, copied


def test_each_rank_draws_the_numbers_that_it_would_draw_alone():
    def draw(turns, found):
        def work(rank):
            torch.manual_seed(rank)
            first = torch.rand(())
            turns.meet(rank, lambda: torch.rand(5))
            found[rank] = [first, torch.rand(())]

        return work

    found = {}
    turns = Turns(3)
    turns.run(draw(turns, found))
    for rank in range(3):
        generator = torch.Generator().manual_seed(rank)
        if rank == 2:  # the last one has drawn for all of them
            continue
        assert found[rank] == [torch.rand((), generator=generator) for _ in range(2)]


@pytest.mark.parametrize("fewer", [0, 1])
def test_ranks_that_meet_a_different_number_of_times(fewer):
    turns = Turns(2)

    def work(rank):
        for _ in range(1 if rank == fewer else 2):
            turns.meet(rank, lambda: None)

    with pytest.raises(tk.ConfigurationError, match="equally often on each rank"):
        turns.run(work)
    assert threading.active_count() == 1


def test_the_error_of_a_rank_ends_the_others():
    turns = Turns(2)

    def work(rank):
        if rank == 1:
            raise ValueError("broken")
        turns.meet(rank, lambda: None)

    with pytest.raises(ValueError, match="broken"):
        turns.run(work)


def test_gradients_of_all_ranks_are_added_to_earlier_ones():
    ranks = [nn.Linear(1, 1) for _ in range(2)]
    ranks[0].weight.grad, ranks[1].weight.grad = (
        torch.full((1, 1), 2.0),
        torch.full((1, 1), 3.0),
    )
    add_gradients(
        ranks,
        [
            [torch.ones(1, 1), torch.full((1,), 7.0)],
            [torch.ones(1, 1), torch.full((1,), 7.0)],
        ],
    )
    assert [float(one.weight.grad) for one in ranks] == [6.0, 6.0]
    assert [float(one.bias.grad) for one in ranks] == [
        7.0,
        7.0,
    ]  # no rank has a new one


def test_copies_share_data_and_refuse_what_cannot_be_copied():
    class Holder(tk.TrainModule):
        def __init__(self):
            super().__init__()
            self.data, self.layer = TensorDataset(torch.zeros(2)), nn.Linear(1, 1)

    module = Holder()
    other = copied(module)
    assert other.data is module.data
    assert other.layer.weight is not module.layer.weight
    module.lock = threading.Lock()
    with pytest.raises(tk.ConfigurationError, match="cannot be copied"):
        copied(module)
