"""Reads our docstrings as griffe expects them; only `make site` imports this.

Sections ``Example:`` become griffe's ``Examples:``, and an override that says what it does, but not what its arguments
are, shows the arguments of the base class.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from griffe import Class, Extension, Function

# The title of the section, and one entry of it with the lines that continue it.
TITLE: Final = re.compile(r"^Args:\n", re.M)
ENTRY: Final = re.compile(r"^    (\*{0,2}\w+).*:.*\n(?:^     .*\n)*", re.M)


class ExampleSections(Extension):
    """Griffe knows the plural alone, and would show an example as a quotation."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.M
            )


class InheritedArguments(Extension):
    """The arguments that an override leaves out, as the nearest base class describes them."""

    def on_package(self, *, pkg: Any, **kwargs: Any) -> None:
        for cls in classes_in(pkg):
            for method in cls.members.values():
                if isinstance(method, Function) and method.docstring is not None:
                    inherit_arguments(cls, method)


def classes_in(parent: Any) -> Iterator[Class]:
    """Every class defined in a package, module or class."""
    for member in parent.members.values():
        if member.is_alias:
            continue
        if isinstance(member, Class):
            yield member
        if member.is_module or member.is_class:
            yield from classes_in(member)


def described(method: Any) -> dict[str, str]:
    """The entries of the section ``Args`` of a method, by the name of the argument."""
    text = method.docstring.value if method.docstring is not None else ""
    title = TITLE.search(text)
    if title is None:
        return {}
    section = re.split(r"^(?=\S)", text[title.end() :] + "\n", maxsplit=1, flags=re.M)[
        0
    ]
    return {entry[1].lstrip("*"): entry[0] for entry in ENTRY.finditer(section)}


def inherit_arguments(cls: Class, method: Function) -> None:
    """Write the section ``Args`` of an override with the entries of its base classes."""
    own = described(method)
    entries = dict(own)
    for base in cls.mro():
        inherited = base.members.get(method.name)
        if isinstance(inherited, Function):
            entries = described(inherited) | entries
    entries = {
        parameter.name: entries[parameter.name]
        for parameter in method.parameters
        if parameter.name in entries
    }
    if entries.keys() <= own.keys() or method.docstring is None:
        return
    text = method.docstring.value
    for entry in own.values():
        text = text.replace(entry, "")
    text = text if own else f"{text.rstrip()}\n\nArgs:\n"
    method.docstring.value = TITLE.sub(
        lambda title: title[0] + "".join(entries.values()), text, count=1
    )
