"""Several ways to divide the work at once: one mesh of processes, an axis for each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from trainer_kit.core.arguments import check_timeout
from trainer_kit.core.costs import Costs
from trainer_kit.core.errors import StrategyError
from trainer_kit.core.parallel import ParallelPlan
from trainer_kit.core.protocols import MicroSteps
from trainer_kit.precision.precision import EXCHANGING, Precision
from trainer_kit.strategies.around_steps import AroundSteps
from trainer_kit.strategies.axes import check_options, check_sizes, places, refuse_by_hand
from trainer_kit.strategies.fsdp import FSDPStrategy
from trainer_kit.strategies.gradients import clip_sharded_gradients, local
from trainer_kit.strategies.holding import mesh_in_words
from trainer_kit.strategies.mesh_costs import mesh_costs
from trainer_kit.strategies.mesh_groups import mesh_groups
from trainer_kit.strategies.process_group import ProcessGroup, borrowed_buffers, join_world
from trainer_kit.strategies.rng_sync import agree_on_noise, drawing_alike
from trainer_kit.strategies.single import SingleDeviceStrategy
from trainer_kit.strategies.staged import Staged
from trainer_kit.strategies.state import (
    Moved,
    load_module_parts,
    load_optimizer_state,
    optimizer_parts,
    parameters_of,
)
from trainer_kit.strategies.stepping import step_by_kind
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.strategies.transforms.activation_checkpointing import ActivationCheckpointing, keep_activations
from trainer_kit.strategies.transforms.pipeline import Pipeline
from trainer_kit.strategies.transforms.schedules import bubble, check_schedule
from trainer_kit.strategies.transforms.tensor import (
    TensorParallel,
    check_whole_parameters,
    complete_gradients,
    return_copies,
)
from trainer_kit.strategies.transforms.units import Policy
from trainer_kit.strategies.weight_broadcast import InitialWeights, built_once

__all__ = ["MeshStrategy"]


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
        """The size of each axis, with -1 filled in; see `trainer_kit.strategies.axes.places`."""
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
