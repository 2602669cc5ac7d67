"""The ``run.json`` of a directory: a record of every fit that keeps checkpoints there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, final

from trainer_kit.checkpoint.files import read_file
from trainer_kit.checkpoint.manifest import load_json
from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.hidden import replace_file

__all__ = ["RUN", "RunRecord", "read_records", "write_record"]

RUN: Final = "run.json"
_FORMAT: Final = "trainer_kit.runs"
_VERSION: Final = 1
_LARGEST: Final = 16 << 20
_KINDS: Final[dict[str, tuple[type, ...]]] = {
    **dict.fromkeys(("number", "fit", "seed", "step"), (int,)),
    **dict.fromkeys(("launches", "args", "loggers", "checkpoints"), (list,)),
    **dict.fromkeys(("stopped", "finished"), (str, type(None))),
    "libraries": (dict,),
    "ended": (bool,),
}


@final
@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What the next start has to know about a fit.

    Attributes:
        id: is in the info of every checkpoint of this run.
        number: later runs of one directory have higher ones; clocks may jump.
        root: ``default_root_dir``, absolute.
        script: its path; "" where code is typed in.
        fit: which one of the script, from 0.
        name: the first logger's, "" without one.
        execution: of the script: the same for all fits of one, also when they are resumed.
        launches: who started the process, see `trainer_kit.launch.identity`.
        args: the command line behind the script, secrets masked.
        seed: of the order of the data.
        loggers: the ``state_dict`` of each: which of its runs it is.
        checkpoints: the directories they go to.
        started: UTC, for people.
        libraries: versions.
        status: running, finished, failed or interrupted.
        ended: a finished run whose script came to its end too: nobody wants it again.
        step: optimizer steps at the end.
        stopped: why, if by a request.
        finished: UTC, for people; None while it runs.
        directory: where the record stands; not part of it.
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
    directory: str = ""

    @property
    def key(self) -> tuple[str, str, int, str]:
        """Two runs with the same one are attempts at the same thing."""
        return self.root, self.script, self.fit, self.name

    @property
    def program(self) -> str:
        """The script's name, for messages."""
        return Path(self.script).name or "this session"


def read_records(file: Path) -> list[RunRecord] | None:
    """The records of a ``run.json``; None where it is missing, damaged, or somebody else's."""
    try:
        content = load_json(file, read_file(file, _LARGEST))
    except (OSError, CheckpointError):
        return None
    if not isinstance(content, dict) or (content.get("format"), content.get("version")) != (_FORMAT, _VERSION):
        return None
    entries = content.get("runs")
    found = [_record(entry, file) for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    return [record for record in found if record is not None]


def _record(entry: dict[str, Any], file: Path) -> RunRecord | None:
    names = [field.name for field in fields(RunRecord) if field.name != "directory"]
    if any(name not in entry or not isinstance(entry[name], _KINDS.get(name, (str,))) for name in names):
        return None
    return RunRecord(**{name: entry[name] for name in names}, directory=str(file.parent))


def write_record(record: RunRecord) -> bool:
    """Put the record in the place of the one with its key. False where the file is somebody else's.

    Raises:
        CheckpointError: it cannot be written.
    """
    directory = Path(record.directory)
    file = directory / RUN
    try:
        if record.status == "running":
            directory.mkdir(parents=True, exist_ok=True)
        with _alone(directory):
            others = read_records(file)
            if others is None and os.path.lexists(file):
                return False
            kept = [other for other in others or () if other.key != record.key]
            runs = [{k: v for k, v in asdict(r).items() if k != "directory"} for r in (*kept, record)]
            content = {"format": _FORMAT, "version": _VERSION, "runs": runs}
            replace_file(file, (json.dumps(content, indent=1) + "\n").encode(), mode=0o600)
    except OSError as error:
        fix = "choose a directory that this process may write to (default_root_dir=, the logger's save_dir)"
        raise CheckpointError(file, None, f"could not be written: {error.strerror or error}", fix=fix) from error
    return True


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Two runs that share a directory do not write over each other's records, where the file system can lock."""
    if os.name == "nt":
        yield
        return
    import fcntl

    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
