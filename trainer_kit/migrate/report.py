"""Find the places in Lightning or Accelerate code that will not move; this library's errors are the reasons."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Final, final

from torch import nn

from trainer_kit.accelerator import Accelerator
from trainer_kit.compat.lightning import FORMER_ARGUMENTS
from trainer_kit.core.datamodule import DataModule
from trainer_kit.core.hooks import Callback
from trainer_kit.core.module import TrainModule
from trainer_kit.migrate.callbacks import answer_callback
from trainer_kit.migrate.names import (
    PACKAGES,
    Finding,
    dotted,
    foreign,
    imported,
    look_up,
    name_here,
    needs,
    reason,
    renamed,
    visible_names,
)
from trainer_kit.migrate.refusals import (
    FACES,
    Answer,
    example_of,
    follow,
    wrong_arguments,
    wrong_members,
)
from trainer_kit.migrate.yaml import Configured, configured
from trainer_kit.options.records import GradientAccumulationPlugin
from trainer_kit.trainer import Trainer

__all__ = ["Project"]

_FILE: Final = re.compile(r"\S*( \S*)?\.ckpt")  # a path, but no sentence that names one
_CHECKPOINT: Final = re.compile(r"ckpt|checkpoint|best_model|last_model", re.IGNORECASE)
_PROBES: Final = re.compile(
    r"(?:^|[._])(?:import_module|importorskip|find_spec|version|RequirementCache|available)$"
)
_PLAIN: Final = {"ABC", "Generic", "Module", "Protocol", "object"}
_AS_FILE: Final = (
    "trainer.checkpoint_callback.best_model_path, or ckpt_path='best' or 'last'; Lightning's own .ckpt files: "
    "trainer-kit checkpoint import, and load_from_checkpoint reads their weights"
)
_AS_PICKLE: Final = Answer(
    "checkpoint",
    "torch.load reads no checkpoint directory",
    "load_from_checkpoint(path), or trainer_kit.checkpoint.read_weights(path) for the state_dict alone; or "
    'ModelCheckpoint(also="lightning"), which writes f"{path}.ckpt" beside it, which torch.load reads',
)
_OBJECT_FIX: Final = (
    "nothing if its class has a codec (modules, dataclasses, NumPy values have); else store its state_dict() or plain "
    "values, or register one: trainer_kit.checkpoint.codec(Type, to_plain, from_plain)"
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
        root, dot, attributes = name.partition(".")
        if root not in self.bound:
            return None
        return renamed(f"{self.bound[root]}{dot}{attributes}")

    def library(self, node: ast.AST) -> Any:
        """The object of this library that an expression names after the move, or None."""
        new = self.new_name(node)
        try:
            return None if new is None else look_up(new)
        except (ImportError, AttributeError):
            return None

    def uses_trainer(self) -> bool:
        """Whether the file is for Lightning's Trainer: it names a class that a Trainer runs, or nothing of Fabric."""
        names = set(self.bound.values())
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute):
                names.add(self.new_name(node) or "")
        if any(_is_of_trainer(name) for name in names):
            return True
        is_lightning = any(re.match(r"(pytorch_)?lightning\b", name) for name in names)
        return is_lightning and not any("fabric" in name.lower() for name in names)

    def names_accelerate(self) -> bool:
        """Whether the file imports something of Accelerate."""
        packages = (name.partition(".")[0] for name in self.bound.values())
        return "accelerate" in packages

    def keeps_divisor(self, call: ast.Call) -> bool:
        """Whether a call asks Accelerate for accumulation, so that it is rewritten to divide losses in the same way."""
        name = dotted(call.func) or ""
        if not foreign(self.bound.get(name.partition(".")[0], "")):
            return False  # it is written for this library
        callee = self.library(call.func)
        arguments = {keyword.arg: keyword.value for keyword in call.keywords}
        if callee is GradientAccumulationPlugin:
            return "fixed_divisor" not in arguments
        if callee is not Accelerator or "gradient_accumulation_plugin" in arguments:
            return False
        steps = arguments.get("gradient_accumulation_steps")
        is_one = isinstance(steps, ast.Constant) and steps.value == 1
        return steps is not None and not is_one


@cache
def _is_of_trainer(name: str) -> bool:
    """Whether a dotted name is one of Lightning's, other than Fabric's, that runs under a Trainer."""
    if name.startswith(("pytorch_lightning.", "lightning.pytorch.")):
        return True
    new = renamed(name)
    try:
        value = None if new is None else look_up(new)
    except (ImportError, AttributeError):
        return False
    return isinstance(value, type) and issubclass(
        value, (Trainer, TrainModule, DataModule, Callback)
    )


@final
class Project:
    """The files that move together: a class in one file may be the base of a class in another.

    Attributes:
        names: how many names of the packages are imported.
        resolved: how many of them this library has.
        keeps_divisor: whether a file asks Accelerate for accumulation, in a call that is rewritten.
    """

    def __init__(self) -> None:
        self.names = 0
        self.resolved = 0
        self.keeps_divisor = False
        self._sources: list[_Source] = []
        self._classes: dict[str, list[tuple[_Source, ast.ClassDef]]] = {}
        self._attributes: set[str] = set()
        self._called: set[str] = set()
        self._other_text = ""
        self._findings: list[Finding] = []
        self._subclasses: set[str] = set()

    def count_name(self, *, resolved: bool) -> None:
        """Count one imported name of the packages."""
        self.names += 1
        self.resolved += resolved

    def add_python(self, path: str, tree: ast.AST, bound: Mapping[str, str]) -> None:
        """Add a Python file and the names that its imports bind."""
        source = _Source(path, tree, bound)
        self._sources.append(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                self._classes.setdefault(node.name, []).append((source, node))
                self._attributes.add(node.name)
                self._attributes.update(_class_attributes(node))
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self._attributes.add(node.name)
                self._called.update(_called_methods(node))
            elif isinstance(node, ast.Call):
                self.keeps_divisor |= source.keeps_divisor(node)
            elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                self._attributes.add(node.attr)
            else:  # register_buffer("mean", ...)
                text = _constant_text(node)
                if text is not None:
                    self._attributes.add(text)

    def add_yaml(self, path: str, text: str) -> None:
        """Report classes of a configuration that do not exist here, and arguments that its classes do not take."""
        for entry in configured(text):
            if entry.class_name is None:
                self._report_former_arguments(path, entry)
                continue
            try:
                callee = look_up(entry.class_name)
            except (ImportError, AttributeError) as error:
                self.report(path, entry.line, Answer("configuration", *reason(error)))
                continue
            steps = entry.arguments.get("gradient_accumulation_steps")
            if callee is Accelerator and steps is not None and steps.value != "1":
                self.report(path, steps.line, _OWN_DIVISOR)
            arguments = {
                name: (argument.value, argument.source)
                for name, argument in entry.arguments.items()
            }
            for name, answer in wrong_arguments(callee, arguments):
                self.report(path, entry.arguments[name].line, answer)

    def _report_former_arguments(self, path: str, entry: Configured) -> None:
        """Report former arguments of Lightning's Trainer under a ``trainer:`` that names no class."""
        former = {
            name: argument
            for name, argument in entry.arguments.items()
            if name in FORMER_ARGUMENTS
        }
        values = {
            name: (argument.value, argument.source) for name, argument in former.items()
        }
        for name, answer in wrong_arguments(Trainer, values):
            self.report(path, former[name].line, answer)

    def add_text(self, text: str) -> None:
        """Add the text of files that are not parsed: they name no class of the packages, but may define attributes."""
        self._other_text += text

    def new_subclasses(self) -> set[str]:
        """The names of classes that extend one of the packages, without those that an earlier call has returned."""
        names = {
            name
            for name, definitions in self._classes.items()
            if self._extends_a_package(definitions)
        }
        new = names - self._subclasses
        self._subclasses |= names
        return new

    def _extends_a_package(
        self, definitions: Sequence[tuple[_Source, ast.ClassDef]]
    ) -> bool:
        return any(self.bases(source, node)[0] for source, node in definitions)

    def findings(self) -> list[Finding]:
        """Everything that will not move."""
        for source in self._sources:
            _Reader(self, source).visit(source.tree)
        return self._findings

    def report(self, path: str, line: int, answer: Answer) -> None:
        """Add a finding."""
        self._findings.append(
            Finding(path, line, answer.kind, answer.problem, answer.fix or None)
        )

    def has_class(self, name: str) -> bool:
        """Whether the project defines a class of this name."""
        return name in self._classes

    def defines(self, attribute: str) -> bool:
        """Whether the project defines or assigns this attribute anywhere."""
        if attribute in self._attributes:
            return True
        definition = (
            rf"(?:\b(?:def|class)\s+|\.|[\"']){attribute}\b\s*(?:[(:\"']|=(?!=))"
        )
        return re.search(definition, self._other_text) is not None

    def calls(self, method: str) -> bool:
        """Whether the project itself calls a method of this name from a method of another name."""
        return method in self._called

    def bases(
        self, source: _Source, cls: ast.ClassDef, visited: tuple[str, ...] = ()
    ) -> tuple[tuple[type, ...], bool]:
        """The classes of this library that a class extends, and whether all its bases are known."""
        classes: list[type] = []
        complete = True
        for base in cls.bases:
            node = base.value if isinstance(base, ast.Subscript) else base
            name = _last_name(node)
            value = source.library(node)
            if isinstance(value, type):
                classes.append(value)
                continue
            definition = None if name in visited else self._definition(source, name)
            if definition is None:
                complete &= name in _PLAIN
                continue
            inherited, is_complete = self.bases(*definition, (*visited, name))
            classes += inherited
            complete &= is_complete
        return _without_bases(classes), complete

    def _definition(
        self, source: _Source, name: str
    ) -> tuple[_Source, ast.ClassDef] | None:
        """The class of a name, preferably of the same file; None if there is none, or if there are several."""
        definitions = self._classes.get(name, [])
        same_file = [each for each in definitions if each[0].path == source.path]
        candidates = same_file or definitions
        return candidates[0] if len(candidates) == 1 else None


@final
class _Reader(ast.NodeVisitor):
    """Checks one file; infers types from imports, annotations, constructors and hooks."""

    def __init__(self, project: Project, source: _Source) -> None:
        visible, _ = visible_names(source.tree, {})
        self._project = project
        self._source = replace(source, bound=visible)
        self._types: dict[str, type] = {}
        """The variables known to hold a Trainer or an Accelerator, by dotted name."""
        self._bases: tuple[type, ...] = ()
        """The classes of this library that the class being read extends."""
        self._knows_bases = False
        """Whether all bases of that class are known."""
        self._modules: dict[str, str] = {}
        """The modules of other packages that the file imports whole, by the name that it binds."""
        # Scripts for Accelerate and Fabric choose the names of their own files.
        self._has_trainer = source.uses_trainer()

    def _report(self, node: ast.stmt | ast.expr, answer: Answer | None) -> None:
        if answer is not None:
            self._project.report(self._source.path, node.lineno, answer)

    # -- imports -------------------------------------------------------------------------------------------------

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            new = renamed(alias.name)
            if new is not None:
                self._import(node, alias.name, partial(look_up, new))
            elif alias.asname:
                self._modules[alias.asname] = alias.name
            else:
                package = alias.name.partition(".")[0]
                self._modules[package] = package

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level:
            return  # of a module of the project
        package = node.module or ""
        new = renamed(package)
        if new is None:
            if self._has_trainer:
                for alias in node.names:
                    self._check_other_package(node, package, alias.name)
            return
        for alias in node.names:
            full_name = f"{package}.{alias.name}"
            if alias.name == "__version__":
                self._report(node, _VERSION if foreign(package) else None)
            elif alias.name == "*" or full_name in PACKAGES:
                target = PACKAGES.get(full_name, new)
                self._import(node, full_name, partial(look_up, target))
            else:
                self._import(node, full_name, partial(imported, new, alias.name))

    def _check_other_package(
        self, node: ast.stmt | ast.expr, module: str, name: str
    ) -> None:
        """Report a class of another package that extends a callback of Lightning."""
        if not self._project.has_class(name):
            is_rewritten = not any(
                foreign(full) for full in self._source.bound.values()
            )
            self._report(node, answer_callback(module, name, is_rewritten))

    def _import(self, node: ast.stmt, name: str, find: Callable[[], object]) -> None:
        try:
            find()
        except (ImportError, AttributeError) as error:
            # A package that is not installed may well have the name.
            is_missing = needs(error) is None
            self._project.count_name(resolved=not is_missing)
            if is_missing:
                problem, fix = reason(error)
                fix = _fix_of_missing(name, fix)
                self._report(node, Answer("import", f"{name}: {problem}", fix))
            return
        self._project.count_name(resolved=True)

    # -- classes and functions -----------------------------------------------------------------------------------

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer_bases, outer_knows_bases = self._bases, self._knows_bases
        outer_types = self._types
        self._bases, self._knows_bases = self._project.bases(self._source, node)
        if self._bases:
            self._has_trainer = True
            self._check_members(node)
            if any(issubclass(base, (TrainModule, DataModule)) for base in self._bases):
                self._types = {**outer_types, "self.trainer": Trainer}
            self._check_saved_objects(node)
        self._types = {**self._types, **self._attribute_types(node)}
        self.generic_visit(node)
        self._bases, self._knows_bases = outer_bases, outer_knows_bases
        self._types = outer_types

    def _check_members(self, node: ast.ClassDef) -> None:
        for member, answer in wrong_members(node.name, self._bases, node.body):
            name = getattr(member, "name", "")
            no_hook = "is not a hook" in answer.problem
            may_be_helper = no_hook or name.endswith("_dataloader")
            if not may_be_helper or not self._project.calls(name):
                self._report(member, answer)

    def _check_saved_objects(self, node: ast.ClassDef) -> None:
        """Report objects that ``on_save_checkpoint`` stores whole: attributes that hold an object of a class."""
        objects = {}
        for assignment in _assignments(node):
            if not isinstance(assignment.value, ast.Call):
                continue
            class_name = _last_name(assignment.value.func)
            if class_name[:1].isupper():
                for target in assignment.targets:
                    objects[dotted(target)] = class_name
        for hook in node.body:
            if getattr(hook, "name", "") != "on_save_checkpoint":
                continue
            for assignment in _assignments(hook):
                name = dotted(assignment.value)
                is_item = isinstance(assignment.targets[0], ast.Subscript)
                if is_item and name in objects:
                    stored = f"{name}, an object of {objects[name]}"
                    problem = f"on_save_checkpoint stores {stored}: checkpoints hold no pickle"
                    self._report(assignment, Answer("checkpoint", problem, _OBJECT_FIX))

    def _attribute_types(self, node: ast.ClassDef) -> dict[str, type]:
        """The attributes to which the methods of a class assign a Trainer or an Accelerator, and nothing else."""
        kinds_by_name: dict[str, set[Any]] = {}
        for assignment in _assignments(node):
            kind = self._constructed_type(assignment.value)
            for target in assignment.targets:
                name = dotted(target) or ""
                if name.startswith("self."):
                    kinds_by_name.setdefault(name, set()).add(kind)
        return {
            name: kinds.pop()
            for name, kinds in kinds_by_name.items()
            if len(kinds) == 1 and None not in kinds
        }

    def _constructed_type(self, value: ast.expr) -> Any:
        """`Trainer`, `Accelerator` or `Fabric`, if an expression constructs one."""
        if not isinstance(value, ast.Call):
            return None
        callee = self._source.library(value.func)
        return callee if callee in FACES else None

    def _visit_scope(self, node: ast.AST) -> None:
        """Read a scope, in which parameters and variables hide names from outside."""
        outer_source, outer_types = self._enter(node)
        self.generic_visit(node)
        self._source, self._types = outer_source, outer_types

    visit_Lambda = visit_ListComp = visit_SetComp = visit_DictComp = (
        visit_GeneratorExp
    ) = _visit_scope

    def _enter(self, node: ast.AST) -> tuple[_Source, dict[str, type]]:
        """Begin a scope; return what was known around it."""
        outer_source, outer_types = self._source, self._types
        visible, hidden = visible_names(node, outer_source.bound)
        self._source = replace(outer_source, bound=visible)
        self._types = {
            name: kind
            for name, kind in outer_types.items()
            if name.partition(".")[0] not in hidden
        }
        return outer_source, outer_types

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        self._visit_outside_scope(node, parameters)
        outer_source, outer_types = self._enter(node)
        for name, kind in outer_types.items():
            if name.startswith("self."):
                self._types[name] = kind
        is_callback = any(issubclass(base, Callback) for base in self._bases)
        is_hook = is_callback and _gets_trainer(node.name)
        for position, parameter in enumerate(parameters):
            kind = self._annotated_type(parameter)
            if kind in FACES:
                self._types[parameter.arg] = kind
            elif is_hook and position == 1:
                self._types[parameter.arg] = Trainer
            elif is_hook and position == 2:
                self._types[f"{parameter.arg}.trainer"] = Trainer
        for statement in node.body:
            self.visit(statement)
        self._source, self._types = outer_source, outer_types

    def _visit_outside_scope(
        self,
        node: ast.FunctionDef | ast.AsyncFunctionDef,
        parameters: Sequence[ast.arg],
    ) -> None:
        """Read decorators, defaults and annotations, whose names are those around the function."""
        expressions = [
            *node.decorator_list,
            *node.args.defaults,
            *node.args.kw_defaults,
            node.returns,
        ]
        for parameter in [*parameters, node.args.vararg, node.args.kwarg]:
            if parameter is not None:
                expressions.append(parameter.annotation)
        for expression in expressions:
            if expression is not None:
                self.visit(expression)

    def _annotated_type(self, parameter: ast.arg) -> Any:
        """The object of this library that a parameter's annotation names, or None."""
        annotation = parameter.annotation
        text = None if annotation is None else _constant_text(annotation)
        if text is not None:
            annotation = _parsed(text)
        return None if annotation is None else self._source.library(annotation)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        kind = self._constructed_type(node.value)
        for target in node.targets:
            name = dotted(target)
            if name is not None and kind is not None:
                self._types[name] = kind
            else:
                self._types.pop(name or "", None)
            self.visit(target)

    # -- expressions ---------------------------------------------------------------------------------------------

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = dotted(node)
        if name is None:
            self.generic_visit(node)
            return
        root, _, attributes = name.partition(".")
        if root in self._source.bound:
            if attributes != "__version__":
                self._check_name(node)
            elif foreign(self._source.bound[root]):
                self._report(node, _VERSION)
            return
        if self._has_trainer and root in self._modules and "Callback" in node.attr:
            module = self._modules[root]
            submodule = attributes.rpartition(".")[0]
            if submodule:
                module = f"{module}.{submodule}"
            self._check_other_package(node, module, node.attr)
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
                problem, fix = reason(error)
                self._report(
                    node, Answer("attribute", problem, _fix_of_missing(new, fix))
                )

    def _resolve(self, node: ast.Attribute, name: str) -> tuple[Any, Answer | None]:
        stored = not isinstance(node.ctx, ast.Load)
        for variable, kind in self._types.items():
            if name.startswith(f"{variable}."):
                attributes = name.removeprefix(f"{variable}.").split(".")
                return follow(example_of(kind), attributes, stored)
        root, *attributes = name.split(".")
        if root != "self" or not self._bases or not attributes:
            return None, None
        attribute, base = attributes[0], self._bases[0]
        if self._project.defines(attribute):
            return None, None
        if _has_attribute(base, attribute):
            value = getattr(base, attribute, None) if len(attributes) == 1 else None
            return value, None
        if not self._knows_bases or stored:
            return None, None
        if hasattr(nn.Module, attribute):  # a callback may be a module as well
            return None, None
        public = attribute.lstrip("_")
        fix = f"self.{public}" if public in dir(base) else None
        problem = (
            f"nothing defines self.{attribute}: {base.__name__} has no such attribute"
        )
        return None, Answer("attribute", problem, fix)

    def visit_Call(self, node: ast.Call) -> None:
        callee = self._source.library(node.func)
        name = dotted(node.func)
        if callee is None and isinstance(node.func, ast.Attribute) and name is not None:
            callee = self._resolve(node.func, name)[0]
        if callable(callee):
            self._check_arguments(node, callee)
        if self._source.keeps_divisor(node):
            self._report(node, _KEPT_DIVISOR)
        if self._has_trainer and name == "torch.load":
            if _CHECKPOINT.search(ast.unparse(node)):
                self._report(node, _AS_PICKLE)
        self._check_probe(node, name)
        self._check_log_filter(node, name)
        self.generic_visit(node)

    def _check_arguments(self, node: ast.Call, callee: Any) -> None:
        """Report the keyword arguments that the class or function of this library refuses."""
        expressions = {
            keyword.arg: keyword.value
            for keyword in node.keywords
            if keyword.arg is not None
        }
        arguments = {
            name: (_constant_value(value), ast.unparse(value))
            for name, value in expressions.items()
        }
        for name, answer in wrong_arguments(callee, arguments):
            self._report(expressions[name], answer)

    def _check_probe(self, node: ast.Call, name: str | None) -> None:
        """Report a call that asks whether the other library is installed, or for its version."""
        if name is None or not node.args or not _PROBES.search(name):
            return
        argument = node.args[0]
        if not isinstance(argument, ast.Constant):
            return
        package = re.match(r"[\w.]*", str(argument.value))
        if package is None or not foreign(package[0]):
            return
        if name_here(package[0]) is None:
            problem = f"{name}({argument.value!r}) asks for the other library"
            self._report(node, Answer("probe", problem, "leave it out"))

    def _check_log_filter(self, node: ast.Call, name: str | None) -> None:
        """Report a logger or a filter of warnings that is chosen by the name of the other library."""
        function = (name or "").rpartition(".")[2]
        if function not in ("getLogger", "filterwarnings"):
            return
        for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
            text = _constant_text(argument) or ""
            package = re.match(r"\w+(?:\\?\.\w+)*", text)
            if package is None or not foreign(package[0].replace("\\", "")):
                continue
            if function == "getLogger":
                problem = f"getLogger({text!r}): this library prints its lines, and has no logger of this name"
                fix = "leave it out; Trainer(enable_progress_bar=False, enable_model_summary=False) prints less"
            else:
                problem = f"filterwarnings selects {text!r}, and the warnings come from trainer_kit now"
                fix = f"{text.replace(package[0], 'trainer_kit')!r}"
            self._report(node, Answer("probe", problem, fix))

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
        names = [_last_name(factor) for factor in factors]
        if "gradient_accumulation_steps" not in names:
            return
        if not any(name.endswith("loss") for name in names):
            return
        if self._source.names_accelerate() and not self._project.keeps_divisor:
            self._report(node, _STEPS_IN_LOSS)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        text = node.value
        if not isinstance(text, str):
            return
        if self._has_trainer and _FILE.fullmatch(text):
            problem = f"{text!r}: checkpoints are directories, named without a suffix"
            self._report(node, Answer("checkpoint", problem, _AS_FILE))
        root, *attributes = text.split(".")
        package = root
        if root not in ("pytorch_lightning", "lightning_fabric"):
            package = ".".join([root, *attributes[:1]])
        if package not in PACKAGES or not foreign(package):
            return
        if re.fullmatch(r"\w+(\.\w+)+", text) and name_here(text) is None:
            self._report(node, Answer("string", f"{text!r} names nothing here"))


def _fix_of_missing(name: str, fix: str | None) -> str | None:
    """What to write for a name that this library lacks, where the library itself suggests none."""
    flag = re.search(r"\._?(\w+)_AVAILABLE$", name)
    if flag is not None:
        return f'importlib.util.find_spec("{flag[1].lower()}") is not None'
    if fix is not None and not fix.startswith("dir("):
        return fix
    return "copy it into your code, or keep this import of the other library: it has no counterpart here"


def _parsed(text: str) -> ast.expr | None:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        return None


def _class_attributes(cls: ast.ClassDef) -> Iterator[str]:
    """The names that the statements directly in a class assign."""
    for statement in cls.body:
        target = getattr(statement, "target", None)
        for each in getattr(statement, "targets", [target]):
            if isinstance(each, ast.Name):
                yield each.id


def _called_methods(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """The methods that a function calls, without those of its own name."""
    for node in ast.walk(function):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr != function.name:
            yield node.func.attr


def _last_name(node: ast.AST) -> str:
    """``c`` of ``a.b.c``; empty for other expressions."""
    return (dotted(node) or "").rpartition(".")[2]


def _assignments(node: ast.AST) -> Iterator[ast.Assign]:
    return (child for child in ast.walk(node) if isinstance(child, ast.Assign))


def _without_bases(classes: Sequence[type]) -> tuple[type, ...]:
    """The distinct classes, without those that another one of them extends."""
    distinct = tuple(dict.fromkeys(classes))
    return tuple(
        cls
        for cls in distinct
        if not any(cls is not other and issubclass(other, cls) for other in distinct)
    )


def _has_attribute(base: type, name: str) -> bool:
    """Whether a class, or an object of it after its constructor, has an attribute."""
    if hasattr(base, name) or name in dir(_example(base)):
        return True
    return name in _assigned(base)


def _example(base: type) -> Any:
    """Make an object of a class, for attributes that its constructor sets; return the class if that fails."""
    if not issubclass(base, (TrainModule, DataModule, Callback)):
        return base
    try:
        return base()
    except Exception:  # it needs arguments, or a package that is not installed
        return base


@cache
def _gets_trainer(hook: str) -> bool:
    """Whether a callback's hook of this name gets the Trainer as its first argument."""
    method = getattr(Callback, hook, None)
    if not inspect.isfunction(method):
        return False
    _self, *parameters = inspect.signature(method).parameters
    return parameters[:1] == ["trainer"]


@cache
def _assigned(base: type) -> frozenset[str]:
    """The attributes that the methods of a class and of its bases here assign: public ones, and keys of __dict__."""
    names: set[str] = set()
    for cls in base.__mro__:
        if not cls.__module__.startswith("trainer_kit."):
            continue
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls)))):
            name = _assigned_by(node)
            if name is not None:
                names.add(name)
    return frozenset(names)


def _assigned_by(node: ast.AST) -> str | None:
    """The attribute of ``self`` that one node assigns."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        if node.attr.startswith("_") or dotted(node) != f"self.{node.attr}":
            return None
        return node.attr
    if isinstance(node, ast.Call) and dotted(node.func) == "self.__dict__.setdefault":
        return _constant_text(node.args[0])
    if isinstance(node, ast.Subscript) and dotted(node.value) == "self.__dict__":
        return _constant_text(node.slice)
    return None


def _constant_value(node: ast.AST) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _constant_text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return None
