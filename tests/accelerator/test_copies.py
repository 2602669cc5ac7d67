"""A prepared model can be copied, pickled, averaged and exported at any time, alone."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import subprocess
import sys
from pathlib import Path
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


def prepared_in_bfloat16(face: str, net: nn.Module) -> nn.Module:
    if face == "fabric":
        fabric = tk.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
        return fabric.setup_module(net)
    return tk.Accelerator(cpu=True, mixed_precision="bf16").prepare_model(net)


LOADS = """
import sys, torch
model = torch.load(sys.argv[1], weights_only=False)
torch.save(model(torch.ones(2, 64)), sys.argv[2])
"""


@pytest.mark.parametrize("face", ["accelerator", "fabric"])
def test_a_file_of_a_prepared_model_has_its_weights_only_and_loads_in_another_process(
    face: str, tmp_path: Path
) -> None:
    extra_bytes = []
    for width in (4, 400):
        net = nn.Linear(64, width)
        plain_bytes = written_bytes(net)
        model = prepared_in_bfloat16(face, net)
        extra_bytes.append(written_bytes(model) - plain_bytes)
    assert extra_bytes[0] == extra_bytes[1] < 2000
    source, output = tmp_path / "model.pt", tmp_path / "output.pt"
    torch.save(model, source)
    subprocess.run([sys.executable, "-c", LOADS, source, output], check=True)
    assert torch.equal(torch.load(output), model(torch.ones(2, 64)))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 4)

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.layer(inputs)


def test_a_prepared_forward_has_the_signature_of_the_model() -> None:
    """What transformers reads before it passes a mask."""
    net = Masked()
    expected = inspect.signature(net.forward)
    model = prepared_in_bfloat16("accelerator", net)
    assert inspect.signature(model.forward) == expected


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="TorchScript ends here")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("face", ["accelerator", "fabric"])
def test_torchscript_compiles_the_model_itself_and_never_drops_a_precision(
    face: str,
) -> None:
    x = torch.randn(4, 64)
    net = Masked()
    expected = net(x)
    if face == "fabric":
        model = tk.Fabric(accelerator="cpu", devices=1).setup_module(net)
    else:
        model = tk.Accelerator(cpu=True).prepare_model(net)
    assert torch.equal(torch.jit.script(model)(x), expected)
    with pytest.raises(AttributeError, match="precision 'bf16-mixed'"):
        torch.jit.script(prepared_in_bfloat16(face, Masked()))


def test_the_model_of_a_fabric_is_exported() -> None:
    x = torch.randn(4, 64)
    model = prepared_in_bfloat16("fabric", Masked())
    exported: Tensor = torch.export.export(model, (x,)).module()(x)
    assert torch.equal(exported, model(x))
