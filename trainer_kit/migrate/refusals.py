"""What the library refuses of code that moves; its own errors are the reasons."""

from __future__ import annotations

import ast
import copy
import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple, final

from trainer_kit.accelerator import Accelerator
from trainer_kit.accelerator.fabric import Fabric
from trainer_kit.compat.lightning import FORMER_ARGUMENTS
from trainer_kit.core.arguments import known_arguments
from trainer_kit.core.errors import TrainerKitError, did_you_mean
from trainer_kit.core.hooks import Callback, DataHooks, ModuleHooks
from trainer_kit.core.module import TrainModule
from trainer_kit.core.registry import PRECISIONS, STRATEGIES
from trainer_kit.core.signatures import check_hooks, check_overrides, takes
from trainer_kit.core.types import Function
from trainer_kit.loggers.layout import DirectoryLogger
from trainer_kit.migrate.names import reason
from trainer_kit.precision.aliases import WORDS, make_precision
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.trainer import Trainer

__all__ = [
    "FACES",
    "Answer",
    "example_of",
    "follow",
    "wrong_arguments",
    "wrong_members",
]

FACES: Final = (Trainer, Accelerator, Fabric)
_STEPS: Final = {
    "training_step": 2,
    "validation_step": 3,
    "test_step": 3,
    "predict_step": 3,
}
"""The most arguments that the loop passes to each step."""


class Answer(NamedTuple):
    """Why the library refuses something: the kind of thing, the problem, the fix."""

    kind: str
    problem: str
    fix: str | None = None


@final
class _Shown(str):
    """A value known only by its source text, which messages show without the quotes of a string."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def wrong_arguments(
    callee: Function, passed: Mapping[str, tuple[object, str]]
) -> Iterator[tuple[str, Answer]]:
    """Yield the keyword arguments that a class or function of this library refuses, by name, with the reason.

    Args:
        callee: the class or function; it is not called.
        passed: by name, the value where it is a constant (else None), and its source.
    """
    try:
        parameters = inspect.signature(callee).parameters
    # Some builtins have no signature.
    except (TypeError, ValueError):
        return
    names = list(parameters)
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            # **kwargs takes every name; `**unknown` takes them only to refuse them with a message.
            if name != "unknown":
                return
            names.remove(name)
    for name, (value, source) in passed.items():
        try:
            if name not in parameters:
                # The library's own check raises, so that the finding has the same words as the error at run time.
                _refuse_argument(callee, name, source, names)
            elif callee is Trainer and isinstance(value, (str, int)):
                _check_word(name, value)
        except TrainerKitError as error:
            problem, fix = reason(error)
            yield name, Answer("argument", f"{problem} ({name}={source})", fix)


def _refuse_argument(
    callee: Function, name: str, source: str, names: Sequence[str]
) -> None:
    if isinstance(callee, type):
        former: Mapping[str, str] = {}
        if callee is Trainer:
            former = FORMER_ARGUMENTS
        constructor = _constructor(callee)
        # Refused by the decorator before the constructor itself runs.
        known_arguments(former)(constructor)(**{name: _Shown(source)})
    fix = did_you_mean(name, names, otherwise="leave it out")
    raise TrainerKitError(f"{callee.__name__} has no argument {name!r}", fix=fix)


def _constructor(cls: type) -> Function:
    """The function that a class, or the nearest base that has one, constructs its objects with."""
    for base in cls.__mro__:
        if "__init__" in vars(base):
            constructor: Function = vars(base)["__init__"]
            return constructor
    # object has one.
    raise AssertionError


def _check_word(name: str, value: Any) -> None:
    """Refuse values of Trainer arguments that are wrong on every device."""
    # `get` and `make_precision` raise the error of the Trainer; known names are not made, which may need a package.
    if name == "strategy":
        if value != "auto" and value not in STRATEGIES.names():
            STRATEGIES.get(value)
    elif name == "precision":
        if str(value).lower() not in WORDS and value not in PRECISIONS.names():
            make_precision(value)


def wrong_members(
    name: str, bases: tuple[type, ...], body: Sequence[ast.stmt]
) -> Iterator[tuple[ast.stmt, Answer]]:
    """Yield the members that the library refuses, trying each alone on a class without user code.

    Args:
        name: of the class.
        bases: the classes of this library that it extends.
        body: what it defines.
    """
    # One at a time, or the first refused one would hide the others.
    for member in body:
        value = None
        if isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef)):
            attribute = member.name
            value = _stub(member)
            if value is None:
                continue
        elif isinstance(member, ast.Assign) and isinstance(member.targets[0], ast.Name):
            attribute = member.targets[0].id
        else:
            continue
        try:
            answer = _refused_member(name, bases, attribute, value)
        # These bases combine only with the user's own bases, which are not imported.
        except TypeError:
            return
        if answer is not None:
            yield member, answer


def _refused_member(
    owner: str, bases: tuple[type, ...], name: str, value: Function | None
) -> Answer | None:
    """Why the library refuses one member of a class, when the class is created or when an object of it is used."""
    # Errors name the module of the class: `migrated`, as if it were a file of the project.
    members = {"__module__": "migrated", name: value}
    try:
        # new_class and not type(): it finds the metaclass of the bases.
        cls = types.new_class(owner, bases, {}, lambda space: space.update(members))
        specifications = [
            specification
            for specification in (Callback, ModuleHooks, DataHooks)
            if issubclass(cls, specification)
        ]
        if specifications:
            check_hooks(cls, *specifications)
        # As the Trainer does when it takes such an object.
        for root in (Callback, Strategy, DirectoryLogger):
            check_overrides(cls, root)
    except TrainerKitError as error:
        return Answer("hook", *reason(error))
    if inspect.isfunction(value) and issubclass(cls, TrainModule):
        return _uncallable(owner, name, value)
    return None


def _stub(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Function | None:
    """Make a function with the parameters of a parsed one and an empty body; None for a property and the like."""
    # A decorator with arguments may change the parameters; a bare one hardly does, apart from these three.
    for decorator in function.decorator_list:
        if not isinstance(decorator, ast.Name):
            return None
        if decorator.id in ("property", "staticmethod", "classmethod"):
            return None
    # What is compiled below must hold no expression of the user: annotations go, and defaults become None.
    parameters = copy.deepcopy(function.args)
    for parameter in ast.walk(parameters):
        if isinstance(parameter, ast.arg):
            parameter.annotation = None
    parameters.defaults = [ast.Constant(None) for _ in parameters.defaults]
    parameters.kw_defaults = [
        default and ast.Constant(None) for default in parameters.kw_defaults
    ]
    definition = ast.FunctionDef(
        function.name, parameters, [ast.Pass()], [], None, lineno=1, col_offset=0
    )
    module = ast.fix_missing_locations(ast.Module([definition], []))
    space: dict[str, Any] = {"__name__": "migrated"}
    exec(compile(module, "<stub>", "exec"), space)
    stub: Function = space[function.name]
    return stub


def _uncallable(owner: str, name: str, method: Function) -> Answer | None:
    """Why the loop cannot call an overridden method: it requires more arguments than the loop passes."""
    # Counts of arguments with self, from the fewest to the most that the loop passes.
    original = vars(TrainModule).get(name)
    if name in _STEPS:
        counts = range(2, _STEPS[name] + 2)
    elif inspect.isfunction(original) and not name.startswith("__"):
        positional = [
            p
            for p in inspect.signature(original).parameters.values()
            if p.kind is p.POSITIONAL_OR_KEYWORD
        ]
        counts = range(1, len(positional) + 1)
    else:
        return None
    # The loop passes only as many arguments as a step takes.
    if any(takes(method, count) for count in counts):
        return None
    parameters = str(inspect.signature(method))
    if "optimizer_idx" in parameters:
        fix = (
            "leave optimizer_idx out; several optimizers: configure_optimizers returns them by name and training_step "
            "a loss for each name, or self.automatic_optimization = False"
        )
    else:
        fix = f"at most {counts[-1] - 1} arguments are given"
    return Answer("hook", f"{owner}.{name}{parameters} has the wrong parameters", fix)


# Once for each class: a project has thousands of attributes to look up.
@cache
def example_of(kind: type) -> Any:
    """A Trainer, an Accelerator or a Fabric without a run, for looking up attributes."""
    if kind is Trainer:
        return Trainer(accelerator="cpu", devices=1, barebones=True)
    if kind is Fabric:
        return Fabric(accelerator="cpu", devices=1)
    return Accelerator(cpu=True)


def follow(
    value: object, attributes: Sequence[str], stored: bool = False
) -> tuple[object, Answer | None]:
    """Follow a chain of attributes within this library; return the value, or why an attribute is refused.

    Args:
        value: the object to start from.
        attributes: their names.
        stored: whether the last one is assigned to.
    """
    for position, name in enumerate(attributes, 1):
        is_last = position == len(attributes)
        owner = type(value).__name__
        if isinstance(value, type):
            owner = value.__name__
        # Before getattr: a private name of Lightning may exist here by chance, with another meaning.
        if name.startswith("_") and not name.startswith("__"):
            public = name.lstrip("_")
            fix = None
            if public in dir(value):
                fix = f"use {public}"
            problem = f"{owner}.{name} is private: here it does not exist or means something else"
            return None, Answer("private", problem, fix)
        if stored and is_last and _is_read_only(value, name):
            return None, Answer("attribute", f"{owner}.{name} cannot be set")
        try:
            value = getattr(value, name)
        except AttributeError as error:
            # Assigning a name that the class lacks defines an attribute of the user's own.
            if stored and is_last and name not in dir(type(value)):
                return None, None
            problem, fix = reason(error)
            fix = fix or did_you_mean(name, dir(value), otherwise="") or None
            return None, Answer("attribute", problem, fix)
        # The attribute exists only during a run.
        except Exception:
            return None, None
        # A tensor or a list: what it has is no matter of this library.
        if not is_last and not type(value).__module__.startswith("trainer_kit"):
            return None, None
    return value, None


def _is_read_only(value: object, name: str) -> bool:
    """Whether an attribute of an object is a property without a setter."""
    if isinstance(value, type):
        return False
    member = getattr(type(value), name, None)
    return isinstance(member, property) and member.fset is None
