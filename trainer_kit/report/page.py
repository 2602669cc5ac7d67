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
from typing import Any

from trainer_kit.core.atomic_files import discard_torn, replace_file
from trainer_kit.report.collect import RunDirectory
from trainer_kit.state.records import REPORT

__all__ = ["REPORT", "page_part", "render", "write_report"]


@cache
def page_part(name: str) -> str:
    """The text of a file of this room, such as ``"page/page.css"``."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _sha256(script: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def render(runs: Sequence[dict[str, Any]], refresh: int = 0) -> str:
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
    data = json.dumps(
        {"written": time.time(), "refresh": refresh, "runs": list(runs)},
        allow_nan=False,
    )
    # The data are JSON in a script element, which only `<` could end.
    scripts = [page_part("vendor/uPlot.iife.min.js"), page_part("page/page.js")]
    parts = {
        "TITLE": html.escape(
            " · ".join(str(run.get("title") or run["name"]) for run in runs[:3])
        ),
        "POLICY": " ".join(map(_sha256, scripts)),
        "REFRESH": f'<meta http-equiv="refresh" content="{refresh:d}">'
        if refresh
        else "",
        "STYLE": page_part("vendor/uPlot.min.css") + page_part("page/page.css"),
        "UPLOT": scripts[0],
        "SCRIPT": scripts[1],
        "DATA": data.replace("<", "\\u003c")
        .replace(">", "\\u003e")
        .replace("&", "\\u0026"),
    }
    pieces = page_part("page/page.html").split("%%")  # text and names alternate
    return "".join(
        parts[piece] if number % 2 else piece for number, piece in enumerate(pieces)
    )


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
    entries: list[dict[str, Any]] = []
    for run in runs:
        home = os.path.relpath(run.directory, target.parent)
        entries += [{**entry, "home": home} for entry in run.described()]
    page = render(entries, refresh)
    discard_torn(target)
    replace_file(target, page.encode(), mode=0o600)
    return target
