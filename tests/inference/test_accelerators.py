"""The same on real accelerators: layers on a device, in the host's memory and on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trainer_kit as tk
from tests.inference.nets import Hard, tokens
from trainer_kit.core.errors import StrategyError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.accelerator.is_available(), reason="needs an accelerator"
    ),
]

REST = {"blocks.1": "cpu", "recurrent": 0, "lookup": "disk", "norm": "cpu", "head": 0}


def made() -> Hard:
    torch.manual_seed(0)
    return Hard().eval()


@pytest.mark.parametrize(
    "device_map",
    [{"": 0}, {"": "cpu"}, {"": "disk"}, {"embed": 0, "blocks.0": "disk", **REST}],
    ids=str,
)
def test_outputs_on_an_accelerator(device_map: dict[str, Any], tmp_path: Path) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    plain = made().to(device)
    model = tk.dispatch_model(
        made(),
        device_map,
        main_device=0,
        offload_dir=tmp_path,
        preload_module_classes=["Lookup"],
        force_hooks=True,
    )
    with torch.no_grad():
        found = model(tokens())["logits"]
        expected = plain(tokens().to(device))["logits"]
    assert found.device.type == "cpu"  # where the input was
    torch.testing.assert_close(found, expected.cpu(), rtol=1e-4, atol=1e-5)
    if device_map != {"": 0}:
        with pytest.raises(StrategyError, match="offloaded weights cannot be trained"):
            model(tokens())["logits"].sum().backward()
    tk.dispatch_model(model, {"": "cpu"})
    assert all(
        torch.equal(v, made().state_dict()[k]) for k, v in model.state_dict().items()
    )


def test_auto_uses_the_accelerator_first() -> None:
    with tk.init_empty_weights():
        model = Hard()
    assert 0 in set(
        tk.infer_auto_device_map(model, tk.get_balanced_memory(model)).values()
    )


@pytest.mark.skipif(
    torch.accelerator.device_count() < 2, reason="needs two accelerators"
)
def test_two_accelerators(tmp_path: Path) -> None:
    model = tk.dispatch_model(
        made(),
        {
            "embed": 0,
            "blocks.0": 0,
            "blocks.1": 1,
            "recurrent": 1,
            "lookup": "disk",
            "norm": "cpu",
            "head": 1,
        },
        offload_dir=tmp_path,
        preload_module_classes=["Lookup"],
    )
    with torch.no_grad():
        torch.testing.assert_close(
            model(tokens())["logits"], made()(tokens())["logits"], rtol=1e-4, atol=1e-5
        )
