"""Models of ``transformers``: it loads what ``save_model`` writes, and generates with prepared models as before."""

from __future__ import annotations

import copy

import pytest
import torch

import trainer_kit as tk

pytestmark = pytest.mark.slow  # importing transformers takes seconds


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_model_that_was_trained_here_is_loaded_by_name(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokens = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
    sizes = {
        "llama": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        },
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16},
    }
    config = AutoConfig.for_model(
        kind, **tokens, **sizes[kind], tie_word_embeddings=True
    )
    accelerator = tk.Accelerator(cpu=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model, optimizer = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    words = torch.randint(64, (2, 8))
    accelerator.backward(model(input_ids=words, labels=words).loss)
    optimizer.step()

    accelerator.save_model(model, tmp_path, max_shard_size="20KB")
    config.save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3

    loaded, told = AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(told.values()), told
    ours, theirs = accelerator.get_state_dict(model), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(model.eval()(words).logits, loaded.eval()(words).logits)


def test_a_model_in_bfloat16_generates_what_it_generates_under_autocast(monkeypatch):
    """Generation reads the forward's signature: without a name for masks and positions it passed none."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=50,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=32,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        # Large, so that padding which is not masked changes the tokens.
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    padded = torch.tensor([[0, 0, 0, 5, 6, 7], [3, 4, 5, 6, 7, 8]])
    options = {"max_new_tokens": 5, "do_sample": False}
    with torch.autocast("cpu", torch.bfloat16):
        expected = copy.deepcopy(model).generate(padded, **options)
    prepared = tk.Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)
    assert torch.equal(prepared.generate(padded, **options), expected)
