"""The ``run.json`` of a directory: a record of every fit that keeps checkpoints there."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, final

from trainer_kit.checkpoint.files import read_file
from trainer_kit.checkpoint.manifest import load_json
from trainer_kit.core.atomic_files import replace_file
from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.location import is_url

__all__ = [
    "REPORT",
    "RUN",
    "RunRecord",
    "read_records",
    "record_problem",
    "write_record",
]

RUN: Final = "run.json"
REPORT: Final = "report.html"
"""The page of a run, in its directory."""
_FORMAT: Final = "trainer_kit.runs"
_VERSION: Final = 1
_MAX_BYTES: Final = 16 << 20
_MARK: Final = _FORMAT.encode()
_FIELD_TYPES: Final[dict[str, tuple[type, ...]]] = {
    **dict.fromkeys(("number", "fit", "seed", "step"), (int,)),
    **dict.fromkeys(("launches", "args", "loggers", "checkpoints"), (list,)),
    **dict.fromkeys(("stopped", "finished"), (str, type(None))),
    **dict.fromkeys(("libraries", "from_here"), (dict,)),
    "ended": (bool,),
}


@final
@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What the next start must know about a fit.

    Attributes:
        id: also in the info of every checkpoint of this run.
        number: increases with each run of one directory; clocks may jump.
        root: ``default_root_dir``, absolute.
        script: its path; "" where code is typed in.
        fit: its number within the script, from 0.
        name: the first logger's, "" without one.
        execution: of the script: the same for all fits of one, also when they are resumed.
        launches: what started the process, see `trainer_kit.launch.program`.
        args: the arguments of the script, secrets masked.
        seed: of the order of the data.
        loggers: the ``state_dict`` of each, which identifies its run.
        checkpoints: the directories of the checkpoints.
        started: UTC, for readers.
        libraries: versions.
        status: running, finished, failed or interrupted.
        ended: whether the script of a finished run ended too, so that no start continues the run.
        step: optimizer steps at the end.
        stopped: the reason, if a request stopped it.
        finished: UTC, for readers; None while it runs.
        from_here: for each local path in this record, its relative path from ``directory`` when it was written.
        directory: of the file; not part of the record.
    """

    id: str
    number: int
    root: str
    script: str
    fit: int
    name: str
    execution: str
    launches: list[str]
    args: list[str]
    seed: int
    loggers: list[dict[str, Any]]
    started: str
    libraries: dict[str, str]
    checkpoints: list[str]
    status: str = "running"
    ended: bool = False
    step: int = 0
    stopped: str | None = None
    finished: str | None = None
    from_here: dict[str, str] = field(default_factory=dict)
    directory: str = ""

    @property
    def checkpoint_directories(self) -> list[str]:
        """`checkpoints`, where they are now: directories that moved together with the record are found next to it."""
        directories = []
        for recorded in self.checkpoints:
            moved = self._moved_path(recorded)
            # First: the recorded path may exist as well, for example where a directory was copied.
            if moved and os.path.isdir(moved):
                directories.append(moved)
            else:
                directories.append(recorded)
        return directories

    def is_attempt_of(self, other: RunRecord) -> bool:
        """Whether this run, read from its directory, is an earlier attempt at the run ``other``.

        Root and script may be where they were, or where they are now relative to this record: a directory may have
        been moved, or be reached through a symbolic link.
        """
        if (self.fit, self.name) != (other.fit, other.name):
            return False
        return self.means_path(self.root, other.root) and self.means_path(
            self.script, other.script
        )

    def means_path(self, recorded: str, path: str) -> bool:
        """Whether ``recorded``, a root or a script of this record, is ``path`` today."""
        if not path or not recorded or is_url(path) or is_url(recorded):
            return path == recorded
        # Both may be reached through symbolic links.
        target = os.path.realpath(path)
        if os.path.realpath(recorded) == target:
            return True
        moved = self._moved_path(recorded)
        return bool(moved) and os.path.realpath(moved) == target

    def with_relative_paths(self) -> RunRecord:
        """This record with the relative path from its directory to every local path in it."""
        directory = os.path.realpath(self.directory)
        relative_paths = {}
        for path in (self.root, self.script, *self.checkpoints):
            if path and not is_url(path):
                relative_paths[path] = _relative_path(path, directory)
        return replace(self, from_here=relative_paths)

    def _moved_path(self, path: str) -> str:
        """Where ``path`` lies if it moved together with this record; "" if its relative path is not recorded."""
        relative = self.from_here.get(path)
        if not relative:
            return ""
        return os.path.normpath(
            os.path.join(os.path.realpath(self.directory), relative)
        )

    @property
    def program(self) -> str:
        """The script's name, for messages."""
        return Path(self.script).name or "this session"


def read_records(file: Path) -> list[RunRecord] | None:
    """The records of a ``run.json``; None where it is missing, damaged, or another program's."""
    try:
        return _read(file)
    except (OSError, CheckpointError):
        return None


def record_problem(file: Path) -> str:
    """Why an existing ``run.json`` cannot be relied on; "" where it is sound, missing or another program's."""
    try:
        _read(file)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    except CheckpointError as error:
        return "" if error.key == "format" else error.reason
    return ""


def _read(file: Path) -> list[RunRecord]:
    raw = read_file(file, _MAX_BYTES)
    # `replace_file` never leaves an empty file, so the storage has lost the content of a record.
    if not raw:
        raise CheckpointError(file, None, "is empty")
    try:
        content = load_json(file, raw)
    except CheckpointError:
        # A damaged record of ours, and not the file of another program.
        if _MARK in raw[:200]:
            raise
        content = None  # another program's file, which need not be JSON
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise CheckpointError(file, "format", "is not a record of runs")
    version = content.get("version")
    if version != _VERSION:
        raise CheckpointError(
            file,
            "version",
            f"has format version {version!r}; this trainer_kit reads {_VERSION}",
        )
    entries = content.get("runs")
    # A changed path or id would make a run continue with the checkpoints of another one.
    if "checksum" in content and content["checksum"] != _checksum(entries):
        raise CheckpointError(
            file, "checksum", "was edited or damaged: its checksum does not match"
        )
    if not isinstance(entries, list):
        entries = [None]  # no valid record, so that the error below names it
    records = []
    for entry in entries:
        record = _parse_record(entry, file)
        if record is None:
            raise CheckpointError(
                file, "runs", "holds an entry that is not a record of a run"
            )
        records.append(record)
    return records


def _parse_record(entry: object, file: Path) -> RunRecord | None:
    if not isinstance(entry, dict):
        return None
    # Older files lack this field.
    values = {"from_here": {}, **entry}
    names = [field.name for field in fields(RunRecord) if field.name != "directory"]
    for name in names:
        types = _FIELD_TYPES.get(name, (str,))
        if name not in values or not isinstance(values[name], types):
            return None
    relative_paths = values["from_here"]
    for path in (*values["checkpoints"], *relative_paths, *relative_paths.values()):
        # The system's calls raise ValueError at a null byte, which no caller expects.
        if not isinstance(path, str) or "\0" in path:
            return None
    return RunRecord(
        **{name: values[name] for name in names}, directory=str(file.parent)
    )


def _checksum(runs: object) -> str:
    return hashlib.sha256(json.dumps(runs, sort_keys=True).encode()).hexdigest()


def write_record(record: RunRecord) -> bool:
    """Write the record in place of the record with the same key. A damaged file is kept as ``run.json.damaged``.

    Returns:
        False where the file is another program's, or of a newer version: then it stays as it is.

    Raises:
        CheckpointError: it cannot be written.
    """
    directory = Path(record.directory)
    file = directory / RUN
    try:
        # Only when it begins: a directory that the user deleted meanwhile does not come back at its end.
        if record.status == "running":
            directory.mkdir(parents=True, exist_ok=True)
        # Another run may write its record between the reading and the writing.
        with _directory_lock(directory):
            existing: list[RunRecord] = []
            try:
                if os.path.lexists(file):
                    existing = _read(file)
            except CheckpointError as error:
                if error.key in ("format", "version"):
                    return False
                # It stays for the user to look at.
                os.replace(file, file.with_name(f"{RUN}.damaged"))
            # Of the attempts at one run only the newest has a record.
            records = [
                other
                for other in existing
                if other.id != record.id and not other.is_attempt_of(record)
            ]
            records.append(record.with_relative_paths())
            # For this user alone: arguments of scripts and states of loggers may be private.
            replace_file(file, _file_content(records), mode=0o600)
    except OSError as error:
        fix = "choose a directory that this process may write to (default_root_dir=, the logger's save_dir)"
        raise CheckpointError(
            file, None, f"could not be written: {error.strerror or error}", fix=fix
        ) from error
    return True


def _file_content(records: list[RunRecord]) -> bytes:
    runs = []
    for record in records:
        entry = asdict(record)
        del entry["directory"]  # where it was read from
        runs.append(entry)
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "checksum": _checksum(runs),
        "runs": runs,
    }
    return (json.dumps(content, indent=1) + "\n").encode()


@contextmanager
def _directory_lock(directory: Path) -> Iterator[None]:
    """Lock the directory, where the file system can: runs that share it do not overwrite each other's records."""
    if os.name == "nt":
        yield
        return
    import fcntl

    # The directory and not the file: `replace_file` puts a new file in place, and a lock of the old one would not hold.
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _relative_path(path: str, directory: str) -> str:
    try:
        return os.path.relpath(os.path.realpath(path), directory)
    except ValueError:  # another drive
        return ""
