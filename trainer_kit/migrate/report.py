"""Find the places in Lightning or Accelerate code that will not move; this library's errors are the reasons."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, Final, final

from torch import nn

from trainer_kit.core.datamodule import DataModule
from trainer_kit.core.hooks import Callback
from trainer_kit.core.module import TrainModule
from trainer_kit.core.types import Function
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
from trainer_kit.migrate.project import Project, Source, constant_text, last_name
from trainer_kit.migrate.refusals import (
    FACES,
    Answer,
    example_of,
    follow,
    wrong_arguments,
    wrong_members,
)
from trainer_kit.trainer import Trainer

__all__ = ["find_problems"]

# A path, with one space at most: a sentence that names a file is none.
_FILE: Final = re.compile(r"\S*( \S*)?\.ckpt")
# `torch.load` also reads datasets and tokenizers: only a call that names a checkpoint is a finding.
_CHECKPOINT: Final = re.compile(r"ckpt|checkpoint|best_model|last_model", re.IGNORECASE)
_PROBES: Final = re.compile(
    r"(?:^|[._])(?:import_module|importorskip|find_spec|version|RequirementCache|available)$"
)
_AS_FILE: Final = (
    "trainer.checkpoint_callback.best_model_path, or ckpt_path='best' or 'last'; Lightning's own .ckpt files: "
    "trainer-kit checkpoint import, and load_from_checkpoint reads their weights"
)
_AS_PICKLE: Final = Answer(
    "checkpoint",
    "torch.load reads no checkpoint directory",
    "load_from_checkpoint(path), or trainer_kit.checkpoint.read_weights(path) for the state_dict alone; or "
    'ModelCheckpoint(also="lightning"), which writes f"{path}.ckpt" next to it, which torch.load reads',
)
_OBJECT_FIX: Final = (
    "nothing if its class has a codec (modules, dataclasses, NumPy values have); else store its state_dict() or plain "
    "values, or register one: trainer_kit.checkpoint.codec(Type, to_plain, from_plain)"
)
_STEPS_IN_LOSS: Final = Answer(
    "weights",
    "gradient_accumulation_steps in a loss cancels Accelerate's divisor; a short last window has another divisor here",
    "backward(sum of the losses, weight=tokens of the batch), or GradientAccumulationPlugin(fixed_divisor=True)",
)
_KEPT_DIVISOR: Final = Answer(
    "weights",
    "fixed_divisor=True keeps Accelerate's division: a short last window is divided by the number of steps",
    "remove it for the mean over the samples of every step",
)
_VERSION: Final = Answer(
    "version",
    "this becomes the version of trainer_kit",
    "where it is compared, keep the branch for the newest version",
)


def find_problems(project: Project) -> list[Finding]:
    """Everything in a project that cannot be migrated."""
    # After all files are added: a class, or an attribute, may be defined in a file that comes later.
    for source in project.sources:
        _Reader(project, source).visit(source.tree)
    return project.findings


@final
class _Reader(ast.NodeVisitor):
    """Checks one file; infers types from imports, annotations, constructors and hooks."""

    def __init__(self, project: Project, source: Source) -> None:
        # At module level only: `add_python` has the imports of all scopes, but an import in a function binds nothing
        # outside.
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
        self._has_trainer = (
            source.uses_trainer() and not project.has_fabric_loops_only()
        )

    def _report(self, node: ast.stmt | ast.expr, answer: Answer | None) -> None:
        if answer is not None:
            self._project.report(self._source.path, node.lineno, answer)

    # -- imports -------------------------------------------------------------------------------------------------

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            # Modules of other packages are kept for `visit_Attribute`, which looks for their callbacks.
            new = renamed(alias.name)
            if new is not None:
                self._import(node, alias.name, partial(look_up, new))
            elif alias.asname:
                self._modules[alias.asname] = alias.name
            else:
                package = alias.name.partition(".")[0]
                self._modules[package] = package

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        # A relative import is of a module of the project.
        if node.level:
            return
        package = node.module or ""
        new = renamed(package)
        if new is None:
            if self._has_trainer:
                for alias in node.names:
                    self._check_other_package(node, package, alias.name)
            return
        for alias in node.names:
            full_name = f"{package}.{alias.name}"
            # It resolves, to the version of this library, so nothing else would notice it.
            if alias.name == "__version__":
                if foreign(package):
                    self._report(node, _VERSION)
            # `from lightning import pytorch` names a package, which has its own row in the table.
            elif alias.name == "*" or full_name in PACKAGES:
                target = PACKAGES.get(full_name, new)
                self._import(node, full_name, partial(look_up, target))
            else:
                self._import(node, full_name, partial(imported, new, alias.name))

    def _check_other_package(
        self, node: ast.stmt | ast.expr, module: str, name: str
    ) -> None:
        """Report a class of another package that extends a callback of Lightning."""
        # A package of the project itself is read as source, by `visit_ClassDef`.
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
        # Classes may stand in classes and functions: what is known of the outer one is put back at the end.
        outer_bases, outer_knows_bases = self._bases, self._knows_bases
        outer_types = self._types
        self._bases, self._knows_bases = self._project.bases(self._source, node)
        if self._bases:
            # The file may name no class of Lightning, if the base is in another file of the project.
            self._has_trainer = not self._project.has_fabric_loops_only()
            self._check_members(node)
            if any(issubclass(base, (TrainModule, DataModule)) for base in self._bases):
                self._types = {**outer_types, "self.trainer": Trainer}
            self._check_saved_objects(node)
        # All methods before any is read: `__init__` need not be the first.
        self._types = {**self._types, **self._attribute_types(node)}
        self.generic_visit(node)
        self._bases, self._knows_bases = outer_bases, outer_knows_bases
        self._types = outer_types

    def _check_members(self, node: ast.ClassDef) -> None:
        for member, answer in wrong_members(node.name, self._bases, node.body):
            name = getattr(member, "name", "")
            # A method named like a hook is a helper of the user if the project calls it; the library cannot know that.
            may_be_helper = (
                "is not a hook" in answer.problem
                or name.endswith("_dataloader")
                or self._project.has_fabric_loops_only()
            )
            if not may_be_helper or not self._project.calls(name):
                self._report(member, answer)

    def _check_saved_objects(self, node: ast.ClassDef) -> None:
        """Report objects that ``on_save_checkpoint`` stores whole: attributes that hold an object of a class."""
        objects = {}
        for assignment in _assignments(node):
            if not isinstance(assignment.value, ast.Call):
                continue
            class_name = last_name(assignment.value.func)
            # A capital is the only sign of a class in a source that is not imported.
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
        kinds_by_name: dict[str, set[type | None]] = {}
        for assignment in _assignments(node):
            kind = self._constructed_type(assignment.value)
            for target in assignment.targets:
                name = dotted(target) or ""
                if name.startswith("self."):
                    kinds_by_name.setdefault(name, set()).add(kind)
        types: dict[str, type] = {}
        for name, kinds in kinds_by_name.items():
            kind = kinds.pop()
            # With another assignment, also of something unknown, the attribute may hold that.
            if kind is not None and not kinds:
                types[name] = kind
        return types

    def _constructed_type(self, value: ast.expr) -> type | None:
        """`Trainer`, `Accelerator` or `Fabric`, if an expression constructs one."""
        if not isinstance(value, ast.Call):
            return None
        callee = self._source.library(value.func)
        # Subclasses of the user are left out: they may have attributes that this library does not know.
        if callee not in FACES:
            return None
        kind: type = callee
        return kind

    def _visit_scope(self, node: ast.AST) -> None:
        """Read a scope, in which parameters and variables hide names from outside."""
        outer_source, outer_types = self._enter(node)
        self.generic_visit(node)
        self._source, self._types = outer_source, outer_types

    # Not for classes: names in the body of a class are not visible in its methods.
    visit_Lambda = visit_ListComp = visit_SetComp = visit_DictComp = (
        visit_GeneratorExp
    ) = _visit_scope

    def _enter(self, node: ast.AST) -> tuple[Source, dict[str, type]]:
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
        # The parameter `self` hides the name outside, but is the same object in each method of the class.
        for name, kind in outer_types.items():
            if name.startswith("self."):
                self._types[name] = kind
        is_callback = any(issubclass(base, Callback) for base in self._bases)
        is_hook = is_callback and _gets_trainer(node.name)
        # The first two arguments of a callback's hook after self: trainer and pl_module, whatever the user calls them.
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
        if annotation is None:
            return None
        # An annotation may be a text that names a class which is imported only for type checkers.
        text = constant_text(annotation)
        if text is not None:
            annotation = _parsed(text)
        if annotation is None:
            return None
        return self._source.library(annotation)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign) -> None:
        # The value first: in `trainer = wrap(trainer.strategy)` it is still the Trainer.
        self.visit(node.value)
        kind = self._constructed_type(node.value)
        for target in node.targets:
            name = dotted(target)
            if name is not None and kind is not None:
                self._types[name] = kind
            else:
                # The variable may hold anything from here on.
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
        # The node is not visited further: its value is a part of the same dotted name.
        self._report(node, self._resolve(node, name)[1])

    def _check_name(self, node: ast.Attribute) -> None:
        new = self._source.new_name(node)
        assert new is not None
        try:
            look_up(new)
        except (ImportError, AttributeError) as error:
            owner = node.value
            # Of a chain only the first missing name is reported.
            if isinstance(owner, ast.Attribute) and self._source.library(owner) is None:
                self._check_name(owner)
            elif needs(error) is None:
                problem, fix = reason(error)
                self._report(
                    node, Answer("attribute", problem, _fix_of_missing(new, fix))
                )

    def _resolve(self, node: ast.Attribute, name: str) -> tuple[object, Answer | None]:
        """The object that an attribute is, or the reason for which the library refuses it; None for what is unknown."""
        # A store or a `del`.
        stored = not isinstance(node.ctx, ast.Load)
        for variable, kind in self._types.items():
            if name.startswith(f"{variable}."):
                attributes = name.removeprefix(f"{variable}.").split(".")
                return follow(example_of(kind), attributes, stored)
        root, *attributes = name.split(".")
        if root != "self" or not self._bases or not attributes:
            return None, None
        # Of several bases the first has the message; all of them have been asked by `wrong_members`.
        attribute, base = attributes[0], self._bases[0]
        # Anywhere in the project: a mixin or an assignment from outside may define it.
        if self._project.defines(attribute):
            return None, None
        if _has_attribute(base, attribute):
            value = None
            if len(attributes) == 1:
                value = getattr(base, attribute, None)
            return value, None
        if not self._knows_bases or stored:
            return None, None
        # A callback may be a module as well.
        if hasattr(nn.Module, attribute):
            return None, None
        public = attribute.lstrip("_")
        fix = None
        if public in dir(base):
            fix = f"self.{public}"
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

    def _check_arguments(self, node: ast.Call, callee: Function) -> None:
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
        # A name that exists here is rewritten, and the probe then asks for this library, which is installed.
        if name_here(package[0]) is None:
            problem = f"{name}({argument.value!r}) asks for the other library"
            self._report(node, Answer("probe", problem, "leave it out"))

    def _check_log_filter(self, node: ast.Call, name: str | None) -> None:
        """Report a logger or a filter of warnings that is chosen by the name of the other library."""
        function = (name or "").rpartition(".")[2]
        if function not in ("getLogger", "filterwarnings"):
            return
        for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
            # A filter is a pattern, in which the dots of the name may have backslashes.
            text = constant_text(argument) or ""
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
        names = [last_name(factor) for factor in factors]
        if "gradient_accumulation_steps" not in names:
            return
        if not any(name.endswith("loss") for name in names):
            return
        # Only in files for Accelerate: elsewhere a product of this kind is the user's own arithmetic.
        if self._source.names_accelerate() and not self._project.keeps_divisor:
            self._report(node, _STEPS_IN_LOSS)

    def visit_Expr(self, node: ast.Expr) -> None:
        # A docstring may name the other library without using it.
        if not isinstance(node.value, ast.Constant):
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
        # "lightning" and "accelerate" are also words and logger names: of these, two parts must name a package.
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
    # "dir(module) lists its names" helps only where the code runs.
    if fix is not None and not fix.startswith("dir("):
        return fix
    return "copy it into your code, or keep this import of the other library: it has no counterpart here"


def _parsed(text: str) -> ast.expr | None:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        return None


def _assignments(node: ast.AST) -> Iterator[ast.Assign]:
    return (child for child in ast.walk(node) if isinstance(child, ast.Assign))


def _has_attribute(base: type, name: str) -> bool:
    """Whether a class, or an object of it after its constructor, has an attribute."""
    if hasattr(base, name) or name in dir(_example(base)):
        return True
    return name in _assigned(base)


def _example(base: type) -> object:
    """Make an object of a class, for attributes that its constructor sets; return the class if that fails."""
    # Constructors of these three only set attributes; that of another class may open files or connections.
    if not issubclass(base, (TrainModule, DataModule, Callback)):
        return base
    # It may need arguments, or a package that is not installed.
    try:
        return base()
    except Exception:
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
    # From the source, since objects such as loggers cannot be made without their package.
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
        # A private name is no promise: a subclass that reads it is reported.
        if node.attr.startswith("_") or dotted(node) != f"self.{node.attr}":
            return None
        return node.attr
    if isinstance(node, ast.Call) and dotted(node.func) == "self.__dict__.setdefault":
        return constant_text(node.args[0])
    if isinstance(node, ast.Subscript) and dotted(node.value) == "self.__dict__":
        return constant_text(node.slice)
    return None


def _constant_value(node: ast.AST) -> object:
    if not isinstance(node, ast.Constant):
        return None
    return node.value
