"""Which value of every option counts: flag, then configuration file, then environment, then default.

A file's value that is the option's default does not count before the environment: wizards write every key.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from trainer_kit.core.configuration_sources import Chosen, variable
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.launch.file import ConfigurationFile, read_configuration
from trainer_kit.launch.kinds import with_kind
from trainer_kit.launch.options import SECTIONS, Option, all_options

__all__ = ["Resolved", "accelerates_default", "default_file", "our_default", "resolve"]

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
_SAYS_NOTHING: Final[Mapping[str, Any]] = {
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
"""What wizards write without being asked: it is the same as leaving the key out."""
_BEFORE: Final = ", before the default in "


def our_default() -> Path:
    """Where ``trainer-kit config`` writes."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "trainer_kit" / "config.yaml"


def accelerates_default() -> Path:
    """Where ``accelerate config`` writes."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = Path(os.environ.get("HF_HOME") or cache / "huggingface").expanduser() / "accelerate"
    old = folder / "default_config.json"
    return old if old.is_file() and not (folder / "default_config.yaml").is_file() else folder / "default_config.yaml"


def default_file() -> Path | None:
    """The file that is read where none is named: ours, else Accelerate's, else none."""
    return next((path for path in (our_default(), accelerates_default()) if path.is_file()), None)


@final
@dataclass(frozen=True)
class Resolved:
    """Every option that has a value, and where that comes from.

    Attributes:
        chosen: by option.
        file: what was read, if any.
    """

    chosen: Mapping[str, Chosen]
    file: ConfigurationFile | None = None

    def __getitem__(self, name: str) -> Any:
        """The value of an option; None where nobody gave one."""
        found = self.chosen.get(name)
        return None if found is None else found.value

    def origin(self, name: str) -> str:
        """Where it comes from."""
        found = self.chosen.get(name)
        return "default" if found is None else found.origin

    def given(self, name: str) -> bool:
        """Whether somebody gave one."""
        return self.origin(name) != "default"

    def before_file(self) -> list[str]:
        """The options that the environment decides although the file has them, with their defaults."""
        return [name for name, chosen in self.chosen.items() if _BEFORE in chosen.origin]

    def describe(self, name: str) -> str:
        """``name=value (origin)``, for messages."""
        return f"{name}={self[name]} ({self.origin(name)})"


def resolve(
    flags: Mapping[str, Chosen], config_file: Path | None = None, environ: Mapping[str, str] = os.environ
) -> Resolved:
    """Find the value of every option.

    Args:
        flags: those that were given, by option.
        config_file: a file to read; by default `default_file`, unless ``use_cpu`` is a flag and that file is not
            about the CPU.
        environ: the variables.

    Raises:
        ConfigurationError: for a file, a flag or a variable that cannot be read.
    """
    path = config_file or default_file()
    file = None if path is None else read_configuration(path)
    on_cpu = any(flags[name].value for name in ("cpu", "use_cpu") if name in flags)
    if config_file is None and file is not None and on_cpu and not _about_cpu(file):
        file = None
    defaults = {name: Chosen(value, "default") for name, value in _DEFAULTS.items()}
    around: dict[str, Chosen] = {}
    for name, option in all_options().items():
        found = None if option.free or option.many else variable(name, environ)
        if found is not None:
            around[name] = _read(option, found)
    return Resolved(with_kind(defaults, around, {} if file is None else _counting(file, around), flags), file)


def _counting(file: ConfigurationFile, around: dict[str, Chosen]) -> dict[str, Chosen]:
    """What of a file counts before the environment; its origins there name the line that does not."""
    counting = {}
    for name, value in file.values.items():
        explicit = name in around and around[name].origin.startswith("environment ")
        if explicit and value == _SAYS_NOTHING.get(name):
            chosen = around[name]
            around[name] = Chosen(chosen.value, f"{chosen.origin}{_BEFORE}{file.where(name)}")
        else:
            counting[name] = Chosen(value, file.where(name))
    return counting


def _about_cpu(file: ConfigurationFile) -> bool:
    return bool(file.values.get("use_cpu")) or file.values.get("distributed_type") == "MULTI_CPU"


def _read(option: Option, found: Chosen) -> Chosen:
    try:
        return Chosen(option.value(found.value), found.origin)
    except ValueError as error:
        raise ConfigurationError(f"{found.origin}: {option.name} {error}", found=repr(found.value)) from None
