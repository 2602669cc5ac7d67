"""What becomes of the streams of ranks: files, and lines with a prefix, by torch's own means."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std

__all__ = ["Output"]


@final
@dataclass(frozen=True, kw_only=True)
class Output:
    """The streams of the ranks of one machine, as under torchrun.

    Attributes:
        tee: what goes to a file, and to the console behind a prefix: "0" nothing, "1" stdout, "2" stderr, "3" both; or
            "0:1,1:3", by local rank. None: both where there is a ``log_dir``.
        log_dir: where these files are kept; None: in a new directory for temporary files, which is named.
        role: the word in the prefix.

    Example:
        >>> Output(tee="1", log_dir=Path("logs")).role
        'rank'
    """

    tee: str | None = None
    log_dir: Path | None = None
    role: str = "rank"

    def files(self, reports: str) -> DefaultLogsSpecs:
        """For torch's agent. Without any file, what it writes goes to ``reports``, as the ranks' own reports do.

        Args:
            reports: a directory of this attempt alone.
        """
        tee = self.tee or ("0" if self.log_dir is None else "3")
        place = reports if self.log_dir is None else str(self.log_dir)
        if tee != "0" and self.log_dir is None:
            place = tempfile.mkdtemp(prefix="trainer_kit-logs-")
            print(f"trainer-kit: the output of the ranks is kept in {place}", file=sys.stderr, flush=True)
        return _Files(reports, log_dir=place, tee=Std.from_str(tee))


@final
class _Files(DefaultLogsSpecs):
    """Files of streams where they are kept, reports of errors where the agent of this attempt looks."""

    def __init__(self, reports: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._reports = Path(reports)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        found = super().reify(envs)
        for rank, environ in envs.items():
            path = self._reports / str(rank) / "error.json"
            path.parent.mkdir(exist_ok=True)
            environ["TORCHELASTIC_ERROR_FILE"] = found.error_files[rank] = str(path)
        return found
