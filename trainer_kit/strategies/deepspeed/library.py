"""The library DeepSpeed: imported when it is needed, over the process group that is there, and without a word."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer_kit.core.errors import PrecisionError

__all__ = ["check_float16", "deepspeed_of", "dividing", "let_go", "local_rank", "quiet", "release", "round_parts"]


def deepspeed_of(device: torch.device) -> Any:
    """The library, for ranks that compute on this kind of device."""
    # DeepSpeed calls these once a step or more, and has no other name for them yet.
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated", FutureWarning
    )
    with _environment("DS_ACCELERATOR", device.type), quiet():
        import deepspeed

        if device.type == "cpu":
            # Collectives through shared memory would be compiled first, for minutes, and serve inference only.
            importlib.import_module("deepspeed.comm.torch").build_shm_op = _nothing  # type: ignore[attr-defined]
        if not deepspeed.comm.is_initialized():
            with local_rank():
                deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    return deepspeed


def check_float16(device: torch.device) -> None:
    """Raise a PrecisionError where DeepSpeed has no float16."""
    if not deepspeed_of(device).accelerator.get_accelerator().is_fp16_supported():
        raise PrecisionError(
            "DeepSpeed cannot run float16 on this device", found=device.type, fix='precision="bf16-mixed"'
        )


@contextmanager
def dividing(device: torch.device, config: Mapping[str, Any], full: bool = False) -> Iterator[None]:
    """Inside, the parameters of every layer are divided among the ranks as soon as it is made.

    Args:
        device: where.
        config: the JSON.
        full: in full precision; `round_parts` makes of them what the engine wants.
    """
    deepspeed = deepspeed_of(device)
    low = {key: {"enabled": False} for key in ("bf16", "fp16")} if full else {}
    with quiet(), local_rank(), torch.device(device), deepspeed.zero.Init(config_dict_or_path={**config, **low}):
        yield


def round_parts(module: nn.Module, config: Mapping[str, Any]) -> None:
    """Parts in full precision become those of the dtype that the JSON has for all."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    chosen = [dtype for name, dtype in dtypes.items() if (config.get(name) or {}).get("enabled")]
    for parameter in module.parameters() if chosen else ():
        part = getattr(parameter, "ds_tensor", None)
        if part is not None and part.dtype == torch.float32:
            rounded = part.data.to(chosen[0])
            part.data = rounded.pin_memory() if part.is_pinned() else rounded
            parameter.data = parameter.data.to(chosen[0])


def release(module: nn.Module) -> None:
    """An engine of an earlier run lets go of the module; what it divided stays so, for the next one to take over."""
    earlier: set[Any] = {getattr(parameter, "_z3_optimizer", None) for parameter in module.parameters()} - {None}
    with quiet():
        for optimizer in earlier:
            optimizer._partition_all_parameters()
            optimizer.destroy()


def let_go(engine: Any) -> None:
    """The engine's hooks come off the module."""
    with quiet():
        engine.module_forward_pre_hook.remove()
        engine.module_forward_post_hook.remove()
        engine.destroy()


@contextmanager
def quiet() -> Iterator[None]:
    """DeepSpeed tells of every setting, and what it imports of torch is deprecated; errors are still said."""
    logger = logging.getLogger("DeepSpeed")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        logger.setLevel(before)


@contextmanager
def local_rank() -> Iterator[None]:
    """DeepSpeed reads it from the environment, which a process alone does not have."""
    with _environment("LOCAL_RANK", "0"):
        yield


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    given = name in os.environ
    os.environ.setdefault(name, value)
    try:
        yield
    finally:
        if not given:
            del os.environ[name]


def _nothing() -> None:
    """No such operation."""
