"""Memory from shapes alone, against what tensors really take."""

from __future__ import annotations

import torch
from torch import nn

from trainer_kit.planning.memory import describe_module, estimate_memory


def bytes_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 8)
        self.head = nn.Linear(8, 100, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)


def test_the_estimate_equals_the_memory_of_a_trained_module():
    for dtype in (torch.float32, torch.bfloat16):
        module = Mixed().to(dtype)
        optimizer = torch.optim.Adam(module.parameters(), capturable=False)
        x = torch.arange(8)
        module.head(module.norm(module.frozen(module.embed(x)))).sum().backward()
        optimizer.step()
        states = [
            v
            for state in optimizer.state.values()
            for key, v in state.items()
            if key != "step"
        ]
        told = {each.dtype: each for each in estimate_memory(describe_module(module))}[
            str(dtype).removeprefix("torch.")
        ]
        assert told.weights == bytes_of([*module.parameters(), *module.buffers()])
        assert told.gradients == bytes_of(
            p.grad for p in module.parameters() if p.grad is not None
        )
        assert told.optimizer == bytes_of(states)
        assert told.training == told.weights + told.gradients + told.optimizer
        assert told.largest_layer == bytes_of([module.embed.weight])


def test_meta_and_weights_by_name_say_the_same():
    real = estimate_memory(describe_module(nn.Linear(7, 5)))
    with torch.device("meta"):
        assert estimate_memory(describe_module(nn.Linear(7, 5))) == real
    assert estimate_memory(describe_module(nn.Linear(7, 5).state_dict())) == real


def test_narrow_dtypes_are_for_inference_alone():
    told = {
        each.dtype: each
        for each in estimate_memory(describe_module(nn.Linear(7, 5, bias=False)))
    }
    assert (told["int4"].weights, told["int8"].weights) == (18, 35)
    assert [
        told["int4"].training,
        told["int8"].gradients,
        told["float8"].optimizer,
    ] == [None] * 3


def test_nothing_is_nothing():
    assert {
        each.weights for each in estimate_memory(describe_module(nn.Identity()))
    } == {0}
