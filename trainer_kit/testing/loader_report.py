"""`LoaderReport`: the verdicts of `check_loader`, one line for each check in each layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import final

from trainer_kit.core.display import plural
from trainer_kit.core.types import JsonObject

__all__ = ["LoaderCheck", "LoaderReport"]


@final
@dataclass(frozen=True)
class LoaderCheck:
    """One check of a loader with one number of workers and of ranks.

    Attributes:
        name: what is checked, such as ``"first resume"``.
        workers: ``num_workers`` of the loader.
        ranks: number of data ranks.
        status: ``"ok"``, ``"fails"``, ``"refused"`` (an error says before the first step that the loader cannot do
            this), ``"advice"`` (it would fail in a layout that the script does not use) or ``"not checked"``.
        text: what was compared, the first difference, or the reason.

    Example:
        >>> print(LoaderCheck("new epoch", 0, 1, "ok", "1 epoch, 3 batches"))
        ok          workers=0 ranks=1   new epoch      1 epoch, 3 batches
    """

    name: str
    workers: int
    ranks: int
    status: str
    text: str

    def __str__(self) -> str:
        layout = " ".join([f"workers={self.workers}", f"ranks={self.ranks}"])
        return f"{self.status:12}{layout:20}{self.name:15}{self.text}"


@final
@dataclass(frozen=True)
class LoaderReport:
    """The result of `check_loader`.

    Attributes:
        checks: every check of every layout, in order.

    Example:
        >>> report = LoaderReport([LoaderCheck("new epoch", 0, 1, "ok", "1 epoch, 3 batches")])
        >>> print(report)
        ok          workers=0 ranks=1   new epoch      1 epoch, 3 batches
        exact, as far as checked: 1 check
        >>> report.raise_if_failed()
    """

    checks: Sequence[LoaderCheck]

    @property
    def failures(self) -> list[LoaderCheck]:
        """The checks that fail."""
        return [check for check in self.checks if check.status == "fails"]

    @property
    def ok(self) -> bool:
        """Whether something was checked, and no check fails.

        A change of workers or ranks that the loader refuses in words is no failure.
        """
        was_checked = any(check.status == "ok" for check in self.checks)
        return was_checked and not self.failures

    @property
    def exit_code(self) -> int:
        """0 where `ok`, else 1."""
        return int(not self.ok)

    def with_workers_as_advice(self) -> LoaderReport:
        """Return a report in which a failure with workers is advice, for a script that uses none."""
        checks = []
        for check in self.checks:
            if check.workers and check.status == "fails":
                text = f"with workers, which the script does not use: {check.text}"
                check = replace(check, status="advice", text=text)
            checks.append(check)
        return LoaderReport(checks)

    def raise_if_failed(self) -> None:
        """Raise if a check fails, or nothing was checked.

        Raises:
            AssertionError: with all lines of the report.
        """
        if not self.ok:
            raise AssertionError(f"this loader is not exact\n{self}")

    def to_dict(self) -> JsonObject:
        """Everything as plain data, for JSON."""
        return {"ok": self.ok, "checks": [asdict(check) for check in self.checks]}

    def __str__(self) -> str:
        lines = [str(check) for check in self.checks]
        total = plural(len(self.checks), "check")
        summary = f"exact, as far as checked: {total}"
        if self.failures:
            summary = f"not exact: {len(self.failures)} of {total} failed"
        elif not self.ok:
            summary = f"nothing was checked: {total}"
        return "\n".join([*lines, summary])
