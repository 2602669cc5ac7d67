"""Every example in a docstring of trainer_kit runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path

import lightning_utilities.core.imports as lightning_imports
import pytest

import trainer_kit

MODULES = sorted(
    [
        "trainer_kit",
        *(
            module.name
            for module in pkgutil.walk_packages(trainer_kit.__path__, "trainer_kit.")
        ),
    ]
)
HEAVY = {  # import a library for seconds, or train
    "trainer_kit.inference.quantization",
    "trainer_kit.testing.conformance",
    *(f"trainer_kit.precision.{name}" for name in ("bitsandbytes", "torchao")),
}
# Experiment trackers that may not be installed: their loggers run with the stand-ins of tests/loggers.
STAND_INS = Path(__file__).parents[1] / "loggers" / "tracker_stand_ins"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand-ins of the trackers that are not installed, which are forgotten at the end."""
    # Last: a tracker that is installed comes first.
    monkeypatch.setattr(sys, "path", [*sys.path, str(STAND_INS)])
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(STAND_INS)):
            del sys.modules[name]
    # It remembers which packages are there.
    for function in vars(lightning_imports).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in HEAVY else ())
        for name in MODULES
        if not name.endswith("__main__")
    ],
)
def test_docstring_examples(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name.endswith("loggers.wandb"):
        pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    output: list[str] = []
    runner = doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    for example in doctest.DocTestFinder(exclude_empty=True).find(module):
        runner.run(example, out=output.append)
    if runner.failures:
        pytest.fail("".join(output), pytrace=False)


def test_examples_are_found() -> None:
    """The rest would pass on an empty list."""
    finder = doctest.DocTestFinder()
    found = [
        test
        for name in ("core.errors", "core.progress")
        for test in finder.find(load(name))
        if test.examples
    ]
    assert {test.name for test in found} >= {
        "trainer_kit.core.errors.TrainerKitError",
        "trainer_kit.core.progress.Progress",
    }


def load(name: str) -> object:
    return importlib.import_module(f"trainer_kit.{name}")
