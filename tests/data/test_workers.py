"""How the workers of a loader begin, and that they end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import ctypes, os, signal, sys, time
from torch.utils.data import DataLoader
from trainer_kit.data import Feed, workers

workers._GRACE = 0.2
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # orphans become this process's children
if os.fork() == 0:
    feed = Feed(DataLoader(list(range(8)), num_workers=2, worker_init_fn=lambda number: time.sleep(1)))
    batches = iter(feed.epoch(0))
    os.kill(os.getpid(), signal.SIGKILL)  # while both of them begin
ended, deadline = [], time.monotonic() + 30
while time.monotonic() < deadline:
    try:
        ended += [os.waitpid(-1, os.WNOHANG)[0]]
    except ChildProcessError:
        break
    time.sleep(0.01)
print(len([pid for pid in ended if pid]))
"""


@pytest.mark.slow
def test_workers_whose_parent_is_killed_while_they_begin_end_too(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("3\n", "")
