"""What a step in a fake world of ranks needs: copies of modules and batches without storage, and a DDP without buckets.

This is the only file that uses torch's fake copies.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.protocols import MicroSteps
from trainer_kit.core.tensors import map_leaves, tensors_of
from trainer_kit.core.types import Batch, Function, Nested
from trainer_kit.data.sizes import batch_size_of
from trainer_kit.planning.torch_private import (
    CHUNKS,
    MESH_CONCATENATION,
    OPTIMIZER_STEP,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    know_shapes,
    pipeline_exchange,
    pipeline_warmup,
    set_recurrent_kernels,
    unset_fake_temporarily,
)
from trainer_kit.precision.precision import Precision
from trainer_kit.strategies.ddp import DDPStrategy
from trainer_kit.strategies.process_group import (
    ProcessGroup,
    broadcast_buffers,
    join_world,
)
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.strategies.torch_private import sharding_propagator

__all__ = [
    "FakeReplicas", "Mail", "adapted", "fake_batch", "fake_mail", "fake_module", "resized_lists", "sample_dimension",
    "unpacked",
]  # fmt: skip

# Taken before `adapted` replaces it, which refers to it for real tensors.
_torch_swap_tensors: Any = torch.utils.swap_tensors


_Objects: TypeAlias = list[object]
Mail: TypeAlias = dict[int, list[_Objects]]
"""Lists of objects that wait for their receiver, by its rank in its group."""


@contextmanager
def fake_mail(box: Mail) -> Iterator[None]:
    """Inside, small objects that ranks send each other one to one are kept for the fake world of the receiver.

    Args:
        box: by the receiver's rank in its group; fake worlds that run one after the other share it.
    """

    def post(objects: _Objects, *, group_dst: int, **options: object) -> None:
        letters = box.setdefault(group_dst, [])
        letters.append(list(objects))

    def fetch(
        objects: _Objects,
        *,
        group: dist.ProcessGroup,
        **options: object,
    ) -> None:
        receiver = dist.get_rank(group)
        # A KeyError here means a stage that ran before its predecessor; `Trial.run` starts with the first one.
        letters = box[receiver]
        # In place: the caller reads its own list.
        objects[:] = letters.pop(0)

    with _replaced((dist, "send_object_list", post), (dist, "recv_object_list", fetch)):
        yield


@final
class _Chunks:
    """The chunks of a tensor that ``torch.chunk`` returns, created on access.

    Args:
        tensor: the whole tensor.
        count: how many ranks have a chunk; the last may be empty.
        dim: along which it is divided.
    """

    def __init__(self, tensor: Tensor, count: int, dim: int) -> None:
        self._tensor = tensor
        self._dim = dim
        self._rows = -(-tensor.size(dim) // count)

    def __getitem__(self, index: int) -> Tensor:
        start = index * self._rows
        remaining = self._tensor.size(self._dim) - start
        # torch pads with tensors of one dimension and no elements.
        if remaining <= 0 and index:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(remaining, self._rows))


def _once_for_equal_entries(propagate: Function) -> Function:
    """Let DTensor find the layouts of an operator on lists, such as an optimizer's, once for each kind of entry.

    An entry is what stands at one index of all lists; what an operator does with it depends on no other entry. Layers
    repeat, so hundreds of parameters are entries of a few kinds. torch's time grows with the square of their number.

    Args:
        propagate: torch's method, which takes a schema of operator and arguments.
    """

    def propagate_kinds(schema: Any) -> Any:
        if not _is_list_operator(schema):
            # Other operators have one entry: there is nothing to shorten.
            return propagate(schema)
        list_positions = [
            position
            for position, argument in enumerate(schema.args_schema)
            if isinstance(argument, (list, tuple))
        ]
        lists = [schema.args_schema[position] for position in list_positions]
        entries = list(zip(*lists, strict=True))
        kinds = {entry: number for number, entry in enumerate(dict.fromkeys(entries))}
        arguments = list(schema.args_schema)
        for index, position in enumerate(list_positions):
            list_type = type(arguments[position])
            arguments[position] = list_type(kind[index] for kind in kinds)
        short_schema = type(schema)(
            schema.op, tuple(arguments), schema.kwargs_schema, schema.schema_info
        )
        layouts = propagate(short_schema)
        # Then it names tensors by their position in the short lists.
        if layouts.needs_redistribute:
            return propagate(schema)
        if layouts.output_spec is None:
            return layouts
        specs = tuple(layouts.output_spec[kinds[entry]] for entry in entries)
        return replace(layouts, output_spec=specs)

    return propagate_kinds


def _is_list_operator(schema: Any) -> bool:
    """Whether an operator does the same with each entry of its lists, and takes numbers beside them."""
    if not schema.op.name().startswith("aten::_foreach_"):
        return False
    options = schema.kwargs_schema.values()
    return all(isinstance(value, (int, float)) for value in options)


@final
class _Exchanged:
    """A completed exchange of a pipeline; keeps its tensors until it is released, as work handles of gloo and NCCL do.

    Args:
        tensors: the tensors that were sent or received.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors

    def wait(self) -> None:
        """Return at once."""


def _step_without_reading(
    scaler: object, optimizer: Optimizer, state: object, *args: Any, **kwargs: Any
) -> object:
    """What steps an optimizer for a gradient scaler, for gradients that have no values."""
    return optimizer.step(*args, **kwargs)


def _swap_tensors(tensor: Any, converted: Any) -> None:
    """``torch.utils.swap_tensors``, which converts fake tensors in place."""
    if not (isinstance(tensor, FakeTensor) and isinstance(converted, FakeTensor)):
        _torch_swap_tensors(tensor, converted)
    elif tensor is not converted:
        tensor.data = converted.data
        tensor.fake_device = converted.fake_device


def _know_shapes(schedule: object, stages: list[Any], *args: object) -> None:
    """The vote of stages that all know the shapes which they exchange."""
    for stage in stages:
        know_shapes(stage)


@contextmanager
def adapted(*, fused: bool = False) -> Iterator[None]:
    """Inside, parts of torch work with fake tensors.

    ``module.to`` converts fake parameters in place, as it does real ones; torch would swap objects. A mesh computes
    with real numbers, which it needs, also where a fake mode is active. `fully_shard` makes this rank's part of a
    parameter only: hundreds of fake parts of each take most of the time. And an operator on lists of divided tensors
    is prepared once for equal entries, see `_once_for_equal_entries`. The stages of a pipeline do not vote whether all
    of them know the shapes that they exchange: ours do; their exchanges keep tensors alive, as real ones do. A gradient
    scaler steps without reading whether gradients are finite. An operator that fails is not logged: the plan shows the
    error.

    Args:
        fused: whether oneDNN's LSTM is used, as on a CPU; a fake one does not report what it saves for backward.
    """
    schedules, exchange_name = pipeline_exchange()
    exchange: Any = vars(schedules).get(exchange_name)
    mesh_class, concatenation = MESH_CONCATENATION
    # Not in every release of torch that is supported: `_replaced` leaves out what is missing.
    concatenate: Any = vars(mesh_class).get(concatenation)
    propagator: Any = sharding_propagator()
    recurrent: Any = torch.backends.mkldnn.enabled
    log = logging.getLogger(FakeTensorMode.__module__)

    def exchange_and_hold(
        operations: list[dist.P2POp], *args: object, **kwargs: object
    ) -> list[object]:
        handles = exchange(operations, *args, **kwargs)
        exchanged = _Exchanged([operation.tensor for operation in operations])
        return [*handles, exchanged]

    def concatenate_outside(meshes: list[DeviceMesh]) -> DeviceMesh:
        with unset_fake_temporarily():
            mesh: DeviceMesh = concatenate(meshes)
            return mesh

    replaced = _replaced(
        (*OPTIMIZER_STEP, _step_without_reading),
        (torch.utils, "swap_tensors", _swap_tensors),
        (*CHUNKS, _Chunks),
        (*pipeline_warmup(), _know_shapes),
        (*pipeline_exchange(), exchange_and_hold),
        (*MESH_CONCATENATION, staticmethod(concatenate_outside)),
    )
    log.disabled = True
    set_recurrent_kernels(fused and recurrent)
    propagator.propagate_op_sharding_non_cached = _once_for_equal_entries(
        propagator.propagate_op_sharding_non_cached
    )
    try:
        with replaced:
            yield
    finally:
        # The method of its class stands behind the attribute.
        del propagator.propagate_op_sharding_non_cached
        log.disabled = False
        set_recurrent_kernels(recurrent)


@contextmanager
def _replaced(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """Inside, attributes have other values; those that this release of torch does not have are left out."""
    originals = []
    for owner, name, replacement in replacements:
        # vars and not getattr: an inherited method must not be stored on the subclass afterwards.
        if name in vars(owner):
            originals.append((owner, name, vars(owner)[name]))
            setattr(owner, name, replacement)
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


@contextmanager
def unpacked(batch: object) -> Iterator[None]:
    """Inside, models of transformers take each sample for one sequence, unless the batch has ``position_ids``.

    They look for packed sequences in the values of positions. Where a tensor has no values they make a mask for them,
    and with a mask they repeat keys and values for all heads; positions that a model counts itself are never packed.

    Args:
        batch: as the module gets it.
    """
    masks = sys.modules.get("transformers.masking_utils")
    if masks is None or (isinstance(batch, Mapping) and "position_ids" in batch):
        yield
        return
    with _replaced((masks, "find_packed_sequence_indices", lambda position_ids: None)):
        yield


def fake_module(module: nn.Module, mode: FakeTensorMode) -> Any:
    """A deep copy whose tensors have shapes and no storage, on the CPU; shared parameters stay shared.

    Args:
        module: not changed; its tensors may be on any device, also on the meta device.
        mode: the mode that the copies belong to.

    Raises:
        ConfigurationError: the module cannot be copied, or an earlier fit has sharded it.
    """
    # deepcopy looks tensors up here first, so that shared parameters become one fake tensor.
    memo: dict[int, object] = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if hasattr(tensor, "placements"):
            raise ConfigurationError(
                "an earlier fit has sharded this module over ranks",
                found=f"{name} is a {type(tensor).__name__}",
                fix="create a new module, and plan before the first fit",
            )
        memo[id(tensor)] = _fake_copy(tensor, mode)
    trainer = vars(module).get("trainer")
    # Copying the Trainer would copy a whole run.
    if trainer is not None:
        memo[id(trainer)] = None
    try:
        with FakeCopyMode(mode):
            return copy.deepcopy(module, memo)
    except Exception as error:
        # Of any class: user code decides how a copy is made.
        raise ConfigurationError(
            f"planning runs steps on a copy of the module, and this {type(module).__name__} cannot be copied",
            found=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
            fix="plan before the first fit, and keep tensors with a graph, locks and open files out of the module",
        ) from error


def _fake_copy(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A tensor or parameter without storage, with the public attributes of this one."""
    with mode, torch.no_grad():
        # On the CPU also for a module on an accelerator: the operators that run are those of the CPU.
        copied = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu"
        )
        if isinstance(tensor, nn.Parameter):
            copied = nn.Parameter(copied, requires_grad=tensor.requires_grad)
    for name, value in vars(tensor).items():
        # Attributes of the user, such as a flag for weight decay. Private ones belong to torch and refer to the
        # original.
        if not name.startswith("_"):
            vars(copied)[name] = value
    return copied


def fake_batch(
    batch: Batch, samples: int, mode: FakeTensorMode, size: int | None = None
) -> Batch:
    """A batch of another size without storage: the dimension of its tensors that counts samples becomes ``samples``.

    That is the first dimension if the batch has tensors whose first size is the number of samples. Otherwise it is the
    only other dimension of that size (sequences first); without one, the first dimension grows in proportion (nodes of
    graphs, packed sequences, two views of each sample).

    Args:
        batch: a tree of tensors and other values; those without a dimension of samples stay.
        samples: the new size.
        mode: the mode that the copies belong to.
        size: the samples in the batch; None: the rows of its first tensor.

    Raises:
        TypeError: the batch has an object that can be moved to a device, and shows no tensors.
    """
    size = size or batch_size_of(batch)
    samples_first = _has_samples_first(batch, size)
    dimension_of = sample_dimension(batch, size)

    def resize_tensor(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        dimension = dimension_of(tensor)
        if dimension is not None:
            shape[dimension] = samples
        elif shape and not samples_first:
            # Rounded up: an empty tensor would change what the step does.
            shape[0] = -(-shape[0] * samples // size)
        with mode:
            return torch.empty(shape, dtype=tensor.dtype, device="cpu")

    def resize(value: object) -> object:
        if isinstance(value, Tensor):
            return resize_tensor(value)
        if not isinstance(value, MutableMapping):
            raise TypeError(f"a batch with a {type(value).__name__} cannot be resized")
        # A batch of transformers, which has its own method ``to``.
        copied: Any = copy.copy(value)
        for key, entry in value.items():
            copied[key] = map_leaves(entry, resize)
        return copied

    return map_leaves(resized_lists(batch, size, samples), resize)


def _has_samples_first(batch: object, size: int) -> bool:
    """Whether lists, or the first dimension of tensors, have one entry for each of ``size`` samples."""
    # A list that could be resized has one entry a sample.
    if resized_lists(batch, size, size + 1) is not batch:
        return True
    return any(tensor.shape[:1] == (size,) for tensor in tensors_of(batch))


def sample_dimension(batch: object, size: int) -> Callable[[Tensor], int | None]:
    """Find the dimension of samples of a batch's tensors; see `fake_batch`.

    Args:
        batch: the batch.
        size: its number of samples.

    Returns:
        A function that returns the dimension of a tensor that counts samples, or None.
    """
    samples_first = _has_samples_first(batch, size)

    def dimension(tensor: Tensor) -> int | None:
        shape = list(tensor.shape)
        if samples_first:
            if shape[:1] == [size]:
                return 0
            return None
        # Of two dimensions of this size nothing tells which one counts samples.
        if shape.count(size) == 1:
            return shape.index(size)
        return None

    return dimension


def resized_lists(value: Nested, size: int, samples: int) -> Nested:
    """Lists of one entry a sample, such as texts or boxes, repeated to the new size; the inner ones of nested lists."""
    # Exact types: a subclass may need other arguments to be made again.
    if type(value) is dict:
        entries = list(value.values())
        resized = [resized_lists(entry, size, samples) for entry in entries]
        if _are_same_objects(resized, entries):
            return value
        return dict(zip(value, resized, strict=True))
    if type(value) not in (list, tuple):
        return value
    resized = [resized_lists(entry, size, samples) for entry in value]
    if not _are_same_objects(resized, value):
        return type(value)(resized)
    if len(value) != size:
        return value
    tensors = list(tensors_of(value))
    # A tuple of as many tensors as each has samples.
    if tensors and all(tensor.shape[:1] == (size,) for tensor in tensors):
        return value
    return type(value)(value[index % size] for index in range(samples))


def _are_same_objects(values: Sequence[object], others: Sequence[object]) -> bool:
    return all(value is other for value, other in zip(values, others, strict=True))


_MIB: Final = 2**20
_CAP: Final = 25 * _MIB
_FIRST: Final = 1 * _MIB
"""torch's size of a bucket, and of the one that is exchanged first."""


@final
class _Bucket:
    """Gradients that are exchanged together.

    Args:
        flat: the elements of all of them.
        count: the number of gradients.
    """

    def __init__(self, flat: Tensor, count: int) -> None:
        self.flat = flat
        self._count = count
        self._missing = count

    def complete_gradient(self) -> bool:
        """Count a complete gradient; returns whether it is the last one of this backward."""
        self._missing -= 1
        if self._missing:
            return False
        # Ready for the next backward: buckets are used in each step.
        self._missing = self._count
        return True


def _bucket_groups(
    parameters: Sequence[nn.Parameter], first_size: int, size: int
) -> list[list[nn.Parameter]]:
    """The parameters of each bucket, each of one dtype; a bucket is full when it has ``size`` bytes."""
    groups: list[list[nn.Parameter]] = []
    # A bucket is one flat tensor, so it has one dtype.
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        limit = first_size
        filled = 0
        group: list[nn.Parameter] = []
        for parameter in parameters:
            if parameter.dtype != dtype:
                continue
            group.append(parameter)
            filled += parameter.numel() * parameter.element_size()
            if filled >= limit:
                groups.append(group)
                group = []
                filled = 0
                limit = size
        if group:
            groups.append(group)
    return groups


@final
class FakeReplicas(Strategy):
    """What `DDPStrategy` holds and sends, for tensors without storage.

    The reducer (torch/csrc/distributed/c10d/reducer.cpp) holds all gradients in buckets from the beginning. A backward
    that exchanges copies each gradient into its bucket when it is complete, and lets the parameter's ``grad`` be that
    part of the bucket. A backward that does not exchange leaves a separate gradient beside the bucket.

    Args:
        real: the strategy, for its options.
    """

    name = "ddp"
    engine = "ddp"

    def __init__(self, real: DDPStrategy) -> None:
        super().__init__(real.device)
        self._real = real
        self._module: nn.Module
        self._buckets: list[_Bucket] = []
        # the part of a bucket that belongs to each parameter
        self._views: dict[nn.Parameter, Tensor] = {}
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        # parameters in the order in which the first backward completed their gradients
        self._order: list[nn.Parameter] = []
        self._has_new_layout = False
        self._exchanges = False
        self._hooks: list[RemovableHandle] = []

    @property
    def gradient_divisor(self) -> int:
        """DDP averages over the ranks."""
        return self.world.size

    def start(self) -> None:
        """Join the process group."""
        self.world: ProcessGroup = join_world(self.device)
        self.data = self.losses = self.reports = self.world
        self.reporter = self.world.rank

    def stop(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def describe(self) -> str:
        """As the real strategy."""
        return self._real.describe()

    def prepare_module(
        self, module: nn.Module, manual: bool, precision: Precision
    ) -> None:
        """Create the buckets, and watch gradients."""
        module.to(self.device)
        self._module = module
        trained = [
            parameter for parameter in module.parameters() if parameter.requires_grad
        ]
        # Reversed, as DDP does: backward completes the last layers first.
        self._lay_out(list(reversed(trained)), sys.maxsize)
        for parameter in trained:
            hook = parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def _lay_out(self, parameters: list[nn.Parameter], first_size: int) -> None:
        """Make buckets for these parameters, in their order; the first of each dtype has another size."""
        cap = self._real.wrapper_options["bucket_cap_mb"]
        size = _CAP
        if cap is not None:
            size = int(cap * _MIB)
        # The reducer begins with one bucket for all, until it knows the order of gradients.
        if first_size != sys.maxsize:
            first_size = min(first_size, size)
        self._views = {}
        self._bucket_of = {}
        self._buckets = []
        for group in _bucket_groups(parameters, first_size, size):
            lengths = [parameter.numel() for parameter in group]
            flat = torch.empty(sum(lengths), dtype=group[0].dtype, device=self.device)
            bucket = _Bucket(flat, len(group))
            self._buckets.append(bucket)
            views = torch.split(flat, lengths)
            for parameter, view in zip(group, views, strict=True):
                self._views[parameter] = view.view_as(parameter)
                self._bucket_of[parameter] = bucket

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        """Copy a complete gradient into its bucket, and exchange a bucket whose gradients are all complete."""
        # Inside `no_sync` DDP leaves gradients where autograd has put them.
        if not self._exchanges or parameter.grad is None:
            return
        # DDP rebuilds its buckets once, after the first backward that exchanges.
        if not self._has_new_layout:
            self._order.append(parameter)
        view = self._views[parameter]
        with torch.no_grad():
            view.copy_(parameter.grad)
            if self._real.wrapper_options["gradient_as_bucket_view"]:
                parameter.grad = view
            bucket = self._bucket_of[parameter]
            if bucket.complete_gradient():
                dist.all_reduce(bucket.flat, group=self.world.group)

    def forward_backward(self, micro: MicroSteps) -> None:
        """Run one micro-batch after the other; the last backward exchanges gradients."""
        last = micro.count - 1
        for index in range(micro.count):
            micro.begin(index)
            # DDP sends buffers in the first forward after a backward that has synchronized gradients.
            if index == 0 and self._real.wrapper_options["broadcast_buffers"]:
                broadcast_buffers(self._module, self.world)
            self._exchanges = index == last
            loss = micro.forward(index)
            if loss is not None:
                micro.backward(index, loss)
            self._exchanges = False
            micro.end(index)
        if self._order and not self._has_new_layout:
            self._lay_out_again()

    def _lay_out_again(self) -> None:
        """Lay out the buckets a second time, in the order of the first backward."""
        self._has_new_layout = True
        self._lay_out(self._order, _FIRST)
        for parameter, view in self._views.items():
            if parameter.grad is not None:
                with torch.no_grad():
                    view.copy_(parameter.grad)
            parameter.grad = view
