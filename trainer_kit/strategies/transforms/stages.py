"""Which modules of a model belong to which stage of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import nn

from trainer_kit.core.errors import StrategyError, did_you_mean
from trainer_kit.core.parallel import PipelinePlan

__all__ = ["Layout", "lay_out", "pipelined_model"]


@final
@dataclass(frozen=True)
class Layout:
    """The stages of a model.

    Attributes:
        blocks: of each stage, by name in the model, in order.
        owners: the stage of every module and parameter that belongs to one; the rest runs on each.
        shared: of each parameter that several stages have, all its names, with the stage of each.
        repeated: the names of each that one stage has under several.
    """

    blocks: Sequence[Sequence[str]]
    owners: Mapping[str, int]
    shared: Sequence[Sequence[tuple[str, int]]]
    repeated: Sequence[Sequence[str]]


def pipelined_model(module: nn.Module, plan: PipelinePlan) -> tuple[str, nn.Module]:
    """The submodule that becomes stages, with its name in the module ("" for the module itself)."""
    if plan.model is not None:
        try:
            return plan.model, module.get_submodule(plan.model)
        except AttributeError:
            raise StrategyError(
                f"PipelinePlan(model={plan.model!r}): {type(module).__name__} has no such submodule",
                fix=did_you_mean(plan.model, [name for name, _ in module.named_children()]),
            ) from None
    found = [(name, child) for name, child in module.named_children() if any(True for _ in child.parameters())]
    if len(found) == 1 and not any(True for _ in module.parameters(recurse=False)):
        return found[0]
    raise StrategyError(
        "which submodule becomes the stages of the pipeline?",
        found=f"{type(module).__name__} has parameters in {', '.join(name for name, _ in found) or 'itself'}",
        fix="put all layers into one submodule, or say which in configure_parallel: ParallelPlan(pipeline=PipelinePlan("
        'model="net")), where "" is the module itself',
    )


def lay_out(model: nn.Module, plan: PipelinePlan, stages: int) -> Layout:
    """Divide a model into stages.

    Args:
        model: the whole.
        plan: how it may be split.
        stages: how many.

    Raises:
        StrategyError: the model has too few blocks, or the plan names what is not there.

    Example:
        >>> lay_out(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), PipelinePlan(), 2).blocks
        [['0', '1'], ['2', '3']]
    """
    container, points = _container(model, plan, stages)
    prefix = f"{container}." if container else ""
    names = [prefix + name for name, _ in model.get_submodule(container).named_children()]
    outside = _outside(model, container, plan)
    sizes = [_size(model.get_submodule(name)) for name in names]
    ends = {at: sum(_size(_at(model, name)) for name, where in outside.items() if where == at) for at in (0, -1)}
    sizes[0] += ends[0]
    sizes[-1] += ends[-1]
    starts = points if points is not None else _even(sizes, stages)
    blocks = [names[start:end] for start, end in zip(starts, [*starts[1:], len(names)], strict=True)]
    owners = {name: at % stages for name, at in outside.items()}
    owners.update({name: index for index, part in enumerate(blocks) for name in part})
    return Layout(blocks, owners, *_ties(model, owners))


def _container(model: nn.Module, plan: PipelinePlan, stages: int) -> tuple[str, list[int] | None]:
    """The name of what holds the blocks, and at which of them stages begin, where the plan says so."""
    if isinstance(plan.split_points, str):
        if plan.split_points != "auto":
            raise StrategyError('split_points is "auto" or names of blocks', found=repr(plan.split_points))
        holders = [
            (name, part)
            for name, part in model.named_modules()
            if isinstance(part, (nn.ModuleList, nn.Sequential, nn.ModuleDict)) and len(part) >= stages
        ]
        if not holders:
            raise StrategyError(
                f"{type(model).__name__} cannot be split into {stages} stages",
                found="no ModuleList or Sequential with as many blocks",
                fix="use fewer stages (pp=), or keep the blocks in one nn.ModuleList",
            )
        # Of those that hold as much, the outermost, which comes first.
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
        names = [prefix + name for name, _ in model.get_submodule(container).named_children()]
    except AttributeError:
        names = []
    for point in points:
        if point not in names:
            raise StrategyError(f"split_points: no block {point!r}", fix=did_you_mean(point, names))
    starts = [0, *(names.index(point) for point in points)]
    if sorted(set(starts)) != starts:
        raise StrategyError("split_points names its blocks out of order", found=", ".join(points))
    return container, starts


def _outside(model: nn.Module, container: str, plan: PipelinePlan) -> dict[str, int]:
    """What is around the blocks: 0 for what runs ahead of them, -1 for what runs behind them.

    Modules are called in the order in which they are defined, unless the plan says otherwise. What has nothing to
    train or to save runs on every stage.
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
        found.update((prefix + key, 0) for key, _ in home.named_parameters(recurse=False))
    prefix = f"{container}." if container else ""
    found.update((prefix + key, 0) for key, _ in model.get_submodule(container).named_parameters(recurse=False))
    for name in (*plan.first, *plan.last, *plan.everywhere):
        if name not in found:
            raise StrategyError(f"PipelinePlan names {name!r}", fix=did_you_mean(name, list(found)))
        if name in plan.everywhere:
            if any(p.requires_grad for p in _at(model, name).parameters()):
                raise StrategyError(
                    f"PipelinePlan(everywhere=): {name!r} has parameters to train", fix="name it in first= or last="
                )
            del found[name]
        else:
            found[name] = 0 if name in plan.first else -1
    return found


def _at(model: nn.Module, name: str) -> Any:
    parent, _, key = name.rpartition(".")
    home = model.get_submodule(parent)
    return home._parameters[key] if key in home._parameters else home.get_submodule(key)


def _size(part: Any) -> int:
    if isinstance(part, nn.Parameter):
        return part.numel()
    return sum(parameter.numel() for parameter in part.parameters())


def _even(sizes: Sequence[int], stages: int) -> list[int]:
    """Where stages begin so that the largest is as small as can be; each has a block at least."""
    total = [0]
    for size in sizes:
        total.append(total[-1] + size)
    # best[n][e]: (the largest of n stages over the first e blocks, where each begins)
    best: list[tuple[int, list[int]]] = [(total[end], [0]) for end in range(len(sizes) + 1)]
    for count in range(2, stages + 1):
        best = [
            min(
                ((max(best[at][0], total[end] - total[at]), [*best[at][1], at]) for at in range(count - 1, end)),
                default=(total[-1] + 1, []),
            )
            for end in range(len(sizes) + 1)
        ]
    return best[-1][1]


def _ties(model: nn.Module, owners: Mapping[str, int]) -> tuple[list[list[tuple[str, int]]], list[list[str]]]:
    found: dict[int, dict[str, int]] = {}
    for name, stage in owners.items():
        part = _at(model, name)
        inner = [("", part)] if isinstance(part, nn.Parameter) else part.named_parameters(remove_duplicate=False)
        for key, parameter in inner:
            found.setdefault(id(parameter), {})[f"{name}.{key}" if key else name] = stage
    order = {name: at for at, (name, _) in enumerate(model.named_parameters(remove_duplicate=False))}
    shared = (places for places in found.values() if len(set(places.values())) > 1)
    repeated = (places for places in found.values() if len(set(places.values())) < len(places))
    return [sorted(places.items(), key=lambda place: order[place[0]]) for places in shared], [*map(list, repeated)]
