"""The reference says what every argument means and shows an example of every class and function.

``reference_gaps.json`` has, per room, how many callables still lack a description of an argument, and how many classes
and functions lack an example. A number there may only fall. ``python tests/docs/test_reference_gaps.py`` names the
gaps; with ``--write`` it lowers the numbers. An override may leave out arguments that a base class describes.
"""

from __future__ import annotations

import ast
import doctest
import inspect
import json
import re
import runpy
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CEILINGS = Path(__file__).with_suffix(".json").with_stem("reference_gaps")
REFERENCE = runpy.run_path(str(ROOT / "docs" / "generate_reference.py"))
SECTIONS = ("Args", "Attributes")
KINDS = {"args": "lacks a description of", "examples": "lacks an executed example"}


class Gap(NamedTuple):
    room: str
    kind: str
    name: str
    lacking: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join([self.name, KINDS[self.kind], ", ".join(self.lacking)]).strip()


def entries(docstring: str | None) -> set[str]:
    """The names that a docstring describes in its sections."""
    names: set[str] = set()
    text = inspect.cleandoc(docstring or "")
    for body in re.findall(
        rf"^(?:{'|'.join(SECTIONS)}):[^\n]*\n((?:    [^\n]*\n|\n)+)", text + "\n", re.M
    ):
        names |= set(re.findall(r"^    \*{0,2}(\w+)(?: \(.+?\))?:", body, re.M))
    return names


@cache
def described_fields(cls: type) -> frozenset[str]:
    """The fields of a dataclass that are followed by a text, as griffe reads them."""
    if not is_dataclass(cls):
        return frozenset()
    [body] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    return frozenset(
        field.target.id
        for field, text in zip(body.body, body.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    )


def parameters(value: Callable[..., Any]) -> list[str]:
    """The names that a caller can pass a value for."""
    names = list(inspect.signature(value).parameters)
    return [name for name in names if name not in ("self", "cls")]


def room(value: Any) -> str:
    return str(inspect.unwrap(value).__module__.split(".")[1])


def members_of(page: Path, name: str) -> list[str] | None:
    """The members in the options of a directive; None where the page shows all."""
    block = re.search(
        rf"^::: {re.escape(name)}\n((?:    .*\n)*)", page.read_text("utf-8"), re.M
    )
    assert block is not None
    options = (yaml.safe_load(block[1]) or {}).get("options", {})
    members = options.get("members")
    return [] if members is False else members


def function_of(member: Any) -> Callable[..., Any] | None:
    """The function of an entry in the namespace of a class; None of a property or a value."""
    member = getattr(member, "__func__", member)
    return member if inspect.isfunction(member) else None


def definitions(cls: type, member: str) -> list[Callable[..., Any]]:
    """The functions with this name in a class and its bases, the nearest first."""
    found = [function_of(vars(base).get(member)) for base in cls.__mro__]
    return [function for function in found if function is not None]


def shown_methods(cls: type, listed: list[str] | None) -> list[str]:
    """The methods that the page of a class shows; an override without a text of its own is shown at its base."""
    names = listed
    if names is None:
        names = [name for name in vars(cls) if not name.startswith("_")]
    methods = {name: definitions(cls, name) for name in names}
    return [
        name
        for name, functions in methods.items()
        if functions
        and (listed is not None or functions[0].__doc__ or len(functions) == 1)
        and not functions[0].__module__.startswith("torch.")
    ]


def described_arguments(cls: type, member: str) -> set[str]:
    """The arguments of a method that it or a method of a base class describes."""
    texts = [function.__doc__ for function in definitions(cls, member)]
    return set().union(*(entries(text) for text in texts))


def class_gaps(name: str, cls: type, listed: list[str] | None) -> Iterator[Gap]:
    """The arguments without a description of a class and of its methods."""
    described: set[str] = set()
    for base in cls.__mro__:
        described |= entries(vars(base).get("__doc__")) | described_fields(base)
    # No call creates an object of these.
    is_abstract = issubclass(cls, Enum) or getattr(cls, "_is_protocol", False)
    if not is_abstract:
        lacking = [each for each in parameters(cls) if each not in described]
        if lacking:
            yield Gap(room(cls), "args", name, tuple(lacking))
    for member in shown_methods(cls, listed):
        function = definitions(cls, member)[0]
        described = described_arguments(cls, member)
        lacking = [
            each
            for each in parameters(function)
            if described.isdisjoint({each, each.lstrip("_")})
        ]
        if lacking:
            yield Gap(room(function), "args", f"{name}.{member}", tuple(lacking))


def has_example(docstring: str | None) -> bool:
    examples = doctest.DocTestParser().get_examples(docstring or "")
    return any(doctest.SKIP not in each.options for each in examples)


@cache
def gaps() -> list[Gap]:
    """Every gap of what the reference shows."""
    found: list[Gap] = []
    for page, name in REFERENCE["directives"]():
        value = REFERENCE["resolve"](name)
        if inspect.isclass(value):
            found += class_gaps(name, value, members_of(page, name))
        elif inspect.isfunction(value):
            described = entries(value.__doc__)
            lacking = [each for each in parameters(value) if each not in described]
            if lacking:
                found.append(Gap(room(value), "args", name, tuple(lacking)))
        else:
            continue
        if not has_example(vars(value).get("__doc__") or value.__doc__):
            found.append(Gap(room(value), "examples", name))
    return found


def counts() -> dict[str, dict[str, int]]:
    """The number of gaps of each kind, per room."""
    rooms = sorted({gap.room for gap in gaps()})
    return {
        each: {
            kind: sum(gap.room == each and gap.kind == kind for gap in gaps())
            for kind in KINDS
        }
        for each in rooms
    }


def ceilings() -> dict[str, dict[str, int]]:
    return dict(json.loads(CEILINGS.read_text("utf-8")))


@pytest.mark.parametrize("kind", KINDS)
def test_gaps_only_fall(kind: str) -> None:
    """A new public name describes its arguments and has an example; a gap that is filled lowers the number."""
    numbers = {each: row[kind] for each, row in counts().items() if row[kind]}
    allowed = {each: row[kind] for each, row in ceilings().items() if row[kind]}
    rooms = {each for each in numbers if numbers[each] > allowed.get(each, 0)}
    names = [str(gap) for gap in gaps() if gap.kind == kind and {gap.room} & {*rooms}]
    assert not rooms, "\n".join(names)
    assert numbers == allowed, "`python tests/docs/test_reference_gaps.py --write`"


def test_gaps_are_found() -> None:
    """The rest would pass on an empty list."""

    class Documented:
        """A class.

        Args:
            size: rows.
            **options: more.
        Other Args: of hooks
            batch: what the loader yields.

        Example:
            >>> 1
            1
        """

        def __init__(self, size: int, rate: float, **options: int) -> None: ...

        def hook(self, batch: int, other: int) -> None:
            """Called.

            Args:
                batch: rows.
            """

    class Override(Documented):
        def hook(self, batch: int, other: int) -> None: ...

    assert [gap.lacking for gap in class_gaps("x", Documented, ["hook"])] == [
        ("rate",),
        ("other",),
    ]
    assert [gap.name for gap in class_gaps("x", Override, None)] == ["x"]
    assert has_example(Documented.__doc__)
    assert not has_example(">>> 1  # doctest: +SKIP\n1\n")


def main(arguments: list[str]) -> None:
    numbers = counts()
    if "--write" in arguments:
        lines = [
            f" {json.dumps(each)}: {json.dumps(numbers[each])}" for each in numbers
        ]
        CEILINGS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    for gap in gaps():
        print(f"{gap.room:12} {gap}")
    print(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
