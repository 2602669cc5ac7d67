"""The gradients that a DeepSpeed engine keeps from one micro-batch to the next, and from one window to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from trainer_kit.core.errors import StrategyError
from trainer_kit.core.protocols import Group, MicroSteps

__all__ = ["OpenWindow", "Windows", "take_step"]


def _begin(engine: Any, unfinished: bool) -> None:
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


def _finish(engine: Any) -> None:
    """What the engine does in the last backward of a window, for one that has none or leaves parameters out."""
    if engine.zero_optimization_partition_gradients():
        engine.optimizer.finalize_gradient_accumulation_boundary()
    else:
        engine.allreduce_gradients()


def take_step(engine: Any, clip: float) -> bool:
    """Clip and step; returns whether it did, or gradients overflowed.

    Args:
        engine: DeepSpeed's.
        clip: the largest 2-norm of all gradients; 0 for any.
    """
    engine._config.gradient_clipping = clip
    if hasattr(engine.optimizer, "clip_grad"):
        engine.optimizer.clip_grad = clip
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    return bool(engine.was_step_applied())


@final
class Windows:
    """A Trainer's: how many micro-batches a window has is known when it begins.

    Attributes:
        unfinished: whether gradients were made that have not been stepped.
    """

    def __init__(self) -> None:
        self.unfinished = False

    def run(self, engine: Any, micro: MicroSteps, finishes_late: bool) -> None:
        """One micro-batch after the other; the engine is told which one is the last.

        Args:
            engine: DeepSpeed's.
            micro: the micro-batches.
            finishes_late: gradients are put together after the last backward, not in it.
        """
        last = micro.count - 1
        _begin(engine, self.unfinished)
        for index in range(micro.count):
            micro.begin(index)
            engine.set_gradient_accumulation_boundary(index == last and not finishes_late)
            loss = micro.forward(index)
            if loss is not None:
                self.unfinished = True
                micro.backward(index, loss)
            if index == last and self.unfinished and (finishes_late or loss is None):
                _finish(engine)
            micro.end(index)


@final
class OpenWindow:
    """The window of a loop of the user's own: it begins with a backward, and nobody says which one is its last.

    Gradients are therefore put together when they are looked at or stepped, not in the last backward.
    """

    def __init__(self) -> None:
        self._begun = self._complete = self._left = False

    @property
    def begun(self) -> bool:
        """Whether there is anything to step."""
        return self._begun

    def backward(self, engine: Any, loss: Tensor, retain_graph: bool) -> None:
        """One of several; each loss is weighed already.

        Raises:
            StrategyError: the gradients so far have been clipped.
        """
        if self._complete:
            raise StrategyError(
                "a backward after gradients were clipped, and before they were stepped",
                fix="clip_grad_norm_ at the end of the window: if accelerator.sync_gradients",
            )
        if not self._begun:
            if self._left:
                for parameter in engine.module.parameters():
                    parameter.grad = None
            _begin(engine, self._left)
            self._begun, self._left = True, False
        if hasattr(engine.optimizer, "clear_backward_seen_flag"):
            engine.optimizer.clear_backward_seen_flag()  # the engine counts forwards, and writes over between two
        engine.set_gradient_accumulation_boundary(False)
        engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)

    def complete(self, engine: Any) -> None:
        """Average over the ranks, and put each rank's part where the engine steps it; every rank calls it."""
        if self._begun and not self._complete:
            engine.set_gradient_accumulation_boundary(True)
            _finish(engine)
            self._complete = True

    def drop(self, set_to_none: bool = True) -> None:
        """What was begun is not stepped."""
        self._left = self._left or self._begun
        self._begun = self._complete = False

    def over(self) -> None:
        """The engine has stepped, and dropped its gradients."""
        self._begun = self._complete = False

    def parts(self, engine: Any) -> list[Tensor]:
        """This rank's part of all gradients, and the norms that the engine keeps of them to clip by."""
        self.complete(engine)
        if not self._begun:
            return []
        kept = getattr(engine.optimizer, "norm_for_param_grads", None)  # where they are offloaded
        return [*_parts(engine), *(kept.values() if kept else ())]

    def norm(self, engine: Any, world: Group) -> Tensor:
        """The 2-norm of all gradients of all ranks, without the scale of float16."""
        self.complete(engine)
        parts = _parts(engine) if self._begun else []
        norms = torch._foreach_norm(parts) if parts else [torch.zeros((), device=engine.device)]
        squares = torch.stack([norm.float() for norm in norms]).square().sum().to(engine.device)
        if engine.zero_optimization():  # each rank has a part
            world.all_reduce(squares)
        return squares.sqrt() / _scale(engine)


def _parts(engine: Any) -> list[Tensor]:
    """This rank's gradients where the engine steps them from; what pads them is zero."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # stage 3
        if optimizer.offload_optimizer:
            return _of(optimizer.fp32_partitioned_groups_flat)
        return [part for group in optimizer.averaged_gradients.values() for part in group or ()]
    if hasattr(optimizer, "averaged_gradients"):  # stages 1 and 2
        if optimizer.cpu_offload:
            return _of(optimizer.single_partition_of_fp32_groups)
        return [part for group in optimizer.averaged_gradients.values() for part in group or ()]
    if hasattr(optimizer, "fp32_groups_gradient_flat_partition"):  # bfloat16 with sums in float32
        return list(optimizer.fp32_groups_gradient_flat_partition)
    return _of(list(engine.module.parameters()))


def _of(tensors: Sequence[Tensor] | Sequence[nn.Parameter]) -> list[Tensor]:
    return [tensor.grad for tensor in tensors if tensor.grad is not None]


def _scale(engine: Any) -> float:
    return float(getattr(engine.optimizer, "loss_scale", 1.0))  # no sync point: a number of the host's
