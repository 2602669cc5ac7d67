"""Transformers' own Trainer and TRL's, with this library's Accelerator in place of Accelerate's: the same losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trainer_kit as tk
from trainer_kit.core.errors import ConfigurationError

pytest.importorskip("accelerate")
transformers: Any = pytest.importorskip("transformers")

SIZE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}


def rows() -> list[dict[str, Any]]:
    """Sequences of several lengths; the last batch and the last window are short."""
    generator = torch.Generator().manual_seed(1)
    texts = [
        torch.randint(3, 64, (5 + i % 7,), generator=generator).tolist()
        for i in range(22)
    ]
    return [{"input_ids": text, "labels": text} for text in texts]


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(sample["labels"]) for sample in samples)

    def padded(name: str, filling: int) -> torch.Tensor:
        values = [s[name] + [filling] * (longest - len(s[name])) for s in samples]
        return torch.tensor(values)

    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100)}


def options_of(directory: Path) -> dict[str, Any]:
    return {
        "output_dir": str(directory),
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "train_sampling_strategy": "sequential",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }


def substitute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.trainer.Accelerator", tk.Accelerator)


def new_model() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE))


def new_trainer(directory: Path, **options: Any) -> Any:
    return transformers.Trainer(
        model=new_model(),
        args=transformers.TrainingArguments(**options_of(directory) | options),
        train_dataset=rows(),
        eval_dataset=rows(),
        data_collator=collate,
        compute_metrics=lambda given: {"samples": len(given.predictions)},
    )


def history(trainer: Any) -> list[dict[str, Any]]:
    """What the trainer has logged, without times."""
    return [
        {k: v for k, v in row.items() if not k.endswith(("runtime", "_second"))}
        for row in trainer.state.log_history
    ]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tqdm.std.tqdm.monitor_interval", 0
    )  # its thread would outlive the test


def test_transformers_trainer_has_the_losses_that_it_has_with_accelerate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    theirs = new_trainer(tmp_path / "theirs")
    theirs.train()
    predicted = theirs.predict(rows()).metrics["test_loss"]
    substitute(monkeypatch)
    ours = new_trainer(tmp_path / "ours")
    assert type(ours.accelerator) is tk.Accelerator
    ours.train()
    losses = [row["loss"] for row in history(ours) if "loss" in row]
    assert len(losses) == 6
    assert history(ours) == history(theirs)
    assert ours.evaluate()["eval_samples"] == 22
    assert ours.predict(rows()).metrics["test_loss"] == predicted
    for name, value in theirs.model.state_dict().items():
        assert torch.equal(ours.model.state_dict()[name], value), name
    resumed = new_trainer(tmp_path / "ours")
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-3"))
    assert [row for row in history(resumed) if "loss" in row] == [
        row for row in history(theirs) if "loss" in row
    ]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # TRL's own, of its next version
def test_trl_has_the_losses_that_it_has_with_accelerate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trl: Any = pytest.importorskip("trl")
    datasets: Any = pytest.importorskip("datasets")
    monkeypatch.setattr(
        "trl.trainer.base_trainer.send_telemetry", lambda *args, **kwargs: None
    )
    data = datasets.Dataset.from_list([{"input_ids": row["labels"]} for row in rows()])
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[EOS]": 2} | {
        f"w{i}": i for i in range(3, 64)
    }
    from tokenizers import Tokenizer, models

    rules = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words = {"pad_token": "[PAD]", "eos_token": "[EOS]", "unk_token": "[UNK]"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=rules, **words)

    def trained(directory: Path) -> Any:
        trainer = trl.SFTTrainer(
            model=new_model(),
            args=trl.SFTConfig(**options_of(directory), max_length=32, bf16=False),
            train_dataset=data,
            eval_dataset=data,
            processing_class=tokenizer,
        )
        trainer.train()
        return trainer

    theirs = trained(tmp_path / "theirs")
    substitute(monkeypatch)
    ours = trained(tmp_path / "ours")
    assert type(ours.accelerator) is tk.Accelerator
    assert history(ours) == history(theirs)


def test_an_engine_of_training_arguments_is_refused_with_what_to_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig

    for plugin, name in (
        (FullyShardedDataParallelPlugin(), "fsdp_plugin"),
        (ParallelismConfig(), "parallelism_config"),
    ):
        with pytest.raises(
            ConfigurationError, match=r"(?s)is Accelerate's.*fix: .*trainer_kit"
        ):
            tk.Accelerator(cpu=True, **{name: plugin})  # type: ignore[arg-type]
