"""Pipeline stages: the modules of each stage, and how a rank computes its own stages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from trainer_kit.core.display import plural
from trainer_kit.core.errors import StrategyError, did_you_mean
from trainer_kit.core.parallel import PipelinePlan
from trainer_kit.core.torch_private import (
    TreeSpec,
    direct_parameters,
    direct_submodules,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)
from trainer_kit.core.types import Function, StepOutput

__all__ = [
    "Layout",
    "Stage",
    "StandIn",
    "Turn",
    "has_stages",
    "lay_out",
    "make_stages",
    "pipelined_model",
    "submodule_names",
]


@final
@dataclass(frozen=True)
class Layout:
    """How a model is split into stages.

    Attributes:
        blocks: for each stage, the names of its blocks in the model, in order.
        owners: the stage of each module and parameter that belongs to one stage; all others run on every stage.
        shared: for each parameter tied across stages, its names with the stage of each.
        repeated: for each parameter tied inside one stage, its names.
    """

    blocks: Sequence[Sequence[str]]
    owners: Mapping[str, int]
    shared: Sequence[Sequence[tuple[str, int]]]
    repeated: Sequence[Sequence[str]]


def pipelined_model(module: nn.Module, plan: PipelinePlan) -> tuple[str, nn.Module]:
    """The submodule that is split into stages, with its name in the module ("" for the module itself)."""
    if plan.model is not None:
        try:
            return plan.model, module.get_submodule(plan.model)
        except AttributeError:
            raise StrategyError(
                f"PipelinePlan(model={plan.model!r}): {type(module).__name__} has no such submodule",
                fix=did_you_mean(
                    plan.model, [name for name, _ in module.named_children()]
                ),
            ) from None
    candidates = {
        name: child
        for name, child in module.named_children()
        if any(True for _ in child.parameters())
    }
    # Other children without parameters, such as a loss function, are called by the step, not by the model.
    has_direct_parameters = any(True for _ in module.parameters(recurse=False))
    if len(candidates) == 1 and not has_direct_parameters:
        return candidates.popitem()
    raise StrategyError(
        "the submodule that becomes the pipeline stages is ambiguous",
        found=f"{type(module).__name__} has parameters in {', '.join(candidates) or 'itself'}",
        fix="put all layers into one submodule, or name the submodule in configure_parallel:"
        " ParallelPlan(pipeline=PipelinePlan("
        'model="net")), where "" is the module itself',
    )


def lay_out(model: nn.Module, plan: PipelinePlan, stages: int) -> Layout:
    """Split a model into stages.

    Args:
        model: the full model.
        plan: where it may be split.
        stages: the number of stages.

    Raises:
        StrategyError: the model has too few blocks, or the plan names a module that does not exist.

    Example:
        >>> lay_out(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), PipelinePlan(), 2).blocks
        [['0', '1'], ['2', '3']]
    """
    container, starts = _find_container(model, plan, stages)
    names = _child_names(model, container)
    outer_modules = _assign_outer_modules(model, container, plan)
    if starts is None:
        sizes = []
        for name in names:
            block = model.get_submodule(name)
            sizes.append(_count_parameters(block))
        # An embedding or a head may be larger than several blocks: its stage then gets fewer of them.
        for name, stage in outer_modules.items():
            outer_module = _get_part(model, name)
            sizes[stage] += _count_parameters(outer_module)
        starts = _balance(sizes, stages)
    owners: dict[str, int] = {}
    for name, stage in outer_modules.items():
        # -1 is the last stage, whatever their number.
        owners[name] = stage % stages
    blocks: list[list[str]] = []
    stops = [*starts[1:], len(names)]
    for start, stop in zip(starts, stops, strict=True):
        block_names = names[start:stop]
        for name in block_names:
            owners[name] = len(blocks)
        blocks.append(block_names)
    shared, repeated = _find_ties(model, owners)
    return Layout(blocks, owners, shared, repeated)


def _child_names(model: nn.Module, container: str) -> list[str]:
    """The names of a submodule's children in the model."""
    prefix = f"{container}." if container else ""
    return [
        prefix + name for name, _ in model.get_submodule(container).named_children()
    ]


def _find_container(
    model: nn.Module, plan: PipelinePlan, stages: int
) -> tuple[str, list[int] | None]:
    """The name of the module that holds the blocks, and the first block of each stage if the plan gives them."""
    if isinstance(plan.split_points, str):
        if plan.split_points != "auto":
            raise StrategyError(
                'split_points is "auto" or names of blocks',
                found=repr(plan.split_points),
            )
        return _find_largest_container(model, stages), None
    points = list(plan.split_points)
    containers = {name.rpartition(".")[0] for name in points}
    if len(containers) != 1 or len(points) != stages - 1:
        raise StrategyError(
            f"split_points names {len(points)} blocks of {len(containers)} lists of blocks",
            found=", ".join(points) or "none",
            fix=f"name the {stages - 1} blocks of one list at which the second and later of "
            f"{plural(stages, 'stage')} begin",
        )
    container = containers.pop()
    try:
        names = _child_names(model, container)
    except AttributeError:
        names = []
    for point in points:
        if point not in names:
            raise StrategyError(
                f"split_points: no block {point!r}", fix=did_you_mean(point, names)
            )
    starts = [0, *(names.index(point) for point in points)]
    # Also refuses a block that is named twice, which would make an empty stage.
    if sorted(set(starts)) != starts:
        raise StrategyError(
            "split_points names its blocks out of order", found=", ".join(points)
        )
    return container, starts


def _find_largest_container(model: nn.Module, stages: int) -> str:
    """The name of the list with the most parameters; of equally large ones the outermost, which comes first."""
    sizes = {
        name: _count_parameters(submodule)
        for name, submodule in model.named_modules()
        if isinstance(submodule, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
        and len(submodule) >= stages
    }
    if not sizes:
        raise StrategyError(
            f"{type(model).__name__} cannot be split into {plural(stages, 'stage')}",
            found="no ModuleList or Sequential with as many blocks",
            fix="use fewer stages (pp=), or keep all blocks in one nn.ModuleList",
        )
    return str(max(sizes, key=sizes.__getitem__))


def _assign_outer_modules(
    model: nn.Module, container: str, plan: PipelinePlan
) -> dict[str, int]:
    """Return the stage of each module around the blocks: 0 if it runs before the blocks, -1 if it runs after them.

    Modules are called in the order in which they are defined, unless the plan says otherwise. A module
    without parameters and state runs on every stage.
    """
    stages: dict[str, int] = {}
    path = container.split(".") if container else []
    # From the model down to the list of blocks: what comes before the path runs first, what comes after it last.
    for depth, next_key in enumerate(path):
        prefix = "".join(f"{name}." for name in path[:depth])
        parent = model.get_submodule(".".join(path[:depth]))
        stage = 0
        for key, child in parent.named_children():
            if key == next_key:  # the blocks are inside of this child
                stage = -1
            elif child.state_dict() or any(True for _ in child.parameters()):
                stages[prefix + key] = stage
        for key, _ in parent.named_parameters(recurse=False):
            stages[prefix + key] = 0
    prefix = f"{container}." if container else ""
    for key, _ in model.get_submodule(container).named_parameters(recurse=False):
        stages[prefix + key] = 0
    for name in (*plan.first, *plan.last, *plan.everywhere):
        if name not in stages:
            raise StrategyError(
                f"PipelinePlan names {name!r}", fix=did_you_mean(name, list(stages))
            )
        if name not in plan.everywhere:
            stages[name] = 0 if name in plan.first else -1
            continue
        if any(
            parameter.requires_grad for parameter in _get_part(model, name).parameters()
        ):
            raise StrategyError(
                f"PipelinePlan(everywhere=): {name!r} has parameters to train",
                fix="name it in first= or last=",
            )
        del stages[name]
    return stages


def _parent_and_key(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    parent, _, key = name.rpartition(".")
    return model.get_submodule(parent), key


def _get_part(model: nn.Module, name: str) -> Any:
    """The submodule or direct parameter of this name."""
    parent, key = _parent_and_key(model, name)
    parameters = direct_parameters(parent)
    if key in parameters:
        return parameters[key]
    return parent.get_submodule(key)


def _count_parameters(module: nn.Module | nn.Parameter) -> int:
    if isinstance(module, nn.Parameter):
        return module.numel()
    return sum(parameter.numel() for parameter in module.parameters())


def _balance(sizes: Sequence[int], stages: int) -> list[int]:
    """The first block of each stage, such that the largest stage is as small as possible."""
    total_before = [0, *accumulate(sizes)]
    # Dynamic programming over the number of stages. divisions[end] is the best division of the first `end` blocks:
    # the size of its largest stage, and the first block of each stage.
    divisions: list[tuple[int, list[int]]] = [(total, [0]) for total in total_before]
    # Fewer blocks than stages: larger than any division, so that `min` never takes it where there is another.
    impossible: tuple[int, list[int]] = (total_before[-1] + 1, [])
    for count in range(2, stages + 1):
        extended = []
        for stop in range(len(sizes) + 1):
            candidates = [impossible]
            for start in range(count - 1, stop):
                largest, starts = divisions[start]
                last_stage = total_before[stop] - total_before[start]
                candidates.append((max(largest, last_stage), [*starts, start]))
            extended.append(min(candidates))
        divisions = extended
    _, starts = divisions[-1]
    return starts


def _find_ties(
    model: nn.Module, owners: Mapping[str, int]
) -> tuple[list[list[tuple[str, int]]], list[list[str]]]:
    """The parameters that are tied across stages, and those that are tied inside one; see `Layout`."""
    stages_of_parameters: dict[int, dict[str, int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = _find_owner(name, owners)
        if owner is not None:
            stages_of_parameters.setdefault(id(parameter), {})[name] = owners[owner]
    shared = []
    repeated = []
    for stages in stages_of_parameters.values():
        distinct = set(stages.values())
        if len(distinct) > 1:
            shared.append(list(stages.items()))
        if len(distinct) < len(stages):
            repeated.append(list(stages))
    return shared, repeated


def _find_owner(name: str, owners: Mapping[str, int]) -> str | None:
    """The module or parameter of one stage that a parameter belongs to; None if it runs on every stage."""
    while name and name not in owners:
        name = name.rpartition(".")[0]
    return name or None


class _Placeholder(Tensor):
    """A placeholder tensor with the right shape; results computed from it are placeholders too."""


class _StageEnd(BaseException):
    """Ends a forward at the end of the stage; a BaseException, so that the model does not catch it."""


_Key: TypeAlias = tuple[object, ...]
_Outputs: TypeAlias = tuple[list[object], TreeSpec]


@final
class StandIn(nn.Module):
    """Stands in for a module of another stage: its attributes, the shapes of its outputs, and no parameter."""

    def __init__(self, original: nn.Module, name: str, device: torch.device) -> None:
        super().__init__()
        # deepcopy takes these in place of copies of the tensors.
        memo: dict[int, Tensor] = {}
        for tensor in (*original.parameters(), *original.buffers()):
            memo[id(tensor)] = _without_storage(tensor)
        # Set without nn.Module.__setattr__, which would register the twin as a submodule.
        self.__dict__["twin"] = copy.deepcopy(original, memo)
        self.name = name
        self.device = device
        self._output_cache: dict[_Key, _Outputs] = {}
        self._received: Sequence[Tensor] | None = None
        self._is_entry = False
        self._is_exit = False

    def mark_entry(self, is_entry: bool, received: Sequence[Tensor] | None) -> None:
        """Set whether the running stage begins behind this module; then a call returns what it received."""
        self._is_entry = is_entry
        self._received = received

    def mark_exit(self, is_exit: bool) -> None:
        """Set whether the running stage ends ahead of this module; then a call ends the forward."""
        self._is_exit = is_exit

    def __getattr__(self, name: str) -> Any:
        if "twin" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["twin"], name)

    def forward(self, *args: object, **kwargs: object) -> Any:
        if self._is_exit:
            raise _StageEnd
        leaves, spec = self._compute_outputs(args, kwargs)
        if not self._is_entry:
            return tree_unflatten(
                [_make_placeholder(leaf, self.device) for leaf in leaves], spec
            )
        if self._received is None:
            raise StrategyError(
                f"{self.name} is called more than once in a forward",
                fix="use a model whose blocks run one after the other, each of them once",
            )
        received = iter(self._received)
        self._received = None
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                leaves[index] = next(received)
        return tree_unflatten(leaves, spec)

    def _compute_outputs(
        self, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> tuple[list[object], TreeSpec]:
        """The outputs of the original module for inputs of these shapes, on the meta device."""
        inputs = (args, kwargs)
        key = tuple(map(_shape_key, tree_leaves(inputs)))
        if key not in self._output_cache:
            # Computed once for each shape: nothing on the meta device takes memory, but a call takes time.
            args, kwargs = tree_map_only(Tensor, _on_meta, inputs)
            with torch.no_grad():
                outputs = self.twin(*args, **kwargs)
            self._output_cache[key] = tree_flatten(outputs)
        leaves, spec = self._output_cache[key]
        return list(leaves), spec


def has_stages(module: nn.Module) -> bool:
    """Return whether other ranks hold some modules of this one, as stages of a pipeline."""
    return any(isinstance(submodule, StandIn) for submodule in module.modules())


def submodule_names(module: nn.Module) -> list[str]:
    """The names of all submodules, including those of other stages."""
    names = []
    for name, submodule in module.named_modules():
        if isinstance(submodule, StandIn):
            inner_names = [inner for inner, _ in submodule.twin.named_modules()]
            names += [f"{name}.{inner}" if inner else name for inner in inner_names]
        elif name:
            names.append(name)
    return names


def _make_placeholder(leaf: object, device: torch.device) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    zeros = torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
    # A fake tensor has a class already.
    if type(zeros) is not Tensor:
        return zeros
    return zeros.as_subclass(_Placeholder)


def _without_storage(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor.detach(), device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, tensor.requires_grad)
    return empty


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor.detach().as_subclass(Tensor), device="meta")


def _shape_key(value: object) -> object:
    """What outputs depend on in their shape: of a tensor its shape and dtype, of other objects their class."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, (int, float, str, type(None))):
        return value
    return type(value)


@final
@dataclass(frozen=True)
class Turn:
    """One micro-batch: the arguments of the model and, on the last stage, the function that takes its output."""

    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    finish: Callable[[StepOutput], object] | None = None


@dataclass
class _Slot:
    """A module or parameter of one stage, and the stand-in that replaces it while another stage runs."""

    stage: int
    parent: nn.Module
    key: str
    real: Any
    stand_in: Any

    def put_real(self) -> None:
        """Give the parent the module or parameter itself."""
        if isinstance(self.real, nn.Parameter):
            self.parent.__dict__.pop(self.key, None)
            direct_parameters(self.parent)[self.key] = self.real
        else:
            direct_submodules(self.parent)[self.key] = self.real

    def put_stand_in(self) -> None:
        """Give the parent the stand-in."""
        if isinstance(self.real, nn.Parameter):
            direct_parameters(self.parent).pop(self.key, None)
            # A plain attribute, not a parameter, so that optimizers and state_dict do not see it.
            self.parent.__dict__[self.key] = self.stand_in
        else:
            direct_submodules(self.parent)[self.key] = self.stand_in

    def release(self) -> None:
        """Leave only the stand-in: the module or parameter belongs to another rank."""
        self.put_stand_in()
        self.real = None

    def look_up_parameter(self) -> None:
        """Take the parent's present parameter: other transforms may have replaced it."""
        self.real = direct_parameters(self.parent)[self.key]


@final
class Stage(nn.Module):
    """One stage: its modules, and the model's forward from its first block to its last.

    Args:
        index: the number of this stage.
        slots: the slots of all stages, by name in the model.
        blocks: the names of the blocks of each stage.
        rank_stages: the stages of this rank.
        run: the model's own forward.

    Attributes:
        layers: the modules of this stage.
        loose: the model's direct parameters that belong to this stage.
        turns: the micro-batches, in the order in which they run.
    """

    run: Function
    _other_slots: Sequence[_Slot]
    _entry: StandIn | None
    _exit: StandIn | None
    _last_block: nn.Module

    def __init__(
        self,
        index: int,
        slots: Mapping[str, _Slot],
        blocks: Sequence[Sequence[str]],
        rank_stages: Sequence[int],
        run: Function,
    ) -> None:
        super().__init__()
        self.index = index
        self.last = index == len(blocks) - 1
        # In __dict__, without nn.Module.__setattr__: these modules are not children of the stage.
        attributes = self.__dict__
        attributes["run"] = run
        attributes["_entry"] = None
        attributes["_exit"] = None
        if index:
            attributes["_entry"] = slots[blocks[index - 1][-1]].stand_in
        if not self.last:
            attributes["_exit"] = slots[blocks[index + 1][0]].stand_in
        attributes["_last_block"] = slots[blocks[index][-1]].real
        self._other_slots = []
        self._loose_slots: list[_Slot] = []
        self._layer_names: list[str] = []
        self.layers = nn.ModuleList()
        for name, slot in slots.items():
            if slot.stage != index:
                if slot.stage in rank_stages:
                    self._other_slots.append(slot)
            elif isinstance(slot.real, nn.Parameter):
                self._loose_slots.append(slot)
            else:
                self._layer_names.append(name)
                self.layers.append(slot.real)
        self.find_loose()
        self._output: Any = None
        self._has_hooks = False
        self.turns: Iterator[Turn] = iter(())
        self._context: AbstractContextManager[object] = nullcontext()
        self._is_running = False
        self._splits_backward = False

    def configure(
        self, context: AbstractContextManager[object] | None, splits_backward: bool
    ) -> None:
        """Set how forwards run.

        Args:
            context: is entered around each forward.
            splits_backward: the schedule computes gradients of weights after those of activations.
        """
        self._context = context or nullcontext()
        self._splits_backward = splits_backward

    def set_turns(self, turns: Iterable[Turn]) -> None:
        """Set the micro-batches of the next forwards."""
        self.turns = iter(turns)

    def find_loose(self) -> None:
        """Look up the model's direct parameters again: other transforms may have replaced them."""
        for slot in self._loose_slots:
            slot.look_up_parameter()
        self.loose = nn.ParameterList([slot.real for slot in self._loose_slots])

    def forward(self, *received: Tensor) -> Any:
        """Return the last block's outputs, flattened and contiguous; the last stage returns what ``Turn.finish`` makes.

        Args:
            received: the outputs of the previous stage.
        """
        if not self._has_hooks:
            self._register_hooks()
        # torch passes the outputs of the previous stage; the model's own arguments come from the turn.
        turn = next(self.turns)
        if self._splits_backward:
            received = tuple(map(_with_contiguous_gradient, received))
        with self._running_alone(received), self._context:
            try:
                output = self.run(*turn.args, **turn.kwargs)
            except _StageEnd:
                output = None
        if self.last:
            _refuse_placeholders(output, "what the model returns")
            return output if turn.finish is None else turn.finish(output)
        # The model's forward was left by an exception, so a hook has stored what the last block returned.
        block_output = self._output
        self._output = None
        if block_output is None:
            raise StrategyError(
                f"stage {self.index} of the pipeline did not reach its end",
                found="the forward pass ended before the last block",
                fix="use a model whose blocks run one after the other, each of them once",
            )
        _refuse_placeholders(block_output, f"the output of stage {self.index}")
        # The next stage receives into contiguous tensors: gloo refuses others, and NCCL sends their memory as it lies.
        tensors = [
            leaf for leaf in tree_leaves(block_output) if isinstance(leaf, Tensor)
        ]
        return tuple(tensor.contiguous() for tensor in tensors)

    def _register_hooks(self) -> None:
        """Register hooks after those of other transforms, so that the kept output includes their changes."""
        self._has_hooks = True
        # First of all hooks: others would fail on a placeholder with an error that says nothing.
        for name, layer in zip(self._layer_names, self.layers, strict=True):
            layer.register_forward_pre_hook(
                _input_check(name), with_kwargs=True, prepend=True
            )

        def store_output(module: nn.Module, args: object, output: object) -> None:
            if self._is_running:
                self._output = output

        self._last_block.register_forward_hook(store_output)

    @contextmanager
    def _running_alone(self, received: Sequence[Tensor]) -> Iterator[None]:
        """Replace the other stages' modules by stand-ins, and give the entry the received tensors."""
        # Other stages of this rank too: a forward through their modules would compute what another turn computes.
        for slot in self._other_slots:
            slot.put_stand_in()
        self._set_borders(True, received)
        try:
            yield
        finally:
            self._set_borders(False, None)
            for slot in self._other_slots:
                slot.put_real()

    def _set_borders(self, is_running: bool, received: Sequence[Tensor] | None) -> None:
        """Mark the modules ahead of the first block and behind the last one."""
        self._is_running = is_running
        if self._entry is not None:
            self._entry.mark_entry(is_running, received)
        if self._exit is not None:
            self._exit.mark_exit(is_running)


def _input_check(name: str) -> Callable[..., None]:
    def check(
        module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> None:
        _refuse_placeholders((args, kwargs), f"the input of {name}")

    return check


def _refuse_placeholders(values: object, subject: str) -> None:
    """Refuse values that were computed from placeholders: a stage would use a tensor that it did not receive."""
    if any(isinstance(leaf, _Placeholder) for leaf in tree_leaves(values)):
        raise StrategyError(
            f"{subject} depends on what another stage of the pipeline computed",
            found="something other than the output of one block crosses the boundary between two stages",
            fix="pass it on through the blocks; or name the module it comes from in PipelinePlan(first=, last= or "
            "everywhere=), where the order in which the model defines its modules is not that in which it calls them",
        )


def _with_contiguous_gradient(tensor: Tensor) -> Tensor:
    """Return a view whose gradient is contiguous: a schedule that splits the backward sends the gradient as it is.

    Other schedules send the ``grad`` of a leaf, which has the layout of the leaf.
    """
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    view = tensor.view_as(tensor)
    view.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]  # torch's
    return view


def make_stages(
    model: nn.Module, layout: Layout, rank_stages: Sequence[int], device: torch.device
) -> list[Stage]:
    """Replace, in place, all modules of a model that belong to stages of other ranks; return this rank's stages.

    Args:
        model: the full model.
        layout: the stage of each module.
        rank_stages: the stages of this rank.
        device: the device of this rank.
    """
    slots = {
        name: _make_slot(model, name, stage, device)
        for name, stage in layout.owners.items()
    }
    for slot in slots.values():
        if slot.stage not in rank_stages:
            slot.release()
    return [
        Stage(index, slots, layout.blocks, rank_stages, model.forward)
        for index in rank_stages
    ]


def _make_slot(model: nn.Module, name: str, stage: int, device: torch.device) -> _Slot:
    parent, key = _parent_and_key(model, name)
    real = _get_part(model, name)
    stand_in: Tensor | StandIn
    if isinstance(real, nn.Parameter):
        stand_in = _make_placeholder(real.detach(), device)
    else:
        stand_in = StandIn(real, name, device)
    return _Slot(stage, parent, key, real, stand_in)
