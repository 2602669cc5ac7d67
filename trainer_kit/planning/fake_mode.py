"""torch's fake mode, with a faster memory of what operators return.

This is the only file that uses how torch's fake mode is built, which is private.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.utils._pytree import tree_leaves

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
_ITEM: Final = torch.ops.aten._local_scalar_dense.default


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


_Results: TypeAlias = tuple[bool, tuple[_Result | None, ...]]
"""Whether the operator returned a tuple, and what it returned; None for None."""


@final
class FastFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Tensors in it have no storage; real ones, such as constants of a module, may take part.

    Where arguments have the same shapes as before, the result is repeated, as in the base class, which decides where
    this is right and computes the others. A measurement takes half of the time: the base class also describes symbolic
    shapes.
    """

    _known: ClassVar[dict[tuple[Any, ...], _Results | None]] = {}
    _tried: ClassVar[set[tuple[Any, ...]]] = set()

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._attributes: dict[
            torch.device, dict[str, Any]
        ] = {}  # of a new fake tensor

    def dispatch(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Repeat a known result, or compute it."""
        kwargs = kwargs or {}
        key = self._key(func, args, kwargs)
        if key is None:
            if (
                func is _ITEM
                and type(args[0]) is FakeTensor
                and args[0].constant is not None
            ):  # a step of an optimizer
                return args[0].constant.item()
            return super().dispatch(func, types, args, kwargs)
        cached = self._known.get(key)
        if cached is not None:
            return self._repeat(cached, args)
        if key in self._known:  # its result may not be repeated
            return self._dispatch_impl(func, types, args, kwargs)
        repeated, computed = _repeated(), _computed()
        out = super().dispatch(func, types, args, kwargs)
        repeats = _repeated() > repeated and _computed() == computed
        if repeats or key in self._tried:
            self._known[key] = (
                self._results(func, args, kwargs, out) if repeats else None
            )
        self._tried.add(key)
        return out

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call an operator from inside another mode, without torch's way to this one where the result is known."""
        if (
            torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is self
        ):  # or it was left for real tensors
            key = self._key(func, args, kwargs)
            cached = None if key is None else self._known.get(key)
            if cached is not None:
                return self._repeat(cached, args)
        return func(*args, **kwargs)

    def holds(self, tensor: object) -> bool:
        """Whether this is a tensor of this mode; one on the meta device has no memory anywhere."""
        if not isinstance(tensor, FakeTensor) or tensor.fake_mode is not self:
            return False
        return tensor.device.type != "meta"

    def _repeat(self, known: _Results, args: Sequence[Any]) -> Any:
        several, results = known
        if several:
            return tuple(
                [
                    None if result is None else self._make_output(result, args)
                    for result in results
                ]
            )
        return None if results[0] is None else self._make_output(results[0], args)

    def _key(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...] | None:
        """All that a result depends on; None if only torch can tell."""
        parts = [
            func,
            torch.get_default_dtype(),
            torch._C._get_default_device(),
            torch.is_inference_mode_enabled(),
        ]
        described = (
            func is not _DEVICE
            and self._describe(parts, args)
            and (not kwargs or self._describe(parts, kwargs))
        )
        return tuple(parts) if described else None

    def _describe(self, parts: list[Any], values: Any) -> bool:
        """Append all that a result may depend on; returns False for arguments that only torch can describe."""
        if type(values) is dict:
            parts.append(tuple(values))
            values = values.values()
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
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
                parts.append(value.untyped_storage().nbytes())
            elif kind in _VALUES:
                parts += (kind, value)  # 1, 1.0 and True are equal
            elif kind is list or kind is tuple:
                parts += (kind, len(value))
                if not self._describe(parts, value):
                    return False
            else:
                return False
        return True

    def _results(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> _Results | None:
        """Describe what an operator returned; None if it cannot be made again from that alone."""
        inside = [
            leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is FakeTensor
        ]
        results: list[_Result | None] = []
        for output in out if type(out) is tuple else (out,):
            if output is None:
                results.append(None)
                continue
            if type(output) is not FakeTensor or output.layout is not torch.strided:
                return None
            same = next(
                (index for index, value in enumerate(args) if value is output), None
            )
            view_of = next(
                (index for index, value in enumerate(args) if _share(value, output)),
                None,
            )
            facts: Any = (
                output.shape,
                output.stride(),
                output.storage_offset(),
                output.dtype,
                output.fake_device,
                output.requires_grad,
            )
            result = _Result(same, view_of if same is None else None, *facts)
            if same is None:
                shares = any(_share(leaf, output) for leaf in inside)
                if not shares == func.is_view == (view_of is not None) or _facts(
                    self._make_output(result, args)
                ) != _facts(output):
                    return None
            results.append(result)
        return type(out) is tuple, tuple(results)

    def _make_output(self, result: _Result, args: Sequence[Any]) -> Tensor:
        if result.argument is not None:
            argument: Tensor = args[result.argument]
            return argument
        shape, stride, device = result.shape, result.stride, result.device
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
        # As FakeTensor's constructor does, which sets each attribute on its own.
        tensor: Tensor = Tensor._make_subclass(
            FakeTensor,
            output,
            result.requires_grad,
            dispatch_device=True,
            device_for_backend_keys=device,
        )
        torch._C._set_warn_deprecated_on_mutable_data_ptr(tensor)
        vars(tensor).update(self._attributes[device])
        return tensor


def _repeated() -> int:
    """How many results torch's mode has stored, or repeated."""
    return FakeTensorMode.cache_hits + FakeTensorMode.cache_misses


def _computed() -> int:
    """How many results torch's mode has computed because they may not be repeated."""
    return sum(FakeTensorMode.cache_bypasses.values())


def _share(value: Any, tensor: Tensor) -> bool:
    return (
        type(value) is FakeTensor
        and value.untyped_storage()._cdata == tensor.untyped_storage()._cdata
    )


def _facts(tensor: Any) -> tuple[Any, ...]:
    return (
        *(
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
            tensor.dtype,
            tensor.fake_device,
            tensor.requires_grad,
        ),
        *(
            tensor.is_conj(),
            tensor.is_neg(),
            tensor.is_inference(),
            tensor.untyped_storage().nbytes(),
        ),
    )
