"""What an `Accelerator` writes: tied weights once, what hooks write inside of the state, on one process and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from trainer_kit import Accelerator, FullyShardedDataParallelPlugin
from trainer_kit.checkpoint import read_weights


class Tied(nn.Module):
    """An embedding whose weight is also that of the head."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.body = nn.Embedding(5, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(words)))


ONCE = ["body.bias", "body.weight", "embedding.weight"]


def trained(accelerator: Accelerator, seed: int = 0) -> nn.Module:
    model = Tied(seed)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.tensor([[0, 1, 2]])).square().mean())
    optimizer.step()
    return model


def check_tied(accelerator: Accelerator, path: Path) -> dict[str, Tensor]:
    model = trained(accelerator)
    accelerator.save_model(model, path / "model")
    accelerator.save_model(model, path / "shards", max_shard_size=100)
    accelerator.save_model(model, path / "pickle", safe_serialization=False)
    accelerator.save_state(path / "state")
    assert sorted(load_file(path / "model" / "model.safetensors")) == ONCE
    shards = [load_file(file) for file in sorted((path / "shards").glob("*.safetensors"))]
    assert sorted(name for shard in shards for name in shard) == ONCE
    stored = sum(file.stat().st_size for file in path.glob("state/model*.safetensors"))
    assert stored < sum(4 * p.numel() for p in Tied().parameters()) + 1500  # bytes, with headers
    pickled = torch.load(path / "pickle" / "pytorch_model.bin", weights_only=True)
    assert pickled["head.weight"].data_ptr() == pickled["embedding.weight"].data_ptr()
    found = read_weights(path / "state")
    for other in (read_weights(path / "model"), read_weights(path / "shards"), pickled):
        assert other.keys() == found.keys() == Tied().state_dict().keys()
        assert all(torch.equal(other[name], found[name]) for name in found)
    return found


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    found = check_tied(accelerator, tmp_path)
    assert all(torch.equal(value, found[name]) for name, value in accelerator._models[0].state_dict().items())
    other = Accelerator(cpu=True)
    model = trained(other, seed=1)
    other.load_state(tmp_path / "state")
    assert all(torch.equal(value, found[name]) for name, value in model.state_dict().items())
    assert model.head.weight is model.embedding.weight


@pytest.mark.world_size(2)
def test_tied_weights_of_divided_models_are_written_once(tmp_path: Path) -> None:
    options: dict[str, Any] = {"fsdp_plugin": FullyShardedDataParallelPlugin()}
    found = check_tied(Accelerator(cpu=True, **options), tmp_path)
    for into in (options, {}):
        other = Accelerator(cpu=True, **into)
        model = trained(other, seed=1)
        other.load_state(tmp_path / "state")
        assert all(torch.equal(value, found[name]) for name, value in other.get_state_dict(model).items())
