"""The operations inside one module, which torch's private `DebugMode` records."""

from __future__ import annotations

import sys

import torch
from torch import nn

from trainer_kit.verify.operations import first_other, trace


def operations(eps):
    net, lines = nn.LayerNorm(8, eps=eps), []
    handles = trace(net, lambda: lines)
    net(torch.ones(2, 8))
    for handle in handles:
        handle.remove()
    return lines, handles


def test_operations_show_the_argument_that_differs():
    (one, _), (other, _) = operations(1e-5), operations(1e-2)
    assert len(one) == 1
    assert first_other(one, one) == ""
    assert first_other(other, one).startswith("aten::native_layer_norm(")
    assert "0.01) in the run" in first_other(other, one)
    assert "1e-05) in the plain loop" in first_other(other, one)


def test_nothing_is_recorded_where_torch_lacks_the_mode(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils._debug_mode", None)
    lines, handles = operations(1e-5)
    assert (lines, handles) == ([], [])
    assert first_other(lines, ["aten::add(t, 1)"]) == ""


def test_nothing_is_recorded_outside_of_a_watched_step():
    net = nn.LayerNorm(8)
    trace(net, lambda: None)
    assert net(torch.ones(2, 8)).shape == (2, 8)
