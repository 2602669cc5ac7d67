"""``trainer.explain(format="svg")``: the ranks of a run on the axes of its mesh."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from html import escape
from math import prod
from typing import Final

from trainer_kit.core.display import Svg

__all__ = ["mesh_picture"]

_SHOWN: Final = 8
_CELL, _ROW, _GAP, _PAD, _LINE, _LETTER = 104, 46, 6, 12, 18, 6.9
_DATA: Final = ("dp_replicate", "dp_shard", "data", "ranks")
"""The axes along which ranks have different samples."""
_ROLES: Final = {
    "pp": "other blocks of the model at each place",
    "dp_replicate": "a replica of the weights and other samples at each place",
    "dp_shard": "a shard of the weights and other samples at each place",
    "cp": "another part of every sequence at each place",
    "tp": "another part of every divided layer at each place",
    "data": "other samples at each place",
    "tensor": "another part of every layer at each place",
    "ranks": "other samples at each place",
}
_HUES: Final = (225, 30, 150, 330, 185, 60, 275, 100)
_STYLE: Final = (
    "text{font:13px system-ui,sans-serif;fill:#1b1f24}.b{font-weight:600}.s{font-size:12px;fill:#57606a}"
    ".back{fill:#fff}.panel{fill:none;stroke:#8c959f;stroke-opacity:.6}"
    + "".join(f".c{i}{{fill:hsl({hue},75%,90%)}}" for i, hue in enumerate(_HUES))
    + "@media (prefers-color-scheme:dark){text{fill:#e6e8ee}.s{fill:#a5adbb}.back{fill:#14161f}"
    + "".join(f".c{i}{{fill:hsl({hue},40%,27%)}}" for i, hue in enumerate(_HUES))
    + "}"
)


def mesh_picture(title: str, places: Mapping[str, int], ranks: int, facts: Sequence[str] = ()) -> Svg:
    """Draw each rank at its place: the innermost axis from left to right, the next one downwards, others as frames.

    Ranks of one colour have the same samples. Of an axis with more than eight places the first eight are drawn.

    Args:
        title: the line above the picture.
        places: the size of each axis from outermost to innermost; empty: one axis with all ranks.
        ranks: the number of all ranks.
        facts: lines below the picture.

    Example:
        >>> picture = mesh_picture("mesh", {"pp": 2, "dp_shard": 2, "tp": 2}, 8)
        >>> picture.count("rank "), picture.startswith("<svg")
        (8, True)
    """
    axes = [(name, size) for name, size in (places or {"ranks": ranks}).items() if size > 1] or [("ranks", 1)]
    width, height, drawn = _block(axes, {}, axes)
    roles = [f"{name} = {size}: {_ROLES.get(name, 'another rank at each place')}" for name, size in axes if size > 1]
    if any(size > _SHOWN for _, size in axes):
        roles.append(f"the first {_SHOWN} places of an axis are drawn")
    roles += ["equal colours: the same samples"] if ranks > 1 else []
    width = max(width, 420.0, len(title) * _LETTER * 1.08)
    letters = int(width / _LETTER)
    below = [part for line in [*roles, *facts] for part in textwrap.wrap(line, letters, subsequent_indent="   ")]
    whole = width + 2 * _PAD, height + 4 * _PAD + _LINE * (len(below) + 1)
    text = "".join(
        f'<text class="s" x="{_PAD}" y="{3 * _PAD + _LINE + height + _LINE * (n + 0.6):g}" xml:space="preserve">'
        f"{escape(line)}</text>\n"
        for n, line in enumerate(below)
    )
    return Svg(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole[0]:g} {whole[1]:g}" width="{whole[0]:g}"'
        f' role="img" aria-label="{escape(f"{ranks} ranks: {title}")}">\n<style>{_STYLE}</style>\n'
        f'<rect class="back" width="100%" height="100%" rx="8"/>\n'
        f'<text class="b" x="{_PAD}" y="{_PAD + 14}">{escape(title)}</text>\n'
        f"{_moved(_PAD, 2 * _PAD + _LINE, drawn)}{text}</svg>\n"
    )


def _block(
    axes: Sequence[tuple[str, int]], at: Mapping[str, int], every: Sequence[tuple[str, int]]
) -> tuple[float, float, str]:
    """The width, height and elements of the ranks at the position ``at`` on the axes that are not in ``axes``."""
    if len(axes) <= 2:
        return _grid(axes, at, every)
    (name, size), *inner = axes
    right, bottom, drawn = 0.0, 0.0, ""
    for place in range(min(size, _SHOWN)):
        width, height, block = _block(inner, {**at, name: place}, every)
        frame = f'<rect class="panel" width="{width + 2 * _PAD:g}" height="{height + 2 * _PAD + _LINE:g}" rx="8"/>\n'
        label = f'<text class="s" x="{_PAD}" y="{_PAD + 10}">{escape(name)} {place}</text>\n'
        drawn += _moved(right, 0, frame + label + _moved(_PAD, _PAD + _LINE, block))
        right, bottom = right + width + 2 * _PAD + _GAP, height + 2 * _PAD + _LINE
    return right - _GAP, bottom, drawn


def _grid(
    axes: Sequence[tuple[str, int]], at: Mapping[str, int], every: Sequence[tuple[str, int]]
) -> tuple[float, float, str]:
    """The ranks of two axes, one below the other, with their labels; of one axis in one line."""
    (across, columns), (down, rows) = axes[-1], axes[0] if len(axes) == 2 else ("", 1)
    columns, rows = min(columns, _SHOWN), min(rows, _SHOWN)
    left = len(f"{down} {rows}") * _LETTER + _GAP if down else 0.0
    drawn = ""
    for column in range(columns if across != "ranks" else 0):
        drawn += (
            f'<text class="s" x="{left + column * (_CELL + _GAP) + _GAP:g}" y="11">{escape(across)} {column}</text>\n'
        )
    for row in range(rows):
        y = _LINE + row * (_ROW + _GAP)
        drawn += f'<text class="s" x="0" y="{y + 27}">{escape(down)} {row}</text>\n' if down else ""
        for column in range(columns):
            place = {**at, **({down: row} if down else {}), across: column}
            drawn += _moved(left + column * (_CELL + _GAP), y, _cell(place, every))
    return left + columns * (_CELL + _GAP) - _GAP, _LINE + rows * (_ROW + _GAP) - _GAP, drawn


def _cell(place: Mapping[str, int], every: Sequence[tuple[str, int]]) -> str:
    """One rank: its number, and which part of the global batch it has."""
    sizes = [size for _, size in every]
    rank = sum(place[name] * prod(sizes[i + 1 :]) for i, (name, _) in enumerate(every))
    data = [(name, size) for name, size in every if name in _DATA]
    part = sum(place[name] * prod(size for _, size in data[i + 1 :]) for i, (name, _) in enumerate(data))
    parts = prod(size for _, size in data)
    samples = f"samples {part + 1} of {parts}" if parts > 1 else "all samples"
    return (
        f'<rect class="c{part % len(_HUES)}" width="{_CELL}" height="{_ROW}" rx="6"/>'
        f'<text class="b" x="10" y="20">rank {rank}</text><text class="s" x="10" y="37">{samples}</text>\n'
    )


def _moved(x: float, y: float, drawn: str) -> str:
    return f'<g transform="translate({x:g} {y:g})">\n{drawn}</g>\n'
