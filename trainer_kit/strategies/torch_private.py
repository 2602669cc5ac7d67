"""The private names of torch that strategies use, checked with torch 2.13 and 2.14, and with the floor 2.9 where noted.

No other module of this package names one, so that a release of torch that moves or removes some is met here alone.
A name that a step uses is bound as it is, or as `operator.attrgetter`: neither adds a Python call. `core.torch_private`
has the names that other rooms use too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from operator import attrgetter
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from trainer_kit.core.torch_private import find_private, needs_private

if TYPE_CHECKING:
    # Every run imports this module, and few have FSDP, whose import is that of DTensor too.
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

__all__ = [
    "CONCATENATION",
    "GATHERING_METHOD",
    "STEP_POST_HOOKS",
    "STEP_PRE_HOOKS",
    "AsyncCollectiveTensor",
    "add_quotient_to_each",
    "add_square_to_each",
    "all_gather_with_gradients",
    "all_to_all_with_gradients",
    "clear_sharding_caches",
    "concatenate_meshes",
    "default_group_timeout",
    "divide_each",
    "drop_accumulated_gradients",
    "excluded_from_compilation",
    "find_reset",
    "flatten_mesh",
    "fused_adam",
    "fused_adamw",
    "fused_sgd",
    "global_step_post_hooks",
    "global_step_pre_hooks",
    "has_compiled_function",
    "has_list_functions",
    "is_fsdp_root",
    "is_profiling",
    "is_view",
    "make_fake_store",
    "move_each",
    "negatives",
    "parts_of_step",
    "reduced_parameters",
    "replace_reducer",
    "ring_attention",
    "set_grad_mode",
    "set_group_timeout",
    "set_reduced_parameters",
    "sharding_propagator",
    "square_roots",
    "step_below_grad_mode",
    "step_below_hooks",
    "step_below_scheduler",
    "sums",
    "sync_buffers",
]

# -- modules and tensors ------------------------------------------------------------------------------------------

# Whether a tensor shares the storage of another one. Without it every output would have to be copied.
is_view: Final[Callable[[Tensor], bool]] = find_private(
    "torch.Tensor._is_view", "tensor parallelism"
)


def find_reset(layer: nn.Module) -> Any:
    """The method that initializes a layer, or None; ``nn.MultiheadAttention`` has it under a private name.

    Without that name such a layer on the meta device is refused, with a fix.
    """
    return getattr(layer, "reset_parameters", getattr(layer, "_reset_parameters", None))


# The kernels of optimizers with `fused=True`, which they call themselves. Without one such an optimizer does not exist.
_FUSED: Final = "an optimizer with fused=True"
fused_sgd: Final[Callable[..., object]] = find_private("torch._fused_sgd_", _FUSED)
fused_adam: Final[Callable[..., object]] = find_private("torch._fused_adam_", _FUSED)
fused_adamw: Final[Callable[..., object]] = find_private("torch._fused_adamw_", _FUSED)

# Operators on each tensor of a list, in one call. Without one, small parameters are updated by torch's own step.
has_list_functions: Final = all(
    hasattr(torch, f"_foreach_{name}")
    for name in (
        "add", "add_", "addcdiv_", "addcmul_", "div_", "lerp_", "mul_", "neg", "sqrt",
    )
)  # fmt: skip
_LISTS: Final = "the step of an optimizer of small parameters"
negatives: Final[Callable[..., list[Tensor]]] = find_private(
    "torch._foreach_neg", _LISTS
)
sums: Final[Callable[..., list[Tensor]]] = find_private("torch._foreach_add", _LISTS)
square_roots: Final[Callable[..., list[Tensor]]] = find_private(
    "torch._foreach_sqrt", _LISTS
)
divide_each: Final[Callable[..., object]] = find_private("torch._foreach_div_", _LISTS)
move_each: Final[Callable[..., object]] = find_private("torch._foreach_lerp_", _LISTS)
add_square_to_each: Final[Callable[..., object]] = find_private(
    "torch._foreach_addcmul_", _LISTS
)
add_quotient_to_each: Final[Callable[..., object]] = find_private(
    "torch._foreach_addcdiv_", _LISTS
)

# -- the compiler -------------------------------------------------------------------------------------------------

# Leaves a function to Python, as DDP's own forward does. Without it the public form takes its place, which imports the
# whole compiler where the function is defined, so in every run.
if TYPE_CHECKING:
    from torch._compile import _disable_dynamo as excluded_from_compilation
else:
    excluded_from_compilation = getattr(
        torch._compile, "_disable_dynamo", torch.compiler.disable
    )


def has_compiled_function(method: object) -> bool:
    """Whether a function comes from ``torch.compile``, which marks it so; without the mark engines refuse it late."""
    return hasattr(method, "_torchdynamo_orig_callable")


# -- process groups and meshes ------------------------------------------------------------------------------------

# torch gives half an hour to the groups of a mesh. Without a way to change the timeout of an existing group a run that
# makes such groups is refused: the user's timeout would hold for the world only.
_set_pg_timeout: Final[Callable[[timedelta, dist.ProcessGroup], None]] = find_private(
    "torch.distributed.distributed_c10d._set_pg_timeout", "timeout="
)
# Public from torch 2.14 on, which warns of the private name.
set_group_timeout: Final[Callable[[timedelta, dist.ProcessGroup], None]] = getattr(
    dist, "set_timeout", _set_pg_timeout
)


def default_group_timeout() -> timedelta | None:
    """The timeout of the world; None if no backend of it has one. torch does not tell it in public."""
    world = dist.distributed_c10d._get_default_group()
    for device in world._device_types:
        options = getattr(world._get_backend(device), "options", None)
        if options is not None:
            timeout: timedelta = options._timeout
            return timeout
    return None


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """One axis in place of several, with a process group of its own. There is no public form in torch 2.13."""
    with needs_private("a mesh whose axes are joined"):
        return mesh._flatten(name)


CONCATENATION: Final = "_concatenate"


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """A mesh with the axes of several, for FSDP's replicas and shards. There is no public form in torch 2.13.

    Looked up at each call: a world without processes has another function in its place.
    """
    with needs_private("a mesh of replicas and shards"):
        mesh: DeviceMesh = getattr(DeviceMesh, CONCATENATION)(meshes)
        return mesh


def make_fake_store() -> dist.Store:  # type: ignore[name-defined]  # torch exports it at run time only
    """The store of torch's fake backend. Without it no process can take the place of one rank of many."""
    with needs_private("a world of fake ranks"):
        from torch.testing._internal.distributed.fake_pg import FakeStore

        return FakeStore()


def sharding_propagator() -> ShardingPropagator:
    """What decides how the results of operators on DTensors are divided; all meshes share it."""
    # Imported here: most runs have no DTensor.
    from torch.distributed.tensor import DTensor

    return DTensor._op_dispatcher.sharding_propagator


def clear_sharding_caches() -> None:
    """Empty the caches of DTensor, which hold results for the mesh that this process was in.

    Without it the next rank of this process would take the part of a tensor that belongs to an earlier one.
    """
    # Imported here: most runs have no DTensor.
    from torch.distributed.tensor import _redistribute

    propagator = sharding_propagator()
    propagator.propagate_op_sharding.cache.cache_clear()
    _redistribute._gen_transform_infos.cache_clear()
    # torch 2.9 has no cache in C++.
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()


# Collectives through which autograd differentiates, for context parallelism; torch.distributed.nn.functional has
# slower forms, which torch deprecates.
with needs_private("distributed training"):
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

_COLLECTIVES: Final = "torch.distributed._functional_collectives"
all_to_all_with_gradients: Final[Callable[..., Tensor]] = find_private(
    f"{_COLLECTIVES}.all_to_all_single_autograd", "context parallelism"
)
# torch 2.13 renamed it.
all_gather_with_gradients: Final[Callable[..., Tensor]] = find_private(
    f"{_COLLECTIVES}.all_gather_single_autograd",
    "context parallelism",
    former=f"{_COLLECTIVES}.all_gather_tensor_autograd",
)


@contextmanager
def ring_attention(mesh: DeviceMesh) -> Iterator[Callable[..., Tensor]]:
    """A context for forward and backward; yields attention over the whole sequence, from a part on each rank.

    ``torch.distributed.tensor.experimental.context_parallel`` (Liu et al., Ring Attention, ICLR 2024; Llama 3's form,
    which gathers keys and values, is its default). Parts are contiguous; masks and dropout are not supported.

    Args:
        mesh: the context axis.
    """
    from torch.distributed.tensor.experimental import _attention, context_parallel

    # `context_parallel` has no argument for it: the option of its module is private, and global.
    options = _attention._cp_options
    before = options.enable_load_balance
    # It reorders tokens, and positions and targets would have to follow.
    options.enable_load_balance = False
    # torch requires at least one buffer to shard.
    unused = torch.empty(mesh.size(), device=mesh.device_type)
    try:
        with context_parallel(
            mesh, buffers=[unused], buffer_seq_dims=[0], no_restore_buffers={unused}
        ):
            yield F.scaled_dot_product_attention
    finally:
        options.enable_load_balance = before


# -- DistributedDataParallel --------------------------------------------------------------------------------------


# The parameters whose gradients the reducer averages. Without it a parameter that is added or unfrozen after the
# wrapper was made would be trained by each rank alone.
reduced_parameters: Final[Callable[[DistributedDataParallel], list[nn.Parameter]]] = (
    attrgetter("_module_parameters")
)


def set_reduced_parameters(
    wrapper: DistributedDataParallel, parameters: list[nn.Parameter]
) -> None:
    """Set what `reduced_parameters` returns; the next reducer is created from it."""
    vars(wrapper)["_module_parameters"] = parameters


def replace_reducer(wrapper: DistributedDataParallel) -> None:
    """Create a new reducer for the parameters that are trained now, as torch does where it unpickles the wrapper.

    Without these methods the run is refused, as the gradient of a parameter that is unfrozen later would not be
    averaged; the alternative is a new wrapper, which loses its hooks and the buckets that it has learned.
    """
    untyped: Any = wrapper  # these methods have no types
    with needs_private("unfreezing of parameters under DDP"):
        trained, sparse = untyped._build_params_for_reducer()
        names = untyped._build_debug_param_to_name_mapping(trained)
        untyped._ddp_init_helper(trained, sparse, names, wrapper.static_graph)
    # Otherwise torch takes the buckets for those that the first backward has ordered.
    vars(wrapper)["_has_rebuilt_buckets"] = False
    if wrapper.static_graph:
        wrapper.static_graph = False  # torch warns where it is set twice
        untyped._set_static_graph()
    # The hooks belong to the old reducer.
    for hook, state in untyped._comm_hooks:
        _register_hook(wrapper.reducer, state, hook)


# Broadcasts rank 0's buffers as the wrapper's forward does, which alone would do it too late for a window that may be
# repeated. Without it such a window could not be repeated by one rank.
sync_buffers: Final[Callable[[DistributedDataParallel], None]] = find_private(
    "torch.nn.parallel.DistributedDataParallel._sync_buffers",
    "repeating of a step under DDP",
)

_register_hook: Final[Callable[..., None]] = find_private(
    "torch._C._distributed_c10d._register_comm_hook",
    "a communication hook of DDP after parameters were added",
)


# -- FSDP2 --------------------------------------------------------------------------------------------------------


def is_fsdp_root(unit: FSDPModule) -> bool:
    """Whether a unit is the outermost one, which has the state of an iteration."""
    state: Any = unit._get_fsdp_state()
    return bool(state._is_root)


def drop_accumulated_gradients(unit: FSDPModule) -> None:
    """Drop the gradients of backwards without a reduction, which torch's own reset keeps.

    Without it the first step after an error would add the gradients of the window that the error ended.
    """
    state: Any = unit._get_fsdp_state()
    for group in state._fsdp_param_groups:
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


# -- optimizers ---------------------------------------------------------------------------------------------------

# The attributes of an optimizer that hold its step hooks. An optimizer without them is stepped by its own method.
STEP_PRE_HOOKS: Final = "_optimizer_step_pre_hooks"
STEP_POST_HOOKS: Final = "_optimizer_step_post_hooks"

# The step hooks of all optimizers. torch has no public form in which to read them; without them the import of this
# module is refused, as hooks would be passed by.
with needs_private("an optimizer step"):
    from torch.optim.optimizer import (
        _global_optimizer_post_hooks as global_step_post_hooks,
    )
    from torch.optim.optimizer import (
        _global_optimizer_pre_hooks as global_step_pre_hooks,
    )

# Whether any of torch's profilers records in this thread. Both are one C call: the public forms are Python calls.
is_profiling: Final[Callable[[], bool]] = find_private(
    "torch._C._autograd._profiler_enabled", "an optimizer step"
)
set_grad_mode: Final[Callable[[bool], object]] = find_private(
    "torch._C._set_grad_enabled", "an optimizer step"
)


# Finds the tensors of one group in the step of torch's own optimizers. Without it every step is torch's own.
GATHERING_METHOD: Final = "_init_group"
_STEP_MODULES: Final = ("torch.optim.sgd", "torch.optim.adam")
# The attribute with the function below a wrapper that keeps the compiler out. Without it steps are torch's own.
_BELOW_COMPILER: Final = "_torchdynamo_orig_callable"


def step_below_hooks(step: FunctionType) -> FunctionType | None:
    """The function below the wrapper that calls step hooks; None where torch has not wrapped this step.

    The wrapper is recognized by its code: ``functools.wraps`` copies torch's mark to the wrapper of another library.
    Without it every step is that of the optimizer itself, only slower.
    """
    is_wrapper = step.__code__.co_name == "wrapper"
    if not is_wrapper or step.__globals__["__name__"] != Optimizer.__module__:
        return None
    return vars(step).get("__wrapped__")


def step_below_grad_mode(step: FunctionType) -> FunctionType | None:
    """The function below the wrapper with which torch's own optimizers turn gradients off; None where it is not there.

    The wrapper is recognized by its code: it has the name and the module of what it wraps.
    """
    is_wrapper = step.__code__.co_name == "_use_grad"
    if not is_wrapper or step.__globals__["__name__"] != Optimizer.__module__:
        return None
    return vars(step).get("__wrapped__")


def parts_of_step(kind: type[Optimizer]) -> tuple[object, ...]:
    """The functions with which torch's SGD, Adam or AdamW steps: the step below its wrappers, and two that it calls.

    Those are the method that finds the tensors, and the functional form. Empty where the step is not torch's, and
    where this release of torch has none of these names: then only the step itself is called.
    """
    step: object = kind.step
    if isinstance(step, FunctionType):
        # The first optimizer of its class wraps it with hooks.
        step = step_below_hooks(step) or step
    if isinstance(step, FunctionType):
        step = step_below_grad_mode(step)
    if not isinstance(step, FunctionType):
        return ()
    module = step.__globals__["__name__"]
    gather = getattr(kind, GATHERING_METHOD, None)
    # From the first `torch.compile` on it is a wrapper that keeps the compiler out.
    gather = getattr(gather, _BELOW_COMPILER, gather)
    # `torch.optim.adam` has `adam`.
    functional = step.__globals__.get(module.rpartition(".")[-1])
    if module not in _STEP_MODULES or gather is None or functional is None:
        return ()
    return step, gather, functional


def step_below_scheduler(step: FunctionType) -> FunctionType | None:
    """The step below the function with which a learning rate scheduler notes that it was called, or None."""
    marks = vars(step)
    if not marks.get("_wrapped_by_lr_sched", False):
        return None
    return marks.get("__wrapped__")
