"""Find callbacks of other packages that extend Lightning's class, without importing those packages."""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final

from trainer_kit.compat.callback_adapters import NEEDS_LOOP
from trainer_kit.migrate.refusals import Answer

__all__ = ["answer_callback"]

_IMPORTS_LIGHTNING: Final = re.compile(
    r"^\s*(?:from|import)\s+(?:pytorch_)?lightning\b", re.MULTILINE
)
_SOURCES: Final = 50
"""The most files of a package that are read for one class."""
_CALLBACKS: Final = {
    "Callback",
    "Checkpoint",
    "EarlyStopping",
    "LearningRateMonitor",
    *NEEDS_LOOP,
}
"""Lightning's callbacks that other packages extend."""


def answer_callback(module: str, name: str, is_rewritten: bool) -> Answer | None:
    """The finding for a class of another package that extends a callback of Lightning; None for anything else.

    Args:
        module: the dotted name of the module that the class is imported from.
        name: of the class.
        is_rewritten: the file names this library already, so that only what does not run is a finding.

    Example:
        >>> answer_callback("collections", "OrderedDict", is_rewritten=False) is None
        True
    """
    # A function or a module, of which no file needs to be read.
    if not name[:1].isupper():
        return None
    bases = _find_bases(module, name)
    if bases is None:
        if is_rewritten:
            return None
        return _answer_by_name(module, name)
    # Before the adapter, which cannot help here: such a class reads Lightning's loops while it runs.
    loop = next((base for base in bases if base in NEEDS_LOOP), None)
    if loop is not None:
        return Answer(
            "callback",
            f"{module}.{name} extends Lightning's {loop}, which drives Lightning's own loop",
            f"subclass trainer_kit.callbacks.{loop} in your code",
        )
    if is_rewritten:
        return None
    return Answer(
        "callback",
        f"{module}.{name} extends Lightning's Callback: the Trainer takes it through an adapter",
        "nothing, but keep lightning installed: the package needs it to define this class",
    )


def _find_bases(module: str, name: str) -> list[str] | None:
    """The bases of a class that extends a callback of Lightning; None if no file of its package shows that."""
    # Read as files: importing the package could need Lightning, or start a device.
    root = _package_directory(module.partition(".")[0])
    if root is None:
        return None
    for path in _files(root, module):
        bases = _bases(path, name)
        if bases:
            return bases
    return None


def _answer_by_name(module: str, name: str) -> Answer | None:
    # The package is not installed, or defines the class in a way that is not seen: only the name is left.
    if "lightning" not in f"{module}.{name}".lower() or "Callback" not in name:
        return None
    return Answer(
        "callback",
        f"{module}.{name} is a callback for Lightning, by its name",
        "keep lightning installed: the Trainer takes callbacks that extend Lightning's through an adapter",
    )


@cache
def _package_directory(package: str) -> Path | None:
    spec = PathFinder.find_spec(package)
    # A module of one file has no locations.
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _files(root: Path, module: str) -> list[Path]:
    """The files in which a class that is imported from a module may stand; packages often import them lazily."""
    inside = root.joinpath(*module.split(".")[1:])
    candidates = [inside.with_suffix(".py"), *inside.glob("*.py")]
    files = [path for path in candidates if path.is_file()]
    files += _files_for_lightning(root)
    return list(dict.fromkeys(files))[:_SOURCES]


@cache
def _files_for_lightning(root: Path) -> list[Path]:
    """The files of a package below a folder, or with a name, that names Lightning."""
    # Packages keep their callbacks for Lightning in a folder or file of that name, such as `integration/lightning`.
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if "lightning" in str(path.relative_to(root))
    ]


def _bases(path: Path, name: str) -> list[str] | None:
    """The last names of the bases of a class, if a file defines it and imports Lightning; else None."""
    text = path.read_text(encoding="utf-8", errors="replace")
    # Parsing takes most of the time, so files that cannot define the class are left out first.
    if f"class {name}(" not in text or _IMPORTS_LIGHTNING.search(text) is None:
        return None
    try:
        # Unlike the project's own files, a package may have files for another version of Python.
        tree = ast.parse(text)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
            if _CALLBACKS.isdisjoint(bases):
                return None
            return bases
    return None
