"""The first file of a rank: the script runs as if started alone, and its end is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import trainer_kit.launch.bootstrap as bootstrap


def _rank(
    *words: str, options: tuple[str, ...] = (), **environ: str
) -> subprocess.CompletedProcess[str]:
    """Start a rank as the agent does; nothing here imports torch."""
    return subprocess.run(
        [sys.executable, *options, str(bootstrap.__file__), *words],
        env={
            **os.environ,
            "TRAINER_KIT_AGENT_PID": str(os.getpid()),
            "TORCHELASTIC_ERROR_FILE": str(Path.cwd() / "error.json"),
            "RANK": "3",
            **environ,
        },
        capture_output=True,
        text=True,
        check=False,
    )


def _report() -> dict[str, Any]:
    message: dict[str, Any] = json.loads(Path("error.json").read_text())["message"]
    return message["extraInfo"]


def _script(text: str) -> str:
    Path("train.py").write_text(text)
    return "train.py"


def test_nothing_is_imported_before_the_script() -> None:
    ran = _rank(
        _script(
            "import sys; print(sorted(m for m in sys.modules if m.startswith(('torch', 'trainer_kit'))))"
        )
    )
    assert ran.stdout == "['trainer_kit.launch.bootstrap']\n"


@pytest.mark.parametrize("options", [(), ("-P",)])
def test_a_script_finds_its_neighbors(options: tuple[str, ...]) -> None:
    if options and sys.version_info < (3, 11):
        pytest.skip("-P is new in Python 3.11")
    Path("neighbor.py").touch()
    Path("sub").mkdir()
    ran = _rank(_script("import neighbor"), options=options, PYTHONPATH="")
    assert (ran.returncode == 0) is (not options)


def test_a_module_and_a_directory_run() -> None:
    Path("package").mkdir()
    Path("package/__init__.py").touch()
    Path("package/job.py").write_text(
        "import sys; print(__name__, __spec__.name, sys.argv[1:], __package__)"
    )
    Path("package/__main__.py").write_text("import sys; print(__name__, sys.argv[1:])")
    assert (
        _rank("-m", "package.job", "-x").stdout
        == "__main__ package.job ['-x'] package\n"
    )
    assert _rank("-m", "package", "1").stdout == "__main__ ['1']\n"
    assert _rank("package", "2").stdout == "__main__ ['2']\n"


def test_an_exception_is_reported_and_not_printed() -> None:
    ran = _rank(_script("def inner():\n    raise ValueError('bad')\ninner()"))
    assert (ran.returncode, ran.stderr) == (1, "")
    told = _report()
    assert (told["type"], told["text"], told["rank"], told["where"]) == (
        "ValueError",
        "bad",
        3,
        "",
    )
    assert (
        told["py_callstack"].splitlines()[1].endswith('train.py", line 3, in <module>')
    )
    # torch's own agent reads it as well
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file="error.json")
    assert failure.message["message"] == "ValueError: bad"
    assert failure.timestamp == int(told["timestamp"]) == told["time_ns"] // 10**9


def test_a_hook_of_the_script_is_called_too() -> None:
    ran = _rank(_script("import sys\nsys.excepthook = lambda *a: print('mine')\n1 / 0"))
    assert (ran.stdout, _report()["type"]) == ("mine\n", "ZeroDivisionError")


def test_errors_without_a_printable_message_are_reported() -> None:
    ran = _rank(
        _script(
            "from trainer_kit.launch.bootstrap import report_errors\n"
            "report_errors(lambda: 'step 7')\n"
            "class Odd(Exception):\n    def __str__(self): raise TypeError('no')\n"
            "raise Odd"
        )
    )
    assert ran.returncode == 1
    told = _report()
    assert told["type"] == "Odd"
    assert "cannot be printed" in told["text"]


def test_an_error_of_this_library_is_reported_with_the_users_frames_only() -> None:
    script = _script(
        "import trainer_kit.checkpoint as c\ndef load():\n    c.read_checkpoint('nope')\nload()"
    )
    _rank(script, PYTHONPATH=str(Path(__file__).parents[2]))
    frames = [
        line
        for line in _report()["py_callstack"].splitlines()
        if line.lstrip().startswith("File ")
    ]
    assert len(frames) == 2
    assert all("train.py" in frame for frame in frames)
    assert _report()["type"] == "trainer_kit.core.errors.MissingCheckpointError"
    assert _report()["text"].startswith(
        "nope: this path contains no checkpoint\n  found: no checkpoint is in "
    )


@pytest.mark.parametrize(
    ("code", "reported"),
    [("sys.exit(0)", False), ("sys.exit()", False), ("sys.exit(3)", True)],
)
def test_exits(code: str, reported: bool) -> None:
    ran = _rank(_script(f"import sys; {code}"))
    assert ran.returncode == (3 if reported else 0)
    assert Path("error.json").exists() is reported
    if reported:
        assert (_report()["type"], _report()["exit_code"]) == ("SystemExit", 3)


def test_a_negative_exit_code_becomes_the_systems_code() -> None:
    assert (
        _rank(_script("import sys; sys.exit(-1)")).returncode
        == _report()["exit_code"]
        == 255
    )


def test_an_interrupt_is_not_an_error() -> None:
    ran = _rank(_script("raise KeyboardInterrupt"))
    assert ran.stderr == ""
    assert not Path("error.json").exists()


def test_without_a_place_to_write_the_exception_is_printed() -> None:
    ran = _rank(
        _script("raise ValueError('bad')"),
        TORCHELASTIC_ERROR_FILE="/nowhere/error.json",
    )
    assert ran.stderr.endswith("ValueError: bad\n")


def test_under_torchs_agent_an_exception_is_reported_and_printed() -> None:
    code = "from trainer_kit.launch import report_errors; report_errors(lambda: 'step 2'); raise ValueError('bad')"
    environ = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "TORCHELASTIC_ERROR_FILE": "error.json",
    }
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stderr.endswith("ValueError: bad\n")
    assert (_report()["text"], _report()["where"]) == ("bad", "step 2")


def test_a_launcher_that_ends_all_ranks_does_not_cut_the_exit_handlers_of_one_that_fails() -> (
    None
):
    script = _script(
        "import atexit, os, signal\n"
        "def write():\n    os.kill(os.getpid(), signal.SIGTERM)\n    print('the page')\n"
        "atexit.register(write)\n"
        "1 / 0"
    )
    ran = _rank(script)
    assert (ran.returncode, ran.stdout) == (1, "the page\n")


def test_a_rank_that_has_a_handler_for_the_end_of_the_launch_keeps_it() -> None:
    script = _script(
        "import atexit, os, signal\n"
        "signal.signal(signal.SIGTERM, lambda *a: print('mine'))\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))\n"
        "1 / 0"
    )
    assert _rank(script).stdout == "mine\n"


def test_a_rank_without_its_agent_ends() -> None:
    ran = _rank(_script("print('ran')"), TRAINER_KIT_AGENT_PID="1")
    assert (ran.returncode, ran.stdout) == (1, "")


def test_without_an_agent_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    hook = sys.excepthook
    bootstrap.report_errors()
    assert sys.excepthook is hook
