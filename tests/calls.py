"""Python calls, counted: exact, and the same on every machine."""

import gc
import sys
from types import SimpleNamespace

import pytest


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


def stop_the_clock_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no time pass between the steps of a fit: on a slow machine it looks at its requests after fewer of them."""
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr("trainer_kit.training.settle.time", clock)
