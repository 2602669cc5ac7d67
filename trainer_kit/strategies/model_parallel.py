"""Parallelism that the user's own code applies, with torch's functions, in ``configure_model``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar, Final, Literal, final

import torch
from lightning_utilities.core.overrides import is_overridden
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from trainer_kit.core.arguments import check_timeout
from trainer_kit.core.collective_errors import fail_together
from trainer_kit.core.costs import Costs, held
from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import StrategyError
from trainer_kit.core.module import TrainModule
from trainer_kit.core.protocols import MicroSteps
from trainer_kit.precision.precision import Precision
from trainer_kit.strategies.fsdp import FSDPStrategy, sharded_units
from trainer_kit.strategies.gradients import clip_sharded_gradients, local_gradients
from trainer_kit.strategies.mesh_layout import axes_in_words, parameters_held
from trainer_kit.strategies.process_group import (
    ProcessGroup,
    borrowed_buffers,
    inherit_timeout,
    join_world,
    once_a_world,
)
from trainer_kit.strategies.rank_sync import (
    InitialWeights,
    agree_on_rng,
    built_once,
    compare_models,
    empty,
    with_equal_rng,
)
from trainer_kit.strategies.state import refuse_whole, step_by_kind
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.strategies.transforms.tensor import (
    check_whole_parameters,
    complete_gradients,
    whole_outputs,
)

__all__ = ["ModelParallelStrategy"]

_DATA, _TENSOR = "data_parallel", "tensor_parallel"
_AXES: Final = (_DATA, _TENSOR)


@final
class ModelParallelStrategy(Strategy):
    """Lightning's strategy for modules that divide themselves: tensor parallelism, FSDP2, or both.

    ``configure_model`` calls torch's ``parallelize_module`` with ``self.device_mesh["tensor_parallel"]``, and
    ``fully_shard`` with ``self.device_mesh["data_parallel"]``. The ranks of one tensor axis get the same batches. The
    layers that ``__init__`` has made get rank 0's weights before ``configure_model`` runs. Layers that were made under
    ``trainer.init_module(empty_init=True)`` get them afterwards, so that no other rank ever holds them whole.

    Args:
        data_parallel_size: the number of data ranks; ``"auto"``: the number of machines, or what the other size leaves.
        tensor_parallel_size: the number of ranks that hold a layer together; ``"auto"``: the processes of a machine, or
            what the other size leaves.
        save_distributed_checkpoint: False is refused: a checkpoint is written in shards, and loads under any strategy.
        process_group_backend: ``"gloo"``, ``"nccl"``, …; by default torch's choice for the device.
        timeout: the limit for one collective; None: half an hour.
        parallelize_fn: for a raw loop (`Fabric`): takes a module and the mesh, and returns the divided module.

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
    """Steps do not synchronise buffers."""
    why_not_recomputed = "configure_model has divided the blocks by then: recompute them there, with checkpoint_wrapper"
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
            if size != "auto" and (
                not isinstance(size, int) or isinstance(size, bool) or size < 1
            ):
                found = f"{axis}_size={size!r}"
                raise StrategyError(
                    "the size of an axis is a whole number that is at least 1, or 'auto'",
                    found=found,
                )
        if not save_distributed_checkpoint:
            fix = "leave it out: a checkpoint in shards loads under any strategy, trainer-kit checkpoint export writes"
            raise StrategyError(
                "checkpoints of divided modules are written in shards",
                found="save_distributed_checkpoint=False",
                fix=f"{fix} whole weights",
            )
        self.timeout = timedelta(minutes=30) if timeout is None else timeout
        check_timeout(self.timeout, "ModelParallelStrategy")
        self.backend = process_group_backend
        self._parallelize = parallelize_fn
        self._shards: FSDPStrategy | None = None
        self._modules: list[nn.Module] = []
        self._summed: list[nn.Parameter] = []
        self._first_window_done = False

    # -- the mesh ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join the process group, or make one; then the mesh of data and tensor ranks."""
        again = self.started
        self.world = join_world(self.device, self.backend, self.timeout, alone=True)
        if again:
            return
        sizes = tuple(self.places(self.world.size).values())
        kind = self.device.type
        self.mesh, self.data, tensor = once_a_world(
            ("model_parallel", kind, sizes), lambda: self._axes(kind, sizes)
        )
        self.losses = self.reports = self.data
        self.reporter = self.world.rank
        self.lockstep = self.data.size > 1
        self._same = [tensor] if tensor.size > 1 else []

    def _axes(
        self, kind: str, sizes: tuple[int, ...]
    ) -> tuple[DeviceMesh, ProcessGroup, ProcessGroup]:
        mesh = inherit_timeout(init_device_mesh(kind, sizes, mesh_dim_names=_AXES))
        data, tensor = (
            ProcessGroup(self.device, mesh[axis].get_group()) for axis in _AXES
        )
        return mesh, data, tensor

    def places(self, processes: int) -> dict[str, int]:
        """The size of both axes.

        Raises:
            StrategyError: their product is not the number of processes.
        """
        data, tensor = (
            0 if size == "auto" else int(size) for size in self._sizes.values()
        )
        data = data or (
            max(1, processes // tensor) if tensor else Environment.detect().num_nodes
        )
        tensor = tensor or max(1, processes // data)
        if data * tensor != processes:
            raise StrategyError(
                "the sizes of the axes do not match the number of processes",
                found=f"data_parallel_size={self._sizes[_DATA]!r}, tensor_parallel_size={self._sizes[_TENSOR]!r}, "
                f"{processes} processes",
                fix=f"launch {data * tensor} processes, or leave one size at 'auto'",
            )
        return {_DATA: data, _TENSOR: tensor}

    @property
    def gradient_divisor(self) -> int:
        """FSDP2 averages over the data ranks."""
        return self.data.size

    def stop(self) -> None:
        """Release the module; it stays divided."""
        if self._shards is not None:
            self._shards.stop()
        self._shards, self._modules, self._summed = None, [], []

    # -- the module ----------------------------------------------------------------------------------------------

    @contextmanager
    def building(self, module: nn.Module) -> Iterator[None]:
        """Give all ranks rank 0's weights; ``configure_model``, which runs inside, divides them.

        Raises:
            StrategyError: the module has no ``configure_model``, or it leaves weights without values.
        """
        if not is_overridden("configure_model", module, TrainModule):
            raise StrategyError(
                "ModelParallelStrategy needs a module that divides itself",
                found=f"{type(module).__name__} has no configure_model",
                fix="define it, and call parallelize_module or fully_shard there; or use"
                " MeshStrategy(dp_shard=..., tp=...), which does not need it",
            )
        if "_built" in vars(module):  # an earlier entry point has divided it
            yield
            return
        with torch.device("cpu"), self._from_rank_zero(module):
            yield
        fail_together(self.world, lambda: self._check(module))

    @contextmanager
    def _from_rank_zero(self, module: nn.Module) -> Iterator[None]:
        agree_on_rng(
            [self.world], self.device
        )  # layers that are made inside start equal on every rank
        weights = InitialWeights(module, self.world, resets=True)
        bare = bool(
            max(
                row[0]
                for row in self.world.agree(
                    [any(p.is_meta for p in module.parameters())]
                )
            )
        )
        if bare:
            empty(module)
        else:  # the user's code may also set weights, so it gets values
            weights.hand_out(module, torch.device("cpu"), torch.device("cpu"))
        yield
        compare_models(
            _layout(module),
            self.world,
            "the ranks divided the module in different ways",
            "divide the same layers on every rank, regardless of the rank",
        )
        fail_together(self.world, lambda: weights.reset(module))
        weights.hand_out(module, self.device, self.device)
        module.to(self.device)

    def init_context(self) -> AbstractContextManager[Any]:
        """Build layers on rank 0, in host memory; the other ranks receive their parts."""
        return built_once(self.world)

    def place_module(self, module: nn.Module, precision: Precision) -> None:
        """Take the module as it is: ``configure_model`` has divided it."""
        self.stop()
        self._take(module)

    def prepare_module(
        self, module: nn.Module, manual: bool, precision: Precision
    ) -> None:
        """As `place_module`; ``manual``: every backward reduces gradients."""
        self.stop()
        self._take(module, manual)

    def wrap_module(self, module: nn.Module, precision: Precision) -> nn.Module:
        """Divide the module of a raw loop by ``parallelize_fn``; one that its loop has divided stays as it is.

        Raises:
            StrategyError: as `building`.
        """
        if self._parallelize is not None:
            with self._from_rank_zero(module):
                module = self._parallelize(module, self.mesh)
        fail_together(self.world, lambda: self._check(module))
        others, self._modules = self._modules, []
        self._take(module)
        self._modules = [*others, module]  # a raw loop may have several
        return module

    def _take(self, module: nn.Module, every_backward: bool = False) -> None:
        if every_backward and isinstance(module, FSDPModule):
            raise StrategyError(
                "manual optimization may step between two forwards of the layers, and the module is sharded as a whole",
                found="fully_shard(self, ...) in configure_model",
                fix='shard its layers: fully_shard(self.net, mesh=self.device_mesh["data_parallel"])',
            )
        if sharded_units(module):
            self._shards = self._shards or FSDPStrategy(
                self.device, device_mesh=self.mesh[_DATA]
            )
            self._shards.world = self._shards.data = self._shards.losses = self.data
            self._shards.adopt(module, every_backward)
        elif self._same:  # FSDP2 sums them itself
            self._summed += [
                p
                for p in module.parameters()
                if isinstance(p, DTensor) and Replicate() in p.placements
            ]
        self._modules = [module]
        self._first_window_done = False
        agree_on_rng(self._same, self.device)

    def _check(self, module: nn.Module) -> None:
        """Refuse what this strategy would train differently from one process."""
        outer = [
            name
            for name, part in module.named_modules()
            if isinstance(part, FullyShardedDataParallel)
        ]
        if outer:
            raise StrategyError(
                "FullyShardedDataParallel wraps a part of the module",
                found=outer[0] or type(module).__name__,
                fix='use fully_shard(layer, mesh=self.device_mesh["data_parallel"]) of torch.distributed.fsdp',
            )
        loose, foreign = [], []
        for name, parameter in module.named_parameters():
            axes = (
                (parameter.device_mesh.mesh_dim_names or ("?",))
                if isinstance(parameter, DTensor)
                else ()
            )
            if not {*axes} <= {*_AXES}:
                foreign.append(name)
            elif self.data.size > 1 and parameter.requires_grad and _DATA not in axes:
                loose.append(name)
        if foreign:
            raise StrategyError(
                "parameters are divided over a mesh that does not belong to this strategy",
                found=_some(foreign),
                fix='pass self.device_mesh["tensor_parallel"] or self.device_mesh["data_parallel"]',
            )
        if loose:
            raise StrategyError(
                f"the gradients of these parameters would differ between the {self.data.size} data ranks",
                found=_some(loose),
                fix='end configure_model with fully_shard(self, mesh=self.device_mesh["data_parallel"])',
            )

    # -- optimizers and steps --------------------------------------------------------------------------------------

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that needs whole parameters."""
        if any(
            isinstance(p, DTensor)
            for group in optimizer.param_groups
            for p in group["params"]
        ):
            refuse_whole(optimizer)

    def bind_step(self, optimizer: Optimizer) -> Callable[..., Any]:
        """The optimizer's step; a multi-tensor optimizer is called once for each kind of parameter."""
        return (
            step_by_kind(optimizer, optimizer.step)
            if self._shards is None
            else self._shards.bind_step(optimizer)
        )

    def bind(self, method: Callable[..., Any], several: bool) -> Callable[..., Any]:
        """Bind a step, whose loss and outputs are gathered; tensor ranks draw the same random numbers in it."""
        call = whole_outputs(method)
        if self._shards is not None:
            call = self._shards.bind(call, several)
        return with_equal_rng(call, self._same, self.device) if self._same else call

    def bind_evaluation(
        self, method: Callable[..., Any], whole: bool = False
    ) -> Callable[..., Any]:
        """Bind an evaluation step; weights are sharded again after each call."""
        call = whole_outputs(method)
        return call if self._shards is None else self._shards.bind_evaluation(call)

    def bind_backward(
        self, backward: Callable[..., None] | None
    ) -> Callable[..., None] | None:
        """The module's backward, or autograd's."""
        return (
            backward if self._shards is None else self._shards.bind_backward(backward)
        )

    def forward_backward(self, micro: MicroSteps) -> None:
        """Run a window; FSDP2 reduces in its last backward. After the first one, check the gradients."""
        if self._shards is None:
            super().forward_backward(micro)
        else:
            self._shards.forward_backward(micro)
        self._complete()

    def complete_gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """Finish a window of a raw loop; return this rank's shards of the gradients."""
        self._complete()
        return local_gradients(optimizer)

    def _complete(self) -> None:
        complete_gradients(self._summed)
        if self._first_window_done:
            return
        self._first_window_done = True
        for module in self._modules if self._same else ():
            check_whole_parameters(module.named_parameters(), self.mesh[_TENSOR])

    def clip_gradients(
        self,
        parameters: Sequence[nn.Parameter],
        value: float,
        algorithm: str,
        norm_type: float = 2.0,
    ) -> Tensor | None:
        """Clip by norm or by value, over the shards of all ranks."""
        complete_gradients(
            self._summed
        )  # manual optimization clips before a window ends
        return clip_sharded_gradients(parameters, value, algorithm, norm_type)

    def shared_buffers(self, module: nn.Module) -> AbstractContextManager[None]:
        """A context with rank 0's running statistics on all ranks, as checkpoints hold them."""
        return borrowed_buffers(module, self.world)

    def costs(self, module: nn.Module, precision: Precision, ranks: int) -> Costs:
        """This rank's parts, once ``configure_model`` has divided the module."""
        sizes = self.places(ranks)
        layout, sent = f"{axes_in_words(sizes)}, divided by the module", []
        tensor, shards = sizes[_TENSOR], sizes[_DATA]
        if tensor > 1:
            sent = [
                f"activations of divided layers: among {tensor} tensor ranks, forward and backward"
            ]
        if shards > 1:
            sent += [
                f"parameters: all-gather over {shards} data ranks for each forward, for backward where released",
                f"gradients: reduce-scatter over {shards} data ranks",
            ]
        if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            return held(module, f"{layout}; {parameters_held([module])}", sent)
        if ranks > 1:
            layout += "; how much is known when a run has divided the module"
            return replace(held(module, layout, sent), parameters=None, gradients=None)
        return held(module, layout, sent)

    def describe(self) -> str:
        """One line for ``explain()``."""
        sizes = (
            dict(zip(_AXES, self.mesh.shape, strict=True))
            if self.started
            else self._sizes
        )
        axes = " × ".join(f"{axis}={size}" for axis, size in sizes.items())
        held = f"; {parameters_held(self._modules)}" if self._modules else ""
        return f"divided by the module ({axes}) on {self.device.type}{held}"


def _layout(module: nn.Module) -> dict[str, str]:
    """How each parameter is divided, and the parts that ``fully_shard`` gathers together, by name."""
    found = {
        name: "a unit of fully_shard"
        for name, part in module.named_modules()
        if isinstance(part, FSDPModule)
    }
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            axes = ", ".join(parameter.device_mesh.mesh_dim_names or ())
            found[name] = (
                f"{list(parameter.shape)} as {parameter.placements} over {axes or 'a mesh without names'}"
            )
        else:
            found[name] = f"{list(parameter.shape)} whole"
    return found


def _some(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (
        f" and {len(names) - most} more" if len(names) > most else ""
    )
