"""Parallelism that the user's own code applies, with torch's functions, in ``configure_model``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import ClassVar, Final, Literal, final

import torch
from lightning_utilities.core.overrides import is_overridden
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainer_kit.core.arguments import check_timeout
from trainer_kit.core.collective_errors import fail_together
from trainer_kit.core.costs import Costs, shard_costs
from trainer_kit.core.display import plural
from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import StrategyError
from trainer_kit.core.module import TrainModule
from trainer_kit.core.protocols import MicroSteps
from trainer_kit.precision.precision import Precision
from trainer_kit.strategies.fsdp import FSDPStrategy, sharded_units
from trainer_kit.strategies.gradients import clip_sharded_gradients, local_gradients
from trainer_kit.strategies.mesh_layout import describe_shard, format_axes
from trainer_kit.strategies.optimizer_step import direct_step
from trainer_kit.strategies.process_group import (
    ProcessGroup,
    borrowed_buffers,
    inherit_timeout,
    join_world,
    once_per_world,
)
from trainer_kit.strategies.rank_sync import (
    InitialWeights,
    agree_on_rng,
    build_on_rank_zero,
    compare_models,
    release_storage,
    with_equal_rng,
)
from trainer_kit.strategies.signatures import StepMethod
from trainer_kit.strategies.state import refuse_unshardable, step_by_kind
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.strategies.transforms.tensor import (
    check_replicated_gradients,
    find_replicated,
    gather_outputs,
    sum_partial_gradients,
)

__all__ = ["ModelParallelStrategy"]

_DATA, _TENSOR = "data_parallel", "tensor_parallel"
_AXES: Final = (_DATA, _TENSOR)


@final
class ModelParallelStrategy(Strategy):
    """Lightning's strategy for modules that divide themselves: tensor parallelism, FSDP2, or both.

    ``configure_model`` calls torch's ``parallelize_module`` with ``self.device_mesh["tensor_parallel"]``, and
    ``fully_shard`` with ``self.device_mesh["data_parallel"]``. The ranks of one tensor axis get the same batches. The
    layers that ``__init__`` has created get rank 0's weights before ``configure_model`` runs. Layers that were created
    under ``trainer.init_module(empty_init=True)`` get them afterwards, so that no other rank ever holds them whole.

    Args:
        data_parallel_size: the number of data ranks; ``"auto"``: the number of machines, or what the other size leaves.
        tensor_parallel_size: the number of ranks that hold a layer together; ``"auto"``: the processes of a machine, or
            what the other size leaves.
        save_distributed_checkpoint: False is refused: a checkpoint is written in shards, and loads under any strategy.
        process_group_backend: ``"gloo"``, ``"nccl"``, …; by default torch's choice for the device.
        timeout: the limit for one collective; None: half an hour.
        parallelize_fn: for a custom training loop (`Fabric`): takes a module and the mesh, returns the sharded module.

    Raises:
        StrategyError: a size is below 1, or an argument is not supported.

    Example:
        >>> ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2).places(4)
        {'data_parallel': 2, 'tensor_parallel': 2}
    """

    name = "model_parallel"
    engine = "mesh"
    sharded = True
    values_on_rank_zero = True
    completes_gradients = True
    own_buffers = True
    """Steps do not synchronize buffers."""
    why_not_recomputed = "configure_model has sharded the blocks by then: recompute them there, with checkpoint_wrapper"
    refused_precisions: ClassVar = {}
    mesh: DeviceMesh
    world: ProcessGroup
    data: ProcessGroup

    def __init__(
        self,
        data_parallel_size: int | Literal["auto"] = "auto",
        tensor_parallel_size: int | Literal["auto"] = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        *,
        parallelize_fn: Callable[[nn.Module, DeviceMesh], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self._sizes = {_DATA: data_parallel_size, _TENSOR: tensor_parallel_size}
        for axis, size in self._sizes.items():
            if size == "auto":
                continue
            # True is an int, and would mean a size of 1.
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise StrategyError(
                    "the size of an axis must be an integer ≥ 1, or 'auto'",
                    found=f"{axis}_size={size!r}",
                )
        if not save_distributed_checkpoint:
            raise StrategyError(
                "checkpoints of parallelized modules are sharded",
                found="save_distributed_checkpoint=False",
                fix="leave it out: a sharded checkpoint loads under any strategy, trainer-kit checkpoint export"
                " writes whole weights",
            )
        if timeout is None:
            timeout = timedelta(minutes=30)
        self.timeout = timeout
        check_timeout(self.timeout, "ModelParallelStrategy")
        self.backend = process_group_backend
        self._parallelize = parallelize_fn
        self._shards: FSDPStrategy | None = None
        self._modules: list[nn.Module] = []
        self._summed_parameters: list[nn.Parameter] = []
        self._first_window_done = False

    # -- the mesh ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join the process group, or create one; then the mesh of data and tensor ranks."""
        was_started = self.started
        self.world = join_world(self.device, self.backend, self.timeout, alone=True)
        if was_started:
            return
        sizes = tuple(self.places(self.world.size).values())
        key = ("model_parallel", self.device.type, sizes)
        self.mesh, self.data, tensor_group = once_per_world(
            key, lambda: self._create_mesh(sizes)
        )
        self.losses = self.data
        self.reports = self.data
        self.reporter = self.world.rank
        self.lockstep = self.data.size > 1
        # The ranks that get the same batches; none if each rank has its own.
        self._tensor_groups = [tensor_group] if tensor_group.size > 1 else []

    def _create_mesh(
        self, sizes: tuple[int, ...]
    ) -> tuple[DeviceMesh, ProcessGroup, ProcessGroup]:
        mesh = inherit_timeout(
            init_device_mesh(self.device.type, sizes, mesh_dim_names=_AXES)
        )
        data = ProcessGroup(self.device, mesh[_DATA].get_group())
        tensor = ProcessGroup(self.device, mesh[_TENSOR].get_group())
        return mesh, data, tensor

    def places(self, processes: int) -> dict[str, int]:
        """The size of both axes.

        Raises:
            StrategyError: their product is not the number of processes.
        """
        data, tensor = self._resolve_sizes(processes)
        if data * tensor != processes:
            raise StrategyError(
                "the sizes of the axes do not match the number of processes",
                found=f"data_parallel_size={self._sizes[_DATA]!r}, tensor_parallel_size={self._sizes[_TENSOR]!r}, "
                f"{plural(processes, 'process')}",
                fix=f"launch {plural(data * tensor, 'process')}, or leave one size at 'auto'",
            )
        return {_DATA: data, _TENSOR: tensor}

    def _resolve_sizes(self, processes: int) -> tuple[int, int]:
        """The sizes of both axes, with ``"auto"`` replaced."""
        data = self._sizes[_DATA]
        tensor = self._sizes[_TENSOR]
        if data != "auto" and tensor != "auto":
            return data, tensor
        if tensor != "auto":
            return max(1, processes // tensor), tensor
        data_ranks = Environment.detect().num_nodes if data == "auto" else data
        return data_ranks, max(1, processes // data_ranks)

    @property
    def gradient_divisor(self) -> int:
        """FSDP2 averages over the data ranks."""
        return self.data.size

    def stop(self) -> None:
        """Release the module; it stays sharded."""
        if self._shards is not None:
            self._shards.stop()
        self._shards = None
        self._modules = []
        self._summed_parameters = []

    # -- the module ----------------------------------------------------------------------------------------------

    @contextmanager
    def building(self, module: nn.Module) -> Iterator[None]:
        """Give all ranks rank 0's weights; ``configure_model``, which runs inside, divides them.

        Raises:
            StrategyError: the module has no ``configure_model``, or it leaves weights without values.
        """
        if not is_overridden("configure_model", module, TrainModule):
            raise StrategyError(
                "ModelParallelStrategy needs a module that parallelizes itself",
                found=f"{type(module).__name__} has no configure_model",
                fix="define it, and call parallelize_module or fully_shard there; or use"
                " MeshStrategy(dp_shard=..., tp=...), which does not need it",
            )
        # `fit` and `validate` may get the same module.
        # An earlier entry point has sharded it: its weights are in parts already.
        if "_built" in vars(module):
            yield
            return
        with torch.device("cpu"), self._with_weights_of_rank_zero(module):
            yield
        # On all ranks: one that raises alone would leave the others waiting in their first collective.
        fail_together(self.world, lambda: self._check_sharding(module))

    @contextmanager
    def _with_weights_of_rank_zero(self, module: nn.Module) -> Iterator[None]:
        # Layers that are created inside start equal on every rank.
        agree_on_rng([self.world], self.device)
        weights = InitialWeights(module, self.world, resets=True)
        has_meta_weights = any(p.is_meta for p in module.parameters())
        rows = self.world.agree([has_meta_weights])
        if any(row[0] for row in rows):
            release_storage(module)
        else:  # the user's code may also set weights, so it gets values
            weights.distribute(module, torch.device("cpu"), torch.device("cpu"))
        yield
        compare_models(
            _describe_layout(module),
            self.world,
            "the ranks sharded the module in different ways",
            "shard the same layers on every rank, regardless of the rank",
        )
        # Errors are raised on all ranks: the others would wait in the broadcast.
        fail_together(self.world, lambda: weights.reset(module))
        weights.distribute(module, self.device, self.device)
        module.to(self.device)

    def init_context(self) -> AbstractContextManager[object]:
        """Build layers on rank 0, in host memory; the other ranks receive their parts."""
        return build_on_rank_zero(self.world)

    def place_module(self, module: nn.Module, precision: Precision) -> None:
        """Take the module as it is: ``configure_model`` has sharded it."""
        self.stop()
        self._adopt_module(module)

    def prepare_module(
        self, module: nn.Module, manual: bool, precision: Precision
    ) -> None:
        """As `place_module`; ``manual``: every backward reduces gradients."""
        self.stop()
        self._adopt_module(module, manual)

    def wrap_module(self, module: nn.Module, precision: Precision) -> nn.Module:
        """Shard the module of a custom training loop by ``parallelize_fn``; a sharded module stays as it is.

        Raises:
            StrategyError: as `building`.
        """
        if self._parallelize is not None:
            with self._with_weights_of_rank_zero(module):
                module = self._parallelize(module, self.mesh)
        fail_together(self.world, lambda: self._check_sharding(module))
        # A custom training loop may have several modules; `_adopt_module` sets the one of a Trainer.
        earlier_modules = self._modules
        self._adopt_module(module)
        self._modules = [*earlier_modules, module]
        return module

    def _adopt_module(self, module: nn.Module, every_backward: bool = False) -> None:
        if every_backward and isinstance(module, FSDPModule):
            raise StrategyError(
                "manual optimization may step between two forwards of the layers, and the module is sharded as a whole",
                found="fully_shard(self, ...) in configure_model",
                fix='shard its layers: fully_shard(self.net, mesh=self.device_mesh["data_parallel"])',
            )
        if sharded_units(module):
            if self._shards is None:
                data_mesh = self.mesh[_DATA]
                self._shards = FSDPStrategy(self.device, device_mesh=data_mesh)
                self._shards.use_group(self.data, data_mesh)
            self._shards.adopt(module, every_backward)
        elif self._tensor_groups:  # FSDP2 sums them itself
            self._summed_parameters += find_replicated(module)
        self._modules = [module]
        self._first_window_done = False
        agree_on_rng(self._tensor_groups, self.device)

    def _check_sharding(self, module: nn.Module) -> None:
        """Refuse what this strategy would train differently from one process."""
        for name, submodule in module.named_modules():
            if isinstance(submodule, FullyShardedDataParallel):
                raise StrategyError(
                    "FullyShardedDataParallel wraps a part of the module",
                    found=name or type(module).__name__,
                    fix='use fully_shard(layer, mesh=self.device_mesh["data_parallel"]) of torch.distributed.fsdp',
                )
        not_averaged = []
        on_unknown_mesh = []
        for name, parameter in module.named_parameters():
            axes = _axes_of(parameter)
            if not axes <= {*_AXES}:
                on_unknown_mesh.append(name)
            elif self.data.size > 1 and parameter.requires_grad and _DATA not in axes:
                not_averaged.append(name)
        if on_unknown_mesh:
            raise StrategyError(
                "parameters are sharded over a mesh that does not belong to this strategy",
                found=_list_names(on_unknown_mesh),
                fix='pass self.device_mesh["tensor_parallel"] or self.device_mesh["data_parallel"]',
            )
        if not_averaged:
            raise StrategyError(
                f"the gradients of these parameters would differ between the {plural(self.data.size, 'data rank')}",
                found=_list_names(not_averaged),
                fix='end configure_model with fully_shard(self, mesh=self.device_mesh["data_parallel"])',
            )

    # -- optimizers and steps --------------------------------------------------------------------------------------

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that needs whole parameters."""
        for group in optimizer.param_groups:
            if any(isinstance(parameter, DTensor) for parameter in group["params"]):
                refuse_unshardable(optimizer)

    def bind_step(self, optimizer: Optimizer) -> StepMethod:
        """The optimizer's step; a multi-tensor optimizer is called once for each kind of parameter."""
        if self._shards is not None:
            return self._shards.bind_step(optimizer)
        return step_by_kind(optimizer, direct_step(optimizer))

    def bind(self, method: StepMethod, several: bool) -> StepMethod:
        """Bind a step, whose loss and outputs are gathered; tensor ranks draw the same random numbers in it."""
        call = gather_outputs(method)
        if self._shards is not None:
            call = self._shards.bind(call, several)
        if not self._tensor_groups:
            return call
        return with_equal_rng(call, self._tensor_groups, self.device)

    def bind_evaluation(self, method: StepMethod, whole: bool = False) -> StepMethod:
        """Bind an evaluation step; weights are sharded again after each call."""
        call = gather_outputs(method)
        if self._shards is None:
            return call
        return self._shards.bind_evaluation(call)

    def bind_backward(
        self, backward: Callable[..., None] | None
    ) -> Callable[..., None] | None:
        """The module's backward, or autograd's."""
        if self._shards is None:
            return backward
        return self._shards.bind_backward(backward)

    def forward_backward(self, micro: MicroSteps) -> None:
        """Run a window; FSDP2 reduces in its last backward. After the first one, check the gradients."""
        if self._shards is None:
            super().forward_backward(micro)
        else:
            self._shards.forward_backward(micro)
        self._complete_window()

    def complete_gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """Finish a window of a custom training loop; return this rank's shards of the gradients."""
        self._complete_window()
        return local_gradients(optimizer)

    def _complete_window(self) -> None:
        sum_partial_gradients(self._summed_parameters)
        if self._first_window_done:
            return
        # Checked once: a check exchanges all gradients.
        self._first_window_done = True
        if not self._tensor_groups:
            return
        for module in self._modules:
            check_replicated_gradients(module.named_parameters(), self.mesh[_TENSOR])

    def clip_gradients(
        self,
        parameters: Sequence[nn.Parameter],
        value: float,
        algorithm: str,
        norm_type: float = 2.0,
    ) -> Tensor | None:
        """Clip by norm or by value, over the shards of all ranks."""
        # Manual optimization clips before a window ends.
        sum_partial_gradients(self._summed_parameters)
        return clip_sharded_gradients(parameters, value, algorithm, norm_type)

    def shared_buffers(self, module: nn.Module) -> AbstractContextManager[None]:
        """A context with rank 0's running statistics on all ranks, as checkpoints hold them."""
        return borrowed_buffers(module, self.world)

    def costs(self, module: nn.Module, precision: Precision, ranks: int) -> Costs:
        """This rank's parts, once ``configure_model`` has sharded the module."""
        sizes = self.places(ranks)
        tensor = sizes[_TENSOR]
        shards = sizes[_DATA]
        exchanges = []
        if tensor > 1:
            exchanges.append(
                f"activations of split layers: among {plural(tensor, 'tensor rank')}, forward and backward"
            )
        if shards > 1:
            exchanges.append(
                f"parameters: all-gather over {plural(shards, 'data rank')} for each forward, for "
                "backward where released"
            )
            exchanges.append(
                f"gradients: reduce-scatter over {plural(shards, 'data rank')}"
            )
        layout = f"{format_axes(sizes)}, divided by the module"
        if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            return shard_costs(
                module, f"{layout}; {describe_shard([module])}", exchanges
            )
        if ranks > 1:
            layout += "; the sizes are known once a run has sharded the module"
            return replace(
                shard_costs(module, layout, exchanges), parameters=None, gradients=None
            )
        return shard_costs(module, layout, exchanges)

    def describe(self) -> str:
        """One line for ``explain()``."""
        sizes: Mapping[str, int | str] = self._sizes
        if self.started:
            sizes = dict(zip(_AXES, self.mesh.shape, strict=True))
        axes = " × ".join(f"{axis}={size}" for axis, size in sizes.items())
        line = f"divided by the module ({axes}) on {self.device.type}"
        if not self._modules:
            return line
        return f"{line}; {describe_shard(self._modules)}"


def _describe_layout(module: nn.Module) -> dict[str, str]:
    """How each parameter is sharded, and the parts that ``fully_shard`` gathers together, by name."""
    layouts: dict[str, str] = {}
    for name, submodule in module.named_modules():
        if isinstance(submodule, FSDPModule):
            layouts[name] = "a unit of fully_shard"
    for name, parameter in module.named_parameters():
        shape = list(parameter.shape)
        if isinstance(parameter, DTensor):
            axes = ", ".join(parameter.device_mesh.mesh_dim_names or ())
            mesh = axes or "a mesh without names"
            layouts[name] = f"{shape} as {parameter.placements} over {mesh}"
        else:
            layouts[name] = f"{shape} whole"
    return layouts


def _axes_of(parameter: nn.Parameter) -> set[str]:
    """The names of the mesh axes that a parameter is sharded over."""
    if not isinstance(parameter, DTensor):
        return set()
    return {*(parameter.device_mesh.mesh_dim_names or ("?",))}


_LISTED = 3
"""The number of names in an error."""


def _list_names(names: Sequence[str]) -> str:
    text = ", ".join(names[:_LISTED])
    if len(names) > _LISTED:
        text += f" and {len(names) - _LISTED} more"
    return text
