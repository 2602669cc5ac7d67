"""Functions as callbacks: `LambdaCallback` for several hooks, `FunctionCallback` for one, perhaps on a schedule."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeVar, cast, final

from trainer_kit.callbacks.conditions import following, in_run
from trainer_kit.core.errors import ConfigurationError, HookError, did_you_mean
from trainer_kit.core.hooks import Callback
from trainer_kit.core.progress import Duration, DurationLike
from trainer_kit.core.protocols import ModuleLike, TrainerLike
from trainer_kit.core.signatures import takes
from trainer_kit.step.schedule import check_tokens

__all__ = ["FunctionCallback", "LambdaCallback"]

_LEADING: Final = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
"""These hooks run before the first batch, epoch or step is completed, so they see a count of zero."""
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

    hooks: dict[str, Callable[..., Any]]

    def __new__(cls, **hooks: Callable[..., Any] | None) -> LambdaCallback:
        given = {
            name: function for name, function in hooks.items() if function is not None
        }
        for name, function in given.items():
            _check(name, function, f"LambdaCallback({name}=)")
        self = _with_methods(
            cls,
            {
                name: staticmethod(_as_function(function))
                for name, function in given.items()
            },
        )
        self.hooks = given
        return self

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        super().__init__()

    def __reduce__(self) -> tuple[Any, ...]:
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
        fn: Callable[..., Any],
        every: DurationLike | None = None,
        name: str | None = None,
    ) -> FunctionCallback:
        hook = event if event in _HOOKS else f"on_{event}"
        _check(hook, fn, f"the function for {event!r}")
        return _with_methods(
            cls, {hook: staticmethod(_as_function(fn)) if every is None else _when_due}
        )

    def __init__(
        self,
        event: str,
        fn: Callable[..., Any],
        every: DurationLike | None = None,
        name: str | None = None,
    ) -> None:
        self.event = event if event in _HOOKS else f"on_{event}"
        self.fn = fn
        self.every = None if every is None else _interval(self.event, every)
        code = getattr(fn, "__code__", None)
        place = getattr(fn, "__qualname__", type(fn).__qualname__)
        self.name = name or (
            place if code is None else f"{place}:{code.co_firstlineno}"
        )
        required, full = _counts(self.event)
        self._takes = full if takes(fn, full) else required
        # In on_train_epoch_end the epoch is not counted as completed yet.
        self._ahead = int(
            self.event == "on_train_epoch_end"
            and self.every is not None
            and self.every.unit == "ep"
        )
        self._leads = self.event in _LEADING
        self._counter, self._length = "step", 1.0
        self._next = math.inf
        self._restored = False

    @property
    def state_key(self) -> str:
        return f"FunctionCallback({self.event}, {self.name}, every={self.every})"

    def state_dict(self) -> dict[str, Any]:
        return {} if math.isinf(self._next) else {"next": self._next}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if "next" in state_dict:
            self._next, self._restored = state_dict["next"], True

    def on_fit_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        if self.every is not None:
            check_tokens("every", self.every, pl_module)
            every = in_run(self.every, trainer)
            self._counter, self._length = every.counter, every.value
            if not self._restored:
                count = getattr(trainer.progress, self._counter)
                self._next = following(count, self._length) - self._ahead
                if self._leads and count % self._length == 0:
                    self._next = count
            self._restored = False

    def _fire(self, trainer: TrainerLike, given: tuple[Any, ...]) -> Any:
        count = getattr(trainer.progress, self._counter) + self._ahead
        self._next = following(count, self._length) - self._ahead
        return self.fn(trainer, *given[: self._takes - 1])

    def __reduce__(self) -> tuple[Any, ...]:
        return (
            FunctionCallback,
            (self.event, self.fn, self.every, self.name),
            vars(self),
        )


def _when_due(self: FunctionCallback, trainer: TrainerLike, *given: Any) -> Any:
    if getattr(trainer.progress, self._counter) < self._next:
        return None
    return self._fire(trainer, given)


_C = TypeVar("_C", bound=Callback)


def _with_methods(cls: type[_C], methods: Mapping[str, Any]) -> _C:
    # The bus calls the hooks that a class overrides: this new class has exactly the given hooks, and a static method
    # is called without a wrapper.
    own = type(
        cls.__name__,
        (cls,),
        {**methods, "__module__": cls.__module__, "__qualname__": cls.__qualname__},
    )
    return cast(_C, object.__new__(own))


def _as_function(function: Callable[..., Any]) -> Callable[..., Any]:
    # is_overridden compares code objects, which builtins and callable objects do not have.
    return (
        function if hasattr(function, "__code__") else lambda *given: function(*given)
    )


def _counts(hook: str) -> tuple[int, int]:
    parameters = _HOOKS[hook]
    return sum(parameter.default is parameter.empty for parameter in parameters), len(
        parameters
    )


def _check(hook: str, function: Callable[..., Any], where: str) -> None:
    if hook not in _HOOKS:
        raise HookError(
            f"unknown hook {hook!r}", found=where, fix=did_you_mean(hook, _HOOKS)
        )
    if not callable(function):
        raise HookError(
            f"{where} must be a function", found=repr(function), fix="give a function"
        )
    required, full = _counts(hook)
    if not (takes(function, full) or takes(function, required)):
        names = ", ".join(parameter.name for parameter in _HOOKS[hook])
        raise HookError(
            f"{where} cannot take the arguments of the hook",
            found=f"{getattr(function, '__qualname__', function)}{inspect.signature(function)}",
            fix=f"take ({names})",
        )


def _interval(hook: str, every: DurationLike) -> Duration:
    if hook in ("setup", "on_fit_start"):
        raise ConfigurationError(
            f"{hook} is called once, before the first batch", found=f"every={every!r}"
        )
    if hook.startswith("on_train_batch") or hook.endswith("_backward"):
        unit: str | None = "ba"
    elif hook.startswith("on_train_epoch"):
        unit = "ep"
    else:
        unit = (
            "st"
            if hook
            in ("on_train_step_end", "on_before_optimizer_step", "on_before_zero_grad")
            else None
        )
    interval = Duration.parse(every, unit)
    if interval.value == 0:
        raise ConfigurationError(
            "an interval must be longer than zero", found=f"every={every!r}"
        )
    return interval
