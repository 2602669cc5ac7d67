"""The files that move together, and what is known of their names, classes and attributes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, final

from trainer_kit.accelerator import Accelerator
from trainer_kit.compat.lightning import FORMER_ARGUMENTS
from trainer_kit.core.datamodule import DataModule
from trainer_kit.core.hooks import Callback
from trainer_kit.core.module import TrainModule
from trainer_kit.migrate.names import (
    Finding,
    dotted,
    foreign,
    look_up,
    reason,
    renamed,
)
from trainer_kit.migrate.refusals import Answer, wrong_arguments
from trainer_kit.migrate.yaml import Configured, configured
from trainer_kit.options.records import GradientAccumulationPlugin
from trainer_kit.trainer import Trainer

__all__ = ["Project", "Source", "constant_text", "last_name"]
# Bases outside of the project that define nothing a Trainer or a hook could be mistaken for.
_PLAIN: Final = {"ABC", "Generic", "Module", "Protocol", "object"}
_OWN_DIVISOR: Final = Answer(
    "weights",
    "a short last window is averaged over its own micro-batches; Accelerate divides it by the number of steps",
    "gradient_accumulation_plugin with GradientAccumulationPlugin(fixed_divisor=True), for Accelerate's results",
)


@final
@dataclass(frozen=True)
class Source:
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
        if new is None:
            return None
        # A missing name is reported where the import or the attribute is read.
        try:
            return look_up(new)
        except (ImportError, AttributeError):
            return None

    def dotted_names(self) -> set[str]:
        """What the file imports, and its attributes of the packages after the move."""
        # Also of attributes: under `import lightning as L` only `L.Trainer` tells it from a script for Fabric.
        names = set(self.bound.values())
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute):
                names.add(self.new_name(node) or "")
        return names

    def uses_trainer(self) -> bool:
        """Whether the file is for Lightning's Trainer: it names a class that a Trainer runs, or nothing of Fabric."""
        names = self.dotted_names()
        if any(_is_of_trainer(name) for name in names):
            return True
        if any("fabric" in name.lower() for name in names):
            return False
        return any(re.match(r"(pytorch_)?lightning\b", name) for name in names)

    def names_accelerate(self) -> bool:
        """Whether the file imports something of Accelerate."""
        packages = (name.partition(".")[0] for name in self.bound.values())
        return "accelerate" in packages

    def keeps_divisor(self, call: ast.Call) -> bool:
        """Whether a call asks Accelerate for accumulation, so that it is rewritten to divide losses in the same way."""
        name = dotted(call.func) or ""
        # A call that is written for this library divides as its author wants.
        if not foreign(self.bound.get(name.partition(".")[0], "")):
            return False
        callee = self.library(call.func)
        arguments = {keyword.arg: keyword.value for keyword in call.keywords}
        if callee is GradientAccumulationPlugin:
            return "fixed_divisor" not in arguments
        if callee is not Accelerator or "gradient_accumulation_plugin" in arguments:
            return False
        steps = arguments.get("gradient_accumulation_steps")
        # A window of one micro-batch has no divisor.
        is_one = isinstance(steps, ast.Constant) and steps.value == 1
        return steps is not None and not is_one


@cache
def _is_of_trainer(name: str) -> bool:
    """Whether a dotted name is one of Lightning's, other than Fabric's, that runs under a Trainer."""
    if name.startswith(("pytorch_lightning.", "lightning.pytorch.")):
        return True
    new = renamed(name)
    if new is None:
        return False
    try:
        value = look_up(new)
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
        sources: the Python files.
        findings: what `report` has added, in its order.
    """

    def __init__(self) -> None:
        self.names = 0
        self.resolved = 0
        self.keeps_divisor = False
        self.sources: list[Source] = []
        self._classes: dict[str, list[tuple[Source, ast.ClassDef]]] = {}
        self._attributes: set[str] = set()
        self._called: set[str] = set()
        self._classes_used: set[str] = set()
        self._other_text = ""
        self.findings: list[Finding] = []
        self._subclasses: set[str] = set()

    def count_name(self, *, resolved: bool) -> None:
        """Count one imported name of the packages."""
        self.names += 1
        self.resolved += resolved

    def add_python(self, path: str, tree: ast.AST, bound: Mapping[str, str]) -> None:
        """Add a Python file and the names that its imports bind."""
        source = Source(path, tree, bound)
        self.sources.append(source)
        names = source.dotted_names()
        self._classes_used.update(map(_last_part, names))
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
            # A text may name an attribute too: register_buffer("mean", ...), setattr(self, "lr", ...).
            else:
                text = constant_text(node)
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
            # As a text: `configured` reads YAML without converting scalars.
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
            # Only these: without a class name, a `trainer:` may belong to any program.
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
        self, definitions: Sequence[tuple[Source, ast.ClassDef]]
    ) -> bool:
        return any(self.bases(source, node)[0] for source, node in definitions)

    def report(self, path: str, line: int, answer: Answer) -> None:
        """Add a finding."""
        self.findings.append(
            # `or None`: an error may have an empty fix.
            Finding(path, line, answer.kind, answer.problem, answer.fix or None)
        )

    def has_class(self, name: str) -> bool:
        """Whether the project defines a class of this name."""
        return name in self._classes

    def defines(self, attribute: str) -> bool:
        """Whether the project defines or assigns this attribute anywhere."""
        if attribute in self._attributes:
            return True
        # A definition, an assignment or a key. `=(?!=)` leaves comparisons out, which only read.
        definition = (
            rf"(?:\b(?:def|class)\s+|\.|[\"']){attribute}\b\s*(?:[(:\"']|=(?!=))"
        )
        return re.search(definition, self._other_text) is not None

    def has_fabric_loops_only(self) -> bool:
        """Whether the project uses a Fabric and no Trainer: its own loops call what a Trainer would call."""
        used = self._classes_used
        return "Fabric" in used and used.isdisjoint(("Trainer", "LightningCLI"))

    def calls(self, method: str) -> bool:
        """Whether the project itself calls a method of this name from a method of another name."""
        return method in self._called

    def bases(
        self, source: Source, cls: ast.ClassDef, visited: tuple[str, ...] = ()
    ) -> tuple[tuple[type, ...], bool]:
        """The classes of this library that a class extends, and whether all its bases are known."""
        classes: list[type] = []
        complete = True
        for base in cls.bases:
            # `Base[T]` extends Base.
            node = base
            if isinstance(base, ast.Subscript):
                node = base.value
            name = last_name(node)
            value = source.library(node)
            if isinstance(value, type):
                classes.append(value)
                continue
            # Two classes may extend each other's names in different files, which would recurse without end.
            definition = None
            if name not in visited:
                definition = self._definition(source, name)
            # An unknown base may define anything, so no missing attribute of such a class is reported.
            if definition is None:
                complete &= name in _PLAIN
                continue
            inherited, is_complete = self.bases(*definition, (*visited, name))
            classes += inherited
            complete &= is_complete
        return _without_bases(classes), complete

    def _definition(
        self, source: Source, name: str
    ) -> tuple[Source, ast.ClassDef] | None:
        """The class of a name, preferably of the same file; None if there is none, or if there are several."""
        definitions = self._classes.get(name, [])
        same_file = [
            definition
            for definition in definitions
            if definition[0].path == source.path
        ]
        candidates = same_file or definitions
        # Imports are not followed: of several classes of one name none is chosen.
        if len(candidates) != 1:
            return None
        return candidates[0]


def _class_attributes(cls: ast.ClassDef) -> Iterator[str]:
    """The names that the statements directly in a class assign."""
    for statement in cls.body:
        target = getattr(statement, "target", None)
        # `a = b = 1` has several targets, `a: int = 1` one.
        for assigned in getattr(statement, "targets", [target]):
            if isinstance(assigned, ast.Name):
                yield assigned.id


def _called_methods(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """The methods that a function calls, without those of its own name."""
    for node in ast.walk(function):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        # `super().training_step()` in a hook is no sign that the project calls the hook itself.
        if node.func.attr != function.name:
            yield node.func.attr


def last_name(node: ast.AST) -> str:
    """``c`` of ``a.b.c``; empty for other expressions."""
    return _last_part(dotted(node) or "")


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _without_bases(classes: Sequence[type]) -> tuple[type, ...]:
    """The distinct classes, without those that another one of them extends."""
    distinct = tuple(dict.fromkeys(classes))
    return tuple(
        cls
        for cls in distinct
        if not any(cls is not other and issubclass(other, cls) for other in distinct)
    )


def constant_text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return None
