"""Code that imports from a documented module path of an earlier version still works."""

from __future__ import annotations

import json
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

import trainer_kit as tk
from trainer_kit.compat.former_paths import PATHS


@pytest.mark.parametrize("path", PATHS)
def test_every_name_of_a_former_path_is_the_one_of_its_new_module(path):
    former = import_module(f"trainer_kit.{path}")
    for name, home in PATHS[path].items():
        module, _, attribute = home.partition(":")
        expected = getattr(import_module(f"trainer_kit.{module}"), attribute)
        assert getattr(former, name) is expected


def test_a_former_path_is_not_suggested():
    with pytest.raises(AttributeError) as error:
        _ = tk.Verification
    assert "planning" not in str(error.value)


def test_the_names_of_0_2_0_are_where_they_were() -> None:
    """A name that moves needs a line in `former_paths`; the list of those that are gone holds internal ones alone."""
    text = Path(__file__).with_name("names_of_0_2_0.json").read_text()
    listed = json.loads(text)
    gone: dict[str, str] = {}
    for path, names in listed["names"].items():
        module = None
        with suppress(ModuleNotFoundError):
            module = import_module(f"trainer_kit.{path}".removesuffix("."))
        absent = [name for name in names.split() if not hasattr(module, name)]
        if absent:
            gone[path] = " ".join(absent)
    assert gone == listed["internal names that are gone"]


def test_lightnings_scheduler_has_its_former_path() -> None:
    from trainer_kit.commands._plateau import ReduceLROnPlateau
    from trainer_kit.compat import lightning_utilities

    assert lightning_utilities.ReduceLROnPlateau is ReduceLROnPlateau
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = lightning_utilities.Nothing
