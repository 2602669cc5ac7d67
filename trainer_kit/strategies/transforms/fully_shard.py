"""Parameters, gradients and optimizer state in parts; a unit's parameters are gathered while it computes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
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
from trainer_kit.strategies.transforms.units import Policy, units

__all__ = ["FullyShard", "abandon", "sharded_units"]


@final
class FullyShard:
    """torch's ``fully_shard`` (FSDP2; Zhao et al., VLDB 2023) on the units of a module, then on the rest of it.

    A unit that shares a parameter with the world outside of it is no unit: both sides are gathered with the rest.

    Args:
        policy: which parts are units, see `units`.
        reshard_after_forward: free a unit's gathered parameters after its forward; False: keep them for its backward;
            a number: gather for backward among so many ranks. None: True, but for the outermost.
        mp_policy: in which dtype parameters are gathered and gradients reduced.
        cpu_offload: parts, gradients and optimizer states live in host memory.
        ignored: modules that stay whole on every rank, or a regular expression that their names match.
        apart: modules that are units whatever the policy says, and are gathered as they are stored.
    """

    def __init__(
        self,
        policy: Policy = None,
        *,
        reshard_after_forward: bool | int | None = None,
        mp_policy: MixedPrecisionPolicy | None = None,
        cpu_offload: bool = False,
        ignored: str | Iterable[nn.Module] = (),
        apart: Iterable[nn.Module] = (),
    ) -> None:
        self.policy, self.reshard_after_forward, self.cpu_offload = policy, reshard_after_forward, cpu_offload
        self.mp_policy = mp_policy or MixedPrecisionPolicy()
        self.ignored = ignored if isinstance(ignored, str) else list(ignored)
        self.apart = {id(part) for part in apart}

    def apply(self, module: nn.Module, mesh: DeviceMesh, roots: Sequence[nn.Module] | None = None) -> None:
        """Shard in place; what is sharded already stays as it is.

        Args:
            module: the whole.
            mesh: one axis to shard over, or two: replicas, and shards of each (hybrid).
            roots: what gathers what no unit inside of it does; None: the module.

        Raises:
            StrategyError: an axis too many, or a policy names a class that no part is of.
        """
        if mesh.ndim > 2:
            raise StrategyError("parameters are sharded over one axis, or two for replicas", found=f"{mesh}")
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if self.cpu_offload else OffloadPolicy()
        ignored = self.left_whole(module)
        as_stored = replace(self.mp_policy, param_dtype=None)
        for part in [*self._units(module), *([module] if roots is None else roots)]:
            if isinstance(part, FSDPModule):
                continue
            fully_shard(
                part,
                mesh=mesh,
                reshard_after_forward=self.reshard_after_forward,
                mp_policy=as_stored if id(part) in self.apart else self.mp_policy,
                offload_policy=offload,
                ignored_params=ignored,
            )

    def left_whole(self, module: nn.Module) -> set[nn.Parameter]:
        """The parameters that stay whole on every rank; who trains them averages their gradients."""
        if isinstance(self.ignored, str):
            matching = [part for name, part in module.named_modules() if name and re.fullmatch(self.ignored, name)]
        else:
            matching = self.ignored
        return {parameter for part in matching for parameter in part.parameters()}

    def _units(self, module: nn.Module) -> list[nn.Module]:
        owners = Counter(id(p) for part in module.modules() for p in part.parameters(recurse=False))
        shared = {number for number, count in owners.items() if count > 1}
        found = []
        picked = {id(part) for part in units(module, self.policy).values()} | self.apart
        for part in reversed(list(module.modules())):  # inner ones first
            if id(part) not in picked or part is module:
                continue
            inside = Counter(id(p) for inner in part.modules() for p in inner.parameters(recurse=False))
            if all(inside[number] == owners[number] for number in shared & inside.keys()):
                found.append(part)
        return found


def sharded_units(module: nn.Module) -> list[FSDPModule]:
    """Everything in a module that gathers its parameters by itself, the module first where it is one."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def abandon(unit: FSDPModule) -> None:
    """A window ended before its last backward: nothing of it may be in the next one's gradients."""
    unit.set_requires_gradient_sync(True, recurse=False)
    state: Any = unit._get_fsdp_state()
    if state._is_root and hasattr(unit, "reset_iter_state"):
        unit.reset_iter_state()
    # torch's own reset leaves what backwards without an exchange have added up.
    for group in state._fsdp_param_groups:
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
