"""Python calls, counted: exact, and the same on every machine."""

import gc
import sys


def python_calls(run):
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    # What other tests left to the collector must not be collected, and counted, meanwhile.
    gc.collect()
    gc.disable()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls
