"""The note on an exception for memory that ran out: what was used, and what needs less."""

from __future__ import annotations

from trainer_kit.core.devices import device_memory, memory_peak
from trainer_kit.core.display import in_units
from trainer_kit.training.session import Session

__all__ = ["describe_memory"]


def describe_memory(trainer: Session, stage: str) -> str:
    """The note for an out-of-memory error: what was used, and what needs less."""
    device = trainer.strategy.device
    ranks_here = max(1, trainer.environment.local_world_size)
    peak = in_units(memory_peak(device))
    # On the CPU the ranks of a node share its memory.
    memory = in_units(device_memory(device, ranks_here))
    usage = f"peak {peak} of {memory} on {device}"
    if stage != "fit":
        return (
            f"out of memory in {stage}: {usage}\n  fix:   a smaller batch in the loader"
        )
    return (
        f"out of memory at step {trainer.progress.step + 1}: {usage}\n"
        "  fix:   callbacks=[AutoMicroBatch()] repeats such a step with smaller micro-batches (one device and DDP); or"
        " half the batch size with accumulate_grad_batches=2, precision='bf16-mixed', strategy='fsdp'\n"
        "  see:   troubleshooting#cuda-out-of-memory"
    )
