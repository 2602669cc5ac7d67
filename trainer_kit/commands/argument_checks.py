"""Checks of a script's command line and its files before jsonargparse reads them: limits, tags, unknown keys."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NoReturn, TypeAlias, final

import yaml

from trainer_kit.core.errors import did_you_mean, printable
from trainer_kit.core.yaml_guard import YamlProblem, guarded_root

__all__ = [
    "Classes",
    "FileProblem",
    "check_file",
    "check_keys",
    "check_words",
    "find_subclasses",
    "imported_class",
    "key_prefixes",
    "node_pairs",
    "options_with_values",
    "parameter_names",
    "read_nodes",
    "shorten",
]


Classes: TypeAlias = Mapping[str, type[object]]
"""By key, the base class of what can be chosen there."""
_NodePairs: TypeAlias = Sequence[tuple[yaml.Node, yaml.Node]]
"""Key and value of each entry of a YAML mapping."""


_MOST_BYTES: Final = 1_000_000
# Deeper nesting ends the parsers, which recurse, in a RecursionError instead of a line.
_MOST_DEPTH: Final = 50
# jsonargparse copies a list once for each of its values: its time grows with the square of this number.
_MOST_VALUES: Final = 2_000
# Annotations stay strings where the user's module postpones their evaluation.
_UNTYPED: Final = (inspect.Parameter.empty, Any, "Any", "typing.Any", object, "object")
_NULL: Final = "tag:yaml.org,2002:null"


class FileProblem(Exception):
    """A configuration file or value that is refused before jsonargparse reads it; its text is the line to print."""


def check_file(path: str) -> None:
    """Refuse a file that is not YAML, or that would exhaust time or memory.

    Raises:
        FileProblem: file, line and reason.
    """
    try:
        if not os.path.isfile(path):
            raise FileProblem(f"{path}: the file does not exist")
        # Before it is read: a path may be a checkpoint by mistake.
        if os.path.getsize(path) > _MOST_BYTES:
            raise FileProblem(
                f"{path}: larger than {_MOST_BYTES // 1000} kB, the limit for a configuration file"
            )
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise FileProblem(f"{path}: it cannot be read: {error}") from error
    try:
        root = guarded_root(text, _MOST_VALUES, _MOST_DEPTH)
    except YamlProblem as problem:
        reason = problem.reason
        if not problem.too_much:
            reason = f"this is not YAML: {reason}"
        raise FileProblem(f"{path}:{problem.line}: {reason}") from None
    _check_nodes(path, root)


def check_words(prog: str, words: Sequence[str]) -> None:
    """Refuse values on the command line that would exhaust time or memory.

    Raises:
        FileProblem: option and reason.
    """
    for option, value in options_with_values(words):
        try:
            guarded_root(value, _MOST_VALUES, _MOST_DEPTH)
        except YamlProblem as problem:
            # A value that is no YAML may be a plain text, which its option reads by itself.
            if problem.too_much:
                raise FileProblem(f"{prog}: {option}: {problem.reason}") from None


def check_keys(
    prog: str,
    words: Sequence[str],
    files: Iterable[str],
    options: Iterable[str],
    kinds: Classes,
) -> None:
    """Refuse keys that jsonargparse would ignore: unknown ones without a value, and classes for untyped arguments.

    Raises:
        FileProblem: place and reason.
    """
    keys = _Keys([option.removeprefix("--") for option in options], kinds)
    for file in files:
        keys.check(read_nodes(file), "", partial(_file_position, file))
    for option, value in options_with_values(words):
        try:
            node = yaml.compose(value, Loader=yaml.SafeLoader)
        # A plain text, which has no keys.
        except (yaml.YAMLError, ValueError, OverflowError):
            continue
        keys.check(
            node,
            option.removeprefix("--").rstrip("+"),
            lambda key, _: f"{prog}: --{key}",
        )


def _file_position(file: str, key: str, line: int) -> str:
    return f"{file}:{line}: {key}"


def options_with_values(words: Sequence[str]) -> list[tuple[str, str]]:
    """The options of a command line and their values, in its order; without ``--config``, whose file has its own check.

    Args:
        words: of the command line.

    Example:
        >>> options_with_values(["fit", "--config", "run.yaml", "--seed", "1", "--print_config", "--seed=2"])
        [('--seed', '1'), ('--seed', '2')]
    """
    options = []
    for index, word in enumerate(words):
        if not word.startswith("--"):
            continue
        option, is_joined, value = word.partition("=")
        if not is_joined:
            following = words[index + 1 : index + 2]
            # An option that stands alone, at the end or before another one, has no value.
            if not following or following[0].startswith("--"):
                continue
            value = following[0]
        if option != "--config":
            options.append((option, value))
    return options


def _check_nodes(path: str, root: yaml.Node | None) -> None:
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise FileProblem(f"{path}:1: the top level must map keys to values")
    # An alias of YAML repeats a node: without this set nested aliases would be walked exponentially often.
    visited: set[int] = set()
    pending: list[yaml.Node] = [root]
    while pending:
        node = pending.pop()
        if id(node) in visited:
            continue
        visited.add(id(node))
        if node.tag not in yaml.SafeLoader.yaml_constructors:
            tag = shorten(node.tag.replace("tag:yaml.org,2002:", "!!"))
            raise FileProblem(
                f"{path}:{node.start_mark.line + 1}: {tag}: this tag is not supported; choose a class with class_path"
            )
        if isinstance(node, yaml.MappingNode):
            _check_mapping_keys(path, node)
            for key, value in node.value:
                # `<<` has a tag without a constructor: SafeLoader merges its value before it constructs keys.
                if key.tag != "tag:yaml.org,2002:merge":
                    pending.append(key)
                pending.append(value)
        elif isinstance(node, yaml.SequenceNode):
            pending += node.value


def _check_mapping_keys(path: str, node: yaml.MappingNode) -> None:
    """Refuse a key that is no text, or that stands twice in one mapping."""
    keys: set[str] = set()
    for key, _ in node.value:
        is_text = isinstance(key, yaml.ScalarNode) and key.tag != _NULL
        position = f"{path}:{key.start_mark.line + 1}"
        if not is_text:
            raise FileProblem(f"{position}: a key must be a word")
        # PyYAML takes the last of two equal keys in silence.
        if key.value in keys:
            raise FileProblem(f"{position}: {shorten(key.value)}: given twice")
        keys.add(key.value)


def read_nodes(file: str) -> yaml.Node | None:
    # Nodes, not values: only they know their lines.
    with open(file, encoding="utf-8") as stream:
        return yaml.compose(stream, Loader=yaml.SafeLoader)


def node_pairs(node: yaml.Node | None) -> list[tuple[yaml.Node, yaml.Node]]:
    if not isinstance(node, yaml.MappingNode):
        return []
    pairs: list[tuple[yaml.Node, yaml.Node]] = node.value
    return pairs


def shorten(value: object, max_length: int = 80) -> str:
    return printable(" ".join(str(value).split()), max_length)


@final
class _Keys:
    """Refuses unknown keys with an empty mapping, and classes for arguments without a type.

    jsonargparse drops the former, and instantiates or passes on any class for the latter.

    Args:
        options: every option, without ``--``.
        kinds: by key, the base class of what is made there.
    """

    def __init__(self, options: Iterable[str], kinds: Classes) -> None:
        # jsonargparse adds `--NAME.help` for each class.
        keys = {option for option in options if not option.endswith(".help")}
        parents: set[str] = set()
        for key in keys:
            parents.update(key_prefixes(key)[:-1])
        # Below a leaf the value is the user's own mapping, such as a dict argument: its keys are not options.
        self._known_keys = keys | parents
        self._leaves = keys - parents
        self._kinds = kinds

    def check(
        self, node: yaml.Node | None, key: str, locate: Callable[[str, int], str]
    ) -> None:
        """Check a node of PyYAML.

        Args:
            node: of a file, or of the value of an option.
            key: the path to it; empty for a whole file.
            locate: returns a text from a key and its line, from 1.

        Raises:
            FileProblem: its place and the reason.
        """
        self._locate = locate
        outer, _, name = key.rpartition(".")
        # An option such as --model.encoder sets one argument of a class, whose parameters decide what it may be.
        if outer in self._kinds:
            self._check_class(self._kinds[outer], name, node, key, 1)
        self._check_below(node, key)

    def _refuse(self, key: str, line: int, reason: str) -> NoReturn:
        raise FileProblem(f"{self._locate(key, line)}: {reason}")

    def _check_below(self, node: yaml.Node | None, key: str) -> None:
        if isinstance(node, yaml.SequenceNode):
            for item in node.value:
                self._check_below(item, key)
        pairs = node_pairs(node)
        paths = (
            str(value.value) for name, value in pairs if name.value == "class_path"
        )
        path = next(paths, None)
        if path is None:
            self._check_entries(pairs, key)
            return
        kind = self._class(path)
        for name, value in pairs:
            if name.value == "init_args":
                self._check_arguments(value, key, path, kind)
            elif name.value == "dict_kwargs":
                # jsonargparse passes these as **kwargs, so a name that no signature has is right here.
                self._check_arguments(value, key, path, None)
            else:
                self._check_below(value, _join_key(key, name.value))

    def _check_entries(self, pairs: _NodePairs, outer: str) -> None:
        """Check the keys of a mapping that chooses no class."""
        kind = self._kinds.get(outer)
        for name, value in pairs:
            key = _join_key(outer, name.value)
            line = name.start_mark.line + 1
            # Only an empty mapping: an unknown key with a value is refused by jsonargparse itself.
            if _is_empty(value) and not self._is_known(key):
                near = did_you_mean(key, self._known_keys, otherwise="see --help")
                self._refuse(key, line, f"unknown key, {near}")
            if kind is not None:
                self._check_class(kind, name.value, value, key, line)
            self._check_below(value, key)

    def _is_known(self, key: str) -> bool:
        """Whether a key is one of the options, or lies inside the value of one."""
        if key in self._known_keys:
            return True
        return any(prefix in self._leaves for prefix in key_prefixes(key)[:-1])

    def _check_arguments(
        self, node: yaml.Node, key: str, path: str, kind: type[object] | None
    ) -> None:
        for name_node, value in node_pairs(node):
            if kind is not None:
                self._check_argument(name_node, value, key, path, kind)
            self._check_below(value, key)

    def _check_argument(
        self,
        name_node: yaml.Node,
        value: yaml.Node,
        key: str,
        path: str,
        kind: type[object],
    ) -> None:
        name = name_node.value
        line = name_node.start_mark.line + 1
        if _is_empty(value) and not _takes(kind, name):
            names = parameter_names(kind)
            near = did_you_mean(name, names, otherwise="see --help")
            self._refuse(key, line, f"{path} does not take {name!r}, {near}")
        self._check_class(kind, name, value, f"{key}.{name}", line)

    def _check_class(
        self,
        kind: type[object],
        name: str,
        value: yaml.Node | None,
        key: str,
        line: int,
    ) -> None:
        chooses_class = any(
            inner.value == "class_path" for inner, _ in node_pairs(value)
        )
        if chooses_class and _annotation(kind, name) in _UNTYPED:
            reason = f"{name!r} of {kind.__name__} has no type, so no class is made for it; annotate it with one"
            self._refuse(key, line, reason)

    def _class(self, path: str) -> type[object] | None:
        """An imported class by its path, or a known class by its bare name."""
        if "." in path:
            return imported_class(path)
        for kind in self._kinds.values():
            for cls in find_subclasses(kind):
                # jsonargparse accepts the name alone where it is unique.
                if cls.__name__ == path:
                    return cls
        return None


def _join_key(outer: str, name: object) -> str:
    if not outer:
        return str(name)
    return f"{outer}.{name}"


def imported_class(path: str) -> type[object] | None:
    """The class at a path in an imported module; None if the module is not imported yet, or has no such name."""
    # A check must not import: parsing does, under jsonargparse's own rules, and the check is repeated after it.
    module, _, name = path.rpartition(".")
    return getattr(sys.modules.get(module), name, None)


def _is_empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.MappingNode) and all(
        _is_empty(value) for _, value in node.value
    )


def _constructors(
    kind: object,
) -> list[tuple[str, Mapping[str, inspect.Parameter]]]:
    """The module and the parameters of each constructor in a class's method resolution order."""
    # A path may name a function, which has no resolution order and then no constructors.
    constructors: list[tuple[str, Mapping[str, inspect.Parameter]]] = []
    for base in getattr(kind, "__mro__", ()):
        if "__init__" in vars(base) and base is not object:
            parameters = inspect.signature(base.__init__).parameters
            constructors.append((base.__module__, parameters))
    return constructors


def _annotation(kind: object, name: str) -> object:
    """The annotation of an argument of a constructor; None if no constructor names it."""
    for _, parameters in _constructors(kind):
        if name in parameters:
            return parameters[name].annotation
    return None


def _takes(kind: object, name: str) -> bool:
    # torch's constructors take any keyword only to refuse it.
    signatures = [
        parameters
        for module, parameters in _constructors(kind)
        if not module.startswith("torch.")
    ]
    if not signatures or any(name in parameters for parameters in signatures):
        return True
    # Constructors pass **kwargs on to their bases; the last one that is not torch's decides what becomes of the rest.
    outermost = signatures[-1].values()
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in outermost)


def parameter_names(kind: object) -> list[str]:
    """The parameters of the constructors of a class and of its bases."""
    names: list[str] = []
    for _, parameters in _constructors(kind):
        names += parameters
    return names


def key_prefixes(key: str) -> list[str]:
    """``a``, ``a.b`` and ``a.b.c`` of ``a.b.c``."""
    names = key.split(".")
    return [".".join(names[:n]) for n in range(1, len(names) + 1)]


def find_subclasses(kind: type[object] | None) -> list[type[object]]:
    """A class and all its imported subclasses; nothing for None."""
    if kind is None:
        return []
    classes: list[type[object]] = []
    pending = [kind]
    while pending:
        cls = pending.pop()
        classes.append(cls)
        pending += cls.__subclasses__()
    return classes
