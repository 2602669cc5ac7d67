"""Deprecated things warn once, at the caller's line, and are removed in the version that they name."""

import ast
import warnings
from pathlib import Path

import pytest
from lightning_utilities.core.rank_zero import rank_zero_only
from packaging.version import Version

import trainer_kit as tk
from trainer_kit.core.deprecation import Deprecation

PACKAGE = Path(tk.__file__).parent


def old_function(deprecation):
    deprecation.warn()


def test_one_warning_names_the_caller_and_what_to_write():
    deprecation = Deprecation(
        what="old_function", since="0.2.0", gone_in="0.4.0", fix="call new_function"
    )
    with pytest.warns(FutureWarning) as caught:
        old_function(deprecation)
    old_function(deprecation)  # warnings are errors in tests
    (warning,) = caught
    assert warning.filename == __file__
    assert str(warning.message).splitlines() == [
        "old_function is deprecated",
        "  found: a use of it; 0.4.0 removes it, versions since 0.2.0 warn",
        "  fix:   call new_function",
    ]


def test_python_shows_it_without_a_filter():
    """As a user's program sees it, which sets no filters, where a library of theirs calls the deprecated thing."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        for category in (
            DeprecationWarning,
            PendingDeprecationWarning,
            ImportWarning,
            ResourceWarning,
        ):
            warnings.simplefilter("ignore", category)  # Python's defaults
        old_function(Deprecation(what="x", since="0.2.0", gone_in="0.4.0", fix="y"))
    assert len(caught) == 1


def test_other_ranks_are_silent(monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1, raising=False)
    old_function(Deprecation(what="x", since="0.2.0", gone_in="0.4.0", fix="y"))


def written(text):
    """The versions of each Deprecation that a source makes."""
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).rpartition(".")[2] == "Deprecation"
        ):
            yield {
                keyword.arg: ast.literal_eval(keyword.value)
                for keyword in node.keywords
            }


def overdue(text, today):
    """What the version ``today`` must not have any more, and what has less notice than two minor versions."""
    late = []
    for made in written(text):
        since, gone = Version(made["since"]), Version(made["gone_in"])
        if (
            gone <= today
            or (gone.major == since.major and gone.minor < since.minor + 2)
            or gone.major < since.major
        ):
            late.append(made["what"])
    return late


def test_nothing_outlives_the_version_that_removes_it():
    text = (
        'OLD = Deprecation(what="old", since="0.2.0", gone_in="0.4.0", fix="use new")'
    )
    assert overdue(text, Version("0.3.9")) == []
    assert overdue(text, Version("0.4.0")) == ["old"]
    assert overdue(text.replace("0.4.0", "0.3.0"), Version("0.2.0")) == ["old"], (
        "too little notice"
    )
    left = {
        str(path): late
        for path in PACKAGE.rglob("*.py")
        if (late := overdue(path.read_text(encoding="utf-8"), Version(tk.__version__)))
    }
    assert not left, "remove these, or move their version with a line in the changelog"
