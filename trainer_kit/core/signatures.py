"""Hooks are checked when a class is created, by name and number of positional arguments; constructors when called."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from trainer_kit.core.errors import ConfigurationError, HookError, did_you_mean

__all__ = ["check_hooks", "known_arguments", "takes"]

_Taken = ParamSpec("_Taken")
_Returned = TypeVar("_Returned")


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


def known_arguments(
    former: Mapping[str, str],
) -> Callable[[Callable[_Taken, _Returned]], Callable[_Taken, _Returned]]:
    """Decorate a constructor: an argument that it does not take is refused with what to write instead.

    Args:
        former: the replacement for names that earlier or other versions take; ``{value}`` in it is what was given.

    Example:
        >>> class Runner:
        ...     @known_arguments({"gpus": "devices={value}"})
        ...     def __init__(self, *, devices=1):
        ...         self.devices = devices
        >>> Runner(devices=2).devices
        2
        >>> Runner(gpus=2)
        Traceback (most recent call last):
        trainer_kit.core.errors.ConfigurationError: Runner has no argument 'gpus'
          found: gpus=2
          fix:   devices=2
    """

    def decorate(constructor: Callable[_Taken, _Returned]) -> Callable[_Taken, _Returned]:
        known = list(inspect.signature(constructor).parameters)[1:]

        @wraps(constructor)
        def checked(*args: _Taken.args, **kwargs: _Taken.kwargs) -> _Returned:
            for name, value in kwargs.items():
                if name not in known:
                    fix = former[name].format(value=repr(value)) if name in former else did_you_mean(name, known)
                    kind = constructor.__qualname__.split(".")[0]
                    raise ConfigurationError(f"{kind} has no argument {name!r}", found=f"{name}={value!r}", fix=fix)
            return constructor(*args, **kwargs)

        return checked

    return decorate
