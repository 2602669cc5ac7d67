"""A prepared model can be copied, pickled, averaged and exported at any time, alone."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import trainer_kit as tk
from tests.parity.plain import case


def written_bytes(model: nn.Module) -> int:
    file = io.BytesIO()
    torch.save(model, file)
    return len(file.getvalue())


def check_copies(
    net: nn.Linear, model: nn.Module, optimizer: Any, fresh_bytes: int
) -> None:
    x = torch.randn(4, 64)
    assert net.state_dict().keys() == {"weight", "bias"}
    assert written_bytes(net) == fresh_bytes
    for original in (net, model):
        clone = copy.deepcopy(original)
        with torch.no_grad():
            next(clone.parameters()).add_(1.0)
            assert not torch.equal(clone(x), original(x))
        AveragedModel(original).update_parameters(original)
    restored = pickle.loads(pickle.dumps(net))
    assert torch.equal(restored(x), net(x))
    exported: Tensor = torch.export.export(net, (x,)).module()(x)
    assert torch.equal(exported, net(x))
    for clone in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        before = net.weight.clone()
        clone.step()
        assert torch.equal(net.weight, before)


def check(face: str) -> None:
    net, other = nn.Linear(64, 4), nn.Linear(400, 400)
    fresh_bytes = written_bytes(net)
    optimizer: Any = torch.optim.SGD(net.parameters(), 0.1)
    if face == "fabric":
        fabric = tk.Fabric(accelerator="cpu", devices="auto")
        fabric.launch()
        fabric.setup_module(other)
        model, optimizer = fabric.setup(net, optimizer)
        backward: Any = fabric.backward
    else:
        accelerator = tk.Accelerator(cpu=True)
        model, optimizer, _ = accelerator.prepare(net, optimizer, other)
        backward = accelerator.backward
    for step in range(5):
        with case(face=face, step=step):
            check_copies(net, model, optimizer, fresh_bytes)
        backward(model(torch.randn(4, 64)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("face", ["accelerator", "fabric"])
def test_copies_of_one_process(face: str) -> None:
    check(face)


@pytest.mark.world_size(2)
def test_copies_of_two_processes() -> None:
    check("accelerator")


def test_a_model_in_bfloat16_is_exported_and_its_copy_shares_nothing() -> None:
    accelerator = tk.Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(nn.Linear(64, 4))
    clone = copy.deepcopy(model)
    assert clone.forward.forward.__self__ is clone
    assert torch.export.export(model, (torch.randn(4, 64),)) is not None
