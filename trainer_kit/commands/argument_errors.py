"""A message of jsonargparse, of up to twenty lines, as one line: where, what is wrong, what is expected."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import yaml

from trainer_kit.commands.argument_checks import (
    Classes,
    find_subclasses,
    imported_class,
    key_prefixes,
    node_pairs,
    parameter_names,
    read_nodes,
    shorten,
)
from trainer_kit.core.display import mask_secrets
from trainer_kit.core.errors import did_you_mean
from trainer_kit.core.wings import has_wing

__all__ = ["describe_error"]


def describe_error(
    text: str,
    prog: str,
    words: Sequence[str],
    files: Sequence[str],
    options: Iterable[str],
    kinds: Classes,
) -> str:
    """Turn a message of jsonargparse, which has many lines, into one line.

    Args:
        text: the message.
        prog: the script, and its command.
        words: the command line.
        files: configuration files in it.
        options: every option of the command.
        kinds: by key, the base class of the classes that can be chosen there.
    """

    if match := re.search(r"unrecognized arguments: (\S+)", text):
        name = match[1].partition("=")[0]
        if not name.startswith("--"):
            return f"{prog}: {shorten(name)}: unexpected"
        return f"{prog}: {name}: unknown option{_suggestion(name, options)}"
    if match := re.search(
        r"argument subcommand: invalid choice: '([^']*)' \(choose from (.*?)\)", text
    ):
        name = match[1]
        suggestion = _suggestion(name, re.findall(r"\w+", match[2]))
        return f"{prog}: {shorten(name)}: unknown command{suggestion}"
    if match := re.search(r'expected "subcommand" to be one of \{(.*?)\}', text):
        commands = match[1].replace(",", ", ")
        return f"{prog}: a command is missing: {commands}; see --help"
    if match := re.search(r"does not accept option '([^']+)'", text):
        keys: set[str] = set()
        for option in options:
            keys.update(key_prefixes(option.removeprefix("--")))
        # Name the shortest unknown part: below `modle.lr` the typing error is in `modle`.
        prefixes = key_prefixes(match[1])
        unknown = next((prefix for prefix in prefixes if prefix not in keys), match[1])
        location = _locate(unknown, prog, words, files)
        return f"{location}: unknown key{_suggestion(unknown, keys)}"
    # Before the patterns below, whose texts it may quote: a class that lacks an argument is a problem of its key.
    chain = re.findall(r'Parser key "([^"]+)":', text)
    if chain:
        inner_key, problem = _inner_problem(text, chain, kinds)
        return f"{_locate(chain[0], prog, words, files, inner_key)}: {problem}"
    if match := re.search(r"the following arguments are required: (.*)", text):
        names = [name.strip() for name in match[1].split(",")]
        known = set(options)
        required = []
        for name in names:
            # With commands the name begins with one, `fit.model.width`, and no option does.
            without_command = name.partition(".")[2]
            if without_command and f"--{name}" not in known:
                name = without_command
            required.append(f"--{name}")
        return f"{prog}: {', '.join(required)}: required"
    if match := re.search(r"argument (\S+?):? (expected .*)", text):
        return f"{prog}: {match[1].rstrip(':')}: {match[2]}"
    if match := re.search(r'Spaces not allowed in keys: "(.*)"', text):
        location = _locate(match[1], prog, words, files, anywhere=True)
        return f"{location}: a key must be a word"
    return f"{', '.join(files) or prog}: {shorten(text, 300)}"


def _inner_problem(
    text: str, chain: Sequence[str], kinds: Classes
) -> tuple[str | None, str]:
    """The innermost key, and its problem."""
    # A union prints the problem of each of its types. That of a class appears only where a class_path was given, so
    # it is the one that the user can act on.
    classes = re.findall(r"Problem with given class_path '([^']+)'", text)
    if classes:
        problem = _class_problem(text, classes[-1])
        if problem is not None:
            return problem
    if match := re.search(r"Expected a dot import path string: (\S+)", text):
        names = [cls.__name__ for cls in find_subclasses(kinds.get(chain[0]))]
        public = {name for name in names if not name.startswith("_")}
        suggestion = _suggestion(match[1], public, "write package.module.Class")
        return None, f"no class is called {match[1]!r}{suggestion}"
    value = re.search(r"Given value: (.*?)\s*$", text, re.M)
    if match := re.search(
        r"Import path (?:\S+ )?does not correspond to a subclass of (\w+)", text
    ):
        subject = "this class"
        if value:
            subject = shorten(value[1])
        return None, f"{subject} is not a subclass of {match[1]}"
    if match := re.search(
        r"(?:No module named|module) '[^']+'(?: has no attribute '[^']+')?", text
    ):
        subject = [chain[0], *classes][-1]
        return None, f"{subject} cannot be imported: {match[0]}"
    key = chain[-1]
    match = re.search(r"Expected (?:an? )?(.+?)\. Got value: (.*)", text)
    if len(chain) > 1 and match:
        shown = _display_value(match[2], key)
        return key, f"{key}: expected {_type_name(match[1])}, found {shown}"
    value = value or re.search(r"Got value: (.*?)\s*$", text, re.M)
    expected = re.findall(r"Expected (?:an? )?(<class '[^']+'>)", text)
    if expected and value:
        types = " or ".join(dict.fromkeys(map(_type_name, expected)))
        return None, f"expected {types}, found {_display_value(value[1], key)}"
    return None, shorten(re.sub(r'Parser key "[^"]+":', "", text), 300)


def _class_problem(text: str, path: str) -> tuple[str | None, str] | None:
    """The key and the problem of a wrong or missing argument of a class."""
    if match := re.search(r"Option '([^']+)' is not accepted", text):
        name = match[1]
        suggestion = _suggestion(name, parameter_names(imported_class(path)))
        return name, f"{path} does not take {name!r}{suggestion}"
    if match := re.search(r"following arguments are required: (.*)", text):
        return None, f"{path} needs {match[1]}"
    return None


def _type_name(text: str) -> str:
    name = re.sub(r"^<class '(?:.*\.)?(\w+)'>$", r"\1", text)
    # The word that users write in YAML.
    if name == "NoneType":
        return "null"
    return name


def _locate(
    key: str,
    prog: str,
    words: Sequence[str],
    files: Sequence[str],
    inner: str | None = None,
    anywhere: bool = False,
) -> str:
    """The option, or the line of the file, that contains ``key``."""
    for argument in words:
        option = argument.partition("=")[0].removeprefix("--").rstrip("+")
        if option.startswith(key):
            return f"{prog}: --{key}"
    outer = key
    if anywhere:
        outer, inner = "", key
    # A word overrides files, and a later file an earlier one: the last that has the key set the refused value.
    for file in reversed(files):
        line = _find_line(file, outer, inner)
        if line is not None:
            return f"{file}:{line}: {key}"
    return f"{[prog, *files][-1]}: {key}"


def _find_line(file: str, key: str, inner: str | None) -> int | None:
    """The line of a key, or of the first ``inner`` below it; None if the file lacks it."""
    node = read_nodes(file)
    line = None
    # A key of a file may itself contain dots (`model.width: 3`), so each prefix is tried, the shortest first.
    while key:
        entries = (_entry(node, prefix) for prefix in key_prefixes(key))
        entry = next(filter(None, entries), None)
        if entry is None:
            return None
        key_node, node = entry
        line = key_node.start_mark.line + 1
        key = key[len(key_node.value) + 1 :]
    if not inner:
        return line
    # Breadth first: of several keys of this name the outermost is the one that the message means.
    pending = [node]
    while pending:
        node = pending.pop(0)
        entry = _entry(node, inner)
        if entry is not None:
            return int(entry[0].start_mark.line) + 1
        pending += [value for _, value in node_pairs(node)]
        if isinstance(node, yaml.SequenceNode):
            pending += node.value
    return line


def _entry(node: yaml.Node | None, name: str) -> tuple[yaml.Node, yaml.Node] | None:
    for key, value in node_pairs(node):
        if f"{key.value}.".startswith(f"{name}."):
            return key, value
    return None


def _suggestion(name: str, names: Iterable[str], otherwise: str = "see --help") -> str:
    # A former name of an argument is far from its replacement in spelling, so `did_you_mean` would not find it.
    former = name.removeprefix("--").partition("trainer.")[2]
    if former and has_wing("compat"):
        from trainer_kit.compat.lightning import FORMER_ARGUMENTS

        if former in FORMER_ARGUMENTS:
            return f"; instead of it: {FORMER_ARGUMENTS[former].format(value='...')}"
    near = did_you_mean(name, names, otherwise="")
    if near:
        return f", {near}"
    return f"; {otherwise}"


def _display_value(value: str, key: str) -> str:
    """A value for the message; nested values are left out, because some may be secrets."""
    if value.startswith(("{", "[", "Namespace(", "NestedArg(")):
        return "what was given"
    return shorten(mask_secrets(value, key.rpartition(".")[2]))
