"""The private names of torch that several rooms use, checked with torch 2.13 and 2.14, and with the floor 2.9.

A name that one room uses stands in the ``torch_private`` module of that room, and none stands in two. A release of
torch that moves or removes some is met in these modules alone; ``make test-nightly`` runs their tests, and those of the
rooms, on the newest torch.

A name that a step uses is bound as it is, or as `operator.attrgetter`: neither adds a Python call. One that is looked
up by `find_private` refuses in words where it is called and torch does not have it, so that everything else still
works. What `needs_private` covers refuses when its module is imported.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Final, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.errors import TrainerKitError
from trainer_kit.core.types import StateDict

__all__ = [
    "BUFFERS",
    "CALL",
    "CHECKED_WITH",
    "CHECKPOINTED_MODULE",
    "CHILDREN",
    "COMPILED_CALL",
    "COMPILED_MODULE",
    "COMPILER",
    "EXTRA_STATE",
    "ITEM",
    "MOVE",
    "PARAMETERS",
    "STEPPED_MARK",
    "VERSIONS",
    "BatchNorm",
    "MissingPrivateName",
    "TreeSpec",
    "add_to_each",
    "apply_of_base",
    "apply_to_direct_tensors",
    "apply_to_tensors",
    "call_block",
    "call_of_class",
    "copy_to_each",
    "current_backward",
    "default_store",
    "direct_buffers",
    "direct_parameters",
    "direct_submodules",
    "find_private",
    "forward_pre_hooks",
    "get_compiled_call",
    "has_compiled_call",
    "mark_stepped",
    "multiply_each",
    "needs_private",
    "norm_of_each",
    "remove_compiled_call",
    "set_compiled_call",
    "set_versions",
    "storage_key",
    "stored_values",
    "transient_buffers",
    "tree_flatten",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
    "version_of",
    "versions_of",
]

CHECKED_WITH: Final = "2.13 and 2.14"
"""The releases of torch that the private names were checked with."""


class MissingPrivateName(TrainerKitError, ImportError):
    """A private name that the installed torch does not have; callers that try an import expect an ImportError."""


def _refusal(name: str, use: str) -> MissingPrivateName:
    return MissingPrivateName(
        f"{use} needs {name}, a private name that this release of torch does not have",
        found=f"torch {torch.__version__}",
        fix=f"install a release of torch that this was checked with: {CHECKED_WITH}",
    )


def _is_of_torch(error: ImportError) -> bool:
    """Whether an import failed for what torch itself does not have, not for a package that torch imports."""
    # Without a name it is an error that somebody raised in words of their own.
    package = (error.name or "").partition(".")[0]
    return package == torch.__name__


def find_private(path: str, use: str, *, former: str = "") -> Any:
    """Return what torch has at a private path, or a function that refuses to be called.

    Args:
        path: from the package, as in ``"torch._foreach_mul_"``.
        use: what needs it, as the error says it.
        former: the path in an earlier release.

    Raises:
        ImportError: a package that torch imports is missing.
    """
    for candidate in filter(None, (path, former)):
        owner, _, name = candidate.rpartition(".")
        try:
            return getattr(pkgutil.resolve_name(owner), name)
        except AttributeError:
            continue
        except ImportError as error:
            if not _is_of_torch(error):
                raise

    def refuse(*_: object, **__: object) -> NoReturn:
        raise _refusal(path, use)

    return refuse


@contextmanager
def needs_private(use: str) -> Iterator[None]:
    """Inside, private names are imported or looked up; one that is missing becomes an error that says so.

    Args:
        use: what needs them, as the error says it.

    Raises:
        MissingPrivateName: this release of torch does not have one of the names.
        ImportError: a package that torch imports is missing; it is raised as it is.
    """
    try:
        yield
    except AttributeError as error:
        raise _refusal(str(error), use) from error
    except ImportError as error:
        if not _is_of_torch(error):
            raise
        raise _refusal(str(error), use) from error


# -- modules ------------------------------------------------------------------------------------------------------

PARAMETERS: Final = "_parameters"
BUFFERS: Final = "_buffers"
CHILDREN: Final = "_modules"
"""The entries of a module's ``__dict__`` with its direct parameters, buffers and children, by name.

There is no fallback: without one of them no module of torch can be read, not even by ``state_dict``.
"""
# What is put there goes past `__setattr__`, which refuses a plain tensor under the name of a parameter.
direct_parameters: Final[Callable[[nn.Module], dict[str, nn.Parameter | None]]] = (
    attrgetter(PARAMETERS)
)
direct_buffers: Final[Callable[[nn.Module], dict[str, Tensor | None]]] = attrgetter(
    BUFFERS
)
direct_submodules: Final[Callable[[nn.Module], dict[str, nn.Module | None]]] = (
    attrgetter(CHILDREN)
)

# The names of buffers that no state_dict has. Without it ``register_buffer`` and ``state_dict`` of torch fail.
transient_buffers: Final[Callable[[nn.Module], set[str]]] = attrgetter(
    "_non_persistent_buffers_set"
)

# The hooks ahead of a module's forward, by their key. Without it transformer layers with an exception inside would get
# one more hook with each run, or none: torch's fast path would then read weights past the exception.
forward_pre_hooks: Final[Callable[[nn.Module], dict[int, Callable[..., object]]]] = (
    attrgetter("_forward_pre_hooks")
)

MOVE: Final = "_apply"
"""The method of a module through which `to`, `half`, `cuda` and the moves of engines go."""


# The method of the base class. Without it casts would also cast the sums of metrics, and quantized weights.
apply_of_base: Final[Callable[..., nn.Module]] = find_private(
    "torch.nn.Module._apply", "casting of a module"
)


def apply_to_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace each tensor of a module in place, as ``Module.to`` does.

    Public methods that use it (``to``, ``to_empty``) also move what metrics store outside of buffers. Without it the
    call fails, as ``to`` of torch does.
    """
    module._apply(function)  # type: ignore[no-untyped-call]  # torch's


def apply_to_direct_tensors(
    module: nn.Module, function: Callable[[Tensor], Tensor]
) -> None:
    """Replace each direct parameter and buffer of a module, as its class defines it."""
    if "recurse" in inspect.signature(module._apply).parameters:
        module._apply(function, recurse=False)  # type: ignore[no-untyped-call]  # torch's
    else:  # overridden as torch defined it before 2.1: it walks the children itself
        module._apply(function)  # type: ignore[no-untyped-call]  # torch's


CALL: Final = "_call_impl"
"""The method that runs a module's hooks and its forward. Without it a replacement in one module is never called."""


def call_of_class(module: nn.Module) -> Callable[..., object]:
    """The method of a module's class that runs its hooks and its forward; one of the module itself shadows it."""
    call: Callable[..., object] = type(module)._call_impl
    return call


def call_block(block: nn.Module, *arguments: object, **options: object) -> object:
    """Call a module in a function of this file: ``part.compile()`` skips code in torch's own files.

    The module is an argument: torch 2.9 would compile a function that holds it once for each module.
    """
    call: Callable[..., object] = block._call_impl
    return call(*arguments, **options)


# -- operators ----------------------------------------------------------------------------------------------------

ITEM: Final = torch.ops.aten._local_scalar_dense.default
"""``Tensor.item`` as an operator, which torch cannot import without."""

# -- the compiler -------------------------------------------------------------------------------------------------

COMPILER: Final = "torch._dynamo"
"""The module of the compiler, which DistributedDataParallel and optimizers import."""
COMPILED_MODULE: Final = "_orig_mod"
"""The name of the submodule of what ``torch.compile`` returns. Without it weights would have its name inside."""
CHECKPOINTED_MODULE: Final = "_checkpoint_wrapped_module"
"""The same for torch's activation checkpointing."""
COMPILED_CALL: Final = "_compiled_call_impl"
"""The attribute in which ``nn.Module.compile`` stores compiled code. Without it a module counts as not compiled."""


def has_compiled_call(block: nn.Module) -> bool:
    """Whether calls of a module run compiled code."""
    return get_compiled_call(block) is not None


def get_compiled_call(block: nn.Module) -> object:
    """The compiled code that calls of a module run; None if they run none."""
    return getattr(block, COMPILED_CALL, None)


def remove_compiled_call(block: nn.Module) -> None:
    """Make calls of a module run its own code again."""
    # Deleted, so that torch's default is found on the class.
    del block.__dict__[COMPILED_CALL]


def set_compiled_call(block: nn.Module, call: Callable[..., object]) -> None:
    """Make calls of a module run ``call``; hooks and names stay, which a wrapper would change."""
    block._compiled_call_impl = call


# -- states -------------------------------------------------------------------------------------------------------

EXTRA_STATE: Final = "_extra_state"
"""The suffix of state_dict keys under which torch stores what ``get_extra_state`` of modules returns."""
VERSIONS: Final = "_metadata"
"""The attribute of a state dict with the versions of its modules."""


def versions_of(state: object) -> Any:
    """The versions of modules that torch attaches to a state dict; None without them, as a plain dict is.

    A state without them loads as one of the oldest version of each module.
    """
    return getattr(state, VERSIONS, None)


def set_versions(state: StateDict, versions: object) -> None:
    """Attach versions of modules to an ordered dict, as torch does to each state dict."""
    setattr(state, VERSIONS, versions)


STEPPED_MARK: Final = "_opt_called"
"""The attribute of an optimizer by which learning rate schedulers know that it has stepped.

Without it a scheduler warns that it is called before the optimizer, where an engine steps in the optimizer's place.
"""


def mark_stepped(optimizer: Optimizer) -> None:
    """Mark an optimizer, so that torch's learning rate schedulers do not warn that it has not stepped."""
    vars(optimizer)[STEPPED_MARK] = True


# -- tensors ------------------------------------------------------------------------------------------------------


# The number of in-place changes of a tensor. Without it a step that changes its batch in place, and runs twice under
# a pipeline, would train on wrong values unnoticed.
version_of: Final[Callable[[Tensor], int]] = attrgetter("_version")


def storage_key(storage: torch.UntypedStorage) -> int:
    """A number that two living storages share only if they are one.

    The address of the data is 0 for every empty storage. Without it the call fails: nothing else shows
    which weights are tied.
    """
    key: int = storage._cdata
    return key


def stored_values(tensor: Tensor) -> Tensor:
    """The values of a sparse tensor, coalesced or not; the public method refuses one that is not."""
    values: Tensor = tensor._values()
    return values


# Nested containers of tensors. torch's pipeline stages flatten their arguments with these functions, so stages that
# pass on what they flatten must do the same. torch 2.14 has no public form in Python.
with needs_private("trainer_kit"):
    from torch.utils._pytree import (
        TreeSpec,
        tree_flatten,
        tree_leaves,
        tree_map_only,
        tree_unflatten,
    )

# Many tensors in one kernel, as torch's own optimizers and clipping do it. Without them the step that needs one
# refuses.
multiply_each: Final[Callable[..., object]] = find_private(
    "torch._foreach_mul_", "scaling of gradients"
)
add_to_each: Final[Callable[..., object]] = find_private(
    "torch._foreach_add_", "adding of gradients"
)
copy_to_each: Final[Callable[..., object]] = find_private(
    "torch._foreach_copy_", "averaging of weights"
)
norm_of_each: Final[Callable[..., Any]] = find_private(
    "torch._foreach_norm", "the norm of gradients"
)

# The common class of batch norms of every dimension, and of SyncBatchNorm. torch has no public name for it, so without
# it this module is not imported.
with needs_private("finding of batch norms"):
    from torch.nn.modules.batchnorm import _BatchNorm

BatchNorm: TypeAlias = _BatchNorm

# The number of the backward that runs in this thread; -1: none does. Without it a recomputed forward would count as
# a first one.
current_backward: Final[Callable[[], int]] = find_private(
    "torch._C._current_graph_task_id", "telling a forward from its recomputation"
)

# -- processes ----------------------------------------------------------------------------------------------------


def default_store() -> Any:
    """The store through which the processes of the world met.

    Torch keeps it private. Without it every entry point with several ranks would need a store, and a port, of its own.
    """
    with needs_private("meeting of ranks in the store of the world"):
        return dist.distributed_c10d._get_default_store()
