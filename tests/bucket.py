"""A storage like an object store, in a directory of this machine, so that it outlives the process that writes to it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec import AbstractFileSystem


class Bucket(AbstractFileSystem):
    """``bucket://key``: no rename, no empty directories, an object is there once its upload is closed.

    Attributes:
        directory: where the objects are.
        done: (operation, key) of all that changed something, in order.
        before: called with the same before each of them; it may raise, or end the process.
        unreachable: whether every operation fails, looking as well.
        torn: what is written is seen while it is written, as on storages that are directories of some server.
    """

    protocol = "bucket"
    cachable = False
    directory: ClassVar[Path]
    done: ClassVar[list[tuple[str, str]]]
    before: ClassVar[Callable[[str, str], None]]
    unreachable: ClassVar[bool]
    torn: ClassVar[bool]

    @classmethod
    def open_at(
        cls,
        directory: Path,
        before: Callable[[str, str], None] | None = None,
        torn: bool = False,
    ) -> None:
        cls.directory, cls.done, cls.torn, cls.unreachable = directory, [], torn, False
        cls.before = staticmethod(before or (lambda operation, key: None))
        fsspec.register_implementation("bucket", cls, clobber=True)

    def _file(self, path: str) -> Path:
        if self.unreachable:
            raise ConnectionError("no route to host")
        return self.directory / self._strip_protocol(path)

    def act(self, operation: str, path: str) -> Path:
        file, key = self._file(path), self._strip_protocol(path)
        type(self).before(operation, key)
        self.done.append((operation, key))
        return file

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        file = self._file(path)
        if file.is_file():
            found = [file]
        else:
            found = [
                entry
                for entry in file.iterdir()
                if entry.is_file() or any(map(Path.is_file, entry.rglob("*")))
            ]
            if not found:
                raise FileNotFoundError(path)
        names = [str(entry.relative_to(self.directory)) for entry in found]
        if not detail:
            return names
        listed = []
        for name, entry in zip(names, found, strict=True):
            with suppress(
                FileNotFoundError
            ):  # a store lists in one go; here another process may delete meanwhile
                status, is_file = entry.stat(), entry.is_file()
                size = status.st_size if is_file else 0
                kind = "file" if is_file else "directory"
                listed.append(
                    {"name": name, "size": size, "type": kind, "mtime": status.st_mtime}
                )
        return listed

    def info(self, path: str, **_: Any) -> Any:
        file, key = self._file(path), self._strip_protocol(path)
        if file.is_dir():
            self.ls(path)
            return {"name": key, "size": 0, "type": "directory"}
        return self.ls(path)[0] if file.is_file() else self._missing(path)

    def _missing(self, path: str) -> Any:
        raise FileNotFoundError(path)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        if mode == "rb":
            return open(self._file(path), "rb")
        return Upload(self, path)

    def pipe_file(
        self, path: str, value: bytes, mode: str = "overwrite", **_: Any
    ) -> None:
        if mode == "create" and self._file(path).exists():
            raise FileExistsError(path)
        self._put(path, value)

    def _put(self, path: str, value: bytes) -> None:
        file = self.act("put", path)
        file.parent.mkdir(parents=True, exist_ok=True)
        if self.torn:
            half = len(value) // 2
            file.write_bytes(value[:half])
            type(self).before("rest of", self._strip_protocol(path))
            file.write_bytes(value)
            return
        work = self.directory / f".upload-{os.getpid()}"
        work.write_bytes(value)
        os.replace(work, file)

    def rm_file(self, path: str) -> None:
        self.act("delete", path).unlink()

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        target = self.act("copy", path2)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(self._file(path1).read_bytes())

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """There are none."""


class Upload(BytesIO):
    def __init__(self, bucket: Bucket, path: str) -> None:
        super().__init__()
        self.bucket, self.path = bucket, path
        self.discarded = False

    def write(self, data: Any) -> int:
        self.bucket._file(self.path)
        type(self.bucket).before("send", self.bucket._strip_protocol(self.path))
        return super().write(data)

    def discard(self) -> None:
        self.discarded = True

    def close(self) -> None:
        if not self.closed and not self.discarded:
            self.bucket._put(self.path, self.getvalue())
        super().close()

    def __exit__(self, *_: Any) -> None:
        self.close()
