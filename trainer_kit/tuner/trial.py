"""A fit of a few steps on copies, without side effects: each search here uses it for its trials."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from trainer_kit.core.arguments import as_list
from trainer_kit.core.datamodule import DataModule
from trainer_kit.core.errors import ConfigurationError, DataError, TrainerKitError
from trainer_kit.core.hooks import Callback
from trainer_kit.core.module import TrainModule
from trainer_kit.core.seed import preserved_rng
from trainer_kit.core.types import DataModuleLike, Loaders
from trainer_kit.data import CombinedLoader, read_together
from trainer_kit.data.source import (
    RandomGenerator,
    SourceState,
    find_generators,
    generator_states,
    restore_generators,
)
from trainer_kit.step.requests import listening
from trainer_kit.step.run import Fit
from trainer_kit.training.entry_points import EntryPoint
from trainer_kit.training.fit import fit
from trainer_kit.training.session import Session
from trainer_kit.training.trial_session import trial_session

__all__ = ["check_call", "holders", "release_copies", "run_trial"]

_T = TypeVar("_T")


def check_call(method: str, dataloaders: Loaders) -> None:
    """Refuse Lightning's ``method`` and ``dataloaders`` for searches in evaluations."""
    if method != "fit" or dataloaders is not None:
        passed = "None"
        if dataloaders is not None:
            passed = "given"
        raise ConfigurationError(
            "the tuner runs training steps only",
            found=f"method={method!r}, dataloaders={passed}",
            fix='use method="fit", with train_dataloaders= or datamodule=',
        )


def holders(name: str, *owners: object) -> list[object]:
    """The ``owners``, and their hyperparameters, that have the attribute ``name``."""
    objects = []
    for owner in owners:
        # Both, where both have it: the owner's code may read either.
        for candidate in (owner, getattr(owner, "hparams", None)):
            if candidate is not None and hasattr(candidate, name):
                objects.append(candidate)
    return objects


def release_copies() -> None:
    """Release the memory of earlier trials."""
    # Modules and what watches them are cycles.
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def run_trial(
    trainer: Session,
    module: TrainModule,
    loaders: Loaders,
    datamodule: DataModuleLike,
    steps: int,
    watch: Callable[[Fit], Fit],
    *,
    keeps: Sequence[str],
    is_set_up: bool,
) -> None:
    """Train a copy of the module for a few steps, as ``trainer.fit`` would, without validation, loggers and files.

    The module is a deep copy, the datamodule a shallow one; loaders and streams are copied, the samples of a map-style
    dataset are shared. All random generators are restored. Every rank must call it.

    Args:
        trainer: not changed.
        module: not changed.
        loaders: as for ``fit``.
        datamodule: as for ``fit``.
        steps: the maximum number of optimizer steps.
        watch: called with the composed fit before its first step; it may add listeners to the bus, and returns the fit
            to run.
        keeps: copies of the callbacks with any of these attributes are active; all others are not.
        is_set_up: whether a running fit has set up the module and the datamodule.

    Raises:
        ConfigurationError: an engine that steps by itself, or a module that cannot be copied.
        DataError: a loader that cannot be copied.
    """
    if trainer.strategy.owns_step or trainer.strategy.keeps_gradients:
        raise ConfigurationError(
            "the tuner does not support engines that run the optimizer step themselves",
            found=trainer.strategy.describe(),
            fix="search on one device, with DDP or with FSDP, and pass the value it finds",
        )
    settings = replace(
        trainer.settings,
        max_epochs=None,
        max_steps=steps,
        max_duration=None,
        min_epochs=0,
        min_steps=0,
        validate_every=1.0,
        sanity_steps=0,
        log_every=0,
        fast=steps,
        endless=True,
        limits={**trainer.settings.limits, "val": 0},
    )
    if isinstance(loaders, DataModule):
        loaders, datamodule = None, loaders
    # The shared datasets may draw from generators of their own, which `preserved_rng` does not know.
    generators: list[RandomGenerator] = []
    states: list[SourceState] = []
    with preserved_rng(trainer.strategy.device):
        try:
            trained_module = _copy(module, "module")
            callbacks = list(trainer.callbacks)
            if not is_set_up:
                callbacks += as_list(trained_module.configure_callbacks(), Callback)
            # Callbacks of the module take no part either.
            vars(trained_module)["configure_callbacks"] = list
            trial = trial_session(trainer, settings)
            trial.set_callbacks(_copy_callbacks(callbacks, keeps))
            with EntryPoint(
                trial, "fit", trained_module, loaders, copy.copy(datamodule), is_set_up
            ) as entry:
                loaders = _copy_loaders(trial.load_train(), generators)
                trial.training_loaders.use(loaders)
                states = generator_states(generators)
                run = entry.compose_fit(None, None, False)
                watched_run = watch(run)
                # Ctrl-C and SIGTERM end a search at the end of its step, as they end a fit.
                with listening(trial.requests):
                    fit(watched_run, entry.settler)
                entry.finish()
        # Also after an exception: what a trial leaves is discarded with its copies, except for these.
        finally:
            restore_generators(generators, states)
            release_copies()


def _copy_callbacks(
    callbacks: Sequence[Callback], keeps: Sequence[str]
) -> list[Callback]:
    """Copies of the callbacks that have any of these attributes."""
    return [
        copy.deepcopy(callback)
        for callback in callbacks
        if any(hasattr(callback, name) for name in keeps)
    ]


def _copy_loaders(loaders: Loaders, generators: list[RandomGenerator]) -> Loaders:
    """Copies of loaders that read the same data and do not change the position or order of the originals.

    ``generators`` is filled with the generators of the shared datasets.
    """
    if loaders is not None:
        loaders = read_together(loaders)
    if isinstance(loaders, CombinedLoader):
        copies = [_copy_loaders(loader, generators) for loader in loaders.flattened]
        return CombinedLoader(loaders.join(copies), loaders.mode)
    # Reading a list of batches changes nothing in it.
    if loaders is None or isinstance(loaders, Sequence):
        return loaders
    memo: dict[int, object] = {}
    dataset = getattr(loaders, "dataset", None)
    is_indexed = isinstance(loaders, DataLoader) and not isinstance(
        dataset, IterableDataset
    )
    if is_indexed:
        # The copy shares the dataset, which may be large.
        memo[id(dataset)] = dataset
        generators += find_generators(dataset)
    return _copy(loaders, "loader", memo)


def _copy(original: _T, role: str, memo: dict[int, object] | None = None) -> _T:
    try:
        return copy.deepcopy(original, memo)
    except Exception as error:
        # Of any class: user code decides how a copy is made.
        if role == "loader":
            kind: type[TrainerKitError] = DataError
            fix = "pass a DataLoader, or an iterable that copy.deepcopy takes"
        else:
            kind = ConfigurationError
            fix = "tune before the first fit, and keep tensors with a graph, locks and open files out of the module"
        first_line = str(error).partition("\n")[0]
        raise kind(
            f"the tuner runs steps on a copy of the {role}, and this {type(original).__name__} cannot be copied",
            found=f"{type(error).__name__}: {first_line}",
            fix=fix,
        ) from error
