"""Context parallel: each rank computes with a part of every sequence, and attention covers the whole sequence."""

from __future__ import annotations

import copy
from collections.abc import (
    Callable,
    Collection,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Final, final

import torch
import torch.distributed as dist
from lightning_utilities.core.overrides import is_overridden
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from trainer_kit.core.display import plural
from trainer_kit.core.errors import StrategyError
from trainer_kit.core.module import TrainModule
from trainer_kit.core.parallel import ContextPlan, ParallelPlan
from trainer_kit.core.tensors import map_tensors, sequence_like
from trainer_kit.core.types import Batch, Function, Keywords, SavedState
from trainer_kit.strategies.signatures import StepMethod
from trainer_kit.strategies.torch_private import (
    all_gather_with_gradients,
    all_to_all_with_gradients,
    ring_attention,
)
from trainer_kit.strategies.transforms.transform import Transform

__all__ = [
    "ContextParallel",
    "RingAttention",
    "dividing",
    "has_ring",
    "ring_attention",
    "with_positions",
]


_TORCH_ATTENTION: Final[Callable[..., Tensor]] = F.scaled_dot_product_attention
_RING_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)
_TORCH_CROSS_ENTROPY: Final[Callable[..., Tensor]] = F.cross_entropy
_DOCUMENT_IDS: Final = "document_ids"
"""The key under which a batch of packed rows has the documents of its tokens; see `trainer_kit.data.pack`."""


@final
class ContextParallel(Transform):
    """Splits every sequence over the ranks; ``scaled_dot_product_attention`` still covers the whole sequence.

    torch's `ring_attention` computes it if the device and the call support it. Otherwise, and for causal attention,
    where a ring gives the last rank most of the work: if the axis divides the heads, ranks exchange tokens for heads
    (DeepSpeed-Ulysses, Jacobs et al., 2023); else each rank gathers all keys and values. All other layers compute with
    this rank's tokens only.

    Args:
        plan: the sequence dimensions of a batch.
        weighed: whether the loop weights each part by its targets. If not, all parts have the same weight, and a mean
            is over the targets of the whole sequence.

    Attributes:
        ring: torch's ring attention; None if the device has none.
    """

    axis = "cp"
    divides_batch = True

    def __init__(self, plan: ContextPlan, weighed: bool = False) -> None:
        self.plan = plan
        self.weighed = weighed
        self.ring: RingAttention | None = None
        self._ring_attention: Callable[..., Tensor] | None = None
        self.intercepted_calls = 0
        # Whether the rows of the current batch have several documents.
        self._packed = False

    @classmethod
    def planned(cls, module: nn.Module, plan: ParallelPlan) -> ContextParallel:
        """Create the transform from a module's plan.

        Raises:
            StrategyError: the plan does not name the dimension of the sequence.
        """
        if plan.context is None:
            raise StrategyError(
                f"{type(module).__name__} does not declare the sequence dimension of its batches",
                found="no ParallelPlan(context=...)",
                fix="define configure_parallel(self, mesh): return ParallelPlan(context=ContextPlan(dims=1)), or "
                "MeshStrategy(cp=..., plan=...)",
            )
        return cls(
            plan.context,
            isinstance(module, TrainModule)
            and is_overridden("loss_weight", module, TrainModule),
        )

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Store the axis. The module itself does not change: `attending` replaces the attention function.

        Args:
            module: the whole module.
            mesh: the context axis.
        """
        self.mesh = mesh
        self.group = mesh.get_group()
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()
        self.ring = ring_attention if has_ring(mesh.device_type) else None

    def bind_evaluation(self, step: StepMethod, whole: bool) -> StepMethod:
        """Run the step inside `attending`; a batch that is not split only gets its positions."""
        if self.size == 1:
            return step
        # Every rank has full sequences of a batch that is not split, and computes the same.
        if not whole:
            return self.attending()(step)
        return lambda batch, *arguments: step(
            with_positions(self.plan, batch), *arguments
        )

    def computing(self, first: bool) -> AbstractContextManager[object]:
        """Return the context `attending`, with its check in the first window."""
        if self.size == 1:
            return nullcontext()
        return self.attending(checked=first)

    def shard_batch(self, batch: Batch) -> Batch:
        """Return this rank's part of a batch; its tensors are views.

        Raises:
            StrategyError: a sequence that cannot be split evenly, or packed rows whose document ids would be split.
        """
        dims = self.plan.dims
        if self.size == 1:
            return with_positions(self.plan, batch)
        self._packed = isinstance(batch, Mapping) and _DOCUMENT_IDS in batch
        if self._packed and (isinstance(dims, int) or _DOCUMENT_IDS in dims):
            raise StrategyError(
                "packed documents under context parallelism need their document ids whole: a rank's part does not"
                " show which keys of the other ranks belong to its documents",
                found=f"ContextPlan(dims={dims!r})",
                fix='ContextPlan(dims={"input_ids": 1, "labels": 1, "position_ids": 1}), and '
                "document_mask(batch['document_ids'], part=rank, parts=size) of the context axis",
            )
        if isinstance(dims, int):
            shard = map_tensors(batch, lambda tensor: self.part(tensor, dims))
            return with_positions(self.plan, shard, self.rank)
        if isinstance(batch, Mapping):
            keys = [key for key in dims if key in batch]
            parts = {key: self.part(batch[key], dims[key]) for key in keys}
            return with_positions(self.plan, _with_values(batch, parts), self.rank)
        values = list(batch)
        for index, value in enumerate(values):
            if index in dims:
                values[index] = self.part(value, dims[index])
        return sequence_like(batch, values)

    def part(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part along one dimension, as a view; the whole tensor if it lacks that dimension.

        Raises:
            StrategyError: a sequence that cannot be split evenly.
        """
        if tensor.dim() <= dim:
            return tensor
        length, remainder = divmod(tensor.shape[dim], self.size)
        if remainder:
            raise StrategyError(
                "context parallelism needs sequence lengths that are divisible by the context axis",
                found=f"length {tensor.shape[dim]} in dimension {dim}, cp={self.size}",
                fix=f"pad sequences to a multiple of {self.size}, or name the dimensions: ContextPlan(dims={{...}})",
            )
        return tensor.narrow(dim, self.rank * length, length)

    @contextmanager
    def attending(self, checked: bool = False) -> Iterator[None]:
        """A context in which attention is over the whole sequence.

        Args:
            checked: check that every attention call is intercepted; for the first step.

        Raises:
            StrategyError: an attention call was not intercepted, or there was none.
        """
        fast = torch.backends.mha.get_fastpath_enabled()
        # The fast path computes attention without this function.
        torch.backends.mha.set_fastpath_enabled(False)
        # A mode costs each operation, so only the first window runs inside it.
        detector = _BypassDetector(self)
        self.intercepted_calls = 0
        with ExitStack() as stack:
            stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
            self._ring_attention = None
            if self.ring is not None:
                self._ring_attention = stack.enter_context(self.ring(self.mesh))
            # Restore the ring's functions; leaving the ring then restores torch's.
            ring_function = F.scaled_dot_product_attention
            stack.callback(_patch_functions, ring_function, _TORCH_CROSS_ENTROPY)
            _patch_functions(self._attention, self._cross_entropy)
            if checked:
                stack.enter_context(detector)
            yield
        if checked:
            self._check_intercepted(detector.found_bypass)

    def _check_intercepted(self, found_bypass: bool) -> None:
        if self.intercepted_calls and not found_bypass:
            return
        symptom = "no call of scaled_dot_product_attention"
        if found_bypass:
            symptom = "scaled_dot_product_attention under another name"
        raise StrategyError(
            "context parallelism cannot intercept the attention of this model",
            found=symptom,
            fix="call torch.nn.functional.scaled_dot_product_attention by that name (Hugging Face: "
            'attn_implementation="sdpa"), or use cp=1',
        )

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Replaces torch's function; arguments are (batch, heads, tokens, width), with this rank's tokens."""
        # `_BypassDetector` compares it with the calls of torch's function.
        self.intercepted_calls += 1
        # A model that ignores the ids, or derives a mask from the positions of its part, would mix documents.
        if self._packed and attn_mask is None:
            raise StrategyError(
                "under context parallelism, attention of packed documents needs a mask over all keys of the row",
                found="document_ids in the batch, and a call of scaled_dot_product_attention without attn_mask",
                fix="pass attn_mask=document_mask(batch['document_ids'], part=rank, parts=size) with rank and size of "
                'the context axis; or cp=1; or pack(ids="row"), which lets the documents of a row see each other',
            )
        options: Keywords = {
            "dropout_p": dropout_p,
            "scale": scale,
            "enable_gqa": enable_gqa,
        }
        splits_heads = query.shape[1] % self.size == 0 and key.shape[1] % self.size == 0
        ring_computes_it = (
            attn_mask is None and not dropout_p and query.dtype in _RING_DTYPES
        )
        # A causal ring gives the last rank most of the work: use it only if ranks cannot exchange heads.
        ring_fits = not is_causal or (
            not splits_heads and query.shape[2] == key.shape[2]
        )
        if self._ring_attention is not None and ring_computes_it and ring_fits:
            if enable_gqa:
                key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
                value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
            return self._ring_attention(
                query, key, value, is_causal=is_causal, scale=scale
            )
        if attn_mask is None and splits_heads:
            query = self._exchange_tokens_for_heads(query)
            key = self._exchange_tokens_for_heads(key)
            value = self._exchange_tokens_for_heads(value)
            attended = _TORCH_ATTENTION(
                query, key, value, is_causal=is_causal, **options
            )
            return self._exchange_heads_for_tokens(attended)
        # Keys and values of all ranks: neither a ring nor an exchange of heads fits.
        mask = attn_mask
        if is_causal:
            mask = self._causal_mask(query, key)
        if mask is not None and mask.shape[-1] != key.shape[-2] * self.size:
            raise StrategyError(
                "an attention mask under context parallelism must cover all keys of the sequence",
                found=f"{tuple(mask.shape)} for {key.shape[-2]} keys on each of {plural(self.size, 'rank')}",
                fix="use is_causal=True, or a mask of shape (..., this rank's queries, all keys)",
            )
        key = self._all_gather(key)
        value = self._all_gather(value)
        return _TORCH_ATTENTION(query, key, value, attn_mask=mask, **options)

    def _exchange_tokens_for_heads(self, tokens: Tensor) -> Tensor:
        """Exchange some tokens of all heads for all tokens of some heads."""
        batch, heads, length, width = tokens.shape
        # The first dimension is the rank to which a slice is sent; afterwards that from which it came.
        heads_per_rank = heads // self.size
        by_rank = tokens.reshape(batch, self.size, heads_per_rank, length, width)
        received = self._all_to_all(by_rank.permute(1, 0, 2, 3, 4))
        in_order = received.permute(1, 2, 0, 3, 4)
        return in_order.reshape(batch, heads_per_rank, self.size * length, width)

    def _exchange_heads_for_tokens(self, heads: Tensor) -> Tensor:
        """The inverse of `_exchange_tokens_for_heads`."""
        batch, heads_per_rank, length, width = heads.shape
        length_per_rank = length // self.size
        by_rank = heads.reshape(
            batch, heads_per_rank, self.size, length_per_rank, width
        )
        received = self._all_to_all(by_rank.permute(2, 0, 1, 3, 4))
        in_order = received.permute(1, 0, 2, 3, 4)
        return in_order.reshape(
            batch, heads_per_rank * self.size, length_per_rank, width
        )

    def _all_to_all(self, by_rank: Tensor) -> Tensor:
        # gloo sends wrong elements if strides differ.
        received: Tensor = all_to_all_with_gradients(
            by_rank.contiguous(), None, None, self.group
        )
        return received

    def _all_gather(self, tokens: Tensor) -> Tensor:
        gathered: Tensor = all_gather_with_gradients(
            tokens.contiguous(), tokens.dim() - 2, self.group
        )
        return gathered

    def _causal_mask(self, query: Tensor, key: Tensor) -> Tensor:
        """The causal mask of this rank's queries over the keys of all ranks."""
        queries = query.shape[-2]
        first = self.rank * queries
        query_positions = torch.arange(first, first + queries, device=query.device)
        key_positions = torch.arange(key.shape[-2] * self.size, device=query.device)
        return key_positions[None, :] <= query_positions[:, None]

    def _cross_entropy(
        self,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Replaces torch's function; its mean handles parts of padded sequences that have few targets, or none."""
        options: Keywords = {
            "weight": weight,
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
        }
        # A sum needs no division; soft targets have no ignored index.
        is_deprecated_call = size_average is not None or reduce is not None
        if reduction != "mean" or is_deprecated_call or target.is_floating_point():
            return _TORCH_CROSS_ENTROPY(
                input,
                target,
                size_average=size_average,
                reduce=reduce,
                reduction=reduction,
                **options,
            )
        # torch divides by the weights of this rank's targets; of a part of padding alone that is zero.
        target_weights = target != ignore_index
        if weight is not None:
            target_weights = weight[target.where(target_weights, 0)] * target_weights
        total = target_weights.sum().to(input.dtype)
        if not self.weighed:
            # All parts have the same weight: divide by the mean number of targets of a part.
            total = total.detach().clone()
            dist.all_reduce(total, group=self.group)
            total /= self.size
        total = torch.where(total == 0, torch.ones_like(total), total)
        return _TORCH_CROSS_ENTROPY(input, target, reduction="sum", **options) / total


def _patch_functions(
    attention: Callable[..., Tensor], cross_entropy: Callable[..., Tensor]
) -> None:
    F.scaled_dot_product_attention = attention
    F.cross_entropy = cross_entropy


@contextmanager
def dividing(
    mesh: DeviceMesh,
    buffers: Sequence[Tensor],
    dims: Sequence[int],
    not_restored: Collection[Tensor] = (),
    checked: bool = False,
) -> Iterator[None]:
    """A context in which tensors hold, in place, this rank's part, and attention is over the whole sequence.

    Args:
        mesh: the context axis.
        buffers: the tensors with a sequence dimension.
        dims: the sequence dimension of each tensor.
        not_restored: tensors that are not restored afterwards.
        checked: check that every attention call is intercepted; for the first step.

    Raises:
        StrategyError: a sequence cannot be split evenly, or attention was not intercepted.
    """
    if len(buffers) != len(dims):
        raise StrategyError(
            "each buffer of a context needs a sequence dimension",
            found=f"{len(buffers)} buffers, {len(dims)} dimensions",
            fix="pass one dimension for each buffer: buffers=[x, y], buffer_seq_dims=[1, 1]",
        )
    context = ContextParallel(ContextPlan())
    context.apply(nn.Module(), mesh)
    # All shards are computed first: an error about one leaves all buffers as they are.
    shards = [
        context.part(buffer.detach(), dim)
        for buffer, dim in zip(buffers, dims, strict=True)
    ]
    # By id: tensors compare element by element.
    final_ids = {id(buffer) for buffer in not_restored}
    originals = [(b, b.detach()) for b in buffers if id(b) not in final_ids]
    for buffer, shard in zip(buffers, shards, strict=True):
        _set_data(buffer, shard)
    try:
        with context.attending(checked=checked):
            yield
    finally:
        for buffer, original in originals:
            _set_data(buffer, original)


def _set_data(tensor: Tensor, other: Tensor) -> None:
    # Not .data: autograd records set_, and raises in a backward that would use changed values.
    tensor.set_(
        other.untyped_storage(), other.storage_offset(), other.shape, other.stride()
    )


class _BypassDetector(TorchFunctionMode):
    """Detects calls of torch's attention that bypass ours."""

    def __init__(self, context: ContextParallel) -> None:
        super().__init__()
        self.found_bypass = False
        self._context = context
        self._calls = 0

    def __torch_function__(
        self,
        func: Function,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is _TORCH_ATTENTION:
            self._calls += 1  # each intercepted call calls torch's function once
            if self._calls > self._context.intercepted_calls:
                self.found_bypass = True
        return func(*args, **(kwargs or {}))


def with_positions(plan: ContextPlan, batch: Batch, part: int = 0) -> Batch:
    """Add the positions that a plan requires to a dict batch that has none.

    Args:
        plan: has the key of the positions, and the sequence dimension.
        batch: the tokens of this rank.
        part: the index of this rank's part of the sequence.
    """
    key = plan.positions
    if key is None or not isinstance(batch, Mapping) or key in batch:
        return batch
    dim = plan.dims
    # By name of a tensor: all of them are parts of one sequence, so any of its dimensions has the length.
    if not isinstance(dim, int):
        dim = next(iter(dim.values()))
    tensors = [value for value in batch.values() if isinstance(value, Tensor)]
    # A batch may also have labels of whole sequences.
    sequence = next(tensor for tensor in tensors if tensor.dim() > dim)
    length = sequence.shape[dim]
    first = part * length
    positions = torch.arange(first, first + length, device=sequence.device)
    return _with_values(batch, {key: positions.unsqueeze(0)})


def _with_values(batch: SavedState, values: SavedState) -> Batch:
    """A copy of a batch with these values, of the same class: batches of tokenizers have further attributes."""
    if not isinstance(batch, MutableMapping):
        return {**batch, **values}
    copied = copy.copy(batch)
    copied.update(values)
    return copied


RingAttention = Callable[[DeviceMesh], AbstractContextManager[Callable[..., Tensor]]]

_DEVICES: Final = ("cuda",)
"""Device types whose attention kernels return the log-sum-exp that merges partial results; torch refuses others."""


def has_ring(device_type: str) -> bool:
    """Whether torch has ring attention for devices of this type.

    Example:
        >>> has_ring("cuda"), has_ring("cpu")
        (True, False)
    """
    return device_type in _DEVICES
