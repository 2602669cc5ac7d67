"""Code that imports from a documented module path of an earlier version still works."""

from __future__ import annotations

from importlib import import_module

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
