"""How micro-batches pass through the stages: torch's schedules, and one forward after the other without gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch import Tensor

from trainer_kit.core.errors import StrategyError, did_you_mean
from trainer_kit.strategies.process_group import ProcessGroup
from trainer_kit.strategies.transforms.pipeline_stages import Stage, Turn

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

__all__ = ["SCHEDULES", "Schedules", "bubble", "check_schedule", "without_storage"]


SCHEDULES: Final = {
    "GPipe": "one",
    "1F1B": "one",
    "Interleaved1F1B": "loop",
    "LoopedBFS": "loop",
    "InterleavedZeroBubble": "loop",
    "ZBVZeroBubble": "v",
}
"""By name: whether a rank has one stage, or several, which go around the ranks in a loop or there and back."""
_KEPT: Final = 4
"""Schedules whose buffers are kept: the usual window's, the last one's of an epoch, and what is between."""


def check_schedule(name: str) -> str:
    """How a schedule's stages lie on the ranks.

    Raises:
        StrategyError: there is none of this name.
    """
    if name not in SCHEDULES:
        raise StrategyError(f"no pipeline schedule {name!r}", fix=did_you_mean(name, list(SCHEDULES)))
    return SCHEDULES[name]


def bubble(batches: int, stages: int) -> str | None:
    """A line about windows that leave ranks waiting for most of the time; None where they do not.

    Args:
        batches: micro-batches of a window.
        stages: of the pipeline.

    Example:
        >>> bubble(8, 4), bubble(2, 4)[:41]
        (None, '2 micro-batches an optimizer step for 4 s')
    """
    if batches >= stages:
        return None
    return (
        f"{batches} micro-batches an optimizer step for {stages} stages of a pipeline: its ranks wait most of the time"
        f" (accumulate_grad_batches={2 * stages} or more keeps them busy)"
    )


@final
class Schedules:
    """One of each length and shape, made when it is needed.

    Args:
        name: of `SCHEDULES`.
        stages: of this rank.
        count: of stages on all ranks.
        group: of the ranks that share one model.
        device: where this rank computes.
    """

    def __init__(
        self, name: str, stages: Sequence[Stage], count: int, group: ProcessGroup, device: torch.device
    ) -> None:
        self.name, self.stages, self.count, self.group, self.device = name, stages, count, group, device
        self._made: dict[tuple[Any, int], Any] = {}

    def run(self, key: Any, shapes: Mapping[int, tuple[Tensor, ...]], turns: Sequence[Turn]) -> None:
        """So many micro-batches of one shape; gradients are added to those that are there.

        Args:
            key: of the shape.
            shapes: what the stages take and return, as `Pipeline` knows it.
            turns: the micro-batches.
        """
        schedule = self._made.pop((key, len(turns)), None)
        # torch drops the gradients of what FSDP divides when a schedule runs for the first time.
        # Each once: two stages here may share one.
        parameters = {} if schedule is not None else {p: p.grad for s in self.stages for p in s.parameters()}
        schedule = schedule or self._make(len(turns), shapes)
        self._made[key, len(turns)] = schedule  # the latest is at the end
        if len(self._made) > _KEPT:
            del self._made[next(iter(self._made))]
        for parameter in parameters:
            parameter.grad = None
        for stage in self.stages:
            stage.turns = iter(turns)
        numbers = torch.arange(len(turns), device=self.device)
        first, last = self.stages[0].index == 0, self.stages[-1].last
        schedule.step(*((numbers,) if first else ()), target=numbers if last else None, return_outputs=False)
        for parameter, gradient in parameters.items():
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def _make(self, batches: int, shapes: Mapping[int, tuple[Tensor, ...]]) -> Any:
        from torch.distributed.pipelining import schedules

        stages: list[Any] = [self._torch_stage(stage, shapes) for stage in self.stages]
        options: dict[str, Any] = {"n_microbatches": batches, "loss_fn": _loss_itself, "scale_grads": False}
        one = SCHEDULES[self.name] == "one"
        made = schedules.get_schedule_class(self.name)
        try:
            return made(stages[0] if one else stages, **options)
        except ValueError:  # too few micro-batches for it, or not a multiple of what it wants
            return (
                schedules.ScheduleGPipe(stages[0], **options) if one else schedules.ScheduleLoopedBFS(stages, **options)
            )

    def _torch_stage(self, stage: Stage, shapes: Mapping[int, tuple[Tensor, ...]]) -> PipelineStage:
        from torch.distributed.pipelining import PipelineStage

        # The first one's input is the number of the micro-batch, the last one's output is the loss.
        numbers = torch.empty(1, dtype=torch.int64, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        return PipelineStage(
            stage,
            stage.index,
            self.count,
            self.device,
            input_args=numbers if stage.index == 0 else shapes[stage.index],
            output_args=loss if stage.last else shapes[stage.index + 1],
            group=self.group.group,
        )


def _loss_itself(output: Any, target: Any) -> Any:
    return output


def without_storage(tensor: Tensor) -> Tensor:
    """A tensor of the meta device, of the shape and dtype of another, that requires gradients where it can."""
    return torch.empty_like(tensor.detach(), device="meta").contiguous().requires_grad_(tensor.is_floating_point())
