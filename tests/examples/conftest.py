"""How the tests of examples and tutorials run a script."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.programs import Programs

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
Run = Callable[..., str]


@pytest.fixture
def run(programs: Programs) -> Run:
    """What an example prints on stdout; it writes into the working directory."""

    def call(example: str, *flags: str) -> str:
        environment = os.environ | {"PYTHONWARNINGS": "error"}
        script = EXAMPLES / f"{example}.py"
        ran = programs.run(
            script,
            *flags,
            environment=environment,
            timeout=115,
            anew="--devices" in flags,
        )
        assert ran.returncode == 0, (
            f"exit code {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
        )
        return ran.stdout

    return call
