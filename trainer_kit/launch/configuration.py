"""Resolve the options of a launch: flag, then configuration file, then environment, then default.

Files are Accelerate's YAML or JSON; errors name file and line. A file value that equals the option's default does not
override the environment, because wizards write every key.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from trainer_kit.core.configuration_sources import Chosen, variable
from trainer_kit.core.errors import ConfigurationError, did_you_mean, printable
from trainer_kit.core.yaml_guard import YamlProblem, guarded_root
from trainer_kit.launch.options import SECTIONS, TOP, Option, all_options, with_kind

__all__ = [
    "ConfigurationFile",
    "Resolved",
    "accelerates_default",
    "default_file",
    "our_default",
    "read_configuration",
    "resolve",
]

_MOST_BYTES: Final = 64 * 1024
"""Bytes of a file: one that comes from elsewhere cannot exhaust the memory."""
_KINDS: Final = ("str", "int", "float", "bool", "null", "seq", "map")
_TAGS: Final = (None, "!", *(f"tag:yaml.org,2002:{kind}" for kind in _KINDS))
_WITH_TPUS: Final = (
    "downcast_bf16",
    "commands",
    "command_file",
    "main_training_function",
)
_OLD_DYNAMO: Final = "dynamo_backend"
_DEFAULTS: Final[Mapping[str, Any]] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": None,
    "mixed_precision": "no",
    "num_processes": None,
    "num_machines": 1,
    "machine_rank": 0,
    "main_process_ip": "127.0.0.1",
    "main_process_port": None,
    "use_cpu": False,
    "gpu_ids": None,
    "gradient_accumulation_steps": 1,
    "max_restarts": 0,
    "debug": False,
}
_UNASKED: Final[Mapping[str, Any]] = {
    **_DEFAULTS,
    "gpu_ids": "all",
    "downcast_bf16": False,
    "enable_cpu_affinity": False,
    "rdzv_backend": "static",
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "dynamo_backend": "NO",
    "dynamo_mode": "default",
    **{name: False for name in SECTIONS["dynamo_config"] if "_use_" in name},
    **{name: 1 for name in SECTIONS["parallelism_config"] if name.endswith("_size")},
}
"""The values that wizards write without asking; they are treated as missing."""
_BEFORE: Final = ", before the default in "


@final
@dataclass(frozen=True)
class ConfigurationFile:
    """The values of a file, by the names of the command line, without defaults.

    Attributes:
        path: the file.
        values: by option.
        lines: the line of each option.
    """

    path: Path
    values: Mapping[str, Any]
    lines: Mapping[str, int]

    def position(self, name: str) -> str:
        """``file:line`` of an option."""
        return f"{self.path}:{self.lines[name]}"


@final
@dataclass
class _Reading:
    path: Path
    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, value: Any, line: int) -> None:
        self.values.setdefault(name, value)
        self.lines.setdefault(name, line)

    def wrong(self, line: int, reason: str) -> ConfigurationError:
        # One printable line: a file may contain control characters that harm a terminal.
        return ConfigurationError(f"{self.path}:{line}: {printable(reason, most=400)}")


def read_configuration(path: Path) -> ConfigurationFile:
    """Read a configuration file, written by ``accelerate config``, ``trainer-kit config`` or by hand.

    Args:
        path: YAML, or JSON.

    Raises:
        ConfigurationError: one line: file, line, key, the problem, and a similar key.
    """
    reading = _Reading(path)
    for key, value in _pairs(
        reading, _parse(reading), "a configuration is a mapping of keys to values"
    ):
        name = key.value
        if name in SECTIONS:
            for inner, content in _pairs(
                reading, value, f"{name}: is a mapping of keys to values"
            ):
                _take(reading, SECTIONS[name], inner, content, f"{name}.")
        # Written by versions of Accelerate without this section.
        elif name == _OLD_DYNAMO:
            _take(reading, SECTIONS["dynamo_config"], key, value, "")
        else:
            _take(reading, TOP, key, value, "")
    # Last: what the file itself says counts more than the file that it names.
    _take_tpu_file(reading)
    fp16 = reading.values.pop("fp16", False)
    line = reading.lines.pop("fp16", 1)
    # Written by versions of Accelerate without mixed_precision.
    if fp16:
        reading.add("mixed_precision", "fp16", line)
    return ConfigurationFile(path, reading.values, reading.lines)


def _take_tpu_file(reading: _Reading) -> None:
    """Add the values of the file that ``tpu_config_file`` names, with the line of that key."""
    name = reading.values.pop("tpu_config_file", None)
    line = reading.lines.pop("tpu_config_file", 1)
    if name is None:
        return
    other = read_configuration(reading.path.parent / Path(name).expanduser())
    for option, value in other.values.items():
        if not option.startswith("tpu_") and option not in _WITH_TPUS:
            raise reading.wrong(
                line,
                f"tpu_config_file: {other.position(option)}: {option} is not a TPU key",
            )
        reading.add(option, value, line)
    reading.add("tpu", True, line)


def _text(reading: _Reading) -> str:
    try:
        with reading.path.open("rb") as file:
            # One more than are allowed, so that a longer file is noticed without reading all of it.
            data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        raise ConfigurationError(
            f"the configuration file {reading.path} does not exist",
            fix="write one with: trainer-kit config",
        ) from None
    except OSError as error:
        raise ConfigurationError(
            f"{reading.path}: cannot be read: {error.strerror}"
        ) from None
    if len(data) > _MOST_BYTES:
        raise reading.wrong(1, f"a configuration has at most {_MOST_BYTES // 1024} KiB")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise reading.wrong(
            data.count(b"\n", 0, error.start) + 1, "this is not UTF-8"
        ) from None
    # JSON is YAML except for tabs, which its strings cannot contain.
    if reading.path.suffix == ".json":
        return text.replace("\t", " ")
    return text


def _parse(reading: _Reading) -> Any:
    try:
        return guarded_root(_text(reading), tags=_TAGS)
    except YamlProblem as problem:
        raise reading.wrong(problem.line, problem.reason) from None


def _line(node: Any) -> int:
    return int(node.start_mark.line) + 1


def _content(node: Any) -> Any:
    """The text of a scalar, None for a null, the nodes of a list, or the pairs of nodes of a mapping."""
    is_plain = node.id == "scalar" and node.style is None
    if is_plain and node.tag.endswith(":null"):
        return None
    # Accelerate writes this word, which is no null of YAML.
    if is_plain and str(node.value).lower() == "none":
        return None
    return node.value


def _pairs(reading: _Reading, node: Any, otherwise: str) -> list[tuple[Any, Any]]:
    if node is None or _content(node) is None:
        return []
    if node.id != "mapping":
        raise reading.wrong(_line(node), otherwise)
    values: dict[str, Any] = {}
    for key, value in node.value:
        if not isinstance(_content(key), str):
            raise reading.wrong(_line(key), "a key is a word")
        first = values.setdefault(key.value, value)
        if first is value:
            continue
        # Twice the same value contradicts nothing; which of two values counts would depend on the reader.
        if first.id != "scalar" or _content(first) != _content(value):
            raise reading.wrong(
                _line(key),
                f"{key.value}: is set twice, first in line {_line(first)}",
            )
    return list(node.value)


def _take(
    reading: _Reading, options: Mapping[str, Option], key: Any, node: Any, section: str
) -> None:
    """Store one value under the name of its option."""
    by_name: dict[str, Option] = {}
    for option in options.values():
        by_name |= dict.fromkeys((option.name, *option.aliases), option)
    name = key.value
    if name not in by_name:
        names = sorted(by_name)
        if not section:
            names = sorted({*by_name, *SECTIONS})
        # Shortened: a key may be as long as the file.
        near = did_you_mean(name[:60], names, "no key of a configuration is like it")
        if name.isupper():
            near = "a variable for the script belongs under environment:"
        raise reading.wrong(_line(key), f"{section}{name}: unknown key, {near}")
    option = by_name[name]
    try:
        value = _read_value(option, node)
    except ValueError as error:
        kinds = {"sequence": "a list", "mapping": "a mapping"}
        content = kinds.get(node.id) or repr(str(_content(node))[:60])
        raise reading.wrong(
            _line(node), f"{section}{name}: {error}, not {content}"
        ) from None
    if value is None:
        return
    if reading.values.setdefault(option.name, value) != value:
        first = reading.lines[option.name]
        raise reading.wrong(
            _line(key),
            f"{section}{name}: contradicts line {first}, which sets the same option",
        )
    reading.lines[option.name] = _line(key)


def _read_value(option: Option, node: Any) -> Any:
    content = _content(node)
    if option.free:
        return _to_python(node)
    is_gpu_ids = option.name == "gpu_ids"
    # A file may list the devices, although the flag is a text.
    if option.many or (is_gpu_ids and node.id == "sequence"):
        items = [node]
        if node.id == "sequence":
            items = content
        if any(item.id != "scalar" for item in items):
            raise ValueError("is a list of words")
        texts = [text for text in map(_content, items) if text is not None]
        if is_gpu_ids:
            return ",".join(texts)
        return texts or None
    if node.id != "scalar":
        raise ValueError("is one value")
    if content is None:
        return None
    return option.value(content)


def _to_python(node: Any) -> Any:
    if node.id == "mapping":
        return {str(_content(key)): _to_python(value) for key, value in node.value}
    if node.id == "sequence":
        return [_to_python(item) for item in node.value]
    return _content(node)


def our_default() -> Path:
    """The file that ``trainer-kit config`` writes."""
    home = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    return home / "trainer_kit" / "config.yaml"


def accelerates_default() -> Path:
    """The file that ``accelerate config`` writes."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    home = Path(os.environ.get("HF_HOME") or cache / "huggingface").expanduser()
    file = home / "accelerate" / "default_config.yaml"
    # Older versions of Accelerate wrote JSON.
    old = file.with_suffix(".json")
    if old.is_file() and not file.is_file():
        return old
    return file


def default_file() -> Path | None:
    """The file that is read by default: ours, else Accelerate's, else none."""
    for path in (our_default(), accelerates_default()):
        if path.is_file():
            return path
    return None


@final
@dataclass(frozen=True)
class Resolved:
    """Every option that has a value, and the origin of the value.

    Attributes:
        chosen: value and origin, by option.
        file: the file that was read, if any.
    """

    chosen: Mapping[str, Chosen]
    file: ConfigurationFile | None = None

    def __getitem__(self, name: str) -> Any:
        """The value of an option; None without one."""
        setting = self.chosen.get(name)
        if setting is None:
            return None
        return setting.value

    def origin(self, name: str) -> str:
        """The origin of an option's value."""
        setting = self.chosen.get(name)
        if setting is None:
            return "default"
        return setting.origin

    def is_set(self, name: str) -> bool:
        """Whether an option's value is not the default."""
        return self.origin(name) != "default"

    def before_file(self) -> list[str]:
        """The options whose value in the environment has priority over a default in the file."""
        return [
            name for name, setting in self.chosen.items() if _BEFORE in setting.origin
        ]

    def describe(self, name: str) -> str:
        """``name=value (origin)``, for messages."""
        return f"{name}={self[name]} ({self.origin(name)})"

    def wrong(
        self, problem: str, *names: str, fix: str | None = None
    ) -> ConfigurationError:
        """Create the error for options that cannot be launched; it shows their values and origins."""
        return ConfigurationError(
            problem, found=", ".join(map(self.describe, names)), fix=fix
        )


def resolve(
    flags: Mapping[str, Chosen],
    config_file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Resolved:
    """Find the value of every option.

    Args:
        flags: the given flags, by option.
        config_file: a file to read; by default `default_file`, unless ``use_cpu`` is a flag and that file is not for
            the CPU.
        environ: the environment variables.

    Raises:
        ConfigurationError: for a file, a flag or a variable that cannot be read.
    """
    path = config_file or default_file()
    file = None
    if path is not None:
        file = read_configuration(path)
    on_cpu = any(flags[name].value for name in ("cpu", "use_cpu") if name in flags)
    # A default file about devices is left alone: its processes were counted in devices.
    if config_file is None and file is not None and on_cpu and not _is_for_cpu(file):
        file = None
    defaults = {name: Chosen(value, "default") for name, value in _DEFAULTS.items()}
    environment: dict[str, Chosen] = {}
    for name, option in all_options().items():
        # A variable holds one value.
        if option.free or option.many:
            continue
        text = variable(name, environ)
        if text is not None:
            environment[name] = _read(option, text)
    in_file: dict[str, Chosen] = {}
    if file is not None:
        in_file = _with_priority(file, environment)
    return Resolved(with_kind(defaults, environment, in_file, flags), file)


def _with_priority(
    file: ConfigurationFile, environment: dict[str, Chosen]
) -> dict[str, Chosen]:
    """Return the file values that override the environment; the origin of any other variable names the file's line."""
    settings = {}
    for name, value in file.values.items():
        # A variable that another launch has set has the origin of its own launch, and the user did not choose it.
        explicit = name in environment and environment[name].origin.startswith(
            "environment "
        )
        if explicit and value == _UNASKED.get(name):
            explicit_value = environment[name]
            environment[name] = Chosen(
                explicit_value.value,
                f"{explicit_value.origin}{_BEFORE}{file.position(name)}",
            )
        else:
            settings[name] = Chosen(value, file.position(name))
    return settings


def _is_for_cpu(file: ConfigurationFile) -> bool:
    return (
        bool(file.values.get("use_cpu"))
        or file.values.get("distributed_type") == "MULTI_CPU"
    )


def _read(option: Option, found: Chosen) -> Chosen:
    try:
        return Chosen(option.value(found.value), found.origin)
    except ValueError as error:
        raise ConfigurationError(
            f"{found.origin}: {option.name} {error}", found=repr(found.value)
        ) from None
