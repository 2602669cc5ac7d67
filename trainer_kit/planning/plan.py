"""`Plan`: which configurations fit, how fast they would be, and the lines that start the best one."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Final, final

from trainer_kit.core.atomic_files import replace_file
from trainer_kit.core.display import in_units
from trainer_kit.planning.estimate import inner_ranks, step_samples
from trainer_kit.planning.records import CATEGORIES, Candidate
from trainer_kit.planning.search import Question, Row
from trainer_kit.report.page import page_part

__all__ = ["LIMITS", "Plan"]

LIMITS: Final = (
    "Memory is that of tensors. Fragmentation of the allocator, workspaces of kernels and the context of the device "
    "come on top: the reserve is for them.",
    "Shapes are those of the first batch; longer sequences need more. Where a step cannot run, only weights, "
    "gradients and optimizer state are calculated, and the configuration is not ranked.",
    "Times are estimates from data sheets, to compare configurations. Data loading, validation and checkpoints are "
    "not in them.",
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
    """

    question: Question
    rows: Sequence[Row]
    device: str
    script: str
    notes: Sequence[str]
    seconds: float

    def best(self, world: int | None = None) -> Row | None:
        """The fastest configuration that fits on this number of ranks; None: on the first number with one."""
        worlds = self.question.worlds if world is None else (world,)
        fitting = [
            row
            for size in worlds
            for row in self.rows
            if row.candidate.world == size and row.estimate
        ]
        return fitting[0] if fitting else None

    def trainer_line(self, row: Row) -> str:
        """The ``Trainer(...)`` of a row; other arguments stay as they are."""
        arguments = ", ".join(
            f"{name}={value}"
            for name, value in _arguments(row.candidate, self.question).items()
        )
        return f"Trainer({arguments})"

    def command(self, row: Row) -> str:
        """The command that starts a row, on each machine."""
        machines = _machines(row.candidate, self.question)
        script = self.script or "train.py"
        if machines == 1:
            return f"python {script}"
        return (
            f"trainer-kit launch --num_machines {machines} --num_processes {row.candidate.world} \\\n"
            f"    --machine_rank RANK --main_process_ip HOST {script}"
        )

    def to_json(self) -> str:
        """Everything as JSON: bytes, seconds, the lines, and the notes."""
        rows = [
            {
                **asdict(row.candidate),
                "fits": row.estimate is not None,
                "reason": row.reason,
                "memory": None
                if row.measured is None
                else [dict(role) for role in row.measured.memory],
                "peak": None if row.measured is None else row.measured.peak,
                "host": None if row.measured is None else row.measured.host,
                "flops": None if row.measured is None else row.measured.flops,
                "exact": None if row.measured is None else row.measured.exact,
                "notes": [] if row.measured is None else list(row.measured.notes),
                "traffic": []
                if row.measured is None
                else [asdict(one) for one in row.measured.traffic],
                "estimate": None if row.estimate is None else asdict(row.estimate),
                "trainer": None if row.estimate is None else self.trainer_line(row),
                "command": None if row.estimate is None else self.command(row),
            }
            for row in self.rows
        ]
        found = {
            "device": self.device,
            "limit": self.question.limit,
            "global_batch": self.question.global_batch,
            "assumptions": asdict(self.question.assumptions),
            "notes": [*self.notes, *LIMITS],
            "seconds": self.seconds,
            "rows": rows,
        }
        return json.dumps(found, indent=1)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """One page with a bar for each rank and category; it needs no other file.

        Args:
            path: a file to write it to.
        """
        page = _page(self)
        if path is not None:
            replace_file(Path(path), page.encode())
        return page

    def __str__(self) -> str:
        return _text(self)

    __repr__ = __str__


def _machines(candidate: Candidate, question: Question) -> int:
    return -(-candidate.world // question.device.group)


def _arguments(candidate: Candidate, question: Question) -> dict[str, str]:
    """The Trainer's arguments, as source."""
    machines = _machines(candidate, question)
    word = repr(
        "fsdp_cpu_offload"
        if candidate.offload and candidate.strategy == "fsdp"
        else candidate.strategy
    )
    axis, size = candidate.strategy[:2], candidate.strategy[2:]
    if candidate.strategy.startswith("hsdp"):  # which shards within a machine
        word = repr("hsdp")
    elif inner_ranks(candidate) > 1:
        word = f"MeshStrategy(dp_shard=-1, {axis}={size})"
    found = {
        "strategy": word.replace("'", '"'),
        "devices": str(candidate.world // machines),
    }
    if machines > 1:
        found["num_nodes"] = str(machines)
    found["precision"] = f'"{candidate.precision}"'
    if candidate.accumulate > 1:
        found["accumulate_grad_batches"] = str(candidate.accumulate)
    found["global_batch_size"] = str(step_samples(candidate))
    if candidate.activation_checkpointing:
        found["activation_checkpointing"] = "True"
    return found


def _text(plan: Plan) -> str:
    """The tables, the best lines and the notes."""
    question = plan.question
    lines = [
        f"{plan.device}: {question.global_batch} samples a step, at most {in_units(question.limit)} for a rank"
    ]
    for world in question.worlds:
        rows = [row for row in plan.rows if row.candidate.world == world]
        lines += ["", f"{world} rank{'s' * (world > 1)}"]
        fitting = [row for row in rows if row.estimate is not None]
        if fitting:
            lines += _aligned(
                [
                    _heads(plan),
                    *(_cells(place, row, plan) for place, row in enumerate(fitting, 1)),
                ]
            )
        reasons: dict[tuple[str, str], list[str]] = {}
        for row in rows:
            if row.estimate is None:
                reasons.setdefault((_without_precision(row), row.reason), []).append(
                    row.candidate.precision
                )
        for (words, reason), precisions in reasons.items():
            lines += _wrapped(
                f"{words}, {' and '.join(precisions)}: {reason}", "  -  ", "     "
            )
        best = plan.best(world)
        if best is None:
            lines.append("  no configuration is known to fit")
        else:
            lines += [
                "",
                *_wrapped(plan.trainer_line(best), "  ", "          "),
                *textwrap.indent(plan.command(best), "  ").splitlines(),
            ]
    lines.append("")
    for note in [*plan.notes, *LIMITS]:
        lines += _wrapped(note, "- ", "  ")
    lines.append(
        f"{sum(row.measured is not None for row in plan.rows)} configurations in {plan.seconds:.1f} s"
    )
    return "\n".join(lines)


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _without_precision(row: Row) -> str:
    candidate = row.candidate
    words = ["checkpointing"] * candidate.activation_checkpointing + [
        "offload"
    ] * candidate.offload
    return " with ".join(
        [candidate.strategy, *([" and ".join(words)] if words else [])]
    )


def _short(row: Row) -> str:
    return f"{_without_precision(row)}, {row.candidate.precision}"


def _rate(plan: Plan) -> str:
    """The name of the column of speed."""
    return "samples/s" if plan.question.assumptions.tokens is None else "tokens/s"


def _heads(plan: Plan) -> list[str]:
    heads = [*_HEADS[:-1], _rate(plan)]
    if plan.question.assumptions.price is not None:
        heads.append("cost/1M")
    return heads


def _cells(place: int, row: Row, plan: Plan) -> list[str]:
    candidate, measured, estimate = row.candidate, row.measured, row.estimate
    assert measured is not None
    assert estimate is not None
    speed = (
        estimate.samples_per_second
        if estimate.tokens_per_second is None
        else estimate.tokens_per_second
    )
    cells = [
        f"{place}.",
        candidate.strategy,
        candidate.precision,
        f"{candidate.micro_batch} x {candidate.accumulate}",
        "yes" if candidate.activation_checkpointing else "no",
        "yes" if candidate.offload else "no",
        in_units(measured.peak),
        _time(estimate.seconds),
        f"{estimate.mfu:.0%}",
        f"{speed:,.4g}" if speed < 1000 else f"{speed:,.0f}",
    ]
    if estimate.cost is not None:
        cells.append(f"{estimate.cost:.3g}")
    return cells


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = 6  # words; numbers stand on the right
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if at < left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _page(plan: Plan) -> str:
    """For each world: the lines of the best, bars of all measured configurations, and the table."""
    title = f"Plan for {plan.device}"
    sections = "".join(_section(plan, world) for world in plan.question.worlds)
    notes = "".join(f"<li>{escape(note)}</li>" for note in [*plan.notes, *LIMITS])
    legend = "".join(
        f'<span><i class="swatch k{number}"></i> {name}</span> '
        for number, name in enumerate(CATEGORIES)
    )
    facts = f"{plan.question.global_batch} samples a step · at most {in_units(plan.question.limit)} for a rank"
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
    rows = [row for row in plan.rows if row.candidate.world == world]
    best = plan.best(world)
    lines = (
        "No configuration is known to fit."
        if best is None
        else f"{plan.trainer_line(best)}\n{plan.command(best)}"
    )
    peaks = [row.measured.peak for row in rows if row.measured is not None]
    scale = max([plan.question.limit * 1.05, *peaks]) if peaks else 1.0
    # One row far beyond the limit would leave no room for the others.
    scale = min(scale, plan.question.limit * 3)
    bars = "".join(
        bar for row in rows for bar in _bars(row, plan.question.limit, scale)
    )
    heads = "".join(f"<th>{escape(head)}</th>" for head in _heads(plan))
    fitting = [row for row in rows if row.estimate is not None]
    cells = "".join(
        "<tr>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in _cells(place, row, plan))
        + "</tr>"
        for place, row in enumerate(fitting, 1)
    )
    others = "".join(
        f"<tr><td>–</td><td>{escape(_without_precision(row))}</td><td>{escape(row.candidate.precision)}</td>"
        f'<td class="reason" colspan="{len(_heads(plan)) - 3}">{escape(row.reason)}</td></tr>'
        for row in rows
        if row.estimate is None
    )
    return (
        f"<h2>{world} rank{'s' * (world > 1)}</h2><pre>{escape(lines)}</pre>"
        f'<div class="panel"><div class="bars">{bars}</div></div>'
        f'<div class="panel scroll"><table><tr>{heads}</tr>{cells}{others}</table></div>'
    )


def _bars(row: Row, limit: int, scale: float) -> Iterator[str]:
    if row.measured is None:
        return
    for number, role in enumerate(row.measured.memory, 1):
        several = f", rank role {number}" if len(row.measured.memory) > 1 else ""
        at, parts = 0.0, []
        for kind, name in enumerate(CATEGORIES):
            width = min(100 * role.get(name, 0) / scale, 100 - at)
            if width > 0:
                text = escape(f"{name}: {in_units(role.get(name, 0))}")
                parts.append(
                    f'<i class="k{kind}" style="left:{at:.2f}%;width:{width:.2f}%" title="{text}"></i>'
                )
                at += width
        peak = sum(role.values())
        batch = f"{row.candidate.micro_batch} x {row.candidate.accumulate}"
        yield (
            f'<div class="name">{escape(_short(row))}<small>{batch}{several}</small></div>'
            f'<div class="bar">{"".join(parts)}<u style="left:{100 * limit / scale:.2f}%"></u></div>'
            f'<div class="size{" over" if peak > limit else ""}">{in_units(peak)}</div>'
        )
