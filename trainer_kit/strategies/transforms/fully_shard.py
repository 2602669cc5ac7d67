"""Fully sharded: parameters, gradients and optimizer state in parts; a unit is gathered while it computes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from trainer_kit.core.costs import Costs, Exchange
from trainer_kit.core.errors import StrategyError
from trainer_kit.strategies.costs import held_in_parts, own_part, ring
from trainer_kit.strategies.transforms.blocks import Policy, units
from trainer_kit.strategies.transforms.transform import Transform

__all__ = ["FullyShard", "abandon", "resharding", "sharded_costs", "sharded_units"]


@final
class FullyShard(Transform):
    """torch's ``fully_shard`` (FSDP2; Zhao et al., VLDB 2023) on the units of a module, then on the rest of it.

    A module that shares a parameter with a module outside of it is no unit: both are gathered with the rest.

    Args:
        policy: which parts are units, see `units`.
        reshard_after_forward: free a unit's gathered parameters after its forward; False: keep them for its backward;
            a number: gather for backward among so many ranks. None: True, but for the outermost.
        mp_policy: in which dtype parameters are gathered and gradients reduced.
        cpu_offload: parts, gradients and optimizer states live in host memory.
        ignored: modules that stay whole on every rank, or a regular expression that their names match.
        separate: modules that are units under any policy, and are gathered in their stored dtype.
    """

    def __init__(
        self,
        policy: Policy = None,
        *,
        reshard_after_forward: bool | int | None = None,
        mp_policy: MixedPrecisionPolicy | None = None,
        cpu_offload: bool = False,
        ignored: str | Iterable[nn.Module] = (),
        separate: Iterable[nn.Module] = (),
    ) -> None:
        self.policy = policy
        self.reshard_after_forward = reshard_after_forward
        self.cpu_offload = cpu_offload
        self.mp_policy = mp_policy or MixedPrecisionPolicy()
        self.ignored = ignored if isinstance(ignored, str) else list(ignored)
        self.separate = {id(part) for part in separate}

    def apply(self, module: nn.Module, mesh: DeviceMesh, roots: Sequence[nn.Module] | None = None) -> None:
        """Shard in place; modules that are sharded already stay as they are.

        Args:
            module: the whole.
            mesh: one axis to shard over, or two: replicas, and shards of each (hybrid).
            roots: the modules that gather parameters outside of all units; None: the module.

        Raises:
            StrategyError: an axis too many, or a policy or an expression names what is not there.
        """
        if mesh.ndim > 2:
            raise StrategyError("parameters are sharded over one axis, or two for replicas", found=f"{mesh}")
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if self.cpu_offload else OffloadPolicy()
        ignored = self.left_whole(module)
        if isinstance(self.ignored, str) and not ignored:
            raise StrategyError(
                "ignored_modules names no module that has parameters",
                found=repr(self.ignored),
                fix=f"a regular expression of whole names, such as {_some_name(module)!r}",
            )
        as_stored = replace(self.mp_policy, param_dtype=None)
        for part in [*self.units(module), *([module] if roots is None else roots)]:
            if isinstance(part, FSDPModule):
                continue
            fully_shard(
                part,
                mesh=mesh,
                reshard_after_forward=self.reshard_after_forward,
                mp_policy=as_stored if id(part) in self.separate else self.mp_policy,
                offload_policy=offload,
                ignored_params=ignored,
            )

    def left_whole(self, module: nn.Module) -> set[nn.Parameter]:
        """Return the parameters that stay whole on every rank; the strategy averages their gradients."""
        if isinstance(self.ignored, str):
            matching = [part for name, part in module.named_modules() if name and re.fullmatch(self.ignored, name)]
        else:
            matching = self.ignored
        return {parameter for part in matching for parameter in part.parameters()}

    def units(self, module: nn.Module) -> list[nn.Module]:
        """Return the modules that are gathered separately, without the roots."""
        owners = Counter(id(p) for part in module.modules() for p in part.parameters(recurse=False))
        shared = {number for number, count in owners.items() if count > 1}
        found = []
        picked = {id(part) for part in units(module, self.policy).values()} | self.separate
        for part in reversed(list(module.modules())):  # inner ones first
            if id(part) not in picked or part is module:
                continue
            inside = Counter(id(p) for inner in part.modules() for p in inner.parameters(recurse=False))
            if all(inside[number] == owners[number] for number in shared & inside.keys()):
                found.append(part)
        return found


def _some_name(module: nn.Module) -> str:
    return next((name for name, part in module.named_modules() if name and any(True for _ in part.parameters())), "net")


def sharded_units(module: nn.Module) -> list[FSDPModule]:
    """Return all units of a module, the module first where it is a unit."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def abandon(unit: FSDPModule) -> None:
    """Drop the gradients of a window that an error has ended before its last backward."""
    unit.set_requires_gradient_sync(True, recurse=False)
    state: Any = unit._get_fsdp_state()
    if state._is_root and hasattr(unit, "reset_iter_state"):
        unit.reset_iter_state()
    # torch's own reset keeps the gradients that backwards without a reduction have accumulated.
    for group in state._fsdp_param_groups:
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def sharded_costs(
    shard: FullyShard,
    module: nn.Module,
    roots: Sequence[nn.Module],
    sizes: tuple[int, ...],
    rank: int,
    each_backward: bool,
) -> Costs:
    """What a rank holds and sends, of a module that is divided or will be.

    Args:
        shard: how.
        module: the whole.
        roots: as `FullyShard.apply` has it.
        sizes: of the mesh's axes: shards, or replicas and shards.
        rank: this one's place among the shards.
        each_backward: gradients are reduced in each, not once an optimizer step.
    """
    shards, copies = sizes[-1], sizes[0] if len(sizes) == 2 else 1
    whole = shard.left_whole(module)
    divided = {p for root in roots for p in root.parameters() if p not in whole}
    parts = {p: own_part(p, shards if p in divided else 1, rank) for p in module.parameters()}

    def size(parameters: Iterable[nn.Parameter], dtype: torch.dtype | None = None) -> int:
        """Bytes that all shards send together: each sends as much as the first, whose part is the largest."""
        together = 0
        for p in parameters:
            mesh = getattr(p, "device_mesh", None)
            # With further axes only this rank's part is known.
            first = own_part(p.detach() if mesh is None else _whole_shape(p, mesh, len(sizes)), shards)
            together += first.numel() * shards * (dtype or p.dtype).itemsize
        return together

    policy, freed = shard.mp_policy, shard.reshard_after_forward
    again = divided if freed else set()
    if freed is None:  # the outermost stay gathered
        again = {p for unit in shard.units(module) if unit not in roots for p in unit.parameters()} & divided
    near = freed if isinstance(freed, int) and not isinstance(freed, bool) else shards
    trained = [p for p in divided if p.requires_grad]
    reduced = size(trained, policy.reduce_dtype or policy.param_dtype)
    kept_whole = size([p for p in parts if p not in divided and p.requires_grad])

    def moved(what: str, ring_size: int, size: int, times: int = 1, often: bool = True) -> Exchange:
        return Exchange(what=what, sent=ring(times, ring_size, size), each_batch=often)

    everyone, gathered = shards * copies, size(divided, policy.param_dtype)
    sent = [
        moved(f"parameters: all-gather over {shards} ranks for forward", shards, gathered),
        moved(f"parameters: all-gather over {near} ranks for backward", near, size(again, policy.param_dtype)),
        moved(f"gradients: reduce-scatter over {shards} ranks", shards, reduced, often=each_backward),
        moved(f"their parts: all-reduce over {copies} copies", copies, reduced // shards, 2, each_backward),
        moved(f"gradients of what stays whole: all-reduce over {everyone} ranks", everyone, kept_whole, 2),
    ]
    among = f"{shards} ranks, each with its part of parameters, gradients and optimizer state"
    return held_in_parts(parts, f"{copies} copies, each over {among}" if copies > 1 else among, sent)


def _whole_shape(parameter: nn.Parameter, mesh: DeviceMesh, axes: int) -> Any:
    return torch.empty(parameter.shape, device="meta") if mesh.ndim == axes else parameter


def resharding(call: Callable[..., Any], units: Sequence[Any]) -> Callable[..., Any]:
    """``call``, after which the weights of ``units`` are sharded again: hooks and checkpoints expect them so."""

    def resharded(*arguments: Any) -> Any:
        output = call(*arguments)
        for unit in units:
            unit.reshard()
        return output

    return resharded
