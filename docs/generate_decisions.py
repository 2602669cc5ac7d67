"""Writes docs/decisions/index.md, the list of the decisions, for ``make docs``."""

from __future__ import annotations

import re
from pathlib import Path

DECISIONS = Path(__file__).with_name("decisions")
PAGE = DECISIONS / "index.md"
PAGES = (
    "step",
    "data",
    "precision",
    "strategies",
    "checkpoints",
    "resume",
    "logging",
    "callbacks",
    "accelerator",
    "launch",
    "planning",
    "project",
)
HEADING = re.compile(r"^## (\d+) · (.+) \{ #(\d{4}) \}$", re.M)
HEAD = """\
---
search: {exclude: true}
---

# Decisions

<!-- Written by docs/generate_decisions.py; `make docs` writes it again. -->

To learn why something is as it is, find its decision here: context, decision, and what was rejected. A decision keeps
its number; a new one takes the next free number, on the page of its subject.
"""
DEPENDENCY = "one package each, now in [28](project.md#0028), dependencies and extras"
DROPPED = {
    21: DEPENDENCY,
    22: DEPENDENCY,
    23: DEPENDENCY,
    24: DEPENDENCY,
    25: DEPENDENCY,
    26: DEPENDENCY,
    27: DEPENDENCY,
    33: "merged into [9](step.md#0009), which binds the backwards of named losses",
    58: "two workers became three; merged into [138](project.md#0138)",
    71: "merged into [69](precision.md#0069) and [28](project.md#0028)",
    118: DEPENDENCY,
    135: "merged into [136](accelerator.md#0136), the migration report",
    153: "extends [134](accelerator.md#0134), `Fabric`, and is merged into it",
    176: "overrules a part of [134](accelerator.md#0134), and is merged into it",
}
"""By number, why a decision is no longer listed: where it went, or why it no longer decides anything."""


def render() -> str:
    """The whole page."""
    lines = [HEAD]
    for name in PAGES:
        text = (DECISIONS / f"{name}.md").read_text(encoding="utf-8")
        subject = next(line for line in text.splitlines() if line.startswith("# "))[2:]
        lines.append(f"\n## [{subject}]({name}.md)\n\n")
        for number, title, anchor in HEADING.findall(text):
            lines.append(f"- [{number} · {title}]({name}.md#{anchor})\n")
    if DROPPED:
        lines.append("\n## Dropped numbers\n\n")
    for reason in dict.fromkeys(DROPPED.values()):
        numbers = [str(number) for number, why in DROPPED.items() if why == reason]
        lines.append(f"- {', '.join(numbers)}: {reason}\n")
    return "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(
        f"wrote {PAGE.relative_to(Path.cwd()) if PAGE.is_relative_to(Path.cwd()) else PAGE}"
    )
