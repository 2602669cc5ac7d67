"""Keys that jsonargparse passes over: unknown ones without a value, and classes where none is taken."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, final

import yaml

from trainer_kit.core.errors import did_you_mean

__all__ = ["Misplaced", "misplaced", "parameters", "prefixes", "subclasses"]

_UNTYPED: Final = (inspect.Parameter.empty, Any, "Any", "typing.Any", object, "object")


@final
class Misplaced(NamedTuple):
    """A key that has no place.

    Attributes:
        key: with those around it.
        line: of the text, from 1.
        reason: what is wrong with it.
    """

    key: str
    line: int
    reason: str


def misplaced(node: Any, key: str, options: Iterable[str], kinds: Mapping[str, type[Any]]) -> Iterator[Misplaced]:
    """Keys with an empty mapping that nothing takes, and classes for arguments without a type.

    jsonargparse drops the former, and makes or passes on any class that the latter name.

    Args:
        node: of PyYAML.
        key: the path to it; empty for a whole file.
        options: every option, without ``--``.
        kinds: by key, of which class something is made there.
    """
    known = {option for option in options if not option.endswith(".help")}
    outer, _, name = key.rpartition(".")
    if outer in kinds:
        yield from _untyped(kinds[outer], name, node, key, 1)
    around = {part for option in known for part in prefixes(option)[:-1]}
    yield from _Walk(known | around, known - around, kinds).below(node, key)


@final
class _Walk:
    def __init__(self, places: set[str], leaves: set[str], kinds: Mapping[str, type[Any]]) -> None:
        self.places, self.leaves, self.kinds = places, leaves, kinds

    def below(self, node: Any, key: str) -> Iterator[Misplaced]:
        """What has no place in one node."""
        for item in node.value if isinstance(node, yaml.SequenceNode) else ():
            yield from self.below(item, key)
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        path = next((value.value for name, value in pairs if name.value == "class_path"), None)
        kind = self.kinds.get(key) if path is None else self._class(str(path))
        for name, value in pairs:
            if path is not None and name.value in ("init_args", "dict_kwargs"):
                yield from self._arguments(value, key, path, kind if name.value == "init_args" else None)
                continue
            inner = f"{key}.{name.value}" if key else str(name.value)
            inside = any(part in self.leaves for part in prefixes(inner)[:-1])
            if _is_empty(value) and path is None and not inside and inner not in self.places:
                near = did_you_mean(inner, self.places, otherwise="see --help")
                yield Misplaced(inner, name.start_mark.line + 1, f"unknown key, {near}")
            if path is None and kind is not None:
                yield from _untyped(kind, name.value, value, inner, name.start_mark.line + 1)
            yield from self.below(value, inner)

    def _arguments(self, node: Any, key: str, path: str, kind: Any) -> Iterator[Misplaced]:
        for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
            if kind is not None and _is_empty(value) and not _takes(kind, name.value):
                near = did_you_mean(name.value, parameters(kind), otherwise="see --help")
                yield Misplaced(key, name.start_mark.line + 1, f"{path} does not take {name.value!r}, {near}")
            if kind is not None:
                yield from _untyped(kind, name.value, value, f"{key}.{name.value}", name.start_mark.line + 1)
            yield from self.below(value, key)

    def _class(self, path: str) -> Any:
        """One that is imported, or has a bare name."""
        module, _, name = path.rpartition(".")
        if module:
            return getattr(sys.modules.get(module), name, None)
        return next((one for kind in self.kinds.values() for one in subclasses(kind) if one.__name__ == name), None)


def _untyped(kind: Any, name: str, value: Any, key: str, line: int) -> Iterator[Misplaced]:
    pairs = value.value if isinstance(value, yaml.MappingNode) else []
    if any(inner.value == "class_path" for inner, _ in pairs) and _annotation(kind, name) in _UNTYPED:
        reason = f"{name!r} of {kind.__name__} has no type, so no class is made for it; annotate it with one"
        yield Misplaced(key, line, reason)


def _is_empty(node: Any) -> bool:
    return isinstance(node, yaml.MappingNode) and all(_is_empty(value) for _, value in node.value)


def _constructors(kind: Any) -> list[tuple[str, Mapping[str, inspect.Parameter]]]:
    """The modules and parameters of the constructors along the bases of a class."""
    own = [base for base in getattr(kind, "__mro__", ()) if "__init__" in vars(base) and base is not object]
    return [(base.__module__, inspect.signature(base.__init__).parameters) for base in own]


def _annotation(kind: Any, name: str) -> Any:
    """What an argument of a constructor is annotated with; None where no constructor names it."""
    return next((found[name].annotation for _, found in _constructors(kind) if name in found), None)


def _takes(kind: Any, name: str) -> bool:
    # torch's constructors take any keyword only to refuse it.
    found = [given for module, given in _constructors(kind) if not module.startswith("torch.")]
    anything = not found or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in found[-1].values())
    return anything or any(name in one for one in found)


def parameters(kind: Any) -> list[str]:
    """The names that the constructors of a class and of its bases take."""
    return [name for _, found in _constructors(kind) for name in found]


def prefixes(key: str) -> list[str]:
    """``a``, ``a.b`` and ``a.b.c`` of ``a.b.c``."""
    parts = key.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def subclasses(kind: type[Any] | None) -> list[type[Any]]:
    """A class and all below it that are imported."""
    found: list[type[Any]] = []
    rest = [] if kind is None else [kind]
    while rest:
        one = rest.pop()
        found.append(one)
        rest += one.__subclasses__()
    return found
