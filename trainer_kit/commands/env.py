"""``trainer-kit env``: versions, devices and configuration, to put into a report."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any, Final

import click

from trainer_kit.core.display import mask_secrets
from trainer_kit.core.errors import TrainerKitError

__all__ = ["env"]

_PACKAGES: Final = (
    "torch", "numpy", "safetensors", "torchdata", "torchmetrics", "transformers", "accelerate", "lightning",
    "deepspeed", "torchao", "bitsandbytes", "wandb", "tensorboard",
)  # fmt: skip
_VARIABLES: Final = (
    "TRAINER_KIT_", "ACCELERATE_", "CUDA_", "NCCL_", "GLOO_", "TORCH", "OMP_NUM_THREADS", "MASTER_", "RANK",
    "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_", "OMPI_COMM_WORLD_", "PMI_", "HF_HOME", "WANDB_",
)  # fmt: skip


@click.command("env")
def env() -> None:
    """Show versions, devices and settings; secrets are masked."""
    for name, value in [*_versions(), *_devices(), *_variables(), *_configuration()]:
        click.echo(f"{name}: {value}")


def _versions() -> Iterator[tuple[str, Any]]:
    yield "trainer_kit", sys.modules[__name__.partition(".")[0]].__version__
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    yield "platform", platform.platform()
    for package in _PACKAGES:
        try:
            yield package, metadata.version(package)
        except metadata.PackageNotFoundError:
            continue


def _devices() -> Iterator[tuple[str, Any]]:
    import torch
    import torch.distributed as dist

    from trainer_kit.core.devices import count_accelerators, present_accelerator

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "CPU", f"{os.cpu_count()} cores, {usable} usable"
    built = [
        f"CUDA {torch.version.cuda}" if torch.version.cuda else "",
        f"ROCm {torch.version.hip}" if torch.version.hip else "",
    ]
    yield "torch is built for", ", ".join(filter(None, built)) or "the CPU"
    found = present_accelerator()
    yield "accelerator", "none" if found is None else f"{count_accelerators()} of type {found.type}"
    if found is not None and found.type == "cuda":
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            yield f"  device {index}", f"{about.name}, {about.total_memory / 2**30:.0f} GiB"
    if dist.is_available():
        backends = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
        yield "backends", ", ".join(name for name, there in backends.items() if there()) or "none"


def _variables() -> Iterator[tuple[str, Any]]:
    set_here = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}
    for name, value in sorted(mask_secrets(set_here).items()):
        yield f"${name}", value


def _configuration() -> Iterator[tuple[str, Any]]:
    from trainer_kit.launch.configuration import default_file, read_configuration

    path = default_file()
    yield "configuration", path or "none"
    if path is None:
        return
    try:
        values = read_configuration(path).values
    except TrainerKitError as error:
        yield "  unreadable", error
        return
    for name, value in mask_secrets(dict(values)).items():
        yield f"  {name}", value
