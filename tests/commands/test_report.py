"""``trainer-kit report``: one page over runs."""

from __future__ import annotations

import stat
import threading
import webbrowser

from click.testing import CliRunner

from tests.report.pages import data_of
from trainer_kit.commands.main import main
from trainer_kit.loggers import JSONLLogger
from trainer_kit.report.events import append_event


def call(*arguments):
    result = CliRunner().invoke(main, ["report", *map(str, arguments)])
    return result.exit_code, result.output


def make_run(directory, loss):
    JSONLLogger(directory, "", "").log_metrics({"loss": loss}, 3)
    append_event(
        directory, "start", 0, stage="fit", run=directory.name, journal=0, title="Net"
    )


def test_one_run_and_several(tmp_path, monkeypatch):
    make_run(tmp_path / "a", 1.0)
    make_run(tmp_path / "b", 2.0)
    assert call(tmp_path / "a") == (0, f"{tmp_path / 'a' / 'report.html'}\n")
    assert stat.S_IMODE((tmp_path / "a" / "report.html").stat().st_mode) == 0o600
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    assert call(tmp_path / "a", tmp_path / "b", "--open") == (0, "report.html\n")
    assert opened == [(tmp_path / "report.html").as_uri()]
    data = data_of(tmp_path / "report.html")
    assert [run["name"] for run in data["runs"]] == ["a", "b"]
    assert [run["series"][0]["last"] for run in data["runs"]] == [1.0, 2.0]
    assert data["refresh"] == 0


def test_a_watched_run_is_written_until_it_ends(tmp_path, monkeypatch):
    make_run(tmp_path / "a", 1.0)
    pages, before = [], set(threading.enumerate())

    def end_after(seconds):
        pages.append((tmp_path / "page.html").read_text())
        append_event(tmp_path / "a", "end", 3, stage="fit", status="finished")

    monkeypatch.setattr("trainer_kit.commands.report.time.sleep", end_after)
    assert (
        call(tmp_path / "a", "--watch", "--every", 5, "-o", tmp_path / "page.html")[0]
        == 0
    )
    (while_running,) = pages
    assert '<meta http-equiv="refresh" content="5">' in while_running
    last = tmp_path / "page.html"
    assert 'http-equiv="refresh"' not in last.read_text()
    assert data_of(last)["runs"][0]["status"] == "finished"
    assert set(threading.enumerate()) <= before


def test_mistakes(tmp_path):
    (tmp_path / "none").mkdir()
    code, output = call(tmp_path / "none")
    assert (code, "contains no run" in output) == (2, True)
    make_run(tmp_path / "a", 1.0)
    code, output = call(tmp_path / "a", "-o", tmp_path / "no" / "page.html")
    assert (code, "could not be written" in output, "--output" in output) == (
        2,
        True,
        True,
    )
