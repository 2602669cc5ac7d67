"""File systems that a test mounts, and that go with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(directory: Path, *arguments: object) -> Iterator[None]:
    """Inside, what ``mount ARGUMENTS DIRECTORY`` mounts; the test is skipped where that does not work."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting needs root on Linux")
    directory.mkdir(exist_ok=True)
    done = subprocess.run(
        ["mount", *map(str, arguments), str(directory)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)
