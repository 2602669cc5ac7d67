"""What CPU kernels allocate inside one operator: copies in another layout, buffers of threads, workspaces of oneDNN.

A step on fake tensors shows what operators return, and nothing of this. The kernel itself runs on zeros of the same
shapes, once for each signature, under torch's legacy profiler; this is the only file that uses it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Final, final

import torch
from torch import Tensor

from trainer_kit.core.torch_private import tree_leaves, tree_map_only
from trainer_kit.planning.operators import Arguments, Operator, Options, Result
from trainer_kit.planning.torch_private import (
    CPU_ATTENTION,
    CPU_ATTENTION_BACKWARD,
    begin_recording,
    end_recording,
)

__all__ = [
    "RECURRENT",
    "Allocations",
    "KernelMemory",
    "has_workspace",
    "record_allocations",
]

_aten = torch.ops.aten
RECURRENT: Final = _aten.mkldnn_rnn_layer.default
"""The forward of oneDNN's recurrent layer; the last tensor that it returns is what it saves for backward."""
_RECURRENT_BACKWARD: Final = _aten.mkldnn_rnn_layer_backward.default
_EMBEDDING_BACKWARD: Final = _aten.embedding_dense_backward.default
"""It copies a gradient that is not contiguous."""
_WORKSPACE: Final = 22
"""The argument of oneDNN's recurrent backward that is what its forward has saved."""
_KERNELS: Final[Mapping[Operator, tuple[int, ...]]] = {
    _aten.convolution.default: (0,),
    _aten.convolution_backward.default: (0, 1),
    _aten.native_batch_norm_backward.default: (0, 1),
    _aten.native_group_norm_backward.default: (0, 1, 2, 3),
    _aten.upsample_nearest1d.default: (0,),
    _aten.upsample_nearest2d.default: (0,),
    _aten.upsample_nearest3d.default: (0,),
    _aten.upsample_linear1d.default: (0,),
    _aten.upsample_bilinear2d.default: (0,),
    _aten.upsample_bicubic2d.default: (0,),
    _aten.upsample_trilinear3d.default: (0,),
    _aten.im2col.default: (0,),
    _aten.mean.default: (0,),
    _aten.mean.dim: (0,),
    _aten.logsumexp.default: (0,),
    _aten.cumsum.default: (0,),
    CPU_ATTENTION.default: (0, 1, 2),
    CPU_ATTENTION_BACKWARD.default: (
        0,
        1,
        2,
        3,
        4,
        5,
    ),
    RECURRENT: (0,),
    _RECURRENT_BACKWARD: (0, 7, 10),
}
"""By operator whose kernel allocates: the arguments whose first dimension counts samples (or steps of a sequence)."""
_HALF_KERNELS: Final[Mapping[Operator, tuple[int, ...]]] = {
    _aten.mm.default: (0,),
    _aten.addmm.default: (1,),
    _aten.bmm.default: (0, 1),
    _aten.baddbmm.default: (0, 1, 2),
}
"""Likewise for 16-bit arguments only."""
_STATISTICS: Final[Mapping[Operator, tuple[int, ...]]] = {
    _aten.native_batch_norm_backward.default: (5, 6),
    _aten.native_group_norm_backward.default: (2, 3),
}
"""Arguments that a fake forward returns in 16 bits, and the kernel in float32 where its weight is."""
_HALF: Final = (torch.bfloat16, torch.float16)
_SLOWER: Final = 10
"""How many times longer a CPU without instructions for 16-bit numbers needs for the same operations."""
_LIBRARY: Final = frozenset({"convolution", "convolution_backward", "mkldnn_rnn_layer"})
"""Operators that each device computes with a library, which has its own workspaces."""
# Below these limits a kernel takes a fraction of a second.
_MOST_BYTES: Final = 64 << 20
_MOST_FLOPS: Final = 2e9
"""Above these, a kernel runs on fewer samples, twice, and the line through both sizes gives the rest."""
_LARGEST: Final = 1 << 30
"""Bytes of arguments above which a kernel is not run."""


def has_workspace(func: Operator) -> bool:
    """Whether each device computes an operator with a library that has its own workspaces."""
    return func.overloadpacket.__name__ in _LIBRARY


_MARK: Final = "trainer_kit: the measured part begins"


@final
class Allocations:
    """What a thread allocated and freed, in order.

    Args:
        changes: signed bytes, in order.
        begin: how many of them came before `mark`.
    """

    def __init__(self, changes: Iterable[int] = (), begin: int = 0) -> None:
        self.changes = list(changes)
        self.begin = begin

    def add(self, change: int) -> None:
        """Record an allocation, or with negative bytes the end of one."""
        self.changes.append(change)

    def begin_here(self) -> None:
        """Count from here on."""
        self.begin = len(self.changes)

    @staticmethod
    def mark() -> None:
        """Begin the part whose peak counts."""
        with torch.autograd.profiler.record_function(_MARK):
            pass

    @property
    def peak(self) -> int:
        """The most bytes that were held in the part that counts."""
        # What was allocated before is held too, and is a part of the peak.
        total = highest = sum(self.changes[: self.begin])
        for change in self.changes[self.begin :]:
            total += change
            highest = max(highest, total)
        return highest


@contextmanager
def record_allocations() -> Iterator[Allocations]:
    """Inside, torch's CPU allocator records what this thread allocates; the record is complete at the end."""
    allocations = Allocations()
    begin_recording()
    try:
        yield allocations
    finally:
        # Its result is one list of events for each thread; kernels allocate in the calling one.
        for thread in end_recording():
            for event in thread:
                if event.kind() == "memory_alloc":
                    allocations.add(event.cpu_memory_usage())
                elif event.name() == _MARK and event.kind() == "push":
                    allocations.begin_here()


@final
@dataclass(frozen=True, slots=True)
class _Probe:
    """What one call of a kernel allocates: bytes beside its results, and of the last tensor that it returns."""

    extra: int
    saved: int


@final
class KernelMemory:
    """Runs kernels on zeros, and remembers what they allocate.

    A kernel that needs long or much memory runs on fewer samples. One that cannot is left out, and named in `unknown`.
    """

    # Shared by all candidates of a plan: their kernels are mostly the same. None: the
    # kernel could not run.
    _known: ClassVar[dict[tuple[Hashable, ...], _Probe | None]] = {}

    def __init__(self) -> None:
        self.unknown: set[str] = set()

    def probe(
        self, func: Operator, args: Arguments, kwargs: Options, flops: float
    ) -> _Probe | None:
        """What a call allocates; None for an operator whose kernel allocates nothing else, or cannot be run.

        Args:
            func: the operator.
            args: its arguments, fake or real.
            kwargs: its keyword arguments.
            flops: the floating-point operations of the call.
        """
        if func is _EMBEDDING_BACKWARD:
            # Not run: its result may be as large as the model.
            return _probe_embedding_backward(args[0])
        scaled = _KERNELS.get(func)
        if scaled is None and func in _HALF_KERNELS and args[0].dtype in _HALF:
            scaled = _HALF_KERNELS[func]
            flops *= _SLOWER
        # A scalar has no dimension of samples that could be made smaller.
        if scaled is None or not args[scaled[0]].dim():
            return None
        # Buffers of threads grow with their number.
        threads = torch.get_num_threads()
        key = (func, threads, *_signature((args, kwargs)))
        if key not in self._known:
            self._known[key] = self._measure(func, args, kwargs, scaled, flops)
        probe = self._known[key]
        if probe is None:
            self.unknown.add(func.overloadpacket.__name__)
        return probe

    @staticmethod
    def _measure(
        func: Operator,
        args: Arguments,
        kwargs: Options,
        scaled: Sequence[int],
        flops: float,
    ) -> _Probe | None:
        """Run the kernel, on fewer samples where it needs much; None where it cannot run."""

        def run(samples: int) -> _Probe:
            resized = _resize(args, scaled, samples)
            # A thread of its own: modes and the graph of a backward belong to this one.
            with ThreadPoolExecutor(1) as thread:
                return thread.submit(_run, func, resized, kwargs).result()

        size = sum(leaf.numel() * leaf.element_size() for leaf in _tensors(args))
        work = max(size / _MOST_BYTES, flops / _MOST_FLOPS)
        samples = args[scaled[0]].shape[0]
        fewer = samples
        smallest = samples
        if work > 1:
            # At least two, so that there is a half.
            fewer = min(samples, max(2, int(samples / work)))
        if fewer < samples:
            smallest = fewer // 2
        if size / samples * fewer > _LARGEST:
            return None
        try:
            large = run(fewer)
            small = large
            if smallest != fewer:
                small = run(smallest)
        except (RuntimeError, ValueError, NotImplementedError):
            # This kernel refuses the shape.
            return None
        beyond = (samples - fewer) / max(1, fewer - smallest)
        return _Probe(
            extra=large.extra + int(beyond * (large.extra - small.extra)),
            saved=large.saved + int(beyond * (large.saved - small.saved)),
        )


def _probe_embedding_backward(gradient: Tensor) -> _Probe | None:
    if gradient.is_contiguous():
        return None
    return _Probe(extra=gradient.numel() * gradient.element_size(), saved=0)


def _run(func: Operator, args: Arguments, kwargs: Options) -> _Probe:
    """Run a kernel on zeros."""
    real = _zeros(args)
    # Gradients are enabled, or oneDNN saves nothing for backward; zeros ask for none.
    if func is _RECURRENT_BACKWARD:
        real = _with_workspace(real)
    with record_allocations() as allocations:
        out = _call(func, real, kwargs)
    saved = 0
    if func is RECURRENT:
        *_, workspace = _tensors(out)
        saved = workspace.untyped_storage().nbytes()
    # The results remain: the tracker counts them.
    remaining_bytes = max(0, sum(allocations.changes))
    return _Probe(extra=allocations.peak - remaining_bytes, saved=saved)


def _call(func: Operator, args: Arguments, kwargs: Options) -> Result:
    """Call a kernel; one that refuses statistics in 16 bits gets them in float32."""
    statistics = _STATISTICS.get(func, ())
    try:
        return func(*args, **kwargs)
    except RuntimeError:
        if not statistics:
            raise
        wide = list(args)
        for index in statistics:
            wide[index] = args[index].float()
        return func(*wide, **kwargs)


def _with_workspace(args: Arguments) -> Arguments:
    """The arguments of oneDNN's recurrent backward, with what the forward saves for it."""
    # Forward and backward take the same arguments in different orders.
    inputs = args[:7]
    (
        reverse, mode, hidden, layers, biases, train, bidirectional, sizes, batch_first,
    ) = args[13:_WORKSPACE]  # fmt: skip
    out = RECURRENT(
        *inputs, reverse, sizes, mode, hidden, layers, biases, bidirectional, batch_first, train
    )  # fmt: skip
    return (*args[:_WORKSPACE], out[-1])


def _zeros(values: Arguments) -> Arguments:
    """Real tensors of the same shapes and strides."""

    def zero(tensor: Tensor) -> Tensor:
        workspace = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
        )
        return workspace.zero_()

    arguments: Arguments = tree_map_only(Tensor, zero, values)
    return arguments


def _resize(args: Arguments, scaled: Sequence[int], samples: int) -> Arguments:
    """The arguments for fewer samples."""
    resized = list(args)
    for index in scaled:
        tensor = args[index]
        if not isinstance(tensor, Tensor) or tensor.shape[0] == samples:
            continue
        strides = tensor.stride()
        # On the meta device: `_zeros` allocates the real one, and this one is never read.
        small = torch.empty_strided(
            (samples, *tensor.shape[1:]), strides, dtype=tensor.dtype, device="meta"
        )
        resized[index] = small
    return tuple(resized)


def _tensors(values: object) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _signature(values: object) -> Iterator[Hashable]:
    """All that a kernel's memory depends on."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            yield (leaf.dtype, tuple(leaf.shape), leaf.stride())
        else:
            # Numbers too: the stride or the groups of a convolution change its workspace.
            yield leaf
