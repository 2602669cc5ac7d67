"""The frames of a thread, which are read while it runs."""

from __future__ import annotations

import sys
import threading

from trainer_kit.hang.position import outer_frames


def walk(frame):
    while frame is not None:
        yield frame
        frame = frame.f_back


def test_the_frames_are_those_of_python():
    frame = sys._getframe()
    assert outer_frames(frame) == list(walk(frame))
    assert outer_frames(None) == []


def test_a_thread_goes_on_while_its_frames_are_read():
    """Generators come and go at every depth; each walk ends at the thread's first frame."""
    numbers = []
    done = threading.Event()

    def generate(depth):
        if depth:
            yield from generate(depth - 1)
        yield depth

    def work():
        while not done.is_set():
            numbers.append(sum(generate(20)))

    thread = threading.Thread(target=work)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        outermost = set()
        for _ in range(20_000):
            frames = outer_frames(sys._current_frames().get(thread.ident))
            if frames:
                outermost.add(frames[-1].f_code.co_name)
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(before)
    assert outermost == {"_bootstrap"}
    assert set(numbers) == {210}
