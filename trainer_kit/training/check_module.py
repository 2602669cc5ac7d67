"""Checks of a module and a datamodule before an entry point begins."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

from lightning_utilities.core.overrides import is_overridden
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trainer_kit.core.datamodule import DataModule
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hooks import DataHooks, ModuleHooks
from trainer_kit.core.module import TrainModule
from trainer_kit.core.signatures import check_hooks
from trainer_kit.core.torch_private import CHILDREN

__all__ = ["check_datamodule", "check_module", "trainable_in_eval"]

_STEPS: Final = {
    "fit": "training_step",
    "validate": "validation_step",
    "test": "test_step",
}
"""The step that a module must define for an entry point."""


def check_datamodule(datamodule: object) -> None:
    """Raise `ConfigurationError` for something that cannot be a DataModule, and for hooks that it does not have."""
    if isinstance(datamodule, (Iterable, int, float)):
        raise ConfigurationError(
            "datamodule= is not a DataModule",
            found=type(datamodule).__name__,
            fix="fit takes training and validation loaders; trainer.test(module, loader) takes the third",
        )
    if isinstance(datamodule, DataModule):
        check_hooks(type(datamodule), DataHooks)


def check_module(module: object, stage: str) -> None:
    """Raise `ConfigurationError` for a module that cannot run this stage; the message names what is missing."""
    if isinstance(module, type):
        raise ConfigurationError(
            "this is a class, not a module object",
            found=module.__name__,
            fix=f"create an object: {module.__name__}(...)",
        )
    if not isinstance(module, TrainModule):
        fix = "subclass trainer_kit.TrainModule (your model may be an attribute of it)"
        if isinstance(module, (DataLoader, Dataset, list, tuple)):
            fix = f"the module comes first: trainer.{stage}(module, loader)"
        raise ConfigurationError(
            "this is not a TrainModule", found=type(module).__name__, fix=fix
        )
    # torch would raise an AttributeError about this dictionary at the first use of the module.
    if CHILDREN not in vars(module):
        raise ConfigurationError(
            f"{type(module).__name__}.__init__ does not call super().__init__()",
            fix="call super().__init__() first in __init__",
        )
    check_hooks(type(module), ModuleHooks, DataHooks)
    step = _STEPS.get(stage)
    if step is not None and not is_overridden(step, module, TrainModule):
        raise _missing_step(module, step)
    if stage == "predict" and not _predicts(module):
        raise ConfigurationError(
            f"{type(module).__name__} has no predict_step",
            fix="define predict_step(self, batch, batch_idx), or forward",
        )


def _predicts(module: TrainModule) -> bool:
    return is_overridden("predict_step", module, TrainModule) or is_overridden(
        "forward", module, TrainModule
    )


def _missing_step(module: TrainModule, step: str) -> ConfigurationError:
    """The error for a module without this step; it names a method that may have been meant."""
    steps = [name for name in dir(module) if name.endswith("_step")]
    similar = difflib.get_close_matches(step, steps, cutoff=0.5)
    methods_of_user = [
        name
        for name in ("compute_loss", *similar)
        if name in dir(module) and name not in dir(TrainModule)
    ]
    similar_method = None
    if methods_of_user:
        similar_method = f"{methods_of_user[0]}, which is not called"
    return ConfigurationError(
        f"{type(module).__name__} has no {step}",
        found=similar_method,
        fix=f"define {step}(self, batch, batch_idx)",
    )


def trainable_in_eval(module: nn.Module) -> list[str]:
    """Names of the submodules that have trainable parameters but are in evaluation mode."""
    return [
        name or type(module).__name__
        for name, submodule in module.named_modules()
        if not submodule.training and _has_trainable_parameters(submodule)
    ]


def _has_trainable_parameters(module: nn.Module) -> bool:
    return any(
        parameter.requires_grad for parameter in module.parameters(recurse=False)
    )
