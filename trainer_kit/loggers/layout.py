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
from typing import (
    Any,
    ClassVar,
    Concatenate,
    Final,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    final,
    overload,
)

from trainer_kit.core.arguments import with_typed_arguments
from trainer_kit.core.atomic_files import discard_torn, replace_file
from trainer_kit.core.copyable_lock import Lock
from trainer_kit.core.display import mask_secrets
from trainer_kit.core.errors import ConfigurationError, LogError
from trainer_kit.core.types import SavedState, StateDict

__all__ = [
    "DEFAULT_NAME",
    "DirectoryLogger",
    "DummyLogger",
    "Json",
    "LoggedValues",
    "claim_versions",
    "flatten",
    "make_version",
    "numbers",
    "params_dict",
    "plain",
    "with_lock",
]


class _HasItem(Protocol):
    """A tensor or an array."""

    def item(self) -> object:
        """The value of its only element."""


class _HasLock(Protocol):
    """A logger whose methods one thread at a time may run."""

    lock: Lock


LoggedValues: TypeAlias = "Mapping[str, int | float | _HasItem]"
"""Metrics by name: numbers, or tensors and arrays of one element."""
Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
"""A value that strict JSON can hold."""


def numbers(metrics: LoggedValues, prefix: str = "") -> dict[str, int | float]:
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
    start = f"{prefix}-" if prefix else ""
    return {f"{start}{name}": _number(name, value) for name, value in metrics.items()}


def _number(name: str, value: int | float | _HasItem) -> int | float:
    number: object = value
    if not isinstance(value, (int, float)):
        try:
            number = value.item()
        except (AttributeError, RuntimeError, ValueError):
            # Several elements: torch raises RuntimeError, NumPy ValueError; text has no `item`.
            number = None
    # A bool is an int too, but would be written as `True` to files of numbers.
    if isinstance(number, bool):
        return int(number)
    if isinstance(number, (int, float)):
        return number
    raise LogError(
        f"the metric {name!r} is not a single number",
        found=f"a {type(value).__name__}{_shape(value)}",
        fix="log a number or a tensor of one element; use the logger's `experiment` for pictures and text",
    )


def params_dict(params: object) -> dict[str, object]:
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
    # Here, not in each logger: no tracker and no file gets a secret in clear text.
    masked: dict[str, object] = mask_secrets(nested)
    return masked


def _nested(value: object) -> object:
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


def flatten(params: Mapping[str, object], delimiter: str = "/") -> dict[str, object]:
    """Flatten nested mappings by joining their names; an empty mapping stays a value.

    Example:
        >>> flatten({"optim": {"lr": 0.1, "decay": {"by": 2}}, "data": {}})
        {'optim/lr': 0.1, 'optim/decay/by': 2, 'data': {}}
    """
    flat: dict[str, object] = {}
    for key, value in params.items():
        if not isinstance(value, Mapping) or not value:
            flat[key] = value
            continue
        for name, item in flatten(value, delimiter).items():
            flat[f"{key}{delimiter}{name}"] = item
    return flat


@overload
def plain(value: Mapping[str, object]) -> dict[str, Json]: ...
@overload
def plain(value: object) -> Json: ...
def plain(value: object) -> Json:
    """Convert ``value`` to strict JSON: NaN, infinities and values without a JSON form become text.

    Example:
        >>> import torch
        >>> plain({"betas": (0.9, 0.99), "limit": float("inf"), "dtype": torch.float16, "act": torch.relu})
        {'betas': [0.9, 0.99], 'limit': 'Infinity', 'dtype': 'torch.float16', 'act': 'relu'}
    """
    # Before int and str: the members of an IntEnum or a StrEnum are both.
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return _plain_float(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        # Sorted: the order of a set of strings differs between two processes, and hyperparameters would seem changed.
        return sorted((plain(item) for item in value), key=repr)
    description = _shape(value)
    if description:
        return _plain_array(value, description)
    if callable(value):
        return str(getattr(value, "__name__", type(value).__name__))
    return str(value)


def _plain_float(value: float) -> float | str:
    if math.isfinite(value):
        return value
    # JSON has no numbers for these; the texts are those that Python's own encoder writes.
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _plain_array(array: Any, description: str) -> Json:
    """The value of a tensor or an array of one element; the class and the shape of any other."""
    if math.prod(array.shape) == 1:
        element: object = array.item()
        return plain(element)
    return f"{type(array).__name__}{description}"


def _shape(value: object) -> str:
    """The shape and dtype of a tensor or an array; empty for anything else."""
    shape = getattr(value, "shape", None)
    dtype = getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return ""
    return f" of shape {tuple(shape)}, {dtype}"


DEFAULT_NAME: Final = "trainer_kit_logs"


_LoggerType = TypeVar("_LoggerType", bound=_HasLock)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def with_lock(
    method: Callable[Concatenate[_LoggerType, _Arguments], _Result],
) -> Callable[Concatenate[_LoggerType, _Arguments], _Result]:
    """Decorator for a logger's methods that share ``self.lock``: a run calls each logger on a separate thread, and user
    code may call the same logger on another one.

    Example:
        >>> class Counts:
        ...     def __init__(self):
        ...         self.lock, self.count = Lock(), 0
        ...
        ...     @with_lock
        ...     def add(self):
        ...         self.count += 1
        >>> counts = Counts()
        >>> counts.add()
        >>> counts.count
        1
    """

    @functools.wraps(method)
    def call(
        self: _LoggerType, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Result:
        # The lock is reentrant: `log_metrics` may call `save`, which takes it too.
        with self.lock:
            return method(self, *args, **kwargs)

    return call


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

    Example:
        >>> from trainer_kit.loggers import CSVLogger
        >>> logger = CSVLogger("logs", name="digits", version=0)
        >>> logger.root_dir, logger.log_dir
        ('logs/digits', 'logs/digits/version_0')
    """

    writes_alone: Final = True

    never_called: ClassVar[Mapping[str, str]] = {
        "_get_next_version": "pass version=",
        "_add_prefix": "pass prefix=",
        "_scan_checkpoints": "define after_save_checkpoint(path)",
    }
    """Methods that Lightning's loggers call: by name, the replacement."""

    def __init_subclass__(cls, **kwargs: object) -> None:
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
        self._name = name or ""
        self._version = version
        # Only a version that the user passed wins over that of a resumed run.
        self._fixed_version = version is not None
        self.claimed = version is not None
        """Whether the version belongs to this run: passed, continued, or its directory created by this run."""
        self._created_directory = False
        # whether there are files or buffered values of this version
        self._opened = False
        self._sub_dir = os.fspath(sub_dir or "")
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
        # Expanded here, not in the constructor: `save_dir` stays what the caller wrote, as in Lightning.
        expanded = os.path.expandvars(os.path.expanduser(self._save_dir))
        return os.fspath(Path(expanded) / self._name)

    @property
    def version(self) -> int | str:
        """The version of the experiment; fixed after its first use."""
        if self._version is None:
            # One above the highest, as in Lightning: the number of a version that was deleted in between stays unused.
            self._version = max(_used_versions(Path(self.root_dir)), default=-1) + 1
        return self._version

    @property
    def log_dir(self) -> str:
        """The directory of this run; it may not exist yet."""
        version = self.version
        directory = f"version_{version}" if isinstance(version, int) else version
        return os.fspath(Path(self.root_dir) / directory / self._sub_dir)

    def state_dict(self) -> StateDict:
        """The name and the version of the run."""
        return {"name": self._name, "version": self.version}

    def load_state_dict(self, state: SavedState) -> None:
        """Continue the run of ``state`` unless a version was given; files already written stay.

        Args:
            state: what ``state_dict`` returned: ``{"name": ..., "version": ...}``.

        Raises:
            ConfigurationError: the version is not the name of a directory in ``root_dir``.
        """
        version = state["version"]
        if self._fixed_version or state["name"] != self._name:
            return
        if version == self._version:
            return
        # A record or a checkpoint may have been edited: the path must stay inside the directory of the experiment.
        if not isinstance(version, (int, str)) or _leaves_directory(version):
            raise ConfigurationError(
                f"the run to continue has its logs outside of {self.root_dir}",
                found=f"version {version!r} in run.json or in the checkpoint",
                fix=f"pass version= to {type(self).__name__} to log there deliberately",
            )
        # On ranks other than 0, which write nothing, there is nothing to close.
        if self._opened:
            self._opened = False
            self.finalize("interrupted")
        self._version = version
        self.claimed = True

    def claim_version(self, version: int) -> None:
        """Write to this version, whose directory this run has created."""
        self._version = version
        self.claimed = True
        self._created_directory = True

    def release_version(self) -> None:
        """Remove the directory that was created for this version, if it is empty: the run is refused."""
        if self._created_directory:
            self._created_directory = False
            self.claimed = False
            # `rmdir` fails if a file is inside: nothing that was logged is ever deleted.
            with suppress(OSError):
                os.rmdir(self.log_dir)

    @abstractmethod
    def finalize(self, status: str) -> None:
        """Write all buffered values and close all files; logging may continue.

        Args:
            status: ``"success"``, ``"failed"`` or ``"interrupted"``.
        """

    @abstractmethod
    def log_metrics(self, metrics: LoggedValues, step: int | None = None) -> None:
        """Log the values of ``step``.

        Args:
            metrics: numbers, or tensors of one element, by name.
            step: the step of the values; the subclass says what None means.
        """

    def _directory(self) -> Path:
        path = Path(self.log_dir)
        path.mkdir(parents=True, exist_ok=True)
        self._opened = True
        self.claimed = True
        return path

    def _record_hparams(self, params: object) -> None:
        """Add ``params`` to ``hparams``, and write all of them to ``hparams.json``."""
        new = params_dict(params)
        self.hparams.update(new)
        if not new:
            return
        values = plain(self.hparams)
        text = json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False)
        path = self._directory() / "hparams.json"
        # A crash inside an earlier write left its temporary file here.
        discard_torn(path)
        # Only the owner reads it: the mask knows names of secrets, not every secret.
        replace_file(path, f"{text}\n".encode(), mode=0o600)


def _used_versions(root: Path) -> list[int]:
    """The numbers N of the directories ``version_N`` in ``root``."""
    if not root.is_dir():
        return []
    versions = []
    for entry in root.iterdir():
        match = re.fullmatch(r"version_(\d+)", entry.name)
        if match is not None and entry.is_dir():
            versions.append(int(match[1]))
    return versions


def _leaves_directory(version: int | str) -> bool:
    """Whether the version, as a relative path, is outside of the directory of the experiment."""
    if isinstance(version, int):
        return False
    path = os.path.normpath(version)
    return os.path.isabs(path) or path.split(os.sep)[0] == os.pardir


_ATTRIBUTES: Final = {
    "name": "",
    "version": "",
    "log_dir": None,
    "save_dir": None,
    "root_dir": None,
}
"""Attributes of a logger, with their defaults."""


def claim_versions(loggers: Iterable[object]) -> list[str]:
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
            key = (logger.root_dir, logger.version)
            experiments.setdefault(key, []).append(logger)
    lines = []
    for (root, expected_version), members in experiments.items():
        # An unclaimed version is always a number: only a passed one can be text.
        version = make_version(Path(root), int(expected_version))
        for logger in members:
            logger.claim_version(version)
        if version != expected_version:
            lines.append(
                f"another run has taken version_{expected_version} in {root} at the same time: "
                f"this one is version_{version}"
            )
    return lines


def make_version(root: Path, version: int) -> int:
    """Make the directory of the first free version, from ``version`` on; exactly one process can make it."""
    while True:
        try:
            root.mkdir(parents=True, exist_ok=True)
            (root / f"version_{version}").mkdir()
        except FileExistsError:
            # A file stands where the root should be: no number would help, and the first write reports it.
            if not root.is_dir():
                return version
            version += 1
        except OSError:
            # No permission, or a full disk: training starts, and the first write reports it.
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

    name: str
    version: int | str | None
    log_dir: str | None
    save_dir: str | None
    root_dir: str | None

    def __init__(self, like: object = None) -> None:
        self.experiment = _Nothing()
        for name, default in _ATTRIBUTES.items():
            setattr(self, name, getattr(like, name, default))

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Discard the values.

        Args:
            metrics: ignored.
            step: ignored.
        """

    def log_hyperparams(
        self, params: Mapping[str, object], *args: object, **kwargs: object
    ) -> None:
        """Discard the hyperparameters.

        Args:
            params: ignored.
            args: ignored.
            kwargs: ignored.
        """

    def __getattr__(self, name: str) -> _Nothing:
        # copy, pickle and NumPy ask for special methods, and take any answer for an implementation.
        if name.startswith("__"):
            raise AttributeError(name)
        # Not `self.experiment`: while an object is unpickled it is not set yet, and this method would call itself.
        experiment: _Nothing = self.__dict__["experiment"]
        return experiment


class _Nothing:
    """Returns itself for every attribute, call and item."""

    def __getattr__(self, name: str) -> _Nothing:
        # As in `DummyLogger`: no special method exists here.
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: object, **kwargs: object) -> _Nothing:
        return self

    def __getitem__(self, key: object) -> _Nothing:
        return self

    def __setitem__(self, key: object, value: object) -> None:
        """Nothing is kept."""
