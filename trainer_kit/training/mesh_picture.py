"""The picture of ``trainer.explain(format="svg")``: each rank at its place on the axes of the mesh."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import prod
from typing import Final, final

from trainer_kit.core.display import Svg, plural

__all__ = ["mesh_picture"]

_MAX_DRAWN: Final = 8
"""Ranks of an axis that are drawn."""
# In pixels.
_CELL_WIDTH: Final = 104
_CELL_HEIGHT: Final = 46
_GAP: Final = 6
_PADDING: Final = 12
_LINE: Final = 18
# The mean width of a letter: an SVG cannot measure its text.
_LETTER: Final = 6.9
_DATA_AXES: Final = ("dp_replicate", "dp_shard", "data", "ranks")
"""The axes along which ranks have different samples."""
_ROLES: Final = {
    "pp": "different blocks of the model at each position",
    "dp_replicate": "a replica of the weights and different samples at each position",
    "dp_shard": "a shard of the weights and different samples at each position",
    "cp": "a different part of every sequence at each position",
    "tp": "a different shard of every sharded layer at each position",
    "data": "different samples at each position",
    "tensor": "a different shard of every layer at each position",
    "ranks": "different samples at each position",
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

_Axes = Sequence[tuple[str, int]]
"""Names and sizes, from outermost to innermost."""


@final
@dataclass(frozen=True)
class _Drawing:
    """SVG elements with their size in pixels."""

    width: float
    height: float
    elements: str


def mesh_picture(
    title: str, places: Mapping[str, int], ranks: int, facts: Sequence[str] = ()
) -> Svg:
    """Draw each rank at its place: the innermost axis from left to right, the next one downwards, others as frames.

    Ranks of one color have the same samples. Of an axis with more than eight places the first eight are drawn.

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
    sizes = places or {"ranks": ranks}
    # An axis of one place divides nothing; without any other there is a single rank to draw.
    axes = [(name, size) for name, size in sizes.items() if size > 1] or [("ranks", 1)]
    mesh = _draw_axes(axes, {}, axes)
    # Wide enough for the captions of a small mesh, and for the title, whose letters are bold.
    width = max(mesh.width, 420.0, len(title) * _LETTER * 1.08)
    captions = _wrap_lines([*_describe_axes(axes, ranks), *facts], width)
    view_width = width + 2 * _PADDING
    view_height = mesh.height + 4 * _PADDING + _LINE * (len(captions) + 1)
    caption_elements = ""
    for row, line in enumerate(captions):
        y = 3 * _PADDING + _LINE + mesh.height + _LINE * (row + 0.6)
        caption_elements += f'<text class="s" x="{_PADDING}" y="{y:g}" xml:space="preserve">{escape(line)}</text>\n'
    label = escape(f"{plural(ranks, 'rank')}: {title}")
    return Svg(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {view_width:g} {view_height:g}"'
        f' width="{view_width:g}" role="img" aria-label="{label}">\n<style>{_STYLE}</style>\n'
        f'<rect class="back" width="100%" height="100%" rx="8"/>\n'
        f'<text class="b" x="{_PADDING}" y="{_PADDING + 14}">{escape(title)}</text>\n'
        f"{_translate(_PADDING, 2 * _PADDING + _LINE, mesh.elements)}{caption_elements}</svg>\n"
    )


def _describe_axes(axes: _Axes, ranks: int) -> list[str]:
    lines = []
    for name, size in axes:
        if size > 1:
            lines.append(
                f"{name} = {size}: {_ROLES.get(name, 'a different rank at each position')}"
            )
    if any(size > _MAX_DRAWN for _, size in axes):
        lines.append(f"the first {_MAX_DRAWN} places of an axis are drawn")
    if ranks > 1:
        lines.append("equal colors: the same samples")
    return lines


def _wrap_lines(lines: Sequence[str], width: float) -> list[str]:
    wrapped: list[str] = []
    for line in lines:
        wrapped += textwrap.wrap(line, int(width / _LETTER), subsequent_indent="   ")
    return wrapped


def _draw_axes(axes: _Axes, position: Mapping[str, int], mesh: _Axes) -> _Drawing:
    """Draw the ranks at ``position`` on the axes of ``mesh`` that are not in ``axes``."""
    if len(axes) <= 2:
        return _draw_grid(axes, position, mesh)
    (name, size), *inner_axes = axes
    right, height = 0.0, 0.0
    elements = ""
    for index in range(min(size, _MAX_DRAWN)):
        block = _draw_axes(inner_axes, {**position, name: index}, mesh)
        width = block.width + 2 * _PADDING
        height = block.height + 2 * _PADDING + _LINE
        frame = f'<rect class="panel" width="{width:g}" height="{height:g}" rx="8"/>\n'
        label = f'<text class="s" x="{_PADDING}" y="{_PADDING + 10}">{escape(name)} {index}</text>\n'
        content = _translate(_PADDING, _PADDING + _LINE, block.elements)
        elements += _translate(right, 0, frame + label + content)
        right += width + _GAP
    return _Drawing(right - _GAP, height, elements)


def _draw_grid(axes: _Axes, position: Mapping[str, int], mesh: _Axes) -> _Drawing:
    """Draw the ranks of two axes, one below the other, with their labels; of one axis in one line."""
    column_axis, columns = axes[-1]
    row_axis, rows = axes[0] if len(axes) == 2 else ("", 1)
    columns, rows = min(columns, _MAX_DRAWN), min(rows, _MAX_DRAWN)
    label_width = 0.0
    if row_axis:
        label_width = len(f"{row_axis} {rows}") * _LETTER + _GAP
    elements = ""
    if column_axis != "ranks":
        for column in range(columns):
            x = label_width + column * (_CELL_WIDTH + _GAP) + _GAP
            elements += f'<text class="s" x="{x:g}" y="11">{escape(column_axis)} {column}</text>\n'
    for row in range(rows):
        y = _LINE + row * (_CELL_HEIGHT + _GAP)
        row_position = dict(position)
        if row_axis:
            row_position[row_axis] = row
            elements += (
                f'<text class="s" x="0" y="{y + 27}">{escape(row_axis)} {row}</text>\n'
            )
        for column in range(columns):
            cell = _draw_rank({**row_position, column_axis: column}, mesh)
            elements += _translate(label_width + column * (_CELL_WIDTH + _GAP), y, cell)
    width = label_width + columns * (_CELL_WIDTH + _GAP) - _GAP
    height = _LINE + rows * (_CELL_HEIGHT + _GAP) - _GAP
    return _Drawing(width, height, elements)


def _draw_rank(position: Mapping[str, int], mesh: _Axes) -> str:
    """One rank: its number, and its share of the global batch."""
    # Ranks that differ on other axes only have the same samples, and the same color.
    rank = _flat_index(position, mesh)
    data_axes = [(name, size) for name, size in mesh if name in _DATA_AXES]
    share = _flat_index(position, data_axes)
    shares = prod(size for _, size in data_axes)
    samples = "all samples"
    if shares > 1:
        samples = f"samples {share + 1} of {shares}"
    return (
        f'<rect class="c{share % len(_HUES)}" width="{_CELL_WIDTH}" height="{_CELL_HEIGHT}" rx="6"/>'
        f'<text class="b" x="10" y="20">rank {rank}</text><text class="s" x="10" y="37">{samples}</text>\n'
    )


def _flat_index(position: Mapping[str, int], axes: _Axes) -> int:
    """The number of a position, counted along the innermost axis first."""
    index = 0
    for name, size in axes:
        index = index * size + position[name]
    return index


def _translate(x: float, y: float, elements: str) -> str:
    return f'<g transform="translate({x:g} {y:g})">\n{elements}</g>\n'
