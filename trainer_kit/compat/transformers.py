"""Arguments of Transformers' Trainer and of plain scripts that this Trainer lacks, and what to write instead."""

from __future__ import annotations

from typing import Final

__all__ = [
    "ARGUMENTS",
    "ELSEWHERE",
    "LIBRARY",
    "PATHS",
    "TRAINER_METHODS",
    "TRAINING_ARGUMENTS",
]

LIBRARY: Final = "Transformers"
# Empty, but there: `core.lazy` reads the same four tables of each library.
ARGUMENTS: Final[dict[str, dict[str, object]]] = {}
PATHS: Final[dict[str, str]] = {}
_ARGUMENTS: Final = "its arguments are those of trainer_kit.Trainer, such as max_epochs=3; docs/migrate/transformers.md"
_PADS: Final = "import it from transformers, and pass it to DataLoader(collate_fn=...)"
_THEIRS: Final = "import it from transformers, and make the model an attribute of a trainer_kit.TrainModule"
ELSEWHERE: Final = {
    **dict.fromkeys(("TrainingArguments", "Seq2SeqTrainingArguments"), _ARGUMENTS),
    **dict.fromkeys(
        (
            "DataCollatorWithPadding",
            "DataCollatorForLanguageModeling",
            "default_data_collator",
        ),
        _PADS,
    ),
    **dict.fromkeys(
        ("AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification"),
        _THEIRS,
    ),
    "AutoTokenizer": "import it from transformers",
    "Seq2SeqTrainer": "trainer_kit.Trainer; model.generate(...) in validation_step",
    "TrainerCallback": "trainer_kit.Callback; docs/migrate/transformers.md names the hooks",
    "EarlyStoppingCallback": "trainer_kit.callbacks.EarlyStopping(monitor=...)",
}
"""What to use instead of a name of Transformers."""

_LOADER: Final = (
    "DataLoader(dataset, batch_size={value}, shuffle=True), passed to trainer.fit"
)
_OPTIMIZER: Final = "configure_optimizers of the module makes the optimizer, with its learning rate and schedule"
_MODULE: Final = "trainer.fit(module, loader): the module is passed to fit"
_DATA: Final = "trainer.fit(module, DataLoader(dataset, ...), DataLoader(...)): data are passed to fit"

TRAINING_ARGUMENTS: Final = {
    "model": _MODULE,
    "module": _MODULE,
    "args": "the arguments themselves, such as max_epochs=3; docs/migrate/transformers.md has a table",
    "train_dataset": _DATA,
    "eval_dataset": _DATA,
    "data_collator": "DataLoader(collate_fn=...)",
    "processing_class": "leave it out; save it yourself with save_pretrained",
    "tokenizer": "leave it out; save it yourself with save_pretrained",
    "compute_metrics": "self.log(name, value) in validation_step",
    "optimizers": _OPTIMIZER,
    "optimizer": _OPTIMIZER,
    "optim": _OPTIMIZER,
    "lr": _OPTIMIZER,
    "learning_rate": _OPTIMIZER,
    "weight_decay": _OPTIMIZER,
    "scheduler": _OPTIMIZER,
    "lr_scheduler": _OPTIMIZER,
    "lr_scheduler_type": _OPTIMIZER,
    "warmup_steps": _OPTIMIZER,
    "warmup_ratio": _OPTIMIZER,
    "loss": "training_step of the module returns the loss",
    "loss_fn": "training_step of the module returns the loss",
    "epochs": "max_epochs={value}",
    "n_epochs": "max_epochs={value}",
    "num_epochs": "max_epochs={value}",
    "num_train_epochs": "max_epochs={value}",
    "batch_size": _LOADER,
    "per_device_train_batch_size": _LOADER,
    "per_device_eval_batch_size": "DataLoader(dataset, batch_size={value}), passed to trainer.fit",
    "gradient_accumulation_steps": "accumulate_grad_batches={value}",
    "max_grad_norm": "gradient_clip_val={value}",
    "bf16": 'precision="bf16-mixed"',
    "fp16": 'precision="16-mixed"',
    "mixed_precision": "precision={value}",
    "gradient_checkpointing": "activation_checkpointing={value}",
    "torch_compile": "compile={value}",
    "output_dir": "default_root_dir={value}",
    "logging_steps": "log_every_n_steps={value}",
    "logging_dir": "logger=TensorBoardLogger({value})",
    "report_to": "logger={value}",
    "run_name": "an argument of the logger",
    "eval_strategy": "check_val_every_n_epoch=1, or val_check_interval=100 for every 100 batches",
    "evaluation_strategy": "check_val_every_n_epoch=1, or val_check_interval=100 for every 100 batches",
    "eval_steps": "val_check_interval={value}",
    "save_strategy": "callbacks=[ModelCheckpoint(every_n_epochs=1)]",
    "save_steps": "callbacks=[ModelCheckpoint(every_n_train_steps={value})]",
    "save_total_limit": 'callbacks=[ModelCheckpoint(monitor="val_loss", save_top_k={value})]',
    "load_best_model_at_end": 'callbacks=[ModelCheckpoint(monitor="val_loss")], then trainer.test(ckpt_path="best")',
    "metric_for_best_model": "callbacks=[ModelCheckpoint(monitor={value})]",
    "use_cpu": 'accelerator="cpu"',
    "device": "accelerator={value}",
    "disable_tqdm": "enable_progress_bar=False",
    "deepspeed": 'strategy="deepspeed", or DeepSpeedStrategy(config={value})',
    "fsdp": 'strategy="fsdp"',
    "dataloader_num_workers": "DataLoader(num_workers={value})",
    "push_to_hub": "a callback that uploads in on_checkpoint_committed; docs/migrate/transformers.md has it",
}
"""What to write instead, by name; ``{value}`` is the given value."""

TRAINER_METHODS: Final = {
    "train": "trainer.fit(module, loader)",
    "evaluate": "trainer.validate(module, loader)",
    "save_model": "trainer.save_checkpoint(path); module.model.save_pretrained(path) for a model of Transformers",
    "push_to_hub": "a callback that uploads in on_checkpoint_committed; docs/migrate/transformers.md has it",
    "log": "self.log(name, value) in a hook of the module, or trainer.log_metrics({name: value})",
    "save": "trainer.save_checkpoint(path)",
    "load_checkpoint": 'trainer.fit(module, loader, ckpt_path=path), or ckpt_path="last"',
    "load_from_checkpoint": "load_from_checkpoint of the module's class, or fit(..., ckpt_path=path)",
}
"""What to call instead of an attribute that this Trainer lacks."""
