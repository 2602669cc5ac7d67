"""Render the data of runs as one HTML file, which needs no other file or network and reads no data as HTML."""

from __future__ import annotations

import hashlib
import html
import json
import os
import time
from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

from trainer_kit.core.atomic_files import discard_torn, replace_file
from trainer_kit.core.types import JsonObject
from trainer_kit.report.collect import RunDirectory
from trainer_kit.state.records import REPORT

__all__ = ["REPORT", "page_part", "render", "write_report"]


@cache
def page_part(name: str) -> str:
    """The text of a file of this room, such as ``"page/page.css"``."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _sha256(script: str) -> str:
    """The source of a content security policy that allows this script alone."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{b64encode(digest).decode()}'"


def render(runs: Sequence[JsonObject], refresh: int = 0) -> str:
    """Return the page as HTML.

    A content security policy allows only the page's two scripts, by their checksums, and no requests.

    Args:
        runs: data from `RunDirectory.described`.
        refresh: seconds after which a browser reloads the page; 0: never.

    Example:
        >>> page = render([{"name": "</script><b>", "series": []}])
        >>> "</script><b>" in page
        False
    """
    content = {"written": time.time(), "refresh": refresh, "runs": list(runs)}
    data = json.dumps(content, allow_nan=False)
    # The data are JSON in a script element, which only `<` could end.
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    # A title of all runs would be longer than a browser's tab.
    title = " · ".join(str(run.get("title") or run["name"]) for run in runs[:3])
    plot_script = page_part("vendor/uPlot.iife.min.js")
    page_script = page_part("page/page.js")
    refresh_tag = ""
    if refresh:
        refresh_tag = f'<meta http-equiv="refresh" content="{refresh:d}">'
    parts = {
        "TITLE": html.escape(title),
        "POLICY": f"{_sha256(plot_script)} {_sha256(page_script)}",
        "REFRESH": refresh_tag,
        "STYLE": page_part("vendor/uPlot.min.css") + page_part("page/page.css"),
        "UPLOT": plot_script,
        "SCRIPT": page_script,
        "DATA": data,
    }
    # Text and names alternate. Names are not replaced one by one: the data of a run may contain such a name.
    pieces = page_part("page/page.html").split("%%")
    for number in range(1, len(pieces), 2):
        pieces[number] = parts[pieces[number]]
    return "".join(pieces)


def write_report(
    path: str | os.PathLike[str], runs: Sequence[RunDirectory], refresh: int = 0
) -> Path:
    """Write the page of these runs, readable only by its owner, because it contains the configuration.

    Args:
        path: the file.
        runs: the runs, in the state of their last `read`.
        refresh: as for `render`.

    Raises:
        OSError: it cannot be written.
    """
    target = Path(path)
    # Links are relative, so that a run can be moved with its page.
    entries: list[JsonObject] = []
    for run in runs:
        home = os.path.relpath(run.directory, target.parent)
        for entry in run.described():
            entries.append({**entry, "home": home})
    page = render(entries, refresh)
    # A run that was killed while it wrote a page has left a temporary file.
    discard_torn(target)
    replace_file(target, page.encode(), mode=0o600)
    return target
