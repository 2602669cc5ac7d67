"""Type checkers of a user find our types (`py.typed`), and no fault in ordinary code: mypy and pyright, both strict."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WRONG = "\n\nwrong: str = Trainer().global_step\n"
PYRIGHT = shutil.which("pyright")

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with an environment in which the package is installed as a wheel installs it."""
    made = tmp_path_factory.mktemp("project")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", made / "environment"],
        check=True,
        timeout=100,
    )
    (site,) = (made / "environment").glob("lib/python3*/site-packages")
    (site / "trainer_kit").symlink_to(ROOT / "trainer_kit")
    behind = [
        path
        for path in sys.path
        if Path(path).name in {"site-packages", "dist-packages"}
    ]
    (site / "behind.pth").write_text("\n".join(behind) + "\n")
    text = (ROOT / "tests" / "typing_user.py").read_text(encoding="utf-8")
    (made / "right.py").write_text(text, encoding="utf-8")
    (made / "wrong.py").write_text(text + WRONG, encoding="utf-8")
    settings = {
        "typeCheckingMode": "strict",
        "pythonVersion": "3.10",
        "venvPath": ".",
        "venv": "environment",
    }
    (made / "pyrightconfig.json").write_text(json.dumps(settings))
    return made


def check(*command: str | Path, home: Path) -> str:
    done = subprocess.run(
        command, cwd=home, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


@pytest.mark.timeout(650)
def test_mypy(home: Path) -> None:
    python = home / "environment" / "bin" / "python"
    mypy = (
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--python-executable",
        python,
        "--python-version",
        "3.10",
    )
    assert (
        check(*mypy, "right.py", home=home)
        == "Success: no issues found in 1 source file\n"
    )
    printed = check(*mypy, "wrong.py", home=home)
    assert "Found 1 error in 1 file" in printed, (
        "without py.typed every type is Any, and nothing is found"
    )
    assert 'expression has type "int", variable has type "str"' in printed


@pytest.mark.timeout(650)
@pytest.mark.skipif(
    PYRIGHT is None, reason="pyright is not installed (npm install --global pyright)"
)
def test_pyright(home: Path) -> None:
    assert PYRIGHT is not None
    assert check(PYRIGHT, "right.py", home=home).startswith("0 errors, 0 warnings")
    printed = check(PYRIGHT, "wrong.py", home=home)
    assert '"int" is not assignable to "str"' in printed
    assert "1 error, 0 warnings" in printed
