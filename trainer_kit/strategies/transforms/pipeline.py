"""Pipeline parallel: each rank holds some stages of the model, and the micro-batches of a window flow through them."""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import numpy as np
import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from trainer_kit.core.errors import DataError, StrategyError
from trainer_kit.core.parallel import PipelinePlan
from trainer_kit.core.protocols import Group, MicroSteps
from trainer_kit.core.seed import preserved_rng
from trainer_kit.precision.precision import Precision
from trainer_kit.strategies.state import load_module_parts
from trainer_kit.strategies.transforms.pipeline_schedules import Relay, Schedules, check_schedule
from trainer_kit.strategies.transforms.pipeline_stages import (
    Stage,
    Ties,
    Turn,
    has_stages,
    lay_out,
    make_stages,
    pipelined_model,
)
from trainer_kit.strategies.transforms.transform import Transform

__all__ = ["Calls", "Pipeline", "PipelineParallel", "copied", "drawing", "shapes_of", "tensors_of", "untouched"]


class _Taken(BaseException):
    """Ends a dry run of the step: the step has called the model, so its inputs are known."""


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
        elsewhere: how many parameters only other ranks' stages have.
        ties: parameters that several stages share.
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
        kind = check_schedule(schedule)
        self.group, self.world, self.device, self.schedule = group, world, device, schedule
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.count = size * {"one": 1, "loop": stages_per_rank, "v": 2}[kind]
        self.ranks = [s % size if kind != "v" or s < size else 2 * size - 1 - s for s in range(self.count)]
        self.own = [index for index, owner in enumerate(self.ranks) if owner == rank]
        self.first, self.last = 0 in self.own, self.count - 1 in self.own
        self.stages: list[Stage] = []
        self.names: list[str] = []
        self.elsewhere = 0
        self.reporter = dist.get_global_rank(group, self.ranks[-1])
        self._source = dist.get_global_rank(group, 0)
        self._module: weakref.ref[nn.Module] | None = None
        self._inputs: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None
        self._takes = self._answers = False
        self._answer: Any = None
        self._gone: dict[int, weakref.ref[nn.Parameter]] = {}
        self.calls: Calls | None = None
        self.ties: Ties
        self._relay: Relay
        self._schedules: Schedules

    # -- the model -----------------------------------------------------------------------------------------------

    def divide(self, module: nn.Module, plan: PipelinePlan, precision: Precision) -> None:
        """Keep of the module, in place, only what the stages of this rank hold.

        Raises:
            StrategyError: the module cannot be split that way.
        """
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
        if self.splits_backward and layout.repeated:
            raise StrategyError(
                f"{self.schedule} computes each weight's gradient apart, once in a stage",
                found=f"{' and '.join(layout.repeated[0])} are one parameter, on one stage",
                fix='use pp_schedule="Interleaved1F1B", or give each a parameter of its own',
            )
        prefix = f"{name}." if name else ""
        shared = [[(prefix + key, stage) for key, stage in places] for places in layout.shared]
        self.ties = Ties(shared, self.ranks, self.group)
        self.names = list(module.state_dict())
        self.elsewhere = sum(parameter.numel() for parameter in module.parameters())
        before = list(module.parameters())
        self.stages = make_stages(model, layout, self.own, self.device)
        kept = {id(parameter) for parameter in module.parameters()}
        self._gone = {id(one): weakref.ref(one) for one in before if id(one) not in kept}
        self.elsewhere -= sum(parameter.numel() for parameter in module.parameters())
        context = precision.forward_context()
        for stage in self.stages:
            stage.context = context
        self._relay = Relay(self.stages, self.ranks, self.group, self.device)
        self._schedules = Schedules(self.schedule, self.stages, self.count, self.group, self.device)
        model.__dict__["forward"] = self._called
        rows = self.world.agree([torch.initial_seed() % 2**32])
        self._seed = int(rows[self._source][0])
        self._noise = self._seed + 1 + dist.get_rank(self.group)

    def find_parameters(self, module: nn.Module) -> None:
        """Look up parameters, once the module has those that are trained."""
        for stage in self.stages:
            stage.find_loose()
        self.ties.find(module)

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
                fix="make a new module and load a checkpoint, or use the Trainer that split it",
            )
        self._module = weakref.ref(module)
        return False

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the divided model."""
        if self._takes:
            self._inputs = (args, kwargs)
            raise _Taken
        if self.calls is not None and torch.is_grad_enabled():
            return self.calls(args, kwargs)
        if not self._answers:
            # Every rank of the pipeline is here at the same time; random numbers drawn here are not drawn by the step.
            noise = self._noise if self.calls is None else self._draw_seeds()[1 + dist.get_rank(self.group)]
            with torch.no_grad(), drawing(noise, self.device):
                output = self._relay.run(args, kwargs)
            if self.calls is not None:  # a raw loop does not reshard after a step
                self._relay.reshard()
            return output
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
            # It draws the same numbers on the rank that has the inputs and on the rank that has the loss.
            with drawing(self._seed + index, self.device):
                return method(batch, index)

        return step

    def bind_evaluation(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A step without gradients: every rank runs all of it, and the model's output is every rank's."""

        def step(*args: Any) -> Any:
            # From the stream that a checkpoint holds: what an evaluation draws after a resume is what it would have.
            seeds = self._draw_seeds()
            own, self._noise = self._noise, seeds[1 + dist.get_rank(self.group)]
            try:
                with drawing(int(self.world.agree([seeds[0]])[self._source][0]), self.device):
                    return method(*args)
            finally:
                self._noise = own

        return step

    def take_calls(self) -> None:
        """From now on a raw loop calls the model, and calls `complete` at the end of a window."""
        self.calls = Calls(self._relay, self._schedules, self.world, self.device)

    def complete(self) -> bool:
        """Bring the gradients of all calls since to the parameters; whether there were any."""
        assert self.calls is not None
        with self._own_errors():
            found = self.calls.run()
        if found:
            self.ties.add_gradients()
        return found

    # -- inference alone -----------------------------------------------------------------------------------------

    def infer(self, inputs: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> list[Any]:
        """The model's outputs for several batches that follow each other, on the rank that has the last stage."""
        with torch.no_grad(), drawing(self._draw_seeds()[1 + dist.get_rank(self.group)], self.device):
            return self._relay.follow(inputs)

    def share(self, value: Any, last: bool = True) -> Any:
        """What the rank of the last stage has, or of the first, on every rank."""
        return self._relay.share(value, self.ranks[-1 if last else 0])

    # -- a window ------------------------------------------------------------------------------------------------

    def forward_backward(self, micro: MicroSteps) -> None:
        """The micro-batches of a window are those of the schedule; where their shapes change, another one begins."""
        if micro.has_backward_hooks:
            raise StrategyError(
                "on_before_backward and on_after_backward have no place in a pipeline",
                found="one of these hooks; the loss is on one rank only, and backward runs on each for its own stages",
                fix="use on_before_optimizer_step, which comes when all gradients are complete",
            )
        batches: list[Any] = []
        absent: set[int] = set()
        for index in range(micro.count):
            micro.begin(index)
            if micro.batch is None:  # other data ranks have more
                absent.add(index)
            batches.append(micro.earlier if micro.batch is None else micro.batch)
        if batches[0] is None:
            raise DataError("no rank has a batch", fix="give the loader data")
        starts, unknown = self._agree(batches)
        inputs = [self._take(micro, batch, index) for index, batch in enumerate(batches)]
        micro.start_gradients()
        micro.contributed = True
        outputs: list[Any] = [None] * micro.count

        def finish(index: int) -> Callable[[Any], Any]:
            def run(output: Any) -> Any:
                if index in absent:
                    return _nothing_of(output)
                micro.turn_to(index, copied(batches[index]))
                loss = self._loss(micro, index, output)
                outputs[index] = micro.outputs
                return loss

            return run

        for start in sorted(unknown):
            self._relay.learn(shapes_of(batches[start]), *inputs[start])
        for start, end in zip(starts, [*starts[1:], micro.count], strict=True):
            key = shapes_of(batches[start])
            turns = [Turn(*inputs[index], finish(index)) for index in range(start, end)]
            # Stages draw by themselves, and leave the generators as they were: collate functions and hooks draw the
            # same on all of them, or the first one's inputs and the last one's targets would be of two batches.
            with self._own_errors(), drawing(self._noise + start, self.device):
                self._schedules.run(key, self._relay.known[key], turns)
        self.ties.add_gradients()
        for index, batch in enumerate(batches):
            micro.turn_to(index, None if index in absent else batch, outputs[index])
            micro.end(index)

    def _agree(self, batches: Sequence[Any]) -> tuple[list[int], set[int]]:
        """At which micro-batches shapes change on any rank, and which of these shapes are new on any; and seeds.

        All data ranks take part in one schedule's exchanges, so they run the same ones.
        """
        shapes = [shapes_of(batch) for batch in batches]
        changes = [index == 0 or shapes[index] != shapes[index - 1] for index in range(len(shapes))]
        new = [shape not in self._relay.known for shape in shapes]
        seeds = self._draw_seeds()
        rows = self.world.agree([seeds[0], *changes, *new])
        self._seed = int(rows[self._source][0])
        self._noise = seeds[1 + dist.get_rank(self.group)]
        count = len(batches)
        starts = [index for index in range(count) if any(row[1 + index] for row in rows)]
        return starts, {index for index in starts if any(row[1 + count + index] for row in rows)}

    def _draw_seeds(self) -> list[int]:
        """Draw a seed that all ranks share, and one for each rank, from the user's random stream."""
        size = dist.get_world_size(self.group)
        seeds: list[int] = torch.randint(2**31, (1 + size,), device="cpu").tolist()  # no sync point: on the CPU
        return seeds

    def _take(self, micro: MicroSteps, batch: Any, index: int) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return the inputs with which the step calls the model."""
        self._takes, self._inputs = True, None
        try:
            with untouched(batch), suppress(_Taken):
                micro.dry_run(copied(batch), micro.first + index)
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

    @contextmanager
    def _own_errors(self) -> Iterator[None]:
        """Raise a stage's own error, without torch's error about its place in the schedule."""
        try:
            yield
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not str(cause).lstrip().startswith("[Stage "):
                cause = cause.__cause__
            if cause is not None and cause.__cause__ is not None:
                raise cause.__cause__ from None
            raise

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Remove the parameters of other stages from groups that were made before the model was divided.

        In a raw loop, ``zero_grad`` then also drops gradients that wait for `complete`.
        """
        gone = self._gone
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if not (p.is_meta or (id(p) in gone and gone[id(p)]() is p))]
        if self.calls is not None:
            drop: Any = optimizer.zero_grad
            if getattr(drop, "func", None) is _drop:  # already wrapped, for a model that was prepared earlier
                drop = drop.args[1]
            optimizer.zero_grad = partial(_drop, self.calls.forget, drop)  # type: ignore[method-assign]

    def load_state(self, module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
        """Load this rank's part of the whole module's state; a missing name raises on every rank."""
        whole = dict.fromkeys(self.names)
        missing, foreign = [name for name in whole if name not in state], [name for name in state if name not in whole]
        if strict and (missing or foreign):
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(module).__name__}: missing {missing}, unexpected {foreign}"
            )
        own = module.state_dict()
        load_module_parts(module, {name: value for name, value in state.items() if name in own}, strict=False)

    @property
    def splits_backward(self) -> bool:
        """Whether weights get their gradients later than activations, so that they must stay gathered."""
        return "ZeroBubble" in self.schedule

    @property
    def loose(self) -> list[nn.Parameter]:
        """Parameters that lie in no module of a stage: no unit gathers them, so they stay whole."""
        return [parameter for stage in self.stages for parameter in stage.loose]

    def describe(self) -> str:
        """One line for ``explain()``."""
        size = len(set(self.ranks))
        each = f", {self.count // size} a rank" if self.count > size else ""
        return f"pipeline of {self.count} stages over {size} ranks{each} ({self.schedule})"


def _drop(forget: Callable[[], None], drop: Callable[[bool], None], set_to_none: bool = True) -> None:
    forget()
    drop(set_to_none)


def _nothing_of(output: Any) -> Tensor:
    """Return a loss that depends on the output and has zero gradients."""
    floats = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return torch.stack([leaf.sum() * 0 for leaf in floats]).sum()


@final
@dataclass
class _Call:
    """One call: its inputs, its random numbers, and the gradients that have arrived at its output."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    noise: Any
    gradients: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = [tensor for tensor in tensors_of((self.args, self.kwargs)) if not tensor.is_inference()]
        self._given = [(tensor, tensor._version) for tensor in given]

    def turn(self) -> Turn:
        """Return the micro-batch with which a schedule computes this call again."""
        for tensor, version in self._given:
            if tensor._version != version:
                raise StrategyError(
                    "what a pipelined model was called with was written into before the window ended",
                    found=f"a tensor of shape {tuple(tensor.shape)} was changed in place",
                    fix="make a new one (x = x * 10): the call is computed once more at the end of the window",
                )
        return Turn(self.args, self.kwargs, self._loss, self.noise)

    def _loss(self, output: Any) -> Tensor:
        """Return a loss whose gradients at the output are those that have arrived."""
        found = [
            (tensor * self.gradients[index]).sum()
            for index, tensor in enumerate(_floats(output))
            if index in self.gradients and tensor.requires_grad
        ]
        return torch.stack(found).sum()


@final
class Calls:
    """A call passes through all stages without gradients, and every rank gets its output, as a leaf of its graph.

    Gradients that arrive there are kept. When a window ends, its calls go through a schedule, where each is computed
    once more and its gradients continue from there: from the same numbers, for each call draws from a seed of its own.

    Args:
        relay: passes activations on.
        schedules: of the stages.
        world: all processes.
        device: where this rank computes.
    """

    def __init__(self, relay: Relay, schedules: Schedules, world: Group, device: torch.device) -> None:
        self.relay, self.schedules, self.world, self.device = relay, schedules, world, device
        self._number = 0
        self._pending: dict[int, _Call] = {}

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The output of the last stage, on every rank."""
        if any(tensor.requires_grad for tensor in tensors_of((args, kwargs))):
            raise StrategyError(
                "gradients do not leave a pipeline through the inputs of its model",
                found="an input that requires gradients",
                fix="make what computes it a part of the model, or detach() it",
            )
        # Stages drop different activations, each the same ones whenever it computes this call.
        seed = int(torch.randint(2**31, (), device="cpu")) + dist.get_rank(self.relay.group)
        call = _Call(args, kwargs, partial(drawing, seed, self.device))
        self._number += 1
        number, count = self._number, iter(range(1 << 30))

        def arrived(index: int, leaf: Tensor) -> None:
            assert leaf.grad is not None
            call.gradients[index] = leaf.grad
            self._pending[number] = call

        def handed(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            leaf = tensor.detach().requires_grad_()
            leaf.register_post_accumulate_grad_hook(partial(arrived, next(count)))  # type: ignore[no-untyped-call]
            return leaf.clone()  # which the loop may write into

        output = self.relay.output(shapes_of((args, kwargs)), Turn(args, kwargs, noise=call.noise))
        return apply_to_collection(output, Tensor, handed)

    def forget(self) -> None:
        """Drop the gradients that have arrived."""
        self._pending.clear()

    def run(self) -> bool:
        """Bring the gradients that have arrived to the parameters; whether there were any."""
        calls = [self._pending[number] for number in sorted(self._pending)]
        self._pending = {}
        if not calls:
            return False
        keys = [shapes_of((call.args, call.kwargs)) for call in calls]
        # All data ranks take part in one schedule's exchanges, so they run the same ones.
        rows = self.world.agree([index == 0 or keys[index] != keys[index - 1] for index in range(len(keys))])
        starts = [index for index in range(len(keys)) if any(row[index] for row in rows)]
        every = [call.turn() for call in calls]
        with torch.enable_grad():
            for start, end in zip(starts, [*starts[1:], len(calls)], strict=True):
                self.schedules.run(keys[start], self.relay.known[keys[start]], every[start:end])
        return True


def _floats(output: Any) -> list[Tensor]:
    found: list[Tensor] = []
    apply_to_collection(output, Tensor, lambda tensor: found.append(tensor) if tensor.is_floating_point() else None)
    return found


def copied(batch: Any) -> Any:
    """Copy the containers of a batch, which keep the same tensors: a pop from one does not change the other.

    Args:
        batch: dicts, lists and tuples, in any order; anything else is not copied.

    Example:
        >>> batch = {"tokens": [1, 2], "labels": [3]}
        >>> copied(batch).pop("labels"), list(batch)
        ([3], ['tokens', 'labels'])
    """
    if isinstance(batch, tuple):
        parts = [copied(part) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if isinstance(batch, MutableMapping):
        made = copy.copy(batch)
        for key, value in batch.items():
            made[key] = copied(value)
        return made
    if isinstance(batch, list):
        same = copy.copy(batch)
        same[:] = [copied(part) for part in batch]
        return same
    return batch


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """The tensors of a batch, in its order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (Mapping, list, tuple)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_of(part)


@contextmanager
def untouched(batch: Any) -> Iterator[None]:
    """Refuse writes into the tensors of a batch.

    Raises:
        StrategyError: a tensor was written: the second run would write it again.
    """
    before = [(tensor, tensor._version) for tensor in tensors_of(batch) if not tensor.is_inference()]
    yield
    for tensor, version in before:
        if tensor._version != version:
            raise StrategyError(
                "training_step writes into its batch before the pipelined model, and that part runs twice",
                found=f"a tensor of shape {tuple(tensor.shape)} was changed in place",
                fix="make a new one (y = y * 10), or do it after the model's call or in on_after_batch_transfer",
            )


def shapes_of(batch: Any) -> tuple[Any, ...]:
    """Return a key of the shapes and dtypes of a batch, which decide those of everything computed from it."""
    return tuple((tuple(leaf.shape), leaf.dtype) for leaf in tensors_of(batch))


@contextmanager
def drawing(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, every global generator starts from ``seed``; afterwards its state is as before."""
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

    def __init__(self, pipeline: Pipeline, plan: PipelinePlan, precision: Precision) -> None:
        self.pipeline = pipeline
        self.plan = plan
        self.precision = precision

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Keep of the module, in place, only what the stages of this rank hold."""
        if not self.pipeline.has(module):
            self.pipeline.divide(module, self.plan, self.precision)
