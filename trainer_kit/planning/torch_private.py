"""The private names of torch that planning uses, checked with torch 2.13 and 2.14; no other module here names one.

Most of a plan is a step on torch's fake tensors, whose names are private. Without one of them this module is not
imported, and ``Trainer.plan`` and ``trainer-kit plan`` say so; training needs none of them. `core.torch_private` has
the names that other rooms use too.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from types import ModuleType
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch import Tensor

from trainer_kit.core.torch_private import find_private, needs_private, storage_key
from trainer_kit.planning.operators import Operator
from trainer_kit.strategies.torch_private import CONCATENATION

__all__ = [
    "CHUNKS",
    "CPU_ATTENTION",
    "CPU_ATTENTION_BACKWARD",
    "MESH_CONCATENATION",
    "OPTIMIZER_STEP",
    "WAIT",
    "CollectiveOp",
    "FakeCopyMode",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "active_fake_mode",
    "begin_recording",
    "collective_ops",
    "default_device",
    "end_recording",
    "in_kernel_invocation_manager",
    "is_traceable_wrapper_subclass",
    "know_shapes",
    "make_fake_tensor",
    "pipeline_exchange",
    "pipeline_warmup",
    "registered_name",
    "set_recurrent_kernels",
    "storage_uses",
    "sync_ops",
    "tensor_uses",
    "unset_fake_temporarily",
    "without_modes",
]

_USE: Final = "Trainer.plan"

with needs_private(_USE):
    # -- fake tensors ---------------------------------------------------------------------------------------------
    from torch._subclasses.fake_tensor import (
        FakeCopyMode,
        FakeTensor,
        FakeTensorMode,
        in_kernel_invocation_manager,
        unset_fake_temporarily,
    )

    # -- what watches operators -----------------------------------------------------------------------------------
    # torch's list of collectives, with the tensor whose bytes count in each.
    from torch.distributed._tools.fake_collectives import (
        CollectiveOp,
        collective_ops,
        sync_ops,
    )
    from torch.distributed.fsdp._fully_shard import _fsdp_param
    from torch.utils._python_dispatch import (
        TorchDispatchMode,
        _disable_current_modes,
        is_traceable_wrapper_subclass,
    )

    CPU_ATTENTION: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    CPU_ATTENTION_BACKWARD: Final = (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    )
    """Attention of a CPU, whose floating-point operations torch does not count."""
    WAIT: Final = torch.ops._c10d_functional.wait_tensor.default
    """Waits for a collective, and returns its input."""

    _FAKE: Final = torch._C._TorchDispatchModeKey.FAKE

    # -- what a step on fake tensors replaces ---------------------------------------------------------------------
    _Place: TypeAlias = tuple[type | ModuleType, str]
    OPTIMIZER_STEP: Final[_Place] = (torch.amp.GradScaler, "_maybe_opt_step")
    """Reads whether gradients are finite, before an optimizer steps."""
    CHUNKS: Final[_Place] = (_fsdp_param, "_chunk_with_empty")
    """Makes every rank's part of a parameter. Without it a plan takes longer, and is the same."""
    MESH_CONCATENATION: Final[_Place] = (
        torch.distributed.device_mesh.DeviceMesh,
        CONCATENATION,
    )
    """Joins meshes, with numbers that must be real."""


def pipeline_warmup() -> _Place:
    """Where the stages of a pipeline vote whether all know the shapes that they exchange."""
    # Imported where a plan is made: it takes long.
    from torch.distributed import pipelining

    with needs_private(_USE):
        return pipelining.schedules._PipelineSchedule, "_warmup_p2p"


def pipeline_exchange() -> _Place:
    """Where the stages of a pipeline send and receive tensors. Without it a plan counts them as freed at once."""
    from torch.distributed import pipelining

    return pipelining.schedules, "_batch_p2p"


def know_shapes(stage: Any) -> None:
    """Let a stage of a pipeline know the shapes that it exchanges."""
    with needs_private(f"{_USE} with a pipeline"):
        from torch.distributed.pipelining._utils import InferenceMode

        stage._inference_mode = InferenceMode.STATIC


# -- fake tensors -------------------------------------------------------------------------------------------------

# Leaves every dispatch mode for as long as real kernels run.
without_modes: Final = _disable_current_modes

_active_mode: Final[Callable[[object], object]] = find_private(
    "torch._C._get_dispatch_mode", _USE
)


def active_fake_mode() -> object:
    """The fake mode that is active; None outside of one."""
    return _active_mode(_FAKE)


# The device of new tensors that have none, at no Python call. Without it a plan is refused: what an operator returns
# could depend on it.
default_device: Final[Callable[[], torch.device]] = find_private(
    "torch._C._get_default_device", _USE
)

_make_subclass: Final[Callable[..., Tensor]] = find_private(
    "torch.Tensor._make_subclass", _USE
)
_set_pointer_warning: Final[Callable[[Tensor], None]] = find_private(
    "torch._C._set_warn_deprecated_on_mutable_data_ptr", _USE
)


def make_fake_tensor(
    tensor: Tensor, device: torch.device, requires_grad: bool
) -> Tensor:
    """A fake tensor without its attributes, as the constructor of `FakeTensor` makes it.

    Args:
        tensor: on the meta device.
        device: that it shows.
        requires_grad: whether it needs a gradient.
    """
    fake = _make_subclass(
        FakeTensor,
        tensor,
        requires_grad,
        dispatch_device=True,
        device_for_backend_keys=device,
    )
    _set_pointer_warning(fake)
    return fake


# -- references ---------------------------------------------------------------------------------------------------

_storage_uses: Final[Callable[[int], int]] = find_private(
    "torch._C._storage_Use_Count", _USE
)


def storage_uses(storage: torch.UntypedStorage) -> int:
    """How many tensors and storages of C++ refer to a storage."""
    return _storage_uses(storage_key(storage))


def tensor_uses(tensor: Tensor) -> int:
    """How often C++ refers to a tensor; 0 in a release of torch that does not tell it."""
    use_count = getattr(tensor, "_use_count", None)
    if use_count is None:
        return 0
    uses: int = use_count()
    return uses


# -- operators ----------------------------------------------------------------------------------------------------

# An operator of all overloads, by which torch registers how many operations it takes. The public property adds a
# Python call to every operator of a step.
registered_name: Final[Callable[[Operator], object]] = attrgetter("_overloadpacket")

_set_onednn: Final[Callable[[bool], None]] = find_private(
    "torch._C._set_mkldnn_enabled", _USE
)


def set_recurrent_kernels(enabled: bool) -> None:
    """Switch oneDNN's recurrent layers on or off, without the check of the public flag that it is not frozen."""
    _set_onednn(enabled)


# -- the legacy profiler ------------------------------------------------------------------------------------------


class _Event(Protocol):
    """An event of the legacy profiler."""

    def kind(self) -> str: ...
    def name(self) -> str: ...
    def cpu_memory_usage(self) -> int: ...


_enable_profiler: Final[Callable[[object], None]] = find_private(
    "torch.autograd._enable_profiler_legacy", _USE
)
_disable_profiler: Final[Callable[[], list[list[_Event]]]] = find_private(
    "torch.autograd._disable_profiler_legacy", _USE
)


def begin_recording() -> None:
    """Let torch's CPU allocator record what this thread allocates, under the legacy profiler.

    The public profiler needs Kineto, which no plan can start beside a profiler of the user's.
    """
    with needs_private(_USE):
        from torch._C._profiler import _ExperimentalConfig

        profiler: Any = torch.autograd
        configuration = profiler.ProfilerConfig(
            profiler.ProfilerState.CPU,
            False,
            True,
            False,
            False,
            False,
            _ExperimentalConfig(),
        )
    _enable_profiler(configuration)


def end_recording() -> list[list[_Event]]:
    """End what `begin_recording` began; returns the events of each thread."""
    return _disable_profiler()
