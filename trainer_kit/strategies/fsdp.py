"""Fully sharded data parallelism: every rank keeps a shard of parameters, gradients and optimizer state."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from torch.utils.hooks import RemovableHandle

from trainer_kit.core.arguments import check_timeout, read_again
from trainer_kit.core.costs import Costs, local_shard, shard_costs
from trainer_kit.core.display import in_units, plural
from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import StrategyError
from trainer_kit.core.protocols import MicroSteps
from trainer_kit.core.types import Function
from trainer_kit.precision.precision import Precision
from trainer_kit.strategies.gradients import clip_sharded_gradients
from trainer_kit.strategies.optimizer_step import direct_step
from trainer_kit.strategies.process_group import (
    ProcessGroup,
    average_in_backward,
    borrowed_buffers,
    inherit_timeout,
    join_world,
    once_per_world,
)
from trainer_kit.strategies.rank_sync import InitialWeights, build_on_rank_zero
from trainer_kit.strategies.signatures import StepMethod
from trainer_kit.strategies.state import (
    ReplacedParameters,
    refer_to_parameters,
    refuse_unprepared,
    step_by_kind,
)
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.strategies.torch_private import (
    drop_accumulated_gradients,
    is_fsdp_root,
)
from trainer_kit.strategies.transforms.blocks import (
    ActivationCheckpointing,
    Policy,
    outer_modules,
    units,
)

__all__ = [
    "ExchangingBackward",
    "FSDPStrategy",
    "reset_unit",
    "reshard_after",
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

    Example:
        >>> from trainer_kit import Trainer
        >>> blocks = [torch.nn.TransformerEncoderLayer]
        >>> strategy = FSDPStrategy(sharding_strategy="SHARD_GRAD_OP", auto_wrap_policy=blocks)
        >>> trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
        >>> trainer.strategy.name, trainer.num_devices
        ('fsdp', 2)
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
        kind = sharding_strategy.upper()
        if kind not in _RESHARDS:
            raise StrategyError(
                "unknown sharding strategy",
                found=repr(sharding_strategy),
                fix=f"use {', '.join(_RESHARDS)}, or DDPStrategy, which shards nothing",
            )
        if offload_activations and activation_checkpointing_policy is False:
            raise StrategyError(
                "activation offload needs activation checkpointing",
                found="offload_activations",
                fix="activation_checkpointing_policy=True, or the modules",
            )
        check_timeout(timeout, "FSDPStrategy")
        # Each is read several times: for the description of this strategy, and for each root.
        auto_wrap_policy = read_again(auto_wrap_policy)
        activation_checkpointing_policy = read_again(activation_checkpointing_policy)
        ignored_modules = read_again(ignored_modules)
        self.options: dict[str, Any] = {
            "sharding_strategy": kind,
            "reshard_after_forward": reshard_after_forward,
            "auto_wrap_policy": auto_wrap_policy,
            "activation_checkpointing_policy": activation_checkpointing_policy,
            "offload_activations": offload_activations,
            "cpu_offload": cpu_offload,
            "mixed_precision": mixed_precision,
            "ignored_modules": ignored_modules,
        }
        """The arguments that this strategy was made with."""
        self.device = torch.device(device)
        self.hybrid = kind.startswith("HYBRID")
        self._mesh_shape = device_mesh
        self._reshards = reshard_after_forward
        if reshard_after_forward is None:
            self._reshards = _RESHARDS[kind]
        self._wrap_policy = auto_wrap_policy
        self._checkpointing_policy = activation_checkpointing_policy
        self._offloads_activations = offload_activations
        self.cpu_offload = cpu_offload
        self._mixed_precision = mixed_precision
        self._ignored_modules = ignored_modules
        self.needs_processes = (
            not cpu_offload and activation_checkpointing_policy is False
        )
        self.backend = process_group_backend
        self.timeout = timeout
        # The module that gathers the parameters outside of all units; None if several modules do.
        self._root: Any = None
        # The root if a step must run between its hooks, because it calls a method of the module, not the module.
        self._hooked_root: nn.Module | None = None
        self._units: list[FSDPModule] = []
        self._parameters: list[nn.Parameter] = []
        self._hooks: list[RemovableHandle] = []
        self._replaced_parameters = ReplacedParameters()
        self.weights: InitialWeights | None = None
        """The initial weights if `MeshStrategy` has sharded the module along other axes first."""
        # Whether each backward reduces gradients: there are several for one optimizer step, or the user runs them.
        self._every_backward = False

    @property
    def parameters_on(self) -> torch.device:
        """Where shards are kept."""
        if self.cpu_offload:
            return torch.device("cpu")
        return self.device

    @property
    def gradient_divisor(self) -> int:
        """FSDP averages over shards and replicas."""
        return self.data.size

    def start(self) -> None:
        """Join the process group, or create one; then the mesh."""
        self.world: ProcessGroup = join_world(
            self.device, self.backend, self.timeout, alone=True
        )
        self.data = self.losses = self.reports = self.world
        self.reporter = self.world.rank
        shape = self._shape(self.world.size)
        sizes = _sizes_of(shape)
        if len(sizes) > 2:
            raise StrategyError(
                "parameters are sharded over one axis, or two for replicas",
                found=f"{shape}",
            )
        if math.prod(sizes) != self.world.size:
            raise StrategyError(
                "the size of the mesh differs from the number of processes",
                found=f"device_mesh={shape} and {plural(self.world.size, 'process')}",
            )
        self.mesh = shape if isinstance(shape, DeviceMesh) else self._create_mesh(sizes)

    def _create_mesh(self, sizes: tuple[int, ...]) -> DeviceMesh:
        names = ("replicate", "shard")[-len(sizes) :]
        device_type = self.device.type
        return once_per_world(
            ("fsdp", device_type, sizes),
            lambda: inherit_timeout(
                init_device_mesh(device_type, sizes, mesh_dim_names=names)
            ),
        )

    def use_group(self, group: ProcessGroup, mesh: DeviceMesh) -> None:
        """Shard over the ranks of another strategy's mesh, in place of `start`.

        Args:
            group: the ranks that shard, and that get different batches.
            mesh: their axes: one to shard over, or two (replicas, shards).
        """
        self.world = group
        self.data = group
        self.losses = group
        self.mesh = mesh

    def use_initial_weights(self, weights: InitialWeights) -> None:
        """Take the weights that were read before another strategy sharded the module.

        Args:
            weights: the initial values on rank 0, from which every rank gets its part.
        """
        self.weights = weights

    def _shape(self, ranks: int) -> tuple[int, ...] | DeviceMesh:
        """The shape of the mesh, or the user's mesh; two axes are (replicas, shards)."""
        if self._mesh_shape is not None:
            return self._mesh_shape or (ranks,)  # an empty shape says nothing
        if not self.hybrid:
            return (ranks,)
        environment = Environment.detect()
        ranks_per_node = ranks
        if environment.launched:
            ranks_per_node = environment.local_world_size
        return (ranks // ranks_per_node, ranks_per_node)

    def stop(self) -> None:
        """Release the module; it stays sharded, and keeps its activations again."""
        # The module outlives the run: what stays on it would act in the next one, too.
        for hook in self._hooks:
            hook.remove()
        for unit in self._units:
            ActivationCheckpointing().undo(unit)  # type: ignore[arg-type]  # torch mixes it into the module's class
        self._root = None
        self._hooked_root = None
        self._units = []
        self._hooks = []
        self._parameters = []

    def init_context(self) -> AbstractContextManager[object]:
        """Build layers on rank 0, in host memory; the other ranks get their shards from it."""
        return build_on_rank_zero(self.world)

    def place_module(self, module: nn.Module, precision: Precision) -> None:
        """Shard the module, for evaluation too: a rank may have no memory for full weights."""
        self.stop()
        self._shard_module(module, precision, _find_roots(module))

    def prepare_module(
        self, module: nn.Module, manual: bool, precision: Precision
    ) -> None:
        """Shard the module; every rank gets its shards of rank 0's weights.

        In manual optimization the submodules are sharded separately: an optimizer may step between two of their
        forwards.
        """
        self.stop()
        self._every_backward = manual
        roots = outer_modules(module) if manual else [module]
        self._shard_module(module, precision, roots)

    def wrap_module(self, module: nn.Module, precision: Precision) -> nn.Module:
        """Shard the module; it is called as before."""
        self._shard_module(module, precision, [module])
        if self._reshards is None:
            # The optimizer of a custom training loop may step at any time, so reshard after each forward.
            # torch keeps the root gathered after its forward by default, for the backward that usually follows.
            root: Any = module
            root.set_reshard_after_forward(True, recurse=False)
        return module

    def _shard_module(
        self, module: nn.Module, precision: Precision, roots: Sequence[nn.Module]
    ) -> None:
        """Shard a module, fill it with rank 0's weights, and average the gradients that are not sharded."""
        # Read before sharding, and distributed after it: no rank but the first ever holds full weights.
        weights = self.weights or InitialWeights(module, self.world)
        # Sharding replaces parameters, which an optimizer may hold already.
        before = refer_to_parameters(module)
        if self._checkpointing_policy is not False:
            blocks = self._checkpointing_policy
            if blocks is True:
                blocks = self._wrap_policy
            ActivationCheckpointing(blocks, self._offloads_activations).apply(module)
        self.shard(module, precision, roots)
        weights.distribute(module, self.device, self.parameters_on)
        # A step calls a method of the module: FSDP's hooks are around its forward.
        self._root = module if list(roots) == [module] else None
        self._hooked_root = self._root
        # A custom training loop may have several modules, and its optimizers step any of them.
        for root in roots:
            self._units += sharded_units(root)
        self._parameters += module.parameters()
        self._replaced_parameters.record(before, module)
        unsharded = [p for p in module.parameters() if not hasattr(p, "placements")]
        self._hooks += average_in_backward(unsharded, self.world)

    def adopt(self, module: nn.Module, every_backward: bool = False) -> None:
        """Train a module that its own code has sharded; its units and their options stay as they are.

        Args:
            module: has units; parameters outside of them are not exchanged.
            every_backward: each backward reduces gradients.
        """
        module_units = sharded_units(module)
        nested: set[int] = set()
        for unit in module_units:
            modules = unit.modules()  # type: ignore[attr-defined]  # torch mixes it into the module's class
            nested.update(id(inner) for inner in modules if inner is not unit)
        roots = [unit for unit in module_units if id(unit) not in nested]
        # In a window of several micro-batches one root can defer the reduction for all of its units.
        has_one_root = len(roots) == 1 and not self._units and not every_backward
        self._root = roots[0] if has_one_root else None
        self._hooked_root = module if isinstance(module, FSDPModule) else None
        self._units += module_units
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
        policy = self._mixed_precision or MixedPrecisionPolicy(
            reduce_dtype=precision.reduce_dtype
        )
        offload = OffloadPolicy()
        if self.cpu_offload:
            offload = CPUOffloadPolicy(pin_memory=self.mesh.device_type != "cpu")
        if reshards is None:
            reshards = self._reshards
        separate = _separate_units(module, precision, policy)
        ignored = self._unsharded_parameters(module, whole)
        if isinstance(self._ignored_modules, str) and not ignored:
            raise StrategyError(
                "ignored_modules names no module that has parameters",
                found=repr(self._ignored_modules),
                fix=f"pass a regular expression of whole names, such as {_example_name(module)!r}",
            )
        # Inner units first: a root takes the parameters that are left outside of all units.
        for unit in [*self._find_units(module, separate), *roots]:
            # An earlier fit, or the user's code, has sharded it.
            if isinstance(unit, FSDPModule):
                continue
            unit_policy = policy
            if unit in separate:  # it computes in the dtype in which it is stored
                unit_policy = replace(policy, param_dtype=None)
            fully_shard(
                unit,
                mesh=self.mesh,
                reshard_after_forward=reshards,
                mp_policy=unit_policy,
                offload_policy=offload,
                ignored_params=ignored,
            )

    def _unsharded_parameters(
        self, module: nn.Module, whole: Iterable[nn.Module] = ()
    ) -> set[nn.Parameter]:
        """Return the parameters that are not sharded; their gradients are averaged."""
        ignored = self._ignored_modules or whole
        if isinstance(ignored, str):
            ignored = [
                submodule
                for name, submodule in module.named_modules()
                if name and re.fullmatch(ignored, name)
            ]
        parameters: set[nn.Parameter] = set()
        for submodule in ignored:
            parameters.update(submodule.parameters())
        return parameters

    def _find_units(
        self, module: nn.Module, separate: Sequence[nn.Module] = ()
    ) -> list[nn.Module]:
        """Return the modules that are gathered separately, inner ones first, without the roots.

        A module that shares a parameter with a module outside of it does not become a unit: the root gathers both.
        """
        # A shared parameter is used more often in the module than inside of one candidate.
        uses = _count_uses(module)
        candidates = {*units(module, self._wrap_policy).values(), *separate}
        unit_modules = []
        for submodule in reversed(list(module.modules())):
            if submodule not in candidates or submodule is module:
                continue
            uses_inside = _count_uses(submodule)
            if all(
                count == uses[parameter] for parameter, count in uses_inside.items()
            ):
                unit_modules.append(submodule)
        return unit_modules

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Replace the parameters that the optimizer had before sharding by their shards."""
        self._replaced_parameters.replace_in(optimizer)

    def bind(self, method: StepMethod, several: bool) -> StepMethod:
        """Call the method between the root's hooks, which gather the parameters outside of all units."""
        self._every_backward = self._every_backward or several
        return self._between_hooks(method)

    def bind_evaluation(self, method: StepMethod, whole: bool = False) -> StepMethod:
        """Like `bind`; weights are sharded again after each call, as hooks and checkpoints expect."""
        return reshard_after(self._between_hooks(method), self._units)

    def _between_hooks(self, method: StepMethod) -> StepMethod:
        """Return the method between the root's hooks; the method itself if no root needs them."""
        if self._hooked_root is None:
            return method
        return _with_hooks_of(self._hooked_root, method)

    def bind_backward(
        self, backward: Callable[..., None] | None
    ) -> Callable[..., None] | None:
        """The module's backward, or autograd's; with ``inputs`` it keeps all other gradients."""
        if not self._every_backward:
            return backward
        return ExchangingBackward(self._parameters, backward)

    def bind_step(self, optimizer: Optimizer) -> StepMethod:
        """The optimizer's own step, called once per kind of parameter, after all units are sharded again."""
        units = self._units
        direct = direct_step(optimizer)

        def step(*arguments: Any, **options: Any) -> object:
            # The optimizer has the shards; units that stay gathered until backward may still have full weights.
            for unit in units:
                unit.reshard()
            return direct(*arguments, **options)

        step_all = step_by_kind(optimizer, step)
        # One rank has nothing to exchange, so no parameter can be left out.
        if self.world.size == 1:
            return step_all
        return refuse_unprepared(
            optimizer, step_all, lambda: self._parameters, self.engine
        )

    def forward_backward(self, micro: MicroSteps) -> None:
        """Run one micro-batch after the other; the last backward reduces gradients."""
        last = micro.count - 1
        root = self._root
        defers_reduction = last > 0 and root is not None and not self._every_backward
        try:
            for index in range(micro.count):
                micro.begin(index)
                # Set at the ends only: a call for each micro-batch would walk all units.
                if defers_reduction and index in (0, last):
                    root.set_requires_gradient_sync(index == last)
                loss = micro.forward(index)
                if loss is not None:
                    micro.backward(index, loss)
                elif root is not None:  # the other ranks wait in their backward
                    raise StrategyError(
                        "training_step returned None, but the backward of each rank needs all ranks",
                        found=f"rank {self.world.rank}",
                        fix="return the loss multiplied by 0 to skip a batch, or use DDPStrategy",
                    )
                micro.end(index)
        except BaseException:
            # Also for a KeyboardInterrupt: the module may be trained again in this process.
            for unit in self._units:
                reset_unit(unit)
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
        mesh = self.mesh or self._shape(ranks)
        *replicas, shards = _sizes_of(mesh)
        copies = math.prod(replicas)
        shard_rank = 0
        if isinstance(mesh, DeviceMesh):
            shard_rank = mesh.get_local_rank(mesh.ndim - 1)
        # Parameters outside of all roots stay whole, as do those that the user has excluded.
        sharded: set[nn.Parameter] = set()
        for root in _find_roots(module):
            sharded.update(root.parameters())
        sharded -= self._unsharded_parameters(module)
        layout = f"{plural(shards, 'rank')}, each with a shard of parameters, gradients and optimizer state"
        if copies > 1:
            layout = f"{copies} copies, each over {layout}"

        def part(parameter: nn.Parameter) -> Tensor:
            return local_shard(
                parameter, shards if parameter in sharded else 1, shard_rank
            )

        exchanges = self._describe_exchanges(module, shards, copies, sharded)
        during = _autocast_copies(sharded, precision, self._mixed_precision)
        return shard_costs(module, layout, exchanges, part, during)

    def _describe_exchanges(
        self,
        module: nn.Module,
        shards: int,
        copies: int,
        sharded: Collection[nn.Parameter],
    ) -> list[str]:
        when = ""
        if self._every_backward or not getattr(module, "automatic_optimization", True):
            when = ", in each backward"
        lines = []
        if shards > 1:
            regathers = self._reshards is not False and (
                self._reshards or self._find_units(module)
            )
            passes = "forward, and again for backward" if regathers else "forward"
            lines.append(
                f"parameters: all-gather over {plural(shards, 'rank')} for each {passes}"
            )
            lines.append(
                f"gradients: reduce-scatter over {plural(shards, 'rank')}{when}"
            )
        if copies > 1:
            lines.append(f"their shards: all-reduce over {copies} replicas{when}")
        unsharded = [p for p in module.parameters() if p not in sharded]
        ranks = shards * copies
        if ranks > 1 and any(p.requires_grad for p in unsharded):
            lines.append(
                f"gradients of unsharded parameters: all-reduce over {plural(ranks, 'rank')}"
            )
        return lines

    def places(self, processes: int) -> dict[str, int]:
        """The number of shards, and of replicas if there are any."""
        sizes = _sizes_of(self._shape(processes))
        return dict(
            zip(("dp_replicate", "dp_shard")[-len(sizes) :], sizes, strict=False)
        )

    def describe(self) -> str:
        """One line for ``explain()``."""
        kind = "hybrid FSDP" if self.hybrid else "FSDP"
        if self.mesh is None:
            return f"{kind} on {self.device.type}"
        sizes = zip(self.mesh.mesh_dim_names or (), self.mesh.shape, strict=False)
        axes = " × ".join(f"{name}={size}" for name, size in sizes)
        facts = [f"{kind} ({axes}) on {self.device.type}"]
        if self._units:
            facts.append(f"{len(self._units)} units")
        if self._reshards is False:
            facts.append("gathered until backward")
        if self.cpu_offload:
            facts.append("shards in host memory")
        return ", ".join(facts)


def _sizes_of(mesh: tuple[int, ...] | DeviceMesh) -> tuple[int, ...]:
    return tuple(mesh.shape if isinstance(mesh, DeviceMesh) else mesh)


def _find_roots(module: nn.Module) -> list[nn.Module]:
    """The modules that gather the parameters outside of all units; several in manual optimization."""
    if getattr(module, "automatic_optimization", True):
        return [module]
    return outer_modules(module)


def _count_uses(module: nn.Module) -> Counter[nn.Parameter]:
    """How many layers of a module have each parameter."""
    # Of direct parameters only: a parent would count those of its children again.
    uses: Counter[nn.Parameter] = Counter()
    for layer in module.modules():
        uses.update(layer.parameters(recurse=False))
    return uses


def _with_hooks_of(root: nn.Module, method: StepMethod) -> StepMethod:
    """Return the method wrapped in the root's hooks; the module is not changed."""
    # torch wraps a method by its name in the module; the name is removed again.
    root.__dict__["_step"] = method
    register_fsdp_forward_method(root, "_step")
    bound: Function = root.__dict__.pop("_step")
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
    cast = [p for p in gathered if p.dtype == torch.float32 and p.ndim > 1]
    size = sum(p.numel() for p in cast) * dtype.itemsize
    if size == 0:
        return ""
    dtype_name = str(dtype).removeprefix("torch.")
    return f"from forward to backward up to {in_units(size)} of autocast's {dtype_name} copies of all weights"


def _separate_units(
    module: nn.Module, precision: Precision, policy: MixedPrecisionPolicy
) -> list[nn.Module]:
    """Return the modules that need separate units: torch casts and reduces a unit in one dtype."""
    # One dtype in a unit needs no separate unit, unless torch is to cast all of them.
    trained = {
        parameter.dtype for parameter in module.parameters() if parameter.requires_grad
    }
    if policy.param_dtype is None and len(trained) < 2:
        return []
    return precision.separately_gathered_modules(module)


@final
class ExchangingBackward:
    """A backward that synchronizes gradients, and can leave those of some parameters unchanged.

    Args:
        parameters: all parameters of the module.
        run: the module's override of backward; None: autograd's.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], run: Callable[..., None] | None
    ) -> None:
        self.parameters = parameters
        self.run = run or _autograd

    def __call__(
        self,
        loss: Tensor,
        *arguments: object,
        inputs: Iterable[nn.Parameter] | None = None,
        **options: object,
    ) -> None:
        """Run it; ``inputs``: the parameters whose gradients it adds to."""
        if inputs is None:
            self.run(loss, *arguments, **options)
            return
        # ``inputs=`` of autograd cannot name the shards: its graph has the gathered parameters. So all gradients are
        # computed, and those of other parameters are put back as they were.
        selected = {id(parameter) for parameter in inputs}
        unselected = [p for p in self.parameters if id(p) not in selected]
        gradients = [p.grad for p in unselected]
        for parameter in unselected:
            parameter.grad = None
        self.run(loss, *arguments, **options)
        for parameter, gradient in zip(unselected, gradients, strict=True):
            parameter.grad = gradient


def _autograd(loss: Tensor, **options: object) -> None:
    loss.backward(**options)  # type: ignore[no-untyped-call]


def _example_name(module: nn.Module) -> str:
    """The name of a submodule that has parameters, for an error."""
    for name, submodule in module.named_modules():
        if name and any(True for _ in submodule.parameters()):
            return str(name)
    return "net"


def sharded_units(module: nn.Module) -> list[FSDPModule]:
    """Return all units of a module, the module first where it is a unit."""
    return [unit for unit in module.modules() if isinstance(unit, FSDPModule)]


def reset_unit(unit: FSDPModule) -> None:
    """Drop the gradients of a window that an error has ended before its last backward."""
    # The window may have ended where the reduction was deferred.
    unit.set_requires_gradient_sync(True, recurse=False)
    if is_fsdp_root(unit) and hasattr(unit, "reset_iter_state"):
        unit.reset_iter_state()
    drop_accumulated_gradients(unit)


def reshard_after(call: StepMethod, units: Sequence[FSDPModule]) -> StepMethod:
    """``call``, after which the weights of ``units`` are sharded again: hooks and checkpoints expect them so."""

    def resharded(*arguments: object) -> object:
        output = call(*arguments)
        for unit in units:
            unit.reshard()
        return output

    return resharded
