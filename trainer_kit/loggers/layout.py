"""Directories of loggers, conversion of logged values, and the logger that writes nothing."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import os
import re
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar, final

from trainer_kit.core.arguments import with_typed_arguments
from trainer_kit.core.atomic_files import discard_torn, replace_file
from trainer_kit.core.copyable_lock import Lock
from trainer_kit.core.display import mask_secrets
from trainer_kit.core.errors import ConfigurationError, LogError

__all__ = [
    "DEFAULT_NAME",
    "DirectoryLogger",
    "DummyLogger",
    "claim_versions",
    "flatten",
    "make_version",
    "numbers",
    "one_at_a_time",
    "params_dict",
    "plain",
]


def numbers(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, int | float]:
    """The values as Python numbers, with ``prefix-`` before each name if there is a prefix.

    Args:
        metrics: numbers, or tensors and arrays of one element.
        prefix: the start of each name.

    Raises:
        LogError: a value is not one number.

    Example:
        >>> import torch
        >>> numbers({"loss": torch.tensor(0.5)}, prefix="a")
        {'a-loss': 0.5}
    """
    return {
        f"{prefix}-{name}" if prefix else name: _number(name, value)
        for name, value in metrics.items()
    }


def _number(name: str, value: Any) -> int | float:
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, bool) else value
    try:
        number = value.item()
    except (AttributeError, RuntimeError, ValueError):
        number = None
    if not isinstance(number, (int, float)):
        raise LogError(
            f"the metric {name!r} is not a single number",
            found=f"a {type(value).__name__}{_shape(value)}",
            fix="log a number or a tensor of one element; use the logger's `experiment` for pictures and text",
        )
    return int(number) if isinstance(number, bool) else number


def params_dict(params: Any) -> dict[str, Any]:
    """Hyperparameters as a dict with text keys; passwords and API keys are masked. None gives an empty dict.

    Args:
        params: a mapping, an ``argparse.Namespace`` or a dataclass instance; nested ones become dicts too.

    Raises:
        LogError: ``params`` is something else.

    Example:
        >>> params_dict(Namespace(lr=0.1, optim={"name": "sgd"}, api_key="k"))
        {'lr': 0.1, 'optim': {'name': 'sgd'}, 'api_key': '***'}
    """
    if params is None:
        return {}
    nested = _nested(params)
    if not isinstance(nested, dict):
        raise LogError(
            "hyperparameters are a dict, a Namespace or a dataclass",
            found=f"a {type(params).__name__}: {params!r}",
        )
    masked: dict[str, Any] = mask_secrets(nested)
    return masked


def _nested(value: Any) -> Any:
    if isinstance(value, Namespace):
        value = vars(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {
            field.name: getattr(value, field.name)
            for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {str(key): _nested(item) for key, item in value.items()}
    return value


def flatten(params: Mapping[str, Any], delimiter: str = "/") -> dict[str, Any]:
    """Flatten nested mappings by joining their names; an empty mapping stays a value.

    Example:
        >>> flatten({"optim": {"lr": 0.1, "decay": {"by": 2}}, "data": {}})
        {'optim/lr': 0.1, 'optim/decay/by': 2, 'data': {}}
    """
    flat: dict[str, Any] = {}
    for key, value in params.items():
        if isinstance(value, Mapping) and value:
            flat.update(
                {
                    f"{key}{delimiter}{name}": item
                    for name, item in flatten(value, delimiter).items()
                }
            )
        else:
            flat[key] = value
    return flat


def plain(value: Any) -> Any:
    """Convert ``value`` to strict JSON: NaN, infinities and values without a JSON form become text.

    Example:
        >>> import torch
        >>> plain({"betas": (0.9, 0.99), "limit": float("inf"), "dtype": torch.float16, "act": torch.relu})
        {'betas': [0.9, 0.99], 'limit': 'Infinity', 'dtype': 'torch.float16', 'act': 'relu'}
    """
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return (
            value
            if math.isfinite(value)
            else "NaN"
            if math.isnan(value)
            else f"{'-' * (value < 0)}Infinity"
        )
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=repr)
    if _shape(
        value
    ):  # tensors and arrays: the value of a single element, else a description
        return (
            plain(value.item())
            if math.prod(value.shape) == 1
            else f"{type(value).__name__}{_shape(value)}"
        )
    if callable(value):
        return str(getattr(value, "__name__", type(value).__name__))
    return str(value)


def _shape(value: Any) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return (
        "" if shape is None or dtype is None else f" of shape {tuple(shape)}, {dtype}"
    )


DEFAULT_NAME: Final = "trainer_kit_logs"


_F = TypeVar("_F", bound=Callable[..., Any])


def one_at_a_time(method: _F) -> _F:
    """Decorator for a logger's methods that share ``self.lock``: a run calls each logger on a separate thread, and user
    code may call the same logger on another one.

    Example:
        >>> class Counts:
        ...     def __init__(self):
        ...         self.lock, self.count = Lock(), 0
        ...
        ...     @one_at_a_time
        ...     def add(self):
        ...         self.count += 1
        >>> counts = Counts()
        >>> counts.add()
        >>> counts.count
        1
    """

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        with self.lock:
            return method(self, *arguments, **options)

    return call  # type: ignore[return-value]


class DirectoryLogger(ABC):
    """The directory of a logger that writes files.

    The first use chooses the version; the first write creates the directories.

    Args:
        save_dir: a local directory; ``~`` and environment variables are expanded.
        name: the experiment, a directory in ``save_dir``; empty for ``save_dir`` itself.
        version: an int N for ``version_N``, a directory name, empty for none, None for the next free N.
        sub_dir: a directory below the version's, to write to.

    Raises:
        ConfigurationError: ``save_dir`` is a URL.
    """

    writes_alone: Final = True

    never_called: ClassVar[Mapping[str, str]] = {
        "_get_next_version": "pass version=",
        "_add_prefix": "pass prefix=",
        "_scan_checkpoints": "define after_save_checkpoint(path)",
    }
    """Methods that Lightning's loggers call: by name, the replacement."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        with_typed_arguments(cls)

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
                f"{type(self).__name__} writes to local directories only",
                found=f"save_dir={self._save_dir!r}",
                fix="give a local path, and copy the files afterwards",
            )
        self._name, self._version, self._given = (
            name or "",
            version,
            version is not None,
        )
        self.claimed = version is not None
        """Whether the version belongs to this run: given, continued, or its directory made by this run."""
        self._made_directory = False
        self._opened = (
            False  # whether there are files or buffered values of this version
        )
        self._sub_dir = "" if sub_dir is None else os.fspath(sub_dir)
        self.hparams: dict[str, Any] = {}
        self.lock = Lock()

    @property
    def save_dir(self) -> str:
        """The directory of all experiments, as the caller gave it."""
        return self._save_dir

    @property
    def name(self) -> str:
        """The experiment."""
        return self._name

    @property
    def root_dir(self) -> str:
        """``save_dir/name``: all versions of the experiment."""
        return os.fspath(
            Path(os.path.expandvars(os.path.expanduser(self._save_dir))) / self._name
        )

    @property
    def version(self) -> int | str:
        """The version of the experiment; fixed after its first use."""
        if self._version is None:
            root = Path(self.root_dir)
            names = (
                [entry.name for entry in root.iterdir() if entry.is_dir()]
                if root.is_dir()
                else []
            )
            numbers = [
                int(match[1])
                for match in map(re.compile(r"version_(\d+)").fullmatch, names)
                if match
            ]
            self._version = max(numbers, default=-1) + 1
        return self._version

    @property
    def log_dir(self) -> str:
        """The directory of this run; it may not exist yet."""
        version = (
            f"version_{self.version}" if isinstance(self.version, int) else self.version
        )
        return os.fspath(Path(self.root_dir) / version / self._sub_dir)

    def state_dict(self) -> dict[str, Any]:
        """The name and the version of the run."""
        return {"name": self._name, "version": self.version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run of ``state`` unless a version was given; files already written stay.

        Raises:
            ConfigurationError: the version is not the name of a directory in ``root_dir``.
        """
        version = state["version"]
        if self._given or state["name"] != self._name or version == self._version:
            return
        # A record or a checkpoint may have been edited: the path must stay inside the directory of the experiment.
        inside = os.path.normpath(version) if isinstance(version, str) else "version"
        if (
            not isinstance(version, (int, str))
            or os.path.isabs(inside)
            or inside.split(os.sep)[0] == os.pardir
        ):
            raise ConfigurationError(
                f"the run to continue has its logs outside of {self.root_dir}",
                found=f"version {version!r} in run.json or in the checkpoint",
                fix=f"pass version= to {type(self).__name__} to log there deliberately",
            )
        if (
            self._opened
        ):  # on other ranks than 0, which write nothing, there is nothing to close
            self._opened = False
            self.finalize("interrupted")
        self._version = version
        self.claimed = True

    def claim_version(self, version: int) -> None:
        """Write to this version, whose directory this run has made."""
        self._version = version
        self.claimed = True
        self._made_directory = True

    def release_version(self) -> None:
        """Remove the directory that was made for this version, if it is empty: the run is refused."""
        if self._made_directory:
            self._made_directory = False
            self.claimed = False
            with suppress(OSError):
                os.rmdir(self.log_dir)

    @abstractmethod
    def finalize(self, status: str) -> None:
        """Write all buffered values and close all files; logging may continue."""

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log the values of ``step``."""

    def _directory(self) -> Path:
        path = Path(self.log_dir)
        path.mkdir(parents=True, exist_ok=True)
        self._opened = True
        self.claimed = True
        return path

    def _keep_hparams(self, params: Any) -> dict[str, Any]:
        """Add ``params`` to ``hparams``, and write all of them to ``hparams.json``."""
        new = params_dict(params)
        self.hparams.update(new)
        if new:
            text = json.dumps(
                plain(self.hparams), indent=2, ensure_ascii=False, allow_nan=False
            )
            path = self._directory() / "hparams.json"
            discard_torn(path)
            replace_file(path, f"{text}\n".encode(), mode=0o600)
        return new


_FACTS: Final = {
    "name": "",
    "version": "",
    "log_dir": None,
    "save_dir": None,
    "root_dir": None,
}
"""Attributes of a logger, with their defaults."""


def claim_versions(loggers: Iterable[Any]) -> list[str]:
    """Make the directory of each version that a logger has chosen, so that no other run writes there.

    Of two runs that start at one time only one can make a directory; the other one takes the next version. Loggers of
    one experiment stay together. A directory that cannot be made is reported by the first write.

    Args:
        loggers: of one run, in the only process that writes.

    Returns:
        A line for each experiment whose version another run has taken since it was chosen.

    Example:
        >>> import tempfile
        >>> from trainer_kit.loggers import CSVLogger
        >>> root = tempfile.mkdtemp()
        >>> first, second = CSVLogger(root), CSVLogger(root)
        >>> first.version, second.version
        (0, 0)
        >>> claim_versions([first]), len(claim_versions([second])), second.version
        ([], 1, 1)
    """
    experiments: dict[tuple[str, int | str], list[DirectoryLogger]] = {}
    for logger in loggers:
        if isinstance(logger, DirectoryLogger) and not logger.claimed:
            key = logger.root_dir, logger.version
            experiments.setdefault(key, []).append(logger)
    lines = []
    for (root, experiment), together in experiments.items():
        version = make_version(Path(root), int(experiment))
        for logger in together:
            logger.claim_version(version)
        if version != experiment:
            lines.append(
                f"another run has taken version_{experiment} in {root} at the same time: this one is version_{version}"
            )
    return lines


def make_version(root: Path, version: int) -> int:
    """Make the directory of the first free version, from ``version`` on; exactly one process can make it."""
    while True:
        try:
            root.mkdir(parents=True, exist_ok=True)
            (root / f"version_{version}").mkdir()
        except FileExistsError:
            if not root.is_dir():
                return version
            version += 1
        except OSError:
            return version
        else:
            return version


@final
class DummyLogger:
    """Takes every call and writes nothing.

    Args:
        like: the logger that this one replaces on a rank that does not write; its name, version and directories
            are copied.

    Example:
        >>> logger = DummyLogger()
        >>> logger.log_metrics({"loss": 1.0}, step=3)
        >>> logger.experiment.add_figure("weights", None).whatever[0] is logger.experiment
        True
    """

    def __init__(self, like: Any = None) -> None:
        self.experiment = _Nothing()
        for fact, value in _FACTS.items():
            setattr(self, fact, getattr(like, fact, value))

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Nothing is kept."""

    def log_hyperparams(
        self, params: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Nothing is kept."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__["experiment"]


class _Nothing:
    """Returns itself for every attribute, call and item."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        """Nothing is kept."""
