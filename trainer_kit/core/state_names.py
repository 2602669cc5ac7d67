"""The names of weights in a state: those of the user's model, without torch's wrappers, whichever of them it has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Final, TypeVar

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from trainer_kit.core.errors import add_note
from trainer_kit.core.hooks import ModuleHooks
from trainer_kit.core.torch_private import (
    CHECKPOINTED_MODULE,
    CHILDREN,
    COMPILED_MODULE,
    direct_submodules,
    set_versions,
    versions_of,
)
from trainer_kit.core.types import SavedState, StateDict

__all__ = [
    "load_module_weights",
    "named_state",
    "names_in",
    "plain_state",
    "report_differences",
    "state_name",
    "uncompiled",
    "without_wrappers",
]

_WRAPPERS: Final = (f"{COMPILED_MODULE}.", f"{CHECKPOINTED_MODULE}.")
"""What ``torch.compile`` and torch's activation checkpointing put before the names inside a wrapped module."""
_MOST: Final = 5
_Object = TypeVar("_Object")


def state_name(name: str) -> str:
    """The name of a weight without the names of torch's wrappers.

    Example:
        >>> state_name("blocks.0._checkpoint_wrapped_module.weight"), state_name("net._orig_mod.bias")
        ('blocks.0.weight', 'net.bias')
    """
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def uncompiled(module: _Object) -> _Object:
    """The module inside the result of ``torch.compile``; any other object itself.

    Example:
        >>> import torch
        >>> net = nn.Linear(1, 1)
        >>> uncompiled(torch.compile(net, backend="eager")) is net, uncompiled(net) is net
        (True, True)
    """
    # A module whose constructor has not called that of nn.Module has no `_modules`.
    if isinstance(module, nn.Module):
        inner: _Object | None = vars(module).get(CHILDREN, {}).get(COMPILED_MODULE)
        if inner is not None:
            return inner
    return module


def without_wrappers(state: SavedState) -> SavedState:
    """A state with the names that the model has without wrappers; the same object if no name changes."""
    return _renamed(state, _plain_names(state))


def _plain_names(state: SavedState) -> dict[str, str]:
    # A file may have keys of any type, which are no names.
    return {name: state_name(name) for name in state if isinstance(name, str)}


def plain_state(module: nn.Module) -> StateDict:
    """``module.state_dict()`` with the names that the module has without wrappers."""
    return dict(without_wrappers(module.state_dict()))


def names_in(module: nn.Module, state: SavedState) -> SavedState:
    """A state with the names that ``module.load_state_dict`` expects, from names with or without wrappers."""
    names = _plain_names(state)
    # torch's checkpoint wrapper adds its name in a load by itself; a compiled module does not.
    if any(
        COMPILED_MODULE in direct_submodules(submodule)
        for submodule in module.modules()
    ):
        expected = {state_name(name): name for name in module.state_dict()}
        names = {name: expected.get(plain, plain) for name, plain in names.items()}
    return _renamed(state, names)


def _renamed(state: SavedState, names: Mapping[str, str]) -> SavedState:
    if all(name == other for name, other in names.items()):
        return state
    renamed = OrderedDict()
    for name, value in state.items():
        renamed[names.get(name, name)] = value
    # torch attaches the versions of modules, by their names, and loads states of older versions by them.
    metadata = versions_of(state)
    if metadata is not None:
        versions = dict(metadata)
        for name, version in metadata.items():
            plain_name = state_name(f"{name}.")[:-1]
            versions[plain_name] = version
        set_versions(renamed, versions)
    return renamed


_OTHER_MODULE: Final = "the module was built with other arguments, or by other code, than the one in the checkpoint"
_SAVED_ARGUMENTS: Final = (
    ": use the saved arguments, as Module.load_from_checkpoint(path) does after self.save_hyperparameters() in"
    " __init__"
)
_OTHER_NAMES: Final = "with strict=False, or self.strict_loading = False, parameters with other names keep their values"


def load_module_weights(
    module: nn.Module, state: SavedState, strict: bool, **options: bool
) -> None:
    """``module.load_state_dict``; without ``strict`` a warning names what is not loaded.

    Args:
        module: whose weights are replaced.
        state: weights by name, with or without the names of wrappers.
        strict: whether other names are an error.
        options: further arguments of ``load_state_dict``.

    Raises:
        RuntimeError: torch's own, with a note on the usual cause, for other shapes, and for other names with
            ``strict``.
    """
    weights = names_in(module, state)
    try:
        result = module.load_state_dict(weights, strict=strict, **options)
    except RuntimeError as error:
        _explain(error, module)
        raise
    # None from a module whose ``load_state_dict`` returns nothing.
    if not strict and result is not None:
        missing, unexpected = (list(map(state_name, names)) for names in result)
        report_differences(missing, unexpected)


def _explain(error: RuntimeError, module: nn.Module) -> None:
    """Add the usual cause to torch's error about other names or shapes; any other error has another cause."""
    problem = str(error)
    has_other_shapes = "size mismatch" in problem
    has_other_names = "Missing key" in problem or "Unexpected key" in problem
    if not has_other_shapes and not has_other_names:
        return
    note = _OTHER_MODULE
    # A plain module of torch has no load_from_checkpoint.
    if isinstance(module, ModuleHooks):
        note += _SAVED_ARGUMENTS
    add_note(error, note)
    if not has_other_shapes:
        add_note(error, _OTHER_NAMES)


def report_differences(missing: Collection[str], unexpected: Collection[str]) -> None:
    """Warn on rank 0 about weights that were not loaded; the number of names in the line is bounded.

    Args:
        missing: names of the module that the state does not have.
        unexpected: names of the state that the module does not have.
    """
    lines = []
    if missing:
        lines.append(
            f"not in the checkpoint, so the module keeps its own values: {_first(missing)}"
        )
    if unexpected:
        lines.append(f"only in the checkpoint, so not loaded: {_first(unexpected)}")
    if lines:
        rank_zero_warn(
            f"weights were loaded with strict=False; {'; '.join(lines)}", stacklevel=4
        )


def _first(names: Collection[str]) -> str:
    listed = sorted(names)
    text = ", ".join(listed[:_MOST])
    unlisted = len(listed) - _MOST
    if unlisted > 0:
        text += f" and {unlisted} more"
    return f"{text} (keys: {len(listed)})"


def named_state(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by their names without wrappers, a tied one under each of its names."""
    return {
        state_name(name): parameter
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
