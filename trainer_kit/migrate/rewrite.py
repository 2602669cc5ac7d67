"""Rewrites the imports and dotted names of Lightning and Accelerate in a source, and leaves all else as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, final

import libcst as cst
from libcst.codemod import CodemodContext
from libcst.codemod.visitors import AddImportsVisitor
from libcst.helpers import get_full_name_for_node
from libcst.metadata import ImportAssignment, MetadataWrapper, ScopeProvider

from trainer_kit.migrate.names import PACKAGES, foreign, name_here, renamed

__all__ = ["rewrite_python"]


def rewrite_python(source: bytes, bound: Mapping[str, str]) -> bytes:
    """Replace imports, attributes and strings in a source by the names of this library.

    Where the source asks Accelerate for gradient accumulation, ``fixed_divisor=True`` keeps its results.

    Args:
        source: the bytes of the file; encoding, line endings and formatting are kept.
        bound: what its imports bind, from `bound_names`.

    Raises:
        libcst.ParserSyntaxError: the source is not valid Python.

    Example:
        >>> rewrite_python(b"import lightning as L  # ours now", {"L": "lightning"})
        b'import trainer_kit as L  # ours now'
    """
    rewrite = _Rewrite(bound)
    module = cst.parse_module(source)
    if rewrite.needs_scopes(source):
        # The wrapper would copy the tree in case a node is in it twice, which parse_module never makes.
        module = MetadataWrapper(module, unsafe_skip_copy=True).visit(rewrite)
    else:
        module = module.visit(rewrite)
    # After the visit: only then it is known whether a call was rewritten.
    if rewrite.lacks_plugin:
        context = CodemodContext()
        AddImportsVisitor.add_needed_import(
            context, "trainer_kit", "GradientAccumulationPlugin"
        )
        module = AddImportsVisitor(context).transform_module(module)
    return module.bytes


def _name_of(node: cst.CSTNode | None) -> str:
    if node is None:
        return ""
    return get_full_name_for_node(node) or ""


def _root_of(node: cst.BaseExpression) -> cst.BaseExpression:
    while isinstance(node, cst.Attribute):
        node = node.value
    return node


def _expression(name: str) -> cst.Attribute | cst.Name:
    expression = cst.parse_expression(name)
    assert isinstance(expression, (cst.Attribute, cst.Name))
    return expression


def _alias(alias: cst.ImportAlias) -> cst.ImportAlias:
    new = renamed(_name_of(alias.name))
    if new is None:
        return alias
    return alias.with_changes(name=_expression(new))


def _with_argument(call: cst.Call, name: str, value: str) -> cst.Call:
    """Add a keyword argument after the others, on a line of its own where they are."""
    argument = cst.Arg(cst.Name(value), keyword=cst.Name(name), equal=_EQUAL)
    if not call.args:
        return call.with_changes(args=[argument])
    # The new last argument takes over the trailing comma and line end of the former one, which gets a separator.
    last = call.args[-1]
    separator = call.whitespace_before_args
    if not isinstance(separator, cst.ParenthesizedWhitespace):
        separator = cst.SimpleWhitespace(" ")
    argument = argument.with_changes(
        comma=last.comma, whitespace_after_arg=last.whitespace_after_arg
    )
    last = last.with_changes(
        comma=cst.Comma(whitespace_after=separator),
        whitespace_after_arg=cst.SimpleWhitespace(""),
    )
    return call.with_changes(args=[*call.args[:-1], last, argument])


_EQUAL: Final = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))


@final
class _Rewrite(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (ScopeProvider,)
    """Scopes cost two thirds of the time; a file is visited without them if it needs none."""

    def __init__(self, bound: Mapping[str, str]) -> None:
        super().__init__()
        self._bound = bound
        self.lacks_plugin = False
        # Packages that are imported under their own names: each use of these names changes too.
        self._plain = {
            name: PACKAGES[name]
            for name, full_name in bound.items()
            if name == full_name and foreign(name)
        }

    def needs_scopes(self, source: bytes) -> bool:
        """Whether names in the file must be distinguished from parameters and variables of the same spelling."""
        names_accelerate = any(
            name.partition(".")[0] == "accelerate" for name in self._bound.values()
        )
        subpackages = b".fabric" in source or b".pytorch" in source
        return (
            # Otherwise the local name stays, and no use of it changes.
            bool(self._plain)
            or names_accelerate
            or (subpackages and "lightning" in self._bound.values())
        )

    # Names inside imports are rewritten as a whole on leaving; visited one by one they would change twice.
    def visit_Import(self, node: cst.Import) -> bool:
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        return False

    def leave_Import(
        self, original_node: cst.Import, updated_node: cst.Import
    ) -> cst.Import:
        return updated_node.with_changes(
            names=[_alias(alias) for alias in original_node.names]
        )

    def leave_ImportFrom(
        self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
    ) -> cst.BaseSmallStatement:
        package = _name_of(original_node.module)
        new = renamed(package)
        # `from .lightning import x` is a module of the project.
        if new is None or original_node.relative:
            return updated_node
        names = original_node.names
        if not isinstance(names, cst.ImportStar) and len(names) == 1:
            target = PACKAGES.get(f"{package}.{_name_of(names[0].name)}")
            # `from lightning import pytorch as pl` names the package itself, which has no attribute for it.
            if target == new:
                name = cst.ensure_type(names[0].name, cst.Name)
                as_name = names[0].asname or cst.AsName(name)
                return cst.Import([cst.ImportAlias(_expression(target), as_name)])
        return updated_node.with_changes(module=_expression(new))

    def _is_imported(self, node: cst.BaseExpression) -> bool:
        """Whether an import binds the name that the expression is, and not a parameter, function or class."""
        # None in a file that was visited without scopes, and for names that are no variables.
        scope = self.get_metadata(ScopeProvider, node, None)
        if scope is None or not isinstance(node, cst.Name):
            return False
        assignments = scope[node.value]
        # A definition of the same name, such as in `except ImportError:`, makes the import uncertain.
        for assignment in assignments:
            definition = getattr(assignment, "node", None)
            if isinstance(definition, (cst.FunctionDef, cst.ClassDef)):
                return False
        return any(
            isinstance(assignment, ImportAssignment) for assignment in assignments
        )

    def leave_Name(
        self, original_node: cst.Name, updated_node: cst.Name
    ) -> cst.BaseExpression:
        new = self._plain.get(original_node.value)
        if new is None or not self._is_imported(original_node):
            return updated_node
        return _expression(new)

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        root, _, attributes = _name_of(original_node).partition(".")
        new = None
        if root in self._bound and attributes:
            new = PACKAGES.get(f"{self._bound[root]}.{attributes}")
        # `leave_Name` may have changed the name after the dot, which is no variable; here and in the methods below it
        # is put back.
        if new is None or not self._is_imported(_root_of(original_node)):
            return updated_node.with_changes(attr=original_node.attr)
        package = renamed(self._bound[root])
        if package is None or root in self._plain:
            return _expression(new)
        # Under `import lightning as L`, `L.pytorch` is L itself and `L.fabric` stays below L.
        return _expression(root + new[len(package) :])

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        root, dot, attributes = _name_of(original_node.func).partition(".")
        full_name = f"{self._bound.get(root, '')}{dot}{attributes}"
        package, _, called = full_name.rpartition(".")
        if package.partition(".")[0] != "accelerate":
            return updated_node
        if not self._is_imported(_root_of(original_node.func)):
            return updated_node
        arguments = {_name_of(arg.keyword): arg for arg in updated_node.args}
        if called == "GradientAccumulationPlugin":
            if "fixed_divisor" in arguments:
                return updated_node
            return _with_argument(updated_node, "fixed_divisor", "True")
        steps = arguments.get("gradient_accumulation_steps")
        if called != "Accelerator" or steps is None:
            return updated_node
        # The call that makes the plugin is rewritten by the branch above.
        if "gradient_accumulation_plugin" in arguments:
            return updated_node
        # A window of one step is never short.
        if isinstance(steps.value, cst.Integer) and steps.value.value == "1":
            return updated_node
        plugin = self._plugin_argument(_name_of(updated_node.func), steps)
        updated_arguments = []
        for argument in updated_node.args:
            if argument is steps:
                argument = plugin
            updated_arguments.append(argument)
        return updated_node.with_changes(args=updated_arguments)

    def _plugin_argument(self, callee: str, steps: cst.Arg) -> cst.Arg:
        """The argument that replaces ``gradient_accumulation_steps`` of an Accelerator."""
        name = "GradientAccumulationPlugin"
        # `accelerate.Accelerator(...)` has the plugin beside it; a name imported by itself needs another import.
        root, dot, _ = callee.partition(".")
        if dot:
            name = f"{root}.{name}"
        else:
            self.lacks_plugin |= name not in self._bound
        num_steps = cst.Arg(steps.value, keyword=cst.Name("num_steps"), equal=_EQUAL)
        plugin = cst.Call(_expression(name), [num_steps])
        return steps.with_changes(
            keyword=cst.Name("gradient_accumulation_plugin"),
            value=_with_argument(plugin, "fixed_divisor", "True"),
        )

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:
        return updated_node.with_changes(keyword=original_node.keyword)

    def leave_Param(
        self, original_node: cst.Param, updated_node: cst.Param
    ) -> cst.Param:
        return updated_node.with_changes(name=original_node.name)

    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        return updated_node.with_changes(name=original_node.name)

    def leave_SimpleString(
        self, original_node: cst.SimpleString, updated_node: cst.SimpleString
    ) -> cst.SimpleString:
        # Only a text that is a dotted name which exists here: no sentence is changed.
        new = name_here(original_node.raw_value)
        if new is None:
            return updated_node
        return updated_node.with_changes(
            value=original_node.value.replace(original_node.raw_value, new)
        )
