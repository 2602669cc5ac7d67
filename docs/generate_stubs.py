"""Writes the ``__init__.pyi`` of each package whose names are imported at first use, for ``make docs``.

The table ``_HOMES`` of the package is written by hand; type checkers, editors and the site read the stub. A test holds
that the stubs are current.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainer_kit.core.lazy import locate_names

ROOT = Path(__file__).parents[1]
HEAD = "# Written by docs/generate_stubs.py from the table in __init__.py; edit that, then `make docs`."
WIDTH = 88


def packages() -> Iterator[str]:
    """The packages with a table of lazy names."""
    for path in sorted((ROOT / "trainer_kit").rglob("__init__.py")):
        if "_HOMES: Final" in path.read_text(encoding="utf-8"):
            yield ".".join(path.relative_to(ROOT).parts[:-1])


def stub_of(package: str) -> Path:
    """The stub of a package."""
    return ROOT.joinpath(*package.split("."), "__init__.pyi")


def reading_order(name: str) -> tuple[int, str]:
    """The order of ruff within an import: constants, classes, functions."""
    if len(name) > 1 and name.isupper():
        return 0, name.lower()
    if name[:1].isupper():
        return 1, name.lower()
    return 2, name.lower()


def export_order(name: str) -> tuple[int, str]:
    """The order of ruff within ``__all__``: as in an import, but capitals sort before small letters."""
    group, _ = reading_order(name)
    return group, name


def import_lines(package: str, homes: Mapping[str, str]) -> list[str]:
    """The import statements of a table, in the order and the form of ruff."""
    plain = {"trainer_kit.core.lazy": ["NameLookup"]}
    renamed: dict[str, list[str]] = {}
    for name, location in locate_names(homes).items():
        module, _, attribute = location.partition(":")
        if module.startswith("."):
            module = f"{package.partition('.')[0]}{module}"
        else:
            module = f"{package}.{module}".rstrip(".")
        if attribute == name:
            plain.setdefault(module, []).append(name)
        else:
            renamed.setdefault(module, []).append(f"{attribute} as {name}")
    lines: list[str] = []
    for module in sorted({*plain, *renamed}):
        names = sorted(plain.get(module, ()), key=reading_order)
        line = f"from {module} import {', '.join(names)}"
        if len(line) > WIDTH:
            lines += [f"from {module} import ("]
            lines += [f"    {name}," for name in names]
            lines += [")"]
        elif names:
            lines.append(line)
        lines += [f"from {module} import {entry}" for entry in renamed.get(module, ())]
    return lines


def render(package: str) -> str:
    """The stub of a package."""
    source = ROOT.joinpath(*package.split("."), "__init__.py")
    module = importlib.import_module(package)
    version = []
    if re.search("^__version__ =", source.read_text(encoding="utf-8"), re.M):
        version = ["__version__: str"]
    exported = sorted(module.__all__, key=export_order)
    names = [f'    "{name}",' for name in exported]
    return "\n".join(
        [
            HEAD,
            *import_lines(package, module._HOMES),
            "",
            *version,
            "__all__ = [",
            *names,
            "]",
            "",
            "__getattr__: NameLookup",
            "",
        ]
    )


if __name__ == "__main__":
    for package in packages():
        stub_of(package).write_text(render(package), encoding="utf-8")
        print(f"wrote {stub_of(package).relative_to(ROOT)}")
