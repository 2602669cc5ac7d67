"""Configurations that name classes of Lightning or Accelerate: Hydra, Lightning's command line, and the like."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, final

import yaml

from trainer_kit.core.yaml_guard import YamlProblem, guarded_root
from trainer_kit.migrate.names import name_here, renamed

__all__ = ["Argument", "Configured", "configured", "rewrite_yaml"]

# Not within a path or an address, of which a part may look like a dotted name.
_NAME: Final = re.compile(r"(?<![\w./-])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+(?![\w/-])")
_CLASS_NAME: Final = re.compile(r"[A-Za-z_][\w.]*\.[A-Z]\w*")
_ARGUMENTS_OF: Final = {
    "_target_": None,
    "class_path": "init_args",
    "target": "params",
    "path": None,
}
"""By key that names a class, the key beside it that holds the arguments; None: they stand beside the class."""


@final
@dataclass(frozen=True)
class Argument:
    """An argument in a configuration.

    Attributes:
        value: its text if it is a constant, else None.
        source: its text, also of an interpolation; empty for a list or a mapping.
        line: the line of its name, from 1.
    """

    value: str | None
    source: str
    line: int


@final
@dataclass(frozen=True)
class Configured:
    """A class that a configuration names, with its arguments.

    Attributes:
        class_name: the dotted name of the class here; None for a ``trainer:`` that names no class.
        line: the line of the name, from 1.
        arguments: by name.
    """

    class_name: str | None
    line: int
    arguments: Mapping[str, Argument] = field(default_factory=dict)


def rewrite_yaml(text: str) -> str:
    """Replace each dotted name of Lightning or Accelerate by the one of this library, where it has one.

    Example:
        >>> rewrite_yaml("_target_: lightning.pytorch.Trainer  # the loop")
        '_target_: trainer_kit.Trainer  # the loop'
    """
    # In the text and not in a tree of YAML, which would lose comments and layout.
    return _NAME.sub(lambda match: name_here(match[0]) or match[0], text)


def configured(text: str) -> Iterator[Configured]:
    """Yield the classes of the packages that a configuration names; nothing if it is not YAML.

    Example:
        >>> next(configured("callback: {_target_: lightning.pytorch.callbacks.Timer, duration: 1h}")).class_name
        'trainer_kit.callbacks.Timer'
    """
    try:
        root = guarded_root(text)
    except YamlProblem:
        return
    yield from _configured_below(root)


def _configured_below(node: yaml.Node | None) -> Iterator[Configured]:
    if isinstance(node, yaml.SequenceNode):
        # A list of class names has no key; `_named_class` then asks for a capital.
        for item in node.value:
            yield from _configured_below(item)
            if isinstance(item, yaml.ScalarNode):
                yield from _named_class("", item, {})
    if not isinstance(node, yaml.MappingNode):
        return
    values = {
        key.value: value
        for key, value in node.value
        if isinstance(key, yaml.ScalarNode)
    }
    for key, value in values.items():
        if isinstance(value, yaml.ScalarNode):
            yield from _named_class(key, value, _arguments_beside(key, node, values))
        elif key == "trainer" and isinstance(value, yaml.MappingNode):
            # Lightning's command line names no class there. With a class, its own entry has the arguments.
            if not _names_a_class(value):
                yield Configured(None, value.start_mark.line + 1, _arguments(value))
    # All values, also of keys that are no scalars.
    for _, value in node.value:
        yield from _configured_below(value)


def _named_class(
    key: str, value: yaml.ScalarNode, arguments: Mapping[str, Argument]
) -> Iterator[Configured]:
    new = renamed(value.value)
    # Under another key only a name of a class counts: `lightning.pytorch` may be a logger or a topic.
    if new is not None and (key in _ARGUMENTS_OF or _CLASS_NAME.fullmatch(value.value)):
        yield Configured(new, value.start_mark.line + 1, arguments)


def _arguments_beside(
    key: str, node: yaml.MappingNode, values: Mapping[str, yaml.Node]
) -> dict[str, Argument]:
    if key not in _ARGUMENTS_OF:
        return {}
    holder = _ARGUMENTS_OF[key]
    if holder is not None:
        return _arguments(values.get(holder))
    # Hydra's arguments stand beside the class; `path` has none that can be distinguished from other settings.
    if key == "_target_":
        return _arguments(node)
    return {}


def _names_a_class(node: yaml.MappingNode) -> bool:
    return any(
        isinstance(key, yaml.ScalarNode) and key.value in _ARGUMENTS_OF
        for key, _ in node.value
    )


def _arguments(node: yaml.Node | None) -> dict[str, Argument]:
    if not isinstance(node, yaml.MappingNode):
        return {}
    arguments = {}
    for key, value in node.value:
        # Names with an underscore are Hydra's own, such as _target_ and _partial_.
        if not isinstance(key, yaml.ScalarNode) or key.value.startswith("_"):
            continue
        if not key.value.isidentifier():
            continue
        source = ""
        constant = None
        if isinstance(value, yaml.ScalarNode):
            source = value.value
            # An interpolation such as ${lr} may become anything.
            if "$" not in source:
                constant = source
        line = key.start_mark.line + 1
        arguments[key.value] = Argument(constant, source, line)
    return arguments
