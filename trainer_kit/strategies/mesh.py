"""Several kinds of parallelism combined, on a mesh of processes with an axis for each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar, Final, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainer_kit.core.arguments import check_timeout, read_again
from trainer_kit.core.costs import Costs
from trainer_kit.core.errors import StrategyError
from trainer_kit.core.parallel import ParallelPlan, PipelinePlan
from trainer_kit.core.protocols import MicroSteps
from trainer_kit.core.types import SavedState
from trainer_kit.precision.precision import EXCHANGING, Precision
from trainer_kit.strategies.fsdp import FSDPStrategy
from trainer_kit.strategies.gradients import clip_sharded_gradients, local_gradients
from trainer_kit.strategies.mesh_layout import (
    AXES,
    MeshGroups,
    check_options,
    check_sizes,
    describe_equal_batches,
    describe_shard,
    format_axes,
    resolve_sizes,
)
from trainer_kit.strategies.mesh_stages import StagedStrategy
from trainer_kit.strategies.process_group import (
    ProcessGroup,
    borrowed_buffers,
    join_world,
    once_per_world,
)
from trainer_kit.strategies.rank_sync import (
    InitialWeights,
    agree_on_rng,
    build_on_rank_zero,
    with_equal_rng,
)
from trainer_kit.strategies.signatures import StepMethod
from trainer_kit.strategies.single import SingleDeviceStrategy
from trainer_kit.strategies.state import (
    ReplacedParameters,
    refer_to_parameters,
    refuse_unprepared,
    step_by_kind,
)
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.strategies.transforms.blocks import ActivationCheckpointing, Policy
from trainer_kit.strategies.transforms.context import ContextParallel
from trainer_kit.strategies.transforms.pipeline import (
    Pipeline,
    PipelineParallel,
    check_schedule,
)
from trainer_kit.strategies.transforms.pipeline_stages import has_stages
from trainer_kit.strategies.transforms.tensor import (
    TensorParallel,
    find_replicated,
    sum_partial_gradients,
)
from trainer_kit.strategies.transforms.transform import Transform

__all__ = ["MeshStrategy"]


@final
class MeshStrategy(Strategy):
    """Combined data, tensor, context and pipeline parallelism on one ``DeviceMesh``.

    Each global batch is split over ``dp_replicate × dp_shard``; ranks that differ only on other axes get the same
    batch. `transforms_of` returns the transforms of the module in order; FSDP2 over the data and context axes comes
    last. The module keeps its names, so its checkpoints load under any strategy.

    Args:
        device: the device of this rank; set by the Trainer.
        dp_replicate: the number of replicas of the other axes; their gradients are averaged.
        dp_shard: the number of ranks over which parameters, gradients and optimizer state are sharded.
        cp: the number of ranks over which each sequence is split.
        tp: the number of ranks over which each layer is split.
        pp: the number of ranks over which the model's blocks are split, as pipeline stages.
        pp_schedule: ``"GPipe"``, ``"1F1B"``, ``"Interleaved1F1B"``, ``"LoopedBFS"``, ``"InterleavedZeroBubble"`` or
            ``"ZBVZeroBubble"``; all but the first two give each rank several stages.
        plan: how the module may be split, in place of its ``configure_parallel``.
        activation_checkpointing_policy: the modules that recompute activations in backward; True: repeated blocks.
        fsdp: further options of `FSDPStrategy` for the data axes, and its ``offload_activations``.
        process_group_backend: ``"gloo"``, ``"nccl"``, …; by default torch's choice for the device.
        timeout: the timeout of a collective.

    One of the sizes may be -1: it is computed from the number of processes.

    Example:
        >>> MeshStrategy(dp_shard=2, tp=2).describe()
        'mesh dp_shard=2 × tp=2 on cpu'
    """

    name = "mesh"
    engine = "mesh"
    needs_processes = True
    values_on_rank_zero = True
    refused_precisions: ClassVar[Mapping[str, str]] = dict.fromkeys(
        EXCHANGING, "layers that were exchanged cannot be split by a mesh"
    )
    mesh: DeviceMesh
    data: ProcessGroup
    losses: ProcessGroup
    reports: ProcessGroup
    completes_gradients = True
    own_buffers = True
    """Steps do not synchronize buffers."""

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        dp_replicate: int = 1,
        dp_shard: int = -1,
        cp: int = 1,
        tp: int = 1,
        pp: int = 1,
        pp_schedule: str = "1F1B",
        plan: ParallelPlan | None = None,
        activation_checkpointing_policy: Policy = False,
        fsdp: Mapping[str, Any] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        self.device = torch.device(device)
        self.sizes = {
            "pp": pp,
            "dp_replicate": dp_replicate,
            "dp_shard": dp_shard,
            "cp": cp,
            "tp": tp,
        }
        check_sizes(self.sizes)
        check_schedule(pp_schedule)
        self.schedule = pp_schedule
        self.pipeline: Pipeline | None = None
        self.plan = plan
        activation_checkpointing_policy = read_again(activation_checkpointing_policy)
        self._checkpointing_policy = activation_checkpointing_policy
        # One device recomputes activations for this strategy only.
        self.needs_processes = activation_checkpointing_policy is False
        # Several strategies are made with them.
        fsdp = {name: read_again(value) for name, value in (fsdp or {}).items()}
        self.fsdp_options: dict[str, Any] = {
            **fsdp,
            "activation_checkpointing_policy": activation_checkpointing_policy,
        }
        """The arguments of FSDP, for the axes that it shards over."""
        self._offloads_activations = bool(fsdp.pop("offload_activations", False))
        # Of each `FSDPStrategy` that is made here: this strategy itself offloads and recomputes activations.
        self._sharding_options = fsdp
        if self._offloads_activations and activation_checkpointing_policy is False:
            raise StrategyError(
                "activation offload needs activation checkpointing",
                found="offload_activations",
                fix="activation_checkpointing_policy=True, or the modules",
            )
        # Unknown options are errors here, not in `start`, where all processes would raise them.
        FSDPStrategy(self.device, **self._sharding_options)
        check_timeout(timeout, "MeshStrategy")
        self.backend = process_group_backend
        self.timeout = timeout
        # What runs the data axes: FSDP, one device, or stages around them. It is chosen when the mesh exists.
        self._data_strategy: Strategy = SingleDeviceStrategy(self.device)
        self._shards: FSDPStrategy | None = None
        self._transforms: tuple[Transform, ...] = ()
        self._modules: list[nn.Module] = []
        self._replaced_parameters = ReplacedParameters()
        self._parameters: list[nn.Parameter] = []
        self._summed_parameters: list[nn.Parameter] = []
        self._first_window_done = False
        self._raw_loop = False

    # -- the mesh ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join or create the process group, and create the mesh.

        Raises:
            StrategyError: the sizes of the mesh do not match the number of processes.
        """
        # Each entry point of a Trainer starts the strategy.
        was_started = self.started
        self.world: ProcessGroup = join_world(
            self.device, self.backend, self.timeout, alone=not self.needs_processes
        )
        if was_started:
            return
        sizes = self.places(self.world.size)
        check_options(sizes, self._sharding_options)
        # Groups hold threads and sockets until the process ends, so later fits with these sizes reuse them.
        self.groups: MeshGroups = once_per_world(
            (str(self.device), *sizes.items()), lambda: MeshGroups(self.device, sizes)
        )
        self.mesh = self.groups.mesh
        self.data = self.groups.data
        self.losses = self.groups.losses
        self.reports = self.groups.reports
        self._equal_batch_groups = list(self.groups.same.values())
        self._equal_rng_groups = list(self.groups.same.values())
        self.reporter = self.world.rank
        self.sharded = self.world.size > 1  # a single rank has all parameters
        # A forward gathers parameters that are sharded over the data axes.
        self.lockstep = self.losses.size > 1
        # Weights are sharded over the ranks whose losses are weighted together, the data and context ranks; a single
        # one has nothing to shard. FSDP is not started: this strategy has joined the world, and gives it a part of the
        # mesh.
        if self.losses.size > 1:
            mesh = self.groups.data_mesh
            self._shards = FSDPStrategy(
                self.device, device_mesh=mesh, **self._sharding_options
            )
            self._shards.use_group(self.losses, mesh)
        self._data_strategy = self._shards or SingleDeviceStrategy(self.device)
        if sizes["pp"] > 1:
            self.pipeline = Pipeline(
                self.groups.stage_group, self.world, self.device, self.schedule
            )
            self.reporter = self.pipeline.reporter
            self.why_not_again = "each rank of a pipeline has other parameters"
            self._data_strategy = StagedStrategy(
                self.pipeline, self.groups, self._shards
            )
            # `StagedStrategy.forward_backward` makes generators equal instead, over the stages once an epoch: their
            # layers draw from a seed for each stage, so that dropout differs between stages as between layers.
            self._equal_rng_groups = []

    def places(self, processes: int) -> dict[str, int]:
        """The size of each axis, with -1 resolved; see `trainer_kit.strategies.mesh_layout.resolve_sizes`."""
        return resolve_sizes(self.sizes, processes)

    @property
    def gradient_divisor(self) -> int:
        """FSDP averages over the data and the context ranks."""
        return self.losses.size

    def configure(self, **facts: Any) -> str | None:
        """Configure the data axes and return their message."""
        return self._data_strategy.configure(**facts)

    def stop(self) -> None:
        """Release the module and undo activation checkpointing; the module stays sharded."""
        # The data axes were applied last, around what the transforms changed.
        self._data_strategy.stop()
        for module in self._modules:
            for transform in self._transforms:
                transform.undo(module)
        self._modules = []
        self._parameters = []
        self._summed_parameters = []
        self._raw_loop = False

    # -- the module ----------------------------------------------------------------------------------------------

    def init_context(self) -> AbstractContextManager[object]:
        """Build layers on rank 0, in host memory; the other ranks receive their shards."""
        return build_on_rank_zero(self.world)

    def place_module(self, module: nn.Module, precision: Precision) -> None:
        """Shard the module for evaluation: it may not fit on one rank there either."""
        self._shard_module(
            module,
            precision,
            lambda: self._data_strategy.place_module(module, precision),
        )

    def prepare_module(
        self, module: nn.Module, manual: bool, precision: Precision
    ) -> None:
        """Shard the module for training; every rank gets its shards of rank 0's weights."""
        self._shard_module(
            module,
            precision,
            lambda: self._data_strategy.prepare_module(module, manual, precision),
        )

    def wrap_module(self, module: nn.Module, precision: Precision) -> nn.Module:
        """Shard the module of a custom training loop, which calls it directly and splits sequences itself.

        Raises:
            StrategyError: the plan needs a wrapper around whole steps, which a custom training loop does not have.
        """
        pp = self.mesh["pp"].size()
        loss_parallel = self._find_plan(module).loss_parallel
        if loss_parallel or pp > 1:
            raise StrategyError(
                "pipelines and loss parallelism need a Trainer that runs whole steps",
                found=f"pp={pp}, loss_parallel={loss_parallel}",
                fix="train with a Trainer, or use pp=1 and loss_parallel=False; prepare_pippy runs inference in stages",
            )
        earlier_modules = self._modules
        self._raw_loop = True
        self._shard_module(
            module,
            precision,
            lambda: self._data_strategy.wrap_module(module, precision),
        )
        # A custom training loop may have several.
        self._modules = [*earlier_modules, module]
        return module

    def transforms_of(
        self, module: nn.Module, precision: Precision
    ) -> tuple[Transform, ...]:
        """Return the transforms that this mesh applies to a module, in their order; the data axes follow.

        Stages come first, because each later transform changes only the stages of this rank. Recomputation runs
        around split layers. Data sharding comes last, because it shards the parts that the other axes leave on a rank.

        Args:
            module: the module, before it is sharded.
            precision: the precision of the run.
        """
        # A pipeline needs no plan of its own: blocks are found by their container.
        plan = self._find_plan(module)
        transforms: list[Transform] = []
        if self.pipeline is not None:
            stage_plan = plan.pipeline or PipelinePlan()
            transforms.append(PipelineParallel(self.pipeline, stage_plan, precision))
        if self.mesh["tp"].size() > 1:
            # `bind` copies the outputs of a step. A custom training loop calls the module itself, and FSDP loses
            # hooks on views.
            copies = self._raw_loop and self.losses.size > 1
            transforms.append(TensorParallel(plan, copies=copies))
        if self._needs_context(plan):
            transforms.append(ContextParallel.planned(module, plan))
        if self._checkpointing_policy is not False:
            blocks = self._checkpointing_policy
            if blocks is True:
                blocks = None
            transforms.append(
                ActivationCheckpointing(blocks, self._offloads_activations)
            )
        return tuple(transforms)

    def _needs_context(self, plan: ParallelPlan) -> bool:
        """Whether batches are split along the sequence, or need positions; a custom training loop does both itself."""
        if self._raw_loop:
            return False
        adds_positions = plan.context is not None and plan.context.positions is not None
        return adds_positions or self.mesh["cp"].size() > 1

    def _mesh_for(self, transform: Transform) -> DeviceMesh:
        """The mesh axis of a transform; the full mesh if it has none."""
        if transform.axis:
            return self.mesh[transform.axis]
        return self.mesh

    def _shard_module(
        self,
        module: nn.Module,
        precision: Precision,
        shard_over_data: Callable[[], object],
    ) -> None:
        """Apply the transforms, then the data axes; every rank gets its part of rank 0's weights."""
        before = refer_to_parameters(module)
        # If an earlier fit has made stages, each rank already has its weights, under its own names.
        placed = self.pipeline is not None and has_stages(module)
        weights = InitialWeights(module, self.world, placed)
        self._transforms = self.transforms_of(module, precision)
        # An earlier module may have had another plan.
        self.shard_batch = None
        for transform in self._transforms:
            transform.apply(module, self._mesh_for(transform))
            if transform.divides_batch:
                self.shard_batch = transform.shard_batch
        # FSDP shards before the weights are placed: a rank never holds more than its shard.
        if self._shards is None:
            weights.distribute(module, self.device, self.device)
        else:
            self._shards.use_initial_weights(weights)
        shard_over_data()
        if not self._raw_loop:  # a custom training loop may have several modules
            self._parameters = []
            self._summed_parameters = []
        self._modules = [module]
        self._parameters += module.parameters()
        self._first_window_done = False
        self._replaced_parameters.record(before, module)
        if self.losses.size == 1:  # FSDP sums them itself
            self._summed_parameters += find_replicated(module)
        agree_on_rng(self._equal_batch_groups, self.device)

    def _find_plan(self, module: nn.Module) -> ParallelPlan:
        """The user's plan, or the module's."""
        if self.plan is not None:
            return self.plan
        configure = getattr(module, "configure_parallel", None)
        if configure is None:
            return ParallelPlan()
        plan: ParallelPlan | None = configure(self.mesh)
        return plan or ParallelPlan()

    # -- optimizers ----------------------------------------------------------------------------------------------

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Replace the optimizer's original parameters by this rank's shards."""
        # A pipeline first drops the parameters of other stages, which have no replacement here.
        self._data_strategy.prepare_optimizer(optimizer)
        self._replaced_parameters.replace_in(optimizer)

    def bind_step(self, optimizer: Optimizer) -> StepMethod:
        """The step of the data axes; a multi-tensor optimizer is called once for each kind of parameter."""
        step = step_by_kind(optimizer, self._data_strategy.bind_step(optimizer))
        return refuse_unprepared(optimizer, step, lambda: self._parameters, self.engine)

    # -- steps ---------------------------------------------------------------------------------------------------

    def bind(self, method: StepMethod, several: bool) -> StepMethod:
        """Bind a step method to the transforms and the data axes."""
        # The data axes are outermost: they gather parameters before a transform's part of the step computes.
        for transform in self._transforms:
            method = transform.bind(method)
        call = self._data_strategy.bind(method, several)
        if not self._equal_rng_groups:
            return call
        return with_equal_rng(call, self._equal_rng_groups, self.device)

    def bind_evaluation(self, method: StepMethod, whole: bool = False) -> StepMethod:
        """Bind an evaluation step. ``whole``: batches are not split along the sequence."""
        # In two passes, because training has a context around the whole window (`Transform.computing`), which a single
        # evaluation step lacks: `Transform.bind_evaluation` opens it around the data axes, `bind` works inside them.
        for transform in self._transforms:
            method = transform.bind(method)
        step = self._data_strategy.bind_evaluation(method)
        for transform in self._transforms:
            step = transform.bind_evaluation(step, whole)
        return step

    def bind_backward(
        self, backward: Callable[..., None] | None
    ) -> Callable[..., None] | None:
        """Bind backward to the data axes."""
        return self._data_strategy.bind_backward(backward)

    def forward_backward(self, micro: MicroSteps) -> None:
        """Run a window on the data axes; after the first one, the transforms check its gradients."""
        with ExitStack() as stack:
            for transform in self._transforms:
                stack.enter_context(
                    transform.computing(first=not self._first_window_done)
                )
            self._data_strategy.forward_backward(micro)
        self._complete_window()

    def complete_gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """Finish a window of a custom training loop; return this rank's shards of the gradients."""
        self._complete_window()
        return local_gradients(optimizer)

    def _complete_window(self) -> None:
        sum_partial_gradients(self._summed_parameters)
        # Checked once: a check exchanges all gradients.
        if self._first_window_done:
            return
        self._first_window_done = True
        for module in self._modules:
            for transform in self._transforms:
                transform.check_gradients(module, self._mesh_for(transform))

    def arm(self, loss: Tensor) -> None:
        """Prepare the data axes for the backward of ``loss``."""
        self._data_strategy.arm(loss)

    def clip_gradients(
        self,
        parameters: Sequence[nn.Parameter],
        value: float,
        algorithm: str,
        norm_type: float = 2.0,
    ) -> Tensor | None:
        """Clip by norm or by value; the norm is over all shards."""
        # Manual optimization clips before a window ends.
        sum_partial_gradients(self._summed_parameters)
        if self.pipeline is None:
            return clip_sharded_gradients(parameters, value, algorithm, norm_type)
        # The norm is over all stages, and counts a parameter that several stages share once.
        repeated = self.pipeline.ties.repeated
        return clip_sharded_gradients(
            parameters, value, algorithm, norm_type, self.groups.stage_group, repeated
        )

    # -- state ---------------------------------------------------------------------------------------------------

    def held_elsewhere(self, module: nn.Module) -> Collection[str]:
        """The names in the state that only other stages have."""
        return self._data_strategy.held_elsewhere(module)

    def names_on_all_ranks(self) -> Sequence[str] | None:
        """The names of all stages."""
        return self._data_strategy.names_on_all_ranks()

    def shared_names(self, module: nn.Module) -> Mapping[str, str]:
        """The names of parameters that another stage has under another name."""
        return self._data_strategy.shared_names(module)

    def load_module_state(
        self, module: nn.Module, state: SavedState, strict: bool
    ) -> None:
        """Load a state of whole tensors or of shards."""
        self._data_strategy.load_module_state(module, state, strict)

    def shared_buffers(self, module: nn.Module) -> AbstractContextManager[None]:
        """A context in which every rank has the running statistics of rank 0, as checkpoints do."""
        if self.pipeline is None:
            return borrowed_buffers(module, self.world)
        return borrowed_buffers(module, self.losses)  # stages have other buffers

    # -- what it costs -------------------------------------------------------------------------------------------

    def costs(self, module: nn.Module, precision: Precision, ranks: int) -> Costs:
        """The costs of FSDP2 over the data axes, for the part of the module that the other axes leave on this rank.

        The size of that part is known once the module is sharded.
        """
        sizes = self.places(ranks)
        data_ranks = sizes["dp_replicate"] * sizes["dp_shard"] * sizes["cp"]
        # Also before `start`: explain() and the planner ask for costs without processes.
        fsdp = FSDPStrategy(
            device_mesh=self._data_shape(sizes), **self._sharding_options
        )
        data_costs = fsdp.costs(module, precision, data_ranks)
        axis_layouts, exchanges = _costs_of_model_axes(sizes)
        layouts = [format_axes(sizes), *axis_layouts]
        if data_ranks > 1:
            layouts.append(data_costs.layout)
        divided = has_stages(module) or any(
            isinstance(p, DTensor) for p in module.parameters()
        )
        if divided:
            layouts.append(self._describe_shard([module]))
        elif sizes["tp"] * sizes["pp"] > 1:
            layouts.append("the sizes are known once a run has sharded the module")
            return replace(
                data_costs,
                layout="; ".join(layouts),
                parameters=None,
                gradients=None,
                exchanges=exchanges,
            )
        return replace(
            data_costs,
            layout="; ".join(layouts),
            exchanges=[*exchanges, *data_costs.exchanges],
        )

    def _data_shape(self, sizes: Mapping[str, int]) -> DeviceMesh | tuple[int, ...]:
        """The mesh of the data axes; before `start` only its shape."""
        if self.started:
            return self.groups.data_mesh
        copies = sizes["dp_replicate"]
        shards = sizes["dp_shard"] * sizes["cp"]
        if copies > 1:
            return (copies, shards)
        return (shards,)

    def describe(self) -> str:
        """One line for ``explain()``."""
        sizes = self.sizes
        if self.started:
            sizes = dict(zip(AXES, self.mesh.shape, strict=True))
        line = f"mesh {format_axes(sizes)} on {self.device.type}"
        if sizes["pp"] != 1:
            line += f" ({self.schedule})"
        facts = [line]
        if self.started:
            facts.append(describe_equal_batches(self.mesh))
        if self._modules:
            facts.append(self._describe_shard(self._modules))
        return "; ".join(filter(None, facts))

    def _describe_shard(self, modules: Sequence[nn.Module]) -> str:
        if self.pipeline is None:
            return describe_shard(modules)
        return describe_shard(modules, self.pipeline.elsewhere)


_MODEL_AXES: Final = (
    (
        "pp",
        "each of {} pipeline ranks holds its stages",
        "activations to the next stage, their gradients back",
    ),
    (
        "tp",
        "each of {} tensor ranks a part of every layer in the plan",
        "activations of split layers: all-reduce over {} tensor ranks, forward and backward",
    ),
    (
        "cp",
        "each of {} context ranks computes a part of every sequence",
        "keys and values, or heads: among {} context ranks, forward and backward",
    ),
)
"""For each axis that splits the model or the sequence: what a rank has of it, and what the ranks exchange."""


def _costs_of_model_axes(sizes: Mapping[str, int]) -> tuple[list[str], list[str]]:
    """The layout and the exchanges along each axis of `_MODEL_AXES` that has several ranks."""
    layouts = []
    exchanges = []
    for axis, layout, exchange in _MODEL_AXES:
        if sizes[axis] > 1:
            layouts.append(layout.format(sizes[axis]))
            exchanges.append(exchange.format(sizes[axis]))
    return layouts, exchanges
