"""File locations: a local path, or the URL of a storage that fsspec can access."""

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

__all__ = ["Location", "RemotePath", "absolute", "is_url", "locate", "locate_root"]

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+)://(.*)", re.DOTALL)
_LOCAL: Final = ("file", "local")
_TIMES: Final = ("mtime", "LastModified", "last_modified", "updated", "created")
"""The keys under which storages report the modification time of a file."""
_CHUNK: Final = 4 << 20
_FileInfo: TypeAlias = Mapping[str, Any]
"""What fsspec tells of a file: ``name``, ``size``, ``type``, and keys of the storage's own."""
_Storage: TypeAlias = Any
"""A file system of fsspec, which has no type annotations."""


@final
@dataclass(frozen=True, order=True)
class RemotePath(os.PathLike[str]):
    """A URL with the part of the `pathlib.Path` interface that checkpoints use.

    Object stores have no directories: a directory exists while it has an entry. Every failure is an ``OSError``,
    whatever the storage's library raises; ``FileNotFoundError`` alone means that the entry does not exist.

    Attributes:
        url: the URL, without a slash at its end.

    Example:
        >>> path = locate("memory://runs") / "step-3"
        >>> path.name, str(path.parent), str(path.with_name("step-4"))
        ('step-3', 'memory://runs', 'memory://runs/step-4')
    """

    url: str
    # Of an entry of `iterdir`: its part of the listing, so that `stat` of each entry makes no request.
    _known: _FileInfo | None = field(default=None, compare=False, repr=False)

    def __fspath__(self) -> str:
        return self.url

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str | PurePath) -> RemotePath:
        if self.url.endswith("://"):
            return RemotePath(f"{self.url}{name}")
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """The last component."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The parent directory; a URL without a path is its own parent."""
        start, path = _split(self.url)
        return RemotePath(start + path.rpartition("/")[0])

    def with_name(self, name: str) -> RemotePath:
        """The same location with another last component."""
        return self.parent / name

    def lstat(self) -> os.stat_result:
        """File type, size in bytes and modification time; an entry of `iterdir` has those of the listing."""
        info = self._info()
        mode = stat.S_IFREG
        if info.get("type") == "directory":
            mode = stat.S_IFDIR
        size = int(info.get("size") or 0)
        time = _modification_time(info)
        fields = (mode, 0, 0, 1, 0, 0, size, time, time, time)
        return os.stat_result(fields, {"st_mtime_ns": int(time * 1e9)})

    # A storage has no links.
    stat = lstat

    def exists(self) -> bool:
        """Whether a file or directory exists here; raises ``OSError`` if the storage cannot tell."""
        return self._kind() is not None

    def is_dir(self) -> bool:
        """Whether this is a directory: on an object store, a prefix with an entry."""
        return self._kind() == "directory"

    def is_file(self) -> bool:
        """Whether this is a file."""
        return self._kind() not in (None, "directory")

    def is_symlink(self) -> bool:
        """Never: a storage has no links."""
        return False

    def iterdir(self) -> Iterator[RemotePath]:
        """The entries of this directory, listed by the storage at each call."""
        with _storage(self.url) as (storage, path):
            # fsspec caches listings, and other processes write here too.
            storage.invalidate_cache(path)
            entries = storage.ls(path, detail=True)
        directory = path.rstrip("/")
        for info in entries:
            entry = info["name"].rstrip("/")
            # Some storages mark a directory by an empty file with the same name.
            if not entry or entry == directory:
                continue
            child = self / entry.rpartition("/")[2]
            yield RemotePath(child.url, info)

    def mkdir(self) -> None:
        """Create this directory and its parents, if the storage has directories."""
        with _storage(self.url) as (storage, path):
            storage.makedirs(path, exist_ok=True)

    def read_bytes(self) -> bytes:
        """The content of the file."""
        with _storage(self.url) as (storage, path):
            return bytes(storage.cat_file(path))

    def read_chunks(self, size: int = _CHUNK) -> Iterator[bytes]:
        """The content of the file in chunks of at most ``size`` bytes."""
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
            # Everything is read, or an error is on its way.
            with suppress(Exception):
                file.close()

    def fetch_to(self, file: Path) -> None:
        """Download the file to a local path."""
        with _storage(self.url) as (storage, path):
            storage.get_file(path, str(file))

    def write_chunks(self, chunks: Iterable[bytes | memoryview]) -> None:
        """Write the file as a stream; after an error an incomplete file may remain.

        Raises:
            OSError: also if the storage reports another size than was written.
        """
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
            # Not every storage can discard an upload; where it can, no part of a file remains.
            with suppress(Exception):
                file.discard()
            with suppress(Exception):
                file.close()
            raise
        # Otherwise a file that lost its end would be noticed only when it is read.
        stored = self.lstat().st_size
        if stored != size:
            raise OSError(f"{stored} of {size} bytes arrived")

    def write_bytes(self, data: bytes, *, new: bool = False) -> None:
        """Write a small file in one request, which is atomic where the storage supports that.

        Raises:
            FileExistsError: with ``new``, if the file exists. Not every storage detects two simultaneous writers.
        """
        if new and self.exists():
            raise FileExistsError(self.url)
        with _storage(self.url) as (storage, path):
            if new:
                # These errors mean that the storage has no exclusive mode.
                with suppress(TypeError, NotImplementedError):
                    storage.pipe_file(path, data, mode="create")
                    return
            # The check above is all that such a storage offers.
            storage.pipe_file(path, data)

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the file."""
        try:
            with _storage(self.url) as (storage, path):
                storage.rm_file(path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def rmdir(self) -> None:
        """Delete the empty directory, if the storage has directories."""
        # Object stores have none, and say so in different ways.
        with suppress(Exception):
            storage, path = _reach(self.url)
            storage.rmdir(path)

    def copy_to(self, target: RemotePath) -> None:
        """Copy the file within its storage."""
        with _storage(self.url) as (storage, path):
            # By the storage itself: no byte passes through this machine.
            storage.cp_file(path, _reach(target.url)[1])

    def _kind(self) -> str | None:
        try:
            return str(self._info().get("type"))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _info(self) -> _FileInfo:
        if self._known is not None:
            return self._known
        with _storage(self.url) as (storage, path):
            storage.invalidate_cache(path)
            info: _FileInfo = storage.info(path)
            return info


Location: TypeAlias = Path | RemotePath
"""A local path or a URL."""


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a URL, including ``file://``.

    Example:
        >>> is_url("s3://bucket/run"), is_url("runs/1"), is_url("file:///runs")
        (True, False, True)
    """
    return "://" in os.fspath(path)


def locate_root(directory: str | os.PathLike[str] | None) -> Location:
    """The location of a directory of runs: the working directory for None and an empty text."""
    if directory is None or directory == "":
        return locate(os.getcwd())
    return locate(directory)


def locate(path: str | os.PathLike[str]) -> Location:
    """Convert ``path`` to a location: plain paths and ``file://`` URLs become a local path, others a `RemotePath`.

    ``~`` at the start of a plain path is the home directory.

    Raises:
        ConfigurationError: if the protocol is unknown, its package is not installed, or the URL has a password.

    Example:
        >>> locate("runs/1").name, locate("file:///runs/a%20b").name, locate("memory://runs/1/").name
        ('1', 'a b', '1')
    """
    if isinstance(path, RemotePath):
        return path
    text = None
    if isinstance(path, (str, os.PathLike)):
        text = os.fspath(path)
    # Also bytes, which ``fspath`` passes on.
    if not isinstance(text, str):
        raise ConfigurationError(
            "this is not a path",
            found=repr(path),
            fix="pass a string or a pathlib.Path",
        )
    if "://" not in text:
        return Path(os.path.expanduser(text))
    match = _URL.fullmatch(text)
    # fsspec chains file systems by "::".
    if match is None or "::" in text:
        raise ConfigurationError(
            "this URL cannot be parsed",
            found=mask_secrets(text),
            fix="write it as protocol://path, without a chain",
        )
    protocol = match[1].lower()
    if protocol in _LOCAL:
        return _local(text)
    # A location is shown in messages and saved in checkpoints as it is.
    shown = mask_secrets(text)
    if shown != text:
        raise ConfigurationError(
            "a password in a URL would be written to logs and checkpoints",
            found=shown,
            fix="leave it out, and set it where the storage's library reads it (its environment variables, or "
            "fsspec's configuration)",
        )
    _check_protocol(protocol, text)
    start, remote_path = _split(text)
    return RemotePath(start + remote_path.rstrip("/"))


def absolute(path: str | os.PathLike[str]) -> Location:
    """Like `locate`, but a local path is made absolute and without ``..``."""
    location = locate(path)
    if isinstance(location, RemotePath):
        return location
    return Path(os.path.abspath(location))


def _split(url: str) -> tuple[str, str]:
    """The protocol with ``://``, and the path."""
    protocol, mark, path = url.partition("://")
    return protocol + mark, path


def _local(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise ConfigurationError(
            "a file:// URL names an absolute path of this machine",
            found=url,
            fix=f"file:///{parts.netloc}{parts.path}",
        )
    path = unquote(url.partition("://")[2].removeprefix("localhost"))
    # file:///C:/runs: the slash before a drive belongs to the URL.
    if os.name == "nt" and re.match(r"/[A-Za-z]:", path):
        path = path[1:]
    return Path(path)


def _check_protocol(protocol: str, url: str) -> None:
    # Here, so that runs on local paths never import it.
    import fsspec

    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError as error:
        raise ConfigurationError(
            f"{protocol}:// is an unknown storage protocol",
            found=url,
            fix=did_you_mean(protocol, fsspec.available_protocols()),
        ) from error
    except ImportError as error:
        missing = getattr(error.__cause__, "name", None)
        fix = None
        if missing is not None:
            fix = f"pip install {missing.partition('.')[0]}"
        raise ConfigurationError(
            f"the package for {protocol}:// is not installed",
            found=f"{url}: {error}",
            fix=fix,
        ) from error


def _reach(url: str) -> tuple[_Storage, str]:
    """The file system object, which fsspec caches, and the path in it."""
    from fsspec.core import url_to_fs

    storage, path = url_to_fs(url)
    return storage, str(path)


@contextmanager
def _storage(url: str) -> Iterator[tuple[_Storage, str]]:
    """The file system and path of a URL; failures inside the block become ``OSError``."""
    with _as_os_error():
        yield _reach(url)


@contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        # Each storage library has its own error types.
        raise OSError(f"{type(error).__name__}: {error}") from error


def _modification_time(info: _FileInfo) -> float:
    for name in _TIMES:
        value = info.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return 0.0
