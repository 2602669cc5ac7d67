"""Pipeline stages: the modules of each stage, and how a rank computes its own stages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from trainer_kit.core.errors import StrategyError, did_you_mean
from trainer_kit.core.parallel import PipelinePlan
from trainer_kit.core.tensors import local
from trainer_kit.strategies.process_group import ProcessGroup

__all__ = [
    "Layout",
    "Stage",
    "StandIn",
    "Ties",
    "Turn",
    "has_stages",
    "lay_out",
    "make_stages",
    "pipelined_model",
    "whole_names",
]


@final
@dataclass(frozen=True)
class Layout:
    """How a model is divided into stages.

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
    """The submodule that is divided into stages, with its name in the module ("" for the module itself)."""
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
    found = [
        (name, child)
        for name, child in module.named_children()
        if any(True for _ in child.parameters())
    ]
    if len(found) == 1 and not any(True for _ in module.parameters(recurse=False)):
        return found[0]
    raise StrategyError(
        "the submodule that becomes the pipeline stages is ambiguous",
        found=f"{type(module).__name__} has parameters in {', '.join(name for name, _ in found) or 'itself'}",
        fix="put all layers into one submodule, or name the submodule in configure_parallel:"
        " ParallelPlan(pipeline=PipelinePlan("
        'model="net")), where "" is the module itself',
    )


def lay_out(model: nn.Module, plan: PipelinePlan, stages: int) -> Layout:
    """Divide a model into stages.

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
    container, points = _container(model, plan, stages)
    prefix = f"{container}." if container else ""
    names = [
        prefix + name for name, _ in model.get_submodule(container).named_children()
    ]
    outside = _outside(model, container, plan)
    sizes = [_size(model.get_submodule(name)) for name in names]
    ends = {
        at: sum(
            _size(_at(model, name)) for name, where in outside.items() if where == at
        )
        for at in (0, -1)
    }
    sizes[0] += ends[0]
    sizes[-1] += ends[-1]
    starts = points if points is not None else _even(sizes, stages)
    blocks = [
        names[start:end]
        for start, end in zip(starts, [*starts[1:], len(names)], strict=True)
    ]
    owners = {name: at % stages for name, at in outside.items()}
    owners.update({name: index for index, part in enumerate(blocks) for name in part})
    return Layout(blocks, owners, *_ties(model, owners))


def _container(
    model: nn.Module, plan: PipelinePlan, stages: int
) -> tuple[str, list[int] | None]:
    """The name of the module that holds the blocks, and the first block of each stage if the plan gives them."""
    if isinstance(plan.split_points, str):
        if plan.split_points != "auto":
            raise StrategyError(
                'split_points is "auto" or names of blocks',
                found=repr(plan.split_points),
            )
        holders = [
            (name, part)
            for name, part in model.named_modules()
            if isinstance(part, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
            and len(part) >= stages
        ]
        if not holders:
            raise StrategyError(
                f"{type(model).__name__} cannot be split into {stages} stages",
                found="no ModuleList or Sequential with as many blocks",
                fix="use fewer stages (pp=), or keep all blocks in one nn.ModuleList",
            )
        # The largest container; of equally large ones the outermost, which comes first.
        return max(holders, key=lambda entry: _size(entry[1]))[0], None
    points = list(plan.split_points)
    holders_of = {name.rpartition(".")[0] for name in points}
    if len(holders_of) != 1 or len(points) != stages - 1:
        raise StrategyError(
            f"split_points names {len(points)} blocks of {len(holders_of)} lists of blocks",
            found=", ".join(points) or "none",
            fix=f"name the {stages - 1} blocks of one list at which the second and later of {stages} stages begin",
        )
    container = holders_of.pop()
    prefix = f"{container}." if container else ""
    try:
        names = [
            prefix + name for name, _ in model.get_submodule(container).named_children()
        ]
    except AttributeError:
        names = []
    for point in points:
        if point not in names:
            raise StrategyError(
                f"split_points: no block {point!r}", fix=did_you_mean(point, names)
            )
    starts = [0, *(names.index(point) for point in points)]
    if sorted(set(starts)) != starts:
        raise StrategyError(
            "split_points names its blocks out of order", found=", ".join(points)
        )
    return container, starts


def _outside(model: nn.Module, container: str, plan: PipelinePlan) -> dict[str, int]:
    """Return the modules around the blocks: 0 for those that run before the blocks, -1 for those that run after them.

    Modules are called in the order in which they are defined, unless the plan says otherwise. A module
    without parameters and state runs on every stage.
    """
    found: dict[str, int] = {}
    path = container.split(".") if container else []
    for depth, towards in enumerate(path):
        prefix = "".join(f"{name}." for name in path[:depth])
        home = model.get_submodule(".".join(path[:depth]))
        at = 0
        for key, child in home.named_children():
            if key == towards:
                at = -1
            elif child.state_dict() or any(True for _ in child.parameters()):
                found[prefix + key] = at
        found.update(
            (prefix + key, 0) for key, _ in home.named_parameters(recurse=False)
        )
    prefix = f"{container}." if container else ""
    found.update(
        (prefix + key, 0)
        for key, _ in model.get_submodule(container).named_parameters(recurse=False)
    )
    for name in (*plan.first, *plan.last, *plan.everywhere):
        if name not in found:
            raise StrategyError(
                f"PipelinePlan names {name!r}", fix=did_you_mean(name, list(found))
            )
        if name in plan.everywhere:
            if any(p.requires_grad for p in _at(model, name).parameters()):
                raise StrategyError(
                    f"PipelinePlan(everywhere=): {name!r} has parameters to train",
                    fix="name it in first= or last=",
                )
            del found[name]
        else:
            found[name] = 0 if name in plan.first else -1
    return found


def _home(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    parent, _, key = name.rpartition(".")
    return model.get_submodule(parent), key


def _at(model: nn.Module, name: str) -> Any:
    home, key = _home(model, name)
    return home._parameters[key] if key in home._parameters else home.get_submodule(key)


def _size(part: Any) -> int:
    if isinstance(part, nn.Parameter):
        return part.numel()
    return sum(parameter.numel() for parameter in part.parameters())


def _even(sizes: Sequence[int], stages: int) -> list[int]:
    """The first block of each stage, such that the largest stage is as small as possible."""
    total = [0]
    for size in sizes:
        total.append(total[-1] + size)
    # best[n][e]: (the largest of n stages over the first e blocks, where each begins)
    best: list[tuple[int, list[int]]] = [
        (total[end], [0]) for end in range(len(sizes) + 1)
    ]
    for count in range(2, stages + 1):
        best = [
            min(
                (
                    (max(best[at][0], total[end] - total[at]), [*best[at][1], at])
                    for at in range(count - 1, end)
                ),
                default=(total[-1] + 1, []),
            )
            for end in range(len(sizes) + 1)
        ]
    return best[-1][1]


def _ties(
    model: nn.Module, owners: Mapping[str, int]
) -> tuple[list[list[tuple[str, int]]], list[list[str]]]:
    found: dict[int, dict[str, int]] = {}
    for name, stage in owners.items():
        part = _at(model, name)
        inner = (
            [("", part)]
            if isinstance(part, nn.Parameter)
            else part.named_parameters(remove_duplicate=False)
        )
        for key, parameter in inner:
            found.setdefault(id(parameter), {})[f"{name}.{key}" if key else name] = (
                stage
            )
    order = {
        name: at
        for at, (name, _) in enumerate(model.named_parameters(remove_duplicate=False))
    }
    shared = (places for places in found.values() if len(set(places.values())) > 1)
    repeated = (
        places for places in found.values() if len(set(places.values())) < len(places)
    )
    return [
        sorted(places.items(), key=lambda place: order[place[0]]) for places in shared
    ], [*map(list, repeated)]


class _Meaningless(Tensor):
    """A placeholder tensor with the right shape; results computed from it are placeholders too."""


class _Left(BaseException):
    """Ends a forward at the end of the stage; a BaseException, so that the model does not catch it."""


@final
class StandIn(nn.Module):
    """Stands in for a module of another stage: its attributes, the shapes of its outputs, and no parameter."""

    def __init__(self, original: nn.Module, name: str, device: torch.device) -> None:
        super().__init__()
        held = [*original.parameters(), *original.buffers()]
        memo = {id(tensor): _without_storage(tensor) for tensor in held}
        # Set without nn.Module.__setattr__, which would register the original as a submodule.
        self.__dict__.update(
            twin=copy.deepcopy(original, memo), name=name, device=device, known={}
        )
        self.arrived: Sequence[Tensor] | None = None
        self.is_entry = self.is_exit = False

    def __getattr__(self, name: str) -> Any:
        if "twin" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["twin"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_exit:
            raise _Left
        leaves, spec = self._outputs(args, kwargs)
        if not self.is_entry:
            return tree_unflatten(
                [_placeholder(leaf, self.device) for leaf in leaves], spec
            )
        if self.arrived is None:
            raise StrategyError(
                f"{self.name} is called more than once in a forward",
                fix="use a model whose blocks run one after the other, each of them once",
            )
        arrived, self.arrived = iter(self.arrived), None
        return tree_unflatten(
            [next(arrived) if isinstance(leaf, Tensor) else leaf for leaf in leaves],
            spec,
        )

    def _outputs(self, args: Any, kwargs: Any) -> tuple[list[Any], Any]:
        """The outputs of the original module for inputs of these shapes, on the meta device."""
        key = tuple(
            (tuple(leaf.shape), leaf.dtype)
            if isinstance(leaf, Tensor)
            else _plain(leaf)
            for leaf in tree_leaves((args, kwargs))
        )
        if key not in self.known:
            with torch.no_grad():
                args, kwargs = tree_map_only(Tensor, _on_meta, (args, kwargs))
                self.known[key] = tree_flatten(self.twin(*args, **kwargs))
        leaves, spec = self.known[key]
        return list(leaves), spec


def has_stages(module: nn.Module) -> bool:
    """Return whether other ranks hold some modules of this one, as stages of a pipeline."""
    return any(isinstance(part, StandIn) for part in module.modules())


def whole_names(module: nn.Module) -> list[str]:
    """The names of all submodules, including those of other stages."""
    found = []
    for name, part in module.named_modules():
        if isinstance(part, StandIn):
            found += [
                f"{name}.{inner}" if inner else name
                for inner, _ in part.twin.named_modules()
            ]
        elif name:
            found.append(name)
    return found


def _placeholder(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    made = torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
    return (
        made.as_subclass(_Meaningless) if type(made) is Tensor else made
    )  # a fake tensor has a class already


def _without_storage(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor.detach(), device="meta")
    return (
        nn.Parameter(empty, tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else empty
    )


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor.detach().as_subclass(Tensor), device="meta")


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, type(None))) else type(value)


@final
@dataclass(frozen=True)
class Turn:
    """One micro-batch: the arguments of the model and, on the last stage, the function that takes its output."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    finish: Callable[[Any], Any] | None = None


@dataclass
class _Slot:
    """A module or parameter of one stage, and the stand-in that replaces it while another stage runs."""

    stage: int
    parent: nn.Module
    key: str
    real: Any
    stand_in: Any

    def put(self, real: bool) -> None:
        if isinstance(self.real, nn.Parameter):
            if real:
                self.parent.__dict__.pop(self.key, None)
                self.parent._parameters[self.key] = self.real
            else:
                self.parent._parameters.pop(self.key, None)
                self.parent.__dict__[self.key] = self.stand_in
        else:
            self.parent._modules[self.key] = self.real if real else self.stand_in


@final
class Stage(nn.Module):
    """One stage: its modules, and the model's forward from its first block to its last.

    Args:
        index: the number of this stage.
        places: the slots of all stages, by name in the model.
        blocks: the names of the blocks of each stage.
        own: the stages of this rank.
        run: the model's own forward.

    Attributes:
        turns: the micro-batches, in the order in which they run.
        context: the context manager around each forward.
    """

    run: Callable[..., Any]
    others: Sequence[_Slot]
    entry: StandIn | None
    exit: StandIn | None
    end: nn.Module

    def __init__(
        self,
        index: int,
        places: Mapping[str, _Slot],
        blocks: Sequence[Sequence[str]],
        own: Sequence[int],
        run: Callable[..., Any],
    ) -> None:
        super().__init__()
        self.index, self.last = index, index == len(blocks) - 1
        mine = {name: slot for name, slot in places.items() if slot.stage == index}
        self.__dict__.update(  # without nn.Module.__setattr__: these modules are not children of the stage
            run=run,
            others=[
                slot
                for slot in places.values()
                if slot.stage in own and slot.stage != index
            ],
            entry=places[blocks[index - 1][-1]].stand_in if index else None,
            exit=None if self.last else places[blocks[index + 1][0]].stand_in,
            end=mine[blocks[index][-1]].real,
        )
        held = {
            name: slot.real
            for name, slot in mine.items()
            if isinstance(slot.real, nn.Module)
        }
        self.held, self.names = nn.ModuleList(held.values()), list(held)
        self._loose = [
            slot for slot in mine.values() if isinstance(slot.real, nn.Parameter)
        ]
        self.find_loose()
        self._output: Any = None
        self._hooked = False
        self.turns: Iterator[Turn] = iter(())
        self.context: AbstractContextManager[Any] | None = None
        self.running = False
        self.splits_backward = False

    def find_loose(self) -> None:
        """Look up the model's direct parameters again: other transforms may have replaced them."""
        for slot in self._loose:
            slot.real = slot.parent._parameters[slot.key]
        self.loose = nn.ParameterList([slot.real for slot in self._loose])

    def forward(self, *arrived: Tensor) -> Any:
        """Return the last block's outputs, flattened and contiguous; the last stage returns what ``Turn.finish`` makes.

        Args:
            arrived: the outputs of the previous stage.
        """
        if not self._hooked:
            self._hook()
        turn = next(self.turns)
        if self.splits_backward:
            arrived = tuple(map(_with_contiguous_gradient, arrived))
        with self._alone(arrived), self.context or nullcontext():
            try:
                output = self.run(*turn.args, **turn.kwargs)
            except _Left:
                output = None
        if self.last:
            _check(output, "what the model returns")
            return output if turn.finish is None else turn.finish(output)
        left, self._output = self._output, None
        if left is None:
            raise StrategyError(
                f"stage {self.index} of the pipeline did not reach its end",
                found="the forward ended before its last block",
                fix="use a model whose blocks run one after the other, each of them once",
            )
        _check(left, f"the output of stage {self.index}")
        # The next stage receives into contiguous tensors: gloo refuses others, and NCCL sends their memory as it lies.
        return tuple(
            leaf.contiguous() for leaf in tree_leaves(left) if isinstance(leaf, Tensor)
        )

    def _hook(self) -> None:
        """Register hooks after those of other transforms, so that the kept output includes their changes."""
        self._hooked = True
        for name, module in zip(self.names, self.held, strict=True):
            module.register_forward_pre_hook(
                _checker(name), with_kwargs=True, prepend=True
            )

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            if self.running:
                self._output = output

        self.end.register_forward_hook(keep)

    @contextmanager
    def _alone(self, arrived: Sequence[Tensor]) -> Iterator[None]:
        """Replace the other stages' modules by stand-ins, and give the entry the received tensors."""
        for slot in self.others:
            slot.put(real=False)
        self._mark(True, arrived)
        try:
            yield
        finally:
            self._mark(False, None)
            for slot in self.others:
                slot.put(real=True)

    def _mark(self, running: bool, arrived: Sequence[Tensor] | None) -> None:
        self.running = running
        if self.entry is not None:
            self.entry.is_entry, self.entry.arrived = running, arrived
        if self.exit is not None:
            self.exit.is_exit = running


def _checker(name: str) -> Callable[..., None]:
    def check(module: nn.Module, args: Any, kwargs: Any) -> None:
        _check((args, kwargs), f"the input of {name}")

    return check


def _check(values: Any, what: str) -> None:
    if any(isinstance(leaf, _Meaningless) for leaf in tree_leaves(values)):
        raise StrategyError(
            f"{what} depends on what another stage of the pipeline computed",
            found="more than what one block hands to the next crosses the border between two stages",
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
    view.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]
    return view


def make_stages(
    model: nn.Module, layout: Layout, own: Sequence[int], device: torch.device
) -> list[Stage]:
    """Replace, in place, all modules of a model that belong to stages of other ranks; return this rank's stages.

    Args:
        model: the full model.
        layout: the stage of each module.
        own: the stages of this rank.
        device: the device of this rank.
    """
    slots = {
        name: _slot(model, name, stage, device) for name, stage in layout.owners.items()
    }
    for slot in slots.values():
        if slot.stage not in own:
            slot.put(real=False)
            slot.real = None
    return [Stage(index, slots, layout.blocks, own, model.forward) for index in own]


def _slot(model: nn.Module, name: str, stage: int, device: torch.device) -> _Slot:
    real, (home, key) = _at(model, name), _home(model, name)
    if isinstance(real, nn.Parameter):
        return _Slot(stage, home, key, real, _placeholder(real.detach(), device))
    return _Slot(stage, home, key, real, StandIn(real, name, device))


@final
class Ties:
    """Parameters that are tied across stages: this rank's copies, and the exchange of their gradients.

    Args:
        shared: for each tied parameter, its names in the module, with the stage of each.
        ranks: the group rank of every stage.
        group: the ranks that hold the stages of one model.

    Attributes:
        names: for each name of a copy on this rank, the name that checkpoints use: the first of all its names.
        repeated: copies on this rank that an earlier stage holds too: norms count their gradients once.
    """

    def __init__(
        self,
        shared: Sequence[Sequence[tuple[str, int]]],
        ranks: Sequence[int],
        group: ProcessGroup,
    ) -> None:
        self._shared, self._ranks, self._group = shared, ranks, group
        self._me = group.rank
        self._copies: list[list[nn.Parameter]] = []
        self.names: dict[str, str] = {}
        self.repeated: set[nn.Parameter] = set()

    def find(self, module: nn.Module) -> None:
        """Look up the copies in a module whose parameters are already sharded.

        Raises:
            StrategyError: on every rank, if copies are sharded differently.
        """
        self._copies, self.names, self.repeated = [], {}, set()
        for places in self._shared:
            own = [name for name, stage in places if self._ranks[stage] == self._me]
            copies = list({id(p): p for p in map(module.get_parameter, own)}.values())
            first = self._ranks[places[0][1]] == self._me
            self._copies.append(copies)
            self.names.update(
                {name: places[0][0] for name in own if name != places[0][0]}
            )
            self.repeated.update(copies[1:] if first else copies)
        mine = [[_layout(copy) for copy in copies] for copies in self._copies]
        for places, layouts in self._compared(mine):
            raise StrategyError(
                "stages that share a parameter split it differently",
                found=f"{' and '.join(name for name, _ in places)}: {', '.join(layouts)}",
                fix="use 'embedding_rowwise' and 'colwise_rep', which split an embedding and a head in the same way",
            )

    def check_groups(self, optimizer: Optimizer) -> None:
        """Check that the optimizer has the same options for all copies of a parameter.

        Raises:
            StrategyError: on every rank.
        """
        if not self._shared:
            return
        options = {
            id(p): repr({k: v for k, v in group.items() if k != "params"})
            for group in optimizer.param_groups
            for p in group["params"]
        }
        mine = [
            [options.get(id(copy), "not trained") for copy in copies]
            for copies in self._copies
        ]
        for places, found in self._compared(mine):
            raise StrategyError(
                f"{' and '.join(name for name, _ in places)} are one parameter, but would be trained with"
                " different options",
                found="; ".join(found),
                fix="put both names into groups with the same options: each stage has the parameter under one name",
            )

    def _compared(
        self, mine: list[list[str]]
    ) -> list[tuple[Sequence[tuple[str, int]], list[str]]]:
        """The tied parameters for which the texts of the ranks differ, with the texts."""
        if not self._shared:
            return []
        everyone = self._group.all_gather_object(mine)
        by_parameter = [
            sorted({one for copies in theirs for one in copies})
            for theirs in zip(*everyone, strict=True)
        ]
        return [
            (places, found)
            for places, found in zip(self._shared, by_parameter, strict=True)
            if len(found) > 1
        ]

    def add_gradients(self) -> None:
        """Set the gradient of every copy to the sum over all stages."""
        for places, copies in zip(self._shared, self._copies, strict=True):
            if not copies or not copies[0].requires_grad:
                continue
            for parameter in copies:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            parts = [
                local(parameter.grad)
                for parameter in copies
                if parameter.grad is not None
            ]
            mine = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
            whole = self._summed(
                mine, sorted({self._ranks[stage] for _, stage in places})
            )
            for part in parts:
                part.copy_(whole)

    def _summed(self, mine: Tensor, ranks: Sequence[int]) -> Tensor:
        """The sum over these ranks of the group, added in rank order so that the bits are the same on each."""
        if len(ranks) == 1:
            return mine
        mine = mine.contiguous()
        parts = {
            rank: mine if rank == self._me else torch.empty_like(mine) for rank in ranks
        }
        ways = []
        for rank in ranks:
            if rank != self._me:
                ways += [
                    dist.P2POp(
                        dist.isend, mine, group=self._group.group, group_peer=rank
                    ),
                    dist.P2POp(
                        dist.irecv,
                        parts[rank],
                        group=self._group.group,
                        group_peer=rank,
                    ),
                ]
        for work in dist.batch_isend_irecv(ways):
            work.wait()
        whole = parts[ranks[0]].clone()
        for rank in ranks[1:]:
            whole += parts[rank]
        return whole


def _layout(parameter: nn.Parameter) -> str:
    return f"{getattr(parameter, 'placements', 'whole')} {list(local(parameter).shape)}"
