"""Helpers of Lightning's Fabric that programs import by name."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from torch.distributed import is_available, is_initialized

from trainer_kit.checkpoint.files import torch_load
from trainer_kit.checkpoint.weights import read_module
from trainer_kit.compat.checkpoint_io import MapLocation, TorchCheckpointIO
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.location import locate
from trainer_kit.core.types import Loaders, Nested, StateDict

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "distributed_is_initialized",
    "has_len",
    "lazy_load",
    "load_file",
    "materialize_meta_tensors",
    "sized_len",
    "suggested_max_num_workers",
]


def distributed_is_initialized() -> bool:
    """Whether torch's default process group exists.

    Example:
        >>> distributed_is_initialized()
        False
    """
    return is_available() and is_initialized()


def has_len(dataloader: object) -> bool:
    """Whether a loader knows its length.

    Example:
        >>> has_len([1]), has_len(iter([1]))
        (True, False)
    """
    return sized_len(dataloader) is not None


def sized_len(dataloader: Loaders) -> int | None:
    """The length of a loader; None if it has none.

    Example:
        >>> sized_len([1, 2]), sized_len(iter([1]))
        (2, None)
    """
    # torch's DataLoader over a stream has a __len__ that raises.
    try:
        return len(dataloader)
    except (TypeError, NotImplementedError):
        return None


def suggested_max_num_workers(local_world_size: int) -> int:
    """Loader workers for each process of a machine, at least 1: its processors shared by its processes, less one.

    Args:
        local_world_size: processes on this machine.

    Raises:
        ConfigurationError: it is not positive.

    Example:
        >>> suggested_max_num_workers(10000)
        1
    """
    if local_world_size < 1:
        raise ConfigurationError(
            "a machine runs at least one process",
            found=f"local_world_size={local_world_size}",
        )
    processors = os.cpu_count() or 1
    # A container or a SLURM job may use fewer processors than the machine has; macOS and Windows cannot tell.
    if hasattr(os, "sched_getaffinity"):
        processors = len(os.sched_getaffinity(0))
    # One processor is left for the process itself, which runs the loop.
    return max(1, processors // local_world_size - 1)


def lazy_load(filename: str | os.PathLike[str]) -> Nested:
    """Load a ``torch.save`` file whose tensors are read from the disk when they are used.

    Args:
        filename: a local file.

    Raises:
        CheckpointError: it holds objects that would have to be unpickled, or is damaged.
    """
    return torch_load(Path(filename), "cpu", mapped=True)


def load_file(
    path_or_url: str | os.PathLike[str],
    map_location: MapLocation | None = None,
    weights_only: bool | None = None,
) -> Nested:
    """Load a ``torch.save`` file from a path or a URL.

    Args:
        path_or_url: the file.
        map_location: a device; by default the CPU.
        weights_only: accepted: nothing but tensors and plain data is ever read.
    """
    return TorchCheckpointIO().load_checkpoint(path_or_url, map_location)


def materialize_meta_tensors(module: nn.Module, device: torch.device) -> None:
    """Give the parameters and buffers on the meta device storage on ``device``, and initialize them.

    Args:
        module: its submodules that own such tensors need a method ``reset_parameters``.
        device: where they go.

    Raises:
        ConfigurationError: a submodule with such tensors cannot initialize them.

    Example:
        >>> layer = nn.Linear(2, 1, device="meta")
        >>> materialize_meta_tensors(layer, torch.device("cpu"))
        >>> layer.weight.device.type
        'cpu'
    """
    missing = []
    for name, submodule in module.named_modules():
        tensors: Iterable[torch.Tensor] = [
            *submodule.parameters(recurse=False),
            *submodule.buffers(recurse=False),
        ]
        if not any(tensor.is_meta for tensor in tensors):
            continue
        reset = getattr(submodule, "reset_parameters", None)
        if reset is None:
            missing.append(name or type(submodule).__name__)
            continue
        # Without recursion: a child's tensors may have values, which to_empty would discard.
        submodule.to_empty(device=device, recurse=False)
        reset()
    # All of them at once, instead of one more after each correction.
    if missing:
        raise ConfigurationError(
            "these modules have tensors without values and no reset_parameters()",
            found=", ".join(missing),
            fix="define reset_parameters(self), which initializes the tensors",
        )


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_file: str | os.PathLike[str],
    tag: str | None = None,
) -> StateDict:
    """Write the whole float32 weights of a checkpoint directory into one file that ``torch.load`` reads.

    Args:
        checkpoint_dir: a checkpoint of this library, of any strategy, or a DeepSpeed directory that `read_weights`
            takes.
        output_file: the file; it holds ``{"state_dict": ..., "hyper_parameters": ...}``.
        tag: a directory below ``checkpoint_dir``, in place of the newest one of DeepSpeed.

    Returns:
        What the file holds.

    Raises:
        CheckpointError: this is not a checkpoint.
    """
    directory = locate(checkpoint_dir)
    if tag is not None:
        directory = directory / tag
    content = read_module(directory)
    weights: StateDict = {}
    for name, value in content["state_dict"].items():
        # Counters and masks keep their dtype.
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value = value.float()
        weights[name] = value
    state = {
        "state_dict": weights,
        "hyper_parameters": dict(content["hyper_parameters"]),
    }
    TorchCheckpointIO().save_checkpoint(state, output_file)
    return state
