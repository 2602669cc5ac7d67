"""Fully sharded data parallelism: every rank keeps a shard of parameters, gradients and optimizer state."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.optim import Optimizer

from trainer_kit.core.arguments import check_timeout
from trainer_kit.core.costs import Costs, held, own_part
from trainer_kit.core.display import in_units
from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import StrategyError
from trainer_kit.core.protocols import MicroSteps
from trainer_kit.precision.precision import Precision
from trainer_kit.strategies.gradients import clip_sharded_gradients
from trainer_kit.strategies.process_group import (
    ProcessGroup,
    average_in_backward,
    borrowed_buffers,
    inherit_timeout,
    join_world,
    once_a_world,
)
from trainer_kit.strategies.rank_sync import InitialWeights, built_once
from trainer_kit.strategies.state import (
    Moved,
    parameters_of,
    refuse_unprepared,
    step_by_kind,
)
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.strategies.transforms.blocks import (
    ActivationCheckpointing,
    Policy,
    outer_modules,
    units,
)

__all__ = [
    "ExchangingBackward",
    "FSDPStrategy",
    "abandon",
    "resharding",
    "sharded_units",
]


_RESHARDS: Final[Mapping[str, bool | None]] = {
    "FULL_SHARD": None,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD": None,
    "HYBRID_SHARD_ZERO2": False,
}


@final
class FSDPStrategy(Strategy):
    """torch's FSDP2 (Zhao et al., VLDB 2023; https://pytorch.org/docs/stable/distributed.fsdp.fully_shard.html).

    The parameters of a unit are gathered while it computes; gradients are reduced into shards once per optimizer step.
    The module keeps its parameter names. After a fit it stays sharded, and its checkpoints load under any strategy.

    Args:
        device: the device of this rank; the Trainer sets it.
        sharding_strategy: ``"FULL_SHARD"``; ``"SHARD_GRAD_OP"``: parameters stay gathered until backward;
            ``"HYBRID_SHARD"``: shards within a machine, replicas across machines; ``"HYBRID_SHARD_ZERO2"``: both.
        reshard_after_forward: as in torch's ``fully_shard``; overrides ``sharding_strategy``.
        auto_wrap_policy: the modules that become separate units: classes, names, a number of parameters, or a
            callable; by default the blocks of each list or sequence that repeats a class.
        activation_checkpointing_policy: the modules that recompute their activations in backward; True: the units.
        offload_activations: keep the inputs of the modules that recompute in host memory until backward.
        cpu_offload: keep shards, gradients and optimizer state in host memory.
        mixed_precision: torch's ``MixedPrecisionPolicy``; by default parameters are gathered in their stored dtype, and
            gradients reduced in the dtype of the precision. With ``precision="bf16-mixed"``, autocast then keeps copies
            of all weights in bfloat16 on every rank from forward to backward, 2 bytes a parameter that are not sharded;
            ``MixedPrecisionPolicy(param_dtype=torch.bfloat16)`` gathers in bfloat16 and needs no copies.
        device_mesh: sizes, or a mesh: one axis to shard over, or two (replicas, shards).
        ignored_modules: modules that are not sharded, or a regular expression of their names.
        process_group_backend: ``"gloo"``, ``"nccl"``, …; by default torch's choice for the device.
        timeout: the limit for one collective.
    """

    name = "fsdp"
    engine = "fsdp"
    sharded = lockstep = values_on_rank_zero = True
    mesh: DeviceMesh
    own_buffers = True
    """Nothing exchanges them in a step."""

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        sharding_strategy: str = "FULL_SHARD",
        reshard_after_forward: bool | int | None = None,
        auto_wrap_policy: Policy = None,
        activation_checkpointing_policy: Policy = False,
        offload_activations: bool = False,
        cpu_offload: bool = False,
        mixed_precision: MixedPrecisionPolicy | None = None,
        device_mesh: tuple[int, ...] | DeviceMesh | None = None,
        ignored_modules: str | Iterable[nn.Module] = (),
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        word = sharding_strategy.upper()
        if word not in _RESHARDS:
            found, fix = (
                repr(sharding_strategy),
                f"use {', '.join(_RESHARDS)}, or DDPStrategy, which shards nothing",
            )
            raise StrategyError("unknown sharding strategy", found=found, fix=fix)
        if offload_activations and activation_checkpointing_policy is False:
            fix = "activation_checkpointing_policy=True, or the modules"
            raise StrategyError(
                "activation offload needs activation checkpointing",
                found="offload_activations",
                fix=fix,
            )
        self._offloads = offload_activations
        self.device = torch.device(device)
        self.hybrid, self._mesh_shape = word.startswith("HYBRID"), device_mesh
        self._reshards = (
            _RESHARDS[word] if reshard_after_forward is None else reshard_after_forward
        )
        self._policy, self._recomputes = (
            auto_wrap_policy,
            activation_checkpointing_policy,
        )
        self.cpu_offload, self._mixed, self._ignored = (
            cpu_offload,
            mixed_precision,
            ignored_modules,
        )
        self.needs_processes = (
            not cpu_offload and activation_checkpointing_policy is False
        )
        check_timeout(timeout, "FSDPStrategy")
        self.backend, self.timeout = process_group_backend, timeout
        self._root: Any = None  # what gathers the rest of its module; None where that is several modules
        self._around_steps: Any = None  # the root, where steps must run between its hooks: a step does not call it
        self._units: list[FSDPModule] = []
        self._parameters: list[nn.Parameter] = []
        self._hooks: list[Any] = []
        self._moved = Moved()
        self.weights: InitialWeights | None = None
        """The initial weights, where `MeshStrategy` has divided the module along other axes first."""
        self._every_backward = False  # exchanges, because there are several for one optimizer step, or the user's

    @property
    def parameters_on(self) -> torch.device:
        """Where parts are kept."""
        return torch.device("cpu") if self.cpu_offload else self.device

    @property
    def gradient_divisor(self) -> int:
        """FSDP averages over shards and replicas."""
        return self.data.size

    def start(self) -> None:
        """Join the process group, or make one; then the mesh."""
        self.world: ProcessGroup = join_world(
            self.device, self.backend, self.timeout, alone=True
        )
        self.data = self.losses = self.reports = self.world
        self.reporter = self.world.rank
        shape = self._shape(self.world.size)
        places = (
            shape.size() if isinstance(shape, DeviceMesh) else torch.Size(shape).numel()
        )
        if len(shape) > 2 if isinstance(shape, tuple) else shape.ndim > 2:
            raise StrategyError(
                "parameters are sharded over one axis, or two for replicas",
                found=f"{shape}",
            )
        if places != self.world.size:
            found = f"device_mesh={shape} and {self.world.size} processes"
            raise StrategyError(
                "the size of the mesh differs from the number of processes", found=found
            )
        if not isinstance(shape, DeviceMesh):
            sizes, names, kind = (
                tuple(shape),
                ("replicate", "shard")[-len(shape) :],
                self.device.type,
            )
            shape = once_a_world(
                ("fsdp", kind, sizes),
                lambda: inherit_timeout(
                    init_device_mesh(kind, sizes, mesh_dim_names=names)
                ),
            )
        self.mesh = shape

    def _shape(self, ranks: int) -> tuple[int, ...] | DeviceMesh:
        """Of the mesh; (replicas, shards) where there are two axes."""
        if self._mesh_shape is not None or not self.hybrid:
            return self._mesh_shape or (ranks,)
        here = Environment.detect()
        inside = here.local_world_size if here.launched else ranks
        return (ranks // inside, inside)

    def stop(self) -> None:
        """Release the module; it stays divided, and keeps its activations again."""
        for hook in self._hooks:
            hook.remove()
        for unit in self._units:
            ActivationCheckpointing().undo(unit)  # type: ignore[arg-type]  # torch mixes it into the module's class
        self._root, self._around_steps, self._units, self._hooks, self._parameters = (
            None,
            None,
            [],
            [],
            [],
        )

    def init_context(self) -> AbstractContextManager[Any]:
        """Build layers on rank 0, in host memory; the other ranks get their shards from it."""
        return built_once(self.world)

    def place_module(self, module: nn.Module, precision: Precision) -> None:
        """Shard the module, for evaluation too: a rank may have no memory for full weights."""
        self.stop()
        self._divide(
            module,
            precision,
            [module]
            if getattr(module, "automatic_optimization", True)
            else outer_modules(module),
        )

    def prepare_module(
        self, module: nn.Module, manual: bool, precision: Precision
    ) -> None:
        """Shard the module; every rank gets its shards of rank 0's weights.

        In manual optimization the submodules are sharded separately: an optimizer may step between two of their
        forwards.
        """
        self.stop()
        self._every_backward = manual
        self._divide(module, precision, outer_modules(module) if manual else [module])

    def wrap_module(self, module: nn.Module, precision: Precision) -> nn.Module:
        """Shard the module; it is called as before."""
        self._divide(module, precision, [module])
        if (
            self._reshards is None
        ):  # the optimizer of a raw loop may step at any time, so reshard after each forward
            root: Any = module
            root.set_reshard_after_forward(True, recurse=False)
        return module

    def _divide(
        self, module: nn.Module, precision: Precision, roots: Sequence[nn.Module]
    ) -> None:
        weights, before = (
            self.weights or InitialWeights(module, self.world),
            parameters_of(module),
        )
        if self._recomputes is not False:
            blocks = self._policy if self._recomputes is True else self._recomputes
            ActivationCheckpointing(blocks, self._offloads).apply(module)
        self.shard(module, precision, roots)
        weights.hand_out(module, self.device, self.parameters_on)
        self._root = self._around_steps = module if list(roots) == [module] else None
        # A raw loop may have several modules, and its optimizers step any of them.
        self._units += [unit for root in roots for unit in sharded_units(root)]
        self._parameters += module.parameters()
        self._moved.note(before, module)
        whole = (
            parameter
            for parameter in module.parameters()
            if not hasattr(parameter, "placements")
        )
        self._hooks += average_in_backward(whole, self.world)

    def adopt(self, module: nn.Module, every_backward: bool = False) -> None:
        """Train a module that its own code has sharded; its units and their options stay as they are.

        Args:
            module: has units; parameters outside of them are not exchanged.
            every_backward: each backward reduces gradients.
        """
        found = sharded_units(module)
        inner = {part for unit in found for part in unit.modules() if part is not unit}  # type: ignore[attr-defined]
        roots = [unit for unit in found if unit not in inner]
        self._root = (
            roots[0]
            if len(roots) == 1 and not self._units and not every_backward
            else None
        )
        self._around_steps = module if isinstance(module, FSDPModule) else None
        self._units += found
        self._parameters += module.parameters()
        self._every_backward = every_backward

    def shard(
        self,
        module: nn.Module,
        precision: Precision,
        roots: Sequence[nn.Module],
        whole: Iterable[nn.Module] = (),
        reshards: bool | int | None = None,
    ) -> None:
        """Apply torch's ``fully_shard`` in place to the units of a module, then to its roots; skip sharded ones.

        Args:
            module: the full module.
            precision: gives the dtype in which gradients are reduced.
            roots: the modules that gather the parameters outside of all units.
            whole: modules that are not sharded, if ``ignored_modules`` was not given.
            reshards: ``reshard_after_forward``; overrides the strategy's.

        Raises:
            StrategyError: a policy or an expression matches no module.
        """
        # Parameters come as they are stored: autocast casts what may be cast, as in one process. Gathered in 16 bits,
        # norms would compute in them too, and on a CPU refuse to.
        policy = self._mixed or MixedPrecisionPolicy(
            reduce_dtype=precision.reduce_dtype
        )
        offload = (
            CPUOffloadPolicy(pin_memory=self.mesh.device_type != "cpu")
            if self.cpu_offload
            else OffloadPolicy()
        )
        separate = _separate_units(module, precision, policy)
        ignored = self._left_whole(module, whole)
        if isinstance(self._ignored, str) and not ignored:
            raise StrategyError(
                "ignored_modules names no module that has parameters",
                found=repr(self._ignored),
                fix=f"pass a regular expression of whole names, such as {_some_name(module)!r}",
            )
        for part in [*self._units_of(module, separate), *roots]:
            if not isinstance(part, FSDPModule):
                fully_shard(
                    part,
                    mesh=self.mesh,
                    reshard_after_forward=self._reshards
                    if reshards is None
                    else reshards,
                    mp_policy=replace(policy, param_dtype=None)
                    if part in separate
                    else policy,
                    offload_policy=offload,
                    ignored_params=ignored,
                )

    def _left_whole(
        self, module: nn.Module, whole: Iterable[nn.Module] = ()
    ) -> set[nn.Parameter]:
        """Return the parameters that are not sharded; their gradients are averaged."""
        matching = self._ignored or whole
        if isinstance(matching, str):
            matching = [
                part
                for name, part in module.named_modules()
                if name and re.fullmatch(matching, name)
            ]
        return {parameter for part in matching for parameter in part.parameters()}

    def _units_of(
        self, module: nn.Module, separate: Sequence[nn.Module] = ()
    ) -> list[nn.Module]:
        """Return the modules that are gathered separately, inner ones first, without the roots.

        A module that shares a parameter with a module outside of it does not become a unit: both are gathered with the
        rest.
        """
        owners = Counter(
            id(p) for part in module.modules() for p in part.parameters(recurse=False)
        )
        shared = {number for number, count in owners.items() if count > 1}
        found, picked = [], {*units(module, self._policy).values(), *separate}
        for part in reversed(list(module.modules())):
            if part not in picked or part is module:
                continue
            inside = Counter(
                id(p)
                for inner in part.modules()
                for p in inner.parameters(recurse=False)
            )
            if all(
                inside[number] == owners[number] for number in shared & inside.keys()
            ):
                found.append(part)
        return found

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Replace the parameters that the optimizer had before sharding by their shards."""
        self._moved.follow(optimizer)

    def bind(self, method: Callable[..., Any], several: bool) -> Callable[..., Any]:
        """Call the method between the root's hooks, which gather the parameters outside of all units."""
        self._every_backward = self._every_backward or several
        return (
            method
            if self._around_steps is None
            else _through(self._around_steps, method)
        )

    def bind_evaluation(
        self, method: Callable[..., Any], whole: bool = False
    ) -> Callable[..., Any]:
        """Like `bind`; weights are sharded again after each call, as hooks and checkpoints expect."""
        call = (
            method
            if self._around_steps is None
            else _through(self._around_steps, method)
        )
        return resharding(call, self._units)

    def bind_backward(
        self, backward: Callable[..., None] | None
    ) -> Callable[..., None] | None:
        """The module's backward, or autograd's; with ``inputs`` it keeps all other gradients."""
        return (
            ExchangingBackward(self._parameters, backward)
            if self._every_backward
            else backward
        )

    def bind_step(self, optimizer: Optimizer) -> Callable[..., Any]:
        """The optimizer's own step, called once per kind of parameter, after all units are sharded again."""
        units = self._units

        def step(*arguments: Any, **options: Any) -> Any:
            for unit in units:
                unit.reshard()
            return optimizer.step(*arguments, **options)

        step_all = step_by_kind(optimizer, step)
        if self.world.size == 1:
            return step_all
        return refuse_unprepared(
            optimizer, step_all, lambda: self._parameters, self.engine
        )

    def forward_backward(self, micro: MicroSteps) -> None:
        """Run one micro-batch after the other; the last backward reduces gradients."""
        last, root = micro.count - 1, self._root
        waits = last > 0 and root is not None and not self._every_backward
        try:
            for index in range(micro.count):
                micro.begin(index)
                if waits and index in (0, last):
                    root.set_requires_gradient_sync(index == last)
                loss = micro.forward(index)
                if loss is not None:
                    micro.backward(index, loss)
                elif root is not None:
                    raise StrategyError(
                        "training_step returned None, but the backward of each rank needs all ranks",
                        found=f"rank {self.world.rank}",
                        fix="return the loss multiplied by 0 to skip a batch, or use DDPStrategy",
                    )
                micro.end(index)
        except BaseException:
            for unit in self._units:
                abandon(unit)
            raise

    def clip_gradients(
        self,
        parameters: Sequence[nn.Parameter],
        value: float,
        algorithm: str,
        norm_type: float = 2.0,
    ) -> Tensor | None:
        """Clip by norm or by value, over the shards of all ranks."""
        return clip_sharded_gradients(parameters, value, algorithm, norm_type)

    def shared_buffers(self, module: nn.Module) -> AbstractContextManager[None]:
        """A context with rank 0's running statistics on all ranks, as checkpoints hold them."""
        return borrowed_buffers(module, self.world)

    def costs(self, module: nn.Module, precision: Precision, ranks: int) -> Costs:
        """A shard of everything; parameters are gathered in forward and again in backward, gradients are reduced."""
        shape = self.mesh or self._shape(ranks)
        rank = (
            shape.get_local_rank(shape.ndim - 1) if isinstance(shape, DeviceMesh) else 0
        )
        *replicas, shards = shape.shape if isinstance(shape, DeviceMesh) else shape
        copies = math.prod(replicas)
        automatic = getattr(module, "automatic_optimization", True)
        roots = [module] if automatic else outer_modules(module)
        divided = {p for root in roots for p in root.parameters()} - self._left_whole(
            module
        )
        often = ", in each backward" if self._every_backward or not automatic else ""
        sent = []
        if shards > 1:
            again = self._reshards is not False and (
                self._reshards or self._units_of(module)
            )
            each = "forward, and again for backward" if again else "forward"
            sent = [
                f"parameters: all-gather over {shards} ranks for each {each}",
                f"gradients: reduce-scatter over {shards} ranks{often}",
            ]
        if copies > 1:
            sent.append(f"their parts: all-reduce over {copies} copies{often}")
        if shards * copies > 1 and any(
            p.requires_grad for p in module.parameters() if p not in divided
        ):
            sent.append(
                f"gradients of what stays whole: all-reduce over {shards * copies} ranks"
            )
        among = f"{shards} ranks, each with its part of parameters, gradients and optimizer state"
        layout = f"{copies} copies, each over {among}" if copies > 1 else among
        during = _autocast_copies(divided, precision, self._mixed)
        return held(
            module,
            layout,
            sent,
            lambda p: own_part(p, shards if p in divided else 1, rank),
            during,
        )

    def places(self, processes: int) -> dict[str, int]:
        """The numbers of replicas, where there are any, and of shards."""
        shape = self._shape(processes)
        sizes = tuple(shape.shape) if isinstance(shape, DeviceMesh) else shape
        return dict(
            zip(("dp_replicate", "dp_shard")[-len(sizes) :], sizes, strict=False)
        )

    def describe(self) -> str:
        """One line for ``explain()``."""
        kind = "hybrid FSDP" if self.hybrid else "FSDP"
        if self.mesh is None:
            return f"{kind} on {self.device.type}"
        names = self.mesh.mesh_dim_names or ()
        axes = " × ".join(
            f"{name}={size}" for name, size in zip(names, self.mesh.shape, strict=False)
        )
        kept = ", gathered until backward" if self._reshards is False else ""
        where = ", parts in host memory" if self.cpu_offload else ""
        units = f", {len(self._units)} units" if self._units else ""
        return f"{kind} ({axes}) on {self.device.type}{units}{kept}{where}"


def _through(root: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method wrapped in the root's hooks; the module is not changed."""
    root.__dict__["_step"] = method
    register_fsdp_forward_method(root, "_step")
    bound: Callable[..., Any] = root.__dict__.pop("_step")
    return bound


def _autocast_copies(
    gathered: Iterable[nn.Parameter],
    precision: Precision,
    policy: MixedPrecisionPolicy | None,
) -> str:
    """A text about the copies that autocast makes of gathered weights; units gathered in 16 bits need none."""
    dtype = precision.param_dtype
    if dtype is None or (policy is not None and policy.param_dtype is not None):
        return ""
    wide = [p for p in gathered if p.dtype == torch.float32 and p.ndim > 1]
    size = sum(p.numel() for p in wide) * dtype.itemsize
    word = str(dtype).removeprefix("torch.")
    return (
        f"from forward to backward up to {in_units(size)} of autocast's {word} copies of all weights"
        if size
        else ""
    )


def _separate_units(
    module: nn.Module, precision: Precision, policy: MixedPrecisionPolicy
) -> list[nn.Module]:
    """Return the modules that need separate units: torch casts and reduces a unit in one dtype."""
    trained = {
        parameter.dtype for parameter in module.parameters() if parameter.requires_grad
    }
    if policy.param_dtype is None and len(trained) < 2:
        return []
    return precision.kept_modules(module)


@final
class ExchangingBackward:
    """A backward that synchronises gradients, and can leave those of some parameters unchanged.

    Args:
        parameters: all parameters of the module.
        run: the module's override of backward; None: autograd's.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], run: Callable[..., None] | None
    ) -> None:
        self.parameters, self.run = parameters, run or _autograd

    def __call__(
        self, loss: Tensor, *arguments: Any, inputs: Any = None, **options: Any
    ) -> None:
        """Run it; ``inputs``: the parameters whose gradients it adds to."""
        if inputs is None:
            self.run(loss, *arguments, **options)
            return
        # ``inputs=`` of autograd cannot name the parts: its graph has the gathered parameters.
        reached = {id(parameter) for parameter in inputs}
        others = [(p, p.grad) for p in self.parameters if id(p) not in reached]
        for parameter, _ in others:
            parameter.grad = None
        self.run(loss, *arguments, **options)
        for parameter, gradient in others:
            parameter.grad = gradient


def _autograd(loss: Tensor, **options: Any) -> None:
    loss.backward(**options)  # type: ignore[no-untyped-call]


def _some_name(module: nn.Module) -> str:
    return next(
        (
            name
            for name, part in module.named_modules()
            if name and any(True for _ in part.parameters())
        ),
        "net",
    )


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
