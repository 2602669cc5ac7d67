"""The page holds the data as data: exactly, thinned where it is long, and never as HTML."""

from __future__ import annotations

import hashlib
import math
import re
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import tomllib

from tests.report.pages import curve, data_of
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.loggers import JSONLLogger
from trainer_kit.report import RunDirectory, find_runs, write_report
from trainer_kit.report.collect import MOST_POINTS, thinned
from trainer_kit.report.events import EVENTS, append_event, read_events
from trainer_kit.report.page import render

HOSTILE = [
    "</script><script>document.title = 'taken'</script>",
    "<img src=x onerror=\"document.title='taken'\">",
    "<!--<script>",
    "&lt;b&gt; ' \" ` \u2028 \udc80 %%DATA%% __proto__",
    "__proto__",
    "constructor",
]


def described(directory):
    run = RunDirectory(directory)
    run.read()
    return run.described()


def hostile_run(directory: Path) -> Path:
    """A run whose every text is hostile."""
    logger = JSONLLogger(directory, "", "")
    for step in range(30):
        logger.log_metrics({name.replace("\udc80", ""): step for name in HOSTILE}, step)
    for text in HOSTILE:
        facts = {
            "stage": "fit",
            "title": text,
            "run": "r",
            "journal": 0,
            "explain": text,
            "place": text,
        }
        append_event(
            directory,
            "start",
            0,
            configuration=[[text] * 4],
            environment=[[text, text]],
            **facts,
        )
        append_event(directory, "warning", 3, text=text)
        failure = {"headline": text, "text": text}
        append_event(
            directory, "end", 30, stage="fit", status="failed", exception=failure
        )
    return directory


def test_texts_of_users_are_escaped_in_html(tmp_path):
    page = write_report(
        tmp_path / "page.html", [run := RunDirectory(hostile_run(tmp_path))]
    )
    run.read()
    write_report(page, [run])
    text = page.read_text(encoding="utf-8")
    assert text.count("<script") == text.count("</script") == 3
    body = text.partition('id="data">')[2].partition("</script>")[0]
    assert not set("<>&") & set(body)
    assert not re.search(r"<(img|!--)", text)
    (found,) = data_of(text)["runs"]
    assert {series["name"] for series in found["series"]} >= {
        HOSTILE[0],
        HOSTILE[1],
        "__proto__",
    }
    assert found["exceptions"][0]["headline"] == HOSTILE[0]
    assert [found["title"], found["explain"]] == [HOSTILE[-1]] * 2


def test_the_page_asks_for_nothing():
    text = render([])
    assert "default-src 'none'" in text
    hashes = re.findall(r"'sha256-[^']+'", text)
    assert len(hashes) == 2
    own = "".join(
        files("trainer_kit.report").joinpath(f"page/page.{kind}").read_text()
        for kind in ("js", "html", "css")
    )
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function",
        own,
    )
    assert not re.search(
        r"https?://|url\(|@import|fetch\(|XMLHttpRequest|WebSocket|sendBeacon", own
    )


def test_the_library_of_the_plots_is_the_one_of_its_checksums():
    vendor = files("trainer_kit.report").joinpath("vendor")
    sums = [
        line.split() for line in vendor.joinpath("SHA256SUMS").read_text().splitlines()
    ]
    assert {name for _, name in sums} == {
        "uPlot.LICENSE",
        "uPlot.iife.min.js",
        "uPlot.min.css",
    }
    for checksum, name in sums:
        assert (
            hashlib.sha256(vendor.joinpath(name).read_bytes()).hexdigest() == checksum
        )
    version = re.search(
        r"^UPLOT := (\S+)$",
        (root := Path(__file__).parents[2]).joinpath("Makefile").read_text(),
        re.M,
    )
    assert f"(v{version[1]})" in vendor.joinpath("uPlot.iife.min.js").read_text()[:200]
    package = tomllib.loads((root / "pyproject.toml").read_text())["tool"][
        "setuptools"
    ]["package-data"]
    assert package["trainer_kit.report"] == ["page/*", "vendor/*"]


def test_a_long_curve_keeps_its_extremes():
    values = np.sin(np.arange(1_000_000) / 9e4).astype(np.float32)
    values[123_456], values[777_777], values[500_000:500_003] = 99, -99, math.nan
    kept = thinned(values)
    assert len(kept) <= MOST_POINTS + 2
    assert {0, 123_456, 777_777, 999_999} <= set(kept.tolist())
    assert (np.diff(kept) > 0).all()
    assert thinned(np.full(300_000, math.nan, np.float32)).size <= MOST_POINTS + 2
    assert thinned(values[:MOST_POINTS]).tolist() == list(range(MOST_POINTS))


def test_values_that_are_not_numbers_are_counted(tmp_path):
    logger = JSONLLogger(tmp_path, "", "")
    for step, value in enumerate([1.0, math.nan, 3.0, math.inf]):
        logger.log_metrics({"loss": value, "none": math.nan}, step)
    (run,) = described(tmp_path)
    facts = {series["name"]: series for series in run["series"]}
    loss = facts["loss"]
    assert (
        loss["bad"],
        loss["firstBad"],
        loss["low"],
        loss["lowStep"],
        loss["high"],
    ) == (
        2,
        1,
        1.0,
        0,
        3.0,
    )
    assert loss["last"] == "inf"
    assert facts["none"]["bad"] == 4
    assert data_of(render([run]))["runs"] == [run]


def test_a_journal_is_read_from_its_last_position(tmp_path):
    journal, run = tmp_path / "journal.jsonl", RunDirectory(tmp_path)
    journal.write_text(
        "".join(
            f'{{"step": {step}, "time": 1, "loss": {step}}}\n' for step in range(2500)
        )
    )
    pauses = []
    run.read(pause=lambda: pauses.append(1))
    assert len(pauses) == 2
    with journal.open("ab") as file:
        file.write(
            b'not json\n{"step": 2500, "time": 1, "loss": 7}\n{"step": 2501, "time": 1, "lo'
        )
    for _ in range(2):
        run.read()
        steps, values = curve(run.described()[0], "loss")
        assert (len(steps), steps[-1], values[-1]) == (2501, 2500, 7), (
            "a damaged and a torn line are left out"
        )
    journal.unlink()
    JSONLLogger(tmp_path, "", "").log_metrics({"loss": 1}, 0)
    run.read()
    assert curve(run.described()[0], "loss") == ([0], [1]), (
        "another file is read from its beginning"
    )


def test_events_outlive_a_torn_line(tmp_path):
    append_event(
        tmp_path, "note", 1, text="one", api_key="secret", at="s3://me:pw@host"
    )
    with open(tmp_path / EVENTS, "ab") as file:
        file.write(b'{"event": "no')
    append_event(tmp_path, "note", 2, text="two")
    one, two = read_events(tmp_path)
    assert (one["text"], one["api_key"], one["at"], two["text"]) == (
        "one",
        "***",
        "s3://me:***@host",
        "two",
    )
    assert read_events(tmp_path / "missing") == []


def test_runs_are_found_below_a_directory(tmp_path):
    for name in ("a/version_10", "a/version_2", "b"):
        JSONLLogger(tmp_path / name, "", "").log_metrics({"loss": 1}, 0)
    names = [
        str(found.relative_to(tmp_path))
        for found in find_runs([tmp_path, tmp_path / "b"])
    ]
    assert names == ["a/version_2", "a/version_10", "b"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match="contains no run"):
        find_runs([tmp_path / "empty"])
