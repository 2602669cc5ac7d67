"""Writes docs/decisions/index.md, the list of the decision records, for ``make docs``."""

from __future__ import annotations

from pathlib import Path

RECORDS = Path(__file__).with_name("decisions")
PAGE = RECORDS / "index.md"
HEAD = """\
# Decisions

<!-- Written by docs/generate_decisions.py; `make docs` writes it again. -->

To learn why something is as it is, find its record here. Each is one page: context, decision, and what was rejected.

"""


def render() -> str:
    """The whole page."""
    lines = []
    for record in sorted(RECORDS.glob("[0-9]*.md")):
        title = record.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        lines.append(f"- [{title}]({record.name})\n")
    return HEAD + "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(
        f"wrote {PAGE.relative_to(Path.cwd()) if PAGE.is_relative_to(Path.cwd()) else PAGE}"
    )
