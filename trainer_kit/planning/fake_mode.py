"""torch's fake mode, with a faster memory of what operators return.

This is the only file that relies on how torch's fake mode is built, which is private.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias, final

import torch
from torch import Tensor

from trainer_kit.core.torch_private import ITEM, storage_key, tree_leaves
from trainer_kit.planning.operators import Arguments, Operator, Options, Result
from trainer_kit.planning.torch_private import (
    FakeTensor,
    FakeTensorMode,
    active_fake_mode,
    default_device,
    in_kernel_invocation_manager,
    make_fake_tensor,
)

__all__ = ["FastFakeMode"]

_VALUES: Final = frozenset(
    {
        bool,
        int,
        float,
        complex,
        str,
        type(None),
        torch.device,
        torch.dtype,
        torch.layout,
        torch.memory_format,
    }
)
"""The types of arguments that are compared as they are."""
_DEVICE: Final = torch.ops.prim.device.default


@final
@dataclass(frozen=True, slots=True)
class _Result:
    """What an operator returned: one of its arguments, a view of one, or a tensor with its own storage."""

    argument: int | None
    view_of: int | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


_Key: TypeAlias = tuple[object, ...]
"""An operator with all that its result depends on."""
_Results: TypeAlias = tuple[bool, tuple[_Result | None, ...]]
"""Whether the operator returned a tuple, and what it returned; None for None."""


@final
class FastFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]  # of torch
    """Tensors in it have no storage; real ones, such as constants of a module, may take part.

    Where arguments have the same shapes as before, the result is repeated, as in the base class, which decides where
    this is right and computes the others. A measurement takes half of the time: the base class also describes symbolic
    shapes.
    """

    # Shared by all modes of the process: a plan makes one for each candidate, and their
    # operators are mostly the same. None: the result may not be repeated.
    _known: ClassVar[dict[_Key, _Results | None]] = {}
    _tried: ClassVar[set[_Key]] = set()

    def __init__(self) -> None:
        # Constants of a module, such as a mask made at import, are real tensors.
        super().__init__(allow_non_fake_inputs=True)
        # The attributes of a new fake tensor, by device.
        self._attributes: dict[torch.device, dict[str, object]] = {}

    def dispatch(
        self,
        func: Operator,
        types: Sequence[type],
        args: Arguments = (),
        kwargs: Options | None = None,
    ) -> Result:
        """Repeat a known result, or compute it."""
        kwargs = kwargs or {}
        key = self._key(func, args, kwargs)
        if key is None:
            # An optimizer reads its count of steps, which is a constant of a fake tensor.
            if func is ITEM and _has_constant(args[0]):
                return args[0].constant.item()
            return super().dispatch(func, types, args, kwargs)
        cached = self._known.get(key)
        if cached is not None:
            return self._repeat(cached, args)
        if key in self._known:
            # Its result may not be repeated: torch's own cache would find that out again.
            return self._dispatch_impl(func, types, args, kwargs)
        # torch decides what may be repeated. Its counters tell what it has decided.
        # torch has no function that answers whether a result may be repeated.
        repeated = _repeated()
        computed = _computed()
        out = super().dispatch(func, types, args, kwargs)
        repeats = _repeated() > repeated and _computed() == computed
        if repeats:
            self._known[key] = self._results(func, args, kwargs, out)
        elif key in self._tried:
            # Only the second time: what kept torch from repeating the first may not last.
            self._known[key] = None
        self._tried.add(key)
        return out

    def call(self, func: Operator, args: Arguments, kwargs: Options) -> Result:
        """Call an operator from inside another mode, without torch's way to this one where the result is known."""
        # Code that works with real tensors leaves the mode for as long.
        active = active_fake_mode()
        if active is self:
            key = self._key(func, args, kwargs)
            cached = None
            if key is not None:
                cached = self._known.get(key)
            if cached is not None:
                return self._repeat(cached, args)
        return func(*args, **kwargs)

    def holds(self, tensor: object) -> bool:
        """Whether this is a tensor of this mode; one on the meta device has no memory anywhere."""
        if not isinstance(tensor, FakeTensor) or tensor.fake_mode is not self:
            return False
        return tensor.device.type != "meta"

    def _repeat(self, known: _Results, args: Arguments) -> Result:
        returns_tuple, results = known
        outputs = [self._make_output(result, args) for result in results]
        if returns_tuple:
            return tuple(outputs)
        return outputs[0]

    def _key(self, func: Operator, args: Arguments, kwargs: Options) -> _Key | None:
        """All that a result depends on; None if only torch can tell."""
        # It returns no tensor, and is half of all calls.
        if func is _DEVICE:
            return None
        # Global settings under which the same arguments give a result of another dtype, device or class.
        parts: list[object] = [
            func,
            torch.get_default_dtype(),
            default_device(),
            torch.is_inference_mode_enabled(),
        ]
        if not self._describe(parts, args):
            return None
        if kwargs:
            parts.append(tuple(kwargs))
            if not self._describe(parts, kwargs.values()):
                return None
        return tuple(parts)

    def _describe(self, parts: list[object], values: Iterable[Any]) -> bool:
        """Append all that a result may depend on; returns False for arguments that only torch can describe."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                # A constant has a value, on which a result may depend.
                if value.fake_mode is not self or value.constant is not None:
                    return False
                if value.layout is not torch.strided or value.is_quantized:
                    return False
                parts += (
                    kind,
                    value.dtype,
                    value.shape,
                    value.stride(),
                    value.storage_offset(),
                    value.fake_device,
                )
                parts += (
                    value.requires_grad,
                    value.is_conj(),
                    value.is_neg(),
                    value.is_inference(),
                )
                # A view of a larger storage has the same shape, but keeps more memory alive.
                parts.append(value.untyped_storage().nbytes())
            elif kind in _VALUES:
                # With the type: 1, 1.0 and True are equal, and results differ in dtype.
                parts += (kind, value)
            elif kind is list or kind is tuple:
                # With the length: two lists of one would look like one list of two.
                parts += (kind, len(value))
                if not self._describe(parts, value):
                    return False
            else:
                # A subclass or an object: only torch knows what its result depends on.
                return False
        return True

    def _results(
        self, func: Operator, args: Arguments, kwargs: Options, out: Result
    ) -> _Results | None:
        """Describe what an operator returned; None if it cannot be made again from that alone."""
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if type(leaf) is FakeTensor]
        returns_tuple = type(out) is tuple
        outputs = (out,)
        if returns_tuple:
            outputs = out
        results: list[_Result | None] = []
        for output in outputs:
            if output is None:
                results.append(None)
                continue
            # Also a number that was computed: it would be another one with other values.
            if type(output) is not FakeTensor or output.layout is not torch.strided:
                return None
            result = _describe_result(output, args)
            if result.argument is None:
                # An output that shares storage with an entry of a list, or with an argument
                # of an operator that is no view, cannot be made from its description.
                shares = any(_share(leaf, output) for leaf in tensors)
                is_view = result.view_of is not None
                if shares != func.is_view or func.is_view != is_view:
                    return None
                # Nor one of which torch knows more than a new tensor has.
                repeated = self._make_output(result, args)
                if _properties(repeated) != _properties(output):
                    return None
            results.append(result)
        return returns_tuple, tuple(results)

    def _make_output(self, result: _Result | None, args: Arguments) -> Tensor | None:
        if result is None:
            return None
        if result.argument is not None:
            argument: Tensor = args[result.argument]
            return argument
        shape = result.shape
        stride = result.stride
        device = result.device
        # As torch's mode does: without it creating the meta tensor would itself be dispatched to this mode.
        with in_kernel_invocation_manager(self):
            output = torch.empty_strided(
                shape,
                stride,
                dtype=result.dtype,
                device="meta",
                requires_grad=result.requires_grad,
            )
            if result.view_of is not None:
                output.set_(
                    args[result.view_of].untyped_storage(), result.offset, shape, stride
                )
        if device not in self._attributes:
            first = FakeTensor(self, output, device)
            self._attributes[device] = dict(vars(first))
            return first
        # The constructor would set each attribute on its own.
        tensor = make_fake_tensor(output, device, result.requires_grad)
        vars(tensor).update(self._attributes[device])
        return tensor


def _repeated() -> int:
    """How many results torch's mode has stored, or repeated."""
    return FakeTensorMode.cache_hits + FakeTensorMode.cache_misses


def _computed() -> int:
    """How many results torch's mode has computed because they may not be repeated."""
    return sum(FakeTensorMode.cache_bypasses.values())


def _has_constant(value: object) -> bool:
    return type(value) is FakeTensor and value.constant is not None


def _share(value: object, tensor: Tensor) -> bool:
    """Whether a value is a tensor with the storage of another one."""
    if type(value) is not FakeTensor:
        return False
    key = storage_key(value.untyped_storage())
    return key == storage_key(tensor.untyped_storage())


def _describe_result(output: FakeTensor, args: Arguments) -> _Result:
    """Describe an output, as an argument, as a view of one, or as a tensor of its own."""
    argument: int | None = None
    view_of: int | None = None
    for index, value in enumerate(args):
        if value is output and argument is None:
            argument = index
        if view_of is None and _share(value, output):
            view_of = index
    # An operator in place returns its argument, which shares its storage with itself.
    if argument is not None:
        view_of = None
    return _Result(
        argument,
        view_of,
        output.shape,
        output.stride(),
        int(output.storage_offset()),
        output.dtype,
        output.fake_device,
        output.requires_grad,
    )


def _properties(tensor: Any) -> tuple[object, ...]:
    """What operators may read of a tensor without values."""
    return (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.fake_device,
        tensor.requires_grad,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_inference(),
        tensor.untyped_storage().nbytes(),
    )
