"""The reference says what every argument means and shows an example of every class and function.

An override may leave out arguments that a base class describes.
"""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import runpy
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = runpy.run_path(str(ROOT / "docs" / "generate_reference.py"))
SECTIONS = ("Args", "Attributes")


class Gap(NamedTuple):
    """A public name that lacks the description of arguments, or, without arguments, an example."""

    name: str
    arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.arguments:
            return f"{self.name} lacks a description of {', '.join(self.arguments)}"
        return f"{self.name} lacks an executed example"


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
            yield Gap(name, tuple(lacking))
    for member in shown_methods(cls, listed):
        function = definitions(cls, member)[0]
        described = described_arguments(cls, member)
        lacking = [
            each
            for each in parameters(function)
            if described.isdisjoint({each, each.lstrip("_")})
        ]
        if lacking:
            yield Gap(f"{name}.{member}", tuple(lacking))


def has_example(docstring: str | None) -> bool:
    examples = doctest.DocTestParser().get_examples(docstring or "")
    return any(doctest.SKIP not in each.options for each in examples)


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
                found.append(Gap(name, tuple(lacking)))
        else:
            continue
        if not has_example(vars(value).get("__doc__") or value.__doc__):
            found.append(Gap(name))
    return found


def test_the_reference_has_no_gaps() -> None:
    """A new public name describes its arguments and has an example."""
    lacking = gaps()
    assert not lacking, "\n".join(map(str, lacking))


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

    assert [gap.arguments for gap in class_gaps("x", Documented, ["hook"])] == [
        ("rate",),
        ("other",),
    ]
    assert [gap.name for gap in class_gaps("x", Override, None)] == ["x"]
    assert has_example(Documented.__doc__)
    assert not has_example(">>> 1  # doctest: +SKIP\n1\n")
