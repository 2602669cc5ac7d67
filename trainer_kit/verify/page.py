"""The page of a verification: the verdict, every check, and the difference of the weights step by step."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final

from trainer_kit.core.atomic_files import replace_file
from trainer_kit.core.display import plural
from trainer_kit.report.page import page_part
from trainer_kit.verify.compare import Point
from trainer_kit.verify.verify import Verification

__all__ = ["write_page"]

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 720, 260, 64, 30, 12
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
    status, kind = ("equal", "finished") if verification.ok else ("differs", "failed")
    checks = "".join(
        f'<div class="check"><span class="{_CLASSES[check.status]}">{escape(check.status)}</span>'
        f"<b>{escape(check.name)}</b><span>{escape(check.text)}</span></div>"
        for check in verification.checks
    )
    listed = "".join(
        f"<p>{escape(str(finding))}</p>" for finding in verification.findings
    )
    differences = (
        f'<div class="failure"><b>Differences, in the order of training</b>{listed}</div>'
        if listed
        else ""
    )
    steps = plural(verification.steps, "step")
    closing = "" if listed else '<p class="soft">all equal, as far as checked</p>'
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>verify: {escape(status)}</title><style>{page_part("page/page.css")}{_STYLE}</style></head>
<body><header><h1>verify</h1><span class="badge {kind}">{status}</span>
<p class="soft">{escape(verification.configuration)}, {steps} against a plain loop</p></header>
<main>{differences}{closing}<h2>Checks</h2><div class="panel">{checks}</div>
<h2>Difference of the weights</h2>{_figure(verification.curve)}</main><footer></footer></body></html>
"""


def _figure(curve: Sequence[Point]) -> str:
    """Both curves over the steps, with a logarithmic axis."""
    values = [value for point in curve for value in (point.difference, point.allowed)]
    finite = [max(value, _SMALLEST) for value in values if math.isfinite(value)]
    if not finite:
        return '<p class="soft">no step was compared</p>'
    low, high = math.floor(math.log10(min(finite))), math.ceil(math.log10(max(finite)))
    high = max(high, low + 1)
    wide, tall = _WIDTH - _LEFT - 16, _HEIGHT - _BOTTOM - _TOP

    def place(at: int, value: float) -> tuple[float, float]:
        exponent = (
            math.log10(min(max(value, _SMALLEST), 10.0**high))
            if value == value
            else high
        )
        x = _LEFT + wide * (at / (len(curve) - 1) if len(curve) > 1 else 0.5)
        return x, _TOP + tall * (high - exponent) / (high - low)

    lines = []
    for exponent in range(low, high + 1, max(1, math.ceil((high - low) / 6))):
        y = place(0, 10.0**exponent)[1]
        lines.append(
            f'<line class="grid-line" x1="{_LEFT}" x2="{_WIDTH - 16}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        lines.append(
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">1e{exponent}</text>'
        )
    for at in range(0, len(curve), max(1, math.ceil(len(curve) / 10))):
        x = place(at, 1.0)[0]
        lines.append(
            f'<text x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{curve[at].step}</text>'
        )
    difference_line = [place(at, point.difference) for at, point in enumerate(curve)]
    allowed = [place(at, point.allowed) for at, point in enumerate(curve)]
    for name, points in (("allowed", allowed), ("found", difference_line)):
        lines.append(
            f'<polyline class="{name}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'
        )
    lines += [
        f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'
        for x, y in difference_line
    ]
    return (
        '<div class="panel plain"><div class="runs"><span class="k0"><i class="swatch"></i> largest relative difference'
        '</span><span class="k1"><i class="swatch"></i> allowed by rounding</span>'
        '<span class="soft">by step</span></div>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="difference of the weights by step">'
        f"{''.join(lines)}</svg></div>"
    )
