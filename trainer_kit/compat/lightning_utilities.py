"""Helpers and types of Lightning's `utilities`, under the same names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.enums import StrEnum as LightningEnum
from lightning_utilities.core.overrides import is_overridden as _is_overridden
from lightning_utilities.core.rank_zero import (
    WarningCache,
    rank_prefixed_message,
    rank_zero_debug,
    rank_zero_deprecation,
    rank_zero_info,
    rank_zero_only,
    rank_zero_warn,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau as TorchReduceLROnPlateau
from torch.utils.data import IterableDataset

from trainer_kit.core.datamodule import DataModule
from trainer_kit.core.devices import ran_out_of_memory
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hooks import Callback  # sets the rank of `rank_zero_only`
from trainer_kit.core.hparams import HParams
from trainer_kit.core.module import TrainModule
from trainer_kit.core.seed import preserved_rng
from trainer_kit.core.types import Function
from trainer_kit.data.sizes import batch_size_of
from trainer_kit.loggers.csv_logs import CSVLogger
from trainer_kit.loggers.layout import DummyLogger
from trainer_kit.loggers.tensorboard import TensorBoardLogger
from trainer_kit.strategies.strategy import Strategy

__all__ = [
    "EVAL_DATALOADERS",
    "FLOAT16_EPSILON",
    "FLOAT32_EPSILON",
    "FLOAT64_EPSILON",
    "STEP_OUTPUT",
    "TRAIN_DATALOADERS",
    "AttributeDict",
    "DistributedDataParallel",
    "GradClipAlgorithmType",
    "LRSchedulerCallable",
    "LRSchedulerConfigType",
    "LRSchedulerPLType",
    "LRSchedulerType",
    "LRSchedulerTypeTuple",
    "LRSchedulerTypeUnion",
    "LightningDeprecationWarning",
    "LightningEnum",
    "MisconfigurationException",
    "OptimizerCallable",
    "OptimizerLRScheduler",
    "ParallelStrategy",
    "PossibleUserWarning",
    "WarningCache",
    "apply_to_collection",
    "cli_lightning_logo",
    "extract_batch_size",
    "fabric_csv_logger",
    "fabric_model_parallel",
    "fabric_tensorboard_logger",
    "get_filesystem",
    "get_torchvision_model",
    "grad_norm",
    "has_iterable_dataset",
    "is_oom_error",
    "is_overridden",
    "isolate_rng",
    "rank_prefixed_message",
    "rank_zero_debug",
    "rank_zero_deprecation",
    "rank_zero_experiment",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "torchvision",
]


def __getattr__(name: str) -> object:
    if name != "ReduceLROnPlateau":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # It was here in 0.2.0. At the first use, and by its former path: commands are above this room.
    return import_module("trainer_kit.compat._plateau").ReduceLROnPlateau


STEP_OUTPUT = Tensor | Mapping[str, Any] | None
TRAIN_DATALOADERS = Any
EVAL_DATALOADERS = Any
LRSchedulerTypeTuple = (LRScheduler, TorchReduceLROnPlateau)
LRSchedulerTypeUnion = LRScheduler | TorchReduceLROnPlateau
LRSchedulerType = type[LRScheduler] | type[TorchReduceLROnPlateau]
LRSchedulerPLType = LRSchedulerTypeUnion
LRSchedulerConfigType = dict[str, Any]
OptimizerLRScheduler = (
    Optimizer
    | Sequence[Optimizer]
    | tuple[Sequence[Optimizer], Sequence[Any]]
    | Mapping[str, Any]
    | None
)
OptimizerCallable = Callable[[Iterable[Any]], Optimizer]
LRSchedulerCallable = Callable[[Optimizer], LRSchedulerTypeUnion]
_PATH = str | os.PathLike[str]
_MAP_LOCATION_TYPE = (
    torch.device | str | int | Callable[[Any, str], Any] | Mapping[str, str] | None
)
_METRIC = Tensor | int | float
_EVALUATE_OUTPUT = list[Mapping[str, float]]
_PREDICT_OUTPUT = list[Any] | list[list[Any]]
_IS_WINDOWS = os.name == "nt"
_RICH_AVAILABLE, _TORCHVISION_AVAILABLE = (
    find_spec(name) is not None for name in ("rich", "torchvision")
)
FLOAT16_EPSILON, FLOAT32_EPSILON, FLOAT64_EPSILON = (
    torch.finfo(dtype).eps for dtype in (torch.float16, torch.float32, torch.float64)
)

MisconfigurationException = ConfigurationError
"""The error that this library raises for a wrong call."""
AttributeDict = HParams
extract_batch_size = batch_size_of
is_oom_error = ran_out_of_memory

_Returned = TypeVar("_Returned")


class PossibleUserWarning(UserWarning):
    """For filters; this library issues none."""


class LightningDeprecationWarning(DeprecationWarning):
    """For filters; this library issues none."""


class GradClipAlgorithmType(LightningEnum):
    """Values of ``gradient_clip_algorithm``."""

    VALUE = "value"
    NORM = "norm"


def rank_zero_experiment(function: Callable[[Any], _Returned]) -> Function:
    """Decorator for the ``experiment`` of a logger: on ranks other than 0, every call does nothing.

    Example:
        >>> class Mine:
        ...     @property
        ...     @rank_zero_experiment
        ...     def experiment(self):
        ...         return "a run"
        >>> Mine().experiment
        'a run'
    """

    @wraps(function)
    def experiment(self: object) -> object:
        # Before any rank is known, every process counts as rank 0.
        if getattr(rank_zero_only, "rank", 0) != 0:
            return DummyLogger().experiment
        return function(self)

    return experiment


def is_overridden(
    method_name: str, instance: object | None = None, parent: type[object] | None = None
) -> bool:
    """Whether a class defines a method that its parent has.

    Args:
        method_name: the method's name.
        instance: an object of the class; None has no overrides.
        parent: the class with the default; optional for modules, datamodules and callbacks.

    Raises:
        ConfigurationError: ``parent`` is missing for any other object.

    Example:
        >>> from trainer_kit.testing import TinyModule
        >>> is_overridden("training_step", TinyModule()), is_overridden("on_fit_start", TinyModule())
        (True, False)
    """
    if instance is None:
        return False
    # As in Lightning, which knows the base of its own three classes only.
    if parent is None:
        parents = (TrainModule, DataModule, Callback)
        parent = next((cls for cls in parents if isinstance(instance, cls)), None)
    if parent is None:
        raise ConfigurationError(
            f"the base class of {type(instance).__name__} is unknown",
            fix="pass parent=",
        )
    return _is_overridden(method_name, instance, parent)


def get_filesystem(path: _PATH, **options: object) -> Any:
    """The fsspec file system of a path or a URL.

    Args:
        path: local, or with a protocol such as ``s3://``.
        options: options of the file system.

    Example:
        >>> get_filesystem("memory://runs").protocol
        'memory'
    """
    from fsspec.core import url_to_fs

    return url_to_fs(str(path), **options)[0]


def grad_norm(
    module: nn.Module, norm_type: float | int | str, group_separator: str = "/"
) -> dict[str, float]:
    """The norm of each parameter's gradient and of all gradients; a sync point.

    Args:
        module: the module, after the backward.
        norm_type: the order of the norm, such as 2 or ``"inf"``.
        group_separator: the separator after ``grad_2.0_norm`` in the names.

    Raises:
        ConfigurationError: the order is not positive.

    Example:
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> layer(torch.ones(1, 2)).sum().backward()
        >>> [(name, round(value, 2)) for name, value in grad_norm(layer, 2).items()]
        [('grad_2.0_norm/weight', 1.41), ('grad_2.0_norm_total', 1.41)]
    """
    # A float, because the names contain it: "grad_2.0_norm" for 2 and for "2".
    order = float(norm_type)
    if not order > 0:
        raise ConfigurationError(
            "the order of a norm must be positive", found=f"norm_type={norm_type}"
        )
    norm_tensors = {
        name: p.grad.detach().norm(order)
        for name, p in module.named_parameters()
        # A frozen or unused parameter has no gradient, and no entry.
        if p.grad is not None
    }
    prefix = f"grad_{order}_norm{group_separator}"
    norms = {f"{prefix}{name}": float(norm) for name, norm in norm_tensors.items()}
    # The norm of the norms is that of all gradients together. Without gradients there is no entry.
    if norms:
        total = torch.stack(list(norm_tensors.values())).norm(order)
        norms[f"grad_{order}_norm_total"] = float(total)
    return norms


def has_iterable_dataset(dataloader: object) -> bool:
    """Whether the loader's dataset is an ``IterableDataset``."""
    return isinstance(getattr(dataloader, "dataset", None), IterableDataset)


@contextmanager
def isolate_rng(include_cuda: bool = True) -> Iterator[None]:
    """Context that restores the state of the random number generators on exit.

    Args:
        include_cuda: include the current accelerator.
    """
    # The CPU's generators, Python's and NumPy's are always restored.
    device = None
    if include_cuda and torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
    with preserved_rng(device):
        yield


def torchvision() -> Any:
    """The package torchvision.

    Raises:
        ConfigurationError: it is not installed.
    """
    try:
        return import_module("torchvision")
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            "this needs torchvision, which is not installed",
            fix="pip install torchvision",
        ) from error


def get_torchvision_model(model_name: str, **kwargs: Any) -> nn.Module:
    """One of torchvision's models by name; a shorter name for ``torchvision.models.get_model``.

    Args:
        model_name: such as ``"resnet18"``.
        kwargs: options of the model, such as ``weights``.

    Raises:
        ConfigurationError: torchvision is not installed.
    """
    model: nn.Module = torchvision().models.get_model(model_name, **kwargs)
    return model


class _AnyParallel(type):
    # A strategy here is parallel by the world that it runs in, and not by its class.
    def __instancecheck__(cls, instance: object) -> bool:
        return (
            isinstance(instance, Strategy)
            and instance.started
            and instance.world_size > 1
        )


class ParallelStrategy(metaclass=_AnyParallel):
    """For ``isinstance``: a strategy that runs on several processes. Subclass `Strategy` to write one."""

    # Without this a subclass would be a strategy that no Trainer accepts, and the error would come later.
    def __init_subclass__(cls) -> None:
        raise ConfigurationError(
            "ParallelStrategy is only for isinstance checks",
            fix="subclass trainer_kit.strategies.Strategy",
        )


def fabric_csv_logger(root_dir: _PATH, *args: Any, **kwargs: Any) -> CSVLogger:
    """`CSVLogger` under the names of Fabric's arguments: ``root_dir`` is ``save_dir``."""
    return CSVLogger(root_dir, *args, **kwargs)


def fabric_model_parallel(
    parallelize_fn: Callable[[nn.Module, Any], nn.Module], *args: Any, **kwargs: Any
) -> Strategy:
    """`ModelParallelStrategy` under the names of Fabric's arguments: what divides the module comes first."""
    # Imported in the call: the other names of this module need no tensor parallelism.
    from trainer_kit.strategies.model_parallel import ModelParallelStrategy

    return ModelParallelStrategy(*args, parallelize_fn=parallelize_fn, **kwargs)


def fabric_tensorboard_logger(
    root_dir: _PATH, *args: Any, **kwargs: Any
) -> TensorBoardLogger:
    """`TensorBoardLogger` under the names of Fabric's arguments: ``root_dir`` is ``save_dir``."""
    return TensorBoardLogger(root_dir, *args, **kwargs)


def cli_lightning_logo() -> None:
    """Does nothing; it exists because example programs call it."""
