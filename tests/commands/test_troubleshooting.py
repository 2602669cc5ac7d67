"""``trainer-kit explain`` prints the section of the troubleshooting page that an error names."""

from __future__ import annotations

import pickle

import pytest
from click.testing import CliRunner

from trainer_kit.commands.main import main
from trainer_kit.commands.troubleshooting import find_section
from trainer_kit.core import errors
from trainer_kit.core.collective_errors import shared_error

NAMES = [
    name
    for name in errors.__all__
    if getattr(getattr(errors, name), "see", None) is not None
]


@pytest.mark.parametrize("name", NAMES)
def test_a_section_that_an_error_names_exists(name: str) -> None:
    see = getattr(errors, name).see
    section = find_section(see)
    assert section is not None
    assert len(section.splitlines()) > 2
    assert find_section(name) == section


def test_explain_prints_the_section() -> None:
    assert len(NAMES) >= 4
    for word in ("NonFiniteError", "troubleshooting#the-loss-is-nan"):
        done = CliRunner().invoke(main, ["explain", word])
        assert done.exit_code == 0, done.output
        assert done.output.startswith("The loss is NaN\n")
        assert "NaNGuard" in done.output
        assert "](" not in done.output
    done = CliRunner().invoke(main, ["explain", "OutOfMemoryError"])
    assert done.output.startswith("CUDA out of memory\n")


def test_explain_takes_the_class_as_a_traceback_prints_it() -> None:
    section = find_section("trainer_kit.core.errors.NonFiniteError")
    assert section == find_section("NonFiniteError")
    assert find_section("torch.OutOfMemoryError") == find_section("OutOfMemoryError")


def test_explain_describes_an_error_that_has_no_section() -> None:
    for word in ("DataError", "trainer_kit.core.errors.DataError"):
        done = CliRunner().invoke(main, ["explain", word])
        assert done.output.startswith("DataError\n\nLoaders, samplers and batch sizes")


def test_only_ranks_that_disagree_name_the_section_about_them() -> None:
    assert "#ranks-disagree" in str(errors.RankError("different calls"))
    failed = shared_error(KeyError("x"), 1)
    again = pickle.loads(pickle.dumps(failed))
    for error in (failed, again):
        assert "see:" not in str(error)
        assert error.see is None


def test_a_script_is_still_a_script() -> None:
    done = CliRunner().invoke(main, ["explain", "train.py"])
    assert done.output.startswith("configuration file:")
    assert find_section("train.py") is None


def test_a_message_ends_with_its_section() -> None:
    text = str(errors.NonFiniteError("the loss is not finite", fix="clip"))
    assert text.splitlines()[-1] == "  see:   troubleshooting#the-loss-is-nan"
