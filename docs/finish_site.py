"""Finishes a built site, for ``make site``: the list of its versions, and a first page that leads to the newest.

Usage: ``finish_site.py SITE``. Each directory of SITE is a version; `dev` counts as none, unless it is alone. The theme
reads ``versions.json`` and shows the choice of a version at the top of each page.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path


def number(version: str) -> list[int]:
    """The order of versions: ``0.10`` is later than ``0.9``."""
    return [int(part) for part in re.findall(r"\d+", version)]


def finish(site: Path) -> None:
    """Write the two files, and remove what does not belong: copied sources, and canonical links without an address."""
    found = {page.parent.name for page in site.glob("*/index.html")}
    released = sorted(found - {"dev"}, key=number, reverse=True)
    versions = [
        {
            "version": version,
            "title": version,
            "aliases": ["latest"] if version == released[0] else [],
        }
        for version in released
    ] + [{"version": "dev", "title": "dev", "aliases": []}] * ("dev" in found)
    (site / "versions.json").write_text(
        json.dumps(versions, indent=2) + "\n", encoding="utf-8"
    )
    newest = versions[0]["version"]
    page = (
        f'<!doctype html>\n<meta http-equiv="refresh" content="0; url={newest}/">\n'
        f'<a href="{newest}/">{newest}</a>\n'
    )
    (site / "index.html").write_text(page, encoding="utf-8")
    # Without the site's address (SITE_URL) a canonical link is a path, which is wrong below any other directory.
    for page in site.glob("**/*.html"):
        text = page.read_text(encoding="utf-8")
        without = re.sub(r'<link rel="canonical" href="/[^"]*" ?/?>', "", text)
        if without != text:
            page.write_text(without, encoding="utf-8")
    for pattern in ("*/**/*.py", "*/**/*.jinja", "*/requirements*.txt"):
        for source in site.glob(pattern):
            source.unlink()


if __name__ == "__main__":
    finish(Path(sys.argv[1]))
