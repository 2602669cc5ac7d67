"""The bus: for each hook the methods that override it, looked up once per run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, final

from lightning_utilities.core.overrides import is_overridden
from torch import nn

from trainer_kit.core.datamodule import DataModule
from trainer_kit.core.errors import ConfigurationError, did_you_mean
from trainer_kit.core.hooks import Callback, DataHooks, ModuleHooks
from trainer_kit.core.protocols import TrainerLike
from trainer_kit.core.signatures import check_hooks, check_overrides, takes

__all__ = ["Bus", "Listeners", "sorted_callbacks"]

Listeners = tuple[Callable[..., Any], ...]
_ORDER = {"early": 0, "normal": 1, "late": 2}


class _Scope(Protocol):
    hook: str


def sorted_callbacks(callbacks: Iterable[Any]) -> list[Callback]:
    """Sort by ``order``, then as given; refuse objects that are not callbacks, and equal state keys."""
    chosen = list(callbacks)
    for callback in chosen:
        if not isinstance(callback, Callback):
            kind = isinstance(callback, type) and issubclass(callback, Callback)
            fix = "subclass trainer_kit.Callback, or use trainer.on(...)"
            if kind:
                fix = f"make one: {callback.__name__}(...)"
            elif isinstance(callback, Mapping):
                fix = "pass callbacks=list(mapping.values())"
            raise ConfigurationError("this is not a callback", found=repr(callback), fix=fix)
        check_hooks(type(callback), Callback)
        check_overrides(type(callback), Callback)
        if callback.order not in _ORDER:
            raise ConfigurationError(
                f"{type(callback).__name__}.order is unknown",
                found=repr(callback.order),
                fix=did_you_mean(str(callback.order), _ORDER),
            )
    keys = [
        callback.state_key for callback in chosen if is_overridden("state_dict", callback, Callback)
    ]
    for key in keys:
        if keys.count(key) > 1:
            first = next(callback for callback in chosen if callback.state_key == key)
            raise ConfigurationError(
                f"two callbacks have the same state key {key!r}", fix=first.duplicate_key_fix
            )
    return sorted(chosen, key=lambda callback: _ORDER[callback.order])


@final
class Bus:
    """One tuple of bound methods for each hook: only overridden hooks, callbacks first, then the module.

    ``on_train_epoch_end`` of callbacks with ``order = "late"`` is in ``on_train_epoch_end_late``, which is called after
    the values of the epoch are reduced.

    Args:
        trainer: the first argument of callbacks.
        module: the second argument of callbacks; its own hooks are called last.
        callbacks: in the order in which they are called.
        datamodule: its ``on_exception`` is called.
        scope: its ``hook`` is set to the name of the hook being called, so that `log` knows where it is.
    """

    on_fit_start: Listeners
    on_fit_end: Listeners
    on_sanity_check_start: Listeners
    on_sanity_check_end: Listeners
    on_train_start: Listeners
    on_train_end: Listeners
    on_train_epoch_start: Listeners
    on_train_epoch_end: Listeners
    on_train_batch_start: Listeners
    on_train_batch_end: Listeners
    on_train_step_end: Listeners
    on_before_zero_grad: Listeners
    on_before_backward: Listeners
    on_after_backward: Listeners
    on_before_optimizer_step: Listeners
    on_validation_start: Listeners
    on_validation_end: Listeners
    on_validation_epoch_start: Listeners
    on_validation_epoch_end: Listeners
    on_validation_batch_start: Listeners
    on_validation_batch_end: Listeners
    on_test_start: Listeners
    on_test_end: Listeners
    on_test_epoch_start: Listeners
    on_test_epoch_end: Listeners
    on_test_batch_start: Listeners
    on_test_batch_end: Listeners
    on_predict_start: Listeners
    on_predict_end: Listeners
    on_predict_epoch_start: Listeners
    on_predict_epoch_end: Listeners
    on_predict_batch_start: Listeners
    on_predict_batch_end: Listeners
    on_exception: Listeners
    on_save_checkpoint: Listeners
    on_load_checkpoint: Listeners
    on_checkpoint_committed: Listeners
    on_train_epoch_end_late: Listeners

    def __init__(
        self,
        trainer: TrainerLike,
        module: nn.Module,
        callbacks: Sequence[Callback],
        datamodule: DataModule | None,
        scope: _Scope,
    ) -> None:
        for name in Bus.names():
            found: list[Callable[..., Any]] = [
                _fitting(
                    name,
                    partial(getattr(callback, name), trainer, module),
                    getattr(callback, name),
                    2,
                )
                for callback in callbacks
                if is_overridden(name, callback, Callback)
                and not (callback.order == "late" and name == "on_train_epoch_end")
            ]
            found += self._of_module(name, module, datamodule)
            setattr(self, name, _entered(name, scope, _wrapped(name, found, callbacks)))
        late: list[Callable[..., Any]] = [
            partial(callback.on_train_epoch_end, trainer, module)
            for callback in callbacks
            if callback.order == "late" and is_overridden("on_train_epoch_end", callback, Callback)
        ]
        late = _wrapped("on_train_epoch_end", late, callbacks)
        self.on_train_epoch_end_late = _entered("on_train_epoch_end", scope, late)

    @staticmethod
    def _of_module(
        name: str, module: nn.Module, datamodule: DataModule | None
    ) -> list[Callable[..., Any]]:
        found: list[Callable[..., Any]] = []
        if hasattr(ModuleHooks, name) and is_overridden(name, module, ModuleHooks):
            found.append(_fitting(name, getattr(module, name), getattr(module, name), 0))
        if (
            name == "on_exception"
            and datamodule is not None
            and is_overridden(name, datamodule, DataHooks)
        ):
            found.append(datamodule.on_exception)
        return found

    def silent(self) -> Bus:
        """Make a bus without listeners."""
        quiet = Bus.__new__(Bus)
        for name in Bus.__annotations__:
            setattr(quiet, name, ())
        return quiet

    @staticmethod
    def names() -> list[str]:
        """The names of all hooks."""
        return [name for name in vars(Callback) if name.startswith("on_")]

    def listeners(self, name: str) -> list[str]:
        """The classes that override ``name``, in order, for ``explain()``."""
        return [
            _owner(listener) for listener in getattr(self, name) if not isinstance(listener, _Enter)
        ]


class _Enter:
    """The first entry of a non-empty hook: records which hook is being called."""

    __slots__ = ("name", "scope")

    def __init__(self, name: str, scope: _Scope) -> None:
        self.name, self.scope = name, scope

    def __call__(self, *arguments: Any) -> None:
        self.scope.hook = self.name


def _entered(name: str, scope: _Scope, found: Sequence[Callable[..., Any]]) -> Listeners:
    return (_Enter(name, scope), *found) if found else ()


def _wrapped(
    name: str, found: list[Callable[..., Any]], callbacks: Sequence[Callback]
) -> list[Callable[..., Any]]:
    """The listeners of a hook, wrapped by the callbacks that override ``wrap_hook``."""
    for callback in callbacks:
        if is_overridden("wrap_hook", callback, Callback):
            found = [callback.wrap_hook(name, _owner(listener), listener) for listener in found]
    return found


def _fitting(
    name: str, bound: Callable[..., Any], method: Callable[..., Any], leading: int
) -> Callable[..., Any]:
    """Adapt a listener that lacks the last argument of evaluation hooks, ``dataloader_idx``."""
    if not name.endswith(("_batch_start", "_batch_end")) or "train" in name:
        return bound
    count = leading + (4 if name.endswith("_end") else 3)
    if takes(method, count):
        return bound
    return _WithoutLoader(bound)


class _WithoutLoader:
    __slots__ = ("func",)

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func = func

    def __call__(self, *arguments: Any) -> Any:
        return self.func(*arguments[:-1])


def _owner(listener: Any) -> str:
    while hasattr(listener, "func"):
        listener = listener.func
    return type(getattr(listener, "__self__", listener)).__name__
