"""Hooks are checked when a class is created, by name and by how many positional arguments they take."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from trainer_kit.core.errors import HookError, did_you_mean

__all__ = ["check_hooks", "takes"]


def check_hooks(cls: type, *specifications: type) -> None:
    """Refuse ``on_*`` methods of ``cls`` that no specification knows, and hooks with wrong parameters.

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
            if name.startswith("on_"):
                raise HookError(
                    f"{cls.__name__}.{name} is not a hook: nobody would ever call it",
                    found=f"def {name} in {cls.__module__}.{cls.__qualname__}",
                    fix=did_you_mean(name, (hook for hook in hooks if hook.startswith("on_"))),
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


def takes(method: Callable[..., Any], count: int) -> bool:
    """Whether ``method`` can be called with ``count`` positional arguments (names are free, the count is not)."""
    try:
        inspect.signature(method).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # a builtin that hides its signature
        return True
    return True
