"""Pipeline parallel: each rank holds some stages of the model, and a window's micro-batches flow through them.

The schedules are torch's (``torch.distributed.pipelining``; GPipe: Huang et al., 2019; 1F1B and interleaved: Narayanan
et al., 2021; breadth-first: Lamy-Poirier, 2023; zero bubble: Qi et al., 2024).
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trainer_kit.core.errors import StrategyError, did_you_mean
from trainer_kit.core.parallel import ParallelPlan, PipelinePlan
from trainer_kit.core.protocols import Group, MicroSteps, Precision
from trainer_kit.core.seed import preserved_rng
from trainer_kit.strategies.gradients import clip_gradients
from trainer_kit.strategies.transforms.relay import Relay
from trainer_kit.strategies.transforms.split import Stage, StandIn, Turn, make_stages
from trainer_kit.strategies.transforms.stages import lay_out, pipelined_model

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

__all__ = ["SCHEDULES", "Pipeline"]

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


class _Taken(BaseException):
    """The step has called the model; what it called it with is what was wanted."""


@final
class Pipeline:
    """The stages of this rank, and how windows and evaluation batches run through all of them.

    Args:
        group: of the ranks that share one model, in the order of the stages.
        world: all processes.
        device: where this rank computes.
        schedule: a name of `SCHEDULES`.
        stages_per_rank: for schedules that take several.

    Attributes:
        stages: of this rank: what further transforms wrap.
        first, last: whether this rank has the first and the last stage.
        reporter: the rank of the world that has the last stage, and with it losses and what steps log.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        world: Group,
        device: torch.device,
        schedule: str = "1F1B",
        stages_per_rank: int = 2,
    ) -> None:
        if schedule not in SCHEDULES:
            raise StrategyError(f"no pipeline schedule {schedule!r}", fix=did_you_mean(schedule, list(SCHEDULES)))
        kind = SCHEDULES[schedule]
        self.group, self.world, self.device, self.schedule = group, world, device, schedule
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.count = size * {"one": 1, "loop": stages_per_rank, "v": 2}[kind]
        self.ranks = [s % size if kind != "v" or s < size else 2 * size - 1 - s for s in range(self.count)]
        self.own = [index for index, owner in enumerate(self.ranks) if owner == rank]
        self.first, self.last = 0 in self.own, self.count - 1 in self.own
        self.stages: list[Stage] = []
        self.names: list[str] = []
        self.reporter = dist.get_global_rank(group, self.ranks[-1])
        self._source = dist.get_global_rank(group, 0)
        self._module: weakref.ref[nn.Module] | None = None
        self._inputs: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None
        self._takes = self._answers = False
        self._answer: Any = None
        self._evaluations = 0
        self._schedules: dict[tuple[Any, int], Any] = {}
        self._relay: Relay

    # -- the model -----------------------------------------------------------------------------------------------

    def apply(self, module: nn.Module, parallel: ParallelPlan | None, precision: Precision) -> None:
        """Leave of the module, in place, what the stages of this rank hold, with rank 0's weights.

        Raises:
            StrategyError: the module cannot be split that way.
        """
        if self._is_split(module):
            return
        plan = (parallel and parallel.pipeline) or PipelinePlan()
        name, model = pipelined_model(module, plan)
        inside = {id(parameter) for parameter in model.parameters()}
        outside = [key for key, parameter in module.named_parameters() if id(parameter) not in inside]
        if outside:
            raise StrategyError(
                f"{outside[0]} is not in what becomes the stages of the pipeline",
                found=f"{len(outside)} parameters of {type(module).__name__} outside {name!r}",
                fix=f"move them into {name!r}, so that they belong to its first or last stage",
            )
        layout = lay_out(model, plan, self.count)
        self.names = list(module.state_dict())
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.data.copy_(self.world.broadcast(tensor.data.to(self.device)))
        self.stages = make_stages(model, layout, self.own, self.device)
        context = precision.forward_context()
        for stage in self.stages:
            stage.context = context
        self._relay = Relay(self.stages, self.ranks, self.group, self.device)
        model.__dict__["forward"] = self._called
        rows = self.world.agree([torch.initial_seed() % 2**32])
        self._seed = int(rows[self._source][0])

    def _is_split(self, module: nn.Module) -> bool:
        """Whether it was split here before, for an earlier fit or evaluation."""
        if self._module is not None and self._module() is module:
            return True
        if any(isinstance(part, StandIn) for part in module.modules()):
            raise StrategyError(
                f"this {type(module).__name__} was split by another pipeline",
                fix="make a new module and load a checkpoint, or go on with the Trainer that split it",
            )
        self._module = weakref.ref(module)
        return False

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        """Whoever calls the model lands here."""
        if self._takes:
            self._inputs = (args, kwargs)
            raise _Taken
        if not self._answers:
            with torch.no_grad():  # every rank of the pipeline is here at the same time
                return self._relay.run(args, kwargs)
        if self._answer is None:
            raise StrategyError(
                "a step calls the pipelined model twice",
                fix="call it once, on one batch made of both (torch.cat), or train without a pipeline",
            )
        (answer,), self._answer = self._answer, None
        return answer

    # -- how steps are called ------------------------------------------------------------------------------------

    def bind(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The training step: up to the call of the model, or from there with what the last stage has computed."""

        def step(batch: Any, index: int) -> Any:
            # Whatever it draws, it draws the same on the rank that has the inputs and on the one that has the loss.
            with _drawing(self._seed + index, self.device):
                return method(batch, index)

        return step

    def bind_evaluation(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A step without gradients: every rank runs all of it, and the model's output is every rank's."""

        def step(*args: Any) -> Any:
            self._evaluations += 1
            with _drawing(self._seed + self._evaluations, self.device):
                return method(*args)

        return step

    # -- a window ------------------------------------------------------------------------------------------------

    def forward_backward(self, micro: MicroSteps) -> None:
        """The micro-batches of a window are those of the schedule; where their shapes change, another one begins."""
        if micro.hears_backward:
            raise StrategyError(
                "on_before_backward and on_after_backward have no place in a pipeline",
                found="somebody listens: the loss is on one rank, and backward runs on each for its own stages",
                fix="use on_before_optimizer_step, which comes when all gradients are complete",
            )
        batches: list[Any] = []
        for index in range(micro.count):
            micro.begin(index)
            batches.append(micro.batch)
        starts, unknown = self._agree(batches)
        inputs = [self._take(micro, batch, index) for index, batch in enumerate(batches)]
        micro.start_gradients()
        micro.contributed = True
        outputs: list[Any] = [None] * micro.count

        def finish(index: int) -> Callable[[Any], Any]:
            def run(output: Any) -> Any:
                micro.turn_to(index, batches[index])
                loss = self._loss(micro, index, output)
                outputs[index] = micro.outputs
                return loss

            return run

        for start, end in zip(starts, [*starts[1:], micro.count], strict=True):
            key = _shapes(batches[start])
            if start in unknown:
                self._relay.learn(key, *inputs[start])
            turns = [Turn(*inputs[index], finish(index)) for index in range(start, end)]
            self._run(key, turns)
        for index, batch in enumerate(batches):
            micro.turn_to(index, batch, outputs[index])
            micro.end(index)

    def _agree(self, batches: Sequence[Any]) -> tuple[list[int], set[int]]:
        """At which micro-batches shapes change on any rank, and which of these shapes are new on any; and a seed.

        All data ranks take part in one schedule's exchanges, so they run the same ones.
        """
        shapes = [_shapes(batch) for batch in batches]
        changes = [index == 0 or shapes[index] != shapes[index - 1] for index in range(len(shapes))]
        new = [shape not in self._relay.known for shape in shapes]
        seed = torch.randint(2**31, ()).item() if self.first else 0  # no sync point: on the CPU
        rows = self.world.agree([seed, *changes, *new])
        self._seed = int(rows[self._source][0])
        count = len(batches)
        starts = [index for index in range(count) if any(row[1 + index] for row in rows)]
        return starts, {index for index in starts if any(row[1 + count + index] for row in rows)}

    def _take(self, micro: MicroSteps, batch: Any, index: int) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """What the step calls the model with."""
        self._takes, self._inputs = True, None
        try:
            micro.rehearse(batch, micro.first + index)
        except _Taken:
            pass
        finally:
            self._takes = False
        if self._inputs is None:
            raise StrategyError(
                "training_step did not call the pipelined model",
                fix="call it once in every step; a step that is skipped has no place in a pipeline",
            )
        return self._inputs

    def _loss(self, micro: MicroSteps, index: int, output: Any) -> Any:
        self._answers, self._answer = True, (output,)
        try:
            loss = micro.forward(index)
        finally:
            self._answers, self._answer = False, None
        if not isinstance(loss, Tensor):
            raise StrategyError(
                "training_step returned no loss, and the other stages of the pipeline wait for its gradient",
                found=type(loss).__name__,
                fix="return a loss for every batch; one that is multiplied by zero adds nothing",
            )
        return loss

    def _run(self, key: Any, turns: Sequence[Turn]) -> None:
        schedule = self._schedule(key, len(turns))
        for stage in self.stages:
            stage.turns = iter(turns)
        numbers = torch.arange(len(turns), device=self.device)
        with self._own_errors():
            schedule.step(
                *((numbers,) if self.first else ()), target=numbers if self.last else None, return_outputs=False
            )

    @contextmanager
    def _own_errors(self) -> Iterator[None]:
        """A stage's own error, not torch's about where in its schedule it was raised."""
        try:
            yield
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not str(cause).lstrip().startswith("[Stage "):
                cause = cause.__cause__
            if cause is not None and cause.__cause__ is not None:
                raise cause.__cause__ from None
            raise

    def _schedule(self, key: Any, count: int) -> Any:
        found = self._schedules.pop((key, count), None)
        if found is None:
            found = self._make_schedule(self._relay.known[key], count)
        self._schedules[key, count] = found  # the latest is at the end
        if len(self._schedules) > _KEPT:
            del self._schedules[next(iter(self._schedules))]
        return found

    def _make_schedule(self, shapes: Mapping[int, tuple[Tensor, ...]], count: int) -> Any:
        from torch.distributed.pipelining import schedules

        stages: list[Any] = [self._torch_stage(stage, shapes) for stage in self.stages]
        options: dict[str, Any] = {"n_microbatches": count, "loss_fn": _loss_itself, "scale_grads": False}
        one = SCHEDULES[self.schedule] == "one"
        made = schedules.get_schedule_class(self.schedule)
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
            group=self.group,
        )

    def clip_gradients(self, parameters: Sequence[nn.Parameter], value: float, algorithm: str) -> None:
        """Clip whole gradients, over all stages."""
        if algorithm != "norm":
            clip_gradients(parameters, value, algorithm)
            return
        square = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).square().to(self.device)
        dist.all_reduce(square, group=self.group)
        nn.utils.clip_grads_with_norm_(parameters, value, square.sqrt())

    def describe(self) -> str:
        """One line for ``explain()``."""
        size = len(set(self.ranks))
        each = f", {self.count // size} a rank" if self.count > size else ""
        return f"pipeline of {self.count} stages over {size} ranks{each} ({self.schedule})"

    def bubble(self, count: int) -> str | None:
        """A line about windows that leave most ranks waiting; None where they do not."""
        if count >= self.count:
            return None
        return (
            f"{count} micro-batches an optimizer step for {self.count} stages: a rank waits most of the time"
            f" (accumulate_grad_batches={2 * self.count} or more keeps them busy)"
        )


def _loss_itself(output: Any, target: Any) -> Any:
    return output


def _shapes(batch: Any) -> tuple[Any, ...]:
    """What decides about the shapes of everything that is computed from a batch."""
    return tuple((tuple(leaf.shape), leaf.dtype) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


@contextmanager
def _drawing(seed: int, device: torch.device) -> Iterator[None]:
    """Every global generator starts from ``seed``; outside they are where they were."""
    with preserved_rng(device):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        yield
