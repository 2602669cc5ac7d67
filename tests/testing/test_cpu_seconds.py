"""CPU seconds are those of the processes below as well, while they run and after they have been waited for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.cpu_seconds import tree_seconds

BURN = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_child_processes_are_counted():
    before = tree_seconds(os.getpid())
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-S", "-c", BURN], **pipes) as process:
        assert process.stdout.readline() == "done\n"
        running = tree_seconds(os.getpid())
        process.communicate("\n")
    assert running - before >= 0.28
    assert tree_seconds(os.getpid()) >= running
