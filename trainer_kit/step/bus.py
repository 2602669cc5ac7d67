"""The bus: for each hook the methods that override it, looked up once per run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, final

from lightning_utilities.core.overrides import is_overridden
from torch import nn

from trainer_kit.core.datamodule import DataModule
from trainer_kit.core.errors import ConfigurationError, did_you_mean
from trainer_kit.core.hooks import HOOK_FACTS, Callback, DataHooks, ModuleHooks
from trainer_kit.core.protocols import TrainerLike
from trainer_kit.core.signatures import check_hooks, check_overrides, takes
from trainer_kit.core.types import Function

__all__ = ["Bus", "Listeners", "sorted_callbacks"]

# A hook of a user may take and return anything.
_Listener = Function
Listeners = tuple[_Listener, ...]
_ORDER = {"early": 0, "normal": 1, "late": 2}


class _Scope(Protocol):
    hook: str


def sorted_callbacks(callbacks: Iterable[Callback]) -> list[Callback]:
    """Sort by ``order``, then as given; refuse objects that are not callbacks, and equal state keys."""
    callbacks = list(callbacks)
    for callback in callbacks:
        _check_callback(callback)
    _check_state_keys(callbacks)
    return sorted(callbacks, key=lambda callback: _ORDER[callback.order])


def _check_callback(callback: object) -> None:
    if not isinstance(callback, Callback):
        raise ConfigurationError(
            "this is not a callback", found=repr(callback), fix=_fix_of_type(callback)
        )
    name = type(callback).__name__
    check_hooks(type(callback), Callback)
    check_overrides(type(callback), Callback)
    if callback.order not in _ORDER:
        raise ConfigurationError(
            f"{name}.order is unknown",
            found=repr(callback.order),
            fix=did_you_mean(str(callback.order), _ORDER),
        )


def _fix_of_type(candidate: object) -> str:
    """How to pass a callback instead of this object."""
    if isinstance(candidate, type) and issubclass(candidate, Callback):
        return f"make one: {candidate.__name__}(...)"
    if isinstance(candidate, Mapping):
        return "pass callbacks=list(mapping.values())"
    return "subclass trainer_kit.Callback, or use trainer.on(...)"


def _check_state_keys(callbacks: Sequence[Callback]) -> None:
    """Refuse two callbacks whose states a checkpoint would store under one key."""
    by_key: dict[str, Callback] = {}
    for callback in callbacks:
        if not is_overridden("state_dict", callback, Callback):
            continue
        key = callback.state_key
        if key in by_key:
            first = next(other for other in callbacks if other.state_key == key)
            raise ConfigurationError(
                f"two callbacks have the same state key {key!r}",
                fix=first.duplicate_key_fix,
            )
        by_key[key] = callback


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
        scope: its ``hook`` is set to the name of the hook being called, so that `log` knows where it is; not for
            `add_listener`, whose listeners log nothing.
    """

    if TYPE_CHECKING:
        # The attributes are the hooks of `Callback`; a test looks for others in all uses of a bus.
        def __getattr__(self, name: str) -> Listeners: ...

    on_train_epoch_end_late: Listeners

    def __init__(
        self,
        trainer: TrainerLike,
        module: nn.Module,
        callbacks: Sequence[Callback],
        datamodule: DataModule | None,
        scope: _Scope,
    ) -> None:
        # Looked up once: a run with callbacks that override nothing has no call for them in a step.
        for name in HOOK_FACTS:
            methods = self._callback_methods(name, trainer, module, callbacks)
            methods += self._module_methods(name, module, datamodule)
            methods = _wrapped(name, methods, callbacks)
            setattr(self, name, _entered(name, scope, methods))
        # Late callbacks read the reduced values of the epoch, to which the other listeners may have added.
        late: list[_Listener] = [
            partial(callback.on_train_epoch_end, trainer, module)
            for callback in callbacks
            if callback.order == "late"
            and is_overridden("on_train_epoch_end", callback, Callback)
        ]
        late = _wrapped("on_train_epoch_end", late, callbacks)
        self.on_train_epoch_end_late = _entered("on_train_epoch_end", scope, late)

    @staticmethod
    def _callback_methods(
        name: str,
        trainer: TrainerLike,
        module: nn.Module,
        callbacks: Sequence[Callback],
    ) -> list[_Listener]:
        methods: list[_Listener] = []
        for callback in callbacks:
            if not is_overridden(name, callback, Callback):
                continue
            # It has a tuple of its own.
            if callback.order == "late" and name == "on_train_epoch_end":
                continue
            method = getattr(callback, name)
            bound = partial(method, trainer, module)
            methods.append(
                _without_loader_index(name, bound, method, leading_arguments=2)
            )
        return methods

    @staticmethod
    def _module_methods(
        name: str, module: nn.Module, datamodule: DataModule | None
    ) -> list[_Listener]:
        methods: list[_Listener] = []
        if hasattr(ModuleHooks, name) and is_overridden(name, module, ModuleHooks):
            method = getattr(module, name)
            methods.append(
                _without_loader_index(name, method, method, leading_arguments=0)
            )
        if name != "on_exception" or datamodule is None:
            return methods
        if is_overridden(name, datamodule, DataHooks):
            methods.append(datamodule.on_exception)
        return methods

    def add_listener(
        self, name: str, listener: _Listener, first: bool = False
    ) -> Callable[[], None]:
        """Call one more listener in a hook; return a function that removes it again.

        Args:
            name: the hook.
            listener: gets the arguments of the module's hook, and logs nothing.
            first: call it before all others; otherwise after them.
        """
        listeners: Listeners = getattr(self, name)
        if first:
            setattr(self, name, (listener, *listeners))
        else:
            setattr(self, name, (*listeners, listener))

        def remove() -> None:
            remaining = [each for each in getattr(self, name) if each is not listener]
            setattr(self, name, tuple(remaining))

        return remove

    def silent(self, *audible: str) -> Bus:
        """Create a bus without listeners, except for the hooks named in ``audible``."""
        bus = Bus.__new__(Bus)
        for name in Bus.names():
            listeners: Listeners = ()
            if name in audible:
                listeners = getattr(self, name)
            setattr(bus, name, listeners)
        return bus

    @staticmethod
    def names() -> list[str]:
        """The names of all hooks, and of the late listeners."""
        return [*HOOK_FACTS, "on_train_epoch_end_late"]

    def listeners(self, name: str) -> list[str]:
        """The classes that override ``name``, in order, for ``explain()``."""
        return [
            _owner(listener)
            for listener in getattr(self, name)
            if not isinstance(listener, _Enter)
        ]


class _Enter:
    """The first entry of a non-empty hook: records which hook is being called."""

    __slots__ = ("name", "scope")

    def __init__(self, name: str, scope: _Scope) -> None:
        self.name = name
        self.scope = scope

    def __call__(self, *arguments: object) -> None:
        # Stored from here: a method of the scope would be one more Python call in every hook.
        self.scope.hook = self.name


def _entered(name: str, scope: _Scope, methods: Sequence[_Listener]) -> Listeners:
    # No entry either, so that a hook without listeners costs nothing.
    if not methods:
        return ()
    return (_Enter(name, scope), *methods)


def _wrapped(
    name: str, methods: list[_Listener], callbacks: Sequence[Callback]
) -> list[_Listener]:
    """The listeners of a hook, wrapped by the callbacks that override ``wrap_hook``."""
    # The profiler wraps hooks; where nothing wraps them they are called directly.
    for callback in callbacks:
        if is_overridden("wrap_hook", callback, Callback):
            methods = [
                callback.wrap_hook(name, _owner(method), method) for method in methods
            ]
    return methods


def _without_loader_index(
    name: str, bound: _Listener, method: _Listener, leading_arguments: int
) -> _Listener:
    """Adapt a listener of an evaluation hook that does not take its last argument, ``dataloader_idx``.

    Args:
        name: the hook.
        bound: what is called.
        method: the user's method, whose signature counts.
        leading_arguments: the arguments that ``bound`` adds: trainer and module.
    """
    # Lightning's hooks of training have no index of a loader.
    if not name.endswith(("_batch_start", "_batch_end")) or "train" in name:
        return bound
    arguments = 4 if name.endswith("_end") else 3
    if takes(method, leading_arguments + arguments):
        return bound
    return _WithoutLoader(bound)


class _WithoutLoader:
    """A listener that is called without the last argument."""

    __slots__ = ("func",)

    def __init__(self, func: _Listener) -> None:
        # Named as in `functools.partial`, which `_owner` looks through.
        self.func = func

    def __call__(self, *arguments: object) -> object:
        return self.func(*arguments[:-1])


def _owner(listener: object) -> str:
    """The class whose method a listener is."""
    while hasattr(listener, "func"):
        listener = listener.func
    return type(getattr(listener, "__self__", listener)).__name__
