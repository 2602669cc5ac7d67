"""The page in a real browser: it draws, writes nothing to the console, and asks for nothing."""

from __future__ import annotations

import os
import shutil
from base64 import b64encode

import numpy as np
import pytest

from tests.report.test_page import HOSTILE, described, hostile_run
from trainer_kit.loggers import JSONLLogger
from trainer_kit.report.events import append_event
from trainer_kit.report.page import render

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed"
)
BROWSER = (
    os.environ.get("CHROMIUM")
    or shutil.which("chromium")
    or shutil.which("google-chrome")
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        BROWSER is None,
        reason="no chromium and no google-chrome on this machine; CHROMIUM names one",
    ),
]


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as play:
        # Without a sandbox: in a container there is often no user namespace for one.
        browser = play.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def show(browser, tmp_path):
    """Opens a page; afterwards there was no line on the console and no request but for the page."""
    problems, contexts = [], []

    def show(page, **options):
        file = tmp_path / "shown.html"
        file.write_text(page, encoding="utf-8")
        context = browser.new_context(
            **{"viewport": {"width": 1300, "height": 900}, **options}
        )
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: problems.append(message.text))
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on(
            "request",
            lambda request: (
                request.url == file.as_uri() or problems.append(request.url)
            ),
        )
        tab.goto(file.as_uri())
        tab.wait_for_selector(
            "html[data-drawn]", state="attached"
        )  # a function would be against the page's policy
        return tab

    yield show
    for context in contexts:
        context.close()
    assert not problems


def packed(values, kind):
    return b64encode(np.asarray(values, kind).tobytes()).decode()


def long_run(curves, points):
    """A run of some curves with so many points each."""
    rng = np.random.default_rng(0)
    steps = np.arange(points)
    series = [
        {"name": f"value {i}", "axis": 0, "values": packed(np.cumsum(rng.normal(size=points)), "<f4"), "count": points,
         "bad": 0, "firstBad": None, "last": 1.0, "low": -1.0, "high": 1.0, "lowStep": 0, "highStep": 0}
        for i in range(curves)
    ]  # fmt: skip
    axes = [{"steps": packed(steps, "<f8"), "seconds": packed(steps / 10, "<f4")}]
    return {"name": "long", "title": "long", "status": "finished", "axes": axes, "series": series, "step": points,
            "seconds": points / 10, "begun": 0, "marks": []}  # fmt: skip


def inked(tab):
    """How many charts have a curve: pixels of its color."""
    return tab.evaluate("""() => [...document.querySelectorAll("canvas")].filter((canvas) => {
        const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        let blue = 0;
        for (let i = 0; i < pixels.length; i += 4) blue += pixels[i + 3] > 100 && pixels[i + 2] - pixels[i] > 60;
        return blue > 100;
    }).length""")


def test_a_million_points_are_drawn_in_two_seconds(browser, tmp_path):
    file = tmp_path / "long.html"
    file.write_text(render([long_run(5, 200_000)]))
    context = browser.new_context(viewport={"width": 1300, "height": 1400})
    tab = context.new_page()
    session = context.new_cdp_session(tab)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    tab.goto(file.as_uri())
    tab.wait_for_selector(
        "html[data-drawn]", state="attached"
    )  # a function would be against the page's policy
    metrics = {
        each["name"]: each["value"]
        for each in session.send("Performance.getMetrics")["metrics"]
    }
    assert inked(tab) == 5
    # Processor time of the page's thread, from the first byte to the last curve.
    assert metrics["TaskDuration"] < 2, metrics
    context.close()


def test_texts_of_users_stay_texts(show, tmp_path):
    tab = show(render(described(hostile_run(tmp_path / "run"))))
    text = tab.evaluate("document.body.textContent")
    for name in HOSTILE[:2]:
        assert name in text
    assert tab.title() == HOSTILE[-1]
    assert tab.locator("main img, main b b, main script").count() == 0
    assert tab.locator(".chart").count() == len(HOSTILE) + 1, "and steps per second"


def make_run(directory, restarts=True):
    logger = JSONLLogger(directory, "", "")
    rows = [["Trainer", "lr", 0.1, "argument"], ["Trainer", "seed", None, "default"]]
    start = {"stage": "fit", "run": "r", "title": "Net", "configuration": rows}
    append_event(directory, "start", 0, journal=0, **start)
    for step in range(1, 101):
        logger.log_metrics(
            {
                "train_loss": 1 / step,
                "lr-SGD": 0.1,
                "val_loss": float("nan") if step == 9 else 2.0,
            },
            step,
        )
    if restarts:
        size = logger.path.stat().st_size
        append_event(directory, "start", 60, journal=size, **start)
        append_event(directory, "warning", 70, text="slow")
        for step in range(61, 121):
            logger.log_metrics({"train_loss": 2 / step}, step)
    return described(directory)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1300, 390])
def test_a_page_is_used(show, tmp_path, scheme, width):
    tab = show(
        render(make_run(tmp_path / "run")),
        color_scheme=scheme,
        viewport={"width": width, "height": 900},
    )
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
        "nothing is wider than the screen"
    )
    dark = tab.evaluate(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every((part) => part < 60)"
    )
    assert dark == (scheme == "dark")
    chart = tab.locator(".chart").first
    assert chart.locator("h3").inner_text() == "loss"
    assert inked(tab) >= 1
    assert "1 not finite, first at step 9" in chart.inner_text()
    place = chart.locator(".u-over").bounding_box()
    for smooth, value in (("0", "0.033333"), ("0.5", "0.03")):
        tab.locator("#smooth").fill(smooth)
        tab.mouse.move(place["x"] + place["width"] * 29 / 119, place["y"] + 50)
        assert chart.locator("h3 span").inner_text() == "step 30"
        assert f"train_loss{value}" in chart.inner_text().replace("\n", "")
        tab.mouse.move(0, 0)
        assert "train_loss0.01" in chart.inner_text().replace("\n", ""), (
            "the last value"
        )
    for control, value in (("#smooth", "0.9"), ("#log", None), ("#marks", None)):
        tab.locator(control).fill(value) if value else tab.locator(control).click()
    tab.select_option("#axis", "seconds")
    tab.locator("input[type=search]").fill("lr")
    assert tab.locator(".chart:visible h3").all_inner_texts() == ["lr-SGD"]
    tab.locator("input[type=search]").fill("")
    tab.mouse.move(place["x"] + 20, place["y"] + 50)
    tab.mouse.down()
    tab.mouse.move(place["x"] + 120, place["y"] + 50)
    tab.mouse.up()
    tab.get_by_role("button", name="reset zoom").click()
    tab.get_by_role("button", name="val_loss").click()
    rows = tab.locator("tr", has_text="restart 1 at step 60")
    assert rows.count() == 1


def test_the_marks_have_a_legend_and_the_time_one_chart(show, tmp_path):
    logger = JSONLLogger(tmp_path, "", "")
    append_event(tmp_path, "start", 0, stage="fit", run="r", journal=0, title="Net")
    for step in range(1, 6):
        logger.log_metrics(
            {
                "train/time/step": 0.25,
                "train/time/data": 0.75,
                "cpu/memory": 425.9e6,
                "lr": 2e-5,
            },
            step,
        )
    append_event(tmp_path, "checkpoint", 3, text="checkpoints/step-00000003")
    append_event(tmp_path, "end", 5, stage="fit", status="exited")
    tab = show(render(described(tmp_path)))
    assert tab.locator(".signs span").all_inner_texts() == ["▲ checkpoint"]
    assert tab.locator(".badge.exited").inner_text() == "exited"
    titles = tab.locator(".chart h3").all_inner_texts()
    assert sorted(titles) == [
        "cpu/memory",
        "lr",
        "steps per second",
        "time: the share of each part",
    ]
    legend = tab.locator(".chart", has_text="share of each part").locator(".legend")
    assert legend.locator("button").all_inner_texts() == [
        "train/time/step\n0.25",
        "train/time/data\n0.75",
    ]
    assert "425.9 M" in tab.locator(".chart", has_text="cpu/memory").inner_text()
    assert "2.000e-5" in tab.locator(".chart", has_text="lr").inner_text()


def test_several_runs_are_compared(show, tmp_path):
    runs = [*make_run(tmp_path / "a"), *make_run(tmp_path / "b", restarts=False)]
    runs[1]["configuration"][0][2] = 0.2
    tab = show(render(runs))
    assert tab.locator("h1").inner_text() == "2 runs"
    first = tab.locator(".chart").first
    assert first.locator(".legend button").all_inner_texts()[0].startswith("a")
    tab.locator(".runs input").first.uncheck()
    row = tab.locator("tr.differs")
    tab.locator("details", has_text="Configuration").last.evaluate(
        "(details) => { details.open = true; }"
    )
    assert row.all_inner_texts() == ["Trainer\tlr\t0.1\t0.2"]


def test_a_hang_links_its_stacks_and_curves_are_over_tokens(show, tmp_path):
    logger = JSONLLogger(tmp_path, "", "")
    append_event(tmp_path, "start", 0, stage="fit", run="r", journal=0, title="Net")
    for step in range(1, 6):
        logger.log_metrics(
            {"loss": 1 / step}, step, {"samples": 2 * step, "tokens": 100 * step}
        )
    found = {
        "headline": "rank 1 hangs",
        "text": "rank 1 hangs\n  at step 5",
        "stacks": "hang-5",
    }
    append_event(tmp_path, "end", 5, stage="fit", status="hung", exception=found)
    tab = show(render(described(tmp_path)))
    assert tab.locator(".badge").inner_text() == "hung"
    assert tab.locator(".failure b").inner_text() == "rank 1 hangs"
    assert tab.locator(".failure a").get_attribute("href") == "./hang-5/"
    assert tab.locator("#axis option").all_inner_texts() == [
        "steps",
        "time",
        "samples",
        "tokens",
    ]
    place = tab.locator(".chart").first.locator(".u-over").bounding_box()
    for kind, text in (("samples", "6 samples"), ("tokens", "300 tokens")):
        tab.select_option("#axis", kind)
        tab.mouse.move(place["x"] + place["width"] / 2, place["y"] + 50)
        assert tab.locator(".chart").first.locator("h3 span").inner_text() == text
        tab.mouse.move(0, 0)
