"""Functions as callbacks: `LambdaCallback` for several hooks, `FunctionCallback` for one, perhaps on a schedule."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Final, TypeVar, cast, final

from trainer_kit.callbacks.conditions import following, in_run
from trainer_kit.core.errors import ConfigurationError, HookError, did_you_mean
from trainer_kit.core.hooks import HOOK_FACTS, Callback, hooks_where
from trainer_kit.core.progress import Duration, DurationLike
from trainer_kit.core.protocols import ModuleLike, TrainerLike
from trainer_kit.core.signatures import takes
from trainer_kit.core.types import Function, SavedState, StateDict
from trainer_kit.step.schedule import check_tokens

__all__ = ["FunctionCallback", "LambdaCallback"]

_HOOKS: Final = {
    name: list(inspect.signature(method).parameters.values())[1:]
    for name, method in vars(Callback).items()
    if name in ("setup", "teardown") or name.startswith("on_")
}


@final
class LambdaCallback(Callback):
    """A callback from functions: ``LambdaCallback(on_train_start=lambda trainer, pl_module: ...)``.

    The callback has only the given hooks, and each function is called directly.

    Args:
        hooks: by hook name, a function with the parameters of the hook after ``self``. None is ignored.

    Raises:
        HookError: for an unknown hook, or a function with the wrong number of parameters.

    Example:
        >>> hello = LambdaCallback(on_fit_start=lambda trainer, pl_module: print("hello"))
        >>> hello.on_fit_start(None, None)
        hello
    """

    hooks: dict[str, Function]

    def __new__(cls, **hooks: Function | None) -> LambdaCallback:
        functions = {
            name: function for name, function in hooks.items() if function is not None
        }
        methods = {}
        for name, function in functions.items():
            _check_function(name, function, f"LambdaCallback({name}=)")
            methods[name] = staticmethod(_as_function(function))
        self = _with_methods(cls, methods)
        self.hooks = functions
        return self

    def __init__(self, **hooks: Function | None) -> None:
        super().__init__()

    # The class of an object is made at run time, so pickle cannot find it by name.
    def __reduce__(self) -> tuple[partial[LambdaCallback], tuple[()]]:
        return partial(LambdaCallback, **self.hooks), ()


@final
class FunctionCallback(Callback):
    """One function at one event: what ``@trainer.on("train_batch_end", every="100ba")`` registers.

    Args:
        event: a hook's name, with or without ``on_``.
        fn: called like the hook: ``fn(trainer, pl_module, ...)``.
        every: call ``fn`` only at the first event at or after each multiple of this, measured by the completed counts
            of ``trainer.progress``. Zero is a multiple for events before the counted thing: ``train_epoch_start`` with
            ``every=2`` is epoch 0, 2, 4 and ``train_epoch_end`` epoch 1, 3, 5, each counted from 0. A bare number
            counts batches at batch events, epochs at epoch events, steps at optimizer events. Each rank has its own
            clock: with ``every="10min"`` the function must not communicate with other ranks.
        name: distinguishes two functions from the same line of source.

    Raises:
        HookError: for an unknown event, or a function with the wrong number of parameters.
        DurationError: for an interval that cannot be read.

    Example:
        >>> import torch
        >>> from trainer_kit import Trainer
        >>> from trainer_kit.testing import TinyModule
        >>> report = FunctionCallback("train_batch_end", lambda trainer, *_: print(trainer.progress.batch), every=2)
        >>> Trainer(max_epochs=1, barebones=True, callbacks=report).fit(TinyModule(), [torch.zeros(2, 32)] * 5)
        2
        4
    """

    def __new__(
        cls,
        event: str,
        fn: Function,
        every: DurationLike | None = None,
        name: str | None = None,
    ) -> FunctionCallback:
        hook = _hook_name(event)
        _check_function(hook, fn, f"the function for {event!r}")
        # Without an interval the bus calls the function itself.
        method: object = _call_when_due
        if every is None:
            method = staticmethod(_as_function(fn))
        return _with_methods(cls, {hook: method})

    def __init__(
        self,
        event: str,
        fn: Function,
        every: DurationLike | None = None,
        name: str | None = None,
    ) -> None:
        self.event = _hook_name(event)
        self.fn = fn
        self.every: Duration | None = None
        if every is not None:
            self.every = _parse_interval(self.event, every)
        self.name = name or _name_function(fn)
        # Lightning's functions leave out the trailing arguments that have defaults, such as `dataloader_idx`.
        required, full = _count_parameters(self.event)
        self._parameters = required
        if takes(fn, full):
            self._parameters = full
        # In on_train_epoch_end the epoch is not counted as completed yet.
        self._uncounted = 0
        if self.event == "on_train_epoch_end" and self.every is not None:
            self._uncounted = int(self.every.unit == "ep")
        self._is_leading = self.event in hooks_where(leads=True)
        self._counter = "step"
        self._length = 1.0
        # Never due until `on_fit_start` has set it: hooks before it have no counts to compare with.
        self._next = math.inf
        self._restored = False

    @property
    def state_key(self) -> str:
        return f"FunctionCallback({self.event}, {self.name}, every={self.every})"

    def state_dict(self) -> StateDict:
        if math.isinf(self._next):
            return {}
        return {"next": self._next}

    def load_state_dict(self, state_dict: SavedState) -> None:
        if "next" in state_dict:
            self._next = state_dict["next"]
            self._restored = True

    def on_fit_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        if self.every is None:
            return
        check_tokens("every", self.every, pl_module)
        every = in_run(self.every, trainer)
        self._counter = every.counter
        self._length = every.value
        # A resumed run keeps the clock of its checkpoint; from its counts, an interval would begin again.
        if not self._restored:
            count = getattr(trainer.progress, self._counter)
            self._next = following(count, self._length) - self._uncounted
            # Zero is a multiple for events before the counted thing.
            if self._is_leading and count % self._length == 0:
                self._next = count
        self._restored = False

    def _call_and_schedule(self, trainer: TrainerLike, args: tuple[Any, ...]) -> Any:
        # Before the call: a function that raises, and is caught, is not called again at once.
        count = getattr(trainer.progress, self._counter) + self._uncounted
        self._next = following(count, self._length) - self._uncounted
        # The function may leave out the last arguments of the hook.
        return self.fn(trainer, *args[: self._parameters - 1])

    def __reduce__(self) -> tuple[Any, ...]:
        return (
            FunctionCallback,
            (self.event, self.fn, self.every, self.name),
            vars(self),
        )


# The common case is one comparison: it runs at every batch.
def _call_when_due(self: FunctionCallback, trainer: TrainerLike, *args: Any) -> Any:
    if getattr(trainer.progress, self._counter) < self._next:
        return None
    return self._call_and_schedule(trainer, args)


def _hook_name(event: str) -> str:
    if event in _HOOKS:
        return event
    return f"on_{event}"


def _name_function(function: Function) -> str:
    """Name a function by its place in the source, which is the same in a resumed run."""
    # Two lambdas of one scope have the same qualified name, so the line distinguishes them.
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    if code is None:
        return name
    return f"{name}:{code.co_firstlineno}"


_C = TypeVar("_C", bound=Callback)


def _with_methods(cls: type[_C], methods: Mapping[str, object]) -> _C:
    # The bus calls the hooks that a class overrides: this new class has exactly the given hooks, and a static method
    # is called without a wrapper.
    subclass = type(
        cls.__name__,
        (cls,),
        {**methods, "__module__": cls.__module__, "__qualname__": cls.__qualname__},
    )
    # Not `cls.__new__`, which made this call.
    return cast(_C, object.__new__(subclass))


def _as_function(function: Function) -> Function:
    # is_overridden compares code objects, which builtins and callable objects do not have.
    if hasattr(function, "__code__"):
        return function
    return lambda *args: function(*args)


def _count_parameters(hook: str) -> tuple[int, int]:
    """The numbers of required and of all parameters."""
    parameters = _HOOKS[hook]
    required = sum(parameter.default is parameter.empty for parameter in parameters)
    return required, len(parameters)


def _check_function(hook: str, function: Function, label: str) -> None:
    if hook not in _HOOKS:
        raise HookError(
            f"unknown hook {hook!r}", found=label, fix=did_you_mean(hook, _HOOKS)
        )
    if not callable(function):
        raise HookError(
            f"{label} must be a function", found=repr(function), fix="give a function"
        )
    required, full = _count_parameters(hook)
    if takes(function, full) or takes(function, required):
        return
    name = getattr(function, "__qualname__", function)
    parameter_names = ", ".join(parameter.name for parameter in _HOOKS[hook])
    raise HookError(
        f"{label} cannot take the arguments of the hook",
        found=f"{name}{inspect.signature(function)}",
        fix=f"take ({parameter_names})",
    )


def _parse_interval(hook: str, every: DurationLike) -> Duration:
    if hook in ("setup", "on_fit_start"):
        raise ConfigurationError(
            f"{hook} is called once, before the first batch", found=f"every={every!r}"
        )
    # Elsewhere a bare number has no obvious unit, and is refused.
    unit = None
    if hook in HOOK_FACTS:
        unit = HOOK_FACTS[hook].counts
    interval = Duration.parse(every, unit)
    if interval.value == 0:
        raise ConfigurationError(
            "an interval must be longer than zero", found=f"every={every!r}"
        )
    return interval
