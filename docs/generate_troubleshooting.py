"""Writes the troubleshooting page into the package, for ``make docs``: ``trainer-kit explain`` prints its sections."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
COPY = ROOT / "trainer_kit" / "commands" / "troubleshooting.md"
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


def render() -> str:
    """The page with the text of its links alone: a terminal has no pages beside it."""
    return LINK.sub(r"\1", PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    COPY.write_text(render(), encoding="utf-8")
    print(f"wrote {COPY.relative_to(ROOT)}")
