"""Locations of files: a local path, or a URL of a storage that fsspec can access."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path, PurePath
from typing import Any, Final, TypeAlias, final
from urllib.parse import unquote, urlsplit

from trainer_kit.core.display import mask_secrets
from trainer_kit.core.errors import ConfigurationError, did_you_mean

__all__ = ["Location", "RemotePath", "absolute", "is_url", "locate"]

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+)://(.*)", re.DOTALL)
_LOCAL: Final = ("file", "local")
_TIMES: Final = ("mtime", "LastModified", "last_modified", "updated", "created")
"""What storages call the time of a file."""
_CHUNK: Final = 4 << 20


@final
@dataclass(frozen=True, order=True)
class RemotePath(os.PathLike[str]):
    """A URL, with as much of `pathlib.Path` as checkpoints need.

    Object stores have no directories: one is there as long as something is in it. Every failure is an ``OSError``,
    whatever the storage's library raises; only ``FileNotFoundError`` says that something is not there.

    Attributes:
        url: without a slash at its end.

    Example:
        >>> path = locate("memory://runs") / "step-3"
        >>> path.name, str(path.parent), str(path.with_name("step-4"))
        ('step-3', 'memory://runs', 'memory://runs/step-4')
    """

    url: str
    _known: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    def __fspath__(self) -> str:
        return self.url

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str | PurePath) -> RemotePath:
        return RemotePath(f"{self.url}{'' if self.url.endswith('://') else '/'}{name}")

    @property
    def name(self) -> str:
        """The last component."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """What it is in; a URL without any path is in itself."""
        start, path = _split(self.url)
        return RemotePath(start + path.rpartition("/")[0])

    def with_name(self, name: str) -> RemotePath:
        """Its sibling of this name."""
        return self.parent / name

    def lstat(self) -> os.stat_result:
        """Kind, size in bytes and time; of an entry of `iterdir` as its directory was listed."""
        info = self._info()
        mode = stat.S_IFDIR if info.get("type") == "directory" else stat.S_IFREG
        size, time = int(info.get("size") or 0), _time(info)
        return os.stat_result((mode, 0, 0, 1, 0, 0, size, time, time, time), {"st_mtime_ns": int(time * 1e9)})

    stat = lstat  # a storage has no links

    def exists(self) -> bool:
        """Whether something is there; an error if the storage cannot tell."""
        return self._kind() is not None

    def is_dir(self) -> bool:
        """Whether something is in it."""
        return self._kind() == "directory"

    def is_file(self) -> bool:
        """Whether it is a file."""
        return self._kind() not in (None, "directory")

    def is_symlink(self) -> bool:
        """Never: a storage has no links."""
        return False

    def iterdir(self) -> Iterator[RemotePath]:
        """What is directly in it, as the storage lists it now."""
        with _storage(self.url) as (storage, path):
            storage.invalidate_cache(path)
            entries = storage.ls(path, detail=True)
        for info in entries:
            where = info["name"].rstrip("/")
            # Some storages mark a directory by an empty file with the same name.
            if where and where != path.rstrip("/"):
                yield RemotePath((self / where.rpartition("/")[2]).url, info)

    def mkdir(self) -> None:
        """Make it and its parents, where a storage has directories."""
        with _storage(self.url) as (storage, path):
            storage.makedirs(path, exist_ok=True)

    def read_bytes(self) -> bytes:
        """The whole content."""
        with _storage(self.url) as (storage, path):
            return bytes(storage.cat_file(path))

    def read_chunks(self, size: int = _CHUNK) -> Iterator[bytes]:
        """The content, at most ``size`` bytes at a time."""
        with _storage(self.url) as (storage, path):
            file = storage.open(path, "rb")
        try:
            while True:
                with _as_os_error():
                    chunk = file.read(size)
                if not chunk:
                    return
                yield chunk
        finally:
            with suppress(Exception):
                file.close()

    def fetch_to(self, file: Path) -> None:
        """Copy a file to this machine, as fast as its storage can."""
        with _storage(self.url) as (storage, path):
            storage.get_file(path, str(file))

    def write_chunks(self, chunks: Iterable[Any]) -> None:
        """Write a file in a stream; after an error something may stand there, in part."""
        size = 0
        with _storage(self.url) as (storage, path):
            file = storage.open(path, "wb")
        try:
            for chunk in chunks:
                size += len(chunk)
                with _as_os_error():
                    file.write(chunk)
            with _as_os_error():
                file.close()
        except BaseException:
            with suppress(Exception):
                file.discard()
            with suppress(Exception):
                file.close()
            raise
        there = self.lstat().st_size
        if there != size:
            raise OSError(f"{there} of {size} bytes arrived")

    def write_bytes(self, data: bytes, *, new: bool = False) -> None:
        """Put a small file there in one request: whole or not at all, where the storage can.

        Raises:
            FileExistsError: with ``new``, if it is there. Not every storage can tell two that try at the same time.
        """
        if new and self.exists():
            raise FileExistsError(self.url)
        with _storage(self.url) as (storage, path):
            if new:
                with suppress(TypeError, NotImplementedError):  # a storage that knows no modes
                    storage.pipe_file(path, data, mode="create")
                    return
            storage.pipe_file(path, data)

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete a file."""
        try:
            with _storage(self.url) as (storage, path):
                storage.rm_file(path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def rmdir(self) -> None:
        """Delete an empty directory, where a storage has them."""
        with suppress(Exception):
            storage, path = _reach(self.url)
            storage.rmdir(path)

    def copy_to(self, target: RemotePath) -> None:
        """Copy a file within its storage."""
        with _storage(self.url) as (storage, path):
            storage.cp_file(path, _reach(target.url)[1])

    def _kind(self) -> str | None:
        try:
            return str(self._info().get("type"))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _info(self) -> Mapping[str, Any]:
        if self._known is not None:
            return self._known
        with _storage(self.url) as (storage, path):
            storage.invalidate_cache(path)
            info: Mapping[str, Any] = storage.info(path)
            return info


Location: TypeAlias = Path | RemotePath
"""A path of this machine, or a URL."""


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether this is a URL, ``file://`` among them.

    Example:
        >>> is_url("s3://bucket/run"), is_url("runs/1"), is_url("file:///runs")
        (True, False, True)
    """
    return "://" in os.fspath(path)


def locate(path: str | os.PathLike[str]) -> Location:
    """The location that ``path`` names: a local path for a plain one and for a ``file://`` URL, else a `RemotePath`.

    ``~`` at the start of a plain path is the home directory.

    Raises:
        ConfigurationError: for a URL of an unknown protocol, of one whose package is not installed, or with a password.

    Example:
        >>> locate("runs/1").name, locate("file:///runs/a%20b").name, locate("memory://runs/1/").name
        ('1', 'a b', '1')
    """
    if isinstance(path, RemotePath):
        return path
    text = os.fspath(path)
    if "://" not in text:
        return Path(os.path.expanduser(text))
    match = _URL.fullmatch(text)
    if match is None or "::" in text:
        raise ConfigurationError(
            "this URL is not understood", found=mask_secrets(text), fix="write it as protocol://path, without a chain"
        )
    protocol = match[1].lower()
    if protocol in _LOCAL:
        return _local(text)
    shown = mask_secrets(text)
    if shown != text:
        raise ConfigurationError(
            "a password in a URL would stand in logs and checkpoints",
            found=shown,
            fix="leave it out, and put it where the storage's library looks for it (its environment variables, or "
            "fsspec's configuration)",
        )
    _check_protocol(protocol, text)
    start, rest = _split(text)
    return RemotePath(start + rest.rstrip("/"))


def absolute(path: str | os.PathLike[str]) -> Location:
    """As `locate`, a path of this machine in full and without ``..``."""
    found = locate(path)
    return found if isinstance(found, RemotePath) else Path(os.path.abspath(found))


def _split(url: str) -> tuple[str, str]:
    start, mark, rest = url.partition("://")
    return start + mark, rest


def _local(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise ConfigurationError(
            "a file:// URL names an absolute path of this machine", found=url, fix=f"file:///{parts.netloc}{parts.path}"
        )
    path = unquote(url.partition("://")[2].removeprefix("localhost"))
    return Path(path[1:] if re.match(r"/[A-Za-z]:", path) and os.name == "nt" else path)


def _check_protocol(protocol: str, url: str) -> None:
    import fsspec

    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError as error:
        raise ConfigurationError(
            f"no storage is reached by {protocol}://",
            found=url,
            fix=did_you_mean(protocol, fsspec.available_protocols()),
        ) from error
    except ImportError as error:
        missing = getattr(error.__cause__, "name", None)
        raise ConfigurationError(
            f"the package for {protocol}:// is not installed",
            found=f"{url}: {error}",
            fix=None if missing is None else f"pip install {missing.partition('.')[0]}",
        ) from error


def _reach(url: str) -> tuple[Any, str]:
    """The storage, of which fsspec keeps one for each, and the path in it."""
    from fsspec.core import url_to_fs

    storage, path = url_to_fs(url)
    return storage, str(path)


@contextmanager
def _storage(url: str) -> Iterator[tuple[Any, str]]:
    """The storage of a URL and the path in it; every failure inside is an ``OSError``."""
    with _as_os_error():
        yield _reach(url)


@contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # each storage library has its own error types
        raise OSError(f"{type(error).__name__}: {error}") from error


def _time(info: Mapping[str, Any]) -> float:
    for name in _TIMES:
        value = info.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return 0.0
