"""What is wrong with a call of a training script, in one line: where it stands, why, and what may have been meant."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import yaml

from trainer_kit.commands.keys import misplaced, parameters, prefixes, subclasses
from trainer_kit.compat.lightning import FORMER_ARGUMENTS
from trainer_kit.core.display import mask_secrets
from trainer_kit.core.errors import did_you_mean, printable
from trainer_kit.core.yaml_guard import YamlProblem, guarded_events

__all__ = ["FileProblem", "check_file", "check_keys", "check_words", "complaint"]

_MOST_BYTES: Final = 1_000_000
_MOST_DEPTH: Final = 50
_MOST_VALUES: Final = 2_000  # jsonargparse copies a list once for each of its values


class FileProblem(Exception):
    """A configuration file that is not read at all; its text is the one line to print."""


def check_file(path: str) -> None:
    """Refuse what is no YAML, and what is made to take all time or memory.

    Raises:
        FileProblem: file, line and reason.
    """
    try:
        if not os.path.isfile(path):
            raise FileProblem(f"{path}: there is no such file")
        if os.path.getsize(path) > _MOST_BYTES:
            raise FileProblem(f"{path}: larger than {_MOST_BYTES // 1000} kB, which no configuration is")
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise FileProblem(f"{path}: it cannot be read: {error}") from error
    try:
        guarded_events(text, _MOST_VALUES, _MOST_DEPTH)
    except YamlProblem as problem:
        kind = "" if problem.too_much else "this is no YAML: "
        raise FileProblem(f"{path}:{problem.line}: {kind}{problem.reason}") from None
    _check_nodes(path, text)


def check_words(prog: str, words: Sequence[str]) -> None:
    """Refuse values on the command line that are made to take all time or memory.

    Raises:
        FileProblem: option and reason.
    """
    for option, value in _given(words):
        try:
            guarded_events(value, _MOST_VALUES, _MOST_DEPTH)
        except YamlProblem as problem:
            if problem.too_much:  # what is no YAML may be a text
                raise FileProblem(f"{prog}: {option}: {problem.reason}") from None


def check_keys(
    prog: str, words: Sequence[str], files: Iterable[str], options: Iterable[str], kinds: Mapping[str, type[Any]]
) -> None:
    """Refuse keys that jsonargparse would pass over: see `misplaced`.

    Raises:
        FileProblem: place and reason.
    """
    names = [option.removeprefix("--") for option in options]
    for file in files:
        with open(file, encoding="utf-8") as stream:
            node: Any = yaml.compose(stream, Loader=yaml.SafeLoader)
        for found in misplaced(node, "", names, kinds):
            raise FileProblem(f"{file}:{found.line}: {found.key}: {found.reason}")
    for option, value in _given(words):
        try:
            node = yaml.compose(value, Loader=yaml.SafeLoader)
        except (yaml.YAMLError, ValueError, OverflowError):
            continue
        for found in misplaced(node, option.removeprefix("--").rstrip("+"), names, kinds):
            raise FileProblem(f"{prog}: --{found.key}: {found.reason}")


def _given(words: Sequence[str]) -> list[tuple[str, str]]:
    """Options that are given as words, and their values."""
    together = [word.partition("=")[::2] for word in words if word.startswith("--") and "=" in word]
    apart = [(word, value) for word, value in pairwise(words) if word.startswith("--") and "=" not in word]
    return [(option, value) for option, value in [*together, *apart] if option != "--config"]


def _check_nodes(path: str, text: str) -> None:
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    if node is not None and not isinstance(node, yaml.MappingNode):
        raise FileProblem(f"{path}:1: there must be keys and values at the top")
    seen: set[int] = set()
    rest = [node] if node is not None else []
    while rest:
        one = rest.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if one.tag not in yaml.SafeLoader.yaml_constructors:
            tag = _short(one.tag.replace("tag:yaml.org,2002:", "!!"))
            raise FileProblem(f"{path}:{one.start_mark.line + 1}: {tag}: this tag is not read; a class is a class_path")
        if isinstance(one, yaml.MappingNode):
            keys: set[str] = set()
            for key, value in one.value:
                word = isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:null"
                if not word or key.value in keys:
                    what = f"{_short(key.value)}: given twice" if word else "a key must be a word"
                    raise FileProblem(f"{path}:{key.start_mark.line + 1}: {what}")
                keys.add(key.value)
                rest += [key, value] if key.tag != "tag:yaml.org,2002:merge" else [value]
        elif isinstance(one, yaml.SequenceNode):
            rest += one.value


def complaint(
    text: str,
    prog: str,
    words: Sequence[str],
    files: Sequence[str],
    options: Iterable[str],
    kinds: Mapping[str, type[Any]],
) -> str:
    """One line for what jsonargparse says in many.

    Args:
        text: its message.
        prog: the script, and its verb.
        words: the command line.
        files: configuration files in it.
        options: every option of the verb.
        kinds: by key, of which class something is chosen there.
    """
    if found := re.search(r"unrecognized arguments: (\S+)", text):
        name = found[1].partition("=")[0]
        if not name.startswith("--"):
            return f"{prog}: {_short(name)}: unexpected"
        return f"{prog}: {name}: unknown option{_meant(name, options)}"
    if found := re.search(r"argument subcommand: invalid choice: '([^']*)' \(choose from (.*?)\)", text):
        commands = re.findall(r"\w+", found[2])
        return f"{prog}: {_short(found[1])}: unknown command{_meant(found[1], commands)}"
    if found := re.search(r'expected "subcommand" to be one of \{(.*?)\}', text):
        return f"{prog}: a command is missing: {found[1].replace(',', ', ')}; see --help"
    if found := re.search(r"does not accept option '([^']+)'", text):
        keys = {option.removeprefix("--") for option in options}
        keys |= {part for key in keys for part in prefixes(key)}
        unknown = next((part for part in prefixes(found[1]) if part not in keys), found[1])
        return f"{_place(unknown, prog, words, files)}: unknown key{_meant(unknown, keys)}"
    chain = re.findall(r'Parser key "([^"]+)":', text)
    if chain:
        inner = _inner(text, chain, kinds)
        return f"{_place(chain[0], prog, words, files, inner[0])}: {inner[1]}"
    if found := re.search(r"the following arguments are required: (.*)", text):
        names = [name.strip().partition(".")[2] or name.strip() for name in found[1].split(",")]
        return f"{prog}: {', '.join(f'--{name}' for name in names)}: required"
    if found := re.search(r"argument (\S+?):? (expected .*)", text):
        return f"{prog}: {found[1].rstrip(':')}: {found[2]}"
    if found := re.search(r'Spaces not allowed in keys: "(.*)"', text):
        return f"{_place(found[1], prog, words, files, anywhere=True)}: a key must be a word"
    return f"{', '.join(files) or prog}: {_short(text, 300)}"


def _inner(text: str, chain: Sequence[str], kinds: Mapping[str, type[Any]]) -> tuple[str | None, str]:
    """The key farthest inside, without those around it, and what is wrong with it."""
    classes = re.findall(r"Problem with given class_path '([^']+)'", text)
    kind = classes[-1] if classes else None
    if kind and (found := re.search(r"Option '([^']+)' is not accepted", text)):
        return found[1], f"{kind} does not take {found[1]!r}{_meant(found[1], _parameters(kind))}"
    if kind and (found := re.search(r"following arguments are required: (.*)", text)):
        return None, f"{kind} needs {found[1]}"
    if found := re.search(r"Expected a dot import path string: (\S+)", text):
        names = _subclasses(kinds.get(chain[0]))
        return None, f"no class is called {found[1]!r}{_meant(found[1], names, 'write package.module.Class')}"
    given = re.search(r"Given value: (.*?)\s*$", text, re.M)
    if found := re.search(r"Import path (?:\S+ )?does not correspond to a subclass of (\w+)", text):
        return None, f"{_short(given[1]) if given else 'this class'} is no {found[1]}"
    if found := re.search(r"(?:No module named|module) '[^']+'(?: has no attribute '[^']+')?", text):
        return None, f"{kind or chain[0]} cannot be imported: {found[0]}"
    if len(chain) > 1 and (found := re.search(r"Expected (?:an? )?(.+?)\. Got value: (.*)", text)):
        return chain[-1], f"{chain[-1]}: expected {_kind(found[1])}, found {_shown(found[2], chain[-1])}"
    given = given or re.search(r"Got value: (.*?)\s*$", text, re.M)
    expected = [_kind(name) for name in re.findall(r"Expected (?:an? )?(<class '[^']+'>)", text)]
    if expected and given:
        return None, f"expected {' or '.join(dict.fromkeys(expected))}, found {_shown(given[1], chain[-1])}"
    return None, _short(re.sub(r'Parser key "[^"]+":', "", text), 300)


def _kind(text: str) -> str:
    name = re.sub(r"^<class '(?:.*\.)?(\w+)'>$", r"\1", text)
    return "null" if name == "NoneType" else name


def _place(
    key: str, prog: str, words: Sequence[str], files: Sequence[str], inner: str | None = None, anywhere: bool = False
) -> str:
    """The option, or the line of the file, that gave ``key``."""
    if any(word.partition("=")[0].removeprefix("--").rstrip("+").startswith(key) for word in words):
        return f"{prog}: --{key}"
    for file in reversed(files):
        line = _line(file, "", key) if anywhere else _line(file, key, inner)
        if line is not None:
            return f"{file}:{line}: {key}"
    return f"{files[-1] if files else prog}: {key}"


def _line(file: str, key: str, inner: str | None) -> int | None:
    with open(file, encoding="utf-8") as stream:
        node: Any = yaml.compose(stream, Loader=yaml.SafeLoader)
    line = None
    while key:  # keys may hold dots themselves
        entry = next((entry for part in prefixes(key) if (entry := _entry(node, part))), None)
        if entry is None:
            return None
        line, node = entry[0].start_mark.line + 1, entry[1]
        key = key[len(entry[0].value) + 1 :]
    rest = [node] if inner else []
    while rest:
        one = rest.pop(0)
        entry = _entry(one, inner or "")
        if entry is not None:
            return int(entry[0].start_mark.line) + 1
        rest += [value for _, value in one.value] if isinstance(one, yaml.MappingNode) else []
        rest += one.value if isinstance(one, yaml.SequenceNode) else []
    return line


def _entry(node: Any, name: str) -> Any:
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return next((pair for pair in pairs if pair[0].value == name or str(pair[0].value).startswith(f"{name}.")), None)


def _meant(name: str, known: Iterable[str], otherwise: str = "see --help") -> str:
    former = name.removeprefix("--").partition("trainer.")[2]
    if former in FORMER_ARGUMENTS:
        return f"; instead of it: {FORMER_ARGUMENTS[former].format(value='...')}"
    near = did_you_mean(name, known, otherwise="")
    return f", {near}" if near else f"; {otherwise}"


def _parameters(path: str) -> list[str]:
    module, _, name = path.rpartition(".")
    return parameters(getattr(sys.modules.get(module), name, None))


def _subclasses(kind: type[Any] | None) -> set[str]:
    return {one.__name__ for one in subclasses(kind) if not one.__name__.startswith("_")}


def _shown(value: str, key: str) -> str:
    """A value that was given; one with values inside may hold secrets under names that nobody can tell here."""
    inside = value.startswith(("{", "[", "Namespace(", "NestedArg("))
    return "what was given" if inside else _short(mask_secrets(value, key.rpartition(".")[2]))


def _short(value: Any, most: int = 80) -> str:
    return printable(" ".join(str(value).split()), most)
