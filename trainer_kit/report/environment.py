"""Versions, devices and settings of this process, for ``trainer-kit env`` and for reports."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from functools import cache
from typing import Final

from trainer_kit.core.display import mask_secrets
from trainer_kit.loggers.table import service_packages

__all__ = ["describe_environment"]

_PACKAGES: Final = (
    "torch", "numpy", "safetensors", "torchdata", "torchmetrics", "transformers", "accelerate", "lightning",
    "deepspeed", "torchao", "bitsandbytes", "tensorboard",
    *(package.replace("_", "-") for package in service_packages()),
)  # fmt: skip
_VARIABLES: Final = (
    "TRAINER_KIT_", "ACCELERATE_", "CUDA_", "NCCL_", "GLOO_", "TORCH", "OMP_NUM_THREADS", "MASTER_", "RANK",
    "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_", "OMPI_COMM_WORLD_", "PMI_", "HF_HOME", "WANDB_",
)  # fmt: skip


def describe_environment() -> list[tuple[str, str]]:
    """Return the name and value of each fact; secrets in variables are masked.

    Example:
        >>> facts = dict(describe_environment())
        >>> facts["Python"].split()[0] == platform.python_version()
        True
    """
    return [*_machine(), *_variables()]


@cache
def _machine() -> tuple[tuple[str, str], ...]:
    """Return the facts that do not change in a process."""
    return (*_installed(), *_hardware())


def _installed() -> Iterator[tuple[str, str]]:
    yield "trainer_kit", sys.modules[__name__.partition(".")[0]].__version__
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    yield "platform", platform.platform()
    for package in _PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            # Optional: a report lists what is installed.
            continue


def _hardware() -> Iterator[tuple[str, str]]:
    import torch
    import torch.distributed as dist

    from trainer_kit.core.devices import count_accelerators, present_accelerator
    from trainer_kit.core.environment import backends, usable_cores

    yield "CPU", f"{os.cpu_count()} cores, {usable_cores()} usable"
    platforms = []
    if torch.version.cuda:
        platforms.append(f"CUDA {torch.version.cuda}")
    if torch.version.hip:
        platforms.append(f"ROCm {torch.version.hip}")
    yield "torch is built for", ", ".join(platforms) or "the CPU"
    accelerator = present_accelerator()
    text = "none"
    if accelerator is not None:
        text = f"{count_accelerators()} of type {accelerator.type}"
    yield "accelerator", text
    if accelerator is not None and accelerator.type == "cuda":
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            memory = properties.total_memory / 2**30
            yield f"  device {index}", f"{properties.name}, {memory:.0f} GiB"
    if dist.is_available():
        yield "backends", ", ".join(backends("gloo", "nccl", "mpi")) or "none"


def _variables() -> Iterator[tuple[str, str]]:
    # By prefix, not all: the environment of a machine has addresses and keys that no report needs.
    variables = {
        name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)
    }
    for name, value in sorted(mask_secrets(variables).items()):
        yield f"${name}", value
