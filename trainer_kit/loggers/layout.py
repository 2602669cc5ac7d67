"""Where file loggers write: ``save_dir/name/version_N``, found before it is made."""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

from trainer_kit.core.atomic_files import discard_torn, replace_file
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.signatures import check_overrides
from trainer_kit.loggers.params import params_dict, plain

__all__ = ["DEFAULT_NAME", "DirectoryLogger"]

DEFAULT_NAME: Final = "trainer_kit_logs"


class DirectoryLogger(ABC):
    """The directory of a logger that writes files.

    The version is looked up when it is first asked for and stays; directories are made by the first write.

    Args:
        save_dir: a local directory; ``~`` and environment variables are expanded.
        name: the experiment, a directory in ``save_dir``; empty for ``save_dir`` itself.
        version: an int N for ``version_N``, a word for a directory of that name, empty for none, None for the next N.
        sub_dir: a directory in that of the version, into which to write.

    Raises:
        ConfigurationError: ``save_dir`` is a URL.
    """

    writes_alone: Final = True

    never_called: ClassVar[Mapping[str, str]] = {
        "_get_next_version": "pass version=",
        "_add_prefix": "pass prefix=",
        "_scan_checkpoints": "define after_save_checkpoint(path)",
    }
    """Names that Lightning's loggers call: by name, what to do instead."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_overrides(cls, DirectoryLogger)

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None,
        version: int | str | None,
        sub_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self._save_dir = os.fspath(save_dir)
        if "://" in self._save_dir:
            raise ConfigurationError(
                f"{type(self).__name__} writes to a local directory",
                found=f"save_dir={self._save_dir!r}",
                fix="give a local path, and copy it where it belongs afterwards",
            )
        self._name, self._version, self._given = name or "", version, version is not None
        self._sub_dir = "" if sub_dir is None else os.fspath(sub_dir)
        self.hparams: dict[str, Any] = {}

    @property
    def save_dir(self) -> str:
        """The directory under which all experiments stand, as it was given."""
        return self._save_dir

    @property
    def name(self) -> str:
        """The experiment."""
        return self._name

    @property
    def root_dir(self) -> str:
        """``save_dir/name``: all versions of the experiment."""
        return os.fspath(Path(os.path.expandvars(os.path.expanduser(self._save_dir))) / self._name)

    @property
    def version(self) -> int | str:
        """Which version of the experiment this is; once known it stays."""
        if self._version is None:
            root = Path(self.root_dir)
            names = [entry.name for entry in root.iterdir() if entry.is_dir()] if root.is_dir() else []
            taken = [int(match[1]) for match in map(re.compile(r"version_(\d+)").fullmatch, names) if match]
            self._version = max(taken, default=-1) + 1
        return self._version

    @property
    def log_dir(self) -> str:
        """Where this run writes; it may not exist yet."""
        version = f"version_{self.version}" if isinstance(self.version, int) else self.version
        return os.fspath(Path(self.root_dir) / version / self._sub_dir)

    def state_dict(self) -> dict[str, Any]:
        """Which run of which experiment this is."""
        return {"name": self._name, "version": self.version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue that run, unless another version was given. What was written before stays where it is.

        Raises:
            ConfigurationError: its version is not the name of a directory in ``root_dir``.
        """
        version = state["version"]
        if self._given or state["name"] != self._name or version == self._version:
            return
        # A record or a checkpoint may have been edited: what it names must stay inside the directory of the experiment.
        inside = os.path.normpath(version) if isinstance(version, str) else "version"
        if not isinstance(version, (int, str)) or os.path.isabs(inside) or inside.split(os.sep)[0] == os.pardir:
            raise ConfigurationError(
                f"the run to continue logs outside of {self.root_dir}",
                found=f"version {version!r} in run.json or in the checkpoint",
                fix=f"give {type(self).__name__} the version that is meant, if that is what you want",
            )
        self.finalize("interrupted")
        self._version = version

    @abstractmethod
    def finalize(self, status: str) -> None:
        """Leave nothing in memory and nothing open; logging may go on."""

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Take values that belong to ``step``."""

    def _directory(self) -> Path:
        path = Path(self.log_dir)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def _keep_hparams(self, params: Any) -> dict[str, Any]:
        """Add to ``hparams`` and write them all to ``hparams.json``."""
        new = params_dict(params)
        self.hparams.update(new)
        if new:
            text = json.dumps(plain(self.hparams), indent=2, ensure_ascii=False, allow_nan=False)
            path = self._directory() / "hparams.json"
            discard_torn(path)
            replace_file(path, f"{text}\n".encode(), mode=0o600)
        return new
