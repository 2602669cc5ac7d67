"""Imports of modules that do not exist: an import explains what to use, a question about them is answered with None."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import trainer_kit


@pytest.mark.parametrize(
    "name", ["trainer_kit.unknown", "trainer_kit.callbacks.unknown"]
)
def test_find_spec_of_an_unknown_module_is_none(name: str) -> None:
    assert find_spec(name) is None
    for finder in sys.meta_path:  # as pytest asks
        assert finder.find_spec(name, trainer_kit.__path__) is None


def test_find_spec_of_a_known_path_is_its_spec() -> None:
    for name in ("trainer_kit.callbacks", "trainer_kit.utilities.types"):
        spec = find_spec(name)
        assert spec is not None
        assert spec.name == name


def test_an_import_of_an_unknown_module_suggests_a_fix() -> None:
    for attempt in (
        lambda: import_module("trainer_kit.callbaks"),
        lambda: exec("import trainer_kit.callbaks"),
    ):
        with pytest.raises(
            ModuleNotFoundError, match=r"fix: +did you mean 'callbacks'\?"
        ):
            attempt()
    with pytest.raises(ImportError, match=r"fix: +did you mean 'EarlyStopping'\?"):
        exec("from trainer_kit.callbacks import EarlyStoping")


@pytest.mark.slow
def test_pytest_collects_the_docstrings_of_one_room() -> None:
    root = Path(trainer_kit.__file__).parents[1]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "--doctest-modules",
            "trainer_kit/step",
            "--collect-only",
            "-q",
        ],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout
    assert "trainer_kit/step/" in done.stdout


def test_a_trainer_does_not_import_fsdp() -> None:
    """Few runs have it, and its import is that of DTensor too."""
    program = (
        "import sys; from trainer_kit import Trainer; "
        "print([name for name in ('fsdp', 'tensor') if f'torch.distributed.{name}' in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
