"""`configure_model` is called once for a module, however many entry points it goes through."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer_kit import Trainer
from trainer_kit.testing import TinyModule


def test_layers_are_built_once_for_fit_validate_and_a_loaded_checkpoint():
    """A second call of ``configure_model`` would replace trained layers by new ones, in silence."""

    class Builds(TinyModule):
        def __init__(self):
            super().__init__()
            del self.layer

        def configure_model(self):
            self.layer = nn.Linear(32, 2)

    module, data = Builds(), [torch.randn(4, 32) for _ in range(3)]
    trainer = Trainer(
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data, data)
    trained = module.layer.weight.detach().clone()
    again = Builds.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    for each in (module, again):
        (values,) = trainer.validate(each, data, verbose=False)
        assert torch.equal(each.layer.weight, trained)
        assert values["val_loss"] == pytest.approx(
            sum(float(each(batch).detach().pow(2).mean()) for batch in data) / 3,
            rel=1e-5,
        )
