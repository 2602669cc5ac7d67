"""The end of an entry point: the first exception arrives unchanged, every cleanup runs."""

from __future__ import annotations

import pytest

from trainer_kit.step.teardown import Teardown


class Boom(Exception): ...


def unwinding(*names, calls, fails=()):
    made = Teardown()

    def call(name):
        def run(error):
            calls.append((name, error))
            if name in fails:
                raise fails[name]

        return run

    made.cleanup += [call(name) for name in names]
    made.failed.append(call("failed"))
    return made


def test_without_an_exception_only_the_cleanup_runs_in_order():
    calls = []
    with unwinding("a", "b", calls=calls):
        pass
    assert calls == [("a", None), ("b", None)]


def test_listeners_get_the_exception_first_and_the_caller_gets_it_unchanged():
    calls, error = [], Boom("first")
    with pytest.raises(Boom) as caught, unwinding("a", "b", calls=calls):
        raise error
    assert caught.value is error
    assert calls == [("failed", error), ("a", error), ("b", error)]
    assert not hasattr(error, "__notes__")


@pytest.mark.parametrize(
    "second", [ValueError("second"), KeyboardInterrupt("second"), SystemExit(3)]
)
def test_an_error_during_teardown_becomes_a_note(second):
    calls, error = [], Boom("first")
    with (
        pytest.raises(Boom) as caught,
        unwinding("a", "b", calls=calls, fails={"a": second}),
    ):
        raise error
    assert caught.value is error
    assert error.__notes__ == [f"while ending: {type(second).__name__}: {second}"]
    assert [name for name, _ in calls] == ["failed", "a", "b"]


def test_a_listener_of_the_exception_may_fail_too():
    calls, error = [], Boom("first")
    with (
        pytest.raises(Boom),
        unwinding("a", calls=calls, fails={"failed": ValueError("second")}),
    ):
        raise error
    assert error.__notes__ == ["while ending: ValueError: second"]
    assert [name for name, _ in calls] == ["failed", "a"]


def test_raising_the_same_exception_again_adds_nothing():
    error = Boom("first")
    with (
        pytest.raises(Boom),
        unwinding("a", calls=[], fails={"a": error, "failed": error}),
    ):
        raise error
    assert not hasattr(error, "__notes__")


def test_a_failing_cleanup_is_raised_without_another_exception():
    calls, first, second = [], Boom("first"), ValueError("second")
    with (
        pytest.raises(Boom) as caught,
        unwinding("a", "b", "c", calls=calls, fails={"a": first, "b": second}),
    ):
        pass
    assert caught.value is first
    assert first.__notes__ == ["while ending: ValueError: second"]
    assert calls == [("a", None), ("failed", first), ("b", first), ("c", first)]


@pytest.mark.parametrize(
    "kind", [KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration]
)
def test_every_kind_of_exception_arrives(kind):
    calls, error = [], kind("first")
    with pytest.raises(kind) as caught, unwinding("a", calls=calls):
        raise error
    assert caught.value is error
    assert [name for name, _ in calls] == ["failed", "a"]
