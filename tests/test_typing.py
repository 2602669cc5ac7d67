"""Type checkers and editors find our types, no fault in ordinary code, and each of a program's mistakes.

mypy runs here, and pyright, which is also the engine of Pylance, where `make test-editors` has installed it.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WRONG = "\n\nwrong: str = Trainer().global_step\n"
PYRIGHT = shutil.which("pyright") or shutil.which(
    "pyright", path=ROOT / ".venv-editors" / "node_modules" / ".bin"
)

pytestmark = pytest.mark.long


def run(*command: str | Path, directory: Path) -> str:
    done = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the build reads: building from here writes nothing beside the sources."""
    directory = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE", "trainer_kit"):
        (directory / name).symlink_to(ROOT / name)
    return directory


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Path:
    """A user's project, in whose environment the checkout is installed as ``pip install -e`` does it."""
    project = tmp_path_factory.mktemp("project")
    environment = project / "environment"
    venv = (sys.executable, "-m", "venv", "--without-pip", environment)
    assert not run(*venv, directory=project)
    (site,) = environment.glob("lib/python3*/site-packages")
    code = (
        f"from setuptools import build_meta; build_meta.build_editable({str(site)!r})"
    )
    run(sys.executable, "-c", code, directory=checkout)
    (wheel,) = site.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    packages = [
        path
        for path in sys.path
        if Path(path).name in {"site-packages", "dist-packages"}
    ]
    (site / "zz_dependencies.pth").write_text("\n".join(packages) + "\n")
    text = (ROOT / "tests" / "typing_user.py").read_text(encoding="utf-8")
    (project / "right.py").write_text(text, encoding="utf-8")
    (project / "wrong.py").write_text(text + WRONG, encoding="utf-8")
    shutil.copy(ROOT / "tests" / "typing_editor.py", project / "mistakes.py")
    settings = {
        "typeCheckingMode": "strict",
        "pythonVersion": "3.10",
        "venvPath": ".",
        "venv": "environment",
    }
    (project / "pyrightconfig.json").write_text(json.dumps(settings))
    return project


def marked(program: Path) -> set[int]:
    """The numbers of the lines that end in ``# error``."""
    lines = program.read_text(encoding="utf-8").splitlines()
    return {
        number for number, line in enumerate(lines, 1) if line.endswith("  # error")
    }


def test_an_editable_installation_is_a_path(home: Path, checkout: Path) -> None:
    """A type checker reads directories in ``.pth`` files; it does not run the import hooks that they may name."""
    (file,) = home.glob("environment/lib/python3*/site-packages/__editable__*.pth")
    assert file.read_text(encoding="utf-8").strip() == str(checkout)


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
    printed = run(*mypy, "right.py", directory=home)
    assert printed == "Success: no issues found in 1 source file\n"
    printed = run(*mypy, "wrong.py", directory=home)
    assert "Found 1 error in 1 file" in printed, (
        "without py.typed every type is Any, and nothing is found"
    )
    assert 'expression has type "int", variable has type "str"' in printed
    printed = run(*mypy, "mistakes.py", directory=home)
    lines = re.findall(r"^mistakes\.py:(\d+): error:", printed, re.M)
    assert {int(line) for line in lines} == marked(home / "mistakes.py"), printed


@pytest.mark.timeout(650)
@pytest.mark.skipif(
    PYRIGHT is None, reason="pyright is not installed (make test-editors installs it)"
)
def test_pyright(home: Path) -> None:
    assert PYRIGHT is not None
    assert run(PYRIGHT, "right.py", directory=home).startswith("0 errors, 0 warnings")
    printed = run(PYRIGHT, "wrong.py", directory=home)
    assert '"int" is not assignable to "str"' in printed
    assert "1 error, 0 warnings" in printed
    printed = run(PYRIGHT, "--outputjson", "mistakes.py", directory=home)
    found = json.loads(printed)["generalDiagnostics"]
    lines = {each["range"]["start"]["line"] + 1 for each in found}
    assert lines == marked(home / "mistakes.py"), printed
