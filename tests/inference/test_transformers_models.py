"""Models of transformers, with weights that are shared, caches and outputs that are objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trainer_kit as tk
from trainer_kit.core.errors import PrecisionError, StrategyError

pytestmark = pytest.mark.slow  # importing transformers takes seconds

SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 32},
}
BLOCKS = {"llama": "LlamaDecoderLayer", "gpt2": "GPT2Block"}


@pytest.mark.parametrize(
    ("kind", "tied"), [("llama", True), ("llama", False), ("gpt2", True)]
)
def test_a_model_of_transformers(
    kind: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokens = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
    config = AutoConfig.for_model(
        kind, **tokens, **SIZES[kind], tie_word_embeddings=tied
    )
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config).eval()
    plain.save_pretrained(tmp_path / "hub", max_shard_size="20KB")
    words = torch.randint(1, 64, (2, 7))

    def empty() -> Any:
        with tk.init_empty_weights():
            return AutoModelForCausalLM.from_config(config).eval()

    model = empty()
    assert (model.lm_head.weight is model.get_input_embeddings().weight) is tied
    whole = sum(p.numel() * 4 for p in model.parameters())
    room = {0: whole // 2, 1: whole // 3, "cpu": whole}
    found = tk.infer_auto_device_map(model, room, [BLOCKS[kind]])
    blocks = {
        name: device
        for name, device in found.items()
        if name.rpartition(".")[2].isdigit()
    }
    assert {0, 1} <= set(found.values())
    assert len(blocks) == 3  # none was split

    half = tk.infer_auto_device_map(model, {"cpu": int(whole * 0.7)}, [BLOCKS[kind]])
    assert set(half.values()) == {"cpu", "disk"}
    for device_map in ({"": "disk"}, half):
        model = tk.load_checkpoint_and_dispatch(
            empty(), tmp_path / "hub", device_map, skip_keys="past_key_values"
        )
        with torch.no_grad():
            mine, theirs = model(words, labels=words), plain(words, labels=words)
            assert torch.equal(mine.logits, theirs.logits)
            assert torch.equal(mine.loss, theirs.loss)
            assert torch.equal(
                model.generate(words, max_new_tokens=5, do_sample=False),
                plain.generate(words, max_new_tokens=5, do_sample=False),
            )
        state = model.state_dict()
        assert all(
            torch.equal(state[name], value)
            for name, value in plain.state_dict().items()
        )
        with pytest.raises(StrategyError, match="offloaded weights cannot be trained"):
            model(words, labels=words).loss.backward()

    quantize = tk.BnbQuantizationConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="fp32"
    )
    if kind == "gpt2":
        with pytest.raises(
            PrecisionError,
            match=r"no layer of this model can be quantized\n(?s:.*)Conv1D",
        ):
            tk.load_and_quantize_model(empty(), quantize, tmp_path / "hub")
        return
    model = tk.load_and_quantize_model(
        empty(), quantize, tmp_path / "hub", device_map={"": "cpu"}
    )
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.uint8
    assert model.lm_head.weight.dtype == torch.float32
    with torch.no_grad():
        in_memory = tk.load_and_quantize_model(plain, quantize)
        assert torch.equal(model(words).logits, in_memory(words).logits)
