"""Find the places in Lightning or Accelerate code that will not move; this library's errors are the reasons."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, final

from torch import nn

from trainer_kit.accelerator import Accelerator
from trainer_kit.commands.migrate_callbacks import answer_callback
from trainer_kit.commands.migrate_names import (
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
from trainer_kit.commands.migrate_refusals import (
    FACES,
    Answer,
    example_of,
    follow,
    wrong_arguments,
    wrong_members,
)
from trainer_kit.commands.migrate_yaml import Configured, configured
from trainer_kit.compat.lightning import FORMER_ARGUMENTS
from trainer_kit.compat.options import GradientAccumulationPlugin
from trainer_kit.core.datamodule import DataModule
from trainer_kit.core.hooks import Callback
from trainer_kit.core.module import TrainModule
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
        root, dot, rest = name.partition(".")
        return renamed(f"{self.bound[root]}{dot}{rest}") if root in self.bound else None

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

    def keeps_divisor(self, call: ast.Call) -> bool:
        """Whether a call asks Accelerate for accumulation, so that it is rewritten to divide losses in the same way."""
        name = dotted(call.func) or ""
        if not foreign(self.bound.get(name.partition(".")[0], "")):
            return False  # it is written for this library
        callee = self.library(call.func)
        given = {one.arg: one.value for one in call.keywords}
        if callee is GradientAccumulationPlugin:
            return "fixed_divisor" not in given
        steps = given.get("gradient_accumulation_steps")
        one = isinstance(steps, ast.Constant) and steps.value == 1
        return callee is Accelerator and not (
            steps is None or one or "gradient_accumulation_plugin" in given
        )


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
        self.names = self.resolved = 0
        self.keeps_divisor = False
        self._sources: list[_Source] = []
        self._classes: dict[str, list[tuple[_Source, ast.ClassDef]]] = {}
        self._attributes: set[str] = set()
        self._called: set[str] = set()
        self._other_text = ""
        self._findings: list[Finding] = []
        self._subclasses: set[str] = set()

    def add_python(self, path: str, tree: ast.AST, bound: Mapping[str, str]) -> None:
        """Add a Python file and the names that its imports bind."""
        source = _Source(path, tree, bound)
        self._sources.append(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                self._classes.setdefault(node.name, []).append((source, node))
                self._attributes.add(node.name)
                targets = [
                    t
                    for s in node.body
                    for t in getattr(s, "targets", [getattr(s, "target", None)])
                ]
                self._attributes.update(
                    target.id for target in targets if isinstance(target, ast.Name)
                )
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self._attributes.add(node.name)
                calls = (
                    one.func for one in ast.walk(node) if isinstance(one, ast.Call)
                )
                self._called.update(
                    f.attr
                    for f in calls
                    if isinstance(f, ast.Attribute) and f.attr != node.name
                )
            elif isinstance(node, ast.Call):
                self.keeps_divisor |= source.keeps_divisor(node)
            elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                self._attributes.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(
                node.value, str
            ):  # register_buffer("mean", ...)
                self._attributes.add(node.value)

    def add_yaml(self, path: str, text: str) -> None:
        """Report classes of a configuration that do not exist here, and arguments that its classes do not take."""
        for part in configured(text):
            if part.class_name is None:
                self._report_former_arguments(path, part)
                continue
            try:
                callee = look_up(part.class_name)
            except (ImportError, AttributeError) as error:
                self.report(path, part.line, Answer("configuration", *reason(error)))
                continue
            steps = part.arguments.get("gradient_accumulation_steps")
            if callee is Accelerator and steps is not None and steps.value != "1":
                self.report(path, steps.line, _OWN_DIVISOR)
            given = {
                name: (argument.value, argument.source)
                for name, argument in part.arguments.items()
            }
            for name, answer in wrong_arguments(callee, given):
                self.report(path, part.arguments[name].line, answer)

    def _report_former_arguments(self, path: str, part: Configured) -> None:
        """Report former arguments of Lightning's Trainer under a ``trainer:`` that names no class."""
        former = {
            name: argument
            for name, argument in part.arguments.items()
            if name in FORMER_ARGUMENTS
        }
        given = {
            name: (argument.value, argument.source) for name, argument in former.items()
        }
        for name, answer in wrong_arguments(Trainer, given):
            self.report(path, former[name].line, answer)

    def add_text(self, text: str) -> None:
        """Add the text of files that are not parsed: they name no class of the packages, but may define attributes."""
        self._other_text += text

    def new_subclasses(self) -> set[str]:
        """The names of classes that extend one of the packages, without those that an earlier call has returned."""
        names = {
            name
            for name, places in self._classes.items()
            if self._extends_a_package(places)
        }
        new = names - self._subclasses
        self._subclasses |= names
        return new

    def _extends_a_package(
        self, places: Sequence[tuple[_Source, ast.ClassDef]]
    ) -> bool:
        return any(self.bases(source, node)[0] for source, node in places)

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
        self, source: _Source, cls: ast.ClassDef, seen: tuple[str, ...] = ()
    ) -> tuple[tuple[type, ...], bool]:
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
        return tuple(
            o
            for o in several
            if not any(o is not p and issubclass(p, o) for p in several)
        ), known


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
            if (new := renamed(alias.name)) is not None:
                self._import(node, alias.name, lambda new=new: look_up(new))
            else:
                package = alias.name.partition(".")[0]
                self._modules[alias.asname or package] = (
                    alias.name if alias.asname else package
                )

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        package = node.module or ""
        new = None if node.level else renamed(package)
        if new is None:
            for alias in node.names if self._has_trainer and not node.level else ():
                self._check_other_package(node, package, alias.name)
            return
        for alias in node.names:
            old = f"{package}.{alias.name}"
            if alias.name == "__version__":
                self._report(node, _VERSION if foreign(package) else None)
            elif alias.name == "*" or old in PACKAGES:
                self._import(node, old, lambda old=old: look_up(PACKAGES.get(old, new)))
            else:
                self._import(node, old, lambda name=alias.name: imported(new, name))

    def _check_other_package(
        self, node: ast.stmt | ast.expr, module: str, name: str
    ) -> None:
        """Report a class of another package that extends a callback of Lightning."""
        if not self._project.has_class(name):
            is_rewritten = not any(
                foreign(full) for full in self._source.bound.values()
            )
            self._report(node, answer_callback(module, name, is_rewritten))

    def _import(self, node: ast.stmt, old: str, find: Any) -> None:
        self._project.names += 1
        try:
            find()
        except (ImportError, AttributeError) as error:
            if needs(error) is None:
                problem, fix = reason(error)
                self._report(
                    node,
                    Answer("import", f"{old}: {problem}", _fix_of_missing(old, fix)),
                )
            else:
                self._project.resolved += 1
            return
        self._project.resolved += 1

    # -- classes and functions -----------------------------------------------------------------------------------

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outside, types = self._own, self._types
        bases, _ = self._own = self._project.bases(self._source, node)
        if bases:
            self._has_trainer = True
            for member, answer in wrong_members(node.name, bases, node.body):
                name = getattr(member, "name", "")
                own = "is not a hook" in answer.problem or name.endswith("_dataloader")
                if not own or not self._project.calls(name):
                    self._report(member, answer)
            if any(issubclass(base, (TrainModule, DataModule)) for base in bases):
                self._types = {**types, "self.trainer": Trainer}
            self._check_saved_objects(node)
        self._types = {**self._types, **self._held(node)}
        self.generic_visit(node)
        self._own, self._types = outside, types

    def _check_saved_objects(self, node: ast.ClassDef) -> None:
        """Report objects that ``on_save_checkpoint`` stores whole: attributes that hold an object of a class."""
        objects = {}
        for assignment in ast.walk(node):
            if isinstance(assignment, ast.Assign) and isinstance(
                assignment.value, ast.Call
            ):
                class_name = (dotted(assignment.value.func) or "").rpartition(".")[2]
                if class_name[:1].isupper():
                    objects.update(
                        {dotted(target): class_name for target in assignment.targets}
                    )
        hooks = (
            member
            for member in node.body
            if getattr(member, "name", "") == "on_save_checkpoint"
        )
        for statement in (statement for hook in hooks for statement in ast.walk(hook)):
            if not isinstance(statement, ast.Assign) or not isinstance(
                statement.targets[0], ast.Subscript
            ):
                continue
            name = dotted(statement.value)
            if name in objects:
                problem = f"on_save_checkpoint stores {name}, an object of {objects[name]}: checkpoints hold no pickle"
                self._report(statement, Answer("checkpoint", problem, _OBJECT_FIX))

    def _held(self, node: ast.ClassDef) -> dict[str, type]:
        """The attributes to which the methods of a class assign a Trainer or an Accelerator, and nothing else."""
        made: dict[str, set[Any]] = {}
        for one in (one for one in ast.walk(node) if isinstance(one, ast.Assign)):
            for target in one.targets:
                if (name := dotted(target) or "").startswith("self."):
                    made.setdefault(name, set()).add(self._made_by(one.value))
        return {
            name: kinds.pop()
            for name, kinds in made.items()
            if len(kinds) == 1 and None not in kinds
        }

    def _made_by(self, value: ast.expr) -> Any:
        """`Trainer`, `Accelerator` or `Fabric`, if an expression constructs one."""
        made = self._source.library(value.func) if isinstance(value, ast.Call) else None
        return made if made in FACES else None

    def _visit_scope(self, node: ast.AST) -> None:
        """Read a scope, in which parameters and variables hide names from outside."""
        source, types = self._enter(node)
        self.generic_visit(node)
        self._source, self._types = source, types

    visit_Lambda = visit_ListComp = visit_SetComp = visit_DictComp = (
        visit_GeneratorExp
    ) = _visit_scope

    def _enter(self, node: ast.AST) -> tuple[_Source, dict[str, type]]:
        """Begin a scope; return what was known around it."""
        source, types = self._source, self._types
        visible, hidden = visible_names(node, source.bound)
        self._source = replace(source, bound=visible)
        self._types = {
            name: kind
            for name, kind in types.items()
            if name.partition(".")[0] not in hidden
        }
        return source, types

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        own_types = self._types
        parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        outside = [
            *node.decorator_list,
            *node.args.defaults,
            *node.args.kw_defaults,
            node.returns,
        ]
        every = [*parameters, node.args.vararg, node.args.kwarg]
        for one in filter(
            None, [*outside, *(each and each.annotation for each in every)]
        ):
            self.visit(one)  # outside of the function's scope
        source, types = self._enter(node)
        self._types |= {
            name: kind for name, kind in own_types.items() if name.startswith("self.")
        }
        hook = any(
            issubclass(base, Callback) for base in self._own[0]
        ) and _gets_trainer(node.name)
        for place, one in enumerate(parameters):
            annotation = one.annotation
            if isinstance(annotation, ast.Constant) and isinstance(
                annotation.value, str
            ):
                annotation = _parsed(annotation.value)
            kind = None if annotation is None else self._source.library(annotation)
            if kind in FACES:
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
                self._report(
                    node, _VERSION if foreign(self._source.bound[root]) else None
                )
            else:
                self._check_name(node)
            return
        if self._has_trainer and root in self._modules and "Callback" in node.attr:
            inside = rest.rpartition(".")[0]
            module = (
                f"{self._modules[root]}.{inside}" if inside else self._modules[root]
            )
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
        for known, kind in self._types.items():
            if name.startswith(f"{known}."):
                return follow(
                    example_of(kind), name[len(known) + 1 :].split("."), stored
                )
        bases, known_all = self._own
        first, *rest = name.split(".")
        if first != "self" or not bases or not rest or self._project.defines(rest[0]):
            return None, None
        base = bases[0]
        if (
            hasattr(base, rest[0])
            or rest[0] in dir(_made(base))
            or rest[0] in _assigned(base)
        ):
            return getattr(base, rest[0], None) if len(rest) == 1 else None, None
        if (
            not known_all or stored or hasattr(nn.Module, rest[0])
        ):  # a callback may be a module as well
            return None, None
        public = rest[0].lstrip("_")
        fix = f"self.{public}" if public in dir(base) else None
        return None, Answer(
            "attribute",
            f"nothing defines self.{rest[0]}: {base.__name__} has no such attribute",
            fix,
        )

    def visit_Call(self, node: ast.Call) -> None:
        callee = self._source.library(node.func)
        name = dotted(node.func)
        if callee is None and isinstance(node.func, ast.Attribute) and name is not None:
            callee = self._resolve(node.func, name)[0]
        given = {
            one.arg: (
                one.value.value if isinstance(one.value, ast.Constant) else None,
                ast.unparse(one.value),
            )
            for one in node.keywords
            if one.arg is not None
        }
        if callable(callee):
            for argument, answer in wrong_arguments(callee, given):
                line = next(one.value for one in node.keywords if one.arg == argument)
                self._report(line, answer)
        if self._source.keeps_divisor(node):
            self._report(node, _KEPT_DIVISOR)
        if (
            self._has_trainer
            and name == "torch.load"
            and _CHECKPOINT.search(ast.unparse(node))
        ):
            self._report(node, _AS_PICKLE)
        first = node.args[0] if node.args else None
        if (
            name is not None
            and _PROBES.search(name)
            and isinstance(first, ast.Constant)
        ):
            package = re.match(r"[\w.]*", str(first.value))
            if (
                package is not None
                and foreign(package[0])
                and name_here(package[0]) is None
            ):
                problem = f"{name}({first.value!r}) asks for the other library"
                self._report(node, Answer("probe", problem, "leave it out"))
        self._check_log_filter(node, name)
        self.generic_visit(node)

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
        names = [(dotted(one) or "").rpartition(".")[2] for one in factors]
        accelerates = any(
            old.partition(".")[0] == "accelerate" for old in self._source.bound.values()
        )
        of_loss = "gradient_accumulation_steps" in names and any(
            name.endswith("loss") for name in names
        )
        if accelerates and of_loss and not self._project.keeps_divisor:
            self._report(node, _STEPS_IN_LOSS)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if not isinstance(node.value, str):
            return
        if self._has_trainer and _FILE.fullmatch(node.value):
            problem = (
                f"{node.value!r}: checkpoints are directories, named without a suffix"
            )
            self._report(node, Answer("checkpoint", problem, _AS_FILE))
        head, _, _ = node.value.partition(".")
        package = (
            head
            if head in ("pytorch_lightning", "lightning_fabric")
            else ".".join(node.value.split(".")[:2])
        )
        is_name = (
            package in PACKAGES
            and foreign(package)
            and re.fullmatch(r"\w+(\.\w+)+", node.value)
        )
        if is_name and name_here(node.value) is None:
            self._report(node, Answer("string", f"{node.value!r} names nothing here"))


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
    return inspect.isfunction(method) and list(inspect.signature(method).parameters)[
        1:2
    ] == ["trainer"]


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
    if (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and dotted(node) == f"self.{node.attr}"
    ):
        return None if node.attr.startswith("_") else node.attr
    if isinstance(node, ast.Call) and dotted(node.func) == "self.__dict__.setdefault":
        return _constant_text(node.args[0])
    if isinstance(node, ast.Subscript) and dotted(node.value) == "self.__dict__":
        return _constant_text(node.slice)
    return None


def _constant_text(node: ast.AST) -> str | None:
    return (
        node.value
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        else None
    )
