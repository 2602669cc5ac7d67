"""The page of a verification: the curve of the difference, and every check."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from trainer_kit.loggers.journal import JSONLLogger
from trainer_kit.planning.verify import Verification
from trainer_kit.report.collect import RunDirectory
from trainer_kit.report.page import write_report

__all__ = ["write_page"]


def write_page(path: str | os.PathLike[str], verification: Verification) -> Path:
    """Write a verification as one HTML file, drawn as the report of a run.

    Args:
        path: the file.
        verification: its curve and checks.

    Raises:
        OSError: it cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     page = write_page(f"{directory}/verify.html", Verification("ddp", 4))
        ...     "<html" in page.read_text()
        True
    """
    with tempfile.TemporaryDirectory(prefix="trainer_kit-page-") as directory:
        run = Path(directory, "verify")
        journal = JSONLLogger(str(run), "", "")
        journal.log_hyperparams(
            {
                "configuration": verification.configuration,
                **{check.name: f"{check.status}: {check.text}" for check in verification.checks},
                **{f"difference {at + 1}": str(finding) for at, finding in enumerate(verification.findings)},
            }
        )
        for point in verification.curve:
            values = {"difference_of_weights": point.difference, "allowed_by_rounding": point.allowed}
            journal.log_metrics(values, step=point.step + 1)
        journal.finalize("success")
        content = RunDirectory(run)
        content.read()
        return write_report(path, [content])
