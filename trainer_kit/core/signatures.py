"""Checks of users' classes, when they are created and when they are used: hooks, and overrides without effect."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection
from itertools import chain
from types import FunctionType
from typing import Final

from trainer_kit.core.errors import ConfigurationError, HookError, did_you_mean
from trainer_kit.core.types import Function

__all__ = ["check_hooks", "check_names", "check_overrides", "leave_out", "takes"]


# Hooks of earlier Lightning versions that this library does not call, and their replacements.
_FORMER = {
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
    "on_epoch_start": "on_train_epoch_start",
    "on_epoch_end": "on_train_epoch_end",
    "training_epoch_end": "on_train_epoch_end",
    "validation_epoch_end": "on_validation_epoch_end",
    "test_epoch_end": "on_test_epoch_end",
    "training_step_end": "on_train_batch_end",
    "validation_step_end": "on_validation_batch_end",
    "test_step_end": "on_test_batch_end",
}

_PACKAGE: Final = "trainer_kit."
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_CALLED_BY_USERS: Final = frozenset({"log", "log_dict"})
"""Names that a user's class may use for other methods."""


def check_names(cls: type, *specifications: type) -> None:
    """Raise `HookError` for a method of ``cls`` whose name is nearly that of a hook or step, when ``cls`` is created.

    All other checks are in `check_hooks`: a package may define classes that no program passes to a Trainer.

    Args:
        cls: the class that is being created; only methods that its body defines are checked.
        specifications: the classes that define the hooks.

    Raises:
        HookError: the message has the closest known name.
    """
    hooks = _hooks(specifications)
    for name in _functions(cls):
        # Former hooks are left to `check_hooks`, which knows whether the class's own code calls them.
        if name in hooks or name in _FORMER:
            continue
        if not name.startswith("on_") and not name.endswith("_step"):
            continue
        # retraining_step is a different name, and no misspelling.
        candidates = [step for step in _STEPS if step not in name]
        if name.startswith("on_"):
            candidates += [hook for hook in hooks if hook.startswith("on_")]
        fix = _nearest(name, candidates)
        if fix is not None:
            raise _no_hook(cls, name, fix)


def check_hooks(cls: type, *specifications: type) -> None:
    """Raise `HookError` for unknown hooks, and for hooks with wrong parameters, of a class that is used.

    Unknown hooks are ``on_*`` methods that no specification has, and hooks that Lightning has removed.

    Args:
        cls: the class of an object passed to a Trainer; its bases outside of user code are not checked.
        specifications: the classes that define the hooks.

    Raises:
        HookError: the message has the closest known name, or the expected parameters.
    """
    hooks = _hooks(specifications)
    # Names that a subclass of the current base defines: the base's own method is then never called as a hook.
    overridden: set[str] = set()
    users = [
        base
        for base in cls.__mro__
        if issubclass(base, specifications) and not base.__module__.startswith(_PACKAGE)
    ]
    # A class may use the name of a removed hook for a method that its own code calls.
    called: set[str] = set()
    for base in users:
        for method in _functions(base).values():
            # Without its own name: ``super().on_epoch_end()`` inside it is no call by other code.
            called.update(set(method.__code__.co_names) - {method.__name__})
    for base in users:
        for name, method in _functions(base).items():
            if name in overridden:
                continue
            if name in hooks:
                _check_parameters(base, name, method, hooks[name])
            elif name not in called:
                fix = _fix_for(name, hooks)
                if fix is not None:
                    raise _no_hook(base, name, fix)
        overridden |= vars(base).keys()


def _functions(cls: type) -> dict[str, FunctionType]:
    """The functions that the body of a class defines."""
    members = vars(cls).items()
    return {name: value for name, value in members if inspect.isfunction(value)}


def _hooks(specifications: Collection[type]) -> dict[str, FunctionType]:
    functions: dict[str, FunctionType] = {}
    for specification in specifications:
        functions.update(_functions(specification))
    return {
        name: function
        for name, function in functions.items()
        if not name.startswith("__") and name not in _CALLED_BY_USERS
    }


def _no_hook(cls: type, name: str, fix: str) -> HookError:
    return HookError(
        f"{cls.__name__}.{name} is not a hook and would never be called",
        found=f"def {name} in {cls.__module__}.{cls.__qualname__}",
        fix=fix,
    )


def _check_parameters(
    cls: type, name: str, method: FunctionType, hook: FunctionType
) -> None:
    expected = list(inspect.signature(hook).parameters.values())
    required = [
        parameter for parameter in expected if parameter.default is parameter.empty
    ]
    # A hook may leave out what the specification has a default for, such as ``dataloader_idx``.
    if not (takes(method, len(expected)) or takes(method, len(required))):
        raise HookError(
            f"{cls.__name__}.{name} has the wrong parameters",
            found=f"def {name}{inspect.signature(method)}",
            fix=f"def {name}({', '.join(parameter.name for parameter in expected)})",
        )


def _nearest(name: str, known: Collection[str]) -> str | None:
    # Closer than difflib's default of 0.6: a class may have methods with similar names of its own.
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.9)
    if not near:
        return None
    return f"did you mean {near[0]!r}?"


def _fix_for(name: str, hooks: Collection[str]) -> str | None:
    """The fix for a method of this name, or None where it is not a mistaken hook."""
    is_callback_hook = name.startswith("on_")
    replacement = _FORMER.get(name)
    if replacement in hooks:
        fix = f"define {replacement}"
        if name.endswith("_epoch_end") and not is_callback_hook:
            fix += " (it takes no outputs: keep them on self)"
        return fix
    if not is_callback_hook:
        return None
    candidates = [hook for hook in hooks if hook.startswith("on_")]
    return did_you_mean(name.replace("_val_", "_validation_"), candidates)


def takes(method: Function, count: int) -> bool:
    """Whether ``method`` can be called with ``count`` positional arguments."""
    try:
        inspect.signature(method).bind(*range(count))
    except TypeError:
        return False
    except ValueError:
        # A builtin that hides its signature: its call shows whether it fits.
        return True
    return True


_HOOKS: Final = "override a hook (on_train_batch_end, on_validation_end, ...) or a public method instead"


def check_overrides(cls: type, root: type) -> None:
    """Refuse a user's subclass of a class of this library that overrides a private or never-called method.

    ``never_called`` of a class maps each method that is never called to what to do instead.

    Args:
        cls: the class of an object that is used.
        root: the base class for extensions.

    Raises:
        ConfigurationError: the message has the override and the fix.
    """
    bases = [
        base for base in cls.__mro__ if issubclass(base, root) and base is not root
    ]
    shipped = [base for base in bases if base.__module__.startswith(_PACKAGE)]
    if not shipped or bases == shipped:
        return
    refused: dict[str, str] = {}
    # From the root on: a class may refuse a method in other words than its base.
    for base in reversed([*shipped, root]):
        refused.update(vars(base).get("never_called", {}))
    # `_abc_impl` belongs to Python: every abstract class has it.
    private = {
        name
        for name in chain.from_iterable(map(vars, shipped))
        if name.startswith("_") and not name.startswith(("__", "_abc"))
    }
    for base in bases:
        if base in shipped:
            continue
        for name in vars(base):
            if name in refused:
                problem = "would never be called"
                reason = "does not call it"
            elif name in private:
                problem = "replaces a private name"
                reason = "may change it"
            else:
                continue
            raise ConfigurationError(
                f"{base.__name__}.{name} {problem}",
                found=f"a subclass of {shipped[0].__name__}, which {reason}",
                fix=refused.get(name, _HOOKS),
            )


def leave_out(callback: object, hook: str, owner: type) -> None:
    """Disable a hook in which ``owner`` has nothing to do, so that the bus skips it, unless a subclass overrides it."""
    if getattr(type(callback), hook) is getattr(owner, hook):
        setattr(callback, hook, getattr(super(owner, callback), hook))
