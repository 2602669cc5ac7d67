"""`DataModule`: datasets and loaders as one reusable object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from os import PathLike
from typing import Any, Final, TypeAlias, TypeVar

from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainer_kit.core.hooks import DataHooks
from trainer_kit.core.hparams import (
    HParamsMixin,
    classmethod_only,
    construct,
    read_hparams,
)
from trainer_kit.core.lazy import other_names
from trainer_kit.core.notebook import html_arguments
from trainer_kit.core.protocols import TrainerLike
from trainer_kit.core.registry import READERS
from trainer_kit.core.signatures import check_names
from trainer_kit.core.types import Keywords, Loaders, SavedState, StateDict

__all__ = [
    "DataModule",
    "Datasets",
]

__getattr__ = other_names(__name__)

Datasets: TypeAlias = Any
"""A dataset, or datasets in nested lists and dicts; None where an entry point has no data."""


_Data = TypeVar("_Data", bound="DataModule")


class DataModule(DataHooks, HParamsMixin):
    """Prepares datasets and returns their loaders; `DataHooks` describes the methods to override.

    Example:
        >>> import torch
        >>> data = DataModule.from_datasets(torch.arange(8), batch_size=4)
        >>> [batch.tolist() for batch in data.train_dataloader()]  # doctest: +ELLIPSIS
        [[...], [...]]
    """

    CHECKPOINT_HYPER_PARAMS_KEY: Final = "datamodule_hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME: Final = "datamodule_hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE: Final = "datamodule_hparams_type"
    """Keys of Lightning's files; a checkpoint of this library has the first one."""

    trainer: TrainerLike | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # As of callbacks and modules: only names that look misspelled.
        check_names(cls, DataHooks)

    def _repr_html_(self) -> str:
        return html_arguments(self, dict(self.hparams))

    def state_dict(self) -> SavedState:
        """The state to save in checkpoints: plain data and tensors."""
        return {}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore what ``state_dict`` returned.

        Args:
            state_dict: the state as plain data and tensors, from a checkpoint that is resumed or given to
                `load_from_checkpoint`.
        """

    @classmethod_only
    def load_from_checkpoint(
        cls: type[_Data],
        checkpoint_path: str | PathLike[str],
        map_location: object = None,
        hparams_file: str | PathLike[str] | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> _Data:
        """Build the datamodule from its hyperparameters in a checkpoint, and load its state.

        Args:
            checkpoint_path: a checkpoint directory of a fit with this datamodule, or a Lightning file.
            map_location: accepted for compatibility with Lightning; not used.
            hparams_file: a YAML, JSON or CSV file of hyperparameters, in place of the checkpoint's.
            weights_only: accepted for compatibility with Lightning; nothing in the file is executed.
            kwargs: constructor arguments; they take precedence over the checkpoint's.

        Raises:
            CheckpointError: the file cannot be read.
        """
        state = READERS.get("module")(checkpoint_path, whole=True)
        if hparams_file is None:
            hparams = state.get("datamodule_hyper_parameters") or {}
        else:
            hparams = read_hparams(hparams_file)
        datamodule = construct(cls, hparams, kwargs)
        # Lightning's files hold the state under the name of the class.
        datamodule_state = state.get("datamodule") or state.get(cls.__qualname__)
        if datamodule_state:
            datamodule.load_state_dict(datamodule_state)
        return datamodule

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Datasets = None,
        val_dataset: Datasets = None,
        test_dataset: Datasets = None,
        predict_dataset: Datasets = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **datamodule_kwargs: Any,
    ) -> DataModule:
        """Create a datamodule from existing datasets.

        Args:
            train_dataset: a dataset, or several in a list or dict; shuffled unless it is iterable.
            val_dataset: a dataset or several.
            test_dataset: a dataset or several.
            predict_dataset: a dataset or several.
            batch_size: samples per batch and rank; also passed to the constructor of ``cls`` if it takes it.
            num_workers: loader workers; also passed to the constructor if it takes it.
            datamodule_kwargs: further arguments of the constructor of ``cls``.
        """
        options: Keywords = {
            "batch_size": batch_size,
            "num_workers": num_workers,
        }
        datamodule: DataModule = construct(cls, options, datamodule_kwargs)
        datasets = {
            "train": train_dataset,
            "val": val_dataset,
            "test": test_dataset,
            "predict": predict_dataset,
        }
        for name, dataset in datasets.items():
            if dataset is not None:
                shuffle = name == "train"
                # On the object, where it hides the method of the class.
                make_loaders = partial(_make_loaders, dataset, shuffle, options)
                setattr(datamodule, f"{name}_dataloader", make_loaders)
        return datamodule


def _make_loaders(dataset: Datasets, shuffle: bool, options: Keywords) -> Loaders:
    """A loader for each dataset, in the same nesting of lists and dicts."""
    if isinstance(dataset, Mapping):
        return {
            name: _make_loaders(member, shuffle, options)
            for name, member in dataset.items()
        }
    # A torch Dataset that is a sequence too is one dataset, and so are the characters of a string.
    if isinstance(dataset, Sequence) and not isinstance(dataset, (str, Dataset)):
        return [_make_loaders(member, shuffle, options) for member in dataset]
    if isinstance(dataset, IterableDataset):
        # torch refuses to shuffle it: its order is its own.
        shuffle = False
    return DataLoader(dataset, shuffle=shuffle, **options)
