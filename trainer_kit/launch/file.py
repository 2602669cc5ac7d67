"""Reading a configuration file: Accelerate's YAML or JSON, checked key by key, each error with file and line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from trainer_kit.core.errors import ConfigurationError, did_you_mean, printable
from trainer_kit.core.yaml_guard import YamlProblem, guarded_events
from trainer_kit.launch.options import SECTIONS, TOP, Option

__all__ = ["ConfigurationFile", "read_configuration"]

_MOST_BYTES: Final = 64 * 1024
_KINDS: Final = ("str", "int", "float", "bool", "null", "seq", "map")
_TAGS: Final = (None, "!", *(f"tag:yaml.org,2002:{kind}" for kind in _KINDS))
_NULL: Final = ("", "~", "null", "none")
_WITH_TPUS: Final = ("downcast_bf16", "commands", "command_file", "main_training_function")
_OLD_DYNAMO: Final = "dynamo_backend"


@final
@dataclass
class _Node:
    """A value of the file, before its key has said what it is: text, None, a list of nodes, or pairs of nodes."""

    line: int
    content: Any


@final
@dataclass(frozen=True)
class ConfigurationFile:
    """What a file says, by the names of the command line; nothing is filled in.

    Attributes:
        path: the file.
        values: by option; a list or mapping where the option is one.
        lines: the line each stands on.
        sections: the mappings that are there, also empty ones.
    """

    path: Path
    values: Mapping[str, Any]
    lines: Mapping[str, int]
    sections: tuple[str, ...] = ()

    def where(self, name: str) -> str:
        """``file:line`` of an option."""
        return f"{self.path}:{self.lines[name]}"


@final
@dataclass
class _Reading:
    path: Path
    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)

    def wrong(self, line: int, reason: str) -> ConfigurationError:
        # One line, whatever the file holds: it may be made to harm the terminal it is shown on.
        return ConfigurationError(f"{self.path}:{line}: {printable(reason, most=400)}")


def read_configuration(path: Path) -> ConfigurationFile:
    """Read a file that ``accelerate config`` or ``trainer-kit config`` wrote, or one by hand.

    Args:
        path: YAML, or JSON.

    Raises:
        ConfigurationError: one line: file, line, key, what is wrong with it, and what was meant.
    """
    reading = _Reading(path)
    root = _parse(reading, _text(reading))
    sections = []
    for key, value in _pairs(reading, root, "a configuration is a mapping of keys to values"):
        name = key.content
        if name in SECTIONS:
            sections.append(name)
            pairs = _pairs(reading, value, f"{name}: is a mapping of keys to values")
            for inner, content in pairs:
                _take(reading, SECTIONS[name], inner, content, f"{name}.")
        elif name == _OLD_DYNAMO:  # Accelerate's own, before it had a section
            _take(reading, SECTIONS["dynamo_config"], key, value, "")
        else:
            _take(reading, TOP, key, value, "")
    _take_tpu_file(reading)
    old, line = reading.values.pop("fp16", False), reading.lines.pop("fp16", 1)
    if old:  # Accelerate's own, before there were others
        reading.values.setdefault("mixed_precision", "fp16")
        reading.lines.setdefault("mixed_precision", line)
    return ConfigurationFile(path, reading.values, reading.lines, tuple(sections))


def _take_tpu_file(reading: _Reading) -> None:
    """What the file behind ``tpu_config_file`` says of TPUs, as if it stood in that line."""
    name, line = reading.values.pop("tpu_config_file", None), reading.lines.pop("tpu_config_file", 1)
    if name is None:
        return
    other = read_configuration(reading.path.parent / Path(name).expanduser())
    for option, value in other.values.items():
        if not option.startswith("tpu_") and option not in _WITH_TPUS:
            raise reading.wrong(line, f"tpu_config_file: {other.where(option)}: {option} is no key of TPUs")
        reading.values.setdefault(option, value)
        reading.lines.setdefault(option, line)
    reading.values.setdefault("tpu", True)
    reading.lines.setdefault("tpu", line)


def _text(reading: _Reading) -> str:
    try:
        with reading.path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        raise ConfigurationError(
            f"there is no configuration file {reading.path}", fix="write one with: trainer-kit config"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"{reading.path}: cannot be read: {error.strerror}") from None
    if len(data) > _MOST_BYTES:
        raise reading.wrong(1, f"a configuration has at most {_MOST_BYTES // 1024} KiB")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise reading.wrong(data.count(b"\n", 0, error.start) + 1, "this is not UTF-8") from None
    # JSON is YAML but for this; its strings cannot hold a tab.
    return text.replace("\t", " ") if reading.path.suffix == ".json" else text


def _parse(reading: _Reading, text: str) -> _Node:
    """The document as nodes; nothing is constructed from it."""
    import yaml

    try:
        events = iter(guarded_events(text))
    except YamlProblem as problem:
        raise reading.wrong(problem.line, problem.reason) from None
    documents = [_node(reading, event, events, {}) for event in events if isinstance(event, yaml.NodeEvent)]
    if len(documents) > 1:
        raise reading.wrong(documents[1].line, "a second document begins here; a configuration has one")
    return documents[0] if documents else _Node(1, None)


def _node(reading: _Reading, event: Any, events: Iterator[Any], anchors: dict[str, _Node | None]) -> _Node:
    """The node that begins with ``event``."""
    import yaml

    line = event.start_mark.line + 1
    if isinstance(event, yaml.AliasEvent):
        found = anchors.get(str(event.anchor))
        if found is None:
            raise reading.wrong(line, f"*{event.anchor} refers to nothing before it")
        return _Node(line, found.content)
    if event.anchor in anchors:
        raise reading.wrong(line, f"&{event.anchor} is given twice")
    if event.anchor:
        anchors[event.anchor] = None
    if event.tag not in _TAGS:
        raise reading.wrong(line, f"{event.tag}: tags are not read")
    if isinstance(event, yaml.ScalarEvent):
        plain = event.implicit[0] and event.style is None
        node = _Node(line, None if plain and event.value.lower() in _NULL else event.value)
    else:
        inner = _until_end(reading, events, anchors)
        pairs = isinstance(event, yaml.MappingStartEvent)
        node = _Node(line, tuple(zip(inner[::2], inner[1::2], strict=True)) if pairs else inner)
    if event.anchor:
        anchors[event.anchor] = node
    return node


def _until_end(reading: _Reading, events: Iterator[Any], anchors: dict[str, _Node | None]) -> list[_Node]:
    import yaml

    inner: list[_Node] = []
    for event in events:
        if isinstance(event, yaml.CollectionEndEvent):
            break
        inner.append(_node(reading, event, events, anchors))
    return inner


def _pairs(reading: _Reading, node: _Node, otherwise: str) -> list[tuple[_Node, _Node]]:
    if node.content is None:
        return []
    if not isinstance(node.content, tuple):
        raise reading.wrong(node.line, otherwise)
    seen: dict[str, _Node] = {}
    for key, value in node.content:
        if not isinstance(key.content, str):
            raise reading.wrong(key.line, "a key is a word")
        before = seen.setdefault(key.content, value)
        if before.content != value.content or (isinstance(before.content, tuple) and before is not value):
            raise reading.wrong(key.line, f"{key.content}: is given twice, first in line {before.line}")
    return list(node.content)


def _take(reading: _Reading, known: Mapping[str, Option], key: _Node, node: _Node, section: str) -> None:
    """Put one value where it belongs."""
    by_name = {alias: option for option in known.values() for alias in (option.name, *option.aliases)}
    name = key.content
    option = by_name.get(name)
    if option is None:
        names = sorted({*by_name, *SECTIONS}) if not section else sorted(by_name)
        variable = "a variable for the script belongs under environment:"
        near = variable if name.isupper() else did_you_mean(name[:60], names, "no key of a configuration is like it")
        raise reading.wrong(key.line, f"{section}{name}: unknown key, {near}")
    try:
        value = _value(option, node)
    except ValueError as error:
        raise reading.wrong(node.line, f"{section}{name}: {error}{_found(node)}") from None
    if value is None:
        return
    if option.name in reading.values and reading.values[option.name] != value:
        first = reading.lines[option.name]
        raise reading.wrong(key.line, f"{section}{name}: contradicts line {first}, which says the same option")
    reading.values[option.name], reading.lines[option.name] = value, key.line


def _value(option: Option, node: _Node) -> Any:
    content = node.content
    if option.free:
        return _plain(node)
    if option.many or (option.name == "gpu_ids" and isinstance(content, list)):
        items = content if isinstance(content, list) else [node]
        if any(isinstance(item.content, (list, tuple)) for item in items):
            raise ValueError("is a list of words")
        texts = [item.content for item in items if item.content is not None]
        return ",".join(texts) if option.name == "gpu_ids" else texts or None
    if isinstance(content, (list, tuple)):
        raise ValueError("is one value")
    # Accelerate writes none for nothing; where it is a word, it is one.
    return None if content is None else option.value(content)


def _plain(node: _Node) -> Any:
    if isinstance(node.content, tuple):
        return {str(key.content): _plain(value) for key, value in node.content}
    return [_plain(item) for item in node.content] if isinstance(node.content, list) else node.content


def _found(node: _Node) -> str:
    if isinstance(node.content, (list, tuple)):
        return f", not a {'list' if isinstance(node.content, list) else 'mapping'}"
    return f", not {str(node.content)[:60]!r}"
