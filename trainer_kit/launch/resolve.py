"""Which value of every option counts: flag, then configuration file, then environment, then default."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.origins import Chosen, variable
from trainer_kit.launch.file import ConfigurationFile, read_configuration
from trainer_kit.launch.options import TOP

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

    def said(self, name: str) -> str:
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
    if (
        config_file is None
        and file is not None
        and "use_cpu" in flags
        and flags["use_cpu"].value
        and not _about_cpu(file)
    ):
        file = None
    chosen: dict[str, Chosen] = {name: Chosen(value, "default") for name, value in _DEFAULTS.items()}
    for name in TOP:
        found = variable(name, environ)
        if found is not None:
            chosen[name] = _read(name, found)
    for name, value in file.values.items() if file is not None else ():
        chosen[name] = Chosen(value, file.where(name))  # type: ignore[union-attr]
    return Resolved({**chosen, **flags}, file)


def _about_cpu(file: ConfigurationFile) -> bool:
    return bool(file.values.get("use_cpu")) or file.values.get("distributed_type") == "MULTI_CPU"


def _read(name: str, found: Chosen) -> Chosen:
    try:
        return Chosen(TOP[name].value(found.value), found.origin)
    except ValueError as error:
        raise ConfigurationError(f"{found.origin}: {name} {error}", found=repr(found.value)) from None
