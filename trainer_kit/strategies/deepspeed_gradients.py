"""The gradients that a DeepSpeed engine keeps from one micro-batch to the next, and from one window to the next."""

from __future__ import annotations

from typing import Any

__all__ = ["begin_window", "finish_window"]


def begin_window(engine: Any, unfinished: bool) -> None:
    """Nothing of an earlier window stays.

    The engine writes over what it kept where a parameter gets a gradient: one that this window does not use would be
    stepped with that of an earlier one.

    Args:
        engine: DeepSpeed's.
        unfinished: whether the window before ended without a step.
    """
    optimizer = engine.optimizer
    if unfinished:
        optimizer.zero_grad(set_to_none=True)
        if hasattr(optimizer, "micro_step_id"):
            optimizer.micro_step_id = 0 if engine.zero_optimization_stage() == 3 else -1
        for name in ("all_grad_tensors", "averaged_gradients"):
            kept = getattr(optimizer, name, None)
            if isinstance(kept, dict):
                kept.update(dict.fromkeys(kept))
    if getattr(optimizer, "grad_partitions_flat_buffer", None) is not None:  # stage 3
        optimizer.grad_partitions_flat_buffer.zero_()
        _clear_offloaded(optimizer.offload_optimizer, optimizer.fp32_partitioned_groups_flat)
    elif getattr(optimizer, "cpu_offload", False):
        for gradient in optimizer.accumulated_grads_in_cpu.values():
            gradient.zero_()
        _clear_offloaded(True, optimizer.single_partition_of_fp32_groups)


def _clear_offloaded(offloads: bool, masters: list[Any]) -> None:
    for master in masters if offloads else ():
        if master.grad is not None:
            master.grad.zero_()


def finish_window(engine: Any) -> None:
    """What the engine does in the last backward of a window, for one that has none or leaves parameters out."""
    if engine.zero_optimization_partition_gradients():
        engine.optimizer.finalize_gradient_accumulation_boundary()
    else:
        engine.allreduce_gradients()
