"""What the Trainer and its strategy answer when code asks for an attribute of Lightning's that is not here."""

from __future__ import annotations

import copy
import pickle

import pytest

import trainer_kit as tk


@pytest.mark.parametrize(
    ("path", "match"),
    [
        (
            "curent_epoch",
            r"has no attribute 'curent_epoch'\n  fix:   did you mean 'current_epoch'\?",
        ),
        ("finetune", r"has no attribute 'finetune'\n  fix:   dir\(trainer\)"),
        (
            "_evaluation_loop",
            r"_evaluation_loop'\n  fix:   a private attribute of Lightning's",
        ),
        (
            "lr_schedulers",
            "the Trainer has no lr_schedulers: trainer.lr_scheduler_configs",
        ),
        (
            "strategy.checkpoint_io",
            r"'checkpoint_io'\n  fix:   checkpoints are directories",
        ),
        ("strategy.local_rank", r"'local_rank'\n  fix:   trainer\.local_rank"),
        ("strategy.optimizers", r"trainer\.optimizers"),
        ("strategy.nothing", "has no attribute 'nothing'"),
        ("fit_loop.batch_progress", "FitLoop has no batch_progress"),
        ("fit_loop._combined_loader", "no _combined_loader: trainer.train_dataloader"),
        (
            "fit_loop.epoch_loop.val_loop._results",
            "no _results: trainer.callback_metrics",
        ),
        ("validate_loop.run", "EvaluationLoop has no run: trainer.validate and"),
        ("test_loop.setup_data", "no setup_data: trainer.num_val_batches"),
        ("predict_loop.predictions", "no predictions: trainer.predict returns them"),
    ],
)
def test_a_missing_attribute_says_what_to_use(path, match):
    value = tk.Trainer(accelerator="cpu", devices=1, barebones=True)
    *owners, last = path.split(".")
    for name in owners:
        value = getattr(value, name)
    with pytest.raises(AttributeError, match=match):
        getattr(value, last)
    assert not hasattr(value, last)


def test_a_strategy_is_copied_and_pickled():
    strategy = tk.Trainer(accelerator="cpu", devices=1, barebones=True).strategy
    assert copy.copy(strategy).device == pickle.loads(pickle.dumps(strategy)).device


def test_private_attributes_that_callbacks_of_packages_read():
    trainer = tk.Trainer(
        accelerator="cpu", devices=1, barebones=True, log_every_n_steps=0
    )
    assert trainer._accelerator_connector.is_distributed is False
    assert trainer._logger_connector.should_update_logs is False
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == 0
    with pytest.raises(AttributeError, match="DistributedFlags has no devices"):
        _ = trainer._accelerator_connector.devices
