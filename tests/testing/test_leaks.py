"""The fixtures in ``tests/conftest.py`` fail a test that leaves something behind, and only that one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

SUITE = """
import os, subprocess, sys, threading
import pytest
import torch
import torch.distributed as dist

END = threading.Event()

def test_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)

def test_thread():
    threading.Thread(target=END.wait, name="left", daemon=True).start()

def test_child():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

def test_environment():
    os.environ["LEFT_HERE"] = "1"

def test_defaults():
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(2)

def test_file(request):
    (request.config.rootpath / "lightning_logs").mkdir()

def test_clean(tmp_path):
    END.set()
    assert os.getcwd() == str(tmp_path)
    assert "LEFT_HERE" not in os.environ
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_num_threads() == 1
    open("output", "w").close()
    assert not dist.is_initialized()
"""


def test_each_leak_fails_its_test(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    shutil.copy(Path(__file__).parents[1] / "conftest.py", tmp_path / "tests")
    (tmp_path / "tests" / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-rN",
            "-p",
            "no:cacheprovider",
            "tests",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    told = ran.stdout
    assert "7 passed, 6 errors" in told, told + ran.stderr
    for leak in (
        "a process group",
        "threads ['left']",
        "child processes [",
        "environment variables ['LEFT_HERE']",
        "default dtype: torch.float32 -> torch.float64; deterministic algorithms: False -> True; num_threads: 1 -> 2",
        "files in the checkout ['lightning_logs']",
    ):
        assert told.count(leak) == 1
