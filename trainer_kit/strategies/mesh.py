"""Several ways to divide the work at once: one mesh of processes, an axis for each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim import Optimizer

from trainer_kit.core.arguments import check_timeout
from trainer_kit.core.costs import Costs, Exchange
from trainer_kit.core.errors import StrategyError
from trainer_kit.core.parallel import ParallelPlan
from trainer_kit.core.protocols import MicroSteps
from trainer_kit.precision.precision import EXCHANGING, Precision
from trainer_kit.strategies.fsdp import FSDPStrategy
from trainer_kit.strategies.gradients import clip_sharded_gradients, local, spread_overflow
from trainer_kit.strategies.mesh_layout import (
    axes_in_words,
    check_options,
    check_sizes,
    mesh_groups,
    mesh_in_words,
    parameters_held,
    places,
    refuse_by_hand,
)
from trainer_kit.strategies.process_group import ProcessGroup, average_gradients, borrowed_buffers, join_world
from trainer_kit.strategies.rank_sync import InitialWeights, agree_on_noise, built_once, drawing_alike
from trainer_kit.strategies.single import SingleDeviceStrategy
from trainer_kit.strategies.state import (
    Moved,
    load_module_parts,
    load_optimizer_state,
    optimizer_parts,
    parameters_of,
    step_by_kind,
)
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.strategies.transforms.blocks import ActivationCheckpointing, Policy, keep_activations
from trainer_kit.strategies.transforms.context import ContextParallel, context_parallel, with_positions
from trainer_kit.strategies.transforms.fully_shard import abandon, sharded_units
from trainer_kit.strategies.transforms.pipeline import Pipeline
from trainer_kit.strategies.transforms.pipeline_schedules import bubble, check_schedule
from trainer_kit.strategies.transforms.pipeline_stages import StandIn
from trainer_kit.strategies.transforms.tensor import (
    TensorParallel,
    check_whole_parameters,
    complete_gradients,
    return_copies,
    whole_outputs,
)

__all__ = ["AroundSteps", "MeshStrategy", "Staged", "mesh_costs"]


@final
class MeshStrategy(Strategy):
    """Data, tensor, context and pipeline parallel together, on one ``DeviceMesh``.

    Each global batch is divided over ``dp_replicate × dp_shard``; the other ranks of a place there get the same batch.
    What is applied to the module, in this order: pipeline stages, tensor parallel by the module's plan, context
    parallel, activation checkpointing, and last FSDP2 over the data and context axes. The module keeps its names;
    checkpoints load anywhere.

    Args:
        device: where this rank computes; the Trainer fills it in.
        dp_replicate: copies of everything below; their gradients are averaged.
        dp_shard: among how many ranks parameters, gradients and optimizer state are divided.
        cp: among how many ranks each sequence is divided.
        tp: among how many ranks each layer is divided.
        pp: among how many ranks the model's blocks are divided, as stages of a pipeline.
        pp_schedule: ``"GPipe"``, ``"1F1B"``, ``"Interleaved1F1B"``, ``"LoopedBFS"``, ``"InterleavedZeroBubble"`` or
            ``"ZBVZeroBubble"``; all but the first two give each rank several stages.
        plan: how the module may be split, in place of what its ``configure_parallel`` returns.
        activation_checkpointing_policy: which modules compute activations again in backward; True: repeated blocks.
        fsdp: further options of `FSDPStrategy` for the data axes.
        process_group_backend: ``"gloo"``, ``"nccl"``, …; by default torch's choice for the device.
        timeout: how long a collective may take.

    One of the sizes may be -1: it gets the processes that the others leave.

    Example:
        >>> MeshStrategy(dp_shard=2, tp=2).describe()
        'mesh dp_shard=2 × tp=2 on cpu'
    """

    name = "mesh"
    engine = "mesh"
    refused_precisions: ClassVar[Mapping[str, str]] = dict.fromkeys(
        EXCHANGING, "layers that were exchanged cannot be split by a mesh"
    )
    needs_processes = True
    mesh: DeviceMesh
    data: ProcessGroup
    losses: ProcessGroup
    reports: ProcessGroup
    completes_gradients = True
    own_buffers = True
    """Nothing exchanges them in a step."""

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
        self.sizes = {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp}
        check_sizes(self.sizes)
        check_schedule(pp_schedule)
        self.schedule = pp_schedule
        self.pipeline: Pipeline | None = None
        self.plan, self._recomputes, self._fsdp = plan, activation_checkpointing_policy, dict(fsdp or {})
        FSDPStrategy(self.device, **self._fsdp)  # which refuses what it does not have, now
        check_timeout(timeout, "MeshStrategy")
        self.backend, self.timeout = process_group_backend, timeout
        self._data_axes: SingleDeviceStrategy | FSDPStrategy | Staged = SingleDeviceStrategy(self.device)
        self._around = AroundSteps()
        self._shards: FSDPStrategy | None = None
        self._modules: list[nn.Module] = []
        self._moved = Moved()
        self._summed: list[nn.Parameter] = []
        self._seen = self._by_hand = False

    # -- the mesh ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join the process group, or make one; then the mesh.

        Raises:
            StrategyError: another number of places than processes.
        """
        again = self.started
        self.world: ProcessGroup = join_world(self.device, self.backend, self.timeout)
        if again:
            return
        sizes = self.places(self.world.size)
        check_options(sizes, self._fsdp)
        self.groups = mesh_groups(self.device, sizes)
        self.mesh = self.groups.mesh
        self.data, self.losses, self.reports = self.groups.data, self.groups.losses, self.groups.reports
        self._same = list(self.groups.same.values())
        self.reporter = self.world.rank
        self.sharded = self.world.size > 1  # a rank that is alone has everything
        self.lockstep = self.losses.size > 1  # parameters divided over the data axes are gathered in a forward
        if sizes["pp"] > 1:
            self.pipeline = Pipeline(self.mesh["pp"].get_group(), self.world, self.device, self.schedule)
            self.reporter = self.pipeline.reporter
            self.why_not_again = "each rank of a pipeline has other parameters"

    def places(self, processes: int) -> dict[str, int]:
        """The size of each axis, with -1 filled in; see `trainer_kit.strategies.mesh_layout.places`."""
        return places(self.sizes, processes)

    @property
    def gradient_divisor(self) -> int:
        """FSDP averages over the data and the context ranks."""
        return self.losses.size

    def configure(self, **facts: Any) -> str | None:
        """A line about windows that leave stages waiting."""
        batches = facts.get("accumulation")
        return None if self.pipeline is None or batches is None else bubble(batches, self.pipeline.count)

    def stop(self) -> None:
        """Let go of the module; it stays divided, and keeps its activations again."""
        self._data_axes.stop()
        for module in self._modules:
            keep_activations(module)
        self._modules, self._summed, self._by_hand = [], [], False

    # -- the module ----------------------------------------------------------------------------------------------

    def init_context(self) -> AbstractContextManager[Any]:
        """Layers are built on rank 0, in host memory; the other ranks get their parts of them."""
        return built_once(self.world)

    def place_module(self, module: nn.Module, precision: Precision) -> None:
        """Divide; evaluation alone has no room for the whole either."""
        self._divide(module, precision, lambda: self._data_axes.place_module(module, precision))

    def prepare_module(self, module: nn.Module, manual: bool, precision: Precision) -> None:
        """Divide; every rank gets its part of rank 0's weights."""
        self._divide(module, precision, lambda: self._data_axes.prepare_module(module, manual, precision))

    def wrap_module(self, module: nn.Module, precision: Precision) -> nn.Module:
        """Divide; it is called as it was before. Sequences are divided by whoever calls it: `ContextParallel`.

        Raises:
            StrategyError: a loop of the user's own cannot have it, for it is done around a whole step.
        """
        refuse_by_hand(self.mesh, self._plan_of(module).loss_parallel, bool(self._modules))
        others, self._by_hand = self._modules, True
        self._divide(module, precision, lambda: self._data_axes.wrap_module(module, precision))
        self._modules = [*others, module]  # such a loop may have several
        return module

    def _divide(self, module: nn.Module, precision: Precision, along_data: Callable[[], Any]) -> None:
        plan = self._plan_of(module)
        before, again = parameters_of(module), self.pipeline is not None and self.pipeline.has(module)
        weights = InitialWeights(module, self.world, given=again)  # stages have names of their own by then
        if self.pipeline is not None and not again:
            self.pipeline.apply(module, plan, precision, self._by_hand)
        if self.mesh["tp"].size() > 1:
            TensorParallel(plan).apply(module, self.mesh["tp"])
            if self._by_hand and self.losses.size > 1:
                return_copies(module)
        if not self._by_hand:
            self._around.take(module, plan, self.mesh)
            self.shard_batch = self._around.shard_batch
        if self._recomputes is not False:
            ActivationCheckpointing(None if self._recomputes is True else self._recomputes).apply(module)
        if not (self._by_hand and self._modules):  # what divides the first one divides the others, and steps them all
            self._shards = None if self.losses.size == 1 else self._fully_sharded()
            if self.pipeline is None:
                self._data_axes = self._shards or SingleDeviceStrategy(self.device)
            else:
                self._data_axes = Staged(self.pipeline, self.losses, self._shards)
        if self._shards is None:
            weights.hand_out(module, self.device, self.device)
            along_data()
        else:  # what is divided along one axis waits for the others
            self._shards.weights = weights
            along_data()
            weights.hand_out(module, self.device, self._shards.parameters_on)
        if self.pipeline is not None:
            self.pipeline.find_parameters(module)
        self._modules, self._seen = [module], False
        self._moved.note(before, module)
        if self.losses.size == 1:  # FSDP does it by itself
            known = self._summed if self._by_hand else []
            mine = (p for p in module.parameters() if isinstance(p, DTensor) and Replicate() in p.placements)
            self._summed = [*known, *mine]
        agree_on_noise(self._same, self.device)

    def _fully_sharded(self) -> FSDPStrategy:
        made = FSDPStrategy(self.device, device_mesh=self.groups.data_mesh, **self._fsdp)
        made.world = made.data = made.losses = self.losses
        made.mesh = self.groups.data_mesh
        return made

    def _plan_of(self, module: nn.Module) -> ParallelPlan:
        if self.plan is not None:
            return self.plan
        configure = getattr(module, "configure_parallel", None)
        return (None if configure is None else configure(self.mesh)) or ParallelPlan()

    # -- optimizers ----------------------------------------------------------------------------------------------

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Parameters that it had before they were divided become their parts."""
        if self.pipeline is not None:
            self.pipeline.prepare_optimizer(optimizer)
        self._moved.follow(optimizer)

    def bind_step(self, optimizer: Optimizer) -> Callable[..., Any]:
        """As the data axes have it; for each kind of parameter by itself, where it handles many at once."""
        if self.pipeline is not None and self.pipeline.stages:  # else it is bound again when there are some
            self.pipeline.ties.check_groups(optimizer)
        return step_by_kind(optimizer, self._data_axes.bind_step(optimizer))

    # -- steps ---------------------------------------------------------------------------------------------------

    def bind(self, method: Callable[..., Any], several: bool) -> Callable[..., Any]:
        """As the data axes have it; a loss that is divided becomes one number."""
        if self.pipeline is not None and hasattr(method, "_torchdynamo_orig_callable"):
            fix = 'compile={"regional": True}, which compiles each block of a stage'
            raise StrategyError(
                "no stage of a pipeline has a whole step to compile", found=f"pp={self.sizes['pp']}", fix=fix
            )
        call = self._data_axes.bind(self._around.method(method), several)
        # Stages have draws of their own.
        return call if self.pipeline is not None or not self._same else drawing_alike(call, self._same, self.device)

    def bind_evaluation(self, method: Callable[..., Any], whole: bool = False) -> Callable[..., Any]:
        """The same. ``whole``: batches are not divided along the sequence."""
        return self._around.evaluation(self._data_axes.bind_evaluation(self._around.method(method)), whole)

    def bind_backward(self, backward: Callable[..., None] | None) -> Callable[..., None] | None:
        """As the data axes have it."""
        return self._data_axes.bind_backward(backward)

    def forward_backward(self, micro: MicroSteps) -> None:
        """As the data axes have it; the gradients of a first window are compared over the tensor axis."""
        if self.pipeline is not None:  # hooks may have drawn on one rank alone
            begins = not self._seen or micro.first == 0
            agree_on_noise(self._same if begins else self._same[:-1], self.device)
        with self._around.computing(first=not self._seen):
            self._data_axes.forward_backward(micro)
        self._complete()

    def complete_gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """The same at the end of a window of the user's own; returns this rank's parts."""
        if isinstance(self._data_axes, Staged):
            self._data_axes.complete()
        self._complete()
        gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
        return [local(gradient) for gradient in gradients if gradient is not None]

    def _complete(self) -> None:
        complete_gradients(self._summed)
        if self._seen:
            return
        self._seen = True
        for module in self._modules if self.mesh["tp"].size() > 1 else ():
            check_whole_parameters(module.named_parameters(), self.mesh["tp"])

    def arm(self, loss: Tensor) -> None:
        """As the data axes have it."""
        self._data_axes.arm(loss)

    def clip_gradients(
        self, parameters: Sequence[nn.Parameter], value: float, algorithm: str, norm_type: float = 2.0
    ) -> Tensor | None:
        """Clip by norm or by value, over all parts."""
        complete_gradients(self._summed)  # manual optimization clips before a window ends
        if self.pipeline is None:
            return clip_sharded_gradients(parameters, value, algorithm, norm_type)
        repeated = self.pipeline.ties.repeated
        return clip_sharded_gradients(parameters, value, algorithm, norm_type, self.groups.stages, repeated)

    # -- state ---------------------------------------------------------------------------------------------------

    def held_elsewhere(self, module: nn.Module) -> Collection[str]:
        """The names of other stages."""
        if self.pipeline is None:
            return ()
        return set(self.pipeline.names) - module.state_dict().keys() - set(self.pipeline.ties.names.values())

    def names_on_all_ranks(self) -> Sequence[str] | None:
        """Those of all stages."""
        return None if self.pipeline is None else list(self.pipeline.names)

    def shared_names(self, module: nn.Module) -> Mapping[str, str]:
        """Of what another stage has under another name."""
        return {} if self.pipeline is None else self.pipeline.ties.names

    def load_module_state(self, module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
        """Whole tensors, or parts."""
        if self.pipeline is None:
            load_module_parts(module, state, strict)
        else:
            self.pipeline.load_state(module, state, strict)

    def load_optimizer_state(
        self,
        optimizer: Optimizer,
        groups: Sequence[Mapping[str, Any]],
        state: Mapping[nn.Parameter, Mapping[str, Any]],
    ) -> None:
        """Whole tensors, or parts."""
        load_optimizer_state(optimizer, groups, optimizer_parts(state))

    def shared_buffers(self, module: nn.Module) -> AbstractContextManager[None]:
        """Inside, running statistics are those of rank 0, as in its checkpoints."""
        return borrowed_buffers(module, self.world if self.pipeline is None else self.losses)

    def costs(self, module: nn.Module, precision: Precision, ranks: int) -> Costs:
        """As the data axes have it, of what the others leave; layers are divided by the plan when a verb begins."""
        along = self.groups.data_mesh if self.started else None
        elsewhere = 0 if self.pipeline is None else self.pipeline.elsewhere
        return mesh_costs(self.places(ranks), along, self._fsdp, module, precision, elsewhere)

    def describe(self) -> str:
        """One line for ``explain()``."""
        staged = self.schedule, 0 if self.pipeline is None else self.pipeline.elsewhere
        return mesh_in_words(self.mesh, self.sizes, self.device, self._modules, *staged)


@final
class Staged:
    """The stages of a pipeline, each divided over the data axes by FSDP2.

    Args:
        pipeline: the stages of this rank.
        group: of the ranks that have the same stages.
        sharding: how each is divided; None where this rank is alone with its stages.
    """

    def __init__(self, pipeline: Pipeline, group: ProcessGroup, sharding: FSDPStrategy | None) -> None:
        self.pipeline, self.group, self.sharding = pipeline, group, sharding
        self._units: list[FSDPModule] = []
        self._scales = False

    def stop(self) -> None:
        """The module stays divided."""

    def place_module(self, module: nn.Module, precision: Precision) -> None:
        """Divide each stage."""
        if self.sharding is None:
            return
        for stage in self.pipeline.stages:
            # Weights get their gradients apart from activations in some schedules, and are looked for where they were.
            keeps = False if self.pipeline.splits_backward else None
            shard = self.sharding.sharding(stage, precision, whole=[stage.loose], reshard_after_forward=keeps)
            shard.apply(stage, self.sharding.mesh)
        self._units = [unit for stage in self.pipeline.stages for unit in sharded_units(stage)]

    def prepare_module(self, module: nn.Module, manual: bool, precision: Precision) -> None:
        """The same; backward is the schedule's."""
        if manual:
            raise _not_here("manual optimization", "set automatic_optimization = True, or train without pp=")
        self.place_module(module, precision)
        self._take_scale(module, precision)

    def wrap_module(self, module: nn.Module, precision: Precision) -> nn.Module:
        """The same; it is called as it was before."""
        self.place_module(module, precision)
        self._take_scale(module, precision)
        self.pipeline.take_calls()
        return module

    def _take_scale(self, module: nn.Module, precision: Precision) -> None:
        self._scales = precision.scales
        if self._scales:
            rows = self.pipeline.world.agree([any(p.requires_grad for p in module.parameters())])
            if not all(row[0] for row in rows):
                raise StrategyError(
                    "each rank of a pipeline needs something to train where gradients are scaled",
                    found=f"nothing on ranks {', '.join(str(rank) for rank, row in enumerate(rows) if not row[0])}",
                    fix='use precision="bf16-mixed", which needs no scaling, or other split_points',
                )

    def bind(self, method: Callable[..., Any], several: bool) -> Callable[..., Any]:
        """Up to the model on every rank, and through it on the last."""
        if several:
            raise _not_here("several named losses", "use one optimizer, or a mesh without pp=")
        return self.pipeline.bind(method)

    def bind_evaluation(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Through all stages; weights are divided again after each call, as hooks and checkpoints look for them."""
        call, units = self.pipeline.bind_evaluation(method), self._units

        def evaluate(*arguments: Any) -> Any:
            output = call(*arguments)
            for unit in units:
                unit.reshard()
            return output

        return evaluate

    def bind_backward(self, backward: Callable[..., None] | None) -> Callable[..., None] | None:
        """The schedule's own."""
        if backward is not None:
            raise _not_here("a backward of the module's own", "leave it out, or use a mesh without pp=")
        return None

    def bind_step(self, optimizer: Optimizer) -> Callable[..., Any]:
        """The optimizer's own step."""
        return optimizer.step

    def forward_backward(self, micro: MicroSteps) -> None:
        """A window is a schedule; what no stage's modules hold is averaged behind it."""
        with self._giving_up():
            self.pipeline.forward_backward(micro)
        self._average()

    def complete(self) -> None:
        """The same for the calls of a loop of the user's own."""
        with self._giving_up():
            found = self.pipeline.complete()
        if found:
            self._average()

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for unit in self._units:
                abandon(unit)
            raise

    def _average(self) -> None:
        loose = self.pipeline.loose
        if self.sharding is not None and loose:
            average_gradients(loose, self.group)
        if self._scales:  # what a stage alone does not see, it would step
            gradients = [p.grad for stage in self.pipeline.stages for p in stage.parameters() if p.grad is not None]
            spread_overflow(gradients, self.pipeline.group)

    def arm(self, loss: Tensor) -> None:
        """There is no manual optimization here."""


def _not_here(what: str, fix: str) -> StrategyError:
    return StrategyError(f"{what} has no place in a pipeline", found="MeshStrategy(pp=...)", fix=fix)


@final
class AroundSteps:
    """Nothing, until `take` finds something in a plan."""

    def __init__(self) -> None:
        self._context: ContextParallel | None = None
        self._placed: Callable[[Any], Any] | None = None
        self._splits_loss = False

    def take(self, module: nn.Module, plan: ParallelPlan, mesh: DeviceMesh) -> None:
        """What the plan of a module asks for.

        Args:
            module: whose steps they are.
            plan: how it may be split.
            mesh: with the axes ``cp`` and ``tp``.
        """
        self._splits_loss = mesh["tp"].size() > 1 and plan.loss_parallel
        if plan.context is not None and plan.context.positions is not None:
            self._placed = partial(with_positions, plan.context)
        if mesh["cp"].size() > 1:
            self._context = context_parallel(module, plan)
            self._context.apply(module, mesh["cp"])

    @property
    def shard_batch(self) -> Callable[[Any], Any] | None:
        """A part of each sequence; positions, where the plan asks for them."""
        return self._placed if self._context is None else self._context.shard_batch

    def method(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A step; a loss that is divided becomes one number."""
        return whole_outputs(method) if self._splits_loss else method

    def evaluation(self, call: Callable[..., Any], whole: bool) -> Callable[..., Any]:
        """A step of an evaluation, which nothing else is around. ``whole``: batches are not divided."""
        if self._context is None and not self._splits_loss:
            return call
        place = self._placed if whole else None

        def evaluate(batch: Any, *others: Any) -> Any:
            with self.computing(divided=not whole):
                return call(batch if place is None else place(batch), *others)

        return evaluate

    @contextmanager
    def computing(self, divided: bool = True, first: bool = False) -> Iterator[None]:
        """Around a window.

        Args:
            divided: its batches are.
            first: look whether all attention is seen.
        """
        with ExitStack() as stack:
            if self._splits_loss:
                stack.enter_context(loss_parallel())
            if self._context is not None and divided:
                stack.enter_context(self._context.attending(checked=first))
            yield


def mesh_costs(
    sizes: Mapping[str, int],
    mesh: DeviceMesh | None,
    options: Mapping[str, Any],
    module: nn.Module,
    precision: Precision,
    elsewhere: int = 0,
) -> Costs:
    """The data axes' costs, of what the other axes leave.

    Args:
        sizes: of all axes.
        mesh: of the data axes; None: the processes are not there yet.
        options: of `FSDPStrategy` for them.
        module: which the other axes divide when a verb begins; how far is known then.
        precision: the run's.
        elsewhere: parameters that only other ranks' stages have.
    """
    copies, shards = sizes["dp_replicate"], sizes["dp_shard"] * sizes["cp"]
    shape = mesh or ((copies, shards) if copies > 1 else (shards,))
    along_data = FSDPStrategy(device_mesh=shape, **options).costs(module, precision, copies * shards)
    held, sent = _model_axes(sizes)
    layout = "; ".join([axes_in_words(sizes), *held, *([along_data.layout] if copies * shards > 1 else [])])
    divided = any(hasattr(p, "placements") for p in module.parameters())
    divided = divided or any(isinstance(part, StandIn) for part in module.modules())
    if sizes["tp"] * sizes["pp"] > 1 and not divided:
        layout += "; how much is known when a verb has divided the module"
        return replace(along_data, layout=layout, parameters=None, gradients=None, exchanges=sent)
    if divided:
        layout += f"; {parameters_held([module], elsewhere)}"
    return replace(along_data, layout=layout, exchanges=[*sent, *along_data.exchanges])


def _model_axes(sizes: Mapping[str, int]) -> tuple[list[str], list[Exchange]]:
    """Who holds what, and what is sent, along the axes that divide a model or a sequence."""
    held, sent = [], []
    if sizes["pp"] > 1:
        held.append(f"each of {sizes['pp']} pipeline ranks holds its stages")
        sent.append(Exchange(what="activations to the next stage, their gradients back", sent=None, each_batch=True))
    if sizes["tp"] > 1:
        held.append(f"each of {sizes['tp']} tensor ranks a part of every layer in the plan")
        what = f"activations of divided layers: all-reduce over {sizes['tp']} tensor ranks, forward and backward"
        sent.append(Exchange(what=what, sent=None, each_batch=True))
    if sizes["cp"] > 1:
        held.append(f"each of {sizes['cp']} context ranks computes a part of every sequence")
        what = f"keys and values, or heads: among {sizes['cp']} context ranks, forward and backward"
        sent.append(Exchange(what=what, sent=None, each_batch=True))
    return held, sent
