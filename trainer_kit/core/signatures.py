"""Hooks are checked when a class is created, by name and by how many positional arguments they take."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection
from typing import Any

from trainer_kit.core.errors import HookError, did_you_mean

__all__ = ["check_hooks", "takes"]


# Hooks of Lightning's earlier versions: nobody calls them any more, and what took their place.
_FORMER = {
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
    "on_epoch_start": "on_train_epoch_start",
    "on_epoch_end": "on_train_epoch_end",
    "training_epoch_end": "on_train_epoch_end",
    "validation_epoch_end": "on_validation_epoch_end",
    "test_epoch_end": "on_test_epoch_end",
}

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def check_hooks(cls: type, *specifications: type) -> None:
    """Refuse methods of ``cls`` that look like hooks and are none, and hooks with wrong parameters.

    These are ``on_*`` methods that no specification knows, hooks that there were once, and misspelt steps.

    Args:
        cls: the class to check; only what its own body defines is looked at.
        specifications: the classes that write the hooks out.

    Raises:
        HookError: with the nearest known name, or with the parameters that were expected.
    """
    hooks = {name: value for spec in specifications for name, value in vars(spec).items() if inspect.isfunction(value)}
    for name, method in vars(cls).items():
        if name.startswith("__") or not inspect.isfunction(method):
            continue
        if name not in hooks:
            if fix := _meant(name, hooks):
                raise HookError(
                    f"{cls.__name__}.{name} is not a hook: nobody would ever call it",
                    found=f"def {name} in {cls.__module__}.{cls.__qualname__}",
                    fix=fix,
                )
            continue
        expected = list(inspect.signature(hooks[name]).parameters.values())
        required = [parameter for parameter in expected if parameter.default is parameter.empty]
        if not (takes(method, len(expected)) or takes(method, len(required))):
            raise HookError(
                f"{cls.__name__}.{name} cannot take what it is called with",
                found=f"def {name}{inspect.signature(method)}",
                fix=f"def {name}({', '.join(parameter.name for parameter in expected)})",
            )


def _meant(name: str, hooks: Collection[str]) -> str | None:
    """What to do about a method of this name, or None where it is nobody's business."""
    if (former := _FORMER.get(name)) in hooks:
        outputs = " (it takes no outputs: keep them on self)" if not name.startswith("on_") else ""
        return f"define {former}{outputs}"
    if name.startswith("on_"):
        return did_you_mean(name, (hook for hook in hooks if hook.startswith("on_")))
    if name.endswith("_step"):
        steps = [step for step in _STEPS if step not in name]  # retraining_step is a name of its own
        if near := difflib.get_close_matches(name, steps, n=1, cutoff=0.9):
            return f"did you mean {near[0]!r}?"
    return None


def takes(method: Callable[..., Any], count: int) -> bool:
    """Whether ``method`` can be called with ``count`` positional arguments (names are free, the count is not)."""
    try:
        inspect.signature(method).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # a builtin that hides its signature
        return True
    return True
