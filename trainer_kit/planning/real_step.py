"""Steps on real tensors of the CPU, for what cannot run without values."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor, nn

from trainer_kit.core.costs import shard_bytes
from trainer_kit.core.display import plural
from trainer_kit.core.tensors import map_leaves, tensors_of
from trainer_kit.core.types import Batch
from trainer_kit.data.sizes import batch_size_of
from trainer_kit.planning.fake_world import resized_lists, sample_dimension
from trainer_kit.planning.kernel_memory import Allocations, record_allocations
from trainer_kit.planning.operators import Arguments, Operator, Options, Result
from trainer_kit.planning.records import CATEGORIES, Candidate, Measured, Traffic
from trainer_kit.planning.torch_private import FakeTensor, without_modes

__all__ = ["LARGEST", "RealMode", "RealSteps", "RealTensors", "real_batch"]

LARGEST: Final = 400_000_000
"""Bytes of weights up to which a step is run for real."""


_STATE: Final = ("parameters", "gradients", "optimizer", "gathered")
"""The categories that do not depend on the batch."""


_MOST_GROWTH: Final = 4
_SMALL: Final = 4096
"""Times, and bytes, by which an allocation may grow when the samples double; shapes may depend on values."""


@final
class RealMode:
    """Tensors with storage, on the CPU: the counterpart of a fake mode."""

    def __enter__(self) -> RealMode:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def call(self, func: Operator, args: Arguments, kwargs: Options) -> Result:
        """Call an operator."""
        return func(*args, **kwargs)

    def holds(self, tensor: object) -> bool:
        """Whether this is a tensor of the CPU."""
        if not isinstance(tensor, Tensor) or isinstance(tensor, FakeTensor):
            return False
        return tensor.device.type == "cpu"


@final
class RealTensors:
    """What a real step runs on. The allocator records the measured step, with what kernels allocate inside.

    Attributes:
        records: what was allocated on each rank that ran.
    """

    def __init__(self) -> None:
        self.mode = RealMode()
        self.records: list[Allocations] = []

    def module(self, module: nn.Module) -> Any:
        """A copy with values; weights on the meta device get initial ones."""
        memo: dict[int, object] = {}
        trainer = vars(module).get("trainer")
        # Copying the Trainer would copy a whole run.
        if trainer is not None:
            memo[id(trainer)] = None
        copied = copy.deepcopy(module, memo)
        _initialize(copied)
        return copied

    def batch(self, batch: Batch, samples: int, size: int | None) -> Batch:
        """The first samples of a batch, repeated where it has fewer."""
        return real_batch(batch, samples, size or batch_size_of(batch))

    def running(self, batch: Batch) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def stepping(self) -> AbstractContextManager[None]:
        """An optimizer steps without the tracker, inside which ``torch.compile`` compiles nothing."""
        modes: AbstractContextManager[None] = without_modes()
        return modes

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The allocator records, from the copy of the module on: it does not see what was allocated before freed."""
        # Garbage of earlier runs, whose end would count.
        gc.collect()
        with record_allocations() as allocations:
            self.records.append(allocations)
            yield

    def begin(self) -> None:
        """The peak of what follows counts, without garbage of the composition."""
        gc.collect()
        Allocations.mark()

    def whole(self, memory: dict[str, int]) -> dict[str, int]:
        """Add what kernels and the optimizer held beside the tensors that the tracker saw, as temporary."""
        unseen = self.records[-1].peak - sum(memory.values())
        return {**memory, "temporary": max(0, memory["temporary"] + unseen)}


def _initialize(module: nn.Module) -> None:
    """Give weights on the meta device memory and initial values, by their layers' own methods where they have them."""
    for submodule in module.modules():
        tensors = [
            *submodule.named_parameters(recurse=False),
            *submodule.named_buffers(recurse=False),
        ]
        missing = [name for name, tensor in tensors if tensor.is_meta]
        if not missing:
            continue
        # Without recursion: children with values keep them.
        submodule.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            # First numbers for everything, then the layer's own method for what it knows: not every layer has one.
            for name in missing:
                _fill(name, getattr(submodule, name))
        reset = getattr(submodule, "reset_parameters", None)
        if callable(reset):
            reset()


def _fill(name: str, tensor: Tensor) -> None:
    """Small random numbers for matrices, ones for the weights of norms, zeros for the rest."""
    if tensor.dim() > 1 and tensor.is_floating_point():
        # Small: large values overflow in 16 bits, and a step that reads values may do something else with NaN.
        tensor.normal_(0, 0.02)
    elif name.endswith("weight"):
        tensor.fill_(1)
    else:
        tensor.fill_(0)


def real_batch(batch: Batch, samples: int, size: int) -> Batch:
    """A copy of a batch with another number of samples: its rows in order, again from the first where it has fewer.

    Example:
        >>> real_batch({"x": torch.tensor([[1], [2]]), "scale": 3}, 3, 2)
        {'x': tensor([[1],
                [2],
                [1]]), 'scale': 3}
    """
    dimension_of = sample_dimension(batch, size)
    rows_are_shared = all(dimension_of(tensor) is None for tensor in tensors_of(batch))

    def resized(value: object) -> object:
        if isinstance(value, Tensor):
            dimension = dimension_of(value)
            # A copy, because a step may change its batch in place.
            if samples == size or not value.dim():
                return value.detach().clone()
            # Nodes of a graph, for example: no rows belong to one sample.
            if dimension is None and rows_are_shared:
                raise TypeError("a batch whose samples share rows cannot be resized")
            if dimension is None:
                return value.detach().clone()
            return value.detach().index_select(dimension, torch.arange(samples) % size)
        if not isinstance(value, MutableMapping):
            raise TypeError(f"a batch with a {type(value).__name__} cannot be resized")
        duplicate: Any = copy.copy(value)
        for key, item in value.items():
            duplicate[key] = map_leaves(item, resized)
        return duplicate

    return map_leaves(resized_lists(batch, size, samples), resized)


@final
@dataclass(frozen=True)
class _RealStep:
    """A step that ran for real, with what was allocated on each of its ranks."""

    measured: Measured
    records: Sequence[Allocations]

    @property
    def samples(self) -> int:
        """The samples of its micro-batch."""
        return self.measured.candidate.micro_batch


_Pair: TypeAlias = tuple[_RealStep | None, _RealStep]
"""A step with half of the samples, None where that cannot run, and one with all of them."""
_Run: TypeAlias = Callable[[Candidate, RealTensors], Measured]


@final
class RealSteps:
    """Steps of one module and batch, run for real at two sizes of the batch; other sizes are on the line through both.

    Args:
        size: the samples in the loader's batch.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        # By candidate with a micro-batch of 1, for all sizes; an error of user code, which
        # would fail again.
        self._pairs: dict[Candidate, _Pair | Exception] = {}

    @staticmethod
    def can_hold(module: nn.Module) -> bool:
        """Whether the weights are small enough to run here."""
        return shard_bytes([*module.parameters(), *module.buffers()]) <= LARGEST

    def measure(self, candidate: Candidate, run: _Run) -> Measured:
        """What a step of the candidate needs.

        Args:
            candidate: the configuration.
            run: runs a configuration on real tensors.

        Raises:
            Exception: a real step fails.
        """
        key = replace(candidate, micro_batch=1)
        if key not in self._pairs:
            try:
                self._pairs[key] = self._pair(candidate, run)
            except Exception as error:
                # Of any class: user code.
                # Kept, so that the search does not run a failing step again for each micro-batch.
                self._pairs[key] = error
        pair = self._pairs[key]
        if isinstance(pair, Exception):
            raise pair
        small, large = pair
        if small is None:
            line = f"a step ran for real on the CPU with {plural(large.samples, 'sample')}; for other sizes, all but "
            line += "weights, gradients and optimizer state is in proportion"
            measured = _in_proportion(large, candidate)
        else:
            line = (
                f"a step ran for real on the CPU with {small.samples} and "
                f"{plural(large.samples, 'sample')}; memory of "
                "other sizes is on the line through both"
            )
            measured = _on_line(small, large, candidate)
        return replace(
            measured,
            candidate=candidate,
            exact=False,
            notes=(line, *measured.notes),
            inexact=(line, *measured.inexact),
        )

    def _pair(self, candidate: Candidate, run: _Run) -> _Pair:
        """Run half of the loader's batch, and all of it; of a batch of one sample, one and two."""

        def run_size(samples: int) -> _RealStep:
            tensors = RealTensors()
            measured = run(replace(candidate, micro_batch=samples), tensors)
            return _RealStep(measured, tensors.records)

        # The loader's own size first: it is what the script runs, so it is most likely to work.
        large = run_size(max(2, self.size))
        try:
            return run_size(large.samples // 2), large
        except Exception:
            # Of any class: a graph cannot be halved, a batch norm refuses one sample.
            return None, large


def _in_proportion(step: _RealStep, candidate: Candidate) -> Measured:
    """What a candidate needs if all but the state grows with the samples."""
    share = candidate.micro_batch / step.samples
    memory = []
    for role in step.measured.memory:
        scaled = {name: round(role[name] * share) for name in CATEGORIES}
        # Weights, gradients and optimizer state do not grow with samples.
        scaled |= {name: role[name] for name in _STATE}
        memory.append(scaled)
    flops = round(share * step.measured.flops)
    return replace(step.measured, memory=tuple(memory), flops=flops)


def _on_line(small: _RealStep, large: _RealStep, candidate: Candidate) -> Measured:
    """What a candidate needs if each allocation and each transfer grows by the same for each sample."""
    few = small.measured
    many = large.measured
    share = (candidate.micro_batch - small.samples) / (large.samples - small.samples)

    def between(low: float, high: float) -> int:
        # Below the smaller size the line may fall under 0.
        return max(0, round(low + share * (high - low)))

    memory = []
    records = zip(small.records, large.records, strict=True)
    for role, (low_record, high_record) in zip(many.memory, records, strict=True):
        peak = _peak_between(low_record, high_record, share)
        memory.append(_with_peak(role, peak - many.host))
    low_traffic = {(traffic.kind, traffic.axis): traffic for traffic in few.traffic}

    def scale_traffic(high: Traffic) -> Traffic:
        low = low_traffic.get((high.kind, high.axis))
        # A collective that the smaller step did not have cannot be put on a line.
        if low is None:
            return high
        return replace(high, bytes=between(low.bytes, high.bytes))

    # Everything else, such as notes, is that of the larger step, which is nearer to real sizes.
    return replace(
        many,
        memory=tuple(memory),
        traffic=tuple(map(scale_traffic, many.traffic)),
        flops=between(few.flops, many.flops),
        operators=between(few.operators, many.operators),
    )


def _peak_between(few: Allocations, many: Allocations, share: float) -> int:
    """The peak of a step on the line through two.

    Of steps that allocate in another order, it is on the line through their peaks.
    """
    lows = few.changes[few.begin :]
    highs = many.changes[many.begin :]
    if not _are_alike(lows, highs):
        growth = many.peak - few.peak
        return round(few.peak + share * growth)
    # The peak of a sum of lines need not be on the line through the peaks: which
    # allocation makes it may differ between the sizes. Before the step only a sum counts.
    low_before = sum(few.changes[: few.begin])
    high_before = sum(many.changes[: many.begin])
    lows.insert(0, low_before)
    highs.insert(0, high_before)
    changes = []
    for low, high in zip(lows, highs, strict=True):
        growth = high - low
        change = round(low + share * growth)
        changes.append(change)
    step = Allocations(changes, begin=1)
    return step.peak


def _are_alike(lows: Sequence[int], highs: Sequence[int]) -> bool:
    """Whether each allocation of a step is that of another with about twice the samples, or fewer."""
    if len(lows) != len(highs):
        return False
    return all(
        low * high >= 0 and abs(high) <= _MOST_GROWTH * abs(low) + _SMALL
        for low, high in zip(lows, highs, strict=True)
    )


def _with_peak(memory: Mapping[str, int], peak: int) -> dict[str, int]:
    """Memory by category with another peak, of which the state is the same."""
    state = sum(memory[key] for key in _STATE)
    other_bytes = max(0, peak - state)
    other_bytes_before = sum(memory.values()) - state
    activations = 0
    if other_bytes_before:
        activations = round(other_bytes * memory["activations"] / other_bytes_before)
    return {
        **memory,
        "activations": activations,
        "temporary": other_bytes - activations,
    }
