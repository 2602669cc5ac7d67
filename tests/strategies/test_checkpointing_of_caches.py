"""Activation checkpointing of transformers models, whose cache of keys and values is on by default."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import trainer_kit as tk

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def gemma() -> Any:
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES))


def t5() -> Any:
    sizes = {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 16,
        "num_layers": 2,
        "num_heads": 2,
        "dropout_rate": 0.0,
    }
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=32, decoder_start_token_id=0, **sizes)
    )


class Language(tk.TrainModule):
    def __init__(self, make: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = make()
        self.while_training: list[bool] = []

    def configs(self) -> list[Any]:
        return [part.config for part in self.modules() if hasattr(part, "config")]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.while_training.append(any(one.use_cache for one in self.configs()))
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module: Language, **options: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    trainer = tk.Trainer(max_steps=2, accelerator="cpu", barebones=True, **options)
    trainer.fit(module, [torch.arange(8).view(2, 4)] * 2)
    state = module.state_dict()
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in state.items()
    }


@pytest.mark.parametrize("make", [llama, gemma, t5])
def test_the_cache_is_switched_off_and_the_weights_are_those_without_checkpointing(
    make: Any,
) -> None:
    expected = fit(Language(make), devices=1)
    module = Language(make)
    caches = [one.use_cache for one in module.configs()]
    assert any(caches)
    with pytest.warns(UserWarning, match="disables the cache of keys and values"):
        found = fit(module, devices=1, activation_checkpointing=True)
    torch.testing.assert_close(found, expected)
    assert module.while_training == [False, False]
    assert [one.use_cache for one in module.configs()] == caches  # after the fit


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_under_fsdp_too() -> None:
    expected = fit(Language(llama), strategy="ddp")
    strategy = tk.strategies.FSDPStrategy(activation_checkpointing_policy=True)
    module = Language(llama)
    with pytest.warns(UserWarning, match="disables the cache of keys and values"):
        found = fit(module, strategy=strategy)
    torch.testing.assert_close(found, expected)
    assert module.while_training == [False, False]
    assert all(one.use_cache for one in module.configs())
