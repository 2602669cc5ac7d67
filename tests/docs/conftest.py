"""The site, built once for the tests that look at it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def built_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``make site VERSION=0.9`` builds from a copy of the sources, without a warning: the directory 0.9."""
    if not (ROOT / ".venv-site" / ".stamp").exists():
        pytest.skip(
            "`make site` was never run here: it makes .venv-site, which has zensical"
        )
    directory = tmp_path_factory.mktemp("site")
    for name in ("Makefile", "mkdocs.yml"):
        shutil.copy2(ROOT / name, directory)
    shutil.copytree(ROOT / "docs", directory / "docs")
    for name in (".venv-site", "trainer_kit"):
        (directory / name).symlink_to(ROOT / name)
    built = subprocess.run(
        ["make", "site", "--old-file", ".venv-site/.stamp", "VERSION=0.9"],
        cwd=directory, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    output = built.stdout + built.stderr
    assert built.returncode == 0, output
    assert "griffe" not in output, output
    assert "arning" not in output, output
    return directory / "site" / "0.9"
