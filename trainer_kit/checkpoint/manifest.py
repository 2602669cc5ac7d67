"""``manifest.json`` lists the files of a checkpoint. A directory without a valid manifest is not a checkpoint."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
import time
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Final

from trainer_kit.checkpoint.files import (
    FileEntry,
    checksum,
    named_failure,
    read_file,
    read_start,
    stated_size,
)
from trainer_kit.core.display import in_units
from trainer_kit.core.errors import CheckpointError, MissingCheckpointError
from trainer_kit.core.location import Location, RemotePath

__all__ = [
    "DAMAGED",
    "DOCUMENT",
    "FILE_NAME",
    "LAYOUT",
    "MANIFEST",
    "MAX_DOCUMENT_BYTES",
    "REPLACEMENT",
    "SHARD",
    "FileEntries",
    "Manifest",
    "check_content",
    "check_files",
    "check_sizes",
    "commit_number",
    "digest",
    "dump_manifest",
    "files_directory",
    "files_of_part",
    "has_library_manifest",
    "is_library_file",
    "is_sharded",
    "listed_files",
    "load_json",
    "new_manifest",
    "next_commit",
    "read_json",
    "read_manifest",
    "was_checkpoint",
]

Manifest = dict[str, Any]
"""The content of a manifest, as `new_manifest` makes it."""
FileEntries = dict[str, FileEntry]
"""What a manifest lists of each file, by its name; of a shard also its number."""
MANIFEST: Final = "manifest.json"
DOCUMENT: Final = "state.json"
MAX_DOCUMENT_BYTES: Final = 256 << 20
"""Bytes of a ``state.json``; the parsed content takes up to twenty times as much memory."""
LAYOUT: Final = "layout.json"
SHARD: Final = ".safetensors"
FILE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
"""File names that a manifest may list: not hidden, and without a separator."""
REPLACEMENT: Final = re.compile(r"again-[0-9a-f]{8}")
"""Directories within a checkpoint at a URL that was overwritten: one of them holds its files."""
DAMAGED: Final = re.compile(r".+\.damaged(-\d+)?", re.DOTALL)
"""Names of damaged checkpoints that were set aside."""

_MAX_BYTES: Final = 64 << 20
"""Bytes of a manifest."""
# Joined: the architecture test reads a literal with a dot as an import.
_FORMAT: Final = ".".join(("trainer_kit", "checkpoint"))
_PLAIN: Final = 1
"""Version of a checkpoint that one process wrote: a part has one file or none."""
_SHARDED: Final = 2
"""Version of a sharded checkpoint: each rank wrote its own files, and ``layout.json`` lists the chunks in them."""

_HEAD_BYTES: Final = 128
"""Bytes at the start of a manifest that hold its format and the number of its commit."""
_COMMITTED: Final = re.compile(rb'"committed": (\d{1,18}),')
_LATEST_COMMIT: Final = 253402300799 * 10**6
"""The last microsecond that a datetime can represent; a larger number was not written by this library."""

_FIX: Final = (
    "use another checkpoint, and let `trainer-kit checkpoint verify` look at this one"
)


def new_manifest(
    files: FileEntries,
    parts: Mapping[str, str | None] | Mapping[str, list[str]],
    info: object,
    versions: dict[str, str],
    committed: int,
    shards: int | None = None,
    extra: Mapping[str, object] | None = None,
) -> Manifest:
    """Create a manifest's content. Apart from ``committed``, equal states give equal bytes.

    Args:
        files: size and checksum by file name; for a rank's file also the rank's number, from 1, as ``shard``.
        parts: the file of each part; of a sharded checkpoint its files.
        info: encoded.
        versions: of the libraries that write the checkpoint.
        committed: from `next_commit`.
        shards: the number of ranks that write a sharded checkpoint; None for one process.
        extra: entries of files that hooks wrote, by path; None if no hooks may write.
    """
    version = _SHARDED
    if shards is None:
        version = _PLAIN
    # Format and number first: `has_library_manifest` and `commit_number` read only the first `_HEAD_BYTES` of the file.
    manifest: Manifest = {
        "format": _FORMAT,
        "version": version,
        "committed": committed,
        "info": info,
        "versions": versions,
    }
    if shards is not None:
        manifest["shards"] = shards
    manifest["parts"] = parts
    manifest["files"] = files
    if extra is not None:
        manifest["extra"] = extra
    return manifest


def next_commit(directory: Location) -> int:
    """Return the number of a commit in ``directory``: it is larger than the number of every checkpoint there.

    It is the present time in microseconds since 1970, so that commits in different directories compare too, or one more
    than the highest number in the directory if a clock was set back. At a URL it is the time.
    """
    now = time.time_ns() // 1000
    # At a URL each manifest would cost a request.
    if isinstance(directory, RemotePath) or not directory.is_dir():
        return now
    # Clocks are set back, and differ between machines that write to one directory.
    numbers = [commit_number(entry) or 0 for entry in directory.iterdir()]
    number = max(now, max(numbers, default=0) + 1)
    return min(number, _LATEST_COMMIT)


def commit_number(path: Location) -> int | None:
    """Return the number of the commit that wrote the checkpoint at ``path``; None if its manifest does not show it.

    Only the start of the manifest is read. Checkpoints of earlier versions have no number.
    """
    try:
        match = _COMMITTED.search(read_start(path / MANIFEST, _HEAD_BYTES))
    except OSError:
        return None
    if match is None:
        return None
    number = int(match[1])
    if number > _LATEST_COMMIT:
        return None
    return number


def dump_manifest(content: Manifest) -> bytes:
    """Return the bytes of the manifest, with the SHA-256 of its canonical JSON."""
    signed = {**content, "sha256": digest(content)}
    text = json.dumps(signed, indent=1, allow_nan=False) + "\n"
    return text.encode()


def read_manifest(path: Location) -> Manifest:
    """Return the verified manifest of the checkpoint at ``path``; the files that it lists are not checked.

    Raises:
        CheckpointError: the manifest is missing, damaged, foreign, or of a newer format.
    """
    file = path / MANIFEST
    try:
        mode = file.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise _missing_manifest(path) from None
    except OSError as error:
        raise CheckpointError(
            file, None, f"the manifest cannot be read: {error}"
        ) from error
    if not stat.S_ISREG(mode):
        raise CheckpointError(
            file, None, "the manifest is not a regular file", fix=_FIX
        )
    with named_failure(file, "the manifest cannot be read"):
        raw = read_file(file, _MAX_BYTES)
    manifest = load_json(file, raw)
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise CheckpointError(
            file,
            "format",
            "not a trainer_kit checkpoint, or its manifest is damaged",
            fix=_FIX,
        )
    # The checksum is over the content without itself.
    recorded = manifest.pop("sha256", None)
    try:
        # Compare the bytes too: some changes of the text do not change the parsed content.
        unchanged = recorded == digest(manifest) and raw == dump_manifest(manifest)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(file, None, f"damaged JSON: {error}", fix=_FIX) from error
    if not unchanged:
        raise CheckpointError(
            file, "sha256", "the manifest was changed after it was written", fix=_FIX
        )
    version = manifest.get("version")
    # After the checksum: only an undamaged manifest of another version asks for an upgrade.
    if type(version) is not int or version not in (_PLAIN, _SHARDED):
        reason = f"format {version!r}, this library reads {_PLAIN} and {_SHARDED}"
        raise CheckpointError(file, "version", reason, fix="upgrade trainer_kit")
    _check_shape(file, manifest)
    return manifest


def _missing_manifest(path: Location) -> CheckpointError:
    """The error for a path without a manifest: what is there instead."""
    if path.is_dir():
        reason = "not a checkpoint: it has no manifest.json"
        if was_checkpoint(path):
            return CheckpointError(path, None, reason, fix=_FIX)
        return MissingCheckpointError(path, reason)
    if path.exists():
        return CheckpointError(path, None, "this is a file, not a checkpoint directory")
    return MissingCheckpointError(path, "this path contains no checkpoint")


def files_directory(path: Location, manifest: Manifest) -> Location:
    """Return the directory of the files that the manifest at ``path`` lists."""
    # Only of a checkpoint at a URL that was overwritten, see `trainer_kit.checkpoint.remote`.
    within: str | None = manifest.get("within")
    if within is None:
        return path
    return path / within


def listed_files(manifest: Manifest) -> FileEntries:
    """Return the entries of all files, including those that hooks wrote."""
    return {**manifest["files"], **manifest.get("extra", {})}


def check_files(path: Location, manifest: Manifest) -> None:
    """Check that exactly the listed files exist, are regular and have the listed size; read no content.

    In a checkpoint with ``extra`` further names are ignored: other programs may write there.

    Raises:
        CheckpointError: naming the missing, foreign or resized file.
    """
    files = manifest["files"]
    # One listing for all: at a URL each look at a file would cost a request.
    statuses = _statuses(path)
    # In both directions: a file that is not listed may be of another checkpoint that was copied over this one.
    for name, status in sorted(statuses.items()):
        is_listed = name == MANIFEST or name in files
        if "extra" in manifest and not is_listed:
            continue
        if not stat.S_ISREG(status.st_mode):
            kind = "not a regular file"
            if stat.S_ISLNK(status.st_mode):
                kind = "a symbolic link"
            raise CheckpointError(
                path / name, None, f"{kind}, which a checkpoint never holds", fix=_FIX
            )
        if not is_listed:
            raise CheckpointError(
                path / name,
                None,
                "an unexpected file, not in the manifest",
                fix="move it elsewhere",
            )
    for name, entry in files.items():
        if name not in statuses:
            reason = "the file is missing"
            if "shard" in entry:
                checkpoint = _checkpoint_name(path)
                reason = (
                    f"{checkpoint} lacks shard {entry['shard']} of {manifest['shards']}"
                )
            raise CheckpointError(path / name, None, reason, fix=_FIX)
        size = statuses[name].st_size
        if size != entry["size"]:
            reason = f"{size} bytes, but {entry['size']} were written"
            raise CheckpointError(path / name, None, reason, fix=_FIX)
    for name, entry in manifest.get("extra", {}).items():
        _check_extra(path, name, entry["size"])


def _statuses(directory: Location) -> dict[str, os.stat_result]:
    """The status of each entry of a checkpoint's directory, by name."""
    with named_failure(directory, "the directory cannot be read"):
        statuses = {entry.name: entry.lstat() for entry in directory.iterdir()}
    # A checkpoint at a URL may be in the process of being replaced: the new files lie in a directory within it.
    if isinstance(directory, RemotePath):
        for name in [name for name in statuses if REPLACEMENT.fullmatch(name)]:
            del statuses[name]
    return statuses


def _check_extra(path: Location, name: str, size: int) -> None:
    *directories, _ = PurePosixPath(name).parts
    parent = path
    with named_failure(path / name, "the file is missing", _FIX):
        # Each directory on the way: a link anywhere could lead to a file outside of the checkpoint.
        for directory in directories:
            parent = parent / directory
            if stat.S_ISLNK(parent.lstat().st_mode):
                raise CheckpointError(
                    parent,
                    None,
                    "a symbolic link, which a checkpoint never holds",
                    fix=_FIX,
                )
        status = (path / name).lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_size != size:
        raise CheckpointError(
            path / name,
            None,
            f"it is not the file of {size} bytes that was written",
            fix=_FIX,
        )


def _checkpoint_name(files_directory: Location) -> str:
    """The name of the checkpoint whose files lie in this directory."""
    directory = files_directory
    if not isinstance(directory, RemotePath):
        directory = directory.absolute()
    if REPLACEMENT.fullmatch(directory.name):
        return directory.parent.name
    return directory.name


def check_sizes(
    path: Location,
    manifest: Manifest,
    names: list[str],
) -> None:
    """Check the sizes in the manifest against the files' headers, before any content is read or fetched.

    Raises:
        CheckpointError: naming a file that is larger than the tensors in its header, or than a description may be.
    """
    for name in names:
        # Files of hooks may have any content.
        if name not in manifest["files"]:
            continue
        size = manifest["files"][name]["size"]
        # Parsed JSON takes many times as much memory as its text.
        if name in (DOCUMENT, LAYOUT) and size > MAX_DOCUMENT_BYTES:
            reason = f"{in_units(size)}, where at most {in_units(MAX_DOCUMENT_BYTES)} are written"
            raise CheckpointError(path / name, None, reason, fix=_FIX)
        if not name.endswith(SHARD):
            continue
        try:
            with named_failure(path / name, "the file cannot be read", _FIX):
                stated = stated_size(path / name)
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            reason = f"damaged: it does not begin with a header of tensors: {type(error).__name__}: {error}"
            raise CheckpointError(path / name, None, reason, fix=_FIX) from error
        if stated != size:
            reason = (
                f"damaged: {size} bytes, but the tensors in its header end at {stated}"
            )
            raise CheckpointError(path / name, None, reason, fix=_FIX)


def check_content(
    path: Location,
    manifest: Manifest,
    names: list[str],
) -> None:
    """Check that the named files hold the bytes that were written; compare sizes before reading any content.

    Raises:
        CheckpointError: naming the damaged file.
    """
    # Before any content is read, which takes long for a large file.
    check_sizes(path, manifest, names)
    for name in names:
        with named_failure(path / name, "the file cannot be read", _FIX):
            actual = checksum(path / name)
        recorded = listed_files(manifest)[name]["xxh3_64"]
        if actual != recorded:
            raise CheckpointError(
                path / name,
                None,
                f"damaged: checksum {actual}, but {recorded} was written",
                fix=_FIX,
            )


def is_sharded(manifest: Manifest) -> bool:
    """Whether several ranks wrote the checkpoint, each its chunks."""
    return bool(manifest["version"] == _SHARDED)


def files_of_part(manifest: Manifest, part_name: str) -> list[str]:
    """Return the names of the files with a part's tensors."""
    files = manifest["parts"][part_name]
    if files is None:
        return []
    if isinstance(files, list):
        return list(files)
    return [files]


def has_library_manifest(path: Location) -> bool:
    """Whether a directory is or was a checkpoint of this library, so that it may be deleted."""
    file = path / MANIFEST
    try:
        if path.is_symlink() or not stat.S_ISREG(file.lstat().st_mode):
            return False
        # Its start is enough: a damaged checkpoint must be recognized too.
        return f'"{_FORMAT}"'.encode() in read_start(file, _HEAD_BYTES)
    except OSError:
        return False


def is_library_file(file: Location) -> bool:
    """Whether this is a regular file whose name this library gives."""
    return _is_library_name(file.name) and file.is_file() and not file.is_symlink()


def _is_library_name(name: str) -> bool:
    return name in (MANIFEST, DOCUMENT, LAYOUT) or name.endswith(SHARD)


def was_checkpoint(path: Location) -> bool:
    """Like `has_library_manifest`, but also for a directory with a damaged or missing manifest and no foreign names."""
    # At a URL a directory without a manifest is an unfinished upload.
    if isinstance(path, RemotePath) and not (path / MANIFEST).exists():
        return False
    if has_library_manifest(path):
        return True
    try:
        if path.is_symlink() or not path.is_dir():
            return False
        names = [entry.name for entry in path.iterdir()]
    except OSError:
        return False
    # Tensors alone may be a model of another library, which this one must not set aside or delete.
    has_description = MANIFEST in names or DOCUMENT in names
    return has_description and all(map(_is_library_name, names))


def read_json(file: Location, max_bytes: int = MAX_DOCUMENT_BYTES) -> Any:
    """Read a file of at most ``max_bytes`` bytes as `load_json` does.

    Raises:
        CheckpointError: the file cannot be read, or is not such JSON.
    """
    with named_failure(file, "the file cannot be read"):
        return load_json(file, read_file(file, max_bytes))


def load_json(file: Location, raw: bytes) -> Any:
    """Parse JSON strictly: no NaN, no infinite or very large numbers, no repeated keys.

    Raises:
        CheckpointError: ``raw`` is not such JSON.
    """
    try:
        return json.loads(
            raw.decode(),
            parse_constant=_refuse_constant,
            parse_int=_integer,
            parse_float=_finite,
            object_pairs_hook=_unique_keys,
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(file, None, f"damaged JSON: {error}", fix=_FIX) from error


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _integer(text: str) -> int:
    # int() takes time quadratic in the digits, and no number of 64 bits has more than 20 characters.
    if len(text) <= 20:
        value = int(text)
        if -(2**63) <= value < 2**63:
            return value
    raise ValueError(f"an integer of {len(text)} digits is beyond 64 bits")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"a number beyond all floats: {text[:20]}")
    return value


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("an object has the same key twice")
    return content


def digest(content: object) -> str:
    """Return the SHA-256, in hex, of the canonical JSON of plain data."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _check_shape(file: Location, manifest: Manifest) -> None:
    """Raise where a manifest has another shape than `new_manifest` makes, on which all other functions rely."""
    # The checksum shows that the bytes are those that were written, and not by whom: names may be an attacker's.
    within = manifest.get("within")
    if within is not None and not (
        isinstance(within, str) and REPLACEMENT.fullmatch(within)
    ):
        raise CheckpointError(
            file,
            "within",
            "a directory name that could lead out of the checkpoint",
            fix=_FIX,
        )
    files, parts = manifest.get("files"), manifest.get("parts")
    if (
        not isinstance(files, dict)
        or not isinstance(parts, dict)
        or DOCUMENT not in files
    ):
        raise CheckpointError(
            file, "files", "the manifest lists no files or no parts", fix=_FIX
        )
    for name, entry in files.items():
        # The manifest cannot list itself: its checksum would be of its own bytes.
        if not FILE_NAME.fullmatch(name) or name == MANIFEST:
            raise CheckpointError(
                file,
                f"files.{name}",
                "a file name that could lead out of the checkpoint",
                fix=_FIX,
            )
        _check_entry(file, f"files.{name}", entry)
    _check_extra_names(file, manifest)
    if is_sharded(manifest):
        count = manifest.get("shards")
        if type(count) is not int or count < 1 or LAYOUT not in files:
            raise CheckpointError(
                file,
                "shards",
                "a sharded checkpoint without number of shards or layout",
                fix=_FIX,
            )
    for part_name in parts:
        _check_files_of_part(file, manifest, part_name)


def _check_files_of_part(
    file: Location,
    manifest: Manifest,
    part_name: str,
) -> None:
    files = manifest["files"]
    value = manifest["parts"][part_name]
    sharded = is_sharded(manifest)
    names = files_of_part(manifest, part_name)
    types: tuple[type, ...] = (str, type(None))
    if sharded:
        types = (list,)
    if not isinstance(value, types):
        # No valid name, so that the error shows it.
        names = [value]
    for name in names:
        # Other types may not be hashable.
        entry = None
        if isinstance(name, str):
            entry = files.get(name)
        if entry is None:
            raise CheckpointError(
                file, f"parts.{part_name}", f"its file {name!r} is not listed", fix=_FIX
            )
        if not sharded:
            continue
        shard, count = entry.get("shard"), manifest["shards"]
        if type(shard) is not int or not 0 < shard <= count:
            raise CheckpointError(
                file, f"files.{name}", f"it is not one of {count} shards", fix=_FIX
            )


def _check_extra_names(file: Location, manifest: Manifest) -> None:
    extra = manifest.get("extra", {})
    if not isinstance(extra, dict):
        raise CheckpointError(file, "extra", "not a list of files", fix=_FIX)
    # A file of a hook must not take the place of one of the checkpoint's own.
    reserved = (MANIFEST, *manifest["files"])
    for name, entry in extra.items():
        segments = name.split("/")
        leads_out = "\0" in name or not {"", ".", ".."}.isdisjoint(segments)
        if leads_out or segments[0] in reserved:
            raise CheckpointError(
                file,
                f"extra.{name}",
                "a path that could lead out of the checkpoint",
                fix=_FIX,
            )
        _check_entry(file, f"extra.{name}", entry)


def _check_entry(file: Location, key: str, entry: object) -> None:
    if (
        not isinstance(entry, dict)
        or type(entry.get("size")) is not int
        or "xxh3_64" not in entry
    ):
        raise CheckpointError(file, key, "an entry without size and checksum", fix=_FIX)
