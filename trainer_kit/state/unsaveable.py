"""Values of users' objects that a checkpoint cannot hold: found before the first step, and left out of a save."""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, Final, final

from torch import nn

from trainer_kit.checkpoint.codecs import cannot_be_stored
from trainer_kit.checkpoint.encoding import encode
from trainer_kit.checkpoint.read import OF_A_RUN
from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.hparams import HParams
from trainer_kit.state.collect import own_part

__all__ = ["Unsaveable", "entries_of_hook"]

_OF_USERS: Final = ("callbacks", "datamodule")
_OF_THE_LIBRARY: Final = (OF_A_RUN - {*_OF_USERS}) | {
    "state_dict",
    "hyper_parameters",
    "epoch",
    "global_step",
}
_MAPPINGS: Final = (dict, OrderedDict, HParams)
_HOOK: Final = "on_save_checkpoint"
_UNKNOWN: Final = object()


@final
class Unsaveable:
    """What a run does about values that its checkpoints cannot hold.

    Before the first step they are an error, with ``drop`` a line. What only a save sees is left out with a line in both
    cases: a run that has trained for hours does not end by it.

    Args:
        drop: ``Trainer(on_unsaveable="drop")``.
        say: prints a line on rank 0.
    """

    def __init__(self, drop: bool, say: Callable[[str], None]) -> None:
        self._drop = drop
        self._say = say
        self._reported: set[str | None] = set()

    def check(
        self,
        state: Mapping[str, Any],
        owners: Iterable[Any],
        encode_state: Callable[[Any], None],
    ) -> None:
        """Raise for what cannot be saved, or report it.

        Args:
            state: of the run, without the entries of hooks.
            owners: objects that may define ``on_save_checkpoint``. It is not called, since it may write files or count
                its calls: its source is read.
            encode_state: encodes a state without writing it.

        Raises:
            CheckpointError: something cannot be saved.
        """
        encode_state(self.leave_out(state) if self._drop else state)
        for owner in owners:
            entries = entries_of_hook(owner)
            if self._drop:
                self.leave_out(entries)
                continue
            encode(
                entries,
                {},
                at=f"{type(owner).__name__}.{_HOOK}",
                copy=False,
                sharded=True,
            )

    def leave_out(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state without the values of users' objects that cannot be saved; each is reported once."""
        saved: dict[str, Any] = {}
        for name, part in state.items():
            if name in _OF_THE_LIBRARY or name.startswith(own_part("")):
                saved[name] = part
                continue
            try:
                saved[name] = self._without(part, name)
            except CheckpointError as error:
                self._report(error)
        return saved

    def _without(self, value: Any, path: str) -> Any:
        try:
            encode(value, {}, at=path, copy=False, sharded=True)
        except CheckpointError:
            if type(value) not in _MAPPINGS:
                raise
        else:
            return value
        saved = {}
        for name, item in value.items():
            try:
                saved[name] = self._without(item, f"{path}.{name}")
            except CheckpointError as error:
                self._report(error)
        return saved

    def _report(self, error: CheckpointError) -> None:
        if error.key in self._reported:
            return
        self._reported.add(error.key)
        self._say(
            f"checkpoints are saved without {error.key}: {error.reason} (tk.checkpoint.codec registers how to store it)"
        )


def entries_of_hook(owner: Any) -> dict[str, Any]:
    """What ``on_save_checkpoint`` will add to a checkpoint, as far as its source shows it without a call.

    These are entries with a constant name whose value is an attribute of the object, a global or a constant, or a new
    object of a class of the program; up to the first statement that decides or repeats something.
    """
    hook = inspect.getattr_static(type(owner), _HOOK, None)
    if not isinstance(hook, FunctionType) or hook.__module__.startswith("trainer_kit."):
        return {}
    try:
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(hook))).body
    except (
        OSError,
        TypeError,
        SyntaxError,
        ValueError,
    ):  # without source, or one of several lambdas in a line
        return {}
    if not isinstance(definition, ast.FunctionDef):
        return {}
    names = [argument.arg for argument in definition.args.args]
    if len(names) < 2:
        return {}
    scope = _Scope(hook, names[0], owner)
    entries: dict[str, Any] = {}
    for statement in definition.body:
        if isinstance(
            statement,
            (ast.If, ast.For, ast.While, ast.Try, ast.With, ast.Return, ast.Raise),
        ):
            break
        for name, value in _assigned(statement, names[-1]):
            entries[name] = scope.value(value)
    return {name: value for name, value in entries.items() if value is not _UNKNOWN}


def _assigned(statement: ast.stmt, checkpoint: str) -> Iterator[tuple[str, ast.expr]]:
    """The entries that a statement such as ``checkpoint["name"] = value`` sets in the dict of this name."""
    if not isinstance(statement, ast.Assign):
        return
    for target in statement.targets:
        if not (
            isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant)
        ):
            continue
        if (
            isinstance(target.value, ast.Name)
            and target.value.id == checkpoint
            and isinstance(target.slice.value, str)
        ):
            yield target.slice.value, statement.value


@final
class _Scope:
    """The names that a hook can read, for expressions without side effects."""

    def __init__(self, hook: FunctionType, owner_name: str, owner: Any) -> None:
        self._closure = dict(
            zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True)
        )
        self._globals = hook.__globals__
        self._locals = set(hook.__code__.co_varnames)
        self._owner_name = owner_name
        self._owner = owner

    def value(self, expression: ast.expr) -> Any:
        """The value of an expression; ``_UNKNOWN`` if only running it can tell."""
        if isinstance(expression, ast.Constant):
            return expression.value
        if isinstance(expression, ast.Name):
            return self._named(expression.id)
        if isinstance(expression, ast.Attribute):
            return _attribute(self.value(expression.value), expression.attr)
        if isinstance(expression, ast.Dict):
            keys = [
                self.value(key) if key is not None else _UNKNOWN
                for key in expression.keys
            ]
            values = [self.value(value) for value in expression.values]
            pairs = zip(keys, values, strict=True)
            return {
                key: value
                for key, value in pairs
                if isinstance(key, str) and value is not _UNKNOWN
            }
        if isinstance(expression, ast.Call):
            function = self.value(expression.func)
            unsaveable = isinstance(function, type) and cannot_be_stored(function)
            return (
                object.__new__(function) if unsaveable else _UNKNOWN
            )  # only its class is looked at
        return _UNKNOWN

    def _named(self, name: str) -> Any:
        if name == self._owner_name:
            return self._owner
        if name in self._locals:
            return _UNKNOWN
        if name in self._closure:
            try:
                return self._closure[name].cell_contents
            except ValueError:  # a name that is not bound yet
                return _UNKNOWN
        return self._globals.get(name, vars(builtins).get(name, _UNKNOWN))


def _attribute(value: Any, name: str) -> Any:
    """The stored attribute of an object or a module; no property and no ``__getattr__`` is called."""
    if value is _UNKNOWN or isinstance(value, type):
        return _UNKNOWN
    places = [getattr(value, "__dict__", {})]
    if isinstance(value, nn.Module):
        places += [value._parameters, value._buffers, value._modules]
    if isinstance(value, ModuleType):
        places = [vars(value)]
    return next((place[name] for place in places if name in place), _UNKNOWN)
