"""The processes of a run: ranks, ordering, and calls that only some processes make."""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from types import MappingProxyType
from typing import Any, ClassVar, Final, TypeVar, final
from weakref import WeakSet

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import ProcessGroup

from trainer_kit.accelerator.collectives import Collectives
from trainer_kit.accelerator.generators import synchronize
from trainer_kit.accelerator.joint_calls import JointCalls
from trainer_kit.build import choose_strategy, launched_on_xla
from trainer_kit.core.configuration_sources import choose, is_true
from trainer_kit.core.environment import Environment, pick_device
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.protocols import Group
from trainer_kit.core.types import Function, Nested
from trainer_kit.launch import report_errors
from trainer_kit.launch.options import several_on
from trainer_kit.options.parallelism import ParallelismConfig
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.strategies.transforms.context import dividing

__all__ = [
    "AcceleratorProcesses",
    "DistributedType",
    "ParallelRanks",
    "PartialState",
    "Processes",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "pad_across_processes",
    "reduce",
    "synchronize_rng_states",
]

_F = TypeVar("_F", bound=Function)
_T = TypeVar("_T")


class DistributedType(str, Enum):
    """The kind of distributed run, by Hugging Face Accelerate's names.

    Example:
        >>> DistributedType.NO == "NO"
        True
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_XPU = "MULTI_XPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_NEURON = "MULTI_NEURON"
    FSDP = "FSDP"
    DEEPSPEED = "DEEPSPEED"
    MEGATRON_LM = "MEGATRON_LM"
    XLA = "XLA"


_BY_ENGINE: Final = {
    "deepspeed": DistributedType.DEEPSPEED,
    "fsdp": DistributedType.FSDP,
    "megatron": DistributedType.MEGATRON_LM,
    "xla": DistributedType.XLA,
}


class Processes(ABC):
    """The processes of a run, from the view of this process.

    Attributes:
        environment: the launcher's description of the processes.
        num_processes: the number of processes.
        process_index: the rank of this process.
        local_process_index: its rank on its machine.
        is_main_process: whether it is the first process.
        is_local_main_process: whether it is the first process of its machine.
        is_last_process: whether it is the last process.
        use_distributed: whether there are several processes.
        fork_launched: whether a launcher of notebooks has forked this process; it sets ``FORK_LAUNCHED=1``.
    """

    _engine: str | None = None
    """The strategy's engine."""

    def __init__(
        self, environment: Environment, rank: int, size: int, local_rank: int
    ) -> None:
        self.environment = environment
        self.num_processes = size
        self.process_index = rank
        self.local_process_index = local_rank
        self.is_main_process = rank == 0
        self.is_local_main_process = local_rank == 0
        self.is_last_process = rank == size - 1
        self.use_distributed = size > 1
        self.fork_launched = is_true(os.environ.get("FORK_LAUNCHED", "0"))

    @property
    @abstractmethod
    def world(self) -> Group:
        """The group of all processes; a `PartialState` joins it at the first access."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of this process."""

    @property
    @abstractmethod
    def collectives(self) -> Collectives:
        """The collective calls of these processes."""

    @property
    def distributed_type(self) -> DistributedType:
        """The engine, if Accelerate has a name for it; else the kind of distributed run."""
        # The engine first, as in Accelerate: scripts ask whether it is FSDP or DEEPSPEED before they gather weights.
        if self._engine in _BY_ENGINE:
            return _BY_ENGINE[self._engine]
        if not self.use_distributed:
            return DistributedType.NO
        return DistributedType(several_on(self.device.type))

    def __repr__(self) -> str:
        """Return the text that Accelerate prints for its state."""
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return (
            f"Distributed environment: {self.distributed_type!s}{backend}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )

    @property
    def backend(self) -> str | None:
        """The backend of the process group: "gloo", "nccl", …; None for a single process."""
        if not self.use_distributed:
            return None
        # Processes of torch_xla have no process group.
        return str(dist.get_backend()) if dist.is_initialized() else self.device.type

    @property
    def default_device(self) -> torch.device:
        """The device of this process."""
        return self.device

    def set_device(self) -> None:
        """Accepted, without effect: the device is chosen when the process starts."""

    def destroy_process_group(self, group: ProcessGroup | None = None) -> None:
        """Leave a process group; without process groups this does nothing.

        Args:
            group: a group of ``torch.distributed``; None: the group of all processes.
        """
        if dist.is_initialized():
            dist.destroy_process_group(group)

    def wait_for_everyone(self) -> None:
        """Wait until every process makes this call."""
        self.collectives.barrier()

    def print(self, *values: object, **options: Any) -> None:
        """Print once on each machine.

        Args:
            values: the objects to print.
            options: of ``print``: ``sep``, ``end``, ``file``, ``flush``.
        """
        if self.is_local_main_process:
            print(*values, **options)

    def print_everywhere(self, text: str) -> None:
        """Print on every process, with its rank."""
        print(f"[process {self.process_index}] {text}", flush=True)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the block on the main process first, then on all others."""
        with self._in_turns(self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Run the block on the first process of each machine first, then on the others."""
        with self._in_turns(self.is_local_main_process):
            yield

    @contextmanager
    def _in_turns(self, goes_first: bool) -> Iterator[None]:
        # One barrier for each process: the others wait here until the first ones have left their block.
        if not goes_first:
            self.world.barrier()
        try:
            yield
        finally:
            # Also after an exception, because the others wait.
            if goes_first:
                self.world.barrier()

    def on_main_process(self, function: _F) -> _F:
        """Decorator: only the main process calls ``function``.

        Args:
            function: the function to decorate; a process that does not call it gets None in place of its result.
        """
        return _call_if(self.is_main_process, function)

    def on_local_main_process(self, function: _F) -> _F:
        """Decorator: only the first process of each machine calls ``function``.

        Args:
            function: the function to decorate; a process that does not call it gets None in place of its result.
        """
        return _call_if(self.is_local_main_process, function)

    def on_last_process(self, function: _F) -> _F:
        """Decorator: only the last process calls ``function``.

        Args:
            function: the function to decorate; a process that does not call it gets None in place of its result.
        """
        return _call_if(self.is_last_process, function)

    def on_process(
        self, function: _F | None = None, process_index: int | None = None
    ) -> Any:
        """Decorator: only process ``process_index`` calls ``function``.

        Args:
            function: the function to decorate; a process that does not call it gets None in place of its result. None
                returns the decorator: ``@state.on_process(process_index=1)``.
            process_index: the rank of the process, from 0; None: no process.
        """
        decorate = functools.partial(_call_if, self.process_index == process_index)
        return decorate if function is None else decorate(function)

    def on_local_process(
        self, function: _F | None = None, local_process_index: int | None = None
    ) -> Any:
        """Decorator: only process ``local_process_index`` of each machine calls ``function``.

        Args:
            function: the function to decorate; a process that does not call it gets None in place of its result. None
                returns the decorator: ``@state.on_local_process(local_process_index=1)``.
            local_process_index: the rank of the process on its machine, from 0; None: no process.
        """
        decorate = functools.partial(
            _call_if, self.local_process_index == local_process_index
        )
        return decorate if function is None else decorate(function)

    @contextmanager
    def split_between_processes(
        self, inputs: Nested, apply_padding: bool = False
    ) -> Iterator[Nested]:
        """Yield this process's part of a list, a tuple, a tensor, or a dict of these; the first processes get one more.

        Args:
            inputs: the data to divide; the values of a dict have equal lengths.
            apply_padding: repeat the last element, so that all parts have equal lengths.

        Raises:
            ConfigurationError: the values of a dict differ in length.
        """
        length = len(inputs)
        if isinstance(inputs, dict):
            lengths = {key: len(value) for key, value in inputs.items()}
            if len(set(lengths.values())) > 1:
                raise ConfigurationError(
                    "values that are split together must have the same length",
                    found=f"lengths {lengths}",
                )
            length = next(iter(lengths.values()), 0)
        shorter_length, longer_shares = divmod(length, self.num_processes)
        rank = self.process_index
        start = rank * shorter_length + min(rank, longer_shares)
        stop = start + shorter_length + (rank < longer_shares)
        # The first processes get one more.
        padding = int(longer_shares > 0 and rank >= longer_shares)
        if not apply_padding or not length:
            padding = 0

        def share_of(values: Nested) -> Nested:
            share = values[start:stop]
            if not padding:
                return share
            if isinstance(values, Tensor):
                return torch.cat([share, values[-1:]])
            # A list or a tuple, as the script passed it.
            return type(share)([*share, values[-1]])

        if isinstance(inputs, dict):
            yield {key: share_of(value) for key, value in inputs.items()}
        else:
            yield share_of(inputs)


def _call_if(condition: bool, function: _F) -> _F:
    @functools.wraps(function)
    def call(*arguments: object, **options: object) -> object:
        return function(*arguments, **options) if condition else None

    # `wraps` keeps the signature, which the type of the closure does not show.
    return call  # type: ignore[return-value]


_ACCELERATOR_COLLECTIVES: Final[WeakSet[Collectives]] = WeakSet()
"""Collectives of Accelerators; if one of these is in debug mode, the functions of this module are too."""


@final
class AcceleratorProcesses(Processes):
    """The processes of a started strategy.

    Args:
        environment: the launcher's description of the processes.
        strategy: a started strategy.
        debug: compare the calls of all processes before each exchange.

    Attributes:
        calls: counts the collective calls.
    """

    def __init__(
        self, environment: Environment, strategy: Strategy, debug: bool
    ) -> None:
        rank = strategy.world.rank
        size = strategy.world.size
        launched = environment.launched and size > 1
        # A launched process whose strategy is for one process is alone in its world, and so the first one of its
        # machine.
        local_rank = rank
        if launched:
            local_rank = environment.local_rank
        super().__init__(environment, rank, size, local_rank)
        self._strategy = strategy
        self._engine = strategy.engine
        self.spans_world = strategy.spans_world
        self.calls = JointCalls(size)
        self._collectives = Collectives(
            strategy.world, strategy.data, debug, self.calls
        )
        _ACCELERATOR_COLLECTIVES.add(self._collectives)

    @property
    def world(self) -> Group:
        return self._strategy.world

    @property
    def device(self) -> torch.device:
        return self._strategy.device

    @property
    def collectives(self) -> Collectives:
        return self._collectives


@final
class PartialState(Processes):
    """The process and its rank in the launch, read from the environment; a script may create any number of these.

    Args:
        cpu: compute on the CPU even if the machine has an accelerator.
        **options: Accelerate's other options, such as ``backend`` and ``timeout``: accepted, without effect.

    Attributes:
        num_processes: the number of processes.
        process_index: the rank of this process.
        local_process_index: its rank on its machine.
        is_main_process: whether it is the first process.
        is_local_main_process: whether it is the first process of its machine.
        is_last_process: whether it is the last process.
        use_distributed: whether there are several processes.
        fork_launched: whether a launcher of notebooks has forked this process.

    Example:
        >>> state = PartialState(cpu=True)
        >>> state.num_processes, state.is_main_process, state.device
        (1, True, device(type='cpu'))
    """

    initialized = True
    deepspeed_plugin = None
    deepspeed_plugins: Mapping[str, object] = MappingProxyType({})
    _debug: ClassVar[bool | None] = None

    @staticmethod
    def _reset_state() -> None:
        """Accepted, without effect: a `PartialState` shares no state with later ones."""

    def __init__(self, cpu: bool = False, **options: object) -> None:
        environment = Environment.detect()
        size = environment.world_size
        local_rank = environment.local_rank if size > 1 else 0
        super().__init__(environment, environment.rank, size, local_rank)
        self._accelerator = "cpu" if cpu else "auto"
        self._strategy: Strategy | None = None

    @property
    def debug(self) -> bool:
        """Whether processes compare collectives before the exchange; the setter applies to every `PartialState`."""
        # What the script has set counts most, then the Accelerators, then the environment.
        if PartialState._debug is not None:
            return PartialState._debug
        if any(collectives.debug for collectives in _ACCELERATOR_COLLECTIVES):
            return True
        return is_true(choose("debug", None, False).value)

    @debug.setter
    def debug(self, debug: bool) -> None:
        PartialState._debug = debug

    @property
    def world(self) -> Group:
        """The group of all processes; the first access joins it, and waits for the others."""
        return self._join().world

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        # Only the strategy knows XLA's device; torch does not.
        if self._accelerator == "auto" and launched_on_xla():
            return self._join().device
        # Without `_join`: it starts a process group, and would wait for all processes.
        return pick_device(self._accelerator, self.environment.local_rank)

    @property
    def collectives(self) -> Collectives:
        # Created at each access, because `debug` may have changed since the last one.
        return Collectives(self.world, debug=self.debug)

    def _join(self) -> Strategy:
        """Start the strategy at the first call, and return it."""
        if self._strategy is None:
            if self.environment.launched:
                report_errors()
            strategy, *_ = choose_strategy(
                "auto", self._accelerator, "auto", 1, self.environment
            )
            strategy.start()
            self._strategy = strategy
        return self._strategy


def gather(tensor: Nested) -> Nested:
    """Concatenate the nested tensors of all processes along the first dimension, in rank order; collective call.

    Args:
        tensor: a tensor, or tensors in nested lists, tuples and dicts; shapes, dtypes and nesting are the same on every
            process. A scalar counts as a vector with one entry.

    Returns:
        The same nesting; a tensor of shape ``(n, ...)`` becomes one of shape ``(processes * n, ...)`` on every process.

    Raises:
        ConfigurationError: a leaf is not a tensor; `gather_object` takes other values.
        RankError: on every process, if shapes, dtypes or the nesting differ.

    Example:
        >>> gather({"loss": torch.tensor(0.5), "rows": torch.ones(2, 3)})["loss"]  # one process
        tensor([0.5000])
    """
    return PartialState().collectives.gather(tensor)


def gather_object(object: Nested) -> list[Any]:
    """Gather small values from all processes, in rank order; collective call.

    Args:
        object: a value that can be pickled; it is copied through host memory.

    Returns:
        A list: lists and tuples are concatenated, other values are its items, one for each process.

    Example:
        >>> gather_object(["a", "b"]), gather_object({"rank": 0})  # one process
        (['a', 'b'], [{'rank': 0}])
    """
    return PartialState().collectives.gather_object(object)


def reduce(tensor: Nested, reduction: str = "mean", scale: float = 1.0) -> Nested:
    """Reduce nested tensors over the processes; the arguments do not change; collective call.

    Args:
        tensor: a tensor, or tensors in nested lists, tuples and dicts; shapes, dtypes and nesting are the same on every
            process.
        reduction: ``"sum"``, ``"mean"`` (the mean of integers is a float), ``"max"``, ``"min"``, or ``"none"``: return
            the tensors unchanged.
        scale: a factor for the result; ``"none"`` ignores it.

    Returns:
        The same nesting, with tensors of the same shapes and equal values on every process.

    Raises:
        ConfigurationError: an unknown reduction.
        RankError: on every process, if shapes, dtypes or the nesting differ.

    Example:
        >>> reduce(torch.tensor([1, 2])), reduce([torch.ones(2)], "sum", scale=0.5)  # one process
        (tensor([1., 2.]), [tensor([0.5000, 0.5000])])
    """
    return PartialState().collectives.reduce(tensor, reduction, scale)


def broadcast(tensor: Nested, from_process: int = 0) -> Nested:
    """Send the nested tensors of one process to every process; collective call.

    Args:
        tensor: a tensor, or tensors in nested lists, tuples and dicts; shapes, dtypes and nesting are the same on every
            process. The arguments do not change.
        from_process: the rank whose values are sent.

    Returns:
        The same nesting, with the values of ``from_process``.

    Raises:
        ConfigurationError: a leaf is not a tensor; `broadcast_object_list` takes other values.
        RankError: on every process, if shapes, dtypes or the nesting differ.

    Example:
        >>> broadcast((torch.tensor([3, 4]),))  # one process
        (tensor([3, 4]),)
    """
    return PartialState().collectives.broadcast(tensor, from_process)


def broadcast_object_list(object_list: list[_T], from_process: int = 0) -> list[_T]:
    """Replace a list in place with the values of one process; collective call.

    Args:
        object_list: values that can be pickled; only the list of ``from_process`` is sent.
        from_process: the rank whose values are sent.

    Returns:
        ``object_list``.

    Example:
        >>> names = ["run-7", 3]
        >>> broadcast_object_list(names) is names  # one process
        True
    """
    return PartialState().collectives.broadcast_object_list(object_list, from_process)


def pad_across_processes(
    tensor: Nested, dim: int = 0, pad_index: float = 0, pad_first: bool = False
) -> Nested:
    """Pad nested tensors along ``dim`` to the largest length on any process, so that `gather` takes them.

    Every process must make this call.

    Args:
        tensor: a tensor, or tensors in nested lists, tuples and dicts. Processes may differ in the length of ``dim``;
            other dimensions are compared by `gather`.
        dim: the dimension; tensors without this dimension do not change.
        pad_index: the value of the padding, in the dtype of the tensor.
        pad_first: pad at the beginning.

    Returns:
        The same nesting; tensors that are long enough are not copied.

    Raises:
        ConfigurationError: a leaf is not a tensor.
        RankError: on every process, if the nesting or numbers of dimensions differ.

    Example:
        >>> pad_across_processes(torch.ones(2, 3), dim=1).shape  # one process: no length differs
        torch.Size([2, 3])
    """
    return PartialState().collectives.pad_across_processes(
        tensor, dim, pad_index, pad_first
    )


def synchronize_rng_states(
    rng_types: Sequence[object] | None, generator: torch.Generator | None = None
) -> None:
    """Copy the states of the main process's random generators to every process; collective call.

    Args:
        rng_types: any of ``"torch"``, ``"cuda"``, ``"xla"``, ``"python"``, ``"numpy"`` and ``"generator"``; None: no
            states.
        generator: the generator whose state ``"generator"`` copies.

    Raises:
        ConfigurationError: a word is unknown.

    Example:
        >>> synchronize_rng_states(["torch", "numpy"])
    """
    state = PartialState()
    with state.collectives.during("synchronize_rng_states"):
        synchronize(state.world, rng_types, generator, state.device)


@final
class ParallelRanks:
    """The ranks of this process on the mesh axes.

    Args:
        strategy: the strategy, which may have a mesh.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        # Whether attention was checked in a step with sharded sequences.
        self._checked = False

    @property
    def config(self) -> ParallelismConfig | None:
        """The sizes of the mesh axes; None for data parallelism alone."""
        if not self._divides_more_than_data:
            return None
        mesh: Any = self._strategy.mesh
        sizes = {
            f"{axis}_size": size
            for axis, size in zip(mesh.mesh_dim_names, mesh.shape, strict=True)
        }
        return ParallelismConfig(**sizes, plan=self._strategy.plan)

    @property
    def data_rank(self) -> int:
        """The data shard that this process reads; on a mesh the index of its model replica."""
        if self._divides_more_than_data:
            return self.rank("dp_replicate")
        return self._strategy.data.rank

    def rank(self, axis: str) -> int:
        """Return the rank of this process on an axis; 0 if the mesh lacks this axis."""
        mesh = self._strategy.mesh
        if mesh is None or axis not in (mesh.mesh_dim_names or ()):
            return 0
        return mesh.get_local_rank(axis)

    @property
    def _divides_more_than_data(self) -> bool:
        """Whether the mesh has the axes of a `ParallelismConfig`."""
        mesh = self._strategy.mesh
        # The mesh of a `ParallelismConfig` has all axes, also those of size 1; that of FSDP alone has data axes only.
        return mesh is not None and "tp" in (mesh.mesh_dim_names or ())

    @contextmanager
    def divided_sequences(
        self,
        buffers: Sequence[Tensor],
        dims: Sequence[int],
        not_restored: Collection[Tensor],
    ) -> Iterator[None]:
        """Shard buffers along the context axis in this context; without such an axis, do nothing."""
        mesh = self._strategy.mesh
        if mesh is None or not self._divides_more_than_data or mesh["cp"].size() == 1:
            yield
            return
        checks_attention = not self._checked
        self._checked = True
        with dividing(
            mesh["cp"], buffers, dims, not_restored, checked=checks_attention
        ):
            yield
