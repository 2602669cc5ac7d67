"""The frames of a thread, which are read while it runs."""

from __future__ import annotations

import sys
import threading

from trainer_kit.core.thread_frames import thread_frames


def test_the_frames_are_those_of_python():
    expected = []
    frame = sys._getframe()
    while frame is not None:
        expected.append(frame)
        frame = frame.f_back
    innermost, *outer = thread_frames(threading.get_ident())
    assert innermost.f_code.co_name == "thread_frames"
    assert outer == expected


def test_a_thread_that_has_ended_has_none():
    thread = threading.Thread(target=int)
    assert thread_frames(thread.ident) == []
    thread.start()
    thread.join()
    assert thread_frames(thread.ident) == []


def test_a_walk_does_not_depend_on_what_the_thread_does():
    """Generators come and go at every depth; each walk ends at the thread's first frame."""
    sums = set()
    done = threading.Event()

    def generate(depth):
        if depth:
            yield from generate(depth - 1)
        yield depth

    def work():
        while not done.is_set():
            sums.add(sum(generate(20)))

    thread = threading.Thread(target=work)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        outermost = set()
        for _ in range(20_000):
            frames = thread_frames(thread.ident)
            outermost.add(frames[-1].f_code.co_name)
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert outermost == {"_bootstrap"}
    assert sums == {210}
