"""Find the places in Lightning or Accelerate code that will not move; this library's errors are the reasons."""

from __future__ import annotations

import ast
import copy
import inspect
import re
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, NamedTuple, final

import yaml
from torch import nn

from trainer_kit.accelerator import Accelerator
from trainer_kit.commands.migrate_names import (
    PACKAGES,
    Finding,
    dotted,
    imported,
    look_up,
    name_here,
    needs,
    reason,
    renamed,
    visible_names,
)
from trainer_kit.compat.lightning import FORMER_ARGUMENTS
from trainer_kit.compat.options import GradientAccumulationPlugin
from trainer_kit.core.arguments import known_arguments
from trainer_kit.core.datamodule import DataModule
from trainer_kit.core.errors import TrainerKitError, did_you_mean
from trainer_kit.core.hooks import Callback, DataHooks, ModuleHooks
from trainer_kit.core.module import TrainModule
from trainer_kit.core.registry import PRECISIONS, STRATEGIES
from trainer_kit.core.signatures import check_hooks, check_overrides, takes
from trainer_kit.core.yaml_guard import YamlProblem, guarded_root
from trainer_kit.loggers.layout import DirectoryLogger
from trainer_kit.precision.aliases import WORDS, make_precision
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.trainer import Trainer

__all__ = ["Answer", "Project", "follow"]

_STEPS: Final = {"training_step": 2, "validation_step": 3, "test_step": 3, "predict_step": 3}
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


def _wrong_arguments(callee: Any, given: Mapping[str, tuple[Any, str]]) -> Iterator[tuple[str, Answer]]:
    """Yield the keyword arguments that a class or function of this library refuses, by name, with the reason.

    Args:
        callee: the class or function; it is not called.
        given: by name, the value where it is a constant (else None), and its source.
    """
    try:
        known = inspect.signature(callee).parameters
    except (TypeError, ValueError):  # a builtin
        return
    takes_all = [name for name, parameter in known.items() if parameter.kind is parameter.VAR_KEYWORD]
    if takes_all not in ([], ["unknown"]):  # what arrives in `unknown` is refused
        return
    for name, (value, source) in given.items():
        try:
            if name not in known:
                _refuse_argument(callee, name, source, [each for each in known if each != "unknown"])
            elif callee is Trainer and isinstance(value, (str, int)):
                _check_word(name, value)
        except TrainerKitError as error:
            problem, fix = reason(error)
            yield name, Answer("argument", f"{problem} ({name}={source})", fix)


def _refuse_argument(callee: Any, name: str, source: str, known: Sequence[str]) -> None:
    if isinstance(callee, type):
        former = FORMER_ARGUMENTS if callee is Trainer else {}
        constructor = next(vars(one)["__init__"] for one in callee.__mro__ if "__init__" in vars(one))
        known_arguments(former)(constructor)(**{name: _Shown(source)})
    fix = did_you_mean(name, known, otherwise="leave it out")
    raise TrainerKitError(f"{callee.__name__} has no argument {name!r}", fix=fix)


def _check_word(name: str, value: Any) -> None:
    """Refuse values of Trainer arguments that are wrong on every device."""
    if name == "strategy" and value != "auto" and value not in STRATEGIES.names():
        STRATEGIES.get(value)
    if name == "precision" and str(value).lower() not in WORDS and value not in PRECISIONS.names():
        make_precision(value)


def _wrong_members(name: str, bases: tuple[type, ...], body: Sequence[ast.stmt]) -> Iterator[tuple[ast.stmt, Answer]]:
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


def _refused_member(owner: str, bases: tuple[type, ...], name: str, value: Any) -> Answer | None:
    """Why the library refuses one member of a class, when the class is created or when an object of it is used."""
    try:
        made = types.new_class(owner, bases, {}, lambda space: space.update({"__module__": "migrated", name: value}))
        if specifications := [one for one in (Callback, ModuleHooks, DataHooks) if issubclass(made, one)]:
            check_hooks(made, *specifications)
        for root in (Callback, Strategy, DirectoryLogger):
            check_overrides(made, root)
    except TrainerKitError as error:
        return Answer("hook", *reason(error))
    return _uncallable(owner, name, value) if inspect.isfunction(value) and issubclass(made, TrainModule) else None


def _stub(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Any:
    """Make a function with the parameters of a parsed one and an empty body; None for a property and the like."""
    if any(
        not isinstance(one, ast.Name) or one.id in ("property", "staticmethod", "classmethod")
        for one in function.decorator_list
    ):
        return None
    parameters = copy.deepcopy(function.args)
    for one in [*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs, parameters.vararg, parameters.kwarg]:
        if one is not None:
            one.annotation = None
    parameters.defaults = [ast.Constant(None) for _ in parameters.defaults]
    parameters.kw_defaults = [one and ast.Constant(None) for one in parameters.kw_defaults]
    made = ast.FunctionDef(function.name, parameters, [ast.Pass()], [], None, lineno=1, col_offset=0)
    space: dict[str, Any] = {"__name__": "migrated"}
    exec(compile(ast.fix_missing_locations(ast.Module([made], [])), "<stub>", "exec"), space)
    return space[function.name]


def _uncallable(owner: str, name: str, method: Any) -> Answer | None:
    """Why the loop cannot call an overridden method: it requires more arguments than the loop passes."""
    original = vars(TrainModule).get(name)
    if name in _STEPS:
        counts = range(2, _STEPS[name] + 2)
    elif inspect.isfunction(original) and not name.startswith("__"):
        positional = [p for p in inspect.signature(original).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
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
def _example_of(kind: type) -> Any:
    """A Trainer or an Accelerator without a run, for looking up attributes."""
    return Trainer(accelerator="cpu", devices=1, barebones=True) if kind is Trainer else Accelerator(cpu=True)


def follow(value: Any, attributes: Sequence[str], stored: bool = False) -> tuple[Any, Answer | None]:
    """Follow a chain of attributes within this library; return the value, or why an attribute is refused.

    Args:
        value: the object to start from.
        attributes: their names.
        stored: whether the last one is assigned to.
    """
    for position, name in enumerate(attributes, 1):
        owner = value.__name__ if isinstance(value, type) else type(value).__name__
        if name.startswith("_") and not name.startswith("__"):
            return None, Answer("private", f"{owner}.{name} is private: here it is absent or another thing")
        own = getattr(type(value), name, None) if not isinstance(value, type) else None
        if stored and position == len(attributes) and isinstance(own, property) and own.fset is None:
            return None, Answer("attribute", f"{owner}.{name} cannot be set")
        try:
            value = getattr(value, name)
        except AttributeError as error:
            if stored and position == len(attributes) and name not in dir(type(value)):
                return None, None  # a user-defined attribute
            problem, fix = reason(error)
            return None, Answer("attribute", problem, fix or did_you_mean(name, dir(value), otherwise="") or None)
        except Exception:  # the attribute exists only during a run
            return None, None
        if not type(value).__module__.startswith("trainer_kit") and position < len(attributes):
            return None, None
    return value, None


_FILE: Final = re.compile(r"\S*( \S*)?\.ckpt")  # a path, but no sentence that names one
_CHECKPOINT: Final = re.compile(r"ckpt|checkpoint|best_model|last_model", re.IGNORECASE)
_PROBES: Final = re.compile(r"(?:^|[._])(?:import_module|importorskip|find_spec|version|RequirementCache|available)$")
_PLAIN: Final = {"ABC", "Generic", "Module", "Protocol", "object"}
_AS_FILE: Final = (
    "trainer.checkpoint_callback.best_model_path, or ckpt_path='best' or 'last'; Lightning's own .ckpt files: "
    "trainer-kit checkpoint import, and load_from_checkpoint reads their weights"
)
_AS_PICKLE: Final = Answer(
    "checkpoint",
    "torch.load reads no checkpoint directory",
    "load_from_checkpoint(path), or trainer_kit.checkpoint.read_weights(path) for the state_dict alone",
)
_STEPS_IN_LOSS: Final = Answer(
    "weights",
    "gradient_accumulation_steps in a loss cancels the divisor of Accelerate; a short last window has another one here",
    "backward(sum of the losses, weight=tokens of the batch), or GradientAccumulationPlugin(fixed_divisor=True)",
)
_KEPT_DIVISOR: Final = Answer(
    "weights",
    "fixed_divisor=True keeps Accelerate's division: a short last window is divided by the number of steps",
    "take it out for the mean over the samples of every step",
)
_OWN_DIVISOR: Final = Answer(
    "weights",
    "a short last window is averaged over what it has; Accelerate divides it by the number of steps",
    "gradient_accumulation_plugin with GradientAccumulationPlugin(fixed_divisor=True), for Accelerate's results",
)
_VERSION: Final = Answer(
    "version",
    "this becomes the version of trainer_kit",
    "where it is compared, keep the branch for the newest version",
)


@final
@dataclass(frozen=True)
class _Source:
    path: str
    tree: ast.AST
    bound: Mapping[str, str]

    def new_name(self, node: ast.AST) -> str | None:
        """The dotted name of an expression after the move; None if it is not a name of the packages."""
        name = dotted(node) or ""
        root, dot, rest = name.partition(".")
        return renamed(f"{self.bound[root]}{dot}{rest}") if root in self.bound else None

    def library(self, node: ast.AST) -> Any:
        """The object of this library that an expression names after the move, or None."""
        new = self.new_name(node)
        try:
            return None if new is None else look_up(new)
        except (ImportError, AttributeError):
            return None

    def keeps_divisor(self, call: ast.Call) -> bool:
        """Whether a call asks Accelerate for accumulation, so that it is rewritten to divide losses in the same way."""
        callee = self.library(call.func)
        given = {one.arg: one.value for one in call.keywords}
        if callee is GradientAccumulationPlugin:
            return "fixed_divisor" not in given
        steps = given.get("gradient_accumulation_steps")
        one = isinstance(steps, ast.Constant) and steps.value == 1
        return callee is Accelerator and not (steps is None or one or "gradient_accumulation_plugin" in given)


@final
class Project:
    """The files that move together: a class in one file may be the base of a class in another.

    Attributes:
        names: how many names of the packages are imported.
        resolved: how many of them this library has.
        keeps_divisor: whether a file asks Accelerate for accumulation, in a call that is rewritten.
    """

    def __init__(self) -> None:
        self.names = self.resolved = 0
        self.keeps_divisor = False
        self._sources: list[_Source] = []
        self._classes: dict[str, list[tuple[_Source, ast.ClassDef]]] = {}
        self._attributes: set[str] = set()
        self._called: set[str] = set()
        self._found: list[Finding] = []

    def add_python(self, path: str, tree: ast.AST, bound: Mapping[str, str]) -> None:
        """Add a Python file and the names that its imports bind."""
        source = _Source(path, tree, bound)
        self._sources.append(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                self._classes.setdefault(node.name, []).append((source, node))
                self._attributes.add(node.name)
                targets = [t for s in node.body for t in getattr(s, "targets", [getattr(s, "target", None)])]
                self._attributes.update(target.id for target in targets if isinstance(target, ast.Name))
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self._attributes.add(node.name)
                calls = (one.func for one in ast.walk(node) if isinstance(one, ast.Call))
                self._called.update(f.attr for f in calls if isinstance(f, ast.Attribute) and f.attr != node.name)
            elif isinstance(node, ast.Call):
                self.keeps_divisor |= source.keeps_divisor(node)
            elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                self._attributes.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # register_buffer("mean", ...)
                self._attributes.add(node.value)

    def add_yaml(self, path: str, text: str) -> None:
        """Report classes of a configuration that do not exist here, and arguments that its classes do not take."""
        try:
            targets = list(_targets(guarded_root(text)))
        except YamlProblem:
            return
        for node, arguments in targets:
            new = renamed(node.value)
            if new is None:
                continue
            try:
                callee = look_up(new)
            except (ImportError, AttributeError) as error:
                self.report(path, node.start_mark.line + 1, Answer("configuration", *reason(error)))
                continue
            given = {key.value: (_constant(value), value.value) for key, value in arguments if _is_word(key)}
            lines = {key.value: key.start_mark.line + 1 for key, _ in arguments}
            steps = "gradient_accumulation_steps"
            if callee is Accelerator and given.get(steps, ("1", ""))[0] != "1":
                self.report(path, lines[steps], _OWN_DIVISOR)
            for name, answer in _wrong_arguments(callee, given):
                self.report(path, lines[name], answer)

    def findings(self) -> list[Finding]:
        """Everything that will not move."""
        for source in self._sources:
            _Reader(self, source).visit(source.tree)
        return self._found

    def report(self, path: str, line: int, answer: Answer) -> None:
        """Add a finding."""
        self._found.append(Finding(path, line, answer.kind, answer.problem, answer.fix or None))

    def defines(self, attribute: str) -> bool:
        """Whether the project defines or assigns this attribute anywhere."""
        return attribute in self._attributes

    def calls(self, method: str) -> bool:
        """Whether the project itself calls a method of this name from a method of another name."""
        return method in self._called

    def bases(self, source: _Source, cls: ast.ClassDef, seen: tuple[str, ...] = ()) -> tuple[tuple[type, ...], bool]:
        """The classes of this library that a class extends, and whether all its bases are known."""
        found: list[type] = []
        known = True
        for base in cls.bases:
            node = base.value if isinstance(base, ast.Subscript) else base
            name = (dotted(node) or "").rpartition(".")[2]
            here = source.library(node)
            if isinstance(here, type):
                found.append(here)
                continue
            homes = [] if name in seen else self._classes.get(name, [])
            homes = [one for one in homes if one[0].path == source.path] or homes
            if len(homes) == 1:
                above, complete = self.bases(*homes[0], (*seen, name))
                found += above
                known &= complete
            else:
                known &= name in _PLAIN
        several = list(dict.fromkeys(found))
        return tuple(o for o in several if not any(o is not p and issubclass(p, o) for p in several)), known


def _is_word(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.value.isidentifier() and not node.value.startswith("_")


def _constant(node: yaml.Node) -> Any:
    return node.value if isinstance(node, yaml.ScalarNode) and "$" not in node.value else None


def _targets(node: yaml.Node | None) -> Iterator[tuple[yaml.ScalarNode, list[tuple[yaml.Node, yaml.Node]]]]:
    """Each ``_target_`` and ``class_path`` below a node, with the arguments beside it."""
    if isinstance(node, yaml.MappingNode):
        values = {key.value: value for key, value in node.value if isinstance(key, yaml.ScalarNode)}
        if isinstance(values.get("_target_"), yaml.ScalarNode):
            yield values["_target_"], node.value
        if isinstance(values.get("class_path"), yaml.ScalarNode):
            arguments = values.get("init_args")
            yield values["class_path"], arguments.value if isinstance(arguments, yaml.MappingNode) else []
        for _, value in node.value:
            yield from _targets(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _targets(value)


@final
class _Reader(ast.NodeVisitor):
    """Checks one file; infers types from imports, annotations, constructors and hooks."""

    def __init__(self, project: Project, source: _Source) -> None:
        visible, _ = visible_names(source.tree, {})
        self._project, self._source = project, replace(source, bound=visible)
        self._types: dict[str, type] = {}
        """The variables known to hold a Trainer or an Accelerator, by dotted name."""
        self._own: tuple[tuple[type, ...], bool] = (), False
        """The bases of the class being read, and whether all of them are known."""
        # Scripts for Accelerate choose the names of their own files.
        self._lightning = any(old.partition(".")[0] != "accelerate" for old in source.bound.values())

    def _report(self, node: ast.stmt | ast.expr, answer: Answer | None) -> None:
        if answer is not None:
            self._project.report(self._source.path, node.lineno, answer)

    # -- imports -------------------------------------------------------------------------------------------------

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if (new := renamed(alias.name)) is not None:
                self._import(node, alias.name, lambda new=new: look_up(new))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        package = node.module or ""
        new = None if node.level else renamed(package)
        if new is None:
            return
        for alias in node.names:
            old = f"{package}.{alias.name}"
            if alias.name == "__version__":
                self._report(node, _VERSION)
            elif alias.name == "*" or old in PACKAGES:
                self._import(node, old, lambda old=old: look_up(PACKAGES.get(old, new)))
            else:
                self._import(node, old, lambda name=alias.name: imported(new, name))

    def _import(self, node: ast.stmt, old: str, find: Any) -> None:
        self._project.names += 1
        try:
            find()
        except (ImportError, AttributeError) as error:
            if needs(error) is None:
                self._report(node, Answer("import", f"{old}: {reason(error)[0]}", reason(error)[1]))
            else:
                self._project.resolved += 1
            return
        self._project.resolved += 1

    # -- classes and functions -----------------------------------------------------------------------------------

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outside, types = self._own, self._types
        bases, _ = self._own = self._project.bases(self._source, node)
        if bases:
            self._lightning = True
            for member, answer in _wrong_members(node.name, bases, node.body):
                name = getattr(member, "name", "")
                own = "is not a hook" in answer.problem or name.endswith("_dataloader")
                if not own or not self._project.calls(name):
                    self._report(member, answer)
            if any(issubclass(base, (TrainModule, DataModule)) for base in bases):
                self._types = {**types, "self.trainer": Trainer}
        self._types = {**self._types, **self._held(node)}
        self.generic_visit(node)
        self._own, self._types = outside, types

    def _held(self, node: ast.ClassDef) -> dict[str, type]:
        """The attributes to which the methods of a class assign a Trainer or an Accelerator, and nothing else."""
        made: dict[str, set[Any]] = {}
        for one in (one for one in ast.walk(node) if isinstance(one, ast.Assign)):
            for target in one.targets:
                if (name := dotted(target) or "").startswith("self."):
                    made.setdefault(name, set()).add(self._made_by(one.value))
        return {name: kinds.pop() for name, kinds in made.items() if len(kinds) == 1 and None not in kinds}

    def _made_by(self, value: ast.expr) -> Any:
        """`Trainer` or `Accelerator`, if an expression constructs one."""
        made = self._source.library(value.func) if isinstance(value, ast.Call) else None
        return made if made in (Trainer, Accelerator) else None

    def _visit_scope(self, node: ast.AST) -> None:
        """Read a scope, in which parameters and variables hide names from outside."""
        source, types = self._enter(node)
        self.generic_visit(node)
        self._source, self._types = source, types

    visit_Lambda = visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _visit_scope

    def _enter(self, node: ast.AST) -> tuple[_Source, dict[str, type]]:
        """Begin a scope; return what was known around it."""
        source, types = self._source, self._types
        visible, hidden = visible_names(node, source.bound)
        self._source = replace(source, bound=visible)
        self._types = {name: kind for name, kind in types.items() if name.partition(".")[0] not in hidden}
        return source, types

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        own_types = self._types
        parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        outside = [*node.decorator_list, *node.args.defaults, *node.args.kw_defaults, node.returns]
        every = [*parameters, node.args.vararg, node.args.kwarg]
        for one in filter(None, [*outside, *(each and each.annotation for each in every)]):
            self.visit(one)  # outside of the function's scope
        source, types = self._enter(node)
        self._types |= {name: kind for name, kind in own_types.items() if name.startswith("self.")}
        hook = any(issubclass(base, Callback) for base in self._own[0]) and _gets_trainer(node.name)
        for place, one in enumerate(parameters):
            annotation = one.annotation
            if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
                annotation = _parsed(annotation.value)
            kind = None if annotation is None else self._source.library(annotation)
            if kind in (Trainer, Accelerator):
                self._types[one.arg] = kind
            elif hook and place == 1 and len(parameters) > 1:
                self._types[one.arg] = Trainer
            elif hook and place == 2:
                self._types[f"{one.arg}.trainer"] = Trainer
        for statement in node.body:
            self.visit(statement)
        self._source, self._types = source, types

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        made = self._made_by(node.value)
        for target in node.targets:
            name = dotted(target)
            if name is not None and made is not None:
                self._types[name] = made
            else:
                self._types.pop(name or "", None)
            self.visit(target)

    # -- expressions ---------------------------------------------------------------------------------------------

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = dotted(node)
        if name is None:
            self.generic_visit(node)
            return
        root, _, rest = name.partition(".")
        if root in self._source.bound:
            if rest == "__version__":
                self._report(node, _VERSION)
            else:
                self._check_name(node)
            return
        self._report(node, self._resolve(node, name)[1])

    def _check_name(self, node: ast.Attribute) -> None:
        new = self._source.new_name(node)
        assert new is not None
        try:
            look_up(new)
        except (ImportError, AttributeError) as error:
            owner = node.value
            if isinstance(owner, ast.Attribute) and self._source.library(owner) is None:
                self._check_name(owner)  # the first that is missing is reported
            elif needs(error) is None:
                self._report(node, Answer("attribute", *reason(error)))

    def _resolve(self, node: ast.Attribute, name: str) -> tuple[Any, Answer | None]:
        stored = not isinstance(node.ctx, ast.Load)
        for known, kind in self._types.items():
            if name.startswith(f"{known}."):
                return follow(_example_of(kind), name[len(known) + 1 :].split("."), stored)
        bases, known_all = self._own
        first, *rest = name.split(".")
        if first != "self" or not bases or not rest or self._project.defines(rest[0]):
            return None, None
        base = bases[0]
        if hasattr(base, rest[0]) or rest[0] in dir(_made(base)) or rest[0] in _assigned(base):
            return getattr(base, rest[0], None) if len(rest) == 1 else None, None
        if not known_all or stored or hasattr(nn.Module, rest[0]):  # a callback may be a module as well
            return None, None
        return None, Answer("attribute", f"nothing defines self.{rest[0]}: {base.__name__} has no such attribute")

    def visit_Call(self, node: ast.Call) -> None:
        callee = self._source.library(node.func)
        name = dotted(node.func)
        if callee is None and isinstance(node.func, ast.Attribute) and name is not None:
            callee = self._resolve(node.func, name)[0]
        given = {
            one.arg: (one.value.value if isinstance(one.value, ast.Constant) else None, ast.unparse(one.value))
            for one in node.keywords
            if one.arg is not None
        }
        if callable(callee):
            for argument, answer in _wrong_arguments(callee, given):
                line = next(one.value for one in node.keywords if one.arg == argument)
                self._report(line, answer)
        if self._source.keeps_divisor(node):
            self._report(node, _KEPT_DIVISOR)
        if self._lightning and name == "torch.load" and _CHECKPOINT.search(ast.unparse(node)):
            self._report(node, _AS_PICKLE)
        first = node.args[0] if node.args else None
        if name is not None and _PROBES.search(name) and isinstance(first, ast.Constant):
            package = re.match(r"[\w.]*", str(first.value))
            if package is not None and renamed(package[0]) is not None and name_here(package[0]) is None:
                problem = f"{name}({first.value!r}) asks for the other library"
                self._report(node, Answer("probe", problem, "leave it out"))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, ast.Mult):
            self._check_product(node, node.left, node.right)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.op, ast.Mult):
            self._check_product(node, node.target, node.value)
        self.generic_visit(node)

    def _check_product(self, node: ast.stmt | ast.expr, *factors: ast.expr) -> None:
        """Report a loss that is multiplied by the number of micro-batches, in a script for Accelerate."""
        names = [(dotted(one) or "").rpartition(".")[2] for one in factors]
        accelerates = any(old.partition(".")[0] == "accelerate" for old in self._source.bound.values())
        of_loss = "gradient_accumulation_steps" in names and any(name.endswith("loss") for name in names)
        if accelerates and of_loss and not self._project.keeps_divisor:
            self._report(node, _STEPS_IN_LOSS)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if not isinstance(node.value, str):
            return
        if self._lightning and _FILE.fullmatch(node.value):
            problem = f"{node.value!r}: checkpoints are directories, named without a suffix"
            self._report(node, Answer("checkpoint", problem, _AS_FILE))
        head, _, _ = node.value.partition(".")
        package = head if head in ("pytorch_lightning", "lightning_fabric") else ".".join(node.value.split(".")[:2])
        if package in PACKAGES and re.fullmatch(r"\w+(\.\w+)+", node.value) and name_here(node.value) is None:
            self._report(node, Answer("string", f"{node.value!r} names nothing here"))


def _parsed(text: str) -> ast.expr | None:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        return None


def _made(base: type) -> Any:
    """Make an object of a class, for attributes that its constructor sets; return the class if that fails."""
    try:
        return base() if issubclass(base, (TrainModule, DataModule, Callback)) else base
    except Exception:  # it needs arguments, or a package that is not installed
        return base


@cache
def _gets_trainer(hook: str) -> bool:
    """Whether a callback's hook of this name gets the Trainer as its first argument."""
    method = getattr(Callback, hook, None)
    return inspect.isfunction(method) and list(inspect.signature(method).parameters)[1:2] == ["trainer"]


@cache
def _assigned(base: type) -> frozenset[str]:
    """The public attributes that the methods of a class and of its bases here assign."""
    ours = [one for one in base.__mro__ if one.__module__.startswith("trainer_kit.")]
    nodes = (node for one in ours for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(one)))))
    stored = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return frozenset(node.attr for node in stored if dotted(node) == f"self.{node.attr}" and node.attr[0] != "_")
