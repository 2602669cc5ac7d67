"""Translate dotted names of Lightning and Accelerate to this library's, and check that those exist."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, Final, final

from trainer_kit.core.errors import TrainerKitError

__all__ = [
    "PACKAGES",
    "Finding",
    "bound_names",
    "dotted",
    "foreign",
    "imported",
    "look_up",
    "mentions",
    "name_here",
    "needs",
    "reason",
    "renamed",
    "visible_names",
]

PACKAGES: Final = {
    "accelerate": "trainer_kit",
    "lightning": "trainer_kit",
    "lightning.fabric": "trainer_kit.fabric",
    "lightning.pytorch": "trainer_kit",
    "lightning_fabric": "trainer_kit.fabric",
    "pytorch_lightning": "trainer_kit",
    "trainer_kit": "trainer_kit",
}
"""By package of Lightning or Accelerate, the package here that has its names; a file that was rewritten names ours."""
_DOTTED: Final = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
_MENTION: Final = re.compile(
    rf"\b(?:{'|'.join(name for name in PACKAGES if '.' not in name)})\b"
)


@final
@dataclass(frozen=True)
class Finding:
    """A place in the code that cannot be migrated, or not unchanged.

    Attributes:
        path: the file.
        line: its line, from 1.
        kind: the category, in one word; the summary counts findings by it.
        problem: what is wrong.
        fix: what to do about it.
    """

    path: str
    line: int
    kind: str
    problem: str
    fix: str | None = None


def mentions(text: str) -> bool:
    """Whether a text may name one of the packages, or this one."""
    return _MENTION.search(text) is not None


def foreign(name: str) -> bool:
    """Whether a dotted name is one of Lightning or Accelerate, and not of this library."""
    return not name.startswith("trainer_kit") and renamed(name) is not None


def renamed(name: str) -> str | None:
    """Translate a dotted name of Lightning or Accelerate to this library; None for other packages.

    Example:
        >>> renamed("lightning.pytorch.callbacks.EarlyStopping"), renamed("lightning_utilities.core")
        ('trainer_kit.callbacks.EarlyStopping', None)
    """
    # The longest package counts: `lightning.fabric` has its names elsewhere than `lightning`.
    head = name
    while head not in PACKAGES:
        head, dot, _ = head.rpartition(".")
        if not dot:
            return None
    return PACKAGES[head] + name[len(head) :]


def name_here(text: str) -> str | None:
    """Translate a text if it is a dotted name of Lightning or Accelerate that exists here; else None."""
    if not _DOTTED.fullmatch(text):
        return None
    new = renamed(text)
    if new is None:
        return None
    try:
        exists = look_up(new) is not None
    except (ImportError, AttributeError):
        return None
    if not exists:
        return None
    return new


# Cached, since a project imports the same names in hundreds of files.
@cache
def _module(name: str) -> ModuleType:
    # Optional packages warn when they are imported, which would stand between the findings.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(name)


def imported(module: str, name: str) -> Any:
    """What ``from module import name`` binds.

    Raises:
        ImportError: the name does not exist.
        AttributeError: the same.
    """
    try:
        # An attribute before a submodule, as Python's `from` does.
        return getattr(_module(module), name)
    except AttributeError as error:
        try:
            return _module(f"{module}.{name}")
        except ModuleNotFoundError as missing:
            # A package that the submodule imports is missing: the name itself exists.
            if missing.name != f"{module}.{name}":
                raise missing from None
            # The module's own error has the fix.
            raise error from None


@cache
def look_up(name: str) -> Any:
    """The object of a dotted name that begins with a package.

    Raises:
        ImportError: the name does not exist.
        AttributeError: the same, of a class or an object.
    """
    package, *attributes = name.split(".")
    value: Any = _module(package)
    for attribute in attributes:
        if isinstance(value, ModuleType):
            value = imported(value.__name__, attribute)
        else:
            value = getattr(value, attribute)
    return value


def needs(error: BaseException) -> str | None:
    """The package that a name needs and that is not installed; None if the name itself does not exist."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    package = (error.name or "").partition(".")[0]
    # A missing module of this library means that the name does not exist here.
    if package in ("", "trainer_kit"):
        return None
    return package


def reason(error: BaseException) -> tuple[str, str | None]:
    """Problem and fix of an error, from its fields or else its text."""
    if isinstance(error, TrainerKitError):
        return error.problem, error.fix
    text = str(error)
    # An ImportError of this library has the fields only in its text.
    match = re.search(r"^(.*?)\n\s*(?:found:.*\n\s*)?fix: +(.*)$", text, re.DOTALL)
    if match:
        return match[1], match[2]
    # Python's own error.
    match = re.fullmatch(
        r"(?:type object )?'(\w+)'(?: object)? has no attribute '(\w+)'.*", text
    )
    if match:
        return f"{match[1]} has no {match[2]!r}", None
    problem, _, fix = text.partition(": ")
    return problem, fix or None


def dotted(node: ast.AST) -> str | None:
    """``a.b.c`` as a text; None for other expressions."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    names.append(node.id)
    return ".".join(reversed(names))


def bound_names(tree: ast.AST) -> dict[str, str]:
    """The local names that a file's imports of the packages bind in any scope, with the dotted names they refer to.

    A name that an import of another package binds too (``pl`` may be polars) is left out.
    """
    return _imported_names(ast.walk(tree))[0]


def visible_names(
    scope: ast.AST, outside: Mapping[str, str]
) -> tuple[dict[str, str], set[str]]:
    """The names of the packages that are visible within a scope, and all names that the scope binds.

    A parameter, variable, function or class hides a name of the same spelling that an import binds outside.

    Args:
        scope: a module, function, lambda or comprehension.
        outside: the names that are visible around it.
    """
    nodes = list(_scope_nodes(scope))
    imported_here, hidden = _imported_names(nodes)
    declared: set[str] = set()
    assigned: set[str] = set()
    for node in nodes:
        assigned.update(_assigned_names(node))
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            declared.update(node.names)
    # An assignment after `global` or `nonlocal` belongs to another scope.
    hidden |= assigned - declared
    visible = {name: full for name, full in outside.items() if name not in hidden}
    # Imports last: they are visible although they are bound in the same scope.
    return visible | imported_here, hidden | imported_here.keys()


def _imported_names(nodes: Iterable[ast.AST]) -> tuple[dict[str, str], set[str]]:
    """What the imports among some nodes bind: names of the packages, and other names."""
    bound: dict[str, str] = {}
    unrelated: set[str] = set()
    for node in nodes:
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        for alias in node.names:
            root = alias.name.partition(".")[0]
            name = alias.asname or root
            # With the dots of a relative import, so that it is no name of a package.
            if isinstance(node, ast.ImportFrom):
                full_name = f"{'.' * node.level}{node.module or ''}.{alias.name}"
            elif alias.asname:
                full_name = alias.name
            # `import a.b` binds `a`.
            else:
                full_name = root
            if renamed(full_name) is None:
                unrelated.add(name)
            else:
                bound[name] = full_name
    # `try: import lightning as pl` beside `import polars as pl`: rewriting uses of `pl` could be wrong.
    for name in unrelated:
        bound.pop(name, None)
    return bound, unrelated


_SCOPES: Final = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)


def _scope_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope; of the scopes inside it only the nodes that begin them."""
    pending = list(ast.iter_child_nodes(scope))
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, _SCOPES):
            pending += ast.iter_child_nodes(node)


def _assigned_names(node: ast.AST) -> Iterator[str]:
    """The names that one node binds, other than by an import."""
    match node:
        case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store() | ast.Del()):
            yield name
        case (
            ast.FunctionDef(name=name)
            | ast.AsyncFunctionDef(name=name)
            | ast.ClassDef(name=name)
        ):
            yield name
        case (
            ast.ExceptHandler(name=str(name))
            | ast.MatchAs(name=str(name))
            | ast.MatchStar(name=str(name))
        ):
            yield name
