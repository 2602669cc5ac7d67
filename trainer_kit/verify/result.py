"""The result of `verify`: every comparison, the differences that rounding does not explain, and the curve."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, final

from trainer_kit.core.display import plural
from trainer_kit.core.notebook import html_table
from trainer_kit.core.types import JsonObject
from trainer_kit.verify.compare import Finding, Point

__all__ = ["Check", "CheckList", "Verification"]

_RANK_OF_KIND: Final = {
    "samples": 0,
    "data": 0,
    "repeat": 1,
    "loop": 3,
    "layout": 3,
    "precision": 3,
}
"""What explains the differences that follow comes first; a check that only repeats another one comes last."""
_DEFAULT_RANK: Final = 2


@final
@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        name: what is compared.
        status: ``"ok"``, ``"differs"``, ``"note"`` (a difference that is usually intended) or ``"not checked"``.
        text: the result, or why it was not checked.

    Example:
        >>> Check("buffers", "ok", "equal in every bit").status
        'ok'
    """

    name: str
    status: str
    text: str


@final
@dataclass
class Verification:
    """The result of `Trainer.verify`.

    Attributes:
        configuration: strategy, precision and ranks, in words.
        steps: optimizer steps of each run.
        checks: every comparison, in order.
        findings: differences that rounding does not explain; the first one is the first in training.
        curve: the difference of the weights, step by step.

    Example:
        >>> checks = [Check("weights", "ok", "equal in every bit")]
        >>> result = Verification("ddp, 32-true, 2 ranks", steps=3, checks=checks)
        >>> print(result)
        verify: ddp, 32-true, 2 ranks, 3 steps against a plain loop
        ok          weights  equal in every bit
        all equal, as far as checked
        >>> result.ok, result.exit_code
        (True, 0)
    """

    configuration: str
    steps: int
    checks: list[Check] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    curve: list[Point] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not self.findings

    @property
    def first(self) -> Finding | None:
        """The difference that explains the others, and, of several, the first one in training: step and module."""

        def rank(finding: Finding) -> int:
            return _RANK_OF_KIND.get(finding.kind, _DEFAULT_RANK)

        return min(self.findings, key=rank, default=None)

    @property
    def unchecked(self) -> list[Check]:
        """What was not checked."""
        return [check for check in self.checks if check.status == "not checked"]

    @property
    def exit_code(self) -> int:
        """0 where nothing differs, else 1."""
        return int(not self.ok)

    def to_dict(self) -> JsonObject:
        """Everything as plain data, for JSON."""
        curve: list[JsonObject] = [
            {
                "step": point.step,
                "difference": _finite(point.difference),
                "allowed": _finite(point.allowed),
            }
            for point in self.curve
        ]
        return {
            "configuration": self.configuration,
            "steps": self.steps,
            "ok": self.ok,
            "checks": [vars(check) for check in self.checks],
            "findings": [vars(finding) for finding in self.findings],
            "curve": curve,
        }

    def _repr_html_(self) -> str:
        rows = [(check.status, check.name, check.text) for check in self.checks]
        title = f"{self.configuration}: {self._summary()}"
        return html_table(title, rows, ["Status", "What", "Result"])

    def __str__(self) -> str:
        width = max((len(check.name) for check in self.checks), default=0)
        lines = [
            f"verify: {self.configuration}, {plural(self.steps, 'step')} against a plain loop"
        ]
        for check in self.checks:
            lines.append(f"{check.status:12}{check.name:{width}}  {check.text}")
        lines.append(self._summary())
        return "\n".join(lines)

    def _summary(self) -> str:
        if not self.ok:
            return f"first difference: {self.first}"
        summary = "all equal, as far as checked"
        # Callbacks are left out of every verification: who reads one line must see which.
        for check in self.checks:
            if check.name == "callbacks":
                names = check.text.partition(":")[0]
                summary += f"; not checked: callbacks ({names})"
        return summary


def _finite(value: float) -> float | None:
    # JSON has no NaN and no infinity.
    if not math.isfinite(value):
        return None
    return value


@final
class CheckList:
    """Adds checks to a result.

    Args:
        result: the verification that gets them.
    """

    def __init__(self, result: Verification) -> None:
        self._result = result

    @property
    def findings(self) -> list[Finding]:
        """The differences so far."""
        return self._result.findings

    def show_curve(self, points: list[Point]) -> None:
        """Set the difference of the weights, step by step."""
        self._result.curve = points

    def add(self, name: str, finding: Finding | None, text: str) -> bool:
        """Add a comparison; returns whether nothing differs.

        Args:
            name: what was compared.
            finding: the difference; None: nothing differs.
            text: the result where nothing differs.
        """
        if finding is None:
            self._result.checks.append(Check(name, "ok", text))
            return True
        self._result.findings.append(finding)
        location = f"step {finding.step}"
        if finding.where:
            location += f", {finding.where}"
        self._result.checks.append(Check(name, "differs", location))
        return False

    def remark(self, name: str, text: str) -> None:
        """Add a difference that is usually intended."""
        self._result.checks.append(Check(name, "note", text))

    def skip(self, name: str, reason: str) -> None:
        """Add a check that was not made."""
        self._result.checks.append(Check(name, "not checked", reason))
