"""Pipeline parallel: each rank holds some stages of the model, and the micro-batches of a window flow through them."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeAlias, final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from trainer_kit.core.display import plural
from trainer_kit.core.errors import DataError, StrategyError, did_you_mean
from trainer_kit.core.parallel import PipelinePlan
from trainer_kit.core.protocols import Group, MicroSteps
from trainer_kit.core.seed import preserved_rng
from trainer_kit.core.tensors import map_tensors, sequence_like, tensors_of
from trainer_kit.core.torch_private import tree_leaves, version_of
from trainer_kit.core.types import Batch, Keywords, StepOutput
from trainer_kit.precision.precision import Precision
from trainer_kit.strategies.process_group import ProcessGroup
from trainer_kit.strategies.signatures import StepMethod
from trainer_kit.strategies.transforms.pipeline_stages import (
    Stage,
    Turn,
    has_stages,
    lay_out,
    make_stages,
    pipelined_model,
)
from trainer_kit.strategies.transforms.pipeline_ties import Ties
from trainer_kit.strategies.transforms.transform import Transform

__all__ = ["SCHEDULES", "Pipeline", "PipelineParallel", "bubble", "check_schedule"]


_ModelArguments: TypeAlias = tuple[tuple[object, ...], Mapping[str, object]]
"""The positional and the keyword arguments of a call of the model."""
_ModelCall: TypeAlias = Callable[[tuple[object, ...], Mapping[str, object]], object]
"""Takes the positional and the keyword arguments of the model."""
_BatchKey: TypeAlias = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""The shape and dtype of each tensor of a batch."""
_StageShapes: TypeAlias = dict[int, tuple[Tensor, ...]]
"""Meta tensors: the inputs of stage ``i`` at ``i``, its outputs at ``i + 1``."""


class _ModelCalled(BaseException):
    """Ends a dry run of the step: the step has called the model, so its inputs are known."""


SCHEDULES: Final = {
    "GPipe": "one",
    "1F1B": "one",
    "Interleaved1F1B": "loop",
    "LoopedBFS": "loop",
    "InterleavedZeroBubble": "loop",
    "ZBVZeroBubble": "v",
}
"""For each schedule: one stage per rank, or several, placed over the ranks in a loop or in a V."""
_MAX_SCHEDULES: Final = 4
"""The number of cached schedules, each with its buffers: for full windows, and for shorter ones."""


def check_schedule(name: str) -> str:
    """Return how a schedule places its stages on the ranks.

    Raises:
        StrategyError: the schedule is unknown.
    """
    if name not in SCHEDULES:
        raise StrategyError(
            f"unknown pipeline schedule {name!r}",
            fix=did_you_mean(name, list(SCHEDULES)),
        )
    return SCHEDULES[name]


def bubble(batches: int, stages: int) -> str | None:
    """A warning if windows are so short that ranks wait most of the time, else None.

    Args:
        batches: micro-batches per window.
        stages: the number of pipeline stages.

    Example:
        >>> bubble(8, 4), bubble(2, 4)[:41]
        (None, '2 micro-batches an optimizer step for 4 s')
    """
    if batches >= stages:
        return None
    return (
        f"{plural(batches, 'micro-batch')} an optimizer step for {plural(stages, 'stage')} of a "
        "pipeline: its ranks wait most of the time"
        f" (accumulate_grad_batches={2 * stages} or more keeps them busy)"
    )


@final
class Pipeline:
    """The stages of this rank, and how windows and evaluation batches run through all of them.

    Args:
        group: the ranks that share one model, in the order of the stages.
        world: all processes.
        device: where this rank computes.
        schedule: a name of `SCHEDULES`.

    Attributes:
        stages: the stages of this rank, which further transforms change.
        elsewhere: the number of parameters that only stages of other ranks have.
        ties: parameters that several stages share.
        names: the names in the state of the whole module.
        removed: weak references, by id, to parameters that only other ranks have.
        last: whether this rank has the last stage.
        reporter: the world rank of the last stage, which has the losses and logged values.
    """

    def __init__(
        self,
        group: ProcessGroup,
        world: Group,
        device: torch.device,
        schedule: str = "1F1B",
    ) -> None:
        self.group = group
        self.world = world
        self.device = device
        self.schedule = schedule
        self.ranks = _place_stages(check_schedule(schedule), group.size)
        self.count = len(self.ranks)
        self.rank_stages = [
            stage for stage, rank in enumerate(self.ranks) if rank == group.rank
        ]
        self.last = self.count - 1 in self.rank_stages
        self.stages: list[Stage] = []
        self.names: list[str] = []
        self.elsewhere = 0
        # Seeds come from the first stage's rank: every rank of the pipeline takes them from its row of `agree`.
        world_ranks = dist.get_process_group_ranks(group.group)
        self.reporter = world_ranks[self.ranks[-1]]
        self._source_rank = world_ranks[0]
        # Weak: the user may release a module whose Trainer stays.
        self._module: weakref.ref[nn.Module] | None = None
        # Replaced for the time of a step, which calls the model in the user's code.
        self._handle_model_call: _ModelCall = self._evaluate
        self.removed: dict[int, weakref.ref[nn.Parameter]] = {}
        self.ties: Ties
        self._shapes: dict[_BatchKey, _StageShapes] = {}
        self._schedules: dict[tuple[_BatchKey, int], Any] = {}

    # -- the model -----------------------------------------------------------------------------------------------

    def divide(
        self, module: nn.Module, plan: PipelinePlan, precision: Precision
    ) -> None:
        """Remove, in place, the modules that belong to stages of other ranks.

        Raises:
            StrategyError: the module cannot be split that way.
        """
        name, model = pipelined_model(module, plan)
        model_parameters = {id(parameter) for parameter in model.parameters()}
        outside = [
            key for key, p in module.named_parameters() if id(p) not in model_parameters
        ]
        if outside:
            raise StrategyError(
                f"{outside[0]} lies outside the submodule that becomes the pipeline stages",
                found=f"{plural(len(outside), 'parameter')} of {type(module).__name__} outside {name!r}",
                fix=f"move them into {name!r}, so that they belong to its first or last stage",
            )
        layout = lay_out(model, plan, self.count)
        if self.splits_backward and layout.repeated:
            raise StrategyError(
                f"{self.schedule} computes each weight's gradient separately, once per stage",
                found=f"{' and '.join(layout.repeated[0])} are one parameter, on one stage",
                fix='use pp_schedule="Interleaved1F1B", or use separate parameters',
            )
        prefix = f"{name}." if name else ""
        shared = [
            [(prefix + key, stage) for key, stage in aliases]
            for aliases in layout.shared
        ]
        self.ties = Ties(shared, self.ranks, self.group)
        # The names of all stages: checkpoints need them, and the module loses those of other ranks below.
        self.names = list(module.state_dict())
        before = list(module.parameters())
        self.stages = make_stages(model, layout, self.rank_stages, self.device)
        remaining = {id(parameter) for parameter in module.parameters()}
        removed = [parameter for parameter in before if id(parameter) not in remaining]
        self.removed = {id(parameter): weakref.ref(parameter) for parameter in removed}
        self.elsewhere = sum(parameter.numel() for parameter in removed)
        context = precision.forward_context()
        for stage in self.stages:
            stage.configure(context, self.splits_backward)
        # On the instance, so that other models of the class keep their forward.
        model.__dict__["forward"] = self._forward
        rows = self.world.agree([torch.initial_seed() % 2**32])
        self._seed = int(rows[self._source_rank][0])
        self._stage_seed = self._seed + 1 + self.group.rank

    def find_parameters(self, module: nn.Module) -> None:
        """Look up parameters after all transforms have replaced them."""
        for stage in self.stages:
            stage.find_loose()
        self.ties.find_copies(module)

    def has(self, module: nn.Module) -> bool:
        """Return whether this pipeline has split the module earlier; it becomes the current module.

        Raises:
            StrategyError: another pipeline has split it.
        """
        if self._module is not None and self._module() is module:
            return True
        if has_stages(module):
            raise StrategyError(
                f"this {type(module).__name__} was split by another pipeline",
                fix="create a new module and load a checkpoint, or use the Trainer that split this one",
            )
        self._module = weakref.ref(module)
        return False

    def _forward(self, *args: object, **kwargs: object) -> object:
        """The forward of the split model."""
        return self._handle_model_call(args, kwargs)

    def _evaluate(
        self, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> object:
        """Run the stages and return the output of the last; every rank of the pipeline must call it."""
        # Seeded separately from the random stream of the step.
        with torch.no_grad(), _seeded(self._stage_seed, self.device):
            output, _ = self._run_stages(Turn(args, kwargs))
            return self.share(output)

    @contextmanager
    def _handling_model_calls(self, handler: _ModelCall) -> Iterator[None]:
        """A context in which a call of the model returns ``handler(args, kwargs)``."""
        self._handle_model_call = handler
        try:
            yield
        finally:
            self._handle_model_call = self._evaluate

    # -- how steps are called ------------------------------------------------------------------------------------

    def bind(self, method: StepMethod) -> StepMethod:
        """Bind the training step, which runs up to the call of the model, or continues with the last stage's output."""

        def step(batch: object, index: int) -> object:
            # The ranks of the first and last stage must draw the same numbers in the step.
            with _seeded(self._seed + index, self.device):
                return method(batch, index)

        return step

    def bind_evaluation(self, method: StepMethod) -> StepMethod:
        """Bind an evaluation step: every rank runs all of it and gets the model's output."""

        def step(*args: object) -> object:
            # Draw the seeds from the global generator, which checkpoints hold, so that a resumed run evaluates alike.
            seeds = self._draw_seeds()
            rows = self.world.agree([seeds[0]])
            step_seed = int(rows[self._source_rank][0])
            training_seed = self._stage_seed
            self._stage_seed = seeds[1 + self.group.rank]
            try:
                with _seeded(step_seed, self.device):
                    return method(*args)
            finally:
                self._stage_seed = training_seed

        return step

    # -- inference alone -----------------------------------------------------------------------------------------

    def infer(self, inputs: Sequence[_ModelArguments]) -> list[Batch]:
        """Run several batches in sequence; the outputs are valid on the rank of the last stage."""
        seed = self._draw_seeds()[1 + self.group.rank]
        outputs = []
        with torch.no_grad(), _seeded(seed, self.device):
            for args, kwargs in inputs:
                output, _ = self._run_stages(Turn(args, kwargs))
                outputs.append(output)
        return outputs

    def share(self, value: object, last: bool = True) -> Any:
        """Broadcast a value from the rank of the last stage (or the first): its structure, then its tensors."""
        source = self.ranks[-1 if last else 0]
        if self.group.rank == source:
            self._send_to_all(value, source)
            return value
        # In a list: a tensor itself would be broadcast in place.
        (structure,) = self.group.broadcast([None], source)

        def receive(tensor: Tensor) -> Tensor:
            received = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            self.group.broadcast(received, source)
            return received

        return map_tensors(structure, receive)

    def _send_to_all(self, value: object, source: int) -> None:
        def send(tensor: Tensor) -> Tensor:
            self.group.broadcast(tensor.detach().contiguous(), source)
            return tensor

        self.group.broadcast([map_tensors(value, _without_storage)], source)
        map_tensors(value, send)

    def _infer_shapes(
        self, key: _BatchKey, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> None:
        """Store under ``key`` the input and output shapes of this rank's stages, without other effects."""
        buffers: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad(), preserved_rng(self.device):
            # The forward updates running statistics, which a dry run must not.
            for stage in self.stages:
                buffers += [
                    (buffer, buffer.detach().clone()) for buffer in stage.buffers()
                ]
            _, self._shapes[key] = self._run_stages(Turn(args, kwargs), to_end=False)
            for buffer, value in buffers:
                buffer.detach().copy_(value)
            for stage in self.stages:
                for submodule in stage.modules():
                    if isinstance(submodule, FSDPModule):  # optimizers have the shards
                        submodule.reshard()

    def _run_stages(self, turn: Turn, to_end: bool = True) -> tuple[Any, _StageShapes]:
        """Pass one micro-batch from stage to stage, without a schedule.

        Returns:
            The output of this rank's last stage; and meta tensors, with the inputs of stage ``i`` at ``i`` and its
            outputs at ``i + 1``.
        """
        shapes: _StageShapes = {}
        activations: Any = ()
        for stage in self.stages:
            index = stage.index
            if index and self.ranks[index - 1] != self.group.rank:
                activations = self._receive(self.ranks[index - 1])
            shapes[index] = tuple(map(_without_storage, activations))
            if stage.last and not to_end:  # its output is the loss, which needs a batch
                break
            stage.set_turns([turn])
            activations = stage(*activations)
            if stage.last:
                break
            shapes[index + 1] = tuple(map(_without_storage, activations))
            if self.ranks[index + 1] != self.group.rank:
                self._send(activations, self.ranks[index + 1])
        return activations, shapes

    def _send(self, tensors: Sequence[Tensor], rank: int) -> None:
        # The receiver does not know the shapes: they depend on the batch.
        group = self.group.group
        shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        dist.send_object_list([shapes], group=group, group_dst=rank, device=self.device)
        for tensor in tensors:
            dist.send(tensor.detach(), group=group, group_dst=rank)

    def _receive(self, rank: int) -> tuple[Tensor, ...]:
        group = self.group.group
        message: list[Batch] = [None]
        dist.recv_object_list(message, group=group, group_src=rank, device=self.device)
        tensors = []
        for shape, dtype in message[0]:
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            dist.recv(tensor, group=group, group_src=rank)
            tensors.append(tensor)
        return tuple(tensors)

    # -- a window ------------------------------------------------------------------------------------------------

    def forward_backward(self, micro: MicroSteps) -> None:
        """Run the micro-batches of a window with a schedule; a change of their shapes starts another schedule."""
        if micro.has_backward_hooks:
            raise StrategyError(
                "on_before_backward and on_after_backward are not supported in a pipeline",
                found="one of these hooks; only one rank has the loss, and each rank runs backward for its own stages",
                fix="use on_before_optimizer_step, which runs when all gradients are complete",
            )
        # All micro-batches begin before any is computed: a schedule interleaves them.
        batches: list[Batch] = []
        absent: set[int] = set()
        for index in range(micro.count):
            micro.begin(index)
            # A padding batch: other data ranks have more batches.
            if micro.batch is None:
                absent.add(index)
            batches.append(micro.earlier if micro.batch is None else micro.batch)
        if batches[0] is None:
            raise DataError(
                "the loader is empty on all ranks",
                fix="pass a loader that has at least one batch",
            )
        starts, unknown = self._agree_on_schedules(batches)
        inputs = [
            self._capture_arguments(micro, batch, index)
            for index, batch in enumerate(batches)
        ]
        micro.start_gradients()
        micro.note_contribution()
        outputs: list[Batch] = [None] * micro.count

        def finish(index: int) -> Callable[[StepOutput], object]:
            def run(output: object) -> object:
                if index in absent:
                    return _zero_loss(output)
                micro.turn_to(index, _copy_containers(batches[index]))
                loss = self._compute_loss(micro, index, output)
                outputs[index] = micro.outputs
                return loss

            return run

        # torch's stages allocate their receive buffers by these shapes.
        for start in sorted(unknown):
            self._infer_shapes(_shapes_of(batches[start]), *inputs[start])
        for start, stop in zip(starts, [*starts[1:], micro.count], strict=True):
            key = _shapes_of(batches[start])
            turns = [
                Turn(*inputs[index], finish(index)) for index in range(start, stop)
            ]
            # Stages draw from their own seeds and restore the generators: collate functions and hooks must draw the
            # same on every rank, so that the inputs of the first stage and targets of the last are of one batch.
            with (
                self._raising_stage_errors(),
                _seeded(self._stage_seed + start, self.device),
            ):
                self._run_schedule(key, turns)
        # After all schedules of the window: a copy's gradient is complete only then.
        self.ties.add_gradients()
        # Hooks of the ends run in order, although the schedule has computed the micro-batches in another.
        for index, batch in enumerate(batches):
            micro.turn_to(index, None if index in absent else batch, outputs[index])
            micro.end(index)

    def _run_schedule(self, key: _BatchKey, turns: Sequence[Turn]) -> None:
        """Run micro-batches of one shape as one schedule; their gradients are added to the existing ones.

        Args:
            key: the key of the shape in ``_shapes``.
            turns: the micro-batches.
        """
        schedule = self._schedules.pop((key, len(turns)), None)
        gradients: dict[nn.Parameter, Tensor] = {}
        if schedule is None:
            # The first run of a schedule in torch clears the gradients of parameters that FSDP shards.
            gradients = self._set_gradients_aside()
            schedule = self._create_schedule(len(turns), self._shapes[key])
        # The most recently used is last: the first one makes room.
        self._schedules[key, len(turns)] = schedule
        if len(self._schedules) > _MAX_SCHEDULES:
            del self._schedules[next(iter(self._schedules))]
        for stage in self.stages:
            stage.set_turns(turns)
        # The schedule passes indices around: stages take their arguments from the turns.
        numbers = torch.arange(len(turns), device=self.device)
        inputs = (numbers,) if self.stages[0].index == 0 else ()
        schedule.step(
            *inputs, target=numbers if self.last else None, return_outputs=False
        )
        for parameter, gradient in gradients.items():
            if parameter.grad is not None:
                gradient = parameter.grad.add_(gradient)
            parameter.grad = gradient

    def _set_gradients_aside(self) -> dict[nn.Parameter, Tensor]:
        """Remove all gradients, and return them; a dict has each parameter once, although two stages may share it."""
        gradients: dict[nn.Parameter, Tensor] = {}
        for stage in self.stages:
            for parameter in stage.parameters():
                if parameter.grad is not None:
                    gradients[parameter] = parameter.grad
                    parameter.grad = None
        return gradients

    def _create_schedule(self, batches: int, shapes: _StageShapes) -> Any:
        """Create torch's schedule for this number of micro-batches and these shapes of inputs and outputs."""
        from torch.distributed.pipelining import PipelineStage, schedules

        # The input of the first stage is the index of the micro-batch, the output of the last stage is the loss.
        numbers = torch.empty(1, dtype=torch.int64, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        stages = [
            PipelineStage(
                stage,
                stage.index,
                self.count,
                self.device,
                input_args=shapes[stage.index] if stage.index else numbers,
                output_args=loss if stage.last else shapes[stage.index + 1],
                group=self.group.group,
            )
            for stage in self.stages
        ]
        options: Keywords = {
            "n_microbatches": batches,
            "loss_fn": lambda loss, _: loss,
            "scale_grads": False,
        }
        schedule_class: Any = schedules.get_schedule_class(self.schedule)
        fallback: Any = schedules.ScheduleLoopedBFS
        rank_stages: Any = stages
        if SCHEDULES[self.schedule] == "one":
            fallback = schedules.ScheduleGPipe
            rank_stages = stages[0]
        try:
            return schedule_class(rank_stages, **options)
        # The schedule does not support this number of micro-batches, as of a short last window.
        except ValueError:
            return fallback(rank_stages, **options)

    def _agree_on_schedules(
        self, batches: Sequence[Batch]
    ) -> tuple[list[int], set[int]]:
        """Agree on seeds, the micro-batches at which shapes change on any rank, and which of these are new on any.

        All data ranks take part in the collectives of a schedule, so they must run the same schedules. The same
        exchange tells which tied parameters are trained: that may change at any window.
        """
        keys = [_shapes_of(batch) for batch in batches]
        count = len(keys)
        changes = [True] * count
        # A schedule is made for batches of one shape, so it ends where a shape changes.
        for index in range(1, count):
            changes[index] = keys[index] != keys[index - 1]
        unknown = [key not in self._shapes for key in keys]
        seeds = self._draw_seeds()
        flags = self.ties.training_flags()
        # One exchange for everything: each of them costs a step of the pipeline a wait.
        rows = self.world.agree([seeds[0], *changes, *unknown, *flags])
        self.ties.agree_on_trained([row[1 + 2 * count :] for row in rows])
        self._seed = int(rows[self._source_rank][0])
        self._stage_seed = seeds[1 + self.group.rank]
        starts: list[int] = []
        unknown_starts: set[int] = set()
        for index in range(count):
            if not any(row[1 + index] for row in rows):
                continue
            starts.append(index)
            if any(row[1 + count + index] for row in rows):
                unknown_starts.add(index)
        return starts, unknown_starts

    def _draw_seeds(self) -> list[int]:
        """Draw a seed that all ranks share, and one for each rank, from the global generator."""
        count = 1 + self.group.size
        # A fake world has no values to draw.
        if dist.get_backend(self.group.group) == "fake":
            return [0] * count
        numbers = torch.randint(2**31, (count,), device="cpu")
        seeds: list[int] = numbers.tolist()  # no sync point: on the CPU
        return seeds

    def _capture_arguments(
        self, micro: MicroSteps, batch: object, index: int
    ) -> _ModelArguments:
        """Dry-run the step up to its call of the model, and return the arguments of that call."""
        calls: list[_ModelArguments] = []

        def capture(args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
            calls.append((args, kwargs))
            raise _ModelCalled

        with (
            self._handling_model_calls(capture),
            _forbidding_changes(batch),
            suppress(_ModelCalled),
        ):
            micro.dry_run(_copy_containers(batch), micro.first + index)
        if not calls:
            raise StrategyError(
                "training_step did not call the pipelined model",
                fix="call it once in every step; a pipeline cannot skip a step",
            )
        return calls[0]

    def _compute_loss(self, micro: MicroSteps, index: int, output: object) -> Any:
        """Continue the step with the output of the last stage; return its loss."""
        outputs = [output]

        def return_output(
            args: tuple[object, ...], kwargs: Mapping[str, object]
        ) -> object:
            if not outputs:
                raise StrategyError(
                    "training_step calls the pipelined model twice",
                    fix="call it once, on both inputs concatenated (torch.cat), or train without a pipeline",
                )
            return outputs.pop()

        with self._handling_model_calls(return_output):
            loss = micro.forward(index)
        if not isinstance(loss, Tensor):
            raise StrategyError(
                "training_step returned no loss, but the other pipeline stages need its gradient",
                found=type(loss).__name__,
                fix="return a loss for every batch; one that is multiplied by zero adds nothing",
            )
        return loss

    @contextmanager
    def _raising_stage_errors(self) -> Iterator[None]:
        """A context that raises a stage's own error in place of torch's error about the schedule."""
        try:
            yield
        except RuntimeError as error:
            # torch raises "[Stage 1] failed to run forward" from the stage's own error.
            cause: BaseException | None = error
            while cause is not None and not str(cause).lstrip().startswith("[Stage "):
                cause = cause.__cause__
            if cause is not None and cause.__cause__ is not None:
                raise cause.__cause__ from None
            raise

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed after those of activations, so that weights must stay gathered."""
        return "ZeroBubble" in self.schedule

    @property
    def loose(self) -> list[nn.Parameter]:
        """Direct parameters of the model, which no module of a stage has: FSDP does not shard them."""
        parameters: list[nn.Parameter] = []
        for stage in self.stages:
            parameters += stage.loose
        return parameters

    def describe(self) -> str:
        """One line for ``explain()``."""
        size = len(set(self.ranks))
        text = f"pipeline of {plural(self.count, 'stage')} over {plural(size, 'rank')}"
        if self.count > size:
            text += f", {self.count // size} a rank"
        return f"{text} ({self.schedule})"


def _place_stages(kind: str, ranks: int) -> list[int]:
    """The rank of each stage.

    Example:
        >>> _place_stages("loop", 2), _place_stages("v", 2)
        ([0, 1, 0, 1], [0, 1, 1, 0])
    """
    forth = list(range(ranks))
    if kind == "one":
        return forth
    if kind == "v":
        return forth + forth[::-1]
    return forth + forth


def _without_storage(tensor: Tensor) -> Tensor:
    """A meta tensor with the shape and dtype of another; it requires gradients if its dtype allows them."""
    bare = torch.empty_like(tensor.detach(), device="meta").contiguous()
    return bare.requires_grad_(tensor.is_floating_point())


def _zero_loss(output: object) -> Tensor:
    """Return a loss that depends on the output and has zero gradients."""
    # Backward must reach every stage: the other ranks wait for its gradients.
    leaves = tree_leaves(output)
    tensors = [
        leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    return torch.stack([tensor.sum() * 0 for tensor in tensors]).sum()


def _copy_containers(batch: Batch) -> Batch:
    """Copy the containers of a batch but not its tensors, so that a pop does not change the original.

    Args:
        batch: nested dicts, lists and tuples; anything else is not copied.

    Example:
        >>> batch = {"tokens": [1, 2], "labels": [3]}
        >>> _copy_containers(batch).pop("labels"), list(batch)
        ([3], ['tokens', 'labels'])
    """
    if isinstance(batch, tuple):
        return sequence_like(batch, [_copy_containers(entry) for entry in batch])
    if isinstance(batch, MutableMapping):
        copied = copy.copy(
            batch
        )  # of the same class: batches of tokenizers have further attributes
        for key, value in batch.items():
            copied[key] = _copy_containers(value)
        return copied
    if isinstance(batch, list):
        copied_list = copy.copy(batch)
        copied_list[:] = [_copy_containers(entry) for entry in batch]
        return copied_list
    return batch


@contextmanager
def _forbidding_changes(batch: object) -> Iterator[None]:
    """A context that refuses in-place changes of a batch's tensors.

    Raises:
        StrategyError: a tensor was changed; the second run of the step would change it again.
    """
    tensors = [tensor for tensor in tensors_of(batch) if not tensor.is_inference()]
    versions = [version_of(tensor) for tensor in tensors]
    yield
    for tensor, version in zip(tensors, versions, strict=True):
        if version_of(tensor) != version:
            raise StrategyError(
                "training_step changes its batch in place before the pipelined model, in code that runs twice",
                found=f"a tensor of shape {tuple(tensor.shape)} was changed in place",
                fix="create a new tensor (y = y * 10), or change it after the model's call or in"
                " on_after_batch_transfer",
            )


def _shapes_of(batch: object) -> _BatchKey:
    """Return a key of the shapes and dtypes of a batch, which determine those of all stage outputs."""
    return tuple((tuple(leaf.shape), leaf.dtype) for leaf in tensors_of(batch))


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """A context in which every global generator is seeded with ``seed``; its end restores their states."""
    with preserved_rng(device):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        yield


@final
class PipelineParallel(Transform):
    """Divides the blocks of a model among the ranks of the pipeline axis.

    Args:
        pipeline: runs windows and evaluation batches through the stages.
        plan: how the module may be split.
        precision: the forward context of the stages.
    """

    axis = "pp"

    def __init__(
        self, pipeline: Pipeline, plan: PipelinePlan, precision: Precision
    ) -> None:
        self.pipeline = pipeline
        self.plan = plan
        self.precision = precision

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Remove, in place, the modules that belong to stages of other ranks."""
        if not self.pipeline.has(module):
            self.pipeline.divide(module, self.plan, self.precision)
            # A module that holds its own method, as recomputed ones do, is a cycle: its weights would stay until Python
            # looks for cycles, which may take an epoch.
            gc.collect()
