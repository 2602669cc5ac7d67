"""Reads the data of a page back."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from pathlib import Path

import numpy as np


def data_of(page: str | Path) -> dict:
    text = page.read_text(encoding="utf-8") if isinstance(page, Path) else page
    found = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL
    )
    return json.loads(found[1])


def curve(run: dict, name: str, over: str = "steps") -> tuple[list[float], list[float]]:
    """Steps, samples or tokens, and values of a series."""
    (series,) = (series for series in run["series"] if series["name"] == name)
    axis = run["axes"][series["axis"]]
    steps = np.frombuffer(b64decode(axis[over]), "<f8")
    assert len(np.frombuffer(b64decode(axis["seconds"]), "<f4")) == len(steps)
    return steps.tolist(), np.frombuffer(b64decode(series["values"]), "<f4").tolist()
