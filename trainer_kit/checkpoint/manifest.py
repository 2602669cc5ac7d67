"""``manifest.json``: what a checkpoint consists of. A directory without a valid one is not a checkpoint."""

from __future__ import annotations

import hashlib
import json
import math
import re
import stat
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Final

from trainer_kit.checkpoint.files import checksum, read_file, stated_size
from trainer_kit.core.display import in_units
from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.location import Location, RemotePath

__all__ = [
    "AGAIN",
    "DAMAGED",
    "DOCUMENT",
    "DOCUMENT_MOST",
    "FILE_NAME",
    "LAYOUT",
    "MANIFEST",
    "SHARD",
    "check_content",
    "check_files",
    "check_sizes",
    "digest",
    "dump_manifest",
    "files_of",
    "is_ours",
    "is_sharded",
    "listed",
    "load_json",
    "may_be_ours",
    "new_manifest",
    "read_manifest",
    "shards_of",
    "was_checkpoint",
]

MANIFEST: Final = "manifest.json"
DOCUMENT: Final = "state.json"
DOCUMENT_MOST: Final = 256 << 20
"""Bytes of a ``state.json``: parsed, it takes up to twenty times as many."""
LAYOUT: Final = "layout.json"
SHARD: Final = ".safetensors"
FILE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
"""Names a manifest may list: nothing hidden, nothing with a separator."""
AGAIN: Final = re.compile(r"again-[0-9a-f]{8}")
"""Directories within a checkpoint at a URL that was written more than once: one of them holds its files."""
DAMAGED: Final = re.compile(r".+\.damaged(-\d+)?", re.DOTALL)
"""Names of checkpoints that were found damaged and set aside."""

_MOST: Final = 64 << 20  # bytes of a manifest
_FORMAT: Final = ".".join(("trainer_kit", "checkpoint"))  # a name on disk; written whole it would read as an import
_PLAIN, _SHARDED = 1, 2
"""Versions: a part is one file or none; ranks wrote a file each, and ``layout.json`` says what is where."""

_FIX: Final = "use another checkpoint, and let `trainer-kit checkpoint verify` look at this one"


def new_manifest(
    files: dict[str, Any],
    parts: Mapping[str, str | None] | Mapping[str, list[str]],
    info: Any,
    versions: dict[str, str],
    shards: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Any:
    """A manifest's content; nothing in it depends on the time or the machine, so equal states give equal bytes.

    Args:
        files: name to size, checksum and, of a rank's file, the rank's number from 1 as ``shard``.
        parts: name to file; of a sharded checkpoint to its files.
        info: encoded.
        versions: of the libraries that wrote it.
        shards: how many ranks wrote a sharded checkpoint; None for one that is not.
        extra: by path, entries of what others wrote into it; None where no others may.
    """
    sharded = {} if shards is None else {"shards": shards}
    others = {} if extra is None else {"extra": extra}
    return {
        "format": _FORMAT,
        "version": _PLAIN if shards is None else _SHARDED,
        "info": info,
        "versions": versions,
        **sharded,
        "parts": parts,
        "files": files,
        **others,
    }


def dump_manifest(content: dict[str, Any]) -> bytes:
    """The bytes of the manifest with its own SHA-256 inside, made over its canonical JSON."""
    return (json.dumps({**content, "sha256": digest(content)}, indent=1, allow_nan=False) + "\n").encode()


def read_manifest(path: Location) -> dict[str, Any]:
    """The manifest of the checkpoint at ``path``, itself verified; the files it lists are not looked at.

    Raises:
        CheckpointError: when there is none, or it is damaged, foreign, or of a newer format.
    """
    file = path / MANIFEST
    try:
        mode = file.lstat().st_mode
    except OSError as error:
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise CheckpointError(file, None, f"the manifest cannot be read: {error}") from error
        if path.is_dir():
            raise CheckpointError(path, None, "not a checkpoint: it has no manifest.json", fix=_FIX) from None
        reason = "this is a file, not a checkpoint directory" if path.exists() else "there is no checkpoint here"
        raise CheckpointError(path, None, reason) from None
    if not stat.S_ISREG(mode):
        raise CheckpointError(file, None, "the manifest is not a regular file", fix=_FIX)
    try:
        raw = read_file(file, _MOST)
    except OSError as error:
        raise CheckpointError(file, None, f"the manifest cannot be read: {error}") from error
    manifest = load_json(file, raw)
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise CheckpointError(file, "format", "not a trainer_kit checkpoint, or its manifest is damaged", fix=_FIX)
    recorded = manifest.pop("sha256", None)
    try:
        # The bytes are compared too: some changes of the text do not change what it says.
        unchanged = recorded == digest(manifest) and raw == dump_manifest(manifest)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(file, None, f"damaged JSON: {error}", fix=_FIX) from error
    if not unchanged:
        raise CheckpointError(file, "sha256", "the manifest was changed after it was written", fix=_FIX)
    version = manifest.get("version")
    if type(version) is not int or version not in (_PLAIN, _SHARDED):
        raise CheckpointError(
            file,
            "version",
            f"format {version!r}, this library reads {_PLAIN} and {_SHARDED}",
            fix="upgrade trainer_kit",
        )
    _check_shape(file, manifest)
    return manifest


def files_of(path: Location, manifest: dict[str, Any]) -> Location:
    """Where the files are that the manifest at ``path`` lists."""
    return path / manifest["within"] if "within" in manifest else path


def listed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of all files, those that others wrote into the checkpoint too."""
    return {**manifest["files"], **manifest.get("extra", {})}


def check_files(path: Location, manifest: dict[str, Any]) -> None:
    """Exactly the listed files are there, regular and of their size. Reads no content.

    Where others may write into the checkpoint (``extra``) further names are left alone.

    Raises:
        CheckpointError: naming the missing, foreign or resized file.
    """
    try:
        entries = [(entry.name, entry.lstat()) for entry in path.iterdir()]
    except OSError as error:
        raise CheckpointError(path, None, f"the directory cannot be read: {error}") from error
    # At a URL it may be under way to be replaced.
    found = {n: s for n, s in entries if not (isinstance(path, RemotePath) and AGAIN.fullmatch(n))}
    for name, status in sorted(found.items()):
        if "extra" in manifest and name not in manifest["files"] and name != MANIFEST:
            continue
        if not stat.S_ISREG(status.st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
            raise CheckpointError(path / name, None, f"{kind}, which a checkpoint never holds", fix=_FIX)
        if name != MANIFEST and name not in manifest["files"]:
            raise CheckpointError(path / name, None, "a foreign file, not in the manifest", fix="move it elsewhere")
    for name, entry in manifest["files"].items():
        if name not in found:
            number = entry.get("shard")
            lost = "the file is missing"
            if number is not None:
                lost = f"{_name(path)} lacks shard {number} of {manifest['shards']}"
            raise CheckpointError(path / name, None, lost, fix=_FIX)
        if found[name].st_size != entry["size"]:
            raise CheckpointError(
                path / name, None, f"{found[name].st_size} bytes, but {entry['size']} were written", fix=_FIX
            )
    for name, entry in manifest.get("extra", {}).items():
        _check_extra(path, name, entry["size"])


def _check_extra(path: Location, name: str, size: int) -> None:
    *directories, _ = PurePosixPath(name).parts
    place = path
    try:
        for directory in directories:
            place = place / directory
            if stat.S_ISLNK(place.lstat().st_mode):
                raise CheckpointError(place, None, "a symbolic link, which a checkpoint never holds", fix=_FIX)
        status = (path / name).lstat()
    except OSError as error:
        raise CheckpointError(path / name, None, f"the file is missing: {error.strerror or error}", fix=_FIX) from error
    if not stat.S_ISREG(status.st_mode) or status.st_size != size:
        raise CheckpointError(path / name, None, f"it is not the file of {size} bytes that was written", fix=_FIX)


def _name(path: Location) -> str:
    whole = path if isinstance(path, RemotePath) else path.absolute()
    return whole.parent.name if AGAIN.fullmatch(whole.name) else whole.name


def check_sizes(path: Location, manifest: dict[str, Any], names: list[str]) -> None:
    """The sizes in the manifest are those of such files, so that no more is read than a checkpoint can hold.

    Raises:
        CheckpointError: naming a file that is larger than the tensors in its header, or than a description may be.
    """
    for name in names:
        if name not in manifest["files"]:  # what hooks write may be anything
            continue
        size = manifest["files"][name]["size"]
        if name in (DOCUMENT, LAYOUT) and size > DOCUMENT_MOST:
            reason = f"{in_units(size)}, where at most {in_units(DOCUMENT_MOST)} are written"
            raise CheckpointError(path / name, None, reason, fix=_FIX)
        if not name.endswith(SHARD):
            continue
        try:
            stated = stated_size(path / name)
        except OSError as error:
            raise CheckpointError(path / name, None, f"the file cannot be read: {error}", fix=_FIX) from error
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            reason = f"damaged: it does not begin with a header of tensors: {type(error).__name__}: {error}"
            raise CheckpointError(path / name, None, reason, fix=_FIX) from error
        if stated != size:
            reason = f"damaged: {size} bytes, but the tensors in its header end at {stated}"
            raise CheckpointError(path / name, None, reason, fix=_FIX)


def check_content(path: Location, manifest: dict[str, Any], names: list[str]) -> None:
    """The listed files hold the bytes that were written. Sizes are compared before any content is read.

    Raises:
        CheckpointError: naming the damaged file.
    """
    check_sizes(path, manifest, names)
    for name in names:
        try:
            found = checksum(path / name)
        except OSError as error:
            raise CheckpointError(path / name, None, f"the file cannot be read: {error}", fix=_FIX) from error
        recorded = listed(manifest)[name]["xxh3_64"]
        if found != recorded:
            raise CheckpointError(path / name, None, f"damaged: checksum {found}, but {recorded} was written", fix=_FIX)


def is_sharded(manifest: Mapping[str, Any]) -> bool:
    """Whether several ranks wrote it, each its chunks."""
    return bool(manifest["version"] == _SHARDED)


def shards_of(manifest: Mapping[str, Any], part: str) -> list[str]:
    """The files with a part's tensors."""
    found = manifest["parts"][part]
    return list(found) if isinstance(found, list) else [] if found is None else [found]


def is_ours(path: Location) -> bool:
    """Whether a directory was once a checkpoint of this library, damaged or not: what may be deleted."""
    file = path / MANIFEST
    try:
        if path.is_symlink() or not stat.S_ISREG(file.lstat().st_mode):
            return False
        if isinstance(file, RemotePath):
            start = next(file.read_chunks(128), b"")
        else:
            with open(file, "rb") as stream:
                start = stream.read(128)
        return f'"{_FORMAT}"'.encode() in start
    except OSError:
        return False


def may_be_ours(file: Location) -> bool:
    """Whether this is a file with a name that this library gives."""
    return _named_as_ours(file) and file.is_file() and not file.is_symlink()


def _named_as_ours(file: Location) -> bool:
    return file.name in (MANIFEST, DOCUMENT, LAYOUT) or file.name.endswith(SHARD)


def was_checkpoint(path: Location) -> bool:
    """As `is_ours`, also where the manifest itself is damaged, gone, or something else than a file, but no other name
    is in the directory.
    """
    if isinstance(path, RemotePath) and not (path / MANIFEST).exists():
        return False  # there, what has none is an upload under way, or was one
    if is_ours(path):
        return True
    try:
        files: list[Any] = [] if path.is_symlink() or not path.is_dir() else list(path.iterdir())
    except OSError:  # nobody can say what it is
        return False
    return any(file.name in (MANIFEST, DOCUMENT) for file in files) and all(map(_named_as_ours, files))


def load_json(file: Location, raw: bytes) -> Any:
    """Parse JSON strictly.

    Raises:
        CheckpointError: for anything that is not JSON.
    """
    try:
        return json.loads(
            raw.decode(),
            parse_constant=_no_constant,
            parse_int=_integer,
            parse_float=_finite,
            object_pairs_hook=_without_twins,
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(file, None, f"damaged JSON: {error}", fix=_FIX) from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _integer(text: str) -> int:
    value = int(text) if len(text) <= 20 else 2**63  # the time that Python takes grows with the square of the digits
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"an integer of {len(text)} digits is beyond 64 bits")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"a number beyond all floats: {text[:20]}")
    return value


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return made


def digest(content: Any) -> str:
    """The SHA-256, in hex, of plain data as canonical JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _check_shape(file: Location, manifest: dict[str, Any]) -> None:
    within = manifest.get("within")
    if within is not None and not (isinstance(within, str) and AGAIN.fullmatch(within)):
        raise CheckpointError(file, "within", "a directory name that could lead out of the checkpoint", fix=_FIX)
    files, parts = manifest.get("files"), manifest.get("parts")
    if not isinstance(files, dict) or not isinstance(parts, dict) or DOCUMENT not in files:
        raise CheckpointError(file, "files", "the manifest lists no files or no parts", fix=_FIX)
    for name, entry in files.items():
        if not FILE_NAME.fullmatch(name) or name == MANIFEST:
            raise CheckpointError(file, f"files.{name}", "a file name that could lead out of the checkpoint", fix=_FIX)
        if not isinstance(entry, dict) or type(entry.get("size")) is not int or "xxh3_64" not in entry:
            raise CheckpointError(file, f"files.{name}", "an entry without size and checksum", fix=_FIX)
    _check_extra_names(file, manifest)
    if is_sharded(manifest):
        _check_shards(file, manifest)
        return
    for part, name in parts.items():
        if name is not None and (not isinstance(name, str) or name not in files):
            raise CheckpointError(file, f"parts.{part}", f"its file {name!r} is not listed", fix=_FIX)


def _check_extra_names(file: Location, manifest: dict[str, Any]) -> None:
    extra = manifest.get("extra", {})
    if not isinstance(extra, dict):
        raise CheckpointError(file, "extra", "not a list of files", fix=_FIX)
    for name, entry in extra.items():
        first, *rest = name.split("/")
        if {"", ".", ".."} & {first, *rest} or "\0" in name or first in (MANIFEST, *manifest["files"]):
            raise CheckpointError(file, f"extra.{name}", "a path that could lead out of the checkpoint", fix=_FIX)
        if not isinstance(entry, dict) or type(entry.get("size")) is not int or "xxh3_64" not in entry:
            raise CheckpointError(file, f"extra.{name}", "an entry without size and checksum", fix=_FIX)


def _check_shards(file: Location, manifest: dict[str, Any]) -> None:
    files, count = manifest["files"], manifest.get("shards")
    if type(count) is not int or count < 1 or LAYOUT not in files:
        raise CheckpointError(file, "shards", "a sharded checkpoint without number of shards or layout", fix=_FIX)
    for part, names in manifest["parts"].items():
        for name in names if isinstance(names, list) else [names]:
            entry = files.get(name) if isinstance(name, str) else None
            if entry is None:
                raise CheckpointError(file, f"parts.{part}", f"its file {name!r} is not listed", fix=_FIX)
            if type(entry.get("shard")) is not int or not 0 < entry["shard"] <= count:
                raise CheckpointError(file, f"files.{name}", f"it is not one of {count} shards", fix=_FIX)
