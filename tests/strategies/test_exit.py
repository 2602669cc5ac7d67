"""A process that is done ends only when gloo's threads have let go of the last collective."""

from __future__ import annotations

import ctypes
import sys
import threading
import time

import pytest

from trainer_kit.strategies.process_group import _wait_for_gloo_threads

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="threads are looked at in /proc"
)


@pytest.mark.slow
@pytest.mark.parametrize(("busy", "least", "most"), [(0.3, 0.3, 3.0), (4.0, 1.0, 3.5)])
def test_the_end_waits_for_a_busy_thread_of_gloo(
    busy: float, least: float, most: float
) -> None:
    """Such a thread, late by a few scheduler ticks, ended a finished rank with 134 about once in a thousand runs."""
    working, done = threading.Event(), threading.Event()

    def collective() -> None:
        assert (
            ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop", 0, 0, 0) == 0
        )  # PR_SET_NAME
        end = time.monotonic() + busy
        working.set()
        while time.monotonic() < end:
            sum(range(100_000))
        done.wait()

    thread = threading.Thread(target=collective)
    thread.start()
    working.wait()
    start = time.monotonic()
    _wait_for_gloo_threads()
    assert least - 0.05 <= time.monotonic() - start <= most
    done.set()
    thread.join()
