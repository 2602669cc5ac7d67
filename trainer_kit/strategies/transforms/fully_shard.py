"""Fully sharded: parameters, gradients and optimizer state in parts; a unit is gathered while it computes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from trainer_kit.core.errors import StrategyError
from trainer_kit.strategies.transforms.blocks import Policy, units
from trainer_kit.strategies.transforms.transform import Transform

__all__ = ["FullyShard", "abandon", "resharding", "sharded_units"]


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


def resharding(call: Callable[..., Any], units: Sequence[Any]) -> Callable[..., Any]:
    """``call``, after which the weights of ``units`` are sharded again: hooks and checkpoints expect them so."""

    def resharded(*arguments: Any) -> Any:
        output = call(*arguments)
        for unit in units:
            unit.reshard()
        return output

    return resharded
