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
from trainer_kit.commands.migrate_names import reason
from trainer_kit.compat.lightning import FORMER_ARGUMENTS
from trainer_kit.core.arguments import known_arguments
from trainer_kit.core.errors import TrainerKitError, did_you_mean
from trainer_kit.core.hooks import Callback, DataHooks, ModuleHooks
from trainer_kit.core.module import TrainModule
from trainer_kit.core.registry import PRECISIONS, STRATEGIES
from trainer_kit.core.signatures import check_hooks, check_overrides, takes
from trainer_kit.loggers.layout import DirectoryLogger
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
    """A value known only by its source text."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def wrong_arguments(
    callee: Any, given: Mapping[str, tuple[Any, str]]
) -> Iterator[tuple[str, Answer]]:
    """Yield the keyword arguments that a class or function of this library refuses, by name, with the reason.

    Args:
        callee: the class or function; it is not called.
        given: by name, the value where it is a constant (else None), and its source.
    """
    try:
        known = inspect.signature(callee).parameters
    except (TypeError, ValueError):  # a builtin
        return
    takes_all = [
        name
        for name, parameter in known.items()
        if parameter.kind is parameter.VAR_KEYWORD
    ]
    if takes_all not in ([], ["unknown"]):  # what arrives in `unknown` is refused
        return
    for name, (value, source) in given.items():
        try:
            if name not in known:
                _refuse_argument(
                    callee, name, source, [each for each in known if each != "unknown"]
                )
            elif callee is Trainer and isinstance(value, (str, int)):
                _check_word(name, value)
        except TrainerKitError as error:
            problem, fix = reason(error)
            yield name, Answer("argument", f"{problem} ({name}={source})", fix)


def _refuse_argument(callee: Any, name: str, source: str, known: Sequence[str]) -> None:
    if isinstance(callee, type):
        former = FORMER_ARGUMENTS if callee is Trainer else {}
        constructor = next(
            vars(one)["__init__"] for one in callee.__mro__ if "__init__" in vars(one)
        )
        known_arguments(former)(constructor)(**{name: _Shown(source)})
    fix = did_you_mean(name, known, otherwise="leave it out")
    raise TrainerKitError(f"{callee.__name__} has no argument {name!r}", fix=fix)


def _check_word(name: str, value: Any) -> None:
    """Refuse values of Trainer arguments that are wrong on every device."""
    if name == "strategy" and value != "auto" and value not in STRATEGIES.names():
        STRATEGIES.get(value)
    if (
        name == "precision"
        and str(value).lower() not in WORDS
        and value not in PRECISIONS.names()
    ):
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
    for member in body:
        if isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef)):
            attribute, value = member.name, _stub(member)
        elif isinstance(member, ast.Assign) and isinstance(member.targets[0], ast.Name):
            attribute, value = member.targets[0].id, None
        else:
            continue
        if value is None and not isinstance(member, ast.Assign):
            continue
        try:
            wrong = _refused_member(name, bases, attribute, value)
        except TypeError:  # these bases combine only with the user's own bases
            return
        if wrong is not None:
            yield member, wrong


def _refused_member(
    owner: str, bases: tuple[type, ...], name: str, value: Any
) -> Answer | None:
    """Why the library refuses one member of a class, when the class is created or when an object of it is used."""
    try:
        made = types.new_class(
            owner,
            bases,
            {},
            lambda space: space.update({"__module__": "migrated", name: value}),
        )
        if specifications := [
            one for one in (Callback, ModuleHooks, DataHooks) if issubclass(made, one)
        ]:
            check_hooks(made, *specifications)
        for root in (Callback, Strategy, DirectoryLogger):
            check_overrides(made, root)
    except TrainerKitError as error:
        return Answer("hook", *reason(error))
    return (
        _uncallable(owner, name, value)
        if inspect.isfunction(value) and issubclass(made, TrainModule)
        else None
    )


def _stub(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Any:
    """Make a function with the parameters of a parsed one and an empty body; None for a property and the like."""
    if any(
        not isinstance(one, ast.Name)
        or one.id in ("property", "staticmethod", "classmethod")
        for one in function.decorator_list
    ):
        return None
    parameters = copy.deepcopy(function.args)
    for one in [
        *parameters.posonlyargs,
        *parameters.args,
        *parameters.kwonlyargs,
        parameters.vararg,
        parameters.kwarg,
    ]:
        if one is not None:
            one.annotation = None
    parameters.defaults = [ast.Constant(None) for _ in parameters.defaults]
    parameters.kw_defaults = [
        one and ast.Constant(None) for one in parameters.kw_defaults
    ]
    made = ast.FunctionDef(
        function.name, parameters, [ast.Pass()], [], None, lineno=1, col_offset=0
    )
    space: dict[str, Any] = {"__name__": "migrated"}
    exec(
        compile(ast.fix_missing_locations(ast.Module([made], [])), "<stub>", "exec"),
        space,
    )
    return space[function.name]


def _uncallable(owner: str, name: str, method: Any) -> Answer | None:
    """Why the loop cannot call an overridden method: it requires more arguments than the loop passes."""
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


@cache
def example_of(kind: type) -> Any:
    """A Trainer, an Accelerator or a Fabric without a run, for looking up attributes."""
    if kind is Trainer:
        return Trainer(accelerator="cpu", devices=1, barebones=True)
    if kind is Fabric:
        return Fabric(accelerator="cpu", devices=1)
    return Accelerator(cpu=True)


def follow(
    value: Any, attributes: Sequence[str], stored: bool = False
) -> tuple[Any, Answer | None]:
    """Follow a chain of attributes within this library; return the value, or why an attribute is refused.

    Args:
        value: the object to start from.
        attributes: their names.
        stored: whether the last one is assigned to.
    """
    for position, name in enumerate(attributes, 1):
        owner = value.__name__ if isinstance(value, type) else type(value).__name__
        if name.startswith("_") and not name.startswith("__"):
            public = name.lstrip("_")
            fix = f"use {public}" if public in dir(value) else None
            return None, Answer(
                "private",
                f"{owner}.{name} is private: here it is absent or another thing",
                fix,
            )
        own = getattr(type(value), name, None) if not isinstance(value, type) else None
        if (
            stored
            and position == len(attributes)
            and isinstance(own, property)
            and own.fset is None
        ):
            return None, Answer("attribute", f"{owner}.{name} cannot be set")
        try:
            value = getattr(value, name)
        except AttributeError as error:
            if stored and position == len(attributes) and name not in dir(type(value)):
                return None, None  # a user-defined attribute
            problem, fix = reason(error)
            return None, Answer(
                "attribute",
                problem,
                fix or did_you_mean(name, dir(value), otherwise="") or None,
            )
        except Exception:  # the attribute exists only during a run
            return None, None
        if not type(value).__module__.startswith("trainer_kit") and position < len(
            attributes
        ):
            return None, None
    return value, None
