"""The page of a verification: the verdict, every check, and the difference of the weights step by step."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final, final

from trainer_kit.core.atomic_files import replace_file
from trainer_kit.core.display import plural
from trainer_kit.report.page import page_part
from trainer_kit.verify.compare import Point
from trainer_kit.verify.result import Check, Verification

__all__ = ["write_page"]

_WIDTH: Final = 720
_HEIGHT: Final = 260
_LEFT: Final = 64
"""Space for the labels of the vertical axis."""
_RIGHT: Final = 16
_TOP: Final = 12
_BOTTOM: Final = 30
"""Space for the numbers of the steps."""
_SMALLEST: Final = 1e-17
"""Equal weights are drawn here: a logarithm has no zero."""
_CLASSES: Final = {
    "ok": "finished",
    "differs": "failed",
    "note": "interrupted",
    "not checked": "soft",
}
_STYLE: Final = """
main { max-width: 900px; } header { max-width: 900px; } footer { max-width: 900px; }
.check { display: grid; grid-template-columns: 7em 8em 1fr; gap: 2px 14px; padding: 7px 14px;
  border-top: 1px solid var(--line); }
.check:first-child { border-top: 0; } .check b { font-weight: 600; }
.failure p { margin: 4px 0; } .plain { padding: 12px; } svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; } .grid-line { stroke: var(--grid); }
polyline { fill: none; stroke-width: 2; vector-effect: non-scaling-stroke; }
.found { stroke: var(--s0); } .allowed { stroke: var(--s1); stroke-dasharray: 6 4; }
.dot { fill: var(--s0); } .k0 { color: var(--s0); } .k1 { color: var(--s1); }
@media (max-width: 600px) { .check { grid-template-columns: 7em 1fr; } .check span:last-child { grid-column: 1 / -1; }
  svg text { font-size: 20px; } }
"""


def write_page(path: str | os.PathLike[str], verification: Verification) -> Path:
    """Write a verification as one HTML file, which needs no other file and no network.

    Args:
        path: the file.
        verification: its curve, checks and differences.

    Raises:
        OSError: it cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     page = write_page(f"{directory}/verify.html", Verification("ddp", 4))
        ...     "all equal, as far as checked" in page.read_text()
        True
    """
    target = Path(path)
    replace_file(target, _page(verification).encode())
    return target


def _page(verification: Verification) -> str:
    status = "differs"
    kind = "failed"
    if verification.ok:
        status = "equal"
        kind = "finished"
    checks = "".join(map(_check_row, verification.checks))
    steps = plural(verification.steps, "step")
    # The policy forbids scripts: texts of checks hold names from the user's code, which
    # are escaped too.
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>verify: {escape(status)}</title><style>{page_part("page/page.css")}{_STYLE}</style></head>
<body><header><h1>verify</h1><span class="badge {kind}">{status}</span>
<p class="soft">{escape(verification.configuration)}, {steps} against a plain loop</p></header>
<main>{_verdict(verification)}<h2>Checks</h2><div class="panel">{checks}</div>
<h2>Difference of the weights</h2>{_figure(verification.curve)}</main><footer></footer></body></html>
"""


def _check_row(check: Check) -> str:
    return (
        f'<div class="check"><span class="{_CLASSES[check.status]}">{escape(check.status)}</span>'
        f"<b>{escape(check.name)}</b><span>{escape(check.text)}</span></div>"
    )


def _verdict(verification: Verification) -> str:
    """The differences, or the line that there are none."""
    if verification.ok:
        return '<p class="soft">all equal, as far as checked</p>'
    differences = [
        f"<p>{escape(str(finding))}</p>" for finding in verification.findings
    ]
    return f'<div class="failure"><b>Differences, in the order of training</b>{"".join(differences)}</div>'


@final
class _Axes:
    """The axes of the figure: steps from left to right, powers of ten from bottom to top.

    Args:
        steps: number of points of a curve.
        values: all finite values that are drawn.
    """

    def __init__(self, steps: int, values: Sequence[float]) -> None:
        self.steps = steps
        self.low = math.floor(math.log10(min(values)))
        # At least one power of ten: `y` divides by the range.
        self.high = max(math.ceil(math.log10(max(values))), self.low + 1)

    def x(self, index: int) -> float:
        """The horizontal position of a point; a single one is drawn in the middle."""
        share = 0.5
        if self.steps > 1:
            share = index / (self.steps - 1)
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * share

    def y(self, value: float) -> float:
        """The vertical position of a value; NaN and infinity are drawn at the top."""
        exponent = float(self.high)
        if not math.isnan(value):
            exponent = math.log10(min(max(value, _SMALLEST), 10.0**self.high))
        share = (self.high - exponent) / (self.high - self.low)
        return _TOP + (_HEIGHT - _BOTTOM - _TOP) * share

    def lines(self) -> list[str]:
        """The grid and the labels of the vertical axis: about six, at whole powers of ten."""
        lines = []
        distance = max(1, math.ceil((self.high - self.low) / 6))
        for exponent in range(self.low, self.high + 1, distance):
            y = self.y(10.0**exponent)
            lines.append(
                f'<line class="grid-line" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
            lines.append(
                f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">1e{exponent}</text>'
            )
        return lines


def _figure(curve: Sequence[Point]) -> str:
    """Both curves over the steps, with a logarithmic axis."""
    differences = [point.difference for point in curve]
    allowed = [point.allowed for point in curve]
    values = [*differences, *allowed]
    finite = [max(value, _SMALLEST) for value in values if math.isfinite(value)]
    if not finite:
        return '<p class="soft">no step was compared</p>'
    axes = _Axes(len(curve), finite)
    lines = axes.lines()
    # About ten numbers of steps, so that they do not overlap.
    for index in range(0, len(curve), max(1, math.ceil(len(curve) / 10))):
        step = curve[index].step
        lines.append(
            f'<text x="{axes.x(index):.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{step}</text>'
        )
    # The differences are drawn over the dashed line of what is allowed.
    lines.append(_polyline("allowed", axes, allowed))
    lines.append(_polyline("found", axes, differences))
    for index, value in enumerate(differences):
        lines.append(
            f'<circle class="dot" cx="{axes.x(index):.1f}" cy="{axes.y(value):.1f}" r="3.5"/>'
        )
    return (
        '<div class="panel plain"><div class="runs"><span class="k0"><i class="swatch"></i> largest relative difference'
        '</span><span class="k1"><i class="swatch"></i> allowed by rounding</span>'
        '<span class="soft">by step</span></div>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="difference of the weights by step">'
        f"{''.join(lines)}</svg></div>"
    )


def _polyline(name: str, axes: _Axes, values: Sequence[float]) -> str:
    points = []
    for index, value in enumerate(values):
        points.append(f"{axes.x(index):.1f},{axes.y(value):.1f}")
    return f'<polyline class="{name}" points="{" ".join(points)}"/>'
