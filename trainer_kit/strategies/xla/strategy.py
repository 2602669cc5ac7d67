"""TPUs and other devices of OpenXLA, through torch_xla: a step is traced, compiled once and run as a whole."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.costs import Costs, shard_costs
from trainer_kit.core.display import plural
from trainer_kit.core.errors import ConfigurationError, StrategyError
from trainer_kit.core.protocols import Group, MicroSteps
from trainer_kit.core.state_names import load_module_weights, plain_state
from trainer_kit.core.tensors import map_tensors
from trainer_kit.core.torch_private import has_compiled_call
from trainer_kit.core.types import Batch, SavedState, StateDict
from trainer_kit.precision.precision import EXCHANGING, Precision
from trainer_kit.strategies.local_sgd import fill_absent
from trainer_kit.strategies.signatures import StepMethod
from trainer_kit.strategies.single import Alone
from trainer_kit.strategies.state import (
    GroupOptions,
    ReplacedParameters,
    States,
    load_optimizer_state,
    optimizer_state,
)
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.strategies.torch_private import has_compiled_function

__all__ = ["XLAGroup", "XLAStrategy"]


@final
class XLAStrategy(Strategy):
    """torch_xla (https://docs.pytorch.org/xla): one process drives all devices of its machine, or each drives one.

    - One process, one device: a step is one compiled graph, which ends where the optimizer has stepped.
    - One process, several devices (SPMD; Xu et al., GSPMD, 2021): a batch is split over the devices by its first
      dimension, and with ``shard_parameters`` weights and optimizer state as well (torch_xla's FSDPv2). ``batch_size``
      counts the samples of the process, over all its devices.
    - Inside ``torch_xla.launch``, one process a device: gradients are averaged over the processes.

    Args:
        shard_parameters: every device holds a part of each weight and of the optimizer state; needs SPMD.
        spmd: one process for all devices; None: if there are several, and no process was launched for each.

    Example:
        >>> XLAStrategy(shard_parameters=True).describe()
        'torch_xla, not started; sharded weights'
    """

    name = "xla"
    engine = "xla"
    refused_precisions: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(EXCHANGING, "XLA compiles no kernels of this vendor"),
        **dict.fromkeys(
            ("16-true", "16-mixed"),
            "bfloat16 is the half precision of XLA devices, float16 is not",
        ),
    }
    finds_devices = True
    completes_gradients = True
    why_not_averaged = "averages under XLA are not tested"
    why_not_in_threads = "the ranks of XLA are processes"
    why_not_recomputed = "XLA's compiler needs torch_xla.utils.checkpoint.checkpoint in the forward of each block"

    def __init__(
        self, *, shard_parameters: bool = False, spmd: bool | None = None
    ) -> None:
        if shard_parameters and spmd is False:
            raise StrategyError(
                "sharded weights need one process for all devices",
                found="shard_parameters=True, spmd=False",
                fix="leave spmd out",
            )
        self.shard_parameters = shard_parameters
        self.spmd = spmd
        self.device = torch.device("xla")
        self._mesh: Any = None
        self._parameters: list[nn.Parameter] = []
        self._replaced_parameters = ReplacedParameters()

    @property
    def gradient_divisor(self) -> int:
        """Gradients are averaged over processes; over the devices of one process a batch is one batch."""
        return self.data.size

    def start(self) -> None:
        """Find the devices, and the other processes."""
        import torch_xla
        import torch_xla.runtime as xr

        # Computes and runs the traced graph, also where no optimizer was stepped.
        self.end_batch = self._sync = torch_xla.sync
        was_initialized = torch_xla._XLAC._xla_runtime_is_initialized()
        # Asking for the number of processes first would count this process's devices as such.
        launched = xr.local_process_count() > 1
        count = 1
        if not launched:
            count = xr.global_runtime_device_count()
        spmd = self.spmd
        if spmd is None:
            spmd = count > 1
        if self.shard_parameters and launched:
            raise StrategyError(
                "sharded weights need one process for all devices",
                found=f"{plural(xr.local_process_count(), 'process')} on this machine",
                fix="run the script directly, without torch_xla.launch",
            )
        # Before the device is created: torch_xla decides at its first use whether one process drives all devices.
        if spmd and not launched:
            self._start_spmd(count)
        self.device = torch_xla.device()
        # The device's generator, which the seed of the run could not reach before the device existed.
        if not was_initialized:
            torch_xla.manual_seed(torch.initial_seed() % 2**63)
        group: Group = XLAGroup() if launched and xr.world_size() > 1 else Alone()
        self.world = self.data = self.losses = self.reports = group
        self.reporter = group.rank

    def _start_spmd(self, count: int) -> None:
        import numpy as np
        import torch_xla.distributed.spmd as xs
        import torch_xla.runtime as xr

        if not xr.is_spmd():
            xr.use_spmd()
        # FSDPv2's name for the axis.
        self._mesh = xs.Mesh(np.arange(count), (count,), ("fsdp",))
        xs.set_global_mesh(self._mesh)
        self.shard_batch = self._shard_batch

    def _shard_batch(self, batch: Batch) -> Batch:
        """Split a batch: each device computes some of its rows."""
        return map_tensors(batch, self._shard_rows)

    def _shard_rows(self, tensor: Tensor) -> Tensor:
        if tensor.dim() > 0:
            self._mark_sharding(tensor, 0)
        return tensor

    def _mark_sharding(self, tensor: Tensor, dim: int) -> None:
        import torch_xla.distributed.spmd as xs

        # None: each device has all of that dimension.
        axes: list[str | None] = [None] * tensor.dim()
        axes[dim] = "fsdp"
        xs.mark_sharding(tensor, self._mesh, tuple(axes))

    def _shard_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Shard along the longest dim, as torch_xla's FSDPv2 does; scalars stay whole on each device."""
        if self.shard_parameters and self._mesh is not None:
            for tensor in tensors:
                if tensor.dim() > 0 and tensor.device.type == "xla":
                    self._mark_sharding(tensor, tensor.shape.index(max(tensor.shape)))

    def stop(self) -> None:
        """Release the module's parameters."""
        self._parameters = []

    def init_context(self) -> AbstractContextManager[object]:
        """On the host: on the device, XLA would compile the random initialization for a single run."""
        return nullcontext()

    def place_module(self, module: nn.Module, precision: Precision) -> None:
        """Move the module, and give every process the weights of the first."""
        module.to(self.device)
        # Devices of one process are one device for torch, and have the weights already.
        if self.world.size > 1:
            for tensor in [*module.parameters(), *module.buffers()]:
                self.world.broadcast(tensor.data)
        self._shard_tensors(module.parameters())
        # The graph of the transfers runs here, and not as a part of the first step, which is compiled once for all
        # steps.
        self._sync()

    def prepare_module(
        self, module: nn.Module, manual: bool, precision: Precision
    ) -> None:
        """Move and shard; nothing wraps it."""
        if manual and self.world.size > 1:
            raise StrategyError(
                "manual optimization on XLA needs one process for all devices",
                found=f"{plural(self.world.size, 'process')}",
                fix="run the script directly, without torch_xla.launch",
            )
        self.place_module(module, precision)
        self._parameters = list(module.parameters())

    def wrap_module(self, module: nn.Module, precision: Precision) -> nn.Module:
        """Move and shard; nothing wraps it."""
        # torch_xla does not convert parameters with weak references.
        parameters = dict(module.named_parameters())
        self.place_module(module, precision)
        references = {name: partial(parameters.get, name) for name in parameters}
        self._replaced_parameters.record(references, module)
        return module

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Point the optimizer at the parameters on the device: they are other objects than those on the host."""
        self._replaced_parameters.replace_in(optimizer)

    def bind(self, method: StepMethod, several: bool) -> StepMethod:
        """The method itself."""
        is_compiled = has_compiled_function(method)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, nn.Module):
            for submodule in owner.modules():
                is_compiled = is_compiled or has_compiled_call(submodule)
        if is_compiled:
            raise StrategyError(
                "XLA always compiles the step",
                found="torch.compile",
                fix="leave compile= out",
            )
        return method

    def bind_evaluation(self, method: StepMethod, whole: bool = False) -> StepMethod:
        """Call the method, and run the graph of the batch."""

        def run(*arguments: object) -> object:
            # Without it the graph would grow over all batches of the evaluation.
            output = method(*arguments)
            self._sync()
            return output

        return run

    def bind_step(self, optimizer: Optimizer) -> StepMethod:
        """The optimizer's step, and then the compiled graph of the whole step."""

        def step(*arguments: Any, **options: Any) -> object:
            returned = optimizer.step(*arguments, **options)
            self._sync()
            return returned

        return step

    def module_state(self, module: nn.Module) -> StateDict:
        """The module's ``state_dict`` on the host: other engines do not have these devices."""
        return {name: _on_host(tensor) for name, tensor in plain_state(module).items()}

    def load_module_state(
        self, module: nn.Module, state: SavedState, strict: bool
    ) -> None:
        """Load as torch does; sharded tensors stay sharded."""
        load_module_weights(module, state, strict)
        self._shard_tensors(module.parameters())
        self._sync()

    def optimizer_state(
        self, optimizer: Optimizer
    ) -> tuple[list[list[nn.Parameter]], States]:
        """The optimizer's state on the host."""
        groups, states = optimizer_state(optimizer)
        # By parameter: moments are on the host as plain tensors, which any strategy can load.
        return groups, {
            p: map_tensors(dict(state), _on_host) for p, state in states.items()
        }

    def load_optimizer_state(
        self, optimizer: Optimizer, groups: GroupOptions, state: States
    ) -> None:
        """Load as torch does; sharded tensors stay sharded."""
        load_optimizer_state(optimizer, groups, state)
        for values in optimizer.state.values():
            tensors = [value for value in values.values() if isinstance(value, Tensor)]
            self._shard_tensors(tensors)
        self._sync()

    def forward_backward(self, micro: MicroSteps) -> None:
        """Run one micro-batch after the other, all in one graph; average gradients after the last."""
        super().forward_backward(micro)
        self._average(self._parameters)

    def _average(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """Average gradients over the processes, if there are several."""
        # Looked up in each window: a callback may freeze or unfreeze some.
        trained = [p for p in parameters if p.requires_grad]
        if isinstance(self.data, XLAGroup):
            # Every process must trace the same graph: a missing gradient counts as zeros.
            fill_absent(trained)
        gradients = [p.grad for p in trained if p.grad is not None]
        if isinstance(self.data, XLAGroup):
            self.data.average(gradients)
        return gradients

    def complete_gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """Average gradients over the processes."""
        parameters: list[nn.Parameter] = []
        for group in optimizer.param_groups:
            parameters += group["params"]
        return self._average(parameters)

    @property
    def own_buffers(self) -> bool:
        """Whether processes keep their own buffers."""
        return self.world.size > 1

    def costs(self, module: nn.Module, precision: Precision, ranks: int) -> Costs:
        """What one process holds and sends; the compiler decides what the devices of one process exchange."""
        if self._mesh is not None:
            placement = "in parts" if self.shard_parameters else "whole on each"
            layout = f"one process for {plural(self._mesh.size(), 'device')}, over all of them; parameters {placement}"
            exchanges = ["exchanges that the compiler inserts between the devices"]
            return shard_costs(module, layout, exchanges)
        exchanges = []
        if ranks > 1:
            exchanges.append(f"gradients: all-reduce over {plural(ranks, 'process')}")
        return shard_costs(
            module, f"{plural(ranks, 'process')}, each with a full replica", exchanges
        )

    def describe(self) -> str:
        """One line for ``explain()``."""
        parts = "; sharded weights" if self.shard_parameters else ""
        if not self.started:
            return f"torch_xla, not started{parts}"
        if self._mesh is not None:
            return f"torch_xla, one process for {plural(self._mesh.size(), 'device')}{parts}"
        return f"torch_xla, {plural(self.world.size, 'process')}, one device each"


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()  # sync point: a checkpoint


@final
class XLAGroup:
    """The processes that ``torch_xla.launch`` started, one for each device.

    Values on the host are exchanged through the device: torch_xla has no channel between hosts. Each such exchange ends
    the graph that is being traced.
    """

    def __init__(self) -> None:
        import torch_xla
        import torch_xla.core.xla_model as xm
        import torch_xla.runtime as xr

        self._xm = xm
        self.device = torch_xla.device()
        self.rank = xr.global_ordinal()
        self.size = xr.world_size()

    @property
    def group(self) -> None:
        """None: torch_xla exchanges the tensors."""

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce over the ranks, in place; ``op`` is sum, mean, min or max."""
        kinds = {"sum": "sum", "mean": "sum", "avg": "sum", "min": "min", "max": "max"}
        if op not in kinds:
            raise ConfigurationError(
                f"unknown reduction {op!r}", fix="use one of: sum, mean, min, max"
            )
        on_device = tensor.to(self.device)
        (reduced,) = self._xm.all_reduce(kinds[op], [on_device])
        result: Tensor = reduced
        if op in ("mean", "avg"):
            result = result / self.size
        if result.dtype != tensor.dtype:  # the mean of integers
            return result
        return tensor.copy_(result)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack over the ranks: shape (size, *tensor.shape)."""
        gathered: Tensor = self._xm.all_gather(
            tensor.detach().to(self.device).unsqueeze(0)
        )
        return gathered.to(tensor.device)

    def all_gather_object(self, value: object) -> list[Any]:
        """One small picklable value from every rank, in rank order."""
        payloads = self._xm.rendezvous("gather", pickle.dumps(value))
        return [pickle.loads(payload) for payload in payloads]

    def gather_object(self, value: object) -> list[Any] | None:
        """As `all_gather_object`, but None on all ranks except the first."""
        values = self.all_gather_object(value)
        return values if self.rank == 0 else None

    def broadcast(self, value: object, source: int = 0) -> Any:
        """A tensor (in place), or one small picklable value, from rank ``source``."""
        if isinstance(value, Tensor):
            return value.copy_(self.all_gather(value)[source])
        payload = pickle.dumps(value if self.rank == source else None)
        payloads = self._xm.rendezvous("broadcast", payload)
        return pickle.loads(payloads[source])

    def barrier(self) -> None:
        """Wait for every rank."""
        self._xm.rendezvous("barrier")

    def agree(self, values: list[float]) -> list[list[float]]:
        """A few numbers of every rank, one row for each rank."""
        layout = f"{len(values)}d"
        rows = self._xm.rendezvous("agree", struct.pack(layout, *values))
        return [list(struct.unpack(layout, row)) for row in rows]

    def side_group(self, recreate: bool = False) -> None:
        """Not needed: every rank holds the whole state, so ranks never write a checkpoint together."""

    def average(self, gradients: list[Tensor]) -> None:
        """Average over the ranks, in place, as part of the step's own graph."""
        with torch.no_grad():
            self._xm.all_reduce("sum", gradients, scale=1.0 / self.size)
