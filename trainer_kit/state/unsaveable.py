"""Values of users' objects that a checkpoint cannot hold: found before the first step, and left out of a save."""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Final, final

from torch import nn

from trainer_kit.checkpoint.codecs import cannot_be_stored
from trainer_kit.checkpoint.encoding import encode
from trainer_kit.checkpoint.read import RUN_PARTS
from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.hparams import HParams
from trainer_kit.core.torch_private import (
    direct_buffers,
    direct_parameters,
    direct_submodules,
)
from trainer_kit.state.collect import State, rank_part_name

__all__ = ["Unsaveable", "entries_of_hook"]

_USER_PARTS: Final = ("callbacks", "datamodule")
_LIBRARY_PARTS: Final = (RUN_PARTS - {*_USER_PARTS}) | {
    "state_dict",
    "hparams_name",
    "hyper_parameters",
    "epoch",
    "global_step",
}
_MAPPINGS: Final = (dict, OrderedDict, HParams)
_HOOK: Final = "on_save_checkpoint"
_UNKNOWN: Final = object()
_BRANCHES: Final = (
    ast.If,
    ast.For,
    ast.While,
    ast.Try,
    ast.With,
    ast.Return,
    ast.Raise,
)


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
        self._reported: set[str | None] = set()  # key paths

    def check(
        self,
        state: Mapping[str, object],
        owners: Iterable[object],
        encode_state: Callable[[Mapping[str, object]], None],
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
        if self._drop:
            state = self.leave_out(state)
        encode_state(state)
        for owner in owners:
            entries = entries_of_hook(owner)
            if self._drop:
                self.leave_out(entries)
            else:
                _try_to_encode(entries, f"{type(owner).__name__}.{_HOOK}")

    def leave_out(self, state: Mapping[str, object]) -> State:
        """The state without the values of users' objects that cannot be saved; each is reported once."""
        saveable: State = {}
        for name, value in state.items():
            # A value of the library that cannot be saved is a bug: it must not be left out silently.
            if name in _LIBRARY_PARTS or name.startswith(rank_part_name("")):
                saveable[name] = value
                continue
            try:
                saveable[name] = self._saveable_value(value, name)
            except CheckpointError as error:
                self._report(error)
        return saveable

    def _saveable_value(self, value: object, path: str) -> object:
        """The value without those of its entries that cannot be saved; raises where it has no entries to leave out."""
        try:
            _try_to_encode(value, path)
        except CheckpointError:
            # Of other containers no item can be left out without a change of their meaning.
            if type(value) not in _MAPPINGS:
                raise
        else:
            return value
        assert isinstance(value, Mapping)
        saveable = {}
        for name, item in value.items():
            try:
                saveable[name] = self._saveable_value(item, f"{path}.{name}")
            except CheckpointError as error:
                self._report(error)
        return saveable

    def _report(self, error: CheckpointError) -> None:
        if error.key in self._reported:
            return
        self._reported.add(error.key)
        self._say(
            f"checkpoints are saved without {error.key}: {error.reason} (tk.checkpoint.codec registers how to store it)"
        )


def _try_to_encode(value: object, path: str) -> None:
    encode(value, {}, at=path, copy=False, sharded=True)


def entries_of_hook(owner: object) -> State:
    """What ``on_save_checkpoint`` will add to a checkpoint, as far as its source shows it without a call.

    These are entries with a constant name whose value is an attribute of the object, a global or a constant, or a new
    object of a class of the program; up to the first statement that decides or repeats something.
    """
    # Static: a descriptor of the user's class must not run.
    hook = inspect.getattr_static(type(owner), _HOOK, None)
    if not isinstance(hook, FunctionType) or hook.__module__.startswith("trainer_kit."):
        return {}
    definition = _definition(hook)
    if definition is None:
        return {}
    arguments = [*definition.args.posonlyargs, *definition.args.args]
    parameters = [argument.arg for argument in arguments]
    if len(parameters) < 2:
        return {}
    scope = _Scope(hook, parameters[0], owner)
    entries: State = {}
    for statement in definition.body:
        # What follows may depend on what only a run can tell.
        if isinstance(statement, _BRANCHES):
            break
        for name, expression in _assigned_entries(statement, parameters[-1]):
            entries[name] = scope.value(expression)
    return {name: value for name, value in entries.items() if value is not _UNKNOWN}


def _definition(hook: FunctionType) -> ast.FunctionDef | None:
    """The syntax tree of a function; None without a source, or for one of several lambdas in a line."""
    try:
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(hook))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if isinstance(definition, ast.FunctionDef):
        return definition
    return None


def _assigned_entries(
    statement: ast.stmt,
    checkpoint: str,
) -> Iterator[tuple[str, ast.expr]]:
    """The entries that a statement such as ``checkpoint["name"] = value`` sets in the dict of this name."""
    if not isinstance(statement, ast.Assign):
        return
    for target in statement.targets:
        if not isinstance(target, ast.Subscript) or not isinstance(
            target.slice, ast.Constant
        ):
            continue
        key = target.slice.value
        is_checkpoint = (
            isinstance(target.value, ast.Name) and target.value.id == checkpoint
        )
        if is_checkpoint and isinstance(key, str):
            yield key, statement.value


@final
class _Scope:
    """The names that a hook can read, for expressions without side effects."""

    def __init__(self, hook: FunctionType, owner_name: str, owner: object) -> None:
        self._closure = dict(
            zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True)
        )
        self._globals = hook.__globals__
        self._locals = set(hook.__code__.co_varnames)
        self._owner_name = owner_name
        self._owner = owner

    def value(self, expression: ast.expr) -> object:
        """The value of an expression; ``_UNKNOWN`` if only running it can tell."""
        if isinstance(expression, ast.Constant):
            return expression.value
        if isinstance(expression, ast.Name):
            return self._named_value(expression.id)
        if isinstance(expression, ast.Attribute):
            return _stored_attribute(self.value(expression.value), expression.attr)
        if isinstance(expression, ast.Dict):
            return self._dict_value(expression)
        if isinstance(expression, ast.Call):
            function = self.value(expression.func)
            if isinstance(function, type) and cannot_be_stored(function):
                return object.__new__(function)  # only its class is looked at
        return _UNKNOWN

    def _dict_value(self, expression: ast.Dict) -> dict[str, object]:
        entries: dict[str, object] = {}
        for key_expression, value_expression in zip(
            expression.keys, expression.values, strict=True
        ):
            if key_expression is None:  # ``**other``
                continue
            key = self.value(key_expression)
            value = self.value(value_expression)
            if isinstance(key, str) and value is not _UNKNOWN:
                entries[key] = value
        return entries

    def _named_value(self, name: str) -> object:
        if name == self._owner_name:
            return self._owner
        # In the order in which Python looks names up. A local has a value only while the hook runs.
        if name in self._locals:
            return _UNKNOWN
        if name in self._closure:
            try:
                return self._closure[name].cell_contents
            except ValueError:
                # An empty cell: the enclosing function has not bound this name yet.
                return _UNKNOWN
        return self._globals.get(name, vars(builtins).get(name, _UNKNOWN))


def _stored_attribute(value: object, name: str) -> object:
    """The stored attribute of an object or a module; no property and no ``__getattr__`` is called."""
    if value is _UNKNOWN or isinstance(value, type):
        return _UNKNOWN
    namespaces: list[Mapping[str, object]] = [getattr(value, "__dict__", {})]
    if isinstance(value, nn.Module):
        namespaces.append(direct_parameters(value))
        namespaces.append(direct_buffers(value))
        namespaces.append(direct_submodules(value))
    if isinstance(value, ModuleType):
        namespaces = [vars(value)]
    for namespace in namespaces:
        if name in namespace:
            return namespace[name]
    return _UNKNOWN
