"""What a watchdog leaves behind: nothing, also where its store is gone before it."""

from __future__ import annotations

import threading
import time

import pytest

from trainer_kit.hang.hang_timeout import chosen_timeout
from trainer_kit.hang.hang_watchdog import HangWatchdog


def watchdog(size=1, timeout=0.2, step=lambda: 9):
    return HangWatchdog(
        0, size, timeout, lambda: (step(), None), lambda: None, lambda text: None
    )


def test_a_stopped_watchdog_leaves_no_thread():
    watched = watchdog(timeout=60.0)
    watched.stop()
    assert not any(thread.name == "hang watchdog" for thread in threading.enumerate())


def test_a_forgotten_watchdog_leaves_no_thread():
    watched = watchdog(timeout=60.0)
    del watched
    time.sleep(0.3)
    assert not any(thread.name == "hang watchdog" for thread in threading.enumerate())


def test_first_steps_have_more_time():
    """This process would end, were they not excepted."""
    watched = watchdog()
    time.sleep(0.6)
    watched.stop()


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("5min", 300.0),
        (2, 2.0),
        ("1.5", 1.5),
        (False, float("inf")),
        ("off", float("inf")),
    ],
)
def test_timeouts(given, seconds):
    assert chosen_timeout(given) == seconds


def test_a_wrong_timeout_is_refused():
    with pytest.raises(ValueError, match="hang_timeout must be a duration"):
        chosen_timeout("soon")
