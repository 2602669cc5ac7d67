"""Modules without memory: what is on the meta device, what stays real, and who else notices."""

from __future__ import annotations

import resource
import threading

import pytest
import torch
from torch import nn

import trainer_kit as tk


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        own = nn.Parameter(torch.ones(3), requires_grad=False)
        self.one, self.other = own, own
        self.register_buffer("table", torch.arange(3.0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.nothing = None
        self.lazy = nn.LazyLinear(2)


def test_parameters_are_empty_buffers_are_real_and_sharing_is_kept() -> None:
    with tk.init_empty_weights():
        net = Shared()
    assert {
        p.device.type
        for p in net.parameters()
        if not isinstance(p, nn.UninitializedParameter)
    } == {"meta"}
    assert net.table.tolist() == [0.0, 1.0, 2.0]
    assert net.scratch.device.type == "cpu"
    assert net.head.weight is net.embed.weight
    assert net.one is net.other
    assert not net.one.requires_grad
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_buffers_too() -> None:
    with tk.init_empty_weights(include_buffers=True):
        net = Shared()
        made = torch.zeros(3)
    assert {
        tensor.device.type
        for tensor in (net.table, net.scratch, net.embed.weight, made)
    } == {"meta"}
    with tk.init_on_device(torch.device("meta")):
        assert nn.BatchNorm1d(3).running_mean.device.type == "cpu"


def test_it_costs_no_memory_and_ends_with_an_error() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def fail() -> None:
        with tk.init_empty_weights():
            nn.Sequential(*[nn.Linear(20_000, 20_000) for _ in range(100)])  # 160 GB
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_other_threads_are_not_affected() -> None:
    found = []
    with tk.init_empty_weights(include_buffers=True):
        thread = threading.Thread(target=lambda: found.append(nn.BatchNorm1d(3)))
        thread.start()
        thread.join()
    assert found[0].weight.device.type == found[0].running_mean.device.type == "cpu"
