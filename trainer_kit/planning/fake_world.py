"""A fake world of ranks, and copies of modules and batches without storage.

This is the only file that uses torch's fake process group and fake copies, which are private.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor, _redistribute

from trainer_kit.core.errors import ConfigurationError, StrategyError
from trainer_kit.core.protocols import MicroSteps
from trainer_kit.core.tensors import map_leaves, tensors_of
from trainer_kit.data.sizes import batch_size_of
from trainer_kit.precision.precision import Precision
from trainer_kit.strategies.ddp import DDPStrategy
from trainer_kit.strategies.process_group import (
    ProcessGroup,
    broadcast_buffers,
    join_world,
)
from trainer_kit.strategies.strategy import Strategy

__all__ = [
    "FakeReplicas", "adapted", "fake_batch", "fake_mail", "fake_module", "fake_world", "forget_layouts",
    "resized_lists", "sample_dimension", "unpacked",
]  # fmt: skip


@contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[None]:
    """Inside, torch's default process group has ``size`` ranks; this process is one of them, and nothing is sent.

    Args:
        size: the number of ranks.
        rank: of this process.

    Raises:
        StrategyError: this process has a process group already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise StrategyError(
            "planning needs a process that is not a rank of a run",
            found=f"a process group of {dist.get_world_size()} ranks",
            fix="plan in a separate process, before the first fit: trainer-kit plan train.py",
        )
    excepthook = sys.excepthook  # torch replaces it
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    forget_layouts()
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_layouts()
        sys.excepthook = excepthook


def forget_layouts() -> None:
    """Empty the caches of DTensor, which hold results of operations with the mesh that this process was in.

    Meshes of the same ranks are equal there, although each says which part is its own: the next rank of this process,
    or one forked from it, would take the part of the rank that filled the cache.
    """
    dispatcher: Any = DTensor._op_dispatcher
    dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    _redistribute._gen_transform_infos.cache_clear()
    clear = getattr(
        torch._C, "_clear_DTensor_sharding_propagator_cache", None
    )  # torch 2.9 has no cache in C++
    if clear is not None:
        clear()


@contextmanager
def fake_mail(box: dict[int, list[Any]]) -> Iterator[None]:
    """Inside, small objects that ranks send each other one to one are kept for the fake world of the receiver.

    Args:
        box: by the receiver's rank in its group; fake worlds that run one after the other share it.
    """
    torchs: Any = dist
    send, receive = torchs.send_object_list, torchs.recv_object_list

    def post(objects: list[Any], *, group_dst: int, **options: Any) -> None:
        box.setdefault(group_dst, []).append(list(objects))

    def fetch(objects: list[Any], *, group: Any, **options: Any) -> None:
        objects[:] = box[dist.get_rank(group)].pop(0)

    torchs.send_object_list, torchs.recv_object_list = post, fetch
    try:
        yield
    finally:
        torchs.send_object_list, torchs.recv_object_list = send, receive


@final
class _Parts:
    """The parts of a tensor that ``torch.chunk`` returns, made when they are asked for.

    Args:
        tensor: the whole.
        count: how many ranks have one; the last may be empty.
        dim: along which it is divided.
    """

    def __init__(self, tensor: Tensor, count: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._rows = -(-tensor.size(dim) // count)

    def __getitem__(self, index: int) -> Tensor:
        left = self._tensor.size(self._dim) - index * self._rows
        if left <= 0 and index:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, index * self._rows, min(left, self._rows))


def _once_for_equal_entries(propagate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let DTensor find the layouts of an operator on lists, such as an optimizer's, once for each kind of entry.

    An entry is what stands at one place of all lists; what an operator does with it depends on no other entry. Layers
    repeat, so hundreds of parameters are entries of a few kinds. torch's time grows with the square of their number.

    Args:
        propagate: torch's method, which takes a schema of operator and arguments.
    """

    def propagated(schema: Any) -> Any:
        numbers = all(
            isinstance(value, (int, float)) for value in schema.kwargs_schema.values()
        )
        if not schema.op.name().startswith("aten::_foreach_") or not numbers:
            return propagate(schema)
        lists = [
            at
            for at, one in enumerate(schema.args_schema)
            if isinstance(one, (list, tuple))
        ]
        columns = list(zip(*(schema.args_schema[at] for at in lists), strict=True))
        kinds = {column: number for number, column in enumerate(dict.fromkeys(columns))}
        arguments = list(schema.args_schema)
        for place, at in enumerate(lists):
            arguments[at] = type(arguments[at])(kind[place] for kind in kinds)
        found = propagate(
            type(schema)(
                schema.op, tuple(arguments), schema.kwargs_schema, schema.schema_info
            )
        )
        if found.needs_redistribute:
            return propagate(schema)
        if found.output_spec is not None:
            found = replace(
                found,
                output_spec=tuple(
                    found.output_spec[kinds[column]] for column in columns
                ),
            )
        return found

    return propagated


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
    recurrent: Any = torch.backends.mkldnn.enabled
    from torch.distributed import pipelining

    divides: Any = _fsdp_param
    joins: Any = DeviceMesh
    schedules: Any = pipelining.schedules
    stages: Any = schedules._PipelineSchedule
    plain: Any = torch.utils.swap_tensors
    exchange, concatenate = schedules._batch_p2p, vars(joins).get("_concatenate")
    scalers: Any = torch.amp.GradScaler
    log = logging.getLogger(FakeTensorMode.__module__)
    propagator: Any = DTensor._op_dispatcher.sharding_propagator

    def swap(kept: Any, converted: Any) -> None:
        if not (isinstance(kept, FakeTensor) and isinstance(converted, FakeTensor)):
            plain(kept, converted)
        elif kept is not converted:
            kept.data = converted.data
            kept.fake_device = converted.fake_device

    def know_shapes(schedule: Any, own: list[Any], *facts: Any) -> None:
        from torch.distributed.pipelining._utils import InferenceMode

        for stage in own:
            stage._inference_mode = InferenceMode.STATIC

    def hold(exchanged: list[dist.P2POp], *facts: Any, **named: Any) -> list[Any]:
        return [
            *exchange(exchanged, *facts, **named),
            _Exchanged([one.tensor for one in exchanged]),
        ]

    def concatenate_outside(meshes: list[DeviceMesh]) -> DeviceMesh:
        with unset_fake_temporarily():
            made: DeviceMesh = concatenate(meshes)
            return made

    replaced = _replaced(
        (
            scalers,
            "_maybe_opt_step",
            lambda scaler, optimizer, state, *args, **kwargs: optimizer.step(
                *args, **kwargs
            ),
        ),
        (torch.utils, "swap_tensors", swap),
        (divides, "_chunk_with_empty", _Parts),
        (stages, "_warmup_p2p", know_shapes),
        (schedules, "_batch_p2p", hold),
        (joins, "_concatenate", staticmethod(concatenate_outside)),
    )
    log.disabled = True
    torch._C._set_mkldnn_enabled(fused and recurrent)
    propagator.propagate_op_sharding_non_cached = _once_for_equal_entries(
        propagator.propagate_op_sharding_non_cached
    )
    try:
        with replaced:
            yield
    finally:
        del (
            propagator.propagate_op_sharding_non_cached
        )  # the method of its class is found again
        log.disabled = False
        torch._C._set_mkldnn_enabled(recurrent)


@contextmanager
def _replaced(*parts: tuple[Any, str, Any]) -> Iterator[None]:
    """Inside, attributes have other values; those that this release of torch does not have are left out."""
    before = [
        (owner, name, vars(owner)[name])
        for owner, name, _ in parts
        if name in vars(owner)
    ]
    for owner, name, value in parts:
        if name in vars(owner):
            setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


@contextmanager
def unpacked(batch: Any) -> Iterator[None]:
    """Inside, models of transformers take each sample for one sequence, unless the batch has ``position_ids``.

    They look for packed sequences in the values of positions. Where a tensor has no values they make a mask for them,
    and with a mask they repeat keys and values for all heads; positions that a model counts itself are never packed.

    Args:
        batch: as the module gets it.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    plain = getattr(masks, "find_packed_sequence_indices", None)
    if plain is None or (isinstance(batch, Mapping) and "position_ids" in batch):
        yield
        return
    masks.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = plain


def fake_module(module: nn.Module, mode: FakeTensorMode) -> Any:
    """A deep copy whose tensors have shapes and no storage, on the CPU; shared parameters stay shared.

    Args:
        module: not changed; its tensors may be on any device, also on the meta device.
        mode: the mode that the copies belong to.

    Raises:
        ConfigurationError: the module cannot be copied, or an earlier fit has divided it.
    """
    memo: dict[int, Any] = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if hasattr(tensor, "placements"):
            raise ConfigurationError(
                "an earlier fit has divided this module among ranks",
                found=f"{name} is a {type(tensor).__name__}",
                fix="create a new module, and plan before the first fit",
            )
        with mode, torch.no_grad():
            empty = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu"
            )
            memo[id(tensor)] = (
                nn.Parameter(empty, requires_grad=tensor.requires_grad)
                if isinstance(tensor, nn.Parameter)
                else empty
            )
        vars(memo[id(tensor)]).update(
            {
                key: value
                for key, value in vars(tensor).items()
                if not key.startswith("_")
            }
        )
    own = vars(module).get("trainer")
    if own is not None:  # copying it would copy a whole run
        memo[id(own)] = None
    try:
        with FakeCopyMode(mode):
            return copy.deepcopy(module, memo)
    except Exception as error:  # of any class: user code decides how a copy is made
        raise ConfigurationError(
            f"planning runs steps on a copy of the module, and this {type(module).__name__} cannot be copied",
            found=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
            fix="plan before the first fit, and keep tensors with a graph, locks and open files out of the module",
        ) from error


def fake_batch(
    batch: Any, samples: int, mode: FakeTensorMode, size: int | None = None
) -> Any:
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
    lists = resized_lists(batch, size, samples)
    samples_first = lists is not batch or any(
        tensor.shape[:1] == (size,) for tensor in tensors_of(batch)
    )
    dimension_of = sample_dimension(batch, size)

    def resized(value: Any) -> Any:
        if isinstance(value, Tensor):
            shape = list(value.shape)
            dimension = dimension_of(value)
            if dimension is not None:
                shape[dimension] = samples
            elif shape and not samples_first:
                shape[0] = -(-shape[0] * samples // size)
            with mode:
                return torch.empty(shape, dtype=value.dtype, device="cpu")
        if not isinstance(value, MutableMapping):
            raise TypeError(
                f"a batch with a {type(value).__name__} cannot be made in another size"
            )
        own: Any = copy.copy(
            value
        )  # a batch of transformers, which has its own method ``to``
        for key, part in value.items():
            own[key] = map_leaves(part, resized)
        return own

    return map_leaves(lists, resized)


def sample_dimension(batch: Any, size: int) -> Callable[[Tensor], int | None]:
    """Find the dimension of samples of a batch's tensors; see `fake_batch`.

    Args:
        batch: the batch.
        size: its number of samples.

    Returns:
        A function that returns the dimension of a tensor that counts samples, or None.
    """
    lists = resized_lists(batch, size, size + 1)
    samples_first = lists is not batch or any(
        tensor.shape[:1] == (size,) for tensor in tensors_of(batch)
    )

    def dimension(tensor: Tensor) -> int | None:
        shape = list(tensor.shape)
        if samples_first:
            return 0 if shape[:1] == [size] else None
        return shape.index(size) if shape.count(size) == 1 else None

    return dimension


def resized_lists(value: Any, size: int, samples: int) -> Any:
    """Lists of one entry a sample, such as texts or boxes, repeated to the new size; the inner ones of nested lists."""
    if type(value) not in (dict, list, tuple):
        return value
    old = list(value.values()) if type(value) is dict else value
    new = [resized_lists(one, size, samples) for one in old]
    if any(one is not other for one, other in zip(new, old, strict=True)):
        return (
            dict(zip(value, new, strict=True))
            if type(value) is dict
            else type(value)(new)
        )
    rows = [tensor.shape[:1] for tensor in tensors_of(value)]
    if (
        type(value) is dict
        or len(value) != size
        or (rows and all(one == (size,) for one in rows))
    ):
        return value
    return type(value)(value[index % size] for index in range(samples))


_MIB: Final = 2**20
_CAP: Final = 25 * _MIB
_FIRST: Final = 1 * _MIB
"""torch's size of a bucket, and of the one that is exchanged first."""


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
        self._views: dict[nn.Parameter, Tensor] = {}
        self._bucket_of: dict[nn.Parameter, int] = {}
        self._buckets: list[Tensor] = []
        self._waiting: list[int] = []
        self._sizes: list[int] = []
        self._order: list[nn.Parameter] = []
        self._laid_out = False
        self._exchanges = False
        self._hooks: list[Any] = []

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
        """Make the buckets, and watch gradients."""
        module.to(self.device)
        self._module = module
        trained = [
            parameter for parameter in module.parameters() if parameter.requires_grad
        ]
        self._fill(list(reversed(trained)), sys.maxsize)
        for parameter in trained:
            hook = parameter.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def _fill(self, parameters: list[nn.Parameter], first: int) -> None:
        """Lay out buckets for these parameters, in their order."""
        cap = self._real.wrapper_options["bucket_cap_mb"]
        most = _CAP if cap is None else int(cap * _MIB)
        self._views, self._bucket_of, self._buckets = {}, {}, []
        groups: list[list[nn.Parameter]] = []
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            limit, held = min(first, most) if first != sys.maxsize else first, 0
            group: list[nn.Parameter] = []
            for parameter in (one for one in parameters if one.dtype == dtype):
                group.append(parameter)
                held += parameter.numel() * parameter.element_size()
                if held >= limit:
                    groups.append(group)
                    group, held, limit = [], 0, most
            groups += [group] if group else []
        for index, group in enumerate(groups):
            bucket = torch.empty(
                sum(p.numel() for p in group), dtype=group[0].dtype, device=self.device
            )
            self._buckets.append(bucket)
            for parameter, part in zip(
                group, torch.split(bucket, [p.numel() for p in group]), strict=True
            ):
                self._views[parameter] = part.view_as(parameter)
                self._bucket_of[parameter] = index
        self._waiting = [len(group) for group in groups]
        self._sizes = list(self._waiting)

    def _ready(self, parameter: nn.Parameter) -> None:
        if not self._exchanges or parameter.grad is None:
            return
        if not self._laid_out:
            self._order.append(parameter)
        view, index = self._views[parameter], self._bucket_of[parameter]
        with torch.no_grad():
            view.copy_(parameter.grad)
            if self._real.wrapper_options["gradient_as_bucket_view"]:
                parameter.grad = view
            self._waiting[index] -= 1
            if self._waiting[index] == 0:
                dist.all_reduce(self._buckets[index], group=self.world.group)
                self._waiting[index] = self._sizes[index]

    def forward_backward(self, micro: MicroSteps) -> None:
        """Run one micro-batch after the other; the last backward exchanges gradients."""
        last = micro.count - 1
        for index in range(micro.count):
            micro.begin(index)
            if index == 0 and self._real.wrapper_options["broadcast_buffers"]:
                broadcast_buffers(self._module, self.world)
            self._exchanges = index == last
            loss = micro.forward(index)
            if loss is not None:
                micro.backward(index, loss)
            self._exchanges = False
            micro.end(index)
        if (
            self._order and not self._laid_out
        ):  # buckets are laid out again, once, in the order of the first backward
            self._laid_out = True
            self._fill(self._order, _FIRST)
            for parameter, view in self._views.items():
                if parameter.grad is not None:
                    with torch.no_grad():
                        view.copy_(parameter.grad)
                parameter.grad = view
