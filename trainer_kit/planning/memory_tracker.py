"""Watches every operator of a step under torch's FakeTensorMode: memory by category, floating-point operations.

This is the only file that uses torch's dispatch modes for memory. Its measure is the storage of tensors, as
an allocator sees it: when it is allocated, resized and freed.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, Protocol, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import flop_counter

from trainer_kit.core.torch_private import current_backward, storage_key, tree_leaves
from trainer_kit.planning.kernel_memory import RECURRENT, KernelMemory, has_workspace
from trainer_kit.planning.operators import Arguments, Operator, Options, Result
from trainer_kit.planning.records import CATEGORIES
from trainer_kit.planning.torch_private import (
    CPU_ATTENTION,
    CPU_ATTENTION_BACKWARD,
    WAIT,
    FakeTensor,
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    registered_name,
    storage_uses,
    tensor_uses,
)

__all__ = ["Mark", "StepMode", "StepTracker", "storages"]

_PLAIN: Final = (Tensor, nn.Parameter, FakeTensor, nn.Buffer)
_aten = torch.ops.aten
_DEVICE: Final = torch.ops.prim.device.default
_counter: Any = flop_counter
_FLOPS: Final[Mapping[Operator, Callable[..., int]]] = {
    **_counter.flop_registry,
    # torch counts attention in its kernels for accelerators only.
    CPU_ATTENTION: lambda query, key, value, *_, **__: _counter.sdpa_flop_count(
        query.shape, key.shape, value.shape
    ),
    CPU_ATTENTION_BACKWARD: lambda grad, query, key, value, *_, **__: (
        _counter.sdpa_backward_flop_count(
            grad.shape, query.shape, key.shape, value.shape
        )
    ),
}
_ADD: Final = _aten.add.Tensor
_STATE: Final = ("parameters", "gradients", "optimizer")
"""The categories of tensors that outlive a step."""
_IN_KERNEL: Final = 0
"""The number of what kernels allocate; storages have higher ones."""


def storages(values: object) -> Iterator[torch.UntypedStorage]:
    """The storages of all tensors in a tree; of a ``DTensor``, of this rank's part."""
    for leaf in _leaves(values):
        if not isinstance(leaf, Tensor):
            continue
        if is_traceable_wrapper_subclass(leaf):
            # A wrapper such as DTensor has no storage of its own, only those of its parts.
            names, _ = leaf.__tensor_flatten__()
            yield from storages([getattr(leaf, name) for name in names])
        else:
            yield leaf.untyped_storage()


def _leaves(values: object) -> list[object]:
    # Most operators return one tensor: a walk through the tree would take most of the time.
    if isinstance(values, Tensor):
        return [values]
    leaves: list[object] = tree_leaves(values)
    return leaves


def _references(tensor: Tensor) -> tuple[int, int, int]:
    """How often a tensor and its storage are referred to, in C++ and in Python."""
    storage = storage_uses(tensor.untyped_storage())
    # 0 in some releases of torch: the other two counts must then tell.
    uses = tensor_uses(tensor)
    return uses, storage, sys.getrefcount(tensor)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements follow each other in memory, in any order of dimensions."""
    last = sum(
        (size - 1) * stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return last + 1 == tensor.numel()


class StepMode(Protocol):
    """What the tensors of a step live in; entered as a context."""

    def __enter__(self) -> object: ...
    def __exit__(self, *exception: Any) -> object: ...
    def call(self, func: Operator, args: Arguments, kwargs: Options) -> Result:
        """Call an operator."""

    def holds(self, tensor: object) -> bool:
        """Whether a leaf of a result is a tensor of this mode."""


class Mark(NamedTuple):
    """A place in the record of a `StepTracker`: what had been counted before it."""

    events: int
    flops: int
    operators: int


@final
class StepTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """Records allocations, the collectives and the floating-point operations of what runs inside it.

    Enter it inside its fake mode. Storages get their category when it is known: a gradient is one after the
    backward that made it, an activation when the backward begins and it is still there.

    Args:
        mode: the mode of the tensors that count.
        watch: called with every operator, its arguments and its result.
        kernels: finds what kernels allocate beside their results; None: nothing is known of them.
    """

    def __init__(
        self,
        mode: StepMode,
        watch: Callable[[Operator, Arguments, Result], None],
        kernels: KernelMemory | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self._mode = mode
        self._watch = watch
        self._kernels = kernels
        self._calibrates = False
        # The numbers of references to a tensor that only autograd holds.
        self._sole: tuple[int, int, int] | None = None
        # The number of each storage that exists, by its address. Addresses are used again
        # after a storage is freed; numbers are not.
        self._numbers: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}
        # Categories stay after the storage is gone: `peak` goes through all events.
        self._category: dict[int, str] = {}
        # The storages that the running forward has made.
        self._fresh: set[int] = set()
        self._events: list[tuple[int, int]] = []
        self._count = 0
        self._in_step = True
        self.flops = 0
        self.operators = 0
        # The operators that devices compute with libraries.
        self.with_workspaces: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled inside; torch would wrap each call, so that what it calls is not."""
        return False

    # -- what exists ---------------------------------------------------------------------------------------------

    def note(self, values: object, category: str) -> None:
        """Give the storages of tensors a category; one that outlives a step is not changed by a later one."""
        for storage in storages(values):
            number = self._number(storage)
            # An optimizer's state is also an output of operators, and a tied weight a result of several modules.
            if self._category.get(number) not in _STATE:
                self._category[number] = category

    def note_state(
        self, parameters: Iterable[Tensor], optimizers: Iterable[Optimizer]
    ) -> None:
        """Note parameters, their gradients and the state of optimizers."""
        parameters = list(parameters)
        self.note(parameters, "parameters")
        self.note([parameter.grad for parameter in parameters], "gradients")
        for optimizer in optimizers:
            self.note(
                [list(state.values()) for state in optimizer.state.values()],
                "optimizer",
            )

    def _number(self, storage: torch.UntypedStorage) -> int:
        address = storage_key(storage)
        number = self._numbers.get(address)
        if number is not None:
            return number
        self._count += 1
        number = self._count
        size = storage.nbytes()
        self._numbers[address] = number
        self._sizes[number] = size
        # The number and not the category, which may be known only later.
        self._events.append((number, size))
        # Held here: a weak reference that is itself gone calls nothing.
        reference = weakref.ref(storage, lambda _: self._freed(address))
        self._references[address] = reference
        return number

    def _freed(self, address: int) -> None:
        number = self._numbers.pop(address)
        del self._references[address]
        self._fresh.discard(number)
        self._events.append((number, -self._sizes.pop(number)))

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record the new size of a storage. FSDP frees and allocates gathered parameters in this way."""
        number = self._number(storage)
        # Negative when FSDP frees a gathered parameter, whose storage object stays.
        change = storage.nbytes() - self._sizes[number]
        self._sizes[number] += change
        self._events.append((number, change))
        if self._category.get(number) not in _STATE:
            self._category[number] = "gathered"

    # -- what runs -----------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Operator,
        types: Iterable[type],
        args: Arguments = (),
        kwargs: Options | None = None,
    ) -> Result:
        """Run an operator on plain tensors; a subclass first turns its own into operators on its parts."""
        # Half of all calls: `Tensor.device` of a fake tensor.
        if func is _DEVICE:
            return _device_of(func, args[0])
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented
        # The fake operator allocates a second tensor; the real one returns its input.
        if func is WAIT:
            return args[0]
        kwargs = kwargs or {}
        # -1 outside of the engine of autograd.
        backward = current_backward() != -1
        if backward and func is _ADD and not kwargs and self._adds_in_place(*args):
            func = _aten.add_.Tensor
        out = self._mode.call(func, args, kwargs)
        # A view computes nothing.
        self.operators += not func.is_view
        count = _FLOPS.get(registered_name(func))
        flops = 0
        if count is not None:
            flops = count(*args, **kwargs, out_val=out)
        self.flops += flops
        probe = None
        if self._kernels is not None:
            probe = self._kernels.probe(func, args, kwargs, flops)
        if has_workspace(func):
            self.with_workspaces.add(func.overloadpacket.__name__)
        # The fake operator saves nothing for backward.
        if func is RECURRENT and probe is not None:
            out = (*out[:-1], out[-1].new_empty(probe.saved))
        # A backward begins: what the forward has made and still exists is an activation.
        if backward and self._fresh:
            for number in self._fresh:
                self._category.setdefault(number, "activations")
            self._fresh.clear()
        for leaf in _leaves(out):
            if isinstance(leaf, Tensor) and self._mode.holds(leaf):
                self._note_output(leaf, backward)
        # A kernel frees what it has allocated before it returns.
        if probe is not None:
            self._events += [(_IN_KERNEL, probe.extra), (_IN_KERNEL, -probe.extra)]
        self._watch(func, args, out)
        return out

    def _note_output(self, output: Tensor, backward: bool) -> None:
        """Count the storage of an output, where it is new."""
        previous_count = self._count
        number = self._number(output.untyped_storage())
        is_new = number > previous_count
        # A backward without gradients and an optimizer make temporary tensors only, which keep no category.
        if not is_new or not self._in_step or not torch.is_grad_enabled():
            return
        if backward:
            # With gradients enabled in backward, a block computes its activations again.
            self._category[number] = "activations"
        else:
            self._fresh.add(number)

    def calibrate(self) -> None:
        """Count the references to a gradient that nothing but autograd holds, in a small backward."""
        self._calibrates = True
        weight = torch.ones(2, requires_grad=True)
        middle = weight * 2
        # Two uses of one tensor: their gradients are added, which is the addition to look at.
        loss = (middle * 3 + middle * 4).sum()
        loss.backward()  # type: ignore[no-untyped-call]  # of torch
        self._calibrates = False

    def _adds_in_place(self, total: Tensor, *terms: object) -> bool:
        """Whether autograd adds a gradient to another in place, as it does where no mode watches.

        It does for a sum that nothing else holds (torch/csrc/autograd/input_buffer.cpp).
        """
        if len(terms) != 1 or torch.is_grad_enabled():
            return False
        (term,) = terms
        # This mode holds references too, and how many differs between releases of torch and
        # Python: `calibrate` has counted them.
        if self._calibrates:
            self._sole = _references(total)
        elif _references(total) != self._sole:
            return False
        if not isinstance(term, Tensor) or term.shape != total.shape:
            return False
        return term.dtype == total.dtype and _is_dense(total)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Inside, optimizers step: nothing that is created is an activation."""
        # What is left of the forward is a result that the module keeps, and no activation of a later backward.
        self._fresh.clear()
        self._in_step = False
        try:
            yield
        finally:
            self._in_step = True

    @contextmanager
    def resizes(self) -> Iterator[None]:
        """Inside, calls of ``UntypedStorage.resize_`` are seen, which are not operators."""
        # Any: a method is replaced, which the checker does not allow.
        storage_class: Any = torch.UntypedStorage
        plain = storage_class.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resized: torch.UntypedStorage = plain(storage, size)
            self.resized(storage)
            return resized

        storage_class.resize_ = resize
        try:
            yield
        finally:
            storage_class.resize_ = plain

    # -- the result ----------------------------------------------------------------------------------------------

    def mark(self) -> Mark:
        """The place that the record has reached."""
        return Mark(len(self._events), self.flops, self.operators)

    def peak(self, since: int, left_out: Collection[str] = ()) -> dict[str, int]:
        """Bytes by category when the device held most, after ``since``.

        Args:
            since: the number of events before the step, from `mark`.
            left_out: the categories that do not count, because their tensors are elsewhere.
        """
        # From the first event on: what was allocated before the step is held in it too.
        held_bytes: Counter[str] = Counter()
        total = 0
        highest = 0
        at_peak: dict[str, int] = {}
        for index, (number, change) in enumerate(self._events):
            category = self._category.get(number, "temporary")
            if category in left_out:
                continue
            held_bytes[category] += change
            total += change
            # `>`: of equal peaks the first, so that the split by category does not depend on what follows.
            if index >= since and total > highest:
                highest = total
                at_peak = dict(held_bytes)
        return {category: at_peak.get(category, 0) for category in CATEGORIES}


def _device_of(func: Operator, tensor: Tensor) -> Result:
    # Without the dispatcher, which takes most of the time of this call.
    if type(tensor) is FakeTensor:
        return tensor.fake_device
    return func(tensor)
