"""Options of Hugging Face Accelerate that are refused, with what to use instead."""

from __future__ import annotations

from typing import Final

from trainer_kit.core.errors import ConfigurationError

__all__ = ["refused"]

_REFUSED: Final[dict[str, tuple[str, str | None]]] = {
    "cp_backend": ("unknown cp_backend", 'cp_backend="torch"'),
    "enable_msamp": (
        "MS-AMP is not supported",
        'mixed_precision="fp8" without DeepSpeed, or bf16',
    ),
    "init_method": (
        "the launcher sets the rendezvous address of the processes",
        "leave it out: start them with torchrun or trainer-kit launch, or set MASTER_ADDR and MASTER_PORT",
    ),
    "lomo_backward": (
        "LOMO optimizers are not supported",
        "accelerator.backward(loss), optimizer.step()",
    ),
    "lr_scheduler_callable": (
        "DummyScheduler takes no function",
        "call the function, and prepare its scheduler",
    ),
    "offload_activations": (
        "activation offloading needs ranks that shard parameters",
        "dp_shard_size=2 or more, or leave activation_checkpointing_offload out",
    ),
    "cpu_offload": (
        "CPU offload needs ranks that shard parameters",
        "dp_shard_size=2 or more, or leave cpu_offload out",
    ),
    "mixed_precision": (
        "FSDP's mixed precision needs ranks that shard parameters",
        'dp_shard_size=2 or more, or Accelerator(mixed_precision="bf16") without mixed_precision_policy',
    ),
    "ignored_modules": (
        "ignored_modules needs ranks that shard parameters",
        "dp_shard_size=2 or more, or leave ignored_modules out",
    ),
    "safe_serialization": ("checkpoints are always written without pickle", None),
    "select": (
        "the Accelerator selects one of several DeepSpeed plugins",
        "accelerator.state.select_deepspeed_plugin(name)",
    ),
    "slice_fn_for_dispatch": (
        "the main process sends whole batches, and slices none",
        "leave it out; the loader's collate_fn makes the batches",
    ),
    "sp_size": (
        "sp_size is not supported",
        "use cp_size, and accelerator.maybe_context_parallel(...)",
    ),
    "torch_device_mesh": (
        "the Accelerator creates the device mesh",
        "pass only tp_size",
    ),
}
"""By name of the argument, value or method: the problem and the fix."""


def refused(name: str, found: str | None = None) -> ConfigurationError:
    """The error for an option that is refused.

    Args:
        name: the key in the table above.
        found: the value that the user gave.

    Example:
        >>> print(refused("sp_size", "sp_size=2"))
        sp_size is not supported
          found: sp_size=2
          fix:   use cp_size, and accelerator.maybe_context_parallel(...)
    """
    problem, fix = _REFUSED[name]
    return ConfigurationError(problem, found=found, fix=fix)
