"""A pytest plugin: ``@pytest.mark.world_size(n)`` runs a test's body on n gloo ranks.

Switch it on with ``pytest_plugins = ["trainer_kit.testing.pytest_plugin"]`` in the topmost ``conftest.py``. Fixtures
run once, outside the ranks; their values are sent to each, so they must be picklable: ``tmp_path`` and parameters are.
The mark takes ``timeout`` and ``process_group`` as `trainer_kit.testing.run_distributed` does.
"""

from __future__ import annotations

import ast
import pickle
import sys
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trainer_kit.core.errors import LaunchError
from trainer_kit.testing.distributed import run_distributed

__all__ = ["pytest_configure", "pytest_pyfunc_call"]


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    config.addinivalue_line(
        "markers",
        "world_size(n, *, timeout=60, process_group=True): run the body on n gloo ranks",
    )


# Before pytest calls the body in this process.
@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body of a marked test on its ranks."""
    __tracebackhide__ = True
    mark = pyfuncitem.get_closest_marker("world_size")
    if mark is None:
        return None
    if len(mark.args) != 1 or not isinstance(mark.args[0], int):
        raise LaunchError(
            "the mark needs the number of ranks",
            found=f"world_size{mark.args}",
            fix="write world_size(2)",
        )
    # Only the arguments of the body: fixtures that it merely uses need not be picklable.
    argument_names = pyfuncitem._fixtureinfo.argnames
    arguments = _pickled({name: pyfuncitem.funcargs[name] for name in argument_names})
    name = pyfuncitem.originalname
    if pyfuncitem.cls is not None:
        name = f"{pyfuncitem.cls.__qualname__}.{name}"
    module = pyfuncitem.getparent(pytest.Module)
    assert module is not None
    try:
        outcomes = run_distributed(
            _run_body,
            mark.args[0],
            str(pyfuncitem.path),
            module.obj.__name__,
            name,
            arguments,
            **mark.kwargs,
        )
    except BaseException as error:
        # Without the frames of this process: the traceback of the rank is a note of this error.
        raise error.with_traceback(None)  # noqa: B904 - it is the same error
    # A skip on one rank skips the test, as it ends the body there.
    for outcome in filter(None, outcomes):
        status, reason = outcome
        if status == "skip":
            pytest.skip(reason)
        pytest.xfail(reason)
    return True


def _pickled(arguments: Mapping[str, object]) -> dict[str, bytes]:
    __tracebackhide__ = True
    packed = {}
    for name, value in arguments.items():
        try:
            packed[name] = pickle.dumps(value)
        except Exception as error:
            raise LaunchError(
                f"the fixture {name!r} cannot be sent to the ranks",
                found=f"{type(error).__name__}: {error}",
                fix="use it in a test without the mark, or build its value inside the body",
            ) from None
    return packed


def _run_body(
    path: str, module_name: str, name: str, arguments: Mapping[str, bytes]
) -> tuple[str, str] | None:
    """Run the body of the test on a rank. Arguments are unpickled last: they may need the module of the test."""
    # A rank forks from a server that has not imported the module of the test.
    module = sys.modules.get(module_name) or _load(path, module_name)
    *owners, function = name.split(".")
    owner: Any = reduce(getattr, owners, module)
    if owners:
        # A method: as pytest does, on a new object of its class.
        owner = owner()
    body = getattr(owner, function)
    values = {name: pickle.loads(value) for name, value in arguments.items()}
    # pytest's own exceptions cannot be pickled.
    try:
        body(**values)
    except pytest.skip.Exception as outcome:
        return "skip", str(outcome)
    except pytest.xfail.Exception as outcome:
        return "xfail", str(outcome)
    except pytest.fail.Exception as outcome:
        failure = AssertionError(str(outcome))
        raise failure.with_traceback(outcome.__traceback__) from None
    return None


def _load(path: str, name: str) -> ModuleType:
    """Import the module of the test with pytest's assertion rewriting, so that failures show values."""
    from _pytest.assertion.rewrite import rewrite_asserts

    source = Path(path).read_bytes()
    tree = ast.parse(source, filename=path)
    rewrite_asserts(tree, source, path)
    # Before its code runs, which may import it by this name.
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = path
    exec(compile(tree, path, "exec", dont_inherit=True), vars(module))
    return module
