"""How the workers of a loader begin, and that they end."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_kit.data.workers import checked_context

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
def test_starting_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("3\n", "")


STANDING_STILL = """
import gc, json, multiprocessing, os, sys, threading, time, warnings
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from trainer_kit.core.errors import LaunchError
from trainer_kit.data import Feed, workers

workers._PATIENCE = (1.0, 1.0, 30.0)
forks, still = 0, range(0)
held, forked, here = threading.Event(), threading.Event(), os.getpid()

def count():
    global forks
    forks += 1

def stand_still():
    while os.getppid() == here and forks in still:
        time.sleep(0.01)

os.register_at_fork(before=count, after_in_child=stand_still, after_in_parent=forked.set)

def hold_the_list_of_threads():
    # A collection in the middle of reading the list is where this thread can be stopped with the list's lock.
    own, collections = threading.get_ident(), 0
    def stop(phase, info):
        nonlocal collections
        if threading.get_ident() == own and phase == "start" and not held.is_set():
            collections += 1
            if collections == 3:
                held.set()
                forked.wait()
    gc.collect()
    gc.callbacks.append(stop)
    gc.set_threshold(1)
    sys._current_frames()
    gc.callbacks.remove(stop)
    gc.set_threshold(700)

def read(kind, **options):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        feed = Feed(kind(list(range(8)), batch_size=2, num_workers=2, **options))
        batches = [batch.tolist() for batch in feed.epoch(0)]
    assert batches == [[0, 1], [2, 3], [4, 5], [6, 7]], batches
    return [text.partition(" within")[0] for one in said if "worker" in (text := str(one.message))]

if __name__ == "__main__":
    rest = threading.Event()
    for _ in range(6):
        threading.Thread(target=rest.wait).start()
    holder = threading.Thread(target=hold_the_list_of_threads)
    holder.start()
    was_held = held.wait(2)
    result = [was_held, read(DataLoader)]
    holder.join()
    rest.set()
    still = range(forks + 2, forks + 4)  # the second of the workers, twice
    result += [read(StatefulDataLoader, multiprocessing_context="fork")]
    still, workers._PATIENCE = range(forks + 1, forks + 100), (0.1, 0.1)
    try:
        read(DataLoader)
    except LaunchError as error:
        result += [str(error).splitlines()[0]]
    result += [len(multiprocessing.active_children()), open(f"/proc/self/task/{here}/children").read().split()]
    print(json.dumps(result))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_worker_that_hangs_after_its_fork_is_forked_again(tmp_path: Path) -> None:
    """First of the interpreter's own lock, as where a library's thread entered Python in the moment of the fork."""
    (tmp_path / "script.py").write_text(STANDING_STILL)
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    held, of_the_lock, of_a_hook, at_last, begun, left = json.loads(done.stdout)
    again = "a worker of the loader did not start"
    mended = sys.version_info >= (
        (3, 11, 10) if sys.version_info >= (3, 11) else (3, 10, 15)
    )
    assert of_the_lock == ([again] if held and not mended else [])
    assert of_a_hook == [again] * 2
    assert (at_last, begun, left) == (
        "a worker process of the loader does not start",
        0,
        [],
    )


def test_a_context_without_fork_is_kept() -> None:
    given = multiprocessing.get_context("spawn")
    assert checked_context(given) is given
