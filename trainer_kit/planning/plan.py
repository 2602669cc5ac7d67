"""`Plan`: which configurations fit, how fast they would be, and the lines that start the best one."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Final, final

from trainer_kit.core.atomic_files import replace_file
from trainer_kit.core.display import in_units, plural
from trainer_kit.core.notebook import html_page
from trainer_kit.planning.estimate import Estimate, inner_ranks, step_samples
from trainer_kit.planning.records import CATEGORIES, Candidate, Measured
from trainer_kit.planning.search import Question, Row
from trainer_kit.report.page import page_part

__all__ = ["LIMITS", "Plan"]

LIMITS: Final = (
    "Memory is that of tensors. The reserve is for allocator fragmentation, kernel workspaces and the device context.",
    "Shapes are those of the first batch; longer sequences need more. Where a step cannot run, only weights, "
    "gradients and optimizer state are calculated, and the configuration is not ranked.",
    "Times are estimates from data sheets, to compare configurations. Data loading, validation and checkpoints are "
    "not included.",
)
"""The limits of a plan, as text."""


_WIDTH: Final = 100
_HEADS: Final = (
    "",
    "strategy",
    "precision",
    "batch",
    "ckpt",
    "offload",
    "memory",
    "step",
    "MFU",
    "samples/s",
)
_TEXT_COLUMNS: Final = 6
"""The first columns have text, which stands on the left; numbers stand on the right."""
_STYLE: Final = """
.bars { display: grid; grid-template-columns: minmax(150px, max-content) 1fr max-content; gap: 7px 14px; }
.bars > * { align-self: center; }
.bars .name { font-size: 13px; } .bars .name small { color: var(--soft); display: block; }
.bar { position: relative; height: 20px; background: var(--code); border-radius: 4px; }
.bar i { position: absolute; top: 0; bottom: 0; } .bar i:first-child { border-radius: 4px 0 0 4px; }
.bar u { position: absolute; top: -4px; bottom: -4px; width: 0; border-left: 2px dashed var(--bad); }
.size { font-variant-numeric: tabular-nums; white-space: nowrap; text-align: right; } .over { color: var(--bad); }
.panel { padding: 12px 14px; margin: 10px 0; } .reason { color: var(--soft); white-space: normal; }
ul { padding-left: 20px; } li { margin: 3px 0; } td { white-space: nowrap; }
@media (max-width: 640px) {
  .bars { grid-template-columns: 1fr max-content; grid-auto-flow: dense; row-gap: 3px; }
  .bars .bar { grid-column: 1 / -1; margin-bottom: 9px; }
}
""" + "".join(
    f".k{number} {{ background: var(--s{number}); color: var(--s{number}); }}\n"
    for number in range(8)
)


@final
@dataclass(frozen=True, kw_only=True)
class Plan:
    """The result of `Trainer.plan`. ``print(plan)`` shows it as a table.

    Attributes:
        question: what was searched.
        rows: the configurations: for each world the ranked ones, then those that do not fit.
        device: the name of the device.
        script: the command line of the script; empty for a call in a program.
        notes: the assumptions, as text.
        seconds: how long the search took.

    Example:
        >>> import torch
        >>> from trainer_kit import Trainer
        >>> from trainer_kit.testing import TinyModule
        >>> plan = Trainer(barebones=True).plan(TinyModule(), [torch.randn(4, 32)], world=2, device="h200",
        ...                                     strategies=["fsdp"], precisions=["32-true"])
        >>> plan.command(plan.best())
        'python train.py'
    """

    question: Question
    rows: Sequence[Row]
    device: str
    script: str
    notes: Sequence[str]
    seconds: float

    def best(self, world: int | None = None) -> Row | None:
        """The fastest configuration that fits.

        Args:
            world: the number of ranks; None: the first number of the search with a configuration that fits.

        Returns:
            Its row; None where no configuration is known to fit.
        """
        worlds = self.question.worlds
        if world is not None:
            worlds = (world,)
        for size in worlds:
            for row in self._rows_of_world(size):
                if row.estimate is not None:
                    return row
        return None

    def _rows_of_world(self, world: int) -> list[Row]:
        return [row for row in self.rows if row.candidate.world == world]

    def trainer_line(self, row: Row) -> str:
        """The ``Trainer(...)`` of a row; other arguments stay as they are.

        Args:
            row: one of ``rows``.
        """
        arguments = _arguments(row.candidate, self.question)
        pairs = ", ".join(f"{name}={value}" for name, value in arguments.items())
        return f"Trainer({pairs})"

    def command(self, row: Row) -> str:
        """The command that starts a row, on each machine.

        Args:
            row: one of ``rows``.
        """
        machines = _machines(row.candidate, self.question)
        script = self.script or "train.py"
        if machines == 1:
            # The Trainer starts the ranks of one machine itself; several machines need a launcher on each.
            return f"python {script}"
        return (
            f"trainer-kit launch --num_machines {machines} --num_processes {row.candidate.world} \\\n"
            f"    --machine_rank RANK --main_process_ip HOST {script}"
        )

    def to_json(self) -> str:
        """Everything as JSON: bytes, seconds, the lines, and the notes."""
        content = {
            "device": self.device,
            "limit": self.question.limit,
            "global_batch": self.question.global_batch,
            "assumptions": asdict(self.question.assumptions),
            "notes": [*self.notes, *LIMITS],
            "seconds": self.seconds,
            "rows": [self._json_row(row) for row in self.rows],
        }
        return json.dumps(content, indent=1)

    def _json_row(self, row: Row) -> dict[str, object]:
        """The values of one row by their keys in JSON; the keys are a file format."""
        entry: dict[str, object] = asdict(row.candidate)
        entry["fits"] = row.estimate is not None
        entry["reason"] = row.reason
        entry |= _json_measured(row.measured)
        if row.estimate is None:
            return entry | {"estimate": None, "trainer": None, "command": None}
        entry["estimate"] = asdict(row.estimate)
        entry["trainer"] = self.trainer_line(row)
        entry["command"] = self.command(row)
        return entry

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """One page with a bar for each rank and category; it needs no other file.

        Args:
            path: a file to write it to.
        """
        page = _page(self)
        if path is not None:
            # Atomically: a page that a browser reloads is never half of one.
            replace_file(Path(path), page.encode())
        return page

    def _repr_html_(self) -> str:
        return html_page(self.to_html())

    def __str__(self) -> str:
        return _text(self)

    # A notebook and a Python shell show the table; the fields would fill screens.
    __repr__ = __str__


def _json_measured(measured: Measured | None) -> dict[str, object]:
    if measured is None:
        # Null and not left out: every row of the file has the same keys.
        unknown = dict.fromkeys(("memory", "peak", "host", "flops", "exact"))
        return {**unknown, "notes": [], "traffic": []}
    return {
        "memory": [dict(role) for role in measured.memory],
        "peak": measured.peak,
        "host": measured.host,
        "flops": measured.flops,
        "exact": measured.exact,
        "notes": list(measured.notes),
        "traffic": [asdict(traffic) for traffic in measured.traffic],
    }


def _machines(candidate: Candidate, question: Question) -> int:
    # Rounded up: the last machine may have ranks on some of its devices only.
    return -(-candidate.world // question.device.group)


def _strategy_source(candidate: Candidate) -> str:
    """The value of ``Trainer(strategy=...)``, as source."""
    strategy = candidate.strategy
    # Without its number: the Trainer shards within a machine.
    if strategy.startswith("hsdp"):
        return '"hsdp"'
    if inner_ranks(candidate) > 1:
        axis = strategy[:2]
        size = strategy[2:]
        return f"MeshStrategy(dp_shard=-1, {axis}={size})"
    # The only strategy with an offload that a search tries by itself; others have it in their word.
    if candidate.offload and strategy == "fsdp":
        strategy = "fsdp_cpu_offload"
    return f'"{strategy}"'


def _arguments(candidate: Candidate, question: Question) -> dict[str, str]:
    """The Trainer's arguments, as source."""
    machines = _machines(candidate, question)
    arguments = {
        "strategy": _strategy_source(candidate),
        "devices": str(candidate.world // machines),
    }
    if machines > 1:
        arguments["num_nodes"] = str(machines)
    arguments["precision"] = f'"{candidate.precision}"'
    if candidate.accumulate > 1:
        arguments["accumulate_grad_batches"] = str(candidate.accumulate)
    # Always there: the micro-batch follows from it, and the script's loader may have another batch size.
    arguments["global_batch_size"] = str(step_samples(candidate))
    if candidate.activation_checkpointing:
        arguments["activation_checkpointing"] = "True"
    return arguments


def _text(plan: Plan) -> str:
    """The tables, the best lines and the notes."""
    question = plan.question
    limit = in_units(question.limit)
    lines = [
        f"{plan.device}: {plural(question.global_batch, 'sample')} a step, at most {limit} for a rank"
    ]
    for world in question.worlds:
        lines += _text_of_world(plan, world)
    lines.append("")
    for note in [*plan.notes, *LIMITS]:
        lines += _wrapped(note, "- ", "  ")
    count = sum(row.measured is not None for row in plan.rows)
    lines.append(f"{count} configurations in {plan.seconds:.1f} s")
    return "\n".join(lines)


def _text_of_world(plan: Plan, world: int) -> list[str]:
    """The table of one number of ranks, what does not fit, and the lines that start the best configuration."""
    lines = ["", _ranks(world)]
    rows = plan._rows_of_world(world)
    fitting = [row for row in rows if row.estimate is not None]
    if fitting:
        cells = [_cells(number, row, plan) for number, row in enumerate(fitting, 1)]
        lines += _aligned([_heads(plan), *cells])
    lines += _unfitting_lines(rows)
    best = plan.best(world)
    if best is None:
        lines.append("  no configuration is known to fit")
        return lines
    lines.append("")
    lines += _wrapped(plan.trainer_line(best), "  ", "          ")
    lines += textwrap.indent(plan.command(best), "  ").splitlines()
    return lines


def _unfitting_lines(rows: Sequence[Row]) -> list[str]:
    """One line for each configuration that does not fit, with all the precisions that fail for the same reason."""
    # A configuration that cannot be built fails in each precision with the same text.
    precisions: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.estimate is None:
            key = _without_precision(row), row.reason
            precisions.setdefault(key, []).append(row.candidate.precision)
    lines: list[str] = []
    for (configuration, reason), names in precisions.items():
        text = f"{configuration}, {' and '.join(names)}: {reason}"
        lines += _wrapped(text, "  -  ", "     ")
    return lines


def _ranks(count: int) -> str:
    return plural(count, "rank")


def _wrapped(text: str, first_indent: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first_indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _without_precision(row: Row) -> str:
    candidate = row.candidate
    options: list[str] = []
    if candidate.activation_checkpointing:
        options.append("checkpointing")
    if candidate.offload:
        options.append("offload")
    if not options:
        return candidate.strategy
    return f"{candidate.strategy} with {' and '.join(options)}"


def _short(row: Row) -> str:
    return f"{_without_precision(row)}, {row.candidate.precision}"


def _speed_head(plan: Plan) -> str:
    """The name of the column of speed."""
    if plan.question.assumptions.tokens is None:
        return "samples/s"
    return "tokens/s"


def _heads(plan: Plan) -> list[str]:
    heads = [*_HEADS[:-1], _speed_head(plan)]
    if plan.question.assumptions.price is not None:
        heads.append("cost/1M")
    return heads


def _cells(number: int, row: Row, plan: Plan) -> list[str]:
    """The cells of a ranked row, which is the ``number``-th of its table."""
    candidate = row.candidate
    assert row.measured is not None
    estimate = row.estimate
    assert estimate is not None
    cells = [
        f"{number}.",
        candidate.strategy,
        candidate.precision,
        f"{candidate.micro_batch} x {candidate.accumulate}",
        _yes_or_no(candidate.activation_checkpointing),
        _yes_or_no(candidate.offload),
        in_units(row.measured.peak),
        _time(estimate.seconds),
        f"{estimate.mfu:.0%}",
        _speed(estimate),
    ]
    if estimate.cost is not None:
        cells.append(f"{estimate.cost:.3g}")
    return cells


def _yes_or_no(value: bool) -> str:
    if value:
        return "yes"
    return "no"


def _speed(estimate: Estimate) -> str:
    speed = estimate.tokens_per_second
    if speed is None:
        speed = estimate.samples_per_second
    if speed < 1000:
        return f"{speed:,.4g}"
    # Above 1000, four digits would show a precision that an estimate does not have.
    return f"{speed:,.0f}"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines in which the cells of a column have the same width."""
    columns = zip(*rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for row in rows:
        cells = []
        for column, width in enumerate(widths):
            if column < _TEXT_COLUMNS:
                cells.append(row[column].ljust(width))
            else:
                cells.append(row[column].rjust(width))
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def _page(plan: Plan) -> str:
    """For each world: the lines of the best, bars of all measured configurations, and the table."""
    title = f"Plan for {plan.device}"
    sections = "".join(_section(plan, world) for world in plan.question.worlds)
    notes = "".join(f"<li>{escape(note)}</li>" for note in [*plan.notes, *LIMITS])
    legend = "".join(
        f'<span><i class="swatch k{number}"></i> {name}</span> '
        for number, name in enumerate(CATEGORIES)
    )
    facts = (
        f"{plural(plan.question.global_batch, 'sample')} a step · at most "
        f"{in_units(plan.question.limit)} for a rank"
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(title)}</title><style>{page_part("page/page.css")}{_STYLE}</style></head>
<body><header><h1>{escape(title)}</h1><p class="soft">{escape(facts)} · {escape(plan.script)}</p>
<div class="runs">{legend}<span><b class="over">┆</b> limit</span></div></header>
<main>{sections}<h2>Assumptions and limits</h2><ul>{notes}</ul></main>
<footer>{len(plan.rows)} configurations in {plan.seconds:.1f} s</footer></body></html>
"""


def _section(plan: Plan, world: int) -> str:
    """The best lines, the bars and the table of one number of ranks."""
    rows = plan._rows_of_world(world)
    best = plan.best(world)
    lines = "No configuration is known to fit."
    if best is not None:
        lines = f"{plan.trainer_line(best)}\n{plan.command(best)}"
    limit = plan.question.limit
    scale = _scale(rows, limit)
    bars = "".join("".join(_bars(row, limit, scale)) for row in rows)
    heads = "".join(f"<th>{escape(head)}</th>" for head in _heads(plan))
    fitting = [row for row in rows if row.estimate is not None]
    ranked = "".join(
        _table_row(_cells(number, row, plan)) for number, row in enumerate(fitting, 1)
    )
    unfitting = "".join(
        _unfitting_row(row, plan) for row in rows if row.estimate is None
    )
    return (
        f"<h2>{_ranks(world)}</h2><pre>{escape(lines)}</pre>"
        f'<div class="panel"><div class="bars">{bars}</div></div>'
        f'<div class="panel scroll"><table><tr>{heads}</tr>{ranked}{unfitting}</table></div>'
    )


def _scale(rows: Sequence[Row], limit: int) -> float:
    """The bytes of a bar over the full width."""
    peaks = [row.measured.peak for row in rows if row.measured is not None]
    if not peaks:
        return 1.0
    scale = max([limit * 1.05, *peaks])
    # One row far beyond the limit would leave no room for the others.
    return min(scale, limit * 3)


def _table_row(cells: Sequence[str]) -> str:
    columns = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f"<tr>{columns}</tr>"


def _unfitting_row(row: Row, plan: Plan) -> str:
    columns = len(_heads(plan)) - 3
    return (
        f"<tr><td>–</td><td>{escape(_without_precision(row))}</td><td>{escape(row.candidate.precision)}</td>"
        f'<td class="reason" colspan="{columns}">{escape(row.reason)}</td></tr>'
    )


def _bars(row: Row, limit: int, scale: float) -> Iterator[str]:
    """A bar for each role of a rank, with the limit as a line."""
    if row.measured is None:
        return
    candidate = row.candidate
    for number, role in enumerate(row.measured.memory, 1):
        batch = f"{candidate.micro_batch} x {candidate.accumulate}"
        # Only the stages of a pipeline differ from each other.
        if len(row.measured.memory) > 1:
            batch += f", rank role {number}"
        peak = sum(role.values())
        over = ""
        if peak > limit:
            over = " over"
        yield (
            f'<div class="name">{escape(_short(row))}<small>{batch}</small></div>'
            f'<div class="bar">{_segments(role, scale)}<u style="left:{100 * limit / scale:.2f}%"></u></div>'
            f'<div class="size{over}">{in_units(peak)}</div>'
        )


def _segments(role: Mapping[str, int], scale: float) -> str:
    """The colored segments of a bar, one for each category."""
    offset = 0.0
    segments = []
    for number, name in enumerate(CATEGORIES):
        size = role.get(name, 0)
        # Cut at the edge, so that a peak beyond the scale does not cover the number beside the bar.
        width = min(100 * size / scale, 100 - offset)
        if width > 0:
            title = escape(f"{name}: {in_units(size)}")
            segments.append(
                f'<i class="k{number}" style="left:{offset:.2f}%;width:{width:.2f}%" title="{title}"></i>'
            )
            offset += width
    return "".join(segments)
