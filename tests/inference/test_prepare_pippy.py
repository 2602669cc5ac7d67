"""A model over two processes gives what it gives in one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import trainer_kit as tk
from tests.parity.plain import case
from tests.strategies.pipelines import texts, words
from trainer_kit.core.errors import StrategyError

pytestmark = pytest.mark.slow


@pytest.mark.world_size(2, timeout=120)
def test_two_processes() -> None:
    last = dist.get_rank() == 1
    for options in (
        {},
        {"num_chunks": 1},
        {"num_chunks": 5, "gather_output": True},
        {"split_points": ["layers.1"], "gather_output": True},
    ):
        with case(**options):
            whole = words()
            net = words(seed=dist.get_rank())  # the weights are the main process's
            held = sum(parameter.numel() for parameter in net.parameters())
            prepared = tk.prepare_pippy(net, example_args=(texts([4])[0],), **options)
            assert prepared is net
            assert sum(parameter.numel() for parameter in net.parameters()) < held
            assert net.hf_split_points == options.get("split_points", ["layers.4"])
            for size in (4, 3, 1):  # any number of samples
                batch = texts([size])[0]
                found = net(batch if not dist.get_rank() else None)
                if last or "gather_output" in options:
                    torch.testing.assert_close(
                        found["logits"], whole(batch)["logits"], rtol=1e-12, atol=1e-12
                    )
                else:
                    assert found is None
    check_tied_weights()
    check_a_model_of_hugging_face()
    check_what_is_refused()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.last.weight = self.first.weight

    def forward(self, words: Tensor) -> tuple[Tensor, Any]:
        return self.last(self.middle(self.first(words))), None


def check_tied_weights() -> None:
    net, batch = Tied(), texts([5])[0]
    expected = net(batch)[0]
    plan = {"gather_output": True, "example_args": (batch,)}
    with pytest.raises(StrategyError, match="Sequential must stay on one process"):
        tk.prepare_pippy(Tied(), **plan, no_split_module_classes=["Sequential"])
    net = Tied()
    net.last = net._modules.pop("last")  # defined behind the blocks, as it is called
    found, nothing = tk.prepare_pippy(net, **plan)(batch)
    torch.testing.assert_close(found, expected)
    assert nothing is None


def check_a_model_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 16,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
    }
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=2, num_key_value_heads=2
    )
    torch.manual_seed(0)
    net = transformers.LlamaForCausalLM(config).eval()
    inputs = {"input_ids": torch.randint(16, (5, 6)), "use_cache": False}
    inputs["attention_mask"] = torch.ones(5, 6, dtype=torch.long)
    inputs["attention_mask"][1, 3:] = 0
    with torch.no_grad():
        expected = net(**inputs).logits
    found = tk.prepare_pippy(net, gather_output=True)(**inputs)
    torch.testing.assert_close(found.logits, expected, rtol=1e-5, atol=1e-6)


def check_what_is_refused() -> None:
    class Mean(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).mean()

    layers = [nn.Linear(4, 4) for _ in range(2)]
    with pytest.raises(StrategyError, match="num_chunks=0"):
        tk.prepare_pippy(nn.Sequential(*layers), num_chunks=0)
    with pytest.raises(StrategyError, match="cannot be split into 2 stages"):
        tk.prepare_pippy(nn.Linear(4, 4))
    mean = tk.prepare_pippy(Mean(*layers))
    if dist.get_rank() == 1:
        with pytest.raises(
            StrategyError, match=r"cannot be concatenated(.|\n)*num_chunks=1"
        ):
            mean(None)
    else:
        mean(torch.randn(4, 4))
