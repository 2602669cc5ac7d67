"""The page of a verification: static, escaped, and readable without the terminal's output."""

from __future__ import annotations

import math
import os
import re
import shutil
from html.parser import HTMLParser

import pytest

from trainer_kit.verify.compare import Finding, Point
from trainer_kit.verify.page import write_page
from trainer_kit.verify.verify import Check, Verification


def page_of(tmp_path, curve, found=True):
    result = Verification("strategy <b>ddp</b>", len(curve))
    result.checks = [
        Check("samples", "ok", "none twice"),
        Check("training", "differs", "step 1 <script>"),
    ]
    result.checks += [
        Check("batch norms", "note", "net.1"),
        Check("other world", "not checked", "one process"),
    ]
    result.findings = (
        [Finding(kind="loss", step=1, where="net<1>", text="differs")] if found else []
    )
    result.curve = curve
    return write_page(tmp_path / "page.html", result).read_text(encoding="utf-8")


def lines_of(page):
    found = re.findall(r'<polyline class="(\w+)" points="([^"]*)"', page)
    return {
        name: [tuple(map(float, pair.split(","))) for pair in points.split()]
        for name, points in found
    }


def test_checks_and_differences_are_escaped(tmp_path):
    page = page_of(tmp_path, [Point(0, 1e-8, 1e-7), Point(1, 1e-2, 1e-7)])
    HTMLParser().feed(page)
    assert "<script" not in page
    assert "strategy &lt;b&gt;ddp&lt;/b&gt;, 2 steps against a plain loop" in page
    assert "step 1, net&lt;1&gt;: differs" in page
    assert '<span class="failed">differs</span><b>training</b>' in page
    assert "all equal, as far as checked" not in page
    assert "all equal, as far as checked" in page_of(tmp_path, [], found=False)


def test_curves_have_one_logarithmic_axis(tmp_path):
    lines = lines_of(page_of(tmp_path, [Point(0, 1e-8, 1e-7), Point(1, 1e-2, 1e-7)]))
    (left, low), (right, high) = lines["found"]
    assert left < right
    assert high < low  # y grows downwards
    assert (
        lines["allowed"][0][1]
        == lines["allowed"][1][1]
        == pytest.approx(low - (low - high) / 6, abs=0.2)
    )


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
def test_differences_without_a_logarithm_are_drawn_inside(tmp_path, value):
    lines = lines_of(page_of(tmp_path, [Point(0, value, 1e-7)]))
    assert all(
        0 <= x <= 720 and 0 <= y <= 260 for points in lines.values() for x, y in points
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "width"), [("light", 1300), ("dark", 1300), ("light", 390)]
)
def test_the_page_fits_a_browser(tmp_path, scheme, width):
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed"
    )
    path = (
        os.environ.get("CHROMIUM")
        or shutil.which("chromium")
        or shutil.which("google-chrome")
    )
    if path is None:
        pytest.skip(
            "no chromium and no google-chrome on this machine; CHROMIUM names one"
        )
    page_of(tmp_path, [Point(0, 1e-8, 1e-7), Point(1, 1e-2, 1e-7)])
    problems = []
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        tab = browser.new_page(
            color_scheme=scheme, viewport={"width": width, "height": 800}
        )
        tab.on("console", lambda message: problems.append(message.text))
        tab.goto((tmp_path / "page.html").as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.locator("svg polyline").count() == 2
        browser.close()
    assert not problems
